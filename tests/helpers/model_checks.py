"""Questions about a model that many tests ask: which modules it holds, and what state it has."""

from collections.abc import Mapping

from torch import Tensor, nn
from torch.testing import assert_close


def has_batchnorm(model: nn.Module) -> bool:
    batchnorm = nn.modules.batchnorm._BatchNorm
    return any(isinstance(module, batchnorm) for module in model.modules())


def has_geoparam_modules(model: nn.Module) -> bool:
    return any(type(module).__module__.startswith("geoparam") for module in model.modules())


def copy_state(model: nn.Module) -> dict[str, Tensor]:
    """Return a copy of the model's state that later writes do not change."""
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


def assert_same_state(model: nn.Module, expected: Mapping[str, Tensor]) -> None:
    """Assert that the model's state is the expected one, to the bit."""
    assert_close(dict(model.state_dict()), dict(expected), rtol=0, atol=0)
