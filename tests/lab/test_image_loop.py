"""Training on images: every method and optimizer, its results, and what ends a run."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from image_runs import BATCH, CLASSES, die, settings, source, weights
from torch.utils._python_dispatch import TorchDispatchMode

import geoparam as gp
from geoparam_lab import methods, networks
from geoparam_lab.training import network_training, processes, run_checkpoints
from geoparam_lab.training.images import loop, preparation
from geoparam_lab.training.images.loop import Training, train
from geoparam_lab.training.images.plateau import Plateau
from geoparam_lab.training.network_training import Outcome
from geoparam_lab.training.schedules import find_epoch_factor

pytest.importorskip("accelerate")
pytestmark = pytest.mark.usefixtures("fresh_accelerate")


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> list[list[float]]:
    """Learning rates of every step that is begun."""
    step, seen = Training.train_on, []

    def noting(self: Training, *batch: torch.Tensor) -> None:
        seen.append([group["lr"] for group in self.optimizer.param_groups])
        step(self, *batch)

    monkeypatch.setattr(Training, "train_on", noting)
    return seen


@pytest.mark.parametrize("method", [name for name in methods.METHODS if name != "bn+decay"])
def test_every_method_trains_a_step(method: str, tmp_path: Path) -> None:
    chosen, images = settings(method, epochs=1, lr=0.05), source(BATCH)
    train(chosen, images, tmp_path)
    untrained = preparation.build(chosen, images)
    found = weights(tmp_path)
    for name, parameter in untrained.named_parameters():
        assert found[name].isfinite().all() and not torch.equal(found[name], parameter), name


@pytest.mark.parametrize(
    "chosen",
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
    ids=lambda chosen: "-".join(map(str, chosen.values())),
)
def test_every_optimizer_learns(chosen: dict[str, Any], tmp_path: Path) -> None:
    options = {"method": "bn", "lr": 0.05, "epochs": 6, "schedule": "linear"}
    losses = train(settings(**{**options, **chosen}), source(), tmp_path).curves["train_loss"]
    assert losses[-1] < 0.95 * losses[0]


def test_the_geometric_optimizer_gets_its_options() -> None:
    model = networks.build("vgg6", "bn", 2, size=8, widths=(4, 4))
    chosen = {"optimizer": "geometric", "weight_decay": 0.05}
    optimizer = preparation.make_optimizer(settings("bn", **chosen, nesterov=True), model)
    for group in optimizer.param_groups:
        assert (group["lr"], group["momentum"], group["nesterov"]) == (0.1, 0.9, True)
    assert {group["weight_decay"] for group in optimizer.param_groups} == {0.0, 0.05}
    chosen |= {"base": "adamw", "coordinates": "angles", "rest": "sgd"}
    optimizer = preparation.make_optimizer(
        settings("bn", **chosen, rest_lr=0.01, momentum=0.8), model
    )
    assert (0.8, 0.999) in [group.get("betas") for group in optimizer.param_groups]
    assert 0.9 in [group.get("momentum") for group in optimizer.param_groups]
    assert 0.01 in [group["lr"] for group in optimizer.param_groups]


@pytest.mark.parametrize("method", ["wn", "gmp+bn", "intrinsic+imn"])
def test_rivals_are_for_plain_weights(method: str) -> None:
    model = networks.build("vgg6", method, 2, size=8, widths=(4, 4))
    with pytest.raises(ValueError, match="is for plain weights"):
        preparation.make_optimizer(settings(method, optimizer="muon"), model)


def test_scales_decay_or_keep_their_mean_where_asked() -> None:
    model = networks.build("vgg6", "intrinsic+imn", 2, size=8, widths=(4, 4))
    layers = [module for module in model.modules() if isinstance(module, gp.GmPLayer)]
    chosen = settings("intrinsic+imn", weight_decay=0.1, scale_decay=0.5, scales="relative")
    optimizer = preparation.make_optimizer(chosen, model)
    decayed = [g["params"] for g in optimizer.param_groups if g["weight_decay"] == 0.5]
    assert set(map(id, decayed[0])) == {id(p) for each in layers for p in (each.r, each.lam)}
    assert sum(len(group["params"]) for group in optimizer.param_groups) == len(
        [*model.parameters()]
    )
    optimizer.step()
    assert [each.r.abs().mean().item() for each in layers] == pytest.approx([1.0, 1.0])
    with pytest.raises(ValueError, match="are for geometric layers"):
        settings("bn", scale_decay=0.1)


def test_dropout_is_of_the_output_layers_inputs_in_training(tmp_path: Path) -> None:
    accelerator = processes.make_accelerator("fp32")
    model = preparation.make_network(settings("bn", dropout=0.5), source(), accelerator)
    x = torch.ones(3, model.output.in_features)
    assert torch.equal(model.output.eval()(x), model.output.forward(x))
    torch.manual_seed(0)
    assert not torch.equal(model.output.train()(x), model.output.forward(x))


@pytest.mark.parametrize("select", [0.0, 0.25])
def test_a_run_that_ends_at_chance_has_collapsed(
    select: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loop, "FEWEST_STEPS", 6)
    chosen = settings("gmp+imn", lr=1e-9, select=select)
    record = train(chosen, source(), tmp_path).record
    assert record["outcome"] == "collapsed" and np.isfinite(record["top1"])
    assert record["train_loss"] > 0.99 * np.log(CLASSES)
    with monkeypatch.context() as patch:
        patch.setattr(Training, "train_on", die)
        assert train(chosen, source(), tmp_path).record == record  # it is not done again
    monkeypatch.setattr(loop, "FEWEST_STEPS", 100)
    assert train(chosen, source(), tmp_path / "short").record["outcome"] == "finished"


def test_one_step_is_that_of_plain_torch(tmp_path: Path) -> None:
    chosen, images = settings("gmp", epochs=1, weight_decay=0.1, label_smoothing=0.1), source()
    train(chosen, images, tmp_path)
    model = networks.build("vgg6", "gmp", images.classes, size=8, seed=3, widths=chosen.widths)
    decayed = [p for p in model.output.parameters() if p.ndim > 1]
    others = [p for p in model.parameters() if not any(p is q for q in decayed)]
    optimizer = torch.optim.SGD(
        [{"params": decayed, "weight_decay": 0.1}, {"params": others}], lr=0.1, momentum=0.9
    )
    for x, y in images.train(BATCH, seed=3, device="cpu").epoch(0):
        loss = torch.nn.functional.cross_entropy(model(x), y, label_smoothing=0.1)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    for name, value in model.state_dict().items():
        torch.testing.assert_close(weights(tmp_path)[name], value, msg=name)


@pytest.mark.parametrize("method", ["wn", "natural", "intrinsic"])
def test_accumulated_gradients_are_those_of_the_whole_batch(method: str, tmp_path: Path) -> None:
    for parts in (1, 4):
        train(settings(method, accumulate=parts), source(), tmp_path / str(parts))
    whole, accumulated = weights(tmp_path / "1"), weights(tmp_path / "4")
    for name, value in whole.items():
        torch.testing.assert_close(accumulated[name], value, atol=1e-5, rtol=1e-4, msg=name)


@pytest.mark.parametrize("method", ["bn", "intrinsic+imn"])
def test_a_step_does_not_wait_for_the_device(method: str) -> None:
    class Reads(TorchDispatchMode):
        count = 0

        def __torch_dispatch__(
            self, function: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            Reads.count += function is torch.ops.aten._local_scalar_dense.default
            return function(*args, **(kwargs or {}))

    training = Training(settings(method), source(), processes.make_accelerator("fp32"))
    batches = list(training.batches.epoch(0))
    with Reads():
        for batch in batches:
            training.train_on(*batch)
        assert Reads.count == 0
        training.sums.totals[0].item()
        assert Reads.count == 1  # it would have been noticed


def test_results_are_those_of_the_weights(tmp_path: Path) -> None:
    chosen, images = settings("gmp+imn", epochs=2), source()
    outcome = train(chosen, images, tmp_path)
    model = networks.build("vgg6", "gmp+imn", images.classes, size=8, widths=chosen.widths)
    model.load_state_dict(weights(tmp_path))
    [(x, y)] = images.val(100, device="cpu").epoch(0)
    with torch.no_grad():
        logits = model.eval()(x)
    order = logits.argsort(1, descending=True)
    found = [100 * (order[:, :top] == y[:, None]).any(1).double().mean().item() for top in (1, 5)]
    record = outcome.record
    assert [record["top1"], record["top5"]] == pytest.approx(found)
    loss = torch.nn.functional.cross_entropy(logits, y).item()
    assert record["val_loss"] == pytest.approx(loss, rel=1e-5)
    assert record["best_epoch"] == 1 and record["epochs"] == 2 and record["images_per_second"] > 0
    assert {len(curve) for curve in outcome.curves.values()} == {2}


def test_the_rate_rises_and_falls_in_every_step(tmp_path: Path, steps: list[Any]) -> None:
    chosen = settings("bn", schedule="linear", warmup=1 / 3, optimizer="airbench", rest_lr=0.02)
    curve = train(chosen, source(), tmp_path).curves["lr"]
    factors = np.array([1, 2, 3, 3, 2.5, 2, 1.5, 1, 0.5]) / 3
    rows, *rest = np.array(steps).T
    np.testing.assert_allclose(rows, 0.1 * factors)
    assert len(rest) == 2  # what decays and what does not
    np.testing.assert_allclose(rest, [0.02 * factors] * 2)
    np.testing.assert_allclose(curve, rows[2::3])


def test_what_is_kept_back_is_never_trained_on_and_validation_is_looked_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    images, chosen = source(), settings("bn", select=0.25, time_to=(0.0, 99.9))
    evaluate, seen = Training.evaluate, []

    def noting(self: Training, batches: Any) -> Any:
        seen.append(batches.examples)
        return evaluate(self, batches)

    monkeypatch.setattr(Training, "evaluate", noting)
    record = train(chosen, images, tmp_path).record
    assert seen == [12, 12, 12, 22]
    part = images.hold_out(0.25)
    trained, held = (
        {tuple(image.flatten().tolist()) for image in split.images}
        for split in (part._train, part._val)
    )
    assert len(trained) == 36 and len(held) == 12 and not trained & held
    model = networks.build("vgg6", "bn", images.classes, size=8, widths=chosen.widths)
    model.load_state_dict(weights(tmp_path))
    for name, split in {"top1": images, "select_top1": part}.items():
        [(x, y)] = split.val(100, device="cpu").epoch(0)
        right = (model.eval()(x).argmax(1) == y).double().mean().item()
        assert record[name] == pytest.approx(100 * right), name
    assert record["epochs_to_0"] == 1 and 0 < record["seconds_to_0"]
    assert "epochs_to_99.9" not in record


def test_running_statistics_are_recomputed_before_the_last_evaluation(tmp_path: Path) -> None:
    images = source()
    for name, count in {"without": 0, "with": 4}.items():
        train(settings("bn", recalibrate=count, epochs=2), images, tmp_path / name)
    before, after = weights(tmp_path / "without"), weights(tmp_path / "with")
    model = networks.build("vgg6", "bn", images.classes, size=8, widths=settings().widths)
    model.load_state_dict(before)
    batches = images.train(BATCH, seed=3, device="cpu")
    gp.recalibrate_(model, [x for n in (2, 3) for x, _ in batches.epoch(n)][:4])
    for name, value in model.state_dict().items():
        torch.testing.assert_close(after[name], value, msg=name)
    assert train(settings("sp", recalibrate=4, epochs=1), images, tmp_path / "sp").record["top1"]


def test_the_released_schedule_reports_its_best_weights(tmp_path: Path) -> None:
    chosen = settings("bn", lr=0.3, epochs=40, schedule="plateau-top5", patience=2, select=0.25)
    images = source(96)
    outcome = train(chosen, images, tmp_path)
    record, top5 = outcome.record, outcome.curves["select_top5"]
    best = int(np.argmax(top5))
    assert record["outcome"] == "stopped early"
    assert (record["best_epoch"], record["epochs"]) == (best, len(top5)) == (best, best + 5)
    assert record["select_top5"] == top5[best]
    model = networks.build("vgg6", "bn", images.classes, size=8, widths=chosen.widths)
    model.load_state_dict(weights(tmp_path))
    place = processes.make_accelerator("fp32").device
    [(x, labels)] = images.hold_out(0.25).val(96, device=place).epoch(0)
    hits = (model.eval()(x).topk(5).indices == labels.unsqueeze(1)).any(1).float()
    assert 100 * hits.mean().item() == pytest.approx(top5[best])


def test_a_plateau_is_counted_as_keras_does() -> None:
    plateau = Plateau("plateau-top1", 5)
    accuracies = [10.0, 20.0, *[19.0] * 4, 20.001, *[20.0] * 9, 15.0]
    factors, stops = [], []
    for accuracy in accuracies:
        stops.append(plateau.judge(accuracy)[1])
        factors.append(plateau.factor)
    # 20.001 is no better for the rate, by less than 1e-4 of all images, but it is for the end.
    assert factors == pytest.approx([1.0] * 6 + [0.1] * 5 + [0.01] * 5 + [0.001])
    assert stops == [False] * 16 + [True]


def test_a_plateau_cuts_the_rate_and_ends_the_run(
    tmp_path: Path, steps: list[list[float]]
) -> None:
    chosen = settings("bn", lr=1e-9, epochs=9, warmup=1 / 9, schedule="plateau-top1", patience=2)
    record = train(chosen, source(), tmp_path).record
    assert (record["outcome"], record["epochs"], record["best_epoch"]) == ("stopped early", 5, 4)
    rates = [rate / 1e-9 for rate, *_ in steps]
    assert rates == pytest.approx([1 / 3, 2 / 3, 1] + [1.0] * 6 + [0.1] * 6)


def assert_diverged(outcome: Outcome, epochs: int) -> None:
    record = outcome.record
    assert record["outcome"] == "diverged" and record["epochs"] == epochs
    assert record["best_epoch"] == -1
    assert all(np.isnan(record[name]) for name in ("top1", "top5", "train_top1", "val_loss"))
    assert {len(curve) for curve in outcome.curves.values()} == {epochs}


@pytest.mark.parametrize("method", ["sp", "gmp"])
def test_a_huge_rate_ends_as_diverged(method: str, tmp_path: Path) -> None:
    chosen = settings(method, lr=1e30)
    assert_diverged(train(chosen, source(), tmp_path), 0)
    assert_diverged(train(chosen, source(), tmp_path), 0)  # known from its checkpoint
    assert not (tmp_path / run_checkpoints.WEIGHTS).exists()


def test_divergence_is_noticed_within_an_epoch(
    tmp_path: Path, steps: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(network_training, "LOOK_EVERY", 4)
    assert_diverged(train(settings("sp", lr=1e30), source(10 * BATCH), tmp_path), 0)
    assert len(steps) == 4


def test_a_loss_far_above_guessing_is_divergence_after_the_first_epoch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(network_training, "HOPELESS", 0.01)
    assert_diverged(train(settings("sp"), source(), tmp_path), 1)


def test_a_validation_loss_that_is_not_finite_is_divergence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    evaluate = Training.evaluate

    def broken(self: Training, batches: Any) -> Any:
        self.model.output.bias.data.fill_(float("nan"))
        return evaluate(self, batches)

    monkeypatch.setattr(Training, "evaluate", broken)
    assert_diverged(train(settings("sp"), source(), tmp_path), 0)


def test_leaves_random_numbers_and_switches_as_they_were(tmp_path: Path) -> None:
    random = torch.get_rng_state()
    train(settings(epochs=1, deterministic=True), source(), tmp_path)
    assert torch.equal(torch.get_rng_state(), random)
    assert not torch.are_deterministic_algorithms_enabled()
    assert not torch.backends.cudnn.benchmark


@pytest.mark.parametrize(
    ("changes", "said"),
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
def test_mistaken_settings_say_so(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        settings(**changes)


def test_another_precision_than_accelerates_is_refused(tmp_path: Path) -> None:
    accelerator = processes.make_accelerator("fp32")
    with pytest.raises(ValueError, match="precision 'bf16' needs"):
        processes.check_processes(accelerator, "bf16", batch_size=4)


@pytest.mark.compile
@pytest.mark.parametrize(("precision", "tolerance"), [("fp32", 1e-4), ("bf16", 1e-2)])
def test_compiled_training_is_close(precision: str, tolerance: float, tmp_path: Path) -> None:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    for compiled in (False, True):
        chosen = settings("gmp+imn", epochs=1, compile=compiled, precision=precision)
        train(chosen, source(), tmp_path / str(compiled))
    assert (
        torch._dynamo.utils.counters["frames"]["ok"]
        and not torch._dynamo.utils.counters["graph_break"]
    )
    eager, made = weights(tmp_path / "False"), weights(tmp_path / "True")
    assert list(eager) == list(made)
    for name, value in eager.items():
        torch.testing.assert_close(made[name], value, atol=tolerance, rtol=1e-3, msg=name)


@pytest.mark.parametrize(
    ("name", "epochs", "steps"),
    [("steps", 90, 90), ("steps", 18, 18), ("linear", 10, 40), ("cosine", 10, 40)],
)
def test_schedules_are_torchs(name: str, epochs: int, steps: int) -> None:
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
    schedulers, thirds = torch.optim.lr_scheduler, [epochs // 3, 2 * epochs // 3, 8 * epochs // 9]
    theirs = {
        "steps": lambda: schedulers.MultiStepLR(optimizer, thirds),
        "linear": lambda: schedulers.LinearLR(optimizer, 1.0, 0.0, total_iters=steps),
        "cosine": lambda: schedulers.CosineAnnealingLR(optimizer, steps),
    }[name]()
    for step in range(steps):
        factor = find_epoch_factor(name, epochs, 0.0, epochs * step / steps)
        expected = theirs.get_last_lr()[0]
        assert factor == pytest.approx(expected, rel=1e-12, abs=0 if name == "steps" else 1e-9)
        optimizer.step()
        theirs.step()
