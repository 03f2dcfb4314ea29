"""Ten small networks trained in one stack, against the same function called ten times for one.

    python -m benchmarks.stacked [--data DIR] [--methods sp,wn,bn,gmp] [--splits 10]

Yacht under the papers' protocol (the data from DIR, $GEOPARAM_DATA or the archive): one hidden
layer of 100 units, full batch, float64, at most 5,000 epochs, judged on the test split. Everything
runs on one thread and is timed by its processor time, so that a busy machine matters less.

Two ratios of time alone / time stacked, so above 1 the stack is faster. `epoch` is that of one
epoch with all members in training. `protocol` is that of whole runs: members stop at different
times, and the last ones have the stack for themselves. `same` is the largest difference between
the best test errors of the two, relative.
"""

import argparse
import time
from dataclasses import replace

import numpy as np
import torch

from benchmarks.timing import hardware
from geoparam.data import splits, uci
from geoparam.experiments import methods, stacked
from geoparam.experiments.stacked import Protocol, Result

PAPERS = Protocol(stacked.absolute_error, stacked.squared_error, batch_size=1024)
FIXED = replace(PAPERS, epochs=100, patience=1000)  # nobody stops


def train(method: str, data: splits.Splits, those: slice, protocol: Protocol) -> Result:
    """Train the members of these splits, each from its own seed."""
    x, y, x_val, y_val = (part[those] for part in data[:4])
    seeds = range(len(data.x_train))[those]
    widths = (x.shape[-1], 100, 1)
    models = [methods.mlp(method, widths, seed=seed) for seed in seeds]
    lr = methods.LEARNING_RATES[method]
    return stacked.train(models, (x, y), lr, protocol, (x_val, y_val), seeds=seeds)


def seconds(
    method: str, data: splits.Splits, groups: list[slice], protocol: Protocol
) -> tuple[float, list[Result]]:
    """Train these groups of members one after the other; return the time and what came out."""
    start = time.process_time()
    results = [train(method, data, those, protocol) for those in groups]
    return time.process_time() - start, results


def measure(method: str, data: splits.Splits) -> None:
    """Print one method's row of the table."""
    size = len(data.x_train)
    together = [slice(0, size)]
    alone = [slice(index, index + 1) for index in range(size)]
    train(method, data, together[0], replace(FIXED, epochs=3))  # what is loaded on first use
    epoch = [
        min(seconds(method, data, groups, FIXED)[0] for _ in range(3))
        for groups in (together, alone)
    ]
    stacked_time, (result,) = seconds(method, data, together, PAPERS)
    alone_time, results = seconds(method, data, alone, PAPERS)
    errors = np.concatenate([one.best_metric for one in results])
    same = np.abs(result.best_metric / errors - 1).max()
    print(
        f"| {methods.TITLES[method]} | {epoch[1] / epoch[0]:.1f} | "
        f"{alone_time / stacked_time:.1f} | {stacked_time:.1f} | {result.epochs.mean():.0f} | "
        f"{result.epochs.max()} | {np.sqrt(result.best_metric).mean():.3f} | {same:.0e} |",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data")
    parser.add_argument("--methods", default="sp,wn,bn,gmp")
    parser.add_argument("--splits", type=int, default=10)
    args = parser.parse_args()
    torch.set_num_threads(1)
    data = splits.stack(*uci.load("yacht", args.data), seeds=range(args.splits))
    print(f"Yacht, {args.splits} splits in one stack and alone; {hardware('cpu')}\n")
    print(
        "| method | epoch, ratio | protocol, ratio | stacked, s | mean epochs | most epochs "
        "| test RMSE | same |"
    )
    print("|" + " --- |" * 8)
    for method in args.methods.split(","):
        measure(method, data)


if __name__ == "__main__":
    main()
