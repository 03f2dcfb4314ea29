"""Where a tracker's scalars go: TensorBoard, W&B, or Lightning's loggers."""

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from torch import nn

Scalars = Mapping[str, float]  # by tag: quantity/layer
WRONG_LOG = (
    "log is an object with add_scalar (TensorBoard's SummaryWriter), log_metrics (a Lightning "
    "logger) or log (a W&B run); got {}. A file of the records is file='run.npy'."
)


class ScalarLog:
    """Sends the finite values of a record to what a user gave as `log`, as quantity/layer.

    All layers of a quantity have one prefix, so that TensorBoard draws them in one place.
    """

    def __init__(self, log: Any, quantities: Sequence[str]) -> None:
        self._send, self._quantities = _find_sender(log), tuple(quantities)

    def write(self, rows: np.ndarray) -> None:
        """Send one record, a row for each layer and the network's."""
        scalars = {}
        for quantity in self._quantities:
            for layer, value in zip(rows["layer"], rows[quantity].tolist(), strict=True):
                if math.isfinite(value):
                    scalars[f"{quantity}/{layer}"] = value
        self._send(scalars, int(rows["step"][0]))


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
