"""One optimizer step on directions, r and lam: their gradients before it, new weights after it.

A unit's weight is w = r u and its bias b = r lam. The optimizers step not w, but

    direction   an increment d of v = R u, from 0     dL/dd = (r / R) (g - u <g, u>)
    scale       r                                     dL/dr = <g, u> + lam dL/db
    distance    L = R' lam                            dL/dL = (r / R') dL/db

and the new weight is r (v + d) / |v + d|, the new bias r L / R'. R is the mean |r| of the layer at
the start, R' its present mean |r|; with `match=False` both are 1. A step of size s on v moves w by
(r / R) s: by about s, as in plain training, for SGD and Adam alike. R is the layer's mean and not
each row's own |r|: with its own, a row of tiny r would turn as far as a plain one.

Nothing here writes to a parameter. Steps are computed in scratch memory, starting from whatever
the weights are now; `Block.results` pairs each parameter with its new value. Parameters in half
precision have a float32 copy in the state, their master, which stands for them in all of this.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from geoparam.coordinates import STEEPEST
from geoparam.kernels.rows import rows_for
from geoparam.optim.inner import FULL_PRECISION, Slot, State
from geoparam.optim.sharding import find_offset, find_process_group, shard_like
from geoparam.optim.units import Unit

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
        self.is_sharded = hasattr(weight, "placements")

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

    def shard(self, x: Tensor, length: int = 0) -> Tensor:
        """Return a tensor as a DTensor where the weight is one; by default it has all rows."""
        return shard_like(self.weight, x, length or self.unit.rows) if self.is_sharded else x

    def find_part_rows(self) -> Sequence[int]:
        """Return how many rows of each part this process has."""
        if not self.is_sharded:
            return self.unit.parts
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
        self.processes = None
        if members[0].is_sharded:
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

    Attributes:
        slots: what the inner optimizers step.
        results: every tensor that a step changes, with the memory in which its new value is
            computed.
    """

    def __init__(
        self, members: list[Member], *, match: bool, turns: bool, max_turn: float | None
    ) -> None:
        self.members, self.match = members, match
        self.turns, self.max_turn = turns, max_turn
        self.is_bounded = turns or max_turn is not None
        self.layers = Layers(members, members[0].target)
        self.counts = [m.rows for m in members]
        self.masters: list[tuple[Tensor, Tensor]] = []
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
        rows = [m.unit.layout.to_rows(m.target).double() for m in self.members]  # squares fit
        r = torch.cat([torch.linalg.vector_norm(x, dim=1) for x in rows])
        sums, nonzeros = self.layers.sums(r, r != 0).unbind(dim=1)
        lengths = sums / nonzeros.clamp(min=1) if self.match else (nonzeros > 0).to(sums)

        first = r.to(lengths.dtype).split(self.counts)
        by_member = lengths.split([len(m.unit.parts) for m in self.members])
        for m, scales, length in zip(self.members, first, by_member, strict=True):
            if "r" not in m.state:
                m.state["r"] = m.shard(scales)
                m.state["length"] = length.clone()
                m.state["fan_in"] = m.unit.fan_in
                m.state["is_fixed"] = int(m.unit.is_fixed)

    def _add_scales(self) -> None:
        """Join the states' r, which have signs, and are 0 in rows that never had a direction."""
        self.stored_r = self._join_state("r")
        lengths = torch.cat([m.state["length"] for m in self.members])
        self.lengths = self.layers.per_row(lengths.where(lengths != 0, 1))
        self.began_as_zeros = self.layers.per_row(lengths == 0)
        self.has_zero_layers = self.match and not lengths.all()
        fan_ins = [m.unit.fan_in for m in self.members for _ in m.unit.parts]
        has_direction = torch.tensor(fan_ins, device=self.stored_r.device) > 1
        self.has_direction = self.layers.per_row(has_direction)

        self.r, self.grad_r = self.stored_r.new_zeros(2, len(self.stored_r))
        parts = [x.split(self.counts) for x in (self.r, self.grad_r)]
        for m, value, grad in zip(self.members, *parts, strict=True):
            if not m.unit.is_fixed:
                slot = Slot("r", m.state, m.group + 1, m.shard(value), m.shard(grad))
                if not m.state["length"].any():
                    # A layer of zeros has far to grow: under Adam a plain row's length steps by
                    # sqrt(n) lr, and r by lr.
                    slot.pace = math.sqrt(m.unit.fan_in)
                self.slots.append(slot)
        self.results.append((self.stored_r, self.r))

    def _join_state(self, key: str) -> Tensor:
        """Return an entry of all members as one tensor, of which their states get views."""
        joined = torch.cat([local(m.state[key]) for m in self.members])
        for m, part in zip(self.members, joined.split(self.counts), strict=True):
            m.state[key] = m.shard(part)
        return joined

    def _add_biases(self) -> None:
        """Join the biases; what is stepped for them becomes their new value."""
        with_bias = [m for m in self.members if m.bias is not None]
        self.biases = [find_master(m.bias, m.bias_state) for m in with_bias]
        counts = [m.rows for m in with_bias]
        self.bias_rows = slice(sum(counts))

        self.lam, self.grad_lam = self.stored_r.new_zeros(2, sum(counts))
        parts = [x.split(counts) for x in (self.lam, self.grad_lam)]
        for m, target, value, grad in zip(with_bias, self.biases, *parts, strict=True):
            slot = Slot("lam", m.bias_state, m.bias_group, m.shard(value), m.shard(grad))
            self.slots.append(slot)
            self._add_result(target, local(m.bias), value.view(target.shape))

    def _add_directions(self) -> None:
        """Lay out increments and their gradients; an increment becomes the new weight."""
        sizes = [m.target.numel() for m in self.members]
        self.rows = rows_for([(m.rows, m.unit.fan_in) for m in self.members], self.stored_r)
        self.scratch = self.stored_r.new_zeros(2, sum(sizes))

        self.d: list[Tensor] = []
        self.grad_d: list[Tensor] = []
        parts = [memory.split(sizes) for memory in self.scratch]
        for m, *memories in zip(self.members, *parts, strict=True):
            d, grad = (memory.view(m.rows, m.unit.fan_in) for memory in memories)
            self.d.append(d)
            self.grad_d.append(grad)
            length = m.unit.rows
            if m.is_direct:
                d, grad = (x.as_strided(m.target.shape, m.target.stride()) for x in memories)
                length = m.weight.shape[0]

            target = m.view(m.target)
            self._add_result(target, m.view(local(m.weight)), d.view(target.shape))
            if m.unit.fan_in > 1:
                d, grad = m.shard(d, length), m.shard(grad, length)
                self.slots.append(Slot("direction", m.state, m.group, d, grad, m.unit.parts))

    def _add_result(self, target: Tensor, parameter: Tensor, value: Tensor) -> None:
        """Note where a new value is written: to the parameter, and to its master if it has one."""
        self.results.append((target, value))
        if target.dtype != parameter.dtype:
            self.results.append((parameter, value))
            self.masters.append((parameter, target))

    def read(self) -> None:
        """Compute the gradients of directions, r and lam from those of weights and biases."""
        for half, master in self.masters:  # others may have written to the parameter
            is_same = master.to(half.dtype) == half
            master.copy_(torch.where(is_same, master, half))
        if self.has_zero_layers:  # without a first length, R is the present one
            means = self.layers.per_row(self.layers.means(self.stored_r.abs()))
            means = means.where(means != 0, 1)
            self.lengths = torch.where(self.began_as_zeros, means, self.lengths)

        self._read_directions()
        self.r.copy_(self.r_before)
        self.divisor = self.r_before.where(self.r_before != 0, 1)
        self.is_new = (self.r_before == 0) & (self.stored_r == 0)
        if self.biases:
            self._read_biases()

    def _read_directions(self) -> None:
        self._claim_scratch()
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
        r, divisor = self.r_before[self.bias_rows], self.divisor[self.bias_rows]
        pairs = zip(self.members, self.biases, strict=False)
        grad_bias = torch.cat([find_gradient(m.bias, target).flatten() for m, target in pairs])
        self.bias = torch.cat([target.flatten() for target in self.biases])
        most = 1 if self.match else STEEPEST
        self.is_near = (r != 0) & r.isfinite() & (self.bias.abs() <= most * r.abs())
        self.mean = torch.ones_like(r)
        if self.match:
            means = self.layers.per_row(self.layers.means(self.r_before.abs()))
            self.mean = means.where(means != 0, 1)[self.bias_rows]

        self.stretch = torch.where(self.is_near, self.mean / divisor, 1)
        torch.mul(self.stretch, self.bias, out=self.lam)
        torch.div(grad_bias, self.stretch, out=self.grad_lam)
        distance = torch.where(self.is_near, self.bias / divisor, 0)
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
        safe_across = across.where(across != 0, 1)
        if self.is_bounded:
            turn = self._find_turn(along, across, angle)
            b = self.r * turn.sin() / safe_across
            a = (self.r * turn.cos() - b * along) / self.divisor
        else:  # r (v + d) / |v + d|
            size = torch.hypot(self.lengths + along, across)
            size = size.where(size != 0, 1)
            a = self.lengths / size * (self.r / self.divisor)
            b = self.r / size

        # A row whose square is too large for its type stays as it is.
        is_lost = self.r_before.isinf()
        a, b = torch.where(is_lost, 1, a), torch.where(is_lost, 0, b)
        # A row that never had a direction takes that of its increment. A pruned row stays zero.
        is_born = self.is_new & (across > 0)
        self.r.copy_(torch.where(self.is_new, is_born * self.r.abs(), self.r))
        b = torch.where(self.is_new, self.r / safe_across, b * (self.r_before != 0))
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
        speed = torch.where(is_still, 0, angle / rms.where(rms != 0, 1))
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


def local(x: Any) -> Tensor:
    """Return a tensor without its history; of a DTensor, this process's part."""
    return getattr(x, "_local_tensor", x).detach()


def find_master(p: Any, state: State) -> Tensor:
    """Return this process's part of a parameter; of one in half precision, its float32 copy."""
    part = local(p)
    if part.dtype in FULL_PRECISION:
        state.pop("master", None)
        return part
    if "master" not in state:
        master = part.float()
        state["master"] = shard_like(p, master, len(p)) if hasattr(p, "placements") else master
    return local(state["master"])


def find_gradient(p: Any, like: Tensor) -> Tensor:
    """Return this process's part of a parameter's gradient, in a type."""
    return getattr(p.grad, "_local_tensor", p.grad).to(like.dtype)
