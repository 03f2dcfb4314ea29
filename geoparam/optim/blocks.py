"""A step of weights with units: gradients of direction, r and lam before, new weights after it.

A unit's weight is w = r u and its bias b = r lam. The optimizers step not w, but

    direction   an increment d of v = R u, from 0     dL/dd = (r / R) (g - u <g, u>)
    scale       r                                     dL/dr = <g, u> + lam dL/db
    distance    L = R' lam                            dL/dL = (r / R') dL/db

and the new weight is r (v + d) / |v + d|, the new bias r L / R'. R is the mean |r| of the layer at
the start, R' its present mean |r|; with `match=False` both are 1. A step of size s on v moves w by
(r / R) s: by about s, as in plain training, for SGD and Adam alike. R is the layer's mean and not
each row's |r|: otherwise a row of tiny r would turn as far as a plain one.

Nothing else here writes to a parameter. Steps are computed in scratch memory, from whatever
the weights are now, and written by `Block.write` at the end. Parameters in half
precision have a float32 copy in the state, their master, which stands for them in all of this.
"""

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._utils import _flatten_dense_tensors

from geoparam.coordinates import STEEPEST
from geoparam.kernels.rows import rows_for
from geoparam.optim.inner import FULL_PRECISION, State, Variable
from geoparam.optim.sharding import find_offset, find_process_group, shard_like
from geoparam.optim.units import Unit

Angle = float | Tensor | None
Entry = tuple[State, str, Any]

NOISE = 1000  # times the type's precision: less across a row, over what goes along it, is rounding
SMALLEST_R = 1e-3  # times R: the least |r| of a row whose r would have changed its sign


class Weight:
    """A weight with units that has a gradient, and its bias where that has one.

    A step reads and writes its `target`, the parameter or its master. It is direct where one row
    follows the other in memory, as in a matrix or a convolution of any memory format: a view of it
    is then the matrix of its rows, with columns in the order of memory. Other rows are copied.
    """

    def __init__(
        self, unit: Unit, param: Any, bias: Any, groups: tuple[int, int], states: Any
    ) -> None:
        self.unit = unit
        self.param = param
        self.bias = bias
        self.group, self.bias_group = groups
        self.state: State = states[param]
        self.bias_state: State = {} if bias is None else states[bias]

        self.is_sharded = hasattr(param, "placements")
        self.target = find_master(param, self.state)
        self.rows = self.target.numel() // unit.fan_in
        self.is_direct = self._find_whether_direct()
        self.matrix = self.view(self.target) if self.is_direct else None

    def _find_whether_direct(self) -> bool:
        axes, strides = self.unit.layout.axes, self.target.stride()
        if axes not in ("oi", "eoi"):
            return False
        without_gaps = torch.empty_like(self.target).stride()
        if not without_gaps == strides == local(self.param).stride():  # a master's may be older
            return False
        for axis in range(len(axes) - 1):  # experts may have inputs before outputs
            if strides[axis] != self.target.shape[axis + 1 :].numel():
                return False
        return True

    def view(self, x: Tensor) -> Tensor:
        """Return a view of memory laid out as the target's, in which rows follow each other."""
        if self.is_direct:
            return x.as_strided((self.rows, self.unit.fan_in), (self.unit.fan_in, 1))
        return self.unit.layout.view(x)

    def read(self) -> Tensor:
        """Return the target's rows as a matrix: a view where they are direct, else a copy."""
        return self.to_matrix(self.target) if self.matrix is None else self.matrix

    def to_matrix(self, x: Tensor) -> Tensor:
        """Return a tensor of the target's shape as rows, in the order they are stepped in."""
        if not self.is_direct:
            return self.unit.layout.to_rows(x).contiguous()
        if x.stride() != self.target.stride():
            x = torch.empty_like(self.target).copy_(x)
        return self.view(x)

    def lay_out(self, memory: Tensor) -> Tensor:
        """Return flat memory in the shape in which a direction is stepped."""
        if self.is_direct:
            return memory.as_strided(self.target.shape, self.target.stride())
        return memory.view(self.rows, self.unit.fan_in)

    def find_gradient(self) -> Tensor:
        """Return this process's part of the gradient, in the target's type."""
        return local_gradient(self.param, self.target.dtype)

    def shard(self, x: Tensor) -> Tensor:
        """Return a tensor of rows, or of the weight's shape, as a DTensor if the weight is one."""
        if not self.is_sharded:
            return x
        length = len(self.param) if x.shape == self.target.shape else self.unit.rows
        return shard_like(self.param, x, length)

    def start(self, *, match: bool) -> None:
        """Write the first r, and R, into a new state; R is 0 for a layer of zeros."""
        if "r" in self.state:
            return
        unit, layers = self.unit, Layers([self])
        r = torch.linalg.vector_norm(self.read().double(), dim=1)  # their squares fit
        sums, nonzeros = layers.sums(r, r != 0)
        if unit.is_fixed and (nonzeros < layers.sizes).any():
            raise ValueError(
                f"{unit.name!r} has a row of zeros, which cannot grow while r is fixed: load "
                "weights before the optimizer is built, so that this layer stays plain, or give "
                "scale='free'."
            )

        length = (nonzeros > 0).to(sums)
        if match:
            length = sums / nonzeros.clamp(min=1)
        self.state["r"] = self.shard(r.to(sums.dtype))
        self.state["length"] = length
        self.state["parts"] = torch.tensor(unit.parts, device=length.device)
        self.state["fan_in"] = unit.fan_in
        self.state["is_fixed"] = int(unit.is_fixed)

    def count_rows(self) -> list[int]:
        """Return how many rows of each part this process has."""
        if not self.is_sharded:
            return list(self.unit.parts)
        parts = torch.tensor(self.unit.parts, device="cpu")
        part_of_row = torch.arange(len(parts), device="cpu").repeat_interleave(parts)
        first = find_offset(self.param) * self.unit.rows // max(1, len(self.param))
        here = part_of_row[first : first + self.rows]
        return here.bincount(minlength=len(parts)).tolist()


class Layers:
    """The layers to which rows belong: sums and means over their rows, in all processes."""

    def __init__(self, weights: Sequence[Weight]) -> None:
        first = weights[0]
        counts: list[int] = []
        sizes: list[int] = []
        for weight in weights:
            counts += weight.count_rows()
            sizes += weight.unit.parts

        device, dtype = first.target.device, first.target.dtype
        self.counts = torch.tensor(counts, device=device)
        self.sizes = torch.tensor(sizes, device=device, dtype=dtype)
        self.total = sum(counts)
        self.processes = find_process_group(first.param) if first.is_sharded else None

    def sums(self, *per_row: Tensor) -> Sequence[Tensor]:
        """Return each quantity's sums; NaN and infinity count as 0: they harm no other row."""
        # One after the other: a GPU sums each column of a matrix by a single thread.
        rows = torch.cat([x.to(self.sizes.dtype) for x in per_row])
        rows = rows.nan_to_num(0.0, 0.0, 0.0)
        lengths = self.counts.repeat(len(per_row))
        sums = torch.segment_reduce(rows, "sum", lengths=lengths, initial=0, unsafe=True)
        if self.processes is not None:
            dist.all_reduce(sums, group=self.processes)
        return sums.split(len(self.counts))

    def means(self, per_row: Tensor) -> Tensor:
        """Return the mean of each layer."""
        return self.sums(per_row)[0] / self.sizes

    def per_row(self, per_layer: Tensor) -> Tensor:
        """Return one number for each layer as one for each row."""
        return per_layer.repeat_interleave(self.counts, output_size=self.total)


class Biases:
    """The biases of a block's first rows, b = r lam.

    Where |b| <= |r|, the distance L = R' b / r is stepped, else the bias as it is: lam would move
    it 1 + lam^2 times as fast as plain training. With `match=False` it is stepped as lam up to
    |b| = 100 |r|, as in converted layers.
    """

    def __init__(self, weights: list[Weight], like: Tensor, *, match: bool) -> None:
        self.weights = weights
        self.targets = [find_master(weight.bias, weight.bias_state) for weight in weights]
        self.counts = [weight.rows for weight in weights]
        self.rows = slice(sum(self.counts))
        self.steepest = 1 if match else STEEPEST
        self.stepped, self.grad = like.new_zeros(2, sum(self.counts))

    def divide(self) -> Iterator[Any]:
        """Yield each weight with its bias, what is stepped for it, and the gradient of that."""
        stepped, grads = self.stepped.split(self.counts), self.grad.split(self.counts)
        return zip(self.weights, self.targets, stepped, grads, strict=True)

    def read(self, r: Tensor, mean: Tensor, grad_r: Tensor) -> None:
        """Compute what is stepped, and its gradient; add to the gradient of r.

        Args:
            r: of all rows of the block, as the next two.
            mean: R', the present mean |r| of the layer.
            grad_r: gets lam dL/db added.
        """
        r, self.mean = r[self.rows], mean[self.rows]
        gradients = [local_gradient(weight.bias, r.dtype) for weight in self.weights]
        grad = _flatten_dense_tensors(gradients)
        self.before = _flatten_dense_tensors(self.targets)

        has_length = (r != 0) & r.isfinite()
        self.is_near = has_length & (self.before.abs() <= self.steepest * r.abs())
        self.lam = torch.where(self.is_near, self.before / replace_zeros(r), 0)
        by_distance = torch.where(self.is_near, r / self.mean, 1)  # db / dL

        distance = self.mean * self.lam
        self.stepped.copy_(torch.where(self.is_near, distance, self.before))
        self.stepped_before = self.stepped.clone()
        self.grad.copy_(by_distance * grad)
        grad_r[self.rows] += self.lam * grad

    def compute(self, r: Tensor, r_before: Tensor) -> None:
        """Compute the new biases, r L / R', as b and its change: no step, no rounding."""
        r, change_of_r = r[self.rows], (r - r_before)[self.rows]
        change = self.stepped - self.stepped_before

        change_near = self.lam * change_of_r + r / self.mean * change
        self.stepped.copy_(self.before + torch.where(self.is_near, change_near, change))


class Block:
    """Weights of one parameter group, device and type, which are stepped together.

    Args:
        match: whether directions are stored at the layers' lengths R, not at 1.

    Attributes:
        weights: those with a bias come first.
        variables: what the inner optimizers step.
        results: every tensor that a step changes, and the memory in which its new value is
            computed, by type and layout: one call copies many tensors that are alike.
    """

    def __init__(self, weights: list[Weight], *, match: bool) -> None:
        self.weights = sorted(weights, key=lambda weight: weight.bias is None)
        self.group = weights[0].group
        self.match = match
        self.layers = Layers(self.weights)
        self.shapes = [(weight.rows, weight.unit.fan_in) for weight in self.weights]
        self.counts = [rows for rows, _ in self.shapes]
        self.masters: list[tuple[Tensor, Tensor]] = []
        self.variables: list[Variable] = []
        self.w: Any = []  # the rows, and their gradients, in a step
        self.g: Any = []
        self.results = defaultdict[Any, list[tuple[Tensor, Tensor]]](list)

        for weight in self.weights:
            weight.start(match=match)
        self._add_scales()
        self._add_biases()
        self._add_directions()

    @staticmethod
    def key(weight: Weight) -> tuple[Any, ...]:
        """Return what weights that are stepped together have in common."""
        placements = getattr(weight.param, "placements", None)
        has_direction = weight.unit.fan_in > 1
        return weight.group, weight.target.device, weight.target.dtype, placements, has_direction

    # ---- built once

    def _add_scales(self) -> None:
        """Join the states' r, which have signs, and are 0 in rows that never had a direction."""
        self.stored_r = self._join_state("r")
        self.r, self.grad_r = self.stored_r.new_zeros(2, len(self.stored_r))
        self._add_result(self.stored_r, self.r)
        for weight, r, grad in self._divide(self.r, self.grad_r):
            if not weight.unit.is_fixed:
                self._add_variable("r", weight, r, grad)

        lengths = self._join_layers("length")
        self.lengths = self.layers.per_row(replace_zeros(lengths))
        self.began_as_zeros = self.layers.per_row(lengths == 0)
        self.has_zero_layers = not lengths.all()

        # A layer of zeros has far to grow: under Adam a plain row's length steps by sqrt(n) lr,
        # and r by lr.
        self.pace = torch.empty_like(self.r)
        for weight, pace in self._divide(self.pace):
            pace.fill_(math.sqrt(weight.unit.fan_in))

    def _add_biases(self) -> None:
        """Join the biases; the memory in which their distances are stepped gets the new values."""
        members = [weight for weight in self.weights if weight.bias is not None]
        self.biases = Biases(members, self.stored_r, match=self.match)
        for weight, target, lam, grad in self.biases.divide():
            self._add_variable("lam", weight, lam, grad)
            self._add_written(local(weight.bias), target, lam)

    def _add_directions(self) -> None:
        """Lay out increments and their gradients; an increment becomes the new weight."""
        sizes = [rows * fan_in for rows, fan_in in self.shapes]
        self.rows = rows_for(self.shapes, self.stored_r)
        self.scratch = self.stored_r.new_zeros(2, sum(sizes))
        self.d: list[Tensor] = []
        self.grad_d: list[Tensor] = []

        increments, gradients = (memory.split(sizes) for memory in self.scratch)
        members = zip(self.weights, self.shapes, increments, gradients, strict=True)
        for weight, shape, d, grad in members:
            self.d.append(d.view(shape))
            self.grad_d.append(grad.view(shape))

            parameter = weight.view(local(weight.param))
            self._add_written(parameter, weight.view(weight.target), d)
            if weight.unit.fan_in > 1:
                self._add_variable("direction", weight, weight.lay_out(d), weight.lay_out(grad))

    def _divide(self, *per_row: Tensor) -> Iterator[Any]:
        """Yield each weight with its part of tensors that have all rows."""
        return zip(self.weights, *[x.split(self.counts) for x in per_row], strict=True)

    def _join_state(self, key: str) -> Tensor:
        """Return an entry of all weights as one tensor, of which their states get views."""
        joined = torch.cat([local(weight.state[key]) for weight in self.weights])
        for weight, part in self._divide(joined):
            weight.state[key] = weight.shard(part)
        return joined

    def _join_layers(self, key: str) -> Tensor:
        """Return an entry of all weights that has one number for each layer."""
        return torch.cat([weight.state[key] for weight in self.weights])

    def _add_variable(self, name: str, weight: Weight, value: Tensor, grad: Tensor) -> None:
        """Let an inner optimizer step `value`, which belongs to the weight or its bias."""
        state, group = weight.state, weight.group
        if name == "r":
            group += 1  # the rest's
        elif name == "lam":
            state, group = weight.bias_state, weight.bias_group

        parameter = nn.Parameter(weight.shard(value), requires_grad=False)
        parameter.grad = weight.shard(grad)
        self.variables.append(Variable(name, parameter, state, group, weight.unit.parts))

    def _add_written(self, parameter: Tensor, target: Tensor, value: Tensor) -> None:
        """Note where a new value is written: to the parameter, and to its master if it has one."""
        value = value.view(target.shape)
        self._add_result(target, value)
        if parameter.dtype != target.dtype:
            self._add_result(parameter, value)
            self.masters.append((parameter, target))

    def _add_result(self, target: Tensor, value: Tensor) -> None:
        are_alike = target.stride() == value.stride()
        self.results[target.dtype, are_alike].append((target, value))

    def list_entries(self) -> list[Entry]:
        """Return what this block has in states: r, lengths, masters, and not the optimizers'."""
        entries = []
        for weight in self.weights:
            for state in (weight.state, weight.bias_state):
                entries += [(state, key, state[key]) for key in state if "/" not in key]
        return entries

    # ---- before the optimizers step

    def read(self) -> None:
        """Compute the gradients of directions, r and lam from those of weights and biases."""
        for half, master in self.masters:  # the parameter may have been written since
            put(master, master.to(half.dtype) != half, half.to(master.dtype))
        if self.has_zero_layers:  # without a first length, R is the present one
            means = self._spread_mean(self.stored_r)
            self.lengths = torch.where(self.began_as_zeros, means, self.lengths)

        self._claim_scratch()
        self._read_directions()
        self.r.copy_(self.r_before)
        is_zero = self.r_before == 0
        self.is_new = is_zero & (self.stored_r == 0)
        self.is_pruned = is_zero & (self.stored_r != 0)
        if self.biases.targets:
            self.biases.read(self.r_before, self._spread_mean(self.r_before), self.grad_r)

    def _spread_mean(self, r: Tensor) -> Tensor:
        """Return R' for each row: its layer's mean |r|; 1 where that is 0, and without `match`."""
        if not self.match:
            return torch.ones_like(r)
        means = self.layers.means(r.abs())
        return self.layers.per_row(replace_zeros(means))

    def _claim_scratch(self) -> None:
        """Allocate the scratch memory again, and set increments to 0."""
        storage = self.scratch.untyped_storage()
        if storage.nbytes() != self.scratch.nbytes:
            storage.resize_(self.scratch.nbytes)
        self.scratch[0].zero_()

    def _read_directions(self) -> None:
        """Find r, and the gradients of the increments and of r."""
        self.w = [weight.read() for weight in self.weights]
        self.g = [weight.to_matrix(weight.find_gradient()) for weight in self.weights]
        projected = self.rows.project(self.w, self.g, self.grad_d, self.lengths, self.stored_r)
        self.r_before, grad_r, self.size_g = projected
        self.grad_r.copy_(grad_r)

    # ---- after the optimizers have stepped

    def compute(self, angle: Angle, max_angle: Angle) -> None:
        """Compute new weights and biases from what the optimizers have stepped.

        Args:
            angle: by which layers turn, root mean square, in radians; None where steps decide.
            max_angle: the most by which one unit turns, in radians.
        """
        if self.has_zero_layers:
            grown = self.r_before + self.pace * (self.r - self.r_before)
            put(self.r, self.began_as_zeros, grown)
        if angle is not None or max_angle is not None:
            self._keep_signs()
        self._compute_directions(angle, max_angle)
        if self.biases.targets:
            self.biases.compute(self.r, self.r_before)
        # A pruned row has no r now; its sign is kept for when it comes back.
        put(self.r, self.is_pruned, self.stored_r)

    def _keep_signs(self) -> None:
        """Where r would reach or pass 0, and its unit turn round, leave a tenth, or SMALLEST_R R.

        A unit with one input has no angle: its r may pass 0.
        """
        if self.weights[0].unit.fan_in == 1:
            return
        before = self.r_before
        size = before.abs()
        least = torch.minimum(size, SMALLEST_R * self.lengths)
        kept = torch.maximum(0.1 * size, least).copysign(before)
        has_passed = torch.where(before > 0, self.r <= 0, self.r >= 0)
        put(self.r, has_passed & (before != 0), kept)

    def _compute_directions(self, angle: Angle, max_angle: Angle) -> None:
        """Turn each unit towards its increment: w = r (cos(t) u + sin(t) e).

        e is the increment's direction across u, (d - along u) / across; so w = a w + b d.
        """
        along, across = self.rows.measure(self.w, self.d, self.r_before, self.grad_d)
        if angle is None:
            turn = torch.atan2(across, self.lengths + along)  # between v and v + d
        else:
            turn = self._share_angle(angle, along, across)
        if max_angle is not None:
            turn = turn.clamp(max=max_angle)

        # A row that never had a direction takes that of its increment, and a positive r.
        turn = turn.where(~self.is_new, math.pi / 2)
        put(self.r, self.is_new, self.r.abs() * (across > 0))

        b = self.r * turn.sin() / replace_zeros(across)
        a = self.r * turn.cos() - b * along
        a = a / replace_zeros(self.r_before)

        # A pruned row stays zero, and a row whose square is too large for its type stays as it is.
        is_moved = ~(self.is_pruned | self.r_before.isinf())
        a, b = a.where(is_moved, 1), b.where(is_moved, 0)
        self.rows.combine(self.w, self.d, a, b)

    def _share_angle(self, angle: float | Tensor, along: Tensor, across: Tensor) -> Tensor:
        """Return each unit's turn, in proportion to `across`.

        A layer whose gradient is exactly 0 does not turn, whatever its momentum. Nor does a unit
        with nothing but rounding across it: it would turn to where the noise points.
        """
        noise = NOISE * torch.finfo(across.dtype).eps * along.abs()
        across = across.where(across > noise, 0)
        squares, moving = self.layers.sums(across.square(), self.size_g > 0)
        rms = (squares / self.layers.sizes).sqrt()

        is_still = (rms == 0) | (moving == 0)
        by_across = torch.where(is_still, 0, angle / rms)
        return across * self.layers.per_row(by_across)

    def write(self) -> None:
        """Write what `compute` has computed: weights, biases, masters and r."""
        for pairs in self.results.values():
            targets, values = zip(*pairs, strict=True)
            torch._foreach_copy_(targets, values)

    def release(self) -> None:
        """Free the scratch memory of GPUs. On CPUs new pages took 40 of 55 ms (ResNet-18)."""
        self.w = self.g = []
        if not self.scratch.is_cpu:
            self.scratch.untyped_storage().resize_(0)


def put(target: Tensor, is_chosen: Tensor, values: Tensor) -> None:
    """Write the chosen values to the target."""
    target.copy_(torch.where(is_chosen, values, target))


def replace_zeros(x: Tensor) -> Tensor:
    """Replace zeros by ones (a safe divisor)."""
    return x.where(x != 0, 1)


def local(x: Any) -> Tensor:
    """Return a tensor without its history; of a DTensor, this process's part."""
    return getattr(x, "_local_tensor", x).detach()


def local_gradient(p: Any, dtype: torch.dtype) -> Tensor:
    """Return this process's part of a gradient in this type."""
    part = getattr(p.grad, "_local_tensor", p.grad)
    return part if part.dtype == dtype else part.to(dtype)


def find_master(p: Any, state: State) -> Tensor:
    """Return this process's part of a parameter; of one in half precision, its float32 copy."""
    part = local(p)
    if part.dtype in FULL_PRECISION:
        state.pop("master", None)
        return part
    if "master" not in state:
        master = part.float()
        if hasattr(p, "placements"):
            master = shard_like(p, master, len(p))
        state["master"] = master
    return local(state["master"])
