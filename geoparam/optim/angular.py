"""Directions as the papers' angles, kept in the state as R sqrt(g) times the latitudes."""

import math
from collections.abc import Sequence
from itertools import groupby

import torch
from torch import Tensor

from geoparam import functional, sphere
from geoparam.kernels.rows import keep_signs
from geoparam.optim.stage import Member, Part, Stage, local


class AngularStage(Stage):
    """Weights, in the order of their fan-in, whose directions are latitudes.

    With one input there is no angle: W = r, of either sign.
    """

    def _first_scale(self, m: Member) -> Tensor:
        rows = m.weight_rows()
        return rows[:, 0].clone() if m.unit.fan_in == 1 else super()._first_scale(m)

    def _build_directions(self) -> None:
        if new := [m for m in self.members if "direction" not in m.state]:
            self._start_angles(new)
        kept = [local(m.state["direction"]) for m in self.members]
        values = torch.cat([x.flatten() for x in kept])
        blocks = values, torch.zeros_like(values)
        pieces = (block.split([x.numel() for x in kept]) for block in blocks)
        for m, x, value, grad in zip(self.members, kept, *pieces, strict=True):
            value, grad, start = value.view_as(x), grad.view_as(x), value.storage_offset()
            m.state["direction"] = m.wrap(value)
            if m.unit.fan_in > 1:
                part = Part("direction", m.state, m, value, grad, blocks, start)
                m.parts["direction"] = part
        self.batches: list[Batch] = []
        at = start = 0
        for fan_in, group in groupby(self.members, key=lambda m: m.unit.fan_in):
            members = list(group)
            count = sum(m.shape[0] for m in members)
            rows, place = slice(at, at + count), slice(start, start + count * (fan_in - 1))
            stored, by_stored = (block[place].view(count, fan_in - 1) for block in blocks)
            self.batches.append(Batch(members, stored, by_stored, self.r[rows], self.by_r[rows]))
            at, start = rows.stop, place.stop

    def _start_angles(self, members: Sequence[Member]) -> None:
        latitudes = [sphere.to_latitude(m.weight_rows()) for m in members]
        means = self._layer_means([sphere.metric(x) for x in latitudes])
        for m, latitude, g in zip(members, latitudes, means, strict=True):
            m.state["metric"] = torch.where(g.isfinite(), g, 1)
            scale = m.state["length"] * m.state["metric"].sqrt()
            m.state["direction"] = m.wrap((latitude * scale).to(m.dtype))

    def _enter_directions(self) -> None:
        if not (self.r.is_cuda and torch.cuda.is_current_stream_capturing()):
            changed = [batch.changed_rows() for batch in self.batches]
            is_any = torch.stack([rows.any() for rows in changed]).tolist()
            for batch, rows, some in zip(self.batches, changed, is_any, strict=True):
                if some:
                    batch.read(rows)
        for batch in self.batches:
            batch.enter()

    def _leave_directions(self) -> None:
        if self.max_turn is not None:
            keep_signs(self.r, self.entered, self.length)
        elif self.has_free:
            self.r.mul_(self.entered != 0)  # a row of zeros has no direction to grow in
        counts, is_still = [len(batch.r) for batch in self.batches], self._is_still()
        for batch, before in zip(self.batches, self.entered.split(counts), strict=True):
            new = batch.compute_rows()
            if is_still:  # at rate 0 weights stay bit for bit
                new = torch.where((batch.r == before)[:, None], batch.weights(), new)
            elif self.max_turn is not None:
                new = batch.limit(batch.weights() * before.sign()[:, None], new, self.max_turn)
            batch.write(new)


class Batch:
    """Layers of equal fan-in: their rows are one matrix, so that the kernel is called once."""

    def __init__(
        self,
        members: Sequence[Member],
        stored: Tensor,
        by_stored: Tensor,
        r: Tensor,
        by_r: Tensor,
    ) -> None:
        self.members = members
        self.written: Tensor | None = None  # the rows as last written to the weights
        self.stored, self.by_stored, self.r, self.by_r = stored, by_stored, r, by_r
        scales = [m.state["length"] * m.state["metric"].sqrt() for m in members]
        sized = zip(scales, members, strict=True)
        self.scale = torch.cat([scale.expand(m.shape[0], 1) for scale, m in sized])
        self.views = [m.unit.layout.to_rows(m.own) for m in members]  # or copies, in other layouts
        pairs = zip(self.views, members, strict=True)
        self.are_views = all(x.data_ptr() == m.own.data_ptr() for x, m in pairs)

    def weights(self) -> Tensor:
        if not self.are_views:
            self.views = [m.unit.layout.to_rows(m.own) for m in self.members]
        return torch.cat(self.views)

    def compute_rows(self) -> Tensor:
        return functional.compute_weight(self.stored / self.scale, self.r, self.r.dtype)

    def enter(self) -> None:
        g = torch.cat([m.gradient_rows() for m in self.members])
        by_latitude, by_r = functional.compute_gradients(
            g, self.stored / self.scale, self.r, False
        )
        torch.div(by_latitude, self.scale, out=self.by_stored)
        self.by_r.copy_(by_r)

    def changed_rows(self) -> Tensor:
        """Return which rows of the weights differ from those written last.

        Before the first write, rows that differ from the state by more than rounding.
        """
        rows = self.weights()
        if self.written is not None:
            return (rows != self.written).any(dim=1)
        error = torch.linalg.vector_norm(rows - self.compute_rows(), ord=torch.inf, dim=1)
        return ~(error <= 4 * torch.finfo(rows.dtype).eps * self.r.abs())

    def read(self, changed: Tensor) -> None:
        """Read these rows from the weights; r keeps its sign."""
        rows = self.weights()[changed].to(self.r.dtype)
        if rows.shape[1] == 1:
            self.r[changed] = rows[:, 0]
            return
        sign = torch.where(self.r[changed] < 0, -1, 1)
        self.r[changed] = torch.linalg.vector_norm(rows, dim=1) * sign
        turned = sphere.to_latitude(rows * sign[:, None])
        self.stored[changed] = (turned * self.scale[changed]).to(self.stored.dtype)

    def write(self, rows: Tensor) -> None:
        """Write rows into the weights."""
        self.written = rows.to(self.members[0].weight.dtype)
        parts = self.written.split([m.shape[0] for m in self.members])
        if self.are_views:
            torch._foreach_copy_(self.views, parts)
        else:
            for m, part in zip(self.members, parts, strict=True):
                m.unit.layout.write(m.own, part)

    def limit(self, old: Tensor, new: Tensor, max_turn: float) -> Tensor:
        """Return the new rows, turned by at most `max_turn` degrees from the old ones."""
        u, v = sphere.normalise(old), sphere.normalise(new * self.r.sign()[:, None])
        limit = math.radians(max_turn)
        far = sphere.angle_between(u, v) > limit
        if new.shape[1] == 1 or not bool(far.any()):
            return new
        u, v = u[far], v[far]
        across = sphere.normalise(v - (u * v).sum(dim=1, keepdim=True) * u)
        turned = u * math.cos(limit) + across * math.sin(limit)
        self.stored[far] = (sphere.to_latitude(turned) * self.scale[far]).to(self.stored.dtype)
        new[far] = (self.r[far, None] * turned).to(new.dtype)
        return new
