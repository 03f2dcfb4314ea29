"""Directional derivatives of the operator and of its gradient, in plain differentiable torch.

They are the double backward, since second derivatives are symmetric: along (da, dr) the weight
changes by `weight_tangent`, and the gradient of <g, weight> by `gradient_tangent`. All recurrences
are solved by `sphere.scan`, so there is no division, and both can be differentiated again.
"""

import torch
from torch import Tensor

from geoparam.sphere import products, scan, wide


def weight_tangent(latitude: Tensor, r: Tensor | None, d_latitude: Tensor, d_r: Tensor) -> Tensor:
    """Return the change of w = r u along (d_latitude, d_r), in float64."""
    sin, cos, p = _trigonometry(latitude)
    scale = torch.ones_like(p[..., :1]) if r is None else wide(r)[..., None]
    step = wide(d_latitude)
    d_p = _products_tangent(sin, cos, p, step)
    d_u = torch.cat([cos * step * p[..., :-1] + sin * d_p[..., :-1], d_p[..., -1:]], dim=-1)
    u = torch.cat([sin * p[..., :-1], p[..., -1:]], dim=-1)
    return scale * d_u + wide(d_r)[..., None] * u


def gradient_tangent(
    grad: Tensor, latitude: Tensor, r: Tensor | None, d_latitude: Tensor, d_r: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the change of (dL/dlatitude, dL/dr) along (d_latitude, d_r), in float64.

    dL/da_k = r P_k z_k with z_k = cos a_k g_k - sin a_k R_k, and dL/dr = R_0; here each of these
    is differentiated by the product rule.
    """
    sin, cos, p = _trigonometry(latitude)
    g, step = wide(grad), wide(d_latitude)
    scale = torch.ones_like(p[..., :1]) if r is None else wide(r)[..., None]
    d_scale = wide(d_r)[..., None]

    head, last = g[..., :-1], g[..., -1:]
    after = _suffix(cos, head * sin, last)[..., 1:]
    z = cos * head - sin * after
    d_rest = _suffix(cos, step * z, torch.zeros_like(last))
    d_z = -sin * d_rest[..., 1:] - step * (sin * head + cos * after)
    d_p = _products_tangent(sin, cos, p, step)[..., :-1]
    p = p[..., :-1]
    return d_scale * p * z + scale * (d_p * z + p * d_z), d_rest[..., 0]


def _trigonometry(latitude: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    a = wide(latitude)
    cos = a.cos()
    return a.sin(), cos, products(cos)


def _products_tangent(sin: Tensor, cos: Tensor, p: Tensor, step: Tensor) -> Tensor:
    """dP_1 = 0, dP_{k+1} = cos_k dP_k - sin_k da_k P_k."""
    source = torch.cat([torch.zeros_like(p[..., :1]), -sin * step * p[..., :-1]], dim=-1)
    return scan(torch.cat([torch.ones_like(p[..., :1]), cos], dim=-1), source)


def _suffix(cos: Tensor, source: Tensor, last: Tensor) -> Tensor:
    """Return R_0, ..., R_{n-1} with R_{n-1} = last and R_{k-1} = source_k + cos_k R_k."""
    a = torch.cat([cos, torch.ones_like(last)], dim=-1).flip(-1)
    return scan(a, torch.cat([source, last], dim=-1).flip(-1)).flip(-1)
