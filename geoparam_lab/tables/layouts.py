"""What each experiment measures, and how its tables are laid out."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from geoparam_lab.run_folder import Record


@dataclass(frozen=True)
class Measure:
    """A result that a table shows.

    Args:
        name: its field in a record.
        title: what it is.
        digits: the least decimals to show; None for three significant digits, or where a table
            shows a record's fields for those that the number has.
        better: "lower" or "higher"; empty where neither is.
    """

    name: str
    title: str
    digits: int | None = 3
    better: str = ""


@dataclass(frozen=True)
class Layout:
    """How the tables of an experiment are laid out.

    Args:
        measures: one table each.
        column: the field whose values are the columns; empty where there is one column.
        column_title: what these are.
        group: a field whose values are in separate tables.
        where: what records must have in some fields to be in these tables.
        compare: whether the differences to a baseline are shown.
        fields: what to show side by side instead of measures, where each row is one record.
        title: of the table of these.
        open: whether every other number in the records is shown as well.
        notes: what a reader must know besides.
    """

    measures: tuple[Measure, ...] = ()
    column: str = ""
    column_title: str = ""
    group: str = ""
    where: Mapping[str, Any] = field(default_factory=dict)
    compare: bool = True
    fields: tuple[Measure, ...] = ()
    title: str = ""
    open: bool = False
    notes: tuple[str, ...] = ()


_RMSE = Measure("test_rmse", "Test RMSE", 3, "lower")
_ACCURACY = Measure("test_accuracy", "Test accuracy", 3, "higher")
_TOP1 = Measure("top1", "Top-1 accuracy (%)", 2, "higher")
_TOP5 = Measure("top5", "Top-5 accuracy (%)", 2, "higher")
_TURNS = (
    Measure("rotation", "Turn of the papers' unit (degrees)", None),
    Measure("rotation_median", "Median turn of many such units (degrees)", None),
    Measure("rotation_max", "Largest turn of many such units (degrees)", None),
)
_MIRRORED = (
    "The papers' picture loses a sign (arccos), so that it shows the mirror image of the unit and "
    "smaller turns of SP and WN than they make."
)

_EXPONENTS = (
    Measure("exponent_activation", "activations"),
    Measure("exponent_output", "outputs"),
    Measure("exponent_output_change", "change of outputs in a step"),
    Measure("exponent_turn", "turn of a unit in a step"),
    Measure("exponent_gradient_direction", "gradient of directions"),
    Measure("exponent_gradient_offset", "gradient of offsets"),
    Measure("exponent_gradient_scale", "gradient of scales"),
    Measure("exponent_gradient_output", "gradient of output weights"),
)
_ONE_RATE = (
    Measure("best_rates", "best rate for each width", None),
    Measure("one_rate", "best rate for all widths", None),
    Measure("one_rate_factor", "error with it, at most", 2),
    Measure("papers_rate", "papers' rate", None),
    Measure("papers_rate_factor", "error with the papers' rate, at most", 2),
)
_INITS = (
    "GmP's scales r begin at 1 with init sphere, the papers' text, and at the norms of weights "
    "with init Glorot, the papers' code."
)
_WIDTH = (
    Layout(
        group="dataset",
        where={"kind": "answer"},
        fields=_EXPONENTS,
        title="Exponent with which things grow with the width, before training",
        notes=(
            "0: does not depend on the width; 0.5: grows with its square root; -0.5: shrinks "
            "with it. With normal inputs, read their number for the width.",
            _INITS,
        ),
    ),
    Layout(
        group="dataset",
        where={"kind": "answer"},
        fields=_ONE_RATE,
        title="Whether one learning rate serves all widths",
        notes=(
            "Best rates from the narrowest network to the widest. Errors are multiples of the "
            "best rate's, at the width where they are highest.",
        ),
    ),
    Layout((_RMSE,), "width", "width", "dataset", where={"kind": "trained"}, compare=False),
)

LAYOUTS: dict[str, tuple[Layout, ...]] = {
    "levy": (Layout((_RMSE,)),),
    "banana": (Layout((_ACCURACY,)),),
    "perturbation": (Layout(_TURNS, "delta", "size of the perturbation", notes=(_MIRRORED,)),),
    "uci": (Layout((_RMSE,), "dataset", "data set", "protocol"),),
    "width": _WIDTH,
    "imagenet32": (Layout((_TOP1, _TOP5), "batch_size", "batch size"),),
    "imagenet": (Layout((_TOP1, _TOP5), "network", "network"),),
}
ANY = (Layout((_RMSE, _ACCURACY, _TOP1, _TOP5), open=True),)
PROTOCOLS = {
    "paper": "papers' protocol: the test split itself decides when to stop",
    "heldout": "held-out protocol: a validation part decides, the test split does not",
}
VARIANTS = (
    "init",
    "width",
    "batch_size",
    "lr",
    "tuned",
)  # fields that may tell rows of a method apart
CONDITIONS = ("seed", "split", "delta", *VARIANTS)  # numbers in records that are no results
_WORDS = {"lr": "rate", "batch_size": "batch"}

DETAILS = (
    Measure("select_top1", "top-1 on images kept back (%)", 2),
    Measure("tries", "settings tried", 0),
    Measure("epochs", "epochs", 0),
    Measure("best_epoch", "best epoch", 0),
    Measure("largest_move", "largest move", None),
    Measure("largest_rotation", "largest turn (°)", None),
)


def measures(records: Sequence[Record], layout: Layout) -> list[Measure]:
    """Return what the tables of these records show.

    Example:
        >>> found = measures([{"width": 16, "output_scale": 0.9}], ANY[0])
        >>> [measure.title for measure in found]
        ['Output scale']
    """
    names = dict.fromkeys(name for record in records for name in record)
    known = [measure for measure in layout.measures if measure.name in names]
    if len({str(record.get(layout.column)) for record in records}) > 1:
        known += times(records)  # else they are columns of the other tables
    taken = {*CONDITIONS, *(measure.name for measure in (*DETAILS, *known))}
    others = [
        Measure(name, name.replace("_", " ").capitalize(), None)
        for name in names
        if layout.open and name not in taken
        if any(math.isfinite(number(record.get(name))) for record in records)
    ]
    return known + others


def times(records: Sequence[Record]) -> list[Measure]:
    """Return the measures of how long runs took to an accuracy.

    Example:
        >>> [measure.title for measure in times([{"epochs_to_45": 3, "epochs": 9}])]
        ['Epochs to 45 % top-1']
    """
    found = []
    for name in sorted({name for record in records for name in record}):
        unit, _, level = name.partition("_to_")
        if level and unit in ("epochs", "seconds"):
            title = f"{unit.capitalize()} to {level} % top-1"
            found.append(Measure(name, title, 1, "lower"))
    return found


def number(value: Any) -> float:
    """Return a number as a float, and NaN for what is none.

    Example:
        >>> number(3), number("3"), number(None)
        (3.0, nan, nan)
    """
    known = isinstance(value, (int, float)) and not isinstance(value, bool)
    return float(value) if known else math.nan
