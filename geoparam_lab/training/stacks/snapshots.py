"""Films of training: the states of a stack at some epochs, and several films on one time axis.

Frames are denser at the start, and frame 0 is the network before training. A member that has
stopped shows its best weights, which are the ones that are reported, and so does the last frame.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from geoparam import sphere
from geoparam_lab.training.stacks import batched
from geoparam_lab.training.stacks.packing import views

Array = np.ndarray
FRAMES = 60


@dataclass(frozen=True)
class Film:
    """The states of a stack at some epochs."""

    epochs: Array  # how many epochs of training came before each frame, (T,)
    states: Tensor  # parameters and buffers of all members, (T, S, elements)
    model: nn.Sequential  # one of the members
    data: tuple[Array, Array] | None = None  # inputs and targets that they were trained on

    def until(self, end: int) -> tuple[Array, Array]:
        """Return the epochs of a member's frames, `end` the last of them, and their indices."""
        before = np.flatnonzero(self.epochs < end)
        last = len(self.epochs) - 1
        return np.append(self.epochs[before], end), np.append(before, last)

    @torch.no_grad()
    def predict(self, x: Array) -> Array:
        """Return outputs (S, T, N) for inputs (N, d) or (S, N, d), in evaluation mode."""
        outputs = [batched.forward(self.model, *frame, False) for frame in self._frames(x)]
        return torch.stack(outputs, dim=1).squeeze(-1).numpy()

    @torch.no_grad()
    def boundaries(self, x: Array) -> tuple[Array, Array]:
        """Return directions (S, T, units, d) and signed distances (S, T, units) of the units.

        `x` are inputs, over which LN's deviation is averaged; others do not need them.
        """
        frames = [batched.boundaries(self.model, *frame) for frame in self._frames(x)]
        normal, offset = (torch.stack(part, dim=1) for part in zip(*frames, strict=True))
        length = sphere.length(normal)
        return (normal / length.unsqueeze(-1)).numpy(), (offset / length).numpy()

    def _frames(self, x: Array) -> Iterator[tuple[list[dict[str, Tensor]], Tensor]]:
        """Yield each frame's tensors, and the inputs for all members."""
        for state in self.states:
            inputs = torch.as_tensor(x).to(state).expand(len(state), *x.shape[-2:])
            yield views(state, self.model)[0], inputs


def frame_epochs(epochs: int, count: int = FRAMES) -> Array:
    """Return about `count` epochs from 0 to the last, in steps that grow with the epoch.

    Example:
        >>> frame_epochs(1000, 10).tolist()
        [0, 1, 2, 5, 10, 22, 46, 100, 215, 464, 1000]
    """
    growing = np.geomspace(1, epochs, count).round().astype(int)
    return np.unique(np.append(0, growing))


def align(films: Sequence[Mapping[str, Array]], names: Sequence[str]) -> dict[str, Array]:
    """Return some arrays of several films, each (M, T, ...), at the "steps" of the longest one.

    A film has "steps", the epochs of its frames, and shows its last frame after its end.

    Example:
        >>> long = {"steps": np.array([0, 1, 4]), "loss": np.array([3, 2, 1])}
        >>> short = {"steps": np.array([0, 1]), "loss": np.array([3, 2])}
        >>> align([long, short], ["loss"])["loss"].tolist()
        [[3, 2, 1], [3, 2, 2]]
    """
    steps = max((film["steps"] for film in films), key=lambda epochs: epochs[-1])
    frames = [np.searchsorted(film["steps"], steps, side="right") - 1 for film in films]
    aligned = {"steps": steps}
    for name in names:
        arrays = [film[name][frame] for film, frame in zip(films, frames, strict=True)]
        aligned[name] = np.stack(arrays)
    return aligned


def find_largest_since(values: Array, steps: Array, per_epoch: int = 1) -> Array:
    """Return the largest value of any update since the frame before, 0 where there was none.

    `values` has one for each update, of which there are `per_epoch`; `steps` are frames' epochs.

    Example:
        >>> find_largest_since(np.array([1.0, 5.0, 2.0]), np.array([0, 1, 3, 9]))
        array([0., 1., 5., 0.])
    """
    edges = np.minimum(np.asarray(steps) * per_epoch, len(values))
    largest = [0.0]
    for start, stop in zip(edges, edges[1:], strict=False):
        since = values[start:stop]
        largest.append(since[np.isfinite(since)].max(initial=0.0))
    return np.array(largest)
