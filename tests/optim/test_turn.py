"""`turn` makes a step an angle, `max_turn` bounds it, and `scale` says what becomes of r."""

import math
from typing import Any

import pytest
import torch
from plain_models import backward, build, cnn, mlp, rows, train
from torch import Tensor, nn

BASES = {
    "SGD": {"base": torch.optim.SGD, "momentum": 0.9},
    "Adam": {"base": torch.optim.Adam},
    "Muon": {"base": torch.optim.Muon},
}
every_base = pytest.mark.parametrize("options", BASES.values(), ids=list(BASES))


def angles(old: Tensor, new: Tensor) -> Tensor:
    """Return by how many degrees each row has turned, exact for small angles too."""
    u, v = (nn.functional.normalize(x.double(), dim=1) for x in (old, new))
    return torch.rad2deg(2 * torch.atan2((u - v).norm(dim=1), (u + v).norm(dim=1)))


def rms(x: Tensor) -> float:
    return x.square().mean().sqrt().item()


def turns(model: nn.Sequential, optimizer: Any, step: int = 0, scale: float = 1.0) -> list[Tensor]:
    """Take one step and return the angles by which the units of both layers have turned."""
    backward(model, step, scale)
    layers = model[0], model[3]
    before = [rows(layer) for layer in layers]
    optimizer.step()
    return [angles(old, rows(layer)) for old, layer in zip(before, layers, strict=True)]


@every_base
@pytest.mark.parametrize("make", [mlp, cnn])
@pytest.mark.parametrize("turn", [1e-3, 2.4, 30.0])
def test_the_rms_of_a_layers_turns_is_turn(
    make: Any, options: dict[str, Any], turn: float
) -> None:
    model = make()
    optimizer = build(model, turn=turn, max_turn=180, **options)
    for step in range(4):
        for found in turns(model, optimizer, step):
            assert rms(found) == pytest.approx(turn, rel=1e-6)


def test_the_turn_is_exact_in_float32_too() -> None:
    model = mlp(torch.float32)
    optimizer = build(model, turn=2.4, max_turn=180)
    assert [rms(found) for found in turns(model, optimizer)] == pytest.approx([2.4] * 2, rel=1e-5)


@every_base
@pytest.mark.parametrize("scale", [1e-6, 1e6])
def test_the_gradients_scale_does_not_matter(options: dict[str, Any], scale: float) -> None:
    model, other = mlp(), mlp()
    eps = {"eps": 0.0} if options["base"] is torch.optim.Adam else {}
    optimizers = [build(m, turn=2.4, scale="fixed", **options, **eps) for m in (model, other)]
    for step in range(3):
        found = turns(model, optimizers[0], step, scale), turns(other, optimizers[1], step)
        for one, expected in zip(*found, strict=True):
            assert rms(one) == pytest.approx(rms(expected), rel=1e-6)
        other.load_state_dict(model.state_dict())
    if options["base"] is not torch.optim.Muon:  # whose Newton-Schulz rounds to bfloat16
        torch.testing.assert_close(found[0], found[1], rtol=1e-6, atol=0)


def test_a_schedule_scales_the_turn() -> None:
    model = mlp()
    optimizer = build(model, lr=0.1, turn=3.0, max_turn=180)
    assert [group["lr"] for group in optimizer.param_groups] == [3.0, 0.1]
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (step + 1))
    for step in range(4):
        for found in turns(model, optimizer, step):
            assert rms(found) == pytest.approx(3.0 / (step + 1), rel=1e-6)
        schedule.step()


def test_one_cycle_takes_a_turn_and_a_rate() -> None:
    model = mlp()
    optimizer = build(model, turn=2.4, max_turn=180, momentum=0.9)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=[2.4, 0.1], total_steps=8)
    for step in range(7):
        expected = optimizer.param_groups[0]["lr"]
        assert expected / 2.4 == pytest.approx(optimizer.param_groups[1]["lr"] / 0.1)
        assert rms(turns(model, optimizer, step)[0]) == pytest.approx(expected, rel=1e-6)
        schedule.step()


@every_base
def test_a_layer_without_gradient_does_not_turn(options: dict[str, Any]) -> None:
    model = mlp()
    optimizer = build(model, turn=2.4, **options)
    train(model, optimizer)
    backward(model, 3)
    model[0].weight.grad.zero_()
    before = rows(model[0]), rows(model[3])
    optimizer.step()
    assert angles(before[0], rows(model[0])).max() < 1e-6
    assert rms(angles(before[1], rows(model[3]))) > 0.5


def test_no_unit_turns_more_than_four_times_turn() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 64), nn.Linear(64, 3)).double()
    optimizer = build(model, turn=2.0)
    before = rows(model[0])
    model[0].weight.grad = torch.zeros_like(model[0].weight)
    model[0].weight.grad[5] = torch.randn(6)  # alone it would turn by 16 degrees
    optimizer.step()
    found = angles(before, rows(model[0]))
    assert found[5].item() == pytest.approx(8.0, rel=1e-6)
    assert found[:5].max() < 1e-6


@pytest.mark.parametrize("coordinates", ["intrinsic", "angles"])
@pytest.mark.parametrize("make", [mlp, cnn])
def test_max_turn_bounds_each_unit_and_leaves_the_others(make: Any, coordinates: str) -> None:
    free, bounded = make(), make()
    options = {"coordinates": coordinates, "lr": 2.0}
    without = turns(free, build(free, **options))
    found = turns(bounded, build(bounded, max_turn=3.0, **options))
    assert any(one.max() > 3 for one in without)
    for one, two in zip(without, found, strict=True):
        torch.testing.assert_close(two, one.clamp(max=3), rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("coordinates", ["intrinsic", "angles"])
def test_a_bound_that_nobody_meets_changes_nothing(coordinates: str) -> None:
    free, bounded = mlp(), mlp()
    train(free, build(free, coordinates=coordinates), steps=10)
    train(bounded, build(bounded, coordinates=coordinates, max_turn=170), steps=10)
    torch.testing.assert_close(rows(bounded[0]), rows(free[0]), rtol=1e-9, atol=1e-12)


def test_an_arc_is_refused_for_angles() -> None:
    with pytest.raises(ValueError, match="turn needs coordinates='intrinsic'"):
        build(mlp(), turn=1, coordinates="angles")


# --- r ------------------------------------------------------------------------------------------


def lengths(layer: nn.Module) -> Tensor:
    return rows(layer).norm(dim=1)


def group_norm(width: int) -> nn.Module:
    return nn.GroupNorm(1, width)


@pytest.mark.parametrize("coordinates", ["intrinsic", "angles"])
@pytest.mark.parametrize(
    "norm, is_fixed",
    [(nn.BatchNorm2d, True), (nn.InstanceNorm2d, True), (group_norm, False), (nn.Identity, False)],
)
def test_auto_holds_r_where_a_norm_of_channels_follows(
    norm: Any, is_fixed: bool, coordinates: str
) -> None:
    model = cnn(norm=norm)
    before = lengths(model[0])
    optimizer = build(model, lr=0.3, momentum=0.9, coordinates=coordinates)
    train(model, optimizer, steps=10)
    change = (lengths(model[0]) / before - 1).abs().max()
    assert change < 1e-14 * 20 if is_fixed else change > 1e-4
    assert ("fixed, 1 follows" in str(optimizer)) == is_fixed


def test_auto_leaves_r_free_before_layernorm() -> None:
    model = mlp(norm=nn.LayerNorm)
    before = lengths(model[0])
    train(model, build(model), steps=5)
    assert (lengths(model[0]) / before - 1).abs().max() > 1e-4


def test_scale_fixes_or_frees_r_everywhere() -> None:
    fixed, free = mlp(), cnn(norm=nn.BatchNorm2d)
    before = lengths(fixed[0]), lengths(free[0])
    train(fixed, build(fixed, scale="fixed"), steps=5)
    train(free, build(free, base=torch.optim.Adam, scale="free"), steps=5)
    torch.testing.assert_close(lengths(fixed[0]), before[0], rtol=1e-13, atol=0)
    assert (lengths(free[0]) - before[1]).abs().max() > 1e-4


def test_scale_lr_is_the_rate_of_r() -> None:
    changes = []
    for rate in (0.05, 0.1):
        model = mlp()
        before = lengths(model[0])
        optimizer = build(model, lr=0.05, scale_lr=rate)
        torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5)  # scales both
        train(model, optimizer, steps=1)
        changes.append(lengths(model[0]) - before)
    torch.testing.assert_close(changes[1], 2 * changes[0], rtol=1e-9, atol=0)


def test_scale_decay_shrinks_free_r_alone() -> None:
    models = [cnn(norm=norm) for norm in (nn.Identity, nn.BatchNorm2d)]
    for model, factor in zip(models, (1 - 0.05 * 0.5, 1.0), strict=True):
        before = lengths(model[0])
        optimizer = build(model, scale_decay=0.5)
        backward(model)
        for p in model.parameters():
            p.grad.zero_()
        optimizer.step()
        torch.testing.assert_close(lengths(model[0]), factor * before, rtol=1e-12, atol=0)


@pytest.mark.parametrize("base", [torch.optim.SGD, torch.optim.AdamW, torch.optim.Muon])
@pytest.mark.parametrize("decay", [None, 0.5])
def test_decay_reaches_matrices_of_the_rest_alone(base: Any, decay: float | None) -> None:
    model = mlp(norm=nn.LayerNorm)
    given = {} if decay is None else {"weight_decay": decay}
    optimizer = build(model, base, **given)
    backward(model)
    for p in model.parameters():
        p.grad.zero_()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    optimizer.step()
    factor = 1 - 0.05 * (decay or 0)
    for name, p in model.named_parameters():
        expected = before[name] * (factor if name == "6.weight" else 1)
        torch.testing.assert_close(p.detach(), expected, rtol=1e-14, atol=0, msg=name)


def test_r_crosses_zero_and_goes_on() -> None:
    model = nn.Sequential(nn.Linear(2, 1, bias=False), nn.Linear(1, 1)).double()
    nn.init.constant_(model[0].weight, 0.1)
    optimizer = build(model, lr=0.01)
    for _ in range(40):
        model[0].weight.grad = torch.ones_like(model[0].weight)
        optimizer.step()
    w = model[0].weight.detach()
    r = optimizer.state[model[0].weight]["r"]
    assert r.item() < -0.1 and torch.allclose(w, w.new_full((1, 2), r.item() / math.sqrt(2)))


@pytest.mark.parametrize("coordinates", ["intrinsic", "angles"])
def test_one_input_trains_as_the_plain_weight(coordinates: str) -> None:
    """With one input there is no direction to turn: W = r, whatever its sign."""
    models = [nn.Sequential(nn.Linear(1, 4, bias=False), nn.Linear(4, 1)).double() for _ in "ab"]
    models[1].load_state_dict(models[0].state_dict())
    plain = torch.optim.SGD(models[1].parameters(), 0.05)
    optimizers = build(models[0], coordinates=coordinates), plain
    for _ in range(60):
        for model, optimizer in zip(models, optimizers, strict=True):
            model.zero_grad()
            (model(torch.ones(1, 1).double()) + 3).square().sum().backward()
            optimizer.step()
    torch.testing.assert_close(models[0][0].weight, models[1][0].weight, rtol=1e-10, atol=1e-12)
