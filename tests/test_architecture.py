"""Imports go one way, as docs/architecture.md says, and the laboratory uses public names alone."""

import ast
import importlib
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
ROOMS = re.findall(r"^\| `([\w.]+)` \|", PAGE, flags=re.MULTILINE)
FILES = sorted(p for name in ("geoparam", "geoparam_lab") for p in (ROOT / name).rglob("*.py"))


def module_name(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


MODULES = {module_name(path) for path in FILES}


def room(module: str) -> str:
    """The longest name in the tables that a module's name begins with."""
    own = [r for r in ROOMS if module == r or (r != "geoparam" and module.startswith(f"{r}."))]
    return max(own, key=len, default="")


def imports(path: Path) -> Iterator[tuple[str, str]]:
    """Yield the module that each import of ours reads, and the name it takes from there."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (
                (a.name, "")
                for a in node.names
                if a.name.split(".")[0] in ("geoparam", "geoparam_lab")
            )
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            if node.module.split(".")[0] in ("geoparam", "geoparam_lab"):
                for alias in node.names:
                    full = f"{node.module}.{alias.name}"
                    yield (full, "") if full in MODULES else (node.module, alias.name)


@pytest.mark.parametrize("path", FILES, ids=module_name)
def test_imports_go_one_way(path: Path) -> None:
    own = module_name(path)
    if own in ("geoparam_lab",):
        return
    assert room(own), f"{own} has no row in docs/architecture.md"
    for other, _ in imports(path):
        is_above = ROOMS.index(room(other)) <= ROOMS.index(room(own))
        assert is_above, (
            f"{own} imports {other}, which is below it in docs/architecture.md: a lower room "
            "knows the upper ones and not the other way round, so that each can be read alone."
        )


@pytest.mark.parametrize(
    "path", [p for p in FILES if module_name(p).startswith("geoparam_lab")], ids=module_name
)
def test_the_laboratory_uses_public_names(path: Path) -> None:
    for module, name in imports(path):
        if module.split(".")[0] == "geoparam":
            public = importlib.import_module(module)
            is_public = module in ROOMS and (not name or name in getattr(public, "__all__", ()))
            assert is_public, (
                f"{module_name(path)} imports {module} {name}: the laboratory uses what a room of "
                "the library lists in __all__. If a user would need it, export it there."
            )
