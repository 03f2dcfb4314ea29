"""Tables: the statistics are right, papers' numbers stand beside, every form reads back."""

import math
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import run_folders

from geoparam_lab import experiments
from geoparam_lab.experiments.papers import Printed
from geoparam_lab.run_folder import Record, Run
from geoparam_lab.tables import estimates, tables
from geoparam_lab.tables.estimates import Estimate, estimate
from geoparam_lab.tables.formats import Table

ODD = r"a|b*c_d`e`\f & 50% $x$ #1 {y} ~z^2 <p> [l]"
ODD_TABLE = Table(ODD, ("m|n", "x", "y_1"), ((ODD, "-1.5 ± 0.2 *", "–"),), (ODD,))


def levy(values: dict[str, list[float]], **fields: Any) -> list[Record]:
    return [
        {"method": method, "seed": seed, "lr": 0.01, "test_rmse": value, **fields}
        for method, each in values.items()
        for seed, value in enumerate(each)
    ]


def only(found: list[Table]) -> Table:
    assert len(found) == 1
    return found[0]


def cell(table: Table, column: str, *row: str) -> str:
    """The cell below a heading that begins so, in the row that begins so."""
    [line] = [line for line in table.rows if line[: len(row)] == row]
    return line[next(i for i, name in enumerate(table.columns) if name.startswith(column))]


def labels(table: Table) -> list[str]:
    return [row[0] for row in table.rows]


@pytest.mark.parametrize("n", [2, 3, 6, 10, 20, 21])
@pytest.mark.parametrize("t", [0.0, 0.3, -2.1, 4.7])
def test_p_values_are_those_of_students_t(n: int, t: float) -> None:
    expected = pytest.importorskip("scipy.stats").t.sf(abs(t), n - 1) * 2
    assert estimates.find_p_value(Estimate(t, 1.0, n, 0, 0)) == pytest.approx(expected, abs=1e-12)


def test_differences_without_a_spread_are_certain_or_nothing() -> None:
    assert estimates.find_p_value(Estimate(0.0, 0.0, 5, 0, 0)) == 1
    assert estimates.find_p_value(Estimate(0.1, 0.0, 5, 0, 0)) == pytest.approx(0, abs=1e-12)
    assert estimates.find_p_value(Estimate(0.1, None, 1, 0, 0)) == 1


def test_marks_are_of_the_corrected_test_and_two_of_holms() -> None:
    """Differences of SP: t of 2.4 in WN (p = 0.04), 9 in BN and 2.0 in GmP, on one set of ten."""
    noise = np.linspace(-1, 1, 10)
    factor = noise.std(ddof=1) * np.sqrt(0.35)
    shifts = {"sp": 0.0, "wn": 2.4 * factor, "bn": 9 * factor, "gmp": 2.0 * factor}
    records = [
        {"method": m, "dataset": "wine", "split": s, "lr": 0.01, "test_rmse": 5 + shift + x}
        for m, shift in shifts.items()
        for s, x in enumerate(noise * (m != "sp"))
    ]
    table = only(tables.from_records(records, "uci"))
    marks = [cell(table, "minus", m).partition(" *")[1:] for m in ("WN", "BN", "GmP")]
    assert marks == [(" *", ""), (" *", "*"), ("", "")]
    few = [r for r in records if r["split"] < 4]
    assert "*" not in cell(only(tables.from_records(few, "uci")), "minus", "BN")
    assert "minus SP (k = 3)" in table.columns


@pytest.mark.parametrize(
    ("mean", "printed", "expected"),
    [
        (3.49, "3.0 ± 0.1", True),  # 2 sqrt(0.2^2 + 0.1^2) = 0.447, and 0.05 of rounding
        (3.50, "3.0 ± 0.1", False),
        (2.51, "3.0 ± 0.1", True),
        (2.50, "3.0 ± 0.1", False),
    ],
)
def test_agreement_ends_at_two_combined_errors(mean: float, printed: str, expected: bool) -> None:
    assert estimates.agrees(Estimate(mean, 0.2, 10, 0, 9), Printed(printed)) is expected


def test_a_number_of_one_seed_never_agrees() -> None:
    table = only(tables.from_records(levy({"sp": [1.0, 1.1, 1.2]}), "levy"))
    assert estimates.agrees(estimate([1.0, 1.1, 1.2]), Printed("1.104")) is None
    assert cell(table, "papers", "SP") == "1.104" and "papers" in table.columns


@pytest.mark.parametrize("n", [1, 2])
def test_few_seeds_decide_nothing(n: int) -> None:
    assert estimates.agrees(estimate([1.0, 1.1][:n]), Printed("9.0 ± 0.1")) is None
    assert estimates.agrees(None, Printed("9.0 ± 0.1")) is None
    assert estimates.agrees(Estimate(1.0, 0.1, 9, 0, 2), None) is None


def test_one_column_shows_ours_beside_the_papers() -> None:
    motion = {"largest_move": 0.5, "largest_rotation": 0.0}
    records = levy({"gmp": [0.4, 0.5, 0.6], "sp": [1.1, 1.1, 1.3]}, **motion)
    table = only(tables.from_records(records, "levy"))
    assert labels(table) == ["SP", "GmP"]
    assert cell(table, "Test RMSE", "GmP") == "0.500 ± 0.058"
    assert cell(table, "range", "GmP") == "0.400 to 0.600"
    assert cell(table, "minus SP", "GmP") == "-0.667 ± 0.033"
    assert cell(table, "n", "SP") == "3" and cell(table, "rate", "SP") == "0.01"
    assert cell(table, "largest move, running statistics", "SP") == "0.500"
    assert "diverged" not in table.columns


def test_the_published_table_comes_out_of_records_like_it() -> None:
    table = only(tables.from_records(run_folders.uci_records(), "uci"))
    assert labels(table) == ["SP", "WN", "BN", "GmP"] * 7
    assert [row[1] for row in table.rows[::4]] == [name.capitalize() for name in run_folders.SETS]
    assert cell(table, "papers", "GmP", "Boston").endswith("3.057 ± 0.144")
    assert cell(table, "Test RMSE", "SP", "Naval").startswith("0.00")
    assert cell(table, "rate", "GmP", "Wine") == "0.1" and cell(table, "n", "SP", "Wine") == "10"
    judged = [row[table.columns.index("minus SP (k = 21)") - 1][0] for row in table.rows]
    assert f"papers (≈ {judged.count('≈')} of 28)" in table.columns


def test_differences_are_of_the_same_split() -> None:
    records = run_folders.uci_records()
    table = only(tables.from_records(records, "uci"))
    own, base = (
        np.array(
            [r["test_rmse"] for r in records if (r["method"], r["dataset"]) == (method, "wine")]
        )
        for method in ("gmp", "sp")
    )
    found = cell(table, "minus SP", "GmP", "Wine")
    mean, error = map(float, found.strip(" *").split(" ± "))
    assert mean == pytest.approx((own - base).mean(), abs=1e-3)
    expected = (own - base).std(ddof=1) * np.sqrt(1 / 10 + 0.2 / 0.8)
    assert error == pytest.approx(expected, abs=1e-3)
    assert any("Nadeau and Bengio" in note for note in table.notes)
    assert cell(table, "minus SP", "SP", "Wine") == "–"


def test_any_method_may_be_the_baseline() -> None:
    records = run_folders.uci_records()
    table = only(tables.from_records(records, "uci", baseline="gmp"))
    assert "minus GmP (k = 21)" in table.columns
    usual = cell(only(tables.from_records(records, "uci")), "minus SP", "GmP", "Wine")
    assert cell(table, "minus GmP", "SP", "Wine").split()[0] == (
        usual.split()[0].removeprefix("-") if usual[0] == "-" else f"-{usual.split()[0]}"
    )


def test_runs_without_the_baseline_keep_their_own(tmp_path: Path) -> None:
    other = Run.create(tmp_path / "a", "uci", {}, "geoparam run uci", key=("method",))
    for method in ("sp", "ln"):
        other.append({"method": method, "dataset": "yacht", "test_rmse": 1.0, "split": 0})
    runs = [run_folders.uci(tmp_path / "b"), other]
    said = tables.export(runs, "gmp")
    assert "minus GmP (k = 21)" in said and "| minus SP |" in said
    with pytest.raises(ValueError, match="baseline is one of sp, wn, bn, gmp, ln; got 'natural'"):
        tables.export(runs, "natural")


def test_heldout_shows_chosen_rates_and_neither_trials_nor_papers() -> None:
    records, config = run_folders.uci_records("heldout"), {"protocol": "heldout"}
    table = only(tables.from_records(records, "uci", config))
    assert not any(name.startswith("papers") for name in table.columns)
    assert any("another protocol: the papers' numbers are not" in note for note in table.notes)
    assert cell(table, "n", "SP", "Yacht") == "10"
    assert cell(table, "rate", "SP", "Yacht") == "0.01 (4), 0.1 (6)"
    assert cell(table, "rate", "GmP", "Yacht") == "0.1"


def test_two_rates_of_one_seed_are_two_rows_and_the_papers_rate_is_said() -> None:
    values = {"sp": [1.0, 2.0, 3.0], "gmp": [1.0, 2.0, 3.0]}
    records = [*levy(values, lr=0.1), *levy(values, lr=0.01)]
    table = only(tables.from_records(records, "levy"))
    found = {row[:2]: cell(table, "papers", *row[:2]) for row in table.rows}
    assert found == {
        ("SP", "0.01"): "1.104",
        ("SP", "0.1"): "1.104 (rate 0.01)",
        ("GmP", "0.01"): "0.496 (rate 0.1)",
        ("GmP", "0.1"): "0.496",
    }
    assert cell(table, "minus SP", "GmP", "0.1") == "0.000 ± 0.000"


def test_images_are_rows_by_batch_size_compared_with_bn() -> None:
    records = [
        {"method": m, "seed": seed, "lr": 0.1, "batch_size": b, "top1": 42.0 + seed, "top5": 67.0}
        for m in ("gmp+imn", "bn")
        for seed in range(3)
        for b in (1024, 256)
    ]
    table = only(tables.from_records(records, "imagenet32"))
    assert [row[:2] for row in table.rows][:2] == [("BN", "256"), ("GmP+IMN", "256")]
    assert cell(table, "papers", "BN", "256") == "42.79 ± 0.03 (rate 0.01)"  # theirs, not ours
    assert cell(table, "papers", "GmP+IMN", "256") == "≈ 43.14 ± 0.05"
    assert table.columns.count("minus BN") == 2  # top-1 and top-5
    assert cell(table, "range, Top-1", "BN", "256") == "42.00 to 44.00"


def test_the_perturbation_has_the_picture_beside() -> None:
    records = [{"method": "sp", "delta": d, "rotation": 29.1} for d in (0.001, 0.0001)]
    table = only(tables.from_records(records, "perturbation", {"seeds": 1000}))
    assert [row[1] for row in table.rows] == ["0.0001", "0.001"]
    assert cell(table, "Papers' unit: turn", "SP", "0.001") == "29.1"
    assert cell(table, "papers", "SP", "0.001") == "12.2"
    assert any("mirror image" in note for note in table.notes)
    assert "n" not in table.columns  # one unit, no seeds


def test_diverged_runs_are_counted_and_their_finite_results_kept() -> None:
    records = levy({"sp": [1.0, 3.0, math.nan]})
    records[1]["outcome"] = "diverged"
    records.append({"method": "sp", "seed": 3, "lr": 0.01, "outcome": "diverged"})
    table = only(tables.from_records(records, "levy"))
    assert cell(table, "Test RMSE", "SP") == "2.000 ± 1.000"
    assert cell(table, "n", "SP") == "2" and cell(table, "diverged", "SP") == "3"
    assert any("Diverged runs are counted" in note for note in table.notes)


def test_generated_points_are_not_compared_with_the_papers() -> None:
    records = [{"method": "gmp", "seed": s, "test_accuracy": 0.88 + s / 99} for s in range(4)]
    config = {"source": "generated", "epochs": 3}
    table = only(tables.from_records(records, "banana", config))
    assert "papers" not in table.columns
    for word in ("generated", "cut short"):
        assert any(word in note for note in table.notes)


@pytest.mark.parametrize("value", [None, True, {"a": 1}])
def test_odd_records_do_no_harm(value: Any) -> None:
    records = levy({"sp": [1.0, 2.0], "something new": [1.5, 2.5]})
    records += [{"method": "sp", "seed": value, "lr": value, "test_rmse": value}, {"seed": 3}]
    table = only(tables.from_records(records, "levy", {"seeds": value, "epochs": value}))
    assert table.rows[-1][0] == "something new"


def test_text_for_a_number_is_named_with_its_folder(tmp_path: Path) -> None:
    run = Run.create(tmp_path / "run", "levy", {"seeds": 1}, "", key=("method", "seed"))
    run.append({"method": "sp", "seed": 0, "lr": 0.1, "test_rmse": "2.7"})
    with pytest.raises(ValueError, match="run is damaged.*'2.7' where a number belongs"):
        tables.export([run])


def test_an_experiment_that_is_not_known_has_a_table_all_the_same() -> None:
    table = only(tables.from_records(levy({"sp": [1.0, 2.0]}), "other"))
    assert cell(table, "Test RMSE", "SP") == "1.500 ± 0.500"


def test_nothing_finished_makes_no_table_and_says_so(tmp_path: Path) -> None:
    run = Run.create(tmp_path / "run", "levy", {}, "geoparam run levy")
    assert tables.make_tables(run) == []
    with pytest.raises(ValueError, match="no finished piece of work"):
        tables.export([run])
    other = Run.create(tmp_path / "other", "mine", {}, key=("seed",))
    other.append({"seed": 0, "method": "sp", "own": 1.0})
    with pytest.raises(ValueError, match="the records have no field .* known .* levy, banana"):
        tables.export([other])


def parse_markdown(text: str) -> list[list[str]]:
    lines = [line for line in text.splitlines() if line.startswith("| ")]
    assert set(lines.pop(1)) == {"|", "-", " "}
    cells = [re.split(r"(?<!\\) \| ", line[2:-2]) for line in lines]
    return [[re.sub(r"\\(.)", r"\1", cell.strip()) for cell in row] for row in cells]


def test_markdown_reads_back() -> None:
    for table in (ODD_TABLE, *tables.from_records(run_folders.uci_records(), "uci")):
        assert parse_markdown(table.markdown()) == [*map(list, (table.columns, *table.rows))]


def test_two_runs_of_one_experiment_are_told_apart(tmp_path: Path) -> None:
    runs = [
        run_folders.uci(tmp_path / name, protocol)
        for name, protocol in (("here", "paper"), ("there", "heldout"))
    ]
    titles = re.findall(r"## UCI regression: (\w+)", tables.export(runs))
    assert titles == ["here", "there"]


def two_rates() -> list[Record]:
    draws = np.random.default_rng(3).standard_normal((2, 3, 6)).tolist()
    low, high = (dict(zip(("sp", "wn", "gmp"), each, strict=True)) for each in draws)
    return [*levy(low, lr=0.01), *levy(high, lr=0.1)]


@pytest.mark.parametrize(("rates", "base"), [(", papers' rates", 0.01), (" (k", 0.1)])
def test_a_difference_is_at_the_same_rate_or_at_the_papers(rates: str, base: float) -> None:
    records = two_rates()
    own, theirs = (
        np.array([r["test_rmse"] for r in records if (r["method"], r["lr"]) == which])
        for which in (("gmp", 0.1), ("sp", base))
    )
    table = only(tables.from_records(records, "levy"))
    found = cell(table, f"minus SP{rates}", "GmP", "0.1").strip(" *")
    mean, error = map(float, found.split(" ± "))
    assert mean == pytest.approx((own - theirs).mean(), abs=1e-3)
    assert error == pytest.approx((own - theirs).std(ddof=1) / np.sqrt(6), abs=1e-3)


def test_only_the_papers_rows_have_a_difference_at_the_papers_rates() -> None:
    table = only(tables.from_records(two_rates(), "levy"))
    rows = [row[:2] for row in table.rows]
    shown = [row for row in rows if cell(table, "minus SP, papers'", *row) != "–"]
    assert shown == [("WN", "0.01"), ("GmP", "0.1")]


def test_a_rate_that_the_baseline_does_not_have_is_compared_with_none() -> None:
    records = [r for r in two_rates() if r["method"] != "gmp"]
    records += [{**r, "method": "gmp", "lr": 0.3} for r in records if r["method"] == "wn"][:6]
    table = only(tables.from_records(records, "levy"))
    assert cell(table, "minus SP (k", "GmP") == "–"
    assert cell(table, "minus SP, papers' rates", "GmP") == "–"


@pytest.mark.parametrize("protocol", ["paper", "heldout"])
def test_one_rate_a_split_is_one_comparison(protocol: str) -> None:
    table = only(tables.from_records(run_folders.uci_records(protocol), "uci"))
    assert [name for name in table.columns if "minus" in name] == ["minus SP (k = 21)"]


def test_the_papers_resnets_did_not_see_small_images() -> None:
    data = {"classes": 200, "train": 100_000, "val": 10_000, "size": 32}
    explain = experiments.find("imagenet32").mismatch
    assert "images of 32 by 32 pixels" in explain({"network": "vgg6", "data": data})
    assert explain({"network": "resnet18", "data": data}).endswith("1,281,167 training images")


def test_lowest_means_are_said_to_be_no_test() -> None:
    run: Any = SimpleNamespace(config={"protocol": "paper"})
    said = experiments.find("uci").describe_limits(run)
    assert "by chance" in said and "The test split itself decides" in said
