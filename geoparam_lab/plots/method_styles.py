"""A colour and a dash for each method, the same in every figure.

Colours are Okabe and Ito's, told apart with any kind of colour vision, without their yellow (too
pale for a line on white), three dark ones of Paul Tol's and a brown. Eighteen methods are more
than such a palette holds. So the colour tells the parameterization, and the dash what is added to
it: means are dashed, BN dotted, LN dash-dotted, also by itself (to eyes without red and green its
purple and BN's green are nearly one grey). The two pairs that share a figure in the papers, WN and
WN+MBN, GmP and GmP+IMN, differ in lightness as well.
"""

import re
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from matplotlib.axes import Axes

from geoparam.plots import INK

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
    """Return the fixed style of a method, by its key or its title.

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
    """Return a style for each name: its own for a method, greys told apart by dashes for the rest.

    A method with options (after a comma) has its style, or another colour if that is drawn too.

    Example:
        >>> [style.title for style in curve_styles(["sp", "no training"])]
        ['SP', 'no training']
        >>> [style.colour == GREEN for style in curve_styles(["BN, crop 4", "BN, turn 2.4"])]
        [True, False]
    """
    styles = {name: METHODS.get(_key(name)) for name in names}
    used = [(style.colour, style.dash) for style in styles.values() if style is not None]
    for name, style in styles.items():
        if style is None:
            colour, dash = _choose_free(name, used)
            used.append((colour, dash))
            styles[name] = MethodStyle(name, colour, dash)
    return [style for style in styles.values() if style is not None]


def _choose_free(name: str, used: Sequence[tuple[str, Dash]]) -> tuple[str, Dash]:
    """Return the first of the least used styles for a curve that is no method."""
    base = METHODS.get(_key(re.split(r"[,(]", name)[0]))
    choices: list[tuple[str, Dash]]
    if base is None:
        dashes = (DOTTED, DASHED, DASH_DOTTED, SOLID)  # solid last: BN's green is grey to some
        choices = [(grey, dash) for grey in ("#666666", "#aaaaaa") for dash in dashes]
    else:
        choices = [(base.colour, base.dash)]
        choices += [(colour, dash) for dash in (SOLID, DASHED) for colour in CYCLE]
    return min(choices, key=used.count)


def _key(name: str) -> str:
    return name.replace(" ", "").lower()


def legend_beside(ax: Axes, title: str | None = None) -> None:
    """Put a legend to the right of the axis, where it covers no data."""
    place: dict[str, Any] = {"loc": "upper left", "bbox_to_anchor": (1.01, 1.0)}
    ax.legend(title=title, **place, borderaxespad=0.0, handlelength=2.6, frameon=False)
