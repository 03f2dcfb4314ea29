"""Wrong arguments: each is refused in a sentence, none passes, none ends in a bare error.

Tables of wrong values, option by option, over the public names. Every value is a case of its own.
"""

import functools
import math
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import tiny_images
import torch
from safetensors.torch import save_file
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import geoparam as gp
from geoparam_lab import cli, experiments
from geoparam_lab.cli.options import list_options
from geoparam_lab.experiments import toys

INF, NAN = math.inf, math.nan
MIN_WORDS = 4  # fewer are no sentence
X = torch.randn(6, 4, generator=torch.Generator().manual_seed(0))
NOT_A_MODEL = (None, "model", 3, [nn.Linear(4, 4)], nn.Linear, X, {"0.weight": X}, object())
NOT_A_COUNT = (None, "4", 2.5, NAN, INF, -1, 0, [4], X)
NOT_A_FLAG = (None, "yes", "", 2, 0.5, [])
NOT_A_CHOICE = ("", "Angles", "angels", 3, ("angles",), ["angles"])
NOT_A_SHARE = ("0.1", 0, -0.1, 1.5, NAN, INF, [0.1])
NOT_A_RATE = ("0.1", -0.1, NAN, INF, -INF, [0.1], {}, torch.ones(2), 1j)
NOT_CALLABLE = ("layer1", 3, ["0"], {"0": True})


class Case(NamedTuple):
    """A call that must be refused, under a name that says which."""

    name: str
    call: Callable[[], Any]


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 6), nn.ReLU(), nn.Linear(6, 2))


def normalised() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(4, 8),
        nn.BatchNorm1d(8),
        nn.ReLU(),
        nn.Linear(8, 6),
        nn.BatchNorm1d(6),
        nn.ReLU(),
        nn.Linear(6, 2),
    )


def converted() -> nn.Module:
    return gp.convert_(network())


def describe(value: Any) -> str:
    """Return a short name of a wrong value."""
    if isinstance(value, torch.Tensor):
        return f"tensor{tuple(value.shape)}"
    if isinstance(value, (int, float, complex, str, list, tuple, dict)):
        return repr(value)[:40]
    return type(value).__name__


def vary(
    label: str, function: Callable[..., Any], options: Mapping[str, Any], **fixed: Any
) -> Iterator[Case]:
    """Yield a case for each wrong value of each option."""
    for option, values in options.items():
        for value in values:
            call = functools.partial(function, **{**fixed, option: value})
            yield Case(f"{label}({option}={describe(value)})", call)


def layer_cases() -> Iterator[Case]:
    options = {
        "bias": NOT_A_FLAG,
        "activation": ("relu", 3, [torch.relu], nn.ReLU),
        "init": ("Sphere", "xavier", 3, True, ["glorot"]),
        "coordinates": (None, *NOT_A_CHOICE),
        "natural": NOT_A_FLAG,
        "input_norm": (None, "imn", 3, "Border", []),
        "device": ("gpu7", 3.5, []),
        "dtype": (torch.int32, "float32", torch.bool, 32),
    }
    yield from vary("GmPLinear", gp.GmPLinear, options, in_features=4, out_features=3)
    sizes = {"in_features": NOT_A_COUNT, "out_features": NOT_A_COUNT}
    yield from vary("GmPLinear", gp.GmPLinear, sizes, in_features=4, out_features=3)
    momenta = {"momentum": NOT_A_SHARE}
    linear = functools.partial(gp.GmPLinear, 4, 3, input_norm=True)
    yield from vary("GmPLinear", linear, momenta)
    intrinsic = functools.partial(gp.GmPLinear, 4, 3, coordinates="intrinsic")
    yield from vary("GmPLinear", intrinsic, {"natural": (True,)})

    conv_sizes = {
        "in_channels": NOT_A_COUNT,
        "out_channels": NOT_A_COUNT,
        "kernel_size": (None, "3", 0, -3, 2.5, (), (3, 3, 3, 3), NAN),
        "stride": ("1", 0, -1, 1.5, (1, 1, 1, 1)),
        "padding": ("most", -1, 1.5, (1, 1, 1, 1)),
        "dilation": (0, -1, "1", 1.5),
        "groups": (0, -1, 3, "2", None, 1.5),
        "padding_mode": ("none", 3, None),
        "coordinates": NOT_A_CHOICE,
        "input_norm": ("imn", 3),
    }
    for kind in (gp.GmPConv1d, gp.GmPConv2d, gp.GmPConv3d):
        sizes = {"in_channels": 4, "out_channels": 4, "kernel_size": 3}
        yield from vary(kind.__name__, kind, conv_sizes, **sizes)

    broken, infinite = nn.Linear(4, 3), nn.Linear(4, 3)
    nn.init.constant_(broken.weight, NAN)
    nn.init.constant_(infinite.weight, INF)
    sources = (*NOT_A_MODEL, nn.Conv2d(2, 3, 3), nn.LazyLinear(3), broken, infinite)
    yield from vary("from_linear", gp.GmPLinear.from_linear, {"linear": sources})
    sources = (*NOT_A_MODEL, nn.Linear(2, 3), nn.Conv1d(2, 3, 3), nn.ConvTranspose2d(2, 3, 3))
    yield from vary("from_conv", gp.GmPConv2d.from_conv, {"conv": sources})
    options = {"coordinates": (None, *NOT_A_CHOICE), "natural": NOT_A_FLAG}
    yield from vary("from_linear", gp.GmPLinear.from_linear, options, linear=nn.Linear(4, 3))

    for value in (None, "weight", X, torch.ones(3, 5), torch.full((3, 4), NAN)):
        layer = gp.GmPLinear(4, 3)
        assign = functools.partial(setattr, layer, "weight", value)
        yield Case(f"weight = {describe(value)}", assign)
    outside = gp.GmPLinear(4, 3, activation=torch.relu)
    yield Case("to_linear with an activation", outside.to_linear)


def norm_cases() -> Iterator[Case]:
    options = {
        "momentum": NOT_A_SHARE,
        "dim": (None, "1", 1.5),
        "dtype": (torch.int32, "float32"),
    }
    for kind in (gp.InputMeanNorm, gp.MeanOnlyBatchNorm):
        yield from vary(kind.__name__, kind, {"num_features": NOT_A_COUNT})
        yield from vary(kind.__name__, kind, options, num_features=4)
        for x in (torch.randn(6, 3), torch.randn(1, 4), torch.tensor(1.0)):
            yield Case(f"{kind.__name__}(4)({describe(x)})", functools.partial(kind(4), x))
    yield from vary(
        "MeanOnlyBatchNorm", gp.MeanOnlyBatchNorm, {"bias": NOT_A_FLAG}, num_features=4
    )


def conversion_cases() -> Iterator[Case]:
    choices = {
        "filter_fn": NOT_CALLABLE,
        "coordinates": NOT_A_CHOICE,
        "natural": NOT_A_FLAG,
        "init": ("Sphere", "xavier", 3, True),
        "norm": ("IMN", "batch", 3, True),
        "weights": ("Plain", None, 3),
        "example_inputs": (
            3,
            "x",
            X.numpy(),
            DataLoader(TensorDataset(X)),
            iter([X]),
            X[:, :3],
            (X, X),
            [],
            {"y": X},
            {},
        ),
    }
    for model in NOT_A_MODEL:
        name = describe(model)
        for function in (gp.convert_, gp.fold_, gp.plan, gp.retract, gp.synchronise_means_):
            yield Case(f"{function.__name__}({name})", functools.partial(function, model))
        yield Case(f"verify({name}, model)", functools.partial(gp.verify, model, network(), X))
        yield Case(f"verify(model, {name})", functools.partial(gp.verify, network(), model, X))
        yield Case(f"recalibrate_({name})", functools.partial(gp.recalibrate_, model, [X]))

    yield from vary("convert_", convert_network, choices)
    of_plan = ("filter_fn", "init", "norm", "weights", "example_inputs")
    yield from vary("plan", plan_network, {option: choices[option] for option in of_plan})
    removals = {
        "momentum": NOT_A_SHARE,
        "pretrained": NOT_A_FLAG,
        "calibration": (3, "x", [], X[:, :3], X.numpy(), iter([])),
        "coordinates": NOT_A_CHOICE,
        "weights": ("Plain", None),
    }
    yield from vary("convert_ by imn", convert_normalised, removals, example_inputs=(X,))
    yield Case("norm='imn' without inputs", convert_normalised)
    yield Case("weights='plain' without norm", lambda: gp.convert_(network(), weights="plain"))
    yield Case("filter_fn that takes nothing", lambda: gp.convert_(network(), lambda m, n: False))
    yield Case("a model without layers", lambda: gp.convert_(nn.Sequential(nn.ReLU())))
    yield Case("a model converted twice", lambda: gp.convert_(converted()))
    yield Case("a lazy model", lambda: gp.convert_(nn.Sequential(nn.LazyLinear(3), nn.ReLU())))

    yield Case("fold_ of a plain model", lambda: gp.fold_(network()))
    foldings = {
        "example_inputs": (3, "x", X.numpy(), X[:, :3], (X, X), []),
        "restore_norm": ("yes", 2, []),
    }
    yield from vary("fold_", fold_converted, foldings)

    wrong_arguments = (
        (),
        (X[:, :3],),
        (X, X),
        ("x",),
        (None,),
        ({"y": X},),
        (X.numpy(),),
        (3,),
        (DataLoader(TensorDataset(X)),),
    )
    for arguments in wrong_arguments:
        call = functools.partial(gp.verify, network(), network(), *arguments)
        yield Case(f"verify(*{describe(arguments)[:30]}, {len(arguments)})", call)
    yield Case("verify with inputs first", lambda: gp.verify(X, network(), network()))
    other = nn.Sequential(nn.Linear(4, 3))
    yield Case("verify of other shapes", lambda: gp.verify(network(), other, X))


def convert_network(**options: Any) -> nn.Module:
    return gp.convert_(network(), **options)


def plan_network(**options: Any) -> Any:
    return gp.plan(network(), **options)


def convert_normalised(**options: Any) -> nn.Module:
    return gp.convert_(normalised(), norm="imn", **options)


def fold_converted(**options: Any) -> nn.Module:
    return gp.fold_(converted(), **options)


def state_cases() -> Iterator[Case]:
    state = dict(converted().state_dict())
    states = {
        "None": None,
        "a list": [X],
        "a string": "file.safetensors",
        "a model": converted(),
        "empty": {},
        "plain": dict(network().state_dict()),
        "numpy": {k: v.numpy() for k, v in state.items()},
        "integer keys": dict(enumerate(state.values())),
        "no r": {k: v for k, v in state.items() if not k.endswith("0.r")},
        "no latitude": {k: v for k, v in state.items() if not k.endswith("0.latitude")},
        "NaN": {**state, "0.latitude": torch.full_like(state["0.latitude"], NAN)},
        "infinite r": {**state, "0.r": torch.full_like(state["0.r"], INF)},
        "a short r": {**state, "0.r": state["0.r"][:3]},
        "a short lam": {**state, "0.lam": state["0.lam"][:3]},
        "a matrix r": {**state, "0.r": X},
        "a vector latitude": {**state, "0.latitude": X[0]},
        "a latitude of integers": {**state, "0.latitude": state["0.latitude"].long()},
        "None in it": {**state, "0.r": None},
    }
    for name, value in states.items():
        yield Case(f"fold_state_dict({name})", functools.partial(gp.fold_state_dict, value))
    plain = dict(network().state_dict())
    likes = {
        "a list": [X],
        "a string": "x",
        "a model": network(),
        "other keys": {"a": X},
        "other shapes": {**plain, "0.weight": torch.ones(3, 3)},
        "one key less": {k: v for k, v in plain.items() if k != "0.bias"},
        "one key more": {**plain, "9.weight": X},
    }
    for name, value in likes.items():
        yield Case(f"like={name}", functools.partial(gp.fold_state_dict, state, like=value))


def group_cases() -> Iterator[Case]:
    options = {
        "model": NOT_A_MODEL,
        "lr": (None, *NOT_A_RATE),
        "weight_decay": (None, *NOT_A_RATE),
        "angle_lr": ("fan-in", *NOT_A_RATE),
        "match": ("Plain", "adam", 3, []),
        "kind": (None, "Adam", 3, torch.optim.SGD),
    }
    yield from vary("param_groups", gp.param_groups, options, model=converted(), lr=0.1)


def recalibration_cases() -> Iterator[Case]:
    model = gp.convert_(normalised(), norm="imn", example_inputs=(X,), init="glorot")
    batches = (None, 3, "x", [], iter([]), [3], ["x"], [X[:, :3]], [X.numpy()], [{"y": X}], [None])
    yield from vary("recalibrate_", gp.recalibrate_, {"batches": batches}, model=model)
    nothing = functools.partial(gp.recalibrate_, network(), [X])
    yield Case("recalibrate_ without norms", nothing)
    yield Case("synchronise_means_ without norms", lambda: gp.synchronise_means_(network()))


def optimizer_cases() -> Iterator[Case]:
    def build(**options: Any) -> gp.GeometricOptimizer:
        options = {"model": network(), "base": torch.optim.SGD, "lr": 0.1, **options}
        return gp.GeometricOptimizer(**options)

    parameter = nn.Parameter(torch.ones(2, 2))
    options = {
        "model": (*NOT_A_MODEL, network().parameters(), nn.Sequential(nn.ReLU()), converted()),
        "base": (
            None,
            "SGD",
            3,
            torch.optim.LBFGS,
            nn.Linear,
            torch.optim.SGD([parameter], 0.1),
            network,
            torch.optim.SparseAdam,
        ),
        "lr": (None, *NOT_A_RATE),
        "coordinates": (None, *NOT_A_CHOICE),
        "turn": ("2.4", 0, -1, NAN, INF, 200, [2.4], True, 1j),
        "max_turn": ("5", 0, -1, NAN, INF, 200, [5], 1j),
        "match": NOT_A_FLAG,
        "scale": (None, "Free", 3, ["free"], True),
        "scale_lr": NOT_A_RATE,
        "scale_decay": (None, *NOT_A_RATE),
        "weight_decay": NOT_A_RATE,
        "momentum": ("0.9", -1, NAN, [0.9]),
        "rest": ("AdamW", 3, torch.optim.Muon, nn.Linear, torch.optim.LBFGS),
        "groups": (
            [],
            "params",
            3,
            [3],
            [{}],
            [{"params": [3]}],
            [{"params": [parameter]}],
            [parameter],
            network(),
            {"params": []},
        ),
        "filter_fn": (*NOT_CALLABLE, lambda module, name: False),
        "example_inputs": (3, "x", X.numpy(), X[:, :3], (X, X), {"y": X}, iter([X])),
        "split": (
            "qkv",
            3,
            ["qkv"],
            {"qkv": 3},
            {"0": 3},
            {"0": 0},
            {"0": -1},
            {"0": "2"},
            {"0": 2.5},
            {"0": (3, 4)},
            {"0": ()},
            {"0": (0, 8)},
            {"0": None},
            {0: 2},
        ),
        "stacks": (
            "eoi",
            3,
            ["w1"],
            {"w1": "eoi"},
            {"0": "eoi"},
            {"0.weight": "eoi"},
            {"0.weight": 3},
            {0: "eoi"},
        ),
        "trun": (2.4,),
        "learning_rate": (0.1,),
        "betas": ((0.9, 0.99),),
        "nesterov": (True,),
    }
    yield from vary("GeometricOptimizer", build, options)
    adam = {"betas": (3, (2, 2), (0.9,), "x"), "eps": (-1, "x"), "momentum": (0.9,)}
    yield from vary("Adam", functools.partial(build, base=torch.optim.Adam), adam)
    muon = {
        "momentum": (-1, "x", NAN),
        "ns_steps": (0, -1, "x", 2.5),
        "ns_coefficients": (3, (1, 2), "x"),
        "eps": ("x",),
        "nesterov": ("x",),
        "adjust_lr_fn": ("x", 3),
        "lr": (0, -1),
        "betas": ((0.9, 0.9),),
    }
    yield from vary("Muon", functools.partial(build, base=torch.optim.Muon, turn=2.0), muon)
    partials = {
        "base": (
            functools.partial(torch.optim.SGD, lr=0.2),
            functools.partial(torch.optim.SGD, momentm=0.2),
        ),
        "rest": (
            functools.partial(torch.optim.SGD, momentm=0.2),
            functools.partial(torch.optim.SGD, lr=-1),
            functools.partial(torch.optim.SGD, lr="x"),
        ),
    }
    yield from vary("partial", build, partials)
    model = network()
    wrong_groups = (
        {"turn": "2"},
        {"turn": -1},
        {"turn": NAN},
        {"lr": -1},
        {"lr": "x"},
        {"lr": NAN},
    )
    for group in wrong_groups:
        groups = [{"params": list(model.parameters()), **group}]
        call = functools.partial(build, model=model, groups=groups, turn=2.0)
        yield Case(f"a group with {group}", call)
    other_network = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))
    states = {
        "None": None,
        "a list": [],
        "empty": {},
        "torch's": torch.optim.SGD(network().parameters(), 0.1).state_dict(),
        "another's": build(base=torch.optim.Adam).state_dict(),
        "with turn": build(turn=2.0).state_dict(),
        "angles": build(coordinates="angles").state_dict(),
        "of another model": build(model=other_network).state_dict(),
        "of no groups": {"state": {}, "param_groups": []},
        "of no mappings": {"state": 3, "param_groups": 4},
    }
    for name, state in states.items():
        yield Case(f"load_state_dict({name})", functools.partial(build().load_state_dict, state))
    for group in (None, 3, {}, {"params": [3]}, {"params": "x"}, {"params": []}):
        yield Case(f"add_param_group({group})", functools.partial(build().add_param_group, group))


def tracker_cases() -> Iterator[Case]:
    options = {
        "model": (
            *NOT_A_MODEL,
            network().parameters(),
            nn.Sequential(nn.ReLU()),
            nn.Linear(4, 3, device="meta"),
            nn.Sequential(nn.LazyLinear(3)),
        ),
        "every": NOT_A_COUNT,
        "units": NOT_A_COUNT[1:],
        "layers": (3, "first", ["0", "first"], [], [3], lambda module, name: False),
        "probe": (
            3,
            "x",
            X.numpy(),
            [X.numpy()],
            DataLoader(TensorDataset(X)),
            iter([X]),
            X[:, :3],
            (X, X),
            {"y": X},
            [],
            {},
            X.long(),
            torch.randn(0, 4),
        ),
        "example_inputs": (3, "x", X.numpy(), DataLoader(TensorDataset(X)), X[:, :3], (X, X)),
        "keep": (None, "Full", "all", 3, ["full"]),
        "schedule": (3, "every", [1]),
        "statistics": (None, "Batch", "eval", 3),
        "quantities": (3, "rotations", ["Rotation"], ["dead", "alive"], [], [3], [None]),
        "file": (3, X, b""),
        "resume": NOT_A_FLAG,
        "log": (3, "tensorboard", object(), ["log.csv"], "log.txt"),
    }
    yield from vary("BoundaryTracker", gp.BoundaryTracker, options, model=network())
    by_batch = functools.partial(gp.BoundaryTracker, network(), statistics="batch")
    yield Case("statistics='batch' without a probe", by_batch)
    model = network()
    tracker = gp.BoundaryTracker(model, probe=X)
    tracker.step()
    history = tracker.history
    layer = history["0"]
    for quantity in ("rotation", "", "rotations", "Dead", 0, None):
        yield Case(f"history['0'][{quantity!r}]", functools.partial(layer.__getitem__, quantity))
        yield Case(f"history.table({quantity!r})", functools.partial(history.table, quantity))
        yield Case(f"history.plot({quantity!r})", functools.partial(history.plot, quantity))
        yield Case(f"history.heatmap({quantity!r})", functools.partial(history.heatmap, quantity))
    unseen = gp.BoundaryTracker(network())
    yield Case("history before the first batch", lambda: unseen.history)
    yield Case("step before the first batch", unseen.step)

    wide = gp.BoundaryTracker(nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 2)), probe=X)
    wide.step()
    states = {
        "None": None,
        "a list": [],
        "a string": "x",
        "empty": {},
        "a step of a string": {"step": "x"},
        "a negative step": {"step": -1},
        "no whole step": {"step": 2.5},
        "no step": {"step": None},
        "of another model": wide.state_dict(),
        "units of a string": {"step": 1, "units": "x"},
        "a damaged snapshot": {**tracker.state_dict(), "snapshot": 3},
        "an optimizer's": torch.optim.SGD(model.parameters(), 0.1).state_dict(),
    }
    for name, state in states.items():
        fresh = gp.BoundaryTracker(network(), probe=X)
        yield Case(f"tracker state: {name}", functools.partial(fresh.load_state_dict, state))


def watch_cases() -> Iterator[Case]:
    model = network()
    options = {
        "model": NOT_A_MODEL,
        "optimizer": (None, "SGD", 3, torch.optim.SGD, model, list(model.parameters())),
        "probe": (3, "x", X.numpy(), DataLoader(TensorDataset(X)), X[:, :3], (X, X)),
        "log": (3, "tensorboard", object(), ["log.csv"], nn.Linear(1, 1)),
        "quantities": (3, "rotations", ["Rotation"], [], [3]),
        "every": NOT_A_COUNT,
    }
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    yield from vary("watch", gp.watch, options, model=model, optimizer=optimizer)


@pytest.mark.parametrize("name", ["", "first", "0.weight", 0, None, "00"])
def test_a_misspelt_layer_of_a_history_is_a_key_error_that_names_the_layers(name: Any) -> None:
    tracker = gp.BoundaryTracker(network(), probe=X)

    with pytest.raises(KeyError, match="no layer .*; there are: 0, 2, 4"):
        tracker.history[name]


def damaged_file_cases(tmp_path: Path) -> Iterator[Case]:
    damaged = tmp_path / "damaged.npy"
    damaged.write_bytes(b"no array")
    resume = functools.partial(gp.BoundaryTracker, network(), probe=X, resume=True)
    yield Case("a damaged file", functools.partial(resume, file=damaged))
    yield Case("a folder as file", functools.partial(resume, file=tmp_path))


def find_faults(cases: Iterable[Case]) -> list[str]:
    """Return how cases ended otherwise than by a ValueError with a sentence."""
    faults = []
    for case in cases:
        try:
            case.call()
        except ValueError as error:
            if not is_sentence(str(error)):
                faults.append(f"{case.name}: {error!r} is no sentence")
        except Exception as error:
            faults.append(f"{case.name}: {error!r:.200}")
        else:
            faults.append(f"{case.name}: passes")
    return faults


def is_sentence(text: str) -> bool:
    return len(text.split()) >= MIN_WORDS


FAMILIES = (
    layer_cases,
    norm_cases,
    conversion_cases,
    state_cases,
    group_cases,
    recalibration_cases,
    optimizer_cases,
    tracker_cases,
    watch_cases,
)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.__name__)
def test_wrong_arguments_are_refused_in_a_sentence(family: Callable[[], Iterator[Case]]) -> None:
    assert find_faults(family()) == []


def test_wrong_files_of_a_tracker_are_refused_in_a_sentence(tmp_path: Path) -> None:
    assert find_faults(damaged_file_cases(tmp_path)) == []


def test_an_existing_file_of_a_tracker_is_not_overwritten(tmp_path: Path) -> None:
    existing = tmp_path / "existing.npy"
    existing.touch()

    with pytest.raises(FileExistsError, match="Go on with it by resume=True"):
        gp.BoundaryTracker(network(), probe=X, file=existing)


@pytest.mark.filterwarnings("ignore")
def test_there_are_enough_cases() -> None:
    counts = [len(list(family())) for family in FAMILIES]

    assert sum(counts) > 500


@pytest.mark.parametrize(
    "call",
    [
        lambda: gp.GmPLinear(4, 3, cordinates="angles"),
        lambda: gp.GmPConv2d(4, 3, 3, activations=torch.relu),
        lambda: gp.GmPLinear.from_linear(nn.Linear(4, 3), coordinate="angles"),
        lambda: gp.InputMeanNorm(4, eps=1e-5),
        lambda: gp.MeanOnlyBatchNorm(4, affine=False),
        lambda: gp.convert_(network(), inputs=X),
        lambda: gp.plan(network(), coordinates="angles"),
        lambda: gp.fold_(network(), restore=True),
        lambda: gp.verify(network(), network(), inputs=X),
        lambda: gp.fold_state_dict({}, shapes={}),
        lambda: gp.param_groups(network(), lr=0.1, decay=0.1),
        lambda: gp.recalibrate_(network()),
        lambda: gp.retract(),
        lambda: gp.BoundaryTracker(network(), probes=X),
        lambda: gp.watch(network()),
        lambda: gp.BoundaryTracker(network(), 1, None, X, "full", lambda step: True),
        lambda: gp.GeometricOptimizer(network(), torch.optim.SGD),
        lambda: gp.GeometricOptimizer(network(), torch.optim.SGD, 0.1),
    ],
)
def test_unknown_and_missing_arguments_are_pythons_own_type_error(call: Callable) -> None:
    with pytest.raises(TypeError, match=r"argument"):
        call()


def test_a_tracker_says_that_rows_of_a_layer_are_gone() -> None:
    model = network()
    tracker = gp.BoundaryTracker(model, probe=X)
    model[0].weight.data = torch.zeros(0, 4)
    model[0].bias.data = torch.zeros(0)
    model[2].weight.data = torch.zeros(6, 0)

    with pytest.raises(ValueError, match="0 had other sizes .* Build the tracker anew"):
        tracker.step()


# ---- the command line

WRONG_OPTIONS = {
    "methods": ("", "x", ",", "sp,x", "SP"),
    "seeds": ("", "x", "0", "-1", "1.5", "nan"),
    "lrs": ("", "x", ",", "0", "-1", "nan", "inf", "0.1;0.2"),
    "epochs": ("", "x", "0", "-1", "1.5"),
    "patience": ("", "x", "0", "-1"),
    "folds": ("", "x", "-1", "1", "1000000"),
    "jobs": ("", "x", "0", "-1"),
    "draws": ("", "x", "-1"),
    "source": ("", "x", "keel"),
    "protocol": ("", "x", "Paper"),
    "datasets": ("", "x", ","),
    "batch_size": ("", "x", "0", "-1"),
}
COMMANDS = (
    ("run",),
    ("run", "lévy"),
    ("run", "levy", "more"),
    ("run", "levy", "--no-such-option", "1"),
    ("run", "imagenet32"),
    ("run", "imagenet32", "--data", "missing"),
    ("run", "imagenet", "--data", "missing"),
    ("run", "text", "--data", "missing"),
    ("table",),
    ("table", "missing"),
    ("table", "."),
    ("table", "missing", "--out"),
    ("table", "missing", "--baseline"),
    ("report",),
    ("report", "missing"),
    ("report", "."),
    ("report", "missing", "--out"),
    ("fold",),
    ("fold", "missing.safetensors"),
    ("fold", "missing.safetensors", "b.safetensors"),
    ("fold", "missing.safetensors", "b.pt"),
    ("fold", "damaged.safetensors", "b.safetensors"),
    ("fold", "plain.safetensors", "b.safetensors"),
    ("fold", "plain.safetensors", "plain.safetensors"),
    ("fold", "gmp.safetensors", "gmp.safetensors", "--force"),
    ("fold", "gmp.safetensors", "plain.safetensors"),
    ("fold", "gmp.safetensors", "b.safetensors", "--like", "missing.safetensors"),
    ("fold", "gmp.safetensors", "b.safetensors", "--like", "damaged.safetensors"),
    ("fold", "gmp.safetensors", "b.safetensors", "--like"),
    ("fold", "a", "b", "c"),
    ("nothing",),
    ("--nothing",),
    ("bench", "nothing"),
    ("demo", "--seeds", "0"),
    ("demo", "--seeds", "x"),
    ("demo", "--epochs", "-1"),
    ("demo", "--jobs", "0"),
)


WRONG_IMAGE_OPTIONS = {
    "batch-sizes": ("", "x", "0", "-1", "1.5"),
    "lrs": ("", "x", "0", "-1", "nan"),
    "epochs": ("x", "0", "-1"),
    "size": ("x", "0", "-1"),
    "workers": ("x", "-1"),
    "track": ("x", "0"),
    "schedule": ("", "x"),
    "warmup": ("x", "-1", "1", "nan"),
    "optimizer": ("", "x"),
    "momentum": ("x", "-1", "1", "nan"),
    "weight-decay": ("x", "-1", "nan", "inf"),
    "scale-decay": ("x", "-1", "nan", "inf"),
    "dropout": ("x", "-1", "1", "nan"),
    "turn": ("x", "-1"),
    "label-smoothing": ("x", "-1", "1"),
    "accumulate": ("x", "0"),
    "precision": ("", "x"),
    "widths": ("", "x", "0", "4,-4"),
    "select": ("x", "-1", "1", "nan"),
    "recalibrate": ("x", "-1"),
    "time-to": ("x", "-1", "101", "nan"),
}


def image_commands() -> Iterator[tuple[str, ...]]:
    """Yield wrong options of an experiment on images that are there."""
    begin = ("run", "imagenet32", "--data", "images", "--methods", "gmp", "--out", "run/images")
    for option, values in WRONG_IMAGE_OPTIONS.items():
        for value in values:
            yield *begin, f"--{option}", value


def experiment_commands() -> Iterator[tuple[str, ...]]:
    """Yield each option of the small experiments without a value, and with wrong ones."""
    for name in ("levy", "banana", "perturbation", "uci"):
        options = list_options(experiments.find(name))
        for option, values in WRONG_OPTIONS.items():
            if option not in options:
                continue
            word = f"--{option.replace('_', '-')}"
            yield "run", name, word
            for value in values:
                yield "run", name, word, value, "--out", f"run/{name}-{option}-{value}"


@pytest.fixture
def workplace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with checkpoints, in which no training can begin."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("GEOPARAM_DATA", raising=False)
    monkeypatch.setattr(toys, "train", None)
    Path("damaged.safetensors").write_bytes(b"no tensors")
    tiny_images.write_npz(Path("images"), classes=2, train=4, val=2)
    save_file(network().state_dict(), "plain.safetensors")
    save_file(converted().state_dict(), "gmp.safetensors")
    return tmp_path


def run_command(
    words: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> tuple[Any, str]:
    """Return the exit status of a command, and all that it printed."""
    monkeypatch.setattr(sys, "argv", ["geoparam", *words])
    status: Any = None
    try:
        cli.main()
    except SystemExit as exit:
        status = exit.code
    except Exception as error:
        status = f"Traceback: {error!r}"

    output = "".join(capfd.readouterr())
    if isinstance(status, str):  # Python prints it when it exits
        output += status
    return status, output


def test_wrong_commands_end_in_a_line_and_no_traceback(
    workplace: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    faults = []
    for words in (*COMMANDS, *experiment_commands(), *image_commands()):
        status, output = run_command(words, monkeypatch, capfd)

        has_failed = bool(status)
        if not has_failed or "Traceback" in output or not is_sentence(output):
            faults.append((words, status, output))

    assert faults == []
    assert not (workplace / "run").exists()
