"""The tracker's numbers are those of plain geometry, and training is as if it were not there."""

import copy
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from function_model import FunctionModel
from torch import Tensor, nn
from torch.utils.data import DataLoader
from tracked_networks import NETWORKS, TYPE, ZEROS, gmp, linear, network, record, train

import geoparam as gp
from geoparam import BoundaryTracker
from geoparam.analysis import QUANTITIES, Interval, UnitQuantity, boundaries


@pytest.mark.filterwarnings("ignore:the unit vectors of")
@pytest.mark.parametrize("name", NETWORKS)
def test_rotation_and_displacement_are_those_of_plain_geometry(name: str) -> None:
    """What they are at one moment is compared with the model's own forward in test_boundary."""
    model = network(name)
    tracker = BoundaryTracker(model, keep="full", example_inputs=ZEROS)
    seen: list[tuple[np.ndarray, np.ndarray]] = []

    def read_boundaries() -> None:
        found = boundaries(model, ZEROS)["0"]
        seen.append((found.direction.numpy(), found.distances.numpy()))

    read_boundaries()
    train(model, 6, lambda: (tracker.step(), read_boundaries()))
    history = tracker.history["0"]
    for number, ((u, lam), (v, mu)) in enumerate(zip(seen[1:], seen, strict=False)):
        turn = np.degrees(np.arccos(np.clip((u * v).sum(1), -1, 1)))
        np.testing.assert_allclose(history["rotation"][number], turn, atol=2e-6)
        moved = np.linalg.norm(lam[..., None] * u - mu[..., None] * v, axis=-1).max(0)
        np.testing.assert_allclose(history["displacement"][number], moved, rtol=1e-8, atol=1e-9)
        np.testing.assert_allclose(history["distance"][number], lam[0], rtol=1e-9, atol=1e-12)
    assert history["rotation"].max() > 0.1


def test_the_summary_is_that_of_the_units() -> None:
    model = network("two breakpoints")
    tracker = BoundaryTracker(model, keep="full", probe=torch.randn(32, 3, dtype=TYPE))
    train(model, 4, tracker.step)
    history, last = tracker.history["0"], tracker.history["2"]
    for its, quantity, values in (
        (history, "rotation", history["rotation"]),
        (history, "displacement", history["displacement"]),
        (history, "distance", np.abs(history["distance"])),
        (last, "rotation", last["rotation"]),
    ):
        np.testing.assert_allclose(its[f"{quantity}_max"], values.max(1))
        np.testing.assert_allclose(its[f"{quantity}_median"], np.median(values, 1))
        np.testing.assert_allclose(its[f"{quantity}_p99"], np.percentile(values, 99, 1))
    np.testing.assert_allclose(history["scale_min"], history["scale"].min(1))
    rms = np.sqrt(np.square(history["rotation"]).mean(1))
    np.testing.assert_allclose(history["rotation_rms"], rms)
    np.testing.assert_array_equal(history["dead"], (history["active"] == 0).sum(1))
    np.testing.assert_array_equal(history["always_on"], (history["active"] == 1).sum(1))
    ratio = history["distance_median"] / history["input_length_median"]
    np.testing.assert_allclose(history["relative_distance_median"], ratio)


@pytest.mark.filterwarnings("ignore:the unit vectors of")
@pytest.mark.parametrize("name", ["bn", "intrinsic", "imn", "learned breakpoints"])
@pytest.mark.parametrize("statistics", [None, "running", "batch"])
def test_training_is_bit_identical_with_and_without(name: str, statistics: str | None) -> None:
    model = nn.Sequential(*network(name)[:-1], nn.Dropout(0.2), linear(8, 1))
    alone, tracked = copy.deepcopy(model), copy.deepcopy(model)
    options = {"probe": torch.randn(9, 3, dtype=TYPE), "statistics": statistics}
    tracker = BoundaryTracker(tracked, keep="full", **options if statistics else {})
    assert train(tracked, 8, tracker.step) == train(alone, 8)
    for key, value in alone.state_dict().items():
        assert torch.equal(value, tracked.state_dict()[key]), key
    assert all(
        a.training == b.training for a, b in zip(alone.modules(), tracked.modules(), strict=True)
    )


@pytest.mark.parametrize("scale", [1e-25, 1e25])
def test_turns_of_very_short_and_long_rows_are_seen(scale: float) -> None:
    model = nn.Sequential(nn.Linear(2, 1), nn.ReLU(), nn.Linear(1, 1))
    model[0].weight.data = torch.tensor([[scale, 0.0]])
    tracker = BoundaryTracker(model, example_inputs=torch.zeros(1, 2))
    model[0].weight.data = torch.tensor([[scale, scale]])
    tracker.step()
    np.testing.assert_allclose(tracker.history["0"]["rotation_max"], 45, rtol=1e-5)


@pytest.mark.parametrize("name", ["sp", "bn", "gmp outside"])
def test_dead_units_are_those_that_no_probe_point_activates(name: str) -> None:
    model, probe = network(name), torch.randn(64, 3, dtype=TYPE)
    shift = model[1].bias if name == "bn" else model[0].lam if "gmp" in name else model[0].bias
    with torch.no_grad():
        shift[:2] -= 100
        shift[2:5] += 100
        if name == "gmp outside":
            model[0].r.abs_()  # so that what is active is positive
    history = record(model, probe=probe, keep="full")["0"]
    share = (copy.deepcopy(model).eval()[:-1](probe) > 0).double().mean(0).numpy()
    np.testing.assert_allclose(history["active"][0], share)
    assert history["dead"] == (share == 0).sum() >= 2
    assert history["always_on"] == (share == 1).sum() >= 3
    separated = np.median(np.minimum(share, 1 - share))
    np.testing.assert_allclose(history["separated_median"], separated)


@pytest.mark.parametrize(
    ("move", "is_readable"),
    [
        (lambda z: z, True),
        (lambda z: z.flatten(0, 1), False),
        (lambda z: z.transpose(1, 2), False),
        (lambda z: z[:, :, :3].transpose(1, 2), False),
        (lambda z: z.flatten(1), False),
        (lambda z: z[..., [1, 0, 3, 2]], False),
        (lambda z: z[..., :1] + torch.zeros(4, dtype=TYPE), False),
    ],
)
def test_dead_units_are_counted_where_no_view_moves_the_units(
    move: Callable, is_readable: bool
) -> None:
    model = FunctionModel(lambda m, x: torch.relu(move(m.fc(x))), fc=linear(5, 4))
    history = record(model, probe=torch.randn(2, 3, 5, dtype=TYPE))
    assert np.isfinite(history["fc"]["dead"]).all() == is_readable


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
    for history in (tracker.history["0"], tracker.history.network):
        for number, (now, before) in enumerate(zip(signs[1:], signs, strict=False)):
            changed = now != before
            assert history["pattern_change"][number] == pytest.approx(changed.double().mean())
            assert history["points_changed"][number] == changed.any(1).sum()
            assert history["regions"][number] == len({tuple(row) for row in now.tolist()})


def test_batch_norm_is_read_by_running_or_by_the_probes_statistics() -> None:
    model, probe = network("bn"), torch.randn(40, 3, dtype=TYPE) + 1
    trackers = {
        name: BoundaryTracker(model, probe=probe, statistics=name, keep="full")
        for name in ("running", "batch")
    }
    train(model, 2, lambda: [tracker.step() for tracker in trackers.values()])
    for name, tracker in trackers.items():
        expected = boundaries(model, probe, statistics=name)["0"]
        history = tracker.history["0"]
        np.testing.assert_allclose(history["distance"][-1], expected.distance, rtol=1e-9)
        np.testing.assert_allclose(history["scale"][-1], expected.scale, rtol=1e-9)
    gap = trackers["running"].history["0"]["distance"] - trackers["batch"].history["0"]["distance"]
    assert np.abs(gap).max() > 0.1


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


def test_units_that_have_diverged_are_not_dead() -> None:
    model = network("bn")
    tracker = BoundaryTracker(model, probe=torch.randn(8, 3, dtype=TYPE), keep="full")
    model[0].weight.data[2] = torch.nan
    tracker.step()
    assert np.isnan(tracker.history["0"]["active"]).sum() == 1


@pytest.mark.parametrize("turn", ["gamma", "row", "r"])
def test_a_sign_turns_the_active_side_around(turn: str) -> None:
    model = network("gmp inside" if turn == "r" else "bn")
    flipped = {"gamma": model[1], "row": model[0], "r": model[0]}[turn]
    tracker = BoundaryTracker(model, keep="full", example_inputs=ZEROS)
    with torch.no_grad():
        (flipped.r if turn == "r" else flipped.weight)[2].neg_()
    tracker.step()
    expected = np.where(np.arange(8) == 2, 180.0, 0.0)
    np.testing.assert_allclose(tracker.history["0"]["rotation"][0], expected, atol=1e-6)


def test_angular_layers_tell_their_products_of_cosines() -> None:
    layer = gp.GmPLinear(5, 2, dtype=TYPE)
    model = nn.Sequential(layer, nn.ReLU(), gmp(2, 1, coordinates="intrinsic"))
    with torch.no_grad():
        layer.latitude.copy_(torch.tensor([[0.1, 1.5, 1.5, 0.2], [0.3, 0.1, -0.2, 0.3]]))
    found = record(model, example_inputs=torch.zeros(2, 5, dtype=TYPE))
    cosines = layer.latitude.detach().cos()
    products = torch.cat([torch.ones(2, 1, dtype=TYPE), cosines.cumprod(1)[:, :-1]], 1)
    np.testing.assert_allclose(found["0"]["smallest_product"], products.min(), rtol=1e-10)
    share = (products.square() < 1e-4).double().mean()
    np.testing.assert_allclose(found["0"]["negligible_metric"], share)
    assert share > 0 and np.isnan(found["2"]["smallest_product"]).all()


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
    all_units = BoundaryTracker(model, keep="full", probe=torch.randn(8, 3, dtype=TYPE))
    some = BoundaryTracker(model, keep="full", probe=torch.randn(8, 3, dtype=TYPE), units=3)
    train(model, 2, lambda: (all_units.step(), some.step()))
    for quantity in ("rotation", "displacement", "scale", "distance"):
        expected = all_units.history["0"][quantity][:, [0, 4, 7]]
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
    with pytest.raises(ValueError, match="keep|every|statistics"):
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


def test_tensorboard_itself_reads_them(tmp_path: Path) -> None:
    tensorboard = pytest.importorskip("torch.utils.tensorboard")
    writer, model = tensorboard.SummaryWriter(tmp_path), network("sp")
    tracker = BoundaryTracker(model, writer=writer)
    train(model, 3, tracker.step)
    writer.close()
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(tmp_path)).Reload().Scalars("0/rotation_max")
    values = [event.value for event in events]
    np.testing.assert_allclose(values, tracker.history["0"]["rotation_max"], rtol=1e-6)


@pytest.mark.parametrize(("name", "every"), [("bn", 1), ("gmp inside", 2)])
def test_a_resumed_run_has_the_history_of_an_uninterrupted_one(
    tmp_path: Path, name: str, every: int
) -> None:
    probe = torch.randn(8, 3, dtype=TYPE)
    options = {"every": every, "probe": probe, "keep": "full"}
    whole, parts = network(name), network(name)
    tracker = BoundaryTracker(whole, file=tmp_path / "whole.npy", **options)
    first = BoundaryTracker(parts, file=tmp_path / "parts.npy", **options)
    for seed in range(3):
        train(whole, 1, tracker.step, seed)
        train(parts, 1, first.step, seed)
    saved = copy.deepcopy((parts.state_dict(), first.state_dict()))
    train(parts, 2, first.step, seed=99)  # lost: after the checkpoint
    resumed = network(name)
    resumed.load_state_dict(saved[0])
    again = BoundaryTracker(resumed, file=tmp_path / "parts.npy", resume=True, **options)
    again.load_state_dict(saved[1])
    for seed in range(3, 6):
        train(whole, 1, tracker.step, seed)
        train(resumed, 1, again.step, seed)
    assert tracker.history.rows.tobytes() == again.history.rows.tobytes()  # NaN for NaN
    for ending in (".npy", ".units.npy"):
        files = [np.load(tmp_path / f"{run}{ending}") for run in ("whole", "parts")]
        assert files[0].tobytes() == files[1].tobytes()


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


def on_meta() -> nn.Module:
    return nn.Linear(3, 2, device="meta")


X = torch.zeros(4, 3)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: BoundaryTracker(nn.Linear(3, 2).parameters()), "nn.Module; got generator"),
        (lambda: BoundaryTracker(on_meta(), probe=X), "parameters on the meta device have none"),
        (lambda: BoundaryTracker(nn.Linear(3, 2), probe=X.numpy()), "ndarray: .*from_numpy"),
        (lambda: BoundaryTracker(nn.Linear(3, 2), probe=DataLoader(X)), "DataLoader: take one"),
        (lambda: BoundaryTracker(nn.Linear(3, 2), probe=iter([X])), "list_iterator: take one"),
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
