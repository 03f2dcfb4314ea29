"""What a layer is for in its model: an output layer, a router, a layer before a norm."""

from collections.abc import Sequence

from torch import Tensor, nn

from geoparam.arguments import warn_user
from geoparam.model.graph import Graph
from geoparam.model.norms import CHANNEL_NORMS
from geoparam.model.run import strip_wrappers
from geoparam.model.trace import output_layers
from geoparam.model.unit_layers import EMBEDDINGS, UnitWeight

HEADS = ("head", "heads", "classifier", "lm_head")  # usual names of a model's last part


def find_embeddings(model: nn.Module) -> list[Tensor]:
    """Return the weights of embeddings."""
    return [m.weight for m in model.modules() if isinstance(m, EMBEDDINGS)]


def is_router(model: nn.Module, layer: str) -> bool:
    """Return whether a layer chooses among experts: by its name, what it is in, its neighbours."""
    path, _, name = layer.rpartition(".")
    parts = layer.split(".")
    for i, part in enumerate(parts, start=1):
        module = model.get_submodule(".".join(parts[:i]))
        is_named_so = part == "router" or type(module).__name__.endswith("Router")
        if is_named_so and not hasattr(module, "experts"):
            return True

    parent = model.get_submodule(path)
    has_stack = any(p is not None and p.ndim == 3 for p in parent._parameters.values())
    return name in ("gate", "router") and (hasattr(parent, "experts") or has_stack)


def find_outputs(
    model: nn.Module, candidates: Sequence[UnitWeight], graph: Graph | None
) -> dict[str, str]:
    """Return the output layers and why they count as such.

    In a run, those that outputs come from. Without one, the layer that is tied to an embedding,
    or the only one of its shape if it comes last or can read what comes last, else the last in
    order and those at the end of a part named as a head. The order also decides for layers that
    did not run, as heads for training only.
    """
    reason = "the output layer"
    if graph is not None:
        ran = set(graph.layers)
        unseen = [layer for layer in output_layers(model) if layer not in ran]
        return dict.fromkeys([*graph.outputs, *unseen], reason)

    embeddings = find_embeddings(model)
    if any(c.weight is w for c in candidates for w in embeddings):
        return {}
    last = [layer for layer in output_layers(model) if not is_router(model, layer)]
    ends_a_block = any(_is_in_a_block(model, layer) for layer in last)
    head = _find_head(candidates, embeddings, last)
    if head:
        if head not in last and not ends_a_block:
            warn_user(
                f"{head!r} is taken for the output layer because it has an embedding's shape, "
                f"but {', '.join(last)} comes last. If that is the output layer, give "
                "example_inputs or filter_fn."
            )
        return {head: f"{reason}: shaped as the embedding"}

    if named := [layer for layer in _end_heads(candidates) if layer not in last]:
        warn_user(
            f"{', '.join(map(repr, named))} is taken for an output layer because of its name, and "
            f"{', '.join(map(repr, last))} because it comes last: none of them has units. With "
            "example_inputs a run of the model decides."
        )
        return {**dict.fromkeys(last, reason), **dict.fromkeys(named, f"{reason}, by name")}

    if ends_a_block:
        reason += ", by order; it ends a block"
        warn_user(
            f"{', '.join(map(repr, last))} is taken for the output layer because it comes last, "
            "but it looks like the end of one of several equal blocks. If the output layer is "
            "another one, give example_inputs or filter_fn."
        )
    return dict.fromkeys(last, reason)


def _end_heads(candidates: Sequence[UnitWeight]) -> list[str]:
    """Return the last layer of each part of the model that is named as a head."""
    ends = {}
    for candidate in candidates:
        part = strip_wrappers(candidate.layer).partition(".")[0]
        if part in HEADS:
            ends[part] = candidate.layer
    return list(ends.values())


def _find_head(
    candidates: Sequence[UnitWeight], embeddings: Sequence[Tensor], last: Sequence[str]
) -> str | None:
    """Return the only layer of an embedding's shape, if it can be the head.

    A head that does not come last, because it was registered first, reads what the last layer
    computes. A layer in a block can have the shape of an embedding by chance.
    """
    shapes = {weight.shape for weight in embeddings}
    alike = [c for c in candidates if c.weight.shape in shapes]
    if len(alike) != 1:
        return None
    head = alike[0]
    widths = [sum(c.parts) for c in candidates if c.layer in last]
    reads_last = head.weight.shape[1] in widths
    return head.layer if head.layer in last or reads_last else None


def _is_in_a_block(model: nn.Module, layer: str) -> bool:
    """Return whether a layer is in one of several equal blocks.

    Either it has a twin at the same place in the block before, or that is of the same class.
    """
    modules = dict(model.named_modules())
    parts = layer.split(".")
    for i, part in enumerate(parts[:-1]):
        if not part.isdigit() or part == "0":
            continue
        block = ".".join(parts[: i + 1])
        before = ".".join([*parts[:i], str(int(part) - 1)])
        twin = ".".join([before, *parts[i + 1 :]])
        kind = type(modules[block])
        is_container = issubclass(kind, nn.Sequential | nn.ModuleList | nn.ModuleDict)
        if type(modules.get(twin)) is type(modules[layer]):
            return True
        if type(modules.get(before)) is kind and not is_container:
            return True
    return False


def find_norms(
    model: nn.Module, candidates: Sequence[UnitWeight], graph: Graph | None
) -> dict[str, str]:
    """Return the norm after each layer: by a run, and by order for what did not run."""
    norms = _find_norms_by_order(model, candidates)
    if graph is None:
        return norms
    norms = {layer: norm for layer, norm in norms.items() if layer not in graph.layers}
    for layer in graph.layers:
        norm, is_only_reader = graph.norm_after(layer)
        if is_only_reader and norm is not None and norm.name:
            if _undoes_scale(model.get_submodule(norm.name), model.training):
                norms[layer] = norm.name
    return norms


def _undoes_scale(norm: nn.Module, model_trains: bool) -> bool:
    """Return whether a norm divides by its input's scale in training; a frozen one does not."""
    is_trained = [p.requires_grad for p in norm.parameters()] or [True]
    is_frozen = not norm.training and (model_trains or not any(is_trained))
    has_statistics = getattr(norm, "track_running_stats", True)
    return isinstance(norm, CHANNEL_NORMS) and not (is_frozen and has_statistics)


def _find_norms_by_order(model: nn.Module, candidates: Sequence[UnitWeight]) -> dict[str, str]:
    """Guess without a run: the norm comes next among the modules, and has the layer's width."""
    widths = {candidate.module: sum(candidate.parts) for candidate in candidates}
    norms: dict[str, str] = {}
    layer, width = "", 0
    for name, module in model.named_modules():
        if isinstance(module, CHANNEL_NORMS):
            is_beside = name.rpartition(".")[0] == layer.rpartition(".")[0]
            if is_beside and width == module.num_features:
                if _undoes_scale(module, model.training):
                    norms[layer] = name
            width = 0
        elif module in widths:
            layer, width = name, widths[module]
        elif next(module.children(), None) is None and not isinstance(module, nn.Identity):
            width = 0
    return norms
