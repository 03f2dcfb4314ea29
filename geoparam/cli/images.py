"""geoparam run imagenet32 and imagenet: a sweep over images, by one process or several."""

import contextlib
import os
import shlex
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any

from typer import Option

from geoparam.cli.running import explained, integers, listed, numbers, progress
from geoparam.experiments.methods import METHODS
from geoparam.experiments.tasks import Progress

Out = Annotated[Path, Option(help="Folder of the run.")]
Network = Annotated[
    str | None, Option(help="vgg6, resnet18, resnet34 or resnet50; by default the papers'.")
]
Widths = Annotated[
    str | None,
    Option(help="Channels of VGG-6's convolutions between commas, or of a ResNet's first stage."),
]
Methods = Annotated[
    str | None,
    Option(help=f"Names between commas, of {' '.join(METHODS)}; by default the papers'."),
]
BatchSizes = Annotated[
    str | None, Option(help="Between commas, each over all GPUs together; by default the papers'.")
]
Lrs = Annotated[
    str | None,
    Option(help="Learning rates between commas, each for every method; by default the papers'."),
]
Seeds = Annotated[int, Option(min=1, help="How many, from 0 on: weights, order and augmentation.")]
Epochs = Annotated[int, Option(min=1, help="The most there are.")]
Schedule = Annotated[
    str, Option(help="steps (v2), plateau-top1 (v1) or plateau-top5 (the released code).")
]
Skip = Annotated[
    str, Option(help="A ResNet's skips: centred, as the authors', or plain, as convert_'s.")
]
WeightDecay = Annotated[float, Option(min=0, help="Of plain weights; never of angles.")]
LabelSmoothing = Annotated[float, Option(min=0, help="Of the training loss.")]
Ema = Annotated[
    float, Option(min=0, help="Evaluate a moving average of the weights with this decay.")
]
Accumulate = Annotated[int, Option(min=1, help="Parts of a batch, one after the other.")]
Precision = Annotated[str, Option(help="bf16 (autocast) or fp32.")]
Compile = Annotated[bool, Option("--compile", help="Use torch.compile.")]
Deterministic = Annotated[
    bool, Option("--deterministic", help="The same bits each time on a GPU, too; slower.")
]
Init = Annotated[str, Option(help="glorot, as the papers' code, or sphere, as their text.")]
Imn = Annotated[str, Option(help="Where IMN stands: output, as the code, or input, as the text.")]
AngleLr = Annotated[
    str | None, Option(help="Of the angles: a number, or fan_in for lr over the fan-in's root.")
]
CheckpointEvery = Annotated[
    int | None, Option(min=1, help="Steps between checkpoints, besides the one of each epoch.")
]
KeepWeights = Annotated[bool, Option("--keep-weights", help="Keep every run's weights.")]
TensorBoard = Annotated[bool, Option("--tensorboard", help="Write scalars for TensorBoard.")]
Track = Annotated[
    int | None, Option(min=1, help="Follow the units' boundaries, every so many steps.")
]
Storage = Annotated[
    str | None,
    Option(
        help="Share the runs: a database URL or a journal file. Start the same command on each "
        "GPU, each with an --out of its own."
    ),
]
Resume = Annotated[bool, Option("--resume", help="Go on with the run in the folder.")]


def imagenet32(
    data: Annotated[
        Path,
        Option(help="Folder with train_data_batch_*.npz and val_data.npz.", show_default=False),
    ],
    out: Out = Path("runs/imagenet32"),
    network: Network = None,
    widths: Widths = None,
    size: Annotated[int, Option(help="Of the images, 32 or 64.")] = 32,
    methods: Methods = None,
    batch_sizes: BatchSizes = None,
    lrs: Lrs = None,
    seeds: Seeds = 3,
    epochs: Epochs = 90,
    schedule: Schedule = "steps",
    crop: Annotated[int, Option(min=0, help="Shift images by up to so many pixels.")] = 0,
    skip: Skip = "centred",
    weight_decay: WeightDecay = 0.0,
    label_smoothing: LabelSmoothing = 0.0,
    ema: Ema = 0.0,
    accumulate: Accumulate = 1,
    precision: Precision = "bf16",
    compile: Compile = False,
    deterministic: Deterministic = False,
    init: Init = "glorot",
    imn: Imn = "output",
    angle_lr: AngleLr = None,
    checkpoint_every: CheckpointEvery = None,
    keep_weights: KeepWeights = False,
    tensorboard: TensorBoard = False,
    track: Track = None,
    storage: Storage = None,
    resume: Resume = False,
) -> None:
    """VGG-6 on images of 32 by 32 pixels: table 2, figure 4. Wants a GPU."""
    _run("imagenet32", locals())


def imagenet(
    data: Annotated[
        Path,
        Option(help="Folder with train/CLASS/*.JPEG and val/CLASS/*.JPEG.", show_default=False),
    ],
    out: Out = Path("runs/imagenet"),
    network: Network = None,
    widths: Widths = None,
    size: Annotated[int, Option(min=8, help="Of the crops.")] = 224,
    methods: Methods = None,
    batch_sizes: BatchSizes = None,
    lrs: Lrs = None,
    seeds: Seeds = 3,
    epochs: Epochs = 90,
    schedule: Schedule = "steps",
    skip: Skip = "centred",
    weight_decay: WeightDecay = 0.0,
    label_smoothing: LabelSmoothing = 0.0,
    ema: Ema = 0.0,
    accumulate: Accumulate = 1,
    precision: Precision = "bf16",
    compile: Compile = False,
    deterministic: Deterministic = False,
    init: Init = "glorot",
    imn: Imn = "output",
    angle_lr: AngleLr = None,
    workers: Annotated[
        int | None, Option(min=0, help="Processes that decode; by default one for each core.")
    ] = None,
    check_images: Annotated[
        bool, Option("--check-images", help="Decode all images before training.")
    ] = False,
    checkpoint_every: CheckpointEvery = None,
    keep_weights: KeepWeights = False,
    tensorboard: TensorBoard = False,
    track: Track = None,
    storage: Storage = None,
    resume: Resume = False,
) -> None:
    """A ResNet on ImageNet: table 3. Wants several GPUs."""
    _run("imagenet", locals())


def _run(experiment: str, given: Mapping[str, Any]) -> None:
    """Run a sweep under a bar, and print its tables; the leading process alone says anything."""
    import torch.distributed as dist

    from geoparam.experiments import images, tables

    options = {**given, "experiment": experiment}
    out = options.pop("out")
    with explained(out):
        for name, read in _READ.items():
            options[name] = None if options[name] is None else read(options[name])
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
