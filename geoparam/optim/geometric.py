"""Geometric parameterization in the optimizer, for a model that stays plain."""

import copy
import warnings
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch._compile import _disable_dynamo
from torch.optim import Optimizer

from geoparam.inspection import unwrap
from geoparam.optim import saved_states
from geoparam.optim.groups import divide_groups, list_params, name_params, undecayed_names
from geoparam.optim.inner import Inner, MakeOptimizer, Maker, Pair, Slot, fit_state, local
from geoparam.optim.stage import AngularStage, Member, Stage
from geoparam.optim.units import BY_VALUES, find_units, format_table
from geoparam.trace import Filter


class GeometricOptimizer(Optimizer):
    r"""Train a plain model as if its units were geometric: W = r u, b = r lam, with |u| = 1.

    Each weight's gradient is taken back to the direction u, the scale r and the distance lam of
    its rows by the chain rule; torch optimizers step these; the weight is written from them. The
    model is not touched otherwise. With `match=False, scale="free"` this is the training of the
    converted model (`convert_`), to rounding.

    Args:
        model: any model with layers of torch.nn, or transformers' Conv1D.
        base: class (or callable `(params, **options)`) of the optimizer that steps directions.
        lr: learning rate; it means what it means for `base` on the plain model.
        coordinates: `"intrinsic"`, unit vectors, or `"angles"`, the papers' angles.
        turn: let each step turn the units of a layer by this many degrees, root mean square,
            whatever the gradient's size. The unit groups' `lr` is then this angle, so that any
            schedule scales it; `lr` is for all the rest: where the base is Muon, AdamW's rate.
        max_turn: no unit turns by more degrees in one step; by default 4 times the turn;
            without `turn`, no limit.
        match: store directions so that `lr` has the speed it has for the plain model. False: as
            converted layers have it.
        scale: r is `"free"`, `"fixed"`, or with `"auto"` fixed where BatchNorm or InstanceNorm
            follows, which undoes it.
        scale_lr: rate of r, which schedules scale along with `lr`; by default lr. Three times lr
            is often faster, but no longer the plain model's speed.
        scale_decay: weight decay of r where it is free.
        rest: class of the optimizer for r, lam and all that is no unit; by default the base's,
            AdamW where the base is Muon. A partial may name its own `lr` and `weight_decay`.
        groups: parameter groups, as torch's or timm's; each is divided into units and rest, and
            keeps its other keys.
        filter_fn: which layers have units, `filter_fn(module, name)`; by default all but the
            output layer.
        example_inputs: inputs on which the model is run once, to find its output layers and the
            norms that follow a layer; without them the order of its modules decides.
        base_options: options of `base`, and of `rest` where it is the same class. `weight_decay`
            acts on matrices of the rest alone, never on directions, r or lam.

    `print(optimizer)` shows what is a unit, what stays plain, and why.

    Example:
        >>> model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
        >>> _ = nn.init.zeros_(model[0].bias)
        >>> optimizer = GeometricOptimizer(model, torch.optim.SGD, lr=0.1, momentum=0.9)
        >>> model(torch.randn(16, 4)).square().mean().backward()
        >>> optimizer.step()
        >>> print(optimizer)
        GeometricOptimizer (intrinsic, SGD; rest SGD): 32 of 58 parameters are units
          units of                                   rows fan-in  bias   scale
          0.weight                                      8      4  lam    free
          plain
          2.weight                                 the output layer
    """

    def __init__(
        self,
        model: nn.Module,
        base: MakeOptimizer = torch.optim.SGD,
        *,
        lr: float | Tensor,
        coordinates: Literal["intrinsic", "angles"] = "intrinsic",
        turn: float | None = None,
        max_turn: float | None = None,
        match: bool = True,
        scale: Literal["auto", "free", "fixed"] = "auto",
        scale_lr: float | None = None,
        scale_decay: float = 0.0,
        rest: MakeOptimizer | None = None,
        groups: Sequence[Any] | None = None,
        filter_fn: Filter | None = None,
        example_inputs: Any = None,
        **base_options: Any,
    ) -> None:
        decay = base_options.pop("weight_decay", None)
        rates = {"weight_decay": decay, "scale_lr": scale_lr, "scale_decay": scale_decay}
        _check_options(coordinates, turn, max_turn, scale, **rates)
        model = unwrap(model)
        self._base = Maker("base", base, lr, base_options)
        self._rest = self._base.make_rest(rest)
        self._rest_options = self._find_rest_options(lr, decay)
        rate = self._rest_options["lr"]
        is_relative = groups and (turn is not None or rate is not lr)
        if (is_relative and not lr) or (scale_lr is not None and not rate):
            raise ValueError("lr is above 0 where other rates are multiples of it; got 0.")
        self._coordinates, self._turn, self._max_turn = coordinates, turn, max_turn
        self._match, self._scale_decay = match, scale_decay
        self._scale_factor: Any = 1.0 if scale_lr is None else scale_lr / rate
        found = find_units(model, filter_fn, example_inputs, scale, match)
        self._units, self._plain, self._candidates = found
        self._guesses_scale = scale == "auto"
        by_values = [name for name, why in self._plain.items() if why in BY_VALUES]
        self._rest_options["zero_rows"] = "\n".join(by_values)  # DCP loses an empty list
        self._undecayed = undecayed_names(model)
        self._size = sum(p.numel() for p in model.parameters())
        self._forget()
        words = [coordinates, "turn" if turn else "", "" if match else "match=False"]
        form = ", ".join(filter(None, words)) + f", {self._base.name}; rest {self._rest.name}"
        own = {"lr": lr if turn is None else turn, "geometry": form}  # loaded states must match it
        defaults, rest_defaults = self._base.options(0.0), self._rest.defaults
        options = {**defaults, **own}, self._rest_options
        super().__init__(divide_groups(model, groups, self._units, options, lr), {})
        self.defaults = {k: v for k, v in defaults.items() if k != "betas" or k in rest_defaults}

    def _find_rest_options(self, lr: float | Tensor, decay: float | None) -> dict[str, Any]:
        """Return the options of the rest's groups; a partial's own rate and decay are kept."""
        decay = self._base.named.get("weight_decay", 0.0) if decay is None else decay
        if self._rest is not self._base:
            decay = self._rest.named.get("weight_decay", decay)
        own = {"lr": self._rest.named.get("lr", lr), "geometry": "rest"}
        return {**self._rest.options(decay), **own}

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters; those that come after construction are part of the rest."""
        if "geometry" not in param_group:
            params = list_params(param_group["params"])
            start = sum(len(group["params"]) for group in self.param_groups)
            names = [f"added.{start + i}" for i in range(len(params))]
            own = {"params": params, "param_names": names}
            param_group = {**self._rest_options, **param_group, **own}
        if isinstance(rate := param_group["lr"], Tensor):
            param_group = {**param_group, "lr": rate.clone()}  # else a change of one changes all
        Optimizer.add_param_group(self, param_group)
        self._forget()

    @_disable_dynamo
    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take one step; parameters without a gradient are left as they are."""
        loss = None if closure is None else torch.enable_grad()(closure)()
        self._prepare()
        kept = self._copy_still_weights()
        entered: list[Stage] = []
        try:
            for stage in self._stages:
                stage.enter()
                entered.append(stage)
            if self._signature is None:  # after enter: bases may copy first values
                self._build_inner()
            for inner in self._inner:
                inner.step(self.param_groups)
            if self._published != _entry_ids([slot.state for slot in self._slots]):
                self._publish()
        finally:
            for stage in entered:
                stage.leave()
            for weight, before in kept:
                weight.copy_(before)
        return loss

    def _copy_still_weights(self) -> list[tuple[Tensor, Tensor]]:
        """Return weights whose rates are all 0, with copies: rounding must not change them.

        torch.distributed.checkpoint takes a first step with rates of 0. A rate in a tensor counts
        as nonzero: reading it would wait for the GPU.
        """
        rates = [group["lr"] for group in self.param_groups]
        is_zero = [not isinstance(rate, Tensor) and rate == 0 for rate in rates]
        members = [m for stage in self._stages for m in stage.members if is_zero[m.at]]
        still = [m for m in members if is_zero[m.at + 1] or m.unit.is_fixed]
        return [(w, w.clone()) for m in still for w in (local(m.weight), m.own)]

    def _forget(self) -> None:
        """Drop what is built at the next step from parameters and states."""
        self._signature: Any = None
        self._watched: list[Any] = []
        self._stages: list[Stage] = []
        self._slots: list[Slot] = []
        self._inner: list[Inner] = []

    def _publish(self) -> None:
        """Write the inner states' entries into the outer ones."""
        for slot in self._slots:
            slot.publish()
        self._published = _entry_ids([slot.state for slot in self._slots])
        self._signature = self._compute_signature()

    def _compute_signature(self) -> Any:
        """Return a fingerprint: while it is unchanged, the stages of the last step are reused.

        Others may replace a parameter, its memory, its state, or an entry of a unit's state.
        """
        ids = [id(x) for group in self.param_groups for x in (group, *group["params"])]
        owns = [getattr(p, "_local_tensor", p) for p in self._watched]
        layouts = [(x.data_ptr(), x.stride(), x.dtype) for x in owns]
        has_gradient = [p.grad is not None for p in self._watched]
        members = [m for stage in self._stages for m in stage.members]
        entries = _entry_ids([m.state for m in members] + [m.bias_state for m in members])
        states = [id(state) for p, state in self.state.items() if isinstance(p, Tensor)]
        return ids, layouts, has_gradient, states, entries

    def _prepare(self) -> None:
        """Build stages anew where parameters have changed since."""
        if self._signature == self._compute_signature():
            return
        self._forget()
        self._fit_units()
        groups = enumerate(self.param_groups)
        places = {name: (at, p) for at, group in groups for name, p in name_params(group)}
        names = [name for unit in self._units for name in (unit.name, unit.bias)]
        self._watched = [places[name][1] for name in names if name in places]
        self._warn_of_one_peak()
        for at, p in places.values():
            group = self.param_groups[at]
            fit_state(self.state[p], p, bool(group.get("capturable") or group.get("fused")))
        self._build_stages(places)

    def _fit_units(self) -> None:
        """Take up the present sizes of weights."""
        params = self._named_params()
        self._units = [u.fit(params[u.name]) if u.name in params else u for u in self._units]

    def _named_params(self) -> dict[str, Any]:
        return dict(chain.from_iterable(map(name_params, self.param_groups)))

    def _warn_of_one_peak(self) -> None:
        """Warn where a schedule has the same peak for angles and for rates."""
        peaks = {group["max_lr"] for group in self.param_groups if "max_lr" in group}
        if self._turn is not None and len(self.param_groups) > 1 and len(peaks) == 1:
            warnings.warn(
                f"OneCycleLR has one max_lr, {peaks.pop()}, for the turn in degrees and for the "
                "rate of all the rest: give it a list, max_lr=[turn, lr].",
                stacklevel=4,
            )

    def _build_stages(self, places: Mapping[Any, tuple[int, Any]]) -> None:
        """Put weights that have a gradient and are stepped alike into a stage each."""
        make = AngularStage if self._coordinates == "angles" else Stage
        members = defaultdict[Any, list[Member]](list)
        for unit in self._units:
            at, weight = places.get(unit.name, (0, None))
            bias_at, bias = places.get(unit.bias, (0, None)) if unit.has_distance else (0, None)
            if weight is None or weight.grad is None:
                continue
            bias = None if bias is None or bias.grad is None else bias
            if "r" in self.state[weight]:
                saved_states.check_size(unit, self.state[weight])
            m = Member(unit, weight, bias, (at, bias_at), self.state)
            members[make.key(m)].append(m)
        for found in members.values():
            stage = make(
                found, self.param_groups[found[0].at], match=self._match,
                turns=self._turn is not None, max_turn=self._max_turn,
            )  # fmt: skip
            self._stages.append(stage)
            self._slots += chain.from_iterable(stage.slots.values())

    def _build_inner(self) -> None:
        """Give parameters to the base and the rest: see `Inner` for the keys."""
        is_one = self._base is self._rest and self._turn is None  # a base may use a global norm
        directions = defaultdict[Any, list[Pair]](list)
        others = directions if is_one else defaultdict[Any, list[Pair]](list)
        factor, biases = None if self._turn is not None else 1.0, set()
        for stage in self._stages:
            at, bias_at, slots = stage.first.at, stage.first.bias_at, stage.slots
            scale = at + 1, self._scale_factor, self._scale_decay
            directions[at, factor, 0.0] += [slot.pair for slot in slots["direction"]]
            others[scale] += [slot.pair for slot in slots["r"]]
            others[bias_at, 1.0, 0.0] += [slot.pair for slot in slots["lam"]]
            biases |= {id(m.bias) for m in stage.members}
        for at, group in enumerate(self.param_groups):
            for name, p in name_params(group) if group["geometry"] == "rest" else ():
                if id(p) not in biases:
                    decay = 0.0 if p.ndim < 2 or name in self._undecayed else None
                    others[at, 1.0, decay].append(self._find_plain_state(p))
        parts = [("base", self._base, directions), ("rest", self._rest, others)]
        for name, maker, pairs in parts[:1] if is_one else parts:
            if any(pairs.values()):
                self._inner.append(Inner(maker, pairs, self.state, name))
        self._publish()

    def _find_plain_state(self, p: nn.Parameter) -> Pair:
        """Return a parameter with its state; a bias whose weight is not stepped now has two."""
        if "lam" not in self.state[p]:
            return p, self.state[p]
        self._slots.append(Slot("plain", self.state[p], p))
        return self._slots[-1].pair

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state of the same model and settings; tensors keep their types."""
        saved_states.check_form(state_dict)
        saved = state_dict["param_groups"]
        by_values = self._rest_options["zero_rows"].split("\n")
        self._fit_units()
        before = [dict(group) for group in self.param_groups], self._units, self._plain
        try:
            if names := saved_states.find_saved_names(self.param_groups, saved, by_values):
                self._regroup(names)
            states = saved_states.check_fit(self.param_groups, state_dict, self._units)
        except ValueError:
            for group, kept in zip(self.param_groups, before[0], strict=True):
                group.update(kept)
            self._units, self._plain = before[1:]
            raise
        pairs = zip(saved, self.param_groups, strict=True)
        groups = [{**theirs, "param_names": mine["param_names"]} for theirs, mine in pairs]
        kept = state_dict["state"]
        loose = {k: copy.deepcopy(kept[k]) for k in ("base", "rest") if k in kept}
        super().load_state_dict({**state_dict, "state": loose, "param_groups": groups})
        self._forget()
        for name, p in self._named_params().items():
            if states[name]:
                entries = states[name].items()
                self.state[p] = {k: v.clone() if isinstance(v, Tensor) else v for k, v in entries}
        # Keep the choices that were saved: present weights or the model's mode may give others.
        keys = ("has_distance", "is_fixed") if self._guesses_scale else ("has_distance",)
        for i, unit in enumerate(self._units):
            state = states.get(unit.name, {})
            decided: Any = {key: bool(state[key]) for key in keys if key in state}
            self._units[i] = replace(unit, **decided)

    def _regroup(self, names: Sequence[list[str]]) -> None:
        """Give each group the parameters of these names; those of unit groups become units."""
        params = self._named_params()
        for group, members in zip(self.param_groups, names, strict=True):
            group.update(params=[params[name] for name in members], param_names=members)
        rest = {n for g in self.param_groups if g["geometry"] == "rest" for n in g["param_names"]}
        known = {unit.name: unit for unit in (*self._candidates, *self._units)}
        before = {unit.name for unit in self._units}
        dropped, added = before & rest, params.keys() - rest - before
        self._units = [u for u in known.values() if u.name in (before - dropped) | added]
        plain = self._plain | dict.fromkeys(dropped, "plain in the state that was loaded")
        self._plain = {name: why for name, why in plain.items() if name not in added}

    def __getstate__(self) -> dict[str, Any]:
        """Return all but what the next step builds: copies and pickles go on bit for bit."""
        built = ("_signature", "_published", "_watched", "_stages", "_slots", "_inner", "step")
        own = self.__dict__.items()
        return {k: v for k, v in own if not k.endswith("_hooks") and k not in built}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._forget()

    def __repr__(self) -> str:
        trained = {name for name, p in self._named_params().items() if p.requires_grad}
        sizes = [u.out * u.fan_in for u in self._units if u.name in trained]
        group = next((g for g in self.param_groups if g["geometry"] != "rest"), {"lr": 0.0})
        turn = "" if self._turn is None else f", turn {group.get('initial_lr', group['lr']):g}"
        turn += "" if self._max_turn is None else f", max_turn {self._max_turn:g}"
        form = f"{self._coordinates}{turn}, {self._base.name}; rest {self._rest.name}"
        share = f"{sum(sizes):,} of {self._size:,} parameters are units"
        table = format_table(self._units, self._plain, trained)
        return f"GeometricOptimizer ({form}): {share}\n{table}"


def _check_options(
    coordinates: str, turn: Any, max_turn: Any, scale: str, **rates: float | None
) -> None:
    """Raise where an option makes no sense; rates and decays are 0 or more."""
    if coordinates not in ("intrinsic", "angles"):
        raise ValueError(f"coordinates are 'intrinsic' or 'angles'; got {coordinates!r}.")
    if scale not in ("auto", "free", "fixed"):
        raise ValueError(f"scale is 'auto', 'free' or 'fixed'; got {scale!r}.")
    for name, value in (("turn", turn), ("max_turn", max_turn)):
        if value is not None and not 0 < value <= 180:
            words = "an angle in degrees, above 0 and at most 180"
            raise ValueError(f"{name} is {words}; got {value}.")
    if turn is not None and max_turn is not None and max_turn < turn:
        raise ValueError(
            f"max_turn, {max_turn}, is below turn, {turn}: no unit could turn so far."
        )
    if turn is not None and coordinates == "angles":
        raise ValueError(
            "turn needs coordinates='intrinsic': a step along latitudes is no arc of a circle. "
            "max_turn bounds the turn of angles."
        )
    for name, value in rates.items():
        if value is not None and not value >= 0:  # nor NaN
            raise ValueError(f"{name} is 0 or more; got {value}.")


def _entry_ids(states: list[dict[str, Any]]) -> list[int]:
    return [*map(id, chain.from_iterable(map(dict.values, states)))]
