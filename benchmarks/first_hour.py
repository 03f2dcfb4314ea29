"""The scripts of a newcomer's first hour, with what they gave at first and what they give now.

    python -m benchmarks.first_hour

"Before" is what a newcomer reported on 15 November 2026, with that day's settings and defaults;
"now" is measured. The scripts are rebuilt from that report, so sizes differ a little: the plain
and the BatchNorm rows say how comparable the two are. About a minute on one core; needs the extras
`experiments`, `vision` and `hf`.
"""

import copy
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import geoparam as gp
from benchmarks.default_tasks import load_digits

SEEDS = range(3)
Values = list[float]


def train(model: nn.Module, optimizer: Any, batches: Any) -> float:
    """Step once for each batch and return the last loss."""
    model.train()
    for x, y in batches:
        loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return loss.item()


def draw_batches(epochs: int, seed: int) -> list[tuple[Tensor, Tensor]]:
    """Return epochs of the first 1,437 digits in batches of 32."""
    x, y = load_digits()
    generator = torch.Generator().manual_seed(seed)
    orders = [torch.randperm(1437, generator=generator) for _ in range(epochs)]
    return [(x[rows], y[rows]) for order in orders for rows in order.split(32)[:-1]]


@torch.no_grad()
def accuracy(model: nn.Module, training_mode: bool = False) -> float:
    """Return the accuracy on the other 360 digits; the model's running means stay as they are."""
    x, y = load_digits()
    output = copy.deepcopy(model).train(training_mode)(x[1437:])
    return (output.argmax(1) == y[1437:]).float().mean().item()


def mlp(norm: bool = False) -> nn.Sequential:
    norms = [[nn.BatchNorm1d(128)] if norm else [] for _ in range(2)]
    return nn.Sequential(
        nn.Flatten(), nn.Linear(64, 128), *norms[0], nn.ReLU(),
        nn.Linear(128, 128), *norms[1], nn.ReLU(), nn.Linear(128, 10),
    )  # fmt: skip


def cnn(norm: bool = False) -> nn.Sequential:
    norms = [[nn.BatchNorm2d(m)] if norm else [] for m in (16, 32)]
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1), *norms[0], nn.ReLU(),
        nn.Conv2d(16, 32, 3, stride=2, padding=1), *norms[1], nn.ReLU(),
        nn.Flatten(), nn.Linear(512, 10),
    )  # fmt: skip


def adamw(model: nn.Module, lr: float = 1e-3) -> torch.optim.Optimizer:
    return torch.optim.AdamW(gp.param_groups(model, lr=lr))


def intrinsic(model: nn.Module, lr: float = 1e-3) -> torch.optim.Optimizer:
    return gp.GeometricOptimizer(model, torch.optim.AdamW, lr=lr)


def muon(model: nn.Module) -> torch.optim.Optimizer:
    return gp.GeometricOptimizer(model, torch.optim.Muon, turn=2.4, lr=1e-3)


def after_epochs(
    build: Callable[[], nn.Module], make: Callable[[nn.Module], Any], epochs: int
) -> Values:
    """Return the accuracy of each seed after so many epochs."""
    values = []
    for seed in SEEDS:
        torch.manual_seed(seed)
        model = build()
        train(model, make(model), draw_batches(epochs, seed))
        values.append(accuracy(model))
    return values


def imn_in_both_modes(norm: str) -> tuple[Values, Values]:
    """Return accuracies in evaluation and in training mode after 100 steps."""
    modes: tuple[Values, Values] = [], []
    for seed in SEEDS:
        torch.manual_seed(seed)
        model = cnn(norm=norm == "bn")
        if norm == "imn":
            gp.convert_(model, norm="imn", init="glorot", example_inputs=(load_digits()[0][:2],))
        train(model, adamw(model), draw_batches(3, seed)[:100])
        for values, training_mode in zip(modes, (False, True), strict=True):
            values.append(accuracy(model, training_mode))
    return modes


class Classifier(nn.Module):
    """transformers' BERT with two labels, from tokens to logits."""

    def __init__(self) -> None:
        super().__init__()
        import transformers

        config = transformers.BertConfig(
            vocab_size=100, hidden_size=64, num_hidden_layers=2, num_attention_heads=4,
            intermediate_size=128, max_position_embeddings=32,
            hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
        )  # fmt: skip
        self.bert = transformers.BertForSequenceClassification(config)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.bert(input_ids=tokens).logits


def bert_losses(make: Callable[[nn.Module, float], Any], lr: float, is_converted: bool) -> Values:
    """Return the loss after 20 steps on one batch of 16 random sentences."""
    values = []
    for seed in SEEDS:
        torch.manual_seed(seed)
        model = Classifier()
        batch = torch.randint(100, (16, 16)), torch.randint(2, (16,))
        if is_converted:
            gp.convert_(model, example_inputs=(batch[0],))
        values.append(train(model, make(model, lr), [batch] * 20))
    return values


def resnet_losses(how: str) -> Values:
    """Return the loss after 20 steps of a ResNet-18 on one batch of 16 images."""
    from torchvision.models import resnet18

    torch.manual_seed(0)
    model = resnet18(num_classes=10)
    batch = torch.randn(16, 3, 64, 64), torch.arange(16) % 10
    if how == "imn":
        gp.convert_(model, norm="imn", init="glorot", example_inputs=(batch[0],))
    make = muon if how == "turn" else adamw
    return [train(model, make(model), [batch] * 20)]


def show(what: str, before: str, values: Values, digits: int = 2) -> None:
    now = " / ".join(f"{value:.{digits}f}" for value in values)
    print(f"| {what} | {before or '-'} | {now} |", flush=True)


def main() -> None:
    torch.set_num_threads(1)
    print("# A first hour, before and now\n")
    print(
        "`python -m benchmarks.first_hour`, three seeds (ResNet-18: one). The scripts are rebuilt"
    )
    print("from a newcomer's report: plain and BatchNorm rows say how comparable the two are.\n")
    print("| script | before | now |\n| --- | --- | --- |")
    name = "digits, CNN, 100 steps of AdamW 1e-3, accuracy"
    before = {
        "imn": ("0.861 / 0.765 / 0.635", "0.981 / 0.972 / 0.970"),
        "bn": ("0.99", "0.99"),
    }
    for norm, title in (("imn", 'convert_(norm="imn", init="glorot")'), ("bn", "BatchNorm")):
        for at, mode in enumerate(("evaluation", "training mode")):
            show(f"{name}: {title}, {mode}", before[norm][at], imn_in_both_modes(norm)[at], 3)

    name = "digits, MLP, first epoch at 1e-3, accuracy"
    show(f"{name}: plain", "0.79 / 0.77 / 0.82", after_epochs(mlp, adamw, 1))
    show(f"{name}: BatchNorm", "0.92 / 0.94 / 0.93", after_epochs(lambda: mlp(True), adamw, 1))
    geometric = "0.32 / 0.64 / 0.29 (the README's layers)"
    show(f"{name}: converted", geometric, after_epochs(lambda: gp.convert_(mlp()), adamw, 1))
    show(f"{name}: GeometricOptimizer, AdamW", "", after_epochs(mlp, intrinsic, 1))
    show(f"{name}: the README's snippet", "", after_epochs(mlp, muon, 1))
    show(f"{name}: the same, BatchNorm kept", "", after_epochs(lambda: mlp(True), muon, 1))

    name = "digits, CNN without norm, fifth epoch at 1e-3, accuracy"
    show(f"{name}: plain", "0.87 to 0.89", after_epochs(cnn, adamw, 5))
    converted = after_epochs(lambda: gp.convert_(cnn()), adamw, 5)
    show(f"{name}: converted", "0.18 / 0.18 / 0.30", converted)
    show(f"{name}: the README's snippet", "", after_epochs(cnn, muon, 5))

    name = "tiny BERT, loss after 20 steps of AdamW"
    plain = bert_losses(adamw, 1e-3, False)
    show(f"{name}: plain, 1e-3", "0.15 / 0.07 / 0.10", plain, 3)
    converted = bert_losses(adamw, 1e-3, True)
    show(f"{name}: converted, 1e-3", "0.47 / 0.40 / 0.44", converted, 3)
    geometric = bert_losses(intrinsic, 1e-3, False)
    show(f"{name}: GeometricOptimizer, 1e-3", "", geometric, 3)

    name = "ResNet-18, loss after 20 steps at 1e-3"
    show(f"{name}: plain", "0.0001", resnet_losses("plain"), 4)
    show(f'{name}: convert_(norm="imn", init="glorot")', "0.0000", resnet_losses("imn"), 4)
    show(f"{name}: the README's snippet", "", resnet_losses("turn"), 4)


if __name__ == "__main__":
    main()
