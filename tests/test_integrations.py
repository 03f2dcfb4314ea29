"""The callbacks of Lightning and transformers record what the tracker records by hand."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

import geoparam as gp

STEPS = 4


def network(coordinates: str = "intrinsic") -> nn.Sequential:
    torch.manual_seed(0)
    layers = (nn.Linear(3, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 1))
    return gp.convert_(nn.Sequential(*layers), coordinates=coordinates)


class Points(Dataset):
    """Eight points: four batches of two."""

    def __init__(self) -> None:
        self.x = torch.randn(2 * STEPS, 3, generator=torch.Generator().manual_seed(1))

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"x": self.x[index], "labels": self.x[index].sum(0, keepdim=True)}


def by_hand(epochs: int = 1, accumulate: int = 1, **options: Any) -> gp.BoundaryTracker:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.register_step_post_hook(gp.retract(model))
    tracker = gp.BoundaryTracker(model, **options)
    for _ in range(epochs):
        for index, batch in enumerate(DataLoader(Points(), batch_size=2)):
            loss = (model(batch["x"]) - batch["labels"]).square().mean() / accumulate
            loss.backward()
            if (index + 1) % accumulate == 0:
                optimizer.step()
                optimizer.zero_grad()
                tracker.step()
    return tracker


def assert_same(
    found: gp.BoundaryTracker | None, expected: gp.BoundaryTracker, prefix: str = ""
) -> None:
    assert found is not None
    assert found.history.steps.tolist() == expected.history.steps.tolist()
    for name in ("0", "3"):
        for quantity in ("rotation_max", "displacement_max", "scale_max"):
            values = found.history[prefix + name][quantity], expected.history[name][quantity]
            np.testing.assert_allclose(*values, rtol=1e-5, atol=1e-6, err_msg=quantity)


def lightning_run(
    folder: Path, epochs: int = 1, accumulate: int = 1, resume: Path | None = None, **options: Any
) -> gp.BoundaryTracker | None:
    lightning = pytest.importorskip("lightning.pytorch")
    from geoparam.integrations.lightning import Retract, TrackBoundaries

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = network()

        def training_step(self, batch: dict[str, Tensor], index: int) -> Tensor:
            return (self.net(batch["x"]) - batch["labels"]).square().mean()

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    track = TrackBoundaries(module="net", **options)
    trainer = lightning.Trainer(
        accelerator="cpu",
        max_epochs=epochs,
        accumulate_grad_batches=accumulate,
        default_root_dir=folder,
        callbacks=[track, Retract()],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
    )
    trainer.fit(Module(), DataLoader(Points(), batch_size=2), ckpt_path=resume, weights_only=True)
    trainer.save_checkpoint(folder / "last.ckpt")
    return track.tracker


LIGHTNING = pytest.mark.filterwarnings("ignore:.*:UserWarning", "ignore:.*:FutureWarning")


@LIGHTNING
@pytest.mark.parametrize("accumulate", [1, 2])
def test_lightning_records_every_optimizer_step(tmp_path: Path, accumulate: int) -> None:
    found = lightning_run(tmp_path, accumulate=accumulate, probe=torch.zeros(2, 3))
    assert_same(found, by_hand(accumulate=accumulate, probe=torch.zeros(2, 3)))


@LIGHTNING
@pytest.mark.parametrize("every", [1, 3])
def test_lightning_goes_on_from_a_checkpoint(tmp_path: Path, every: int) -> None:
    options = {"file": tmp_path / "history.npy", "every": every}
    lightning_run(tmp_path, epochs=1, **options)
    found = lightning_run(tmp_path, epochs=2, resume=tmp_path / "last.ckpt", **options)
    assert_same(found, by_hand(epochs=2, every=every))


class WithLoss(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = network()

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        return {"loss": (self.net(x) - labels).square().mean()}


def transformers_run(
    folder: Path, epochs: int = 1, resume: bool = False, **options: Any
) -> gp.BoundaryTracker | None:
    transformers = pytest.importorskip("transformers")
    from geoparam.integrations.transformers import Retract, TrackBoundaries

    track = TrackBoundaries(**options)
    arguments = transformers.TrainingArguments(
        output_dir=str(folder),
        per_device_train_batch_size=2,
        num_train_epochs=epochs,
        max_grad_norm=0,
        lr_scheduler_type="constant",
        optim="sgd",
        learning_rate=0.1,
        save_strategy="steps",
        save_steps=STEPS,
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
    )

    class InOrder(transformers.Trainer):
        def _get_train_sampler(self, *args: object) -> torch.utils.data.Sampler:
            return torch.utils.data.SequentialSampler(self.train_dataset)

    trainer = InOrder(
        model=WithLoss(), args=arguments, train_dataset=Points(), callbacks=[track, Retract()]
    )
    trainer.train(resume_from_checkpoint=resume)
    return track.tracker


@pytest.mark.parametrize("probe", [False, True])
def test_transformers_records_every_optimizer_step(tmp_path: Path, probe: bool) -> None:
    zeros = torch.zeros(2, 3)
    given = {"probe": {"x": zeros, "labels": zeros[:, :1]}} if probe else {}
    found = transformers_run(tmp_path, **given)
    assert_same(found, by_hand(**({"probe": zeros} if probe else {})), prefix="net.")


@pytest.mark.parametrize("every", [1, 3])
def test_transformers_goes_on_from_a_checkpoint(tmp_path: Path, every: int) -> None:
    options = {"file": tmp_path / "history.npy", "every": every}
    transformers_run(tmp_path, epochs=1, **options)
    found = transformers_run(tmp_path, epochs=2, resume=True, **options)
    assert_same(found, by_hand(epochs=2, every=every), prefix="net.")


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
    for name, directions in before["measurement"]["reference"].items():
        assert torch.equal(after["measurement"]["reference"][name], directions)
