r"""What a layer and the norm after it store, by role, and twins of them that store other values.

| | direction | length | scale | offset | norm after it |
| standard (SP) | w | | | b | gamma, beta |
| weight normalization (WN) | v | l | | b | gamma, beta |
| GmP in angles | theta, as latitude | | r | lam | gamma, beta |
| GmP, intrinsic | d | | r | lam | gamma, beta |

These are the numbers that an optimizer steps on. A layer with one input under GmP stores no
direction, a layer without bias no offset; another parametrization of torch has its one original
tensor as direction.
"""

from collections.abc import Iterator, Mapping
from typing import Any, Literal

from torch import Tensor, nn
from torch.nn.utils.parametrizations import _WeightNorm
from torch.nn.utils.parametrize import is_parametrized

from geoparam import sphere
from geoparam.analysis.boundary import gathered
from geoparam.analysis.reading.layer_sites import is_transposed
from geoparam.base_layer import GmPLayer

Role = Literal["direction", "length", "scale", "offset", "gamma", "beta"]
Steps = Mapping[str, Tensor]  # what is added, by role


def stored(layer: nn.Module, norm: nn.Module | None = None) -> dict[str, Tensor]:
    """Return the parameters of a layer and the norm after it by their roles, as they are stored.

    Example:
        >>> from torch.nn.utils.parametrizations import weight_norm
        >>> {role: tuple(t.shape) for role, t in stored(weight_norm(nn.Linear(3, 2))).items()}
        {'direction': (2, 3), 'length': (2, 1), 'offset': (2,)}
    """
    found = {}
    for module, names in places(layer, norm):
        parameters = dict(module.named_parameters())
        for role, name in names.items():
            if name in parameters:
                found[role] = gathered(parameters[name].detach())
    if "direction" not in found and coordinates(layer) != "sign":
        raise ValueError(
            f"{type(layer).__name__} does not store its weight in one tensor, or in a length and "
            "a direction: what a perturbation of it is, is not known. Leave it out by `layers`."
        )
    return found


def moved(
    layer: nn.Module, norm: nn.Module | None, steps: Steps
) -> dict[nn.Module, dict[str, Tensor]]:
    """Return by module and name the parameters that have a step, after it, in their own types."""
    held = stored(layer, norm)
    missing = sorted(set(steps) - set(held))
    if missing:
        raise ValueError(f"this layer has the roles {', '.join(held)}; got steps of {missing}.")
    return {
        module: {
            name: (sphere.wide(held[role]) + steps[role]).to(held[role].dtype)
            for role, name in names.items()
            if role in steps
        }
        for module, names in places(layer, norm)
    }


def twin(module: nn.Module, values: Mapping[str, Tensor], prefix: str = "") -> nn.Module:
    """Return the module with float64 copies of its parameters, those in `values` replaced.

    It shares all else with the module, hooks and caches too: to be read, not to be run.

    Example:
        >>> import torch
        >>> layer = nn.Linear(2, 1)
        >>> twin(layer, {"weight": torch.ones(1, 2)}).weight, layer.weight.dtype
        (tensor([[1., 1.]], dtype=torch.float64), torch.float32)
    """
    other = object.__new__(type(module))
    other.__dict__.update(module.__dict__)
    other.__dict__["_parameters"] = {
        name: p if p is None else sphere.wide(gathered(values.get(prefix + name, p.detach())))
        for name, p in module._parameters.items()
    }
    other.__dict__["_modules"] = {
        name: child if child is None else twin(child, values, f"{prefix}{name}.")
        for name, child in module._modules.items()
    }
    return other


def coordinates(layer: nn.Module) -> str:
    """Return how a layer stores directions: "latitude", "unit" or "sign"; "weight" if not GmP."""
    return layer._coordinates.name if isinstance(layer, GmPLayer) else "weight"


def rows(layer: nn.Module) -> Tensor | None:
    """Return the stored vectors (out, n) that units point along; None where there are none.

    Angles are no such vectors, and a parametrization may make a row of the weight from several.

    Example:
        >>> rows(nn.Conv2d(3, 8, 5)).shape
        torch.Size([8, 75])
    """
    held = stored(layer)
    dim = 1 if is_transposed(layer) else 0
    length = held.get("length")
    if length is None:
        mixed = coordinates(layer) == "weight" and is_parametrized(layer, "weight")
    else:
        mixed = length.numel() != 1 and length.numel() != length.shape[dim]
    if mixed or coordinates(layer) in ("latitude", "sign"):
        return None
    return held["direction"].t() if dim else held["direction"].flatten(1)


def places(layer: nn.Module, norm: nn.Module | None) -> Iterator[tuple[nn.Module, dict[str, str]]]:
    """Yield layer and norm, each with the names of its parameters by role."""
    yield layer, _names(layer)
    if norm is not None:
        yield norm, {"gamma": "weight", "beta": "bias"}


def _names(layer: Any) -> dict[str, str]:
    if isinstance(layer, GmPLayer):
        return {"direction": layer._coordinates.name, "scale": "r", "offset": "lam"}
    if isinstance(layer, nn.MultiheadAttention):
        return {"direction": "in_proj_weight", "offset": "in_proj_bias"}
    if hasattr(layer, "weight_v"):  # the older torch weight_norm
        return {"direction": "weight_v", "length": "weight_g", "offset": "bias"}
    original = "parametrizations.weight.original"
    if _has_weight_norm(layer):
        return {"direction": f"{original}1", "length": f"{original}0", "offset": "bias"}
    held = original if is_parametrized(layer, "weight") else "weight"
    return {"direction": held, "offset": "bias"}


def _has_weight_norm(layer: Any) -> bool:
    if not is_parametrized(layer, "weight"):
        return False
    chain = layer.parametrizations.weight
    return len(chain) == 1 and isinstance(chain[0], _WeightNorm)
