"""Muon on matrices whose rows are units, many matrices in one batch.

The update of torch.optim.Muon: with momentum M <- mu M + (1 - mu) G, the matrix nearest to
orthogonal of (1 - mu) G + mu M, found by Newton-Schulz steps in bfloat16. torch's Muon steps one
matrix after the other, with 25 kernel launches each; here matrices of equal short side share them.
A convolution's weight of any rank is flattened to (out, fan-in).
"""

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from geoparam.inspection import full_tensor

_SMALL = 1 << 22  # elements; a smaller matrix may be padded


class RowMuon(Optimizer):
    """torch.optim.Muon, with its options and state, for weights of two or more dimensions."""

    def __init__(self, params: Iterable[Any], lr: float | Tensor = 1e-3, **options: Any) -> None:
        given: Any = {"lr": lr, **options}
        probe = torch.optim.Muon([nn.Parameter(torch.zeros(1, 1))], **given)
        super().__init__(params, probe.defaults)

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
        gradients: list[Any] = [p.grad for p in params]
        for p, g in zip(params, gradients, strict=True):
            if "momentum_buffer" not in self.state[p]:
                self.state[p]["momentum_buffer"] = torch.zeros_like(g)
        buffers = [self.state[p]["momentum_buffer"] for p in params]
        torch._foreach_lerp_(buffers, gradients, 1 - group["momentum"])
        updates: Any = buffers
        if group["nesterov"]:
            updates = torch._foreach_lerp(gradients, buffers, group["momentum"])
        if group["weight_decay"]:
            torch._foreach_mul_(params, 1 - group["lr"] * group["weight_decay"])
        # Newton-Schulz needs all rows of a sharded matrix together.
        found = _orthogonalise_all([full_tensor(x).flatten(1) for x in updates], group)
        changes = [_shape_like(p, change) for p, change in zip(params, found, strict=True)]
        if isinstance(group["lr"], Tensor):
            torch._foreach_mul_(changes, group["lr"].to(changes[0].device))
        rate = 1.0 if isinstance(group["lr"], Tensor) else group["lr"]
        torch._foreach_sub_(params, changes, alpha=rate)


def _orthogonalise_all(matrices: list[Tensor], group: dict[str, Any]) -> list[Tensor]:
    """Return Muon's change for each matrix; those of a batch are made wide, and padded."""
    changes = list(matrices)
    coefficients = [group["ns_coefficients"]] * group["ns_steps"]
    for batch in _batches(matrices):
        wide = [torch.stack([matrices[i] for i in own]).bfloat16() for own in batch.values()]
        wide = [x.mT if x.shape[1] > x.shape[2] else x for x in wide]
        longest = max(x.shape[2] for x in wide)
        padded = [nn.functional.pad(x, (0, longest - x.shape[2])) for x in wide]
        result = orthogonalise(torch.cat(padded), coefficients, group["eps"])
        parts = result.split([len(own) for own in batch.values()])
        for ((out, fan_in), own), part in zip(batch.items(), parts, strict=True):
            part = part[:, :, : max(out, fan_in)]
            part = (part.mT if out > fan_in else part).to(matrices[own[0]].dtype)
            factor = _find_factor(group["adjust_lr_fn"], out, fan_in)
            for i, change in zip(own, (part * factor).unbind(), strict=True):
                changes[i] = change
    return changes


def _batches(matrices: list[Tensor]) -> list[dict[Any, list[int]]]:
    """Return batches of matrices by shape: all of one shape, or small with an equal short side.

    Small matrices are padded with columns of zeros, which Newton-Schulz steps leave zero. For them
    the calls cost more than the arithmetic.
    """
    found: dict[Any, dict[Any, list[int]]] = {}
    for i, x in enumerate(matrices):
        short, long = sorted(x.shape)
        key = short, 0 if short * long <= _SMALL else long, x.device, x.dtype
        found.setdefault(key, {}).setdefault(tuple(x.shape), []).append(i)
    return list(found.values())


def orthogonalise(
    matrices: Tensor, coefficients: Sequence[tuple[float, float, float]], eps: float = 1e-7
) -> Tensor:
    """Return nearly U V^T for each matrix U S V^T of a batch (matrices, out, in), in bfloat16.

    Each step has coefficients of its own.
    """
    is_tall = matrices.shape[1] > matrices.shape[2]
    x = matrices.bfloat16()
    x = x.mT if is_tall else x
    x = x / torch.linalg.matrix_norm(x, keepdim=True).clamp(min=eps)
    for a, b, c in coefficients:
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if is_tall else x


def _find_factor(name: str | None, out: int, fan_in: int) -> float:
    if name == "match_rms_adamw":
        return 0.2 * math.sqrt(max(out, fan_in))
    return math.sqrt(out / fan_in if name == "spectral_unclamped" else max(1, out / fan_in))


def _shape_like(p: Any, change: Tensor) -> Tensor:
    """Return a change in the parameter's shape, and sharded as it is."""
    change = change.reshape(p.shape)
    if not hasattr(p, "placements"):
        return change
    from torch.distributed.tensor import DTensor, Replicate

    everywhere = [Replicate()] * p.device_mesh.ndim
    whole = DTensor.from_local(change, p.device_mesh, everywhere, run_check=False)
    return whole.redistribute(placements=p.placements)
