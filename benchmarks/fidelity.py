"""Whether training in few passes ends where the readable form does: accuracies over seeds.

    python -m benchmarks.fidelity --data DIR [--method gmp+imn] [--epochs 10] [--seeds 3]
        [--forms readable,fused,compiled] [--batch-size 1024] [--lr 0.3] [--widths 8,8,16,16,32,32]

VGG-6 on images in ImageNet32's layout. A seed decides weights, images and their order; the forms
share it, and differ in who computes:

    readable    plain torch: no kernels, no pass that does two things
    fused       eager training as users have it
    compiled    torch.compile

Numbers are rounded in another order, and training makes much of a little: so runs of one seed part
after some steps (the first twenty are compared to rounding in the tests). What is asked here is
whether their ends differ by more than those of several seeds do.
"""

import argparse
import statistics
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from geoparam.ops import implementation

from benchmarks.timing import hardware
from geoparam import fused
from geoparam.data.imagenet import PackedImages
from geoparam.experiments.imaging import preparation
from geoparam.experiments.imaging.settings import Settings
from geoparam.experiments.imaging.training import train

FORMS = ("readable", "fused", "compiled")


@contextmanager
def plain_torch(wanted: bool) -> Iterator[None]:
    """Leave all kernels out, and all that does several steps in one pass."""
    devices, kernels = set(fused.DEVICES), implementation.KERNELS
    if wanted:
        fused.DEVICES.clear()
        implementation.KERNELS = "torch"
    try:
        yield
    finally:
        fused.DEVICES |= devices
        implementation.KERNELS = kernels


def accuracy(form: str, seed: int, source: PackedImages, given: argparse.Namespace) -> float:
    """Train once and return the validation images that are recognised, in percent."""
    settings = Settings(
        "vgg6",
        given.method,
        lr=given.lr,
        batch_size=given.batch_size,
        seed=seed,
        epochs=given.epochs,
        compile=form == "compiled",
        widths=tuple(map(int, given.widths.split(","))) if given.widths else None,
    )
    accelerator = preparation.make_accelerator(settings.precision)
    torch.compiler.reset()
    with tempfile.TemporaryDirectory() as folder, plain_torch(form == "readable"):
        return train(settings, source, Path(folder), accelerator=accelerator).record["top1"]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--data", required=True)
    parser.add_argument("--method", default="gmp+imn")
    parser.add_argument("--forms", default=",".join(FORMS))
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--batch-size", type=int, default=1024)
    parser.add_argument("--lr", type=float, default=0.3)
    parser.add_argument("--widths")
    given = parser.parse_args()
    source = PackedImages.load(given.data)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    print(f"Top-1 accuracy of VGG-6, {given.method}, {given.epochs} epochs; {hardware(device)}\n")
    print(
        f"| form | {' | '.join(f'seed {seed}' for seed in range(given.seeds))} | mean | spread |"
    )
    print("|" + " --- |" * (given.seeds + 3))
    for form in given.forms.split(","):
        print(f"| {form} |", end="", flush=True)
        found = []
        for seed in range(given.seeds):
            found.append(accuracy(form, seed, source, given))
            print(f" {found[-1]:.2f} |", end="", flush=True)
        print(f" {statistics.mean(found):.2f} | {max(found) - min(found):.2f} |", flush=True)


if __name__ == "__main__":
    main()
