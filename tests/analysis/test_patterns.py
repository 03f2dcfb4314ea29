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
from geoparam.analysis import SReLU, patterns
from geoparam.analysis.max_pool import MaxPool
from geoparam.analysis.patterns import Pattern, pack
from geoparam.model.trace import trace

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]

X = torch.linspace(-2, 2, 6 * 4).reshape(6, 4).sin()
IMAGES = torch.linspace(-3, 3, 3 * 2 * 5 * 5).reshape(3, 2, 5, 5).cos()


def packbits(bits: Tensor) -> np.ndarray:
    return np.packbits(bits.flatten(1).numpy(), axis=1)


def unpack(packed: Tensor) -> np.ndarray:
    return np.unpackbits(packed.cpu().numpy(), axis=1)


def draw_bits(n: int, bits: int, device: str = "cpu") -> Tensor:
    return torch.rand(n, bits, device=device) > 0.5


def make_pattern(bits: Tensor) -> Pattern:
    return Pattern(pack(bits), bits.shape[1])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("bits", [1, 8, 9, 1000])
def test_packed_bits_are_those_of_numpy(bits: int, device: str) -> None:
    drawn = draw_bits(5, bits, device)
    packed = pack(drawn)
    assert packed.device == drawn.device
    assert np.array_equal(packed.cpu().numpy(), packbits(drawn.cpu()))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("bits", [3, 777])
def test_hamming_counts_the_bits_that_differ(bits: int, device: str) -> None:
    a = draw_bits(20, bits, device)
    b = draw_bits(20, bits, device)
    b[::3] = a[::3]
    counts = make_pattern(a).hamming(make_pattern(b))
    assert torch.equal(counts, (a != b).sum(dim=1))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("bits", [2, 33, 2000])
def test_distinct_rows_are_counted_as_by_a_set(bits: int, device: str) -> None:
    drawn = draw_bits(40, bits, device)[torch.randint(40, (300,))]
    expected = {tuple(row) for row in drawn.tolist()}
    assert make_pattern(drawn).distinct() == len(expected)


def assert_bits(model: nn.Module, x: Tensor, expected: list[Tensor]) -> None:
    """Check the bits of the only layer with a pattern: one tensor for each breakpoint and call."""
    found = patterns(model, x)
    (layer,) = found
    assert len(found[layer]) == len(x)
    assert found[layer].bits == sum(bits[0].numel() for bits in expected)
    packed = np.concatenate([packbits(bits) for bits in expected], axis=1)
    assert np.array_equal(found[layer].packed.numpy(), packed)


def test_a_linear_layer_has_one_bit_for_each_unit() -> None:
    layer = nn.Linear(4, 11)
    assert_bits(nn.Sequential(layer, nn.ReLU()), X, [layer(X) > 0])


def test_a_convolution_has_one_bit_for_each_unit_and_position_behind_its_norm() -> None:
    norm = nn.BatchNorm2d(3).eval()
    nn.init.normal_(norm.running_mean)
    model = nn.Sequential(nn.Conv2d(2, 3, 2), norm, nn.ReLU())
    assert_bits(model, IMAGES, [model[:2](IMAGES) > 0])


def test_an_activation_in_place_is_seen_before_it_overwrites() -> None:
    layer = nn.Linear(4, 9)
    model = FunctionModel(lambda m, x: m.b(m.a(x).relu_()), a=layer, b=nn.Linear(9, 1))
    assert_bits(model, X, [layer(X) > 0])


@pytest.mark.parametrize(
    ("activation", "point"),
    [
        (lambda z: z.clamp(min=0), 0.0),
        (lambda z: z.clamp_max(0.1), 0.1),
        (lambda z: F.threshold(z, 0.2, 0.0), 0.2),
    ],
    ids=["from below", "from above", "threshold"],
)
def test_a_limit_is_a_breakpoint(activation: Callable, point: float) -> None:
    layer = nn.Linear(4, 9)
    model = FunctionModel(lambda m, x: activation(m.a(x)), a=layer)
    assert_bits(model, X, [layer(X) > point])


def test_two_breakpoints_have_two_bits() -> None:
    layer, activation = nn.Linear(4, 5), SReLU(5, lower=-0.1, upper=0.2)
    nn.init.uniform_(activation.lower, -0.3, 0.0)
    z = layer(X)
    model = nn.Sequential(layer, activation)
    assert_bits(model, X, [z > activation.lower, z > activation.upper])


def test_a_layer_that_applies_its_activation_itself_has_bits() -> None:
    layer = gp.GmPLinear(4, 7, activation=torch.relu)
    nn.init.normal_(layer.lam)
    nn.init.constant_(layer.r, -1.0)  # so that what is active is negative
    assert_bits(nn.Sequential(layer), X, [layer(X) < 0])


def test_a_layer_that_is_called_twice_has_the_bits_of_both_calls() -> None:
    layer = nn.Linear(4, 4)
    model = FunctionModel(lambda m, x: F.relu(m.a(F.relu(m.a(x)))), a=layer)
    assert_bits(model, X, [layer(X) > 0, layer(layer(X).relu()) > 0])


def test_calls_that_leave_no_step_are_not_counted() -> None:
    """Shapes, constants, modules that pass their input on."""

    def forward(m: nn.Module, x: Tensor) -> Tensor:
        scale = torch.ones(x.size(0), 1) * m.norm.running_mean.abs().max()
        x = m.a(x.contiguous())
        x = m.norm(m.identity(x + torch.zeros_like(x)))
        if x.dim() == 2 and x.is_floating_point() and bool(m.norm.running_var.min() > 0):
            x = m.drop(x)
        return F.relu(x) * scale + x.size(1)

    members = {"a": nn.Linear(4, 5), "norm": nn.BatchNorm1d(5), "identity": nn.Identity()}
    model = FunctionModel(forward, **members, drop=nn.Dropout()).eval()
    assert_bits(model, X, [model.norm(model.a(X)) > 0])


def test_a_module_is_known_by_its_code_and_not_by_its_name() -> None:
    class ShiftedReLU(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return F.relu(x - 0.2)

    ShiftedReLU.__name__ = "ReLU"
    layer = nn.Linear(4, 5)
    assert_bits(nn.Sequential(layer, ShiftedReLU()), X, [layer(X) > 0.2])


def test_a_first_argument_of_one_number_is_not_the_examples() -> None:
    model = FunctionModel(lambda m, t, x: F.relu(m.a(x) + t), a=nn.Linear(4, 9))
    for t in (torch.tensor(0.3), torch.tensor([0.3])):
        assert len(patterns(model, (t, X))["a"]) == len(X)


def test_one_input_may_be_given_twice() -> None:
    model = FunctionModel(lambda m, x, y: F.relu(m.a(x + y)), a=nn.Linear(4, 3))
    assert len(patterns(model, (X, X))["a"]) == len(X)


def test_inputs_may_be_words() -> None:
    def count(model: nn.Module, words: list[str]) -> Tensor:
        numbers = [[len(word), word.count("a")] for word in words]
        return F.relu(model.layer(torch.tensor(numbers).float()))

    model = FunctionModel(count, layer=nn.Linear(2, 3))
    words = ["abba", "a", "banana"]
    assert len(patterns(model, {"words": words})["layer"].packed) == len(words)


Batch = make_dataclass("Batch", ["x"], slots=True)


def test_a_batch_in_a_dataclass_is_left_as_it_is() -> None:
    model = FunctionModel(lambda m, batch: F.relu(m.a(batch.x.mul_(2))), a=nn.Linear(4, 3))
    batch = Batch(X.clone())
    found = patterns(model, (batch,))
    assert torch.equal(batch.x, X)
    assert np.array_equal(found["a"].packed, packbits(model.a(2 * X) > 0))


def test_a_batch_in_a_mapping_of_its_own_class_is_left_as_it_is() -> None:
    model = FunctionModel(lambda m, batch: F.relu(m.a(batch["x"].mul_(2))), a=nn.Linear(4, 3))
    batch = Counter(x=X.clone())
    found = patterns(model, (batch,))
    assert torch.equal(batch["x"], X)
    assert np.array_equal(found["a"].packed, packbits(model.a(2 * X) > 0))


MOVES = {
    "a part": lambda x: x[:4],
    "windows": lambda x: x.view(-1, 2).repeat(1, 2),
    "two batches": lambda x: torch.cat([x, -x]),
    "time first": lambda x: x.view(6, 1, 4).transpose(0, 1),
}


@pytest.mark.parametrize("move", MOVES.values(), ids=MOVES)
def test_an_activation_without_the_examples_in_front_has_no_bits(move: Callable) -> None:
    def forward(m: nn.Module, x: Tensor) -> Tensor:
        return m.b(F.relu(m.a(x))) + F.relu(m.c(move(x))).sum()

    members = {"a": nn.Linear(4, 3), "b": nn.Linear(3, 1), "c": nn.Linear(4, 2)}
    with pytest.warns(UserWarning, match="no bits of c: the first dimension"):
        found = patterns(FunctionModel(forward, **members), X)
    assert list(found) == ["a"]

    alone = FunctionModel(lambda m, x: F.relu(m.c(move(x))), c=nn.Linear(4, 2))
    with pytest.raises(ValueError, match="no bits of c: .* it is not 6"):
        patterns(alone, X)


def test_smooth_layers_are_left_out() -> None:
    smooth = [nn.Linear(4, 4), nn.GELU()]
    model = nn.Sequential(*smooth, nn.Linear(4, 6), nn.ReLU())
    assert list(patterns(model, X)) == ["2"]
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
    assert np.array_equal(found["b"].packed.numpy(), packbits(outer > 0))
    assert found.network.bits == 8
    expected = np.concatenate([packbits(inner > 0), packbits(outer > 0)], axis=1)
    assert np.array_equal(found.network.packed.numpy(), expected)


@pytest.mark.parametrize("device", DEVICES)
def test_changes_are_those_of_the_bits(device: str) -> None:
    model = residual().to(device)
    x = torch.randn(50, 4, device=device).round()
    before = patterns(model, x)
    for parameter in model.parameters():
        nn.init.normal_(parameter.data)
    after = patterns(model, x)
    layers, network = after.changes(before)

    triples = [(after[name], before[name], layers[name]) for name in after]
    triples.append((after.network, before.network, network))
    for new, old, change in triples:
        differ = unpack(new.packed) != unpack(old.packed)
        assert change.share.item() == pytest.approx(differ.sum() / (50 * new.bits))
        assert change.points == differ.any(axis=1).sum()
        assert change.regions == len({tuple(row) for row in new.packed.tolist()})
    assert after.distinct() == network.regions


def test_patterns_of_other_layers_or_shapes_are_not_compared() -> None:
    with pytest.raises(ValueError, match="same points and units"):
        make_pattern(draw_bits(3, 8)).hamming(make_pattern(draw_bits(3, 16)))
    model = residual()
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
    "by keyword": lambda x: torch.max_pool2d(input=x, kernel_size=2),
}


@pytest.mark.parametrize("pool", POOLS.values(), ids=POOLS)
def test_a_pool_has_one_winner_in_each_window(pool: Callable) -> None:
    layer = nn.Conv2d(2, 3, 2, padding=1)
    x = torch.randn(4, 2, 5, 7)
    model = FunctionModel(lambda m, x: pool(m.a(x)), a=layer)
    step = next(node for node in trace(model, x).nodes if node.kind == "max")
    z = layer(x).detach().requires_grad_()
    out, windows = pool(z), MaxPool(step)
    wins = windows(z)
    assert torch.equal(windows.windows(z).amax(dim=-1), out)
    assert (wins.sum(dim=-1) == 1).all()

    # The winner's number is handed through the same windows, and says which input it is.
    numbers = torch.arange(z[0, 0].numel()).view(z.shape[2:]).expand_as(z).double()
    winner = windows.windows(numbers)[wins].view(out.shape)
    (gradient,) = torch.autograd.grad(out[0, 1, 0, -1], z)
    assert gradient[0, 1].flatten().argmax() == winner[0, 1, 0, -1]

    found = patterns(model, x)
    assert list(found) == ["a"]
    assert np.array_equal(found["a"].packed.numpy(), packbits(wins))


def pooled() -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(2, 3, 2),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(3, 4, 1),
        nn.MaxPool2d(2, 1),
        nn.LeakyReLU(),
        nn.Flatten(),
        nn.Linear(4, 2),
    )


def test_pools_belong_to_the_layer_before_them() -> None:
    found = patterns(pooled(), IMAGES)
    relu, first_pool = 3 * 4 * 4, 4 * 3 * 2 * 2
    last = 4 * 4 + 4
    assert {name: found[name].bits for name in found} == {"0": relu + first_pool, "3": last}
    assert found.network.bits == relu + first_pool + last
    assert list(patterns(pooled(), IMAGES, layers=["3"])) == ["3"]


def test_a_pool_before_all_layers_has_the_name_of_its_function() -> None:
    model = FunctionModel(lambda m, x: m.a(F.max_pool1d(x, 2)).relu(), a=nn.Linear(2, 3))
    bits = {name: pattern.bits for name, pattern in patterns(model, X).items()}
    assert bits == {"max_pool1d": 4, "a": 3}


def test_a_tracker_counts_the_switches() -> None:
    model = nn.Sequential(nn.Conv2d(2, 3, 2), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(12, 1))
    tracker = gp.BoundaryTracker(model, probe=IMAGES)
    before = patterns(model, IMAGES)
    nn.init.normal_(model[0].weight)
    tracker.step()
    change = patterns(model, IMAGES).changes(before).network
    history = tracker.history["0"]
    assert history["pattern_change"][0] == change.share > 0
    assert history["regions"][0] == change.regions


EVERYWHERE = {
    "heads": lambda m, x, act: m.b(act(m.a(x).view(-1, 2, 4)).flatten(1)),
    "used twice": lambda m, x, act: m.b(act(z := m.a(x)) + z),
    "average": lambda m, x, act: m.b(act(F.avg_pool1d(torch.cat([m.a(x), 2 * m.a(x)], 1), 2))),
    "concatenation": lambda m, x, act: act(torch.cat([m.a(x), m.a(x) - 1], dim=1)),
    "transposed convolution": lambda m, x, act: act(m.c(x[:, None])),
    "part of a weight": lambda m, x, act: act(x @ m.a.weight.t()[:, :3]),
}


@pytest.mark.parametrize("forward", EVERYWHERE.values(), ids=EVERYWHERE)
def test_every_relu_counts_wherever_it_is(forward: Callable) -> None:
    """The second computation collects the bits in the forward itself."""
    torch.manual_seed(3)
    members = {"a": nn.Linear(2, 8), "b": nn.Linear(8, 5), "c": nn.ConvTranspose1d(1, 2, 3)}
    model = FunctionModel(lambda m, x: forward(m, x, torch.relu), **members)
    x = torch.randn(200, 2)
    bits: list[Tensor] = []

    def collect_and_activate(z: Tensor) -> Tensor:
        bits.append((z > 0).flatten(1))
        return z.relu()

    forward(model, x, collect_and_activate)
    expected = torch.cat(bits, dim=1)
    found, regions = patterns(model, x), len(expected.unique(dim=0))
    assert found.network.bits == expected.shape[1]
    assert found.distinct() == regions > 1
    assert record(model, probe=x).network["regions"][0] == regions


def test_a_dead_unit_after_a_sum_counts_once_in_the_network() -> None:
    members = {"a": nn.Linear(2, 3), "b": nn.Linear(2, 3)}
    model = FunctionModel(lambda m, x: (m.a(x) + m.b(x)).relu(), **members)
    model.a.bias.data[0] = -99.0
    history = record(model, probe=torch.rand(9, 2))
    dead = [history[name]["dead"][0] for name in "ab"]
    assert dead[0] == dead[1] == history.network["dead"][0] >= 1


def test_chosen_layers_bring_no_others() -> None:
    found = patterns(residual(), X, layers=["b"])
    assert list(found) == ["b"] and found.network.bits == 4
    layers = [nn.Conv1d(1, 4, 3), nn.ReLU(), nn.ConvTranspose1d(4, 2, 3), nn.ReLU()]
    model = nn.Sequential(*layers, nn.Conv1d(2, 2, 1))
    assert list(patterns(model, torch.randn(8, 1, 6), layers=["0"])) == ["0"]


def test_an_activation_after_a_layer_with_its_own_counts_too() -> None:
    layer = gp.GmPLinear(3, 4, activation=torch.relu)
    model = nn.Sequential(layer, nn.BatchNorm1d(4), nn.ReLU())
    assert patterns(model, torch.randn(8, 3)).network.bits == 8
