"""The script on widths: what is known of its numbers beforehand."""

import math
from typing import Any

import claim
import numpy as np
import pytest
import torch
import width
from claim import make_tasks
from torch import nn

from geoparam_lab.methods import mlp

Record = dict[str, Any]


@pytest.fixture(scope="module")
def records() -> list[Record]:
    x = np.random.RandomState(0).randn(50, 8)
    sets = {"energy": (x, 10 * np.abs(x).sum(1))}
    found = []
    tasks = make_tasks("width", ["levy", "energy"], width.VARIANTS, (16, 64, 256), seeds=8)
    for cases in tasks:
        measured = zip(cases, width.measure(cases, sets), strict=True)
        found += [case._asdict() | values for case, values in measured]
    return found


@pytest.mark.parametrize("dataset", ["levy", "energy"])
@pytest.mark.parametrize(
    ("variant", "expected"),
    [("gmp:init=sphere", 0), ("gmp:init=glorot", -0.5), ("sp:init=glorot", -0.5)]
    + [("sp:init=he", 0)],
)
def test_activations_depend_on_the_width_as_the_formula_says(
    records: list[Record], dataset: str, variant: str, expected: float
) -> None:
    found = claim.find_exponents("exponents", width.EXPONENTS, records)
    answers = {(answer["dataset"], answer["method"]): answer for answer in found}
    exponents = answers[dataset, variant]
    assert exponents["exponent_activation"] == pytest.approx(expected, abs=0.13)
    assert exponents["exponent_gradient_output"] == pytest.approx(expected, abs=0.13)


def test_the_codes_initialisation_starts_as_sp_with_glorot(records: list[Record]) -> None:
    def starts(variant: str) -> list[tuple[float, float]]:
        return [(r["activation"], r["output"]) for r in records if r["method"] == variant]

    np.testing.assert_allclose(starts("gmp:init=glorot"), starts("sp:init=glorot"))


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
