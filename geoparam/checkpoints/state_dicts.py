"""Fold a state_dict without its model: the entries of GmP layers in, those of plain layers out.

A layer X is recognised by its names, `X.r` beside one of `X.latitude`, `X.unit` and `X.sign`. It
becomes `X.weight` = r u and `X.bias` = r lam - w^T m, where m is the running mean of its input. A
layer with a plain weight and its input's mean, `X.running_mean` beside `X.weight`, becomes one
with the bias b - w^T m.

Three things the names do not tell: a kernel's shape, whether zeros are padded to a centred input
(refused where that may be), and whether r stands outside an activation (taken to be inside, as in
all that `convert_` makes). `fold_` knows them from the model.
"""

import functools
import logging
import math
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from geoparam.centred_map import shift_bias
from geoparam.conversion.plan import CONVOLUTIONS, kind_of
from geoparam.coordinates import Angles, Coordinates, Intrinsic, Sign
from geoparam.sphere import wide
from geoparam.storage import list_few

log = logging.getLogger("geoparam")

Parts = dict[str, Tensor]

COORDINATES: dict[str, Coordinates] = {c.name: c for c in (Angles(), Intrinsic(), Sign())}
OURS = (*COORDINATES, "r", "lam")
MEAN, COUNT = "input_norm.running_mean", "input_norm.num_batches_tracked"
FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
ENTRY = re.compile(rf"(?:(.*)\.)?({'|'.join((*OURS, 'theta', MEAN, COUNT))})")


@dataclass(frozen=True)
class Folding:
    """A folded state_dict, and what was done."""

    state: dict[str, Tensor]
    layers: int  # folded
    kept: int  # entries that are as they were
    notes: tuple[str, ...]  # what is worth knowing


def fold_state_dict(
    state: Mapping[str, Tensor], like: nn.Module | Mapping[str, Tensor] | None = None
) -> dict[str, Tensor]:
    """Return the state_dict of the plain model for one that has GmP layers.

    Weights are computed in float64 and rounded once, to the type they were stored in. All other
    entries are the same tensors as in `state`.

    Args:
        state: The state_dict of a converted model, or one of the CLIP project that calls weight
            normalization "GmP" (`X.theta`, and `X.r` of shape (out, 1)).
        like: The plain model, whose tensors may be on the meta device, or a plain state_dict of
            its architecture. It gives the weights their shapes, which convolutions need, and the
            result must have its keys.

    Example:
        >>> import geoparam as gp
        >>> model = gp.convert_(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)))
        >>> sorted(model.state_dict())
        ['0.lam', '0.latitude', '0.r', '2.bias', '2.weight']
        >>> sorted(fold_state_dict(model.state_dict()))
        ['0.bias', '0.weight', '2.bias', '2.weight']
    """
    folding = fold_entries(state, like)
    for note in folding.notes:
        log.info("%s", note)
    return folding.state


@torch.no_grad()
def fold_entries(
    state: Mapping[str, Tensor], like: nn.Module | Mapping[str, Tensor] | None = None
) -> Folding:
    """Do what `fold_state_dict` does, and tell what was done."""
    if not isinstance(state, Mapping) or not all(isinstance(key, str) for key in state):
        raise ValueError(f"a state_dict maps names to tensors; got a {type(state).__name__}.")
    layers, centred = layers_in(state), _find_centred(state)
    if not layers and not centred:
        raise ValueError(
            "nothing to fold: no layer of geoparam is in this checkpoint, which would have an "
            "entry 'r' beside a 'latitude', 'unit' or 'sign', or a 'running_mean' of its input."
        )
    plain = None if like is None else Plain.of(like)
    owners = {_join(name, part): name for name, parts in layers.items() for part in parts}
    folded = {name: _fold_layer(name, parts, state, plain) for name, parts in layers.items()}
    result: dict[str, Tensor] = {}
    for key, tensor in state.items():  # a folded layer stands where its first entry was
        result |= folded.pop(owners[key], {}) if key in owners else {key: tensor}
    for name in centred:
        _fold_mean(name, result)
    notes = _collect_notes(layers)
    if plain is not None:
        notes += _match_keys(result, plain)
    kept = sum(result.get(key) is x for key, x in state.items())
    return Folding(result, len(layers) + len(centred), kept, tuple(notes))


@dataclass(frozen=True)
class Plain:
    """The plain model: shapes of its entries; modules and ties unless only a file is given."""

    shapes: Mapping[str, tuple[int, ...]]
    modules: Mapping[str, nn.Module]
    ties: Collection[list[str]]

    @classmethod
    def of(cls, like: nn.Module | Mapping[str, Tensor]) -> "Plain":
        if not isinstance(like, nn.Module):
            if layers_in(like):
                raise ValueError(f"not a plain model: {list_few(layers_in(like))} are under GmP.")
            return cls({key: tuple(x.shape) for key, x in like.items()}, {}, [])
        entries = like.state_dict(keep_vars=True)  # ties go by identity, on meta too
        tensors = {key: x for key, x in entries.items() if isinstance(x, Tensor)}
        groups: dict[int, list[str]] = {}
        for key, x in tensors.items():
            groups.setdefault(id(x), []).append(key)
        modules = {
            _join(name, key): module
            for name, module in like.named_modules(remove_duplicate=False)
            for key in module._parameters
        }
        shapes = {key: tuple(x.shape) for key, x in tensors.items()}
        return cls(shapes, modules, [group for group in groups.values() if len(group) > 1])

    @functools.cached_property
    def has_transposed(self) -> bool:
        """Whether some weight is (in, out), as transformers' Conv1D has it; its bias tells."""
        weights = {key: shape for key, shape in self.shapes.items() if key.endswith("weight")}
        oblong = {k: s for k, s in weights.items() if len(s) == 2 and s[0] != s[1]}
        return any(self.shapes.get(_bias_key(key)) == s[1:] for key, s in oblong.items())


def layers_in(state: Mapping[str, Tensor]) -> dict[str, Parts]:
    """Return the entries of every GmP layer, by the layer's name and by their name in it."""
    found: dict[str, Parts] = {}
    for key, tensor in state.items():
        if entry := ENTRY.fullmatch(key):
            found.setdefault(entry[1] or "", {})[entry[2]] = tensor
    layers = {}
    for name, parts in found.items():
        ours = [part for part in parts if part in OURS]
        alone = "latitude" in ours and parts["latitude"].ndim == 2  # a buffer may be called so
        if _is_weight_norm(name, parts) or len(ours) > 1 or alone:
            _check_parts(name, parts)
            layers[name] = parts
    return layers


def _find_centred(state: Mapping[str, Tensor]) -> list[str]:
    """Return the layers with a plain weight and the mean of their input; BatchNorm has others."""
    split = [key.rpartition(".") for key in state]
    names = [name for name, _, part in split if part == "running_mean"]
    keys = {name: _join(name, "weight") for name in names if _join(name, "bias") in state}
    return [name for name, key in keys.items() if key in state and state[key].ndim > 1]


def _fold_mean(name: str, state: dict[str, Tensor]) -> None:
    """Let a layer's bias take its input's mean over."""
    weight, bias = (state[_join(name, part)] for part in ("weight", "bias"))
    mean = state.pop(_join(name, "running_mean"))
    state.pop(_join(name, "num_batches_tracked"), None)
    if mean.ndim != 1 or len(mean) % weight.shape[1] or len(bias) != len(weight):
        raise ValueError(f"{name!r} has a running_mean or bias that does not fit its weight.")
    shifted = shift_bias(wide(bias), wide(weight), wide(mean))
    state[_join(name, "bias")] = _round(_join(name, "bias"), shifted, bias.dtype)


def _is_weight_norm(name: str, parts: Parts) -> bool:
    """Whether this is the CLIP project's layer: r (out, 1) and theta in the weight's shape."""
    if parts.keys() != {"theta", "r"}:
        return False
    theta = parts["theta"]
    if theta.ndim < 2 or parts["r"].shape != (len(theta), *[1] * (theta.ndim - 1)):
        return False
    if math.prod(theta.shape[2:]) != 1:
        raise ValueError(
            f"{name!r} has a theta of shape {tuple(theta.shape)}, and the file does not say "
            "whether whole rows are normalized or each position: compute its weight by hand."
        )
    return True


def _check_parts(name: str, parts: Parts) -> None:
    stored = [part for part in (*COORDINATES, "theta") if part in parts]
    if len(stored) != 1 or "r" not in parts:
        raise ValueError(
            f"{name!r} is not complete: a layer has 'r' and one of {', '.join(COORDINATES)}; "
            f"got {', '.join(parts)}."
        )
    rows = parts[stored[0]]
    units = len(rows) if rows.ndim else 0
    ranks = {stored[0]: 1 if stored[0] == "sign" else 2}
    for part, x in parts.items():
        rank = rows.ndim if "theta" in parts else ranks.get(part, 1)
        fits = x.ndim == rank and x.numel() > 0 and (part == MEAN or len(x) == units)
        if part != COUNT and (not fits or x.dtype not in FLOATS):
            raise ValueError(
                f"{_join(name, part)!r} does not fit a layer of {units} units in float16, "
                f"bfloat16, float32 or float64: it is a tensor of shape {tuple(x.shape)} and "
                f"{x.dtype}."
            )


def _fold_layer(
    name: str, parts: Parts, state: Mapping[str, Tensor], plain: Plain | None
) -> dict[str, Tensor]:
    """Return weight and bias under the names they have in a plain model."""
    rows = _compute_rows(parts)
    key = _weight_key(name, rows, state, plain)
    weight = _shape_rows(key, rows, parts, plain)
    bias = wide(parts["r"]) * wide(parts["lam"]) if "lam" in parts else None
    if MEAN in parts:
        _check_mean(name, key, weight, parts[MEAN], plain)
        bias = shift_bias(bias, weight, wide(parts[MEAN]))
    own = (key,) if "theta" in parts else (key, _bias_key(key))  # theta has a bias of its own
    if leftovers := [key for key in own if key in state]:
        raise ValueError(
            f"{', '.join(leftovers)} stands beside {', '.join(parts)} of {name!r}, and a layer is "
            "either plain or under GmP. Remove what is left over from the checkpoint."
        )
    floats = [x.dtype for part, x in parts.items() if part not in (MEAN, COUNT)]
    dtype = functools.reduce(torch.promote_types, floats)
    result = {key: weight} if bias is None else {key: weight, _bias_key(key): bias}
    return {key: _round(key, x, dtype) for key, x in result.items()}


def _compute_rows(parts: Parts) -> Tensor:
    """Return the weight as (out, n), in float64."""
    if "theta" in parts:
        return wide(parts["r"]).flatten(1) * F.normalize(wide(parts["theta"]).flatten(1))
    stored, coordinates = next((parts[n], c) for n, c in COORDINATES.items() if n in parts)
    return coordinates.decode(wide(stored), wide(parts["r"]), False, None)


def _weight_key(name: str, rows: Tensor, state: Mapping[str, Tensor], plain: Plain | None) -> str:
    """Return the weight's name; a layer `in_proj` may be the projection of torch's attention."""
    parent, _, last = name.rpartition(".")
    packed = f"{name}_weight"
    if plain is not None:
        is_packed = packed in plain.shapes
    else:
        beside = any(key.startswith(_join(parent, "out_proj.")) for key in state)
        is_packed = beside and len(rows) == 3 * rows.shape[1]
    return packed if last == "in_proj" and is_packed else _join(name, "weight")


def _shape_rows(key: str, rows: Tensor, parts: Parts, plain: Plain | None) -> Tensor:
    """Bring rows (out, n) into the shape of the plain model's weight."""
    out, n = rows.shape
    if plain is None or key not in plain.shapes:
        return rows.view(parts["theta"].shape) if "theta" in parts else rows
    shape, module = plain.shapes[key], plain.modules.get(key)
    square = shape == (out, n) and out == n
    if module is None and square and plain.has_transposed:
        raise ValueError(
            f"{key!r} is square, and this model has layers that store their weight as (in, out): "
            "its shape does not tell whether it is one. Give the model itself instead (--arch)."
        )
    fits_transposed = shape == (n, out) and not square
    transposed = fits_transposed if module is None else kind_of(module) == "transposed"
    if transposed and shape == (n, out):
        return rows.t().contiguous()
    if transposed or math.prod(shape[1:]) != n:
        raise ValueError(
            f"{key!r} has the shape {shape} in the plain model, which does not fit {out} units "
            f"with {n} inputs."
        )
    return rows.view(out, *shape[1:])


def _check_mean(name: str, key: str, weight: Tensor, mean: Tensor, plain: Plain | None) -> None:
    """Refuse a mean that may be subtracted before zeros are padded."""
    module = None if plain is None else plain.modules.get(key)
    unpadded = isinstance(module, CONVOLUTIONS) and (
        module.padding == "valid" or not any(module.padding) or module.padding_mode != "zeros"
    )
    if not unpadded and (weight.ndim != 2 or weight.shape[1] != len(mean)):
        raise ValueError(
            f"{name!r} is a convolution that centres its input, and the checkpoint does not tell "
            "whether before or after zeros are padded: build the model as it was trained, load "
            "the checkpoint into it and call geoparam.fold_."
        )


def _round(key: str, x: Tensor, dtype: torch.dtype) -> Tensor:
    x = x.to(dtype)
    if not x.isfinite().all():
        raise ValueError(
            f"{key!r} folds to NaN or infinite values in {dtype}: its parameters are broken."
        )
    return x


def _match_keys(result: dict[str, Tensor], plain: Plain) -> list[str]:
    """Give the result the keys of the plain model, or raise; return what was done for it."""
    for group in plain.ties:
        held = [key for key in group if key in result]
        result.update({key: result[held[0]] for key in group if held and key not in held})
    notes = []
    for key in [key for key in result if key not in plain.shapes]:
        x = result[key]  # files of transformers leave one of two tied matrices out
        kept = ((k, y) for k, y in result.items() if k in plain.shapes and y.shape == x.shape)
        if twin := next((k for k, y in kept if x.ndim > 1 and torch.equal(x, y)), None):
            notes.append(f"{key} is left out: it is tied to {twin}, which stands for both.")
            del result[key]
    if result.keys() != plain.shapes.keys():
        raise ValueError(_describe_mismatch(result, plain))
    other = [key for key, x in result.items() if tuple(x.shape) != plain.shapes[key]]
    if other:
        notes.append(f"not of the plain model's shape: {list_few(other)}.")
    return notes


def _describe_mismatch(result: dict[str, Tensor], plain: Plain) -> str:
    unexpected = [key for key in result if key not in plain.shapes]
    missing = [key for key in plain.shapes if key not in result]
    text = "the folded checkpoint does not have the keys of the plain model."
    text += f" Missing: {list_few(missing)}." if missing else ""
    text += f" Unexpected: {list_few(unexpected)}." if unexpected else ""
    if any(key.endswith("running_var") for key in missing):
        text += (
            " If convert_(norm='imn') has absorbed these norms, the file does not tell by which "
            "layer: convert a new model in the same way, load the checkpoint into it and call "
            "geoparam.fold_."
        )
    return text


def _collect_notes(layers: dict[str, Parts]) -> list[str]:
    notes = []
    if foreign := sum("theta" in parts for parts in layers.values()):
        notes.append(
            f"{foreign} of {len(layers)} layers hold r * theta / ||theta||. That is weight "
            "normalization, not geometric parameterization, though the project that writes such "
            "files calls it GmP."
        )
    ours = {name: parts for name, parts in layers.items() if "theta" not in parts}
    if negative := [name for name, parts in ours.items() if (parts["r"] < 0).any()]:
        notes.append(
            f"r < 0 in {list_few(negative)}: exact if the layer has no activation of its own, as "
            "after convert_; with activation= use geoparam.fold_ on the model."
        )
    return notes


def _join(name: str, key: str) -> str:
    return f"{name}.{key}" if name else key


def _bias_key(weight_key: str) -> str:
    return weight_key.removesuffix("weight") + "bias"
