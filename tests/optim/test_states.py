"""States are saved and loaded without loss, and foreign ones are refused."""

import copy
import functools
import pickle
from typing import Any

import pytest
import torch
from plain_models import (
    KINDS,
    assert_same_training,
    assert_same_weights,
    backward,
    build,
    cnn,
    every_kind,
    find_angles,
    find_table,
    mlp,
    rms,
    rows,
    start,
    step_with_ones,
    through_a_file,
    train,
)
from torch import Tensor, nn
from torch.distributed.checkpoint import state_dict as dcp

from geoparam import GeometricOptimizer
from geoparam.optim.inner import fit_state


def assert_same_states(one: torch.optim.Optimizer, state: Any) -> None:
    found, expected = one.state_dict()["state"], state["state"]
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


def resume(way: str, model: nn.Module, optimizer: Any, fresh: tuple[Any, Any]) -> tuple[Any, Any]:
    """Return a copy of a model and its optimizer, made in a way."""
    if way == "deepcopy":
        return copy.deepcopy((model, optimizer))
    if way == "pickle":
        return pickle.loads(pickle.dumps((model, optimizer)))

    fresh[0].load_state_dict(model.state_dict())
    if way == "file":
        fresh[1].load_state_dict(state_dict=through_a_file(optimizer.state_dict()))
        return fresh
    options = dcp.StateDictOptions(flatten_optimizer_state_dict=way == "flat DCP")
    state = dcp.get_optimizer_state_dict(model, optimizer, options=options)
    dcp.set_optimizer_state_dict(*fresh, through_a_file(state), options=options)
    return fresh


def assert_goes_on(way: str, kind: str, make: Any) -> None:
    model, optimizer = start(kind, make)
    torch.optim.lr_scheduler.ConstantLR(optimizer, 1.0)  # it wraps `step`
    train(model, optimizer)
    new, resumed = resume(way, model, optimizer, start(kind, make))
    assert new[0].weight is not model[0].weight
    assert_same_states(resumed, optimizer.state_dict())
    assert_same_training((new, resumed), (model, optimizer))


@every_kind
def test_goes_on_bit_for_bit_from_a_file(kind: str) -> None:
    """The file is loaded with weights_only=True."""
    assert_goes_on("file", kind, mlp)


@pytest.mark.parametrize("kind", ["SGD", "Muon", "bfloat16 angles", "bfloat16 turn"])
@pytest.mark.parametrize("way", ["deepcopy", "pickle", "DCP", "flat DCP"])
def test_goes_on_bit_for_bit(way: str, kind: str) -> None:
    assert_goes_on(way, kind, cnn)


@pytest.mark.parametrize("kind", ["SGD", "Muon", "angles"])
def test_goes_on_from_a_state_without_steps(kind: str) -> None:
    (model, optimizer), (new, resumed) = start(kind), start(kind)
    resumed.load_state_dict(through_a_file(optimizer.state_dict()))
    assert_same_training((new, resumed), (model, optimizer))


def test_a_number_in_a_state_keeps_its_type() -> None:
    """NAdam's product of momenta is a float32 number beside float64 moments."""
    model, new = mlp(), mlp()
    optimizer, resumed = (build(m, torch.optim.NAdam, lr=0.01) for m in (model, new))
    train(model, optimizer)
    new.load_state_dict(model.state_dict())
    resumed.load_state_dict(through_a_file(optimizer.state_dict()))
    assert_same_training((new, resumed), (model, optimizer))


@pytest.mark.parametrize("wrap", [nn.DataParallel, torch.compile])
def test_a_state_saved_under_a_wrapper_is_loaded(wrap: Any) -> None:
    model, plain = mlp(), mlp()
    optimizer = build(wrap(model), momentum=0.9)
    train(model, optimizer)
    plain.load_state_dict(model.state_dict())
    resumed = build(plain, momentum=0.9)
    resumed.load_state_dict(optimizer.state_dict())
    assert_same_training((plain, resumed), (model, optimizer))


def test_groups_and_states_hold_plain_keys_and_values() -> None:
    model, optimizer = start("turn")
    train(model, optimizer)
    state = optimizer.state_dict()
    units, rest = state["param_groups"]
    expected = {"role": "units", "base": "SGD", "coordinates": "intrinsic", "match": True}
    expected |= {"turn": 2.0, "start_lr": 0.05}
    assert expected.items() <= units.items()
    expected = {"role": "rest", "rest": "SGD", "lr_ratio": 1.0, "scale_ratio": 1.0}
    assert expected.items() <= rest.items()
    keys = {"r", "length", "parts", "fan_in", "is_fixed"}
    keys |= {"r/momentum_buffer", "direction/momentum_buffer"}
    assert set(state["state"][0]) == keys


class InOrder(nn.Module):
    """Two layers and a head, registered in the order of their names."""

    def __init__(self, names: str) -> None:
        super().__init__()
        for name in names:
            setattr(self, name, nn.Linear(6, 6))
        self.head = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.b(self.a(x).tanh()).tanh())


def test_a_state_goes_on_in_a_model_of_another_order() -> None:
    model, other = InOrder("ab").double(), InOrder("ba").double()
    optimizer = build(model, torch.optim.Adam, lr=0.01)
    train(model, optimizer)
    other.load_state_dict(model.state_dict())
    resumed = build(other, torch.optim.Adam, lr=0.01)
    resumed.load_state_dict(through_a_file(optimizer.state_dict()))
    train(model, optimizer, 3, 5)
    train(other, resumed, 3, 5)
    for name, p in model.named_parameters():
        assert torch.equal(p, other.get_parameter(name))


def test_the_saved_turn_and_its_rate_count() -> None:
    model, optimizer = start("turn")
    train(model, optimizer)
    resumed = build(model, turn=5.0, lr=1.0, momentum=0.9)
    with pytest.warns(
        UserWarning, match="turn=2 at lr=0.05, not this optimizer's, turn=5 at lr=1"
    ):
        resumed.load_state_dict(through_a_file(optimizer.state_dict()))
    assert resumed.turn() == optimizer.turn() == [2.0]
    assert resumed.param_groups[0]["start_lr"] == 0.05


def test_weight_and_bias_of_two_precisions_go_on() -> None:
    model = mlp()
    model[0].bias.data = 0.1 * model[0].bias.data.float()
    optimizer = build(model, torch.optim.Adam, lr=0.01)
    for _ in range(2):
        optimizer.load_state_dict(optimizer.state_dict())
        step_with_ones(model, optimizer)
    assert optimizer.state[model[0].weight]["direction/step"] == 2


def test_a_layer_that_missed_a_step_does_not_part_the_others() -> None:
    layers = [nn.Linear(3, 3, bias=False) for _ in range(9)]
    model = nn.Sequential(*layers)
    optimizer = build(model, torch.optim.Adam, lr=0.01, turn=2.0)
    for step in range(3):
        for p in model.parameters():
            p.grad = torch.ones_like(p)
        if step == 1:
            model[0].weight.grad = None
        optimizer.step()
    assert [len(block.weights) for block in optimizer._built.blocks] == [8]
    states = [optimizer.state[layer.weight] for layer in layers[:8]]
    assert [int(state["direction/step"]) for state in states] == [2, *[3] * 7]


CHANGES = {
    "a large bias": lambda layer: layer.bias.data[2].fill_(9.0),
    "a pruned row": lambda layer: layer.weight.data[2].zero_(),
    "a layer of zeros": lambda layer: layer.weight.data.zero_(),
}


@pytest.mark.parametrize("kind", ["SGD", "angles", "turn"])
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("is_early", [False, True], ids=["later", "at the start"])
def test_values_never_decide_what_is_a_unit(kind: str, change: str, is_early: bool) -> None:
    """So weights may be loaded before the optimizer is built."""
    model, new = mlp(), mlp()
    if is_early:
        CHANGES[change](model[3])
    optimizer = build(model, **KINDS[kind])
    train(model, optimizer)
    if not is_early:
        CHANGES[change](model[3])
    new.load_state_dict(model.state_dict())
    resumed = build(new, **KINDS[kind])
    assert str(resumed) == str(optimizer)
    resumed.load_state_dict(through_a_file(optimizer.state_dict()))
    assert_same_training((new, resumed), (model, optimizer))


@pytest.mark.parametrize("count", [3, 9])
def test_a_layer_with_another_number_of_rows_starts_anew(count: int) -> None:
    model = mlp()
    optimizer = build(model, turn=2.0)
    train(model, optimizer)
    layer, head = model[3], model[6]
    layer.weight.data = torch.randn(count, 8).double()
    layer.bias.data = torch.zeros(count).double()
    head.weight.data = torch.randn(3, count).double()
    with pytest.raises(ValueError, match=f"model's has {count} of 8 .* another model's"):
        train(model, optimizer, first=3)

    optimizer.state.clear()
    before = rows(layer)
    train(model, optimizer, first=3, steps=1)
    assert rms(find_angles(before, rows(layer))) == pytest.approx(2.0)


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
    norm = functools.partial(nn.BatchNorm1d, affine=False)
    model, new = mlp(norm=norm), mlp(norm=norm)
    optimizer = build(model, momentum=0.9)
    train(model, optimizer)
    new.load_state_dict(model.state_dict())
    new[1].eval()
    resumed = build(new, momentum=0.9)
    assert find_table(resumed)["0.weight"].endswith("free")
    resumed.load_state_dict(optimizer.state_dict())
    assert find_table(resumed)["0.weight"].endswith("fixed")


def wider_mlp() -> nn.Sequential:
    model = mlp()
    model[0], model[3] = nn.Linear(6, 9), nn.Linear(9, 7)
    return model.double()


def ungrouped_cnn() -> nn.Sequential:
    model = cnn()
    model[3] = nn.Conv2d(6, 8, 3).double()
    return model


@pytest.mark.parametrize(
    "make, foreign, options, words",
    [
        (mlp, mlp, {"coordinates": "angles"}, "coordinates 'angles'.*'intrinsic'"),
        (mlp, mlp, {"turn": 2}, "turn 2.0; this optimizer's has None"),
        (mlp, mlp, {"match": False}, "match False"),
        (mlp, mlp, {"base": torch.optim.RMSprop}, "base 'RMSprop'"),
        (mlp, mlp, {"rest": torch.optim.RMSprop}, "rest 'RMSprop'"),
        (mlp, mlp, {"filter_fn": lambda module, name: name == "0"}, "3.weight"),
        (mlp, wider_mlp, {}, "'0.weight' has 9 units of fan-in 6"),
        (cnn, ungrouped_cnn, {}, "'3.weight' has 8 units of fan-in 54"),
        (mlp, mlp, {"split": {"3": (3, 4)}}, r"\[3, 4\] rows.* \[7\]. Give the same split="),
    ],
)
def test_the_state_of_another_setting_is_refused_and_changes_nothing(
    make: Any, foreign: Any, options: Any, words: str
) -> None:
    model, other = make(), foreign()
    optimizer = build(model, momentum=0.9)
    stranger = build(other, **{"momentum": 0.9, **options})
    train(model, optimizer)
    train(other, stranger)
    before, table = copy.deepcopy(optimizer.state_dict()), str(optimizer)
    with pytest.raises(ValueError, match=words):
        optimizer.load_state_dict(stranger.state_dict())
    assert_same_states(optimizer, before)
    assert before["param_groups"] == optimizer.state_dict()["param_groups"]
    assert table == str(optimizer)


def test_a_state_with_parts_of_other_sizes_is_refused() -> None:
    model, other = mlp(), mlp()
    optimizer = build(other, split={"3": (3, 4)})
    train(other, optimizer)
    with pytest.raises(ValueError, match=r"'3.weight' is divided into \[3, 4\] rows.* \[4, 3\]"):
        build(model, split={"3": (4, 3)}).load_state_dict(optimizer.state_dict())


@pytest.mark.parametrize("saved, wanted", [("free", "fixed"), ("fixed", "free")])
def test_a_state_of_another_scale_is_refused(saved: str, wanted: str) -> None:
    model, other = mlp(), mlp()
    optimizer = build(other, scale=saved)
    train(other, optimizer)
    with pytest.raises(ValueError, match=f"r of '0.weight' is {saved}; .* is {wanted}"):
        build(model, scale=wanted).load_state_dict(optimizer.state_dict())


def test_a_state_of_another_vocabulary_is_refused_and_changes_nothing() -> None:
    def build_with(count: int) -> tuple[nn.Module, Any]:
        model = mlp()
        model[6] = nn.Linear(7, count).double()
        return model, build(model, momentum=0.9)

    (model, optimizer), (other, stranger) = build_with(3), build_with(4)
    train(model, optimizer)
    train(other, stranger)
    before = copy.deepcopy(optimizer.state_dict())
    words = r"'6.bias' has momentum_buffer of shape \(4,\); the parameter's is \(3,\)"
    with pytest.raises(ValueError, match=words):
        optimizer.load_state_dict(stranger.state_dict())
    assert_same_states(optimizer, before)


def test_the_state_of_a_torch_optimizer_is_refused() -> None:
    model = mlp()
    plain = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ValueError, match="another optimizer.* start anew"):
        build(model).load_state_dict(plain.state_dict())


def test_a_state_of_the_first_version_is_refused() -> None:
    optimizer = build(mlp())
    state = optimizer.state_dict()
    for group in state["param_groups"]:
        group["geometry"] = "intrinsic"
    with pytest.raises(ValueError, match="saved by another optimizer or by geoparam 0.1"):
        optimizer.load_state_dict(state)


def test_a_state_of_another_depth_says_who_lacks_what() -> None:
    deeper = nn.Sequential(*mlp()[:3], nn.Linear(8, 8), *mlp()[3:])
    with pytest.raises(
        ValueError, match=r"lacks none; the optimizer's lacks 4.weight. Is the state another"
    ):
        build(nn.Sequential(*mlp())).load_state_dict(build(deeper).state_dict())


@pytest.mark.parametrize("damaged", [None, [], {}, {"state": {}}, {"param_groups": []}])
def test_what_is_no_state_is_refused(damaged: Any) -> None:
    with pytest.raises(ValueError, match="entries 'state' and 'param_groups'"):
        build(mlp()).load_state_dict(damaged)


@pytest.mark.parametrize("key", ["r", "length", "fan_in"])
def test_a_state_that_lacks_an_entry_is_refused(key: str) -> None:
    model = mlp()
    optimizer = build(model)
    train(model, optimizer, 1)
    state = copy.deepcopy(optimizer.state_dict())
    del state["state"][0][key]
    with pytest.raises(ValueError, match="'0.weight' lacks 'r', 'length' or 'fan_in'"):
        optimizer.load_state_dict(state)


@pytest.mark.parametrize("on_device", [False, True])
@pytest.mark.parametrize("r_on_device", [False, True])
def test_a_state_follows_its_parameter_and_its_steps_if_asked(
    on_device: bool, r_on_device: bool
) -> None:
    """Also the state of a single number, which looks like a counter."""
    p = nn.Parameter(torch.zeros((), device="meta", dtype=torch.float64))
    state = {"exp_avg": torch.zeros(()), "r": torch.zeros(2)}
    state.update({"step": torch.ones(()), "r/step": torch.ones(())})
    fit_state(state, p, on_device, r_on_device)
    are_moved = [True, True, on_device, r_on_device]
    assert [entry.is_meta for entry in state.values()] == are_moved
    assert (state["step"].dtype, state["r"].dtype) == (torch.float32, torch.float64)


def test_whether_kernels_are_fused_is_not_loaded() -> None:
    """A state of a GPU has True, and fused kernels of CPUs misread strided gradients."""
    model, optimizer = start("Muon")
    train(model, optimizer, 1)
    state = copy.deepcopy(optimizer.state_dict())
    before = optimizer.param_groups[1]["fused"]
    state["param_groups"][1]["fused"] = True
    optimizer.load_state_dict(state)
    assert optimizer.param_groups[1]["fused"] is before is not True


@pytest.mark.parametrize("kind", ["SGD", "angles", "bfloat16"])
def test_a_state_that_is_moved_away_and_back_stays_that_of_the_weights(kind: str) -> None:
    """As where states are offloaded between steps: entries are replaced by copies."""
    make = functools.partial(build, coordinates="angles" if kind == "angles" else "intrinsic")
    dtype = torch.bfloat16 if kind == "bfloat16" else torch.float32
    torch.manual_seed(0)
    model = mlp().to(dtype)
    optimizer = make(model, lr=0.1)
    for _ in range(3):
        step_with_ones(model, optimizer)
        for state in optimizer.state.values():
            for key, entry in state.items():
                state[key] = entry.clone() if isinstance(entry, Tensor) else entry

    step_with_ones(model, optimizer)
    for p, state in optimizer.state.items():
        if "r" in state:
            weight = state.get("master", p)
            torch.testing.assert_close(state["r"].abs(), weight.norm(dim=1))


@pytest.mark.parametrize("kind", ["SGD", "Adam", "Muon", "angles", "turn"])
@pytest.mark.parametrize("change", ["channels_last", "double", "transposed gradients"])
def test_layout_and_type_may_change_in_mid_run(change: str, kind: str) -> None:
    def make(_: Any) -> nn.Module:
        return cnn(torch.float32)

    (model, optimizer), (other, same) = start(kind, make), start(kind, make)
    for step in range(6):
        is_changed = 2 <= step < 4
        if change == "channels_last":
            layout = torch.channels_last if is_changed else torch.contiguous_format
            other.to(memory_format=layout)
        if change == "double" and step == 2:
            other.double()
        train(model, optimizer, 1, step)
        backward(other, step)
        if change == "transposed gradients" and is_changed:
            for p in other.parameters():
                p.grad = p.grad.movedim(0, -1).contiguous().movedim(-1, 0)
        same.step()
    assert_same_weights(model.double(), other.double(), 2e-2 if kind == "Muon" else 1e-4)


def lay_out_anew(model: nn.Module, layout: str) -> None:
    if layout == "channels_last":
        model.to(memory_format=torch.channels_last)
        return
    for p in model.parameters():
        with_gaps = p.data.repeat_interleave(2, dim=-1)
        p.data = with_gaps[..., ::2]


@pytest.mark.parametrize("kind", ["SGD", "Adam", "Muon"])
@pytest.mark.parametrize("layout", ["channels_last", "with gaps"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_may_be_laid_out_anew_in_mid_run(
    kind: str, layout: str, dtype: torch.dtype
) -> None:
    """Masters and moments keep the layout of before."""

    def make(_: Any) -> nn.Module:
        return cnn(torch.float64).to(dtype)

    (model, optimizer), (other, same) = start(kind, make), start(kind, make)
    train(model, optimizer, 2)
    train(other, same, 2)
    lay_out_anew(other, layout)
    train(model, optimizer, 2, 2)
    train(other, same, 2, 2)
    bound = {torch.float32: 1e-4, torch.bfloat16: 2e-2}[dtype]
    assert_same_weights(model.double(), other.double(), 2e-2 if kind == "Muon" else bound)


def test_a_model_may_become_half_precision_in_mid_run() -> None:
    model = mlp(torch.float32)
    optimizer = build(model, torch.optim.Adam, lr=0.01)
    train(model, optimizer)
    train(model.bfloat16(), optimizer)
    head = optimizer.state[model[6].weight]
    assert head["exp_avg"].dtype == torch.bfloat16
    units = optimizer.state[model[3].weight]
    assert units["master"].dtype == units["direction/exp_avg"].dtype == torch.float32


@pytest.mark.parametrize("base", [torch.optim.SGD, torch.optim.AdamW, torch.optim.Muon])
@pytest.mark.parametrize("saved", [torch.bfloat16, torch.float32])
def test_a_state_loads_into_a_model_of_another_type(base: Any, saved: torch.dtype) -> None:
    other = torch.float32 if saved == torch.bfloat16 else torch.bfloat16

    def build(dtype: torch.dtype) -> tuple[nn.Module, GeometricOptimizer]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Embedding(9, 8), nn.Linear(8, 8), nn.LayerNorm(8))
        model = nn.Sequential(*model, nn.Linear(8, 9)).to(dtype)
        return model, GeometricOptimizer(model, base, turn=2.4, lr=1e-2, rest=torch.optim.AdamW)

    def step(model: nn.Module, optimizer: GeometricOptimizer) -> None:
        model(torch.arange(9)).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    model, optimizer = build(saved)
    step(model, optimizer)
    loaded, resumed = build(other)
    loaded.load_state_dict(model.state_dict())
    resumed.load_state_dict(optimizer.state_dict())
    step(loaded, resumed)
    for p in loaded.parameters():
        for key, entry in resumed.state[p].items():
            if "/" not in key and key.startswith("exp_avg"):
                assert entry.dtype == other
    assert all(p.isfinite().all() for p in loaded.parameters())
