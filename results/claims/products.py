"""Appendix E: sparse activations and products of sines, in a layer whose fan-in is `size`.

`smallest` is the smallest product of any unit times sqrt(fan-in), which is of order 1 for uniform
directions; `negligible` the share of angles whose metric is below 1e-4; `sparsity` the share of
activations that are 0, `dead` that of units that are 0 at all points.
"""

import math

import torch
from claim import (
    FRAMES,
    Cases,
    Record,
    Sets,
    collect_inputs,
    find_layers,
    make_tasks,
    run,
    train,
)
from torch import Tensor, nn

import geoparam as gp
from geoparam import sphere
from geoparam_lab.training.stacks.snapshots import frame_epochs

EPOCHS, UNITS = 20, 32
NEGLIGIBLE = 1e-4  # a metric below this counts as vanished


def measure(cases: Cases, sets: Sets, epochs: int = EPOCHS) -> list[Record]:
    frames = frame_epochs(epochs, FRAMES).tolist()
    hidden = [int(cases[0].size), UNITS]
    records = []
    for error, x, models in train(cases, sets, hidden, frames, torch.float32):
        path = [measure_second_layer(model, x) for model in models]
        record = {"test_error": error, "epochs": frames, **path[-1]}
        for name, value in path[0].items():
            record[f"{name}_start"] = value
            record[f"{name}_path"] = [frame[name] for frame in path]
        records.append(record)
    return records


@torch.no_grad()
def measure_second_layer(model: nn.Sequential, x: Tensor) -> Record:
    is_zero = (collect_inputs(model, x)[2] == 0).double()
    record = {"sparsity": float(is_zero.mean()), "dead": float(is_zero.amin(dim=0).mean())}
    layer = find_layers(model)[1]
    if isinstance(layer, gp.GmPLinear):
        metric = sphere.metric(layer.get_parameter("latitude").double())  # products, squared
        record["smallest"] = float(metric.min().sqrt() * math.sqrt(layer.in_features))
        record["negligible"] = float((metric < NEGLIGIBLE).double().mean())
    return record


if __name__ == "__main__":
    sizes = [4**k for k in range(2, 8)]  # 16 ... 16,384
    tasks = make_tasks(
        "products", ["energy"], ["sp", "gmp:init=sphere"], sizes, (0.01, 0.1), seeds=2
    )
    run("products", tasks, measure, datasets=["energy"])
