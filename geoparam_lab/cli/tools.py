"""geoparam fold and geoparam bench: fold a checkpoint, run a benchmark of a checkout."""

import subprocess
import sys
from pathlib import Path
from typing import Annotated

import typer
from typer import Argument, Option


def fold(
    checkpoint: Annotated[Path, Argument(help="Safetensors file of a converted model, to read.")],
    out: Annotated[Path, Argument(help="Safetensors file of the plain model, to write.")],
    like: Annotated[
        Path | None,
        Option(
            help="Safetensors file of the plain model, from which convolutions get their shapes; "
            "by default all weights are matrices."
        ),
    ] = None,
    force: Annotated[bool, Option("--force", help="Overwrite the output.")] = False,
) -> None:
    """Turn the checkpoint of a converted model into one of the plain model."""
    from geoparam.checkpoints import fold_file
    from geoparam.storage import printable

    try:
        fold_file(checkpoint, out, like=like, force=force)
    except (ValueError, OSError):
        print("Nothing written. ", end="", file=sys.stderr)
        raise
    if like is None:
        print("Weights are matrices (out, in). If a layer is a convolution, give --like.")
    print(printable(f"The plain checkpoint is {out}, {out.stat().st_size / 1e6:,.1f} MB."))


def bench(
    context: typer.Context,
    name: Annotated[
        str | None, Argument(help="Benchmark to run; without a name they are listed.")
    ] = None,
) -> None:
    """Run a benchmark of a checkout; words after its name are its options.

    geoparam bench NAME -- --help lists these.
    """
    folders = (Path(__file__).parents[2], Path.cwd())  # the package's, or the current one
    root = next(
        (folder for folder in folders if (folder / "benchmarks/__init__.py").exists()), None
    )
    if root is None:
        raise FileNotFoundError(
            "The benchmarks are in geoparam's repository, not in the installed package. They need "
            "a checkout of it: in its folder, pip install -e '.[dev]', then python -m "
            "benchmarks.NAME"
        )
    benchmarks = _read_first_lines(root / "benchmarks")
    if name is None:
        print("\n".join(f"{benchmark:12} {line}" for benchmark, line in benchmarks.items()))
        return
    if name not in benchmarks:
        raise ValueError(f"a benchmark is one of {', '.join(benchmarks)}; got {name!r}.")
    command = [sys.executable, "-m", f"benchmarks.{name}", *context.args]
    raise SystemExit(subprocess.run(command, cwd=root).returncode)


def _read_first_lines(folder: Path) -> dict[str, str]:
    """Return the modules that can be run, each with the first line of its docstring."""
    texts = {path.stem: path.read_text(encoding="utf-8") for path in sorted(folder.glob("*.py"))}
    return {
        name: text.removeprefix('"""').partition("\n")[0]
        for name, text in texts.items()
        if 'if __name__ == "__main__"' in text
    }
