"""A run of a network in progress: what runs on images, on text and of fine-tuning share.

A run has parts: epochs of images, or the steps between two evaluations. A step launches its work
on the device and waits for nothing. The loss stays there and is read every 50 steps, to notice a
run that has diverged. After a part the network is evaluated, and the state may be written from
which the run can go on.

`state_dict` is everything that a run needs for that. The batches of a step depend on seed and step
alone, so a resumed run repeats the same steps, and on one device in deterministic mode (on a CPU
always) the same bits.
"""

import math
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from geoparam_lab.run_folder import Record
from geoparam_lab.training import run_checkpoints
from geoparam_lab.training.run_checkpoints import State
from geoparam_lab.training.tasks import Tick

if TYPE_CHECKING:
    from accelerate import Accelerator

LOOK_EVERY = 50  # steps between two reads of the loss
HOPELESS = 10.0  # times log(classes), the loss of guessing: a loss above it is divergence
FINISHED, DIVERGED = "finished", "diverged"  # outcomes


@dataclass(frozen=True)
class Outcome:
    """The results of a run; docs/experiments.md ("What is written") lists the fields."""

    record: Record
    curves: Mapping[str, np.ndarray]


class NetworkTraining:
    """A run in progress, in one of the processes that train together.

    `wrapped_model` is the network as it is trained, perhaps inside DDP; `model` is without.
    """

    PLAIN: tuple[str, ...] = ()  # attributes that a checkpoint holds as they are
    EXAMPLES = "images"  # what a step has so many of

    def __init__(
        self,
        settings: Any,
        accelerator: "Accelerator",
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        classes: int,
        tick: Tick | None,
    ) -> None:
        self.settings, self.accelerator = settings, accelerator
        self.device = accelerator.device
        self.is_main = accelerator.is_main_process  # in the process that writes
        self.hopeless = HOPELESS * math.log(classes)
        self.wrapped_model, prepared = accelerator.prepare(model, optimizer)
        # Accelerate's wrapper is for fp16, and looks for a package on disk in every step: 0.4 ms.
        self.optimizer: torch.optim.Optimizer = prepared.optimizer
        self.model: Any = accelerator.unwrap_model(self.wrapped_model, keep_fp32_wrapper=True)
        if settings.compile:
            torch.compiler.reset()  # torch compiles eight variants and no more, some per network
            for part in self.list_compiled():
                part.compile()

        self.rates = [group["lr"] for group in self.optimizer.param_groups]
        self.factor = 1.0  # of all rates
        self.step = 0
        self.seconds = 0.0  # of training, evaluations aside
        self.outcome: str | None = None
        self._tick = tick if self.is_main else None

    @property
    def count(self) -> int:
        """The epoch or step that a progress display names."""
        raise NotImplementedError

    @property
    def left(self) -> float:
        """The share of the run that is left."""
        raise NotImplementedError

    @property
    def step_size(self) -> int:
        """How many images or bytes there are in a step."""
        raise NotImplementedError

    def list_compiled(self) -> Iterable[nn.Module]:
        """Return the modules that are compiled, each by itself."""
        return [self.wrapped_model]

    def load_part(self) -> Iterable[tuple[Tensor, ...]]:
        """Return the batches of the next part."""
        raise NotImplementedError

    def find_factor(self) -> float:
        """Return what rates are multiplied by in this step."""
        raise NotImplementedError

    def train_on(self, *batch: Tensor) -> None:
        """Make one step of the optimizer."""
        raise NotImplementedError

    def has_diverged(self) -> bool:
        """Return whether the loss says so; a collective call that waits for the device."""
        raise NotImplementedError

    def end_part(self) -> None:
        """Evaluate, and decide how to go on."""
        raise NotImplementedError

    def keep(self, folder: Path) -> None:
        """Write a checkpoint, if one is due."""
        raise NotImplementedError

    def result(self) -> Outcome:
        """Return the outcome of a run that has ended."""
        raise NotImplementedError

    def train_part(self) -> None:
        """Do all steps of a part, or until the loss is no longer finite: that is an outcome."""
        batches = self.load_part()
        start, first = time.perf_counter(), self.step
        for batch in batches:
            self.factor = self.find_factor()
            for group, rate in zip(self.optimizer.param_groups, self.rates, strict=True):
                group["lr"] = rate * self.factor
            self.train_on(*batch)
            self.step += 1
            if self._tick is not None:
                seen = (self.step - first) * self.step_size
                speed = seen / (time.perf_counter() - start)
                self._tick(self.count, self.left, f"{speed:,.0f} {self.EXAMPLES}/s")
            if self.step % LOOK_EVERY == 0 and self.has_diverged():
                break
        if self.has_diverged():
            self.outcome = DIVERGED
        self.seconds += time.perf_counter() - start

    def finish(self, folder: Path) -> Outcome:
        """Do the rest of a run."""
        while self.outcome is None:
            self.train_part()
            if self.outcome is None:
                self.end_part()
            self.keep(folder)
        return self.result()

    def resume(self, folder: Path) -> State | None:
        """Go on from the checkpoint in a folder, and return that; None if there is none.

        All processes call it.
        """
        from accelerate.utils import broadcast_object_list

        [state] = broadcast_object_list([run_checkpoints.read(folder) if self.is_main else None])
        if state is None:
            return None
        try:
            self.load_state_dict(state)
        except (RuntimeError, LookupError, ValueError) as error:
            raise ValueError(
                f"the checkpoint in {folder} is not of this run ({error!s:.100}). Remove it, and "
                "the run starts anew."
            ) from error
        return state

    def state_dict(self) -> State:
        """Return the state to resume from; a collective call, complete in the main process."""
        plain = {name: getattr(self, name) for name in self.PLAIN}
        return plain | run_checkpoints.get_state(self.model, self.optimizer, self.device)

    def load_state_dict(self, state: State) -> None:
        """Go on from the end of a part."""
        for name in self.PLAIN:
            setattr(self, name, state[name])
        run_checkpoints.load_state(state, self.model, self.optimizer, self.device)


class StepTraining(NetworkTraining):
    """A run of a given number of steps, each with its loss: on text, and of fine-tuning."""

    def __init__(self, settings: Any, accelerator: "Accelerator", *arguments: Any) -> None:
        super().__init__(settings, accelerator, *arguments)
        self.losses = torch.full((settings.steps,), math.nan, device=self.device)

    @property
    def count(self) -> int:
        return self.step

    @property
    def left(self) -> float:
        return 1 - self.step / self.settings.steps

    def has_diverged(self) -> bool:
        loss = self.accelerator.reduce(self.losses[self.step - 1], "mean").item()
        return not loss <= self.hopeless

    def gather_losses(self) -> np.ndarray:
        """Return the loss of every step, the mean over all processes; a collective call."""
        losses: Tensor = self.accelerator.reduce(self.losses, "mean")
        return losses.cpu().numpy()

    def average_last(self, losses: np.ndarray) -> float:
        """Return the mean of the last twentieth of a run's losses; NaN where it diverged."""
        if self.outcome == DIVERGED:
            return math.nan
        return float(losses[-max(1, self.settings.steps // 20) :].mean())
