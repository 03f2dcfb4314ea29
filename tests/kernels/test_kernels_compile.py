"""That Triton's compiler takes our kernels, on machines without a GPU.

Its interpreter, where their numbers are tested, takes more: Python as it is.
"""

import importlib.util
import os
from collections.abc import Callable
from typing import Any

import pytest
import torch

from geoparam import functional
from geoparam.kernels import selection

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs Triton"),
    pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="nothing is compiled"),
]
SHARED = 227 << 10  # bytes that a program may have there
TYPES = {torch.float64: "*fp64", torch.float32: "*fp32", torch.bfloat16: "*bf16"}


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Let a launch compile its kernel for an H100, and no more; record which."""
    from geoparam.kernels import weight_triton

    seen: list[str] = []

    class Compiler:
        """Stands for a kernel; a launch compiles it."""

        def __init__(self, kernel: Any) -> None:
            self.kernel = kernel

        def __getitem__(self, grid: tuple) -> Callable[..., None]:
            return self.compile

        def compile(self, *arguments: Any, num_warps: int, **constants: bool) -> None:
            compile_for_gpu(self.kernel, (*arguments, *constants.values()), num_warps)
            seen.append(self.kernel.__name__)

    for name in ("_forward_kernel", "_backward_kernel"):
        monkeypatch.setattr(weight_triton, name, Compiler(getattr(weight_triton, name)))
    monkeypatch.setattr(selection, "KERNELS", "triton")
    return seen


def compile_for_gpu(kernel: Any, arguments: tuple, num_warps: int) -> None:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    signature, constants = {}, {}
    for parameter, value in zip(kernel.params, arguments, strict=True):
        # Triton takes a 1 for a constant, too
        if parameter.is_constexpr or (type(value) is int and value == 1):
            constants[parameter.name] = value
        plain = TYPES[value.dtype] if isinstance(value, torch.Tensor) else "i32"
        signature[parameter.name] = "constexpr" if parameter.name in constants else plain
    source = ASTSource(kernel, signature, constexprs=constants)
    options = {"num_warps": num_warps}
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    assert compiled.metadata.shared <= SHARED


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("n", [2, 27, 576, 4096, 4609])
def test_weights(launches: list[str], n: int, dtype: torch.dtype) -> None:
    latitude, r = torch.zeros(8, n - 1, dtype=dtype), torch.zeros(8)
    weight = functional.compute_weight(latitude, r, torch.bfloat16)
    functional.compute_gradients(weight, latitude, r, True)
    assert launches == ["_forward_kernel", "_backward_kernel"]
