"""Sweeps over images: nothing lost, nothing done twice, nothing compared that should not be."""

import math
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import forked
import numpy as np
import pytest
import tiny_images
import torch
from image_runs import without_times

from geoparam_lab import report
from geoparam_lab.experiments import image_figures, image_text, images
from geoparam_lab.run_folder import Record, Run
from geoparam_lab.tables import tables
from geoparam_lab.training import tasks
from geoparam_lab.training.images import loop
from geoparam_lab.training.images.settings import COMMON, Settings
from geoparam_lab.training.network_training import Outcome

pytest.importorskip("accelerate")
pytestmark = pytest.mark.usefixtures("fresh_accelerate")

OPTIONS: dict[str, Any] = {
    "methods": ["bn", "gmp+imn"],
    "batch_sizes": [16],
    "lrs": [0.1],
    "seeds": 2,
    "epochs": 2,
    "precision": "fp32",
    "widths": (4, 4, 4, 4, 4, 4),
}
IMAGENET = {"classes": 1000, "train": 1_281_167, "val": 50_000, "size": 32}
TINY_IMAGENET = {"classes": 200, "train": 100_000, "val": 10_000, "size": 32}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_images.write_npz(tmp_path_factory.mktemp("npz"), classes=8, train=64, val=32)


def run_sweep(out: str | Path, data: str | Path, **changes: Any) -> Run:
    """Run the small sweep, which has two methods with two seeds each."""
    run = images.run(out, data=data, **{**OPTIONS, **changes})
    assert run is not None
    return run


@pytest.fixture(scope="module")
def finished(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    return run_sweep(tmp_path_factory.mktemp("images") / "run", data)


def by_name(run: Run) -> dict[str, Record]:
    """Return the records without what depends on the clock."""
    return {record["name"]: without_times(record) for record in run.records()}


def count_lines(run: Run) -> int:
    """Return how many records were written, repeated ones too."""
    return len((run.folder / "metrics.jsonl").read_text().splitlines())


def run_with_log(
    out: Path, data: Path, log: Path, stop: float = math.inf, options: dict[str, Any] | None = None
) -> None:
    """Run the sweep, log each training that begins, and be killed after ``stop`` trainings."""
    train = loop.train

    def train_with_log(settings: Settings, *arguments: Any, **others: Any) -> Outcome:
        with log.open("a") as file:
            file.write(f"{settings.method} {settings.seed}\n")
        return train(settings, *arguments, **others)

    def progress(title: str, done: float, total: int) -> None:
        if done >= stop:
            os.kill(os.getpid(), signal.SIGKILL)

    torch.set_num_threads(1)
    loop.train = train_with_log
    image_figures.draw = lambda *_: None
    tasks.INTERVAL = 0  # seconds between two reports of progress
    run_sweep(out, data, progress=progress, **(options or {}))


# --- sweeps -------------------------------------------------------------------------------------


def test_every_run_of_the_grid_has_a_record_and_curves(finished: Run) -> None:
    expected = [
        "vgg6-bn-batch16-lr0.1-seed0",
        "vgg6-bn-batch16-lr0.1-seed1",
        "vgg6-gmp+imn-batch16-lr0.1-seed0",
        "vgg6-gmp+imn-batch16-lr0.1-seed1",
    ]

    assert sorted(record["name"] for record in finished.records()) == expected
    assert finished.curve_names() == expected


def test_records_agree_with_the_curves(finished: Run) -> None:
    for record in finished.records():
        top5 = finished.curves(record["name"])["val_top5"]
        assert record["outcome"] == "finished"
        assert record["processes"] == 1
        assert record["epochs"] == len(top5) == 2
        assert record["top5"] == top5[-1]


def test_a_finished_sweep_has_no_checkpoints(finished: Run) -> None:
    assert not (finished.folder / "checkpoints").exists()


@pytest.mark.slow
def test_runs_side_by_side_are_the_runs_one_after_the_other(
    finished: Run, data: Path, tmp_path: Path
) -> None:
    side_by_side = run_sweep(tmp_path / "jobs", data, jobs=2)

    assert by_name(side_by_side) == by_name(finished)
    assert not (side_by_side.folder / "checkpoints").exists()


def test_runs_side_by_side_are_refused_where_others_take_part(data: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="without storage"):
        run_sweep(tmp_path / "jobs", data, jobs=2, storage=str(tmp_path / "study"))


def test_a_diverging_run_is_recorded_and_shown(data: Path, tmp_path: Path) -> None:
    run = run_sweep(tmp_path / "run", data, lrs=[0.1, 1e10], seeds=1, methods=["sp"], epochs=1)

    outcomes = {record["lr"]: record["outcome"] for record in run.records()}
    assert outcomes == {0.1: "finished", 1e10: "diverged"}
    table = tables.export([run])
    assert re.search(r"\| SP +\| 16 +\| 1e\+10 \| – +\| – +\| 0 +\| 1 ", table)
    assert "| diverged |" in table
    assert ">diverged</th>" in report.make_page([run])


TRACKED: dict[str, Any] = {"seeds": 1, "methods": ["gmp+imn"], "keep_weights": True, "track": 2}


@pytest.fixture(scope="module")
def tracked(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A sweep of one run that keeps its weights and what the tracker recorded."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(image_figures, "draw", lambda *_: None)
        return run_sweep(tmp_path_factory.mktemp("tracked") / "run", data, **TRACKED)


def test_weights_are_kept_where_asked_for(tracked: Run) -> None:
    [name] = tracked.curve_names()

    weights = torch.load(tracked.folder / "weights" / f"{name}.pt", weights_only=True)

    assert "conv1.latitude" in weights


def test_what_the_tracker_recorded_is_not_replaced_by_what_a_kill_left(
    tracked: Run, data: Path, undrawn: None
) -> None:
    [name] = tracked.curve_names()
    boundaries = tracked.folder / "boundaries" / f"{name}.npy"
    recorded = boundaries.read_bytes()
    left_by_a_kill = tracked.folder / "checkpoints" / name
    left_by_a_kill.mkdir(parents=True)
    (left_by_a_kill / "boundaries.npy").write_bytes(recorded[:-8])

    run_sweep(tracked.folder, data, resume=True, **TRACKED)

    assert boundaries.read_bytes() == recorded
    assert not left_by_a_kill.exists()


# --- resumed and shared sweeps ------------------------------------------------------------------


def test_a_sweep_killed_within_a_run_resumes_to_the_same_records(
    data: Path, tmp_path: Path, finished: Run, undrawn: None
) -> None:
    """It is killed after 2.6 of 4 runs: the third has a checkpoint of its first epoch."""
    folder = tmp_path / "run"
    log = tmp_path / "log"
    killed = forked.start(run_with_log, folder, data, log, 2.6)
    assert forked.end(killed) == -signal.SIGKILL
    assert len(log.read_text().splitlines()) == 3
    assert len(list((folder / "checkpoints").iterdir())) == 1

    resumed = run_sweep(folder, data, resume=True)

    assert by_name(resumed) == by_name(finished)
    assert count_lines(resumed) == 4
    for name in finished.curve_names():
        expected = without_times(finished.curves(name))
        np.testing.assert_equal(without_times(resumed.curves(name)), expected)
    assert not (folder / "checkpoints").exists()


def test_a_resumed_sweep_keeps_its_settings(data: Path, finished: Run) -> None:
    with pytest.raises(ValueError, match="weight_decay=0.0, now 0.1"):
        run_sweep(finished.folder, data, resume=True, weight_decay=0.1)


def test_a_resumed_sweep_keeps_its_data(tmp_path: Path, finished: Run) -> None:
    other_data = tiny_images.write_npz(tmp_path, classes=8, train=64, val=32, seed=1)

    with pytest.raises(ValueError, match="data=.*checksum.*now"):
        run_sweep(finished.folder, other_data, resume=True)


def test_processes_share_a_sweep(
    data: Path, tmp_path: Path, finished: Run, undrawn: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("optuna")
    log = tmp_path / "log"
    shared = {"storage": str(tmp_path / "study.db")}

    first = forked.start(run_with_log, tmp_path / "first", data, log, math.inf, shared)
    second = forked.start(run_with_log, tmp_path / "second", data, log, math.inf, shared)
    assert forked.end(first) == 0
    assert forked.end(second) == 0
    monkeypatch.setattr(loop, "train", Mock(side_effect=AssertionError("trained again")))
    late = run_sweep(tmp_path / "late", data, **shared)

    assert set(log.read_text().splitlines()) == {"bn 0", "bn 1", "gmp+imn 0", "gmp+imn 1"}
    for run in (Run.open(tmp_path / "first"), Run.open(tmp_path / "second"), late):
        assert by_name(run) == by_name(finished)
        assert count_lines(run) == 4
        assert run.curve_names() == finished.curve_names()


@pytest.mark.slow
def test_processes_that_train_together_do_what_one_does(
    data: Path, tmp_path: Path, finished: Run
) -> None:
    launcher = "torch.distributed.run --standalone --nproc-per-node 2 -m geoparam"
    options = (
        "--methods bn,gmp+imn --batch-sizes 16 --lrs 0.1 --seeds 2 --epochs 2 --precision fp32 "
        "--widths 4,4,4,4,4,4"
    )
    command = [sys.executable, "-m", *launcher.split(), "run", "imagenet32", *options.split()]
    command += ["--data", str(data), "--out", str(tmp_path / "run")]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}

    first = subprocess.run(command, env=environment, capture_output=True, text=True)
    second = subprocess.run(command, env=environment, capture_output=True, text=True)

    assert first.returncode == 0, first.stderr
    assert first.stdout.count("## VGG-6") == 1  # only one of them prints
    run = Run.open(tmp_path / "run")
    typed = "torchrun --nproc-per-node 2 -m geoparam run imagenet32"
    assert run.info["command"].startswith(typed)
    assert count_lines(run) == 4
    alone = by_name(finished)
    for name, record in by_name(run).items():
        assert record["processes"] == 2
        if record["method"] == "gmp+imn":  # on CPUs torch cannot synchronise BatchNorm
            assert record["train_loss"] == pytest.approx(alone[name]["train_loss"], rel=1e-3)
    assert second.returncode != 0
    assert "Continue it with --resume" in second.stderr


# --- tables -------------------------------------------------------------------------------------


def make_records(**changes: Any) -> list[Record]:
    """Return three seeds each of BN and GmP+IMN, as a sweep records them."""
    records = []
    for method, lr in (("bn", 0.01), ("gmp+imn", 0.1)):
        for seed in range(3):
            record = {"network": "vgg6", "method": method, "seed": seed, "lr": lr}
            record |= {"batch_size": 1024, "outcome": "finished"}
            record |= {"top1": 42.0 + seed / 10, "top5": 66.0}
            records.append(record | changes)
    return records


def make_markdown(records: list[Record], config: Record, experiment: str = "imagenet32") -> str:
    shown = tables.from_records(records, experiment, config)
    return "\n".join(table.markdown() for table in shown)


def test_results_on_imagenet_are_shown_beside_the_papers() -> None:
    text = make_markdown(make_records(), {"data": IMAGENET, "network": "vgg6"})

    assert "41.39" in text
    assert "65.89" in text
    assert "1,281,167 training" in text


@pytest.mark.parametrize("data", [TINY_IMAGENET, IMAGENET | {"size": 64}, IMAGENET | {"train": 9}])
def test_results_on_other_images_are_shown_without_the_papers(data: Record) -> None:
    text = make_markdown(make_records(), {"data": data, "network": "vgg6"})

    assert "41.39" not in text
    assert "65.89" not in text
    assert "not shown here" in text
    assert f"{data['classes']:,} classes, {data['train']:,} training" in text


@pytest.mark.parametrize("change", [{"network": "resnet18"}, {"batch_size": 128}])
def test_results_of_other_networks_and_batch_sizes_are_shown_without_the_papers(
    change: Record,
) -> None:
    text = make_markdown(make_records(**change), {"data": IMAGENET})

    assert "41.39" not in text


@pytest.mark.parametrize(("batch_size", "is_the_papers"), [(256, True), (1024, False)])
def test_resnet18_is_shown_beside_the_papers_at_their_batch_size(
    batch_size: int, is_the_papers: bool
) -> None:
    records = make_records(network="resnet18", batch_size=batch_size)

    text = make_markdown(records, {"data": IMAGENET | {"size": 224}}, "imagenet")

    assert ("66.85" in text) == is_the_papers


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"schedule": "cosine"}, "half a cosine"),
        ({"dropout": 0.2}, "dropout 0.2"),
        ({"scale_decay": 0.1}, "scale decay 0.1"),
        ({"accumulate": 2}, "accumulate 2"),
        ({"mbn": "before"}, "mbn before"),
        ({"epochs": 9}, "epochs 9"),
    ],
)
def test_a_setting_that_is_not_the_papers_is_named(change: Record, text: str) -> None:
    assert text in make_markdown(make_records(), {**COMMON, **change, "data": IMAGENET})


def test_the_papers_settings_are_not_named() -> None:
    text = make_markdown(make_records(), {**COMMON, "data": IMAGENET})

    assert "differ from the papers" not in text


# --- the best rate ------------------------------------------------------------------------------


def make_seeds(lr: float, *top1: float) -> list[Record]:
    """Return a record for each seed's result at a rate."""
    fields = {"method": "bn", "network": "vgg6", "batch_size": 8, "lr": lr}
    return [{**fields, "seed": seed, "top1": value} for seed, value in enumerate(top1)]


def choose_rates(records: list[Record]) -> set[float]:
    return {record["lr"] for record in image_text.choose(records, "top1")}


def test_the_best_rate_has_the_highest_mean() -> None:
    assert choose_rates(make_seeds(0.1, 40, 41) + make_seeds(0.3, 39, 43)) == {0.3}


def test_the_best_rate_has_no_divergence() -> None:
    partly_diverged = make_seeds(1.0, 90, math.nan)

    assert choose_rates(make_seeds(0.3, 39, 43) + partly_diverged) == {0.3}


def test_the_best_rate_has_all_seeds() -> None:
    one_seed = make_seeds(0.2, 50)

    assert choose_rates(make_seeds(0.3, 39, 43) + one_seed) == {0.3}


def test_a_rate_with_divergence_is_chosen_where_there_is_no_other() -> None:
    assert choose_rates(make_seeds(1.0, 90, math.nan)) == {1.0}


# --- figures and the page -----------------------------------------------------------------------


def pretend_to_train(settings: Settings, *_: Any, tick: Any = None, **__: Any) -> Outcome:
    """Stands in for `train` where the loop is not the point: BN at a rate above 1 diverges."""
    if tick is not None:
        tick(1, 1.0, "1,234 images/s")
    names = ("network", "method", "batch_size", "lr", "seed", "schedule", "init")
    record = {name: getattr(settings, name) for name in names}
    final = 60 + 10 * settings.lr
    curve = np.linspace(20, final, settings.epochs) + settings.seed

    if settings.lr > 1 and settings.method == "bn":
        curve = curve[:1]
        record |= {"outcome": "diverged", "epochs": 1}
        record |= {"top1": math.nan, "top5": math.nan, "val_loss": math.nan}
    else:
        record |= {"outcome": "finished", "epochs": settings.epochs}
        record |= {"top1": curve[-1] / 2, "top5": curve[-1], "val_loss": 1.0}
    return Outcome(record, {"train_top5": curve + 5, "val_top5": curve})


@pytest.fixture(scope="module")
def large_sweep(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Three methods, batch sizes and rates, without the training."""
    folder = tmp_path_factory.mktemp("sweep") / "imagenet32"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop, "train", pretend_to_train)
        return run_sweep(
            folder,
            data,
            methods=["sp", "bn", "gmp+imn"],
            lrs=[0.01, 0.1, 3.0],
            batch_sizes=[8, 16, 32],
            epochs=30,
        )


def test_figure_4_is_drawn_with_its_caption(large_sweep: Run) -> None:
    figures = large_sweep.folder / "figures"
    caption = (figures / "figure4.txt").read_text()

    assert sorted(path.name for path in figures.iterdir()) == ["figure4.png", "figure4.txt"]
    assert "flatters" in caption
    assert "VGG-6; 8 classes, 64 training and 32 validation images" in caption


def test_figure_4_shows_the_mean_of_the_chosen_runs(
    large_sweep: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    figures: list[Any] = []
    monkeypatch.setattr(Run, "figure", lambda run, name, figure, caption: figures.append(figure))
    curves = [
        large_sweep.curves(record["name"])["val_top5"]
        for record in large_sweep.records()
        if (record["method"], record["batch_size"], record["lr"]) == ("gmp+imn", 8, 3.0)
    ]

    image_figures.draw(large_sweep)

    [figure] = figures
    assert len(figure.axes) == 6
    validation_at_batch_8 = figure.axes[3]
    lines = {line.get_label(): line.get_ydata() for line in validation_at_batch_8.get_lines()}
    np.testing.assert_allclose(lines["GmP+IMN"], np.mean(curves, axis=0))


@pytest.fixture(scope="module")
def page(large_sweep: Run, tmp_path_factory: pytest.TempPathFactory) -> str:
    path = report.write([large_sweep], tmp_path_factory.mktemp("page") / "report.html")
    return path.read_text()


def test_the_page_says_what_the_data_were(page: str) -> None:
    assert "(GmP): VGG-6 on images of 8 classes</h1>" in page
    assert "ImageNet32" not in page
    assert "8 classes, 64 training and 32 validation images of 32 by 32 pixels" in page


def test_the_page_has_the_figure_and_the_diverged_runs(page: str) -> None:
    assert "Figure 4. Top-5 accuracy over epochs" in page
    assert page.count("<img") == 1
    assert ">diverged</th>" in page


# --- mistakes -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"methods": []}, "each of methods is one of .*got none"),
        ({"network": "vgg7"}, "network is one of vgg6, .*got 'vgg7'"),
        ({"experiment": "cifar"}, "experiment is one of imagenet32, imagenet; got 'cifar'"),
        ({"batch_sizes": []}, "batch_sizes must not be empty"),
        ({"batch_sizes": [16, 65]}, "no batch of 65 can be taken from 64 images"),
        ({"lrs": [float("nan")]}, "above 0 and finite"),
        ({"lrs": [0.1, 0.10000001]}, "differ in their first six digits"),
        ({"widths": ()}, r"channels from 1 on, .*; got \[\]"),
        ({"crop": 32}, "below the size 32; got 32"),
        ({"blur": 0.5}, "settings are epochs, .*; got blur"),
        ({"size": 64}, "64"),
        ({"workers": 2}, "workers decode JPEG files, and npz files need none; got 2"),
        ({"methods": ["sp"], "init": "sphere"}, "init is for geometric layers, .* Leave init out"),
        ({"methods": ["bn", "gmp"], "imn": "input"}, "imn is for methods with IMN"),
        ({"methods": ["gmp"], "imn": "input", "resume": True}, "imn is for methods with IMN"),
        ({"methods": ["bn", "gmp"], "mbn": "before"}, "mbn is for methods with MBN"),
        ({"methods": ["sp:init=sphere"]}, "init=sphere .* of geometric layers; got 'sp'"),
    ],
)
def test_mistakes_are_refused_before_anything_is_written(
    data: Path, tmp_path: Path, options: dict[str, Any], match: str
) -> None:
    with pytest.raises((ValueError, FileNotFoundError), match=match):
        run_sweep(tmp_path / "run", data, **options)
    assert not (tmp_path / "run").exists()
