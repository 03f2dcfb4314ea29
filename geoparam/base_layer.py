"""The base class of all layers under geometric parameterization: its units' parameters.

A unit with input x (a patch, for a convolution) is r (u^T x + lam), or r g(u^T x + lam) when the
layer is given its activation g: u is a unit vector, lam the signed distance of the unit's boundary
{x : u^T x + lam = 0} from the origin, r its scale.
"""

import contextlib
import math
import warnings
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.fx import Proxy

from geoparam import sphere
from geoparam.centred_map import autocast_type, shift_bias
from geoparam.computed import as_computed
from geoparam.coordinates import (
    Init,
    Name,
    Sign,
    check_assigned,
    check_finite,
    compute_distance,
    coordinates_for,
    draw,
    normalise_,
)
from geoparam.functional import result_type
from geoparam.norm import InputMeanNorm

Activation = Callable[[Tensor], Tensor]
InputNorm = bool | Literal["bias", "border"]

_LARGEST_ROUNDING = 0.02  # of a unit vector's length: bfloat16 has three digits
_BLOCK = 1 << 18  # elements encoded at once: bounds the float64 copies


class UnitOptions(NamedTuple):
    """What all layers take by keyword; `GmPLinear` says what it means."""

    activation: Activation | None
    init: Init | None
    coordinates: Name
    natural: bool
    input_norm: InputNorm
    momentum: float | None


class GmPLayer(nn.Module):
    """The parameters of a layer's units and the views of them.

    `weight` and `bias` are what the affine map uses: r u and r lam, or, with an activation, u and
    lam, since r then stays outside. `direction` and `location` have the weight's shape. All four,
    and `theta`, are computed from the parameters. Assigning `weight` or `bias` sets the
    parameters; writing into any of the five in place raises, as it would be lost.
    """

    _version = 2  # in version 1 `input_norm=True` was the border form
    _plain: ClassVar[type[nn.Module]]  # the torch.nn layer, and what both are built from
    _arguments: ClassVar[tuple[str, ...]]
    _extra: tuple[str, ...] = ()  # attributes a user set on the torch.nn layer
    _hidden: Mapping[str, Any] = {}  # the same, of names that this class uses itself
    _made_from: type[nn.Module] | None = None  # that layer's class, which may be a user's own

    r: nn.Parameter
    lam: nn.Parameter | None
    activation: Activation | None
    input_norm: InputMeanNorm | None

    def __init__(
        self,
        weight_shape: tuple[int, ...],
        in_channels: int,
        bias: bool,
        device: torch.device | str | None,
        dtype: torch.dtype | None,
        options: UnitOptions,
    ) -> None:
        super().__init__()
        activation, init, coordinates, natural, input_norm, momentum = options
        _check_options(weight_shape, options)
        out, n = weight_shape[0], math.prod(weight_shape[1:])
        self.weight_shape = weight_shape
        self.channel_dim = 1 - len(weight_shape)  # -1, or before the positions
        self.coordinates = coordinates
        self.natural = natural
        self.init = init
        self.activation = activation
        self.input_norm_form = input_norm
        place: dict[str, Any] = {"device": device, "dtype": dtype}
        norm = {"momentum": momentum, "dim": self.channel_dim, **place}
        self.input_norm = InputMeanNorm(in_channels, **norm) if input_norm else None
        self._coordinates = coordinates_for(coordinates, n)
        stored = torch.empty(self._coordinates.shape(out, n), **place)
        if isinstance(self._coordinates, Sign):
            self.register_buffer("sign", stored)
        else:
            self.register_parameter(self._coordinates.name, nn.Parameter(stored))
        self.r = nn.Parameter(torch.empty(out, **place))
        self.lam = nn.Parameter(torch.empty(out, **place)) if bias else None
        if init is not None:
            self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw new parameters as `init` says; with None, those of a new torch.nn layer."""
        if self.input_norm is not None:
            self.input_norm.reset_parameters()
        if self.r.is_meta:
            return
        if self.init is None:
            plain = self._new_plain(self.r.device, self.r.dtype, self.lam is not None)
            return self._set_affine(plain.weight, plain.bias)
        out, n, device = self.weight_shape[0], self.fan_in, self.r.device
        rows = draw(out, n, self.init, device=device, dtype=self.r.dtype)
        r = sphere.length(rows) if self.init == "glorot" else torch.ones(out, device=device)
        self._assign(rows, r, torch.zeros(out, device=device))

    @torch.no_grad()
    def _assign(self, rows: Tensor, r: Tensor, lam: Tensor | None) -> None:
        """Take the directions of `rows`, a block at a time: encoding is float64."""
        step = max(1, _BLOCK // self.fan_in)
        for start in range(0, len(rows), step):
            block = slice(start, start + step)
            self._stored[block] = self._coordinates.encode(rows[block]).to(self.r.dtype)
        self.r.copy_(r)
        if self.lam is not None and lam is not None:
            self.lam.copy_(lam)

    def _set_affine(self, weight: Tensor, bias: Tensor | None, gain: Tensor | None = None) -> None:
        """Set u = w / ||w||, r = gain ||w|| and lam = b / r."""
        check_finite(weight, "weight")
        w = weight.detach().flatten(1)
        r = sphere.length(w)
        r = r if gain is None else sphere.wide(gain.detach()) * r
        if not r.to(self.r.dtype).isfinite().all():
            raise ValueError(
                f"a row of the weight is longer than the largest {self.r.dtype}, so r cannot hold "
                "its length. Leave the layer standard, or convert it in a wider type."
            )
        self._assign(w, r, None if bias is None else compute_distance(bias, r, self.r.dtype))

    @property
    def _stored(self) -> Tensor:
        return getattr(self, self._coordinates.name)

    @property
    def fan_in(self) -> int:
        """The number n of inputs of one unit."""
        return math.prod(self.weight_shape[1:])

    @property
    def theta(self) -> Tensor:
        """The papers' angles (out, n - 1): pi/2 minus the latitudes."""
        if self._coordinates.name == "latitude":
            return as_computed(math.pi / 2 - self._stored)
        latitude = sphere.to_latitude(self._rows(None))
        return as_computed((math.pi / 2 - latitude).to(self.r.dtype))

    @property
    def direction(self) -> Tensor:
        """The unit vectors u, in the weight's shape."""
        return as_computed(self._rows(None).view(self.weight_shape))

    @property
    def location(self) -> Tensor:
        """The boundaries' nearest points to the origin, -lam u, in the weight's shape."""
        u = self._rows(None)
        phi = torch.zeros_like(u) if self.lam is None else -self.lam[:, None] * u
        return as_computed(phi.view(self.weight_shape))

    @property
    def weight(self) -> Tensor:
        """The affine map's weight: r u, or u where r is outside the activation."""
        return as_computed(self._weight(None))

    @weight.setter
    def weight(self, weight: Tensor) -> None:
        """Set directions and r, and lam so that the bias stays."""
        check_assigned("weight", weight, self.weight_shape)
        if self.activation is None:
            return self._set_affine(weight, self._bias)
        check_finite(weight, "weight")
        rows = weight.detach().flatten(1)
        if (sphere.length(rows) - 1).abs().max() > _LARGEST_ROUNDING:
            raise ValueError(
                "r is outside of this layer's activation, so its weight is the unit vectors: "
                "assign rows of length 1, and their lengths to layer.r."
            )
        self._assign(rows, self.r.detach(), None)

    @property
    def bias(self) -> Tensor | None:
        """The affine map's bias: r lam, or lam where r is outside the activation."""
        bias = self._bias
        return bias if bias is None else as_computed(bias)

    @bias.setter
    def bias(self, bias: Tensor | None) -> None:
        """Set lam = b / r, or b where r is outside; None leaves the layer without."""
        if bias is None:
            self.lam = None
            return
        check_assigned("bias", bias, tuple(self.r.shape))
        if self.lam is None:
            self.lam = nn.Parameter(torch.zeros_like(self.r))
        r = self.r if self.activation is None else torch.ones_like(self.r)
        with torch.no_grad():
            self.lam.copy_(compute_distance(bias, sphere.wide(r.detach()), self.lam.dtype))

    def __setattr__(self, name: str, value: Any) -> None:
        if name in ("weight", "bias"):  # torch would register a Parameter of this name
            object.__setattr__(self, name, value)
        else:
            super().__setattr__(name, value)

    @property
    def _bias(self) -> Tensor | None:
        if self.lam is None or self.activation is not None:
            return self.lam
        return self.r * self.lam

    def _weight(self, dtype: torch.dtype | None) -> Tensor:
        scale = self.r if self.activation is None else None
        dtype = dtype or result_type(self._stored, self.r)
        return self._rows(scale, dtype).view(self.weight_shape)

    def _rows(self, scale: Tensor | None, dtype: torch.dtype | None = None) -> Tensor:
        return self._coordinates.decode(self._stored, scale, self.natural, dtype)

    def forward(self, input: Tensor) -> Tensor:  # torch's name for it
        z = self._affine(input)
        if self.activation is None:
            return z
        z = self.activation(z)
        r = self.r.view(-1, *[1] * (-1 - self.channel_dim))
        return z * r.to(z.dtype)

    def _affine(self, x: Tensor) -> Tensor:
        """Return w^T (x - E[x]) + b; without a centred copy of x unless it is the border form."""
        mean = None
        if self.input_norm is not None:
            if self.input_norm_form == "border":
                x = self.input_norm(x)
            else:
                mean = self.input_norm.mean(x)
        weight, bias = self._weight(_autocast_dtype(x)), self._bias
        if mean is not None:
            bias = shift_bias(bias, weight, mean)
        return self._map(x, weight, None if bias is None else bias.to(weight.dtype))

    def _map(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        raise NotImplementedError

    @property
    def _pads_zeros(self) -> bool:
        return False

    @property
    def _centres_borders(self) -> bool:
        """Whether zeros are padded to the centred input, so that its mean fits into no bias."""
        return self.input_norm_form == "border" and self._pads_zeros

    def _to_plain(self) -> Any:
        """Return the torch.nn layer that computes the same in evaluation."""
        if self.activation is not None:
            raise ValueError(
                "this layer applies its own activation with r outside of it, so no standard layer "
                "alone is the same. Fold the model, which gives Sequential(layer, activation)."
            )
        mean = None if self.input_norm is None else self.input_norm.running_mean
        if self._centres_borders:
            raise ValueError(
                "the input's mean cannot go into a bias: zeros are padded to the centred input. "
                "Use input_norm=True, or fold the model."
            )
        return self.build_plain(*self._fold(self.r, mean))

    @torch.no_grad()
    def _fold(self, scale: Tensor | None, mean: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Return the plain layer's weight and bias, for a scale inside and a mean of the input."""
        weight = self._rows(scale).view(self.weight_shape)
        bias = self.lam if self.lam is None or scale is None else scale * self.lam
        if mean is not None:
            bias = shift_bias(bias, weight, mean).to(weight.dtype)
        return weight, bias

    def build_plain(self, weight: Tensor, bias: Tensor | None) -> Any:
        """Return the torch.nn layer with this weight and bias, frozen and in the mode of self."""
        layer = self._new_plain("meta", weight.dtype, bias is not None)
        learned = self._stored if isinstance(self._stored, nn.Parameter) else self.r
        layer.weight = nn.Parameter(weight, requires_grad=learned.requires_grad)
        if bias is not None:
            trained = self.r if self.lam is None else self.lam
            layer.bias = nn.Parameter(bias, requires_grad=trained.requires_grad)
        layer.__dict__.update({name: getattr(self, name) for name in self._extra}, **self._hidden)
        layer.train(self.training)
        with contextlib.suppress(TypeError):  # a class with slots cannot be given back
            layer.__class__ = self._made_from or self._plain
        return layer

    def _new_plain(self, device: torch.device | str, dtype: torch.dtype, bias: bool) -> Any:
        arguments = {name: getattr(self, name) for name in self._arguments}
        return self._plain(**arguments, bias=bias, device=device, dtype=dtype)

    @torch.no_grad()
    def retract_(self) -> None:
        """Pull drifted unit vectors back to length 1, which does not change the function."""
        if self._coordinates.name == "unit":
            normalise_(self._stored)

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        if name in ("weight_orig", "bias_orig"):
            raise ValueError(
                "torch's pruning masks a weight that is a parameter, and that of a GmP layer is "
                "computed. Prune the plain model: geoparam.fold_, prune, geoparam.convert_."
            )
        super().register_parameter(name, param)

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, local_metadata: dict[str, Any], *rest: Any
    ) -> None:
        if self.input_norm is not None and self.input_norm_form is True and self._pads_zeros:
            _check_version(prefix.rstrip("."), local_metadata.get("version"))
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *rest)

    def extra_repr(self) -> str:
        text = "" if isinstance(self._coordinates, Sign) else f", coordinates={self.coordinates!r}"
        text += ", natural=True" if self.natural else ""
        if callable(self.activation) and not isinstance(self.activation, nn.Module):
            text += f", activation={getattr(self.activation, '__name__', self.activation)}"
        if self.input_norm is not None:
            text += f", input_norm={self.input_norm_form!r}"
        return text


def _check_options(weight_shape: tuple[int, ...], options: UnitOptions) -> None:
    if min(weight_shape) < 1:
        out, n = weight_shape[0], math.prod(weight_shape[1:])
        raise ValueError(
            "a layer needs at least one unit with at least one input; got a weight of shape "
            f"{weight_shape}, that is {out} units with fan-in {n}."
        )
    if options.natural and options.coordinates != "angles":
        raise ValueError(
            "natural=True corrects the gradient of angles; intrinsic coordinates need no "
            "correction. Use coordinates='angles' or natural=False."
        )
    if options.activation is not None and not callable(options.activation):
        raise ValueError(f"activation is a function or module; got {options.activation!r}.")
    if (form := options.input_norm) not in (False, True, "bias", "border"):
        raise ValueError(f"input_norm is False, True, 'bias' or 'border'; got {form!r}.")


def _check_version(name: str, version: int | None) -> None:
    """Refuse a state in which input_norm=True meant something else; warn if it does not tell."""
    say = (
        f"{name or 'the layer'} centres its input and pads zeros with input_norm=True, which was "
        "the border form up to version 1 of the layers' state, and is the bias form now. {} "
        "Set layer.input_norm_form = 'border' before loading for a layer that was trained with "
        "True then, or 'bias' for one of today or of convert_ without init."
    )
    if version is None:
        warnings.warn(say.format("This state dict has no version."), stacklevel=2)
    elif version < 2:
        raise ValueError(say.format(f"This state dict has version {version}."))


def _autocast_dtype(x: Tensor) -> torch.dtype | None:
    """Return autocast's type for a weight; None without autocast."""
    if isinstance(x, Proxy) or x.dtype == torch.float64:
        return None
    return autocast_type(x.device.type)
