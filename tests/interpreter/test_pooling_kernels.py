"""Pooling in Triton's interpreter, on machines without a GPU."""

import importlib.util

import pooling_checks
import pytest
import torch

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs Triton")


@pooling_checks.cases
@pooling_checks.dtypes
def test_kernels(shape: tuple, dtype: torch.dtype) -> None:
    kernels = importlib.import_module("geoparam.ops.pooling_triton")
    pooling_checks.check(kernels, shape, dtype, "cpu")
    pooling_checks.check_equal_numbers_and_nan(kernels, "cpu")
