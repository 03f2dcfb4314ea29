"""The papers' numbers, as they are printed there.

A number is kept as text, because its digits say how far it was rounded: 0.002 ± 0.000 is a mean
between 0.0015 and 0.0025 whose standard error is below 0.0005. What is printed without ± comes
from one seed.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass

from geoparam_lab.methods import METHODS

CITATION = (
    "The papers are two versions of one work by W. Chen and H. Ge: v1, “Neural Characteristic "
    "Activation Value Analysis for Improved ReLU Network Feature Learning”, and v2, “Neural "
    "Characteristic Activation Analysis and Geometric Parameterization for ReLU Networks” "
    "(NeurIPS 2024)."
)
# The learning rates behind the papers' numbers, but for ImageNet, where all have 0.1.
RATES = {name: METHODS[name].lr for name in ("sp", "wn", "wn+mbn", "bn", "gmp", "gmp+imn")}


@dataclass(frozen=True)
class Printed:
    """A number as it is printed, with its standard error after ± where there is one.

    Example:
        >>> number = Printed("3.370 ± 0.145")
        >>> number.value, number.error, number.rounding
        (3.37, 0.145, 0.0005)
        >>> Printed("0.496").error is None
        True
    """

    text: str

    @property
    def value(self) -> float:
        """The number without its error."""
        return float(self.text.partition("±")[0])

    @property
    def error(self) -> float | None:
        """The standard error; None where none is printed, which means one seed."""
        error = self.text.partition("±")[2]
        return float(error) if error else None

    @property
    def rounding(self) -> float:
        """The most that rounding can have changed the number."""
        decimals = len(self.text.partition("±")[0].strip().partition(".")[2])
        return 0.5 * 10.0**-decimals


@dataclass(frozen=True)
class PaperTable:
    """One measure in one of the papers' tables or figures."""

    source: str  # where it is printed
    # By column (data set, batch size, network; "" where there is one) and method.
    values: Mapping[str, Mapping[str, Printed]]


def read_table(source: str, text: str) -> PaperTable:
    """Read a table whose first row names the columns, and whose others begin with a method."""
    (_, *columns), *rows = (
        [cell.strip() for cell in line.split("|")] for line in text.split("\n")
    )
    values = {
        column: {method: Printed(cells[i]) for method, *cells in rows if cells[i]}
        for i, column in enumerate(columns)
    }
    return PaperTable(source, values)


def _read_images(source: str, text: str) -> dict[str, PaperTable]:
    """Read a table that has top-1 and top-5 in each cell."""
    top1, top5 = (re.sub(other, "", text) for other in (r", [^|\n]*", r"[^|\n]*, "))
    return {"top1": read_table(source, top1), "top5": read_table(source, top5)}


_VGG6 = """\
|256|512|1024
sp|38.31 ± 0.13, 62.48 ± 0.14|36.99 ± 0.11, 60.71 ± 0.18|35.02 ± 0.03, 58.14 ± 0.39
wn|39.13 ± 0.10, 63.28 ± 0.02|37.92 ± 0.12, 61.93 ± 0.09|36.17 ± 0.03, 60.16 ± 0.18
wn+mbn|42.22 ± 0.01, 66.04 ± 0.07|40.96 ± 0.02, 65.08 ± 0.03|39.33 ± 0.07, 63.32 ± 0.08
bn|42.79 ± 0.03, 67.17 ± 0.08|41.90 ± 0.19, 66.50 ± 0.25|41.39 ± 0.02, 65.89 ± 0.06
gmp|40.76 ± 0.09, 65.08 ± 0.08|41.65 ± 0.09, 65.76 ± 0.05|41.29 ± 0.08, 65.49 ± 0.06
gmp+imn|43.14 ± 0.05, 67.36 ± 0.05|43.62 ± 0.08, 67.76 ± 0.09|42.70 ± 0.15, 66.98 ± 0.18"""
_RESNET = """\
|resnet18|resnet50
wn+mbn|66.57 ± 0.16, 86.69 ± 0.11|72.58 ± 0.16, 90.77 ± 0.12
bn|66.85 ± 0.05, 86.92 ± 0.02|73.63 ± 0.09, 91.11 ± 0.05
gmp+imn|67.24 ± 0.21, 87.19 ± 0.15|75.57 ± 0.12, 92.68 ± 0.11"""
VGG6 = _read_images("v2, table 2 (90 epochs)", _VGG6)
RESNET = _read_images("v2, table 3 (ResNet-18) and v1, table 1 (ResNet-50), 90 epochs", _RESNET)
