"""Many models as one tensor (S, elements), and their data in the shapes that a stack works with.

A row of the tensor holds the parameters of one model, then its buffers.
"""

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor, nn

import geoparam as gp

Array = np.ndarray
Data = tuple[Array | Tensor, Array | Tensor]


def pack(models: Sequence[nn.Sequential]) -> Tensor:
    """Return the state of all models, one row for each."""
    rows = []
    for model in models:
        tensors = [tensor.detach().flatten() for _, _, tensor in _entries(model)]
        rows.append(torch.cat(tensors))
    return torch.stack(rows)


def views(state: Tensor, model: nn.Sequential) -> tuple[list[dict[str, Tensor]], list[Tensor]]:
    """Return the parts of a state by module and name, and the parameters to differentiate by.

    They share the state's memory, and have the members as their first dimension.
    """
    tensors: list[dict[str, Tensor]] = [{} for _ in model]
    parameters, start = [], 0
    for index, name, like in _entries(model):
        stop = start + like.numel()
        # .data: norms write to buffers between forward and backward. That does not touch the
        # parameters, but autograd would take it for a change of all that shares their memory.
        view = state[:, start:stop].view(len(state), *like.shape).data
        if isinstance(like, nn.Parameter):
            parameters.append(view.requires_grad_())
        tensors[index][name] = view
        start = stop
    return tensors, parameters


def find_factors(model: nn.Sequential, decay: float, angle_lr: str | None) -> Tensor:
    """Return for each parameter of a row its rate over the member's, and its decay: (2, elements).

    They are those of `gp.param_groups`.
    """
    groups = gp.param_groups(model, 1.0, decay, angle_lr, match=None)  # type: ignore[arg-type]
    factors = {id(p): (g["lr"], g["weight_decay"]) for g in groups for p in g["params"]}
    parameters = [t for _, _, t in _entries(model) if isinstance(t, nn.Parameter)]
    columns = []
    for parameter in parameters:
        pair = torch.tensor(factors[id(parameter)], dtype=torch.float64)
        columns.append(pair.unsqueeze(1).expand(2, parameter.numel()))
    return torch.cat(columns, dim=1).to(parameters[0])


@torch.no_grad()
def unpack_(model: nn.Sequential, row: Tensor) -> None:
    """Give a model the state in one row; how many batches it has seen is not counted."""
    entries = [tensor for _, _, tensor in _entries(model)]
    parts = row.split([tensor.numel() for tensor in entries])
    for tensor, part in zip(entries, parts, strict=True):
        tensor.copy_(part.view_as(tensor))
    for name, buffer in model.named_buffers():
        if name.endswith("num_batches_tracked"):
            buffer.fill_(1)


def _entries(model: nn.Sequential) -> Iterator[tuple[int, str, Tensor]]:
    """Yield what a row holds: index of the module, name of the tensor in it, and the tensor."""
    for kind in (nn.Module.named_parameters, nn.Module.named_buffers):
        for index, module in enumerate(model):
            for name, tensor in kind(module):
                if tensor.is_floating_point():  # other buffers count batches
                    yield index, name, tensor


def expand_data(data: Data, state: Tensor) -> tuple[Tensor, Tensor]:
    """Return inputs (S, N, d) and targets (S, N, ...) for the members of a state."""
    x, y = (torch.as_tensor(part) for part in data)
    if y.is_floating_point():
        y = y.to(state.dtype)
    x = x.to(state)
    if x.ndim == 2:
        x, y = (part.expand(len(state), *part.shape) for part in (x, y))
    if x.ndim != 3 or len(x) != len(state) or x.shape[:2] != y.shape[:2]:
        raise ValueError(
            f"inputs are (N, d) and targets (N, ...), or both with {len(state)} members first; "
            f"got shapes {tuple(data[0].shape)} and {tuple(data[1].shape)}."
        )
    return x, y


def select_members(data: tuple[Tensor, Tensor], index: Array) -> tuple[Tensor, Tensor]:
    """Return the data of some members, without a copy of what is shared."""
    x, y = (part[: len(index)] if part.stride(0) == 0 else part[index] for part in data)
    return x, y
