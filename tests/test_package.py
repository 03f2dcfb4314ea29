"""The installed package: its metadata, its types, and what importing it costs."""

import importlib.metadata
import importlib.resources
import inspect
import re
import subprocess
import sys
import typing
from pathlib import Path

import pytest

import geoparam
from geoparam_lab.cli import EXTRAS

ROOT = Path(__file__).parents[1]
OPTIONAL = ("matplotlib", "rich", "safetensors", "sklearn", "torchvision", "transformers", "typer")


def test_version_is_the_metadata_version() -> None:
    assert geoparam.__version__ == importlib.metadata.version("geoparam")


def test_version_is_written_once_and_cited() -> None:
    pyproject, citation, changelog = (
        (ROOT / name).read_text("utf-8")
        for name in ("pyproject.toml", "CITATION.cff", "CHANGELOG.md")
    )
    assert 'dynamic = ["version"]' in pyproject
    assert f"\nversion: {geoparam.__version__}\n" in citation
    assert f"\n## {geoparam.__version__}\n" in changelog


def test_workflow_has_the_pairs_of_make_test_versions() -> None:
    pairs = re.compile(r'"(3\.\d+/\d+\.\d+\.\d+)"')
    script = (ROOT / "tests" / "versions.py").read_text("utf-8")
    workflow = (ROOT / ".github" / "workflows" / "tests.yml").read_text("utf-8")
    assert pairs.findall(workflow) == pairs.findall(script) != []


def test_a_release_is_tested_and_its_tag_compared_before_it_is_published() -> None:
    workflow = (ROOT / ".github" / "workflows" / "release.yml").read_text("utf-8")
    steps = ["GITHUB_REF_NAME#v", "make test", "make dist", "pypi-publish"]
    places = [workflow.find(step) for step in steps]
    assert -1 not in places and places == sorted(places)


def test_actions_are_pinned_by_commit() -> None:
    for workflow in (ROOT / ".github" / "workflows").glob("*.yml"):
        for action in re.findall(r"uses: (\S+)", workflow.read_text("utf-8")):
            assert re.fullmatch(r"[\w/-]+@[0-9a-f]{40}", action), f"{workflow.name}: {action}"


def test_depends_on_torch_and_numpy_alone() -> None:
    requires = importlib.metadata.requires("geoparam") or []
    assert sorted(r for r in requires if "extra" not in r) == ["numpy", "torch>=2.9"]


def test_ships_its_types() -> None:
    assert importlib.resources.files("geoparam").joinpath("py.typed").is_file()


@pytest.mark.parametrize("name", geoparam.__all__)
def test_string_options_are_literals(name: str) -> None:
    public = getattr(geoparam, name)
    hints = typing.get_type_hints(public.__init__ if inspect.isclass(public) else public)
    options = inspect.signature(public).parameters.values()
    loose = [o.name for o in options if isinstance(o.default, str) and hints[o.name] is str]
    assert loose == []


@pytest.fixture(scope="module")
def imported() -> set[str]:
    code = "import geoparam, sys; print(*sys.modules)"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return set(run.stdout.split())


@pytest.mark.parametrize("name", (*OPTIONAL, "geoparam.kernels.weight_triton", "geoparam_lab"))
def test_import_leaves_out(name: str, imported: set[str]) -> None:
    assert name not in imported


def test_plots_are_imported_on_use() -> None:
    pytest.importorskip("matplotlib")
    code = "import geoparam, sys; assert 'matplotlib' not in sys.modules; geoparam.plots.INK"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_packages_of_the_command_line_are_named_where_they_are_missing() -> None:
    requires = importlib.metadata.requires("geoparam") or []
    for extra in ("cli", "plots"):
        own = [r.split(";")[0].strip() for r in requires if re.search(f"extra == .{extra}.", r)]
        assert sorted(own) == sorted(EXTRAS[extra])
