r"""Which region the data are in, in networks of 2 to 5 hidden layers, and what that predicts.

Four quantities of a network, after a tenth of its training ("early") and at the end ("late"):

    changes     share of activation bits of the training points that change in a step: those that
                differ after an epoch, over its steps, on average over some epochs
    dead        share of units that are active at no training point
    distance    how far boundaries are off the middle of their layer's inputs, in radii of these
                (root mean square distance from the mean): median over units, mean over layers
    flattest    smallest slope ||dy/dx|| at any training point, the product of all layers' slopes
                there, over its median

Does one of them go with the test error? Ranks of both are compared between networks of one data
set, method and depth that differ in rate and seed, or in the seed alone; depths are pooled. Seeds
have splits of their own, some of which are hard for all networks, so the mean over all networks of
a split is subtracted from the ranks: else p would count one split many times. p is the share of
9,999 random pairings, within the same groups, that agree or disagree as much, and Holm's
correction is over all comparisons of the run.
"""

import itertools
import math
from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor, nn

from geoparam import analysis
from geoparam_lab.experiments.claims_measures import (
    BATCH_SIZE,
    Member,
    Sets,
    layer_inputs,
    train,
)
from geoparam_lab.run_folder import Record

Array = np.ndarray

WIDTH = 24
QUANTITIES = tuple(
    f"{name}_{moment}"
    for moment in ("early", "late")
    for name in ("changes", "dead", "distance", "flattest")
)
PERMUTATIONS = 9_999


def deep(members: Sequence[Member], dataset: str, data: Sets, epochs: int) -> list[Record]:
    """Train networks of `size` hidden layers; return test errors and the four quantities."""
    early = max(1, epochs // 10)
    starts = sorted({0, early, epochs // 2, epochs - 1})  # of the epochs that are looked at
    frames = sorted({*starts, *(epoch + 1 for epoch in starts)})
    hidden, found = [WIDTH] * int(members[0].size), []
    for error, x, models in train(members, data[dataset], hidden, frames, dataset == "banana"):
        at = dict(zip(frames, models, strict=True))
        bits = {frame: analysis.patterns(model, x) for frame, model in at.items()}
        record: Record = {"test_error": error}
        for moment, last in (("early", early + 1), ("late", epochs)):
            each = [bits[e + 1].changes(bits[e]).network.share for e in starts if e < last]
            steps = math.ceil(len(x) / BATCH_SIZE)  # of an epoch
            own = {"changes": float(np.mean(each)) / steps} | look(at[last], x)
            record |= {f"{name}_{moment}": value for name, value in own.items()}
        found.append(record)
    return found


def look(model: nn.Sequential, x: Tensor) -> Record:
    """Return dead units, distances by layer and the smallest slope of one network."""
    distances, dead = [], []
    layers = analysis.boundaries(model, x).values()
    for seen, each in zip(layer_inputs(model, x), layers, strict=True):
        middle = seen.mean(dim=0)
        radius = (seen - middle).square().sum(dim=1).mean().sqrt()
        off = (each.direction @ middle + each.distance).abs() / radius
        distances.append(float(off.nanmedian()))
        dead.append((seen @ each.direction.T + each.distance).amax(dim=0) <= 0)
    x = x.clone().requires_grad_()
    slopes = torch.autograd.grad(model(x).sum(), x)[0].norm(dim=1)
    return {
        "dead": float(torch.cat(dead[:-1]).double().mean()),  # the last one is the output
        "distance": float(np.mean(distances[:-1])),
        "distances": distances[:-1],
        "flattest": float(slopes.min() / slopes.median().clamp(min=1e-300)),
    }


# --- does it go with the test error? ------------------------------------------------------------


def correlate(
    records: Sequence[Record],
    cells: Sequence[str],
    quantities: Sequence[str],
    parts: Mapping[str, Sequence[str]],
) -> list[Record]:
    """Return rank correlations of every quantity with the test error, for each cell.

    Networks of a cell have the same values in the fields `cells`. They are ranked among those that
    share the fields of `parts` too, which has them by the name of the question.
    """
    by_cell: dict[tuple, list[Record]] = {}
    for record in records:
        by_cell.setdefault(tuple(record[field] for field in cells), []).append(record)
    found: list[Record] = []
    for cell, own in by_cell.items():
        for part, quantity in itertools.product(parts, quantities):
            x, y = (np.array([r[field] for r in own], float) for field in (quantity, "test_error"))
            groups = [tuple(record[field] for field in parts[part]) for record in own]
            correlation, p = rank_correlation(x, y, groups, [record["seed"] for record in own])
            key = {"part": part, "method": "all", "size": quantity, "lr": None, "seed": None}
            key |= dict(zip(cells, cell, strict=True))
            found.append(key | {"correlation": correlation, "p": p, "networks": len(own)})
    return adjust(found)


def rank_correlation(
    x: Array, y: Array, groups: Sequence[object], splits: Sequence[object]
) -> tuple[float, float]:
    """Return the correlation of ranks within groups, and its two-sided p by permutation.

    The mean of a split is subtracted from ranks. What is not finite ranks last; 0 and 1 where one
    of the two does not vary.

    Example:
        >>> groups, splits = [0, 0, 0, 1, 1, 1, 2, 2, 2], [0, 1, 2] * 3
        >>> x = np.array([1, 2, 3, 12, 13, 11, 23, 21, 22.0])
        >>> correlation, p = rank_correlation(x, x % 10, groups, splits)
        >>> round(correlation, 6), p < 0.02
        (1.0, True)
        >>> rank_correlation(x, np.array(splits), groups, splits)  # the split decides
        (0.0, 1.0)
    """
    at, split = (
        np.unique(list(map(str, own)), return_inverse=True)[1] for own in (groups, splits)
    )
    finite = (np.where(np.isfinite(values), values, np.inf) for values in (x, y))
    a, b = (_ranks(values, at) for values in finite)
    same = split[:, None] == split
    a, centred = (ranks - same @ ranks / same.sum(axis=1) for ranks in (a, b))
    size = np.sqrt((a @ a) * (centred @ centred))
    if not size > 1e-9:
        return 0.0, 1.0
    keys = np.random.default_rng(0).random((PERMUTATIONS, len(b))) + at  # mix within groups
    order = np.argsort(at, kind="stable")
    mixed = np.empty_like(keys)
    mixed[:, order] = b[np.argsort(keys, axis=1)]
    extreme = (np.abs(mixed @ a) >= abs(a @ b) - 1e-9).sum()
    return float(a @ b / size), float((extreme + 1) / (PERMUTATIONS + 1))


def _ranks(values: Array, at: Array) -> Array:
    """Return ranks within groups from -1 to 1, ties in the middle."""
    ranks = np.zeros(len(values))
    for group in np.unique(at):
        own = values[at == group]
        above = (own[:, None] > own).sum(axis=1) - (own[:, None] < own).sum(axis=1)
        ranks[at == group] = above / max(1, len(own) - 1)
    return ranks


def adjust(records: list[Record]) -> list[Record]:
    """Return records with `p_holm`: p corrected for as many comparisons as there are.

    Example:
        >>> [record["p_holm"] for record in adjust([{"p": 0.01}, {"p": 0.5}, {"p": 0.02}])]
        [0.03, 0.5, 0.04]
    """
    least = 0.0
    for place, record in enumerate(sorted(records, key=lambda record: record["p"])):
        least = min(1.0, max(least, record["p"] * (len(records) - place)))
        record |= {"p_holm": least, "comparisons": len(records)}
    return records
