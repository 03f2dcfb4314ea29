"""A run on images in progress: its epochs, what is reported of them, and what ends it."""

import itertools
import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

import geoparam as gp
from geoparam import sphere
from geoparam.analysis import QUANTITIES
from geoparam_lab.data.image_source import Batches, Source
from geoparam_lab.training import run_checkpoints, schedules
from geoparam_lab.training.images import preparation
from geoparam_lab.training.images.angle_metric import AngleMetric
from geoparam_lab.training.images.plateau import PLATEAUS, Plateau
from geoparam_lab.training.images.settings import Settings
from geoparam_lab.training.network_training import DIVERGED, FINISHED, NetworkTraining, Outcome
from geoparam_lab.training.processes import prepare_run
from geoparam_lab.training.tasks import Tick

if TYPE_CHECKING:
    from accelerate import Accelerator

BOUNDARIES = "boundaries.npy"  # the tracker's history
PROBE = 64  # images on which a tracker sees dead units and regions
FEWEST_STEPS = 100  # steps; a run with fewer never counts as collapsed, since it starts at chance
STOPPED, COLLAPSED = "stopped early", "collapsed"  # further outcomes


class Result(NamedTuple):
    """Means over some images; `top1` and `top5` in percent."""

    loss: float
    top1: float
    top5: float


MEASURES = Result._fields


class Sums:
    """Sums over the images of this process: loss, top-1 and top-5 hits, and how many they are.

    They are on the device: adding a batch never waits.
    """

    def __init__(self, device: torch.device) -> None:
        self.totals = torch.zeros(4, dtype=sphere.wide_type(device), device=device)

    @torch.no_grad()
    def add(self, loss: Tensor, logits: Tensor, labels: Tensor) -> None:
        """Add a batch: its loss, summed over images, and its hits."""
        guesses = logits.topk(min(5, logits.shape[1])).indices
        right = guesses == labels.unsqueeze(1)
        hits = torch.stack([right[:, 0].sum(), right.sum()])
        self.totals[:3] += torch.cat([loss.detach().reshape(1), hits])
        self.totals[3] += len(labels)

    def average(self, accelerator: "Accelerator") -> Result:
        """Return the means over all processes; a collective call."""
        loss, top1, top5, count = accelerator.reduce(self.totals, "sum").tolist()
        return Result(loss / count, 100 * top1 / count, 100 * top5 / count)


def find_epoch(accuracies: Sequence[float], level: float) -> int | None:
    """Return the epoch, from 1 on, at which a level was reached and not lost again.

    Example:
        >>> [find_epoch([30, 41, 39, 42, 43], level) for level in (20, 40, 50)]
        [1, 4, None]
    """
    below = [epoch for epoch, accuracy in enumerate(accuracies, start=1) if accuracy < level]
    last = below[-1] if below else 0
    return last + 1 if last < len(accuracies) else None


class Training(NetworkTraining):
    """A run in progress; its parts are epochs."""

    PLAIN = ("epoch", "best_epoch", "best_weights", "seconds", "final", "outcome", "curves")

    def __init__(
        self,
        settings: Settings,
        source: Source,
        accelerator: "Accelerator",
        tick: Tick | None = None,
    ) -> None:
        accelerator.gradient_accumulation_steps = settings.accumulate
        accelerator.step = 0  # an earlier run may have stopped within an accumulation
        model = preparation.make_network(settings, source, accelerator)
        optimizer = preparation.make_optimizer(settings, model)
        super().__init__(settings, accelerator, model, optimizer, source.classes, tick)
        self.classes = source.classes

        place: dict[str, Any] = {
            "device": accelerator.device,
            "rank": accelerator.process_index,
            "world": accelerator.num_processes,
        }
        batch, select = settings.batch_size, settings.select
        part = source.hold_out(select) if select else source
        self.batches = part.train(batch, seed=settings.seed, crop=settings.crop, **place)
        self.validation = part.val(batch, **place)  # evaluated after every epoch
        self.test = source.val(batch, **place) if select else None  # evaluated at the end

        self.epoch = 0
        self.sums = Sums(accelerator.device)
        self.split = "select" if select else "val"
        names = [f"{split}_{name}" for split in ("train", self.split) for name in MEASURES]
        self.curves: dict[str, list[float]] = {name: [] for name in (*names, "lr", "seconds")}
        self.final = [math.nan] * len(MEASURES)  # of the unseen images
        self.plateau: Plateau | None = None
        if settings.schedule in PLATEAUS:
            self.plateau = Plateau(settings.schedule, settings.patience)
        self.best_epoch = -1  # the epoch that is reported: the last, where the best is not kept
        self.best_weights: run_checkpoints.State | None = None  # where they are kept
        self.tracker: gp.BoundaryTracker | None = None

    @property
    def count(self) -> int:
        return self.epoch + 1

    @property
    def left(self) -> float:
        return 1 - (self.epoch + self.step / self.batches.steps) / self.settings.epochs

    @property
    def step_size(self) -> int:
        return self.settings.batch_size

    def load_part(self) -> Iterable[tuple[Tensor, ...]]:
        """Return the batches of an epoch."""
        self.step = 0
        return self.batches.epoch(self.epoch)

    def train_on(self, *batch: Tensor) -> None:
        images, labels = batch
        parts = self.settings.accumulate
        for x, y in zip(images.chunk(parts), labels.chunk(parts), strict=True):
            with self.accelerator.accumulate(self.wrapped_model):
                logits = self.wrapped_model(x)
                loss = F.cross_entropy(logits, y, label_smoothing=self.settings.label_smoothing)
                self.accelerator.backward(loss)
                if self.accelerator.sync_gradients:
                    self.optimizer.step()
                    self.optimizer.zero_grad()
            self.sums.add(loss.detach() * len(y), logits, y)
        if self.tracker is not None:
            self.tracker.step()

    def find_factor(self) -> float:
        steps, settings = self.batches.steps, self.settings
        rise = max(settings.warmup * settings.epochs * steps, 1)
        warmth = min((self.epoch * steps + self.step + 1) / rise, 1.0)
        if self.plateau is not None:
            return warmth * self.plateau.factor
        epoch = self.epoch + self.step / steps
        return warmth * schedules.find_epoch_factor(
            settings.schedule, settings.epochs, settings.warmup, epoch
        )

    def has_diverged(self) -> bool:
        return not math.isfinite(self.sums.average(self.accelerator).loss)

    def end_part(self) -> None:
        """Evaluate, and decide how to go on."""
        trained = self.sums.average(self.accelerator)
        evaluated = self.evaluate(self.validation)
        is_hopeless = self.epoch > 0 and trained.loss > self.hopeless
        if is_hopeless or not math.isfinite(trained.loss + evaluated.loss):
            self.outcome = DIVERGED
            return

        values = (*trained, *evaluated, self.settings.lr * self.factor, self.seconds)
        for curve, value in zip(self.curves.values(), values, strict=True):
            curve.append(value)
        stops = self._judge(evaluated)
        self.epoch += 1
        self.sums = Sums(self.device)
        if stops or self.epoch >= self.settings.epochs:
            self._evaluate_reported()
            self.outcome = STOPPED if stops else FINISHED
            if self._has_collapsed():
                self.outcome = COLLAPSED

    def _judge(self, evaluated: Result) -> bool:
        """Keep the weights of this epoch if they are to be reported; return whether to stop."""
        if self.plateau is None:
            self.best_epoch = self.epoch
            return False
        is_best, stops = self.plateau.judge(getattr(evaluated, self.plateau.measure))
        if is_best or not self.plateau.keeps_best:
            self.best_epoch = self.epoch
        if is_best and self.plateau.keeps_best:
            self.best_weights = run_checkpoints.get_weights(self.model)
        return stops

    def _evaluate_reported(self) -> None:
        """Return to the best weights where they are kept, and evaluate what is reported.

        There is a second evaluation where statistics are recomputed, or images were kept unseen.
        """
        if self.plateau is not None and self.plateau.keeps_best:
            run_checkpoints.load_weights(self.model, self.best_weights)
            self.best_weights = None
        if self.settings.recalibrate:
            self._recalibrate()
        if self.test is not None:
            self.final = list(self.evaluate(self.test))

    def _recalibrate(self) -> None:
        """Recompute running statistics on some training batches, and evaluate again."""
        buffers = self.model.named_buffers()
        if not any(name.endswith("running_mean") for name, _ in buffers):
            return
        epochs = map(self.batches.epoch, itertools.count(self.epoch))
        batches = itertools.chain.from_iterable(epochs)
        some = itertools.islice(batches, self.settings.recalibrate)
        with torch.compiler.set_stance("force_eager"):  # else all is compiled once more
            gp.recalibrate_(self.model, (images for images, _ in some))
        for name, value in zip(MEASURES, self.evaluate(self.validation), strict=True):
            self.curves[f"{self.split}_{name}"][self.best_epoch] = value

    def _has_collapsed(self) -> bool:
        """Return whether the reported epoch is at chance: its accuracy and its training loss.

        Chance is a top-1 within three standard errors of 1 / classes, on the images that were
        watched, and a loss no lower than 99 % of log(classes).
        """
        if self.epoch * self.batches.steps < FEWEST_STEPS:
            return False
        chance = 1 / self.classes
        error = math.sqrt(chance * (1 - chance) / self.validation.examples)
        names = ("train_loss", f"{self.split}_top1")
        loss, top1 = (self.curves[name][self.best_epoch] for name in names)
        return top1 / 100 <= chance + 3 * error and loss >= 0.99 * math.log(self.classes)

    @torch.no_grad()
    def evaluate(self, batches: Batches) -> Result:
        """Return the result on some images, with the main process's running means in all."""
        sums = Sums(self.device)
        if self.accelerator.num_processes > 1:  # on CPUs BatchNorm is not synchronised
            from accelerate.utils import broadcast

            broadcast(list(self.model.buffers()))
        self.model.eval()
        for images, labels in batches.epoch(0):
            logits = self.model(images)
            sums.add(F.cross_entropy(logits, labels, reduction="sum"), logits, labels)
        self.model.train()
        return sums.average(self.accelerator)

    def start_tracker(self, every: int, folder: Path, state: run_checkpoints.State | None) -> None:
        """Start a tracker that writes to the folder, or continue the one of a checkpoint."""
        folder.mkdir(parents=True, exist_ok=True)
        file = folder / BOUNDARIES
        images, _ = next(iter(self.validation.epoch(0)))
        probe = images[:PROBE]
        self.tracker = gp.BoundaryTracker(
            self.model,
            every,
            probe=probe,
            quantities=[*QUANTITIES, AngleMetric()],
            file=file,
            resume=True,
        )
        if state is not None:  # the run before may have had no tracker
            done = {"step": self.epoch * self.batches.steps}
            self.tracker.load_state_dict(state["tracker"] or done)

    def result(self) -> Outcome:
        settings, has_diverged = self.settings, self.outcome == DIVERGED
        results = {
            name: math.nan if has_diverged else curve[self.best_epoch]
            for name, curve in self.curves.items()
            if name.endswith(MEASURES)
        }
        if settings.select:
            results |= {
                f"val_{name}": value for name, value in zip(MEASURES, self.final, strict=True)
            }
        names = ("network", "method", "seed", "lr", "batch_size", "schedule", "init")
        record: dict[str, Any] = {
            **{name: getattr(settings, name) for name in names},
            "top1": results.pop("val_top1"),
            "top5": results.pop("val_top5"),
            **results,
            "outcome": self.outcome,
            "epochs": self.epoch,
            "best_epoch": -1 if has_diverged else self.best_epoch,
            "images_per_second": self._find_speed(),
            "processes": self.accelerator.num_processes,
        }
        if not has_diverged:
            record |= self._find_times()
        curves = {
            name: np.array(curve) for name, curve in self.curves.items() if name != "seconds"
        }
        return Outcome(record, curves)

    def _find_speed(self) -> float:
        """Return images per second of the median epoch; NaN where none has ended."""
        if not self.epoch:
            return math.nan
        duration = float(np.median(np.diff([0.0, *self.curves["seconds"]])))
        return self.batches.steps * self.settings.batch_size / duration

    def _find_times(self) -> dict[str, float]:
        """Return epochs and seconds to each accuracy that was reached and not lost again."""
        times: dict[str, float] = {}
        for level in self.settings.time_to:
            epoch = find_epoch(self.curves[f"{self.split}_top1"], level)
            if epoch is not None:
                times[f"epochs_to_{level:g}"] = epoch
                times[f"seconds_to_{level:g}"] = self.curves["seconds"][epoch - 1]
        return times

    def state_dict(self) -> run_checkpoints.State:
        return super().state_dict() | {
            "plateau": self.plateau.state_dict() if self.plateau is not None else None,
            "tracker": self.tracker.state_dict() if self.tracker is not None else None,
        }

    def load_state_dict(self, state: run_checkpoints.State) -> None:
        if self.plateau is not None:
            self.plateau.load_state_dict(state["plateau"])
        super().load_state_dict(state)

    def keep(self, folder: Path) -> None:
        """Write a checkpoint, and the weights of a run that has ended."""
        state = self.state_dict()  # all processes gather
        if not self.is_main:
            return
        if self.outcome not in (None, DIVERGED):
            run_checkpoints.write(folder / run_checkpoints.WEIGHTS, state["model"])
        run_checkpoints.write(folder / run_checkpoints.CHECKPOINT, state)


def train(
    settings: Settings,
    source: Source,
    folder: Path,
    *,
    accelerator: "Accelerator | None" = None,
    track: int | None = None,
    tick: Tick | None = None,
) -> Outcome:
    """Train a network, from the checkpoint in `folder` if there is one.

    With several processes all of them call it, and all get the outcome; only the main one writes.
    A kill costs an epoch at most and changes nothing.

    Args:
        settings: everything that decides the numbers.
        source: the images.
        folder: for the checkpoint, the final weights (``weights.pt``) and the tracker's file. A
            checkpoint in it is of the same settings and images.
        accelerator: one with options of its own, such as sharding; made here if None.
        track: steps between two records of a `BoundaryTracker`; None for no tracker.
        tick: called after every step with the epoch, the share that is left, and the speed.
    """
    with prepare_run(settings, settings.precision, accelerator) as prepared:
        training = Training(settings, source, prepared, tick)
        state = training.resume(folder)
        is_cut = state is None or (track is None and training.outcome is None)
        if is_cut and training.is_main:  # a killed run's history, which is not gone on with
            (folder / BOUNDARIES).unlink(missing_ok=True)
        if track is not None:
            training.start_tracker(track, folder, state)
        outcome = training.finish(folder)
        if training.is_main:
            (folder / run_checkpoints.FINISHED).touch()
        return outcome
