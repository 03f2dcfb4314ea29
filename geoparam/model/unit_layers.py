"""The one table of layers: which parameters of a model hold units, and how they are laid out.

A unit is what computes one output: a row of nn.Linear's weight (out, in), a filter of a
convolution, a column of a transposed convolution or of transformers' Conv1D. Some parameters hold
several layers: packed projections (q, k and v in one matrix) and stacked experts (a 3-D tensor).
`Layout` says which axis is which, `parts` how many rows each layer of a parameter has.

To teach the library a new type of layer, add an entry to `describe`. Our own layers tell by
`_plain` which torch.nn layer they stand for; a layer whose weight is computed has `read_units`.
"""

import difflib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.utils.prune import BasePruningMethod
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm

from geoparam.model.run import computes_as, strip_wrappers

Split = Mapping[str, int | Sequence[int]]
Stacks = Mapping[str, str]
PLAIN_LAYERS = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)
LAYERS = (nn.Linear, nn.modules.conv._ConvNd, nn.Bilinear, nn.RNNBase, nn.RNNCellBase)
EMBEDDINGS = (nn.Embedding, nn.EmbeddingBag)
INSIDE_ATTENTION = (nn.MultiheadAttention, nn.modules.linear.NonDynamicallyQuantizableLinear)
# Functions that multiply with a weight, and which dimension of the result has the units.
FUNCTIONS = {
    "linear": -1,
    "addmm": -1,
    "conv1d": -2,
    "conv2d": -3,
    "conv3d": -4,
    "bilinear": None,
    "conv_transpose1d": None,
    "conv_transpose2d": None,
    "conv_transpose3d": None,
    "matmul": None,
    "rmatmul": None,
    "mm": None,
    "bmm": None,
    "baddbmm": None,
    "einsum": None,
    "tensordot": None,
}
EXPERT_WEIGHTS = ("gate_up_proj", "up_proj", "down_proj")  # of transformers' expert modules
LLAMA4_EXPERTS = "Llama4TextExperts"  # the one without transformers' marks


@dataclass(frozen=True)
class Layout:
    """Where a weight has its experts (e), outputs (o) and inputs (i).

    Axes beyond those named are kernel positions and count as inputs. Without "e" in `axes`, the
    first axis is divided into `groups`, as transposed convolutions need it.

    Example:
        >>> import torch
        >>> Layout("io").to_rows(torch.zeros(4, 6)).shape  # transformers' Conv1D
        torch.Size([6, 4])
        >>> Layout("eoi").to_rows(torch.zeros(8, 3, 4)).shape  # eight experts with three units
        torch.Size([24, 4])
    """

    axes: str = "oi"
    groups: int = 1

    def view(self, weight: Tensor) -> Tensor:
        """Return a view (experts, outputs, inputs, ...)."""
        axes = self.axes
        if "e" not in axes:
            weight = weight.unflatten(0, (self.groups, -1))
            axes = "e" + axes

        order = [axes.index(axis) for axis in "eoi"]
        return weight.permute(*order, *range(3, weight.ndim))

    def to_units_first(self, weight: Tensor) -> Tensor:
        """Return the weight as (outputs, inputs, ...)."""
        return weight if self.axes == "oi" else self.view(weight).flatten(0, 1)

    def to_rows(self, weight: Tensor) -> Tensor:
        """Return the units as rows (out, fan-in); a view where there is one."""
        return self.to_units_first(weight).flatten(1)

    @property
    def has_whole_rows(self) -> bool:
        """Whether a piece of the first axis is a number of whole units."""
        return self.axes == "oi" or self.axes[0] == "e"


class Entry(NamedTuple):
    """One weight of a type of layer: its key and its bias's in the module, layout, parts.

    If `is_affine`, layers of this type compute rows^T x + bias, so that they can be converted and
    their boundaries are known. The optimizer takes the others too.
    """

    key: str
    bias_key: str
    layout: Layout
    parts: int = 1  # equal ones, as the three of a packed projection
    is_affine: bool = False

    def name(self, module_name: str) -> str:
        """Return the layer's name: its module's, with the key where that is not "weight"."""
        return module_name if self.key == "weight" else f"{module_name}.{self.key}".strip(".")


class UnitRows(NamedTuple):
    """The units of a layer, whose pre-activations are gain (rows^T x + offset).

    `rows`, `offset` and `gain` are w, b and 1 in a plain layer, u, lam and r in a GmP layer. A GmP
    layer that is given its activation has r outside of it: `outer` scales the output. A term that
    a layer does not have is left out.
    """

    rows: Tensor  # (out, n)
    terms: dict[str, Tensor | float]  # offset, gain, outer; each (out,)
    are_unit_vectors: bool = False


@dataclass(frozen=True)
class UnitWeight:
    """A parameter with units: its module and key there, its bias, its layout and its parts."""

    layer: str  # the module's name; with the key where that is not "weight"
    module: nn.Module
    weight: nn.Parameter
    bias: nn.Parameter | None
    layout: Layout
    parts: tuple[int, ...]  # rows of each layer in it


def find_unit_weights(
    model: nn.Module, split: Split | None = None, stacks: Stacks | None = None
) -> Iterator[UnitWeight]:
    """Yield every parameter of the model that holds units, in order of registration.

    Args:
        split: packed projections by the end of their module's name: a number of equal parts, or
            the rows of each part.
        stacks: parameters with stacked experts by the end of their name: which axis is what.
    """
    named_splits = _Named("split", split or {})
    named_stacks = _Named("stacks", stacks or {})

    for name, module in model.named_modules():
        for entry in (*_find_stacks(module, name, named_stacks), *describe(module, name)):
            weight = module._parameters.get(entry.key)
            if weight is None or not weight.is_floating_point() or weight.numel() == 0:
                continue

            layer, layout = entry.name(name), entry.layout
            given = named_splits.find(layer, name)
            parts = _divide(layer, layout, weight, entry.parts if given is None else given)
            bias = module._parameters.get(entry.bias_key)
            yield UnitWeight(layer, module, weight, bias, layout, parts)

    named_splits.refuse_unused()
    named_stacks.refuse_unused()


def describe(module: nn.Module, name: str = "") -> Iterator[Entry]:
    """Yield each weight with units of a module; GPT-2's packed projections go by their name."""
    if isinstance(module, nn.modules.conv._ConvTransposeNd):
        yield Entry("weight", "bias", Layout("io", module.groups))
    elif isinstance(module, nn.Linear | nn.modules.conv._ConvNd):
        yield Entry("weight", "bias", Layout(), is_affine=True)
    elif is_conv1d(module):
        conv1d: Any = module
        fan_in, out = conv1d.weight.shape
        is_packed = name.endswith("c_attn")  # GPT-2's q, k, v; k, v in its cross attention
        parts = out // fan_in if is_packed else 1
        yield Entry("weight", "bias", Layout("io"), parts, is_affine=True)
    elif isinstance(module, nn.MultiheadAttention):
        if "in_proj" in module._modules:  # converted: the projection is a layer of its own
            return
        yield Entry("in_proj_weight", "in_proj_bias", Layout(), 3, is_affine=True)
        for projection in "qkv":  # with kdim or vdim; the three share a bias
            yield Entry(f"{projection}_proj_weight", "", Layout())
    elif hasattr(module, "is_transposed") and hasattr(module, "is_concatenated"):
        # transformers marks its expert modules so.
        layout = Layout("eio" if module.is_transposed else "eoi")
        yield from _describe_experts(layout, bool(module.is_concatenated))
    elif type(module).__name__ == LLAMA4_EXPERTS:
        yield from _describe_experts(Layout("eio"), is_concatenated=True)


def _describe_experts(layout: Layout, is_concatenated: bool) -> Iterator[Entry]:
    for key in EXPERT_WEIGHTS:
        is_packed = key == "gate_up_proj" and is_concatenated
        yield Entry(key, f"{key}_bias", layout, 2 if is_packed else 1)


def find_affine(module: nn.Module) -> Entry | None:
    """Return the entry of a layer that computes rows^T x + bias and nothing else, or None."""
    entry = next(describe(module), None)
    if entry is None or not entry.is_affine:
        return None
    is_subclass = isinstance(module, PLAIN_LAYERS) and not hasattr(module, "_plain")
    return None if is_subclass and not is_plain_layer(module) else entry


def is_plain_layer(module: nn.Module) -> bool:
    """Return whether a module computes what nn.Linear or nn.Conv1d/2d/3d does.

    A subclass counts if it overrides and adds nothing.
    """
    bases = [base for base in PLAIN_LAYERS if isinstance(module, base)]
    return bool(bases) and computes_as(module, bases[0])


def is_conv1d(module: nn.Module) -> bool:
    """Return whether it is transformers' Conv1D, a linear layer with weight (in, out)."""
    kind = type(module)
    return (kind.__module__, kind.__name__) == ("transformers.pytorch_utils", "Conv1D")


def has_matrix(module: nn.Module) -> bool:
    """Return whether a module multiplies with a weight of its own, stored or computed."""
    weight = module._parameters.get("weight")
    is_leaf = next(module.children(), None) is None
    is_stored = is_leaf and weight is not None and weight.ndim > 1
    return is_stored or computes_weight(module)


def computes_weight(module: nn.Module) -> bool:
    """Return whether `weight` is a property, as in GmP layers and torch's parametrizations."""
    return isinstance(getattr(type(module), "weight", None), property)


class UnitLayer(NamedTuple):
    """An affine layer of a model: its module, number of units, and dimension of its outputs."""

    module: nn.Module
    size: int
    channel: int  # from the end


def find_unit_layers(model: nn.Module) -> dict[str, UnitLayer]:
    """Return the affine layers of a model, by name, in order of registration."""
    layers = {}
    for name, module in model.named_modules():
        size = count_units(module)
        if size:
            entry = find_affine(module)
            layer = name if entry is None else entry.name(name)
            layers[layer] = UnitLayer(module, size, find_channel(module))
    return layers


def find_custom_layers(model: nn.Module) -> list[str]:
    """Return the subclasses of affine layers that compute something of their own, by name."""
    names = []
    for name, module in model.named_modules():
        is_subclass = isinstance(module, PLAIN_LAYERS) and not isinstance(module, INSIDE_ATTENTION)
        if is_subclass and not hasattr(module, "read_units") and find_affine(module) is None:
            names.append(f"{strip_wrappers(name)!r} ({type(module).__name__})")
    return names


def find_other_units(model: nn.Module) -> list[str]:
    """Return what has units and is no affine layer: transposed convolutions, stacked experts."""
    names = []
    for name, module in model.named_modules():
        for entry in describe(module, name):
            if not entry.is_affine and module._parameters.get(entry.key) is not None:
                names.append(strip_wrappers(entry.name(name)))
    return names


def count_units(layer: Any) -> int:
    """Return how many units an affine layer has; 0 for any other module."""
    if hasattr(layer, "read_units"):
        return layer.weight_shape[0]
    entry = find_affine(layer)
    weight = None if entry is None else _read_weight(layer, entry)[0]
    if entry is None or weight is None:  # attention may have a weight for each projection
        return 0
    return len(entry.layout.to_rows(weight))


def read_rows(layer: Any) -> UnitRows:
    """Return the units of an affine layer, as its next call computes with them."""
    if hasattr(layer, "read_units"):
        return layer.read_units()
    entry = next(describe(layer))
    weight, bias = _read_weight(layer, entry)
    return UnitRows(entry.layout.to_rows(weight), {} if bias is None else {"offset": bias})


def _read_weight(layer: nn.Module, entry: Entry) -> tuple[Any, Tensor | None]:
    """Return weight and bias of a layer that holds both.

    torch's older hooks (weight_norm, pruning) write `layer.weight` in a call only, so it is
    computed here. Parametrizations are read in evaluation mode: in training, reading
    spectral_norm's weight takes a step of its power iteration.
    """
    with ExitStack() as after:
        parametrizations = layer._modules.get("parametrizations")
        if parametrizations is not None:
            for step in parametrizations.modules():
                after.callback(setattr, step, "training", step.training)
                step.training = False
        values = {name: getattr(layer, name) for name in (entry.key, entry.bias_key)}

    for hook in layer._forward_pre_hooks.values():
        if isinstance(hook, WeightNorm):
            values[hook.name] = hook.compute_weight(layer)
        elif isinstance(hook, SpectralNorm):
            values[hook.name] = hook.compute_weight(layer, do_power_iteration=False)
        elif isinstance(hook, BasePruningMethod):
            values[hook._tensor_name] = hook.apply_mask(layer)
    return values[entry.key], values[entry.bias_key]


def count_positions(layer: nn.Module) -> int:
    """Return in how many dimensions a unit has outputs at several places: 2 for Conv2d."""
    kernel = getattr(layer, "kernel_size", ())
    return len(kernel) if isinstance(kernel, tuple) else 0


def find_channel(layer: nn.Module) -> int:
    """Return where a layer's inputs and outputs have their channels, from the end."""
    return -1 - count_positions(layer)


def _find_stacks(module: nn.Module, name: str, stacks: "_Named") -> Iterator[Entry]:
    """Yield the parameters of a module that the user names as stacked experts."""
    for key, parameter in module._parameters.items():
        axes = stacks.find(f"{name}.{key}".strip("."))
        if axes is not None:
            _check_axes(f"{name}.{key}", axes, parameter)
            yield Entry(key, "", Layout(axes))


def _divide(
    layer: str, layout: Layout, weight: Tensor, given: int | Sequence[int]
) -> tuple[int, ...]:
    """Return the rows of each part: of each expert, and in it of each packed projection."""
    whole = torch.empty(weight.shape, device="meta")  # also of a sharded weight
    experts, rows = layout.view(whole).shape[:2]
    if "e" not in layout.axes:  # the groups of a transposed convolution are one layer
        experts, rows = 1, experts * rows

    counts = given if isinstance(given, tuple | list) else (given,)
    if not all(isinstance(count, int) and not isinstance(count, bool) for count in counts):
        raise ValueError(f"split: {layer!r} needs a number of parts, or rows; got {given!r}.")
    if not isinstance(given, int):
        sizes = tuple(given)
        if sum(sizes) != rows or min(sizes) < 1:
            raise ValueError(f"split: {layer!r} has {rows} rows; the parts {sizes} must add up.")
        return sizes * experts
    if given < 1 or rows % given:
        raise ValueError(f"split: {layer!r} has {rows} rows, which {given} does not divide.")
    return (rows // given,) * (given * experts)


def _check_axes(name: str, axes: str, parameter: Tensor | None) -> None:
    if not isinstance(axes, str) or sorted(axes) != ["e", "i", "o"]:
        raise ValueError(f"stacks: {name!r} needs the letters e, o and i once each; got {axes!r}.")
    if parameter is None or parameter.ndim != 3:
        shape = None if parameter is None else tuple(parameter.shape)
        raise ValueError(f"stacks: {name!r} must have three dimensions; its shape is {shape}.")


class _Named:
    """Values that a user gives by the end of a name; one that fits nothing is an error."""

    def __init__(self, option: str, values: Mapping[str, object]) -> None:
        if not isinstance(values, Mapping):
            raise ValueError(f"{option} maps the end of a name to a value; got {values!r}.")
        for end, value in values.items():
            if not isinstance(end, str) or value is None:
                raise ValueError(f"{option} maps the end of a name to a value; got {values!r}.")
        self.option, self.values = option, values
        self.used: set[str] = set()
        self.names: list[str] = []  # all that were asked for

    def find(self, *names: str) -> Any:
        self.names.append(strip_wrappers(names[0]))
        fitting = []
        for end in self.values:
            if any(f".{strip_wrappers(name)}".endswith(f".{end}") for name in names):
                fitting.append(end)
        self.used.update(fitting)
        return self.values[max(fitting, key=len)] if fitting else None  # the most specific

    def refuse_unused(self) -> None:
        unused = next((end for end in self.values if end not in self.used), None)
        if unused is None:
            return
        last = unused.rpartition(".")[2]
        near = [name for name in self.names if last in name][:3]
        if not near:
            ends = {name.rpartition(".")[2]: name for name in reversed(self.names)}
            near = [ends[end] for end in difflib.get_close_matches(last, ends, n=3, cutoff=0)]
        raise ValueError(
            f"{self.option}: no layer's name ends in {unused!r}, which must be one or more whole "
            f"parts between dots. Names here are, for example, {', '.join(near)}."
        )
