"""convert_, train and fold_ on the model families people bring."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close
from torch.utils._pytree import tree_map_only
from zoo import FAMILIES, Family, pretend_pretrained

import geoparam as gp
from geoparam.model.run import tensors_in


def mark(family: Family, is_slow: bool) -> Any:
    """Return a parameter of a test, with the family's name."""
    marks = [pytest.mark.slow] if is_slow else []
    return pytest.param(family, id=family.name, marks=marks)


def is_slow_or_resnet18(family: Family) -> bool:
    return family.slow or family.name == "resnet18"


WITH_NORMS = [family for family in FAMILIES if family.norms]

families = pytest.mark.parametrize(
    "family", [mark(family, is_slow=family.slow) for family in FAMILIES]
)
families_with_norms = pytest.mark.parametrize(
    "family", [mark(family, is_slow=family.slow) for family in WITH_NORMS]
)
quick_families = pytest.mark.parametrize(
    "family", [mark(family, is_slow_or_resnet18(family)) for family in FAMILIES]
)
quick_families_with_norms = pytest.mark.parametrize(
    "family", [mark(family, is_slow_or_resnet18(family)) for family in WITH_NORMS]
)


def pair_with_coordinates() -> list[Any]:
    """Return each family with both coordinates; in `make test` it has one of them, in turn."""
    pairs = []
    for number, family in enumerate(FAMILIES):
        first = "angles" if number % 2 == 0 else "intrinsic"
        for coordinates in ("angles", "intrinsic"):
            is_slow = family.slow or coordinates != first
            marks = [pytest.mark.slow] if is_slow else []
            name = f"{family.name}-{coordinates}"
            pairs.append(pytest.param(family, coordinates, id=name, marks=marks))
    return pairs


def call(model: nn.Module, inputs: Any) -> Any:
    if isinstance(inputs, dict):
        return model(**inputs)
    return model(*inputs)


def compute_outputs(model: nn.Module, inputs: Any) -> list[Tensor]:
    """Return all tensors of the model's outputs."""
    with torch.no_grad():
        return list(tensors_in(call(model, inputs)))


def compute_loss(outputs: Any) -> Tensor:
    """Return the sum of the mean squares of all outputs."""
    floats = [x.float() for x in tensors_in(outputs) if x.is_floating_point()]
    return torch.stack([x.square().mean() for x in floats]).sum()


def train(model: nn.Module, inputs: Any, lr: float = 1e-3) -> None:
    """Take three steps."""
    model.train()
    optimizer = torch.optim.SGD(gp.param_groups(model, lr=lr, kind="sgd"))
    optimizer.register_step_post_hook(gp.retract(model))
    for _ in range(3):
        optimizer.zero_grad()
        compute_loss(call(model, inputs)).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()


def to_double(inputs: Any) -> Any:
    return tree_map_only(Tensor, lambda t: t.double() if t.is_floating_point() else t, inputs)


def assert_folds(model: nn.Module, original: nn.Module, inputs: Any) -> None:
    """The folded model computes the same, and what it holds loads into the original."""
    folded = gp.fold_(copy.deepcopy(model))

    assert not any(type(m).__module__.startswith("geoparam") for m in folded.modules())
    assert gp.verify(model, folded, inputs) < 1e-5
    assert list(folded.state_dict()) == list(original.state_dict())
    original.load_state_dict(folded.state_dict())
    assert gp.verify(model, original, inputs) < 1e-5


def flip_signs_of_r(model: nn.Module) -> None:
    """Turn the sign of every second unit, as training may."""
    for layer in model.modules():
        if isinstance(layer, gp.GmPLinear | gp.GmPConv2d):
            layer.r.data[::2] *= -1


def assert_new_parameters_have_gradients(model: nn.Module, original: nn.Module) -> None:
    """Parameters of the original are not checked: some of them reach no output."""
    names_before = dict(original.named_parameters())
    for name, parameter in model.named_parameters():
        is_new = name not in names_before
        if is_new and parameter.requires_grad:
            assert parameter.grad is not None, name


def assert_gradients_are_finite(model: nn.Module) -> None:
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    assert all(grad.isfinite().all() for grad in gradients)


@quick_families
def test_the_right_layers_are_converted(family: Family) -> None:
    decisions = gp.plan(family.build()).decisions

    converted = {decision.name for decision in decisions if decision.converted}
    left = {decision.name for decision in decisions if not decision.converted}
    assert len(converted) == family.layers
    assert converted.issuperset(family.some)
    assert left.issuperset(family.left)


@pytest.mark.parametrize(("family", "coordinates"), pair_with_coordinates())
def test_a_converted_model_is_equal_trains_and_folds(family: Family, coordinates: str) -> None:
    original = pretend_pretrained(family.build())
    inputs = family.inputs()

    model = gp.convert_(copy.deepcopy(original), coordinates=coordinates)
    assert gp.verify(original, model, inputs) < 1e-5

    train(model, inputs)
    assert_new_parameters_have_gradients(model, original)
    assert_gradients_are_finite(model)

    flip_signs_of_r(model)
    assert_folds(model, original, inputs)


def count_norms(model: nn.Module) -> int:
    return sum(isinstance(m, nn.modules.batchnorm._BatchNorm) for m in model.modules())


@families_with_norms
def test_batchnorm_gives_way_to_imn(family: Family) -> None:
    original = pretend_pretrained(family.build())
    inputs = family.inputs()

    model = gp.convert_(copy.deepcopy(original), norm="imn", example_inputs=inputs)
    assert count_norms(original) - count_norms(model) == family.norms
    assert gp.verify(original, model, inputs) < 1e-5

    train(model, inputs, lr=1e-4)
    assert_folds(model, original, inputs)


@quick_families
def test_conversion_is_exact_in_float64(family: Family) -> None:
    original = pretend_pretrained(family.build()).double()
    inputs = to_double(family.inputs())

    model = gp.convert_(copy.deepcopy(original))

    assert gp.verify(original, model, inputs) < 1e-10
    assert gp.verify(original, gp.fold_(model), inputs) < 1e-10


@quick_families_with_norms
def test_conversion_to_imn_is_exact_in_float64(family: Family) -> None:
    original = pretend_pretrained(family.build()).double()
    inputs = to_double(family.inputs())

    model = gp.convert_(copy.deepcopy(original), norm="imn", example_inputs=inputs)

    assert gp.verify(original, model, inputs) < 1e-10
    assert gp.verify(original, gp.fold_(model), inputs) < 1e-10


@quick_families
def test_a_checkpoint_loads_into_a_freshly_converted_model(family: Family) -> None:
    inputs = family.inputs()
    options: dict[str, Any] = {}
    if family.norms:
        options = {"norm": "imn", "pretrained": True, "example_inputs": inputs}
    trained = gp.convert_(pretend_pretrained(family.build()), **options)
    fresh = gp.convert_(family.build(), **options)

    fresh.load_state_dict(trained.state_dict())

    assert gp.verify(trained, fresh, inputs) == 0


def count_graph_breaks(model: nn.Module, inputs: Any) -> int:
    torch._dynamo.reset()
    explanation = call(torch._dynamo.explain(model), inputs)
    return explanation.graph_break_count


@pytest.mark.compile
@families
def test_conversion_adds_no_graph_breaks(family: Family) -> None:
    original = pretend_pretrained(family.build()).eval()
    inputs = family.inputs()
    model = gp.convert_(copy.deepcopy(original))

    with torch.no_grad():
        breaks = count_graph_breaks(model, inputs)
        breaks_of_original = count_graph_breaks(original, inputs)

    assert breaks == breaks_of_original


@pytest.mark.compile
@families
def test_a_compiled_model_computes_the_same(family: Family) -> None:
    model = gp.convert_(pretend_pretrained(family.build()).eval())
    inputs = family.inputs()
    compiled = torch.compile(copy.deepcopy(model), backend="eager")

    outputs = compute_outputs(compiled, inputs)

    expected = compute_outputs(model, inputs)
    assert_close(outputs, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.compile
@families
def test_an_exported_model_keeps_its_ops_and_computes_the_same(family: Family) -> None:
    model = gp.convert_(pretend_pretrained(family.build())).eval()
    inputs = family.inputs()
    if isinstance(inputs, dict):
        program = torch.export.export(model, (), inputs, strict=False)
    else:
        program = torch.export.export(model, inputs, strict=False)

    ops = [str(node.target) for node in program.graph.nodes]
    assert sum(op.startswith("geoparam.weight") for op in ops) >= family.layers
    outputs = compute_outputs(program.module(), inputs)
    expected = compute_outputs(model, inputs)
    assert_close(outputs, expected, atol=1e-4, rtol=1e-4)
