"""Banana: KEEL's points as the papers draw them, or generated ones that resemble them."""

import os
import zipfile
from pathlib import Path

import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal

from geoparam_lab.data import banana_data, synthetic, table_files
from geoparam_lab.data.splits import split


@pytest.fixture
def keel() -> np.ndarray:
    if not os.environ.get("GEOPARAM_DATA") or table_files.find(banana_data.KEEL) is None:
        pytest.skip("needs banana.csv in GEOPARAM_DATA")
    return table_files.load(banana_data.KEEL)


def assert_standardized_points(data: banana_data.Banana) -> None:
    """Assert 800 training and 200 test points, in float64, scaled by the training points."""
    assert data.x_train.shape == (800, 2)
    assert data.y_train.shape == (800,)
    assert data.x_test.shape == (200, 2)
    assert data.y_test.shape == (200,)
    for array in (data.x_train, data.y_train, data.x_test, data.y_test):
        assert array.dtype == np.float64
    assert set(data.y_train.tolist()) == {0.0, 1.0}
    assert set(data.y_test.tolist()) == {0.0, 1.0}
    assert_allclose(data.x_train.mean(axis=0), 0, atol=1e-12)
    assert_allclose(data.x_train.std(axis=0), 1, rtol=1e-12)


def test_generated_points_are_named_as_such() -> None:
    data = banana_data.load(source="generated")

    assert data.source == "generated"
    assert_standardized_points(data)


def test_a_download_that_fails_is_not_replaced_by_generated_points(nowhere: None) -> None:
    with pytest.raises(FileNotFoundError, match=r"(?s)banana.zip: no network.*--data"):
        banana_data.load()


def test_the_file_gives_the_papers_points(keel: np.ndarray) -> None:
    np.random.seed(0)
    chosen = keel[np.random.choice(5300, size=1000, replace=False)]
    x = chosen[:, :2]
    is_positive = chosen[:, 2] == 1
    train, test = split(1000, seed=0)
    mean = x[train].mean(axis=0)
    deviation = x[train].std(axis=0)

    data = banana_data.load()

    assert data.source == "KEEL"
    assert_standardized_points(data)
    assert_allclose(data.x_test, (x[test] - mean) / deviation, rtol=1e-12)
    assert_array_equal(data.y_test, is_positive[test])
    assert_array_equal(data.y_train, is_positive[train])


def write_keel_format(path: Path, table: np.ndarray) -> None:
    header = (
        "@relation banana\n@attribute At1 real [-3.09, 2.81]\n@attribute At2 real [-2.39, 3.19]\n"
        "@attribute Class {-1.0, 1.0}\n@inputs At1, At2\n@outputs Class\n@data"
    )
    formats = ("%g", "%g", "%.1f")
    np.savetxt(path, table, delimiter=", ", fmt=formats, header=header, comments="")


def test_keels_own_format_gives_the_same_points(
    keel: np.ndarray, tmp_path: Path, nowhere: None
) -> None:
    write_keel_format(tmp_path / "banana.dat", keel)

    assert banana_data.load(tmp_path).source == "KEEL"
    assert_array_equal(table_files.load(banana_data.KEEL, tmp_path), keel)


def test_keels_archive_gives_the_same_points(
    keel: np.ndarray, tmp_path: Path, nowhere: None
) -> None:
    write_keel_format(tmp_path / "keel.dat", keel)
    with zipfile.ZipFile(tmp_path / "banana.zip", "w") as archive:
        archive.write(tmp_path / "keel.dat", "banana.dat")

    assert banana_data.load(tmp_path).source == "KEEL"
    assert_array_equal(table_files.load(banana_data.KEEL, tmp_path), keel)


def test_an_altered_file_is_an_error_and_not_replaced(tmp_path: Path, nowhere: None) -> None:
    (tmp_path / "banana.csv").write_text("At1,At2,Class\n1.14,-0.114,-1\n")

    with pytest.raises(ValueError, match="banana.csv cannot be used: its numbers, 1 rows of 3"):
        banana_data.load(tmp_path)


def classify_by_bayes_rule(x: np.ndarray, noise: float) -> np.ndarray:
    """Return the likelier class, by the densities of the generator's three parts."""
    angle = np.linspace(0, np.pi, 361)
    unit_arch = np.stack([np.cos(angle), np.sin(angle)], axis=1)
    densities = []
    for radius in synthetic.BANANA_RADII:
        offsets = x[:, None] - radius * unit_arch
        squares = (offsets**2).sum(axis=-1)
        densities.append(np.exp(-squares / (2 * noise**2)).mean(axis=1))

    heap, inner, outer = densities
    return 0.45 * inner > 0.2 * heap + 0.35 * outer


def test_the_best_rule_is_right_for_nine_of_ten() -> None:
    x, y = synthetic.banana(seed=3, points=4000)

    is_right = classify_by_bayes_rule(x, noise=0.34) == y

    assert is_right.mean() == pytest.approx(0.9, abs=0.015)


def test_generated_points_are_of_no_folder(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="generated points are read from no folder"):
        banana_data.load(tmp_path, "generated")
