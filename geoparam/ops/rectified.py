"""What torch.compile sees on a GPU of r relu(z + b) and of centring: one pass backward.

A compiler fuses the forward pass by itself. Backward it adds up r's gradient, then writes z's,
then adds that up for the bias: three passes over memory, where the kernel of `columns` makes one.
So there are ops, which are expanded when AOTAutograd makes its graph functional (`expansion`):

    rectified(z, bias, scale)   y = scale relu(z + bias)    plain operations; backward, the kernel
    centred(x, mean)            y = x - E[x]                plain operations both ways
    added(z, bias)              y = z + bias                plain operations both ways

The last takes a bias in parts (`means`), all of them the same. Its backward is there for what it
does not do: by torch's own, z's gradient would be rounded, which changes nothing, but makes it
another tensor than y's for the compiler, to be written beside it.

The gradient of what is centred is dy - (sum dy) / N, and the kernel would want it written. But it
takes the two apart: so while a graph is traced, it is remembered which gradient is such a sum. Who
else looks at that gradient, a hook or a second use of x, finds it whole; if nobody does, the
compiler drops it.

In the same way max pooling (`pooling_op`) takes apart what is centred or rectified: both grow with
what they are applied to, or fall with it where the scale is negative, so they may come after the
pool, where there is less of it; the pool adds up what the mean is of. And the gradient of
r relu(z + b) takes that of a pool's result, and moves it to its places by itself.

Everywhere else, on other devices, in torch.func, export and evaluation, there are plain operations
and no such op.
"""

import importlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from geoparam.ops import columns, expansion, implementation, means
from geoparam.ops.pooling import Window

_HAS_TRITON = implementation.has_triton()


def possible(x: Tensor) -> bool:
    """Return whether a compiler is to find the ops in a training step on `x`."""
    return (
        torch.compiler.is_compiling()
        and not expansion.is_exporting()
        and torch.is_grad_enabled()
        and x.is_floating_point()
        and x.ndim == 4
        and not torch._C._are_functorch_transforms_active()
        and forward_ad._current_level < 0
        and _served(x)
    )


def _served(x: Tensor) -> bool:
    by_kernels = expansion.COMPILED == "kernels" and implementation.KERNELS in ("auto", "triton")
    return x.is_cuda and _HAS_TRITON and by_kernels


def rectified(z: Tensor, bias: Tensor | None, scale: Tensor) -> Tensor:
    """Return scale relu(z + bias), where channels are in dimension 1."""
    return torch.ops.geoparam.rectified(z, bias, scale)


def centred(x: Tensor, mean: Tensor) -> Tensor:
    """Return x less its own mean, whose gradient is x's too."""
    return torch.ops.geoparam.centred(x, mean)


def added(z: Tensor, bias: Tensor) -> Tensor:
    """Return z + bias, where channels are in dimension 1 and the bias is (parts, channels)."""
    return torch.ops.geoparam.added(z, bias)


# --- as plain operations ------------------------------------------------------------------------


def _rectified(z: Tensor, bias: Tensor | None, scale: Tensor) -> Tensor:
    return _active(z, bias) * columns.along(scale, z, 1).to(z.dtype)


def _active(z: Tensor, bias: Tensor | None) -> Tensor:
    return (z if bias is None else z + columns.along(bias, z, 1).to(z.dtype)).relu()


def _rectified_backward(
    grad: Tensor, z: Tensor, bias: Tensor | None, scale: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    a = _active(z, bias)
    grad_z = torch.where(a <= 0, 0, grad * columns.along(scale, z, 1).to(grad.dtype))
    return grad_z, _sums(grad_z), _sums(grad * a)


def _centred(x: Tensor, mean: Tensor) -> Tensor:
    return (x - columns.along(mean, x, 1)).to(x.dtype)


def _centred_backward(grad: Tensor) -> Tensor:
    return _spread(grad, _shift(grad, grad))


def _added(z: Tensor, bias: Tensor) -> Tensor:
    return (z + columns.along(bias[0], z, 1)).to(z.dtype)


def _shift(grad: Tensor, summed: Tensor) -> Tensor:
    """Return -(sum dy) / N, by sums in parts where a compiler gathers those on the way.

    They are those of `summed`, of which there may be fewer numbers.
    """
    _, channels, height, width = summed.shape
    count = grad.numel() // grad.shape[1]
    if means.number_of_parts(summed, channels, height * width) > 0:
        return torch.ops.geoparam.mean_of_parts(means.sums(summed), -count, None, None, 0.0)
    return _sums(summed) / -count


def _spread(grad: Tensor, shift: Tensor) -> Tensor:
    return (grad + columns.along(shift, grad, 1)).to(grad.dtype)


def _sums(x: Tensor) -> Tensor:
    return x.sum((0, 2, 3), dtype=columns.wide(x))


# --- the ops ------------------------------------------------------------------------------------

_OPS: dict[str, Callable[..., Any]] = {
    "rectified(Tensor z, Tensor? bias, Tensor scale) -> Tensor": _rectified,
    "rectified_backward(Tensor grad, Tensor z, Tensor? bias, Tensor scale)"
    " -> (Tensor, Tensor, Tensor)": _rectified_backward,
    "centred(Tensor x, Tensor mean) -> Tensor": _centred,
    "centred_backward(Tensor grad) -> Tensor": _centred_backward,
    "added(Tensor z, Tensor bias) -> Tensor": _added,
}
for _schema, _plain in _OPS.items():
    _name, _, _signature = _schema.partition("(")
    torch.library.define(f"geoparam::{_name}", f"({_signature}")
    torch.library.impl(f"geoparam::{_name}", "CompositeExplicitAutograd", _plain)
    torch.library.register_fake(f"geoparam::{_name}", _plain)


def _rectified_context(ctx: Any, inputs: tuple, output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _rectified_gradients(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    z, bias, scale = ctx.saved_tensors
    twice = torch.is_grad_enabled()  # somebody will differentiate once more
    backward = _rectified_backward if twice else torch.ops.geoparam.rectified_backward
    grad_z, grad_bias, grad_scale = backward(grad, z, bias, scale)
    by_bias = None if bias is None else grad_bias.to(bias.dtype)
    return grad_z, by_bias, grad_scale.to(scale.dtype)


def _centred_gradients(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
    twice = torch.is_grad_enabled()
    return (_centred_backward if twice else torch.ops.geoparam.centred_backward)(grad), None


def _added_gradients(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
    return grad, means.sums(grad)


torch.library.register_autograd(
    "geoparam::rectified", _rectified_gradients, setup_context=_rectified_context
)
torch.library.register_autograd("geoparam::centred", _centred_gradients)
torch.library.register_autograd("geoparam::added", _added_gradients)


# --- expanded in a compiler's graph -------------------------------------------------------------

_shifted = expansion.Notes()  # a gradient: one without its shift, and the shift
_centrings = expansion.Notes()  # what is centred: x and its mean
_rectifications = expansion.Notes()  # scale relu(z + bias): z, bias and scale
_moved = expansion.Notes()  # a pool's gradient: that of its result, places and windows


def _expanded_rectified(z: Tensor, bias: Tensor | None, scale: Tensor) -> Tensor:
    y = _rectified(z, bias, scale)
    if has_kernel(z):
        _rectifications.write(y, z, bias, scale)
    return y


def _expanded_rectified_backward(
    grad: Tensor, z: Tensor, bias: Tensor | None, scale: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    if not has_kernel(z):
        return _rectified_backward(grad, z, bias, scale)
    grad, shift = _shifted.read(grad) or (grad, None)
    if (moved := _moved.read(grad)) is not None:
        kernels = importlib.import_module("geoparam.ops.pooling_triton")
        return kernels.rectify_backward(*moved, z, shift, scale, bias, traced=True)
    kernels = importlib.import_module("geoparam.ops.columns_triton")
    grad = grad.to(z.dtype).contiguous(memory_format=torch.channels_last)
    return kernels.rectify_backward(grad, z, 1, shift, scale, bias=bias, traced=True)


def _expanded_centred(x: Tensor, mean: Tensor) -> Tensor:
    whole = _centred(x, mean)
    _centrings.write(whole, x, mean)
    return whole


def _expanded_centred_backward(grad: Tensor) -> Tensor:
    few, *_ = _moved.read(grad) or (grad,)  # the same numbers, and sums, besides zeros
    shift = _shift(grad, few)
    whole = _spread(grad, shift)
    _shifted.write(whole, grad, shift)
    return whole


def pooled(x: Tensor, window: Window) -> tuple[Tensor, Tensor]:
    """Return the largest of windows, and their places, while a compiler traces a graph.

    What is centred or rectified is not written as such before it is pooled, if nobody else wants
    it, and its mean is gathered on the way.
    """
    kernels = importlib.import_module("geoparam.ops.pooling_triton")
    x, mean = _centrings.read(x) or (x, None)
    z, bias, scale = _rectifications.read(x) or (x, None, None)
    if scale is None:
        y, place, _ = kernels.pool(z, window, traced=True)
    else:
        if mean is not None and window.tiles(*z.shape[2:]) and means.may_be_taken_again(mean):
            y, place, parts = kernels.rectify(z, window, scale, bias, traced=True)
            mean = means.taken_again(mean, parts)
        else:
            y, place, _ = kernels.pool(z, window, scale, traced=True)
        y = _rectified(y, bias, scale)
    return (y if mean is None else _expanded_centred(y, mean)), place


def parts_of(grad: Tensor, z: Tensor) -> tuple[Tensor, Tensor | None] | None:
    """Return the gradient of r relu(z + b) without a shift of its channels, and the shift.

    None, where no kernel takes them as they are.
    """
    grad, shift = _shifted.read(grad) or (grad, None)
    return (grad, shift) if has_kernel(z) and _moved.read(grad) is None else None


def note_moved(grad_x: Tensor, grad: Tensor, place: Tensor, window: Window) -> Tensor:
    """Return `grad_x`, which is `grad` moved to its places in windows, with a note of that."""
    _moved.write(grad_x, grad, place, window)
    return grad_x


def has_kernel(z: Tensor) -> bool:
    """Return whether the kernel reads z as it lies; other layouts are the compiler's choice."""
    known = all(type(size) is int for size in z.shape)
    return known and z.numel() > 0 and z.is_contiguous(memory_format=torch.channels_last)


expansion.expand("rectified", _expanded_rectified, always=True)
expansion.expand("rectified_backward", _expanded_rectified_backward, always=True)
expansion.expand("centred", _expanded_centred, always=True)
expansion.expand("added", _added, always=True)
expansion.expand("centred_backward", _expanded_centred_backward, always=True)
