"""A run on text in progress: steps, marks, and the state from which it can go on.

The windows of a step depend on seed, step and batch size alone, so that all methods see the same
ones and a resumed run repeats them. A step launches its work on the device and waits for nothing;
losses stay there and are read every 50 steps, to notice a run that has diverged.

Checkpoints are written at marks, where the network is evaluated, at most once in 60 seconds.
"""

import contextlib
import math
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from geoparam import sphere
from geoparam_lab import gpt
from geoparam_lab.data.texts import Text
from geoparam_lab.run_folder import Record
from geoparam_lab.training import run_checkpoints
from geoparam_lab.training.processes import check_processes, make_accelerator, prepare_torch
from geoparam_lab.training.tasks import Done
from geoparam_lab.training.text import preparation
from geoparam_lab.training.text.settings import TextSettings, TextTask

if TYPE_CHECKING:
    from accelerate import Accelerator

StepReport = Callable[[int, float], None]  # takes the step and bytes per second

CHECKPOINT_EVERY = 60.0  # seconds, at least, between two checkpoints
LOOK_EVERY = 50  # steps between two reads of the loss
TIME_EVERY = 10  # steps between two steps of the optimizer that are timed
HOPELESS = 10 * math.log(gpt.BYTES)  # a loss that is divergence
FINISHED, DIVERGED = "finished", "diverged"
_PLAIN = ("step", "seconds", "outcome", "val_steps", "val_losses")


class Stopwatch:
    """Times of some calls, without waiting for the device."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.times: list[float] = []  # seconds
        self.events: list[Any] = []  # pairs that are not read yet

    @contextlib.contextmanager
    def measure(self) -> Iterator[None]:
        """Add the time of the block."""
        if self.device.type != "cuda":
            start = time.perf_counter()
            yield
            self.times.append(time.perf_counter() - start)
            return
        pair = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
        pair[0].record()
        yield
        pair[1].record()
        self.events.append(pair)

    def median(self) -> float:
        """Return the median, in seconds; waits for the device."""
        for start, end in self.events:
            end.synchronize()
            self.times.append(start.elapsed_time(end) / 1e3)
        self.events.clear()
        return float(np.median(self.times)) if self.times else math.nan


class TextTraining:
    """A run in progress."""

    def __init__(
        self,
        settings: TextSettings,
        text: Text,
        accelerator: "Accelerator",
        report: StepReport | None = None,
    ) -> None:
        self.settings, self.accelerator = settings, accelerator
        self.device = accelerator.device
        self.is_main = accelerator.is_main_process
        self._prepare()
        self.text, self.validation = (
            torch.tensor(part, device=self.device) for part in (text.train, text.val)
        )
        self.losses = torch.full((settings.steps,), math.nan, device=self.device)
        self.marks = _list_marks(settings.steps, settings.marks)
        self.step = 0
        self.seconds = 0.0  # of training, evaluations aside
        self.outcome: str | None = None
        self.val_steps: list[int] = []
        self.val_losses: list[float] = []
        self.stopwatch = Stopwatch(self.device)
        self._report = report if self.is_main else None

    def _prepare(self) -> None:
        """Build network, optimizer and schedule, and let Accelerate prepare them."""
        settings, accelerator = self.settings, self.accelerator
        model = preparation.build(settings).to(self.device)
        self.parameters = sum(p.numel() for p in model.parameters())
        optimizer = preparation.make_optimizer(settings, model)
        self.wrapped_model, prepared = accelerator.prepare(model, optimizer)
        # Accelerate's wrapper is for fp16, and looks for a package on disk in every step: 0.4 ms.
        self.optimizer: torch.optim.Optimizer = prepared.optimizer
        self.schedule = preparation.make_schedule(settings, self.optimizer)
        self.model = accelerator.unwrap_model(self.wrapped_model, keep_fp32_wrapper=True)
        if settings.compile:
            torch.compiler.reset()  # torch compiles eight variants and no more
            self.wrapped_model.compile()
        self.model.train()

    def draw_windows(self, step: int) -> Tensor:
        """Return this process's windows of a step, each with the byte after it."""
        settings, accelerator = self.settings, self.accelerator
        random = np.random.default_rng((settings.seed, step))
        last = len(self.text) - settings.context
        starts = random.integers(last, size=settings.batch_size)
        share = starts[accelerator.process_index :: accelerator.num_processes]
        return self._cut(self.text, share)

    def _cut(self, text: Tensor, starts: np.ndarray) -> Tensor:
        """Return the windows that begin at these places."""
        places = torch.from_numpy(starts)
        if self.device.type == "cuda":  # from pinned memory the host need not wait
            places = places.pin_memory()
        offsets = torch.arange(self.settings.context + 1, device=self.device)
        indices = places.to(self.device, non_blocking=True).unsqueeze(1) + offsets
        return text[indices].long()

    def train_to_mark(self) -> None:
        """Do all steps up to the next mark, or until the loss is no longer finite."""
        start, first = time.perf_counter(), self.step
        end = next(mark for mark in self.marks if mark > self.step)
        while self.step < end:
            self.train_on(self.draw_windows(self.step))
            self.step += 1
            if self._report is not None:
                windows = (self.step - first) * self.settings.batch_size
                speed = windows * self.settings.context / (time.perf_counter() - start)
                self._report(self.step, speed)
            if self.step % LOOK_EVERY == 0 and self._has_diverged():
                break
        if self._has_diverged():  # waits for the device
            self.outcome = DIVERGED
        self.seconds += time.perf_counter() - start

    def train_on(self, windows: Tensor) -> None:
        """Make one step of the optimizer."""
        settings = self.settings
        loss = _find_loss(self.wrapped_model(windows[:, :-1]), windows[:, 1:])
        self.accelerator.backward(loss)
        if settings.clip:
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), settings.clip)
        preparation.set_momentum(settings, self.optimizer, self.step)
        is_timed = self.step % TIME_EVERY == TIME_EVERY - 1
        with self.stopwatch.measure() if is_timed else contextlib.nullcontext():
            self.optimizer.step()
        self.optimizer.zero_grad()
        self.schedule.step()
        self.losses[self.step] = loss.detach()

    def _has_diverged(self) -> bool:
        """Return whether the last loss of a process is hopeless; a collective call."""
        loss = self.accelerator.reduce(self.losses[self.step - 1], "mean").item()
        return not loss <= HOPELESS

    @torch.no_grad()
    def evaluate(self) -> float:
        """Return the mean loss of a byte over windows that are spread over the validation text."""
        settings, accelerator = self.settings, self.accelerator
        count = min(settings.windows, (len(self.validation) - 1) // settings.context)
        last = len(self.validation) - settings.context - 1
        starts = np.linspace(0, last, max(count, 1)).astype(np.int64)
        share = starts[accelerator.process_index :: accelerator.num_processes]
        total = torch.zeros(2, dtype=sphere.wide_type(self.device), device=self.device)
        part = max(1, settings.batch_size // accelerator.num_processes)
        self.model.eval()
        for first in range(0, len(share), part):
            windows = self._cut(self.validation, share[first : first + part])
            loss = _find_loss(self.model(windows[:, :-1]), windows[:, 1:])
            total[0] += loss * len(windows)
            total[1] += len(windows)
        self.model.train()
        loss_sum, windows_sum = accelerator.reduce(total, "sum").tolist()
        return loss_sum / windows_sum

    def end_mark(self) -> None:
        """Evaluate, and decide how to go on."""
        loss = self.evaluate()
        self.val_steps.append(self.step)
        self.val_losses.append(loss)
        if not math.isfinite(loss):
            self.outcome = DIVERGED
        elif self.step == self.settings.steps:
            self.outcome = FINISHED

    def result(self) -> tuple[Record, dict[str, np.ndarray]]:
        """Return the record and the curves of a run that has ended."""
        settings = self.settings
        losses = self.accelerator.reduce(self.losses, "mean").cpu().numpy()
        has_diverged = self.outcome == DIVERGED
        last = losses[-max(1, settings.steps // 20) :]  # a twentieth of the run
        tokens = self.step * settings.batch_size * settings.context
        record = {
            "val_loss": math.nan if has_diverged else self.val_losses[-1],
            "best_val_loss": math.nan if has_diverged else min(self.val_losses),
            "train_loss": math.nan if has_diverged else float(last.mean()),
            "outcome": self.outcome,
            "parameters": self.parameters,
            "tokens": tokens,
            "seconds": self.seconds,
            "tokens_per_second": tokens / self.seconds,
            "optimizer_seconds": self.stopwatch.median(),
        }
        curves = {
            "train_loss": losses,
            "val_step": np.array(self.val_steps),
            "val_loss": np.array(self.val_losses),
        }
        return record, curves

    def state_dict(self) -> run_checkpoints.State:
        """Return the state to resume from; a collective call, complete in the main process."""
        return {
            **{name: getattr(self, name) for name in _PLAIN},
            "losses": self.accelerator.reduce(self.losses, "mean").cpu(),
            "schedule": self.schedule.state_dict(),
            **run_checkpoints.get_state(self.model, self.optimizer, self.device),
        }

    def load_state_dict(self, state: run_checkpoints.State) -> None:
        """Go on from a mark."""
        if len(state["losses"]) != self.settings.steps:
            raise ValueError(f"it is of {len(state['losses'])} steps")
        for name in _PLAIN:
            setattr(self, name, state[name])
        self.losses.copy_(state["losses"])
        self.schedule.load_state_dict(dict(state["schedule"]))
        run_checkpoints.load_state(state, self.model, self.optimizer, self.device)


def _find_loss(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


def _list_marks(steps: int, marks: int) -> list[int]:
    """Return the steps after which a run is evaluated."""
    return sorted({math.ceil(steps * mark / marks) for mark in range(1, marks + 1)})


def train(task: TextTask, text: Text, folder: Path, report: StepReport | None = None) -> Done:
    """Train a network, from the checkpoint in `folder` if there is one.

    With several processes all of them call it, and all get the outcome; only the main one writes.
    """
    settings = task.settings
    precision = preparation.find_precision(settings)
    accelerator = make_accelerator(precision)
    check_processes(accelerator, precision, settings.batch_size)
    seed = settings.seed + accelerator.process_index
    with prepare_torch(seed, settings.deterministic, accelerator.device):
        try:
            training = TextTraining(settings, text, accelerator, report)
            run_checkpoints.resume(training, folder)
            _finish(training, folder)
            record, curves = training.result()
        finally:
            accelerator.free_memory()  # else it keeps the networks of all runs
    named = {"name": task.name, "method": settings.method, "tuned": task.tuned, "lr": settings.lr}
    sizes = {name: getattr(settings, name) for name in ("width", "depth", "steps", "batch_size")}
    place = {"seed": settings.seed, "schedule": settings.schedule, "precision": precision}
    others = {name: value for name, value in task.numbers.items() if name != "lr"}
    processes = accelerator.num_processes
    full = named | sizes | others | place | record | {"processes": processes}
    return Done([full], {task.name: curves})


def _finish(training: TextTraining, folder: Path) -> None:
    """Do the rest of a run, with checkpoints at some marks."""
    from accelerate.utils import broadcast_object_list

    last = time.monotonic()
    while training.outcome is None:
        training.train_to_mark()
        if training.outcome is None:
            training.end_mark()
        is_due = time.monotonic() - last >= CHECKPOINT_EVERY and training.outcome is None
        [is_due] = broadcast_object_list([is_due])  # by the main process's clock
        if is_due:
            state = training.state_dict()
            if training.is_main:
                run_checkpoints.write_checkpoint(folder, state)
            last = time.monotonic()
