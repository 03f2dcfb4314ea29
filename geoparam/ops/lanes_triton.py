"""What a thread does with its own columns of a row, for the kernels in `triton`.

A tile is (ROWS, LANES * EACH); a thread's lane owns EACH neighbours of a row. `pieces_of` cuts the
tile into a tuple of EACH tensors (ROWS, LANES), each lane's first column, second, and so on, and
`in_a_row` puts them together again; between the two, nothing leaves a thread but by a scan.
"""

import triton
import triton.language as tl


@triton.jit
def trigonometry(a, zero, ROWS: tl.constexpr, LANES: tl.constexpr, EACH: tl.constexpr):
    """Return each column's sine, cosine and product before it in its lane, and what all gather."""
    a = pieces_of(a.to(zero.dtype), ROWS, LANES, EACH)
    near, far = zero, zero + 1
    sines, cosines, before = (), (), ()
    for j in tl.static_range(EACH):
        sine, near_here, far_here = sine_and_cosine(a[j])
        sines = sines + (sine,)
        cosines = cosines + (product(near_here, far_here),)
        before = before + (product(near, far),)
        near, far = gather(near, far, near_here, far_here)
    return sines, cosines, before, near, far


@triton.jit
def pieces_of(x, ROWS: tl.constexpr, LANES: tl.constexpr, EACH: tl.constexpr):
    """Cut (ROWS, LANES * EACH) into EACH tensors (ROWS, LANES): each lane's first column, ..."""
    pieces = (tl.reshape(x, (ROWS, LANES, EACH)),)
    if EACH >= 2:
        pieces = _halves(pieces, 1, ROWS, LANES, EACH)
    if EACH >= 4:
        pieces = _halves(pieces, 2, ROWS, LANES, EACH // 2)
    if EACH >= 8:
        pieces = _halves(pieces, 4, ROWS, LANES, EACH // 4)
    if EACH >= 16:
        pieces = _halves(pieces, 8, ROWS, LANES, EACH // 8)
    columns = ()
    for j in tl.static_range(EACH):
        columns = columns + (tl.reshape(pieces[j], (ROWS, LANES)),)
    return columns


@triton.jit
def _halves(
    pieces, COUNT: tl.constexpr, ROWS: tl.constexpr, LANES: tl.constexpr, EACH: tl.constexpr
):
    halves = ()
    for i in tl.static_range(COUNT):
        x = tl.reshape(pieces[i], (ROWS, LANES, 2, EACH // 2))
        left, right = tl.split(tl.permute(x, (0, 1, 3, 2)))
        halves = halves + (left, right)
    return halves


@triton.jit
def in_a_row(columns, ROWS: tl.constexpr, LANES: tl.constexpr, EACH: tl.constexpr):
    """Undo `pieces_of`."""
    pieces = ()
    for j in tl.static_range(EACH):
        pieces = pieces + (tl.reshape(columns[j], (ROWS, LANES, 1)),)
    if EACH >= 16:
        pieces = _joined(pieces, 8, ROWS, LANES, EACH // 8)
    if EACH >= 8:
        pieces = _joined(pieces, 4, ROWS, LANES, EACH // 4)
    if EACH >= 4:
        pieces = _joined(pieces, 2, ROWS, LANES, EACH // 2)
    if EACH >= 2:
        pieces = _joined(pieces, 1, ROWS, LANES, EACH)
    return tl.reshape(pieces[0], (ROWS, LANES * EACH))


@triton.jit
def _joined(
    pieces, COUNT: tl.constexpr, ROWS: tl.constexpr, LANES: tl.constexpr, EACH: tl.constexpr
):
    joined = ()
    for i in tl.static_range(COUNT):
        x = tl.join(pieces[2 * i], pieces[2 * i + 1])
        joined = joined + (tl.reshape(tl.permute(x, (0, 1, 3, 2)), (ROWS, LANES, EACH)),)
    return joined


# --- products and recurrences -----------------------------------------------------------------


@triton.jit
def gather(near, far, near_2, far_2):
    """Return the product of (1 - near) far and (1 - near_2) far_2 in this form."""
    return tl.fma(-near, near_2, near + near_2), far * far_2


@triton.jit
def gather_both(near, far, near_before, far_before, near_2, far_2, near_before_2, far_before_2):
    """Gather up to the last lane, and up to the one before it: an exclusive scan."""
    near_before, far_before = gather(near, far, near_before_2, far_before_2)
    near, far = gather(near, far, near_2, far_2)
    return near, far, near_before, far_before


@triton.jit
def product(near, far):
    return tl.fma(-near, far, far)


@triton.jit
def compose(slope, offset, after_slope, after_offset, slope_2, offset_2, after_slope_2, after_2):
    """Let y and y_{k+1} of the lanes at the left (2) depend on what enters those at the right."""
    return (
        slope_2 * slope,
        tl.fma(slope_2, offset, offset_2),
        after_slope_2 * slope,
        tl.fma(after_slope_2, offset, after_2),
    )


@triton.jit
def from_lane(index: tl.constexpr, x, lane):
    """Return lane `index` of x for all lanes.

    As one number per row, carried along, the compiler would compute it once more in another
    layout, and all that it depends on.
    """
    return tl.broadcast_to(tl.sum(tl.where(lane == index, x, 0), 1, keep_dims=True), x.shape)


@triton.jit
def full(like, ROWS: tl.constexpr, COLUMNS: tl.constexpr, value: tl.constexpr):
    """Return (ROWS, COLUMNS) values in the working type: float64 for float64, else float32."""
    if like.dtype.element_ty == tl.float64:
        return tl.full((ROWS, COLUMNS), value, tl.float64)
    else:
        return tl.full((ROWS, COLUMNS), value, tl.float32)


# --- sines ------------------------------------------------------------------------------------

_PI = tl.constexpr(3.1415927410125732)  # float32 nearest to pi
_PI_REST = tl.constexpr(-8.742277657347586e-08)  # pi = _PI + _PI_REST
_TO_INTEGER = tl.constexpr(12582912.0)  # 1.5 * 2^23: added and subtracted, it rounds


@triton.jit
def sine_and_cosine(a):
    """Return sin(a), and cos(a) as (1 - near) far."""
    if a.dtype == tl.float64:
        half = tl.sin(0.5 * a)
        at_pole = tl.abs(half * half - 0.5) < 0.1
        return (
            tl.sin(a),
            tl.where(at_pole, 0.0, 2 * half * half),
            tl.where(at_pole, tl.cos(a), 1.0),
        )
    else:
        turns = tl.fma(a, 0.5 / _PI, _TO_INTEGER) - _TO_INTEGER
        # Within pi. The first step is exact: both terms are multiples of 2^-21.
        a = tl.fma(turns, -2 * _PI_REST, tl.fma(turns, -2 * _PI, a))
        z = a * a
        # 2 sin(a/2) = a + a^3 q(z), of relative error 6e-9
        q = tl.fma(z, 1.0178830223139812e-08, -3.0952503493608674e-06)
        q = tl.fma(z, q, 0.0005208166548982263)
        q = tl.fma(z, q, -0.04166664928197861)
        chord = tl.fma(a * z, q, a)
        # cos(a/2) = 1 + z q(z), of error 2e-10
        q = tl.fma(z, -2.546592381413859e-10, 9.672611867017622e-08)
        q = tl.fma(z, q, -2.1700630895793438e-05)
        q = tl.fma(z, q, 0.0026041651144623756)
        half_cos = tl.fma(z, tl.fma(z, q, -0.125), 1.0)
        # cos(a) = sin(d), d = pi/2 - |a|: exact where it is small, of relative error 1e-8
        d = 0.5 * _PI - tl.abs(a)
        at_pole = tl.abs(d) < 0.2
        d += 0.5 * _PI_REST
        square = d * d
        cos = tl.fma(d * square, tl.fma(square, 1 / 120, -1 / 6), d)
        return (
            chord * half_cos,
            tl.where(at_pole, 0.0, 0.5 * chord * chord),
            tl.where(at_pole, cos, 1.0),
        )
