"""Directions as the papers' angles, kept in the state as R sqrt(g) times the latitudes."""

import math
from collections.abc import Sequence
from itertools import groupby
from typing import Any

import torch
from torch import Tensor, nn

from geoparam import functional, sphere
from geoparam.optim.stage import Member, Stage, is_zero, local


class Batch:
    """Layers of equal fan-in: their rows as one matrix, which is one call of the kernel.

    With one input there is no angle: W = r, of either sign.
    """

    def __init__(self, members: Sequence[Member], r: Tensor, by_r: Tensor) -> None:
        self.members, self.r, self.by_r = members, r, by_r
        self.sizes = [m.shape[0] for m in members]
        self.stored = torch.cat([local(m.state["direction"]) for m in members])
        self.by_stored = torch.zeros_like(self.stored)
        scales = [m.state["length"] * m.state["metric"].sqrt() for m in members]
        sized = zip(scales, self.sizes, strict=True)
        self.scale = torch.cat([scale.expand(size, 1) for scale, size in sized])
        for m, *parts in zip(
            members, self.stored.split(self.sizes), self.by_stored.split(self.sizes), strict=True
        ):
            m.state["direction"], by = map(m.wrap, parts)
            if m.unit.fan_in > 1:
                m.stored = nn.Parameter(m.state["direction"], requires_grad=False)
                m.stored.grad = by

    def weights(self) -> Tensor:
        return torch.cat([m.unit.layout.to_rows(m.own) for m in self.members])

    def compute_rows(self) -> Tensor:
        return functional.compute_weight(self.stored / self.scale, self.r, self.r.dtype)

    def enter(self) -> None:
        g = torch.cat([m.gradient_rows() for m in self.members])
        by_latitude, by_r = functional.compute_gradients(
            g, self.stored / self.scale, self.r, False
        )
        self.by_stored.copy_(by_latitude / self.scale)
        self.by_r.copy_(by_r)

    def changed_rows(self, written: Tensor | None) -> Tensor:
        """Return which rows of the weights are not what was written last.

        Without that, after loading a state, all that is not rounding counts as changed.
        """
        rows = self.weights()
        if written is not None:
            return (rows != written).any(dim=1)
        error = torch.linalg.vector_norm(rows - self.compute_rows(), ord=torch.inf, dim=1)
        return ~(error <= 4 * torch.finfo(rows.dtype).eps * self.r.abs())

    def take_up(self, changed: Tensor) -> None:
        """Take these rows from the weights; r keeps its sign."""
        rows, sign = self.weights()[changed].to(self.r.dtype), self.r[changed].sign()
        if rows.shape[1] == 1:
            self.r[changed] = rows[:, 0]
            return
        self.r[changed] = torch.linalg.vector_norm(rows, dim=1) * torch.where(sign < 0, -1, 1)
        turned = sphere.to_latitude(rows * torch.where(sign < 0, -1, 1)[:, None])
        self.stored[changed] = (turned * self.scale[changed]).to(self.stored.dtype)

    def write(self, rows: Tensor) -> Tensor:
        """Write rows into the weights, and return them in the weights' type."""
        rows = rows.to(self.members[0].weight.dtype)
        for m, part in zip(self.members, rows.split(self.sizes), strict=True):
            m.unit.layout.write(m.own, part)
        return rows

    def limit(self, old: Tensor, new: Tensor, max_turn: float) -> Tensor:
        """Return the new rows, none of which has turned by more than `max_turn` degrees."""
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


class AngularStage(Stage):
    """Units whose directions are latitudes."""

    def __init__(
        self,
        members: Sequence[Member],
        match: bool,
        max_turn: float | None,
        written: dict[tuple[str, ...], Tensor],
    ) -> None:
        super().__init__(sorted(members, key=lambda m: m.unit.fan_in), match, max_turn)
        self.written = written  # what was last written to the weights of each batch
        if new := [m for m in self.members if "direction" not in m.state]:
            self._start_angles(new, match)
        self.batches: dict[tuple[str, ...], Batch] = {}
        at = 0
        for _, group in groupby(self.members, key=lambda m: m.unit.fan_in):
            batch = list(group)
            rows = slice(at, at := at + sum(m.shape[0] for m in batch))
            names = tuple(m.unit.name for m in batch)
            self.batches[names] = Batch(batch, self.r[rows], self.by_r[rows])

    def _first_scale(self, m: Member) -> Tensor:
        rows = m.weight_rows()
        return rows[:, 0].clone() if m.unit.fan_in == 1 else super()._first_scale(m)

    def _start_angles(self, members: Sequence[Member], match: bool) -> None:
        latitudes = [sphere.to_latitude(m.weight_rows()) for m in members]
        metrics = [sphere.metric(x) for x in latitudes]
        sums = torch.stack([torch.stack([g.sum(), g.new_tensor(g.numel())]) for g in metrics])
        sums = self._reduce(sums)
        means = sums[:, 0] / sums[:, 1] if match else torch.ones_like(sums[:, 0])
        for m, latitude, g in zip(members, latitudes, means.to(members[0].dtype), strict=True):
            m.state["metric"] = torch.where(g.isfinite(), g, 1)
            scale = m.state["length"] * m.state["metric"].sqrt()
            m.state["direction"] = m.wrap((latitude * scale).to(m.dtype))

    def _enter_directions(self, rates: Sequence[Any]) -> None:
        self.is_still = all(is_zero(rate) for rate in rates)
        if not (self.zeros.is_cuda and torch.cuda.is_current_stream_capturing()):
            changed = [b.changed_rows(self.written.get(n)) for n, b in self.batches.items()]
            is_any = torch.stack([rows.any() for rows in changed]).tolist()
            for batch, rows, some in zip(self.batches.values(), changed, is_any, strict=True):
                if some:
                    batch.take_up(rows)
        for batch in self.batches.values():
            batch.enter()

    def _leave_directions(self, entered: Tensor) -> None:
        at = 0
        for names, batch in self.batches.items():
            before = entered[at : (at := at + len(batch.r))]
            new, old = batch.compute_rows(), batch.weights()
            if self.is_still:  # at rate 0 not even rounding changes a weight
                new = torch.where((batch.r == before)[:, None], old, new)
            elif self.max_turn is not None:
                new = batch.limit(old * before.sign()[:, None], new, self.max_turn)
            self.written[names] = batch.write(new)
