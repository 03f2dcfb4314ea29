"""A step is whole or not there: an error or a signal in it leaves no weight in between."""

import copy
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest
import torch
from plain_models import assert_same_weights, backward, every_kind, start, train
from torch import Tensor, nn


class Interrupted(BaseException):
    """What a test raises at a line of a step, as Ctrl-C does."""


class BreakAt:
    """Raises at the n-th line of Python that runs in the context, in whichever file."""

    def __init__(self, line: int) -> None:
        self.left = line

    def __enter__(self) -> None:
        sys.settrace(self._trace)

    def __exit__(self, *_: object) -> None:
        sys.settrace(None)
        torch.set_grad_enabled(True)  # where torch's own no_grad was broken

    def _trace(self, frame: FrameType, event: str, argument: Any) -> Any:
        if event == "line":
            self.left -= 1
            if self.left == 0:
                raise Interrupted
        return self._trace


def find_written(model: nn.Module, optimizer: Any) -> dict[str, Tensor]:
    """Return copies of all that we write: weights and biases of units, and their masters."""
    written = {}
    for name in ("0.weight", "0.bias", "3.weight", "3.bias"):
        p = model.get_parameter(name)
        written[name] = p.detach().clone()
        if "master" in optimizer.state[p]:
            written[f"{name}'s master"] = optimizer.state[p]["master"].clone()
    return written


def list_tensors(model: nn.Module, optimizer: Any) -> list[Tensor]:
    """Return all parameters and all tensors of their states."""
    tensors = [p.detach() for p in model.parameters()]
    for state in optimizer.state.values():
        tensors += [x for x in state.values() if isinstance(x, Tensor)]
    return tensors


def remember_values(model: nn.Module, optimizer: Any) -> Callable[[], None]:
    """Return a function that brings all values back in place: the next step is a warm one."""
    tensors = list_tensors(model, optimizer)
    values = [x.clone() for x in tensors]

    def restore() -> None:
        for x, value in zip(tensors, values, strict=True):
            x.copy_(value)

    return restore


def remember_states(model: nn.Module, optimizer: Any) -> Callable[[], None]:
    """Return a function that loads the present state: the next step builds everything anew."""
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))

    def restore() -> None:
        model.load_state_dict(saved[0])
        optimizer.load_state_dict(saved[1])

    return restore


def check_whole(found: Any, before: Any, after: Any, line: int) -> None:
    for name, value in found.items():
        is_before = torch.equal(value, before.get(name, value))  # new masters are as weights
        is_after = torch.equal(value, after[name])
        assert is_before or is_after, f"{name} is torn at line {line}"


def break_at_lines(
    model: nn.Module, optimizer: Any, restore: Callable[[], None], every: int = 1
) -> None:
    """Break a step at one line after the other, and check what is written."""
    before = find_written(model, optimizer)
    optimizer.step()
    after = find_written(model, optimizer)
    assert not torch.equal(before["0.weight"], after["0.weight"])

    line = 1
    while True:
        restore()
        try:
            with BreakAt(line):
                optimizer.step()
            break
        except Interrupted:
            check_whole(find_written(model, optimizer), before, after, line)
        line += every
    assert line > 100


@pytest.mark.parametrize("kind", ["SGD", "Adam", "Muon", "turn", "bfloat16 turn"])
def test_breaking_a_step_at_any_line_leaves_each_weight_as_before_or_as_after(kind: str) -> None:
    model, optimizer = start(kind)
    train(model, optimizer)
    restore = remember_values(model, optimizer)
    backward(model, 3)
    break_at_lines(model, optimizer, restore)


EVERY = [7, pytest.param(1, marks=pytest.mark.slow)]


@pytest.mark.parametrize("kind", ["angles", "bounded", "bfloat16 angles"])
@pytest.mark.parametrize("every", EVERY)
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
