"""torch.compile and AOT export: one opaque op, no graph break, the same numbers.

Cold, a case takes the compiler up to half a minute on a CPU: three are in `make test`, the others
in `make test-compile`, which compiles anew.
"""

import copy
from typing import Any

import pytest
import torch
from torch import nn

from geoparam import GmPConv2d, GmPLinear, functional

slow = pytest.mark.compile


def network(coordinates: str = "angles", natural: bool = False) -> nn.Module:
    return nn.Sequential(
        GmPConv2d(3, 8, 3, activation=torch.relu, coordinates=coordinates, natural=natural),
        GmPConv2d(8, 4, 3, padding=1, input_norm=True, coordinates=coordinates),
        nn.Flatten(),
        GmPLinear(64, 10, input_norm="bias", coordinates=coordinates, natural=natural),
    )


def check_training_steps(model: nn.Module, autocast: bool = False) -> None:
    """A compiled copy gives the outputs, gradients and running means of the eager model."""
    twin = copy.deepcopy(model)
    compiled = torch.compile(twin, fullgraph=True)
    for _ in range(2):
        x = torch.randn(4, 3, 6, 6)
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            expected, out = model(x), compiled(x)
        tolerance = {"atol": 0.05, "rtol": 0.05} if autocast else {"atol": 1e-4, "rtol": 1e-4}
        torch.testing.assert_close(out, expected, **tolerance)
        expected.float().square().sum().backward()
        out.float().square().sum().backward()
    scale = max(p.grad.abs().max() for p in model.parameters())  # IMN cancels some of them
    for ours, theirs in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(theirs.grad / scale, ours.grad / scale, **tolerance)
    for ours, theirs in zip(model.buffers(), twin.buffers(), strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-2 if autocast else 1e-4)


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
def test_fullgraph_training(coordinates: str, natural: bool, autocast: bool) -> None:
    check_training_steps(network(coordinates, natural), autocast)


@slow
def test_dynamic_batch_size() -> None:
    layer = GmPLinear(6, 4, activation=torch.relu, input_norm=True)
    compiled = torch.compile(layer.eval(), fullgraph=True, dynamic=True)
    for batch in (2, 5, 9):
        x = torch.randn(batch, 6)
        torch.testing.assert_close(compiled(x), layer(x))


def test_compiled_forward_mode() -> None:
    latitude, r, step = torch.randn(3, 5), torch.randn(3), torch.randn(3, 5)
    call = lambda a, v: torch.func.jvp(lambda a: functional.weight(a, r), (a,), (v,))[1]  # noqa: E731
    found = torch.compile(call, fullgraph=True, backend="aot_eager")(latitude, step)
    torch.testing.assert_close(found, call(latitude, step))
    assert found.abs().max() > 0


@slow
@pytest.mark.parametrize("transform", [lambda function: function, torch.func.grad])
def test_compiled_ensembles_and_per_sample_gradients(transform: Any) -> None:
    latitude, r = torch.randn(4, 3, 5), torch.randn(4, 3)
    call = torch.vmap(transform(lambda a, s: functional.weight(a, s).sin().sum()))
    torch.testing.assert_close(torch.compile(call)(latitude, r), call(latitude, r))


def test_export_keeps_the_op() -> None:
    model = network().eval()
    x = torch.randn(2, 3, 6, 6)
    program = torch.export.export(model, (x,))
    targets = [str(node.target) for node in program.graph.nodes]
    assert sum("geoparam.weight" in target for target in targets) == 3
    torch.testing.assert_close(program.module()(x), model(x))


@slow
def test_aot_inductor(tmp_path) -> None:  # noqa: ANN001
    model = network().eval()
    x = torch.randn(2, 3, 6, 6)
    package = torch._inductor.aoti_compile_and_package(
        torch.export.export(model, (x,)), package_path=str(tmp_path / "model.pt2")
    )
    loaded = torch._inductor.aoti_load_package(package)
    torch.testing.assert_close(loaded(x), model(x), atol=1e-5, rtol=1e-4)
