"""The addition of one value per channel by Triton equals torch's, alone and in a layer.

They run on a GPU, or in Triton's interpreter with TRITON_INTERPRET=1 (`make test-interpreter`).
"""

import os

import pytest
import torch
from torch.testing import assert_close

import geoparam as gp
from geoparam import centred_map
from geoparam.kernels import selection

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED else "cuda"
pytestmark = pytest.mark.interpreter if INTERPRETED else pytest.mark.gpu
SHAPES = [(1, 1), (3, 5), (2500, 7), (200, 64), (100, 300), (2049, 128)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_multiple_of_a_row_is_added_to_each_row(
    shape: tuple[int, int], dtype: torch.dtype
) -> None:
    channels_triton = pytest.importorskip("geoparam.kernels.channels_triton")
    x = torch.randn(shape, device=DEVICE).to(dtype)
    row = torch.randn(shape[1], device=DEVICE)
    expected = (x.float() - 0.5 * row).to(dtype)

    channels_triton.add_row_(x, row, -0.5)

    assert_close(x, expected)


@pytest.mark.parametrize(("kernel", "stride", "groups"), [(1, 1, 1), (3, 1, 1), (3, 2, 2)])
def test_outputs_and_gradients_of_a_layer_are_those_of_plain_torch(
    kernel: int, stride: int, groups: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.backends.cudnn.allow_tf32 = False
    monkeypatch.setattr(centred_map, "LARGE", 0)
    layer = gp.InputMeanConv2d(6, 4, kernel, stride=stride, padding=kernel // 2, groups=groups).to(
        DEVICE
    )
    x = torch.randn(3, 6, 5, 7, device=DEVICE) + 1
    x = x.to(memory_format=torch.channels_last)

    def run(kernels: str) -> list[torch.Tensor]:
        """Return the output, and the gradients of inputs and parameters."""
        monkeypatch.setattr(selection, "KERNELS", kernels)
        inputs = x.clone().requires_grad_()
        z = layer(inputs)
        gradients = torch.autograd.grad(z.square().sum(), [inputs, *layer.parameters()])
        return [z, *gradients]

    assert_close(run("triton"), run("torch"), atol=1e-4, rtol=1e-4)
