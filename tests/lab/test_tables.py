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

SPECIAL = r"a|b*c_d`e`\f & 50% $x$ #1 {y} ~z^2 <p> [l]"
SPECIAL_TABLE = Table(
    SPECIAL,
    ("m|n", "x", "y_1"),
    ((SPECIAL, "-1.5 ± 0.2 *", "–"),),
    (SPECIAL,),
)


def levy_records(values: dict[str, list[float]], **fields: Any) -> list[Record]:
    """One record for each method and value; the values are those of seeds 0, 1, ..."""
    records = []
    for method, errors in values.items():
        for seed, error in enumerate(errors):
            record = {"method": method, "seed": seed, "lr": 0.01, "test_rmse": error}
            records.append(record | fields)
    return records


def only_table(
    records: list[Record], experiment: str, config: dict[str, Any] | None = None, **options: Any
) -> Table:
    """The table of an experiment that has one."""
    [table] = tables.from_records(records, experiment, config or {}, **options)
    return table


def cell(table: Table, column: str, *row: str) -> str:
    """The cell below a heading that begins so, in the row that begins so."""
    [cells] = [cells for cells in table.rows if cells[: len(row)] == row]
    for heading, value in zip(table.columns, cells, strict=True):
        if heading.startswith(column):
            return value
    raise LookupError(f"no heading begins with {column!r}")


def mean_and_error(text: str) -> tuple[float, float]:
    """The numbers of a cell such as "1.0 ± 0.2 *"."""
    mean, error = text.strip(" *").split(" ± ")
    return float(mean), float(error)


def errors_of(records: list[Record], **fields: Any) -> np.ndarray:
    """The test errors of the records with these fields."""
    chosen = [r for r in records if fields.items() <= r.items()]
    return np.array([r["test_rmse"] for r in chosen])


def has_note(table: Table, words: str) -> bool:
    return any(words in note for note in table.notes)


@pytest.mark.parametrize("n", [2, 3, 6, 10, 20, 21])
@pytest.mark.parametrize("t", [0.0, 0.3, -2.1, 4.7])
def test_p_values_are_those_of_students_t(n: int, t: float) -> None:
    stats = pytest.importorskip("scipy.stats")

    p = estimates.find_p_value(Estimate(t, 1.0, n, 0, 0))

    assert p == pytest.approx(2 * stats.t.sf(abs(t), n - 1), abs=1e-12)


@pytest.mark.parametrize(
    ("difference", "p"),
    [
        (Estimate(0.0, 0.0, 5, 0, 0), 1),
        (Estimate(0.1, 0.0, 5, 0, 0), 0),
        (Estimate(0.1, None, 1, 0, 0), 1),
    ],
    ids=["no difference", "the same in all seeds", "one seed"],
)
def test_differences_without_a_spread_are_certain_or_mean_nothing(
    difference: Estimate, p: float
) -> None:
    assert estimates.find_p_value(difference) == pytest.approx(p, abs=1e-12)


def uci_records_with_t_values(t_values: dict[str, float]) -> list[Record]:
    """Ten splits of one data set; each method differs from SP by its corrected t value."""
    noise = np.linspace(-1, 1, 10)
    error = noise.std(ddof=1) * np.sqrt(0.35)  # of the mean difference, corrected
    errors = {"sp": np.full(10, 5.0)}
    for method, t in t_values.items():
        errors[method] = 5 + t * error + noise

    records = []
    for method, values in errors.items():
        for split, value in enumerate(values):
            record = {"method": method, "dataset": "wine", "split": split, "lr": 0.01}
            records.append(record | {"test_rmse": value})
    return records


def test_one_mark_is_of_the_corrected_test_and_two_are_of_holms() -> None:
    records = uci_records_with_t_values({"wn": 2.4, "bn": 9, "gmp": 2.0})  # p = 0.04 for WN

    table = only_table(records, "uci")

    assert re.search(r"\d \*$", cell(table, "minus", "WN"))
    assert re.search(r"\d \*\*$", cell(table, "minus", "BN"))
    assert "*" not in cell(table, "minus", "GmP")
    assert "minus SP (k = 3)" in table.columns


def test_four_splits_are_too_few_for_a_mark() -> None:
    records = uci_records_with_t_values({"wn": 2.4, "bn": 9, "gmp": 2.0})
    few = [r for r in records if r["split"] < 4]

    assert "*" not in cell(only_table(few, "uci"), "minus", "BN")


@pytest.mark.parametrize(
    ("mean", "expected"), [(3.49, True), (3.50, False), (2.51, True), (2.50, False)]
)
def test_agreement_ends_at_two_combined_errors(mean: float, expected: bool) -> None:
    # 2 sqrt(0.2^2 + 0.1^2) = 0.447, and 0.05 of rounding
    ours, printed = Estimate(mean, 0.2, 10, 0, 9), Printed("3.0 ± 0.1")

    assert estimates.agrees(ours, printed) is expected


@pytest.mark.parametrize(
    ("ours", "printed"),
    [
        (estimate([1.0, 1.1, 1.2]), Printed("1.104")),
        (estimate([1.0]), Printed("9.0 ± 0.1")),
        (estimate([1.0, 1.1]), Printed("9.0 ± 0.1")),
        (None, Printed("9.0 ± 0.1")),
        (Estimate(1.0, 0.1, 9, 0, 2), None),
    ],
    ids=["theirs of one seed", "ours of one seed", "ours of two seeds", "none of ours", "none"],
)
def test_agreement_is_not_judged_from_few_seeds(
    ours: Estimate | None, printed: Printed | None
) -> None:
    assert estimates.agrees(ours, printed) is None


def test_a_papers_number_of_one_seed_is_shown_without_a_judgement() -> None:
    table = only_table(levy_records({"sp": [1.0, 1.1, 1.2]}), "levy")

    assert "papers" in table.columns
    assert cell(table, "papers", "SP") == "1.104"


def test_a_row_has_mean_range_and_difference() -> None:
    records = levy_records(
        {"gmp": [0.4, 0.5, 0.6], "sp": [1.1, 1.1, 1.3]},
        largest_move=0.5,
        largest_rotation=0.0,
    )

    table = only_table(records, "levy")

    assert [row[0] for row in table.rows] == ["SP", "GmP"]
    assert cell(table, "Test RMSE", "GmP") == "0.500 ± 0.058"
    assert cell(table, "range", "GmP") == "0.400 to 0.600"
    assert cell(table, "minus SP", "GmP") == "-0.667 ± 0.033"
    assert cell(table, "n", "SP") == "3"
    assert cell(table, "rate", "SP") == "0.01"
    assert cell(table, "largest move, running statistics", "SP") == "0.500"
    assert "diverged" not in table.columns


def test_the_published_table_comes_out_of_records_like_it() -> None:
    table = only_table(run_folders.uci_records(), "uci")

    assert [row[0] for row in table.rows] == ["SP", "WN", "BN", "GmP"] * 7
    datasets = [row[1] for row in table.rows[::4]]
    assert datasets == [name.capitalize() for name in run_folders.SETS]
    assert cell(table, "papers", "GmP", "Boston").endswith("3.057 ± 0.144")
    assert cell(table, "Test RMSE", "SP", "Naval").startswith("0.00")
    assert cell(table, "rate", "GmP", "Wine") == "0.1"
    assert cell(table, "n", "SP", "Wine") == "10"


def test_the_heading_counts_the_rows_that_agree_with_the_papers() -> None:
    table = only_table(run_folders.uci_records(), "uci")

    agreeing = [row for row in table.rows if cell(table, "papers", *row[:2]).startswith("≈")]

    assert f"papers (≈ {len(agreeing)} of 28)" in table.columns


def test_differences_are_of_the_same_split() -> None:
    records = run_folders.uci_records()
    table = only_table(records, "uci")

    mean, error = mean_and_error(cell(table, "minus SP", "GmP", "Wine"))

    gmp = errors_of(records, method="gmp", dataset="wine")
    sp = errors_of(records, method="sp", dataset="wine")
    difference = gmp - sp
    expected_error = difference.std(ddof=1) * np.sqrt(1 / 10 + 0.2 / 0.8)
    assert mean == pytest.approx(difference.mean(), abs=1e-3)
    assert error == pytest.approx(expected_error, abs=1e-3)
    assert has_note(table, "Nadeau and Bengio")


def test_the_baseline_has_no_difference() -> None:
    table = only_table(run_folders.uci_records(), "uci")

    assert cell(table, "minus SP", "SP", "Wine") == "–"


def test_any_method_may_be_the_baseline() -> None:
    records = run_folders.uci_records()
    minus_sp = cell(only_table(records, "uci"), "minus SP", "GmP", "Wine")

    table = only_table(records, "uci", baseline="gmp")

    assert "minus GmP (k = 21)" in table.columns
    mean, _ = mean_and_error(cell(table, "minus GmP", "SP", "Wine"))
    assert mean == -mean_and_error(minus_sp)[0]


@pytest.fixture
def uci_runs(tmp_path: Path) -> list[Run]:
    """A run of SP, WN, BN and GmP, and one of SP and LN."""
    with_ln = Run.create(tmp_path / "ln", "uci", {}, "geoparam run uci", key=("method",))
    for method in ("sp", "ln"):
        record = {"method": method, "dataset": "yacht", "test_rmse": 1.0, "split": 0}
        with_ln.append(record)
    return [run_folders.uci(tmp_path / "gmp"), with_ln]


def test_a_run_without_the_chosen_baseline_keeps_its_usual_one(uci_runs: list[Run]) -> None:
    text = tables.export(uci_runs, "gmp")

    assert "minus GmP (k = 21)" in text
    assert "| minus SP |" in text


def test_a_baseline_that_no_run_has_is_refused(uci_runs: list[Run]) -> None:
    with pytest.raises(ValueError, match="baseline is one of sp, wn, bn, gmp, ln; got 'natural'"):
        tables.export(uci_runs, "natural")


def test_heldout_shows_chosen_rates_and_neither_trials_nor_papers() -> None:
    records = run_folders.uci_records("heldout")

    table = only_table(records, "uci", {"protocol": "heldout"})

    assert not any(name.startswith("papers") for name in table.columns)
    assert has_note(table, "another protocol: the papers' numbers are not")
    assert cell(table, "n", "SP", "Yacht") == "10"
    assert cell(table, "rate", "SP", "Yacht") == "0.01 (4), 0.1 (6)"
    assert cell(table, "rate", "GmP", "Yacht") == "0.1"


def test_each_rate_has_a_row_which_names_the_papers_rate_if_it_differs() -> None:
    values = {"sp": [1.0, 2.0, 3.0], "gmp": [1.0, 2.0, 3.0]}
    records = levy_records(values, lr=0.1) + levy_records(values, lr=0.01)

    table = only_table(records, "levy")

    papers = {row[:2]: cell(table, "papers", *row[:2]) for row in table.rows}
    assert papers == {
        ("SP", "0.01"): "1.104",
        ("SP", "0.1"): "1.104 (rate 0.01)",
        ("GmP", "0.01"): "0.496 (rate 0.1)",
        ("GmP", "0.1"): "0.496",
    }
    assert cell(table, "minus SP", "GmP", "0.1") == "0.000 ± 0.000"


def image_records() -> list[Record]:
    records = []
    for method in ("gmp+imn", "bn"):
        for seed in range(3):
            for batch_size in (1024, 256):
                record = {"method": method, "seed": seed, "lr": 0.1, "batch_size": batch_size}
                records.append(record | {"top1": 42.0 + seed, "top5": 67.0})
    return records


def test_images_have_a_row_for_each_batch_size_compared_with_bn() -> None:
    table = only_table(image_records(), "imagenet32")

    assert [row[:2] for row in table.rows][:2] == [("BN", "256"), ("GmP+IMN", "256")]
    assert cell(table, "range, Top-1", "BN", "256") == "42.00 to 44.00"
    assert table.columns.count("minus BN") == 2  # top-1 and top-5


def test_the_papers_images_stand_beside_ours() -> None:
    table = only_table(image_records(), "imagenet32")

    assert cell(table, "papers", "BN", "256") == "42.79 ± 0.03 (rate 0.01)"  # ours is 0.1
    assert cell(table, "papers", "GmP+IMN", "256") == "≈ 43.14 ± 0.05"


def test_the_perturbation_stands_beside_the_papers_turn() -> None:
    records = [
        {"method": "sp", "delta": 0.001, "rotation": 29.1},
        {"method": "sp", "delta": 0.0001, "rotation": 29.1},
    ]

    table = only_table(records, "perturbation", {"seeds": 1000})

    assert [row[1] for row in table.rows] == ["0.0001", "0.001"]
    assert cell(table, "Papers' unit: turn", "SP", "0.001") == "29.1"
    assert cell(table, "papers", "SP", "0.001") == "12.2"
    assert has_note(table, "mirror image")
    assert "n" not in table.columns  # one unit, no seeds


def test_diverged_runs_are_counted_and_their_finite_results_kept() -> None:
    records = levy_records({"sp": [1.0, 3.0, math.nan]})
    records[1]["outcome"] = "diverged"
    records.append({"method": "sp", "seed": 3, "lr": 0.01, "outcome": "diverged"})

    table = only_table(records, "levy")

    assert cell(table, "Test RMSE", "SP") == "2.000 ± 1.000"
    assert cell(table, "n", "SP") == "2"
    assert cell(table, "diverged", "SP") == "3"
    assert has_note(table, "Diverged runs are counted")


def test_generated_points_are_not_compared_with_the_papers() -> None:
    records = [{"method": "gmp", "seed": s, "test_accuracy": 0.88 + s / 99} for s in range(4)]

    table = only_table(records, "banana", {"source": "generated", "epochs": 3})

    assert "papers" not in table.columns
    assert has_note(table, "generated")
    assert has_note(table, "cut short")


@pytest.mark.parametrize("value", [None, True, {"a": 1}])
def test_records_with_odd_values_do_no_harm(value: Any) -> None:
    records = levy_records({"sp": [1.0, 2.0], "something new": [1.5, 2.5]})
    records.append({"method": "sp", "seed": value, "lr": value, "test_rmse": value})
    records.append({"seed": 3})

    table = only_table(records, "levy", {"seeds": value, "epochs": value})

    assert table.rows[-1][0] == "something new"


def test_text_where_a_number_belongs_is_named_with_its_folder(tmp_path: Path) -> None:
    run = Run.create(tmp_path / "run", "levy", {"seeds": 1}, "", key=("method", "seed"))
    run.append({"method": "sp", "seed": 0, "lr": 0.1, "test_rmse": "2.7"})

    with pytest.raises(ValueError, match="run is damaged.*'2.7' where a number belongs"):
        tables.export([run])


def test_an_unknown_experiment_has_a_table_too() -> None:
    table = only_table(levy_records({"sp": [1.0, 2.0]}), "other")

    assert cell(table, "Test RMSE", "SP") == "1.500 ± 0.500"


def test_a_run_without_results_has_no_table(tmp_path: Path) -> None:
    run = Run.create(tmp_path / "run", "levy", {}, "geoparam run levy")

    assert tables.make_tables(run) == []
    with pytest.raises(ValueError, match="no finished piece of work"):
        tables.export([run])


def test_records_without_a_known_measure_are_refused(tmp_path: Path) -> None:
    run = Run.create(tmp_path / "run", "mine", {}, key=("seed",))
    run.append({"seed": 0, "method": "sp", "my_measure": 1.0})

    with pytest.raises(ValueError, match="the records have no field .* known .* levy, banana"):
        tables.export([run])


def parse_markdown(text: str) -> list[tuple[str, ...]]:
    """The cells of a table in Markdown: those of the headings, and of every row."""
    headings, rule, *rows = [line for line in text.splitlines() if line.startswith("| ")]
    assert set(rule) == {"|", "-", " "}

    parsed = []
    for line in (headings, *rows):
        cells = re.split(r"(?<!\\) \| ", line[2:-2])
        parsed.append(tuple(re.sub(r"\\(.)", r"\1", cell.strip()) for cell in cells))
    return parsed


@pytest.mark.parametrize(
    "table",
    [SPECIAL_TABLE, only_table(run_folders.uci_records(), "uci")],
    ids=["special characters", "uci"],
)
def test_markdown_reads_back(table: Table) -> None:
    assert parse_markdown(table.markdown()) == [table.columns, *table.rows]


def test_two_runs_of_one_experiment_are_told_apart(tmp_path: Path) -> None:
    runs = [
        run_folders.uci(tmp_path / "here", "paper"),
        run_folders.uci(tmp_path / "there", "heldout"),
    ]

    titles = re.findall(r"## UCI regression: (\w+)", tables.export(runs))

    assert titles == ["here", "there"]


def records_of_two_rates() -> list[Record]:
    rng = np.random.default_rng(3)
    records = []
    for lr in (0.01, 0.1):
        sp, wn, gmp = rng.standard_normal((3, 6)).tolist()
        records += levy_records({"sp": sp, "wn": wn, "gmp": gmp}, lr=lr)
    return records


@pytest.mark.parametrize(
    ("column", "sp_rate"), [("minus SP, papers' rates", 0.01), ("minus SP (k", 0.1)]
)
def test_a_difference_is_at_the_same_rate_or_at_the_papers(column: str, sp_rate: float) -> None:
    records = records_of_two_rates()
    table = only_table(records, "levy")

    mean, error = mean_and_error(cell(table, column, "GmP", "0.1"))

    gmp = errors_of(records, method="gmp", lr=0.1)
    sp = errors_of(records, method="sp", lr=sp_rate)
    difference = gmp - sp
    assert mean == pytest.approx(difference.mean(), abs=1e-3)
    assert error == pytest.approx(difference.std(ddof=1) / np.sqrt(6), abs=1e-3)


def test_only_the_papers_rows_have_a_difference_at_the_papers_rates() -> None:
    table = only_table(records_of_two_rates(), "levy")

    rows = [row[:2] for row in table.rows]
    compared = [row for row in rows if cell(table, "minus SP, papers'", *row) != "–"]

    assert compared == [("WN", "0.01"), ("GmP", "0.1")]


def test_a_rate_that_the_baseline_does_not_have_has_no_difference() -> None:
    records = [r for r in records_of_two_rates() if r["method"] != "gmp"]
    records += levy_records({"gmp": errors_of(records, method="wn", lr=0.01).tolist()}, lr=0.3)

    table = only_table(records, "levy")

    assert cell(table, "minus SP (k", "GmP") == "–"
    assert cell(table, "minus SP, papers' rates", "GmP") == "–"


@pytest.mark.parametrize("protocol", ["paper", "heldout"])
def test_one_rate_for_each_split_is_one_comparison(protocol: str) -> None:
    table = only_table(run_folders.uci_records(protocol), "uci")

    differences = [name for name in table.columns if "minus" in name]

    assert differences == ["minus SP (k = 21)"]


@pytest.mark.parametrize(
    ("network", "reason"),
    [("vgg6", "images of 32 by 32 pixels"), ("resnet18", "1,281,167 training images")],
)
def test_small_images_are_not_compared_with_the_papers_resnets(network: str, reason: str) -> None:
    data = {"classes": 200, "train": 100_000, "val": 10_000, "size": 32}
    find_mismatch = experiments.find("imagenet32").mismatch

    assert reason in find_mismatch({"network": network, "data": data})


def test_lowest_means_are_said_to_be_no_test() -> None:
    run: Any = SimpleNamespace(config={"protocol": "paper"})

    limits = experiments.find("uci").describe_limits(run)

    assert "by chance" in limits
    assert "The test split itself decides" in limits
