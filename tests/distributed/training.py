"""A small training run, on joint batches in one process or on their parts in each of two."""

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn import functional as F

import geoparam as gp

EQUAL = (4, 4)


def network(
    kind: str, coordinates: str = "angles", dtype: torch.dtype = torch.float64
) -> nn.Module:
    """Return a converted CNN, the same on every process: `kind` says what becomes of BatchNorm.

    "plain" never had any, "absorbed" has it folded into `input_norm="bias"`, "anew" is drawn from
    scratch with the papers' `input_norm=True`.
    """
    torch.manual_seed(1)
    with_norm = kind != "plain"
    model = nn.Sequential(
        *_block(3, 6, with_norm), *_block(6, 5, with_norm), nn.Flatten(), nn.Linear(20, 3)
    ).to(dtype)
    x = torch.randn(16, 3, 8, 8, dtype=dtype) + 0.5
    model(x)  # moves the statistics of BatchNorm
    if not with_norm:
        return gp.convert_(model, coordinates=coordinates)
    init = "glorot" if kind == "anew" else None
    options = {"norm": "imn", "example_inputs": (x,), "init": init}
    return gp.convert_(model, coordinates=coordinates, **options)


def synchronised(model: nn.Module) -> nn.Module:
    norms = any(isinstance(module, gp.InputMeanNorm) for module in model.modules())
    return gp.synchronise_means_(model) if norms else model


def _block(width: int, out: int, with_norm: bool) -> list[nn.Module]:
    norm = [nn.BatchNorm2d(out)] if with_norm else []
    return [nn.Conv2d(width, out, 3, padding=1), *norm, nn.ReLU(), nn.MaxPool2d(2)]


def whole(x: Tensor) -> Tensor:
    return x.full_tensor() if isinstance(x, DTensor) else x


def assert_same_state(model: nn.Module, reference: nn.Module, tolerance: float = 1e-10) -> None:
    state, expected = model.state_dict(), reference.state_dict()
    assert list(state) == list(expected)
    for name, value in state.items():
        difference = (whole(value) - whole(expected[name])).abs().max()
        assert difference <= tolerance, f"{name} differs by {difference}"


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    groups = gp.param_groups(model, lr=0.03, weight_decay=0.1, kind="sgd")
    optimizer = torch.optim.SGD(groups, lr=0.03, momentum=0.9)
    optimizer.register_step_post_hook(gp.retract(model))
    return optimizer


def train(
    model: nn.Module,
    sizes: Sequence[int] | None = None,
    *,
    batch: int = sum(EQUAL),
    run: Callable[[Tensor], Tensor] | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    steps: int = 5,
) -> list[float]:
    """Train on joint batches, or, given the `sizes` of their parts, on this process's parts.

    `run` is the model as it is called, where that is another object: DDP's or a compiled one.
    """
    optimizer = optimizer or sgd(model)
    dtype = next(model.parameters()).dtype
    random, losses = torch.Generator().manual_seed(2), []
    for _ in range(steps):
        count = batch if sizes is None else sum(sizes)
        x = torch.randn(count, 3, 8, 8, generator=random, dtype=dtype) + 0.5
        y = torch.randint(3, (count,), generator=random)
        share = 1 / count
        if sizes is not None:
            rank, share = dist.get_rank(), len(sizes) / count  # gradients will be averaged
            x, y = x.split(tuple(sizes))[rank], y.split(tuple(sizes))[rank]
        loss = share * F.cross_entropy((model if run is None else run)(x), y, reduction="sum")
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses
