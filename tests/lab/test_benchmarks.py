"""Benchmarks run to their end, in their smallest size."""

import importlib
import sys

import numpy as np
import pytest
import torch

from geoparam_lab.data import uci_data


@pytest.mark.parametrize(
    ("command", "said"),
    [
        ("host --layers 2 --steps 1", "| none | bn | imn | layers | layers+imn | intrinsic |"),
        ("stacked --methods sp,gmp --splits 2", "| GmP |"),
        ("training --device cpu --networks vgg6 --batches 2 --modes eager --steps 1 --methods bn",
         "| vgg6, 2x32², eager |"),
        ("uci --datasets yacht --methods sp --splits 2 --jobs 1", "yacht"),
    ],
)  # fmt: skip
def test_a_benchmark_prints_its_table(
    command: str, said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    x = np.random.default_rng(0).standard_normal((40, 6))
    monkeypatch.setattr(uci_data, "load", lambda name, data: (x, x.sum(1)))
    monkeypatch.setattr(torch, "set_num_threads", lambda count: None)
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", False)  # restored afterwards
    name, *arguments = command.split()
    module = importlib.import_module(f"benchmarks.{name}")
    monkeypatch.setattr(module, "REPEATS", 1, raising=False)
    monkeypatch.setattr(sys, "argv", [name, *arguments])
    module.main()
    assert said in capsys.readouterr().out
