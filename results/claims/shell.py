"""Section 3.1: boundaries should lie near the shell of the data.

`relative` is the median of |lam| over that of ||x||; `on_shell` the share of units whose |lam| is
among the middle nine tenths of ||x||; `path` is `relative` over training. The parts "shell: all"
and "shell: within" have rank correlations of both with the test error, over all networks and over
seeds within method and rate.
"""

from claim import FRAMES, Cases, Record, Sets, make_tasks, run, train
from rank_correlations import correlate

from geoparam import analysis
from geoparam_lab.training.stacks.snapshots import frame_epochs

EPOCHS, UNITS = 300, 100


def measure(cases: Cases, sets: Sets, epochs: int = EPOCHS) -> list[Record]:
    frames = frame_epochs(epochs, FRAMES).tolist()
    records = []
    for error, x, models in train(cases, sets, [int(cases[0].size)], frames):
        distances = [analysis.boundaries(model, x)["0"].distance.abs() for model in models]
        lengths = x.norm(dim=1)
        low, high = lengths.quantile(0.05), lengths.quantile(0.95)
        on_shell = (distances[-1] >= low) & (distances[-1] <= high)
        path = [float(distance.nanmedian() / lengths.median()) for distance in distances]
        records.append(
            {
                "test_error": error,
                "relative": path[-1],
                "relative_start": path[0],
                "on_shell": float(on_shell.double().mean()),
                "path": path,
                "epochs": frames,
            }
        )
    return records


def correlate_with_error(records: list[Record]) -> list[Record]:
    groups = {"shell: all": (), "shell: within": ("method", "lr")}
    return correlate(records, ("dataset",), ("relative", "on_shell"), groups)


if __name__ == "__main__":
    datasets = ["energy", "yacht", "boston"]
    compared = ["sp", "wn", "wn+mbn", "bn", "ln", "gmp", "gmp+bn", "gmp+ln"]
    compared += ["natural", "intrinsic"]
    tasks = make_tasks("shell", datasets, compared, (UNITS,), (0.01, 0.1))
    run("shell", tasks, measure, correlate_with_error, datasets=datasets)
