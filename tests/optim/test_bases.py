"""Bases that count in their groups, wrap others or choose types; partials, resets, schedules."""

import copy
import functools
from typing import Any

import plain_models as pm
import pytest
import torch
from plain_models import assert_same_weights, backward, build, mlp, start, train
from torch import nn
from torch.optim import SGD, AdamW, Muon, Optimizer, lr_scheduler


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


class Noting(SGD):
    """Has more than numbers in its states."""

    def step(self, closure: Any = None) -> None:
        super().step()
        for p in self.param_groups[0]["params"]:
            self.state[p].update(note="stepped", buffer=None, sizes=[p.numel()])


class Storing(Optimizer):
    """Keeps first values, flat, in its states, a count beside them, and a number in each group."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr, "seen": 0.0})
        self.state["k"] = 0
        for p in (p for group in self.param_groups for p in group["params"]):
            self.state[p]["first"] = p.detach().flatten().clone()

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self.state["k"] += 1
        for group in self.param_groups:
            rate, params = group["lr"] / (1 + group["seen"]), group["params"]
            for p in (p for p in params if p.grad is not None):
                total = self.state[p].setdefault("sum", torch.zeros_like(p)).add_(p.grad)
                p.copy_(self.state[p]["first"].view_as(p) - rate / self.state["k"] * total)
            group["seen"] = sum(float(p.grad.norm()) for p in params if p.grad is not None)


class Cycling(SGD):
    """Counts parameters, to three, in each group."""

    def step(self, closure: Any = None) -> None:
        super().step()
        for group in self.param_groups:
            group["k"] = (group.get("k", 0) + len(group["params"])) % 3


MOMENTUM, NOTING = (functools.partial(base, momentum=0.9) for base in (SGD, Noting))


def timm_base(name: str) -> Any:
    return getattr(pytest.importorskip("timm.optim"), name)


def lookahead(params: Any, **options: Any) -> Any:
    return timm_base("Lookahead")(MOMENTUM(params, **options), k=2)


@pm.both_coordinates
@pytest.mark.parametrize(
    "base", [Counting, NOTING, Storing, lookahead, "Lamb", "AdafactorBigVision"]
)
def test_a_base_goes_on_after_gaps_and_from_a_copy(base: Any, coordinates: str) -> None:
    base = timm_base(base) if isinstance(base, str) else base
    options = {"base": base, "lr": 0.02, "coordinates": coordinates}
    models = [mlp(torch.float32) for _ in range(3)]
    ours = [build(m, **options) for m in models]
    ours[0] = build(models[0], **{**options, "base": MOMENTUM}) if base is NOTING else ours[0]
    for step in range(8):
        ours[1]._forget()
        if step == 4:
            saved, ours[2] = copy.deepcopy(ours[2].state_dict()), build(models[2], **options)
            ours[2].load_state_dict(saved)
        for model, optimizer in zip(models, ours, strict=True):
            backward(model, step)
            model[0].weight.grad = None if step % 3 == 2 else model[0].weight.grad
            optimizer.step()
    for other in models[1:]:
        assert_same_weights(models[0], other)


@pytest.mark.parametrize("options", [{}, {"turn": 1e-6}, {"coordinates": "angles"}])
def test_a_base_may_copy_the_first_values_of_what_it_steps(options: dict) -> None:
    model = mlp()
    before = copy.deepcopy(model)
    train(model, build(model, Storing, lr=1e-9, **options), 3)
    for p, first in zip(model.parameters(), before.parameters(), strict=True):
        assert torch.allclose(p, first, atol=1e-6)


def test_groups_of_a_base_that_share_one_of_ours_count_apart() -> None:
    optimizer = build(model := mlp(), Cycling, lr=0.1, scale_lr=0.2)
    train(model, optimizer, 7)  # two r, two lam and a bias, one matrix
    group = optimizer.param_groups[1]
    assert [group[f"k/{key}"] for key in ("2.0/0.0", "1.0/0.0", "1.0/None")] == [2, 0, 1]


def test_bases_that_change_the_rate_or_have_a_second_state_are_refused() -> None:
    def two(params: Any, lr: float) -> Storing:
        (storing := Storing(params, lr)).wrapped = SGD(params, lr)
        return storing

    with pytest.raises(ValueError, match="makes 0.05 of lr=0.1"):
        build(mlp(), lambda params, lr: SGD(params, lr / 2), lr=0.1)
    with pytest.raises(ValueError, match="two has a state beside"):
        build(mlp(), two)


def test_counters_in_groups_count_each_step_once_and_directions_move_beside_plain_biases() -> None:
    model = mlp()
    model[0].bias.data[2] = 9.0
    optimizer, before = build(model, Counting), model[0].weight.detach().clone()
    train(model, optimizer, 5)
    assert [(group["k"], group["step"].item()) for group in optimizer.param_groups] == [(5, 5)] * 2
    assert nn.functional.cosine_similarity(before, model[0].weight).min() < 1 - 1e-6


@pytest.mark.parametrize(
    "reset",
    [lambda states, weight: states.pop(weight), lambda states, weight: states.update({weight: {}}),
     lambda states, weight: states[weight].update({"direction/step": torch.zeros(())})],
)  # fmt: skip
def test_a_state_or_entry_that_others_reset_starts_anew(reset: Any) -> None:
    model = mlp()
    optimizer = build(model, torch.optim.Adam, lr=0.01)
    train(model, optimizer)
    reset(optimizer.state, model[3].weight)
    train(model, optimizer, 2)
    assert [optimizer.state[model[i].weight]["direction/step"] for i in (0, 3)] == [5, 2]


@pytest.mark.parametrize("wrap", [nn.DataParallel, torch.compile])
def test_a_state_saved_under_a_wrapper_is_loaded(wrap: Any) -> None:
    model, plain = mlp(), mlp()
    optimizer = build(wrap(model), momentum=0.9)
    train(model, optimizer)
    plain.load_state_dict(model.state_dict())
    resumed = build(plain, momentum=0.9)
    resumed.load_state_dict(optimizer.state_dict())
    for one, its in ((model, optimizer), (plain, resumed)):
        train(one, its, first=3)
    assert_same_weights(plain, model)


def test_what_a_partial_names_is_kept() -> None:
    rest, model = functools.partial(AdamW, lr=1e-3, weight_decay=0.1), mlp()
    optimizer = build(model, Muon, lr=0.02, weight_decay=0.3, rest=rest, scale_lr=3e-3)
    found = [(group["lr"], group["weight_decay"]) for group in optimizer.param_groups]
    assert found == [(0.02, 0.0), (1e-3, 0.1)] and optimizer._scale_factor == pytest.approx(3)
    slower = [{"params": model.parameters(), "lr": 0.01}]
    assert build(model, Muon, lr=0.02, rest=rest, groups=slower).param_groups[1]["lr"] == 5e-4
    decayed = build(mlp(), functools.partial(SGD, weight_decay=0.2))
    assert [group["weight_decay"] for group in decayed.param_groups] == [0.0, 0.2]


@pm.every_kind
def test_schedules_scaling_clipping_and_closures_work_as_ever(kind: str) -> None:
    (model, optimizer), (other, same) = start(kind), start(kind)
    cycles = {"total_steps": 9, "cycle_momentum": kind in ("SGD", "angles", "turn")}
    schedule = lr_scheduler.OneCycleLR(optimizer, [0.3, 0.1], **cycles)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=100)
    for step in range(5):
        for group, its in zip(optimizer.param_groups, same.param_groups, strict=True):
            its.update({k: group[k] for k in ("lr", "momentum", "betas") if k in its})
        backward(model, step, scaler.get_scale())
        model[3].weight.grad[0, 0] += torch.inf if step == 1 else 0  # this step is skipped
        scaler.scale(torch.ones(()))
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1e6)
        scaler.step(optimizer)
        scaler.update()
        assert step == 1 or same.step(lambda step=step: backward(other, step)).isfinite()
        schedule.step()
    assert_same_weights(model, other)
