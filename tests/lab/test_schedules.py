"""The schedules, against torch's own or against Keras's rules counted by hand."""

import numpy as np
import pytest
import torch

from geoparam_lab.training.images.schedules import SCHEDULES, Plateau


@pytest.mark.parametrize(("epochs", "milestones"), [(90, [30, 60, 80]), (18, [6, 12, 16])])
def test_steps_are_those_of_torch(epochs: int, milestones: list[int]) -> None:
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
    theirs = torch.optim.lr_scheduler.MultiStepLR(optimizer, milestones)
    ours = SCHEDULES["steps"](epochs, 0.0)
    for epoch in range(epochs):
        assert ours.factor(epoch) == pytest.approx(theirs.get_last_lr()[0], rel=1e-12)
        assert ours.judge(0.0, 0.0) == (True, False)
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
        factor = ours.factor(10 * step / steps)
        assert factor == pytest.approx(theirs[name].get_last_lr()[0], abs=1e-9)
        optimizer.step()
        theirs[name].step()


def by_hand(values: list[float]) -> tuple[list[float], list[bool], int | None]:
    """Return the factor of the next epoch, whether each is the best so far, and the last epoch.

    Counted from the whole series, without any state that goes from epoch to epoch.
    """
    factors, counted, fallen, since = [], [], 0, 0
    for now in range(len(values)):
        reference = values[0]  # the last value that beat the reference before it by 1e-4
        better_at = 0
        for epoch in range(1, now + 1):
            if values[epoch] > reference + 1e-4:
                reference, better_at = values[epoch], epoch
        if now - max(better_at, since) >= 5:
            fallen, since = fallen + 1, now
        factors.append(0.1**fallen)
        best = int(np.argmax(values[: now + 1]))
        counted.append(best == now)
        if now - best >= 10:
            return factors, counted, now
    return factors, counted, None


@pytest.mark.parametrize(("top", "seed"), [(1, 0), (1, 1), (5, 2), (5, 5)])
def test_plateau_counts_as_keras_does(top: int, seed: int) -> None:
    random = np.random.default_rng(seed)
    rising = 0.5 - 0.4 * np.exp(-np.arange(60) / 4)
    values = list(np.round(rising + random.normal(0, 0.02, 60) * (seed % 3), 3))
    factors, counted, last = by_hand(values)
    schedule = Plateau(top, keeps_best=True)
    for epoch, value in enumerate(values):
        verdict = schedule.judge(*((value, 0.0) if top == 1 else (0.0, value)))
        assert schedule.factor(epoch + 1) == pytest.approx(factors[epoch])
        assert verdict == (counted[epoch], epoch == last)
        if epoch == last:
            return
    assert last is None


def test_a_ten_thousandth_keeps_training_alive_but_lets_the_rate_fall() -> None:
    schedule = Plateau(top=1)
    verdicts = [schedule.judge(0.3 + 5e-6 * epoch, 0.0) for epoch in range(20)]
    assert not any(verdict.stop for verdict in verdicts)
    assert schedule.factor(20) == pytest.approx(1e-3)


def test_only_the_released_code_keeps_the_best_weights() -> None:
    keeping = [name for name in SCHEDULES if SCHEDULES[name](9, 0.1).keeps_best]
    assert keeping == ["plateau-top5"]
