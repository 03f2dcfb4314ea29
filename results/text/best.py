"""Print settings of every method in a sweep over text, as values of --method.

    best.py FOLDER best|near [METHOD]

best   the setting with the lowest validation loss
near   four more tries around it: the next peak (beyond an edge of the grid, or between two), the
       next lower momentum, and two other rates of the rest (two other decays for AdamW); chosen
       from the first eight tries alone, so that a resumed sweep makes the same ones, and an error
       before those are done
"""

import json
import math
import sys
from collections import defaultdict
from pathlib import Path

Setting = dict[str, float]

NUMBERS = ("turn", "lr", "decay", "momentum", "rest_lr", "rest_decay", "scale_lr")
MOMENTA = (0.95, 0.9, 0.8, 0.7)
REST_LRS = (1e-3, 3e-3, 1e-2)
GRID = 8  # tries of each method in the grid


def read_losses(folder: Path) -> dict[str, list[tuple[float, Setting]]]:
    """Return validation loss and setting of each method's runs, in the order of the records."""
    by_method = defaultdict(list)
    for line in (folder / "metrics.jsonl").read_text().splitlines():
        record = json.loads(line)
        setting = {name: record[name] for name in NUMBERS if record.get(name) is not None}
        if "turn" in setting:
            del setting["lr"]  # it is the rest's
        loss = record["val_loss"]
        if record["seed"] == 0:
            is_number = isinstance(loss, float) and math.isfinite(loss)
            by_method[record["method"]].append((loss if is_number else math.inf, setting))
    return dict(sorted(by_method.items()))


def find_best(runs: list[tuple[float, Setting]]) -> Setting:
    return min(runs, key=lambda run: run[0])[1]


def find_next_peak(peaks: list[float], best: float) -> float:
    """Return twice the largest or half the smallest peak, or one between the best and the next."""
    if best == peaks[-1]:
        return 2 * best
    if best == peaks[0]:
        return best / 2
    above = peaks[peaks.index(best) + 1]
    return float(f"{math.sqrt(best * above):.2g}")


def list_near(runs: list[tuple[float, Setting]]) -> list[Setting]:
    """Return four settings around the best, none of which was tried."""
    best = find_best(runs)
    tried = [setting for _, setting in runs]
    peak = "turn" if "turn" in best else "lr"
    peaks = sorted({setting[peak] for setting in tried})
    below = [momentum for momentum in MOMENTA if momentum < best["momentum"]]
    lower = next(momentum for momentum in below if best | {"momentum": momentum} not in tried)
    changes = [{peak: find_next_peak(peaks, best[peak])}, {"momentum": lower}]
    if "rest_lr" in best:
        changes += [{"rest_lr": rate} for rate in REST_LRS if rate != best["rest_lr"]]
    else:
        changes += [{"decay": best["decay"] / 3}, {"decay": best["decay"] * 3}]
    return [best | change for change in changes]


def main() -> None:
    folder, which, *methods = sys.argv[1:]
    by_method = read_losses(Path(folder))
    if methods:
        by_method = {method: by_method[method] for method in methods if method in by_method}
    behind = [method for method, runs in by_method.items() if len(runs) < GRID]
    if which == "near" and behind:
        sys.exit(f"{', '.join(behind)} in {folder} have fewer than {GRID} tries: end the grid.")
    for method, runs in by_method.items():
        settings = [find_best(runs)] if which == "best" else list_near(runs[:GRID])
        for setting in settings:
            print(":".join([method, *(f"{name}={value:.6g}" for name, value in setting.items())]))


if __name__ == "__main__":
    main()
