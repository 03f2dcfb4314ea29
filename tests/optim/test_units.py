"""What is a unit, what stays plain, what is said about it; groups, bases and bad input."""

import copy
import functools
import math
import re
from typing import Any

import pytest
import torch
from function_model import FunctionModel
from plain_models import assert_same_weights, backward, both_coordinates, build, mlp, train
from torch import nn
from torch.nn.utils import prune
from torch.nn.utils.parametrizations import weight_norm

import geoparam as gp


def test_the_table_says_what_is_a_unit_and_what_stays_plain() -> None:
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten())
    model.extend([nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, 8), nn.Linear(8, 2)])
    model[4].bias.data[3] = 9.0  # more than the row's length: too far for a distance
    model[6].weight.data[1] = 0.0
    lines = str(build(model)).splitlines()
    assert lines[0].endswith("SGD; rest SGD): 164 of 274 parameters are units")
    found = {line.split()[0]: " ".join(line.split()[1:]) for line in lines[2:]}
    expected = "4 9 lam fixed, 1 follows", "8 16 plain free"
    assert (found["0.weight"], found["4.weight"]) == expected
    assert "zeros has no direction" in found["6.weight"] and "output" in found["7.weight"]


def test_the_table_names_turn_and_counts_no_frozen_layer() -> None:
    model = mlp()
    model[0].requires_grad_(False)
    title, *lines = str(build(model, turn=2.4, max_turn=9)).splitlines()
    assert "(intrinsic, turn 2.4, max_turn 9, SGD; rest SGD): 56 of 143 parameters" in title
    assert lines[2] == "  plain" and "0.weight" in lines[-1] and "frozen" in lines[-1]


def test_weights_that_share_memory_stay_plain() -> None:
    """A step scales rows in place: on shared memory the second would start from the first's."""
    model = nn.Sequential(nn.Linear(6, 4, bias=False), nn.Linear(4, 6), nn.Linear(6, 5), mlp())
    model[1].weight.data = model[0].weight.data.t()
    flat = torch.randn(60, dtype=torch.float64)
    model[2].weight.data = flat[:30].view(5, 6)  # parts of one memory are no ties
    optimizer = build(model)
    assert "0.weight                                 shares memory with 1.weight" in str(optimizer)
    assert "  2.weight                                      5      6  lam" in str(optimizer)


@both_coordinates
def test_tied_weights_are_one_set_of_units(coordinates: str) -> None:
    layer = nn.Linear(6, 6)
    looped = nn.Sequential(layer, nn.Tanh(), layer, nn.Tanh(), nn.Linear(6, 3)).double()
    tied = copy.deepcopy(looped)
    tied[2] = nn.Linear(6, 6)
    tied[2].weight, tied[2].bias = tied[0].weight, tied[0].bias
    for model in (tied, looped):
        optimizer = build(model, coordinates=coordinates, momentum=0.9)
        train(model, optimizer)
        assert str(optimizer).count(" lam ") == 1
    assert_same_weights(tied, looped, 1e-13)


def test_a_frozen_teacher_is_not_the_output_layer() -> None:
    model = nn.ModuleDict({"student": mlp(), "teacher": mlp().requires_grad_(False)})
    for wrapped in (model, nn.DataParallel(model), torch.compile(model), nn.ModuleList([model])):
        assert re.search(r"student\.6\.weight +the output layer", str(build(wrapped)))
    state = build(model).state_dict()
    build(torch.compile(model)).load_state_dict(state)
    head = mlp()
    stack = nn.ModuleDict({"blocks": nn.Sequential(mlp(), mlp().requires_grad_(False))})
    assert re.search(r"blocks\.1\.6\.weight +the output layer", str(build(stack)))
    head[6].requires_grad_(False)
    assert "6.weight                                 the output layer" in str(build(head))


def test_filter_fn_gets_the_names_of_the_model_inside_of_a_wrapper() -> None:
    optimizer = build(torch.compile(mlp()), filter_fn=lambda _, name: name != "6")
    assert re.search(r"\n  6\.weight +filter_fn", str(optimizer))


@pytest.mark.parametrize("change", [weight_norm, lambda e: prune.identity(e, "weight")])
def test_an_embedding_whose_weight_is_computed_stays_plain(change: Any) -> None:
    model = nn.Sequential(change(nn.Embedding(10, 6)), mlp())
    assert re.search(r"0\..*orig\S* +not in a known layer", str(build(model)))


def test_groups_do_not_share_a_rate_in_a_tensor() -> None:
    optimizer = build(mlp(), lr=torch.tensor(0.1))
    optimizer.add_param_group({"params": nn.Parameter(torch.ones(2))})
    for group in optimizer.param_groups:
        group["lr"] *= 0.5
    assert [float(group["lr"]) for group in optimizer.param_groups] == pytest.approx([0.05] * 3)


def test_instance_norm_fixes_r_in_evaluation_mode_too() -> None:
    norms = nn.InstanceNorm1d(8), nn.BatchNorm1d(8, affine=False)
    for norm in norms:
        model = nn.Sequential(nn.Conv1d(6, 8, 1), norm, nn.ReLU(), nn.Conv1d(8, 3, 1)).eval()
        assert "fixed, 1 follows" in str(build(model))


def test_long_names_do_not_break_the_tables_columns() -> None:
    title, *lines = str(build(nn.ModuleDict({"long" * 11: mlp(), "b": mlp()}))).splitlines()[1:]
    units = [line for line in lines if line.endswith(" free")]
    assert {line.rindex(" free") for line in units} == {title.rindex(" scale")} and len(units) > 3


def test_a_frozen_norm_leaves_r_free_and_only_a_neighbour_fixes_it() -> None:
    frozen = mlp(norm=nn.BatchNorm1d)
    frozen[1].eval().requires_grad_(False)
    assert "0.weight                                      8      6  lam    free" in str(
        build(frozen)
    )
    apart = nn.Sequential(nn.Sequential(nn.Linear(6, 8)), nn.BatchNorm1d(8), nn.Linear(8, 3))
    assert "follows" not in str(build(apart))
    assert "fixed, 1 follows" in str(build(apart, example_inputs=torch.randn(4, 6)))


def test_layers_that_do_not_run_are_judged_by_their_order() -> None:
    layers = {"a": nn.Linear(6, 8), "out": nn.Linear(8, 3), "aux": nn.Linear(8, 4)}
    layers |= {"norm": nn.BatchNorm1d(4), "aux_out": nn.Linear(4, 3)}
    model = FunctionModel(lambda m, x: m.out(m.a(x).relu()), **layers)
    table = str(build(model, example_inputs=torch.randn(4, 6)))
    assert "fixed, norm follows" in table and re.search("aux_out.weight +the output", table)


@both_coordinates
@pytest.mark.parametrize("is_traced", [False, True])
def test_all_kinds_of_layers_have_units(coordinates: str, is_traced: bool) -> None:
    attention = nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True)
    transposed = nn.ConvTranspose1d(6, 6, 1, groups=2), nn.BatchNorm1d(6)
    model = nn.Sequential(nn.Embedding(6, 8), attention, *transposed, nn.Linear(8, 6)).double()
    model[4].weight, tokens = model[0].weight, torch.arange(6)[None]
    options = {"coordinates": coordinates, "example_inputs": tokens if is_traced else None}
    optimizer = build(model, **options)
    names = "self_attn.in_proj_weight self_attn.out_proj.weight linear1.weight linear2.weight"
    expected = [*(f"1.{name}" for name in names.split()), "2.weight"]
    assert optimizer.param_groups[0]["param_names"] == expected
    assert "tied to an embedding" in str(optimizer) and "fixed, 3 follows" in str(optimizer)
    before, loss = model[2].weight.detach().clone(), model(tokens).square().mean()
    loss.backward()
    optimizer.step()
    assert model(tokens).square().mean() < loss
    for new, old in zip(model[2].weight.detach().chunk(2), before.chunk(2), strict=True):
        torch.testing.assert_close(new.norm(dim=0), old.norm(dim=0))  # units are columns


def test_groups_keep_their_keys_and_what_is_added_is_of_the_rest() -> None:
    model, extra = mlp(), nn.Parameter(torch.ones(2, 2).double())
    slower = {"params": model[3].parameters(), "lr": 0.025, "lr_scale": 0.5}
    optimizer = build(model, groups=[slower, {"params": model[6].parameters()}], turn=4.0)
    found = [(g["lr"], g.get("lr_scale"), g["param_names"]) for g in optimizer.param_groups]
    assert found[:2] == [(2.0, 0.5, ["3.weight"]), (0.025, 0.5, ["3.bias"])]
    assert found[2:] == [(0.05, None, ["6.weight", "6.bias"])]
    with pytest.raises(ValueError, match="its turn 200.0 degrees"):
        build(model, groups=[{"params": model[3].parameters(), "lr": 2.5}], turn=4.0)
    optimizer.add_param_group({"params": extra, "lr": 0.5})
    extra.grad = torch.ones_like(extra)
    train(model, optimizer, 1)
    assert_same_weights(model[0], mlp()[0])  # which is in no group
    assert extra.detach().unique().tolist() == [0.5]


BASE = functools.partial(torch.optim.SGD, momentum=0.9)


@pytest.mark.parametrize(
    "base, groups",
    [
        (lambda params, **options: BASE(params, **options), lambda m: None),
        (BASE, lambda m: list(m.parameters())), (BASE, lambda m: list(m.named_parameters())),
        (BASE, lambda m: [{"params": [p]} for p in m.parameters()]),
    ],
)  # fmt: skip
def test_callables_and_groups_of_any_form_train_alike(base: Any, groups: Any) -> None:
    model, other = mlp(), mlp()
    train(model, build(model, base, rest=BASE, groups=groups(model)))
    train(other, build(other, momentum=0.9))
    assert_same_weights(model, other, 1e-14)


@both_coordinates
@pytest.mark.parametrize(
    "base, options",
    [
        ("RAdam", {"lr": 0.01}), ("NAdam", {"lr": 0.01}), ("RMSprop", {"lr": 0.003}),
        ("Adafactor", {"lr": 0.03}), ("Rprop", {"lr": 0.003}), ("ASGD", {"lr": 0.1}),
        ("AdamW", {"lr": 0.01, "amsgrad": True}), ("SGD", {"foreach": True, "momentum": 0.9}),
        ("Adam", {"lr": 0.01, "foreach": False}), ("Adam", {"lr": 0.01, "fused": True}),
        ("Adam", {"lr": torch.tensor(0.01)}), ("SGD", {"lr": 0.05, "maximize": True}),
    ],
)  # fmt: skip
def test_any_base_lowers_the_loss(base: str, options: Any, coordinates: str) -> None:
    model = mlp()
    optimizer = build(model, getattr(torch.optim, base), coordinates=coordinates, **options)
    first = backward(model)
    for _ in range(40):
        optimizer.step()
        last = backward(model)
    assert (first - last) * (-1 if "maximize" in options else 1) > 0.1


@pytest.mark.parametrize(
    "model, options, words",
    [
        (mlp, {"base": torch.optim.LBFGS}, "LBFGS .* closure"),
        (mlp, {"base": torch.optim.Adam, "differentiable": True}, "differentiable=True"),
        (mlp, {"base": torch.optim.SGD(mlp().parameters())}, "an optimizer's class"),
        (mlp, {"base": "SGD"}, "an optimizer's class"), (mlp, {"rest": 3}, "rest is an optimizer"),
        (mlp, {"base": torch.optim.Muon, "rest": torch.optim.Muon}, "the rest has vectors"),
        (mlp, {"base": functools.partial(torch.optim.SGD, lr=1.0)}, "not in a partial"),
        (mlp, {"rest": torch.optim.Muon}, "Muon"), (mlp, {"turn": 2, "max_turn": 1}, "below turn"),
        (mlp, {"turn": 0}, "an angle in degrees"), (mlp, {"turn": 181}, "at most 180; got 181"),
        (mlp, {"weight_decay": -1.0}, "0 or more"), (mlp, {"scale_lr": math.nan}, "scale_lr is 0"),
        (mlp, {"groups": [{"lr": 1.0}]}, "under 'params'"),
        (mlp, {"turn": 1, "coordinates": "angles"}, "turn needs coordinates='intrinsic'"),
        (mlp, {"groups": [{"params": mlp().parameters()}]}, "the model does not"),
        (lambda: nn.Embedding(3, 4), {}, "no layer of this model has units"),
        (lambda: list(mlp().parameters()), {}, "the first argument is the model"),
        (lambda: gp.convert_(mlp()), {}, "geometry in the layer already"),
    ],
)  # fmt: skip
def test_bad_input_gets_a_sentence(model: Any, options: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        build(model(), **options)
