"""A GPT on bytes under several optimizers: does one turn, or one rate, serve every size?

A sweep is a grid: methods x sizes x the numbers of each method x seeds (`text.settings`). With
`one_factor`, sizes are varied one at a time around the first of each kind. Every method sees the
same windows of the text in the same order, and one schedule scales the rates of all of them.

`training.sweeps` says how a sweep is resumed and shared.
"""

import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from geoparam_lab.checks import check_counts
from geoparam_lab.data.texts import load_text
from geoparam_lab.experiments import text_results
from geoparam_lab.experiments.experiment import Config, Experiment, Layout, Measure
from geoparam_lab.run_folder import Run
from geoparam_lab.training.processes import check_runs
from geoparam_lab.training.sweeps import Sweep, Work, load_once
from geoparam_lab.training.tasks import Progress
from geoparam_lab.training.text import loop, preparation
from geoparam_lab.training.text.settings import (
    NUMBERS,
    SIZES,
    USERS,
    TextSettings,
    check_used,
    list_tasks,
)

_AXES = ("methods", *SIZES.values(), *NUMBERS.values(), "schedules", "seeds", "one_factor")


def run(
    out: str | Path,
    *,
    data: str | Path | None = None,
    validation: str | Path | None = None,
    methods: Sequence[str] | None = None,
    method: list[str] | None = None,
    widths: Sequence[int] = (256,),
    depths: Sequence[int] = (6,),
    steps: Sequence[int] = (500,),
    batch_sizes: Sequence[int] = (96,),
    one_factor: bool = False,
    turns: Sequence[float] | None = None,
    lrs: Sequence[float] | None = None,
    momenta: Sequence[float] | None = None,
    decays: Sequence[float] | None = None,
    rest_lrs: Sequence[float] | None = None,
    rest_decays: Sequence[float] | None = None,
    scale_lrs: Sequence[float] | None = None,
    schedules: Sequence[str] = ("linear",),
    seeds: int = 1,
    jobs: int = 1,
    storage: str | None = None,
    resume: bool = False,
    command: str | None = None,
    progress: Progress | None = None,
    **settings: Any,
) -> Run | None:
    """Train a GPT under some methods; write records, curves and a figure to a folder.

    Args:
        data: text file to train on, plain or .xz; by default the sources of Python's standard
            library.
        validation: text file to validate on; by default the last tenth of the text.
        methods: methods to train: adamw, muon, angularmuown, muonh, and ours, turn and geometric
            (without a turn); by default turn and muon.
        method: one more method, with a grid of its own, as in muon:lr=0.01,0.02:decay=0.1,0.3; may
            be repeated.
        widths: widths of the network.
        depths: numbers of blocks.
        steps: numbers of optimizer steps.
        batch_sizes: windows per step, over all processes together.
        one_factor: vary width, depth, steps and batch size one at a time around their first
            values, instead of all combinations.
        turns: degrees by which the method turn rotates units in a step, at the schedule's peak.
        lrs: learning rates of the other methods; of hidden matrices, or of everything for adamw.
        momenta: momenta of hidden matrices, or adamw's first beta.
        decays: weight decays of muon's hidden matrices, or of everything for adamw.
        rest_lrs: AdamW's rates for embeddings, norms and the output layer.
        rest_decays: weight decays of embeddings and the output layer, for methods but adamw.
        scale_lrs: learning rates of r, for our methods.
        schedules: schedules of the rates: some of linear, cosine, power and hold.
        seeds: number of seeds, 0, 1, ...
        jobs: networks trained side by side on one GPU, each in its own process; small networks
            leave most of a GPU idle.
        storage: share a sweep between machines through this file or database URL: start the same
            command on each, with its own --out.
        settings: `TextSettings` of all runs, such as context and warmup.

    Returns:
        The sweep's folder; None in all but the leading one of several processes.
    """
    check_counts(seeds=seeds, jobs=jobs)
    names = [*(methods or ()), *(method or ())]
    if methods is None and not method:
        names = ["turn", "muon"]
    axes: dict[str, Any] = {
        "methods": names,
        "widths": widths,
        "depths": depths,
        "steps": steps,
        "batch_sizes": batch_sizes,
        "turns": turns,
        "lrs": lrs,
        "momenta": momenta,
        "decays": decays,
        "rest_lrs": rest_lrs,
        "rest_decays": rest_decays,
        "scale_lrs": scale_lrs,
        "schedules": schedules,
    }
    for name, values in axes.items():
        axes[name] = None if values is None else list(dict.fromkeys(values))
    axes |= {"seeds": seeds, "one_factor": one_factor}
    sweep = Sweep("text", TextSettings, _AXES, list_tasks, _draw, USERS)
    config = sweep.make_config(axes, settings)
    check_used(config)
    tasks = list_tasks(config)  # raises where settings are wrong

    text = load_text(data, validation)
    text.check_length(config["context"])
    config["data"] = text.fingerprint
    runs = [task.settings for task in tasks]
    sweep.check_effect(runs, out)
    accelerator = check_runs(preparation.find_precision(runs[0]), runs, jobs, storage)
    for run_settings in {settings.method: settings for settings in runs}.values():
        preparation.make_optimizer(run_settings, preparation.build(run_settings))  # may raise
    load = functools.partial(load_once, load_text, data, validation)
    return sweep.conduct(
        Work(Path(out), loop.train, load if jobs > 1 else lambda: text),
        config,
        is_main=accelerator.is_main_process,
        command=command,
        resume=resume,
        jobs=jobs,
        storage=storage,
        progress=progress,
    )


def _draw(folder: Run) -> None:
    from geoparam_lab.experiments import text_figures

    text_figures.draw(folder)


def _remark(config: Config) -> list[str]:
    """Say what the text and the network were."""
    data = config.get("data")
    if not isinstance(data, dict):
        return []
    return [
        f"GPT on bytes of {data['name']} ({data['train']:,} for training, {data['val']:,} for "
        f"validation, SHA-256 {data['sha256'][:12]}), context {config['context']}, "
        f"{config['norm']}, {config['mlp']}; warmup {config['warmup']:g}, gradients clipped at "
        f"{config['clip']:g}."
    ]


LOSS = Measure("val_loss", "Validation loss (nats per byte)", 4, "lower")
_BEST_LOSS = Measure("best_val_loss", "lowest at a mark", 4)
_KEYS = {"width": "width", "depth": "depth", "steps": "steps", "batch_size": "batch size"}
_SPEED = (
    Measure("parameters", "parameters", 0),
    Measure("tokens_per_second", "tokens/s", 0),
)
_LAYOUTS = (
    Layout(
        (LOSS,),
        _KEYS,
        where={"table": "best"},
        details=(Measure("tries", "settings tried", 0), _BEST_LOSS, *_SPEED),
        title="The best setting of each method",
    ),
    Layout(
        (LOSS,),
        _KEYS,
        where={"table": "all"},
        compare=False,
        details=(Measure("excess", "above its best", 4), _BEST_LOSS),
        title="All settings",
    ),
)
EXPERIMENT = Experiment(
    name="text",
    title="A GPT on bytes",
    about="A transformer learns to predict the next byte of a text.",
    summary="A GPT on bytes of a text, under several optimizers and at several sizes. "
    "Wants a GPU.",
    run=run,
    settings=TextSettings,
    layouts=_LAYOUTS,
    baseline="muon",
    rates={},
    choose=text_results.find_for_tables,
    finding=text_results.describe,
    remarks=_remark,
)
