"""A GPT on bytes, with the options in which such networks differ.

    x = token + position
    x = x + attention(norm(x)),   x = x + mlp(norm(x))      in each block
    logits = head(norm(x))

Queries, keys and values have linear maps of their own, and nothing has a bias: every row of a
weight is one unit. Rows start from N(0, 1 / (3 fan-in)), the variance of torch's own start, so
that their lengths do not depend on the width; `std` is one deviation for all instead (GPT-2 has
0.02). The two maps into the residual stream start smaller by sqrt(2 depth), or from 0.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from geoparam_lab import methods
from geoparam_lab.checks import check_names

BYTES = 256
EMBEDDING_STD = 0.02
NORMS = ("layernorm", "rmsnorm")


def relu2(x: Tensor) -> Tensor:
    """Return relu(x)^2; as a product, since autocast computes powers in fp32."""
    positive = F.relu(x)
    return positive * positive


MLPS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu2": relu2,
    "gelu": F.gelu,
    "relu": F.relu,
}


def build(
    width: int,
    depth: int,
    heads: int,
    context: int,
    *,
    norm: str = "layernorm",
    mlp: str = "relu2",
    zero_projections: bool = False,
    dropout: float = 0.0,
    tied: bool = False,
    std: float | None = None,
    seed: int = 0,
) -> "GPT":
    """Return the network, drawn from `seed`."""
    check_names("norm", NORMS, norm)
    check_names("mlp", MLPS, mlp)
    if width % heads:
        raise ValueError(f"width must be a multiple of heads; got {width} and {heads}.")
    with methods.use_seed(seed):
        model = GPT(width, depth, heads, context, norm, mlp, dropout)
        _start_(model, std, zero_projections)
    if tied:
        model.head.weight = model.token.weight
    return model


def _make_norm(kind: str, width: int) -> nn.Module:
    if kind == "rmsnorm":
        return nn.RMSNorm(width, eps=1e-6)
    return nn.LayerNorm(width, bias=False)


@torch.no_grad()
def _start_(model: "GPT", std: float | None, zero_projections: bool) -> None:
    """Draw the weights of a new network."""
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding):
            nn.init.normal_(module.weight, std=EMBEDDING_STD)
        elif isinstance(module, nn.Linear):
            deviation = 1 / math.sqrt(3 * module.in_features) if std is None else std
            is_projection = name.endswith((".out", ".down"))
            if is_projection:
                deviation /= math.sqrt(2 * len(model.blocks))
            nn.init.normal_(module.weight, std=deviation)
            if is_projection and zero_projections:
                module.weight.zero_()


class Attention(nn.Module):
    """Causal attention of several heads."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.query = nn.Linear(width, width, bias=False)
        self.key = nn.Linear(width, width, bias=False)
        self.value = nn.Linear(width, width, bias=False)
        self.out = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        heads = (batch, length, self.heads, -1)
        q = self.query(x).view(heads).transpose(1, 2)
        k = self.key(x).view(heads).transpose(1, 2)
        v = self.value(x).view(heads).transpose(1, 2)
        dropped = self.dropout if self.training else 0.0
        mixed = F.scaled_dot_product_attention(q, k, v, dropout_p=dropped, is_causal=True)
        return self.out(mixed.transpose(1, 2).reshape(batch, length, width))


class Block(nn.Module):
    """Attention and an MLP, each behind a norm and beside a skip connection."""

    def __init__(self, width: int, heads: int, norm: str, mlp: str, dropout: float) -> None:
        super().__init__()
        self.norm1 = _make_norm(norm, width)
        self.attention = Attention(width, heads, dropout)
        self.norm2 = _make_norm(norm, width)
        self.up = nn.Linear(width, 4 * width, bias=False)
        self.down = nn.Linear(4 * width, width, bias=False)
        self.mlp = mlp
        self.drop = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.drop(self.attention(self.norm1(x)))
        return x + self.drop(self.down(MLPS[self.mlp](self.up(self.norm2(x)))))


class GPT(nn.Module):
    """Bytes (batch, length) in, logits of each next byte (batch, length, 256) out."""

    def __init__(
        self,
        width: int,
        depth: int,
        heads: int,
        context: int,
        norm: str,
        mlp: str,
        dropout: float,
    ) -> None:
        super().__init__()
        self.token = nn.Embedding(BYTES, width)
        self.position = nn.Embedding(context, width)
        self.drop = nn.Dropout(dropout)
        blocks = [Block(width, heads, norm, mlp, dropout) for _ in range(depth)]
        self.blocks = nn.ModuleList(blocks)
        self.norm = _make_norm(norm, width)
        self.head = nn.Linear(width, BYTES, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        places = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.drop(self.token(tokens) + self.position(places))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))

    def hidden_weights(self) -> list[nn.Parameter]:
        """Return the matrices of the blocks: neither embeddings nor the output layer."""
        return [weight for weight in self.blocks.parameters() if weight.ndim > 1]
