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
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.testing import assert_close
from torch.utils.checkpoint import checkpoint

import geoparam as gp
from geoparam import sphere
from geoparam.input_mean_layers import InputMeanLayer

NETWORKS = int(os.environ.get("GEOPARAM_NETWORKS", "60"))
CHANNELS, SIDE = 4, 5
DOUBLE = {"dtype": torch.float64}


class Formula(nn.Module):
    """What a layer of ours computes, written out."""

    def __init__(self, layer: Any) -> None:
        super().__init__()
        self.layer = layer
        self.tracked = layer.input_norm if isinstance(layer, gp.GmPLayer) else layer
        self.form = getattr(layer, "input_norm_form", True)
        self.activation = getattr(layer, "activation", None)

    def forward(self, x: Tensor) -> Tensor:
        layer = self.layer
        weight, bias = self.weight_and_bias()
        if isinstance(self.tracked, gp.norm.TrackedMean):
            mean = x.mean(dim=(0, 2, 3))
            track(self.tracked, mean)
            if self.form == "border":
                x = x - mean.view(-1, 1, 1)
            else:
                shift = self.output_of_constant(mean, weight)
                bias = -shift if bias is None else bias - shift

        z = F.conv2d(x, weight, bias, padding=layer.padding, groups=layer.groups)
        if self.activation is None:
            return z
        return layer.r.view(-1, 1, 1) * self.activation(z)

    def output_of_constant(self, mean: Tensor, weight: Tensor) -> Tensor:
        """Return the output where this mean is the input under the whole kernel."""
        kernel = weight.shape[2:]
        constant = mean.view(1, -1, 1, 1).expand(1, -1, *kernel)
        return F.conv2d(constant, weight, groups=self.layer.groups).flatten()

    def weight_and_bias(self) -> tuple[Tensor, Tensor | None]:
        layer = self.layer
        if isinstance(layer, InputMeanLayer):
            return layer.weight, layer.bias

        weight = self.direction()
        bias = layer.lam
        if self.activation is None:  # r is inside
            weight = layer.r[:, None] * weight
            bias = None if bias is None else layer.r * bias
        return weight.view(layer.weight_shape), bias

    def direction(self) -> Tensor:
        if self.layer.coordinates == "angles":
            return sphere.to_unit(self.layer.latitude)
        d = self.layer.unit
        return d / d.square().sum(dim=1, keepdim=True).sqrt()


class NormFormula(nn.Module):
    """What a norm of ours computes, written out."""

    def __init__(self, norm: gp.InputMeanNorm) -> None:
        super().__init__()
        self.layer = norm

    def forward(self, x: Tensor) -> Tensor:
        mean = x.mean(dim=(0, 2, 3))
        track(self.layer, mean)
        centred = x - mean.view(-1, 1, 1)
        bias = getattr(self.layer, "bias", None)
        if bias is None:
            return centred
        return centred + bias.view(-1, 1, 1)


@torch.no_grad()
def track(norm: Any, mean: Tensor) -> None:
    """Update a running mean; the first batches have equal shares."""
    norm.num_batches_tracked += 1
    share = max(norm.momentum, 1 / norm.num_batches_tracked.item())
    norm.running_mean += share * (mean - norm.running_mean)


def write_out(layer: nn.Module) -> nn.Module:
    if isinstance(layer, gp.InputMeanNorm):
        return NormFormula(layer)
    return Formula(layer)


def random_layer(choose: random.Random) -> nn.Module:
    kind = choose.choice(["angles", "intrinsic", "angles", "intrinsic", "plain", "imn", "mbn"])
    if kind == "imn":
        return gp.InputMeanNorm(CHANNELS, momentum=choose.choice([0.1, 0.6]), **DOUBLE)
    if kind == "mbn":
        return gp.MeanOnlyBatchNorm(CHANNELS, momentum=choose.choice([0.1, 0.6]), **DOUBLE)

    kernel = choose.choice([1, 3])
    groups = choose.choice([1, 2, 4])
    shape: dict[str, Any] = {
        "in_channels": CHANNELS,
        "out_channels": CHANNELS,
        "kernel_size": kernel,
        "padding": kernel // 2,
        "groups": groups,
    }
    if kind == "plain":
        return gp.InputMeanConv2d(**shape, **DOUBLE)

    has_one_input = kernel**2 * CHANNELS == groups
    layer = gp.GmPConv2d(
        **shape,
        bias=choose.random() < 0.8,
        coordinates="angles" if has_one_input else kind,
        activation=choose.choice([None, torch.relu, torch.tanh, nn.ReLU(), nn.ReLU(inplace=True)]),
        input_norm=choose.choice([False, True, "bias", "border"]),
        **DOUBLE,
    )
    if has_one_input:  # no direction to learn: draw another
        return random_layer(choose)
    nn.init.normal_(layer.r)
    if layer.lam is not None:
        nn.init.normal_(layer.lam)
    return layer


def scale_past_autograd(x: Tensor) -> Tensor:
    """Scale by a write that autograd does not see; the values count."""
    y = x * 1
    y.data.mul_(1.5)
    return y


def clamp_gradient(x: Tensor) -> Tensor:
    y = x * 1
    if y.requires_grad:
        y.register_hook(lambda grad: grad.clamp(-0.05, 0.05))
    return y


# What a step makes of a recent value and of an older one.
STEPS: dict[str, Callable[[nn.Module, Tensor, Tensor], Tensor]] = {
    "layer": lambda layer, recent, older: layer(recent * 1),
    "checkpoint": lambda layer, recent, older: checkpoint(layer, recent * 1, use_reentrant=False),
    "add": lambda layer, recent, older: (recent + older) / 2,
    "product": lambda layer, recent, older: recent * older.tanh(),
    "relu_": lambda layer, recent, older: (recent * 1).relu_(),
    "scale_": lambda layer, recent, older: scale_past_autograd(recent),
    "hook": lambda layer, recent, older: clamp_gradient(recent),
    "cat": lambda layer, recent, older: torch.cat([recent[:, :2], older[:, 2:]], dim=1),
}


class Step(NamedTuple):
    kind: str
    layer: int
    older: int
    recent: int


def random_step(choose: random.Random, value_count: int, layer_count: int) -> Step:
    older = choose.randrange(value_count)
    recent = choose.randrange(max(0, value_count - 2), value_count)
    kind = choose.choice(["layer"] * 5 + list(STEPS))
    layer = choose.randrange(layer_count)
    return Step(kind, layer, older, recent)


class Network(nn.Module):
    """A program of random steps; each appends a value, and all values make the output."""

    def __init__(self, choose: random.Random) -> None:
        super().__init__()
        layer_count = choose.randint(2, 5)
        self.layers = nn.ModuleList(random_layer(choose) for _ in range(layer_count))
        value_counts = range(1, choose.randint(5, 10))
        self.steps = [random_step(choose, count, layer_count) for count in value_counts]

    def forward(self, x: Tensor) -> Tensor:
        values = [x]
        for step in self.steps:
            apply = STEPS[step.kind]
            layer = self.layers[step.layer]
            values.append(apply(layer, values[step.recent], values[step.older]))
        return torch.stack(values[1:]).sin().mean(dim=0)


def halve_output(module: nn.Module, inputs: tuple, output: Tensor) -> Tensor:
    return output * 0.5


def clamp_past_autograd(module: nn.Module, inputs: tuple, output: Tensor) -> None:
    output.data.clamp_(max=0.5)


def hook_outputs(model: Network, choose: random.Random) -> None:
    """Let some layers have forward hooks, one of which writes in place."""
    for layer in model.layers:
        number = choose.random()
        if number < 0.15:
            layer.register_forward_hook(halve_output)
        elif number < 0.3:
            layer.register_forward_hook(clamp_past_autograd)


def compute_gradients(model: Network, batches: list[Tensor]) -> dict[str, Tensor]:
    """Return outputs, the inputs' gradients, and the parameters', summed over the batches."""
    results = {}
    for index, batch in enumerate(batches):
        x = batch.clone().requires_grad_()
        output = model(x)
        output.square().sum().backward()
        results[f"output {index}"] = output
        results[f"gradient of input {index}"] = x.grad
    for name, parameter in model.named_parameters():
        results[f"gradient of {name}"] = fill(parameter.grad, parameter)
    return results


def compute_curvatures(model: Network, batch: Tensor) -> dict[str, Tensor]:
    """Return the gradients of a function of the gradients."""
    x = batch.clone().requires_grad_()
    names = ["input", *(name for name, _ in model.named_parameters())]
    variables = [x, *model.parameters()]
    slopes = torch.autograd.grad(
        model(x).sum(), variables, create_graph=True, allow_unused=True, materialize_grads=True
    )
    product = sum((slope.sin() * slope).sum() for slope in slopes)
    if not product.requires_grad:
        return {}
    curvatures = torch.autograd.grad(product, variables, allow_unused=True, materialize_grads=True)
    return {f"curvature of {n}": c for n, c in zip(names, curvatures, strict=True)}


def fill(grad: Tensor | None, parameter: Tensor) -> Tensor:
    """Return the gradient, and zeros for a parameter that no step uses."""
    return torch.zeros_like(parameter) if grad is None else grad


def compute_results(model: Network, batches: list[Tensor]) -> dict[str, Tensor]:
    """Return all that must agree; the buffers last, when all batches were tracked."""
    results = compute_gradients(model, batches)
    results |= compute_curvatures(model, batches[0])
    results |= {f"buffer {name}": buffer.double() for name, buffer in model.named_buffers()}
    return {name.replace("layer.", ""): value for name, value in results.items()}


@pytest.mark.parametrize("seed", range(NETWORKS))
def test_gradients_equal_the_formulas(seed: int) -> None:
    torch.manual_seed(seed)
    model = Network(random.Random(seed))
    twin = copy.deepcopy(model)
    twin.layers = nn.ModuleList(write_out(layer) for layer in twin.layers)
    hook_outputs(model, random.Random(seed))
    hook_outputs(twin, random.Random(seed))
    batches = [torch.randn(size, CHANNELS, SIDE, SIDE, **DOUBLE) + 1 for size in (2, 3)]

    results = compute_results(model, batches)

    assert_close(results, compute_results(twin, batches), rtol=1e-10, atol=1e-10)
