"""Nobody is overwritten: writes by others, zero rows, frozen and tied weights, types, layouts."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from plain_models import assert_same_weights, backward, build, cnn, mlp, rows, train
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters

BF16 = torch.bfloat16
KINDS = {
    "intrinsic": (torch.float64, {}),
    "float32": (torch.float32, {"momentum": 0.9}),
    "angles": (torch.float64, {"coordinates": "angles"}),
    "bfloat16": (BF16, {}),
    "bfloat16 angles": (BF16, {"coordinates": "angles"}),
    "turn": (torch.float64, {"turn": 2.0}),
}
every_kind = pytest.mark.parametrize("dtype, options", KINDS.values(), ids=list(KINDS))


def stop(optimizer: torch.optim.Optimizer) -> None:
    for group in optimizer.param_groups:
        group["lr"] = 0.0


# --- writes by others ---------------------------------------------------------------------------


def by_loading(model: nn.Module, new: nn.Module) -> None:
    model.load_state_dict(new.state_dict())


def by_new_data(model: nn.Module, new: nn.Module) -> None:
    for p, q in zip(model.parameters(), new.parameters(), strict=True):
        p.data = q.data.clone()


def by_copy(model: nn.Module, new: nn.Module) -> None:
    for p, q in zip(model.parameters(), new.parameters(), strict=True):
        p.data.copy_(q.data)


@torch.no_grad()
def by_init(model: nn.Module, new: nn.Module) -> None:
    for p, q in zip(model.parameters(), new.parameters(), strict=True):
        nn.init.zeros_(p).add_(q)


def by_a_vector(model: nn.Module, new: nn.Module) -> None:
    vector_to_parameters(parameters_to_vector(new.parameters()), model.parameters())


@every_kind
@pytest.mark.parametrize("write", [by_loading, by_new_data, by_copy, by_init, by_a_vector])
def test_writes_are_taken_up_and_never_undone(
    write: Callable[..., None], dtype: torch.dtype, options: dict[str, Any]
) -> None:
    model, new = mlp(dtype), mlp(dtype)
    for p in new.parameters():
        p.data += 0.1 * torch.randn_like(p)
    optimizer = build(model, **options)
    train(model, optimizer)
    write(model, new)
    rates = [group["lr"] for group in optimizer.param_groups]
    stop(optimizer)
    train(model, optimizer, steps=1, first=3)
    assert_same_weights(model, new)
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate
    train(model, optimizer, steps=1, first=4)
    moved = (model[0].weight - new[0].weight).abs().max()
    assert 0 < moved < 0.2  # from where the write has put it


@pytest.mark.parametrize("dtype, options", [KINDS["intrinsic"], KINDS["angles"]])
def test_after_a_write_the_step_starts_from_what_was_written(
    dtype: torch.dtype, options: dict[str, Any]
) -> None:
    """Without momentum, and with R as it was, the step is a fresh optimizer's."""
    model = mlp(dtype)
    optimizer = build(model, match=False, **options)
    train(model, optimizer)
    for p in model[:6].parameters():
        p.data.copy_(p.data * 0.7 + 0.05 * torch.randn_like(p))
    fresh = copy.deepcopy(model)
    train(model, optimizer, steps=2, first=3)
    train(fresh, build(fresh, match=False, **options), steps=2, first=3)
    assert_same_weights(model, fresh, 1e-12)


@pytest.mark.parametrize("name", [name for name in KINDS if name != "turn"])
def test_only_the_rows_written_to_are_taken_up(name: str) -> None:
    dtype, options = KINDS[name]
    model = mlp(dtype)
    optimizer = build(model, **options)
    train(model, optimizer)
    untouched, same = copy.deepcopy((model, optimizer))
    model[0].weight.data[2] *= 2
    train(model, optimizer, steps=1, first=3)
    backward(untouched, 3)
    untouched[0].weight.grad = model[0].weight.grad.clone()
    untouched[0].bias.grad = model[0].bias.grad.clone()
    same.step()
    others = [0, 1, 3, 4, 5, 6, 7]
    assert torch.equal(model[0].weight[others], untouched[0].weight[others])
    assert not torch.equal(model[0].weight[2], untouched[0].weight[2])


# --- zeros --------------------------------------------------------------------------------------


def lora_losses(make: Callable[[nn.Module], Any]) -> list[float]:
    peft, transformers = pytest.importorskip("peft"), pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=20, hidden_size=16, num_hidden_layers=1, num_attention_heads=2,
        intermediate_size=16, num_labels=3, hidden_dropout_prob=0.0,
    )  # fmt: skip
    plain = transformers.BertForSequenceClassification(config)
    lora = peft.LoraConfig(r=4, target_modules=["query", "value"], modules_to_save=["classifier"])
    model = peft.get_peft_model(plain, lora)
    optimizer, losses = make(model), []
    tokens = torch.randint(20, (16, 6))
    for _ in range(30):
        loss = model(tokens, labels=tokens[:, 0] % 3).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def test_lora_learns_as_under_adamw() -> None:
    def ours(model: nn.Module) -> Any:
        optimizer = build(model, torch.optim.AdamW, lr=1e-2)
        reasons = {k: v for k, v in optimizer._choice.plain.items() if "lora_B" in k}
        assert set(reasons.values()) == {"a row of zeros has no direction"}
        return optimizer

    found = lora_losses(ours)
    expected = lora_losses(lambda model: torch.optim.AdamW(model.parameters(), lr=1e-2))
    assert expected[-1] < expected[0] - 0.1
    assert abs(found[-1] - expected[-1]) < 0.1 * (expected[0] - expected[-1])


@every_kind
def test_a_pruned_row_stays_zero(dtype: torch.dtype, options: dict[str, Any]) -> None:
    model = mlp(dtype)
    optimizer = build(model, **options)
    train(model, optimizer)
    with torch.no_grad():
        model[0].weight[2] = 0
        model[0].bias[2] = 0
    before = rows(model[0])
    train(model, optimizer, steps=5, first=3)
    after = rows(model[0])
    assert not after[2].any() and after.isfinite().all()
    assert (after != before).any(dim=1).sum() == 7


def test_a_row_that_comes_back_from_zero_learns_again() -> None:
    model = mlp()
    optimizer = build(model)
    model[0].weight.data[2] = 0
    train(model, optimizer)
    model[0].weight.data[2] = 0.5
    before = rows(model[0])[2]
    train(model, optimizer, steps=1)
    assert 0 < (rows(model[0])[2] - before).abs().max() < 0.1


# --- frozen, missing and tied -------------------------------------------------------------------


@every_kind
def test_frozen_parameters_are_never_written(dtype: torch.dtype, options: dict[str, Any]) -> None:
    model = mlp(dtype)
    model[0].weight.requires_grad = False
    model[3].bias.requires_grad = False
    before = copy.deepcopy(model)
    optimizer = build(model, **options)
    train(model, optimizer)
    assert torch.equal(model[0].weight, before[0].weight)
    assert torch.equal(model[3].bias, before[3].bias)
    assert not torch.equal(model[0].bias, before[0].bias)
    assert not torch.equal(model[3].weight, before[3].weight)
    model[0].weight.requires_grad = model[3].bias.requires_grad = True
    frozen = copy.deepcopy(model)
    train(model, optimizer, steps=1, first=3)
    for p, q in zip(model.parameters(), frozen.parameters(), strict=True):
        assert 0 < (p - q).abs().max() < 0.3
    model[0].requires_grad_(False)
    frozen = copy.deepcopy(model)
    train(model, optimizer, first=4)
    assert_same_weights(model[0], frozen[0])


@every_kind
def test_parameters_without_a_gradient_are_left_out(
    dtype: torch.dtype, options: dict[str, Any]
) -> None:
    model = mlp(dtype)
    optimizer = build(model, **options)
    for step, missing in enumerate([("0.weight",), ("3.bias",), (), ("3.weight", "3.bias"), ()]):
        backward(model, step)
        before = {name: p.detach().clone() for name, p in model.named_parameters()}
        for name, p in model.named_parameters():
            p.grad = None if name in missing else p.grad
        optimizer.step()
        for name, p in model.named_parameters():
            assert torch.equal(p, before[name]) == (name in missing), (step, name)


def test_a_step_without_any_gradient_does_nothing() -> None:
    model = mlp()
    before = copy.deepcopy(model)
    build(model, torch.optim.Adam).step()
    assert_same_weights(model, before)


@pytest.mark.parametrize("coordinates", ["intrinsic", "angles"])
def test_tied_weights_are_one_set_of_units(coordinates: str) -> None:
    def tied() -> nn.Module:
        shared = nn.Linear(6, 6)
        model = nn.Sequential(shared, nn.Tanh(), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 3))
        model[2].weight, model[2].bias = shared.weight, shared.bias
        return model.double()

    class Looped(nn.Module):
        """The same function, with one layer that is called twice."""

        def __init__(self, model: nn.Module) -> None:
            super().__init__()
            self.inner, self.head = copy.deepcopy(model[0]), copy.deepcopy(model[4])

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.inner(self.inner(x).tanh()).tanh())

    model = tied()
    looped = Looped(model)
    optimizer = build(model, coordinates=coordinates, momentum=0.9)
    train(looped, build(looped, coordinates=coordinates, momentum=0.9), steps=5)
    train(model, optimizer, steps=5)
    assert model[0].weight is model[2].weight and str(optimizer).count(" lam ") == 1
    torch.testing.assert_close(model[2].weight, looped.inner.weight, rtol=1e-13, atol=1e-13)
    torch.testing.assert_close(model[2].bias, looped.inner.bias, rtol=1e-13, atol=1e-13)


# --- types and layouts --------------------------------------------------------------------------


@pytest.mark.parametrize("coordinates", ["intrinsic", "angles"])
def test_tiny_steps_add_up_in_bfloat16(coordinates: str) -> None:
    half, single = mlp(BF16), mlp(torch.float32)
    single.load_state_dict(half.state_dict())
    plain = copy.deepcopy(half)
    options = {"lr": 1e-4, "coordinates": coordinates}
    runs = [(half, build(half, **options)), (single, build(single, **options))]
    runs.append((plain, torch.optim.SGD(plain.parameters(), lr=1e-4)))
    g = torch.randn(8, 6)
    for model, optimizer in runs:
        model[0].weight.grad = g.to(model[0].weight.dtype)
        for _ in range(1000):
            optimizer.step()
    found, expected, lost = (rows(model[0]).float() for model, _ in runs)
    torch.testing.assert_close(found, expected, rtol=2e-2, atol=1e-2)
    assert (lost - expected).abs().max() > 5 * (found - expected).abs().max()


@every_kind
def test_a_step_that_gradscaler_skips_changes_nothing(
    dtype: torch.dtype, options: dict[str, Any]
) -> None:
    model, other = mlp(dtype), mlp(dtype)
    optimizer, same = build(model, **options), build(other, **options)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=100)
    for step in (0, 1, 2):
        backward(model, step, scaler.get_scale())
        if step == 1:
            model[3].weight.grad[0, 0] = torch.inf
        scaler.scale(torch.ones(()))
        scaler.step(optimizer)
        scaler.update()
    assert scaler.get_scale() == 4.0
    for step in (0, 2):
        train(other, same, steps=1, first=step)
    assert_same_weights(model, other)


@pytest.mark.parametrize("coordinates", ["intrinsic", "angles"])
def test_a_float16_model_trains_as_a_float32_one(coordinates: str) -> None:
    half, single = mlp(torch.float16), mlp(torch.float32)
    for model in (half, single):
        train(model, build(model, coordinates=coordinates, momentum=0.9), steps=20)
    for p, q in zip(half.parameters(), single.parameters(), strict=True):
        torch.testing.assert_close(p.float(), q, rtol=0.02, atol=0.02)


LAYOUTS = {
    "SGD": {"momentum": 0.9},
    "Adam": {"base": torch.optim.Adam, "lr": 1e-2},
    "angles": {"base": torch.optim.Adam, "lr": 1e-2, "coordinates": "angles"},
    "turn": {"turn": 2.0, "momentum": 0.9},
    "Muon": {"base": torch.optim.Muon, "turn": 2.0},
}


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("at", [0, 2, 4])
def test_the_memory_format_does_not_matter(name: str, at: int) -> None:
    """Channels_last from the start, or from one step on and back two steps later."""
    model, other = cnn(), cnn()
    optimizer, same = build(model, **LAYOUTS[name]), build(other, **LAYOUTS[name])
    for step in range(6):
        if step == at:
            other.to(memory_format=torch.channels_last)
        if at and step == at + 2:
            other.to(memory_format=torch.contiguous_format)
        train(model, optimizer, steps=1, first=step)
        train(other, same, steps=1, first=step)
        if step == at:
            assert not other[3].weight.is_contiguous()
    assert_same_weights(model, other, 5e-3 if name == "Muon" else 1e-12)


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("steps", [0, 3])
def test_the_models_type_may_change_after_building(name: str, steps: int) -> None:
    model, other = cnn(torch.float32), cnn(torch.float32)
    optimizer, same = build(model, **LAYOUTS[name]), build(other, **LAYOUTS[name])
    train(model, optimizer, steps)
    train(other, same, steps)
    model.double()
    train(model, optimizer, first=steps)
    train(other, same, first=steps)
    assert all(p.dtype == torch.float64 for p in model.parameters())
    for p, q in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(p.float(), q, rtol=0, atol=5e-3 if name == "Muon" else 1e-4)


def test_weights_that_are_views_of_one_buffer_train_alike() -> None:
    """As in a model whose parameters are slices of one flat tensor, unaligned ones too."""
    model, other = mlp(torch.float32), mlp(torch.float32)
    flat = torch.empty(1 + sum(p.numel() for p in other.parameters()))
    at = 1
    for p in other.parameters():
        flat[at : at + p.numel()] = p.data.flatten()
        p.data = flat[at : at + p.numel()].view_as(p)
        at += p.numel()
    for m in (model, other):
        train(m, build(m, momentum=0.9))
    assert_same_weights(model, other)
    assert torch.equal(flat[1:49].view(8, 6), other[0].weight)
