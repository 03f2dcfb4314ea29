"""Linear maps and convolutions of an input whose channels' means are subtracted.

In a layer this needs no centred input: a mean m that is the same at every position changes each
unit by one number. With w_summed, w added up over its kernel,

    z = conv(x, w) + (b - w_summed m),

which is `shift_bias`. `map_centred` is the whole map with a backward pass of its own. With n, the
number of positions of x, and s, the sum of dL/dz over the positions of z,

    dL/dx = (the convolution's) - (w_summed^T s) / n
    dL/dw = (the convolution's) - s m^T
    dL/db = s.

It is for large tensors in eager code, where passes over memory take the time: autograd's backward
pass of a mean writes a tensor of the input's size, and torch adds one value per channel at a third
of the memory's speed. Linear layers and 1x1 convolutions add it inside the matrix product, the
others with a kernel (`channels_triton`). For small tensors autograd's own nodes are faster than
those written in Python. Compilers fuse these passes themselves; torch.func and forward mode need
torch's own ops. Second derivatives are those of the formulas above.
"""

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from geoparam.functional import is_eager
from geoparam.kernels.selection import choose_kernels

LARGE = 2**22  # elements; below it, calls cost more than passes over memory


class ConvOptions(NamedTuple):
    """What a convolution without groups has besides its weight."""

    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]


_POINTWISE = ConvOptions((1, 1), (0, 0), (1, 1))


def has_own_backward(x: Tensor, weight: Tensor | None = None) -> bool:
    """Return whether a mean of `x`, or a map of it, uses the backward pass of this module."""
    if torch.compiler.is_compiling():  # first: comparing sizes would guard on the batch's size
        return False
    return x.numel() >= LARGE and is_eager(x, weight)


def working_type(x: Tensor) -> torch.dtype:
    """Return the type of sums over x: float32 or better."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def autocast_type(device_type: str) -> torch.dtype | None:
    """Return autocast's type on a type of device, None where it is off. Meta tensors have none."""
    if device_type == "meta" or not torch.is_autocast_enabled(device_type):
        return None
    return torch.get_autocast_dtype(device_type)


def channel_mean(x: Tensor, dims: list[int]) -> Tensor:
    """Return the mean of x over `dims`, in float32 or better.

    Example:
        >>> channel_mean(torch.tensor([[1.0, 2.0], [3.0, 6.0]]), [0])
        tensor([2., 4.])
    """
    if has_own_backward(x):
        return _Mean.apply(x, dims)
    return x.mean(dim=dims, dtype=working_type(x))


def shift_bias(bias: Tensor | None, weight: Tensor, mean: Tensor) -> Tensor:
    """Return b - w^T m for each unit: the bias of a layer whose input has its mean subtracted.

    The mean (channels,) is the same at every position of the kernel of `weight`
    (out, channels of its group, ...). The result is float32 or better.

    Example:
        >>> shift_bias(torch.ones(1), torch.ones(1, 2, 3, 3), torch.tensor([1., 2.]))
        tensor([-26.])
    """
    device_type = weight.device.type
    if autocast_type(device_type) is not None:
        with _without_autocast(device_type):
            return shift_bias(bias, weight, mean)
    dtype = working_type(mean)
    mean = cast(mean, dtype)
    w_summed = _sum_kernel(weight, dtype)
    width = weight.shape[1]
    groups = mean.numel() // width

    if groups == 1 and bias is not None:
        return torch.addmv(cast(bias, dtype), w_summed, mean, alpha=-1)
    if groups == 1:
        shift = w_summed.mv(mean)
    else:
        products = w_summed.view(groups, -1, width) * mean.view(groups, 1, width)
        shift = products.sum(2).flatten()
    return -shift if bias is None else cast(bias, dtype) - shift


def map_centred(
    x: Tensor, weight: Tensor, bias: Tensor | None, options: ConvOptions | None = None
) -> tuple[Tensor, Tensor]:
    """Return w^T (x - m) + b and the mean m of each channel; see `has_own_backward`.

    Without options, x has its channels last. With them, x is a batch of images in channels_last,
    and m is subtracted as one constant per unit, also where zeros are padded. No gradient flows
    through the returned mean. Under autocast x is rounded first.

    Example:
        >>> x, weight = torch.tensor([[1.0, 2.0], [3.0, 6.0]]), torch.ones(1, 2)
        >>> z, mean = map_centred(x, weight, torch.ones(1))
        >>> z.tolist(), mean.tolist()
        ([[-2.0], [4.0]], [2.0, 4.0])
    """
    dtype = autocast_type(x.device.type)
    if dtype is None:
        return _Map.apply(x, weight, bias, options)
    with _without_autocast(x.device.type):
        return _Map.apply(cast(x, dtype), weight, bias, options)


class _Mean(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dims: list[int]) -> Tensor:
        ctx.shape, ctx.dtype, ctx.dims = x.shape, x.dtype, dims
        return x.mean(dim=dims, dtype=working_type(x))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        """Return an expanded view of one value per channel."""
        positions = ctx.shape.numel() // grad.numel()
        grad = (grad / positions).to(ctx.dtype)
        shape = [1 if dim in ctx.dims else size for dim, size in enumerate(ctx.shape)]
        return grad.view(shape).expand(ctx.shape), None


class _Map(torch.autograd.Function):
    """The map and its backward pass, in few calls of torch: each costs microseconds.

    Rows are positions of x or z, columns their channels. `w` is the weight in x's type, `w_summed`
    the weight added up over its kernel.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, options: Any
    ) -> tuple[Tensor, Tensor]:
        x_rows = _to_rows(x, options)
        mean, w, w_summed = _prepare(x_rows, weight)
        ctx.save_for_backward(x, weight, mean, w, w_summed)
        ctx.options = options
        ctx.bias_type = None if bias is None else bias.dtype
        ctx.mark_non_differentiable(mean)

        bias = mean.new_zeros(1) if bias is None else cast(bias, mean.dtype)
        shifted = torch.addmv(bias, w_summed, mean, alpha=-1)  # b - w_summed m
        if _is_product(weight, options):
            z = _make_empty(x, len(weight), options)
            z_rows = _to_rows(z, options)
            torch.addmm(cast(shifted, x.dtype), x_rows, w.flatten(1).t(), out=z_rows)
        elif _has_kernel(x):
            z = _add_row(F.conv2d(x, w, None, *options), shifted, 1.0)
        else:
            z = F.conv2d(x, w, cast(shifted, x.dtype), *options)
        return z, mean

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Any) -> tuple[Tensor | None, ...]:
        device_type = grad.device.type
        if autocast_type(device_type) is not None:  # backward() was called inside of it
            with _without_autocast(device_type):
                return _Map.backward(ctx, grad, _)

        x, weight, mean, w, w_summed = ctx.saved_tensors
        options, needs = ctx.options, ctx.needs_input_grad[:2]
        if options is not None and torch._C._has_storage(grad):  # unlike a batch of gradients
            grad = grad.contiguous(memory_format=torch.channels_last)
        if torch.is_grad_enabled():  # second derivatives need the graph of these
            mean, w, w_summed = _prepare(_to_rows(x, options), weight)

        s = _sum_rows(_to_rows(grad, options))
        through_mean = w_summed.t().mv(s) if needs[0] else None
        if _is_product(weight, options):
            grad_x, grad_weight = _backward_product(grad, x, w, options, needs, through_mean)
        else:
            grad_x, grad_weight = _backward_conv(grad, x, w, options, needs, through_mean)

        if grad_weight is not None:
            ones = [1] * (weight.ndim - 2)
            s_column, mean_row = s.view(-1, 1, *ones), mean.view(1, -1, *ones)
            grad_weight = torch.addcmul(grad_weight, s_column, mean_row, value=-1)
            grad_weight = cast(grad_weight, weight.dtype)
        grad_bias = None if ctx.bias_type is None else cast(s, ctx.bias_type)
        return grad_x, grad_weight, grad_bias, None


Gradients = tuple[Tensor | None, Tensor | None]


def _backward_product(
    grad: Tensor,
    x: Tensor,
    w: Tensor,
    options: ConvOptions | None,
    needs: tuple[bool, bool],
    through_mean: Tensor | None,
) -> Gradients:
    """Return dL/dx, and dL/dw without the mean's part, of a matrix product.

    `through_mean` is w_summed^T s, of which 1/n is subtracted from each row of dL/dx.
    """
    x_rows, grad_rows = _to_rows(x, options), _to_rows(grad, options)
    grad_x = grad_weight = None
    if through_mean is not None:
        shift = cast(through_mean * (-1 / len(x_rows)), x.dtype)
        grad_x = _from_rows(torch.addmm(shift, grad_rows, w.flatten(1)), x, options)
    if needs[1]:
        grad_weight = grad_rows.t().mm(x_rows).view(w.shape)
    return grad_x, grad_weight


def _backward_conv(
    grad: Tensor,
    x: Tensor,
    w: Tensor,
    options: ConvOptions,
    needs: tuple[bool, bool],
    through_mean: Tensor | None,
) -> Gradients:
    """Return what `_backward_product` does, of a convolution."""
    is_transposed, output_padding, groups = False, (0, 0), 1
    grad_x, grad_weight, _ = torch.ops.aten.convolution_backward(
        grad, x, w, None, *options, is_transposed, output_padding, groups, (*needs, False)
    )
    if through_mean is not None:
        positions = x.numel() // x.shape[1]
        grad_x = _add_row(grad_x, through_mean, -1 / positions)
    return grad_x, grad_weight


def _without_autocast(device_type: str) -> Any:
    """Return a context without autocast. Entering torch's takes 20 microseconds in eager code."""
    if torch.compiler.is_compiling():
        return torch.autocast(device_type, enabled=False)
    return _EagerWithoutAutocast(device_type)


class _EagerWithoutAutocast:
    def __init__(self, device_type: str) -> None:
        self.device_type = device_type

    def __enter__(self) -> None:
        torch.set_autocast_enabled(self.device_type, False)

    def __exit__(self, *_: object) -> None:
        torch.set_autocast_enabled(self.device_type, True)


def cast(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Return x.to(dtype), without a call if x has that type."""
    return x if x.dtype == dtype else x.to(dtype)


def _prepare(rows: Tensor, weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the mean of the rows, the weight in their type, and w_summed."""
    mean = _sum_rows(rows) / len(rows)
    return mean, cast(weight, rows.dtype), _sum_kernel(weight, mean.dtype)


def _is_product(weight: Tensor, options: ConvOptions | None) -> bool:
    """Return whether the map is one matrix product: a linear layer or a 1x1 convolution."""
    if options is None:
        return True
    return options == _POINTWISE and weight.shape[2:].numel() == 1


def _sum_kernel(weight: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the weight (out, channels of its group) added up over its kernel."""
    if weight.shape[2:].numel() == 1:
        return cast(weight.flatten(1), dtype)
    return weight.flatten(2).sum(2, dtype=dtype)


def _has_kernel(x: Tensor) -> bool:
    """Return whether Triton's kernels are used, which autograd cannot differentiate."""
    if x.dtype == torch.float64 or torch.is_grad_enabled() or not torch._C._has_storage(x):
        return False
    return choose_kernels(x) == "triton"


def _sum_rows(rows: Tensor) -> Tensor:
    """Return the sum of all rows, in float32 or better."""
    if _has_kernel(rows) and rows.is_contiguous():
        from geoparam.kernels import channels_triton  # needs Triton

        return channels_triton.sum_rows(rows)
    return rows.sum(dim=0, dtype=working_type(rows))


def _add_row(images: Tensor, row: Tensor, factor: float) -> Tensor:
    """Return images plus factor times one value per channel; a kernel does it in place."""
    if _has_kernel(images) and images.is_contiguous(memory_format=torch.channels_last):
        from geoparam.kernels import channels_triton

        channels_triton.add_row_(images.permute(0, 2, 3, 1).flatten(0, 2), row, factor)
        return images
    return images + (row * factor).to(images.dtype).view(-1, 1, 1)


def _to_rows(x: Tensor, options: ConvOptions | None) -> Tensor:
    """Return a matrix with a row for each position and a column for each channel."""
    rows = x if options is None else x.permute(0, 2, 3, 1)
    return rows.reshape(-1, rows.shape[-1])


def _from_rows(rows: Tensor, like: Tensor, options: ConvOptions | None) -> Tensor:
    """Undo `_to_rows` for a matrix with the rows of `like`."""
    if options is None:
        return rows.view(like.shape)
    return rows.view(like.permute(0, 2, 3, 1).shape).permute(0, 3, 1, 2)


def _make_empty(x: Tensor, channels: int, options: ConvOptions | None) -> Tensor:
    """Return a new tensor for z; not a view, which an in-place ReLU would copy."""
    if options is None:
        return x.new_empty(*x.shape[:-1], channels)
    batch, _, *size = x.shape
    layout: Any = {"memory_format": torch.channels_last}
    return torch.empty(batch, channels, *size, dtype=x.dtype, device=x.device, **layout)
