"""verify: differences by each output's own scale; what fails half-way leaves the model alone."""

import copy
import math
import sys
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import numpy as np
import pytest
import torch
from function_model import FunctionModel
from model_checks import assert_same_state, copy_state
from torch import Tensor, nn
from torch.testing import assert_close
from torch.utils._python_dispatch import TorchDispatchMode
from zoo import pretend_pretrained

import geoparam as gp

# The largest element is 4, so these logits differ by a tenth.
LOGITS = torch.tensor([[1.0, -2.0, 0.5, 4.0]])
OTHER_LOGITS = torch.tensor([[1.0, -2.0, 0.5, 4.4]])


def difference(first: Any, second: Any) -> float:
    """Return what verify says of two models with these outputs."""
    model = FunctionModel(lambda m, x: first)
    other = FunctionModel(lambda m, x: second)
    return gp.verify(model, other, torch.ones(1))


# The scale of a difference.


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (LOGITS, OTHER_LOGITS),
        ({"a": LOGITS, "b": [LOGITS]}, {"a": LOGITS, "b": [OTHER_LOGITS]}),
        ([1e5 * LOGITS, LOGITS], [1e5 * LOGITS, OTHER_LOGITS]),
    ],
    ids=["tensor", "nested", "beside a larger output"],
)
def test_outputs_are_compared_by_their_own_scale(first: Any, second: Any) -> None:
    assert difference(first, second) == pytest.approx(0.1)


@pytest.mark.parametrize("fill", [-1e9, 1e4, torch.finfo(torch.float32).min, -torch.inf])
@pytest.mark.parametrize("masked", [1, 3, 100])
def test_masked_elements_set_no_scale(fill: float, masked: int) -> None:
    mask = torch.full((1, masked), fill)
    first = torch.cat([LOGITS, mask], dim=1)
    second = torch.cat([OTHER_LOGITS, mask], dim=1)

    assert difference(first, second) == pytest.approx(0.1)


def test_large_elements_that_differ_are_not_masked() -> None:
    large = torch.tensor([[1e9]])
    first = torch.cat([LOGITS, large], dim=1)
    second = torch.cat([LOGITS, 1.2 * large], dim=1)

    assert difference(first, second) == pytest.approx(0.2)


every_size = pytest.mark.parametrize("size", [10.0**power for power in range(-12, 13, 4)])


@every_size
def test_every_size_is_seen_alone(size: float) -> None:
    assert difference(size * LOGITS, size * OTHER_LOGITS) == pytest.approx(0.1)


@every_size
def test_an_output_as_small_as_noise_is_compared_by_the_scale_of_the_others(size: float) -> None:
    is_noise = size < 1e-6
    expected = 0.1 * size if is_noise else 0.1

    first = [LOGITS, size * LOGITS]
    second = [LOGITS, size * OTHER_LOGITS]
    assert difference(first, second) == pytest.approx(expected)


def test_rounding_noise_beside_an_output_is_no_difference() -> None:
    softmax = LOGITS.softmax(-1)
    noise = softmax.sum() - 1 + 1e-8

    assert difference([softmax, noise], [softmax, -noise]) < 1e-6


every_constant = pytest.mark.parametrize(
    "constant", [torch.full((3,), 1e12), torch.tensor(1e12), torch.tensor([1_700_000_000, 5])]
)


@every_constant
def test_constants_and_integers_set_no_scale_for_others(constant: Tensor) -> None:
    assert difference([LOGITS, constant], [OTHER_LOGITS, constant]) == pytest.approx(0.1)


@every_constant
def test_equal_constants_and_integers_do_not_differ(constant: Tensor) -> None:
    assert difference([constant], [constant]) == 0


def test_integers_are_compared() -> None:
    assert difference(torch.tensor([3, 4]), torch.tensor([3, 5])) == pytest.approx(0.25)


def test_zeros_do_not_differ_from_zeros() -> None:
    assert difference(torch.zeros(2), torch.zeros(2)) == 0


def test_another_output_than_zero_differs_without_bound() -> None:
    assert difference(torch.zeros(2), torch.ones(2)) == math.inf


def test_beside_another_output_zeros_are_compared_by_its_scale() -> None:
    first = [torch.zeros(2), LOGITS]
    second = [torch.ones(2), LOGITS]

    assert difference(first, second) == pytest.approx(0.25)


def test_imaginary_parts_are_seen() -> None:
    one = torch.ones(3)
    first = torch.complex(one, one)
    second = torch.complex(one, -one)

    assert difference(first, second) == pytest.approx(2**0.5)


def test_equal_infinities_do_not_differ() -> None:
    x = torch.tensor([1.0, -torch.inf])

    assert difference(x, x) == 0


def test_an_infinity_differs_from_a_number() -> None:
    x = torch.tensor([1.0, -torch.inf])

    assert difference(x, x.relu()) == math.inf


# Inputs and modes.


X2 = torch.ones(2)


@pytest.mark.parametrize("inputs", [X2, {"x": X2}, (X2,), [X2]])
def test_inputs_are_one_calls_arguments(inputs: Any) -> None:
    double = FunctionModel(lambda m, x: 2 * x)
    same = FunctionModel(lambda m, x: x)

    assert gp.verify(double, same, inputs) == 0.5


def test_outputs_of_other_shapes_are_refused() -> None:
    with pytest.raises(ValueError, match="shapes"):
        gp.verify(nn.Linear(2, 3), nn.Linear(2, 4), X2)


def test_inputs_that_a_model_does_not_take_are_refused() -> None:
    with pytest.raises(ValueError, match="does not run on these inputs"):
        gp.verify(nn.Linear(3, 3), nn.Linear(2, 3), X2)


def test_a_nan_is_seen() -> None:
    model = nn.Linear(2, 2)
    broken = copy.deepcopy(model)
    nn.init.constant_(broken.weight, torch.nan)

    assert math.isnan(gp.verify(model, broken, torch.ones(1, 2)))


def test_models_are_compared_in_evaluation_and_left_in_their_mode() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Dropout())

    assert gp.verify(model, copy.deepcopy(model), torch.ones(1, 2)) == 0
    assert model.training
    assert model[1].training


def test_attention_is_compared_on_torchs_plain_path() -> None:
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    model = nn.TransformerEncoder(layer, 1).eval()
    mask = torch.tensor([[False, False, True], [False, False, False]])
    inputs = {"src": torch.randn(2, 3, 8), "src_key_padding_mask": mask}

    converted = gp.convert_(copy.deepcopy(model), example_inputs=inputs)

    assert gp.verify(model, converted, inputs) < 1e-5


# What is refused.


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

    assert tuple(model) == layers


def scores_that_grow_by_a_tenth(model: FunctionModel, x: Tensor) -> Tensor:
    """Return what differs by a tenth once the hidden layer is converted."""
    scores = model.head(model.hidden(x))
    is_converted = type(model.hidden) is not nn.Linear
    return 1.1 * scores if is_converted else scores


def two_layers(function: Callable) -> FunctionModel:
    return FunctionModel(function, hidden=nn.Linear(4, 4), head=nn.Linear(4, 2))


@pytest.mark.parametrize("fill", [-1e9, torch.finfo(torch.float32).min])
def test_a_changed_function_is_refused_beside_masked_outputs(fill: float) -> None:
    mask = torch.tensor([False, True])
    model = two_layers(lambda m, x: scores_that_grow_by_a_tenth(m, x).masked_fill(mask, fill))

    with pytest.raises(ValueError, match="differs by 1.0e-01"):
        gp.convert_(model, example_inputs=torch.ones(3, 4))
    assert type(model.hidden) is nn.Linear


def test_an_output_of_nan_hides_no_other() -> None:
    model = two_layers(lambda m, x: (scores_that_grow_by_a_tenth(m, x), x * torch.nan))

    with pytest.raises(ValueError, match="differs by 1.0e-01"):
        gp.convert_(model, example_inputs=torch.ones(3, 4))


# Conversions under autocast, and conversions that are broken off.


X = torch.randn(2, 3, 6, 6)


def build_network() -> nn.Module:
    model = nn.Sequential(
        nn.Conv2d(3, 4, 3),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.Conv2d(4, 4, 3),
        nn.BatchNorm2d(4),
        nn.Flatten(),
        nn.Linear(16, 4),
        nn.Linear(4, 2),
    )
    return pretend_pretrained(model)


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

    with torch.autocast("cpu", torch.bfloat16):
        gp.convert_(model, norm="fold", weights=weights, example_inputs=X)
        assert_close(model(X), original(X), atol=0.02, rtol=0)

    assert gp.verify(original, model, X) < 1e-5


class LimitedMemory(TorchDispatchMode):
    """Lets this many operations through, and the next one fail."""

    def __init__(self, operations: int) -> None:
        super().__init__()
        self.operations_left = operations

    @property
    def was_enough(self) -> bool:
        return self.operations_left >= 0

    def __torch_dispatch__(
        self, func: Callable, types: object, args: tuple = (), kwargs: dict | None = None
    ) -> object:
        self.operations_left -= 1
        if self.operations_left == -1:
            raise MemoryError
        return func(*args, **(kwargs or {}))


def tensors_of(model: nn.Module) -> list[Tensor]:
    return [*model.parameters(), *model.buffers()]


def fails_and_puts_back(change: Callable, model: nn.Module, memory: LimitedMemory) -> bool:
    """Change a model, and return whether that failed; if so, the model must be as it was."""
    modules = list(model.modules())
    tensors = tensors_of(model)
    state = copy_state(model)

    try:
        with memory:
            change(model)
    except (MemoryError, ValueError):
        assert list(model.modules()) == modules
        assert_same_state(model, state)
        for after, before in zip(tensors_of(model), tensors, strict=True):
            assert after is before
        assert all(parameter.requires_grad for parameter in model.parameters())
        return True
    return False


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
        memory = LimitedMemory(operations)
        failures += fails_and_puts_back(change, build(), memory)
        if memory.was_enough:
            break

    assert memory.was_enough
    assert failures > 3


class KeyboardInterrupts:
    """Ctrl-C in a forward pass, and again at a line of the function that puts a model back."""

    def __init__(self, line: int) -> None:
        self.lines_left = line

    def interrupt_forward(self, *_: object) -> None:
        sys.settrace(self.trace_call)
        raise KeyboardInterrupt

    def trace_call(self, frame: FrameType, event: str, arg: object) -> Callable | None:
        puts_back = frame.f_code.co_name == "_refill"
        return self.trace_line if puts_back else None

    def trace_line(self, frame: FrameType, event: str, arg: object) -> Callable:
        self.lines_left -= 1
        if self.lines_left == 0:
            sys.settrace(None)
            raise KeyboardInterrupt
        return self.trace_line


@pytest.fixture
def restored_tracer() -> Iterator[None]:
    """Put back the trace function of a debugger or of a coverage run."""
    tracer = sys.gettrace()
    yield
    sys.settrace(tracer)


@pytest.mark.parametrize("line", [1, 2, 3, 10, 40])
def test_a_second_ctrl_c_while_a_model_is_put_back_leaves_it_whole(
    line: int, restored_tracer: None
) -> None:
    model = build_network().train()
    before = {name: dict(vars(module)) for name, module in model.named_modules()}
    interrupts = KeyboardInterrupts(line)
    handle = model[3].register_forward_hook(interrupts.interrupt_forward)

    with pytest.raises(KeyboardInterrupt):
        gp.convert_(model, norm="fold", example_inputs=X)

    handle.remove()
    assert interrupts.lines_left <= 0
    assert {name: vars(module) for name, module in model.named_modules()} == before


def test_empty_outputs_are_nothing_to_compare() -> None:
    with pytest.raises(ValueError, match="outputs are empty: there is nothing to compare"):
        difference(torch.zeros(0, 4), torch.zeros(0, 4))


@pytest.mark.parametrize(
    "choose",
    [
        lambda z: z.argmax(dim=1),
        lambda z: z[z > 1e9],
        lambda z: z * torch.nan,
        lambda z: z * 0,
    ],
    ids=["integers", "empty", "NaN", "zeros"],
)
def test_a_conversion_whose_outputs_tell_nothing_warns(choose: Callable) -> None:
    layers = {"hidden": nn.Linear(3, 4), "head": nn.Linear(4, 2)}
    model = FunctionModel(lambda m, x: choose(m.head(m.hidden(x).relu())), **layers)

    with pytest.warns(UserWarning, match="converted model is not compared with the original"):
        gp.convert_(model, example_inputs=torch.randn(2, 3))


def test_outputs_that_were_all_equal_are_compared_nevertheless() -> None:
    def forward(m: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return m.head(m.hidden(x).relu()) + (type(m.hidden) is not nn.Linear)

    model = FunctionModel(forward, hidden=nn.Linear(3, 4), head=nn.Linear(4, 2))
    nn.init.zeros_(model.head.weight)
    nn.init.zeros_(model.head.bias)

    with pytest.warns(UserWarning, match="all equal"), pytest.raises(ValueError, match="differs"):
        gp.convert_(model, example_inputs=torch.randn(2, 3))


def test_outputs_of_other_shapes_are_refused_with_advice() -> None:
    """As a detector's are, whose boxes are chosen by scores that nearly tie."""

    def forward(m: nn.Module, x: torch.Tensor) -> torch.Tensor:
        z = m.head(m.hidden(x).relu())
        return z if type(m.hidden) is nn.Linear else z[:1]

    model = FunctionModel(forward, hidden=nn.Linear(3, 4), head=nn.Linear(4, 2))

    with pytest.raises(ValueError, match="returns tensors of other shapes.* convert the backbone"):
        gp.convert_(model, example_inputs=torch.randn(2, 3))
    assert type(model.hidden) is nn.Linear
