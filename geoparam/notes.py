"""What is known of a tensor besides its numbers: the sums of its channels, noted by who made it.

A note belongs to one tensor object in one version and place. Views and copies have none, a change
in place or of `data` makes it void, and it goes when its tensor goes. It is kept beside the
tensor, not on it, so that nothing of it is saved, pickled or copied. What no version counts, as
writing through numpy or `x.data`, is not seen: so results are noted, never what came from outside.
"""

import weakref
from typing import NamedTuple

from torch import Tensor


class Note(NamedTuple):
    """The sums (channels,) of a tensor's channels, or parts (parts, channels) of them.

    Its channels are in dimension `dim`.
    """

    of: "weakref.ref[Tensor]"
    version: int
    address: int
    dim: int
    sums: Tensor


_notes: dict[int, Note] = {}  # by id; a WeakTensorKeyDictionary takes four times as long


def note(x: Tensor, dim: int, sums: Tensor) -> None:
    """Remember the sums of `x` as it is now.

    Example:
        >>> import torch
        >>> x = torch.ones(2, 3)
        >>> note(x, 1, x.sum(0))
        >>> noted(x, 1)
        tensor([2., 2., 2.])
        >>> noted(x.add_(1), 1) is None
        True
    """
    key = id(x)
    of = weakref.ref(x, lambda ref: _forget(key, ref))
    _notes[key] = Note(of, x._version, x.data_ptr(), dim % x.ndim, sums)


def noted(x: Tensor, dim: int) -> Tensor | None:
    """Return the sums of `x` if they are known and it has not changed since."""
    found = noted_in_parts(x, dim)
    return None if found is None else whole(found)


def noted_in_parts(x: Tensor, dim: int) -> Tensor | None:
    """Return the sums as they were noted: whole, or in parts that are still to be added up."""
    found = _notes.get(id(x))
    if found is None or found.of() is not x or found.dim != dim % x.ndim:
        return None
    same = found.version == x._version and found.address == x.data_ptr()
    return found.sums if same else None


def whole(sums: Tensor) -> Tensor:
    """Return sums whose parts, if they are parts, are added up."""
    return sums if sums.ndim == 1 else sums.sum(0)


def _forget(key: int, of: "weakref.ref[Tensor]") -> None:
    found = _notes.get(key)
    if found is not None and found.of is of:  # else another tensor has this id by now
        _notes.pop(key, None)
