"""Checks of arguments at the edge: each raises a ValueError with the rule and what was got.

`warn_user` is for what is allowed and yet looks wrong.
"""

import math
import sys
import warnings
from numbers import Integral, Real
from types import FrameType
from typing import Any

import numpy as np
import torch
from torch import Tensor


def check_count(name: str, value: Any, least: int = 1) -> None:
    """Raise unless it is a whole number, `least` or more."""
    is_whole = isinstance(value, Integral) and not isinstance(value, bool)
    if not is_whole or value < least:
        raise ValueError(f"{name} is a whole number, {least} or more; got {_show(value)}.")


def check_flag(name: str, value: Any) -> None:
    """Raise unless it is True or False: a string "no" would count as True."""
    if not isinstance(value, bool | np.bool_):
        raise ValueError(f"{name} is True or False; got {_show(value)}.")


def check_rate(name: str, value: Any) -> None:
    """Raise unless it is a finite number, 0 or more, or a tensor with one."""
    is_number = isinstance(value, Real) and not isinstance(value, bool)
    if isinstance(value, Tensor):
        is_number = value.numel() == 1 and not value.is_complex()
    if not is_number or not 0 <= float(value) < math.inf:
        raise ValueError(f"{name} is a finite number, 0 or more; got {_show(value)}.")


def check_callable(name: str, value: Any, takes: str) -> None:
    """Raise unless it is None or a function."""
    if value is not None and not callable(value):
        raise ValueError(f"{name} is a function, {takes}; got {_show(value)}.")


def check_place(device: Any, dtype: Any) -> None:
    """Raise unless parameters can be made with this device and type."""
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise ValueError(f"dtype is a floating-point type of torch; got {_show(dtype)}.")
    if device is None:
        return
    try:
        torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise ValueError(f"device is one of torch's, as 'cuda:0'; got {_show(device)}.") from error


def warn_user(message: str) -> None:
    """Warn at the line that called us, whichever functions of torch are in between."""
    frame: FrameType | None = sys._getframe()
    level = 1
    while frame is not None and frame.f_back is not None:
        if frame.f_globals.get("__name__", "").partition(".")[0] not in ("geoparam", "torch"):
            break
        frame = frame.f_back
        level += 1
    warnings.warn(message, stacklevel=level)


def _show(value: Any) -> str:
    """Return a value in a few words: a tensor by its shape."""
    if isinstance(value, Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    text = repr(value)
    return text if len(text) <= 60 else f"a {type(value).__name__}"
