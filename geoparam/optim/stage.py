"""Before the base optimizer's step: gradients by coordinates. After it: weights from these.

A unit's weight is W = r u and its bias b = r lam. The base optimizer steps not W but the stored
direction, at a length R that is the layer's mean |r| at the start (R = 1 with match=False):

    intrinsic   v,  |v| = R,  W = r v / |v|          dL/dv = (r / R) (G - u <G, u>)
    angles      A = R sqrt(g) latitude                dL/dA = dL/dlatitude / (R sqrt(g))
    distance    L = R' lam,  b = r L / R'             dL/dL = (r / R') dL/db
    scale       r                                     dL/dr = <G, u> + lam dL/db

with g the mean of the sphere's metric and R' the layer's present mean |r|. A step of size s on v
then moves W by (r / R) s: about s, as in plain training, for SGD and Adam alike. R is the layer's
mean and not each row's own |r|: with its own, a row of tiny r would turn as far as a plain one.

Float32 weights in intrinsic coordinates are not copied: W is scaled to length R, stepped in place,
and scaled to length r. So a step starts from whatever was written to W. Angles, and weights in
half precision, are kept in the state; rows of the weight that others have changed since the last
step are read again.
"""

import math
from collections.abc import Sequence
from itertools import groupby
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from geoparam.kernels.rows import InPlace, rows_for
from geoparam.optim.units import Unit

_ROUNDING = 1e-5  # a larger relative change of r means that others wrote to the weight
_MEMORY_ORDERS = {4: torch.channels_last, 5: torch.channels_last_3d}


def local(x: Any) -> Tensor:
    """Return a tensor without its history; of a DTensor, this process's rows."""
    return x._local_tensor.detach() if hasattr(x, "_local_tensor") else x.detach()


class Member:
    """The tensors of one weight with units. Inner optimizers step its `parts`: direction, r, lam.

    A direction is (rows, fan-in). Where the weight's memory has another order (channels_last), it
    has the weight's own shape, so that the base's states mean the same in any memory format.
    """

    def __init__(
        self, unit: Unit, weight: Any, bias: Any, states: tuple[dict, dict], in_place: bool
    ) -> None:
        self.unit, self.weight, self.bias = unit, weight, bias
        self.state, self.bias_state = states
        self.parts: dict[str, Part] = {}
        self.is_fixed = False  # whether r is held
        self.is_sharded = hasattr(weight, "placements")
        self.dtype = torch.float64 if weight.dtype == torch.float64 else torch.float32
        self.process_group = _process_group(unit, weight)
        own = local(weight)
        self.shape = (unit.out if unit.layout.columns else len(own), unit.fan_in)
        order = torch.contiguous_format
        self.order = order if own.is_contiguous() else _MEMORY_ORDERS.get(own.ndim, order)
        # No copy is needed where the weight's own memory is a matrix of rows.
        self.is_in_place = (
            in_place
            and own.is_contiguous(memory_format=self.order)
            and not unit.layout.columns
            and weight.dtype == self.dtype
        )
        is_flat = not self.is_in_place or self.order == torch.contiguous_format
        self.own = own.view(self.shape) if self.is_in_place and is_flat else own
        self._fit_states(self.shape if is_flat else tuple(own.shape))

    def weight_rows(self) -> Tensor:
        """Return the weight as rows: its own memory where it is in place, else a copy."""
        if self.is_in_place:
            return self.own
        return self.unit.layout.to_rows(self.own).to(self.dtype, copy=True).contiguous()

    def gradient_rows(self) -> Tensor:
        """Return the weight's gradient as rows in the same order."""
        g = self.weight.grad._local_tensor if self.is_sharded else self.weight.grad
        if g.dtype != self.dtype:
            g = g.to(self.dtype)
        if self.is_in_place:
            return g.contiguous(memory_format=self.order)
        return self.unit.layout.to_rows(g).contiguous()

    def master_rows(self) -> Tensor:
        """Return r u as rows: the weight itself, or the float32 copy of a half-precision weight.

        Rows of the copy that do not round to the weight are copied from it again.
        """
        rows = self.weight_rows()
        if self.weight.dtype == self.dtype:
            return rows
        if "direction" not in self.state:
            self.state["direction"] = self.wrap(rows)
            return rows
        kept, half = local(self.state["direction"]), self.weight.dtype
        agrees = (kept.to(half) == rows.to(half)).all(dim=1, keepdim=True)
        return kept.copy_(torch.where(agrees, kept, rows))

    def wrap(self, part: Tensor) -> Tensor:
        """Return this process's rows as a tensor, or as a DTensor where the weight is one."""
        if not self.is_sharded:
            return part
        from torch.distributed.tensor import DTensor

        size = torch.Size((self.unit.out, *part.shape[1:]))
        mesh, placements = self.weight.device_mesh, self.weight.placements
        return DTensor.from_local(
            part, mesh, placements, run_check=False, shape=size, stride=part.stride()
        )

    def _fit_states(self, shape: tuple[int, ...]) -> None:
        """Move states to the weight's present device, type and layout."""
        for state in (self.state, self.bias_state):
            for key, value in state.items():
                is_float = isinstance(value, Tensor) and value.is_floating_point()
                if is_float and (value.ndim or "/" not in key):  # the base's own counters stay
                    value = value.to(self.weight.device, self.dtype)
                    if key.startswith("direction/") and value.numel() == self.weight.numel():
                        value = value.reshape(self.unit.out, *shape[1:])
                    state[key] = value


class Part(NamedTuple):
    """A tensor of a member that is stepped, with its gradient."""

    name: str  # the prefix of its keys in the state
    state: dict[str, Any]
    member: Member
    value: Tensor
    grad: Tensor
    blocks: tuple[Tensor, Tensor] | None = None  # of all members' values, and of their gradients
    start: int = 0  # where in the blocks it begins


class Stage:
    """Weights on one device, of one type and in one process group, which are stepped together.

    Directions are unit vectors times R. By default the base steps the vectors themselves. With
    `turn` or `max_turn` it steps a copy, and the increment d gives the angle of the turn by its
    part across u, |d - <d, u> u|. With `turn` the copy starts at 0, not at R u, so that a small d
    keeps all its digits.

    Args:
        pairs: the weights, each with its parameter group, whose `lr` is the turn where `turns`.
    """

    def __init__(
        self,
        pairs: Sequence[tuple[Member, dict[str, Any]]],
        match: bool,
        max_turn: float | None,
        turns: bool,
    ) -> None:
        self.members, self.match, self.max_turn = [m for m, _ in pairs], match, max_turn
        runs = [list(run) for _, run in groupby(pairs, key=lambda pair: id(pair[1]))]
        self.groups, self.group_sizes = [run[0][1] for run in runs], [len(run) for run in runs]
        self.turns, self.by_increment = turns, turns or max_turn is not None
        first, shapes = self.members[0], [m.shape for m in self.members]
        like = local(first.weight).new_empty(0, dtype=first.dtype)
        outs = [m.unit.out for m in self.members]
        self.rows = rows_for(shapes, like, outs, first.process_group)
        if new := [m for m in self.members if "r" not in m.state]:
            self._start(new)
        self.has_free = any(not m.is_fixed for m in self.members)
        self.length = self.rows.per_row(torch.stack([m.state["length"] for m in self.members]))
        self._build_scales()
        self._build_biases()
        self._build_directions()

    def _start(self, members: Sequence[Member]) -> None:
        """Write the first r, and the length R of the stored directions, into the states."""
        scales = [self._first_scale(m) for m in members]
        for m, r, length in zip(members, scales, self._layer_means(scales), strict=True):
            m.state.update(r=m.wrap(r), length=length, fan_in=m.unit.fan_in)

    def _first_scale(self, m: Member) -> Tensor:
        return torch.linalg.vector_norm(m.weight_rows().flatten(1), dim=1)

    def _layer_means(self, values: Sequence[Tensor]) -> list[Tensor]:
        """Return the mean |value| of each layer, in all processes; 1 without `match`."""
        pairs = [torch.stack([x.abs().sum(), x.new_tensor(x.numel())]) for x in values]
        sums = torch.stack(pairs)
        if self.rows.group is not None:
            dist.all_reduce(sums, group=self.rows.group)
        means = sums[:, 0] / sums[:, 1] if self.match else torch.ones_like(sums[:, 0])
        return [mean.clone() for mean in means.to(self.rows.dtype)]

    # One flat tensor each for r, lam and their gradients, of which every layer's are parts.

    def _build_scales(self) -> None:
        self.r = torch.cat([local(m.state["r"]) for m in self.members])
        self.by_r, self.peak, self.stretch, self.zeros = self.r.new_zeros(4, len(self.r))
        for m, *part in self._divide(self.r, self.by_r):
            m.state["r"] = m.wrap(part[0])
            if not m.is_fixed:
                m.parts["r"] = Part("r", m.state, m, *part)

    def _build_biases(self) -> None:
        members, rows = self.members, self.rows
        self.biases = [None if m.bias is None else local(m.bias) for m in members]
        kept = [m.bias_state.get("lam") for m in members]
        self.lam = rows.join([None if x is None else local(x) for x in kept])
        self.by_lam = torch.zeros_like(self.lam)
        for m, *part in self._divide(self.lam, self.by_lam):
            if m.bias is not None:
                m.bias_state["lam"] = m.wrap(part[0])
                m.parts["lam"] = Part("lam", m.bias_state, m, *part)
        # Biases in half precision have float32 copies, which are stepped.
        self.own_biases = [b for b in self.biases if b is not None]
        self.has_masters = any(
            b.dtype != rows.dtype or not b.is_contiguous() for b in self.own_biases
        )
        self.master = torch.zeros_like(self.lam)
        pairs = zip(self.biases, rows.split(self.master), strict=True)
        masters = [None if b is None else part for b, part in pairs]
        self.masters = InPlace(masters if self.has_masters else self.biases)

    def _divide(self, *blocks: Tensor) -> list[Any]:
        """Return each member with its values, their gradients, the blocks and its place there."""
        parts = zip(self.members, *map(self.rows.split, blocks), strict=True)
        start = blocks[0].storage_offset()
        return [(m, x, by, blocks, x.storage_offset() - start) for m, x, by in parts]

    def _build_directions(self) -> None:
        members = self.members
        self.w: Any = [m.master_rows() for m in members]
        self.copied = [i for i, m in enumerate(members) if not m.is_in_place]
        passing = [i for i in self.copied if "direction" not in members[i].state]
        self.copies = Scratch([self.w[i] for i in passing])
        for i, part in zip(passing, self.copies.parts, strict=True):
            self.w[i] = part
        self.w = InPlace(self.w, self.copies.block)
        self.gradients = Scratch(self.w)
        self.increments = Scratch(self.w if self.by_increment else [])
        stepped = self.increments.parts if self.by_increment else self.w
        blocks = (self.increments.block, self.gradients.block) if self.by_increment else None
        for m, v, g in zip(members, stepped, self.gradients.parts, strict=True):
            if m.unit.fan_in > 1:
                part = Part("direction", m.state, m, v, g, blocks, g.storage_offset())
                m.parts["direction"] = part
        # No optimizer writes to these weights, so autograd's version counters are increased here.
        pairs = list(zip(self.w, members, strict=True))
        self.unstepped = [w for w, m in pairs if self.by_increment or m.unit.fan_in == 1]
        self.radians = torch.full((len(members),), math.radians(1)).to(self.r)

    # --- before and after the step ------------------------------------------------------------

    def enter(self) -> None:
        """Write the parameters and gradients that the inner optimizers step."""
        before = self.r.clone() if self.has_masters else self.r
        self._enter_directions()
        if self.own_biases:
            self._enter_biases(before)
        self.entered = self.r.clone() if self.has_free else self.r

    def _enter_biases(self, before: Tensor) -> None:
        grads = [None if m.bias is None else m.bias.grad.contiguous() for m in self.members]
        dtypes = {g.dtype for g in grads if g is not None}
        if self.members[0].is_sharded or dtypes != {self.r.dtype}:
            grads = [None if g is None else local(g).to(self.r.dtype) for g in grads]
        if self.has_masters:
            kept, values = self.own_biases[0].dtype, self.rows.join(self.biases).to(self.r.dtype)
            is_ours = (before * self.lam).to(kept) == values.to(kept)
            is_ours &= (self.r - before).abs() <= _ROUNDING * before.abs()
            self.master.copy_(torch.where(is_ours, self.r * self.lam, values))
        self.rows.enter_biases(
            self.masters, grads, self.r, self.by_r, self.lam, self.by_lam, self.match
        )

    def leave(self) -> None:
        """Write weights and biases from what the inner optimizers have stepped."""
        self._leave_directions()
        if self.own_biases:
            self.rows.leave_biases(self.masters, self.r, self.entered, self.lam, self.match)
            if self.has_masters:
                torch._foreach_copy_(self.own_biases, [b for b in self.masters if b is not None])
            torch.autograd.graph.increment_version(self.own_biases)

    def _is_still(self) -> bool:
        """Whether all rates are 0. A rate in a tensor counts as another: reading it would wait."""
        rates = [group["lr"] for group in self.groups]
        return all(isinstance(rate, int | float) and rate == 0 for rate in rates)

    def _enter_directions(self) -> None:
        """Write v and its gradient for the base, r = |W| with its sign, and by_r = <G, u>."""
        self.gradients.allocate()
        self.increments.allocate(zero=self.turns)
        self.copies.allocate()
        for i in self.copied:
            self.w[i].copy_(self.members[i].master_rows())
        v = None if self.turns else self.increments.parts if self.by_increment else self.w
        is_still = not self.by_increment and self._is_still()
        self.before = [w.clone() for w in self.w] if is_still else None
        self.rows.enter(
            self.w, [m.gradient_rows() for m in self.members], self.gradients.parts, v,
            self.length, self.r, self.by_r, self.peak, self.stretch,
        )  # fmt: skip

    def _leave_directions(self) -> None:
        """Write r times the new directions into the weights."""
        if self.by_increment:
            self._turn()
        else:
            self.rows.leave(self.w, self.r, self.entered)
        if self.before is not None:  # at rate 0 weights stay bit for bit
            parts = zip(self.w, self.before, self.rows.split(self.r == self.entered), strict=True)
            for w, before, is_still in parts:
                w.copy_(torch.where(is_still.view(-1, *[1] * (w.ndim - 1)), before, w))
        torch.autograd.graph.increment_version(self.unstepped)
        for i in self.copied:
            self.members[i].unit.layout.write(self.members[i].own, self.w[i])
        for scratch in (self.gradients, self.increments, self.copies):
            scratch.free()

    def _turn(self) -> None:
        """Turn each row by the angle of its increment, as `turn` and `max_turn` say."""
        d, c = self.increments.parts, self.zeros if self.turns else self.stretch
        along, across = self.rows.measure(self.w, d, c, self.entered)
        turn = None
        if self.turns:
            parts = zip(self.radians.split(self.group_sizes), self.groups, strict=True)
            rates = [part * group["lr"] for part, group in parts]
            turn = rates[0] if len(rates) == 1 else torch.cat(rates)
        limit = math.radians(self.max_turn or 0)
        a, b = self.rows.mix(
            along, across, self.length, self.peak, self.entered, self.r, turn, limit
        )
        self.rows.rotate(self.w, d, c, a, b)


class Scratch:
    """Scratch memory for tensors like the given ones, as parts of one block."""

    def __init__(self, like: Sequence[Tensor]) -> None:
        sizes = [x.numel() for x in like]
        self.block = (like[0] if like else torch.empty(0)).new_empty(sum(sizes))
        self.bytes = self.block.untyped_storage().nbytes()
        pieces = zip(self.block.split(sizes), like, strict=True)
        parts = [y.as_strided(x.shape, x.stride(), y.storage_offset()) for y, x in pieces]
        self.parts = InPlace(parts, self.block)

    def allocate(self, zero: bool = False) -> None:
        if self.block.untyped_storage().nbytes() != self.bytes:
            self.block.untyped_storage().resize_(self.bytes)
        if zero:
            self.block.zero_()

    def free(self) -> None:
        if not self.block.is_cpu:  # new pages took 40 of 55 ms (ResNet-18, one core)
            self.block.untyped_storage().resize_(0)


def _process_group(unit: Unit, weight: Any) -> Any:
    """Return the processes among which the rows of a weight are divided; None for one process."""
    shards = [i for i, p in enumerate(getattr(weight, "placements", ())) if not p.is_replicate()]
    if not shards:
        return None
    if len(shards) > 1 or not weight.placements[shards[0]].is_shard(0) or unit.layout.columns:
        raise ValueError(
            f"{unit.name!r} is sharded as {weight.placements}, which cuts its units into pieces. "
            "Shard rows (dimension 0) of layers whose units are rows, or leave it out with "
            "filter_fn."
        )
    return weight.device_mesh.get_group(shards[0])
