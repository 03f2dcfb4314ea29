"""Build wheel and sdist, and try the wheel beside torch and numpy alone: `make dist`.

Both are built twice, and must have the same bytes. The wheel is then installed into an empty
environment that sees torch, numpy, what they need, and pytest, and runs its doctests there.
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


def build(out: Path) -> dict[str, bytes]:
    """Build both into a folder, and return their bytes by name."""
    moment = subprocess.check_output(["git", "log", "-1", "--format=%ct"], cwd=ROOT, text=True)
    fixed = os.environ | {"SOURCE_DATE_EPOCH": moment.strip()}
    command = [sys.executable, "-m", "build", "--outdir", str(out), str(ROOT)]
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


def try_wheel(wheel: Path, folder: Path) -> None:
    """Install a wheel into an empty environment and run its doctests there."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    (site,) = folder.glob("lib/python*/site-packages")
    link_distributions(site)
    shutil.unpack_archive(wheel, site, "zip")
    python = str(folder / "bin" / "python")
    listing = "import importlib.metadata as m; print(m.version('geoparam'))"
    subprocess.run([python, "-c", listing], cwd=folder, check=True)
    options = [
        "--doctest-modules",
        "--doctest-ignore-import-errors",
        "--pyargs",
        "-p",
        "no:cacheprovider",
    ]
    subprocess.run([python, "-m", "pytest", "-q", *options, "geoparam"], cwd=folder, check=True)


def main() -> None:
    with tempfile.TemporaryDirectory() as first, tempfile.TemporaryDirectory() as second:
        once, again = build(Path(first)), build(Path(second))
        if once != again:
            sys.exit(f"built twice, these differ: {[n for n in once if once[n] != again.get(n)]}")
        OUT.mkdir(exist_ok=True)
        for name, content in once.items():
            (OUT / name).write_bytes(content)
    (wheel,) = OUT.glob(f"{next(name for name in once if name.endswith('.whl'))}")
    with tempfile.TemporaryDirectory(prefix="geoparam-wheel-") as folder:
        try_wheel(wheel, Path(folder))
    print(f"dist/: {', '.join(once)}, the same bytes twice")


if __name__ == "__main__":
    main()
