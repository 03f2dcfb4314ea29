"""That Triton's compiler takes our kernels, on machines without a GPU.

Its interpreter, where their numbers are tested, takes more: Python as it is.
"""

import importlib.util
import os
from collections.abc import Callable

import pytest
import torch
from pooling_checks import SQUARES, STEM, WINDOWS
from torch import Tensor

from geoparam.ops import columns, implementation, intrinsic, pooling, shifted
from geoparam.ops.launch import Launch
from geoparam.ops.pooling import Window
from geoparam.ops.shifted import How

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs Triton"),
    pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="nothing is compiled"),
]
LAST = torch.channels_last
SHARED = 227 << 10  # bytes that a program may have there
TYPES = {
    torch.float64: "*fp64",
    torch.float32: "*fp32",
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
    torch.int64: "*i64",
    torch.uint8: "*u8",
}
dtypes = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=str)

dtypes_of_products = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Let a launch compile its kernel for an H100, and no more; record which."""
    seen: list[str] = []

    def launch(self: Launch, *tensors: Tensor) -> None:
        compile_for_gpu(self, tensors)
        seen.append(self.kernel.__name__)

    monkeypatch.setattr(Launch, "__call__", launch)
    monkeypatch.setattr(implementation, "KERNELS", "triton")
    return seen


def compile_for_gpu(launch: Launch, tensors: tuple[Tensor, ...]) -> None:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    signature = {}
    constants = {}
    given = [*[TYPES[x.dtype] for x in tensors], *launch.arguments]
    for parameter, value in zip(launch.kernel.params, given, strict=True):
        # Triton takes a 1 for a constant, too
        if parameter.is_constexpr or (type(value) is int and value == 1):
            constants[parameter.name] = value
        plain = value if isinstance(value, str) else "fp32" if isinstance(value, float) else "i32"
        signature[parameter.name] = "constexpr" if parameter.name in constants else plain
    source = ASTSource(launch.kernel, signature, constexprs=constants)
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=launch.options)
    assert compiled.metadata.shared <= SHARED


def numbers(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    x = torch.zeros(shape, dtype=dtype)
    return x.contiguous(memory_format=LAST) if x.ndim == 4 else x


@dtypes
def test_passes_over_activations(launches: list[str], dtype: torch.dtype) -> None:
    x, wide = numbers(4, 48, 9, 8, dtype=dtype), torch.promote_types(dtype, torch.float32)
    bias, scale, sums = numbers(48, dtype=dtype), numbers(48), numbers(48, dtype=wide)
    running = numbers(48), torch.zeros((), dtype=torch.long)
    for given in (x, x.contiguous()):
        columns.rectify(given, 1, bias, scale)
        columns.rectify(given, 1)
        columns.rectify_backward(given, given, 1, sums, scale, bias=bias)
        columns.rectify_backward(given, given, 1, None)
        columns.centre(given, 1, sums, 288, bias, running, 0.1)
    assert set(launches) == {"_forward_kernel", "_backward_kernel", "_centre_kernel"}


@pytest.mark.parametrize("window", WINDOWS, ids=str)
def test_pooling(launches: list[str], window: Window) -> None:
    kernels = pytest.importorskip("geoparam.ops.pooling_triton")
    x, scale = numbers(4, 48, 9, 8, dtype=torch.bfloat16), numbers(48)
    y, place, sums = pooling.pool(x, window)
    kernels.pool(x, window, scale)
    kernels.rectify(x, window, scale, scale)
    pooling.pool_backward(y, place, sums, window, (9, 8))
    kernels.rectify_backward(y, place, window, x, sums, scale, scale)
    assert launches == ["_forward_kernel"] * 3 + ["_backward_kernel"] * 2


@dtypes
@pytest.mark.parametrize("window", [SQUARES, STEM], ids=str)
def test_types_of_pooling(launches: list[str], window: Window, dtype: torch.dtype) -> None:
    kernels = pytest.importorskip("geoparam.ops.pooling_triton")
    x, scale = numbers(4, 48, 9, 8, dtype=dtype), numbers(48)
    y, place, sums = kernels.pool(x, window, scale)
    kernels.rectify_backward(y, place, window, x, None, scale, None)
    assert len(launches) == 2


@dtypes_of_products
@pytest.mark.parametrize("channels", [1, 3, 7])
def test_first_convolution(launches: list[str], channels: int, dtype: torch.dtype) -> None:
    kernels = pytest.importorskip("geoparam.ops.stem_triton")
    x, weight = numbers(4, channels, 9, 8, dtype=dtype), numbers(48, channels, 3, 3, dtype=dtype)
    sides, bias = ((2, 1), (1, 1), (1, 1)), numbers(48)
    z = kernels.forward(x, weight, (4, 48, 5, 8), *sides)
    kernels.backward(z, bias, x, z, bias, bias, (3, 3), *sides)
    kernels.backward(z, None, x, z, None, bias, (3, 3), *sides)
    assert launches == ["_forward_kernel"] + ["_backward_kernel"] * 2


def test_first_convolution_of_one_number(launches: list[str]) -> None:
    kernels = pytest.importorskip("geoparam.ops.stem_triton")
    x, bias = numbers(1, 2, 1, 1, dtype=torch.bfloat16), numbers(1)
    sides = ((1, 1), (0, 0), (1, 1))
    z = kernels.forward(x, x, (1, 1, 1, 1), *sides)
    kernels.backward(z, bias, x, z, bias, bias, (1, 1), *sides)
    assert launches == ["_forward_kernel", "_backward_kernel"]


@pytest.mark.parametrize("n", [2, 27, 576, 4609])
@pytest.mark.parametrize("coordinates", ["latitude", "unit"])
def test_weights(launches: list[str], coordinates: str, n: int) -> None:
    width = n - 1 if coordinates == "latitude" else n
    stored, r = numbers(8, width), numbers(8)
    module = implementation if coordinates == "latitude" else intrinsic
    weight = module.forward(stored, r, torch.bfloat16, (n,), False)
    given: tuple = (weight, stored, r, True) if coordinates == "latitude" else (weight, stored, r)
    module.backward(*given)
    assert len(launches) == 2


@pytest.mark.parametrize("inside", [True, False])
@pytest.mark.parametrize("coordinates", ["latitude", "unit"])
def test_weights_with_their_bias(launches: list[str], coordinates: str, inside: bool) -> None:
    how = How(coordinates, False, torch.bfloat16, (16, 3, 3), True, inside, 100, 0.1)
    stored = numbers(8, 143 if coordinates == "latitude" else 144)
    r, lam, total = numbers(8), numbers(8), numbers(16)
    running = numbers(16), torch.zeros((), dtype=torch.long)
    weight, bias = shifted.forward(stored, r, lam, total, running, how)
    shifted.backward(weight, numbers(5, 8), stored, r, lam, total, weight, how)
    assert len(launches) == 3


def test_means(launches: list[str]) -> None:
    kernels: Callable = pytest.importorskip("geoparam.ops.means_triton").mean_of_parts
    kernels(numbers(64, 48), 128, numbers(48), torch.zeros((), dtype=torch.long), 0.1)
    assert launches == ["_mean_kernel"]
