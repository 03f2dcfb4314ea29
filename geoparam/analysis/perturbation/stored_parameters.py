r"""What a layer and the norm after it store, by role, and copies of them that store other values.

| | direction | length | scale | offset | norm after it |
| standard (SP) | w | | | b | gamma, beta |
| weight normalization (WN) | v | l | | b | gamma, beta |
| GmP in angles | theta, as latitude | | r | lam | gamma, beta |
| GmP, intrinsic | d | | r | lam | gamma, beta |

These are the tensors that an optimizer steps on. A layer with one input under GmP stores no
direction, a layer without bias no offset. Another parametrization of torch has its one original
tensor as direction.
"""

from collections.abc import Mapping
from typing import Any, Literal

from torch import Tensor, nn
from torch.nn.utils.parametrizations import _WeightNorm
from torch.nn.utils.parametrize import is_parametrized

from geoparam import sphere
from geoparam.analysis.boundary import gather
from geoparam.analysis.reading.layer_sites import is_transposed
from geoparam.base_layer import GmPLayer

Role = Literal["direction", "length", "scale", "offset", "gamma", "beta"]
Steps = Mapping[str, Tensor]  # what is added, by role


def read_stored(layer: nn.Module, norm: nn.Module | None = None) -> dict[str, Tensor]:
    """Return the parameters that a layer and the norm after it store, by their roles."""
    found = {}
    for module, names in _names_by_role(layer, norm):
        parameters = dict(module.named_parameters())
        for role, name in names.items():
            if name in parameters:
                found[role] = gather(parameters[name].detach())
    if "direction" not in found and coordinates(layer) != "sign":
        raise ValueError(
            f"{type(layer).__name__} does not store its weight in one tensor, or in a length and "
            "a direction: what a perturbation of it is, is not known. Leave it out by `layers`."
        )
    return found


def add_steps(
    layer: nn.Module, norm: nn.Module | None, steps: Steps
) -> dict[nn.Module, dict[str, Tensor]]:
    """Return the parameters that have a step, with it added, by module and name.

    Steps are added in float64 and rounded to the storage type.
    """
    held = read_stored(layer, norm)
    missing = sorted(set(steps) - set(held))
    if missing:
        raise ValueError(f"this layer has the roles {', '.join(held)}; got steps of {missing}.")
    return {
        module: {
            name: (sphere.wide(held[role]) + steps[role]).to(held[role].dtype)
            for role, name in names.items()
            if role in steps
        }
        for module, names in _names_by_role(layer, norm)
    }


def copy_with(module: nn.Module, values: Mapping[str, Tensor], prefix: str = "") -> nn.Module:
    """Return the module with float64 copies of its parameters, those in `values` replaced.

    It shares everything else with the module, also hooks: read it, do not run it.
    """
    other = object.__new__(type(module))
    other.__dict__.update(module.__dict__)
    other.__dict__["_parameters"] = {
        name: p if p is None else sphere.wide(gather(values.get(prefix + name, p.detach())))
        for name, p in module._parameters.items()
    }
    other.__dict__["_modules"] = {
        name: child if child is None else copy_with(child, values, f"{prefix}{name}.")
        for name, child in module._modules.items()
    }
    return other


def coordinates(layer: nn.Module) -> str:
    """Return how a layer stores directions: "latitude", "unit" or "sign"; "weight" if not GmP."""
    return layer._coordinates.name if isinstance(layer, GmPLayer) else "weight"


def direction_rows(layer: nn.Module) -> Tensor | None:
    """Return the stored vectors (out, n) that units point along; None where there are none.

    Angles are no such vectors, and a parametrization may make a row of the weight from several.
    """
    held = read_stored(layer)
    dim = 1 if is_transposed(layer) else 0
    length = held.get("length")
    if length is None:
        mixed = coordinates(layer) == "weight" and is_parametrized(layer, "weight")
    else:
        mixed = length.numel() != 1 and length.numel() != length.shape[dim]
    if mixed or coordinates(layer) in ("latitude", "sign"):
        return None
    return held["direction"].t() if dim else held["direction"].flatten(1)


def _names_by_role(
    layer: nn.Module, norm: nn.Module | None
) -> list[tuple[nn.Module, dict[str, str]]]:
    """Return layer and norm, each with the names of its parameters by role."""
    found = [(layer, _layer_names(layer))]
    return found if norm is None else [*found, (norm, {"gamma": "weight", "beta": "bias"})]


def _layer_names(layer: Any) -> dict[str, str]:
    if isinstance(layer, GmPLayer):
        return {"direction": layer._coordinates.name, "scale": "r", "offset": "lam"}
    if isinstance(layer, nn.MultiheadAttention):
        return {"direction": "in_proj_weight", "offset": "in_proj_bias"}
    if hasattr(layer, "weight_v"):  # the older torch weight_norm
        return {"direction": "weight_v", "length": "weight_g", "offset": "bias"}
    if not is_parametrized(layer, "weight"):
        return {"direction": "weight", "offset": "bias"}
    chain, original = layer.parametrizations.weight, "parametrizations.weight.original"
    if len(chain) == 1 and isinstance(chain[0], _WeightNorm):
        return {"direction": f"{original}1", "length": f"{original}0", "offset": "bias"}
    return {"direction": original, "offset": "bias"}
