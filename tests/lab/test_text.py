"""Sweeps over text: which runs there are, tables, figure, resuming, and mistaken options."""

import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from image_runs import without_times
from text_runs import text as make_text

from geoparam_lab.checks import find_defaults
from geoparam_lab.experiments import text, text_results
from geoparam_lab.run_folder import Run
from geoparam_lab.tables import tables
from geoparam_lab.training.text.settings import list_tasks

pytest.importorskip("accelerate")
pytestmark = pytest.mark.usefixtures("fresh_accelerate")

GRID: dict[str, Any] = {
    "methods": ["turn", "muon"],
    "widths": [16, 8],
    "depths": [1, 2],
    "steps": [4],
    "batch_sizes": [4],
    "turns": [1.2, 2.4],
    "lrs": [0.01, 0.02],
    "one_factor": True,
    "context": 16,
    "windows": 8,
    "marks": 1,
}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "words.txt"
    path.write_bytes(bytes(make_text().train))
    return path


def sweep(out: Path, data: Path, **changes: Any) -> Run:
    done = text.run(out, data=data, **{**GRID, **changes})
    assert done is not None
    return done


@pytest.fixture(scope="module")
def whole(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    return sweep(tmp_path_factory.mktemp("sweep") / "whole", data)


def test_one_factor_varies_around_the_first_of_each(whole: Run) -> None:
    sizes = {(record["width"], record["depth"]) for record in whole.records()}
    assert sizes == {(16, 1), (8, 1), (16, 2)} and len(whole.records()) == 3 * 4


def test_a_method_has_the_numbers_that_are_its_own() -> None:
    axes = {"decays": [0.1, 0.3], "momenta": [0.9], "rest_lrs": [0.01], "scale_lrs": [0.03]}
    axes |= {"rest_decays": None, "schedules": ["linear", "power"], "seeds": 2}
    config = {**GRID, **axes, **find_defaults(text.TextSettings), "one_factor": False}
    config |= {"widths": [16], "depths": [1], "methods": ["turn", "muon", "adamw"]}
    names = [task.name for task in list_tasks(config)]
    counts = [sum(name.startswith(f"{m}-") for name in names) for m in config["methods"]]
    assert counts == [2 * 2 * 2, 2 * 2 * 2 * 2, 2 * 2 * 2 * 2]  # peaks, decays, schedules, seeds
    size = "width16-depth1-steps4-batch4"
    assert names[0] == f"turn-{size}-turn1.2-momentum0.9-rest_lr0.01-scale_lr0.03-seed0"
    assert f"adamw-{size}-lr0.01-decay0.3-momentum0.9-power-seed1" in names


def test_a_method_may_have_values_of_its_own() -> None:
    axes = dict.fromkeys(("decays", "momenta", "rest_lrs", "rest_decays", "scale_lrs"))
    config = {**GRID, **axes, **find_defaults(text.TextSettings), "widths": [16]}
    config |= {"depths": [1], "schedules": ["linear"], "seeds": 1}
    config["methods"] = ["muon:lr=0.3:decay=0,0.5", "turn:turn=7:schedule=hold,cosine", "muon"]
    found = [(t.settings.method, t.settings.turn or t.settings.lr) for t in list_tasks(config)]
    assert found == [("muon", 0.3)] * 2 + [("turn", 7)] * 2 + [("muon", 0.01), ("muon", 0.02)]


def test_the_record_says_what_the_text_was(whole: Run) -> None:
    found = whole.config["data"]
    assert found["name"] == "words.txt" and re.fullmatch("[0-9a-f]{64}", found["sha256"])


def test_tables_have_the_best_setting_and_all_settings(whole: Run) -> None:
    best, details, all_settings = tables.make_tables(whole)
    assert len(best.rows) == 3 * 2 and len(all_settings.rows) == 3 * 4
    rows = [dict(zip(best.columns, row, strict=True)) for row in best.rows]
    assert {row[details.columns.index("settings tried")] for row in details.rows} == {"2"}
    losses = {r["name"]: r["val_loss"] for r in whole.records() if r["method"] == "turn"}
    lowest = min(loss for name, loss in losses.items() if "width16-depth1" in name)
    [row] = [
        row for row in rows if (row["method"], row["width"], row["depth"]) == ("turn", "16", "1")
    ]
    assert row["Validation loss (nats per byte)"] == f"{lowest:.4f}"
    above = [dict(zip(all_settings.columns, row, strict=True)) for row in all_settings.rows]
    assert sum(row["above its best"] == "0.0000" for row in above) == 6
    assert "SHA-256" in "".join(best.notes)


def test_the_figure_has_a_line_for_each_size(whole: Run) -> None:
    from geoparam_lab.experiments import text_figures

    records = whole.records()
    panels = {m: text_results.measure_peaks(records, m) for m in ("turn", "muon")}
    figure = text_figures.draw_peaks(panels)
    assert [ax.get_title(loc="left") for ax in figure.axes] == ["turn", "muon"]
    legend = figure.axes[-1].get_legend()
    assert legend is not None
    assert [entry.get_text() for entry in legend.get_texts()] == [
        "width 8, depth 1",
        "width 16, depth 1",
        "width 16, depth 2",
    ]
    lines = [line for line in figure.axes[0].lines if not line.get_label().startswith("_")]
    assert [list(line.get_xdata()) for line in lines] == [[1.2, 2.4]] * 3
    caption = (whole.folder / "figures" / "peaks.txt").read_text()
    assert "One number for 3 sizes" in caption and "degrees by" in caption


def test_the_transfer_figure_has_a_panel_for_each_number_that_varies_alone(whole: Run) -> None:
    from geoparam_lab.experiments import text_figures

    records = whole.records()
    panels = {m: text_results.measure_peaks(records, m) for m in ("turn", "muon")}
    centre = text_results.find_centre(panels["turn"])
    assert centre[:2] == (16, 1)
    figure = text_figures.draw_transfer(panels, centre)
    assert figure is not None
    assert [ax.get_title(loc="left") for ax in figure.axes] == [
        f"{method}: {word}" for method in panels for word in ("width", "depth")
    ]
    lines = [line for line in figure.axes[0].lines if not line.get_label().startswith("_")]
    assert [line.get_label() for line in lines] == ["width 8", "width 16"]
    assert [min(line.get_ydata()) for line in lines] == [0, 0]
    assert (whole.folder / "figures" / "transfer.txt").exists()


def test_one_size_has_nothing_to_transfer() -> None:
    from geoparam_lab.experiments import text_figures

    size = (64, 6, 500, 96)
    assert text_figures.draw_transfer({"turn": {size: {1.2: 1.0, 2.4: 0.9}}}, size) is None


def test_a_size_that_differs_in_two_numbers_is_in_no_panel() -> None:
    sizes = [(width, depth, 500, 96) for width in (64, 256) for depth in (6, 12)]
    by_size = {size: {2.4: 1.0} for size in sizes}
    factors = text_results.list_factors(by_size, centre=sizes[0])
    assert {word: list(lines) for word, lines in factors.items()} == {
        "width": [64, 256],
        "depth": [6, 12],
    }


def test_the_common_peak_is_the_one_with_the_least_excess() -> None:
    losses = {(64, 6, 500, 96): {1.2: 1.00, 2.4: 1.02, 4.8: 1.3}}
    losses[256, 6, 500, 96] = {1.2: 0.95, 2.4: 0.90, 4.8: math.nan}
    common = text_results.find_common(losses)
    assert common is not None and common.peak == 2.4
    assert common.excess == pytest.approx(0.02) and common.sizes == 2


def test_settings_are_compared_on_the_seeds_that_both_have() -> None:
    size = {"method": "turn", "width": 64, "depth": 6, "steps": 500, "batch_size": 96}
    losses = {(1.2, 0): 1.05, (2.4, 0): 1.04, (2.4, 1): 1.00, (2.4, 2): 0.99, (4.8, 0): 1.10}
    records = [
        {**size, "lr": 0.01, "turn": turn, "tuned": f"turn={turn}", "seed": seed, "val_loss": loss}
        for (turn, seed), loss in losses.items()
    ]
    [by_peak] = text_results.measure_peaks(records, "turn").values()
    assert by_peak == {1.2: 1.05, 2.4: 1.04, 4.8: 1.10}
    shown = [r for r in text_results.find_for_tables(records) if r["table"] == "all"]
    excess = [record["excess"] for record in shown]
    assert excess == pytest.approx([0.01, 0.0, 0.0, 0.0, 0.06])


def test_a_resumed_sweep_ends_with_the_same_records_and_may_get_more(
    whole: Run, data: Path, tmp_path: Path
) -> None:
    sweep(tmp_path / "cut", data, depths=[1], turns=[1.2])
    resumed = sweep(tmp_path / "cut", data, resume=True)
    assert len(resumed.records()) == len(whole.records())
    found = {record["name"]: without_times(record) for record in resumed.records()}
    for record in whole.records():
        np.testing.assert_equal(found[record["name"]], without_times(record))


def test_another_text_or_setting_is_refused(whole: Run, data: Path, tmp_path: Path) -> None:
    other = tmp_path / "words.txt"
    other.write_bytes(bytes(make_text().train) + b"!")
    with pytest.raises(ValueError, match="data"):
        sweep(whole.folder, other, resume=True)
    with pytest.raises(ValueError, match="clip"):
        sweep(whole.folder, data, resume=True, clip=0.5)


@pytest.mark.slow
def test_jobs_give_the_same_records(whole: Run, data: Path, tmp_path: Path) -> None:
    side_by_side = sweep(tmp_path / "jobs", data, jobs=2)
    found = {record["name"]: record["val_loss"] for record in side_by_side.records()}
    for record in whole.records():
        assert found[record["name"]] == pytest.approx(record["val_loss"], rel=1e-5)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"methods": ["lion"]}, "each of methods is one of turn, geometric, adamw"),
        ({"methods": ["muon:turn=2"]}, "options of muon are lr, decay.*got 'turn=2'"),
        ({"methods": ["muon:lr=fast"]}, "got 'lr=fast'"),
        ({"methods": []}, "methods must not be empty"),
        ({"widths": []}, "widths must not be empty"),
        ({"widths": [0]}, "width must be >= 1; got 0"),
        ({"widths": [30], "heads": 4}, "multiple of heads; got width 30 and 4 heads"),
        ({"turns": [0.0]}, "turn must be above 0 and finite; got 0.0"),
        ({"lrs": [math.nan]}, "lr must be above 0 and finite; got nan"),
        ({"decays": [-1.0]}, "decay must be 0 or more"),
        ({"momenta": [1.0]}, "momentum must be from 0 to below 1"),
        ({"schedules": ["stairs"]}, "each of schedules is one of linear, cosine, power, hold"),
        ({"norm": "batchnorm"}, "norm is one of layernorm, rmsnorm"),
        ({"mlp": "swish"}, "mlp is one of relu2, gelu, relu"),
        ({"speed": 3}, "settings are heads, .*got speed"),
        ({"context": 4000}, "text must be longer than the context"),
        (
            {"methods": ["muonh"], "turns": None, "zero_projections": True},
            "muonh keeps each matrix",
        ),
        (
            {"methods": ["adamw"], "turns": [math.nan]},
            "turns are numbers of the methods turn; got methods adamw",
        ),
        ({"methods": ["turn", "muon:lr=0.1"], "lrs": [0.1]}, "lrs are numbers of the methods"),
        ({"coordinates": "angles"}, "turn needs coordinates intrinsic"),
        ({"seeds": 0}, "seeds must be >= 1"),
    ],
)
def test_mistaken_options_are_named(
    options: dict[str, Any], said: str, data: Path, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=said):
        sweep(tmp_path / "out", data, **options)
    assert not (tmp_path / "out").exists()


def test_the_commands_options_are_the_settings(data: Path, tmp_path: Path) -> None:
    typer = pytest.importorskip("typer.testing")
    from geoparam_lab.cli import app

    words = f"run text --data {data} --out {tmp_path / 'run'} --methods turn --turns 2 --widths 8"
    words += " --depths 1 --steps 2 --batch-sizes 2 --context 8 --windows 2 --marks 1"
    done = typer.CliRunner().invoke(app(), words.split())
    assert done.exit_code == 0, done.output
    assert "turn 2, momentum 0.95" in done.output
    missing = typer.CliRunner().invoke(app(), "run text --data no.txt".split())
    assert missing.exit_code != 0 and "is not a file" in str(missing.exception)
