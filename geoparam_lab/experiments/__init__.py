"""The experiments, one file each. A new one is a file with its record, and one line below."""

from geoparam_lab.experiments import banana, claims, images, levy, perturbation, uci, width
from geoparam_lab.experiments.experiment import Experiment

EXPERIMENTS: dict[str, Experiment] = {
    experiment.name: experiment
    for experiment in (
        levy.EXPERIMENT,
        banana.EXPERIMENT,
        perturbation.EXPERIMENT,
        uci.EXPERIMENT,
        width.EXPERIMENT,
        claims.EXPERIMENT,
        images.IMAGENET32,
        images.IMAGENET,
    )
}


def find(name: str) -> Experiment:
    """Return the experiment of a run; one that is not known has a record all the same."""
    return EXPERIMENTS.get(name) or Experiment(name, name)
