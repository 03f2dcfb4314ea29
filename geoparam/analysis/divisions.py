"""Which of a layer's values belong to which example of a batch.

Mostly a layer has one row for each example. But a model may put time first, join two batches, or
fold windows into the rows; it may also sort its batch, or mix it as a graph does. Runs on changed
examples tell these apart. A division is a number of blocks: how often the rows go through all
examples, one after the other. With 1 the values of an example are together.
"""

import contextlib
import warnings
from collections.abc import Collection, Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn

from geoparam.analysis.reading.layer_sites import Site
from geoparam.analysis.reading.probe import MaxPool, observe
from geoparam.conversion.plan import Inputs
from geoparam.inspection import arguments_of, tensors_in
from geoparam.storage import list_few

CLOSE = 0.01  # a change below this share of the change that was made counts as none
MOST = 1.5  # examples that see replaced ones may change so many times as much as these


def count_examples(inputs: Inputs) -> int | None:
    """Return the first tensor's first dimension that is not 1, or else 1; None without tensors.

    A list as the first argument, as detectors take it, has an example in each entry.
    """
    first = inputs[0] if isinstance(inputs, tuple) and inputs else None
    if isinstance(first, list):
        return len(first)
    sizes = [len(tensor) for tensor in tensors_in(inputs) if tensor.ndim]
    return next((size for size in sizes if size != 1), 1) if sizes else None


def list_divisions(z: Tensor, examples: int) -> list[int]:
    """Return how values may be divided: by example in turn, by copies of the batch, by time."""
    if not z.ndim or not examples:
        return []
    fits, is_second = len(z) % examples == 0, z.shape[1:2] == (examples,)
    return [1, len(z) // examples] * fits + [len(z)] * is_second


def divide(values: Tensor, examples: int, blocks: int) -> Tensor:
    """Return values as one row for each example."""
    return values.reshape(blocks, examples, -1).transpose(0, 1).flatten(1)


@torch.no_grad()
def find_divisions(model: nn.Module, inputs: Inputs, sites: Mapping[str, Site]) -> dict[int, int]:
    """Return the division of each step's values; 0 where they do not stay with the examples.

    All examples are moved to the next place: in the right division their rows move with them. Or,
    where a model tells places apart or takes lengths in sorted order only, some examples are
    replaced by those before them: their rows change, and no others. A step that passes neither
    test has 0, unless there is a row for each example and they do not keep their places, as in a
    graph: those are taken for the examples' rows, and a warning says so.
    """
    examples = count_examples(inputs)
    if not examples or examples < 2:
        return {}
    args, kwargs = arguments_of(model, inputs)
    batch = _list_batched(args, kwargs, examples, {id(tensor) for tensor in tensors_in(inputs)})
    here, chosen = torch.arange(examples, device="cpu"), _choose_examples(batch, examples)
    orders = here, here.roll(1), here - chosen.long()
    names: dict[int, str] = {}
    before, moved, replaced = (
        _sum_values(model, args or kwargs, sites, names) for _ in _reorder(batch, orders)
    )
    found = {
        step: _choose_division(values, moved.get(step), replaced.get(step), chosen)
        for step, values in before.items()
    }
    if unsure := sorted({names[step] for step, division in found.items() if division is None}):
        warnings.warn(
            f"it could not be checked which values are whose in {list_few(unsure)}, as where "
            "examples see each other: the rows there are taken for those of the examples.",
            stacklevel=3,
        )
    return {step: 1 if division is None else division for step, division in found.items()}


def _choose_division(
    values: Tensor, moved: Tensor | None, replaced: Tensor | None, chosen: Tensor
) -> int | None:
    """Return the division that passes a test, 0 for none; None if rows may be the examples'."""
    unknown = torch.full_like(values, torch.nan)  # is close to nothing
    moved = unknown if moved is None or moved.shape != values.shape else moved
    replaced = unknown if replaced is None or replaced.shape != values.shape else replaced
    examples, shares = len(chosen), dict[int, float]()
    for blocks in list_divisions(values, examples):
        change = divide((replaced - values).abs(), examples, blocks).mean(dim=1).cpu()
        shares[blocks] = (change[~chosen].mean() / change[chosen].mean()).item()  # or NaN
    parts = {b: [divide(run, examples, b) for run in (values, moved)] for b in shares}
    if moving := [b for b, (old, new) in parts.items() if _is_close(new, old.roll(1, 0), old)]:
        best = min(moving, key=shares.__getitem__)
        return 0 if shares[best] > MOST else best
    if _is_close(moved, values, values.roll(1, 0)):  # rows stay although examples moved
        return 0
    best = min(shares, key=shares.__getitem__, default=0)
    if shares and shares[best] < CLOSE:
        return best
    return None if len(values) == examples else 0


def _is_close(found: Tensor, expected: Tensor, other: Tensor) -> bool:
    """Return whether values are the expected ones, rather than others, up to rounding."""
    allowed = CLOSE * (expected - other).abs().mean() + 1e-5 * expected.abs().mean()
    return bool((found - expected).abs().mean() <= allowed)


def _sum_values(
    model: nn.Module, inputs: Inputs, sites: Mapping[str, Site], names: dict[int, str]
) -> dict[int, Tensor]:
    """Return each step's values in a run, summed over all but two dimensions; note the layers."""
    found: dict[int, Tensor] = {}

    def see(site: Site, z: Tensor, step: int) -> None:
        has_bits = isinstance(site.activation, MaxPool) or site.breaks is not None
        if has_bits and z.ndim and z.numel():
            values = z.float().nan_to_num(0, 0, 0).reshape(*(*z.shape, 1)[:2], -1)
            weights = torch.linspace(1, 2, values.shape[2], device=z.device)  # ones might cancel
            with torch.autocast(z.device.type, enabled=False):
                found[step], names[step] = values @ weights, site.name

    # A model may refuse another order, or take other steps: what was seen is tested all the same.
    with contextlib.suppress(Exception):
        observe(model, inputs, sites, pre_activation=see)
    return found


def _list_batched(
    args: tuple, kwargs: Mapping, examples: int, given: Collection[int]
) -> list[Tensor | list]:
    """Return what has an entry for each example, and is no tensor of the user's."""
    if args and isinstance(args[0], list):
        return [args[0]]
    unique = {id(t): t for t in tensors_in((args, kwargs)) if t.layout is torch.strided}
    return [t for key, t in unique.items() if t.shape[:1] == (examples,) and key not in given]


def _choose_examples(batch: Sequence[Tensor | list], examples: int) -> Tensor:
    """Return bools for every second example, the last too, that differs from the one before."""
    differs = torch.zeros(examples, dtype=torch.bool, device="cpu")
    for item in batch:
        if isinstance(item, Tensor):
            differs[1:] |= (item[1:] != item[:-1]).reshape(examples - 1, -1).any(dim=1).cpu()
        else:
            differs[1:] = True
    return differs & ((differs.sum() - differs.cumsum(0)) % 2 == 0)


def _reorder(batch: Sequence[Tensor | list], orders: Sequence[Tensor]) -> Iterator[None]:
    """Put the examples into each order, in place."""
    contents = [item.clone() if isinstance(item, Tensor) else item.copy() for item in batch]
    for order in orders:
        for item, content in zip(batch, contents, strict=True):
            if isinstance(item, Tensor):
                item.copy_(content[order.to(item.device)])
            else:
                item[:] = [content[index] for index in order.tolist()]
        yield
