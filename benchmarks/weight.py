"""The operator (latitude, r) -> w, forward and backward, against naive autograd and other peers.

    python -m benchmarks.weight [--device cpu|cuda] [--repeats 50]

Ratios are peer / ours, so above 1 ours is faster. On a GPU `kernels` counts the time that the GPU
is busy and `call` all that a call takes, Python included; on a CPU there is only the latter.
`memory` is the peak of forward + backward over what must be there at the end: the weight, its
gradient and the latitudes' gradient.

On a GPU a second table has all convolutions of a ResNet-50, as a training step needs them: 53
weights, then one backward through all; `bf16` are in bfloat16 and channels_last, by a copy.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from benchmarks.timing import (
    hardware,
    make_parser,
    medians,
    peak_memory,
    print_heading,
    print_row,
    profile_kernels,
)
from geoparam import functional, sphere
from geoparam.coordinates import Intrinsic

SIZES = {
    "cpu": [(100, 13), (64, 576), (512, 4608), (4096, 1024), (4096, 4096)],
    "cuda": [(64, 576), (512, 4608), (4096, 1024), (4096, 4096), (1024, 25088)],
}


def naive(latitude: Tensor, r: Tensor) -> Tensor:
    """The papers' formula as one would write it, for autograd to go through cumprod."""
    theta = math.pi / 2 - latitude
    one = theta.new_ones(theta.shape[0], 1)
    sines = torch.cat([one, torch.cumprod(theta.sin(), dim=1)], dim=1)
    return r[:, None] * (torch.cat([theta.cos(), one], dim=1) * sines)


def weight_norm(v: Tensor, r: Tensor) -> Tensor:
    return torch._weight_norm(v, r[:, None], 0)


def intrinsic(unit: Tensor, r: Tensor) -> Tensor:
    return Intrinsic().decode(unit, r, False, None)


def copies(source: Tensor, r: Tensor) -> Tensor:
    """Move as many bytes as ours must: 8 per weight forward, 12 backward."""
    return _Copies.apply(source)


class _Copies(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:  # noqa: ANN001
        ctx.save_for_backward(x)
        return x.clone()

    @staticmethod
    def backward(ctx, g: Tensor) -> Tensor:  # noqa: ANN001
        return torch.add(g, ctx.saved_tensors[0])


def step(
    function: Callable[[Tensor, Tensor], Tensor], stored: Tensor, r: Tensor, g: Tensor
) -> Callable[[], object]:
    """Return a function that runs forward and backward once and drops the gradients."""
    stored, r = stored.clone().requires_grad_(), r.clone().requires_grad_()

    def run() -> object:
        w = function(stored, r)
        return w, torch.autograd.grad(w, (stored, r), g, allow_unused=True)

    return run


# --- all convolutions of a ResNet-50 ------------------------------------------------------------


def resnet50() -> list[tuple[int, int, int, int]]:
    """Return the weights' shapes: (out, in, kernel, kernel)."""
    shapes, width = [(64, 3, 7, 7)], 64
    for stage, blocks in enumerate((3, 4, 6, 3)):
        inner = 64 << stage
        for block in range(blocks):
            shapes += [(inner, width, 1, 1), (inner, inner, 3, 3), (4 * inner, inner, 1, 1)]
            if block == 0:
                shapes.append((4 * inner, width, 1, 1))
            width = 4 * inner
    return shapes


def steps_of_resnet50(half: bool) -> dict[str, Callable[[], object]]:
    """Return, for ours and its peers, a function that makes all weights and all gradients."""
    dtype = torch.bfloat16 if half else torch.float32
    order = torch.channels_last if half else torch.contiguous_format

    def converted(rows: Tensor, shape: tuple[int, ...]) -> Tensor:
        return rows.view(shape).to(dtype=dtype, memory_format=order)

    functions: dict[str, Callable[[Tensor, Tensor, tuple[int, ...]], Tensor]] = {
        "ours": lambda a, r, shape: converted(functional.weight(a, r, dtype=dtype), shape),
        "intrinsic": lambda d, r, shape: converted(intrinsic(d, r), shape),
        "weight_norm": lambda v, r, shape: converted(weight_norm(v, r), shape),
        "copy": lambda x, r, shape: converted(copies(x, r), shape),
    }
    inputs: dict[str, list[tuple[Tensor, Tensor, tuple[int, ...], Tensor]]] = {}
    for name in functions:
        inputs[name] = []
        for shape in resnet50():
            n = math.prod(shape[1:])
            stored = torch.randn(shape[0], n - (name == "ours"), device="cuda") / math.sqrt(n)
            r, g = torch.ones(shape[0], device="cuda"), torch.randn(shape, device="cuda")
            g = g.to(dtype=dtype, memory_format=order)
            inputs[name].append((stored.requires_grad_(), r.requires_grad_(), shape, g))
    return {name: all_weights(functions[name], inputs[name]) for name in functions}


def all_weights(
    function: Callable[[Tensor, Tensor, tuple[int, ...]], Tensor],
    inputs: list[tuple[Tensor, Tensor, tuple[int, ...], Tensor]],
) -> Callable[[], object]:
    parameters = [x for stored, r, _, _ in inputs for x in (stored, r)]
    gradients = [g for _, _, _, g in inputs]

    def run() -> object:
        weights = [function(stored, r, shape) for stored, r, shape, _ in inputs]
        return torch.autograd.grad(weights, parameters, gradients, allow_unused=True)

    return run


def measure_resnet50(repeats: int) -> None:
    print("\nAll 53 convolution weights of a ResNet-50, forward + backward, ms\n")
    print_heading("type", "time", "ours", "intrinsic", "weight_norm", "copy")
    for half in (False, True):
        steps = steps_of_resnet50(half)
        kinds = {
            "call": medians(steps, "cuda", repeats),
            "kernels": {name: profile_kernels(run)[0] for name, run in steps.items()},
        }
        for kind, seconds in kinds.items():
            cells = [f"{value * 1e3:.2f}" for value in seconds.values()]
            print_row("bf16" if half else "fp32", kind, *cells)


# --- one weight ---------------------------------------------------------------------------------


def measure(rows: int, n: int, device: str, repeats: int) -> None:
    """Print one size's rows of the table."""
    w, g = torch.randn(2, rows, n)
    latitude, r = sphere.to_latitude(w).float().to(device), w.norm(dim=1).to(device)
    w, g = w.to(device), g.to(device)
    steps = {
        "ours": step(functional.weight, latitude, r, g),
        "naive": step(naive, latitude, r, g),
        "weight_norm": step(weight_norm, w, r, g),
        "intrinsic": step(intrinsic, w, r, g),
        "copy": step(copies, w, r, g),
    }
    results = 4 * (w.numel() + g.numel() + latitude.numel())
    peak = peak_memory(steps["ours"], device) + 4 * g.numel()  # g was there before
    kinds = {"call": medians(steps, device, repeats)}
    if device == "cuda":
        kinds["kernels"] = {name: profile_kernels(run)[0] for name, run in steps.items()}
    for kind, seconds in kinds.items():
        ours = seconds.pop("ours")
        ratios = [f"{peer / ours:.2f}" for peer in seconds.values()]
        print_row(f"{rows}x{n}", kind, *ratios, f"{peak / results:.3f}", f"{ours * 1e3:.3f}")


def main() -> None:
    given = make_parser(__doc__, repeats=50).parse_args()
    print(f"(latitude, r) -> w, float32, forward + backward; {hardware(given.device)}\n")
    peers = ("naive", "weight_norm", "intrinsic", "copy")
    print_heading("rows x n", "time", *peers, "memory", "ours, ms")
    for rows, n in SIZES[given.device]:
        measure(rows, n, given.device, given.repeats)
    if given.device == "cuda":
        measure_resnet50(given.repeats)


if __name__ == "__main__":
    main()
