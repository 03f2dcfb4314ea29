"""One optimizer step on directions, r and lam: their gradients before it, new weights after it.

A unit's weight is w = r u and its bias b = r lam. The optimizers step not w, but

    direction   an increment d of v = R u, from 0     dL/dd = (r / R) (g - u <g, u>)
    angles      an increment of R sqrt(m) latitude    dL/dA = dL/dlatitude / (R sqrt(m))
    scale       r                                     dL/dr = <g, u> + lam dL/db
    distance    L = R' lam                            dL/dL = (r / R') dL/db

and the new weight is r (v + d) / |v + d|, the new bias r L / R'. R is the mean |r| of the layer at
the start, m the mean of the sphere's metric, R' the layer's present mean |r|; with `match=False`
all three are 1. A step of size s on v moves w by (r / R) s: by about s, as in plain training, for
SGD and Adam alike. R is the layer's mean and not each row's own |r|: with its own, a row of tiny r
would turn as far as a plain one.

Nothing here writes to a parameter. Steps are computed in scratch memory, starting from whatever
the weights are now; `Block.results` pairs each parameter with its new value. Parameters in half
precision have a float32 copy in the state, their master, which stands for them in all of this.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from geoparam import functional, sphere
from geoparam.coordinates import STEEPEST
from geoparam.kernels.rows import rows_for
from geoparam.optim.inner import FULL_PRECISION, Slot, State
from geoparam.optim.sharding import find_offset, find_process_group, local, shard_like
from geoparam.optim.units import Unit
from geoparam.sphere import nonzero

View = Callable[[Tensor], Tensor]
SMALLEST_R = 1e-3  # times R: the least |r| of a row whose r would have changed its sign


class Member:
    """A weight with units that has a gradient, and its bias where that has one.

    Its `target`, the weight or its master, is read and written. It is direct where its memory has
    one row after the other, as a matrix or a convolution in any memory format does: then a view of
    it is the matrix of its rows, in the order of its memory. Else its rows are copied.
    """

    def __init__(
        self, unit: Unit, weight: Any, bias: Any, groups: tuple[int, int], states: Any
    ) -> None:
        self.unit, self.weight, self.bias = unit, weight, bias
        self.group, self.bias_group = groups
        self.state: State = states[weight]
        self.bias_state: State = {} if bias is None else states[bias]

        self.target = find_master(weight, self.state)
        self.rows = self.target.numel() // unit.fan_in
        is_dense = torch.empty_like(self.target).stride() == self.target.stride()
        is_by_row = self.rows == 0 or self.target.stride(0) == self.target[0].numel()
        self.is_direct = unit.layout.axes in ("oi", "eoi") and is_dense and is_by_row

    def to_matrix(self, x: Tensor) -> Tensor:
        """Return a tensor of the target's shape as rows, in the order they are stepped in."""
        if not self.is_direct:
            return self.unit.layout.to_rows(x).contiguous()
        if x.stride() != self.target.stride():
            x = torch.empty_like(self.target).copy_(x)
        return x.as_strided((self.rows, self.unit.fan_in), (self.unit.fan_in, 1))

    def view(self, parameter: Tensor) -> Tensor:
        """Return the parameter's memory in the shape in which new values are computed."""
        return parameter if self.is_direct else self.unit.layout.view(parameter)

    def find_part_rows(self) -> list[int]:
        """Return how many rows of each part this process has."""
        first = find_offset(self.weight) * (self.unit.rows // self.weight.shape[0])
        counts, start = [], 0
        for size in self.unit.parts:
            begin, end = max(start, first), min(start + size, first + self.rows)
            counts.append(max(0, end - begin))
            start += size
        return counts


class Layers:
    """The layers to which rows belong: sums and means over their rows, in all processes."""

    def __init__(self, members: Sequence[Member], like: Tensor) -> None:
        counts = [count for m in members for count in m.find_part_rows()]
        sizes = [size for m in members for size in m.unit.parts]
        self.counts = torch.tensor(counts, device=like.device)
        self.sizes = torch.tensor(sizes, device=like.device, dtype=like.dtype)
        self.total = sum(counts)
        self.processes = find_process_group(members[0].weight)

    def sums(self, *per_row: Tensor) -> Tensor:
        """Return (layers, columns); NaN and infinity count as 0: only their own row suffers."""
        columns = torch.stack([x.to(self.sizes.dtype) for x in per_row], dim=1)
        columns = columns.nan_to_num(0.0, 0.0, 0.0)
        sums = torch.segment_reduce(columns, "sum", lengths=self.counts, initial=0, unsafe=True)
        if self.processes is not None:
            dist.all_reduce(sums, group=self.processes)
        return sums

    def means(self, per_row: Tensor) -> Tensor:
        """Return the mean of each layer."""
        return self.sums(per_row)[:, 0] / self.sizes

    def per_row(self, per_layer: Tensor) -> Tensor:
        """Return one number for each layer as one for each row."""
        return per_layer.repeat_interleave(self.counts, output_size=self.total)


class Block:
    """Weights of one parameter group, device and type, which are stepped together.

    Args:
        members: those with a bias come first.
        match: whether directions are stored at the layers' lengths R, not at 1.
        turns: whether layers turn by the angle that `compute` receives.
        max_turn: the largest angle by which one unit turns in a step, in degrees.
    """

    def __init__(
        self, members: list[Member], *, match: bool, turns: bool, max_turn: float | None
    ) -> None:
        self.members, self.match = members, match
        self.turns, self.max_turn = turns, max_turn
        self.is_bounded = turns or max_turn is not None
        self.layers = Layers(members, members[0].target)
        self.counts = [m.rows for m in members]
        self.slots: list[Slot] = []
        self.results: list[tuple[Tensor, Tensor]] = []

        self._start_states()
        self._add_scales()
        self._add_biases()
        self._add_directions()

    @staticmethod
    def key(m: Member) -> tuple[Any, ...]:
        """Return what weights have in common that are stepped together."""
        placements = getattr(m.weight, "placements", None)
        return m.group, m.target.device, m.target.dtype, placements

    def _start_states(self) -> None:
        """Write the first r, and R, into new states; R is 0 for a layer of zeros."""
        if all("r" in m.state for m in self.members):
            return
        r = torch.cat([sphere.length(m.unit.layout.to_rows(m.target)) for m in self.members])
        sums, nonzeros = self.layers.sums(r, r != 0).unbind(dim=1)
        lengths = sums / nonzeros.clamp(min=1) if self.match else (nonzeros > 0).to(sums)

        first = r.to(lengths.dtype).split(self.counts)
        by_member = lengths.split([len(m.unit.parts) for m in self.members])
        for m, scales, length in zip(self.members, first, by_member, strict=True):
            if "r" not in m.state:
                m.state["r"] = shard_like(m.weight, scales, m.unit.rows)
                m.state["length"] = length.clone()
                m.state["fan_in"] = m.unit.fan_in
                m.state["is_fixed"] = int(m.unit.is_fixed)

    def _add_scales(self) -> None:
        """Join the states' r, which have signs, and are 0 in rows that never had a direction."""
        self.stored_r = torch.cat([local(m.state["r"]) for m in self.members])
        for m, part in zip(self.members, self.stored_r.split(self.counts), strict=True):
            m.state["r"] = shard_like(m.weight, part, m.unit.rows)

        lengths = torch.cat([m.state["length"] for m in self.members])
        self.first_lengths = self.layers.per_row(lengths)
        self.has_zero_layers = self.match and not lengths.all()
        self.has_zero_rows = not self.stored_r.all()
        fan_ins = [m.unit.fan_in for m in self.members for _ in m.unit.parts]
        has_direction = torch.tensor(fan_ins, device=self.stored_r.device) > 1
        self.has_direction = self.layers.per_row(has_direction)

        self.r, self.grad_r = self.stored_r.new_zeros(2, len(self.stored_r))
        parts = [x.split(self.counts) for x in (self.r, self.grad_r)]
        for m, value, grad in zip(self.members, *parts, strict=True):
            if not m.unit.is_fixed:
                slot = Slot("r", m.state, m.group + 1, *self._shard(m, value, grad))
                slot.began_as_zeros = not m.state["length"].any()
                self.slots.append(slot)
        self.results.append((self.stored_r, self.r))

    def _add_biases(self) -> None:
        """Join the biases; what is stepped for them becomes their new value."""
        with_bias = [m for m in self.members if m.bias is not None]
        self.biases = [find_master(m.bias, m.bias_state) for m in with_bias]
        counts = [m.rows for m in with_bias]
        self.bias_rows = slice(sum(counts))

        self.lam, self.grad_lam = self.stored_r.new_zeros(2, sum(counts))
        parts = [x.split(counts) for x in (self.lam, self.grad_lam)]
        for m, target, value, grad in zip(with_bias, self.biases, *parts, strict=True):
            pair = self._shard(m, value, grad)
            self.slots.append(Slot("lam", m.bias_state, m.bias_group, *pair))
            self._add_result(value, target, m.bias, Tensor.detach)

    def _add_directions(self) -> None:
        """Lay out increments and their gradients; an increment becomes the new weight."""
        sizes = [m.target.numel() for m in self.members]
        self.rows = rows_for([(m.rows, m.unit.fan_in) for m in self.members], self.stored_r)
        self.scratch = self.stored_r.new_zeros(2, sum(sizes))

        self.d: list[Tensor] = []
        self.grad_d: list[Tensor] = []
        parts = [memory.split(sizes) for memory in self.scratch]
        for m, *memories in zip(self.members, *parts, strict=True):
            pair = [memory.view(m.rows, m.unit.fan_in) for memory in memories]
            self.d.append(pair[0])
            self.grad_d.append(pair[1])
            length = m.unit.rows
            if m.is_direct:
                length = m.weight.shape[0]
                layout = m.target.shape, m.target.stride()
                pair = [memory.as_strided(*layout, memory.storage_offset()) for memory in memories]

            self._add_result(pair[0], m.target, m.weight, m.view)
            if m.unit.fan_in > 1:
                d, grad_d = (shard_like(m.weight, x, length) for x in pair)
                self.slots.append(Slot("direction", m.state, m.group, d, grad_d, m.unit.parts))

    @staticmethod
    def _shard(m: Member, value: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
        """Return tensors with an entry for each row, sharded as the weight is."""
        rows = m.unit.rows
        return shard_like(m.weight, value, rows), shard_like(m.weight, grad, rows)

    def _add_result(self, value: Tensor, target: Tensor, parameter: Any, view: View) -> None:
        """Note where a new value is written: to the parameter, and to its master if it has one."""
        memories = [target]
        if target.dtype != parameter.dtype:
            memories.append(local(parameter))
        for memory in map(view, memories):
            self.results.append((memory, value.view(memory.shape)))

    def read(self) -> None:
        """Compute the gradients of directions, r and lam from those of weights and biases."""
        for m in self.members:
            update_master(m.weight, m.target)
        for m, target in zip(self.members, self.biases, strict=False):
            update_master(m.bias, target)

        self._read_directions()
        self.r.copy_(self.r_before)
        self.is_new = (self.r_before == 0) & (self.stored_r == 0)
        if self.biases:
            self._read_biases()

    def _read_directions(self) -> None:
        self._claim_scratch()
        self.lengths = nonzero(self.first_lengths)
        if self.has_zero_layers:  # they have no first length: it is their present one
            means = self.layers.per_row(self.layers.means(self.stored_r.abs()))
            self.lengths = nonzero(torch.where(self.first_lengths == 0, means, self.lengths))

        self.w = [m.to_matrix(m.target) for m in self.members]
        g = [m.to_matrix(find_gradient(m.weight, m.target)) for m in self.members]
        projected = self.rows.project(self.w, g, self.grad_d, self.lengths, self.stored_r)
        self.r_before, grad_r, self.size_g = projected
        self.grad_r.copy_(grad_r)

    def _read_biases(self) -> None:
        """Step a bias as R' b / r where |b| <= |r|, else as it is.

        lam would move a bias 1 + lam^2 times as fast as plain training. With `match=False` it is
        stepped as lam up to |b| = 100 |r|, as in converted layers.
        """
        r = self.r_before[self.bias_rows]
        pairs = zip(self.members, self.biases, strict=False)
        grad_bias = torch.cat([find_gradient(m.bias, target) for m, target in pairs])
        self.bias = torch.cat(self.biases)
        most = 1 if self.match else STEEPEST
        self.is_near = (r != 0) & (self.bias.abs() <= most * r.abs())
        self.mean = torch.ones_like(r)
        if self.match:
            means = nonzero(self.layers.means(self.r_before.abs()))
            self.mean = self.layers.per_row(means)[self.bias_rows]

        self.stretch = torch.where(self.is_near, self.mean / nonzero(r), 1)
        torch.mul(self.stretch, self.bias, out=self.lam)
        torch.div(grad_bias, self.stretch, out=self.grad_lam)
        distance = torch.where(self.is_near, self.bias / nonzero(r), 0)
        self.grad_r[self.bias_rows] += distance * grad_bias

    def compute(self, angle: float | Tensor) -> None:
        """Compute new weights and biases from what the optimizers have stepped.

        Args:
            angle: by which layers turn, root mean square, in radians; unused without `turns`.
        """
        if self.is_bounded:
            self._keep_signs()
        self._compute_directions(angle)
        if self.biases:
            self._compute_biases()
        # A pruned row has no r now; its sign is kept for when it comes back.
        is_pruned = (self.r_before == 0) & ~self.is_new
        self.r.copy_(torch.where(is_pruned, self.stored_r, self.r))

    def _compute_directions(self, angle: float | Tensor) -> None:
        along, across = self.rows.measure(self.w, self.d, self.r_before, self.grad_d)
        before = nonzero(self.r_before)
        if self.is_bounded:
            turn = self._find_turn(along, across, angle)
            b = self.r * turn.sin() / nonzero(across)
            a = (self.r * turn.cos() - b * along) / before
        else:  # r (v + d) / |v + d|
            size = nonzero(torch.hypot(self.lengths + along, across))
            a = self.lengths / size * (self.r / before)
            b = self.r / size

        # A row whose square is too large for its type stays as it is.
        is_lost = self.r_before.isinf()
        a, b = torch.where(is_lost, 1, a), torch.where(is_lost, 0, b)
        # A row that never had a direction takes that of its increment. A pruned row stays zero.
        is_born = self.is_new & (across > 0)
        self.r.copy_(torch.where(self.is_new, is_born * self.r.abs(), self.r))
        b = torch.where(self.is_new, self.r / nonzero(across), b * (self.r_before != 0))
        self.rows.combine(self.w, self.d, a, b)

    def _find_turn(self, along: Tensor, across: Tensor, angle: float | Tensor) -> Tensor:
        """Return by which angle each unit turns.

        That of its increment, or, where layers turn by an angle, in proportion to |d - <d, u> u|.
        A layer whose gradient is exactly 0 does not turn then, whatever its momentum.
        """
        if not self.turns:
            turn = torch.atan2(across, self.lengths + along)
            return turn.clamp(max=math.radians(self.max_turn or 180))

        squares, moving = self.layers.sums(across.square(), self.size_g > 0).unbind(dim=1)
        rms = (squares / self.layers.sizes).sqrt()
        is_still = (rms == 0) | (moving == 0)
        speed = torch.where(is_still, 0, angle / nonzero(rms))
        turn = across * self.layers.per_row(speed)
        if self.max_turn is not None:
            return turn.clamp(max=math.radians(self.max_turn))
        most = torch.as_tensor(4 * angle, dtype=turn.dtype, device=turn.device)
        return torch.minimum(turn, most.clamp(max=math.pi / 2))

    def _keep_signs(self) -> None:
        """Where r would pass 0, and its unit turn round, leave a tenth of r.

        At least SMALLEST_R R is left. A unit with one input has no angle: its r may pass 0.
        """
        size = self.r_before.abs()
        least = torch.minimum(size, SMALLEST_R * self.lengths)
        kept = torch.maximum(0.1 * size, least).copysign(self.r_before)
        has_passed = (self.r * self.r_before < 0) & self.has_direction
        self.r.copy_(torch.where(has_passed, kept, self.r))

    def _compute_biases(self) -> None:
        """Write the new biases to `lam`; one that was not stepped keeps all its digits."""
        r, before = self.r[self.bias_rows], self.r_before[self.bias_rows]
        stepped = torch.where(self.is_near, r * self.lam / self.mean, self.lam)
        is_still = (self.lam == self.stretch * self.bias) & (r == before)
        self.lam.copy_(torch.where(is_still, self.bias, stepped))

    def _claim_scratch(self) -> None:
        """Allocate the scratch memory again, and set increments to 0."""
        storage = self.scratch.untyped_storage()
        if storage.nbytes() != self.scratch.nbytes:
            storage.resize_(self.scratch.nbytes)
        self.scratch[0].zero_()

    def release(self) -> None:
        """Free the scratch memory of GPUs. On CPUs new pages took 40 of 55 ms (ResNet-18)."""
        self.w = []
        if not self.scratch.is_cpu:
            self.scratch.untyped_storage().resize_(0)


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
        self.scale = (nonzero(self.first_lengths) * self.layers.per_row(metrics).sqrt())[:, None]
        self.stored = torch.cat([local(m.state["direction"]) for m in self.members])
        self.increment, self.gradient = self.stored.new_zeros(2, *self.stored.shape)
        self.new_rows = self.stored.new_zeros(len(self.stored), self.members[0].unit.fan_in)
        self.written: Tensor | None = None  # the rows as of the last step

        memories = self.stored, self.increment, self.gradient, self.new_rows
        parts = [memory.split(self.counts) for memory in memories]
        for m, stored, increment, gradient, rows in zip(self.members, *parts, strict=True):
            m.state["direction"] = shard_like(m.weight, stored, m.unit.rows)
            pair = self._shard(m, increment, gradient)
            self.slots.append(Slot("direction", m.state, m.group, *pair))
            self._add_result(rows, m.target, m.weight, m.unit.layout.view)
        self.results.append((self.stored, self.increment))

    def _start_angles(self) -> None:
        """Write the first angles, and the mean of their metric, into new states."""
        if all("direction" in m.state for m in self.members):
            return
        latitude = sphere.to_latitude(self._join_rows())
        metrics = torch.ones_like(self.layers.sizes)
        if self.match:
            metrics = nonzero(self.layers.means(sphere.metric(latitude).mean(dim=1)))
        scale = nonzero(self.first_lengths) * self.layers.per_row(metrics).sqrt()

        first = (latitude * scale[:, None]).to(scale.dtype).split(self.counts)
        by_member = metrics.split([len(m.unit.parts) for m in self.members])
        for m, stored, metric in zip(self.members, first, by_member, strict=True):
            if "direction" not in m.state:
                m.state["direction"] = shard_like(m.weight, stored, m.unit.rows)
                m.state["metric"] = metric.clone()

    def _join_rows(self) -> Tensor:
        return torch.cat([m.unit.layout.to_rows(m.target) for m in self.members])

    def _read_directions(self) -> None:
        self.lengths = nonzero(self.first_lengths)
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
        if self.has_zero_rows and is_born.any():
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


def find_master(p: Any, state: State) -> Tensor:
    """Return this process's part of a parameter; of one in half precision, its float32 copy."""
    part = local(p)
    if part.dtype in FULL_PRECISION:
        state.pop("master", None)
        return part
    if "master" not in state:
        state["master"] = shard_like(p, part.float(), len(p))
    return local(state["master"])


def update_master(p: Any, master: Tensor) -> None:
    """Take over what others have written to a parameter in half precision."""
    part = local(p)
    if part.dtype != master.dtype:
        is_same = master.to(part.dtype) == part
        master.copy_(torch.where(is_same, master, part))


def find_gradient(p: Any, like: Tensor) -> Tensor:
    """Return this process's part of a parameter's gradient, in a type."""
    return getattr(p.grad, "_local_tensor", p.grad).to(like.dtype)
