"""The place of a BatchNorm that a layer has absorbed."""

import copy
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from geoparam.base_layer import GmPLayer


class RemovedNorm(nn.Sequential):
    """It passes its input on, and remembers norm and layer, so that folding restores the norm.

    The norm's child modules still run: timm's norms hold their activation.
    """

    if TYPE_CHECKING:  # torch.jit.script reads annotations, and takes no modules in them
        norm: nn.Module
        layer: nn.Module
        layer_had_bias: bool
        layer_type: torch.dtype
        offset_learned: bool

    def __init__(self, norm: nn.Module, old: Any, new: nn.Module) -> None:
        super().__init__()
        for name, child in norm.named_children():
            self.add_module(name, child)
        # Not registered: the norm and the layer are no part of this module's state.
        self.__dict__.update(norm=norm, layer=new)
        self.layer_had_bias = old.bias is not None
        self.layer_type = old.weight.dtype
        self.offset_learned = self.offset_learns()  # at the conversion

    def offset_learns(self) -> bool:
        """Return whether the layer trains the offset that it took over from the norm."""
        layer: Any = self.layer
        offset: Any = layer.lam if isinstance(layer, GmPLayer) else layer.bias
        return offset.requires_grad

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        """Refuse the norm's own values, with `strict=False` too: the weights are without it."""
        super()._load_from_state_dict(state_dict, prefix, *rest)
        if f"{prefix}running_mean" in state_dict:
            errors = rest[-1]
            errors.append(
                f"{prefix[:-1]} is a BatchNorm that a layer of this model has absorbed, and the "
                "file has its values, with weights from before. Load it before convert_, or "
                "after fold_(model, restore_norm=True). As torch does, this load has written what "
                "fits, so begin again with a new model."
            )

    def follow(self, layer: nn.Module) -> "RemovedNorm":
        """Return this place for a layer that replaces the one which absorbed the norm."""
        moved = copy.copy(self)
        moved.__dict__["layer"] = layer
        return moved


def find_removed_norms(model: nn.Module) -> dict[nn.Module, RemovedNorm]:
    """Return the place of the BatchNorm that each layer has absorbed."""
    return {module.layer: module for module in model.modules() if isinstance(module, RemovedNorm)}
