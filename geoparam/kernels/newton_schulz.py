"""The matrix nearest to orthogonal, by Newton-Schulz steps in bfloat16, for many matrices at once.

For X = U S V^T each step takes every singular value s to a s + b s^3 + c s^5, with A = X X^T:

    X <- a X + (b A + c A^2) X

All values come near 1 if they start in (0, 1], so that matrices are divided by their norm first.
"""

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

Coefficients = Sequence[tuple[float, float, float]]

# Elements of a matrix for which calls cost more than arithmetic, so that padding it is cheaper.
_TINY = {"cpu": 1 << 12, "cuda": 1 << 20}


def orthogonalise(matrices: Tensor, coefficients: Coefficients, eps: float = 1e-7) -> Tensor:
    """Return nearly U V^T for each matrix U S V^T of a batch (matrices, out, in), in bfloat16.

    Each step has coefficients of its own.
    """
    if matrices.ndim != 3:
        raise ValueError(f"a batch is (matrices, out, in); got {tuple(matrices.shape)}.")
    return _iterate(_prepare(list(matrices), eps), coefficients)


def orthogonalise_all(
    matrices: Sequence[Tensor],
    coefficients: Coefficients,
    eps: float,
    scales: Sequence[float | Tensor],
) -> list[Tensor]:
    """Return nearly scale * U V^T for matrices of any shapes, as new tensors of their type.

    Matrices of equal shape share their calls, and have the same scale. Tiny ones with an equal
    short side share them too: shorter ones are padded with columns of zeros, which stay zero.
    """
    alike = defaultdict[Any, list[int]](list)
    for i, matrix in enumerate(matrices):
        alike[matrix.shape, matrix.device, matrix.dtype].append(i)
    batches = defaultdict[Any, list[list[int]]](list)
    for (shape, device, dtype), members in alike.items():
        is_tiny = shape.numel() <= _TINY.get(device.type, 0)
        batches[min(shape) if is_tiny else shape, device, dtype].append(members)

    results = list(matrices)
    for batch in batches.values():
        stacks = [_prepare([matrices[i] for i in members], eps) for members in batch]
        if len(stacks) > 1:
            stacks = _iterate(_join(stacks), coefficients).split([len(x) for x in stacks])
        else:
            stacks = [_iterate(stacks[0], coefficients)]

        for members, x in zip(batch, stacks, strict=True):
            first = matrices[members[0]]
            if x.shape[1:] != first.shape:  # it was joined with others
                x = x[:, :, : max(first.shape)]
                x = x.mT if first.shape[0] > first.shape[1] else x
            # One pass scales and leaves bfloat16: a tensor with dimensions decides the type.
            scale = first.new_ones(1, 1, 1) * scales[members[0]]
            x = torch.mul(x, scale).contiguous().to(first.dtype)
            for i, result in zip(members, x.unbind(), strict=True):
                results[i] = result
    return results


def _prepare(matrices: Sequence[Tensor], eps: float) -> Tensor:
    """Return matrices of one shape as a stack of matrices of norm 1, in bfloat16."""
    like = matrices[0]
    stack = torch.empty((len(matrices), *like.shape), dtype=torch.bfloat16, device=like.device)
    torch._foreach_copy_(list(stack.unbind()), list(matrices))
    size = torch.linalg.vector_norm(stack, dim=(1, 2), keepdim=True)
    return stack.div_(size.clamp(min=eps))


def _join(stacks: Sequence[Tensor]) -> Tensor:
    """Return stacks with an equal short side as one of wide matrices, padded to the longest."""
    wide = [x.mT if x.shape[1] > x.shape[2] else x for x in stacks]
    longest = max(x.shape[2] for x in wide)
    return torch.cat([nn.functional.pad(x, (0, longest - x.shape[2])) for x in wide])


def _iterate(x: Tensor, coefficients: Coefficients) -> Tensor:
    """Return the stack after all steps; tall matrices are multiplied from the right."""
    count, rows, columns = x.shape
    short = min(rows, columns)
    gram, polynomial = x.new_empty(2, count, short, short)
    buffers = x.new_empty(2, *x.shape)
    for i, (a, b, c) in enumerate(coefficients):
        factors = (x.mT, x) if rows > columns else (x, x.mT)
        torch.bmm(*factors, out=gram)
        torch.baddbmm(gram, gram, gram, beta=b, alpha=c, out=polynomial)
        factors = (x, polynomial) if rows > columns else (polynomial, x)
        x = torch.baddbmm(x, *factors, beta=a, out=buffers[i % 2])
    return x
