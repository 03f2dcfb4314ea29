"""Steps are atomic: an error or a signal in one leaves no weight half written."""

import sys
from types import FrameType
from typing import Any

import pytest
import torch
from broken_steps import (
    BreakAt,
    Interrupted,
    break_at_lines,
    check_whole,
    find_written,
    in_a_child,
    remember_states,
    remember_values,
)
from plain_models import assert_same_weights, backward, every_kind, start, train


@pytest.mark.parametrize("kind", ["SGD", "Adam", "Muon", "turn", "bfloat16 turn"])
@in_a_child
def test_breaking_a_step_at_any_line_leaves_each_weight_as_before_or_as_after(kind: str) -> None:
    model, optimizer = start(kind)
    train(model, optimizer)
    restore = remember_values(model, optimizer)
    backward(model, 3)
    break_at_lines(model, optimizer, restore)


EVERY = [7, pytest.param(1, marks=pytest.mark.slow)]


@pytest.mark.parametrize("kind", ["angles", "bounded", "bfloat16 angles"])
@pytest.mark.parametrize("every", EVERY)
@in_a_child
def test_breaking_a_step_of_angles_leaves_each_weight_as_before_or_as_after(
    kind: str, every: int
) -> None:
    model, optimizer = start(kind)
    train(model, optimizer)
    restore = remember_states(model, optimizer)
    backward(model, 3)
    break_at_lines(model, optimizer, restore, every)


@pytest.mark.parametrize("kind", ["SGD", "bfloat16 turn"])
@pytest.mark.parametrize("every", EVERY)
@in_a_child
def test_breaking_the_first_step_leaves_each_weight_as_before_or_as_after(
    kind: str, every: int
) -> None:
    model, optimizer = start(kind)
    restore = remember_states(model, optimizer)
    backward(model)
    break_at_lines(model, optimizer, restore, every)


@every_kind
@pytest.mark.parametrize("steps", [0, 3], ids=["first step", "later step"])
def test_who_saves_in_the_middle_of_a_step_saves_whole_weights(kind: str, steps: int) -> None:
    """As the handler of a signal does; Python calls it between two lines."""
    (model, optimizer), (other, same) = start(kind), start(kind)
    for pair in ((model, optimizer), (other, same)):
        train(*pair, steps)
        backward(pair[0], steps)
    before = find_written(other, same)
    same.step()
    after = find_written(other, same)
    lines = 0

    def check(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal lines
        if event == "line":
            lines += 1
            check_whole(find_written(model, optimizer), before, after, lines)
        return check

    sys.settrace(check)
    try:
        optimizer.step()
    finally:
        sys.settrace(None)
    assert lines > 100
    assert_same_weights(model, other)


@pytest.mark.parametrize("kind", ["SGD", "Adam", "turn", "angles"])
def test_a_gradient_that_cannot_be_stepped_leaves_the_units(kind: str) -> None:
    model, optimizer = start(kind)
    train(model, optimizer)
    backward(model, 3)
    before = find_written(model, optimizer)
    model[3].bias.grad = model[3].bias.grad.to_sparse()
    with pytest.raises(RuntimeError):
        optimizer.step()
    torch.testing.assert_close(find_written(model, optimizer), before, rtol=0, atol=0)


@pytest.mark.parametrize("kind", ["SGD", "Muon", "angles", "bfloat16 turn"])
@in_a_child
def test_training_goes_on_after_a_broken_step(kind: str) -> None:
    model, optimizer = start(kind)
    first = train(model, optimizer)[0]
    for line in (50, 150, 250):
        backward(model)
        with pytest.raises(Interrupted), BreakAt(line):
            optimizer.step()
    for _ in range(30):
        last = train(model, optimizer, 1)[0]
    assert last < first
