"""Training in few passes: equal to the readable form, and given up wherever that would not hold.

On CPUs the passes are plain torch; here they are switched on there, to test what is around them.
"""

import copy
from collections import Counter
from collections.abc import Callable

import numpy
import pytest
import torch
import torch.nn.functional as F
from residual import residual_network
from torch import Tensor, nn
from torch.nn.utils import parametrize, prune
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import geoparam as gp
from geoparam import (
    GmPConv1d,
    GmPConv2d,
    GmPConv3d,
    InputMeanNorm,
    MeanOnlyBatchNorm,
    fused,
    notes,
)
from geoparam.ops import columns, columns_native, implementation

LAYOUTS = [torch.contiguous_format, torch.channels_last]


@pytest.fixture
def passes(monkeypatch: pytest.MonkeyPatch) -> Counter:
    """Count the passes over activations by their name."""
    counted: Counter = Counter()

    def counting(name: str, call: Callable) -> Callable:
        def run(*args: object, **kwargs: object) -> object:
            counted[name] += 1
            return call(*args, **kwargs)

        return run

    for name in ("rectify", "rectify_backward", "sums"):
        monkeypatch.setattr(columns, name, counting(name, getattr(columns, name)))
    return counted


def converted(layout: torch.memory_format = torch.channels_last, **options: str) -> nn.Module:
    example = torch.randn(4, 3, 12, 12, dtype=torch.float64)
    model = residual_network().double()
    model = gp.convert_(model, norm="imn", example_inputs=example, **options)
    return model.to(memory_format=layout)


def stacked() -> nn.Module:
    """Return layers with their own ReLU, with r of both signs and 0, and mean normalization."""
    model = nn.Sequential(
        GmPConv2d(3, 4, 3, padding=1, activation=torch.relu),
        InputMeanNorm(4),
        GmPConv2d(4, 6, 3, activation=nn.ReLU(), bias=False),
        nn.MaxPool2d(2),
        MeanOnlyBatchNorm(6),
        GmPConv2d(6, 4, 1, activation=F.relu, input_norm=True),
        nn.Flatten(),
    ).double()
    with torch.no_grad():
        for layer in (model[0], model[2]):
            layer.r[:3] = torch.tensor([-0.7, 0.0, 1.3])
    return model


def train(model: nn.Module, layout: torch.memory_format, steps: int = 3) -> dict[str, Tensor]:
    """Return the state after some steps, and the losses."""
    generator = torch.Generator().manual_seed(3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    losses = []
    for _ in range(steps):
        x = torch.randn(4, 3, 12, 12, generator=generator, dtype=torch.float64)
        loss = model(x.contiguous(memory_format=layout)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return {**model.state_dict(), "losses": torch.stack(losses)}


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, atol=1e-12, rtol=1e-10, msg=name)


# --- equal to the readable form -----------------------------------------------------------------


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    "options", [{}, {"init": "glorot"}, {"coordinates": "intrinsic"}], ids=str
)
def test_converted_network(switch: Callable, layout: torch.memory_format, options: dict) -> None:
    model = converted(layout, **options)
    switch(False)
    expected = train(copy.deepcopy(model), layout)
    switch(True)
    assert_same(train(model, layout), expected)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layers_with_their_own_relu(switch: Callable, layout: torch.memory_format) -> None:
    model = stacked()
    switch(False)
    expected = train(copy.deepcopy(model), layout)
    switch(True)
    assert_same(train(model, layout), expected)


LAYERS = {
    "1d": (GmPConv1d(4, 6, 3, padding=1, input_norm="bias"), (2, 4, 7)),
    "3d": (GmPConv3d(4, 2, 2, input_norm=True, activation=torch.relu), (2, 4, 3, 4, 3)),
    "groups": (GmPConv2d(4, 6, 3, groups=2, stride=2, input_norm="bias"), (2, 4, 7, 6)),
    "no bias": (GmPConv2d(4, 6, 1, bias=False, input_norm=True), (2, 4, 5, 5)),
    "bias alone": (GmPConv2d(4, 6, 1), (2, 4, 5, 5)),
    "circular": (
        GmPConv2d(4, 6, 3, padding=(1, 2), padding_mode="circular", input_norm="bias"),
        (2, 4, 5, 5),
    ),
    "rectangular": (GmPConv2d(4, 6, (3, 1), padding=(2, 0), dilation=(2, 1)), (2, 4, 5, 6)),
    "same": (GmPConv2d(4, 6, 3, padding="same", input_norm="bias"), (2, 4, 5, 5)),
    "zeros after centring": (GmPConv2d(4, 6, 3, padding=1, input_norm=True), (2, 4, 5, 5)),
    "zeros after centring, ReLU": (
        GmPConv2d(4, 6, 3, padding=1, stride=2, input_norm=True, activation=torch.relu),
        (2, 4, 5, 5),
    ),
    "zeros after centring, tanh": (
        GmPConv2d(4, 6, 3, padding=1, input_norm=True, activation=torch.tanh),
        (2, 4, 5, 5),
    ),
    "zeros after centring, 1d": (GmPConv1d(4, 6, 3, padding=1, input_norm=True), (2, 4, 7)),
    "zeros after centring one image": (
        GmPConv2d(4, 6, 3, padding=1, input_norm=True),
        (4, 5, 5),
    ),
    "zeros after centring nothing": (GmPConv2d(4, 6, 3, padding=1, input_norm=True), (0, 4, 5, 5)),
    "one input": (GmPConv2d(1, 3, 1, input_norm="bias"), (2, 1, 3, 3)),
    "other activation": (
        GmPConv2d(4, 6, 3, activation=torch.tanh, input_norm="bias"),
        (2, 4, 5, 5),
    ),
    "empty": (GmPConv2d(4, 6, 3, input_norm="bias"), (0, 4, 5, 5)),
    "one image": (GmPConv2d(4, 6, 3), (4, 5, 5)),
}


@pytest.mark.parametrize("name", LAYERS)
def test_every_form_of_a_convolution(switch: Callable, name: str) -> None:
    layer, shape = LAYERS[name]
    layer = copy.deepcopy(layer).double()
    nn.init.normal_(layer.r)
    if layer.lam is not None:
        nn.init.normal_(layer.lam)
    x = torch.randn(shape, dtype=torch.float64)
    results = []
    for on in (False, True):
        switch(on)
        twin, given = copy.deepcopy(layer), x.clone().requires_grad_()
        y = twin(given)
        generator = torch.Generator().manual_seed(1)
        y.backward(torch.randn(y.shape, generator=generator, dtype=y.dtype))
        gradients = {name: p.grad for name, p in twin.named_parameters()}
        results.append({**dict(twin.named_buffers()), **gradients, "y": y, "x": given.grad})
    assert_same(results[1], results[0])


def changed_to_same(layer: GmPConv2d) -> None:
    layer.padding = "same"


def changed_to_numbers(layer: GmPConv2d) -> None:
    layer.stride, layer.padding, layer.dilation = 2, 1, 1


def pruned(layer: GmPConv2d) -> None:
    prune.random_unstructured(layer, "lam", 1)


def parametrized(layer: GmPConv2d) -> None:
    parametrize.register_parametrization(layer, "lam", nn.Softplus())


def strided(layer: GmPConv2d) -> None:
    layer.unit = nn.Parameter(layer.unit.detach().t().contiguous().t())


@pytest.mark.parametrize(
    "change", [changed_to_same, changed_to_numbers, pruned, parametrized, strided]
)
def test_what_is_changed_later(switch: Callable, change: Callable) -> None:
    results = []
    kernel = 1 if change is strided else 3  # images of one pixel lie in both orders at once
    x = torch.randn(8, 4, *[1 if change is strided else 9] * 2, dtype=torch.float64)
    for on in (False, True):
        switch(on)
        torch.manual_seed(0)
        layer = GmPConv2d(4, 6, kernel, input_norm="bias", coordinates="intrinsic").double()
        nn.init.normal_(layer.lam)
        change(layer)
        y = layer(x)
        y.pow(2).sum().backward()
        results.append({"y": y, **{name: p.grad for name, p in layer.named_parameters()}})
    assert_same(results[1], results[0])


def test_bfloat16_is_as_near_to_float64_as_the_readable_form(switch: Callable) -> None:
    def gradient(model: nn.Module, x: Tensor, autocast: bool) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            y = model(x)
        y.double().square().mean().backward()
        return torch.cat([p.grad.double().flatten() for p in model.parameters()])

    model, x = converted(), torch.randn(8, 3, 12, 12)
    switch(False)
    expected = gradient(copy.deepcopy(model), x.double(), False)
    errors = []
    for on in (False, True):
        switch(on)
        errors.append((gradient(copy.deepcopy(model).float(), x, True) - expected).norm())
    assert errors[1] < 1.2 * errors[0]


def test_second_derivatives(switch: Callable) -> None:
    def gradients(model: nn.Module) -> list[Tensor]:
        x = torch.randn(2, 3, 12, 12, dtype=torch.float64, requires_grad=True)
        (slope,) = torch.autograd.grad(model(x).square().sum(), x, create_graph=True)
        return torch.autograd.grad(slope.square().sum(), list(model.parameters()))

    for model in (converted(), stacked()):
        found = []
        for on in (False, True):
            switch(on)
            torch.manual_seed(1)
            found.append(gradients(copy.deepcopy(model)))
        for a, b in zip(*found, strict=True):
            torch.testing.assert_close(a, b, atol=1e-12, rtol=1e-9)


def test_checkpointing(switch: Callable) -> None:
    switch(True)
    model, x = converted(), torch.randn(2, 3, 12, 12, dtype=torch.float64)
    twin = copy.deepcopy(model)
    model(x).square().sum().backward()
    split = len(twin) // 2
    middle = twin[:split](x)
    checkpoint(twin[split:], middle, use_reentrant=False).square().sum().backward()
    for a, b in zip(twin.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad)


# --- few passes ---------------------------------------------------------------------------------


def test_means_cost_no_pass_of_their_own(switch: Callable, passes: Counter) -> None:
    switch(True)
    layer, norm = GmPConv2d(3, 8, 3, activation=torch.relu), InputMeanNorm(8)
    y = layer(torch.randn(2, 3, 6, 6))
    before = passes["sums"]
    norm(y)
    assert passes["sums"] == before


def test_a_bias_after_relu_costs_no_pass_backward(switch: Callable, passes: Counter) -> None:
    switch(True)
    convolution = GmPConv2d(3, 8, 1)
    y = fused.ReLU()(convolution(torch.randn(2, 3, 6, 6)))
    passes.clear()
    y.sum().backward()
    assert passes == {"rectify_backward": 1, "sums": 1}  # plain torch sums within the former


def test_who_shares_an_input_shares_its_mean(switch: Callable, passes: Counter) -> None:
    switch(True)
    layers = [GmPConv2d(3, 4, 1, input_norm="bias") for _ in range(3)]
    x = torch.randn(2, 3, 4, 4, requires_grad=True) * 1
    for layer in layers:
        layer(x)
    assert passes["sums"] == 1


# --- notes --------------------------------------------------------------------------------------


def test_a_note_is_of_one_tensor_in_one_version() -> None:
    x, sums = torch.ones(2, 3), torch.full((3,), 2.0)
    notes.note(x, 1, sums)
    assert notes.noted(x, 1) is sums and notes.noted(x, -1) is sums
    assert notes.noted(x, 0) is None
    for other in (x.view(2, 3), x.detach(), x.clone(), x[:]):
        assert notes.noted(other, 1) is None
    x.add_(1)
    assert notes.noted(x, 1) is None


def test_a_note_may_be_in_parts() -> None:
    x = torch.ones(4, 3)
    notes.note(x, 1, torch.ones(4, 3))
    assert notes.noted(x, 1).tolist() == [4, 4, 4]
    assert notes.noted_in_parts(x, 1).shape == (4, 3)


@pytest.mark.parametrize("layer", [InputMeanNorm(4), GmPConv2d(4, 5, 3, input_norm="bias")])
def test_a_gradient_may_be_an_input(switch: Callable, layer: nn.Module) -> None:
    results, layer = [], layer.double()
    x = torch.randn(6, 4, 5, 5, dtype=torch.float64, requires_grad=True)
    for on in (False, True):
        switch(on)
        (g,) = torch.autograd.grad(fused.ReLU()(x * 1).pow(3).sum(), x)
        if on:
            notes.note(g, 1, g.sum((2, 3)))  # as Triton's kernels have it: in parts
        results.append(copy.deepcopy(layer)(g))
    torch.testing.assert_close(results[1], results[0])


def test_notes_go_with_their_tensors() -> None:
    before = len(notes._notes)
    x = torch.ones(2, 3)
    notes.note(x, 1, x.sum(0))
    assert len(notes._notes) == before + 1
    del x
    assert len(notes._notes) == before


@pytest.mark.parametrize("change", [lambda y: y.add_(1), lambda y: y[:, :2].zero_()])
def test_a_change_in_place_is_seen(switch: Callable, change: Callable) -> None:
    switch(True)
    y = fused.ReLU()(torch.randn(4, 3, 5, 5, requires_grad=True) * 1)
    change(y)
    norm = InputMeanNorm(3)
    torch.testing.assert_close(norm(y), y - y.mean((0, 2, 3), keepdim=True))


@pytest.mark.parametrize("order", [1, -1], ids=["ReLU first", "ReLU last"])
def test_gradients_that_are_added_up_are_summed_anew(switch: Callable, order: int) -> None:
    """Autograd may add a second gradient onto the noted one, in its memory."""
    switch(True)
    layer = GmPConv2d(3, 4, 1)
    x = torch.randn(2, 3, 5, 5)

    def gradient(relu: nn.Module) -> Tensor:
        layer.zero_grad()
        z = layer(x)
        uses = [lambda: relu(z).square().sum(), lambda: (z * z.detach()).sum()][::order]
        sum(use() for use in uses).backward()
        return layer.lam.grad.clone()

    torch.testing.assert_close(gradient(fused.ReLU()), gradient(nn.ReLU()))


def test_memory_of_others_is_summed_anew(switch: Callable) -> None:
    """Numpy and `data` change a tensor and no version."""
    switch(True)
    array = numpy.ones((2, 3, 4), numpy.float32)
    x, norm = torch.from_numpy(array), InputMeanNorm(3)
    norm(x)
    array += numpy.arange(4, dtype=numpy.float32)
    torch.testing.assert_close(norm(x), x - x.mean((0, 2), keepdim=True))
    y = fused.ReLU()(torch.randn(4, 3, requires_grad=True) * 1)
    y.data = y.data * 2 + 1
    torch.testing.assert_close(norm(y), y - y.mean(0, keepdim=True))


def test_no_note_stays_behind(switch: Callable) -> None:
    """An input's gradient node holds the input, so a note must not hold the node."""
    switch(True)
    layer = GmPConv2d(3, 4, 1, input_norm="bias")
    before = len(notes._notes)
    for _ in range(3):
        layer(torch.randn(2, 3, 4, 4, requires_grad=True)).sum().backward()
    assert len(notes._notes) == before


def test_relu_in_place_changes_its_input(switch: Callable) -> None:
    switch(True)
    x = torch.randn(2, 3, 4, 4, requires_grad=True)
    z = x * 1
    assert fused.ReLU(inplace=True)(z) is z
    assert z.min() >= 0
    z.sum().backward()
    assert torch.equal(x.grad, (x > 0).float())


# --- given up -----------------------------------------------------------------------------------


def test_evaluation_takes_the_readable_form(switch: Callable, passes: Counter) -> None:
    switch(True)
    model = converted().eval()
    model(torch.randn(2, 3, 12, 12, dtype=torch.float64))
    assert not passes


def test_without_gradients_the_readable_form(switch: Callable, passes: Counter) -> None:
    switch(True)
    with torch.no_grad():
        converted()(torch.randn(2, 3, 12, 12, dtype=torch.float64))
    assert not passes


def test_functional_calls_and_forward_mode(switch: Callable, passes: Counter) -> None:
    switch(True)
    model = stacked()
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    x = torch.randn(2, 3, 12, 12, dtype=torch.float64)

    def loss(parameters: dict[str, Tensor]) -> Tensor:
        return torch.func.functional_call(model, {**parameters, **buffers}, (x,)).square().sum()

    with torch.no_grad():
        parameters = {name: p.detach() for name, p in model.named_parameters()}
    for norm in model.modules():
        if isinstance(norm, InputMeanNorm):
            norm.track_running_stats, norm.running_mean = False, None
            norm.num_batches_tracked = None
    buffers.clear()
    gradients = torch.func.grad(loss)(parameters)
    assert not passes and all(g.isfinite().all() for g in gradients.values())


def test_hooks_see_what_they_saw(switch: Callable) -> None:
    model, seen = converted(), []
    for module in model.modules():
        if isinstance(module, gp.GmPConv2d | nn.ReLU):
            module.register_forward_hook(lambda m, x, y: seen.append((x[0].clone(), y.clone())))
    x = torch.randn(2, 3, 12, 12, dtype=torch.float64)
    records = []
    for on in (False, True):
        switch(on)
        seen.clear()
        model(x)
        records.append(list(seen))
    for expected, found in zip(*records, strict=True):
        torch.testing.assert_close(found, expected)


def test_inference_tensors(switch: Callable) -> None:
    switch(True)
    with torch.inference_mode():
        x = torch.randn(4, 3)
    torch.testing.assert_close(InputMeanNorm(3)(x), x - x.mean(0))


def test_relu_can_be_traced() -> None:
    traced = torch.fx.symbolic_trace(nn.Sequential(fused.ReLU()))
    assert torch.equal(traced(torch.tensor([-1.0, 2.0])), torch.tensor([0.0, 2.0]))


def test_an_activation_that_is_looked_at_is_called(switch: Callable) -> None:
    switch(True)
    activation, calls = nn.ReLU(), []
    layer, x = GmPConv2d(3, 4, 1, activation=activation), torch.randn(2, 3, 4, 4)
    handle = nn.modules.module.register_module_forward_hook(lambda m, *_: calls.append(m))
    try:
        layer(x)
    finally:
        handle.remove()
    assert calls == [activation, layer]
    activation.forward = torch.tanh
    assert layer(x).min() < 0


# --- conversion ---------------------------------------------------------------------------------


def test_relus_keep_their_kind_and_come_back() -> None:
    model = residual_network()
    keys = list(model.state_dict())
    names = [n for n, m in model.named_modules() if isinstance(m, nn.ReLU)]
    example = torch.randn(4, 3, 12, 12)
    gp.convert_(model, norm="imn", example_inputs=example)
    ours = [n for n, m in model.named_modules() if type(m) is fused.ReLU]
    assert ours == names
    assert all(model.get_submodule(n).inplace for n in names)
    gp.fold_(model)
    assert [n for n, m in model.named_modules() if type(m) is nn.ReLU] == names
    assert list(model.state_dict()) == keys


def test_relus_keep_what_was_set_on_them() -> None:
    model = residual_network()
    model[2].tag = "mine"
    gp.convert_(model, norm="imn", example_inputs=torch.randn(4, 3, 12, 12))
    assert type(model[2]) is fused.ReLU and model[2].tag == "mine"
    gp.fold_(model)
    assert type(model[2]) is nn.ReLU and model[2].tag == "mine"


def test_relus_elsewhere_stay() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))
    gp.convert_(model, example_inputs=torch.randn(2, 4))
    assert type(model[1]) is nn.ReLU


def test_compiles_as_one_graph(switch: Callable) -> None:
    switch(True)
    model = converted()
    compiled = torch.compile(copy.deepcopy(model), fullgraph=True, backend="aot_eager")
    x = torch.randn(2, 3, 12, 12, dtype=torch.float64)
    torch.testing.assert_close(compiled(x), model(x))


@pytest.mark.skipif(not columns_native.available(), reason="needs a C compiler")
@pytest.mark.parametrize("input_too", [False, True])
def test_what_is_lent_is_given_to_nobody(
    input_too: bool, switch: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All that a backward pass returns stays as it is when lent memory is written to."""
    monkeypatch.setattr(columns_native, "SMALLEST", 0)
    monkeypatch.setattr(implementation, "KERNELS", "auto")
    monkeypatch.setattr(columns_native, "_lent", columns_native._Lent())
    model, x = stacked(), torch.randn(2, 3, 8, 8, dtype=torch.float64)
    found = []
    for on in (False, True):
        switch(on)
        twin, given = copy.deepcopy(model), x.clone().requires_grad_(input_too)
        twin(given).pow(3).sum().backward()
        assert (columns_native._lent.memory.numel() > 0) is on
        columns_native._lent.memory.fill_(255)  # NaN
        grads = [p.grad for p in twin.parameters()]
        found.append([*grads, given.grad] if input_too else grads)
    torch.testing.assert_close(found[1], found[0])


class FunctionMode(torch.overrides.TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Callable] = []

    def __torch_function__(
        self, func: Callable, types: tuple, args: tuple = (), kwargs: dict | None = None
    ) -> object:
        self.seen.append(func)
        return func(*args, **(kwargs or {}))


class DispatchMode(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Callable] = []

    def __torch_dispatch__(
        self, func: Callable, types: tuple, args: tuple = (), kwargs: dict | None = None
    ) -> object:
        self.seen.append(func)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("mode", [FunctionMode, DispatchMode])
@pytest.mark.skipif(not columns_native.available(), reason="needs a C compiler")
def test_nothing_is_lent_where_a_mode_may_keep_it(
    mode: type, switch: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(columns_native, "SMALLEST", 0)
    monkeypatch.setattr(implementation, "KERNELS", "auto")
    monkeypatch.setattr(columns_native, "_lent", columns_native._Lent())
    switch(True)
    loss = stacked()(torch.randn(2, 3, 8, 8, dtype=torch.float64)).pow(3).sum()
    engine, one = torch.autograd.Variable._execution_engine, torch.ones_like(loss)
    with mode() as looking:  # backward() itself would hide what is inside
        engine.run_backward((loss,), (one,), False, False, (), True, accumulate_grad=True)
    assert torch.ops.aten.convolution_backward.default in looking.seen
    assert columns_native._lent.memory.numel() == 0
