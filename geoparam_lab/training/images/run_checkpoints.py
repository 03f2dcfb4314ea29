"""Checkpoints of one run in one folder: complete or absent, and the last ones kept.

A checkpoint is a file of plain containers, numbers and CPU tensors, which
`torch.load(weights_only=True)` reads. The main process alone writes and reads, and broadcasts what
it read, so machines need not share a disk. Model and optimizer go through
torch.distributed.checkpoint's state dicts, which have one form for a plain model, DDP and FSDP2: a
run may go on with another number of processes.
"""

import io
import re
import shutil
import warnings
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

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

if TYPE_CHECKING:
    from accelerate import Accelerator

State = dict[str, Any]

WEIGHTS = "weights.pt"
_NAME = re.compile(r"checkpoint-\d{5}-\d{8}\.pt")
_WHOLE = StateDictOptions(full_state_dict=True, cpu_offload=True)


# --- files --------------------------------------------------------------------------------------


class Store:
    """The checkpoints in a folder, of which the last `keep` stay."""

    def __init__(self, folder: Path, keep: int = 2) -> None:
        self.folder, self.keep = folder, keep

    @property
    def files(self) -> list[Path]:
        """The checkpoints, oldest first."""
        return sorted(path for path in self.folder.glob("*.pt") if _NAME.fullmatch(path.name))

    def write(self, state: State) -> None:
        """Write a state, which has an `epoch` and a `step`, and remove the oldest."""
        name = f"checkpoint-{state['epoch']:05d}-{state['step']:08d}.pt"
        with replacing(self.folder / name) as unfinished:
            torch.save(state, unfinished)
        for path in self.files[: -self.keep]:
            path.unlink()

    def write_weights(self, weights: State) -> None:
        """Write the weights that a finished run reports, as a plain state_dict."""
        with replacing(self.folder / WEIGHTS) as unfinished:
            torch.save(weights, unfinished)

    def read_newest(self, fits: Callable[[State], bool] = bool) -> State | None:
        """Return the newest state that can be read and fits; warn of others, and remove them."""
        for path in reversed(self.files):
            content = path.read_bytes()  # an error of the disk is no damage of the file
            try:
                state = _read(content)
                if not fits(state):
                    raise ValueError("its tensors have other shapes than the network's")
                return state
            except Exception as error:  # whatever torch raises for a damaged file
                before = "the one before" if path != self.files[0] else "none: the run starts anew"
                warnings.warn(
                    f"{path} is damaged ({type(error).__name__}: {error!s:.100}) and was removed. "
                    f"The run goes on from {before}.",
                    stacklevel=2,
                )
                path.unlink()
        return None

    def remove_unfinished(self) -> None:
        """Remove files that a kill left half written."""
        for folder in self.folder.glob(".unfinished-*"):
            shutil.rmtree(folder, ignore_errors=True)


def _read(content: bytes) -> State:
    damaged = zipfile.ZipFile(io.BytesIO(content)).testzip()  # torch checks no checksum
    if damaged is not None:
        raise ValueError(f"its part {damaged} fails its checksum")
    state: State = torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
    return state


def broadcast(state: State | None, accelerator: "Accelerator") -> State | None:
    """Return the main process's state in all processes."""
    from accelerate.utils import broadcast_object_list

    if accelerator.num_processes == 1:
        return state
    return broadcast_object_list([state])[0]


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
