/* The functions of rows.c for one TYPE. */

#define OPERAND(i) ((TYPE *)job->operand[i][chunk.layer] + (chunk.first + k) * n)
#define PER_ROW(i) (((TYPE *)job->per_row[i])[chunk.row + k])
#define EACH_ROW                                                                                  \
    for (int64_t at = begin; at < end; at++)                                                      \
        for (int64_t k = 0, n = job->widths[job->chunks[at].layer]; k < job->chunks[at].count; k++)

/* Return <x, y>. */
static double NAME(product)(const TYPE *x, const TYPE *y, int64_t n)
{
    double sums[LANES] = {0}, sum = 0;
    int64_t i = 0;
    for (; i + LANES <= n; i += LANES)
        for (int lane = 0; lane < LANES; lane++)
            sums[lane] += (double)y[i + lane] * x[i + lane];
    for (; i < n; i++)
        sum += (double)y[i] * x[i];
    for (int lane = 0; lane < LANES; lane++)
        sum += sums[lane];
    return sum;
}

/* Return |y - s x|. */
static double NAME(distance)(const TYPE *x, const TYPE *y, double s, int64_t n)
{
    double sums[LANES] = {0}, sum = 0;
    int64_t i = 0;
    for (; i + LANES <= n; i += LANES)
        for (int lane = 0; lane < LANES; lane++) {
            double rest = y[i + lane] - s * x[i + lane];
            sums[lane] += rest * rest;
        }
    for (; i < n; i++) {
        double rest = y[i] - s * x[i];
        sum += rest * rest;
    }
    for (int lane = 0; lane < LANES; lane++)
        sum += sums[lane];
    return sqrt(sum);
}

static void NAME(enter)(const void *argument, int64_t begin, int64_t end)
{
    const Job *job = argument;
    EACH_ROW {
        const Chunk chunk = job->chunks[at];
        const TYPE *g = OPERAND(1);
        TYPE *w = OPERAND(0), *grad_v = OPERAND(2);
        double norm = NAME(distance)(w, w, 0, n), length = PER_ROW(0);
        if (norm < (sizeof(TYPE) == 4 ? 1e-36 : 1e-300) * length)
            norm = 0; // length / norm would overflow
        double r = PER_ROW(1) < 0 ? -norm : norm, divisor = norm ? r : 1;
        double grad_r = NAME(product)(w, g, n) / divisor;
        double by_g = r / length, by_w = norm ? grad_r / length : 0;
        TYPE stretch = (TYPE)(length / divisor);
        for (int64_t i = 0; i < n; i++)
            grad_v[i] = (TYPE)(by_g * g[i] - by_w * w[i]);
        if (job->rescales)
            for (int64_t i = 0; i < n; i++)
                w[i] = stretch * w[i];
        PER_ROW(1) = (TYPE)r;
        PER_ROW(2) = (TYPE)grad_r;
        PER_ROW(3) = (TYPE)NAME(distance)(g, g, 0, n);
    }
}

static void NAME(leave)(const void *argument, int64_t begin, int64_t end)
{
    const Job *job = argument;
    EACH_ROW {
        const Chunk chunk = job->chunks[at];
        TYPE *v = OPERAND(0);
        double norm = NAME(distance)(v, v, 0, n);
        PER_ROW(0) = PER_ROW(1) ? PER_ROW(0) : 0;
        double scale = PER_ROW(0) / (norm ? norm : 1);
        for (int64_t i = 0; i < n; i++)
            v[i] = (TYPE)(scale * v[i]);
    }
}

static void NAME(measure)(const void *argument, int64_t begin, int64_t end)
{
    const Job *job = argument;
    EACH_ROW {
        const Chunk chunk = job->chunks[at];
        const TYPE *w = OPERAND(0), *d = OPERAND(1);
        double divisor = PER_ROW(0) ? PER_ROW(0) : 1;
        double along = NAME(product)(w, d, n) / divisor;
        PER_ROW(1) = (TYPE)along;
        PER_ROW(2) = (TYPE)NAME(distance)(w, d, along / divisor, n);
    }
}

static void NAME(rotate)(const void *argument, int64_t begin, int64_t end)
{
    const Job *job = argument;
    EACH_ROW {
        const Chunk chunk = job->chunks[at];
        TYPE *w = OPERAND(0);
        const TYPE *d = OPERAND(1), a = PER_ROW(0), b = PER_ROW(1);
        for (int64_t i = 0; i < n; i++)
            w[i] = a * w[i] + b * d[i];
    }
}

#undef OPERAND
#undef PER_ROW
#undef EACH_ROW
