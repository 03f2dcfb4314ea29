"""Appendix D, equations 28 and 29: one step of Fisher's natural gradient, under SP and under GmP.

The network of six ReLU units is to fit another one that is not far away. Its outputs f(p) have
unit normal noise, so the Fisher matrix is F = J^T J / N with J = df / dp, and the gradient of half
the mean squared error is J^T e / N. The natural direction -F^-1 grad is the least squares solution
of J v = -e. ReLU networks have directions without effect (a unit's scale against its output
weight), so the solution is that of least norm.

    equation 29    p + eta v, the step of first order, which follows the coordinates
    equation 28    the exponential map: the geodesic of Fisher's metric that starts with eta v

A geodesic's acceleration has no component among the functions that the parameters can reach:
J p'' = -(d^2 f)(p', p') in the sense of least squares. It is integrated by Runge and Kutta's rule.

`size` is the rate eta; `error` is the length of the difference between the output changes of SP
and GmP, over that of SP's change.
"""

from collections.abc import Callable

import torch
from claim import Cases, Record, make_tasks, run
from torch import Tensor, nn
from torch.func import functional_call, jacfwd, jvp

from geoparam_lab import methods

ROWS, INPUTS, UNITS = 64, 4, 6
AWAY = 0.3  # deviation of the target network's weights from the start
INTERVALS = 50  # of the integration
RANK = 1e-9  # singular values of J below this share of the largest are zero

Outputs = Callable[[Tensor], Tensor]  # from a vector of parameters


def measure(cases: Cases, *unused: object) -> list[Record]:
    records = []
    for _, _, equation, rate, _, seed in cases:
        sp = change_outputs("sp", equation, rate, seed)
        gmp = change_outputs("gmp", equation, rate, seed)
        records.append({"error": float((gmp - sp).norm() / sp.norm())})
    return records


def change_outputs(method: str, equation: str, rate: float, seed: int) -> Tensor:
    """Return what one natural step changes in the outputs of a network under `method`."""
    widths = (INPUTS, UNITS, 1)
    with methods.use_seed(seed):
        x = torch.randn(ROWS, INPUTS, dtype=torch.float64)
        plain, weights = flatten(methods.mlp("sp", widths, seed=seed), x)
        targets = plain(weights + AWAY * torch.randn_like(weights))
    outputs, start = flatten(methods.mlp(method, widths, seed=seed), x)
    step = -rate * solve(jacfwd(outputs)(start), outputs(start) - targets)
    end = start + step
    if equation == "equation-28":
        end = follow_geodesic(outputs, start, step)
    return outputs(end) - outputs(start)


def flatten(model: nn.Module, x: Tensor) -> tuple[Outputs, Tensor]:
    """Return the outputs at x as a function of one vector of parameters, and that vector."""
    named = dict(model.named_parameters())
    sizes = [parameter.numel() for parameter in named.values()]

    def outputs(vector: Tensor) -> Tensor:
        values = {}
        for name, part in zip(named, vector.split(sizes), strict=True):
            values[name] = part.view_as(named[name])
        return functional_call(model, values, (x,)).squeeze(1)

    start = torch.cat([parameter.detach().flatten() for parameter in named.values()])
    return outputs, start


def solve(jacobian: Tensor, change: Tensor) -> Tensor:
    """Return the least parameter step that changes the outputs so, as nearly as it can."""
    return torch.linalg.pinv(jacobian, rtol=RANK) @ change


def follow_geodesic(outputs: Outputs, start: Tensor, velocity: Tensor) -> Tensor:
    """Return the end, after unit time, of the geodesic with this start and velocity."""

    def derive(state: Tensor) -> Tensor:
        place, speed = state

        def change(p: Tensor) -> Tensor:
            return jvp(outputs, (p,), (speed,))[1]

        bend = jvp(change, (place,), (speed,))[1]
        return torch.stack([speed, -solve(jacfwd(outputs)(place), bend)])

    state, h = torch.stack([start, velocity]), 1 / INTERVALS
    for _ in range(INTERVALS):
        k1 = derive(state)
        k2 = derive(state + h / 2 * k1)
        k3 = derive(state + h / 2 * k2)
        k4 = derive(state + h * k3)
        state = state + h / 6 * (k1 + 2 * k2 + 2 * k3 + k4)
    return state[0]


if __name__ == "__main__":
    equations = ["equation-28", "equation-29"]
    run("fisher", make_tasks("fisher", ["normal"], equations, (0.001, 0.01, 0.1)), measure)
