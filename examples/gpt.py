"""Train a small GPT on Python's standard library: AdamW, Muon, and Muon by an angle.

    python examples/gpt.py [--steps 100] [--seeds 3] [--data FILE] [--out gpt.png]

All start from the same weights and see the same batches. In each, AdamW updates embeddings, norms
and the output layer at the same rate. The gain over AdamW is Muon's; the angle takes the place of
Muon's rate. `geoparam run text` compares more methods at more settings.
Needs the extra: pip install '.[experiments]'
"""

import argparse
import os
from pathlib import Path

import torch
from torch import Tensor, nn

import geoparam as gp
from geoparam import plots
from geoparam_lab import gpt

CONTEXT, BATCH = 32, 16
METHODS = ("AdamW, rate 0.01", "Muon, rate 0.1", "Muon, turn 9.6 degrees")


def read_bytes(file: Path | None) -> Tensor:
    """Return the bytes of a file, or of the modules of the standard library."""
    library = sorted(Path(os.__file__).parent.glob("*.py"))
    content = b"".join(path.read_bytes() for path in ([file] if file else library))
    return torch.frombuffer(bytearray(content), dtype=torch.uint8).long()


def measure_loss(model: nn.Module, text: Tensor, count: int, generator: torch.Generator) -> Tensor:
    """Return the loss of the next byte on random windows."""
    start = torch.randint(len(text) - CONTEXT - 1, (count, 1), generator=generator)
    windows = text[start + torch.arange(CONTEXT + 1)]
    logits = model(windows[:, :-1])
    return nn.functional.cross_entropy(logits.flatten(0, 1), windows[:, 1:].flatten())


def make_optimizers(model: gpt.GPT, method: str) -> list[torch.optim.Optimizer]:
    """Each has the best of the four numbers that notebooks/gpt.md tries on such a network."""
    if method.startswith("AdamW"):
        return [torch.optim.AdamW(model.parameters(), lr=1e-2)]

    if method.endswith("degrees"):
        return [gp.GeometricOptimizer(model, torch.optim.Muon, turn=9.6, lr=1e-2)]

    hidden = model.hidden_weights()
    known = set(map(id, hidden))
    rest = [p for p in model.parameters() if id(p) not in known]
    return [torch.optim.Muon(hidden, lr=0.1), torch.optim.AdamW(rest, lr=1e-2)]


def train(method: str, seed: int, steps: int, text: Tensor) -> tuple[list[float], float]:
    """Return the losses on training batches, and the final loss on the last tenth of the text."""
    model = gpt.build(width=64, depth=2, heads=4, context=CONTEXT, seed=seed)
    optimizers = make_optimizers(model, method)
    warmup = max(1, steps // 10)

    def scale(step: int) -> float:
        return min((step + 1) / warmup, (steps - step) / (steps - warmup + 1))

    schedules = [torch.optim.lr_scheduler.LambdaLR(each, scale) for each in optimizers]
    split = 9 * len(text) // 10
    generator = torch.Generator().manual_seed(seed)
    losses = []
    for _ in range(steps):
        loss = measure_loss(model, text[:split], BATCH, generator)
        model.zero_grad()
        loss.backward()
        for each in (*optimizers, *schedules):
            each.step()
        losses.append(loss.item())
    with torch.no_grad():
        validation = measure_loss(model, text[split:], 512, torch.Generator().manual_seed(0))
    return losses, validation.item()


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--data", type=Path)
    parser.add_argument("--out", type=Path, default=Path("gpt.png"))
    given = parser.parse_args(arguments)
    text = read_bytes(given.data)

    figure, axes = plots.new_figure(1, 1, size=(6, 4))
    for number, method in enumerate(METHODS):
        results = [train(method, seed, given.steps, text) for seed in range(given.seeds)]
        for losses, _ in results:
            axes[0, 0].plot(losses, color=f"C{number}", lw=1)
        axes[0, 0].plot([], color=f"C{number}", label=method)
        ends = " ".join(f"{validation:.3f}" for _, validation in results)
        print(f"{method:23} validation loss {ends} after {given.steps} steps")
    axes[0, 0].set(xlabel="step", ylabel="training loss, nats per byte")
    axes[0, 0].legend(frameon=False)
    figure.savefig(given.out, dpi=120)


if __name__ == "__main__":
    main()
