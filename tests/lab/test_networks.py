"""VGG-6 and ResNets under every method: their structure, and that all of them learns."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

import geoparam as gp
from geoparam_lab import methods, networks

NAMES = list(methods.METHODS)
WITH_IMN = [name for name in NAMES if name.endswith("+imn")]
GEOMETRIC_WITH_IMN = [name for name in WITH_IMN if methods.METHODS[name].is_geometric]
VGG_WIDTHS = (4, 4, 6, 6, 8, 8)


def make_images(size: int = 32, count: int = 6) -> Tensor:
    return torch.randn(count, 3, size, size)


def small_resnet(name: str, depth: int = 18, size: int = 32, **options: Any) -> nn.Module:
    """A ResNet for images of this size, with 4 channels in its first stage."""
    return networks.build(f"resnet{depth}", name, 3, size=size, widths=[4], **options)


def small_vgg(name: str, **options: Any) -> nn.Sequential:
    return networks.vgg6(name, 3, widths=VGG_WIDTHS, **options)


def modules_of(model: nn.Module, *kinds: type[nn.Module]) -> list[Any]:
    return [module for module in model.modules() if isinstance(module, kinds)]


def names_of(model: nn.Module, kind: type[nn.Module]) -> list[str]:
    return [name for name, module in model.named_modules() if isinstance(module, kind)]


def class_names(model: nn.Module) -> list[str]:
    names = [type(module).__name__ for module in model.children()]
    return [name.removeprefix("Parametrized") for name in names]


def assert_a_step_lowers_the_loss(model: nn.Module) -> None:
    """Every parameter gets a finite gradient, and a small step lowers the loss of its batch."""
    x, y = make_images(), torch.arange(6) % 3
    optimizer = torch.optim.SGD(gp.param_groups(model, lr=1e-3, kind="sgd"), lr=1e-3)
    optimizer.register_step_post_hook(gp.retract(model))

    before = nn.functional.cross_entropy(model(x), y)
    before.backward()
    optimizer.step()
    after = nn.functional.cross_entropy(model(x), y)

    for parameter in model.parameters():
        assert parameter.grad is not None
        assert parameter.grad.isfinite().all()
    assert after < before


@pytest.mark.parametrize(
    ("options", "eps", "momentum"),
    [({}, 1e-5, 0.1), ({"constants": "keras"}, 1e-3, 0.01)],
    ids=["torchvision", "keras"],
)
def test_batchnorm_of_a_resnet_has_the_constants_asked_for(
    options: dict[str, str], eps: float, momentum: float
) -> None:
    norms = modules_of(small_resnet("bn", **options), nn.BatchNorm2d)

    assert len(norms) == 20
    assert {norm.eps for norm in norms} == {eps}
    assert {norm.momentum for norm in norms} == {momentum}


@pytest.mark.parametrize(
    ("mbn", "kind", "other"),
    [
        ("after", gp.MeanOnlyBatchNorm, gp.InputMeanNorm),
        ("before", gp.InputMeanNorm, gp.MeanOnlyBatchNorm),
    ],
)
def test_mbn_of_a_resnet_has_both_forms(
    mbn: str, kind: type[nn.Module], other: type[nn.Module]
) -> None:
    types = [type(module) for module in small_resnet("wn+mbn", mbn=mbn).modules()]

    assert types.count(kind) == 20
    assert types.count(other) == 0


def test_vgg6_has_the_papers_shape() -> None:
    model = networks.vgg6("sp", 1000)

    convs = modules_of(model, nn.Conv2d)
    assert [conv.out_channels for conv in convs] == [128, 128, 256, 256, 512, 512]
    assert {conv.kernel_size for conv in convs} == {(3, 3)}

    kernels = 3 * 128 + 128 * 128 + 128 * 256 + 256 * 256 + 256 * 512 + 512 * 512
    biases = 2 * (128 + 256 + 512)
    output_layer = 512 * 1000 + 1000
    parameters = sum(p.numel() for p in model.parameters())
    assert parameters == 9 * kernels + biases + output_layer


def test_vgg6_averages_512_maps_of_4_by_4() -> None:
    model = networks.vgg6("sp", 1000)
    names = [name for name, _ in model.named_children()]
    before_average = model[: names.index("average")]

    assert before_average(make_images(count=1)).shape == (1, 512, 4, 4)


def test_imn_of_vgg6_stands_after_each_unit_and_before_pooling() -> None:
    model = small_vgg("gmp+imn")

    stage = ["GmPConv2d", "InputMeanNorm", "GmPConv2d", "InputMeanNorm", "MaxPool2d"]
    tail = ["AdaptiveAvgPool2d", "Flatten", "Linear"]
    assert class_names(model) == [*stage, *stage, *stage, *tail]
    for conv in modules_of(model, gp.GmPConv2d):
        assert conv.activation is torch.relu


def test_imn_of_vgg6_at_inputs_comes_after_pooling() -> None:
    model = small_vgg("gmp+imn", imn="input")

    has_imn = [conv.input_norm is not None for conv in modules_of(model, gp.GmPConv2d)]
    assert has_imn == [False, True, True, True, True, True]
    assert "InputMeanNorm" not in class_names(model)


def test_vgg6_of_weight_normalization_normalises_every_layer() -> None:
    layers = modules_of(small_vgg("wn+mbn"), nn.Conv2d, nn.Linear)

    assert len(layers) == 7
    for layer in layers:
        assert parametrize.is_parametrized(layer)


@pytest.mark.parametrize(
    ("network", "widths"), [("vgg6", VGG_WIDTHS), ("resnet18", [4])], ids=["vgg6", "resnet18"]
)
def test_networks_follow_from_their_seed_alone(network: str, widths: list[int]) -> None:
    def weights(seed: int) -> Tensor:
        model = networks.build(network, "gmp+imn", 3, size=32, seed=seed, widths=widths)
        return nn.utils.parameters_to_vector(model.parameters())

    before = torch.random.get_rng_state()

    assert torch.equal(weights(0), weights(0))
    assert not torch.equal(weights(0), weights(1))
    assert torch.equal(torch.random.get_rng_state(), before)


@pytest.mark.parametrize("depth", [18, pytest.param(34, marks=pytest.mark.slow), 50])
def test_resnet_with_bn_is_torchvisions(depth: int) -> None:
    models = pytest.importorskip("torchvision.models")
    ours = networks.resnet(depth, "bn", 10)
    theirs = getattr(models, f"resnet{depth}")(num_classes=10)
    x = make_images(64, count=2)

    assert list(ours.state_dict()) == list(theirs.state_dict())
    theirs.load_state_dict(ours.state_dict())
    assert torch.allclose(ours(x), theirs(x), atol=1e-5)

    # Running statistics are updated alike.
    assert torch.allclose(ours.eval()(x), theirs.eval()(x), atol=1e-5)


@pytest.mark.parametrize("name", NAMES)
def test_resnet_trains_a_step_under_every_method(name: str) -> None:
    assert_a_step_lowers_the_loss(small_resnet(name))


@pytest.mark.parametrize(("name", "skip"), [("gmp+imn", "centred"), ("intrinsic+imn", "plain")])
def test_bottlenecks_with_imn_train_a_step(name: str, skip: str) -> None:
    assert_a_step_lowers_the_loss(small_resnet(name, depth=50, skip=skip))


@pytest.mark.parametrize(
    ("size", "kernel", "stride", "pool"), [(64, 3, 1, nn.Identity), (224, 7, 2, nn.MaxPool2d)]
)
def test_the_stem_fits_the_images(size: int, kernel: int, stride: int, pool: type) -> None:
    model = small_resnet("gmp+imn", size=size)

    assert model.conv1.kernel_size == (kernel, kernel)
    assert model.conv1.stride == (stride, stride)
    assert isinstance(model.maxpool, pool)


def test_every_layer_of_a_weight_normalised_resnet_has_weight_norm() -> None:
    layers = modules_of(networks.resnet(18, "wn+mbn", 3, width=4), nn.Conv2d, nn.Linear)

    assert len(layers) == 21
    for layer in layers:
        assert parametrize.is_parametrized(layer)


def test_mbn_of_a_resnet_stands_where_bn_would() -> None:
    with_mbn = networks.resnet(18, "wn+mbn", 3, width=4)
    with_bn = networks.resnet(18, "bn", 3, width=4)

    places = names_of(with_mbn, gp.MeanOnlyBatchNorm)
    assert len(places) == 20
    assert places == names_of(with_bn, nn.BatchNorm2d)


def centred_relu(z: Tensor) -> Tensor:
    z = z.relu()
    return z - z.mean(dim=(0, 2, 3), keepdim=True)


def papers_resnet(model: nn.Module, x: Tensor) -> Tensor:
    """The papers' residual network of basic blocks, in training, from its affine layers alone."""
    x = centred_relu(model.conv1(x))
    x = nn.functional.max_pool2d(x, 3, 2, 1)
    for stage in (model.layer1, model.layer2, model.layer3, model.layer4):
        for block in stage:
            skip = x if block.downsample is None else block.downsample[0](x)
            hidden = centred_relu(block.conv1(x))
            x = centred_relu(block.conv2(hidden) + skip)
    return model.fc(x.mean(dim=(2, 3)))


@pytest.mark.parametrize("name", WITH_IMN)
def test_centred_skips_have_the_papers_structure(name: str) -> None:
    model = networks.resnet(18, name, 3, width=4).double()
    x = make_images(64).double()

    assert torch.allclose(model(x), papers_resnet(model, x), atol=1e-12)


@pytest.mark.parametrize("name", WITH_IMN)
def test_convolutions_of_centred_skips_have_offsets(name: str) -> None:
    model = networks.resnet(18, name, 3, width=4)

    convs = modules_of(model, gp.GmPConv2d if name in GEOMETRIC_WITH_IMN else nn.Conv2d)
    assert len(convs) == 20  # skips of another shape included
    for conv in convs:
        assert conv.bias is not None


@pytest.mark.parametrize("name", GEOMETRIC_WITH_IMN)
def test_convolutions_of_centred_skips_have_no_activation_inside(name: str) -> None:
    model = networks.resnet(18, name, 3, width=4)

    assert type(model.fc) is nn.Linear
    for conv in modules_of(model, gp.GmPConv2d):
        assert conv.activation is None


@pytest.mark.parametrize(
    "name",
    [
        "gmp+imn",
        pytest.param("natural+imn", marks=pytest.mark.slow),
        pytest.param("intrinsic+imn", marks=pytest.mark.slow),
    ],
)
def test_plain_skips_are_what_convert_makes(name: str) -> None:
    torchvision = pytest.importorskip("torchvision")
    ours = networks.resnet(18, name, 3, skip="plain")
    theirs = gp.convert_(
        torchvision.models.resnet18(num_classes=3),
        norm="imn",
        init="glorot",
        example_inputs=make_images(),
        coordinates="intrinsic" if name == "intrinsic+imn" else "angles",
        natural=name == "natural+imn",
    )
    methods.use_papers_means_(theirs)
    x = make_images(64, count=2)

    assert list(ours.state_dict()) == list(theirs.state_dict())
    assert ours.layer1[0].conv1.input_norm_form == "border"
    assert names_of(ours, gp.GmPConv2d) == names_of(theirs, gp.GmPConv2d)
    for our_conv, their_conv in zip(
        modules_of(ours, gp.GmPConv2d), modules_of(theirs, gp.GmPConv2d), strict=True
    ):
        assert our_conv.extra_repr() == their_conv.extra_repr()

    theirs.load_state_dict(ours.state_dict())
    assert torch.allclose(ours(x), theirs(x), atol=1e-5)


@pytest.mark.parametrize("skip", ["centred", "plain"])
@pytest.mark.parametrize(
    ("name", "form"), [("natural+imn", "natural=True"), ("intrinsic+imn", "'intrinsic'")]
)
def test_every_layer_has_the_methods_form_of_directions(name: str, form: str, skip: str) -> None:
    convs = modules_of(networks.resnet(18, name, 3, skip=skip, width=4), gp.GmPConv2d)

    assert len(convs) == 20
    for conv in convs:
        assert form in conv.extra_repr()


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
