"""The command line: it parses, calls and prints. Needs the extra: pip install 'geoparam[cli]'."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

if TYPE_CHECKING:
    from rich.console import Console
    from typer import Typer

    from geoparam.experiments.levy import Outcome

WHAT_THE_DEMO_SHOWS = """
[bold]What it shows.[/] A unit switches on at one point of the line. Under SP that point is -b/w: \
where w is near 0, one update throws it far from the data. Under GmP the point is itself a \
parameter and moves in small steps, so that the units gather where the function bends.

[bold]What it does not show.[/] One seed is an anecdote. Over seeds 0-19 SP ended at 1.03-1.22 \
every time; GmP ended at 0.39-0.57 eleven times and at 1.02-1.25 nine times, when the papers' \
schedule cut its rate too early (results/LOG.md). Try another with --seed.
"""  # torch 2.15 on a CPU

INSTALL = {
    "typer": "'geoparam[cli]'",
    "rich": "'geoparam[cli]'",
    "safetensors": "'geoparam[cli]'",
    "matplotlib": "'geoparam[plots]'",
    "torchvision": "'geoparam[vision]'",
    "transformers": "'geoparam[hf]'",
    "timm": "timm",
}


def main() -> None:
    """Run the command line; where an extra is missing, name it instead of a traceback."""
    try:
        app()()
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package not in INSTALL:
            raise
        sys.exit(f"This command needs {package}. Install it with: pip install {INSTALL[package]}")


def app() -> "Typer":
    """The typer application. typer is imported here, so that main can say when it is missing."""
    import typer

    app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)

    @app.callback()
    def geoparam() -> None:
        """Geometric Parameterization for PyTorch."""

    @app.command("demo")
    def _(
        out: Annotated[Path, typer.Option(help="Folder for the figure.")] = Path("demo"),
        seed: Annotated[int, typer.Option(help="Seed of the initial weights.")] = 0,
        epochs: Annotated[int, typer.Option(min=2, help="Most epochs to train.")] = 10_000,
    ) -> None:
        """Train a small network with and without GmP, compare the two and draw them."""
        demo(out, seed, epochs)

    @app.command("fold")
    def _(
        checkpoint: Annotated[
            Path,
            typer.Argument(help="safetensors file, sharded folder or index, or torch state_dict."),
        ],
        out: Annotated[Path, typer.Option(help="The safetensors file to write.")],
        arch: Annotated[
            str | None,
            typer.Option(
                help="The plain model: torchvision:NAME, timm:NAME, transformers:FOLDER with a "
                "config.json, or package.module:function. Only its shapes are used."
            ),
        ] = None,
        like: Annotated[
            Path | None,
            typer.Option(help="A plain checkpoint, file or folder, of the same architecture."),
        ] = None,
        prefix: Annotated[
            str, typer.Option(help="Take only entries that begin with this, and remove it.")
        ] = "",
        force: Annotated[bool, typer.Option("--force", help="Overwrite the output.")] = False,
    ) -> None:
        """Turn the checkpoint of a converted model into one of the plain model."""
        fold(checkpoint, out, arch, like, prefix, force)

    return app


def fold(
    checkpoint: Path, out: Path, arch: str | None, like: Path | None, prefix: str, force: bool
) -> None:
    """Fold a checkpoint file; print what was done, or why it cannot be."""
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    from geoparam.checkpoint import fold_checkpoint

    try:
        report = fold_checkpoint(checkpoint, out, arch=arch, like=like, prefix=prefix, force=force)
    except (ValueError, OSError) as error:
        sys.exit(f"Nothing written. {error}")
    table = Table("layers folded", "entries kept as they are", "size")
    table.add_row(f"{report.layers}", f"{report.kept}", f"{report.size / 1e6:,.1f} MB")
    console = Console()
    console.print(table)
    for note in report.notes:
        console.print(f"[bold]Note:[/] {escape(note)}", soft_wrap=True)
    console.print(f"The plain checkpoint is [bold]{escape(str(out))}[/]", soft_wrap=True)


def demo(out: Path, seed: int, epochs: int) -> None:
    """Levy regression under SP and GmP: two test errors beside the papers', and one figure."""
    from rich.console import Console

    import geoparam.plots  # noqa: F401  says now, not after training, that matplotlib is missing
    from geoparam.data.synthetic import levy_regression
    from geoparam.experiments import levy

    out.mkdir(parents=True, exist_ok=True)
    console = Console()
    console.print(
        "Fitting 50 noisy points of the Levy function with 100 ReLU units, twice: "
        "with standard parameters (SP) and with geometric ones (GmP).\n"
    )
    outcomes = _train_with_progress(console, seed, epochs)
    path = out / "levy.png"
    levy.draw(levy_regression(), outcomes).savefig(path, dpi=150)
    _print_outcomes(console, outcomes)
    console.print(WHAT_THE_DEMO_SHOWS)
    console.print(f"The figure is [bold]{path}[/]", soft_wrap=True)


def _train_with_progress(console: "Console", seed: int, epochs: int) -> "dict[str, Outcome]":
    from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

    from geoparam.experiments import levy

    columns = (
        TextColumn("{task.description:>4}"),
        BarColumn(),
        TextColumn("{task.completed:>6.0f} epochs"),
        TextColumn("loss {task.fields[loss]:.3f}"),
        TimeRemainingColumn(),
    )
    outcomes = {}
    with Progress(*columns, console=console) as progress:
        for method, title in levy.TITLES.items():
            task = progress.add_task(title, total=epochs, loss=float("nan"))

            def report(epoch: int, loss: float, task: TaskID = task) -> None:
                progress.update(task, completed=epoch, loss=loss)

            outcomes[method] = levy.run(method, seed, epochs, progress=report)
            progress.update(task, total=len(outcomes[method].losses))
    return outcomes


def _print_outcomes(console: "Console", outcomes: "dict[str, Outcome]") -> None:
    from rich.table import Table

    from geoparam.experiments import levy

    table = Table("", "test RMSE", "papers (one seed)", "largest move of a unit in one update")
    for method, outcome in outcomes.items():
        table.add_row(
            levy.TITLES[method],
            f"{outcome.test_rmse:.3f}",
            f"{levy.REFERENCE_RMSE[method]:.3f}",
            f"{outcome.largest_moves.max():,.2f}",
        )
    console.print(table)
