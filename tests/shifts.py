"""What every implementation of `shifted` must satisfy, stated once.

`module` has the functions of `geoparam.ops.shifted`; `device` is where its tensors live. Expected
values are the plain composition's, in float64, of the same numbers.
"""

import math
from collections.abc import Callable
from types import ModuleType
from typing import NamedTuple

import pytest
import torch
from passes import near, wide
from torch import Tensor

from geoparam.ops import shifted

COUNT, MOMENTUM = 7, 0.1


class Case(NamedTuple):
    """Units, the channels of a group, the kernel and groups; what else a layer can have."""

    units: int
    width: int
    kernel: tuple[int, ...]
    groups: int = 1
    inside: bool = True
    has_lam: bool = True
    parts: int = 0  # 0: the bias's gradient arrives whole, without a dimension for its parts
    channels_last: bool = False
    natural: bool = False


# n = 2, 3, 27, 40 and what a matrix has; each option in some of them
SHORT = [
    Case(5, 2, (1, 1), inside=False),
    Case(3, 3, (), parts=1),
    Case(4, 3, (3, 3), channels_last=True, parts=7),
    Case(4, 3, (3, 3), inside=False, parts=7),
    Case(6, 3, (3, 3), groups=2, has_lam=False, channels_last=True, natural=True),
    Case(34, 20, (2,), groups=2, parts=300),
    Case(6, 1, (3, 3), groups=6, inside=False, has_lam=False),
]
MEDIUM = [
    Case(3, 3, (7, 7), channels_last=True, inside=False),
    Case(64, 64, (3, 3), channels_last=True, parts=2112),
    Case(70, 64, (3, 3), groups=2, natural=True, parts=300),
    Case(130, 576, (), inside=False, parts=7),
    Case(24, 100, (3, 3, 3), channels_last=True),
]
LONG = [
    Case(7, 512, (3, 3), channels_last=True, parts=7),
    Case(7, 4609, (1, 1), inside=False),
    Case(4, 11, (419,), has_lam=False, parts=300),
]


def how_of(case: Case, coordinates: str, dtype: torch.dtype) -> shifted.How:
    natural = case.natural and coordinates == "latitude"
    shape = case.width, *case.kernel
    last = case.channels_last
    return shifted.How(
        coordinates, natural, dtype, shape, last, case.inside, COUNT, MOMENTUM
    )  # fmt: skip


class Inputs(NamedTuple):
    stored: Tensor
    r: Tensor
    lam: Tensor | None
    total: Tensor


def inputs_of(case: Case, coordinates: str, dtype: torch.dtype, device: str) -> Inputs:
    units, width, kernel = case[:3]
    n = width * math.prod(kernel)
    columns = n - (coordinates == "latitude")
    stored = torch.randn(units, columns, dtype=torch.float64) * (0.3 if n > 100 else 1)
    r, lam = torch.randn(2, units, dtype=torch.float64) + 0.5
    total = torch.randn(width * case.groups, dtype=torch.float64) * COUNT
    return Inputs(
        stored.to(device, dtype),
        r.to(device, dtype),
        lam.to(device, dtype) if case.has_lam else None,
        total.to(device, wide(dtype)),
    )


def exactly(x: Tensor | None) -> Tensor | None:
    return None if x is None else x.detach().double().cpu()


def check_forward(
    module: ModuleType, case: Case, coordinates: str, dtype: torch.dtype, device: str
) -> None:
    how, given = how_of(case, coordinates, dtype), inputs_of(case, coordinates, dtype, device)
    mean = torch.randn_like(given.total)
    running = mean.clone(), torch.tensor(3, device=device)
    versions = [x._version for x in running]
    weight, bias = module.forward(*given, running, how)
    precise = exactly(mean), torch.tensor(3)
    wanted = how._replace(dtype=torch.float64)
    expected, _ = shifted.forward(*map(exactly, given), precise, wanted)
    near(weight, expected, dtype)
    assert weight.dtype == bias.dtype == dtype and bias.shape == (case.units,)
    assert weight.stride() == expected.stride()
    # of the weight as it was rounded
    seen = _response(exactly(weight), exactly(given.total), case)
    offset = 0 if given.lam is None else exactly(given.lam)
    offset = offset * exactly(given.r) if case.inside else offset
    near(bias, offset - seen, dtype)
    near(running[0], precise[0], wide(dtype))
    assert running[1] == 4 and all(x._version > v for x, v in zip(running, versions, strict=True))
    again = module.forward(*given, None, how)
    assert torch.equal(again[0], weight) and torch.equal(again[1], bias)


def _response(weight: Tensor, total: Tensor, case: Case) -> Tensor:
    rows = weight.flatten(2).sum(-1) if weight.ndim > 2 else weight
    mean = (total / COUNT).view(case.groups, 1, case.width)
    return (rows.view(case.groups, -1, case.width) * mean).sum(-1).flatten()


def check_backward(
    module: ModuleType, case: Case, coordinates: str, dtype: torch.dtype, device: str
) -> None:
    how, given = how_of(case, coordinates, dtype), inputs_of(case, coordinates, dtype, device)
    weight, _ = module.forward(*given, None, how)
    grad_weight = torch.randn(weight.shape).to(device, dtype)
    parts = (case.parts,) if case.parts else ()
    grad_bias = torch.randn(*parts, case.units).to(device, wide(dtype)) / max(case.parts, 1)
    wanted = how._replace(dtype=torch.float64)
    precise = [exactly(x) for x in (*given, weight)]
    expected = shifted.backward(exactly(grad_weight), exactly(grad_bias), *precise, wanted)
    other = grad_weight.clone(memory_format=torch.contiguous_format)
    if weight.ndim == 4:
        other = other.contiguous(memory_format=torch.channels_last)
    for grad in (grad_weight, other):  # in either order
        found = module.backward(grad, grad_bias, *given, weight, how)
        for a, b in zip(found, expected, strict=True):
            near(a, b, dtype)
        for a, b in zip(found, given, strict=True):
            assert a is None or (a.dtype == b.dtype and a.shape == b.shape)
        assert torch.equal(grad, grad_weight)  # not changed on the way


def check_strided(module: ModuleType, coordinates: str, device: str) -> None:
    """One number per unit may come from anywhere: a column, or one number for all."""
    case = Case(4, 5, (1, 1))
    how, given = how_of(case, coordinates, torch.float32), torch.randn(6, 12, device=device)
    stored = torch.randn(10, 4, device=device).T[:, ::2]
    stored = stored[:, : 5 - (coordinates == "latitude")]
    r, lam, total = given[:4, 0], given[:1, 1].expand(4), given[:5, 2]
    mean = given[:5, 3]
    expected_mean = (mean + MOMENTUM * (total / COUNT - mean)).clone()
    running = mean, torch.tensor(3, device=device)
    weight, bias = module.forward(stored, r, lam, total, running, how)
    precise = [exactly(x) for x in (stored, r, lam, total)]
    expected = shifted.forward(*precise, None, how._replace(dtype=torch.float64))
    near(weight, expected[0], torch.float32)
    near(bias, expected[1], torch.float32)
    near(mean, expected_mean.double(), torch.float32)
    assert running[1] == 4
    grad_weight = torch.randn(4, 10, 1, 1, device=device)[:, ::2]
    grad_bias = torch.randn(3, 8, device=device)[:, ::2]
    found = module.backward(grad_weight, grad_bias, stored, r, lam, total, weight, how)
    given = [exactly(x) for x in (grad_weight, grad_bias)], precise, exactly(weight)
    expected = shifted.backward(*given[0], *given[1], given[2], how._replace(dtype=torch.float64))
    for a, b in zip(found, expected, strict=True):
        near(a, b, torch.float32)


def check_nan(module: ModuleType, coordinates: str, device: str) -> None:
    """A number that is none stays in its group, and a gradient that is none in its unit."""
    case = Case(4, 3, (2, 2), groups=2)
    how = how_of(case, coordinates, torch.float32)
    stored, r, lam, total = inputs_of(case, coordinates, torch.float32, device)
    total[1] = torch.nan
    weight, bias = module.forward(stored, r, lam, total, None, how)
    assert weight.isfinite().all() and bias.isnan().tolist() == [True, True, False, False]
    grad_bias = torch.tensor([0.0, 1.0, torch.nan, 2.0], device=device)
    total[1] = 1.0
    found = module.backward(
        torch.randn_like(weight), grad_bias, stored, r, lam, total, weight, how
    )
    bad = [x.isnan().view(4, -1).any(1).tolist() for x in found[:3]]
    assert bad == [[False, False, True, False]] * 3
    assert found[3].isnan().tolist() == [False] * 3 + [True] * 3


def check_mean(
    mean_of_parts: Callable, shape: tuple[int, int], dtype: torch.dtype, device: str
) -> None:
    parts, old = torch.randn(shape).to(device, dtype), torch.randn(shape[1]).to(device, dtype)
    running, batches = old.clone(), torch.tensor(3, device=device)
    found = mean_of_parts(parts, COUNT, running, batches, MOMENTUM)
    expected = exactly(parts).sum(0) / COUNT
    near(found, expected, dtype)
    near(running, exactly(old).lerp(expected, MOMENTUM), dtype)
    assert batches == 4
    assert torch.equal(mean_of_parts(parts, COUNT, None, None, MOMENTUM), found)
    pairs = torch.zeros((*running.shape, 2), dtype=running.dtype, device=device)
    mean_of_parts(parts, COUNT, pairs[:, 0], batches, MOMENTUM)  # with gaps in memory
    near(pairs[:, 0], MOMENTUM * found.double(), dtype)
    assert not pairs[:, 1].any() and batches == 5


dtypes = pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16], ids=str
)
coordinates = pytest.mark.parametrize("coordinates", ["latitude", "unit"])
