"""Which kernels serve a tensor: Triton's on GPUs, those in C on CPUs, plain torch elsewhere."""

import functools
import importlib.util
import os
from types import ModuleType
from typing import Literal

from torch import Tensor

from geoparam.kernels import weight, weight_native

# auto: the fastest there is. torch: plain torch. triton, native: that one, or an error; for tests.
KERNELS = os.environ.get("GEOPARAM_KERNELS", "auto")
if KERNELS not in ("auto", "torch", "triton", "native"):
    raise ValueError(f"GEOPARAM_KERNELS is auto, torch, triton or native; got {KERNELS!r}.")


def choose_kernels(x: Tensor) -> Literal["triton", "native", "torch"]:
    """Return which kernels serve this tensor."""
    if KERNELS == "triton" or (KERNELS == "auto" and x.is_cuda and _has_triton()):
        return "triton"
    if x.is_cpu and (KERNELS == "native" or (KERNELS == "auto" and weight_native.is_available())):
        return "native"
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
