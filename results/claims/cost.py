"""Remark 3.4: a layer's cost grows as mn, as that of SP.

Processor seconds of a layer's forward and backward pass, methods in turn, and `ratio`, over SP's.
`size` is the number of inputs, or of units, while the other is 512. The records of the part
"growth" have the exponent with which time grows.
"""

import functools
import itertools
import time
from collections.abc import Callable

import numpy as np
import torch
from claim import BATCH_SIZE, Case, Cases, Record, find_exponents, make_tasks, run
from torch import nn

from geoparam_lab import methods

SIDE = 512
WARMUP, REPEATS = 2, 15  # of a timed step; the fastest counts


def make_step(case: Case) -> Callable[[], None]:
    """Return a layer's forward and backward pass."""
    n, m = int(case.size), SIDE
    if case.dataset == "units":
        n, m = m, n
    with methods.use_seed(case.seed):
        layer = methods.get(case.method).block(nn.Linear, n, m, dtype=torch.float32)
        x, gradient = torch.randn(BATCH_SIZE, n), torch.randn(BATCH_SIZE, m)
    return lambda: layer(x).backward(gradient)


def measure(cases: Cases, *unused: object) -> list[Record]:
    steps = [make_step(case) for case in cases]
    seconds = np.empty((WARMUP + REPEATS, len(cases)))
    for row, (i, step) in itertools.product(seconds, enumerate(steps)):
        start = time.process_time()
        step()
        row[i] = time.process_time() - start

    fastest = dict(zip(cases, seconds[WARMUP:].min(axis=0).tolist(), strict=True))
    records = []
    for case, seconds_taken in fastest.items():
        plain_seconds = fastest[case._replace(method="sp")]
        records.append({"seconds": seconds_taken, "ratio": seconds_taken / plain_seconds})
    return records


if __name__ == "__main__":
    compared = ["sp", "wn", "gmp", "intrinsic"]
    sizes = (64, 256, 1024, 4096)
    tasks = make_tasks("cost", ["inputs", "units"], compared, sizes, seeds=3, together="method")
    find_growth = functools.partial(find_exponents, "growth", {"exponent": "seconds"})
    run("cost", tasks, measure, find_growth, jobs=1)
