"""What follows what in a model: layer, norm, activation, next layer, seen in one run of it.

`trace(model, inputs)` runs the model once in evaluation mode and writes down every torch function
that makes or changes a tensor, with the steps whose results it reads. A `TorchFunctionMode` sees
the functions as the model's author wrote them (`F.relu`, `x.relu_()`, `out += identity`); forward
hooks turn the call of a layer, norm or activation module into one step with the module's name.

- Tensors are known by identity, held weakly. A change in place shows in `_version`, and the tensor
  then belongs to the step that changed it, so that `out += identity` and `ReLU(inplace=True)` need
  no rule. A step that reads another view of the same memory reads both steps.
- A call that returns its input untouched (Identity, Dropout in evaluation) leaves no step.
- A weight that a function uses, as in `F.linear(x, embedding.weight)`, is recognised, also through
  `weight.t()`; such a layer is named by the parameter, without a last ".weight".
- Under a TorchFunctionMode torch does not use its fused attention. It then calls one function,
  which is recorded as its input projection, the attention, and its output projection.

Not seen are branches that the example inputs do not take, what only training runs (auxiliary
heads), scripted functions, foreign kernels, and values that leave torch and return.
"""

import inspect
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakTensorKeyDictionary

from geoparam.model import norms
from geoparam.model.activations import ACTIVATIONS, BY_MODULE
from geoparam.model.graph import Graph, Node, Step
from geoparam.model.run import (
    arguments_of,
    call,
    find_package,
    inspection_mode,
    refuse_unready,
    tensors_in,
)
from geoparam.model.unit_layers import (
    EMBEDDINGS,
    FUNCTIONS,
    LAYERS,
    computes_weight,
    find_channel,
    has_matrix,
)

Filter = Callable[[nn.Module, str], bool]  # of a module and its name

POOLS = ("avg_pool1d", "avg_pool2d", "avg_pool3d")
MAX_POOLS = ("max_pool1d", "max_pool2d", "max_pool3d")
VIEWS = (
    "view",
    "reshape",
    "flatten",
    "unflatten",
    "permute",
    "transpose",
    "swapaxes",
    "swapdims",
    "movedim",
    "squeeze",
    "unsqueeze",
    "expand",
    "getitem",
    "t",
    "T",
    "mT",
)
CASTS = ("to", "float", "half", "bfloat16", "double", "type", "type_as")
COPIES = ("clone", "detach", "data", "contiguous", "dropout")
NEW = ("zeros_like", "ones_like", "full_like", "new_zeros", "new_ones", "new_full")

# What a function is, by its name without outer underscores.
OPS = {
    **dict.fromkeys(ACTIVATIONS, "activation"),
    **dict.fromkeys(norms.FUNCTIONS, "norm"),
    **dict.fromkeys(FUNCTIONS, "linear"),
    **dict.fromkeys(("embedding", "embedding_bag"), "embedding"),
    **dict.fromkeys(("add", "sub", "mul", "div"), "arithmetic"),
    **dict.fromkeys(VIEWS, "view"),
    **dict.fromkeys((*CASTS, *COPIES), "same"),
    **dict.fromkeys(("mean", *POOLS, *(f"adaptive_{pool}" for pool in POOLS)), "average"),
    **dict.fromkeys((*MAX_POOLS, *(f"adaptive_{pool}" for pool in MAX_POOLS)), "max"),
    **dict.fromkeys(NEW, "constant"),
}
OPERATORS = {"iadd": "add", "radd": "add", "imul": "mul", "rmul": "mul", "truediv": "div"}
KNOWN = ("torch", "torchvision", "timm", "transformers", "geoparam")  # by their classes' names
NUMBERS = (int, float, str, type(None), torch.dtype, torch.device, torch.Size)
Watch = Mapping[Step, Sequence[Callable[[Tensor], None]]]


class Run(NamedTuple):
    """One run of a model: its steps, its outputs, and the ids of tensors it computed with."""

    graph: Graph
    outputs: list[Tensor]
    reads: set[int]


def trace(
    model: nn.Module,
    inputs: Tensor | Sequence | Mapping[str, object] = (),
    kwargs: Mapping[str, object] | None = None,
    watch: Watch | None = None,
) -> Graph:
    """Run `model` once on example inputs and return the graph of what it did.

    The run is in evaluation mode, without gradients and on copies of the inputs; afterwards the
    model is as it was (see `inspection_mode`). One or two examples are enough.

    Args:
        model: Any module. It runs eagerly, also where it is compiled.
        inputs: A tensor, a tuple of positional arguments, or a mapping of keyword arguments.
        kwargs: Further keyword arguments.
        watch: Functions by number, op and name of a step. They are called once the step is
            recorded, with a copy of the tensor that it read, as it was before the step.

    Example:
        >>> model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(),
        ...                       nn.Linear(32, 10))
        >>> graph = trace(model, torch.zeros(1, 3, 4, 4))
        >>> graph.first, graph.outputs
        (('0',), ('4',))
        >>> norm, exclusive = graph.norm_after("0")
        >>> norm.name, exclusive
        ('1', True)
    """
    return record_run(model, inputs, kwargs, watch).graph


def record_run(
    model: nn.Module,
    inputs: Tensor | Sequence | Mapping[str, object] = (),
    kwargs: Mapping[str, object] | None = None,
    watch: Watch | None = None,
) -> Run:
    """Run `model` as `trace` does, and return its outputs and reads too."""
    refuse_unready(model)
    with inspection_mode(model):
        args, kwargs = arguments_of(model, inputs, **(kwargs or {}))
        recorder = _Recorder(model, watch or {})
        for tensor in _find_tensors((*args, *kwargs.values())):
            kind = "index" if _is_index(tensor) else "input"
            recorder.write(Node(kind, kind), [tensor])
        with recorder.hook_modules(model), recorder:
            result = call(model, args, kwargs)

    sources = _sources(recorder.read((result,)))
    recorder.write(Node("output", "output", inputs=sources), [])
    graph = Graph(recorder.nodes, recorder.dropped, recorder.batch_norms)
    return Run(graph, list(tensors_in(result)), recorder.reads)


def _is_index(tensor: Tensor) -> bool:
    """Return whether an input chooses entries, as tokens do; bytes may be an image."""
    has_values = tensor.is_floating_point() or tensor.is_complex()
    return not has_values and tensor.dtype != torch.uint8


def is_tracing() -> bool:
    """Return whether a trace is under way: what a hook computes in it would count as steps."""
    modes = torch.overrides._get_current_function_mode_stack()
    return any(isinstance(mode, _Recorder) for mode in modes)


def output_layers(model: nn.Module) -> tuple[str, ...]:
    """Guess the output layers without running the model: the last one in order of registration.

    A frozen copy of another part, as a teacher, does not count. The layers right before it do if
    they take as many inputs and give a number of outputs that it does not take: several heads. A
    bare layer is none. `trace(model, inputs).outputs` does not guess.

    Example:
        >>> output_layers(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)))
        ('2',)
    """
    copies = tuple(_find_frozen_copies(model))
    layers = []
    for name, module in model.named_modules():
        if name and not name.startswith(copies) and _step(module).kind == "layer":
            layers.append((name, module))
    if not layers:
        return ()

    heads = [layers[-1]]
    for name, module in reversed(layers[:-1]):
        if not _are_beside(module, layers[-1][1]):
            break
        heads.insert(0, (name, module))
    return tuple(name for name, _ in heads)


def _find_frozen_copies(model: nn.Module) -> Iterator[str]:
    """Yield the prefixes of frozen parts, of several layers, that a trained one beside is like."""
    for prefix, parent in model.named_modules():
        if prefix and isinstance(parent, nn.Sequential | nn.ModuleList):
            continue  # a stack of equal blocks, the last of which may be frozen
        trained_shapes, frozen_shapes = [], {}
        for name, part in parent.named_children():
            if next(part.children(), None) is None:
                continue
            shapes = [p.shape for p in part.parameters()]
            if any(p.requires_grad for p in part.parameters()):
                trained_shapes.append(shapes)
            else:
                frozen_shapes[name] = shapes
        for name, shapes in frozen_shapes.items():
            if shapes in trained_shapes:
                yield f"{prefix}.{name}.".lstrip(".")


def _are_beside(layer: nn.Module, last: nn.Module) -> bool:
    """Return whether two layers take the same input, as far as their sizes tell."""
    for inputs, outputs in (("in_features", "out_features"), ("in_channels", "out_channels")):
        if hasattr(layer, inputs) and hasattr(last, inputs):
            return getattr(layer, inputs) == getattr(last, inputs) != getattr(layer, outputs)
    return False


class _Read(NamedTuple):
    """A tensor that a call reads, its version before the call and the steps it comes from."""

    tensor: Tensor
    version: int
    sources: tuple[int, ...]


class _Recorder(TorchFunctionMode):
    """Records each function, and each call of a known module, as a node."""

    def __init__(self, model: nn.Module, watch: Watch) -> None:
        super().__init__()
        self.watch = watch
        self.watched = {number for number, _, _ in watch}
        self.seen: Tensor | None = None  # by the next step, if that is watched
        self.nodes: list[Node] = []
        self.reads: set[int] = set()  # ids of the tensors that functions computed with
        self.batch_norms: dict[str, None] = {}  # modules whose tensors F.batch_norm got, in order
        self.dropped: set[int] = set()  # steps whose results go through what only training sees
        self.steps_before: list[int] = []  # when each leaf that is under way was called
        self.origin = WeakTensorKeyDictionary()  # tensor -> (its node, its version then)
        self.writer = WeakTensorKeyDictionary()  # base of views -> the last node to change it
        self.owner = WeakTensorKeyDictionary()  # parameter, or made of parameters alone -> name
        self.calls: list[list[_Read]] = []  # known modules under way, and what they read
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            self.owner[tensor] = re.sub(r"\bparametrizations\.(\w+)\..*", r"\1", name)
        for name, module in model.named_modules():
            if computes_weight(module):
                for parameter in module.parameters(recurse=False):
                    self.owner[parameter] = f"{name}.weight"

    def __torch_function__(
        self, func: Callable, types: object, args: tuple = (), kwargs: dict | None = None
    ) -> object:
        kwargs = kwargs or {}
        if self.calls:  # inside of a known module
            result = func(*args, **kwargs)
            self.note_reads(func, _find_tensors((*args, *kwargs.values())), result)
            return result

        read = self.see(args, kwargs)
        result = func(*args, **kwargs)
        self.note_reads(func, [r.tensor for r in read], result)
        if func is F.multi_head_attention_forward:
            self.attention(inspect.signature(func).bind(*args, **kwargs).arguments, result)
            return result

        # A division with rounding is not linear.
        op = "round" if kwargs.get("rounding_mode") else _name_function(func)
        node = self.classify(op, read)
        options = {name: value for name, value in kwargs.items() if name != "input"}
        first = args[0] if args else kwargs.get("input")
        if len(read) == 1 and read[0].tensor is first:
            node = replace(node, func=func, args=args[1:], kwargs=options)
        self.record(node, read, result)
        return result

    def note_reads(self, func: Callable, tensors: Sequence[Tensor], result: object) -> None:
        """Note what was computed with; reading a shape or dtype does not count."""
        is_attribute = getattr(func, "__name__", "") == "__get__"
        if not is_attribute or isinstance(result, Tensor):
            self.reads.update(map(id, tensors))
        if _name_function(func) == "batch_norm":
            for tensor in tensors:
                if owner := self.owner.get(tensor):
                    self.batch_norms[owner.rpartition(".")[0]] = None

    def classify(self, op: str, read: list[_Read]) -> Node:
        """Return what a function is: a layer if it multiplies with a parameter, and so on."""
        kind, sources = OPS.get(op, "other"), _sources(read)
        owned = [r.tensor for r in read if r.tensor in self.owner]
        if kind == "linear":
            if owned and sources:
                weight = self.owner[max(owned, key=lambda tensor: tensor.ndim)]
                return Node("layer", op, weight.removesuffix(".weight"), channel=FUNCTIONS[op])
            return Node("other", op)
        if kind in ("norm", "embedding") and owned:
            return Node(kind, op, self.owner[owned[0]].rpartition(".")[0])
        if kind == "arithmetic":
            commutes = op in ("add", "mul")
            if len(sources) > 1 and op in ("add", "sub"):
                return Node("sum", op)
            if len(sources) == 1 and (commutes or read[0].sources):
                return Node("scale", op)
            return Node("other", op)
        return Node(kind, op)

    def attention(self, arguments: Mapping, result: object) -> None:
        """Record torch's attention as input projections, the attention and the output layer."""
        inputs = [arguments[name] for name in ("query", "key", "value")]
        sources = _sources(self.read(inputs))
        projections = []
        for key in ("in_proj_weight", "q_proj_weight", "k_proj_weight", "v_proj_weight"):
            weight = arguments.get(key)
            if weight is None:
                continue
            shape = torch.Size((*arguments["query"].shape[:-1], len(weight)))
            projections.append(len(self.nodes))
            self.write(Node("layer", "linear", self.layer_of(weight), sources, shape, -1), [])

        self.write(Node("other", "attention", inputs=tuple(projections)), [])
        mixed = len(self.nodes) - 1
        outputs = list(tensors_in(result))
        layer = self.layer_of(arguments["out_proj_weight"])
        self.write(Node("layer", "linear", layer, (mixed,), outputs[0].shape, -1), outputs)

    def layer_of(self, weight: Tensor) -> str:
        return self.owner.get(weight, "").removesuffix(".weight")

    @contextmanager
    def hook_modules(self, model: nn.Module) -> Iterator[None]:
        """Let each call of a known module be one step."""
        with ExitStack() as stack:
            for name, module in model.named_modules():
                node = _step(module)
                if node.kind:  # else its inside is traced
                    leave = partial(self.leave, replace(node, name=name, is_call=True))
                    enter = module.register_forward_pre_hook(self.enter, with_kwargs=True)
                    stack.callback(enter.remove)
                    stack.callback(module.register_forward_hook(leave).remove)
                elif _may_act_in_training(module):
                    begin = module.register_forward_pre_hook(self.begin_leaf)
                    stack.callback(begin.remove)
                    stack.callback(module.register_forward_hook(self.end_leaf).remove)
            yield

    def begin_leaf(self, module: nn.Module, args: tuple) -> None:
        self.steps_before.append(len(self.nodes))

    def end_leaf(self, module: nn.Module, args: tuple, result: object) -> None:
        """Note a result that a module passes on untouched: in training it may not, as dropout."""
        is_untouched = self.steps_before.pop() == len(self.nodes)
        if is_untouched and isinstance(result, Tensor) and any(result is x for x in args):
            self.dropped.update(self.sources(result))

    def enter(self, module: nn.Module, args: tuple, kwargs: dict) -> None:
        self.calls.append([])
        if len(self.calls) == 1:
            self.calls[0] = self.see(args, kwargs)

    def leave(self, node: Node, module: nn.Module, args: tuple, result: object) -> None:
        if len(self.calls) == 1:
            self.record(node, self.calls[0], result)
        self.calls.pop()

    def see(self, args: tuple, kwargs: Mapping[str, object]) -> list[_Read]:
        """Read the arguments of a call, and copy the one that a watched step would read."""
        read = self.read((*args, *kwargs.values()))
        if len(self.nodes) in self.watched:
            self.seen = next((r.tensor.clone() for r in read if r.sources), None)
        return read

    def read(self, values: Sequence) -> list[_Read]:
        tensors = _find_tensors(values)
        for t in tensors:  # `layer.weight` of a GmP layer is a view that no function has made
            if owner := self.owner.get(_base(t)):
                self.owner.setdefault(t, owner)
        return [_Read(t, _version(t), self.sources(t)) for t in tensors]

    def sources(self, tensor: Tensor) -> tuple[int, ...]:
        """Return the step that made `tensor`, and one that changed it since in another view."""
        made_by, version = self.origin.get(tensor, (None, -1))
        changed_by = None
        if _version(tensor) != version:
            changed_by = self.writer.get(_base(tensor))

        steps = [] if made_by is None else [made_by]
        if changed_by not in (None, made_by):
            steps.append(changed_by)
        return tuple(steps)

    def record(self, node: Node, read: list[_Read], result: object) -> None:
        """Record a call that made or changed a tensor; of constants, only their owner."""
        changed = [r.tensor for r in read if _version(r.tensor) != r.version]
        read_ids = {id(r.tensor) for r in read}
        results = [t for t in _find_tensors((result,)) if id(t) not in read_ids]
        results += changed
        if not results and "dropout" in node.op:  # which only training sees
            self.dropped.update(_sources(read))
        if not results or node.kind == "constant":
            return

        sources = _sources(read)
        if not sources and node.kind != "layer":  # of parameters alone
            owners = [self.owner[r.tensor] for r in read if r.tensor in self.owner]
            for tensor in results if owners else ():
                self.owner[tensor] = owners[0]
            return

        first = results[0]
        is_rounded = not (first.is_floating_point() or first.is_complex())
        if node.kind == "same" and is_rounded:  # a cast to integers
            node = replace(node, kind="other")
        self.write(replace(node, inputs=sources, shape=first.shape), results, changed)

    def write(self, node: Node, results: Sequence[Tensor], changed: Sequence[Tensor] = ()) -> None:
        """Add a step with what it computed, and what it changed in place."""
        number = len(self.nodes)
        self.nodes.append(node)
        for tensor in results:
            self.origin[tensor] = (number, _version(tensor))
        for tensor in changed:
            self.writer[_base(tensor)] = number

        seen, self.seen = self.seen, None
        if seen is None:
            return
        with torch._C.DisableTorchFunction():  # what they compute is no step
            for function in self.watch.get((number, node.op, node.name), ()):
                function(seen)


def _step(module: nn.Module) -> Node:
    """Return the node of a call of `module`; its kind is empty if the inside is traced instead.

    A norm or activation with children is traced inside: timm's BatchNormAct2d holds both. So is
    one that only has the name, or the base class, of a known one.
    """
    op = type(module).__name__.lower()
    if isinstance(module, LAYERS):
        return Node("layer", op, channel=find_channel(module))
    if isinstance(module, EMBEDDINGS):
        return Node("embedding", op)

    activation = BY_MODULE.get(op.removesuffix("activation"))  # as in NewGELUActivation
    is_leaf = next(module.children(), None) is None
    is_norm = "norm" in op or isinstance(module, norms.NORMS)
    if is_leaf and (is_norm or activation is not None):
        is_known = find_package(module) in KNOWN
        if is_norm and (is_known or not isinstance(module, norms.NORMS)):
            return Node("norm", op)
        if activation is not None and is_known:
            return Node("activation", activation)
    if has_matrix(module):
        return Node("layer", op, channel=find_channel(module))
    return Node("", op)


def _may_act_in_training(module: nn.Module) -> bool:
    """Return whether a module without steps in evaluation may have some in training."""
    is_leaf = next(module.children(), None) is None
    return is_leaf and not type(module).__name__.endswith("Identity")


def _name_function(func: Callable) -> str:
    """Return one name for `__iadd__`, `add_` and `aten.add.Tensor`; `x.T`, a property, is "T"."""
    name = getattr(func, "__name__", "")
    if name == "__get__":
        name = getattr(func, "__self__", func).__name__
    name = name.partition(".")[0]
    name = name.strip("_")
    name = name.removesuffix("_with_indices")  # max pools that also return places
    return OPERATORS.get(name, name)


def _find_tensors(values: Sequence) -> list[Tensor]:
    """Return the tensors in the arguments of a call, or in its result."""
    tensors: list[Tensor] = []
    for value in values:
        if isinstance(value, Tensor):
            tensors.append(value)
        elif isinstance(value, tuple | list):  # as a kernel's size is
            tensors += _find_tensors(value)
        elif not isinstance(value, NUMBERS):
            tensors += tensors_in(value)
    return tensors


def _sources(read: list[_Read]) -> tuple[int, ...]:
    return tuple(source for r in read for source in r.sources)


def _version(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


def _base(tensor: Tensor) -> Tensor:
    with torch._C.DisableTorchFunctionSubclass():  # the object itself, not a copy of a subclass
        return tensor if tensor._base is None else tensor._base
