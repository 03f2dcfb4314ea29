"""Rows in plain torch and in Triton compute one thing; Muon on rows is torch's Muon."""

import copy
import importlib
import math
import os
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from geoparam.kernels.rows import Rows
from geoparam.optim.muon import RowMuon, orthogonalise

SHAPES = [(3, 5), (0, 4), (4, 1), (2, 1030), (2, 5), (70, 1000)]  # the last is not stacked
BOUNDS = {torch.float32: 4e-6, torch.float64: 1e-13}
INTERPRETED = pytest.param("triton", marks=pytest.mark.interpreter)
IS_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


class Formulas:
    """The formulas of `rows`, matrix by matrix, as its docstring has them."""

    def __init__(self, shapes: list[tuple[int, int]], like: Tensor) -> None:
        self.counts = [count for count, _ in shapes]

    def divide(self, *flat: Tensor) -> list[tuple[Tensor, ...]]:
        """Return numbers of rows as columns, one for each matrix."""
        return [x[:, None].split(self.counts) for x in flat]

    def project(self, w: Any, g: Any, grad_d: Any, length: Tensor, r_before: Tensor) -> Any:
        columns = []
        flat = self.divide(length, r_before)
        for x, y, out, at_length, before in zip(w, g, grad_d, *flat, strict=True):
            r = x.norm(dim=1, keepdim=True)
            r = torch.where(before < 0, -r, r)
            u = torch.where(r == 0, 0, x / r)
            grad_r = (y * u).sum(dim=1, keepdim=True)
            size = y.norm(dim=1, keepdim=True)

            is_new = (r == 0) & (before == 0)
            gradient = r / at_length * (y - grad_r * u)
            out.copy_(torch.where(is_new, y, gradient))
            grad_r = torch.where(is_new, -size, grad_r)
            columns.append(torch.cat([r, grad_r, size], dim=1))
        return torch.cat(columns).unbind(dim=1)

    def measure(self, w: Any, d: Any, r: Tensor, work: Any) -> Any:
        columns = []
        for x, y, scale in zip(w, d, *self.divide(r), strict=True):
            u = torch.where(scale == 0, 0, x / scale)
            along = (y * u).sum(dim=1, keepdim=True)
            across = (y - along * u).norm(dim=1, keepdim=True)
            columns.append(torch.cat([along, across], dim=1))
        return torch.cat(columns).unbind(dim=1)

    def combine(self, w: Any, d: Any, a: Tensor, b: Tensor) -> None:
        for x, y, by_w, by_d in zip(w, d, *self.divide(a, b), strict=True):
            y.copy_(by_w * x + by_d * y)


def draw(dtype: torch.dtype, random: torch.Generator) -> list[Tensor]:
    """Return a random matrix of each shape."""
    return [torch.randn(shape, generator=random, dtype=dtype) for shape in SHAPES]


def results(rows: Any, dtype: torch.dtype) -> list[Tensor]:
    """Return all that the functions give for random rows: one zero, one never born."""
    random = torch.Generator().manual_seed(0)
    w, g, d = (draw(dtype, random) for _ in range(3))
    total = sum(count for count, _ in SHAPES)
    r, a, b, length = torch.randn(4, total, generator=random, dtype=dtype)
    length = length.abs() + 0.5
    w[0][1:] = 0
    r[2] = 0

    grad_d = [torch.full_like(x, torch.nan) for x in w]
    work = [torch.full_like(x, torch.nan) for x in w]
    projected = rows.project(w, g, grad_d, length, r)
    measured = rows.measure(w, d, projected[0], work)
    rows.combine(w, d, a, b)
    return [*projected, *grad_d, *measured, *d]


@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
@pytest.mark.parametrize("kernels", ["torch", *([INTERPRETED] if IS_INTERPRETED else [])])
def test_kernels_compute_the_formulas(kernels: str, dtype: torch.dtype) -> None:
    make: Any = Rows
    if kernels == "triton":
        make = importlib.import_module("geoparam.kernels.rows_triton").TritonRows
    like = torch.empty(0, dtype=dtype)
    found = results(make(SHAPES, like), dtype)
    expected = results(Formulas(SHAPES, like), dtype)
    bound = BOUNDS[dtype]
    torch.testing.assert_close(found, expected, rtol=bound, atol=10 * bound)


def test_a_row_of_zeros_is_new_without_a_scale_and_pruned_with_one() -> None:
    grad_d = [torch.empty(3, 5)]
    w, g = torch.zeros(3, 5), torch.ones(3, 5)
    r_before = torch.tensor([0, 1, -1])
    rows = Rows([(3, 5)], g)
    _, grad_r, _ = rows.project([w], [g], grad_d, torch.ones(3), r_before)
    assert grad_d[0].sum(dim=1).tolist() == [5, 0, 0]
    assert grad_r.tolist() == pytest.approx([-math.sqrt(5), 0, 0])


MUON = [
    {},
    {"momentum": 0.5, "ns_steps": 3, "nesterov": False},
    {"adjust_lr_fn": "match_rms_adamw"},
    {"weight_decay": 0.5},
]


@pytest.mark.parametrize("options", MUON, ids=str)
def test_muon_steps_each_layer_as_torchs_does_alone(options: Any) -> None:
    shapes = [(5, 12), (14, 5), (5, 3, 2, 2), (5, 12)]
    shapes += [(8, 8), (1, 5), (5, 1)]
    ours = [nn.Parameter(2.0**i * torch.randn(shape)) for i, shape in enumerate(shapes)]
    alone = [nn.Parameter(p.detach().flatten(1).clone()) for p in ours]
    torchs = [torch.optim.Muon([p], lr=0.02, **options) for p in alone]
    optimizers = [RowMuon(ours, lr=0.02, **options), *torchs]
    for _ in range(3):
        for p, q in zip(ours, alone, strict=True):
            p.grad = torch.randn_like(p)
            q.grad = p.grad.flatten(1)
        for optimizer in optimizers:
            optimizer.step()
    for p, q in zip(ours, alone, strict=True):  # bfloat16, times the rate
        torch.testing.assert_close(p.detach().flatten(1), q.detach(), rtol=0.05, atol=5e-4)


def test_muon_steps_the_parts_of_a_parameter_as_layers_of_their_own() -> None:
    packed = nn.Parameter(torch.randn(9, 6))
    parts = [nn.Parameter(part.clone()) for part in packed.detach().split([4, 5])]
    packed.grad = torch.cat([100 * torch.randn(4, 6), torch.randn(5, 6)])
    for part, g in zip(parts, packed.grad.split([4, 5]), strict=True):
        part.grad = g
    RowMuon([packed], lr=0.02, parts={packed: (4, 5)}).step()
    RowMuon(parts, lr=0.02).step()
    torch.testing.assert_close(packed, torch.cat([*parts]), rtol=0.05, atol=5e-4)


@pytest.mark.parametrize("way", ["copy", "pickle"])
def test_a_copy_of_muon_steps_as_the_original(way: str) -> None:
    p = nn.Parameter(torch.randn(9, 6))
    optimizer = RowMuon([p], lr=0.02, parts={p: (4, 5)})
    p.grad = torch.randn(9, 6)
    optimizer.step()
    pair = p, optimizer
    q, other = copy.deepcopy(pair) if way == "copy" else pickle.loads(pickle.dumps(pair))
    p.grad, q.grad = torch.ones(2, 9, 6)
    optimizer.step()
    other.step()
    assert torch.equal(p, q)


@pytest.mark.parametrize("p", [torch.zeros(3), torch.zeros(2, 2, dtype=torch.complex64)])
def test_muon_refuses_what_is_no_real_matrix(p: Tensor) -> None:
    with pytest.raises(ValueError, match="two or more dimensions, and no complex"):
        RowMuon([nn.Parameter(p)])


def test_muon_refuses_parts_that_do_not_add_up() -> None:
    p = nn.Parameter(torch.zeros(4, 3))
    with pytest.raises(ValueError, match="must add up to its rows; got 3"):
        RowMuon([p], parts={p: (2, 1)})


def test_a_single_matrix_is_no_batch() -> None:
    with pytest.raises(ValueError, match=r"a batch is .* got \(3, 4\)"):
        orthogonalise(torch.zeros(3, 4), [(3.0, -4.0, 2.0)])
