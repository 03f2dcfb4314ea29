"""The papers' form of a step: directions are angles.

As in `blocks`, but the optimizers step an increment of A = R sqrt(m) latitude, where m is the mean
of the sphere's metric over the layer: dL/dA = dL/dlatitude / (R sqrt(m)).
"""

import math
from typing import Any

import torch
from torch import Tensor

from geoparam import functional, sphere
from geoparam.optim.blocks import Block, Weight, find_gradient, local


class AngularBlock(Block):
    """Weights of one fan-in whose directions are latitudes, which the states have as `direction`.

    Rows that were written between steps are read again.
    """

    @staticmethod
    def key(weight: Weight) -> tuple[Any, ...]:
        return weight.unit.fan_in, *Block.key(weight)

    def _add_directions(self) -> None:
        self._start_angles()
        metrics = torch.cat([weight.state["metric"] for weight in self.weights])
        self.scale = (self.lengths * self.layers.per_row(metrics).sqrt())[:, None]
        self.stored = self._join_state("direction")
        self.increment, self.gradient = self.stored.new_zeros(2, *self.stored.shape)
        self._add_result(self.stored, self.increment)
        self.new_rows = self.stored.new_zeros(len(self.stored), self.weights[0].unit.fan_in)
        self.written: Tensor | None = None  # the rows as of the last step

        divided = self._divide(self.increment, self.gradient, self.new_rows)
        for weight, increment, gradient, rows in divided:
            self._add_variable("direction", weight, increment, gradient)
            target = weight.unit.layout.view(weight.target)
            parameter = weight.unit.layout.view(local(weight.param))
            self._add_written(parameter, target, rows.view(target.shape))

    def _start_angles(self) -> None:
        """Write the first angles, and the mean of their metric, into new states."""
        if all("direction" in weight.state for weight in self.weights):
            return
        latitude = sphere.to_latitude(self._join_rows())
        metrics = torch.ones_like(self.layers.sizes)
        if self.match:
            means = self.layers.means(sphere.metric(latitude).mean(dim=1))
            metrics = sphere.nonzero(means)
        scale = self.lengths * self.layers.per_row(metrics).sqrt()

        divided = self._divide((latitude * scale[:, None]).to(scale.dtype))
        for (weight, first), metric in zip(divided, self.layers.divide(metrics), strict=True):
            if "direction" not in weight.state:
                weight.state["direction"] = weight.shard(first)
                weight.state["metric"] = metric

    def _join_rows(self) -> Tensor:
        return torch.cat([weight.unit.layout.to_rows(weight.target) for weight in self.weights])

    def _read_directions(self) -> None:
        self.increment.zero_()
        self.before = self._join_rows()
        self._read_written_rows()
        is_zero = (self.before == 0).all(dim=1)
        self.r_before = torch.where(is_zero, 0, self.stored_r)

        gradients = []
        for weight in self.weights:
            gradient = find_gradient(weight.param, weight.target)
            gradients.append(weight.unit.layout.to_rows(gradient))
        self.g = torch.cat(gradients)
        latitude = self.stored / self.scale
        by_latitude, by_r = functional.compute_gradients(self.g, latitude, self.r_before, False)
        torch.div(by_latitude, self.scale, out=self.gradient)
        # A row that never had a direction grows along the descent.
        is_new = is_zero & (self.stored_r == 0)
        self.grad_r.copy_(torch.where(is_new, -self.g.norm(dim=1), by_r * ~is_zero))

    def _read_written_rows(self) -> None:
        """Read rows that are not those of the last step; r keeps its sign."""
        written = self.written
        if written is None:
            written = self._compute_rows(self.stored, self.stored_r)
        # A row of zeros was pruned: it keeps its angles for when it comes back.
        is_changed = (self.before != written).any(dim=1) & (self.before != 0).any(dim=1)
        if _is_none(is_changed):
            return
        sign = torch.where(self.stored_r < 0, -1, 1)
        r = sphere.length(self.before) * sign
        self.stored_r.copy_(torch.where(is_changed, r, self.stored_r))
        self._store_directions(self.stored, is_changed, self.before * sign[:, None])

    def _compute_directions(self, angle: float | Tensor | None, max_angle: float | None) -> None:
        """Compute rows from the stepped angles; a row that was not stepped keeps its digits."""
        is_still = (self.increment == 0).all(dim=1) & (self.r == self.r_before)
        self.increment.add_(self.stored)
        if max_angle is not None:
            self._limit(max_angle)

        # A row that never had a direction had no angles to step: it takes that of the descent, or
        # of the ascent where r was stepped below 0, as with maximize=True.
        is_born = self.is_new & self.g.any(dim=1)
        sign = torch.where(self.r < 0, 1, -1)
        self._store_directions(self.increment, is_born, self.g * sign[:, None])
        self.r.copy_(torch.where(self.is_new, is_born * self.r.abs(), self.r))

        rows = self._compute_rows(self.increment, self.r * ~self.is_pruned)
        self.new_rows.copy_(torch.where(is_still[:, None], self.before, rows))
        self.written = self.new_rows

    def _compute_rows(self, stored: Tensor, r: Tensor) -> Tensor:
        return functional.compute_weight(stored / self.scale, r, r.dtype)

    def _limit(self, limit: float) -> None:
        """Turn units back that would go further than `limit`."""
        u = sphere.normalise(self.before * self.r_before.sign()[:, None])
        v = sphere.normalise(self._compute_rows(self.increment, torch.ones_like(self.r)))
        along = (u * v).sum(dim=1, keepdim=True)
        across = sphere.normalise(v - along * u)
        turned = u * math.cos(limit) + across * math.sin(limit)
        self._store_directions(self.increment, sphere.angle_between(u, v) > limit, turned)

    def _store_directions(self, stored: Tensor, is_chosen: Tensor, vectors: Tensor) -> None:
        """Store the directions of the chosen vectors."""
        if not _is_none(is_chosen):
            latitude = sphere.to_latitude(vectors) * self.scale
            stored.copy_(torch.where(is_chosen[:, None], latitude, stored))

    def release(self) -> None:
        pass


def _is_none(is_chosen: Tensor) -> bool:
    """Return whether no row is chosen; False on a GPU without looking, which would wait for it."""
    return is_chosen.is_cpu and not is_chosen.any()
