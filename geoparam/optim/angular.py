"""Directions as the papers' angles, kept in the state as R sqrt(g) times the latitudes."""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from geoparam import sphere
from geoparam.ops import implementation
from geoparam.optim.stage import Member, Stage, is_zero, local


class AngularStage(Stage):
    """Units whose directions are latitudes; rows of equal fan-in share one call of the kernel.

    With one input there is no angle: W = r, of either sign.
    """

    def __init__(
        self,
        members: Sequence[Member],
        match: bool,
        max_turn: float | None,
        written: dict[str, Tensor],
    ) -> None:
        super().__init__(members, match, max_turn)
        self.written = written  # what was last written to each weight, as rows
        self.batches: dict[int, list[Member]] = {}
        for m in self.members:
            self.batches.setdefault(m.unit.fan_in, []).append(m)
        if new := [m for m in members if "direction" not in m.state]:
            self._start_angles(new, match)
        for m in self.members:
            m.scale = float(m.state["length"]) * math.sqrt(float(m.state["metric"]))
            if m.unit.fan_in > 1:
                m.stored = nn.Parameter(m.state["direction"], requires_grad=False)

    def _first_scale(self, m: Member) -> Tensor:
        rows = m.weight_rows()
        return rows[:, 0].clone() if m.unit.fan_in == 1 else super()._first_scale(m)

    def _start_angles(self, members: Sequence[Member], match: bool) -> None:
        latitudes = [sphere.to_latitude(m.weight_rows()) for m in members]
        metrics = [sphere.metric(x) for x in latitudes]
        sums = [torch.stack([g.sum(), g.new_tensor(g.numel())]) for g in metrics]
        for m, latitude, (total, count) in zip(
            members, latitudes, self._reduce(torch.stack(sums)).tolist(), strict=True
        ):
            g = total / count if match and count else 1.0
            m.state["metric"] = m.state["length"].new_tensor(g)
            scaled = latitude * (float(m.state["length"]) * math.sqrt(g))
            m.state["direction"] = m.wrap(scaled.to(m.dtype))

    def _enter_directions(self, rates: Sequence[Any]) -> None:
        self.is_still = all(is_zero(rate) for rate in rates)
        self.parts = dict(zip(self.members, self.table.split(self.r), strict=True))
        self._take_up_writes()
        slopes = dict(zip(self.members, self.table.split(self.by_r), strict=True))
        for batch in self.batches.values():
            latitude, scale = self._latitudes(batch), torch.cat([self.parts[m] for m in batch])
            g = torch.cat([m.gradient_rows() for m in batch])
            found = implementation.backward(g, latitude, scale, False)
            sizes = [m.shape[0] for m in batch]
            for m, by_angle, by_r in zip(batch, *(x.split(sizes) for x in found), strict=True):
                slopes[m].copy_(by_r)
                if m.stored is not None:
                    m.stored.grad = m.wrap(by_angle / m.scale)

    def _latitudes(self, batch: Sequence[Member]) -> Tensor:
        return torch.cat([local(m.state["direction"]) / m.scale for m in batch])

    def _weights(self, batch: Sequence[Member], r: Sequence[Tensor]) -> Sequence[Tensor]:
        rows = implementation.forward(self._latitudes(batch), torch.cat([*r]), r[0].dtype)
        return rows.split([m.shape[0] for m in batch])

    def _take_up_writes(self) -> None:
        """Take rows that somebody has written to since the last step up from the weights."""
        if self.zeros.is_cuda and torch.cuda.is_current_stream_capturing():
            return  # the answer would have to come back to the host
        changed = [self._changed_rows(m) for m in self.members]
        for m, flags, any_changed in zip(
            self.members, changed, torch.stack([f.any() for f in changed]).tolist(), strict=True
        ):
            if any_changed:
                rows, old = m.weight_rows()[flags], self.parts[m][flags]
                if m.unit.fan_in == 1:
                    self.parts[m][flags] = rows[:, 0]
                    continue
                self.parts[m][flags] = torch.linalg.vector_norm(rows, dim=1).copysign(old)
                turned = sphere.to_latitude(rows * old.sign()[:, None]) * m.scale
                local(m.state["direction"])[flags] = turned.to(m.dtype)

    def _changed_rows(self, m: Member) -> Tensor:
        rows, last = m.weight_rows(), self.written.get(m.unit.name)
        if last is not None:
            return (rows.to(last.dtype) != last).any(dim=1)
        expected = self._weights([m], [self.parts[m]])[0]  # after loading: all but rounding counts
        error = torch.linalg.vector_norm(rows - expected, ord=torch.inf, dim=1)
        return ~(error <= 4 * torch.finfo(m.weight.dtype).eps * self.parts[m].abs())

    def _leave_directions(self, entered: Tensor) -> None:
        before = dict(zip(self.members, self.table.split(entered), strict=True))
        for batch in self.batches.values():
            rows = self._weights(batch, [self.parts[m] for m in batch])
            for m, new in zip(batch, rows, strict=True):
                r, old = self.parts[m], m.weight_rows()
                if self.is_still:  # at rate 0 not even rounding changes a weight
                    new = torch.where((r == before[m])[:, None], old, new)
                elif self.max_turn is not None and m.unit.fan_in > 1:
                    new = self._limit(m, old * before[m].sign()[:, None], new, r)
                m.unit.layout.write(m.own, new)
                self.written[m.unit.name] = new.to(m.weight.dtype)
                if m.stored is not None:
                    m.stored.grad = None

    def _limit(self, m: Member, old: Tensor, new: Tensor, r: Tensor) -> Tensor:
        """Return the new rows, none of which has turned by more than `max_turn`."""
        u, v = (
            sphere.normalise(x * s.sign()[:, None]) for x, s in ((old, self.parts[m]), (new, r))
        )
        limit = math.radians(self.max_turn or 0)
        too_far = ~(sphere.angle_between(u, v) <= limit)
        if not bool(too_far.any()):
            return new
        u, v = u[too_far], v[too_far]
        across = sphere.normalise(v - (u * v).sum(dim=1, keepdim=True) * u)
        turned = u * math.cos(limit) + across * math.sin(limit)
        local(m.state["direction"])[too_far] = (sphere.to_latitude(turned) * m.scale).to(m.dtype)
        new = new.clone()
        new[too_far] = (r[too_far, None] * turned).to(new.dtype)
        return new
