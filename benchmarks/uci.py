"""How long the papers' UCI table takes, and in how many of its cells ours agrees with it.

    python -m benchmarks.uci [--data DIR] [--jobs N] [--datasets ...] [--methods ...] [--splits 10]

The papers' protocol as `geoparam run uci` has it: seven sets, four methods and ten splits, 280
networks, in N processes of one thread each (as many as there are cores), data loaded and processes
started included. The run goes to a temporary folder. What is asked for is at most 15 minutes on
two cores, and agreement (two combined standard errors) in at least 24 of the 28 cells.
"""

import argparse
import resource
import tempfile
import time
from pathlib import Path

from benchmarks.timing import hardware
from geoparam_lab import methods
from geoparam_lab.experiments import uci
from geoparam_lab.run_folder import Run
from geoparam_lab.session import count_cores
from geoparam_lab.tables.estimates import agrees, estimate


def cells(run: Run) -> dict[tuple[str, str], tuple[str, bool | None]]:
    """Return each cell's text by method and data set, and whether it agrees with the papers'."""
    found = {}
    for dataset in run.config["datasets"]:
        for method in run.config["methods"]:
            own = [r for r in run.records() if (r["dataset"], r["method"]) == (dataset, method)]
            ours = estimate(record["test_rmse"] for record in own)
            papers = uci.EXPERIMENT.find_printed("test_rmse", method, dataset)
            text = "–" if ours is None else f"{ours.mean:.4f} ± {ours.error or 0:.4f}"
            found[method, dataset] = text, agrees(ours, papers)
    return found


def show(run: Run) -> None:
    """Print the table; a cell that does not agree is marked."""
    found, datasets = cells(run), run.config["datasets"]
    print("| test RMSE | " + " | ".join(datasets) + " |")
    print("|" + " --- |" * (len(datasets) + 1))
    marks = {True: "", False: " ≠", None: ""}
    for method in run.config["methods"]:
        row = (found[method, dataset] for dataset in datasets)
        texts = [text + marks[same] for text, same in row]
        print(f"| {methods.TITLES[method]} | {' | '.join(texts)} |")
    known = [same for _, same in found.values() if same is not None]
    print(f"\n{sum(known)} of {len(known)} cells agree with the papers'.")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data")
    parser.add_argument("--jobs", type=int, default=count_cores())
    parser.add_argument("--datasets", default=",".join(uci.NAMES))
    parser.add_argument("--methods", default=",".join(uci.COMPARED))
    parser.add_argument("--splits", type=int, default=10)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        start = time.perf_counter()
        run = uci.run(
            Path(folder, "run"),
            datasets=args.datasets.split(","),
            methods=args.methods.split(","),
            seeds=args.splits,
            data=args.data,
            jobs=args.jobs,
        )
        wall = time.perf_counter() - start
        used = [
            resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
        ]
        busy = sum(usage.ru_utime + usage.ru_stime for usage in used)
        print(f"{len(run.records())} networks, {args.jobs} processes; {hardware('cpu')}")
        print(f"{wall:.0f} s, of which the processors worked {busy:.0f} s.\n")
        show(run)


if __name__ == "__main__":
    main()
