"""A compiler on a GPU finds the kernels in its graph, and everyone else the ops."""

from collections.abc import Callable

import kernels
import pytest
import torch
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd

from geoparam import functional
from geoparam.kernels import selection

KERNEL = "triton_kernel_wrapper_functional"


def traced(function: Callable, *inputs: Tensor, dynamic: bool = False) -> list[str]:
    """Return what a compiler would call, forward and backward, without calling it."""
    targets: list[str] = []

    def record(graph: torch.fx.GraphModule, _: object) -> Callable:
        targets.extend(str(node.target) for node in graph.graph.nodes)
        return lambda *args: pytest.fail("nothing is run here")

    torch.compiler.reset()
    backend = aot_autograd(fw_compiler=record, bw_compiler=record)
    with torch._functorch.config.patch(force_non_lazy_backward_lowering=True):
        with pytest.raises(pytest.fail.Exception):
            torch.compile(function, backend=backend, dynamic=dynamic)(*inputs)
    return targets


@pytest.fixture
def on_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the tracing believe that Triton's kernels serve a CPU."""
    pytest.importorskip("triton")
    monkeypatch.setattr(selection, "KERNELS", "triton")
    monkeypatch.setattr(functional, "_is_on_gpu", lambda x: True)


def case() -> tuple[Tensor, Tensor]:
    latitude, r, _ = kernels.random_case(3, 18, torch.float32)
    return latitude.requires_grad_(), r.requires_grad_()


@pytest.mark.parametrize("scaled", [True, False])
def test_compilers_see_the_kernels(on_gpu: None, scaled: bool) -> None:
    latitude, r = case()
    options = {"dtype": torch.bfloat16, "shape": (2, 3, 3), "channels_last": True}
    found = traced(
        lambda a, s: functional.weight(a, s if scaled else None, **options), latitude, r
    )
    assert found.count(KERNEL) == 2  # one each way
    assert not any("geoparam" in target for target in found)


def test_the_ops_stay_where_sizes_are_unknown(on_gpu: None) -> None:
    found = traced(functional.weight, *case(), dynamic=True)
    assert "geoparam.weight.default" in found and KERNEL not in found


def test_the_ops_stay_on_a_cpu() -> None:
    found = traced(functional.weight, *case())
    assert "geoparam.weight.default" in found and KERNEL not in found


def test_export_keeps_the_op(on_gpu: None) -> None:
    class Weight(torch.nn.Module):
        def forward(self, latitude: Tensor, r: Tensor) -> Tensor:
            return functional.weight(latitude, r)

    program = torch.export.export(Weight(), tuple(x.detach() for x in case()))
    targets = [str(node.target) for node in program.run_decompositions({}).graph.nodes]
    assert "geoparam.weight.default" in targets


@pytest.mark.parametrize("op", ["weight", "weight_backward"])
def test_the_compilers_cache_knows_our_code(op: str) -> None:
    pytest.importorskip("triton")
    from torch._inductor.codegen import wrapper

    (code,) = torch._library.triton.get_triton_kernels_for_op(f"geoparam::{op}")
    source = wrapper.user_defined_triton_kernel_transitive_closure_source_code
    before = source(code)
    code.src = "other code"
    assert source(code) != before
    del code.src


@pytest.mark.gpu
@pytest.mark.parametrize("n", [2, 27, 1152, 4609])
def test_compiled_numbers(n: int) -> None:
    latitude, r, grad = kernels.random_case(5, n, torch.float32, "cuda")
    latitude.requires_grad_(), r.requires_grad_()

    def gradients(function: Callable) -> tuple[Tensor, ...]:
        w = function(latitude, r)
        return w, *torch.autograd.grad(w, (latitude, r), grad)

    torch.compiler.reset()
    expected = gradients(functional.weight)
    for found, one in zip(gradients(torch.compile(functional.weight)), expected, strict=True):
        torch.testing.assert_close(found, one, atol=1e-6, rtol=1e-5)
