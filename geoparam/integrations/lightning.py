"""A callback for Lightning: tracking. Needs the extra: 'geoparam[lightning]'."""

from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.loggers import Logger

from geoparam.analysis.tracker import BoundaryTracker


class TrackBoundaries(Callback):
    """Runs a `BoundaryTracker` along with `Trainer.fit`; its state is kept in checkpoints.

    Args:
        module: Name of the submodule to track; the LightningModule itself by default.
        log: Whether the summary goes to the Trainer's loggers, under the tags quantity/layer.
        options: Those of `BoundaryTracker`. Without a probe or example_inputs, the module's
            `example_input_array` is used, or the first batch that the tracked module is called
            with; a LightningModule whose training_step does not call `self(...)` needs one.

    Attributes:
        tracker: The tracker, once fitting has begun; `tracker.history` has the records.
    """

    def __init__(self, module: str = "", log: bool = False, **options: Any) -> None:
        self.module, self.log = module, log
        self.options = options
        self.tracker: BoundaryTracker | None = None
        self._last_step = 0
        self._state: dict[str, Any] | None = None

    @property
    def state_key(self) -> str:
        return self._generate_state_key(module=self.module)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        options = dict(self.options)
        example = pl_module.example_input_array
        if not self.module and example is not None and options.get("probe") is None:
            options.setdefault("example_inputs", example)
        if self._state is not None:
            options["resume"] = True
        if self.log:
            options["log"] = _Loggers(trainer.loggers)
        self.tracker = BoundaryTracker(pl_module.get_submodule(self.module), **options)
        if self._state is not None:
            self.tracker.load_state_dict(self._state)
        self._last_step, self._state = trainer.global_step, None  # a state is for one fit

    def on_train_batch_end(self, trainer: Trainer, *args: Any, **kwargs: Any) -> None:
        if self.tracker is not None and trainer.global_step != self._last_step:  # not accumulating
            self._last_step = trainer.global_step
            self.tracker.step()

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self.tracker is not None:
            self.tracker.close()

    def state_dict(self) -> dict[str, Any]:
        return {} if self.tracker is None else self.tracker.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._state = state_dict or None


class _Loggers:
    """All loggers of a Trainer, as one."""

    def __init__(self, loggers: list[Logger]) -> None:
        self.loggers = loggers

    def log_metrics(self, metrics: dict[str, float], step: int) -> None:
        for logger in self.loggers:
            logger.log_metrics(metrics, step=step)
