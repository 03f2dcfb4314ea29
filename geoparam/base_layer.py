"""The base class of all layers under geometric parameterization: its units' parameters.

A unit with input x (a patch, for a convolution) is r (u^T x + lam), or r g(u^T x + lam) when the
layer is given its activation g: u is a unit vector, lam the signed distance of the unit's boundary
{x : u^T x + lam = 0} from the origin, r its scale.
"""

import contextlib
import math
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Literal, NamedTuple

import torch
from torch import Tensor, nn

from geoparam import sphere
from geoparam.arguments import check_callable, check_flag, check_place
from geoparam.centred_map import autocast_type, map_centred, shift_bias
from geoparam.computed import as_computed
from geoparam.coordinates import (
    Init,
    Name,
    check_assigned,
    check_finite,
    compute_distance,
    coordinates_for,
    draw,
)
from geoparam.model.unit_layers import UnitRows
from geoparam.norm import InputMeanNorm

Activation = Callable[[Tensor], Tensor]
InputNorm = bool | Literal["bias", "border"]

_LARGEST_ROUNDING = 0.02  # of a unit vector's length: bfloat16 has three digits
_BLOCK = 1 << 18  # elements encoded at once: bounds the float64 copies


class UnitOptions(NamedTuple):
    """What every layer takes by keyword; `GmPLinear` documents it."""

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
    parameters; writing into any of the five in place raises, because it would be lost.
    """

    _version = 2  # in version 1 `input_norm=True` was the border form
    _plain: ClassVar[type[nn.Module]]  # the torch.nn layer that this one stands for
    _arguments: ClassVar[tuple[str, ...]]  # of both constructors: attributes of both layers

    # Of a converted layer, so that folding gives them back:
    _extra: tuple[str, ...] = ()  # attributes that the user had set on the torch.nn layer
    _hidden: Mapping[str, Any] = {}  # those whose names this class uses itself
    _made_from: type[nn.Module] | None = None  # its class, which may be a user's subclass

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
        _check_options(weight_shape, options)
        check_flag("bias", bias)
        check_place(device, dtype)
        out, n = weight_shape[0], math.prod(weight_shape[1:])
        self.weight_shape = weight_shape
        self.channel_dim = 1 - len(weight_shape)  # -1, or before the positions
        self.coordinates = options.coordinates
        self.natural = options.natural
        self.init = options.init
        self.activation = options.activation
        self.input_norm_form = options.input_norm
        self._coordinates = coordinates_for(options.coordinates, n, options.natural)

        place: dict[str, Any] = {"device": device, "dtype": dtype}
        self.input_norm = None
        if options.input_norm:
            momentum, dim = options.momentum, self.channel_dim
            self.input_norm = InputMeanNorm(in_channels, momentum, dim, **place)

        stored = torch.empty(self._coordinates.shape(out, n), **place)
        if self._coordinates.is_learned:
            self.register_parameter(self._coordinates.name, nn.Parameter(stored))
        else:
            self.register_buffer(self._coordinates.name, stored)
        self.r = nn.Parameter(torch.empty(out, **place))
        self.lam = nn.Parameter(torch.empty(out, **place)) if bias else None

        if options.init is not None:
            self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw new parameters as `init` says; with None, those of a new torch.nn layer."""
        if self.input_norm is not None:
            self.input_norm.reset_parameters()
        if self.r.is_meta:
            return
        if self.init is None:
            plain = self._new_plain(self.r.device, self.r.dtype, self.lam is not None)
            self._set_affine(plain.weight, plain.bias)
            return

        out, device = self.weight_shape[0], self.r.device
        rows = draw(out, self.fan_in, self.init, device=device, dtype=self.r.dtype)
        r = sphere.length(rows) if self.init == "glorot" else torch.ones(out, device=device)
        self._assign(rows, r, torch.zeros(out, device=device))

    @torch.no_grad()
    def _assign(self, rows: Tensor, r: Tensor, lam: Tensor | None) -> None:
        """Store the directions of `rows`, a block at a time since encoding is float64."""
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
        if gain is not None:
            r = sphere.wide(gain.detach()) * r
        if not r.to(self.r.dtype).isfinite().all():
            raise ValueError(
                f"a row of the weight is longer than the largest {self.r.dtype}, so r cannot hold "
                "its length. Leave the layer standard, or convert it in a wider type."
            )
        lam = None if bias is None else compute_distance(bias, r, self.r.dtype)
        self._assign(w, r, lam)

    @property
    def _stored(self) -> Tensor:
        """The tensor that holds the directions: `latitude`, `unit` or `sign`."""
        return getattr(self, self._coordinates.name)

    @property
    def fan_in(self) -> int:
        """The number n of inputs of one unit."""
        return math.prod(self.weight_shape[1:])

    @property
    def theta(self) -> Tensor:
        """The papers' angles (out, n - 1): pi/2 minus the latitudes."""
        return as_computed(self._coordinates.theta(self._stored))

    @property
    def direction(self) -> Tensor:
        """The unit vectors u, in the weight's shape."""
        return as_computed(self._rows(None).view(self.weight_shape))

    @property
    def location(self) -> Tensor:
        """The boundaries' nearest points to the origin, -lam u, in the weight's shape."""
        u = self._rows(None)
        if self.lam is None:
            location = torch.zeros_like(u)
        else:
            location = -self.lam[:, None] * u
        return as_computed(location.view(self.weight_shape))

    @property
    def weight(self) -> Tensor:
        """The affine map's weight: r u, or u where r is outside the activation."""
        return as_computed(self._weight(None))

    @weight.setter
    def weight(self, weight: Tensor) -> None:
        """Set directions and r, and lam so that the bias stays."""
        check_assigned("weight", weight, self.weight_shape)
        if self.activation is None:
            self._set_affine(weight, self._bias)
            return

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
        return None if bias is None else as_computed(bias)

    @bias.setter
    def bias(self, bias: Tensor | None) -> None:
        """Set lam = b / r, or b where r is outside; None removes lam."""
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
        return self._rows(scale, dtype).view(self.weight_shape)

    def _rows(self, scale: Tensor | None, dtype: torch.dtype | None = None) -> Tensor:
        return self._coordinates.decode(self._stored, scale, self.natural, dtype)

    @property
    def has_angles(self) -> bool:
        """Whether directions are stored as angles; with one input there is a sign instead."""
        return self._coordinates.has_metric

    def read_units(self) -> UnitRows:
        """Return the units as the table of layers, `model.unit_layers`, describes them."""
        rows = self._rows(None, torch.promote_types(self.r.dtype, torch.float32))
        scale = "gain" if self.activation is None else "outer"
        terms: dict[str, Tensor | float] = {scale: self.r}
        if self.lam is not None:
            terms["offset"] = self.lam
        return UnitRows(rows, terms, self.has_angles)

    def forward(self, input: Tensor) -> Tensor:  # torch's name for it
        z = self._affine(input)
        if self.activation is None:
            return z
        z = self.activation(z)
        positions = -1 - self.channel_dim
        r = self.r.view(-1, *[1] * positions)
        return z * r.to(z.dtype)

    def _affine(self, x: Tensor) -> Tensor:
        """Return w^T (x - E[x]) + b; only the border form makes a centred copy of x."""
        weight, bias = self._weight(autocast_type(x)), self._bias
        if self.input_norm is not None:
            if self.input_norm_form != "border":
                return map_centred(self, self.input_norm, x, weight, bias)
            x = self.input_norm(x)

        if bias is not None:
            bias = bias.to(weight.dtype)
        return self._map(x, weight, bias)

    def _map(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Return w^T x + b."""
        raise NotImplementedError

    @property
    def _pads_zeros(self) -> bool:
        return False

    @property
    def _centres_borders(self) -> bool:
        """Whether zeros are padded after centring, so that no bias can hold the mean."""
        return self.input_norm_form == "border" and self._pads_zeros

    def _to_plain(self) -> Any:
        """Return the torch.nn layer that computes the same in evaluation."""
        if self.activation is not None:
            raise ValueError(
                "this layer applies its own activation with r outside of it, so no standard layer "
                "alone is the same. Fold the model, which gives Sequential(layer, activation)."
            )
        if self._centres_borders:
            raise ValueError(
                "the input's mean cannot go into a bias: zeros are padded to the centred input. "
                "Use input_norm=True, or fold the model."
            )
        return self.build_plain(*self._fold(self.r))

    @torch.no_grad()
    def _fold(self, scale: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Return the plain layer's weight and bias, with a scale inside and the input's mean."""
        weight = self._rows(scale).view(self.weight_shape)
        bias: Tensor | None = self.lam
        if bias is not None and scale is not None:
            bias = scale * bias
        if self.input_norm is not None and not self._centres_borders:
            bias = shift_bias(bias, weight, self.input_norm.running_mean).to(weight.dtype)
        return weight, bias

    def build_plain(self, weight: Tensor, bias: Tensor | None) -> Any:
        """Return the torch.nn layer with this weight and bias, in this one's mode.

        Its parameters are frozen where those that they were computed from are.
        """
        layer = self._new_plain("meta", weight.dtype, bias is not None)
        weight_source = self._stored if isinstance(self._stored, nn.Parameter) else self.r
        layer.weight = nn.Parameter(weight, requires_grad=weight_source.requires_grad)
        if bias is not None:
            bias_source = self.r if self.lam is None else self.lam
            layer.bias = nn.Parameter(bias, requires_grad=bias_source.requires_grad)

        layer.__dict__.update({name: getattr(self, name) for name in self._extra})
        layer.__dict__.update(self._hidden)
        layer.train(self.training)
        with contextlib.suppress(TypeError):  # the user's class has other slots
            layer.__class__ = self._made_from or self._plain
        return layer

    def _new_plain(self, device: torch.device | str, dtype: torch.dtype, bias: bool) -> Any:
        arguments = {name: getattr(self, name) for name in self._arguments}
        return self._plain(**arguments, bias=bias, device=device, dtype=dtype)

    @torch.no_grad()
    def retract_(self) -> None:
        """Pull drifted unit vectors back to length 1, which does not change the function."""
        self._coordinates.retract_(self._stored)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "GmPLayer":
        """Change type or device; refuse a type that cannot hold r or lam."""
        for name in ("r", "lam"):
            self._check_cast(name, fn)
        return super()._apply(fn, recurse)

    @torch.no_grad()
    def _check_cast(self, name: str, fn: Callable[[Tensor], Tensor]) -> None:
        values = self._parameters.get(name)
        if values is None or values.is_meta:
            return
        cast = fn(values)
        if cast.dtype == values.dtype or cast.is_meta:
            return
        lost = values.isfinite() & ~cast.isfinite().to(values.device)
        if lost.any():
            row = int(lost.nonzero()[0])
            raise ValueError(
                f"{name} of {self} is {float(values[row]):g} in row {row}, which {cast.dtype} "
                "cannot hold. Leave this layer standard (filter_fn of convert_), or use bfloat16."
            )

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        if name in ("weight_orig", "bias_orig"):
            raise ValueError(
                "torch's pruning masks a weight that is a parameter, and that of a GmP layer is "
                "computed. Prune the plain model: geoparam.fold_, prune, geoparam.convert_."
            )
        super().register_parameter(name, param)

    def _save_to_state_dict(
        self, destination: dict[str, Any], prefix: str, keep_vars: bool
    ) -> None:
        """Save as torch does, and note for `fold_state_dict` what the entries do not tell."""
        super()._save_to_state_dict(destination, prefix, keep_vars)
        metadata = getattr(destination, "_metadata", None)
        if metadata is not None:
            note = {
                "weight_shape": list(self.weight_shape),
                "transposed": getattr(self, "transposed", False),
                "centres_borders": self._centres_borders,
                "activation": _name(self.activation),
            }
            metadata[prefix[:-1]].update(note)

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, local_metadata: dict[str, Any], *rest: Any
    ) -> None:
        is_old = local_metadata.get("version", 2) < 2
        if is_old and self.input_norm_form is True and self._pads_zeros:
            raise ValueError(
                f"{prefix.rstrip('.') or 'the layer'} was saved with input_norm=True by version "
                "0.1, where it was the border form. Set layer.input_norm_form = 'border' before "
                "loading, or 'bias' for a layer of convert_ without init."
            )
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *rest)

    def extra_repr(self) -> str:
        text = f", coordinates={self.coordinates!r}" if self._coordinates.is_learned else ""
        if self.natural:
            text += ", natural=True"
        if callable(self.activation) and not isinstance(self.activation, nn.Module):
            text += f", activation={_name(self.activation)}"
        if self.input_norm is not None:
            text += f", input_norm={self.input_norm_form!r}"
        return text


def _name(activation: Activation | None) -> str:
    """Return the name of a function or of a module's class; "" where there is none."""
    if activation is None:
        return ""
    return getattr(activation, "__name__", type(activation).__name__)


def _check_options(weight_shape: tuple[int, ...], options: UnitOptions) -> None:
    if min(weight_shape) < 1:
        out, n = weight_shape[0], math.prod(weight_shape[1:])
        raise ValueError(
            "a layer needs at least one unit with at least one input; got a weight of shape "
            f"{weight_shape}, that is {out} units with fan-in {n}."
        )
    check_flag("natural", options.natural)
    check_callable("activation", options.activation, "or a module")
    if isinstance(options.activation, type):
        name = options.activation.__name__
        raise ValueError(f"activation is a module, as nn.{name}(); got the class {name}.")
    if options.input_norm not in (False, True, "bias", "border"):
        raise ValueError(
            f"input_norm is False, True, 'bias' or 'border'; got {options.input_norm!r}."
        )
