"""torchvision's MobileNetV2 with given weights, under every method, and its optimizer."""

import hashlib
import math
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

import geoparam as gp
from geoparam_lab.training import optimizers
from geoparam_lab.training.finetune.settings import FinetuneSettings

GROUP = 16  # channels that share a GroupNorm's statistics, or the largest divisor of these
HEAD = "classifier."  # the output layer, which is new
MUON = 10  # Muon's rate over the rest's
DEGREES = 1000  # a turn over the rest's rate: 1 degree at 1e-3

State = dict[str, Tensor]


def read_weights(path: str | Path) -> State:
    """Return the tensors of a safetensors file."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    path = Path(path)
    if path.suffix != ".safetensors":
        raise ValueError(
            f"weights are a safetensors file with torchvision's keys; got {path}. Make one by "
            "safetensors.torch.save_file(mobilenet_v2(weights='IMAGENET1K_V1').state_dict(), "
            "'mobilenet_v2.safetensors')."
        )
    if not path.is_file():
        raise FileNotFoundError(f"the file of weights is not there: {path}. Correct its name.")
    try:
        return load_file(path)
    except SafetensorError as error:
        raise ValueError(f"{path} is damaged or no safetensors file: {error}.") from error


def find_checksum(state: State) -> str:
    """Return the SHA-256 of all tensors, by which the same weights are recognised."""
    digest = hashlib.sha256()
    for name in sorted(state):
        digest.update(name.encode())
        content = state[name].contiguous().flatten().view(torch.uint8)
        digest.update(content.numpy().tobytes())
    return digest.hexdigest()


def build_plain(settings: FinetuneSettings, state: State, classes: int) -> nn.Module:
    """Return the network with BatchNorm, its weights loaded and its output layer new."""
    from torchvision.models import mobilenet_v2

    model: nn.Module = mobilenet_v2(num_classes=classes, width_mult=settings.width)
    expected = model.state_dict()
    body = {name: value for name, value in state.items() if not name.startswith(HEAD)}
    for name, value in expected.items():
        if name.startswith(HEAD):
            continue
        if name not in body or body[name].shape != value.shape:
            got = tuple(body[name].shape) if name in body else "none"
            raise ValueError(
                "weights must be of torchvision's mobilenet_v2, at the width given "
                f"({settings.width:g}): {name} has the shape {tuple(value.shape)}; got {got}."
            )
    model.load_state_dict(expected | {name: body[name] for name in body if name in expected})
    return model


def apply_method(
    model: nn.Module, settings: FinetuneSettings, calibration: list[Tensor]
) -> nn.Module:
    """Return the network as its method trains it, in training mode.

    Args:
        model: in evaluation mode, with BatchNorm.
        settings: the run's.
        calibration: batches of training images, which set the means that IMN starts from.
    """
    method, share = settings.method, settings.running_momentum
    inputs = (calibration[0][:2],)
    if method == "gn":
        model = _use_group_norm(model)
    if method.startswith("fold"):
        model = gp.convert_(model, norm="fold", weights="plain", example_inputs=inputs)
    if method in ("imn", "frozen"):
        model = gp.convert_(
            model,
            norm="imn",
            weights="plain",
            momentum=share,
            example_inputs=inputs,
            calibration=calibration,
        )
    if method == "frozen":
        gp.freeze_means_(model)

    model.train()
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.momentum = share
            module.train(method != "bn-eval")
    return model


def _use_group_norm(model: nn.Module) -> nn.Module:
    """Replace each BatchNorm by a GroupNorm with its scale and offset."""
    norms = [
        (name, module)
        for name, module in model.named_modules()
        if isinstance(module, nn.BatchNorm2d)
    ]
    for name, norm in norms:
        channels = norm.num_features
        new = nn.GroupNorm(channels // math.gcd(channels, GROUP), channels, norm.eps)
        new.weight, new.bias = norm.weight, norm.bias
        parent, _, attribute = name.rpartition(".")
        setattr(model.get_submodule(parent), attribute, new)
    return model


def make_optimizer(settings: FinetuneSettings, model: nn.Module) -> torch.optim.Optimizer:
    """Return the optimizer, with the geometry in its step where method or optimizer say so."""
    name, lr, momentum = settings.optimizer, settings.lr, settings.momentum
    if name == "turn":
        muon = optimizers.make_torchs("muon", momentum)
        return optimizers.make_geometric(model, muon, turn=DEGREES * lr, lr=lr)
    if name == "muon":
        return _make_muon(model, lr, momentum)

    make = optimizers.make_torchs(name, momentum)
    if name == "adamw":
        make = partial(make, weight_decay=0.0)
    if settings.method == "fold+geometric":
        return optimizers.make_geometric(model, make, lr=lr)
    plain: torch.optim.Optimizer = make(model.parameters(), lr=lr)
    return plain


def _make_muon(model: nn.Module, lr: float, momentum: float) -> torch.optim.Optimizer:
    """Return Muon on the rows of hidden layers, and AdamW on all the rest."""
    named = model.named_parameters()
    hidden = [p for name, p in named if p.ndim > 1 and not name.startswith(HEAD)]
    others = [p for p in model.parameters() if not any(p is weight for weight in hidden)]
    rest = torch.optim.AdamW(others, lr=lr, weight_decay=0.0)
    return optimizers.make_rival(
        "muon", hidden, rest, lr=MUON * lr, momentum=momentum, weight_decay=0.0
    )
