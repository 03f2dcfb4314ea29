"""What follows a layer is found as people write it, or it is not known: never a wrong distance."""

import copy
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from boundary_checks import CLOSE, by_unit, predict, randomise
from function_model import FunctionModel
from torch import Tensor, nn
from torch.testing import assert_close

from geoparam import GmPLinear, convert_
from geoparam.analysis import Boundaries, SReLU, boundaries, breaks, layer_boundaries
from geoparam.analysis.sites import Site, find_sites
from geoparam.model.run import unwrap

D = {"dtype": torch.float64}
UNITS, FAN_IN = 6, 5
SEQUENCE = torch.linspace(-2, 2, 2 * 3 * FAN_IN, **D).sin().reshape(2, 3, FAN_IN)
ROWS = torch.linspace(-2, 2, 7 * FAN_IN, **D).sin().reshape(7, FAN_IN)


def fc(units: int = UNITS) -> nn.Linear:
    return nn.Linear(FAN_IN, units)


def bn(units: int = UNITS) -> nn.BatchNorm1d:
    return nn.BatchNorm1d(units)


def plain(m: nn.Module, x: Tensor) -> Tensor:
    """Return the output of the layer."""
    return m.fc(x)


def normed(m: nn.Module, x: Tensor) -> Tensor:
    """Return the output of the layer and its norm."""
    return m.norm(m.fc(x))


def by_module(m: nn.Module, x: Tensor) -> Tensor:
    return m.act(normed(m, x))


def by_function(m: nn.Module, x: Tensor) -> Tensor:
    return F.relu(plain(m, x))


def by_method_in_place(m: nn.Module, x: Tensor) -> Tensor:
    return normed(m, x).relu_()


def with_dropout_between(m: nn.Module, x: Tensor) -> Tensor:
    z = m.drop(m.fc(x))
    return F.relu(m.norm(z))


def with_two_calls(m: nn.Module, x: Tensor) -> Tensor:
    return F.relu(normed(m, x)) + F.relu(normed(m, -x))


def with_a_norm_of_two_layers(m: nn.Module, x: Tensor) -> Tensor:
    other = m.norm(m.other(x))
    return F.relu(normed(m, x)) + F.relu(other)


def with_a_tied_decoder(m: nn.Module, x: Tensor) -> Tensor:
    hidden = F.relu(m.fc(x))
    return F.linear(hidden, m.fc.weight.t()).relu()


def before_a_residual_sum(m: nn.Module, x: Tensor) -> Tensor:
    return F.relu(normed(m, x) + m.other(x))


# The pre-activation, with units in the last dimension, and the whole forward.
UNDERSTOOD: list[tuple[Callable, Callable]] = [
    (normed, by_module),
    (plain, by_function),
    (normed, by_method_in_place),
    (normed, with_dropout_between),
    (normed, with_two_calls),
    (normed, with_a_norm_of_two_layers),
    (plain, with_a_tied_decoder),
    (normed, before_a_residual_sum),
]


@pytest.mark.parametrize(("pre_activation", "forward"), UNDERSTOOD)
def test_norm_and_activation_are_found_however_they_are_written(
    pre_activation: Callable, forward: Callable
) -> None:
    model = FunctionModel(
        forward, fc=fc(), norm=bn(), other=fc(), act=nn.ReLU(), drop=nn.Dropout()
    )
    randomise(model).eval()

    boundary = boundaries(model, ROWS)["fc"]

    z = pre_activation(model, ROWS).detach()
    assert_close(predict(boundary, model.fc, ROWS), z, **CLOSE)


class Half(nn.Linear):
    """Computes something else than its base class."""

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, 0.5 * self.weight, self.bias)


class LayerNorm(nn.Module):
    """As in nanoGPT: the name of torch's, and no subclass of it."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(UNITS))
        self.bias = nn.Parameter(torch.zeros(UNITS))

    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, (UNITS,), self.weight, self.bias)


class Doubling(nn.BatchNorm1d):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x) + 1


def patched_batch_norm() -> nn.Module:
    """Return a BatchNorm whose forward was replaced."""
    norm = bn()
    norm.forward = torch.exp
    return norm


def relu_of_norm(m: nn.Module, x: Tensor) -> Tensor:
    return F.relu(normed(m, x))


def norm_of_transposed(m: nn.Module, x: Tensor) -> Tensor:
    positions_last = m.fc(x).transpose(1, 2)
    return F.relu(m.norm(positions_last))


def norm_of_largest(m: nn.Module, x: Tensor) -> Tensor:
    positions_last = m.fc(x).transpose(1, 2)
    largest = F.max_pool1d(positions_last, 3)
    return F.relu(m.norm(largest.transpose(1, 2)))


def norm_of_heads(m: nn.Module, x: Tensor) -> Tensor:
    heads = m.fc(x).view(-1, 2, 3)
    return F.relu(m.norm(heads))


def heads_of_norm(m: nn.Module, x: Tensor) -> Tensor:
    heads = normed(m, x).view(7, 2, 3)
    return F.relu(heads)


def norm_of_reversed_units(m: nn.Module, x: Tensor) -> Tensor:
    z = m.fc(x).flip(1)
    return F.relu(m.norm(z))


def norm_of_indexed_units(m: nn.Module, x: Tensor) -> Tensor:
    z = m.fc(x)[:, [5, 4, 3, 2, 1, 0]]
    return F.relu(m.norm(z))


def some_units(m: nn.Module, x: Tensor) -> Tensor:
    z = m.fc(x)[:, :4]
    return F.relu(z)


def average_of_points(m: nn.Module, x: Tensor) -> Tensor:
    z = m.fc(x).mean(dim=1)
    return F.relu(z)


def constant_added(m: nn.Module, x: Tensor) -> Tensor:
    return F.relu(m.fc(x) + 1)


def scaled_norm(m: nn.Module, x: Tensor) -> Tensor:
    return F.relu(-0.5 * normed(m, x))


def norm_without_module(m: nn.Module, x: Tensor) -> Tensor:
    z = F.layer_norm(m.fc(x), (UNITS,))
    return F.relu(z)


def two_norms(m: nn.Module, x: Tensor) -> Tensor:
    return F.relu(m.norm(normed(m, x)))


def calls_with_different_norms(m: nn.Module, x: Tensor) -> Tensor:
    other = m.other(m.fc(x))
    return F.relu(normed(m, x)) + F.relu(other)


def calls_with_different_limits(m: nn.Module, x: Tensor) -> Tensor:
    return m.fc(x).clamp(0, 1) + m.fc(x).clamp(0, 2)


def weight_without_its_bias(m: nn.Module, x: Tensor) -> Tensor:
    return F.relu(F.linear(x, m.fc.weight))


def limits_of_each_channel(m: nn.Module, x: Tensor) -> Tensor:
    return m.act(m.fc(x))


def smooth(m: nn.Module, x: Tensor) -> Tensor:
    return F.gelu(m.fc(x))


class Case(NamedTuple):
    """A model that cannot be understood: its forward, the norm that it uses, and its input."""

    forward: Callable
    norm: nn.Module = bn()
    x: Tensor = ROWS


SEQUENCE_OF_UNITS = SEQUENCE.repeat(1, 2, 1)  # as many positions as units

NOT_UNDERSTOOD = {
    "batch norm of transposed units": Case(norm_of_transposed, x=SEQUENCE),
    "group norm over a sequence": Case(norm_of_transposed, nn.GroupNorm(2, UNITS), SEQUENCE),
    "layer norm of the largest": Case(norm_of_largest, nn.LayerNorm(UNITS), SEQUENCE),
    "layer norm of heads": Case(norm_of_heads, nn.LayerNorm(3)),
    "heads after the norm": Case(heads_of_norm),
    "units in another order": Case(norm_of_reversed_units),
    "indexed units": Case(norm_of_indexed_units),
    "some units": Case(some_units),
    "average of points": Case(average_of_points, x=SEQUENCE),
    "constant added": Case(constant_added),
    "scaled": Case(scaled_norm),
    "rms norm": Case(relu_of_norm, nn.RMSNorm(UNITS)),
    "layer norm over positions": Case(relu_of_norm, nn.LayerNorm([3, UNITS]), SEQUENCE),
    "norm without module": Case(norm_without_module),
    "foreign layer norm": Case(relu_of_norm, LayerNorm()),
    "subclass of batch norm": Case(relu_of_norm, Doubling(UNITS)),
    "patched batch norm": Case(relu_of_norm, patched_batch_norm()),
    "batch norm over as many positions": Case(relu_of_norm, x=SEQUENCE_OF_UNITS),
    "two norms": Case(two_norms),
    "calls with different norms": Case(calls_with_different_norms),
    "calls with different limits": Case(calls_with_different_limits),
    "weight without its bias": Case(weight_without_its_bias),
    "per-channel limits elsewhere": Case(limits_of_each_channel, x=SEQUENCE_OF_UNITS),
    "smooth": Case(smooth),
}


@pytest.mark.parametrize("case", NOT_UNDERSTOOD.values(), ids=NOT_UNDERSTOOD)
def test_what_is_not_understood_has_directions_and_no_distance(case: Case) -> None:
    model = FunctionModel(
        case.forward, fc=fc(), norm=copy.deepcopy(case.norm), other=bn(), act=SReLU(UNITS)
    )
    randomise(model).eval()

    boundary = boundaries(model, case.x, statistics="batch")["fc"]

    assert boundary.distance.isnan().all()
    assert boundary.location.isnan().all()
    rows = F.normalize(model.fc.weight.detach())
    sign = (boundary.direction * rows).sum(dim=1, keepdim=True)
    assert_close(boundary.direction, sign * rows, **CLOSE)


def test_a_layer_that_computes_something_else_is_left_out() -> None:
    model = nn.Sequential(Half(3, 4), nn.ReLU(), nn.Linear(4, 2))

    with pytest.warns(UserWarning, match="'0' .Half.: a subclass that computes something"):
        found = boundaries(model, torch.zeros(1, 3))

    assert list(found) == ["2"]


class StackedExperts(nn.Module):
    """One expert, with the marks of transformers' modules of stacked experts."""

    is_transposed, is_concatenated = False, True

    def __init__(self) -> None:
        super().__init__()
        self.down_proj = nn.Parameter(torch.randn(1, 4, 3))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.down_proj[0].T


def test_stacked_experts_are_left_out_with_a_warning() -> None:
    model = nn.Sequential(StackedExperts(), nn.ReLU(), nn.Linear(4, 2))

    with pytest.warns(UserWarning, match="0.down_proj: units of .* stacked experts"):
        found = boundaries(model, torch.zeros(1, 3))

    assert list(found) == ["2"]


def test_transposed_convolutions_are_left_out_with_a_warning() -> None:
    model = nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.ReLU(), nn.ConvTranspose2d(4, 2, 3), nn.BatchNorm2d(2), nn.ReLU()
    )

    with pytest.warns(UserWarning, match="2: units of transposed convolutions"):
        found = boundaries(model, torch.zeros(1, 3, 6, 6))

    assert list(found) == ["0"]


def test_relu_is_assumed_where_one_layer_is_given_alone() -> None:
    layer = nn.Linear(3, 4)

    boundary = layer_boundaries(layer)

    expected = layer_boundaries(layer, None, nn.ReLU())
    assert torch.equal(boundary.distance, expected.distance)


def test_the_activation_inside_a_layer_is_read_where_it_is_given_alone() -> None:
    layer = GmPLinear(3, 4, activation=nn.GELU())

    assert layer_boundaries(layer).distance.isnan().all()


def test_the_activation_inside_a_layer_is_that_of_its_site() -> None:
    model = nn.Sequential(GmPLinear(3, 4, activation=nn.GELU()))

    assert isinstance(find_sites(model).layers["0"].activation, nn.GELU)


def is_conv(module: nn.Module, name: str) -> bool:
    return isinstance(module, nn.Conv1d)


@pytest.mark.parametrize(
    ("layers", "names"),
    [(None, ["0", "2", "3"]), (["3", "0"], ["3", "0"]), ("2", ["2"]), (is_conv, ["2"])],
    ids=["all", "names", "one name", "a function"],
)
def test_layers_are_chosen_by_name_or_function(layers: Any, names: list[str]) -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Conv1d(4, 4, 1), nn.Linear(4, 2))

    assert list(boundaries(model, layers=layers)) == names


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"layers": ["9"]}, "no layers .'9'.; the model has: 0, 1"),
        ({"layers": lambda module, name: False}, "no layer to look at"),
        ({"statistics": "mean"}, "'running' or 'batch'; got 'mean'"),
        ({"statistics": "batch"}, "needs the batch"),
    ],
)
def test_arguments_that_cannot_be_answered_are_refused(arguments: dict, message: str) -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))

    with pytest.raises(ValueError, match=message):
        boundaries(model, **arguments)


WITHOUT_UNITS = [nn.Embedding(3, 4), nn.ConvTranspose2d(2, 3, 3), nn.ReLU(), Half(3, 4)]


@pytest.mark.parametrize("layer", WITHOUT_UNITS, ids=str)
def test_a_layer_without_units_is_refused(layer: nn.Module) -> None:
    with pytest.raises(ValueError, match=f"{type(layer).__name__} has no units"):
        layer_boundaries(layer)


@pytest.mark.parametrize("layer", WITHOUT_UNITS, ids=str)
def test_a_model_without_units_is_refused(layer: nn.Module) -> None:
    model = nn.Sequential(layer)

    with pytest.raises(ValueError, match="no layer to look at"):
        boundaries(model)


# Whole models.


class Run(NamedTuple):
    """What modules received and returned in a forward pass, where that is a tensor."""

    inputs: dict[nn.Module, Tensor]
    outputs: dict[nn.Module, Tensor]


def run_and_watch(model: nn.Module, x: Tensor) -> Run:
    run = Run({}, {})

    def keep(module: nn.Module, args: tuple, result: Any) -> None:
        if isinstance(result, Tensor):
            run.inputs[module] = args[0].clone()
            run.outputs[module] = result.clone()

    with ExitStack() as hooks, torch.no_grad():
        for module in model.modules():
            hooks.enter_context(module.register_forward_hook(keep))
        model(x)
    return run


def check_site(site: Site, boundary: Boundaries, run: Run) -> None:
    """Check that what the norm puts out, or the layer without one, is what its boundary tells."""
    last = site.norm or site.layer
    z = by_unit(run.outputs[last], site.channel)
    point = breaks(site.activation).points[0]

    expected = predict(boundary, site.layer, run.inputs[site.layer], point)
    applies_activation = site.norm is not None and site.activation in site.norm.children()
    if applies_activation:
        expected = site.activation(expected)

    largest = z.abs().max().item()
    assert_close(expected, z, rtol=1e-8, atol=1e-9 * largest)


class Counts(NamedTuple):
    with_distances: int
    without: int


def check_model(model: nn.Module, x: Tensor) -> Counts:
    """Check every layer with distances; return how many have them."""
    model = randomise(model).eval()
    run = run_and_watch(model, x)
    sites = find_sites(model, x).layers
    found = boundaries(model, x)

    known = [name for name, each in found.items() if each.distance.isfinite().all()]
    for name in known:
        check_site(sites[name], found[name], run)
    return Counts(len(known), len(found) - len(known))


@pytest.mark.parametrize("converted", [False, True])
def test_every_convolution_of_a_resnet_has_boundaries(converted: bool) -> None:
    vision = pytest.importorskip("torchvision.models.resnet")
    model = vision.ResNet(vision.BasicBlock, [1, 1, 1, 1], width_per_group=64)
    x = torch.randn(1, 3, 32, 32, **D)
    if converted:
        model = convert_(model)

    counts = check_model(model, x)

    assert counts == Counts(with_distances=12, without=1)


def test_norms_of_timm_carry_their_activation() -> None:
    timm = pytest.importorskip("timm")
    model = timm.create_model("mobilenetv4_conv_small", num_classes=3)
    x = torch.randn(1, 3, 32, 32, **D)

    with pytest.warns(UserWarning, match="'classifier' .Linear."):  # timm's own class
        counts = check_model(model, x)

    assert counts.with_distances > 10


def test_inference_mode_does_not_change_boundaries() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.ReLU()).requires_grad_(False)
    x = torch.randn(4, 3)
    expected = boundaries(model, x)["0"].location

    with torch.inference_mode():
        location = boundaries(model, x)["0"].location

    assert torch.equal(location, expected)


def test_nothing_is_computed_on_the_meta_device() -> None:
    vision = pytest.importorskip("torchvision.models")

    with torch.device("meta"):
        model = vision.resnet18()
        boundary = boundaries(model, torch.zeros(1, 3, 64, 64))["conv1"]

    assert boundary.locations.shape == (1, 64, 147)
    assert boundary.scale.is_meta


def make_network() -> nn.Sequential:
    """Return a network whose layers with units are 0 and 3."""
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 2))


@pytest.mark.parametrize("wrap", [torch.compile, nn.DataParallel], ids=["compiled", "parallel"])
def test_names_are_plain_in_wrapped_models(wrap: Callable) -> None:
    model = wrap(make_network())

    assert list(boundaries(model, torch.zeros(2, 3))) == ["0", "3"]


def test_all_wrappers_are_taken_off() -> None:
    network = make_network()

    assert unwrap(nn.DataParallel(torch.compile(network))) is network


@pytest.fixture
def process_group() -> Iterator[None]:
    """Provide a group of one process."""
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


def test_names_are_plain_in_a_distributed_model(process_group: None) -> None:
    model = nn.parallel.DistributedDataParallel(make_network())

    assert list(boundaries(model, torch.zeros(2, 3))) == ["0", "3"]


def test_layers_and_norms_are_found_where_they_are_compiled_one_by_one() -> None:
    model = make_network()
    model[0] = torch.compile(model[0])
    model[1] = torch.compile(model[1])

    sites = find_sites(model, torch.zeros(2, 3)).layers

    assert list(sites) == ["0", "3"]
    assert isinstance(sites["0"].norm, nn.BatchNorm1d)


def test_a_layer_that_did_not_run_has_directions() -> None:
    model = FunctionModel(lambda m, x: F.relu(m.fc(x)), fc=fc(), spare=fc())

    found = boundaries(model, torch.zeros(1, FAN_IN))

    assert list(found) == ["fc", "spare"]
    assert found["spare"].direction.isfinite().all()
    assert found["spare"].distance.isnan().all()


def test_a_layer_that_is_used_twice_is_one() -> None:
    layer = fc(FAN_IN)
    model = nn.Sequential(layer, nn.ReLU(), layer)

    assert list(boundaries(model, torch.zeros(1, FAN_IN))) == ["0"]


def test_layers_with_tied_weights_are_two() -> None:
    model = nn.Sequential(fc(FAN_IN), nn.ReLU(), fc(FAN_IN), nn.BatchNorm1d(FAN_IN), nn.ReLU())
    model[2].weight = model[0].weight
    randomise(model)

    found = boundaries(model, torch.zeros(1, FAN_IN, **D))

    assert list(found) == ["0", "2"]
    assert torch.equal(found["0"].direction.abs(), found["2"].direction.abs())
