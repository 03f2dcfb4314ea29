"""Training stacks: schedulers, scaling, Accelerate, Lightning, transformers' Trainer, compile."""

from pathlib import Path
from typing import Any

import pytest
import torch
from plain_models import assert_same_weights, backward, build, mlp, train
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, SequentialSampler

STEPS = 4
ADAM = {"base": torch.optim.Adam, "lr": 1e-2}
KINDS = {
    "intrinsic": ADAM,
    "angles": {**ADAM, "coordinates": "angles"},
    "turn": {**ADAM, "turn": 2.0},
}
every_kind = pytest.mark.parametrize("options", KINDS.values(), ids=list(KINDS))
quiet = pytest.mark.filterwarnings("ignore:.*:UserWarning", "ignore:.*:FutureWarning")


# --- torch's own --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "make",
    [
        lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, 5),
        lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda step: 1 / (1 + step)),
        lambda o: torch.optim.lr_scheduler.ReduceLROnPlateau(o, patience=0, threshold=10),
        lambda o: torch.optim.lr_scheduler.OneCycleLR(o, max_lr=0.1, total_steps=9),
    ],
    ids=["cosine", "lambda", "plateau", "onecycle"],
)
@pytest.mark.parametrize("coordinates", ["intrinsic", "angles"])
def test_schedulers_set_the_rate_of_each_step(make: Any, coordinates: str) -> None:
    """A schedule gives what the same rates and momenta give that are set by hand."""
    model, other = mlp(), mlp()
    optimizers = [build(m, momentum=0.9, coordinates=coordinates) for m in (model, other)]
    schedule, seen = make(optimizers[0]), set()
    for step in range(5):
        for group, same in zip(*(o.param_groups for o in optimizers), strict=True):
            same.update({key: group[key] for key in ("lr", "momentum")})
        seen.add(optimizers[0].param_groups[0]["lr"])
        loss = backward(model, step)
        optimizers[0].step()
        train(other, optimizers[1], steps=1, first=step)
        schedule.step(*[loss] * isinstance(schedule, torch.optim.lr_scheduler.ReduceLROnPlateau))
    assert len(seen) > 2
    assert_same_weights(model, other)


def test_a_base_with_betas_beside_a_rest_with_momentum_cycles_rates() -> None:
    model = mlp()
    optimizer = build(model, torch.optim.Adam, rest=torch.optim.SGD, lr=0.01)
    options = {"max_lr": 0.1, "total_steps": 9, "cycle_momentum": False}
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, **options)
    for step in range(5):
        train(model, optimizer, steps=1, first=step)
        schedule.step()
    assert all(group["lr"] > 0.03 for group in optimizer.param_groups)


@every_kind
def test_closures_accumulation_and_clipping_see_the_plain_gradients(options: dict) -> None:
    model, other = mlp(), mlp()
    optimizer, same = build(model, **options), build(other, **options)
    for step in range(3):
        loss = optimizer.step(lambda step=step: backward(model, step))
        assert loss == backward(other, step)
        gradients = [p.grad.clone() for p in other.parameters()]
        other.zero_grad(set_to_none=False)
        for _ in range(2):
            for p, g in zip(other.parameters(), gradients, strict=True):
                p.grad += g / 2
        norm = nn.utils.clip_grad_norm_(other.parameters(), 1e9)
        assert norm == pytest.approx(torch.cat([g.flatten() for g in gradients]).norm().item())
        same.step()
    assert_same_weights(model, other, 1e-12)


def test_step_hooks_run_once() -> None:
    model, calls = mlp(), []
    optimizer = build(model)
    optimizer.register_step_pre_hook(lambda *_: calls.append("before"))
    optimizer.register_step_post_hook(lambda *_: calls.append("after"))
    train(model, optimizer, steps=2)
    assert calls == ["before", "after"] * 2


@pytest.mark.compile
def test_a_compiled_model_trains_alike() -> None:
    model, other = mlp(), mlp()
    optimizer, same = build(model, momentum=0.9), build(other, momentum=0.9)
    train(torch.compile(model), optimizer)
    train(other, same)
    assert_same_weights(model, other, 1e-9)


def test_an_average_of_the_weights_is_the_models() -> None:
    model = mlp()
    average = torch.optim.swa_utils.AveragedModel(model)
    optimizer = build(model)
    seen = []
    for step in range(3):
        train(model, optimizer, steps=1, first=step)
        average.update_parameters(model)
        seen.append(model[0].weight.detach().clone())
    torch.testing.assert_close(average.module[0].weight, torch.stack(seen).mean(0))


# --- Accelerate, Lightning, transformers ----------------------------------------------------------


class Points(Dataset):
    """Eight points: four batches of two."""

    def __init__(self) -> None:
        self.x = torch.randn(2 * STEPS, 6, generator=torch.Generator().manual_seed(1))

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"x": self.x[index], "labels": (self.x[index, 0] > 0).long()}


class WithLoss(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = mlp(torch.float32)

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        return {"loss": F.cross_entropy(self.net(x), labels)}


def by_hand(options: dict[str, Any], epochs: int = 2) -> nn.Module:
    model = WithLoss()
    optimizer = build(model, **options)
    for _ in range(epochs):
        for part in DataLoader(Points(), batch_size=2):
            optimizer.zero_grad()
            model(**part)["loss"].backward()
            optimizer.step()
    return model.net


@every_kind
def test_accelerate_resumes(options: dict[str, Any], tmp_path: Path) -> None:
    accelerator = pytest.importorskip("accelerate").Accelerator(cpu=True)
    for epoch in range(2):
        model = WithLoss()
        loader = DataLoader(Points(), batch_size=2)
        run, optimizer, loader = accelerator.prepare(model, build(model, **options), loader)
        if epoch:
            accelerator.load_state(tmp_path)
        for part in loader:
            optimizer.zero_grad()
            accelerator.backward(run(**part)["loss"])
            optimizer.step()
        accelerator.save_state(tmp_path)
        accelerator.free_memory()
    assert_same_weights(model.net, by_hand(options))


@quiet
@every_kind
@pytest.mark.parametrize("automatic", [True, False])
def test_lightning_resumes(options: dict[str, Any], automatic: bool, tmp_path: Path) -> None:
    lightning = pytest.importorskip("lightning.pytorch")

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = automatic
            self.net = mlp(torch.float32)

        def training_step(self, part: dict[str, Tensor], index: int) -> Tensor:
            loss = F.cross_entropy(self.net(part["x"]), part["labels"])
            if not automatic:
                optimizer = self.optimizers()
                optimizer.zero_grad()
                self.manual_backward(loss)
                optimizer.step()
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return build(self, **options)

    silent = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    for epoch in range(2):
        module = Module()
        trainer = lightning.Trainer(
            accelerator="cpu", max_epochs=epoch + 1, enable_checkpointing=False, **silent
        )
        path = tmp_path / "last.ckpt" if epoch else None
        trainer.fit(module, DataLoader(Points(), batch_size=2), ckpt_path=path, weights_only=True)
        trainer.save_checkpoint(tmp_path / "last.ckpt")
    assert_same_weights(module.net, by_hand(options))


@every_kind
def test_transformers_trainer_resumes(options: dict[str, Any], tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")

    class InOrder(transformers.Trainer):
        def _get_train_sampler(self, *args: object) -> SequentialSampler:
            return SequentialSampler(self.train_dataset)

    for epoch in range(2):
        arguments = transformers.TrainingArguments(
            output_dir=str(tmp_path), per_device_train_batch_size=2, num_train_epochs=epoch + 1,
            max_grad_norm=0, lr_scheduler_type="constant", save_strategy="epoch", report_to=[],
            disable_tqdm=True, use_cpu=True,
        )  # fmt: skip
        model = WithLoss()
        constant = torch.optim.lr_scheduler.LambdaLR
        optimizer = build(model, **options)
        trainer = InOrder(
            model=model, args=arguments, train_dataset=Points(),
            optimizers=(optimizer, constant(optimizer, lambda step: 1.0)),
        )  # fmt: skip
        trainer.train(resume_from_checkpoint=bool(epoch))
    assert_same_weights(model.net, by_hand(options))
