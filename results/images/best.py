"""Print the best settings of every method in a sweep, the best method first.

    best.py FOLDER [COUNT]

Best is the highest mean top-1 on the training images that were kept back (--select), among the
settings with the most seeds.
"""

import json
import statistics
import sys
from collections import defaultdict
from pathlib import Path

count = int(sys.argv[2]) if len(sys.argv) > 2 else 1
methods: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
for line in (Path(sys.argv[1]) / "metrics.jsonl").read_text().splitlines():
    record = json.loads(line)
    held_out = record.get("select_top1")
    if isinstance(held_out, float) and held_out == held_out:  # a run that diverged has NaN
        parts = [record["method"], record["tuned"], f"lr={record['lr']:g}"]
        methods[record["method"]][":".join(filter(None, parts))].append(held_out)
ranked = []
for settings in methods.values():
    rank = {each: (len(runs), statistics.mean(runs)) for each, runs in settings.items()}
    best = sorted(rank, key=rank.__getitem__, reverse=True)[:count]
    ranked.append((statistics.mean(settings[best[0]]), best))
print(*(each for _, best in sorted(ranked, reverse=True) for each in best), sep="\n")
