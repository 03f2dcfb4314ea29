"""Every Python block of the README and the guides runs, in order, as a reader would type them."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
GUIDES = "optimizer layers conversion training checkpoints analysis experiments".split()
PAGES = ("README.md", *(f"docs/{guide}.md" for guide in GUIDES))
LAUNCHED = "# torchrun ", "# accelerate launch "  # tests/distributed/test_recipes.py runs these


@pytest.mark.parametrize("page", PAGES)
def test_python_blocks_run(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    text = (ROOT / page).read_text("utf-8")
    blocks = re.findall(r"^```python\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    namespace: dict[str, object] = {"__name__": "__main__"}
    for number, block in enumerate(blocks, start=1):
        if block.startswith(LAUNCHED):
            continue
        for name in ("lightning", "transformers"):
            if f"import {name}\n" in block or f"from {name} import" in block:
                pytest.importorskip(name)
        exec(compile(block, f"{page}, python block {number}", "exec"), namespace)
    assert blocks
