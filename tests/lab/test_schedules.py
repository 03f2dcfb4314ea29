"""The schedules, against torch's own."""

import pytest
import torch

from geoparam_lab.training.images.schedules import SCHEDULES


@pytest.mark.parametrize(("epochs", "milestones"), [(90, [30, 60, 80]), (18, [6, 12, 16])])
def test_steps_are_those_of_torch(epochs: int, milestones: list[int]) -> None:
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
    theirs = torch.optim.lr_scheduler.MultiStepLR(optimizer, milestones)
    ours = SCHEDULES["steps"](epochs, 0.0)
    for epoch in range(epochs):
        assert ours(epoch) == pytest.approx(theirs.get_last_lr()[0], rel=1e-12)
        optimizer.step()
        theirs.step()


@pytest.mark.parametrize("name", ["linear", "cosine"])
def test_decay_is_that_of_torch(name: str) -> None:
    steps = 40
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
    schedulers = torch.optim.lr_scheduler
    theirs = {
        "linear": schedulers.LinearLR(optimizer, 1.0, 0.0, total_iters=steps),
        "cosine": schedulers.CosineAnnealingLR(optimizer, steps),
    }
    optimizer.param_groups[0]["lr"] = 1.0
    ours = SCHEDULES[name](10, 0.0)
    for step in range(steps):
        factor = ours(10 * step / steps)
        assert factor == pytest.approx(theirs[name].get_last_lr()[0], abs=1e-9)
        optimizer.step()
        theirs[name].step()
