"""Follow the boundaries of a model's units through training: `BoundaryTracker`.

A tracker only reads: it draws no random numbers and changes no buffer and no flag, so a run gives
the same numbers with and without it. Everything is computed on the model's device; a record is one
small asynchronous copy to the host, which only reading the history waits for.
"""

import math
import os
import warnings
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from geoparam.analysis.boundary import Statistics, uses_batch_statistics
from geoparam.analysis.reading.layer_sites import Layers, find_sites
from geoparam.analysis.tracker.history import NETWORK, History
from geoparam.analysis.tracker.measurement import QUANTITIES, Measurement
from geoparam.conversion.plan import Inputs
from geoparam.inspection import unwrap
from geoparam.trace import is_tracing


class _Pending(NamedTuple):
    """A record on its way to the host."""

    step: int
    values: Tensor
    units: Tensor | None
    arrived: torch.cuda.Event | None  # None: it is there


def _check_options(keep: str, every: int, units: int | None, is_lost: bool) -> None:
    if keep not in ("summary", "full"):
        raise ValueError(f"keep is 'summary' or 'full'; got {keep!r}.")
    if any(count is not None and (count < 1 or count % 1) for count in (every, units)):
        raise ValueError(f"every and units are whole, from 1 on; got {every} and {units}.")
    if is_lost:
        warnings.warn(
            "resume=True without file=: earlier records are not there, and the history begins "
            "here. Give the file of the run before.",
            stacklevel=3,
        )


class _FirstBatch:
    """The hook that shows a tracker the first batch; in a copy of the model it does nothing."""

    def __init__(self, see: Callable[[tuple, dict], None] | None = None) -> None:
        self._see = see

    def __call__(self, _: nn.Module, args: tuple, kwargs: dict) -> None:
        hidden = torch.compiler.is_compiling() or is_tracing()
        if self._see is not None and not hidden:
            self._see(args, kwargs)

    def __reduce__(self) -> tuple:
        return _FirstBatch, ()


class BoundaryTracker:
    r"""Records how the characteristic boundaries of a model's units move while it trains.

    Call `step()` after each optimizer step. Each record has, for every layer:

    - `rotation_max`, `_median`, `_p99`, `_rms`: degrees by which directions have turned since the
      last record. A direction is that of the active half-space: signs of gamma, of weight_norm's
      length and of an inside r count. A unit without one (gamma = 0) is left out of the summary
      and counted in `undefined`.
    - `displacement_max`, `_median`, `_p99`: ||delta phi||; `scale_min`, `_median`, `_max`;
      `distance_median`, `_p99`, `_max` of |lam|; `units`, how many the layer has.
    - for angles: `smallest_product` of cosines, the share with `negligible_metric` (< 1e-4).
    - with a probe: `input_length_median`, the median of ||x|| over the layer's inputs;
      `relative_distance_median`, that of |lam| over it; the number of units that are `dead`
      (active nowhere) and `always_on`; `separated_median`, the share of points on the smaller side
      of a boundary; `pattern_change`, the share of activation bits that changed since the last
      record; `points_changed`, the number of examples in another region; `regions`, how many
      there are. They belong to the activation that follows, after a residual sum if there is one;
      phi is always that of the layer and its norm alone.

    `keep="full"` adds `rotation`, `displacement`, `scale`, `distance` (signed) and `active` of
    each unit. Layers with a smooth activation, or none, have rotation and scale only; the rest is
    NaN.

    What follows a layer is found in a run on `example_inputs`, or on the probe; with neither, on
    the first batch that the model is called with. Build the tracker after the model is on its
    device, before or after wrapping it in DDP or torch.compile, and after `fully_shard`. With
    several processes the first one records and the others do nothing, except under FSDP2: there
    call `step()` in all of them.

    Args:
        model: Any model: standard, weight_norm, BatchNorm, LayerNorm, GmP, or a mixture.
        every: Record after so many steps.
        layers: Names of layers, or a function of module and name; all by default.
        probe: A batch as the model takes it: a tensor, a tuple, or a mapping of keywords.
        keep: "summary", or "full" for every unit.
        schedule: Function of the step's number that says whether to record; instead of `every`.
        example_inputs: A small batch, to see what follows each layer.
        units: At most so many units of each layer, evenly spaced, are followed; saves the copy
            of all directions that is otherwise kept.
        statistics: "running" reads BatchNorm and MBN as they evaluate. "batch" reads them as they
            train, by the statistics of the probe, which then needs the size of a training batch.
        file: An .npy file that grows with the records and survives a kill; see `history.py`.
        resume: Go on with the existing file; then call `load_state_dict`.
        writer: A TensorBoard SummaryWriter to write the summary to as well.

    Example:
        >>> model = nn.Sequential(nn.Linear(2, 8), nn.ReLU(), nn.Linear(8, 1))
        >>> tracker = BoundaryTracker(model, probe=torch.randn(16, 2))
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> for _ in range(3):
        ...     loss = model(torch.randn(4, 2)).square().mean()
        ...     optimizer.zero_grad()
        ...     loss.backward()
        ...     optimizer.step()
        ...     tracker.step()
        >>> tracker.history["0"]["rotation_max"].shape, tracker.history["0"]["step"]
        ((3,), array([1, 2, 3]))
    """

    def __init__(
        self,
        model: nn.Module,
        every: int = 1,
        layers: Layers = None,
        probe: Inputs | None = None,
        keep: Literal["summary", "full"] = "summary",
        *,
        schedule: Callable[[int], bool] | None = None,
        example_inputs: Inputs | None = None,
        units: int | None = None,
        statistics: Statistics = "running",
        file: str | os.PathLike | None = None,
        resume: bool = False,
        writer: Any = None,
    ) -> None:
        _check_options(keep, every, units, resume and file is None)
        self.model = unwrap(model)
        device = next((p.device for p in self.model.parameters()), None)
        known = probe if example_inputs is None else example_inputs
        # A copy: a loader may fill the same memory with the next batch.
        place = partial(Tensor.to, device=device, copy=True)
        probe, known = tree_map_only(Tensor, place, (probe, known))
        self.schedule = schedule or (lambda step: step % every == 0)
        self._layers, self._probe = layers, probe
        self._options: dict[str, Any] = {
            "units": units,
            "full": keep == "full",
            "batch": uses_batch_statistics(statistics, probe),
        }
        self._file, self._resume, self._writer = file, resume, writer
        self._steps = 0
        self._measured_at = 0
        self._pending: list[_Pending] = []
        self._measurement: Measurement | None = None
        self._history: History | None = None
        self._loaded: Mapping[str, Any] | None = None
        self._first = not dist.is_available() or not dist.is_initialized() or dist.get_rank() == 0
        sharded = any(hasattr(parameter, "full_tensor") for parameter in self.model.parameters())
        self._takes_part = self._first or sharded
        if known is None and sharded:
            raise ValueError("under FSDP2 the tracker needs example_inputs, or a probe.")
        if known is not None and self._takes_part:
            self._begin(known)
        elif self._takes_part:
            hook = _FirstBatch(self._see_first_batch)
            self._hook = model.register_forward_pre_hook(hook, with_kwargs=True)

    def step(self) -> None:
        """Count one optimizer step, and record if it is time to."""
        self._steps += 1
        if self._takes_part and self.schedule(self._steps):
            values, units = self._require_measurement().measure()
            self._measured_at = self._steps
            if self._first:
                self._pending.append(_start_copy(self._steps, values, units))
        self._collect(wait=False)

    @property
    def history(self) -> History:
        """The records so far: `history[layer][quantity]`, or `history.table(quantity)`."""
        if not self._first:
            raise RuntimeError("this process does not record: the first one of the group does.")
        self._require_measurement()
        self._collect(wait=True)
        assert self._history is not None
        return self._history

    def close(self) -> None:
        """Wait for the last records and write them."""
        self._collect(wait=True)

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint needs to go on: the step, and between records the directions.

        Everything recorded is in the file when this returns.
        """
        self._collect(wait=True)
        state: dict[str, Any] = {"step": self._steps}
        if self._measurement is not None and self._measured_at != self._steps:
            state["measured_at"] = self._measured_at
            state["measurement"] = self._measurement.state_dict()
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a checkpoint; call it when the model has the checkpoint's weights.

        Records of later steps, of a run that was killed after the checkpoint, are dropped.
        """
        if "step" not in state:
            raise ValueError("a tracker's state has a step: load what its state_dict() returned.")
        self._steps, self._loaded = state["step"], state
        if self._measurement is not None:
            self._go_on(self._measurement, state)

    def _see_first_batch(self, args: tuple, kwargs: dict) -> None:
        self._hook.remove()
        self._begin(args, kwargs)

    def _begin(self, inputs: Inputs, kwargs: Mapping[str, Any] | None = None) -> None:
        """Find what follows each layer, and take the first measurement, to compare with."""
        sites = find_sites(self.model, inputs, self._layers, kwargs)
        measurement = Measurement(self.model, sites, self._probe, **self._options)
        measurement.measure()
        self._measurement = measurement
        if self._first:
            counts = measurement.counts if measurement.full else None
            self._history = History(list(sites), QUANTITIES, counts, self._file, self._resume)
            if len(self._history.steps) and self._loaded is None:
                self._steps = self._measured_at = int(self._history.steps[-1])
        if self._loaded is not None:
            self._go_on(measurement, self._loaded)

    def _go_on(self, measurement: Measurement, state: Mapping[str, Any]) -> None:
        """Take over a checkpoint's state."""
        if self._history is not None:
            self._history.forget_after(self._steps)
        measurement.measure()
        self._measured_at = state.get("measured_at", self._steps)
        if "measurement" in state:
            measurement.load_state_dict(state["measurement"])

    def _require_measurement(self) -> Measurement:
        if self._measurement is None:
            raise ValueError(
                "the tracker does not know what follows each layer: the model was not called, or "
                "only where torch.compile hides it. Give example_inputs=, or a probe."
            )
        return self._measurement

    def _collect(self, wait: bool) -> None:
        """Put the records that have arrived into the history; `wait` for all."""
        while self._pending:
            step, values, units, arrived = self._pending[0]
            if arrived is not None and not wait and not arrived.query():
                return
            if arrived is not None:
                arrived.synchronize()
            self._pending.pop(0)
            assert self._history is not None
            self._history.append(step, values.numpy(), None if units is None else units.numpy())
            names = () if self._writer is None else (*self._history.layers, NETWORK)
            for name, own in zip(names, values.tolist(), strict=False):
                for quantity, value in zip(QUANTITIES, own, strict=True):
                    if math.isfinite(value):
                        self._writer.add_scalar(f"{name}/{quantity}", value, step)


def _start_copy(step: int, values: Tensor, units: Tensor | None) -> _Pending:
    """Start copying a record to the host, to pinned memory, without waiting for it."""
    arrived = torch.cuda.Event() if values.is_cuda else None  # other devices copy at once
    host = values.to("cpu", non_blocking=values.is_cuda)
    units = None if units is None else units.to("cpu", non_blocking=values.is_cuda)
    if arrived is not None:
        arrived.record(torch.cuda.current_stream(values.device))
    return _Pending(step, host, units, arrived)
