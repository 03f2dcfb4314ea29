"""The scripts of results/claims: what is known of each measurement beforehand."""

import functools
import math
from typing import Any

import claim
import cost
import covariance
import deep
import fisher
import numpy as np
import products
import pytest
import rank_correlations
import shell
import shift
import torch
from rank_correlations import rank_correlation
from torch import nn

import geoparam as gp
from geoparam import sphere
from geoparam_lab.methods import mlp


def points(name: str = "", data: object = None) -> tuple[np.ndarray, np.ndarray]:
    x = np.random.RandomState(0).randn(60, 3)
    y = np.abs(x).sum(1)
    return x, (y > 2.4).astype(float) if name == "banana" else (y - y.mean()) / y.std()


DATA = {name: points(name) for name in ("energy", "banana")}
Case = functools.partial(claim.Case, "part", "energy")


def test_bn_is_wn_in_the_norm_of_the_covariance() -> None:
    cases = [Case(m, c, None, 0) for c in (0.5, 0.99) for m in ("equation-9", "epsilon", "wn")]
    errors = [record["error"] for record in covariance.measure(cases)]
    assert errors[0] < 1e-13 and errors[3] < 1e-12
    assert 1e-6 < errors[1] < errors[4] < 0.05 and 0.1 < errors[2] < errors[5]


def test_inputs_have_the_correlation() -> None:
    x = claim.draw_correlated(0.9, 4000, 3, seed=0)
    assert np.corrcoef(x.T.numpy()) == pytest.approx(np.where(np.eye(3), 1, 0.9), abs=0.02)
    assert x.mean(dim=0).abs().max() < 1e-14


def test_natural_steps_are_independent_of_coordinates_by_the_exponential_map_alone() -> None:
    sizes, equations = (0.1, 0.01), ("equation-28", "equation-29")
    cases = [Case(equation, rate, None, 0) for equation in equations for rate in sizes]
    exact, exact_small, first, first_small = (r["error"] for r in fisher.measure(cases))
    assert exact < 1e-7 and exact_small < 1e-11
    assert 0.01 < first < 0.2 and 3 < first / first_small < 20  # of second order in the step


def test_costs_are_ratios_to_sp(monkeypatch: pytest.MonkeyPatch) -> None:
    ticks = iter(range(10**6))
    monkeypatch.setattr(cost.time, "process_time", lambda: next(ticks))
    cases = [Case(method, 4, None, 0) for method in ("sp", "gmp")]
    found = cost.measure(cases)
    assert found == [{"seconds": 1.0, "ratio": 1.0}] * 2


def test_a_natural_step_is_an_intrinsic_one_to_first_order() -> None:
    torch.manual_seed(0)
    plain, x = nn.Linear(6, 32, dtype=torch.float64), torch.randn(64, 6, dtype=torch.float64)

    def step(lr: float, **form: Any) -> torch.Tensor:
        layer = gp.GmPLinear.from_linear(plain, **form)
        optimizer = torch.optim.SGD(layer.parameters(), lr)
        (layer(x).relu() - 1).square().sum(dim=1).mean().backward()
        optimizer.step()
        return layer.direction.detach()

    latitude = gp.GmPLinear.from_linear(plain).latitude.detach()
    unbounded = sphere.metric(latitude).amin(dim=1) > 0.01

    def differ(lr: float, **form: Any) -> float:
        angle = sphere.angle_between(step(lr, **form), step(lr, coordinates="intrinsic"))
        return float(angle[unbounded].max())

    assert differ(0.02, natural=True) / differ(0.01, natural=True) == pytest.approx(4, rel=0.05)
    assert differ(0.02) / differ(0.01) == pytest.approx(2, rel=0.05)  # plain angles differ at once
    assert differ(0.01, natural=True) < 0.05 * differ(0.01)


@pytest.mark.parametrize("method", ["wn+mbn", "gmp+mbn", "gmp+imn"])
def test_only_imn_centres_the_inputs_of_layers(method: str) -> None:
    cases = [Case(method, layer, 0.01, 0) for layer in (1, 2, 3)]
    _, *deeper = shift.measure(cases, DATA, epochs=2)
    centred = [record["offset"] < 1e-12 and record["drift"] < 1e-12 for record in deeper]
    assert centred == [method == "gmp+imn"] * 2
    assert all(record["offset_running"] > 0.05 for record in deeper)  # which lag behind


def test_before_training_boundaries_go_through_the_origin() -> None:
    [found] = shell.measure([Case("gmp", 9, 0.1, 0)], DATA, epochs=3)
    assert found["path"][0] == 0 and found["path"][-1] == found["relative"] > 0
    assert found["epochs"][-1] == 3 and 0 <= found["on_shell"] <= 1


def test_products_of_uniform_directions_do_not_vanish() -> None:
    cases = [Case("gmp:init=sphere", 256, 0.1, seed) for seed in (0, 1)]
    for found in products.measure(cases, DATA, epochs=2):
        assert 0.05 < found["smallest_start"] < 3 and found["negligible_start"] < 0.01
        assert found["sparsity_start"] == pytest.approx(0.5, abs=0.2)
        assert found["smallest_path"][-1] == found["smallest"] < found["smallest_start"]


def test_a_network_by_hand() -> None:
    """One hidden layer on four points: a dead unit, one that is 1 off the middle, a flat point."""
    model = mlp("sp", (1, 2, 1))
    with torch.no_grad():
        model[0].weight.copy_(torch.tensor([[1.0], [1.0]]))
        model[0].bias.copy_(torch.tensor([-2.0, -9.0]))
    x = torch.tensor([[-1.0], [0.0], [2.0], [3.0]], dtype=torch.float64)  # the middle is 1
    radius = math.sqrt((4 + 1 + 1 + 4) / 4)
    found = deep.measure_regions(model, x)
    assert found["dead"] == 0.5 and found["flattest"] == 0
    assert found["distances"] == [pytest.approx(1 / radius)]  # the lower of two medians


@pytest.mark.parametrize("dataset", DATA)
def test_deep_networks_have_all_quantities(dataset: str) -> None:
    cases = [Case("gmp", 2, lr, 0)._replace(dataset=dataset) for lr in (0.0, 0.1)]
    still, moved = deep.measure(cases, DATA, epochs=10)
    assert still["changes_late"] == 0 < moved["changes_late"]
    assert still["distance_early"] == still["distance_late"]
    assert set(deep.QUANTITIES) <= set(moved) and len(moved["distances_late"]) == 2


def test_ranks_are_compared_within_groups() -> None:
    groups, splits = np.repeat(range(8), 10), np.tile(range(10), 8).tolist()
    x = np.random.RandomState(0).randn(80)
    opposed = x + 100 * groups, -x + 100 * groups  # pooled they would go together
    correlation, p = rank_correlation(*opposed, groups.tolist(), splits)
    assert correlation == pytest.approx(-1) and p == 1 / (rank_correlations.PERMUTATIONS + 1)
    assert rank_correlation(x, np.zeros(80), groups.tolist(), splits) == (0.0, 1.0)


@pytest.mark.parametrize("hard", [0, 3], ids=["splits alike", "some splits are hard"])
def test_p_is_not_small_where_nothing_goes_together(
    hard: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Effects of the split in both quantities, in five splits, would else look like a relation."""
    monkeypatch.setattr(rank_correlations, "PERMUTATIONS", 199)
    random, groups, splits = np.random.RandomState(1), [*range(12)] * 5, np.repeat(range(5), 12)
    p = []
    for _ in range(100):
        x, y = (random.randn(60) + hard * random.randn(5)[splits] for _ in range(2))
        p.append(rank_correlation(x, y, groups, splits.tolist())[1])
    assert np.mean(np.array(p) < 0.1) < 0.2 and np.mean(p) > 0.4


def test_correlations_do_not_depend_on_the_order_of_records(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(rank_correlations, "PERMUTATIONS", 99)
    cases = [Case("gmp", 9, lr, seed) for lr in (0.01, 0.1) for seed in range(4)]
    measured = zip(cases, shell.measure(cases, DATA, epochs=3), strict=True)
    records = [case._asdict() | values for case, values in measured]
    answers = shell.correlate_with_error(records)
    assert answers == shell.correlate_with_error(records[::-1])
    assert [a["part"] for a in answers] == ["shell: all"] * 2 + ["shell: within"] * 2


def test_cases_that_share_a_task_differ_in_rate_seed_and_one_field() -> None:
    tasks = claim.make_tasks("a", ["x"], ["sp", "gmp"], (1, 2), (0.1, 0.2), 3, together="size")
    assert [len(task) for task in tasks] == [2 * 2 * 3] * 2
    assert [{case.method for case in task} for task in tasks] == [{"sp"}, {"gmp"}]
