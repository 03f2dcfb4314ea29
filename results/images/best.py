"""Print the best setting of every method in a sweep, the best method first: best.py FOLDER.

Best is the highest top-1 on the training images that were kept back (--select), in the first seed.
"""

import json
import sys
from pathlib import Path

best: dict[str, dict] = {}
for line in (Path(sys.argv[1]) / "metrics.jsonl").read_text().splitlines():
    record = json.loads(line)
    held_out = record.get("select_top1")
    if record["seed"] == 0 and isinstance(held_out, float) and held_out == held_out:
        kept = best.setdefault(record["method"], record)
        if held_out > kept["select_top1"]:
            best[record["method"]] = record
for record in sorted(best.values(), key=lambda record: -record["select_top1"]):
    parts = [record["method"], record["tuned"], f"lr={record['lr']:g}"]
    print(":".join(filter(None, parts)))
