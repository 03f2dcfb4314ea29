"""The papers' numbers, as they are printed there, each with its source.

The two papers are two versions of one work: v1, "Neural Characteristic Activation Value Analysis
for Improved ReLU Network Feature Learning", and v2, "Neural Characteristic Activation Analysis
and Geometric Parameterization for ReLU Networks" (NeurIPS 2024).

A number is kept as text, because its digits say how far it was rounded: 0.002 ± 0.000 is a mean
between 0.0015 and 0.0025 whose standard error is below 0.0005. What is printed without ± comes
from one seed.
"""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Printed:
    """A number as it is printed in a paper, such as "3.370 ± 0.145".

    Args:
        text: the number, with its standard error after ± where there is one.

    Example:
        >>> number = Printed("3.370 ± 0.145")
        >>> number.value, number.error, number.decimals, number.rounding
        (3.37, 0.145, 3, 0.0005)
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
    def decimals(self) -> int:
        """How many digits are printed after the point."""
        return len(self.text.partition("±")[0].strip().partition(".")[2])

    @property
    def rounding(self) -> float:
        """The most that rounding can have moved the number."""
        return 0.5 * 10.0**-self.decimals


@dataclass(frozen=True)
class PaperTable:
    """One measure in one of the papers' tables or figures.

    Args:
        source: where it is printed.
        values: by column (data set, batch size, network; "" where there is one) and method.
    """

    source: str
    values: Mapping[str, Mapping[str, Printed]]


def printed(experiment: str, measure: str, method: str, column: object = "") -> Printed | None:
    """What the papers print for a method in a column of an experiment's table, or None.

    Args:
        experiment: as in a run's folder.
        measure: the field of a record, such as "test_rmse".
        method: its key, such as "gmp+imn".
        column: data set, batch size or network; "" where the experiment has one column.

    Example:
        >>> printed("uci", "test_rmse", "gmp", "boston")
        Printed(text='3.057 ± 0.144')
        >>> printed("imagenet32", "top1", "bn", 1024).value
        41.39
        >>> printed("uci", "test_rmse", "intrinsic", "boston") is None
        True
    """
    table = PAPERS.get((experiment, measure))
    return table.values.get(str(column), {}).get(method) if table else None


def source(experiment: str, measure: str) -> str:
    """Where the papers print a measure of an experiment; empty where they do not.

    Example:
        >>> source("levy", "test_rmse")
        'v2, figure 2 (one seed)'
    """
    table = PAPERS.get((experiment, measure))
    return table.source if table else ""


def rate(experiment: str, method: str) -> float | None:
    """The learning rate behind the papers' number of a method; None where they have none.

    Example:
        >>> rate("uci", "gmp"), rate("uci", "bn"), rate("imagenet", "bn")
        (0.1, 0.01, 0.1)
    """
    if experiment == "imagenet":
        return 0.1
    return {"gmp": 0.1, "gmp+imn": 0.1}.get(method, 0.01) if method in _COMPARED else None


def _parse(text: str) -> dict[str, dict[str, Printed]]:
    """Read a table whose first row names the columns, and whose others begin with a method."""
    (_, *columns), *rows = (
        [cell.strip() for cell in line.split("|")] for line in text.split("\n")
    )
    return {
        column: {method: Printed(cells[i]) for method, *cells in rows if cells[i]}
        for i, column in enumerate(columns)
    }


_UCI = """\
|boston|concrete|energy|naval|power|wine|yacht
sp|3.370 ± 0.145|5.472 ± 0.144|0.898 ± 0.274|0.002 ± 0.000|4.065 ± 0.029|0.623 ± 0.008|0.639 ± 0.063
wn|3.459 ± 0.156|5.952 ± 0.148|2.093 ± 0.789|0.003 ± 0.000|4.073 ± 0.026|0.632 ± 0.008|0.624 ± 0.076
bn|3.469 ± 0.153|5.695 ± 0.160|1.648 ± 0.302|0.001 ± 0.000|4.164 ± 0.026|0.622 ± 0.011|0.777 ± 0.055
gmp|3.057 ± 0.144|5.153 ± 0.098|0.474 ± 0.013|0.003 ± 0.001|4.022 ± 0.025|0.613 ± 0.006|0.584 ± 0.046"""  # noqa: E501
_VGG_TOP1 = """\
|256|512|1024
sp|38.31 ± 0.13|36.99 ± 0.11|35.02 ± 0.03
wn|39.13 ± 0.10|37.92 ± 0.12|36.17 ± 0.03
wn+mbn|42.22 ± 0.01|40.96 ± 0.02|39.33 ± 0.07
bn|42.79 ± 0.03|41.90 ± 0.19|41.39 ± 0.02
gmp|40.76 ± 0.09|41.65 ± 0.09|41.29 ± 0.08
gmp+imn|43.14 ± 0.05|43.62 ± 0.08|42.70 ± 0.15"""
_VGG_TOP5 = """\
|256|512|1024
sp|62.48 ± 0.14|60.71 ± 0.18|58.14 ± 0.39
wn|63.28 ± 0.02|61.93 ± 0.09|60.16 ± 0.18
wn+mbn|66.04 ± 0.07|65.08 ± 0.03|63.32 ± 0.08
bn|67.17 ± 0.08|66.50 ± 0.25|65.89 ± 0.06
gmp|65.08 ± 0.08|65.76 ± 0.05|65.49 ± 0.06
gmp+imn|67.36 ± 0.05|67.76 ± 0.09|66.98 ± 0.18"""
_RESNET_TOP1 = """\
|resnet18|resnet50
wn+mbn|66.57 ± 0.16|72.58 ± 0.16
bn|66.85 ± 0.05|73.63 ± 0.09
gmp+imn|67.24 ± 0.21|75.57 ± 0.12"""
_RESNET_TOP5 = """\
|resnet18|resnet50
wn+mbn|86.69 ± 0.11|90.77 ± 0.12
bn|86.92 ± 0.02|91.11 ± 0.05
gmp+imn|87.19 ± 0.15|92.68 ± 0.11"""
# What the papers' picture shows of SP and WN; their true turns are others: see perturbation.py.
_DRAWN = """\
|0.0001|0.001|0.01|0.1
sp|4.1|12.2|18.3|23.7
wn|4.1|12.2|18.3|23.7"""

WHICH = (
    "The papers are two versions of one work by W. Chen and H. Ge: v1, “Neural Characteristic "
    "Activation Value Analysis for Improved ReLU Network Feature Learning”, and v2, “Neural "
    "Characteristic Activation Analysis and Geometric Parameterization for ReLU Networks” "
    "(NeurIPS 2024)."
)
_COMPARED = ("sp", "wn", "wn+mbn", "bn", "gmp", "gmp+imn")
EPOCHS = {"levy": 10_000, "banana": 5_000, "uci": 5_000, "imagenet32": 90, "imagenet": 90}  # most
_RESNET = "v2, table 3 (ResNet-18) and v1, table 1 (ResNet-50)"

PAPERS: dict[tuple[str, str], PaperTable] = {
    ("levy", "test_rmse"): PaperTable(
        "v2, figure 2 (one seed)", _parse("|\nsp|1.104\nwn|1.219\nbn|1.244\ngmp|0.496")
    ),
    ("banana", "test_accuracy"): PaperTable(
        "v2, figure 3 (one seed)", _parse("|\nsp|0.800\nwn|0.810\nbn|0.875\ngmp|0.885")
    ),
    ("perturbation", "rotation"): PaperTable("v2, figure 1, as drawn (one unit)", _parse(_DRAWN)),
    ("uci", "test_rmse"): PaperTable("v2, table 1 (ten splits)", _parse(_UCI)),
    ("imagenet32", "top1"): PaperTable("v2, table 2", _parse(_VGG_TOP1)),
    ("imagenet32", "top5"): PaperTable("v2, table 2", _parse(_VGG_TOP5)),
    ("imagenet", "top1"): PaperTable(_RESNET, _parse(_RESNET_TOP1)),
    ("imagenet", "top5"): PaperTable(_RESNET, _parse(_RESNET_TOP5)),
}
