"""Small plain models, optimizers of all kinds for them, and short trainings."""

import io
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import geoparam as gp

ADAM = {"base": torch.optim.Adam, "lr": 1e-2}
HALF = {**ADAM, "dtype": torch.bfloat16}
KINDS: dict[str, dict[str, Any]] = {
    "SGD": {"momentum": 0.9},
    "Adam": ADAM,
    "Adagrad": {"base": torch.optim.Adagrad, "lr": 1e-2},
    "Muon": {"base": torch.optim.Muon, "lr": 1e-2},
    "angles": {**ADAM, "coordinates": "angles"},
    "turn": {"turn": 2.0, "momentum": 0.9},
    "bounded": {"max_turn": 2.0, "momentum": 0.9, "coordinates": "angles"},
    "bfloat16": HALF,
    "bfloat16 angles": {**HALF, "coordinates": "angles"},
    "bfloat16 turn": {**HALF, "turn": 2.0},
}
every_kind = pytest.mark.parametrize("kind", KINDS)
both_coordinates = pytest.mark.parametrize("coordinates", ["intrinsic", "angles"])


def mlp(dtype: torch.dtype = torch.float64, norm: Any = nn.Identity) -> nn.Sequential:
    """Return the same MLP in every call: layers 0 and 3 have units, 6 is the output layer."""
    torch.manual_seed(1)
    first = nn.Linear(6, 8), norm(8), nn.Tanh()
    second = nn.Linear(8, 7), norm(7), nn.Tanh()
    first[0].bias.data /= 2  # below the rows' lengths, so that all are stepped as distances
    return nn.Sequential(*first, *second, nn.Linear(7, 3)).to(dtype)


def cnn(dtype: torch.dtype = torch.float64, norm: Any = nn.Identity) -> nn.Sequential:
    """Return the same CNN in every call: 0 and 3, a grouped layer, have units."""
    torch.manual_seed(1)
    first = nn.Conv2d(2, 6, 3), norm(6), nn.Tanh()
    second = nn.Conv2d(6, 8, 3, groups=2), norm(8), nn.Tanh()
    return nn.Sequential(*first, *second, nn.Flatten(), nn.Linear(32, 3)).to(dtype)


def gpt2(**options: Any) -> nn.Module:
    """Return a tiny GPT-2 without dropout."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(1)
    sizes = {"vocab_size": 20, "n_positions": 8, "n_embd": 12, "n_layer": 2, "n_head": 2}
    config = transformers.GPT2Config(**sizes, **options)
    return transformers.GPT2LMHeadModel(config).double().eval()


def bert() -> nn.Module:
    """Return a tiny BERT without dropout."""
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 12, "num_hidden_layers": 2, "num_attention_heads": 2, "num_labels": 3}
    config = transformers.BertConfig(vocab_size=20, intermediate_size=16, **sizes)
    return transformers.BertForSequenceClassification(config).double().eval()


def mixture(name: str) -> nn.Module:
    """Return a tiny language model with experts, of transformers."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(1)
    config = getattr(transformers, f"{name}Config")(
        vocab_size=20,
        hidden_size=8,
        intermediate_size=12,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=4,
        num_local_experts=4,
        num_experts_per_tok=2,
        max_position_embeddings=131072,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        experts_implementation="eager",
    )
    return getattr(transformers, f"{name}ForCausalLM")(config).double().eval()


def build(model: nn.Module, base: Any = torch.optim.SGD, **options: Any) -> gp.GeometricOptimizer:
    return gp.GeometricOptimizer(model, base, **{"lr": 0.05, **options})


def start(kind: str, make: Any = mlp, **others: Any) -> tuple[nn.Sequential, Any]:
    """Return a model and an optimizer of a kind."""
    options = {**KINDS[kind], **others}
    model = make(options.pop("dtype", torch.float64))
    return model, build(model, **options)


def backward(model: nn.Module, step: int = 0, scale: float = 1.0) -> Tensor:
    """Compute the gradients on the batch of this step, the same for every model and run."""
    loss = _find_loss(model, torch.Generator().manual_seed(step))
    model.zero_grad()
    (scale * loss).backward()
    return loss.detach()


def _find_loss(model: nn.Module, random: torch.Generator) -> Tensor:
    if hasattr(model, "config"):
        tokens = torch.randint(20, (4, 6), generator=random)
        labels = tokens[:, 0] % 3 if hasattr(model, "bert") else tokens
        return model(tokens, labels=labels).loss

    shape: tuple[int, ...] = (8, 6)
    if hasattr(model, "fc"):
        shape = (8, 3, 32, 32)
    elif any("Conv2d" in type(module).__name__ for module in model.modules()):
        shape = (8, 2, 6, 6)
    x = torch.randn(shape, generator=random, dtype=torch.float64)
    y = torch.randint(3, (8,), generator=random)
    first = next(model.parameters())
    scores = model(x.to(first.device, first.dtype))
    return nn.functional.cross_entropy(scores.double(), y.to(first.device))


def train(model: nn.Module, optimizer: Any, steps: int = 3, first: int = 0) -> list[Tensor]:
    """Train on batches number `first` and up; return the losses."""
    losses = []
    for step in range(first, first + steps):
        losses.append(backward(model, step))
        optimizer.step()
    return losses


def step_with_ones(model: nn.Module, optimizer: Any) -> None:
    """Take a step in which every gradient is 1."""
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    optimizer.step()


def through_a_file(state: Any, device: str | None = None) -> Any:
    """Save a state, and load it as files of strangers are loaded."""
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, map_location=device, weights_only=True)


def rows(layer: nn.Module) -> Tensor:
    """Return a copy of a layer's units, the rows of its weight."""
    return layer.weight.detach().flatten(1).clone()


def find_angles(old: Tensor, new: Tensor) -> Tensor:
    """Return by how many degrees each row has turned."""
    u = nn.functional.normalize(old.double(), dim=1)
    v = nn.functional.normalize(new.double(), dim=1)
    half = torch.atan2((u - v).norm(dim=1), (u + v).norm(dim=1))
    return torch.rad2deg(2 * half)


def rms(x: Tensor) -> float:
    """Return the root mean square."""
    return x.square().mean().sqrt().item()


def step_and_find_angles(
    model: Any, optimizer: Any, step: int = 0, scale: float = 1.0
) -> tuple[Tensor, Tensor]:
    """Train for one step; return the angles by which the units of layers 0 and 3 have turned."""
    first, second = rows(model[0]), rows(model[3])
    backward(model, step, scale)
    optimizer.step()
    return find_angles(first, rows(model[0])), find_angles(second, rows(model[3]))


def find_table(optimizer: Any) -> dict[str, str]:
    """Return what the optimizer's table says of each weight, by its name."""
    table = {}
    for line in str(optimizer).splitlines():
        name, *words = line.split()
        table[name] = " ".join(words)
    return table


def assert_same_training(one: tuple[Any, Any], other: tuple[Any, Any]) -> None:
    """Go on with two models and their optimizers, and assert that their weights are the same."""
    for pair in (one, other):
        train(*pair, first=3)
    assert_same_weights(one[0], other[0])


def assert_same_weights(model: nn.Module, other: nn.Module, tolerance: float = 0.0) -> None:
    for (name, p), q in zip(model.named_parameters(), other.parameters(), strict=True):
        difference = (p - q).abs().max().item()
        assert difference <= tolerance, f"{name} differs by {difference}"


def assert_finite(model: nn.Module) -> None:
    for name, p in model.named_parameters():
        assert p.isfinite().all(), name
