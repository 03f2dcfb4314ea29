"""A tracker that the optimizer calls: `watch`."""

import warnings
from collections.abc import Sequence
from typing import Any

from torch import nn
from torch.optim import Optimizer

from geoparam.analysis.quantities import Quantity
from geoparam.analysis.sites import Inputs
from geoparam.analysis.tracker import BoundaryTracker, Hook
from geoparam.model.run import refuse_non_model


def watch(
    model: nn.Module,
    optimizer: Optimizer,
    probe: Inputs | None = None,
    log: Any = None,
    quantities: Sequence[str | Quantity] | None = None,
    every: int = 1,
    **options: Any,
) -> BoundaryTracker:
    """Track the boundaries of a model's units from now on, after each step of the optimizer.

    There is nothing to call: the tracker is a step hook. Steps that GradScaler skips do not count.
    `close()` of the tracker removes the hook.

    Args:
        model: Any model.
        optimizer: The one that steps it: torch's, GeometricOptimizer, or one that Accelerate or
            Lightning has wrapped.
        probe: A batch as the model takes it, for dead units and regions. It costs one more run of
            the model in each record.
        log: Where the summary is written to, under the tags quantity/layer: an object with
            `add_scalar` (TensorBoard), `log` (W&B) or `log_metrics` (Lightning's loggers).
        quantities: Names of what to record, as "rotation_rms" or "rotation"; all by default.
        every: Record every this many steps.
        options: Further options of `BoundaryTracker`.

    Example:
        >>> import torch
        >>> model = nn.Sequential(nn.Linear(2, 8), nn.ReLU(), nn.Linear(8, 1))
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> tracker = watch(model, optimizer, quantities=["rotation_rms"])
        >>> for _ in range(3):
        ...     model(torch.randn(4, 2)).square().mean().backward()
        ...     optimizer.step()
        >>> tracker.history
        History of 2 layers: 3 records, steps 1 to 3
          layers: 0, 2
          quantities: rotation_max, rotation_median, rotation_p99, rotation_rms
    """
    refuse_non_model(model, "watch(model, optimizer)")
    inner = getattr(optimizer, "optimizer", optimizer)  # Accelerate's and Lightning's wrappers
    if not isinstance(inner, Optimizer):
        raise ValueError(
            f"watch needs the optimizer that steps the model; got {type(optimizer).__name__}. "
            "Without one, build a BoundaryTracker and call its step()."
        )
    stepped = {id(p) for group in inner.param_groups for p in group["params"]}
    if not any(id(p) in stepped for p in model.parameters()):
        warnings.warn(
            "this optimizer has none of the model's parameters, so it will not turn its units: "
            "was it built for another model, or before the parameters were replaced?",
            stacklevel=2,
        )
    tracker = BoundaryTracker(model, every, probe=probe, log=log, quantities=quantities, **options)
    hook = Hook(lambda *_: tracker.step())
    tracker.remove_on_close(inner.register_step_post_hook(hook))
    return tracker
