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
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
OPTIONAL = ("matplotlib", "rich", "safetensors", "sklearn", "torchvision", "transformers", "typer")


def read(path: str) -> str:
    return (ROOT / path).read_text("utf-8")


def test_version_is_the_metadata_version() -> None:
    assert geoparam.__version__ == importlib.metadata.version("geoparam")


def test_version_is_written_once_and_cited() -> None:
    version = geoparam.__version__

    assert 'dynamic = ["version"]' in read("pyproject.toml")
    assert f"\nversion: {version}\n" in read("CITATION.cff")
    assert f"\n## {version}\n" in read("CHANGELOG.md")


def test_workflow_has_the_pairs_of_make_test_versions() -> None:
    pattern = re.compile(r'"(3\.\d+/\d+\.\d+\.\d+)"')

    pairs = pattern.findall(read("tests/versions.py"))

    assert pairs
    assert pattern.findall(read(".github/workflows/tests.yml")) == pairs


def test_a_release_is_tested_and_its_tag_compared_before_it_is_published() -> None:
    workflow = read(".github/workflows/release.yml")
    steps = ["GITHUB_REF_NAME#v", "make test", "make dist", "pypi-publish"]

    positions = [workflow.index(step) for step in steps]

    assert positions == sorted(positions)


@pytest.mark.parametrize("workflow", WORKFLOWS, ids=lambda path: path.name)
def test_actions_are_pinned_by_commit(workflow: Path) -> None:
    for action in re.findall(r"uses: (\S+)", workflow.read_text("utf-8")):
        assert re.fullmatch(r"[\w/-]+@[0-9a-f]{40}", action)


def list_requirements() -> list[str]:
    return importlib.metadata.requires("geoparam") or []


def test_depends_on_torch_and_numpy_alone() -> None:
    required = [line for line in list_requirements() if "extra" not in line]

    assert sorted(required) == ["numpy", "torch>=2.9"]


def test_ships_its_types() -> None:
    assert importlib.resources.files("geoparam").joinpath("py.typed").is_file()


@pytest.mark.parametrize("name", geoparam.__all__)
def test_string_options_are_literals(name: str) -> None:
    public = getattr(geoparam, name)
    hints = typing.get_type_hints(public.__init__ if inspect.isclass(public) else public)

    for option in inspect.signature(public).parameters.values():
        if isinstance(option.default, str):
            assert hints[option.name] is not str, option.name


@pytest.fixture(scope="module")
def imported() -> set[str]:
    """Return the modules that are there after an import of geoparam in a new process."""
    code = "import geoparam, sys; print(*sys.modules)"
    output = subprocess.check_output([sys.executable, "-c", code], text=True)
    return set(output.split())


@pytest.mark.parametrize("name", (*OPTIONAL, "geoparam.kernels.weight_triton", "geoparam_lab"))
def test_import_leaves_out(name: str, imported: set[str]) -> None:
    assert name not in imported


def test_plots_are_imported_on_use() -> None:
    pytest.importorskip("matplotlib")
    code = "import geoparam, sys; assert 'matplotlib' not in sys.modules; geoparam.plots.INK"

    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("extra", ["cli", "plots"])
def test_the_command_line_knows_the_packages_of_each_extra(extra: str) -> None:
    lines = [line for line in list_requirements() if re.search(f"extra == .{extra}.", line)]
    packages = [line.split(";")[0].strip() for line in lines]

    assert sorted(packages) == sorted(EXTRAS[extra])
