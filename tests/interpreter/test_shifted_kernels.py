"""Weight and bias in one launch in Triton's interpreter, on machines without a GPU."""

import importlib.util

import pytest
import shifts
import torch

HAS_TRITON = importlib.util.find_spec("triton") is not None
pytestmark = pytest.mark.skipif(not HAS_TRITON, reason="needs Triton")
if HAS_TRITON:
    from geoparam.ops import means_triton, shifted_triton

SOME = [(case, torch.float32) for case in shifts.SHORT]
SOME += [(shifts.SHORT[2], dtype) for dtype in (torch.float64, torch.bfloat16, torch.float16)]
SOME += [
    pytest.param(case, torch.float32, marks=pytest.mark.slow)
    for case in [*shifts.MEDIUM, *shifts.LONG]
]


@shifts.coordinates
@pytest.mark.parametrize(("case", "dtype"), SOME, ids=str)
def test_weight_and_bias(case: shifts.Case, dtype: torch.dtype, coordinates: str) -> None:
    shifts.check_forward(shifted_triton, case, coordinates, dtype, "cpu")
    shifts.check_backward(shifted_triton, case, coordinates, dtype, "cpu")


@shifts.coordinates
def test_gaps_and_nan(coordinates: str) -> None:
    shifts.check_strided(shifted_triton, coordinates, "cpu")
    shifts.check_nan(shifted_triton, coordinates, "cpu")


@pytest.mark.parametrize("shape", [(1, 1), (7, 33), (300, 20)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_mean_of_parts(shape: tuple[int, int], dtype: torch.dtype) -> None:
    shifts.check_mean(means_triton.mean_of_parts, shape, dtype, "cpu")
