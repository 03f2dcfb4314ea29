"""What a sweep over text found: losses over rates or angles, at each size.

The peak of a run is the number that its schedule scales: the turn in degrees, or the rate of the
hidden matrices. Where other numbers were varied too (momentum, decay), a peak has its best.
Often the best setting alone has several seeds. Others are compared with it on the seeds that they
have too: a seed may change the loss by more than a setting does.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from geoparam_lab.experiments.choice import choose_best
from geoparam_lab.experiments.experiment import list_in_words
from geoparam_lab.run_folder import Record, Run, group_records
from geoparam_lab.training.text.settings import METHODS, SIZES

Size = tuple[int, ...]  # width, depth, steps, batch size
Losses = dict[float, float]  # by peak
_WORDS = {"width": "width", "depth": "depth", "steps": "steps", "batch_size": "batch"}


class Common(NamedTuple):
    """The peak that serves all sizes best."""

    peak: float
    excess: float  # nats above the best peak of a size, where that is the most
    sizes: int


def get_peak(record: Record) -> float:
    """Return the turn or the rate of a run."""
    return float(record["turn" if record["method"] == "turn" else "lr"])


def measure_peaks(records: Iterable[Record], method: str) -> dict[Size, Losses]:
    """Return a method's validation losses by size and peak, means over seeds; diverged: NaN."""
    tried = [
        record | {"peak": get_peak(record)} for record in records if record["method"] == method
    ]
    by_size: dict[Size, Losses] = {}
    for size, same in sorted(group_records(tried, *SIZES).items()):
        best = choose_best(_take_common_seeds(same), "val_loss", ["peak"], lowest=True)
        by_size[size] = {
            peak: float(np.mean([record["val_loss"] for record in chosen]))
            for (peak,), chosen in sorted(group_records(best, "peak").items())
        }
    return by_size


def _take_common_seeds(records: Sequence[Record]) -> list[Record]:
    """Return the records of the seeds that every setting has."""
    settings = group_records(records, "lr", "tuned").values()
    common = set.intersection(*({record["seed"] for record in same} for same in settings))
    return [record for record in records if record["seed"] in common]


def find_common(by_size: Mapping[Size, Losses]) -> Common | None:
    """Return the peak that is nowhere far above a size's own best, of those tried everywhere."""
    if not by_size:
        return None
    everywhere = set.intersection(*(set(losses) for losses in by_size.values()))
    worst: dict[float, float] = {}
    for peak in sorted(everywhere):
        above = [losses[peak] - lowest(losses) for losses in by_size.values()]
        worst[peak] = math.inf if any(map(math.isnan, above)) else max(above)
    if not worst:
        return None
    peak = min(worst, key=worst.__getitem__)
    return Common(peak, worst[peak], len(by_size))


def lowest(losses: Losses) -> float:
    """Return the best loss; NaN where all runs diverged."""
    finite = [loss for loss in losses.values() if math.isfinite(loss)]
    return min(finite, default=math.nan)


def name_sizes(sizes: Sequence[Size]) -> dict[Size, str]:
    """Return a name for each size, of the numbers in which they differ.

    Example:
        >>> list(name_sizes([(64, 6, 500, 96), (256, 6, 500, 96)]).values())
        ['width 64', 'width 256']
    """
    varied = [i for i in range(len(SIZES)) if len({size[i] for size in sizes}) > 1]
    words = list(_WORDS.values())
    shown = varied or [0, 1]
    return {size: ", ".join(f"{words[i]} {size[i]:,}" for i in shown) for size in sizes}


def name_size(size: Size) -> str:
    """Return all four numbers of a size."""
    numbers = zip(_WORDS.values(), size, strict=True)
    return ", ".join(f"{word} {number:,}" for word, number in numbers)


def find_centre(sizes: Iterable[Size]) -> Size:
    """Return the size from which most others differ in one number alone, else the smallest.

    Example:
        >>> find_centre([(64, 6, 500, 96), (256, 6, 500, 96), (256, 6, 2000, 96)])
        (256, 6, 500, 96)
    """
    ordered = sorted(sizes)
    return max(ordered, key=lambda size: sum(len(_differ(size, other)) == 1 for other in ordered))


def list_factors(by_size: Mapping[Size, Losses], centre: Size) -> dict[str, dict[int, Losses]]:
    """Return the losses over each number that varies while the others are the centre's."""
    factors: dict[str, dict[int, Losses]] = {}
    for index, word in enumerate(_WORDS.values()):
        lines = {
            size[index]: losses
            for size, losses in by_size.items()
            if _differ(size, centre) in ([], [index])
        }
        if len(lines) > 1:
            factors[word] = lines
    return factors


def _differ(size: Size, other: Size) -> list[int]:
    return [i for i, (one, two) in enumerate(zip(size, other, strict=True)) if one != two]


def list_methods(records: Iterable[Record]) -> list[str]:
    """Return the methods of some records, in their usual order."""
    present = {record["method"] for record in records}
    return [method for method in METHODS if method in present]


def find_for_tables(records: Sequence[Record]) -> list[Record]:
    """Return the records for two tables: the best setting of each method, and all settings.

    The latter say how far they are above the best of their method and size with the same seed.
    """
    fields = ["method", *SIZES]
    best = choose_best(records, "val_loss", fields, lowest=True)
    shown = [record | {"table": "best"} for record in best]
    losses = {
        key: record["val_loss"] for key, [record] in group_records(best, *fields, "seed").items()
    }
    for record in records:
        key = tuple(record[field] for field in [*fields, "seed"])
        above = record["val_loss"] - losses.get(key, math.nan)
        shown.append(record | {"table": "all", "excess": above})
    return shown


def describe(run: Run) -> str:
    """Say which turn or rate serves all sizes, and how well."""
    said = []
    records = run.records()
    for method in list_methods(records):
        by_size = measure_peaks(records, method)
        common = find_common(by_size)
        has_choice = any(len(losses) > 1 for losses in by_size.values())
        if common is None or common.sizes < 2 or not has_choice:
            continue
        peak = f"{common.peak:g} degrees" if method == "turn" else f"{method}'s {common.peak:g}"
        said.append(f"{peak} by {common.excess:.3f}")
    if not said:
        return ""
    sizes = len({tuple(record[name] for name in SIZES) for record in records})
    return (
        f"One number for {sizes} sizes, and by how many nats it is above the best of a size, "
        f"where that is the most: {list_in_words(said)}."
    )
