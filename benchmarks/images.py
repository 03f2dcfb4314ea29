"""What the training loop costs: its speed over that of a bare loop on one fixed batch.

    python -m benchmarks.images [--device cuda|cpu] [--methods bn,gmp+imn] [--compile]

VGG-6 on images of 32 by 32, batch 1024, bf16, channels last. The whole loop is the one that
`train` runs: batches made on the device (order, flips, scaling), metrics, a look at the loss every
50 steps, a progress display. The bare loop has the same network, precision, layout, code and
optimizer, and nothing else. They are taken in turn, an epoch of 50 steps at a time, since a loop
does not wait for the device after each. The CPU's numbers only show that it runs: a small network.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from benchmarks.timing import hardware, make_parser, medians, print_heading, print_row
from geoparam_lab.data.packed_images import PackedImages, Split
from geoparam_lab.training.images import preparation
from geoparam_lab.training.images.loop import Training
from geoparam_lab.training.images.settings import Settings
from geoparam_lab.training.processes import prepare_torch

STEPS, WARMUP = 50, 1  # of an epoch; epochs
CLASSES = 1000
TARGET = 0.95


def images(count: int) -> PackedImages:
    """Return noise in the form of ImageNet32."""
    random = torch.Generator().manual_seed(0)

    def split(count: int) -> Split:
        pixels = torch.randint(256, (count, 32, 32, 3), generator=random, dtype=torch.uint8)
        return Split(pixels, torch.randint(CLASSES, (count,), generator=random))

    return PackedImages(split(count), split(CLASSES), CLASSES, "noise")


def whole_loop(settings: Settings, source: PackedImages, accelerator: Any) -> Callable[[], None]:
    """Return an epoch of the loop that users run, progress display included."""
    told: list[tuple[int, int, float]] = []
    training = Training(settings, source, accelerator, lambda *now: told.append(now))

    def run() -> None:
        training.train_part()
        training.epoch += 1

    return run


def bare_loop(settings: Settings, source: PackedImages, accelerator: Any) -> Callable[[], None]:
    """Return as many steps on one batch."""
    device = accelerator.device
    model = preparation.make_network(settings, source, accelerator)
    optimizer = preparation.make_optimizer(settings, model)

    def logits(x: Tensor) -> Tensor:
        with torch.autocast(device.type, torch.bfloat16):  # inside, as Accelerate has it: compiled
            return model(x).float()  # code is a third slower with autocast around it

    forward = torch.compile(logits) if settings.compile else logits
    x, y = next(source.train(settings.batch_size, seed=0, device=device).epoch(0))

    def run() -> None:
        for _ in range(STEPS):
            loss = F.cross_entropy(forward(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    return run


def compare(settings: Settings, source: PackedImages, accelerator: Any, repeats: int) -> None:
    """Print one row: both steps in ms, images per second, and the loop's share of the speed."""
    device = accelerator.device
    with prepare_torch(settings.seed, settings.deterministic, device):
        loops = {
            "bare": bare_loop(settings, source, accelerator),
            "whole": whole_loop(settings, source, accelerator),
        }
        times = medians(loops, device.type, repeats, WARMUP)
    accelerator.free_memory()
    bare, whole = (times[name] / STEPS for name in ("bare", "whole"))
    kind = settings.method + (", compiled" if settings.compile else ", eager")
    speed = f"{settings.batch_size / whole:,.0f}"
    print_row(kind, f"{bare * 1e3:.2f}", f"{whole * 1e3:.2f}", speed, f"{bare / whole:.3f}")


def main() -> None:
    from accelerate import Accelerator

    options = {"methods": "bn,gmp+imn", "repeats": 5, "compile": False}
    given = make_parser(__doc__, **options).parse_args()
    on_cpu = given.device == "cpu"
    accelerator = Accelerator(mixed_precision="bf16", cpu=on_cpu)
    sizes: dict[str, Any] = {"batch_size": 1024}
    if on_cpu:
        sizes = {"batch_size": 64, "widths": (8, 8, 16, 16, 32, 32)}
    source = images(sizes["batch_size"] * STEPS)
    print(f"VGG-6, batch {sizes['batch_size']}, bf16; {hardware(given.device)}\n")
    print_heading("", "bare step, ms", "whole step, ms", "images/s", "speed over the bare loop's")
    for compiled in (False, True) if given.compile else (False,):
        for method in given.methods.split(","):
            settings = Settings(
                "vgg6", method, lr=0.01, seed=0, precision="bf16", compile=compiled, **sizes
            )
            compare(settings, source, accelerator, given.repeats)
    if not on_cpu:
        print(f"\ntarget: at least {TARGET}")


if __name__ == "__main__":
    main()
