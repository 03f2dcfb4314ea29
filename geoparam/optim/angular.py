"""The papers' form of a step: directions are angles.

As in `blocks`, but the optimizers step an increment of A = R sqrt(m) latitude, where m is the mean
of the sphere's metric over the layer: dL/dA = dL/dlatitude / (R sqrt(m)).
"""

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from geoparam import sphere
from geoparam.kernels.selection import weight_kernel
from geoparam.optim.blocks import Angle, Block, Weight, local, put


class AngularBlock(Block):
    """Weights of one fan-in whose directions are latitudes, which the states have as `direction`.

    Rows that were written between steps are read again.
    """

    @staticmethod
    def key(weight: Weight) -> tuple[Any, ...]:
        return weight.unit.fan_in, *Block.key(weight)

    # ---- built once

    def _add_directions(self) -> None:
        self.kernel = weight_kernel(self.stored_r)
        self._start_angles()
        metrics = torch.cat([weight.state["metric"] for weight in self.weights])
        self.scale = self._find_scale(metrics)
        self.stored = self._join_state("direction")
        self._add_increments()

        fan_in = self.weights[0].unit.fan_in
        self.new_rows = self.stored.new_zeros(len(self.stored), fan_in)
        self.has_written = False  # whether new_rows are the last step's
        for weight, rows in self._divide(self.new_rows):
            layout = weight.unit.layout
            parameter = layout.view(local(weight.param))
            self._add_written(parameter, layout.view(weight.target), rows)

    def _start_angles(self) -> None:
        """Write the first angles, and the mean of their metric, into new states."""
        if all("direction" in weight.state for weight in self.weights):
            return
        latitude = sphere.to_latitude(self._join_rows(weight.target for weight in self.weights))
        metrics = torch.ones_like(self.layers.sizes)
        if self.match:
            by_row = sphere.metric(latitude).mean(dim=1)
            metrics = sphere.nonzero(self.layers.means(by_row))

        scale = self._find_scale(metrics)
        divided = self._divide((latitude * scale).to(scale.dtype))
        for (weight, first), metric in zip(divided, self.layers.divide(metrics), strict=True):
            if "direction" not in weight.state:
                weight.state["direction"] = weight.shard(first)
                weight.state["metric"] = metric

    def _find_scale(self, metrics: Tensor) -> Tensor:
        """Return R sqrt(m) of each row."""
        scale = self.lengths * self.layers.per_row(metrics).sqrt()
        return scale[:, None]

    def _add_increments(self) -> None:
        self.scratch = self.stored.new_zeros(2, self.stored.numel())
        self.increment = self.scratch[0].view_as(self.stored)
        self.gradient = self.scratch[1].view_as(self.stored)
        self._add_result(self.stored, self.increment)
        for weight, increment, gradient in self._divide(self.increment, self.gradient):
            self._add_variable("direction", weight, increment, gradient)

    def _join_rows(self, tensors: Iterable[Tensor]) -> Tensor:
        """Return the rows of tensors that are laid out as the weights."""
        rows = []
        for weight, x in zip(self.weights, tensors, strict=True):
            rows.append(weight.unit.layout.to_rows(x))
        return torch.cat(rows)

    # ---- before the optimizers step

    def _read_directions(self) -> None:
        self.w = self._join_rows(weight.target for weight in self.weights)
        is_zero = ~self.w.any(dim=1)
        self._read_written_rows(is_zero)
        self.r_before = torch.where(is_zero, 0, self.stored_r)

        self.g = self._join_rows(weight.find_gradient() for weight in self.weights)

        latitude = self.stored / self.scale
        by_latitude, by_r = self.kernel.backward(self.g, latitude, self.r_before, False, None)
        torch.div(by_latitude, self.scale, out=self.gradient)

        # A row that never had a direction grows along the descent.
        is_new = is_zero & (self.stored_r == 0)
        by_r = by_r.where(~is_zero, 0)
        self.grad_r.copy_(torch.where(is_new, -self.g.norm(dim=1), by_r))

    def _read_written_rows(self, is_zero: Tensor) -> None:
        """Read rows that are not those of the last step; r keeps its sign.

        A row of zeros was pruned: it keeps its angles for when it comes back.
        """
        if not self.has_written:
            self.new_rows.copy_(self._compute_rows(self.stored, self.stored_r))
        is_changed = (self.w != self.new_rows).any(dim=1) & ~is_zero
        if _is_none(is_changed):
            return
        sign = torch.where(self.stored_r < 0, -1, 1)
        r = sphere.length(self.w) * sign
        put(self.stored_r, is_changed, r)
        self._store(self.stored, is_changed, self.w * sign[:, None])

    # ---- after the optimizers have stepped

    def _compute_directions(self, angle: Angle, max_angle: Angle) -> None:
        """Compute rows from the stepped angles; a row that was not stepped keeps its digits."""
        is_still = ~self.increment.any(dim=1) & (self.r == self.r_before)
        self.increment.add_(self.stored)
        if max_angle is not None:
            self._limit(max_angle)

        # A row that never had a direction had no angles to step: it takes that of the descent, or
        # of the ascent where r was stepped below 0, as with maximize=True.
        is_born = self.is_new & self.g.any(dim=1)
        sign = torch.where(self.r < 0, 1, -1)
        self._store(self.increment, is_born, self.g * sign[:, None])
        put(self.r, self.is_new, is_born * self.r.abs())

        r = self.r.where(~self.is_pruned, 0)
        rows = self._compute_rows(self.increment, r)
        self.new_rows.copy_(torch.where(is_still[:, None], self.w, rows))
        self.has_written = True

    def _limit(self, most: Any) -> None:
        """Turn units back that would go further: w = cos(most) u + sin(most) e, e across u."""
        sign = self.r_before.sign()
        u = sphere.normalise(self.w * sign[:, None])
        rows = self._compute_rows(self.increment, torch.ones_like(self.r))
        v = sphere.normalise(rows)

        along = (u * v).sum(dim=1, keepdim=True)
        e = sphere.normalise(v - along * u)
        turned = math.cos(most) * u + math.sin(most) * e
        self._store(self.increment, sphere.angle_between(u, v) > most, turned)

    def _compute_rows(self, stored: Tensor, r: Tensor) -> Tensor:
        return self.kernel.forward(stored / self.scale, r, r.dtype)[0]

    def _store(self, stored: Tensor, is_chosen: Tensor, vectors: Tensor) -> None:
        """Store the directions of the chosen vectors."""
        if not _is_none(is_chosen):
            latitude = sphere.to_latitude(vectors)
            put(stored, is_chosen[:, None], latitude * self.scale)


def _is_none(is_chosen: Tensor) -> bool:
    """Return whether no row is chosen; False on a GPU without looking, which would wait for it."""
    return is_chosen.is_cpu and not is_chosen.any()
