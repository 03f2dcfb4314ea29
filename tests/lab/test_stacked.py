"""Training in a stack: it is what training each model alone would be, under Keras's rules."""

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

VARIANTS = [(name, {}) for name in methods.METHODS]
VARIANTS += [("gmp+imn", {"imn": "input"}), ("gmp", {"init": "sphere"})]
VARIANTS += [("wn+mbn", {"mbn": "before"})]
IDS = ["-".join((name, *options.values())) for name, options in VARIANTS]
each_variant = pytest.mark.parametrize(("name", "options"), VARIANTS, ids=IDS)

MSE = Protocol(metric=stacked.squared_error, epochs=25, patience=3)
"""Short, with a patience that lowers rates within it."""


def networks(
    name: str, widths: tuple[int, ...] = (3, 12, 1), size: int = 3, **options: str
) -> Any:
    return [methods.mlp(name, widths, seed=seed, **options) for seed in range(size)]


def regression(size: int = 3, rows: int = 40, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Inputs (S, N, 3) and targets (S, N) with a kink, different for each member."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(size, rows, 3, generator=generator, dtype=torch.float64)
    return x, (2 * x[..., 0] - x[..., 1]).abs() + x[..., 2]


def run(
    name: str, protocol: Protocol = MSE, size: int = 3, lr: Any = 0.03, **arguments: Any
) -> Result:
    data = arguments.pop("data", regression(size))
    if protocol.metric is not None:
        arguments.setdefault("evaluation", regression(size, rows=15, seed=1))
    models = arguments.pop("models", None) or networks(name, size=size)
    rates = lr if isinstance(lr, list) else [lr] * len(models)
    return stacked.train(models, data, rates, protocol, **arguments)


@pytest.mark.parametrize("name", ["gmp", "intrinsic", "sp"])
def test_directions_have_the_rate_of_their_fan_in(name: str) -> None:
    protocol = replace(MSE, epochs=1, angle_lr="fan_in")
    start = networks(name)
    plain, slow = (
        run(name, p, models=start, snapshots=[1]) for p in (replace(MSE, epochs=1), protocol)
    )
    steps = [r.snapshots[1] - pack(start) for r in (plain, slow)]
    [before, after] = [views(step, start[0])[0] for step in steps]
    factors = {"latitude": 3**-0.5, "unit": 3**-0.5}
    for own, other in zip(before, after, strict=True):
        for key in own:
            if key == "unit":  # pulled back to length 1 after the step
                assert other[key].norm() < 0.7 * own[key].norm()
            else:
                torch.testing.assert_close(other[key], factors.get(key, 1) * own[key])


@each_variant
def test_a_stack_trains_as_plain_torch_does(name: str, options: dict[str, str]) -> None:
    """Each member as if it were alone, though others leave the stack before it."""
    batch_size = None if IDS.index("-".join((name, *options.values()))) % 2 else 16
    decay = 30 * methods.get(name).decay  # large enough to be seen in 25 epochs
    options_of_run = {"epochs": 25, "patience": 2, "stop_patience": 5, "decay": decay}
    protocol = replace(MSE, batch_size=batch_size, **options_of_run)
    models, lrs = networks(name, **options), [0.3, 0.01, 0.1]
    before = pack(models)
    result = run(name, protocol, models=models, lr=lrs, seeds=[5, 6, 7])
    assert torch.equal(pack(models), before)  # copies are trained
    data, evaluation = regression(), regression(rows=15, seed=1)
    for index, model in enumerate(models):
        own, others = ([part[index] for part in both] for both in (data, evaluation))
        losses, metrics, rates, best = train_alone(
            model, own, others, lrs[index], protocol, seed=5 + index
        )
        end = result.epochs[index]
        close(result.losses[:end, index], losses)
        close(result.metrics[:end, index], metrics)
        close(result.rates[:end, index], rates)
        expected = best.state_dict()
        for key, found in _without_counts(result.model(index)).items():
            torch.testing.assert_close(found, expected[key], rtol=1e-10, atol=1e-10)
    assert (
        len(set(result.epochs)) > 1 and (np.nanmin(result.rates, axis=0) < result.rates[0]).any()
    )


def close(found: Any, expected: Any) -> None:
    np.testing.assert_allclose(found, expected, rtol=1e-10, atol=1e-10)


@each_variant
@pytest.mark.parametrize(
    ("widths", "training"), [((1, 5, 2), True), ((3, 6, 5, 1), False), ((2, 4, 7, 3), True)]
)
def test_the_batched_pass_is_the_modules_own(
    name: str, options: dict[str, str], widths: tuple[int, ...], training: bool
) -> None:
    models = [_shaken(model.train(training)) for model in networks(name, widths, **options)]
    state = pack(models)
    tensors, parameters = views(state, models[0])
    x = torch.randn(3, 9, widths[0], dtype=torch.float64)
    out = batched.forward(models[0], tensors, x, training)
    gradients = torch.autograd.grad(out.square().sum(), parameters, materialize_grads=True)
    for index, model in enumerate(models):
        expected = model(x[index])
        torch.testing.assert_close(out[index], expected, rtol=1e-11, atol=1e-11)
        wanted = torch.autograd.grad(expected.square().sum(), list(model.parameters()))
        for found, want in zip(gradients, wanted, strict=True):
            torch.testing.assert_close(found[index], want, rtol=1e-10, atol=1e-10)
        again = copy.deepcopy(model)
        unpack_(again, state[index])  # buffers were tracked alike
        for key, tracked in _without_counts(model).items():
            torch.testing.assert_close(again.state_dict()[key], tracked, rtol=1e-11, atol=1e-11)


def _without_counts(model: nn.Sequential) -> dict[str, Tensor]:
    return {k: v for k, v in model.state_dict().items() if v.is_floating_point()}


def _shaken(model: nn.Sequential) -> nn.Sequential:
    """Move parameters and running statistics away from where they start."""
    with torch.no_grad():
        for key, tensor in model.state_dict().items():
            if "unit" in key:
                continue
            if "running" in key:
                tensor.add_(torch.rand_like(tensor))
            elif tensor.is_floating_point() and "sign" not in key:
                tensor.add_(0.3 * torch.randn_like(tensor))
    return model


@pytest.mark.parametrize(("name", "broken"), [("bn", "data"), ("gmp", "evaluation")])
def test_a_member_that_diverges_leaves_the_others_alone(name: str, broken: str) -> None:
    given = {"data": regression(), "evaluation": regression(rows=15, seed=1)}
    healthy = run(name, **given)
    x, y = given[broken]
    given[broken] = x, y.clone().index_fill_(0, torch.tensor([1]), torch.nan)
    result = run(name, **given)
    assert result.outcomes == [healthy.outcomes[0], "diverged", healthy.outcomes[2]]
    assert result.epochs[1] == 1 and result.best_epoch[1] == -1
    assert np.isnan(result.best_metric[1]) and np.isnan(result.losses[1:, 1]).all()
    assert torch.equal(pack([result.model(1)]), pack(networks(name)[1:2]))
    close(result.losses[:, ::2], healthy.losses[:, ::2])


def test_a_member_that_diverges_keeps_its_best_weights() -> None:
    result = run("sp", replace(MSE, epochs=60), lr=[0.01, 1e160, 0.01])
    assert result.outcomes[1] == "diverged"
    assert all(p.isfinite().all() for p in result.model(1).parameters())


@pytest.mark.parametrize(("stop", "epochs"), [(None, 7), (4, 5)])
def test_a_member_stops_after_its_patience(stop: int | None, epochs: int) -> None:
    left = []
    result = run(
        "sp",
        replace(MSE, epochs=50, stop_patience=stop),
        lr=[0.0, 0.03, 0.0],
        progress=lambda epoch, members: left.append((epoch, members)),
    )
    assert result.epochs[0] == result.epochs[2] == epochs
    assert result.best_epoch[0] == 0 and result.outcomes[0] == "patience"
    assert left[epochs - 2 : epochs] == [(epochs - 1, 3), (epochs, 1)]
    assert np.isnan(result.metrics[epochs:, 0]).all() and not np.isnan(result.rates[:epochs]).any()


@pytest.mark.parametrize("drop", [0.0, 9e-5, 1.1e-4])
@pytest.mark.parametrize("higher_is_better", [False, True])
def test_a_rate_falls_when_the_patience_is_reached(drop: float, higher_is_better: bool) -> None:
    sign = -1 if higher_is_better else 1
    judge = PlateauRule(np.ones(2), 3, 100, higher_is_better=higher_is_better)
    rates = []
    for value in (1.0, 1.0 - drop, 1.0 - drop, 1.0 - drop):
        judge(sign * np.array([value, value]))
        rates.append(judge.rates[0])
    assert rates == pytest.approx([1.0, 1.0, 1.0, 1.0 if drop > 1e-4 else 0.1])


def test_any_loss_and_several_outputs() -> None:
    x, _ = regression()
    classes = (x[..., 0] > 0).long() + (x[..., 1] > 0).long()

    def cross_entropy(output: Tensor, target: Tensor) -> Tensor:
        each = nn.functional.cross_entropy(output.mT, target, reduction="none")
        return each.mean(1)

    models = networks("gmp", (3, 12, 3))
    result = run("gmp", Protocol(cross_entropy, epochs=100), models=models, data=(x, classes))
    assert result.predict(x).shape == (3, 40, 3)
    assert ((result.predict(x).argmax(-1) == classes.numpy()).mean(1) > 0.9).all()


@torch.no_grad()
def place(
    state: Tensor, model: nn.Sequential, x: Tensor, kind: str
) -> tuple[np.ndarray, np.ndarray]:
    """Return directions and locations of all members' units."""
    normal, offset = batched.boundaries(model, views(state, model)[0], x, kind)
    length = normal.norm(dim=-1, keepdim=True)
    direction = normal / length
    return direction.numpy(), (-offset.unsqueeze(-1) / length * direction).numpy()


@each_variant
@pytest.mark.parametrize("kind", ["running", "batch"])
def test_boundaries_are_those_of_the_model(
    name: str, options: dict[str, str], kind: Literal["running", "batch"]
) -> None:
    result, (x, _) = run(name, models=networks(name, **options)), regression()
    before = result.states.clone()
    directions, locations = place(result.states, result.model(0), x, kind)
    assert result.states.equal(before)  # nothing was tracked
    for index in range(3):
        found = boundaries(result.model(index), x[index], statistics=kind)["0"]
        close(directions[index], found.direction)
        close(locations[index], found.location)


@pytest.mark.parametrize("kind", ["running", "batch"])
@pytest.mark.parametrize("name", ["sp", "bn", "wn+mbn", "ln", "gmp", "intrinsic+imn"])
def test_motion_is_the_largest_over_units(
    name: str, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stack_motion, "BLOCK", 5)  # records that are measured at once
    protocol, (x, _) = replace(MSE, epochs=12, stop_patience=3), regression()
    result = run(name, protocol, lr=[0.0, 0.1, 0.1], track=True, snapshots=range(13))
    assert run(name, protocol).motion is None
    motion = result.motion if kind == "batch" else result.running_motion
    places = [place(state, result.model(0), x, kind) for state in result.snapshots.values()]
    directions, locations = (np.stack(each) for each in zip(*places, strict=True))
    moves = np.linalg.norm(np.diff(locations, axis=0), axis=-1).max(-1)
    cosines = (directions[1:] * directions[:-1]).sum(-1)
    turns = np.degrees(np.arccos(cosines.clip(-1, 1))).max(-1)
    for index, end in enumerate(result.epochs):
        last = end - 1  # the snapshot after the end has the best weights
        rotation, displacement = motion.rotation, motion.displacement
        np.testing.assert_allclose(displacement[:last, index], moves[:last, index], atol=1e-12)
        np.testing.assert_allclose(rotation[:last, index], turns[:last, index], atol=1e-5)
        assert np.isnan(rotation[end:, index]).all()


def test_a_unit_without_a_boundary_does_not_move() -> None:
    models = networks("sp")
    with torch.no_grad():
        models[0][0].weight[0] = 0
    motion = run("sp", models=models, lr=0.0, track=True).motion
    assert not motion.displacement[0].any() and not motion.rotation[0].any()


def test_snapshots_are_the_states_after_so_many_epochs() -> None:
    models, (x, y) = networks("bn"), regression(rows=15, seed=1)
    result = run("bn", replace(MSE, stop_patience=100), models=models, snapshots=[0, 1, 7, 25, 99])
    assert [*result.snapshots] == [0, 1, 7, 25]
    assert torch.equal(result.snapshots[0], pack(models))
    for epochs in (1, 7, 25):
        tensors, _ = views(result.snapshots[epochs], models[0])
        output = batched.forward(models[0], tensors, x, training=False).squeeze(-1)
        close(stacked.squared_error(output, y).detach(), result.metrics[epochs - 1])


def test_a_snapshot_has_the_best_weights_of_who_has_stopped() -> None:
    result = run(
        "sp", replace(MSE, epochs=50, stop_patience=4), lr=[0.0, 0.03, 0.0], snapshots=[9]
    )
    assert result.epochs.tolist()[::2] == [5, 5] and result.epochs[1] > 9
    assert torch.equal(result.snapshots[9][::2], result.states[::2])
    assert not torch.equal(result.snapshots[9][1], result.states[1])


@pytest.mark.parametrize("name", ["bn", "gmp+ln", "natural"])
def test_float32_follows_float64(name: str) -> None:
    narrow = [model.float() for model in networks(name)]
    result = run(name, replace(MSE, epochs=5), models=narrow)
    assert {p.dtype for p in result.model(0).parameters()} == {torch.float32}
    expected = run(name, replace(MSE, epochs=5))
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
def test_what_cannot_be_trained_is_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        run("sp", **arguments)


def test_bn_needs_two_rows_in_every_batch() -> None:
    with pytest.raises(ValueError, match="at least 2 rows"):
        run("bn", replace(MSE, batch_size=39))
