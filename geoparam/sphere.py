"""The unit sphere in latitudes: the arithmetic that everything else is tested against.

A direction u in R^n has n - 1 latitudes a_k = pi/2 - theta_k, where theta are the papers'
hyperspherical angles:

    u_k = sin(a_k) P_k   (k < n),      u_n = P_n,      P_k = cos(a_1) ... cos(a_{k-1}).

Latitudes rather than theta, because every theta of a random direction in high dimension sits near
pi/2 and loses its digits there, while its latitude sits near 0 and keeps them.

Everything here is plain torch, takes any leading batch shape and computes in float64 whatever the
storage type. From latitudes to vectors it can be differentiated any number of times: products of
cosines are never divided by a cosine, so poles (cos a_k = 0) need no special case; the later
coordinates are 0, their angles get no gradient, and all is finite.

With n = 1 there is no angle: `to_unit` gives +1 and `to_latitude` an empty tensor; the sign of a
one-dimensional direction has to be stored beside it.
"""

import torch
from torch import Tensor


def wide_type(device: torch.device) -> torch.dtype:
    """Return float64, or float32 for devices that have no float64 (Apple's GPUs)."""
    return torch.float32 if device.type == "mps" else torch.float64


def wide(x: Tensor) -> Tensor:
    """Return `x` in float64, or in float32 where there is none."""
    return x.to(wide_type(x.device))


def scan(a: Tensor, b: Tensor) -> Tensor:
    """Solve y_0 = b_0, y_k = a_k y_{k-1} + b_k along the last dimension.

    Neighbours are combined into a recurrence of half the length, which is solved first; so the
    depth is log n, the work linear, and nothing is divided.

    Example:
        >>> scan(torch.tensor([1., 2., 3.]), torch.tensor([1., 0., 1.]))
        tensor([1., 2., 7.])
    """
    n = a.shape[-1]
    if n <= 1:
        return b
    pairs = n // 2
    a_even, a_odd = a[..., 0::2], a[..., 1::2]
    b_even, b_odd = b[..., 0::2], b[..., 1::2]

    # y_odd in terms of the y_odd before it
    factors = a_odd * a_even[..., :pairs]
    terms = b_odd + a_odd * b_even[..., :pairs]
    y_odd = scan(factors, terms)

    # y_even from the y_odd before it
    y_later = b_even[..., 1:] + a_even[..., 1:] * y_odd[..., : n - pairs - 1]
    y_even = torch.cat([b_even[..., :1], y_later], dim=-1)

    interleaved = torch.stack([y_even[..., :pairs], y_odd], dim=-1).flatten(-2)
    return torch.cat([interleaved, y_even[..., pairs:]], dim=-1)


def products(cos: Tensor) -> Tensor:
    """Return P_1, ..., P_n for n - 1 cosines: P_1 = 1, P_{k+1} = cos_k P_k."""
    one = cos.new_ones(*cos.shape[:-1], 1)
    factors = torch.cat([one, cos], dim=-1)
    terms = torch.cat([one, torch.zeros_like(cos)], dim=-1)
    return scan(factors, terms)


def to_unit(latitude: Tensor) -> Tensor:
    """Turn latitudes (..., n - 1) into unit vectors (..., n).

    Example:
        >>> to_unit(torch.zeros(3))
        tensor([0., 0., 0., 1.])
    """
    check_rank(latitude, "latitude")
    a = wide(latitude)
    p = products(a.cos())
    u = torch.cat([a.sin() * p[..., :-1], p[..., -1:]], dim=-1)
    return u.to(latitude.dtype)


def to_latitude(vector: Tensor) -> Tensor:
    """Turn vectors (..., n) of any length into the latitudes (..., n - 1) of their directions.

    a_k = atan2(x_k, ||x_{k+1..n}||) and, keeping the sign of x_n, a_{n-1} = atan2(x_{n-1}, x_n).
    Where nothing is left, in a zero vector or behind a pole, the latitude is 0. The result is
    float64, so that the caller decides what to round to.

    Example:
        >>> to_latitude(torch.tensor([0., 0., -2.])).tolist()
        [0.0, 3.141592653589793]
    """
    check_rank(vector, "vector")
    if vector.shape[-1] == 0:
        raise ValueError("a direction needs at least one coordinate; got a vector of length 0.")
    x = _rescale(wide(vector))
    n = x.shape[-1]
    tail_length = x.square().flip(-1).cumsum(-1).flip(-1).sqrt()
    last = x[..., -1:] + 0.0  # atan2(0, -0.0) is pi
    rest = torch.cat([tail_length[..., 1:-1], last], dim=-1)[..., : n - 1]
    return torch.atan2(x[..., :-1], rest)


def normalise(vector: Tensor) -> Tensor:
    """Return the directions of vectors (..., n) in float64; a zero vector stays zero."""
    x = _rescale(wide(vector))
    norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    return x / nonzero(norm)


def length(vector: Tensor) -> Tensor:
    """Return the lengths of vectors (..., n) in float64, of very short and long ones too."""
    if vector.dtype != torch.float64:  # float64 holds the squares of narrower types
        return torch.linalg.vector_norm(vector, dim=-1, dtype=wide_type(vector.device))
    scale = torch.linalg.vector_norm(vector, ord=torch.inf, dim=-1)
    return scale * torch.linalg.vector_norm(_rescale(vector), dim=-1)


def metric(latitude: Tensor) -> Tensor:
    """Return the diagonal m_k = P_k^2 of the sphere's metric, (..., n - 1); it has no other entry.

    A small step e of the latitudes turns the direction by sqrt(sum_k m_k e_k^2) <= ||e||
    (Chen & Ge, Theorem 3.7; appendix B of their first version prints sums for the products).
    """
    p = products(wide(latitude).cos())
    return p[..., :-1].square().to(latitude.dtype)


def angle_between(u: Tensor, v: Tensor) -> Tensor:
    """Return the angle in radians between vectors (..., n) of any length, in float64.

    2 atan2(||u - v||, ||u + v||) for unit u and v: exact for tiny and for nearly opposite angles,
    where arccos of a dot product has lost half its digits. NaN where a vector is zero.

    Example:
        >>> u, v = torch.tensor([1., 0.]), torch.tensor([1., 1e-9])
        >>> f"{angle_between(u, v).item():.1e}"
        '1.0e-09'
    """
    u, v = normalise(u), normalise(v)
    angle = 2 * torch.atan2((u - v).norm(dim=-1), (u + v).norm(dim=-1))
    has_direction = u.any(dim=-1) & v.any(dim=-1)
    return torch.where(has_direction, angle, torch.nan)


def sample(
    *shape: int, generator: torch.Generator | None = None, device: torch.device | str | None = None
) -> Tensor:
    """Draw unit vectors of the given shape (..., n) uniformly from the sphere, in float64.

    Example:
        >>> sample(5, 3).shape
        torch.Size([5, 3])
    """
    dtype = wide_type(torch.device(device or "cpu"))
    return normalise(torch.randn(*shape, generator=generator, device=device, dtype=dtype))


def _rescale(x: Tensor) -> Tensor:
    """Bring the largest coordinate to 1, so that squares neither underflow nor overflow."""
    largest = torch.linalg.vector_norm(x, ord=torch.inf, dim=-1, keepdim=True)
    return x / nonzero(largest)


def nonzero(x: Tensor) -> Tensor:
    """Replace zeros by ones: a safe divisor."""
    return torch.where(x == 0, 1, x)


def check_rank(x: Tensor, name: str) -> None:
    if x.ndim == 0 or not x.is_floating_point():
        raise ValueError(
            f"{name} needs its coordinates in the last dimension, in a floating type; got shape "
            f"{tuple(x.shape)} of {x.dtype}."
        )
