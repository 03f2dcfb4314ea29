"""What tracking costs: a training step of ResNet-50 with a `BoundaryTracker` over one without.

    python -m benchmarks.tracker [--device cuda|cpu] [--repeats 12] [--compile]

All kinds of step are taken in turn, on one model with one optimizer, five at a time, since a loop
does not wait for the device after each. A record is made in every step: of all units, of 64 units
of each layer, and, to see what it costs, with a probe of 64 images.
"""

from functools import partial

import torch
from torch import nn

import geoparam as gp
from benchmarks.timing import (
    hardware,
    make_images,
    make_parser,
    medians,
    peak_memory,
    print_heading,
    print_row,
    training_step,
)

AT_A_TIME = 5


def resnet(device: str, converted: bool) -> nn.Module:
    from torchvision.models import resnet50

    model = resnet50(num_classes=1000)
    model = gp.convert_(model) if converted else model
    return model.to(device, memory_format=torch.channels_last)


def compare(device: str, repeats: int, converted: bool, compiled: bool) -> None:
    """Print one row: a plain step in ms, and each kind of tracking as a ratio to it."""
    model = resnet(device, converted)
    batch, size = (256, 224) if device == "cuda" else (8, 64)
    x, y = make_images(batch, size, device)
    step = training_step(model, x, y, "compiled" if compiled else "eager")
    probe, _ = make_images(64, size, device)
    trackers = {
        "tracked": gp.BoundaryTracker(model, example_inputs=probe[:2]),
        "64 units of each layer": gp.BoundaryTracker(model, example_inputs=probe[:2], units=64),
        "with a probe": gp.BoundaryTracker(model, probe=probe),
    }

    def tracked_step(tracker: gp.BoundaryTracker) -> None:
        step()
        tracker.step()

    functions = {name: partial(tracked_step, tracker) for name, tracker in trackers.items()}
    functions["plain"] = step
    times = medians(functions, device, repeats, calls=AT_A_TIME)
    weights = sum(p.numel() * p.element_size() for p in model.parameters())
    memory = peak_memory(trackers["tracked"].step, device) / weights
    kind = ("GmP" if converted else "BN") + (", compiled" if compiled else ", eager")
    ratios = [f"{times[name] / times['plain']:.3f}" for name in trackers]
    print_row(kind, f"{times['plain'] * 1e3:.1f} ms", *ratios, f"{memory:.2f}")


def main() -> None:
    given = make_parser(__doc__, repeats=12, compile=False).parse_args()
    torch.backends.cudnn.benchmark = True
    print(f"ResNet-50, {hardware(given.device)}; a record in every step, time over a plain step\n")
    kinds = ("tracked", "64 units of each layer", "probe of 64 images")
    print_heading("", "plain step", *kinds, "memory")
    for compiled in (False, True) if given.compile else (False,):
        for converted in (False, True):
            compare(given.device, given.repeats, converted, compiled)
    print("\nmemory: the peak of one record beyond the copy of the directions, over the weights'")


if __name__ == "__main__":
    main()
