"""The passes over activations in Triton's interpreter, on machines without a GPU."""

import importlib.util

import passes
import pytest
import torch

HAS_TRITON = importlib.util.find_spec("triton") is not None
pytestmark = pytest.mark.skipif(not HAS_TRITON, reason="needs Triton")
if HAS_TRITON:
    from geoparam.ops import columns_triton


@passes.cases
@passes.dtypes
def test_rectify(case: tuple, dtype: torch.dtype) -> None:
    passes.check_rectify(columns_triton, case, dtype, "cpu")


@passes.cases
@passes.dtypes
def test_rectify_backward(case: tuple, dtype: torch.dtype) -> None:
    passes.check_backward(columns_triton, case, dtype, "cpu")


@passes.cases
@passes.dtypes
def test_rectify_backward_from_the_start(case: tuple, dtype: torch.dtype) -> None:
    passes.check_backward_from_the_start(columns_triton, case, dtype, "cpu")


@passes.cases
@passes.dtypes
def test_sums(case: tuple, dtype: torch.dtype) -> None:
    passes.check_sums(columns_triton, case, dtype, "cpu")


def test_gaps_and_nan() -> None:
    passes.check_strided(columns_triton, "cpu")
    passes.check_strided_parameters(columns_triton, "cpu")
    passes.check_nan(columns_triton, "cpu")
    passes.check_nan_from_the_start(columns_triton, "cpu")
    passes.check_backward_without_bias(columns_triton, "cpu")


@passes.cases
@passes.dtypes
def test_centre(case: tuple, dtype: torch.dtype) -> None:
    passes.check_centre(columns_triton, case, dtype, "cpu")
