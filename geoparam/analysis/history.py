"""What a tracker has recorded: numpy arrays in memory and, as they come, in files.

The summary has one row for each record and layer: `pandas.DataFrame(numpy.load(file))`. With
`keep="full"` a second file, with ".units" before its ending, has one row for each record, with an
array for each quantity over the units of all layers, one layer after another.

A file grows by writing rows after its end and then their number into its header, for which numpy
leaves room. A process that is killed in between leaves a whole file with the earlier rows. A
record counts once the summary's header says so: what a failed write left in the file of the units
is written over by the next record.
"""

import io
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from pandas import DataFrame  # type: ignore[import-untyped]

NETWORK = "(network)"


class GrowingArray:
    """Rows of one structured type, in memory and, if there is a path, in an .npy file."""

    def __init__(
        self, dtype: np.dtype, path: str | os.PathLike | None = None, resume: bool = False
    ) -> None:
        self.dtype = dtype
        self.path = None if path is None else Path(path)
        self._parts = [np.empty(0, dtype)]
        self._length = 0
        if self.path is None:
            return
        if self.path.is_dir():
            raise ValueError(f"{self.path} is a folder: give the path of an .npy file.")
        if self.path.exists() and not resume:
            raise FileExistsError(
                f"{self.path} exists. Go on with it by resume=True, or give another."
            )
        rows = self._parts[0]
        if self.path.exists() and self.path.stat().st_size:  # else killed before the header
            rows = _read(self.path, dtype)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.touch()
        self.write(0, rows)

    def __len__(self) -> int:
        return self._length

    @property
    def rows(self) -> np.ndarray:
        """All rows, (length,)."""
        if len(self._parts) > 1:
            self._parts = [np.concatenate(self._parts)]
        return self._parts[0]

    def write(self, start: int, rows: np.ndarray) -> None:
        """Let `rows` follow the first `start` rows; those that followed are forgotten."""
        if self.path is not None:
            self._write_file(self.path, start, rows)
        if start < len(self):
            self._parts = [self.rows[:start].copy()]
        self._parts.append(rows)
        self._length = start + len(rows)

    def _write_file(self, path: Path, start: int, rows: np.ndarray) -> None:
        """Write rows, and then, in the header, how many there are now."""
        header: dict = {"descr": np.lib.format.dtype_to_descr(self.dtype), "fortran_order": False}
        header["shape"] = (start + len(rows),)
        text = io.BytesIO()  # of the same length for any number of rows
        np.lib.format.write_array_header_2_0(text, header)
        with path.open("r+b") as file:
            file.seek(len(text.getvalue()) + start * self.dtype.itemsize)
            file.write(rows.tobytes())
            file.truncate()
            file.seek(0)  # flushes: rows are written before the header
            file.write(text.getvalue())


def _read(path: Path, dtype: np.dtype) -> np.ndarray:
    try:
        with path.open("rb") as file:
            rows = np.lib.format.read_array(file, allow_pickle=False)
    except (ValueError, EOFError, MemoryError) as error:
        raise ValueError(
            f"{path} is damaged, or not a tracker's ({error!s:.200}). Give another file."
        ) from error
    if rows.dtype != dtype:
        raise ValueError(
            f"{path} is not a tracker's, or of another model or version: its columns are others. "
            "Give another file."
        )
    return rows


class LayerHistory(dict[str, np.ndarray]):
    """The records of one layer, by quantity."""

    def __missing__(self, quantity: str) -> np.ndarray:
        raise ValueError(
            f"no quantity {quantity!r}; there are: {', '.join(self)}. Quantities of each unit, as "
            "rotation, are kept by BoundaryTracker(keep='full')."
        )


class History(Mapping[str, LayerHistory]):
    """The records of a tracker: `history[layer][quantity]` has one value for each record.

    Every layer has the columns of the summary and, where `counts` says how many units of it are
    kept, those of its units, (records, units). `network` has those of all layers together.
    """

    def __init__(
        self,
        layers: Sequence[str],
        columns: Sequence[str],
        unit_columns: Sequence[str] = (),
        counts: Sequence[int] | None = None,
        path: str | os.PathLike | None = None,
        resume: bool = False,
    ) -> None:
        self.layers = tuple(layers)
        self.quantities = tuple(columns)
        self._rows_of = {name: index for index, name in enumerate((*layers, NETWORK))}
        width = max(map(len, self._rows_of))
        numbers = [(name, "f8") for name in columns]
        dtype = np.dtype([("step", "i8"), ("layer", f"U{width}"), *numbers])

        self._unit_columns = tuple(unit_columns)
        ends = np.cumsum([0, *(counts or [])]).tolist()
        slices = [slice(*span) for span in pairwise(ends)]  # of units in the arrays of all
        self._slices = dict(zip(layers, slices, strict=counts is not None))
        arrays = [(name, "f8", (ends[-1],)) for name in unit_columns]
        dtype_of_units = np.dtype([("step", "i8"), *arrays])

        beside = None if path is None else Path(path).with_suffix(".units.npy")
        self._units: GrowingArray | None = None
        with _removing_new(path, beside):
            self._summary = GrowingArray(dtype, path, resume)
            self._check_layers()
            if counts is not None:
                self._units = GrowingArray(dtype_of_units, beside, resume)
                self._match_units(self._units)

    def append(
        self, step: int, values: np.ndarray, units: Sequence[np.ndarray] = ()
    ) -> np.ndarray:
        """Add a record, to both files or to none; return its rows of the summary.

        `values` are (layers + 1, columns), the network's last; `units`, which count only if they
        are kept, have for each of the units' columns the values of all layers' units.
        """
        rows = np.zeros(len(self._rows_of), self._summary.dtype)
        rows["step"] = step
        rows["layer"] = list(self._rows_of)
        for column, name in enumerate(self.quantities):
            rows[name] = values[:, column]
        records = len(self._summary) // len(self._rows_of)
        if self._units is not None:
            row = np.zeros(1, self._units.dtype)
            row["step"] = step
            for name, values_of_units in zip(self._unit_columns, units, strict=True):
                row[name] = values_of_units
            self._units.write(records, row)  # does not count before the summary's rows do
        self._summary.write(len(self._summary), rows)
        return rows

    def forget_after(self, step: int) -> None:
        """Drop the records of later steps, of a run that was killed and went on from `step`."""
        kept = int((self.steps <= step).sum())
        self._summary.write(kept * len(self._rows_of), self.rows[:0])
        if self._units is not None:
            self._units.write(kept, self._units.rows[:0])

    @property
    def steps(self) -> np.ndarray:
        """The steps at which there is a record."""
        return self._summary.rows["step"][:: len(self._rows_of)]

    @property
    def rows(self) -> np.ndarray:
        """The summary as one table, a row for each record and layer: `pandas.DataFrame(rows)`."""
        return self._summary.rows

    def to_pandas(self) -> "DataFrame":
        """Return the summary as a DataFrame, a row for each record and layer."""
        try:
            import pandas
        except ImportError as error:
            raise ImportError(
                "to_pandas() needs pandas: pip install pandas. history.rows is the same table "
                "as a numpy array."
            ) from error
        return pandas.DataFrame(self.rows)

    def plot(
        self, quantity: str, layers: Sequence[str] | None = None, axes: "Axes | None" = None
    ) -> "Axes":
        """Draw a quantity over the steps, a line for each layer; return matplotlib's axes.

        Args:
            quantity: A column of the summary, such as "rotation_rms".
            layers: Names of the layers to draw; all by default.
            axes: Where to draw; None makes a figure, `axes.figure`.
        """
        from geoparam import plots

        self._check_quantity(quantity)
        layers = [layers] if isinstance(layers, str) else layers
        names = list(self.layers if layers is None else layers)
        values = np.array([self[name][quantity] for name in names])
        return plots.layer_curves(values, layers=names, label=quantity, steps=self.steps, ax=axes)

    def heatmap(self, quantity: str, axes: "Axes | None" = None) -> "Axes":
        """Draw a quantity as colours, a cell for each layer and record; return matplotlib's axes.

        Dead units are drawn as a share of the layer's, rotations on a logarithmic scale.
        """
        from geoparam import plots

        values = self.table(quantity)
        if not values.size:
            raise ValueError("there are no records to draw yet: take a step first.")
        options: dict[str, Any] = {"label": quantity, "log": quantity.startswith("rotation_")}
        if quantity == "dead" and "units" in self.quantities:
            values = values / self.table("units")
            most = max(0.01, np.nanmax(values, initial=0))  # 1 of 1,000 must not look like all
            options = {"label": "share of dead units", "limits": (0, most)}
        return plots.layer_heatmap(
            values, layers=self.layers, steps=self.steps, ax=axes, **options
        )

    def table(self, quantity: str) -> np.ndarray:
        """Return one quantity of the summary for all layers, (layers, records)."""
        self._check_quantity(quantity)
        records = self._summary.rows[quantity].reshape(-1, len(self._rows_of))
        return records[:, :-1].T.copy()  # the network's is the last

    @property
    def network(self) -> LayerHistory:
        """The quantities of all layers together; NaN where there is no such thing."""
        return self[NETWORK]

    def __getitem__(self, layer: str) -> LayerHistory:
        if layer not in self._rows_of:
            raise KeyError(f"no layer {layer!r}; there are: {', '.join(self.layers)}")
        rows = self._summary.rows[self._rows_of[layer] :: len(self._rows_of)]
        records = LayerHistory()
        for name in ("step", *self.quantities):
            records[name] = rows[name].copy()
        if self._units is not None and layer in self._slices:
            for name in self._unit_columns:
                records[name] = self._units.rows[name][:, self._slices[layer]].copy()
        return records

    def __iter__(self) -> Iterator[str]:
        return iter(self.layers)

    def __len__(self) -> int:
        return len(self.layers)

    def __repr__(self) -> str:
        steps = self.steps
        span = f", steps {steps[0]} to {steps[-1]}" if len(steps) else ""
        lines = [
            f"History of {len(self)} layers: {len(steps)} records{span}",
            f"layers: {', '.join(self.layers)}",
            f"quantities: {', '.join(self.quantities)}",
        ]
        if self._units is not None:
            lines.append(f"of each unit: {', '.join(self._unit_columns)}")
        return "\n  ".join(_shorten(line) for line in lines)

    def _check_quantity(self, quantity: str) -> None:
        if quantity not in self.quantities:
            raise ValueError(f"no quantity {quantity!r}; there are: {', '.join(self.quantities)}.")

    def _check_layers(self) -> None:
        """Refuse a file with the layers of another model; records may have the same length."""
        layers = self._summary.rows["layer"]
        expected = np.resize(list(self._rows_of), len(layers))
        if not np.array_equal(layers, expected):
            raise ValueError(
                f"{self._summary.path} is of another model: its layers are "
                f"{', '.join(dict.fromkeys(layers))}. Give another file."
            )

    def _match_units(self, units: GrowingArray) -> None:
        """Drop a record that only the units' file has; refuse records of other steps."""
        records = len(self.steps)
        if not np.array_equal(units.rows["step"][:records], self.steps):
            raise ValueError(
                f"{self._summary.path} has {records} records and {units.path} {len(units)}, and "
                "they are not of the same steps: the files are not of one run with keep='full'. "
                "Give another file."
            )
        units.write(records, units.rows[:0])


@contextmanager
def _removing_new(*paths: str | os.PathLike | None) -> Iterator[None]:
    """After an error, remove the files that were not there before."""
    named = [Path(path) for path in paths if path is not None]
    new = [path for path in named if not path.exists()]
    try:
        yield
    except BaseException:
        for path in new:
            path.unlink(missing_ok=True)
        raise


def _shorten(line: str, width: int = 400) -> str:
    """Return a line of at most `width` characters, cut at a comma."""
    if len(line) <= width:
        return line
    return line[:width].rpartition(",")[0] + ", ..."
