"""Linear maps and convolutions of an input whose channels' means are subtracted.

A layer needs no centred input for this: a mean m that is the same at every position changes each
unit by one number. With w_summed, the weight summed over its kernel,

    z = conv(x, w, b - w_summed m).

`map_centred` is that formula in plain torch. In eager training a convolution also has a backward
pass of its own, in half the calls of autograd's. With n, the number of positions of x, and s, the
sum of dL/dz over the positions of z,

    dL/dx = (the convolution's) - (w_summed^T s) / n
    dL/dw = (the convolution's) - s m^T
    dL/db = s.

On a GPU, large images in channels_last get their values per channel from a Triton kernel.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import Proxy

from geoparam.functional import can_use_function, is_eager
from geoparam.kernels.selection import choose_kernels
from geoparam.norm import TrackedMean, working_type

Options = tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]
"""Stride, padding and dilation of a convolution without groups."""

LARGE = 2**22  # elements; below it, launching a kernel takes longer than torch's addition

_TORCHS_OWN = (  # of GmP convolutions there is none: they call torch's
    None,
    nn.Conv1d._conv_forward,
    nn.Conv2d._conv_forward,
    nn.Conv3d._conv_forward,
)


def map_centred(
    layer: Any, norm: TrackedMean, x: Tensor, weight: Tensor, bias: Tensor | None
) -> Tensor:
    """Return w^T (x - E[x]) + b, where `norm` has the mean and `layer._map` is w^T x + b."""
    if norm.is_own_mean and _has_own_backward(layer, x, weight):
        norm.check_input(x)
        dtype = autocast_type(x) or x.dtype
        options = layer.stride, layer.padding, layer.dilation
        return _CentredConv.apply(x.to(dtype), weight.to(dtype), bias, options, norm)

    bias = shift_bias(bias, weight, norm.mean(x))
    return layer._map(x, weight, bias.to(weight.dtype))


def shift_bias(bias: Tensor | None, weight: Tensor, mean: Tensor) -> Tensor:
    """Return b - w^T m for each unit: the bias of a layer whose input has its mean subtracted.

    The mean (channels,) is the same at every position of the kernel of `weight`
    (out, channels of its group, ...). The result is float32 or better.

    Example:
        >>> shift_bias(torch.ones(1), torch.ones(1, 2, 3, 3), torch.tensor([1., 2.]))
        tensor([-26.])
    """
    w_summed, mean = weight, mean.to(working_type(mean))
    if weight.ndim > 2:
        w_summed = weight.sum(list(range(2, weight.ndim)), dtype=mean.dtype)

    groups = mean.numel() // weight.shape[1]
    if groups > 1:  # each unit has the means of its group's channels
        mean = mean.view(groups, -1).repeat_interleave(len(weight) // groups, dim=0)

    # Autocast would compute a matrix product in half precision, and leaves these as they are.
    shift = (w_summed * mean).sum(1)
    return -shift if bias is None else bias - shift


def autocast_type(x: Tensor) -> torch.dtype | None:
    """Return the type that autocast gives to x in a linear map; None where it is left as it is."""
    if isinstance(x, Proxy):  # of a tracer, which has no type yet
        return None
    device_type = x.device.type
    if device_type == "meta" or x.dtype == torch.float64:
        return None
    if not torch.is_autocast_enabled(device_type):
        return None
    return torch.get_autocast_dtype(device_type)


def _has_own_backward(layer: Any, x: Tensor, weight: Tensor) -> bool:
    """Return whether `_CentredConv` computes this layer's map of x."""
    if not can_use_function(x, weight):
        return False
    if x.ndim < 3 or x.ndim != weight.ndim or x.numel() == 0:
        return False
    if x.dtype != weight.dtype and autocast_type(x) is None:
        return False  # torch refuses it
    if getattr(type(layer), "_conv_forward", None) not in _TORCHS_OWN:
        return False  # overridden by a subclass
    is_simple = layer.groups == 1 and layer.padding_mode == "zeros"
    return is_simple and not isinstance(layer.padding, str)


class _CentredConv(torch.autograd.Function):
    """The map of a training step; means and biases are shaped to broadcast with the weight."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        options: Options,
        norm: TrackedMean,
    ) -> Tensor:
        mean, w_summed = _average(x), _sum_kernel(weight)
        shift = (w_summed * mean).sum(list(range(1, x.ndim)))
        shifted = -shift if bias is None else bias - shift
        if _has_kernel(x):
            z = torch.convolution(x, weight, None, *_complete(options))
            _add_per_channel_(z, shifted.view(-1, 1, 1), 1.0)
        else:
            z = torch.convolution(x, weight, shifted.to(x.dtype), *_complete(options))

        norm.track(mean.flatten())
        ctx.save_for_backward(x, weight, mean, w_summed)
        ctx.options = options
        return z

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, mean, w_summed = ctx.saved_tensors
        if torch.is_grad_enabled():  # second derivatives need their graph
            mean, w_summed = _average(x), _sum_kernel(weight)

        needs_x, needs_weight, needs_bias, *_ = ctx.needs_input_grad
        grad_x, grad_weight, s = torch.ops.aten.convolution_backward.default(
            grad, x, weight, [len(weight)], *_complete(ctx.options), (needs_x, needs_weight, True)
        )
        s_column = s.view(len(s), *[1] * (x.ndim - 1))
        if needs_x:
            through_mean = (w_summed * s_column).sum(0)
            _add_per_channel_(grad_x, through_mean, -mean.numel() / x.numel())
        if needs_weight:
            grad_weight.addcmul_(s_column, mean, value=-1)
        return grad_x, grad_weight, s if needs_bias else None, None, None


def _average(x: Tensor) -> Tensor:
    """Return the means (1, channels, 1, ...) of images."""
    return x.mean([0, *range(2, x.ndim)], keepdim=True, dtype=working_type(x))


def _sum_kernel(weight: Tensor) -> Tensor:
    """Return w_summed (out, channels, 1, ...)."""
    return weight.sum([*range(2, weight.ndim)], keepdim=True, dtype=working_type(weight))


def _add_per_channel_(images: Tensor, values: Tensor, factor: float) -> None:
    """Add `factor` times `values` (channels, 1, ...) to all positions, in place."""
    if _has_kernel(images):
        from geoparam.kernels import channels_triton  # needs Triton

        rows = images.permute(0, 2, 3, 1).flatten(0, 2)
        channels_triton.add_row_(rows, values.flatten(), factor)
    else:
        images.add_(values, alpha=factor)


def _has_kernel(images: Tensor) -> bool:
    """Return whether Triton adds values per channel; autograd cannot differentiate that."""
    if images.numel() < LARGE or images.ndim != 4 or images.dtype == torch.float64:
        return False
    if torch.is_grad_enabled() or not is_eager(images) or choose_kernels(images) != "triton":
        return False
    return images.is_contiguous(memory_format=torch.channels_last)


def _complete(options: Options) -> tuple[Any, ...]:
    """Return what torch's convolution takes from the stride on."""
    is_transposed, output_padding, groups = False, [0] * len(options[0]), 1
    return *options, is_transposed, output_padding, groups
