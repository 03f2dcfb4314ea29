"""What this process is: its command, versions, commit, hardware and time.

Neither the machine's name nor any path is in it, but those that the user typed.
"""

import contextlib
import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import numpy as np
import torch

import geoparam as gp


def describe_session(command: str | None = None) -> dict[str, Any]:
    """Return what a run's folder keeps of the process that works on it."""
    return {
        "command": command or format_command(sys.argv),
        "versions": {
            "geoparam": gp.__version__,
            "torch": torch.__version__,
            "numpy": np.__version__,
            "python": platform.python_version(),
        },
        "commit": find_commit(),
        "hardware": {
            "cpu": _name_processor(),
            "cores": count_cores(),  # that this process may use
            "threads": torch.get_num_threads(),
            "gpus": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())],
        },
        "started": datetime.now(timezone.utc).isoformat(timespec="seconds"),
    }


def format_command(arguments: Sequence[str], environment: Mapping[str, str] = os.environ) -> str:
    """Return what a user types to start this process, or these processes, again.

    Example:
        >>> format_command(["/usr/bin/geoparam", "run", "levy", "--out", "my runs"], {})
        "geoparam run levy --out 'my runs'"
        >>> here = {"WORLD_SIZE": "16", "LOCAL_WORLD_SIZE": "8"}
        >>> format_command([".../geoparam/__main__.py", "run", "imagenet"], here)
        'torchrun --nnodes 2 --nproc-per-node 8 -m geoparam run imagenet'
    """
    program, *rest = arguments
    world, local = (int(environment.get(n, "1")) for n in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"))
    if world > 1:
        nodes = ["--nnodes", str(world // local)] if world > local else []
        start = ["torchrun", *nodes, "--nproc-per-node", str(local), "-m", "geoparam"]
    elif Path(program).name == "__main__.py":
        start = ["python", "-m", Path(program).parent.name]
    else:
        start = [Path(program).name]
    return shlex.join([*start, *rest])


def find_commit(*packages: Path) -> dict[str, Any] | None:
    """Return the commit of these packages, or of ours, and whether they differ from it.

    None where they are in no checkout of their own.
    """
    package, *others = packages or (Path(__file__).parent, Path(gp.__file__).parent)
    try:
        _git(package, "ls-files", "--error-unmatch", "__init__.py")  # raises unless it is tracked
        places = [".", *map(str, others)]
        changed = _git(package, "status", "--porcelain", "--untracked-files=no", "--", *places)
        return {"id": _git(package, "rev-parse", "HEAD").strip(), "dirty": bool(changed)}
    except (OSError, subprocess.SubprocessError):
        return None


def _git(folder: Path, *arguments: str) -> str:
    environment = {k: v for k, v in os.environ.items() if not k.startswith("GIT_")}
    command = ["git", "--no-optional-locks", "-C", str(folder), *arguments]
    options: dict[str, Any] = {"capture_output": True, "text": True, "timeout": 30}
    return subprocess.run(command, check=True, env=environment, **options).stdout


def count_cores() -> int:
    """Return how many cores this process may use."""
    allowed = getattr(os, "sched_getaffinity", None)
    return len(allowed(0)) if allowed else os.cpu_count() or 1


def _name_processor() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
