"""Training stacks: schedulers, scaling, Accelerate, Lightning, transformers' Trainer."""

from pathlib import Path
from typing import Any

import pytest
import torch
from plain_models import assert_same_weights, backward, every_kind, mlp, start
from torch import Tensor, nn
from torch.optim import lr_scheduler
from torch.utils.data import DataLoader
from training_stacks import Fit


@every_kind
def test_schedules_scaling_clipping_and_closures_work_as_ever(kind: str) -> None:
    (model, optimizer), (other, same) = start(kind), start(kind)
    cycles = {"total_steps": 9, "cycle_momentum": kind in ("SGD", "angles", "turn")}
    schedule = lr_scheduler.OneCycleLR(optimizer, [0.3, 0.1], **cycles)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=100)
    for step in range(5):
        for group, its in zip(optimizer.param_groups, same.param_groups, strict=True):
            its.update({k: group[k] for k in ("lr", "momentum", "betas") if k in its})
        backward(model, step, scaler.get_scale())
        model[3].weight.grad[0, 0] += torch.inf if step == 1 else 0  # this step is skipped
        scaler.scale(torch.ones(()))
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1e6)
        scaler.step(optimizer)
        scaler.update()
        assert step == 1 or same.step(lambda step=step: backward(other, step)).isfinite()
        schedule.step()
    assert_same_weights(model, other)


class WithLoss(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.net, self.its_optimizer = start(kind, lambda _: mlp(torch.float32))

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        return {"loss": nn.functional.cross_entropy(self.net(x), labels)}


POINTS = [{"x": torch.arange(6).mul(i + 1.0).sin(), "labels": i % 3} for i in range(8)]


def test_trainers_factory_takes_rate_and_decay_of_its_arguments(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    Geometric = pytest.importorskip("geoparam.integrations.transformers").Geometric
    args = transformers.TrainingArguments(str(tmp_path), weight_decay=0.3, learning_rate=0.02)
    choice = Geometric, {"base": torch.optim.AdamW, "args": args}
    trainer = transformers.Trainer(mlp(), args, optimizer_cls_and_kwargs=choice)
    found = [(g["lr"], g["weight_decay"]) for g in trainer.create_optimizer().param_groups]
    assert found == [(0.02, 0.0), (0.02, 0.3)]


@pytest.mark.parametrize("kind", ["Adam", "angles", "turn"])
@pytest.mark.parametrize("run", [Fit.by_accelerate, Fit.by_lightning, Fit.by_trainer])
def test_a_second_epoch_goes_on_from_a_file(run: Any, kind: str, tmp_path: Path) -> None:
    expected = WithLoss(kind)
    for part in [*DataLoader(POINTS, batch_size=2)] * 2:
        expected.zero_grad()
        expected(**part)["loss"].backward()
        expected.its_optimizer.step()
    for epochs in (1, 2):
        model = WithLoss(kind)
        run(Fit(model, model.its_optimizer, POINTS, tmp_path, epochs))
    assert_same_weights(model.net, expected.net)
