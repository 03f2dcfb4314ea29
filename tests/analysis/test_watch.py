"""The tracker in one line: called by the optimizer, written to any log."""

import copy
import logging
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from numpy.testing import assert_allclose, assert_array_equal
from torch import nn, optim

import geoparam as gp


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 6), nn.ReLU(), nn.Linear(6, 1))


def train(model: nn.Module, optimizer: Any, steps: int) -> None:
    torch.manual_seed(1)
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randn(4, 3)).square().mean().backward()
        optimizer.step()


def train_scaled(
    model: nn.Module, optimizer: optim.Optimizer, steps: int, scaler: torch.amp.GradScaler
) -> None:
    for _ in range(steps):
        optimizer.zero_grad()
        loss = model(torch.randn(4, 3)).square().mean()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()


def sgd(model: nn.Module) -> optim.Optimizer:
    return optim.SGD(model.parameters(), lr=0.1)


def adam(model: nn.Module) -> optim.Optimizer:
    return optim.Adam(model.parameters(), lr=1e-2)


def geometric(model: nn.Module) -> optim.Optimizer:
    return gp.GeometricOptimizer(model, optim.SGD, turn=1.0, lr=0.1)


def watch_run(steps: int = 4, **options: Any) -> gp.BoundaryTracker:
    """Return the tracker of a network that was trained for some steps."""
    model = network()
    optimizer = sgd(model)
    tracker = gp.watch(model, optimizer, **options)
    train(model, optimizer, steps)
    return tracker


PROBE = torch.randn(8, 3, generator=torch.Generator().manual_seed(2))


class Writer:
    """Has TensorBoard's method."""

    def __init__(self) -> None:
        self.scalars: dict[tuple[int, str], float] = {}

    def add_scalar(self, tag: str, value: float, step: int) -> None:
        self.scalars[step, tag] = value


class Run(Writer):
    """Has W&B's method."""

    add_scalar = None  # type: ignore[assignment]

    def log(self, values: dict[str, float], step: int) -> None:
        self.scalars |= {(step, tag): value for tag, value in values.items()}


class Logger(Run):
    """Has the method of Lightning's loggers."""

    log = None  # type: ignore[assignment]

    def log_metrics(self, values: dict[str, float], step: int | None = None) -> None:
        assert step is not None
        Run.log(self, values, step)


def train_epochs(
    model: nn.Module, optimizer: optim.Optimizer, after: Callable[[], None] = lambda: None
) -> None:
    """Take four steps under a schedule, and call a function after each."""
    schedule = optim.lr_scheduler.StepLR(optimizer, 2)
    for _ in range(4):
        train(model, optimizer, 1)
        schedule.step()
        after()


@pytest.mark.parametrize("make_optimizer", [adam, geometric])
def test_the_optimizer_calls_the_tracker(
    make_optimizer: Callable[[nn.Module], optim.Optimizer],
) -> None:
    watched = network()
    optimizer = make_optimizer(watched)
    tracker = gp.watch(watched, optimizer, probe=PROBE)
    train_epochs(watched, optimizer)

    model = network()
    tracker_by_hand = gp.BoundaryTracker(model, probe=PROBE)
    train_epochs(model, make_optimizer(model), after=tracker_by_hand.step)

    assert tracker.history.rows.tobytes() == tracker_by_hand.history.rows.tobytes()


def test_records_come_every_few_steps() -> None:
    tracker = watch_run(7, probe=PROBE, every=3)

    assert tracker.history.steps.tolist() == [3, 6]


def test_the_probe_runs_only_for_records() -> None:
    model = network()
    optimizer = sgd(model)
    gp.watch(model, optimizer, probe=PROBE, every=3)
    runs = []
    model.register_forward_hook(lambda *_: runs.append(1))

    train(model, optimizer, 7)

    records = 2
    assert len(runs) == 7 + records


@pytest.mark.parametrize("kind", [Writer, Run, Logger])
def test_a_log_gets_scalars_by_quantity_and_layer(kind: type[Writer]) -> None:
    log = kind()

    history = watch_run(2, log=log, probe=PROBE, quantities=["rotation_rms", "dead"]).history

    assert {tag for _, tag in log.scalars} == {
        "rotation_rms/0",
        "rotation_rms/2",
        "rotation_rms/(network)",
        "dead/0",
        "dead/(network)",
    }
    logged = [log.scalars[step, "rotation_rms/0"] for step in (1, 2)]
    assert_array_equal(logged, history["0"]["rotation_rms"])


def test_tensorboard_reads_the_scalars(tmp_path: Path) -> None:
    tensorboard = pytest.importorskip("torch.utils.tensorboard")
    with tensorboard.SummaryWriter(tmp_path) as writer:
        tracker = watch_run(3, log=writer)

    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(tmp_path)).Reload().Scalars("rotation_max/0")
    values = [event.value for event in events]
    assert_allclose(values, tracker.history["0"]["rotation_max"], rtol=1e-6)


@pytest.mark.parametrize(
    "log", [3, "run.csv", True, nn.Linear(1, 1), logging.getLogger(), Writer, []]
)
def test_a_wrong_log_is_refused_in_words(log: Any) -> None:
    with pytest.raises(ValueError, match=r"log is an object with add_scalar .*; got "):
        watch_run(log=log)


def test_quantities_are_chosen_by_name() -> None:
    history = watch_run(quantities=["scale", "rotation_rms"]).history

    assert history.quantities[:3] == ("scale_min", "scale_median", "scale_max")
    assert "rotation_rms" in history.quantities
    assert "dead" not in history.quantities


def test_an_unknown_quantity_is_an_error_that_names_those_there_are() -> None:
    with pytest.raises(ValueError, match="no quantity 'rotations'; there are: rotation_max, "):
        watch_run(quantities=["rotations"])


def test_quantities_must_not_be_empty() -> None:
    with pytest.raises(ValueError, match="must not be empty"):
        watch_run(quantities=[])


def test_steps_that_a_scaler_skips_do_not_count() -> None:
    model = network()
    optimizer = sgd(model)
    tracker = gp.watch(model, optimizer, example_inputs=PROBE)

    overflowing = torch.amp.GradScaler("cpu", init_scale=1e38, growth_interval=100)
    hook = model[0].weight.register_hook(lambda grad: grad * torch.inf)
    train_scaled(model, optimizer, 2, overflowing)
    hook.remove()
    train_scaled(model, optimizer, 3, torch.amp.GradScaler("cpu", init_scale=2.0))

    assert tracker.history.steps.tolist() == [1, 2, 3]


def test_closing_removes_the_hook() -> None:
    model = network()
    optimizer = sgd(model)
    tracker = gp.watch(model, optimizer, example_inputs=PROBE)
    train(model, optimizer, 2)

    tracker.close()
    train(model, optimizer, 2)

    assert tracker.history.steps.tolist() == [1, 2]
    assert not optimizer._optimizer_step_post_hooks


def pickle_and_load(models: Any) -> Any:
    return pickle.loads(pickle.dumps(models))


@pytest.mark.parametrize("make_optimizer", [adam, geometric])
@pytest.mark.parametrize("make_copy", [copy.deepcopy, pickle_and_load])
def test_a_copy_of_the_optimizer_is_not_watched(
    make_optimizer: Callable[[nn.Module], optim.Optimizer], make_copy: Callable[[Any], Any]
) -> None:
    model = network()
    optimizer = make_optimizer(model)
    tracker = gp.watch(model, optimizer, example_inputs=PROBE)

    copied_model, copied_optimizer = make_copy((model, optimizer))
    train(copied_model, copied_optimizer, 1)
    train(model, optimizer, 2)

    assert tracker.history.steps.tolist() == [1, 2]


def test_only_an_optimizer_can_be_watched() -> None:
    model = network()

    with pytest.raises(ValueError, match="watch needs the optimizer that steps the model; got "):
        gp.watch(model, model.parameters())  # type: ignore[arg-type]


def test_an_optimizer_that_accelerate_wrapped_is_watched() -> None:
    accelerate = pytest.importorskip("accelerate")
    model = network()
    optimizer = accelerate.Accelerator(cpu=True).prepare(sgd(model))
    tracker = gp.watch(model, optimizer, example_inputs=PROBE)

    train(model, optimizer, 2)

    assert tracker.history.steps.tolist() == [1, 2]


def test_an_optimizer_of_another_model_is_warned_of() -> None:
    optimizer = sgd(network())

    with pytest.warns(UserWarning, match="has none of the model's parameters"):
        gp.watch(network(), optimizer)


def test_a_heatmap_without_records_is_refused() -> None:
    tracker = gp.BoundaryTracker(network(), probe=PROBE)

    with pytest.raises(ValueError, match="no records"):
        tracker.history.heatmap("dead")


class Unreachable(Run):
    """Cannot be reached in the second step."""

    tracker: gp.BoundaryTracker

    def log(self, values: dict[str, float], step: int) -> None:
        if len(self.tracker.history.steps) == 2:
            raise OSError("no network")
        super().log(values, step)


def test_what_a_log_did_not_take_is_sent_with_the_next_record() -> None:
    model = network()
    optimizer = sgd(model)
    log = Unreachable()
    log.tracker = gp.watch(model, optimizer, log=log, example_inputs=PROBE)

    train(model, optimizer, 1)
    with pytest.raises(OSError, match="no network"):
        train(model, optimizer, 1)
    train(model, optimizer, 1)

    history = log.tracker.history
    assert history.steps.tolist() == [1, 2, 3]
    logged = [log.scalars[step, "rotation_rms/0"] for step in (1, 2, 3)]
    assert_array_equal(logged, history["0"]["rotation_rms"])


def test_other_processes_leave_the_log_to_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 1)
    log = Run()
    tracker = gp.BoundaryTracker(network(), probe=PROBE, log=log)

    tracker.step()

    assert not log.scalars


def test_a_plot_has_the_layers_that_are_named() -> None:
    pytest.importorskip("matplotlib")
    history = watch_run(probe=PROBE).history

    lines = history.plot("dead", layers="0").lines

    assert [line.get_label() for line in lines] == ["0"]


def test_quantities_of_units_cannot_be_plotted() -> None:
    pytest.importorskip("matplotlib")
    history = watch_run(keep="full", probe=PROBE).history

    with pytest.raises(ValueError, match="no quantity 'rotation'; there are: rotation_max"):
        history.plot("rotation")
