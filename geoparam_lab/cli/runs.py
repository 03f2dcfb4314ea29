"""geoparam run: one command for each experiment; it ends with the table of what came out."""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer import Option

from geoparam.storage import printable
from geoparam_lab.cli.images import COMMANDS, images
from geoparam_lab.cli.running import (
    Jobs,
    explained,
    integers,
    listed,
    numbers,
    progress,
)
from geoparam_lab.data.uci_data import NAMES
from geoparam_lab.methods import METHODS

if TYPE_CHECKING:
    from geoparam_lab.run_folder import Run

Out = Annotated[Path, Option(help="Folder of the run.")]
Methods = Annotated[str, Option(help=f"Names between commas, of {' '.join(METHODS)}.")]
Seeds = Annotated[int, Option(min=1, help="How many initial weights, drawn from 0, 1, ...")]
Lrs = Annotated[str, Option(help="Learning rates between commas, each for every method.")]
Init = Annotated[str, Option(help="glorot, as the papers' code, or sphere, as their text.")]
Resume = Annotated[bool, Option("--resume", help="Go on with the run in the folder.")]
Data = Annotated[
    Path | None, Option(help="Folder with the data, before $GEOPARAM_DATA and the cache.")
]

PAPERS = "sp,wn,bn,gmp"


def application() -> typer.Typer:
    """Return the commands."""
    found = typer.Typer(no_args_is_help=True, help="Run an experiment of the papers.")
    for command in (levy, banana, perturbation, uci, width):
        found.command()(command)
    for name, about in COMMANDS.items():
        found.command(name, help=about)(images)
    return found


def levy(
    out: Out = Path("runs/levy"),
    methods: Methods = PAPERS,
    seeds: Seeds = 20,
    lrs: Lrs = "0.01,0.1",
    epochs: Annotated[int, Option(min=1, help="The most there are.")] = 10_000,
    patience: Annotated[int, Option(min=1, help="Epochs before the rate falls.")] = 500,
    init: Init = "glorot",
    data_seed: Annotated[
        int, Option(min=0, max=2**32 - 1, help="Of the 50 points; 0 gives the papers'.")
    ] = 0,
    jobs: Jobs = None,
    resume: Resume = False,
) -> None:
    """Levy regression in one dimension: figure 2. About two minutes on one core."""
    from geoparam_lab.experiments import levy as experiment

    options = {"seeds": seeds, "epochs": epochs, "patience": patience, "init": init}
    options |= {"data_seed": data_seed, "jobs": jobs, "resume": resume}
    with explained(out):
        options |= {"methods": listed(methods), "lrs": numbers(lrs)}
        _run(experiment.run, out, options)


def banana(
    out: Out = Path("runs/banana"),
    methods: Methods = PAPERS,
    seeds: Seeds = 20,
    lrs: Lrs = "0.01,0.1",
    epochs: Annotated[int, Option(min=1, help="The most there are.")] = 5_000,
    patience: Annotated[int, Option(min=1, help="Epochs before the rate falls.")] = 50,
    init: Init = "glorot",
    data: Data = None,
    source: Annotated[
        str, Option(help="KEEL, generated, or auto: KEEL's points if they can be had, else ours.")
    ] = "auto",
    jobs: Jobs = None,
    resume: Resume = False,
) -> None:
    """Banana classification in the plane: figure 3. About a minute on one core."""
    from geoparam_lab.experiments import banana as experiment

    options = {"seeds": seeds, "epochs": epochs, "patience": patience, "init": init}
    options |= {"data": data, "source": source, "jobs": jobs, "resume": resume}
    with explained(out):
        options |= {"methods": listed(methods), "lrs": numbers(lrs)}
        done = _run(experiment.run, out, options)
        if done.config["source"] == "generated":
            print("The points are generated, not KEEL's: name a folder with banana.dat by --data.")


def perturbation(
    out: Out = Path("runs/perturbation"),
    methods: Annotated[str, Option(help="Some of sp wn bn gmp intrinsic, between commas.")] = (
        "sp,wn,bn,gmp,intrinsic"
    ),
    seeds: Annotated[int, Option(min=1, help="How many units besides the papers' one.")] = 1000,
    resume: Resume = False,
) -> None:
    """Single units under perturbation: figures 1, 2a-b, 5 and 6. Seconds."""
    from geoparam_lab.experiments import perturbation as experiment

    with explained(out):
        options = {"methods": listed(methods), "seeds": seeds, "resume": resume}
        _run(experiment.run, out, options)


def uci(
    out: Out = Path("runs/uci"),
    datasets: Annotated[
        str, Option(help=f"Names between commas, of {' '.join(NAMES)}.")
    ] = ",".join(NAMES),
    methods: Methods = PAPERS,
    protocol: Annotated[
        str, Option(help="paper (the test split decides when to stop) or heldout.")
    ] = "paper",
    seeds: Annotated[int, Option(min=1, help="How many random splits.")] = 10,
    lrs: Annotated[
        str | None, Option(help="Learning rates between commas; by default the protocol's.")
    ] = None,
    epochs: Annotated[int, Option(min=1, help="The most there are.")] = 5_000,
    init: Init = "glorot",
    data: Data = None,
    storage: Annotated[
        str | None,
        Option(
            help="Share the work: a database URL or an SQLite file. Start the same command as "
            "often as there are cores, each with an --out of its own."
        ),
    ] = None,
    device: Annotated[str, Option(help="Where to train, such as cuda.")] = "cpu",
    jobs: Jobs = None,
    resume: Resume = False,
) -> None:
    """Seven regression sets of the UCI archive: table 1. Minutes; heldout about an hour."""
    from geoparam_lab.experiments import uci as experiment

    options = {"protocol": protocol, "seeds": seeds, "epochs": epochs, "init": init, "data": data}
    options |= {"storage": storage, "device": device, "jobs": jobs, "resume": resume}
    with explained(out):
        options |= {"datasets": listed(datasets), "methods": listed(methods)}
        _run(experiment.run, out, options | {"lrs": None if lrs is None else numbers(lrs)})


def width(
    out: Out = Path("runs/width"),
    widths: Annotated[
        str | None, Option(help="Numbers of hidden units between commas; by default 16 to 16384.")
    ] = None,
    datasets: Annotated[str | None, Option(help="levy, energy or both, between commas.")] = None,
    rates: Annotated[str | None, Option(help="Learning rates between commas.")] = None,
    seeds: Annotated[int | None, Option(min=1, help="How many initial weights.")] = None,
    steps: Annotated[int | None, Option(min=1, help="Steps of training.")] = None,
    data: Data = None,
    jobs: Jobs = None,
    resume: Resume = False,
) -> None:
    """What depends on the width: scales at the start, the best learning rate. Half an hour."""
    from geoparam_lab.experiments import width as experiment

    with explained(out):
        given = {
            "widths": widths and integers(widths),
            "datasets": datasets and listed(datasets),
            "rates": rates and numbers(rates),
            "seeds": seeds,
            "steps": steps,
        }
        own = {name: value for name, value in given.items() if value is not None}
        _run(experiment.run, out, {"data": data, "jobs": jobs, "resume": resume} | own)


def _run(experiment: Callable[..., "Run"], out: Path, options: dict[str, Any]) -> "Run":
    """Run an experiment under a bar, and print its tables."""
    from geoparam_lab.tables import tables

    with progress() as bar:
        done = experiment(out, **options, progress=bar)
    print(printable(tables.export([done])))
    print(f"{_left(out)} in {out}")
    return done


def _left(out: Path) -> str:
    """Say what a run left behind besides its records."""
    kinds = [name for name in ("curves", "figures") if (out / name).is_dir()]
    *first, last = ["Records", *kinds]
    return f"{', '.join(first)} and {last} are" if first else f"{last} are"
