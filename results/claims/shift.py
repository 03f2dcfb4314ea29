"""Remark 3.6: MBN on pre-activations leaves the shift of a layer's inputs, IMN removes it.

`size` is the number of the layer, from 1. `offset` is ||E x|| / sqrt(E ||x||^2) of its input after
training, `drift` the same ratio of what E x changes by in an epoch, on average. Norms use the mean
of all training points, as in training; for `_running` their running mean, which that pass has
moved by one more batch.
"""

import torch
from claim import Member, Members, Record, Sets, collect_inputs, make_tasks, run, train

EPOCHS, UNITS, LAYERS = 60, 32, 6


def measure(members: Members, sets: Sets, epochs: int = EPOCHS) -> list[Record]:
    networks = [member for member in members if member.size == 1]
    layers = int(max(member.size for member in members))
    trained = train(networks, sets, [UNITS] * (layers - 1), range(epochs + 1))

    records: dict[Member, Record] = {member: {} for member in members}
    for member, (_, x, models) in zip(networks, trained, strict=True):
        for suffix, is_training in (("", True), ("_running", False)):
            inputs = [collect_inputs(model.train(is_training), x) for model in models]
            for layer, over_epochs in enumerate(zip(*inputs, strict=True), start=1):
                means = torch.stack([z.mean(dim=0) for z in over_epochs])
                sizes = torch.stack([z.square().sum(dim=1).mean().sqrt() for z in over_epochs])
                changes = means.diff(dim=0).norm(dim=1) / sizes[1:]
                record = records[member._replace(size=layer)]
                record[f"offset{suffix}"] = float(means[-1].norm() / sizes[-1])
                record[f"drift{suffix}"] = float(changes.mean())
    return list(records.values())


if __name__ == "__main__":
    compared = ["wn", "wn+mbn", "bn", "gmp", "gmp:norm=mbn", "gmp+imn"]
    layers = range(1, LAYERS + 1)
    tasks = make_tasks("shift", ["energy"], compared, layers, (0.03,), together="size")
    run("shift", tasks, measure, datasets=["energy"])
