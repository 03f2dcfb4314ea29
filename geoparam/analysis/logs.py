"""Where a tracker's scalars go: TensorBoard, W&B, Lightning's loggers, or a CSV file."""

import csv
import logging
import math
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from torch import nn

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

    The columns are step, layer and the quantities; a value that is not known is empty.
    """

    def __init__(
        self, path: str | os.PathLike, quantities: Sequence[str], resume: bool = False
    ) -> None:
        self.path = Path(path)
        self._columns = ["step", "layer", *quantities]
        _refuse_existing(self.path, resume)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        rows = self._read() if self.path.exists() else []
        if not rows:
            self._append([self._columns])
        elif rows[0] != self._columns:
            raise ValueError(
                f"{self.path} has other columns: {', '.join(rows[0])}. Give another file."
            )

    def write(self, rows: np.ndarray) -> None:
        """Append one record; it is in the file when this returns."""
        lines = []
        for row in rows[self._columns].tolist():
            lines.append(["" if value != value else value for value in row])  # NaN is empty
        self._append(lines)

    def forget_after(self, step: int) -> None:
        """Drop the records of later steps, of a run that was killed and went on from `step`."""
        header, *rows = self._read()
        kept = [row for row in rows if int(row[0]) <= step]
        if len(kept) < len(rows):
            self.path.unlink()
            self._append([header, *kept])

    def _read(self) -> list[list[str]]:
        with self.path.open(newline="", encoding="utf-8") as file:
            return list(csv.reader(file))

    def _append(self, lines: Sequence[Sequence[object]]) -> None:
        with self.path.open("a", newline="", encoding="utf-8") as file:
            csv.writer(file).writerows(lines)


def open_log(log: Any, quantities: Sequence[str], resume: bool) -> ScalarLog | CSVLog:
    """Return where to write records to, for what a user gave as `log`."""
    if isinstance(log, str | os.PathLike):
        return CSVLog(log, quantities, resume)
    return ScalarLog(_find_sender(log), quantities)


def check_log(log: Any, resume: bool) -> None:
    """Refuse what is neither a writer nor the path of a CSV file that is new or goes on."""
    if isinstance(log, str | os.PathLike):
        if Path(log).suffix != ".csv":
            raise ValueError(WRONG_LOG.format(repr(os.fspath(log))))
        _refuse_existing(Path(log), resume)
    elif log is not None:
        _find_sender(log)


def _refuse_existing(path: Path, resume: bool) -> None:
    if path.exists() and not resume:
        raise FileExistsError(f"{path} exists. Go on with it by resume=True, or give another.")


def _find_sender(log: Any) -> Callable[[Scalars, int], None]:
    """Return a function of scalars and step that sends them to a writer."""
    is_other = isinstance(log, type | logging.Logger | nn.Module)  # their `log` is something else
    if not is_other and callable(getattr(log, "log_metrics", None)):
        return lambda scalars, step: log.log_metrics(dict(scalars), step=step)

    if not is_other and callable(getattr(log, "add_scalar", None)):

        def add_scalars(scalars: Scalars, step: int) -> None:
            for tag, value in scalars.items():
                log.add_scalar(tag, value, step)

        return add_scalars

    if not is_other and callable(getattr(log, "log", None)):
        return lambda scalars, step: log.log(dict(scalars), step=step)
    raise ValueError(WRONG_LOG.format(type(log).__name__))
