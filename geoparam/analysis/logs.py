"""Where a tracker's scalars go: TensorBoard, W&B, Lightning's loggers, or a CSV file."""

import csv
import io
import logging
import math
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from torch import nn

from geoparam.storage import replacing

Scalars = Mapping[str, float]  # by tag: quantity/layer
WRONG_LOG = (
    "log is an object with add_scalar (TensorBoard's SummaryWriter), log_metrics (a Lightning "
    "logger) or log (a W&B run), or the path of a .csv file; got {}."
)


class ScalarLog:
    """Sends the finite values of a record to a writer, under the tags quantity/layer.

    All layers of a quantity have one prefix, so that TensorBoard draws them in one place.
    """

    def __init__(self, send: Callable[[Scalars, int], None], quantities: Sequence[str]) -> None:
        self._send, self._quantities = send, tuple(quantities)

    def write(self, rows: np.ndarray) -> None:
        """Send one record, a row for each layer and the network's."""
        scalars = {}
        for quantity in self._quantities:
            for layer, value in zip(rows["layer"], rows[quantity].tolist(), strict=True):
                if math.isfinite(value):
                    scalars[f"{quantity}/{layer}"] = value
        self._send(scalars, int(rows["step"][0]))

    def forget_after(self, step: int) -> None:
        """Do nothing: what a writer has sent is not taken back."""


class CSVLog:
    """Appends each record to a CSV file, a row for each layer and the network's.

    The columns are step, layer and the quantities; a value that is not known is empty. What is
    left of a write that was broken off is written over by the next one.
    """

    def __init__(
        self, path: str | os.PathLike, quantities: Sequence[str], resume: bool = False
    ) -> None:
        self.path = Path(path)
        if self.path.suffix != ".csv":
            raise ValueError(WRONG_LOG.format(repr(os.fspath(path))))
        if self.path.exists() and not resume:
            raise FileExistsError(
                f"{self.path} exists. Go on with it by resume=True, or give another."
            )
        self._columns = ["step", "layer", *quantities]
        lines = self._read() if self.path.exists() else []
        header, *rows = lines or [self._columns]
        if header != self._columns:
            raise ValueError(
                f"{self.path} has other columns: {', '.join(header)}. Give another file."
            )
        self._replace(rows)

    def write(self, rows: np.ndarray) -> None:
        """Append one record; it is in the file when this returns."""
        lines = []
        for row in rows[self._columns].tolist():
            lines.append(["" if value != value else value for value in row])  # NaN is empty
        text = _format(lines)
        with self.path.open("r+b") as file:
            file.truncate(self._size)
            file.seek(self._size)
            file.write(text)
        self._size += len(text)

    def forget_after(self, step: int) -> None:
        """Drop the records of later steps, of a run that was killed and went on from `step`."""
        _, *rows = self._read()
        self._replace([row for row in rows if int(row[0]) <= step])

    def _read(self) -> list[list[str]]:
        """Return the whole lines of the file."""
        lines = self.path.read_bytes().decode(errors="replace").splitlines(keepends=True)
        if len(lines) > 1 and not lines[-1].endswith("\n"):  # from a process that was killed
            lines.pop()
        return [row for row in csv.reader(lines) if row]

    def _replace(self, rows: Sequence[Sequence[str]]) -> None:
        """Write the file anew, with these rows below the names of the columns."""
        text = _format([self._columns, *rows])
        with replacing(self.path) as unfinished:
            unfinished.write_bytes(text)
        self._size = len(text)  # in bytes, of what counts


def open_log(log: Any, quantities: Sequence[str], resume: bool) -> ScalarLog | CSVLog:
    """Return where to write records to, for what a user gave as `log`."""
    if isinstance(log, str | os.PathLike):
        return CSVLog(log, quantities, resume)
    return ScalarLog(_find_sender(log), quantities)


def _format(lines: Sequence[Sequence[object]]) -> bytes:
    text = io.StringIO(newline="")
    csv.writer(text).writerows(lines)
    return text.getvalue().encode()


def _find_sender(log: Any) -> Callable[[Scalars, int], None]:
    """Return a function of scalars and step that sends them to a writer."""
    is_other = isinstance(log, type | logging.Logger | nn.Module)  # their `log` is something else
    names = ("log_metrics", "add_scalar", "log")
    name = next((name for name in names if callable(getattr(log, name, None))), None)
    if is_other or name is None:
        raise ValueError(WRONG_LOG.format(type(log).__name__))
    method = getattr(log, name)
    if name != "add_scalar":
        return lambda scalars, step: method(dict(scalars), step=step)

    def add_scalars(scalars: Scalars, step: int) -> None:
        for tag, value in scalars.items():
            method(tag, value, step)

    return add_scalars
