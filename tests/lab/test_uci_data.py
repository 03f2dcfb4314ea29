"""The UCI sets: the real ones where GEOPARAM_DATA has them, their traps, and where they are."""

import os
import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from geoparam_lab.data import table_files, uci_data
from geoparam_lab.data.splits import stack

SHAPES = {
    "boston": (506, 13),
    "concrete": (1030, 8),
    "energy": (768, 8),
    "naval": (11934, 16),
    "power": (9568, 4),
    "wine": (1599, 11),
    "yacht": (308, 6),
}
CONSTANT_FEATURES = {"naval": [8, 11]}


def skip_without(name: str) -> None:
    if not os.environ.get("GEOPARAM_DATA") or table_files.find(uci_data.TABLES[name]) is None:
        pytest.skip(f"needs {name} in GEOPARAM_DATA")


@pytest.fixture(params=uci_data.NAMES)
def name(request: pytest.FixtureRequest) -> str:
    skip_without(request.param)
    return request.param


def test_real_sets_have_their_sizes(name: str) -> None:
    x, y = uci_data.load(name)

    points, features = SHAPES[name]
    assert x.shape == (points, features)
    assert y.shape == (points,)


def test_real_sets_are_standardised_without_nan(name: str) -> None:
    parts = stack(*uci_data.load(name), range(10), "heldout")

    for array in parts:
        assert np.isfinite(array).all()
    constant = CONSTANT_FEATURES.get(name, [])
    deviations = np.delete(parts.x_train.std(axis=1), constant, axis=1)
    np.testing.assert_allclose(deviations, 1, rtol=1e-9)
    assert not parts.x_train[:, :, constant].any()
    assert not parts.x_test[:, :, constant].any()


def change_a_little(table: np.ndarray) -> np.ndarray:
    return table + 1e-6 * (table == table[-1, -1])


def reverse(table: np.ndarray) -> np.ndarray:
    return table[::-1]


def round_numbers(table: np.ndarray) -> np.ndarray:
    return table.round(2)


@pytest.mark.parametrize(
    ("name", "alter", "message"),
    [
        ("yacht", change_a_little, "are not the 308 rows of 7 of yacht"),
        ("power", reverse, "in another order.*five sheets"),
        ("concrete", round_numbers, "copies with rounded numbers are common"),
    ],
)
def test_a_real_set_that_was_altered_is_refused(
    name: str, alter: Callable[[np.ndarray], np.ndarray], message: str, tmp_path: Path
) -> None:
    skip_without(name)
    table = alter(table_files.load(uci_data.TABLES[name]))
    np.savetxt(tmp_path / f"{name}.csv", table, delimiter=",", fmt="%.17g")

    with pytest.raises(ValueError, match=f"{name}.csv cannot be used: .*{message}"):
        uci_data.load(name, tmp_path)


@pytest.mark.parametrize(
    ("name", "file", "separator", "header", "extra_columns"),
    [
        ("boston", "housing.data", " ", "", 0),
        ("naval", "UCI CBM Dataset/data.txt", "   ", "", 1),
        ("wine", "winequality-red.csv", ";", '"fixed acidity";"quality"', 0),
    ],
)
def test_original_text_files_are_read(
    name: str, file: str, separator: str, header: str, extra_columns: int, tmp_path: Path
) -> None:
    skip_without(name)
    table = table_files.load(uci_data.TABLES[name])
    rows = np.column_stack([table, np.zeros((len(table), extra_columns))])
    path = tmp_path / file
    path.parent.mkdir(exist_ok=True)
    np.savetxt(path, rows, delimiter=separator, fmt="%.16e", header=header, comments="")

    original = table_files.load(uci_data.TABLES[name], tmp_path)

    np.testing.assert_array_equal(original, table)


def test_the_papers_order_of_boston_is_keras_shuffle_of_the_archives() -> None:
    skip_without("boston")
    archive = table_files.load(uci_data.TABLES["boston"])
    assert archive[:3, -1].tolist() == [24.0, 21.6, 34.7]

    x, y = uci_data.load("boston")

    order = np.arange(506)
    np.random.RandomState(113).shuffle(order)
    np.testing.assert_array_equal(x, archive[order, :-1])
    np.testing.assert_array_equal(y, archive[order, -1])
    assert y[:4].tolist() == [15.2, 42.3, 50.0, 21.1]  # as Keras's documentation shows


def test_unknown_names_are_refused() -> None:
    with pytest.raises(ValueError, match="boston, concrete, .*; got 'housing'"):
        uci_data.load("housing")


each_table = pytest.mark.parametrize("table", uci_data.TABLES.values(), ids=uci_data.NAMES)


@each_table
def test_sources_are_pinned_or_the_archive_itself(table: table_files.Table) -> None:
    archive, *mirrors = table.urls

    assert archive.startswith("https://archive.ics.uci.edu/")
    for mirror in mirrors:
        assert re.search(r"^https://raw.githubusercontent.com/[^/]+/[^/]+/[0-9a-f]{40}/", mirror)


@each_table
def test_tables_are_features_and_a_target(table: table_files.Table) -> None:
    points, features = SHAPES[table.name]

    assert table.rows == points
    assert table.columns == features + 1
