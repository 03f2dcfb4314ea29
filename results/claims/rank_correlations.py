"""Does a measured quantity go with the test error? Rank correlations, tested by permutation.

Ranks are compared between networks of one group: a data set and method, say, where rates and seeds
differ. Each seed has its own split of the data, and some splits are hard for all networks. So the
mean rank of each split is subtracted; without that, p would count one split many times. p is the
share of 9,999 random pairings, within the same groups, that agree or disagree as much. Holm's
correction is over all comparisons of one call.
"""

import itertools
from collections.abc import Mapping, Sequence

import numpy as np
from claim import Record

from geoparam_lab.run_folder import group_records
from geoparam_lab.tables.estimates import adjust

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
    order = ("method", "size", "lr", "seed")  # p depends on the order, and runs end in any
    records = sorted(records, key=lambda record: [str(record[field]) for field in order])

    answers: list[Record] = []
    for cell, group in group_records(records, *cells).items():
        errors = np.array([record["test_error"] for record in group], float)
        splits = [record["seed"] for record in group]
        for part, quantity in itertools.product(parts, quantities):
            values = np.array([record[quantity] for record in group], float)
            ranked_together = [tuple(record[f] for f in parts[part]) for record in group]
            correlation, p = rank_correlation(values, errors, ranked_together, splits)
            answers.append(
                {"part": part, "method": "all", "size": quantity, "lr": None, "seed": None}
                | dict(zip(cells, cell, strict=True))
                | {"correlation": correlation, "p": p, "networks": len(group)}
            )

    p_holm = adjust({i: answer["p"] for i, answer in enumerate(answers)})
    for i, answer in enumerate(answers):
        answer |= {"p_holm": p_holm[i], "comparisons": len(answers)}
    return answers


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
    group, split = _number(groups), _number(splits)
    a, b = _rank(x, group), _rank(y, group)

    # Subtract the mean rank of each split. In products with a it need not be subtracted from b:
    # a is then orthogonal to whatever depends on the split alone.
    same_split = split[:, None] == split
    a = a - same_split @ a / same_split.sum(axis=1)
    b_centred = b - same_split @ b / same_split.sum(axis=1)
    size = np.sqrt((a @ a) * (b_centred @ b_centred))
    if not size > 1e-9:
        return 0.0, 1.0

    # Sorting random numbers plus the group's own permutes within groups.
    keys = np.random.default_rng(0).random((PERMUTATIONS, len(b))) + group
    permuted = np.empty_like(keys)
    permuted[:, np.argsort(group, kind="stable")] = b[np.argsort(keys, axis=1)]
    extreme = (np.abs(permuted @ a) >= abs(a @ b) - 1e-9).sum()
    return float(a @ b / size), float((extreme + 1) / (PERMUTATIONS + 1))


def _number(names: Sequence[object]) -> Array:
    """Return a number for each name, equal for equal names."""
    return np.unique([str(name) for name in names], return_inverse=True)[1]


def _rank(values: Array, group: Array) -> Array:
    """Return ranks within groups from -1 to 1, ties in the middle, what is not finite last."""
    values = np.where(np.isfinite(values), values, np.inf)
    same = group[:, None] == group
    lower = (same & (values < values[:, None])).sum(axis=1)
    higher = (same & (values > values[:, None])).sum(axis=1)
    return (lower - higher) / np.maximum(1, same.sum(axis=1) - 1)
