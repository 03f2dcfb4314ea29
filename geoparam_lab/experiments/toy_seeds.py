"""Which seeds of Levy and Banana are shown: each method's median, since one seed may be lucky."""

import math
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from geoparam_lab import methods as methods_table
from geoparam_lab.experiments.toys import Arrays, Member
from geoparam_lab.run_folder import Record, Run, select_records
from geoparam_lab.training.stacks import snapshots

SHOWN = 5  # seeds that the slider offers, or more where methods have more medians


def find_papers_lr(method: str, lrs: Sequence[float]) -> float:
    """Return the papers' rate of a method, or where that was not run the nearest one that was.

    Example:
        >>> find_papers_lr("gmp", (0.01, 0.1)), find_papers_lr("gmp", (0.01, 0.03))
        (0.1, 0.03)
    """
    return min(lrs, key=lambda lr: abs(np.log(lr / methods_table.get(method).lr)))


def find_records(run: Run, method: str, lr: float | None = None) -> list[Record]:
    """Return a method's records at a rate, or else at the papers'."""
    lr = lr or find_papers_lr(method, run.config["lrs"])
    return select_records(run.records(), method=method, lr=lr)


def compare_gmp_with_sp(
    run: Run, text: str, measure: str, motion: str, lr: float | None = None
) -> str:
    """Return a text with the median results {gmp} and {sp}, and the largest motions {gmp_most} and
    {sp_most}; empty where one is missing.
    """
    found: dict[str, float] = {}
    for method in ("gmp", "sp"):
        own = find_records(run, method, lr)
        results = [r[measure] for r in own if math.isfinite(r[measure])]
        if not results:
            return ""
        found |= {method: np.median(results), f"{method}_most": max(r[motion] for r in own)}
    return text.format(**found)


def find_median_seed(records: Iterable[Record], measure: str) -> int:
    """Return the seed with the median result; of two in the middle, the one with the lower value.

    Example:
        >>> records = [{"seed": s, "rmse": x} for s, x in enumerate((0.4, 1.2, 1.1))]
        >>> find_median_seed(records, "rmse")
        2
    """
    order = sorted((not math.isfinite(r[measure]), r[measure], r["seed"]) for r in records)
    finite = sum(not infinite for infinite, _, _ in order) or 1
    return int(order[(finite - 1) // 2][2])


def load_medians(run: Run, measure: str, lr: float | None = None) -> dict[str, Arrays]:
    """Return each method's arrays of its median seed, at a rate or else at the papers' own."""
    found = {}
    for method in run.config["methods"]:
        rate = lr or find_papers_lr(method, run.config["lrs"])
        seed = find_median_seed(find_records(run, method, rate), measure)
        found[method] = run.curves(Member(method, rate, seed).name)
    return found


def film_seeds(
    run: Run, measure: str, frames: Mapping[str, str], motion: str, per_epoch: int = 1
) -> Arrays:
    """Return what the slider shows of training: several seeds, each method at the papers' rate.

    The result has the arrays of `frames`, by their names in the curves, as (S, M, T, ...) on one
    time axis; `motion`, the largest of any update since the frame before; the `steps` of its
    frames, the methods' titles, the seeds, and the place of each method's median seed among them.
    """
    config = run.config
    own = {method: find_records(run, method) for method in config["methods"]}
    medians = [find_median_seed(records, measure) for records in own.values()]
    others = [seed for seed in range(config["seeds"]) if seed not in medians]
    seeds = sorted({*medians, *others[: max(0, SHOWN - len(set(medians)))]})
    films = [
        run.curves(Member(method, find_papers_lr(method, config["lrs"]), seed).name)
        for seed in seeds
        for method in own
    ]
    aligned = snapshots.align(films, [*frames.values()])
    steps = aligned["steps"]
    found = {name: aligned[kept] for name, kept in frames.items()}
    found[motion] = np.array(
        [snapshots.find_largest_since(film[motion], steps, per_epoch) for film in films]
    )
    shape = (len(seeds), len(own))
    return {name: array.reshape(*shape, *array.shape[1:]) for name, array in found.items()} | {
        "steps": steps,
        "methods": np.array([methods_table.title(name) for name in own]),
        "seeds": np.array(seeds),
        "median": np.array([seeds.index(seed) for seed in medians]),
    }
