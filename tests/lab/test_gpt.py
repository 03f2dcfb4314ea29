"""The GPT: what it sees, how it starts, and its options."""

import math
from typing import Any

import pytest
import torch
from torch import nn

from geoparam_lab import gpt


def network(**changes: Any) -> gpt.GPT:
    return gpt.build(32, 2, heads=2, context=12, **changes)


def tokens() -> torch.Tensor:
    return torch.randint(256, (3, 12), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("mlp", gpt.MLPS)
@pytest.mark.parametrize("norm", gpt.NORMS)
def test_no_output_depends_on_later_bytes(norm: str, mlp: str) -> None:
    model, x = network(norm=norm, mlp=mlp), tokens()
    changed = x.clone()
    changed[:, 7:] = (x[:, 7:] + 1) % 256
    before, after = model(x), model(changed)
    torch.testing.assert_close(before[:, :7], after[:, :7])
    assert (before[:, 7:] - after[:, 7:]).abs().max() > 1e-3


def test_attention_is_softmax_attention_head_by_head() -> None:
    attention = network().blocks[0].attention
    x = torch.randn(2, 12, 32)
    mask = torch.ones(12, 12).tril().bool()
    heads = []
    for rows in (slice(0, 16), slice(16, 32)):
        q, k, v = (
            x @ layer.weight[rows].T for layer in (attention.query, attention.key, attention.value)
        )
        scores = (q @ k.mT / math.sqrt(16)).masked_fill(~mask, -math.inf)
        heads.append(scores.softmax(dim=-1) @ v)
    expected = attention.out(torch.cat(heads, dim=-1))
    torch.testing.assert_close(attention(x), expected)


def test_rows_start_with_one_length_at_every_width() -> None:
    for width in (64, 256):
        block = gpt.build(width, 2, heads=2, context=8).blocks[0]
        for layer in (block.attention.query, block.up):
            length = layer.weight.norm(dim=1).mean().item()
            assert length == pytest.approx(1 / math.sqrt(3), rel=0.05)
        down = block.down.weight.norm(dim=1).mean().item()
        assert down == pytest.approx(1 / math.sqrt(3 * 4), rel=0.05)


def test_zero_started_projections_leave_the_stream_alone() -> None:
    model, x = network(zero_projections=True), tokens()
    stream = model.token(x) + model.position(torch.arange(12))
    torch.testing.assert_close(model(x), model.head(model.norm(stream)))


def test_a_tied_head_is_the_embedding() -> None:
    model = network(tied=True)
    assert model.head.weight is model.token.weight
    assert "head.weight" not in dict(model.named_parameters())


def test_hidden_weights_are_the_linear_maps_of_the_blocks() -> None:
    model = network()
    linears = [module for module in model.blocks.modules() if isinstance(module, nn.Linear)]
    assert {id(w) for w in model.hidden_weights()} == {id(layer.weight) for layer in linears}
    assert len(linears) == 2 * 6


def test_dropout_is_for_training_alone() -> None:
    model, x = network(dropout=0.5), tokens()
    assert not torch.equal(model(x), model(x))
    model.eval()
    assert torch.equal(model(x), model(x))


def test_one_seed_is_one_network() -> None:
    first, second, third = (network(seed=seed).head.weight for seed in (1, 1, 2))
    assert torch.equal(first, second) and not torch.equal(first, third)


def test_heads_divide_the_width() -> None:
    with pytest.raises(ValueError, match="multiple of heads; got 32 and 3"):
        gpt.build(32, 1, heads=3, context=8)
