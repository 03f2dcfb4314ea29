"""Banana: KEEL's points as the papers draw them, or generated ones that resemble them."""

import os
import zipfile
from pathlib import Path

import numpy as np
import pytest

from geoparam_lab.data import banana_data, synthetic, table_files
from geoparam_lab.data.splits import split


@pytest.fixture
def keel() -> np.ndarray:
    if not os.environ.get("GEOPARAM_DATA") or table_files.find(banana_data.KEEL) is None:
        pytest.skip("needs banana.csv in GEOPARAM_DATA")
    return table_files.load(banana_data.KEEL)


def check(data: banana_data.Banana) -> None:
    assert data.x_train.shape == (800, 2) and data.x_test.shape == (200, 2)
    assert data.y_train.shape == (800,) and data.y_test.shape == (200,)
    assert all(array.dtype == np.float64 for array in data[:4])
    assert set(data.y_train.tolist()) == set(data.y_test.tolist()) == {0.0, 1.0}
    np.testing.assert_allclose(data.x_train.mean(axis=0), 0, atol=1e-12)
    np.testing.assert_allclose(data.x_train.std(axis=0), 1, rtol=1e-12)


def test_generated_points_say_so() -> None:
    data = banana_data.load(source="generated")
    check(data)
    assert data.source == "generated"


def test_a_download_that_fails_is_not_replaced_by_generated_points(nowhere: None) -> None:
    with pytest.raises(FileNotFoundError, match=r"(?s)banana.zip: no network.*--data"):
        banana_data.load()


def test_the_file_gives_the_papers_points(keel: np.ndarray) -> None:
    np.random.seed(0)
    chosen = keel[np.random.choice(5300, size=1000, replace=False)]
    train, test = split(1000, seed=0)
    mean, deviation = chosen[train, :2].mean(axis=0), chosen[train, :2].std(axis=0)
    data = banana_data.load()
    check(data)
    assert data.source == "KEEL"
    np.testing.assert_allclose(data.x_test, (chosen[test, :2] - mean) / deviation, rtol=1e-12)
    np.testing.assert_array_equal(data.y_test, chosen[test, 2] == 1)
    np.testing.assert_array_equal(data.y_train, chosen[train, 2] == 1)


def test_keels_own_format_gives_the_same(keel: np.ndarray, tmp_path: Path, nowhere: None) -> None:
    header = (
        "@relation banana\n@attribute At1 real [-3.09, 2.81]\n@attribute At2 real [-2.39, 3.19]\n"
        "@attribute Class {-1.0, 1.0}\n@inputs At1, At2\n@outputs Class\n@data"
    )
    path = tmp_path / "banana.dat"
    np.savetxt(path, keel, delimiter=", ", fmt=("%g", "%g", "%.1f"), header=header, comments="")
    with zipfile.ZipFile(tmp_path / "banana.zip", "w") as archive:
        archive.write(path, "banana.dat")
    plain = banana_data.load(tmp_path)
    path.unlink()
    zipped = banana_data.load(tmp_path)
    assert plain.source == zipped.source == "KEEL"
    np.testing.assert_array_equal(plain.x_train, zipped.x_train)
    np.testing.assert_array_equal(table_files.load(banana_data.KEEL, tmp_path), keel)


def test_an_altered_file_is_an_error_and_not_replaced(tmp_path: Path, nowhere: None) -> None:
    (tmp_path / "banana.csv").write_text("At1,At2,Class\n1.14,-0.114,-1\n")
    with pytest.raises(ValueError, match="banana.csv cannot be used: its numbers, 1 rows of 3"):
        banana_data.load(tmp_path)


def bayes_rule(x: np.ndarray, noise: float) -> np.ndarray:
    """The likelier class, by the densities of the generator's three parts."""
    angle = np.linspace(0, np.pi, 361)
    ring = np.stack([np.cos(angle), np.sin(angle)], axis=1)
    densities = []
    for radius in synthetic.BANANA_RADII:
        squares = ((x[:, None] - radius * ring) ** 2).sum(axis=-1)
        densities.append(np.exp(-squares / (2 * noise**2)).mean(axis=1))
    heap, inner, outer = densities * np.array([[0.2], [0.45], [0.35]])
    return inner > heap + outer


def test_the_best_rule_is_right_for_nine_of_ten() -> None:
    x, y = synthetic.banana(seed=3, points=4000)
    assert (bayes_rule(x, noise=0.34) == y).mean() == pytest.approx(0.9, abs=0.015)
