"""A run under way: steps, epochs, and the state from which it can go on.

A step launches its work on the device and waits for nothing. Loss and hits are summed there and
looked at every 50 steps, to notice a run that has diverged, and at the end of an epoch.

What a run is, at one moment, is `Training.state_dict`: weights, moments, schedule, average, epoch
and step, sums and curves so far, random numbers. The images of a step depend on seed, epoch and
step alone. So a run that goes on from a checkpoint makes the same steps again, and on one device
in deterministic mode (on a CPU always) the same bits.
"""

import contextlib
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import geoparam as gp
from geoparam.data.imagenet import Source
from geoparam.experiments.imaging import checkpoints, preparation, schedules, watching
from geoparam.experiments.imaging.averaging import Average
from geoparam.experiments.imaging.metrics import Result, Sums, result
from geoparam.experiments.imaging.settings import Outcome, Settings

if TYPE_CHECKING:
    from accelerate import Accelerator

LOOK_EVERY = 50  # steps between two looks at the loss
HOPELESS = 10.0  # times log(classes), the loss of guessing: a mean loss above it is divergence
CURVES = (
    "train_loss",
    "train_top1",
    "train_top5",
    "val_loss",
    "val_top1",
    "val_top5",
    "lr",
)
FINISHED, STOPPED, DIVERGED = "finished", "stopped early", "diverged"


class Training:
    """A run under way.

    Args:
        settings: all that decides the numbers.
        source: the images.
        accelerator: device and processes.
        tick: see `train`.
    """

    def __init__(
        self,
        settings: Settings,
        source: Source,
        accelerator: "Accelerator",
        tick: watching.Tick | None = None,
    ) -> None:
        self.settings, self.accelerator, self.size = settings, accelerator, source.size
        self.identity = {"settings": settings.as_dict(), "images": dict(source.fingerprint)}
        self.is_main = accelerator.is_main_process
        self._prepare(preparation.make_network(settings, source, accelerator))
        place: dict[str, Any] = {
            "device": accelerator.device,
            "rank": accelerator.process_index,
            "world": accelerator.num_processes,
        }
        batch = settings.batch_size
        self.batches = source.train(batch, seed=settings.seed, crop=settings.crop, **place)
        self.val = source.val(batch, **place)
        self.schedule = schedules.NAMES[settings.schedule](settings.epochs)
        self.hopeless = HOPELESS * float(np.log(source.classes))
        self.epoch = self.step = 0  # steps of the epoch that are done
        self.sums = Sums(accelerator.device)
        self.curves: dict[str, list[float]] = {name: [] for name in CURVES}
        self.best_epoch = -1
        self.best_weights: checkpoints.State | None = None
        self.speeds: list[float] = []  # images per second, of each epoch
        self.outcome: str | None = None
        self.tracker: gp.BoundaryTracker | None = None
        self._ticker = watching.Ticker(tick if self.is_main else None)

    def _prepare(self, model: nn.Module) -> None:
        """Let Accelerate have network and optimizer.

        `run` is the network as it is trained, DDP's for one; `model` is the network itself.
        """
        accelerator, settings = self.accelerator, self.settings
        accelerator.gradient_accumulation_steps = settings.accumulate
        accelerator.step = 0  # of an accumulation that an earlier run may have broken off
        optimizer = preparation.make_optimizer(settings, model)
        self.rates = [group["lr"] for group in optimizer.param_groups]
        self.run, prepared = accelerator.prepare(model, optimizer)
        # Accelerate's wrapper looks for a package on disk in every step: 0.4 ms. It is for fp16.
        self.optimizer: torch.optim.Optimizer = prepared.optimizer
        self.model = accelerator.unwrap_model(self.run, keep_fp32_wrapper=True)
        if settings.compile:
            self.run.compile()
        self.average = Average(self.model, settings.ema) if settings.ema else None
        self.model.train()

    # --- steps --------------------------------------------------------------------------------

    def steps(self) -> Iterator[int]:
        """Do what is left of an epoch, and yield after each step how many are done.

        It ends early, with an outcome, when the loss is no longer finite.
        """
        self._set_rates()
        first, images = self.step, self.settings.batch_size
        start = time.perf_counter()
        self._ticker.restart()
        for batch in self.batches.epoch(self.epoch, self.step):
            self.train_on(*batch)
            self.step += 1
            self._ticker(self.epoch, self.step, images)
            if self.step % LOOK_EVERY == 0 and not self._is_finite():
                self.outcome = DIVERGED
                return
            yield self.step
        if not self._is_finite():  # which waits for the device
            self.outcome = DIVERGED
        elif self.step > first:
            self.speeds.append((self.step - first) * images / (time.perf_counter() - start))

    def train_on(self, images: Tensor, labels: Tensor) -> None:
        """Make one step of the optimizer."""
        parts = self.settings.accumulate
        for x, y in zip(images.chunk(parts), labels.chunk(parts), strict=True):
            with self.accelerator.accumulate(self.run):
                logits = self.run(self._laid_out(x))
                loss = F.cross_entropy(logits, y, label_smoothing=self.settings.label_smoothing)
                self.accelerator.backward(loss)
                if self.accelerator.sync_gradients:
                    self.optimizer.step()
                    self.optimizer.zero_grad()
            self.sums.add(loss.detach() * len(y), logits, y)
        if self.average is not None:
            self.average.update()
        if self.tracker is not None:
            self.tracker.step()

    def _laid_out(self, images: Tensor) -> Tensor:
        last = self.settings.channels_last
        return images.contiguous(
            memory_format=torch.channels_last if last else torch.contiguous_format
        )

    def _set_rates(self) -> None:
        factor = self.schedule.factor(self.epoch)
        for group, rate in zip(self.optimizer.param_groups, self.rates, strict=True):
            group["lr"] = rate * factor

    def _is_finite(self) -> bool:
        return bool(np.isfinite(self.sums.over_processes(self.accelerator)[0]))

    # --- epochs -------------------------------------------------------------------------------

    def end_epoch(self) -> None:
        """Evaluate, and decide how to go on."""
        trained, lr = result(self.sums.over_processes(self.accelerator)), self._rate()
        evaluated = self.evaluate()
        if self._has_diverged(trained, evaluated):
            self.outcome = DIVERGED
            return
        values = (*_percent(trained), *_percent(evaluated), lr)
        for name, value in zip(CURVES, values, strict=True):
            self.curves[name].append(value)
        verdict = self.schedule.judge(evaluated.top1, evaluated.top5)
        if verdict.counts:
            self.best_epoch = self.epoch
            self.best_weights = self.weights() if self.schedule.keeps_best else None
        self.epoch, self.step, self.sums = self.epoch + 1, 0, Sums(self.accelerator.device)
        if verdict.stop:
            self.outcome = STOPPED
        elif self.epoch >= self.settings.epochs:
            self.outcome = FINISHED

    def _rate(self) -> float:
        return self.settings.lr * self.schedule.factor(self.epoch)

    def _has_diverged(self, trained: Result, evaluated: Result) -> bool:
        finite = np.isfinite(trained.loss) and np.isfinite(evaluated.loss)
        return not finite or (self.epoch > 0 and trained.loss > self.hopeless)

    @torch.no_grad()
    def evaluate(self) -> Result:
        """Return the result on the validation split, of the average where there is one."""
        sums = Sums(self.accelerator.device)
        self.model.eval()
        with self._evaluated():
            self._share_buffers()  # of the average where there is one: each process has its own
            for images, labels in self.val.epoch(0):
                logits = self.model(self._laid_out(images))
                sums.add(F.cross_entropy(logits, labels, reduction="sum"), logits, labels)
        self.model.train()
        return result(sums.over_processes(self.accelerator))

    def _share_buffers(self) -> None:
        """Give all processes the main one's running means, which may be of its own batches."""
        if self.accelerator.num_processes > 1:
            from accelerate.utils import broadcast

            broadcast(list(self.model.buffers()))

    def _evaluated(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext() if self.average is None else self.average.in_place()

    def weights(self) -> checkpoints.State:
        """Return the weights that are evaluated."""
        with self._evaluated():
            return checkpoints.weights_of(self.model)

    def reported_weights(self) -> checkpoints.State | None:
        """Return the weights that the results are of; None after divergence."""
        if self.outcome == DIVERGED:
            return None
        return self.best_weights if self.schedule.keeps_best else self.weights()

    # --- what is left behind ------------------------------------------------------------------

    def follow(self, every: int, folder: Path, state: checkpoints.State | None) -> None:
        """Let a tracker look on, from here or from where a checkpoint had it."""
        self.tracker = watching.make_tracker(
            self.model, every, self.size, self.accelerator.device, folder, state is not None
        )
        if state is not None:  # it may be that nobody looked on before
            done = {"step": self.epoch * self.batches.steps + self.step}
            self.tracker.load_state_dict(state["tracker"] or done)

    def write_curves(self, writer: Any) -> None:
        """Write the last epoch for TensorBoard."""
        for name in CURVES:
            writer.add_scalar(name, self.curves[name][-1], self.epoch)

    def result(self) -> Outcome:
        """Return the outcome of a run that has one."""
        chosen = (
            dict.fromkeys(CURVES, float("nan"))
            if self.outcome == DIVERGED
            else {name: values[self.best_epoch] for name, values in self.curves.items()}
        )
        settings = self.settings
        record: dict[str, Any] = {
            "network": settings.network,
            "method": settings.method,
            "seed": settings.seed,
            "lr": settings.lr,
            "batch_size": settings.batch_size,
            "schedule": settings.schedule,
            "init": settings.init,
            "top1": chosen["val_top1"],
            "top5": chosen["val_top5"],
            "val_loss": chosen["val_loss"],
            **{name: chosen[name] for name in ("train_top1", "train_top5", "train_loss")},
            "outcome": self.outcome,
            "epochs": self.epoch,
            "best_epoch": -1 if self.outcome == DIVERGED else self.best_epoch,
            "images_per_second": statistics.median(self.speeds or [float("nan")]),
        }
        return Outcome(record, {name: np.array(values) for name, values in self.curves.items()})

    def state_dict(self) -> checkpoints.State:
        """Return all that going on needs; every process must ask, the main one has the answer."""
        with self._evaluated():
            average = checkpoints.weights_of(self.model) if self.average is not None else None
        return {
            **self.identity,
            "model": checkpoints.weights_of(self.model),
            "optimizer": checkpoints.moments_of(self.model, self.optimizer),
            "average": average,
            "schedule": self.schedule.state_dict(),
            "epoch": self.epoch,
            "step": self.step,
            "sums": self.sums.over_processes(self.accelerator),
            "curves": {name: list(values) for name, values in self.curves.items()},
            "best_epoch": self.best_epoch,
            "best_weights": self.best_weights,
            "speeds": list(self.speeds),
            "outcome": self.outcome,
            "random": checkpoints.random_state(self.accelerator.device),
            "tracker": self.tracker.state_dict() if self.tracker is not None else None,
        }

    def load_state_dict(self, state: checkpoints.State) -> None:
        """Go on from a state."""
        checkpoints.load_moments(self.model, self.optimizer, state["optimizer"])
        if self.average is not None:
            checkpoints.load_weights(self.model, state["average"])
            self.average.restart()
        checkpoints.load_weights(self.model, state["model"])
        self.schedule.load_state_dict(state["schedule"])
        self.epoch, self.step = state["epoch"], state["step"]
        self.sums.load(state["sums"] if self.is_main else [0.0] * 4)
        self.curves = {name: list(state["curves"][name]) for name in CURVES}
        self.best_epoch, self.best_weights = state["best_epoch"], state["best_weights"]
        self.speeds, self.outcome = list(state["speeds"]), state["outcome"]
        checkpoints.load_random_state(state["random"], self.accelerator.device)


def _percent(found: Result) -> tuple[float, float, float]:
    return found.loss, 100 * found.top1, 100 * found.top5
