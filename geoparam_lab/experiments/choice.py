"""The best setting of each method, from the records of a sweep."""

import math
from collections.abc import Iterable, Sequence

import numpy as np

from geoparam_lab.run_folder import Record, group_records


def choose_best(
    records: Iterable[Record], measure: str, fields: Sequence[str], lowest: bool = False
) -> list[Record]:
    """Return the records at the best setting (rate, and what else was tuned) for each problem.

    That is the highest, or lowest, mean of a measure among the settings with the most seeds: the
    others were behind with fewer. One that diverged counts only where there is no other; of equal
    ones, that of the lowest rate. How many `tries` there were is added.

    Args:
        records: each with `lr`, `seed` and perhaps `tuned`, its other numbers as text.
        measure: the field that is compared.
        fields: what records of one method on one problem have in common.
        lowest: whether a low mean is good.
    """
    best_records: list[Record] = []
    for group in group_records(records, *fields).values():
        settings: dict[tuple[float, str], dict[int, Record]] = {}  # by rate and options, by seed
        for record in group:
            setting = record["lr"], record.get("tuned", "")
            settings.setdefault(setting, {})[record["seed"]] = record

        most = max(map(len, settings.values()))
        means = {}
        for setting, by_seed in sorted(settings.items()):
            if len(by_seed) == most:
                values = [record.get(measure, math.nan) for record in by_seed.values()]
                means[setting] = float(np.mean(values))
        finite = [setting for setting, mean in means.items() if math.isfinite(mean)]
        choose = min if lowest else max
        best = choose(finite or means, key=means.__getitem__)
        best_records += [r | {"tries": len(settings)} for r in settings[best].values()]
    return best_records
