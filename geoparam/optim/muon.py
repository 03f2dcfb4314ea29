"""Muon on matrices whose rows are units, many matrices in one batch.

The update of torch.optim.Muon: with momentum M <- mu M + (1 - mu) G, the matrix nearest to
orthogonal of (1 - mu) G + mu M, found by Newton-Schulz steps in bfloat16. torch's Muon steps one
matrix after the other, with 25 kernel launches each; here matrices of equal shape share them.
A convolution's weight of any rank is flattened to (out, fan-in), and a parameter that holds
several layers is divided into them.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from geoparam.arguments import check_count, check_flag, check_rate

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
        _check_iteration(**options)
        given: Any = {"lr": lr, **options}
        torchs = torch.optim.Muon([nn.Parameter(torch.zeros(1, 1))], **given)
        super().__init__(params, torchs.defaults)
        self.parts = parts or {}

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
        updates = self._find_updates(group, params)

        layers: list[Tensor] = []  # of all parameters, one after the other
        counts = []
        for p, update in zip(params, updates, strict=True):
            # All rows of a sharded matrix are needed together.
            whole = update.full_tensor() if hasattr(update, "full_tensor") else update
            sizes = self.parts.get(p) or (len(whole),)
            parts = whole.reshape(sum(sizes), -1).split(sizes)
            layers += parts
            counts.append(len(parts))
        changes = iter(_orthogonalise_all(layers, group))

        if group["weight_decay"]:
            torch._foreach_mul_(params, 1 - group["lr"] * group["weight_decay"])
        by_parameter = []
        for p, count in zip(params, counts, strict=True):
            parts = [next(changes) for _ in range(count)]
            by_parameter.append(_shape_like(p, parts[0] if count == 1 else torch.cat(parts)))
        torch._foreach_add_(params, by_parameter)

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


def _check_iteration(
    ns_steps: Any = 5,
    ns_coefficients: Any = (1, 1, 1),
    eps: Any = 0,
    nesterov: Any = True,
    **_: Any,
) -> None:
    """Raise for options that torch's Muon finds out about at its first step."""
    check_count("ns_steps", ns_steps)
    check_rate("eps", eps)
    check_flag("nesterov", nesterov)
    is_listed = isinstance(ns_coefficients, tuple | list) and len(ns_coefficients) == 3
    if not is_listed or not all(isinstance(c, int | float) for c in ns_coefficients):
        raise ValueError(f"ns_coefficients are three numbers; got {ns_coefficients!r}.")


def _orthogonalise_all(matrices: list[Tensor], group: dict[str, Any]) -> list[Tensor]:
    """Return the step of each matrix: the nearest orthogonal one, times -lr and its factor."""
    changes, dtype = list(matrices), matrices[0].dtype
    coefficients = [group["ns_coefficients"]] * group["ns_steps"]
    for batch in _find_batches(matrices):
        stacks = []
        for members in batch.values():
            stacks.append(_stack([matrices[i] for i in members], group["eps"]))
        result = _iterate(_join(stacks), coefficients)

        first = 0
        for (out, fan_in), members in batch.items():
            long, is_tall = max(out, fan_in), out > fan_in
            part = result[first : first + len(members), :, :long]
            part = part.mT if is_tall else part
            first += len(members)
            factor = -_find_factor(group["adjust_lr_fn"], out, fan_in)
            steps = torch.empty_like(part, dtype=dtype, memory_format=torch.contiguous_format)
            steps.copy_(part).mul_(factor * group["lr"])
            for i, step in zip(members, steps.unbind(), strict=True):
                changes[i] = step
    return changes


def _find_batches(matrices: list[Tensor]) -> list[dict[tuple[int, int], list[int]]]:
    """Return batches of matrices by shape: of one shape, or tiny with an equal short side."""
    batches = defaultdict[Any, dict[Any, list[int]]](dict)
    for i, matrix in enumerate(matrices):
        short, long = sorted(matrix.shape)
        is_tiny = short * long <= _TINY.get(matrix.device.type, 0)
        key = short, 0 if is_tiny else long, matrix.device, matrix.dtype
        batches[key].setdefault(tuple(matrix.shape), []).append(i)
    return list(batches.values())


def _stack(matrices: list[Tensor], eps: float) -> Tensor:
    """Return matrices of one shape as a stack of wide ones of norm 1, in bfloat16."""
    stack = _normalise(torch.stack(matrices), eps)
    return stack.mT if stack.shape[1] > stack.shape[2] else stack


def _join(stacks: list[Tensor]) -> Tensor:
    """Return stacks of wide matrices as one.

    Shorter ones are padded with columns of zeros, which Newton-Schulz steps leave zero.
    """
    if len(stacks) == 1:
        return stacks[0]
    longest = max(stack.shape[2] for stack in stacks)
    return torch.cat([nn.functional.pad(x, (0, longest - x.shape[2])) for x in stacks])


def orthogonalise(
    matrices: Tensor, coefficients: Sequence[tuple[float, float, float]], eps: float = 1e-7
) -> Tensor:
    """Return nearly U V^T for each matrix U S V^T of a batch (matrices, out, in), in bfloat16.

    Each step has coefficients of its own.
    """
    is_tall = matrices.shape[1] > matrices.shape[2]
    x = _normalise(matrices, eps)
    x = _iterate(x.mT if is_tall else x, coefficients)
    return x.mT if is_tall else x


def _normalise(matrices: Tensor, eps: float) -> Tensor:
    size = torch.linalg.vector_norm(matrices, dim=(1, 2), keepdim=True)
    return (matrices / size.clamp(min=eps)).bfloat16()


def _iterate(x: Tensor, coefficients: Sequence[tuple[float, float, float]]) -> Tensor:
    """Take Newton-Schulz steps X <- a X + (b A + c A^2) X with A = X X^T."""
    for a, b, c in coefficients:
        gram = x @ x.mT
        polynomial = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
        x = torch.baddbmm(x, polynomial, x, beta=a)
    return x


def _find_factor(name: str | None, out: int, fan_in: int) -> float:
    """Return torch's adjustment of the rate to a matrix's shape."""
    if name == "match_rms_adamw":
        return 0.2 * math.sqrt(max(out, fan_in))
    if name == "spectral_unclamped":
        return math.sqrt(out / fan_in)
    return math.sqrt(max(1, out / fan_in))


def _shape_like(p: Any, change: Tensor) -> Tensor:
    """Return a change in the parameter's shape, and sharded as it is."""
    change = change.reshape(p.shape)
    if not hasattr(p, "placements"):
        return change
    from torch.distributed.tensor import DTensor, Replicate

    everywhere = [Replicate()] * p.device_mesh.ndim
    whole = DTensor.from_local(change, p.device_mesh, everywhere, run_check=False)
    return whole.redistribute(placements=p.placements)
