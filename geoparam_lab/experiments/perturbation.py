r"""Single units, figures 1, 2a-b, 5 and 6: above all, what moving their parameters does to them.

In figure 1, b to e, a unit in the plane has all its stored parameters moved by the same delta.

The unit has w ~ 0.001 N(0, I) and b ~ 0.001 N(0, 1), and is stored in several ways:

    sp           (w, b)
    wn           (v, l, b) with v = w, l = ||w||
    bn           (w, gamma, beta) with gamma = ||w||, beta = b, on whitened data: there BN is WN,
                 with gamma for l and beta for b (tests/lab/test_parameter_steps.py)
    ln           (w, b) of one of 100 units like it, the others and LN's own parameters (1 and 0)
                 left alone: there LN's unit is SP's, less the mean of the other 99
    in, gn       (w, b) before instance or group norm. Their means over positions give each image
                 an offset of its own; what all images share is the direction, which is w's
    sn           (w, b / s) of one of 100 units under spectral norm, the others left alone: s is
                 their largest singular value, which all rows are divided by
    gmp          (theta, lam) with u(theta) = w / ||w||, lam = b / ||w||; r = ||w|| is left alone
    intrinsic    (d, lam) with d = w / ||w||; not in the papers

Each panel has one delta, 1e-4 to 1e-1, and all methods that draw a line. (Under LN a delta that
all units share cancels: it turns none of them.)

**The reversal.** The papers' propositions 2.3 to 2.5 add -(1 + delta) w to w alone: what is left
is -delta w, so that the unit points the other way. v2 says the same of IN, GN and SN. GmP stores
no w; its step has the same length, in the worst direction. Of an angle that is either one: the
unit turns by the full length. For an intrinsic d it is the tangent from the origin to the circle
of that radius around d: the unit turns by arcsin of the length, which is below 1 here.

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

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn
from torch.nn.utils.parametrizations import weight_norm

import geoparam as gp
from geoparam import sphere
from geoparam.analysis import Boundaries, layer_boundaries
from geoparam_lab.checks import check_counts, check_names
from geoparam_lab.experiments import toys
from geoparam_lab.experiments.experiment import (
    Drawings,
    Experiment,
    Layout,
    Measure,
    list_in_words,
)
from geoparam_lab.experiments.papers import read_table
from geoparam_lab.methods import TITLES
from geoparam_lab.run_folder import Run
from geoparam_lab.training.tasks import Progress

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Array = np.ndarray

SEED = 1  # the papers'
METHODS = ("sp", "wn", "bn", "in", "gn", "sn", "ln", "gmp", "intrinsic")
WITHOUT_LINE = ("in", "gn")
DELTAS = (1e-4, 1e-3, 1e-2, 1e-1)
OTHERS = 99  # units in a layer under LN and SN, besides the one
SIZE = 0.001
VIEW = (-2.0, 2.0)
NAMES = {"in": "IN", "gn": "GN", "sn": "SN"}  # norms that are no methods elsewhere
WIDTHS = {"sp": 7.0, "wn": 4.5, "bn": 2.0, "gmp": 4.5}  # others 1.6, so that none is hidden


@dataclass(frozen=True)
class Turns:
    """What the perturbations do under one method: to the papers' unit, and to many others."""

    directions: Array  # unit vectors of the papers' unit, the unperturbed one first, (1 + D, 2)
    lams: Array  # signed distances of its boundary likewise, (1 + D,)
    rotation: Array  # angles between these and the unperturbed one in degrees, (D,)
    rotations: Array  # of the other units, (D, units)
    reversal: Array  # turns of the papers' unit by a step of -(1 + delta) w, (D,)

    @property
    def locations(self) -> Array:
        """phi, the nearest points of its boundaries to the origin, (1 + D, 2)."""
        return -self.lams[:, None] * self.directions


def run(
    out: str | Path,
    *,
    methods: Sequence[str] = METHODS,
    seeds: int = 1000,
    resume: bool = False,
    command: str | None = None,
    progress: Progress | None = None,
) -> Run:
    """Perturb the papers' unit and many others; write records and figures to a folder.

    Args:
        methods: parameterizations to perturb: some of sp, wn, bn, in, gn, sn, ln, gmp, intrinsic.
        seeds: number of random units, besides the papers' one.
    """
    check_counts(seeds=seeds)
    check_names("a method", METHODS, *methods)
    turns = {method: perturb(method, seeds) for method in methods}
    import geoparam_lab.plots  # noqa: F401  fails now if matplotlib is missing

    config = {"methods": [*turns], "units": seeds}
    options: Any = {"key": ("method", "delta"), "resume": resume, "may_change": ("methods",)}
    done = Run.create(out, "perturbation", config, command, **options)
    done.append_missing(make_records(turns))
    toys.save_figures(done, draw(turns), progress)
    return done


def perturb(method: str, seeds: int = 1000) -> Turns:
    """Perturb the papers' unit, and those of the seeds 0, 1, ..., in the stored parameters.

    Example:
        >>> perturb("gmp").rotation.round(4).tolist()  # DELTAS, in degrees
        [0.0057, 0.0573, 0.573, 5.7296]
        >>> perturb("sp").rotation.round(1).tolist()
        [4.1, 29.1, 59.6, 65.0]
    """
    check_names("a method", METHODS, method)
    papers, many = draw_units([SEED]), draw_units(range(seeds))
    before, *moved = [move_units(method, papers, shift, delta) for delta in (0.0, *DELTAS)]
    before_many, *others = [move_units(method, many, shift, delta) for delta in (0.0, *DELTAS)]
    reversed_ = [move_units(method, papers, reverse, delta) for delta in DELTAS]

    directions = [place.direction for place in (before, *moved)]
    lams = [place.distance for place in (before, *moved)]
    rotation = [find_turns(before, after) for after in moved]
    rotations = [find_turns(before_many, after) for after in others]
    reversal = [find_turns(before, after) for after in reversed_]
    return Turns(
        directions=np.concatenate(directions),
        lams=np.concatenate(lams),
        rotation=np.concatenate(rotation),
        rotations=np.stack(rotations),
        reversal=np.concatenate(reversal),
    )


def find_turns(before: Boundaries, after: Boundaries) -> torch.Tensor:
    """Return the angles between boundaries, in degrees."""
    return sphere.angle_between(before.direction, after.direction).rad2deg()


def draw_units(seeds: Iterable[int]) -> torch.Tensor:
    """Return a layer of units for each seed, (seeds, 1 + OTHERS, 3): each w, then b."""
    draws = [SIZE * np.random.RandomState(seed).randn(1 + OTHERS, 3) for seed in seeds]
    return torch.from_numpy(np.stack(draws))


@torch.no_grad()
def move_units(
    method: str,
    units: torch.Tensor,
    move: Callable[[Any, float], None],
    delta: float,
) -> Boundaries:
    """Return the boundaries of the first unit of each layer after a move of what is stored."""
    layer: Any = build(method, units)
    if method != "sn":
        move(layer, delta)
        return layer_boundaries(layer)

    # The line is w x + s (b / s) = 0, and a step of the row changes s.
    layer.bias /= _find_spectral_norms(layer, units)
    move(layer, delta)
    layer.bias *= _find_spectral_norms(layer, units)
    return layer_boundaries(layer)


def _find_spectral_norms(layer: Any, units: torch.Tensor) -> torch.Tensor:
    """Return the norms of the layers whose first unit has the weights of this layer's rows."""
    rows = units[..., :2].clone()
    rows[:, 0] = layer.weight
    return torch.linalg.matrix_norm(rows, ord=2)


def shift(layer: Any, delta: float) -> None:
    """Add delta to every stored parameter but r, in place."""
    for name, parameter in layer.named_parameters():
        if name == "latitude":  # pi/2 - theta
            parameter -= delta
        elif name != "r":
            parameter += delta


def reverse(layer: Any, delta: float) -> None:
    """Add -(1 + delta) w to w, or to v; under GmP take the worst step of that length."""
    stored = dict(layer.named_parameters())
    if not isinstance(layer, gp.GmPLayer):
        w = stored.get("parametrizations.weight.original1", layer.weight)
        w -= (1 + delta) * w
        return
    length = (1 + delta) * layer.r[:, None]
    if "latitude" in stored:
        stored["latitude"] -= length
        return
    u = stored["unit"]
    across = torch.stack([-u[:, 1], u[:, 0]], dim=1)
    u += length * ((1 - length.square()).sqrt() * across - length * u)


def build(method: str, units: torch.Tensor) -> nn.Module:
    """Return a layer of the first unit of each of these layers, stored as the method does."""
    first = units[:, 0]
    if method == "ln":
        first = first - units[:, 1:].mean(1)
    linear = nn.utils.skip_init(nn.Linear, 2, len(first), dtype=torch.float64)
    with torch.no_grad():
        linear.weight.copy_(first[:, :2])
        linear.bias.copy_(first[:, 2])
    if method in ("wn", "bn"):
        return weight_norm(linear)
    if method in ("gmp", "intrinsic"):
        kind: Any = "intrinsic" if method == "intrinsic" else "angles"
        return gp.GmPLinear.from_linear(linear, coordinates=kind)
    return linear


def make_records(turns: Mapping[str, Turns]) -> list[dict[str, Any]]:
    """Return a record for each method and delta: the unit's turn, and those of others."""
    records = []
    for method, of_method in turns.items():
        for i, delta in enumerate(DELTAS):
            record = {
                "method": method,
                "delta": delta,
                "rotation": float(of_method.rotation[i]),
                "rotation_median": float(np.median(of_method.rotations[i])),
                "rotation_max": float(of_method.rotations[i].max()),
                "reversal": float(of_method.reversal[i]),
            }
            records.append(record)
    return records


def draw(turns: Mapping[str, Turns]) -> Drawings:
    """Return all figures of a run."""
    lines = {method: turns[method] for method in turns if method not in WITHOUT_LINE}
    figure1: Drawings = {}
    if lines:
        names = list_in_words(map(title, lines))
        figure1["figure1"] = (lambda: _draw_panels(lines), "Figure 1. (a) A unit over two inputs: "
            "its boundary, its location φ, its direction u and its two sides, active where u "
            f"points. (b)-(e) The papers' unit under {names}, before and after every stored "
            "parameter is moved by δ; dotted lines end at φ. SP, WN, BN and SN turn alike, LN "
            "nearly so.")  # fmt: skip
    return figure1 | {
        "figure2a-b": (lambda: _draw_1d(((1, -1, 1), (-1, -1, 1))), "Figure 2a-b. A unit over one "
            "input: its boundary is a point φ, and its direction a sign."),
        "figure5": (lambda: _draw_1d(((1, -1, 1), (1, 1, 1), (-1, 1, 2), (-1, -1, -1))),
            "Figure 5. Units r relu(u x + λ) over one input."),
        "figure6": (_draw_2d, "Figure 6. Units over two inputs: boundary, location φ and sides."),
    }  # fmt: skip


def title(method: str) -> str:
    """Return what figures and tables call a method."""
    return (NAMES | TITLES)[method]


def _draw_panels(turns: Mapping[str, Turns]) -> "Figure":
    from geoparam_lab import plots

    figure, axes = plots.new_figure(2, 3, size=(12.0, 7.6))
    first, *panels = axes.flat
    plots.unit_2d(np.array([0.8, 0.6]), -1.0, limits=VIEW, ax=first)
    first.set_title("(a) a unit", loc="left")
    for word, place in (("active", (1.3, 1.6)), ("inactive", (-0.8, -0.8))):
        first.text(*place, word, ha="center", va="center")
    before = next(iter(turns.values()))
    for i, (letter, ax, delta) in enumerate(zip("bcde", panels, DELTAS, strict=False)):
        plots.plane(ax, VIEW)
        _draw_line(ax, before, 0, color="#cccccc", linewidth=11, label="before")
        styles = plots.curve_styles([title(method) for method in turns])
        for style, method in zip(styles, turns, strict=True):
            line = {"color": style.colour, "linewidth": WIDTHS.get(method, 1.6)}
            _draw_line(ax, turns[method], i + 1, **line, label=style.title)
        ax.set_title(f"({letter}) δ = {delta:g}", loc="left")
    panels[-1].axis("off")
    panels[-1].legend(*panels[0].get_legend_handles_labels(), loc="center left", frameon=False)
    return figure


def _draw_line(ax: "Axes", turns: Turns, i: int, **style: Any) -> None:
    """Draw one boundary, and the way from the origin to its location."""
    phi, (across, up) = turns.locations[i], turns.directions[i]
    ax.axline(phi, phi + np.array([-up, across]), **style)
    colour = style["color"]
    ax.plot(*np.stack([[0, 0], phi], axis=1), color=colour, linewidth=1.4, linestyle=":")
    ax.plot(*phi, "o", color=colour, markersize=5, mec="black", mew=0.6, zorder=5)


def _draw_1d(units: Sequence[tuple[float, float, float]]) -> "Figure":
    """Draw units over one input, given their sign, lam and r."""
    from geoparam_lab import plots

    figure, axes = plots.new_figure(1, len(units), size=(1.4 + 3.6 * len(units), 3.4))
    for ax, letter, (sign, lam, r) in zip(axes[0], "abcd", units, strict=False):
        plots.unit_1d(sign, lam, r=r, ax=ax)
        ax.set_title(f"({letter}) u = {sign:+g}, λ = {lam:+g}, r = {r:g}", loc="left")
    plots.legend_beside(axes[0, -1])
    return figure


def _draw_2d() -> "Figure":
    from geoparam_lab import plots

    figure, axes = plots.new_figure(1, 4, size=(16.0, 3.8))
    units = [(30, -1.0), (120, -1.0), (210, 1.0), (300, 1.0)]
    for ax, letter, (theta, lam) in zip(axes[0], "abcd", units, strict=True):
        u = np.array([np.cos(np.radians(theta)), np.sin(np.radians(theta))])
        plots.unit_2d(u, lam, limits=VIEW, ax=ax)
        ax.set_title(f"({letter}) θ = {theta}°, λ = {lam:+g}", loc="left")
    plots.legend_beside(axes[0, -1])
    return figure


def _finding(run: Run) -> str:
    turns = {(r["method"], r["delta"]): r["rotation"] for r in run.records()}
    delta = max(delta for _, delta in turns)
    return (
        f"One small unit: when each of its stored parameters changes by {delta:g}, its boundary "
        f"turns by {turns['gmp', delta]:.3g}° under GmP and by {turns['sp', delta]:.3g}° under SP."
    )


EXPERIMENT = Experiment(
    name="perturbation",
    title="Perturbed units",
    about="Every stored parameter of one small unit in the plane is changed by the same amount, "
    "and the turn of its boundary is measured; then a step of −(1 + δ) w is added to w alone.",
    summary="Single units under perturbation: figures 1, 2a-b, 5 and 6. Seconds.",
    run=run,
    layouts=(
        Layout(
            (
                Measure("rotation", "Papers' unit: turn by δ (°)", None),
                Measure("rotation_median", "many units: median (°)", None),
                Measure("rotation_max", "largest (°)", None),
                Measure("reversal", "Papers' unit: turn by −(1 + δ) w (°)", None),
            ),
            {"delta": "δ"},
            compare=False,
            notes=(
                "The papers' picture loses a sign (arccos), so that it shows the mirror image of "
                "the unit and smaller turns of SP and WN than they make.",
            ),
        ),
    ),
    papers={
        "rotation": read_table(
            "figure 1, as the released code draws it (one unit)",
            "|0.0001|0.001|0.01|0.1\nsp|4.1|12.2|18.3|23.7\nwn|4.1|12.2|18.3|23.7",
        )
    },
    names=NAMES,
    finding=_finding,
    limits=lambda run: (
        "One small unit: how much GmP limits its turn depends on the length of its "
        "weight. At a length of √2, SP and GmP can turn a unit equally far."
    ),
)
