"""Every group's `lr` is a rate: any schedule sets it, and the angle is turn * lr / start_lr."""

import copy
import functools
from typing import Any

import pytest
import torch
from plain_models import (
    assert_same_weights,
    backward,
    build,
    mlp,
    rms,
    rows,
    step_and_find_angles,
    through_a_file,
    train,
)
from torch import nn
from torch.optim import SGD, AdamW, Muon, lr_scheduler

TURN, RATE, STEPS = 2.4, 0.02, 12


class Loop:
    """Sets one number for all groups, as nanoGPT's loop does."""

    def __init__(self, optimizer: Any) -> None:
        self.optimizer, self.count = optimizer, 0
        self.step(0)

    def step(self, by: int = 1) -> None:
        self.count += by
        warm_up = min(1, (self.count + 1) / 3)
        rate = RATE * warm_up * (1 - self.count / STEPS)
        for group in self.optimizer.param_groups:
            group["lr"] = rate

    def state_dict(self) -> dict[str, int]:
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.count = state["count"]


def warm_up_linearly(optimizer: Any) -> Any:
    transformers = pytest.importorskip("transformers")
    return transformers.get_linear_schedule_with_warmup(optimizer, 3, STEPS)


def warm_up_then_cosine(optimizer: Any) -> Any:
    warm_up = lr_scheduler.LambdaLR(optimizer, lambda step: step / 3)
    cosine = lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
    return lr_scheduler.SequentialLR(optimizer, [warm_up, cosine], [3])


def one_cycle(optimizer: Any) -> Any:
    return lr_scheduler.OneCycleLR(optimizer, max_lr=RATE, total_steps=STEPS + 1)


def cyclic(optimizer: Any) -> Any:
    return lr_scheduler.CyclicLR(optimizer, base_lr=RATE / 10, max_lr=RATE, step_size_up=4)


SCHEDULES: dict[str, Any] = {
    "LambdaLR": lambda o: lr_scheduler.LambdaLR(o, lambda step: 1 / (1 + step)),
    "cosine": lambda o: lr_scheduler.CosineAnnealingLR(o, STEPS),
    "OneCycleLR": one_cycle,
    "CyclicLR": cyclic,
    "SequentialLR from 0": warm_up_then_cosine,
    "ReduceLROnPlateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=0),
    "transformers": warm_up_linearly,
    "a loop": Loop,
}
every_schedule = pytest.mark.parametrize("make", SCHEDULES.values(), ids=list(SCHEDULES))


def start(make: Any, **options: Any) -> tuple[Any, Any, Any]:
    """Return a model, its optimizer with a turn, and the schedule."""
    model = mlp()
    optimizer = build(model, turn=TURN, max_turn=180, lr=RATE, momentum=0.9, **options)
    return model, optimizer, make(optimizer)


def advance(schedule: Any) -> None:
    """Step a schedule; one that looks at the loss sees none that gets better."""
    is_plateau = isinstance(schedule, lr_scheduler.ReduceLROnPlateau)
    schedule.step(*([1.0] if is_plateau else []))


@every_schedule
def test_the_angle_follows_the_rate(make: Any) -> None:
    model, optimizer, schedule = start(make)
    rates = []
    for step in range(STEPS):
        rate = optimizer.param_groups[0]["lr"]
        expected = TURN * rate / RATE
        assert optimizer.turn() == [pytest.approx(expected)]
        for angles in step_and_find_angles(model, optimizer, step):
            assert rms(angles) == pytest.approx(expected, rel=1e-6, abs=1e-6)
        rates.append(rate)
        advance(schedule)
    assert len(set(rates)) > 3


@every_schedule
def test_a_schedule_resumes_in_the_middle(make: Any) -> None:
    first = start(make)
    for step in range(5):
        train(*first[:2], steps=1, first=step)
        advance(first[2])
    resumed = start(make)
    for new, old in zip(resumed, first, strict=True):
        new.load_state_dict(through_a_file(copy.deepcopy(old.state_dict())))
    for model, optimizer, schedule in (first, resumed):
        for step in range(5, STEPS):
            train(model, optimizer, steps=1, first=step)
            advance(schedule)
    assert first[1].turn() == resumed[1].turn()
    assert_same_weights(resumed[0], first[0])


@pytest.mark.parametrize("name", ["OneCycleLR", "CyclicLR"])
def test_a_cycle_sets_the_momentum_too(name: str) -> None:
    model, optimizer, schedule = start(SCHEDULES[name])
    momenta = set()
    for _ in range(4):
        momenta.add(optimizer.param_groups[0]["momentum"])
        train(model, optimizer, 1)
        schedule.step()
    assert len(momenta) == 4


def test_one_cycle_sets_the_betas_of_a_base_and_a_rest_that_have_them() -> None:
    optimizer = build(mlp(), AdamW, lr=RATE, turn=TURN)
    one_cycle(optimizer)
    assert [group["betas"][0] for group in optimizer.param_groups] == [0.95, 0.95]


@pytest.mark.parametrize("lr", [RATE, torch.tensor(RATE)], ids=["float", "tensor"])
def test_the_starting_rate_is_a_float_that_no_schedule_moves(lr: Any) -> None:
    model = mlp()
    optimizer = build(model, torch.optim.Adam, turn=TURN, lr=lr)
    schedule = lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)
    train(model, optimizer, 1)
    schedule.step()
    start_lr = optimizer.param_groups[0]["start_lr"]
    assert isinstance(start_lr, float) and start_lr == pytest.approx(RATE)
    assert optimizer.turn() == [pytest.approx(TURN / 2)]


# ---- groups


def test_a_groups_own_rate_scales_its_turn() -> None:
    model = mlp()
    slower = {"params": model[0].parameters(), "lr": RATE / 4}
    groups = [slower, {"params": model[3:].parameters()}]
    optimizer = build(model, turn=TURN, lr=RATE, groups=groups)
    found = [rms(angles) for angles in step_and_find_angles(model, optimizer)]
    assert optimizer.turn() == pytest.approx([TURN / 4, TURN])
    assert found == pytest.approx([TURN / 4, TURN], rel=1e-6)


def test_a_groups_own_turn_is_its_angle_at_its_own_rate() -> None:
    model = mlp()
    own = {"params": model[0].parameters(), "lr": RATE / 4, "turn": 1.0}
    groups = [own, {"params": model[3:].parameters()}]
    optimizer = build(model, turn=TURN, lr=RATE, groups=groups)
    schedule = lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)
    for factor in (1, 0.5):
        found = [rms(angles) for angles in step_and_find_angles(model, optimizer)]
        assert found == pytest.approx([factor * 1.0, factor * TURN], rel=1e-6)
        schedule.step()


def test_groups_that_leave_parameters_out_are_told() -> None:
    model = mlp()
    with pytest.warns(UserWarning, match="leaves out 4 parameters, .* 3.weight, 3.bias, 6.weight"):
        build(model, turn=TURN, groups=model[0].parameters())
    model[3:].requires_grad_(False)
    build(model, turn=TURN, groups=model[0].parameters())  # no warning: they are frozen


def test_a_groups_turn_is_checked() -> None:
    model = mlp()
    with pytest.raises(ValueError, match="turn is an angle in degrees.* got 200"):
        build(model, turn=TURN, groups=[{"params": model.parameters(), "turn": 200}])


def find_head_move(rest: Any, **group: Any) -> torch.Tensor:
    """Return how far one step moves the head, which is alone in a group with these options."""
    model = mlp()
    units = {"params": [*model[0].parameters(), *model[3].parameters()]}
    groups = [units, {"params": model[6].parameters(), **group}]
    train(model, build(model, Muon, lr=RATE, rest=rest, groups=groups), 1)
    return rows(model[6]) - rows(mlp()[6])


def test_the_rate_of_a_group_without_units_is_that_of_its_rest() -> None:
    rest = functools.partial(SGD, lr=RATE / 5)
    expected = find_head_move(functools.partial(SGD, lr=0.3))
    torch.testing.assert_close(find_head_move(rest, lr=0.3), expected, rtol=1e-9, atol=0)
    without = find_head_move(rest)
    torch.testing.assert_close(without, expected * RATE / 5 / 0.3, rtol=1e-9, atol=0)


def test_the_rate_of_a_group_with_units_scales_its_rest_along() -> None:
    model = mlp()
    rest = functools.partial(SGD, lr=RATE / 5)
    groups = [{"params": model.parameters(), "lr": RATE / 2}]
    train(model, build(model, Muon, lr=RATE, rest=rest, groups=groups), 1)
    moved = rows(model[6]) - rows(mlp()[6])
    torch.testing.assert_close(moved, find_head_move(rest) / 2, rtol=1e-9, atol=0)


def test_a_group_that_is_added_steps_at_the_rate_it_names() -> None:
    model = mlp()
    extra = nn.Parameter(torch.ones(3).double())
    optimizer = build(model, lr=RATE, rest=functools.partial(SGD, lr=0.5))
    optimizer.add_param_group({"params": [extra], "lr": 0.1})
    extra.grad = torch.ones_like(extra)
    train(model, optimizer, 1)
    assert extra.tolist() == pytest.approx([0.9] * 3)


def find_changes(**options: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Return how one step at half the starting rate changes r, and the output layer."""
    model = mlp()
    optimizer = build(model, lr=RATE, **options)
    for group in optimizer.param_groups:
        group["lr"] = RATE / 2
    train(model, optimizer, 1)
    first = mlp()
    r = rows(model[0]).norm(dim=1) - rows(first[0]).norm(dim=1)
    return r, rows(model[6]) - rows(first[6])


def test_one_number_for_all_groups_keeps_the_ratio_of_r() -> None:
    r, rest = find_changes(scale_lr=3 * RATE, turn=TURN)
    r_alike, rest_alike = find_changes(turn=TURN)
    torch.testing.assert_close(r, 3 * r_alike, rtol=1e-9, atol=0)
    torch.testing.assert_close(rest, rest_alike, rtol=1e-9, atol=0)


def test_one_number_for_all_groups_keeps_the_ratio_of_the_rest() -> None:
    _, rest = find_changes(base=Muon, rest=functools.partial(SGD, lr=RATE / 5))
    _, expected = find_changes(base=SGD)
    torch.testing.assert_close(rest, expected / 5, rtol=1e-9, atol=0)


# ---- angles that cannot be meant


def test_a_turn_that_looks_like_a_rate_is_warned_of() -> None:
    with pytest.warns(UserWarning, match="turn=0.02 is an angle in degrees, and a small one"):
        build(mlp(), turn=0.02)


def test_a_rate_that_looks_like_an_angle_is_warned_of() -> None:
    with pytest.warns(UserWarning, match="lr=2.4 is the rate at which AdamW .* far too large"):
        build(mlp(), Muon, turn=2.4, lr=2.4)


def set_rate(optimizer: Any, rate: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = rate


def test_an_angle_above_four_turns_is_warned_of_once() -> None:
    model, optimizer, _ = start(Loop)
    set_rate(optimizer, 5 * RATE)
    with pytest.warns(UserWarning, match="0.1 turns units by 12 degrees.*build .* with lr=0.1"):
        train(model, optimizer, 1)
    train(model, optimizer, 1)


def test_a_peak_above_four_turns_is_warned_of_at_the_first_step() -> None:
    model = mlp()
    optimizer = build(model, turn=TURN, lr=RATE, momentum=0.9)
    lr_scheduler.OneCycleLR(optimizer, max_lr=5 * RATE, total_steps=100)
    with pytest.warns(UserWarning, match="If 0.1 is the schedule's peak"):
        train(model, optimizer, 1)


def test_a_schedule_that_never_comes_near_the_rate_of_the_turn_is_warned_of_once() -> None:
    model = mlp()
    optimizer = build(model, turn=TURN, lr=RATE)
    schedule = lr_scheduler.LambdaLR(optimizer, lambda step: 0.02 * min(step + 1, 10 - step))
    for _ in range(5):
        train(model, optimizer, 1)
        schedule.step()
    with pytest.warns(UserWarning, match="after a peak of 0.1 times the lr") as caught:
        train(model, optimizer, 1)
        schedule.step()
        train(model, optimizer, 1)
    assert len(caught) == 1


def test_a_low_rate_is_not_warned_of_at_the_end_of_a_run_that_goes_on() -> None:
    model = mlp()
    optimizer = build(model, turn=TURN, lr=RATE)
    train(model, optimizer, 1)
    resumed = build(model, turn=TURN, lr=RATE)
    resumed.load_state_dict(through_a_file(optimizer.state_dict()))
    for rate in (RATE / 10, RATE / 20):
        for group in resumed.param_groups:
            group["lr"] = rate
        train(model, resumed, 1)


def test_a_turn_written_to_all_groups_counts_for_those_with_units() -> None:
    """As in a loop over param_groups that follows the advice to set the angle after loading."""
    model = mlp()
    optimizer = build(model, turn=TURN, lr=RATE)
    for group in optimizer.param_groups:
        group["turn"] = TURN / 2
    train(model, optimizer, 1)
    assert optimizer.turn() == [TURN / 2]
    resumed = build(model, turn=TURN / 2, lr=RATE)
    resumed.load_state_dict(through_a_file(optimizer.state_dict()))
    assert resumed.turn() == [TURN / 2]


def test_the_method_that_reads_angles_is_not_overwritten() -> None:
    optimizer = build(mlp(), turn=TURN, lr=RATE)
    with pytest.raises(AttributeError, match="set the 'turn' of a group"):
        optimizer.turn = 5
    assert optimizer.turn() == [TURN]


def test_an_angle_of_four_turns_is_not_warned_of() -> None:
    model, optimizer, _ = start(Loop)
    set_rate(optimizer, 4 * RATE)
    train(model, optimizer, 1)


def test_an_angle_above_90_degrees_is_refused_before_anything_is_written() -> None:
    model, optimizer, _ = start(Loop)
    set_rate(optimizer, 1.0)
    with pytest.raises(ValueError, match="1 turns units by 120 degrees: turn=2.4 is for lr=0.02"):
        train(model, optimizer, 1)
    assert_same_weights(model, mlp())


def test_peaks_of_the_older_form_are_refused_with_the_new_line() -> None:
    model = mlp()
    optimizer = build(model, turn=TURN, lr=RATE, momentum=0.9)
    lr_scheduler.OneCycleLR(optimizer, max_lr=[TURN, RATE], total_steps=STEPS)
    with pytest.raises(ValueError, match="max_lr=0.02 for all groups, not max_lr=\\[turn, lr\\]"):
        train(model, optimizer, 1)


def test_an_angle_above_90_degrees_is_refused_at_any_rate() -> None:
    model = mlp()
    optimizer = build(model, turn=30, lr=RATE)
    set_rate(optimizer, 4 * RATE)
    with pytest.raises(ValueError, match="turns units by 120 degrees: turn=30 is for lr=0.02"):
        train(model, optimizer, 1)


def test_a_groups_rate_whose_angle_is_above_90_degrees_is_refused_when_it_is_given() -> None:
    model = mlp()
    groups = [{"params": model.parameters(), "lr": 4 * RATE}]
    with pytest.raises(ValueError, match="turns units by 120 degrees"):
        build(model, turn=30, lr=RATE, groups=groups)


def test_a_rate_that_happens_to_be_the_turn_is_not_blamed_on_one_cycle() -> None:
    model = mlp()
    optimizer = build(model, turn=1.0, lr=0.1)
    set_rate(optimizer, 1.0)
    with pytest.warns(UserWarning, match="If 1 is the schedule's peak"):
        train(model, optimizer, 1)


@pytest.mark.parametrize("wrap", [False, True])
def test_the_warning_points_at_the_line_that_steps(wrap: bool) -> None:
    """Also where a scheduler has wrapped `step`."""
    model, optimizer, _ = start(Loop)
    if wrap:
        lr_scheduler.ConstantLR(optimizer, 1.0)
    set_rate(optimizer, 5 * RATE)
    backward(model)
    with pytest.warns(UserWarning, match="turns units by 12") as caught:
        optimizer.step()
    assert caught[0].filename == __file__


@pytest.mark.parametrize(
    "group", [{"lr": 0.0, "turn": 2.0}, {"lr": 0.0, "turn": 2.0, "max_turn": 3.0}], ids=str
)
def test_a_groups_turn_at_a_rate_of_zero_gets_a_sentence(group: Any) -> None:
    model = mlp()
    with pytest.raises(ValueError, match="lr is above 0 with turn"):
        build(model, lr=RATE, groups=[{"params": model.parameters(), **group}])


@pytest.mark.parametrize("option", ["turn", "max_turn"])
def test_a_turn_of_a_group_that_is_added_gets_a_sentence(option: str) -> None:
    optimizer = build(mlp(), turn=2.0)
    extra = nn.Parameter(torch.ones(3, 3).double())
    with pytest.raises(ValueError, match="part of the rest and has no units to turn"):
        optimizer.add_param_group({"params": [extra], option: 1.0})


def test_without_a_turn_any_rate_is_taken() -> None:
    model = mlp()
    optimizer = build(model, lr=RATE)
    set_rate(optimizer, 2.0)
    train(model, optimizer, 1)
    assert optimizer.turn() == []
