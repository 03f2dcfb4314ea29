"""Epochs in batches of two by Accelerate, Lightning and transformers' Trainer, or on from a file.

The model takes what a point holds and returns its loss, as transformers' models do.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from torch import nn, optim
from torch.utils.data import DataLoader


@dataclass
class Fit:
    """One training: each method runs it in one stack, and leaves a checkpoint in `folder`.

    With more than one epoch it goes on from the checkpoint there, for the last epoch.
    """

    model: nn.Module
    optimizer: optim.Optimizer
    points: Any
    folder: Path
    epochs: int = 1

    def by_accelerate(self) -> None:
        accelerator = pytest.importorskip("accelerate").Accelerator(cpu=True)
        run, optimizer = accelerator.prepare(self.model, self.optimizer)
        if self.epochs > 1:
            accelerator.load_state(self.folder)
        for batch in DataLoader(self.points, batch_size=2):
            optimizer.zero_grad()
            accelerator.backward(run(**batch)["loss"])
            optimizer.step()
        accelerator.save_state(self.folder)

    def by_lightning(self, **options: Any) -> None:
        pl = pytest.importorskip("lightning.pytorch")
        extras = "progress_bar", "model_summary", "checkpointing"
        options |= {f"enable_{name}": False for name in extras}
        options |= {"default_root_dir": self.folder, "accelerator": "cpu", "logger": False}
        module, path = pl.LightningModule(), self.folder / "last.ckpt"
        module.model = self.model
        module.training_step = lambda batch, batch_idx: self.model(**batch)["loss"]
        module.configure_optimizers = lambda: self.optimizer
        trainer = pl.Trainer(max_epochs=self.epochs, **options)
        batches = DataLoader(self.points, batch_size=2)
        start = path if self.epochs > 1 else None
        trainer.fit(module, batches, ckpt_path=start, weights_only=True)
        trainer.save_checkpoint(path)

    def by_trainer(self, **options: Any) -> None:
        transformers = pytest.importorskip("transformers")
        chosen = {"max_grad_norm": 0, "report_to": [], "disable_tqdm": True, "use_cpu": True}
        chosen |= {"train_sampling_strategy": "sequential", "save_strategy": "epoch"}
        chosen |= {"per_device_train_batch_size": 2, "num_train_epochs": self.epochs}
        arguments = transformers.TrainingArguments(str(self.folder), **chosen)
        constant = optim.lr_scheduler.LambdaLR(self.optimizer, lambda step: 1.0)
        options |= {"optimizers": (self.optimizer, constant), "train_dataset": self.points}
        trainer = transformers.Trainer(self.model, arguments, **options)
        trainer.train(resume_from_checkpoint=self.epochs > 1)
