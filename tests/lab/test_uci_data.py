"""The UCI sets: the real ones where GEOPARAM_DATA has them, their traps, and where they are."""

import os
import re
from pathlib import Path

import numpy as np
import pytest

from geoparam_lab.data import table_files, uci_data
from geoparam_lab.data.splits import stack

POINTS = dict(boston=506, concrete=1030, energy=768, naval=11934, power=9568, wine=1599, yacht=308)
FEATURES = dict(boston=13, concrete=8, energy=8, naval=16, power=4, wine=11, yacht=6)


def needs(name: str) -> None:
    if not os.environ.get("GEOPARAM_DATA") or table_files.find(uci_data.TABLES[name]) is None:
        pytest.skip(f"needs {name} in GEOPARAM_DATA")


@pytest.fixture(params=uci_data.NAMES)
def name(request: pytest.FixtureRequest) -> str:
    needs(request.param)
    return request.param


def test_real_sets_have_their_sizes_and_standardise_without_nan(name: str) -> None:
    x, y = uci_data.load(name)
    assert x.shape == (POINTS[name], FEATURES[name]) and y.shape == (POINTS[name],)
    parts = stack(x, y, range(10), "heldout")
    assert all(np.isfinite(array).all() for array in parts)
    constant = [8, 11] if name == "naval" else []
    deviations = parts.x_train.std(axis=1)
    np.testing.assert_allclose(np.delete(deviations, constant, axis=1), 1, rtol=1e-9)
    assert not parts.x_train[:, :, constant].any() and not parts.x_test[:, :, constant].any()


ALTERED = {  # how a table is altered, and what is said of it
    "yacht": (
        lambda table: table + 1e-6 * (table == table[-1, -1]),
        "are not the 308 rows of 7 of yacht",
    ),
    "power": (lambda table: table[::-1], "in another order.*five sheets"),
    "concrete": (lambda table: table.round(2), "copies with rounded numbers are common"),
}


@pytest.mark.parametrize("name", ALTERED)
def test_a_real_set_that_was_altered_is_refused(name: str, tmp_path: Path) -> None:
    needs(name)
    alter, said = ALTERED[name]
    table = alter(table_files.load(uci_data.TABLES[name]))
    np.savetxt(tmp_path / f"{name}.csv", table, delimiter=",", fmt="%.17g")
    with pytest.raises(ValueError, match=f"{name}.csv cannot be used: .*{said}"):
        uci_data.load(name, tmp_path)


@pytest.mark.parametrize(
    ("name", "file", "separator", "extra"),
    [
        ("boston", "housing.data", " ", 0),
        ("naval", "UCI CBM Dataset/data.txt", "   ", 1),
        ("wine", "winequality-red.csv", ";", 0),
    ],
)
def test_original_text_files_are_read(
    name: str, file: str, separator: str, extra: int, tmp_path: Path
) -> None:
    needs(name)
    table = table_files.load(uci_data.TABLES[name])
    surplus = np.zeros((len(table), extra))
    path = tmp_path / file
    path.parent.mkdir(exist_ok=True)
    header = '"fixed acidity";"quality"' if name == "wine" else ""
    rows = np.column_stack([table, surplus])
    np.savetxt(path, rows, delimiter=separator, fmt="%.16e", header=header, comments="")
    read = table_files.load(uci_data.TABLES[name], tmp_path)
    np.testing.assert_array_equal(read, table)


def test_the_papers_order_of_boston_is_keras_shuffle_of_the_archives() -> None:
    needs("boston")
    table = table_files.load(uci_data.TABLES["boston"])
    x, y = table[:, :-1], table[:, -1]
    indices = np.arange(506)
    np.random.RandomState(113).shuffle(indices)
    shuffled_x, shuffled_y = uci_data.load("boston")
    np.testing.assert_array_equal(shuffled_x, x[indices])
    np.testing.assert_array_equal(shuffled_y, y[indices])
    assert y[:3].tolist() == [24.0, 21.6, 34.7]  # the archive's first
    assert shuffled_y[:4].tolist() == [15.2, 42.3, 50.0, 21.1]  # as Keras's documentation shows


def test_unknown_names_are_refused() -> None:
    with pytest.raises(ValueError, match="boston, concrete, .*; got 'housing'"):
        uci_data.load("housing")


@pytest.mark.parametrize("table", uci_data.TABLES.values(), ids=uci_data.NAMES)
def test_sources_are_pinned_or_the_archive_itself(table: table_files.Table) -> None:
    archive, *mirrors = table.urls
    assert archive.startswith("https://archive.ics.uci.edu/")
    pinned = r"^https://raw.githubusercontent.com/[^/]+/[^/]+/[0-9a-f]{40}/"
    assert all(re.search(pinned, mirror) for mirror in mirrors)
    assert (table.rows, table.columns) == (POINTS[table.name], FEATURES[table.name] + 1)
