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

every_model = pytest.mark.parametrize("name", MODELS)


def assert_folds_to(folded: dict[str, Tensor], model: nn.Module, name: str) -> None:
    """Assert that the plain model with the folded state computes what the model does."""
    build, x = MODELS[name]
    plain = build()
    plain.load_state_dict(folded)
    assert gp.verify(model, plain, x) < 1e-5


# --- state dicts --------------------------------------------------------------------------------


@pytest.mark.parametrize("coordinates", ["angles", "intrinsic"])
@every_model
def test_a_folded_state_loads_into_the_plain_model(name: str, coordinates: str) -> None:
    model = trained(name, coordinates=coordinates)
    build, _ = MODELS[name]

    folded = fold_state_dict(model.state_dict(), like=build().state_dict())

    assert_folds_to(folded, model, name)


@every_model
def test_a_state_folds_without_a_plain_one(name: str) -> None:
    model = trained(name)

    assert_folds_to(fold_state_dict(model.state_dict()), model, name)


@every_model
def test_a_state_from_a_file_of_torch_folds_without_a_plain_one(name: str, tmp_path: Path) -> None:
    model = trained(name)
    torch.save(model.state_dict(), tmp_path / "saved.pt")
    loaded = torch.load(tmp_path / "saved.pt", weights_only=True)

    assert_folds_to(fold_state_dict(loaded), model, name)


@pytest.mark.parametrize("name", sorted(set(MODELS) - {"conv_net"}))
def test_linear_layers_and_attention_fold_without_metadata(name: str) -> None:
    model = trained(name)
    without_metadata = dict(model.state_dict())

    assert_folds_to(fold_state_dict(without_metadata), model, name)


def test_metadata_of_another_layer_is_refused() -> None:
    state = gp.GmPLinear(6, 9).state_dict()
    state._metadata[""]["weight_shape"] = [9, 2, 2]

    with pytest.raises(ValueError, match="9 units with 6 inputs.*Save the state dict again"):
        fold_state_dict(state)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_weights_are_rounded_once(dtype: torch.dtype) -> None:
    state = trained("mlp").to(dtype).state_dict()
    in_double = {key: value.double() for key, value in state.items()}

    folded = fold_state_dict(state)

    for key, exact in fold_state_dict(in_double).items():
        assert folded[key].dtype == dtype
        assert torch.equal(folded[key], exact.to(dtype))


def test_other_entries_are_the_same_tensors() -> None:
    state = trained("conv_net").state_dict()

    folded = fold_state_dict(state, conv_net().state_dict())

    assert folded["1.running_var"] is state["1.running_var"]


def test_entries_have_the_order_of_the_plain_state() -> None:
    plain = conv_net().state_dict()

    folded = fold_state_dict(trained("conv_net").state_dict(), plain)

    assert list(folded) == list(plain)


def test_a_buffer_that_is_called_as_a_parameter_of_ours_is_kept() -> None:
    grid = torch.linspace(-90, 90, 5)
    state = {**trained("mlp").state_dict(), "grid.latitude": grid}

    assert fold_state_dict(state)["grid.latitude"] is grid


def test_an_input_mean_goes_into_the_bias() -> None:
    model = gp.GmPLinear(24, 5, input_norm=True)
    x = torch.randn(3, 24) + 2
    model(x)
    plain = nn.Linear(24, 5)

    plain.load_state_dict(fold_state_dict(model.state_dict()))

    assert gp.verify(model, plain, x) < 1e-5


def test_a_linear_called_in_proj_is_no_attention() -> None:
    model = nn.ModuleDict({"in_proj": gp.GmPLinear(4, 12), "out_proj": nn.Linear(12, 4)})
    plain = nn.ModuleDict({"in_proj": nn.Linear(4, 12), "out_proj": nn.Linear(12, 4)})

    folded = fold_state_dict(model.state_dict(), plain.state_dict())

    assert folded.keys() == plain.state_dict().keys()


def test_a_tied_entry_that_the_plain_state_leaves_out_is_left_out() -> None:
    plain = Tied().state_dict()
    del plain["head.weight"]

    folded = fold_state_dict(trained("Tied").state_dict(), plain)

    assert folded.keys() == plain.keys()


def test_negative_scales_are_logged_without_metadata(caplog: pytest.LogCaptureFixture) -> None:
    without_metadata = dict(trained("mlp").state_dict())

    fold_state_dict(without_metadata)

    assert "r < 0 in 0, 2: exact if the layer has no activation" in caplog.text


def test_nothing_is_logged_if_the_metadata_says_that_there_is_no_activation(
    caplog: pytest.LogCaptureFixture,
) -> None:
    fold_state_dict(trained("mlp").state_dict())

    assert not caplog.text


@pytest.mark.parametrize(
    ("activation", "r"), [(nn.GELU(), 2), (torch.tanh, 2), (nn.ReLU(), -2), (torch.relu, -2)]
)
def test_r_outside_of_an_activation_is_refused_where_no_weight_can_hold_it(
    activation: Callable, r: float
) -> None:
    layer = gp.GmPLinear(4, 3, activation=activation)
    nn.init.constant_(layer.r, r)

    with pytest.raises(ValueError, match="r outside of an activation, .* call geoparam.fold_"):
        fold_state_dict(layer.state_dict())


@pytest.mark.parametrize("activation", [nn.ReLU(), torch.relu, nn.LeakyReLU(0.3)])
def test_r_moves_through_an_activation_like_relu(activation: Callable) -> None:
    layer = gp.GmPLinear(4, 3, activation=activation)
    nn.init.constant_(layer.r, 2)
    plain = nn.Linear(4, 3)

    plain.load_state_dict(fold_state_dict(layer.state_dict()))

    _, activation_module = gp.fold_(layer)
    assert gp.verify(layer, nn.Sequential(plain, activation_module), torch.randn(5, 4)) < 1e-5


@pytest.mark.parametrize("comes_first", [True, False])
@pytest.mark.parametrize("key", ["0.weight", "0.bias", "2.bias"])
def test_leftovers_of_a_plain_layer_are_refused(comes_first: bool, key: str) -> None:
    state = dict(trained("mlp").state_dict())
    leftover = {key: torch.zeros(9)}
    both = leftover | state if comes_first else state | leftover

    with pytest.raises(ValueError, match=f"{key} stands beside .* of '{key[0]}'"):
        fold_state_dict(both)


def test_types_without_arithmetic_are_refused() -> None:
    state = gp.GmPLinear(4, 3).state_dict()
    in_eight_bits = {key: value.to(torch.float8_e4m3fn) for key, value in state.items()}

    with pytest.raises(ValueError, match="float32 or float64: .*float8_e4m3fn"):
        fold_state_dict(in_eight_bits)


@pytest.mark.parametrize(
    ("key", "folded"), [("0.latitude", "0.weight"), ("0.r", "0.weight"), ("0.lam", "0.bias")]
)
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_broken_parameters_are_refused(key: str, folded: str, value: float) -> None:
    state = trained("mlp").state_dict()
    state[key].view(-1)[2] = value

    with pytest.raises(ValueError, match=f"'{folded}' folds to NaN or infinite"):
        fold_state_dict(state)


def test_keys_that_the_plain_model_does_not_have_are_listed() -> None:
    state = {**trained("mlp").state_dict(), "extra.weight": torch.ones(2)}

    with pytest.raises(ValueError, match="Unexpected: extra.weight"):
        fold_state_dict(state, mlp().state_dict())


def test_keys_that_only_the_plain_model_has_are_listed() -> None:
    state = trained("mlp").state_dict()
    del state["3.weight"]

    with pytest.raises(ValueError, match="Missing: 3.weight"):
        fold_state_dict(state, mlp().state_dict())


def test_absorbed_norms_are_explained() -> None:
    x = torch.randn(2, 3, 8, 8)
    model = gp.convert_(conv_net(), norm="imn", pretrained=True, example_inputs=x)
    message = r"Missing: 1.weight.*has absorbed these norms.*geoparam.fold_"

    with pytest.raises(ValueError, match=message):
        fold_state_dict(model.state_dict(), conv_net().state_dict())


PLAIN_CONV = nn.Conv2d(3, 4, 3, padding=1)
CONV_INPUT = torch.randn(2, 3, 5, 5) + 1

with_and_without_a_plain_state = pytest.mark.parametrize("like", [None, PLAIN_CONV.state_dict()])


def centred_conv(input_norm: bool | str) -> nn.Module:
    """Return a padded convolution that has seen one batch."""
    layer = gp.GmPConv2d(3, 4, 3, padding=1, input_norm=input_norm)
    layer(CONV_INPUT)
    return layer


@with_and_without_a_plain_state
def test_a_padded_convolution_that_centres_its_input_folds_by_its_metadata(
    like: dict[str, Tensor] | None,
) -> None:
    layer = centred_conv(True)
    plain = copy.deepcopy(PLAIN_CONV)

    plain.load_state_dict(fold_state_dict(layer.state_dict(), like))

    assert gp.verify(layer, plain, CONV_INPUT) < 1e-5


@with_and_without_a_plain_state
def test_a_convolution_that_centres_its_borders_is_refused(like: dict[str, Tensor] | None) -> None:
    state = centred_conv("border").state_dict()

    with pytest.raises(ValueError, match="'' pads zeros to a centred input"):
        fold_state_dict(state, like)


@with_and_without_a_plain_state
def test_without_metadata_a_convolution_that_centres_its_input_is_refused(
    like: dict[str, Tensor] | None,
) -> None:
    without_metadata = dict(centred_conv(True).state_dict())

    with pytest.raises(ValueError, match="'' is a convolution that centres its input"):
        fold_state_dict(without_metadata, like)


@pytest.mark.parametrize("missing", ["0.r", "0.latitude"])
def test_layers_without_a_parameter_are_refused(missing: str) -> None:
    state = trained("mlp").state_dict()
    del state[missing]

    with pytest.raises(ValueError, match="'0' is not complete"):
        fold_state_dict(state)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("0.unit", torch.ones(9, 6), "'0' is not complete"),
        ("0.r", torch.ones(4), "'0.latitude' does not fit a layer of 4 units"),
        ("0.latitude", torch.ones(9), "'0.latitude' does not fit"),
        ("0.input_norm.running_mean", torch.ones(()), "running_mean' does not fit"),
    ],
)
def test_layers_with_parameters_that_do_not_fit_are_refused(
    key: str, value: Tensor, message: str
) -> None:
    state = trained("mlp").state_dict()
    state[key] = value

    with pytest.raises(ValueError, match=message):
        fold_state_dict(state)


def test_a_plain_model_of_other_shapes_is_refused() -> None:
    plain = nn.Sequential(nn.Linear(7, 9)).state_dict()

    with pytest.raises(ValueError, match=r"'0.weight' has the shape \(9, 7\).* 6 inputs"):
        fold_state_dict(trained("mlp").state_dict(), plain)


def test_a_converted_model_is_refused_as_the_plain_one() -> None:
    state = trained("mlp").state_dict()

    with pytest.raises(ValueError, match="not a plain model: 0, 2 are under GmP"):
        fold_state_dict(state, state)


def test_a_plain_state_has_nothing_to_fold() -> None:
    with pytest.raises(ValueError, match="nothing to fold"):
        fold_state_dict(mlp().state_dict())


@pytest.mark.parametrize("wrong", [nn.Linear(2, 2), None, {0: torch.ones(2)}])
def test_what_is_no_state_dict_is_refused(wrong: object) -> None:
    with pytest.raises(ValueError, match="a state dict maps names to tensors; got a"):
        fold_state_dict(wrong)


# transformers' Conv1D holds its weight transposed.
TRANSPOSED = {"b.weight": torch.ones(4, 12), "b.bias": torch.ones(12)}


def test_transposed_weights_are_known_by_their_shape() -> None:
    state = gp.GmPLinear(6, 9).state_dict(prefix="a.")
    plain = {"a.weight": torch.ones(6, 9), "a.bias": torch.ones(9)}

    folded = fold_state_dict({**state, **TRANSPOSED}, {**plain, **TRANSPOSED})

    assert torch.equal(folded["a.weight"], fold_state_dict(state)["a.weight"].t())


def test_square_weights_are_ambiguous_beside_transposed_ones() -> None:
    state = gp.GmPLinear(6, 6).state_dict(prefix="a.")
    plain = {"a.weight": torch.ones(6, 6), "a.bias": torch.ones(6)}

    with pytest.raises(ValueError, match="'a.weight' is square.*geoparam.fold_"):
        fold_state_dict({**state, **TRANSPOSED}, {**plain, **TRANSPOSED})


def test_square_weights_alone_are_not_ambiguous() -> None:
    state = gp.GmPLinear(6, 6).state_dict(prefix="a.")
    plain = {"a.weight": torch.ones(6, 6), "a.bias": torch.ones(6)}

    assert fold_state_dict(state, plain).keys() == plain.keys()


# --- files --------------------------------------------------------------------------------------


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "out.safetensors"


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """Return the file of a converted MLP."""
    return save(trained("mlp"), tmp_path / "gmp.safetensors")


def save(model: nn.Module, file: Path) -> Path:
    files.save_model(model, str(file))
    return file


@every_model
def test_a_folded_file_loads_into_the_plain_model(name: str, tmp_path: Path, out: Path) -> None:
    model = trained(name)
    build, _ = MODELS[name]
    checkpoint = save(model, tmp_path / "gmp.safetensors")
    plain = save(build(), tmp_path / "plain.safetensors")

    fold_file(checkpoint, out, like=plain)

    assert_folds_to(files.load_file(out), model, name)


def test_transformers_loads_a_folded_file(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.BertConfig(
        vocab_size=40,
        hidden_size=12,
        intermediate_size=20,
        num_hidden_layers=1,
        num_attention_heads=2,
    )
    plain = transformers.BertModel(config).eval()
    plain.save_pretrained(tmp_path / "plain")
    model = gp.convert_(copy.deepcopy(plain))
    checkpoint = save(model, tmp_path / "gmp.safetensors")

    folded = tmp_path / "plain" / "model.safetensors"
    fold_file(checkpoint, folded, like=folded, force=True)

    loaded = transformers.BertModel.from_pretrained(tmp_path / "plain")
    assert gp.verify(model, loaded, {"input_ids": torch.arange(8).view(1, 8)}) < 1e-5


def test_torch_files_are_refused_with_the_way_out(tmp_path: Path, out: Path) -> None:
    torch.save(trained("mlp").state_dict(), tmp_path / "gmp.pt")

    with pytest.raises(ValueError, match=r"only safetensors .*safetensors.torch.save_model"):
        fold_file(tmp_path / "gmp.pt", out)


@pytest.mark.parametrize("share", [0.5, 0.01, 0])
def test_damaged_files_are_refused(share: float, checkpoint: Path, out: Path) -> None:
    content = checkpoint.read_bytes()
    size = int(share * len(content))
    checkpoint.write_bytes(content[:size])

    with pytest.raises(ValueError, match="gmp.safetensors is damaged or no safetensors file"):
        fold_file(checkpoint, out)
    assert not out.exists()


def test_a_missing_file_is_named(tmp_path: Path, out: Path) -> None:
    with pytest.raises(ValueError, match="nowhere.safetensors does not exist"):
        fold_file(tmp_path / "nowhere.safetensors", out)


def test_nothing_is_overwritten_unasked(checkpoint: Path, out: Path) -> None:
    out.write_text("precious")

    with pytest.raises(FileExistsError, match="--force"):
        fold_file(checkpoint, out)
    assert out.read_text() == "precious"


def test_force_overwrites_a_file(checkpoint: Path, out: Path) -> None:
    out.write_text("outdated")

    fold_file(checkpoint, out, force=True)

    assert files.load_file(out)


def test_the_checkpoint_itself_is_not_overwritten(checkpoint: Path) -> None:
    with pytest.raises(ValueError, match="the checkpoint itself"):
        fold_file(checkpoint, checkpoint, force=True)


def test_the_result_is_a_safetensors_file(checkpoint: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="NAME.safetensors"):
        fold_file(checkpoint, tmp_path / "out.pt")


def test_a_failed_write_leaves_the_old_file(
    checkpoint: Path, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fill_disk(tensors: object, path: Path, metadata: object) -> None:
        path.write_text("half of it")
        raise SafetensorError("No space left on device")

    monkeypatch.setattr(files, "save_file", fill_disk)
    out.write_text("precious")

    with pytest.raises(OSError, match="No space left"):
        fold_file(checkpoint, out, force=True)

    assert out.read_text() == "precious"
    assert set(out.parent.iterdir()) == {checkpoint, out}
