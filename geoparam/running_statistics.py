"""Running statistics of a whole model: recomputed, frozen, or shared by several processes."""

import contextlib
import itertools
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from geoparam.arguments import check_flag
from geoparam.base_layer import GmPLayer
from geoparam.model.run import arguments_of, call, drop_labels, refuse_non_model
from geoparam.norm import TrackedMean
from geoparam.removed_norm import RemovedNorm

Model = TypeVar("Model", bound=nn.Module)


@torch.no_grad()
def recalibrate_(model: Model, batches: Iterable[Any]) -> Model:
    """Recompute the running statistics of `model` as plain averages over some batches, in place.

    It is for all mean normalization, that of layers too, and for torch's BatchNorm: after
    averaging or editing weights, or where the moving average lags behind. Only modules with
    running statistics are in training mode meanwhile, so dropout stays off. Momentum and flags are
    restored. A norm that does not run keeps its statistics; after an error all of them do. Means
    frozen by `freeze_means_` are recomputed too, and are frozen afterwards as before.

    Args:
        model: a model with such norms.
        batches: each a tensor, a tuple of arguments, a mapping of keyword arguments, or a list as
            DataLoader yields it, whose first entry is the input; a tensor or mapping alone is one.

    Example:
        >>> batches = [torch.tensor([[1.0], [3.0]]), torch.tensor([[5.0], [7.0]])]
        >>> recalibrate_(nn.BatchNorm1d(1), batches).running_mean
        tensor([4.])
    """
    refuse_non_model(model, "recalibrate_(model, batches)")
    norms = _find_norms(model)
    if not norms:
        raise ValueError(
            "recalibrate_ needs a model whose norms have running statistics; got none."
        )
    if isinstance(batches, str) or not isinstance(batches, Iterable):
        raise ValueError(
            f"batches are tensors, tuples or mappings, one after the other; got {batches!r}."
        )
    iterator = iter([batches] if isinstance(batches, Tensor | Mapping) else batches)
    first = list(itertools.islice(iterator, 1))
    if not first:
        raise ValueError("recalibrate_ needs batches; got none.")

    before = {norm: [b.clone() for b in norm.buffers(recurse=False)] for norm in norms}
    not_run = norms

    def restore() -> None:
        for norm in not_run:
            torch._foreach_copy_(list(norm.buffers(recurse=False)), before[norm])

    try:
        with _averaging(model, norms):
            for batch in itertools.chain(first, iterator):
                _run_batch(model, batch)
        not_run = [norm for norm in norms if not norm.num_batches_tracked]
    finally:
        _insist(restore)
    return model


def _find_norms(model: nn.Module) -> list[Any]:
    """Return the modules with running statistics."""
    norms = [module for module in model.modules() if isinstance(module, TrackedMean | _BatchNorm)]
    return [norm for norm in norms if norm.running_mean is not None]


@contextlib.contextmanager
def _averaging(model: nn.Module, norms: list[Any]) -> Iterator[None]:
    """Let norms start a plain average of batches, in a model that is otherwise in evaluation."""
    flags = {module: module.training for module in model.modules()}
    momenta = {norm: norm.momentum for norm in norms}
    frozen = [norm for norm in norms if isinstance(norm, TrackedMean) and norm.frozen]

    def restore() -> None:
        for norm in frozen:
            norm.frozen = True
        for norm, momentum in momenta.items():
            norm.momentum = momentum
        for module, flag in flags.items():
            module.training = flag

    try:
        model.eval()
        for norm in norms:
            norm.reset_running_stats()
            norm.momentum = None  # the plain average
            norm.train()
        for norm in frozen:
            norm.frozen = False
        yield
    finally:
        _insist(restore)


def _insist(restore: Callable[[], None]) -> None:
    """Call what puts a model back, and again if Ctrl-C comes in between."""
    try:
        restore()
    except BaseException:
        restore()
        raise


def _run_batch(model: nn.Module, batch: Any) -> None:
    args, kwargs = arguments_of(model, drop_labels(batch))
    call(model, args, kwargs)


def synchronise_means_(model: Model, process_group: "dist.ProcessGroup | None" = None) -> Model:
    r"""Let every mean normalization in `model` use the joint batch of all processes, in place.

    It is to mean normalization what `nn.SyncBatchNorm.convert_sync_batchnorm` is to BatchNorm. In
    training the sums S_p and counts N_p are added up over the processes p, so unequal and empty
    batches are right; evaluation communicates nothing. With one process the mean is the local one.

    With m = sum_p S_p / N, N = sum_p N_p, and each process's own loss L_p,

        d(sum_p L_p) / dx = (1 / N) sum_p dL_p / dm        for every x of every process,

    so the backward pass adds up dL_p / dm over the processes, as SyncBatchNorm's does: local
    gradients are then those of the *sum* of the losses, restricted to the local part of the graph.
    DDP and FSDP average parameters' gradients over P processes, which makes them the gradients of
    (1 / P) sum_p L_p. That is the joint batch's mean loss where L_p is the mean over equal local
    batches; for unequal ones let L_p be P / N_samples times the local sum.

    Every process must run the same layers in the same order, forward and backward, also for an
    empty batch; else the others wait for it.

    Args:
        model: A model with mean normalization, before or after it is wrapped.
        process_group: The processes that share their means; all of them by default.

    Example:
        >>> from geoparam import MeanOnlyBatchNorm
        >>> model = nn.Sequential(nn.Linear(4, 8), MeanOnlyBatchNorm(8))
        >>> synchronise_means_(model)[1]
        MeanOnlyBatchNorm(8, momentum=0.2, synchronised=True)
    """
    refuse_non_model(model, "synchronise_means_(model)")
    norms = [module for module in model.modules() if isinstance(module, TrackedMean)]
    if not norms:
        raise ValueError(
            "this model has no mean normalization to synchronise. Call it after "
            "convert_(norm='imn'); for BatchNorm use nn.SyncBatchNorm.convert_sync_batchnorm."
        )
    for norm in norms:
        norm.synchronised, norm.process_group = True, process_group
    return model


def freeze_means_(model: Model, freeze: bool = True) -> Model:
    """Let every mean normalization in `model` subtract a constant in training too, in place.

    The constant is the running mean. It is not updated, no gradient flows through it, and the
    batch may be of any size, as for a BatchNorm in evaluation mode. `freeze=False` undoes it.

    This is a setting of the modules, as `training` is: copies have it, `model.train()` keeps it,
    and a state dict does not hold it. After loading a checkpoint into a new model, call it again.
    `recalibrate_` recomputes frozen means. BatchNorms in the model are not touched: those that
    would use the batch are named in a warning.

    Args:
        model: A model with mean normalization: `InputMeanNorm`, `MeanOnlyBatchNorm`, layers with
            `input_norm`, or what `convert_(norm="imn")` returns.
        freeze: False to take the mean of each batch again.

    Example:
        >>> from geoparam import InputMeanNorm
        >>> norm = freeze_means_(InputMeanNorm(1))
        >>> norm(torch.tensor([[1.0], [3.0]]))  # the running mean is 0
        tensor([[1.],
                [3.]])
    """
    refuse_non_model(model, "freeze_means_(model)")
    check_flag("freeze", freeze)
    norms = [module for module in model.modules() if isinstance(module, TrackedMean)]
    was_converted = any(isinstance(m, GmPLayer | RemovedNorm) for m in model.modules())
    if not norms and not was_converted:
        raise ValueError(
            "this model has no mean normalization to freeze. Call it after convert_(norm='imn'); "
            "a BatchNorm has eval()."
        )
    for norm in norms:
        norm.frozen = freeze
    if freeze:
        _warn_of_batch_users(model)
    return model


def _warn_of_batch_users(model: nn.Module) -> None:
    """Name the norms that still use the batch; one that is held in evaluation mode does not."""
    users = []
    for name in find_batch_users(model):
        norm: Any = model.get_submodule(name)
        is_held = model.training and not norm.training and norm.running_mean is not None
        if not is_held:
            users.append(name)
    if users:
        warnings.warn(
            f"the means are frozen, but {len(users)} other norms use the batch in training, "
            f"{users[0]!r} first. Call eval() on them after each model.train().",
            stacklevel=3,
        )


def find_batch_users(model: nn.Module) -> list[str]:
    """Return the names of the modules that use the batch's statistics in training."""
    users = []
    for name, module in model.named_modules():
        if isinstance(module, _BatchNorm) or (
            isinstance(module, TrackedMean) and not module.frozen
        ):
            users.append(name)
    return users
