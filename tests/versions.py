"""Run the core's tests on the Pythons and torches that are supported: `make test-versions`.

    python tests/versions.py [3.10/2.9.0 ...]

Each pair gets a throw-away environment with torch, numpy, pytest and this package alone. A pair
whose Python is not installed here is named and left out. .github/workflows/tests.yml has the same
pairs; a test compares the two lists.
"""

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAIRS = ("3.10/2.9.0", "3.12/2.11.0", "3.13/2.15.0")  # the oldest, one between, the newest
TESTS = (
    "tests/optim",
    "tests/test_coordinates.py",
    "tests/test_functional.py",
    "tests/test_intrinsic.py",
    "tests/test_layers.py",
    "tests/test_norm.py",
    "tests/test_sphere.py",
    "tests/conversion/test_fold.py",
    "tests/analysis/test_tracker.py",
    "geoparam/layers.py",
    "geoparam/optim/geometric.py",
    "geoparam/conversion",
    "geoparam/analysis",
)
MARKS = "not compile and not interpreter and not slow"


def find_python(version: str) -> str | None:
    """Return the path of python3.x: on PATH, or one of pyenv's."""
    on_path = shutil.which(f"python{version}")
    if on_path and subprocess.run([on_path, "-V"], capture_output=True).returncode == 0:
        return on_path
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"))
    installed = sorted((pyenv / "versions").glob(f"{version}.*/bin/python"))
    return str(installed[-1]) if installed else None


def run_pair(pair: str) -> str:
    """Return what came of one pair: "passed", "failed" or "no such Python here"."""
    python_version, torch_version = pair.split("/")
    python = find_python(python_version)
    if python is None:
        return "no such Python here"
    with tempfile.TemporaryDirectory(prefix="geoparam-versions-") as folder:
        subprocess.run([python, "-m", "venv", folder], check=True)
        inside = f"{folder}/bin/python"
        install = [inside, "-m", "pip", "install", "-q", "--no-cache-dir"]
        subprocess.run([*install, f"torch=={torch_version}", "numpy", "pytest"], check=True)
        subprocess.run([*install, "--no-deps", str(ROOT)], check=True)
        command = [inside, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", MARKS, *TESTS]
        one_thread = os.environ | {"OMP_NUM_THREADS": "1"}
        tests = subprocess.run(command, cwd=ROOT, env=one_thread, check=False)
    return "passed" if tests.returncode == 0 else "failed"


def main() -> None:
    outcomes = {}
    for pair in sys.argv[1:] or PAIRS:
        print(f"Python and torch {pair}", flush=True)
        outcomes[pair] = run_pair(pair)
    for pair, outcome in outcomes.items():
        print(f"{pair:12} {outcome}")
    sys.exit("failed" in outcomes.values())


if __name__ == "__main__":
    main()
