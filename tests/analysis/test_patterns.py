"""Activation patterns: bits are numpy's, changes are counted as one would by hand."""

from collections import Counter
from collections.abc import Callable
from dataclasses import make_dataclass

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from function_model import FunctionModel
from torch import Tensor, nn
from tracked_networks import record

import geoparam as gp
from geoparam.analysis import SReLU
from geoparam.analysis.max_pool import MaxPool
from geoparam.analysis.patterns import Pattern, pack, patterns
from geoparam.trace import trace

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def rows(bits: Tensor) -> np.ndarray:
    return np.packbits(bits.flatten(1).numpy(), axis=1)


def unpacked(packed: Tensor) -> np.ndarray:
    return np.unpackbits(packed.cpu().numpy(), axis=1)


def random_bits(n: int, bits: int, device: str = "cpu") -> Tensor:
    return torch.rand(n, bits, device=device) > 0.5


def pattern(bits: Tensor) -> Pattern:
    return Pattern(pack(bits), bits.shape[1])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("bits", [1, 8, 9, 1000])
def test_packed_bits_are_those_of_numpy(bits: int, device: str) -> None:
    given = random_bits(5, bits, device)
    packed = pack(given)
    assert packed.device == given.device
    assert np.array_equal(packed.cpu().numpy(), rows(given.cpu()))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("bits", [3, 777])
def test_hamming_counts_the_bits_that_differ(bits: int, device: str) -> None:
    a, b = random_bits(20, bits, device), random_bits(20, bits, device)
    b[::3] = a[::3]
    assert torch.equal(pattern(a).hamming(pattern(b)), (a != b).sum(dim=1))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("bits", [2, 33, 2000])
def test_distinct_rows_are_counted_as_by_a_set(bits: int, device: str) -> None:
    given = random_bits(40, bits, device)[torch.randint(40, (300,))]
    assert pattern(given).distinct() == len({tuple(row) for row in given.tolist()})


X = torch.linspace(-2, 2, 6 * 4).reshape(6, 4).sin()
IMAGES = torch.linspace(-3, 3, 3 * 2 * 5 * 5).reshape(3, 2, 5, 5).cos()


def with_other_calls(m: nn.Module, x: Tensor) -> Tensor:
    """Call what leaves no step: shapes, constants, modules that pass their input on."""
    scale = torch.ones(x.size(0), 1) * m.norm.running_mean.abs().max()
    x = m.a(x.contiguous())
    x = m.norm(m.identity(x + torch.zeros_like(x)))
    if x.dim() == 2 and x.is_floating_point() and bool(m.norm.running_var.min() > 0):
        x = m.drop(x)
    return F.relu(x) * scale + x.size(1)


class ShiftedReLU(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return F.relu(x - 0.2)


ShiftedReLU.__name__ = "ReLU"


# A model whose first layer is "a", its inputs, and the bits of that layer, one tensor for each
# breakpoint and call.
Case = tuple[Callable[..., Tensor], dict[str, nn.Module], Tensor, Callable[..., list[Tensor]]]
SRELU = SReLU(5, lower=-0.1, upper=0.2)
nn.init.uniform_(SRELU.lower, -0.3, 0.0)
OUTSIDE = gp.GmPLinear(4, 7, activation=torch.relu)
nn.init.normal_(OUTSIDE.lam)
nn.init.constant_(OUTSIDE.r, -1.0)
NORM = nn.BatchNorm2d(3).eval()
nn.init.normal_(NORM.running_mean)
CASES: dict[str, Case] = {
    "linear": (lambda m, x: F.relu(m.a(x)), {"a": nn.Linear(4, 11)}, X, lambda m, x: [m.a(x) > 0]),
    "convolution": (
        lambda m, x: F.relu(m.norm(m.a(x))),
        {"a": nn.Conv2d(2, 3, 2), "norm": NORM},
        IMAGES,
        lambda m, x: [m.norm(m.a(x)) > 0],
    ),
    "in place": (
        lambda m, x: m.b(m.a(x).relu_()),
        {"a": nn.Linear(4, 9), "b": nn.Linear(9, 1)},
        X,
        lambda m, x: [m.a(x) > 0],
    ),
    "clamp": (
        lambda m, x: m.a(x).clamp(min=0), {"a": nn.Linear(4, 9)}, X, lambda m, x: [m.a(x) > 0]
    ),
    "other calls": (
        with_other_calls,
        {"a": nn.Linear(4, 5), "norm": nn.BatchNorm1d(5), "identity": nn.Identity(),
         "drop": nn.Dropout()},
        X,
        lambda m, x: [m.norm(m.a(x)) > 0],
    ),
    "two breakpoints": (
        lambda m, x: m.act(m.a(x)),
        {"a": nn.Linear(4, 5), "act": SRELU},
        X,
        lambda m, x: [m.a(x) > m.act.lower, m.a(x) > m.act.upper],
    ),
    "its own activation": (lambda m, x: m.a(x), {"a": OUTSIDE}, X, lambda m, x: [m.a(x) < 0]),
    "called twice": (
        lambda m, x: F.relu(m.a(F.relu(m.a(x)))),
        {"a": nn.Linear(4, 4)},
        X,
        lambda m, x: [m.a(x) > 0, m.a(m.a(x).relu()) > 0],
    ),
    "the name of another": (
        lambda m, x: m.act(m.a(x)),
        {"a": nn.Linear(4, 5), "act": ShiftedReLU()},
        X,
        lambda m, x: [m.a(x) > 0.2],
    ),
    "from above": (
        lambda m, x: m.a(x).clamp_max(0.1), {"a": nn.Linear(4, 9)}, X, lambda m, x: [m.a(x) > 0.1]
    ),
}  # fmt: skip


@pytest.mark.parametrize(("forward", "members", "x", "bits"), CASES.values(), ids=CASES)
def test_a_layer_has_one_bit_for_each_breakpoint_of_each_unit_and_position(
    forward: Callable, members: dict[str, nn.Module], x: Tensor, bits: Callable
) -> None:
    model = FunctionModel(forward, **members).eval()
    found, expected = patterns(model, x), bits(model, x)
    assert list(found) == ["a"] and len(found["a"]) == len(x)
    assert found["a"].bits == sum(each[0].numel() for each in expected)
    packed = np.concatenate([rows(each) for each in expected], axis=1)
    assert np.array_equal(found["a"].packed.numpy(), packed)


def test_a_first_argument_of_one_number_is_not_the_examples() -> None:
    model = FunctionModel(lambda m, t, x: F.relu(m.a(x) + t), a=nn.Linear(4, 9))
    for t in (torch.tensor(0.3), torch.tensor([0.3])):
        assert len(patterns(model, (t, X))["a"]) == len(X)


def test_inputs_in_a_narrow_range_or_given_twice_have_patterns() -> None:
    bounded = lambda m, x, y: F.relu(m.a(x + torch.bernoulli(y)))  # noqa: E731
    twice = lambda m, x, y: F.relu(m.a(x + y))  # noqa: E731
    for function in (bounded, twice):
        same = X.abs()
        model = FunctionModel(function, a=nn.Linear(4, 3))
        assert len(patterns(model, (same, same))["a"]) == len(X)


Batch = make_dataclass("Batch", ["x"], slots=True)


@pytest.mark.parametrize("pack", [Batch, lambda x: Counter(x=x)])
def test_a_batch_in_an_object_is_left_as_it_is(pack: Callable) -> None:
    read = lambda batch: batch.x if isinstance(batch, Batch) else batch["x"]  # noqa: E731
    model = FunctionModel(lambda m, batch: F.relu(m.a(read(batch))), a=nn.Linear(4, 3))
    found = patterns(model, (batch := pack(X.clone()),))
    assert torch.equal(read(batch), X) and np.array_equal(found["a"].packed, rows(model.a(X) > 0))


@pytest.mark.parametrize(
    "move",
    [
        lambda x: x[:4],
        lambda x: x.view(-1, 2).repeat(1, 2),
        lambda x: torch.cat([x, -x]),
        lambda x: x.view(6, 1, 4).transpose(0, 1),
    ],
    ids=["a part", "windows", "two batches", "time first"],
)
def test_an_activation_without_the_examples_in_front_has_no_bits(move: Callable) -> None:
    members = {"a": nn.Linear(4, 3), "b": nn.Linear(3, 1), "c": nn.Linear(4, 2)}
    model = FunctionModel(lambda m, x: m.b(F.relu(m.a(x))) + F.relu(m.c(move(x))).sum(), **members)
    with pytest.warns(UserWarning, match="no bits of c: the first dimension"):
        assert list(patterns(model, X)) == ["a"]
    alone = FunctionModel(lambda m, x: F.relu(m.c(move(x))), c=nn.Linear(4, 2))
    with pytest.raises(ValueError, match="no bits of c: .* it is not 6"):
        patterns(alone, X)


def test_smooth_layers_are_left_out() -> None:
    smooth = [nn.Linear(4, 4), nn.GELU()]
    assert list(patterns(nn.Sequential(*smooth, nn.Linear(4, 6), nn.ReLU()), X)) == ["2"]
    with pytest.raises(ValueError, match="activation with breakpoints"):
        patterns(nn.Sequential(*smooth), X)


def residual() -> FunctionModel:
    modules = {name: nn.Linear(4, 4) for name in ("a", "b", "short")}
    return FunctionModel(lambda m, x: F.relu(m.b(F.relu(m.a(x))) + m.short(x)), **modules)


def test_layers_before_one_sum_count_once_in_the_network() -> None:
    model = residual()
    found = patterns(model, X)
    inner = model.a(X)
    outer = model.b(inner.relu()) + model.short(X)
    assert list(found) == ["a", "b", "short"]
    assert torch.equal(found["b"].packed, found["short"].packed)
    assert np.array_equal(found["b"].packed.numpy(), rows(outer > 0))
    assert found.network.bits == 8
    expected = np.concatenate([rows(inner > 0), rows(outer > 0)], axis=1)
    assert np.array_equal(found.network.packed.numpy(), expected)


@pytest.mark.parametrize("device", DEVICES)
def test_changes_are_those_of_the_bits(device: str) -> None:
    model, x = residual().to(device), torch.randn(50, 4, device=device).round()
    before = patterns(model, x)
    for parameter in model.parameters():
        nn.init.normal_(parameter.data)
    after = patterns(model, x)
    layers, network = after.changes(before)
    whole = {"network": (after.network, before.network, network)}
    for new, old, change in [(after[k], before[k], layers[k]) for k in after] + [*whole.values()]:
        differ = unpacked(new.packed) != unpacked(old.packed)
        assert change.share.item() == pytest.approx(differ.sum() / (50 * new.bits))
        assert change.points == differ.any(axis=1).sum()
        assert change.regions == len({tuple(row) for row in new.packed.tolist()})
    assert after.distinct() == network.regions


def test_patterns_of_other_layers_or_shapes_are_not_compared() -> None:
    model = residual()
    with pytest.raises(ValueError, match="same points and units"):
        pattern(random_bits(3, 8)).hamming(pattern(random_bits(3, 16)))
    with pytest.raises(ValueError, match="same layers"):
        patterns(model, X).changes(patterns(model, X, layers=["a"]))


@pytest.mark.gpu
def test_numbers_stay_on_the_gpu() -> None:
    model, x = residual().cuda(), torch.randn(64, 4, device="cuda")
    before, after = patterns(model, x), patterns(model, x + 1)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        change = after.changes(before).network
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert change.points > 0


POOLS = {
    "halves": nn.MaxPool2d(2),
    "overlapping": nn.MaxPool2d(3, 2, padding=1),
    "uneven": nn.MaxPool2d((2, 3), (1, 2), padding=(0, 1), dilation=(2, 1), ceil_mode=True),
    "adaptive": nn.AdaptiveMaxPool2d((2, 3)),
    "function": lambda x: torch.max_pool2d(x, 2, ceil_mode=True),
}


@pytest.mark.parametrize("pool", POOLS.values(), ids=POOLS)
def test_a_pool_has_one_winner_in_each_window(pool: Callable) -> None:
    layer, seen = nn.Conv2d(2, 3, 2, padding=1), torch.randn(4, 2, 5, 7)
    model = FunctionModel(lambda m, x: pool(m.a(x)), a=layer)
    node = next(node for node in trace(model, seen).nodes if node.kind == "max")
    z = layer(seen).detach().requires_grad_()
    out = pool(z)
    each, wins = MaxPool(node).windows(z), MaxPool(node)(z)
    assert torch.equal(each.amax(dim=-1), out) and (wins.sum(dim=-1) == 1).all()
    # the winner's number is handed through the same windows, and says which input it is
    numbers = torch.arange(z[0, 0].numel()).view(1, 1, *z.shape[2:]).expand_as(z).double()
    winner = MaxPool(node).windows(numbers)[wins].view(out.shape)
    (gradient,) = torch.autograd.grad(out[0, 1, 0, -1], z)
    assert gradient[0, 1].flatten().argmax() == winner[0, 1, 0, -1]
    found = patterns(model, seen)
    assert list(found) == ["a"] and found["a"].bits == wins[0].numel()
    assert np.array_equal(found["a"].packed.numpy(), rows(wins))


def pooled() -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(2, 3, 2), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(3, 4, 1), nn.MaxPool2d(2, 1),
        nn.LeakyReLU(), nn.Flatten(), nn.Linear(4, 2),
    )  # fmt: skip


def test_pools_belong_to_the_layer_before_them() -> None:
    found = patterns(pooled(), IMAGES)
    relu, first = 3 * 4 * 4, 4 * 3 * 2 * 2
    assert {name: found[name].bits for name in found} == {"0": relu + first, "3": 4 * 4 + 4}
    assert found.network.bits == relu + first + 20
    assert list(patterns(pooled(), IMAGES, layers=["3"])) == ["3"]
    alone = FunctionModel(lambda m, x: m.a(F.max_pool1d(x, 2)).relu(), a=nn.Linear(2, 3))
    assert {name: p.bits for name, p in patterns(alone, X).items()} == {"max_pool1d": 4, "a": 3}


def test_a_tracker_counts_the_switches() -> None:
    model = nn.Sequential(nn.Conv2d(2, 3, 2), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(12, 1))
    tracker = gp.BoundaryTracker(model, probe=IMAGES)
    before = patterns(model, IMAGES)
    nn.init.normal_(model[0].weight)
    tracker.step()
    change = patterns(model, IMAGES).changes(before)
    assert tracker.history["0"]["pattern_change"][0] == change.network.share > 0
    assert tracker.history["0"]["regions"][0] == change.network.regions


def test_inputs_may_be_words() -> None:
    def count(model: nn.Module, words: list[str]) -> Tensor:
        return F.relu(model.layer(torch.tensor([[len(w), w.count("a")] for w in words]).float()))

    model = FunctionModel(count, layer=nn.Linear(2, 3))
    words = ["abba", "a", "banana"]
    assert len(patterns(model, {"words": words})["layer"].packed) == len(words)


def wide() -> dict[str, nn.Module]:
    torch.manual_seed(3)
    return {"a": nn.Linear(2, 8), "b": nn.Linear(8, 5), "c": nn.ConvTranspose1d(1, 2, 3)}


@pytest.mark.parametrize(
    "forward",
    [
        lambda m, x, act: m.b(act(m.a(x).view(-1, 2, 4)).flatten(1)),
        lambda m, x, act: m.b(act(z := m.a(x)) + z),
        lambda m, x, act: m.b(act(F.avg_pool1d(torch.cat([m.a(x), 2 * m.a(x)], dim=1), 2))),
        lambda m, x, act: act(torch.cat([m.a(x), m.a(x) - 1], dim=1)),
        lambda m, x, act: act(m.c(x[:, None])),
        lambda m, x, act: act(x @ m.a.weight.t()[:, :3]),
    ],
)
def test_every_relu_counts_wherever_it_is(forward: Callable) -> None:
    """The second computation collects the bits in the forward itself."""
    x = torch.randn(200, 2, generator=torch.Generator().manual_seed(0))
    bits: list[Tensor] = []

    def act(z: Tensor) -> Tensor:
        bits.append((z > 0).flatten(1))
        return z.relu()

    model = FunctionModel(lambda m, x: forward(m, x, torch.relu), **wide())
    forward(model, x, act)
    expected = torch.cat(bits, dim=1)
    found, regions = patterns(model, x), len(expected.unique(dim=0))
    assert found.distinct() == regions > 1 and found.network.bits == expected.shape[1]
    assert record(model, probe=x).network["regions"][0] == regions


def test_a_dead_unit_after_a_sum_counts_once_in_the_network() -> None:
    model = FunctionModel(
        lambda m, x: (m.a(x) + m.b(x)).relu(), a=nn.Linear(2, 3), b=nn.Linear(2, 3)
    )
    model.a.bias.data[0] = -99.0
    history = record(model, probe=torch.rand(9, 2))
    dead = [history[name]["dead"][0] for name in "ab"]
    assert dead[0] == dead[1] == history.network["dead"][0] >= 1


def test_chosen_layers_bring_no_others_and_own_activations_hide_none() -> None:
    found = patterns(residual(), X, layers=["b"])
    assert list(found) == ["b"] and found.network.bits == 4
    model = nn.Sequential(nn.Conv1d(1, 4, 3), nn.ReLU(), nn.ConvTranspose1d(4, 2, 3), nn.ReLU())
    model.append(nn.Conv1d(2, 2, 1))
    assert set(patterns(model, torch.randn(8, 1, 6), layers=["0"])) == {"0"}
    own = gp.GmPLinear(3, 4, activation=torch.relu)
    twice = patterns(nn.Sequential(own, nn.BatchNorm1d(4), nn.ReLU()), torch.randn(8, 3))
    assert twice.network.bits == 8
