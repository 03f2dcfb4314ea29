"""The callbacks of Lightning and transformers record what the tracker records by hand."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader
from training_stacks import fit_by_lightning, fit_by_trainer

import geoparam as gp

STEPS = 4


def network(coordinates: str = "intrinsic") -> nn.Sequential:
    torch.manual_seed(0)
    layers = (nn.Linear(3, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 1))
    return gp.convert_(nn.Sequential(*layers), coordinates=coordinates)


DRAWN = torch.randn(2 * STEPS, 3, generator=torch.Generator().manual_seed(1))
POINTS = [{"x": x, "labels": x.sum(0, keepdim=True)} for x in DRAWN]


class WithLoss(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = network()

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        return {"loss": (self.net(x) - labels).square().mean()}


def by_hand(epochs: int = 1, accumulate: int = 1, **options: Any) -> gp.BoundaryTracker:
    model = WithLoss()
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
    folder: Path, epochs: int = 1, accumulate: int = 1, resume: bool = False, **options: Any
) -> gp.BoundaryTracker | None:
    callbacks = pytest.importorskip("geoparam.integrations.lightning")
    track, model = callbacks.TrackBoundaries(module="model.net", **options), WithLoss()
    chosen = {"callbacks": [track, callbacks.Retract()], "accumulate_grad_batches": accumulate}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    fit_by_lightning(model, optimizer, POINTS, folder, epochs, resume, **chosen)
    return track.tracker


@pytest.mark.parametrize("accumulate", [1, 2])
def test_lightning_records_every_optimizer_step(tmp_path: Path, accumulate: int) -> None:
    found = lightning_run(tmp_path, accumulate=accumulate, probe=torch.zeros(2, 3))
    assert_same(found, by_hand(accumulate=accumulate, probe=torch.zeros(2, 3)))


@pytest.mark.parametrize("every", [1, 3])
def test_lightning_goes_on_from_a_checkpoint(tmp_path: Path, every: int) -> None:
    options = {"file": tmp_path / "history.npy", "every": every}
    lightning_run(tmp_path, epochs=1, **options)
    found = lightning_run(tmp_path, epochs=2, resume=True, **options)
    assert_same(found, by_hand(epochs=2, every=every))


def transformers_run(
    folder: Path, epochs: int = 1, resume: bool = False, **options: Any
) -> gp.BoundaryTracker | None:
    callbacks = pytest.importorskip("geoparam.integrations.transformers")
    track, model = callbacks.TrackBoundaries(**options), WithLoss()
    both = [track, callbacks.Retract()]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    fit_by_trainer(model, optimizer, POINTS, folder, epochs, resume, callbacks=both)
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
