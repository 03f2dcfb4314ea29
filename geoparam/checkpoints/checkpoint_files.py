"""Fold checkpoint files: read safely, fold, write plain safetensors.

Nothing is ever unpickled: safetensors files hold tensors alone, and torch files are loaded with
`weights_only=True`. Both are mapped into memory (compressed torch files are not), so that folding
takes the memory of the result and of one tensor in float64. Needs safetensors (the `cli` extra).
"""

import importlib
import inspect
import os
import pickle
import re
import sys
import warnings
import zipfile
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from geoparam.checkpoints.state_dicts import Folding, fold_entries, layers_in
from geoparam.inspection import strip_wrappers
from geoparam.storage import list_few, open_zip, read_json, refuse_overwrite, replacing

INDEX = "model.safetensors.index.json"
IN_A_FOLDER = (INDEX, "model.safetensors", "pytorch_model.bin")
CONTAINERS = ("state_dict", "model_state_dict", "model", "module")
DEEPEST = 8  # mappings around a state_dict
EXPANDED = 1 << 26  # bytes to which a stored element may be repeated


def fold_checkpoint(
    checkpoint: Path,
    out: Path,
    *,
    arch: str | None = None,
    like: Path | None = None,
    linear: bool = False,
    prefix: str = "",
    force: bool = False,
) -> Folding:
    """Fold the GmP layers of a checkpoint file and write a plain safetensors file.

    Args:
        checkpoint: A safetensors file, a folder of them with an index, the index, or a torch file
            with a state_dict, which may be one of its entries ("state_dict", "model", ...).
        out: The file to write; it appears under its name when it is complete.
        arch: The plain model, as `build` takes it.
        like: A plain checkpoint of the same architecture, instead of `arch`.
        linear: Every converted layer is an nn.Linear or attention: no plain model is needed.
        prefix: Take only entries that begin with this, and remove it ("model." for Lightning).
        force: Overwrite `out`.
    """
    if (arch is not None) + (like is not None) + linear > 1:
        raise ValueError("--arch, --like and --linear say one thing in three ways: give one.")
    _check_out(out, checkpoint, force)
    entries, notes = read(checkpoint)
    entries, more = _take_prefix(prefix, entries)
    plain = build(arch) if arch is not None else None if like is None else read(like)[0]
    ours = [name for name, parts in layers_in(entries).items() if "theta" not in parts]
    if plain is None and not linear and ours:  # a file has rows, but not a kernel's shape
        raise ValueError(
            f"the file does not say whether {ours[0] or 'its layer'!r} is a convolution, nor the "
            "shape of a kernel. Name the plain model by --arch or --like; or say --linear, if "
            "every converted layer is an nn.Linear or nn.MultiheadAttention."
        )
    folding = fold_entries(entries, plain)
    write(folding.state, out)
    return replace(folding, notes=(*notes, *more, *folding.notes))


def _take_prefix(prefix: str, entries: dict[str, Tensor]) -> tuple[dict[str, Tensor], list[str]]:
    if not prefix:
        return entries, []
    prefix = prefix.rstrip(".") + "."
    chosen = {k.removeprefix(prefix): x for k, x in entries.items() if k.startswith(prefix)}
    if not chosen:
        first = sorted({key.partition(".")[0] + "." for key in entries})
        raise ValueError(f"no entry begins with {prefix!r}; they begin with {list_few(first)}.")
    left = len(entries) - len(chosen)
    return chosen, [f"{left} entries outside {prefix!r} are left out."] if left else []


def read(path: Path) -> tuple[dict[str, Tensor], list[str]]:
    """Return the tensors of a checkpoint by name, without wrappers' prefixes, and notes."""
    entries: dict[str, Tensor] = {}
    notes: list[str] = []
    for file in files_of(path):
        safe = file.suffix == ".safetensors"
        tensors, left = (_read_safetensors(file), []) if safe else _read_torch(file)
        entries |= tensors
        notes += [f"left out, because they are not tensors: {list_few(left)}."] if left else []
    if not entries:
        raise ValueError(f"{path} holds no tensors.")
    return _strip_wrappers(entries), notes


def files_of(path: Path) -> list[Path]:
    """Return the files with the tensors of a checkpoint: one, or those of an index."""
    if path.is_dir():
        found = next((path / name for name in IN_A_FOLDER if (path / name).is_file()), None)
        if found is None:
            raise ValueError(f"{path} holds none of {', '.join(IN_A_FOLDER)}: name the file.")
        return files_of(found)
    if not path.is_file():
        raise ValueError(f"{path} does not exist.")
    if path.suffix != ".json":
        return [path]
    names = read_json(path.read_bytes(), path).get("weight_map")
    if not isinstance(names, dict) or not all(isinstance(name, str) for name in names.values()):
        raise ValueError(
            f"{path} is no index of safetensors files: it has no weight_map of names."
        )
    files = [path.parent / name for name in sorted(set(names.values()))]
    lost = [file.name for file in files if file.parent != path.parent or not file.is_file()]
    if lost:
        raise ValueError(f"{path} names files that are not beside it: {list_few(lost)}.")
    return files


def _read_safetensors(path: Path) -> dict[str, Tensor]:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, "pt") as file:
            entries = {key: file.get_tensor(key) for key in file.keys()}
            ties = file.metadata() or {}  # save_model notes here what it leaves out, and for what
    except SafetensorError as error:
        raise ValueError(f"{path} is damaged or no safetensors file: {error}.") from error
    return {key: entries[twin] for key, twin in ties.items() if twin in entries} | entries


def _read_torch(path: Path) -> tuple[dict[str, Tensor], list[str]]:
    entries = _check_archive(path) if zipfile.is_zipfile(path) else []
    # torch would map the bytes of a compressed entry as they are.
    can_map = bool(entries) and all(e.compress_type == zipfile.ZIP_STORED for e in entries)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # TorchScript, which then raises
            loaded = torch.load(path, map_location="cpu", weights_only=True, mmap=can_map)
    except pickle.UnpicklingError as error:
        found = re.search(r"GLOBAL (\S+)", str(error))
        raise ValueError(
            f"{path} holds Python objects{f' ({found[1]})' if found else ''}, not tensors alone; "
            "it may be a whole pickled module. Loading it would run code from it, so nothing here "
            "does. If you trust it, export its state_dict where its code is installed: "
            "torch.save(torch.load(file, weights_only=False).state_dict(), new_file)."
        ) from error
    except Exception as error:  # whatever a damaged file makes torch do
        raise ValueError(
            f"{path} cannot be read as a torch file of tensors: {type(error).__name__}. It may be "
            "damaged, of another format, or TorchScript (export its state_dict in that case)."
        ) from error
    tensors, left = _tensors(loaded, path)
    stores = [x.untyped_storage() for x in tensors.values()]
    sizes = {store.data_ptr(): store.nbytes() for store in stores if store.nbytes()}
    if entries and not Counter(sizes.values()) <= Counter(e.file_size for e in entries):
        raise ValueError(f"{path} is damaged: an entry is not of the size of its tensor.")
    return tensors, left


def _check_archive(path: Path) -> list[zipfile.ZipInfo]:
    """Return the entries of an archive, if they match their checksums, which torch ignores."""
    try:
        with open_zip(path) as archive:
            if damaged := archive.testzip():
                raise ValueError(f"its entry {damaged} fails its checksum")
            return archive.infolist()
    except ValueError as error:
        raise ValueError(
            f"{path} is a damaged archive: {error}. (Or it was saved without checksums, by "
            "torch.serialization.set_crc32_options(False): save it again with them.)"
        ) from error


def _tensors(loaded: Any, path: Path) -> tuple[dict[str, Tensor], list[str]]:
    """Return a state_dict's tensors, also where it is an entry, and the names of all else."""
    for _ in range(DEEPEST):
        names = CONTAINERS if isinstance(loaded, Mapping) else ()
        inside = [name for name in names if isinstance(loaded.get(name), Mapping)]
        if len(inside) > 1:
            raise ValueError(f"{path} holds several state_dicts, {', '.join(inside)}: save one.")
        loaded = loaded[inside[0]] if inside else loaded
    items = loaded.items() if isinstance(loaded, Mapping) else ()
    tensors = {key: x for key, x in items if isinstance(key, str) and isinstance(x, Tensor)}
    if not tensors:
        raise ValueError(
            f"{path} holds no state_dict: a mapping of names to tensors, alone or as one of "
            f"{', '.join(CONTAINERS)}."
        )
    if odd := [key for key, x in tensors.items() if not _is_dense(x)]:
        raise ValueError(
            f"{path} holds tensors that a plain file cannot: sparse, quantized, without values or "
            f"expanded to more than they store: {list_few(odd)}. Leave these out."
        )
    return tensors, [str(key) for key, _ in items if key not in tensors]


def _is_dense(x: Tensor) -> bool:
    if x.layout is not torch.strided or x.is_meta or x.is_quantized or x.is_nested:
        return False
    return x.numel() * x.element_size() <= max(x.untyped_storage().nbytes(), EXPANDED)


def _strip_wrappers(entries: dict[str, Tensor]) -> dict[str, Tensor]:
    """Remove what torch.compile, FSDP and checkpointing add to names, and DDP's "module."."""
    names = {key: strip_wrappers(key).split(".") for key in entries}
    while all(len(parts) > 1 and parts[0] == "module" for parts in names.values()):
        names = {key: parts[1:] for key, parts in names.items()}
    result = {".".join(names[key]): x for key, x in entries.items()}
    if len(result) != len(entries):
        raise ValueError("two entries have the same name without the prefixes of their wrappers.")
    return result


def build(arch: str) -> nn.Module:
    """Build a plain model from its name, on the meta device where it can be.

    Args:
        arch: `torchvision:resnet50`, `timm:resnet50`, `transformers:FOLDER` with a config.json,
            or `package.module:function`, which is called without arguments.
    """
    package, _, name = arch.partition(":")
    if not package or not name:
        raise ValueError(
            "--arch is torchvision:NAME, timm:NAME, transformers:FOLDER or package.module:"
            f"function; got {arch!r}."
        )
    make = _find_builder(package, name)
    try:
        try:
            with torch.device("meta"):
                model = make()
        except (NotImplementedError, RuntimeError):  # it reads the values of its tensors
            model = make()
    except (Exception, SystemExit) as error:
        raise ValueError(f"--arch {arch} fails: {type(error).__name__}: {error}") from error
    if not isinstance(model, nn.Module):
        raise ValueError(f"--arch {arch} gives a {type(model).__name__}, not an nn.Module.")
    return model


def _find_builder(package: str, name: str) -> Callable[[], Any]:
    """Return the function that builds a model, which downloads nothing."""
    if package == "torchvision":
        models = importlib.import_module("torchvision.models")
        if name not in models.list_models():
            raise ValueError(
                f"torchvision has no model {name!r}: see torchvision.models.list_models."
            )
        builder = models.get_model_builder(name)
        weights = [p for p in inspect.signature(builder).parameters if p.startswith("weights")]
        return partial(builder, **dict.fromkeys(weights))
    if package == "timm":
        return partial(importlib.import_module("timm").create_model, name, pretrained=False)
    if package == "transformers":
        transformers = importlib.import_module("transformers")
        if not (Path(name) / "config.json").is_file():
            raise ValueError(f"--arch transformers:FOLDER needs a config.json; {name} has none.")
        config = transformers.AutoConfig.from_pretrained(name, local_files_only=True)
        if not config.architectures:
            raise ValueError(f"{name}/config.json does not name its class under 'architectures'.")
        return lambda: getattr(transformers, config.architectures[0])(config)
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())  # as python -m does, and installed commands do not
    try:
        return getattr(importlib.import_module(package), name)
    except (ModuleNotFoundError, AttributeError, TypeError) as error:
        raise ValueError(f"--arch {package}:{name} is not there: {error}.") from error


def _check_out(out: Path, checkpoint: Path, force: bool) -> None:
    if out.suffix != ".safetensors" or out.is_dir():
        raise ValueError(f"the result is a file NAME.safetensors; got {out}.")
    if out.exists() and any(out.samefile(file) for file in files_of(checkpoint)):
        raise ValueError(f"{out} is the checkpoint itself: write to another file.")
    refuse_overwrite(out, force)


def write(entries: Mapping[str, Tensor], out: Path) -> None:
    """Write a safetensors file as transformers reads it, whole or not at all."""
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    tensors, seen = {}, set()
    for key, x in entries.items():
        x = x.detach().contiguous()
        memory = x.untyped_storage().data_ptr()
        tensors[key] = x.clone() if memory in seen else x  # safetensors refuses shared memory
        seen.add(memory)
    try:
        with replacing(out) as unfinished:
            save_file(tensors, unfinished, metadata={"format": "pt"})
    except SafetensorError as error:
        raise OSError(f"{out} cannot be written: {error}.") from error
