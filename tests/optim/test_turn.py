"""`turn` makes a step an angle, `max_turn` bounds it, `scale` and decay say what becomes of r."""

from typing import Any

import pytest
import torch
from plain_models import backward, both_coordinates, build, cnn, mlp, rows, train
from torch import Tensor, nn
from torch.optim import lr_scheduler

BASES = {"SGD": {"momentum": 0.9}, "Adam": {"base": torch.optim.Adam, "eps": 0.0}}
BASES["Muon"] = {"base": torch.optim.Muon}


def angles(old: Tensor, new: Tensor) -> Tensor:
    u, v = (nn.functional.normalize(x.double(), dim=1) for x in (old, new))
    return torch.rad2deg(2 * torch.atan2((u - v).norm(dim=1), (u + v).norm(dim=1)))


def turns(model: Any, optimizer: Any, step: int = 0, *, scale: float = 1.0, first: int = 1) -> Any:
    backward(model, step, scale)
    model[0].weight.grad *= first
    before = rows(model[0]), rows(model[3])
    optimizer.step()
    return angles(before[0], rows(model[0])), angles(before[1], rows(model[3]))


@pytest.mark.parametrize("base", BASES)
@pytest.mark.parametrize("make", [mlp, cnn])
@pytest.mark.parametrize("turn, scale", [(1e-3, 1e-6), (2.4, 1e-6), (2.4, 1e6), (30.0, 1.0)])
def test_the_rms_is_turn_at_any_scale(make: Any, base: str, turn: float, scale: float) -> None:
    model, other = make(), make()
    options = {"turn": turn, "max_turn": 180, "lr": 1e-12, **BASES[base]}  # lr is the rest's
    optimizer, same = build(model, **options), build(other, **options)
    schedules = [lr_scheduler.LambdaLR(o, lambda step: 1 / (1 + step)) for o in (optimizer, same)]
    for step in range(4):
        found, expected = turns(model, optimizer, step, scale=scale), turns(other, same, step)
        other.load_state_dict(model.state_dict())
        for x, its in zip(found, expected, strict=True):
            assert x.square().mean().sqrt().item() == pytest.approx(turn / (1 + step), rel=1e-6)
            if base != "Muon":  # whose Newton-Schulz steps are in bfloat16
                torch.testing.assert_close(x, its, rtol=1e-6, atol=0)
        for schedule in schedules:
            schedule.step()


def test_the_turn_does_not_depend_on_torchs_default_type(request: Any) -> None:
    model = mlp()
    request.addfinalizer(lambda: torch.set_default_dtype(torch.float32))
    torch.set_default_dtype(torch.bfloat16)
    found = turns(model, build(model, turn=2.4, max_turn=180))[0]
    assert found.square().mean().sqrt().item() == pytest.approx(2.4, rel=1e-6)


@pytest.mark.parametrize("base", BASES)
def test_a_layer_without_gradient_does_not_turn_even_through_momentum(base: str) -> None:
    model = mlp()
    optimizer = build(model, turn=2.4, **BASES[base])
    train(model, optimizer)
    found = turns(model, optimizer, 3, first=0)
    assert found[0].max() < 1e-6 and found[1].max() > 0.5


@pytest.mark.parametrize("options, most", [({}, 8.0), ({"max_turn": 3.0}, 3.0)])
def test_one_unit_turns_by_at_most_four_times_turn(options: Any, most: float) -> None:
    model = nn.Sequential(nn.Linear(6, 64), nn.Linear(64, 3)).double()
    before = rows(model[0])
    model[0].weight.grad = torch.zeros_like(model[0].weight)
    model[0].weight.grad[5] = torch.randn(6)  # alone it would turn by 2 sqrt(64) = 16 degrees
    build(model, turn=2.0, **options).step()
    found = angles(before, rows(model[0]))
    assert found[5].item() == pytest.approx(most, rel=1e-6) and found[:5].max() < 1e-6


@both_coordinates
def test_max_turn_alone_bounds_units_and_leaves_others(coordinates: str) -> None:
    free, bounded = cnn(), cnn()
    without = torch.cat(turns(free, build(free, coordinates=coordinates, lr=2.0)))
    most = without.median().item()
    optimizer = build(bounded, coordinates=coordinates, lr=2.0, max_turn=most)
    found = torch.cat(turns(bounded, optimizer))
    torch.testing.assert_close(found, without.clamp(max=most), rtol=1e-6, atol=1e-9)


@both_coordinates
@pytest.mark.parametrize(
    "make, norm, scale, is_fixed",
    [
        (cnn, nn.BatchNorm2d, "auto", True), (cnn, nn.InstanceNorm2d, "auto", True),
        (cnn, lambda width: nn.GroupNorm(1, width), "auto", False),
        (mlp, nn.LayerNorm, "auto", False), (mlp, nn.Identity, "auto", False),
        (mlp, nn.Identity, "fixed", True), (cnn, nn.BatchNorm2d, "free", False),
    ],
)  # fmt: skip
def test_r_is_fixed_where_a_norm_of_channels_follows(
    make: Any, norm: Any, scale: Any, is_fixed: bool, coordinates: str
) -> None:
    model = make(norm=norm)
    before = rows(model[0]).norm(dim=1)
    options = {"base": torch.optim.Adam, "lr": 1e-2, "scale": scale, "scale_decay": 0.1}
    optimizer = build(model, coordinates=coordinates, **options)
    train(model, optimizer, steps=10)
    change = (rows(model[0]).norm(dim=1) / before - 1).abs().max()
    assert change < 1e-13 if is_fixed else change > 1e-4
    assert ("fixed, 1 follows" in str(optimizer)) == (is_fixed and scale == "auto")


def test_scale_lr_and_scale_decay_are_those_of_r() -> None:
    changes, before = [], rows(mlp()[0]).norm(dim=1)
    for options in ({}, {"scale_lr": 0.1}, {"scale_decay": 0.5}):
        model = mlp()
        optimizer = build(model, lr=0.05, **options)
        lr_scheduler.LambdaLR(optimizer, lambda step: 0.5)  # scales both rates
        train(model, optimizer, steps=1)
        changes.append(rows(model[0]).norm(dim=1) - before)
    expected = 2 * changes[0], changes[0] - 0.025 * 0.5 * before
    torch.testing.assert_close((changes[1], changes[2]), expected, rtol=1e-9, atol=0)


@pytest.mark.parametrize("base", [torch.optim.SGD, torch.optim.AdamW, torch.optim.Muon])
@pytest.mark.parametrize("decay, is_written", [(0.0, False), (0.5, False), (0.5, True)])
def test_decay_reaches_matrices_of_the_rest_alone(base: Any, decay: Any, is_written: bool) -> None:
    model, before = mlp(norm=nn.LayerNorm), mlp(norm=nn.LayerNorm)
    model.extra, before.extra = (nn.ParameterList([torch.ones(3), torch.ones(2, 2)]) for _ in "ab")
    options = {} if is_written or not decay else {"weight_decay": decay}
    optimizer = build(model[:7], base, **options)
    optimizer.add_param_group({"params": model.extra.parameters()})
    for group in optimizer.param_groups if is_written else ():
        group["weight_decay"] = decay
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    optimizer.step()
    for p in (before[6].weight, before.extra[1]):
        p.data *= 1 - 0.05 * decay
    torch.testing.assert_close(model.state_dict(), before.state_dict(), rtol=1e-14, atol=0)


@pytest.mark.parametrize("bound", [{"turn": 1.0}, {"max_turn": 4.0}], ids=str)
def test_a_bounded_unit_does_not_turn_round_by_the_sign_of_r(bound: Any) -> None:
    model = mlp()
    optimizer = build(model, scale_lr=50.0, **bound)
    assert all(torch.cat(turns(model, optimizer, step)).max() < 4.1 for step in range(5))


@pytest.mark.parametrize("bound", [{"turn": 2.4}, {"max_turn": 10.0}], ids=str)
@pytest.mark.parametrize("bias", [False, True])
def test_a_unit_that_vanishes_and_comes_back_stays_finite(bound: Any, bias: bool) -> None:
    model = nn.Sequential(nn.Linear(8, 8, bias=bias), nn.Linear(8, 1))
    nn.init.normal_(model[0].weight, std=0.02)
    x, optimizer = torch.randn(64, 8), build(model, torch.optim.AdamW, lr=1e-2, **bound)
    for step in range(300):
        model.zero_grad()
        (model[0](x) - step // 150).square().mean().backward()
        optimizer.step()
    assert 0.01 < rows(model[0]).norm(dim=1).max() < 10 or bias
    assert all(p.isfinite().all() for p in model.parameters())


@both_coordinates
@pytest.mark.parametrize("fan_in, options", [(1, {}), (2, {}), (1, {"max_turn": 9.0})])
def test_r_crosses_zero_with_its_weight(fan_in: int, options: Any, coordinates: str) -> None:
    model = nn.Sequential(nn.Linear(fan_in, 1, bias=False), nn.Linear(1, 1)).double()
    nn.init.constant_(model[0].weight, 0.1)
    optimizer = build(model, lr=0.01, coordinates=coordinates, **options)
    for _ in range(45):
        model[0].weight.grad = torch.ones_like(model[0].weight)  # along the unit: r alone
        optimizer.step()
    torch.testing.assert_close(rows(model[0]), torch.full((1, fan_in), -0.35).double())


@both_coordinates
@pytest.mark.parametrize("when", [0, 1])
def test_a_row_too_long_for_squares_leaves_the_others_alone(coordinates: str, when: int) -> None:
    model = mlp().float()
    optimizer = build(model, coordinates=coordinates, max_turn=5.0)
    for step in range(2):
        if step == when:
            nn.init.constant_(model[0].weight[0], 1e20)
        turned = turns(model, optimizer, step, scale=1e-3)[0]
    assert 0 < turned.max() < 5.1 and rows(model[0])[1:].abs().max() < 10


def test_one_peak_for_degrees_and_rates_is_warned_of() -> None:
    model = mlp()
    optimizer = build(model, turn=2.0, momentum=0.9)
    lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=9)
    backward(model)
    with pytest.warns(UserWarning, match="max_lr=\\[turn, lr\\]"):
        optimizer.step()
