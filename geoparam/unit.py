"""What every layer under geometric parameterization shares: its units' parameters.

A unit with input x (a patch, for a convolution) is r (u^T x + lam), or r g(u^T x + lam) when the
layer is given its activation g: u is a unit vector, lam the signed distance of the unit's boundary
{x : u^T x + lam = 0} from the origin, r its scale. The layer holds parameters and delegates: the
directions to `coordinates`, the mean of the input to `norm`, the arithmetic to torch, and in
training on a GPU to `fused`, which computes the same in fewer passes over the memory.
"""

import math
import warnings
from collections.abc import Callable
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor, nn

from geoparam import compiled, fused, ops, sphere
from geoparam.cache import TensorCache, cacheable
from geoparam.coordinates import Sign, coordinates_for
from geoparam.norm import InputMeanNorm
from geoparam.ops import columns
from geoparam.routes import autocast_dtype, is_channels_last

Activation = Callable[[Tensor], Tensor]
InputNorm = bool | Literal["bias"]
Layer = TypeVar("Layer", bound="GmPLayer")
Plain = TypeVar("Plain", bound=nn.Module)

_LARGEST_DRIFT = 0.1
_BLOCK = 1 << 18  # numbers encoded at once: bounds the float64 copies


class GmPLayer(nn.Module):
    """What all layers share: the parameters of their units and the views of them.

    `weight` and `bias` are what the affine map uses: r u and r lam, or, with an activation, u and
    lam, since r then stays outside. `direction` and `location` have the weight's shape. All four,
    and `theta`, are computed from the parameters and cannot be assigned.
    """

    r: nn.Parameter
    lam: nn.Parameter | None
    activation: Activation | None
    input_norm: InputMeanNorm | None

    def __init__(
        self,
        weight_shape: tuple[int, ...],
        *,
        in_channels: int,
        channel_dim: int,
        bias: bool,
        activation: Activation | None,
        init: str | None,
        coordinates: str,
        natural: bool,
        input_norm: InputNorm,
        device: torch.device | str | None,
        dtype: torch.dtype | None,
    ) -> None:
        super().__init__()
        _check_options(weight_shape, coordinates, natural, input_norm)
        out, n = weight_shape[0], math.prod(weight_shape[1:])
        self.weight_shape = weight_shape
        self.channel_dim = channel_dim
        self.coordinates = coordinates
        self.natural = natural
        self.init = init
        self.activation = activation
        self.mean_in_bias = input_norm == "bias"
        place: dict[str, Any] = {"device": device, "dtype": dtype}
        self.input_norm = (
            InputMeanNorm(in_channels, dim=channel_dim, **place) if input_norm else None
        )
        self._coordinates = coordinates_for(coordinates, n)
        stored = torch.empty(self._coordinates.shape(out, n), **place)
        if isinstance(self._coordinates, Sign):
            self.register_buffer("sign", stored)
        else:
            self.register_parameter(self._coordinates.name, nn.Parameter(stored))
        self.r = nn.Parameter(torch.empty(out, **place))
        self.lam = nn.Parameter(torch.empty(out, **place)) if bias else None
        self._drift_reported = False
        self._cache: TensorCache[tuple[Tensor, Tensor | None]] = TensorCache()
        self.reset_parameters()

    # --- parameters ---------------------------------------------------------------------------

    def reset_parameters(self) -> None:
        """Draw new parameters: `init` says how; None leaves them as they are."""
        if self.init not in ("sphere", "glorot", None):
            raise ValueError(f"init is 'sphere', 'glorot' or None; got {self.init!r}.")
        if self.input_norm is not None:
            self.input_norm.reset_parameters()
        out, n, device = self.weight_shape[0], self.fan_in, self.r.device
        if self.init is None or device.type == "meta":
            return
        if self.init == "sphere":  # the papers' text
            rows, r = sphere.sample(out, n, device=device), torch.ones(out, device=device)
        else:  # "glorot", the code behind the papers' tables
            bound = math.sqrt(6 / (n + out))
            rows = torch.empty(out, n, device=device, dtype=self.r.dtype).uniform_(-bound, bound)
            r = sphere.length(rows)
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

    def _assign_affine(
        self, weight: Tensor, bias: Tensor | None, gain: Tensor | None = None
    ) -> None:
        """Take the parameters of gain * w^T x + b: u = w / ||w||, r = gain ||w||, lam = b / r."""
        _check_finite(weight, "weight")
        w = weight.detach().flatten(1)
        r = sphere.length(w)
        r = r if gain is None else sphere.wide(gain.detach()) * r
        lam = None
        if bias is not None:
            _check_finite(bias, "bias")
            b = sphere.wide(bias.detach())
            lost = ((r == 0) & (b != 0)).nonzero().flatten().tolist()
            if lost:
                raise ValueError(
                    f"rows {lost[:8]} have a zero weight and a bias: such a unit has no boundary, "
                    "and r * lam cannot hold its bias. Leave the layer standard or prune the row."
                )
            lam = torch.where(r == 0, 0, b / torch.where(r == 0, 1, r))
            if not lam.to(self.r.dtype).isfinite().all():
                raise ValueError(
                    f"a weight is so short beside its bias that lam = b / r is no {self.r.dtype}. "
                    "Leave the layer standard."
                )
        self._assign(w, r, lam)
        for parameter in (self._stored, self.r):
            if isinstance(parameter, nn.Parameter):
                parameter.requires_grad_(weight.requires_grad)
        if self.lam is not None and bias is not None:
            self.lam.requires_grad_(bias.requires_grad)

    @property
    def _stored(self) -> Tensor:
        return getattr(self, self._coordinates.name)

    @property
    def fan_in(self) -> int:
        """The number n of inputs of one unit."""
        return math.prod(self.weight_shape[1:])

    # --- views --------------------------------------------------------------------------------

    @property
    def theta(self) -> Tensor:
        """The papers' angles (out, n - 1): pi/2 minus the latitudes."""
        if self._coordinates.name == "latitude":
            return math.pi / 2 - self._stored
        return (math.pi / 2 - sphere.to_latitude(self.direction.flatten(1))).to(self.r.dtype)

    @property
    def direction(self) -> Tensor:
        """The unit vectors u, in the weight's shape."""
        return self._rows(None).view(self.weight_shape)

    @property
    def location(self) -> Tensor:
        """The boundaries' nearest points to the origin, -lam u, in the weight's shape."""
        u = self._rows(None)
        phi = torch.zeros_like(u) if self.lam is None else -self.lam[:, None] * u
        return phi.view(self.weight_shape)

    @property
    def weight(self) -> Tensor:
        """The affine map's weight: r u, or u where r is outside the activation."""
        return self._weight(None)

    @property
    def bias(self) -> Tensor | None:
        """The affine map's bias: r lam, or lam where r is outside the activation."""
        if self.lam is None or self.activation is not None:
            return self.lam
        return self.r * self.lam

    def _weight(self, dtype: torch.dtype | None, channels_last: bool = False) -> Tensor:
        stored, scale = self._stored, self.r if self.activation is None else None
        dtype = dtype or torch.promote_types(stored.dtype, self.r.dtype)
        shape = self.weight_shape[1:]
        return self._coordinates.decode(stored, scale, self.natural, dtype, shape, channels_last)

    def _rows(self, scale: Tensor | None, dtype: torch.dtype | None = None) -> Tensor:
        return self._coordinates.decode(self._stored, scale, self.natural, dtype)

    # --- the forward pass ---------------------------------------------------------------------

    def forward(self, x: Tensor) -> Tensor:
        if self.training and fused.eligible(x) and (y := self._in_few_passes(x)) is not None:
            return y
        if self.training and torch.compiler.is_compiling():
            if (y := compiled.forward(self, x)) is not None:
                return y
        z = self._affine(x)
        return z if self.activation is None else self._activated(z)

    def _in_few_passes(self, x: Tensor) -> Tensor | None:
        """Return the same by `fused`, where there is such a form of this layer."""
        return None

    def _affine(self, x: Tensor) -> Tensor:
        """Return w^T (x - E[x]) + b without a centred copy of x.

        What the mean contributes is subtracted afterwards: one number per unit, w^T E[x], or,
        where zeros are padded to the centred input, its image under the convolution.
        """
        mean = None if self.input_norm is None else self.input_norm.mean(x)
        if mean is None or self.mean_in_bias or not self._pads_zeros:
            return self._mapped(x, mean)
        weight, bias = self._map_parameters(autocast_dtype(x), None, is_channels_last(x))
        image = self._per_channel(mean).expand(x.shape[self.channel_dim :])
        return self._map(x, weight, bias) - self._map(image.to(x.dtype), weight, None)

    def _mapped(self, x: Tensor, mean: Tensor | None) -> Tensor:
        """Return w^T x + b, less what a mean contributes as one number per unit."""
        parameters = self._map_parameters(autocast_dtype(x), mean, is_channels_last(x))
        return self._map(x, *parameters)

    def _activated(self, z: Tensor) -> Tensor:
        assert self.activation is not None
        z = self.activation(z)
        return z * self._per_channel(self.r).to(z.dtype)

    def _map_parameters(
        self, dtype: torch.dtype | None, mean: Tensor | None, channels_last: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        """Return weight and bias, less what `mean` contributes; in evaluation, remember them."""
        sources = [t for t in (self._stored, self.r, self.lam, mean) if t is not None]
        if self.training or not cacheable(sources):
            self._cache.clear()  # a gradient may lead to a step that no version counter shows
            return self._computed_parameters(dtype, mean, channels_last)
        tag = dtype, channels_last, self.activation is None
        return self._cache.get(
            sources, tag, lambda: self._computed_parameters(dtype, mean, channels_last)
        )

    def _computed_parameters(
        self, dtype: torch.dtype | None, mean: Tensor | None, channels_last: bool
    ) -> tuple[Tensor, Tensor | None]:
        weight, bias = self._weight(dtype, channels_last), self.bias
        if mean is not None:
            shift = columns.response(weight, mean)
            bias = -shift if bias is None else bias - shift
        return weight, None if bias is None else bias.to(weight.dtype)

    def _map(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        raise NotImplementedError

    def plain(self, weight: Tensor, bias: Tensor | None) -> nn.Module:
        """Return the torch.nn layer of this shape with the given weight and bias."""
        raise NotImplementedError

    @property
    def _pads_zeros(self) -> bool:
        return False

    def _per_channel(self, x: Tensor) -> Tensor:
        return x.view(-1, *[1] * (-self.channel_dim - 1))

    def _plain_affine(self) -> tuple[Tensor, Tensor | None]:
        """Return the weight and bias of the standard layer that does the same in evaluation."""
        if self.activation is not None:
            raise ValueError(
                "this layer applies its own activation with r outside of it, so no standard layer "
                "alone is the same. Fold the model, which gives Sequential(layer, activation)."
            )
        weight, bias = self.weight.detach(), self.bias
        if self.input_norm is None:
            return weight, bias if bias is None else bias.detach()
        if self.input_norm.running_mean is None or (self._pads_zeros and not self.mean_in_bias):
            raise ValueError(
                "the input's mean cannot go into a bias: it is the batch's own, or zeros are "
                "padded to the centred input. Use input_norm='bias' with running statistics."
            )
        shift = columns.response(weight, self.input_norm.running_mean)
        return weight, (-shift if bias is None else bias.detach() - shift).to(weight.dtype)

    def _filled(
        self, plain: type[Plain], arguments: dict[str, Any], weight: Tensor, bias: Tensor | None
    ) -> Plain:
        """Return the torch.nn layer with this weight and bias, frozen and in the mode of self."""
        layer = nn.utils.skip_init(
            plain, **arguments, bias=bias is not None, device=weight.device, dtype=weight.dtype
        )
        learned = self._stored if isinstance(self._stored, nn.Parameter) else self.r
        layer.weight = nn.Parameter(weight, requires_grad=learned.requires_grad)
        if bias is not None:
            trained = self.r if self.lam is None else self.lam
            layer.bias = nn.Parameter(bias, requires_grad=trained.requires_grad)
        return layer.train(self.training)

    # --- intrinsic coordinates ----------------------------------------------------------------

    @torch.no_grad()
    def retract_(self) -> None:
        """Pull drifted unit vectors back to length 1, which does not change the function."""
        if self._coordinates.name == "unit":
            ops.intrinsic.normalise_(self._stored)

    @torch.no_grad()
    def _report_drift(self) -> None:
        if self._coordinates.name != "unit" or self._drift_reported or self.r.is_meta:
            return
        d = self._stored
        if any(place.is_shard(1) for place in getattr(d, "placements", ())):
            return  # rows in pieces have no length of their own
        d = d.to_local() if hasattr(d, "to_local") else d
        if d.numel() == 0 or type(d) not in (Tensor, nn.Parameter):  # fake tensors have no value
            return
        drift = (torch.linalg.vector_norm(d.float(), dim=1) - 1).abs().max().item()
        if drift > _LARGEST_DRIFT:
            self._drift_reported = True
            warnings.warn(  # one text for all layers, so that Python shows it once
                "unit vectors have drifted by more than 10 % from length 1. The function is right "
                "but a step turns them differently: after building the optimizer, call "
                "optimizer.register_step_post_hook(geoparam.retract(model)).",
                stacklevel=2,
            )

    def train(self: Layer, mode: bool = True) -> Layer:
        self._cache.clear()
        self._report_drift()
        return super().train(mode)

    def _save_to_state_dict(self, *args: Any) -> None:
        self._report_drift()
        super()._save_to_state_dict(*args)

    def extra_repr(self) -> str:
        text = "" if self.lam is not None else ", bias=False"
        if not isinstance(self._coordinates, Sign):
            text += f", coordinates={self.coordinates!r}"
        text += ", natural=True" if self.natural else ""
        if callable(self.activation) and not isinstance(self.activation, nn.Module):
            text += f", activation={getattr(self.activation, '__name__', self.activation)}"
        if self.input_norm is not None:
            text += f", input_norm={'bias' if self.mean_in_bias else True!r}"
        return text


def retract(model: nn.Module) -> Callable[..., None]:
    """Return a hook that keeps the unit vectors of intrinsic layers on the sphere.

    Call it once after every optimizer step; angles need nothing. The model's function does not
    change by it.

    Example:
        >>> from geoparam import GmPLinear
        >>> model = GmPLinear(3, 2, coordinates="intrinsic")
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> handle = optimizer.register_step_post_hook(retract(model))
    """

    def hook(*_: object) -> None:
        for module in model.modules():
            if isinstance(module, GmPLayer):
                module.retract_()

    return hook


def _check_options(
    weight_shape: tuple[int, ...], coordinates: str, natural: bool, input_norm: InputNorm
) -> None:
    if min(weight_shape) < 1:
        out, n = weight_shape[0], math.prod(weight_shape[1:])
        raise ValueError(
            "a layer needs at least one unit with at least one input; got a weight of shape "
            f"{weight_shape}, that is {out} units with fan-in {n}."
        )
    if natural and coordinates != "angles":
        raise ValueError(
            "natural=True corrects the gradient of angles; intrinsic coordinates need no "
            "correction. Use coordinates='angles' or natural=False."
        )
    if input_norm not in (False, True, "bias"):
        raise ValueError(f"input_norm is False, True or 'bias'; got {input_norm!r}.")


def _check_finite(x: Tensor, name: str) -> None:
    if not x.isfinite().all():
        raise ValueError(
            f"the {name} holds NaN or infinite values, which have no direction; got "
            f"{int((~x.isfinite()).sum())} of them. Repair or reinitialise the layer first."
        )
