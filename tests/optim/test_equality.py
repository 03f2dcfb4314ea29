"""The optimizer trains a plain model as the converted one, or with `match` as the plain one."""

import copy
from typing import Any

import pytest
import torch
from plain_models import assert_same_weights, backward, both_coordinates, build, cnn, mlp
from torch import Tensor, nn

import geoparam as gp


class ClippedSGD(torch.optim.SGD):
    """Looks at all parameters together: the norm of their gradient is at most 0.1."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.register_step_pre_hook(self._clip)

    def _clip(self, *_: Any) -> None:
        nn.utils.clip_grad_norm_([p for group in self.param_groups for p in group["params"]], 0.1)


SGD = {"base": torch.optim.SGD, "lr": 0.02, "momentum": 0.9}
CLIPPED = {"base": ClippedSGD, "lr": 0.1, "momentum": 0.9}
ADAM = {"base": torch.optim.Adam, "lr": 1e-3}


def bert() -> nn.Module:
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 12, "num_hidden_layers": 2, "num_attention_heads": 2, "num_labels": 3}
    config = transformers.BertConfig(vocab_size=20, intermediate_size=16, **sizes)
    return transformers.BertForSequenceClassification(config).double().eval()  # no dropout


def gpt2() -> nn.Module:
    transformers = pytest.importorskip("transformers")
    sizes = {"vocab_size": 20, "n_positions": 8, "n_embd": 12, "n_layer": 2, "n_head": 2}
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes)).double().eval()


def is_inner(module: nn.Module, name: str) -> bool:
    is_layer = type(module).__name__ in ("Linear", "Conv2d", "Conv1D")
    return is_layer and name not in ("classifier", "lm_head", "fc", "6", "7")


def trainings(model: nn.Module, coordinates: str, base: Any, **options: Any) -> list[Any]:
    """Return the plain model with our optimizer, and its converted twin with torch's."""
    twin = gp.convert_(copy.deepcopy(model), coordinates=coordinates, filter_fn=is_inner)
    torchs = base(gp.param_groups(twin, lr=options["lr"], match=None), **options)
    torchs.register_step_post_hook(gp.retract(twin))
    same = {"match": False, "scale": "free", "filter_fn": is_inner, "coordinates": coordinates}
    return [(model, build(model, base, **options, **same)), (twin, torchs)]


def largest_difference(one: tuple[Any, Any], other: tuple[Any, Any], steps: int) -> float:
    found = []
    for step in range(steps):
        found.append(abs(backward(one[0], step) - backward(other[0], step)).item())
        one[1].step()
        other[1].step()
    return max(found)


CASES = [(make, options) for make in (mlp, cnn) for options in (SGD, CLIPPED, ADAM)]


@both_coordinates
@pytest.mark.parametrize("make, options", [*CASES, (bert, ADAM), (gpt2, SGD)])
def test_trains_as_the_converted_model(make: Any, coordinates: str, options: Any) -> None:
    plain, twin = trainings(make(), coordinates, **options)
    assert largest_difference(plain, twin, 50 if make in (mlp, cnn) else 20) < 1e-12
    assert_same_weights(plain[0], gp.fold_(twin[0]), 1e-10)


@both_coordinates
@pytest.mark.parametrize("size", [2, 99, 101])
def test_large_biases_train_as_in_the_converted_model(coordinates: str, size: float) -> None:
    model = mlp()
    model[3].bias.data[0] = size * model[3].weight[0].norm()
    plain, twin = trainings(model, coordinates, **SGD)
    assert largest_difference(plain, twin, 1 if size == 99 else 50) < 1e-12
    is_unit = "3.weight" in plain[1].param_groups[0]["param_names"]
    assert isinstance(twin[0][3], gp.GmPLinear) == is_unit == (size < 100)


@pytest.mark.slow
@both_coordinates
def test_resnet_trains_as_the_converted_one(coordinates: str) -> None:
    """BatchNorm makes it chaotic: the bound is what a perturbation in the last digit gives."""
    model = pytest.importorskip("torchvision").models.resnet18(num_classes=10).double()
    twins, options = [copy.deepcopy(model) for _ in "ab"], {"base": torch.optim.SGD, "lr": 5e-3}
    for p in twins[1].parameters():
        p.data *= 1 + 1e-15
    spread = largest_difference(*(trainings(m, coordinates, **options)[0] for m in twins), 20)
    found = largest_difference(*trainings(model, coordinates, **options), 20)
    assert found < max(1e-12, 10 * spread)


def digits_curve(model: nn.Module, optimizer: Any, seed: int) -> Tensor:
    """Return the losses of 50 steps on batches of scikit-learn's digits."""
    digits = pytest.importorskip("sklearn.datasets").load_digits()
    x, y = torch.tensor(digits.data / 16), torch.tensor(digits.target)
    random, losses = torch.Generator().manual_seed(seed), []
    for _ in range(50):
        chosen = torch.randint(len(x), (64,), generator=random)
        losses.append(nn.functional.cross_entropy(model(x[chosen]), y[chosen]))
        model.zero_grad()
        losses[-1].backward()
        optimizer.step()
    return torch.stack(losses).detach()


@pytest.mark.parametrize("seed", [0, *(pytest.param(n, marks=pytest.mark.slow) for n in (1, 2))])
@pytest.mark.parametrize("options, bound", [(SGD, 0.02), (ADAM, 0.1)], ids=["SGD", "Adam"])
@pytest.mark.parametrize("kind", ["mlp", "cnn", "batchnorm"])
def test_matched_curves_are_plain_ones(kind: str, options: Any, bound: float, seed: int) -> None:
    torch.manual_seed(seed)
    norm = nn.BatchNorm2d if kind == "batchnorm" else nn.Identity
    first = nn.Conv2d(1, 16, 3, padding=1), norm(16), nn.ReLU()
    second = nn.Conv2d(16, 24, 3, stride=2), norm(24), nn.ReLU()
    images = nn.Unflatten(1, (1, 8, 8)), *first, *second, nn.Flatten()
    inner = (nn.Linear(64, 216), nn.ReLU()) if kind == "mlp" else images
    model = nn.Sequential(*inner, nn.Linear(216, 32), nn.ReLU(), nn.Linear(32, 10)).double()
    plain, options = copy.deepcopy(model), dict(options)
    found = digits_curve(model, build(model, **options), seed)
    expected = digits_curve(plain, options.pop("base")(plain.parameters(), **options), seed)
    assert (found - expected).abs().max() < bound * (1 + 2 * (kind == "batchnorm"))


@both_coordinates
def test_small_first_weights_learn_as_fast_as_plain_ones(coordinates: str) -> None:
    """A transformer begins with rows of length 0.07: its r grows many times over."""
    model, losses = gpt2(), []
    plain = copy.deepcopy(model)
    optimizer = build(model, torch.optim.AdamW, lr=1e-2, coordinates=coordinates)
    for one, its in ((plain, torch.optim.AdamW(plain.parameters(), lr=1e-2)), (model, optimizer)):
        for _ in range(120):
            loss = backward(one)
            its.step()
        losses.append(loss.item())
    assert losses[1] < 1.5 * losses[0] < 0.5
