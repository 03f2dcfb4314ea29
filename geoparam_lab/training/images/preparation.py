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
from geoparam_lab.training.images.settings import Settings
from geoparam_lab.training.rival_optimizers import RIVALS, Together

if TYPE_CHECKING:
    from accelerate import Accelerator


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
    elif settings.optimizer in RIVALS:
        optimizer = _make_rival(settings, model)
    else:
        make = _torch_optimizer(settings.optimizer, settings, settings.momentum)
        optimizer = make(_make_groups(settings, model), lr=settings.lr)
    optimizer.register_step_post_hook(gp.retract(model))
    if settings.scales == "relative":
        optimizer.register_step_post_hook(partial(_divide_scales, model))
    return optimizer


def _make_groups(settings: Settings, model: nn.Module) -> list[dict[str, Any]]:
    """Return the groups of `gp.param_groups`, and one of r and lambda where these decay."""
    groups = gp.param_groups(model, settings.lr, settings.weight_decay, match=None)
    if settings.scale_decay:
        scales = [p for name, p in model.named_parameters() if name.endswith((".r", ".lam"))]
        known = set(map(id, scales))
        for group in groups:
            group["params"] = [p for p in group["params"] if id(p) not in known]
        of_scales = {"params": scales, "weight_decay": settings.scale_decay, "name": "scales"}
        groups.append(groups[0] | of_scales)
    return [group for group in groups if group["params"]]


@torch.no_grad()
def _divide_scales(model: nn.Module, *_: Any) -> None:
    for module in model.modules():
        if isinstance(module, gp.GmPLayer):
            module.r.div_(module.r.abs().mean())


def _torch_optimizer(name: str, settings: Settings, momentum: float | None = None) -> partial[Any]:
    """Return a constructor of torch's optimizer that takes parameters, rate and decay."""
    if name == "muon":
        return partial(torch.optim.Muon, momentum=0.95 if momentum is None else momentum)
    momentum = 0.9 if momentum is None else momentum
    if name == "adamw":
        return partial(torch.optim.AdamW, betas=(momentum, 0.999))
    return partial(torch.optim.SGD, momentum=momentum, nesterov=settings.nesterov)


def _make_rival(settings: Settings, model: nn.Module) -> torch.optim.Optimizer:
    """Return a rival over the rows of all layers but the last, and torch's over the rest."""
    layers = [module for module in model.modules() if isinstance(module, nn.Linear | nn.Conv2d)]
    weights = [each.weight for each in layers[:-1] if isinstance(each.weight, nn.Parameter)]
    geometric = any(isinstance(module, gp.GmPLayer) for module in model.modules())
    if geometric or len(weights) < len(layers) - 1:
        raise ValueError(
            f"optimizer {settings.optimizer!r} is for plain weights; method {settings.method!r} "
            "has others. Use sp, bn or ln."
        )
    kind, momentum = RIVALS[settings.optimizer]
    rest = settings.rest or ("sgd" if settings.optimizer == "rotational" else "adamw")
    usual = settings.lr if rest == "sgd" else 1e-3
    rest_lr = usual if settings.rest_lr is None else settings.rest_lr
    rows = set(map(id, weights))
    groups = gp.param_groups(model, rest_lr, settings.weight_decay, match=None)
    for group in groups:
        group["params"] = [each for each in group["params"] if id(each) not in rows]
    momentum = momentum if settings.momentum is None else settings.momentum
    options = {"lr": settings.lr, "momentum": momentum, "weight_decay": settings.weight_decay}
    others = _torch_optimizer(rest, settings)(groups, lr=rest_lr)
    return Together(kind(weights, **options), others)


def _make_geometric(settings: Settings, model: nn.Module) -> torch.optim.Optimizer:
    base = _torch_optimizer(settings.base or "sgd", settings, settings.momentum)
    coordinates: Any = settings.coordinates or "intrinsic"
    return gp.GeometricOptimizer(
        model,
        base.func,
        lr=settings.lr if settings.rest_lr is None else settings.rest_lr,
        coordinates=coordinates,
        turn=settings.turn,
        rest=_torch_optimizer(settings.rest, settings) if settings.rest else None,
        weight_decay=settings.weight_decay,
        **base.keywords,
    )
