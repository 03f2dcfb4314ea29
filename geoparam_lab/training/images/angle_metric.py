"""What a tracked run records of GmP's angles, beside the library's quantities."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

import geoparam as gp
from geoparam.analysis import Interval, LayerQuantity

NEGLIGIBLE = 1e-4  # a metric below this: a step of the angle turns the unit by under 1 % of it
SAMPLED = 64  # units of a layer whose angles are counted: a scan of all took 0.7 ms on an H200


class AngleMetric(LayerQuantity):
    """The smallest product of cosines in a unit, and the share of angles with negligible metric.

    Angle k has the metric P_k^2 with P_k = prod_{j<k} cos a_j = ||u_{k..n}||; P falls with k.
    """

    columns = ("smallest_product", "negligible_metric")

    def measure(self, interval: Interval) -> Sequence[Mapping[str, Tensor]]:
        smallest: dict[str, Tensor] = {}
        negligible: dict[str, Tensor] = {}
        for name, site in interval.layout.sites.items():
            layer = site.layer
            if not isinstance(layer, gp.GmPLayer) or not layer.has_angles:
                continue
            u = layer.direction.flatten(1)
            smallest[name] = torch.linalg.vector_norm(u[:, -2:], dim=1).amin()

            # P_k^2 = 1 - (u_1^2 + ... + u_{k-1}^2); P_1 = 1 is never small.
            every = -(-len(u) // SAMPLED)
            squares = u[::every].square()
            is_small = squares[:, :-2].cumsum(dim=1) > 1 - NEGLIGIBLE
            negligible[name] = is_small.sum() / squares[:, 1:].numel()
        return smallest, negligible
