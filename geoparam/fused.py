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
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from geoparam.notes import note, whole
from geoparam.ops import columns, direct, shifted
from geoparam.routes import Route
from geoparam.sums import (
    bystander,
    gradient_partials,
    is_beside,
    is_plain,
    is_watched,
)

DEVICES = {"cuda", "cpu"}


def eligible(x: Tensor) -> bool:
    """Return whether a training step on `x` may be taken in few passes."""
    return (
        not torch.compiler.is_compiling()
        and torch.is_grad_enabled()
        and direct.possible(x)
        and ("cuda" if x.is_cuda else x.device.type) in DEVICES
        and x.is_floating_point()
        and x.numel() > 0
        and not x.is_inference()  # it has no version
        and columns.worthwhile(x)
    )


# --- ReLU ---------------------------------------------------------------------------------------


class ReLU(nn.ReLU):
    """nn.ReLU that adds up the channels of its result in the same pass, for who asks next.

    Example:
        >>> ReLU()(torch.tensor([-1., 2.]))
        tensor([0., 2.])
    """

    def forward(self, x: Tensor) -> Tensor:
        inplace = self.inplace
        if (
            not (self.training and eligible(x) and x.requires_grad)
            or x.ndim not in (2, 4, 5)  # where channels are in dimension 1
            or (inplace and (x.is_leaf or x._is_view()))
        ):
            return F.relu(x, inplace=inplace)
        y, sums = _rectify(x, inplace)
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
        grad_x, partial, _ = columns.rectify_backward(grad, y, 1, grad_sums, whole=False)
        note(grad_x, 1, partial)
        return grad_x, None


# Nobody but autograd looks on, so what Function.apply sees to for others is left out.
_rectify = super(torch.autograd.Function, _Rectify).apply


def _spread(grad: Tensor | None, grad_sums: Tensor | None, y: Tensor) -> Tensor:
    """Return the whole gradient of y, from its own and that of its sums."""
    grad = torch.zeros_like(y) if grad is None else grad
    return grad if grad_sums is None else grad + columns.along(grad_sums, y, 1)


# --- convolutions -------------------------------------------------------------------------------


def convolution(
    x: Tensor,
    stored: Tensor,
    r: Tensor,
    lam: Tensor | None,
    total: Tensor | None,
    running: tuple[Tensor, Tensor] | None,
    route: Route,
) -> Tensor:
    """Return r (u * (x - mean) + lam), or r relu(u * (x - mean) + lam), and note its sums.

    The mean, of the channels' sums `total`, is subtracted as one constant per unit, u^T mean; the
    `running` mean of batches makes its step.
    """
    beside = total is not None and is_beside(total, x)
    leaf = bystander().leaf if beside else None
    y, sums = _convolve(x, stored, r, lam, total, leaf, running, route)
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
        running: tuple[Tensor, Tensor] | None,
        route: Route,
    ) -> tuple[Tensor, Tensor | None]:
        ctx.input = None if leaf is None else weakref.ref(x)
        ctx.route = route
        weight, bias = _parameters(stored, r, lam, total, running, route)
        y, sums, a, added = _mapped(x, weight, bias, route), None, None, None
        if route.relu:
            y, sums, a, added = _rectified(y, bias, r, route)
        ctx.save_for_backward(x, stored, r, lam, total, weight, a, added)
        ctx.set_materialize_grads(False)
        return y, sums

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None, grad_sums: Tensor | None) -> tuple:
        route: Route = ctx.route
        *inputs, weight, a, bias = ctx.saved_tensors
        x, stored, r, lam, total = inputs
        if grad is None and grad_sums is None:
            return (None,) * 8
        if not is_plain(grad, grad_sums):
            needed = ctx.needs_input_grad
            return _shared_out(ctx, *_readable_backward(inputs, route, grad, grad_sums, needed))
        grad_bias = by_scale = None
        if a is not None:
            grad = torch.zeros_like(a) if grad is None else grad
            grad, grad_bias, by_scale = columns.rectify_backward(
                grad, a, 1, grad_sums, r, bias=bias, lent=not _is_looked_on()
            )
        assert grad is not None
        if lam is None and total is None:
            grad_bias = None
        elif grad_bias is None:
            grad_bias = gradient_partials(grad, 1)
        grad_x, grad_weight = _convolution_backward(grad, x, weight, route, ctx.needs_input_grad)
        grad_stored, grad_r, grad_lam, grad_total = _parameters_backward(
            grad_weight, grad_bias, (stored, r, lam, total, weight), route
        )
        grad_r = by_scale if grad_r is None else grad_r
        return _shared_out(ctx, grad_x, grad_stored, grad_r, grad_lam, grad_total)


_convolve = super(torch.autograd.Function, _Convolution).apply


def _is_looked_on() -> bool:
    """Return whether a mode of torch's sees what operations are given, and may keep it."""
    return torch._C._len_torch_function_stack() + torch._C._len_torch_dispatch_stack() > 0


def _shared_out(ctx: Any, *found: Tensor | None) -> tuple[Tensor | None, ...]:
    """Return all gradients, that of the sums as a part of x's where that is looked at."""
    grad_x, *between, grad_total = found
    if ctx.input is None:
        return *found, None, None, None
    nothing = bystander().gradient()
    if grad_x is None or grad_total is None or not is_watched(ctx.input()):
        return *found, nothing, None, None
    grad_x = (grad_x + columns.along(grad_total, grad_x, 1)).to(grad_x.dtype)
    return grad_x, *between, None, nothing, None, None


def _parameters(
    stored: Tensor,
    r: Tensor,
    lam: Tensor | None,
    total: Tensor | None,
    running: tuple[Tensor, Tensor] | None,
    route: Route,
) -> tuple[Tensor, Tensor | None]:
    """Return the weight and the bias."""
    how = route.how
    if total is not None and not route.stores_weight:
        return shifted.forward(stored, r, lam, total, running, how)
    inside = r if how.inside else None
    weight = stored if route.stores_weight else shifted.weight_of(stored, inside, how)
    if total is not None:
        bias = columns.shifted_bias(weight, inside, lam, total, how.numbers, running, how.momentum)
        return weight, bias
    if lam is None:
        return weight, None
    return weight, (lam if inside is None else inside * lam).to(weight.dtype)


def _parameters_backward(
    grad: Tensor, grad_bias: Tensor | None, inputs: tuple[Any, ...], route: Route
) -> tuple[Tensor | None, ...]:
    """Return the gradients of stored, r, lam and total, where r's is not that of a scale."""
    stored, r, lam, total, weight = inputs
    how, by_weight, by_bias, grad_lam, grad_total = route.how, None, None, None, None
    if total is not None and not route.stores_weight:
        assert grad_bias is not None
        return shifted.backward(grad, grad_bias, stored, r, lam, total, weight, how)
    inside = r if how.inside else None
    if grad_bias is not None:
        grad_bias = whole(grad_bias)
        if total is not None:
            grad, by_bias, grad_lam, grad_total = columns.shifted_bias_backward(
                grad_bias, weight, grad, inside, lam, total, how.numbers
            )
        else:
            by_bias = None if inside is None else grad_bias * lam
            grad_lam = grad_bias if inside is None else grad_bias * inside
    if not route.stores_weight:
        grad, by_weight = shifted.gradients_of(grad, stored, inside, how)
    grad_r = by_weight if by_bias is None else by_bias
    if by_weight is not None and by_bias is not None:
        grad_r = by_weight + by_bias
    return grad, None if inside is None else grad_r, grad_lam, grad_total


def _mapped(x: Tensor, weight: Tensor, bias: Tensor | None, route: Route) -> Tensor:
    """Return w * x + b; where a ReLU follows, w * x alone if the bias would cost a pass."""
    if bias is not None and route.relu and _uses_epilogue(route):
        return torch.cudnn_convolution_relu(x, weight, bias, *route.geometry)
    if bias is not None and not route.relu and route.is_product and weight.is_contiguous():
        return _matrix_product(x, weight, bias)
    if x.is_cpu:  # here the bias costs nothing
        return route.convolve(x, weight, bias)
    z = route.convolve(x, weight)
    if bias is None or route.relu:
        return z
    return columns.rectify(z, 1, bias, relu=False, inplace=True, summed=False)[0]


def _rectified(
    z: Tensor, bias: Tensor | None, r: Tensor, route: Route
) -> tuple[Tensor, Tensor | None, Tensor, Tensor | None]:
    """Return r relu(z + b) and its sums, and z and b, unless b is in z already."""
    added = None if z.is_cpu or _uses_epilogue(route) else bias
    return *columns.rectify(z, 1, added, r), z, added


def _uses_epilogue(route: Route) -> bool:
    return route.has_epilogue and torch.backends.cudnn.enabled


def _matrix_product(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Return a 1x1 convolution as a product of matrices, to which the bias costs nothing.

    The result is written through a view, so that it is no view itself: `out += identity` may
    follow.
    """
    images, inputs, height, width = x.shape
    units, rows = weight.shape[0], images * height * width
    strides = height * width * units, 1, width * units, units
    size = images, units, height, width
    y = torch.empty_strided(size, strides, dtype=x.dtype, device=x.device)
    matrix = weight.as_strided((inputs, units), (1, inputs))
    out = y.as_strided((rows, units), (units, 1))
    torch.addmm(bias, x.as_strided((rows, inputs), (inputs, 1)), matrix, out=out)
    return y


def _convolution_backward(
    grad: Tensor, x: Tensor, weight: Tensor, route: Route, needed: tuple[bool, ...]
) -> tuple[Tensor | None, Tensor]:
    stride, padding, dilation, groups = route.geometry
    none, mask = (0,) * len(stride), (needed[0], True, False)
    grad_x, grad_weight, _ = torch.ops.aten.convolution_backward.default(
        grad, x, weight, None, stride, padding, dilation, False, none, groups, mask
    )
    return grad_x, grad_weight


def _readable_backward(
    inputs: list[Any],
    route: Route,
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
        y, sums = _readable(route, *inputs)
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
    route: Route,
    x: Tensor,
    stored: Tensor,
    r: Tensor,
    lam: Tensor | None,
    total: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Return what `convolution` computes, and the sums, as plain operations."""
    how = route.how
    weight = stored
    if not route.stores_weight:
        weight = shifted.readable_weight(stored, r if how.inside else None, how)
    y = route.convolve(x, weight)
    if lam is not None:
        y = y + columns.along(r * lam if how.inside else lam, y, 1)
    if total is not None:
        response = columns.response(weight, total / how.numbers)
        y = y - columns.along(response, y, 1)
    y = y.to(x.dtype)
    y = (y.relu() * columns.along(r, y, 1)).to(x.dtype) if route.relu else y
    others = [d for d in range(y.ndim) if d != 1]
    return y, y.sum(others, dtype=columns.wide(y))
