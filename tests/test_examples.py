"""What readers run: the pages' Python blocks, the notebooks, the examples, the benchmarks."""

import importlib
import json
import re
import runpy
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[1]
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
PAGES = [page for page in DOCUMENTS if "```python\n" in page.read_text("utf-8")]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.md"))
SLOW = ("watch", "small_batch")  # the site's build runs all of them whole
LAUNCHED = "# torchrun ", "# accelerate launch "  # tests/distributed/test_recipes.py runs these


def find_blocks(text: str, opening: str) -> list[str]:
    """Return the code blocks that begin with the line `opening`."""
    return re.findall(rf"^```{opening}\n(.*?)^```", text, re.DOTALL | re.MULTILINE)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_python_blocks_run(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    blocks = find_blocks(page.read_text("utf-8"), "python")
    namespace: dict[str, object] = {"__name__": "__main__"}
    for number, block in enumerate(blocks, start=1):
        if block.startswith(LAUNCHED):
            continue
        for name in ("lightning", "torchvision", "transformers"):
            if f"import {name}\n" in block or f"from {name} import" in block:
                pytest.importorskip(name)
        exec(compile(block, f"{page.name}, python block {number}", "exec"), namespace)


@pytest.mark.parametrize("name", ["conversion.md", "optimizer.md"])
def test_printed_output_is_what_the_block_before_prints(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    text = (ROOT / "docs" / name).read_text("utf-8")
    code, rest = text.split("```\n\n```\n", maxsplit=1)
    output, _ = rest.split("```", maxsplit=1)

    namespace: dict[str, object] = {"__name__": "__main__"}
    for block in find_blocks(f"{code}```", "python"):
        capsys.readouterr()
        exec(compile(block, name, "exec"), namespace)

    assert output in capsys.readouterr().out


@pytest.mark.parametrize(
    "notebook",
    [
        pytest.param(notebook, marks=[pytest.mark.slow] if notebook.stem in SLOW else [])
        for notebook in NOTEBOOKS
    ],
    ids=lambda notebook: notebook.stem,
)
def test_notebook_runs_in_a_few_steps(notebook: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("matplotlib", "pandas", "sklearn", "torchvision"):
        pytest.importorskip(name)
    monkeypatch.setenv("MPLBACKEND", "agg")
    monkeypatch.setenv("NOTEBOOK_STEPS", "4")
    namespace: dict[str, object] = {"__name__": "__main__"}
    cells = find_blocks(notebook.read_text("utf-8"), r"\{code-cell\} ipython3")
    for number, cell in enumerate(cells, start=1):
        exec(compile(cell, f"{notebook.name}, cell {number}", "exec"), namespace)
    pyplot = importlib.import_module("matplotlib.pyplot")
    pyplot.close("all")


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_example_saves_its_figure(
    path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    main = runpy.run_path(str(path))["main"]
    figure = tmp_path / "figure.png"

    main(["--steps", "3", "--out", str(figure)])

    assert figure.stat().st_size > 1000
    assert capsys.readouterr().out


def test_an_interrupted_sweep_of_defaults_goes_on_to_the_same_records(tmp_path: Path) -> None:
    from benchmarks import defaults

    out = tmp_path / "defaults.json"
    size = ["--tasks", "digits-mlp", "--seeds", "1", "--epochs", "1", "--jobs", "1"]
    options = [*size, "--methods", "plain;norm;optimizer, turn", "--out", str(out)]
    defaults.main(options)
    records = json.loads(out.read_text())
    assert len(records) == 5 * 5 + 1  # five rates, Adam and SGD for two; the README's snippet

    defaults.write(out, records[::2])
    defaults.main([*options, "--resume"])

    assert json.loads(out.read_text()) == records
    assert "| optimizer, turn | Muon, turn |" in out.with_suffix(".md").read_text()


@pytest.mark.parametrize(
    ("command", "line"),
    [
        (
            "host --layers 2 --steps 1",
            "| none | bn | imn | layers | layers+imn | intrinsic |",
        ),
        (
            "training --device cpu --networks vgg6 --batches 2 --modes eager --steps 1 "
            "--methods bn",
            "| vgg6, 2x32², eager |",
        ),
    ],
)
def test_a_benchmark_prints_its_table(
    command: str, line: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch, "set_num_threads", lambda count: None)
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", False)  # restored afterwards
    name, *arguments = command.split()
    monkeypatch.setattr(sys, "argv", [name, *arguments])

    importlib.import_module(f"benchmarks.{name}").main()

    assert line in capsys.readouterr().out
