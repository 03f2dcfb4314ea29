"""Muon on matrices whose rows are units, many matrices in one batch.

The update of torch.optim.Muon: with momentum M <- mu M + (1 - mu) G, the matrix nearest to
orthogonal of (1 - mu) G + mu M, found by Newton-Schulz steps in bfloat16. torch's Muon steps one
matrix after the other, with 25 kernel launches each; here matrices of one shape share them.
A convolution's weight of any rank is flattened to (out, fan-in).
"""

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer


class RowMuon(Optimizer):
    """torch.optim.Muon, with its options and state, for weights of two or more dimensions."""

    def __init__(self, params: Iterable[Any], lr: float | Tensor = 1e-3, **options: Any) -> None:
        given: Any = {"lr": lr, **options}
        probe = torch.optim.Muon([nn.Parameter(torch.zeros(1, 1))], **given)
        super().__init__(params, probe.defaults)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take one step."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            params = [p for p in group["params"] if p.grad is not None and p.numel()]
            if params:
                self._step_group(group, params)
        return loss

    def _step_group(self, group: dict[str, Any], params: list[Tensor]) -> None:
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
        changes = self._orthogonalise(group, [_gather(x).flatten(1) for x in updates])
        changes = [_shard(x, p) for x, p in zip(changes, params, strict=True)]
        if isinstance(group["lr"], Tensor):
            torch._foreach_mul_(changes, group["lr"].to(changes[0].device))
        rate = 1.0 if isinstance(group["lr"], Tensor) else group["lr"]
        torch._foreach_sub_(params, changes, alpha=rate)

    def _orthogonalise(self, group: dict[str, Any], matrices: list[Tensor]) -> list[Tensor]:
        """Return the changes of these matrices at rate 1; those of one shape are a batch."""
        batches: dict[Any, list[int]] = defaultdict(list)
        for i, x in enumerate(matrices):
            batches[x.shape, x.device, x.dtype].append(i)
        changes = list(matrices)
        coefficients = [group["ns_coefficients"]] * group["ns_steps"]
        for (shape, _, dtype), members in batches.items():
            batch = torch.stack([matrices[i] for i in members])
            result = orthogonalise(batch, coefficients, group["eps"]).to(dtype)
            factor = _find_factor(group["adjust_lr_fn"], *shape)
            for i, change in zip(members, (result * factor).unbind(), strict=True):
                changes[i] = change
        return changes


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


def _gather(x: Any) -> Tensor:
    """Return all rows of a sharded matrix: Newton-Schulz needs them together."""
    return x.full_tensor() if hasattr(x, "full_tensor") else x


def _shard(change: Tensor, p: Any) -> Tensor:
    """Return a change in the parameter's shape, and sharded as it is."""
    change = change.reshape(p.shape)
    if not hasattr(p, "placements"):
        return change
    from torch.distributed.tensor import DTensor, Replicate

    everywhere = [Replicate()] * p.device_mesh.ndim
    whole = DTensor.from_local(change, p.device_mesh, everywhere, run_check=False)
    return whole.redistribute(placements=p.placements)
