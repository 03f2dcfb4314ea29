"""What a tracker has recorded: arrays in memory and in files that survive a kill."""

import errno
import sys
from pathlib import Path

import numpy as np
import pytest

from geoparam.analysis.history import GrowingArray, History

TYPE = np.dtype([("step", "i8"), ("name", "U5"), ("value", "f8")])
LAYERS, COLUMNS, UNIT_COLUMNS = ["a", "bc"], ["x", "y"], ["rotation", "active"]
COUNTS = [3, 2]  # units of the layers


def make_rows(*steps: int) -> np.ndarray:
    return np.array([(step, f"n{step}", step / 2) for step in steps], TYPE)


def append(array: GrowingArray, *steps: int) -> None:
    array.write(len(array), make_rows(*steps))


def test_the_file_is_the_array_after_every_append(tmp_path: Path) -> None:
    array = GrowingArray(TYPE, tmp_path / "a.npy")
    for step in range(12):
        append(array, step)
        np.testing.assert_array_equal(np.load(tmp_path / "a.npy"), make_rows(*range(step + 1)))
    np.testing.assert_array_equal(array.rows, make_rows(*range(12)))


@pytest.mark.parametrize("cut", [1, TYPE.itemsize - 1, TYPE.itemsize + 3])
def test_what_a_killed_write_left_is_not_read_and_is_written_over(
    tmp_path: Path, cut: int
) -> None:
    path = tmp_path / "a.npy"
    append(GrowingArray(TYPE, path), 1, 2)
    with path.open("ab") as file:  # the rows are there, their number is not yet
        file.write(make_rows(7, 8).tobytes()[:cut])
    np.testing.assert_array_equal(np.load(path), make_rows(1, 2))
    append(GrowingArray(TYPE, path, resume=True), 3)
    np.testing.assert_array_equal(np.load(path), make_rows(1, 2, 3))


def test_a_file_that_is_there_is_not_overwritten(tmp_path: Path) -> None:
    append(GrowingArray(TYPE, tmp_path / "a.npy"), 1)
    with pytest.raises(FileExistsError, match="resume=True"):
        GrowingArray(TYPE, tmp_path / "a.npy")


def test_a_process_killed_before_the_header_leaves_a_file_to_begin_with(tmp_path: Path) -> None:
    (tmp_path / "a.npy").touch()
    append(GrowingArray(TYPE, tmp_path / "a.npy", resume=True), 1)
    np.testing.assert_array_equal(np.load(tmp_path / "a.npy"), make_rows(1))


@pytest.mark.parametrize("content", [b"hello", b"PK", None])
def test_a_foreign_or_truncated_file_is_named(tmp_path: Path, content: bytes | None) -> None:
    path = tmp_path / "a.npy"
    append(GrowingArray(TYPE, path), 1, 2)
    path.write_bytes(content or path.read_bytes()[:-9])
    with pytest.raises(ValueError, match=r"a\.npy is damaged"):
        GrowingArray(TYPE, path, resume=True)


def record(history: History, step: int) -> None:
    values = np.arange(6.0).reshape(3, 2) + 10 * step
    history.append(step, values, np.full((2, 5), float(step)) + np.arange(5) / 10)


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
    assert list(history) == ["a", "bc"] and len(history) == 2
    np.testing.assert_array_equal(history["bc"]["step"], [2, 4, 6])
    np.testing.assert_array_equal(history["bc"]["y"], [23, 43, 63])
    np.testing.assert_array_equal(history.network["x"], [24, 44, 64])
    np.testing.assert_array_equal(history.table("y"), [[21, 41, 61], [23, 43, 63]])
    with pytest.raises(KeyError, match="no layer 'd'; there are: a, bc"):
        history["d"]


def test_a_quantity_of_units_that_were_not_kept_is_an_error_that_says_how_to_keep_them() -> None:
    with pytest.raises(ValueError, match="no quantity 'rotation'; there are: step, x, y.*'full'"):
        make_records()["a"]["rotation"]
    assert make_records(counts=COUNTS)["a"]["rotation"].shape == (3, 3)


def test_later_records_are_forgotten_in_both_files(tmp_path: Path) -> None:
    history = make_records(tmp_path / "h.npy", COUNTS)
    history.forget_after(4)
    assert history["a"]["rotation"].tolist() == [[2.0, 2.1, 2.2], [4.0, 4.1, 4.2]]
    assert history["bc"]["active"].tolist() == [[2.3, 2.4], [4.3, 4.4]]
    np.testing.assert_array_equal(np.load(tmp_path / "h.units.npy")["step"], [2, 4])
    np.testing.assert_array_equal(np.load(tmp_path / "h.npy")["step"], [2] * 3 + [4] * 3)


@pytest.mark.parametrize("ending", [".npy", ".units.npy"])
def test_a_record_that_one_file_could_not_take_is_in_neither(
    tmp_path: Path, ending: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a full disk; the caller goes on."""
    history = make_records(tmp_path / "h.npy", COUNTS)
    write = GrowingArray.write

    def fail(array: GrowingArray, start: int, rows: np.ndarray) -> None:
        if array.path == tmp_path / f"h{ending}":
            raise OSError(errno.ENOSPC, "No space left on device")
        write(array, start, rows)

    with monkeypatch.context() as full_disk:
        full_disk.setattr(GrowingArray, "write", fail)
        with pytest.raises(OSError, match="No space"):
            record(history, 8)
    resumed = make_history(tmp_path / "h.npy", COUNTS, resume=True)
    assert resumed.steps.tolist() == history.steps.tolist() == [2, 4, 6]
    record(history, 10)
    assert history["a"]["rotation"][:, 0].tolist() == [2, 4, 6, 10]
    np.testing.assert_array_equal(np.load(tmp_path / "h.units.npy")["step"], [2, 4, 6, 10])


def test_files_with_records_of_different_steps_are_refused(tmp_path: Path) -> None:
    for name, steps in (("h", (2, 4)), ("other", (2, 5, 6))):
        history = make_history(tmp_path / f"{name}.npy", COUNTS)
        for step in steps:
            record(history, step)
    (tmp_path / "other.units.npy").rename(tmp_path / "h.units.npy")
    with pytest.raises(ValueError, match="2 records and .* 3, and they are not of the same steps"):
        make_history(tmp_path / "h.npy", COUNTS, resume=True)


def test_a_file_without_units_is_not_continued_with_them(tmp_path: Path) -> None:
    make_records(tmp_path / "h.npy")
    with pytest.raises(ValueError, match="3 records and .* 0, .* not of one run with keep='full'"):
        make_history(tmp_path / "h.npy", COUNTS, resume=True)
    assert len(np.load(tmp_path / "h.npy")) == 9


def test_a_file_of_another_model_is_refused(tmp_path: Path) -> None:
    make_records(tmp_path / "h.npy")
    for layers in (["a"], ["a", "bc", "d"], ["bc", "a"]):  # all with columns of the same types
        with pytest.raises(ValueError, match=r"another model: its layers are a, bc, \(network\)"):
            History(layers, COLUMNS, path=tmp_path / "h.npy", resume=True)
    assert len(np.load(tmp_path / "h.npy")) == 9


def test_a_history_says_what_it_has() -> None:
    text = repr(make_records(counts=COUNTS))
    assert text == (
        "History of 2 layers: 3 records, steps 2 to 6\n  layers: a, bc\n  quantities: x, y\n"
        "  of each unit: rotation, active"
    )
    assert repr(make_history()).startswith("History of 2 layers: 0 records\n")


def test_a_data_frame_has_a_row_for_each_record_and_layer() -> None:
    pytest.importorskip("pandas")
    history = make_records()
    table = history.to_pandas()
    assert list(table.columns) == ["step", "layer", "x", "y"]
    by_layer = table.pivot(index="layer", columns="step", values="y").loc[LAYERS]
    np.testing.assert_array_equal(by_layer, history.table("y"))


def test_without_pandas_a_sentence_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(ImportError, match="pip install pandas"):
        make_records().to_pandas()


def test_plots_show_the_records() -> None:
    pytest.importorskip("matplotlib")
    history = make_records()
    axes = history.plot("y")
    assert [line.get_label() for line in axes.lines] == LAYERS
    np.testing.assert_array_equal(axes.lines[1].get_xdata(), [2, 4, 6])
    np.testing.assert_array_equal(axes.lines[1].get_ydata(), [23, 43, 63])
    assert len(history.plot("y", layers=["bc"], axes=axes).lines) == 3
    np.testing.assert_array_equal(history.heatmap("x").images[0].get_array(), history.table("x"))


def test_dead_units_are_drawn_as_a_share() -> None:
    pytest.importorskip("matplotlib")
    history = History(["a"], ["units", "dead"])
    history.append(1, np.array([[8.0, 2.0], [8.0, 2.0]]))
    assert history.heatmap("dead").images[0].get_array().tolist() == [[0.25]]


@pytest.mark.parametrize("draw", ["table", "plot", "heatmap"])
def test_an_unknown_quantity_is_an_error_that_names_those_there_are(draw: str) -> None:
    pytest.importorskip("matplotlib")
    with pytest.raises(ValueError, match="no quantity 'z'; there are: .*x, y"):
        getattr(make_records(), draw)("z")
