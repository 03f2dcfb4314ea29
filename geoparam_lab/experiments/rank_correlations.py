"""Does a measured quantity go with the test error? Rank correlations, tested by permutation.

Ranks are compared between networks of one group: a data set and method, say, where rates and seeds
differ. Each seed has its own split of the data, and some splits are hard for all networks. So the
mean rank of each split is subtracted; without that, p would count one split many times. p is the
share of 9,999 random pairings, within the same groups, that agree or disagree as much. Holm's
correction is over all comparisons of one call.
"""

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from geoparam_lab.run_folder import Record, group_records

Array = np.ndarray

PERMUTATIONS = 9_999


def correlate(
    records: Sequence[Record],
    cells: Sequence[str],
    quantities: Sequence[str],
    parts: Mapping[str, Sequence[str]],
) -> list[Record]:
    """Return rank correlations of every quantity with the test error, for each cell.

    The networks of a cell have the same values in the fields `cells`. `parts` has a name for each
    way to group them further: the fields in which networks that are ranked together agree.
    """
    found: list[Record] = []
    order = ("method", "size", "lr", "seed")  # p depends on it, and runs end in any order
    records = sorted(records, key=lambda record: [str(record[field]) for field in order])
    for cell, own in group_records(records, *cells).items():
        for part, quantity in itertools.product(parts, quantities):
            x, y = (np.array([r[field] for r in own], float) for field in (quantity, "test_error"))
            groups = [tuple(record[field] for field in parts[part]) for record in own]
            correlation, p = rank_correlation(x, y, groups, [record["seed"] for record in own])
            key = {"part": part, "method": "all", "size": quantity, "lr": None, "seed": None}
            key |= dict(zip(cells, cell, strict=True))
            found.append(key | {"correlation": correlation, "p": p, "networks": len(own)})
    p_holm = adjust({i: record["p"] for i, record in enumerate(found)})
    return [r | {"p_holm": p_holm[i], "comparisons": len(found)} for i, r in enumerate(found)]


def rank_correlation(
    x: Array, y: Array, groups: Sequence[object], splits: Sequence[object]
) -> tuple[float, float]:
    """Return the correlation of ranks within groups, and its two-sided p by permutation.

    Values that are not finite rank last. Where x or y does not vary, the result is (0, 1).

    Example:
        >>> groups, splits = [0, 0, 0, 1, 1, 1, 2, 2, 2], [0, 1, 2] * 3
        >>> x = np.array([1, 2, 3, 12, 13, 11, 23, 21, 22.0])
        >>> correlation, p = rank_correlation(x, x % 10, groups, splits)
        >>> round(correlation, 6), p < 0.02
        (1.0, True)
        >>> rank_correlation(x, np.array(splits), groups, splits)  # the split decides
        (0.0, 1.0)
    """
    at, split = (np.unique([*map(str, ids)], return_inverse=True)[1] for ids in (groups, splits))
    a, b = (_rank(np.where(np.isfinite(values), values, np.inf), at) for values in (x, y))
    same = split[:, None] == split
    a, centred = (ranks - same @ ranks / same.sum(axis=1) for ranks in (a, b))
    size = np.sqrt((a @ a) * (centred @ centred))
    if not size > 1e-9:
        return 0.0, 1.0
    keys = np.random.default_rng(0).random((PERMUTATIONS, len(b))) + at  # permutes within groups
    order = np.argsort(at, kind="stable")
    mixed = np.empty_like(keys)
    mixed[:, order] = b[np.argsort(keys, axis=1)]
    extreme = (np.abs(mixed @ a) >= abs(a @ b) - 1e-9).sum()
    return float(a @ b / size), float((extreme + 1) / (PERMUTATIONS + 1))


def _rank(values: Array, at: Array) -> Array:
    """Return ranks within groups from -1 to 1, ties in the middle."""
    same = at[:, None] == at
    lower = (same & (values < values[:, None])).sum(axis=1)
    higher = (same & (values > values[:, None])).sum(axis=1)
    return (lower - higher) / np.maximum(1, same.sum(axis=1) - 1)


def adjust(p_values: Mapping[Any, float]) -> dict[Any, float]:
    """Return the p-values after Holm's correction for their number.

    Example:
        >>> adjust({"a": 0.01, "b": 0.04, "c": 0.03})
        {'a': 0.03, 'c': 0.06, 'b': 0.06}
    """
    ranked = sorted(p_values, key=lambda name: p_values[name])
    raised = [min(1.0, (len(ranked) - i) * p_values[name]) for i, name in enumerate(ranked)]
    return dict(zip(ranked, itertools.accumulate(raised, max), strict=True))
