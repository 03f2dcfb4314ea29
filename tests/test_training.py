"""Converted models in the tools that people train and ship with."""

import copy
import warnings
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

import geoparam as gp


def network() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.Conv2d(8, 8, 3, padding=1, stride=2),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(8, 4),
    )


def labelled_images() -> tuple[Tensor, Tensor]:
    """Return images whose colour depends on their label."""
    random = torch.Generator().manual_seed(0)
    labels = torch.arange(8) % 4
    noise = torch.randn(8, 3, 8, 8, generator=random)
    colours = 2 * torch.randn(4, 3, 1, 1, generator=random)
    return noise + colours[labels], labels


X, Y = labelled_images()


def converted() -> nn.Module:
    return gp.convert_(network(), norm="imn", pretrained=True, example_inputs=X)


# Optimizers of parameters that a conversion has replaced.


LEFT = "have left the model"


def step(model: nn.Module, optimizer: torch.optim.Optimizer, times: int = 1) -> list[str]:
    """Return the warnings about parameters that have left the model."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(times):
            model(X).sum().backward()
            optimizer.step()
    messages = [str(warning.message) for warning in caught]
    return [message for message in messages if LEFT in message]


def build_optimizer(model: nn.Module, is_geometric: bool) -> torch.optim.Optimizer:
    if is_geometric:
        return gp.GeometricOptimizer(model, lr=0.1)
    return torch.optim.SGD(model.parameters(), lr=0.1)


@pytest.mark.parametrize("is_geometric", [False, True])
def test_an_optimizer_of_parameters_that_were_replaced_is_noticed_once(is_geometric: bool) -> None:
    model = network()
    optimizer = build_optimizer(model, is_geometric)
    assert step(model, optimizer) == []

    gp.convert_(model, filter_fn=lambda module, name: name == "0")

    [message] = step(model, optimizer, times=3)
    assert f"2 parameters of this optimizer {LEFT}" in message
    assert "build the optimizer afterwards" in message


def test_an_optimizer_that_is_built_after_conversion_is_not_noticed() -> None:
    model = gp.convert_(network())
    optimizer = torch.optim.SGD(gp.param_groups(model, lr=0.05, kind="sgd"))

    assert step(model, optimizer, times=3) == []


def test_an_optimizer_of_parameters_that_were_folded_is_noticed() -> None:
    model = gp.convert_(network(), filter_fn=lambda module, name: name == "0")
    optimizer = torch.optim.SGD(gp.param_groups(model, lr=0.05, kind="sgd"))

    gp.fold_(model)

    assert "3 parameters of this optimizer have left" in step(model, optimizer, times=3)[0]


def test_nothing_is_said_of_plain_weights_where_layers_have_biases() -> None:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    gp.convert_(model, norm="imn", weights="plain", init="glorot", example_inputs=X)

    assert step(model, optimizer) == []


@pytest.mark.filterwarnings("ignore:1 layers")  # that do not fold to their keys
def test_plain_weights_are_noticed_where_a_bias_is_new() -> None:
    model = network()
    model[0].bias = None
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    gp.convert_(model, norm="imn", weights="plain", init="glorot", example_inputs=X)

    [message] = step(model, optimizer)
    assert "4 parameters" in message  # of the BatchNorms


@pytest.mark.filterwarnings("ignore:optimizer contains")
def test_a_replaced_parameter_may_be_twice_in_a_group() -> None:
    model = network()
    optimizer = torch.optim.SGD([*model.parameters(), model[0].weight], lr=0.1)

    gp.convert_(model)

    assert LEFT in step(model, optimizer)[0]


def test_frozen_parameters_that_were_replaced_are_let_alone() -> None:
    model = network().requires_grad_(False)
    model[-1].requires_grad_()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    gp.convert_(model)

    assert step(model, optimizer) == []


@pytest.mark.compile
def test_a_compiled_step_is_the_same() -> None:
    model = gp.convert_(network())
    twin = copy.deepcopy(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    twins_optimizer = torch.optim.SGD(twin.parameters(), lr=0.1)
    model(X).sum().backward()
    twin(X).sum().backward()

    optimizer.step()
    torch.compile(twins_optimizer.step, backend="aot_eager")()

    assert_close(list(twin.parameters()), list(model.parameters()))


# Running means beside the batch's.


def digits() -> tuple[Tensor, Tensor]:
    data = pytest.importorskip("sklearn.datasets").load_digits()
    x = torch.tensor(data.images, dtype=torch.float32)[:, None] / 16
    return x, torch.tensor(data.target)


def digits_network() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(8, 16, 3, padding=1),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(64, 10),
    )


@torch.no_grad()
def compute_accuracy(model: nn.Module, x: Tensor, y: Tensor, training: bool) -> float:
    """Return the accuracy with the batch's means (training) or the running means."""
    model = copy.deepcopy(model).train(training)
    is_right = model(x).argmax(dim=1) == y
    return is_right.float().mean().item()


@pytest.mark.parametrize("weights", ["geometric", "plain"])
@pytest.mark.parametrize(
    ("steps", "accuracy"), [(100, 0.6), pytest.param(1000, 0.95, marks=pytest.mark.slow)]
)
def test_evaluation_follows_training_from_the_first_steps(
    weights: str, steps: int, accuracy: float
) -> None:
    """After 20, 100 and 1,000 steps running means give the accuracy of the batch's, within 1 %."""
    x, y = digits()
    model = gp.convert_(
        digits_network(), norm="imn", init="glorot", weights=weights, example_inputs=x[:4]
    )
    optimizer = torch.optim.AdamW(gp.param_groups(model, lr=1e-3))

    for step in range(1, steps + 1):
        batch = torch.randint(len(x), (64,))
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x[batch]), y[batch]).backward()
        optimizer.step()

        if step in (20, 100, 1000):
            in_training = compute_accuracy(model, x, y, training=True)
            in_evaluation = compute_accuracy(model, x, y, training=False)
            assert abs(in_training - in_evaluation) <= 0.01, step

    assert in_evaluation > accuracy


@pytest.mark.parametrize("seed", range(3))
def test_evaluation_does_not_lag_behind_training_mode(seed: int) -> None:
    lag = pytest.importorskip("evaluation_lag", reason="needs scikit-learn")
    default = f"momentum {gp.InputMeanNorm(1).momentum}"

    measurements = lag.compare(lag.three_convolutions, "geometric", 32, seed, (20, 100))

    points_below = [points for _, name, points in measurements if name == default]
    assert len(points_below) == 2
    assert max(points_below) <= 2


# Mixed precision and ONNX.


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_with_a_grad_scaler(dtype: torch.dtype) -> None:
    model = converted()
    optimizer = torch.optim.AdamW(gp.param_groups(model, lr=0.05, weight_decay=0.1))
    scaler = torch.amp.GradScaler("cpu", enabled=dtype == torch.float16)
    before = [parameter.clone() for parameter in model.parameters()]

    for _ in range(3):
        with torch.autocast("cpu", dtype):
            loss = nn.functional.cross_entropy(model(X).float(), Y)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()

    for parameter, old in zip(model.parameters(), before, strict=True):
        assert parameter.isfinite().all()
        assert not torch.equal(parameter, old)


def test_onnx_of_a_folded_model(tmp_path: Path) -> None:
    runtime = pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    model = gp.fold_(converted()).eval()
    path = tmp_path / "model.onnx"

    torch.onnx.export(model, (X,), path, dynamo=True, verbose=False)

    session = runtime.InferenceSession(path, providers=["CPUExecutionProvider"])
    input_name = session.get_inputs()[0].name
    [output] = session.run(None, {input_name: X.numpy()})
    assert_close(torch.from_numpy(output), model(X).detach(), atol=1e-5, rtol=1e-4)
