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
        self.own = [m.own for m in members]
        for m in self.members:
            if m.unit.fan_in > 1:
                m.stored = m.parameter(m.weight_rows())

    def _enter_directions(self, r: Tensor, rates: Sequence[Any]) -> tuple[Tensor, Tensor]:
        self.rates = rates
        is_bounded = self.turns or self.max_turn is not None
        self.by_increment = is_bounded or all(is_zero(rate) for rate in rates)
        self.w = [_rows_of(m) for m in self.members]
        self.v = self.w
        if self.by_increment:
            make = torch.zeros_like if self.turns else torch.empty_like
            self.v = [make(w) for w in self.w]
        by_v = [torch.empty_like(w) for w in self.w]
        gradients = [m.gradient_rows() for m in self.members]
        v = None if self.turns else self.v
        entered = self.table.enter(self.w, gradients, by_v, v, r, self.length)
        self.peak, self.stretch = entered.peak, entered.stretch
        for m, v, by in zip(self.members, self.v, by_v, strict=True):
            if m.stored is not None:
                if self.by_increment or not m.is_in_place:
                    _set_memory(m.stored, v)
                m.stored.grad = m.wrap(by)
        return entered.r, entered.slope

    def _leave_directions(self, r: Tensor) -> None:
        if self.by_increment:
            self._turn(r)
        else:
            self.table.leave(self.w, r)
        torch.autograd.graph.increment_version(self.own)
        for m, w in zip(self.members, self.w, strict=True):
            if not m.is_in_place:
                m.unit.layout.write(m.own, w)
            if m.stored is not None and (self.by_increment or not m.is_in_place):
                _set_memory(m.stored, m.own)  # let the step's own memory go
        self.w = self.v = []

    def _turn(self, r: Tensor) -> None:
        """Turn each row by the angle of its increment, as `turn` and `max_turn` say."""
        c = self.zeros if self.turns else self.stretch
        along, across = self.table.measure(self.w, self.v, c, self.r)
        limit = None if self.max_turn is None else math.radians(self.max_turn)
        if self.turns:
            turn = self._turn_per_row()
            angle = across * self._factor(across) * turn
            limit = 4 * turn if limit is None else torch.full_like(turn, limit)
        else:
            angle = torch.atan2(across, self.length + along)
        if limit is not None:
            angle = angle.clamp(max=limit)
        scale = torch.where(self.r == 0, 1, self.r)
        b = torch.where(across > 0, r * angle.sin() / across, 0)
        self.table.rotate(self.w, self.v, c, r / scale * angle.cos() - b * along / scale, b)

    def _factor(self, across: Tensor) -> Tensor:
        """Return 1 / rms of each layer's increments; 0 where they, or all gradients, are 0."""
        ones = torch.ones_like(across)
        sums = torch.stack([across.square(), ones, (self.peak > 0).to(across.dtype)])
        square, count, moving = (self._layer_sums(x) for x in sums)
        rms = (square / count.clamp(min=1)).sqrt()
        return self._per_row(torch.where((rms == 0) | (moving == 0), 0, 1 / rms))

    def _turn_per_row(self) -> Tensor:
        """Return the layers' turns in radians, from their groups' rates in degrees."""
        ones = torch.ones_like(self.zeros)
        parts = self.table.split(ones)
        if all(rate is self.rates[0] or rate == self.rates[0] for rate in self.rates[1:]):
            return ones * math.radians(1) * self.rates[0]
        return torch.cat([x * rate for x, rate in zip(parts, self.rates, strict=True)]).deg2rad()


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


def _set_memory(p: Any, memory: Tensor) -> None:
    if hasattr(p, "_local_tensor"):
        p._local_tensor = memory
    else:
        p.data = memory
