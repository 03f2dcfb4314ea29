"""Print table 2 under steps and plateau, with and without warmup, from the sweeps `schedules-*`.

    schedules.py RUNS BATCH

For each method the rate with the best held-out top-1 of the first seed, and its validation top-1.
"""

import json
import math
import statistics
import sys
from collections import defaultdict
from pathlib import Path

folder, batch = Path(sys.argv[1]), sys.argv[2]
TITLES = {"bn": "BN", "gmp+imn": "GmP + IMN", "wn+mbn": "WN + MBN"}
NAMES = ("steps", "steps-warmup", "plateau", "plateau-warmup")


def read(name: str) -> dict[str, dict[float, list[dict]]]:
    """Return the records of a sweep by method and rate, the first seed's first."""
    found: dict = defaultdict(lambda: defaultdict(list))
    path = folder / f"table2-{batch}-{name}" / "metrics.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    for record in sorted(map(json.loads, lines), key=lambda each: each["seed"]):
        found[record["method"]][record["lr"]].append(record)
    return found


def find_held_out(records: list[dict]) -> float:
    """Return the first seed's held-out top-1; the lowest of all if it diverged."""
    value = records[0].get("select_top1")
    return value if isinstance(value, float) and not math.isnan(value) else -math.inf


def describe(rates: dict[float, list[dict]]) -> str:
    """Return validation top-1 at the chosen rate, its error, the rate, and how many were tried."""
    best = max(rates, key=lambda lr: find_held_out(rates[lr]))
    values = [record["top1"] for record in rates[best]]
    text = f"{statistics.mean(values):.1f}"
    if len(values) > 1:
        text += f" ± {statistics.stdev(values) / math.sqrt(len(values)):.1f}"
    epochs = statistics.mean(record["epochs"] for record in rates[best])
    return f"{text} ({best:g} of {len(rates)}, {len(values)} seeds, {epochs:.0f} epochs)"


print(f"| batch {batch} | {' | '.join(NAMES)} |")
print("| --- " * (len(NAMES) + 1) + "|")
sweeps = {name: read(name) for name in NAMES}
for method, title in TITLES.items():
    cells = [describe(own[method]) if method in own else "–" for own in sweeps.values()]
    print(f"| {title} | {' | '.join(cells)} |")
