"""Training in few passes on a GPU: the kernels, and networks that follow the readable form."""

import copy
from collections.abc import Callable

import passes
import pytest
import torch
import torch.nn.functional as F
from residual import residual_network
from torch import Tensor, nn
from torch._dynamo.utils import counters

import geoparam as gp
from geoparam import fused
from geoparam.pooling import MaxPool2d

pytestmark = pytest.mark.gpu

LARGE = [((8, c, 12, 12), 1, passes.LAST) for c in (1, 3, 27, 64, 147, 2048)]
LARGE += [((64, 256, 56, 56), 1, passes.LAST), ((8, 64, 30, 30), 1, passes.FIRST)]


@pytest.fixture
def kernels():  # noqa: ANN201
    return pytest.importorskip("geoparam.ops.columns_triton")


@pytest.mark.parametrize("case", [*passes.CASES, *LARGE], ids=str)
@passes.dtypes
def test_passes(kernels, case: tuple, dtype: torch.dtype) -> None:  # noqa: ANN001
    passes.check_rectify(kernels, case, dtype, "cuda")
    passes.check_backward(kernels, case, dtype, "cuda")
    passes.check_sums(kernels, case, dtype, "cuda")
    passes.check_centre(kernels, case, dtype, "cuda")


def test_gaps_and_nan(kernels) -> None:  # noqa: ANN001
    passes.check_strided(kernels, "cuda")
    passes.check_strided_parameters(kernels, "cuda")
    passes.check_nan(kernels, "cuda")


def converted(**options: str) -> nn.Module:
    example = torch.randn(4, 3, 12, 12)
    return gp.convert_(residual_network(), norm="imn", example_inputs=example, **options)


def stacked() -> nn.Module:
    layers: list[nn.Module] = []
    for inputs, units in ((3, 16), (16, 16), (16, 32)):
        layers += [
            gp.GmPConv2d(inputs, units, 3, padding=1, activation=torch.relu, init="glorot"),
            gp.InputMeanNorm(units),
        ]
    layers.insert(4, MaxPool2d(2))
    layers.insert(2, MaxPool2d(3, 2, 1))
    model = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 5))
    with torch.no_grad():
        model[3].r[:4] *= -1
    return model


NETWORKS: dict[str, Callable[[], nn.Module]] = {
    "converted": converted,
    "intrinsic": lambda: converted(coordinates="intrinsic"),
    "from scratch": lambda: converted(init="glorot"),
    "stacked": stacked,
}


def train(
    model: nn.Module,
    steps: int,
    dtype: torch.dtype,
    autocast: bool = False,
    call: Callable[[Tensor], Tensor] | None = None,
) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(3)
    model = model.to("cuda", dtype, memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    losses = []
    for _ in range(steps):
        x = torch.randn(16, 3, 12, 12, generator=generator).to("cuda", dtype)
        y = torch.randint(5, (16,), generator=generator).cuda()
        with torch.autocast("cuda", torch.bfloat16, enabled=autocast):
            x = x.contiguous(memory_format=torch.channels_last)
            loss = F.cross_entropy((call or model)(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return {**model.state_dict(), "losses": torch.stack(losses)}


@pytest.mark.parametrize("name", NETWORKS)
def test_twenty_steps_follow_the_readable_form(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = NETWORKS[name]()
    found = train(copy.deepcopy(model), 20, torch.float64)
    monkeypatch.setattr(fused, "DEVICES", set())
    expected = train(model, 20, torch.float64)
    for key, value in expected.items():
        torch.testing.assert_close(found[key], value, atol=1e-9, rtol=1e-8, msg=key)


@pytest.mark.parametrize("name", NETWORKS)
def test_bfloat16_loses_as_much_as_the_readable_form(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = NETWORKS[name]()
    found = train(copy.deepcopy(model), 20, torch.float32, autocast=True)["losses"]
    monkeypatch.setattr(fused, "DEVICES", set())
    plain = train(copy.deepcopy(model), 20, torch.float32, autocast=True)["losses"]
    exact = train(model, 20, torch.float64)["losses"]
    assert (found - exact).norm() < 2 * (plain - exact).norm() + 1e-2


@pytest.mark.parametrize("name", NETWORKS)
def test_training_repeats_bit_for_bit(name: str) -> None:
    torch.use_deterministic_algorithms(True, warn_only=True)
    model = NETWORKS[name]()
    first, second = (train(copy.deepcopy(model), 3, torch.float32, True) for _ in range(2))
    torch.use_deterministic_algorithms(False)
    assert all(torch.equal(first[key], second[key]) for key in first)


def test_nan_comes_out_of_a_convolution_with_its_own_relu() -> None:
    layer = gp.GmPConv2d(8, 16, 3, padding=1, activation=torch.relu, input_norm="bias").cuda()
    x = torch.randn(4, 8, 12, 12, device="cuda").to(memory_format=torch.channels_last)
    x[0, 0, 0, 0] = torch.nan
    with torch.autocast("cuda", torch.bfloat16):
        y = layer(x.requires_grad_())
    assert y.isnan().all()  # the mean is NaN


@pytest.mark.parametrize("name", ["converted", "intrinsic", "stacked"])
def test_a_network_compiles_whole_and_follows_eager(name: str) -> None:
    model = NETWORKS[name]()
    twin = copy.deepcopy(model)
    torch.compiler.reset()
    found = train(twin, 5, torch.float64, call=torch.compile(twin, fullgraph=True))
    for key, value in train(model, 5, torch.float64).items():
        torch.testing.assert_close(found[key], value, atol=1e-9, rtol=1e-8, msg=key)


@pytest.mark.parametrize("name", ["converted", "stacked"])
def test_training_in_cuda_graphs_follows_eager(name: str) -> None:
    model = NETWORKS[name]()
    twin = copy.deepcopy(model)
    torch.compiler.reset()
    counters["inductor"].clear()
    found = train(twin, 6, torch.float64, call=torch.compile(twin, mode="reduce-overhead"))
    assert counters["inductor"]["cudagraph_skips"] == 0
    for key, value in train(model, 6, torch.float64).items():
        torch.testing.assert_close(found[key], value, atol=1e-9, rtol=1e-8, msg=key)
