"""verify: differences by each output's own scale; what fails half-way leaves the model alone."""

import copy
import math
import sys
from collections.abc import Callable
from types import FrameType

import numpy as np
import pytest
import torch
from function_model import FunctionModel
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from zoo import pretend_pretrained

import geoparam as gp

LOGITS = torch.tensor([[1.0, -2.0, 0.5, 4.0]])
OTHERS = torch.tensor([[1.0, -2.0, 0.5, 4.4]])


def difference(first: object, second: object) -> float:
    """Return what verify says of two models with these outputs."""
    a, b = (FunctionModel(lambda m, x, outputs=outputs: outputs) for outputs in (first, second))
    return gp.verify(a, b, torch.ones(1))


def test_outputs_are_compared_by_their_own_scale() -> None:
    assert difference(LOGITS, OTHERS) == pytest.approx(0.1)
    assert difference({"a": LOGITS, "b": [LOGITS]}, {"a": LOGITS, "b": [OTHERS]}) == pytest.approx(
        0.1
    )
    assert difference([1e5 * LOGITS, LOGITS], [1e5 * LOGITS, OTHERS]) == pytest.approx(0.1)


@pytest.mark.parametrize("fill", [-1e9, 1e4, torch.finfo(torch.float32).min, -torch.inf])
@pytest.mark.parametrize("masked", [1, 3, 100])
def test_masked_elements_set_no_scale(fill: float, masked: int) -> None:
    mask = torch.full((1, masked), fill)
    found = difference(torch.cat([LOGITS, mask], 1), torch.cat([OTHERS, mask], 1))
    assert found == pytest.approx(0.1)


def test_large_elements_that_differ_are_not_masked() -> None:
    large = torch.tensor([[1e9]])
    found = difference(torch.cat([LOGITS, large], 1), torch.cat([LOGITS, 1.2 * large], 1))
    assert found == pytest.approx(0.2)


@pytest.mark.parametrize("size", [10.0**power for power in range(-12, 13, 4)])
def test_every_size_is_seen_alone_and_noise_is_not_beside_a_large_one(size: float) -> None:
    assert difference(size * LOGITS, size * OTHERS) == pytest.approx(0.1)
    found = difference([LOGITS, size * LOGITS], [LOGITS, size * OTHERS])
    is_noise = size < 1e-6
    assert found == pytest.approx(0.1 * size if is_noise else 0.1)


def test_rounding_noise_beside_an_output_is_no_difference() -> None:
    softmax = LOGITS.softmax(-1)
    noise = softmax.sum() - 1 + 1e-8
    assert difference([softmax, noise], [softmax, -noise]) < 1e-6


@pytest.mark.parametrize(
    "constant", [torch.full((3,), 1e12), torch.tensor(1e12), torch.tensor([1_700_000_000, 5])]
)
def test_constants_and_integers_set_no_scale_for_others(constant: Tensor) -> None:
    assert difference([LOGITS, constant], [OTHERS, constant]) == pytest.approx(0.1)
    assert difference([constant], [constant]) == 0


def test_integers_and_zeros_are_compared() -> None:
    assert difference(torch.tensor([3, 4]), torch.tensor([3, 5])) == pytest.approx(0.25)
    assert difference(torch.zeros(2), torch.zeros(2)) == 0
    assert difference(torch.zeros(2), torch.ones(2)) == math.inf
    assert difference([torch.zeros(2), LOGITS], [torch.ones(2), LOGITS]) == pytest.approx(0.25)


def test_inputs_are_one_calls_arguments() -> None:
    double, same = (FunctionModel(lambda m, x, k=k: k * x) for k in (2, 1))
    x = torch.ones(2)
    for inputs in (x, {"x": x}, (x,), [x]):
        assert gp.verify(double, same, inputs) == 0.5
    with pytest.raises(ValueError, match="shapes"):
        gp.verify(nn.Linear(2, 3), nn.Linear(2, 4), x)
    with pytest.raises(ValueError, match="does not run on these inputs"):
        gp.verify(nn.Linear(3, 3), nn.Linear(2, 3), x)


def test_a_nan_is_seen_and_the_mode_restored() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Dropout())
    broken = copy.deepcopy(model)
    with torch.no_grad():
        broken[0].weight.fill_(torch.nan)
    assert math.isnan(gp.verify(model, broken, torch.ones(1, 2)))
    assert model.training and model[1].training


def test_imaginary_parts_are_seen_and_equal_infinities_do_not_differ() -> None:
    first, second = (FunctionModel(lambda m, x, s=s: torch.complex(x, s * x)) for s in (1, -1))
    assert gp.verify(first, second, torch.ones(3)) == pytest.approx(2**0.5)
    x = torch.tensor([1.0, -torch.inf])
    assert gp.verify(nn.Identity(), nn.Identity(), x) == 0
    assert gp.verify(nn.Identity(), nn.ReLU(), x) == math.inf


def test_attention_is_compared_on_torchs_plain_path() -> None:
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    model = nn.TransformerEncoder(layer, 1).eval()
    mask = torch.tensor([[False, False, True], [False, False, False]])
    inputs = {"src": torch.randn(2, 3, 8), "src_key_padding_mask": mask}
    converted = gp.convert_(copy.deepcopy(model), example_inputs=inputs)
    assert gp.verify(model, converted, inputs) < 1e-5


@pytest.mark.parametrize(
    "call",
    [
        lambda model, x: gp.verify(x, model, model),
        lambda model, x: gp.verify(model, x, model),
        lambda model, x: gp.convert_(None),
        lambda model, x: gp.convert_(model.parameters()),
        lambda model, x: gp.plan(x),
        lambda model, x: gp.fold_(None),
    ],
)
def test_what_is_no_model_is_refused_in_words(call: Callable) -> None:
    with pytest.raises(ValueError, match="an nn.Module; got a"):
        call(nn.Linear(2, 2), torch.ones(1, 2))


ODD = {
    "filter_fn": ({"filter_fn": "head"}, "filter_fn is a function.*got"),
    "array": ({"example_inputs": np.ones((2, 4))}, "numpy array: use torch.from_numpy"),
    "iterator": ({"example_inputs": iter([torch.ones(2, 4)])}, "one batch.*got a list_iterator"),
    "shape": ({"example_inputs": torch.ones(2, 3)}, "does not run on these inputs .RuntimeError"),
    "number": ({"example_inputs": 3}, "does not run on these inputs .TypeError"),
    "coordinates": ({"coordinates": ""}, "coordinates"),
    "calibration": (
        {"norm": "imn", "example_inputs": torch.ones(2, 4), "calibration": 3},
        "calibration is a batch.*got a int",
    ),
}


@pytest.mark.parametrize(("options", "message"), ODD.values(), ids=ODD)
def test_odd_arguments_are_refused_in_words(options: dict, message: str) -> None:
    layers = nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)
    model = pretend_pretrained(nn.Sequential(*layers))
    with pytest.raises(ValueError, match=message):
        gp.convert_(model, **options)
    assert list(model) == list(layers)


@pytest.mark.parametrize("fill", [-1e9, torch.finfo(torch.float32).min])
def test_a_changed_function_is_refused_beside_masked_outputs(fill: float) -> None:
    def forward(m: FunctionModel, x: Tensor) -> Tensor:
        shift = 1 if type(m.hidden) is nn.Linear else 1.1
        return (shift * m.head(m.hidden(x))).masked_fill(torch.tensor([False, True]), fill)

    model = FunctionModel(forward, hidden=nn.Linear(4, 4), head=nn.Linear(4, 2))
    with pytest.raises(ValueError, match="differs by 1.0e-01"):
        gp.convert_(model, example_inputs=torch.ones(3, 4))
    assert type(model.hidden) is nn.Linear


def test_an_output_of_nan_hides_no_other() -> None:
    def forward(m: FunctionModel, x: Tensor) -> tuple[Tensor, Tensor]:
        shift = 1 if type(m.hidden) is nn.Linear else 1.1
        return shift * m.head(m.hidden(x)), x * torch.nan

    model = FunctionModel(forward, hidden=nn.Linear(4, 4), head=nn.Linear(4, 2))
    with pytest.raises(ValueError, match="differs by 1.0e-01"):
        gp.convert_(model, example_inputs=torch.ones(3, 4))


class Softmax(nn.Module):
    """A network whose output autocast keeps in float32."""

    def __init__(self) -> None:
        super().__init__()
        self.network = build_network()

    def forward(self, x: Tensor) -> Tensor:
        return self.network(x).float().softmax(dim=1)


@pytest.mark.parametrize("weights", ["geometric", "plain"])
def test_autocast_around_a_conversion_sees_the_new_weights(weights: str) -> None:
    original = Softmax().eval()
    model = copy.deepcopy(original)
    options = {"norm": "fold", "weights": weights, "example_inputs": X}
    with torch.autocast("cpu", torch.bfloat16):
        gp.convert_(model, **options)
        torch.testing.assert_close(model(X), original(X), atol=0.02, rtol=0)
    assert gp.verify(original, model, X) < 1e-5


class OutOfMemory(TorchDispatchMode):
    """Lets so many operations through, and the next one fail."""

    def __init__(self, operations: int) -> None:
        super().__init__()
        self.left = operations

    def __torch_dispatch__(
        self, func: Callable, types: object, args: tuple = (), kwargs: dict | None = None
    ) -> object:
        self.left -= 1
        if self.left == -1:
            raise MemoryError
        return func(*args, **(kwargs or {}))


def build_network() -> nn.Module:
    blocks = [nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 4, 3)]
    model = nn.Sequential(
        *blocks, nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(16, 4), nn.Linear(4, 2)
    )
    return pretend_pretrained(model)


X = torch.randn(2, 3, 6, 6)
CHANGES = {
    "convert": (build_network, gp.convert_),
    "convert with inputs": (
        build_network,
        lambda model: gp.convert_(model, norm="imn", weights="plain", example_inputs=X),
    ),
    "fold": (lambda: gp.convert_(build_network()), gp.fold_),
    "fold with inputs": (
        lambda: gp.convert_(build_network(), norm="imn", example_inputs=X),
        lambda model: gp.fold_(model, example_inputs=X),
    ),
}


@pytest.mark.parametrize(("build", "change"), CHANGES.values(), ids=CHANGES)
def test_running_out_of_memory_at_any_moment_leaves_the_model_as_it_was(
    build: Callable, change: Callable
) -> None:
    failures = 0
    for operations in (*range(30), *range(30, 5000, 7)):
        model = build()
        modules, tensors = list(model.modules()), [*model.parameters(), *model.buffers()]
        state = copy.deepcopy(model.state_dict())
        try:
            with OutOfMemory(operations) as memory:
                change(model)
        except (MemoryError, ValueError):
            failures += 1
            assert list(model.modules()) == modules
            after = [*model.parameters(), *model.buffers()]
            assert all(now is then for now, then in zip(after, tensors, strict=True))
            assert all(torch.equal(t, state[key]) for key, t in model.state_dict().items())
            assert all(p.requires_grad for p in model.parameters())
        if memory.left >= 0:  # it was done before
            break
    assert failures > 3 and memory.left >= 0


class KeyboardInterrupts:
    """Ctrl-C in a forward pass, and again at a line of the function that puts a model back."""

    def __init__(self, line: int) -> None:
        self.left = line

    def forward(self, *_: object) -> None:
        sys.settrace(self.enter)
        raise KeyboardInterrupt

    def enter(self, frame: FrameType, event: str, arg: object) -> Callable | None:
        return self.count if frame.f_code.co_name == "_refill" else None

    def count(self, frame: FrameType, event: str, arg: object) -> Callable:
        self.left -= 1
        if self.left == 0:
            sys.settrace(None)
            raise KeyboardInterrupt
        return self.count


@pytest.mark.parametrize("line", [1, 2, 3, 10, 40])
def test_a_second_ctrl_c_while_a_model_is_put_back_leaves_it_whole(line: int) -> None:
    model = build_network().train()
    before = {name: dict(vars(module)) for name, module in model.named_modules()}
    interrupts, tracer = KeyboardInterrupts(line), sys.gettrace()
    handle = model[3].register_forward_hook(interrupts.forward)
    try:
        with pytest.raises(KeyboardInterrupt):
            gp.convert_(model, norm="fold", example_inputs=X)
    finally:
        sys.settrace(tracer)
    handle.remove()
    assert interrupts.left <= 0
    assert {name: vars(module) for name, module in model.named_modules()} == before
