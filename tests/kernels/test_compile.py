"""torch.compile and AOT export: one opaque op, no graph break, the same numbers.

Cold, a case takes the compiler up to half a minute on a CPU: three are in `make test`, the others
in `make test-compile`, which compiles anew.
"""

import copy
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

from geoparam import GmPConv2d, GmPLinear, functional

slow = pytest.mark.compile


def network(coordinates: str = "angles", natural: bool = False) -> nn.Module:
    return nn.Sequential(
        GmPConv2d(3, 8, 3, activation=torch.relu, coordinates=coordinates, natural=natural),
        GmPConv2d(8, 4, 3, padding=1, input_norm=True, coordinates=coordinates),
        nn.Flatten(),
        GmPLinear(64, 10, input_norm="bias", coordinates=coordinates, natural=natural),
    )


def run_and_differentiate(model: nn.Module, x: Tensor, autocast: bool) -> Tensor:
    """Return the output; gradients of its squares are added to those of the parameters."""
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        output = model(x)
    output.float().square().sum().backward()
    return output


def assert_equal_training(model: nn.Module, autocast: bool = False) -> None:
    """A compiled copy gives the outputs, gradients and running means of the eager model."""
    copied = copy.deepcopy(model)
    compiled = torch.compile(copied, fullgraph=True)
    tolerance = 0.05 if autocast else 1e-4
    buffer_rtol = 1e-2 if autocast else 1e-4

    for _ in range(2):
        x = torch.randn(4, 3, 6, 6)
        expected = run_and_differentiate(model, x, autocast)
        output = run_and_differentiate(compiled, x, autocast)
        assert_close(output, expected, atol=tolerance, rtol=tolerance)

    scale = max(p.grad.abs().max() for p in model.parameters())  # IMN cancels some of them
    gradients = [p.grad / scale for p in copied.parameters()]
    expected_gradients = [p.grad / scale for p in model.parameters()]
    assert_close(gradients, expected_gradients, atol=tolerance, rtol=tolerance)

    buffers = dict(copied.named_buffers())
    expected_buffers = dict(model.named_buffers())
    assert_close(buffers, expected_buffers, atol=1e-4, rtol=buffer_rtol)


@pytest.mark.parametrize(
    ("coordinates", "natural", "autocast"),
    [
        ("angles", True, False),
        pytest.param("angles", False, False, marks=slow),
        pytest.param("angles", False, True, marks=slow),
        pytest.param("intrinsic", False, False, marks=slow),
        pytest.param("intrinsic", False, True, marks=slow),
    ],
)
def test_training_is_compiled_as_one_graph(
    coordinates: str, natural: bool, autocast: bool
) -> None:
    assert_equal_training(network(coordinates, natural), autocast)


@slow
def test_the_batch_size_may_be_dynamic() -> None:
    layer = GmPLinear(6, 4, activation=torch.relu, input_norm=True).eval()
    compiled = torch.compile(layer, fullgraph=True, dynamic=True)

    for batch in (2, 5, 9):
        x = torch.randn(batch, 6)
        assert_close(compiled(x), layer(x))


def test_forward_mode_differentiation_is_compiled() -> None:
    latitude = torch.randn(3, 5)
    step = torch.randn(3, 5)
    r = torch.randn(3)

    def change_along(latitude: Tensor, step: Tensor) -> Tensor:
        _, change = torch.func.jvp(lambda a: functional.weight(a, r), (latitude,), (step,))
        return change

    compiled = torch.compile(change_along, fullgraph=True, backend="aot_eager")
    change = compiled(latitude, step)

    assert_close(change, change_along(latitude, step))
    assert change.abs().max() > 0


def sum_of_sines(latitude: Tensor, r: Tensor) -> Tensor:
    return functional.weight(latitude, r).sin().sum()


@slow
@pytest.mark.parametrize(
    "function", [sum_of_sines, torch.func.grad(sum_of_sines)], ids=["ensemble", "gradients"]
)
def test_vmap_over_models_or_samples_is_compiled(function: Callable) -> None:
    latitude = torch.randn(4, 3, 5)
    r = torch.randn(4, 3)
    mapped = torch.vmap(function)

    compiled = torch.compile(mapped)

    assert_close(compiled(latitude, r), mapped(latitude, r))


def test_export_keeps_the_op() -> None:
    model = network().eval()
    x = torch.randn(2, 3, 6, 6)

    program = torch.export.export(model, (x,))

    ops = [str(node.target) for node in program.graph.nodes]
    assert sum("geoparam.weight" in op for op in ops) == 3
    assert_close(program.module()(x), model(x))


@slow
def test_a_package_of_aot_inductor_computes_the_same(tmp_path: Path) -> None:
    model = network().eval()
    x = torch.randn(2, 3, 6, 6)
    program = torch.export.export(model, (x,))

    package = torch._inductor.aoti_compile_and_package(
        program, package_path=str(tmp_path / "model.pt2")
    )

    loaded = torch._inductor.aoti_load_package(package)
    assert_close(loaded(x), model(x), atol=1e-5, rtol=1e-4)
