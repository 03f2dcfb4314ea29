"""The measurements behind the claims: on single layers, and on small networks in training.

Every function takes the members of one task, which are of one part and data set, the data and how
many epochs to train, and returns a record for each member.
"""

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
from geoparam_lab.training.stacks.snapshots import frame_epochs
from geoparam_lab.training.stacks.stacked import Protocol

Sets = Mapping[str, tuple[np.ndarray, np.ndarray]]

ROWS, FEATURES, UNITS, BATCH_SIZE = 512, 8, 64, 128
SIDE = 512  # inputs of a timed layer when its units vary, and the reverse
REPEATS = 15  # of a timed step; the fastest counts
FRAMES = 8  # about as many moments of a training are measured
NEGLIGIBLE = 1e-4  # a metric below this counts as vanished
DEEP_WIDTH = 24
QUANTITIES = tuple(
    f"{name}_{moment}"
    for moment in ("early", "late")
    for name in ("changes", "dead", "distance", "flattest")
)


class Member(NamedTuple):
    """A network, or a layer: the fields that tell its record apart."""

    part: str
    dataset: str
    method: str  # perhaps with options: "gmp:norm=mbn" has another norm
    size: float
    lr: float | None
    seed: int


Members = Sequence[Member]


def draw_correlated(correlation: float, rows: int, features: int, seed: int) -> Tensor:
    """Return normal inputs, any two of them with this correlation, minus their mean."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, features + 1, generator=generator, dtype=torch.float64)
    x = math.sqrt(1 - correlation) * x[:, 1:] + math.sqrt(correlation) * x[:, :1]
    return x - x.mean(dim=0)


@torch.no_grad()
def measure_covariance(members: Members, *unused: object) -> list[Record]:
    """Equation 9: BN is WN in the norm of the data's covariance. The size is the correlation.

    `error` is the largest difference from BN over BN's largest value. "equation-9" is compared
    with BN without an epsilon, "epsilon" with BN as it is trained; "wn" has Sigma = I.
    """
    found = []
    for _, _, method, correlation, _, seed in members:
        x = draw_correlated(correlation, ROWS, FEATURES, seed)
        with methods.use_seed(seed):
            w = torch.randn(UNITS, FEATURES, dtype=torch.float64)
            gamma, beta = torch.randn(2, UNITS, dtype=torch.float64)
        sigma = torch.eye(FEATURES).to(x) if method == "wn" else x.T @ x / ROWS
        eps = methods.EPSILON if method == "epsilon" else 1e-30
        norm = F.batch_norm(x @ w.T, None, None, gamma, beta, training=True, eps=eps)
        equation = gamma * (x @ w.T) / (w @ sigma * w).sum(dim=1).sqrt() + beta
        found.append({"error": float((norm - equation).abs().max() / norm.abs().max())})
    return found


def measure_cost(members: Members, *unused: object) -> list[Record]:
    """Remark 3.4: processor seconds of a layer's forward and backward pass, methods in turn."""
    layers = []
    for _, dataset, method, size, _, seed in members:
        n, m = (int(size), SIDE) if dataset == "inputs" else (SIDE, int(size))
        with methods.use_seed(seed):
            block = methods.get(method).block(nn.Linear, n, m, dtype=torch.float32)
            layers.append((block, torch.randn(BATCH_SIZE, n), torch.randn(BATCH_SIZE, m)))
    seconds = np.zeros((REPEATS, len(members)))
    for repeat in range(-2, REPEATS):  # -2 and -1 warm up; their rows are written again
        for i, (block, x, slope) in enumerate(layers):
            start = time.process_time()
            block(x).backward(slope)
            seconds[repeat, i] = time.process_time() - start
    fastest = dict(zip(members, seconds.min(axis=0).tolist(), strict=True))
    plain = {(m.size, m.seed): own for m, own in fastest.items() if m.method == "sp"}
    return [{"seconds": s, "ratio": s / plain[m.size, m.seed]} for m, s in fastest.items()]


class Trained(NamedTuple):
    """A trained network: its test error, its training inputs, and itself at each frame."""

    error: float  # root mean square, or the share of wrong classes; NaN where it diverged
    x: Tensor
    models: list[nn.Sequential]  # in evaluation mode


def train(
    members: Members,
    sets: Sets,
    hidden: Sequence[int],
    frames: Sequence[int],
    dtype: torch.dtype = torch.float64,
) -> list[Trained]:
    """Train a stack of one method up to the last frame, each member on a split of its own."""
    seeds, epochs, first = [member.seed for member in members], frames[-1], members[0]
    parts = splits.stack(*sets[first.dataset], seeds, "heldout")
    widths, classify = (parts.x_train.shape[2], *hidden, 1), first.dataset == "banana"
    name, *options = first.method.split(":")
    chosen = dict(option.split("=") for option in options)
    judged = (stacked.absolute_error, stacked.squared_error)
    if classify:
        judged = (stacked.binary_cross_entropy, stacked.binary_accuracy)
    schedule: Any = {"epochs": epochs, "patience": max(1, epochs // 5), "stop_patience": epochs}
    protocol = Protocol(*judged, classify, BATCH_SIZE, **schedule)
    result = stacked.train(
        [methods.mlp(name, widths, seed=seed, dtype=dtype, **chosen) for seed in seeds],
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
    inputs = torch.from_numpy(parts.x_train).to(dtype)
    return [
        Trained(error, inputs[i], [result.model(i, frame) for frame in frames])
        for i, error in enumerate(errors.tolist())
    ]


def find_layers(model: nn.Sequential) -> list[Any]:
    """Return the layers with weights."""
    return [module for module in model if isinstance(module, nn.Linear | gp.GmPLinear)]


@torch.no_grad()
def collect_inputs(model: nn.Sequential, x: Tensor) -> list[Tensor]:
    """Return the input of each layer with weights; with IMN, the centred one."""
    seen, layers = [], find_layers(model)
    for module in model:
        seen += [x] if module in layers else []
        x = module(x)
    return seen


def measure_shift(members: Members, data: Sets, epochs: int) -> list[Record]:
    """Remark 3.6: the mean of each layer's input beside the input's size, and how it drifts.

    The size of a member is the number of the layer, from 1. `offset` is ||E x|| / sqrt(E ||x||^2)
    at the end, `drift` the same ratio of what E x changes by in an epoch, on average. Norms use
    the mean of all training points, as in training; for `_running` their running mean, which that
    pass has moved by one more batch.
    """
    first = [member for member in members if member.size == 1]
    hidden = [UNITS // 2] * (int(max(member.size for member in members)) - 1)
    networks = train(first, data, hidden, range(epochs + 1))
    found: dict[Member, Record] = {member: {} for member in members}
    for member, (_, x, models) in zip(first, networks, strict=True):
        for end, training in (("", True), ("_running", False)):
            inputs = [collect_inputs(model.train(training), x) for model in models]
            for layer, seen in enumerate(zip(*inputs, strict=True), start=1):
                means = torch.stack([x.mean(dim=0) for x in seen])
                sizes = torch.stack([x.square().sum(dim=1).mean().sqrt() for x in seen])
                own = found[member._replace(size=layer)]
                own[f"offset{end}"] = float(means[-1].norm() / sizes[-1])
                own[f"drift{end}"] = float((means.diff(dim=0).norm(dim=1) / sizes[1:]).mean())
    return list(found.values())


def measure_shell(members: Members, data: Sets, epochs: int) -> list[Record]:
    """Section 3.1: |lam| beside ||x||, over training, and the test error.

    `relative` is the median of |lam| over that of ||x||; `on_shell` the share of units whose |lam|
    is among the middle nine tenths of ||x||.
    """
    frames, found = frame_epochs(epochs, FRAMES).tolist(), []
    for error, x, models in train(members, data, [int(members[0].size)], frames):
        distances = [analysis.boundaries(model, x)["0"].distance.abs() for model in models]
        lengths = x.norm(dim=1)
        low, high = lengths.quantile(0.05), lengths.quantile(0.95)
        path = [float(distance.nanmedian() / lengths.median()) for distance in distances]
        on_shell = (distances[-1] >= low) & (distances[-1] <= high)
        own = {"relative": path[-1], "relative_start": path[0], "path": path, "epochs": frames}
        own["on_shell"] = float(on_shell.double().mean())
        found.append({"test_error": error} | own)
    return found


def measure_products(members: Members, data: Sets, epochs: int) -> list[Record]:
    """Appendix E: products of sines and sparsity in a layer whose fan-in is the size.

    `smallest` is the smallest product of any unit times sqrt(fan-in), which is of order 1 for
    uniform directions; `negligible` the share of angles whose metric is below 1e-4; `sparsity` the
    share of activations that are 0, `dead` that of units that are 0 at all points.
    """
    frames = frame_epochs(epochs, FRAMES).tolist()
    hidden, found = [int(members[0].size), UNITS // 2], []
    for error, x, models in train(members, data, hidden, frames, torch.float32):
        path = [_measure_second_layer(model, x) for model in models]
        paths = {f"{name}_path": [each[name] for each in path] for name in path[0]}
        start = {f"{name}_start": value for name, value in path[0].items()}
        found.append({"test_error": error, "epochs": frames} | path[-1] | start | paths)
    return found


@torch.no_grad()
def _measure_second_layer(model: nn.Sequential, x: Tensor) -> Record:
    """Return what `measure_products` records of the second hidden layer, at one frame."""
    zero = (collect_inputs(model, x)[2] == 0).double()
    found = {"sparsity": float(zero.mean()), "dead": float(zero.amin(dim=0).mean())}
    layer = find_layers(model)[1]
    if isinstance(layer, gp.GmPLinear):
        metric = sphere.metric(layer.get_parameter("latitude").double())  # products, squared
        found["smallest"] = float(metric.min().sqrt() * math.sqrt(layer.in_features))
        found["negligible"] = float((metric < NEGLIGIBLE).double().mean())
    return found


def measure_deep(members: Members, data: Sets, epochs: int) -> list[Record]:
    """Measure which regions the data are in, in networks with `size` hidden layers.

    Four quantities, after a tenth of the training ("early") and at the end ("late"):

        changes     share of the training points' activation bits that change in a step: those
                    that differ after an epoch over its steps, a mean over some epochs
        dead        share of units that are active at no training point
        distance    how far boundaries are from the mean of their layer's inputs, in radii of
                    these (root mean square distance from it): median over units, mean over layers
        flattest    smallest slope ||dy/dx|| at any training point over the median slope
    """
    early = max(1, epochs // 10)
    starts = sorted({0, early, epochs // 2, epochs - 1})  # of the epochs with counted changes
    frames = sorted({*starts, *(epoch + 1 for epoch in starts)})
    hidden, found = [DEEP_WIDTH] * int(members[0].size), []
    for error, x, models in train(members, data, hidden, frames):
        at = dict(zip(frames, models, strict=True))
        bits = {frame: analysis.patterns(model, x) for frame, model in at.items()}
        record: Record = {"test_error": error}
        for moment, last in (("early", early + 1), ("late", epochs)):
            shares = [bits[e + 1].changes(bits[e]).network.share for e in starts if e < last]
            steps = math.ceil(len(x) / BATCH_SIZE)  # of an epoch
            own = {"changes": float(np.mean(shares)) / steps} | measure_regions(at[last], x)
            record |= {f"{name}_{moment}": value for name, value in own.items()}
        found.append(record)
    return found


def measure_regions(model: nn.Sequential, x: Tensor) -> Record:
    """Return dead units, distances by layer and the smallest slope of one network."""
    distances, dead = [], []
    boundaries = analysis.boundaries(model, x).values()
    for z, own in list(zip(collect_inputs(model, x), boundaries, strict=True))[:-1]:  # no output
        mean = z.mean(dim=0)
        radius = (z - mean).square().sum(dim=1).mean().sqrt()
        distances.append(float(((own.direction @ mean + own.distance).abs() / radius).nanmedian()))
        dead.append((z @ own.direction.T + own.distance).amax(dim=0) <= 0)
    x = x.clone().requires_grad_()
    slopes = torch.autograd.grad(model(x).sum(), x)[0].norm(dim=1)
    return {
        "dead": float(torch.cat(dead).double().mean()),
        "distance": float(np.mean(distances)),
        "distances": distances,
        "flattest": float(slopes.min() / slopes.median().clamp(min=1e-300)),
    }
