"""The question that the papers leave open: regions in networks of `size` hidden layers.

Four quantities, after a tenth of the training ("early") and at the end ("late"):

    changes     share of the training points' activation bits that change in a step: those that
                differ after an epoch over its steps, a mean over some epochs
    dead        share of units that are active at no training point
    distance    how far boundaries are from the mean of their layer's inputs, in radii of these
                (root mean square distance from it): median over units, mean over layers
    flattest    smallest slope ||dy/dx|| at any training point over the median slope

The parts "deep: rates" and "deep: seeds" have their rank correlations with the test error, over
rates and seeds within a depth, and over seeds within a depth and rate.
"""

import math

import numpy as np
import torch
from claim import BATCH_SIZE, Cases, Record, Sets, collect_inputs, make_tasks, run, train
from rank_correlations import correlate
from torch import Tensor, nn

from geoparam import analysis

EPOCHS, UNITS = 150, 24
QUANTITIES = tuple(
    f"{name}_{moment}"
    for moment in ("early", "late")
    for name in ("changes", "dead", "distance", "flattest")
)


def measure(cases: Cases, sets: Sets, epochs: int = EPOCHS) -> list[Record]:
    early = max(1, epochs // 10)
    starts = sorted({0, early, epochs // 2, epochs - 1})  # of the epochs with counted changes
    frames = sorted({*starts, *(epoch + 1 for epoch in starts)})
    hidden = [UNITS] * int(cases[0].size)

    records = []
    for error, x, models in train(cases, sets, hidden, frames):
        at = dict(zip(frames, models, strict=True))
        bits = {frame: analysis.patterns(model, x) for frame, model in at.items()}
        steps = math.ceil(len(x) / BATCH_SIZE)  # of an epoch
        record: Record = {"test_error": error}
        for moment, last in (("early", early + 1), ("late", epochs)):
            shares = [bits[e + 1].changes(bits[e]).network.share for e in starts if e < last]
            measured = {"changes": float(np.mean(shares)) / steps, **measure_regions(at[last], x)}
            record |= {f"{name}_{moment}": value for name, value in measured.items()}
        records.append(record)
    return records


def measure_regions(model: nn.Sequential, x: Tensor) -> Record:
    """Return dead units, distances by layer and the smallest slope of one network."""
    distances, dead = [], []
    layers = zip(collect_inputs(model, x), analysis.boundaries(model, x).values(), strict=True)
    for z, boundary in list(layers)[:-1]:  # without the output layer
        mean = z.mean(dim=0)
        radius = (z - mean).square().sum(dim=1).mean().sqrt()
        from_mean = (boundary.direction @ mean + boundary.distance).abs()
        distances.append(float((from_mean / radius).nanmedian()))
        dead.append((z @ boundary.direction.T + boundary.distance).amax(dim=0) <= 0)

    x = x.clone().requires_grad_()
    slopes = torch.autograd.grad(model(x).sum(), x)[0].norm(dim=1)
    return {
        "dead": float(torch.cat(dead).double().mean()),
        "distance": float(np.mean(distances)),
        "distances": distances,
        "flattest": float(slopes.min() / slopes.median().clamp(min=1e-300)),
    }


def correlate_with_error(records: list[Record]) -> list[Record]:
    groups = {"deep: rates": ("size",), "deep: seeds": ("size", "lr")}
    return correlate(records, ("dataset", "method"), QUANTITIES, groups)


if __name__ == "__main__":
    datasets = ["banana", "energy", "yacht"]
    compared = ["sp", "wn", "bn", "gmp", "intrinsic"]
    tasks = make_tasks("deep", datasets, compared, (2, 3, 4, 5), (0.01, 0.03, 0.1))
    run("deep", tasks, measure, correlate_with_error, datasets=datasets)
