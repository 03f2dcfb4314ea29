"""A folded state_dict is the plain model's, and whatever cannot be folded is refused."""

import pytest
import torch
from checkpoint_models import conv_net, mlp, trained
from torch import Tensor, nn

import geoparam as gp
from geoparam.checkpoints import fold_state_dict


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16, torch.float64))
def test_weights_are_rounded_once(dtype: torch.dtype) -> None:
    model = trained("mlp").to(dtype)
    exact = fold_state_dict({k: x.double() for k, x in model.state_dict().items()})
    result = fold_state_dict(model.state_dict())
    for key, x in result.items():
        assert x.dtype == dtype
        torch.testing.assert_close(x, exact[key].to(dtype), rtol=0, atol=0)


def test_other_entries_are_the_same_tensors() -> None:
    state = trained("conv_net").state_dict()
    result = fold_state_dict(state, conv_net())
    assert result["1.running_var"] is state["1.running_var"]
    grid = torch.linspace(-90, 90, 5)  # a buffer that is called as a layer's parameter is
    assert fold_state_dict({**state, "grid.latitude": grid})["grid.latitude"] is grid
    assert list(result) == list(conv_net().state_dict())


def test_means_go_into_the_bias() -> None:
    model = nn.Sequential(
        gp.GmPConv2d(4, 6, 3, groups=2, input_norm=True, bias=False),
        nn.Flatten(),
        gp.GmPLinear(24, 5, input_norm=True),
    )
    x = torch.randn(3, 4, 4, 4) + 2
    model(x)
    plain = nn.Sequential(nn.Conv2d(4, 6, 3, groups=2), nn.Flatten(), nn.Linear(24, 5))
    plain.load_state_dict(fold_state_dict(model.state_dict(), plain))
    assert gp.verify(model, plain, x) < 1e-5


def test_a_linear_called_in_proj_is_no_attention() -> None:
    model = nn.ModuleDict({"in_proj": gp.GmPLinear(4, 12), "out_proj": nn.Linear(12, 4)})
    plain = nn.ModuleDict({"in_proj": nn.Linear(4, 12), "out_proj": nn.Linear(12, 4)})
    assert sorted(fold_state_dict(model.state_dict(), plain)) == sorted(plain.state_dict())


def test_normalized_kernels_are_refused() -> None:
    state = {"conv.theta": torch.randn(4, 3, 2, 2), "conv.r": torch.ones(4, 1, 1, 1)}
    with pytest.raises(ValueError, match=r"'conv' has a theta of shape \(4, 3, 2, 2\)"):
        fold_state_dict(state)
    pointwise = {"conv.theta": torch.randn(4, 3, 1, 1), "conv.r": torch.ones(4, 1, 1, 1)}
    assert fold_state_dict(pointwise)["conv.weight"].shape == (4, 3, 1, 1)


@pytest.mark.parametrize("first", (True, False))
@pytest.mark.parametrize("key", ("0.weight", "0.bias", "2.bias"))
@pytest.mark.parametrize("like", (None, mlp()))
def test_leftovers_of_a_plain_layer_are_refused(
    first: bool, key: str, like: nn.Module | None
) -> None:
    state, leftover = dict(trained("mlp").state_dict()), {key: torch.zeros(9)}
    with pytest.raises(ValueError, match=f"{key} stands beside .* of '{key[0]}'"):
        fold_state_dict(leftover | state if first else state | leftover, like)


def test_types_without_arithmetic_are_refused() -> None:
    state = {k: x.to(torch.float8_e4m3fn) for k, x in gp.GmPLinear(4, 3).state_dict().items()}
    with pytest.raises(ValueError, match="float32 or float64: .*float8_e4m3fn"):
        fold_state_dict(state)


@pytest.mark.parametrize(
    ("key", "folded"), [("0.latitude", "0.weight"), ("0.r", "0.weight"), ("0.lam", "0.bias")]
)
@pytest.mark.parametrize("value", (float("nan"), float("inf")))
def test_broken_numbers_are_refused(key: str, folded: str, value: float) -> None:
    state = trained("mlp").state_dict()
    state[key].view(-1)[2] = value
    with pytest.raises(ValueError, match=f"'{folded}' folds to NaN or infinite"):
        fold_state_dict(state)


def test_other_keys_than_the_plain_models_are_listed() -> None:
    state = trained("mlp").state_dict()
    state["extra.weight"] = torch.ones(2)
    with pytest.raises(ValueError, match="Unexpected: extra.weight"):
        fold_state_dict(state, mlp())
    del state["extra.weight"], state["3.weight"]
    with pytest.raises(ValueError, match="Missing: 3.weight"):
        fold_state_dict(state, mlp().state_dict())


def test_absorbed_norms_are_explained() -> None:
    model = gp.convert_(
        conv_net(), norm="imn", pretrained=True, example_inputs=torch.randn(2, 3, 8, 8)
    )
    with pytest.raises(ValueError, match=r"Missing: 1.weight.*norm='imn'.*geoparam.fold_"):
        fold_state_dict(model.state_dict(), conv_net())


def test_means_under_padding_are_refused() -> None:
    layer = gp.GmPConv2d(3, 4, 3, padding=1, input_norm=True)
    for like in (None, nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(3, 4, 3).state_dict()):
        with pytest.raises(ValueError, match="'' is a convolution that centres its input"):
            fold_state_dict(layer.state_dict(), like)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"0.r": None}, "'0' is not complete"),
        ({"0.latitude": None}, "'0' is not complete"),
        ({"0.unit": torch.ones(9, 6)}, "'0' is not complete"),
        ({"0.r": torch.ones(4)}, "'0.r' does not fit a layer of 9 units"),
        ({"0.latitude": torch.ones(9)}, "'0.latitude' does not fit"),
        ({"0.input_norm.running_mean": torch.ones(())}, "running_mean' does not fit"),
        ({"8.latitude": torch.ones(9, 5)}, "'8' is not complete"),
    ],
)
def test_incomplete_layers_are_refused(change: dict[str, Tensor | None], message: str) -> None:
    state = {**trained("mlp").state_dict(), **change}
    with pytest.raises(ValueError, match=message):
        fold_state_dict({key: x for key, x in state.items() if x is not None})


def test_wrong_architectures_are_refused() -> None:
    state = trained("mlp").state_dict()
    with pytest.raises(ValueError, match=r"'0.weight' has the shape \(9, 7\).* 6 inputs"):
        fold_state_dict(state, nn.Sequential(nn.Linear(7, 9)))
    with pytest.raises(ValueError, match="not a plain model: 0, 2 are under GmP"):
        fold_state_dict(state, state)
    with pytest.raises(ValueError, match="nothing to fold"):
        fold_state_dict(mlp().state_dict())
    for wrong in (nn.Linear(2, 2), None, {0: torch.ones(2)}):
        with pytest.raises(ValueError, match="a state_dict maps names to tensors; got a"):
            fold_state_dict(wrong)


@pytest.mark.parametrize("square", (True, False))
def test_square_weights_are_ambiguous_only_beside_transposed_ones(square: bool) -> None:
    state = gp.GmPLinear(6, 6 if square else 9).state_dict(prefix="a.")
    plain = {"a.weight": torch.ones(6, 6 if square else 9), "a.bias": torch.ones(6)}
    other = {"b.weight": torch.ones(4, 12), "b.bias": torch.ones(12)}
    if square:
        assert "a.weight" in fold_state_dict(state, plain)
        with pytest.raises(ValueError, match="'a.weight' is square.*--arch"):
            fold_state_dict({**state, **other}, {**plain, **other})
    else:
        result = fold_state_dict({**state, **other}, {**plain, **other})
        assert result["a.weight"].shape == (6, 9)
