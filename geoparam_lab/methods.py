"""The methods that the experiments compare, as one table of builders.

A method is a way to hold the weight (plain, weight-normalised, geometric in one of three forms)
and a normalization, or none. From these two it builds what a network is made of:

    linear, conv2d    a hidden block: layer, normalization and ReLU
    output            the output layer

**Units.** Without BN or LN, a geometric block is the papers' unit r relu(u^T x + lam), with r
outside. With BN or LN it is what `geoparam.convert_` makes of such a network: r inside, then the
norm, then ReLU. A layer before a BN or an MBN has no bias of its own, since it would cancel.

**Initialisation.** "glorot" is the code behind the papers' tables: Glorot-uniform weights, turned
into (u, r = ||w||) or (v, l = ||v||), all offsets 0. For convolutions the code has two bounds,
sqrt(6 / (k^2 (in + out))) for plain layers and sqrt(6 / (k^2 in + out)) for the others. "sphere"
is the papers' text, for geometric layers: uniform directions, r = 1; plain and weight-normalised
layers stay Glorot-uniform. "he" draws hidden weights, plain or weight-normalised, from
N(0, 2 / fan-in). Output layers are always Glorot-uniform. From one seed, networks of linear layers
get the same Glorot weights under all methods, so that SP, WN and GmP start as one function.

**Norms.** BN and LN have Keras's epsilon of 1e-3, BN, MBN and IMN its momentum, 1 % of each new
batch. IMN stands where the papers' code has it, at the end of each hidden block: thus every layer
but the first has a centred input, the output layer too, and the first sees data centred in
preprocessing. `imn="input"` is the papers' text instead: at the start of each hidden block but the
first, so that it does nothing in a network of one hidden layer.

WN and WN+MBN normalise the output layer too, without MBN there.
"""

import contextlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.utils import skip_init
from torch.nn.utils.parametrizations import weight_norm

import geoparam as gp

EPSILON = 1e-3
MOMENTUM = 0.01

Plain = nn.Linear | nn.Conv2d
Model = TypeVar("Model", bound=nn.Module)

_GEOMETRIC: dict[str, dict[str, Any]] = {
    "angles": {},
    "natural": {"natural": True},
    "intrinsic": {"coordinates": "intrinsic"},
}
_GEOMETRIC_TYPES = {nn.Linear: gp.GmPLinear, nn.Conv2d: gp.GmPConv2d}


@dataclass(frozen=True)
class Method:
    """How weights are held and what is normalised, with the builders that follow from it.

    Args:
        title: the name in tables and figures.
        layer: how a hidden layer holds its weight.
        norm: the normalization of a hidden block.
        init: "glorot", "sphere" or "he"; see above.
        mbn_bias: "after" the mean-only batch norm (Salimans & Kingma), or "cancelled", as in the
            papers' code: added before it, without effect, so that units have no offset.
        imn: where IMN stands: at a hidden block's "output" or at its "input".

    Example:
        >>> METHODS["gmp+imn"].conv2d(3, 128, 3)
        Sequential(
          (0): GmPConv2d(3, 128, kernel_size=(3, 3), coordinates='angles', activation=relu)
          (1): InputMeanNorm(128, momentum=0.01, corrected=False)
        )
    """

    title: str
    layer: Literal["plain", "weight_norm", "angles", "natural", "intrinsic"] = "plain"
    norm: Literal["bn", "ln", "mbn", "imn"] | None = None
    init: str = "glorot"
    mbn_bias: str = "after"
    imn: str = "output"

    def __post_init__(self) -> None:
        if self.init not in ("glorot", "sphere", "he"):
            raise ValueError(f"init is 'glorot', 'sphere' or 'he'; got {self.init!r}.")
        if self.init == "he" and self.is_geometric:
            raise ValueError(
                f"init='he' draws weights, and {self.title} has directions and scales instead. "
                "Use 'glorot' or 'sphere'."
            )
        if self.mbn_bias not in ("after", "cancelled"):
            raise ValueError(f"mbn_bias is 'after' or 'cancelled'; got {self.mbn_bias!r}.")
        if self.imn not in ("output", "input"):
            raise ValueError(f"imn is 'output' or 'input'; got {self.imn!r}.")

    @property
    def is_geometric(self) -> bool:
        """Whether units have a direction, a distance and a scale."""
        return self.layer in _GEOMETRIC

    @property
    def lr(self) -> float:
        """The papers' learning rate."""
        return 0.1 if self.is_geometric else 0.01

    def linear(
        self, in_features: int, out_features: int, *, first: bool = False, **place: Any
    ) -> nn.Sequential:
        """Return a hidden block of `out_features` units; `place` is device and dtype.

        Example:
            >>> [type(module).__name__ for module in METHODS["bn"].linear(4, 8)]
            ['Linear', 'BatchNorm1d', 'ReLU']
        """
        shape = {"in_features": in_features, "out_features": out_features}
        return _block(self, nn.Linear, shape, out_features, first, place)

    def conv2d(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: int | tuple[int, int],
        *,
        first: bool = False,
        stride: int | tuple[int, int] = 1,
        padding: str | int | tuple[int, int] = 0,
        **place: Any,
    ) -> nn.Sequential:
        """Return a hidden block of `out_channels` units; `place` is device and dtype."""
        shape = {
            "in_channels": in_channels,
            "out_channels": out_channels,
            "kernel_size": kernel_size,
            "stride": stride,
            "padding": padding,
        }
        return _block(self, nn.Conv2d, shape, out_channels, first, place)

    def output(self, in_features: int, out_features: int, **place: Any) -> nn.Linear:
        """Return the output layer: linear, weight-normalised where the hidden layers are.

        Example:
            >>> METHODS["gmp"].output(100, 1)
            Linear(in_features=100, out_features=1, bias=True)
        """
        shape = {"in_features": in_features, "out_features": out_features}
        return _plain(nn.Linear, {**shape, **place}, "glorot", self.layer == "weight_norm")


METHODS: dict[str, Method] = {
    "sp": Method("SP"),
    "wn": Method("WN", "weight_norm"),
    "wn+mbn": Method("WN+MBN", "weight_norm", "mbn"),
    "bn": Method("BN", norm="bn"),
    "ln": Method("LN", norm="ln"),
    "gmp": Method("GmP", "angles"),
    "gmp+imn": Method("GmP+IMN", "angles", "imn"),
    "gmp+bn": Method("GmP+BN", "angles", "bn"),
    "gmp+ln": Method("GmP+LN", "angles", "ln"),
    "natural": Method("Natural", "natural"),
    "natural+imn": Method("Natural+IMN", "natural", "imn"),
    "intrinsic": Method("Intrinsic", "intrinsic"),
    "intrinsic+imn": Method("Intrinsic+IMN", "intrinsic", "imn"),
}
TITLES = {name: method.title for name, method in METHODS.items()}
LEARNING_RATES = {name: method.lr for name, method in METHODS.items()}


def without_options(name: str) -> str:
    """Return a method's name without the options that may follow it.

    Example:
        >>> without_options("bn:optimizer=muon")
        'bn'
    """
    return name.partition(":")[0]


def rank(name: str) -> int:
    """Return a method's place in the order of tables; those that are not known come last."""
    order = list(METHODS)
    return order.index(without_options(name)) if without_options(name) in order else len(order)


def title(name: str) -> str:
    """Return what a method is called in tables, with the options that are part of its name.

    Example:
        >>> title("gmp+imn"), title("bn:optimizer=muon"), title("mine")
        ('GmP+IMN', 'BN, optimizer muon', 'mine')
    """
    method, *options = name.split(":")
    return ", ".join([TITLES.get(method, method), *(each.replace("=", " ") for each in options)])


def get(name: str, **options: str) -> Method:
    """Return the method of this name, with other options than the default where they are given.

    Example:
        >>> get("gmp", init="sphere").lr
        0.1
    """
    if name not in METHODS:
        raise ValueError(f"a method is one of {', '.join(METHODS)}; got {name!r}.")
    return replace(METHODS[name], **options)  # type: ignore[arg-type]


def mlp(
    name: str,
    widths: Sequence[int],
    *,
    seed: int = 0,
    device: torch.device | str | None = None,
    dtype: torch.dtype = torch.float64,
    **options: str,
) -> nn.Sequential:
    """Return the network of these widths, inputs first and outputs last, drawn from `seed`.

    Blocks are laid flat, so that `model[0]` is the first hidden layer and `model[-1]` the output.

    Example:
        >>> mlp("gmp", (13, 100, 1))
        Sequential(
          (0): GmPLinear(13, 100, coordinates='angles', activation=relu)
          (1): Linear(in_features=100, out_features=1, bias=True)
        )
    """
    if len(widths) < 2:
        raise ValueError(f"widths are those of inputs, hidden layers, outputs; got {widths}.")
    method = get(name, **options)
    place: dict[str, Any] = {"device": device, "dtype": dtype}
    *hidden, outputs = widths
    with seeded(seed):
        blocks = [
            method.linear(n, out, first=index == 0, **place)
            for index, (n, out) in enumerate(zip(hidden, hidden[1:], strict=False))
        ]
        output = method.output(hidden[-1], outputs, **place)
    return nn.Sequential(*(module for block in blocks for module in block), output)


@contextlib.contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Draw from `seed` within the context, and leave torch's own random state as it was.

    Example:
        >>> with seeded(3):
        ...     block = METHODS["gmp"].conv2d(3, 8, 3)
    """
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        yield


def use_papers_means_(module: Model) -> Model:
    """Let all mean normalization in `module` be the papers', and return it.

    Their running means start from 0 with a momentum of 0.01, and layers centre their input before
    they pad zeros.

    Example:
        >>> use_papers_means_(gp.InputMeanNorm(4))
        InputMeanNorm(4, momentum=0.01, corrected=False)
    """
    for part in module.modules():
        if isinstance(part, gp.InputMeanNorm):
            part.momentum, part.corrected = MOMENTUM, False
        if isinstance(part, gp.GmPLayer) and part.input_norm is not None:
            part.input_norm_form = "border"
    return module


# --- blocks -------------------------------------------------------------------------------------


def _block(
    method: Method,
    kind: type[Plain],
    shape: dict[str, Any],
    units: int,
    first: bool,
    place: dict[str, Any],
) -> nn.Sequential:
    """Return layer, norm and ReLU; in the papers' unit the layer has the ReLU in it."""
    unit = method.is_geometric and method.norm in (None, "imn")
    cancels = method.norm == "bn" or (method.norm == "mbn" and method.mbn_bias == "after")
    arguments = {**shape, "bias": not cancels, **place}
    if method.is_geometric:
        centred = unit and method.norm == "imn" and method.imn == "input" and not first
        layer: nn.Module = _GEOMETRIC_TYPES[kind](
            **arguments,
            **_GEOMETRIC[method.layer],
            init=method.init,
            activation=torch.relu if unit else None,
            input_norm=centred,
        )
        use_papers_means_(layer)
    else:
        layer = _plain(kind, arguments, method.init, method.layer == "weight_norm")
    norm = _norm(method, kind, units, place)
    return nn.Sequential(layer, *norm, *([] if unit else [nn.ReLU()]))


def _norm(method: Method, kind: type[Plain], units: int, place: dict[str, Any]) -> list[nn.Module]:
    """Return what follows the layer, or in the case of IMN its ReLU: one norm or none."""
    if method.norm == "bn":
        batch_norm = nn.BatchNorm1d if kind is nn.Linear else nn.BatchNorm2d
        return [batch_norm(units, EPSILON, MOMENTUM, **place)]
    if method.norm == "ln":
        if kind is nn.Linear:
            return [nn.LayerNorm(units, EPSILON, **place)]
        return [nn.GroupNorm(1, units, EPSILON, **place)]  # over channels and positions
    if method.norm == "mbn":
        norm = gp.MeanOnlyBatchNorm(units, bias=method.mbn_bias == "after", **place)
        return [use_papers_means_(norm)]
    if method.norm == "imn" and method.imn == "output":
        return [use_papers_means_(gp.InputMeanNorm(units, **place))]
    return []


def _plain(kind: type[Plain], arguments: dict[str, Any], init: str, normalised: bool) -> Any:
    """Return a layer of torch.nn with a drawn weight and no bias yet, under WN if `normalised`."""
    given = {name: value for name, value in arguments.items() if value is not None}
    layer = skip_init(kind, **given)  # its own draw would set the methods' random numbers apart
    _draw(layer.weight, init, normalised)
    if layer.bias is not None:
        nn.init.zeros_(layer.bias)
    return weight_norm(layer) if normalised else layer


def _draw(weight: Tensor, init: str, normalised: bool) -> None:
    fan_in, taps = weight[0].numel(), weight[0, 0].numel()  # taps: 1, or a kernel's k^2
    if init == "he":
        nn.init.normal_(weight, std=math.sqrt(2 / fan_in))
    else:
        fan_out = len(weight) if normalised else len(weight) * taps
        bound = math.sqrt(6 / (fan_in + fan_out))
        nn.init.uniform_(weight, -bound, bound)
