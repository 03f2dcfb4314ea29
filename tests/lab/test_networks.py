"""VGG-6 and ResNets under every method: their structure, and that all of them learns."""

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

import geoparam as gp
from geoparam_lab import methods, networks

NAMES = list(methods.METHODS)
CENTRED = [name for name in NAMES if name.endswith("+imn")]
GEOMETRIC = [name for name in CENTRED if methods.METHODS[name].is_geometric]
WIDTHS = (4, 4, 6, 6, 8, 8)


def images(size: int = 32, count: int = 6) -> Tensor:
    return torch.randn(count, 3, size, size)


def kinds(model: nn.Module) -> list[str]:
    return [type(module).__name__.removeprefix("Parametrized") for module in model.children()]


def step(model: nn.Module) -> tuple[float, float]:
    """The loss of one batch before and after a small step on it."""
    x, y = images(), torch.arange(6) % 3
    optimizer = torch.optim.SGD(gp.param_groups(model, lr=1e-3, kind="sgd"), lr=1e-3)
    optimizer.register_step_post_hook(gp.retract(model))
    losses = []
    for _ in range(2):
        loss = nn.functional.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())
        optimizer.step()
        losses.append(loss.item())
    return losses[0], losses[1]


@pytest.mark.parametrize(
    ("options", "expected"), [({}, (1e-5, 0.1)), ({"constants": "keras"}, (1e-3, 0.01))]
)
def test_batchnorm_of_a_resnet_has_the_constants_asked_for(
    options: dict[str, str], expected: tuple[float, float]
) -> None:
    model = networks.build("resnet18", "bn", 3, size=32, widths=(4,), **options)
    norms = [module for module in model.modules() if isinstance(module, nn.BatchNorm2d)]
    assert len(norms) == 20 and {(norm.eps, norm.momentum) for norm in norms} == {expected}


@pytest.mark.parametrize(("mbn", "offsets"), [("after", 20), ("before", 0)])
def test_mbn_of_a_resnet_has_both_forms(mbn: str, offsets: int) -> None:
    model = networks.build("resnet18", "wn+mbn", 3, size=32, widths=(4,), mbn=mbn)
    kinds = [type(module) for module in model.modules()]
    assert kinds.count(gp.MeanOnlyBatchNorm) == offsets
    assert kinds.count(gp.InputMeanNorm) == 20 - offsets


def test_vgg6_has_the_papers_shape() -> None:
    model = networks.vgg6("sp", 1000)
    convs = [module for module in model if isinstance(module, nn.Conv2d)]
    assert [conv.out_channels for conv in convs] == [128, 128, 256, 256, 512, 512]
    assert {conv.kernel_size for conv in convs} == {(3, 3)}
    weights = 9 * (3 * 128 + 128 * 128 + 128 * 256 + 256 * 256 + 256 * 512 + 512 * 512)
    biases = 2 * (128 + 256 + 512)
    assert sum(p.numel() for p in model.parameters()) == weights + biases + 512 * 1000 + 1000
    before_average = model[: list(dict(model.named_children())).index("average")]
    assert before_average(images(count=1)).shape == (1, 512, 4, 4)


def test_imn_of_vgg6_stands_after_each_unit_and_before_pooling() -> None:
    model = networks.vgg6("gmp+imn", 3, widths=WIDTHS)
    pair = ["GmPConv2d", "InputMeanNorm"]
    tail = ["AdaptiveAvgPool2d", "Flatten", "Linear"]
    assert kinds(model) == (pair * 2 + ["MaxPool2d"]) * 3 + tail
    assert all(m.activation is torch.relu for m in model if isinstance(m, gp.GmPConv2d))


def test_imn_of_vgg6_at_inputs_comes_after_pooling() -> None:
    model = networks.vgg6("gmp+imn", 3, widths=WIDTHS, imn="input")
    centred = [m.input_norm is not None for m in model if isinstance(m, gp.GmPConv2d)]
    assert centred == [False, True, True, True, True, True]
    assert "InputMeanNorm" not in kinds(model)


def test_vgg6_of_weight_normalization_normalises_every_layer() -> None:
    model = networks.vgg6("wn+mbn", 3, widths=WIDTHS)
    layers = [m for m in model if isinstance(m, nn.Conv2d | nn.Linear)]
    assert len(layers) == 7 and all(map(parametrize.is_parametrized, layers))


@pytest.mark.parametrize("network", ["vgg6", "resnet18"])
def test_networks_follow_from_their_seed(network: str) -> None:
    def weights(seed: int) -> Tensor:
        options = {"widths": WIDTHS if network == "vgg6" else [4]}
        model = networks.build(network, "gmp+imn", 3, size=32, seed=seed, **options)
        return torch.cat([p.detach().flatten() for p in model.parameters()])

    before = torch.random.get_rng_state()
    assert weights(0).equal(weights(0)) and not weights(0).equal(weights(1))
    assert torch.random.get_rng_state().equal(before)


@pytest.mark.parametrize("depth", [18, pytest.param(34, marks=pytest.mark.slow), 50])
def test_resnet_with_bn_is_torchvisions(depth: int) -> None:
    models = pytest.importorskip("torchvision.models")
    ours = networks.resnet(depth, "bn", 10)
    theirs = getattr(models, f"resnet{depth}")(num_classes=10)
    assert list(ours.state_dict()) == list(theirs.state_dict())
    theirs.load_state_dict(ours.state_dict())
    x = images(64, count=2)
    assert torch.allclose(ours(x), theirs(x), atol=1e-5)  # and the running statistics move alike
    assert torch.allclose(ours.eval()(x), theirs.eval()(x), atol=1e-5)


@pytest.mark.parametrize("name", NAMES)
def test_resnet_trains_a_step_under_every_method(name: str) -> None:
    before, after = step(networks.build("resnet18", name, 3, size=32, widths=[4]))
    assert after < before


@pytest.mark.parametrize(("name", "skip"), [("gmp+imn", "centred"), ("intrinsic+imn", "plain")])
def test_bottlenecks_with_imn_train_a_step(name: str, skip: str) -> None:
    before, after = step(networks.build("resnet50", name, 3, size=32, widths=[4], skip=skip))
    assert after < before


@pytest.mark.parametrize(
    ("size", "kernel", "stride", "pool"), [(64, 3, 1, nn.Identity), (224, 7, 2, nn.MaxPool2d)]
)
def test_the_stem_fits_the_images(size: int, kernel: int, stride: int, pool: type) -> None:
    model = networks.build("resnet18", "gmp+imn", 3, size=size, widths=[4])
    assert model.conv1.kernel_size == (kernel, kernel) and model.conv1.stride == (stride, stride)
    assert isinstance(model.maxpool, pool)


def test_weight_normalised_resnet_has_it_everywhere_and_mbn_where_bn_was() -> None:
    model = networks.resnet(18, "wn+mbn", 3, width=4)
    layers = [m for m in model.modules() if isinstance(m, nn.Conv2d | nn.Linear)]
    assert len(layers) == 21 and all(map(parametrize.is_parametrized, layers))
    norms = {n for n, m in model.named_modules() if isinstance(m, gp.MeanOnlyBatchNorm)}
    with_bn = networks.resnet(18, "bn", 3, width=4)
    assert norms == {n for n, m in with_bn.named_modules() if isinstance(m, nn.BatchNorm2d)}
    assert len(norms) == 20


def by_hand(model: nn.Module, x: Tensor) -> Tensor:
    """The papers' residual network of basic blocks, in training, from its affine layers alone."""

    def centred_relu(z: Tensor) -> Tensor:
        z = z.relu()
        return z - z.mean(dim=(0, 2, 3), keepdim=True)

    x = centred_relu(model.conv1(x))
    x = nn.functional.max_pool2d(x, 3, 2, 1)
    for number in range(1, 5):
        for block in getattr(model, f"layer{number}"):
            skip = x if block.downsample is None else block.downsample[0](x)
            x = centred_relu(block.conv2(centred_relu(block.conv1(x))) + skip)
    return model.fc(x.mean(dim=(2, 3)))


@pytest.mark.parametrize("name", CENTRED)
def test_centred_skips_have_the_papers_structure(name: str) -> None:
    model = networks.resnet(18, name, 3, width=4).double()
    x = images(64).double()
    assert torch.allclose(model(x), by_hand(model, x), atol=1e-12)
    kind = gp.GmPConv2d if name in GEOMETRIC else nn.Conv2d
    layers = [m for m in model.modules() if isinstance(m, kind)]
    assert len(layers) == 20  # skips of another shape included
    assert all(layer.bias is not None for layer in layers)
    if name in GEOMETRIC:
        assert all(layer.activation is None for layer in layers) and type(model.fc) is nn.Linear


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=[pytest.mark.slow] if n != "gmp+imn" else []) for n in GEOMETRIC],
)
def test_plain_skips_are_what_convert_makes(name: str) -> None:
    torchvision = pytest.importorskip("torchvision")
    ours = networks.resnet(18, name, 3, skip="plain")
    theirs = gp.convert_(
        torchvision.models.resnet18(num_classes=3),
        norm="imn",
        init="glorot",
        example_inputs=images(),
        coordinates="intrinsic" if name.startswith("intrinsic") else "angles",
        natural=name.startswith("natural"),
    )
    methods.use_papers_means_(theirs)
    assert list(ours.state_dict()) == list(theirs.state_dict())
    assert ours.layer1[0].conv1.input_norm_form == "border"
    assert {n: m.extra_repr() for n, m in ours.named_modules() if isinstance(m, gp.GmPConv2d)} == {
        n: m.extra_repr() for n, m in theirs.named_modules() if isinstance(m, gp.GmPConv2d)
    }
    theirs.load_state_dict(ours.state_dict())
    x = images(64, count=2)
    assert torch.allclose(ours(x), theirs(x), atol=1e-5)


def test_the_form_of_directions_goes_into_every_layer() -> None:
    for name, form in (("natural+imn", "natural=True"), ("intrinsic+imn", "'intrinsic'")):
        for skip in ("centred", "plain"):
            model = networks.resnet(18, name, 3, skip=skip, width=4)
            layers = [m for m in model.modules() if isinstance(m, gp.GmPConv2d)]
            assert len(layers) == 20 and all(form in layer.extra_repr() for layer in layers)


@pytest.mark.parametrize(
    ("depth", "options", "message"),
    [
        (18, {"skip": "both"}, "skip is one of centred, plain; got 'both'"),
        (18, {"imn": "input"}, "is skip='plain'; got imn='input'"),
        (20, {}, "one of 18, 34, 50; got 20"),
    ],
)
def test_unknown_options_of_a_resnet_are_refused(
    depth: int, options: dict[str, str], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        networks.resnet(depth, "gmp+imn", 3, **options)


def test_an_unknown_network_is_refused() -> None:
    with pytest.raises(ValueError, match="vgg6, resnet18, resnet34, resnet50; got 'vgg16'"):
        networks.build("vgg16", "bn", 3, size=32)
