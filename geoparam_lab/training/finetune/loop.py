"""One run of fine-tuning: its steps, its accuracies, its time and its memory.

A run takes a minute or so, and has no checkpoint: one that is broken off begins anew.
"""

import contextlib
import itertools
import math
import time
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim.lr_scheduler import LambdaLR

from geoparam_lab.run_folder import Record
from geoparam_lab.training.finetune import pretrained
from geoparam_lab.training.finetune.enlarged_images import Batch, EnlargedImages
from geoparam_lab.training.finetune.settings import FinetuneSettings, FinetuneTask
from geoparam_lab.training.processes import check_processes, make_accelerator, prepare_torch
from geoparam_lab.training.schedules import find_factor
from geoparam_lab.training.tasks import Done

StepReport = Callable[[int, float], None]  # takes the step and steps per second

LOOK_EVERY = 50  # steps between two reads of the loss
CALIBRATION = 256  # images whose means IMN starts from
HEAD_BATCH, HEAD_RATE = 100, 1e-3  # for the output layer alone
MEGABYTE = 2**20


def train(
    task: FinetuneTask,
    images: EnlargedImages,
    weights: pretrained.State,
    report: StepReport | None = None,
) -> Done:
    """Fine-tune one network, and test it."""
    settings = task.settings
    accelerator = make_accelerator(settings.precision)
    check_processes(accelerator, settings.precision, settings.batch_size)
    device = accelerator.device
    with prepare_torch(settings.seed, False, device):
        model = prepare_network(settings, images, weights, device)
        parameters = sum(p.numel() for p in model.parameters())
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        measured, losses = run_steps(settings, model, images, report)
        if device.type == "cuda":
            measured["peak_mb"] = torch.cuda.max_memory_allocated(device) / MEGABYTE

        has_diverged = not is_sound(losses, images.classes)
        top1 = {"select_top1": math.nan, "top1": math.nan}
        if not has_diverged:
            with _autocast(settings, device):
                top1["select_top1"] = find_accuracy(model, images.held_out())
                top1["top1"] = find_accuracy(model, images.test())

    last = losses[-max(1, settings.steps // 20) :]  # a twentieth of the run
    record: Record = {
        "name": task.name,
        "method": settings.method,
        "batch_size": settings.batch_size,
        "lr": settings.lr,
        "seed": settings.seed,
        "steps": settings.steps,
        **top1,
        "train_loss": math.nan if has_diverged else float(last.mean()),
        "outcome": "diverged" if has_diverged else "finished",
        "parameters": parameters,
        **measured,
    }
    return Done([record], {task.name: {"train_loss": losses}})


def prepare_network(
    settings: FinetuneSettings,
    images: EnlargedImages,
    weights: pretrained.State,
    device: torch.device,
) -> nn.Module:
    """Return the network under its method, on the device."""
    model = pretrained.build_plain(settings, weights, images.classes).eval()
    model.to(device).to(memory_format=torch.channels_last)
    if settings.head_epochs:
        fit_head(model, images, settings.head_epochs)
    count = min(CALIBRATION, settings.images)
    part = min(32, count)
    batches = itertools.islice(images.train(part, seed=0), count // part)
    calibration = [batch for batch, _ in batches]
    model = pretrained.apply_method(model, settings, calibration)
    return model.to(memory_format=torch.channels_last)


def fit_head(model: Any, images: EnlargedImages, epochs: int) -> None:
    """Train the output layer alone, on features that the network in evaluation computes once."""
    classifier, model.classifier = model.classifier, nn.Identity()
    part = min(HEAD_BATCH, images.settings.images)
    batches = itertools.islice(images.train(part, seed=0), images.settings.images // part)
    with torch.no_grad():
        pairs = [(model(x), y) for x, y in batches]
    features, labels = (torch.cat(parts) for parts in zip(*pairs, strict=True))
    model.classifier = classifier

    head = classifier[-1]
    optimizer = torch.optim.Adam(head.parameters(), lr=HEAD_RATE)
    for _ in range(epochs):
        order = torch.randperm(len(labels)).to(labels.device)
        for chosen in order.split(part):
            optimizer.zero_grad()
            F.cross_entropy(head(features[chosen]), labels[chosen]).backward()
            optimizer.step()
    optimizer.zero_grad()


def run_steps(
    settings: FinetuneSettings,
    model: nn.Module,
    images: EnlargedImages,
    report: StepReport | None = None,
) -> tuple[Record, np.ndarray]:
    """Do all steps, or stop where the loss is hopeless; return time and memory, and losses."""
    optimizer = pretrained.make_optimizer(settings, model)
    schedule = LambdaLR(
        optimizer,
        lambda step: find_factor(step, settings.steps, settings.schedule, warmup=settings.warmup),
    )
    losses = torch.full((settings.steps,), math.nan, device=images.device)
    batches = images.train(settings.batch_size, settings.seed)
    saved = SavedMemory(model)
    start, cpu_start = time.perf_counter(), time.process_time()
    for step, (x, y) in enumerate(itertools.islice(batches, settings.steps)):
        counting = saved if step == 0 else contextlib.nullcontext()
        with counting, _autocast(settings, images.device):
            loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        losses[step] = loss.detach()
        done = step + 1
        if report is not None:
            report(done, done / (time.perf_counter() - start))
        if done % LOOK_EVERY == 0 and not is_sound(losses[step : step + 1], images.classes):
            break
    found = losses.cpu().numpy()  # waits for the device
    seconds = time.perf_counter() - start
    measured: Record = {
        "seconds": seconds,
        "cpu_seconds": time.process_time() - cpu_start,
        "steps_per_second": done / seconds,
        "saved_mb": saved.bytes / MEGABYTE,
    }
    if images.device.type == "cpu":
        measured["cpu_ms"] = 1e3 * measured["cpu_seconds"] / done
    return measured, found


def _autocast(settings: FinetuneSettings, device: torch.device) -> torch.autocast:
    return torch.autocast(device.type, torch.bfloat16, enabled=settings.precision == "bf16")


def is_sound(losses: Any, classes: int) -> bool:
    """Return whether the last loss is finite, and below ten times that of guessing."""
    return bool(losses[-1] <= 10 * math.log(classes))


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
        known = {parameter.data_ptr() for parameter in model.parameters()}

        def note(tensor: Tensor) -> Tensor:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in known:
                known.add(storage.data_ptr())
                self.bytes += storage.nbytes()
            return tensor

        super().__init__(note, lambda tensor: tensor)
