"""The width experiment: what is known of its numbers beforehand."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from geoparam_lab.experiments import width
from geoparam_lab.methods import mlp
from geoparam_lab.run_folder import Run, select_records

OPTIONS: dict[str, Any] = {"widths": (16, 64, 256), "seeds": 8}


def energy(rows: int = 50) -> tuple[np.ndarray, np.ndarray]:
    x = np.random.RandomState(0).randn(rows, 8)
    return x, 10 * np.abs(x).sum(1)


def run(folder: Path, **options: Any) -> Run:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(width.data_sets, "load", lambda name, data: energy())
        return width.run(folder, **(OPTIONS | options))


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return run(tmp_path_factory.mktemp("width") / "run")


def answer(run: Run, dataset: str, method: str, init: str) -> dict[str, Any]:
    fields = {"kind": "answer", "dataset": dataset, "method": method, "init": init}
    [found] = select_records(run.records(), **fields)
    return found


def test_every_network_has_a_record(finished: Run) -> None:
    kinds = [record["kind"] for record in finished.records()]
    assert kinds.count("start") == 2 * 4 * 3 * 8  # sets, variants, widths, seeds
    assert kinds.count("answer") == 2 * 4


@pytest.mark.parametrize("dataset", width.DATASETS)
@pytest.mark.parametrize(
    ("method", "init", "expected"),
    [("gmp", "sphere", 0), ("gmp", "glorot", -0.5), ("sp", "glorot", -0.5), ("sp", "he", 0)],
)
def test_activations_depend_on_the_width_as_the_formula_says(
    finished: Run, dataset: str, method: str, init: str, expected: float
) -> None:
    found = answer(finished, dataset, method, init)
    assert found["exponent_activation"] == pytest.approx(expected, abs=0.13)
    assert found["exponent_gradient_output"] == pytest.approx(expected, abs=0.13)


def test_the_codes_initialisation_starts_as_sp_with_glorot(finished: Run) -> None:
    def starts(method: str) -> list[tuple[float, float]]:
        own = select_records(finished.records(), kind="start", method=method, init="glorot")
        own.sort(key=lambda r: (r["dataset"], r["width"], r["seed"]))
        return [(r["activation"], r["output"]) for r in own]

    np.testing.assert_allclose(starts("gmp"), starts("sp"))


@pytest.mark.parametrize(("method", "init"), [("sp", "glorot"), ("sp", "he"), ("gmp", "sphere")])
def test_sizes_are_those_of_the_network(method: str, init: str) -> None:
    x = torch.randn(200, 8, dtype=torch.float64)
    y = x.sum(1)
    model = mlp(method, (8, 32, 1), seed=3, init=init)
    hidden = (model[0] if method == "gmp" else nn.Sequential(*model[:2]))(x)
    output = model(x).squeeze(-1)
    (output - y).abs().mean().backward()
    gradient = model[-1].weight.grad
    sizes = width.measure_start(mlp(method, (8, 32, 1), seed=3, init=init), x, y)
    assert math.isclose(sizes["activation"], hidden.pow(2).mean().sqrt().item())
    assert math.isclose(sizes["output"], output.pow(2).mean().sqrt().item())
    assert math.isclose(sizes["gradient_output"], gradient.pow(2).mean().sqrt().item())
    with torch.no_grad():
        for parameter in model.parameters():
            parameter -= 0.01 * parameter.grad.sign()
    change = (model(x).squeeze(-1) - output).pow(2).mean().sqrt().item()
    assert math.isclose(sizes["output_change"], change)
