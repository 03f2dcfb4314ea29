"""Directions as vectors: stepped in the weight's own memory, or by an increment that is turned."""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from geoparam.optim.stage import Member, Stage, is_zero, local


class IntrinsicStage(Stage):
    """Units whose directions are unit vectors times R.

    By default the base steps the vectors themselves. With `turn` or `max_turn` it steps an
    increment d beside them: its part across u, |d - <d, u> u|, becomes the angle of the turn. With
    `turn` the base starts at 0, not at R u, so that d keeps all its digits however small it is.
    """

    def __init__(
        self, members: Sequence[Member], match: bool, max_turn: float | None, turns: bool
    ) -> None:
        super().__init__(members, match, max_turn)
        self.turns = turns
        self.by_increment = self.is_bounded = turns or max_turn is not None
        self.peak, self.stretch = torch.zeros_like(self.r), torch.zeros_like(self.r)
        self.w = [_rows_of(m) for m in members]
        self.copied = [i for i, m in enumerate(members) if not m.is_in_place]
        passing = [i for i in self.copied if "direction" not in members[i].state]
        self.copies = Scratch([self.w[i] for i in passing])
        for i, part in zip(passing, self.copies.parts, strict=True):
            self.w[i] = part
        self.gradients = Scratch(self.w)
        self.increments = Scratch(self.w if self.by_increment else [])
        for i, m in enumerate(members):
            if m.unit.fan_in > 1:
                v = self.increments.parts[i] if self.by_increment else self.w[i]
                m.stored = m.parameter(v)
                m.stored.grad = m.wrap(self.gradients.parts[i])

    def _enter_directions(self, rates: Sequence[Any]) -> None:
        self.rates = rates
        self.gradients.allocate()
        self.increments.allocate(zero=self.turns)
        self.copies.allocate()
        for i in self.copied:
            self.w[i].copy_(_rows_of(self.members[i]))
        v = None if self.turns else self.increments.parts if self.by_increment else self.w
        is_still = not self.by_increment and all(is_zero(rate) for rate in rates)
        self.before = [w.clone() for w in self.w] if is_still else None
        g = [m.gradient_rows() for m in self.members]
        self.table.enter(
            self.w, g, self.gradients.parts, v,
            self.length, self.r, self.by_r, self.peak, self.stretch,
        )  # fmt: skip

    def _leave_directions(self, entered: Tensor) -> None:
        if self.by_increment:
            self._turn(entered)
        else:
            self.table.leave(self.w, self.r)
        if self.before is not None:  # at rate 0 not even rounding changes a weight
            parts = zip(self.w, self.before, self.table.split(self.r == entered), strict=True)
            for w, before, is_still in parts:
                w.copy_(torch.where(is_still.view(-1, *[1] * (w.ndim - 1)), before, w))
        torch.autograd.graph.increment_version(self.w)
        for i in self.copied:
            self.members[i].unit.layout.write(self.members[i].own, self.w[i])
        for scratch in (self.gradients, self.increments, self.copies):
            scratch.free()

    def _turn(self, entered: Tensor) -> None:
        """Turn each row by the angle of its increment, as `turn` and `max_turn` say."""
        d, c = self.increments.parts, self.zeros if self.turns else self.stretch
        along, across = self.table.measure(self.w, d, c, entered)
        limit: Any = None if self.max_turn is None else math.radians(self.max_turn)
        if self.turns:
            turn = self._turn_per_row()
            angle = across * self._factor(across) * turn
            angle = torch.minimum(angle, 4 * turn) if limit is None else angle
        else:
            angle = torch.atan2(across, self.length + along)
        angle = angle if limit is None else angle.clamp(max=limit)
        scale = torch.where(entered == 0, 1, entered)
        b = torch.where(across > 0, self.r * angle.sin() / across, 0)
        a = self.r / scale * angle.cos() - b * along / scale
        self.table.rotate(self.w, d, c, a, b)

    def _factor(self, across: Tensor) -> Tensor:
        """Return 1 / rms of each layer's increments; 0 where they, or all gradients, are 0."""
        columns = torch.stack([across.square(), (self.peak > 0).to(across), self.zeros + 1], dim=1)
        square, moving, count = self._layer_sums(columns).unbind(dim=1)
        rms = (square / count.clamp(min=1)).sqrt()
        return self._per_row(torch.where((rms == 0) | (moving == 0), 0, 1 / rms))

    def _turn_per_row(self) -> Tensor:
        """Return the layers' turns in radians, from their groups' rates in degrees."""
        ones = self.zeros + math.radians(1)
        if all(rate is self.rates[0] for rate in self.rates):
            return ones * self.rates[0]
        parts = zip(self.table.split(ones), self.rates, strict=True)
        return torch.cat([part * rate for part, rate in parts])


class Scratch:
    """Memory during a step for tensors like the given ones, which are parts of one block."""

    def __init__(self, like: Sequence[Tensor]) -> None:
        sizes = [x.numel() for x in like]
        self.block = (like[0] if like else torch.empty(0)).new_empty(sum(sizes))
        self.bytes = self.block.untyped_storage().nbytes()
        self.parts = [
            part.as_strided(x.shape, x.stride(), part.storage_offset())
            for part, x in zip(self.block.split(sizes), like, strict=True)
        ]
        self.free()

    def allocate(self, zero: bool = False) -> None:
        self.block.untyped_storage().resize_(self.bytes)
        if zero:
            self.block.zero_()

    def free(self) -> None:
        self.block.untyped_storage().resize_(0)


def _rows_of(m: Member) -> Tensor:
    """Return r u as rows: the weight itself, or of a half-precision weight its float32 copy.

    Rows of the copy that no longer round to the weight are taken up from it.
    """
    rows = m.weight_rows()
    if m.weight.dtype == m.dtype:
        return rows
    if "direction" not in m.state:
        m.state["direction"] = m.wrap(rows)
        return rows
    kept = local(m.state["direction"])
    agrees = (kept.to(m.weight.dtype) == rows.to(m.weight.dtype)).all(dim=1, keepdim=True)
    return kept.copy_(torch.where(agrees, kept, rows))
