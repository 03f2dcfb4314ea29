"""Layers with plain weights and input mean normalization (IMN).

    z = w^T x + (b - w^T E[x])

The weight is an ordinary Parameter under its ordinary name, so that checkpoints, optimizers and
tools for nn.Linear and nn.Conv2d work as before, `GeometricOptimizer` too. The state also has
`running_mean` and `num_batches_tracked`. `convert_(norm="imn", weights="plain")` replaces a
model's layers by these, with the same Parameters.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.parametrize import type_before_parametrizations

from geoparam.centred_map import map_centred, shift_bias
from geoparam.norm import MOMENTUM, TRACKING, TrackedMean


class InputMeanLayer(TrackedMean):
    """What the layers share; mixed in before the torch.nn layer."""

    weight: Any
    bias: Any
    _plain: type[nn.Module]

    def __init__(self, *arguments: Any, momentum: float | None = MOMENTUM, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._start(momentum)

    def _start(self, momentum: float | None) -> None:
        """Start a running mean of the input."""
        layer: Any = self
        kernel_size: tuple[int, ...] = getattr(self, "kernel_size", ())
        channels = layer.in_channels if kernel_size else layer.in_features
        dim = -1 - len(kernel_size)
        self._start_tracking(channels, momentum, dim, self.weight.device, self.weight.dtype)

    def forward(self, input: Tensor) -> Tensor:  # torch's name for it
        return map_centred(self, self, input, self.weight, self.bias)

    def _map(self, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        """Return w^T x + bias; convolutions pad as torch's do."""
        return self._conv_forward(x, weight, bias)  # type: ignore[operator]

    @property
    def base_layer(self) -> nn.Module:
        """PEFT, and torch.jit.script, read this attribute; both are refused here."""
        raise ValueError(
            "Fold the model first (geoparam.fold_): torch.jit.script cannot read this layer, and "
            "an adapter changes its weight, so that the input's mean times that change would have "
            "to be added to its bias on merging."
        )

    def __dir__(self) -> list[str]:
        """Leave `base_layer` out: torch.jit.trace reads every attribute that is listed."""
        return [name for name in super().__dir__() if name != "base_layer"]

    @torch.no_grad()
    def fold(self) -> tuple[Tensor, Tensor]:
        """Return the weight and bias of the plain layer that does the same in evaluation."""
        bias = shift_bias(self.bias, self.weight, self.running_mean)
        return self.weight, bias.to(self.weight.dtype)

    def reset_parameters(self) -> None:
        """Draw a new weight as torch.nn does, and forget all batches."""
        super().reset_parameters()  # type: ignore[misc]
        if "running_mean" in self._buffers:
            self.reset_running_stats()

    def extra_repr(self) -> str:
        text = f"{super().extra_repr()}, momentum={self.momentum}"
        if self.frozen:
            text += ", frozen=True"
        return text


class InputMeanLinear(InputMeanLayer, nn.Linear):
    """nn.Linear of an input whose mean over all dimensions but the last is subtracted.

    Example:
        >>> layer = InputMeanLinear(3, 2)
        >>> layer(torch.randn(4, 3)).mean(dim=0).allclose(layer.bias, atol=1e-6)
        True
        >>> list(layer.state_dict())
        ['weight', 'bias', 'running_mean', 'num_batches_tracked']
    """

    _plain = nn.Linear

    def _map(self, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return F.linear(x, weight, bias)


class InputMeanConv1d(InputMeanLayer, nn.Conv1d):
    """nn.Conv1d with input mean normalization; see `InputMeanConv2d`."""

    _plain = nn.Conv1d


class InputMeanConv2d(InputMeanLayer, nn.Conv2d):
    """nn.Conv2d of an input whose channels' means over batch and positions are subtracted.

    They are subtracted as one constant per output channel, also where zeros are padded.

    Example:
        >>> InputMeanConv2d(3, 8, 3, padding=1)(torch.randn(2, 3, 5, 5)).shape
        torch.Size([2, 8, 5, 5])
    """

    _plain = nn.Conv2d


class InputMeanConv3d(InputMeanLayer, nn.Conv3d):
    """nn.Conv3d with input mean normalization; see `InputMeanConv2d`."""

    _plain = nn.Conv3d


_KINDS: tuple[Any, ...] = (InputMeanLinear, InputMeanConv1d, InputMeanConv2d, InputMeanConv3d)


def adopt(layer: nn.Module, momentum: float | None = MOMENTUM, centred: bool = True) -> Any:
    """Return a layer with the Parameters and options and hooks of `layer`, and with a bias.

    If `centred`, it subtracts the mean of its input; else it is of the same kind as `layer`.

    Example:
        >>> conv = nn.Conv2d(3, 8, 3, bias=False)
        >>> layer = adopt(conv)
        >>> type(layer).__name__, layer.weight is conv.weight
        ('InputMeanConv2d', True)
    """
    kind = next(kind for kind in _KINDS if isinstance(layer, kind._plain))
    new = copy_as(kind if centred else type(layer), layer)
    if new.bias is None:
        new.bias = nn.Parameter(new.weight.detach().new_zeros(len(new.weight)))
    if centred:
        new._start(momentum)
        new.__dict__["_plain"] = type(layer)  # may be a user's subclass
    return new


def release(layer: nn.Module) -> Any:
    """Return the torch.nn layer with the same Parameters and options, without the mean."""
    kind = getattr(layer, "_plain", type_before_parametrizations(layer))
    plain = copy_as(kind, layer)
    plain._modules.pop("parametrizations", None)
    plain.__dict__.pop("_plain", None)
    if isinstance(layer, TrackedMean):
        for name in TRACKING:
            plain._buffers.pop(name, None)
            plain.__dict__.pop(name, None)
    return plain


def copy_as(kind: type[nn.Module], layer: nn.Module) -> Any:
    """Return a module of another class with the state, options and hooks of `layer`."""
    new = kind.__new__(kind)
    new.__dict__.update(layer.__dict__)
    for key in ("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set"):
        new.__dict__[key] = layer.__dict__[key].copy()
    return new
