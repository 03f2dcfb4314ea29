"""The four small tasks of `benchmarks.defaults`: data that every installation has, and networks.

    digits-mlp    scikit-learn's digits (8x8), three hidden layers of 128 units
    digits-cnn    the same images, three convolutions of 16, 32 and 32 channels
    scenes-resnet digits enlarged to 24x24 in a random colour at a random place of a 32x32 colour
                  texture: images of CIFAR's size, made from a seed; a ResNet of three blocks
    text-gpt      next character of the standard library's own sources; a transformer of two blocks

Each network comes with a norm ("bn": BatchNorm after each hidden layer, in the transformer a
LayerNorm before each branch) or without one (None). Weights are torch's default initialisation.
"""

import importlib.util
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Part = tuple[Tensor, Tensor]
CONTEXT, WIDTH = 32, 48
SOURCES = ("argparse", "textwrap", "heapq", "random", "statistics", "shutil")


@dataclass(frozen=True)
class Task:
    """Data in three parts, and a network for them.

    Args:
        load: returns the training, validation and test part, each (inputs, targets).
        build: returns a fresh network, with or without norms.
        batch: examples in a step.
        epochs: how often the training part is seen.
    """

    load: Callable[[], tuple[Part, Part, Part]]
    build: Callable[[str | None], nn.Module]
    batch: int
    epochs: int


# --- data -------------------------------------------------------------------------------------


def split(x: Tensor, y: Tensor, sizes: tuple[int, int]) -> tuple[Part, Part, Part]:
    """Divide examples into training, validation and test part."""
    first, second = sizes[0], sum(sizes)
    parts = (slice(0, first), slice(first, second), slice(second, None))
    train, validation, test = ((x[part], y[part]) for part in parts)
    return train, validation, test


@cache
def load_digits() -> tuple[Tensor, Tensor]:
    """Return scikit-learn's digits in [0, 1], (1797, 1, 8, 8), in a random order."""
    from sklearn import datasets

    digits = datasets.load_digits()
    order = torch.randperm(len(digits.target), generator=torch.Generator().manual_seed(0))
    images = torch.tensor(digits.images / 16, dtype=torch.float32)[:, None]
    return images[order], torch.tensor(digits.target)[order]


@cache
def load_digit_parts() -> tuple[Part, Part, Part]:
    return split(*load_digits(), (1000, 297))


@cache
def load_scenes() -> tuple[Part, Part, Part]:
    """Return digits in colour textures, each digit once: (1797, 3, 32, 32), about N(0, 1)."""
    digits, labels = load_digits()
    generator = torch.Generator().manual_seed(0)
    count = len(digits)
    coarse = torch.randn(count, 3, 8, 8, generator=generator)
    scenes = 0.5 * F.interpolate(coarse, size=(32, 32), mode="bilinear")
    large = F.interpolate(digits, size=(24, 24), mode="bilinear").clamp(0, 1)
    colours = 0.5 + 2 * torch.rand(count, 3, 1, 1, generator=generator)
    corners = torch.randint(9, (count, 2), generator=generator).tolist()
    for scene, digit, colour, (i, j) in zip(scenes, large, colours, corners, strict=True):
        place = scene[:, i : i + 24, j : j + 24]
        place.copy_((1 - digit) * place + digit * colour)
    scenes += 0.2 * torch.randn(scenes.shape, generator=generator)
    return split(scenes, labels, (1000, 297))


@cache
def load_text() -> tuple[Part, Part, Part]:
    """Return pieces of CONTEXT characters and those that follow each."""
    pieces = []
    for name in SOURCES:
        spec = importlib.util.find_spec(name)
        assert spec is not None and spec.origin is not None
        pieces.append(Path(spec.origin).read_text("utf-8")[:9_000])
    codes = torch.tensor([min(ord(c), 127) for c in "".join(pieces)])
    count = (len(codes) - 1) // CONTEXT
    x, y = (codes[k : k + count * CONTEXT].view(count, CONTEXT) for k in (0, 1))
    order = torch.randperm(count, generator=torch.Generator().manual_seed(0))
    return split(x[order], y[order], (992, 200))


def batches(part: Part, size: int, generator: torch.Generator) -> Iterator[Part]:
    """Yield one epoch in random batches; an incomplete last one is left out."""
    x, y = part
    for rows in torch.randperm(len(x), generator=generator).split(size):
        if len(rows) == size:
            yield x[rows], y[rows]


# --- networks ---------------------------------------------------------------------------------


def mlp(norm: str | None) -> nn.Module:
    layers: list[nn.Module] = [nn.Flatten()]
    for n in (64, 128, 128):
        layers += [nn.Linear(n, 128), *([nn.BatchNorm1d(128)] if norm else []), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(128, 10))


def conv(n: int, m: int, norm: str | None, stride: int = 1) -> list[nn.Module]:
    layer = nn.Conv2d(n, m, 3, stride=stride, padding=1, bias=norm is None)
    return [layer, nn.BatchNorm2d(m)] if norm else [layer]


def cnn(norm: str | None) -> nn.Module:
    layers: list[nn.Module] = []
    for n, m, stride in ((1, 16, 1), (16, 32, 2), (32, 32, 2)):
        layers += [*conv(n, m, norm, stride), nn.ReLU()]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(128, 10))


class Block(nn.Module):
    """ReLU(conv(ReLU(conv(x))) + shortcut(x)), as torchvision's BasicBlock."""

    def __init__(self, n: int, m: int, norm: str | None) -> None:
        super().__init__()
        self.branch = nn.Sequential(*conv(n, m, norm, 2), nn.ReLU(), *conv(m, m, norm))
        self.shortcut = nn.Conv2d(n, m, 1, stride=2)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.branch(x) + self.shortcut(x))


def resnet(norm: str | None) -> nn.Module:
    stem = [*conv(3, 8, norm, 2), nn.ReLU()]
    blocks = [Block(n, m, norm) for n, m in ((8, 16), (16, 32), (32, 48))]
    return nn.Sequential(*stem, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(48, 10))


class Attention(nn.Module):
    """Causal self-attention with four heads."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        size = x.shape
        q, k, v = self.qkv(x).view(*size[:2], 12, WIDTH // 4).transpose(1, 2).split(4, dim=1)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).reshape(size))


class GPT(nn.Module):
    """A pre-norm transformer over characters, with ReLU."""

    def __init__(self, norm: str | None) -> None:
        super().__init__()
        self.characters = nn.Embedding(128, WIDTH)
        self.places = nn.Parameter(torch.randn(CONTEXT, WIDTH) / math.sqrt(WIDTH))
        branches = []
        for _ in range(2):
            hidden = [nn.Linear(WIDTH, 4 * WIDTH), nn.ReLU(), nn.Linear(4 * WIDTH, WIDTH)]
            branches += [nn.Sequential(*self._norm(norm), Attention())]
            branches += [nn.Sequential(*self._norm(norm), *hidden)]
        self.branches = nn.ModuleList(branches)
        self.head = nn.Sequential(*self._norm(norm), nn.Linear(WIDTH, 128))

    @staticmethod
    def _norm(norm: str | None) -> list[nn.Module]:
        return [nn.LayerNorm(WIDTH)] if norm else []

    def forward(self, x: Tensor) -> Tensor:
        x = self.characters(x) + self.places
        for branch in self.branches:
            x = x + branch(x)
        return self.head(x).transpose(1, 2)


TASKS = {
    "digits-mlp": Task(load_digit_parts, mlp, batch=32, epochs=4),
    "digits-cnn": Task(load_digit_parts, cnn, batch=32, epochs=4),
    "scenes-resnet": Task(load_scenes, resnet, batch=32, epochs=4),
    "text-gpt": Task(load_text, GPT, batch=16, epochs=2),
}
