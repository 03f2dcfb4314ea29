"""What a tracker has recorded: arrays in memory and in files that survive a kill."""

import errno
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from numpy.testing import assert_array_equal

from geoparam.analysis.history import GrowingArray, History

TYPE = np.dtype([("step", "i8"), ("name", "U5"), ("value", "f8")])
LAYERS = ["a", "bc"]
COLUMNS = ["x", "y"]
UNIT_COLUMNS = ["rotation", "active"]
COUNTS = [3, 2]  # units of the layers


def make_rows(*steps: int) -> np.ndarray:
    return np.array([(step, f"n{step}", step / 2) for step in steps], TYPE)


def append(array: GrowingArray, *steps: int) -> None:
    array.write(len(array), make_rows(*steps))


# One array.


def test_the_file_is_the_array_after_every_append(tmp_path: Path) -> None:
    path = tmp_path / "a.npy"
    array = GrowingArray(TYPE, path)
    for step in range(12):
        append(array, step)

        expected = make_rows(*range(step + 1))
        assert_array_equal(np.load(path), expected)
        assert_array_equal(array.rows, expected)


@pytest.fixture
def path_of_killed(tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    """Return a file of two rows, and the bytes of a write that was killed.

    The header does not count the new rows yet.
    """
    path = tmp_path / "a.npy"
    append(GrowingArray(TYPE, path), 1, 2)
    bytes_written = request.param
    with path.open("ab") as file:
        file.write(make_rows(7, 8).tobytes()[:bytes_written])
    return path


after_bytes = pytest.mark.parametrize(
    "path_of_killed", [1, TYPE.itemsize - 1, TYPE.itemsize + 3], indirect=True
)


@after_bytes
def test_rows_of_a_killed_write_are_not_read(path_of_killed: Path) -> None:
    assert_array_equal(np.load(path_of_killed), make_rows(1, 2))


@after_bytes
def test_rows_of_a_killed_write_are_written_over(path_of_killed: Path) -> None:
    resumed = GrowingArray(TYPE, path_of_killed, resume=True)

    append(resumed, 3)

    assert_array_equal(np.load(path_of_killed), make_rows(1, 2, 3))


def test_an_existing_file_is_not_overwritten(tmp_path: Path) -> None:
    path = tmp_path / "a.npy"
    append(GrowingArray(TYPE, path), 1)

    with pytest.raises(FileExistsError, match="resume=True"):
        GrowingArray(TYPE, path)


def test_an_empty_file_is_begun_where_a_process_was_killed_before_the_header(
    tmp_path: Path,
) -> None:
    path = tmp_path / "a.npy"
    path.touch()

    append(GrowingArray(TYPE, path, resume=True), 1)

    assert_array_equal(np.load(path), make_rows(1))


@pytest.mark.parametrize("content", [b"hello", b"PK"])
def test_a_foreign_file_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "a.npy"
    path.write_bytes(content)

    with pytest.raises(ValueError, match=r"a\.npy is damaged"):
        GrowingArray(TYPE, path, resume=True)


def test_a_truncated_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.npy"
    append(GrowingArray(TYPE, path), 1, 2)
    path.write_bytes(path.read_bytes()[:-9])

    with pytest.raises(ValueError, match=r"a\.npy is damaged"):
        GrowingArray(TYPE, path, resume=True)


# The history of a tracker.


def record(history: History, step: int) -> None:
    """Add a record whose values tell its step, the layer (or unit) and the column."""
    summary = np.arange(6.0).reshape(3, 2) + 10 * step
    units = step + np.arange(5) / 10
    history.append(step, summary, [units, units])


def make_history(
    path: Path | None = None, counts: list[int] | None = None, resume: bool = False
) -> History:
    return History(LAYERS, COLUMNS, UNIT_COLUMNS, counts, path, resume)


def make_records(path: Path | None = None, counts: list[int] | None = None) -> History:
    history = make_history(path, counts)
    for step in (2, 4, 6):
        record(history, step)
    return history


def test_a_layer_has_one_value_for_each_record() -> None:
    history = make_records()

    assert list(history) == ["a", "bc"]
    assert len(history) == 2
    assert_array_equal(history["bc"]["step"], [2, 4, 6])
    assert_array_equal(history["bc"]["y"], [23, 43, 63])


def test_the_network_has_the_last_values_of_each_record() -> None:
    history = make_records()

    assert_array_equal(history.network["x"], [24, 44, 64])


def test_a_table_has_a_row_for_each_layer() -> None:
    history = make_records()

    assert_array_equal(history.table("y"), [[21, 41, 61], [23, 43, 63]])


def test_an_unknown_layer_is_an_error_that_names_those_there_are() -> None:
    history = make_records()

    with pytest.raises(KeyError, match="no layer 'd'; there are: a, bc"):
        history["d"]


def test_quantities_of_units_are_kept_where_they_are_counted() -> None:
    history = make_records(counts=COUNTS)

    assert history["a"]["rotation"].shape == (3, 3)


def test_a_quantity_of_units_that_were_not_kept_is_an_error_that_says_how_to_keep_them() -> None:
    history = make_records()

    with pytest.raises(ValueError, match="no quantity 'rotation'; there are: step, x, y.*'full'"):
        history["a"]["rotation"]


def test_later_records_are_forgotten_in_memory() -> None:
    history = make_records(counts=COUNTS)

    history.forget_after(4)

    assert history.steps.tolist() == [2, 4]
    assert history["a"]["rotation"].tolist() == [[2.0, 2.1, 2.2], [4.0, 4.1, 4.2]]
    assert history["bc"]["active"].tolist() == [[2.3, 2.4], [4.3, 4.4]]


def test_later_records_are_forgotten_in_both_files(tmp_path: Path) -> None:
    history = make_records(tmp_path / "h.npy", COUNTS)

    history.forget_after(4)

    units = np.load(tmp_path / "h.units.npy")
    summary = np.load(tmp_path / "h.npy")
    assert_array_equal(units["step"], [2, 4])
    assert_array_equal(summary["step"], [2, 2, 2, 4, 4, 4])


@pytest.fixture(params=[".npy", ".units.npy"])
def history_after_full_disk(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> History:
    """Return a history of three records; one of its files did not take the fourth."""
    history = make_records(tmp_path / "h.npy", COUNTS)
    full_file = tmp_path / f"h{request.param}"
    write = GrowingArray.write

    def write_or_fail(array: GrowingArray, start: int, rows: np.ndarray) -> None:
        if array.path == full_file:
            raise OSError(errno.ENOSPC, "No space left on device")
        write(array, start, rows)

    with monkeypatch.context() as full_disk:
        full_disk.setattr(GrowingArray, "write", write_or_fail)
        with pytest.raises(OSError, match="No space"):
            record(history, 8)
    return history


def test_a_record_that_one_file_could_not_take_is_in_neither(
    history_after_full_disk: History, tmp_path: Path
) -> None:
    resumed = make_history(tmp_path / "h.npy", COUNTS, resume=True)

    assert history_after_full_disk.steps.tolist() == [2, 4, 6]
    assert resumed.steps.tolist() == [2, 4, 6]


def test_a_history_goes_on_after_a_record_that_one_file_could_not_take(
    history_after_full_disk: History, tmp_path: Path
) -> None:
    record(history_after_full_disk, 10)

    rotations = history_after_full_disk["a"]["rotation"]
    assert rotations[:, 0].tolist() == [2, 4, 6, 10]
    units = np.load(tmp_path / "h.units.npy")
    assert_array_equal(units["step"], [2, 4, 6, 10])


def write_files(path: Path, steps: list[int]) -> None:
    """Write a summary and a file of units with records of these steps."""
    history = make_history(path, COUNTS)
    for step in steps:
        record(history, step)


def test_files_with_records_of_different_steps_are_refused(tmp_path: Path) -> None:
    write_files(tmp_path / "h.npy", [2, 4])
    write_files(tmp_path / "other.npy", [2, 5, 6])
    (tmp_path / "other.units.npy").rename(tmp_path / "h.units.npy")

    with pytest.raises(ValueError, match="2 records and .* 3, and they are not of the same steps"):
        make_history(tmp_path / "h.npy", COUNTS, resume=True)


def test_a_file_without_units_is_not_continued_with_them(tmp_path: Path) -> None:
    path = tmp_path / "h.npy"
    make_records(path)
    before = path.read_bytes()

    with pytest.raises(ValueError, match="3 records and .* 0, .* not of one run with keep='full'"):
        make_history(path, COUNTS, resume=True)
    assert path.read_bytes() == before


@pytest.mark.parametrize("layers", [["a"], ["a", "bc", "d"], ["bc", "a"]])
def test_a_file_of_another_model_is_refused(tmp_path: Path, layers: list[str]) -> None:
    """Its columns have the same types."""
    path = tmp_path / "h.npy"
    make_records(path)
    before = path.read_bytes()

    with pytest.raises(ValueError, match=r"another model: its layers are a, bc, \(network\)"):
        History(layers, COLUMNS, path=path, resume=True)
    assert path.read_bytes() == before


# How it is shown.


def test_a_history_says_what_it_has() -> None:
    lines = repr(make_records(counts=COUNTS)).splitlines()

    assert lines == [
        "History of 2 layers: 3 records, steps 2 to 6",
        "  layers: a, bc",
        "  quantities: x, y",
        "  of each unit: rotation, active",
    ]


def test_an_empty_history_says_that_it_has_no_records() -> None:
    assert repr(make_history()).startswith("History of 2 layers: 0 records\n")


def test_a_data_frame_has_a_row_for_each_record_and_layer() -> None:
    pytest.importorskip("pandas")
    history = make_records()

    frame = history.to_pandas()

    assert list(frame.columns) == ["step", "layer", "x", "y"]
    by_layer = frame.pivot(index="layer", columns="step", values="y").loc[LAYERS]
    assert_array_equal(by_layer, history.table("y"))


def test_without_pandas_the_error_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pandas", None)
    history = make_records()

    with pytest.raises(ImportError, match="pip install pandas"):
        history.to_pandas()


def test_a_plot_has_a_line_for_each_layer() -> None:
    pytest.importorskip("matplotlib")
    history = make_records()

    lines = history.plot("y").lines

    assert [line.get_label() for line in lines] == LAYERS
    assert_array_equal(lines[1].get_xdata(), [2, 4, 6])
    assert_array_equal(lines[1].get_ydata(), [23, 43, 63])


def test_a_plot_may_be_added_to_axes() -> None:
    pytest.importorskip("matplotlib")
    history = make_records()
    axes = history.plot("y")

    history.plot("y", layers=["bc"], axes=axes)

    assert len(axes.lines) == 3


def test_a_heatmap_shows_the_table() -> None:
    pytest.importorskip("matplotlib")
    history = make_records()

    (image,) = history.heatmap("x").images

    assert_array_equal(image.get_array(), history.table("x"))


def test_dead_units_are_drawn_as_a_share() -> None:
    pytest.importorskip("matplotlib")
    history = History(["a"], ["units", "dead"])
    history.append(1, np.array([[8.0, 2.0], [8.0, 2.0]]))

    (image,) = history.heatmap("dead").images

    assert image.get_array().tolist() == [[0.25]]


@pytest.mark.parametrize("show", [History.table, History.plot, History.heatmap])
def test_an_unknown_quantity_is_an_error_that_names_those_there_are(show: Callable) -> None:
    pytest.importorskip("matplotlib")

    with pytest.raises(ValueError, match="no quantity 'z'; there are: .*x, y"):
        show(make_records(), "z")
