"""What a sweep over images was, in words, and which of its settings are shown.

The papers' top-1 and top-5 are of ImageNet's 1,000 classes. With fewer classes, or fewer images,
results are those of another problem: they are shown without the papers' numbers.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence

from geoparam_lab.experiments.choice import choose_best
from geoparam_lab.experiments.experiment import Config
from geoparam_lab.run_folder import Record
from geoparam_lab.training.images.plateau import STOP
from geoparam_lab.training.images.settings import COMMON

IMAGENET = {"classes": 1000, "train": 1_281_167, "val": 50_000}  # ILSVRC 2012
NETWORKS = {"vgg6": "VGG-6"} | {f"resnet{depth}": f"ResNet-{depth}" for depth in (18, 34, 50)}
SCHEDULES = {
    "steps": "v2's: the rate falls to a tenth at 1/3, 2/3 and 8/9 of the epochs",
    "plateau-top1": "v1's: a tenth after {patience} epochs without a better top-1, end after "
    "{stop}",
    "plateau-top5": "the released code's: a tenth after {patience} epochs without a better top-5, "
    "end after {stop}, and the best weights are kept",
    "linear": "the rate falls linearly to 0",
    "cosine": "the rate falls to 0 along half a cosine",
}
# Settings that are reported elsewhere, or that change only rounding.
_NOT_REPORTED = ("schedule", "select", "time_to", "precision", "compile", "deterministic")
_USUAL = {name: COMMON[name] for name in COMMON if name not in _NOT_REPORTED} | {"momentum": 0.9}


def name_network(config: Config) -> str:
    """Return what a network is called."""
    name = str(config.get("network", "network"))
    return NETWORKS.get(name, name)


def make_title(experiment: str, config: Config) -> str:
    """Return what a sweep is called: only that on ImageNet has ImageNet in its title.

    Example:
        >>> data = {"classes": 200, "train": 100_000, "val": 10_000, "size": 32}
        >>> make_title("imagenet32", {"network": "vgg6", "data": data})
        'VGG-6 on images of 200 classes'
        >>> make_title("imagenet", {"network": "resnet50"})
        'ResNet-50 on ImageNet'
    """
    if "network" not in config:
        return ""
    if explain_mismatch(experiment, config):
        return f"{name_network(config)} on images of {config['data']['classes']:,} classes"
    return f"{name_network(config)} on ImageNet{experiment.removeprefix('imagenet')}"


def describe_images(config: Config) -> str:
    """Return what the images were, in words; empty where that is not known.

    Example:
        >>> data = {"classes": 200, "train": 100_000, "val": 10_000, "size": 32}
        >>> describe_images({"data": data})
        '200 classes, 100,000 training and 10,000 validation images of 32 by 32 pixels'
    """
    data = config.get("data")
    if not isinstance(data, Mapping) or not {*IMAGENET, "size"} <= data.keys():
        return ""
    return (
        f"{data['classes']:,} classes, {data['train']:,} training and {data['val']:,} validation "
        f"images of {data['size']} by {data['size']} pixels"
    )


def explain_mismatch(experiment: str, config: Config) -> str:
    """Say that the images are not the papers'; empty where they are, or the data is not known."""
    data = config.get("data")
    wanted = IMAGENET | {"size": 32 if experiment == "imagenet32" else 224}
    if not isinstance(data, Mapping) or all(data.get(name) == n for name, n in wanted.items()):
        return ""
    images = "1,281,167 training images"
    if config.get("network", "vgg6") == "vgg6":  # their ResNets saw crops of 224 pixels
        images += " of 32 by 32 pixels"
    return f"The papers trained on ImageNet, with 1,000 classes and {images}"


def remark(config: Config) -> Iterator[str]:
    """Yield what a reader must know of a table of a sweep over images."""
    if said := describe_images(config):
        yield f"{name_network(config)}; {said}."
    if schedule := SCHEDULES.get(str(config.get("schedule"))):
        patience = config.get("patience")
        if not isinstance(patience, int):  # an older run's
            patience = COMMON["patience"]
        yield f"Schedule: {schedule.format(patience=patience, stop=STOP * patience)}."
    if isinstance(config.get("select"), float) and config["select"] > 0:
        yield f"{config['select']:.0%} of the training images were held out to choose settings."
    others = [name for name, usual in _USUAL.items() if config.get(name) not in (None, usual)]
    if others:
        said = ", ".join(f"{name.replace('_', ' ')} {config[name]}" for name in others)
        yield f"Settings that differ from the papers': {said}."


def choose_shown(records: Sequence[Record]) -> Sequence[Record]:
    """Return the records that tables show: the chosen settings, where images were kept back."""
    if any("select_top1" in record for record in records):
        return choose(records, "select_top1")
    return records


def choose(records: Iterable[Record], measure: str) -> list[Record]:
    """Return the records at each method's best setting: that with the highest mean."""
    return choose_best(records, measure, ("method", "network", "batch_size"))
