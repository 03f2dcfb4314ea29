"""Activation patterns: bits are numpy's, changes are counted as one would by hand."""

from collections import Counter
from collections.abc import Callable
from dataclasses import make_dataclass
from typing import NamedTuple

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
from geoparam.analysis.patterns import Change, Pattern, pack
from geoparam.model.trace import trace

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]

X = torch.linspace(-2, 2, 6 * 4).reshape(6, 4).sin()
IMAGES = torch.linspace(-3, 3, 3 * 2 * 5 * 5).reshape(3, 2, 5, 5).cos()


def packbits(bits: Tensor) -> np.ndarray:
    """Return what numpy makes of the bits of each example."""
    return np.packbits(bits.flatten(1).cpu().numpy(), axis=1)


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
    assert np.array_equal(packed.cpu().numpy(), packbits(drawn))


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
    rows = draw_bits(40, bits, device)
    repeated = rows[torch.randint(40, (300,))]

    count = make_pattern(repeated).distinct()

    expected = {tuple(row) for row in repeated.tolist()}
    assert count == len(expected)


def assert_bits(model: nn.Module, x: Tensor, *expected: Tensor) -> None:
    """Check the bits of the only layer with a pattern: one tensor for each breakpoint and call."""
    found = patterns(model, x)

    assert len(found) == 1
    (pattern,) = found.values()
    assert len(pattern) == len(x)
    all_bits = torch.cat([bits.flatten(1) for bits in expected], dim=1)
    assert pattern.bits == all_bits.shape[1]
    packed = np.concatenate([packbits(bits) for bits in expected], axis=1)
    assert np.array_equal(pattern.packed.numpy(), packed)


def test_a_linear_layer_has_one_bit_for_each_unit() -> None:
    layer = nn.Linear(4, 11)
    model = nn.Sequential(layer, nn.ReLU())

    assert_bits(model, X, layer(X) > 0)


def test_a_convolution_has_one_bit_for_each_unit_and_position_behind_its_norm() -> None:
    norm = nn.BatchNorm2d(3).eval()
    nn.init.normal_(norm.running_mean)
    model = nn.Sequential(nn.Conv2d(2, 3, 2), norm, nn.ReLU())

    assert_bits(model, IMAGES, model[:2](IMAGES) > 0)


def test_an_activation_in_place_is_seen_before_it_overwrites() -> None:
    layer = nn.Linear(4, 9)
    model = FunctionModel(lambda m, x: m.b(m.a(x).relu_()), a=layer, b=nn.Linear(9, 1))

    assert_bits(model, X, layer(X) > 0)


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

    assert_bits(model, X, layer(X) > point)


def test_two_breakpoints_have_two_bits() -> None:
    layer = nn.Linear(4, 5)
    activation = SReLU(5, lower=-0.1, upper=0.2)
    nn.init.uniform_(activation.lower, -0.3, 0.0)
    model = nn.Sequential(layer, activation)

    z = layer(X)
    assert_bits(model, X, z > activation.lower, z > activation.upper)


def test_a_layer_that_applies_its_activation_itself_has_bits() -> None:
    layer = gp.GmPLinear(4, 7, activation=torch.relu)
    nn.init.normal_(layer.lam)
    nn.init.constant_(layer.r, -1.0)

    is_active = layer(X) < 0  # r is negative, and so are active units
    assert_bits(nn.Sequential(layer), X, is_active)


def test_a_layer_that_is_called_twice_has_the_bits_of_both_calls() -> None:
    def forward(m: nn.Module, x: Tensor) -> Tensor:
        hidden = F.relu(m.a(x))
        return F.relu(m.a(hidden))

    layer = nn.Linear(4, 4)
    model = FunctionModel(forward, a=layer)

    first = layer(X)
    second = layer(first.relu())
    assert_bits(model, X, first > 0, second > 0)


def test_shapes_constants_and_modules_that_pass_their_input_on_are_not_counted() -> None:
    def forward(m: nn.Module, x: Tensor) -> Tensor:
        scale = torch.ones(x.size(0), 1) * m.norm.running_mean.abs().max()
        x = m.a(x.contiguous())
        x = m.norm(m.identity(x + torch.zeros_like(x)))
        has_variance = bool(m.norm.running_var.min() > 0)
        if x.dim() == 2 and x.is_floating_point() and has_variance:
            x = m.drop(x)
        return F.relu(x) * scale + x.size(1)

    model = FunctionModel(
        forward,
        a=nn.Linear(4, 5),
        norm=nn.BatchNorm1d(5),
        identity=nn.Identity(),
        drop=nn.Dropout(),
    ).eval()

    assert_bits(model, X, model.norm(model.a(X)) > 0)


def test_a_module_is_known_by_its_code_and_not_by_its_name() -> None:
    class ShiftedReLU(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return F.relu(x - 0.2)

    ShiftedReLU.__name__ = "ReLU"
    layer = nn.Linear(4, 5)
    model = nn.Sequential(layer, ShiftedReLU())

    assert_bits(model, X, layer(X) > 0.2)


# What the examples are.


@pytest.mark.parametrize("shift", [torch.tensor(0.3), torch.tensor([0.3])], ids=["0d", "1d"])
def test_a_first_argument_of_one_number_is_not_the_examples(shift: Tensor) -> None:
    model = FunctionModel(lambda m, t, x: F.relu(m.a(x) + t), a=nn.Linear(4, 9))

    found = patterns(model, (shift, X))

    assert len(found["a"]) == len(X)


def test_one_input_may_be_given_twice() -> None:
    model = FunctionModel(lambda m, x, y: F.relu(m.a(x + y)), a=nn.Linear(4, 3))

    found = patterns(model, (X, X))

    assert len(found["a"]) == len(X)


def test_inputs_may_be_words() -> None:
    def describe(m: nn.Module, words: list[str]) -> Tensor:
        numbers = [[len(word), word.count("a")] for word in words]
        return F.relu(m.layer(torch.tensor(numbers).float()))

    model = FunctionModel(describe, layer=nn.Linear(2, 3))
    words = ["abba", "a", "banana"]

    found = patterns(model, {"words": words})

    assert len(found["layer"].packed) == len(words)


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


moves = pytest.mark.parametrize("move", MOVES.values(), ids=MOVES)


@moves
def test_an_activation_without_the_examples_in_front_has_no_bits(move: Callable) -> None:
    def forward(m: nn.Module, x: Tensor) -> Tensor:
        moved = F.relu(m.c(move(x)))
        return m.b(F.relu(m.a(x))) + moved.sum()

    model = FunctionModel(forward, a=nn.Linear(4, 3), b=nn.Linear(3, 1), c=nn.Linear(4, 2))

    with pytest.warns(UserWarning, match="no bits of c: the first dimension"):
        found = patterns(model, X)
    assert list(found) == ["a"]


@moves
def test_a_model_without_the_examples_in_front_is_refused(move: Callable) -> None:
    model = FunctionModel(lambda m, x: F.relu(m.c(move(x))), c=nn.Linear(4, 2))

    with pytest.raises(ValueError, match="no bits of c: .* it is not 6"):
        patterns(model, X)


def test_layers_with_smooth_activations_are_left_out() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.GELU(), nn.Linear(4, 6), nn.ReLU())

    assert list(patterns(model, X)) == ["2"]


def test_a_model_with_only_smooth_activations_is_refused() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.GELU())

    with pytest.raises(ValueError, match="activation with breakpoints"):
        patterns(model, X)


# The network's pattern, and changes.


def residual() -> FunctionModel:
    """Return a residual block: layers b and short end in one sum."""

    def forward(m: nn.Module, x: Tensor) -> Tensor:
        hidden = F.relu(m.a(x))
        return F.relu(m.b(hidden) + m.short(x))

    return FunctionModel(forward, a=nn.Linear(4, 4), b=nn.Linear(4, 4), short=nn.Linear(4, 4))


def test_layers_before_one_sum_have_the_same_bits() -> None:
    model = residual()

    found = patterns(model, X)

    assert list(found) == ["a", "b", "short"]
    sums = model.b(model.a(X).relu()) + model.short(X)
    assert np.array_equal(found["b"].packed, packbits(sums > 0))
    assert np.array_equal(found["short"].packed, packbits(sums > 0))


def test_layers_before_one_sum_count_once_in_the_network() -> None:
    model = residual()

    network = patterns(model, X).network

    assert network.bits == 8
    inner = model.a(X)
    sums = model.b(inner.relu()) + model.short(X)
    expected = np.concatenate([packbits(inner > 0), packbits(sums > 0)], axis=1)
    assert np.array_equal(network.packed, expected)


def assert_change(change: Change, before: Pattern, after: Pattern) -> None:
    """Compare a change with that of the unpacked bits."""
    is_changed = unpack(after.packed) != unpack(before.packed)
    share = is_changed.sum() / (len(after) * after.bits)
    regions = {tuple(row) for row in after.packed.tolist()}

    assert change.share.item() == pytest.approx(share)
    assert change.points == is_changed.any(axis=1).sum()
    assert change.regions == len(regions)


@pytest.mark.parametrize("device", DEVICES)
def test_changes_are_those_of_the_bits(device: str) -> None:
    model = residual().to(device)
    x = torch.randn(50, 4, device=device).round()
    before = patterns(model, x)
    for parameter in model.parameters():
        nn.init.normal_(parameter.data)
    after = patterns(model, x)

    changes = after.changes(before)

    for name in after:
        assert_change(changes.layers[name], before[name], after[name])
    assert_change(changes.network, before.network, after.network)
    assert after.distinct() == changes.network.regions


def test_patterns_of_other_shapes_are_not_compared() -> None:
    pattern = make_pattern(draw_bits(3, 8))
    wider = make_pattern(draw_bits(3, 16))

    with pytest.raises(ValueError, match="same points and units"):
        pattern.hamming(wider)


def test_patterns_of_other_layers_are_not_compared() -> None:
    model = residual()
    one_layer = patterns(model, X, layers=["a"])

    with pytest.raises(ValueError, match="same layers"):
        patterns(model, X).changes(one_layer)


@pytest.mark.gpu
def test_changes_are_counted_without_waiting_for_the_gpu() -> None:
    model = residual().cuda()
    x = torch.randn(64, 4, device="cuda")
    before = patterns(model, x)
    after = patterns(model, x + 1)

    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        change = after.changes(before).network
    finally:
        torch.cuda.set_sync_debug_mode("default")

    assert change.points > 0


# Max pools.

POOLS = {
    "halves": nn.MaxPool2d(2),
    "overlapping": nn.MaxPool2d(3, 2, padding=1),
    "uneven": nn.MaxPool2d((2, 3), (1, 2), padding=(0, 1), dilation=(2, 1), ceil_mode=True),
    "adaptive": nn.AdaptiveMaxPool2d((2, 3)),
    "function": lambda x: torch.max_pool2d(x, 2, ceil_mode=True),
    "by keyword": lambda x: torch.max_pool2d(input=x, kernel_size=2),
}


class PoolCase(NamedTuple):
    """A convolution and a max pool, run and traced."""

    model: nn.Module
    x: Tensor
    z: Tensor  # what is pooled
    out: Tensor
    windows: MaxPool

    @property
    def wins(self) -> Tensor:
        """Return which input of each window wins."""
        return self.windows(self.z)


@pytest.fixture(params=POOLS.values(), ids=POOLS)
def case(request: pytest.FixtureRequest) -> PoolCase:
    pool = request.param
    layer = nn.Conv2d(2, 3, 2, padding=1)
    model = FunctionModel(lambda m, x: pool(m.a(x)), a=layer)
    x = torch.randn(4, 2, 5, 7)
    step = next(node for node in trace(model, x).nodes if node.kind == "max")
    z = layer(x).detach().requires_grad_()
    return PoolCase(model, x, z, pool(z), MaxPool(step))


def test_the_largest_input_of_each_window_is_the_output_of_the_pool(case: PoolCase) -> None:
    largest = case.windows.windows(case.z).amax(dim=-1)

    assert torch.equal(largest, case.out)


def test_each_window_has_one_winner(case: PoolCase) -> None:
    assert (case.wins.sum(dim=-1) == 1).all()


def test_the_winner_is_the_input_that_gets_the_gradient(case: PoolCase) -> None:
    """The inputs' numbers go through the same windows and say which input it is."""
    positions = case.z.shape[2:]
    numbers = torch.arange(positions.numel()).view(positions).expand_as(case.z).double()
    winner = case.windows.windows(numbers)[case.wins].view(case.out.shape)

    (gradient,) = torch.autograd.grad(case.out[0, 1, 0, -1], case.z)

    assert gradient[0, 1].flatten().argmax() == winner[0, 1, 0, -1]


def test_the_bits_of_a_pool_are_its_winners(case: PoolCase) -> None:
    found = patterns(case.model, case.x)

    assert list(found) == ["a"]
    assert np.array_equal(found["a"].packed, packbits(case.wins))


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

    first_relu = 3 * 4 * 4
    first_pool = 4 * 3 * 2 * 2
    last_pool_and_relu = 4 * 4 + 4
    assert list(found) == ["0", "3"]
    assert found["0"].bits == first_relu + first_pool
    assert found["3"].bits == last_pool_and_relu
    assert found.network.bits == first_relu + first_pool + last_pool_and_relu


def test_a_pool_before_all_layers_has_the_name_of_its_function() -> None:
    model = FunctionModel(lambda m, x: m.a(F.max_pool1d(x, 2)).relu(), a=nn.Linear(2, 3))

    found = patterns(model, X)

    assert list(found) == ["max_pool1d", "a"]
    assert found["max_pool1d"].bits == 4
    assert found["a"].bits == 3


def test_a_tracker_records_the_changes_of_patterns() -> None:
    model = nn.Sequential(nn.Conv2d(2, 3, 2), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(12, 1))
    tracker = gp.BoundaryTracker(model, probe=IMAGES)
    before = patterns(model, IMAGES)

    nn.init.normal_(model[0].weight)
    tracker.step()
    history = tracker.history["0"]

    change = patterns(model, IMAGES).changes(before).network
    assert change.share > 0
    assert history["pattern_change"][0] == change.share
    assert history["regions"][0] == change.regions


# Activations wherever they are.

Activation = Callable[[Tensor], Tensor]


def activate_heads(m: nn.Module, x: Tensor, act: Activation) -> Tensor:
    heads = m.a(x).view(-1, 2, 4)
    return m.b(act(heads).flatten(1))


def use_twice(m: nn.Module, x: Tensor, act: Activation) -> Tensor:
    z = m.a(x)
    return m.b(act(z) + z)


def activate_average(m: nn.Module, x: Tensor, act: Activation) -> Tensor:
    both = torch.cat([m.a(x), 2 * m.a(x)], dim=1)
    average = F.avg_pool1d(both, 2)
    return m.b(act(average))


def activate_concatenation(m: nn.Module, x: Tensor, act: Activation) -> Tensor:
    return act(torch.cat([m.a(x), m.a(x) - 1], dim=1))


def activate_transposed_convolution(m: nn.Module, x: Tensor, act: Activation) -> Tensor:
    return act(m.c(x[:, None]))


def activate_product_with_part_of_a_weight(m: nn.Module, x: Tensor, act: Activation) -> Tensor:
    part = m.a.weight.t()[:, :3]
    return act(x @ part)


@pytest.mark.filterwarnings("ignore:.*transposed convolutions")
@pytest.mark.parametrize(
    "forward",
    [
        activate_heads,
        use_twice,
        activate_average,
        activate_concatenation,
        activate_transposed_convolution,
        activate_product_with_part_of_a_weight,
    ],
)
def test_every_relu_counts_wherever_it_is(forward: Callable) -> None:
    """The second computation collects the bits in the forward itself."""
    torch.manual_seed(3)
    model = FunctionModel(
        lambda m, x: forward(m, x, torch.relu),
        a=nn.Linear(2, 8),
        b=nn.Linear(8, 5),
        c=nn.ConvTranspose1d(1, 2, 3),
    )
    x = torch.randn(200, 2)
    collected: list[Tensor] = []

    def collect_and_activate(z: Tensor) -> Tensor:
        collected.append((z > 0).flatten(1))
        return z.relu()

    forward(model, x, collect_and_activate)
    bits = torch.cat(collected, dim=1)
    regions = len(bits.unique(dim=0))
    assert regions > 1

    found = patterns(model, x)
    assert found.network.bits == bits.shape[1]
    assert found.distinct() == regions
    assert record(model, probe=x).network["regions"][0] == regions


def test_a_dead_unit_after_a_sum_counts_once_in_the_network() -> None:
    def forward(m: nn.Module, x: Tensor) -> Tensor:
        return F.relu(m.a(x) + m.b(x))

    model = FunctionModel(forward, a=nn.Linear(2, 3), b=nn.Linear(2, 3))
    model.a.bias.data[0] = -99.0

    history = record(model, probe=torch.rand(9, 2))

    dead = history.network["dead"]
    assert dead >= 1
    assert history["a"]["dead"] == dead
    assert history["b"]["dead"] == dead


# A choice of layers.


def test_a_chosen_layer_brings_no_other_layer_of_its_sum() -> None:
    found = patterns(residual(), X, layers=["b"])

    assert list(found) == ["b"]
    assert found.network.bits == 4


def test_a_chosen_layer_brings_no_pools_of_others() -> None:
    assert list(patterns(pooled(), IMAGES, layers=["3"])) == ["3"]


def test_a_chosen_layer_brings_no_activation_of_a_transposed_convolution() -> None:
    model = nn.Sequential(
        nn.Conv1d(1, 4, 3),
        nn.ReLU(),
        nn.ConvTranspose1d(4, 2, 3),
        nn.ReLU(),
        nn.Conv1d(2, 2, 1),
    )

    found = patterns(model, torch.randn(8, 1, 6), layers=["0"])

    assert list(found) == ["0"]


def test_an_activation_after_a_layer_with_its_own_counts_too() -> None:
    layer = gp.GmPLinear(3, 4, activation=torch.relu)
    model = nn.Sequential(layer, nn.BatchNorm1d(4), nn.ReLU())

    assert patterns(model, torch.randn(8, 3)).network.bits == 8
