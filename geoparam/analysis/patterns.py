r"""Which linear region each data point is in, and how that changes in training.

A deep unit's boundary is no hyperplane: it bends wherever it meets a boundary of an earlier layer,
so it has no direction to follow from step to step (the papers leave it open). What can be followed
is the partition that all boundaries make together. A point's activation pattern has one bit for
each breakpoint t of each unit, at each position: whether its pre-activation z > t. Two points with
the same pattern are in the same region, on which a piecewise linear network is one affine map.
A max pool has one bit for each place of each window: whether the input there wins.

Bits are packed by eight, one activation at a time, and never unpacked: a network may have 10^7 for
each point. All results stay on the model's device, without a synchronisation. Different patterns
are counted by a fingerprint of 64 bits: twice the upper half of sum_i k_i w_i mod 2^64, over words
w_i of 32 bits, with random keys k_i. Two different patterns get the same one with probability
2^-64, whatever they are (Lemire and Kaser, *Strongly universal string hashing is fast*, 2014).

Smooth activations have no bits.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

# Read as one integer, eight bools are the sum of b_i 2^(8i). Times the sum of 2^(63 - 9j), b_i is
# at bit 63 - i. Other terms have exponents of their own below 56 or above 63: nothing carries.
GATHER = 0x8040201008040201 - (1 << 64)


def pack(bits: Tensor) -> Tensor:
    """Return bools (N, B) as bytes (N, ceil(B / 8)): those of `numpy.packbits(bits, axis=1)`."""
    return ((_view_as(bits, torch.int64) * GATHER) >> 56).to(torch.uint8)


def fingerprints(packed: Tensor) -> Tensor:
    """Return one integer of 64 bits for each row, (N,): equal rows have the same."""
    words = _view_as(packed, torch.int32).long()
    count = words.shape[1]
    random = torch.Generator(packed.device).manual_seed(0)
    keys = torch.empty(2, count + 1, dtype=torch.int64, device=packed.device)
    keys.random_(-(1 << 63), None, generator=random)

    halves = []
    for key in keys:
        sums = (words * key[1:]).sum(dim=1) + key[0]
        halves.append((sums >> 32).int())
    return torch.stack(halves, dim=1).view(torch.int64)[:, 0]


def _view_as(rows: Tensor, dtype: torch.dtype) -> Tensor:
    """Return rows of bytes as rows of a larger type, padded with zeros at the end."""
    lacking = -rows.shape[1] % dtype.itemsize
    if lacking or rows.storage_offset() % dtype.itemsize:
        rows = F.pad(rows, (0, lacking))
    return rows.contiguous().view(dtype)


def _count_distinct(prints: Tensor) -> Tensor:
    if not len(prints):
        return prints.new_zeros(())
    ordered = prints.sort().values
    return 1 + (ordered[1:] != ordered[:-1]).sum()


@dataclass(frozen=True)
class Pattern:
    """On which side of its boundaries each point lies: one packed row for each point."""

    packed: Tensor  # bytes (N, bytes); each breakpoint, and each call, begins at a whole byte
    bits: int  # how many of the bits of a row are in use; the others are 0

    def __len__(self) -> int:
        return len(self.packed)

    def hamming(self, earlier: "Pattern") -> Tensor:
        """Return how many bits of each point differ, (N,)."""
        if self.packed.shape != earlier.packed.shape:
            raise ValueError(
                "patterns can be compared if they have the same points and units; got "
                f"{tuple(self.packed.shape)} and {tuple(earlier.packed.shape)} bytes. Keep the "
                "probe batch."
            )
        count = self.packed ^ earlier.packed
        count -= (count >> 1) & 0x55  # sums of the bits in each byte: in pairs, fours, all eight
        count = (count & 0x33) + ((count >> 2) & 0x33)
        count = (count + (count >> 4)) & 0x0F
        return count.sum(dim=1)

    def distinct(self) -> Tensor:
        """Return in how many different regions the points are."""
        return _count_distinct(fingerprints(self.packed))


def make_pattern(sides: Iterable[Tensor]) -> Pattern:
    """Return the pattern of bools (N, ...), one tensor for each breakpoint."""
    parts = []
    for side in sides:
        bits = side.flatten(1)
        parts.append(Pattern(pack(bits), bits.shape[1]))
    return _join(parts)


class Change(NamedTuple):
    """What happened to the regions of a batch of points, each a tensor with one element."""

    share: Tensor  # of all bits of all points: those that changed
    points: Tensor  # that are in another region than before
    regions: Tensor  # different patterns among the points


class Changes(NamedTuple):
    """Changes by layer name, and of all layers together."""

    layers: dict[str, Change]
    network: Change


class Patterns(Mapping[str, Pattern]):
    """The pattern of each layer, by name, and that of the network: each activation counts once.

    An activation or max pool that shows no layer's units, as one after a sum or a concatenation,
    belongs to the layer before it. `abs`, `maximum`, `where` and sorting have no bits.

    Args:
        parts: The pattern of each activation and max pool, by the number of its step.
        layers: The steps that show a layer's units. Two layers before one sum share a step.
    """

    def __init__(self, parts: Mapping[int, Pattern], layers: Mapping[str, Sequence[int]]) -> None:
        self.parts = dict(parts)
        self.layers = {name: tuple(steps) for name, steps in layers.items()}

    def __getitem__(self, name: str) -> Pattern:
        return _join([self.parts[step] for step in self.layers[name]])

    def __iter__(self) -> Iterator[str]:
        return iter(self.layers)

    def __len__(self) -> int:
        return len(self.layers)

    @property
    def network(self) -> Pattern:
        """All bits of each point in one row; a copy."""
        return _join(list(self.parts.values()))

    def distinct(self) -> Tensor:
        """Return in how many different regions of the network the points are."""
        prints = [fingerprints(part.packed) for part in self.parts.values()]
        return _count_distinct(_combine(prints))

    def changes(self, earlier: "Patterns") -> Changes:
        """Return how regions changed since patterns of the same layers on the same points.

        Example:
            >>> from geoparam.analysis import patterns
            >>> from torch import nn
            >>> x, model = torch.tensor([[1.], [2.]]), nn.Sequential(nn.Linear(1, 4), nn.ReLU())
            >>> _ = nn.init.ones_(model[0].weight), nn.init.zeros_(model[0].bias)
            >>> before = patterns(model, x)
            >>> _ = nn.init.constant_(model[0].bias[0], -1.5)
            >>> change = patterns(model, x).changes(before).network
            >>> change.share.item(), change.points.item(), change.regions.item()
            (0.125, 1, 2)
        """
        if self.layers != earlier.layers:
            raise ValueError(
                f"patterns of the same layers can be compared; got {', '.join(self.layers)} and "
                f"{', '.join(earlier.layers)}, or other steps. Read both from one model."
            )
        counts: dict[int, Tensor] = {}
        prints: dict[int, Tensor] = {}
        for step, part in self.parts.items():
            counts[step] = part.hamming(earlier.parts[step])
            prints[step] = fingerprints(part.packed)

        def change_over(steps: Sequence[int]) -> Change:
            count = torch.stack([counts[step] for step in steps]).sum(dim=0)
            bits = sum(self.parts[step].bits for step in steps)
            share = count.sum().double() / max(1, bits * len(count))
            regions = _count_distinct(_combine([prints[step] for step in steps]))
            return Change(share, (count > 0).sum(), regions)

        layers = {name: change_over(steps) for name, steps in self.layers.items()}
        return Changes(layers, change_over(tuple(self.parts)))


def _join(parts: Sequence[Pattern]) -> Pattern:
    if len(parts) == 1:
        return parts[0]
    packed = torch.cat([part.packed for part in parts], dim=1)
    return Pattern(packed, sum(part.bits for part in parts))


def _combine(prints: Sequence[Tensor]) -> Tensor:
    """Return one fingerprint for each point, from one for each point and part."""
    if len(prints) == 1:
        return prints[0]
    return fingerprints(torch.stack(list(prints), dim=1).view(torch.uint8))
