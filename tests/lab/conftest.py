"""Shared by the tests of the laboratory."""

from pathlib import Path
from unittest.mock import Mock

import pytest

from geoparam_lab.data import table_files
from geoparam_lab.experiments import toys


@pytest.fixture
def undrawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs without figures, which take most of a short run's time."""
    monkeypatch.setattr(toys, "save_figures", lambda *_: None)
    monkeypatch.setattr("geoparam_lab.experiments.image_figures.draw", lambda *_: None)


@pytest.fixture
def nowhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No file on any disk, and no network."""
    monkeypatch.delenv("GEOPARAM_DATA", raising=False)
    monkeypatch.setenv("GEOPARAM_CACHE", str(tmp_path / "empty"))
    monkeypatch.setattr(table_files, "fetch", Mock(side_effect=OSError("no network")))
