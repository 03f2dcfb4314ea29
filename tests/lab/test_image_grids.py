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


def runs(*methods: str, **changes: Any) -> list[Any]:
    return list_tasks({**CONFIG, "methods": list(methods), **changes})


def test_a_method_has_the_product_of_its_options() -> None:
    found = list_points("bn:decay=0,1e-3:lr=0.1,0.2,0.4:optimizer=muon:rest=sgd,adamw")
    settings = [tuple(settings.values()) for _, _, settings in found]
    assert len(set(settings)) == 12
    assert {(label, tuned) for label, tuned, _ in found} == {
        (f"bn:optimizer=muon:rest={rest}", f"decay={decay}")
        for rest in ("sgd", "adamw")
        for decay in ("0", "0.001")
    }


def test_rates_are_the_methods_own_the_sweeps_or_the_papers() -> None:
    methods = ("gmp", "bn:lr=0.4,0.8", "bn:decay=0.1")
    assert [task.settings.lr for task in runs(*methods)] == [0.1, 0.4, 0.8, 0.01]
    found = runs(*methods, lrs=[0.3, 0.5])
    assert [task.settings.lr for task in found] == [0.3, 0.5, 0.4, 0.8, 0.3, 0.5]


def test_names_tell_all_options_apart_and_plain_ones_are_as_ever() -> None:
    options = "optimizer=geometric:base=adamw,muon:turn=1,2:coordinates=intrinsic:momentum=0.8,0.9"
    names = [task.name for task in runs("bn:lr=0.1", f"bn:lr=0.1:{options}")]
    assert len(set(names)) == 9 and names[0] == "vgg6-bn-batch8-lr0.1-seed0"
    assert names[1] == (
        "vgg6-bn-optimizer=geometric-base=adamw-coordinates=intrinsic-turn=1-momentum=0.8"
        "-batch8-lr0.1-seed0"
    )


def test_the_same_run_in_two_grids_is_one() -> None:
    found = runs("bn:lr=0.1,0.2:decay=5e-4", "bn:decay=0.0005:lr=0.2,0.4")
    assert [task.settings.lr for task in found] == [0.1, 0.2, 0.4]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("bn:speed=3", "options of bn are optimizer, .*got 'speed=3'"),
        ("bn:lr=fast", "got 'lr=fast'"),
        ("bn:decay", "got 'decay'"),
        ("bn:optimizer=lion", "optimizer is one of sgd"),
        ("bn:lr=0.1:lr=0.2", "'bn' has lr twice"),
        ("bn:mbn=before", "mbn is an option of methods with mbn"),
    ],
)
def test_mistaken_options_are_named(text: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        runs(text)


def test_more_seeds_of_the_best_setting_do_not_change_the_choice() -> None:
    def some(lr: float, tuned: str, *values: float) -> list[Record]:
        one = {"method": "bn", "network": "vgg6", "batch_size": 8, "lr": lr, "tuned": tuned}
        return [one | {"seed": seed, "select_top1": v} for seed, v in enumerate(values)]

    tried = some(0.1, "", 40) + some(0.1, "decay=0.1", 43, 30, 31) + some(0.2, "", 42)
    chosen = choose(tried, "select_top1")
    assert [(r["tuned"], r["seed"], r["tries"]) for r in chosen] == [
        ("decay=0.1", seed, 3) for seed in range(3)
    ]


def test_runs_stored_before_there_were_options_are_shown_as_ever() -> None:
    said = tables.export([Run.open(STORED)])
    assert "| GmP+IMN | 1024       | 0.3  | 44.48 " in said and "settings tried" not in said


METHODS = ["bn:lr=0.02,0.1:decay=5e-4", "bn:optimizer=muon:lr=0.02", "sp:lr=0.05"]


def sweep(folder: Path, out: str, **options: Any) -> Run:
    data = folder / "data"
    if not data.exists():
        tiny_images.write_npz(data, classes=8, train=64, val=32)
    usual = {"methods": METHODS, "batch_sizes": [16], "seeds": 2, "epochs": 2, "select": 0.25}
    usual |= {"precision": "fp32", "widths": (4, 4), "schedule": "linear", "time_to": (0.0,)}
    done = images.run(folder / out, data=data, **{**usual, **options})
    assert done is not None
    return done


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return sweep(tmp_path_factory.mktemp("grids"), "whole")


def test_the_table_has_a_row_for_each_method_at_its_chosen_setting(whole: Run) -> None:
    records = whole.records()
    assert len(records) == 8 and len({record["name"] for record in records}) == 8
    rows: dict[str, dict[str, str]] = {}
    for table in tables.make_tables(whole):  # results, and details
        for row in table.rows:
            rows.setdefault(row[0], {}).update(zip(table.columns, row, strict=True))
    assert list(rows) == ["SP", "BN", "BN, optimizer muon"]
    chosen = [r for r in choose(records, "select_top1") if r["method"] == "bn"]
    assert rows["BN"]["rate"] == f"{chosen[0]['lr']:g}, decay 0.0005"
    assert rows["BN"]["settings tried"] == "2"
    kept_back = sum(record["select_top1"] for record in chosen) / 2
    assert rows["BN"]["top-1 on images kept back (%)"] == f"{kept_back:.2f}"
    assert rows["BN"]["epochs to 0 % top-1"] == "1.0"
    caption = (whole.folder / "figures" / "figure4.txt").read_text()
    assert "highest top-1 on the images kept back" in caption


def test_a_sweep_goes_on_to_the_same_records_and_may_get_more_methods(
    whole: Run, tmp_path: Path, undrawn: None
) -> None:
    shutil.copytree(whole.folder, tmp_path / "cut")
    lines = (whole.folder / "metrics.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "cut" / "metrics.jsonl").write_text("".join(lines[:3]))
    more = [*METHODS, "bn:optimizer=adamw:lr=0.01"]
    resumed = sweep(tmp_path, "cut", resume=True, methods=more)
    found = {record["name"]: without_times(record) for record in resumed.records()}
    for record in whole.records():
        assert found.pop(record["name"]) == without_times(record)
    assert sorted(found) == [
        f"vgg6-bn-optimizer=adamw-batch16-lr0.01-seed{seed}" for seed in (0, 1)
    ]


@pytest.mark.parametrize(("patience", "said"), [({}, "5 .* 10"), ({"patience": 2}, "2 .* 4")])
def test_a_plateau_is_described_with_its_patience(patience: Record, said: str) -> None:
    [schedule, *_] = remark({"schedule": "plateau-top1", **patience})
    assert re.search(f"after {said.replace(' .* ', ' epochs without .* end after ')}", schedule)
