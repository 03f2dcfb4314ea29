"""Shared by all tests: a seed before each, and what to skip on this machine."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

HERE = Path(__file__).parent

# Processes that tests start find the helpers, too.
os.environ["PYTHONPATH"] = os.pathsep.join(
    filter(None, [str(HERE / "helpers"), os.environ.get("PYTHONPATH")])
)
os.environ["ACCELERATE_USE_CPU"] = "true"  # tests compare runs to the bit


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


@pytest.fixture
def fresh_accelerate() -> Iterator[None]:
    """Accelerate has one precision for the life of a process; tests have several."""
    from accelerate.state import AcceleratorState, GradientState

    AcceleratorState._reset_state(reset_partial_state=True)
    yield
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


@pytest.hookimpl(tryfirst=True)  # before -m selects by the marks set here
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.get_closest_marker("gpu") and not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
