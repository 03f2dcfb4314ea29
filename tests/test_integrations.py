"""Accelerate, Lightning and transformers' Trainer: optimizers and trackers do there as by hand."""

import csv
import functools
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from plain_models import (
    assert_same_weights,
    find_angles,
    mlp,
    rms,
    rows,
    start,
    step_and_find_angles,
    train,
)
from torch import Tensor, nn, optim
from torch.utils.data import DataLoader

import geoparam as gp

STEPS = 4


class WithLoss(nn.Module):
    """Takes what a point holds and returns its loss, as transformers' models do."""

    def __init__(self, net: nn.Module, loss: Any = F.mse_loss) -> None:
        super().__init__()
        self.net, self.loss = net, loss

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        return {"loss": self.loss(self.net(x), labels)}


@dataclass
class Fit:
    """One training in batches of two: each method runs it, and leaves a checkpoint in `folder`.

    With more than one epoch it goes on from the checkpoint there, for the last epoch.
    """

    model: nn.Module
    optimizer: optim.Optimizer
    points: Any
    folder: Path
    epochs: int = 1

    def by_accelerate(self) -> None:
        accelerator = pytest.importorskip("accelerate").Accelerator(cpu=True)
        run, optimizer = accelerator.prepare(self.model, self.optimizer)
        if self.epochs > 1:
            accelerator.load_state(self.folder)
        for batch in DataLoader(self.points, batch_size=2):
            optimizer.zero_grad()
            accelerator.backward(run(**batch)["loss"])
            optimizer.step()
        accelerator.save_state(self.folder)

    def by_lightning(self, **options: Any) -> None:
        pl = pytest.importorskip("lightning.pytorch")
        extras = "progress_bar", "model_summary", "checkpointing"
        options |= {f"enable_{name}": False for name in extras}
        options = {"logger": False, **options}
        options |= {"default_root_dir": self.folder, "accelerator": "cpu"}
        module, path = pl.LightningModule(), self.folder / "last.ckpt"
        module.model = self.model
        module.training_step = lambda batch, batch_idx: self.model(**batch)["loss"]
        module.configure_optimizers = lambda: self.optimizer
        trainer = pl.Trainer(max_epochs=self.epochs, **options)
        batches = DataLoader(self.points, batch_size=2)
        start = path if self.epochs > 1 else None
        trainer.fit(module, batches, ckpt_path=start, weights_only=True)
        trainer.save_checkpoint(path)

    def by_trainer(self, **options: Any) -> None:
        transformers = pytest.importorskip("transformers")
        chosen = {"max_grad_norm": 0, "report_to": [], "disable_tqdm": True, "use_cpu": True}
        chosen |= {"train_sampling_strategy": "sequential", "save_strategy": "epoch"}
        chosen |= {"per_device_train_batch_size": 2, "num_train_epochs": self.epochs}
        arguments = transformers.TrainingArguments(str(self.folder), **chosen)
        constant = optim.lr_scheduler.LambdaLR(self.optimizer, lambda step: 1.0)
        options |= {"optimizers": (self.optimizer, constant), "train_dataset": self.points}
        trainer = transformers.Trainer(self.model, arguments, **options)
        trainer.train(resume_from_checkpoint=self.epochs > 1)


def network(coordinates: str = "intrinsic") -> nn.Sequential:
    torch.manual_seed(0)
    layers = (nn.Linear(3, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 1))
    return gp.convert_(nn.Sequential(*layers), coordinates=coordinates)


DRAWN = torch.randn(2 * STEPS, 3, generator=torch.Generator().manual_seed(1))
POINTS = [{"x": x, "labels": x.sum(0, keepdim=True)} for x in DRAWN]


def by_hand(epochs: int = 1, accumulate: int = 1, **options: Any) -> gp.BoundaryTracker:
    model = WithLoss(network())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.register_step_post_hook(gp.retract(model))
    tracker = gp.BoundaryTracker(model.net, **options)
    for _ in range(epochs):
        for index, batch in enumerate(DataLoader(POINTS, batch_size=2)):
            (model(**batch)["loss"] / accumulate).backward()
            if (index + 1) % accumulate == 0:
                optimizer.step()
                optimizer.zero_grad()
                tracker.step()
    return tracker


def run_in(stack: str, folder: Path, epochs: int = 1, accumulate: int = 1, **options: Any) -> Any:
    """Return the tracker of a run by Lightning or by transformers' Trainer."""
    callbacks, model = pytest.importorskip(f"geoparam.integrations.{stack}"), WithLoss(network())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.register_step_post_hook(gp.retract(model))
    fit = Fit(model, optimizer, POINTS, folder, epochs)
    options |= {"module": "model.net"} if stack == "lightning" else {}
    track = callbacks.TrackBoundaries(**options)
    if stack == "lightning":
        fit.by_lightning(callbacks=[track], accumulate_grad_batches=accumulate)
    else:
        fit.by_trainer(callbacks=[track])
    return track.tracker


def assert_same(stack: str, found: Any, expected: gp.BoundaryTracker) -> None:
    assert found.history.steps.tolist() == expected.history.steps.tolist()
    prefix = "" if stack == "lightning" else "net."
    for name in ("0", "3"):
        for quantity in ("rotation_max", "displacement_max", "scale_max"):
            values = found.history[prefix + name][quantity], expected.history[name][quantity]
            np.testing.assert_allclose(*values, rtol=1e-5, atol=1e-6, err_msg=quantity)


ZEROS = torch.zeros(2, 3)
BATCH = {"x": ZEROS, "labels": ZEROS[:, :1]}


@pytest.mark.parametrize(
    "stack, options, same",
    [
        ("lightning", {"probe": ZEROS}, {"probe": ZEROS}),
        ("lightning", {"probe": ZEROS, "accumulate": 2}, {"probe": ZEROS, "accumulate": 2}),
        ("transformers", {"probe": BATCH}, {"probe": ZEROS}),
        ("transformers", {}, {}),
    ],
)
def test_every_optimizer_step_is_recorded(
    stack: str, options: Any, same: Any, tmp_path: Path
) -> None:
    assert_same(stack, run_in(stack, tmp_path, **options), by_hand(**same))


@pytest.mark.parametrize("every", [1, 3])
@pytest.mark.parametrize("stack", ["lightning", "transformers"])
def test_tracking_goes_on_from_a_checkpoint(stack: str, every: int, tmp_path: Path) -> None:
    options = {"file": tmp_path / "history.npy", "every": every}
    run_in(stack, tmp_path, epochs=1, **options)
    found = run_in(stack, tmp_path, epochs=2, **options)
    assert_same(stack, found, by_hand(epochs=2, every=every))


def test_trainers_tracker_knows_its_own_checkpoint(tmp_path: Path) -> None:
    first, other, file = tmp_path / "first", tmp_path / "other", tmp_path / "history.npy"
    run_in("transformers", first, epochs=1, file=file)
    checkpoint = shutil.copytree(first, other) / f"checkpoint-{STEPS}"
    saved = torch.load(checkpoint / "boundaries.pt", weights_only=True)
    torch.save({**saved, "sums": saved["sums"] + 1}, checkpoint / "boundaries.pt")
    with pytest.warns(UserWarning, match="anew: .*boundaries.pt was saved with other weights"):
        assert run_in("transformers", other, epochs=2).history.steps[0] == 1
    shutil.rmtree(other / f"checkpoint-{2 * STEPS}")
    place = {"checkpoint": first / checkpoint.name, "file": file}
    assert_same("transformers", run_in("transformers", other, 2, **place), by_hand(epochs=2))


def test_lightnings_loggers_get_the_summary(tmp_path: Path) -> None:
    callbacks = pytest.importorskip("geoparam.integrations.lightning")
    loggers = pytest.importorskip("lightning.pytorch.loggers")
    model, logger = WithLoss(network()), loggers.CSVLogger(tmp_path)
    fit = Fit(model, torch.optim.SGD(model.parameters(), lr=0.1), POINTS, tmp_path)
    options = {"probe": ZEROS, "quantities": ["rotation_max"]}
    track = callbacks.TrackBoundaries("model.net", log=True, **options)
    fit.by_lightning(callbacks=[track], logger=logger, log_every_n_steps=1)
    with Path(logger.log_dir, "metrics.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["step"] for row in rows] == ["1", "2", "3", "4"]
    values = [float(row["rotation_max/0"]) for row in rows]
    np.testing.assert_array_equal(values, track.tracker.history["0"]["rotation_max"])


def test_trainers_log_gets_the_summary_beside_its_own(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    callbacks = pytest.importorskip("geoparam.integrations.transformers")
    chosen = {"report_to": [], "disable_tqdm": True, "use_cpu": True, "logging_steps": 2}
    chosen |= {"per_device_train_batch_size": 2, "num_train_epochs": 1, "save_strategy": "no"}
    arguments = transformers.TrainingArguments(str(tmp_path), **chosen)
    trainer = transformers.Trainer(WithLoss(network()), arguments, train_dataset=POINTS)
    track = callbacks.TrackBoundaries(log=trainer, probe=BATCH, quantities=["rotation_max"])
    trainer.add_callback(track)
    trainer.train()
    logged = trainer.state.log_history
    values = [entry["rotation_max/net.0"] for entry in logged if "rotation_max/net.0" in entry]
    np.testing.assert_array_equal(values, track.tracker.history["net.0"]["rotation_max"])
    assert [entry["step"] for entry in logged if "loss" in entry] == [2, 4]


@pytest.mark.filterwarnings("ignore:resume=True without file")
def test_a_tracker_of_lightning_begins_anew_in_another_fit(tmp_path: Path) -> None:
    callbacks, model = pytest.importorskip("geoparam.integrations.lightning"), WithLoss(network())
    both = [callbacks.TrackBoundaries(name, probe=ZEROS) for name in ("model.net", "model.net.0")]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for epochs in (1, 2, 1):
        Fit(model, optimizer, POINTS, tmp_path, epochs).by_lightning(callbacks=both)
        steps = both[0].tracker.history.steps.tolist()
        assert steps == [*range(STEPS * (epochs - 1) + 1, STEPS * epochs + 1)]


def test_accelerate_checkpoints_the_tracker_itself(tmp_path: Path) -> None:
    accelerate = pytest.importorskip("accelerate")
    accelerator = accelerate.Accelerator(cpu=True)
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = accelerator.prepare(model, optimizer)
    tracker = gp.BoundaryTracker(model, every=2, example_inputs=torch.zeros(2, 3))
    accelerator.register_for_checkpointing(tracker)
    for _ in range(3):
        accelerator.backward(model(torch.ones(2, 3)).sum())
        optimizer.step()
        tracker.step()
    accelerator.save_state(tmp_path)
    before = tracker.state_dict()
    tracker.step()
    accelerator.load_state(tmp_path)
    after = tracker.state_dict()
    assert after["step"] == before["step"] == 3 and after["measured_at"] == 2
    for name, directions in before["snapshot"]["directions"].items():
        assert torch.equal(after["snapshot"]["directions"][name], directions)


def make_trainer(folder: Path, options: Any, **arguments: Any) -> Any:
    """Return a Trainer of an MLP whose optimizer is made by Geometric."""
    transformers = pytest.importorskip("transformers")
    Geometric = pytest.importorskip("geoparam.integrations.transformers").Geometric
    chosen = {"report_to": [], "disable_tqdm": True, "use_cpu": True, "max_grad_norm": 0}
    chosen |= {"per_device_train_batch_size": 2, "train_sampling_strategy": "sequential"}
    args = transformers.TrainingArguments(str(folder), **chosen, **arguments)
    choice = Geometric, {"args": args, **options}
    model = WithLoss(mlp(torch.float32), F.cross_entropy)
    return transformers.Trainer(model, args, train_dataset=IMAGES, optimizer_cls_and_kwargs=choice)


ADAMW = {"base": torch.optim.AdamW}
IMAGES = [{"x": torch.arange(6).mul(i + 1.0).sin(), "labels": i % 3} for i in range(8)]


def test_trainers_factory_takes_all_of_its_adam_settings(tmp_path: Path) -> None:
    settings = {"adam_beta1": 0.8, "adam_beta2": 0.95, "adam_epsilon": 1e-6}
    trainer = make_trainer(tmp_path, ADAMW, weight_decay=0.3, learning_rate=0.02, **settings)
    units, rest = trainer.create_optimizer().param_groups
    assert (units["lr"], rest["lr"]) == (0.02, 0.02)
    assert (units["weight_decay"], rest["weight_decay"]) == (0.0, 0.3)
    for group in (units, rest):
        assert (group["betas"], group["eps"]) == ((0.8, 0.95), 1e-6)


def test_trainers_adam_settings_are_the_rests_beside_muon(tmp_path: Path) -> None:
    options = {"base": torch.optim.Muon, "turn": 2.0}
    trainer = make_trainer(tmp_path, options, learning_rate=0.02, adam_beta2=0.95)
    units, rest = trainer.create_optimizer().param_groups
    assert "betas" not in units and rest["betas"] == (0.9, 0.95)


@pytest.mark.parametrize(
    "options",
    [
        {"base": torch.optim.NAdam},
        {"base": torch.optim.SGD, "rest": torch.optim.AdamW},
        {"base": torch.optim.Muon, "rest": functools.partial(torch.optim.AdamW, fused=False)},
        {"base": functools.partial(torch.optim.AdamW, amsgrad=True), "rest": torch.optim.Adam},
    ],
    ids=str,
)
def test_trainers_adam_settings_reach_whatever_has_betas(tmp_path: Path, options: Any) -> None:
    settings = {"adam_beta2": 0.95, "adam_epsilon": 1e-6}
    trainer = make_trainer(tmp_path, options, learning_rate=0.02, **settings)
    units, rest = trainer.create_optimizer().param_groups
    for group in (units, rest) if "betas" in units else (rest,):
        assert (group["betas"], group["eps"]) == ((0.9, 0.95), 1e-6)


def test_what_the_factory_is_given_counts_before_trainers_settings(tmp_path: Path) -> None:
    options = {**ADAMW, "lr": 0.5, "betas": (0.7, 0.7)}
    trainer = make_trainer(tmp_path, options, learning_rate=0.02, adam_beta2=0.95)
    units, _ = trainer.create_optimizer().param_groups
    assert (units["lr"], units["betas"]) == (0.5, (0.7, 0.7))


def test_trainers_schedule_turns_by_the_rate_that_it_logs(tmp_path: Path) -> None:
    schedule = {"lr_scheduler_type": "linear", "warmup_steps": 2, "logging_steps": 1}
    options = {**ADAMW, "turn": 2.0, "max_turn": 180.0}
    trainer = make_trainer(tmp_path, options, learning_rate=0.02, num_train_epochs=2, **schedule)
    layer = trainer.model.net[0]
    before, angles = rows(layer), []

    def note(*_: Any) -> None:
        nonlocal before
        angles.append(rms(find_angles(before, rows(layer))))
        before = rows(layer)

    trainer.create_optimizer().register_step_post_hook(note)
    trainer.train()
    rates = [entry["learning_rate"] for entry in trainer.state.log_history if "loss" in entry]
    expected = [2.0 * rate / 0.02 for rate in rates]
    assert max(rates) == 0.02 and len(set(rates)) > 4
    assert angles == pytest.approx(expected, rel=1e-3, abs=1e-3)


def test_trainers_schedule_resumes_in_the_middle(tmp_path: Path) -> None:
    schedule = {"lr_scheduler_type": "cosine", "warmup_steps": 2, "save_strategy": "epoch"}
    options = {"base": torch.optim.Muon, "turn": 2.0}
    trainers = []
    for _ in range(2):
        trainers.append(
            make_trainer(tmp_path, options, learning_rate=0.02, num_train_epochs=2, **schedule)
        )
    trainers[0].train()
    trainers[1].train(resume_from_checkpoint=tmp_path / f"checkpoint-{STEPS}")
    assert_same_weights(*(trainer.model for trainer in trainers))


def prepare(kind: str = "turn") -> tuple[Any, ...]:
    """Return an accelerator, a model, its optimizer, and a schedule of eight steps."""
    transformers = pytest.importorskip("transformers")
    accelerator = pytest.importorskip("accelerate").Accelerator(cpu=True)
    model, optimizer = start(kind)
    schedule = transformers.get_cosine_schedule_with_warmup(optimizer, 2, 8)
    return accelerator, *accelerator.prepare(model, optimizer, schedule)


def test_accelerates_schedule_turns_by_the_rate(fresh_accelerate: None) -> None:
    _, model, optimizer, schedule = prepare()
    for step in range(8):
        expected = 2.0 * schedule.get_last_lr()[0] / 0.05
        angles = step_and_find_angles(model, optimizer, step)[0]
        assert rms(angles) == pytest.approx(expected, abs=1e-6)
        schedule.step()


def test_accelerates_schedule_resumes_in_the_middle(
    fresh_accelerate: None, tmp_path: Path
) -> None:
    accelerator, model, optimizer, schedule = prepare()
    for step in range(8):
        if step == 4:
            accelerator.save_state(tmp_path)
        train(model, optimizer, 1, step)
        schedule.step()
    accelerator, other, resumed, schedule = prepare()
    accelerator.load_state(tmp_path)
    for step in range(4, 8):
        train(other, resumed, 1, step)
        schedule.step()
    assert_same_weights(model, other)


def test_what_a_partial_names_counts_before_trainers_settings(tmp_path: Path) -> None:
    base = functools.partial(torch.optim.AdamW, betas=(0.7, 0.7))
    trainer = make_trainer(tmp_path, {"base": base}, learning_rate=0.02, adam_beta2=0.95)
    groups = trainer.create_optimizer().param_groups
    assert [group["betas"] for group in groups] == [(0.7, 0.7), (0.7, 0.7)]


@pytest.mark.parametrize("kind", ["Adam", "angles", "turn"])
@pytest.mark.parametrize("run", [Fit.by_accelerate, Fit.by_lightning, Fit.by_trainer])
def test_a_second_epoch_goes_on_from_a_file(run: Any, kind: str, tmp_path: Path) -> None:
    nets = [start(kind, lambda _: mlp(torch.float32)) for _ in range(3)]
    (expected, optimizer), *fits = [(WithLoss(net, F.cross_entropy), its) for net, its in nets]
    for part in [*DataLoader(IMAGES, batch_size=2)] * 2:
        expected.zero_grad()
        expected(**part)["loss"].backward()
        optimizer.step()
    for epochs, (model, its) in enumerate(fits, start=1):
        run(Fit(model, its, IMAGES, tmp_path, epochs))
    assert_same_weights(model.net, expected.net)
