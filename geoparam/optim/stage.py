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
from typing import Any, NamedTuple

import torch
from torch import Tensor

from geoparam.kernels.rows import rows_for
from geoparam.optim.units import Unit

_MEMORY_ORDERS = {4: torch.channels_last, 5: torch.channels_last_3d}


def local(x: Any) -> Tensor:
    """Return a tensor without its history; of a DTensor, this process's rows."""
    return x._local_tensor.detach() if hasattr(x, "_local_tensor") else x.detach()


def _gradient(p: Any, dtype: torch.dtype) -> Tensor:
    """Return a parameter's gradient, this process's rows of it, in a type."""
    g = getattr(p.grad, "_local_tensor", p.grad)
    return g if g.dtype == dtype else g.to(dtype)


class Member:
    """One weight with units, its bias where that is stored as a distance, and their states.

    A direction is (rows, fan-in). Where the weight's memory has another order (channels_last), it
    has the weight's own shape, so that the base's states mean the same in any memory format.
    """

    def __init__(
        self, unit: Unit, weight: Any, bias: Any, states: tuple[dict, dict], *, in_place: bool
    ) -> None:
        self.unit, self.weight, self.bias = unit, weight, bias
        self.state, self.bias_state = states
        self.is_sharded = hasattr(weight, "placements")
        self.dtype = torch.float64 if weight.dtype == torch.float64 else torch.float32
        self.is_half = weight.dtype != self.dtype
        self.process_group = _process_group(unit, weight)
        own = local(weight)
        self.shape = (unit.out if unit.layout.columns else len(own), unit.fan_in)
        order = torch.contiguous_format
        self.order = order if own.is_contiguous() else _MEMORY_ORDERS.get(own.ndim, order)
        # No copy is needed where the weight's own memory is a matrix of rows.
        is_matrix = own.is_contiguous(memory_format=self.order) and not unit.layout.columns
        self.is_in_place = in_place and is_matrix and not self.is_half
        is_flat = not self.is_in_place or self.order == torch.contiguous_format
        self.own = own.view(self.shape) if self.is_in_place and is_flat else own
        self._fit_states(self.shape if is_flat else tuple(own.shape))

    def stage_key(self) -> tuple[Any, ...]:
        """Return what weights have in common that are stepped together."""
        bias_type = None if self.bias is None else self.bias.dtype
        states = self.state, self.bias_state
        counters = [_read_counters(state, not self.is_sharded) for state in states]
        return (
            self.weight.device, self.weight.dtype, bias_type, self.process_group, self.is_sharded,
            self.is_in_place, self.unit.is_fixed, self.unit.fan_in == 1, *counters,
        )  # fmt: skip

    def weight_rows(self) -> Tensor:
        """Return the weight as rows: its own memory where it is in place, else a copy."""
        if self.is_in_place:
            return self.own
        return self.unit.layout.to_rows(self.own).to(self.dtype, copy=True).contiguous()

    def gradient_rows(self) -> Tensor:
        """Return the weight's gradient as rows in the same order."""
        g = _gradient(self.weight, self.dtype)
        if self.is_in_place:
            return g.contiguous(memory_format=self.order)
        return self.unit.layout.to_rows(g).contiguous()

    def read_weight(self, rows: Tensor) -> None:
        """Copy the weight into `rows`; of a float32 copy, the rows that do not round to it."""
        new = self.weight_rows()
        if self.is_half:
            half = self.weight.dtype
            agrees = (rows.to(half) == new.to(half)).all(dim=1, keepdim=True)
            new = torch.where(agrees, rows, new)
        rows.copy_(new)

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


def _read_counters(state: dict[str, Any], reads_values: bool) -> tuple[Any, ...]:
    """Return a state's keys, with the values of the inner optimizers' counters."""

    def read(key: str, value: Any) -> Any:
        is_number = isinstance(value, Tensor | int | float) and not getattr(value, "ndim", 0)
        return float(value) if "/" in key and is_number and reads_values else None

    return tuple((key, read(key, state[key])) for key in sorted(state))


class Block(NamedTuple):
    """Tensors of one kind, one for each weight of a stage, that an inner optimizer steps."""

    name: str  # the prefix of its keys in the states
    states: Sequence[dict[str, Any]]
    values: Sequence[Tensor]
    grads: Sequence[Tensor]
    whole: tuple[Tensor, Tensor] | None  # flat tensors that values and grads are the parts of


class Stage:
    """Weights that are stepped together, in one parameter group: see `Member.stage_key`.

    Directions are unit vectors times R. By default the base steps the vectors themselves. With
    `turn` or `max_turn` it steps a copy, and the increment d gives the angle of the turn by its
    part across u, |d - <d, u> u|. With `turn` the copy starts at 0, not at R u, so that a small d
    keeps all its digits.

    Args:
        group: the parameter group, whose `lr` is the turn where `turns`.
    """

    def __init__(
        self,
        members: Sequence[Member],
        group: dict[str, Any],
        match: bool,
        max_turn: float | None,
        turns: bool,
    ) -> None:
        self.members, self.group, self.match, self.max_turn = members, group, match, max_turn
        self.turns, self.by_increment = turns, turns or max_turn is not None
        self.first = first = members[0]
        like = local(first.weight).new_empty(0, dtype=first.dtype)
        shapes, outs = [m.shape for m in members], [m.unit.out for m in members]
        self.rows = rows_for(shapes, like, outs, first.process_group)
        self.blocks: dict[str, Block] = {}
        if "r" not in first.state:
            self._start()
        self.length = self.rows.per_row(torch.stack([m.state["length"] for m in members]))
        self._build_scales()
        self._build_biases()
        self._build_directions()

    def _start(self) -> None:
        """Write the first r, and the length R of the stored directions, into the states."""
        r = torch.cat([self._first_scale(m) for m in self.members])
        parts = zip(self.members, self.rows.split(r), self._layer_means(r.abs()), strict=True)
        for m, own, length in parts:
            m.state.update(r=m.wrap(own), length=length.clone(), fan_in=m.unit.fan_in)

    def _first_scale(self, m: Member) -> Tensor:
        return torch.linalg.vector_norm(m.weight_rows().flatten(1), dim=1)

    def _layer_means(self, per_row: Tensor) -> Tensor:
        """Return the mean of each layer; 1 without `match`."""
        means = self.rows.layer_means(per_row)
        return means if self.match else torch.ones_like(means)

    def _add_block(
        self,
        name: str,
        states: Sequence[dict[str, Any]],
        values: Sequence[Tensor],
        grads: Sequence[Tensor],
        whole: tuple[Tensor, Tensor] | None,
    ) -> None:
        if self.first.is_sharded:
            values = [m.wrap(x) for m, x in zip(self.members, values, strict=True)]
            grads = [m.wrap(x) for m, x in zip(self.members, grads, strict=True)]
            whole = None
        self.blocks[name] = Block(name, states, values, grads, whole)

    # One flat tensor each for r, lam and their gradients, of which every layer's are parts.

    def _build_scales(self) -> None:
        members, split = self.members, self.rows.split
        self.r = torch.cat([local(m.state["r"]) for m in members])
        self.by_r, self.peak, self.stretch, self.zeros = self.r.new_zeros(4, len(self.r))
        for m, own in zip(members, split(self.r), strict=True):
            m.state["r"] = m.wrap(own)
        if not self.first.unit.is_fixed:
            states, whole = [m.state for m in members], (self.r, self.by_r)
            self._add_block("r", states, split(self.r), split(self.by_r), whole)

    def _build_biases(self) -> None:
        self.biases = [local(m.bias) for m in self.members if m.bias is not None]
        if not self.biases:
            return
        states, split = [m.bias_state for m in self.members], self.rows.split
        self.lam, self.by_lam = self.r.new_zeros(2, len(self.r))
        for m, state, own in zip(self.members, states, split(self.lam), strict=True):
            own.copy_(local(state.get("lam", own)))
            state["lam"] = m.wrap(own)
        whole = self.lam, self.by_lam
        self._add_block("lam", states, split(self.lam), split(self.by_lam), whole)
        # Biases in half precision have float32 copies, which are stepped.
        self.has_masters = any(
            b.dtype != self.r.dtype or not b.is_contiguous() for b in self.biases
        )
        self.master = self.r * self.lam
        self.masters = split(self.master) if self.has_masters else self.biases

    def _build_directions(self) -> None:
        """Divide scratch memory among gradients, increments and copies of the weights."""
        members = self.members
        for m in members if self.first.is_half else ():
            m.state.setdefault("direction", m.wrap(m.weight_rows()))
        kept = [local(m.state["direction"]) if m.is_half else m.weight_rows() for m in members]
        is_copied = not self.first.is_in_place and not self.first.is_half
        self.scratch, parts = _carve(kept, 1 + self.by_increment + is_copied)
        self.w = parts[-1] if is_copied else kept
        self.gradients, self.increments = parts[0], parts[1] if self.by_increment else []
        if self.first.unit.fan_in > 1:
            whole = (self.scratch[1], self.scratch[0]) if self.by_increment else None
            values, states = self.increments or self.w, [m.state for m in members]
            self._add_block("direction", states, values, self.gradients, whole)
        self.radians = torch.full((len(members),), math.radians(1)).to(self.r)

    # --- before and after the step ------------------------------------------------------------

    def enter(self) -> None:
        """Write the parameters and gradients that the inner optimizers step."""
        self._enter_directions()
        if self.biases:
            self._enter_biases()
        self.entered = self.r if self.first.unit.is_fixed else self.r.clone()

    def _enter_biases(self) -> None:
        grads = [_gradient(m.bias, self.r.dtype).contiguous() for m in self.members]
        if self.has_masters:
            values = torch.cat(self.biases)
            agrees = self.master.to(values.dtype) == values
            self.master.copy_(torch.where(agrees, self.master, values.to(self.r.dtype)))
        self.rows.enter_biases(
            self.masters, grads, self.r, self.by_r, self.lam, self.by_lam, self.match
        )

    def leave(self) -> None:
        """Write weights and biases from what the inner optimizers have stepped."""
        self._leave_directions()
        if self.biases:
            self.rows.leave_biases(self.masters, self.r, self.entered, self.lam, self.match)
            if self.has_masters:
                torch._foreach_copy_(self.biases, self.masters)
                torch.mul(self.r, self.lam, out=self.master)  # as a resumed run computes it
            torch.autograd.graph.increment_version(self.biases)

    def _enter_directions(self) -> None:
        """Write v and its gradient for the base, r = |W| with its sign, and by_r = <G, u>."""
        storage = self.scratch.untyped_storage()
        if storage.nbytes() != self.scratch.nbytes:
            storage.resize_(self.scratch.nbytes)
        if self.turns:
            self.scratch[1].zero_()
        if not self.first.is_in_place:
            for m, w in zip(self.members, self.w, strict=True):
                m.read_weight(w)
        v = None if self.turns else self.increments or self.w
        self.rows.enter(
            self.w, [m.gradient_rows() for m in self.members], self.gradients, v,
            self.length, self.r, self.by_r, self.peak, self.stretch,
        )  # fmt: skip

    def _leave_directions(self) -> None:
        """Write r times the new directions into the weights."""
        if self.by_increment:
            self._turn()
        else:
            self.rows.leave(self.w, self.r, self.entered)
        torch.autograd.graph.increment_version(self.w)  # kernels do not
        if not self.first.is_in_place:
            for m, w in zip(self.members, self.w, strict=True):
                m.unit.layout.write(m.own, w)
        if not self.scratch.is_cpu:  # new pages took 40 of 55 ms (ResNet-18, one core)
            self.scratch.untyped_storage().resize_(0)

    def _turn(self) -> None:
        """Turn each row by the angle of its increment, as `turn` and `max_turn` say."""
        d, c = self.increments, self.zeros if self.turns else self.stretch
        along, across = self.rows.measure(self.w, d, c, self.entered)
        turn = self.radians * self.group["lr"] if self.turns else None
        limit = math.radians(self.max_turn or 0)
        a, b = self.rows.mix(
            along, across, self.length, self.peak, self.entered, self.r, turn, limit
        )
        self.rows.rotate(self.w, d, c, a, b)


def _carve(like: Sequence[Tensor], copies: int) -> tuple[Tensor, list[list[Tensor]]]:
    """Return memory (copies, elements) and, of each copy, the parts with the given layouts."""
    sizes = [x.numel() for x in like]
    memory = like[0].new_empty(copies, sum(sizes))
    parts = [
        [
            piece.as_strided(x.shape, x.stride(), piece.storage_offset())
            for piece, x in zip(row.split(sizes), like, strict=True)
        ]
        for row in memory
    ]
    return memory, parts


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
