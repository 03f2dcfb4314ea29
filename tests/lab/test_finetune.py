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
    """The file of a network whose BatchNorms have seen some images."""
    torch.manual_seed(0)
    model = torchvision.models.mobilenet_v2(width_mult=WIDTH)
    with torch.no_grad():
        for _ in range(3):
            model(torch.randn(8, 3, 32, 32))

    path = tmp_path_factory.mktemp("weights") / "mobilenet_v2.safetensors"
    safetensors.save_file(model.state_dict(), path)
    return path


def make_settings(method: str, **changes: Any) -> FinetuneSettings:
    options = {name: value for name, value in SMALL.items() if name in COMMON}
    options |= changes
    return FinetuneSettings(method, batch_size=2, lr=1e-3, seed=0, **options)


def make_images(data: Path, settings: FinetuneSettings) -> EnlargedImages:
    return EnlargedImages(PackedImages.load(data), settings, torch.device("cpu"))


def prepare_network(
    settings: FinetuneSettings, images: EnlargedImages, weights: Path
) -> nn.Module:
    """Return the pretrained network as the method changes it."""
    state = pretrained.read_weights(weights)
    return loop.prepare_network(settings, images, state, images.device)


def run_sweep(out: Path, data: Path, weights: Path, **changes: Any) -> Run:
    run = finetune.run(out, data=data, weights=weights, **{**SMALL, **changes})
    assert run is not None
    return run


@pytest.fixture(scope="module")
def finished(data: Path, weights: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A sweep over all methods."""
    return run_sweep(tmp_path_factory.mktemp("sweep") / "run", data, weights)


# --- methods ------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", [method for method in METHODS if method != "gn"])
def test_every_method_starts_as_the_pretrained_function(
    method: str, data: Path, weights: Path
) -> None:
    settings = make_settings(method)
    images = make_images(data, settings)
    state = pretrained.read_weights(weights)
    torch.manual_seed(0)
    plain = pretrained.build_plain(settings, state, images.classes).eval()

    torch.manual_seed(0)
    model = prepare_network(settings, images, weights)

    x, _ = next(images.train(8, seed=1))
    assert gp.verify(plain, model, x) < 1e-5


def list_batch_norms(model: nn.Module) -> list[nn.BatchNorm2d]:
    return [module for module in model.modules() if isinstance(module, nn.BatchNorm2d)]


@pytest.mark.parametrize("method", METHODS)
def test_only_bn_and_bn_eval_keep_batch_norm(method: str, data: Path, weights: Path) -> None:
    settings = make_settings(method)

    model = prepare_network(settings, make_images(data, settings), weights)

    has_batch_norm = len(list_batch_norms(model)) > 0
    assert has_batch_norm == (method in ("bn", "bn-eval"))


@pytest.mark.parametrize(("method", "is_training"), [("bn", True), ("bn-eval", False)])
def test_batch_norm_is_in_training_mode_or_frozen(
    method: str, is_training: bool, data: Path, weights: Path
) -> None:
    settings = make_settings(method)

    model = prepare_network(settings, make_images(data, settings), weights)

    assert {norm.training for norm in list_batch_norms(model)} == {is_training}


@pytest.mark.parametrize("method", METHODS)
def test_only_bn_and_imn_update_running_means(method: str, data: Path, weights: Path) -> None:
    settings = make_settings(method)
    images = make_images(data, settings)
    model = prepare_network(settings, images, weights)
    means = {name: buffer for name, buffer in model.named_buffers() if "mean" in name}
    before = {name: mean.clone() for name, mean in means.items()}

    x, _ = next(images.train(2, seed=1))
    model(x)

    updated = [name for name, mean in means.items() if not mean.equal(before[name])]
    is_updated = len(updated) > 0
    assert is_updated == (method in ("bn", "imn"))


def test_group_norm_takes_over_scale_and_offset() -> None:
    batch_norm = nn.BatchNorm2d(24)
    nn.init.normal_(batch_norm.weight)

    [group_norm] = pretrained._use_group_norm(nn.Sequential(batch_norm))

    assert isinstance(group_norm, nn.GroupNorm)
    assert group_norm.num_groups == 3
    assert group_norm.weight is batch_norm.weight
    assert group_norm.bias is batch_norm.bias


def build(optimizer: str, method: str, data: Path, weights: Path) -> tuple[nn.Module, Any]:
    """Return a network under a method, and its optimizer."""
    settings = make_settings(method, optimizer=optimizer)
    model = prepare_network(settings, make_images(data, settings), weights)
    return model, pretrained.make_optimizer(settings, model)


@pytest.mark.parametrize("method", ["bn-eval", "fold", "frozen"])
@pytest.mark.parametrize("optimizer_name", ["adamw", "muon", "turn"])
def test_every_optimizer_steps_all_parameters(
    optimizer_name: str, method: str, data: Path, weights: Path
) -> None:
    model, optimizer = build(optimizer_name, method, data, weights)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    torch.manual_seed(0)

    outputs = model(torch.randn(4, 3, 32, 32))
    outputs.logsumexp(1).sum().backward()
    optimizer.step()

    unchanged = [name for name, p in model.named_parameters() if torch.equal(p, before[name])]
    assert unchanged == []


def test_a_turn_in_degrees_is_a_thousand_times_the_rate(data: Path, weights: Path) -> None:
    _, optimizer = build("turn", "fold", data, weights)

    assert optimizer.turn() == [pytest.approx(1.0)]
    assert optimizer.param_groups[1]["lr"] == 1e-3


def test_muons_rate_is_ten_times_the_rate(data: Path, weights: Path) -> None:
    _, optimizer = build("muon", "fold", data, weights)

    assert sorted(group["lr"] for group in optimizer.param_groups) == [1e-3, 1e-2]


def test_memory_saved_is_counted_once_per_tensor() -> None:
    layer = nn.Linear(5, 7, bias=False)
    x = torch.randn(3, 5)
    memory = loop.SavedMemory(layer)

    with memory:
        z = layer(x)
        z.square().sum() + (z * z).sum()

    assert memory.bytes == 4 * (x.numel() + z.numel())


# --- images -------------------------------------------------------------------------------------


def test_images_are_scaled_as_the_weights_expect_and_enlarged(data: Path) -> None:
    settings = make_settings("bn", test_images=None, size=64)
    stored = PackedImages.load(data)._val
    pixels = stored.images.permute(0, 3, 1, 2) / 255
    mean = torch.tensor(MEAN).view(3, 1, 1)
    deviation = torch.tensor(STD).view(3, 1, 1)
    scaled = (pixels - mean) / deviation
    expected = nn.functional.interpolate(scaled, (64, 64), mode="bilinear", align_corners=False)

    [(x, labels)] = list(make_images(data, settings).test())

    torch.testing.assert_close(x, expected)
    assert labels.equal(stored.labels)


def test_images_held_out_are_not_trained_on(data: Path) -> None:
    images = make_images(data, make_settings("bn", images=8, held_out=8))

    trained = {image.numpy().tobytes() for image in images.part._train.images}
    held_out = {image.numpy().tobytes() for image in images.part._val.images}

    assert len(trained) == len(held_out) == 8
    assert trained.isdisjoint(held_out)


def test_test_images_are_spread_over_all(data: Path) -> None:
    images = make_images(data, make_settings("bn", test_images=3))

    [(_, labels)] = list(images.test())

    all_labels = PackedImages.load(data)._val.labels
    assert labels.equal(all_labels[[0, 4, 7]])


# --- rates --------------------------------------------------------------------------------------

THREE_SEEDS: Record = {
    **COMMON,
    "methods": ["imn"],
    "batch_sizes": [2],
    "lrs": [0.01, 0.03, 0.1],
    "seeds": 3,
}


def make_records(top1: dict[float, float]) -> list[Record]:
    """Return records of the first seed with these results at these rates."""
    fields = {"method": "imn", "batch_size": 2, "seed": 0}
    return [{**fields, "lr": lr, "select_top1": accuracy} for lr, accuracy in top1.items()]


def list_runs(records: list[Record]) -> list[tuple[float, int]]:
    """Return the rates and seeds of all runs, where there are these records."""
    tasks = list_tasks(THREE_SEEDS, records)
    return [(task.settings.lr, task.settings.seed) for task in tasks]


def test_a_grid_is_tried_with_the_first_seed_alone() -> None:
    assert list_runs([]) == [(0.01, 0), (0.03, 0), (0.1, 0)]


def test_the_best_rate_gets_the_other_seeds() -> None:
    records = make_records({0.01: 50.0, 0.03: 60.0, 0.1: math.nan})

    assert list_runs(records)[3:] == [(0.03, 1), (0.03, 2)]


def test_a_best_rate_at_the_edge_extends_the_grid_before_other_seeds_begin() -> None:
    records = make_records({0.01: 70.0, 0.03: 60.0, 0.1: 50.0})

    assert list_runs(records) == [(0.003, 0), (0.01, 0), (0.03, 0), (0.1, 0)]


def test_other_seeds_begin_once_the_best_rate_is_not_at_the_edge() -> None:
    records = make_records({0.003: 65.0, 0.01: 70.0, 0.03: 60.0, 0.1: 50.0})

    other_seeds = [(lr, seed) for lr, seed in list_runs(records) if seed > 0]

    assert other_seeds == [(0.01, 1), (0.01, 2)]


def test_a_grid_where_all_diverged_is_extended_three_times() -> None:
    grid = [0.01, 0.1]
    top1 = dict.fromkeys(grid, math.nan)
    for _ in range(10):
        extended = extend_grid(grid, top1)
        top1 |= dict.fromkeys(extended, math.nan)

    assert sorted(top1) == [1e-5, 1e-4, 1e-3, 0.01, 0.1]


# --- sweeps -------------------------------------------------------------------------------------


def test_a_sweep_has_a_record_for_each_method(finished: Run) -> None:
    records = finished.records()

    assert [record["method"] for record in records] == list(METHODS)
    for record in records:
        assert record["outcome"] == "finished"
        assert 0 <= record["top1"] <= 100
        assert record["saved_mb"] > 0
        assert record["cpu_ms"] > 0
        assert record["steps_per_second"] > 0


def test_the_tables_have_a_row_for_each_method(finished: Run) -> None:
    best, details, all_rates = tables.make_tables(finished)

    assert len(best.rows) == len(details.rows) == len(all_rates.rows) == len(METHODS)
    assert "edge" not in details.columns
    assert "MobileNetV2 on 8 images" in "".join(best.notes)


def test_a_sweep_has_a_figure(finished: Run) -> None:
    assert (finished.folder / "figures" / "batch_sizes.png").exists()


@pytest.mark.parametrize("method", ["fold", "fold+geometric", "imn", "frozen"])
def test_without_batch_norm_less_is_saved_for_the_backward_pass(
    method: str, finished: Run
) -> None:
    saved_mb = {record["method"]: record["saved_mb"] for record in finished.records()}

    assert saved_mb[method] < saved_mb["bn"]


@pytest.fixture(scope="module")
def extended(data: Path, weights: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A sweep over two rates that was resumed with another method, one rate and two seeds."""
    folder = tmp_path_factory.mktemp("extended") / "run"
    run_sweep(folder, data, weights, methods=["imn"], lrs=[1e-3, 1e-2])
    return run_sweep(folder, data, weights, methods=["imn", "bn"], resume=True, seeds=2)


def drop_times(record: Record) -> Record:
    return {**without_times(record), "cpu_ms": 0}


@pytest.mark.parametrize("method", ["imn", "bn"])
def test_a_resumed_sweep_has_the_same_records(method: str, finished: Run, extended: Run) -> None:
    [expected] = [record for record in finished.records() if record["method"] == method]

    [record] = [each for each in extended.records() if each["name"] == expected["name"]]

    assert drop_times(record) == drop_times(expected)


def test_a_resumed_sweep_may_get_more_seeds(extended: Run) -> None:
    assert {record["seed"] for record in extended.records()} == {0, 1}


def test_a_resumed_sweep_keeps_its_settings(extended: Run, data: Path, weights: Path) -> None:
    with pytest.raises(ValueError, match="steps=2, now 3"):
        run_sweep(extended.folder, data, weights, resume=True, steps=3)


def test_the_tables_mark_a_best_rate_at_the_edge_and_diverged_runs() -> None:
    run = {"method": "imn", "batch_size": 2, "seed": 0}
    good = {**run, "lr": 0.1, "select_top1": 5.0, "top1": 4.0}
    no_results = {"outcome": "diverged", "select_top1": math.nan, "top1": math.nan}
    diverged = {**run, "lr": 1.0, **no_results}

    best, all_rates = tables.from_records([good, diverged], "finetune")

    edge = best.columns.index("edge")
    outcome = all_rates.columns.index("diverged")
    assert best.rows[0][edge] == "1"
    assert [row[outcome] for row in all_rates.rows] == ["–", "1"]


@pytest.mark.slow
def test_autocast_trains_every_method(data: Path, weights: Path, tmp_path: Path) -> None:
    run = run_sweep(tmp_path / "run", data, weights, precision="bf16")

    assert [record["outcome"] for record in run.records()] == ["finished"] * len(METHODS)


def test_a_loss_far_above_guessing_ends_a_run(data: Path, weights: Path, tmp_path: Path) -> None:
    run = run_sweep(tmp_path / "run", data, weights, methods=["bn"], lrs=[1e9], steps=120)

    [record] = run.records()
    assert record["outcome"] == "diverged"
    assert math.isnan(record["top1"])
    losses = run.curves(record["name"])["train_loss"]
    assert not math.isnan(losses[0])
    assert math.isnan(losses[-1])  # it ended before the last step


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
        ({"methods": ["fold"], "running_momentum": 0.1}, "running_momentum is for the methods bn"),
        ({"schedule": "steps"}, "schedule is one of linear"),
        ({"images": 16}, "parts of the 16 training images; got 16 and 4"),
        ({"test_images": 9}, "test_images is at most 8"),
        ({"epochs": 3}, "settings are images, .*; got epochs"),
        ({"weights": "none.safetensors"}, "is not there: none.safetensors"),
        ({"weights": "weights.pt"}, "are a safetensors file .*; got weights.pt"),
    ],
)
def test_mistakes_are_refused_before_anything_is_written(
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
        run_sweep(tmp_path / "run", data, path)
