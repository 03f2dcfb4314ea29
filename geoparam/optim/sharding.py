"""Parameters that FSDP2 has divided among processes: what is here, and with whom it is shared."""

from typing import Any

import torch
from torch import Tensor

from geoparam.optim.units import Unit


def shard_like(p: Any, part: Tensor, length: int) -> Tensor:
    """Return this process's part of a tensor of that length as a DTensor, sharded as `p` is."""
    from torch.distributed.tensor import DTensor

    size = torch.Size((length, *part.shape[1:]))
    return DTensor.from_local(
        part, p.device_mesh, p.placements, run_check=False, shape=size, stride=part.stride()
    )


def find_offset(p: Any) -> int:
    """Return where in the first dimension this process's part begins."""
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    _, offsets = compute_local_shape_and_global_offset(p.shape, p.device_mesh, p.placements)
    return offsets[0]


def find_process_group(p: Any) -> Any:
    """Return the processes among which the rows of a weight are divided; None for one process."""
    shards = _find_shards(p)
    return p.device_mesh.get_group(shards[0]) if shards else None


def check_sharding(unit: Unit, p: Any) -> None:
    """Raise where processes have pieces of units."""
    shards = _find_shards(p)
    if not shards:
        return
    is_by_row = p.placements[shards[0]].is_shard(0) and unit.layout.has_whole_rows
    if len(shards) > 1 or not is_by_row:
        raise ValueError(
            f"{unit.name!r} is sharded as {p.placements}, which cuts its units into pieces. "
            "Shard rows (dimension 0) of layers whose units are rows, or leave it out with "
            "filter_fn."
        )


def _find_shards(p: Any) -> list[int]:
    placements = getattr(p, "placements", ())
    return [i for i, placement in enumerate(placements) if not placement.is_replicate()]
