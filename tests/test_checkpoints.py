"""A folded checkpoint is the plain model's, and whatever cannot be folded is refused."""

import copy
from collections.abc import Callable
from pathlib import Path

import pytest
import safetensors.torch as files
import torch
from checkpoint_models import MODELS, Tied, conv_net, mlp, trained
from safetensors import SafetensorError
from torch import Tensor, nn

import geoparam as gp
from geoparam.checkpoints import fold_file, fold_state_dict

# --- state dicts --------------------------------------------------------------------------------


@pytest.mark.parametrize("coordinates", ("angles", "intrinsic"))
@pytest.mark.parametrize("name", MODELS)
def test_a_folded_state_loads_into_the_plain_model(name: str, coordinates: str) -> None:
    make, x = MODELS[name]
    model, plain = trained(name, coordinates=coordinates), make()
    plain.load_state_dict(fold_state_dict(model.state_dict(), like=plain.state_dict()))
    assert gp.verify(model, plain, x) < 1e-5


@pytest.mark.parametrize("name", MODELS)
def test_a_state_folds_without_a_plain_one(name: str, tmp_path: Path) -> None:
    make, x = MODELS[name]
    model, plain = trained(name), make()
    torch.save(model.state_dict(), tmp_path / "saved.pt")
    for state in (model.state_dict(), torch.load(tmp_path / "saved.pt", weights_only=True)):
        plain.load_state_dict(fold_state_dict(state))
        assert gp.verify(model, plain, x) < 1e-5


@pytest.mark.parametrize("name", sorted(set(MODELS) - {"conv_net"}))
def test_linear_layers_and_attention_fold_without_metadata(name: str) -> None:
    make, x = MODELS[name]
    model, plain = trained(name), make()
    plain.load_state_dict(fold_state_dict(dict(model.state_dict())))
    assert gp.verify(model, plain, x) < 1e-5


def test_metadata_of_another_layer_is_refused() -> None:
    state = gp.GmPLinear(6, 9).state_dict()
    state._metadata[""]["weight_shape"] = [9, 2, 2]
    with pytest.raises(ValueError, match="9 units with 6 inputs.*Save the state dict again"):
        fold_state_dict(state)


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16, torch.float64))
def test_weights_are_rounded_once(dtype: torch.dtype) -> None:
    state = trained("mlp").to(dtype).state_dict()
    exact = fold_state_dict({key: x.double() for key, x in state.items()})
    for key, x in fold_state_dict(state).items():
        assert x.dtype == dtype
        assert torch.equal(x, exact[key].to(dtype))


def test_other_entries_are_the_same_tensors() -> None:
    state = trained("conv_net").state_dict()
    result = fold_state_dict(state, conv_net().state_dict())
    assert result["1.running_var"] is state["1.running_var"]
    assert list(result) == list(conv_net().state_dict())


def test_a_buffer_that_is_called_as_a_parameter_of_ours_is_kept() -> None:
    grid = torch.linspace(-90, 90, 5)
    state = {**trained("mlp").state_dict(), "grid.latitude": grid}
    assert fold_state_dict(state)["grid.latitude"] is grid


def test_an_input_mean_goes_into_the_bias() -> None:
    model, x = gp.GmPLinear(24, 5, input_norm=True), torch.randn(3, 24) + 2
    model(x)
    plain = nn.Linear(24, 5)
    plain.load_state_dict(fold_state_dict(model.state_dict()))
    assert gp.verify(model, plain, x) < 1e-5


def test_a_linear_called_in_proj_is_no_attention() -> None:
    model = nn.ModuleDict({"in_proj": gp.GmPLinear(4, 12), "out_proj": nn.Linear(12, 4)})
    plain = nn.ModuleDict({"in_proj": nn.Linear(4, 12), "out_proj": nn.Linear(12, 4)})
    result = fold_state_dict(model.state_dict(), plain.state_dict())
    assert result.keys() == plain.state_dict().keys()


def test_a_tied_entry_that_the_plain_state_leaves_out_is_left_out() -> None:
    plain = {key: x for key, x in Tied().state_dict().items() if key != "head.weight"}
    assert fold_state_dict(trained("Tied").state_dict(), plain).keys() == plain.keys()


def test_negative_scales_are_told_of(caplog: pytest.LogCaptureFixture) -> None:
    state = trained("mlp").state_dict()
    fold_state_dict(state)
    assert not caplog.text  # the metadata says that there is no activation
    fold_state_dict(dict(state))
    assert "r < 0 in 0, 2: exact if the layer has no activation" in caplog.text


@pytest.mark.parametrize(
    ("activation", "sign"), [(nn.GELU(), 1), (torch.tanh, 1), (nn.ReLU(), -1), (torch.relu, -1)]
)
def test_r_outside_of_an_activation_is_refused_where_no_weight_can_hold_it(
    activation: Callable, sign: int
) -> None:
    layer = gp.GmPLinear(4, 3, activation=activation)
    layer.r.data.mul_(2 * sign)
    with pytest.raises(ValueError, match="r outside of an activation, .* call geoparam.fold_"):
        fold_state_dict(layer.state_dict())


@pytest.mark.parametrize("activation", [nn.ReLU(), torch.relu, nn.LeakyReLU(0.3)])
def test_r_moves_through_an_activation_like_relu(activation: Callable) -> None:
    layer, plain = gp.GmPLinear(4, 3, activation=activation), nn.Linear(4, 3)
    layer.r.data.mul_(2)
    plain.load_state_dict(fold_state_dict(layer.state_dict()))
    assert gp.verify(layer, nn.Sequential(plain, gp.fold_(layer)[1]), torch.randn(5, 4)) < 1e-5


@pytest.mark.parametrize("first", (True, False))
@pytest.mark.parametrize("key", ("0.weight", "0.bias", "2.bias"))
def test_leftovers_of_a_plain_layer_are_refused(first: bool, key: str) -> None:
    state, leftover = dict(trained("mlp").state_dict()), {key: torch.zeros(9)}
    with pytest.raises(ValueError, match=f"{key} stands beside .* of '{key[0]}'"):
        fold_state_dict(leftover | state if first else state | leftover)


def test_types_without_arithmetic_are_refused() -> None:
    state = {k: x.to(torch.float8_e4m3fn) for k, x in gp.GmPLinear(4, 3).state_dict().items()}
    with pytest.raises(ValueError, match="float32 or float64: .*float8_e4m3fn"):
        fold_state_dict(state)


@pytest.mark.parametrize(
    ("key", "folded"), [("0.latitude", "0.weight"), ("0.r", "0.weight"), ("0.lam", "0.bias")]
)
@pytest.mark.parametrize("value", (float("nan"), float("inf")))
def test_broken_parameters_are_refused(key: str, folded: str, value: float) -> None:
    state = trained("mlp").state_dict()
    state[key].view(-1)[2] = value
    with pytest.raises(ValueError, match=f"'{folded}' folds to NaN or infinite"):
        fold_state_dict(state)


def test_other_keys_than_the_plain_models_are_listed() -> None:
    state, plain = trained("mlp").state_dict(), mlp().state_dict()
    with pytest.raises(ValueError, match="Unexpected: extra.weight"):
        fold_state_dict({**state, "extra.weight": torch.ones(2)}, plain)
    del state["3.weight"]
    with pytest.raises(ValueError, match="Missing: 3.weight"):
        fold_state_dict(state, plain)


def test_absorbed_norms_are_explained() -> None:
    x = torch.randn(2, 3, 8, 8)
    model = gp.convert_(conv_net(), norm="imn", pretrained=True, example_inputs=x)
    with pytest.raises(
        ValueError, match=r"Missing: 1.weight.*has absorbed these norms.*geoparam.fold_"
    ):
        fold_state_dict(model.state_dict(), conv_net().state_dict())


PADDED = nn.Conv2d(3, 4, 3, padding=1)


def centred_conv(form: bool | str) -> tuple[nn.Module, torch.Tensor]:
    layer, x = gp.GmPConv2d(3, 4, 3, padding=1, input_norm=form), torch.randn(2, 3, 5, 5) + 1
    layer(x)
    return layer, x


@pytest.mark.parametrize("like", (None, PADDED.state_dict()))
def test_a_padded_convolution_that_centres_its_input_folds_by_its_metadata(like) -> None:  # noqa: ANN001
    layer, x = centred_conv(True)
    plain = copy.deepcopy(PADDED)
    plain.load_state_dict(fold_state_dict(layer.state_dict(), like))
    assert gp.verify(layer, plain, x) < 1e-5


@pytest.mark.parametrize("like", (None, PADDED.state_dict()))
def test_convolutions_that_may_centre_their_borders_are_refused(like) -> None:  # noqa: ANN001
    with pytest.raises(ValueError, match="'' pads zeros to a centred input"):
        fold_state_dict(centred_conv("border")[0].state_dict(), like)
    with pytest.raises(ValueError, match="'' is a convolution that centres its input"):
        fold_state_dict(dict(centred_conv(True)[0].state_dict()), like)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"0.r": None}, "'0' is not complete"),
        ({"0.latitude": None}, "'0' is not complete"),
        ({"0.unit": torch.ones(9, 6)}, "'0' is not complete"),
        ({"0.r": torch.ones(4)}, "'0.latitude' does not fit a layer of 4 units"),
        ({"0.latitude": torch.ones(9)}, "'0.latitude' does not fit"),
        ({"0.input_norm.running_mean": torch.ones(())}, "running_mean' does not fit"),
    ],
)
def test_incomplete_layers_are_refused(change: dict[str, Tensor | None], message: str) -> None:
    state = {**trained("mlp").state_dict(), **change}
    with pytest.raises(ValueError, match=message):
        fold_state_dict({key: x for key, x in state.items() if x is not None})


def test_wrong_plain_models_are_refused() -> None:
    state = trained("mlp").state_dict()
    with pytest.raises(ValueError, match=r"'0.weight' has the shape \(9, 7\).* 6 inputs"):
        fold_state_dict(state, nn.Sequential(nn.Linear(7, 9)).state_dict())
    with pytest.raises(ValueError, match="not a plain model: 0, 2 are under GmP"):
        fold_state_dict(state, state)


def test_a_plain_state_has_nothing_to_fold() -> None:
    with pytest.raises(ValueError, match="nothing to fold"):
        fold_state_dict(mlp().state_dict())


@pytest.mark.parametrize("wrong", (nn.Linear(2, 2), None, {0: torch.ones(2)}))
def test_what_is_no_state_dict_is_refused(wrong: object) -> None:
    with pytest.raises(ValueError, match="a state dict maps names to tensors; got a"):
        fold_state_dict(wrong)


TRANSPOSED = {"b.weight": torch.ones(4, 12), "b.bias": torch.ones(12)}  # transformers' Conv1D


def test_transposed_weights_are_known_by_their_shape() -> None:
    state = gp.GmPLinear(6, 9).state_dict(prefix="a.")
    plain = {"a.weight": torch.ones(6, 9), "a.bias": torch.ones(9)}
    result = fold_state_dict({**state, **TRANSPOSED}, {**plain, **TRANSPOSED})
    assert torch.equal(result["a.weight"], fold_state_dict(state)["a.weight"].t())


def test_square_weights_are_ambiguous_beside_transposed_ones() -> None:
    state = gp.GmPLinear(6, 6).state_dict(prefix="a.")
    plain = {"a.weight": torch.ones(6, 6), "a.bias": torch.ones(6)}
    assert "a.weight" in fold_state_dict(state, plain)
    with pytest.raises(ValueError, match="'a.weight' is square.*geoparam.fold_"):
        fold_state_dict({**state, **TRANSPOSED}, {**plain, **TRANSPOSED})


# --- files --------------------------------------------------------------------------------------


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "out.safetensors"


def save(model: nn.Module, file: Path) -> Path:
    files.save_model(model, str(file))
    return file


@pytest.mark.parametrize("name", MODELS)
def test_a_folded_file_loads_into_the_plain_model(name: str, tmp_path: Path, out: Path) -> None:
    make, x = MODELS[name]
    model, plain = trained(name), make()
    like = save(plain, tmp_path / "plain.safetensors")
    fold_file(save(model, tmp_path / "gmp.safetensors"), out, like=like)
    plain.load_state_dict(files.load_file(out))
    assert gp.verify(model, plain, x) < 1e-5


def test_transformers_loads_a_folded_file(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 12, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = transformers.BertConfig(vocab_size=40, intermediate_size=20, **sizes)
    plain = transformers.BertModel(config).eval()
    plain.save_pretrained(tmp_path / "plain")
    model = gp.convert_(copy.deepcopy(plain))

    folded = tmp_path / "plain" / "model.safetensors"
    file = save(model, tmp_path / "gmp.safetensors")
    fold_file(file, folded, like=folded, force=True)
    loaded = transformers.BertModel.from_pretrained(tmp_path / "plain")
    assert gp.verify(model, loaded, {"input_ids": torch.arange(8).view(1, 8)}) < 1e-5


def test_torch_files_are_refused_with_the_way_out(tmp_path: Path, out: Path) -> None:
    torch.save(trained("mlp").state_dict(), tmp_path / "gmp.pt")
    with pytest.raises(ValueError, match=r"only safetensors .*safetensors.torch.save_model"):
        fold_file(tmp_path / "gmp.pt", out)


@pytest.mark.parametrize("share", (0.5, 0.01, 0))
def test_damaged_files_are_refused(share: float, tmp_path: Path, out: Path) -> None:
    file = save(trained("mlp"), tmp_path / "gmp.safetensors")
    whole = file.read_bytes()
    file.write_bytes(whole[: int(share * len(whole))])
    with pytest.raises(ValueError, match="gmp.safetensors is damaged or no safetensors file"):
        fold_file(file, out)
    assert not out.exists()


def test_a_missing_file_is_named(tmp_path: Path, out: Path) -> None:
    with pytest.raises(ValueError, match="nowhere.safetensors does not exist"):
        fold_file(tmp_path / "nowhere.safetensors", out)


def test_nothing_is_overwritten_unasked(tmp_path: Path, out: Path) -> None:
    file = save(trained("mlp"), tmp_path / "gmp.safetensors")
    out.write_text("precious")
    with pytest.raises(FileExistsError, match="--force"):
        fold_file(file, out)
    assert out.read_text() == "precious"
    fold_file(file, out, force=True)
    assert files.load_file(out)


def test_the_result_is_another_safetensors_file(tmp_path: Path) -> None:
    file = save(trained("mlp"), tmp_path / "gmp.safetensors")
    with pytest.raises(ValueError, match="the checkpoint itself"):
        fold_file(file, file, force=True)
    with pytest.raises(ValueError, match="NAME.safetensors"):
        fold_file(file, tmp_path / "out.pt")


def test_a_failed_write_leaves_the_old_file(
    tmp_path: Path, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = save(trained("mlp"), tmp_path / "gmp.safetensors")
    out.write_text("precious")

    def fill_disk(tensors: object, path: Path, metadata: object) -> None:
        path.write_text("half of it")
        raise SafetensorError("No space left on device")

    monkeypatch.setattr(files, "save_file", fill_disk)
    with pytest.raises(OSError, match="No space left"):
        fold_file(file, out, force=True)
    assert out.read_text() == "precious"
    assert sorted(path.name for path in tmp_path.iterdir()) == [file.name, out.name]
