"""Rows of zeros are units: they are born along the first update, and learn as plain ones."""

import copy
from typing import Any

import pytest
import torch
from plain_models import (
    assert_finite,
    assert_same_training,
    assert_same_weights,
    backward,
    both_coordinates,
    build,
    cnn,
    every_kind,
    find_table,
    mlp,
    rows,
    start,
    step_with_ones,
    through_a_file,
    train,
)
from torch import nn


def zeroed(make: Any = mlp, dtype: torch.dtype = torch.float64) -> nn.Sequential:
    """Return a model whose layer 3 is all zeros."""
    model = make(dtype)
    nn.init.zeros_(model[3].weight)
    return model


def with_zeros(dtype: torch.dtype = torch.float64) -> nn.Sequential:
    """Return an MLP with a row of zeros in layer 0, and a layer of zeros."""
    model = zeroed(mlp, dtype)
    model[0].weight.data[2] = 0.0
    return model


@every_kind
def test_zero_rows_are_units_and_do_not_change_the_function_at_the_start(kind: str) -> None:
    model, optimizer = start(kind, with_zeros)
    before = copy.deepcopy(model)
    assert optimizer.param_groups[0]["param_names"] == ["0.weight", "3.weight"]
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    train(model, optimizer)
    assert_same_weights(model, before)


@every_kind
def test_a_layer_of_zeros_grows_and_stays_finite(kind: str) -> None:
    model, optimizer = start(kind, with_zeros)
    train(model, optimizer, 10)
    assert model[3].weight.any(dim=1).all()
    assert model[0].weight[2].any()
    assert_finite(model)


@both_coordinates
def test_the_first_step_of_a_zero_row_is_along_the_descent(coordinates: str) -> None:
    model = mlp()
    model[0].weight.data[2] = 0.0
    train(model, build(model, coordinates=coordinates), 1)
    descent = -model[0].weight.grad[2]
    cosine = nn.functional.cosine_similarity(model[0].weight[2], descent, dim=0)
    assert cosine.item() == pytest.approx(1)


@both_coordinates
def test_the_first_step_of_a_layer_of_zeros_is_along_the_descent(coordinates: str) -> None:
    model = zeroed()
    train(model, build(model, coordinates=coordinates), 1)
    descent = -model[3].weight.grad
    cosines = nn.functional.cosine_similarity(rows(model[3]), descent, dim=1)
    torch.testing.assert_close(cosines, torch.ones(7).double())


def test_a_row_of_zeros_among_others_steps_as_a_plain_one() -> None:
    """Under SGD without momentum: its length is the rate times the gradient's."""
    model, plain = mlp(), mlp()
    for one in (model, plain):
        one[0].weight.data[2] = 0.0
    train(model, build(model), 1)
    train(plain, torch.optim.SGD(plain.parameters(), lr=0.05), 1)
    torch.testing.assert_close(rows(model[0])[2], rows(plain[0])[2])


@pytest.mark.parametrize("value", [0.0, 1e-30])
def test_beside_a_zero_row_the_others_step_as_they_would(value: float) -> None:
    model, other = mlp(), mlp()
    model[0].weight.data[2] = value
    for one in (model, other):
        step_with_ones(one, build(one, match=False))
    others = [i for i in range(8) if i != 2]
    torch.testing.assert_close(rows(model[0])[others], rows(other[0])[others])


def test_the_length_of_a_layer_is_the_mean_of_its_rows_that_are_not_zero() -> None:
    model = with_zeros()
    expected = rows(model[0]).norm(dim=1).sum() / 7
    optimizer = build(model)
    train(model, optimizer, 1)
    lengths = [optimizer.state[model[i].weight]["length"].item() for i in (0, 3)]
    assert lengths == pytest.approx([expected.item(), 0])


@pytest.mark.parametrize("kind", ["SGD", "Muon", "angles", "bfloat16 turn"])
def test_a_row_without_gradient_waits(kind: str) -> None:
    """A row of zeros whose gradient is zero is born when it has one."""
    model, optimizer = start(kind, with_zeros)
    for step in range(3):
        backward(model, step)
        if step < 2:
            model[3].weight.grad.zero_()
        optimizer.step()
        assert bool(model[3].weight.any()) == (step == 2)


@pytest.mark.parametrize("kind", ["SGD", "Adam", "Muon", "angles", "turn", "bfloat16 turn"])
@pytest.mark.parametrize("steps", [0, 1])
def test_a_state_of_zero_rows_goes_on_bit_for_bit(kind: str, steps: int) -> None:
    model, optimizer = start(kind, with_zeros)
    train(model, optimizer, steps)
    other, resumed = start(kind)
    other.load_state_dict(model.state_dict())
    resumed.load_state_dict(through_a_file(optimizer.state_dict()))
    assert_same_training((model, optimizer), (other, resumed))


@pytest.mark.parametrize("options", [{"scale": "fixed"}, {"norm": nn.BatchNorm1d}], ids=str)
def test_where_r_is_fixed_a_layer_with_a_zero_row_stays_plain(options: Any) -> None:
    model = mlp(norm=options.pop("norm", nn.Identity))
    model[3].weight.data[2] = 0
    optimizer = build(model, **options)
    assert find_table(optimizer)["3.weight"] == "a row of zeros cannot grow while r is fixed"
    train(model, optimizer)
    assert model[3].weight[2].any()


def test_where_r_is_fixed_a_zero_row_that_comes_after_construction_is_refused() -> None:
    """It could never grow, and a layer is not regrouped by values."""
    model = mlp(norm=nn.BatchNorm1d)
    optimizer = build(model)
    model[3].weight.data[2] = 0
    with pytest.raises(ValueError, match="'3.weight' has a row of zeros.* load weights before"):
        train(model, optimizer, 1)


@both_coordinates
def test_a_packed_layer_of_zeros_grows_at_the_pace_of_a_layer_of_its_own(coordinates: str) -> None:
    model, whole = mlp(), mlp()
    model[3].weight.data[:3] = 0
    whole[3].weight.data[:] = 0
    options = {"coordinates": coordinates, "split": {"3": (3, 4)}}
    for one in (model, whole):
        train(one, build(one, torch.optim.Adam, lr=0.01, **options), 1)
    lengths = rows(model[3]).norm(dim=1)[:3], rows(whole[3]).norm(dim=1)[:3]
    assert lengths[0].tolist() == pytest.approx([0.01 * 8**0.5] * 3)
    torch.testing.assert_close(*lengths)


@both_coordinates
def test_a_row_of_zeros_grows_along_the_ascent_where_the_base_maximizes(coordinates: str) -> None:
    model = zeroed()
    train(model, build(model, maximize=True, coordinates=coordinates), 1)
    cosines = nn.functional.cosine_similarity(rows(model[3]), model[3].weight.grad, dim=1)
    torch.testing.assert_close(cosines, torch.ones(7).double())


# ---- it learns as with the plain base


BASES: list[tuple[Any, dict[str, Any], float]] = [
    (torch.optim.SGD, {"momentum": 0.9}, 0.02),
    (torch.optim.SGD, {"momentum": 0.9}, 0.05),
    (torch.optim.SGD, {"momentum": 0.9}, 0.2),
    (torch.optim.Adam, {}, 1e-3),
    (torch.optim.Adam, {}, 1e-2),
    (torch.optim.RMSprop, {}, 1e-3),
    (torch.optim.RMSprop, {}, 1e-2),
]


def learn(model: nn.Module, optimizer: Any, steps: int) -> list[float]:
    """Return the losses on one batch."""
    return [train(model, optimizer, 1)[0].item() for _ in range(steps)]


@pytest.mark.parametrize("base, options, lr", BASES)
@pytest.mark.parametrize("make", [mlp, cnn])
def test_a_layer_of_zeros_learns_no_worse_than_under_the_plain_base(
    make: Any, base: Any, options: Any, lr: float
) -> None:
    model, plain = zeroed(make), zeroed(make)
    ours = learn(model, build(model, base, lr=lr, **options), 80)
    torchs = learn(plain, base(plain.parameters(), lr=lr, **options), 80)
    for step in (30, 79):
        progress = torchs[0] - torchs[step]
        assert ours[step] < torchs[step] + 0.05 * progress + 0.01


@pytest.mark.parametrize("turn", [1.0, 2.4])
def test_a_layer_of_zeros_learns_no_worse_with_a_turn_than_under_torchs_muon(turn: float) -> None:
    model, plain = zeroed(), zeroed()
    ours = learn(model, build(model, torch.optim.Muon, lr=1e-2, turn=turn), 80)
    matrices = [plain[0].weight, plain[3].weight]
    others = [plain[0].bias, plain[3].bias, *plain[6].parameters()]
    muon = torch.optim.Muon(matrices, lr=1e-2, weight_decay=0.0)
    adamw = torch.optim.AdamW(others, lr=1e-2, weight_decay=0.0)
    muon.register_step_post_hook(lambda *_: adamw.step())
    torchs = learn(plain, muon, 80)
    for step in (30, 79):
        assert ours[step] < torchs[step] + 0.01


def lora(seed: int) -> nn.Module:
    """Return an MLP with adapters, whose B starts at zero, and a head that is trained."""
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=4, target_modules=["0", "3"], modules_to_save=["6"])
    model = mlp(torch.float32)
    torch.manual_seed(seed)
    return peft.get_peft_model(model, config)


def make_adamw(model: nn.Module, lr: float) -> Any:
    trained = [p for p in model.parameters() if p.requires_grad]
    return torch.optim.AdamW(trained, lr=lr, weight_decay=0.0)


def make_ours(model: nn.Module, lr: float) -> Any:
    return build(model, torch.optim.AdamW, lr=lr)


def learn_with_lora(make: Any, lr: float) -> list[float]:
    """Return the losses of the start and after 30 and 100 steps, as means over four starts."""
    curves = []
    for seed in range(1, 5):
        model = lora(seed)
        losses = learn(model, make(model, lr), 100)
        curves.append([losses[step] for step in (0, 29, 99)])
    return torch.tensor(curves).mean(dim=0).tolist()


@pytest.mark.parametrize("lr", [1e-3, 1e-2, 3e-2])
def test_lora_learns_no_worse_than_under_adamw(lr: float) -> None:
    first, *ours = learn_with_lora(make_ours, lr)
    _, *torchs = learn_with_lora(make_adamw, lr)
    for found, expected in zip(ours, torchs, strict=True):
        assert found < expected + 0.02 * (first - expected)


def test_loras_a_and_b_are_units() -> None:
    names = make_ours(lora(0), 1e-2).param_groups[0]["param_names"]
    adapters = [name.split("lora_")[1] for name in names if "lora_" in name]
    assert adapters == ["A.default.weight", "B.default.weight"] * 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_zero_row_whose_gradients_stay_along_it_has_the_length_r(dtype: torch.dtype) -> None:
    """With one constant input, momentum goes along the row, and across it is rounding noise."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 3)).to(dtype)
    nn.init.zeros_(model[0].weight)
    optimizer = build(model, turn=2.4, lr=1e-2, momentum=0.9)
    x = torch.randn(1, 32, dtype=dtype)
    for _ in range(6):
        optimizer.zero_grad()
        (model(x) - 1).square().sum().backward()
        optimizer.step()
        r = optimizer.state[model[0].weight]["r"].abs()
        torch.testing.assert_close(model[0].weight.norm(dim=1), r, rtol=1e-3, atol=0)
