"""For transformers' Trainer: callbacks, and GeometricOptimizer. Needs the extra: 'geoparam[hf]'.

In a loop of one's own, with Accelerate, the tracker is used as it is: `tracker.step()` after
`optimizer.step()`, and `accelerator.register_for_checkpointing(tracker)` for its state.
"""

from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import TrainerCallback

from geoparam.analysis.tracker.tracker import BoundaryTracker
from geoparam.optim import GeometricOptimizer
from geoparam.step_hooks import retract

STATE = "boundaries.pt"


class TrackBoundaries(TrainerCallback):
    """Runs a `BoundaryTracker` along with `Trainer.train`; its state is saved with checkpoints.

    Args:
        options: Those of `BoundaryTracker`, such as `every`, `probe`, `file`.

    Attributes:
        tracker: The tracker, once training has begun; `tracker.history` has the records.
    """

    def __init__(self, **options: Any) -> None:
        self.options = options
        self.tracker: BoundaryTracker | None = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        saved = _checkpoint(args, state) / STATE
        resumed = state.global_step > 0 and saved.exists()
        options = {**self.options, "resume": True} if resumed else self.options
        self.tracker = BoundaryTracker(kwargs["model"], **options)
        if resumed:
            self.tracker.load_state_dict(torch.load(saved, weights_only=True))

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.tracker is not None:
            self.tracker.step()

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        folder = _checkpoint(args, state)
        if self.tracker is not None and state.is_world_process_zero and folder.is_dir():
            torch.save(self.tracker.state_dict(), folder / STATE)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.tracker is not None:
            self.tracker.close()


class Geometric:
    """Makes a `GeometricOptimizer` when Trainer asks for one: under FSDP, after sharding.

    Trainer refuses `optimizers=` with FSDP, because those hold the parameters of before. It gives
    its arguments to no optimizer of others: their `learning_rate` and `weight_decay` count where
    the options have them as `args` and name no `lr` or `weight_decay`.

    Example:
        >>> options = {"lr": 1e-3, "base": torch.optim.AdamW}
        >>> choice = (Geometric, options)  # Trainer(..., optimizer_cls_and_kwargs=choice)
    """

    def __call__(self, model: nn.Module, args: Any = None, **options: Any) -> GeometricOptimizer:
        if args is not None:
            options = {"lr": args.learning_rate, "weight_decay": args.weight_decay, **options}
        return GeometricOptimizer(model, **options)


class Retract(TrainerCallback):
    """Pulls intrinsic directions back to length 1 after every optimizer step."""

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        optimizer = kwargs["optimizer"]
        optimizer = getattr(optimizer, "optimizer", optimizer)  # Accelerate's wrapper
        optimizer.register_step_post_hook(retract(kwargs["model"]))


def _checkpoint(args: Any, state: Any) -> Path:
    return Path(args.output_dir or ".") / f"checkpoint-{state.global_step}"
