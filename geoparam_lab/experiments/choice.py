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
    shown: list[Record] = []
    for group in group_records(records, *fields).values():
        settings: dict[tuple[float, str], dict[int, Record]] = {}
        for record in group:
            at = record["lr"], record.get("tuned", "")
            settings.setdefault(at, {})[record["seed"]] = record
        most = max(map(len, settings.values()))
        values = {
            at: float(np.mean([record.get(measure, math.nan) for record in some.values()]))
            for at, some in sorted(settings.items())
            if len(some) == most
        }
        finite = [at for at in values if math.isfinite(values[at])]
        choose = min if lowest else max
        best = choose(finite or values, key=values.__getitem__)
        shown += [record | {"tries": len(settings)} for record in settings[best].values()]
    return shown
