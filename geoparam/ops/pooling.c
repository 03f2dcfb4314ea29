/* The passes of pooling.py in C, for CPUs: the largest of each square of 2x2 numbers, and back.

   Activations are (images, channels, height, width), float or double, without gaps; height and
   width are even. As in columns.c a thread takes some channels and walks through them in the order
   of the memory.

   Layout. Some rows of squares at a time, which stay in the first-level cache, in steps that
   compilers turn into vector code: numbers beside each other, rows below each other, then what is
   one number per square. Rows of more than BLOCK squares are left to torch.

   pooling_native.py compiles this file and calls the last two functions. */

#if defined(__AVX512F__) && defined(__GNUC__) && !defined(__clang__)
#pragma GCC target("prefer-vector-width=256") /* rows are short: gcc 12 takes 1/3 to 1/7 of it */
#endif

#include <stdint.h>

#include "lanes.h"
#include "threads.h"

enum { BLOCK = 512 }; /* squares */

typedef struct {
    const void *x, *shift; /* forward: x, NULL; backward: dy, the gradient of y's sums or NULL */
    void *y;               /* forward: y; backward: dx */
    uint8_t *place;        /* of the largest in its square, 0 to 3 */
    double *sums;          /* of what is in y */
    int64_t images, channels, rows, columns; /* rows and columns of squares */
    int wide;                                /* double, else float */
} Job;

/* NaN is larger than all, and the first of equals counts. */
#define LARGER(b, a) (((b) > (a)) | ((b) != (b)))

/* INT is as wide as REAL: numbers of one width are what vector code is good at. */
#define FUNCTIONS(REAL, INT)                                                                   \
    static double sum_##REAL(const REAL *x, int size)                                          \
    {                                                                                          \
        LANE_SUM(size, x[k])                                                                   \
    }                                                                                          \
                                                                                               \
    static void across_##REAL(const REAL *restrict x, REAL *restrict best,                     \
                              INT *restrict which, int pairs)                                  \
    {                                                                                          \
        for (int k = 0; k < pairs; k++) {                                                      \
            const REAL left = x[2 * k], right = x[2 * k + 1];                                  \
            const INT larger = LARGER(right, left);                                            \
            best[k] = larger ? right : left;                                                   \
            which[k] = larger;                                                                 \
        }                                                                                      \
    }                                                                                          \
                                                                                               \
    static void down_##REAL(const REAL *restrict best, INT *restrict which, REAL *restrict y,  \
                            int columns)                                                       \
    {                                                                                          \
        for (int k = 0; k < columns; k++) {                                                    \
            const REAL top = best[k], bottom = best[columns + k];                              \
            const INT at_top = which[k], at_bottom = which[columns + k] + 2;                   \
            const INT larger = LARGER(bottom, top);                                            \
            y[k] = larger ? bottom : top;                                                      \
            which[k] = larger ? at_bottom : at_top;                                            \
        }                                                                                      \
    }                                                                                          \
                                                                                               \
    static double forward_##REAL(const REAL *x, REAL *y, uint8_t *place, int rows,             \
                                 int columns)                                                  \
    {                                                                                          \
        REAL best[2 * BLOCK];                                                                  \
        INT which[2 * BLOCK];                                                                  \
        across_##REAL(x, best, which, 2 * rows * columns);                                     \
        for (int i = 0; i < rows; i++) {                                                       \
            const int at = i * columns;                                                        \
            down_##REAL(best + 2 * at, which + 2 * at, y + at, columns);                       \
            for (int k = 0; k < columns; k++)                                                  \
                place[at + k] = (uint8_t)which[2 * at + k];                                    \
        }                                                                                      \
        return sum_##REAL(y, rows * columns);                                                  \
    }                                                                                          \
                                                                                               \
    static void put_##REAL(const REAL *restrict v, const INT *restrict which, INT first,       \
                           REAL *restrict dx, int columns)                                     \
    {                                                                                          \
        for (int k = 0; k < columns; k++) {                                                    \
            dx[2 * k] = which[k] == first ? v[k] : 0;                                          \
            dx[2 * k + 1] = which[k] == first + 1 ? v[k] : 0;                                  \
        }                                                                                      \
    }                                                                                          \
                                                                                               \
    static double backward_##REAL(const REAL *dy, REAL shift, const uint8_t *place, REAL *dx,  \
                                  int rows, int columns)                                       \
    {                                                                                          \
        REAL v[BLOCK];                                                                         \
        INT which[BLOCK];                                                                      \
        for (int k = 0; k < rows * columns; k++) {                                             \
            v[k] = dy[k] + shift;                                                              \
            which[k] = place[k];                                                               \
        }                                                                                      \
        for (int i = 0; i < rows; i++) {                                                       \
            const int at = i * columns;                                                        \
            put_##REAL(v + at, which + at, 0, dx + 4 * at, columns);                           \
            put_##REAL(v + at, which + at, 2, dx + 4 * at + 2 * columns, columns);             \
        }                                                                                      \
        return sum_##REAL(v, rows * columns);                                                  \
    }                                                                                          \
                                                                                               \
    static double block_##REAL(const Job *j, int64_t c, int64_t at, int rows, int back)        \
    {                                                                                          \
        const REAL shift = j->shift ? ((const REAL *)j->shift)[c] : 0, *x = j->x;              \
        REAL *y = j->y;                                                                        \
        const int columns = (int)j->columns;                                                   \
        return back ? backward_##REAL(x + at, shift, j->place + at, y + 4 * at, rows, columns) \
                    : forward_##REAL(x + 4 * at, y + at, j->place + at, rows, columns);        \
    }

FUNCTIONS(float, int32_t)
FUNCTIONS(double, int64_t)

static void walk(const Job *j, int64_t begin, int64_t end, int back)
{
    const int64_t step = BLOCK / j->columns;
    for (int64_t c = begin; c < end; c++)
        j->sums[c] = 0;
    for (int64_t n = 0; n < j->images; n++)
        for (int64_t c = begin; c < end; c++)
            for (int64_t row = 0; row < j->rows; row += step) {
                const int rows = (int)(j->rows - row < step ? j->rows - row : step);
                const int64_t at = ((n * j->channels + c) * j->rows + row) * j->columns;
                j->sums[c] += j->wide ? block_double(j, c, at, rows, back)
                                      : block_float(j, c, at, rows, back);
            }
}

static void run(const void *job, int64_t begin, int64_t end)
{
    walk(job, begin, end, 0);
}

static void run_back(const void *job, int64_t begin, int64_t end)
{
    walk(job, begin, end, 1);
}

void geoparam_pool(const void *x, void *y, uint8_t *place, double *sums, int64_t images,
                   int64_t channels, int64_t rows, int64_t columns, int wide, int threads)
{
    const Job job = {x, 0, y, place, sums, images, channels, rows, columns, wide};
    share_out(run, &job, channels, 1, threads);
}

void geoparam_pool_backward(const void *dy, const void *shift, uint8_t *place, void *dx,
                            double *sums, int64_t images, int64_t channels, int64_t rows,
                            int64_t columns, int wide, int threads)
{
    const Job job = {dy, shift, dx, place, sums, images, channels, rows, columns, wide};
    share_out(run_back, &job, channels, 1, threads);
}
