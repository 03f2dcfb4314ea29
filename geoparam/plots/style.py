"""What every figure shares: colours, a style for each method, figures and checks.

Colours are Okabe and Ito's, told apart with any kind of colour vision, without their yellow (too
pale for a line on white), three dark ones of Paul Tol's and a brown. Eighteen methods are more
than such a palette holds. So the colour tells the parameterization, and the dash what is added to
it: means are dashed, BN dotted, LN dash-dotted, also by itself (to eyes without red and green its
purple and BN's green are nearly one grey). The two pairs that share a figure in the papers, WN and
WN+MBN, GmP and GmP+IMN, differ in lightness as well.
"""

import re
from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from numpy.typing import ArrayLike

INK, MUTED, PALE = "#222222", "#8a8a8a", "#eeeeee"
BLUE, SKY, GREEN, PURPLE = "#0072b2", "#56b4e9", "#009e73", "#cc79a7"
VERMILLION, ORANGE = "#d55e00", "#e69f00"
INDIGO, WINE, OLIVE, BROWN = "#332288", "#882255", "#999933", "#7f4a00"
CYCLE = (BLUE, ORANGE, GREEN, VERMILLION, PURPLE, SKY, INDIGO, OLIVE, WINE, INK)

Dash = str | tuple[float, tuple[float, ...]]
SOLID, DASHED = "solid", (0, (5, 1.6))
DOTTED, DASH_DOTTED = (0, (1.2, 1.2)), (0, (6, 1.5, 1.2, 1.5))


class MethodStyle(NamedTuple):
    """How a method is called and drawn in every figure; colour and dash are matplotlib's."""

    title: str
    colour: str
    dash: Dash

    @property
    def line(self) -> dict[str, Any]:
        """The arguments for ``Axes.plot``."""
        return {"color": self.colour, "linestyle": self.dash}


_METHODS = (
    MethodStyle("SP", VERMILLION, SOLID),
    MethodStyle("SP+IMN", VERMILLION, DASHED),
    MethodStyle("WN", ORANGE, SOLID),
    MethodStyle("WN+IMN", ORANGE, DASHED),
    MethodStyle("WN+MBN", BROWN, DASHED),
    MethodStyle("BN", GREEN, SOLID),
    MethodStyle("BN+decay", GREEN, DOTTED),
    MethodStyle("LN", PURPLE, DASH_DOTTED),
    MethodStyle("GmP", BLUE, SOLID),
    MethodStyle("GmP+IMN", INDIGO, DASHED),
    MethodStyle("GmP+MBN", INDIGO, DASH_DOTTED),
    MethodStyle("GmP+BN", BLUE, DOTTED),
    MethodStyle("GmP+LN", BLUE, DASH_DOTTED),
    MethodStyle("Natural", SKY, SOLID),
    MethodStyle("Natural+IMN", SKY, DASHED),
    MethodStyle("Intrinsic", INK, SOLID),
    MethodStyle("Intrinsic+IMN", INK, DASHED),
    MethodStyle("Intrinsic+MBN", INK, DOTTED),
)
METHODS = {style.title.lower(): style for style in _METHODS}


def method_style(name: str) -> MethodStyle:
    """The fixed style of a method, by its key or its title.

    Example:
        >>> method_style("gmp+imn").title, method_style("GmP + IMN").title
        ('GmP+IMN', 'GmP+IMN')
    """
    style = METHODS.get(_key(name))
    if style is None:
        raise ValueError(
            f"a method must be one of {', '.join(METHODS)}; got {name!r}. "
            "For other curves choose a colour yourself"
        )
    return style


def curve_styles(names: Iterable[str]) -> list[MethodStyle]:
    """A style for each name: its own for a method, greys told apart by dashes for the rest.

    A method with options (after a comma) has its style, or another colour if that is drawn too.

    Example:
        >>> [style.title for style in curve_styles(["sp", "no training"])]
        ['SP', 'no training']
        >>> [style.colour == GREEN for style in curve_styles(["BN, crop 4", "BN, turn 2.4"])]
        [True, False]
    """
    dashes = (DOTTED, DASHED, DASH_DOTTED, SOLID)  # solid last: to some eyes BN's green is grey
    greys = [(colour, dash) for colour in ("#666666", "#aaaaaa") for dash in dashes]
    found = {name: METHODS.get(_key(name)) for name in names}
    taken = [(style.colour, style.dash) for style in found.values() if style is not None]
    for name in (name for name, style in found.items() if style is None):
        base = METHODS.get(_key(re.split(r"[,(]", name)[0]))
        cycle = [(colour, dash) for dash in (SOLID, DASHED) for colour in CYCLE]
        free = greys if base is None else [(base.colour, base.dash), *cycle]
        taken.append(min(free, key=taken.count))  # the first of those that are the least used
        found[name] = MethodStyle(name, *taken[-1])
    return [style for style in found.values() if style is not None]


def _key(name: str) -> str:
    return name.replace(" ", "").lower()


def new_figure(rows: int, columns: int, size: tuple[float, float]) -> tuple[Figure, np.ndarray]:
    """A figure outside of pyplot, `size` in inches, and its axes in an array (rows, columns)."""
    layout = ConstrainedLayoutEngine(w_pad=0.1, h_pad=0.1, compress=True)
    figure = Figure(figsize=size, layout=layout)
    axes = figure.subplots(rows, columns, squeeze=False)
    for ax in axes.flat:
        ax.spines[["top", "right"]].set_visible(False)
        ax.spines[["left", "bottom"]].set_color(MUTED)
        ax.tick_params(color=MUTED, labelcolor=INK)
        ax.grid(color=PALE, linewidth=0.8)
        ax.set_axisbelow(True)
    return figure, axes


def axis_or_new(ax: Axes | None, size: tuple[float, float] = (6.0, 4.0)) -> Axes:
    """The given axis, or that of a new figure."""
    return new_figure(1, 1, size)[1][0, 0] if ax is None else ax


def as_array(name: str, values: ArrayLike, shape: tuple[str | int, ...]) -> np.ndarray:
    """The values as floats; ValueError if they are empty or of another shape.

    In `shape` a word stands for an axis of any length.
    """
    array = np.asarray(values, dtype=float)
    pairs = zip(shape, array.shape, strict=False)
    fits = all(isinstance(wanted, str) or wanted == got for wanted, got in pairs)
    if array.ndim != len(shape) or not fits or array.size == 0:
        axes = ", ".join(map(str, shape)) + ("," if len(shape) == 1 else "")
        raise ValueError(f"{name} must have shape ({axes}), none of them 0; got {array.shape}.")
    return array


def step_numbers(steps: np.ndarray | None, count: int) -> np.ndarray:
    """The numbers of the recorded steps; 0, 1, ... if None."""
    return np.arange(count) if steps is None else as_array("steps", steps, (count,))


def legend_beside(ax: Axes, title: str | None = None) -> None:
    """Put a legend to the right of the axis, where it covers no data."""
    place: dict[str, Any] = {"loc": "upper left", "bbox_to_anchor": (1.01, 1.0)}
    ax.legend(title=title, **place, borderaxespad=0.0, handlelength=2.6, frameon=False)
