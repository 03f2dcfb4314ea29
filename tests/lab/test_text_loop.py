"""Training on text: windows, evaluation, schedules, methods, and going on after a kill."""

import functools
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from image_runs import Killed, die, kill_at, without_times
from text_runs import make_settings, text
from torch import nn
from torch.nn import functional as F

import geoparam as gp
from geoparam_lab.training import processes, run_checkpoints
from geoparam_lab.training.network_training import Outcome
from geoparam_lab.training.schedules import find_factor
from geoparam_lab.training.text import loop, preparation
from geoparam_lab.training.text.loop import TextTraining, train
from geoparam_lab.training.text.settings import METHODS

pytest.importorskip("accelerate")
pytestmark = pytest.mark.usefixtures("fresh_accelerate")


def start(method: str = "turn", **changes: Any) -> TextTraining:
    """A training of a small network before its first step."""
    accelerator = processes.make_accelerator("fp32")
    return TextTraining(make_settings(method, **changes), text(), accelerator)


def train_one_step(training: TextTraining, step: int = 0) -> None:
    training.train_on(training.draw_windows(step))


def assert_same(outcome: Outcome, expected: Outcome) -> None:
    np.testing.assert_equal(without_times(outcome.record), without_times(expected.record))
    np.testing.assert_equal(dict(outcome.curves), dict(expected.curves))


@pytest.mark.parametrize("method", METHODS)
def test_every_method_learns(method: str, tmp_path: Path) -> None:
    outcome = train(make_settings(method, steps=[60], lrs=[0.02]), text(), tmp_path)

    assert outcome.record["outcome"] == "finished"
    assert outcome.record["val_loss"] < 0.6 * math.log(256)
    assert outcome.record["tokens"] == 60 * 4 * 16
    assert outcome.curves["train_loss"].shape == (60,)
    assert list(outcome.curves["val_step"]) == [20, 40, 60]


def test_all_methods_see_the_same_windows() -> None:
    turn, adamw = start("turn"), start("adamw", lrs=[0.1])

    for step in range(3):
        assert torch.equal(turn.draw_windows(step), adamw.draw_windows(step))


def test_each_step_has_windows_of_its_own() -> None:
    training = start()

    assert not torch.equal(training.draw_windows(0), training.draw_windows(1))


def test_all_methods_start_from_the_same_weights() -> None:
    turn, adamw = start("turn"), start("adamw", lrs=[0.1])

    expected = adamw.model.state_dict()
    for name, value in turn.model.state_dict().items():
        assert torch.equal(value, expected[name]), name


def test_windows_are_cut_from_the_text() -> None:
    content = bytes(text().train)

    windows = start().draw_windows(0)

    assert windows.shape == (4, 17)
    for window in windows:
        assert bytes(window.tolist()) in content


def test_the_validation_loss_is_the_mean_over_windows_of_all_the_text() -> None:
    training = start(windows=1000)

    loss = training.evaluate()

    content = torch.tensor(text().val).long()
    count = (len(content) - 1) // 16
    starts = np.linspace(0, len(content) - 17, count).astype(int)
    windows = torch.stack([content[i : i + 17] for i in starts])
    inputs, targets = windows[:, :-1], windows[:, 1:]
    with torch.no_grad():
        logits = training.model.eval()(inputs)
    expected = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
    assert loss == pytest.approx(expected.item(), rel=1e-6)


def test_the_model_is_in_training_after_an_evaluation() -> None:
    training = start()

    training.evaluate()

    assert training.model.training


@pytest.mark.parametrize("method", METHODS)
def test_one_factor_scales_the_rates_of_all_groups(method: str) -> None:
    training = start(method, steps=[10])
    peak_rates = [group["lr"] for group in training.optimizer.param_groups]
    rates_by_step = []

    def record_rates(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        rates_by_step.append([group["lr"] for group in optimizer.param_groups])

    training.optimizer.register_step_pre_hook(record_rates)
    while training.step < 10:
        training.train_part()

    for step in range(10):
        factor = find_factor(step, 10, "linear", warmup=0.1)
        expected = [rate * factor for rate in peak_rates]
        assert rates_by_step[step] == pytest.approx(expected)


each_schedule = pytest.mark.parametrize("schedule", ["linear", "cosine", "power", "hold"])


@each_schedule
def test_rates_rise_along_a_line_in_the_warmup(schedule: str) -> None:
    factors = [find_factor(step, 100, schedule, warmup=0.1, final=0.1) for step in range(11)]

    assert factors == pytest.approx([0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1, 1])


@each_schedule
def test_rates_fall_from_the_warmup_to_the_final_share(schedule: str) -> None:
    factors = [find_factor(step, 100, schedule, warmup=0.1, final=0.1) for step in range(10, 101)]

    assert factors[0] == 1
    assert factors[-1] == pytest.approx(0.1)
    assert factors == sorted(factors, reverse=True)


def test_blocks_are_compiled_as_one(monkeypatch: pytest.MonkeyPatch) -> None:
    graphs = []

    def collect_graph(graph: torch.fx.GraphModule, _: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    compile_ = functools.partialmethod(nn.Module.compile, backend=collect_graph)
    monkeypatch.setattr(nn.Module, "compile", compile_)
    compiled = start(depths=[3], compile=True)
    eager = start(depths=[3], compile=False)

    for step in range(2):
        train_one_step(compiled, step)
        train_one_step(eager, step)

    assert len(graphs) == 1
    torch.testing.assert_close(list(compiled.model.parameters()), list(eager.model.parameters()))


def test_ours_is_the_geometric_optimizer_with_its_turn() -> None:
    training = start("turn", turns=[3.0], steps=[20], warmup=0.0)
    weight = training.model.blocks[0].up.weight
    before = weight.detach().clone()

    train_one_step(training)

    assert isinstance(training.optimizer, gp.GeometricOptimizer)
    turns = F.cosine_similarity(weight.detach(), before).clamp(max=1).acos()
    turn = turns.square().mean().sqrt().rad2deg().item()
    assert turn == pytest.approx(3.0, rel=0.05)


@pytest.mark.parametrize("coordinates", ["intrinsic", "angles"])
def test_without_a_turn_the_other_parameters_have_their_own_rate(coordinates: str) -> None:
    training = start(
        "geometric",
        lrs=[0.02],
        rest_lrs=[0.003],
        base="adamw",
        coordinates=coordinates,
        warmup=0.0,
    )
    weight = training.model.head.weight
    before = weight.detach().clone()

    train_one_step(training)

    change = (weight.detach() - before).abs()
    assert change.median().item() == pytest.approx(0.003, rel=0.01)  # Adam's first step


def test_hidden_matrices_are_the_rivals_and_the_others_adamws() -> None:
    settings = make_settings("muon")
    model = preparation.build(settings)

    optimizer = preparation.make_optimizer(settings, model)

    hidden, matrices, gains = optimizer.param_groups
    embeddings_and_head = [model.token.weight, model.position.weight, model.head.weight]
    assert set(hidden["params"]) == set(model.hidden_weights())
    assert set(matrices["params"]) == set(embeddings_and_head)
    assert {gain.ndim for gain in gains["params"]} == {1}
    assert hidden["lr"] == 0.02
    assert hidden["weight_decay"] == 0.1
    assert matrices["lr"] == 0.01


def test_gradients_are_clipped() -> None:
    training = start("adamw", clip=1e-3)
    norms = []

    def record_norm(*_: Any) -> None:
        gradients = [p.grad for p in training.model.parameters()]
        norms.append(nn.utils.get_total_norm(gradients).item())

    training.optimizer.register_step_pre_hook(record_norm)
    train_one_step(training)

    assert norms == pytest.approx([1e-3], rel=1e-3)


@pytest.fixture
def save_every_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop, "CHECKPOINT_EVERY", 0.0)


TWO_METHODS = ["turn", "muon"]
OTHERS = [
    pytest.param(name, marks=pytest.mark.slow) for name in METHODS if name not in TWO_METHODS
]


@pytest.mark.usefixtures("save_every_step")
@pytest.mark.parametrize("method", [*TWO_METHODS, *OTHERS])
def test_a_killed_run_goes_on_to_the_same_numbers(
    method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = make_settings(method, dropout=0.2, schedules=["cosine"])
    killed = tmp_path / "killed"
    expected = train(settings, text(), tmp_path / "whole")

    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(TextTraining, "train_on", kill_at(6, TextTraining.train_on, die))
        train(settings, text(), killed)
    assert (killed / run_checkpoints.CHECKPOINT).exists()
    torch.manual_seed(9)  # another process
    resumed = train(settings, text(), killed)

    assert_same(resumed, expected)


@pytest.mark.usefixtures("save_every_step")
def test_the_checkpoint_of_another_run_is_refused(tmp_path: Path) -> None:
    train(make_settings(), text(), tmp_path)

    with pytest.raises(ValueError, match="is not of this run"):
        train(make_settings(steps=[12]), text(), tmp_path)


def test_a_run_that_diverges_ends_with_nan(tmp_path: Path) -> None:
    settings = make_settings("adamw", lrs=[1e20], steps=[60], clip=0.0)

    record = train(settings, text(), tmp_path).record

    assert record["outcome"] == "diverged"
    assert math.isnan(record["val_loss"])
