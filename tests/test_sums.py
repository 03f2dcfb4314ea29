"""The sums of channels: their gradient goes past a tensor, but past nobody who looks at it."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from geoparam import GmPConv2d, InputMeanNorm, MeanOnlyBatchNorm, fused
from geoparam.ops import columns, columns_native, implementation

devices = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])


def relu_and_layer() -> tuple[nn.Module, nn.Module]:
    return fused.ReLU(), GmPConv2d(3, 4, 3, input_norm="bias", padding=1).double()


def relu_and_norm() -> tuple[nn.Module, nn.Module]:
    return fused.ReLU(), InputMeanNorm(3).double()


def layer_and_norm() -> tuple[nn.Module, nn.Module]:
    return GmPConv2d(3, 3, 1, activation=torch.relu).double(), InputMeanNorm(3).double()


def relu_and_norm_with_bias() -> tuple[nn.Module, nn.Module]:
    return fused.ReLU(), MeanOnlyBatchNorm(3).double()


def alone_and_norm() -> tuple[nn.Module, nn.Module]:
    return nn.Tanh(), InputMeanNorm(3).double()


def two_layers() -> tuple[nn.Module, nn.Module]:
    first = GmPConv2d(3, 3, 1, activation=torch.relu).double()
    return first, GmPConv2d(3, 4, 1, input_norm="bias").double()


def by_retaining(y: Tensor, loss: Tensor) -> Tensor:
    y.retain_grad()
    loss.backward()
    return y.grad


def by_hook(y: Tensor, loss: Tensor) -> Tensor:
    seen: list[Tensor] = []
    y.register_hook(seen.append)
    loss.backward()
    return seen[0]


def by_grad(y: Tensor, loss: Tensor) -> Tensor:
    return torch.autograd.grad(loss, y)[0]


def by_inputs(y: Tensor, loss: Tensor) -> Tensor:
    loss.backward(inputs=[y])
    return y.grad


def by_differentiable_grad(y: Tensor, loss: Tensor) -> Tensor:
    return torch.autograd.grad(loss, y, create_graph=True)[0]


PAIRS = [
    relu_and_layer,
    relu_and_norm,
    relu_and_norm_with_bias,
    layer_and_norm,
    alone_and_norm,
    two_layers,
]


@devices
@pytest.mark.parametrize("pair", PAIRS)
@pytest.mark.parametrize(
    "look", [by_retaining, by_hook, by_grad, by_inputs, by_differentiable_grad]
)
def test_the_gradient_of_a_result_is_whole(
    switch: Callable,
    monkeypatch: pytest.MonkeyPatch,
    pair: Callable,
    look: Callable,
    device: str,
) -> None:
    """The mean's part goes past the result to its maker, but not past one who looks."""
    first, second = (module.to(device) for module in pair())
    x = torch.randn(2, 3, 5, 5, dtype=torch.float64, device=device, requires_grad=True)
    found = []
    for on in (False, True):
        switch(on)
        monkeypatch.setattr(fused, "DEVICES", {device} if on else set())
        y = first(x * 1)
        found.append(look(y, second(y).pow(3).sum()))
    torch.testing.assert_close(found[1], found[0])


def test_a_hook_may_change_the_gradient(switch: Callable) -> None:
    first, second = two_layers()
    x = torch.randn(2, 3, 5, 5, dtype=torch.float64)
    found = []
    for on in (False, True):
        switch(on)
        first.zero_grad()
        y = first(x)
        y.register_hook(lambda grad: grad.clamp(-0.1, 0.1))
        second(y).pow(3).sum().backward()
        found.append([p.grad.clone() for p in first.parameters()])
    torch.testing.assert_close(found[1], found[0])


@devices
@pytest.mark.parametrize("pair", PAIRS)
def test_a_hook_outlives_its_tensor(
    switch: Callable, monkeypatch: pytest.MonkeyPatch, pair: Callable, device: str
) -> None:
    """Centring keeps no input: a hook that was set on it is run all the same."""
    first, second = (module.to(device) for module in pair())
    x = torch.randn(2, 3, 5, 5, dtype=torch.float64, device=device, requires_grad=True)
    found: list[list[Tensor]] = []
    for on, early in ((False, True), (True, True), (True, False)):
        switch(on)
        monkeypatch.setattr(fused, "DEVICES", {device} if on else set())
        y, x.grad = first(x * 1), None
        seen: list[Tensor] = []
        handle = y.register_hook(seen.append) if early else None
        z = second(y)
        handle = handle or y.register_hook(seen.append)
        del y, handle
        z.pow(3).sum().backward()
        found.append([*seen, x.grad])
    torch.testing.assert_close(found[1], found[0])
    torch.testing.assert_close(found[2], found[0])


def test_a_means_gradient_goes_past_the_result(
    switch: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What comes to the norm comes to the layer before it, untouched."""
    switch(True)
    first, second = layer_and_norm()
    z = second(first(torch.randn(2, 3, 5, 5, dtype=torch.float64)))
    came, backward = [], columns.rectify_backward

    def recorded(grad: Tensor, *args: object, **options: object) -> tuple:
        came.append(grad.data_ptr())
        return backward(grad, *args, **options)

    monkeypatch.setattr(columns, "rectify_backward", recorded)
    grad = torch.randn_like(z)
    z.backward(grad)
    assert came == [grad.data_ptr()]


def test_centring_keeps_no_input(switch: Callable) -> None:
    switch(True)
    y = fused.ReLU()(torch.randn(2, 3, 4, 4, requires_grad=True) * 1)
    z = InputMeanNorm(3)(y)
    assert not any(isinstance(kept, Tensor) for kept in vars(z.grad_fn).values())
    assert z.grad_fn.saved_tensors == ()


def test_a_detached_result_has_a_detached_mean(switch: Callable) -> None:
    switch(True)
    first, second = two_layers()
    y = first(torch.randn(2, 3, 5, 5, dtype=torch.float64))
    y.detach_()
    second(y).pow(3).sum().backward()
    assert first.r.grad is None and second.r.grad is not None


def test_an_input_may_ask_for_its_gradient_later(switch: Callable) -> None:
    layer = GmPConv2d(3, 4, 3, input_norm="bias").double()
    found = []
    for on in (False, True):
        switch(on)
        x = torch.ones(2, 3, 5, 5, dtype=torch.float64).cumsum(2)
        layer(x)
        x.requires_grad_()
        layer(x).pow(3).sum().backward()
        found.append(x.grad)
    torch.testing.assert_close(found[1], found[0])


@pytest.mark.parametrize("kernels", ["torch", "native"])
def test_batches_of_gradients(
    switch: Callable, kernels: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(implementation, "KERNELS", kernels)
    monkeypatch.setattr(columns_native, "SMALLEST", 0)
    first, second = two_layers()
    model = nn.Sequential(first, second, fused.ReLU(), InputMeanNorm(4).double())
    x = torch.randn(2, 3, 5, 5, dtype=torch.float64)
    found = []
    for on in (False, True):
        switch(on)
        y, each = model(x).pow(3).mean((0, 2, 3)), torch.eye(4, dtype=torch.float64)
        parameters = list(model.parameters())
        found.append(torch.autograd.grad(y, parameters, each, is_grads_batched=True))
    torch.testing.assert_close(found[1], found[0])


@pytest.mark.compile
def test_compiled_autograd(switch: Callable) -> None:
    unit = {"activation": torch.relu, "dtype": torch.float64}
    model = nn.Sequential(
        GmPConv2d(3, 4, 3, **unit),
        InputMeanNorm(4).double(),
        GmPConv2d(4, 4, 3, input_norm="bias", **unit),
        GmPConv2d(4, 2, 1, input_norm="bias", **unit),
        InputMeanNorm(2).double(),
    )
    x = torch.randn(2, 3, 7, 7, dtype=torch.float64)
    found = []
    for compiled in (False, True):
        switch(compiled)
        torch.compiler.reset()
        with torch._dynamo.config.patch(compiled_autograd=compiled):
            backward = torch.compile(lambda loss: loss.backward(), backend="eager")
            backward(model(x).pow(3).sum())
        found.append([p.grad for p in model.parameters()])
        model.zero_grad()
    torch.testing.assert_close(found[1], found[0])
