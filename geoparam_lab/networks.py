"""The networks that images are classified with, under every method: VGG-6 and ResNets.

**VGG-6** is the papers': six 3x3 convolutions, a max pool after each second one, the average over
positions, a linear output. IMN stands where their code has it, after r relu(.) and before pooling;
`imn="input"` is their text instead.

**ResNet** is torchvision's: the same names of what holds parameters, and with BN the same
function. Other norms of pre-activations stand where BN was; GmP layers hold r inside. IMN comes in
two forms:

    skip="centred"    the structure of the papers' code: convolution, ReLU, IMN, convolution, plus
                      the skip (a 1x1 convolution without norm where the shape changes), ReLU, IMN.
                      What is centred goes into the next block's skip too
    skip="plain"      what `geoparam.convert_` makes of the ResNet with BN: IMN at the input of
                      each convolution, and skips that it leaves alone

Weights are drawn as `methods` says. torchvision's own draw is close to `init="he"`, with fan-out
in place of fan-in.
"""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

import geoparam as gp
from geoparam_lab import methods
from geoparam_lab.methods import Method

NETWORKS = ("vgg6", "resnet18", "resnet34", "resnet50")


def build(
    network: str,
    method: Method | str,
    classes: int,
    *,
    size: int,
    seed: int = 0,
    **options: Any,
) -> nn.Module:
    """Return the network of this name for images of this size, drawn from `seed`.

    `options` are `widths` or `width`, `skip`, which VGG-6 has none of, and the method's: `init`,
    `imn`, `mbn_bias`.

    Example:
        >>> type(build("vgg6", "gmp+imn", 10, size=32, widths=(8,) * 6).conv6).__name__
        'GmPConv2d'
    """
    if network not in NETWORKS:
        raise ValueError(f"a network is one of {', '.join(NETWORKS)}; got {network!r}.")
    if network == "vgg6":
        options.pop("skip", None)
        return vgg6(method, classes, seed=seed, **options)
    depth, stem = int(network.removeprefix("resnet")), "small" if size <= 64 else "imagenet"
    return resnet(depth, method, classes, seed=seed, **{"stem": stem, **options})


def vgg6(
    method: Method | str,
    classes: int,
    *,
    widths: Sequence[int] = (128, 128, 256, 256, 512, 512),
    seed: int = 0,
    **options: str,
) -> nn.Sequential:
    """Return VGG-6 under `method`, drawn from `seed`.

    Modules are conv1, norm1, relu1, ..., pool2, ..., average, flatten, output, as far as the
    method has them: a GmP unit has its ReLU in it.

    Example:
        >>> list(dict(vgg6("gmp+imn", 10, widths=(8, 8)).named_children()))
        ['conv1', 'norm1', 'conv2', 'norm2', 'pool2', 'average', 'flatten', 'output']
    """
    method = _method(method, options)
    parts: OrderedDict[str, nn.Module] = OrderedDict()
    with methods.seeded(seed):
        for number, (inputs, units) in enumerate(zip((3, *widths), widths, strict=False), start=1):
            block = method.conv2d(inputs, units, 3, padding=1, first=number == 1)
            for index, module in enumerate(block):
                kind = "relu" if isinstance(module, nn.ReLU) else "norm" if index else "conv"
                parts[f"{kind}{number}"] = module
            if number % 2 == 0:
                parts[f"pool{number}"] = nn.MaxPool2d(2)
        parts["average"] = nn.AdaptiveAvgPool2d(1)
        parts["flatten"] = nn.Flatten()
        parts["output"] = method.output(widths[-1], classes)
    return nn.Sequential(parts)


def resnet(
    depth: int,
    method: Method | str,
    classes: int,
    *,
    skip: str = "centred",
    stem: str = "imagenet",
    width: int = 64,
    seed: int = 0,
    **options: str,
) -> "ResNet":
    """Return the ResNet of this depth under `method`, drawn from `seed`.

    Args:
        depth: 18, 34 or 50.
        method: one of `methods.METHODS`, or its name.
        classes: number of outputs.
        skip: with IMN, what goes into skip connections: "centred" values, or "plain"; see above.
        stem: "imagenet", or "small" for images of 32 or 64: its convolution is 3x3 with stride 1,
            and there is no max pool.
        width: channels of the first stage.
        seed: of the weights.
        options: the method's.

    Example:
        >>> sum(p.numel() for p in resnet(18, "bn", 1000).parameters())
        11689512
    """
    method = _method(method, options)
    _check_resnet(depth, method, skip, stem)
    plain = method.norm == "imn" and skip == "plain"
    with methods.seeded(seed):
        parts = _Parts(methods.get("bn") if plain else method)
        model = ResNet(parts, *_DEPTHS[depth], classes, small=stem == "small", width=width)
        if plain:
            images = torch.zeros(2, 3, 32, 32)
            layers: dict[str, Any] = {"init": method.init, **_form(method)}
            gp.convert_(model, norm="imn", example_inputs=images, **layers)
            methods.use_papers_means_(model)
    return model


def _method(method: Method | str, options: dict[str, str]) -> Method:
    if isinstance(method, str):
        return methods.get(method, **options)
    return replace(method, **options)  # type: ignore[arg-type]


# --- residual networks --------------------------------------------------------------------------


class _Parts:
    """What a residual network is made of under one method."""

    def __init__(self, method: Method) -> None:
        self.method = method

    def conv(self, inputs: int, units: int, kernel: int, stride: int = 1) -> nn.Module:
        method, padding = self.method, kernel // 2
        if not method.is_geometric:
            return method.conv2d(inputs, units, kernel, stride=stride, padding=padding)[0]
        return gp.GmPConv2d(
            inputs,
            units,
            kernel,
            stride,
            padding,
            bias=method.norm != "bn",
            **{"init": method.init, **_form(method)},
        )

    def norm(self, units: int) -> nn.Module:
        """Return the norm of pre-activations, with torchvision's constants."""
        if self.method.norm == "bn":
            return nn.BatchNorm2d(units)
        if self.method.norm == "ln":
            return nn.GroupNorm(1, units)
        if self.method.norm == "mbn":
            norm = gp.MeanOnlyBatchNorm(units, bias=self.method.mbn_bias == "after")
            return methods.use_papers_means_(norm)
        return nn.Identity()

    def activation(self, units: int) -> nn.Module:
        """Return ReLU, and IMN after it: both what a convolution and what a skip sees."""
        relu = nn.ReLU(inplace=True)
        if self.method.norm != "imn":
            return relu
        return nn.Sequential(relu, methods.use_papers_means_(gp.InputMeanNorm(units)))


class BasicBlock(nn.Module):
    """Two 3x3 convolutions and a skip connection."""

    expansion = 1

    def __init__(self, parts: _Parts, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv1 = parts.conv(inputs, width, 3, stride)
        self.bn1 = parts.norm(width)
        self.activation1 = parts.activation(width)
        self.conv2 = parts.conv(width, width, 3)
        self.bn2 = parts.norm(width)
        self.activation2 = parts.activation(width)
        self.downsample = _downsample(parts, inputs, width, stride)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.activation1(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(hidden))
        return self.activation2(out + (x if self.downsample is None else self.downsample(x)))


class Bottleneck(nn.Module):
    """A 3x3 convolution between two of 1x1, and a skip connection."""

    expansion = 4

    def __init__(self, parts: _Parts, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        units = width * self.expansion
        self.conv1 = parts.conv(inputs, width, 1)
        self.bn1 = parts.norm(width)
        self.activation1 = parts.activation(width)
        self.conv2 = parts.conv(width, width, 3, stride)
        self.bn2 = parts.norm(width)
        self.activation2 = parts.activation(width)
        self.conv3 = parts.conv(width, units, 1)
        self.bn3 = parts.norm(units)
        self.activation3 = parts.activation(units)
        self.downsample = _downsample(parts, inputs, units, stride)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.activation1(self.bn1(self.conv1(x)))
        hidden = self.activation2(self.bn2(self.conv2(hidden)))
        out = self.bn3(self.conv3(hidden))
        return self.activation3(out + (x if self.downsample is None else self.downsample(x)))


def _downsample(parts: _Parts, inputs: int, units: int, stride: int) -> nn.Sequential | None:
    if stride == 1 and inputs == units:
        return None
    return nn.Sequential(parts.conv(inputs, units, 1, stride), parts.norm(units))


Block = type[BasicBlock] | type[Bottleneck]
_DEPTHS: dict[int, tuple[Block, tuple[int, ...]]] = {
    18: (BasicBlock, (2, 2, 2, 2)),
    34: (BasicBlock, (3, 4, 6, 3)),
    50: (Bottleneck, (3, 4, 6, 3)),
}


class ResNet(nn.Module):
    """A residual network of four stages, with torchvision's names for what holds parameters."""

    def __init__(
        self,
        parts: _Parts,
        block: Block,
        depths: Sequence[int],
        classes: int,
        *,
        small: bool,
        width: int,
    ) -> None:
        super().__init__()
        self.conv1 = parts.conv(3, width, 3, 1) if small else parts.conv(3, width, 7, 2)
        self.bn1 = parts.norm(width)
        self.activation = parts.activation(width)
        self.maxpool = nn.Identity() if small else nn.MaxPool2d(3, 2, padding=1)
        inputs = width
        for number, count in enumerate(depths):
            units, blocks = width * 2**number, []
            for index in range(count):
                stride = 2 if number > 0 and index == 0 else 1
                blocks.append(block(parts, inputs, units, stride))
                inputs = units * block.expansion
            self.add_module(f"layer{number + 1}", nn.Sequential(*blocks))
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.flatten = nn.Flatten()
        self.fc = parts.method.output(inputs, classes)

    def forward(self, x: Tensor) -> Tensor:
        for part in self.children():
            x = part(x)
        return x


def _form(method: Method) -> dict[str, Any]:
    """Return how a GmP layer of this method holds its directions."""
    coordinates = "intrinsic" if method.layer == "intrinsic" else "angles"
    return {"coordinates": coordinates, "natural": method.layer == "natural"}


def _check_resnet(depth: int, method: Method, skip: str, stem: str) -> None:
    if depth not in _DEPTHS:
        raise ValueError(f"the depth is one of {', '.join(map(str, _DEPTHS))}; got {depth}.")
    if skip not in ("centred", "plain"):
        raise ValueError(f"skip is 'centred' or 'plain'; got {skip!r}.")
    if stem not in ("imagenet", "small"):
        raise ValueError(f"stem is 'imagenet' or 'small'; got {stem!r}.")
    if method.norm == "imn" and method.imn != "output":
        raise ValueError(
            "in a ResNet, IMN at each convolution's input is skip='plain'; got "
            f"imn={method.imn!r}. Leave imn as it is."
        )
