"""Small models of every kind that a checkpoint may hold, converted and trained a little."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

import geoparam as gp


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 9), nn.ReLU(), nn.Linear(9, 9, bias=False), nn.Linear(9, 3))


def narrow() -> nn.Module:
    return nn.Sequential(nn.Linear(1, 8), nn.ReLU(), nn.Linear(8, 3))


def conv_net() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU(),
        nn.Conv2d(8, 8, 3, groups=4, stride=2), nn.Conv2d(8, 4, 1), nn.Flatten(), nn.Linear(36, 5),
    )  # fmt: skip


class Attends(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(12, 3, batch_first=True)
        self.head = nn.Linear(12, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.attention(x, x, x)[0])


class Tied(nn.Module):
    """An embedding that is also the output layer, and one hidden layer."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 6)
        self.hidden = nn.Linear(6, 6)
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, index: Tensor) -> Tensor:
        return self.head(self.hidden(self.embedding(index)).relu())


MODELS: dict[str, tuple[Callable[[], nn.Module], Tensor]] = {
    "mlp": (mlp, torch.randn(4, 6)),
    "narrow": (narrow, torch.randn(4, 1)),
    "conv_net": (conv_net, torch.randn(2, 3, 8, 8)),
    "Attends": (Attends, torch.randn(2, 5, 12)),
    "Tied": (Tied, torch.arange(8).view(2, 4)),
}


def trained(name: str, **options: object) -> nn.Module:
    """A converted model after a few steps, some of its scales negative."""
    make, x = MODELS[name]
    model = gp.convert_(make(), **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    optimizer.register_step_post_hook(gp.retract(model))
    for _ in range(3):
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if key.endswith(".r"):
                parameter[0].neg_()
    return model
