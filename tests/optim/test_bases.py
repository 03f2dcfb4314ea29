"""Which optimizers can be the base or the rest, which are refused, and what they are given."""

import functools
from typing import Any

import pytest
import torch
from plain_models import (
    assert_same_weights,
    backward,
    both_coordinates,
    build,
    every_kind,
    mlp,
    rows,
    start,
    train,
)
from torch import nn
from torch.optim import SGD, AdamW, Muon, Optimizer

MOMENTUM = functools.partial(SGD, momentum=0.9)


class Counting(SGD):
    """Counts its steps in its groups."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, lr)
        self.param_groups[0]["k"] = 0

    def step(self, closure: Any = None) -> None:
        super().step()
        self.param_groups[0]["k"] += 1


class Noting(SGD):
    """Keeps a state that belongs to no parameter."""

    def step(self, closure: Any = None) -> None:
        super().step()
        self.state["steps"] = 1


class Clipping(SGD):
    """Limits the norm of all its gradients together."""

    def step(self, closure: Any = None) -> None:
        params = [p for group in self.param_groups for p in group["params"]]
        nn.utils.clip_grad_norm_(params, 0.1)
        super().step()


class Decaying(SGD):
    """Has a decay of its own, whatever its groups say."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for p in self.param_groups[0]["params"]:
            p.mul_(0.9)
        super().step()


class Wrapping(Optimizer):
    """Steps by another optimizer, as Lookahead does."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})
        self.inner = SGD(self.param_groups, lr)


def make_slower(params: Any, lr: float) -> Optimizer:
    return SGD(params, lr / 2)


@pytest.mark.parametrize(
    "base, words",
    [
        (Counting, "Counting cannot be the base: it counts in its parameter groups \\(k\\)"),
        (Noting, "Noting cannot be the base: it keeps a state beside the parameters'"),
        (Clipping, "Clipping .* steps a parameter not by its gradients alone .* other parameters"),
        (Decaying, "Decaying .* steps a parameter not by its gradients alone .* its values"),
        (
            Wrapping,
            "Wrapping cannot be the base: it wraps another optimizer.*give the wrapped one",
        ),
        (make_slower, "make_slower .* makes 0.025 of lr=0.05"),
        (torch.optim.Adafactor, "Adafactor .* not by its gradients alone"),
        (torch.optim.ASGD, "not by its gradients alone .*lambd, must be 0"),
        (torch.optim.LBFGS, "LBFGS cannot be the base: it calls its closure several times"),
        (
            SGD(mlp().parameters()),
            "base is an optimizer's class, .* instances, a SGD: give the class",
        ),
        ("SGD", "base is an optimizer's class"),
        (functools.partial(SGD, lr=1.0), "not in a partial"),
    ],
)
def test_a_base_that_cannot_step_increments_is_refused(base: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        build(mlp(), base)


@pytest.mark.parametrize(
    "name, words",
    [
        ("Lamb", "counts in its parameter groups \\(step\\)"),
        ("Adan", "counts in its parameter groups \\(step\\)"),
        ("MADGRAD", "not by its gradients alone"),
        ("AdamP", "not by its gradients alone"),
    ],
)
def test_bases_of_timm_are_refused_in_a_sentence(name: str, words: str) -> None:
    base = getattr(pytest.importorskip("timm.optim"), name)
    with pytest.raises(ValueError, match=f"{words}.* Use one of torch's own"):
        build(mlp(), base)


def test_timms_lookahead_is_refused() -> None:
    timm = pytest.importorskip("timm.optim")
    with pytest.raises(ValueError, match="wraps another optimizer"):
        build(mlp(), lambda params, **options: timm.Lookahead(SGD(params, **options)))


def test_the_rest_may_depend_on_values() -> None:
    """Only directions are stepped from 0."""
    model = mlp()
    train(model, build(model, SGD, rest=Decaying))
    before, after = rows(mlp()[6]), rows(model[6])
    assert after.norm() < before.norm()


@pytest.mark.parametrize(
    "rest, words",
    [
        (3, "rest is an optimizer's class"),
        (Muon, "Muon steps matrices, but the rest has vectors"),
        (Counting, "counts in its parameter groups"),
    ],
)
def test_a_rest_that_cannot_be_kept_is_refused(rest: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        build(mlp(), rest=rest)


def test_differentiable_steps_are_refused() -> None:
    with pytest.raises(ValueError, match="Adam cannot be the base: it has differentiable=True"):
        build(mlp(), torch.optim.Adam, differentiable=True)


@pytest.mark.parametrize("options", [{"capturable": True}, {"fused": True, "foreach": True}])
def test_options_that_torch_refuses_get_its_sentence(options: Any) -> None:
    with pytest.raises(ValueError, match="Adam cannot be .*base.*(supported devices|together)"):
        build(mlp(), torch.optim.Adam, **options)


BASES: list[Any] = [
    ("RAdam", {"lr": 0.01}),
    ("NAdam", {"lr": 0.01}),
    ("Adamax", {"lr": 0.01}),
    ("Adadelta", {"lr": 10.0}),
    ("RMSprop", {"lr": 0.003}),
    ("Rprop", {"lr": 0.003}),
    ("ASGD", {"lr": 0.1, "lambd": 0}),
    ("AdamW", {"lr": 0.01, "amsgrad": True}),
    ("SGD", {"foreach": True, "momentum": 0.9}),
    ("Adam", {"lr": 0.01, "foreach": False}),
    ("Adam", {"lr": 0.01, "fused": True}),
    ("Adam", {"lr": torch.tensor(0.01)}),
]


@both_coordinates
@pytest.mark.parametrize("base, options", BASES)
def test_torchs_optimizers_lower_the_loss(base: str, options: Any, coordinates: str) -> None:
    model = mlp()
    optimizer = build(model, getattr(torch.optim, base), coordinates=coordinates, **options)
    first = backward(model)
    for _ in range(40):
        optimizer.step()
        last = backward(model)
    assert first - last > 0.1


def test_maximize_raises_the_loss() -> None:
    model = mlp()
    optimizer = build(model, maximize=True)
    losses = [train(model, optimizer, 1)[0] for _ in range(20)]
    assert losses[-1] > losses[0] + 0.1


@pytest.mark.parametrize(
    "options, words",
    [
        ({"betas": (0.9, 0.95)}, "Muon, the base, has no option 'betas'.*rest=functools.partial"),
        ({"turns": 2.4}, "no option 'turns'; did you mean 'turn'"),
        ({"momentun": 0.9}, "no option 'momentun'; did you mean 'momentum'"),
        ({"dampening": 0.1}, "Muon, the base, has no option 'dampening'.$"),
    ],
)
def test_an_option_that_the_base_lacks_gets_a_sentence(options: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        build(mlp(), Muon, **options)


def test_an_option_counts_more_than_a_partials_for_base_and_rest() -> None:
    base = functools.partial(AdamW, betas=(0.7, 0.7))
    groups = build(mlp(), base, betas=(0.5, 0.5)).param_groups
    assert [group["betas"] for group in groups] == [(0.5, 0.5), (0.5, 0.5)]


def test_a_partial_of_the_rest_keeps_its_rate_as_a_ratio() -> None:
    rest = functools.partial(AdamW, lr=1e-3, weight_decay=0.1)
    units, others = build(mlp(), Muon, lr=0.02, rest=rest).param_groups
    assert (units["lr"], others["lr"]) == (0.02, 0.02)
    assert others["lr_ratio"] == others["scale_ratio"] == pytest.approx(0.05)
    assert others["weight_decay"] == 0.1


def test_a_partial_of_the_rest_steps_at_its_own_rate() -> None:
    model, plain = mlp(), mlp()
    rest = functools.partial(SGD, lr=1e-3)
    train(model, build(model, Muon, lr=0.02, rest=rest), 1)
    train(plain, SGD(plain.parameters(), lr=1e-3), 1)
    assert_same_weights(model[6], plain[6], 1e-15)


@pytest.mark.parametrize("base", [SGD, functools.partial(SGD, weight_decay=0.2)])
def test_decay_is_the_rests_wherever_it_was_given(base: Any) -> None:
    options = {"weight_decay": 0.2} if base is SGD else {}
    groups = build(mlp(), base, **options).param_groups
    assert [group["weight_decay"] for group in groups] == [0.0, 0.2]


def make_momentum(params: Any, lr: float) -> Optimizer:
    return MOMENTUM(params, lr=lr)


@pytest.mark.parametrize("base", [MOMENTUM, make_momentum])
def test_partials_and_functions_train_as_the_class(base: Any) -> None:
    model, other = mlp(), mlp()
    train(model, build(model, base, rest=MOMENTUM))
    train(other, build(other, momentum=0.9))
    assert_same_weights(model, other)


@every_kind
def test_a_closure_is_called_once_and_its_loss_returned(kind: str) -> None:
    (model, optimizer), (other, same) = start(kind), start(kind)
    losses = []
    for step in range(3):
        closure = functools.partial(backward, model, step)
        losses.append(optimizer.step(closure))
    assert losses == train(other, same)
    assert_same_weights(model, other)


@pytest.mark.parametrize("kind", ["SGD", "Muon", "turn", "bfloat16"])
def test_a_step_that_the_scaler_skips_changes_nothing(kind: str) -> None:
    (model, optimizer), (other, same) = start(kind), start(kind)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    scaler.scale(torch.ones(()))
    for step in range(3):
        backward(model, step, scaler.get_scale())
        if step == 1:
            model[3].weight.grad[0, 0] = torch.inf
        else:
            train(other, same, 1, step)
        scaler.step(optimizer)
        scaler.update()
    assert_same_weights(model, other)


def find_steps(model: Any, optimizer: Any) -> list[int]:
    """Return how many steps the moments of layers 0 and 3 have seen."""
    states = [optimizer.state[model[i].weight] for i in (0, 3)]
    return [int(state["direction/step"]) for state in states]


def test_a_state_that_others_take_out_starts_anew() -> None:
    model, optimizer = start("Adam")
    train(model, optimizer)
    optimizer.state.pop(model[3].weight)
    train(model, optimizer, 2)
    assert find_steps(model, optimizer) == [5, 2]


def test_an_entry_that_others_replace_counts() -> None:
    model, optimizer = start("Adam")
    train(model, optimizer)
    optimizer.state[model[3].weight]["direction/step"] = torch.zeros(())
    train(model, optimizer, 2)
    assert find_steps(model, optimizer) == [5, 2]


@pytest.mark.parametrize("kind", ["SGD", "Adam", "Muon", "angles"])
def test_what_is_built_anew_in_each_step_trains_alike(kind: str) -> None:
    """Also beside a layer that has no gradient in every third step."""
    (model, optimizer), (other, same) = start(kind), start(kind)
    for step in range(7):
        same._built = None
        for one, its in ((model, optimizer), (other, same)):
            backward(one, step)
            if step % 3 == 2:
                one[0].weight.grad = None
            its.step()
    assert_same_weights(model, other)
