"""The callbacks of Lightning and transformers record what the tracker records by hand."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader
from training_stacks import Fit

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


def run_in(stack: str, folder: Path, epochs: int = 1, accumulate: int = 1, **options: Any) -> Any:
    """Return the tracker of a run by Lightning or by transformers' Trainer."""
    callbacks, model = pytest.importorskip(f"geoparam.integrations.{stack}"), WithLoss()
    fit = Fit(model, torch.optim.SGD(model.parameters(), lr=0.1), POINTS, folder, epochs)
    options |= {"module": "model.net"} if stack == "lightning" else {}
    track = callbacks.TrackBoundaries(**options)
    both = [track, callbacks.Retract()]
    if stack == "lightning":
        fit.by_lightning(callbacks=both, accumulate_grad_batches=accumulate)
    else:
        fit.by_trainer(callbacks=both)
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
