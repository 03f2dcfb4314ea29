"""A run on text in progress: windows, marks, and what is reported of them.

The windows of a step depend on seed, step and batch size alone, so that all methods see the same
ones and a resumed run repeats them. Checkpoints are written at marks, where the network is
evaluated, at most once in 60 seconds.
"""

import math
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from geoparam import sphere
from geoparam_lab import gpt
from geoparam_lab.data.texts import Text
from geoparam_lab.training import run_checkpoints
from geoparam_lab.training.network_training import DIVERGED, FINISHED, Outcome, StepTraining
from geoparam_lab.training.processes import prepare_run
from geoparam_lab.training.schedules import find_factor
from geoparam_lab.training.tasks import Tick
from geoparam_lab.training.text import preparation
from geoparam_lab.training.text.settings import TextSettings, get_numbers

if TYPE_CHECKING:
    from accelerate import Accelerator

CHECKPOINT_EVERY = 60.0  # seconds, at least, between two checkpoints
_REPORTED = ("method", "lr", "width", "depth", "steps", "batch_size", "seed", "schedule")


class TextTraining(StepTraining):
    """A run in progress; its parts are the steps from one mark to the next."""

    EXAMPLES = "bytes"
    PLAIN = ("step", "seconds", "outcome", "val_losses")

    def __init__(
        self,
        settings: TextSettings,
        text: Text,
        accelerator: "Accelerator",
        tick: Tick | None = None,
    ) -> None:
        model = preparation.build(settings).to(accelerator.device)
        self.parameters = sum(p.numel() for p in model.parameters())
        optimizer = preparation.make_optimizer(settings, model)
        super().__init__(settings, accelerator, model, optimizer, gpt.BYTES, tick)
        self.text, self.validation = (
            torch.tensor(part, device=self.device) for part in (text.train, text.val)
        )
        self.marks = list_marks(settings.steps, settings.marks)
        self.val_losses: list[float] = []  # at the marks
        self.kept = time.monotonic()  # when a checkpoint was written

    @property
    def step_size(self) -> int:
        return self.settings.batch_size * self.settings.context

    def list_compiled(self) -> Iterable[nn.Module]:
        """Return the blocks: equal ones share their code, however deep the network is."""
        blocks: nn.ModuleList = self.model.blocks
        return blocks

    def load_part(self) -> Iterator[tuple[Tensor, ...]]:
        """Yield the windows of the steps up to the next mark."""
        end = next(mark for mark in self.marks if mark > self.step)
        for step in range(self.step, end):
            yield (self.draw_windows(step),)

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

    def find_factor(self) -> float:
        names = ("steps", "schedule", "warmup", "final", "power", "hold")
        return find_factor(self.step, **{name: getattr(self.settings, name) for name in names})

    def train_on(self, *batch: Tensor) -> None:
        [windows] = batch
        loss = _find_loss(self.wrapped_model(windows[:, :-1]), windows[:, 1:])
        self.accelerator.backward(loss)
        if self.settings.clip:
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.settings.clip)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.losses[self.step] = loss.detach()

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

    def end_part(self) -> None:
        loss = self.evaluate()
        self.val_losses.append(loss)
        if not math.isfinite(loss):
            self.outcome = DIVERGED
        elif self.step == self.settings.steps:
            self.outcome = FINISHED

    def result(self) -> Outcome:
        settings, has_diverged = self.settings, self.outcome == DIVERGED
        losses = self.gather_losses()
        tokens = self.step * self.step_size
        record = {
            "precision": preparation.find_precision(settings),
            **{name: getattr(settings, name) for name in _REPORTED},
            **get_numbers(settings),
            "val_loss": math.nan if has_diverged else self.val_losses[-1],
            "best_val_loss": math.nan if has_diverged else min(self.val_losses),
            "train_loss": self.average_last(losses),
            "outcome": self.outcome,
            "parameters": self.parameters,
            "tokens": tokens,
            "seconds": self.seconds,
            "tokens_per_second": tokens / self.seconds,
            "processes": self.accelerator.num_processes,
        }
        curves = {
            "train_loss": losses,
            "val_step": np.array(self.marks[: len(self.val_losses)]),
            "val_loss": np.array(self.val_losses),
        }
        return Outcome(record, curves)

    def state_dict(self) -> run_checkpoints.State:
        return super().state_dict() | {"losses": torch.from_numpy(self.gather_losses())}

    def load_state_dict(self, state: run_checkpoints.State) -> None:
        if len(state["losses"]) != self.settings.steps:
            raise ValueError(f"it is of {len(state['losses'])} steps")
        self.losses.copy_(state["losses"])
        super().load_state_dict(state)

    def keep(self, folder: Path) -> None:
        from accelerate.utils import broadcast_object_list

        is_due = time.monotonic() - self.kept >= CHECKPOINT_EVERY and self.outcome is None
        [is_due] = broadcast_object_list([is_due])  # by the main process's clock
        if not is_due:
            return
        state = self.state_dict()
        if self.is_main:
            run_checkpoints.write(folder / run_checkpoints.CHECKPOINT, state)
        self.kept = time.monotonic()


def _find_loss(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


def list_marks(steps: int, marks: int) -> list[int]:
    """Return the steps after which a run is evaluated."""
    return sorted({math.ceil(steps * mark / marks) for mark in range(1, marks + 1)})


def train(
    settings: TextSettings, text: Text, folder: Path, *, tick: Tick | None = None
) -> Outcome:
    """Train a network, from the checkpoint in `folder` if there is one.

    With several processes all of them call it, and all get the outcome; only the main one writes.
    """
    with prepare_run(settings, preparation.find_precision(settings)) as accelerator:
        training = TextTraining(settings, text, accelerator, tick)
        training.resume(folder)
        return training.finish(folder)
