"""The scripts of results/claims: what is known of each measurement beforehand."""

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


def make_regression() -> tuple[np.ndarray, np.ndarray]:
    x = np.random.RandomState(0).randn(60, 3)
    y = np.abs(x).sum(1)
    return x, (y - y.mean()) / y.std()


def make_classification() -> tuple[np.ndarray, np.ndarray]:
    x = np.random.RandomState(0).randn(60, 3)
    is_far = np.abs(x).sum(1) > 2.4
    return x, is_far.astype(float)


DATA = {"energy": make_regression(), "banana": make_classification()}


def make_case(
    method: str, size: float, lr: float | None = None, seed: int = 0, dataset: str = "energy"
) -> claim.Case:
    return claim.Case("part", dataset, method, size, lr, seed)


# --- equation 9 ---------------------------------------------------------------------------------


def find_covariance_errors(method: str) -> tuple[float, float]:
    """Return the errors at correlations 0.5 and 0.99."""
    cases = [make_case(method, correlation) for correlation in (0.5, 0.99)]
    weak, strong = covariance.measure(cases)
    return weak["error"], strong["error"]


def test_bn_is_wn_in_the_norm_of_the_covariance() -> None:
    weak, strong = find_covariance_errors("equation-9")

    assert weak < 1e-13
    assert strong < 1e-12


def test_bns_epsilon_matters_more_for_correlated_inputs() -> None:
    weak, strong = find_covariance_errors("epsilon")

    assert 1e-6 < weak < strong < 0.05


def test_bn_differs_more_from_wn_for_correlated_inputs() -> None:
    weak, strong = find_covariance_errors("wn")

    assert 0.1 < weak < strong


def test_inputs_have_the_correlation() -> None:
    x = claim.draw_correlated(0.9, rows=4000, features=3, seed=0)

    expected = np.where(np.eye(3), 1, 0.9)
    assert np.corrcoef(x.T.numpy()) == pytest.approx(expected, abs=0.02)
    assert x.mean(dim=0).abs().max() < 1e-14


# --- natural steps ------------------------------------------------------------------------------


def find_natural_errors(equation: str) -> tuple[float, float]:
    """Return the errors of a step at the rates 0.1 and 0.01."""
    cases = [make_case(equation, rate) for rate in (0.1, 0.01)]
    large_step, small_step = fisher.measure(cases)
    return large_step["error"], small_step["error"]


@pytest.mark.slow
def test_the_exponential_map_is_independent_of_coordinates() -> None:
    large_step, small_step = find_natural_errors("equation-28")

    assert large_step < 1e-7
    assert small_step < 1e-11


def test_a_first_order_step_depends_on_coordinates_in_second_order() -> None:
    large_step, small_step = find_natural_errors("equation-29")

    assert 0.01 < large_step < 0.2
    assert 3 < large_step / small_step < 20


def take_step(plain: nn.Linear, x: torch.Tensor, lr: float, **form: Any) -> torch.Tensor:
    """Convert a layer to one of its forms, and return its directions after a step of SGD."""
    layer = gp.GmPLinear.from_linear(plain, **form)
    optimizer = torch.optim.SGD(layer.parameters(), lr)
    errors = layer(x).relu() - 1
    loss = errors.square().sum(dim=1).mean()
    loss.backward()
    optimizer.step()
    return layer.direction.detach()


def find_largest_angle(lr: float, **form: Any) -> float:
    """Return how far a step ends from the intrinsic one, for units away from the poles."""
    torch.manual_seed(0)
    plain = nn.Linear(6, 32, dtype=torch.float64)
    x = torch.randn(64, 6, dtype=torch.float64)
    latitude = gp.GmPLinear.from_linear(plain).latitude.detach()
    is_away_from_poles = sphere.metric(latitude).amin(dim=1) > 0.01

    direction = take_step(plain, x, lr, **form)
    intrinsic = take_step(plain, x, lr, coordinates="intrinsic")
    angle = sphere.angle_between(direction, intrinsic)
    return float(angle[is_away_from_poles].max())


def test_a_natural_step_differs_from_an_intrinsic_one_in_second_order() -> None:
    ratio = find_largest_angle(0.02, natural=True) / find_largest_angle(0.01, natural=True)

    assert ratio == pytest.approx(4, rel=0.05)


def test_a_step_of_plain_angles_differs_from_an_intrinsic_one_in_first_order() -> None:
    ratio = find_largest_angle(0.02) / find_largest_angle(0.01)

    assert ratio == pytest.approx(2, rel=0.05)


def test_a_natural_step_is_closer_to_the_intrinsic_one_than_a_step_of_plain_angles() -> None:
    assert find_largest_angle(0.01, natural=True) < 0.05 * find_largest_angle(0.01)


# --- costs, shift, shell and products -----------------------------------------------------------


def test_costs_are_ratios_to_sp(monkeypatch: pytest.MonkeyPatch) -> None:
    ticks = iter(range(10**6))
    monkeypatch.setattr(cost.time, "process_time", lambda: next(ticks))

    records = cost.measure([make_case("sp", 4), make_case("gmp", 4)])

    assert records == [{"seconds": 1.0, "ratio": 1.0}] * 2


@pytest.mark.parametrize("method", ["wn+mbn", "gmp+mbn", "gmp+imn"])
def test_only_imn_centres_the_inputs_of_layers(method: str) -> None:
    cases = [make_case(method, layer, lr=0.01) for layer in (1, 2, 3)]

    _, *deeper_layers = shift.measure(cases, DATA, epochs=2)

    for record in deeper_layers:
        is_centred = record["offset"] < 1e-12 and record["drift"] < 1e-12
        assert is_centred == (method == "gmp+imn")


@pytest.mark.parametrize("method", ["wn+mbn", "gmp+mbn", "gmp+imn"])
def test_running_means_lag_behind_the_inputs(method: str) -> None:
    cases = [make_case(method, layer, lr=0.01) for layer in (1, 2, 3)]

    _, *deeper_layers = shift.measure(cases, DATA, epochs=2)

    assert all(record["offset_running"] > 0.05 for record in deeper_layers)


def test_before_training_boundaries_go_through_the_origin() -> None:
    [record] = shell.measure([make_case("gmp", 9, lr=0.1)], DATA, epochs=3)

    path = record["path"]
    assert path[0] == 0
    assert path[-1] == record["relative"] > 0
    assert record["epochs"][-1] == 3
    assert 0 <= record["on_shell"] <= 1


@pytest.mark.parametrize("seed", [0, 1])
def test_products_of_uniform_directions_do_not_vanish(seed: int) -> None:
    case = make_case("gmp:init=sphere", 256, lr=0.1, seed=seed)

    [record] = products.measure([case], DATA, epochs=2)

    assert 0.05 < record["smallest_start"] < 3
    assert record["negligible_start"] < 0.01
    assert record["sparsity_start"] == pytest.approx(0.5, abs=0.2)
    assert record["smallest_path"][-1] == record["smallest"] < record["smallest_start"]


# --- deep networks ------------------------------------------------------------------------------


def test_regions_of_a_network_by_hand() -> None:
    """One hidden layer on four points: a dead unit, one that is 1 off the middle, a flat point."""
    model = mlp("sp", (1, 2, 1))
    with torch.no_grad():
        model[0].weight.copy_(torch.tensor([[1.0], [1.0]]))
        model[0].bias.copy_(torch.tensor([-2.0, -9.0]))
    x = torch.tensor([[-1.0], [0.0], [2.0], [3.0]], dtype=torch.float64)
    radius = math.sqrt((4 + 1 + 1 + 4) / 4)  # around their mean 1

    regions = deep.measure_regions(model, x)

    assert regions["dead"] == 0.5
    assert regions["flattest"] == 0
    assert regions["distances"] == [pytest.approx(1 / radius)]  # the lower of two medians


@pytest.mark.parametrize("dataset", DATA)
def test_regions_change_by_training_alone(dataset: str) -> None:
    cases = [make_case("gmp", 2, lr=lr, dataset=dataset) for lr in (0.0, 0.1)]

    untrained, trained = deep.measure(cases, DATA, epochs=10)

    assert untrained["changes_late"] == 0 < trained["changes_late"]
    assert untrained["distance_early"] == untrained["distance_late"]


@pytest.mark.parametrize("dataset", DATA)
def test_deep_networks_have_all_quantities(dataset: str) -> None:
    case = make_case("gmp", 2, lr=0.1, dataset=dataset)

    [record] = deep.measure([case], DATA, epochs=10)

    assert set(deep.QUANTITIES) <= set(record)
    assert len(record["distances_late"]) == 2


# --- rank correlations --------------------------------------------------------------------------


def test_ranks_are_compared_within_groups() -> None:
    group = np.repeat(range(8), 10)
    split = np.tile(range(10), 8)
    x = np.random.RandomState(0).randn(80)
    # Opposed in each group; pooled they would go together.
    falling = -x + 100 * group
    rising = x + 100 * group

    correlation, p = rank_correlation(rising, falling, group.tolist(), split.tolist())

    assert correlation == pytest.approx(-1)
    assert p == 1 / (rank_correlations.PERMUTATIONS + 1)


def test_a_constant_is_uncorrelated() -> None:
    group = np.repeat(range(8), 10).tolist()
    split = np.tile(range(10), 8).tolist()
    x = np.random.RandomState(0).randn(80)

    assert rank_correlation(x, np.zeros(80), group, split) == (0.0, 1.0)


@pytest.mark.parametrize("spread", [0, 3], ids=["splits alike", "some splits are hard"])
def test_p_is_not_small_where_nothing_is_correlated(
    spread: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Effects of five splits on both quantities must not look like a correlation."""
    monkeypatch.setattr(rank_correlations, "PERMUTATIONS", 199)
    random = np.random.RandomState(1)
    group = [*range(12)] * 5
    split = np.repeat(range(5), 12)

    def draw() -> np.ndarray:
        return random.randn(60) + spread * random.randn(5)[split]

    p_values = []
    for _ in range(100):
        _, p = rank_correlation(draw(), draw(), group, split.tolist())
        p_values.append(p)

    is_small = np.array(p_values) < 0.1
    assert is_small.mean() < 0.2
    assert np.mean(p_values) > 0.4


def test_correlations_do_not_depend_on_the_order_of_records(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(rank_correlations, "PERMUTATIONS", 99)
    cases = [make_case("gmp", 9, lr, seed) for lr in (0.01, 0.1) for seed in range(4)]
    measured = zip(cases, shell.measure(cases, DATA, epochs=3), strict=True)
    records = [case._asdict() | values for case, values in measured]

    answers = shell.correlate_with_error(records)

    assert answers == shell.correlate_with_error(records[::-1])
    parts = [answer["part"] for answer in answers]
    assert parts == ["shell: all"] * 2 + ["shell: within"] * 2


def test_cases_that_share_a_task_differ_in_rate_seed_and_one_field() -> None:
    tasks = claim.make_tasks(
        "part",
        datasets=["energy"],
        methods=["sp", "gmp"],
        sizes=(1, 2),
        lrs=(0.1, 0.2),
        seeds=3,
        together="size",
    )

    assert [len(task) for task in tasks] == [2 * 2 * 3] * 2
    methods = [{case.method for case in task} for task in tasks]
    assert methods == [{"sp"}, {"gmp"}]
