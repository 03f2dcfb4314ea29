"""A tensor that is computed from parameters: it can be read, and refuses to be written to.

`layer.weight` of a GmP layer is a new tensor each time. What is written into it would be lost: by
`nn.init`, by a mask on `.data`, by a tool that merges an adapter. So the user gets a `Computed`:
every operation in place on it raises, and so it does on its views and its `.data`. Writes that
torch does not see (numpy, dlpack) cannot be refused. All other operations give plain tensors.
"""

from typing import Any

import torch
from torch import Tensor

_OPERATORS = (
    *("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul"),
    *("and", "or", "xor", "lshift", "rshift"),
)
_WRITES = {f"__i{name}__" for name in _OPERATORS} | {"__setitem__", "__set__"}
_HARMLESS = {"requires_grad_"}


class Computed(Tensor):
    """A tensor whose elements are computed from others.

    Example:
        >>> w = as_computed(torch.ones(2) * 3)
        >>> w + 1
        tensor([4., 4.])
        >>> w.data.zero_()
        Traceback (most recent call last):
        ...
        RuntimeError: this tensor is computed from r, lam and the direction, so what zero_ \
writes into it would be lost. Assign to it (layer.weight = ..., layer.bias = ...) or change \
those parameters.
    """

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        name, kwargs = getattr(function, "__name__", ""), kwargs or {}
        written = kwargs.get("out")
        if _writes_in_place(name):
            written = args[0] if args else kwargs.get("tensor")  # nn.init passes it by keyword
        targets = written if isinstance(written, list | tuple) else [written]
        if any(isinstance(target, Computed) for target in targets):
            raise RuntimeError(
                "this tensor is computed from r, lam and the direction, so what "
                f"{name} writes into it would be lost. Assign to it (layer.weight = ..., "
                "layer.bias = ...) or change those parameters."
            )
        with torch._C.DisableTorchFunctionSubclass():
            result = function(*args, **kwargs)
            return result.as_subclass(cls) if _is_part_of(result, args) else result

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.as_subclass(Tensor).__reduce_ex__(protocol)


def as_computed(x: Tensor) -> Tensor:
    """Return x as a tensor that refuses writes; unchanged under a compiler or tracer."""
    if type(x) is not Tensor or torch.compiler.is_compiling():
        return x
    if torch._C._are_functorch_transforms_active():
        return x
    return x.as_subclass(Computed)


def _writes_in_place(name: str) -> bool:
    """Return whether torch's function of this name writes into its first argument."""
    if name in _WRITES:
        return True
    return name.endswith("_") and not name.endswith("__") and name not in _HARMLESS


def _is_part_of(result: Any, args: tuple) -> bool:
    """Return whether a result is in the memory of a computed tensor: a view of it, its data."""
    if type(result) is not Tensor or not torch._C._has_storage(result):
        return False
    if not args or not isinstance(args[0], Computed):
        return False
    return args[0].untyped_storage()._cdata == result.untyped_storage()._cdata
