"""The checkpoint of a run in its folder: complete or absent.

A checkpoint is a file of plain containers, numbers and CPU tensors, which
`torch.load(weights_only=True)` reads. The main process alone writes and reads, and broadcasts what
it read, so machines need not share a disk. Model and optimizer go through
torch.distributed.checkpoint's state dicts, which have one form for a plain model, DDP and FSDP2: a
run may go on with another number of processes.
"""

import os
import pickle
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

from geoparam.storage import replacing

State = dict[str, Any]

CHECKPOINT, WEIGHTS = "checkpoint.pt", "weights.pt"
_WHOLE = StateDictOptions(full_state_dict=True, cpu_offload=True)


def write(path: Path, state: State) -> None:
    """Write a state in place of the one before, whole or not at all."""
    with replacing(path) as unfinished:
        torch.save(state, unfinished)
        with unfinished.open("rb") as file:
            os.fsync(file.fileno())  # a power failure must not leave an empty file


def read(folder: Path) -> State | None:
    """Return the state in a folder; None where there is none."""
    path = folder / CHECKPOINT
    if not path.exists():
        return None
    try:
        state: State = torch.load(path, map_location="cpu", weights_only=True)
    except (RuntimeError, OSError, EOFError, pickle.UnpicklingError) as error:
        raise ValueError(
            f"{path} is damaged ({error!s:.100}). Remove it, and the run starts anew."
        ) from error
    return state


# --- model and optimizer ------------------------------------------------------------------------


def get_weights(model: nn.Module) -> State:
    """Return a copy of a model's whole state on the CPU; empty in all but the main process."""
    state: State = get_model_state_dict(model, options=_WHOLE)
    return {name: value.clone() for name, value in state.items()}  # on a CPU they are the model's


def load_weights(model: nn.Module, weights: State) -> None:
    """Load a whole state into a model, sharded or not."""
    set_model_state_dict(model, dict(weights), options=_WHOLE)


def get_moments(model: nn.Module, optimizer: torch.optim.Optimizer) -> State:
    """Return an optimizer's whole state on the CPU; empty where it has none."""
    # SGD without momentum has none. torch would take a step of rate 0 to find out, which calls the
    # hook that retracts and may change the last bit.
    if not optimizer.state:
        return {}
    return dict(get_optimizer_state_dict(model, optimizer, options=_WHOLE))


def load_moments(model: nn.Module, optimizer: torch.optim.Optimizer, moments: State) -> None:
    """Load an optimizer's state. Load the weights afterwards: torch takes a step of rate 0."""
    if moments:
        set_optimizer_state_dict(model, optimizer, dict(moments), options=_WHOLE)


# --- random numbers -----------------------------------------------------------------------------


def get_random_state(device: torch.device) -> State:
    """Return the state of torch's generators, of the CPU and of a GPU."""
    state = {"cpu": torch.get_rng_state()}
    if device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(device)
    return state


def load_random_state(state: State, device: torch.device) -> None:
    """Restore the generators; the state may come from another kind of device."""
    torch.set_rng_state(state["cpu"])
    if device.type == "cuda" and "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"], device)
