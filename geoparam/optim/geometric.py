"""Geometric parameterization in the optimizer, for a model that stays plain."""

import warnings
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain, zip_longest
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch._compile import _disable_dynamo
from torch.optim import Optimizer

from geoparam.optim.angular import AngularStage
from geoparam.optim.groups import undecayed_names
from geoparam.optim.inner import MakeOptimizer, Maker, Slot, fit_state, local
from geoparam.optim.stage import Member, Stage
from geoparam.optim.units import Filter, find_units, print_table


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
        max_turn: no unit turns by more degrees in one step; by default 4 times the turn.
        match: store directions so that `lr` has the speed it has for the plain model. False: as
            converted layers have it.
        scale: r is `"free"`, `"fixed"`, or with `"auto"` fixed where BatchNorm or InstanceNorm
            follows, which undoes it.
        scale_lr: rate of r, which schedules scale along with `lr`; by default lr. Three times lr
            is often faster, but no longer the plain model's speed.
        scale_decay: weight decay of r where it is free.
        rest: class of the optimizer for r, lam and all that is no unit; by default the base's,
            AdamW where the base is Muon.
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
        if not lr and (scale_lr is not None or (groups and turn is not None)):
            raise ValueError("lr=0 has no multiple: give an lr above 0, to which others relate.")
        self._base = self._rest = Maker("base", base, {"lr": lr, **base_options})
        if rest is not None and rest is not base:
            self._rest = Maker("rest", rest, {"lr": lr})
        elif self._base.is_muon:
            self._rest = Maker("rest", torch.optim.AdamW, {"lr": lr})
        self._rest_defaults = self._rest.options(decay or 0.0)
        self._coordinates, self._match, self._scale_decay = coordinates, match, scale_decay
        self._turn, self._max_turn = turn, max_turn
        self._scale_factor: Any = 1.0 if scale_lr is None else scale_lr / lr
        self._units, self._plain = find_units(model, filter_fn, example_inputs, scale)
        self._model: weakref.ref[nn.Module] | None = weakref.ref(model)
        self._undecayed = undecayed_names(model)
        self._size = sum(p.numel() for p in model.parameters())
        self._forget()
        super().__init__(self._divide(model, groups, lr), {})
        self.defaults = self._base.options(0.0)

    # --- groups -------------------------------------------------------------------------------

    def _divide(
        self, model: nn.Module, groups: Sequence[Any] | None, lr: float | Tensor
    ) -> list[dict[str, Any]]:
        """Divide each group into units and rest: two groups, the rest's after the units'."""
        names = {id(p): name for name, p in model.named_parameters()}
        are_units = {unit.name for unit in self._units}
        divided: list[dict[str, Any]] = []
        given_groups = list(model.parameters() if groups is None else groups)
        if not all(isinstance(given, dict) for given in given_groups):
            given_groups = [{"params": given_groups}]
        for given in map(dict, given_groups):
            if "params" not in given:
                raise ValueError(f"a group has its parameters under 'params'; got {list(given)}.")
            params = _list_params(given.pop("params"))
            if strangers := [getattr(p, "shape", p) for p in params if id(p) not in names]:
                raise ValueError(f"groups hold parameters that the model does not: {strangers}.")
            given.pop("param_names", None)
            rate = given.pop("lr", lr)
            units = {**self._base.options(0.0), **given, "lr": rate, "geometry": self._form}
            if "weight_decay" in units:
                units["weight_decay"] = 0.0
            if self._turn is not None:  # a group's own rate scales its turn
                units["lr"] = self._turn if rate is lr else rate / lr * self._turn
            rest = {**self._rest_defaults, **given, "lr": rate, "geometry": "rest"}
            for group, is_unit in ((units, True), (rest, False)):
                group["params"] = [p for p in params if (names[id(p)] in are_units) == is_unit]
                group["param_names"] = [names[id(p)] for p in group["params"]]
            divided += [units, rest] if units["params"] else [rest] if rest["params"] else []
        return divided

    @property
    def _form(self) -> str:
        """What a loaded state must have been made with."""
        turn = "" if self._turn is None else ", turn"
        match = "" if self._match else ", match=False"
        return f"{self._coordinates}{turn}{match}, {self._base.name}; rest {self._rest.name}"

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters; those that come after construction are part of the rest."""
        if "geometry" not in param_group:
            params = _list_params(param_group["params"])
            start = sum(len(group["params"]) for group in self.param_groups)
            names = [f"added.{start + i}" for i in range(len(params))]
            own = {"params": params, "param_names": names, "geometry": "rest"}
            param_group = {**self._rest_defaults, **param_group, **own}
        Optimizer.add_param_group(self, param_group)
        self._forget()

    # --- the step -----------------------------------------------------------------------------

    @_disable_dynamo
    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take one step; parameters without a gradient are left as they are."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._prepare()
        kept = self._copy_still_weights()
        for stage in self._stages:
            stage.enter()
        try:
            self._copy_options()
            for optimizer in self._inner:
                optimizer.step()
            for slot in self._slots:
                slot.publish()
        finally:
            for stage in self._stages:
                stage.leave()
            for own, before in kept:
                own.copy_(before)
        return loss

    def _copy_still_weights(self) -> list[tuple[Tensor, Tensor]]:
        """Return the weights, and copies of them, that no rate moves: they stay bit for bit.

        torch.distributed.checkpoint takes a first step with rates of 0. A rate in a tensor counts
        as another: reading it would wait.
        """
        rates = [group["lr"] for group in self.param_groups]
        is_zero = [not isinstance(rate, Tensor) and rate == 0 for rate in rates]
        members = [m for stage in self._stages for m in stage.members if is_zero[m.at]]
        still = [local(m.weight) for m in members if is_zero[m.at + 1] or m.unit.is_fixed]
        return [(own, own.clone()) for own in still]

    def _copy_options(self) -> None:
        """Copy the options of the outer groups, which schedules and users may have changed."""
        for inner, at, factor, decay in self._copied:
            outer = self.param_groups[at]
            inner.update({k: outer[k] for k in inner if k in outer and k != "params"})
            if factor != 1.0:
                inner["lr"] = 1.0 if factor is None else outer["lr"] * factor
            if decay is not None and "weight_decay" in inner:
                inner["weight_decay"] = decay

    # --- what is built for the step -----------------------------------------------------------

    def _forget(self) -> None:
        """Drop what is built at the next step from parameters and states."""
        self._signature: Any = None
        self._watched: list[Any] = []
        self._stages: list[Stage] = []
        self._slots: list[Slot] = []
        self._inner: list[Optimizer] = []
        self._copied: list[tuple[Any, ...]] = []

    def _sign(self) -> Any:
        """Return what must be as it was for what the last step built to serve again."""
        ids = [id(p) for group in self.param_groups for p in group["params"]]
        owns = [getattr(p, "_local_tensor", p) for p in self._watched]
        layouts = [(x.data_ptr(), x.stride(), x.dtype) for x in owns]
        return ids, layouts, [p.grad is None for p in self._watched]

    def _prepare(self) -> None:
        """Build stages and inner optimizers anew where parameters have changed since."""
        if self._signature == self._sign():
            return
        self._forget()
        places = {
            name: (at, p)
            for at, group in enumerate(self.param_groups)
            for name, p in _name_params(group)
        }
        names = [name for unit in self._units for name in (unit.name, unit.bias)]
        self._watched = [places[name][1] for name in names if name in places]
        self._warn_of_mistakes()
        self._signature = self._sign()
        for at, p in places.values():
            group = self.param_groups[at]
            fit_state(self.state[p], p, bool(group.get("capturable") or group.get("fused")))
        self._build_stages(places)
        self._build_inner()

    def _warn_of_mistakes(self) -> None:
        """Warn where the model has other parameters now, and of one peak for angles and rates."""
        model = None if self._model is None else self._model()
        own = set() if model is None else {id(p) for p in model.parameters()}
        if own and not any(id(p) in own for p in self._watched):
            self._model = None  # once is enough
            warnings.warn(
                "the model no longer holds the parameters of this optimizer, so that it does not "
                "train. convert_, fold_ and the like make new parameters: build the optimizer "
                "afterwards.",
                stacklevel=4,
            )
        peaks = {group.get("max_lr") for group in self.param_groups}
        if self._turn is not None and len(self.param_groups) > 1 and len(peaks - {None}) == 1:
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
            if bias is not None and bias.grad is None:
                bias = None
            m = Member(unit, weight, bias, (at, bias_at), self.state)
            members[make.group_key(m)].append(m)
        for found in members.values():
            stage = make(
                found, self.param_groups[found[0].at], match=self._match,
                turns=self._turn is not None, max_turn=self._max_turn,
                joins=(self._base.is_elementwise, self._rest.is_elementwise),
            )  # fmt: skip
            self._stages.append(stage)
            self._slots += chain.from_iterable(stage.slots.values())

    def _build_inner(self) -> None:
        """Give parameters and states to the base and the rest, which are one if they are alike.

        Keys are the outer group, the factor of its rate (None: the rate is 1) and the decay
        (None: the group's own).
        """
        directions, others = defaultdict[Any, list[Any]](list), defaultdict[Any, list[Any]](list)
        factor, biases = None if self._turn is not None else 1.0, set()
        for stage in self._stages:
            first = stage.first
            directions[first.at, factor, None] += stage.pairs("direction")
            others[first.at + 1, self._scale_factor, self._scale_decay] += stage.pairs("r")
            others[first.bias_at, 1.0, 0.0] += stage.pairs("lam")
            biases |= {id(m.bias) for m in stage.members}
        for at, group in enumerate(self.param_groups):
            for name, p in _name_params(group) if group["geometry"] == "rest" else ():
                if id(p) not in biases:
                    decay = 0.0 if name in self._undecayed else None
                    others[at, 1.0, decay].append(self._find_plain_state(p))
        if self._base is self._rest and self._turn is None:  # some look at all parameters (a norm)
            self._make_inner(self._base, directions | others)
        else:
            self._make_inner(self._base, directions)
            self._make_inner(self._rest, others)

    def _find_plain_state(self, p: nn.Parameter) -> tuple[nn.Parameter, dict[str, Any]]:
        """Return a parameter with its state; a bias whose weight is not stepped now has two."""
        if "lam" not in self.state[p]:
            return p, self.state[p]
        self._slots.append(Slot("plain", [self.state[p]], [p], p))
        return p, self._slots[-1].state

    def _make_inner(self, maker: Maker, items: Mapping[Any, list[Any]]) -> None:
        """Make an optimizer of parameters with their states."""
        items = {key: pairs for key, pairs in items.items() if pairs}
        if not items:
            return
        optimizer = maker.make([{"params": [p for p, _ in pairs]} for pairs in items.values()])
        made = dict(optimizer.state)  # what the constructor wrote; it is for empty states only
        optimizer.state.clear()
        for inner, (key, pairs) in zip(optimizer.param_groups, items.items(), strict=True):
            self._copied.append((inner, *key))
            for p, state in pairs:
                if not state:
                    state.update(made.get(p, {}))
                optimizer.state[p] = state
        self._inner.append(optimizer)

    # --- states -------------------------------------------------------------------------------

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state of the same model and settings; tensors keep their types."""
        if not isinstance(state_dict, Mapping) or not {"state", "param_groups"} <= set(state_dict):
            raise ValueError("an optimizer's state dict has entries 'state' and 'param_groups'.")
        saved = state_dict["param_groups"]
        if any("geometry" not in group for group in saved):
            raise ValueError(
                "this is the state of another optimizer. Its moments belong to plain weights, not "
                "to directions: load the model's weights and let GeometricOptimizer start anew."
            )
        self._check_groups(saved)
        ids = chain.from_iterable(group["params"] for group in saved)
        names = chain.from_iterable(group["param_names"] for group in self.param_groups)
        states = {n: state_dict["state"].get(key, {}) for n, key in zip(names, ids, strict=True)}
        self._check_shapes(states)
        super().load_state_dict({**state_dict, "state": {}})
        self._forget()
        for name, p in chain.from_iterable(map(_name_params, self.param_groups)):
            if states[name]:
                self.state[p] = {k: _copy(v) for k, v in states[name].items()}
        # Which biases are distances is as it was then, whatever the values are now.
        self._units = [
            replace(u, has_distance="lam" in state) if (state := states.get(u.bias or "")) else u
            for u in self._units
        ]

    def _check_groups(self, saved: Sequence[dict[str, Any]]) -> None:
        own = [group["param_names"] for group in self.param_groups]
        names = [group.get("param_names", mine) for group, mine in zip(saved, own, strict=False)]
        pairs: Iterator[Any] = zip_longest(own, names, fillvalue=[])
        for i, (mine, theirs) in enumerate(pairs):
            if mine != theirs:
                other = sorted({*mine} ^ {*theirs}) or mine
                raise ValueError(
                    f"the state's group {i} differs from the optimizer's in {other}. (A layer "
                    "with a row of zeros has no units: build the optimizer before pruning.)"
                )
        forms = [group["geometry"] for group in self.param_groups]
        if forms != (found := [group["geometry"] for group in saved]):
            raise ValueError(f"the state is for groups {found}; this optimizer has {forms}.")

    def _check_shapes(self, states: Mapping[str, Mapping[str, Any]]) -> None:
        for unit in self._units:
            state = states.get(unit.name, {})
            if not state:
                continue
            if any(state.get(key) is None for key in ("r", "length", "fan_in")):
                raise ValueError(f"the state of {unit.name!r} lacks 'r', 'length' or 'fan_in'.")
            r, fan_in = state["r"], state["fan_in"]
            if (len(r), fan_in) != (unit.out, unit.fan_in):
                raise ValueError(
                    f"the state of {unit.name!r} has {len(r)} units of fan-in {fan_in}; the "
                    f"model's has {unit.out} of {unit.fan_in}."
                )

    def __getstate__(self) -> dict[str, Any]:
        """Return all but what the next step builds: copies and pickles go on bit for bit."""
        built = ("_signature", "_watched", "_stages", "_slots", "_inner", "_copied", "_model")
        own = {k: v for k, v in self.__dict__.items() if not k.endswith("_hooks")}
        return {k: v for k, v in own.items() if k not in built}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._model = None
        self._forget()

    def __repr__(self) -> str:
        named = chain.from_iterable(map(_name_params, self.param_groups))
        trained = {name for name, p in named if p.requires_grad}
        sizes = [u.out * u.fan_in for u in self._units if u.name in trained]
        turn = "" if self._turn is None else f", turn {self._turn:g}"
        turn += "" if self._max_turn is None else f", max_turn {self._max_turn:g}"
        form = f"{self._coordinates}{turn}, {self._base.name}; rest {self._rest.name}"
        share = f"{sum(sizes):,} of {self._size:,} parameters are units"
        table = print_table(self._units, self._plain, trained)
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
    if turn is not None and coordinates == "angles":
        raise ValueError(
            "turn needs coordinates='intrinsic': a step along latitudes is no arc of a circle. "
            "max_turn bounds the turn of angles."
        )
    for name, value in rates.items():
        if value is not None and value < 0:
            raise ValueError(f"{name} is 0 or more; got {value}.")


def _name_params(group: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    return zip(group["param_names"], group["params"], strict=True)


def _list_params(params: Any) -> list[Any]:
    """Return the parameters of a group, which may be one, several, or have names."""
    listed = [params] if isinstance(params, Tensor) else list(params)
    return [p[-1] if isinstance(p, tuple) else p for p in listed]


def _copy(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else value
