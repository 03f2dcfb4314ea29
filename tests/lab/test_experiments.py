"""An experiment is one record: the example in the docs has a command, a table and a page."""

import re
import sys
from pathlib import Path

import pytest

from geoparam import cli
from geoparam_lab import report
from geoparam_lab.experiments import EXPERIMENTS
from geoparam_lab.experiments.experiment import Experiment
from geoparam_lab.run_folder import Run

DOCS = Path(__file__).parents[2] / "docs" / "experiments.md"


@pytest.fixture
def corner(monkeypatch: pytest.MonkeyPatch) -> Experiment:
    """The example of the docs, in the list of experiments."""
    section = DOCS.read_text(encoding="utf-8").partition("## Add an experiment")[2]
    [code] = re.findall(r"```python\n(.*?)```", section, re.DOTALL)
    found: dict[str, Experiment] = {}
    exec(compile(code, "corner.py", "exec"), found)
    monkeypatch.setitem(EXPERIMENTS, "corner", found["EXPERIMENT"])
    return found["EXPERIMENT"]


def test_the_example_has_a_command_a_table_and_a_page(
    corner: Experiment,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    out = tmp_path / "corner"
    monkeypatch.setattr(
        sys, "argv", ["geoparam", "run", "corner", "--seeds", "2", "--resume", "--out", str(out)]
    )
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == 0
    printed = capsys.readouterr().out
    assert "| Training error " in printed and "| GmP" in printed
    assert [r["seed"] for r in Run.open(out).records()] == [0, 1, 0, 1]
    assert "Networks of 8 units fit |x|." in report.make_page([out])


@pytest.mark.parametrize("experiment", EXPERIMENTS.values(), ids=EXPERIMENTS)
def test_every_experiment_says_what_it_is(experiment: Experiment) -> None:
    assert all((experiment.title, experiment.about, experiment.summary, experiment.layouts))
    assert f"geoparam run {experiment.name}" in DOCS.read_text(encoding="utf-8")


@pytest.mark.parametrize("folder", sorted((DOCS.parents[1] / "results" / "runs").iterdir()))
def test_stored_runs_open(folder: Path) -> None:
    page = report.make_page([folder])
    assert "<table" in page and "How to run it again" in page
