"""Normalization by the mean alone: of a layer's input (IMN) or of its pre-activation (MBN).

Both subtract a mean per channel, over the batch and all positions, and keep a running average of
it for evaluation. Neither divides by a deviation. In a layer IMN needs no centred input
(`centred_map`). The mean's gradient flows; it is float32 or better.

With several processes each takes the mean of its own batch, as BatchNorm does, or, after
`synchronise_means_`, that of the joint batch.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from geoparam.arguments import check_count, check_flag, check_place

MOMENTUM = 0.2  # evaluation lags with BatchNorm's 0.1 (results/claims/evaluation_lag.py)
TRACKING = (  # the attributes that `TrackedMean` adds to a module
    "running_mean",
    "num_batches_tracked",
    "num_features",
    "momentum",
    "dim",
    "corrected",
    "synchronised",
    "process_group",
    "frozen",
)


def working_type(x: Tensor) -> torch.dtype:
    """Return the type of sums over x: float32 or better."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def along_channels(value: Any, z: Tensor, dim: int) -> Any:
    """Return a number, or a vector over the channels in `dim`, so that it broadcasts with z."""
    if not isinstance(value, Tensor):
        return value
    if value.numel() == 1:
        return value.view([1] * z.ndim)
    following = z.ndim - 1 - dim % z.ndim
    return value.view(-1, *[1] * following)


class TrackedMean(nn.Module):
    """A mean per channel and its running average: what all mean normalization has in common."""

    running_mean: Tensor
    num_batches_tracked: Tensor
    frozen: bool = False  # set by `freeze_means_`

    def _start_tracking(
        self, num_features: int, momentum: float | None, dim: int, device: Any, dtype: Any
    ) -> None:
        check_count("num_features", num_features)
        is_share = isinstance(momentum, int | float) and 0 < momentum <= 1
        if momentum is not None and not is_share:
            raise ValueError(f"momentum is in (0, 1], or None; got {momentum!r}.")
        if not isinstance(dim, int):
            raise ValueError(f"dim is the number of the channels' dimension; got {dim!r}.")
        check_place(device, dtype)
        self.num_features = num_features
        self.momentum = momentum
        self.dim = dim
        self.corrected = True
        self.synchronised = False
        self.process_group: dist.ProcessGroup | None = None
        mean = torch.zeros(num_features, device=device, dtype=dtype)
        self.register_buffer("running_mean", mean)
        self.register_buffer("num_batches_tracked", torch.zeros((), device=device).long())

    def mean(self, x: Tensor) -> Tensor:
        """Return the mean (num_features,) to subtract from `x`, and track it when training."""
        self.check_input(x)
        if not self.uses_batch:
            # Autograd keeps what it gets, and a later batch changes the buffer in place.
            needs_copy = torch.is_grad_enabled() and torch._C._get_tracing_state() is None
            return self.running_mean.clone() if needs_copy else self.running_mean
        if x.ndim == 1:
            x = x.unsqueeze(0)
        if self.is_shared:
            return self._joint_mean(x)

        if x.numel() == 0:  # an empty batch has no mean
            return self.running_mean.clone()
        # The gradient of a sum is an expanded view; that of x.mean() would be as large as x.
        mean = self._sum(x) / (x.numel() // self.num_features)
        self.track(mean.detach())
        return mean

    @property
    def uses_batch(self) -> bool:
        """Whether the mean is the batch's: in training, unless it is frozen."""
        return self.training and not self.frozen

    @property
    def is_own_mean(self) -> bool:
        """Whether the mean is that of this process's batch, and a subclass has no other."""
        is_local = self.uses_batch and not self.is_shared
        return is_local and type(self).mean is TrackedMean.mean

    @property
    def is_shared(self) -> bool:
        """Whether the mean is that of several processes."""
        if not (self.synchronised and dist.is_available() and dist.is_initialized()):
            return False
        return dist.get_world_size(self.process_group) > 1

    def reset_running_stats(self) -> None:
        """Forget all batches."""
        self.running_mean.zero_()
        self.num_batches_tracked.zero_()

    def _joint_mean(self, x: Tensor) -> Tensor:
        """Return the mean over the batches of all processes, any of which may be empty."""
        sums = self._sum(x)
        count = sums.new_full((1,), x.numel() // self.num_features)
        joint = _SumOverProcesses.apply(torch.cat([sums, count]), self.process_group)

        sums, count = joint[:-1], joint[-1].detach()
        mean = torch.where(count > 0, sums / count.clamp(min=1), self.running_mean)
        self.track(mean.detach(), count > 0)
        return mean

    def _sum(self, x: Tensor) -> Tensor:
        """Return the sum of each channel, in float32 or better."""
        dims = list(range(x.ndim))
        del dims[self.dim]
        return x.sum(dims, dtype=working_type(x))

    def track(self, mean: Tensor, batches: Tensor | int = 1) -> None:
        """Move the running mean by the share of one batch: momentum, or 1/n while that is more."""
        running, count = self.running_mean, self.num_batches_tracked
        count.add_(batches)
        mean = mean.to(running.dtype)
        if self.momentum is not None and not self.corrected:
            running.lerp_(mean, self.momentum)
            return

        # running += (mean - running) / min(count, 1 / momentum)
        if running.dtype == torch.float64:
            count = count.double()
        most = None if self.momentum is None else 1 / self.momentum
        running.addcdiv_(mean - running, count.clamp(1, most))

    def check_input(self, x: Tensor) -> None:
        """Raise unless `x` has these channels and, to have a mean of its own, several values."""
        if not -x.ndim <= self.dim < x.ndim or x.shape[self.dim] != self.num_features:
            raise ValueError(
                f"expected {self.num_features} channels in dimension {self.dim}; "
                f"got an input of shape {tuple(x.shape)}."
            )
        if self.uses_batch and x.numel() == self.num_features and not self.is_shared:
            raise ValueError(
                "expected more than 1 value per channel when training, since one value is its own "
                f"mean; got an input of shape {tuple(x.shape)}."
            )


class InputMeanNorm(TrackedMean):
    r"""Input mean normalization: x - E[x] per channel, without any parameter.

    The papers put it before every intermediate layer, so that its input is centred at the origin,
    where the boundaries start. In training the mean is the batch's, and its gradient flows; in
    evaluation it is the running mean.

    Before a convolution that pads zeros it is the papers' border form (`input_norm="border"` of a
    layer), which no bias can hold; `input_norm=True` of a layer differs at padded borders alone.

    Args:
        num_features: number of channels.
        momentum: share of the new batch in the running mean; None for the plain average of all
            batches so far.
        dim: the channels' dimension.

    Attributes:
        corrected: let the running mean be the plain average until it has seen 1 / momentum
            batches. Set it to False for BatchNorm's rule, which starts from 0.

    Reference:
        Chen & Ge, *Neural Characteristic Activation Analysis and Geometric Parameterization for
        ReLU Networks*, NeurIPS 2024, equation 14.

    Example:
        >>> norm = InputMeanNorm(2)
        >>> norm(torch.tensor([[1., 2.], [3., 6.]]))
        tensor([[-1., -2.],
                [ 1.,  2.]])
        >>> norm.running_mean
        tensor([2., 4.])
    """

    def __init__(
        self,
        num_features: int,
        momentum: float | None = MOMENTUM,
        dim: int = 1,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self._start_tracking(num_features, momentum, dim, device, dtype)

    def forward(self, x: Tensor) -> Tensor:
        return (x - along_channels(self.mean(x), x, self.dim)).to(x.dtype)

    def reset_parameters(self) -> None:
        """Forget all batches; there is no parameter to draw."""
        self.reset_running_stats()

    def extra_repr(self) -> str:
        text = f"{self.num_features}, momentum={self.momentum}"
        if not self.corrected:
            text += ", corrected=False"
        if self.synchronised:
            text += ", synchronised=True"
        if self.frozen:
            text += ", frozen=True"
        if self.dim != 1:
            text += f", dim={self.dim}"
        return text


class MeanOnlyBatchNorm(InputMeanNorm):
    r"""Mean-only batch normalization of pre-activations: z - E[z] + b.

    The companion of weight normalization (Salimans & Kingma, 2016). A bias *before* it cancels;
    theirs comes after, which is the default here. The code released with the GmP papers has none:
    `bias=False`.

    Example:
        >>> MeanOnlyBatchNorm(1)(torch.tensor([[1.], [3.]]))
        tensor([[-1.],
                [ 1.]], grad_fn=<SubBackward0>)
    """

    bias: nn.Parameter | None

    def __init__(
        self,
        num_features: int,
        momentum: float | None = MOMENTUM,
        dim: int = 1,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        check_flag("bias", bias)
        place: dict[str, Any] = {"device": device, "dtype": dtype}
        super().__init__(num_features, momentum, dim, **place)
        offset = nn.Parameter(torch.zeros(num_features, **place))
        self.register_parameter("bias", offset if bias else None)

    def forward(self, z: Tensor) -> Tensor:
        mean = self.mean(z)
        if self.bias is not None:
            mean = mean - self.bias
        return (z - along_channels(mean, z, self.dim)).to(z.dtype)

    def extra_repr(self) -> str:
        bias = ", bias=False" if self.bias is None else ""
        return super().extra_repr() + bias


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
