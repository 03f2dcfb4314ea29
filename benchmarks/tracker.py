"""What tracking costs: a training step of ResNet-50 with a `BoundaryTracker` over one without.

    python -m benchmarks.tracker [--device cuda|cpu] [--repeats 12] [--compile]

All kinds of step are taken in turn, on one model with one optimizer, five at a time, since a loop
does not wait for the device after each. A record is made in every step: of all units, of 64 units
of each layer, and, to see what it costs, with a probe of 64 images.
"""

import argparse
from collections.abc import Callable
from functools import partial

import torch
from torch import nn

import geoparam as gp
from benchmarks.timing import hardware, medians, peak_memory, training_step

AT_A_TIME = 5


def resnet(device: str, converted: bool) -> nn.Module:
    from torchvision.models import resnet50

    model = resnet50(num_classes=1000)
    model = gp.convert_(model) if converted else model
    return model.to(device, memory_format=torch.channels_last)


def step_of(model: nn.Module, device: str, compiled: bool) -> Callable[[], None]:
    """Return one step of SGD on a fixed batch, in bfloat16 on a GPU."""
    batch, size = (256, 224) if device == "cuda" else (8, 64)
    x = torch.randn(batch, 3, size, size, device=device)
    x, y = (
        x.contiguous(memory_format=torch.channels_last),
        torch.randint(1000, (batch,)).to(device),
    )
    return training_step(model, x, y, "compiled" if compiled else "eager")


def compare(device: str, repeats: int, converted: bool, compiled: bool) -> None:
    """Print one row: a plain step in ms, and each kind of tracking as a ratio to it."""
    model = resnet(device, converted)
    step = step_of(model, device, compiled)
    size = 224 if device == "cuda" else 64
    images = torch.randn(64, 3, size, size, device=device)
    images = images.contiguous(memory_format=torch.channels_last)
    trackers = {
        "tracked": gp.BoundaryTracker(model, example_inputs=images[:2]),
        "64 units of each layer": gp.BoundaryTracker(model, example_inputs=images[:2], units=64),
        "with a probe": gp.BoundaryTracker(model, probe=images),
    }

    def steps(tracker: gp.BoundaryTracker | None = None) -> None:
        for _ in range(AT_A_TIME):
            step()
            if tracker is not None:
                tracker.step()

    functions = {"plain": steps}
    functions |= {name: partial(steps, tracker) for name, tracker in trackers.items()}
    times = medians(functions, device, repeats)
    weights = sum(p.numel() * p.element_size() for p in model.parameters())
    memory = peak_memory(trackers["tracked"].step, device) / weights
    ratios = " | ".join(f"{times[name] / times['plain']:.3f}" for name in trackers)
    plain = f"{times['plain'] / AT_A_TIME * 1e3:.1f} ms" if device == "cuda" else "1"
    kind = ("GmP" if converted else "BN") + (", compiled" if compiled else ", eager")
    print(f"| {kind} | {plain} | {ratios} | {memory:.2f} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--repeats", type=int, default=12)
    parser.add_argument("--compile", action="store_true", help="compiled steps as well")
    given = parser.parse_args()
    torch.backends.cudnn.benchmark = True
    print(f"ResNet-50, {hardware(given.device)}; a record in every step, time over a plain step\n")
    print("| | plain step | tracked | 64 units of each layer | probe of 64 images | memory |")
    print("| --- | --- | --- | --- | --- | --- |")
    for compiled in (False, True) if given.compile else (False,):
        for converted in (False, True):
            compare(given.device, given.repeats, converted, compiled)
    print("\nmemory: the peak of one record beyond the copy of the directions, over the weights'")


if __name__ == "__main__":
    main()
