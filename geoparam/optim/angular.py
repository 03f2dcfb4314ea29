"""Directions as the papers' angles, stored as R sqrt(g) latitude, to which a plain rate fits."""

import math
from typing import Any

import torch
from torch import Tensor

from geoparam import functional, sphere
from geoparam.kernels.rows import keep_signs
from geoparam.optim.inner import local
from geoparam.optim.stage import Member, Stage, gradient


class AngularStage(Stage):
    """Weights of one fan-in whose directions are latitudes.

    Their rows are one matrix, so that the kernel is called once. With one input there is no
    angle: W = r, of either sign.
    """

    @classmethod
    def key(cls, m: Member) -> tuple[Any, ...]:
        return m.unit.fan_in, *super().key(m)

    def _first_scale(self, m: Member) -> Tensor:
        return super()._first_scale(m) if m.has_direction else m.rows()[:, 0].clone()

    def _build_directions(self) -> None:
        self.written: Tensor | None = None  # the rows as last written to the weights
        self._start_angles()
        scales = [state["length"] * state["metric"].sqrt() for state in self.states]
        self.scale = self.rows.per_row(torch.stack(scales))[:, None]
        self.stored = torch.cat([local(state["direction"]) for state in self.states])
        is_stepped = self.first.has_direction
        self.by_stored = self._add_flat("direction", self.states, self.stored, is_stepped)

    def _start_angles(self) -> None:
        """Write the first angles, and the mean g of their metric, into new states."""
        if all("direction" in state for state in self.states):
            return
        latitude = sphere.to_latitude(self._weights())
        means = self._layer_means(sphere.metric(latitude).mean(dim=1))
        stored = latitude * (self.length * self.rows.per_row(means).sqrt())[:, None]
        parts = zip(self.members, means, self.rows.split(stored.to(self.r.dtype)), strict=True)
        for m, g, own in parts:
            if "direction" not in m.state:
                m.state.update(metric=g.clone(), direction=m.shard(own))

    def _enter_directions(self) -> None:
        if not (self.r.is_cuda and torch.cuda.is_current_stream_capturing()):
            self._read_changed_rows()
        g = torch.cat([m.unit.to_rows(gradient(m.weight, self.r.dtype)) for m in self.members])
        grad_latitude, grad_r = functional.compute_gradients(
            g, self.stored / self.scale, self.r, False
        )
        torch.div(grad_latitude, self.scale, out=self.by_stored)
        self.grad_r.copy_(grad_r)

    def _leave_directions(self) -> None:
        if self.max_turn is None or not self.first.has_direction:
            self.r.mul_(self.r_before != 0)  # a row of zeros has no direction to grow in
        else:
            keep_signs(self.r, self.r_before, self.length)
            self._limit(math.radians(self.max_turn))
        self.written = self._compute_rows()
        for m, own in zip(self.members, self.rows.split(self.written), strict=True):
            m.unit.write(m.own, own)

    def _weights(self) -> Tensor:
        return torch.cat([m.rows() for m in self.members])

    def _compute_rows(self) -> Tensor:
        return functional.compute_weight(self.stored / self.scale, self.r, self.r.dtype)

    def _read_changed_rows(self) -> None:
        """Read rows that others have changed since they were written; r keeps its sign."""
        weights = self._weights()
        written = self._compute_rows() if self.written is None else self.written
        changed = (weights != written).any(dim=1)
        if not changed.any():
            return
        rows = weights[changed]
        if not self.first.has_direction:
            self.r[changed] = rows[:, 0]
            return
        sign = torch.where(self.r[changed] < 0, -1, 1)
        self.r[changed] = torch.linalg.vector_norm(rows, dim=1) * sign
        self._store_directions(changed, rows * sign[:, None])

    def _limit(self, limit: float) -> None:
        """Turn units back that are further than `limit` from the weights' present ones."""
        u = sphere.normalise(self._weights() * self.r_before.sign()[:, None])
        v = sphere.normalise(self._compute_rows() * self.r.sign()[:, None])
        far = sphere.angle_between(u, v) > limit
        if not far.any():
            return
        u, v = u[far], v[far]
        across = sphere.normalise(v - (u * v).sum(dim=1, keepdim=True) * u)
        self._store_directions(far, u * math.cos(limit) + across * math.sin(limit))

    def _store_directions(self, chosen: Tensor, vectors: Tensor) -> None:
        """Store the directions of vectors as those of the chosen rows."""
        stored = sphere.to_latitude(vectors) * self.scale[chosen]
        self.stored[chosen] = stored.to(self.stored.dtype)
