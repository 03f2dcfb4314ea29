"""The operator (latitude, r) -> w, forward and backward, against naive autograd and other peers.

    python -m benchmarks.weight [--device cpu|cuda] [--repeats 50]

Ratios are peer / ours, so above 1 ours is faster. On a GPU `kernels` counts the time that the GPU
is busy and `call` all that a call takes, Python included; on a CPU there is only the latter.
`memory` is the peak of forward + backward over what must be there at the end: the weight, its
gradient and the latitudes' gradient.
"""

import argparse
import math
from collections.abc import Callable

import torch
from torch import Tensor

from benchmarks.timing import hardware, kernel_seconds, medians, peak_memory
from geoparam import ops, sphere
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


def measure(rows: int, n: int, device: str, repeats: int) -> None:
    """Print one size's rows of the table."""
    w, g = torch.randn(2, rows, n)
    latitude, r = sphere.to_latitude(w).float().to(device), w.norm(dim=1).to(device)
    w, g = w.to(device), g.to(device)
    steps = {
        "ours": step(ops.weight, latitude, r, g),
        "naive": step(naive, latitude, r, g),
        "weight_norm": step(weight_norm, w, r, g),
        "intrinsic": step(intrinsic, w, r, g),
        "copy": step(copies, w, r, g),
    }
    results = 4 * (w.numel() + g.numel() + latitude.numel())
    peak = peak_memory(steps["ours"], device) + 4 * g.numel()  # g was there before
    kinds = {"call": medians(steps, device, repeats)}
    if device == "cuda":
        kinds["kernels"] = {name: kernel_seconds(run) for name, run in steps.items()}
    for kind, seconds in kinds.items():
        ours = seconds.pop("ours")
        ratios = " | ".join(f"{peer / ours:.2f}" for peer in seconds.values())
        milliseconds = f"{ours * 1e3:.3f}" if device == "cuda" else ""
        print(
            f"| {rows}x{n} | {kind} | {ratios} | {peak / results:.3f} | {milliseconds} |",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--repeats", type=int, default=50)
    args = parser.parse_args()
    print(f"(latitude, r) -> w, float32, forward + backward; {hardware(args.device)}\n")
    print("| rows x n | time | naive | weight_norm | intrinsic | copy | memory | ours, ms |")
    print("|" + " --- |" * 8)
    for rows, n in SIZES[args.device]:
        measure(rows, n, args.device, args.repeats)


if __name__ == "__main__":
    main()
