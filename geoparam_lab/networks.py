"""The networks that images are classified with, under every method: VGG-6 and ResNets.

**VGG-6** is the papers': six 3x3 convolutions, a max pool after each second one, the average over
positions, a linear output. IMN stands where their code has it, after r relu(.) and before pooling;
`imn="input"` is their text instead.

**ResNet** is torchvision's: the same names of what holds parameters, and with BN the same
function. Other norms of pre-activations stand where BN was; GmP layers hold r inside. IMN comes in
two forms:

    skip="centred"    the authors' block: convolution, ReLU, IMN, convolution, plus the skip (a 1x1
                      convolution without norm where the shape changes), ReLU, IMN. What is centred
                      goes into the next block's skip too
    skip="plain"      what `geoparam.convert_` makes of the ResNet with BN: IMN at the input of
                      each convolution, and skips that it leaves alone

The authors' block is that of the only ResNet in their repository, a ResNet-34 (imagenet2012 at
commit d1d3e906, later removed). The papers' text says nothing about skips, and their tables are of
ResNet-18 and ResNet-50, whose code is not public: Bottlenecks here follow the same pattern.

BatchNorm has torchvision's constants, epsilon 1e-5 and 10 % of each new batch in the running
statistics; `constants="keras"` has those of the authors' ResNet-34, which are Keras's: 1e-3, 1 %.

Weights are drawn as `methods` says. torchvision's own draw is close to `init="he"`, with fan-out
in place of fan-in.
"""

from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

import geoparam as gp
from geoparam_lab import methods
from geoparam_lab.checks import check_names
from geoparam_lab.methods import Method

VGG6_WIDTHS = (128, 128, 256, 256, 512, 512)
NETWORKS = ("vgg6", "resnet18", "resnet34", "resnet50")
CONSTANTS = ("torchvision", "keras")  # of a ResNet's BatchNorm
_DEPTHS = {  # kernels of a block's convolutions, its expansion, blocks of each stage
    18: ((3, 3), 1, (2, 2, 2, 2)),
    34: ((3, 3), 1, (3, 4, 6, 3)),
    50: ((1, 3, 1), 4, (3, 4, 6, 3)),
}


def build(
    network: str,
    method: str,
    classes: int,
    *,
    size: int,
    widths: Sequence[int] | None = None,
    skip: str = "centred",
    constants: str = "torchvision",
    **options: Any,
) -> nn.Module:
    """Return the network of this name for images of this size.

    `widths` are VGG-6's, or that of a ResNet's first stage; `skip` and `constants` are a ResNet's.
    `options` are `seed` and the method's: `init`, `imn`, `mbn`.
    """
    check_names("a network", NETWORKS, network)
    if network == "vgg6":
        return vgg6(method, classes, widths=widths or VGG6_WIDTHS, **options)
    depth, [width] = int(network.removeprefix("resnet")), widths or [64]
    options |= {"small": size <= 64, "width": width, "skip": skip, "constants": constants}
    return resnet(depth, method, classes, **options)


def vgg6(
    method: str,
    classes: int,
    *,
    widths: Sequence[int] = VGG6_WIDTHS,
    seed: int = 0,
    **options: str,
) -> nn.Sequential:
    """Return VGG-6 under `method`, drawn from `seed`.

    Modules are conv1, norm1, relu1, ..., pool2, ..., average, flatten, output, as far as the
    method has them: a GmP unit has its ReLU in it.
    """
    builder = methods.get(method, **options)
    parts: OrderedDict[str, nn.Module] = OrderedDict()
    with methods.use_seed(seed):
        for number, (inputs, units) in enumerate(zip((3, *widths), widths, strict=False), start=1):
            block = builder.block(nn.Conv2d, inputs, units, 3, padding=1, first=number == 1)
            conv, *others = block
            parts[f"conv{number}"] = conv
            for module in others:
                kind = "relu" if isinstance(module, nn.ReLU) else "norm"
                parts[f"{kind}{number}"] = module
            if number % 2 == 0:
                parts[f"pool{number}"] = nn.MaxPool2d(2)
        parts["average"] = nn.AdaptiveAvgPool2d(1)
        parts["flatten"] = nn.Flatten()
        parts["output"] = builder.output(widths[-1], classes)
    return nn.Sequential(parts)


def resnet(
    depth: int,
    method: str,
    classes: int,
    *,
    skip: str = "centred",
    constants: str = "torchvision",
    small: bool = False,
    width: int = 64,
    seed: int = 0,
    **options: str,
) -> "ResNet":
    """Return the ResNet of this depth under `method`, drawn from `seed`.

    With `small`, for images of 32 or 64, the stem is a 3x3 convolution with stride 1 and no max
    pool. `width` is the number of channels of the first stage, `options` are the method's.
    """
    builder = methods.get(method, **options)
    check_names("the depth", _DEPTHS, depth)
    check_names("skip", ("centred", "plain"), skip)
    check_names("constants", CONSTANTS, constants)
    is_plain = builder.norm == "imn" and skip == "plain"
    if builder.norm == "imn" and builder.imn != "output":
        raise ValueError(
            "in a ResNet, IMN at each convolution's input is skip='plain'; got "
            f"imn={builder.imn!r}. Leave imn as it is."
        )
    if is_plain and not builder.is_geometric:
        raise ValueError(f"skip='plain' converts to geometric layers; got {builder.title}.")
    with methods.use_seed(seed):
        first = methods.get("bn") if is_plain else builder  # plain skips: converted below
        model = ResNet(first, *_DEPTHS[depth], classes, small=small, width=width)
        if constants == "keras":
            _use_kerass_constants_(model)
        if is_plain:
            layers: dict[str, Any] = {"init": builder.init, **builder.form}
            gp.convert_(model, norm="imn", example_inputs=torch.zeros(2, 3, 32, 32), **layers)
            methods.use_papers_means_(model)
    return model


def _make_conv(method: Method, inputs: int, units: int, kernel: int, stride: int = 1) -> nn.Module:
    padding = kernel // 2
    return method.make_layer(nn.Conv2d, inputs, units, kernel, stride=stride, padding=padding)


def _make_norm(method: Method, units: int) -> nn.Module:
    """Return the norm of pre-activations, with torchvision's constants."""
    return method.make_norm(nn.Conv2d, units, eps=1e-5, momentum=0.1) or nn.Identity()


def _use_kerass_constants_(model: nn.Module) -> None:
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.eps, module.momentum = methods.EPSILON, methods.MOMENTUM


def _make_activation(method: Method, units: int) -> nn.Module:
    """Return ReLU, and IMN after it: the input of both a convolution and a skip."""
    relu = nn.ReLU(inplace=True)
    if method.norm != "imn":
        return relu
    return nn.Sequential(relu, methods.use_papers_means_(gp.InputMeanNorm(units)))


class Block(nn.Module):
    """Convolutions and a skip connection: torchvision's BasicBlock (3x3, 3x3) or Bottleneck.

    The first 3x3 convolution has the stride, and the last one `expansion` times as many units.
    """

    def __init__(
        self,
        method: Method,
        kernels: Sequence[int],
        inputs: int,
        width: int,
        expansion: int,
        stride: int,
    ) -> None:
        super().__init__()
        self.count, units, channels = len(kernels), width * expansion, inputs
        for n, kernel in enumerate(kernels, start=1):
            out = units if n == self.count else width
            conv_stride = stride if n == kernels.index(3) + 1 else 1
            self.add_module(f"conv{n}", _make_conv(method, channels, out, kernel, conv_stride))
            self.add_module(f"bn{n}", _make_norm(method, out))
            self.add_module(f"activation{n}", _make_activation(method, out))
            channels = out
        self.downsample = None
        if stride != 1 or inputs != units:
            convolution = _make_conv(method, inputs, units, 1, stride)
            self.downsample = nn.Sequential(convolution, _make_norm(method, units))

    def forward(self, x: Tensor) -> Tensor:
        out = x
        for n in range(1, self.count + 1):
            out = getattr(self, f"conv{n}")(out)
            out = getattr(self, f"bn{n}")(out)
            if n == self.count:
                out = out + (x if self.downsample is None else self.downsample(x))
            out = getattr(self, f"activation{n}")(out)
        return out


class ResNet(nn.Module):
    """A residual network of four stages, with torchvision's names for what holds parameters."""

    def __init__(
        self,
        method: Method,
        kernels: Sequence[int],
        expansion: int,
        counts: Sequence[int],
        classes: int,
        *,
        small: bool,
        width: int,
    ) -> None:
        super().__init__()
        kernel, stride = (3, 1) if small else (7, 2)
        self.conv1 = _make_conv(method, 3, width, kernel, stride)
        self.bn1 = _make_norm(method, width)
        self.activation = _make_activation(method, width)
        self.maxpool = nn.Identity() if small else nn.MaxPool2d(3, 2, padding=1)
        inputs = width
        for number, count in enumerate(counts):
            units, blocks = width * 2**number, []
            for index in range(count):
                stride = 2 if number > 0 and index == 0 else 1
                blocks.append(Block(method, kernels, inputs, units, expansion, stride))
                inputs = units * expansion
            self.add_module(f"layer{number + 1}", nn.Sequential(*blocks))
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.flatten = nn.Flatten()
        self.fc = method.output(inputs, classes)

    def forward(self, x: Tensor) -> Tensor:
        for part in self.children():
            x = part(x)
        return x
