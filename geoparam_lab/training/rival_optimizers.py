"""Optimizers to compare with: airbench's Muon, rotational SGD, AngularMuown, MuonH.

Each updates weights as matrices of rows (out, fan-in), convolutions flattened to that; layers of
equal shape are stacked and updated at once. `Together` joins one of them, or `geoparam.optim`'s
`RowMuon`, with torch's optimizer of all other parameters.

Notation: w is a row of W, g its gradient, m x n the shape, mu the momentum, polar(X) = U V^T for
X = U S V^T, by Newton-Schulz iterations in bfloat16. These bring singular values only near 1: to
0.68 to 1.20 with MUON, if they were above 0.003 |X|_F, and to 0.86 to 1.12 with EXPRESS, if they
were above 0.001 |X|_F.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import normalize

from geoparam.optim import orthogonalise as polar

State = dict[str, Tensor]

MUON = ((3.4445, -4.7750, 2.0315),) * 5
# Polar Express: the odd quintics that come closest to 1 on what the step before may give, from
# [0.001, 1] on, by linear programming; all but the last for arguments 1 % too large, as bfloat16
# makes them.
EXPRESS = (
    (8.3865, -24.3697, 17.7252),
    (4.1414, -3.0173, 0.5524),
    (3.9226, -2.8672, 0.5357),
    (3.2540, -2.3922, 0.4827),
    (2.2737, -1.6447, 0.4162),
)


class Together(torch.optim.Optimizer):
    """Several optimizers as one, with all groups and states, for schedules and checkpoints."""

    def __init__(self, *optimizers: torch.optim.Optimizer) -> None:
        groups = [group for optimizer in optimizers for group in optimizer.param_groups]
        super().__init__(groups, {})
        self.optimizers = [(optimizer, len(optimizer.param_groups)) for optimizer in optimizers]

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None if closure is None else torch.enable_grad()(closure)()
        groups = iter(self.param_groups)
        for optimizer, count in self.optimizers:
            optimizer.param_groups = [next(groups) for _ in range(count)]  # loading replaces them
            optimizer.state = self.state
            optimizer.step()
        return loss


class RowOptimizer(torch.optim.Optimizer):
    """Updates weights (out, ...) as stacks of matrices, by the rule of a subclass."""

    def __init__(
        self, weights: Sequence[nn.Parameter], lr: float, momentum: float, weight_decay: float = 0
    ) -> None:
        options = {"lr": lr, "momentum": momentum, "weight_decay": weight_decay}
        super().__init__([{"params": list(weights), "name": "rows"}], options)

    def start(self, weight: Tensor) -> State:
        """Return the state of one matrix before its first step."""
        return {"momentum_buffer": torch.zeros_like(weight)}

    def update(self, w: Tensor, g: Tensor, state: State, group: dict[str, Any]) -> Tensor:
        """Return the new weights (k, m, n), and put the new state into `state`."""
        raise NotImplementedError

    def look_ahead(self, g: Tensor, state: State, mu: float) -> Tensor:
        """Return Nesterov's momentum, (1 - mu) g + mu M with M <- mu M + (1 - mu) g."""
        return g.lerp(state["momentum_buffer"].lerp_(g, 1 - mu), mu)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None if closure is None else torch.enable_grad()(closure)()
        for group in self.param_groups:
            by_shape = defaultdict(list)
            for weight in group["params"]:
                if weight.grad is not None:
                    by_shape[weight.flatten(1).shape, weight.dtype, weight.device].append(weight)
            for weights in by_shape.values():
                self._step(weights, group)
        return loss

    def _step(self, weights: Sequence[Tensor], group: dict[str, Any]) -> None:
        """Update weights of equal shape."""
        for weight in weights:
            if not self.state[weight]:
                self.state[weight] = self.start(weight.flatten(1))
        names = self.state[weights[0]]
        state = {name: torch.stack([self.state[w][name] for w in weights]) for name in names}
        rows = torch.stack([weight.flatten(1) for weight in weights])
        gradients = [weight.grad.flatten(1) for weight in weights if weight.grad is not None]
        updated = self.update(rows, torch.stack(gradients), state, group)
        for i, weight in enumerate(weights):
            weight.copy_(updated[i].view(weight.shape))
            self.state[weight] = {name: values[i] for name, values in state.items()}


class Airbench(RowOptimizer):
    """W <- sqrt(m) W / |W|_F before every step, then W <- W - lr polar(X) by three iterations.

    X is Nesterov's momentum.
    """

    def update(self, w: Tensor, g: Tensor, state: State, group: dict[str, Any]) -> Tensor:
        lengths = w.norm(dim=(1, 2), keepdim=True).clamp(min=1e-30)
        turn = polar(self.look_ahead(g, state, group["momentum"]), MUON[:3])
        return w * (math.sqrt(w.shape[1]) / lengths) - group["lr"] * turn


class MuonH(RowOptimizer):
    """Matrices of constant length R = |W0|_F that move by a constant share of it (Hyperball).

    With X Nesterov's momentum and N(A) = A / |A|_F:

        W <- R N(W - lr R N(polar(X))).
    """

    def start(self, weight: Tensor) -> State:
        return super().start(weight) | {"length": weight.norm().view(1, 1)}

    def update(self, w: Tensor, g: Tensor, state: State, group: dict[str, Any]) -> Tensor:
        change = polar(self.look_ahead(g, state, group["momentum"]), MUON).to(w.dtype)
        length = state["length"]
        return length * _unit(w - group["lr"] * length * _unit(change))


class RotationalSGD(RowOptimizer):
    """Rows of constant length that turn by sqrt(2 lr decay / (1 + mu)) on average.

    With n0 the length at the start and d the momentum's part across w:

        a^2 <- 0.99 a^2 + 0.01 |d|^2,   w <- w - turn n0 d / a,   w <- n0 N(w - mean(w)).
    """

    MEMORY = 0.99

    def start(self, weight: Tensor) -> State:
        lengths = weight.norm(dim=1, keepdim=True)
        zeros, steps = torch.zeros_like(lengths), lengths.new_zeros(1, 1)
        return super().start(weight) | {"length": lengths, "square": zeros, "steps": steps}

    def update(self, w: Tensor, g: Tensor, state: State, group: dict[str, Any]) -> Tensor:
        mu, length = group["momentum"], state["length"]
        turn = math.sqrt(2 * group["lr"] * group["weight_decay"] / (1 + mu))
        d = state["momentum_buffer"].mul_(mu).add_(g)
        d = d - w * _dot(d, w) / length.square().clamp(min=1e-30)
        state["square"].lerp_(_dot(d, d), 1 - self.MEMORY)
        state["steps"] += 1
        mean = state["square"] / (1 - self.MEMORY ** state["steps"])
        w = w - turn * length * d / mean.sqrt().clamp(min=1e-30)
        return length * normalize(w - w.mean(dim=-1, keepdim=True), dim=-1)


class AngularMuown(RowOptimizer):
    """W = diag(s) U, the unit rows U turned by Muon, the scales s stepped by Adam (0.9, 0.95).

    With T = s (g - <g, u> u), the gradient of a unit row, and M <- mu M + T:

        U <- N(U - lr sqrt(max(1, m / n)) polar(T + mu M)).

    The authors' further factor, which falls with the steps under a schedule that holds and is 1
    under a cosine, is left out.
    """

    BETAS = (0.9, 0.95)

    def start(self, weight: Tensor) -> State:
        lengths = weight.norm(dim=1, keepdim=True)
        scale = torch.where(lengths > 0, lengths, math.sqrt(0.33))
        zeros, steps = torch.zeros_like(lengths), lengths.new_zeros(1, 1)
        adam = {"mean": zeros, "square": zeros.clone(), "steps": steps}
        return super().start(weight) | {"scale": scale} | adam

    def update(self, w: Tensor, g: Tensor, state: State, group: dict[str, Any]) -> Tensor:
        mu, scale = group["momentum"], state["scale"]
        u = w / scale
        along = _dot(g, u)
        tangent = scale * (g - along * u)
        momentum = state["momentum_buffer"].mul_(mu).add_(tangent)
        rate = group["lr"] * math.sqrt(max(1, w.shape[1] / w.shape[2]))
        u = normalize(u - rate * polar(tangent + mu * momentum, EXPRESS), dim=-1)
        scale = scale - group["lr"] * self._adam(along, state)
        floor = torch.where(scale < 0, -1e-7, 1e-7)
        state["scale"] = torch.where(scale.abs() < 1e-7, floor, scale)
        return state["scale"] * u

    def _adam(self, g: Tensor, state: State) -> Tensor:
        """Return Adam's update for a gradient."""
        first, second = self.BETAS
        state["steps"] += 1
        state["mean"].lerp_(g, 1 - first)
        state["square"].lerp_(g.square(), 1 - second)
        deviation = (state["square"] / (1 - second ** state["steps"])).sqrt()
        return state["mean"] / (1 - first ** state["steps"]) / (deviation + 1e-8)


def _dot(a: Tensor, b: Tensor) -> Tensor:
    return (a * b).sum(dim=-1, keepdim=True)


def _unit(matrices: Tensor) -> Tensor:
    """Return matrices (k, m, n) over their lengths."""
    return matrices / matrices.norm(dim=(1, 2), keepdim=True).clamp(min=1e-30)
