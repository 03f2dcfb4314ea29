"""Bases that keep counters in their groups, wrap others or choose types; partials; resets."""

import copy
import functools
from typing import Any

import pytest
import torch
from plain_models import assert_same_weights, backward, both_coordinates, build, mlp, train
from torch import nn
from torch.optim import SGD, AdamW, Muon, Optimizer


class Counting(Optimizer):
    """Counts steps in its groups: in a default, and in a tensor that its first step adds."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr, "k": 0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            group["k"] += 1
            group.setdefault("step", torch.zeros(())).add_(1)
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(p.grad, alpha=group["lr"] / group["k"] / float(group["step"]))


def timm_base(name: str) -> Any:
    return getattr(pytest.importorskip("timm.optim"), name)


def lookahead(params: Any, **options: Any) -> Any:
    return timm_base("Lookahead")(SGD(params, momentum=0.9, **options), k=2)


def step_with_gaps(model: nn.Module, optimizer: Any, steps: range) -> None:
    """Train; in every third step the first layer has no gradient."""
    for step in steps:
        backward(model, step)
        model[0].weight.grad = None if step % 3 == 2 else model[0].weight.grad
        optimizer.step()


@both_coordinates
@pytest.mark.parametrize("base", [Counting, lookahead, "Lamb", "Adan", "AdafactorBigVision"])
def test_a_base_goes_on_where_it_was_after_gaps_and_from_a_copy(
    base: Any, coordinates: str
) -> None:
    base = timm_base(base) if isinstance(base, str) else base
    models = [mlp(torch.float32) for _ in range(3)]
    ours = [build(m, base, lr=0.02, coordinates=coordinates) for m in models]
    step_with_gaps(models[0], ours[0], range(8))
    for step in range(8):
        step_with_gaps(models[1], ours[1], range(step, step + 1))
        ours[1]._forget()
    step_with_gaps(models[2], ours[2], range(4))
    fresh = build(models[2], base, lr=0.02, coordinates=coordinates)
    fresh.load_state_dict(copy.deepcopy(ours[2].state_dict()))
    step_with_gaps(models[2], fresh, range(4, 8))
    assert_same_weights(models[0], models[1])
    assert_same_weights(models[0], models[2])


def test_counters_in_groups_count_each_step_once_and_directions_move_beside_plain_biases() -> None:
    model = mlp()
    model[0].bias.data[2] = 9.0
    optimizer, before = build(model, Counting), model[0].weight.detach().clone()
    train(model, optimizer, 5)
    assert [(group["k"], group["step"].item()) for group in optimizer.param_groups] == [(5, 5)] * 2
    u, v = (nn.functional.normalize(x.detach(), dim=1) for x in (before, model[0].weight))
    assert (u - v).abs().max() > 1e-3


def test_lookahead_is_not_its_base() -> None:
    models = mlp(), mlp()
    for model, base in zip(models, (functools.partial(SGD, momentum=0.9), lookahead), strict=True):
        train(model, build(model, base), 4)
    assert (models[0][0].weight - models[1][0].weight).abs().max() > 1e-4


@pytest.mark.parametrize("way", ["replaced", "deleted", "entry"])
def test_a_state_that_others_reset_starts_anew_and_is_saved(way: str) -> None:
    model = mlp()
    optimizer = build(model, torch.optim.Adam, lr=0.01)
    train(model, optimizer)
    weight = model[3].weight
    if way == "deleted":
        del optimizer.state[weight], optimizer.state[model[3].bias]
    elif way == "replaced":
        optimizer.state[weight], optimizer.state[model[3].bias] = {}, {}
    else:
        optimizer.state[weight]["direction/step"] = torch.zeros(())
    train(model, optimizer, 2)
    assert optimizer.state[weight]["direction/step"] == 2
    assert optimizer.state[model[0].weight]["direction/step"] == 5
    new = copy.deepcopy(model)
    resumed = build(new, torch.optim.Adam, lr=0.01)
    resumed.load_state_dict(optimizer.state_dict())
    train(model, optimizer, first=5)
    train(new, resumed, first=5)
    assert_same_weights(new, model)


@pytest.mark.parametrize("wrap", [nn.DataParallel, torch.compile])
def test_a_state_saved_under_a_wrapper_is_loaded(wrap: Any) -> None:
    model, plain = mlp(), mlp()
    optimizer = build(wrap(model), momentum=0.9)
    train(model, optimizer)
    plain.load_state_dict(model.state_dict())
    resumed = build(plain, momentum=0.9)
    resumed.load_state_dict(optimizer.state_dict())
    assert resumed.param_groups[0]["param_names"] == ["0.weight", "3.weight"]
    train(model, optimizer, first=3)
    train(plain, resumed, first=3)
    assert_same_weights(plain, model)


def test_what_a_partial_names_is_kept() -> None:
    rest = functools.partial(AdamW, lr=1e-3, weight_decay=0.1)
    optimizer = build(mlp(), Muon, lr=0.02, weight_decay=0.3, rest=rest, scale_lr=3e-3)
    found = [(group["lr"], group["weight_decay"]) for group in optimizer.param_groups]
    assert found == [(0.02, 0.0), (1e-3, 0.1)] and optimizer._scale_factor == pytest.approx(3)
    model = mlp()
    slower = [{"params": model.parameters(), "lr": 0.01}]
    assert build(model, Muon, lr=0.02, rest=rest, groups=slower).param_groups[1]["lr"] == 5e-4
    decayed = build(mlp(), functools.partial(SGD, weight_decay=0.2))
    assert [group["weight_decay"] for group in decayed.param_groups] == [0.0, 0.2]


@pytest.mark.parametrize("options", [{}, {"coordinates": "angles"}, {"turn": 2.0}], ids=str)
def test_decay_written_into_any_group_reaches_matrices_of_the_rest_alone(options: Any) -> None:
    model, norm, matrix = mlp(), nn.BatchNorm1d(3), nn.Parameter(torch.ones(2, 2))
    optimizer = build(model, AdamW, **options)
    optimizer.add_param_group({"params": [*norm.parameters(), matrix]})
    before = copy.deepcopy(model)
    for group in optimizer.param_groups:
        group["weight_decay"] = 0.5
    for p in (*model.parameters(), *norm.parameters(), matrix):
        p.grad = torch.zeros_like(p)
    optimizer.step()
    for i in (0, 3):
        torch.testing.assert_close(model[i].weight, before[i].weight, rtol=1e-14, atol=0)
    assert (norm.weight == 1).all() and (matrix == 1 - 0.05 * 0.5).all()
