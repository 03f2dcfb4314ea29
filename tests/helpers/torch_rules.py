"""Keras's rules by torch's own means, and one network trained by them: what stacks must equal."""

import copy
import math
from collections.abc import Callable

import torch
from torch import Tensor, nn

import geoparam as gp
from geoparam_lab.training.stacks.stacked import Protocol

Pair = tuple[Tensor, Tensor]


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
    data: Pair,
    evaluation: Pair | None,
    lr: float,
    protocol: Protocol,
    seed: int = 0,
    watch: Callable[[nn.Sequential], None] = lambda model: None,
) -> tuple[list[float], list[float], list[float], nn.Sequential]:
    """Train one model as Keras would: losses, metrics and rates of each epoch, the best model.

    Without `evaluation` the loss is the metric, that of the weights before the epoch's step.
    """
    optimizer = keras_adam(model, lr)
    optimizer.register_step_post_hook(gp.retract(model))
    optimizer.register_step_pre_hook(lambda own, *_: _decay_(model, own, protocol.decay))
    plateau = keras_plateau(optimizer, protocol.patience)
    order = torch.Generator().manual_seed(seed)
    losses, metrics, rates, rows = [], [], [], len(data[0])
    while len(losses) < protocol.epochs:
        watch(model)
        total, judged = 0.0, copy.deepcopy(model) if evaluation is None else model
        shuffled = torch.randperm(rows, generator=order)
        for batch in (shuffled if protocol.batch_size else torch.arange(rows)).split(
            protocol.batch_size or rows
        ):
            x, y = (part[batch] for part in data)
            loss = protocol.loss(model.train()(x).T, y[None]).squeeze(0)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total += loss.item() * len(batch) / rows
        metric = total
        if evaluation is not None:
            with torch.no_grad():
                output = model.eval()(evaluation[0]).T
            metric = protocol.metric(output, evaluation[1][None]).item()
        losses.append(total), metrics.append(metric), rates.append(optimizer.param_groups[0]["lr"])
        plateau.step(metric)
        if metric == min(metrics):
            best, since = copy.deepcopy(judged), len(losses)
        if len(losses) - since >= protocol.stop_patience:
            break
    return losses, metrics, rates, best


@torch.no_grad()
def _decay_(model: nn.Module, optimizer: torch.optim.Optimizer, decay: float) -> None:
    """AdamW's decay, of weights alone."""
    for layer in model:
        if type(layer) is nn.Linear:
            layer.weight.sub_(optimizer.param_groups[0]["lr"] * decay * layer.weight)
