"""Look at a model and leave it as it was: run it, and ask what its modules and tensors are."""

import copy
import inspect
import random
import sys
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import fields, is_dataclass
from functools import partial
from typing import Any, TypeVar, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map
from torch.utils.data import DataLoader

from geoparam.arguments import warn_user

WRAPPERS = ("_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")  # in names
PARALLEL = (nn.DataParallel, nn.parallel.DistributedDataParallel)
CONTAINERS = {list, dict, OrderedDict}
Label = TypeVar("Label")


def unwrap(model: nn.Module) -> nn.Module:
    """Return the model inside of DDP and torch.compile."""
    inner: Any = model
    while isinstance(inner, PARALLEL) or hasattr(inner, "_orig_mod"):
        inner = inner.module if isinstance(inner, PARALLEL) else inner._orig_mod
    return inner


def strip_wrappers(name: str, *others: str) -> str:
    """Return a name without the parts that wrappers, or those of other names, put into it."""
    return ".".join(part for part in name.split(".") if part not in (*WRAPPERS, *others))


def refuse_non_model(model: object, call: str) -> None:
    """Raise where something else was given in a model's place; `call` shows the arguments."""
    if not isinstance(model, nn.Module):
        raise ValueError(f"{call} takes a model, an nn.Module; got a {type(model).__name__}.")


def refuse_unready(model: nn.Module) -> None:
    """Raise where a layer has no shape yet, or is scripted and shows no steps."""
    refuse_lazy(model)
    if any(isinstance(module, torch.jit.ScriptModule) for module in model.modules()):
        raise ValueError("scripted modules show no steps: use the model before torch.jit.script.")


def refuse_lazy(model: nn.Module) -> None:
    """Raise where a layer has no shape yet."""
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if nn.parameter.is_lazy(tensor):
            raise ValueError(f"{name!r} is lazy and has no shape yet: run the model once first.")


def find_package(module: nn.Module) -> str:
    """Return the package whose code a module runs; "" if it was given a forward of its own."""
    if "forward" in vars(module):
        return ""
    return (type(module).forward.__module__ or "").partition(".")[0]  # fx writes code without one


def overrides(module: nn.Module, base: type[nn.Module]) -> bool:
    """Return whether the module's class, or the module, computes otherwise than `base`."""
    names = ("forward", "_conv_forward", "__call__", "_call_impl", "__getattr__")
    kind = type(module)
    if any(getattr(kind, name, None) is not getattr(base, name, None) for name in names):
        return True
    return "forward" in vars(module) or "_conv_forward" in vars(module)


def computes_as(module: nn.Module, base: type[nn.Module]) -> bool:
    """Return whether nothing of what `base` computes is overridden or added to."""
    if overrides(module, base):
        return False
    if "weight" not in module._parameters:  # old weight_norm, pruning: refused later, with advice
        return True
    parameters = set(module._parameters) - {"weight", "bias"}
    modules = set(module._modules) - {"parametrizations"}
    return not parameters and not module._buffers and not modules


def full_tensor(value: Any) -> Tensor:
    """Return a tensor whole, also where FSDP keeps it in shards: then all processes take part."""
    return value.full_tensor() if hasattr(value, "full_tensor") else value


def group_by_memory(labelled: Iterable[tuple[Tensor, Label]]) -> list[list[Label]]:
    """Return the labels of tensors in groups that have memory in common."""
    spans = [(_find_span(tensor), label) for tensor, label in labelled]
    spans.sort(key=lambda pair: pair[0])

    groups: list[list[Label]] = []
    group_device, group_end = "", -1
    for (device, start, last), label in spans:
        overlaps = device == group_device and start <= group_end
        if not groups or not overlaps:
            groups.append([])
            group_device, group_end = device, -1
        groups[-1].append(label)
        group_end = max(group_end, last)
    return groups


def _find_span(tensor: Tensor) -> tuple[str, int, int]:
    """Return a tensor's device, and the addresses of its first and last byte."""
    try:
        start = tensor.data_ptr()
        strides = tensor.stride()
    except (RuntimeError, ValueError):  # lazy, nested, or a subclass that wraps tensors
        start = 0
    if not start:  # no memory, as on meta: the object itself stands for it
        return "", id(tensor), id(tensor)

    elements = 1
    for size, stride in zip(tensor.shape, strides, strict=True):
        elements += (size - 1) * stride
    return str(tensor.device), start, start + elements * tensor.element_size() - 1


def arguments_of(model: nn.Module, inputs: Any, /, **more: Any) -> tuple[tuple, dict[str, Any]]:
    """Return copies of the positional and keyword arguments of one call, if they fit the model."""
    refuse_non_batch(inputs)
    args: tuple = (inputs,)
    advice = "A tuple or list is the arguments of one call: of a batch (x, y) give x alone."
    if isinstance(inputs, Mapping):
        args, more = (), {**inputs, **more}
        advice = "A mapping is keyword arguments: if the model takes one mapping, give ({...},)."
    elif isinstance(inputs, tuple | list):
        args = tuple(inputs)
    if error := why_not_callable(model, *args, **more):
        raise ValueError(
            f"{type(model).__name__}.forward cannot be called with these inputs: {error}. {advice}"
        )
    # A model may change what it gets. The same tensor, given twice, stays one.
    return tree_map(partial(_copy_leaf, {}), (args, more))


def drop_labels(batch: Any) -> Any:
    """Return the input of a batch as a DataLoader yields it, a list with labels behind it."""
    return batch[:1] if isinstance(batch, list) else batch


def refuse_non_batch(inputs: object) -> None:
    """Raise where inputs are an array, or many batches in one object."""
    if isinstance(inputs, np.ndarray):
        raise ValueError("inputs are tensors; got a numpy array: use torch.from_numpy.")
    if isinstance(inputs, DataLoader) or hasattr(inputs, "__next__"):
        raise ValueError(
            f"inputs are one batch as the model takes it; got a {type(inputs).__name__}: use "
            "next(iter(loader)), and of a batch (x, y) the x."
        )


def call(model: nn.Module, args: tuple, kwargs: Mapping[str, Any]) -> Any:
    """Return what a model gives for a user's inputs; raise in a sentence where it does not run."""
    try:
        return model(*args, **kwargs)
    except (torch.OutOfMemoryError, MemoryError, ValueError):
        raise
    except Exception as error:
        given = ", ".join(map(_describe, (*args, *kwargs.values())))
        raise ValueError(
            f"the model does not run on these inputs ({type(error).__name__}: {error}). It got "
            f"{given}. Give a batch as the model takes it: a tensor, a tuple of arguments, or a "
            "mapping of keyword arguments."
        ) from error


def _describe(value: object) -> str:
    if isinstance(value, Tensor):
        return f"a tensor of shape {tuple(value.shape)} and {value.dtype}"
    return f"a {type(value).__name__}"


def _copy_leaf(copies: dict[int, Tensor], leaf: Any) -> Any:
    """Return a copy of a tensor, or of an object that holds some; anything else itself."""
    if isinstance(leaf, Tensor):
        return copies.setdefault(id(leaf), leaf.clone())
    tensors = list(tensors_in(leaf))
    if not tensors:
        return leaf
    memo = {id(tensor): _copy_leaf(copies, tensor) for tensor in tensors}
    try:
        return copy.deepcopy(leaf, memo)
    except Exception:  # it holds a lock or the like: only its own tensors are copied
        shallow = copy.copy(leaf)
        for key, value in vars(leaf).items():
            vars(shallow)[key] = memo.get(id(value), value)
        return shallow


def why_not_callable(model: nn.Module, /, *args: Any, **kwargs: Any) -> str:
    """Return what is wrong with these arguments of a model's forward; "" where nothing is."""
    if model._forward_pre_hooks:  # which may change the arguments
        return ""
    try:
        inspect.signature(model.forward).bind(*args, **kwargs)
    except TypeError as error:
        return str(error)
    except ValueError:  # there is no signature
        return ""
    return ""


@contextmanager
def inspection_mode(model: nn.Module) -> Iterator[None]:
    """Evaluation, no gradients, no compiling; afterwards the model is as it was.

    Restored are training flags, buffers, attributes of modules (tensors and arrays, also in lists
    and dicts), hooks and modules that the run adds, and the random states of torch, numpy and
    Python. Not restored are what other objects hold, and Parameters that the forward writes to: a
    warning names these. The user's hooks run.
    """
    devices = {p.device for p in model.parameters() if p.is_cuda}
    with ExitStack() as stack:
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.no_grad())
        stack.enter_context(torch.random.fork_rng(devices))
        stack.callback(random.setstate, random.getstate())
        stack.callback(np.random.set_state, np.random.get_state())
        if "torch._dynamo" in sys.modules:  # its import takes a second
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        contents: dict[int, tuple[Any, Any]] = {}
        stack.callback(_put_back, contents)
        _replace_by_copies(model, contents)
        stack.callback(reshard, model)
        for module in model.modules():  # not model.eval(), which may be made to do more
            module.training = False
        before = [(name, p, _find_writes(p)) for name, p in model.named_parameters()]
        yield
        written = [name for name, p, writes in before if _find_writes(p) != writes]
        if written:
            warn_user(
                f"the model's forward writes to its own parameters, {written[0]!r} first, as for "
                "a momentum encoder: this run has changed them. Let it do so in training mode "
                "alone (if self.training), or outside of forward."
            )


def _find_writes(parameter: Tensor) -> tuple:
    """Return what changes when a parameter is written to; writes into `.data` do not show."""
    version = 0 if parameter.is_inference() else parameter._version
    return version, *_find_span(parameter)


def reshard(model: nn.Module) -> None:
    """Shard the parameters of an FSDP2 model again, which a run leaves whole at the root."""
    for module in cast(Any, model).modules():
        if hasattr(module, "unshard") and callable(getattr(module, "reshard", None)):
            module.reshard()


def _replace_by_copies(model: nn.Module, contents: dict[int, tuple[Any, Any]]) -> None:
    """Let a run write to copies of the tensors and arrays that modules hold.

    Each container (a module's attributes, and their lists and dicts) is noted in `contents`, by
    its id, with what it held.
    """
    copies: dict[int, Any] = {}  # modules may share tensors
    for module in model.modules():
        attributes = vars(module)
        containers = [value for value in attributes.values() if type(value) in CONTAINERS]
        for container in (attributes, *containers):
            if id(container) in contents or container is module._parameters:
                continue
            contents[id(container)] = container, container.copy()
            entries = enumerate(container) if isinstance(container, list) else container.items()
            for key, value in list(entries):
                if isinstance(value, np.ndarray):
                    container[key] = copies.setdefault(id(value), value.copy())
                elif isinstance(value, Tensor) and not isinstance(value, nn.Parameter):
                    container[key] = copies.setdefault(id(value), Tensor.clone(value))


def _put_back(contents: dict[int, tuple[Any, Any]]) -> None:
    """Let each container hold what it held, also if Ctrl-C comes in between."""
    try:
        _refill(contents)
    except BaseException:
        _refill(contents)
        raise


def _refill(contents: dict[int, tuple[Any, Any]]) -> None:
    for container, held in contents.values():
        container.clear()
        if isinstance(container, list):
            container.extend(held)
        else:
            container.update(held)


def tensors_in(value: object) -> Iterator[Tensor]:
    """Yield the tensors in nested tuples, lists, mappings and objects (model outputs)."""
    waiting, seen = [value], set[int]()
    while waiting:
        item = waiting.pop()
        if isinstance(item, Tensor):
            yield item
            continue

        parts: list[Any] = []
        if isinstance(item, Mapping):
            parts += item.values()
        elif isinstance(item, list | tuple):
            parts += item
        elif id(item) not in seen and is_dataclass(item) and not isinstance(item, type):
            parts += [getattr(item, entry.name) for entry in fields(item)]
        elif id(item) not in seen and not callable(item):  # no module, class or function
            if getattr(type(item), "__dictoffset__", 0):  # it has attributes
                parts += vars(item).values()
        seen.add(id(item))
        waiting += reversed(parts)
