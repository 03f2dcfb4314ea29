"""Gradients of random networks equal those of the plain formula.

A network is a random program: branches and sums, layers that are used twice, operations in place,
hooks on modules and on tensors, checkpointing. Its layers are ours, or, in its twin, the formulas
of the papers in plain torch on the same parameters. Outputs, gradients that are accumulated over
two batches, running means and second derivatives must agree to 1e-10 in float64.

GEOPARAM_NETWORKS is the number of networks, 60 by default.
"""

import copy
import os
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import geoparam as gp
from geoparam import sphere
from geoparam.input_mean_layers import InputMeanLayer

NETWORKS = int(os.environ.get("GEOPARAM_NETWORKS", "60"))
CHANNELS, SIDE = 4, 5
DOUBLE = {"dtype": torch.float64}
CLOSE = {"rtol": 1e-10, "atol": 1e-10}


class Formula(nn.Module):
    """What a layer of ours computes, written out."""

    def __init__(self, layer: Any) -> None:
        super().__init__()
        self.layer = layer
        self.tracked = layer.input_norm if isinstance(layer, gp.GmPLayer) else layer
        self.form = getattr(layer, "input_norm_form", True)

    def weight_and_bias(self) -> tuple[Tensor, Tensor | None]:
        layer = self.layer
        if isinstance(layer, InputMeanLayer):
            return layer.weight, layer.bias
        if layer.coordinates == "angles":
            u = sphere.to_unit(layer.latitude)
        else:
            u = layer.unit / layer.unit.square().sum(dim=1, keepdim=True).sqrt()
        inside = layer.activation is None
        w = (layer.r[:, None] * u if inside else u).view(layer.weight_shape)
        if layer.lam is None:
            return w, None
        return w, layer.r * layer.lam if inside else layer.lam

    def forward(self, x: Tensor) -> Tensor:
        layer, (w, b) = self.layer, self.weight_and_bias()
        if isinstance(self.tracked, gp.norm.TrackedMean):
            mean = x.mean(dim=(0, 2, 3))
            track(self.tracked, mean)
            if self.form == "border":
                x = x - mean.view(-1, 1, 1)
            else:  # a constant input under the whole kernel
                constant = mean.view(1, -1, 1, 1).expand(1, -1, *w.shape[2:])
                shift = F.conv2d(constant, w, groups=layer.groups).flatten()
                b = -shift if b is None else b - shift
        z = F.conv2d(x, w, b, padding=layer.padding, groups=layer.groups)
        if getattr(layer, "activation", None) is None:
            return z
        return layer.r.view(-1, 1, 1) * layer.activation(z)


class NormFormula(nn.Module):
    def __init__(self, norm: gp.InputMeanNorm) -> None:
        super().__init__()
        self.layer = norm

    def forward(self, x: Tensor) -> Tensor:
        mean = x.mean(dim=(0, 2, 3), keepdim=True)
        track(self.layer, mean.flatten())
        bias = getattr(self.layer, "bias", None)
        return x - mean if bias is None else x - mean + bias.view(-1, 1, 1)


@torch.no_grad()
def track(norm: Any, mean: Tensor) -> None:
    norm.num_batches_tracked += 1
    share = max(norm.momentum, 1 / norm.num_batches_tracked.item())
    norm.running_mean += share * (mean - norm.running_mean)


def written_out(layer: nn.Module) -> nn.Module:
    if isinstance(layer, gp.InputMeanNorm):
        return NormFormula(layer)
    return Formula(layer)


def random_layer(choose: random.Random) -> nn.Module:
    kind = choose.choice(["angles", "intrinsic", "angles", "intrinsic", "plain", "imn", "mbn"])
    if kind in ("imn", "mbn"):
        cls = gp.InputMeanNorm if kind == "imn" else gp.MeanOnlyBatchNorm
        return cls(CHANNELS, momentum=choose.choice([0.1, 0.6]), **DOUBLE)
    kernel = choose.choice([1, 3])
    shape: dict[str, Any] = {"padding": kernel // 2, "groups": choose.choice([1, 2, 4])}
    if kind == "plain":
        return gp.InputMeanConv2d(CHANNELS, CHANNELS, kernel, **shape, **DOUBLE)
    layer = gp.GmPConv2d(
        CHANNELS,
        CHANNELS,
        kernel,
        **shape,
        bias=choose.random() < 0.8,
        coordinates=kind if kernel**2 * CHANNELS > shape["groups"] else "angles",
        activation=choose.choice([None, torch.relu, torch.tanh, nn.ReLU(), nn.ReLU(inplace=True)]),
        input_norm=choose.choice([False, True, "bias", "border"]),
        **DOUBLE,
    )
    if layer.fan_in == 1:  # no direction to learn: take another
        return random_layer(choose)
    with torch.no_grad():
        layer.r.normal_()
        if layer.lam is not None:
            layer.lam.normal_()
    return layer


def scale_past_autograd(near: Tensor) -> Tensor:
    y = near * 1
    y.data.mul_(1.5)  # what is written past autograd counts
    return y


def clamp_gradient(near: Tensor) -> Tensor:
    y = near * 1
    if y.requires_grad:
        y.register_hook(lambda g: g.clamp(-0.05, 0.05))
    return y


STEPS: dict[str, Callable[[nn.Module, Tensor, Tensor], Tensor]] = {
    "layer": lambda layer, near, far: layer(near * 1),
    "checkpoint": lambda layer, near, far: checkpoint(layer, near * 1, use_reentrant=False),
    "add": lambda layer, near, far: (near + far) / 2,
    "product": lambda layer, near, far: near * far.tanh(),
    "relu_": lambda layer, near, far: (near * 1).relu_(),
    "scale_": lambda layer, near, far: scale_past_autograd(near),
    "hook": lambda layer, near, far: clamp_gradient(near),
    "cat": lambda layer, near, far: torch.cat([near[:, :2], far[:, 2:]], dim=1),
}


class Network(nn.Module):
    def __init__(self, choose: random.Random) -> None:
        super().__init__()
        self.layers = nn.ModuleList(random_layer(choose) for _ in range(choose.randint(2, 5)))
        kinds = ["layer"] * 5 + list(STEPS)
        self.steps = []
        for made in range(1, choose.randint(5, 10)):
            places = choose.randrange(made), choose.randrange(max(0, made - 2), made)
            self.steps.append((choose.choice(kinds), choose.randrange(len(self.layers)), places))

    def forward(self, x: Tensor) -> Tensor:
        values = [x]
        for kind, index, (far, near) in self.steps:
            values.append(STEPS[kind](self.layers[index], values[near], values[far]))
        return torch.stack(values[1:]).sin().mean(dim=0)


def clamp_past_autograd(module: nn.Module, inputs: tuple, y: Tensor) -> None:
    y.data.clamp_(max=0.5)


def hook_outputs(model: Network, choose: random.Random) -> None:
    """Let some layers have forward hooks, one of which writes in place."""
    for layer in model.layers:
        kind = choose.random()
        if kind < 0.15:
            layer.register_forward_hook(lambda _, inputs, y: y * 0.5)
        elif kind < 0.3:
            layer.register_forward_hook(clamp_past_autograd)


def results(model: Network, batches: list[Tensor]) -> dict[str, Tensor]:
    """Return all that must agree."""
    found: dict[str, Tensor] = {}
    batches = [x.clone().requires_grad_() for x in batches]
    for number, x in enumerate(batches):  # gradients accumulate
        y = model(x)
        found[f"output {number}"] = y
        y.square().sum().backward()
        found[f"input {number}"] = x.grad
    names = {id(p): name.replace("layer.", "") for name, p in model.named_parameters()}
    for p in model.parameters():
        found[f"gradient of {names[id(p)]}"] = torch.zeros_like(p) if p.grad is None else p.grad
    x = batches[0].detach().requires_grad_()
    learned = [x, *model.parameters()]
    slopes = torch.autograd.grad(model(x).sum(), learned, create_graph=True, allow_unused=True)
    along = sum((slope.sin() * slope).sum() for slope in slopes if slope is not None)
    if along.requires_grad:
        curved = torch.autograd.grad(along, learned, allow_unused=True)
        for i, (p, c) in enumerate(zip(learned, curved, strict=True)):
            found[f"curvature {i}"] = torch.zeros_like(p) if c is None else c
    found |= {f"buffer {n.replace('layer.', '')}": t.double() for n, t in model.named_buffers()}
    return found


@pytest.mark.parametrize("seed", range(NETWORKS))
def test_gradients_equal_the_formulas(seed: int) -> None:
    torch.manual_seed(seed)
    choose = random.Random(seed)
    model = Network(choose)
    twin = copy.deepcopy(model)
    twin.layers = nn.ModuleList(written_out(layer) for layer in twin.layers)
    for network in (model, twin):
        hook_outputs(network, random.Random(seed))
    batches = [torch.randn(n, CHANNELS, SIDE, SIDE, **DOUBLE) + 1 for n in (2, 3)]
    expected = results(twin, batches)
    for name, value in results(model, batches).items():
        torch.testing.assert_close(
            value, expected[name], **CLOSE, msg=lambda m, n=name: f"{n}\n{m}"
        )
