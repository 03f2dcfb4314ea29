"""Which kernels compute with a tensor: Triton's on GPUs, plain torch elsewhere."""

import functools
import importlib.util
import os
from types import ModuleType
from typing import Literal

from torch import Tensor

from geoparam.kernels import weight

# auto: the fastest. torch: plain torch. triton: Triton's, or an error; for tests.
KERNELS = os.environ.get("GEOPARAM_KERNELS", "auto")
if KERNELS not in ("auto", "torch", "triton"):
    raise ValueError(f"GEOPARAM_KERNELS is auto, torch or triton; got {KERNELS!r}.")


def choose_kernels(x: Tensor) -> Literal["triton", "torch"]:
    """Return which kernels compute with this tensor."""
    if KERNELS == "triton":
        return "triton"
    if KERNELS == "auto" and x.is_cuda and _has_triton():
        return "triton"
    return "torch"


def weight_kernel(x: Tensor) -> ModuleType:
    """Return the module whose `forward` and `backward` compute weights of this tensor."""
    if choose_kernels(x) == "triton":
        from geoparam.kernels import weight_triton  # needs Triton

        return weight_triton
    return weight


@functools.cache
def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None
