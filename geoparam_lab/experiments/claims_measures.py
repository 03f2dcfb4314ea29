"""What the claims are measured by: single layers, and small networks in training.

Every function takes the members of one task and returns a record for each of them.
"""

import copy
import math
import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import geoparam as gp
from geoparam import analysis, sphere
from geoparam_lab import methods
from geoparam_lab.data import splits
from geoparam_lab.run_folder import Record
from geoparam_lab.training.stacks import stacked
from geoparam_lab.training.stacks.packing import unpack_
from geoparam_lab.training.stacks.snapshots import frame_epochs
from geoparam_lab.training.stacks.stacked import Protocol

Sets = Mapping[str, tuple[np.ndarray, np.ndarray]]

ROWS, FEATURES, UNITS, BATCH_SIZE = 512, 8, 64, 128
SIDE = 512  # of a timed layer's other side
REPEATS = 15  # of a timed step; the fastest counts
FRAMES = 8
NEGLIGIBLE = 1e-4  # of the metric


class Member(NamedTuple):
    """A network, or a layer; "gmp:norm=mbn" is a method with another norm."""

    method: str
    size: float
    lr: float | None
    seed: int


# --- single layers ------------------------------------------------------------------------------


def correlated(correlation: float, rows: int, features: int, seed: int) -> Tensor:
    """Return normal inputs, any two of them with this correlation, minus their mean."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, features + 1, generator=generator, dtype=torch.float64)
    x = math.sqrt(1 - correlation) * x[:, 1:] + math.sqrt(correlation) * x[:, :1]
    return x - x.mean(dim=0)


@torch.no_grad()
def covariance(members: Sequence[Member], dataset: str, *unused: object) -> list[Record]:
    """Equation 9: BN is WN in the norm of the data's covariance, whose correlation is the size.

    `error` is the largest difference from BN, over BN's largest value: of equation 9, of the same
    from BN with the epsilon that it is trained with, and of WN, which has Sigma = I.
    """
    found = []
    for method, correlation, _, seed in members:
        x = correlated(correlation, ROWS, FEATURES, seed)
        with methods.use_seed(seed):
            w = torch.randn(UNITS, FEATURES, dtype=torch.float64)
            gamma, beta = torch.randn(2, UNITS, dtype=torch.float64)
        sigma = torch.eye(FEATURES).to(x) if method == "wn" else x.T @ x / ROWS
        eps = methods.EPSILON if method == "epsilon" else 1e-30
        norm = F.batch_norm(x @ w.T, None, None, gamma, beta, training=True, eps=eps)
        equation = gamma * (x @ w.T) / (w @ sigma * w).sum(dim=1).sqrt() + beta
        found.append({"error": float((norm - equation).abs().max() / norm.abs().max())})
    return found


def cost(members: Sequence[Member], dataset: str, *unused: object) -> list[Record]:
    """Remark 3.4: processor seconds of a layer's forward and backward pass, methods in turn."""
    layers = []
    for method, size, _, seed in members:
        n, m = (int(size), SIDE) if dataset == "inputs" else (SIDE, int(size))
        with methods.use_seed(seed):
            block = methods.get(method).linear(n, m, dtype=torch.float32)
            layers.append((block, torch.randn(BATCH_SIZE, n), torch.randn(BATCH_SIZE, m)))
    seconds = np.zeros((REPEATS, len(members)))
    for repeat in range(-2, REPEATS):  # the first two warm up, and are written over
        for i, (block, x, slope) in enumerate(layers):
            start = time.process_time()
            block(x).backward(slope)
            seconds[repeat, i] = time.process_time() - start
    fastest = dict(zip(members, seconds.min(axis=0).tolist(), strict=True))
    plain = {(m.size, m.seed): own for m, own in fastest.items() if m.method == "sp"}
    return [{"seconds": s, "ratio": s / plain[m.size, m.seed]} for m, s in fastest.items()]


# --- training -----------------------------------------------------------------------------------


class Trained(NamedTuple):
    """A network that was trained: its test error, its training inputs, and itself at frames."""

    error: float  # root mean square, or the share of wrong classes; NaN where it diverged
    x: Tensor
    models: list[nn.Sequential]  # in evaluation mode


def train(
    members: Sequence[Member],
    data: tuple[np.ndarray, np.ndarray],
    hidden: Sequence[int],
    frames: Sequence[int],
    classify: bool = False,
    dtype: torch.dtype = torch.float64,
) -> list[Trained]:
    """Train a stack of one method up to the last frame, each member on a split of its own."""
    seeds = [member.seed for member in members]
    parts = splits.stack(*data, seeds, "heldout")
    name, *options = members[0].method.split(":")
    chosen = dict(option.split("=") for option in options)
    widths = (data[0].shape[1], *hidden, 1)
    models = [methods.mlp(name, widths, seed=seed, dtype=dtype, **chosen) for seed in seeds]
    protocol = Protocol(
        loss=stacked.binary_cross_entropy if classify else stacked.absolute_error,
        metric=stacked.binary_accuracy if classify else stacked.squared_error,
        higher_is_better=classify,
        batch_size=BATCH_SIZE,
        epochs=frames[-1],
        patience=max(1, frames[-1] // 5),
        stop_patience=frames[-1],
    )
    result = stacked.train(
        models,
        (parts.x_train, parts.y_train),
        [member.lr or 0.0 for member in members],
        protocol,
        (parts.x_val, parts.y_val),
        seeds=seeds,
        snapshots=frames,
    )
    outputs, y = result.predict(parts.x_test), parts.y_test
    wrong = (outputs > 0) != (y > 0.5)
    errors = wrong.mean(axis=1) if classify else np.sqrt(((outputs - y) ** 2).mean(axis=1))
    errors = np.where(result.best_epoch < 0, np.nan, errors)
    found = []
    for i, error in enumerate(errors.tolist()):
        states = [result.snapshots[frame][i] for frame in frames]
        own = [copy.deepcopy(models[i]).eval() for _ in states]
        for model, state in zip(own, states, strict=True):
            unpack_(model, state, batches=1)
        found.append(Trained(error, torch.from_numpy(parts.x_train[i]).to(dtype), own))
    return found


def find_layers(model: nn.Sequential) -> list[Any]:
    """Return the layers with weights."""
    return [module for module in model if isinstance(module, nn.Linear | gp.GmPLinear)]


@torch.no_grad()
def layer_inputs(model: nn.Sequential, x: Tensor) -> list[Tensor]:
    """Return what the weights of each layer see; after IMN, what is left of the input."""
    seen, layers = [], find_layers(model)
    for module in model:
        seen += [x] if module in layers else []
        x = module(x)
    return seen


def shift(members: Sequence[Member], dataset: str, data: Sets, epochs: int) -> list[Record]:
    """Remark 3.6: the mean of each layer's input beside the input's size, and how it drifts.

    The size of a member is the number of the layer, from 1. `offset` is ||E x|| / sqrt(E ||x||^2)
    at the end, `drift` the same ratio of what E x changes by in an epoch, on average. Norms use
    the mean of all training points, as in training; `_running`: their running mean.
    """
    first = [member for member in members if member.size == 1]
    hidden = [UNITS // 2] * (int(max(member.size for member in members)) - 1)
    networks = train(first, data[dataset], hidden, range(epochs + 1))
    found: dict[tuple, Record] = {member: {} for member in members}
    for (method, _, lr, seed), (_, x, models) in zip(first, networks, strict=True):
        for end, training in (("", True), ("_running", False)):
            inputs = [layer_inputs(model.train(training), x) for model in models]
            for layer, seen in enumerate(zip(*inputs, strict=True), start=1):
                means = torch.stack([x.mean(dim=0) for x in seen])
                sizes = torch.stack([x.square().sum(dim=1).mean().sqrt() for x in seen])
                own = found[method, layer, lr, seed]
                own[f"offset{end}"] = float(means[-1].norm() / sizes[-1])
                own[f"drift{end}"] = float((means.diff(dim=0).norm(dim=1) / sizes[1:]).mean())
    return list(found.values())


def shell(members: Sequence[Member], dataset: str, data: Sets, epochs: int) -> list[Record]:
    """Section 3.1: |lam| beside ||x||, over training, and the test error.

    `relative` is the median of |lam| over that of ||x||; `on_shell` the share of units whose |lam|
    is among the middle nine tenths of ||x||.
    """
    frames, found = frame_epochs(epochs, FRAMES).tolist(), []
    for error, x, models in train(members, data[dataset], [int(members[0].size)], frames):
        distances = [analysis.boundaries(model, x)["0"].distance.abs() for model in models]
        lengths = x.norm(dim=1)
        low, high = lengths.quantile(0.05), lengths.quantile(0.95)
        path = [float(distance.nanmedian() / lengths.median()) for distance in distances]
        on_shell = (distances[-1] >= low) & (distances[-1] <= high)
        own = {"relative": path[-1], "on_shell": float(on_shell.double().mean())}
        found.append({"test_error": error, "epochs": frames, "path": path} | own)
    return found


def products(members: Sequence[Member], dataset: str, data: Sets, epochs: int) -> list[Record]:
    """Appendix E: products of sines and sparsity in a layer whose fan-in is the size.

    `smallest` is the smallest product of any unit times sqrt(fan-in), which is of order 1 for
    uniform directions; `negligible` the share of angles whose metric is below 1e-4; `sparsity` the
    share of activations that are 0, `dead` that of units that are 0 at all points.
    """
    frames = frame_epochs(epochs, FRAMES).tolist()
    hidden, found = [int(members[0].size), UNITS // 2], []
    for error, x, models in train(members, data[dataset], hidden, frames, dtype=torch.float32):
        seen = [_look_at_second(model, x) for model in models]
        paths = {f"{name}_path": [each[name] for each in seen] for name in seen[0]}
        start = {f"{name}_start": value for name, value in seen[0].items()}
        found.append({"test_error": error, "epochs": frames} | seen[-1] | start | paths)
    return found


@torch.no_grad()
def _look_at_second(model: nn.Sequential, x: Tensor) -> Record:
    """Return what `products` measures of the second hidden layer, at one moment."""
    zero = (layer_inputs(model, x)[2] == 0).double()
    found = {"sparsity": float(zero.mean()), "dead": float((zero.amin(dim=0)).mean())}
    layer = find_layers(model)[1]
    if isinstance(layer, gp.GmPLinear):
        metric = sphere.metric(layer.get_parameter("latitude").double())  # products, squared
        found["smallest"] = float(metric.min().sqrt() * math.sqrt(layer.in_features))
        found["negligible"] = float((metric < NEGLIGIBLE).double().mean())
    return found
