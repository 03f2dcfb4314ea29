"""Training in few passes: a layer with its ReLU and the mean of what comes out, as one step.

Eager torch reads and writes a convolution's output once for its bias, again for its ReLU, again
for the mean that the next layer subtracts, and all of that again for the gradients. Here

- `ReLU`, which `convert_` puts in the place of nn.ReLU, and a convolution with its own ReLU add up
  each channel of their result on the way, and take the gradient of these sums back into the pass
  that masks the gradient, where they add that up too: it is the gradient of a bias;
- the sums travel beside the tensor (`sums`), from where it is made to the layer that asks for the
  mean. Where a note is lost the mean is computed, which costs a pass and nothing else;
- a convolution is one autograd.Function with its bias and the mean in it, so that a bias is added
  where it costs least: by the matrix product, or by cuDNN together with the ReLU.

The functions are those of `unit`, `norm` and nn.ReLU, equal to rounding; second derivatives and
batches of gradients go through the readable form. All of this is for training in eager mode, on
`DEVICES`, where there are kernels for it: a compiler fuses by itself, and tracing, torch.func and
forward mode want to see plain operations.
"""

import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from geoparam import ops
from geoparam.notes import note
from geoparam.ops import columns, direct, implementation
from geoparam.sums import bystander, gradient_sums, is_beside, is_plain, is_watched

DEVICES = {"cuda", "cpu"}


def eligible(x: Tensor) -> bool:
    """Return whether a training step on `x` may be taken in few passes."""
    return (
        not torch.compiler.is_compiling()
        and x.device.type in DEVICES
        and torch.is_grad_enabled()
        and x.is_floating_point()
        and direct.possible(x)
        and x.numel() > 0
        and not x.is_inference()  # it has no version
        and columns.worthwhile(x)
    )


# --- ReLU and centring --------------------------------------------------------------------------


class ReLU(nn.ReLU):
    """nn.ReLU that adds up the channels of its result in the same pass, for who asks next.

    Example:
        >>> ReLU()(torch.tensor([-1., 2.]))
        tensor([0., 2.])
    """

    def forward(self, x: Tensor) -> Tensor:
        if not (self.training and eligible(x) and x.requires_grad):
            return super().forward(x)
        if x.ndim not in (2, 4, 5):  # where channels are in dimension 1
            return super().forward(x)
        if self.inplace and (x.is_leaf or x._is_view()):
            return super().forward(x)
        y, sums = _Rectify.apply(x, self.inplace)
        note(y, 1, sums)
        return y


def is_relu(activation: Callable[[Tensor], Tensor]) -> bool:
    """Return whether an activation is torch's ReLU, and no hook looks at it."""
    if isinstance(activation, nn.ReLU):
        hooks = activation._forward_hooks, activation._forward_pre_hooks
        backward = activation._backward_hooks, activation._backward_pre_hooks
        looked_at = any((*hooks, *backward)) or nn.modules.module._has_any_global_hook()
        own = type(activation) in (nn.ReLU, ReLU) and "forward" not in activation.__dict__
        return own and not looked_at
    return activation in (torch.relu, F.relu)


class _Rectify(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, inplace: bool) -> tuple[Tensor, Tensor | None]:
        y, sums = columns.rectify(x, 1, inplace=inplace)
        if inplace:
            ctx.mark_dirty(x)
        ctx.save_for_backward(y)
        ctx.set_materialize_grads(False)
        return y, sums

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None, grad_sums: Tensor | None) -> tuple[Any, None]:
        (y,) = ctx.saved_tensors
        if grad is None and grad_sums is None:
            return None, None
        if not is_plain(grad, grad_sums):
            spread = _spread(grad, grad_sums, y)
            return torch.where(y <= 0, 0, spread).to(y.dtype), None
        grad = torch.zeros_like(y) if grad is None else grad
        grad_x, sums, _ = columns.rectify_backward(grad, y, 1, grad_sums)
        note(grad_x, 1, sums)
        return grad_x, None


def _spread(grad: Tensor | None, grad_sums: Tensor | None, y: Tensor) -> Tensor:
    """Return the whole gradient of y, from its own and that of its sums."""
    grad = torch.zeros_like(y) if grad is None else grad
    return grad if grad_sums is None else grad + columns.along(grad_sums, y, 1)


class Centre(torch.autograd.Function):
    """x - mean per channel; the gradient of x passes through untouched."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, mean: Tensor, dim: int) -> Tensor:
        ctx.dim, ctx.dtype = dim, mean.dtype
        return columns.rectify(x, dim, -mean, relu=False, summed=False)[0]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        others = [d for d in range(grad.ndim) if d != ctx.dim % grad.ndim]
        if not is_plain(grad):
            return grad, -grad.sum(others, dtype=ctx.dtype), None
        return grad, -gradient_sums(grad, ctx.dim).to(ctx.dtype), None


# --- convolutions -------------------------------------------------------------------------------


class Weighing(NamedTuple):
    """How a weight is made of latitudes: the arguments of `ops.weight`."""

    natural: bool
    dtype: torch.dtype
    shape: tuple[int, ...]
    channels_last: bool


class Geometry(NamedTuple):
    """Where a convolution looks."""

    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int


class Means(NamedTuple):
    """How many numbers each channel of the input has, and the running mean of batches to move."""

    numbers: int
    running: tuple[Tensor, Tensor] | None
    momentum: float


class Call(NamedTuple):
    """How a convolution is applied.

    Attributes:
        relu: Whether the layer has a ReLU of its own: then r is outside of it, as a scale, and
            the result's sums are gathered.
        weighing: How the weight is made of what is stored; None if that is the weight already.
        means: If the mean of the input is subtracted.
    """

    geometry: Geometry
    relu: bool
    weighing: Weighing | None
    means: Means | None

    def weight(self, stored: Tensor, r: Tensor) -> Tensor:
        if self.weighing is None:
            return stored
        _, dtype, shape, channels_last = self.weighing
        inside = None if self.relu else r
        return implementation.forward(stored, inside, dtype, shape, channels_last)

    def convolve(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        stride, padding, dilation, groups = self.geometry
        none = (0,) * len(stride)
        return torch.convolution(x, weight, bias, stride, padding, dilation, False, none, groups)


def convolution(
    x: Tensor, stored: Tensor, r: Tensor, lam: Tensor | None, total: Tensor | None, call: Call
) -> Tensor:
    """Return r (u * (x - mean) + lam), or r relu(u * (x - mean) + lam), and note its sums.

    The mean, of the channels' sums `total`, is subtracted as one constant per unit, u^T mean.
    """
    beside = total is not None and is_beside(total, x)
    leaf = bystander().leaf if beside else None
    y, sums = _Convolution.apply(x, stored, r, lam, total, leaf, call)
    if sums is not None:
        note(y, 1, sums)
    return y


class _Convolution(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        stored: Tensor,
        r: Tensor,
        lam: Tensor | None,
        total: Tensor | None,
        leaf: Tensor | None,
        call: Call,
    ) -> tuple[Tensor, Tensor | None]:
        ctx.input = None if leaf is None else weakref.ref(x)
        weight = call.weight(stored, r)
        y = a = _mapped(x, weight, _bias(weight, r, lam, total, call), call)
        sums = None
        if call.relu:
            y, sums = columns.rectify(a, 1, None, r, relu=False)
        ctx.call = call
        ctx.save_for_backward(x, stored, r, lam, total, weight, a if call.relu else None)
        ctx.set_materialize_grads(False)
        return y, sums

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None, grad_sums: Tensor | None) -> tuple:
        call: Call = ctx.call
        *inputs, weight, a = ctx.saved_tensors
        x, stored, r, lam, total = inputs
        if grad is None and grad_sums is None:
            return (None,) * 7
        if not is_plain(grad, grad_sums):
            needed = ctx.needs_input_grad
            return _shared_out(ctx, *_readable_backward(inputs, call, grad, grad_sums, needed))
        grad_bias = by_scale = by_bias = by_weight = grad_lam = grad_total = None
        if a is not None:
            grad = torch.zeros_like(a) if grad is None else grad
            grad, grad_bias, by_scale = columns.rectify_backward(grad, a, 1, grad_sums, r)
        assert grad is not None
        grad_x, grad_stored = _convolution_backward(grad, x, weight, call, ctx.needs_input_grad)
        inside = None if call.relu else r
        if lam is not None or total is not None:
            grad_bias = gradient_sums(grad, 1) if grad_bias is None else grad_bias
            if total is None or call.means is None:
                by_bias = None if inside is None else grad_bias * lam
                grad_lam = grad_bias if inside is None else grad_bias * inside
            else:
                grad_stored, by_bias, grad_lam, grad_total = columns.shifted_bias_backward(
                    grad_bias, weight, grad_stored, inside, lam, total, call.means.numbers
                )
        if call.weighing is not None:
            grad_stored, by_weight = implementation.backward(
                grad_stored, stored, inside, call.weighing.natural
            )
        parts = [by_scale, by_bias, None if inside is None else by_weight]
        found = grad_x, grad_stored, _sum(parts), grad_lam, grad_total
        return _shared_out(ctx, *found)


def _shared_out(ctx: Any, *found: Tensor | None) -> tuple[Tensor | None, ...]:
    """Return all gradients, that of the sums as a part of x's where that is looked at."""
    grad_x, *between, grad_total = found
    if ctx.input is None or grad_x is None or grad_total is None:
        return *found, None, None
    nothing = bystander().gradient
    if not is_watched(ctx.input()):
        return *found, nothing, None
    grad_x = (grad_x + columns.along(grad_total, grad_x, 1)).to(grad_x.dtype)
    return grad_x, *between, None, nothing, None


def _sum(parts: list[Tensor | None]) -> Tensor | None:
    there = [part for part in parts if part is not None]
    return None if not there else there[0] if len(there) == 1 else there[0] + there[1]


def _bias(
    weight: Tensor, r: Tensor, lam: Tensor | None, total: Tensor | None, call: Call
) -> Tensor | None:
    inside = None if call.relu else r
    if total is not None and call.means is not None:
        return columns.shifted_bias(weight, inside, lam, total, *call.means)
    if lam is None:
        return None
    return (lam if inside is None else inside * lam).to(weight.dtype)


def _mapped(x: Tensor, weight: Tensor, bias: Tensor | None, call: Call) -> Tensor:
    """Return relu(w * x + b), or without the ReLU."""
    if bias is not None and call.relu and _has_fused_relu(x, weight, call):
        return torch.cudnn_convolution_relu(x, weight, bias, *call.geometry)
    if bias is not None and not call.relu and _is_matrix_product(x, weight, call):
        return _matrix_product(x, weight, bias)
    if x.is_cpu:  # here the bias costs nothing
        z = call.convolve(x, weight, bias)
        return z.relu_() if call.relu else z
    z = call.convolve(x, weight)
    if bias is None and not call.relu:
        return z
    return columns.rectify(z, 1, bias, relu=call.relu, inplace=True, summed=False)[0]


def _has_fused_relu(x: Tensor, weight: Tensor, call: Call) -> bool:
    """Return whether cuDNN applies bias and ReLU in the convolution's own kernel, at no cost."""
    return (
        x.is_cuda
        and x.ndim == 4
        and x.dtype in (torch.bfloat16, torch.float16)
        and call.geometry.groups == 1
        and weight.shape[0] % 8 == 0
        and weight.shape[1] % 8 == 0
        and x.is_contiguous(memory_format=torch.channels_last)
        and torch.backends.cudnn.enabled
        and torch.version.hip is None
    )


def _is_matrix_product(x: Tensor, weight: Tensor, call: Call) -> bool:
    return (
        x.ndim == 4
        and weight.shape[2:] == (1, 1)
        and call.geometry.groups == 1
        and call.geometry.stride == (1, 1)
        and call.geometry.padding == (0, 0)
        and x.is_contiguous(memory_format=torch.channels_last)
        and weight.is_contiguous()
    )


def _matrix_product(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Return a 1x1 convolution as a product of matrices, to which the bias costs nothing.

    The result is written through a view, so that it is no view itself: `out += identity` may
    follow.
    """
    images, inputs, height, width = x.shape
    units, rows = weight.shape[0], images * height * width
    y = torch.empty(
        (images, units, height, width),
        dtype=x.dtype,
        device=x.device,
        memory_format=torch.channels_last,
    )
    matrix = weight.as_strided((inputs, units), (1, inputs))
    out = y.as_strided((rows, units), (units, 1))
    torch.addmm(bias, x.as_strided((rows, inputs), (inputs, 1)), matrix, out=out)
    return y


def _convolution_backward(
    grad: Tensor, x: Tensor, weight: Tensor, call: Call, needed: tuple[bool, ...]
) -> tuple[Tensor | None, Tensor]:
    stride, padding, dilation, groups = call.geometry
    none, mask = (0,) * len(stride), (needed[0], True, False)
    grad_x, grad_weight, _ = torch.ops.aten.convolution_backward.default(
        grad, x, weight, None, stride, padding, dilation, False, none, groups, mask
    )
    return grad_x, grad_weight


def _readable_backward(
    inputs: list[Any],
    call: Call,
    grad: Tensor | None,
    grad_sums: Tensor | None,
    needed: tuple[bool, ...],
) -> list[Tensor | None]:
    """Return the gradients by plain operations, which can be differentiated again.

    Inputs depend on one another (the sums on x, the weight on r) and partial derivatives are asked
    for: so each is replaced by a view of it, from which no other is reached.
    """
    create_graph = torch.is_grad_enabled()
    with torch.enable_grad():
        inputs = [None if t is None else t.view_as(t) for t in inputs]
        y, sums = _readable(call, *inputs)
    outputs = [(o, g) for o, g in ((y, grad), (sums, grad_sums)) if g is not None]
    wanted = [t for t, need in zip(inputs, needed, strict=False) if need]
    found = torch.autograd.grad(
        [o for o, _ in outputs],
        wanted,
        [g for _, g in outputs],
        create_graph=create_graph,
        allow_unused=True,
    )
    grads = iter(found)
    return [next(grads) if need else None for _, need in zip(inputs, needed, strict=False)]


def _readable(
    call: Call,
    x: Tensor,
    stored: Tensor,
    r: Tensor,
    lam: Tensor | None,
    total: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Return what `convolution` computes, and the sums, as plain operations."""
    weight = stored
    if call.weighing is not None:
        scale = None if call.relu else r
        weight = ops.weight(stored, scale, **call.weighing._asdict())
    y = call.convolve(x, weight)
    if lam is not None:
        y = y + columns.along(lam if call.relu else r * lam, y, 1)
    if total is not None and call.means is not None:
        response = columns.response(weight, total / call.means.numbers)
        y = y - columns.along(response, y, 1)
    y = y.to(x.dtype)
    y = (y.relu() * columns.along(r, y, 1)).to(x.dtype) if call.relu else y
    others = [d for d in range(y.ndim) if d != 1]
    return y, y.sum(others, dtype=columns.wide(y))
