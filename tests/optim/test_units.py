"""What is a unit, what stays plain, what is said about it; groups and bad input."""

import copy
import math
from typing import Any

import numpy as np
import pytest
import torch
from function_model import FunctionModel
from plain_models import (
    assert_same_weights,
    both_coordinates,
    build,
    find_table,
    gpt2,
    mlp,
    through_a_file,
    train,
)
from torch import nn
from torch.nn.utils import prune
from torch.nn.utils.parametrizations import weight_norm

import geoparam as gp


def test_the_table_says_what_is_a_unit_and_what_stays_plain() -> None:
    model = nn.Sequential(
        nn.Conv2d(1, 4, 3),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(16, 8),
        nn.ReLU(),
        nn.Linear(8, 8, bias=False),
        nn.Linear(8, 2),
    )
    table = find_table(build(model))
    assert "228 of 266 parameters are units" in str(build(model))
    assert table["0.weight"] == "4 9 lam fixed, 1 follows"
    assert table["4.weight"] == "8 16 lam free"
    assert table["6.weight"] == "8 8 - free"
    assert table["7.weight"] == "the output layer"


def test_printing_says_who_steps_what_and_how_far() -> None:
    rates = {"lr": 0.02, "scale_lr": 1e-3, "weight_decay": 0.1}
    optimizer = build(mlp(), torch.optim.Muon, turn=2.4, max_turn=9, **rates)
    units, rest = str(optimizer).splitlines()[1:3]
    expected = "group 0: directions (intrinsic) by Muon, turn 2.4 degrees at lr 0.02, max_turn 9"
    assert expected in units and "momentum 0.95" in units and "no decay" in units
    assert "by AdamW, lr 0.02, lr of r 0.001, betas (0.9, 0.999)" in rest
    assert "decay 0.1 on other matrices" in rest


def test_printing_names_the_present_rate_and_the_decay_of_r() -> None:
    optimizer = build(mlp(), scale_decay=0.3)
    for group in optimizer.param_groups:
        group["lr"] = 0.01
    assert str(optimizer).count("lr 0.01,") == 2
    assert "decay 0.3 on r" in str(optimizer)


def test_printing_names_the_present_angle() -> None:
    optimizer = build(mlp(), turn=2.0)
    for group in optimizer.param_groups:
        group["lr"] = 0.0125
    assert "turn 2 degrees at lr 0.05, now 0.5 at lr 0.0125" in str(optimizer)


def test_a_frozen_layer_is_not_counted() -> None:
    model = mlp()
    model[0].requires_grad_(False)
    optimizer = build(model)
    assert "56 of 143 parameters are units" in str(optimizer)
    assert "frozen" in find_table(optimizer)["0.weight"]


def test_a_turn_for_frozen_layers_alone_is_warned_of() -> None:
    model = mlp()
    model[0].requires_grad_(False)
    build(model, turn=2.0)
    model[3].requires_grad_(False)
    with pytest.warns(UserWarning, match="all layers with units are frozen: nothing turns"):
        build(model, turn=2.0)


def test_long_names_do_not_break_the_tables_columns() -> None:
    model = nn.ModuleDict({"long" * 11: mlp(), "b": mlp()})
    lines = str(build(model)).splitlines()
    head = next(line for line in lines if line.endswith(" scale"))
    units = [line for line in lines if line.endswith(" free")]
    assert {line.rindex(" free") for line in units} == {head.rindex(" scale")}


def test_weights_that_share_memory_stay_plain() -> None:
    """Their steps would mix."""
    first, second = nn.Linear(6, 4, bias=False), nn.Linear(4, 6)
    second.weight.data = first.weight.data.t()
    model = nn.Sequential(first, second, mlp())
    assert find_table(build(model))["0.weight"] == "shares memory with 1.weight"


def test_parts_of_one_memory_are_units() -> None:
    model = mlp()
    flat = torch.randn(104).double()
    model[0].weight.data = flat[:48].view(8, 6)
    model[3].weight.data = flat[48:].view(7, 8)
    assert build(model).param_groups[0]["param_names"] == ["0.weight", "3.weight"]


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
        assert optimizer.param_groups[0]["param_names"] == ["0.weight"]
    assert_same_weights(tied, looped, 1e-13)


def wrap_in_a_list(model: nn.Module) -> nn.Module:
    return nn.ModuleList([model])


@pytest.mark.parametrize("wrap", [nn.Sequential, nn.DataParallel, torch.compile, wrap_in_a_list])
def test_a_frozen_teacher_is_not_the_output_layer(wrap: Any) -> None:
    model = nn.ModuleDict({"student": mlp(), "teacher": mlp().requires_grad_(False)})
    plain = [line for line in str(build(wrap(model))).splitlines() if "output layer" in line]
    assert len(plain) == 1 and "student.6.weight" in plain[0]


def test_a_frozen_head_is_the_output_layer() -> None:
    model = mlp()
    model[6].requires_grad_(False)
    assert find_table(build(model))["6.weight"] == "the output layer; frozen, or in no group"


def test_filter_fn_gets_the_names_of_the_model_inside_of_a_wrapper() -> None:
    optimizer = build(torch.compile(mlp()), filter_fn=lambda _, name: name != "6")
    assert find_table(optimizer)["6.weight"] == "filter_fn"


@pytest.mark.parametrize("change", [weight_norm, lambda e: prune.identity(e, "weight")])
def test_an_embedding_whose_weight_is_computed_stays_plain(change: Any) -> None:
    embedding = change(nn.Embedding(10, 6))
    table = find_table(build(nn.Sequential(embedding, mlp())))
    reasons = [reason for name, reason in table.items() if "orig" in name]
    assert reasons[-1] == "not in a known layer"


def test_layers_that_do_not_run_are_judged_by_their_order() -> None:
    model = FunctionModel(
        lambda m, x: m.out(m.a(x).relu()),
        a=nn.Linear(6, 8),
        out=nn.Linear(8, 3),
        aux=nn.Linear(8, 4),
        norm=nn.BatchNorm1d(4),
        aux_out=nn.Linear(4, 3),
    )
    table = find_table(build(model, example_inputs=torch.randn(4, 6)))
    assert table["aux.weight"].endswith("fixed, norm follows")
    assert table["aux_out.weight"] == table["out.weight"] == "the output layer"


# ---- heads


def language_model(head_first: bool = False, blocks: int = 2, width: int = 4) -> nn.ModuleDict:
    """Return the modules of a language model; its head has the embedding's shape."""
    parts: dict[str, nn.Module] = {"embedding": nn.Embedding(9, width)}
    head = nn.Linear(width, 9, bias=False)
    if head_first:
        parts["lm_head"] = head
    block = {"up": nn.Linear(width, 6), "down": nn.Linear(6, width)}
    parts["blocks"] = nn.ModuleList(nn.ModuleDict(copy.deepcopy(block)) for _ in range(blocks))
    if not head_first:
        parts["lm_head"] = head
    return nn.ModuleDict(parts)


@pytest.mark.parametrize("head_first", [False, True])
def test_the_head_is_found_wherever_it_is_registered(head_first: bool) -> None:
    table = find_table(build(language_model(head_first)))
    assert table["lm_head.weight"] == "the output layer: shaped as the embedding"
    assert table["blocks.1.down.weight"] == "4 6 lam free"


def test_a_tied_head_is_the_only_output_layer() -> None:
    model = language_model(head_first=True)
    model.lm_head.weight = model.embedding.weight
    table = find_table(build(model))
    assert table["embedding.weight"] == "tied to an embedding"
    assert "the output layer" not in table.values()


def test_gpt2s_tied_head_leaves_every_layer_of_its_blocks_a_unit() -> None:
    names = build(gpt2()).param_groups[0]["param_names"]
    layers = ["attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj"]
    assert names == [f"transformer.h.{i}.{layer}.weight" for i in (0, 1) for layer in layers]


def test_a_layer_that_has_an_embeddings_shape_by_chance_is_not_the_head() -> None:
    layers = nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 2)
    table = find_table(build(nn.Sequential(nn.Embedding(64, 16), *layers)))
    assert table["1.weight"] == "64 16 lam free"
    assert table["3.weight"] == "the output layer"


def test_a_head_of_the_embeddings_shape_that_is_not_last_is_warned_of() -> None:
    """The block's last layer could be the output layer as well."""
    with pytest.warns(UserWarning, match="'lm_head' is taken .* but blocks.0.down comes last"):
        build(language_model(head_first=True, blocks=1))


def test_the_most_specific_split_counts() -> None:
    model = nn.ModuleDict({"a": mlp(), "b": mlp()})
    optimizer = build(model, split={"a.0": 4, "0": 2})
    table = find_table(optimizer)
    assert table["a.0.weight"].endswith("4 layers") and table["b.0.weight"].endswith("2 layers")


def test_the_table_mentions_stacks_for_an_unknown_3d_parameter() -> None:
    model = nn.Sequential(mlp(), nn.Module())
    model[1].w = nn.Parameter(torch.ones(2, 3, 4))
    assert find_table(build(model))["1.w"].endswith("known layer; experts? Then give stacks=")


def test_a_guess_that_ends_a_block_is_warned_of() -> None:
    model = nn.ModuleDict({"first": nn.Linear(6, 4), "blocks": language_model().blocks})
    with pytest.warns(UserWarning, match="'blocks.1.down' is taken for the output layer because"):
        optimizer = build(model)
    assert find_table(optimizer)["blocks.1.down.weight"].endswith("by order; it ends a block")


class Residual(nn.Module):
    """A block whose shortcut is a layer only where the width changes."""

    def __init__(self, fan_in: int, out: int) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(fan_in, out), nn.Linear(out, out)
        self.shortcut = nn.Linear(fan_in, out) if fan_in != out else nn.Identity()


def test_a_guess_that_ends_a_block_is_warned_of_where_the_block_before_lacks_that_layer() -> None:
    blocks = nn.ModuleList([Residual(6, 6), Residual(6, 8)])
    model = nn.ModuleDict({"last": nn.Linear(8, 3), "blocks": blocks})
    with pytest.warns(UserWarning, match="'blocks.1.shortcut' is taken for the output layer"):
        build(model)


def test_a_head_that_is_not_last_counts_by_its_name_and_is_warned_of() -> None:
    model = nn.ModuleDict({"head": mlp(), "stem": nn.Linear(6, 8), "body": nn.Linear(8, 6)})
    with pytest.warns(UserWarning, match="'head.6' is taken .* its name, and 'body' because"):
        table = find_table(build(model))
    assert table["head.6.weight"] == "the output layer, by name"
    assert table["body.weight"] == "the output layer"
    assert table["stem.weight"] == "8 6 lam free"


def test_a_run_finds_the_head_without_a_guess() -> None:
    model = FunctionModel(
        lambda m, x: m.head(m.b(m.a(x))),
        head=nn.Linear(8, 3),
        a=nn.Linear(6, 8),
        b=nn.Linear(8, 8),
    )
    table = find_table(build(model, example_inputs=torch.randn(4, 6)))
    assert table["head.weight"] == "the output layer"
    assert table["b.weight"] == "8 8 lam free"


# ---- groups


def test_a_group_is_divided_and_keeps_its_keys() -> None:
    model = mlp()
    model[0].requires_grad_(False)
    slower = {"params": model[3].parameters(), "lr": 0.025, "lr_scale": 0.5}
    head = {"params": model[6].parameters()}
    groups = build(model, groups=[slower, head]).param_groups
    names = [group["param_names"] for group in groups]
    assert names == [["3.weight"], ["3.bias"], ["6.weight", "6.bias"]]
    assert [g["lr"] for g in groups] == [0.025, 0.025, 0.05]
    assert [g.get("lr_scale") for g in groups] == [0.5, 0.5, None]


def test_what_is_in_no_group_is_not_trained() -> None:
    model = mlp()
    groups = [{"params": model[3].parameters()}]
    with pytest.warns(UserWarning, match="leaves out 4 parameters"):
        optimizer = build(model, groups=groups)
    train(model, optimizer, 1)
    assert_same_weights(model[0], mlp()[0])
    assert_same_weights(model[6], mlp()[6])


def test_a_group_added_later_is_of_the_rest() -> None:
    model = mlp()
    extra = nn.Parameter(torch.ones(2, 2).double())
    optimizer = build(model)
    optimizer.add_param_group({"params": extra, "lr": 0.5})
    extra.grad = torch.ones_like(extra)
    train(model, optimizer, 1)
    assert extra.detach().unique().tolist() == [0.5]


GROUPS = {
    "parameters": lambda model: list(model.parameters()),
    "named": lambda model: list(model.named_parameters()),
    "one each": lambda model: [{"params": [p]} for p in model.parameters()],
}


@pytest.mark.parametrize("form", GROUPS)
def test_groups_of_any_form_train_alike(form: str) -> None:
    model, other = mlp(), mlp()
    train(model, build(model, groups=GROUPS[form](model), momentum=0.9))
    train(other, build(other, momentum=0.9))
    assert_same_weights(model, other, 1e-14)


def test_numpys_numbers_are_kept_as_plain_ones() -> None:
    model = mlp()
    group = {"params": model.parameters(), "weight_decay": np.float32(0.5)}
    options = {"lr": np.float64(0.25), "turn": np.float32(2.5), "scale_decay": np.float64(0.5)}
    optimizer = build(model, groups=[group], **options)
    train(model, optimizer)
    through_a_file(optimizer.state_dict())
    units, rest = optimizer.param_groups
    assert (units["lr"], units["turn"], rest["weight_decay"]) == (0.25, 2.5, 0.5)
    assert {type(group["lr"]) for group in optimizer.param_groups} == {float}


def test_groups_do_not_share_a_rate_in_a_tensor() -> None:
    optimizer = build(mlp(), lr=torch.tensor(0.1))
    optimizer.add_param_group({"params": nn.Parameter(torch.ones(2))})
    for group in optimizer.param_groups:
        group["lr"] *= 0.5
    rates = [float(group["lr"]) for group in optimizer.param_groups]
    assert rates == pytest.approx([0.05] * 3)


# ---- bad input


@pytest.mark.parametrize(
    "options, words",
    [
        ({"turn": 2, "max_turn": 1}, "max_turn, 1, is below turn, 2"),
        ({"turn": 0}, "turn is an angle in degrees"),
        ({"turn": 91}, "at most 90; got 91"),
        ({"max_turn": 181}, "at most 180; got 181"),
        ({"turn": "2.4"}, "turn is an angle in degrees.* got '2.4'"),
        ({"turn": 1, "coordinates": "angles"}, "turn needs coordinates='intrinsic'"),
        ({"turn": 1, "lr": 0}, "lr is above 0 with turn"),
        ({"lr": -1.0}, "lr is a finite number, 0 or more; got -1"),
        ({"lr": "0.1"}, "lr is a finite number, 0 or more; got '0.1'"),
        ({"weight_decay": -1.0}, "weight_decay is a finite number, 0 or more"),
        ({"scale_lr": math.nan}, "scale_lr is a finite number, 0 or more; got nan"),
        ({"scale": "none"}, "scale is 'auto', 'free' or 'fixed'; got 'none'"),
        ({"coordinates": "polar"}, "coordinates are 'intrinsic' or 'angles'; got 'polar'"),
        ({"groups": [{"lr": 1.0}]}, "under 'params'; got \\['lr'\\]"),
        ({"groups": [{"params": mlp().parameters()}]}, "parameters that the model does not"),
    ],
)
def test_a_bad_option_gets_a_sentence(options: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        build(mlp(), **options)


@pytest.mark.parametrize(
    "options, words",
    [
        ({"scale_lr": 0.1}, "scale_lr belongs to the whole optimizer, not to a group"),
        ({"coordinates": "angles", "match": False}, "coordinates, match belongs to the whole"),
        ({"weight_decay": -0.1}, "a group's weight_decay is a finite number"),
    ],
)
def test_a_groups_bad_option_gets_a_sentence(options: Any, words: str) -> None:
    model = mlp()
    with pytest.raises(ValueError, match=words):
        build(model, groups=[{"params": model.parameters(), **options}])


@pytest.mark.parametrize(
    "model, words",
    [
        (nn.Embedding(3, 4), "no layer of this model has units to train \\(weight: an embedding"),
        (list(mlp().parameters()), "the first argument is the model"),
        (gp.convert_(mlp()), "geometry in the layer already"),
    ],
)
def test_a_model_without_units_gets_a_sentence(model: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        build(model)


def test_a_group_that_has_lost_a_parameter_gets_a_sentence() -> None:
    model = mlp()
    optimizer = build(model)
    optimizer.param_groups[0]["params"].pop()
    with pytest.raises(ValueError, match="taken out of a group: freeze them instead"):
        train(model, optimizer, 1)
