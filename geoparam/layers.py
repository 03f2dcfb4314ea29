"""Linear and convolution layers under geometric parameterization, with torch.nn's signatures."""

from typing import Any, ClassVar, Literal, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.parametrize import type_before_parametrizations

from geoparam.arguments import check_count
from geoparam.base_layer import Activation, GmPLayer, InputNorm, UnitOptions
from geoparam.coordinates import Init, Name
from geoparam.model.run import overrides
from geoparam.norm import MOMENTUM

Layer = TypeVar("Layer", bound=GmPLayer)
Conv = TypeVar("Conv", bound="_GmPConv")
PlainConv = nn.Conv1d | nn.Conv2d | nn.Conv3d


class GmPLinear(GmPLayer):
    r"""A linear layer of units r (u^T x + lam), or r g(u^T x + lam) with an activation g.

    Args:
        in_features: fan-in n of each unit.
        out_features: number of units.
        bias: if False, no lam: every boundary passes through the origin.
        activation: g; it makes the layer the papers' unit, with r outside of g.
        init: `"sphere"`, uniform directions with r = 1 and lam = 0 as in the papers' text;
            `"glorot"`, a Glorot-uniform weight turned into directions and r, as in their code;
            None leaves the parameters uninitialised.
        coordinates: `"angles"` stores `latitude` (out, n - 1), `"intrinsic"` stores `unit`
            (out, n) and needs `retract` as a hook of the optimizer.
        natural: divide the angles' gradient by the sphere's metric (bounded below by 0.01).
        input_norm: subtract the input's mean over all dimensions but the last (`InputMeanNorm`):
            z = w^T x + (b - w^T E[x]). The forms of `GmPConv2d` are all the same here.
        momentum: share of a new batch in the running mean, as in `InputMeanNorm`.

    With one input there is no angle: a buffer `sign` holds the directions, drawn at random.

    Reference:
        Chen & Ge, *Neural Characteristic Activation Analysis and Geometric Parameterization for
        ReLU Networks*, NeurIPS 2024, definition 3.3.

    Example:
        >>> layer = GmPLinear(3, 2, activation=torch.relu)
        >>> layer(torch.randn(5, 3)).shape
        torch.Size([5, 2])
        >>> layer.direction.norm(dim=1).allclose(torch.ones(2))
        True
        >>> layer
        GmPLinear(3, 2, coordinates='angles', activation=relu)
    """

    _plain = nn.Linear
    _arguments = ("in_features", "out_features")

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        activation: Activation | None = None,
        init: Init | None = "sphere",
        coordinates: Name = "angles",
        natural: bool = False,
        input_norm: InputNorm = False,
        momentum: float | None = MOMENTUM,
    ) -> None:
        check_count("in_features", in_features)
        check_count("out_features", out_features)
        options = UnitOptions(activation, init, coordinates, natural, input_norm, momentum)
        super().__init__((out_features, in_features), in_features, bias, device, dtype, options)
        self.in_features = in_features
        self.out_features = out_features
        self.transposed = False  # whether it stands for transformers' Conv1D, (in, out)

    def _map(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return F.linear(x, weight, bias)

    @classmethod
    def from_linear(
        cls, linear: nn.Linear, *, coordinates: Name = "angles", natural: bool = False
    ) -> "GmPLinear":
        """Return the layer that computes the same as `linear`.

        Example:
            >>> linear, x = nn.Linear(8, 4), torch.randn(5, 8)
            >>> torch.allclose(GmPLinear.from_linear(linear)(x), linear(x), atol=1e-5)
            True
        """
        return _convert(cls, linear, coordinates, natural)

    def to_linear(self) -> nn.Linear:
        """Return the nn.Linear that computes the same in evaluation."""
        return self._to_plain()

    def extra_repr(self) -> str:
        bias = "" if self.lam is not None else ", bias=False"
        return f"{self.in_features}, {self.out_features}{bias}{super().extra_repr()}"


class _GmPConv(GmPLayer):
    """What convolutions share; they differ in rank alone."""

    _plain: ClassVar[type[PlainConv]]
    _rank: ClassVar[int]
    _arguments = (
        "in_channels",
        "out_channels",
        "kernel_size",
        "stride",
        "padding",
        "dilation",
        "groups",
        "padding_mode",
    )
    padding_mode: str
    _reversed_padding_repeated_twice: list[int]

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: int | tuple[int, ...],
        stride: int | tuple[int, ...] = 1,
        padding: str | int | tuple[int, ...] = 0,
        dilation: int | tuple[int, ...] = 1,
        groups: int = 1,
        bias: bool = True,
        padding_mode: Literal["zeros", "reflect", "replicate", "circular"] = "zeros",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        activation: Activation | None = None,
        init: Init | None = "sphere",
        coordinates: Name = "angles",
        natural: bool = False,
        input_norm: InputNorm = False,
        momentum: float | None = MOMENTUM,
    ) -> None:
        counts = {"in_channels": in_channels, "out_channels": out_channels, "groups": groups}
        for name, count in counts.items():
            check_count(name, count)
        _check_sizes(self._rank, kernel_size=kernel_size, stride=stride, dilation=dilation)
        if not isinstance(padding, str):
            _check_sizes(self._rank, least=0, padding=padding)

        # torch's layer checks the rest, and its attributes are what _conv_forward reads.
        plain: Any = self._plain
        sizes = (in_channels, out_channels, kernel_size, stride, padding, dilation, groups)
        conv = plain(*sizes, bias=False, padding_mode=padding_mode, device="meta")

        options = UnitOptions(activation, init, coordinates, natural, input_norm, momentum)
        super().__init__(tuple(conv.weight.shape), in_channels, bias, device, dtype, options)
        for name in (*self._arguments, "output_padding", "_reversed_padding_repeated_twice"):
            setattr(self, name, getattr(conv, name))

    @property
    def _pads_zeros(self) -> bool:
        return self.padding_mode == "zeros" and any(self._reversed_padding_repeated_twice)

    def _map(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return self._plain._conv_forward(self, x, weight, bias)  # type: ignore[arg-type]

    @classmethod
    def from_conv(
        cls: type[Conv], conv: PlainConv, *, coordinates: Name = "angles", natural: bool = False
    ) -> Conv:
        """Return the layer that computes the same as `conv`.

        Example:
            >>> conv, x = nn.Conv2d(4, 6, 3, groups=2), torch.randn(1, 4, 8, 8)
            >>> torch.allclose(GmPConv2d.from_conv(conv)(x), conv(x), atol=1e-5)
            True
        """
        return _convert(cls, conv, coordinates, natural)

    def to_conv(self) -> PlainConv:
        """Return the torch.nn convolution that computes the same in evaluation."""
        return self._to_plain()

    def extra_repr(self) -> str:
        return nn.modules.conv._ConvNd.extra_repr(self) + super().extra_repr()  # type: ignore[arg-type]


class GmPConv1d(_GmPConv):
    """A 1-d convolution under geometric parameterization; see `GmPConv2d`."""

    _plain, _rank = nn.Conv1d, 1


class GmPConv2d(_GmPConv):
    r"""A 2-d convolution of units r (u^T x + lam), or r g(u^T x + lam) with an activation g.

    x is the patch under the kernel, so a unit's fan-in is kernel size times channels of its group.
    The arguments are nn.Conv2d's and then `GmPLinear`'s.

    Args:
        input_norm: subtract each input channel's mean over batch and positions. True, or
            `"bias"`, subtracts one constant per output channel, z = conv(x, w, b - w_summed E[x]),
            so that it folds into a bias and a pretrained network keeps its function. `"border"`
            centres first and pads zeros afterwards, as the papers do and as `InputMeanNorm` before
            the layer would: for their experiments. The two differ only where zeros are padded.
            Under bfloat16 autocast the bias form subtracts after rounding: a mean far above the
            deviation costs digits there.

    Example:
        >>> layer = GmPConv2d(3, 8, 3, padding=1, activation=torch.relu, input_norm=True)
        >>> layer(torch.randn(2, 3, 5, 5)).shape
        torch.Size([2, 8, 5, 5])
        >>> layer.latitude.shape
        torch.Size([8, 26])
    """

    _plain, _rank = nn.Conv2d, 2


class GmPConv3d(_GmPConv):
    """A 3-d convolution under geometric parameterization; see `GmPConv2d`."""

    _plain, _rank = nn.Conv3d, 3


def _check_sizes(rank: int, least: int = 1, **sizes: Any) -> None:
    """Raise unless each is a whole number, or one for each of `rank` dimensions."""
    for name, given in sizes.items():
        listed = given if isinstance(given, tuple | list) else [given] * rank
        if len(listed) != rank:
            raise ValueError(f"{name} is one number or {rank} of them; got {given}.")
        for size in listed:
            check_count(name, size, least)


def _convert(kind: type[Layer], plain: Any, coordinates: Name, natural: bool) -> Layer:
    """Return a layer of this kind that computes what a torch.nn layer does."""
    expected, got = kind._plain.__name__, type(plain).__name__
    if not issubclass(type(plain), kind._plain):
        raise ValueError(f"{kind.__name__} is made from an nn.{expected}; got {got}.")
    if overrides(plain, kind._plain):
        raise ValueError(f"{got} computes something else than its base class nn.{expected}.")
    layer = build_like(kind, plain, init=None, coordinates=coordinates, natural=natural)
    layer._set_affine(plain.weight, plain.bias)
    return layer


def build_like(kind: type[Layer], plain: Any, **options: Any) -> Layer:
    """Return a new layer with the sizes, type, mode, flags and attributes of a torch.nn layer."""
    weight, has_bias = plain.weight, plain.bias is not None
    arguments: dict[str, Any] = {name: getattr(plain, name) for name in kind._arguments}
    place = {"device": weight.device, "dtype": weight.dtype}
    layer = kind(**{**arguments, "bias": has_bias, **place, **options})

    trains_weight = is_trained(plain, "weight")
    for name, parameter in layer.named_parameters():
        is_bias = name == "lam" and has_bias
        parameter.requires_grad_(is_trained(plain, "bias") if is_bias else trains_weight)
    _keep_attributes(layer, plain)
    return layer.train(plain.training)


def _keep_attributes(layer: GmPLayer, plain: nn.Module) -> None:
    """Give a layer what a user has set on the torch.nn layer, and note it for folding.

    Attributes with a name that our layer uses itself only come back with folding.
    """
    new_plain = layer._new_plain("meta", layer.r.dtype, bias=True)
    set_by_torch = {*vars(new_plain), "weight", "bias"}
    extra, hidden = {}, {}
    for key, value in vars(plain).items():
        if not hasattr(layer, key):
            extra[key] = value
        elif key not in set_by_torch and not key.startswith("_"):
            hidden[key] = value
    layer.__dict__.update(extra, _extra=tuple(extra), _hidden=hidden)
    layer._made_from = type_before_parametrizations(plain)


def is_trained(plain: nn.Module, name: str) -> bool:
    """Return whether a tensor, or what it is computed from (weight_norm), learns."""
    for key, parameter in plain.named_parameters():
        if parameter.requires_grad and key.removeprefix("parametrizations.").startswith(name):
            return True
    return getattr(plain, name).requires_grad


def as_linear(weight: Tensor, bias: Tensor | None) -> nn.Linear:
    """Return the nn.Linear of a weight (out, in) and a bias that another module holds."""
    linear: Any = nn.Linear(weight.shape[1], len(weight), bias is not None, device="meta")
    linear.weight = nn.Parameter(weight, weight.requires_grad)
    linear.bias = None if bias is None else nn.Parameter(bias, bias.requires_grad)
    return linear
