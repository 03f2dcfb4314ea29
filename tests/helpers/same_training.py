"""A layer that subtracts its input's mean, beside a norm and a plain layer that do the same."""

import torch
from torch import nn
from torch.testing import assert_close


def check_same_training(fused: nn.Module, pair: nn.Sequential, x: torch.Tensor) -> None:
    """Outputs, gradients and running means agree in training, and outputs in evaluation."""
    norm, plain = pair
    plain.load_state_dict(fused.state_dict(), strict=False)
    fused_x = x.clone().requires_grad_()
    pair_x = x.clone().requires_grad_()

    output = fused(fused_x)
    expected = pair(pair_x)
    assert_close(output, expected)

    output_grad = torch.randn_like(output)
    output.backward(output_grad)
    expected.backward(output_grad)
    assert_close(fused_x.grad, pair_x.grad)
    for name, parameter in plain.named_parameters():
        assert_close(fused.get_parameter(name).grad, parameter.grad)

    fused_norm = getattr(fused, "input_norm", fused)
    assert_close(fused_norm.running_mean, norm.running_mean)
    assert_close(fused.eval()(x), pair.eval()(x))
