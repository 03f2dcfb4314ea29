"""Epochs in batches of two by Lightning and by transformers' Trainer, gone on with from a file.

The model takes what a point holds and returns its loss, as transformers' models do.
"""

from pathlib import Path
from typing import Any

import pytest
from torch import nn, optim
from torch.utils.data import DataLoader


def fit_by_lightning(
    model: nn.Module,
    optimizer: optim.Optimizer,
    points: Any,
    folder: Path,
    epochs: int,
    resume: bool,
    **options: Any,
) -> None:
    pl = pytest.importorskip("lightning.pytorch")
    options |= {f"enable_{x}": False for x in ("progress_bar", "model_summary", "checkpointing")}
    options |= {"default_root_dir": folder, "accelerator": "cpu", "logger": False}
    module, path = pl.LightningModule(), folder / "last.ckpt"
    module.model = model
    module.training_step = lambda batch, batch_idx: model(**batch)["loss"]
    module.configure_optimizers = lambda: optimizer
    trainer = pl.Trainer(max_epochs=epochs, **options)
    batches = DataLoader(points, batch_size=2)
    trainer.fit(module, batches, ckpt_path=path if resume else None, weights_only=True)
    trainer.save_checkpoint(path)


def fit_by_trainer(
    model: nn.Module,
    optimizer: optim.Optimizer,
    points: Any,
    folder: Path,
    epochs: int,
    resume: bool,
    **options: Any,
) -> None:
    transformers = pytest.importorskip("transformers")
    chosen = {"max_grad_norm": 0, "report_to": [], "disable_tqdm": True, "use_cpu": True}
    chosen |= {"train_sampling_strategy": "sequential", "save_strategy": "epoch"}
    chosen |= {"per_device_train_batch_size": 2, "num_train_epochs": epochs}
    arguments = transformers.TrainingArguments(str(folder), **chosen)
    options["optimizers"] = optimizer, optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    trainer = transformers.Trainer(model, arguments, train_dataset=points, **options)
    trainer.train(resume_from_checkpoint=resume)
