"""Remember what was computed from a few tensors, as long as these are what they were."""

import weakref
from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _get_current_dispatch_mode

Value = TypeVar("Value")


class TensorCache(Generic[Value]):
    """The last value, and the tensors it was computed from.

    A tensor counts as unchanged if it is the same object with the same memory and version, so
    `load_state_dict`, moves and changes in place are seen; writes through `.data` or numpy, and by
    torch's fused optimizers, are not. Copies and pickles of a cache are empty.

    Example:
        >>> cache, x = TensorCache(), torch.ones(2)
        >>> cache.get([x], "sum", lambda: x.sum()) is cache.get([x], "sum", lambda: x.sum())
        True
        >>> x.add_(1)
        tensor([2., 2.])
        >>> cache.get([x], "sum", lambda: x.sum())
        tensor(4.)
    """

    def __init__(self) -> None:
        self._key: Any = None
        self._value: Any = None

    def get(self, sources: Sequence[Tensor], tag: object, compute: Callable[[], Value]) -> Value:
        """Return the remembered value for these tensors and this tag, or compute it."""
        state = [(t._version, t.data_ptr(), t.dtype) for t in sources]
        if self._key is not None:
            refs, old_state, old_tag = self._key
            same = len(refs) == len(sources) and all(
                ref() is t for ref, t in zip(refs, sources, strict=True)
            )
            if same and old_state == state and old_tag == tag:
                return self._value
        self._value = compute()
        self._key = [weakref.ref(t) for t in sources], state, tag
        return self._value

    def clear(self) -> None:
        self._key = self._value = None

    def __reduce__(self) -> tuple:
        return TensorCache, ()


def cacheable(sources: Sequence[Tensor]) -> bool:
    """Return whether values computed from these tensors may be kept for another call.

    Not while gradients are recorded, a compiler, a tracer or torch.func looks on, or several
    processes exist: FSDP fills a parameter's memory behind its version counter.
    """
    return not (
        torch.is_grad_enabled()
        or torch.compiler.is_compiling()
        or torch._C._get_tracing_state() is not None
        or torch._C._are_functorch_transforms_active()
        or _get_current_dispatch_mode() is not None
        or (torch.distributed.is_available() and torch.distributed.is_initialized())
    ) and all(type(t) in (Tensor, nn.Parameter) and not t.is_inference() for t in sources)
