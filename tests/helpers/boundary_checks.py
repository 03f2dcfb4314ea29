"""Random parameters, inputs cut into patches, and what boundaries say about pre-activations."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from geoparam.analysis import Boundaries, boundaries
from geoparam.base_layer import GmPLayer

CLOSE = {"rtol": 1e-9, "atol": 1e-9}


def randomise(model: nn.Module) -> nn.Module:
    """Draw every parameter and statistic, of both signs where there is one, and return it."""
    with torch.no_grad():
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            if name.endswith("running_var"):
                tensor.uniform_(0.5, 2)
            elif tensor.is_floating_point() and not name.endswith("sign"):
                tensor.normal_()
    for module in model.modules():
        if isinstance(module, GmPLayer):
            module.retract_()
    return model.double()


def pre_activation(model: nn.Module, x: Tensor, activation: nn.Module) -> Tensor:
    """Return what the activation is given when `model` runs on `x`."""
    seen: list[Tensor] = []
    with activation.register_forward_pre_hook(lambda _, args: seen.append(args[0].clone())):
        model(x)
    return seen[0]


def predict(found: Boundaries, layer: nn.Module, x: Tensor, point: float = 0.0) -> Tensor:
    """Return the pre-activation (points, units) that the first boundary tells of inputs `x`."""
    lam = responses(found.direction, layer, x) + found.distance
    return point + found.scale * lam


def check(model: nn.Sequential, x: Tensor, **options: Any) -> Boundaries:
    """Check the first layer of layer, norm, activation against the model in its present mode."""
    layer, activation = model[0], model[-1]
    found = boundaries(model, x, **options)["0"]
    z = by_unit(pre_activation(model, x, activation), -1 - len(getattr(layer, "kernel_size", ())))
    torch.testing.assert_close(predict(found, layer, x), z.detach(), **CLOSE)
    return found


def patches(layer: nn.Module, x: Tensor) -> Tensor:
    """Return the patches (groups, points, n) under a convolution's kernel, for a batch.

    Points are in the order of the output's; a linear layer sees all of the last dimension.
    """
    size = getattr(layer, "kernel_size", ())
    if not size:
        return x.reshape(1, -1, x.shape[-1])
    x = F.pad(x, sides(layer), mode=layer.padding_mode.replace("zeros", "constant"))
    for dim, (k, stride, gap) in enumerate(zip(size, layer.stride, layer.dilation, strict=True)):
        x = x.unfold(2 + dim, (k - 1) * gap + 1, stride)[..., ::gap]
    x = x.unflatten(1, (layer.groups, -1))  # N, groups, channels, positions, kernel
    rank = len(size)
    order = [1, 0, *range(3, 3 + rank), 2, *range(3 + rank, 3 + 2 * rank)]
    return x.permute(order).flatten(2 + rank).flatten(1, 1 + rank)


def sides(conv: nn.Module) -> list[int]:
    """Return the padding as F.pad takes it, from the definition of each form."""
    if conv.padding == "valid":
        return [0, 0] * len(conv.kernel_size)
    if conv.padding == "same":
        total = [d * (k - 1) for d, k in zip(conv.dilation, conv.kernel_size, strict=True)]
        return [side for t in reversed(total) for side in (t // 2, t - t // 2)]
    return [side for p in reversed(conv.padding) for side in (p, p)]


def by_unit(z: Tensor, channel: int) -> Tensor:
    """Return a layer's output as (points, units), points in the order of `patches`."""
    return z.movedim(channel, -1).reshape(-1, z.shape[channel])


def responses(rows: Tensor, layer: nn.Module, x: Tensor) -> Tensor:
    """Return rows^T x, (points, units), for the patches that a layer sees of its input."""
    seen = patches(layer, x)
    grouped = rows.unflatten(0, (len(seen), -1))
    return torch.einsum("gun,gpn->pgu", grouped, seen).flatten(1)
