"""Methods with options of their own: which runs there are, and which setting is chosen."""

import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import tiny_images
from image_runs import without_times

from geoparam_lab.experiments import images
from geoparam_lab.experiments.image_text import choose, remark
from geoparam_lab.run_folder import Record, Run
from geoparam_lab.tables import tables
from geoparam_lab.training.images.settings import list_points, list_tasks

pytest.importorskip("accelerate")
pytestmark = pytest.mark.usefixtures("fresh_accelerate")

STORED = Path(__file__).parents[2] / "results" / "runs" / "tinyimagenet32"
CONFIG = {"network": "vgg6", "batch_sizes": [8], "lrs": None, "seeds": 1}


def list_runs(*methods: str, **changes: Any) -> list[Any]:
    return list_tasks({**CONFIG, "methods": list(methods), **changes})


def list_rates(*methods: str, **changes: Any) -> list[float]:
    return [task.settings.lr for task in list_runs(*methods, **changes)]


# --- options ------------------------------------------------------------------------------------


def test_a_method_has_the_product_of_its_options() -> None:
    points = list_points("bn:decay=0,1e-3:lr=0.1,0.2,0.4:optimizer=muon:rest=sgd,adamw")

    settings = {tuple(settings.values()) for _, _, settings in points}
    assert len(settings) == 2 * 3 * 2


def test_the_optimizer_names_a_row_and_the_decay_is_tuned() -> None:
    points = list_points("bn:decay=0,1e-3:lr=0.1,0.2,0.4:optimizer=muon:rest=sgd,adamw")

    assert {(label, tuned) for label, tuned, _ in points} == {
        ("bn:optimizer=muon:rest=sgd", "decay=0"),
        ("bn:optimizer=muon:rest=sgd", "decay=0.001"),
        ("bn:optimizer=muon:rest=adamw", "decay=0"),
        ("bn:optimizer=muon:rest=adamw", "decay=0.001"),
    }


def test_rates_are_the_methods_own_or_the_papers() -> None:
    assert list_rates("gmp", "bn:lr=0.4,0.8", "bn:decay=0.1") == [0.1, 0.4, 0.8, 0.01]


def test_rates_are_the_methods_own_or_the_sweeps() -> None:
    rates = list_rates("gmp", "bn:lr=0.4,0.8", "bn:decay=0.1", lrs=[0.3, 0.5])

    assert rates == [0.3, 0.5, 0.4, 0.8, 0.3, 0.5]


def test_the_name_of_a_run_without_options_has_none() -> None:
    [task] = list_runs("bn:lr=0.1")

    assert task.name == "vgg6-bn-batch8-lr0.1-seed0"


def test_the_name_of_a_run_has_all_its_options() -> None:
    options = "optimizer=geometric:base=adamw:coordinates=intrinsic:turn=1:momentum=0.8"

    [task] = list_runs(f"bn:lr=0.1:{options}")

    joined = options.replace(":", "-")
    assert task.name == f"vgg6-bn-{joined}-batch8-lr0.1-seed0"


def test_names_tell_all_options_apart() -> None:
    options = "optimizer=geometric:base=adamw,muon:turn=1,2:coordinates=intrinsic:momentum=0.8,0.9"

    names = [task.name for task in list_runs("bn:lr=0.1", f"bn:lr=0.1:{options}")]

    assert len(set(names)) == 1 + 2 * 2 * 2


def test_the_same_run_in_two_grids_is_done_once() -> None:
    assert list_rates("bn:lr=0.1,0.2:decay=5e-4", "bn:decay=0.0005:lr=0.2,0.4") == [0.1, 0.2, 0.4]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("bn:speed=3", "options of bn are optimizer, .*got 'speed=3'"),
        ("bn:lr=fast", "got 'lr=fast'"),
        ("bn:decay", "got 'decay'"),
        ("bn:optimizer=lion", "optimizer is one of sgd"),
        ("bn:lr=0.1:lr=0.2", "'bn' has lr twice"),
        ("bn:mbn=before", "mbn is an option of methods with mbn"),
    ],
)
def test_mistaken_options_are_named(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        list_runs(text)


# --- the chosen setting -------------------------------------------------------------------------


def make_seeds(lr: float, tuned: str, *accuracies: float) -> list[Record]:
    """Return a record for each seed's result at a setting."""
    fields = {"method": "bn", "network": "vgg6", "batch_size": 8, "lr": lr, "tuned": tuned}
    return [{**fields, "seed": i, "select_top1": value} for i, value in enumerate(accuracies)]


def test_more_seeds_of_the_best_setting_do_not_change_the_choice() -> None:
    no_decay = make_seeds(0.1, "", 40)
    best = make_seeds(0.1, "decay=0.1", 43, 30, 31)
    larger_rate = make_seeds(0.2, "", 42)

    chosen = choose(no_decay + best + larger_rate, "select_top1")

    assert [(record["tuned"], record["seed"], record["tries"]) for record in chosen] == [
        ("decay=0.1", 0, 3),
        ("decay=0.1", 1, 3),
        ("decay=0.1", 2, 3),
    ]


def test_runs_stored_before_there_were_options_are_shown_without_them() -> None:
    text = tables.export([Run.open(STORED)])

    assert "| GmP+IMN | 1024       | 0.3  | 44.48 " in text
    assert "settings tried" not in text


# --- sweeps -------------------------------------------------------------------------------------

METHODS = ["bn:lr=0.02,0.1:decay=5e-4", "bn:optimizer=muon:lr=0.02", "sp:lr=0.05"]
OPTIONS: dict[str, Any] = {
    "methods": METHODS,
    "batch_sizes": [16],
    "seeds": 2,
    "epochs": 2,
    "select": 0.25,
    "precision": "fp32",
    "widths": (4, 4),
    "schedule": "linear",
    "time_to": (0.0,),
}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_images.write_npz(tmp_path_factory.mktemp("data"), classes=8, train=64, val=32)


def run_sweep(out: Path, data: Path, **changes: Any) -> Run:
    run = images.run(out, data=data, **{**OPTIONS, **changes})
    assert run is not None
    return run


@pytest.fixture(scope="module")
def finished(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    return run_sweep(tmp_path_factory.mktemp("grids") / "run", data)


@pytest.fixture
def rows(finished: Run) -> dict[str, dict[str, str]]:
    """The cells of each method, from the tables of results and of details."""
    rows: dict[str, dict[str, str]] = {}
    for table in tables.make_tables(finished):
        for row in table.rows:
            cells = zip(table.columns, row, strict=True)
            rows.setdefault(row[0], {}).update(cells)
    return rows


def test_every_setting_and_seed_has_a_record(finished: Run) -> None:
    names = [record["name"] for record in finished.records()]

    assert len(names) == (2 + 1 + 1) * 2
    assert len(set(names)) == len(names)


def test_the_table_has_a_row_for_each_method(rows: dict[str, dict[str, str]]) -> None:
    assert list(rows) == ["SP", "BN", "BN, optimizer muon"]


def test_a_row_shows_the_setting_that_was_best_on_the_images_kept_back(
    finished: Run, rows: dict[str, dict[str, str]]
) -> None:
    chosen = choose(finished.records(), "select_top1")
    first, second = [record for record in chosen if record["method"] == "bn"]
    mean = (first["select_top1"] + second["select_top1"]) / 2

    assert rows["BN"]["rate"] == f"{first['lr']:g}, decay 0.0005"
    assert rows["BN"]["settings tried"] == "2"
    assert rows["BN"]["top-1 on images kept back (%)"] == f"{mean:.2f}"
    assert rows["BN"]["epochs to 0 % top-1"] == "1.0"


def test_the_caption_says_how_settings_were_chosen(finished: Run) -> None:
    caption = (finished.folder / "figures" / "figure4.txt").read_text()

    assert "highest top-1 on the images kept back" in caption


def test_a_sweep_resumes_to_the_same_records_and_may_get_more_methods(
    finished: Run, data: Path, tmp_path: Path, undrawn: None
) -> None:
    folder = shutil.copytree(finished.folder, tmp_path / "run")
    path = folder / "metrics.jsonl"
    written = path.read_text().splitlines(keepends=True)
    path.write_text("".join(written[:3]))

    resumed = run_sweep(
        folder, data, resume=True, methods=[*METHODS, "bn:optimizer=adamw:lr=0.01"]
    )

    records = {record["name"]: without_times(record) for record in resumed.records()}
    for expected in finished.records():
        assert records.pop(expected["name"]) == without_times(expected)
    assert sorted(records) == [
        "vgg6-bn-optimizer=adamw-batch16-lr0.01-seed0",
        "vgg6-bn-optimizer=adamw-batch16-lr0.01-seed1",
    ]


@pytest.mark.parametrize(
    ("patience", "text"),
    [
        ({}, "after 5 epochs without .* end after 10"),
        ({"patience": 2}, "after 2 epochs without .* end after 4"),
    ],
)
def test_a_plateau_is_described_with_its_patience(patience: Record, text: str) -> None:
    [schedule, *_] = remark({"schedule": "plateau-top1", **patience})

    assert re.search(text, schedule)
