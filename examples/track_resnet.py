"""Track what the units of a ResNet-18 do in its first steps, with BatchNorm and under GmP + IMN.

    python examples/track_resnet.py OUT

It takes two minutes on two cores and needs the extras: pip install 'geoparam[plots,vision]'.

The images are generated: each class is a plane wave of its own direction, with noise. Two models
start from the same seed; the figures in OUT compare how far their units turn in each step, how
many are dead, and how much of the partition into linear regions changes.
"""

import sys
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torchvision.models import resnet18

import geoparam as gp
from geoparam import plots

CLASSES, STEPS, RATE = 8, 60, 0.01


def waves(count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Return images (count, 3, 32, 32) and their classes."""
    labels = torch.randint(CLASSES, (count,), generator=generator)
    angle = labels * torch.pi / CLASSES
    place = torch.arange(32.0)
    phase = angle.cos()[:, None, None] * place + angle.sin()[:, None, None] * place[:, None]
    images = phase.sin()[:, None].expand(-1, 3, -1, -1)
    return images + torch.randn(count, 3, 32, 32, generator=generator), labels


def build(norm: str, example: Tensor) -> nn.Module:
    torch.manual_seed(0)
    model = resnet18(num_classes=CLASSES)
    if norm == "GmP+IMN":
        gp.convert_(model, norm="imn", init="glorot", example_inputs=example)
    return model


def train(model: nn.Module, tracker: gp.BoundaryTracker) -> None:
    generator = torch.Generator().manual_seed(1)
    optimizer = torch.optim.SGD(gp.param_groups(model, lr=RATE), momentum=0.9)
    for _ in range(STEPS):
        images, labels = waves(32, generator)
        loss = nn.functional.cross_entropy(model(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        tracker.step()


def main(out: Path) -> None:
    out.mkdir(parents=True, exist_ok=True)
    probe, _ = waves(64, torch.Generator().manual_seed(2))
    for name in ("BN", "GmP+IMN"):
        model = build(name, probe[:2])
        tracker = gp.BoundaryTracker(model, probe=probe, file=out / f"{name}.npy")
        train(model, tracker)
        history, layers = tracker.history, list(tracker.history)
        dead = history.table("dead")
        figures = {
            "rotation": plots.rotation_heatmap(history.table("rotation_max"), layers=layers),
            "dead": plots.dead_units(dead / history.table("units"), layers=layers),
            "regions": plots.region_changes(history.table("pattern_change"), layers=layers),
        }
        for what, ax in figures.items():
            ax.set_title(f"ResNet-18, {name}", loc="left")
            ax.figure.savefig(out / f"{name}-{what}.png", dpi=150)
        turn = np.nanmax(history.network["rotation_max"])
        print(
            f"{name}: largest turn in one step {turn:.1f} degrees, most dead {np.nanmax(dead):.0f}"
        )


if __name__ == "__main__":
    main(Path(sys.argv[1]))
