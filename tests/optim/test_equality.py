"""The optimizer on a plain model trains as the converted model, or with `match` as the plain one."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from plain_models import ADAM, SGD, backward, build, cnn, mlp
from torch import Tensor, nn
from torch.nn import functional as F

import geoparam as gp

SAME = {"match": False, "scale": "free"}


def bert() -> nn.Module:
    transformers = pytest.importorskip("transformers")
    config = transformers.BertConfig(
        vocab_size=20, hidden_size=12, num_hidden_layers=2, num_attention_heads=2,
        intermediate_size=16, max_position_embeddings=8, num_labels=3,
        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    return transformers.BertForSequenceClassification(config).double()


def gpt2() -> nn.Module:
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(
        vocab_size=20, n_positions=8, n_embd=12, n_layer=2, n_head=2,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
    )  # fmt: skip
    return transformers.GPT2LMHeadModel(config).double()


def text_loss(model: nn.Module, step: int) -> Tensor:
    tokens = torch.randint(20, (4, 6), generator=torch.Generator().manual_seed(step))
    labels = tokens[:, 0] % 3 if hasattr(model, "bert") else tokens
    loss = model(tokens, labels=labels).loss
    model.zero_grad()
    loss.backward()
    return loss.detach()


def image_loss(model: nn.Module, step: int) -> Tensor:
    random = torch.Generator().manual_seed(step)
    x = torch.randn(8, 3, 32, 32, generator=random, dtype=torch.float64)
    loss = F.cross_entropy(model(x), torch.randint(10, (8,), generator=random))
    model.zero_grad()
    loss.backward()
    return loss.detach()


def is_inner(module: nn.Module, name: str) -> bool:
    """Whether a layer has units in both: no output layer, no tied embedding."""
    kinds = ("Linear", "Conv2d", "Conv1D")
    last = ("classifier", "lm_head", "fc", "6", "7")  # of the MLP and the CNN by number
    return type(module).__name__ in kinds and name not in last


def converted(model: nn.Module, base: Any, coordinates: str, **options: Any) -> tuple[Any, Any]:
    twin = gp.convert_(copy.deepcopy(model), coordinates=coordinates, filter_fn=is_inner)
    optimizer = base(gp.param_groups(twin, lr=options["lr"], match=None), **options)
    optimizer.register_step_post_hook(gp.retract(twin))
    return twin, optimizer


def differences(
    loss: Callable[[nn.Module, int], Tensor], one: tuple[Any, Any], other: tuple[Any, Any], steps: int
) -> list[float]:
    """Return how far the losses of two trainings are apart in each step."""
    found = []
    for step in range(steps):
        found.append(abs(loss(one[0], step) - loss(other[0], step)).item())
        one[1].step()
        other[1].step()
    return found


@pytest.mark.parametrize("options", [SGD, ADAM], ids=["SGD", "Adam"])
@pytest.mark.parametrize("coordinates", ["intrinsic", "angles"])
@pytest.mark.parametrize(
    "make, loss", [(mlp, backward), (cnn, backward), (bert, text_loss), (gpt2, text_loss)],
    ids=["mlp", "cnn", "bert", "gpt2"],
)  # fmt: skip
def test_trains_as_the_converted_model(
    make: Callable[[], nn.Module], loss: Any, coordinates: str, options: dict[str, Any]
) -> None:
    model = make()
    twin = converted(model, coordinates=coordinates, **options)
    optimizer = build(model, coordinates=coordinates, filter_fn=is_inner, **options, **SAME)
    assert max(differences(loss, (model, optimizer), twin, 50)) < 1e-12
    folded = dict(gp.fold_(twin[0]).named_parameters())
    for name, p in model.named_parameters():
        torch.testing.assert_close(p, folded[name], rtol=0, atol=1e-10, msg=name)


def perturbed(model: nn.Module, size: float) -> nn.Module:
    twin = copy.deepcopy(model)
    with torch.no_grad():
        for p in twin.parameters():
            p.mul_(1 + size)
    return twin


@pytest.mark.slow
@pytest.mark.parametrize("coordinates", ["intrinsic", "angles"])
def test_resnet_trains_as_the_converted_one(coordinates: str) -> None:
    torchvision = pytest.importorskip("torchvision")
    model = torchvision.models.resnet18(num_classes=10).double()
    other = perturbed(model, 1e-15)
    options = {"base": torch.optim.SGD, "lr": 5e-3}
    twin = converted(model, coordinates=coordinates, **options)
    choice = {"coordinates": coordinates, "filter_fn": is_inner, **options, **SAME}
    runs = [(m, build(m, **choice)) for m in (copy.deepcopy(model), model, other)]
    spread = differences(image_loss, runs[0], runs[2], 20)
    found = differences(image_loss, runs[1], twin, 20)
    assert max(found) < max(1e-12, 10 * max(spread))


# --- match: lr has the speed that it has for the plain model --------------------------------------


def digits_mlp() -> nn.Module:
    sizes = (nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 10))
    return nn.Sequential(*sizes).double()


def digits_cnn() -> nn.Module:
    first, second = nn.Conv2d(1, 16, 3, padding=1), nn.Conv2d(16, 24, 3, stride=2)
    body = (nn.Unflatten(1, (1, 8, 8)), first, nn.ReLU(), second, nn.ReLU(), nn.Flatten())
    return nn.Sequential(*body, nn.Linear(216, 32), nn.ReLU(), nn.Linear(32, 10)).double()


def digits_curve(model: nn.Module, optimizer: Any, seed: int) -> Tensor:
    """Return the losses of 50 steps on batches of scikit-learn's digits."""
    digits = pytest.importorskip("sklearn.datasets").load_digits()
    x, y = torch.tensor(digits.data / 16), torch.tensor(digits.target)
    dtype = next(model.parameters()).dtype
    random, losses = torch.Generator().manual_seed(seed), []
    for _ in range(50):
        chosen = torch.randint(len(x), (64,), generator=random)
        loss = F.cross_entropy(model(x[chosen].to(dtype)), y[chosen])
        model.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return torch.tensor(losses)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    "base, options, bound",
    [(torch.optim.SGD, {"lr": 0.02, "momentum": 0.9}, 0.02), (torch.optim.Adam, {"lr": 1e-3}, 0.1)],
    ids=["SGD", "Adam"],
)
@pytest.mark.parametrize("make", [digits_mlp, digits_cnn])
def test_matched_curves_are_the_plain_models(
    make: Callable[[], nn.Module], base: Any, options: dict[str, Any], bound: float, seed: int
) -> None:
    torch.manual_seed(seed)
    model = make()
    plain, unmatched = copy.deepcopy(model), copy.deepcopy(model)
    expected = digits_curve(plain, base(plain.parameters(), **options), seed)
    found = digits_curve(model, build(model, base, **options), seed)
    raw = digits_curve(unmatched, build(unmatched, base, match=False, **options), seed)
    difference = (found - expected).abs().max()
    assert difference < bound
    assert difference < (raw - expected).abs().max() / 2


@pytest.mark.slow
def test_matched_curves_with_batchnorm_stay_within_a_perturbations_spread() -> None:
    torchvision = pytest.importorskip("torchvision")
    body = torchvision.models.resnet18(num_classes=10)
    body.conv1 = nn.Conv2d(1, 64, 3, padding=1, bias=False)
    model = nn.Sequential(nn.Unflatten(1, (1, 8, 8)), body)
    twins = copy.deepcopy(model), perturbed(model, 1e-6)
    plain, near = (digits_curve(m, torch.optim.SGD(m.parameters(), lr=5e-3), 0) for m in twins)
    found = digits_curve(model, build(model, lr=5e-3), 0)
    assert (found - plain).abs().max() < 2 * (near - plain).abs().max()
