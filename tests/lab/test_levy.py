"""Levy regression: the data, the protocol, what a run leaves behind and how it is resumed."""

import shutil
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from numpy.testing import assert_allclose, assert_array_equal
from run_folders import curves_of, lines
from torch import nn
from torch_rules import keras_adam, train_alone

from geoparam_lab import methods
from geoparam_lab.data.synthetic import levy, levy_regression
from geoparam_lab.experiments import levy as experiment
from geoparam_lab.experiments import toys
from geoparam_lab.experiments.toys import Network
from geoparam_lab.run_folder import Record, Run
from geoparam_lab.training import tasks
from geoparam_lab.training.stacks.snapshots import Film
from geoparam_lab.training.stacks.stacked import Protocol, Result

WIDTHS = (1, 100, 1)
METHODS = ("sp", "wn", "bn", "gmp")
RATES = (0.01, 0.1)
CLOSE = {"rtol": 1e-8, "atol": 1e-8}


# --- data ---------------------------------------------------------------------------------------


def test_levy_has_the_values_computed_by_hand() -> None:
    x = np.array([-3.0, 1.0, 5.0, 2.0])  # w = 0, 1, 2 and 1.25

    assert_allclose(levy(x), [1, 0, 1, 0.625], atol=1e-12)


def test_seed_0_gives_the_papers_points() -> None:
    np.random.seed(0)
    x = np.random.uniform(low=-10.0, high=10.0, size=[50, 1])
    noise = np.random.normal(loc=0.0, scale=0.1, size=[50, 1])
    y = levy(x) + noise

    data = levy_regression(seed=0)

    assert_array_equal(data.x_train, x)
    assert_allclose(data.y_train, y.squeeze(-1))


def test_test_grid_has_step_a_tenth_and_no_noise() -> None:
    data = levy_regression()

    grid = data.x_test[:, 0]
    assert_allclose(grid, np.arange(-100, 101) / 10)
    assert_array_equal(data.y_test, levy(grid))


# --- the protocol -------------------------------------------------------------------------------


def test_keras_adam_follows_the_formula_of_keras() -> None:
    start = torch.tensor([1.0, -2.0, 1e-9], dtype=torch.float64)
    base_gradient = torch.tensor([1.0, -1e-7, 1e-9], dtype=torch.float64)
    weight = nn.Parameter(start.clone())
    optimizer = keras_adam(nn.ParameterList([weight]), lr=0.1)

    expected = start.clone()
    m = torch.zeros_like(start)
    v = torch.zeros_like(start)
    for t in range(1, 6):
        gradient = t * base_gradient
        m = 0.9 * m + 0.1 * gradient
        v = 0.999 * v + 0.001 * gradient**2
        alpha = 0.1 * (1 - 0.999**t) ** 0.5 / (1 - 0.9**t)
        expected -= alpha * m / (v.sqrt() + 1e-7)

        weight.grad = gradient
        optimizer.step()

        torch.testing.assert_close(weight.detach(), expected, rtol=1e-12, atol=0)


def train(method: str, lr: float, epochs: int, patience: int = 40) -> tuple[Result, Film]:
    """Train a stack of two networks, with seeds 0 and 1."""
    problem = experiment.make_problem(levy_regression(), epochs, patience)
    networks = [Network(method, lr, seed) for seed in (0, 1)]
    with tasks.limit_threads(1):
        return toys.train(problem, networks)


def predict(model: nn.Module, x: np.ndarray) -> np.ndarray:
    with torch.no_grad():
        outputs = model(torch.from_numpy(x))
    return outputs.squeeze(-1).numpy()


class Stack(NamedTuple):
    """Two networks of one method, trained together."""

    method: str
    result: Result
    film: Film


class Single(NamedTuple):
    """One of the stack's networks, trained by torch alone."""

    seed: int
    losses: np.ndarray
    locations: np.ndarray  # of the units, before each epoch
    best: nn.Module


@pytest.fixture(scope="module", params=["sp", "gmp"])
def stack(request: pytest.FixtureRequest) -> Stack:
    method = request.param
    lr = methods.METHODS[method].lr
    result, film = train(method, lr, epochs=150, patience=8)
    return Stack(method, result, film)


@pytest.fixture(scope="module", params=[0, 1])
def single(request: pytest.FixtureRequest, stack: Stack) -> Single:
    seed = request.param
    data = levy_regression()
    points = (torch.from_numpy(data.x_train), torch.from_numpy(data.y_train))
    rules = Protocol(epochs=150, patience=8, stop_patience=16)
    locations: list[np.ndarray] = []

    def record_locations(model: nn.Sequential) -> None:
        hidden = model[0]
        crossing = -hidden.bias / hidden.weight.squeeze(-1)
        locations.append(crossing.detach().numpy())

    losses, _, _, best = train_alone(
        methods.mlp(stack.method, WIDTHS, seed=seed),
        points,
        evaluation=None,
        lr=methods.METHODS[stack.method].lr,
        protocol=rules,
        watch=record_locations,
    )
    return Single(seed, np.array(losses), np.stack(locations), best)


def test_a_stack_has_the_losses_of_a_single_network(stack: Stack, single: Single) -> None:
    stack_losses = stack.result.losses[: len(single.losses), single.seed]

    assert_allclose(stack_losses, single.losses, **CLOSE)


def test_the_compared_runs_include_a_cut_of_the_rate(stack: Stack, single: Single) -> None:
    initial_rate = methods.METHODS[stack.method].lr

    assert np.nanmin(stack.result.rates[:, single.seed]) < initial_rate


def test_a_stack_has_the_best_epoch_of_a_single_network(stack: Stack, single: Single) -> None:
    assert stack.result.best_epoch[single.seed] == np.argmin(single.losses)


def test_a_stack_trains_as_many_epochs_as_a_single_network(stack: Stack, single: Single) -> None:
    assert stack.result.epochs[single.seed] == len(single.losses)


def test_a_film_ends_with_the_best_fit_of_a_single_network(stack: Stack, single: Single) -> None:
    x = levy_regression().x_test

    fits = stack.film.predict(x)[single.seed]

    assert_allclose(fits[-1], predict(single.best, x))


def test_a_film_shows_the_locations_of_a_single_network(stack: Stack, single: Single) -> None:
    direction, distance = stack.film.boundaries(levy_regression().x_train)
    locations = -distance * direction[..., 0]
    steps, frames = stack.film.until(len(single.losses))

    before_the_last = frames[:-1]  # the last frame has the best weights
    expected = single.locations[steps[:-1]]
    assert_allclose(locations[single.seed, before_the_last], expected, **CLOSE)


def test_a_stack_has_the_moves_of_a_single_network(stack: Stack, single: Single) -> None:
    steps = np.diff(single.locations, axis=0)
    expected = np.abs(steps).max(axis=1)

    moves = stack.result.motion.displacement[: len(expected), single.seed]

    assert_allclose(moves, expected, **CLOSE)


def test_training_stops_1000_epochs_after_the_best() -> None:
    result, film = train("sp", lr=1e-30, epochs=1500, patience=experiment.PATIENCE)

    assert result.best_epoch.tolist() == [0, 0]
    assert result.epochs.tolist() == [1001, 1001]
    assert film.epochs[-1] == 1001


def test_the_film_begins_before_training_and_ends_with_the_best_weights() -> None:
    x = levy_regression().x_test
    untrained = methods.mlp("bn", WIDTHS, seed=1).eval()

    result, film = train("bn", lr=0.1, epochs=60, patience=5)

    fits = film.predict(x)[1]
    assert_allclose(fits[0], predict(untrained, x), atol=1e-12)
    assert_allclose(fits[-1], result.predict(x)[1], atol=1e-12)


# --- what a run leaves --------------------------------------------------------------------------


def run_briefly(folder: Path, **changes: Any) -> Run:
    """Run the experiment with two seeds and at most 40 epochs."""
    options = {"seeds": 2, "epochs": 40, "patience": 10, "jobs": 1}
    return experiment.run(folder, **{**options, **changes})


def key_of(record: Record) -> tuple[str, float, int]:
    return record["method"], record["lr"], record["seed"]


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return run_briefly(tmp_path_factory.mktemp("levy") / "run")


def test_a_run_has_a_record_for_each_method_rate_and_seed(finished: Run) -> None:
    keys = [key_of(record) for record in finished.records()]

    assert len(keys) == len(METHODS) * len(RATES) * 2
    assert len(set(keys)) == len(keys)


def test_records_say_how_a_network_was_trained_and_how_it_moved(finished: Run) -> None:
    fields = {"test_rmse", "largest_move", "largest_rotation", "first_cut", "units_in_view"}
    for record in finished.records():
        assert fields <= set(record)
        assert record["outcome"] == "finished"
        assert record["init"] == "glorot"
        assert record["best_epoch"] < record["epochs"] <= 40


def test_only_gmp_never_moves_a_unit_by_1(finished: Run) -> None:
    records = finished.records()
    moves = [record["largest_move"] for record in records]
    gmp_moves = [record["largest_move"] for record in records if record["method"] == "gmp"]

    assert max(gmp_moves) < 1 < max(moves)


def test_records_have_the_test_error_of_the_best_weights(finished: Run) -> None:
    truth = levy_regression().y_test
    for record in finished.records():
        fit = curves_of(finished, record)["prediction"][-1]
        rmse = np.sqrt(np.mean((fit - truth) ** 2))
        assert record["test_rmse"] == pytest.approx(rmse, rel=1e-5)


def test_records_have_the_lowest_training_loss(finished: Run) -> None:
    for record in finished.records():
        losses = curves_of(finished, record)["loss"]
        assert record["train_mae"] == pytest.approx(losses.min(), rel=1e-5)


@pytest.mark.parametrize("percent", [50, 90, 99, 100])
def test_records_have_quantiles_of_the_moves_before_the_first_cut(
    percent: int, finished: Run
) -> None:
    for record in finished.records():
        first_cut = record["first_cut"]  # None where the rate was never cut
        moves = curves_of(finished, record)["moves"][:first_cut].astype(float)
        expected = np.quantile(moves, percent / 100)
        assert record[f"move_{percent}"] == pytest.approx(expected, rel=1e-4)


def test_records_have_the_largest_move_of_all(finished: Run) -> None:
    for record in finished.records():
        if record["method"] == "bn":
            continue  # its record also counts the moves under running statistics
        moves = curves_of(finished, record)["moves"]
        assert record["largest_move"] == pytest.approx(moves.max(), rel=1e-5)


def test_curves_have_a_value_for_every_epoch(finished: Run) -> None:
    for record in finished.records():
        curves = curves_of(finished, record)
        assert len(curves["loss"]) == record["epochs"]
        assert len(curves["moves"]) == record["epochs"]
        assert curves["steps"][-1] == record["epochs"]


@pytest.fixture(scope="module")
def drawn(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A run with three seeds on two draws of the points: seed 2 has those of seed 0."""
    folder = tmp_path_factory.mktemp("draws") / "run"
    rates = [0.003, 0.01, 0.03, 0.1]
    return run_briefly(folder, methods=["sp"], lrs=rates, seeds=3, draws=2)


def test_draw_0_has_the_papers_points(drawn: Run, finished: Run) -> None:
    name = Network("sp", 0.01, 0).name

    losses = drawn.curves(name)["loss"]

    assert_allclose(losses, finished.curves(name)["loss"], rtol=1e-5)


@pytest.mark.parametrize(("seed", "draw"), [(1, 1), (2, 0)])
def test_each_seed_trains_on_its_draw(seed: int, draw: int, drawn: Run) -> None:
    points = levy_regression(draw)
    untrained = methods.mlp("sp", WIDTHS, seed=seed)
    first_loss = np.abs(predict(untrained, points.x_train) - points.y_train).mean()

    losses = drawn.curves(Network("sp", 0.1, seed).name)["loss"]

    assert losses[0] == pytest.approx(first_loss, rel=1e-5)


def test_several_draws_have_no_slider(drawn: Run) -> None:
    assert not (drawn.folder / "curves" / "slider_levy.npz").exists()


def test_results_over_rates_have_a_caption(drawn: Run) -> None:
    caption = (drawn.folder / "figures" / "rates.txt").read_text()

    assert "within 10 % of the best" in caption
    assert "SP" in caption


# --- slider, figures and sentences --------------------------------------------------------------


def test_the_slider_has_every_method(finished: Run) -> None:
    slider = finished.curves("slider_levy")

    assert slider["kind"] == "levy"
    assert slider["methods"].tolist() == ["SP", "WN", "BN", "GmP"]


def test_the_slider_has_one_time_axis(finished: Run) -> None:
    steps = finished.curves("slider_levy")["steps"]

    assert steps[0] == 0
    assert (np.diff(steps) > 0).all()


def test_the_slider_has_a_frame_of_every_method_at_each_step(finished: Run) -> None:
    slider = finished.curves("slider_levy")
    frames = (2, len(METHODS), len(slider["steps"]))  # of two seeds

    assert slider["x"].shape == slider["y"].shape == (50,)
    assert slider["grid"].shape == slider["truth"].shape == (201,)
    assert slider["prediction"].shape == (*frames, 201)
    assert slider["locations"].shape == (*frames, 100)
    assert slider["loss"].shape == slider["moves"].shape == frames


@pytest.mark.parametrize("name", ["loss", "moves"])
def test_the_slider_has_finite_curves(name: str, finished: Run) -> None:
    assert np.isfinite(finished.curves("slider_levy")[name]).all()


@pytest.fixture(scope="module")
def seven_seeds(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """More seeds than the slider shows, trained for three epochs."""
    folder = tmp_path_factory.mktemp("seeds") / "run"
    return run_briefly(folder, methods=["sp", "gmp"], lrs=[0.1], epochs=3, seeds=7)


@pytest.mark.parametrize(("row", "method"), [(0, "sp"), (1, "gmp")])
def test_figures_show_the_seed_with_the_median_error(
    row: int, method: str, seven_seeds: Run
) -> None:
    records = toys.find_compared(seven_seeds, method)
    median = np.median([record["test_rmse"] for record in records])
    [seed] = [record["seed"] for record in records if record["test_rmse"] == median]
    curves = seven_seeds.curves(Network(method, 0.1, seed).name)

    shown = toys.load_medians(seven_seeds, "test_rmse")[row]

    assert (shown.method, shown.result) == (method, median)
    assert_array_equal(shown.curves["prediction"], curves["prediction"])


@pytest.mark.parametrize(("row", "method"), [(0, "sp"), (1, "gmp")])
def test_the_slider_shows_the_first_seed(row: int, method: str, seven_seeds: Run) -> None:
    slider = seven_seeds.curves("slider_levy")
    seed = int(slider["seeds"][0])
    curves = seven_seeds.curves(Network(method, 0.1, seed).name)

    final_frame = slider["prediction"][0, row, -1]

    assert_array_equal(final_frame, curves["prediction"][-1])


def test_the_slider_shows_some_of_many_seeds(seven_seeds: Run) -> None:
    slider = seven_seeds.curves("slider_levy")

    assert len(slider["seeds"]) == toys.SHOWN
    assert slider["rate"] == 0.1


def test_the_finding_has_the_mean_error_of_gmp(finished: Run) -> None:
    errors = [record["test_rmse"] for record in toys.find_compared(finished, "gmp")]

    finding = experiment.EXPERIMENT.finding(finished)

    assert "all methods at rate 0.1" in finding
    assert f"GmP {np.mean(errors):.3f} ± " in finding


def test_the_limits_of_a_short_run_are_stated(finished: Run) -> None:
    seeds = len(toys.find_compared(finished, "gmp"))

    assert "cut short" in experiment.EXPERIMENT.describe_limits(finished)
    assert f"of {seeds} seeds" in experiment.EXPERIMENT.limits(finished)


@pytest.mark.parametrize("name", ["figure2c", "figure2d-g"])
def test_figures_are_drawn_with_captions(name: str, finished: Run) -> None:
    path = finished.folder / "figures" / f"{name}.png"

    assert path.read_bytes().startswith(b"\x89PNG")
    assert len(path.with_suffix(".txt").read_text()) > 40


# --- resumed, extended and diverging runs -------------------------------------------------------


def keep_lines(path: Path, count: int) -> None:
    """Cut a file after its first lines, within the next one, as a kill may leave it."""
    written = path.read_text().splitlines(keepends=True)
    path.write_text("".join(written[:count]) + written[count][:20])


def test_a_killed_run_resumes_to_the_same_numbers(
    finished: Run, tmp_path: Path, undrawn: None
) -> None:
    folder = shutil.copytree(finished.folder, tmp_path / "run")
    keep_lines(folder / "metrics.jsonl", count=3)

    resumed = run_briefly(folder, resume=True)

    assert lines(resumed) == lines(finished)
    for name in finished.curve_names():
        curves = resumed.curves(name)
        for key, array in finished.curves(name).items():
            assert_array_equal(curves[key], array)


def test_more_seeds_and_methods_are_added_to_what_is_there(
    finished: Run, tmp_path: Path, undrawn: None
) -> None:
    folder = shutil.copytree(finished.folder, tmp_path / "run")
    known = lines(finished)

    extended = run_briefly(folder, seeds=3, methods=["sp", "intrinsic"], resume=True)

    added = [record for record in lines(extended) if record not in known]
    assert {(record["method"], record["seed"]) for record in added} == {
        ("sp", 2),
        ("intrinsic", 0),
        ("intrinsic", 1),
        ("intrinsic", 2),
    }
    assert len(extended.records()) == len(finished.records()) + len(added)


@pytest.mark.slow
def test_several_processes_give_the_same_numbers(tmp_path: Path, undrawn: None) -> None:
    options: dict[str, Any] = {"methods": ["sp", "gmp"], "lrs": [0.1], "epochs": 20}

    one_process = run_briefly(tmp_path / "one", **options, jobs=1)
    two_processes = run_briefly(tmp_path / "two", **options, jobs=2)

    assert lines(one_process) == lines(two_processes)


def test_a_run_that_diverges_is_recorded_and_drawn(tmp_path: Path) -> None:
    run = run_briefly(tmp_path / "run", methods=["sp", "gmp"], lrs=[0.1, 1e300], epochs=5, seeds=1)

    records = run.records()
    assert [record["outcome"] for record in records] == ["finished", "diverged"] * 2
    diverged = [record for record in records if record["outcome"] == "diverged"]
    assert all(record["epochs"] < 5 for record in diverged)


@pytest.mark.slow
def test_full_protocol_reproduces_the_reference(tmp_path: Path) -> None:
    """Twenty seeds gave SP 1.166 +- 0.008, and 13 of 20 below 0.6 under GmP (results/LOG.md)."""
    run = experiment.run(tmp_path / "run", methods=["sp", "gmp"], seeds=5)
    records = run.records()

    def find_errors(method: str, lr: float) -> list[float]:
        chosen = [r for r in records if r["method"] == method and r["lr"] == lr]
        return [record["test_rmse"] for record in chosen]

    gmp_moves = [record["largest_move"] for record in records if record["method"] == "gmp"]
    assert np.mean(find_errors("sp", 0.01)) == pytest.approx(1.104, abs=0.15)
    assert min(find_errors("gmp", 0.1)) == pytest.approx(0.496, abs=0.15)
    assert max(gmp_moves) < 1
