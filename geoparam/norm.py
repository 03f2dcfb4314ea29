"""Normalization by the mean alone: of a layer's input (IMN) or of its pre-activation (MBN).

Both subtract a mean per channel, over the batch and all positions, and keep a running average of
it for evaluation, with the semantics of torch's BatchNorm. Neither divides by a deviation.
"""

import torch
from torch import Tensor, nn


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
        mean = torch.zeros(num_features, device=device, dtype=dtype)
        count = torch.zeros((), device=device, dtype=torch.long)
        self.register_buffer("running_mean", mean if track_running_stats else None)
        self.register_buffer("num_batches_tracked", count if track_running_stats else None)

    def forward(self, x: Tensor) -> Tensor:
        return (x - self._along_channels(self.mean(x), x)).to(x.dtype)

    def mean(self, x: Tensor) -> Tensor:
        """Return the mean (num_features,) to subtract from `x`, and track it when training."""
        self._check(x)
        if not self.training and self.running_mean is not None:
            return self.running_mean
        if x.numel() == 0:  # an empty batch has no mean
            tracked = self.running_mean
            return x.new_zeros(self.num_features) if tracked is None else tracked.clone()
        mean = self._batch_mean(x)
        if self.training and self.running_mean is not None:
            self._track(mean.detach())
        return mean

    def reset_running_stats(self) -> None:
        """Forget all batches."""
        if self.running_mean is not None and self.num_batches_tracked is not None:
            self.running_mean.zero_()
            self.num_batches_tracked.zero_()

    def _batch_mean(self, x: Tensor) -> Tensor:
        channel = self.dim % x.ndim
        others = [d for d in range(x.ndim) if d != channel]
        return x.mean(dim=others, dtype=torch.promote_types(x.dtype, torch.float32))

    def _track(self, mean: Tensor) -> None:
        assert self.running_mean is not None and self.num_batches_tracked is not None
        self.num_batches_tracked.add_(1)
        mean = mean.to(self.running_mean.dtype)
        if self.momentum is None:
            self.running_mean.lerp_(mean, self.num_batches_tracked.to(mean.dtype).reciprocal())
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
        if self.bias is None:
            return super().forward(x)
        centred = x - self._along_channels(self.mean(x), x)
        return (centred + self._along_channels(self.bias, x)).to(x.dtype)

    def extra_repr(self) -> str:
        return super().extra_repr() + ("" if self.bias is not None else ", bias=False")
