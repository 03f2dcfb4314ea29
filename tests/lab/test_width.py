"""The script on widths: what is known of its numbers beforehand."""

import copy
from typing import Any

import claim
import numpy as np
import pytest
import torch
import width
from claim import make_tasks
from torch import Tensor

from geoparam_lab.methods import mlp
from geoparam_lab.run_folder import select_records

Record = dict[str, Any]


@pytest.fixture(scope="module")
def records() -> list[Record]:
    x = np.random.RandomState(0).randn(50, 8)
    sets = {"energy": (x, 10 * np.abs(x).sum(1))}
    tasks = make_tasks("width", ["levy", "energy"], width.VARIANTS, (16, 64, 256), seeds=8)

    measured = []
    for cases in tasks:
        for case, values in zip(cases, width.measure(cases, sets), strict=True):
            measured.append(case._asdict() | values)
    return measured


@pytest.mark.parametrize("dataset", ["levy", "energy"])
@pytest.mark.parametrize(
    ("variant", "expected"),
    [
        ("gmp:init=sphere", 0),
        ("gmp:init=glorot", -0.5),
        ("sp:init=glorot", -0.5),
        ("sp:init=he", 0),
    ],
)
def test_activations_depend_on_the_width_as_the_formula_says(
    records: list[Record], dataset: str, variant: str, expected: float
) -> None:
    answers = claim.find_exponents("exponents", width.EXPONENTS, records)

    [answer] = select_records(answers, dataset=dataset, method=variant)
    assert answer["exponent_activation"] == pytest.approx(expected, abs=0.13)
    assert answer["exponent_gradient_output"] == pytest.approx(expected, abs=0.13)


@pytest.mark.parametrize("size", ["activation", "output"])
def test_the_codes_initialisation_starts_as_sp_with_glorot(
    records: list[Record], size: str
) -> None:
    gmp = [record[size] for record in select_records(records, method="gmp:init=glorot")]
    sp = [record[size] for record in select_records(records, method="sp:init=glorot")]

    np.testing.assert_allclose(gmp, sp)


def root_mean_square(values: Tensor) -> float:
    return values.square().mean().sqrt().item()


@pytest.mark.parametrize(("method", "init"), [("sp", "glorot"), ("sp", "he"), ("gmp", "sphere")])
def test_sizes_are_those_of_the_network(method: str, init: str) -> None:
    x = torch.randn(200, 8, dtype=torch.float64)
    y = x.sum(1)
    model = mlp(method, (8, 32, 1), seed=3, init=init)

    sizes = width.measure_start(copy.deepcopy(model), x, y)

    output = model(x).squeeze(-1)
    (output - y).abs().mean().backward()
    hidden_layer = model[:-1]  # with its activation
    assert sizes["activation"] == pytest.approx(root_mean_square(hidden_layer(x)), rel=1e-9)
    assert sizes["output"] == pytest.approx(root_mean_square(output), rel=1e-9)
    gradient = model[-1].weight.grad
    assert sizes["gradient_output"] == pytest.approx(root_mean_square(gradient), rel=1e-9)

    with torch.no_grad():
        for parameter in model.parameters():
            parameter -= 0.01 * parameter.grad.sign()
    change = model(x).squeeze(-1) - output
    assert sizes["output_change"] == pytest.approx(root_mean_square(change), rel=1e-9)
