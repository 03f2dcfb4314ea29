"""nn.MultiheadAttention with its input projection under geometric parameterization."""

from typing import Any

from torch import Tensor, nn

from geoparam.computed import as_computed
from geoparam.input_mean_layers import copy_as
from geoparam.layers import GmPLinear


class GmPMultiheadAttention(nn.MultiheadAttention):
    """torch's attention, whose `in_proj_weight` and `in_proj_bias` are views of a `GmPLinear`.

    Query, key and value of all heads are rows of one matrix, so one layer `in_proj` holds them.
    `convert_` makes it from torch's attention, whose forward and other parts it keeps.

    Example:
        >>> import copy, torch
        >>> from geoparam import convert_
        >>> attention, x = nn.MultiheadAttention(8, 2, batch_first=True), torch.randn(3, 5, 8)
        >>> converted = convert_(copy.deepcopy(attention))
        >>> torch.allclose(converted(x, x, x)[0], attention(x, x, x)[0], atol=1e-5)
        True
    """

    in_proj: GmPLinear

    @classmethod
    def around(
        cls, attention: nn.MultiheadAttention, in_proj: GmPLinear
    ) -> "GmPMultiheadAttention":
        """Return a copy of `attention` with this input projection."""
        converted = copy_as(cls, attention)
        # None rather than removed, so that folding puts them back in their order.
        converted._parameters.update(in_proj_weight=None, in_proj_bias=None)
        converted.in_proj = in_proj.train(attention.training)
        return converted

    def to_attention(self) -> nn.MultiheadAttention:
        """Return the nn.MultiheadAttention that computes the same, once `in_proj` is plain."""
        plain = copy_as(nn.MultiheadAttention, self)
        linear = plain._modules.pop("in_proj")
        for name, parameter in linear.named_parameters():
            plain._parameters[f"in_proj_{name}"] = parameter
        return plain

    @property
    def in_proj_weight(self) -> Tensor:  # type: ignore[override]
        return as_computed(self.in_proj._weight(None))

    @property
    def in_proj_bias(self) -> Tensor | None:  # type: ignore[override]
        return self.in_proj.bias

    def __setattr__(self, name: str, value: Any) -> None:
        """Set the parameters of `in_proj` where its weight or bias is assigned."""
        if name in ("in_proj_weight", "in_proj_bias"):
            setattr(self.in_proj, name.removeprefix("in_proj_"), value)
        else:
            super().__setattr__(name, value)
