/* The passes of columns.py in C, for CPUs: y = s relu(x + b) with its sums, and its gradient.

   Activations are (images, channels, positions), float or double, without gaps. A thread takes
   some channels, so that the number of threads does not change a bit, and walks through them in
   the order of the memory, image by image: all of one channel lies in pieces of a page or less,
   far apart.

   Layout. At most BLOCK numbers at a time, which stay in the first-level cache: one loop for each
   thing that is computed of them, each of a kind that compilers turn into vector code. y may be x
   or a itself; IN_ORDER says that nothing else overlaps. With one position, channels lie side by
   side, and loops run over them instead.

   columns_native.py compiles this file and calls geoparam_columns. */

#include <math.h>
#include <stdint.h>

#include "lanes.h"
#include "threads.h"

enum { BLOCK = 1024, SIDE_BY_SIDE = 32 }; /* channels for one thread: lines of the cache */

typedef struct {
    const void *x, *a;        /* forward: x and NULL; backward: dy and x + b, rectified or not */
    const void *shift, *scale; /* per channel or NULL; shift is b, or the gradient of y's sums */
    void *y;                   /* forward: y, or NULL for its sums alone; backward: dx */
    double *sums, *scale_sums; /* of what is in y, and of the gradient of the scale */
    int64_t images, channels, positions;
    int wide, relu, summed; /* wide: double, else float */
} Job;

#define IN_ORDER _Pragma("GCC ivdep")

#define FUNCTIONS(REAL)                                                                        \
    static double sum_##REAL(const REAL *x, int size)                                          \
    {                                                                                          \
        LANE_SUM(size, x[k])                                                                   \
    }                                                                                          \
                                                                                               \
    static double scale_sum_##REAL(const REAL *dy, const REAL *a, REAL shift, int size)        \
    {                                                                                          \
        LANE_SUM(size, (dy[k] + shift) * (a[k] < 0 ? 0 : a[k]))                                \
    }                                                                                          \
                                                                                               \
    static void forward_##REAL(const REAL *x, REAL shift, REAL scale, int relu, REAL *y,       \
                               int size)                                                       \
    {                                                                                          \
        const REAL floor = relu ? 0 : -(REAL)INFINITY;                                         \
        IN_ORDER for (int k = 0; k < size; k++)                                                \
        {                                                                                      \
            const REAL v = x[k] + shift;                                                       \
            y[k] = (v < floor ? floor : v) * scale; /* NaN stays */                            \
        }                                                                                      \
    }                                                                                          \
                                                                                               \
    static void backward_##REAL(const REAL *dy, const REAL *a, REAL shift, REAL scale,         \
                                REAL *dx, int size)                                            \
    {                                                                                          \
        IN_ORDER for (int k = 0; k < size; k++)                                                \
        {                                                                                      \
            const REAL v = (dy[k] + shift) * scale;                                            \
            dx[k] = a[k] <= 0 ? 0 : v;                                                         \
        }                                                                                      \
    }                                                                                          \
                                                                                               \
    static void block_##REAL(const Job *j, int64_t c, int64_t at, int size)                    \
    {                                                                                          \
        const REAL shift = j->shift ? ((const REAL *)j->shift)[c] : 0;                         \
        const REAL scale = j->scale ? ((const REAL *)j->scale)[c] : 1;                         \
        const REAL *x = (const REAL *)j->x + at, *a = j->a ? (const REAL *)j->a + at : 0;      \
        REAL *y = j->y ? (REAL *)j->y + at : 0;                                                \
        if (a && j->scale)                                                                     \
            j->scale_sums[c] += scale_sum_##REAL(x, a, shift, size);                           \
        if (a)                                                                                 \
            backward_##REAL(x, a, shift, scale, y, size);                                      \
        else if (y)                                                                            \
            forward_##REAL(x, shift, scale, j->relu, y, size);                                 \
        if (j->summed)                                                                         \
            j->sums[c] += sum_##REAL(y ? y : x, size);                                         \
    }                                                                                          \
                                                                                               \
    static void row_##REAL(const Job *j, int64_t at, int64_t begin, int64_t end)               \
    {                                                                                          \
        const REAL *shift = j->shift, *scale = j->scale, floor = j->relu ? 0 : -(REAL)INFINITY; \
        const REAL *x = (const REAL *)j->x + at, *a = j->a ? (const REAL *)j->a + at : 0;      \
        REAL *y = j->y ? (REAL *)j->y + at : 0;                                                \
        for (int64_t c = begin; a && scale && c < end; c++)                                    \
            j->scale_sums[c] += (x[c] + (shift ? shift[c] : 0)) * (a[c] < 0 ? 0 : a[c]);       \
        IN_ORDER for (int64_t c = begin; y && c < end; c++)                                    \
        {                                                                                      \
            const REAL v = x[c] + (shift ? shift[c] : 0), s = scale ? scale[c] : 1;            \
            y[c] = a ? (a[c] <= 0 ? 0 : v * s) : (v < floor ? floor : v) * s;                  \
        }                                                                                      \
        const REAL *summed = y ? y : x;                                                        \
        for (int64_t c = begin; j->summed && c < end; c++)                                     \
            j->sums[c] += summed[c];                                                           \
    }

FUNCTIONS(float)
FUNCTIONS(double)

static void run(const void *job, int64_t begin, int64_t end)
{
    const Job *j = job;
    for (int64_t c = begin; c < end; c++)
        j->sums[c] = j->scale_sums[c] = 0;
    if (j->positions == 1) {
        for (int64_t at = 0; at < j->images * j->channels; at += j->channels)
            j->wide ? row_double(j, at, begin, end) : row_float(j, at, begin, end);
        return;
    }
    for (int64_t n = 0; n < j->images; n++)
        for (int64_t c = begin; c < end; c++)
            for (int64_t p = 0; p < j->positions; p += BLOCK) {
                const int size = j->positions - p < BLOCK ? (int)(j->positions - p) : BLOCK;
                const int64_t at = (n * j->channels + c) * j->positions + p;
                j->wide ? block_double(j, c, at, size) : block_float(j, c, at, size);
            }
}

void geoparam_columns(const void *x, const void *a, const void *shift, const void *scale, void *y,
                      double *sums, double *scale_sums, int64_t images, int64_t channels,
                      int64_t positions, int wide, int relu, int summed, int threads)
{
    const Job job = {x, a, shift, scale, y, sums, scale_sums, images, channels, positions,
                     wide, relu, summed};
    share_out(run, &job, channels, positions == 1 ? SIDE_BY_SIDE : 1, threads);
}
