"""The methods that the experiments compare, as one table of builders.

A method is a way to hold the weight (plain, weight-normalised, geometric in one of three forms)
and a normalization, or none. It builds a hidden `block` (layer, normalization and ReLU) and the
`output` layer.

**Units.** Without BN or LN, a geometric block is the papers' unit r relu(u^T x + lam), with r
outside. With BN or LN it is what `geoparam.convert_` makes of such a network: r inside, then the
norm, then ReLU; so it is with MBN. A layer before a BN or an MBN has no bias, since it would
cancel.

**Initialisation.** "glorot" is the code behind the papers' tables: Glorot-uniform weights, turned
into (u, r = ||w||) or (v, l = ||v||), all offsets 0. For convolutions the code has two bounds,
sqrt(6 / (k^2 (in + out))) for plain layers and sqrt(6 / (k^2 in + out)) for the others. "sphere"
is the papers' text, for geometric layers: uniform directions, r = 1; others stay Glorot-uniform.
"released" is "glorot" through the released code's inverse of u(theta), for geometric layers: all
its angles are arc cosines, from 0 to pi, so that the last component of each direction loses its
sign and is never negative. With one input a direction is a sign, and stays.
"he" draws hidden weights, plain or weight-normalised, from N(0, 2 / fan-in). Output layers are
always Glorot-uniform. From one seed, networks of linear layers get the same Glorot weights under
all methods, so that SP, WN and GmP start as one function.

**Norms.** BN and LN have Keras's epsilon of 1e-3, BN, MBN and IMN its momentum, 1 % of each new
batch (in ResNets BN has torchvision's unless asked otherwise: see `networks`). IMN stands where
the papers' code has it, at the end of each hidden block: every layer but the first has a centred
input, behind plain layers as behind geometric ones. `imn="input"`, of geometric layers, is the
papers' text: at the start of each hidden block but the first, so that it does nothing in a network
of one hidden layer. WN and WN+MBN normalise the output layer too, without MBN there. MBN's offset
comes after the mean (Salimans and Kingma); `mbn="before"` is the papers' code, whose offset comes
before it and cancels, so that units have none.

**Options.** They may be part of a name: "wn+mbn:mbn=before". `angle_lr="fan_in"` divides the rate
of directions by sqrt(n). `order=3` gives the inputs in another order, drawn from 3, and the first
layer's weights with them: for plain weights that is the same training, for angles it is not.
"bn+decay" is BN whose weights, not its offsets and scales, shrink by rate * 0.01 in every step, as
AdamW has it.
"""

import contextlib
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize, skip_init
from torch.nn.utils.parametrizations import weight_norm

import geoparam as gp
from geoparam_lab.checks import check_names, read_options

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
_WORDS = {  # options, and what they may be
    "init": ("glorot", "sphere", "released", "he"),
    "imn": ("output", "input"),
    "mbn": ("after", "before"),
    "angle_lr": (None, "fan_in"),
}


@dataclass(frozen=True)
class Method:
    """How weights are held and what is normalised."""

    title: str  # in tables and figures
    layer: Literal["plain", "weight_norm", "angles", "natural", "intrinsic"] = "plain"
    norm: Literal["bn", "ln", "mbn", "imn"] | None = None
    init: str = "glorot"  # or "sphere", "released" or "he": see above
    imn: str = "output"  # where IMN stands in a hidden block: at its "output" or its "input"
    mbn: str = "after"  # where MBN's offset is: "after" the mean, or "before" it, without effect
    decay: float = 0.0  # share of a weight that a step removes, over the rate
    angle_lr: str | None = None  # the rate of directions: None for that of all, or "fan_in"
    order: int = 0  # of the inputs; 0 as they are, others are drawn from it

    def __post_init__(self) -> None:
        for option, words in _WORDS.items():
            check_names(option, words, getattr(self, option))
        if not str(self.order).isdecimal():
            raise ValueError(f"order is a seed, from 0 on; got {self.order!r}.")
        object.__setattr__(self, "order", int(self.order))  # in a method's name it is text
        if self.init == "he" and self.is_geometric:
            raise ValueError(
                f"init='he' draws weights, and {self.title} has directions and scales instead. "
                "Use 'glorot', 'sphere' or 'released'."
            )
        if self.imn == "input" and self.norm == "imn" and not self.is_geometric:
            raise ValueError(f"imn='input' is a form of geometric layers; got {self.title}.")

    @property
    def is_geometric(self) -> bool:
        return self.layer in _GEOMETRIC

    @property
    def form(self) -> dict[str, Any]:
        """How a geometric layer holds its directions."""
        return _GEOMETRIC[self.layer]

    @property
    def lr(self) -> float:
        """The papers' learning rate."""
        return 0.1 if self.is_geometric else 0.01

    def draw_order(self, features: int) -> Tensor:
        """Return the order of the inputs."""
        generator = torch.Generator().manual_seed(self.order)
        order = natural = torch.arange(features)
        while self.order and features > 1 and order.equal(natural):
            order = torch.randperm(features, generator=generator)
        return order

    def make_norm(
        self, kind: type[Plain], units: int, eps: float = EPSILON, momentum: float = MOMENTUM
    ) -> nn.Module | None:
        """Return the norm of pre-activations behind a layer of this kind; None without one."""
        is_linear = kind is nn.Linear
        if self.norm == "bn":
            return (nn.BatchNorm1d if is_linear else nn.BatchNorm2d)(units, eps, momentum)
        if self.norm == "ln":  # of images, over channels and positions
            return nn.LayerNorm(units, eps) if is_linear else nn.GroupNorm(1, units, eps)
        if self.norm == "mbn":  # which without an offset is IMN of the pre-activation
            mean_norm = gp.MeanOnlyBatchNorm if self.mbn == "after" else gp.InputMeanNorm
            return use_papers_means_(mean_norm(units))
        return None

    def make_layer(self, kind: type[Plain], *sizes: int, **options: Any) -> Any:
        """Return a hidden layer alone, of torch.nn's `kind` or the geometric one in its place."""
        options["bias"] = self.norm not in ("bn", "mbn")  # before which it would cancel
        if not self.is_geometric:
            return _make_plain(kind, sizes, options, self.init, self.layer == "weight_norm")
        init = "glorot" if self.init == "released" else self.init
        layer = _GEOMETRIC_TYPES[kind](*sizes, **options, **self.form, init=init)
        if self.init == "released":
            _lose_last_signs_(layer)
        return use_papers_means_(layer)

    def block(
        self, kind: type[Plain], *sizes: int, first: bool = False, **options: Any
    ) -> nn.Sequential:
        """Return layer, norm and ReLU, or IMN last; in the papers' unit the layer has the ReLU.

        `sizes` and `options` are those of torch.nn's `kind`. A network's first block says so.
        """
        is_unit, dtype = self.is_geometric and self.norm in (None, "imn"), options.get("dtype")
        if is_unit:
            centre = self.norm == "imn" and self.imn == "input" and not first
            options |= {"activation": torch.relu, "input_norm": centre}
        parts = [self.make_layer(kind, *sizes, **options), self.make_norm(kind, sizes[1])]
        if not is_unit:
            parts.append(nn.ReLU())
        if self.norm == "imn" and self.imn == "output":
            parts.append(use_papers_means_(gp.InputMeanNorm(sizes[1])))
        return nn.Sequential(*(part for part in parts if part is not None)).to(dtype=dtype)

    def output(self, in_features: int, out_features: int, **place: Any) -> nn.Linear:
        """Return the output layer: linear, weight-normalised where the hidden layers are."""
        sizes = (in_features, out_features)
        return _make_plain(nn.Linear, sizes, place, "glorot", self.layer == "weight_norm")


METHODS: dict[str, Method] = {
    "sp": Method("SP"),
    "sp+imn": Method("SP+IMN", norm="imn"),
    "wn": Method("WN", "weight_norm"),
    "wn+imn": Method("WN+IMN", "weight_norm", "imn"),
    "wn+mbn": Method("WN+MBN", "weight_norm", "mbn"),
    "bn": Method("BN", norm="bn"),
    "bn+decay": Method("BN+decay", norm="bn", decay=0.01),
    "ln": Method("LN", norm="ln"),
    "gmp": Method("GmP", "angles"),
    "gmp+imn": Method("GmP+IMN", "angles", "imn"),
    "gmp+mbn": Method("GmP+MBN", "angles", "mbn"),
    "gmp+bn": Method("GmP+BN", "angles", "bn"),
    "gmp+ln": Method("GmP+LN", "angles", "ln"),
    "natural": Method("Natural", "natural"),
    "natural+imn": Method("Natural+IMN", "natural", "imn"),
    "intrinsic": Method("Intrinsic", "intrinsic"),
    "intrinsic+imn": Method("Intrinsic+IMN", "intrinsic", "imn"),
    "intrinsic+mbn": Method("Intrinsic+MBN", "intrinsic", "mbn"),
}
DIRECTIONS = {"sphere", "released"}  # values of `init` that are of geometric layers
OPTIONS = ("init", "imn", "mbn", "angle_lr", "order")
TITLES = {name: method.title for name, method in METHODS.items()}


def without_options(name: str) -> str:
    """Return a method's name without its options: "bn" for "bn:optimizer=muon"."""
    return name.partition(":")[0]


def rank(name: str) -> int:
    """Return a method's place in the order of tables; unknown ones come last."""
    order = [*METHODS, without_options(name)]
    return order.index(without_options(name))


def title(name: str) -> str:
    """Return a method's title in tables, with the options that are part of its name.

    Example:
        >>> title("gmp+imn"), title("bn:optimizer=muon"), title("mine")
        ('GmP+IMN', 'BN, optimizer muon', 'mine')
    """
    method, *options = name.replace("=", " ").split(":")
    return ", ".join([TITLES.get(method, method), *options])


def get(name: str, **options: str) -> Method:
    """Return the method of this name, with options other than its defaults."""
    check_names("a method", METHODS, without_options(name))
    method, values = read_options(name, dict.fromkeys(OPTIONS, str))
    check_options(method, values)
    options |= {option: ",".join(texts) for option, texts in values.items()}
    return replace(METHODS[method], **options)  # type: ignore[arg-type]


def check_options(method: str, options: Mapping[str, Sequence[Any]]) -> None:
    """Raise where an option is of a norm, or of layers, that the method does not have."""
    for norm in ("imn", "mbn"):
        if norm in options and norm not in method:
            raise ValueError(f"{norm} is an option of methods with {norm}; got {method!r}.")
    is_of_directions = "angle_lr" in options or DIRECTIONS & set(options.get("init", ()))
    if is_of_directions and not METHODS[method].is_geometric:
        raise ValueError(
            f"angle_lr, init=sphere and init=released are of geometric layers; got {method!r}."
        )


def check_methods(names: Sequence[str]) -> list[str]:
    """Return methods, each once; raise ValueError where one is not known. Options may follow."""
    check_names("each of methods", METHODS, *map(without_options, names))
    return list(dict.fromkeys(names))


def mlp(
    name: str,
    widths: Sequence[int],
    *,
    seed: int = 0,
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
    *hidden, outputs = widths
    with use_seed(seed):
        blocks = [
            method.block(nn.Linear, n, out, first=index == 0, dtype=dtype)
            for index, (n, out) in enumerate(zip(hidden, hidden[1:], strict=False))
        ]
        output = method.output(hidden[-1], outputs, dtype=dtype)
    if method.order:
        _permute_(blocks[0][0], method.draw_order(widths[0]))
    return nn.Sequential(*(module for block in blocks for module in block), output)


@contextlib.contextmanager
def use_seed(seed: int) -> Iterator[None]:
    """Draw from `seed` within the context, and leave torch's own random state as it was."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        yield


def use_papers_means_(module: Model) -> Model:
    """Let all mean normalization in `module` be the papers', and return it.

    Their running means start from 0 with a momentum of 0.01, and layers centre their input before
    they pad zeros.
    """
    for part in module.modules():
        if isinstance(part, gp.InputMeanNorm):
            part.momentum, part.corrected = MOMENTUM, False
        if isinstance(part, gp.GmPLayer) and part.input_norm is not None:
            part.input_norm_form = "border"
    return module


def _make_plain(
    kind: type[Plain], sizes: Sequence[int], options: dict[str, Any], init: str, normalise: bool
) -> Any:
    """Return a layer of torch.nn with a drawn weight and a bias of 0, under WN if `normalise`."""
    layer = skip_init(kind, *sizes, **options)  # its own draw would set the methods apart
    weight = layer.weight
    fan_in, positions = weight[0].numel(), weight[0, 0].numel()  # 1, or a kernel's k^2
    if init == "he":
        nn.init.normal_(weight, std=math.sqrt(2 / fan_in))
    else:
        fan_out = len(weight) if normalise else len(weight) * positions
        bound = math.sqrt(6 / (fan_in + fan_out))
        nn.init.uniform_(weight, -bound, bound)
    if layer.bias is not None:
        nn.init.zeros_(layer.bias)
    return weight_norm(layer) if normalise else layer


@torch.no_grad()
def _lose_last_signs_(layer: Any) -> None:
    """Make the last component of each direction positive, unless it is the only one."""
    weight = layer.weight.flatten(1).clone()
    if weight.shape[1] > 1:
        weight[:, -1].abs_()
        layer.weight = weight.view_as(layer.weight)


@torch.no_grad()
def _permute_(layer: Any, order: Tensor) -> None:
    """Let a linear layer take its inputs in another order, with the weights that these had."""
    if parametrize.is_parametrized(layer, "weight"):
        v = layer.parametrizations.weight.original1
        v.copy_(v[:, order])
    elif isinstance(layer, gp.GmPLayer):
        layer.weight = layer.weight[:, order]
    else:
        layer.weight.copy_(layer.weight[:, order])
