"""Tables: the statistics are right, papers' numbers stand beside, every form reads back."""

import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import run_folders

from geoparam_lab.experiments.papers import Printed
from geoparam_lab.run_folder import Record, Run
from geoparam_lab.tables import estimates, tables
from geoparam_lab.tables.estimates import Estimate, estimate
from geoparam_lab.tables.formats import Row, Table

ODD = r"a|b*c_d`e`\f & 50% $x$ #1 {y} ~z^2 <p> [l]"
ODD_TABLE = Table(ODD, "m|n", ("x", "y_1"), (Row(ODD, ("-1.5 ± 0.2 *", "–")),), (ODD,))


def levy(values: dict[str, list[float]], **fields: Any) -> list[Record]:
    return [
        {"method": method, "seed": seed, "lr": 0.01, "test_rmse": value, **fields}
        for method, each in values.items()
        for seed, value in enumerate(each)
    ]


def only(found: list[Table]) -> Table:
    assert len(found) == 1
    return found[0]


def cell(table: Table, row: str, column: str, papers: bool = False) -> str:
    [line] = [line for line in table.rows if line.label == row and line.papers == papers]
    return line.cells[table.columns.index(column)]


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
    table = tables.from_records(records, "uci")[0]
    column = next(name for name in table.columns if name.startswith("difference"))
    marks = [cell(table, m, column).partition(" *")[1:] for m in ("WN", "BN", "GmP")]
    assert marks == [(" *", ""), (" *", "*"), ("", "")]
    few = [r for r in records if r["split"] < 4]
    assert "*" not in cell(tables.from_records(few, "uci")[0], "BN", column)
    assert any("number of comparisons: 3" in note for note in table.notes)


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


def test_a_number_of_one_seed_never_agrees_but_is_in_our_range_or_outside() -> None:
    records = levy({"gmp": [0.4, 0.5, 1.6], "sp": [1.2, 1.3, 1.4]})
    table = only(tables.from_records(records, "levy"))
    assert estimates.agrees(estimate([0.4, 0.5, 1.6]), Printed("0.496")) is None
    assert cell(table, "GmP", "papers") == "0.496, in our range"
    assert cell(table, "SP", "papers") == "1.104, outside our range"
    assert any("says nothing of the mean" in note for note in table.notes)


@pytest.mark.parametrize("n", [1, 2])
def test_few_seeds_decide_nothing(n: int) -> None:
    assert estimates.agrees(estimate([1.0, 1.1][:n]), Printed("9.0 ± 0.1")) is None
    assert estimates.agrees(None, Printed("9.0 ± 0.1")) is None
    assert estimates.agrees(Estimate(1.0, 0.1, 9, 0, 2), None) is None


def test_one_column_shows_ours_beside_the_papers() -> None:
    motion = {"largest_move": 0.5, "largest_rotation": 0.0}
    records = levy({"gmp": [0.4, 0.5, 0.6], "sp": [1.1, 1.1, 1.3]}, **motion)
    table = only(tables.from_records(records, "levy"))
    assert [row.label for row in table.rows] == ["SP", "GmP"]
    assert cell(table, "GmP", "Test RMSE") == "0.500 ± 0.058"
    assert cell(table, "GmP", "range") == "0.400 to 0.600"
    assert cell(table, "GmP", "difference to SP, same rate") == "-0.667 ± 0.033"
    assert cell(table, "SP", "n") == "3" and cell(table, "SP", "rate") == "0.01"
    assert cell(table, "SP", "largest move, running statistics") == "0.500"
    assert not {"diverged", "largest turn (°)"} & set(table.columns)  # with one input, no turn


def test_the_published_table_comes_out_of_records_like_it() -> None:
    matrix, differences = tables.from_records(run_folders.uci_records(), "uci")
    assert matrix.columns == ("rate", *(name.capitalize() for name in run_folders.SETS))
    assert [row.label for row in matrix.rows] == ["SP"] * 2 + ["WN"] * 2 + ["BN"] * 2 + ["GmP"] * 2
    assert [row.papers for row in matrix.rows] == [False, True] * 4
    assert cell(matrix, "GmP", "Boston", papers=True).endswith("3.057 ± 0.144")
    assert cell(matrix, "SP", "Naval").startswith("0.00")
    assert cell(matrix, "GmP", "rate") == "0.1"
    assert any("n = 10" in note for note in matrix.notes)
    judged = [text[0] for row in matrix.rows if row.papers for text in row.cells[1:]]
    assert any(f"({judged.count('≈')} of 28)" in note for note in matrix.notes)


def test_differences_are_of_the_same_split() -> None:
    records = run_folders.uci_records()
    _, table = tables.from_records(records, "uci")
    own, base = (
        np.array(
            [r["test_rmse"] for r in records if (r["method"], r["dataset"]) == (method, "wine")]
        )
        for method in ("gmp", "sp")
    )
    mean, error = map(float, cell(table, "GmP", "Wine").strip(" *").split(" ± "))
    assert mean == pytest.approx((own - base).mean(), abs=1e-3)
    expected = (own - base).std(ddof=1) * np.sqrt(1 / 10 + 0.2 / 0.8)
    assert error == pytest.approx(expected, abs=1e-3)
    assert any("Nadeau and Bengio" in note for note in table.notes)
    assert "SP" not in [row.label for row in table.rows] and "SP" in table.title


def test_heldout_shows_chosen_rates_and_neither_trials_nor_papers() -> None:
    matrix, _, rates = tables.from_records(run_folders.uci_records("heldout"), "uci")
    assert not any(row.papers for row in matrix.rows)
    assert any("another protocol" in note for note in matrix.notes)
    assert any("n = 10." in note for note in matrix.notes)
    assert cell(rates, "SP", "Yacht") == "0.01 (4), 0.1 (6)"
    assert cell(rates, "GmP", "Yacht") == "0.1"
    assert rates.title.startswith("Learning rates by data set (held-out")


def test_two_rates_of_one_seed_are_two_rows_and_the_papers_stand_at_theirs() -> None:
    values = {"sp": [1.0, 2.0, 3.0], "gmp": [1.0, 2.0, 3.0]}
    records = [*levy(values, lr=0.1), *levy(values, lr=0.01)]
    table = only(tables.from_records(records, "levy"))
    labels = ["SP, rate 0.01", "SP, rate 0.1", "GmP, rate 0.01", "GmP, rate 0.1"]
    assert [row.label for row in table.rows] == labels
    assert "rate" not in table.columns
    shown = [cell(table, label, "papers") != "–" for label in labels]
    assert shown == [True, False, False, True]
    assert cell(table, "GmP, rate 0.1", "difference to SP, same rate") == "0.000 ± 0.000"


def test_images_are_tables_by_batch_size_compared_with_bn() -> None:
    records = [
        {"method": m, "seed": seed, "lr": 0.1, "batch_size": b, "top1": 42.0 + seed, "top5": 67.0}
        for m in ("gmp+imn", "bn")
        for seed in range(3)
        for b in (1024, 256)
    ]
    top1, difference, top5, _ = tables.from_records(records, "imagenet32", {"epochs": 18})
    assert top1.columns == ("rate", "256", "1024") and top5.title.startswith("Top-5")
    assert cell(top1, "BN", "256", papers=True) == "≈ 42.79 ± 0.03"
    assert cell(top1, "BN", "rate", papers=True) == "0.01"  # theirs, not ours
    assert "Difference to BN" in difference.title
    assert any("at most 18 epochs; the papers allow 90" in note for note in top1.notes)


def test_the_perturbation_has_its_own_tables_with_the_picture_beside() -> None:
    records = [{"method": "sp", "delta": d, "rotation": 29.1} for d in (0.001, 0.0001)]
    table = only(tables.from_records(records, "perturbation", {"seeds": 1000}))
    assert table.columns == ("0.0001", "0.001")
    assert cell(table, "SP", "0.001") == "29.1"
    assert cell(table, "SP", "0.001", papers=True) == "12.2"
    assert any("mirror image" in note for note in table.notes)
    assert not any("Not all" in note for note in table.notes)  # seeds are of another thing here


def test_a_partial_run_says_how_many_results_a_cell_has() -> None:
    records = [r for r in run_folders.uci_records() if r["method"] != "bn" or r["split"] < 4]
    matrix = tables.from_records(records, "uci", {"seeds": 10})[0]
    assert cell(matrix, "BN", "Wine").endswith("(n = 4)")
    assert "n =" not in cell(matrix, "SP", "Wine")
    assert any("Not all of the 10 splits" in note for note in matrix.notes)


def test_diverged_runs_are_counted_and_their_finite_results_kept() -> None:
    records = levy({"sp": [1.0, 3.0, math.nan]})
    records[1]["outcome"] = "diverged"
    records.append({"method": "sp", "seed": 3, "lr": 0.01, "outcome": "diverged"})
    table = only(tables.from_records(records, "levy"))
    assert cell(table, "SP", "Test RMSE") == "2.000 ± 1.000"
    assert cell(table, "SP", "n") == "2" and cell(table, "SP", "diverged") == "3"
    assert any("Diverged" in note for note in table.notes)


def test_generated_points_are_not_compared_with_the_papers() -> None:
    records = [{"method": "gmp", "seed": s, "test_accuracy": 0.88 + s / 99} for s in range(4)]
    table = only(tables.from_records(records, "banana", {"source": "generated"}))
    assert "papers" not in table.columns
    assert any("generated" in note for note in table.notes)


@pytest.mark.parametrize("value", [None, True, {"a": 1}])
def test_odd_records_do_no_harm(value: Any) -> None:
    records = levy({"sp": [1.0, 2.0], "something new": [1.5, 2.5]})
    records += [{"method": "sp", "seed": value, "lr": value, "test_rmse": value}, {"seed": 3}]
    table = only(tables.from_records(records, "levy", {"seeds": value, "epochs": value}))
    assert table.rows[-1].label == "something new"


def test_an_experiment_that_is_not_known_has_a_table_all_the_same() -> None:
    table = only(tables.from_records(levy({"sp": [1.0, 2.0]}), "other"))
    assert cell(table, "SP", "Test RMSE") == "1.500 ± 0.500"


def width_records() -> list[Record]:
    found: list[Record] = []
    for init in ("glorot", "sphere"):
        key = {"dataset": "levy", "method": "gmp", "init": init}
        found += [
            {**key, "kind": "trained", "width": w, "lr": lr, "seed": s, "test_rmse": w * lr}
            for w in (1024, 16)
            for lr in (0.01, 0.1)
            for s in range(3)
        ]
        found.append({**key, "kind": "start", "width": 16, "seed": 0, "activation": 3.0})
        answer = {"exponent_activation": -0.49, "best_rates": [0.1, 0.01], "one_rate": 0.1}
        found.append({**key, "kind": "answer", "width": None, "lr": None, "seed": None, **answer})
    return found


def test_the_width_experiment_has_answers_and_errors_by_width() -> None:
    exponents, errors = tables.from_records(width_records(), "width")
    assert exponents.columns == ("activations",) and "(Levy)" in exponents.title
    assert cell(exponents, "GmP, init sphere", "activations") == "-0.490"
    assert errors.title == "Test RMSE by width (Levy)" and errors.columns == ("16", "1024")
    assert cell(errors, "GmP, init sphere, rate 0.1", "16") == "1.600 ± 0.000"


def test_nothing_finished_makes_no_table_and_says_so(tmp_path: Path) -> None:
    run = Run.create(tmp_path / "run", "levy", {}, "geoparam run levy")
    assert tables.make_tables(run) == []
    with pytest.raises(ValueError, match="no finished piece of work"):
        tables.export([run])


def parse_markdown(text: str) -> list[list[str]]:
    lines = [line for line in text.splitlines() if line.startswith("| ")]
    assert set(lines.pop(1)) == {"|", "-", " "}
    cells = [re.split(r"(?<!\\) \| ", line[2:-2]) for line in lines]
    return [[re.sub(r"\\(.)", r"\1", cell.strip()) for cell in row] for row in cells]


def test_markdown_reads_back() -> None:
    for table in (ODD_TABLE, *tables.from_records(run_folders.uci_records(), "uci")):
        rows = [(table.corner, *table.columns), *(row.texts for row in table.rows)]
        assert parse_markdown(table.markdown()) == [list(row) for row in rows]


def test_numbers_of_the_papers_beside_another_rate_say_so() -> None:
    records = levy({"sp": [1.0, 2.0], "gmp": [1.0, 2.0]}, lr=0.1)
    said = "The papers' numbers are of other rates: SP 0.01."
    assert said in only(tables.from_records(records, "levy")).notes
    theirs = [*levy({"sp": [1.0, 2.0]}), *levy({"gmp": [1.0, 2.0]}, lr=0.1)]
    assert said not in only(tables.from_records(theirs, "levy")).notes


def test_two_runs_of_one_experiment_are_told_apart(tmp_path: Path) -> None:
    runs = [
        run_folders.uci(tmp_path / name, protocol)
        for name, protocol in (("here", "paper"), ("there", "heldout"))
    ]
    titles = re.findall(r"\*\*(\w+): ", tables.export(runs))
    assert set(titles) == {"here", "there"}
    alone = tables.export(runs[:1])
    assert "here:" not in alone


def two_rates() -> list[Record]:
    draws = np.random.default_rng(3).standard_normal((2, 3, 6)).tolist()
    low, high = (dict(zip(("sp", "wn", "gmp"), each, strict=True)) for each in draws)
    return [*levy(low, lr=0.01), *levy(high, lr=0.1)]


@pytest.mark.parametrize(("rates", "base"), [("papers' rates", 0.01), ("same rate", 0.1)])
def test_a_difference_says_at_which_rates_it_is(rates: str, base: float) -> None:
    records = two_rates()
    own, theirs = (
        np.array([r["test_rmse"] for r in records if (r["method"], r["lr"]) == which])
        for which in (("gmp", 0.1), ("sp", base))
    )
    table = only(tables.from_records(records, "levy"))
    found = cell(table, "GmP, rate 0.1", f"difference to SP, {rates}").strip(" *")
    mean, error = map(float, found.split(" ± "))
    assert mean == pytest.approx((own - theirs).mean(), abs=1e-3)
    assert error == pytest.approx((own - theirs).std(ddof=1) / np.sqrt(6), abs=1e-3)


def test_only_the_papers_rows_have_a_difference_at_the_papers_rates() -> None:
    table = only(tables.from_records(two_rates(), "levy"))
    shown = {
        row.label: cell(table, row.label, "difference to SP, papers' rates") != "–"
        for row in table.rows
    }
    assert [label for label, is_shown in shown.items() if is_shown] == [
        "WN, rate 0.01",
        "GmP, rate 0.1",
    ]
    assert any("(SP 0.01, WN 0.01, GmP 0.1)" in note for note in table.notes)


def test_a_rate_that_the_baseline_does_not_have_is_compared_with_none() -> None:
    records = [r for r in two_rates() if r["method"] != "gmp"]
    records += [{**r, "method": "gmp", "lr": 0.3} for r in records if r["method"] == "wn"][:6]
    table = only(tables.from_records(records, "levy"))
    assert cell(table, "GmP", "difference to SP, same rate") == "–"
    assert cell(table, "GmP", "difference to SP, papers' rates") == "–"


@pytest.mark.parametrize(
    ("protocol", "change", "rates"),
    [
        ("paper", {}, "papers' rates"),
        ("paper", {"lr": 0.03}, "same rate"),
        ("heldout", {}, "chosen rates"),
    ],
)
def test_one_rate_a_split_is_one_comparison_which_the_title_names(
    protocol: str, change: Record, rates: str
) -> None:
    records = [{**r, **change} for r in run_folders.uci_records(protocol)]
    titles = [t.title for t in tables.from_records(records, "uci") if "Difference" in t.title]
    assert len(titles) == 1 and titles[0].startswith(
        f"Difference to SP on the same split, {rates}: Test RMSE"
    )


def test_rates_that_are_neither_the_papers_nor_equal_are_each_methods_own() -> None:
    records = [*levy({"sp": [1.0] * 3}), *levy({"gmp": [1.0] * 3}, lr=0.3)]
    assert "difference to SP, own rates" in only(tables.from_records(records, "levy")).columns
