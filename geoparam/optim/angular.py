"""The papers' form of a step: directions are angles.

As in `blocks`, but the optimizers step an increment of A = R sqrt(m) latitude, where m is the mean
of the sphere's metric over the layer: dL/dA = dL/dlatitude / (R sqrt(m)).
"""

from collections.abc import Iterable

import torch
from torch import Tensor
from torch._utils import _flatten_dense_tensors

from geoparam import sphere
from geoparam.kernels.angles import angle_rows_for
from geoparam.optim.blocks import Angle, Block, Layers, Weight, local


class AngularBlock(Block):
    """Weights whose directions are latitudes, which the states have as `direction`.

    Rows that were written between steps are read again.
    """

    def __init__(self, weights: list[Weight], *, match: bool) -> None:
        # Weights of one fan-in follow each other: in plain torch they are one matrix.
        super().__init__(sorted(weights, key=lambda weight: weight.unit.fan_in), match=match)

    # ---- built once

    def _add_directions(self) -> None:
        for weight in self.weights:
            _start_angles(weight, match=self.match)
        lengths, metrics = self._join_layers("length"), self._join_layers("metric")
        self.scale = self.layers.per_row(_find_scale(lengths, metrics))
        self.angles = angle_rows_for(self.shapes, self.scale)
        self._add_angles([rows * (n - 1) for rows, n in self.shapes])

        sizes = [rows * n for rows, n in self.shapes]
        self.new_rows = self.stored_r.new_zeros(sum(sizes))
        every = torch.ones_like(self.stored_r, dtype=torch.bool)
        self.angles.compute(self.stored, self.stored_r, every, self.new_rows)
        for weight, rows in zip(self.weights, self.new_rows.split(sizes), strict=True):
            layout = weight.unit.layout
            target = layout.view(weight.target)
            self._add_written(layout.view(local(weight.param)), target, rows)

    def _add_angles(self, sizes: list[int]) -> None:
        """Join the states' latitudes, and let increments of them be stepped."""
        directions = [local(weight.state["direction"]) for weight in self.weights]
        self.stored = torch.cat([direction.flatten() for direction in directions])
        self.scratch = self.stored.new_zeros(2, sum(sizes))
        self.increment, self.gradient = self.scratch
        self._add_result(self.stored, self.increment)

        parts = [x.split(sizes) for x in (self.stored, *self.scratch)]
        for weight, like, *flat in zip(self.weights, directions, *parts, strict=True):
            stored, increment, gradient = (x.view(like.shape) for x in flat)
            weight.state["direction"] = weight.shard(stored)
            self._add_variable("direction", weight, increment, gradient)

    def _join(self, tensors: Iterable[Tensor]) -> Tensor:
        """Return the rows of tensors that are laid out as the weights, one after the other."""
        rows = []
        for weight, x in zip(self.weights, tensors, strict=True):
            rows.append(weight.unit.layout.to_units_first(x))
        return _flatten_dense_tensors(rows)

    # ---- before the optimizers step

    def _read_directions(self) -> None:
        self.w = self._join(weight.target for weight in self.weights)
        self.g = self._join(weight.find_gradient() for weight in self.weights)
        self.r_before = self.angles.take_up(self.w, self.new_rows, self.stored, self.stored_r)
        grad_r = self.angles.differentiate(
            self.g, self.stored, self.r_before, self.stored_r, self.gradient
        )
        self.grad_r.copy_(grad_r)

    # ---- after the optimizers have stepped

    def _compute_directions(self, angle: Angle, max_angle: Angle) -> None:
        """Compute rows from the stepped angles; a row that was not stepped keeps its digits."""
        is_moved = self.angles.move(
            self.increment,
            self.stored,
            self.w,
            self.g,
            self.r_before,
            self.stored_r,
            self.r,
            max_angle,
        )
        r = self.r.where(~self.is_pruned, 0)
        self.angles.compute(self.increment, r, is_moved, self.new_rows)


def _start_angles(weight: Weight, *, match: bool) -> None:
    """Write the first angles, and the mean of their metric, into a new state."""
    state = weight.state
    if "direction" in state:
        return
    layers = Layers([weight])
    latitude = sphere.to_latitude(weight.unit.layout.to_rows(weight.target))
    metric = torch.ones_like(layers.sizes)
    if match:
        metric = sphere.nonzero(layers.means(sphere.metric(latitude).mean(dim=1)))

    scale = layers.per_row(_find_scale(state["length"], metric))
    state["direction"] = weight.shard((latitude * scale[:, None]).to(scale.dtype))
    state["metric"] = metric


def _find_scale(length: Tensor, metric: Tensor) -> Tensor:
    """Return R sqrt(m) of each layer."""
    return sphere.nonzero(length) * metric.sqrt()
