/* The passes of columns.py in C, for CPUs: y = s relu(x + b) with its sums, and its gradient.

   Activations are (images, channels, positions), float or double, without gaps. A thread owns
   whole channels, so that their number does not change a bit. Sums are double, in LANES parts,
   which lets the compiler use vectors and reorder nothing else. columns_native.py compiles this
   file and calls geoparam_columns. */

#include <math.h>
#include <pthread.h>
#include <stdint.h>

enum { LANES = 16, MOST_THREADS = 64 };

typedef struct {
    const void *x, *a;        /* forward: x and NULL; backward: dy and x + b, rectified or not */
    const void *shift, *scale; /* per channel or NULL; shift is b, or the gradient of y's sums */
    void *y;                   /* forward: y, or NULL for its sums alone; backward: dx */
    double *sums, *scale_sums; /* of what is in y, and of the gradient of the scale */
    int64_t images, channels, positions, begin, end;
    int wide, relu; /* wide: double, else float */
} Job;

#define SUM(i, lane) sums[lane] += x[i];

#define FORWARD(i, lane)                          \
    {                                             \
        REAL v = x[i] + shift;                    \
        v = v < floor ? floor : v; /* NaN stays */ \
        v *= scale;                               \
        y[i] = v;                                 \
        sums[lane] += v;                          \
    }

#define BACKWARD(i, lane)                              \
    {                                                  \
        const REAL active = a[i] < 0 ? 0 : a[i];       \
        const REAL v = x[i] + shift;                   \
        const REAL s = v * scale;                      \
        const REAL w = active <= 0 ? 0 : s;            \
        y[i] = w;                                      \
        sums[lane] += w;                               \
        scaled[lane] += v * active;                    \
    }

#define CHANNELS(STEP)                                                                     \
    for (int64_t c = j->begin; c < j->end; c++) {                                          \
        const REAL shift = j->shift ? ((const REAL *)j->shift)[c] : 0;                     \
        const REAL scale = j->scale ? ((const REAL *)j->scale)[c] : 1;                     \
        double sums[LANES] = {0}, scaled[LANES] = {0};                                     \
        for (int64_t n = 0; n < j->images; n++) {                                          \
            const int64_t at = (n * j->channels + c) * j->positions, size = j->positions;  \
            const REAL *x = (const REAL *)j->x + at;                                       \
            const REAL *a = j->a ? (const REAL *)j->a + at : 0;                            \
            REAL *y = j->y ? (REAL *)j->y + at : 0;                                        \
            int64_t i = 0;                                                                 \
            for (; i + LANES <= size; i += LANES)                                          \
                for (int l = 0; l < LANES; l++)                                            \
                    STEP(i + l, l)                                                         \
            for (; i < size; i++)                                                          \
                STEP(i, 0)                                                                 \
            (void)a, (void)y, (void)shift, (void)scale, (void)floor;                       \
        }                                                                                  \
        j->sums[c] = j->scale_sums[c] = 0;                                                 \
        for (int l = 0; l < LANES; l++) {                                                  \
            j->sums[c] += sums[l];                                                         \
            j->scale_sums[c] += scaled[l];                                                 \
        }                                                                                  \
    }

#define FUNCTIONS(name)                                        \
    static void name(const Job *j)                             \
    {                                                          \
        const REAL floor = j->relu ? 0 : -(REAL)INFINITY;      \
        if (j->a) {                                            \
            CHANNELS(BACKWARD)                                 \
        } else if (j->y) {                                     \
            CHANNELS(FORWARD)                                  \
        } else {                                               \
            CHANNELS(SUM)                                      \
        }                                                      \
    }

#define REAL float
FUNCTIONS(pass_float)
#undef REAL
#define REAL double
FUNCTIONS(pass_double)
#undef REAL

static void *run(void *argument)
{
    const Job *j = argument;
    j->wide ? pass_double(j) : pass_float(j);
    return 0;
}

void geoparam_columns(const void *x, const void *a, const void *shift, const void *scale, void *y,
                      double *sums, double *scale_sums, int64_t images, int64_t channels,
                      int64_t positions, int wide, int relu, int threads)
{
    Job jobs[MOST_THREADS];
    pthread_t started[MOST_THREADS];
    int alive[MOST_THREADS] = {0};
    threads = threads > MOST_THREADS ? MOST_THREADS : threads;
    for (int t = 0; t < threads; t++) {
        jobs[t] = (Job){x, a, shift, scale, y, sums, scale_sums, images, channels, positions,
                        channels * t / threads, channels * (t + 1) / threads, wide, relu};
        alive[t] = t && !pthread_create(&started[t], 0, run, &jobs[t]);
    }
    for (int t = 0; t < threads; t++) /* its own part, and what got no thread */
        if (!alive[t])
            run(&jobs[t]);
    for (int t = 1; t < threads; t++)
        if (alive[t])
            pthread_join(started[t], 0);
}
