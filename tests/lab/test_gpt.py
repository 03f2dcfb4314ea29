"""The GPT: what it sees, how it starts, and its options."""

import math
from typing import Any

import pytest
import torch
from torch import nn

from geoparam_lab import gpt

CONTEXT = 12
WIDTH = 32


def build_gpt(**changes: Any) -> gpt.GPT:
    """Build a network of two blocks with two heads of 16 channels."""
    return gpt.build(WIDTH, 2, heads=2, context=CONTEXT, **changes)


@pytest.fixture
def tokens() -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randint(256, (3, CONTEXT), generator=generator)


@pytest.mark.parametrize("mlp", gpt.MLPS)
@pytest.mark.parametrize("norm", gpt.NORMS)
def test_no_output_depends_on_later_bytes(norm: str, mlp: str, tokens: torch.Tensor) -> None:
    model = build_gpt(norm=norm, mlp=mlp)
    changed = tokens.clone()
    changed[:, 7:] = (tokens[:, 7:] + 1) % 256

    before = model(tokens)
    after = model(changed)

    torch.testing.assert_close(before[:, :7], after[:, :7])
    difference = before[:, 7:] - after[:, 7:]
    assert difference.abs().max() > 1e-3


def attend(attention: nn.Module, x: torch.Tensor, rows: slice) -> torch.Tensor:
    """Return one head's softmax attention, whose weights are these rows."""
    q = x @ attention.query.weight[rows].T
    k = x @ attention.key.weight[rows].T
    v = x @ attention.value.weight[rows].T
    is_later = torch.ones(CONTEXT, CONTEXT).triu(diagonal=1).bool()
    scores = q @ k.mT / math.sqrt(q.shape[-1])
    weights = scores.masked_fill(is_later, -math.inf).softmax(dim=-1)
    return weights @ v


def test_attention_is_softmax_attention_head_by_head() -> None:
    attention = build_gpt().blocks[0].attention
    x = torch.randn(2, CONTEXT, WIDTH)
    first_head = attend(attention, x, slice(0, 16))
    second_head = attend(attention, x, slice(16, 32))

    expected = attention.out(torch.cat([first_head, second_head], dim=-1))

    torch.testing.assert_close(attention(x), expected)


@pytest.mark.parametrize("width", [64, 256])
def test_rows_start_with_one_length_at_every_width(width: int) -> None:
    block = gpt.build(width, 2, heads=2, context=8).blocks[0]

    def find_mean_length(layer: nn.Linear) -> float:
        return layer.weight.norm(dim=1).mean().item()

    query = find_mean_length(block.attention.query)
    up = find_mean_length(block.up)
    down = find_mean_length(block.down)

    assert query == pytest.approx(1 / math.sqrt(3), rel=0.05)
    assert up == pytest.approx(1 / math.sqrt(3), rel=0.05)
    assert down == pytest.approx(1 / math.sqrt(3 * 4), rel=0.05)


def test_zero_started_projections_leave_the_stream_alone(tokens: torch.Tensor) -> None:
    model = build_gpt(zero_projections=True)

    stream = model.token(tokens) + model.position(torch.arange(CONTEXT))

    expected = model.head(model.norm(stream))
    torch.testing.assert_close(model(tokens), expected)


def test_a_tied_head_is_the_embedding() -> None:
    model = build_gpt(tied=True)

    assert model.head.weight is model.token.weight
    assert "head.weight" not in dict(model.named_parameters())


def test_hidden_weights_are_the_linear_maps_of_the_blocks() -> None:
    model = build_gpt()
    linears = [module for module in model.blocks.modules() if isinstance(module, nn.Linear)]
    expected = {id(layer.weight) for layer in linears}

    hidden = {id(weight) for weight in model.hidden_weights()}

    assert hidden == expected
    assert len(linears) == 2 * 6


def test_dropout_changes_outputs_in_training(tokens: torch.Tensor) -> None:
    model = build_gpt(dropout=0.5)

    assert not torch.equal(model(tokens), model(tokens))


def test_dropout_is_off_in_evaluation(tokens: torch.Tensor) -> None:
    model = build_gpt(dropout=0.5).eval()

    assert torch.equal(model(tokens), model(tokens))


def test_the_seed_decides_the_weights() -> None:
    weight = build_gpt(seed=1).head.weight

    assert torch.equal(weight, build_gpt(seed=1).head.weight)
    assert not torch.equal(weight, build_gpt(seed=2).head.weight)


def test_heads_must_divide_the_width() -> None:
    with pytest.raises(ValueError, match="multiple of heads; got 32 and 3"):
        gpt.build(32, 1, heads=3, context=8)
