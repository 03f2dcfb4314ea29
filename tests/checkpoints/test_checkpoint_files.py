"""Folded checkpoint files load into the plain model, and damaged or foreign ones are refused."""

import copy
import json
import pickle
import re
import zipfile
from pathlib import Path

import pytest
import safetensors.torch as files
import torch
from checkpoint_models import MODELS, Tied, mlp, trained
from safetensors import SafetensorError
from torch import Tensor, nn

import geoparam as gp
from geoparam.checkpoints.checkpoint_files import build, fold_checkpoint


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "out.safetensors"


def difference(name: str, model: nn.Module, file: Path) -> float:
    """Load the folded file into an untouched copy of the architecture, and compare outputs."""
    make, x = MODELS[name]
    plain = make()
    plain.load_state_dict(files.load_file(file))
    return gp.verify(model, plain, x)


def save(model: nn.Module, file: Path) -> Path:
    files.save_model(model, str(file))
    return file


@pytest.mark.parametrize("plain", ("arch", "like"))
@pytest.mark.parametrize("coordinates", ("angles", "intrinsic"))
@pytest.mark.parametrize("name", MODELS)
def test_folded_file_loads_into_the_plain_model(
    name: str, coordinates: str, plain: str, tmp_path: Path, out: Path
) -> None:
    model = trained(name, coordinates=coordinates)
    file = save(model, tmp_path / "gmp.safetensors")
    given = {"arch": f"checkpoint_models:{name}"}
    if plain == "like":
        torch.save(MODELS[name][0]().state_dict(), tmp_path / "plain.pt")
        given = {"like": tmp_path / "plain.pt"}
    report = fold_checkpoint(file, out, **given)
    assert difference(name, model, out) < 1e-5
    assert report.layers == sum(isinstance(m, gp.GmPLayer) for m in model.modules())


@pytest.mark.parametrize("name", MODELS)
def test_without_a_plain_model_only_linear_layers_fold(
    name: str, tmp_path: Path, out: Path
) -> None:
    model = trained(name)
    file = save(model, tmp_path / "gmp.safetensors")
    with pytest.raises(ValueError, match="is a convolution.*--arch or --like; or say --linear"):
        fold_checkpoint(file, out)
    assert not out.exists()
    if name != "conv_net":
        fold_checkpoint(file, out, linear=True)  # no --force is needed
        assert difference(name, model, out) < 1e-5


def wrapped(kind: str, state: dict[str, Tensor]) -> dict:
    prefixes = {"ddp": "module.", "compile": "_orig_mod.", "both": "module._orig_mod."}
    if kind in prefixes:
        return {prefixes[kind] + key: x for key, x in state.items()}
    return {kind: state, "epoch": 3, "optimizer": {"state": {}}}


@pytest.mark.parametrize(
    "kind", ("ddp", "compile", "both", "state_dict", "model", "model_state_dict", "module")
)
@pytest.mark.parametrize("zipped", (True, False))
def test_torch_files_and_wrappers(kind: str, zipped: bool, tmp_path: Path, out: Path) -> None:
    model = trained("mlp")
    file = tmp_path / "gmp.pt"
    torch.save(wrapped(kind, model.state_dict()), file, _use_new_zipfile_serialization=zipped)
    fold_checkpoint(file, out, linear=True)
    assert difference("mlp", model, out) < 1e-5


def test_prefix_takes_a_part(tmp_path: Path, out: Path) -> None:
    model = trained("mlp")
    averaged = torch.optim.swa_utils.AveragedModel(model)
    torch.save(averaged.state_dict(), tmp_path / "ema.pt")
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
def test_sharded_checkpoint(as_folder: bool, tmp_path: Path, out: Path) -> None:
    model = trained("mlp")
    index = sharded(model.state_dict(), tmp_path)
    fold_checkpoint(tmp_path if as_folder else index, out, linear=True)
    assert difference("mlp", model, out) < 1e-5


def test_a_tied_entry_that_the_plain_file_leaves_out_is_left_out(
    tmp_path: Path, out: Path
) -> None:
    torch.save(trained("Tied").state_dict(), tmp_path / "gmp.pt")
    plain = {k: x for k, x in Tied().state_dict().items() if k != "head.weight"}
    files.save_file(plain, tmp_path / "model.safetensors")
    report = fold_checkpoint(tmp_path / "gmp.pt", out, like=tmp_path)
    assert "head.weight" not in files.load_file(out)
    assert any("head.weight is left out" in note for note in report.notes)


def test_weight_normalization_is_folded_and_named(tmp_path: Path, out: Path) -> None:
    theta, r = torch.randn(8, 6), torch.randn(8, 1)
    state = {"fc.theta": theta, "fc.r": r, "fc.bias": torch.randn(8), "scale": torch.ones(())}
    torch.save(state, tmp_path / "clip.pt")
    report = fold_checkpoint(tmp_path / "clip.pt", out)
    result = files.load_file(out)
    assert sorted(result) == ["fc.bias", "fc.weight", "scale"]
    torch.testing.assert_close(result["fc.weight"], r * nn.functional.normalize(theta, dim=1))
    assert any("weight normalization, not geometric" in note for note in report.notes)


class Bomb:
    """Unpickling it would fail the test."""

    def __reduce__(self) -> tuple:
        return pytest.fail, ("unpickled",)


def test_pickled_modules_are_refused(
    tmp_path: Path, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "1")
    torch.save(mlp(), tmp_path / "whole.pt")
    torch.save({"state_dict": mlp().state_dict(), "args": Bomb()}, tmp_path / "bomb.pt")
    (tmp_path / "bare.pt").write_bytes(pickle.dumps(Bomb()))
    for name in ("whole", "bomb", "bare"):
        with pytest.raises(ValueError, match="export its state_dict"):
            fold_checkpoint(tmp_path / f"{name}.pt", out)


@pytest.mark.parametrize("suffix", (".safetensors", ".pt"))
def test_damaged_files_are_refused(suffix: str, tmp_path: Path, out: Path) -> None:
    file = tmp_path / f"gmp{suffix}"
    if suffix == ".pt":
        torch.save(trained("mlp").state_dict(), file)
    else:
        save(trained("mlp"), file)
    whole = file.read_bytes()
    for damaged in (whole[: len(whole) // 2], whole[:5], b"", b"some text, no tensors at all"):
        file.write_bytes(damaged)
        with pytest.raises(ValueError, match=re.escape(str(file))):
            fold_checkpoint(file, out, linear=True)
    assert not out.exists()


def zip_again(state: dict, file: Path, method: int, shortened: str = " ") -> None:
    """Save a state dict, and write its archive anew."""
    torch.save(state, file.with_name("whole.pt"))
    with zipfile.ZipFile(file.with_name("whole.pt")) as old:
        with zipfile.ZipFile(file, "w", method) as new:
            for entry in old.infolist():
                end = 8 if entry.filename.endswith(shortened) else None
                new.writestr(entry.filename, old.read(entry)[:end])


@pytest.mark.parametrize("method", [zipfile.ZIP_DEFLATED, zipfile.ZIP_STORED])
def test_torch_files_zipped_again(method: int, tmp_path: Path, out: Path) -> None:
    """They are read as torch reads them, but that it goes on past an entry that is too short."""
    model, file = trained("mlp"), tmp_path / "again.pt"
    zip_again(model.state_dict(), file, method)
    fold_checkpoint(file, out, linear=True)
    assert difference("mlp", model, out) < 1e-5
    zip_again(model.state_dict(), file, method, shortened="/data/0")
    with pytest.raises(ValueError, match="again.pt .*damaged"):
        fold_checkpoint(file, out, linear=True, force=True)


def test_a_flipped_bit_fails_its_checksum(tmp_path: Path, out: Path) -> None:
    state, file = trained("mlp").state_dict(), tmp_path / "gmp.pt"
    torch.save(state, file)
    content = bytearray(file.read_bytes())
    content[content.index(state["0.r"].numpy().tobytes()) + 3] ^= 0x40
    file.write_bytes(content)
    with pytest.raises(ValueError, match="gmp.pt is a damaged archive: .* fails its checksum"):
        fold_checkpoint(file, out, linear=True)


def test_nothing_is_overwritten_unasked(tmp_path: Path, out: Path) -> None:
    file = save(trained("mlp"), tmp_path / "gmp.safetensors")
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
    tmp_path: Path, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = save(trained("mlp"), tmp_path / "gmp.safetensors")
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
def test_files_without_one_state_dict(
    content: object, message: str, tmp_path: Path, out: Path
) -> None:
    torch.save(content, tmp_path / "gmp.pt")
    with pytest.raises(ValueError, match=message):
        fold_checkpoint(tmp_path / "gmp.pt", out, linear=True)


def test_broken_indices_and_folders(tmp_path: Path, out: Path) -> None:
    index = sharded(trained("mlp").state_dict(), tmp_path)
    (tmp_path / "model-1.safetensors").unlink()
    for content, message in (
        (index.read_text(), "not beside it: model-1.safetensors"),
        ('{"weight_map": {"a": "../model-0.safetensors"}}', "not beside it"),
        ("[]", "index.json is damaged: expected a JSON object"),
        ("{", "index.json is damaged"),
        ('{"a":' * 100_000 + "1" + "}" * 100_000, "index.json is damaged: maximum recursion"),
        ("{}", "is no index"),
        ('{"weight_map": {"a": 3}}', "is no index"),
    ):
        index.write_text(content)
        with pytest.raises(ValueError, match=message):
            fold_checkpoint(tmp_path, out)
    index.unlink()
    with pytest.raises(ValueError, match="holds none of"):
        fold_checkpoint(tmp_path, out)
    with pytest.raises(ValueError, match="does not exist"):
        fold_checkpoint(tmp_path / "nowhere.safetensors", out)


def reads_values() -> nn.Module:
    return nn.Linear(int(torch.tensor(3).item()), 2)


def needs_arguments(width: int) -> nn.Module:
    return nn.Linear(width, 2)


def test_architectures_are_built_without_memory() -> None:
    assert next(build("checkpoint_models:conv_net").parameters()).is_meta
    assert build("test_checkpoint_files:reads_values").weight.shape == (2, 3)


@pytest.mark.parametrize(
    ("arch", "message"),
    [
        ("resnet50", "--arch is torchvision:NAME"),
        ("no_such_package:model", "is not there: No module named 'no_such_package'"),
        ("test_checkpoint_files:no_such", "is not there"),
        ("test_checkpoint_files:needs_arguments", "fails: TypeError"),
        ("test_checkpoint_files:MODELS", "fails: TypeError"),
        ("builtins:dict", "gives a dict"),
        ("torchvision:no_such", "has no model 'no_such'"),
    ],
)
def test_unknown_architectures(arch: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build(arch)


@pytest.mark.parametrize("name", ("resnet18", "fcn_resnet50"))
def test_torchvision_architecture(name: str) -> None:
    pytest.importorskip("torchvision")
    assert next(build(f"torchvision:{name}").parameters()).is_meta


def test_gpt2_with_its_transposed_weights(tmp_path: Path, out: Path) -> None:
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
        fold_checkpoint(file, out, like=tmp_path / "plain")
    folder = tmp_path / "folded"
    folder.mkdir()
    (folder / "config.json").write_bytes((tmp_path / "plain" / "config.json").read_bytes())
    arch = f"transformers:{tmp_path / 'plain'}"
    report = fold_checkpoint(file, folder / "model.safetensors", arch=arch)
    loaded = transformers.GPT2LMHeadModel.from_pretrained(folder)
    assert report.layers == 8
    assert gp.verify(model, loaded, x) < 1e-5
