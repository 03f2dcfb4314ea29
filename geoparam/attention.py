"""nn.MultiheadAttention with its input projection under geometric parameterization."""

from torch import Tensor, nn

from geoparam.coordinates import Name
from geoparam.input_mean_layers import copy_as
from geoparam.layers import GmPLinear, as_linear


class GmPMultiheadAttention(nn.MultiheadAttention):
    """torch's attention, whose `in_proj_weight` and `in_proj_bias` are views of a `GmPLinear`.

    Query, key and value of all heads are rows of one matrix, so one layer `in_proj` holds them.
    It is made from an attention that is there, by `from_attention`, and taken off by
    `to_attention`; everything else, forward included, is torch's.

    Example:
        >>> import torch
        >>> attention, x = nn.MultiheadAttention(8, 2, batch_first=True), torch.randn(3, 5, 8)
        >>> converted = GmPMultiheadAttention.from_attention(attention)
        >>> torch.allclose(converted(x, x, x)[0], attention(x, x, x)[0], atol=1e-5)
        True
    """

    in_proj: GmPLinear

    @classmethod
    def from_attention(
        cls,
        attention: nn.MultiheadAttention,
        *,
        coordinates: Name = "angles",
        natural: bool = False,
    ) -> "GmPMultiheadAttention":
        """Return attention that computes the same."""
        weight, bias = attention.in_proj_weight, attention.in_proj_bias
        if weight is None:
            raise ValueError(
                "this attention has separate projections for query, key and value (kdim or vdim "
                "is given), which share one bias: leave it as it is."
            )
        linear = as_linear(weight, bias).train(attention.training)
        in_proj = GmPLinear.from_linear(linear, coordinates=coordinates, natural=natural)
        return cls.around(attention, in_proj)

    @classmethod
    def around(
        cls, attention: nn.MultiheadAttention, in_proj: GmPLinear
    ) -> "GmPMultiheadAttention":
        """Return attention with another input projection."""
        converted = copy_as(cls, attention)
        converted._parameters.update(in_proj_weight=None, in_proj_bias=None)  # keeps their order
        converted.in_proj = in_proj.train(attention.training)
        return converted

    def to_attention(self) -> nn.MultiheadAttention:
        """Return the nn.MultiheadAttention that computes the same."""
        plain = copy_as(nn.MultiheadAttention, self)
        linear = plain._modules.pop("in_proj")
        linear = linear.to_linear() if isinstance(linear, GmPLinear) else linear
        assert isinstance(linear, nn.Linear)
        plain._parameters.update(
            {f"in_proj_{name}": parameter for name, parameter in linear.named_parameters()}
        )
        return plain

    @property
    def in_proj_weight(self) -> Tensor:  # type: ignore[override]
        return self.in_proj._current_weight(None)

    @property
    def in_proj_bias(self) -> Tensor | None:  # type: ignore[override]
        return self.in_proj._bias
