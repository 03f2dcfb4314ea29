"""Models with random parameters, and what their boundaries say about pre-activations."""

from typing import Any

import torch
from patches import by_unit, patches, responses
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
    lam = responses(found.direction, patches(layer, x)) + found.distance
    return point + found.scale * lam


def check(model: nn.Sequential, x: Tensor, **options: Any) -> Boundaries:
    """Check the first layer of layer, norm, activation against the model in its present mode."""
    layer, activation = model[0], model[-1]
    found = boundaries(model, x, **options)["0"]
    z = by_unit(pre_activation(model, x, activation), -1 - len(getattr(layer, "kernel_size", ())))
    torch.testing.assert_close(predict(found, layer, x), z.detach(), **CLOSE)
    return found
