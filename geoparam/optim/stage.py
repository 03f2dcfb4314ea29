"""One optimizer step on directions, r and lam: gradients of these before, weights after it.

A unit's weight is W = r u and its bias b = r lam. The base optimizer steps not W but the stored
direction, at a length R that is the layer's mean |r| at the start (R = 1 with match=False):

    intrinsic   v,  |v| = R,  W = r v / |v|          dL/dv = (r / R) (G - u <G, u>)
    angles      A = R sqrt(g) latitude                dL/dA = dL/dlatitude / (R sqrt(g))
    distance    L = R' lam,  b = r L / R'             dL/dL = (r / R') dL/db
    scale       r                                     dL/dr = <G, u> + lam dL/db

with g the mean of the sphere's metric and R' the layer's present mean |r|. A step of size s on v
then moves W by (r / R) s: about s, as in plain training, for SGD and Adam alike. R is the layer's
mean and not each row's own |r|: with its own, a row of tiny r would turn as far as a plain one.

Intrinsic weights are not copied: W is scaled to length R, stepped in place, and scaled to length
r. So a step starts from whatever was written to W. Angles are kept in the state; rows of the
weight that others have changed since the last step are read again. Parameters in half precision
have a float32 copy in the state, their master, which stands for them in all of this.
"""

import math
from typing import Any

import torch
from torch import Tensor

from geoparam import functional, sphere
from geoparam.kernels.rows import keep_signs, rows_for
from geoparam.optim.inner import Slot, State, find_master, local, shard_like
from geoparam.optim.units import Unit


class Member:
    """One weight with units, its bias where that is stored as a distance, and their states.

    Its rows are its own memory where that has one row after the other: a matrix, or a convolution
    in any memory format. Else they are copied in every step.
    """

    def __init__(
        self, unit: Unit, weight: Any, bias: Any, places: tuple[int, int], states: Any
    ) -> None:
        self.unit, self.weight, self.bias = unit, weight, bias
        self.at, self.bias_at = places  # their parameter groups
        self.state = states[weight]
        self.bias_state = {} if bias is None else states[bias]
        self.process_group = _process_group(unit, weight)
        self.own = own = find_master(weight, self.state)
        self.shape = (unit.out if unit.column_groups else len(own), unit.fan_in)
        is_dense = torch.empty_like(own).stride() == own.stride()
        is_by_row = len(own) < 2 or own.stride(0) == unit.fan_in
        self.is_copied = unit.column_groups > 0 or not (is_dense and is_by_row)
        self.has_direction = unit.fan_in > 1
        is_own_order = self.is_copied or own.is_contiguous() or hasattr(weight, "placements")
        self.layout = None if is_own_order else own  # its rows in memory have another order

    def rows(self) -> Tensor:
        """Return the weight as rows (out, fan-in); a view where there is one."""
        return self.unit.to_rows(self.own)

    def shard(self, part: Tensor) -> Tensor:
        """Return this process's rows as a tensor, or as a DTensor where the weight is one."""
        return shard_like(self.weight, part, self.unit.out)


class Stage:
    """Weights that one call of the row kernels handles: they share device, type, group (`key`).

    Directions are unit vectors times R. By default the base steps the vectors themselves. With
    `turn` or `max_turn` it steps an increment d, which starts at 0, so that a small one keeps all
    its digits. Its part across u, |d - <d, u> u|, gives the angle of the turn. Units with one
    input have no angle, and their r may change its sign.

    Args:
        group: the parameter group, whose `lr` is the turn where `turns`.
    """

    def __init__(
        self,
        members: list[Member],
        group: State,
        *,
        match: bool,
        turns: bool,
        max_turn: float | None,
    ) -> None:
        self.members, self.group, self.first = members, group, members[0]
        self.turns, self.max_turn = turns, max_turn
        self.slots: dict[str, list[Slot]] = {"direction": [], "r": [], "lam": []}
        self.states, bias_states = [m.state for m in members], [m.bias_state for m in members]
        shapes, outs = [m.shape for m in members], [m.unit.out for m in members]
        self.rows = rows_for(shapes, self.first.own, outs, self.first.process_group, match)
        self._start()
        self.length = self.rows.per_row(torch.stack([m.state["length"] for m in members]))
        self.r = torch.cat([local(state["r"]) for state in self.states])
        self.grad_norm, is_fixed = torch.zeros_like(self.r), self.first.unit.is_fixed
        self.grad_r = self._add_flat("r", self.states, self.r, is_stepped=not is_fixed)
        with_bias = [m for m in members if m.bias is not None]  # all or none
        self.biases = [find_master(m.bias, m.bias_state) for m in with_bias]
        if self.biases:
            self.lam = torch.zeros_like(self.r)
            self.grad_lam = self._add_flat("lam", bias_states, self.lam)
        parameters = [m.weight for m in members] + [m.bias for m in with_bias]
        pairs = zip(parameters, [m.own for m in members] + self.biases, strict=True)
        half = [(local(p), own) for p, own in pairs if p.dtype != own.dtype]
        self.halves, self.masters = [p for p, _ in half], [own for _, own in half]
        self._build_directions()

    @classmethod
    def key(cls, m: Member) -> tuple[Any, ...]:
        """Return what weights have in common that are stepped together."""
        return (
            m.at, m.bias_at, m.bias is None, m.own.device, m.own.dtype, m.process_group,
            getattr(m.weight, "placements", None), m.is_copied, m.unit.is_fixed, m.has_direction,
        )  # fmt: skip

    def _start(self) -> None:
        """Write the first r, and the length R of the stored directions, into new states."""
        if all("r" in state for state in self.states):
            return
        r = torch.cat([self._first_scale(m) for m in self.members])
        parts = zip(self.members, self.rows.split(r), self._layer_means(r.abs()), strict=True)
        for m, own, length in parts:
            if "r" not in m.state:
                m.state.update(r=m.shard(own), length=length.clone(), fan_in=m.unit.fan_in)
                m.state["has_distance"] = int(m.unit.has_distance)
                m.state["is_fixed"] = int(m.unit.is_fixed)

    def _first_scale(self, m: Member) -> Tensor:
        return sphere.length(rows := m.rows()).to(rows.dtype)

    def _layer_means(self, per_row: Tensor) -> Tensor:
        """Return the mean of each layer; 1 where it is 0 or NaN, and without `match`."""
        means = self.rows.layer_means(per_row)
        return torch.where(means > 0, means, 1) if self.rows.match else torch.ones_like(means)

    def _add_flat(
        self, name: str, states: list[State], flat: Tensor, is_stepped: bool = True
    ) -> Tensor:
        """Put each layer's part of a tensor of all rows into its state; return a gradient."""
        grad_flat = torch.zeros_like(flat)
        parts = self.rows.split(flat), self.rows.split(grad_flat)
        for m, state, own, grad in zip(self.members, states, *parts, strict=True):
            state[name] = m.shard(own)
            if is_stepped:
                self.slots[name].append(Slot(name, state, m.shard(own), m.shard(grad)))
        return grad_flat

    def _build_directions(self) -> None:
        """Divide scratch memory among gradients, increments and copies of the weights."""
        members, is_copied = self.members, self.first.is_copied
        is_bounded = self.turns or self.max_turn is not None
        self.by_increment = is_bounded and self.first.has_direction
        sizes = [m.shape[0] * m.shape[1] for m in members]
        self.scratch = self.r.new_empty(1 + self.by_increment + is_copied, sum(sizes))
        parts = [
            [part.view(m.shape) for m, part in zip(members, memory.split(sizes), strict=True)]
            for memory in self.scratch
        ]
        in_memory = [m.own.as_strided(m.shape, (m.shape[1], 1)) for m in members if not is_copied]
        self.w, self.grad_v = in_memory or parts[-1], parts[0]
        self.increments = parts[1] if self.by_increment else []
        self.radians = self.r.new_full((len(members),), math.radians(1))
        if self.first.has_direction:
            stepped = zip(members, self.increments or self.w, self.grad_v, strict=True)
            self.slots["direction"] = [
                Slot("direction", m.state, m.shard(value), m.shard(grad), m.layout)
                for m, value, grad in stepped
            ]

    def enter(self) -> None:
        """Write the parameters and gradients that the inner optimizers step."""
        for half, master in zip(self.halves, self.masters, strict=True):
            is_same = master.to(half.dtype) == half
            master.copy_(torch.where(is_same, master, half))
        self._enter_directions()
        if self.biases:
            self.bias = torch.cat(self.biases)
            grad_bias = torch.cat([gradient(m.bias, self.r.dtype) for m in self.members])
            self.rows.enter_biases(
                self.bias, grad_bias, self.r, self.grad_r, self.lam, self.grad_lam
            )
        self.r_before = self.r if self.first.unit.is_fixed else self.r.clone()

    def leave(self) -> None:
        """Write weights and biases from what the inner optimizers have stepped."""
        self._leave_directions()
        if self.biases:
            self.rows.leave_biases(self.bias, self.r, self.r_before, self.lam)
            torch._foreach_copy_(self.biases, self.rows.split(self.bias))
        if self.halves:
            torch._foreach_copy_(self.halves, self.masters)

    def _enter_directions(self) -> None:
        """Write v and its gradient for the base, r = |W| with its sign, and grad_r = <G, u>."""
        storage = self.scratch.untyped_storage()
        if storage.nbytes() != self.scratch.nbytes:
            storage.resize_(self.scratch.nbytes)
        if self.by_increment:
            self.scratch[1].zero_()
        if self.first.is_copied:
            for m, w in zip(self.members, self.w, strict=True):
                w.copy_(m.rows())
        grads = [_gradient_in_memory(m) for m in self.members]
        per_row = self.length, self.r, self.grad_r, self.grad_norm
        self.rows.enter(self.w, grads, self.grad_v, per_row, rescales=not self.by_increment)

    def _leave_directions(self) -> None:
        """Write r times the new directions into the weights."""
        if self.by_increment:
            self._turn()
        else:
            self.rows.leave(self.w, self.r, self.r_before)
        torch.autograd.graph.increment_version(self.w)  # autograd does not see kernels write
        if self.first.is_copied:
            for m, w in zip(self.members, self.w, strict=True):
                m.unit.write(m.own, w)
        if not self.scratch.is_cpu:  # on CPUs new pages took 40 of 55 ms (ResNet-18, one core)
            self.scratch.untyped_storage().resize_(0)

    def _turn(self) -> None:
        """Turn each row by the angle of its increment, as `turn` and `max_turn` say."""
        measured = self.rows.measure(self.w, self.increments, self.r_before)
        turn = (self.radians * self.group["lr"]).to(self.r) if self.turns else None
        limit = math.radians(self.max_turn or 0)
        per_row = *measured, self.length, self.grad_norm, self.r_before, self.r
        a, b = self.rows.turn_coefficients(per_row, turn, limit)
        self.rows.rotate(self.w, self.increments, a, b)


class AngularStage(Stage):
    """Weights of one fan-in whose directions are latitudes.

    Their rows are one matrix, so that the kernel is called once. With one input there is no
    angle: W = r, of either sign.
    """

    @classmethod
    def key(cls, m: Member) -> tuple[Any, ...]:
        return m.unit.fan_in, *super().key(m)

    def _first_scale(self, m: Member) -> Tensor:
        return super()._first_scale(m) if m.has_direction else m.rows()[:, 0].clone()

    def _build_directions(self) -> None:
        self.written: Tensor | None = None  # the rows as last written to the weights
        self._start_angles()
        scales = [state["length"] * state["metric"].sqrt() for state in self.states]
        self.scale = self.rows.per_row(torch.stack(scales))[:, None]
        self.stored = torch.cat([local(state["direction"]) for state in self.states])
        is_stepped = self.first.has_direction
        self.by_stored = self._add_flat("direction", self.states, self.stored, is_stepped)

    def _start_angles(self) -> None:
        """Write the first angles, and the mean g of their metric, into new states."""
        if all("direction" in state for state in self.states):
            return
        latitude = sphere.to_latitude(self._weights())
        means = self._layer_means(sphere.metric(latitude).mean(dim=1))
        stored = latitude * (self.length * self.rows.per_row(means).sqrt())[:, None]
        parts = zip(self.members, means, self.rows.split(stored.to(self.r.dtype)), strict=True)
        for m, g, own in parts:
            if "direction" not in m.state:
                m.state.update(metric=g.clone(), direction=m.shard(own))

    def _enter_directions(self) -> None:
        if not (self.r.is_cuda and torch.cuda.is_current_stream_capturing()):
            self._read_changed_rows()
        g = torch.cat([m.unit.to_rows(gradient(m.weight, self.r.dtype)) for m in self.members])
        grad_latitude, grad_r = functional.compute_gradients(
            g, self.stored / self.scale, self.r, False
        )
        torch.div(grad_latitude, self.scale, out=self.by_stored)
        self.grad_r.copy_(grad_r)

    def _leave_directions(self) -> None:
        if self.max_turn is None or not self.first.has_direction:
            self.r.mul_(self.r_before != 0)  # a row of zeros has no direction to grow in
        else:
            keep_signs(self.r, self.r_before, self.length)
            self._limit(math.radians(self.max_turn))
        self.written = self._compute_rows()
        for m, own in zip(self.members, self.rows.split(self.written), strict=True):
            m.unit.write(m.own, own)

    def _weights(self) -> Tensor:
        return torch.cat([m.rows() for m in self.members])

    def _compute_rows(self) -> Tensor:
        return functional.compute_weight(self.stored / self.scale, self.r, self.r.dtype)

    def _read_changed_rows(self) -> None:
        """Read rows that others have changed since they were written; r keeps its sign."""
        weights = self._weights()
        written = self._compute_rows() if self.written is None else self.written
        changed = (weights != written).any(dim=1)
        if not changed.any():
            return
        rows = weights[changed]
        if not self.first.has_direction:
            self.r[changed] = rows[:, 0]
            return
        sign = torch.where(self.r[changed] < 0, -1, 1)
        self.r[changed] = sphere.length(rows).to(rows.dtype) * sign
        self._store_directions(changed, rows * sign[:, None])

    def _limit(self, limit: float) -> None:
        """Turn units back that are further than `limit` from the weights' present ones."""
        u = sphere.normalise(self._weights() * self.r_before.sign()[:, None])
        v = sphere.normalise(self._compute_rows() * self.r.sign()[:, None])
        far = sphere.angle_between(u, v) > limit
        if not far.any():
            return
        u, v = u[far], v[far]
        across = sphere.normalise(v - (u * v).sum(dim=1, keepdim=True) * u)
        self._store_directions(far, u * math.cos(limit) + across * math.sin(limit))

    def _store_directions(self, chosen: Tensor, vectors: Tensor) -> None:
        """Store the directions of vectors as those of the chosen rows."""
        stored = sphere.to_latitude(vectors) * self.scale[chosen]
        self.stored[chosen] = stored.to(self.stored.dtype)


def gradient(p: Any, dtype: torch.dtype) -> Tensor:
    """Return a parameter's gradient, this process's rows of it, in a type."""
    g = getattr(p.grad, "_local_tensor", p.grad)
    return g if g.dtype == dtype else g.to(dtype)


def _gradient_in_memory(m: Member) -> Tensor:
    """Return a weight's gradient with its rows in memory as the weight has them."""
    g = gradient(m.weight, m.own.dtype)
    if m.is_copied:
        return m.unit.to_rows(g).contiguous()
    return g if g.stride() == m.own.stride() else torch.empty_like(m.own).copy_(g)


def _process_group(unit: Unit, weight: Any) -> Any:
    """Return the processes among which the rows of a weight are divided; None for one process."""
    shards = [i for i, p in enumerate(getattr(weight, "placements", ())) if not p.is_replicate()]
    if not shards:
        return None
    is_by_row = weight.placements[shards[0]].is_shard(0) and not unit.column_groups
    if len(shards) > 1 or not is_by_row:
        raise ValueError(
            f"{unit.name!r} is sharded as {weight.placements}, which cuts its units into pieces. "
            "Shard rows (dimension 0) of layers whose units are rows, or leave it out with "
            "filter_fn."
        )
    return weight.device_mesh.get_group(shards[0])
