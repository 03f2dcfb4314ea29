"""Training on images: every method and optimizer, its results, and what ends a run."""

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from image_runs import BATCH, CLASSES, TRAIN, die, settings, source, weights
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import geoparam as gp
from geoparam_lab import methods, networks
from geoparam_lab.data.packed_images import PackedImages
from geoparam_lab.run_folder import Record
from geoparam_lab.training import network_training, processes, run_checkpoints
from geoparam_lab.training.images import loop, preparation
from geoparam_lab.training.images.loop import Training, train
from geoparam_lab.training.images.plateau import Plateau
from geoparam_lab.training.images.settings import Settings
from geoparam_lab.training.network_training import Outcome
from geoparam_lab.training.schedules import find_epoch_factor

pytest.importorskip("accelerate")
pytestmark = pytest.mark.usefixtures("fresh_accelerate")


@pytest.fixture
def step_rates(monkeypatch: pytest.MonkeyPatch) -> list[list[float]]:
    """The learning rates of all parameter groups, in every step that begins."""
    train_on = Training.train_on
    rates: list[list[float]] = []

    def record_rates(self: Training, *batch: torch.Tensor) -> None:
        rates.append([group["lr"] for group in self.optimizer.param_groups])
        train_on(self, *batch)

    monkeypatch.setattr(Training, "train_on", record_rates)
    return rates


def build_network(chosen: Settings, seed: int = 0) -> nn.Module:
    """Build the network that a run with these settings trains."""
    return networks.build("vgg6", chosen.method, CLASSES, size=8, seed=seed, widths=chosen.widths)


def load_network(chosen: Settings, folder: Path) -> nn.Module:
    """Load the network that a run reports, for evaluation."""
    model = build_network(chosen)
    model.load_state_dict(weights(folder))
    return model.eval()


def load_validation_batch(
    images: PackedImages, device: Any = "cpu"
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return all validation images and their labels."""
    [batch] = images.val(100, device=device).epoch(0)
    return batch


def find_accuracy(logits: torch.Tensor, labels: torch.Tensor, top: int) -> float:
    """Return the percentage of images with the label among their ``top`` highest logits."""
    order = logits.argsort(1, descending=True)
    is_hit = (order[:, :top] == labels[:, None]).any(1)
    return 100 * is_hit.double().mean().item()


def assert_same_tensors(actual: dict[str, Any], expected: dict[str, Any], **close: float) -> None:
    assert list(actual) == list(expected)
    for name, value in expected.items():
        torch.testing.assert_close(actual[name], value, msg=name, **close)


# --- methods and optimizers ---------------------------------------------------------------------


@pytest.mark.parametrize("method", [name for name in methods.METHODS if name != "bn+decay"])
def test_every_method_trains_all_parameters(method: str, tmp_path: Path) -> None:
    chosen = settings(method, epochs=1, lr=0.05)
    images = source(BATCH)
    untrained = preparation.build(chosen, images)

    train(chosen, images, tmp_path)

    trained = weights(tmp_path)
    for name, parameter in untrained.named_parameters():
        assert trained[name].isfinite().all(), name
        assert not torch.equal(trained[name], parameter), name


@pytest.mark.parametrize(
    "changes",
    [
        {"optimizer": "sgd"},
        {"method": "gmp+imn", "optimizer": "adamw", "lr": 0.01},
        {"optimizer": "muon", "rest": "sgd", "weight_decay": 0.1},
        {"optimizer": "airbench"},
        {"optimizer": "rotational", "weight_decay": 0.01, "nesterov": True},
        {"optimizer": "angularmuown", "rest_lr": 0.01},
        {"optimizer": "geometric"},
        {"optimizer": "geometric", "base": "adamw", "lr": 0.01},
        {"optimizer": "geometric", "base": "muon", "turn": 2.4, "lr": 0.01},
        {"optimizer": "geometric", "coordinates": "angles"},
    ],
    ids=lambda changes: "-".join(map(str, changes.values())),
)
def test_every_optimizer_learns(changes: dict[str, Any], tmp_path: Path) -> None:
    options = {"method": "bn", "lr": 0.05, "epochs": 6, "schedule": "linear"}
    chosen = settings(**{**options, **changes})

    losses = train(chosen, source(), tmp_path).curves["train_loss"]

    assert losses[-1] < 0.95 * losses[0]


def make_optimizer(method: str, **changes: Any) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Return a network with two convolutions, and the optimizer that the settings ask for."""
    model = networks.build("vgg6", method, 2, size=8, widths=(4, 4))
    return model, preparation.make_optimizer(settings(method, **changes), model)


def test_the_geometric_optimizer_gets_the_options_of_sgd() -> None:
    _, optimizer = make_optimizer("bn", optimizer="geometric", weight_decay=0.05, nesterov=True)

    for group in optimizer.param_groups:
        assert group["lr"] == 0.1
        assert group["momentum"] == 0.9
        assert group["nesterov"] is True
    assert {group["weight_decay"] for group in optimizer.param_groups} == {0.0, 0.05}


def test_the_geometric_optimizer_gets_the_options_of_adamw_and_of_the_rest() -> None:
    _, optimizer = make_optimizer(
        "bn",
        optimizer="geometric",
        weight_decay=0.05,
        base="adamw",
        coordinates="angles",
        momentum=0.8,
        rest="sgd",
        rest_lr=0.01,
    )

    groups = optimizer.param_groups
    assert (0.8, 0.999) in [group.get("betas") for group in groups]
    assert 0.9 in [group.get("momentum") for group in groups]
    assert 0.01 in [group["lr"] for group in groups]


@pytest.mark.parametrize("method", ["wn", "gmp+bn", "intrinsic+imn"])
def test_rivals_are_for_plain_weights(method: str) -> None:
    with pytest.raises(ValueError, match="is for plain weights"):
        make_optimizer(method, optimizer="muon")


def list_geometric_layers(model: nn.Module) -> list[gp.GmPLayer]:
    return [module for module in model.modules() if isinstance(module, gp.GmPLayer)]


def test_scale_decay_is_for_all_scales_and_for_them_alone() -> None:
    model, optimizer = make_optimizer("intrinsic+imn", weight_decay=0.1, scale_decay=0.5)
    scales = {id(p) for layer in list_geometric_layers(model) for p in (layer.r, layer.lam)}

    decayed = [group for group in optimizer.param_groups if group["weight_decay"] == 0.5]

    assert {id(parameter) for parameter in decayed[0]["params"]} == scales


def test_every_parameter_is_in_one_group_with_scale_decay() -> None:
    model, optimizer = make_optimizer("intrinsic+imn", weight_decay=0.1, scale_decay=0.5)

    group_sizes = [len(group["params"]) for group in optimizer.param_groups]

    assert sum(group_sizes) == len(list(model.parameters()))


def test_relative_scales_keep_a_mean_of_1() -> None:
    changes = {"weight_decay": 0.1, "scale_decay": 0.5, "scales": "relative"}
    model, optimizer = make_optimizer("intrinsic+imn", **changes)

    optimizer.step()

    means = [layer.r.abs().mean().item() for layer in list_geometric_layers(model)]
    assert means == pytest.approx([1.0, 1.0])


def test_scale_decay_is_refused_without_geometric_layers() -> None:
    with pytest.raises(ValueError, match="are for geometric layers"):
        settings("bn", scale_decay=0.1)


def test_dropout_changes_the_output_layer_in_training_alone(tmp_path: Path) -> None:
    accelerator = processes.make_accelerator("fp32")
    model = preparation.make_network(settings("bn", dropout=0.5), source(), accelerator)
    output = model.output
    x = torch.ones(3, output.in_features)
    torch.manual_seed(0)

    without_dropout = output.forward(x)

    assert torch.equal(output.eval()(x), without_dropout)
    assert not torch.equal(output.train()(x), without_dropout)


# --- steps --------------------------------------------------------------------------------------


def test_an_epoch_equals_that_of_plain_torch(tmp_path: Path) -> None:
    chosen = settings("gmp", epochs=1, weight_decay=0.1, label_smoothing=0.1)
    images = source()
    model = build_network(chosen, seed=3)
    decayed = [model.output.weight]
    others = [p for p in model.parameters() if p is not model.output.weight]
    optimizer = torch.optim.SGD(
        [{"params": decayed, "weight_decay": 0.1}, {"params": others}], lr=0.1, momentum=0.9
    )
    for x, y in images.train(BATCH, seed=3, device="cpu").epoch(0):
        loss = torch.nn.functional.cross_entropy(model(x), y, label_smoothing=0.1)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    train(chosen, images, tmp_path)

    assert_same_tensors(weights(tmp_path), model.state_dict())


@pytest.mark.parametrize("method", ["wn", "natural", "intrinsic"])
def test_accumulated_gradients_are_those_of_the_whole_batch(method: str, tmp_path: Path) -> None:
    train(settings(method, accumulate=1), source(), tmp_path / "whole")
    train(settings(method, accumulate=4), source(), tmp_path / "parts")

    whole = weights(tmp_path / "whole")
    assert_same_tensors(weights(tmp_path / "parts"), whole, atol=1e-5, rtol=1e-4)


class CountScalarReads(TorchDispatchMode):
    """Counts how often a tensor's value is read as a Python number."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if function is torch.ops.aten._local_scalar_dense.default:
            self.count += 1
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("method", ["bn", "intrinsic+imn"])
def test_a_step_does_not_wait_for_the_device(method: str) -> None:
    training = Training(settings(method), source(), processes.make_accelerator("fp32"))
    batches = list(training.batches.epoch(0))

    with CountScalarReads() as in_steps:
        for batch in batches:
            training.train_on(*batch)
    with CountScalarReads() as in_item:
        training.sums.totals[0].item()

    assert in_steps.count == 0
    assert in_item.count == 1  # a read would have been noticed


def test_the_rate_rises_and_falls_in_every_step(
    tmp_path: Path, step_rates: list[list[float]]
) -> None:
    chosen = settings("bn", schedule="linear", warmup=1 / 3, optimizer="airbench", rest_lr=0.02)
    factors = np.array([1, 2, 3, 3, 2.5, 2, 1.5, 1, 0.5]) / 3

    curve = train(chosen, source(), tmp_path).curves["lr"]

    rows, *rest = np.array(step_rates).T
    np.testing.assert_allclose(rows, 0.1 * factors)
    np.testing.assert_allclose(curve, rows[2::3])
    assert len(rest) == 2  # parameters with and without decay
    np.testing.assert_allclose(rest, [0.02 * factors] * 2)


# --- results ------------------------------------------------------------------------------------


@pytest.mark.parametrize("select", [0.0, 0.25])
def test_a_run_that_ends_at_chance_has_collapsed_and_is_not_trained_again(
    select: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loop, "FEWEST_STEPS", 6)
    chosen = settings("gmp+imn", lr=1e-9, select=select)

    record = train(chosen, source(), tmp_path).record

    assert record["outcome"] == "collapsed"
    assert np.isfinite(record["top1"])
    assert record["train_loss"] > 0.99 * np.log(CLASSES)
    monkeypatch.setattr(Training, "train_on", die)
    assert train(chosen, source(), tmp_path).record == record


@pytest.mark.parametrize("select", [0.0, 0.25])
def test_a_run_of_few_steps_may_end_at_chance(
    select: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loop, "FEWEST_STEPS", 100)

    record = train(settings("gmp+imn", lr=1e-9, select=select), source(), tmp_path).record

    assert record["outcome"] == "finished"


TWO_EPOCHS = settings("gmp+imn", epochs=2)
KEEPING_BACK = settings("bn", select=0.25, time_to=(0.0, 99.9))


@pytest.fixture(scope="module")
def two_epochs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Outcome, Path]:
    """The outcome of a run without options, and its folder."""
    folder = tmp_path_factory.mktemp("two_epochs")
    return train(TWO_EPOCHS, source(), folder), folder


def test_results_are_those_of_the_weights(two_epochs: tuple[Outcome, Path]) -> None:
    outcome, folder = two_epochs
    x, labels = load_validation_batch(source())
    with torch.no_grad():
        logits = load_network(TWO_EPOCHS, folder)(x)
    loss = torch.nn.functional.cross_entropy(logits, labels).item()

    record = outcome.record

    assert record["top1"] == pytest.approx(find_accuracy(logits, labels, top=1))
    assert record["top5"] == pytest.approx(find_accuracy(logits, labels, top=5))
    assert record["val_loss"] == pytest.approx(loss, rel=1e-5)


def test_a_run_has_records_and_curves_of_all_epochs(two_epochs: tuple[Outcome, Path]) -> None:
    outcome, _ = two_epochs

    assert outcome.record["epochs"] == 2
    assert outcome.record["best_epoch"] == 1
    assert outcome.record["images_per_second"] > 0
    assert {len(curve) for curve in outcome.curves.values()} == {2}


class KeepingBack(NamedTuple):
    """A run that keeps a quarter of its training images back."""

    record: Record
    folder: Path
    evaluated: list[int]  # number of images in each evaluation


@pytest.fixture(scope="module")
def keeping_back(tmp_path_factory: pytest.TempPathFactory) -> KeepingBack:
    folder = tmp_path_factory.mktemp("keeping_back")
    evaluate = Training.evaluate
    evaluated: list[int] = []

    def count_images(self: Training, batches: Any) -> Any:
        evaluated.append(batches.examples)
        return evaluate(self, batches)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Training, "evaluate", count_images)
        record = train(KEEPING_BACK, source(), folder).record
    return KeepingBack(record, folder, evaluated)


def test_validation_images_are_evaluated_once_after_training(keeping_back: KeepingBack) -> None:
    kept_back = TRAIN // 4
    validation = 22

    assert keeping_back.evaluated == [kept_back, kept_back, kept_back, validation]


def test_images_kept_back_are_not_trained_on() -> None:
    part = source().hold_out(0.25)

    trained = {image.numpy().tobytes() for image in part._train.images}
    kept_back = {image.numpy().tobytes() for image in part._val.images}

    assert (len(trained), len(kept_back)) == (36, 12)
    assert trained.isdisjoint(kept_back)


@pytest.mark.parametrize("name", ["top1", "select_top1"])
def test_validation_images_and_those_kept_back_have_results(
    name: str, keeping_back: KeepingBack
) -> None:
    images = source().hold_out(0.25) if name == "select_top1" else source()
    x, labels = load_validation_batch(images)
    logits = load_network(KEEPING_BACK, keeping_back.folder)(x)

    accuracy = keeping_back.record[name]

    assert accuracy == pytest.approx(find_accuracy(logits, labels, top=1))


def test_the_time_to_an_accuracy_is_recorded_once_it_is_reached(
    keeping_back: KeepingBack,
) -> None:
    record = keeping_back.record

    assert record["epochs_to_0"] == 1
    assert record["seconds_to_0"] > 0
    assert "epochs_to_99.9" not in record


def test_running_statistics_are_recomputed_before_the_last_evaluation(tmp_path: Path) -> None:
    chosen = settings("bn", epochs=2)
    images = source()
    train(chosen, images, tmp_path / "plain")
    model = load_network(chosen, tmp_path / "plain")
    batches = images.train(BATCH, seed=3, device="cpu")
    next_epochs = [*batches.epoch(2), *batches.epoch(3)]
    gp.recalibrate_(model, [x for x, _ in next_epochs[:4]])

    train(settings("bn", epochs=2, recalibrate=4), images, tmp_path / "recalibrated")

    assert_same_tensors(weights(tmp_path / "recalibrated"), model.state_dict())


def test_a_network_without_running_statistics_can_be_recalibrated(tmp_path: Path) -> None:
    record = train(settings("sp", recalibrate=4, epochs=1), source(), tmp_path).record

    assert record["top1"] > 0


# --- plateaus -----------------------------------------------------------------------------------


def test_the_released_schedule_reports_its_best_weights(tmp_path: Path) -> None:
    options = {"schedule": "plateau-top5", "patience": 2, "select": 0.25}
    chosen = settings("bn", lr=0.3, epochs=40, seed=5, **options)
    images = source(96)

    outcome = train(chosen, images, tmp_path)

    record = outcome.record
    curve = outcome.curves["select_top5"]
    best_epoch = int(np.argmax(curve))
    assert record["outcome"] == "stopped early"
    assert record["best_epoch"] == best_epoch
    assert record["epochs"] == len(curve) == best_epoch + 5
    assert record["select_top5"] == curve[best_epoch] > curve[-1]
    device = processes.make_accelerator("fp32").device
    x, labels = load_validation_batch(images.hold_out(0.25), device)
    logits = load_network(chosen, tmp_path)(x)
    assert find_accuracy(logits, labels, top=5) == pytest.approx(curve[best_epoch])


def test_a_plateau_is_counted_as_keras_does() -> None:
    plateau = Plateau("plateau-top1", 5)
    # 20.001 is no better for the rate, by less than 1e-4 of all images, but it is for the end.
    accuracies = [10.0, 20.0, *[19.0] * 4, 20.001, *[20.0] * 9, 15.0]

    factors = []
    stops = []
    for accuracy in accuracies:
        _, is_end = plateau.judge(accuracy)
        factors.append(plateau.factor)
        stops.append(is_end)

    assert factors == pytest.approx([1.0] * 6 + [0.1] * 5 + [0.01] * 5 + [0.001])
    assert stops == [False] * 16 + [True]


def test_a_plateau_cuts_the_rate_and_ends_the_run(
    tmp_path: Path, step_rates: list[list[float]]
) -> None:
    chosen = settings("bn", lr=1e-9, epochs=9, warmup=1 / 9, schedule="plateau-top1", patience=2)

    record = train(chosen, source(), tmp_path).record

    assert record["outcome"] == "stopped early"
    assert (record["epochs"], record["best_epoch"]) == (5, 4)
    factors = [rates[0] / 1e-9 for rates in step_rates]
    assert factors == pytest.approx([1 / 3, 2 / 3, 1] + [1.0] * 6 + [0.1] * 6)


# --- divergence ---------------------------------------------------------------------------------


def assert_diverged(outcome: Outcome, epochs: int) -> None:
    """Assert that a run diverged after this number of complete epochs, without results."""
    record = outcome.record
    assert record["outcome"] == "diverged"
    assert record["epochs"] == epochs
    assert record["best_epoch"] == -1
    for name in ("top1", "top5", "train_top1", "val_loss"):
        assert np.isnan(record[name]), name
    assert {len(curve) for curve in outcome.curves.values()} == {epochs}


@pytest.mark.parametrize("method", ["sp", "gmp"])
def test_a_huge_rate_ends_as_diverged(method: str, tmp_path: Path) -> None:
    chosen = settings(method, lr=1e30)

    outcome = train(chosen, source(), tmp_path)
    resumed = train(chosen, source(), tmp_path)  # the checkpoint says that it diverged

    assert_diverged(outcome, epochs=0)
    assert_diverged(resumed, epochs=0)
    assert not (tmp_path / run_checkpoints.WEIGHTS).exists()


def test_divergence_is_noticed_within_an_epoch(
    tmp_path: Path, step_rates: list[list[float]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(network_training, "LOOK_EVERY", 4)

    outcome = train(settings("sp", lr=1e30), source(10 * BATCH), tmp_path)

    assert_diverged(outcome, epochs=0)
    assert len(step_rates) == 4


def test_a_loss_far_above_guessing_is_divergence_after_the_first_epoch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(network_training, "HOPELESS", 0.01)

    outcome = train(settings("sp"), source(), tmp_path)

    assert_diverged(outcome, epochs=1)


def test_a_validation_loss_that_is_not_finite_is_divergence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    evaluate = Training.evaluate

    def evaluate_with_nan(self: Training, batches: Any) -> Any:
        self.model.output.bias.data.fill_(float("nan"))
        return evaluate(self, batches)

    monkeypatch.setattr(Training, "evaluate", evaluate_with_nan)

    outcome = train(settings("sp"), source(), tmp_path)

    assert_diverged(outcome, epochs=0)


# --- what a run leaves alone, and what it refuses -----------------------------------------------


def test_a_run_leaves_the_random_state_and_switches_as_they_were(tmp_path: Path) -> None:
    state = torch.get_rng_state()

    train(settings(epochs=1, deterministic=True), source(), tmp_path)

    assert torch.equal(torch.get_rng_state(), state)
    assert not torch.are_deterministic_algorithms_enabled()
    assert not torch.backends.cudnn.benchmark


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"method": "magic"}, "a method is one of"),
        ({"schedule": "sine"}, "schedule is one of steps"),
        ({"init": "ones"}, "init is"),
        ({"epochs": 0}, "epochs must be >= 1"),
        ({"recalibrate": -1}, "recalibrate must be 0 or more"),
        ({"time_to": (40.0, 101.0)}, "from 0 to 100; got .101"),
        ({"momentum": 1.0}, "momentum must be from 0 to below 1"),
        ({"lr": float("inf")}, "lr must be above 0 and finite"),
        ({"widths": (4, 0)}, "widths are numbers of channels from 1 on"),
        ({"optimizer": "lion"}, "optimizer is one of sgd, adamw, muon"),
        ({"optimizer": "geometric", "turn": 1.0, "rest_lr": 0.1}, "leave rest_lr out"),
        ({"turn": 2.4}, "turn is not for optimizer 'sgd'"),
        ({"optimizer": "muon", "base": "sgd"}, "base is not for optimizer 'muon'"),
        ({"optimizer": "rotational"}, "weight_decay is above 0"),
        ({"patience": 2}, "patience is for plateau-top1 and plateau-top5"),
        ({"constants": "keras"}, "vgg6 always has Keras"),
        ({"skip": "plain"}, "vgg6 has no skip connections"),
    ],
    ids=lambda value: str(value) if isinstance(value, dict) else "",
)
def test_mistaken_settings_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        settings(**changes)


def test_another_precision_than_accelerates_is_refused(tmp_path: Path) -> None:
    accelerator = processes.make_accelerator("fp32")

    with pytest.raises(ValueError, match="precision 'bf16' needs"):
        processes.check_processes(accelerator, "bf16", batch_size=4)


# --- compiled training --------------------------------------------------------------------------


@pytest.mark.compile
@pytest.mark.parametrize(("precision", "tolerance"), [("fp32", 1e-4), ("bf16", 1e-2)])
def test_compiled_training_is_close(precision: str, tolerance: float, tmp_path: Path) -> None:
    options = {"method": "gmp+imn", "epochs": 1, "precision": precision}
    counters = torch._dynamo.utils.counters
    torch._dynamo.reset()
    counters.clear()

    train(settings(**options), source(), tmp_path / "eager")
    train(settings(**options, compile=True), source(), tmp_path / "compiled")

    assert counters["frames"]["ok"]
    assert not counters["graph_break"]
    eager = weights(tmp_path / "eager")
    assert_same_tensors(weights(tmp_path / "compiled"), eager, atol=tolerance, rtol=1e-3)


# --- schedules ----------------------------------------------------------------------------------


def make_torch_scheduler(
    name: str, optimizer: torch.optim.Optimizer, epochs: int, steps: int
) -> torch.optim.lr_scheduler.LRScheduler:
    """Return the scheduler of torch that has the same rule."""
    schedulers = torch.optim.lr_scheduler
    if name == "linear":
        return schedulers.LinearLR(optimizer, 1.0, 0.0, total_iters=steps)
    if name == "cosine":
        return schedulers.CosineAnnealingLR(optimizer, steps)
    milestones = [epochs // 3, 2 * epochs // 3, 8 * epochs // 9]
    return schedulers.MultiStepLR(optimizer, milestones)


@pytest.mark.parametrize(
    ("name", "epochs", "steps", "tolerance"),
    [
        ("steps", 90, 90, 0),
        ("steps", 18, 18, 0),
        ("linear", 10, 40, 1e-9),
        ("cosine", 10, 40, 1e-9),
    ],
)
def test_schedules_equal_those_of_torch(
    name: str, epochs: int, steps: int, tolerance: float
) -> None:
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
    scheduler = make_torch_scheduler(name, optimizer, epochs, steps)
    for step in range(steps):
        [expected] = scheduler.get_last_lr()

        factor = find_epoch_factor(name, epochs, 0.0, epochs * step / steps)

        assert factor == pytest.approx(expected, rel=1e-12, abs=tolerance)
        optimizer.step()
        scheduler.step()
