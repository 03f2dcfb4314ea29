"""The experiments, one file each. A new one is a file with an `Experiment`, and a line below."""

from geoparam_lab.experiments import (
    banana,
    images,
    levy,
    perturbation,
    text,
    uci,
)
from geoparam_lab.experiments.experiment import Experiment

EXPERIMENTS: dict[str, Experiment] = {
    experiment.name: experiment
    for experiment in (
        levy.EXPERIMENT,
        banana.EXPERIMENT,
        perturbation.EXPERIMENT,
        uci.EXPERIMENT,
        images.IMAGENET32,
        images.IMAGENET,
        text.TEXT,
        text.SHAKESPEARE,
    )
}


def find(name: str) -> Experiment:
    """Return the experiment of this name; for an unknown one, one that has only the name."""
    return EXPERIMENTS.get(name) or Experiment(name, name)
