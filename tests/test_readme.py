"""Every Python block of the README runs, in order, as a reader would type them."""

import re
from pathlib import Path

README = Path(__file__).parents[1] / "README.md"
BLOCKS = re.findall(r"^```python\n(.*?)^```", README.read_text("utf-8"), re.DOTALL | re.MULTILINE)


def test_python_blocks_run() -> None:
    namespace: dict[str, object] = {}
    for number, block in enumerate(BLOCKS, start=1):
        exec(compile(block, f"README.md, python block {number}", "exec"), namespace)
    assert BLOCKS
