"""Shared by the tests of the laboratory."""

from collections.abc import Iterator

import pytest

from geoparam_lab.experiments import toys


@pytest.fixture
def undrawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs without figures, which take most of a short run's time."""
    monkeypatch.setattr(toys, "save_figures", lambda *_: None)
    monkeypatch.setattr("geoparam_lab.experiments.image_figures.draw", lambda *_: None)


@pytest.fixture
def fresh_accelerate() -> Iterator[None]:
    """Accelerate has one precision for the life of a process; other tests have others."""
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(True)
    yield
    AcceleratorState._reset_state(True)
