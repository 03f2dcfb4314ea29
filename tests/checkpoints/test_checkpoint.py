"""Folded checkpoint files load into the plain model, and whatever cannot be folded is refused."""

import copy
import json
import pickle
import re
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
import safetensors.torch as files
import torch
from safetensors import SafetensorError
from torch import Tensor, nn

import geoparam as gp
from geoparam.checkpoints.checkpoint_files import build, fold_checkpoint
from geoparam.checkpoints.state_dicts import fold_state_dict

# --- models -----------------------------------------------------------------------------------


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 9), nn.ReLU(), nn.Linear(9, 9, bias=False), nn.Linear(9, 3))


def narrow() -> nn.Module:
    return nn.Sequential(nn.Linear(1, 8), nn.ReLU(), nn.Linear(8, 3))


def conv_net() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1, bias=False),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.Conv2d(8, 8, 3, groups=4, stride=2),
        nn.Conv2d(8, 4, 1),
        nn.Flatten(),
        nn.Linear(36, 5),
    )


class Attends(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(12, 3, batch_first=True)
        self.head = nn.Linear(12, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.attention(x, x, x)[0])


class Tied(nn.Module):
    """An embedding that is also the output layer, and one hidden layer."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 6)
        self.hidden = nn.Linear(6, 6)
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, index: Tensor) -> Tensor:
        return self.head(self.hidden(self.embedding(index)).relu())


MODELS: dict[str, tuple[Callable[[], nn.Module], Tensor]] = {
    "mlp": (mlp, torch.randn(4, 6)),
    "narrow": (narrow, torch.randn(4, 1)),
    "conv_net": (conv_net, torch.randn(2, 3, 8, 8)),
    "Attends": (Attends, torch.randn(2, 5, 12)),
    "Tied": (Tied, torch.arange(8).view(2, 4)),
}


def trained(name: str, **options: object) -> nn.Module:
    """A converted model after a few steps, some of its scales negative."""
    make, x = MODELS[name]
    model = gp.convert_(make(), **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for _ in range(3):
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if key.endswith(".r"):
                parameter[0].neg_()
    return model


def difference(name: str, model: nn.Module, file: Path) -> float:
    """Load the folded file into an untouched copy of the architecture, and compare outputs."""
    make, x = MODELS[name]
    plain = make()
    plain.load_state_dict(files.load_file(file))
    return gp.verify(model, plain, x)


def save(model: nn.Module, file: Path) -> Path:
    files.save_model(model, str(file))
    return file


# --- round trips ------------------------------------------------------------------------------


@pytest.mark.parametrize("plain", ("arch", "like"))
@pytest.mark.parametrize("coordinates", ("angles", "intrinsic"))
@pytest.mark.parametrize("name", MODELS)
def test_folded_file_loads_into_the_plain_model(
    name: str, coordinates: str, plain: str, tmp_path: Path
) -> None:
    model = trained(name, coordinates=coordinates)
    file = save(model, tmp_path / "gmp.safetensors")
    given = {"arch": f"test_checkpoint:{name}"}
    if plain == "like":
        torch.save(MODELS[name][0]().state_dict(), tmp_path / "plain.pt")
        given = {"like": tmp_path / "plain.pt"}
    report = fold_checkpoint(file, tmp_path / "out.safetensors", **given)
    assert difference(name, model, report.out) < 1e-5
    assert report.layers == sum(isinstance(m, gp.GmPLayer) for m in model.modules())


@pytest.mark.parametrize("name", ("mlp", "narrow", "Attends", "Tied"))
def test_without_convolutions_the_file_is_enough(name: str, tmp_path: Path) -> None:
    model = trained(name)
    file, out = save(model, tmp_path / "gmp.safetensors"), tmp_path / "out.safetensors"
    report = fold_checkpoint(file, out, linear=True)
    assert difference(name, model, report.out) < 1e-5


@pytest.mark.parametrize("name", MODELS)
def test_nothing_is_written_while_the_shapes_are_unknown(name: str, tmp_path: Path) -> None:
    file, out = save(trained(name), tmp_path / "gmp.safetensors"), tmp_path / "out.safetensors"
    with pytest.raises(ValueError, match="is a convolution.*--arch or --like; or say --linear"):
        fold_checkpoint(file, out)
    assert not out.exists()
    fold_checkpoint(file, out, arch=f"test_checkpoint:{name}")  # no --force is needed


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


# --- what files look like ---------------------------------------------------------------------


def wrapped(kind: str, state: dict[str, Tensor]) -> dict:
    prefixes = {"ddp": "module.", "compile": "_orig_mod.", "both": "module._orig_mod."}
    if kind in prefixes:
        return {prefixes[kind] + key: x for key, x in state.items()}
    return {kind: state, "epoch": 3, "optimizer": {"state": {}}}


@pytest.mark.parametrize(
    "kind", ("ddp", "compile", "both", "state_dict", "model", "model_state_dict", "module")
)
@pytest.mark.parametrize("zipped", (True, False))
def test_torch_files_and_wrappers(kind: str, zipped: bool, tmp_path: Path) -> None:
    model = trained("mlp")
    file = tmp_path / "gmp.pt"
    torch.save(wrapped(kind, model.state_dict()), file, _use_new_zipfile_serialization=zipped)
    report = fold_checkpoint(file, tmp_path / "out.safetensors", linear=True)
    assert difference("mlp", model, report.out) < 1e-5


def test_prefix_takes_a_part(tmp_path: Path) -> None:
    model = trained("mlp")
    averaged = torch.optim.swa_utils.AveragedModel(model)
    torch.save(averaged.state_dict(), tmp_path / "ema.pt")
    out = tmp_path / "out.safetensors"
    report = fold_checkpoint(tmp_path / "ema.pt", out, prefix="module", linear=True)
    assert difference("mlp", model, out) < 1e-5
    assert any("outside 'module.' are left out" in note for note in report.notes)
    with pytest.raises(ValueError, match="they begin with module., n_averaged."):
        fold_checkpoint(tmp_path / "ema.pt", out, prefix="net", force=True)


def sharded(state: dict[str, Tensor], folder: Path) -> Path:
    names = {key: f"model-{i % 2}.safetensors" for i, key in enumerate(state)}
    for name in set(names.values()):
        part = {key: x for key, x in state.items() if names[key] == name}
        files.save_file(part, folder / name)
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": names}))
    return index


@pytest.mark.parametrize("as_folder", (True, False))
def test_sharded_checkpoint(as_folder: bool, tmp_path: Path) -> None:
    model = trained("mlp")
    index = sharded(model.state_dict(), tmp_path)
    report = fold_checkpoint(
        tmp_path if as_folder else index, tmp_path / "out.safetensors", linear=True
    )
    assert difference("mlp", model, report.out) < 1e-5


def test_a_tied_entry_that_the_plain_file_leaves_out_is_left_out(tmp_path: Path) -> None:
    model = trained("Tied")
    torch.save(model.state_dict(), tmp_path / "gmp.pt")
    plain = {k: x for k, x in Tied().state_dict().items() if k != "head.weight"}
    files.save_file(plain, tmp_path / "model.safetensors")
    out = tmp_path / "out.safetensors"
    report = fold_checkpoint(tmp_path / "gmp.pt", out, like=tmp_path)
    assert "head.weight" not in files.load_file(out)
    assert any("head.weight is left out" in note for note in report.notes)


# --- the CLIP project's files -----------------------------------------------------------------


def test_weight_normalization_is_folded_and_named(tmp_path: Path) -> None:
    theta, r = torch.randn(8, 6), torch.randn(8, 1)
    state = {
        "c_fc.theta": theta,
        "c_fc.r": r,
        "c_fc.bias": torch.randn(8),
        "scale": torch.ones(()),
    }
    torch.save(state, tmp_path / "clip.pt")
    out = tmp_path / "out.safetensors"
    report = fold_checkpoint(tmp_path / "clip.pt", out)
    result = files.load_file(out)
    assert sorted(result) == ["c_fc.bias", "c_fc.weight", "scale"]
    torch.testing.assert_close(result["c_fc.weight"], r * nn.functional.normalize(theta, dim=1))
    assert any("weight normalization, not geometric" in note for note in report.notes)


def test_normalized_kernels_are_refused() -> None:
    state = {"conv.theta": torch.randn(4, 3, 2, 2), "conv.r": torch.ones(4, 1, 1, 1)}
    with pytest.raises(ValueError, match=r"'conv' has a theta of shape \(4, 3, 2, 2\)"):
        fold_state_dict(state)
    pointwise = {"conv.theta": torch.randn(4, 3, 1, 1), "conv.r": torch.ones(4, 1, 1, 1)}
    assert fold_state_dict(pointwise)["conv.weight"].shape == (4, 3, 1, 1)


# --- refusals ---------------------------------------------------------------------------------


class Bomb:
    """Unpickling it would fail the test."""

    def __reduce__(self) -> tuple:
        return pytest.fail, ("unpickled",)


def test_pickled_modules_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "1")
    torch.save(mlp(), tmp_path / "whole.pt")
    torch.save({"state_dict": mlp().state_dict(), "args": Bomb()}, tmp_path / "bomb.pt")
    (tmp_path / "bare.pt").write_bytes(pickle.dumps(Bomb()))
    for name in ("whole", "bomb", "bare"):
        with pytest.raises(ValueError, match="export its state_dict"):
            fold_checkpoint(tmp_path / f"{name}.pt", tmp_path / "out.safetensors")


@pytest.mark.parametrize("suffix", (".safetensors", ".pt"))
def test_damaged_files_are_refused(suffix: str, tmp_path: Path) -> None:
    file = tmp_path / f"gmp{suffix}"
    if suffix == ".pt":
        torch.save(trained("mlp").state_dict(), file)
    else:
        save(trained("mlp"), file)
    whole = file.read_bytes()
    for damaged in (whole[: len(whole) // 2], whole[:5], b"", b"some text, no tensors at all"):
        file.write_bytes(damaged)
        with pytest.raises(ValueError, match=re.escape(str(file))):
            fold_checkpoint(file, tmp_path / "out.safetensors", linear=True)
    assert not (tmp_path / "out.safetensors").exists()


def test_compressed_torch_files_are_read_as_torch_reads_them(tmp_path: Path) -> None:
    model = trained("mlp")
    torch.save(model.state_dict(), tmp_path / "whole.pt")
    with zipfile.ZipFile(tmp_path / "whole.pt") as old:
        with zipfile.ZipFile(tmp_path / "small.pt", "w", zipfile.ZIP_DEFLATED) as new:
            for entry in old.infolist():
                new.writestr(entry.filename, old.read(entry))
    report = fold_checkpoint(tmp_path / "small.pt", tmp_path / "out.safetensors", linear=True)
    assert difference("mlp", model, report.out) < 1e-5


def test_a_flipped_bit_fails_its_checksum(tmp_path: Path) -> None:
    state, file = trained("mlp").state_dict(), tmp_path / "gmp.pt"
    torch.save(state, file)
    content = bytearray(file.read_bytes())
    content[content.index(state["0.r"].numpy().tobytes()) + 3] ^= 0x40
    file.write_bytes(content)
    with pytest.raises(ValueError, match="gmp.pt is a damaged archive: .* fails its checksum"):
        fold_checkpoint(file, tmp_path / "out.safetensors", linear=True)


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


def test_a_file_without_entries_is_refused(tmp_path: Path) -> None:
    files.save_file({}, tmp_path / "empty.safetensors")
    with pytest.raises(ValueError, match="empty.safetensors holds no tensors"):
        fold_checkpoint(tmp_path / "empty.safetensors", tmp_path / "out.safetensors")


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


def test_nothing_is_overwritten_unasked(tmp_path: Path) -> None:
    file = save(trained("mlp"), tmp_path / "gmp.safetensors")
    out = tmp_path / "out.safetensors"
    out.write_text("precious")
    with pytest.raises(FileExistsError, match="--force"):
        fold_checkpoint(file, out, linear=True)
    assert out.read_text() == "precious"
    fold_checkpoint(file, out, linear=True, force=True)
    assert files.load_file(out)
    with pytest.raises(ValueError, match="the checkpoint itself"):
        fold_checkpoint(file, file, force=True)
    with pytest.raises(ValueError, match="NAME.safetensors"):
        fold_checkpoint(file, tmp_path / "out.pt")


def test_a_failed_write_leaves_the_old_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = save(trained("mlp"), tmp_path / "gmp.safetensors")
    out = tmp_path / "out.safetensors"
    out.write_text("precious")

    def full(tensors: object, path: Path, metadata: object) -> None:
        path.write_text("half of it")
        raise SafetensorError("No space left on device")

    monkeypatch.setattr(files, "save_file", full)
    with pytest.raises(OSError, match="No space left"):
        fold_checkpoint(file, out, linear=True, force=True)
    assert out.read_text() == "precious"
    assert sorted(path.name for path in tmp_path.iterdir()) == [file.name, out.name]


def within_itself() -> dict:
    state: dict = {}
    state["model"] = state
    return state


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"epoch": 3}, "holds no state_dict"),
        ([torch.ones(2)], "holds no state_dict"),
        ({"model": {"a": torch.ones(1)}, "module": {"a": torch.ones(1)}}, "several state_dicts"),
        (within_itself(), "holds no state_dict"),
        ({"a": torch.ones(2, 2).to_sparse()}, "cannot: sparse.*: a"),
        ({"a": torch.ones(2, device="meta")}, "cannot: .*: a"),
        ({"a": torch.ones(1).expand(2**40)}, "expanded to more than they store: a"),
    ],
)
def test_files_without_one_state_dict(content: object, message: str, tmp_path: Path) -> None:
    torch.save(content, tmp_path / "gmp.pt")
    with pytest.raises(ValueError, match=message):
        fold_checkpoint(tmp_path / "gmp.pt", tmp_path / "out.safetensors", linear=True)


def test_broken_indices_and_folders(tmp_path: Path) -> None:
    index = sharded(trained("mlp").state_dict(), tmp_path)
    (tmp_path / "model-1.safetensors").unlink()
    for content, message in (
        (index.read_text(), "not beside it: model-1.safetensors"),
        ('{"weight_map": {"a": "../model-0.safetensors"}}', "not beside it"),
        ("[]", "index.json is damaged: it holds no dict"),
        ("{", "index.json is damaged"),
        ('{"a":' * 100_000 + "1" + "}" * 100_000, "index.json is damaged: nested"),
        ("{}", "is no index"),
        ('{"weight_map": {"a": 3}}', "is no index"),
    ):
        index.write_text(content)
        with pytest.raises(ValueError, match=message):
            fold_checkpoint(tmp_path, tmp_path / "out.safetensors")
    index.unlink()
    with pytest.raises(ValueError, match="holds none of"):
        fold_checkpoint(tmp_path, tmp_path / "out.safetensors")
    with pytest.raises(ValueError, match="does not exist"):
        fold_checkpoint(tmp_path / "nowhere.safetensors", tmp_path / "out.safetensors")


# --- architectures ----------------------------------------------------------------------------


def reads_values() -> nn.Module:
    return nn.Linear(int(torch.tensor(3).item()), 2)


def needs_arguments(width: int) -> nn.Module:
    return nn.Linear(width, 2)


def test_architectures_are_built_without_memory() -> None:
    assert next(build("test_checkpoint:conv_net").parameters()).is_meta
    assert build("test_checkpoint:reads_values").weight.shape == (2, 3)


@pytest.mark.parametrize(
    ("arch", "message"),
    [
        ("resnet50", "--arch is torchvision:NAME"),
        ("no_such_package:model", "is not there: No module named 'no_such_package'"),
        ("test_checkpoint:no_such", "is not there"),
        ("test_checkpoint:needs_arguments", "fails: TypeError"),
        ("test_checkpoint:MODELS", "fails: TypeError"),
        ("builtins:dict", "gives a dict"),
    ],
)
def test_unknown_architectures(arch: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build(arch)


@pytest.mark.parametrize("name", ("resnet18", "fcn_resnet50"))
def test_torchvision_architecture(name: str) -> None:
    pytest.importorskip("torchvision")
    model = build(f"torchvision:{name}")
    assert next(model.parameters()).is_meta
    with pytest.raises(ValueError, match="has no model 'no_such'"):
        build("torchvision:no_such")


def test_gpt2_with_its_transposed_weights(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(
        vocab_size=40, n_positions=16, n_embd=12, n_layer=2, n_head=2, use_cache=False
    )
    plain = transformers.GPT2LMHeadModel(config).eval()
    plain.save_pretrained(tmp_path / "plain")
    model = gp.convert_(copy.deepcopy(plain))
    x = {"input_ids": torch.arange(8).view(1, 8)}
    file = save(model, tmp_path / "gmp.safetensors")
    with pytest.raises(ValueError, match="attn.c_proj.weight' is square"):
        fold_checkpoint(file, tmp_path / "out.safetensors", like=tmp_path / "plain")
    folder = tmp_path / "folded"
    folder.mkdir()
    (folder / "config.json").write_bytes((tmp_path / "plain" / "config.json").read_bytes())
    arch = f"transformers:{tmp_path / 'plain'}"
    report = fold_checkpoint(file, folder / "model.safetensors", arch=arch)
    loaded = transformers.GPT2LMHeadModel.from_pretrained(folder)
    assert report.layers == 8
    assert gp.verify(model, loaded, x) < 1e-5


# --- the documentation ------------------------------------------------------------------------


def test_examples_of_the_documentation_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = Path(__file__).parents[2] / "docs" / "checkpoints.md"
    blocks = re.findall(
        r"^```python\n(.*?)^```", page.read_text("utf-8"), re.DOTALL | re.MULTILINE
    )
    assert blocks
    monkeypatch.chdir(tmp_path)
    namespace: dict[str, object] = {}
    for block in blocks:
        exec(compile(block, "docs/checkpoints.md", "exec"), namespace)
