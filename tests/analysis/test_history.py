"""What a tracker has recorded: arrays in memory and in files that survive a kill."""

from pathlib import Path

import numpy as np
import pytest

from geoparam.analysis.tracker.history import PER_UNIT, GrowingArray, History

TYPE = np.dtype([("step", "i8"), ("name", "U5"), ("value", "f8")])
COUNTS = [3, 2]  # units of the layers "a" and "bc"


def rows(*steps: int) -> np.ndarray:
    return np.array([(step, f"n{step}", step / 2) for step in steps], TYPE)


def test_the_file_is_the_array_after_every_append(tmp_path: Path) -> None:
    array = GrowingArray(TYPE, tmp_path / "a.npy")
    for step in range(12):
        array.append(rows(step))
        np.testing.assert_array_equal(np.load(tmp_path / "a.npy"), rows(*range(step + 1)))
    np.testing.assert_array_equal(array.rows, rows(*range(12)))


@pytest.mark.parametrize("cut", [1, TYPE.itemsize - 1, TYPE.itemsize + 3])
def test_what_a_killed_append_left_is_not_read_and_is_written_over(
    tmp_path: Path, cut: int
) -> None:
    path = tmp_path / "a.npy"
    GrowingArray(TYPE, path).append(rows(1, 2))
    with path.open("ab") as file:  # the rows are there, their number is not yet
        file.write(rows(7, 8).tobytes()[:cut])
    np.testing.assert_array_equal(np.load(path), rows(1, 2))
    array = GrowingArray(TYPE, path, resume=True)
    array.append(rows(3))
    np.testing.assert_array_equal(np.load(path), rows(1, 2, 3))


def test_a_file_that_is_there_is_not_overwritten(tmp_path: Path) -> None:
    GrowingArray(TYPE, tmp_path / "a.npy").append(rows(1))
    with pytest.raises(FileExistsError, match="resume=True"):
        GrowingArray(TYPE, tmp_path / "a.npy")


def make_history(path: Path | None = None, counts: list[int] | None = None) -> History:
    history = History(["a", "bc"], ["x", "y"], counts, path)
    for step in (2, 4, 6):
        values = np.arange(6.0).reshape(3, 2) + 10 * step
        units = np.full((len(PER_UNIT), 5), float(step)) + np.arange(5) / 10
        history.append(step, values, units if counts else None)
    return history


def test_a_layer_has_one_value_for_each_record() -> None:
    history = make_history()
    assert list(history) == ["a", "bc"] and len(history) == 2
    np.testing.assert_array_equal(history["bc"]["step"], [2, 4, 6])
    np.testing.assert_array_equal(history["bc"]["y"], [23, 43, 63])
    np.testing.assert_array_equal(history.network["x"], [24, 44, 64])
    np.testing.assert_array_equal(history.table("y"), [[21, 41, 61], [23, 43, 63]])
    with pytest.raises(KeyError, match="no layer 'd'; there are: a, bc"):
        history["d"]


def test_later_records_are_forgotten_in_both_files(tmp_path: Path) -> None:
    history = make_history(tmp_path / "h.npy", COUNTS)
    history.forget_after(4)
    assert history["a"]["rotation"].tolist() == [[2.0, 2.1, 2.2], [4.0, 4.1, 4.2]]
    assert history["bc"]["active"].tolist() == [[2.3, 2.4], [4.3, 4.4]]
    np.testing.assert_array_equal(np.load(tmp_path / "h.units.npy")["step"], [2, 4])
    np.testing.assert_array_equal(np.load(tmp_path / "h.npy")["step"], [2] * 3 + [4] * 3)


def test_a_record_that_only_one_file_has_is_dropped(tmp_path: Path) -> None:
    made = make_history(tmp_path / "h.npy", COUNTS)
    made._units.append(made._units.rows[:1])
    resumed = History(["a", "bc"], ["x", "y"], COUNTS, tmp_path / "h.npy", resume=True)
    assert resumed.steps.tolist() == [2, 4, 6]
    assert len(resumed["a"]["rotation"]) == 3


def test_a_file_of_another_model_is_refused(tmp_path: Path) -> None:
    make_history(tmp_path / "h.npy")
    for layers in (["a"], ["a", "bc", "d"], ["bc", "a"]):  # all with columns of the same types
        with pytest.raises(ValueError, match=r"another model: its layers are a, bc, \(network\)"):
            History(layers, ["x", "y"], None, tmp_path / "h.npy", resume=True)
    assert len(np.load(tmp_path / "h.npy")) == 9


@pytest.mark.parametrize("content", [b"hello", b"PK", None])
def test_a_foreign_or_truncated_file_is_named(tmp_path: Path, content: bytes | None) -> None:
    path = tmp_path / "a.npy"
    GrowingArray(TYPE, path).append(rows(1, 2))
    path.write_bytes(content or path.read_bytes()[:-9])
    with pytest.raises(ValueError, match=r"a\.npy is damaged"):
        GrowingArray(TYPE, path, resume=True)


def test_a_file_without_units_is_not_continued_with_them(tmp_path: Path) -> None:
    make_history(tmp_path / "h.npy")
    with pytest.raises(ValueError, match="3 records and .* 0: it was not made with keep='full'"):
        History(["a", "bc"], ["x", "y"], COUNTS, tmp_path / "h.npy", resume=True)
    assert len(np.load(tmp_path / "h.npy")) == 9


def test_a_process_killed_before_the_header_leaves_a_file_to_begin_with(tmp_path: Path) -> None:
    (tmp_path / "a.npy").touch()
    GrowingArray(TYPE, tmp_path / "a.npy", resume=True).append(rows(1))
    assert np.load(tmp_path / "a.npy").tolist() == rows(1).tolist()
