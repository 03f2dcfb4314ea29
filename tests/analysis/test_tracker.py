"""The tracker's numbers are those of plain geometry, and training is as if it were not there.

Checkpoints, files and interrupted runs are tested in test_tracker_states.py.
"""

import copy
from collections.abc import Callable, Mapping

import numpy as np
import pytest
import torch
from function_model import FunctionModel
from numpy.testing import assert_allclose, assert_array_equal
from torch import Tensor, nn
from torch.testing import assert_close
from torch.utils.data import DataLoader
from tracked_networks import NETWORKS, TYPE, ZEROS, gmp, linear, network, record, train

from geoparam import BoundaryTracker
from geoparam.analysis import QUANTITIES, Interval, UnitQuantity, boundaries, snapshot

X = torch.zeros(4, 3)


def draw_probe(examples: int) -> Tensor:
    """Return a random batch for the networks of `tracked_networks`."""
    return torch.randn(examples, 3, dtype=TYPE)


# Rotation, displacement and scale.


@pytest.mark.filterwarnings("ignore:the unit vectors of")
@pytest.mark.parametrize("name", NETWORKS)
def test_movements_are_the_differences_of_successive_boundaries(name: str) -> None:
    """test_boundary.py compares the boundaries themselves with the model's forward pass."""
    model = network(name)
    tracker = BoundaryTracker(model, keep="full", example_inputs=ZEROS)
    successive = [boundaries(model, ZEROS)["0"]]

    def record_and_read() -> None:
        tracker.step()
        successive.append(boundaries(model, ZEROS)["0"])

    train(model, 6, record_and_read)
    history = tracker.history["0"]

    directions = torch.stack([reading.direction for reading in successive])
    cosines = (directions[1:] * directions[:-1]).sum(dim=-1).clamp(-1, 1)
    assert_allclose(history["rotation"], cosines.acos().rad2deg(), atol=2e-6)
    assert history["rotation"].max() > 0.1

    locations = torch.stack([reading.locations for reading in successive])
    moves = (locations[1:] - locations[:-1]).norm(dim=-1)
    largest_of_breakpoints = moves.amax(dim=1)
    assert_allclose(history["displacement"], largest_of_breakpoints, rtol=1e-8, atol=1e-9)

    distances = torch.stack([reading.distance for reading in successive])
    assert_allclose(history["distance"], distances[1:], rtol=1e-9)


@pytest.mark.parametrize("scale", [1e-25, 1e25])
def test_rotations_of_very_short_and_long_rows_are_measured(scale: float) -> None:
    model = nn.Sequential(nn.Linear(2, 1), nn.ReLU(), nn.Linear(1, 1))
    model[0].weight.data = torch.tensor([[scale, 0.0]])
    tracker = BoundaryTracker(model, example_inputs=torch.zeros(1, 2))

    model[0].weight.data = torch.tensor([[scale, scale]])
    tracker.step()

    assert_allclose(tracker.history["0"]["rotation_max"], 45, rtol=1e-5)


SIGNS = {
    "gamma": ("bn", lambda model: model[1].weight),
    "row": ("bn", lambda model: model[0].weight),
    "r": ("gmp inside", lambda model: model[0].r),
}


@pytest.mark.parametrize(("name", "get_parameter"), SIGNS.values(), ids=SIGNS)
def test_a_change_of_sign_is_a_half_turn(name: str, get_parameter: Callable) -> None:
    model = network(name)
    tracker = BoundaryTracker(model, keep="full", example_inputs=ZEROS)

    get_parameter(model).data[2] *= -1
    tracker.step()

    expected = np.zeros(8)
    expected[2] = 180
    assert_allclose(tracker.history["0"]["rotation"][0], expected, atol=1e-6)


def test_a_change_of_sign_of_a_unit_with_one_input_is_a_half_turn() -> None:
    model = nn.Sequential(gmp(1, 4), nn.ReLU())
    tracker = BoundaryTracker(model, keep="full", example_inputs=torch.zeros(2, 1, dtype=TYPE))

    model[0].sign[1] *= -1
    tracker.step()

    assert tracker.history["0"]["rotation"].tolist() == [[0, 180, 0, 0]]


def test_a_layer_with_a_smooth_activation_has_only_rotation_and_scale() -> None:
    model = nn.Sequential(linear(3, 8), nn.GELU(), linear(8, 1))
    tracker = BoundaryTracker(model, probe=draw_probe(5))

    train(model, 2, tracker.step)
    history = tracker.history["0"]

    assert (history["rotation_max"] > 0).all()
    assert (history["scale_median"] > 0).all()
    for quantity in ("displacement_max", "distance_median", "dead", "pattern_change"):
        assert np.isnan(history[quantity]).all(), quantity


def test_under_autocast_directions_keep_their_precision() -> None:
    model = nn.Sequential(nn.Linear(64, 8), nn.ReLU())
    tracker = BoundaryTracker(model, probe=torch.randn(4, 64))

    model[0].weight.data += 1e-5
    with torch.autocast("cpu", dtype=torch.bfloat16):
        tracker.step()

    assert 0 < tracker.history["0"]["rotation_max"] < 0.1


def draw_turned_rows(angle: float) -> tuple[Tensor, Tensor]:
    """Return random rows, and the same turned by an angle in radians, with a length of 3."""
    random = torch.Generator().manual_seed(0)
    rows, others = torch.randn(2, 9, 2000, generator=random, dtype=TYPE)
    if angle == 0:
        return rows, rows

    u = nn.functional.normalize(rows)
    along_u = (others * u).sum(dim=1, keepdim=True)
    v = nn.functional.normalize(others - along_u * u)
    return rows, 3.0 * (np.cos(angle) * u + np.sin(angle) * v)


def store_by_column(rows: Tensor) -> Tensor:
    """Return the same matrix with its columns contiguous in memory."""
    return rows.t().contiguous().t()


@pytest.mark.parametrize("layout", [Tensor.contiguous, store_by_column], ids=["rows", "columns"])
@pytest.mark.parametrize("angle", [0.0, 1e-5, 1e-3, 1.0])
def test_float32_rows_have_the_turns_and_lengths_of_float64(
    angle: float, layout: Callable[[Tensor], Tensor]
) -> None:
    before, after = draw_turned_rows(angle)
    directions = torch.zeros(before.shape)
    if layout is store_by_column:
        directions = store_by_column(directions)

    snapshot.turn_rows(directions, layout(before.float()))
    lengths, moves = snapshot.turn_rows(directions, layout(after.float()))

    assert_close(lengths.double(), after.norm(dim=1), rtol=5e-7, atol=0)
    ones = torch.ones(9, dtype=TYPE)
    assert_close(directions.double().norm(dim=1), ones, rtol=5e-7, atol=0)
    turns = 2 * (moves.double() / 2).asin()
    assert_close(turns, angle * ones, rtol=1e-3, atol=0)  # at rest exactly 0


def test_a_change_of_memory_format_is_no_rotation() -> None:
    model = residual()
    tracker = BoundaryTracker(model, example_inputs=torch.zeros(2, 2, 5, 5, dtype=TYPE))

    model.to(memory_format=torch.channels_last)
    tracker.step()

    assert tracker.history.network["rotation_max"][-1] == 0


# The summary of each layer.


@pytest.fixture
def trained() -> BoundaryTracker:
    """Return the tracker of a network with two breakpoints after four steps."""
    model = network("two breakpoints")
    tracker = BoundaryTracker(model, keep="full", probe=draw_probe(32))
    train(model, 4, tracker.step)
    return tracker


@pytest.mark.parametrize(
    ("layer", "quantity"),
    [("0", "rotation"), ("0", "displacement"), ("0", "distance"), ("2", "rotation")],
)
def test_a_summary_has_maximum_median_and_percentile_of_the_units(
    trained: BoundaryTracker, layer: str, quantity: str
) -> None:
    history = trained.history[layer]
    values = np.abs(history[quantity])

    assert_allclose(history[f"{quantity}_max"], values.max(axis=1))
    assert_allclose(history[f"{quantity}_median"], np.median(values, axis=1))
    assert_allclose(history[f"{quantity}_p99"], np.percentile(values, 99, axis=1))


def test_rotation_rms_is_the_root_of_the_mean_square(trained: BoundaryTracker) -> None:
    history = trained.history["0"]

    mean_square = np.square(history["rotation"]).mean(axis=1)

    assert_allclose(history["rotation_rms"], np.sqrt(mean_square))


def test_scale_min_is_the_smallest_scale(trained: BoundaryTracker) -> None:
    history = trained.history["0"]

    assert_allclose(history["scale_min"], history["scale"].min(axis=1))


def test_dead_and_always_on_count_the_units_active_nowhere_and_everywhere(
    trained: BoundaryTracker,
) -> None:
    history = trained.history["0"]
    active = history["active"]

    assert_array_equal(history["dead"], (active == 0).sum(axis=1))
    assert_array_equal(history["always_on"], (active == 1).sum(axis=1))


def test_a_unit_without_a_boundary_is_counted_and_left_out() -> None:
    model = network("bn")
    model[1].weight.data[[0, 5]] = 0
    tracker = BoundaryTracker(model, keep="full", probe=draw_probe(8))

    model[0].weight.data += 0.1
    tracker.step()
    history = tracker.history["0"]

    assert history["undefined"] == 2
    is_undefined = np.isnan(history["rotation"][0])
    assert is_undefined.nonzero()[0].tolist() == [0, 5]
    assert_allclose(history["rotation_median"], np.nanmedian(history["rotation"]))
    assert np.isfinite(history["rotation_max"])
    assert history["rotation_max"] > 0


def test_a_unit_that_gets_a_boundary_is_no_longer_undefined() -> None:
    """Though its rotation since the last record is unknown."""
    model = network("bn")
    model[1].weight.data[[0, 5]] = 0
    tracker = BoundaryTracker(model, probe=draw_probe(8))
    tracker.step()

    model[1].weight.data[[0, 5]] = 1.0
    tracker.step()

    assert tracker.history["0"]["undefined"].tolist() == [2, 0]


def test_units_that_have_diverged_are_neither_dead_nor_in_the_median() -> None:
    model = network("bn")
    tracker = BoundaryTracker(model, probe=draw_probe(64), keep="full")

    model[0].weight.data[2] = torch.nan
    tracker.step()
    history = tracker.history["0"]

    active = history["active"][0]
    assert np.isnan(active).nonzero()[0].tolist() == [2]
    separated = np.nanmedian(np.minimum(active, 1 - active))
    assert_array_equal(history["separated_median"], separated)


# What the probe shows: dead units and activation patterns.

SHIFTS = {
    "sp": lambda model: model[0].bias,
    "bn": lambda model: model[1].bias,
    "gmp outside": lambda model: model[0].lam,
}


Shifted = tuple[Mapping[str, np.ndarray], np.ndarray]


@pytest.fixture(params=SHIFTS)
def shifted(request: pytest.FixtureRequest) -> Shifted:
    """Record a layer with dead and always active units.

    Return its history, and the share of the probe at which the model's forward activates a unit.
    """
    name = request.param
    model = network(name)
    probe = draw_probe(64)
    shift = SHIFTS[name](model).data
    shift[:2] -= 100
    shift[2:5] += 100
    if name == "gmp outside":
        model[0].r.data.abs_()  # so that active units have positive outputs

    hidden = copy.deepcopy(model).eval()[:-1](probe)
    share = (hidden > 0).double().mean(dim=0).numpy()
    return record(model, probe=probe, keep="full")["0"], share


def test_active_is_the_share_of_the_probe_that_activates_a_unit(shifted: Shifted) -> None:
    history, share = shifted

    assert_allclose(history["active"][0], share)


def test_dead_units_are_those_that_no_probe_point_activates(shifted: Shifted) -> None:
    history, share = shifted

    assert history["dead"] == (share == 0).sum()
    assert history["dead"] >= 2


def test_units_that_every_probe_point_activates_are_always_on(shifted: Shifted) -> None:
    history, share = shifted

    assert history["always_on"] == (share == 1).sum()
    assert history["always_on"] >= 3


def test_separated_median_is_the_share_on_the_smaller_side(shifted: Shifted) -> None:
    history, share = shifted

    separated = np.median(np.minimum(share, 1 - share))

    assert_allclose(history["separated_median"], separated)


def record_dead(move: Callable[[Tensor], Tensor]) -> np.ndarray:
    """Return the dead units of a linear layer, its output moved before ReLU."""
    model = FunctionModel(lambda m, x: torch.relu(move(m.fc(x))), fc=linear(5, 4))
    return record(model, probe=torch.randn(2, 3, 5, dtype=TYPE))["fc"]["dead"]


def test_dead_units_are_counted_where_units_stay_in_their_dimension() -> None:
    dead = record_dead(lambda z: z)

    assert np.isfinite(dead).all()


MOVES = {
    "points in one row": lambda z: z.flatten(0, 1),
    "transposed": lambda z: z.transpose(1, 2),
    "as many positions": lambda z: z[:, :, :3].transpose(1, 2),
    "flat": lambda z: z.flatten(1),
    "in another order": lambda z: z[..., [1, 0, 3, 2]],
    "one unit, spread": lambda z: z[..., :1] + torch.zeros(4, dtype=TYPE),
}


@pytest.mark.parametrize("move", MOVES.values(), ids=MOVES)
def test_dead_units_are_unknown_where_a_view_moves_the_units(move: Callable) -> None:
    dead = record_dead(move)

    assert not np.isfinite(dead).all()


def test_dead_units_are_unknown_for_one_unit_in_a_sum_with_many() -> None:
    def forward(m: nn.Module, x: Tensor) -> Tensor:
        return torch.relu(m.one(x) + m.many(x))

    model = FunctionModel(forward, one=linear(3, 1), many=linear(3, 4))

    history = record(model, probe=draw_probe(5))

    assert np.isnan(history["one"]["dead"]).all()
    assert np.isfinite(history["many"]["dead"]).all()


@pytest.mark.parametrize("layer", ["0", "(network)"])
def test_pattern_changes_are_those_of_the_signs(layer: str) -> None:
    model = network("sp")
    probe = draw_probe(40)
    tracker = BoundaryTracker(model, probe=probe)
    successive = [model[0](probe) > 0]

    def record_and_read() -> None:
        tracker.step()
        successive.append(model[0](probe) > 0)

    train(model, 5, record_and_read)
    history = tracker.history[layer]

    signs = torch.stack(successive)  # (records + 1, points, units)
    changes = signs[1:] != signs[:-1]
    assert_allclose(history["pattern_change"], changes.double().mean(dim=(1, 2)))
    assert_array_equal(history["points_changed"], changes.any(dim=2).sum(dim=1))
    regions = [len(rows.unique(dim=0)) for rows in signs[1:]]
    assert history["regions"].tolist() == regions


@pytest.mark.parametrize(("statistics", "others"), [("running", "batch"), ("batch", "running")])
def test_batch_norm_is_read_by_running_or_by_the_probes_statistics(
    statistics: str, others: str
) -> None:
    model = network("bn")
    probe = draw_probe(40) + 1
    tracker = BoundaryTracker(model, probe=probe, statistics=statistics, keep="full")

    train(model, 2, tracker.step)
    history = tracker.history["0"]

    expected = boundaries(model, probe, statistics=statistics)["0"]
    assert_allclose(history["distance"][-1], expected.distance, rtol=1e-9)
    assert_allclose(history["scale"][-1], expected.scale, rtol=1e-9)
    by_others = boundaries(model, probe, statistics=others)["0"]
    assert (expected.distance - by_others.distance).abs().max() > 0.1


def residual() -> nn.Module:
    """Return a residual block: ReLU follows the sum of a normalised convolution and its input."""

    def forward(m: nn.Module, x: Tensor) -> Tensor:
        x = m.stem(x).relu_()
        return torch.relu(m.norm(m.conv(x)) + x)

    stem = nn.Conv2d(2, 4, 3, padding=1, dtype=TYPE)
    conv = nn.Conv2d(4, 4, 3, padding=1, dtype=TYPE)
    return FunctionModel(forward, stem=stem, conv=conv, norm=nn.BatchNorm2d(4, dtype=TYPE))


def test_before_a_residual_sum_units_are_dead_by_the_output_of_the_sum() -> None:
    model = residual()
    probe = torch.randn(6, 2, 5, 5, dtype=TYPE)
    model.norm.bias.data[0] = -100  # dead by itself, and after the sum
    model.norm.bias.data[1] = -0.1

    history = record(model, probe=probe, keep="full")["conv"]

    outputs = copy.deepcopy(model).eval()(probe)
    share = (outputs > 0).double().mean(dim=(0, 2, 3))
    assert_allclose(history["active"][0], share)
    assert history["dead"] == (share == 0).sum()
    assert history["dead"] >= 1


def test_before_a_residual_sum_the_boundary_is_that_of_layer_and_norm_alone() -> None:
    model = residual()
    nn.init.normal_(model.norm.bias)

    probe = torch.randn(6, 2, 5, 5, dtype=TYPE)
    history = record(model, probe=probe, keep="full")["conv"]

    norm = model.norm
    deviation = (norm.running_var + norm.eps).sqrt()
    offset = model.conv.bias - norm.running_mean + norm.bias * deviation / norm.weight
    lengths = model.conv.weight.flatten(1).norm(dim=1)
    assert_allclose(history["distance"][0], (offset / lengths).detach())


def test_the_network_counts_the_dead_units_of_all_layers() -> None:
    tracker = BoundaryTracker(network("sp"), probe=draw_probe(16))

    tracker.step()
    history = tracker.history

    for quantity in ("dead", "always_on"):
        assert history.network[quantity] == np.nansum(history.table(quantity))
    assert 0 < history.network["separated_median"] <= 0.5


def test_the_probe_is_a_copy() -> None:
    probe = draw_probe(16)
    tracker = BoundaryTracker(network("sp"), probe=probe)

    probe.zero_()
    tracker.step()

    assert tracker.history.network["points_changed"] == 0


# Training is left alone; what is recorded, and when.


@pytest.mark.filterwarnings("ignore:the unit vectors of")
@pytest.mark.parametrize("name", ["bn", "intrinsic", "imn", "learned breakpoints"])
@pytest.mark.parametrize("statistics", [None, "running", "batch"])
def test_training_is_bit_identical_with_and_without_a_tracker(
    name: str, statistics: str | None
) -> None:
    alone = nn.Sequential(*network(name)[:-1], nn.Dropout(0.2), linear(8, 1))
    tracked = copy.deepcopy(alone)
    options: dict = {"keep": "full"}
    if statistics is not None:
        options["probe"] = draw_probe(9)
        options["statistics"] = statistics
    tracker = BoundaryTracker(tracked, **options)

    losses = train(tracked, 8, tracker.step)

    assert losses == train(alone, 8)
    assert_close(tracked.state_dict(), alone.state_dict(), rtol=0, atol=0)
    assert all(module.training for module in tracked.modules())


@pytest.mark.parametrize(
    ("options", "steps"),
    [({"every": 3}, [3, 6]), ({"schedule": lambda step: step < 3}, [1, 2])],
    ids=["every", "schedule"],
)
def test_records_are_taken_when_they_are_due(options: dict, steps: list[int]) -> None:
    model = network("sp")
    tracker = BoundaryTracker(model, **options)

    train(model, 7, tracker.step)

    assert tracker.history["0"]["step"].tolist() == steps


@pytest.mark.parametrize("quantity", ["rotation", "displacement", "scale", "distance", "active"])
def test_a_sampled_subset_has_the_values_of_its_units(quantity: str) -> None:
    model = network("bn")
    probe = draw_probe(8)
    all_units = BoundaryTracker(model, keep="full", probe=probe)
    three_units = BoundaryTracker(model, keep="full", probe=probe, units=3)

    def step_both() -> None:
        all_units.step()
        three_units.step()

    train(model, 2, step_both)

    expected = all_units.history["0"][quantity][:, [0, 4, 7]]
    assert_allclose(three_units.history["0"][quantity], expected)


def test_without_example_inputs_the_first_batch_is_used() -> None:
    model = network("bn")
    without = BoundaryTracker(model)
    with_inputs = BoundaryTracker(model, example_inputs=ZEROS)

    def step_both() -> None:
        without.step()
        with_inputs.step()

    train(model, 3, step_both)

    assert without.history.rows.tobytes() == with_inputs.history.rows.tobytes()
    assert not model._forward_pre_hooks


def test_without_example_inputs_a_model_must_be_called_before_the_first_step() -> None:
    tracker = BoundaryTracker(network("sp"))

    with pytest.raises(ValueError, match="example_inputs"):
        tracker.step()


# Quantities of the user.


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

    rotation = ["rotation_max", "rotation_median", "rotation_p99", "rotation_rms"]
    assert list(history) == ["step", *rotation, "largest_max", "rotation", "largest"]
    directions = nn.functional.normalize(model[0].weight.detach())
    assert_allclose(history["largest"][0], directions.abs().amax(dim=1))


def test_a_quantity_without_a_summary_may_be_alone() -> None:
    history = record(network("sp"), probe=ZEROS, quantities=["active"], keep="full")["0"]

    assert list(history) == ["step", "active"]
    assert history["active"].shape == (1, 8)


class TooLong(UnitQuantity):
    """Has one more value than there are units."""

    name = "too long"

    def measure(self, interval: Interval) -> Tensor:
        return torch.zeros(len(interval.now.sign) + 1)


def test_a_quantity_of_another_length_is_refused() -> None:
    quantities = [*QUANTITIES, TooLong()]

    with pytest.raises(ValueError, match=r"too long: .* each followed unit, 9 .* \(10,\)"):
        record(network("sp"), example_inputs=ZEROS, quantities=quantities)


# What cannot be tracked.


@pytest.mark.parametrize(
    "options",
    [{"keep": "all"}, {"every": 0}, {"every": 1.5}, {"units": 0}, {"statistics": "batch"}],
)
def test_options_are_checked(options: dict) -> None:
    with pytest.raises(ValueError, match="keep|every|units|statistics"):
        BoundaryTracker(network("sp"), **options)


@pytest.mark.parametrize(
    ("probe", "message"),
    [
        (X.numpy(), "array: use torch.from_numpy"),
        (DataLoader(X), "DataLoader: use next"),
        (iter([X]), "list_iterator: use next"),
    ],
    ids=["array", "loader", "iterator"],
)
def test_a_probe_that_is_no_batch_is_refused(probe: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        BoundaryTracker(nn.Linear(3, 2), probe=probe)


@pytest.mark.parametrize(
    ("layers", "message"),
    [
        (["fc"], "no layers .'fc'.; .* has: 0, 2"),
        (lambda module, name: False, "no layer to look at"),
    ],
    ids=["a name", "a function"],
)
def test_a_choice_of_no_layer_is_refused(layers: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        BoundaryTracker(network("sp"), layers=layers)


def test_parameters_in_the_place_of_a_model_are_refused() -> None:
    with pytest.raises(ValueError, match="nn.Module; got a generator"):
        BoundaryTracker(nn.Linear(3, 2).parameters())


def test_a_model_on_the_meta_device_is_refused() -> None:
    model = nn.Linear(3, 2, device="meta")

    with pytest.raises(ValueError, match="parameters on the meta device have none"):
        BoundaryTracker(model, probe=X)


def test_a_model_without_parameters_has_no_units() -> None:
    with pytest.raises(ValueError, match="no layer to look at"):
        BoundaryTracker(nn.Sequential(nn.ReLU()), probe=torch.zeros(2, 3))


@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors")
def test_a_layer_of_no_units_is_left_out() -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 0))

    tracker = BoundaryTracker(model, probe=torch.zeros(2, 4))

    assert list(tracker.history) == ["0"]


def test_a_quantity_of_the_probe_is_refused_without_one() -> None:
    with pytest.raises(ValueError, match="'dead' is measured on a probe. Give probe="):
        BoundaryTracker(network("sp"), quantities=["rotation_rms", "dead"])
