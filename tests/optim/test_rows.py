"""Kernels of rows, in C and in Triton, equal the plain form; Muon on rows equals torch's."""

import importlib
import os
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from geoparam.kernels import rows_native
from geoparam.kernels.rows import Rows
from geoparam.kernels.weight_native import is_available
from geoparam.optim.muon import RowMuon

INTERPRETED = [pytest.param("triton", marks=pytest.mark.interpreter)]
KERNELS = ["native", *(INTERPRETED if os.environ.get("TRITON_INTERPRET") == "1" else [])]
SHAPES = [(3, 5), (0, 4), (4, 1), (2, 1030), (1, 17)]
BOUNDS = {t: {"rtol": x, "atol": x} for t, x in ((torch.float32, 4e-6), (torch.float64, 1e-13))}


def results(rows: Rows, rescales: bool) -> list[Tensor]:
    torch.manual_seed(0)
    w, g, v = ([torch.randn(s, dtype=rows.dtype) for s in SHAPES] for _ in range(3))
    w[0][1] = g[2][1] = 0
    r, length, a, b, grad_r, grad_norm = torch.randn(6, rows.total, dtype=rows.dtype)
    grad_v, sign, length = [torch.empty_like(x) for x in w], r.sign(), length.abs() + 0.5
    before = [x.clone() for x in w]
    rows.enter(w, g, grad_v, (length, r, grad_r, grad_norm), rescales)
    assert r[1] == 0 and grad_norm[4] == 0 and torch.equal(r.sign(), sign * (r != 0))
    assert rescales or all(map(torch.equal, w, before))
    measured = rows.measure(w, g, r)
    rows.rotate(w, g, a, b)
    r_before = r.clone()
    r.add_(b)  # some change their sign
    rows.leave(v, r, r_before)
    assert r[1] == 0 and not v[0][1].any()
    return [*grad_v, *w, *v, r, grad_r, grad_norm > 0, *measured]


def results_of_flat_functions(rows: Rows, _: bool) -> list[Tensor]:
    """Return what becomes of biases, some far out, and how rows are turned, per row."""
    torch.manual_seed(0)
    r, grad_r, b, grad_b, along, stepped = torch.randn(6, rows.total, dtype=rows.dtype)
    r[2] = b[1] = 0
    before, lam, grad_lam = b.clone(), torch.zeros_like(b), torch.zeros_like(b)
    rows.enter_biases(b, grad_b, r, grad_r, lam, grad_lam)
    r_before, first = r.clone(), [lam.clone(), grad_lam.clone(), grad_r.clone()]
    rows.leave_biases(b, r, r_before, lam)
    assert torch.equal(b, before)  # no step
    lam.copy_(first[0])
    lam[::2] += stepped[::2]
    r += stepped * (r != 0)
    rows.leave_biases(b, r, r_before, lam)
    grad_norm = (torch.arange(rows.total) > 2).to(r)
    turn, length = torch.rand(len(SHAPES), dtype=rows.dtype), torch.ones_like(r)
    mixed = []
    for limit, turns in ((0.0, turn), (0.3, turn), (0.3, None)):
        scale, across = r.clone(), along.abs() * (along > 0)
        given = along, across, length, grad_norm, r_before, scale
        mixed += [*rows.turn_coefficients(given, turns, limit), scale]
    return [*first, b, lam, *mixed]


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
@pytest.mark.parametrize("way", [True, False])
@pytest.mark.parametrize("function", [results, results_of_flat_functions])
def test_kernels_compute_what_the_plain_form_does(
    kernels: Any, dtype: Any, function: Any, way: Any
) -> None:
    if kernels == "native":
        build: Any = rows_native.NativeRows if is_available() else pytest.skip("no C")
    else:
        build = importlib.import_module("geoparam.kernels.rows_triton").TritonRows
    like = torch.empty(0, dtype=dtype)
    plain, fast = (make(SHAPES, like, None, None, way) for make in (Rows, build))
    torch.testing.assert_close(function(fast, way), function(plain, way), **BOUNDS[dtype])


@pytest.mark.parametrize("options", [{}, {"momentum": 0.5, "ns_steps": 3, "nesterov": False}])
def test_muon_steps_each_layer_as_torchs_does_alone(options: Any) -> None:
    shapes = [(5, 12), (14, 5), (5, 3, 2, 2), (5, 12), (8, 8), (1, 5), (5, 1)]
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
