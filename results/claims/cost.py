"""Remark 3.4: a layer's cost grows as mn, as that of SP.

Processor seconds of a layer's forward and backward pass, methods in turn, and `ratio`, over SP's.
`size` is the number of inputs, or of units, while the other is 512. The records of the part
"growth" have the exponent with which time grows.
"""

import functools
import time

import numpy as np
import torch
from claim import BATCH_SIZE, Members, Record, find_exponents, make_tasks, run
from torch import nn

from geoparam_lab import methods

SIDE = 512
REPEATS = 15  # of a timed step; the fastest counts


def measure(members: Members, *unused: object) -> list[Record]:
    layers = []
    for _, dataset, method, size, _, seed in members:
        n, m = (int(size), SIDE) if dataset == "inputs" else (SIDE, int(size))
        with methods.use_seed(seed):
            block = methods.get(method).block(nn.Linear, n, m, dtype=torch.float32)
            layers.append((block, torch.randn(BATCH_SIZE, n), torch.randn(BATCH_SIZE, m)))

    seconds = np.zeros((REPEATS, len(members)))
    for repeat in range(-2, REPEATS):  # -2 and -1 warm up; their rows are written again
        for i, (block, x, gradient) in enumerate(layers):
            start = time.process_time()
            block(x).backward(gradient)
            seconds[repeat, i] = time.process_time() - start

    fastest = dict(zip(members, seconds.min(axis=0).tolist(), strict=True))
    plain = {(m.size, m.seed): time for m, time in fastest.items() if m.method == "sp"}
    return [{"seconds": s, "ratio": s / plain[m.size, m.seed]} for m, s in fastest.items()]


if __name__ == "__main__":
    compared = ["sp", "wn", "gmp", "intrinsic"]
    sizes = (64, 256, 1024, 4096)
    tasks = make_tasks("cost", ["inputs", "units"], compared, sizes, seeds=3, together="method")
    find_growth = functools.partial(find_exponents, "growth", {"exponent": "seconds"})
    run("cost", tasks, measure, find_growth, jobs=1)
