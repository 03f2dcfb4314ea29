"""What the kernels of a first convolution must satisfy, stated once; see `passes`."""

from types import ModuleType

import pytest
import torch
import torch.nn.functional as F
from passes import near, wide
from torch import Tensor

from geoparam.ops import columns, rectified, stem

LAST = torch.channels_last
# images; units, channels and kernel; stride, padding, dilation
CASES = [
    ((4, 3, 8, 8), (6, 3, 3, 3), (1, 1), (1, 1), (1, 1)),
    ((3, 1, 9, 7), (5, 1, 2, 3), (2, 1), (0, 2), (1, 2)),
    ((2, 3, 10, 9), (130, 3, 3, 3), (2, 2), (1, 1), (1, 1)),
    ((5, 7, 6, 6), (16, 7, 3, 3), (1, 1), (2, 2), (2, 2)),
    ((1, 2, 1, 1), (1, 2, 1, 1), (1, 1), (0, 0), (1, 1)),
]
cases = pytest.mark.parametrize("case", CASES, ids=str)


def numbers(shape: tuple, dtype: torch.dtype, device: str) -> Tensor:
    x = torch.randn(shape, device=device).to(dtype)
    return x.contiguous(memory_format=LAST) if x.ndim == 4 else x


def layouts(x: Tensor) -> list[Tensor]:
    """Return images with their channels last, first, and with gaps between them."""
    gaps = torch.zeros((*x.shape[:3], 2 * x.shape[3]), dtype=x.dtype, device=x.device)[..., ::2]
    return [x, x.contiguous(), gaps.copy_(x)]


def check(kernels: ModuleType, case: tuple, dtype: torch.dtype, device: str) -> None:
    shape, size, *sides = case
    x, weight = numbers(shape, dtype, device), numbers(size, dtype, device)
    exact = F.conv2d(x.double(), weight.double(), None, *sides)
    for images in layouts(x):
        near(kernels.forward(images, weight, tuple(exact.shape), *sides), exact, dtype)
    z = exact.to(dtype).contiguous(memory_format=LAST)
    grad = numbers(tuple(z.shape), dtype, device)
    scale, bias, shift = (numbers(size[:1], wide(dtype), device) for _ in range(3))
    for b, s in ((bias, shift), (None, shift), (bias, None), (None, None)):
        whole = grad.double() if s is None else grad.double() + columns.along(s, z, 1)
        given = [None if t is None else t.double() for t in (z, b, scale)]
        by_z, *sums = rectified._rectified_backward(whole, *given)
        by_weight = stem._by_weight(by_z, x.double(), weight.double(), *sides)
        for images in layouts(x):
            found = kernels.backward(grad, s, images, z, b, scale, size[2:], *sides)
            for one, expected in zip(found, (by_weight, *sums), strict=True):
                near(one, expected, dtype)
