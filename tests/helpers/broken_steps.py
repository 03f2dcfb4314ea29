"""Steps of an optimizer that an error breaks at any of their lines."""

import copy
import functools
import os
import sys
import traceback
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn


class Interrupted(BaseException):
    """What a test raises at a line of a step, as Ctrl-C does."""


def in_a_child(test: Callable[..., None]) -> Callable[..., None]:
    """Run a test in a process of its own: a break in torch's files leaves torch's flags set."""

    @functools.wraps(test)
    def run(**arguments: Any) -> None:
        child = os.fork()
        if child == 0:
            torch.set_num_threads(1)  # OpenMP's other threads are not there after a fork
            code = 1
            try:
                test(**arguments)
                code = 0
            except BaseException:  # pytest's failures are no Exceptions
                traceback.print_exc()
            finally:
                os._exit(code)
        assert os.waitpid(child, 0)[1] == 0, "see the child's traceback"

    return run


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
