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
from geoparam_lab.run_folder import Record, Run, group_records
from geoparam_lab.training.stacks.stacked import Protocol, squared_error


def table(rows: int = 40, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    random = np.random.RandomState(seed)
    x = random.randn(rows, 3)
    return x, np.abs(x).sum(1) + 0.1 * random.randn(rows)


TABLES = {"small": table(), "large": table(60, seed=1)}
OPTIONS: dict[str, Any] = {
    "datasets": ["small", "large"],
    "methods": ["sp", "gmp"],
    "seeds": 3,
    "lrs": [0.01, 0.1],
    "epochs": 12,
    "jobs": 1,
}


def run(folder: Path, protocol: str = "heldout", tables: Any = TABLES, **options: Any) -> Run:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(uci, "NAMES", tuple(tables))
        patch.setattr(uci, "load", lambda name, data: tables[name])
        return uci.run(folder, protocol=protocol, **(OPTIONS | options))


def by_key(run: Run) -> dict[tuple[Any, ...], Record]:
    return {tuple(record[name] for name in run.info["key"]): record for record in run.records()}


def lines(run: Run) -> int:
    return len((run.folder / "metrics.jsonl").read_text().splitlines())


@pytest.fixture(scope="module")
def heldout(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return run(tmp_path_factory.mktemp("uci") / "heldout")


@pytest.fixture(scope="module")
def cv(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return run(tmp_path_factory.mktemp("uci") / "cv", "cv", datasets=["small"], folds=3)


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
    task = Task("", tuple(("small", method, split, 0.1, True) for split in range(3)))
    config = {"protocol": protocol, "epochs": 40}
    records = uci.train({"small": table()}, config, task).records
    parts = [torch.from_numpy(part[0]) for part in splits.stack(*table(), [1], protocol)]
    model = methods.mlp(method, (3, 100, 1), seed=1)
    rules = Protocol(metric=squared_error, batch_size=16, epochs=40, patience=4, stop_patience=8)
    _, errors, _, best = train_alone(model, parts[:2], parts[2:4], 0.1, rules, seed=1)
    judged, epoch = min(errors), int(np.argmin(errors))
    error = "test_rmse" if protocol == "paper" else "val_rmse"
    assert math.isclose(records[1][error], math.sqrt(judged), rel_tol=1e-10)
    assert records[1]["best_epoch"] == epoch
    x_test, y_test = parts[4:]
    rmse = (best.eval()(x_test).squeeze(-1) - y_test).square().mean().sqrt().item()
    assert math.isclose(records[1]["test_rmse"], rmse, rel_tol=1e-8)
    assert any(record["epochs"] < 40 for record in records)


def test_the_papers_rates_are_the_default(tmp_path: Path) -> None:
    records = run(tmp_path / "run", "paper", lrs=None, epochs=2).records()
    assert {(r["method"], r["lr"]) for r in records} == {("sp", 0.01), ("gmp", 0.1)}
    assert len(records) == 2 * 2 * 3 and all("test_rmse" in r and r["chosen"] for r in records)


def test_a_full_batch_is_one_of_all_rows(tmp_path: Path) -> None:
    def errors(batch_size: str | int) -> list[float]:
        folder, options = tmp_path / str(batch_size), {"batch_size": batch_size, "epochs": 3}
        return [r["test_rmse"] for r in run(folder, "paper", lrs=None, **options).records()]

    assert errors("full") == errors(48) != errors("16")
    with pytest.raises(ValueError, match="from 1 on, or 'full'; got 'all'"):
        errors("all")


def test_each_split_has_the_rate_with_its_lowest_validation_error(heldout: Run) -> None:
    by_split = group_records(heldout.records(), "dataset", "method", "split").values()
    assert len(by_split) == 2 * 2 * 3
    chosen = []
    for *searched, record in by_split:
        assert [r["chosen"] for r in (*searched, record)] == [False, False, True]
        assert record["lr"] == min(searched, key=lambda r: r["val_rmse"])["lr"]
        chosen.append(record["lr"])
    assert set(chosen) == {0.01, 0.1}


@pytest.mark.parametrize("protocol", ["heldout", "cv"])
def test_only_chosen_rates_meet_the_test_part(
    protocol: str, request: pytest.FixtureRequest
) -> None:
    records = request.getfixturevalue(protocol).records()
    assert all(("test_rmse" in record) == record["chosen"] for record in records)
    assert all("val_rmse" in record for record in records)


def test_cross_validation_chooses_by_the_mean_over_folds(cv: Run) -> None:
    by_rate = group_records(cv.records(), "chosen", "method", "split", "lr")
    chosen = [key[1:] for key in by_rate if key[0]]
    assert len(chosen) == 2 * 3 and {r["fold"] for r in cv.records() if r["chosen"]} == {0}
    for method, split, lr in chosen:
        folds = {rate: by_rate[False, method, split, rate] for rate in OPTIONS["lrs"]}
        assert {len(own) for own in folds.values()} == {3}
        errors = {rate: np.mean([r["val_rmse"] ** 2 for r in own]) for rate, own in folds.items()}
        assert lr == min(errors, key=lambda rate: errors[rate])


def test_another_order_of_the_inputs_changes_nothing_but_angles(tmp_path: Path) -> None:
    names = ["sp", "intrinsic", "gmp"]
    options = {"datasets": ["small"], "seeds": 1, "lrs": None, "epochs": 6}
    both = run(
        tmp_path / "run", "paper", methods=[*names, *(f"{n}:order=1" for n in names)], **options
    )
    errors = {r["method"]: r["test_rmse"] for r in both.records()}
    changes = [abs(errors[name] - errors[f"{name}:order=1"]) for name in names]
    assert max(changes[:2]) < 1e-10 < changes[2]


def test_levys_copies_are_its_function_summed_over_inputs() -> None:
    x, y = uci.load("levy4")
    assert x.shape == (1000, 4)
    assert np.abs(y - sum(levy(x[:, i]) for i in range(4))).mean() == pytest.approx(0.08, abs=0.01)


def test_a_fold_that_diverges_costs_a_rate_the_choice() -> None:
    one = {"dataset": "small", "method": "sp", "split": 0}
    errors = {0.1: (0.5, 0.5, 0.5), 0.3: (0.1, 0.1, math.nan)}
    records = [one | {"lr": lr, "val_rmse": e} for lr, es in errors.items() for e in es]
    assert choose_rates(records) == {("small", "sp", 0): 0.1}


def test_the_wide_grid_is_the_default_of_cross_validation(tmp_path: Path) -> None:
    options = {"datasets": ["small"], "methods": ["sp"], "seeds": 1, "lrs": None, "epochs": 1}
    done = run(tmp_path / "run", "cv", folds=2, **options)
    rates = {r["lr"] for r in done.records()}
    assert rates == {0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0}
    assert "SP" in (done.folder / "figures" / "rates.txt").read_text()


@pytest.mark.parametrize("protocol", ["heldout", "cv"])
def test_test_targets_change_nothing_but_the_test_error(tmp_path: Path, protocol: str) -> None:
    x, y = table()
    _, test = splits.split(len(x), seed=0)
    other = y.copy()
    other[test] = 1000 - y[test]
    options = {"datasets": ["small"], "seeds": 1}
    one = run(tmp_path / "one", protocol, tables={"small": (x, y)}, **options)
    two = run(tmp_path / "two", protocol, tables={"small": (x, other)}, **options)
    for a, b in zip(one.records(), two.records(), strict=True):
        assert ("test_rmse" in a) == (a.pop("test_rmse", None) != b.pop("test_rmse", None))
        assert a == b


@pytest.mark.parametrize(
    ("protocol", "kept"), [("heldout", 4), ("heldout", 25), ("heldout", 36), ("cv", 10)]
)
def test_a_run_cut_anywhere_resumes_to_the_same_records(
    tmp_path: Path, protocol: str, kept: int, request: pytest.FixtureRequest
) -> None:
    """Also within a stack: its finished networks are trained again, and not written again."""
    whole: Run = request.getfixturevalue(protocol)
    (tmp_path / "run").mkdir()
    shutil.copy(whole.folder / "config.json", tmp_path / "run")
    text = (whole.folder / "metrics.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "run" / "metrics.jsonl").write_text("".join(text[:kept]))
    options = {"datasets": whole.config["datasets"], "folds": whole.config.get("folds")}
    resumed = run(tmp_path / "run", protocol, resume=True, **options)
    assert by_key(resumed) == by_key(whole) and lines(resumed) == len(text)


def test_a_method_that_diverged_is_not_the_best_and_a_short_run_says_so(tmp_path: Path) -> None:
    config = {"protocol": "paper", "epochs": 5, "methods": ["sp", "gmp"]}
    done = Run.create(tmp_path / "run", "uci", config, key=uci.KEY)
    for dataset, error in (("yacht", math.nan), ("energy", 2.0)):
        for method, rmse in (("sp", error), ("gmp", 1.0)):
            key = {"dataset": dataset, "method": method, "split": 0, "lr": 0.1, "chosen": True}
            done.append(key | {"test_rmse": rmse})
    said = uci.EXPERIMENT.finding(done)
    assert said.endswith("lowest mean test RMSE on 2 data sets: GmP on 2.")
    assert "cut short" in uci.EXPERIMENT.describe_limits(done)


def test_a_run_that_diverges_is_recorded(tmp_path: Path) -> None:
    records = run(tmp_path / "run", methods=["sp"], lrs=[0.01, 1e160]).records()
    outcomes = {(r["lr"], r["outcome"]) for r in records}
    assert outcomes == {(0.01, "finished"), (1e160, "diverged")}
    assert all(r["lr"] == 0.01 and r["test_rmse"] < 10 for r in records if r["chosen"])
    json.dumps(records)
