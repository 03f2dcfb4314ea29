"""Follow the boundaries of a model's units through training: `BoundaryTracker`.

A tracker only reads: it draws no random numbers and changes no buffer and no flag, so a run gives
the same numbers with and without it. Everything is computed on the model's device; a record is one
small asynchronous copy to the host, which only reading the history waits for.
"""

import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only
from torch.utils.hooks import RemovableHandle

from geoparam.analysis import history
from geoparam.analysis.boundary import Statistics, uses_batch_statistics
from geoparam.analysis.history import History
from geoparam.analysis.logs import ScalarLog
from geoparam.analysis.quantities import (
    Quantity,
    UnitQuantity,
    choose_quantities,
    find_quantity,
    measure,
    summarise,
)
from geoparam.analysis.sites import Inputs, Layers, check_batch, find_sites
from geoparam.analysis.snapshot import Camera
from geoparam.arguments import check_callable, check_count, check_flag
from geoparam.model.run import refuse_lazy, refuse_non_model, unwrap
from geoparam.model.trace import is_tracing

__all__ = ["BoundaryTracker", "history"]

OTHER_STEPS = (
    "on the probe the model takes other steps than when the tracker was built, so the probe's "
    "quantities are NaN in this record: a branch or a router decided otherwise, or example_inputs "
    "lead elsewhere than the probe does."
)


class BoundaryTracker:
    r"""Records how the characteristic boundaries of a model's units move while it trains.

    Call `step()` after each optimizer step. Each record has, for every layer:

    - `rotation_max`, `_median`, `_p99`, `_rms`: degrees by which directions have turned since the
      last record. A direction is that of the active half-space: signs of gamma, of weight_norm's
      length and of an inside r count. A unit without one (gamma = 0) is left out of the summary
      and counted in `undefined`.
    - `displacement_max`, `_median`, `_p99`: ||delta phi||; `scale_min`, `_median`, `_max`;
      `distance_median`, `_p99`, `_max` of |lam|; `units`, how many the layer has.
    - with a probe: the number of units that are `dead` (active nowhere) and `always_on`;
      `separated_median`, the share of points on the smaller side of a boundary; `pattern_change`,
      the share of activation bits that changed since the last record; `points_changed`, the
      number of examples in another region; `regions`, how many there are. They belong to the
      activation that follows, after a residual sum if there is one; phi is always that of the
      layer and its norm alone.

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
        every: Record every this many steps.
        layers: Names of layers, or a function of module and name; all by default.
        probe: A batch as the model takes it: a tensor, a tuple, or a mapping of keywords.
        keep: "summary", or "full" for every unit.
        schedule: Function of the step's number that says whether to record; instead of `every`.
        example_inputs: A small batch, to see what follows each layer.
        units: At most so many units of each layer, evenly spaced, are followed; saves the copy
            of all directions that is otherwise kept.
        statistics: "running" reads BatchNorm and MBN as they evaluate. "batch" reads them as they
            train, by the statistics of the probe, which then needs the size of a training batch.
        quantities: What is recorded: names, as "rotation_rms" or "rotation", and quantities of
            your own; see `geoparam.analysis.quantities`. All by default.
        file: An .npy file that grows with the records and survives a kill; see `history.py`.
        resume: Go on with the existing file; then call `load_state_dict`.
        log: Where the summary is written to as well, under the tags quantity/layer: an object
            with `add_scalar` (TensorBoard), `log` (W&B) or `log_metrics` (Lightning's loggers).

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
        quantities: Sequence[str | Quantity] | None = None,
        file: str | os.PathLike | None = None,
        resume: bool = False,
        log: Any = None,
    ) -> None:
        _check_options(keep, every, units, resume, file)
        check_callable("schedule", schedule, "schedule(step)")
        _check_model(model)
        for inputs in (probe, example_inputs):
            check_batch(inputs)
        self.model = unwrap(model)
        self.schedule = schedule or (lambda step: step % every == 0)
        self.quantities, logged = choose_quantities(quantities)
        if probe is None:
            _refuse_names_of_probe([quantities] if isinstance(quantities, str) else quantities)
        self._is_full = keep == "full"
        self._layers, self._units = layers, units
        self._batch = uses_batch_statistics(statistics, probe)
        self._file, self._resume = file, resume
        self._steps = 0
        self._measured_at = 0
        self._pending: list[_Pending] = []
        self._unsent: list[np.ndarray] = []  # rows that the log has not taken yet
        self._camera: Camera | None = None
        self._history: History | None = None
        self._handles: list[RemovableHandle] = []
        self._loaded: Mapping[str, Any] | None = None

        # Copies: a loader may fill the same memory with the next batch.
        device = next((p.device for p in self.model.parameters()), None)
        place = partial(Tensor.to, device=device, copy=True)
        self._probe, examples = tree_map_only(Tensor, place, (probe, example_inputs))
        batch = self._probe if examples is None else examples
        has_group = dist.is_available() and dist.is_initialized()
        self._is_first = not has_group or dist.get_rank() == 0
        is_sharded = any(hasattr(p, "full_tensor") for p in self.model.parameters())
        self._takes_part = self._is_first or is_sharded
        if batch is None and is_sharded:
            raise ValueError("under FSDP2 the tracker needs example_inputs, or a probe.")
        self._writer = None if log is None else ScalarLog(log, logged)
        if batch is not None and self._takes_part:
            self._begin(batch)
        elif self._takes_part:
            find_sites(self.model, layers=layers)  # refuses wrong names now
            hook = Hook(self._see_first_batch)
            self._first_batch = model.register_forward_pre_hook(hook, with_kwargs=True)
            self.remove_on_close(self._first_batch)

    def step(self) -> None:
        """Count one optimizer step, and record if it is time to."""
        self._steps += 1
        if self._takes_part and self.schedule(self._steps):
            self._record()
        self._collect(wait=False)
        self._send()

    @property
    def history(self) -> History:
        """The records so far: `history[layer][quantity]`, or `history.table(quantity)`."""
        if not self._is_first:
            raise RuntimeError("this process does not record: the first one of the group does.")
        self._require_camera()
        self._collect(wait=True)
        assert self._history is not None
        return self._history

    def remove_on_close(self, handle: RemovableHandle) -> None:
        """Let `close` remove a hook by which the tracker is called."""
        self._handles.append(handle)

    def close(self) -> None:
        """Remove the tracker's hooks, wait for the last records and write them."""
        for handle in self._handles:
            handle.remove()
        self._collect(wait=True)
        self._send()

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint needs to go on: the step, and between records the snapshot.

        Everything recorded is in the file when this returns.
        """
        self._collect(wait=True)
        self._send()
        state: dict[str, Any] = {"step": self._steps}
        if self._camera is not None:
            state["units"] = self._camera.units
            if self._measured_at != self._steps:
                state["measured_at"] = self._measured_at
                state["snapshot"] = self._camera.state_dict()
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a checkpoint; call it when the model has the checkpoint's weights.

        Records of later steps, of a run that was killed after the checkpoint, are dropped.
        """
        if not isinstance(state, Mapping) or "step" not in state:
            raise ValueError("a tracker's state has a step: load what its state_dict() returned.")
        check_count("the step of a tracker's state", state["step"], least=0)
        if self._camera is not None:
            self._go_on(state)
        self._steps, self._loaded = state["step"], state

    def _see_first_batch(self, model: nn.Module, args: tuple, kwargs: dict) -> None:
        if not torch.compiler.is_compiling() and not is_tracing():
            self._begin(args, kwargs)
            self._first_batch.remove()

    def _begin(self, inputs: Inputs, kwargs: Mapping[str, Any] | None = None) -> None:
        """Find what follows each layer, and take the first snapshot, to compare with."""
        sites = find_sites(self.model, inputs, self._layers, kwargs)
        camera = Camera(self.model, sites, self._units, self._probe, self._batch)
        if self._loaded is not None:
            _check_state(self._loaded, camera)
        if self._is_first:
            columns = [column for quantity in self.quantities for column in quantity.columns]
            by_unit = [q.name for q in self.quantities if isinstance(q, UnitQuantity)]
            counts = camera.layout.counts if self._is_full else None
            self._history = History(
                list(sites.layers), columns, by_unit, counts, self._file, self._resume
            )
            if len(self._history.steps) and self._loaded is None:
                self._steps = self._measured_at = int(self._history.steps[-1])
        self._camera = camera
        if self._loaded is not None:
            self._go_on(self._loaded)

    def _go_on(self, state: Mapping[str, Any]) -> None:
        """Take over a checkpoint's state."""
        camera = self._require_camera()
        _check_state(state, camera)
        self._collect(wait=True)
        self._send()
        camera.load_state_dict(state.get("snapshot"))
        self._measured_at = state.get("measured_at", state["step"])
        if self._history is not None:
            self._history.forget_after(state["step"])

    def _record(self) -> None:
        """Take a snapshot, and start copying what it shows to the host."""
        camera = self._require_camera()
        interval = camera.compare()
        values = measure(self.quantities, interval)
        if self._is_first:
            self._pending.append(_start_copy(self._steps, values))
        camera.keep(interval.now)
        self._measured_at = self._steps
        if interval.readings is not None and not interval.readings.took_same_steps:
            warnings.warn(OTHER_STEPS, stacklevel=3)  # last: it may be an error

    def _require_camera(self) -> Camera:
        if self._camera is None:
            raise ValueError(
                "the tracker does not know what follows each layer: the model was not called, or "
                "only where torch.compile hides it. Give example_inputs=, or a probe."
            )
        return self._camera

    def _collect(self, wait: bool) -> None:
        """Put the records that have arrived into the history; `wait` for all."""
        while self._pending:
            record = self._pending[0]
            if record.arrived is not None:
                if not wait and not record.arrived.query():
                    return
                record.arrived.synchronize()
            assert self._history is not None
            counts = self._require_camera().layout.counts
            summary, units = summarise(self.quantities, record.values.numpy(), counts)
            self._unsent.append(self._history.append(record.step, summary, units))
            self._pending.pop(0)  # only now: after a failed write it is tried again

    def _send(self) -> None:
        """Send records of the history to the log; one that it does not take is tried again."""
        while self._unsent:
            if self._writer is not None:
                self._writer.write(self._unsent[0])
            self._unsent.pop(0)


class _Pending(NamedTuple):
    """A record on its way to the host."""

    step: int
    values: Tensor  # what `measure` has returned
    arrived: torch.cuda.Event | None  # None: it is there


def _start_copy(step: int, values: Tensor) -> _Pending:
    """Start copying a record to the host, to pinned memory, without waiting for it."""
    is_cuda = values.is_cuda  # other devices copy at once
    host = values.to("cpu", non_blocking=is_cuda)
    arrived = None
    if is_cuda:
        arrived = torch.cuda.Event()
        arrived.record(torch.cuda.current_stream(values.device))
    return _Pending(step, host, arrived)


class Hook:
    """Calls a tracker; in a copy of the model or optimizer it does nothing."""

    def __init__(self, function: Callable[..., None] | None = None) -> None:
        self._function = function

    def __call__(self, *args: Any) -> None:
        if self._function is not None:
            self._function(*args)

    def __reduce__(self) -> tuple:
        return Hook, ()


def _refuse_names_of_probe(quantities: Sequence[str | Quantity] | None) -> None:
    """Refuse a quantity that is asked for by name, and would be NaN without a probe."""
    for name in quantities or ():
        if isinstance(name, str) and find_quantity(name).needs_probe:
            raise ValueError(
                f"{name!r} is measured on a probe. Give probe=, or leave it out of quantities."
            )


def _check_options(keep: str, every: int, units: int | None, resume: bool, file: Any) -> None:
    if keep not in ("summary", "full"):
        raise ValueError(f"keep is 'summary' or 'full'; got {keep!r}.")
    check_count("every", every)
    if units is not None:
        check_count("units", units)
    check_flag("resume", resume)
    if file is not None and not isinstance(file, str | os.PathLike):
        raise ValueError(f"file is the path of an .npy file; got a {type(file).__name__}.")
    if resume and file is None:
        warnings.warn(
            "resume=True without file=: earlier records are not there, and the history begins "
            "here. Give the file of the run before.",
            stacklevel=3,
        )


def _check_model(model: object) -> None:
    refuse_non_model(model, "BoundaryTracker(model, ...)")
    assert isinstance(model, nn.Module)
    refuse_lazy(model)
    if any(parameter.is_meta for parameter in model.parameters()):
        raise ValueError(
            "a tracker reads the values of weights; parameters on the meta device have none. "
            "Build it after the model is on its device and has its weights."
        )


def _check_state(state: Mapping[str, Any], camera: Camera) -> None:
    """Refuse a state of another model, and a damaged one, before anything is changed."""
    units = camera.units
    parts = state.get("units", {}), state.get("snapshot", {})
    if not all(isinstance(part, Mapping) for part in parts):
        raise ValueError("the tracker's state is damaged: its units and snapshot are mappings.")
    if state.get("units", units) != units:
        raise ValueError(
            "the tracker's state is of another model or other options: it follows "
            f"{_describe(state['units'])} units, and this tracker {_describe(units)}. Load "
            "the state that was saved with this model."
        )
    if "snapshot" in state:
        camera.check_state(state["snapshot"])


def _describe(units: Mapping[str, Sequence[int]]) -> str:
    return ", ".join(f"{name}: {shape[0]} x {shape[1]}" for name, shape in units.items())
