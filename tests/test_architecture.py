"""Imports go one way, as docs/architecture.md says, and the laboratory uses public names alone."""

import ast
import importlib
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = ("geoparam", "geoparam_lab")
PAGE = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
ROOMS = re.findall(r"^\| `([\w.]+)` \|", PAGE, flags=re.MULTILINE)
FILES = sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts).removesuffix(".__init__")


MODULES = {module_name(path) for path in FILES}
LAB_FILES = [path for path in FILES if module_name(path).startswith("geoparam_lab")]


def package_of(module: str) -> str:
    return module.split(".")[0]


def find_room(module: str) -> str:
    """Return the longest name in the tables that a module's name begins with."""
    rooms = [room for room in ROOMS if is_inside(module, room)]
    return max(rooms, key=len, default="")


def is_inside(module: str, room: str) -> bool:
    return module == room or (room != "geoparam" and module.startswith(f"{room}."))


def find_imports(path: Path) -> Iterator[tuple[str, str]]:
    """Yield the module that each import of ours reads, and the name it takes from there."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if package_of(alias.name) in PACKAGES:
                    yield alias.name, ""
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            if package_of(node.module) in PACKAGES:
                for alias in node.names:
                    yield split_import(node.module, alias.name)


def split_import(module: str, name: str) -> tuple[str, str]:
    """Return the module that is read; what is imported may be a module itself."""
    full_name = f"{module}.{name}"
    if full_name in MODULES:
        return full_name, ""
    return module, name


@pytest.mark.parametrize("path", FILES, ids=module_name)
def test_imports_go_one_way(path: Path) -> None:
    module = module_name(path)
    if module == "geoparam_lab":
        return

    room = find_room(module)
    assert room, f"{module} has no row in docs/architecture.md"
    for imported, _ in find_imports(path):
        is_above = ROOMS.index(find_room(imported)) <= ROOMS.index(room)
        assert is_above, (
            f"{module} imports {imported}, which is below it in docs/architecture.md: a lower "
            "room knows the upper ones and not the other way round, so that each can be read "
            "alone."
        )


@pytest.mark.parametrize("path", LAB_FILES, ids=module_name)
def test_the_laboratory_uses_public_names(path: Path) -> None:
    for module, name in find_imports(path):
        if package_of(module) == "geoparam":
            assert is_public(module, name), (
                f"{module_name(path)} imports {module} {name}: the laboratory uses what a room of "
                "the library lists in __all__. If a user would need it, export it there."
            )


def is_public(module: str, name: str) -> bool:
    if module not in ROOMS:
        return False
    public_names = getattr(importlib.import_module(module), "__all__", ())
    return not name or name in public_names
