"""Convert a trained network, fine-tune it, and fold it back into the plain one.

    python examples/convert_and_fold.py [--steps 100] [--out convert_and_fold.png]

A small CNN learns digits and is then fine-tuned on digits upside down, once as it is and once
converted. The script prints by how much converting and folding change the outputs, as `verify`
measures it, and both losses. Needs the extra: pip install '.[experiments]'
"""

import argparse
import copy
from pathlib import Path

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn

import geoparam as gp
from geoparam import plots


def build() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(),
        nn.Conv2d(16, 32, 3, stride=2, padding=1), nn.BatchNorm2d(32), nn.ReLU(),
        nn.Flatten(), nn.Linear(512, 10),
    )  # fmt: skip


def train(model: nn.Module, x: Tensor, y: Tensor, steps: int) -> list[float]:
    """Train with Adam and return the losses; `param_groups` matches the plain model's speed."""
    optimizer = torch.optim.Adam(gp.param_groups(model, lr=3e-3))
    warmup = max(1, steps // 10)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda k: min((k + 1) / warmup, (steps - k) / (steps - warmup + 1))
    )
    generator = torch.Generator().manual_seed(0)
    losses = []
    model.train()
    for _ in range(steps):
        batch = torch.randint(len(x), (64,), generator=generator)
        loss = nn.functional.cross_entropy(model(x[batch]), y[batch])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        losses.append(loss.item())
    return losses


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--out", type=Path, default=Path("convert_and_fold.png"))
    given = parser.parse_args(arguments)
    digits = load_digits()
    x = torch.tensor(digits.images / 16, dtype=torch.float32)[:, None]
    y = torch.tensor(digits.target)

    pretrained = build()
    train(pretrained, x, y, given.steps)
    plain, geometric = copy.deepcopy(pretrained), copy.deepcopy(pretrained)
    gp.convert_(geometric, example_inputs=(x[:2],))
    print(f"converted: outputs differ by {gp.verify(pretrained, geometric, x):.1e}")

    flipped = x.flip(2)
    plain_losses = train(plain, flipped, y, given.steps)
    losses = train(geometric, flipped, y, given.steps)
    tuned = copy.deepcopy(geometric)
    gp.fold_(geometric)
    print(f"folded: outputs differ by {gp.verify(tuned, geometric, flipped):.1e}")
    pretrained.load_state_dict(geometric.state_dict())  # the original's keys
    print(
        f"loaded into the original: outputs differ by {gp.verify(tuned, pretrained, flipped):.1e}"
    )
    print(f"loss upside down: plain {plain_losses[-1]:.3f}, converted {losses[-1]:.3f}")

    figure, axes = plots.new_figure(1, 1, size=(6, 4))
    axes[0, 0].plot(plain_losses, label="plain")
    axes[0, 0].plot(losses, "--", label="converted")
    axes[0, 0].set(xlabel="step", ylabel="loss", yscale="log", title="Digits upside down")
    axes[0, 0].legend(frameon=False)
    figure.savefig(given.out, dpi=120)


if __name__ == "__main__":
    main()
