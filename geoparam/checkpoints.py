"""Fold the checkpoint of a converted model without the model: a state dict, or a safetensors file.

A layer X is recognised by its names, `X.r` beside one of `X.latitude`, `X.unit` and `X.sign`. It
becomes `X.weight` = r u and `X.bias` = r lam - w^T m, where m is the running mean of its input. A
layer with a plain weight and its input's mean, `X.running_mean` beside `X.weight`, gets the bias
b - w^T m.

Three things the names do not tell: the shape of a kernel, whether zeros are padded to a centred
input (refused where that may be), and whether r is outside of an activation (it is inside in all
layers that `convert_` makes). They are in the metadata of a state dict as `model.state_dict()`
returns it, and torch.save keeps it; safetensors has none.
"""

import functools
import logging
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from geoparam.centred_map import shift_bias
from geoparam.coordinates import Angles, Coordinates, Intrinsic, Sign
from geoparam.sphere import wide
from geoparam.storage import list_few, printable, refuse_overwrite, replacing

__all__ = ["fold_file", "fold_state_dict"]

State = Mapping[str, Tensor]
Parts = dict[str, Tensor]  # the entries of one layer, by their names in it
Shapes = Mapping[str, torch.Size]

_COORDINATES: dict[str, Coordinates] = {c.name: c for c in (Angles(), Intrinsic(), Sign())}
_PARAMETERS = {*_COORDINATES, "r", "lam"}
_MEAN, _COUNT = "input_norm.running_mean", "input_norm.num_batches_tracked"
_ENTRY = re.compile(rf"(?:(.*)\.)?({'|'.join((*_PARAMETERS, _MEAN, _COUNT))})")
_RELU_LIKE = {"relu", "leaky_relu", "ReLU", "LeakyReLU", "PReLU", "Identity"}
_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)

_log = logging.getLogger("geoparam")


@torch.no_grad()
def fold_state_dict(state: State, like: State | None = None) -> dict[str, Tensor]:
    """Return the state dict of the plain model for one that has GmP layers.

    Weights are computed in float64 and rounded once, to the type they were stored in. All other
    entries are the same tensors as in `state`.

    Args:
        state: the state dict of a converted model.
        like: a state dict of the plain model, with any values. It gives weights their shapes, and
            the result must have its keys. Without it a state dict that has torch's metadata, as
            that of `model.state_dict()`, gives all weights their shapes; in one that has not, as
            from a safetensors file, weights are matrices (out, in): right for nn.Linear and
            nn.MultiheadAttention, not for convolutions.

    Example:
        >>> import geoparam as gp
        >>> from torch import nn
        >>> model = gp.convert_(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)))
        >>> sorted(model.state_dict())
        ['0.lam', '0.latitude', '0.r', '2.bias', '2.weight']
        >>> sorted(fold_state_dict(model.state_dict()))
        ['0.bias', '0.weight', '2.bias', '2.weight']
    """
    _check_state(state)
    shapes = None if like is None else _read_shapes(like)
    layers = _find_layers(state)
    centred = _find_centred(state)
    if not layers and not centred:
        raise ValueError(
            "nothing to fold: no layer of geoparam is in this checkpoint, which would have an "
            "entry 'r' beside a 'latitude', 'unit' or 'sign', or a 'running_mean' of its input."
        )

    result = {key: x for key, x in state.items() if not _belongs_to(key, layers)}
    for name, parts in layers.items():
        result |= _fold_layer(name, parts, state, shapes)
    for name in centred:
        _fold_mean(name, result)

    _check_scales(layers, state)
    return result if shapes is None else _match_keys(result, shapes)


def fold_file(
    checkpoint: Path, out: Path, *, like: Path | None = None, force: bool = False
) -> None:
    """Fold a safetensors file, and write a plain one. Needs safetensors (the `cli` extra).

    Args:
        checkpoint: the state dict of a converted model.
        out: the file to write; it appears under its name when it is complete.
        like: a state dict of the plain model, for the shapes of kernels.
        force: overwrite `out`.
    """
    if out.suffix != ".safetensors" or out.is_dir():
        raise ValueError(f"the result is a file NAME.safetensors; got {out}.")
    state = _read(checkpoint)
    if out.exists() and out.samefile(checkpoint):
        raise ValueError(f"{out} is the checkpoint itself: write to another file.")
    refuse_overwrite(out, force)
    _write(fold_state_dict(state, None if like is None else _read(like)), out)


# --- layers -------------------------------------------------------------------------------------


def _check_state(state: State) -> None:
    if not isinstance(state, Mapping) or not all(isinstance(key, str) for key in state):
        raise ValueError(f"a state dict maps names to tensors; got a {type(state).__name__}.")
    for key, value in state.items():
        if _ENTRY.fullmatch(key) and not isinstance(value, Tensor):
            kind = type(value).__name__
            raise ValueError(f"a state dict maps names to tensors; {key!r} is a {kind}.")


def _find_layers(state: State) -> dict[str, Parts]:
    """Return the entries of every GmP layer, by the layer's name and by their names in it."""
    layers: dict[str, Parts] = {}
    for key, tensor in state.items():
        if entry := _ENTRY.fullmatch(key):
            layers.setdefault(entry[1] or "", {})[entry[2]] = tensor

    # A buffer of another module may have one of these names.
    layers = {name: parts for name, parts in layers.items() if len(_PARAMETERS & {*parts}) > 1}
    for name, parts in layers.items():
        _check_layer(name, parts)
    return layers


def _belongs_to(key: str, layers: dict[str, Parts]) -> bool:
    entry = _ENTRY.fullmatch(key)
    return entry is not None and (entry[1] or "") in layers


def _check_layer(name: str, parts: Parts) -> None:
    stored = [part for part in parts if part in _COORDINATES]
    if len(stored) != 1 or "r" not in parts:
        raise ValueError(
            f"{name!r} is not complete: a layer has 'r' and one of {', '.join(_COORDINATES)}; "
            f"got {', '.join(parts)}."
        )

    units = len(parts["r"]) if parts["r"].ndim else 0
    for part, x in parts.items():
        if part == _COUNT:
            continue
        rank = len(_COORDINATES[part].shape(units, 1)) if part in _COORDINATES else 1
        fits = x.ndim == rank and x.numel() > 0 and (part == _MEAN or len(x) == units)
        if not fits or x.dtype not in _FLOATS:
            raise ValueError(
                f"{_join(name, part)!r} does not fit a layer of {units} units in float16, "
                f"bfloat16, float32 or float64: it is a tensor of shape {tuple(x.shape)} and "
                f"{x.dtype}."
            )


def _fold_layer(name: str, parts: Parts, state: State, shapes: Shapes | None) -> Parts:
    """Return weight and bias under the names they have in the plain model."""
    stored = next(part for part in parts if part in _COORDINATES)
    r = wide(parts["r"])
    rows = _COORDINATES[stored].decode(wide(parts[stored]), r, False, None)
    weight_key = _find_weight_key(name, rows, state, shapes)
    bias_key = _bias_key(weight_key)
    leftovers = [key for key in (weight_key, bias_key) if key in state]
    if leftovers:
        raise ValueError(
            f"{', '.join(leftovers)} stands beside {', '.join(parts)} of {name!r}, and a layer is "
            "either plain or under GmP. Remove what is left over from the checkpoint."
        )

    if shapes is None:
        weight = _reshape_as_noted(name, rows, state)
    else:
        weight = _reshape(weight_key, rows, shapes)
    bias = r * wide(parts["lam"]) if "lam" in parts else None
    if _MEAN in parts:
        _check_mean(name, weight, parts[_MEAN], _read_note(name, state).get("centres_borders"))
        bias = shift_bias(bias, weight, wide(parts[_MEAN]))

    types = [x.dtype for part, x in parts.items() if part in _PARAMETERS]
    dtype = functools.reduce(torch.promote_types, types)
    folded = {weight_key: _round(weight_key, weight, dtype)}
    if bias is not None:
        folded[bias_key] = _round(bias_key, bias, dtype)
    return folded


def _find_weight_key(name: str, rows: Tensor, state: State, shapes: Shapes | None) -> str:
    """Return the weight's name; a layer `in_proj` may be the projection of torch's attention."""
    parent, _, last = name.rpartition(".")
    packed = f"{name}_weight"
    if shapes is not None:
        is_packed = packed in shapes
    else:
        has_out_proj = any(key.startswith(_join(parent, "out_proj.")) for key in state)
        is_packed = has_out_proj and len(rows) == 3 * rows.shape[1]
    return packed if last == "in_proj" and is_packed else _join(name, "weight")


def _read_note(name: str, state: State) -> Mapping[str, Any]:
    """Return what a layer noted when it was saved; nothing where the metadata is lost."""
    return getattr(state, "_metadata", {}).get(name, {})


def _reshape_as_noted(name: str, rows: Tensor, state: State) -> Tensor:
    """Bring rows (out, n) into the shape that the layer noted when it was saved."""
    note = _read_note(name, state)
    shape = note.get("weight_shape", rows.shape)
    if len(shape) < 2 or (shape[0], math.prod(shape[1:])) != rows.shape:
        raise ValueError(
            f"{name!r} has {len(rows)} units with {rows.shape[1]} inputs, and its metadata says "
            f"that its weight has the shape {tuple(shape)}. Save the state dict again."
        )
    weight = rows.view(*shape)
    return weight.t().contiguous() if note.get("transposed") else weight


def _reshape(key: str, rows: Tensor, shapes: Shapes) -> Tensor:
    """Bring rows (out, n) into the shape of the plain model's weight."""
    if key not in shapes:
        return rows
    out, n = rows.shape
    shape = shapes[key]
    is_square = shape == (out, n) and out == n
    if is_square and _has_transposed(shapes):
        raise ValueError(
            f"{key!r} is square, and this model has layers that store their weight as (in, out): "
            "its shape does not tell whether it is one. Convert a new model in the same way, load "
            "the checkpoint into it and call geoparam.fold_."
        )
    if shape == (n, out) and not is_square:
        return rows.t().contiguous()
    if math.prod(shape[1:]) != n:
        raise ValueError(
            f"{key!r} has the shape {tuple(shape)} in the plain model, which does not fit {out} "
            f"units with {n} inputs."
        )
    return rows.view(out, *shape[1:])


def _has_transposed(shapes: Shapes) -> bool:
    """Whether some weight is (in, out), as transformers' Conv1D has it; its bias tells."""
    for key, shape in shapes.items():
        if key.endswith("weight") and len(shape) == 2 and shape[0] != shape[1]:
            if shapes.get(_bias_key(key)) == shape[1:]:
                return True
    return False


def _check_mean(name: str, weight: Tensor, mean: Tensor, centres_borders: bool | None) -> None:
    """Refuse a mean that is, or may be, subtracted before zeros are padded."""
    if weight.ndim == 2 and weight.shape[1] == len(mean):
        return
    if centres_borders is None:
        raise ValueError(
            f"{name!r} is a convolution that centres its input, and the checkpoint does not tell "
            "whether before or after zeros are padded: fold model.state_dict() itself, whose "
            "metadata does, or load the checkpoint into the model and call geoparam.fold_."
        )
    if centres_borders:
        raise ValueError(
            f"{name!r} pads zeros to a centred input, which no bias does: load the checkpoint "
            "into the model and call geoparam.fold_."
        )


def _round(key: str, x: Tensor, dtype: torch.dtype) -> Tensor:
    x = x.to(dtype)
    if not x.isfinite().all():
        raise ValueError(
            f"{key!r} folds to NaN or infinite values in {dtype}: its parameters are broken."
        )
    return x


def _check_scales(layers: dict[str, Parts], state: State) -> None:
    """Refuse, or tell of, r outside of an activation where it cannot be in the weight."""
    unknown = []
    for name, parts in layers.items():
        is_negative = bool((parts["r"] < 0).any())
        activation = _read_note(name, state).get("activation")
        if activation is None and is_negative:
            unknown.append(name)
        elif activation and (is_negative or activation not in _RELU_LIKE):
            raise ValueError(
                f"{name!r} has its scale r outside of an activation, {activation}, and r goes "
                "into the weight only where r >= 0 and the activation is like ReLU: load the "
                "checkpoint into the model and call geoparam.fold_."
            )
    if unknown:
        _log.warning(
            "r < 0 in %s: exact if the layer has no activation of its own, as after convert_; "
            "with activation= use geoparam.fold_ on the model.",
            printable(list_few(unknown)),
        )


# --- plain weights with the mean of their input -------------------------------------------------


def _find_centred(state: State) -> list[str]:
    """Return the layers with a plain weight and the mean of their input; BatchNorm has others."""
    names = []
    for key in state:
        name, _, part = key.rpartition(".")
        weight = state.get(_join(name, "weight"))
        if part == "running_mean" and weight is not None and weight.ndim > 1:
            if _join(name, "bias") in state:
                names.append(name)
    return names


def _fold_mean(name: str, state: dict[str, Tensor]) -> None:
    """Let a layer's bias take its input's mean over."""
    weight, bias = (state[_join(name, part)] for part in ("weight", "bias"))
    mean = state.pop(_join(name, "running_mean"))
    state.pop(_join(name, "num_batches_tracked"), None)
    if mean.ndim != 1 or len(mean) % weight.shape[1] or len(bias) != len(weight):
        raise ValueError(f"{name!r} has a running_mean or bias that does not fit its weight.")
    shifted = shift_bias(wide(bias), wide(weight), wide(mean))
    state[_join(name, "bias")] = _round(_join(name, "bias"), shifted, bias.dtype)


# --- the plain model's keys ---------------------------------------------------------------------


def _read_shapes(like: State) -> Shapes:
    _check_state(like)
    layers = _find_layers(like)
    if layers:
        raise ValueError(f"not a plain model: {list_few(layers)} are under GmP.")
    return {key: x.shape for key, x in like.items()}


def _match_keys(state: dict[str, Tensor], shapes: Shapes) -> dict[str, Tensor]:
    """Return the entries in the plain model's order, if it has the same keys."""
    missing = [key for key in shapes if key not in state]
    kept = {state[key].data_ptr() for key in shapes if key in state}
    unexpected = []
    for key, x in state.items():
        is_tied = x.data_ptr() in kept  # files may leave out one of two tied entries
        if key not in shapes and not is_tied:
            unexpected.append(key)
    if not missing and not unexpected:
        return {key: state[key] for key in shapes}

    text = "the folded checkpoint does not have the keys of the plain model."
    if missing:
        text += f" Missing: {list_few(missing)}."
    if unexpected:
        text += f" Unexpected: {list_few(unexpected)}."
    if any(key.endswith("running_var") for key in missing):
        text += (
            " If convert_(norm=...) has absorbed these norms, the file does not tell by which "
            "layer: convert a new model in the same way, load the checkpoint into it and call "
            "geoparam.fold_."
        )
    raise ValueError(text)


def _join(name: str, key: str) -> str:
    return f"{name}.{key}" if name else key


def _bias_key(weight_key: str) -> str:
    return weight_key.removesuffix("weight") + "bias"


# --- files --------------------------------------------------------------------------------------


def _read(path: Path) -> dict[str, Tensor]:
    """Return the tensors of a safetensors file, under both names where two are tied."""
    from safetensors import SafetensorError, safe_open

    if path.suffix != ".safetensors":
        raise ValueError(
            f"only safetensors files are read, which hold tensors and run no code; got {path}. "
            "Save one where the checkpoint was made: safetensors.torch.save_model(model, "
            "'NAME.safetensors')."
        )
    if not path.is_file():
        raise ValueError(f"{path} does not exist.")
    try:
        with safe_open(path, "pt") as file:
            state = {key: file.get_tensor(key) for key in file.keys()}
            ties = file.metadata() or {}  # save_model notes here what it leaves out, and for what
    except SafetensorError as error:
        raise ValueError(f"{path} is damaged or no safetensors file: {error}.") from error
    return {key: state[twin] for key, twin in ties.items() if twin in state} | state


def _write(state: State, out: Path) -> None:
    """Write a safetensors file as transformers reads it, whole or not at all."""
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    tensors, written = {}, set()
    for key, x in state.items():
        x = x.contiguous()
        address = x.untyped_storage().data_ptr()
        tensors[key] = x.clone() if address in written else x  # safetensors refuses shared memory
        written.add(address)
    try:
        with replacing(out) as unfinished:
            save_file(tensors, unfinished, metadata={"format": "pt"})
    except SafetensorError as error:
        raise OSError(f"{out} cannot be written: {error}.") from error
