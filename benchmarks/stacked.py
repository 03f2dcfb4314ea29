"""Ten small networks trained in one stack, against the same function called ten times for one.

    python -m benchmarks.stacked [--data DIR] [--methods sp,wn,bn,gmp] [--splits 10]

Yacht under the papers' protocol (the data from DIR, $GEOPARAM_DATA or the archive): one hidden
layer of 100 units, full batch, float64, at most 5,000 epochs, judged on the test split. Everything
runs on one thread and is timed by its processor time, so that a busy machine matters less.

Two ratios of time alone / time stacked, so above 1 the stack is faster, each time the best of
three. `epoch` is that of one epoch with all members in training. `protocol` is that of whole runs:
members stop at different times, and the last ones have the stack for themselves. `same` is the
largest difference between the best test errors of the two, relative.

**What a stack can save.** An epoch of k members takes a + k b: a for calls, b for arithmetic. Ten
alone take (a + b) E for E epochs in all; the stack takes a M + b E, where M is how long its last
member trains. So the ratio is below E / M, `limit`, which is what it would be if arithmetic were
free; `b / a` is what it is not.
"""

import argparse
import math
import time
from dataclasses import replace

import numpy as np
import torch

from benchmarks.timing import hardware
from geoparam_lab import methods
from geoparam_lab.data import splits, uci_data
from geoparam_lab.training.stacks import stacked
from geoparam_lab.training.stacks.stacked import Protocol, Result

PAPERS = Protocol(stacked.absolute_error, stacked.squared_error, batch_size=1024)
FIXED = replace(PAPERS, epochs=100, patience=1000)  # nobody stops
REPEATS = 3


def train(method: str, data: splits.Splits, those: slice, protocol: Protocol) -> Result:
    """Train the members of these splits, each from its own seed."""
    x, y, x_val, y_val = (part[those] for part in data[:4])
    seeds = range(len(data.x_train))[those]
    widths = (x.shape[-1], 100, 1)
    models = [methods.mlp(method, widths, seed=seed) for seed in seeds]
    rates = [methods.METHODS[method].lr] * len(models)
    return stacked.train(models, (x, y), rates, protocol, (x_val, y_val), seeds=seeds)


def seconds(
    method: str, data: splits.Splits, kinds: list[list[slice]], protocol: Protocol
) -> tuple[list[float], list[list[Result]]]:
    """Train each kind's groups of members one after the other, the kinds by turns.

    Returns the best time and the results of each kind.
    """
    best, results = [math.inf] * len(kinds), [[] for _ in kinds]
    for _ in range(REPEATS):
        for kind, groups in enumerate(kinds):
            start = time.process_time()
            results[kind] = [train(method, data, those, protocol) for those in groups]
            best[kind] = min(best[kind], time.process_time() - start)
    return best, results


def measure(method: str, data: splits.Splits) -> None:
    """Print one method's row of the table."""
    size = len(data.x_train)
    together = [slice(0, size)]
    alone = [slice(index, index + 1) for index in range(size)]
    train(method, data, together[0], replace(FIXED, epochs=3))  # what is loaded on first use
    (stack, ones), _ = seconds(method, data, [together, alone], FIXED)
    each = (stack - ones / size) / (size - 1)
    whole, ((result,), results) = seconds(method, data, [together, alone], PAPERS)
    errors = np.concatenate([one.best_metric for one in results])
    same = np.abs(result.best_metric / errors - 1).max()
    epochs = result.epochs
    print(
        f"| {methods.TITLES[method]} | {ones / stack:.1f} | {each / (ones / size - each):.2f} | "
        f"{whole[1] / whole[0]:.1f} | {epochs.sum() / epochs.max():.1f} | {whole[0]:.2f} | "
        f"{epochs.mean():.0f} | {epochs.max()} | {np.sqrt(result.best_metric).mean():.3f} | "
        f"{same:.0e} |",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data")
    parser.add_argument("--methods", default="sp,wn,bn,gmp")
    parser.add_argument("--splits", type=int, default=10)
    args = parser.parse_args()
    torch.set_num_threads(1)
    data = splits.stack(*uci_data.load("yacht", args.data), seeds=range(args.splits))
    print(f"Yacht, {args.splits} splits in one stack and alone; {hardware('cpu')}\n")
    print(
        "| method | epoch, ratio | b / a | protocol, ratio | limit | stacked, s | mean epochs "
        "| most epochs | test RMSE | same |"
    )
    print("|" + " --- |" * 10)
    for method in args.methods.split(","):
        measure(method, data)


if __name__ == "__main__":
    main()
