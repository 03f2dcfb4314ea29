"""One run of fine-tuning: its steps, its accuracies, its time and its memory.

A run takes a minute or so, and has no checkpoint: one that is broken off begins anew.
"""

import contextlib
import itertools
import math
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from geoparam_lab.run_folder import Record
from geoparam_lab.training.finetune import pretrained
from geoparam_lab.training.finetune.enlarged_images import Batch, EnlargedImages
from geoparam_lab.training.finetune.settings import FinetuneSettings
from geoparam_lab.training.network_training import FINISHED, Outcome, StepTraining
from geoparam_lab.training.processes import prepare_run
from geoparam_lab.training.schedules import find_factor
from geoparam_lab.training.tasks import Tick

if TYPE_CHECKING:
    from accelerate import Accelerator

CALIBRATION = 256  # images whose means IMN starts from
MEGABYTE = 2**20
_REPORTED = ("method", "batch_size", "lr", "seed", "steps")


class FinetuneTraining(StepTraining):
    """A run in progress; it has one part, all its steps."""

    def __init__(
        self,
        settings: FinetuneSettings,
        images: EnlargedImages,
        weights: pretrained.State,
        accelerator: "Accelerator",
        tick: Tick | None = None,
    ) -> None:
        self.images = images
        model = prepare_network(settings, images, weights, accelerator.device)
        self.parameters = sum(p.numel() for p in model.parameters())
        optimizer = pretrained.make_optimizer(settings, model)
        super().__init__(settings, accelerator, model, optimizer, images.classes, tick)
        self.costs: dict[str, float] = {}  # time and memory
        self.measured_from = math.nan  # when the second step began
        self.saved = SavedMemory(self.model)
        self.top1 = {"select_top1": math.nan, "top1": math.nan}

    @property
    def step_size(self) -> int:
        return self.settings.batch_size

    def load_part(self) -> Iterator[tuple[Tensor, ...]]:
        batches = self.images.train(self.settings.batch_size, self.settings.seed)
        return itertools.islice(batches, self.settings.steps)

    def find_factor(self) -> float:
        settings = self.settings
        return find_factor(self.step, settings.steps, settings.schedule, warmup=settings.warmup)

    def train_on(self, *batch: Tensor) -> None:
        if self.step == 1:
            self._start_measuring()
        x, y = batch
        with contextlib.nullcontext() if self.step else self.saved:
            loss = F.cross_entropy(self.wrapped_model(x), y)
        self.accelerator.backward(loss)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.losses[self.step] = loss.detach()

    def _start_measuring(self) -> None:
        """Forget the first step, in which cudnn tries its algorithms: for speed and memory."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
            torch.cuda.reset_peak_memory_stats(self.device)
        self.measured_from = time.perf_counter()

    def train_part(self) -> None:
        start = time.process_time()
        super().train_part()
        measured = time.perf_counter() - self.measured_from
        cpu_seconds = time.process_time() - start
        self.costs = {
            "seconds": self.seconds,
            "cpu_seconds": cpu_seconds,
            "steps_per_second": (self.step - 1) / measured,
            "saved_mb": self.saved.bytes / MEGABYTE,
        }
        if self.device.type == "cpu":
            self.costs["cpu_ms"] = 1e3 * cpu_seconds / self.step
        if self.device.type == "cuda":
            self.costs["peak_mb"] = torch.cuda.max_memory_allocated(self.device) / MEGABYTE

    def end_part(self) -> None:
        self.top1["select_top1"] = find_accuracy(self.model, self.images.held_out())
        self.top1["top1"] = find_accuracy(self.model, self.images.test())
        self.outcome = FINISHED

    def keep(self, folder: Path) -> None:
        """Write nothing."""

    def result(self) -> Outcome:
        losses = self.gather_losses()
        record: Record = {
            **{name: getattr(self.settings, name) for name in _REPORTED},
            **self.top1,
            "train_loss": self.average_last(losses),
            "outcome": self.outcome,
            "parameters": self.parameters,
            **self.costs,
        }
        return Outcome(record, {"train_loss": losses})


def train(
    settings: FinetuneSettings,
    data: tuple[Any, pretrained.State],
    folder: Path,
    *,
    tick: Tick | None = None,
) -> Outcome:
    """Fine-tune one network, and test it; `data` is the images and the pretrained weights."""
    source, weights = data
    with prepare_run(settings, settings.precision) as accelerator:
        images = EnlargedImages(source, settings, accelerator.device)
        return FinetuneTraining(settings, images, weights, accelerator, tick).finish(folder)


def prepare_network(
    settings: FinetuneSettings,
    images: EnlargedImages,
    weights: pretrained.State,
    device: torch.device,
) -> nn.Module:
    """Return the network under its method, on the device."""
    model = pretrained.build_plain(settings, weights, images.classes).eval()
    model.to(device).to(memory_format=torch.channels_last)
    count = min(CALIBRATION, settings.images)
    part = min(32, count)
    batches = itertools.islice(images.train(part, seed=0), count // part)
    calibration = [batch for batch, _ in batches]
    model = pretrained.apply_method(model, settings, calibration)
    return model.to(memory_format=torch.channels_last)


@torch.no_grad()
def find_accuracy(model: nn.Module, batches: Iterable[Batch]) -> float:
    """Return the share of images, in percent, whose class is the network's first choice."""
    model.eval()
    right = count = 0
    for x, y in batches:
        right += (model(x).argmax(1) == y).sum()
        count += len(y)
    return 100 * float(right) / count


class SavedMemory(torch.autograd.graph.saved_tensors_hooks):
    """Counts the bytes that a forward pass saves for the backward pass, parameters aside."""

    def __init__(self, model: nn.Module) -> None:
        self.bytes = 0
        counted = {parameter.data_ptr() for parameter in model.parameters()}

        def count(tensor: Tensor) -> Tensor:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in counted:
                counted.add(storage.data_ptr())
                self.bytes += storage.nbytes()
            return tensor

        super().__init__(count, lambda tensor: tensor)
