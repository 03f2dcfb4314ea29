/* The operator in C, for CPUs. weight_native.py calls geoparam_run.

       P_k = cos(a_1) ... cos(a_{k-1}),     w_k = r sin(a_k) P_k,     w_n = r P_n
       y_n = g_n,  y_k = sin(a_k) g_k + cos(a_k) y_{k+1},   z_k = cos(a_k) g_k - sin(a_k) y_{k+1}
       dL/da_k = r P_k z_k,      dL/dr = y_1

   Layout. Four rows and TILE columns at a time, in buffers that stay in the first-level cache: the
   sines and cosines in a loop that the compiler turns into vector code; then the chain of P or y,
   one column after the other, where four rows hide each other's latency; then the result, again
   vector code. The backward runs from the right and needs P from the left, so it walks to the
   right first and leaves P where the gradient will be: nothing is allocated.

   Precision. Storage is float or double, arithmetic is double, so one code serves both and a float
   sees no rounding but the result's. Nothing is divided, so poles need no special case.

   Sines are our own, as a library's is one call per number: quarter turns are subtracted in three
   parts, the first two exactly, then come polynomials in y^2, Chebyshev fits of (sin(y)/y - 1)/y^2
   and (cos(y) - 1 + y^2/2)/y^4 on |y| <= pi/4. Beyond REACH, and for NaN and infinity, the
   library's. Errors are below 2 units in the last place of a double (measured against 120 bits).

   Threads get whole groups of four rows, so that their number does not change a bit.

   Left out: half types, which torch converts before and after; a second sine in float arithmetic
   as in weight_triton.py, which would be faster and another thing to get right. */

#include <math.h>
#include <stdint.h>
#include <string.h>

#include "threads.h"

enum { ROWS = 4, TILE = 128 };
static const double REACH = 1e6; /* turns * 33 bits of pi/2 is exact up to 1.6e6 */

typedef struct {
    const void *latitude, *r, *grad; /* (rows, n - 1); (rows,) or NULL; (rows, n) or NULL */
    void *out, *grad_r;              /* without grad: (rows, n); else (rows, n - 1), (rows,) */
    int64_t n;
    int wide, natural; /* wide: all of them are double, else float */
} Job;

/* Inlined where `wide`, `rows` and `weights` are constants: one code, compiled for each case. */
#define INLINE static inline __attribute__((always_inline))

INLINE double get(const void *x, int64_t i, int wide)
{
    return wide ? ((const double *)x)[i] : ((const float *)x)[i];
}

INLINE void put(void *x, int64_t i, int wide, double value)
{
    if (wide)
        ((double *)x)[i] = value;
    else
        ((float *)x)[i] = (float)value;
}

INLINE double scale(const Job *job, int64_t row, int wide)
{
    return job->r ? get(job->r, row, wide) : 1;
}

INLINE void sine_and_cosine(double a, double *sine, double *cosine)
{
    const double shift = 0x1.8p52; /* brings the number of quarter turns to the lowest bits */
    double shifted = a * 6.36619772367581382433e-01 + shift, turns = shifted - shift;
    double y = a - turns * 1.57079632673412561417e+00; /* pi/2: 33 bits, */
    y -= turns * 6.07710050630396597660e-11;           /* 33 more, */
    y -= turns * 2.02226624879595063154e-21;           /* 53 more */
    double z = y * y;
    double s = 1.59181012302741203e-10, c = -1.13826148685563246e-11;
    s = -2.50511314554279474e-08 + z * s, c = 2.08761460246897466e-09 + z * c;
    s = 2.75573161006830291e-06 + z * s, c = -2.75573172705603241e-07 + z * c;
    s = -1.98412698367549700e-04 + z * s, c = 2.48015872987634332e-05 + z * c;
    s = 8.33333333333094610e-03 + z * s, c = -1.38888888888873957e-03 + z * c;
    s = -1.66666666666666646e-01 + z * s, c = 4.16666666666666654e-02 + z * c;
    s = y + y * z * s, c = 1 - (0.5 * z - z * z * c);
    int64_t quarter;
    memcpy(&quarter, &shifted, sizeof quarter);
    double s_turned = quarter & 1 ? c : s, c_turned = quarter & 1 ? s : c;
    *sine = quarter & 2 ? -s_turned : s_turned;
    *cosine = (quarter + 1) & 2 ? -c_turned : c_turned;
}

/* Write the sines and cosines of `count` angles from the `at`-th on. */
INLINE void sines(const void *latitude, int64_t at, int count, int wide, double *s, double *c)
{
    int64_t beyond = 0;
    for (int k = 0; k < count; k++) {
        double a = get(latitude, at + k, wide);
        beyond |= !(fabs(a) <= REACH);
        sine_and_cosine(a, &s[k], &c[k]);
    }
    for (int k = 0; beyond && k < count; k++) {
        double a = get(latitude, at + k, wide);
        if (!(fabs(a) <= REACH))
            s[k] = sin(a), c[k] = cos(a);
    }
}

/* Walk `rows` rows to the right, for the weights w or, as the backward's first step, for P. */
INLINE void walk_right(const Job *job, int64_t row, int rows, int wide, int weights)
{
    double s[ROWS][TILE], c[ROWS][TILE], p[ROWS] = {1, 1, 1, 1};
    int64_t angles = job->n - 1, stride = weights ? job->n : angles;
    for (int64_t at = 0; at < angles; at += TILE) {
        int count = angles - at < TILE ? (int)(angles - at) : TILE;
        for (int i = 0; i < rows; i++)
            sines(job->latitude, (row + i) * angles + at, count, wide, s[i], c[i]);
        for (int k = 0; k < count; k++)
            for (int i = 0; i < rows; i++) {
                double next = p[i] * c[i][k];
                c[i][k] = p[i];
                p[i] = next;
            }
        for (int i = 0; i < rows; i++) {
            double r = scale(job, row + i, wide);
            for (int k = 0; k < count; k++)
                put(job->out, (row + i) * stride + at + k, wide,
                    weights ? r * (s[i][k] * c[i][k]) : c[i][k]);
        }
    }
    for (int i = 0; weights && i < rows; i++)
        put(job->out, (row + i) * stride + angles, wide, scale(job, row + i, wide) * p[i]);
}

/* Walk back to the left: `out` holds P and becomes dL/dlatitude. */
INLINE void walk_left(const Job *job, int64_t row, int rows, int wide)
{
    double s[ROWS][TILE], c[ROWS][TILE], t[ROWS][TILE], y[ROWS];
    int64_t angles = job->n - 1;
    for (int i = 0; i < rows; i++)
        y[i] = get(job->grad, (row + i) * job->n + angles, wide);
    for (int64_t end = angles, at; end > 0; end = at) {
        at = (end - 1) / TILE * TILE;
        int count = (int)(end - at);
        for (int i = 0; i < rows; i++) {
            sines(job->latitude, (row + i) * angles + at, count, wide, s[i], c[i]);
            for (int k = 0; k < count; k++)
                t[i][k] = s[i][k] * get(job->grad, (row + i) * job->n + at + k, wide);
        }
        for (int k = count - 1; k >= 0; k--)
            for (int i = 0; i < rows; i++) {
                double next = c[i][k] * y[i] + t[i][k];
                t[i][k] = y[i]; /* y_{k+1} */
                y[i] = next;
            }
        for (int i = 0; i < rows; i++) {
            double r = scale(job, row + i, wide);
            for (int k = 0; k < count; k++) {
                int64_t here = (row + i) * angles + at + k;
                double g = get(job->grad, here + row + i, wide); /* its rows are longer by one */
                double p = get(job->out, here, wide), metric = p * p;
                double change = p * (c[i][k] * g - s[i][k] * t[i][k]);
                if (job->natural)
                    change /= metric > SMALLEST_METRIC ? metric : SMALLEST_METRIC;
                put(job->out, here, wide, r * change);
            }
        }
    }
    for (int i = 0; i < rows; i++)
        put(job->grad_r, row + i, wide, y[i]);
}

INLINE void walk(const Job *job, int64_t row, int rows, int wide)
{
    walk_right(job, row, rows, wide, job->grad == NULL);
    if (job->grad)
        walk_left(job, row, rows, wide);
}

static void run(const void *argument, int64_t begin, int64_t end)
{
    const Job *job = argument;
    for (int64_t row = begin, rows; row < end; row += rows) {
        rows = end - row < ROWS ? 1 : ROWS;
        if (job->wide)
            rows == 1 ? walk(job, row, 1, 1) : walk(job, row, ROWS, 1);
        else
            rows == 1 ? walk(job, row, 1, 0) : walk(job, row, ROWS, 0);
    }
}

/* Compute w or, where `grad` is given, the gradients, in `threads` threads, this one included. */
void geoparam_run(const void *latitude, const void *r, const void *grad, void *out, void *grad_r,
                  int64_t rows, int64_t n, int wide, int natural, int threads)
{
    const Job job = {latitude, r, grad, out, grad_r, n, wide, natural};
    share_out(run, &job, rows, ROWS, threads);
}
