"""Remark 3.6: MBN on pre-activations leaves the shift of a layer's inputs, IMN removes it.

`size` is the number of the layer, from 1. `offset` is ||E x|| / sqrt(E ||x||^2) of its input after
training, `drift` the same ratio of what E x changes by in an epoch, on average. Norms use the mean
of all training points, as in training; for `_running` their running mean, which that pass has
moved by one more batch.
"""

from collections.abc import Sequence

import torch
from claim import Case, Cases, Record, Sets, collect_inputs, make_tasks, run, train
from torch import Tensor

EPOCHS, UNITS, LAYERS = 60, 32, 6


def measure(cases: Cases, sets: Sets, epochs: int = EPOCHS) -> list[Record]:
    networks = [case for case in cases if case.size == 1]  # the others are their deeper layers
    layers = int(max(case.size for case in cases))
    trained = train(networks, sets, [UNITS] * (layers - 1), range(epochs + 1))

    records: dict[Case, Record] = {case: {} for case in cases}
    for network, (_, x, models) in zip(networks, trained, strict=True):
        for suffix, is_training in (("", True), ("_running", False)):
            by_epoch = [collect_inputs(model.train(is_training), x) for model in models]
            by_layer = zip(*by_epoch, strict=True)
            for layer, inputs in enumerate(by_layer, start=1):
                offset, drift = measure_shift(inputs)
                record = records[network._replace(size=layer)]
                record |= {f"offset{suffix}": offset, f"drift{suffix}": drift}
    return list(records.values())


def measure_shift(inputs: Sequence[Tensor]) -> tuple[float, float]:
    """Return offset and drift, from a layer's inputs at all points after each epoch."""
    means = torch.stack([x.mean(dim=0) for x in inputs])
    sizes = torch.stack([x.square().sum(dim=1).mean().sqrt() for x in inputs])
    offset = means[-1].norm() / sizes[-1]
    drift = (means.diff(dim=0).norm(dim=1) / sizes[1:]).mean()
    return float(offset), float(drift)


if __name__ == "__main__":
    compared = ["wn", "wn+mbn", "bn", "gmp", "gmp+mbn", "gmp+imn"]
    layers = range(1, LAYERS + 1)
    tasks = make_tasks("shift", ["energy"], compared, layers, (0.03,), together="size")
    run("shift", tasks, measure, datasets=["energy"])
