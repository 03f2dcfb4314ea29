"""The tracker's numbers are those of plain geometry, and training is as if it were not there."""

import copy
from collections.abc import Callable, Mapping
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from function_model import FunctionModel
from torch import Tensor, nn
from torch.utils.data import DataLoader
from tracked_networks import NETWORKS, TYPE, ZEROS, gmp, linear, network, record, train

from geoparam import BoundaryTracker
from geoparam.analysis import QUANTITIES, Interval, UnitQuantity, boundaries, snapshot


@pytest.mark.filterwarnings("ignore:the unit vectors of")
@pytest.mark.parametrize("name", NETWORKS)
def test_rotation_and_displacement_are_those_of_plain_geometry(name: str) -> None:
    """What they are at one moment is compared with the model's own forward in test_boundary."""
    model = network(name)
    tracker = BoundaryTracker(model, keep="full", example_inputs=ZEROS)
    seen = [boundaries(model, ZEROS)["0"]]

    def record_and_read() -> None:
        tracker.step()
        seen.append(boundaries(model, ZEROS)["0"])

    train(model, 6, record_and_read)
    history = tracker.history["0"]
    for number, (before, now) in enumerate(pairwise(seen)):
        cosine = (now.direction * before.direction).sum(dim=1).clamp(-1, 1)
        turn = cosine.acos().rad2deg()
        np.testing.assert_allclose(history["rotation"][number], turn, atol=2e-6)
        moves = (now.locations - before.locations).norm(dim=-1).amax(dim=0)
        np.testing.assert_allclose(history["displacement"][number], moves, rtol=1e-8, atol=1e-9)
        np.testing.assert_allclose(history["distance"][number], now.distance, rtol=1e-9)
    assert history["rotation"].max() > 0.1


def assert_summary(history: Mapping[str, np.ndarray], quantity: str, values: np.ndarray) -> None:
    np.testing.assert_allclose(history[f"{quantity}_max"], values.max(axis=1))
    np.testing.assert_allclose(history[f"{quantity}_median"], np.median(values, axis=1))
    np.testing.assert_allclose(history[f"{quantity}_p99"], np.percentile(values, 99, axis=1))


def test_the_summary_is_that_of_the_units() -> None:
    model = network("two breakpoints")
    tracker = BoundaryTracker(model, keep="full", probe=torch.randn(32, 3, dtype=TYPE))
    train(model, 4, tracker.step)
    first, last = tracker.history["0"], tracker.history["2"]
    assert_summary(first, "rotation", first["rotation"])
    assert_summary(first, "displacement", first["displacement"])
    assert_summary(first, "distance", np.abs(first["distance"]))
    assert_summary(last, "rotation", last["rotation"])
    np.testing.assert_allclose(first["scale_min"], first["scale"].min(axis=1))
    mean_square = np.square(first["rotation"]).mean(axis=1)
    np.testing.assert_allclose(first["rotation_rms"], np.sqrt(mean_square))
    np.testing.assert_array_equal(first["dead"], (first["active"] == 0).sum(axis=1))
    np.testing.assert_array_equal(first["always_on"], (first["active"] == 1).sum(axis=1))


@pytest.mark.filterwarnings("ignore:the unit vectors of")
@pytest.mark.parametrize("name", ["bn", "intrinsic", "imn", "learned breakpoints"])
@pytest.mark.parametrize("statistics", [None, "running", "batch"])
def test_training_is_bit_identical_with_and_without(name: str, statistics: str | None) -> None:
    alone = nn.Sequential(*network(name)[:-1], nn.Dropout(0.2), linear(8, 1))
    tracked = copy.deepcopy(alone)
    options: dict = {}
    if statistics is not None:
        options = {"probe": torch.randn(9, 3, dtype=TYPE), "statistics": statistics}
    tracker = BoundaryTracker(tracked, keep="full", **options)
    assert train(tracked, 8, tracker.step) == train(alone, 8)
    for key, value in alone.state_dict().items():
        assert torch.equal(value, tracked.state_dict()[key]), key
    assert all(module.training for module in tracked.modules())


@pytest.mark.parametrize("scale", [1e-25, 1e25])
def test_turns_of_very_short_and_long_rows_are_seen(scale: float) -> None:
    model = nn.Sequential(nn.Linear(2, 1), nn.ReLU(), nn.Linear(1, 1))
    model[0].weight.data = torch.tensor([[scale, 0.0]])
    tracker = BoundaryTracker(model, example_inputs=torch.zeros(1, 2))
    model[0].weight.data = torch.tensor([[scale, scale]])
    tracker.step()
    np.testing.assert_allclose(tracker.history["0"]["rotation_max"], 45, rtol=1e-5)


SHIFTS = {
    "sp": lambda model: model[0].bias,
    "bn": lambda model: model[1].bias,
    "gmp outside": lambda model: model[0].lam,
}


@pytest.mark.parametrize("name", SHIFTS)
def test_dead_units_are_those_that_no_probe_point_activates(name: str) -> None:
    model, probe = network(name), torch.randn(64, 3, dtype=TYPE)
    shift = SHIFTS[name](model).data
    shift[:2] -= 100
    shift[2:5] += 100
    if name == "gmp outside":
        model[0].r.data.abs_()  # so that what is active is positive
    history = record(model, probe=probe, keep="full")["0"]

    hidden = copy.deepcopy(model).eval()[:-1](probe)
    share = (hidden > 0).double().mean(dim=0).numpy()
    np.testing.assert_allclose(history["active"][0], share)
    assert history["dead"] == (share == 0).sum() >= 2
    assert history["always_on"] == (share == 1).sum() >= 3
    separated = np.median(np.minimum(share, 1 - share))
    np.testing.assert_allclose(history["separated_median"], separated)


MOVES = {
    "not moved": lambda z: z,
    "points in one row": lambda z: z.flatten(0, 1),
    "transposed": lambda z: z.transpose(1, 2),
    "as many positions": lambda z: z[:, :, :3].transpose(1, 2),
    "flat": lambda z: z.flatten(1),
    "in another order": lambda z: z[..., [1, 0, 3, 2]],
    "one unit, spread": lambda z: z[..., :1] + torch.zeros(4, dtype=TYPE),
}


@pytest.mark.parametrize("name", MOVES)
def test_dead_units_are_counted_where_no_view_moves_the_units(name: str) -> None:
    move = MOVES[name]
    model = FunctionModel(lambda m, x: torch.relu(move(m.fc(x))), fc=linear(5, 4))
    dead = record(model, probe=torch.randn(2, 3, 5, dtype=TYPE))["fc"]["dead"]
    assert np.isfinite(dead).all() == (name == "not moved")


def test_one_unit_is_not_counted_in_a_sum_with_many() -> None:
    members = {"one": linear(3, 1), "many": linear(3, 4)}
    model = FunctionModel(lambda m, x: torch.relu(m.one(x) + m.many(x)), **members)
    history = record(model, probe=torch.randn(5, 3, dtype=TYPE))
    dead = [history[name]["dead"].item() for name in members]
    assert np.isnan(dead).tolist() == [True, False]


def test_pattern_changes_are_those_of_the_signs() -> None:
    model, probe = network("sp"), torch.randn(40, 3, dtype=TYPE)
    signs = [model[0](probe) > 0]
    tracker = BoundaryTracker(model, probe=probe)

    def after() -> None:
        tracker.step()
        signs.append(model[0](probe) > 0)

    train(model, 5, after)
    changes = [now != before for before, now in pairwise(signs)]
    regions = [len(now.unique(dim=0)) for now in signs[1:]]
    for history in (tracker.history["0"], tracker.history.network):
        shares = [change.double().mean().item() for change in changes]
        np.testing.assert_allclose(history["pattern_change"], shares)
        assert history["points_changed"].tolist() == [c.any(dim=1).sum() for c in changes]
        assert history["regions"].tolist() == regions


@pytest.mark.parametrize("statistics", ["running", "batch"])
def test_batch_norm_is_read_by_running_or_by_the_probes_statistics(statistics: str) -> None:
    model, probe = network("bn"), torch.randn(40, 3, dtype=TYPE) + 1
    tracker = BoundaryTracker(model, probe=probe, statistics=statistics, keep="full")
    train(model, 2, tracker.step)
    history = tracker.history["0"]
    expected = boundaries(model, probe, statistics=statistics)["0"]
    np.testing.assert_allclose(history["distance"][-1], expected.distance, rtol=1e-9)
    np.testing.assert_allclose(history["scale"][-1], expected.scale, rtol=1e-9)
    other = boundaries(model, probe, statistics="batch" if statistics == "running" else "running")
    assert (expected.distance - other["0"].distance).abs().max() > 0.1


def test_a_unit_without_a_boundary_is_counted_and_left_out() -> None:
    model = network("bn")
    model[1].weight.data[[0, 5]] = 0
    tracker = BoundaryTracker(model, keep="full", probe=torch.randn(8, 3, dtype=TYPE))
    model[0].weight.data += 0.1
    tracker.step()
    history = tracker.history["0"]
    assert history["undefined"] == 2
    assert np.isnan(history["rotation"][0]).nonzero()[0].tolist() == [0, 5]
    assert np.isfinite(history["rotation_max"]) and history["rotation_max"] > 0
    np.testing.assert_allclose(history["rotation_median"], np.nanmedian(history["rotation"]))
    model[1].weight.data[[0, 5]] = 1.0
    tracker.step()
    assert tracker.history["0"]["undefined"][-1] == 0  # though they cannot have turned


def test_units_that_have_diverged_are_neither_dead_nor_in_the_median() -> None:
    model = network("bn")
    tracker = BoundaryTracker(model, probe=torch.randn(64, 3, dtype=TYPE), keep="full")
    model[0].weight.data[2] = torch.nan
    tracker.step()
    active = tracker.history["0"]["active"][0]
    assert np.isnan(active).nonzero()[0].tolist() == [2]
    separated = np.nanmedian(np.minimum(active, 1 - active))
    np.testing.assert_array_equal(tracker.history["0"]["separated_median"], separated)


FLIPS = {
    "gamma": ("bn", lambda model: model[1].weight),
    "row": ("bn", lambda model: model[0].weight),
    "r": ("gmp inside", lambda model: model[0].r),
}


@pytest.mark.parametrize(("name", "find"), FLIPS.values(), ids=FLIPS)
def test_a_sign_turns_the_active_side_around(name: str, find: Callable) -> None:
    model = network(name)
    tracker = BoundaryTracker(model, keep="full", example_inputs=ZEROS)
    find(model).data[2] *= -1
    tracker.step()
    expected = np.where(np.arange(8) == 2, 180.0, 0.0)
    np.testing.assert_allclose(tracker.history["0"]["rotation"][0], expected, atol=1e-6)


def test_a_unit_of_one_input_turns_around_with_its_sign() -> None:
    model = nn.Sequential(gmp(1, 4), nn.ReLU())
    tracker = BoundaryTracker(model, keep="full", example_inputs=torch.zeros(2, 1, dtype=TYPE))
    model[0].sign[1] *= -1
    tracker.step()
    assert tracker.history["0"]["rotation"].tolist() == [[0, 180, 0, 0]]


def test_a_smooth_activation_leaves_rotation_alone() -> None:
    model = nn.Sequential(linear(3, 8), nn.GELU(), linear(8, 1))
    tracker = BoundaryTracker(model, probe=torch.randn(5, 3, dtype=TYPE))
    train(model, 2, tracker.step)
    history = tracker.history["0"]
    assert (history["rotation_max"] > 0).all() and (history["scale_median"] > 0).all()
    for quantity in ("displacement_max", "distance_median", "dead", "pattern_change"):
        assert np.isnan(history[quantity]).all(), quantity


def residual() -> nn.Module:
    def forward(m: nn.Module, x: Tensor) -> Tensor:
        x = m.stem(x).relu_()
        return torch.relu(m.norm(m.conv(x)) + x)

    stem, conv = (nn.Conv2d(n, 4, 3, padding=1, dtype=TYPE) for n in (2, 4))
    return FunctionModel(forward, stem=stem, conv=conv, norm=nn.BatchNorm2d(4, dtype=TYPE))


def test_before_a_residual_sum_dead_is_counted_after_it_and_phi_is_the_layers_own() -> None:
    model, probe = residual(), torch.randn(6, 2, 5, 5, dtype=TYPE)
    with torch.no_grad():
        model.norm.bias[0] = -100  # dead by itself, and after the sum
        model.norm.bias[1] = -0.1
    history = record(model, probe=probe, keep="full")["conv"]
    share = (copy.deepcopy(model).eval()(probe) > 0).double().mean(dim=(0, 2, 3)).detach()
    np.testing.assert_allclose(history["active"][0], share)
    assert history["dead"] == (share == 0).sum() >= 1
    weight, norm = model.conv.weight.detach().flatten(1), model.norm
    offset = model.conv.bias + norm.bias * (norm.running_var + norm.eps).sqrt() / norm.weight
    expected = (offset - norm.running_mean).detach() / weight.norm(dim=1)
    np.testing.assert_allclose(history["distance"][0], expected)


def test_the_layout_of_weights_may_change() -> None:
    model = residual()
    tracker = BoundaryTracker(model, example_inputs=torch.zeros(2, 2, 5, 5, dtype=TYPE))
    model.to(memory_format=torch.channels_last)
    tracker.step()
    assert tracker.history.network["rotation_max"][-1] == 0


def test_records_come_when_they_are_due() -> None:
    model = network("sp")
    third = BoundaryTracker(model, every=3)
    early = BoundaryTracker(model, schedule=lambda step: step < 3)
    train(model, 7, lambda: (third.step(), early.step()))
    assert third.history["0"]["step"].tolist() == [3, 6]
    assert early.history["0"]["step"].tolist() == [1, 2]


def test_a_sampled_subset_has_the_numbers_of_its_units() -> None:
    model = network("bn")
    options = {"keep": "full", "probe": torch.randn(8, 3, dtype=TYPE)}
    everything = BoundaryTracker(model, **options)
    some = BoundaryTracker(model, units=3, **options)
    train(model, 2, lambda: (everything.step(), some.step()))
    for quantity in ("rotation", "displacement", "scale", "distance", "active"):
        expected = everything.history["0"][quantity][:, [0, 4, 7]]
        np.testing.assert_allclose(some.history["0"][quantity], expected)


def test_without_any_example_the_first_batch_shows_what_follows() -> None:
    model = network("bn")
    lazy, eager = BoundaryTracker(model), BoundaryTracker(model, example_inputs=ZEROS)
    train(model, 3, lambda: (lazy.step(), eager.step()))
    assert lazy.history.rows.tobytes() == eager.history.rows.tobytes()
    assert not model._forward_pre_hooks
    with pytest.raises(ValueError, match="example_inputs"):
        BoundaryTracker(network("sp")).step()  # it was never called


@pytest.mark.parametrize(
    "options",
    [{"keep": "all"}, {"every": 0}, {"every": 1.5}, {"units": 0}, {"statistics": "batch"}],
)
def test_options_are_checked(options: dict) -> None:
    with pytest.raises(ValueError, match="keep|every|units|statistics"):
        BoundaryTracker(network("sp"), **options)


def test_the_network_has_the_dead_units_of_all_layers_and_the_probe_is_a_copy() -> None:
    model, probe = network("sp"), torch.randn(16, 3, dtype=TYPE)
    tracker = BoundaryTracker(model, probe=probe)
    probe.zero_()
    tracker.step()
    history, together = tracker.history, tracker.history.network
    assert together["points_changed"] == 0
    for quantity in ("dead", "always_on"):
        assert together[quantity] == np.nansum(history.table(quantity))
    assert 0 < together["separated_median"] <= 0.5


@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors")
def test_a_layer_of_no_units_is_left_out() -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 0))
    assert list(BoundaryTracker(model, probe=torch.zeros(2, 4)).history) == ["0"]


def test_a_lost_history_and_what_is_no_state_are_told_in_words() -> None:
    with pytest.warns(UserWarning, match="the history begins here"):
        BoundaryTracker(network("sp"), resume=True)
    tracker = BoundaryTracker(nn.Linear(3, 2), example_inputs=torch.zeros(1, 3), every=2)
    with pytest.raises(ValueError, match="what its state_dict"):
        tracker.load_state_dict({})


def test_a_model_without_parameters_has_no_units() -> None:
    with pytest.raises(ValueError, match="no layer to look at"):
        BoundaryTracker(nn.Sequential(nn.ReLU()), probe=torch.zeros(2, 3))


def test_under_autocast_directions_keep_their_precision() -> None:
    model = nn.Sequential(nn.Linear(64, 8), nn.ReLU())
    tracker = BoundaryTracker(model, probe=torch.randn(4, 64))
    model[0].weight.data += 1e-5
    with torch.autocast("cpu", dtype=torch.bfloat16):
        tracker.step()
    assert 0 < tracker.history["0"]["rotation_max"] < 0.1


@pytest.mark.parametrize(("name", "every"), [("bn", 1), ("gmp inside", 2)])
def test_a_resumed_run_has_the_history_of_an_uninterrupted_one(
    tmp_path: Path, name: str, every: int
) -> None:
    options = {"every": every, "probe": torch.randn(8, 3, dtype=TYPE), "keep": "full"}
    whole = network(name)
    tracker = BoundaryTracker(whole, file=tmp_path / "whole.npy", **options)
    for seed in range(6):
        train(whole, 1, tracker.step, seed)

    killed = network(name)
    first = BoundaryTracker(killed, file=tmp_path / "parts.npy", **options)
    for seed in range(3):
        train(killed, 1, first.step, seed)
    weights, state = copy.deepcopy((killed.state_dict(), first.state_dict()))
    train(killed, 2, first.step, seed=99)  # lost: after the checkpoint

    resumed = network(name)
    resumed.load_state_dict(weights)
    again = BoundaryTracker(resumed, file=tmp_path / "parts.npy", resume=True, **options)
    again.load_state_dict(state)
    for seed in range(3, 6):
        train(resumed, 1, again.step, seed)
    assert tracker.history.rows.tobytes() == again.history.rows.tobytes()  # NaN for NaN
    for ending in (".npy", ".units.npy"):
        uninterrupted = np.load(tmp_path / f"whole{ending}")
        assert uninterrupted.tobytes() == np.load(tmp_path / f"parts{ending}").tobytes()


def test_a_state_is_small_where_the_model_tells_the_rest() -> None:
    model = network("sp")
    tracker = BoundaryTracker(model, every=2, probe=torch.randn(8, 3, dtype=TYPE))
    train(model, 2, tracker.step)
    assert tracker.state_dict() == {"step": 2, "units": {"0": [8, 3], "2": [1, 8]}}
    train(model, 1, tracker.step)
    assert set(tracker.state_dict()) == {"step", "units", "measured_at", "snapshot"}


def test_a_record_that_could_not_be_written_is_written_with_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, file = network("sp"), tmp_path / "run.npy"
    options = {"probe": torch.randn(8, 3, dtype=TYPE), "keep": "full", "file": file}
    tracker = BoundaryTracker(model, **options)
    train(model, 2, tracker.step)
    with monkeypatch.context() as full_disk:
        full_disk.setattr(Path, "open", lambda *args: (_ for _ in ()).throw(OSError("full")))
        with pytest.raises(OSError, match="full"):
            train(model, 1, tracker.step)
    train(model, 1, tracker.step)
    resumed = BoundaryTracker(model, **options, resume=True).history
    assert resumed.steps.tolist() == [1, 2, 3, 4]
    largest = resumed["0"]["rotation"].max(axis=1)
    np.testing.assert_array_equal(resumed["0"]["rotation_max"], largest)


class LargestDirection(UnitQuantity):
    """The largest coordinate of each direction."""

    name = "largest"
    levels = ("max",)

    def measure(self, interval: Interval) -> Tensor:
        return torch.cat([u.abs().amax(dim=1) for u in interval.now.directions.values()])


def test_a_new_quantity_is_one_class() -> None:
    model = network("sp")
    quantities = [QUANTITIES[0], LargestDirection()]
    history = record(model, example_inputs=ZEROS, keep="full", quantities=quantities)["0"]
    columns = ["step", "rotation_max", "rotation_median", "rotation_p99", "rotation_rms"]
    assert list(history) == [*columns, "largest_max", "rotation", "largest"]
    rows = nn.functional.normalize(model[0].weight.detach())
    np.testing.assert_allclose(history["largest"][0], rows.abs().amax(dim=1))


def test_a_quantity_without_a_summary_may_be_alone() -> None:
    options: dict = {"probe": ZEROS, "quantities": ["active"], "keep": "full"}
    history = record(network("sp"), **options)["0"]
    assert list(history) == ["step", "active"] and history["active"].shape == (1, 8)


class TooLong(UnitQuantity):
    """Has a value more than there are units."""

    name = "too long"

    def measure(self, interval: Interval) -> Tensor:
        return torch.zeros(len(interval.now.sign) + 1)


def test_a_quantity_of_another_length_is_refused() -> None:
    with pytest.raises(ValueError, match=r"too long: .* each followed unit, 9 .* \(10,\)"):
        record(network("sp"), example_inputs=ZEROS, quantities=[*QUANTITIES, TooLong()])


def on_meta() -> nn.Module:
    return nn.Linear(3, 2, device="meta")


X = torch.zeros(4, 3)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: BoundaryTracker(nn.Linear(3, 2).parameters()), "nn.Module; got a generator"),
        (lambda: BoundaryTracker(on_meta(), probe=X), "parameters on the meta device have none"),
        (
            lambda: BoundaryTracker(nn.Linear(3, 2), probe=X.numpy()),
            "array: use torch.from_numpy",
        ),
        (lambda: BoundaryTracker(nn.Linear(3, 2), probe=DataLoader(X)), "DataLoader: use next"),
        (lambda: BoundaryTracker(nn.Linear(3, 2), probe=iter([X])), "list_iterator: use next"),
        (lambda: BoundaryTracker(network("sp"), layers=["fc"]), "no layers .'fc'.; .* has: 0, 2"),
        (lambda: BoundaryTracker(network("sp"), layers=lambda *_: False), "no layer to look at"),
    ],
)
def test_what_cannot_be_tracked_is_said_when_the_tracker_is_built(
    build: Callable, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        build()


@pytest.mark.parametrize("steps", [1, 2])
def test_a_state_of_another_model_is_refused(steps: int) -> None:
    """After two steps it has no directions: they are those of the model."""
    tracker = BoundaryTracker(nn.Linear(3, 2), every=2, example_inputs=X)
    other = BoundaryTracker(nn.Linear(3, 4), every=2, example_inputs=X)
    for _ in range(steps):
        other.step()
    with pytest.raises(ValueError, match="of another model .* 4 x 3 units, .* 2 x 3"):
        tracker.load_state_dict(other.state_dict())
    assert tracker.state_dict()["step"] == 0


DAMAGES: dict[str, Callable[[dict], object]] = {
    "no directions": lambda state: state.pop("directions"),
    "directions that are text": lambda state: state.update(directions="0"),
    "a row for all": lambda state: state["directions"].update({"": torch.zeros(1, 3)}),
    "a sign for all": lambda state: state.update(sign=torch.zeros(1)),
    "no distances": lambda state: state.pop("distances"),
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_a_damaged_state_is_refused(damage: Callable[[dict], object]) -> None:
    model = nn.Linear(3, 2)
    tracker = BoundaryTracker(model, every=2, example_inputs=X)
    tracker.step()
    state = tracker.state_dict()
    damage(state["snapshot"])
    with pytest.raises(ValueError, match="state is damaged: .* a tensor of shape"):
        BoundaryTracker(model, every=2, example_inputs=X).load_state_dict(state)


def test_a_state_that_is_kept_is_not_overwritten_by_later_records() -> None:
    model = network("sp")
    tracker = BoundaryTracker(model, schedule=lambda step: step != 2)
    train(model, 2, tracker.step)
    state = tracker.state_dict()
    kept = {name: rows.clone() for name, rows in state["snapshot"]["directions"].items()}
    train(model, 4, tracker.step)
    for name, rows in kept.items():
        assert torch.equal(state["snapshot"]["directions"][name], rows)


@pytest.mark.parametrize("columns", [False, True], ids=["rows", "columns"])
@pytest.mark.parametrize("angle", [0.0, 1e-5, 1e-3, 1.0])
def test_float32_rows_have_the_turns_and_lengths_of_float64(angle: float, columns: bool) -> None:
    """At rest the turn is exactly 0; rows may be columns in memory."""
    random = torch.Generator().manual_seed(0)
    first, other = torch.randn(2, 9, 2000, generator=random, dtype=TYPE)
    u = first / first.norm(dim=1, keepdim=True)
    v = other - (other * u).sum(dim=1, keepdim=True) * u
    v /= v.norm(dim=1, keepdim=True)
    second = 3.0 * (np.cos(angle) * u + np.sin(angle) * v)
    if angle == 0:
        second = first

    before, after = first.float(), second.float()
    if columns:
        before, after = before.t().contiguous().t(), after.t().contiguous().t()
    directions = torch.zeros_like(before)
    snapshot.turn_rows(directions, before)
    lengths, moves = snapshot.turn_rows(directions, after)
    torch.testing.assert_close(lengths.double(), second.norm(dim=1), rtol=5e-7, atol=0)
    ones = torch.ones(9, dtype=TYPE)
    torch.testing.assert_close(directions.double().norm(dim=1), ones, rtol=5e-7, atol=0)
    turns = 2 * (moves.double() / 2).asin()
    expected = torch.full_like(turns, angle)
    torch.testing.assert_close(turns, expected, rtol=1e-3, atol=0)


class Failing(UnitQuantity):
    """Fails in its second record."""

    name = "failing"
    calls = 0

    def measure(self, interval: Interval) -> Tensor:
        self.calls += 1
        if self.calls == 2:
            raise KeyboardInterrupt
        return interval.now.scale


def test_after_a_record_that_was_broken_off_the_next_turns_are_unknown() -> None:
    """The directions have been turned, but nobody knows by how much since the last record."""
    model = network("sp")
    tracker = BoundaryTracker(model, example_inputs=ZEROS, quantities=["rotation", Failing()])
    train(model, 1, tracker.step)
    with pytest.raises(KeyboardInterrupt):
        train(model, 1, tracker.step)
    train(model, 2, tracker.step)
    turns = tracker.history["0"]["rotation_max"]
    assert np.isnan(turns).tolist() == [False, True, False]


def test_a_damaged_state_changes_nothing(tmp_path: Path) -> None:
    model, file = network("sp"), tmp_path / "run.npy"
    tracker, alone = (BoundaryTracker(model, every=2, probe=ZEROS, file=f) for f in (file, None))
    for _ in range(3):
        train(model, 1, lambda: (tracker.step(), alone.step()))
    state = tracker.state_dict()
    state["snapshot"]["sign"] = torch.zeros(1)
    train(model, 1, lambda: (tracker.step(), alone.step()))
    with pytest.raises(ValueError, match="state is damaged"):
        tracker.load_state_dict(state)
    train(model, 2, lambda: (tracker.step(), alone.step()))
    assert tracker.history.rows.tobytes() == alone.history.rows.tobytes()
    assert np.load(file).tobytes() == alone.history.rows.tobytes()


def test_a_tracker_whose_first_batch_was_interrupted_begins_with_the_next() -> None:
    errors = [KeyboardInterrupt()]

    def forward(m: nn.Module, x: Tensor) -> Tensor:
        if errors:
            raise errors.pop()
        return m.layers(x)

    model = FunctionModel(forward, layers=network("sp"))
    tracker = BoundaryTracker(model)
    with pytest.raises(KeyboardInterrupt):
        model(ZEROS)
    train(model, 2, tracker.step)
    assert tracker.history.steps.tolist() == [1, 2] and not model._forward_pre_hooks


def test_a_refused_tracker_leaves_no_files(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="log is an object"):
        BoundaryTracker(network("sp"), probe=ZEROS, file=tmp_path / "a.npy", log="run.csv")
    (tmp_path / "b.units.npy").touch()
    with pytest.raises(FileExistsError):
        BoundaryTracker(network("sp"), probe=ZEROS, keep="full", file=tmp_path / "b.npy")
    assert [path.name for path in tmp_path.iterdir()] == ["b.units.npy"]


def test_a_file_that_appeared_before_the_first_batch_may_be_removed(tmp_path: Path) -> None:
    model, file = network("sp"), tmp_path / "run.npy"
    tracker = BoundaryTracker(model, file=file)
    file.touch()
    with pytest.raises(FileExistsError):
        model(ZEROS)
    file.unlink()
    train(model, 2, tracker.step)
    assert len(np.load(file)) == 2 * 3
