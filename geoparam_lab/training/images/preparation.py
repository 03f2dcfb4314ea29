"""What a run on images needs before its first step: network and optimizer."""

import warnings
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn.functional import dropout

import geoparam as gp
from geoparam_lab import networks
from geoparam_lab.data.image_source import Source, find_layout
from geoparam_lab.training import optimizers
from geoparam_lab.training.images.settings import Settings

if TYPE_CHECKING:
    from accelerate import Accelerator

REST_RATE = 1e-3  # AdamW's beside a rival, where a run names none


def build(settings: Settings, source: Source) -> nn.Module:
    """Return the network for these images."""
    names = ("init", "imn", "mbn", "skip", "constants", "widths", "seed")
    options = {name: getattr(settings, name) for name in names} | {"size": source.size}
    return networks.build(settings.network, settings.method, source.classes, **options)


def make_network(settings: Settings, source: Source, accelerator: "Accelerator") -> nn.Module:
    """Return the network on its device, its norms synchronised over processes."""
    model = build(settings, source)
    if settings.dropout:
        *_, output = model.children()
        output.register_forward_pre_hook(
            lambda layer, inputs: dropout(inputs[0], settings.dropout, layer.training)
        )
    if accelerator.num_processes > 1:
        if any(isinstance(module, gp.InputMeanNorm) for module in model.modules()):
            gp.synchronise_means_(model)
        if accelerator.device.type == "cuda":  # torch has no other SyncBatchNorm
            model = nn.SyncBatchNorm.convert_sync_batchnorm(model)
        elif any(isinstance(module, nn.BatchNorm2d) for module in model.modules()):
            warnings.warn(
                "torch synchronises BatchNorm on GPUs alone: each of these processes normalises "
                "by its own part of a batch, and the numbers are not those of one process.",
                stacklevel=2,
            )
    # FSDP2 takes no parameters in channels_last.
    preferred = find_layout(accelerator.device)
    layout = torch.contiguous_format if accelerator.is_fsdp2 else preferred
    return model.to(accelerator.device, memory_format=layout)  # type: ignore[call-overload]


def make_optimizer(settings: Settings, model: nn.Module) -> torch.optim.Optimizer:
    """Return the optimizer over all parameters, which keeps unit vectors on the sphere."""
    if settings.optimizer == "geometric":
        optimizer = _make_geometric(settings, model)
    elif settings.optimizer in optimizers.RIVALS:
        optimizer = _make_rival(settings, model)
    else:
        make = _make_torchs(settings, settings.optimizer, settings.momentum)
        optimizer = make(_make_groups(settings, model), lr=settings.lr)
    optimizer.register_step_post_hook(gp.retract(model))
    if settings.scales == "relative":
        optimizer.register_step_post_hook(partial(_divide_scales, model))
    return optimizer


def _make_torchs(settings: Settings, name: str, momentum: float | None = None) -> partial[Any]:
    return optimizers.make_torchs(name, momentum, nesterov=settings.nesterov)


def _make_groups(settings: Settings, model: nn.Module) -> list[dict[str, Any]]:
    """Return the groups of `gp.param_groups`, and one of r and lambda where these decay."""
    groups = gp.param_groups(model, settings.lr, settings.weight_decay, match=None)
    if not settings.scale_decay:
        return optimizers.leave_out(groups, [])
    scales = [p for name, p in model.named_parameters() if name.endswith((".r", ".lam"))]
    of_scales = {"params": scales, "weight_decay": settings.scale_decay, "name": "scales"}
    return [*optimizers.leave_out(groups, scales), groups[0] | of_scales]


@torch.no_grad()
def _divide_scales(model: nn.Module, *_: Any) -> None:
    """Divide every r by its layer's mean."""
    for module in model.modules():
        if isinstance(module, gp.GmPLayer):
            module.r.div_(module.r.abs().mean())


def _make_rival(settings: Settings, model: nn.Module) -> torch.optim.Optimizer:
    """Return a rival over the rows of all layers but the last, and torch's over the rest."""
    layers = [module for module in model.modules() if isinstance(module, nn.Linear | nn.Conv2d)]
    hidden = layers[:-1]
    weights = [layer.weight for layer in hidden if isinstance(layer.weight, nn.Parameter)]
    is_geometric = any(isinstance(module, gp.GmPLayer) for module in model.modules())
    if is_geometric or len(weights) < len(hidden):
        raise ValueError(
            f"optimizer {settings.optimizer!r} is for plain weights; method {settings.method!r} "
            "has others. Use sp, bn or ln."
        )

    rest = settings.rest or ("sgd" if settings.optimizer == "rotational" else "adamw")
    rest_lr = settings.rest_lr
    if rest_lr is None:
        rest_lr = settings.lr if rest == "sgd" else REST_RATE
    groups = gp.param_groups(model, rest_lr, settings.weight_decay, match=None)
    others = optimizers.leave_out(groups, weights)
    return optimizers.make_rival(
        settings.optimizer,
        weights,
        _make_torchs(settings, rest)(others, lr=rest_lr),
        lr=settings.lr,
        momentum=settings.momentum,
        weight_decay=settings.weight_decay,
    )


def _make_geometric(settings: Settings, model: nn.Module) -> torch.optim.Optimizer:
    return optimizers.make_geometric(
        model,
        _make_torchs(settings, settings.base or "sgd", settings.momentum),
        lr=settings.lr if settings.rest_lr is None else settings.rest_lr,
        turn=settings.turn,
        coordinates=settings.coordinates or "intrinsic",
        rest=_make_torchs(settings, settings.rest) if settings.rest else None,
        weight_decay=settings.weight_decay,
    )
