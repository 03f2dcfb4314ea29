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


def run(out: str | Path, data: str | Path, **options: Any) -> Run:
    done = images.run(out, data=data, **(OPTIONS | options))
    assert done is not None
    return done


@pytest.fixture(scope="module")
def finished(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    return run(tmp_path_factory.mktemp("images") / "run", data)


def by_name(run: Run) -> dict[str, Record]:
    """Records without what depends on the clock."""
    return {record["name"]: without_times(record) for record in run.records()}


def lines(run: Run) -> int:
    return len((run.folder / "metrics.jsonl").read_text().splitlines())


def run_and_say(
    out: Path, data: Path, said: Path, stop: float = 10**9, options: dict[str, Any] | None = None
) -> None:
    """Run, write into a file what is trained, and be killed at `stop`."""
    work = loop.train

    def say(settings: Settings, *arguments: Any, **others: Any) -> Outcome:
        with said.open("a") as file:
            file.write(f"{settings.method} {settings.seed}\n")
        return work(settings, *arguments, **others)

    def progress(title: str, done: float, total: int) -> None:
        if done >= stop:
            os.kill(os.getpid(), signal.SIGKILL)

    torch.set_num_threads(1)
    loop.train, image_figures.draw = say, lambda *_: None
    tasks.INTERVAL = 0  # seconds between two words of progress
    run(out, data, progress=progress, **(options or {}))


def pretend_to_train(settings: Settings, *_: Any, tick: Any = None, **__: Any) -> Outcome:
    """Stands in for `train` where the loop is not the point: BN at a rate above 1 diverges."""
    diverges = settings.lr > 1 and settings.method == "bn"
    epochs = 1 if diverges else settings.epochs
    rise = np.linspace(20, 60 + 10 * settings.lr, settings.epochs)[:epochs] + settings.seed
    names = ("network", "method", "batch_size", "lr", "seed", "schedule", "init")
    record = {name: getattr(settings, name) for name in names}
    results = {"top1": rise[-1] / 2, "top5": rise[-1], "val_loss": 1.0}
    record |= dict.fromkeys(results, math.nan) if diverges else results
    record |= {"epochs": epochs, "outcome": "diverged" if diverges else "finished"}
    if tick is not None:
        tick(1, 1.0, "1,234 images/s")
    return Outcome(record, {"train_top5": rise + 5, "val_top5": rise})


def test_every_run_of_the_grid_has_a_record_and_curves(finished: Run) -> None:
    assert set(by_name(finished)) == {
        f"vgg6-{method}-batch16-lr0.1-seed{seed}"
        for method in OPTIONS["methods"]
        for seed in (0, 1)
    }
    assert finished.curve_names() == sorted(record["name"] for record in finished.records())
    for record in finished.records():
        curves = finished.curves(record["name"])
        assert record["outcome"] == "finished" and record["epochs"] == len(curves["val_top5"]) == 2
        assert record["top5"] == curves["val_top5"][-1] and record["processes"] == 1
    assert not (finished.folder / "checkpoints").exists()


@pytest.mark.slow
def test_runs_side_by_side_are_the_runs_one_after_the_other(
    finished: Run, data: Path, tmp_path: Path
) -> None:
    done = run(tmp_path / "jobs", data, jobs=2)
    assert by_name(done) == by_name(finished)
    assert not (done.folder / "checkpoints").exists()


def test_runs_side_by_side_are_refused_where_others_take_part(data: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="without storage"):
        run(tmp_path / "jobs", data, jobs=2, storage=str(tmp_path / "study"))


def test_a_diverging_run_is_recorded_and_the_sweep_goes_on(data: Path, tmp_path: Path) -> None:
    done = run(tmp_path / "run", data, lrs=[0.1, 1e10], seeds=1, methods=["sp"], epochs=1)
    outcomes = {record["lr"]: record["outcome"] for record in done.records()}
    assert outcomes == {0.1: "finished", 1e10: "diverged"}
    said = tables.export([done])
    assert re.search(r"\| SP +\| 16 +\| 1e\+10 \| – +\| – +\| 0 +\| 1 ", said)
    assert "| diverged |" in said and ">diverged</th>" in report.make_page([done])


def test_weights_and_scalars_are_kept_where_asked_for(
    data: Path, tmp_path: Path, undrawn: None
) -> None:
    options = {"keep_weights": True, "track": 2}
    done = run(tmp_path / "run", data, seeds=1, methods=["gmp+imn"], **options)
    [name] = done.curve_names()
    weights = torch.load(done.folder / "weights" / f"{name}.pt", weights_only=True)
    assert "conv1.latitude" in weights
    whole = (done.folder / "boundaries" / f"{name}.npy").read_bytes()
    cut = done.folder / "checkpoints" / name  # as left by a kill, and recorded by another machine
    cut.mkdir(parents=True)
    (cut / "boundaries.npy").write_bytes(whole[:-8])
    run(tmp_path / "run", data, seeds=1, methods=["gmp+imn"], resume=True, **options)
    assert (done.folder / "boundaries" / f"{name}.npy").read_bytes() == whole and not cut.exists()


def test_a_sweep_killed_within_a_run_goes_on_to_the_same_records(
    data: Path, tmp_path: Path, finished: Run, undrawn: None
) -> None:
    """At 2.6 of 4 runs: the third has a checkpoint of its first epoch."""
    said = tmp_path / "said"
    killed = forked.start(run_and_say, tmp_path / "run", data, said, 2.6)
    assert forked.end(killed) == -signal.SIGKILL and len(said.read_text().splitlines()) == 3
    assert len(list((tmp_path / "run" / "checkpoints").iterdir())) == 1
    resumed = run(tmp_path / "run", data, resume=True)
    assert by_name(resumed) == by_name(finished) and lines(resumed) == 4
    for name in finished.curve_names():
        np.testing.assert_equal(
            without_times(resumed.curves(name)), without_times(finished.curves(name))
        )
    assert not (tmp_path / "run" / "checkpoints").exists()


def test_a_resumed_sweep_keeps_its_settings_and_data(
    data: Path, tmp_path: Path, finished: Run
) -> None:
    with pytest.raises(ValueError, match="weight_decay=0.0, now 0.1"):
        run(finished.folder, data, resume=True, weight_decay=0.1)
    other = tiny_images.write_npz(tmp_path / "other", classes=8, train=64, val=32, seed=1)
    with pytest.raises(ValueError, match="data=.*checksum.*now"):
        run(finished.folder, other, resume=True)


def test_processes_share_a_sweep(
    data: Path, tmp_path: Path, finished: Run, undrawn: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("optuna")
    storage = str(tmp_path / "study.db")
    said, shared = tmp_path / "said", {"storage": storage}
    both = [forked.start(run_and_say, tmp_path / name, data, said, 10**9, shared) for name in "ab"]
    assert [forked.end(process) for process in both] == [0, 0]
    assert set(said.read_text().splitlines()) == {"bn 0", "bn 1", "gmp+imn 0", "gmp+imn 1"}
    monkeypatch.setattr(loop, "train", Mock(side_effect=AssertionError))
    late = run(tmp_path / "late", data, storage=storage)
    for done in (Run.open(tmp_path / "a"), Run.open(tmp_path / "b"), late):
        assert by_name(done) == by_name(finished) and lines(done) == 4
        assert done.curve_names() == finished.curve_names()


@pytest.mark.slow
def test_processes_that_train_together_do_what_one_does(
    data: Path, tmp_path: Path, finished: Run
) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", "2", "-m", "geoparam", "run", "imagenet32"]
    command += ["--data", str(data), "--out", str(tmp_path / "run"), *ARGUMENTS]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    told = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert told.returncode == 0, told.stderr
    assert told.stdout.count("## VGG-6") == 1  # only one of them speaks
    done = Run.open(tmp_path / "run")
    typed = "torchrun --nproc-per-node 2 -m geoparam run imagenet32"
    assert done.info["command"].startswith(typed) and lines(done) == 4
    for key, record in by_name(done).items():
        alone = by_name(finished)[key]
        assert record["processes"] == 2
        if record["method"] == "gmp+imn":  # on CPUs torch cannot synchronise BatchNorm
            assert math.isclose(record["train_loss"], alone["train_loss"], rel_tol=1e-3)
    refused = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert refused.returncode != 0 and "Continue it with --resume" in refused.stderr


ARGUMENTS = ("--methods", "bn,gmp+imn", "--batch-sizes", "16", "--lrs", "0.1", "--seeds", "2")
ARGUMENTS += ("--epochs", "2", "--precision", "fp32", "--widths", "4,4,4,4,4,4")


def records(**changes: Any) -> list[Record]:
    return [
        {"network": "vgg6", "method": method, "seed": seed, "lr": lr, "batch_size": 1024}
        | {"top1": 42.0 + seed / 10, "top5": 66.0, "outcome": "finished"}
        | changes
        for method, lr in (("bn", 0.01), ("gmp+imn", 0.1))
        for seed in range(3)
    ]


def show_tables(config: Record, **changes: Any) -> str:
    found = tables.from_records(records(**changes), "imagenet32", config)
    return "\n".join(table.markdown() for table in found)


def test_results_on_imagenet_stand_beside_the_papers() -> None:
    said = show_tables({"data": IMAGENET, "network": "vgg6"})
    assert "41.39" in said and "65.89" in said and "1,281,167 training" in said


@pytest.mark.parametrize(
    "change", [TINY_IMAGENET, IMAGENET | {"size": 64}, IMAGENET | {"train": 9}]
)
def test_results_on_other_images_do_not(change: Record) -> None:
    said = show_tables({"data": change, "network": "vgg6"})
    assert "41.39" not in said and "65.89" not in said and "not shown here" in said
    assert f"{change['classes']:,} classes, {change['train']:,} training" in said


def test_results_of_other_networks_and_batch_sizes_do_not() -> None:
    assert "41.39" not in show_tables({"data": IMAGENET}, network="resnet18")
    assert "41.39" not in show_tables({"data": IMAGENET}, batch_size=128)
    for batch_size, fits in {256: True, 1024: False}.items():
        some = records(network="resnet18", batch_size=batch_size)
        config = {"data": IMAGENET | {"size": 224}}
        [table] = tables.from_records(some, "imagenet", config)
        assert ("66.85" in table.markdown()) == fits


def test_every_setting_that_decides_numbers_is_told_where_it_is_not_the_papers() -> None:
    changes = {"dropout": 0.2, "scale_decay": 0.1, "accumulate": 2, "mbn": "before", "epochs": 9}
    said = show_tables(COMMON | changes | {"data": IMAGENET, "schedule": "cosine"})
    assert "half a cosine" in said
    for name, value in changes.items():
        assert f"{name.replace('_', ' ')} {value}" in said
    assert "differ from the papers" not in show_tables(COMMON | {"data": IMAGENET})


def test_the_best_rate_has_the_highest_mean_and_no_divergence() -> None:
    def some(lr: float, *top1: float) -> list[Record]:
        one = {"method": "bn", "network": "vgg6", "batch_size": 8, "lr": lr}
        return [one | {"seed": seed, "top1": value} for seed, value in enumerate(top1)]

    good, better, partly = some(0.1, 40, 41), some(0.3, 39, 43), some(1.0, 90, math.nan)

    def best(records: list[Record]) -> set[float]:
        return {record["lr"] for record in image_text.choose(records, "top1")}

    assert best(good + better + partly) == {0.3} and best(partly) == {1.0}
    assert best(good + better + some(0.2, 50)) == {0.3}  # one seed is fewer


@pytest.fixture(scope="module")
def sweep(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Three methods, batch sizes and rates, without the training."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop, "train", pretend_to_train)
        draw = image_figures.draw
        patch.setattr(image_figures, "draw", lambda *_: None)
        options = {"lrs": [0.01, 0.1, 3.0], "batch_sizes": [8, 16, 32], "epochs": 30}
        folder = tmp_path_factory.mktemp("sweep") / "imagenet32"
        done = run(folder, data, methods=["sp", "bn", "gmp+imn"], **options)
    draw(done)
    return done


def test_figure_4_is_drawn_with_its_caption(sweep: Run) -> None:
    found = sorted(path.name for path in (sweep.folder / "figures").iterdir())
    assert found == ["figure4.png", "figure4.txt"]
    caption = (sweep.folder / "figures" / "figure4.txt").read_text()
    assert "flatters" in caption
    assert "VGG-6; 8 classes, 64 training and 32 validation images" in caption


def test_figure_4_shows_the_mean_of_the_chosen_runs(
    sweep: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn: list[Any] = []
    monkeypatch.setattr(Run, "figure", lambda run, name, figure, caption: drawn.append(figure))
    image_figures.draw(sweep)
    assert [len(figure.axes) for figure in drawn] == [6]
    ax = drawn[0].axes[3]  # validation, batch 8
    lines = {line.get_label(): line.get_ydata() for line in ax.get_lines()}
    chosen = [r for r in sweep.records() if (r["method"], r["batch_size"]) == ("gmp+imn", 8)]
    curves = [sweep.curves(r["name"])["val_top5"] for r in chosen if r["lr"] == 3.0]
    np.testing.assert_allclose(lines["GmP+IMN"], np.mean(curves, axis=0))


@pytest.fixture(scope="module")
def page_file(sweep: Run, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return report.write([sweep], tmp_path_factory.mktemp("page") / "report.html")


def test_the_page_says_what_the_data_were_and_has_the_figures(page_file: Path) -> None:
    text = page_file.read_text()
    assert "(GmP): VGG-6 on images of 8 classes</h1>" in text and "ImageNet32" not in text
    assert "8 classes, 64 training and 32 validation images of 32 by 32 pixels" in text
    assert "Figure 4. Top-5 accuracy over epochs" in text and text.count("<img") == 1
    assert ">diverged</th>" in text


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"methods": []}, "each of methods is one of .*got none"),
        ({"network": "vgg7"}, "network is one of vgg6, .*got 'vgg7'"),
        ({"experiment": "cifar"}, "experiment is one of imagenet32, imagenet; got 'cifar'"),
        ({"batch_sizes": []}, "batch_sizes must not be empty"),
        ({"batch_sizes": [16, 65]}, "no batch of 65 can be taken from 64 images"),
        ({"lrs": [float("nan")]}, "above 0 and finite"),
        ({"widths": ()}, r"channels from 1 on, .*; got \[\]"),
        ({"crop": 32}, "below the size 32; got 32"),
        ({"blur": 0.5}, "settings are epochs, .*; got blur"),
        ({"size": 64}, "64"),
    ],
)
def test_mistakes_are_told_before_anything_is_written(
    data: Path, tmp_path: Path, options: dict[str, Any], match: str
) -> None:
    with pytest.raises((ValueError, FileNotFoundError), match=match):
        run(tmp_path / "run", **({"data": data} | options))
    assert not (tmp_path / "run").exists()
