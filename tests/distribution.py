"""Build wheel and sdist, and try both beside torch and numpy alone: `make dist`.

Both are built twice, the wheel once from the checkout and once from the sdist, and must have the
same bytes. pip then installs the wheel into an empty environment that sees torch, numpy, what they
need, and pytest. There the doctests run, and from the unpacked sdist some of its tests.
"""

import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
OUT = ROOT / "dist"
VISIBLE = ("torch", "numpy", "pytest")
SDIST_TESTS = (
    "tests/conversion/test_fold.py",
    "tests/test_docs.py",
    "tests/test_layers.py",
    "tests/test_package.py",
)


def build(out: Path, *options: str) -> dict[str, bytes]:
    """Build both into a folder, and return their bytes by name."""
    moment = subprocess.check_output(["git", "log", "-1", "--format=%ct"], cwd=ROOT, text=True)
    fixed = os.environ | {"SOURCE_DATE_EPOCH": moment.strip()}
    command = [sys.executable, "-m", "build", *options, "--outdir", str(out), str(ROOT)]
    subprocess.run(command, env=fixed, check=True, stdout=subprocess.DEVNULL)
    return {file.name: file.read_bytes() for file in sorted(out.iterdir())}


def find_distributions(names: tuple[str, ...]) -> dict[str, importlib.metadata.Distribution]:
    """Return these distributions and all that they require, as installed here."""
    found: dict[str, importlib.metadata.Distribution] = {}
    waiting = list(names)
    while waiting:
        name = re.split(r"[ ;<>=!~\[(]", waiting.pop())[0].lower().replace("_", "-")
        if name in found:
            continue
        try:
            found[name] = importlib.metadata.distribution(name)
        except importlib.metadata.PackageNotFoundError:
            continue  # for another system or Python
        requires = found[name].requires or []
        waiting += [r for r in requires if "extra ==" not in r]
    return found


def link_distributions(site: Path) -> None:
    """Let an environment see the distributions, and nothing else of ours."""
    for distribution in find_distributions(VISIBLE).values():
        for file in distribution.files or []:
            top = file.parts[0]
            source = Path(str(distribution.locate_file(top)))
            if top not in ("..", "__pycache__") and not (site / top).exists():
                (site / top).symlink_to(source)


def make_environment(folder: Path) -> str:
    """Make an empty environment that sees torch, numpy and pytest; return its Python."""
    subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    (site,) = folder.glob("lib/python*/site-packages")
    link_distributions(site)
    return str(folder / "bin" / "python")


def try_wheel(python: str, wheel: Path, folder: Path) -> None:
    """Install a wheel with pip and run its doctests; the command must name its extra."""
    pip = [python, "-m", "pip", "install", "-q", "--no-deps", "--no-index"]
    subprocess.run([*pip, "--disable-pip-version-check", str(wheel)], cwd=folder, check=True)
    listing = "import importlib.metadata as m; print(m.version('geoparam'))"
    subprocess.run([python, "-c", listing], cwd=folder, check=True)
    command = [str(Path(python).with_name("geoparam")), "--version"]
    said = subprocess.run(command, cwd=folder, capture_output=True, text=True).stderr
    if "geoparam[cli]" not in said:
        sys.exit(f"without the cli extra the command said: {said}")
    doctests = ["--doctest-modules", "--doctest-ignore-import-errors", "--pyargs"]
    run_tests(python, folder, *doctests, "geoparam", "geoparam_lab")


def try_sdist(python: str, sdist: Path, folder: Path) -> None:
    """Collect all tests of the unpacked sdist, and run those that need no more than the core."""
    shutil.unpack_archive(sdist, folder, filter="data")
    (source,) = (path for path in folder.iterdir() if path.name.startswith("geoparam-"))
    run_tests(sys.executable, source, "--collect-only", "-qq", "-m", "not gpu", "tests")
    run_tests(python, source, *SDIST_TESTS)


def run_tests(python: str, folder: Path, *options: str) -> None:
    command = [python, "-m", "pytest", "-q", "-p", "no:cacheprovider", *options]
    subprocess.run(command, cwd=folder, check=True)


def main() -> None:
    with tempfile.TemporaryDirectory() as first, tempfile.TemporaryDirectory() as second:
        once = build(Path(first))  # the wheel from the sdist
        again = build(Path(second), "--sdist", "--wheel")  # both from the checkout
        if once != again:
            sys.exit(f"built twice, these differ: {[n for n in once if once[n] != again.get(n)]}")
        OUT.mkdir(exist_ok=True)
        for name, content in once.items():
            (OUT / name).write_bytes(content)

    sdist, wheel = (next(OUT / n for n in once if n.endswith(end)) for end in (".gz", ".whl"))
    with tempfile.TemporaryDirectory(prefix="geoparam-dist-") as name:
        folder = Path(name)
        python = make_environment(folder / "environment")
        try_wheel(python, wheel, folder)
        try_sdist(python, sdist, folder)
    print(f"dist/: {', '.join(once)}, the same bytes twice")


if __name__ == "__main__":
    main()
