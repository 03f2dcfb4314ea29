"""Model families that people bring, in small configurations, with random weights.

`layers` is the number of layers that conversion must change, `some` names a few of them, `left`
the ones that must stay. Everything is built from a configuration: nothing is downloaded.
"""

from collections.abc import Callable
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

import pytest
import torch
from torch import nn


@dataclass(frozen=True)
class Family:
    name: str
    build: Callable[[], nn.Module]
    inputs: Callable[[], Any]
    layers: int
    some: tuple[str, ...]
    left: tuple[str, ...]
    norms: int = 0  # BatchNorms that norm="imn" removes
    slow: bool = False  # in `make test-models` only


def image(size: int) -> Callable[[], tuple[torch.Tensor]]:
    return lambda: (torch.randn(2, 3, size, size),)


def torchvision(name: str, **options: Any) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        models = pytest.importorskip("torchvision.models")
        return attrgetter(name)(models)(**options)

    return build


def timm(name: str, **options: Any) -> Callable[[], nn.Module]:
    return lambda: pytest.importorskip("timm").create_model(name, **options)


def transformers(model: str, config: str, **options: Any) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        library = pytest.importorskip("transformers")
        return getattr(library, model)(getattr(library, config)(**options))

    return build


def ids(length: int = 7) -> torch.Tensor:
    return torch.randint(2, 50, (2, length))


BLOCKS = {"num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
TEXT = {"vocab_size": 50, "hidden_size": 16, **BLOCKS}
VISION = {"image_size": 32, "patch_size": 8, "hidden_size": 16, **BLOCKS}

FAMILIES = [
    Family("resnet18", torchvision("resnet18", num_classes=10), image(32), 20,
           ("conv1", "layer2.0.downsample.0"), ("fc",), 20),
    Family("resnet50", torchvision("resnet50", num_classes=10), image(32), 53,
           ("layer1.0.conv3", "layer4.2.conv2"), ("fc",), 53, slow=True),
    Family("mobilenet_v3", torchvision("mobilenet_v3_small", num_classes=10), image(32), 53,
           ("features.1.block.1.fc1", "classifier.0"), ("classifier.3",), 34),
    Family("vgg16_bn", torchvision("vgg16_bn", num_classes=10), image(32), 15,
           ("features.0", "classifier.0"), ("classifier.6",), 13, slow=True),
    Family("convnext", torchvision("convnext_tiny", num_classes=10), image(32), 58,
           ("features.0.0", "features.1.0.block.3"), ("classifier.2",), slow=True),
    Family("vit", torchvision("VisionTransformer", image_size=32, patch_size=8, num_layers=2,
                              num_heads=4, hidden_dim=32, mlp_dim=64), image(32), 9,
           ("conv_proj", "encoder.layers.encoder_layer_0.self_attention.in_proj_weight",
            "encoder.layers.encoder_layer_0.self_attention.out_proj"), ("heads.head",)),
    Family("timm_resnet", timm("resnet18", num_classes=10), image(32), 20,
           ("layer1.0.conv1",), ("fc",), 20, slow=True),
    Family("timm_efficientnet", timm("efficientnet_b0", num_classes=10), image(32), 81,
           ("conv_stem", "blocks.0.0.se.conv_reduce"), ("classifier",), 49, slow=True),
    Family("timm_vit", timm("vit_tiny_patch16_224", img_size=32, depth=2, num_classes=10),
           image(32), 9, ("patch_embed.proj", "blocks.0.attn.qkv"), ("head",)),
    Family("clip", transformers("CLIPModel", "CLIPConfig", projection_dim=8,
                                text_config={**TEXT, "max_position_embeddings": 16,
                                             "bos_token_id": 0, "eos_token_id": 1},
                                vision_config=VISION),
           lambda: {"input_ids": ids(), "pixel_values": torch.randn(2, 3, 32, 32)}, 25,
           ("text_model.encoder.layers.0.self_attn.q_proj",
            "vision_model.encoder.layers.1.mlp.fc1"), ("visual_projection", "text_projection")),
    Family("vit_hf", transformers("ViTForImageClassification", "ViTConfig", **VISION),
           lambda: {"pixel_values": torch.randn(2, 3, 32, 32)}, 13, (), ("classifier",)),
    Family("resnet_hf", transformers("ResNetForImageClassification", "ResNetConfig",
                                     embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1],
                                     layer_type="basic"),
           lambda: {"pixel_values": torch.randn(2, 3, 32, 32)}, 6, (), ("classifier.1",), 6),
    Family("bert", transformers("BertForMaskedLM", "BertConfig", **TEXT),
           lambda: {"input_ids": ids()}, 13,
           ("bert.encoder.layer.0.attention.self.query",), ("cls.predictions.decoder",)),
    Family("gpt2", transformers("GPT2LMHeadModel", "GPT2Config", vocab_size=50, n_positions=16,
                                n_embd=16, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=1),
           lambda: {"input_ids": ids(), "use_cache": False}, 8,
           ("transformer.h.0.attn.c_attn", "transformer.h.1.mlp.c_fc"), ("lm_head",)),
    Family("transformer", lambda: nn.Transformer(16, 4, 2, 2, 32, batch_first=True),
           lambda: (torch.randn(2, 5, 16), torch.randn(2, 4, 16)), 19,
           ("encoder.layers.0.self_attn.in_proj_weight", "decoder.layers.0.linear1"),
           ("decoder.layers.1.linear2",)),
]  # fmt: skip


def pretend_pretrained(model: nn.Module) -> nn.Module:
    """Give BatchNorms the scales and statistics of a trained network, some scales negative."""
    for module in model.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            with torch.no_grad():
                module.weight.uniform_(0.5, 1.5)
                module.weight[::5] *= -1
                module.bias.normal_(0, 0.2)
                module.running_mean.normal_(0, 0.2)
                module.running_var.uniform_(0.5, 2)
    return model
