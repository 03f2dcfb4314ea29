"""What torch.compile sees of the ops on a GPU: the Triton kernels in them.

An op that is opaque to a compiler is called from compiled code through torch's dispatcher, twice
into Python and back: more time than most weights take. So, as torch.library.triton_op does, the
ops are expanded when AOTAutograd makes its graph functional, after autograd has seen them; from
there inductor launches our kernels as it does its own. Export keeps the ops, which can be stored
and run anywhere, and so do CPUs and sizes that are not known.

`GEOPARAM_COMPILED=op` leaves the ops in compiled code as they are.
"""

import functools
import hashlib
import os
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._subclasses.functional_tensor import FunctionalTensor, FunctionalTensorMode
from torch.utils.weak import WeakTensorKeyDictionary

from geoparam.ops import implementation

COMPILED = os.environ.get("GEOPARAM_COMPILED", "kernels")
if COMPILED not in ("kernels", "op"):
    raise ValueError(f"GEOPARAM_COMPILED is kernels or op; got {COMPILED!r}.")

_EXPORT_IS_KNOWN = torch.__version__ >= "2.15"


def is_exporting() -> bool:
    """Return whether a graph is traced for torch.export.

    Before, dynamo takes torch's own answer for always True; there torch's flag is read, which
    strict export, the old form, does not set.
    """
    return torch.compiler.is_exporting() if _EXPORT_IS_KNOWN else torch.compiler._is_exporting_flag


def register() -> None:
    """Let compilers expand the weight's ops, which must be defined."""
    expand("weight", _weight)
    expand("weight_backward", _weight_backward)


def expand(op: str, expansion: Any, always: bool = False) -> None:
    """Let compilers replace an op by what a function of the same arguments computes.

    Only where there are kernels, unless `always`, for functions that look for themselves. torch's
    cache of compiled graphs has them from before the expansion, with an op as a mere name, and
    asks which kernels are behind it: it is told what changes with any of our code.
    """
    rule = _rule(expansion, _traced if always else _expandable)
    torch.library.register_torch_dispatch(f"geoparam::{op}", FunctionalTensorMode, rule)
    if hasattr(torch._library.triton, "triton_ops_to_kernels"):
        torch._library.triton.triton_ops_to_kernels[f"geoparam::{op}"] = [_Code()]


class _Code:
    """All code of the ops, in the place of a Triton kernel."""

    __name__ = "geoparam"
    fn = staticmethod(lambda: None)  # it calls no others

    @property
    def src(self) -> str:
        return f"# {_digest()}, {COMPILED}, {implementation.KERNELS}"


@functools.cache
def _digest() -> str:
    files = sorted(Path(__file__).parent.glob("*.py"))
    return hashlib.sha256(b"".join(path.read_bytes() for path in files)).hexdigest()


def _rule(expansion: Any, possible: Any) -> Any:
    def rule(mode: Any, op: Any, types: Any, args: tuple, kwargs: dict | None) -> Any:
        kwargs = kwargs or {}
        if not possible(args):
            return mode.__torch_dispatch__(op, types, args, kwargs)
        with mode:
            return expansion(*args, **kwargs)

    return rule


def _expandable(args: tuple) -> bool:
    """Return whether all tensors are a compiler's, with kernels for them, and of known sizes."""
    tensors = [x for x in args if isinstance(x, Tensor)]
    if COMPILED == "op" or not _traced(args) or not all(map(_served, tensors)):
        return False
    from torch.export import _trace  # loads most of the compiler, which is there by now

    known = all(type(size) is int for x in tensors for size in x.shape)
    return known and not _trace.custom_triton_ops_decomposition_disabled()


def _traced(args: tuple) -> bool:
    """Return whether all tensors are a compiler's."""
    return all(type(x) is FunctionalTensor for x in args if isinstance(x, Tensor))


def _served(x: Tensor) -> bool:
    return x.is_cuda and implementation.uses_triton(x)


# --- what is known while a graph is traced ------------------------------------------------------


class _Note(NamedTuple):
    """What a tensor in a graph is made of, and the nodes that it and they were then."""

    of: tuple[Any, ...]
    nodes: list[Tensor]


class Notes:
    """What tensors are made of, as long as nobody has changed one of them in place."""

    def __init__(self) -> None:
        self._notes = WeakTensorKeyDictionary()

    def write(self, x: Tensor, *of: Any) -> None:
        self._notes[x] = _Note(of, nodes(x, *of))

    def read(self, x: Tensor) -> tuple[Any, ...] | None:
        note = self._notes.get(x)
        if note is None or not _same(note.nodes, nodes(x, *note.of)):
            return None
        return note.of


def nodes(*tensors: Any) -> list[Tensor]:
    """Return what tensors in a functional graph stand for; a change in place changes that."""
    return [x.from_functional() for x in tensors if isinstance(x, FunctionalTensor)]


def _same(before: list[Tensor], now: list[Tensor]) -> bool:
    return all(a is b for a, b in zip(before, now, strict=True))


# --- the weight ---------------------------------------------------------------------------------


def _weight(
    latitude: Tensor,
    r: Tensor | None = None,
    *,
    natural: bool = False,
    dtype: torch.dtype | None = None,
    shape: list[int] | None = None,
    channels_last: bool = False,
) -> Tensor:
    row = None if shape is None else tuple(shape)
    dtype = dtype or implementation.result_type(latitude, r)
    return implementation.forward(latitude, r, dtype, row, channels_last, traced=True)


def _weight_backward(
    grad: Tensor, latitude: Tensor, r: Tensor | None, natural: bool
) -> tuple[Tensor, Tensor]:
    return implementation.backward(grad, latitude, r, natural, traced=True)
