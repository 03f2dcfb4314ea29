"""The papers' form of a step: directions are angles.

As in `blocks`, but the optimizers step an increment of A = R sqrt(m) latitude, where m is the mean
of the sphere's metric over the layer: dL/dA = dL/dlatitude / (R sqrt(m)).
"""

import math
from typing import Any

import torch
from torch import Tensor

from geoparam import functional, sphere
from geoparam.optim.blocks import Block, Member, find_gradient, local
from geoparam.optim.inner import Slot


class AngularBlock(Block):
    """Weights of one fan-in whose directions are latitudes, which the states have as `direction`.

    Rows of the weights that others have changed since the last step are read again.
    """

    @staticmethod
    def key(m: Member) -> tuple[Any, ...]:
        return m.unit.fan_in, *Block.key(m)

    def _add_directions(self) -> None:
        self._start_angles()
        metrics = torch.cat([m.state["metric"] for m in self.members])
        self.scale = (self.lengths * self.layers.per_row(metrics).sqrt())[:, None]
        self.stored = self._join_state("direction")
        self.increment, self.gradient = self.stored.new_zeros(2, *self.stored.shape)
        self.new_rows = self.stored.new_zeros(len(self.stored), self.members[0].unit.fan_in)
        self.written: Tensor | None = None  # the rows as of the last step
        self.has_zero_layers = False  # R is a part of what is stored
        self.has_zero_rows = not self.stored_r.all()

        memories = self.increment, self.gradient, self.new_rows
        parts = [memory.split(self.counts) for memory in memories]
        for m, increment, gradient, rows in zip(self.members, *parts, strict=True):
            pair = m.shard(increment), m.shard(gradient)
            self.slots.append(Slot("direction", m.state, m.group, *pair))
            target = m.unit.layout.view(m.target)
            parameter = m.unit.layout.view(local(m.weight))
            self._add_result(target, parameter, rows.view(target.shape))
        self.results.append((self.stored, self.increment))

    def _start_angles(self) -> None:
        """Write the first angles, and the mean of their metric, into new states."""
        if all("direction" in m.state for m in self.members):
            return
        latitude = sphere.to_latitude(self._join_rows())
        metrics = torch.ones_like(self.layers.sizes)
        if self.match:
            metrics = self.layers.means(sphere.metric(latitude).mean(dim=1))
            metrics = metrics.where(metrics != 0, 1)
        scale = self.lengths * self.layers.per_row(metrics).sqrt()

        first = (latitude * scale[:, None]).to(scale.dtype).split(self.counts)
        by_member = metrics.split([len(m.unit.parts) for m in self.members])
        for m, stored, metric in zip(self.members, first, by_member, strict=True):
            if "direction" not in m.state:
                m.state["direction"] = m.shard(stored)
                m.state["metric"] = metric.clone()

    def _join_rows(self) -> Tensor:
        return torch.cat([m.unit.layout.to_rows(m.target) for m in self.members])

    def _read_directions(self) -> None:
        self.increment.zero_()
        self.before = self._join_rows()
        self._read_changed_rows()
        is_zero = (self.before == 0).all(dim=1)
        self.r_before = torch.where(is_zero, 0, self.stored_r)

        gradients = [find_gradient(m.weight, m.target) for m in self.members]
        pairs = zip(self.members, gradients, strict=True)
        self.g = torch.cat([m.unit.layout.to_rows(g) for m, g in pairs])
        latitude = self.stored / self.scale
        grads = functional.compute_gradients(self.g, latitude, self.r_before, False)
        torch.div(grads[0], self.scale, out=self.gradient)
        # A row that never had a direction grows along the descent.
        is_new = is_zero & (self.stored_r == 0)
        self.grad_r.copy_(torch.where(is_new, -self.g.norm(dim=1), grads[1] * ~is_zero))

    def _read_changed_rows(self) -> None:
        """Read rows that others have changed since they were written; r keeps its sign."""
        if self.before.is_cuda and torch.cuda.is_current_stream_capturing():
            return
        written = self.written
        if written is None:
            written = self._compute_rows(self.stored, self.stored_r)
        is_changed = ((self.before != written) & (self.before != 0)).any(dim=1)
        if is_changed.any():
            rows = self.before[is_changed]
            sign = torch.where(self.stored_r[is_changed] < 0, -1, 1)
            self.stored_r[is_changed] = sphere.length(rows).to(rows.dtype) * sign
            self._store_directions(self.stored, is_changed, rows * sign[:, None])

    def _compute_directions(self, angle: float | Tensor) -> None:
        is_still = (self.increment == 0).all(dim=1) & (self.r == self.r_before)
        self.increment.add_(self.stored)
        if self.max_turn is not None:
            self._limit(math.radians(self.max_turn))

        is_born = self.is_new & self.g.any(dim=1)
        self.r.copy_(torch.where(self.is_new, is_born * self.r.abs(), self.r))
        if self.has_zero_rows and is_born.any():  # angles have no plain gradient: by the descent
            self._store_directions(self.increment, is_born, -self.g[is_born])

        rows = self._compute_rows(self.increment, self.r * (self.is_new | (self.r_before != 0)))
        self.new_rows.copy_(torch.where(is_still[:, None], self.before, rows))
        self.written = self.new_rows

    def _compute_rows(self, stored: Tensor, r: Tensor) -> Tensor:
        return functional.compute_weight(stored / self.scale, r, r.dtype)

    def _limit(self, limit: float) -> None:
        """Turn units back that would go further than `limit`."""
        u = sphere.normalise(self.before * self.r_before.sign()[:, None])
        v = sphere.normalise(self._compute_rows(self.increment, torch.ones_like(self.r)))
        is_far = sphere.angle_between(u, v) > limit
        if is_far.any():
            u, v = u[is_far], v[is_far]
            across = sphere.normalise(v - (u * v).sum(dim=1, keepdim=True) * u)
            turned = u * math.cos(limit) + across * math.sin(limit)
            self._store_directions(self.increment, is_far, turned)

    def _store_directions(self, stored: Tensor, chosen: Tensor, vectors: Tensor) -> None:
        """Store the directions of vectors as those of the chosen rows."""
        latitude = sphere.to_latitude(vectors) * self.scale[chosen]
        stored[chosen] = latitude.to(stored.dtype)

    def release(self) -> None:
        pass
