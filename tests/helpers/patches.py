"""What the units of a layer see of its input, cut out by hand."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def patches(layer: nn.Module, x: Tensor) -> Tensor:
    """Return the patches (groups, points, n) under a convolution's kernel, for a batch.

    Points are in the order of the output's; a linear layer sees all of the last dimension.
    """
    size = getattr(layer, "kernel_size", ())
    if not size:
        return x.reshape(1, -1, x.shape[-1])
    x = F.pad(x, sides(layer), mode=layer.padding_mode.replace("zeros", "constant"))
    for dim, (k, stride, gap) in enumerate(zip(size, layer.stride, layer.dilation, strict=True)):
        x = x.unfold(2 + dim, (k - 1) * gap + 1, stride)[..., ::gap]
    x = x.unflatten(1, (layer.groups, -1))  # N, groups, channels, positions, kernel
    rank = len(size)
    order = [1, 0, *range(3, 3 + rank), 2, *range(3 + rank, 3 + 2 * rank)]
    return x.permute(order).flatten(2 + rank).flatten(1, 1 + rank)


def sides(conv: nn.Module) -> list[int]:
    """Return the padding as F.pad takes it, from the definition of each form."""
    if conv.padding == "valid":
        return [0, 0] * len(conv.kernel_size)
    if conv.padding == "same":
        total = [d * (k - 1) for d, k in zip(conv.dilation, conv.kernel_size, strict=True)]
        return [side for t in reversed(total) for side in (t // 2, t - t // 2)]
    return [side for p in reversed(conv.padding) for side in (p, p)]


def by_unit(z: Tensor, channel: int) -> Tensor:
    """Return a layer's output as (points, units), points in the order of `patches`."""
    return z.movedim(channel, -1).reshape(-1, z.shape[channel])


def responses(rows: Tensor, seen: Tensor) -> Tensor:
    """Return rows^T x, (points, units), for patches (groups, points, n)."""
    grouped = rows.unflatten(0, (len(seen), -1))
    return torch.einsum("gun,gpn->pgu", grouped, seen).flatten(1)
