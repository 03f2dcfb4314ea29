"""Trains many small networks at once: seeds, learning rates and splits are one leading axis.

A small network spends its time in calls rather than in arithmetic, so ten of them in a stack take
about twice as long as one. Parameters and buffers of all members are one tensor (S, elements),
which Adam updates in a few calls; the forward pass is `batched.forward`. Each member has its own
data, order of minibatches, rate, plateau, patience and best weights, and comes out as if it were
trained alone. A member that stops, or whose loss is not finite, leaves the stack.

The rules are Keras's (`keras_rules`), since the papers' numbers come from it. Once an epoch a
metric on the evaluation data is judged or, without one, the training loss. That is credited to the
weights at the start of the epoch, which for a full batch are those that gave it. (Keras keeps the
weights one step after.)

Call `torch.set_num_threads(1)` first: threads wait for each other, and on a busy machine an epoch
of 54 ms on one thread took 810 ms. Several stacks in processes of their own use cores better.
"""

import copy
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits

from geoparam_lab.training.stacks import batched, packing
from geoparam_lab.training.stacks.keras_rules import Adam, PlateauRule
from geoparam_lab.training.stacks.packing import Data
from geoparam_lab.training.stacks.stack_motion import Motion, Recorder

Array = np.ndarray
# A loss or metric: outputs and targets (S, N, ...) -> a number for each member, (S,).
Score = Callable[[Tensor, Tensor], Tensor]


def absolute_error(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).abs().flatten(1).mean(1)


def squared_error(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square().flatten(1).mean(1)


def binary_cross_entropy(output: Tensor, target: Tensor) -> Tensor:
    """Outputs are logits, targets 0 and 1."""
    return binary_cross_entropy_with_logits(output, target, reduction="none").flatten(1).mean(1)


def binary_accuracy(output: Tensor, target: Tensor) -> Tensor:
    """The share of logits on the right side of 0."""
    return ((output > 0) == (target > 0.5)).to(output.dtype).flatten(1).mean(1)


@dataclass(frozen=True)
class Protocol:
    """How every member is trained."""

    loss: Score = absolute_error
    metric: Score | None = None  # judged on the evaluation data; None judges the training loss
    higher_is_better: bool = False
    batch_size: int | None = None  # None for all rows; else each epoch has its own order of them
    epochs: int = 5000  # maximum number of epochs
    patience: int = 50  # epochs without a better value before the rate falls
    stop_patience: int | None = None  # the same before a member stops; None for 2 * patience
    decay: float = 0.0  # what a step removes of each weight, over the rate
    angle_lr: str | None = None  # rate of directions: None for the member's, or "fan_in"


@dataclass(frozen=True)
class Result:
    """The result of training; arrays over epochs are NaN where a member had stopped."""

    losses: Array  # mean training loss of each epoch, (epochs, S)
    metrics: Array  # judged after each epoch, (epochs, S); without a metric, the losses
    rates: Array  # the learning rate of each epoch, (epochs, S)
    epochs: Array  # how many epochs each member was trained for, (S,)
    best_epoch: Array  # the epoch whose weights were kept, (S,); -1 if there was none
    outcomes: list[str]  # why each stopped: "patience", "epochs" or "diverged"
    motion: Motion | None  # how the boundaries moved in each step, if that was tracked
    running_motion: Motion | None  # the same with the norms' running statistics
    states: Tensor = field(repr=False)  # the best weights, as `packing` has them, (S, elements)
    snapshots: dict[int, Tensor] = field(repr=False)  # by epoch; the best weights after a stop
    _models: Sequence[nn.Sequential] = field(repr=False)

    @property
    def best_metric(self) -> Array:
        """The value judged best, (S,)."""
        values = self.metrics[self.best_epoch, np.arange(len(self.best_epoch))]
        return np.where(self.best_epoch < 0, np.nan, values)

    def model(self, member: int, epoch: int | None = None) -> nn.Sequential:
        """Return a member with its best weights, or those of a snapshot, in evaluation mode."""
        model = copy.deepcopy(self._models[member])
        states = self.states if epoch is None else self.snapshots[epoch]
        packing.unpack_(model, states[member])
        return model.eval()

    @torch.no_grad()
    def predict(self, x: Array | Tensor) -> Array:
        """Return all members' outputs with their best weights, (S, N) or (S, N, outputs).

        Inputs are (N, d), the same for all members, or (S, N, d).
        """
        model = self._models[0]
        tensors, _ = packing.views(self.states, model)
        inputs = torch.as_tensor(x).to(self.states).expand(len(self.states), *x.shape[-2:])
        return _squeeze(batched.forward(model, tensors, inputs, training=False)).numpy()


def train(
    models: Sequence[nn.Sequential],
    data: Data,
    lr: Sequence[float],
    protocol: Protocol | None = None,
    evaluation: Data | None = None,
    *,
    seeds: Sequence[int] | None = None,
    track: bool = False,
    snapshots: Collection[int] = (),
    progress: Callable[[int, int], None] | None = None,
) -> Result:
    """Train copies of all models at once, each for itself.

    Args:
        models: networks of `methods.mlp`, all of one method and shape.
        data: inputs (N, d) and targets (N, ...) for all members, or (S, N, d) and (S, N, ...).
            Outputs are given to the loss as (S, N, outputs), or (S, N) where there is one output.
        lr: each member's learning rate.
        protocol: loss, metric and schedule.
        evaluation: what the metric is of, in the shapes of `data`.
        seeds: one per member, for the order of its minibatches; 0, 1, ... by default.
        track: measure how the first hidden layer's boundaries move in every step, once with the
            norms' statistics of the training inputs, as in training, and once with running ones.
        snapshots: after how many epochs to keep the states of all members; 0 is the start.
        progress: called after each epoch with its number, from 1, and that of members left.

    Example:
        >>> from geoparam_lab import methods
        >>> x = torch.linspace(-1, 1, 20, dtype=torch.float64)[:, None]
        >>> models = [methods.mlp("gmp", (1, 16, 1), seed=seed) for seed in range(4)]
        >>> result = train(models, (x, x[:, 0].abs()), [0.1] * 4, Protocol(epochs=200))
        >>> result.losses.shape, bool((result.best_metric < 0.05).all())
        ((200, 4), True)
        >>> result.predict(x).shape, result.model(2)(x).shape
        ((4, 20), torch.Size([20, 1]))
    """
    run = _Run(models, data, lr, protocol or Protocol(), evaluation, seeds, track)
    if 0 in snapshots:
        run.keep_states(0)
    for epoch in range(run.protocol.epochs):
        run.epoch(epoch)
        if epoch + 1 in snapshots:
            run.keep_states(epoch + 1)
        if progress is not None:
            progress(epoch + 1, len(run.members))
        if not len(run.members):
            break
    return run.result()


class _Run:
    """The members that are still in training, and the results of all."""

    def __init__(
        self,
        models: Sequence[nn.Sequential],
        data: Data,
        lr: Sequence[float],
        protocol: Protocol,
        evaluation: Data | None,
        seeds: Sequence[int] | None,
        track: bool,
    ) -> None:
        _check(models, protocol, evaluation)
        size = len(models)
        self.models, self.protocol = models, protocol
        self.model = models[0]
        self.members = np.arange(size)
        self.state = packing.pack(models)
        self.best = self.state.clone()
        self.parameter_count = sum(p.numel() for p in models[0].parameters())
        self.tensors, self.parameters = packing.views(self.state, self.model)
        self.data = packing.expand_data(data, self.state)
        self.evaluation = None
        if evaluation is not None:
            self.evaluation = packing.expand_data(evaluation, self.state)

        factors = None
        if protocol.decay or protocol.angle_lr:
            factors = packing.find_factors(self.model, protocol.decay, protocol.angle_lr)
        self.adam = Adam(self.state[:, : self.parameter_count], factors)
        stop = protocol.stop_patience
        if stop is None:
            stop = 2 * protocol.patience
        self.rule = PlateauRule(np.array(lr), protocol.patience, stop, protocol.higher_is_better)

        seeds = range(size) if seeds is None else seeds
        if not len(lr) == len(seeds) == size:
            raise ValueError(f"lr and seeds need one value for each of {size} models.")
        self.generators = [torch.Generator().manual_seed(seed) for seed in seeds]
        self.history = np.full((3, protocol.epochs, size), np.nan)
        self.best_epoch = np.full(size, -1)
        self.outcomes = ["epochs"] * size
        self.snapshots: dict[int, Tensor] = {}

        self.recorders: dict[str, Recorder] = {}
        if track:
            self.recorders["batch"] = Recorder(size)
        if track and any(hasattr(module, "running_mean") for module in self.model):
            self.recorders["running"] = Recorder(size)
        self._record()

    def epoch(self, epoch: int) -> None:
        """Train and judge all members that are left; remove those that stop."""
        judges_loss = self.protocol.metric is None
        judged = self.state.clone() if judges_loss else self.state
        losses = self._train()
        metrics = losses if judges_loss else self._evaluate()
        losses, metrics = torch.stack([losses, metrics]).double().numpy()
        self.history[:, epoch, self.members] = losses, metrics, self.rule.rates

        diverged = ~np.isfinite(losses + metrics)
        better, stopped = self.rule(np.where(diverged, np.nan, metrics))
        if better.any():
            self.best_epoch[self.members[better]] = epoch
            self.best[self.members[better]] = judged[better]
        if (stopped | diverged).any():
            self._remove(stopped, diverged)

    def keep_states(self, epoch: int) -> None:
        """Take a snapshot of all members, after so many epochs."""
        states = self.best.clone()
        states[self.members] = self.state
        self.snapshots[epoch] = states

    def result(self) -> Result:
        epochs = np.isfinite(self.history[2]).sum(0)
        losses, metrics, rates = self.history[:, : epochs.max()]
        motions = {kind: recorder.motion() for kind, recorder in self.recorders.items()}
        return Result(
            losses,
            metrics,
            rates,
            epochs,
            self.best_epoch,
            self.outcomes,
            motions.get("batch"),
            motions.get("running", motions.get("batch")),
            self.best,
            self.snapshots,
            self.models,
        )

    def _train(self) -> Tensor:
        """Go once through the data; return the members' mean losses."""
        total = torch.zeros(())
        for x, y in self._batches():
            outputs = batched.forward(self.model, self.tensors, x, training=True)
            losses = self.protocol.loss(_squeeze(outputs), y)
            gradients = torch.autograd.grad(losses.sum(), self.parameters, materialize_grads=True)
            gradient = torch.cat([g.flatten(1) for g in gradients], dim=1)
            self.adam.step(self.state[:, : self.parameter_count], gradient, self.rule.rates)
            batched.retract_(self.model, self.tensors)
            self._record()
            total = total + x.shape[1] / self.data[0].shape[1] * losses.detach()
        return total

    def _batches(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield the training data, or minibatches of it in each member's own order."""
        (x, y), size = self.data, self.protocol.batch_size
        n = x.shape[1]
        if size is None or size >= n:
            yield x, y
            return
        order = torch.stack([torch.randperm(n, generator=random) for random in self.generators])
        rows = torch.arange(len(x))[:, None]
        x, y = x[rows, order], y[rows, order]
        yield from zip(x.split(size, dim=1), y.split(size, dim=1), strict=True)

    @torch.no_grad()
    def _evaluate(self) -> Tensor:
        """Return the members' metrics, in batches of the training's size to stay in the cache."""
        assert self.evaluation is not None and self.protocol.metric is not None
        x, y = self.evaluation
        parts = x.split(self.protocol.batch_size or x.shape[1], dim=1)
        outputs = [batched.forward(self.model, self.tensors, part, False) for part in parts]
        return self.protocol.metric(_squeeze(torch.cat(outputs, dim=1)), y)

    def _record(self) -> None:
        for kind, recorder in self.recorders.items():
            boundaries = batched.boundaries(self.model, self.tensors, self.data[0], kind)
            recorder.add(self.members, *boundaries)

    def _remove(self, stopped: Array, diverged: Array) -> None:
        """Remove members from the stack."""
        for why, which in (("patience", stopped), ("diverged", diverged)):
            for member in self.members[which]:
                self.outcomes[member] = why
        left = np.flatnonzero(~(stopped | diverged))
        self.members = self.members[left]
        self.state = self.state[left]
        self.tensors, self.parameters = packing.views(self.state, self.model)
        self.data = packing.select_members(self.data, left)
        if self.evaluation is not None:
            self.evaluation = packing.select_members(self.evaluation, left)
        self.generators = [self.generators[index] for index in left]
        self.adam.keep_only(left)
        self.rule.keep_only(left)


def _squeeze(outputs: Tensor) -> Tensor:
    return outputs.squeeze(-1) if outputs.shape[-1] == 1 else outputs


def _check(models: Sequence[nn.Sequential], protocol: Protocol, evaluation: Data | None) -> None:
    kinds = sorted({str(model) for model in models})
    if len(kinds) != 1:
        joined = "\n".join(kinds)
        raise ValueError(f"a stack needs models, all of one method and shape; got\n{joined}")
    if (protocol.metric is None) != (evaluation is None):
        raise ValueError(
            "a metric needs evaluation data, and they need a metric; got "
            f"{'only the data' if protocol.metric is None else 'only the metric'}."
        )
