"""Every example runs with tiny settings, says something and saves its figure."""

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
