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
    accelerator = processes.make_accelerator("fp32")
    return TextTraining(make_settings(method, **changes), text(), accelerator)


def assert_same(outcome: Outcome, expected: Outcome) -> None:
    np.testing.assert_equal(without_times(outcome.record), without_times(expected.record))
    np.testing.assert_equal(dict(outcome.curves), dict(expected.curves))


@pytest.mark.parametrize("method", METHODS)
def test_every_method_learns(method: str, tmp_path: Path) -> None:
    outcome = train(make_settings(method, steps=[60], lrs=[0.02]), text(), tmp_path)
    record, curves = outcome.record, outcome.curves
    assert record["outcome"] == "finished" and record["val_loss"] < 0.6 * math.log(256)
    assert curves["train_loss"].shape == (60,) and list(curves["val_step"]) == [20, 40, 60]
    assert record["tokens"] == 60 * 4 * 16


def test_all_methods_see_the_same_windows_and_start_from_the_same_weights() -> None:
    first, second = start("turn"), start("adamw", lrs=[0.1])
    for step in range(3):
        assert torch.equal(first.draw_windows(step), second.draw_windows(step))
    assert not torch.equal(first.draw_windows(0), first.draw_windows(1))
    for name, value in first.model.state_dict().items():
        assert torch.equal(value, second.model.state_dict()[name]), name


def test_windows_are_cut_from_the_text() -> None:
    training = start()
    content = bytes(text().train)
    windows = training.draw_windows(0)
    assert windows.shape == (4, 17)
    assert all(bytes(window.tolist()) in content for window in windows)


def test_the_validation_loss_is_the_mean_over_windows_of_all_the_text() -> None:
    training = start(windows=1000)
    content = torch.tensor(text().val).long()
    count = (len(content) - 1) // 16
    starts = np.linspace(0, len(content) - 17, count).astype(int)
    windows = torch.stack([content[at : at + 17] for at in starts])
    training.model.eval()
    with torch.no_grad():
        logits = training.model(windows[:, :-1])
    expected = F.cross_entropy(logits.flatten(0, 1), windows[:, 1:].flatten())
    assert training.evaluate() == pytest.approx(expected.item(), rel=1e-6)
    assert training.model.training


@pytest.mark.parametrize("method", METHODS)
def test_one_factor_scales_the_rates_of_all_groups(method: str) -> None:
    training = start(method, steps=[10])
    rates = [group["lr"] for group in training.optimizer.param_groups]
    found = []

    def look(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        found.append([group["lr"] for group in optimizer.param_groups])

    training.optimizer.register_step_pre_hook(look)
    while training.step < 10:
        training.train_part()
    for step in range(10):
        factor = find_factor(step, 10, "linear", warmup=0.1)
        assert found[step] == pytest.approx([rate * factor for rate in rates])


@pytest.mark.parametrize("schedule", ["linear", "cosine", "power", "hold"])
def test_rates_rise_in_the_warmup_and_fall_to_the_final_share(schedule: str) -> None:
    factors = [find_factor(s, 100, schedule, warmup=0.1, final=0.1) for s in range(101)]
    assert factors[:10] == pytest.approx([(s + 1) / 10 for s in range(10)])
    assert factors[10] == 1 and factors[100] == pytest.approx(0.1)
    assert all(a >= b for a, b in zip(factors[10:], factors[11:], strict=False))


def test_blocks_are_compiled_as_one(monkeypatch: pytest.MonkeyPatch) -> None:
    graphs = []

    def collect(graph: torch.fx.GraphModule, _: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    compile_module = nn.Module.compile
    collected = functools.partialmethod(compile_module, backend=collect)
    monkeypatch.setattr(nn.Module, "compile", collected)
    compiled, eager = (start(depths=[3], compile=choice) for choice in (True, False))
    for step in range(2):
        for training in (compiled, eager):
            training.train_on(training.draw_windows(step))
    assert len(graphs) == 1
    for p, q in zip(compiled.model.parameters(), eager.model.parameters(), strict=True):
        torch.testing.assert_close(p, q)


def test_ours_is_the_geometric_optimizer_with_its_turn() -> None:
    training = start("turn", turns=[3.0], steps=[20], warmup=0.0)
    assert isinstance(training.optimizer, gp.GeometricOptimizer)
    weight = training.model.blocks[0].up.weight
    before = weight.detach().clone()
    training.train_on(training.draw_windows(0))
    cosines = F.cosine_similarity(weight.detach(), before).clamp(max=1)
    turn = cosines.acos().square().mean().sqrt().rad2deg().item()
    assert turn == pytest.approx(3.0, rel=0.05)


@pytest.mark.parametrize("coordinates", ["intrinsic", "angles"])
def test_without_a_turn_the_rest_has_its_own_rate(coordinates: str) -> None:
    options: dict[str, Any] = {"base": "adamw", "coordinates": coordinates, "warmup": 0.0}
    training = start("geometric", lrs=[0.02], rest_lrs=[0.003], **options)
    weight = training.model.head.weight
    before = weight.detach().clone()
    training.train_on(training.draw_windows(0))
    change = (weight.detach() - before).abs()
    assert change.median().item() == pytest.approx(0.003, rel=0.01)  # Adam's first step


def test_hidden_matrices_are_the_rivals_and_the_rest_is_adamws() -> None:
    model = preparation.build(make_settings("muon"))
    optimizer = preparation.make_optimizer(make_settings("muon"), model)
    first, matrices, gains = optimizer.param_groups
    assert {id(p) for p in first["params"]} == {id(p) for p in model.hidden_weights()}
    rest = {id(p) for p in (model.token.weight, model.position.weight, model.head.weight)}
    assert {id(p) for p in matrices["params"]} == rest
    assert all(p.ndim == 1 for p in gains["params"])
    assert (first["lr"], first["weight_decay"], matrices["lr"]) == (0.02, 0.1, 0.01)


def test_gradients_are_clipped() -> None:
    training = start("adamw", clip=1e-3)
    norms: list[float] = []

    def look(*_: Any) -> None:
        gradients = [p.grad.flatten() for p in training.model.parameters()]
        norms.append(torch.cat(gradients).norm().item())

    training.optimizer.register_step_pre_hook(look)
    training.train_on(training.draw_windows(0))
    assert norms == pytest.approx([1e-3], rel=1e-3)


@pytest.mark.parametrize("method", METHODS)
def test_a_killed_run_goes_on_to_the_same_numbers(
    method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loop, "CHECKPOINT_EVERY", 0.0)
    settings = make_settings(method, dropout=0.2, schedules=["cosine"])
    expected = train(settings, text(), tmp_path / "whole")
    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(TextTraining, "train_on", kill_at(6, TextTraining.train_on, die))
        train(settings, text(), tmp_path / "parts")
    assert (tmp_path / "parts" / run_checkpoints.CHECKPOINT).exists()
    torch.manual_seed(9)  # another process
    assert_same(train(settings, text(), tmp_path / "parts"), expected)


def test_the_checkpoint_of_another_run_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loop, "CHECKPOINT_EVERY", 0.0)
    train(make_settings(), text(), tmp_path)
    with pytest.raises(ValueError, match="is not of this run"):
        train(make_settings(steps=[12]), text(), tmp_path)


def test_a_run_that_diverges_ends_with_nan(tmp_path: Path) -> None:
    record = train(
        make_settings("adamw", lrs=[1e20], steps=[60], clip=0.0), text(), tmp_path
    ).record
    assert record["outcome"] == "diverged" and math.isnan(record["val_loss"])
