"""Differences to a baseline: between which rates they are, and that the table says so."""

import numpy as np
import pytest
import run_folders

from geoparam_lab.run_folder import Record
from geoparam_lab.tables import tables
from geoparam_lab.tables.formats import Cell, Table


def only(found: list[Table]) -> Table:
    assert len(found) == 1
    return found[0]


def cell(table: Table, row: str, column: str) -> Cell:
    [line] = [line for line in table.rows if line.label == row]
    return line.cells[table.columns.index(column)]


def two_rates() -> list[Record]:
    rng = np.random.default_rng(3)
    return [
        {"method": m, "seed": s, "lr": lr, "test_rmse": float(rng.standard_normal())}
        for m in ("sp", "wn", "gmp")
        for lr in (0.01, 0.1)
        for s in range(6)
    ]


@pytest.mark.parametrize(("rates", "base"), [("papers' rates", 0.01), ("same rate", 0.1)])
def test_a_difference_says_at_which_rates_it_is(rates: str, base: float) -> None:
    records = two_rates()
    own, theirs = (
        np.array([r["test_rmse"] for r in records if (r["method"], r["lr"]) == which])
        for which in (("gmp", 0.1), ("sp", base))
    )
    table = only(tables.from_records(records, "levy"))
    found = cell(table, "GmP, rate 0.1", f"difference to SP, {rates}").estimate
    assert found is not None and found.mean == pytest.approx((own - theirs).mean())
    assert found.error == pytest.approx((own - theirs).std(ddof=1) / np.sqrt(6))


def test_only_the_papers_rows_have_a_difference_at_the_papers_rates() -> None:
    table = only(tables.from_records(two_rates(), "levy"))
    shown = {
        row.label: cell(table, row.label, "difference to SP, papers' rates").estimate is not None
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
    assert cell(table, "GmP", "difference to SP, same rate").text == "–"
    assert cell(table, "GmP", "difference to SP, papers' rates").text == "–"


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
    rates = {"sp": 0.01, "gmp": 0.3}
    records = [
        {"method": method, "seed": seed, "lr": lr, "test_rmse": 1.0}
        for method, lr in rates.items()
        for seed in range(3)
    ]
    assert "difference to SP, own rates" in only(tables.from_records(records, "levy")).columns
