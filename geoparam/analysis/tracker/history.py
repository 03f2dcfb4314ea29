"""What a tracker has recorded: numpy arrays in memory and, as they come, in files.

The summary has one row for each record and layer: `pandas.DataFrame(numpy.load(file))`. With
`keep="full"` a second file, with ".units" before its ending, has one row for each record, with an
array for each quantity over the units of all layers, one layer after another.

A file grows by writing rows after its end and then their number into its header, for which numpy
leaves room. A process that is killed in between leaves a whole file with the earlier rows.
"""

import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np

NETWORK = "(network)"
PER_UNIT = ("rotation", "displacement", "scale", "distance", "active")


class GrowingArray:
    """Rows of one structured type, in memory and, if there is a path, in an .npy file."""

    def __init__(
        self, dtype: np.dtype, path: str | os.PathLike | None = None, resume: bool = False
    ) -> None:
        self.dtype = dtype
        self.path = None if path is None else Path(path)
        self._parts = [np.empty(0, dtype)]
        self._length = self._header_size = 0
        if self.path is None:
            return
        if self.path.exists() and not resume:
            raise FileExistsError(
                f"{self.path} exists. Go on with it by resume=True, or give another."
            )
        if self.path.exists() and self.path.stat().st_size:  # else killed before the header
            self._parts = [_read(self.path)]
            if self.rows.dtype != dtype:
                raise ValueError(
                    f"{self.path} is not a tracker's, or of another model or version: its columns "
                    "are others. Give another file."
                )
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.touch()
        self.truncate(len(self.rows))

    def __len__(self) -> int:
        return self._length

    @property
    def rows(self) -> np.ndarray:
        """All rows, (length,)."""
        if len(self._parts) > 1:
            self._parts = [np.concatenate(self._parts)]
        return self._parts[0]

    def append(self, rows: np.ndarray) -> None:
        """Add rows at the end, in the file first."""
        self._write(rows)
        self._parts.append(rows)
        self._length += len(rows)

    def truncate(self, length: int) -> None:
        """Forget the rows from `length` on."""
        self._parts = [self.rows[:length].copy()]
        self._length = len(self._parts[0])
        self._write(self._parts[0][:0])

    def _write(self, rows: np.ndarray) -> None:
        """Write rows after those that count, and then, in the header, how many count now."""
        if self.path is None:
            return
        header: dict = {"descr": np.lib.format.dtype_to_descr(self.dtype), "fortran_order": False}
        with self.path.open("r+b") as file:
            if len(rows):
                file.seek(self._header_size + len(self) * self.dtype.itemsize)
                file.write(rows.tobytes())
                file.truncate()
                file.seek(0)  # flushes: rows are written before the header
            header["shape"] = (len(self) + len(rows),)
            np.lib.format.write_array_header_2_0(file, header)
            self._header_size = file.tell()


def _read(path: Path) -> np.ndarray:
    try:
        with path.open("rb") as file:
            return np.lib.format.read_array(file, allow_pickle=False)
    except (ValueError, EOFError, MemoryError) as error:
        raise ValueError(
            f"{path} is damaged, or not a tracker's ({error!s:.200}). Give another file."
        ) from error


class History(Mapping[str, Mapping[str, np.ndarray]]):
    """The records of a tracker: `history[layer][quantity]` has one value for each record.

    Every layer has the quantities of the summary and, where `counts` says how many units of it
    are kept, those of its units, (records, units). `network` has those of all layers together, and
    NaN for lengths of inputs and products of cosines.
    """

    def __init__(
        self,
        layers: Sequence[str],
        quantities: Sequence[str],
        counts: Sequence[int] | None = None,
        path: str | os.PathLike | None = None,
        resume: bool = False,
    ) -> None:
        self.layers = tuple(layers)
        self.quantities = tuple(quantities)
        width = max(map(len, (*layers, NETWORK)))
        numbers = [(quantity, "f8") for quantity in quantities]
        self._index = {name: index for index, name in enumerate((*layers, NETWORK))}
        dtype = np.dtype([("step", "i8"), ("layer", f"U{width}"), *numbers])
        self._summary = GrowingArray(dtype, path, resume)
        self._check_layers()
        self._units = None
        self._columns: dict[str, slice] = {}  # of each layer's units in the arrays of all
        if counts is not None:
            ends = np.cumsum([0, *counts]).tolist()
            self._columns = dict(zip(layers, map(slice, ends, ends[1:]), strict=True))
            own = np.dtype([("step", "i8"), *((name, "f8", (ends[-1],)) for name in PER_UNIT)])
            beside = None if path is None else Path(path).with_suffix(".units.npy")
            self._units = GrowingArray(own, beside, resume)
            self._drop_unfinished()

    def append(self, step: int, values: np.ndarray, units: np.ndarray | None = None) -> None:
        """Add a record: `values` (layers + 1, quantities), the network's last.

        `units` has one row for each quantity of PER_UNIT, over the units of all layers.
        """
        rows = np.zeros(len(self._index), self._summary.dtype)
        rows["step"] = step
        rows["layer"] = list(self._index)
        for column, quantity in enumerate(self.quantities):
            rows[quantity] = values[:, column]
        if self._units is not None and units is not None:
            row = np.zeros(1, self._units.dtype)
            row["step"] = step
            for quantity, own in zip(PER_UNIT, units, strict=True):
                row[quantity] = own
            self._units.append(row)
        self._summary.append(rows)

    def forget_after(self, step: int) -> None:
        """Drop the records of later steps, of a run that was killed and went on from `step`."""
        kept = int((self.steps <= step).sum())
        self._summary.truncate(kept * len(self._index))
        if self._units is not None:
            self._units.truncate(kept)

    @property
    def steps(self) -> np.ndarray:
        """The steps at which there is a record."""
        return self._summary.rows["step"][:: len(self._index)]

    @property
    def rows(self) -> np.ndarray:
        """The summary as one table, a row for each record and layer: `pandas.DataFrame(rows)`."""
        return self._summary.rows

    def table(self, quantity: str) -> np.ndarray:
        """Return one quantity of the summary for all layers, (layers, records)."""
        return self._summary.rows[quantity].reshape(-1, len(self._index))[:, :-1].T.copy()

    @property
    def network(self) -> Mapping[str, np.ndarray]:
        """The quantities of all layers together; NaN where there is no such thing."""
        return self[NETWORK]

    def __getitem__(self, layer: str) -> Mapping[str, np.ndarray]:
        if layer not in self._index:
            raise KeyError(f"no layer {layer!r}; there are: {', '.join(self.layers)}")
        rows = self._summary.rows[self._index[layer] :: len(self._index)]
        found = {name: rows[name] for name in ("step", *self.quantities)}
        if self._units is not None and layer in self._columns:
            units, own = self._units.rows, self._columns[layer]
            found |= {name: units[name][:, own] for name in PER_UNIT}
        return {name: column.copy() for name, column in found.items()}

    def __iter__(self) -> Iterator[str]:
        return iter(self.layers)

    def __len__(self) -> int:
        return len(self.layers)

    def _check_layers(self) -> None:
        """Refuse a file with the layers of another model; records may have the same length."""
        found = self._summary.rows["layer"]
        if not np.array_equal(found, np.resize(list(self._index), len(found))):
            raise ValueError(
                f"{self._summary.path} is of another model: its layers are "
                f"{', '.join(dict.fromkeys(found))}. Give another file."
            )

    def _drop_unfinished(self) -> None:
        """Drop the units of a record that was killed before its summary was written."""
        assert self._units is not None
        records = len(self._summary) // len(self._index)
        if len(self._units) < records:
            raise ValueError(
                f"{self._summary.path} has {records} records and {self._units.path} "
                f"{len(self._units)}: it was not made with keep='full'. Give another file."
            )
        self._units.truncate(records)
