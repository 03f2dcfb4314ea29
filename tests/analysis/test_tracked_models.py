"""Trackers of models that change, branch, are copied or compiled, or change their inputs."""

import copy
import pickle
import warnings
from collections import OrderedDict
from pathlib import Path

import numpy as np
import pytest
import torch
from function_model import FunctionModel
from numpy.testing import assert_allclose, assert_array_equal
from torch import Tensor, nn
from tracked_networks import TYPE, ZEROS, linear, network, record, train

from geoparam import BoundaryTracker


def test_layers_that_were_replaced_are_an_error_that_names_them() -> None:
    model = network("bn")
    tracker = BoundaryTracker(model, example_inputs=ZEROS)
    tracker.step()

    model[3] = linear(8, 1)

    with pytest.raises(ValueError, match="other modules than when the tracker was built, at 3"):
        tracker.step()


class Cast(nn.Linear):
    """A linear layer with a forward pass of its own, as modded-nanogpt's CastedLinear."""

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.weight.to(x.dtype), self.bias)


def with_cast() -> nn.Sequential:
    return nn.Sequential(linear(3, 8), nn.ReLU(), Cast(8, 8, dtype=TYPE))


def test_layers_with_a_forward_pass_of_their_own_are_left_out_and_named() -> None:
    with pytest.warns(UserWarning, match="'2' .Cast.: a subclass that computes something of its"):
        tracker = BoundaryTracker(with_cast(), example_inputs=ZEROS)

    assert list(tracker.history) == ["0"]


def test_layers_that_the_user_did_not_choose_are_not_warned_of() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        BoundaryTracker(with_cast(), example_inputs=ZEROS, layers=["0"])


def test_a_chosen_layer_with_a_forward_pass_of_its_own_is_refused() -> None:
    with pytest.raises(ValueError, match="no layers .'2'.; .* of their own: '2' .Cast."):
        BoundaryTracker(with_cast(), example_inputs=ZEROS, layers=["2"])


def test_a_model_of_layers_with_forward_passes_of_their_own_is_refused() -> None:
    model = nn.Sequential(Cast(3, 8, dtype=TYPE))

    with pytest.raises(ValueError, match="no layer to look at: .* of their own: '0' .Cast."):
        BoundaryTracker(model, example_inputs=ZEROS)


def test_a_layer_without_a_name_is_recorded() -> None:
    history = record(linear(3, 8), example_inputs=ZEROS, keep="full")

    assert history[""]["rotation"].shape == (1, 8)


def test_a_layer_may_have_the_name_of_a_column() -> None:
    layers = OrderedDict(step=linear(3, 8), act=nn.ReLU(), out=linear(8, 1))

    history = record(nn.Sequential(layers), example_inputs=ZEROS, keep="full")

    assert history["step"]["rotation"].shape == (1, 8)


# Models that change their inputs, or begin in inference mode.


def make_subtracting() -> FunctionModel:
    """Return a model that subtracts one from its input in place.

    Its units are active at an input of 0 and not where one has been subtracted twice.
    """
    model = FunctionModel(lambda m, x: m.layer(x.sub_(1)).relu(), layer=linear(3, 8))
    nn.init.ones_(model.layer.weight)
    nn.init.constant_(model.layer.bias, 4.5)
    return model


def test_a_model_that_changes_its_input_does_not_change_the_probe() -> None:
    probe = torch.zeros(4, 3, dtype=TYPE)

    history = record(make_subtracting(), probe=probe)["layer"]

    assert torch.equal(probe, torch.zeros_like(probe))
    assert history["always_on"] == [8]


class MomentumEncoder(nn.Module):
    """A second encoder that follows the first, as MoCo's forward lets it."""

    def __init__(self, write: str) -> None:
        super().__init__()
        self.query, self.key = nn.Linear(3, 4), nn.Linear(3, 4)
        self.key.requires_grad_(False)
        self.write = write

    def forward(self, x: Tensor) -> Tensor:
        old, new = self.key.weight, self.query.weight
        if self.write == "assign":
            old.data = 0.9 * old.data + 0.1 * new.data
        else:
            with torch.no_grad():
                old.mul_(0.9).add_(new, alpha=0.1)
        return torch.relu(self.query(x)) @ torch.relu(self.key(x)).T


@pytest.mark.parametrize("write", ["assign", "in place"])
def test_a_forward_that_writes_to_parameters_is_said_to_have_changed_them(write: str) -> None:
    with pytest.warns(UserWarning, match="writes to its own parameters, 'key.weight' first"):
        BoundaryTracker(MomentumEncoder(write), probe=torch.randn(5, 3))


def test_a_model_that_changes_its_input_changes_the_first_batch_once() -> None:
    model = make_subtracting()
    tracker = BoundaryTracker(model)
    x = torch.zeros(4, 3, dtype=TYPE)

    model(x)
    tracker.step()

    assert torch.equal(x, -torch.ones_like(x))


def test_the_first_batch_may_come_in_inference_mode() -> None:
    """As where validation comes before training."""
    model = network("bn")
    tracker = BoundaryTracker(model)
    with torch.inference_mode():
        model.eval()(ZEROS)

    train(model.train(), 2, tracker.step)

    assert (tracker.history["0"]["rotation_max"] > 0).all()


# Models that take other steps in some of their calls.


def branch(m: nn.Module, x: Tensor) -> Tensor:
    """Skip the second layer on request, as a router does."""
    h = m.first(x).relu()
    if m.deep:
        h = m.second(h).relu()
    return m.last(h)


def make_branching(deep: bool) -> FunctionModel:
    model = FunctionModel(branch, first=linear(3, 8), second=linear(8, 8), last=linear(8, 1))
    model.deep = deep
    return model


@pytest.fixture
def branched() -> BoundaryTracker:
    """Return the tracker of three steps; in the second one the model takes the other branch."""
    model = make_branching(deep=True)
    tracker = BoundaryTracker(model, probe=torch.randn(16, 3, dtype=TYPE), keep="full")
    tracker.step()
    model.deep = False
    with pytest.warns(UserWarning, match="takes other steps"):
        tracker.step()
    model.deep = True
    tracker.step()
    return tracker


@pytest.mark.parametrize("layer", ["first", "second"])
@pytest.mark.parametrize("quantity", ["dead", "separated_median", "pattern_change", "regions"])
def test_where_the_model_takes_another_branch_the_probe_tells_nothing(
    branched: BoundaryTracker, layer: str, quantity: str
) -> None:
    values = branched.history[layer][quantity]

    assert np.isnan(values).tolist() == [False, True, False]


@pytest.mark.parametrize("layer", ["first", "second"])
def test_where_the_model_takes_another_branch_it_is_unknown_which_units_are_active(
    branched: BoundaryTracker, layer: str
) -> None:
    active = branched.history[layer]["active"]

    assert np.isnan(active).all(axis=1).tolist() == [False, True, False]


@pytest.mark.parametrize("layer", ["first", "second"])
def test_where_the_model_takes_another_branch_rotations_are_known(
    branched: BoundaryTracker, layer: str
) -> None:
    assert_array_equal(branched.history[layer]["rotation_max"], [0, 0, 0])


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("quantity", ["rotation_max", "displacement_max"])
def test_movements_are_those_since_the_last_record_where_the_warning_is_an_error(
    quantity: str,
) -> None:
    model = make_branching(deep=True)
    probe = torch.randn(16, 3, dtype=TYPE)
    tracker = BoundaryTracker(model, probe=probe)
    without_probe = BoundaryTracker(model, example_inputs=probe)

    nn.init.normal_(model.first.weight)
    without_probe.step()
    model.deep = False
    with pytest.raises(UserWarning, match="takes other steps"):
        tracker.step()

    nn.init.normal_(model.first.weight)
    without_probe.step()
    model.deep = True
    tracker.step()

    expected = without_probe.history["first"][quantity]
    assert_array_equal(tracker.history["first"][quantity], expected)


def flatten_or_convolve(m: nn.Module, x: Tensor) -> Tensor:
    """Take one of two branches with the same number of steps, on tensors of other ranks."""
    if m.is_flat:
        return m.linear(x.flatten(1)).relu()
    return m.conv(x).contiguous().relu().mean((2, 3))


def test_another_branch_may_have_tensors_of_other_ranks() -> None:
    model = FunctionModel(flatten_or_convolve, conv=nn.Conv2d(3, 4, 3), linear=nn.Linear(75, 4))
    model.is_flat = False
    tracker = BoundaryTracker(model, probe=torch.randn(2, 3, 5, 5))

    model.is_flat = True
    with pytest.warns(UserWarning, match="takes other steps"):
        tracker.step()

    assert np.isnan(tracker.history["conv"]["dead"]).all()


def route(m: nn.Module, x: Tensor) -> Tensor:
    """Give each of two layers the points on its side of a shift, possibly none."""
    side = x[:, 0] > m.shift
    return torch.cat([m.a(x[side]).relu(), m.b(x[~side]).relu()])


def test_a_layer_that_gets_no_points_has_no_values_from_them() -> None:
    shift = nn.Parameter(torch.zeros((), dtype=TYPE))
    model = FunctionModel(route, shift=shift, a=linear(3, 8), b=linear(3, 8))
    tracker = BoundaryTracker(model, probe=torch.randn(16, 3, dtype=TYPE), keep="full")

    all_points_to_b = 100.0
    for value in (0.0, all_points_to_b, 0.0):
        shift.data.fill_(value)
        tracker.step()

    a, b = tracker.history["a"], tracker.history["b"]
    assert np.isnan(a["dead"]).tolist() == [False, True, False]
    assert np.isnan(b["dead"]).tolist() == [False, False, False]
    assert np.isnan(b["pattern_change"]).all()  # its number of points changes


# Copies, several trackers, autocast and torch.compile.


def test_a_copy_made_before_the_first_batch_is_not_followed(tmp_path: Path) -> None:
    """It would begin a second history in the same file."""
    model = network("sp")
    tracker = BoundaryTracker(model, file=tmp_path / "h.npy")
    average = pickle.loads(pickle.dumps(copy.deepcopy(model)))
    model(ZEROS)
    tracker.step()

    nn.init.zeros_(average[0].weight)
    average(ZEROS)

    assert len(tracker.history.steps) == 1
    assert not model._forward_pre_hooks


def test_a_tracker_that_waits_for_the_first_batch_does_not_disturb_another() -> None:
    probe = torch.randn(16, 3, dtype=TYPE)
    model = network("sp")
    waiting = BoundaryTracker(model)
    tracker = BoundaryTracker(model, probe=probe)
    alone = network("sp")
    tracker_alone = BoundaryTracker(alone, probe=probe)

    def step_both() -> None:
        waiting.step()
        tracker.step()

    train(model, 2, step_both)
    train(alone, 2, tracker_alone.step)

    assert tracker.history.rows.tobytes() == tracker_alone.history.rows.tobytes()
    rotations = tracker_alone.history.table("rotation_max")
    assert_array_equal(waiting.history.table("rotation_max"), rotations)


def test_the_probe_sees_the_weights_after_the_step_also_inside_of_autocast() -> None:
    """Autocast keeps the weights that it has cast for the forward pass."""
    model = nn.Sequential(nn.Linear(3, 8), nn.ReLU())
    probe = torch.randn(16, 3)
    tracker = BoundaryTracker(model, probe=probe)

    with torch.autocast("cpu", dtype=torch.bfloat16):
        model(probe).sum().backward()
        nn.init.zeros_(model[0].weight)
        nn.init.ones_(model[0].bias)
        tracker.step()
        assert torch.is_autocast_cache_enabled()

    assert tracker.history["0"]["always_on"].tolist() == [8]


def compile_eagerly(model: nn.Module) -> nn.Module:
    return torch.compile(model, backend="aot_eager", fullgraph=True)


def assert_same_history(tracker: BoundaryTracker, expected: BoundaryTracker) -> None:
    assert list(tracker.history) == list(expected.history)
    for quantity in ("rotation_max", "displacement_max", "scale_median"):
        assert_allclose(tracker.history["0"][quantity], expected.history["0"][quantity], rtol=1e-8)


@pytest.mark.compile
def test_a_compiled_model_has_the_same_history() -> None:
    """Its first batch is seen outside of the graph."""
    model = network("bn")
    compiled = compile_eagerly(copy.deepcopy(model))
    plain_tracker = BoundaryTracker(model, example_inputs=ZEROS)
    tracker = BoundaryTracker(compiled)

    train(model, 4, plain_tracker.step)
    train(compiled, 4, tracker.step)

    assert_same_history(tracker, plain_tracker)


@pytest.mark.compile
def test_the_model_inside_a_compiled_one_has_the_same_history() -> None:
    model = network("bn")
    inner = copy.deepcopy(model)
    compiled = compile_eagerly(inner)
    plain_tracker = BoundaryTracker(model, example_inputs=ZEROS)
    tracker = BoundaryTracker(inner, example_inputs=ZEROS)

    train(model, 4, plain_tracker.step)
    train(compiled, 4, tracker.step)

    assert_same_history(tracker, plain_tracker)


@pytest.mark.compile
def test_a_compiled_model_that_hides_its_batches_is_an_error_with_advice() -> None:
    model = network("sp")
    tracker = BoundaryTracker(model)
    compiled = compile_eagerly(model)

    with pytest.raises(ValueError, match="example_inputs"):
        train(compiled, 1, tracker.step)
