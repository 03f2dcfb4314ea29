"""Every parameterization tells what it stores, and a twin is the layer with other values."""

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations

import geoparam as gp
from geoparam.analysis.perturbation.steps import (
    add_steps,
    perturb_layer,
    read_stored,
)

OLD = pytest.mark.filterwarnings("ignore:.*weight_norm.*:FutureWarning")


WN, ORIGINAL = parametrizations.weight_norm, "parametrizations.weight.original"
ROLES: list[tuple[nn.Module, dict[str, str]]] = [
    (nn.Linear(3, 2), {"direction": "weight", "offset": "bias"}),
    (nn.Conv2d(3, 2, 5, bias=False), {"direction": "weight"}),
    (
        WN(nn.Linear(3, 2)),
        {"direction": ORIGINAL + "1", "length": ORIGINAL + "0", "offset": "bias"},
    ),
    (gp.GmPLinear(3, 2), {"direction": "latitude", "scale": "r", "offset": "lam"}),
    (gp.GmPLinear(3, 2, coordinates="intrinsic", bias=False), {"direction": "unit", "scale": "r"}),
    (gp.GmPLinear(1, 2), {"scale": "r", "offset": "lam"}),
    (nn.MultiheadAttention(4, 2), {"direction": "in_proj_weight", "offset": "in_proj_bias"}),
    (
        parametrizations.spectral_norm(nn.Linear(3, 2)),
        {"direction": ORIGINAL, "offset": "bias"},
    ),
]


@pytest.mark.parametrize(("layer", "expected"), ROLES)
def test_roles_are_the_parameters_of_the_layer(layer: nn.Module, expected: dict[str, str]) -> None:
    parameters = dict(layer.named_parameters())
    found = read_stored(layer)
    assert set(found) == set(expected)
    for role, name in expected.items():
        assert found[role].data_ptr() == parameters[name].data_ptr()


@pytest.mark.parametrize(
    ("norm", "expected"),
    [
        (nn.BatchNorm1d(2), {"gamma", "beta"}),
        (nn.BatchNorm1d(2, affine=False), set()),
        (nn.LayerNorm(2), {"gamma", "beta"}),
        (gp.MeanOnlyBatchNorm(2), {"beta"}),
        (gp.InputMeanNorm(2), set()),
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_norm_adds_gamma_and_beta_where_it_has_them(norm: nn.Module, expected: set) -> None:
    assert set(read_stored(nn.Linear(3, 2), norm)) == {"direction", "offset"} | expected


def test_a_weight_made_from_several_tensors_is_refused() -> None:
    class Product(nn.Module):
        def forward(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
            return a @ b

        def right_inverse(self, w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return w, torch.eye(w.shape[1])

    layer = nn.utils.parametrize.register_parametrization(nn.Linear(3, 3), "weight", Product())
    with pytest.raises(ValueError, match="Leave it out by `layers`"):
        read_stored(layer)


@pytest.mark.parametrize("layer", [WN(nn.Conv2d(3, 2, 3)), gp.GmPLinear(3, 2)], ids=["wn", "gmp"])
def test_a_twin_has_the_weight_of_its_own_values_and_leaves_the_layer_alone(
    layer: nn.Module,
) -> None:
    weight, before = layer.weight.detach().clone(), dict(layer.named_parameters())
    step = torch.randn_like(read_stored(layer)["direction"], dtype=torch.float64)
    other, _ = perturb_layer(layer, {"direction": step})
    assert other.weight.dtype == torch.float64
    assert not torch.allclose(other.weight.float(), weight)
    assert torch.allclose(perturb_layer(layer, {})[0].weight.float(), weight, atol=1e-6)
    after = dict(layer.named_parameters())
    assert all(after[name] is before[name] for name in before)
    assert torch.equal(layer.weight, weight)


def test_a_step_is_rounded_to_what_the_parameter_can_hold() -> None:
    layer = nn.Linear(1, 1)
    nn.init.ones_(layer.weight)
    tiny = {"direction": torch.full((1, 1), 1e-9, dtype=torch.float64)}
    assert add_steps(layer, None, tiny)[layer]["weight"].item() == 1.0


def test_steps_of_roles_that_are_not_there_are_refused() -> None:
    with pytest.raises(ValueError, match=r"roles direction, offset; got steps of \['length'\]"):
        add_steps(nn.Linear(3, 2), None, {"length": torch.ones(2)})
