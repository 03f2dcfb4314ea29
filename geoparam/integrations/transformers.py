"""For transformers' Trainer: a callback, and GeometricOptimizer. Needs the extra: 'geoparam[hf]'.

In a loop of one's own, with Accelerate, the tracker is used as it is: `tracker.step()` after
`optimizer.step()`, and `accelerator.register_for_checkpointing(tracker)` for its state.
"""

import functools
import inspect
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Trainer, TrainerCallback

from geoparam.analysis.tracker import BoundaryTracker
from geoparam.model.run import full_tensor
from geoparam.optim import GeometricOptimizer


class TrackBoundaries(TrainerCallback):
    """Runs a `BoundaryTracker` along with `Trainer.train`; its state is saved with checkpoints.

    Trainer does not tell callbacks which checkpoint it resumes. So the state is looked for in
    that of this step in `output_dir`, and used if it was saved with the weights that are there.

    Args:
        name: Of the state's file in a checkpoint; two callbacks need two names.
        checkpoint: Folder of the checkpoint that is resumed, if it is not in `output_dir`.
        log: The Trainer whose `log` gets the summary, under the tags quantity/layer:
            `trainer.add_callback(TrackBoundaries(log=trainer))`.
        options: Those of `BoundaryTracker`, such as `every`, `probe`, `file`.

    Attributes:
        tracker: The tracker, once training has begun; `tracker.history` has the records.
    """

    def __init__(
        self,
        name: str = "boundaries",
        checkpoint: str | Path | None = None,
        log: Trainer | None = None,
        **options: Any,
    ) -> None:
        self.file, self.checkpoint, self.options = f"{name}.pt", checkpoint, options
        if log is not None:
            self.options["log"] = _TrainerLog(log)
        self.tracker: BoundaryTracker | None = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        names = vars(state).setdefault("boundary_files", [])  # of the other callbacks
        if self.file in names:
            raise ValueError(f"two TrackBoundaries would write {self.file}: give one a name=.")
        names.append(self.file)
        model, path = kwargs["model"], Path(self.checkpoint or _checkpoint(args, state), self.file)
        saved = torch.load(path, weights_only=True) if state.global_step and path.exists() else {}
        sums = saved.pop("sums", torch.empty(0))
        own = _sum_weights(model) if state.global_step else sums
        is_resumed = bool(saved) and sums.shape == own.shape and torch.allclose(sums, own)
        if state.global_step and not is_resumed:
            why = "was saved with other weights" if saved else "is not there"
            advice = "Give checkpoint=, the folder that is resumed."
            warnings.warn(f"boundaries are tracked anew: {path} {why}. {advice}", stacklevel=2)
        has_file = self.options.get("file") is not None
        options = {"resume": is_resumed and has_file, **self.options}
        self.tracker = BoundaryTracker(model, **options)
        if is_resumed:
            self.tracker.load_state_dict(saved)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.tracker is not None:
            self.tracker.step()

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        folder, sums = _checkpoint(args, state), _sum_weights(kwargs["model"])
        if self.tracker is not None and state.is_world_process_zero and folder.is_dir():
            torch.save({**self.tracker.state_dict(), "sums": sums}, folder / self.file)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.tracker is not None:
            self.tracker.close()


class _TrainerLog:
    """Trainer's log; what Trainer itself is about to log is still logged."""

    def __init__(self, trainer: Trainer) -> None:
        self.trainer = trainer

    def log_metrics(self, metrics: dict[str, float], step: int) -> None:
        control = self.trainer.control
        should_log = control.should_log
        self.trainer.log(metrics)  # it counts as done what was to be logged in this step
        control.should_log = should_log


class Geometric:
    """Makes a `GeometricOptimizer` when Trainer asks for one: under FSDP, after sharding.

    Trainer refuses `optimizers=` with FSDP, because such an optimizer holds unsharded parameters.
    It does not pass its own settings to this one, so give them as `args`: `learning_rate`,
    `weight_decay`, and, for base and rest where they have betas, `adam_beta1`, `adam_beta2` and
    `adam_epsilon`. Options that you pass yourself take precedence.

    Example:
        >>> options = {"lr": 1e-3, "base": torch.optim.AdamW}
        >>> choice = (Geometric, options)  # Trainer(..., optimizer_cls_and_kwargs=choice)
    """

    def __call__(self, model: nn.Module, args: Any = None, **options: Any) -> GeometricOptimizer:
        if args is not None:
            options = _add_settings(args, options)
        return GeometricOptimizer(model, **options)


def _add_settings(args: Any, options: dict[str, Any]) -> dict[str, Any]:
    """Return the options, and those that Trainer's arguments stand for where none is named."""
    settings = {"lr": args.learning_rate, "weight_decay": args.weight_decay}
    adam = {"betas": (args.adam_beta1, args.adam_beta2), "eps": args.adam_epsilon}
    base: Any = options.get("base", torch.optim.SGD)
    rest: Any = options.get("rest")
    if rest is None and _find_class(base) is torch.optim.Muon:
        rest = torch.optim.AdamW

    if _has_betas(base):
        settings |= adam
    named = getattr(base, "keywords", {})
    settings = {key: settings[key] for key in settings if key not in named} | options
    if _has_betas(rest):
        if _find_class(rest) is _find_class(base):  # they share options
            adam = {key: options.get(key, adam[key]) for key in adam}
        named = {**adam, **getattr(rest, "keywords", {})}
        settings["rest"] = functools.partial(rest, **named)
    return settings


def _find_class(make: Any) -> Any:
    return getattr(make, "func", make)


def _has_betas(make: Any) -> bool:
    kind = _find_class(make)
    return callable(kind) and "betas" in inspect.signature(kind).parameters


@torch.no_grad()
def _sum_weights(model: nn.Module) -> Tensor:
    """Return the sum of each parameter, by which a model is known again; all processes sum."""
    return torch.stack([full_tensor(p.sum(dtype=torch.float64)).cpu() for p in model.parameters()])


def _checkpoint(args: Any, state: Any) -> Path:
    return Path(args.output_dir or ".") / f"checkpoint-{state.global_step}"
