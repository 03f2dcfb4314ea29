"""Which kernel serves a tensor: Triton's on GPUs, the one in C on CPUs, plain torch elsewhere."""

import functools
import importlib.util
import os
from types import ModuleType

from torch import Tensor

from geoparam.kernels import weight, weight_native

# auto: the fastest there is. torch: plain torch. triton, native: that one, or an error; for tests.
KERNELS = os.environ.get("GEOPARAM_KERNELS", "auto")
if KERNELS not in ("auto", "torch", "triton", "native"):
    raise ValueError(f"GEOPARAM_KERNELS is auto, torch, triton or native; got {KERNELS!r}.")


def uses_triton(x: Tensor) -> bool:
    """Return whether Triton's kernels serve this tensor."""
    return KERNELS == "triton" or (KERNELS == "auto" and x.is_cuda and _has_triton())


def weight_kernel(x: Tensor) -> ModuleType:
    """Return the module whose `forward` and `backward` make weights of this tensor."""
    if uses_triton(x):
        from geoparam.kernels import weight_triton  # needs Triton

        return weight_triton
    if x.is_cpu and (KERNELS == "native" or (KERNELS == "auto" and weight_native.available())):
        return weight_native
    return weight


@functools.cache
def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None
