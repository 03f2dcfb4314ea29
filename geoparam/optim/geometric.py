"""Geometric parameterization in the optimizer, for a model that stays plain."""

import inspect
import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from numbers import Real
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch._compile import _disable_dynamo
from torch.optim import Optimizer

from geoparam.arguments import check_callable, check_flag, check_rate, warn_user
from geoparam.model.run import unwrap
from geoparam.model.trace import Filter
from geoparam.model.unit_layers import Split, Stacks
from geoparam.optim import saved_states
from geoparam.optim.angular import AngularBlock
from geoparam.optim.bases import MakeOptimizer, Recipe, check_options, choose_rest, find_device
from geoparam.optim.blocks import Block, Weight
from geoparam.optim.groups import divide_groups, list_params, mix_rest_options
from geoparam.optim.inner import InnerOptimizer, Variable, counts_on_device, fit_state
from geoparam.optim.sharding import check_sharding
from geoparam.optim.summary import list_groups, list_weights
from geoparam.optim.units import MAYBE_EXPERTS, Unit, find_units, tell_of_packed, tell_of_stacks
from geoparam.parameter_groups import undecayed_names

LEAST_TURN = 0.1  # degrees: less is likely a rate
LARGEST_RATE = 0.5  # of Adam's kind: more is likely an angle


class GeometricOptimizer(Optimizer):
    r"""Train a plain model as if its units were geometric: W = r u, b = r lam, with |u| = 1.

    Each weight's gradient is taken back to the direction u, the scale r and the distance lam of
    its rows by the chain rule; torch optimizers step these; the weight is written from them. The
    model is not touched otherwise. With `match=False, scale="free"` this is the training of the
    converted model (`convert_`), to rounding.

    Steps are atomic for weights with units: they, their biases and masters are written at the end
    of a step, and an error or a signal before that leaves them as they were. As in torch, other
    parameters and the moments are not protected.

    Args:
        model: any model with layers of torch.nn, or transformers' Conv1D and experts.
        base: class (or callable `(params, **options)`) of the optimizer that steps directions:
            one of torch's element-wise optimizers, or Muon.
        lr: learning rate; it means what it means for `base` on the plain model. With `turn` it is
            the rate of everything that is not a direction.
        coordinates: `"intrinsic"`, unit vectors, or `"angles"`, the papers' angles.
        turn: let each step turn the units of a layer by this many degrees, root mean square,
            whatever the gradient's size, while the rate is `lr`. A schedule of the rate scales the
            angle along: it is `turn` times the present rate over `lr`.
        max_turn: no unit turns by more degrees in one step. By default 4 times the layer's angle,
            and 90 degrees, with `turn`; without it, no limit.
        match: store directions so that `lr` has the speed it has for the plain model. False: as
            converted layers have it.
        scale: r is `"free"`, `"fixed"`, or with `"auto"` fixed where BatchNorm or InstanceNorm
            follows, which undoes it.
        scale_lr: rate of r while the rate is `lr`; by default that of the rest.
        scale_decay: weight decay of r where it is free.
        rest: class of the optimizer for r, lam and every other parameter; by default the base's,
            AdamW where the base is Muon. A partial may name its own `lr` and `weight_decay`.
        groups: parameter groups, as torch's or timm's; each is divided into units and rest, and
            keeps its other keys, so that n groups become up to 2 n, which a list for a scheduler
            must fit. A group's own `lr` scales its turn and its rest's rate by lr_group / lr,
            unless it names a `turn`: that is its angle at its own rate. In a group without units
            it is the rate itself, whatever rate `rest` names.
        filter_fn: which layers have units, `filter_fn(module, name)`; by default all but the
            output layer and routers.
        example_inputs: inputs on which the model is run once, to find its output layers and the
            norms that follow a layer; without them names, shapes and the order of modules decide.
        split: packed projections, by the end of their module's name: how many equal parts a
            weight has, as `{"qkv": 3}`, or the rows of each, as `{"qkv": (2048, 512, 512)}`.
            MultiheadAttention and GPT-2's c_attn are split by themselves.
        stacks: 3-D parameters with stacked experts, by the end of their name: which axis is what,
            as `{"experts.w1": "eoi"}` for (experts, outputs, inputs). Those of transformers are
            known.
        base_options: options of `base`, and of `rest` where it is the same class. `weight_decay`
            acts on matrices of the rest alone, never on directions, r or lam.

    `print(optimizer)` shows what is a unit, what stays plain, and why.

    Example:
        >>> model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
        >>> optimizer = GeometricOptimizer(model, torch.optim.SGD, turn=2.4, lr=0.1, momentum=0.9)
        >>> model(torch.randn(16, 4)).square().mean().backward()
        >>> optimizer.step()
        >>> optimizer.turn()
        [2.4]
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
        split: Split | None = None,
        stacks: Stacks | None = None,
        **base_options: Any,
    ) -> None:
        decay = base_options.pop("weight_decay", None)
        if coordinates not in ("intrinsic", "angles"):
            raise ValueError(f"coordinates are 'intrinsic' or 'angles'; got {coordinates!r}.")
        if scale not in ("auto", "free", "fixed"):
            raise ValueError(f"scale is 'auto', 'free' or 'fixed'; got {scale!r}.")
        check_rate("lr", lr)
        check_rate("scale_decay", scale_decay)
        for name, rate in (("weight_decay", decay), ("scale_lr", scale_lr)):
            if rate is not None:
                check_rate(name, rate)
        check_flag("match", match)
        check_callable("filter_fn", filter_fn, "filter_fn(module, name)")
        check_options(base, base_options, inspect.signature(GeometricOptimizer).parameters)

        model = unwrap(model)
        self._units, self._plain = find_units(
            model, filter_fn, example_inputs, scale, split, stacks
        )
        params = dict(model.named_parameters())
        for unit in self._units:
            check_sharding(unit, params[unit.name])
        self._base = Recipe("base", base, lr, base_options, find_device(model))
        self._rest = choose_rest(self._base, rest, lr, base_options, model)
        self._guesses_scale = scale == "auto"
        self._undecayed = undecayed_names(model)
        self._size = sum(p.numel() for p in params.values())
        self._has_warned = False
        self._highest_share = 0.0  # of the rates that the angles are for
        self._built: _Built | None = None

        # Plain values alone, which any loader of states takes.
        unit_options = {
            **self._base.defaults,
            "lr": lr,
            "role": "units",
            "base": self._base.name,
            "coordinates": coordinates,
            "match": match,
            "turn": turn,
            "max_turn": max_turn,
            "start_lr": float(lr),
        }
        _check_angles(unit_options)
        if turn is not None:
            self._question_rates(turn, float(lr))
            self._question_layers(params, split, stacks)
        self._rest_options = self._make_rest_options(lr, decay, scale_lr, scale_decay)
        unit_names = {unit.name for unit in self._units}
        divided = divide_groups(model, groups, unit_names, unit_options, self._rest_options)
        super().__init__(divided, {})
        # OneCycleLR asks here whether there are betas in all groups.
        self.defaults = dict(self._base.defaults)
        if "betas" not in self._rest.defaults:
            self.defaults.pop("betas", None)

    def _question_layers(
        self, params: Mapping[str, Any], split: Split | None, stacks: Stacks | None
    ) -> None:
        """Warn of layers that would not turn by the angle; arguments say that they are meant."""
        trained = {name for name, p in params.items() if p.requires_grad}
        if split is None:
            tell_of_packed([unit for unit in self._units if unit.name in trained])
        if stacks is None:
            maybe = [name for name, why in self._plain.items() if why == MAYBE_EXPERTS]
            tell_of_stacks([name for name in maybe if name in trained])
        if not any(unit.name in trained for unit in self._units):
            warn_user("turn is given, but all layers with units are frozen: nothing turns.")

    def _question_rates(self, turn: float, lr: float) -> None:
        """Warn of a rate in the place of an angle, and of an angle in the place of a rate."""
        if turn < LEAST_TURN:
            warn_user(
                f"turn={turn} is an angle in degrees, and a small one: 2.4 is a usual start, and "
                "0.6 for transformers in 8,000 steps. The rate of everything else is lr."
            )
        if lr >= LARGEST_RATE and "betas" in self._rest.defaults:
            warn_user(
                f"lr={lr:g} is the rate at which {self._rest.name} steps all that is not a "
                f"direction; it is far too large. The angle is turn={turn:g}."
            )

    def _make_rest_options(
        self,
        lr: float | Tensor,
        decay: float | None,
        scale_lr: float | None,
        scale_decay: float,
    ) -> dict[str, Any]:
        """Return the options of the rest's groups; its own rates are ratios to `lr`."""
        recipe = self._rest
        rate = recipe.named.get("lr", lr)
        if decay is None:
            decay = self._base.named.get("weight_decay", 0.0)
        decay = recipe.named.get("weight_decay", decay)
        if decay and "weight_decay" not in recipe.defaults:
            raise ValueError(f"weight_decay was given, but {recipe.name} has no such option.")
        return {
            **recipe.defaults,
            "lr": lr,
            "weight_decay": decay,
            "role": "rest",
            "rest": recipe.name,
            "lr_ratio": _find_ratio(rate, lr),
            "scale_ratio": _find_ratio(rate if scale_lr is None else scale_lr, lr),
            "scale_decay": scale_decay,
        }

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters; those that come after construction are part of the rest.

        They step at the group's own `lr` if it names one, else at the rest's rate.
        """
        if not isinstance(param_group, dict) or "params" not in param_group:
            raise ValueError(f"a group is a dict with 'params'; got {param_group!r}.")
        is_new = "role" not in param_group  # it does not come from the constructor
        group = self._complete(param_group) if is_new else dict(param_group)
        check_rate("a group's lr", group["lr"])
        check_rate("a group's weight_decay", group.get("weight_decay", 0.0))
        _check_angles(group)
        for key in ("lr", "turn", "max_turn", "weight_decay", "scale_decay"):
            if isinstance(group.get(key), Real):  # numpy's numbers would need pickle in a file
                group[key] = float(group[key])
        if isinstance(group["lr"], Tensor):
            group["lr"] = group["lr"].clone()  # groups must not share the tensor
        super().add_param_group(group)
        self._built = None

    def _complete(self, group: dict[str, Any]) -> dict[str, Any]:
        """Return a group that is added after construction with all options, as one of the rest."""
        params = list_params(group["params"])
        if not params or not all(isinstance(p, Tensor) for p in params):
            raise ValueError(f"a group's 'params' are parameters; got {params}.")
        if group.get("turn") is not None or group.get("max_turn") is not None:
            raise ValueError(
                "a group that is added later is part of the rest and has no units to turn: "
                "give it to the constructor, in groups=."
            )
        first = len(self._list_params())
        names = [f"added.{first + i}" for i in range(len(params))]
        options = mix_rest_options(self._rest_options, group)
        return {**options, "params": params, "param_names": names}

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "turn":
            raise AttributeError(
                "optimizer.turn() reads the angles; to change one, set the 'turn' of a group in "
                "optimizer.param_groups."
            )
        super().__setattr__(name, value)

    def turn(self) -> list[float]:
        """Return the angle of the next step for each unit group, in degrees.

        It is nominal: the root mean square over a layer whose gradient is not zero, before
        `max_turn`. A tracker measures what units really do. Without `turn` the list is empty.
        """
        return [float(_find_degrees(group)) for group in self.param_groups if _turns(group)]

    @_disable_dynamo
    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take one step; parameters without a gradient are left as they are."""
        loss = None if closure is None else torch.enable_grad()(closure)()
        with torch._C._DisableAutocast():
            self._step()
        return loss

    def _step(self) -> None:
        self._check_rates()
        built = self._prepare()
        try:
            for block in built.blocks:
                block.read()  # w = r u, b = r lam: from dL/dw and dL/db to dL/du, dL/dr, dL/dlam
            for inner in built.inner:
                inner.step(self.param_groups)  # the base steps u; the rest r, lam and all others
            for block in built.blocks:
                block.compute(*_find_angles(self.param_groups[block.group]))  # the new w and b
            for block in built.blocks:
                block.write()
        finally:
            for block in built.blocks:
                block.release()

    def _check_rates(self) -> None:
        """Refuse angles that no unit can turn by; warn once of far larger or smaller ones."""
        questions = [_check_angles(group) for group in self.param_groups]
        questions.append(self._ask_about_peak())
        question = next(filter(None, questions), "")
        if question and not self._has_warned:
            warn_user(question)
            self._has_warned = True

    def _ask_about_peak(self) -> str:
        """Return a question if rates fall before one came near the rate that `turn` is for."""
        shares = []
        for group in self.param_groups:
            if _turns(group) and not isinstance(group["lr"], Tensor):
                shares.append(group["lr"] / group["start_lr"])
        share, highest = max(shares, default=1.0), self._highest_share
        self._highest_share = max(share, highest)
        if not share < highest < 1 / 3:
            return ""
        return (
            f"the rate falls after a peak of {highest:.2g} times the lr for which `turn` is the "
            f"angle, so units turn by {highest:.2g} times `turn` at most. Build the optimizer "
            "with the schedule's peak as lr."
        )

    # ---- what is built at the first step, and again where parameters have changed since

    def _prepare(self) -> "_Built":
        """Return blocks and inner optimizers: those of the last step, if they still fit."""
        built, fingerprint = self._built, self._find_fingerprint()
        if built is not None and built.fingerprint == fingerprint and built.is_current():
            return built
        self._built = None
        self._fit_units()
        for i, _, p in self._list_params():
            group = self.param_groups[i]
            of_r = self.param_groups[i + 1] if group["role"] == "units" else group
            fit_state(self.state[p], p, counts_on_device(group), counts_on_device(of_r))
        blocks = self._build_blocks()
        inner = self._build_inner(blocks)
        self._built = _Built(blocks, inner, self._find_fingerprint())
        if not any(p.grad is not None for _, _, p in self._list_params()):
            warn_user(
                "no parameter of this optimizer has a gradient: was the model sharded, or its "
                "parameters replaced, after the optimizer was built?"
            )
        return self._built

    def _find_fingerprint(self) -> list[Any]:
        """Return what changes with a parameter, its memory, its state dict, or a lost gradient."""
        fingerprint = []
        for group in self.param_groups:
            for p in group["params"]:
                part = getattr(p, "_local_tensor", p)
                layout = part.data_ptr(), part.stride(), part.dtype
                fingerprint.append((id(p), layout, p.grad is None, id(self.state.get(p))))
        return fingerprint

    def _list_params(self) -> list[tuple[int, str, Any]]:
        """Return each parameter with its group's number and its name."""
        listed = []
        for i, group in enumerate(self.param_groups):
            if len(group["param_names"]) != len(group["params"]):
                raise ValueError("parameters were taken out of a group: freeze them instead.")
            for name, p in zip(group["param_names"], group["params"], strict=True):
                listed.append((i, name, p))
        return listed

    def _fit_units(self) -> None:
        """Take up the present sizes of weights."""
        shapes = {name: p.shape for _, name, p in self._list_params()}
        for i, unit in enumerate(self._units):
            shape = shapes.get(unit.name, unit.shape)
            if shape != unit.shape:
                self._units[i] = unit.fit(shape)

    def _build_blocks(self) -> list[Block]:
        """Put weights that have a gradient and are stepped alike into a block each."""
        places: dict[str | None, tuple[int, Any]] = {}
        for i, name, p in self._list_params():
            if p.grad is not None:
                places[name] = i, p

        alike = defaultdict[Any, list[Weight]](list)
        for unit in self._units:
            if unit.name not in places:
                continue
            group, param = places[unit.name]
            self._check_weight(unit, param)
            bias_group, bias = places.get(unit.bias, (0, None))
            weight = Weight(unit, param, bias, (group, bias_group), self.state)
            alike[Block.key(weight)].append(weight)

        blocks = []
        for weights in alike.values():
            first = weights[0]
            options = self.param_groups[first.group]
            is_angular = options["coordinates"] == "angles" and first.unit.fan_in > 1
            kind = AngularBlock if is_angular else Block
            blocks.append(kind(weights, match=options["match"]))
        return blocks

    def _check_weight(self, unit: Unit, param: Any) -> None:
        if param.is_meta:
            raise ValueError(
                f"{unit.name!r} is on the meta device and has no values: materialise the model, "
                "and build the optimizer after that."
            )
        if hasattr(param, "placements"):
            check_sharding(unit, param)
        if "r" in self.state[param]:
            saved_states.check_size(unit, self.state[param])

    def _build_inner(self, blocks: Sequence[Block]) -> list[InnerOptimizer]:
        """Give directions to the base; r, lam and every other parameter to the rest."""
        variables = [variable for block in blocks for variable in block.variables]
        weights = [weight for block in blocks for weight in block.weights]
        in_blocks = {id(p) for weight in weights for p in (weight.param, weight.bias)}
        for i, name, p in self._list_params():
            if self.param_groups[i]["role"] == "rest" and id(p) not in in_blocks:
                # A bias without its weight's gradient has a state for that beside lam's.
                prefix = "plain" if any("/" in key for key in self.state[p]) else ""
                decays = p.ndim > 1 and name not in self._undecayed
                variables.append(Variable(prefix, p, self.state[p], i, decays=decays))

        directions = [variable for variable in variables if variable.name == "direction"]
        others = [variable for variable in variables if variable.name != "direction"]
        pairs = (self._base, directions), (self._rest, others)
        return [InnerOptimizer(recipe, members) for recipe, members in pairs if members]

    # ---- states

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state of the same model and settings.

        Parameters are known by their names, in any order. The saved `turn`, its rate and
        `max_turn` count, whatever this optimizer was built with.
        """
        saved_states.check_form(state_dict)
        self._fit_units()
        states = saved_states.find_states(self.param_groups, state_dict, self._units)
        if not self._guesses_scale:
            saved_states.check_scales(self._units, states)

        groups = []
        for saved, mine in zip(state_dict["param_groups"], self.param_groups, strict=True):
            saved_states.tell_of_other_angle(mine, saved)
            # Fused kernels were chosen for this model's device, which may be another now.
            kept = {key: mine[key] for key in ("param_names", "fused") if key in mine}
            groups.append({**mine, **saved, **kept})
        super().load_state_dict({"state": {}, "param_groups": groups})
        self._built = None
        self._highest_share = 1.0  # the run's peak is not known

        for _, name, p in self._list_params():
            for key, entry in states[name].items():
                self.state[p][key] = entry.clone() if isinstance(entry, Tensor) else entry
        if self._guesses_scale:  # the model's mode may be another now
            for i, unit in enumerate(self._units):
                is_fixed = states.get(unit.name, {}).get("is_fixed", unit.is_fixed)
                self._units[i] = replace(unit, is_fixed=bool(is_fixed))

    def __getstate__(self) -> dict[str, Any]:
        """Return all but what the next step builds: copies and pickles go on bit for bit."""
        kept = {**self.__dict__, "_built": None}
        kept.pop("step", None)  # a scheduler's wrapper
        return {key: value for key, value in kept.items() if not key.endswith("_hooks")}

    def __repr__(self) -> str:
        trained = {name for _, name, p in self._list_params() if p.requires_grad}
        count = sum(unit.rows * unit.fan_in for unit in self._units if unit.name in trained)
        known = {"units": self._base.defaults, "rest": self._rest.defaults}
        lines = [
            f"GeometricOptimizer: {count:,} of {self._size:,} parameters are units",
            *list_groups(self.param_groups, self._units, trained, known),
            *list_weights(self._units, self._plain, trained),
        ]
        return "\n".join(lines)


def _turns(group: Mapping[str, Any]) -> bool:
    """Return whether a group's units turn by an angle; a loop may write 'turn' to all groups."""
    return group["role"] == "units" and group["turn"] is not None


def _find_degrees(group: Mapping[str, Any]) -> Any:
    return group["turn"] * group["lr"] / group["start_lr"]


@dataclass
class _Built:
    """What a step works with, built from parameters and states."""

    blocks: list[Block]
    inner: list[InnerOptimizer]
    fingerprint: list[Any]

    def __post_init__(self) -> None:
        self.entries = [entry for block in self.blocks for entry in block.list_entries()]

    def is_current(self) -> bool:
        """Return whether states still hold what a step works with, and not copies of it."""
        are_kept = [state.get(key) is value for state, key, value in self.entries]
        return all(are_kept) and all([inner.is_current() for inner in self.inner])


def _check_angles(group: Mapping[str, Any]) -> str:
    """Raise where units cannot turn so; return a question where an angle looks too large."""
    if group["role"] != "units":
        return ""
    turn, max_turn = group["turn"], group["max_turn"]
    _check_angle("turn", turn, most=90)
    _check_angle("max_turn", max_turn, most=180)
    if turn is None:
        return ""
    if group["coordinates"] == "angles":
        raise ValueError(
            "turn needs coordinates='intrinsic': a step along latitudes is no arc of a circle. "
            "max_turn bounds the turn of angles."
        )
    if max_turn is not None and max_turn < turn:
        raise ValueError(
            f"max_turn, {max_turn}, is below turn, {turn}: no unit could turn so far."
        )
    if not group["start_lr"]:
        raise ValueError("lr is above 0 with turn, whose angle is for this rate; got 0.")
    return _question_peak(group)


def _check_angle(name: str, degrees: Any, most: float) -> None:
    """Raise unless it is None or an angle up to the largest."""
    is_number = isinstance(degrees, Real) and not isinstance(degrees, bool)
    if degrees is not None and not (is_number and 0 < degrees <= most):
        raise ValueError(
            f"{name} is an angle in degrees, above 0 and at most {most}; got {degrees!r}."
        )


def _question_peak(group: Mapping[str, Any]) -> str:
    """Raise where a rate turns units by over 90 degrees; return a question above 4 times `turn`.

    The rate is the present one, or OneCycleLR's peak. A rate in a tensor is not checked: that
    would wait for the GPU.
    """
    turn, lr, start_lr = group["turn"], group["lr"], group["start_lr"]
    if isinstance(lr, Tensor):
        return ""
    peak = group.get("max_lr", 0.0)  # as OneCycleLR notes it
    rate = max(lr, peak)
    angle = turn * (rate / start_lr)
    is_far = rate > 4 * start_lr
    words = (
        f"a rate of {rate:g} turns units by {angle:g} degrees: turn={turn:g} is for "
        f"lr={start_lr:g}. "
    )
    if is_far and math.isclose(peak, turn):
        raise ValueError(
            f"{words}Every group's lr is a rate: with OneCycleLR write max_lr={start_lr:g} "
            "for all groups, not max_lr=[turn, lr]."
        )
    words += (
        f"If {rate:g} is the schedule's peak, build the optimizer with lr={rate:g}; to look for a "
        "good angle, vary turn."
    )
    if angle > 90 * (1 + 1e-9):  # rounding aside
        most = start_lr * 90 / turn
        raise ValueError(f"{words} A search over rates must end at {most:g}, at 90 degrees.")
    return words if is_far else ""


def _find_angles(group: Mapping[str, Any]) -> tuple[Any, Any]:
    """Return by how many radians a group's layers turn, and single units at most, or None."""
    angle: Any = None
    max_angle: Any = None
    if group["turn"] is not None:
        angle = math.radians(1) * _find_degrees(group)
        max_angle = 4 * angle
        if isinstance(angle, Tensor):
            max_angle = max_angle.clamp(max=math.pi / 2)
        else:
            max_angle = min(max_angle, math.pi / 2)
    if group["max_turn"] is not None:
        max_angle = math.radians(group["max_turn"])
    return angle, max_angle


def _find_ratio(rate: Any, lr: Any) -> float:
    """Return a rate as a multiple of `lr`: setting one number for all groups keeps it."""
    if rate is lr:
        return 1.0
    if not lr:
        raise ValueError("lr is above 0 where other rates are multiples of it; got 0.")
    return float(rate) / float(lr)
