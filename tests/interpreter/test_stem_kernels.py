"""The first convolution in Triton's interpreter, on machines without a GPU."""

import importlib.util

import pytest
import stem_checks
import torch

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs Triton")


@stem_checks.cases
def test_kernels(case: tuple) -> None:
    kernels = importlib.import_module("geoparam.ops.stem_triton")
    stem_checks.check(kernels, case, torch.float32, "cpu")


def test_half_precision() -> None:
    """Not bfloat16: the interpreter multiplies its bits."""
    kernels = importlib.import_module("geoparam.ops.stem_triton")
    stem_checks.check(kernels, stem_checks.CASES[0], torch.float16, "cpu")
