"""An experiment is one record: the example in the docs has a command, a table and a page."""

import math
import re
import sys
import types
from pathlib import Path
from typing import Any

import pytest

from geoparam_lab import cli, experiments, report
from geoparam_lab.experiments import ENTRIES, Entry
from geoparam_lab.experiments.experiment import Experiment
from geoparam_lab.run_folder import Run

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs" / "experiments.md"
STORED_RUNS = sorted((ROOT / "results" / "runs").iterdir())


@pytest.fixture
def corner(monkeypatch: pytest.MonkeyPatch) -> Experiment:
    """The example of the docs, in the list of experiments."""
    _, _, section = DOCS.read_text(encoding="utf-8").partition("## Add an experiment")
    [code] = re.findall(r"```python\n(.*?)```", section, re.DOTALL)
    module = types.ModuleType("geoparam_lab.experiments.corner")
    exec(compile(code, "corner.py", "exec"), module.__dict__)
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setitem(ENTRIES, "corner", Entry("corner", "EXPERIMENT", "Fit |x|."))
    return experiments.find("corner")


def test_the_example_has_a_command_a_table_and_a_page(
    corner: Experiment,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    out = tmp_path / "corner"
    words = ["geoparam", "run", "corner", "--seeds", "2", "--resume", "--out", str(out)]
    monkeypatch.setattr(sys, "argv", words)

    with pytest.raises(SystemExit) as exit:
        cli.main()

    assert exit.value.code == 0
    printed = capsys.readouterr().out
    assert "| Training error " in printed
    assert "| GmP" in printed
    assert [record["seed"] for record in Run.open(out).records()] == [0, 1, 0, 1]
    assert "Networks of 8 units fit |x|." in report.make_page([out])


@pytest.mark.parametrize("name", ENTRIES)
def test_every_experiment_describes_itself(name: str) -> None:
    experiment = experiments.find(name)

    assert experiment.name == name
    assert experiment.title
    assert experiment.about
    assert experiment.summary
    assert experiment.layouts


@pytest.mark.parametrize("name", ENTRIES)
def test_every_experiment_is_in_the_docs(name: str) -> None:
    assert f"geoparam run {name}" in DOCS.read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("name", "options", "match"),
    [
        ("levy", {"methods": []}, "got none"),
        ("levy", {"methods": ["gmp:init=he"]}, "Use 'glorot', 'sphere' or 'released'"),
        ("levy", {"seeds": 0}, ">= 1; got 0"),
        ("levy", {"lrs": [0.1, math.inf]}, "above 0 and finite"),
        ("levy", {"folds": 1}, "cannot be divided"),
        ("levy", {"jobs": 0}, "jobs must be >= 1"),
        ("levy", {"folds": 999}, "cannot be divided"),
        ("perturbation", {"seeds": 0}, ">= 1"),
        ("uci", {"datasets": ["bostn"]}, "datasets .* of boston, .*, levy8; got 'bostn'"),
        ("uci", {"methods": ["gpm"]}, "methods .* of sp, .*; got 'gpm'"),
        ("uci", {"protocol": "test"}, "protocol .* of paper, heldout, cv; got 'test'"),
        ("uci", {"folds": 5}, "folds are of protocol 'cv'"),
        ("uci", {"datasets": ["levy2"], "protocol": "cv", "folds": 4000}, "cannot be divided"),
        ("uci", {"datasets": ["levy2"], "protocol": "cv", "folds": 0}, "into 0 folds"),
        ("uci", {"methods": ["bn:init=sphere"]}, "of geometric layers; got 'bn'"),
        ("uci", {"seeds": 0}, "seeds must be >= 1; got 0"),
        ("uci", {"lrs": []}, "lrs must be learning rates above 0 and finite"),
        ("uci", {"lrs": [math.nan, 0.1]}, "finite"),
    ],
)
def test_mistakes_are_refused_before_anything_is_written(
    tmp_path: Path, name: str, options: dict[str, Any], match: str
) -> None:
    with pytest.raises(ValueError, match=match):
        experiments.find(name).run(tmp_path / "run", **options)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("folder", STORED_RUNS)
def test_stored_runs_have_a_page(folder: Path) -> None:
    page = report.make_page([folder])

    assert "<table" in page
    assert "How to run it again" in page
