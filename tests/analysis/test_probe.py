"""What is shown is what the model's own hooks see, each call once, and nothing is left behind."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from function_model import FunctionModel
from patches import patches
from torch import Tensor, nn

from geoparam import GmPConv1d, GmPConv2d, GmPConv3d, GmPLinear, InputMeanNorm
from geoparam.analysis.reading.layer_sites import Site, find_sites
from geoparam.analysis.reading.probe import compute_input_lengths, observe

D = {"dtype": torch.float64}
Shown = list[tuple[str, str, Tensor]]


def observe_all(model: nn.Module, x: Any, other: Any = None) -> Shown:
    """Return what `observe` shows, in order, as (what, layer, tensor); sites are found on `x`."""
    seen: Shown = []

    def record(what: str) -> Callable[[Site, Tensor, int], None]:
        return lambda site, z, _: seen.append((what, site.name, z))

    sites = find_sites(model, x)
    calls = {what: record(what) for what in ("pre_activation", "layer_input", "norm_input")}
    observe(model, x if other is None else other, sites, **calls)
    return seen


def only(seen: Shown, what: str) -> dict[str, Tensor]:
    found = [(name, z) for kind, name, z in seen if kind == what]
    assert len(found) == len(dict(found)), "a call was shown twice"
    return dict(found)


def read_inputs(model: nn.Module, x: Tensor, names: dict[str, str]) -> dict[str, Tensor]:
    """Return what the modules named by the values are given, by the keys, in evaluation."""
    seen: dict[str, Tensor] = {}
    handles = [
        model.get_submodule(module).register_forward_pre_hook(
            lambda _, args, key=key: seen.update({key: args[0].clone()})
        )
        for key, module in names.items()
    ]
    training = model.training
    with torch.no_grad():
        model.eval()(x)
    model.train(training)
    for handle in handles:
        handle.remove()
    return seen


def same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> bool:
    return list(found) == list(expected) and all(
        torch.equal(found[name], expected[name]) for name in expected
    )


# --- observe -------------------------------------------------------------------------------------


def test_what_is_shown_is_what_hooks_see() -> None:
    inplace = True
    model = nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(inplace), nn.Dropout(), nn.Conv2d(4, 5, 3),
        nn.ReLU6(inplace), nn.Flatten(), nn.Linear(80, 6), nn.LayerNorm(6), nn.Hardswish(inplace),
        nn.Linear(6, 2),
    )  # fmt: skip
    x = torch.randn(2, 3, 8, 8)
    seen = observe_all(model, x)
    layers = {name: name for name in ("0", "4", "7", "10")}
    assert same(only(seen, "layer_input"), read_inputs(model, x, layers))
    expected = read_inputs(model, x, {"0": "2", "4": "5", "7": "9"})
    assert same(only(seen, "pre_activation"), expected)
    assert same(only(seen, "norm_input"), read_inputs(model, x, {"0": "1", "7": "8"}))


def test_calls_that_leave_no_step_are_not_shown() -> None:
    """Shapes, constants, norms that pass their input on: each is visited, none is the layer."""

    def forward(m: nn.Module, x: Tensor) -> Tensor:
        scale = torch.ones(x.size(0), 1) * m.flag.abs().max()
        x = m.a(x.contiguous())
        x = m.norm(m.identity(x + torch.zeros_like(x)))
        if x.dim() == 2 and x.is_floating_point() and bool(m.flag > 0):
            x = m.drop(x)
        return m.b(F.relu(x)) * scale + x.size(1)

    modules = {"norm": nn.BatchNorm1d(4), "identity": nn.Identity(), "drop": nn.Dropout()}
    model = FunctionModel(forward, a=nn.Linear(3, 4), b=nn.Linear(4, 2), **modules)
    model.register_buffer("flag", torch.tensor(1.0))
    x = torch.randn(5, 3)
    seen = observe_all(model, x)
    kinds = [(what, name) for what, name, _ in seen]
    assert kinds == [
        ("layer_input", "a"),
        ("norm_input", "a"),
        ("pre_activation", "a"),
        ("layer_input", "b"),
    ]
    assert same(only(seen, "norm_input"), {"a": model.a(x)})
    assert same(only(seen, "pre_activation"), {"a": model.norm.eval()(model.a(x))})


READABLE: dict[str, tuple[Callable[[Tensor], Tensor], bool]] = {
    "nothing": (lambda z: z, True),
    "points together": (lambda z: z.flatten(0, 1), True),
    "transposed": (lambda z: z.transpose(1, 2), False),
    "transposed, of equal size": (lambda z: z[:, :, :3].transpose(1, 2), False),
    "flattened": (lambda z: z.flatten(1), False),
    "another order": (lambda z: z[..., [1, 0, 3, 2]], False),
    "broadcast": (lambda z: z[..., :1] + torch.zeros(4), False),
}


@pytest.mark.parametrize(("move", "readable"), READABLE.values(), ids=READABLE)
def test_units_are_shown_only_where_the_layer_has_put_them(move: Callable, readable: bool) -> None:
    model = FunctionModel(lambda m, x: F.relu(move(m.fc(x))), fc=nn.Linear(5, 4))
    x = torch.randn(2, 3, 5)
    found = only(observe_all(model, x), "pre_activation")
    assert same(found, {"fc": move(model.fc(x))} if readable else {})


def test_one_unit_is_not_found_in_a_sum_with_many() -> None:
    model = FunctionModel(lambda m, x: F.relu(m.one(x) + m.many(x)), one=nn.Linear(3, 1))
    model.many = nn.Linear(3, 4)
    assert list(only(observe_all(model, torch.randn(5, 3)), "pre_activation")) == ["many"]


def test_attention_shows_the_query() -> None:
    attention, x = nn.MultiheadAttention(8, 2, batch_first=True), torch.randn(3, 2, 8)
    found = only(observe_all(attention, (x, x, x)), "layer_input")
    assert torch.equal(found["in_proj_weight"], x.transpose(0, 1))


def test_the_model_is_left_as_it_was_when_a_callback_fails() -> None:
    layer = GmPLinear(3, 4, activation=torch.relu)
    model, x = nn.Sequential(layer, nn.BatchNorm1d(4)), torch.ones(2, 3)
    sites = find_sites(model, x)

    def fail(site: Site, z: Tensor, step: int) -> None:
        raise KeyError(site.name)

    for callback in ("pre_activation", "layer_input"):
        with pytest.raises(KeyError):
            observe(model, x, sites, **{callback: fail})
        assert layer.activation is torch.relu and all(m.training for m in model.modules())
        assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


# --- lengths of inputs ---------------------------------------------------------------------------

OPTIONS = [
    {},
    {"padding": "same", "kernel_size": 4, "dilation": 2},
    {"dilation": 2, "padding": 2, "stride": 3},
    {"groups": 2, "padding": 1},
    {"padding": 1, "padding_mode": "circular", "stride": 2},
]
CONVS = {1: (nn.Conv1d, GmPConv1d), 2: (nn.Conv2d, GmPConv2d), 3: (nn.Conv3d, GmPConv3d)}


def lengths_by_hand(layer: nn.Module, x: Tensor) -> Tensor:
    return patches(layer, x).norm(dim=-1)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("ours", [False, True])
@pytest.mark.parametrize("rank", [1, 2, 3])
def test_lengths_are_those_of_the_patches(rank: int, ours: bool, options: dict) -> None:
    layer = CONVS[rank][ours](4, 8, **{"kernel_size": 3, **options}, **D)
    x = torch.randn(2, 4, *[9, 8, 7][:rank], **D)
    found = compute_input_lengths(layer, x)
    assert found.shape == (2, layer.groups, *layer(x).shape[2:])
    torch.testing.assert_close(found.movedim(1, 0).flatten(1), lengths_by_hand(layer, x))
    torch.testing.assert_close(compute_input_lengths(layer, x[0]), found[0])


def test_lengths_of_a_linear_layers_input_are_those_of_its_rows() -> None:
    layer, x = GmPLinear(5, 4, **D), torch.randn(2, 3, 5, **D)
    torch.testing.assert_close(compute_input_lengths(layer, x), x.norm(dim=-1))


@pytest.mark.parametrize("padding", [0, 1])
@pytest.mark.parametrize("form", [True, "border"])
def test_lengths_are_of_what_is_left_without_the_mean(form: bool | str, padding: int) -> None:
    layer = GmPConv2d(4, 6, 3, padding=padding, input_norm=form, **D)
    layer.input_norm.running_mean.normal_()
    x, mean = torch.randn(2, 4, 7, 6, **D), layer.input_norm.running_mean[:, None, None]
    if form is True:  # zeros are padded, and then the mean goes
        seen = F.pad(x, [padding] * 4) - mean
    else:
        seen = F.pad(x - mean, [padding] * 4)
    bare = nn.Conv2d(4, 6, 3)
    expected = lengths_by_hand(bare, seen).flatten()
    torch.testing.assert_close(compute_input_lengths(layer.eval(), x).flatten(), expected)
    torch.testing.assert_close(compute_input_lengths(layer.train(), x).flatten(), expected)
    assert layer.input_norm.num_batches_tracked == 0


def test_lengths_without_running_statistics_take_the_batchs_mean() -> None:
    layer, x = GmPLinear(5, 4, input_norm=True, **D), torch.randn(9, 5, **D) + 3
    layer.input_norm = InputMeanNorm(5, track_running_stats=False, dim=-1)
    torch.testing.assert_close(compute_input_lengths(layer, x), (x - x.mean(0)).norm(dim=1))


def test_lengths_of_narrow_numbers_are_computed_in_wide_ones() -> None:
    layer, x = nn.Conv2d(64, 4, 3).half(), 300 * torch.randn(1, 64, 4, 4).half()
    found = compute_input_lengths(layer, x)
    assert found.dtype == torch.float32 and found.isfinite().all()
    torch.testing.assert_close(
        found.flatten(), lengths_by_hand(layer, x.double()).flatten().float()
    )
