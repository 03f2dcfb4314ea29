"""Converted models in the tools that people train and ship with."""

import copy
import warnings

import pytest
import torch
from torch import nn

import geoparam as gp


def network() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(),
        nn.Conv2d(8, 8, 3, padding=1, stride=2), nn.BatchNorm2d(8), nn.ReLU(),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 4),
    )  # fmt: skip


DRAW = torch.Generator().manual_seed(0)
Y = torch.arange(8) % 4
X = torch.randn(8, 3, 8, 8, generator=DRAW) + 2 * torch.randn(4, 3, 1, 1, generator=DRAW)[Y]


def converted() -> nn.Module:
    return gp.convert_(network(), norm="imn", pretrained=True, example_inputs=X)


def groups(model: nn.Module, kind: str = "adam") -> list[dict]:
    return gp.param_groups(model, lr=0.05, weight_decay=0.1, kind=kind)


def step(model: nn.Module, optimizer: torch.optim.Optimizer, times: int = 1) -> list[str]:
    """Return the warnings about parameters that have left the model."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(times):
            model(X).sum().backward()
            optimizer.step()
    messages = [str(w.message) for w in caught]
    return [message for message in messages if "have left the model" in message]


@pytest.mark.parametrize("is_geometric", [False, True])
def test_an_optimizer_of_parameters_that_were_replaced_is_noticed_once(is_geometric: bool) -> None:
    model = network()
    stepping = torch.optim.SGD(model.parameters(), lr=0.1)
    stepping = gp.GeometricOptimizer(model, lr=0.1) if is_geometric else stepping
    assert step(model, stepping) == []
    gp.convert_(model, filter_fn=lambda module, name: name == "0")
    (said,) = step(model, stepping, 3)
    assert "2 parameters of this optimizer have left the model" in said
    assert "build the optimizer afterwards" in said
    after = torch.optim.SGD(groups(model, "sgd"))
    assert step(model, after, 3) == []
    gp.fold_(model)
    assert "3 parameters of this optimizer have left" in step(model, after, 3)[0]


@pytest.mark.filterwarnings("ignore:1 layers")  # that do not fold to their keys
@pytest.mark.parametrize("bias", [False, True])
def test_plain_weights_are_noticed_where_a_bias_is_new(bias: bool) -> None:
    model = network()
    model[0].bias = model[0].bias if bias else None
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    gp.convert_(model, norm="imn", weights="plain", init="glorot", example_inputs=X)
    said = step(model, optimizer)
    assert said == [] if bias else "4 parameters" in said[0]  # of the BatchNorms


@pytest.mark.filterwarnings("ignore:optimizer contains")
def test_a_replaced_parameter_may_be_twice_in_a_group() -> None:
    model = network()
    optimizer = torch.optim.SGD([*model.parameters(), model[0].weight], lr=0.1)
    gp.convert_(model)
    assert "have left the model" in step(model, optimizer)[0]


def test_frozen_parameters_that_were_replaced_are_let_alone() -> None:
    model = network().requires_grad_(False)
    model[-1].requires_grad_()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    gp.convert_(model)
    assert step(model, optimizer) == []


@pytest.mark.compile
def test_a_compiled_step_is_the_same() -> None:
    model = gp.convert_(network())
    model(X).sum().backward()
    weights = []
    for wrap in (lambda step: step, torch.compile(backend="aot_eager")):
        one = copy.deepcopy(model)
        for p, q in zip(one.parameters(), model.parameters(), strict=True):
            p.grad = q.grad.clone()
        wrap(torch.optim.SGD(one.parameters(), lr=0.1).step)()
        weights.append(list(one.parameters()))
    torch.testing.assert_close(*weights)


@pytest.mark.parametrize("weights", ["geometric", "plain"])
@pytest.mark.parametrize(
    ("steps", "accuracy"), [(100, 0.6), pytest.param(1000, 0.95, marks=pytest.mark.slow)]
)
def test_evaluation_follows_training_from_the_first_steps(
    weights: str, steps: int, accuracy: float
) -> None:
    """After 20, 100 and 1,000 steps running means give the accuracy of the batch's, within 1 %."""
    data = pytest.importorskip("sklearn.datasets").load_digits()
    x = torch.tensor(data.images, dtype=torch.float32)[:, None] / 16
    y = torch.tensor(data.target)
    model = gp.convert_(
        nn.Sequential(
            nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(8, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2),
            nn.Flatten(), nn.Linear(64, 10),
        ),
        norm="imn", init="glorot", weights=weights, example_inputs=x[:4],
    )  # fmt: skip
    optimizer = torch.optim.AdamW(gp.param_groups(model, lr=1e-3))
    for step in range(1, steps + 1):
        batch = torch.randint(len(x), (64,))
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x[batch]), y[batch]).backward()
        optimizer.step()
        if step in (20, 100, 1000):
            with torch.no_grad():
                training = (copy.deepcopy(model)(x).argmax(dim=1) == y).float().mean()
                evaluation = (copy.deepcopy(model).eval()(x).argmax(dim=1) == y).float().mean()
            assert abs(training - evaluation) <= 0.01, step
    assert evaluation > accuracy


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_with_a_grad_scaler(dtype: torch.dtype) -> None:
    model = converted()
    optimizer = torch.optim.AdamW(groups(model))
    scaler = torch.amp.GradScaler("cpu", enabled=dtype == torch.float16)
    before = [p.clone() for p in model.parameters()]
    for _ in range(3):
        with torch.autocast("cpu", dtype):
            loss = nn.functional.cross_entropy(model(X).float(), Y)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    assert all(p.isfinite().all() for p in model.parameters())
    assert not any(map(torch.equal, before, model.parameters()))


def test_onnx_of_a_folded_model(tmp_path) -> None:  # noqa: ANN001
    runtime = pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    model = gp.fold_(converted()).eval()
    path = tmp_path / "model.onnx"
    torch.onnx.export(model, (X,), path, dynamo=True, verbose=False)
    session = runtime.InferenceSession(path, providers=["CPUExecutionProvider"])
    (found,) = session.run(None, {session.get_inputs()[0].name: X.numpy()})
    torch.testing.assert_close(torch.from_numpy(found), model(X).detach(), atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("seed", range(3))
def test_evaluation_does_not_lag_behind_training_mode(seed: int) -> None:
    lag = pytest.importorskip("evaluation_lag", reason="needs scikit-learn")
    measured = lag.compare(lag.three_convolutions, "geometric", 32, seed, (20, 100))
    default = f"momentum {gp.InputMeanNorm(1).momentum}"
    below = [points for _, name, points in measured if name == default]
    assert len(below) == 2 and max(below) <= 2
