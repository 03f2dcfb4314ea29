"""Every example runs with tiny settings and saves its figure; so does the sweep of defaults."""

import json
import runpy
from pathlib import Path

import pytest

pytest.importorskip("matplotlib")
EXAMPLES = sorted((Path(__file__).parents[1] / "examples").glob("*.py"))


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_example_saves_its_figure(
    path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    main = runpy.run_path(str(path))["main"]
    main(["--steps", "3", "--out", str(tmp_path / "figure.png")])
    assert (tmp_path / "figure.png").stat().st_size > 1000
    assert capsys.readouterr().out


def test_an_interrupted_sweep_of_defaults_goes_on_to_the_same_records(tmp_path: Path) -> None:
    from benchmarks import defaults

    out = tmp_path / "defaults.json"
    methods = "plain;norm;optimizer, turn"
    options = ["--tasks", "digits-mlp", "--seeds", "1", "--epochs", "1", "--jobs", "1"]
    defaults.main([*options, "--methods", methods, "--out", str(out)])
    records = json.loads(out.read_text())
    assert len(records) == 5 * 5 + 1  # five rates, Adam and SGD for two; the README's snippet
    defaults.write(out, records[::2])
    defaults.main([*options, "--methods", methods, "--out", str(out), "--resume"])
    assert json.loads(out.read_text()) == records
    assert "| optimizer, turn | Muon, turn |" in out.with_suffix(".md").read_text()
