"""Training in a stack equals training each model alone, under Keras's rules."""

import copy
from dataclasses import replace
from typing import Any, Literal

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch_rules import train_alone

from geoparam.analysis import boundaries
from geoparam_lab import methods
from geoparam_lab.training.stacks import batched, stack_motion, stacked
from geoparam_lab.training.stacks.keras_rules import PlateauRule
from geoparam_lab.training.stacks.packing import pack, unpack_, views
from geoparam_lab.training.stacks.stacked import Protocol, Result

VARIANTS = [
    *[(name, {}) for name in methods.METHODS],
    ("gmp+imn", {"imn": "input"}),
    ("gmp", {"init": "sphere"}),
    ("wn+mbn", {"mbn": "before"}),
]
IDS = ["-".join((name, *options.values())) for name, options in VARIANTS]
each_variant = pytest.mark.parametrize(("name", "options"), VARIANTS, ids=IDS)
each_kind = pytest.mark.parametrize("kind", ["running", "batch"])

# Short, with a patience that lowers rates within it.
MSE = Protocol(metric=stacked.squared_error, epochs=25, patience=3)


def networks(
    name: str, widths: tuple[int, ...] = (3, 12, 1), size: int = 3, **options: str
) -> Any:
    return [methods.mlp(name, widths, seed=seed, **options) for seed in range(size)]


def regression(size: int = 3, rows: int = 40, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Inputs (S, N, 3) and targets (S, N) with a kink, different for each member."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(size, rows, 3, generator=generator, dtype=torch.float64)
    y = (2 * x[..., 0] - x[..., 1]).abs() + x[..., 2]
    return x, y


def evaluation_data(size: int = 3) -> tuple[Tensor, Tensor]:
    return regression(size, rows=15, seed=1)


def run(
    name: str, protocol: Protocol = MSE, size: int = 3, lr: Any = 0.03, **arguments: Any
) -> Result:
    """Train a stack on the regression; `lr` is one rate for all members, or a list."""
    data = arguments.pop("data", regression(size))
    models = arguments.pop("models", networks(name, size=size))
    if protocol.metric is not None:
        arguments.setdefault("evaluation", evaluation_data(size))

    rates = lr if isinstance(lr, list) else [lr] * len(models)
    return stacked.train(models, data, rates, protocol, **arguments)


def floating_state(model: nn.Sequential) -> dict[str, Tensor]:
    """The state without BatchNorm's counts of batches."""
    state = model.state_dict()
    return {key: value for key, value in state.items() if value.is_floating_point()}


def assert_close(actual: Any, expected: Any) -> None:
    np.testing.assert_allclose(actual, expected, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("name", ["gmp", "intrinsic", "sp"])
def test_directions_have_the_rate_of_their_fan_in(name: str) -> None:
    start = networks(name)
    one_epoch = replace(MSE, epochs=1)
    by_fan_in = replace(MSE, epochs=1, angle_lr="fan_in")

    def first_layer_step(protocol: Protocol) -> dict[str, Tensor]:
        result = run(name, protocol, models=start, snapshots=[1])
        layers, _ = views(result.snapshots[1] - pack(start), start[0])
        return layers[0]

    plain, scaled = first_layer_step(one_epoch), first_layer_step(by_fan_in)

    for key, step in plain.items():
        if key == "unit":  # pulled back to length 1 after the step
            assert scaled[key].norm() < 0.7 * step.norm()
        else:
            factor = 3**-0.5 if key == "latitude" else 1
            torch.testing.assert_close(scaled[key], factor * step)


@each_variant
def test_a_stack_trains_as_plain_torch_does(name: str, options: dict[str, str]) -> None:
    """Each member trains as if it were alone, though others leave the stack before it."""
    variant = IDS.index("-".join((name, *options.values())))
    protocol = replace(
        MSE,
        epochs=25,
        patience=2,
        stop_patience=5,
        batch_size=None if variant % 2 else 16,
        decay=30 * methods.get(name).decay,  # large enough to be seen in 25 epochs
    )
    models = networks(name, **options)
    lrs, seeds = [0.3, 0.01, 0.1], [5, 6, 7]
    x, y = regression()
    x_eval, y_eval = evaluation_data()

    result = run(name, protocol, models=models, lr=lrs, seeds=seeds)

    for i, model in enumerate(models):
        data, evaluation = (x[i], y[i]), (x_eval[i], y_eval[i])
        losses, metrics, rates, best = train_alone(
            model, data, evaluation, lrs[i], protocol, seed=seeds[i]
        )
        end = result.epochs[i]
        assert_close(result.losses[:end, i], losses)
        assert_close(result.metrics[:end, i], metrics)
        assert_close(result.rates[:end, i], rates)
        for key, value in floating_state(result.model(i)).items():
            torch.testing.assert_close(value, best.state_dict()[key], rtol=1e-10, atol=1e-10)

    # The case is worth its time: members stop at different epochs, and a rate has fallen.
    assert len(set(result.epochs)) > 1
    assert (np.nanmin(result.rates, axis=0) < result.rates[0]).any()


def test_the_models_passed_in_are_not_trained() -> None:
    models = networks("bn")
    before = pack(models)

    run("bn", models=models)

    assert torch.equal(pack(models), before)


@each_variant
@pytest.mark.parametrize(
    ("widths", "training"), [((1, 5, 2), True), ((3, 6, 5, 1), False), ((2, 4, 7, 3), True)]
)
def test_the_batched_pass_equals_that_of_each_module(
    name: str, options: dict[str, str], widths: tuple[int, ...], training: bool
) -> None:
    models = networks(name, widths, **options)
    for model in models:
        perturb_(model.train(training))
    state = pack(models)
    tensors, parameters = views(state, models[0])
    x = torch.randn(3, 9, widths[0], dtype=torch.float64)

    out = batched.forward(models[0], tensors, x, training)
    gradients = torch.autograd.grad(out.square().sum(), parameters, materialize_grads=True)

    for i, model in enumerate(models):
        expected = model(x[i])
        torch.testing.assert_close(out[i], expected, rtol=1e-11, atol=1e-11)

        loss = expected.square().sum()
        expected_gradients = torch.autograd.grad(loss, list(model.parameters()))
        for gradient, expected_gradient in zip(gradients, expected_gradients, strict=True):
            torch.testing.assert_close(gradient[i], expected_gradient, rtol=1e-10, atol=1e-10)

        unpacked = copy.deepcopy(model)
        unpack_(unpacked, state[i])
        unpacked_state = unpacked.state_dict()
        for key, value in floating_state(model).items():  # running statistics among them
            torch.testing.assert_close(unpacked_state[key], value, rtol=1e-11, atol=1e-11)


@torch.no_grad()
def perturb_(model: nn.Sequential) -> None:
    """Move parameters and running statistics away from where they start."""
    for key, tensor in floating_state(model).items():
        if "running" in key:
            tensor.add_(torch.rand_like(tensor))
        elif "unit" not in key and "sign" not in key:
            tensor.add_(0.3 * torch.randn_like(tensor))


diverging = pytest.mark.parametrize(
    ("name", "broken"), [("bn", "data"), ("gmp", "evaluation")], ids=["data", "evaluation"]
)


def inputs_with_nan(broken: str) -> dict[str, tuple[Tensor, Tensor]]:
    """Data and evaluation data, of which one has NaN for the targets of member 1."""
    inputs = {"data": regression(), "evaluation": evaluation_data()}
    _, y = inputs[broken]
    y[1] = torch.nan
    return inputs


@diverging
def test_a_member_that_diverges_leaves_the_others_alone(name: str, broken: str) -> None:
    healthy = run(name)

    result = run(name, **inputs_with_nan(broken))

    assert result.outcomes == [healthy.outcomes[0], "diverged", healthy.outcomes[2]]
    assert_close(result.losses[:, [0, 2]], healthy.losses[:, [0, 2]])


@diverging
def test_a_member_that_diverges_at_once_has_its_first_weights_and_no_metric(
    name: str, broken: str
) -> None:
    models = networks(name)

    result = run(name, models=models, **inputs_with_nan(broken))

    assert result.epochs[1] == 1
    assert result.best_epoch[1] == -1
    assert np.isnan(result.best_metric[1])
    assert np.isnan(result.losses[1:, 1]).all()
    assert torch.equal(pack([result.model(1)]), pack([models[1]]))


def test_a_member_that_diverges_keeps_its_best_weights() -> None:
    result = run("sp", replace(MSE, epochs=60), lr=[0.01, 1e160, 0.01])

    assert result.outcomes[1] == "diverged"
    for parameter in result.model(1).parameters():
        assert parameter.isfinite().all()


@pytest.mark.parametrize(("stop", "epochs"), [(None, 7), (4, 5)])
def test_a_member_stops_after_its_patience(stop: int | None, epochs: int) -> None:
    protocol = replace(MSE, epochs=50, stop_patience=stop)

    result = run("sp", protocol, lr=[0.0, 0.03, 0.0])

    assert result.outcomes[0] == "patience"
    assert result.epochs[[0, 2]].tolist() == [epochs, epochs]
    assert result.best_epoch[0] == 0
    assert np.isnan(result.metrics[epochs:, 0]).all()
    assert not np.isnan(result.rates[:epochs]).any()


def test_progress_receives_the_epoch_and_the_number_of_members_left() -> None:
    calls = []
    protocol = replace(MSE, epochs=50, stop_patience=4)

    def progress(epoch: int, members: int) -> None:
        calls.append((epoch, members))

    run("sp", protocol, lr=[0.0, 0.03, 0.0], progress=progress)

    assert calls[:5] == [(1, 3), (2, 3), (3, 3), (4, 3), (5, 1)]


@pytest.mark.parametrize(
    ("drop", "last_rate"), [(0.0, 0.1), (9e-5, 0.1), (1.1e-4, 1.0)], ids=["0", "9e-5", "1.1e-4"]
)
@pytest.mark.parametrize("higher_is_better", [False, True])
def test_a_rate_falls_when_the_patience_is_reached(
    drop: float, last_rate: float, higher_is_better: bool
) -> None:
    sign = -1 if higher_is_better else 1
    rule = PlateauRule(np.ones(2), 3, 100, higher_is_better=higher_is_better)

    rates = []
    for value in (1.0, 1.0 - drop, 1.0 - drop, 1.0 - drop):
        rule(sign * np.array([value, value]))
        rates.append(rule.rates[0])

    assert rates == pytest.approx([1.0, 1.0, 1.0, last_rate])


def test_a_loss_may_take_several_outputs() -> None:
    x, _ = regression()
    classes = (x[..., 0] > 0).long() + (x[..., 1] > 0).long()

    def cross_entropy(output: Tensor, target: Tensor) -> Tensor:
        losses = nn.functional.cross_entropy(output.mT, target, reduction="none")
        return losses.mean(1)

    protocol = Protocol(cross_entropy, epochs=100)
    result = run("gmp", protocol, models=networks("gmp", (3, 12, 3)), data=(x, classes))
    prediction = result.predict(x)

    assert prediction.shape == (3, 40, 3)
    accuracy = (prediction.argmax(-1) == classes.numpy()).mean(1)
    assert (accuracy > 0.9).all()


@torch.no_grad()
def place(
    state: Tensor, model: nn.Sequential, x: Tensor, kind: str
) -> tuple[np.ndarray, np.ndarray]:
    """Return directions and locations of all members' units."""
    tensors, _ = views(state, model)
    normal, offset = batched.boundaries(model, tensors, x, kind)
    length = normal.norm(dim=-1, keepdim=True)
    direction = normal / length
    location = -offset.unsqueeze(-1) / length * direction
    return direction.numpy(), location.numpy()


@each_variant
@each_kind
def test_boundaries_are_those_of_the_model(
    name: str, options: dict[str, str], kind: Literal["running", "batch"]
) -> None:
    x, _ = regression()
    result = run(name, models=networks(name, **options))
    before = result.states.clone()

    directions, locations = place(result.states, result.model(0), x, kind)

    for i in range(3):
        expected = boundaries(result.model(i), x[i], statistics=kind)["0"]
        assert_close(directions[i], expected.direction)
        assert_close(locations[i], expected.location)
    assert torch.equal(result.states, before)  # running statistics are unchanged


@each_kind
@pytest.mark.parametrize("name", ["sp", "bn", "wn+mbn", "ln", "gmp", "intrinsic+imn"])
def test_motion_is_the_largest_over_units(
    name: str, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stack_motion, "BLOCK", 5)  # the number of records measured at once
    protocol = replace(MSE, epochs=12, stop_patience=3)
    x, _ = regression()

    result = run(name, protocol, lr=[0.0, 0.1, 0.1], track=True, snapshots=range(13))
    motion = result.motion if kind == "batch" else result.running_motion

    model = result.model(0)
    places = [place(state, model, x, kind) for state in result.snapshots.values()]
    directions = np.stack([direction for direction, _ in places])
    locations = np.stack([location for _, location in places])
    moves = np.linalg.norm(np.diff(locations, axis=0), axis=-1).max(-1)
    cosines = (directions[1:] * directions[:-1]).sum(-1)
    turns = np.degrees(np.arccos(cosines.clip(-1, 1))).max(-1)
    for i, end in enumerate(result.epochs):
        last = end - 1  # the snapshot after the end has the best weights
        np.testing.assert_allclose(motion.displacement[:last, i], moves[:last, i], atol=1e-12)
        np.testing.assert_allclose(motion.rotation[:last, i], turns[:last, i], atol=1e-5)
        assert np.isnan(motion.rotation[end:, i]).all()


def test_motion_is_measured_on_request() -> None:
    assert run("sp", replace(MSE, epochs=1)).motion is None


def test_a_unit_without_a_boundary_does_not_move() -> None:
    models = networks("sp")
    with torch.no_grad():
        models[0][0].weight[0] = 0

    motion = run("sp", models=models, lr=0.0, track=True).motion

    assert not motion.displacement[0].any()
    assert not motion.rotation[0].any()


def test_snapshots_are_the_states_after_the_named_epochs() -> None:
    models = networks("bn")
    x, y = evaluation_data()
    protocol = replace(MSE, stop_patience=100)

    result = run("bn", protocol, models=models, snapshots=[0, 1, 7, 25, 99])

    assert list(result.snapshots) == [0, 1, 7, 25]
    assert torch.equal(result.snapshots[0], pack(models))
    for epoch in (1, 7, 25):
        tensors, _ = views(result.snapshots[epoch], models[0])
        output = batched.forward(models[0], tensors, x, training=False).squeeze(-1)
        metric = stacked.squared_error(output, y).detach()
        assert_close(metric, result.metrics[epoch - 1])


def test_a_snapshot_has_the_best_weights_of_a_member_that_has_stopped() -> None:
    protocol = replace(MSE, epochs=50, stop_patience=4)

    result = run("sp", protocol, lr=[0.0, 0.03, 0.0], snapshots=[9])

    assert result.epochs[[0, 2]].tolist() == [5, 5]
    assert torch.equal(result.snapshots[9][[0, 2]], result.states[[0, 2]])
    assert result.epochs[1] > 9
    assert not torch.equal(result.snapshots[9][1], result.states[1])


@pytest.mark.parametrize("name", ["bn", "gmp+ln", "natural"])
def test_float32_follows_float64(name: str) -> None:
    protocol = replace(MSE, epochs=5)
    narrow = [model.float() for model in networks(name)]

    result = run(name, protocol, models=narrow)

    assert {p.dtype for p in result.model(0).parameters()} == {torch.float32}
    expected = run(name, protocol)
    np.testing.assert_allclose(result.losses, expected.losses, rtol=1e-3)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"models": [*networks("sp"), *networks("gmp")]}, "all of one method and shape"),
        ({"models": [nn.Sequential(nn.Linear(3, 1), nn.GELU())] * 3}, "got GELU"),
        ({"lr": [0.1, 0.2]}, "lr and seeds need one value for each of 3 models"),
        ({"seeds": [1]}, "lr and seeds need one value for each of 3 models"),
        ({"data": regression(size=2)}, "or both with 3 members first; got shapes"),
        ({"protocol": Protocol(), "evaluation": regression()}, "only the data"),
        ({"evaluation": None}, "only the metric"),
    ],
)
def test_inputs_that_cannot_be_trained_are_refused(
    arguments: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        run("sp", **arguments)


def test_bn_needs_two_rows_in_every_batch() -> None:
    with pytest.raises(ValueError, match="at least 2 rows"):
        run("bn", replace(MSE, batch_size=39))
