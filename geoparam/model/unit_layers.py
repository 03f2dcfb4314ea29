"""The one table of layers: which parameters of a model hold units, and how they are laid out.

A unit is what computes one output: a row of nn.Linear's weight (out, in), a filter of a
convolution, a column of a transposed convolution or of transformers' Conv1D. Some parameters hold
several layers: packed projections (q, k and v in one matrix) and stacked experts (a 3-D tensor).
`Layout` says which axis is which, `parts` how many rows each layer of a parameter has.

To teach the library a new type of layer, add an entry to `describe`.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from geoparam.inspection import computes_as, is_conv1d, strip_wrappers

Split = Mapping[str, int | Sequence[int]]
Stacks = Mapping[str, str]
PLAIN_LAYERS = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)
EXPERT_WEIGHTS = ("gate_up_proj", "up_proj", "down_proj")  # of transformers' expert modules


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
        return self.view(weight).flatten(0, 1).flatten(1)

    @property
    def has_whole_rows(self) -> bool:
        """Whether a piece of the first axis is a number of whole units."""
        return self.axes == "oi" or self.axes[0] == "e"


class Entry(NamedTuple):
    """One weight of a type of layer: its key and its bias's in the module, layout, parts."""

    key: str
    bias_key: str
    layout: Layout
    parts: int = 1  # equal ones, as the three of a packed projection

    def name(self, module_name: str) -> str:
        """Return the layer's name: its module's, with the key where that is not "weight"."""
        return module_name if self.key == "weight" else f"{module_name}.{self.key}".strip(".")


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
        yield Entry("weight", "bias", Layout())
    elif is_conv1d(module):
        conv1d: Any = module
        fan_in, out = conv1d.weight.shape
        is_packed = name.endswith("c_attn")  # GPT-2's q, k, v; k, v in its cross attention
        yield Entry("weight", "bias", Layout("io"), out // fan_in if is_packed else 1)
    elif isinstance(module, nn.MultiheadAttention):
        yield Entry("in_proj_weight", "in_proj_bias", Layout(), 3)
        for projection in "qkv":  # with kdim or vdim; the three share a bias
            yield Entry(f"{projection}_proj_weight", "", Layout())
    elif hasattr(module, "is_transposed") and hasattr(module, "is_concatenated"):
        # transformers marks its expert modules so.
        layout = Layout("eio" if module.is_transposed else "eoi")
        for key in EXPERT_WEIGHTS:
            is_packed = key == "gate_up_proj" and bool(module.is_concatenated)
            yield Entry(key, f"{key}_bias", layout, 2 if is_packed else 1)


def is_plain_layer(module: nn.Module) -> bool:
    """Return whether a module computes what nn.Linear or nn.Conv1d/2d/3d does.

    A subclass counts if it overrides and adds nothing.
    """
    bases = [base for base in PLAIN_LAYERS if isinstance(module, base)]
    return bool(bases) and computes_as(module, bases[0])


def find_channel(layer: nn.Module) -> int:
    """Return where a layer's inputs and outputs have their channels, from the end."""
    kernel = getattr(layer, "kernel_size", ())
    positions = len(kernel) if isinstance(kernel, tuple) else 0
    return -1 - positions


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
    if not all(isinstance(count, int) for count in counts):
        raise ValueError(f"split: {layer!r} needs a number of parts, or rows; got {given!r}.")
    if isinstance(given, int):
        if given < 1 or rows % given:
            raise ValueError(f"split: {layer!r} has {rows} rows, which {given} does not divide.")
        sizes = (rows // given,) * given
    else:
        sizes = tuple(given)
        if sum(sizes) != rows or min(sizes) < 1:
            raise ValueError(f"split: {layer!r} has {rows} rows; the parts {sizes} must add up.")
    return sizes * experts


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

    def find(self, *names: str) -> Any:
        for end, value in self.values.items():
            for name in map(strip_wrappers, names):
                if name == end or name.endswith(f".{end}"):
                    self.used.add(end)
                    return value
        return None

    def refuse_unused(self) -> None:
        if unused := [end for end in self.values if end not in self.used]:
            raise ValueError(f"{self.option}: no layer's name ends in {unused[0]!r}.")
