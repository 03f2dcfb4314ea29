"""The command line: it parses, calls and prints. Needs the extra: pip install 'geoparam[cli]'.

Commands import torch, and what needs it, when they are called: help and version are quick. typer
is imported when the application is made, so that a missing extra is named, not a traceback.
"""

import io
import sys
from importlib.metadata import version
from typing import TYPE_CHECKING, Annotated

if TYPE_CHECKING:
    from typer import Typer

EXTRAS = {
    "cli": ("typer", "rich", "safetensors", "jinja2", "filelock"),
    "plots": ("matplotlib",),
    "experiments": ("accelerate", "optuna", "sklearn", "tensorboard", "xlrd"),
    "vision": ("torchvision",),
    "hf": ("transformers",),
}
WRONG_PATH = (FileNotFoundError, FileExistsError, NotADirectoryError, IsADirectoryError)
INSTALL = {name: f"'geoparam[{extra}]'" for extra, names in EXTRAS.items() for name in names}


def main() -> None:
    """Run the command line. Errors are a sentence on standard error and an exit status.

    2: what was asked for cannot be done as it was asked, as for options that do not exist. 1: it
    failed on the way. 130: Ctrl-C.
    """
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # where a terminal lacks ±
    try:
        app()(prog_name="geoparam")
    except KeyboardInterrupt:
        print("\nInterrupted.", file=sys.stderr)
        sys.exit(130)
    except (ValueError, *WRONG_PATH) as error:
        _say(error)
        sys.exit(2)
    except OSError as error:
        _say(error)
        sys.exit(1)
    except ImportError as error:
        package = (error.name or "").partition(".")[0]
        if "pip install" in str(error):  # the message is more exact than ours
            sys.exit(str(error))
        if package not in INSTALL:
            raise
        sys.exit(f"This command needs {package}. Install it with: pip install {INSTALL[package]}")


def _say(error: Exception) -> None:
    from geoparam.storage import printable  # imports torch

    print(printable(str(error)), file=sys.stderr)


def app() -> "Typer":
    """Return the application, with all commands."""
    import typer

    from geoparam_lab.cli import demo, pages, runs, tools

    application = typer.Typer(
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )

    shown = typer.Option(
        "--version", callback=_show_version, is_eager=True, help="Show the version and exit."
    )

    @application.callback()
    def geoparam(version: Annotated[bool, shown] = False) -> None:
        """Geometric Parameterization (GmP) for PyTorch."""

    application.command("demo")(demo.command)
    application.add_typer(runs.make_application(), name="run")
    application.command()(pages.table)
    application.command()(pages.report)
    application.command()(tools.fold)
    passing = {"allow_extra_args": True, "ignore_unknown_options": True}
    application.command(context_settings=passing)(tools.bench)
    return application


def _show_version(is_asked: bool) -> None:
    if is_asked:
        print(f"geoparam {version('geoparam')}, torch {version('torch')}")
        sys.exit(0)
