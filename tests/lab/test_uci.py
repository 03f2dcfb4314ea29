"""The UCI experiment: its protocols are what they say, and cutting a run changes no number."""

import json
import math
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch_rules import train_alone

from geoparam_lab import methods
from geoparam_lab.data import splits
from geoparam_lab.data.synthetic import levy
from geoparam_lab.experiments import uci
from geoparam_lab.experiments.uci import Task, choose_rates
from geoparam_lab.run_folder import Record, Run, group_records, select_records
from geoparam_lab.training.stacks.stacked import Protocol, squared_error


def make_table(rows: int = 40, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    random = np.random.RandomState(seed)
    x = random.randn(rows, 3)
    noise = 0.1 * random.randn(rows)
    return x, np.abs(x).sum(1) + noise


TABLES = {"small": make_table(), "large": make_table(60, seed=1)}
RATES = [0.01, 0.1]
OPTIONS: dict[str, Any] = {
    "datasets": ["small", "large"],
    "methods": ["sp", "gmp"],
    "seeds": 3,
    "lrs": RATES,
    "epochs": 12,
    "jobs": 1,
}


def run(folder: Path, protocol: str = "heldout", tables: Any = TABLES, **options: Any) -> Run:
    """Run the experiment on these tables."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(uci, "NAMES", tuple(tables))
        patch.setattr(uci, "load", lambda name, data: tables[name])
        return uci.run(folder, protocol=protocol, **(OPTIONS | options))


def records_by_key(run: Run) -> dict[tuple[Any, ...], Record]:
    key = run.info["key"]
    return {tuple(record[name] for name in key): record for record in run.records()}


def metrics_lines(run: Run) -> list[str]:
    return (run.folder / "metrics.jsonl").read_text().splitlines(keepends=True)


@pytest.fixture(scope="module")
def heldout(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return run(tmp_path_factory.mktemp("uci") / "heldout")


@pytest.fixture(scope="module")
def cv(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return run(tmp_path_factory.mktemp("uci") / "cv", "cv", datasets=["small"], folds=3)


@pytest.fixture
def searched(request: pytest.FixtureRequest, protocol: str) -> Run:
    """The finished run of a protocol that searches for rates."""
    return request.getfixturevalue(protocol)


@pytest.mark.parametrize(
    ("method", "protocol"),
    [
        ("gmp", "paper"),
        ("gmp", "heldout"),
        ("wn", "paper"),
        ("bn", "paper"),
        ("intrinsic", "heldout"),
    ],
)
def test_a_protocol_is_that_of_one_network_in_plain_torch(
    method: str, protocol: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(uci, "BATCH_SIZE", 16)
    monkeypatch.setattr(uci, "PATIENCE", 4)
    table, lr, epochs = make_table(), 0.1, 40
    task = Task("", tuple(("small", method, split, lr, True) for split in range(3)))

    config = {"protocol": protocol, "epochs": epochs}
    records = uci.train({"small": table}, config, task).records

    [arrays] = zip(*splits.stack(*table, [1], protocol), strict=True)
    x, y, x_val, y_val, x_test, y_test = map(torch.from_numpy, arrays)
    rules = Protocol(
        metric=squared_error, batch_size=16, epochs=epochs, patience=4, stop_patience=8
    )
    model = methods.mlp(method, (3, 100, 1), seed=1)
    _, errors, _, best = train_alone(model, (x, y), (x_val, y_val), lr, rules, seed=1)
    rmse = (best.eval()(x_test).squeeze(-1) - y_test).square().mean().sqrt().item()

    record = records[1]
    best_rmse = record["test_rmse" if protocol == "paper" else "val_rmse"]
    assert best_rmse == pytest.approx(math.sqrt(min(errors)), rel=1e-10, abs=0)
    assert record["best_epoch"] == np.argmin(errors)
    assert record["test_rmse"] == pytest.approx(rmse, rel=1e-8, abs=0)
    assert any(record["epochs"] < epochs for record in records)  # patience ended a training


def test_the_papers_rates_are_the_default(tmp_path: Path) -> None:
    records = run(tmp_path / "run", "paper", lrs=None, epochs=2).records()

    assert len(records) == 2 * 2 * 3
    rates = {(record["method"], record["lr"]) for record in records}
    assert rates == {("sp", 0.01), ("gmp", 0.1)}
    for record in records:
        assert record["chosen"]
        assert "test_rmse" in record


def test_a_full_batch_is_one_of_all_rows(tmp_path: Path) -> None:
    def errors(batch_size: str | int) -> list[float]:
        folder = tmp_path / str(batch_size)
        finished = run(folder, "paper", lrs=None, epochs=3, batch_size=batch_size)
        return [record["test_rmse"] for record in finished.records()]

    full = errors("full")

    assert full == errors(48)
    assert full != errors("16")


def test_an_unknown_batch_size_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="from 1 on, or 'full'; got 'all'"):
        run(tmp_path / "run", "paper", batch_size="all")


def test_each_split_has_the_rate_with_its_lowest_validation_error(heldout: Run) -> None:
    by_split = group_records(heldout.records(), "dataset", "method", "split")

    assert len(by_split) == 2 * 2 * 3
    for *trials, final in by_split.values():
        assert [trial["chosen"] for trial in trials] == [False, False]
        assert final["chosen"]
        best = min(trials, key=lambda trial: trial["val_rmse"])
        assert final["lr"] == best["lr"]


def test_splits_choose_different_rates(heldout: Run) -> None:
    """So that the test of choices can fail."""
    chosen = select_records(heldout.records(), chosen=True)

    assert {record["lr"] for record in chosen} == set(RATES)


@pytest.mark.parametrize("protocol", ["heldout", "cv"])
def test_only_chosen_rates_meet_the_test_part(searched: Run) -> None:
    for record in searched.records():
        assert ("test_rmse" in record) == record["chosen"]
        assert "val_rmse" in record


def test_cross_validation_chooses_by_the_mean_over_folds(cv: Run) -> None:
    chosen = select_records(cv.records(), chosen=True)

    assert len(chosen) == 2 * 3
    for final in chosen:
        assert final["fold"] == 0
        mean_errors = {}
        for lr in RATES:
            folds = select_records(
                cv.records(),
                chosen=False,
                method=final["method"],
                split=final["split"],
                lr=lr,
            )
            assert len(folds) == 3
            mean_errors[lr] = np.mean([fold["val_rmse"] ** 2 for fold in folds])
        assert final["lr"] == min(mean_errors, key=lambda lr: mean_errors[lr])


def test_another_order_of_the_inputs_changes_nothing_but_angles(tmp_path: Path) -> None:
    names = ["sp", "intrinsic", "gmp"]
    reordered = [f"{name}:order=1" for name in names]

    finished = run(
        tmp_path / "run",
        "paper",
        datasets=["small"],
        methods=names + reordered,
        seeds=1,
        lrs=None,
        epochs=6,
    )

    errors = {record["method"]: record["test_rmse"] for record in finished.records()}
    change = {name: abs(errors[name] - errors[f"{name}:order=1"]) for name in names}
    assert change["sp"] < 1e-10
    assert change["intrinsic"] < 1e-10
    assert change["gmp"] > 1e-10


def test_levys_copies_are_its_function_summed_over_inputs() -> None:
    x, y = uci.load("levy4")

    assert x.shape == (1000, 4)
    error = np.abs(y - levy(x).sum(axis=1)).mean()
    assert error == pytest.approx(0.08, abs=0.01)  # the noise


def test_a_rate_with_a_fold_that_diverges_is_not_chosen() -> None:
    split = {"dataset": "small", "method": "sp", "split": 0}
    errors = {0.1: (0.5, 0.5, 0.5), 0.3: (0.1, 0.1, math.nan)}
    records = []
    for lr, values in errors.items():
        for value in values:
            records.append(split | {"lr": lr, "val_rmse": value})

    assert choose_rates(records) == {("small", "sp", 0): 0.1}


def test_the_wide_grid_is_the_default_of_cross_validation(tmp_path: Path) -> None:
    finished = run(
        tmp_path / "run",
        "cv",
        datasets=["small"],
        methods=["sp"],
        seeds=1,
        folds=2,
        lrs=None,
        epochs=1,
    )

    rates = {record["lr"] for record in finished.records()}
    assert rates == {0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0}
    assert "SP" in (finished.folder / "figures" / "rates.txt").read_text()


@pytest.mark.parametrize("protocol", ["heldout", "cv"])
def test_test_targets_change_nothing_but_the_test_error(tmp_path: Path, protocol: str) -> None:
    x, y = make_table()
    _, test = splits.split(len(x), seed=0)
    y_changed = y.copy()
    y_changed[test] = 1000 - y[test]

    def records(name: str, targets: np.ndarray) -> list[Record]:
        tables = {"small": (x, targets)}
        return run(tmp_path / name, protocol, tables=tables, datasets=["small"], seeds=1).records()

    for record, changed in zip(records("a", y), records("b", y_changed), strict=True):
        error, changed_error = record.pop("test_rmse", None), changed.pop("test_rmse", None)
        assert (error != changed_error) == record["chosen"]
        assert record == changed


@pytest.mark.parametrize(
    ("protocol", "kept"), [("heldout", 4), ("heldout", 25), ("heldout", 36), ("cv", 10)]
)
def test_a_run_cut_anywhere_resumes_to_the_same_records(
    tmp_path: Path, protocol: str, kept: int, searched: Run
) -> None:
    """Also within a stack: its finished networks are trained again, and not written again."""
    cut = tmp_path / "cut"
    cut.mkdir()
    shutil.copy(searched.folder / "config.json", cut)
    lines = metrics_lines(searched)
    (cut / "metrics.jsonl").write_text("".join(lines[:kept]))

    options = {name: searched.config.get(name) for name in ("datasets", "folds")}
    resumed = run(cut, protocol, resume=True, **options)

    assert records_by_key(resumed) == records_by_key(searched)
    assert len(metrics_lines(resumed)) == len(lines)


@pytest.fixture
def short_run(tmp_path: Path) -> Run:
    """A run of few epochs in which SP diverged on one of two data sets."""
    config = {"protocol": "paper", "epochs": 5, "methods": ["sp", "gmp"]}
    short = Run.create(tmp_path / "run", "uci", config, key=uci.KEY)
    results = [
        ("yacht", "sp", math.nan),
        ("yacht", "gmp", 1.0),
        ("energy", "sp", 2.0),
        ("energy", "gmp", 1.0),
    ]
    for dataset, method, error in results:
        key = {"dataset": dataset, "method": method, "split": 0, "lr": 0.1, "chosen": True}
        short.append(key | {"test_rmse": error})
    return short


def test_a_method_that_diverged_is_not_the_best(short_run: Run) -> None:
    finding = uci.EXPERIMENT.finding(short_run)

    assert finding.endswith("lowest mean test RMSE on 2 data sets: GmP on 2.")


def test_a_short_run_says_so(short_run: Run) -> None:
    assert "cut short" in uci.EXPERIMENT.describe_limits(short_run)


def test_a_training_that_diverges_is_recorded_and_not_chosen(tmp_path: Path) -> None:
    records = run(tmp_path / "run", methods=["sp"], lrs=[0.01, 1e160]).records()

    outcomes = {(record["lr"], record["outcome"]) for record in records}
    assert outcomes == {(0.01, "finished"), (1e160, "diverged")}
    for record in select_records(records, chosen=True):
        assert record["lr"] == 0.01
        assert record["test_rmse"] < 10
    json.dumps(records)
