"""States are saved and loaded without loss; weights may be written, frozen or zero meanwhile."""

import copy
import functools
import io
import pickle
from typing import Any

import plain_models as pm
import pytest
import torch
from plain_models import assert_same_weights, backward, build, cnn, mlp, rows, start, train
from torch import nn
from torch.distributed.checkpoint import state_dict as dcp
from torch.nn.utils import parameters_to_vector as to_vector
from torch.nn.utils import vector_to_parameters as to_parameters

import geoparam as gp
from geoparam.optim.inner import fit_state


def through_a_file(state: Any) -> Any:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def assert_same_states(one: torch.optim.Optimizer, state: Any) -> None:
    torch.testing.assert_close(one.state_dict()["state"], state["state"], rtol=0, atol=0)


def copied(way: str, model: nn.Module, optimizer: Any, fresh: tuple[Any, Any]) -> tuple[Any, Any]:
    if way in ("deepcopy", "pickle"):
        both = model, optimizer
        return copy.deepcopy(both) if way == "deepcopy" else pickle.loads(pickle.dumps(both))
    fresh[0].load_state_dict(model.state_dict())
    if way == "file":
        fresh[1].load_state_dict(state_dict=through_a_file(optimizer.state_dict()))
    else:
        options = dcp.StateDictOptions(flatten_optimizer_state_dict=way == "flat DCP")
        state = dcp.get_optimizer_state_dict(model, optimizer, options=options)
        dcp.set_optimizer_state_dict(*fresh, through_a_file(state), options=options)
    return fresh


@pm.every_kind
@pytest.mark.parametrize("make", [mlp, cnn])
@pytest.mark.parametrize("way", ["deepcopy", "pickle", "file", "DCP", "flat DCP"])
def test_goes_on_bit_for_bit(way: str, make: Any, kind: str) -> None:
    model, optimizer = start(kind, make)
    torch.optim.lr_scheduler.ConstantLR(optimizer, 1.0)  # it wraps `step`
    train(model, optimizer)
    new, resumed = copied(way, model, optimizer, start(kind, make))
    assert new[0].weight is not model[0].weight
    assert_same_states(resumed, optimizer.state_dict())
    pm.assert_same_training((new, resumed), (model, optimizer))


def test_weight_and_bias_of_two_precisions_go_on() -> None:
    model = mlp()
    model[0].bias.data = 0.1 * model[0].bias.data.float()
    optimizer = build(model, torch.optim.Adam, lr=0.01)
    for _ in range(2):
        for p in model.parameters():
            p.grad = torch.ones_like(p)
        optimizer.load_state_dict(optimizer.state_dict())
        optimizer.step()
    assert optimizer.state[model[0].weight]["direction/step"] == 2


def test_an_error_on_the_way_into_a_step_leaves_all_weights(monkeypatch: Any) -> None:
    model, optimizer = start("SGD")
    train(model, optimizer)
    before, enter = copy.deepcopy(model), Stage.enter
    optimizer._stages.append(broken := copy.copy(optimizer._stages[0]))
    optimizer._signature = optimizer._compute_signature()
    monkeypatch.setattr(Stage, "enter", lambda self: 1 / 0 if self is broken else enter(self))
    with pytest.raises(ZeroDivisionError):
        optimizer.step()
    torch.testing.assert_close(to_vector(model.parameters()), to_vector(before.parameters()))


def test_a_layer_that_missed_a_step_does_not_part_the_others() -> None:
    model = nn.Sequential(*(nn.Linear(3, 3, bias=False) for _ in range(9)))
    optimizer = build(model, torch.optim.Adam, lr=0.01, turn=2.0)
    optimizer.param_groups[0]["lr"] = torch.tensor([2.0], dtype=torch.float64)
    for step in range(3):
        for p in model.parameters():
            p.grad = None if step == 1 and p is model[0].weight else torch.ones_like(p)
        optimizer.step()
    assert [len(stage.members) for stage in optimizer._stages] == [8]
    steps = [optimizer.state[p] for p in model.parameters()]
    assert [int(state["direction/step"]) for state in steps[:8]] == [2, *[3] * 7]
    assert all(p.isfinite().all() for p in model.parameters())


@pytest.mark.parametrize(
    "kind, case", [("SGD", "bias"), ("angles", "bias"), ("SGD", "first row"), ("SGD", "last row")]
)
def test_weights_may_be_loaded_before_the_optimizer_is_built(kind: str, case: str) -> None:
    """A bias that has outgrown its row stays a distance, a row that was pruned stays a unit's.

    LoRA's B starts at zero and stays plain.
    """
    model, new = mlp(), mlp()
    model[3].weight.data[1] *= case != "first row"
    optimizer = build(model, **pm.KINDS[kind])
    train(model, optimizer)
    model[3].weight.data[1] *= case != "last row"
    model[0].bias.data[2] += 5.0 * (case == "bias")
    new.load_state_dict(model.state_dict())
    resumed = build(new, **pm.KINDS[kind])
    words = " plain " if case == "bias" else "a row of zeros has no direction"
    found = [words in str(each) for each in (optimizer, resumed)]
    assert found == [case == "first row", case != "first row"]
    resumed.load_state_dict(through_a_file(optimizer.state_dict()))
    pm.assert_same_training((new, resumed), (model, optimizer))


@pytest.mark.parametrize("name", ["odd name", "far"])
def test_what_values_leave_plain_now_may_have_been_units_when_it_was_saved(name: str) -> None:
    model, new = (nn.ModuleDict({name: mlp()}) for _ in range(2))
    optimizer, layer = build(model, match=False), model[name][3]
    backward(model[name])
    optimizer.step()
    row, bias = layer.weight.data[1], layer.bias.data[1]
    bias.copy_(200 * row.norm()) if name == "far" else row.copy_(bias.zero_())
    new.load_state_dict(model.state_dict())
    resumed = build(new, match=False)
    assert "3.weight" not in str(optimizer).partition("  plain\n")[2]
    assert "3.weight" in str(resumed).partition("  plain\n")[2]
    resumed.load_state_dict(through_a_file(optimizer.state_dict()))
    assert str(resumed) == str(optimizer)


@pytest.mark.parametrize("rows", [3, 9])
def test_a_layer_with_another_number_of_rows_starts_anew(rows: int) -> None:
    model = mlp()
    optimizer = build(model, turn=2.0)
    train(model, optimizer)
    layer, head = model[3], model[6]
    layer.weight.data, layer.bias.data = torch.randn(rows, 8).double(), torch.zeros(rows).double()
    head.weight.data = torch.randn(len(head.weight), rows).double()
    with pytest.raises(ValueError, match=f"model's has {rows} of 8. Delete a weight's state"):
        train(model, optimizer, first=3)
    optimizer.state.clear()
    before = layer.weight.detach().clone()
    train(model, optimizer, first=3, steps=1)
    angle = gp.sphere.angle_between(before, layer.weight.detach()).square().mean().sqrt()
    assert torch.rad2deg(angle).item() == pytest.approx(2.0)


def test_a_default_device_does_not_matter() -> None:
    model, other = mlp(), mlp()
    train(model, build(model))
    optimizer = build(other)
    for step in range(3):
        backward(other, step)
        with torch.device("meta"):
            optimizer.step()
    assert_same_weights(model, other)


def test_a_scale_that_was_held_stays_held_whatever_the_models_mode() -> None:
    model, new = (mlp(norm=functools.partial(nn.BatchNorm1d, affine=False)) for _ in range(2))
    optimizer = build(model, momentum=0.9)
    train(model, optimizer)
    new.load_state_dict(model.state_dict())
    new[1].eval()
    resumed = build(new, momentum=0.9)
    assert str(resumed).count("fixed") == 1
    resumed.load_state_dict(optimizer.state_dict())
    assert str(resumed).count("fixed") == 2


PRUNED = nn.Linear(8, 7).double()
PRUNED.weight.data[1] = 0.0


@pytest.mark.parametrize(
    "make, layers, options, words",
    [
        (mlp, {}, {"coordinates": "angles"}, "angles.*intrinsic"), (mlp, {}, {"turn": 2}, "turn"),
        (mlp, {}, {"match": False}, "match"), (mlp, {}, {"base": torch.optim.RMSprop}, "RMSprop"),
        (mlp, {3: PRUNED}, {"base": torch.optim.RMSprop}, "RMSprop"),
        (mlp, {}, {"filter_fn": lambda module, name: name == "0"}, "3.weight"),
        (mlp, {0: nn.Linear(6, 9).double(), 3: nn.Linear(9, 7).double()}, {}, "'0.weight'"),
        (cnn, {3: nn.Conv2d(6, 8, 3).double()}, {}, "'3.weight'"),
        (mlp, {}, None, "another optimizer.* start anew"),
    ],
)  # fmt: skip
def test_a_foreign_state_is_refused(make: Any, layers: Any, options: Any, words: str) -> None:
    model, other = make(), make()
    for i, layer in layers.items():
        other[i] = layer
    plain: Any = torch.optim.SGD(other.parameters(), momentum=0.9)
    foreign = plain if options is None else build(other, momentum=0.9, **options)
    optimizer = build(model, momentum=0.9)
    train(model, optimizer)
    train(other, foreign)
    before, table = copy.deepcopy(optimizer.state_dict()), str(optimizer)
    with pytest.raises(ValueError, match=words):
        optimizer.load_state_dict(foreign.state_dict())
    assert_same_states(optimizer, before)
    assert before["param_groups"] == optimizer.state_dict()["param_groups"]
    assert table == str(optimizer)


def test_a_damaged_state_is_refused_in_a_sentence() -> None:
    model = mlp()
    optimizer = build(model)
    train(model, optimizer, 1)
    state = optimizer.state_dict()
    for damaged in (None, [], {}, {"state": {}}, {"param_groups": []}):
        with pytest.raises(ValueError, match="entries 'state' and 'param_groups'"):
            optimizer.load_state_dict(damaged)
    for key in ("r", "length", "fan_in"):
        less = {**state, "state": {**state["state"], 0: {**state["state"][0], key: None}}}
        with pytest.raises(ValueError, match="lacks 'r', 'length' or 'fan_in'"):
            optimizer.load_state_dict(less)
    optimizer.load_state_dict(state)


@pm.every_kind
@pytest.mark.parametrize(
    "write, is_whole",
    [
        (lambda m, new: m.load_state_dict(new.state_dict()), True),
        (lambda m, new: to_parameters(to_vector(new.parameters()), m.parameters()), True),
        (lambda p, q: setattr(p, "data", q.data.clone()), False),
        (lambda p, q: p.data.copy_(q.data), False),
        (lambda p, q: nn.init.zeros_(p).add_(q), False),
    ],
)  # fmt: skip
def test_writes_are_taken_up_and_never_undone(write: Any, is_whole: bool, kind: str) -> None:
    (model, optimizer), (new, _) = start(kind), start(kind)
    train(model, optimizer)
    for p in new.parameters():
        p.data += 0.1 * torch.randn_like(p)
    pairs = zip(model.parameters(), new.parameters(), strict=True)
    with torch.no_grad():
        for one, other in [(model, new)] if is_whole else pairs:
            write(one, other)
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    train(model, optimizer, 1, first=3)
    assert_same_weights(model, new)


@pm.both_coordinates
def test_after_a_write_the_step_is_a_fresh_optimizers(coordinates: str) -> None:
    model, options = mlp(), {"match": False, "coordinates": coordinates}
    optimizer = build(model, **options)
    train(model, optimizer)
    train(model, torch.optim.SGD(model.parameters(), lr=0.5), first=3)
    fresh = copy.deepcopy(model)
    train(model, optimizer, first=6)
    train(fresh, build(fresh, **options), first=6)
    assert_same_weights(model, fresh, 1e-12)


def test_lora_learns_as_under_adamw() -> None:
    """Its B starts at zero: such rows have no direction and stay with the rest."""
    peft, curves = pytest.importorskip("peft"), []
    for is_ours in (False, True):
        lora = peft.LoraConfig(r=4, target_modules=["0", "3"], modules_to_save=["6"])
        model = peft.get_peft_model(mlp(torch.float32), lora)
        optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-2)
        optimizer = build(model, torch.optim.AdamW, lr=1e-2) if is_ours else optimizer
        for _ in range(30):
            curves += train(model, optimizer, 1)
    assert str(optimizer).count("a row of zeros has no direction") == 2
    assert abs(curves[59] - curves[29]) < 0.1 * (curves[0] - curves[29])


@pm.every_kind
def test_a_pruned_row_stays_zero_and_the_others_go_on_as_they_were(kind: str) -> None:
    model, optimizer = start(kind)
    train(model, optimizer)
    other, same = copy.deepcopy((model, optimizer))
    model[0].weight.data[2] = 0
    backward(model, 3)
    for p, q in zip(model.parameters(), other.parameters(), strict=True):
        q.grad = p.grad.clone()
    optimizer.step()
    same.step()
    is_equal = (model[0].weight == other[0].weight).all(dim=1).tolist()
    assert is_equal == [row != 2 for row in range(8)] or kind == "Muon" or "turn" in kind
    assert not model[0].weight[2].any()
    model[0].weight.data[2] = 0.5
    train(model, optimizer, 1)
    assert 0 < (rows(model[0])[2] - 0.5).abs().max() < 0.2


@pm.every_kind
def test_a_layer_that_is_zero_at_its_first_step_stays_zero_and_finite(kind: str) -> None:
    model, optimizer = start(kind)
    nn.init.zeros_(model[3].weight)
    train(model, optimizer)
    assert not model[3].weight.any() and all(p.isfinite().all() for p in model.parameters())


@pm.every_kind
@pytest.mark.parametrize("dtype, tiny", [(torch.float32, 1e-41), (torch.float64, 1e-310)])
def test_a_tiny_row_does_no_harm(kind: str, dtype: torch.dtype, tiny: float) -> None:
    model, optimizer = start(kind)
    model.to(dtype)
    model[0].weight.data[2] = tiny
    train(model, optimizer)
    assert all(p.isfinite().all() for p in model.parameters())


@pm.both_coordinates
def test_a_bias_far_out_or_of_a_pruned_row_steps_as_a_plain_one(coordinates: str) -> None:
    model = mlp()
    optimizer = build(model, coordinates=coordinates)
    train(model, optimizer)
    model[0].weight.data[2], model[0].bias.data[3] = 0.0, 9.0
    before = model[0].bias.detach().clone()
    train(model, optimizer, 1)
    plain = before - 0.05 * model[0].bias.grad
    torch.testing.assert_close(model[0].bias.detach()[2:4], plain[2:4])


@pm.every_kind
def test_what_is_frozen_or_has_no_gradient_is_never_written(kind: str) -> None:
    model, optimizer = start(kind)
    for step, text in enumerate(["0.weight", "3.bias", "", "3.weight 3.bias", "", "0.bias", ""]):
        before, names = copy.deepcopy(model.state_dict()), text.split()
        for name, p in model.named_parameters():
            p.requires_grad = step % 2 == 0 or name not in names  # frozen every other time
        backward(model, step)
        for name, p in model.named_parameters():
            p.grad = None if name in names else p.grad
        optimizer.step()
        for name, p in model.named_parameters():
            assert torch.equal(p, before[name]) == (name in names), (step, name)


@pytest.mark.parametrize("scale", ["fixed", "free"])
@pm.every_kind
def test_units_at_rate_0_stay_bit_for_bit(kind: str, scale: str) -> None:
    """Where r is free, the rest's rate is 0 too: it is that of r."""
    model, optimizer = start(kind, scale=scale)
    train(model, optimizer)
    before = copy.deepcopy(model.state_dict())
    for group in optimizer.param_groups[: 1 if scale == "fixed" else None]:
        group["lr"] = 0.0
    train(model, optimizer, first=3)
    assert all(torch.equal(model[i].weight, before[f"{i}.weight"]) for i in (0, 3))
    assert torch.equal(model[6].weight, before["6.weight"]) == (scale == "free")


@pm.both_coordinates
def test_tiny_steps_add_up_in_half_precision_beside_other_types(coordinates: str) -> None:
    first, types = nn.Linear(6, 5).bfloat16(), (torch.bfloat16, torch.float16, torch.float32)
    layers = nn.ModuleList([copy.deepcopy(first).to(dtype) for dtype in types])
    alone, plain = copy.deepcopy(layers), copy.deepcopy(layers)
    options = {"lr": 4e-4, "filter_fn": lambda *_: True, "coordinates": coordinates}
    optimizers: list[Any] = [build(m, **options) for m in (layers, *alone)]
    optimizers.append(torch.optim.SGD(plain.parameters(), lr=4e-4))
    for p in [*layers.parameters(), *alone.parameters(), *plain.parameters()]:
        p.grad = torch.ones_like(p)
    for _ in range(250):
        for optimizer in optimizers:
            optimizer.step()
    assert_same_weights(layers, alone)
    assert all((layer.weight - layers[2].weight).abs().max() < 0.01 for layer in layers)
    assert (plain[0].weight - layers[2].weight).abs().max() > 0.05


@pytest.mark.parametrize("on_device", [False, True])
def test_a_state_follows_its_parameter_to_a_device_and_its_step_if_asked(on_device: bool) -> None:
    """Also the state of a single number, which looks like a counter."""
    p = nn.Parameter(torch.zeros((), device="meta", dtype=torch.float64))
    state = {"exp_avg": torch.zeros(()), "step": torch.ones(()), "r": torch.zeros(2)}
    fit_state(state, p, on_device)
    assert [state[key].is_meta for key in state] == [True, on_device, True]
    assert (state["step"].dtype, state["r"].dtype) == (torch.float32, torch.float64)


@pytest.mark.parametrize("kind", ["SGD", "Adam", "Muon", "angles", "turn"])
@pytest.mark.parametrize("change", ["channels_last", "double", "transposed gradients"])
@pytest.mark.parametrize("at", [0, 2])
def test_layout_and_type_may_change_in_mid_run(change: str, kind: str, at: int) -> None:
    (model, optimizer), (other, same) = (start(kind, lambda _: cnn(torch.float32)) for _ in "ab")
    for step in range(6):
        if change == "channels_last":  # for two steps, and back
            is_last = at <= step < at + 2
            other.to(memory_format=torch.channels_last if is_last else torch.contiguous_format)
        train(model, optimizer, 1, step)
        backward(other.double() if change == "double" and step >= at else other, step)
        if change == "transposed gradients":
            for p in other.parameters():
                p.grad = p.grad.movedim(0, -1).contiguous().movedim(-1, 0)
        same.step()
    assert_same_weights(model.double(), other.double(), 2e-2 if kind == "Muon" else 1e-4)
