"""Keras's rules by torch's own means, and one network trained by them: what stacks must equal."""

import copy
import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import l1_loss

import geoparam as gp
from geoparam_lab.data.synthetic import Regression
from geoparam_lab.training.stacks.stacked import Protocol


def keras_adam(model: nn.Module, lr: float, epsilon: float = 1e-7) -> torch.optim.Adam:
    """Adam as Keras writes it: epsilon joins the root of v before the bias correction.

    torch adds its own after, so at step t torch's must be epsilon / sqrt(1 - beta2 ** t).
    """
    optimizer = torch.optim.Adam(model.parameters(), lr=lr, eps=epsilon)
    step = 0

    def scale_epsilon(*_: object) -> None:
        nonlocal step
        step += 1
        for group in optimizer.param_groups:
            group["eps"] = epsilon / math.sqrt(1 - group["betas"][1] ** step)

    optimizer.register_step_pre_hook(scale_epsilon)
    return optimizer


def keras_plateau(
    optimizer: torch.optim.Optimizer, patience: int
) -> torch.optim.lr_scheduler.ReduceLROnPlateau:
    """Rate x 0.1 once ``patience`` epochs brought no loss lower by 1e-4, as Keras counts them.

    Keras acts when the count reaches the patience, torch when it exceeds it: hence one less.
    """
    return torch.optim.lr_scheduler.ReduceLROnPlateau(
        optimizer, factor=0.1, patience=patience - 1, threshold=1e-4, threshold_mode="abs", eps=0
    )


def train_alone(
    model: nn.Sequential,
    data: tuple[Tensor, Tensor],
    evaluation: tuple[Tensor, Tensor],
    lr: float,
    protocol: Protocol,
    seed: int,
) -> tuple[list[float], list[float], list[float], nn.Sequential]:
    """Train one model as Keras would: losses, metrics and rates of each epoch, the best model."""
    optimizer = keras_adam(model, lr)
    optimizer.register_step_post_hook(gp.retract(model))
    optimizer.register_step_pre_hook(lambda own, *_: _decay_(model, own, protocol.decay))
    plateau = keras_plateau(optimizer, protocol.patience)
    order = torch.Generator().manual_seed(seed)
    losses, metrics, rates, rows = [], [], [], len(data[0])
    while len(losses) < protocol.epochs:
        total = 0.0
        for batch in torch.randperm(rows, generator=order).split(protocol.batch_size or rows):
            x, y = (part[batch] for part in data)
            loss = protocol.loss(model.train()(x).T, y[None]).squeeze(0)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total += loss.item() * len(batch) / rows
        x, y = evaluation
        with torch.no_grad():
            metric = protocol.metric(model.eval()(x).T, y[None]).item()
        losses.append(total), metrics.append(metric), rates.append(optimizer.param_groups[0]["lr"])
        plateau.step(metric)
        if metric == min(metrics):
            best, since = copy.deepcopy(model), len(losses)
        if len(losses) - since >= protocol.stop_patience:
            break
    return losses, metrics, rates, best


@torch.no_grad()
def _decay_(model: nn.Module, optimizer: torch.optim.Optimizer, decay: float) -> None:
    """AdamW's decay, of weights alone."""
    for layer in model:
        if type(layer) is nn.Linear:
            layer.weight.sub_(optimizer.param_groups[0]["lr"] * decay * layer.weight)


@dataclass(frozen=True)
class Alone:
    """One network's training: losses (epochs,), locations (epochs, units), best weights."""

    losses: np.ndarray
    locations: np.ndarray
    best_epoch: int
    model: nn.Sequential

    @torch.no_grad()
    def predict(self, x: np.ndarray) -> np.ndarray:
        return self.model(torch.from_numpy(x)).squeeze(-1).numpy()


def train_on_levy(
    model: nn.Sequential, data: Regression, lr: float, epochs: int, patience: int
) -> Alone:
    """Train on all points at once, judged by the training loss; SP or GmP with one input."""
    x, y = torch.from_numpy(data.x_train), torch.from_numpy(data.y_train)
    optimizer = keras_adam(model, lr)
    plateau = keras_plateau(optimizer, patience)
    losses: list[float] = []
    locations, best_epoch, best = [], 0, model
    while len(losses) < epochs and len(losses) <= best_epoch + 2 * patience:
        loss = l1_loss(model(x).squeeze(-1), y)
        losses.append(loss.item())
        locations.append((-model[0].bias / model[0].weight.squeeze(-1)).detach())
        if losses[-1] <= min(losses):
            best_epoch, best = len(losses) - 1, copy.deepcopy(model)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        plateau.step(losses[-1])
    return Alone(np.array(losses), torch.stack(locations).numpy(), best_epoch, best)
