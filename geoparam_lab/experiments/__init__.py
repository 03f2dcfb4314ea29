"""The experiments, one file each. A new one is a file with an `Experiment`, and an entry below.

Importing this imports neither the experiments nor torch, so that `geoparam run --help` is quick.
"""

import importlib
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from geoparam_lab.experiments.experiment import Experiment


class Entry(NamedTuple):
    """Where an experiment is, and its line in the list of commands."""

    module: str
    record: str
    line: str


ENTRIES = {
    "levy": Entry("levy", "EXPERIMENT", "Regression in one dimension: figure 2."),
    "banana": Entry("banana", "EXPERIMENT", "Classification in the plane: figure 3."),
    "perturbation": Entry(
        "perturbation", "EXPERIMENT", "Single units under small steps: figure 1."
    ),
    "uci": Entry("uci", "EXPERIMENT", "Seven regression sets: table 1."),
    "imagenet32": Entry("images", "IMAGENET32", "VGG-6 on small images: table 2, figure 4."),
    "imagenet": Entry("images", "IMAGENET", "ResNets on ImageNet: table 3."),
    "text": Entry("text", "EXPERIMENT", "A GPT on bytes, at several sizes."),
    "finetune": Entry("finetune", "EXPERIMENT", "A pretrained network at small batches."),
}


def find(name: str) -> "Experiment":
    """Return the experiment of this name; for an unknown one, one that has only the name."""
    if name not in ENTRIES:
        from geoparam_lab.experiments.experiment import Experiment

        return Experiment(name, name)
    entry = ENTRIES[name]
    module = importlib.import_module(f"geoparam_lab.experiments.{entry.module}")
    experiment: Experiment = getattr(module, entry.record)
    return experiment
