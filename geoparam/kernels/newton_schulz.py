"""The matrix nearest to orthogonal, by Newton-Schulz steps in bfloat16, for many matrices at once.

For X = U S V^T each step takes every singular value s to a s + b s^3 + c s^5, with A = X X^T:

    X <- a X + (b A + c A^2) X

All values come near 1 if they start in (0, 1], so that matrices are divided by their norm first.
"""

from collections import defaultdict
from collections.abc import Sequence

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
    is_tall = matrices.shape[1] > matrices.shape[2]
    x = _iterate(_prepare(list(matrices), eps), coefficients)
    return x.mT if is_tall else x


def orthogonalise_all(
    matrices: Sequence[Tensor], coefficients: Coefficients, eps: float
) -> list[Tensor]:
    """Return nearly U V^T for matrices of any shapes; those of equal shape share their calls.

    Tiny ones with an equal short side do so too: shorter ones are padded with columns of zeros,
    which stay zero. Results are new tensors of the matrices' type.
    """
    batches = defaultdict[object, dict[torch.Size, list[int]]](dict)
    for i, matrix in enumerate(matrices):
        short, long = sorted(matrix.shape)
        is_tiny = short * long <= _TINY.get(matrix.device.type, 0)
        key = short, 0 if is_tiny else long, matrix.device, matrix.dtype
        batches[key].setdefault(matrix.shape, []).append(i)

    results = list(matrices)
    for batch in batches.values():
        stacks = [_prepare([matrices[i] for i in members], eps) for members in batch.values()]
        if len(stacks) > 1:
            longest = max(stack.shape[2] for stack in stacks)
            stacks = [nn.functional.pad(x, (0, longest - x.shape[2])) for x in stacks]
        stack = _iterate(torch.cat(stacks) if len(stacks) > 1 else stacks[0], coefficients)

        parts = stack.split([len(members) for members in batch.values()])
        for (shape, members), part in zip(batch.items(), parts, strict=True):
            x = part[:, :, : max(shape)]
            x = x.mT if shape[0] > shape[1] else x
            x = x.to(matrices[members[0]].dtype, copy=True, memory_format=torch.contiguous_format)
            for i, result in zip(members, x.unbind(), strict=True):
                results[i] = result
    return results


def _prepare(matrices: Sequence[Tensor], eps: float) -> Tensor:
    """Return matrices of one shape as a stack of wide ones of norm 1, in bfloat16."""
    like = matrices[0]
    stack = torch.empty((len(matrices), *like.shape), dtype=torch.bfloat16, device=like.device)
    torch._foreach_copy_(list(stack.unbind()), list(matrices))
    size = torch.linalg.vector_norm(stack, dim=(1, 2), keepdim=True)
    stack.div_(size.clamp(min=eps))
    return stack.mT if like.shape[0] > like.shape[1] else stack


def _iterate(x: Tensor, coefficients: Coefficients) -> Tensor:
    count, short, _ = x.shape
    gram, polynomial = x.new_empty(2, count, short, short)
    buffers = x.new_empty(2, *x.shape)
    for i, (a, b, c) in enumerate(coefficients):
        torch.bmm(x, x.mT, out=gram)
        torch.baddbmm(gram, gram, gram, beta=b, alpha=c, out=polynomial)
        x = torch.baddbmm(x, polynomial, x, beta=a, out=buffers[i % 2])
    return x
