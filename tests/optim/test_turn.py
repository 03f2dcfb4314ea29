"""`turn` makes a step an angle, and `max_turn` bounds it."""

from typing import Any

import pytest
import torch
from plain_models import (
    KINDS,
    assert_finite,
    assert_same_weights,
    backward,
    both_coordinates,
    build,
    cnn,
    find_angles,
    mlp,
    rms,
    rows,
    step_and_find_angles,
    train,
)
from torch import nn

BASES: dict[str, dict[str, Any]] = {
    "SGD": {"momentum": 0.9},
    "Adam": {"base": torch.optim.Adam, "eps": 0.0},
    "Muon": {"base": torch.optim.Muon},
}
every_base = pytest.mark.parametrize("base", BASES)


@every_base
@pytest.mark.parametrize("make", [mlp, cnn])
@pytest.mark.parametrize("turn, scale", [(2.4, 1e-6), (2.4, 1e6), (30.0, 1.0)])
def test_the_rms_angle_of_a_layer_is_turn_whatever_its_gradient(
    make: Any, base: str, turn: float, scale: float
) -> None:
    model = make()
    optimizer = build(model, turn=turn, max_turn=180, lr=1e-12, **BASES[base])
    for step in range(3):
        for angles in step_and_find_angles(model, optimizer, step, scale):
            assert rms(angles) == pytest.approx(turn, rel=1e-6)


@pytest.mark.parametrize("base", ["SGD", "Adam"])
def test_every_unit_turns_alike_whatever_the_gradients_scale(base: str) -> None:
    """Muon's Newton-Schulz steps are in bfloat16."""
    model, other = mlp(), mlp()
    options = {"turn": 2.4, "lr": 1e-12, **BASES[base]}  # the rate is that of the rest
    optimizer, same = build(model, **options), build(other, **options)
    angles = step_and_find_angles(model, optimizer, scale=1e-6)
    expected = step_and_find_angles(other, same)
    torch.testing.assert_close(angles, expected, rtol=1e-6, atol=0)


def test_the_turn_does_not_depend_on_torchs_default_type(request: Any) -> None:
    model = mlp()
    request.addfinalizer(lambda: torch.set_default_dtype(torch.float32))
    torch.set_default_dtype(torch.bfloat16)
    angles = step_and_find_angles(model, build(model, turn=2.4, max_turn=180))[0]
    assert rms(angles) == pytest.approx(2.4, rel=1e-6)


def test_the_bound_of_one_unit_does_not_depend_on_torchs_default_type(request: Any) -> None:
    layer = nn.Linear(6, 64)
    model = nn.Sequential(layer, nn.Linear(64, 3)).double()
    before = rows(layer)
    layer.weight.grad = torch.zeros_like(layer.weight)
    layer.weight.grad[5] = torch.randn(6)
    request.addfinalizer(lambda: torch.set_default_dtype(torch.float32))
    torch.set_default_dtype(torch.bfloat16)
    build(model, turn=2.3).step()
    assert find_angles(before, rows(layer))[5].item() == pytest.approx(4 * 2.3, rel=1e-9)


@every_base
def test_a_layer_without_gradient_does_not_turn_even_through_momentum(base: str) -> None:
    model = mlp()
    optimizer = build(model, turn=2.4, **BASES[base])
    train(model, optimizer)
    before = rows(model[0]), rows(model[3])
    backward(model, 3)
    model[0].weight.grad.zero_()
    optimizer.step()
    assert find_angles(before[0], rows(model[0])).max() < 1e-6
    assert find_angles(before[1], rows(model[3])).max() > 0.5


BOUNDS = [
    ({"turn": 2.0}, 8.0),  # four times turn
    ({"turn": 2.0, "max_turn": 3.0}, 3.0),
    ({"turn": 30.0}, 90.0),
]


@pytest.mark.parametrize("options, most", BOUNDS)
def test_one_unit_alone_turns_by_at_most_max_turn(options: Any, most: float) -> None:
    """Without a bound it would turn by sqrt(64) times `turn`."""
    model = nn.Sequential(nn.Linear(6, 64), nn.Linear(64, 3)).double()
    before = rows(model[0])
    gradient = torch.zeros_like(model[0].weight)
    gradient[5] = torch.randn(6)
    model[0].weight.grad = gradient
    build(model, **options).step()
    angles = find_angles(before, rows(model[0]))
    assert angles[5].item() == pytest.approx(most, rel=1e-6)
    assert angles[:5].max() < 1e-6


@both_coordinates
def test_max_turn_alone_bounds_units_and_leaves_others(coordinates: str) -> None:
    free, bounded = cnn(), cnn()
    options = {"coordinates": coordinates, "lr": 2.0}
    expected = torch.cat(step_and_find_angles(free, build(free, **options)))
    most = expected.median().item()
    optimizer = build(bounded, max_turn=most, **options)
    angles = torch.cat(step_and_find_angles(bounded, optimizer))
    torch.testing.assert_close(angles, expected.clamp(max=most), rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("bound", [{"turn": 1.0}, {"max_turn": 4.0}], ids=str)
def test_a_bounded_unit_does_not_turn_round_by_the_sign_of_r(bound: Any) -> None:
    model = mlp()
    optimizer = build(model, scale_lr=50.0, **bound)
    for step in range(5):
        angles = step_and_find_angles(model, optimizer, step)
        assert torch.cat(angles).max() < 4.1


@pytest.mark.parametrize("bound", [{"turn": 2.4}, {"max_turn": 10.0}], ids=str)
@pytest.mark.parametrize("bias", [False, True])
def test_a_unit_that_vanishes_and_comes_back_stays_finite(bound: Any, bias: bool) -> None:
    layer = nn.Linear(8, 8, bias=bias)
    model = nn.Sequential(layer, nn.Linear(8, 1))
    nn.init.normal_(layer.weight, std=0.02)
    x = torch.randn(64, 8)
    optimizer = build(model, torch.optim.AdamW, lr=1e-2, **bound)
    for target in (0, 1):
        for _ in range(150):
            model.zero_grad()
            loss = (layer(x) - target).square().mean()
            loss.backward()
            optimizer.step()
    assert_finite(model)
    if not bias:
        assert 0.01 < rows(layer).norm(dim=1).max() < 10


@both_coordinates
@pytest.mark.parametrize("fan_in, options", [(1, {}), (2, {}), (1, {"max_turn": 9.0})])
def test_r_crosses_zero_with_its_weight(fan_in: int, options: Any, coordinates: str) -> None:
    layer = nn.Linear(fan_in, 1, bias=False)
    model = nn.Sequential(layer, nn.Linear(1, 1)).double()
    nn.init.constant_(layer.weight, 0.1)
    optimizer = build(model, lr=0.01, coordinates=coordinates, **options)
    for _ in range(45):
        layer.weight.grad = torch.ones_like(layer.weight)  # along the unit: r alone
        optimizer.step()
    expected = torch.full_like(layer.weight, -0.35)
    torch.testing.assert_close(layer.weight, expected)


@both_coordinates
@pytest.mark.parametrize("when", [0, 1])
def test_a_row_too_long_for_squares_leaves_the_others_alone(coordinates: str, when: int) -> None:
    model = mlp().float()
    optimizer = build(model, coordinates=coordinates, max_turn=5.0)
    for step in range(2):
        if step == when:
            nn.init.constant_(model[0].weight[0], 1e20)
        angles = step_and_find_angles(model, optimizer, step, scale=1e-3)[0]
    assert 0 < angles.max() < 5.1
    assert rows(model[0])[1:].abs().max() < 10


@pytest.mark.parametrize("options", [{}, {"turn": 2.0}, {"max_turn": 5.0}], ids=str)
@pytest.mark.parametrize("base", [torch.optim.SGD, torch.optim.Adam])
@pytest.mark.parametrize("broken", ["weight", "bias"])
def test_nan_in_the_gradient_of_one_row_stays_in_that_row(
    base: Any, options: Any, broken: str
) -> None:
    """The others step about as beside a row that has no gradient, in later steps too."""
    model, other = mlp(), mlp()
    optimizers = [build(m, base, **options) for m in (model, other)]
    for step in range(3):
        backward(other, step)
        for p, q in zip(model.parameters(), other.parameters(), strict=True):
            p.grad = q.grad.clone()
        if step == 0:
            other[0].weight.grad[2] = other[0].bias.grad[2] = 0
            getattr(model[0], broken).grad[2] = torch.nan
        for optimizer in optimizers:
            optimizer.step()

    is_other = torch.arange(8) != 2
    for p, q in zip(model[0].parameters(), other[0].parameters(), strict=True):
        torch.testing.assert_close(p[is_other], q[is_other], rtol=0, atol=0.02)
    assert_finite(model[3:])


# ---- what groups say counts in each step


def test_a_turn_that_a_group_gets_or_loses_in_mid_run_counts() -> None:
    model = mlp()
    optimizer = build(model, max_turn=180, match=False)
    train(model, optimizer, 1)
    optimizer.param_groups[0]["turn"] = 2.4
    for angles in step_and_find_angles(model, optimizer, 1):
        assert rms(angles) == pytest.approx(2.4, rel=1e-6)

    other = mlp()
    other.load_state_dict(model.state_dict())
    same = build(other, match=False)
    optimizer.param_groups[0].update(turn=None, max_turn=None)
    found = step_and_find_angles(model, optimizer, 2)
    torch.testing.assert_close(found, step_and_find_angles(other, same, 2))


@pytest.mark.parametrize("turn", [200, -3.0, "2.4"])
def test_a_bad_turn_in_a_group_is_refused_at_the_next_step(turn: Any) -> None:
    model = mlp()
    optimizer = build(model, turn=2.4)
    optimizer.param_groups[0]["turn"] = turn
    with pytest.raises(ValueError, match="turn is an angle in degrees"):
        train(model, optimizer, 1)


def test_a_turn_in_a_group_of_angles_is_refused() -> None:
    model = mlp()
    optimizer = build(model, coordinates="angles")
    optimizer.param_groups[0]["turn"] = 2.4
    with pytest.raises(ValueError, match="turn needs coordinates='intrinsic'"):
        train(model, optimizer, 1)


def test_max_turn_may_change_and_is_saved() -> None:
    model, new = mlp(), mlp()
    optimizer = build(model, lr=2.0, max_turn=1.0)
    optimizer.param_groups[0]["max_turn"] = 0.5
    assert max(a.max() for a in step_and_find_angles(model, optimizer)) < 0.51
    new.load_state_dict(model.state_dict())
    resumed = build(new, lr=2.0)
    resumed.load_state_dict(optimizer.state_dict())
    assert max(a.max() for a in step_and_find_angles(new, resumed, 1)) < 0.51


def test_r_that_would_land_on_zero_keeps_its_sign_and_direction() -> None:
    layer = nn.Linear(2, 1, bias=False)
    model = nn.Sequential(layer, nn.Linear(1, 1)).double()
    layer.weight.data[:] = torch.tensor([[1.0, 0.0]])
    optimizer = build(model, lr=1.0, max_turn=4.0)
    layer.weight.grad = torch.tensor([[1.0, 0.0]]).double()  # r - lr grad_r = 0
    optimizer.step()
    assert layer.weight.tolist() == [[pytest.approx(0.1), 0.0]]


@pytest.mark.parametrize("kind", ["SGD", "Muon", "turn", "angles"])
def test_a_step_under_autocast_is_the_same(kind: str) -> None:
    models = [mlp(torch.float32), mlp(torch.float32)]
    for i, model in enumerate(models):
        optimizer = build(model, **KINDS[kind])
        for step in range(2):
            backward(model, step)
            with torch.autocast("cpu", torch.bfloat16, enabled=bool(i)):
                optimizer.step()
    assert_same_weights(*models)
