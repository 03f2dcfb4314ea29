"""Normalization by the mean alone: of a layer's input (IMN) or of its pre-activation (MBN).

Both subtract a mean per channel, over the batch and all positions, and keep a running average of
it for evaluation, with the semantics of torch's BatchNorm. Neither divides by a deviation.

In training on a GPU the mean is mostly known already: the step that made the input has added it up
on the way (`fused`), and its gradient goes back there (`centring`).

With several processes each takes the mean of its own batch, as BatchNorm does;
`synchronise_means_` lets all of them take the mean of the joint batch.
"""

import itertools
from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from geoparam import centring, fused
from geoparam.ops import means, rectified
from geoparam.sums import channel_sums, known_sums

Model = TypeVar("Model", bound=nn.Module)


class InputMeanNorm(nn.Module):
    r"""Input mean normalization: x - E[x] per channel, without any parameter.

    The papers put it before every intermediate layer, so that its input is centred at the origin,
    where the boundaries start. In training the mean is the batch's, and its gradient flows; in
    evaluation it is the running mean. Statistics are float32 or better under autocast.

    Args:
        num_features: number of channels.
        momentum: share of the new batch in the running mean; None for the plain average of all
            batches so far.
        track_running_stats: if False, evaluation uses the batch's mean too.
        dim: the channels' dimension.

    Reference:
        Chen & Ge, *Neural Characteristic Activation Analysis and Geometric Parameterization for
        ReLU Networks*, NeurIPS 2024, equation 14.

    Example:
        >>> norm = InputMeanNorm(2)
        >>> norm(torch.tensor([[1., 2.], [3., 6.]]))
        tensor([[-1., -2.],
                [ 1.,  2.]])
        >>> norm.running_mean
        tensor([0.0200, 0.0400])
    """

    running_mean: Tensor | None
    num_batches_tracked: Tensor | None
    _takes_own_mean = True  # else a subclass has another, and nothing is done behind its back

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        cls._takes_own_mean = cls.mean is InputMeanNorm.mean

    def __init__(
        self,
        num_features: int,
        momentum: float | None = 0.01,
        track_running_stats: bool = True,
        dim: int = 1,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if num_features < 1:
            raise ValueError(f"num_features is the number of channels, >= 1; got {num_features}.")
        self.num_features = num_features
        self.momentum = momentum
        self.track_running_stats = track_running_stats
        self.dim = dim
        self.synchronised = False
        self.process_group: dist.ProcessGroup | None = None
        mean = torch.zeros(num_features, device=device, dtype=dtype)
        count = torch.zeros((), device=device, dtype=torch.long)
        self.register_buffer("running_mean", mean if track_running_stats else None)
        self.register_buffer("num_batches_tracked", count if track_running_stats else None)

    def forward(self, x: Tensor) -> Tensor:
        return self._centred(x, None)

    def _centred(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """Return x - mean + bias."""
        own = self.training and self._takes_own_mean
        in_few_passes = own and x.ndim > 1 and fused.eligible(x)
        if in_few_passes and not self.is_shared:
            return self._centred_by_sums(x, bias)
        if own and self._is_centred_at_once(x):
            centred = rectified.centred(x, self.mean(x.detach()))
        else:
            mean = self.mean(x)
            if in_few_passes:
                return centring.less(x, mean, bias, self.dim)
            centred = x - self._along_channels(mean, x)
        return (centred if bias is None else centred + self._along_channels(bias, x)).to(x.dtype)

    def _centred_by_sums(self, x: Tensor, bias: Tensor | None) -> Tensor:
        self._check(x)
        total, count = known_sums(x, self.dim), x.numel() // self.num_features
        running, momentum = self.running, self.momentum
        if running is not None and momentum is None:
            self._track(total.detach() / count)
            running = None
        mean = centring.Mean(count, running, momentum or 0.0)
        return centring.centred(x, total, mean, bias, self.dim)

    def _is_centred_at_once(self, x: Tensor) -> bool:
        """Return whether a compiler is to find an op, from which it makes fewer passes."""
        known = rectified.possible(x) and x.numel() > 0
        return known and self.dim in (1, -3) and not self.is_shared

    def mean(self, x: Tensor) -> Tensor:
        """Return the mean (num_features,) to subtract from `x`, and track it when training."""
        self._check(x)
        x = x.unsqueeze(0) if x.ndim == 1 else x
        if not self.training and self.running_mean is not None:
            return self.running_mean
        if self.training and self.is_shared:
            return self._joint_mean(x)
        if x.numel() == 0:  # an empty batch has no mean
            tracked = self.running_mean
            return x.new_zeros(self.num_features) if tracked is None else tracked.clone()
        if self.momentum is not None and self._is_in_parts(x):
            return means.mean_of_images(x, self.running, self.momentum)
        mean = self._batch_mean(x)
        if self.training and self.running_mean is not None:
            self._track(mean.detach())
        return mean

    def mean_and_batches(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return the mean, and the number of batches where it is left to the caller to count."""
        tracked, momentum = self.running_mean, self.momentum
        if not self.training or self.is_shared or tracked is None or momentum is None:
            return self.mean(x), None
        if not self._takes_own_mean or x.numel() == 0 or self._is_in_parts(x):
            return self.mean(x), None
        self._check(x)
        mean = self._batch_mean(x.unsqueeze(0) if x.ndim == 1 else x)
        tracked.lerp_(mean.detach().to(tracked.dtype), momentum)
        return mean, self.num_batches_tracked

    @property
    def running(self) -> tuple[Tensor, Tensor] | None:
        """The running mean and the number of batches in it, if tracked."""
        if self.running_mean is None or self.num_batches_tracked is None:
            return None
        return self.running_mean, self.num_batches_tracked

    @property
    def is_shared(self) -> bool:
        """Whether the mean is that of several processes."""
        return self.synchronised and _is_shared(self.process_group)

    def reset_parameters(self) -> None:
        """Start anew; there is nothing to draw."""
        self.reset_running_stats()

    def reset_running_stats(self) -> None:
        """Forget all batches."""
        if self.running_mean is not None and self.num_batches_tracked is not None:
            self.running_mean.zero_()
            self.num_batches_tracked.zero_()

    def _batch_mean(self, x: Tensor) -> Tensor:
        if self.training and fused.eligible(x):
            return channel_sums(x, self.dim) / (x.numel() // self.num_features)
        return x.mean(dim=self._others(x), dtype=torch.promote_types(x.dtype, torch.float32))

    def _is_in_parts(self, x: Tensor) -> bool:
        """Return whether a compiler takes the mean of sums in parts."""
        if not self.training or x.ndim != 4 or self.dim not in (1, -3):
            return False
        return means.number_of_parts(x, self.num_features, x.shape[2] * x.shape[3]) > 0

    def _joint_mean(self, x: Tensor) -> Tensor:
        """Return the mean over the batches of all processes, any of which may be empty."""
        if fused.eligible(x):
            sums = channel_sums(x, self.dim)
        else:
            sums = x.sum(dim=self._others(x), dtype=torch.promote_types(x.dtype, torch.float32))
        count = sums.new_full((1,), x.numel() // self.num_features)
        joint = _SumOverProcesses.apply(torch.cat([sums, count]), self.process_group)
        sums, count = joint[:-1], joint[-1].detach()
        mean = sums / count.clamp(min=1)
        if self.running_mean is not None:
            mean = torch.where(count > 0, mean, self.running_mean)
            self._track(mean.detach(), count > 0)
        return mean

    def _others(self, x: Tensor) -> list[int]:
        return [d for d in range(x.ndim) if d != self.dim % x.ndim]

    def _track(self, mean: Tensor, batches: Tensor | int = 1) -> None:
        assert self.running_mean is not None and self.num_batches_tracked is not None
        self.num_batches_tracked.add_(batches)
        mean = mean.to(self.running_mean.dtype)
        if self.momentum is None:
            tracked = self.num_batches_tracked.clamp(min=1).to(mean.dtype)
            self.running_mean.lerp_(mean, tracked.reciprocal())
        else:
            self.running_mean.lerp_(mean, self.momentum)

    def _along_channels(self, per_channel: Tensor, x: Tensor) -> Tensor:
        shape = [1] * x.ndim
        shape[self.dim] = self.num_features
        return per_channel.view(shape)

    def _check(self, x: Tensor) -> None:
        if not -x.ndim <= self.dim < x.ndim or x.shape[self.dim] != self.num_features:
            raise ValueError(
                f"expected {self.num_features} channels in dimension {self.dim}; "
                f"got an input of shape {tuple(x.shape)}."
            )

    def extra_repr(self) -> str:
        text = f"{self.num_features}, momentum={self.momentum}"
        text += "" if self.track_running_stats else ", track_running_stats=False"
        text += ", synchronised=True" if self.synchronised else ""
        return text if self.dim == 1 else f"{text}, dim={self.dim}"


class MeanOnlyBatchNorm(InputMeanNorm):
    r"""Mean-only batch normalization of pre-activations: z - E[z] + b.

    The companion of weight normalization (Salimans & Kingma, 2016). A bias *before* it cancels;
    theirs comes after, which is the default here. The code released with the GmP papers has none:
    `bias=False`.

    Example:
        >>> MeanOnlyBatchNorm(1)(torch.tensor([[1.], [3.]]))
        tensor([[-1.],
                [ 1.]], grad_fn=<AddBackward0>)
    """

    bias: nn.Parameter | None

    def __init__(
        self,
        num_features: int,
        momentum: float | None = 0.01,
        track_running_stats: bool = True,
        dim: int = 1,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(num_features, momentum, track_running_stats, dim, device, dtype)
        offset = nn.Parameter(torch.zeros(num_features, device=device, dtype=dtype))
        self.register_parameter("bias", offset if bias else None)

    def forward(self, x: Tensor) -> Tensor:
        return self._centred(x, self.bias)

    def extra_repr(self) -> str:
        return super().extra_repr() + ("" if self.bias is not None else ", bias=False")


# --- running statistics -------------------------------------------------------------------------


@torch.no_grad()
def recalibrate_(model: Model, batches: Iterable[Any]) -> Model:
    """Recompute the running statistics of `model` as plain averages over some batches, in place.

    It is for `InputMeanNorm`, `MeanOnlyBatchNorm` and torch's BatchNorm: after averaging weights,
    after editing them, or where the moving average lags behind. These norms alone are in training
    mode meanwhile; dropout, momentum and training flags stay as they are.

    Args:
        model: a model with such norms.
        batches: each a tensor, a tuple of arguments, a mapping of keyword arguments, or a list as
            DataLoader yields it, whose first entry is the input.

    Example:
        >>> batches = [torch.tensor([[1.0], [3.0]]), torch.tensor([[5.0], [7.0]])]
        >>> recalibrate_(nn.BatchNorm1d(1), batches).running_mean
        tensor([4.])
    """
    kinds = (InputMeanNorm, _BatchNorm)
    found = [module for module in model.modules() if isinstance(module, kinds)]
    norms = [norm for norm in found if norm.running_mean is not None]
    iterator = iter(batches)
    first = list(itertools.islice(iterator, 1))
    if not norms or not first:
        lacking = "batches" if norms else "a model whose norms have running statistics"
        raise ValueError(f"recalibrate_ needs {lacking}; got none.")
    flags = {module: module.training for module in model.modules()}
    momenta = {norm: norm.momentum for norm in norms}
    model.eval()
    for norm in norms:
        norm.reset_running_stats()
        norm.momentum = None  # the plain average
        norm.train()
    try:
        for batch in itertools.chain(first, iterator):
            _call(model, batch)
    finally:
        for norm, momentum in momenta.items():
            norm.momentum = momentum
        for module, flag in flags.items():
            module.training = flag
    return model


def _call(model: nn.Module, batch: Any) -> None:
    if isinstance(batch, Mapping):
        model(**batch)
    elif isinstance(batch, tuple):
        model(*batch)
    else:
        model(batch[0] if isinstance(batch, list) else batch)


# --- several processes --------------------------------------------------------------------------


def synchronise_means_(model: Model, process_group: "dist.ProcessGroup | None" = None) -> Model:
    r"""Let every mean normalization in `model` use the joint batch of all processes, in place.

    It is to `InputMeanNorm` (that of a layer's `input_norm` too) and `MeanOnlyBatchNorm` what
    `nn.SyncBatchNorm.convert_sync_batchnorm` is to BatchNorm. In training the sums S_p and counts
    N_p are added up over the processes p, so unequal and empty batches are right and the running
    means are the same everywhere; evaluation communicates nothing. Without a process group, or
    with one process, the mean is the local one.

    With m = sum_p S_p / N, N = sum_p N_p, and each process's own loss L_p,

        d(sum_p L_p) / dx = (1 / N) sum_p dL_p / dm        for every x of every process,

    so the backward pass adds up dL_p / dm over the processes, as SyncBatchNorm's does: local
    gradients are then those of the *sum* of the losses, restricted to the local part of the graph.
    DDP and FSDP average parameters' gradients over P processes, which makes them the gradients of
    (1 / P) sum_p L_p. That is the joint batch's mean loss where L_p is the mean over equal local
    batches; for unequal ones let L_p be P / N_samples times the local sum.

    Every process of the group must run the same layers in the same order, in the backward pass
    too, also for an empty batch; else the others wait for it.

    Args:
        model: A model with mean normalization, before or after it is wrapped.
        process_group: The processes that share their means; all of them by default.

    Example:
        >>> model = nn.Sequential(nn.Linear(4, 8), MeanOnlyBatchNorm(8))
        >>> synchronise_means_(model)[1]
        MeanOnlyBatchNorm(8, momentum=0.01, synchronised=True)
    """
    norms = [module for module in model.modules() if isinstance(module, InputMeanNorm)]
    if not norms:
        raise ValueError(
            "this model has no InputMeanNorm or MeanOnlyBatchNorm to synchronise. Call it after "
            "convert_(norm='imn'); for BatchNorm use nn.SyncBatchNorm.convert_sync_batchnorm."
        )
    for norm in norms:
        norm.synchronised, norm.process_group = True, process_group
    return model


class _SumOverProcesses(torch.autograd.Function):
    """An all-reduce with a gradient; torch.distributed.nn's refuses to be compiled."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: "dist.ProcessGroup | None") -> Tensor:
        ctx.group = group
        total = x.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _SumOverProcesses.apply(grad, ctx.group), None


def _is_shared(group: "dist.ProcessGroup | None") -> bool:
    return dist.is_available() and dist.is_initialized() and dist.get_world_size(group) > 1
