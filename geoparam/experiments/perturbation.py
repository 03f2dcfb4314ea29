r"""Figure 1, b to e: a unit in the plane whose stored parameters are all moved by the same delta.

The unit has w ~ 0.001 N(0, I) and b ~ 0.001 N(0, 1), and is stored in several ways:

    sp           (w, b)
    wn           (v, l, b) with v = w, l = ||w||
    gmp          (theta, lam) with u(theta) = w / ||w||, lam = b / ||w||; r = ||w|| is left alone
    intrinsic    (d, lam) with d = w / ||w||; not in the figure

Each panel has one delta, 1e-4 to 1e-1, and all methods. Under BN the unit is (w, gamma, beta), and
on whitened data that is WN's (v, l, b): the same panel (a test of `analysis.perturbation`).

**The papers' unit.** numpy's legacy seed 1, w drawn first, then b: w = (1.62, -0.61) / 1000,
b = -0.53 / 1000, as in the notebook that the papers' code has for this figure. That notebook takes
theta = arccos(w_1 / ||w||), which loses the sign of w_2. So it draws the mirror image of the unit,
and what it shows of SP and WN turns less than they do: 4.1, 12.2, 18.3 and 23.7 degrees for what
is in truth 4.1, 29.1, 59.6 and 65.0. Its picture of GmP is right up to the mirror.

**What holds for every unit.** With two inputs there is one angle, and delta turns GmP's unit by
delta radians, whatever ||w|| is. An intrinsic unit is turned by at most arcsin(sqrt(2) delta).
SP and WN turn alike, by an angle that depends on delta / ||w||: once delta is much larger than
||w|| they point to (1, 1), wherever they pointed before.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.utils.parametrizations import weight_norm

import geoparam as gp
from geoparam.analysis.boundary import layer_boundaries
from geoparam.analysis.perturbation import DELTAS, Response, perturbed, respond, steps

Array = np.ndarray

SEED = 1  # the papers'
METHODS = ("sp", "wn", "gmp", "intrinsic")
SIZE = 0.001
TRUE_ROTATIONS = (4.1, 29.1, 59.6, 65.0)  # of the papers' unit under SP and WN, at DELTAS
DRAWN_ROTATIONS = (4.1, 12.2, 18.3, 23.7)  # what the papers' picture shows of them


@dataclass(frozen=True)
class Lines:
    """One unit under one method, before and after each perturbation, ready to be drawn.

    Args:
        directions: unit vectors, the unperturbed one first, (1 + deltas, 2).
        lams: signed distances of the boundary likewise, (1 + deltas,).
        rotations: angles to the unperturbed boundary in degrees, (deltas,).
        displacements: ||delta phi||, (deltas,).
    """

    directions: Array
    lams: Array
    rotations: Array
    displacements: Array

    @property
    def drawn_rotations(self) -> Array:
        """The turns that the papers' notebook shows of SP and WN, without the sign of w_2."""
        theta = np.degrees(np.arccos(self.directions[:, 0]))
        return np.abs(theta[1:] - theta[0])

    @property
    def locations(self) -> Array:
        """phi, the boundaries' nearest points to the origin, (1 + deltas, 2)."""
        return -self.lams[:, None] * self.directions


@dataclass(frozen=True)
class Outcome:
    """What the experiment gives: the papers' unit in detail, and how many others turn.

    Args:
        seed: of the one unit.
        deltas: sizes of the perturbations, (deltas,).
        lines: of that unit, by method.
        rotations: of many units in degrees, by method, (deltas, units).
        displacements: ||delta phi|| of them, by method, (deltas, units).
        bounds: what no perturbation of the same length turns them beyond, (deltas, units).
    """

    seed: int
    deltas: Array
    lines: dict[str, Lines]
    rotations: dict[str, Array]
    displacements: dict[str, Array]
    bounds: dict[str, Array]

    def records(self) -> list[dict[str, Any]]:
        """One record for each method and delta: the unit's turn, and the distribution of others'.

        Example:
            >>> record = run(seeds=10).records()[1]
            >>> record["method"], record["delta"], round(record["rotation"], 1)
            ('sp', 0.001, 29.1)
        """
        return [
            {
                "method": method,
                "delta": float(delta),
                "rotation": float(lines.rotations[i]),
                **(_reference(method, lines, i, delta) if self.seed == SEED else {}),
                **_spread("rotation", self.rotations[method][i]),
                **_spread("displacement", self.displacements[method][i]),
                "bound_max": float(self.bounds[method][i].max()),
            }
            for method, lines in self.lines.items()
            for i, delta in enumerate(self.deltas)
        ]


def run(
    seed: int = SEED,
    seeds: int = 1000,
    deltas: Sequence[float] = DELTAS,
    methods: Sequence[str] = METHODS,
) -> Outcome:
    """Perturb the unit of `seed`, and those of the seeds 0, 1, ..., in the stored parameters.

    Example:
        >>> outcome = run(seeds=100)
        >>> outcome.lines["gmp"].rotations.round(4).tolist()  # delta, in degrees
        [0.0057, 0.0573, 0.573, 5.7296]
        >>> outcome.lines["sp"].rotations.round(1).tolist()
        [4.1, 29.1, 59.6, 65.0]
    """
    if seeds < 1:
        raise ValueError(f"seeds is the number of units of the distribution, >= 1; got {seeds}.")
    answers = {method: _answers(build(method, range(seeds)), deltas) for method in methods}
    return Outcome(
        seed=seed,
        deltas=np.array(deltas, dtype=float),
        lines={method: _lines(build(method, [seed]), deltas) for method in methods},
        rotations=_stacked(answers, "rotation"),
        displacements=_stacked(answers, "displacement"),
        bounds=_stacked(answers, "bound"),
    )


def build(method: str, seeds: Iterable[int]) -> nn.Module:
    """Return a layer of two inputs with one unit for each seed, stored as the method does.

    Example:
        >>> build("gmp", [1]).r
        Parameter containing:
        tensor([0.0017], dtype=torch.float64, requires_grad=True)
    """
    if method not in METHODS:
        raise ValueError(f"a method is one of {', '.join(METHODS)}; got {method!r}.")
    units = torch.from_numpy(np.stack([_draw(seed) for seed in seeds]))
    linear = nn.utils.skip_init(nn.Linear, 2, len(units), dtype=torch.float64)
    with torch.no_grad():
        linear.weight.copy_(units[:, :2])
        linear.bias.copy_(units[:, 2])
    if method == "wn":
        return weight_norm(linear)
    if method == "sp":
        return linear
    coordinates = "angles" if method == "gmp" else "intrinsic"
    return gp.GmPLinear.from_linear(linear, coordinates=coordinates)


def _draw(seed: int) -> Array:
    """Return w and b, (3,), in the order of the papers' notebook."""
    return SIZE * np.random.RandomState(seed).randn(3)


def _answers(layer: nn.Module, deltas: Sequence[float]) -> list[Response]:
    return [respond(layer, steps(layer, "constant", delta)) for delta in deltas]


def _stacked(answers: dict[str, list[Response]], name: str) -> dict[str, Array]:
    """Return one quantity of all responses as (deltas, units), by method."""
    return {
        method: np.stack([getattr(response, name).numpy() for response in each])
        for method, each in answers.items()
    }


def _lines(layer: nn.Module, deltas: Sequence[float]) -> Lines:
    """Follow the one unit of a layer."""
    others = [perturbed(layer, steps(layer, "constant", delta))[0] for delta in deltas]
    found = [layer_boundaries(each) for each in (layer, *others)]
    answers = _answers(layer, deltas)
    return Lines(
        directions=torch.cat([each.direction for each in found]).numpy(),
        lams=torch.cat([each.distance for each in found]).numpy(),
        rotations=torch.cat([each.rotation for each in answers]).numpy(),
        displacements=torch.cat([each.displacement for each in answers]).numpy(),
    )


def _reference(method: str, lines: Lines, i: int, delta: float) -> dict[str, float]:
    """Return what is known of the papers' unit, and how it was drawn, where it is known."""
    if method not in ("sp", "wn") or delta not in DELTAS:
        return {}
    known = DELTAS.index(delta)
    return {
        "reference": TRUE_ROTATIONS[known],
        "drawn": float(lines.drawn_rotations[i]),
        "reference_drawn": DRAWN_ROTATIONS[known],
    }


def _spread(name: str, values: Array) -> dict[str, float]:
    return {
        f"{name}_median": float(np.median(values)),
        f"{name}_95": float(np.quantile(values, 0.95)),
        f"{name}_max": float(values.max()),
    }
