"""A run under way: steps, epochs, and the state from which it can go on.

A step launches its work on the device and waits for nothing. Loss and hits are summed there and
looked at every 50 steps, to notice a run that has diverged, and at the end of an epoch.

What a run is, at one moment, is `Training.state_dict`: weights, moments, schedule, average, epoch
and step, sums and curves so far, random numbers. The images of a step depend on seed, epoch and
step alone. So a run that goes on from a checkpoint makes the same steps again, and on one device
in deterministic mode (on a CPU always) the same bits.
"""

import contextlib
import itertools
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import geoparam as gp
from geoparam_lab.data.downsampled import Batches, Source
from geoparam_lab.training.images import callbacks, preparation, run_checkpoints, schedules
from geoparam_lab.training.images.averaging import Average
from geoparam_lab.training.images.metrics import Result, Sums, reached, result
from geoparam_lab.training.images.settings import Outcome, Settings

if TYPE_CHECKING:
    from accelerate import Accelerator

LOOK_EVERY = 50  # steps between two looks at the loss
HOPELESS = 10.0  # times log(classes), the loss of guessing: a mean loss above it is divergence
MEASURES = ("loss", "top1", "top5")
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
        tick: callbacks.Tick | None = None,
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
        batch, select = settings.batch_size, settings.select
        part = source.hold_out(select) if select else source
        self.batches = part.train(batch, seed=settings.seed, crop=settings.crop, **place)
        self.watched = part.val(batch, **place)  # evaluated after every epoch
        self.unseen = source.val(batch, **place) if select else None  # evaluated at the end
        self.schedule = schedules.NAMES[settings.schedule](settings.epochs, settings.warmup)
        self.hopeless = HOPELESS * float(np.log(source.classes))
        self.epoch = self.step = 0  # steps of the epoch that are done
        self.sums = Sums(accelerator.device)
        splits = ("train", "select" if select else "val")
        names = [f"{split}_{measure}" for split in splits for measure in MEASURES]
        self.curves: dict[str, list[float]] = {name: [] for name in (*names, "lr", "seconds")}
        self.final = [float("nan")] * len(MEASURES)  # of the unseen images
        self.best_epoch = -1
        self.best_weights: run_checkpoints.State | None = None
        self.seconds = 0.0  # of training
        self._since = 0.0
        self.outcome: str | None = None
        self.tracker: gp.BoundaryTracker | None = None
        self._ticker = callbacks.Ticker(tick if self.is_main else None)

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
        self._ticker.restart()
        self._lap()
        for batch in self.batches.epoch(self.epoch, self.step):
            self._set_rates()
            self.train_on(*batch)
            self.step += 1
            self._ticker(self.epoch, self.step, self.settings.batch_size)
            if self.step % LOOK_EVERY == 0 and not self._is_finite():
                self.outcome = DIVERGED
                return
            self.seconds += self._lap()
            yield self.step
            self._lap()  # a checkpoint is no training
        if not self._is_finite():  # which waits for the device
            self.outcome = DIVERGED
        self.seconds += self._lap()

    def _lap(self) -> float:
        """Return the seconds since the last call."""
        before, self._since = self._since, time.perf_counter()
        return self._since - before

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

    def _factor(self, step: int) -> float:
        """Return what rates are multiplied by in a step of this epoch."""
        steps, settings = self.batches.steps, self.settings
        rise = max(settings.warmup * settings.epochs * steps, 1)
        warmth = min((self.epoch * steps + step + 1) / rise, 1.0)
        return warmth * self.schedule.factor(self.epoch + step / steps)

    def _set_rates(self) -> None:
        factor = self._factor(self.step)
        for group, rate in zip(self.optimizer.param_groups, self.rates, strict=True):
            group["lr"] = rate * factor

    def _is_finite(self) -> bool:
        return bool(np.isfinite(self.sums.over_processes(self.accelerator)[0]))

    # --- epochs -------------------------------------------------------------------------------

    def end_epoch(self) -> None:
        """Evaluate, and decide how to go on."""
        trained = result(self.sums.over_processes(self.accelerator))
        evaluated = self.evaluate(self.watched)
        if self._has_diverged(trained, evaluated):
            self.outcome = DIVERGED
            return
        lr = self.settings.lr * self._factor(self.step - 1)
        values = (*_percent(trained), *_percent(evaluated), lr, self.seconds)
        for curve, value in zip(self.curves.values(), values, strict=True):
            curve.append(value)
        verdict = self.schedule.judge(evaluated.top1, evaluated.top5)
        if verdict.counts:
            self.best_epoch = self.epoch
            self.best_weights = self.weights() if self.schedule.keeps_best else None
        self.epoch, self.step, self.sums = self.epoch + 1, 0, Sums(self.accelerator.device)
        if verdict.stop or self.epoch >= self.settings.epochs:
            self._finish()
            self.outcome = STOPPED if verdict.stop else FINISHED

    def _finish(self) -> None:
        """Evaluate once more where statistics are recomputed, or images were kept unseen."""
        tracked = any(name.endswith("running_mean") for name, _ in self.model.named_buffers())
        if self.settings.recalibrate and tracked:
            self._recalibrate()
            curves = list(self.curves.values())[len(MEASURES) :]
            for curve, value in zip(curves, _percent(self.evaluate(self.watched)), strict=False):
                curve[-1] = value
        if self.unseen is not None:
            self.final = list(_percent(self.evaluate(self.unseen)))

    def _recalibrate(self) -> None:
        """Recompute running statistics, of the average where there is one, on training images."""
        epochs = map(self.batches.epoch, itertools.count(self.epoch))
        batches = itertools.islice(
            itertools.chain.from_iterable(epochs), self.settings.recalibrate
        )
        with self._evaluated():
            gp.recalibrate_(self.model, (self._laid_out(images) for images, _ in batches))
            if self.average is not None:
                self.average.restart()

    def _has_diverged(self, trained: Result, evaluated: Result) -> bool:
        finite = np.isfinite(trained.loss) and np.isfinite(evaluated.loss)
        return not finite or (self.epoch > 0 and trained.loss > self.hopeless)

    @torch.no_grad()
    def evaluate(self, batches: Batches) -> Result:
        """Return the result on some images, of the average where there is one."""
        sums = Sums(self.accelerator.device)
        self.model.eval()
        with self._evaluated():
            self._share_buffers()  # of the average where there is one: each process has its own
            for images, labels in batches.epoch(0):
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

    def weights(self) -> run_checkpoints.State:
        """Return the weights that are evaluated."""
        with self._evaluated():
            return run_checkpoints.weights_of(self.model)

    def reported_weights(self) -> run_checkpoints.State | None:
        """Return the weights that the results are of; None after divergence."""
        if self.outcome == DIVERGED:
            return None
        return self.best_weights if self.schedule.keeps_best else self.weights()

    # --- what is left behind ------------------------------------------------------------------

    def follow(self, every: int, folder: Path, state: run_checkpoints.State | None) -> None:
        """Let a tracker look on, from here or from where a checkpoint had it."""
        self.tracker = callbacks.make_tracker(
            self.model, every, self.size, self.accelerator.device, folder, state is not None
        )
        if state is not None:  # it may be that nobody looked on before
            done = {"step": self.epoch * self.batches.steps + self.step}
            self.tracker.load_state_dict(state["tracker"] or done)

    def write_curves(self, writer: Any) -> None:
        """Write the last epoch for TensorBoard."""
        for name, curve in self.curves.items():
            writer.add_scalar(name, curve[-1], self.epoch)

    def result(self) -> Outcome:
        """Return the outcome of a run that has one."""
        settings, diverged = self.settings, self.outcome == DIVERGED
        chosen = {
            name: float("nan") if diverged else curve[self.best_epoch]
            for name, curve in self.curves.items()
        }
        if settings.select:
            chosen |= {
                f"val_{name}": value for name, value in zip(MEASURES, self.final, strict=True)
            }
        results = {name: value for name, value in chosen.items() if name.endswith(MEASURES)}
        names = ("network", "method", "seed", "lr", "batch_size", "schedule", "init")
        duration = float(np.median(np.diff([0.0, *self.curves["seconds"]]))) if self.epoch else 0.0
        images = self.batches.steps * settings.batch_size
        record: dict[str, Any] = {
            **{name: getattr(settings, name) for name in names},
            "top1": results.pop("val_top1"),
            "top5": results.pop("val_top5"),
            **results,
            "outcome": self.outcome,
            "epochs": self.epoch,
            "best_epoch": -1 if diverged else self.best_epoch,
            "images_per_second": images / duration if duration else float("nan"),
            **({} if diverged else self._times()),
        }
        return Outcome(record, {name: np.array(values) for name, values in self.curves.items()})

    def _times(self) -> dict[str, float]:
        """Return epochs and seconds to each accuracy that was reached for good."""
        top1 = self.curves["select_top1" if self.settings.select else "val_top1"]
        epochs = {level: reached(top1, level) for level in self.settings.time_to}
        found: dict[str, float] = {}
        for level, epoch in epochs.items():
            if epoch is not None:
                found[f"epochs_to_{level:g}"] = epoch
                found[f"seconds_to_{level:g}"] = self.curves["seconds"][epoch - 1]
        return found

    def state_dict(self) -> run_checkpoints.State:
        """Return all that going on needs; every process must ask, the main one has the answer."""
        with self._evaluated():
            average = run_checkpoints.weights_of(self.model) if self.average is not None else None
        return {
            **self.identity,
            "model": run_checkpoints.weights_of(self.model),
            "optimizer": run_checkpoints.moments_of(self.model, self.optimizer),
            "average": average,
            "schedule": self.schedule.state_dict(),
            "epoch": self.epoch,
            "step": self.step,
            "sums": self.sums.over_processes(self.accelerator),
            "curves": {name: list(values) for name, values in self.curves.items()},
            "best_epoch": self.best_epoch,
            "best_weights": self.best_weights,
            "seconds": self.seconds,
            "final": list(self.final),
            "outcome": self.outcome,
            "random": run_checkpoints.random_state(self.accelerator.device),
            "tracker": self.tracker.state_dict() if self.tracker is not None else None,
        }

    def load_state_dict(self, state: run_checkpoints.State) -> None:
        """Go on from a state."""
        run_checkpoints.load_moments(self.model, self.optimizer, state["optimizer"])
        if self.average is not None:
            run_checkpoints.load_weights(self.model, state["average"])
            self.average.restart()
        run_checkpoints.load_weights(self.model, state["model"])
        self.schedule.load_state_dict(state["schedule"])
        self.epoch, self.step = state["epoch"], state["step"]
        self.sums.load(state["sums"] if self.is_main else [0.0] * 4)
        self.curves = {name: list(state["curves"][name]) for name in self.curves}
        self.best_epoch, self.best_weights = state["best_epoch"], state["best_weights"]
        self.seconds, self.final = state["seconds"], list(state["final"])
        self.outcome = state["outcome"]
        run_checkpoints.load_random_state(state["random"], self.accelerator.device)


def _percent(found: Result) -> tuple[float, float, float]:
    return found.loss, 100 * found.top1, 100 * found.top5
