"""Accelerate, Lightning and transformers' Trainer: optimizers and trackers do there as by hand."""

import csv
import functools
import shutil
from collections.abc import Callable
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

    def __init__(self, net: nn.Module, loss: Callable = F.mse_loss) -> None:
        super().__init__()
        self.net = net
        self.loss = loss

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        return {"loss": self.loss(self.net(x), labels)}


def training_arguments(folder: Path, **options: Any) -> Any:
    """Return arguments of transformers' Trainer for a silent run in order, in batches of two."""
    transformers = pytest.importorskip("transformers")
    defaults = {
        "disable_tqdm": True,
        "max_grad_norm": 0,
        "num_train_epochs": 1,
        "per_device_train_batch_size": 2,
        "report_to": [],
        "train_sampling_strategy": "sequential",
        "use_cpu": True,
    }
    return transformers.TrainingArguments(str(folder), **{**defaults, **options})


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

    @property
    def resumes(self) -> bool:
        return self.epochs > 1

    def by_accelerate(self) -> None:
        accelerator = pytest.importorskip("accelerate").Accelerator(cpu=True)
        model, optimizer = accelerator.prepare(self.model, self.optimizer)
        if self.resumes:
            accelerator.load_state(self.folder)
        for batch in DataLoader(self.points, batch_size=2):
            optimizer.zero_grad()
            accelerator.backward(model(**batch)["loss"])
            optimizer.step()
        accelerator.save_state(self.folder)

    def by_lightning(self, **options: Any) -> None:
        lightning = pytest.importorskip("lightning.pytorch")
        module = lightning.LightningModule()
        module.model = self.model
        module.training_step = lambda batch, batch_idx: self.model(**batch)["loss"]
        module.configure_optimizers = lambda: self.optimizer
        defaults = {
            "accelerator": "cpu",
            "default_root_dir": self.folder,
            "enable_checkpointing": False,
            "enable_model_summary": False,
            "enable_progress_bar": False,
            "logger": False,
            "max_epochs": self.epochs,
        }
        trainer = lightning.Trainer(**{**defaults, **options})
        checkpoint = self.folder / "last.ckpt"
        trainer.fit(
            module,
            DataLoader(self.points, batch_size=2),
            ckpt_path=checkpoint if self.resumes else None,
            weights_only=True,
        )
        trainer.save_checkpoint(checkpoint)

    def by_trainer(self, **options: Any) -> None:
        transformers = pytest.importorskip("transformers")
        constant = optim.lr_scheduler.LambdaLR(self.optimizer, lambda step: 1.0)
        trainer = transformers.Trainer(
            self.model,
            training_arguments(self.folder, num_train_epochs=self.epochs, save_strategy="epoch"),
            train_dataset=self.points,
            optimizers=(self.optimizer, constant),
            **options,
        )
        trainer.train(resume_from_checkpoint=self.resumes)


# Trackers.


def network() -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 1))
    return gp.convert_(model, coordinates="intrinsic")


def build_points() -> list[dict[str, Tensor]]:
    """Return two points for each step."""
    random = torch.Generator().manual_seed(1)
    inputs = torch.randn(2 * STEPS, 3, generator=random)
    return [{"x": x, "labels": x.sum(0, keepdim=True)} for x in inputs]


POINTS = build_points()
ZEROS = torch.zeros(2, 3)
ZERO_BATCH = {"x": ZEROS, "labels": ZEROS[:, :1]}


def build_optimizer(model: nn.Module) -> optim.Optimizer:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.register_step_post_hook(gp.retract(model))
    return optimizer


def track_by_hand(epochs: int = 1, accumulate: int = 1, **options: Any) -> gp.BoundaryTracker:
    model = WithLoss(network())
    optimizer = build_optimizer(model)
    tracker = gp.BoundaryTracker(model.net, **options)
    for _ in range(epochs):
        for number, batch in enumerate(DataLoader(POINTS, batch_size=2), start=1):
            loss = model(**batch)["loss"] / accumulate
            loss.backward()
            if number % accumulate == 0:
                optimizer.step()
                optimizer.zero_grad()
                tracker.step()
    return tracker


def track_by_lightning(
    folder: Path, epochs: int = 1, accumulate: int = 1, **options: Any
) -> gp.BoundaryTracker:
    integration = pytest.importorskip("geoparam.integrations.lightning")
    model = WithLoss(network())
    track = integration.TrackBoundaries("model.net", **options)
    fit = Fit(model, build_optimizer(model), POINTS, folder, epochs)
    fit.by_lightning(callbacks=[track], accumulate_grad_batches=accumulate)
    return track.tracker


def track_by_trainer(folder: Path, epochs: int = 1, **options: Any) -> gp.BoundaryTracker:
    integration = pytest.importorskip("geoparam.integrations.transformers")
    model = WithLoss(network())
    track = integration.TrackBoundaries(**options)
    Fit(model, build_optimizer(model), POINTS, folder, epochs).by_trainer(callbacks=[track])
    return track.tracker


def assert_same_history(
    tracker: gp.BoundaryTracker, expected: gp.BoundaryTracker, prefix: str = ""
) -> None:
    """Compare two histories; a prefix stands before the layers' names in the first."""
    assert tracker.history.steps.tolist() == expected.history.steps.tolist()
    for layer in ("0", "3"):
        for quantity in ("rotation_max", "displacement_max", "scale_max"):
            np.testing.assert_allclose(
                tracker.history[prefix + layer][quantity],
                expected.history[layer][quantity],
                rtol=1e-5,
                atol=1e-6,
                err_msg=quantity,
            )


@pytest.mark.parametrize("accumulate", [1, 2])
def test_lightnings_tracker_records_every_optimizer_step(accumulate: int, tmp_path: Path) -> None:
    tracker = track_by_lightning(tmp_path, accumulate=accumulate, probe=ZEROS)

    assert_same_history(tracker, track_by_hand(accumulate=accumulate, probe=ZEROS))


def test_trainers_tracker_records_every_optimizer_step(tmp_path: Path) -> None:
    tracker = track_by_trainer(tmp_path, probe=ZERO_BATCH)

    assert_same_history(tracker, track_by_hand(probe=ZEROS), prefix="net.")


def test_trainers_tracker_needs_no_probe(tmp_path: Path) -> None:
    tracker = track_by_trainer(tmp_path)

    assert_same_history(tracker, track_by_hand(), prefix="net.")


@pytest.mark.parametrize("every", [1, 3])
@pytest.mark.parametrize(
    ("track", "prefix"),
    [(track_by_lightning, ""), (track_by_trainer, "net.")],
    ids=["lightning", "trainer"],
)
def test_tracking_goes_on_from_a_checkpoint(
    track: Callable, prefix: str, every: int, tmp_path: Path
) -> None:
    options = {"file": tmp_path / "history.npy", "every": every}
    track(tmp_path, epochs=1, **options)

    resumed = track(tmp_path, epochs=2, **options)

    assert_same_history(resumed, track_by_hand(epochs=2, every=every), prefix)


def test_without_a_file_trainers_tracker_has_the_records_since_the_checkpoint(
    tmp_path: Path,
) -> None:
    track_by_trainer(tmp_path)
    resumed = track_by_trainer(tmp_path, epochs=2)

    expected = track_by_hand(epochs=2)
    assert resumed.history.steps.tolist() == expected.history.steps.tolist()[STEPS:]
    turns = (resumed.history["net.0"]["rotation_max"], expected.history["0"]["rotation_max"])
    np.testing.assert_allclose(turns[0], turns[1][STEPS:], rtol=1e-5)


CHECKPOINT = f"checkpoint-{STEPS}"


def spoil_tracker(checkpoint: Path) -> None:
    """Let the tracker's file be that of other weights."""
    file = checkpoint / "boundaries.pt"
    saved = torch.load(file, weights_only=True)
    torch.save({**saved, "sums": saved["sums"] + 1}, file)


def test_trainers_tracker_begins_anew_beside_other_weights(tmp_path: Path) -> None:
    track_by_trainer(tmp_path, file=tmp_path / "history.npy")
    spoil_tracker(tmp_path / CHECKPOINT)

    with pytest.warns(UserWarning, match="anew: .*boundaries.pt was saved with other weights"):
        tracker = track_by_trainer(tmp_path, epochs=2)

    assert tracker.history.steps[0] == 1


def test_trainers_tracker_goes_on_from_a_checkpoint_of_another_folder(tmp_path: Path) -> None:
    first, other, file = tmp_path / "first", tmp_path / "other", tmp_path / "history.npy"
    track_by_trainer(first, file=file)
    shutil.copytree(first, other)
    spoil_tracker(other / CHECKPOINT)

    resumed = track_by_trainer(other, epochs=2, checkpoint=first / CHECKPOINT, file=file)

    assert_same_history(resumed, track_by_hand(epochs=2), prefix="net.")


def test_lightnings_loggers_get_the_summary(tmp_path: Path) -> None:
    integration = pytest.importorskip("geoparam.integrations.lightning")
    loggers = pytest.importorskip("lightning.pytorch.loggers")
    logger = loggers.CSVLogger(tmp_path)
    model = WithLoss(network())
    track = integration.TrackBoundaries(
        "model.net", log=True, probe=ZEROS, quantities=["rotation_max"]
    )

    fit = Fit(model, torch.optim.SGD(model.parameters(), lr=0.1), POINTS, tmp_path)
    fit.by_lightning(callbacks=[track], logger=logger, log_every_n_steps=1)

    with Path(logger.log_dir, "metrics.csv").open(newline="") as file:
        records = list(csv.DictReader(file))
    assert [record["step"] for record in records] == ["1", "2", "3", "4"]
    logged = [float(record["rotation_max/0"]) for record in records]
    np.testing.assert_array_equal(logged, track.tracker.history["0"]["rotation_max"])


def test_trainers_log_gets_the_summary_beside_its_own(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    integration = pytest.importorskip("geoparam.integrations.transformers")
    arguments = training_arguments(tmp_path, logging_steps=2, save_strategy="no")
    trainer = transformers.Trainer(WithLoss(network()), arguments, train_dataset=POINTS)
    track = integration.TrackBoundaries(log=trainer, probe=ZERO_BATCH, quantities=["rotation_max"])
    trainer.add_callback(track)

    trainer.train()

    entries = trainer.state.log_history
    key = "rotation_max/net.0"
    logged = [entry[key] for entry in entries if key in entry]
    np.testing.assert_array_equal(logged, track.tracker.history["net.0"]["rotation_max"])
    assert [entry["step"] for entry in entries if "loss" in entry] == [2, 4]


@pytest.mark.filterwarnings("ignore:resume=True without file")
def test_a_tracker_of_lightning_begins_anew_in_another_fit(tmp_path: Path) -> None:
    integration = pytest.importorskip("geoparam.integrations.lightning")
    model = WithLoss(network())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    track = integration.TrackBoundaries("model.net", probe=ZEROS)
    track_layer = integration.TrackBoundaries("model.net.0", probe=ZEROS)

    for epochs in (1, 2, 1):
        fit = Fit(model, optimizer, POINTS, tmp_path, epochs)
        fit.by_lightning(callbacks=[track, track_layer])

        last_epoch = range(STEPS * (epochs - 1) + 1, STEPS * epochs + 1)
        assert track.tracker.history.steps.tolist() == list(last_epoch)


def test_accelerate_checkpoints_the_tracker_itself(tmp_path: Path) -> None:
    accelerator = pytest.importorskip("accelerate").Accelerator(cpu=True)
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = accelerator.prepare(model, optimizer)
    tracker = gp.BoundaryTracker(model, every=2, example_inputs=ZEROS)
    accelerator.register_for_checkpointing(tracker)
    for _ in range(3):
        accelerator.backward(model(torch.ones(2, 3)).sum())
        optimizer.step()
        tracker.step()

    accelerator.save_state(tmp_path)
    saved = tracker.state_dict()
    tracker.step()
    accelerator.load_state(tmp_path)

    loaded = tracker.state_dict()
    assert loaded["step"] == saved["step"] == 3
    assert loaded["measured_at"] == 2
    for name, directions in saved["snapshot"]["directions"].items():
        assert torch.equal(loaded["snapshot"]["directions"][name], directions)


# Trainer's factory of optimizers.


ADAMW = {"base": torch.optim.AdamW}
IMAGES = [{"x": torch.arange(6).mul(i + 1.0).sin(), "labels": i % 3} for i in range(8)]


def build_trainer(folder: Path, options: dict[str, Any], **arguments: Any) -> Any:
    """Return a Trainer of an MLP whose optimizer is made by Geometric with these options."""
    transformers = pytest.importorskip("transformers")
    integration = pytest.importorskip("geoparam.integrations.transformers")
    args = training_arguments(folder, **{"learning_rate": 0.02, **arguments})
    return transformers.Trainer(
        WithLoss(mlp(torch.float32), F.cross_entropy),
        args,
        train_dataset=IMAGES,
        optimizer_cls_and_kwargs=(integration.Geometric, {"args": args, **options}),
    )


def test_trainers_factory_takes_the_rate_and_decays_the_rest(tmp_path: Path) -> None:
    trainer = build_trainer(tmp_path, ADAMW, weight_decay=0.3)

    units, rest = trainer.create_optimizer().param_groups

    assert units["lr"] == rest["lr"] == 0.02
    assert units["weight_decay"] == 0
    assert rest["weight_decay"] == 0.3


def test_trainers_factory_takes_all_of_its_adam_settings(tmp_path: Path) -> None:
    trainer = build_trainer(tmp_path, ADAMW, adam_beta1=0.8, adam_beta2=0.95, adam_epsilon=1e-6)

    for group in trainer.create_optimizer().param_groups:
        assert group["betas"] == (0.8, 0.95)
        assert group["eps"] == 1e-6


@pytest.mark.parametrize(
    "options",
    [
        {"base": torch.optim.NAdam},
        {"base": functools.partial(torch.optim.AdamW, amsgrad=True), "rest": torch.optim.Adam},
    ],
    ids=str,
)
def test_trainers_adam_settings_reach_both_groups(tmp_path: Path, options: Any) -> None:
    trainer = build_trainer(tmp_path, options, adam_beta2=0.95, adam_epsilon=1e-6)

    for group in trainer.create_optimizer().param_groups:
        assert group["betas"] == (0.9, 0.95)
        assert group["eps"] == 1e-6


@pytest.mark.parametrize(
    "options",
    [
        {"base": torch.optim.Muon, "turn": 2.0},
        {"base": torch.optim.SGD, "rest": torch.optim.AdamW},
        {"base": torch.optim.Muon, "rest": functools.partial(torch.optim.AdamW, fused=False)},
    ],
    ids=str,
)
def test_trainers_adam_settings_are_the_rests_beside_a_base_without_betas(
    tmp_path: Path, options: Any
) -> None:
    trainer = build_trainer(tmp_path, options, adam_beta2=0.95, adam_epsilon=1e-6)

    units, rest = trainer.create_optimizer().param_groups

    assert "betas" not in units
    assert rest["betas"] == (0.9, 0.95)
    assert rest["eps"] == 1e-6


def test_the_factorys_options_count_before_trainers_settings(tmp_path: Path) -> None:
    options = {**ADAMW, "lr": 0.5, "betas": (0.7, 0.7)}
    trainer = build_trainer(tmp_path, options, adam_beta2=0.95)

    units, _ = trainer.create_optimizer().param_groups

    assert units["lr"] == 0.5
    assert units["betas"] == (0.7, 0.7)


def test_what_a_partial_names_counts_before_trainers_settings(tmp_path: Path) -> None:
    base = functools.partial(torch.optim.AdamW, betas=(0.7, 0.7))
    trainer = build_trainer(tmp_path, {"base": base}, adam_beta2=0.95)

    for group in trainer.create_optimizer().param_groups:
        assert group["betas"] == (0.7, 0.7)


# Schedules.


def test_trainers_schedule_turns_by_the_rate_that_it_logs(tmp_path: Path) -> None:
    schedule = {"lr_scheduler_type": "linear", "warmup_steps": 2, "logging_steps": 1}
    options = {**ADAMW, "turn": 2.0, "max_turn": 180.0}
    trainer = build_trainer(tmp_path, options, num_train_epochs=2, **schedule)
    layer = trainer.model.net[0]
    weights = [rows(layer)]

    trainer.create_optimizer().register_step_post_hook(lambda *_: weights.append(rows(layer)))
    trainer.train()

    rates = [entry["learning_rate"] for entry in trainer.state.log_history if "loss" in entry]
    assert max(rates) == 0.02
    assert len(set(rates)) > 4
    angles = [rms(find_angles(old, new)) for old, new in zip(weights, weights[1:], strict=False)]
    expected = [2.0 * rate / 0.02 for rate in rates]
    assert angles == pytest.approx(expected, rel=1e-3, abs=1e-3)


def test_trainers_schedule_resumes_in_the_middle(tmp_path: Path) -> None:
    schedule = {"lr_scheduler_type": "cosine", "warmup_steps": 2, "save_strategy": "epoch"}
    options = {"base": torch.optim.Muon, "turn": 2.0}
    trainer = build_trainer(tmp_path, options, num_train_epochs=2, **schedule)
    resumed = build_trainer(tmp_path, options, num_train_epochs=2, **schedule)

    trainer.train()
    resumed.train(resume_from_checkpoint=tmp_path / CHECKPOINT)

    assert_same_weights(resumed.model, trainer.model)


def prepare() -> tuple[Any, nn.Module, Any, Any]:
    """Return an accelerator, a model, its optimizer, and a schedule of eight steps."""
    transformers = pytest.importorskip("transformers")
    accelerator = pytest.importorskip("accelerate").Accelerator(cpu=True)
    model, optimizer = start("turn")
    schedule = transformers.get_cosine_schedule_with_warmup(optimizer, 2, 8)
    return accelerator, *accelerator.prepare(model, optimizer, schedule)


def test_accelerates_schedule_turns_by_the_rate(fresh_accelerate: None) -> None:
    _, model, optimizer, schedule = prepare()

    for step in range(8):
        rate = schedule.get_last_lr()[0]
        angles, _ = step_and_find_angles(model, optimizer, step)
        schedule.step()

        assert rms(angles) == pytest.approx(2.0 * rate / 0.05, abs=1e-6)


def train_by_schedule(model: nn.Module, optimizer: Any, schedule: Any, steps: range) -> None:
    for step in steps:
        train(model, optimizer, steps=1, first=step)
        schedule.step()


def test_accelerates_schedule_resumes_in_the_middle(
    fresh_accelerate: None, tmp_path: Path
) -> None:
    accelerator, model, *optimizer_and_schedule = prepare()
    train_by_schedule(model, *optimizer_and_schedule, range(4))
    accelerator.save_state(tmp_path)
    train_by_schedule(model, *optimizer_and_schedule, range(4, 8))

    accelerator, resumed, *optimizer_and_schedule = prepare()
    accelerator.load_state(tmp_path)
    train_by_schedule(resumed, *optimizer_and_schedule, range(4, 8))

    assert_same_weights(resumed, model)


# Checkpoints.


def start_with_loss(kind: str) -> tuple[nn.Module, Any]:
    net, optimizer = start(kind, lambda _: mlp(torch.float32))
    return WithLoss(net, F.cross_entropy), optimizer


def train_two_epochs(model: nn.Module, optimizer: Any) -> None:
    for _ in range(2):
        for batch in DataLoader(IMAGES, batch_size=2):
            model.zero_grad()
            model(**batch)["loss"].backward()
            optimizer.step()


@pytest.mark.parametrize("kind", ["Adam", "angles", "turn"])
@pytest.mark.parametrize("run", [Fit.by_accelerate, Fit.by_lightning, Fit.by_trainer])
def test_a_second_epoch_goes_on_from_a_file(run: Callable, kind: str, tmp_path: Path) -> None:
    expected, optimizer = start_with_loss(kind)
    train_two_epochs(expected, optimizer)

    run(Fit(*start_with_loss(kind), IMAGES, tmp_path, epochs=1))
    resumed, optimizer = start_with_loss(kind)
    run(Fit(resumed, optimizer, IMAGES, tmp_path, epochs=2))

    assert_same_weights(resumed, expected)
