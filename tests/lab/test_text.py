"""Sweeps over text: which runs there are, tables, figure, resuming, and mistaken options."""

import math
import re
from collections import Counter
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
from geoparam_lab.tables.formats import Table
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
    run = text.run(out, data=data, **(GRID | changes))
    assert run is not None
    return run


@pytest.fixture(scope="module")
def whole(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """The finished sweep over GRID: three sizes, two methods, two peaks."""
    return sweep(tmp_path_factory.mktemp("sweep") / "whole", data)


def losses_by_name(run: Run) -> dict[str, float]:
    return {record["name"]: record["val_loss"] for record in run.records()}


def rows_of(table: Table) -> list[dict[str, str]]:
    """The rows of a table by their headings."""
    return [dict(zip(table.columns, row, strict=True)) for row in table.rows]


def test_one_factor_varies_around_the_first_of_each(whole: Run) -> None:
    records = whole.records()

    sizes = {(record["width"], record["depth"]) for record in records}

    assert sizes == {(16, 1), (8, 1), (16, 2)}
    assert len(records) == 3 * 4


def make_config(**changes: Any) -> dict[str, Any]:
    """A sweep at one size, over the peaks and what `changes` names."""
    axes = ("decays", "momenta", "rest_lrs", "rest_decays", "scale_lrs")
    config = GRID | dict.fromkeys(axes) | find_defaults(text.TextSettings)
    config |= {"widths": [16], "depths": [1], "schedules": ["linear"], "seeds": 1}
    return config | changes


def test_a_method_varies_only_the_numbers_that_are_its_own() -> None:
    config = make_config(
        methods=["turn", "muon", "adamw"],
        decays=[0.1, 0.3],
        momenta=[0.9],
        rest_lrs=[0.01],
        scale_lrs=[0.03],
        schedules=["linear", "power"],
        seeds=2,
        one_factor=False,
    )

    names = [task.name for task in list_tasks(config)]

    counts = Counter(name.split("-")[0] for name in names)
    peaks, decays, schedules, seeds = 2, 2, 2, 2
    assert counts == {
        "turn": peaks * schedules * seeds,
        "muon": peaks * decays * schedules * seeds,
        "adamw": peaks * decays * schedules * seeds,
    }
    size = "width16-depth1-steps4-batch4"
    assert names[0] == f"turn-{size}-turn1.2-momentum0.9-rest_lr0.01-scale_lr0.03-seed0"
    assert f"adamw-{size}-lr0.01-decay0.3-momentum0.9-power-seed1" in names


def test_a_method_may_have_values_of_its_own() -> None:
    methods = ["muon:lr=0.3:decay=0,0.5", "turn:turn=7:schedule=hold,cosine", "muon"]

    tasks = list_tasks(make_config(methods=methods))

    peaks = [(task.settings.method, task.settings.turn or task.settings.lr) for task in tasks]
    assert peaks == [
        ("muon", 0.3),
        ("muon", 0.3),
        ("turn", 7),
        ("turn", 7),
        ("muon", 0.01),
        ("muon", 0.02),
    ]


def test_the_record_says_what_the_text_was(whole: Run) -> None:
    data = whole.config["data"]

    assert data["name"] == "words.txt"
    assert re.fullmatch("[0-9a-f]{64}", data["sha256"])


def test_the_table_has_the_best_setting_of_each_size(whole: Run) -> None:
    best, details, _ = tables.make_tables(whole)

    assert len(best.rows) == 3 * 2
    [row] = [
        row
        for row in rows_of(best)
        if row["method"] == "turn" and row["width"] == "16" and row["depth"] == "1"
    ]
    tried = [
        loss
        for name, loss in losses_by_name(whole).items()
        if name.startswith("turn-width16-depth1-")
    ]
    assert row["Validation loss (nats per byte)"] == f"{min(tried):.4f}"
    assert {row["settings tried"] for row in rows_of(details)} == {"2"}
    assert "SHA-256" in "".join(best.notes)


def test_a_table_has_all_settings_and_how_far_they_are_above_the_best(whole: Run) -> None:
    _, _, all_settings = tables.make_tables(whole)

    above = [row["above its best"] for row in rows_of(all_settings)]

    assert len(above) == 3 * 4
    assert above.count("0.0000") == 3 * 2


@pytest.fixture(scope="module")
def panels(whole: Run) -> dict[str, dict[Any, Any]]:
    """Validation losses of each method by size and peak."""
    records = whole.records()
    return {method: text_results.measure_peaks(records, method) for method in ("turn", "muon")}


def titles(figure: Any) -> list[str]:
    return [ax.get_title(loc="left") for ax in figure.axes]


def labelled_lines(ax: Any) -> list[Any]:
    return [line for line in ax.lines if not line.get_label().startswith("_")]


def test_the_figure_has_a_line_for_each_size(panels: dict[str, Any]) -> None:
    from geoparam_lab.experiments import text_figures

    figure = text_figures.draw_peaks(panels)

    assert titles(figure) == ["turn", "muon"]
    entries = figure.axes[-1].get_legend().get_texts()
    assert [entry.get_text() for entry in entries] == [
        "width 8, depth 1",
        "width 16, depth 1",
        "width 16, depth 2",
    ]
    peaks = [list(line.get_xdata()) for line in labelled_lines(figure.axes[0])]
    assert peaks == [[1.2, 2.4], [1.2, 2.4], [1.2, 2.4]]


def test_the_caption_says_what_one_number_costs(whole: Run) -> None:
    caption = (whole.folder / "figures" / "peaks.txt").read_text()

    assert "One number for 3 sizes" in caption
    assert "degrees by" in caption


def test_the_transfer_figure_has_a_panel_for_each_number_that_varies_alone(
    whole: Run, panels: dict[str, Any]
) -> None:
    from geoparam_lab.experiments import text_figures

    centre = text_results.find_centre(panels["turn"])
    figure = text_figures.draw_transfer(panels, centre)

    assert centre[:2] == (16, 1)
    assert figure is not None
    assert titles(figure) == ["turn: width", "turn: depth", "muon: width", "muon: depth"]
    lines = labelled_lines(figure.axes[0])
    assert [line.get_label() for line in lines] == ["width 8", "width 16"]
    assert [min(line.get_ydata()) for line in lines] == [0, 0]
    assert (whole.folder / "figures" / "transfer.txt").exists()


def test_one_size_has_nothing_to_transfer() -> None:
    from geoparam_lab.experiments import text_figures

    size = (64, 6, 500, 96)
    panels = {"turn": {size: {1.2: 1.0, 2.4: 0.9}}}

    assert text_figures.draw_transfer(panels, size) is None


def test_a_size_that_differs_in_two_numbers_is_in_no_panel() -> None:
    centre = (64, 6, 500, 96)
    wider = (256, 6, 500, 96)
    deeper = (64, 12, 500, 96)
    both = (256, 12, 500, 96)
    by_size = {size: {2.4: 1.0} for size in (centre, deeper, wider, both)}

    factors = text_results.list_factors(by_size, centre)

    shown = {word: list(lines) for word, lines in factors.items()}
    assert shown == {"width": [64, 256], "depth": [6, 12]}


def test_the_common_peak_is_the_one_with_the_least_excess() -> None:
    losses = {
        (64, 6, 500, 96): {1.2: 1.00, 2.4: 1.02, 4.8: 1.3},
        (256, 6, 500, 96): {1.2: 0.95, 2.4: 0.90, 4.8: math.nan},
    }

    common = text_results.find_common(losses)

    assert common is not None
    assert common.peak == 2.4
    assert common.excess == pytest.approx(0.02)
    assert common.sizes == 2


@pytest.fixture
def records_with_other_seeds() -> list[dict[str, Any]]:
    """A turn of 2.4 has three seeds, the others have one."""
    losses = {(1.2, 0): 1.05, (2.4, 0): 1.04, (2.4, 1): 1.00, (2.4, 2): 0.99, (4.8, 0): 1.10}
    size = {"method": "turn", "width": 64, "depth": 6, "steps": 500, "batch_size": 96}
    records = []
    for (turn, seed), loss in losses.items():
        setting = {"lr": 0.01, "turn": turn, "tuned": f"turn={turn}"}
        records.append(size | setting | {"seed": seed, "val_loss": loss})
    return records


def test_peaks_are_compared_on_the_seeds_that_all_have(
    records_with_other_seeds: list[dict[str, Any]],
) -> None:
    [losses] = text_results.measure_peaks(records_with_other_seeds, "turn").values()

    assert losses == {1.2: 1.05, 2.4: 1.04, 4.8: 1.10}


def test_settings_are_compared_on_the_seeds_that_both_have(
    records_with_other_seeds: list[dict[str, Any]],
) -> None:
    shown = text_results.find_for_tables(records_with_other_seeds)

    excess = [record["excess"] for record in shown if record["table"] == "all"]

    assert excess == pytest.approx([0.01, 0.0, 0.0, 0.0, 0.06])


def test_a_resumed_sweep_ends_with_the_same_records_and_may_get_more(
    whole: Run, data: Path, tmp_path: Path
) -> None:
    sweep(tmp_path / "cut", data, depths=[1], turns=[1.2])

    resumed = sweep(tmp_path / "cut", data, resume=True)

    records = {record["name"]: without_times(record) for record in resumed.records()}
    expected = {record["name"]: without_times(record) for record in whole.records()}
    np.testing.assert_equal(records, expected)


def test_another_text_is_refused(whole: Run, tmp_path: Path) -> None:
    other = tmp_path / "words.txt"
    other.write_bytes(bytes(make_text().train) + b"!")

    with pytest.raises(ValueError, match="data"):
        sweep(whole.folder, other, resume=True)


def test_another_setting_is_refused(whole: Run, data: Path) -> None:
    with pytest.raises(ValueError, match="clip"):
        sweep(whole.folder, data, resume=True, clip=0.5)


@pytest.mark.slow
def test_jobs_give_the_same_records(whole: Run, data: Path, tmp_path: Path) -> None:
    side_by_side = sweep(tmp_path / "jobs", data, jobs=2)

    assert losses_by_name(side_by_side) == pytest.approx(losses_by_name(whole), rel=1e-5)


@pytest.mark.parametrize(
    ("options", "message"),
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
        ({"methods": ["muon"], "turns": None, "base": "sgd"}, "base is for the methods turn"),
        ({"methods": ["muon"], "turns": None, "scale": "fixed"}, "scale is for the methods turn"),
        ({"power": 2.0}, "power is for the schedule power, and there is no such run"),
        ({"hold": 0.3}, "hold is for the schedule hold"),
    ],
)
def test_mistaken_options_are_named(
    options: dict[str, Any], message: str, data: Path, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=message):
        sweep(tmp_path / "out", data, **options)

    assert not (tmp_path / "out").exists()


def invoke(arguments: list[str]) -> Any:
    """Call the command line of geoparam."""
    from geoparam_lab.cli import app

    testing = pytest.importorskip("typer.testing")
    return testing.CliRunner().invoke(app(), arguments)


def test_the_commands_options_are_the_settings(data: Path, tmp_path: Path) -> None:
    options = "--methods turn --turns 2 --widths 8 --depths 1 --steps 2 --batch-sizes 2"
    sizes = "--context 8 --windows 2 --marks 1"
    files = ["--data", str(data), "--out", str(tmp_path / "run")]

    result = invoke(["run", "text", *files, *options.split(), *sizes.split()])

    assert result.exit_code == 0, result.output
    assert "turn 2, momentum 0.95" in result.output


def test_the_command_names_a_text_that_is_missing() -> None:
    result = invoke(["run", "text", "--data", "no.txt"])

    assert result.exit_code != 0
    assert "is not a file" in str(result.exception)
