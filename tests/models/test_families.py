"""convert_, train and fold_ on the model families people bring."""

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only
from zoo import FAMILIES, Family, pretend_pretrained

import geoparam as gp
from geoparam.model.run import tensors_in


def parametrize(chosen: list[Family]) -> pytest.MarkDecorator:
    marks = {True: [pytest.mark.slow], False: []}
    cases = [pytest.param(f, id=f.name, marks=marks[f.slow]) for f in chosen]
    return pytest.mark.parametrize("family", cases)


families = parametrize(FAMILIES)
quick_families = parametrize([replace(f, slow=f.slow or f.name == "resnet18") for f in FAMILIES])
# Each family has both coordinates in `make test-models`, and one of them in `make test`.
WITH_COORDINATES = [
    pytest.param(
        family,
        coordinates,
        id=f"{family.name}-{coordinates}",
        marks=[pytest.mark.slow] if family.slow or number % 2 != turn else [],
    )
    for number, family in enumerate(FAMILIES)
    for turn, coordinates in enumerate(("angles", "intrinsic"))
]


def call(model: nn.Module, inputs: Any) -> Any:
    return model(**inputs) if isinstance(inputs, dict) else model(*inputs)


def train(model: nn.Module, inputs: Any, steps: int, lr: float = 1e-3) -> None:
    model.train()
    optimizer = torch.optim.SGD(gp.param_groups(model, lr=lr, kind="sgd"))
    optimizer.register_step_post_hook(gp.retract(model))
    for _ in range(steps):
        optimizer.zero_grad()
        loss(call(model, inputs)).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()


def loss(outputs: Any) -> Tensor:
    floats = [t for t in tensors_in(outputs) if t.is_floating_point()]
    return sum(t.float().square().mean() for t in floats)  # type: ignore[return-value]


def to_double(inputs: Any) -> Any:
    return tree_map_only(Tensor, lambda t: t.double() if t.is_floating_point() else t, inputs)


def check_fold(original: nn.Module, model: nn.Module, inputs: Any) -> None:
    """The folded model computes the same, and what it holds loads into the original."""
    folded = gp.fold_(copy.deepcopy(model))
    assert not any(type(m).__module__.startswith("geoparam") for m in folded.modules())
    assert gp.verify(model, folded, inputs) < 1e-5
    assert list(folded.state_dict()) == list(original.state_dict())
    original.load_state_dict(folded.state_dict())
    assert gp.verify(model, original, inputs) < 1e-5


@quick_families
def test_the_right_layers_are_converted(family: Family) -> None:
    plan = gp.plan(family.build())
    converted = {d.name for d in plan.decisions if d.converted}
    left = {d.name for d in plan.decisions if not d.converted}
    assert len(converted) == family.layers
    assert converted.issuperset(family.some)
    assert left.issuperset(family.left)


@pytest.mark.parametrize(("family", "coordinates"), WITH_COORDINATES)
def test_convert_train_fold(family: Family, coordinates: str) -> None:
    original, inputs = pretend_pretrained(family.build()), family.inputs()
    model = gp.convert_(copy.deepcopy(original), coordinates=coordinates)
    assert gp.verify(original, model, inputs) < 1e-5
    train(model, inputs, steps=3)
    unseen = [n for n, p in model.named_parameters() if p.requires_grad and p.grad is None]
    assert not [n for n in unseen if dict(original.named_parameters()).get(n) is None]
    assert all(p.grad.isfinite().all() for p in model.parameters() if p.grad is not None)
    with torch.no_grad():
        for layer in model.modules():
            if isinstance(layer, gp.GmPLinear | gp.GmPConv2d):
                layer.r[::2] *= -1
    check_fold(original, model, inputs)


def count_norms(model: nn.Module) -> int:
    return sum(isinstance(m, nn.modules.batchnorm._BatchNorm) for m in model.modules())


@parametrize([family for family in FAMILIES if family.norms])
def test_batchnorm_gives_way_to_imn(family: Family) -> None:
    original, inputs = pretend_pretrained(family.build()), family.inputs()
    model = gp.convert_(copy.deepcopy(original), norm="imn", example_inputs=inputs)
    assert count_norms(original) - count_norms(model) == family.norms
    assert gp.verify(original, model, inputs) < 1e-5
    train(model, inputs, steps=3, lr=1e-4)
    check_fold(original, model, inputs)


@quick_families
def test_float64_is_exact(family: Family) -> None:
    original = pretend_pretrained(family.build()).double()
    inputs = to_double(family.inputs())
    model = gp.convert_(copy.deepcopy(original))
    assert gp.verify(original, model, inputs) < 1e-10
    assert gp.verify(original, gp.fold_(model), inputs) < 1e-10
    if family.norms:
        model = gp.convert_(copy.deepcopy(original), norm="imn", example_inputs=inputs)
        assert gp.verify(original, model, inputs) < 1e-10
        assert gp.verify(original, gp.fold_(model), inputs) < 1e-10


@quick_families
def test_a_checkpoint_loads_into_a_freshly_converted_model(family: Family) -> None:
    inputs = family.inputs()
    options = {"norm": "imn", "pretrained": True, "example_inputs": inputs}
    options = options if family.norms else {}
    trained = gp.convert_(pretend_pretrained(family.build()), **options)
    fresh = gp.convert_(family.build(), **options)
    fresh.load_state_dict(trained.state_dict())
    assert gp.verify(trained, fresh, inputs) == 0


@pytest.mark.compile
@families
def test_compiling_adds_no_graph_breaks(family: Family) -> None:
    original, inputs = pretend_pretrained(family.build()).eval(), family.inputs()
    model = gp.convert_(copy.deepcopy(original))
    with torch.no_grad():
        breaks = [graph_breaks(m, inputs) for m in (original, model)]
        assert breaks[0] == breaks[1]
        compiled = torch.compile(copy.deepcopy(model), backend="eager")
        found, expected = (list(tensors_in(call(m, inputs))) for m in (compiled, model))
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)


def graph_breaks(model: nn.Module, inputs: Any) -> int:
    torch._dynamo.reset()
    explain = torch._dynamo.explain(model)
    result = explain(**inputs) if isinstance(inputs, dict) else explain(*inputs)
    return result.graph_break_count


@pytest.mark.compile
@families
def test_export_keeps_the_function(family: Family) -> None:
    model, inputs = gp.convert_(pretend_pretrained(family.build())).eval(), family.inputs()
    positional, keywords = ((), inputs) if isinstance(inputs, dict) else (inputs, {})
    program = torch.export.export(model, positional, keywords, strict=False)
    targets = [str(node.target) for node in program.graph.nodes]
    assert sum(target.startswith("geoparam.weight") for target in targets) >= family.layers
    with torch.no_grad():
        found = list(tensors_in(program.module()(*positional, **keywords)))
        expected = list(tensors_in(model(*positional, **keywords)))
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)
