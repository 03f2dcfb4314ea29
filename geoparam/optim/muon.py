"""Muon on matrices whose rows are units, many matrices in one batch.

The update of torch.optim.Muon: with momentum M <- mu M + (1 - mu) G, the matrix nearest to
orthogonal of (1 - mu) G + mu M, found by Newton-Schulz steps. torch's Muon steps one matrix after
the other, with 25 kernel launches each; here matrices of equal shape share them. A convolution's
weight of any rank is flattened to (out, fan-in), and a parameter that holds several layers is
divided into them.

Newton-Schulz takes every singular value s of X = U S V^T to a s + b s^3 + c s^5 in each step, with
A = X X^T:

    X <- a X + (b A + c A^2) X

All values come near 1 if they start in (0, 1], so that matrices are divided by their norm first.
It computes in bfloat16.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from geoparam.arguments import check_count, check_flag, check_rate

Coefficients = Sequence[tuple[float, float, float]]

# Elements of a matrix for which calls cost more than arithmetic, so that padding it is cheaper.
_TINY = {"cpu": 1 << 12, "cuda": 1 << 20}


class RowMuon(Optimizer):
    """torch.optim.Muon, with its options and state, for weights of two or more dimensions.

    Args:
        parts: the rows of each layer, for parameters that hold several.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor = 1e-3,
        parts: Mapping[Tensor, Sequence[int]] | None = None,
        **options: Any,
    ) -> None:
        self.parts = parts or {}
        super().__init__(params, _try_torchs(lr, options))

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters, each a matrix or several."""
        super().add_param_group(param_group)
        for p in self.param_groups[-1]["params"]:
            if p.ndim < 2 or p.is_complex():
                raise ValueError(
                    "Muon steps weights of two or more dimensions, and no complex ones; got "
                    f"{tuple(p.shape)} in {p.dtype}."
                )
            rows = sum(self.parts.get(p, p.shape[:1]))
            if rows not in (len(p), len(p) * p.shape[1]):  # a stack of experts has the product
                raise ValueError(f"parts of {tuple(p.shape)} must add up to its rows; got {rows}.")

    def __getstate__(self) -> dict[str, Any]:
        """Return what copies and pickles need: torch's own leaves out attributes of a subclass."""
        return {**super().__getstate__(), "parts": self.parts}

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take one step."""
        loss = None if closure is None else torch.enable_grad()(closure)()
        for group in self.param_groups:
            params = [p for p in group["params"] if p.grad is not None and p.numel()]
            if params:
                self._step_group(group, params)
        return loss

    def _step_group(self, group: dict[str, Any], params: list[Any]) -> None:
        matrices: list[Tensor] = []  # of all parameters, one after the other
        counts = []
        for p, update in zip(params, self._find_updates(group, params), strict=True):
            of_parameter = self._divide(p, update)
            matrices += of_parameter
            counts.append(len(of_parameter))

        coefficients = [group["ns_coefficients"]] * group["ns_steps"]
        rates = [group["lr"] * _adjust_rate(group["adjust_lr_fn"], *x.shape) for x in matrices]
        changes = iter(orthogonalise_all(matrices, coefficients, group["eps"], rates))

        steps = []
        for p, count in zip(params, counts, strict=True):
            parts = list(islice(changes, count))
            step = parts[0] if count == 1 else torch.cat(parts)
            steps.append(_shape_like(p, step))

        if group["weight_decay"]:
            torch._foreach_mul_(params, 1 - group["lr"] * group["weight_decay"])
        torch._foreach_sub_(params, steps)

    def _divide(self, p: Tensor, update: Any) -> Sequence[Tensor]:
        """Return the matrices of a parameter's layers."""
        if hasattr(update, "full_tensor"):  # all rows of a sharded matrix are needed together
            update = update.full_tensor()
        sizes = self.parts.get(p) or (len(update),)
        rows = update.reshape(sum(sizes), -1)
        return rows.split(sizes) if len(sizes) > 1 else [rows]

    def _find_updates(self, group: dict[str, Any], params: list[Any]) -> list[Any]:
        """Return the momenta after this step's gradients, or Nesterov's look ahead."""
        gradients: list[Any] = [p.grad for p in params]
        for p, g in zip(params, gradients, strict=True):
            if "momentum_buffer" not in self.state[p]:
                self.state[p]["momentum_buffer"] = torch.zeros_like(g)
        momenta: Any = [self.state[p]["momentum_buffer"] for p in params]
        torch._foreach_lerp_(momenta, gradients, 1 - group["momentum"])
        if group["nesterov"]:
            momenta = torch._foreach_lerp(gradients, momenta, group["momentum"])
        return momenta


def _try_torchs(lr: float | Tensor, options: dict[str, Any]) -> dict[str, Any]:
    """Return all options of torch's Muon; raise for those that it would find out about later."""
    p = nn.Parameter(torch.zeros(1, 1, device="cpu"))
    p.grad = torch.zeros_like(p)
    given: Any = {"lr": lr, **options}
    torchs = torch.optim.Muon([p], **given)
    check_count("ns_steps", torchs.defaults["ns_steps"])
    check_flag("nesterov", torchs.defaults["nesterov"])
    check_rate("eps", torchs.defaults["eps"])
    try:
        torchs.step()
    except (RuntimeError, TypeError, ValueError) as error:
        raise ValueError(f"Muon cannot step with {options}: {error}.") from error
    return torchs.defaults


def _shape_like(p: Any, step: Tensor) -> Tensor:
    """Return a step in the parameter's shape, and sharded as it is."""
    step = step.view(p.shape)
    if not hasattr(p, "placements"):
        return step
    from torch.distributed.tensor import DTensor, Replicate

    everywhere = [Replicate()] * p.device_mesh.ndim
    whole = DTensor.from_local(step, p.device_mesh, everywhere, run_check=False)
    return whole.redistribute(placements=p.placements)


def _adjust_rate(name: str | None, out: int, fan_in: int) -> float:
    """Return torch's adjustment of the rate to a matrix's shape."""
    if name == "match_rms_adamw":
        return 0.2 * math.sqrt(max(out, fan_in))
    if name == "spectral_unclamped":
        return math.sqrt(out / fan_in)
    return math.sqrt(max(1, out / fan_in))


# ---- Newton-Schulz


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
