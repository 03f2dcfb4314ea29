"""Trackers of models that change, branch, are copied or compiled, or change their inputs."""

import copy
import pickle
from collections import OrderedDict
from pathlib import Path

import numpy as np
import pytest
import torch
from function_model import FunctionModel
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


def test_layers_with_a_forward_pass_of_their_own_are_left_out_and_named() -> None:
    model = nn.Sequential(linear(3, 8), nn.ReLU(), Cast(8, 8, dtype=TYPE))
    with pytest.warns(UserWarning, match="'2' .Cast.: a subclass that computes something of its"):
        BoundaryTracker(model, example_inputs=ZEROS)
    BoundaryTracker(model, example_inputs=ZEROS, layers=["0"])  # the user's choice: no warning
    with pytest.raises(ValueError, match="no layers .'2'.; .* of their own: '2' .Cast."):
        BoundaryTracker(model, example_inputs=ZEROS, layers=["2"])
    with pytest.raises(ValueError, match="no layer to look at: .* of their own: '0' .Cast."):
        BoundaryTracker(nn.Sequential(Cast(3, 8, dtype=TYPE)), example_inputs=ZEROS)


def test_a_layer_may_have_no_name_or_that_of_a_column() -> None:
    named = nn.Sequential(OrderedDict(step=linear(3, 8), act=nn.ReLU(), out=linear(8, 1)))
    for model, name in ((linear(3, 8), ""), (named, "step")):
        history = record(model, example_inputs=ZEROS, keep="full")
        assert history[name]["rotation"].shape == (1, 8)


def test_a_model_that_changes_its_input_changes_neither_the_probe_nor_the_first_batch() -> None:
    model = FunctionModel(lambda m, x: m.layer(x.sub_(1)).relu(), layer=linear(3, 8))
    nn.init.ones_(model.layer.weight)
    nn.init.constant_(model.layer.bias, 4.5)  # active at -1, the probe's value, and not at -2
    x = torch.zeros(4, 3, dtype=TYPE)
    history = record(model, probe=x)["layer"]
    assert torch.equal(x, torch.zeros_like(x))
    assert history["always_on"] == [8]
    first = BoundaryTracker(model)
    model(x)
    first.step()
    assert torch.equal(x, -torch.ones_like(x))


def test_it_may_begin_in_inference_mode_as_where_validation_comes_first() -> None:
    model = network("bn")
    tracker = BoundaryTracker(model)
    with torch.inference_mode():
        model.eval()(torch.zeros(2, 3, dtype=TYPE))
    train(model.train(), 2, tracker.step)
    assert (tracker.history["0"]["rotation_max"] > 0).all()


def branch(m: nn.Module, x: Tensor) -> Tensor:
    """Skip the second layer on request, as a router does."""
    h = m.first(x).relu()
    return m.last(m.second(h).relu() if m.deep else h)


def test_where_the_model_takes_another_way_the_probe_tells_nothing() -> None:
    layers = {"first": linear(3, 8), "second": linear(8, 8), "last": linear(8, 1)}
    model = FunctionModel(branch, **layers)
    model.deep = True
    tracker = BoundaryTracker(model, probe=torch.randn(16, 3, dtype=TYPE), keep="full")
    tracker.step()
    model.deep = False
    with pytest.warns(UserWarning, match="takes other steps"):
        tracker.step()
    model.deep = True
    tracker.step()
    for layer in ("first", "second"):
        history = tracker.history[layer]
        for quantity in ("dead", "separated_median", "pattern_change", "regions"):
            assert np.isnan(history[quantity]).tolist() == [False, True, False]
        assert np.isnan(history["active"]).all(1).tolist() == [False, True, False]
        np.testing.assert_array_equal(history["rotation_max"], [0, 0, 0])


@pytest.mark.filterwarnings("error")
def test_turns_are_those_since_the_last_record_where_that_warning_is_an_error() -> None:
    layers = {"first": linear(3, 8), "second": linear(8, 8), "last": linear(8, 1)}
    model = FunctionModel(branch, **layers)
    model.deep = True
    probe = torch.randn(16, 3, dtype=TYPE)
    tracker = BoundaryTracker(model, probe=probe)
    plain = BoundaryTracker(model, example_inputs=probe)
    for deep in (False, True):
        nn.init.normal_(model.first.weight)
        plain.step()
        model.deep = deep
        if deep:
            tracker.step()
        else:
            with pytest.raises(UserWarning, match="takes other steps"):
                tracker.step()
    for quantity in ("rotation_max", "displacement_max"):
        expected = plain.history["first"][quantity]
        np.testing.assert_array_equal(tracker.history["first"][quantity], expected)


def flatten_or_convolve(m: nn.Module, x: Tensor) -> Tensor:
    """Take a way on which the same numbers of steps have tensors of other ranks."""
    if m.is_flat:
        return m.linear(x.flatten(1)).relu()
    return m.conv(x).contiguous().relu().mean((2, 3))


def test_another_way_may_have_tensors_of_other_ranks() -> None:
    members = {"conv": nn.Conv2d(3, 4, 3), "linear": nn.Linear(75, 4)}
    model = FunctionModel(flatten_or_convolve, **members)
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


def test_a_layer_that_gets_no_points_has_no_numbers_from_them() -> None:
    shift = nn.Parameter(torch.zeros((), dtype=TYPE))
    model = FunctionModel(route, shift=shift, a=linear(3, 8), b=linear(3, 8))
    tracker = BoundaryTracker(model, probe=torch.randn(16, 3, dtype=TYPE), keep="full")
    for value in (0.0, 100.0, 0.0):  # then layer b has all points, and a pattern
        shift.data.fill_(value)
        tracker.step()
    assert np.isnan(tracker.history["a"]["dead"]).tolist() == [False, True, False]
    assert np.isnan(tracker.history["b"]["dead"]).tolist() == [False, False, False]
    assert np.isnan(tracker.history["b"]["pattern_change"]).all()


def test_a_copy_made_before_the_first_batch_is_not_followed(tmp_path: Path) -> None:
    model = network("sp")
    tracker = BoundaryTracker(model, file=tmp_path / "h.npy")
    average = pickle.loads(pickle.dumps(copy.deepcopy(model)))
    model(ZEROS)
    tracker.step()
    nn.init.zeros_(average[0].weight)
    average(ZEROS)  # would begin a second history in the same file
    assert len(tracker.history.steps) == 1 and not model._forward_pre_hooks


def test_a_tracker_that_waits_for_the_first_batch_is_no_step_of_another_one() -> None:
    model, alone = network("sp"), network("sp")
    probe = torch.randn(16, 3, dtype=TYPE)
    waiting = BoundaryTracker(model)
    trackers = [BoundaryTracker(each, probe=probe) for each in (model, alone)]
    train(model, 2, lambda: [tracker.step() for tracker in (waiting, trackers[0])])
    train(alone, 2, trackers[1].step)
    both = (tracker.history.rows.tobytes() for tracker in trackers)
    assert next(both) == next(both)
    np.testing.assert_array_equal(
        waiting.history.table("rotation_max"), trackers[1].history.table("rotation_max")
    )


def test_the_probe_sees_the_weights_after_the_step_also_inside_of_autocast() -> None:
    """Autocast keeps the weights that it has cast for the forward pass."""
    model, probe = nn.Sequential(nn.Linear(3, 8), nn.ReLU()), torch.randn(16, 3)
    tracker = BoundaryTracker(model, probe=probe)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        model(probe).sum().backward()
        nn.init.zeros_(model[0].weight)
        nn.init.ones_(model[0].bias)
        tracker.step()
        assert torch.is_autocast_cache_enabled()
    assert tracker.history["0"]["always_on"].tolist() == [8]


@pytest.mark.compile
@pytest.mark.parametrize("inner", [False, True], ids=["compiled", "inner"])
def test_a_compiled_model_has_the_same_history(inner: bool) -> None:
    model = network("bn")
    compiled_one = copy.deepcopy(model)
    compiled = torch.compile(compiled_one, backend="aot_eager", fullgraph=True)
    plain = BoundaryTracker(model, example_inputs=ZEROS)
    seen = {"example_inputs": ZEROS} if inner else {}  # else the first batch, outside of the graph
    tracker = BoundaryTracker(compiled_one if inner else compiled, **seen)
    train(model, 4, plain.step)
    train(compiled, 4, tracker.step)
    assert list(tracker.history) == ["0", "3"]
    for quantity in ("rotation_max", "displacement_max", "scale_median"):
        expected = plain.history["0"][quantity]
        np.testing.assert_allclose(tracker.history["0"][quantity], expected, rtol=1e-8)


@pytest.mark.compile
def test_a_compiled_model_that_hides_its_batches_is_an_error_with_advice() -> None:
    model = network("sp")
    tracker = BoundaryTracker(model)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    with pytest.raises(ValueError, match="example_inputs"):
        train(compiled, 1, tracker.step)
