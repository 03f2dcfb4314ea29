"""Around the base optimizer's step: from plain gradients to coordinates, and back to weights.

A unit's weight is W = r u and its bias b = r lam. The base optimizer does not see W but the stored
direction, at a length R that is the layer's mean |r| at the start (R = 1 with match=False):

    intrinsic   v,  |v| = R,  W = r v / |v|          dL/dv = (r / R) (G - u <G, u>)
    angles      A = R sqrt(g) latitude                dL/dA = dL/dlatitude / (R sqrt(g))
    distance    L = R' lam,  b = r L / R'             dL/dL = (r / R') dL/db
    scale       r                                     dL/dr = <G, u> + lam dL/db

with g the mean of the sphere's metric and R' the layer's present mean |r|. A step of size s on v
then moves W by (r / R) s: about s, as in plain training, for SGD and Adam alike. R is the layer's
mean and not each row's own |r|, since that would undo the protection: a row of tiny r would turn
as wildly as a plain row does.

Nothing is copied for float32 weights in intrinsic coordinates: W is brought to length R, stepped
in place, and brought to length r, so that whatever was written to W before is seen. Angles, and
weights in half precision, are kept in the state; rows that no longer agree with what was written
last are taken up from the weight.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from geoparam.kernels.rows import rows_for
from geoparam.optim.units import Unit

_ROUNDING = 1e-5  # a larger relative change of r is no rounding: somebody wrote to the weight
_SHORTEST = 1e-3  # of R: r that is kept from changing its sign falls no further
_MEMORY_ORDERS = {4: torch.channels_last, 5: torch.channels_last_3d}


def local(x: Any) -> Tensor:
    """Return a tensor without its history, of a DTensor the rows that this process holds."""
    return x._local_tensor.detach() if hasattr(x, "_local_tensor") else x.detach()


def is_zero(rate: Any) -> bool:
    """Whether a rate is 0, as far as the host knows: one on a device is not looked at."""
    return isinstance(rate, int | float) and rate == 0


class Member:
    """One unit's tensors: `stored` is stepped by the base optimizer, `r` and `lam` by the rest.

    `stored` is (rows, fan-in), or has the weight's own shape where the rows of its memory are in
    another order (channels_last): so states of the base mean the same in any memory format.
    """

    stored: Any = None
    r: Any = None
    lam: Any = None
    is_fixed = False  # whether r is held

    def __init__(
        self, unit: Unit, weight: Any, bias: Any, state: dict, bias_state: dict, in_place: bool
    ) -> None:
        self.unit, self.weight, self.bias = unit, weight, bias
        self.state, self.bias_state = state, bias_state
        self.dtype = torch.float64 if weight.dtype == torch.float64 else torch.float32
        self.process_group = _process_group(unit, weight)
        own = local(weight)
        self.shape = (unit.out if unit.layout.columns else len(own), unit.fan_in)
        order = torch.contiguous_format
        self.order = order if own.is_contiguous() else _MEMORY_ORDERS.get(own.ndim, order)
        # Whether the weight's own memory is a matrix of rows, so that no copy is needed.
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
        g = getattr(self.weight.grad, "_local_tensor", self.weight.grad)
        if g.dtype != self.dtype:
            g = g.to(self.dtype)
        if self.is_in_place:
            return g.contiguous(memory_format=self.order)
        return self.unit.layout.to_rows(g).contiguous()

    def wrap(self, part: Tensor) -> Tensor:
        """Return this process's rows as what the weight is: a tensor, or a part of a DTensor."""
        if not hasattr(self.weight, "placements"):
            return part
        from torch.distributed.tensor import DTensor

        size = torch.Size((self.unit.out, *part.shape[1:]))
        mesh, placements = self.weight.device_mesh, self.weight.placements
        return DTensor.from_local(
            part, mesh, placements, run_check=False, shape=size, stride=part.stride()
        )

    def parameter(self, part: Tensor) -> nn.Parameter:
        return nn.Parameter(self.wrap(part), requires_grad=False)

    def _fit_states(self, shape: tuple[int, ...]) -> None:
        """Bring states to the weight's present device, type and layout, if these have changed."""
        for state in (self.state, self.bias_state):
            for key, value in state.items():
                is_number = isinstance(value, Tensor) and value.is_floating_point()
                if is_number and (value.ndim or "/" not in key):  # the base's own counters stay
                    value = value.to(self.weight.device, self.dtype)
                    if key.startswith("direction/") and value.numel() == self.weight.numel():
                        value = value.reshape(self.unit.out, *shape[1:])
                    state[key] = value


class Stage:
    """Units on one device, of one type and in one process group, which are stepped together."""

    def __init__(self, members: Sequence[Member], match: bool, max_turn: float | None) -> None:
        self.members, self.match, self.max_turn = list(members), match, max_turn
        self.is_bounded = max_turn is not None
        self.process_group = members[0].process_group
        self.counts = torch.tensor([m.shape[0] for m in members], device=members[0].weight.device)
        like = members[0].weight.new_empty(0, dtype=members[0].dtype)
        self.table = rows_for([m.shape for m in members], like)
        if new := [m for m in members if "r" not in m.state]:
            self._start(new, match)
        self.biased = [m for m in members if m.bias is not None]
        self.has_free = any(not m.is_fixed for m in members)
        self.length = self._per_row(torch.stack([m.state["length"] for m in members]))
        self.zeros = torch.zeros_like(self.length)
        # One flat tensor each, of which every layer's r, lam and their gradients are parts.
        self.r = self._flat([m.state["r"] for m in members])
        self.lam = self._flat([m.bias_state.get("lam") for m in members])
        self.by_r, self.by_lam = torch.zeros_like(self.r), torch.zeros_like(self.lam)
        flat = map(self.table.split, (self.r, self.lam, self.by_r, self.by_lam))
        for m, *parts in zip(members, *flat, strict=True):
            r, lam, by_r, by_lam = map(m.wrap, parts)
            m.state["r"], m.r = r, nn.Parameter(r, requires_grad=False)
            m.r.grad = by_r
            if m.bias is not None:
                m.bias_state["lam"], m.lam = lam, nn.Parameter(lam, requires_grad=False)
                m.lam.grad = by_lam

    def _start(self, members: Sequence[Member], match: bool) -> None:
        """Write the first r, and the length R of the stored directions, into the states."""
        r = [self._first_scale(m) for m in members]
        pairs = [torch.stack([x.abs().sum(), x.new_tensor(len(x))]) for x in r]
        sums = self._reduce(torch.stack(pairs))
        mean = sums[:, 0] / sums[:, 1] if match else torch.ones_like(sums[:, 0])
        for m, one, length in zip(members, r, mean, strict=True):
            m.state.update(r=m.wrap(one), length=length.clone(), fan_in=m.unit.fan_in)

    def _first_scale(self, m: Member) -> Tensor:
        return torch.linalg.vector_norm(m.weight_rows().flatten(1), dim=1)

    def _reduce(self, x: Tensor) -> Tensor:
        """Return the sum over the processes that share the units."""
        if self.process_group is not None:
            dist.all_reduce(x, group=self.process_group)
        return x

    def _per_row(self, per_layer: Tensor) -> Tensor:
        """Return one number per layer as one per row."""
        return per_layer.repeat_interleave(self.counts, output_size=self.table.total)

    def _layer_sums(self, per_row: Tensor) -> Tensor:
        """Return the sum over the rows of each layer, in all processes."""
        sums = torch.segment_reduce(per_row, "sum", lengths=self.counts, initial=0, unsafe=True)
        return self._reduce(sums)

    def _flat(self, tensors: Sequence[Any]) -> Tensor:
        """Return one number per row from a vector for each layer; None stands for zeros."""
        parts = zip(tensors, self.table.split(self.zeros), strict=True)
        return torch.cat([zero if x is None else local(x) for x, zero in parts])

    # --- before and after the step ------------------------------------------------------------

    def enter(self, rates: Sequence[Any]) -> None:
        """Give the base and the rest their parameters and gradients; `rates` are the groups'."""
        before = self.r.clone() if self.biased else self.r
        self._enter_directions(rates)
        if self.biased:
            self._enter_distances(before)
        if self.has_free:
            self.entered = self.r.clone()

    def _enter_distances(self, before: Tensor) -> None:
        """Give the rest what stands for the biases, and add to dL/dr what b = r lam contributes.

        Where |b| <= |r| that is R' lam, so that b moves as fast as a plain one. A boundary farther
        out than 1 has a plain bias: lam would move it 1 + lam^2 times as fast. Without `match` it
        is lam everywhere, as in converted layers.
        """
        biases = [m.bias for m in self.members]
        by_bias = self._flat([None if b is None else b.grad for b in biases]).to(self.r.dtype)
        self.bias = self._flat(biases)
        is_ours = (before * self.lam).to(self.bias.dtype) == self.bias
        is_ours &= (self.r - before).abs() <= _ROUNDING * before.abs()
        value = torch.where(is_ours, self.r * self.lam, self.bias.to(self.r.dtype))
        scale = torch.where(self.r == 0, 1, self.r)
        self.is_near = (self.r != 0) & ((value.abs() <= self.r.abs()) | (not self.match))
        self.present_length = self._mean_scale() if self.match else self.length
        stretch = torch.where(self.is_near, self.present_length / scale, 1)
        self.lam.copy_(stretch * value)
        self.by_lam.copy_(by_bias / stretch)
        self.by_r.add_(torch.where(self.is_near, value / scale, 0) * by_bias)
        self.entered_lam = self.lam.clone()

    def _mean_scale(self) -> Tensor:
        columns = torch.stack([self.r.abs(), self.zeros + 1], dim=1)
        sums, counts = self._layer_sums(columns).unbind(dim=1)
        return self._per_row(torch.where(sums == 0, 1, sums / counts.clamp(min=1)))

    def leave(self) -> None:
        """Write weights and biases from what the base and the rest have stepped."""
        entered = self.entered if self.has_free else self.r
        if self.has_free:
            self.r.mul_(entered != 0)  # a row of zeros has no direction to grow in
            if self.is_bounded:  # r through 0 would turn a unit by 180 degrees
                least = torch.minimum(entered.abs(), _SHORTEST * self.length)
                kept = torch.maximum(0.1 * entered.abs(), least).copysign(entered)
                self.r.copy_(torch.where(self.r * entered < 0, kept, self.r))
        self._leave_directions(entered)
        if self.biased:
            self._leave_distances(entered)

    def _leave_distances(self, entered: Tensor) -> None:
        """Write the biases, and keep lam = b / r until the next step."""
        value = torch.where(self.is_near, self.r * self.lam / self.present_length, self.lam)
        is_still = (self.lam == self.entered_lam) & (self.r == entered)
        parts = self.table.split(torch.where(is_still, self.bias, value.to(self.bias.dtype)))
        biased = [i for i, m in enumerate(self.members) if m.bias is not None]
        own = [local(self.members[i].bias) for i in biased]
        torch._foreach_copy_(own, [parts[i] for i in biased])
        self.lam.copy_(torch.where(self.r == 0, 0, value / torch.where(self.r == 0, 1, self.r)))

    def _enter_directions(self, rates: Sequence[Any]) -> None:
        """Set `stored` and its gradient, r as the weights have it, and by_r = <G, u>."""
        raise NotImplementedError

    def _leave_directions(self, entered: Tensor) -> None:
        """Write r times the new directions into the weights, whose r was `entered`."""
        raise NotImplementedError


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
