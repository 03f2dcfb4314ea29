"""Muon on matrices whose rows are units, many matrices in one batch.

The update of torch.optim.Muon: with momentum M <- mu M + (1 - mu) G, the matrix nearest to
orthogonal of (1 - mu) G + mu M, found by Newton-Schulz steps in bfloat16. torch's own takes one
matrix after the other, which is 25 launches each; here matrices with an equal short side share
them. A convolution's weight of any rank is flattened to (out, fan-in).
"""

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer


class RowMuon(Optimizer):
    """torch.optim.Muon, with its options and state, for weights of two or more dimensions."""

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor = 1e-3,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_coefficients: tuple[float, float, float] = (3.4445, -4.7750, 2.0315),
        eps: float = 1e-7,
        ns_steps: int = 5,
        adjust_lr_fn: str | None = None,
    ) -> None:
        if adjust_lr_fn not in (None, "original", "match_rms_adamw", "spectral_unclamped"):
            raise ValueError(
                "adjust_lr_fn is None, 'original', 'match_rms_adamw' or 'spectral_unclamped'; "
                f"got {adjust_lr_fn!r}."
            )
        defaults = {name: value for name, value in locals().items() if name in _OPTIONS}
        super().__init__(params, defaults)

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
        gradients = [p.grad for p in params]
        for p in params:
            if "momentum_buffer" not in self.state[p]:
                self.state[p]["momentum_buffer"] = torch.zeros_like(p.grad)
        buffers = [self.state[p]["momentum_buffer"] for p in params]
        torch._foreach_lerp_(buffers, gradients, 1 - group["momentum"])
        updates = buffers
        if group["nesterov"]:
            updates = torch._foreach_lerp(gradients, buffers, group["momentum"])
        if group["weight_decay"]:
            torch._foreach_mul_(params, 1 - group["lr"] * group["weight_decay"])
        for members in _batches(params):
            wide = [_wide(_whole(updates[i])) for i in members]
            batch = wide[0].new_zeros(
                len(wide), len(wide[0]), max(x.shape[1] for x in wide), dtype=torch.bfloat16
            )
            for slot, x in zip(batch, wide, strict=True):
                slot[:, : x.shape[1]].copy_(x)
            coefficients = [group["ns_coefficients"]] * group["ns_steps"]
            batch = orthogonalise(batch, coefficients, group["eps"])
            for slot, x, i in zip(batch, wide, members, strict=True):
                out, fan_in = params[i].flatten(1).shape
                rate = group["lr"] * _adjustment(group["adjust_lr_fn"], out, fan_in)
                update = slot[:, : x.shape[1]]
                update = (update.mT if out > fan_in else update).reshape(params[i].shape)
                params[i].sub_(_like(update.to(params[i].dtype) * rate, params[i]))


def _batches(params: list[Tensor]) -> list[list[int]]:
    """Return which matrices share a batch: those of one shape, and small ones of one short side.

    A small matrix is filled up with columns of zeros, which Newton-Schulz steps leave zero: calls
    cost more than the arithmetic there.
    """
    found: dict[Any, list[int]] = {}
    for i, p in enumerate(params):
        short, long = sorted(p.flatten(1).shape)
        is_small = short * long <= _SMALL
        found.setdefault((short, 0 if is_small else long, p.device), []).append(i)
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


_SMALL = 1 << 22  # elements
_OPTIONS = {
    "lr",
    "weight_decay",
    "momentum",
    "nesterov",
    "ns_coefficients",
    "eps",
    "ns_steps",
    "adjust_lr_fn",
}


def _adjustment(name: str | None, out: int, fan_in: int) -> float:
    if name == "match_rms_adamw":
        return 0.2 * math.sqrt(max(out, fan_in))
    return math.sqrt(out / fan_in if name == "spectral_unclamped" else max(1, out / fan_in))


def _wide(x: Tensor) -> Tensor:
    """Return a weight as a matrix with the short side first."""
    x = x.flatten(1)
    return x.mT if x.shape[0] > x.shape[1] else x


def _whole(x: Any) -> Tensor:
    """Return all rows of a sharded matrix: Newton-Schulz needs them together."""
    return x.full_tensor() if hasattr(x, "full_tensor") else x


def _like(update: Tensor, p: Any) -> Tensor:
    """Return the update in the shape of `p`, and of a sharded one this process's part."""
    if not hasattr(p, "placements"):
        return update
    from torch.distributed.tensor import DTensor, Replicate

    everywhere = [Replicate()] * p.device_mesh.ndim
    whole = DTensor.from_local(update, p.device_mesh, everywhere, run_check=False)
    return whole.redistribute(placements=p.placements)
