"""A colour and a dash for each method, the same in every figure.

Colours are Okabe and Ito's, told apart with any kind of colour vision, without their yellow (too
pale for a line on white), three dark ones of Paul Tol's and a brown. Methods are more than such a
palette holds. So the colour tells the parameterization, and the dash what is added to it. The two
pairs that share a figure in the papers, WN and WN+MBN, GmP and GmP+IMN, differ in lightness as
well.
"""

import re
from collections.abc import Iterable
from typing import Any, NamedTuple

from geoparam.plots import INK
from geoparam_lab import methods

BLUE, SKY, GREEN, PURPLE = "#0072b2", "#56b4e9", "#009e73", "#cc79a7"
VERMILLION, ORANGE = "#d55e00", "#e69f00"
INDIGO, WINE, OLIVE, BROWN = "#332288", "#882255", "#999933", "#7f4a00"
CYCLE = (BLUE, ORANGE, GREEN, VERMILLION, PURPLE, SKY, INDIGO, OLIVE, WINE, INK)

Dash = str | tuple[float, tuple[float, ...]]
SOLID, DASHED = "solid", (0, (5, 1.6))
DOTTED, DASH_DOTTED = (0, (1.2, 1.2)), (0, (6, 1.5, 1.2, 1.5))

COLOURS = {
    "sp": VERMILLION,
    "wn": ORANGE,
    "wn+mbn": BROWN,
    "bn": GREEN,
    "ln": PURPLE,
    "gmp": BLUE,
    "gmp+imn": INDIGO,
    "gmp+mbn": INDIGO,
    "natural": SKY,
    "intrinsic": INK,
}
DASHES: dict[str, Dash] = {
    "": SOLID,
    "imn": DASHED,
    "mbn": DASH_DOTTED,
    "bn": DOTTED,
    "ln": DASH_DOTTED,
    "decay": DOTTED,
}


class MethodStyle(NamedTuple):
    """How a method is called and drawn in every figure; colour and dash are matplotlib's."""

    title: str
    colour: str
    dash: Dash

    @property
    def line(self) -> dict[str, Any]:
        """The arguments for ``Axes.plot``."""
        return {"color": self.colour, "linestyle": self.dash}


def method_style(name: str) -> MethodStyle:
    """Return the fixed style of a method, by its key or its title.

    Example:
        >>> method_style("gmp+imn").title, method_style("GmP + IMN").title
        ('GmP+IMN', 'GmP+IMN')
    """
    key = _find_key(name)
    if not is_method(key):
        raise ValueError(
            f"a method must be one of {', '.join(methods.TITLES)}; got {name!r}. "
            "For other curves choose a colour yourself"
        )
    layer, _, addition = key.partition("+")
    colour = COLOURS.get(key, COLOURS[layer])
    # To eyes without red and green LN's purple and BN's green are nearly one grey.
    return MethodStyle(methods.TITLES[key], colour, DASHES["ln" if key == "ln" else addition])


def curve_styles(names: Iterable[str]) -> list[MethodStyle]:
    """Return a style for each name: its own for a method, greys told apart by dashes for the rest.

    A method with options (after a comma) has its style, or another colour if that is drawn too.

    Example:
        >>> [style.title for style in curve_styles(["sp", "no training"])]
        ['SP', 'no training']
        >>> [style.colour == GREEN for style in curve_styles(["BN, crop 4", "BN, turn 2.4"])]
        [True, False]
    """
    names = list(names)
    styles = {name: method_style(name) for name in names if is_method(name)}
    drawn = [(style.colour, style.dash) for style in styles.values()]
    for name in names:
        if name not in styles:
            colour, dash = min(_list_choices(name), key=drawn.count)  # the first of the least used
            styles[name] = MethodStyle(name, colour, dash)
            drawn.append((colour, dash))
    return [styles[name] for name in names]


def _list_choices(name: str) -> list[tuple[str, Dash]]:
    """Return colours and dashes for a curve that is no method, the best first."""
    method = re.split(r"[,(]", name)[0]
    if is_method(method):
        style = method_style(method)
        others = [(colour, dash) for dash in (SOLID, DASHED) for colour in CYCLE]
        return [(style.colour, style.dash), *others]
    dashes = (DOTTED, DASHED, DASH_DOTTED, SOLID)  # solid last: BN's green is grey to some
    return [(grey, dash) for grey in ("#666666", "#aaaaaa") for dash in dashes]


def is_method(name: str) -> bool:
    """Return whether this is the key or the title of a method."""
    return _find_key(name) in methods.TITLES


def _find_key(name: str) -> str:
    return name.replace(" ", "").lower()
