"""Whether C code can be compiled here; the optimizer's row kernel asks."""

import functools
import logging

from geoparam.kernels import loader

_log = logging.getLogger("geoparam")


@functools.cache
def is_available() -> bool:
    """Whether the C code could be compiled and loaded."""
    try:
        loader.load("rows")
    except loader.ERRORS as e:
        _log.info("no C kernel on this machine, plain torch instead: %s", e)
        return False
    return True
