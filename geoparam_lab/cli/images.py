"""geoparam run imagenet32 and imagenet: a sweep over images, by one process or several."""

import contextlib
import os
import shlex
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any

from typer import Context, Option

from geoparam_lab.cli.running import explained, integers, listed, numbers, progress
from geoparam_lab.methods import METHODS
from geoparam_lab.training.images.grids import NUMBERS, WORDS
from geoparam_lab.training.images.settings import OPTIMIZERS
from geoparam_lab.training.tasks import Progress

COMMANDS = {
    "imagenet32": "VGG-6 on images of 32 by 32 pixels: table 2, figure 4. Wants a GPU.",
    "imagenet": "A ResNet on ImageNet: table 3. Wants several GPUs.",
}


def images(
    context: Context,
    data: Annotated[
        Path,
        Option(
            help="Folder with train_data_batch_*.npz and val_data.npz (imagenet32), or with "
            "train/CLASS/*.JPEG and val/CLASS/*.JPEG (imagenet).",
            show_default=False,
        ),
    ],
    out: Annotated[Path | None, Option(help="Folder of the run; by default runs/NAME.")] = None,
    network: Annotated[
        str | None, Option(help="vgg6, resnet18, resnet34 or resnet50; by default the papers'.")
    ] = None,
    widths: Annotated[
        str | None,
        Option(help="Channels of VGG-6's convolutions, or of a ResNet's first stage."),
    ] = None,
    size: Annotated[
        int | None,
        Option(min=8, help="Of the images, 32 or 64; or of the crops, by default 224."),
    ] = None,
    methods: Annotated[
        str | None,
        Option(help=f"Names between commas, of {' '.join(METHODS)}; by default the papers'."),
    ] = None,
    method: Annotated[
        list[str] | None,
        Option(
            help="One method with options of its own, as in bn:decay=5e-4:lr=0.4,0.8; may be "
            f"given again. Words: {' '.join(WORDS)}. Numbers: {' '.join(NUMBERS)}."
        ),
    ] = None,
    batch_sizes: Annotated[
        str | None,
        Option(help="Between commas, each over all GPUs together; by default the papers'."),
    ] = None,
    lrs: Annotated[
        str | None,
        Option(help="Learning rates between commas, for methods without; by default the papers'."),
    ] = None,
    seeds: Annotated[
        int, Option(min=1, help="How many, from 0 on: weights, order and augmentation.")
    ] = 3,
    epochs: Annotated[int, Option(min=1, help="The most there are.")] = 90,
    schedule: Annotated[
        str,
        Option(
            help="steps (v2), plateau-top1 (v1), plateau-top5 (the released code), linear or "
            "cosine (to 0, in every step)."
        ),
    ] = "steps",
    warmup: Annotated[float, Option(min=0, help="Share of all steps in which rates rise.")] = 0.0,
    optimizer: Annotated[str, Option(help=f"{', '.join(OPTIMIZERS)}.")] = "sgd",
    nesterov: Annotated[bool, Option("--nesterov", help="Nesterov momentum for SGD.")] = False,
    weight_decay: Annotated[float, Option(min=0, help="Of plain weights; never of angles.")] = 0.0,
    crop: Annotated[int, Option(min=0, help="Shift small images by up to so many pixels.")] = 0,
    label_smoothing: Annotated[float, Option(min=0, help="Of the training loss.")] = 0.0,
    ema: Annotated[
        float, Option(min=0, help="Evaluate a moving average of the weights with this decay.")
    ] = 0.0,
    select: Annotated[
        float,
        Option(
            min=0,
            help="Share of the training images to keep back: settings are chosen on these, and "
            "the validation images are looked at once.",
        ),
    ] = 0.0,
    recalibrate: Annotated[
        int,
        Option(min=0, help="Batches to recompute running statistics on before the last result."),
    ] = 0,
    time_to: Annotated[
        str, Option(help="Top-1 accuracies between commas: record how long each took.")
    ] = "",
    skip: Annotated[
        str, Option(help="A ResNet's skips: centred, as the authors', or plain, as convert_'s.")
    ] = "centred",
    accumulate: Annotated[int, Option(min=1, help="Parts of a batch, one after the other.")] = 1,
    precision: Annotated[str, Option(help="bf16 (autocast) or fp32.")] = "bf16",
    compile: Annotated[bool, Option("--compile", help="Use torch.compile.")] = False,
    deterministic: Annotated[
        bool, Option("--deterministic", help="The same bits each time on a GPU, too; slower.")
    ] = False,
    init: Annotated[
        str, Option(help="glorot, as the papers' code, or sphere, as their text.")
    ] = "glorot",
    imn: Annotated[
        str, Option(help="Where IMN stands: output, as the code, or input, as the text.")
    ] = "output",
    angle_lr: Annotated[
        str | None,
        Option(help="Of the angles: a number, or fan_in for lr over the fan-in's root."),
    ] = None,
    workers: Annotated[
        int | None, Option(min=0, help="Processes that decode; by default one for each core.")
    ] = None,
    checkpoint_every: Annotated[
        int | None, Option(min=1, help="Steps between checkpoints, besides the one of each epoch.")
    ] = None,
    keep_weights: Annotated[
        bool, Option("--keep-weights", help="Keep every run's weights.")
    ] = False,
    tensorboard: Annotated[
        bool, Option("--tensorboard", help="Write scalars for TensorBoard.")
    ] = False,
    track: Annotated[
        int | None, Option(min=1, help="Follow the units' boundaries, every so many steps.")
    ] = None,
    storage: Annotated[
        str | None,
        Option(
            help="Share the runs: a database URL or an SQLite file. Start the same command on "
            "each GPU, each with an --out of its own."
        ),
    ] = None,
    resume: Annotated[bool, Option("--resume", help="Go on with the run in the folder.")] = False,
) -> None:
    given = dict(locals())
    del given["context"]
    _run(str(context.info_name), given)


def _run(experiment: str, given: Mapping[str, Any]) -> None:
    """Run a sweep under a bar, and print its tables; the leading process alone says anything."""
    import torch.distributed as dist

    from geoparam_lab.experiments import images
    from geoparam_lab.tables import tables

    options = {**given, "experiment": experiment}
    out, method = options.pop("out") or Path("runs", experiment), options.pop("method")
    with explained(out):
        for name, read in _READ.items():
            options[name] = None if options[name] is None else read(options[name])
        if method:
            options["methods"] = [*(options["methods"] or ()), *method]
        with _progress() as bar:
            command = typed(sys.argv, os.environ)
            done = images.run(out, **options, command=command, progress=bar)
        if dist.is_initialized():
            dist.destroy_process_group()  # torch complains of a group that is left open
        if done is not None:
            print(tables.export([done], baseline="bn"))
            print(f"Records, curves and figures are in {out}")


def _rate(text: str) -> float | str:
    if text == "fan_in":
        return text
    rates = numbers(text)
    if len(rates) != 1:
        raise ValueError(f"angle-lr is one number, or fan_in; got {text!r}.")
    return rates[0]


_READ = {
    "methods": listed,
    "batch_sizes": integers,
    "lrs": numbers,
    "widths": lambda text: tuple(integers(text)),
    "time_to": lambda text: tuple(numbers(text)),
    "angle_lr": _rate,
}


@contextlib.contextmanager
def _progress() -> Iterator[Progress | None]:
    """Show a bar in the leading one of several processes."""
    if int(os.environ.get("RANK", "0")) > 0:
        yield None
        return
    with progress() as bar:
        yield bar


def typed(arguments: list[str], environment: Mapping[str, str]) -> str:
    """Return the command of a user who started these processes.

    Example:
        >>> here = {"WORLD_SIZE": "16", "LOCAL_WORLD_SIZE": "8"}
        >>> typed(["geoparam", "run", "imagenet"], here)
        'torchrun --nnodes 2 --nproc-per-node 8 -m geoparam run imagenet'
        >>> typed(["/usr/bin/geoparam", "run", "imagenet"], {})
        'geoparam run imagenet'
    """
    command = shlex.join([Path(arguments[0]).name, *arguments[1:]])
    world, local = (int(environment.get(n, "1")) for n in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"))
    if world == 1:
        return command
    nodes = f"--nnodes {world // local} " if world > local else ""
    return f"torchrun {nodes}--nproc-per-node {local} -m {command}"
