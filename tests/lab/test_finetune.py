"""Fine-tuning of a pretrained network: methods, the choice of rates, tables, mistaken options."""

import math
from pathlib import Path
from typing import Any

import pytest
import tiny_images
import torch
from image_runs import without_times
from torch import nn

import geoparam as gp
from geoparam_lab.data.packed_images import PackedImages
from geoparam_lab.experiments import finetune
from geoparam_lab.run_folder import Record, Run
from geoparam_lab.tables import tables
from geoparam_lab.training.finetune import loop, pretrained
from geoparam_lab.training.finetune.enlarged_images import MEAN, STD, EnlargedImages
from geoparam_lab.training.finetune.settings import (
    COMMON,
    METHODS,
    FinetuneSettings,
    extend_grid,
    list_tasks,
)

torchvision = pytest.importorskip("torchvision")
safetensors = pytest.importorskip("safetensors.torch")
pytest.importorskip("accelerate")
pytestmark = pytest.mark.usefixtures("fresh_accelerate")

WIDTH = 0.1  # of the network
SMALL: dict[str, Any] = {
    "batch_sizes": [2],
    "lrs": [1e-3],
    "seeds": 1,
    "images": 8,
    "held_out": 4,
    "test_images": 4,
    "size": 32,
    "width": WIDTH,
    "steps": 2,
}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_images.write_npz(tmp_path_factory.mktemp("images"), train=16, val=8, files=1)


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A network whose BatchNorms have seen some images, as a file."""
    torch.manual_seed(0)
    model = torchvision.models.mobilenet_v2(width_mult=WIDTH)
    with torch.no_grad():
        for _ in range(3):
            model(torch.randn(8, 3, 32, 32))
    path = tmp_path_factory.mktemp("weights") / "mobilenet_v2.safetensors"
    safetensors.save_file(model.state_dict(), path)
    return path


def make_settings(method: str, **changes: Any) -> FinetuneSettings:
    small = {name: value for name, value in SMALL.items() if name in COMMON}
    return FinetuneSettings(method, batch_size=2, lr=1e-3, seed=0, **{**small, **changes})


def make_images(data: Path, settings: FinetuneSettings) -> EnlargedImages:
    return EnlargedImages(PackedImages.load(data), settings, torch.device("cpu"))


def sweep(out: Path, data: Path, weights: Path, **changes: Any) -> Run:
    done = finetune.run(out, data=data, weights=weights, **{**SMALL, **changes})
    assert done is not None
    return done


@pytest.fixture(scope="module")
def whole(data: Path, weights: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    return sweep(tmp_path_factory.mktemp("sweep") / "whole", data, weights)


# --- methods ------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", [method for method in METHODS if method != "gn"])
def test_every_method_starts_as_the_pretrained_function(
    method: str, data: Path, weights: Path
) -> None:
    settings = make_settings(method)
    images, state = make_images(data, settings), pretrained.read_weights(weights)
    torch.manual_seed(0)
    plain = pretrained.build_plain(settings, state, images.classes).eval()
    torch.manual_seed(0)
    model = loop.prepare_network(settings, images, state, images.device)
    x, _ = next(images.train(8, seed=1))
    assert gp.verify(plain, model, x) < 1e-5


@pytest.mark.parametrize("method", METHODS)
def test_batch_norm_is_kept_frozen_or_gone(method: str, data: Path, weights: Path) -> None:
    settings = make_settings(method)
    images = make_images(data, settings)
    model = loop.prepare_network(settings, images, pretrained.read_weights(weights), images.device)
    norms = [module for module in model.modules() if isinstance(module, nn.BatchNorm2d)]
    assert bool(norms) == method.startswith("bn")
    assert all(norm.training == (method == "bn") for norm in norms)
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    x, _ = next(images.train(2, seed=1))
    model(x)
    means = {name: buffer for name, buffer in model.named_buffers() if "mean" in name}
    has_moved = any(not buffer.equal(before[name]) for name, buffer in means.items())
    assert has_moved == (method in ("bn", "imn"))


def test_group_norm_takes_over_scale_and_offset() -> None:
    norm = nn.BatchNorm2d(24)
    nn.init.normal_(norm.weight)
    model = pretrained._use_group_norm(nn.Sequential(norm))
    assert isinstance(model[0], nn.GroupNorm) and model[0].num_groups == 3
    assert model[0].weight is norm.weight and model[0].bias is norm.bias


def build(optimizer: str, method: str, data: Path, weights: Path) -> tuple[nn.Module, Any]:
    """Return a network under a method, and its optimizer."""
    settings = make_settings(method, optimizer=optimizer)
    images, state = make_images(data, settings), pretrained.read_weights(weights)
    model = loop.prepare_network(settings, images, state, images.device)
    return model, pretrained.make_optimizer(settings, model)


@pytest.mark.parametrize("method", ["bn-eval", "fold", "frozen"])
@pytest.mark.parametrize("optimizer", ["adamw", "muon", "turn"])
def test_every_optimizer_steps_all_parameters(
    optimizer: str, method: str, data: Path, weights: Path
) -> None:
    model, made = build(optimizer, method, data, weights)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    torch.manual_seed(0)
    model(torch.randn(4, 3, 32, 32)).logsumexp(1).sum().backward()
    made.step()
    still = [name for name, p in model.named_parameters() if torch.equal(p, before[name])]
    assert still == []


def test_a_turn_is_a_thousand_degrees_times_the_rate_and_muons_rate_ten_times(
    data: Path, weights: Path
) -> None:
    _, turn = build("turn", "fold", data, weights)
    assert turn.turn() == [pytest.approx(1.0)] and turn.param_groups[1]["lr"] == 1e-3
    _, muon = build("muon", "fold", data, weights)
    assert sorted(group["lr"] for group in muon.param_groups) == [1e-3, 1e-2]


def test_memory_saved_is_counted_once_per_tensor() -> None:
    layer = nn.Linear(5, 7, bias=False)
    x = torch.randn(3, 5)
    saved = loop.SavedMemory(layer)
    with saved:
        z = layer(x)
        z.square().sum() + (z * z).sum()
    assert saved.bytes == 4 * (x.numel() + z.numel())


# --- images -------------------------------------------------------------------------------------


def test_images_are_scaled_as_the_weights_expect_and_enlarged(data: Path) -> None:
    settings = make_settings("bn", test_images=None, size=64)
    source = PackedImages.load(data)
    [(x, labels)] = list(make_images(data, settings).test())
    pixels = source._val.images.permute(0, 3, 1, 2) / 255
    scaled = (pixels - torch.tensor(MEAN).view(3, 1, 1)) / torch.tensor(STD).view(3, 1, 1)
    expected = nn.functional.interpolate(scaled, (64, 64), mode="bilinear", align_corners=False)
    torch.testing.assert_close(x, expected)
    assert labels.equal(source._val.labels)


def test_images_held_out_are_not_trained_on(data: Path) -> None:
    images = make_images(data, make_settings("bn", images=8, held_out=8))
    trained = images.part._train.images.flatten(1)
    held = images.part._val.images.flatten(1)
    assert len(trained) == len(held) == 8
    assert not any(one.equal(other) for one in trained for other in held)


def test_test_images_are_spread_over_all(data: Path) -> None:
    images = make_images(data, make_settings("bn", test_images=3))
    [(_, labels)] = list(images.test())
    assert labels.equal(PackedImages.load(data)._val.labels[[0, 4, 7]])


# --- rates --------------------------------------------------------------------------------------


def make_records(top1: dict[float, float]) -> list[Record]:
    problem = {"method": "imn", "batch_size": 2, "seed": 0}
    return [problem | {"lr": lr, "select_top1": value} for lr, value in top1.items()]


CONFIG: Record = {**COMMON, "methods": ["imn"], "batch_sizes": [2], "lrs": [0.01, 0.03, 0.1]}


def test_a_grid_is_tried_with_the_first_seed_alone() -> None:
    found = [(t.settings.lr, t.settings.seed) for t in list_tasks(CONFIG | {"seeds": 3})]
    assert found == [(0.01, 0), (0.03, 0), (0.1, 0)]


def test_the_best_rate_gets_the_other_seeds() -> None:
    records = make_records({0.01: 50.0, 0.03: 60.0, 0.1: math.nan})
    tasks = list_tasks(CONFIG | {"seeds": 3}, records)
    found = [(task.settings.lr, task.settings.seed) for task in tasks[3:]]
    assert found == [(0.03, 1), (0.03, 2)]


def test_an_edge_extends_the_grid_before_other_seeds_begin() -> None:
    records = make_records({0.01: 70.0, 0.03: 60.0, 0.1: 50.0})
    rates = [task.settings.lr for task in list_tasks(CONFIG | {"seeds": 3}, records)]
    assert rates == [0.003, 0.01, 0.03, 0.1]
    records += make_records({0.003: 65.0})
    tasks = list_tasks(CONFIG | {"seeds": 3}, records)
    assert [t.settings.lr for t in tasks if t.settings.seed] == [0.01, 0.01]


def test_where_all_diverged_lower_rates_are_tried_and_that_ends() -> None:
    top1 = dict.fromkeys([0.01, 0.1], math.nan)
    for _ in range(10):
        top1 |= dict.fromkeys(extend_grid([0.01, 0.1], top1), math.nan)
    assert sorted(top1) == [1e-5, 1e-4, 1e-3, 0.01, 0.1]


# --- sweeps -------------------------------------------------------------------------------------


def test_a_sweep_has_a_record_and_a_row_for_each_method(whole: Run) -> None:
    records = whole.records()
    assert [record["method"] for record in records] == list(METHODS)
    for record in records:
        assert record["outcome"] == "finished" and 0 <= record["top1"] <= 100
        assert record["saved_mb"] > 0 and record["cpu_ms"] > 0 and record["steps_per_second"] > 0
    best, details, all_rates = tables.make_tables(whole)
    assert len(best.rows) == len(details.rows) == len(all_rates.rows) == len(METHODS)
    assert "edge" not in details.columns and "MobileNetV2 on 8 images" in "".join(best.notes)
    assert (whole.folder / "figures" / "batch_sizes.png").exists()


def test_without_batch_norm_less_is_saved_for_the_backward_pass(whole: Run) -> None:
    saved = {record["method"]: record["saved_mb"] for record in whole.records()}
    assert max(saved[name] for name in ("fold", "fold+geometric", "imn", "frozen")) < saved["bn"]


def test_a_resumed_sweep_has_the_same_records_and_may_get_more(
    whole: Run, data: Path, weights: Path, tmp_path: Path
) -> None:
    part = sweep(tmp_path / "cut", data, weights, methods=["imn"], lrs=[1e-3, 1e-2])
    resumed = sweep(part.folder, data, weights, methods=["imn", "bn"], resume=True, seeds=2)
    found = {record["name"]: without_times(record) for record in resumed.records()}
    for record in whole.records():
        if record["method"] in ("imn", "bn"):
            same, theirs = found[record["name"]], without_times(record)
            assert {**same, "cpu_ms": 0} == {**theirs, "cpu_ms": 0}
    assert {record["seed"] for record in resumed.records()} == {0, 1}
    with pytest.raises(ValueError, match="steps=2, now 3"):
        sweep(part.folder, data, weights, resume=True, steps=3)


def test_a_run_that_diverges_is_a_record_and_a_best_rate_at_the_edge_is_said() -> None:
    records = [
        {"method": "imn", "batch_size": 2, "seed": 0, "lr": 0.1, "select_top1": 5.0, "top1": 4.0},
        {"method": "imn", "batch_size": 2, "seed": 0, "lr": 1.0, "outcome": "diverged"}
        | {"select_top1": math.nan, "top1": math.nan},
    ]
    best, all_rates = tables.from_records(records, "finetune")
    assert dict(zip(best.columns, best.rows[0], strict=True))["edge"] == "1"
    assert [row[all_rates.columns.index("diverged")] for row in all_rates.rows] == ["–", "1"]


def test_autocast_trains_every_method(data: Path, weights: Path, tmp_path: Path) -> None:
    run = sweep(tmp_path / "run", data, weights, precision="bf16")
    assert [record["outcome"] for record in run.records()] == ["finished"] * len(METHODS)


def test_a_loss_far_above_guessing_ends_a_run(data: Path, weights: Path, tmp_path: Path) -> None:
    run = sweep(tmp_path / "run", data, weights, methods=["bn"], lrs=[1e9], steps=120)
    [record] = run.records()
    assert record["outcome"] == "diverged" and math.isnan(record["top1"])
    losses = run.curves(record["name"])["train_loss"]
    assert math.isnan(losses[-1]) and not math.isnan(losses[0])  # it did not go on


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"methods": ["bn", "ln"]}, "methods is one of bn, .*, frozen; got 'ln'"),
        ({"methods": []}, "got none"),
        ({"batch_sizes": []}, "batch_sizes must not be empty"),
        ({"batch_sizes": [16]}, "got batch size 16 and 8 images"),
        ({"lrs": [0.0]}, "above 0 and finite"),
        ({"seeds": 0}, "seeds must be >= 1"),
        ({"steps": 0}, "steps must be >= 1"),
        ({"size": 16}, "size must be >= 32"),
        ({"methods": ["bn"], "batch_sizes": [1]}, "bn needs two values of a channel"),
        ({"width": 0.5}, "at the width given .0.5.: features.0.0.weight has the shape"),
        ({"width": -1.0}, "width must be above 0"),
        ({"optimizer": "adam"}, "optimizer is one of sgd, adamw, muon, turn; got 'adam'"),
        ({"optimizer": "turn"}, "fold.geometric has r and u apart under sgd and adamw"),
        ({"momentum": 1.0}, "momentum must be from 0 to below 1"),
        ({"running_momentum": 0.0}, "running_momentum must be above 0"),
        ({"schedule": "steps"}, "schedule is one of linear"),
        ({"images": 16}, "parts of the 16 training images; got 16 and 4"),
        ({"test_images": 9}, "test_images is at most 8"),
        ({"epochs": 3}, "settings are images, .*; got epochs"),
        ({"weights": "none.safetensors"}, "is not there: none.safetensors"),
        ({"weights": "weights.pt"}, "are a safetensors file .*; got weights.pt"),
    ],
)
def test_mistakes_are_told_before_anything_is_written(
    changes: dict[str, Any], match: str, data: Path, weights: Path, tmp_path: Path
) -> None:
    options = {"data": data, "weights": weights, **SMALL, **changes}
    with pytest.raises((ValueError, FileNotFoundError), match=match):
        finetune.run(tmp_path / "run", **options)
    assert not (tmp_path / "run").exists()


def test_a_damaged_file_of_weights_is_named(data: Path, tmp_path: Path) -> None:
    path = tmp_path / "broken.safetensors"
    path.write_bytes(b"no tensors")
    with pytest.raises(ValueError, match=r"broken.safetensors is damaged"):
        sweep(tmp_path / "run", data, path)
