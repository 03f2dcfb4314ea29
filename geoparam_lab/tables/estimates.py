"""Means over seeds or splits, their standard errors, and what may be concluded from them.

**Agreement with a printed number.** Ours and the papers' agree when they are at most two combined
standard errors apart, 2 sqrt(ours^2 + theirs^2), after allowing for the papers' rounding. A number
of one seed has no standard error, and nothing can be said of its mean. With fewer than three
results of ours nothing is said.

**Paired differences.** Two methods on the same seed or split share its luck, so that the
differences vary less than the results: their mean has its own standard error, and Student's t its
p-value. Random splits of one data set share points and are not independent. For them the standard
error is s sqrt(1/n + test/train) instead of s sqrt(1/n): the corrected resampled t-test of Nadeau
and Bengio (2003). Of k comparisons in a table some come out by chance; Holm's rule allows for k.
"""

import itertools
import math
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np

from geoparam_lab.experiments.papers import Printed
from geoparam_lab.tables.formats import EMPTY


class Estimate(NamedTuple):
    """A mean over seeds or splits."""

    mean: float  # of the finite values
    error: float | None  # its standard error; None where there is one value
    n: int  # how many values there are
    low: float
    high: float


def number(value: Any) -> float:
    """Return a number as a float, NaN for non-numbers; text raises TypeError."""
    if isinstance(value, str):
        raise TypeError(f"a record has {value!r} where a number belongs")
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return math.nan
    return float(value)


def estimate(values: Iterable[float]) -> Estimate | None:
    """Return the mean of the values that are finite, or None where none is."""
    x = np.array([value for value in values if math.isfinite(value)], dtype=float)
    if len(x) == 0:
        return None
    error = float(x.std(ddof=1) / math.sqrt(len(x))) if len(x) > 1 else None
    return Estimate(float(x.mean()), error, len(x), float(x.min()), float(x.max()))


def agrees(ours: Estimate | None, papers: Printed | None) -> bool | None:
    """Return whether ours and the papers' agree as said above; None where nothing can be said."""
    if ours is None or ours.error is None or ours.n < 3 or papers is None or papers.error is None:
        return None
    combined = math.hypot(ours.error, papers.error)
    return abs(ours.mean - papers.value) <= 2 * combined + papers.rounding


def pair(
    values: Mapping[Any, float], baseline: Mapping[Any, float], overlap: float = 0.0
) -> Estimate | None:
    """Return the mean of value minus baseline over the seeds or splits that both have.

    `overlap` is the size of a split's test part over that of its training part.
    """
    difference = estimate(values[key] - baseline[key] for key in values if key in baseline)
    if difference is None or difference.error is None:
        return difference
    return difference._replace(error=difference.error * math.sqrt(1 + difference.n * overlap))


def find_p_value(difference: Estimate) -> float:
    """Return the two-sided p-value of Student's t, with n - 1 degrees of freedom.

    The sums are those of Abramowitz and Stegun, 26.7.3 and 26.7.4.
    """
    degrees, error = difference.n - 1, difference.error
    if error is None or (error == 0 and difference.mean == 0):
        return 1.0
    angle = math.atan2(abs(difference.mean), error * math.sqrt(degrees))
    is_odd = bool(degrees % 2)
    term = math.cos(angle) if is_odd else 1.0
    total = 0.0
    for k in range(2 if is_odd else 1, degrees, 2):
        total += term
        term *= math.cos(angle) ** 2 * k / (k + 1)

    inside = math.sin(angle) * total
    if is_odd:
        inside = (angle + inside) * 2 / math.pi
    return 1 - inside


def adjust(p_values: Mapping[Any, float]) -> dict[Any, float]:
    """Return the p-values after Holm's correction for their number.

    Example:
        >>> adjust({"a": 0.01, "b": 0.04, "c": 0.03})
        {'a': 0.03, 'c': 0.06, 'b': 0.06}
    """
    ranked = sorted(p_values, key=lambda name: p_values[name])
    raised = [min(1.0, (len(ranked) - i) * p_values[name]) for i, name in enumerate(ranked)]
    return dict(zip(ranked, itertools.accumulate(raised, max), strict=True))


def format_estimate(value: Estimate | None, digits: int | None) -> str:
    """Return "mean ± error", with this many decimals, or three significant digits for None.

    An error that these decimals would hide has one more.

    Example:
        >>> format_estimate(Estimate(2.9712, 0.2443, 10, 2.0, 4.0), 3)
        '2.971 ± 0.244'
        >>> format_estimate(Estimate(0.00163, 0.00012, 10, 0.001, 0.002), 3)
        '0.0016 ± 0.0001'
        >>> format_estimate(Estimate(1234567.0, None, 1, 0.0, 0.0), 3)
        '1.23e+06'
        >>> format_estimate(Estimate(-0.0001, 0.013, 10, -1.0, 1.0), 3)
        '0.000 ± 0.013'
    """
    if value is None:
        return EMPTY
    numbers = [value.mean] if value.error is None else [value.mean, value.error]
    return " ± ".join(_write_numbers(numbers, value, digits))


def format_range(value: Estimate | None, digits: int | None) -> str:
    """Return the lowest and the highest value, with as many decimals as the mean."""
    if value is None or value.error is None:
        return EMPTY
    return " to ".join(_write_numbers([value.low, value.high], value, digits))


def _write_numbers(numbers: Iterable[float], value: Estimate, digits: int | None) -> list[str]:
    error = value.error or 0.0
    if digits is None or max(abs(value.mean), error) >= 1e5:
        return [shorten(x) for x in numbers]
    if 10.0 ** -(digits + 2) <= error < 10.0**-digits:
        digits += 1
    return [f"{round(x, digits) + 0.0:.{digits}f}" for x in numbers]  # no zero has a minus


def shorten(value: float) -> str:
    """Return a number with three significant digits or more, thousands separated.

    Example:
        >>> shorten(0.0573), shorten(65.04), shorten(180), shorten(65536.2), shorten(1.3e9)
        ('0.0573', '65.0', '180', '65,536', '1.30e+09')
    """
    if not math.isfinite(value):
        return {math.inf: "infinite", -math.inf: "-infinite"}.get(value, "not a number")
    if value == 0 or 999.5 <= abs(value) < 1e6:
        return f"{abs(value) if value == 0 else value:,.0f}"
    return f"{value:#.3g}".rstrip(".")
