"""Directions as the papers' angles, kept in the state as R sqrt(g) times the latitudes."""

import math

import torch
from torch import Tensor

from geoparam import functional, sphere
from geoparam.kernels.rows import keep_signs
from geoparam.optim.stage import Member, Stage, local


class AngularStage(Stage):
    """Weights of one fan-in whose directions are latitudes.

    Their rows are one matrix, so that the kernel is called once. With one input there is no
    angle: W = r, of either sign.
    """

    def _first_scale(self, m: Member) -> Tensor:
        rows = m.weight_rows()
        return rows[:, 0].clone() if m.unit.fan_in == 1 else super()._first_scale(m)

    def _build_directions(self) -> None:
        members, split = self.members, self.rows.split
        self.written: Tensor | None = None  # the rows as last written to the weights
        if "direction" not in self.first.state:
            self._start_angles()
        scales = [m.state["length"] * m.state["metric"].sqrt() for m in members]
        self.scale = self.rows.per_row(torch.stack(scales))[:, None]
        self.stored = torch.cat([local(m.state["direction"]) for m in members])
        self.by_stored = torch.zeros_like(self.stored)
        for m, own in zip(members, split(self.stored), strict=True):
            m.state["direction"] = m.wrap(own)
        if self.first.unit.fan_in > 1:
            states, values, grads = [m.state for m in members], self.stored, self.by_stored
            whole = values.view(-1), grads.view(-1)
            self._add_block("direction", states, split(values), split(grads), whole)

    def _start_angles(self) -> None:
        latitude = sphere.to_latitude(torch.cat([m.weight_rows() for m in self.members]))
        means = self._layer_means(sphere.metric(latitude).mean(dim=1))
        means = torch.where(means.isfinite(), means, 1).to(self.r.dtype)
        stored = latitude * (self.length * self.rows.per_row(means).sqrt())[:, None]
        parts = zip(self.members, means, self.rows.split(stored.to(self.r.dtype)), strict=True)
        for m, g, own in parts:
            m.state.update(metric=g.clone(), direction=m.wrap(own))

    def _enter_directions(self) -> None:
        if not (self.r.is_cuda and torch.cuda.is_current_stream_capturing()):
            self._read_changed_rows()
        g = torch.cat([m.gradient_rows() for m in self.members])
        by_latitude, by_r = functional.compute_gradients(
            g, self.stored / self.scale, self.r, False
        )
        torch.div(by_latitude, self.scale, out=self.by_stored)
        self.by_r.copy_(by_r)

    def _leave_directions(self) -> None:
        if self.max_turn is not None:
            keep_signs(self.r, self.entered, self.length)
        else:
            self.r.mul_(self.entered != 0)  # a row of zeros has no direction to grow in
        rows = self._compute_rows()
        if self.max_turn is not None:
            self._limit(rows, math.radians(self.max_turn))
        self.written = rows.to(self.first.weight.dtype)
        for m, own in zip(self.members, self.rows.split(self.written), strict=True):
            m.unit.layout.write(m.own, own)

    def _weights(self) -> Tensor:
        return torch.cat([m.unit.layout.to_rows(m.own) for m in self.members])

    def _compute_rows(self) -> Tensor:
        return functional.compute_weight(self.stored / self.scale, self.r, self.r.dtype)

    def _read_changed_rows(self) -> None:
        """Read rows that differ from those written last; r keeps its sign.

        Before the first write, rows that differ from the state by more than rounding.
        """
        weights = self._weights()
        if self.written is not None:
            changed = (weights != self.written).any(dim=1)
        else:
            error = torch.linalg.vector_norm(weights - self._compute_rows(), torch.inf, dim=1)
            changed = ~(error <= 4 * torch.finfo(weights.dtype).eps * self.r.abs())
        if not changed.any():
            return
        rows = weights[changed].to(self.r.dtype)
        if self.first.unit.fan_in == 1:
            self.r[changed] = rows[:, 0]
            return
        sign = torch.where(self.r[changed] < 0, -1, 1)
        self.r[changed] = torch.linalg.vector_norm(rows, dim=1) * sign
        self._store(changed, rows * sign[:, None])

    def _limit(self, rows: Tensor, limit: float) -> None:
        """Turn rows back that are further than `limit` from the weights' present ones."""
        u = sphere.normalise(self._weights() * self.entered.sign()[:, None])
        v = sphere.normalise(rows * self.r.sign()[:, None])
        far = sphere.angle_between(u, v) > limit
        if self.first.unit.fan_in == 1 or not far.any():
            return
        u, v = u[far], v[far]
        across = sphere.normalise(v - (u * v).sum(dim=1, keepdim=True) * u)
        turned = u * math.cos(limit) + across * math.sin(limit)
        self._store(far, turned)
        rows[far] = (self.r[far, None] * turned).to(rows.dtype)

    def _store(self, chosen: Tensor, vectors: Tensor) -> None:
        """Store the directions of vectors as those of the chosen rows."""
        stored = sphere.to_latitude(vectors) * self.scale[chosen]
        self.stored[chosen] = stored.to(self.stored.dtype)
