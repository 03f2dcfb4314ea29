"""Every script in docs/training.md that names its launcher runs with two processes."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[2] / "docs" / "training.md"
SCRIPTS = {
    title: script
    for title, script in re.findall(
        r"^### (\w+)\n.*?^```python\n(.*?)^```", PAGE.read_text("utf-8"), re.DOTALL | re.MULTILINE
    )
    if re.match(r"# (torchrun|accelerate launch) ", script)
}
# torch 2.15 with gloo may abort in the interpreter's teardown (pytorch#190489): leave before it.
LEAVE = "\nimport os\n\nos._exit(0)\n"


@pytest.mark.parametrize(
    "title",
    [
        "Accelerate",
        *(pytest.param(t, marks=pytest.mark.slow) for t in ("DDP", "FSDP2", "Converted")),
    ],
)
def test_script_runs(title: str, tmp_path: Path) -> None:
    if title == "Accelerate":
        pytest.importorskip("accelerate")
    script = tmp_path / "train.py"
    script.write_text(SCRIPTS[title] + LEAVE, "utf-8")
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    result = subprocess.run(
        [*launcher, "--nproc-per-node=2", str(script)],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert result.returncode == 0, result.stderr
