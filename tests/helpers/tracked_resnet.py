"""A tracked run of a torchvision ResNet-18 on generated images, for tests that kill it.

python tracked_resnet.py FOLDER [--kill-at STEP] [--resume]: five steps, with a checkpoint after
each second one. The batch of a step depends on its number alone.
"""

import argparse
import os
import signal
from pathlib import Path

import torch
from torchvision.models import resnet18

from geoparam import BoundaryTracker


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--kill-at", type=int)
    parser.add_argument("--resume", action="store_true")
    given = parser.parse_args()
    given.folder.mkdir(exist_ok=True)
    checkpoint = given.folder / "checkpoint.pt"

    torch.manual_seed(0)
    model = resnet18(num_classes=4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    probe = torch.randn(4, 3, 32, 32)
    saved = torch.load(checkpoint, weights_only=True) if given.resume else None
    if saved is not None:
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
    file = given.folder / "history.npy"
    tracker = BoundaryTracker(model, probe=probe, file=file, resume=given.resume)
    if saved is not None:
        tracker.load_state_dict(saved["tracker"])

    for step in range(1 if saved is None else saved["tracker"]["step"] + 1, 6):
        torch.manual_seed(step)
        x, y = torch.randn(8, 3, 32, 32), torch.randint(4, (8,))
        loss = torch.nn.functional.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        tracker.step()
        if step == given.kill_at:
            os.kill(os.getpid(), signal.SIGKILL)
        if step % 2 == 0:
            states = {"model": model, "optimizer": optimizer, "tracker": tracker}
            torch.save({name: item.state_dict() for name, item in states.items()}, checkpoint)
    tracker.close()


if __name__ == "__main__":
    main()
