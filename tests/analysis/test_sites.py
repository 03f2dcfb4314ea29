"""What follows a layer is found as people write it, or it is not known: never a wrong distance."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from boundary_checks import CLOSE, by_unit, predict, randomise
from function_model import FunctionModel
from torch import Tensor, nn

from geoparam import GmPLinear, convert_
from geoparam.analysis import Boundaries, SReLU, boundaries, breaks, layer_boundaries
from geoparam.analysis.sites import find_sites
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
    return m.fc(x)


def normed(m: nn.Module, x: Tensor) -> Tensor:
    return m.norm(m.fc(x))


# The pre-activation, with units in the last dimension, and the whole forward.
UNDERSTOOD: dict[str, tuple[Callable, Callable]] = {
    "module": (normed, lambda m, x: m.act(normed(m, x))),
    "function": (plain, lambda m, x: F.relu(m.fc(x))),
    "method in place": (normed, lambda m, x: normed(m, x).relu_()),
    "dropout between": (normed, lambda m, x: F.relu(m.norm(m.drop(m.fc(x))))),
    "called twice": (normed, lambda m, x: F.relu(normed(m, x)) + F.relu(normed(m, -x))),
    "norm of two": (normed, lambda m, x: F.relu(normed(m, x)) + F.relu(m.norm(m.other(x)))),
    "tied decoder": (plain, lambda m, x: F.linear(F.relu(m.fc(x)), m.fc.weight.t()).relu()),
    "residual sum": (normed, lambda m, x: F.relu(normed(m, x) + m.other(x))),
}


@pytest.mark.parametrize(("pre", "forward"), UNDERSTOOD.values(), ids=UNDERSTOOD)
def test_what_follows_is_found_as_it_is_written(pre: Callable, forward: Callable) -> None:
    members = {"fc": fc(), "norm": bn(), "other": fc(), "act": nn.ReLU(), "drop": nn.Dropout()}
    model = randomise(FunctionModel(forward, **members)).eval()
    found = boundaries(model, ROWS)["fc"]
    z = pre(model, ROWS).detach()
    torch.testing.assert_close(predict(found, model.fc, ROWS), z, **CLOSE)


class Half(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, 0.5 * self.weight, self.bias)


class LayerNorm(nn.Module):
    """As in nanoGPT: the name of torch's, and no subclass of it."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(UNITS)), nn.Parameter(torch.zeros(UNITS))

    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, (UNITS,), self.weight, self.bias)


class Doubling(nn.BatchNorm1d):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x) + 1


def patched() -> nn.Module:
    norm = bn()
    norm.forward = torch.exp
    return norm


def relu_of_norm(m: nn.Module, x: Tensor) -> Tensor:
    return F.relu(normed(m, x))


def case(
    forward: Callable, norm: nn.Module | None = None, x: Tensor = ROWS
) -> tuple[Callable, nn.Module, Tensor]:
    return forward, norm or bn(), x


NOT_UNDERSTOOD = {
    "batch norm of transposed units": case(
        lambda m, x: F.relu(m.norm(m.fc(x).transpose(1, 2))), x=SEQUENCE
    ),
    "heads after the norm": case(lambda m, x: F.relu(normed(m, x).view(7, 2, 3))),
    "rms norm": case(relu_of_norm, nn.RMSNorm(UNITS)),
    "layer norm over positions": case(relu_of_norm, nn.LayerNorm([3, UNITS]), SEQUENCE),
    "constant added": case(lambda m, x: F.relu(m.fc(x) + 1)),
    "scaled": case(lambda m, x: F.relu(normed(m, x) * -0.5)),
    "norm without module": case(lambda m, x: F.relu(F.layer_norm(m.fc(x), (UNITS,)))),
    "foreign layer norm": case(relu_of_norm, LayerNorm()),
    "subclass of batch norm": case(relu_of_norm, Doubling(UNITS)),
    "patched batch norm": case(relu_of_norm, patched()),
    "batch norm over as many positions": case(relu_of_norm, x=SEQUENCE.repeat(1, 2, 1)),
    "layer norm of heads": case(
        lambda m, x: F.relu(m.norm(m.fc(x).view(-1, 2, 3))), nn.LayerNorm(3)
    ),
    "group norm over a sequence": case(
        lambda m, x: F.relu(m.norm(m.fc(x).transpose(1, 2))), nn.GroupNorm(2, UNITS), SEQUENCE
    ),
    "units in another order": case(lambda m, x: F.relu(m.norm(m.fc(x).flip(1)))),
    "indexed units": case(lambda m, x: F.relu(m.norm(m.fc(x)[:, [5, 4, 3, 2, 1, 0]]))),
    "some units": case(lambda m, x: F.relu(m.fc(x)[:, :4])),
    "calls with different norms": case(
        lambda m, x: F.relu(normed(m, x)) + F.relu(m.other(m.fc(x)))
    ),
    "calls with different limits": case(lambda m, x: m.fc(x).clamp(0, 1) + m.fc(x).clamp(0, 2)),
    "two norms": case(lambda m, x: F.relu(m.norm(normed(m, x)))),
    "average of points": case(lambda m, x: F.relu(m.fc(x).mean(1)), x=SEQUENCE),
    "layer norm of the largest": case(
        lambda m, x: F.relu(m.norm(F.max_pool1d(m.fc(x).transpose(1, 2), 3).transpose(1, 2))),
        nn.LayerNorm(UNITS),
        SEQUENCE,
    ),
    "weight without its bias": case(lambda m, x: F.relu(F.linear(x, m.fc.weight))),
    "per-channel limits elsewhere": case(lambda m, x: m.act(m.fc(x)), x=SEQUENCE.repeat(1, 2, 1)),
    "smooth": case(lambda m, x: F.gelu(m.fc(x))),
}


@pytest.mark.parametrize(("forward", "norm", "x"), NOT_UNDERSTOOD.values(), ids=NOT_UNDERSTOOD)
def test_what_is_not_understood_has_no_distance(
    forward: Callable, norm: nn.Module, x: Tensor
) -> None:
    members = {"fc": fc(), "norm": copy.deepcopy(norm), "other": bn(), "act": SReLU(UNITS)}
    model = randomise(FunctionModel(forward, **members)).eval()
    found = boundaries(model, x, statistics="batch")["fc"]
    assert found.distance.isnan().all() and found.location.isnan().all()
    rows = F.normalize(model.fc.weight.detach())
    sign = (found.direction * rows).sum(dim=1, keepdim=True)
    torch.testing.assert_close(found.direction, sign * rows, **CLOSE)


def test_a_layer_that_computes_something_else_is_left_out() -> None:
    model = nn.Sequential(Half(3, 4), nn.ReLU(), nn.Linear(4, 2))
    with pytest.warns(UserWarning, match="'0' .Half.: a subclass that computes something"):
        assert list(boundaries(model, torch.zeros(1, 3))) == ["2"]


def test_relu_is_assumed_where_one_layer_is_given_alone() -> None:
    layer = nn.Linear(3, 4)
    assert torch.equal(
        layer_boundaries(layer).distance, layer_boundaries(layer, None, nn.ReLU()).distance
    )
    elu = GmPLinear(3, 4, activation=nn.GELU())
    assert layer_boundaries(elu).distance.isnan().all()
    assert isinstance(find_sites(nn.Sequential(elu)).layers["0"].activation, nn.GELU)


def test_layers_are_chosen_by_name_or_function() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Conv1d(4, 4, 1), nn.Linear(4, 2))
    assert list(boundaries(model)) == ["0", "2", "3"]
    assert list(boundaries(model, layers=["3", "0"])) == ["3", "0"]
    assert list(boundaries(model, layers="2")) == ["2"]
    assert list(boundaries(model, layers=lambda m, name: isinstance(m, nn.Conv1d))) == ["2"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"layers": ["9"]}, "no layers .'9'.; the model has: 0, 1"),
        ({"layers": lambda module, name: False}, "no layer to look at"),
        ({"statistics": "mean"}, "'running' or 'batch'; got 'mean'"),
        ({"statistics": "batch"}, "needs the batch"),
    ],
)
def test_what_cannot_be_answered_says_why(arguments: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        boundaries(nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2)), **arguments)


@pytest.mark.parametrize(
    "layer", [nn.Embedding(3, 4), nn.ConvTranspose2d(2, 3, 3), nn.ReLU(), Half(3, 4)]
)
def test_what_has_no_units_is_refused(layer: nn.Module) -> None:
    with pytest.raises(ValueError, match=f"{type(layer).__name__} has no units"):
        layer_boundaries(layer)
    with pytest.raises(ValueError, match="no layer to look at"):
        boundaries(nn.Sequential(layer))


def check_model(model: nn.Module, x: Tensor) -> dict[str, Boundaries]:
    """Check every layer with distances: what its norm puts out is what its boundary tells."""
    model = randomise(model).eval()
    given: dict[nn.Module, Tensor] = {}
    made: dict[nn.Module, Tensor] = {}

    def hook(module: nn.Module, args: tuple, result: Any) -> None:
        if isinstance(result, Tensor):
            given[module], made[module] = args[0].clone(), result.clone()

    handles = [module.register_forward_hook(hook) for module in model.modules()]
    with torch.no_grad():
        model(x)
    for handle in handles:
        handle.remove()
    found, sites = boundaries(model, x), find_sites(model, x).layers
    for name, one in found.items():
        site = sites[name]
        if one.distance.isfinite().all():
            z = by_unit(made[site.norm or site.layer], site.channel)
            expected = predict(
                one, site.layer, given[site.layer], breaks(site.activation).points[0]
            )
            if site.norm is not None and site.activation in site.norm.children():
                expected = site.activation(expected)
            torch.testing.assert_close(expected, z, rtol=1e-8, atol=1e-9 * z.abs().max().item())
    return found


def count_known(found: dict[str, Boundaries]) -> tuple[int, int]:
    """Return how many layers have distances, and how many none."""
    known = sum(one.distance.isfinite().all().item() for one in found.values())
    return known, len(found) - known


@pytest.mark.parametrize("converted", [False, True])
def test_every_convolution_of_a_resnet_has_boundaries(converted: bool) -> None:
    vision = pytest.importorskip("torchvision.models.resnet")
    model = vision.ResNet(vision.BasicBlock, [1, 1, 1, 1], width_per_group=64)
    x = torch.randn(1, 3, 32, 32, **D)
    model = convert_(model) if converted else model
    assert count_known(check_model(model, x)) == (12, 1)


def test_norms_of_timm_carry_their_activation() -> None:
    timm = pytest.importorskip("timm")
    model = timm.create_model("mobilenetv4_conv_small", num_classes=3)
    with pytest.warns(UserWarning, match="'classifier' .Linear."):  # timm's own class
        found = check_model(model, torch.randn(1, 3, 32, 32, **D))
    known, _ = count_known(found)
    assert known > 10


def test_frozen_and_inference_parameters_are_read() -> None:
    x = torch.randn(4, 3)
    model = nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.ReLU()).requires_grad_(False)
    expected = boundaries(model, x)["0"].location
    with torch.inference_mode():
        assert torch.equal(boundaries(model, x)["0"].location, expected)


def test_nothing_is_computed_on_the_meta_device() -> None:
    vision = pytest.importorskip("torchvision.models")
    with torch.device("meta"):
        model = vision.resnet18()
        found = boundaries(model, torch.zeros(1, 3, 64, 64))
    assert found["conv1"].locations.shape == (1, 64, 147) and found["conv1"].scale.is_meta


def test_names_are_plain_in_compiled_and_wrapped_models() -> None:
    def make() -> nn.Module:
        return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 2))

    x, plain = torch.zeros(2, 3), make()
    names = list(boundaries(plain, x))
    assert list(boundaries(torch.compile(plain), x)) == names
    assert unwrap(nn.DataParallel(torch.compile(plain))) is plain
    assert list(boundaries(nn.DataParallel(plain), x)) == names
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        assert list(boundaries(nn.parallel.DistributedDataParallel(plain), x)) == names
    finally:
        torch.distributed.destroy_process_group()
    part = make()
    part[0], part[1] = torch.compile(part[0]), torch.compile(part[1])
    found = find_sites(part, x).layers
    assert list(found) == names and isinstance(found["0"].norm, nn.BatchNorm1d)


def test_a_layer_that_did_not_run_has_directions() -> None:
    model = FunctionModel(lambda m, x: F.relu(m.fc(x)), fc=fc(), spare=fc())
    found = boundaries(model, torch.zeros(1, FAN_IN))
    assert list(found) == ["fc", "spare"]
    assert found["spare"].direction.isfinite().all() and found["spare"].distance.isnan().all()


def test_a_tied_layer_is_one_and_tied_weights_are_two() -> None:
    one = fc(FAN_IN)
    assert list(boundaries(nn.Sequential(one, nn.ReLU(), one), torch.zeros(1, FAN_IN))) == ["0"]
    two = nn.Sequential(fc(FAN_IN), nn.ReLU(), fc(FAN_IN), nn.BatchNorm1d(FAN_IN), nn.ReLU())
    two[2].weight = two[0].weight
    found = boundaries(randomise(two), torch.zeros(1, FAN_IN, **D))
    assert list(found) == ["0", "2"]
    assert torch.equal(found["0"].direction.abs(), found["2"].direction.abs())
