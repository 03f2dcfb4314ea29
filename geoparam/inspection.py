"""Run a model to look at it, and leave it as it was."""

import copy
import inspect
import random
import sys
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import fields, is_dataclass
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

TORCHS = vars(nn.Module()).keys()  # attributes that every module has
CONTAINERS = (list, dict, set, deque, defaultdict, OrderedDict, Counter)


def refuse_unready(model: nn.Module) -> None:
    """Raise where a layer has no shape yet, or is scripted and shows no steps."""
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if nn.parameter.is_lazy(tensor):
            raise ValueError(f"{name!r} is lazy and has no shape yet: run the model once first.")
    if any(isinstance(module, torch.jit.ScriptModule) for module in model.modules()):
        raise ValueError("scripted modules show no steps: use the model before torch.jit.script.")


def arguments_of(model: nn.Module, inputs: Any, /, **more: Any) -> tuple[tuple, dict[str, Any]]:
    """Return copies of the positional and keyword arguments of one call, if they fit the model."""
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
    return tree_map_only(Tensor, cache(Tensor.clone), (args, more))


def why_not_callable(model: nn.Module, /, *args: Any, **kwargs: Any) -> str:
    """Return what is wrong with these arguments of a model's forward; "" where nothing is."""
    try:
        if not model._forward_pre_hooks:  # which may change the arguments
            inspect.signature(model.forward).bind(*args, **kwargs)
    except (TypeError, ValueError) as error:
        return str(error) if isinstance(error, TypeError) else ""  # or there is no signature
    return ""


@contextmanager
def inspection_mode(model: nn.Module) -> Iterator[None]:
    """Evaluation, no gradients, no compiling; afterwards the model is as it was.

    Restored are training flags, buffers, plain attributes of modules (tensors, and what lists,
    dicts and sets hold) and the random states of torch, numpy and Python. Not restored is what
    other objects hold. Forward hooks of the user run.
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
        copy_once = cache(Tensor.clone)  # copies, since BatchNorm's writes count no version
        for module in model.modules():  # not model.eval(), which may be made to do more
            attributes, buffers = vars(module), module._buffers
            own = [value for name, value in attributes.items() if name not in TORCHS]
            for held in (attributes, buffers, *own):
                if type(held) in CONTAINERS:
                    stack.callback(_refill, held, copy.copy(held))
            module.training = False
            buffers.update({k: copy_once(t) for k, t in buffers.items() if t is not None})
            attributes.update({k: copy_once(t) for k, t in attributes.items() if _is_state(t)})
        yield


def _is_state(value: object) -> bool:
    """Return whether it is a tensor that a module may write to; with a history it is computed."""
    return isinstance(value, Tensor) and value.is_leaf and not isinstance(value, nn.Parameter)


def _refill(held: Any, content: Any) -> None:
    """Give a container, which others may share, its contents back."""
    held.clear()
    (held.extend if isinstance(held, list | deque) else held.update)(content)


def tensors_in(value: object) -> Iterator[Tensor]:
    """Yield the tensors in nested tuples, lists, mappings and dataclasses (model outputs)."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        yield from tensors_in([*value.values()])
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from tensors_in(item)
    elif is_dataclass(value):
        yield from tensors_in([getattr(value, entry.name) for entry in fields(value)])
