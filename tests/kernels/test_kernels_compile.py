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
SHARED_BYTES = 227 << 10  # of an H100's shared memory that a program may use
TYPES = {
    torch.float64: "*fp64",
    torch.float32: "*fp32",
    torch.bfloat16: "*bf16",
    torch.int64: "*i64",
    torch.int32: "*i32",
    int: "i32",
    float: "fp32",
}


class Compiler:
    """Stands for a kernel: a launch compiles it for an H100, writes down its name, and ends."""

    def __init__(self, kernel: Any, launches: list[str]) -> None:
        self.kernel = kernel
        self.launches = launches

    def __getitem__(self, grid: tuple) -> Callable[..., None]:
        return self.compile

    def compile(self, *arguments: Any, **named: Any) -> None:
        compile_for_gpu(self.kernel, arguments, named)
        self.launches.append(self.kernel.__name__)


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Let launches compile their kernels, and no more; return the list of their names."""
    from geoparam.kernels import channels_triton, rows_triton, weight_triton

    launches: list[str] = []
    kernels = {
        channels_triton: ("_add_row",),
        weight_triton: ("_forward_kernel", "_backward_kernel"),
        rows_triton: ("_project", "_measure", "_combine"),
    }
    for module, names in kernels.items():
        for name in names:
            compiler = Compiler(getattr(module, name), launches)
            monkeypatch.setattr(module, name, compiler)
    monkeypatch.setattr(selection, "KERNELS", "triton")
    return launches


def compile_for_gpu(kernel: Any, arguments: tuple, named: dict[str, Any]) -> None:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    names = [parameter.name for parameter in kernel.params]
    values = dict(zip(names, arguments, strict=False)) | named
    signature = {}
    constants = {}
    for parameter in kernel.params:
        value = values.pop(parameter.name)
        is_one = type(value) is int and value == 1  # Triton makes it a constant
        if parameter.is_constexpr or is_one:
            signature[parameter.name] = "constexpr"
            constants[parameter.name] = value
        else:
            kind = getattr(value, "dtype", type(value))
            signature[parameter.name] = TYPES[kind]
    options = values  # what is left are no parameters of the kernel

    source = ASTSource(kernel, signature, constexprs=constants)
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    assert compiled.metadata.shared <= SHARED_BYTES


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("n", [2, 27, 576, 4096, 4609])
def test_kernels_of_weights_compile(launches: list[str], n: int, dtype: torch.dtype) -> None:
    latitude = torch.zeros(8, n - 1, dtype=dtype)
    r = torch.zeros(8)

    weight = functional.compute_weight(latitude, r, torch.bfloat16)
    functional.compute_gradients(weight, latitude, r, True)

    assert launches == ["_forward_kernel", "_backward_kernel"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("channels", [1, 3, 64, 2048])
def test_kernels_of_channels_compile(
    launches: list[str], channels: int, dtype: torch.dtype
) -> None:
    from geoparam.kernels import channels_triton

    x = torch.zeros(1000, channels, dtype=dtype)

    channels_triton.add_row_(x, torch.zeros(channels))

    assert launches == ["_add_row"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("layers", [1, 3])
def test_kernels_of_rows_compile(launches: list[str], layers: int, dtype: torch.dtype) -> None:
    from geoparam.kernels.rows_triton import TritonRows

    w = [torch.zeros(4, 5, dtype=dtype) for _ in range(layers)]
    per_row = torch.zeros(4 * layers, dtype=dtype)
    rows = TritonRows([(4, 5)] * layers, w[0])

    rows.project(w, w, w, per_row, per_row)
    rows.measure(w, w, per_row, w)
    rows.combine(w, w, per_row, per_row)

    assert launches == ["_project", "_measure", "_combine"]
