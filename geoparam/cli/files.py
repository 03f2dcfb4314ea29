"""Commands on files: table and report of runs, fold of a checkpoint, bench of a checkout."""

import ast
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.filesize import decimal
from rich.markup import escape
from rich.table import Table
from typer import Argument, Option

import geoparam as gp
from geoparam.cli.running import explained
from geoparam.experiments.methods import METHODS, without_options
from geoparam.experiments.tasks import check_names

if TYPE_CHECKING:
    from geoparam.experiments.results import Run

Runs = Annotated[
    list[Path], Argument(help="Folders of runs, or folders of such folders, as demo makes.")
]
Baseline = Annotated[
    str, Option(help="The method that others are compared with; bn in runs without it.")
]


def table(
    runs: Runs,
    form: Annotated[str, Option("--format", help="markdown, latex or csv.")] = "markdown",
    out: Annotated[Path | None, Option(help="File to write; else it is printed.")] = None,
    baseline: Baseline = "sp",
) -> None:
    """Print the tables of some runs, beside the papers' numbers."""
    from geoparam.experiments import tables

    with explained():
        check_names("baseline", [without_options(baseline)], tuple(METHODS))
        text = tables.export(opened(runs), form, baseline)
        if out is None:
            print(text)
        else:
            out.parent.mkdir(parents=True, exist_ok=True)
            out.write_text(text, encoding="utf-8")


def report(
    runs: Runs,
    out: Annotated[Path, Option(help="The HTML file to write.")] = Path("report.html"),
    baseline: Baseline = "sp",
) -> None:
    """Put some runs on one page: tables, figures and sliders, in one file."""
    from geoparam import report as pages

    with explained():
        check_names("baseline", [without_options(baseline)], tuple(METHODS))
        command = " ".join([Path(sys.argv[0]).name, *sys.argv[1:]])
        path = pages.write(opened(runs), out, baseline, command)
        print(f"The page is {path}")


def opened(folders: Iterable[Path]) -> "list[Run]":
    """Return the runs in these folders; one that holds none stands for the folders in it."""
    from geoparam.experiments.results import Run

    found = []
    for folder in folders:
        inside = sorted(path.parent for path in folder.glob("*/config.json"))
        alone = (folder / "config.json").exists() or not inside
        found += [Run.open(each) for each in ([folder] if alone else inside)]
    return found


def fold(
    checkpoint: Annotated[
        Path, Argument(help="safetensors file, sharded folder or index, or torch state_dict.")
    ],
    out: Annotated[Path, Option(help="The safetensors file to write.")],
    arch: Annotated[
        str | None,
        Option(
            help="The plain model: torchvision:NAME, timm:NAME, transformers:FOLDER with a "
            "config.json, or package.module:function. Only its shapes are used."
        ),
    ] = None,
    like: Annotated[
        Path | None, Option(help="A plain checkpoint, file or folder, of the same architecture.")
    ] = None,
    prefix: Annotated[
        str, Option(help="Take only entries that begin with this, and remove it.")
    ] = "",
    force: Annotated[bool, Option("--force", help="Overwrite the output.")] = False,
) -> None:
    """Turn the checkpoint of a converted model into one of the plain model."""
    from geoparam.checkpoint import fold_checkpoint

    try:
        report = fold_checkpoint(checkpoint, out, arch=arch, like=like, prefix=prefix, force=force)
    except (ValueError, OSError) as error:
        sys.exit(f"Nothing written. {error}")
    shown = Table("layers folded", "entries kept as they are", "size")
    shown.add_row(f"{report.layers}", f"{report.kept}", decimal(report.size))
    console = Console()
    console.print(shown)
    for note in report.notes:
        console.print(f"[bold]Note:[/] {escape(note)}", soft_wrap=True)
    console.print(f"The plain checkpoint is [bold]{escape(str(out))}[/]", soft_wrap=True)


def bench(
    context: typer.Context,
    name: Annotated[
        str | None, Argument(help="Which one; without a name they are listed.")
    ] = None,
) -> None:
    """Run a performance comparison; what follows its name is given to it, also -- --help."""
    root = checkout()
    if root is None:
        sys.exit(
            "The benchmarks are in geoparam's repository, not in the installed package. In a "
            "checkout of it: python -m benchmarks.NAME"
        )
    known = benchmarks(root)
    if name is None:
        for each, line in known.items():
            print(f"{each:12} {line}")
        return
    if name not in known:
        sys.exit(f"a benchmark is one of {', '.join(known)}; got {name!r}.")
    command = [sys.executable, "-m", f"benchmarks.{name}", *context.args]
    raise SystemExit(subprocess.run(command, cwd=root).returncode)


def checkout() -> Path | None:
    """Return the folder with the benchmarks: that of the package, or the one we are in."""
    for root in (Path(gp.__file__).parents[1], Path.cwd()):
        if (root / "benchmarks" / "__init__.py").exists():
            return root
    return None


def benchmarks(root: Path) -> dict[str, str]:
    """Return the benchmarks that can be run, each with the first line of its docstring."""
    found = {}
    for path in sorted((root / "benchmarks").glob("*.py")):
        text = path.read_text(encoding="utf-8")
        if 'if __name__ == "__main__"' in text:
            found[path.stem] = (ast.get_docstring(ast.parse(text)) or "").partition("\n")[0]
    return found


def add(application: typer.Typer) -> None:
    """Add these commands to the application."""
    for command in (table, report, fold):
        application.command()(command)
    passing = {"allow_extra_args": True, "ignore_unknown_options": True}
    application.command(context_settings=passing)(bench)
