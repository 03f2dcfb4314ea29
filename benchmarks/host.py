"""What a layer costs the host: microseconds of Python and torch per layer and training step.

    python -m benchmarks.host [--layers 50] [--steps 200]

Layers are 1x1 convolutions of 8 channels on 4 images of 4x4, on one CPU thread, so that arithmetic
is next to nothing and calls are all there is: forward, backward and SGD (foreach, momentum 0.9).
What a GPU waits for at small batches is this. Cases take turns, so that drift hits all alike.

    none         convolutions with a bias
    bn           with BatchNorm
    imn          with their input's mean, plain weights (InputMeanConv2d)
    layers       geometric weights, no norm (GmPConv2d)
    layers+imn   geometric weights with their input's mean
    intrinsic    the same, unit vectors
"""

from collections.abc import Callable

import torch
from torch import nn

import geoparam as gp
from benchmarks.timing import hardware, make_parser, medians, print_heading, print_row

CHANNELS = 8
CASES: dict[str, Callable[[], nn.Module]] = {
    "none": lambda: nn.Conv2d(CHANNELS, CHANNELS, 1),
    "bn": lambda: nn.Sequential(
        nn.Conv2d(CHANNELS, CHANNELS, 1, bias=False), nn.BatchNorm2d(CHANNELS)
    ),
    "imn": lambda: gp.InputMeanConv2d(CHANNELS, CHANNELS, 1),
    "layers": lambda: gp.GmPConv2d(CHANNELS, CHANNELS, 1),
    "layers+imn": lambda: gp.GmPConv2d(CHANNELS, CHANNELS, 1, input_norm=True),
    "intrinsic": lambda: gp.GmPConv2d(
        CHANNELS, CHANNELS, 1, input_norm=True, coordinates="intrinsic"
    ),
}


def step_of(make: Callable[[], nn.Module], layers: int) -> Callable[[], None]:
    model = nn.Sequential(*(make() for _ in range(layers)))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6, momentum=0.9, foreach=True)
    if getattr(model[0], "coordinates", "") == "intrinsic":
        optimizer.register_step_post_hook(gp.retract(model))
    x = torch.randn(4, CHANNELS, 4, 4)

    def step() -> None:
        optimizer.zero_grad()
        model(x).mean().backward()
        optimizer.step()

    return step


def main() -> None:
    given = make_parser(__doc__, layers=50, steps=200).parse_args()
    torch.set_num_threads(1)
    steps = {name: step_of(make, given.layers) for name, make in CASES.items()}
    seconds = medians(steps, "cpu", given.steps)
    print(f"Microseconds per layer and step, {hardware('cpu')}\n")
    print_heading(*CASES)
    print_row(*(f"{s / given.layers * 1e6:.0f}" for s in seconds.values()))


if __name__ == "__main__":
    main()
