"""A layer that subtracts its input's mean, beside a norm and a plain layer that do the same."""

import torch
from torch import nn


def check_same_training(fused: nn.Module, pair: nn.Sequential, x: torch.Tensor) -> None:
    """Outputs, gradients and running means agree in training, and outputs in evaluation."""
    pair[1].load_state_dict(fused.state_dict(), strict=False)
    a, b = x.clone().requires_grad_(), x.clone().requires_grad_()
    out, expected = fused(a), pair(b)
    torch.testing.assert_close(out, expected)
    target = torch.randn_like(out)
    (out * target).sum().backward()
    (expected * target).sum().backward()
    torch.testing.assert_close(a.grad, b.grad)
    for name, parameter in pair[1].named_parameters():
        torch.testing.assert_close(fused.get_parameter(name).grad, parameter.grad)
    mean = getattr(fused, "input_norm", fused).running_mean
    torch.testing.assert_close(mean, pair[0].running_mean)
    torch.testing.assert_close(fused.eval()(x), pair.eval()(x))
