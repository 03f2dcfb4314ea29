"""What pytest must not import: the Triton kernels, where there is no Triton."""

import importlib.util

collect_ignore_glob = (
    [] if importlib.util.find_spec("triton") else ["geoparam/kernels/*_triton.py"]
)
