"""The papers' numbers, as they are printed there.

A number is kept as text, because its digits say how far it was rounded: 0.002 ± 0.000 is a mean
between 0.0015 and 0.0025 whose standard error is below 0.0005. What is printed without ± comes
from one seed.
"""

from collections.abc import Mapping
from dataclasses import dataclass

WHICH = (
    "The papers are two versions of one work by W. Chen and H. Ge: v1, “Neural Characteristic "
    "Activation Value Analysis for Improved ReLU Network Feature Learning”, and v2, “Neural "
    "Characteristic Activation Analysis and Geometric Parameterization for ReLU Networks” "
    "(NeurIPS 2024)."
)
# The learning rates behind the papers' numbers, but for ImageNet, where all have 0.1.
RATES = {"sp": 0.01, "wn": 0.01, "wn+mbn": 0.01, "bn": 0.01, "gmp": 0.1, "gmp+imn": 0.1}


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
    """One measure in one of the papers' tables or figures.

    Args:
        source: where it is printed.
        values: by column (data set, batch size, network; "" where there is one) and method.
    """

    source: str
    values: Mapping[str, Mapping[str, Printed]]


def read_table(source: str, text: str) -> PaperTable:
    """Read a table whose first row names the columns, and whose others begin with a method.

    Example:
        >>> read_table("table 1", "|yacht\\nsp|0.639 ± 0.063").values["yacht"]["sp"].value
        0.639
    """
    (_, *columns), *rows = (
        [cell.strip() for cell in line.split("|")] for line in text.split("\n")
    )
    values = {
        column: {method: Printed(cells[i]) for method, *cells in rows if cells[i]}
        for i, column in enumerate(columns)
    }
    return PaperTable(source, values)
