"""How large things are in a network that is not trained yet: activations, gradients, one step.

Sizes are root mean squares. A step is Adam's first: every parameter moves by the rate, against the
sign of its gradient, however small that is.
"""

from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor, nn

from geoparam_lab.run_folder import Record
from geoparam_lab.training.stacks import stacked

STEP = 0.01  # rate of the step


class Variant(NamedTuple):
    """A method and its initialisation."""

    method: str
    init: str

    @property
    def title(self) -> str:
        return _TITLES[self]


_TITLES = {
    Variant("gmp", "sphere"): "GmP, text (r = 1)",
    Variant("gmp", "glorot"): "GmP, code (r = ‖w‖)",
    Variant("sp", "glorot"): "SP, Glorot",
    Variant("sp", "he"): "SP, He",
}
VARIANTS = tuple(_TITLES)


def measure_start(model: nn.Sequential, x: Tensor, y: Tensor) -> Record:
    """Return the scale (root mean square) of what a new network computes and of its gradients."""
    hidden = model[:-1](x)
    output = model[-1](hidden).squeeze(-1)
    stacked.absolute_error(output[None], y[None]).backward()
    gradients = {
        f"gradient_{group}": _rms(parameter.grad)
        for group, parameter in group_parameters(model).items()
        if parameter.grad is not None
    }
    found = {"activation": _rms(hidden), "output": _rms(output), **gradients}
    adam_step_(model.parameters())
    return found | {"output_change": _rms(model(x).squeeze(-1) - output)}


def group_parameters(model: nn.Sequential) -> dict[str, nn.Parameter]:
    """Return the hidden units' parameters by what they are for, and the output weights."""
    names = {"latitude": "direction", "weight": "direction", "lam": "offset", "bias": "offset"}
    hidden = dict(model[0].named_parameters())
    found = {names.get(name, "scale"): parameter for name, parameter in hidden.items()}
    output = dict(model[-1].named_parameters())["weight"]
    return {group: found[group] for group in sorted(found)} | {"output": output}


@torch.no_grad()
def adam_step_(parameters: Iterable[nn.Parameter], rate: float = STEP) -> None:
    """Take Adam's first step: each parameter by the rate, against the sign of its gradient."""
    for parameter in parameters:
        if parameter.grad is not None:
            parameter.sub_(rate * parameter.grad.sign())


def _rms(values: Tensor | None) -> float:
    assert values is not None
    return float(values.detach().square().mean().sqrt())
