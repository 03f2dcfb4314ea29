"""The checkpoint of a run in its folder, and the one before, each complete or absent.

If a disk damages the last checkpoint, the run goes on from the one before.

A checkpoint is a file of plain containers, numbers and CPU tensors, which
`torch.load(weights_only=True)` reads. The main process alone writes and reads, and broadcasts what
it read, so machines need not share a disk. Model and optimizer go through
torch.distributed.checkpoint's state dicts, which have one form for a plain model, DDP and FSDP2: a
run may go on with another number of processes.
"""

import os
import pickle
import sys
import zipfile
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint import state_dict as dcp
from torch.distributed.fsdp import FSDPModule

from geoparam.storage import replacing

State = dict[str, Any]

CHECKPOINT, BEFORE, WEIGHTS = "checkpoint.pt", "checkpoint-before.pt", "weights.pt"
FINISHED = "finished"  # an empty file beside the files of a run that has ended: they are whole
_WHOLE = dcp.StateDictOptions(full_state_dict=True, cpu_offload=True)


def write(path: Path, state: State) -> None:
    """Write a state in place of the one there, whole or not at all."""
    with replacing(path) as unfinished:
        try:
            torch.save(state, unfinished)
        except RuntimeError as error:  # torch's message of a full disk is about positions
            raise OSError(
                f"{path} cannot be written ({error!s:.80}). Make room on its disk, and go on "
                "with --resume."
            ) from error
        with unfinished.open("rb") as file:
            os.fsync(file.fileno())  # a power failure must not leave an empty file
        if path.name == CHECKPOINT and path.exists():
            path.replace(path.with_name(BEFORE))


def read(folder: Path) -> State | None:
    """Return the last checkpoint in a folder that can be read; None where there is none."""
    damaged = []
    for path in (folder / CHECKPOINT, folder / BEFORE):
        if not path.exists():
            continue
        try:
            state = _load(path)
        except (zipfile.BadZipFile, RuntimeError, OSError, EOFError, pickle.UnpicklingError):
            damaged.append(str(path))
            continue
        if damaged:
            print(f"{damaged[0]} is damaged. The run goes on from {path.name}.", file=sys.stderr)
        return state

    if damaged:
        names = " and ".join(damaged)
        raise ValueError(f"damaged: {names}. Remove what is there, and the run starts anew.")
    return None


def _load(path: Path) -> State:
    """Return the state in a file, after comparing its checksums, which torch leaves out."""
    with zipfile.ZipFile(path) as archive:
        if entry := archive.testzip():
            raise zipfile.BadZipFile(f"{entry} has another checksum")
    state: State = torch.load(path, map_location="cpu", weights_only=True)
    return state


def get_weights(model: nn.Module) -> State:
    """Return a copy of the model's state on the CPU; complete in the main process."""
    weights: State = dcp.get_model_state_dict(model, options=_WHOLE)
    return {name: value.clone() for name, value in weights.items()}  # on a CPU the model's own


def load_weights(model: nn.Module, weights: State | None) -> None:
    """Load the main process's result of `get_weights` in all processes; a collective call."""
    from accelerate.utils import broadcast_object_list

    [sent] = broadcast_object_list([weights])
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()  # evaluation leaves it whole
    dcp.set_model_state_dict(model, sent, options=_WHOLE)


def get_state(model: nn.Module, optimizer: torch.optim.Optimizer, device: torch.device) -> State:
    """Return a copy of all that training changes, on the CPU; complete in the main process.

    It is the states of the model, of its optimizer, and of torch's generators.
    """
    weights = get_weights(model)  # first: under FSDP2 it shards what evaluation left whole
    moments: State = {}
    # SGD without momentum has no state. torch would take a step of rate 0 to find out, which calls
    # the hook that retracts and may change the last bit.
    if optimizer.state:
        moments = dict(dcp.get_optimizer_state_dict(model, optimizer, options=_WHOLE))
    random = {"cpu": torch.get_rng_state()}
    if device.type == "cuda":
        random["cuda"] = torch.cuda.get_rng_state(device)
    return {"model": weights, "optimizer": moments, "random": random}


def load_state(
    state: State, model: nn.Module, optimizer: torch.optim.Optimizer, device: torch.device
) -> None:
    """Load the result of `get_state`, sharded or not, perhaps of another kind of device."""
    if state["optimizer"]:  # before the weights: torch takes a step of rate 0
        dcp.set_optimizer_state_dict(model, optimizer, dict(state["optimizer"]), options=_WHOLE)
    dcp.set_model_state_dict(model, dict(state["model"]), options=_WHOLE)
    torch.set_rng_state(state["random"]["cpu"])
    if device.type == "cuda" and "cuda" in state["random"]:
        torch.cuda.set_rng_state(state["random"]["cuda"], device)
