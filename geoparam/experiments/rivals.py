"""Optimizers to compare with: Muon on rows, airbench's Muon, rotational SGD, AngularMuown.

Each updates weights of hidden layers as matrices of rows (out, fan-in), convolutions flattened to
that, by a rule of its own. All other parameters, the output layer's too, go to a torch optimizer,
`rest`. Layers of equal shape are stacked and updated at once.

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

Coefficients = Sequence[tuple[float, float, float]]
State = dict[str, Tensor]

MUON: Coefficients = [(3.4445, -4.7750, 2.0315)] * 5
# Polar Express: the odd quintics that come closest to 1 on what the step before may give, from
# [0.001, 1] on, by linear programming; all but the last for arguments 1 % too large, as bfloat16
# makes them.
EXPRESS: Coefficients = (
    (8.3865, -24.3697, 17.7252),
    (4.1414, -3.0173, 0.5524),
    (3.9226, -2.8672, 0.5357),
    (3.2540, -2.3922, 0.4827),
    (2.2737, -1.6447, 0.4162),
)


def polar(x: Tensor, coefficients: Coefficients = MUON) -> Tensor:
    """Return about U V^T for each matrix U S V^T of a stack (k, m, n), in bfloat16.

    Example:
        >>> x = torch.randn(2, 8, 32, generator=torch.Generator().manual_seed(0))
        >>> values = torch.linalg.svdvals(polar(x, EXPRESS).float())
        >>> bool(values.min() > 0.85), bool(values.max() < 1.14)
        (True, True)
    """
    tall = x.shape[-2] > x.shape[-1]
    x = x.mT if tall else x
    x = (x / x.norm(dim=(-2, -1), keepdim=True).clamp(min=1e-30)).bfloat16()
    for a, b, c in coefficients:
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if tall else x


class RowOptimizer(torch.optim.Optimizer):
    """Updates some weights as stacks of matrices, and all else by another optimizer.

    Its groups are one of rows and those of `rest`, whose state is held here too: a schedule and a
    checkpoint see one optimizer.

    Args:
        weights: of two dimensions or more, rows first.
        rest: a torch optimizer over the other parameters.
        lr: rate of the rows.
        momentum: of the rows.
        weight_decay: of the rows, where the rule has one.
    """

    def __init__(
        self,
        weights: Sequence[nn.Parameter],
        rest: torch.optim.Optimizer,
        lr: float,
        momentum: float,
        weight_decay: float = 0.0,
    ) -> None:
        options = {"lr": lr, "momentum": momentum, "weight_decay": weight_decay}
        super().__init__([{"params": list(weights), "name": "rows"}, *rest.param_groups], options)
        self.rest = rest

    def start(self, weight: Tensor) -> State:
        """Return the state of one matrix before its first step."""
        return {"momentum_buffer": torch.zeros_like(weight)}

    def update(self, w: Tensor, g: Tensor, state: State, group: dict[str, Any]) -> Tensor:
        """Return the new weights (k, m, n), and put the new state into `state`."""
        raise NotImplementedError

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None if closure is None else torch.enable_grad()(closure)()
        group, *others = self.param_groups
        for weights in _by_shape(group["params"]):
            self._step(weights, group)
        self.rest.param_groups, self.rest.state = others, self.state  # loading replaces both
        self.rest.step()
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


def _by_shape(weights: Sequence[Tensor]) -> list[list[Tensor]]:
    found = defaultdict(list)
    for weight in weights:
        if weight.grad is not None:
            found[weight.flatten(1).shape, weight.dtype, weight.device].append(weight)
    return list(found.values())


def _nesterov(g: Tensor, state: State, group: dict[str, Any]) -> Tensor:
    """Return (1 - mu) g + mu M, with M <- mu M + (1 - mu) g."""
    state["momentum_buffer"].lerp_(g, 1 - group["momentum"])
    return g.lerp(state["momentum_buffer"], group["momentum"])


class Muon(RowOptimizer):
    """W <- (1 - lr decay) W - lr sqrt(max(1, m / n)) polar(X), X the Nesterov momentum.

    It is torch.optim.Muon, for convolutions too.
    """

    def update(self, w: Tensor, g: Tensor, state: State, group: dict[str, Any]) -> Tensor:
        turn = polar(_nesterov(g, state, group))
        rate = group["lr"] * math.sqrt(max(1, w.shape[1] / w.shape[2]))
        return w * (1 - group["lr"] * group["weight_decay"]) - rate * turn


class Airbench(RowOptimizer):
    """W <- sqrt(m) W / |W|_F before every step, then W <- W - lr polar(X) by three iterations."""

    def update(self, w: Tensor, g: Tensor, state: State, group: dict[str, Any]) -> Tensor:
        lengths = w.norm(dim=(1, 2), keepdim=True).clamp(min=1e-30)
        turn = polar(_nesterov(g, state, group), MUON[:3])
        return w * (math.sqrt(w.shape[1]) / lengths) - group["lr"] * turn


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
    """

    BETAS = (0.9, 0.95)

    def start(self, weight: Tensor) -> State:
        lengths = weight.norm(dim=1, keepdim=True)
        scale = torch.where(lengths > 0, lengths, math.sqrt(0.33))
        zeros, steps = torch.zeros_like(lengths), lengths.new_zeros(1, 1)
        return super().start(weight) | {
            "scale": scale,
            "mean": zeros,
            "square": zeros.clone(),
            "steps": steps,
        }

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
