"""Pooling in Triton's interpreter, on machines without a GPU."""

import importlib.util

import pooling_checks
import pytest
import torch

from geoparam.ops.pooling import Window

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs Triton")


@pooling_checks.windows
@pooling_checks.cases
def test_kernels(shape: tuple, window: Window) -> None:
    kernels = importlib.import_module("geoparam.ops.pooling_triton")
    pooling_checks.check(kernels, shape, window, torch.float32, "cpu")


@pooling_checks.dtypes
def test_types(dtype: torch.dtype) -> None:
    kernels = importlib.import_module("geoparam.ops.pooling_triton")
    pooling_checks.check(kernels, (2, 3, 5, 6), pooling_checks.STEM, dtype, "cpu")


def test_equal_numbers_and_nan() -> None:
    kernels = importlib.import_module("geoparam.ops.pooling_triton")
    pooling_checks.check_equal_numbers_and_nan(kernels, "cpu")


@pooling_checks.windows
@pytest.mark.parametrize("shape", [(2, 3, 8, 6), (5, 16, 11, 8)], ids=str)
def test_rectified(shape: tuple, window: Window) -> None:
    kernels = importlib.import_module("geoparam.ops.pooling_triton")
    pooling_checks.check_rectified(kernels, shape, window, torch.float32, "cpu")


@pooling_checks.dtypes
def test_types_of_rectified(dtype: torch.dtype) -> None:
    kernels = importlib.import_module("geoparam.ops.pooling_triton")
    pooling_checks.check_rectified(kernels, (3, 70, 5, 5), pooling_checks.SQUARES, dtype, "cpu")
