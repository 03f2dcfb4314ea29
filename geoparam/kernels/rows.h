/* The functions of rows.c for one TYPE. */

#define OPERAND(i) ((TYPE *)job->operand[i][chunk.layer] + (chunk.first + k) * n)
#define PER_ROW(i) (((TYPE *)job->per_row[i])[chunk.row + k])
#define EACH_ROW                                                                                  \
    for (int64_t at = begin; at < end; at++)                                                      \
        for (int64_t k = 0, n = job->widths[job->chunks[at].layer]; k < job->chunks[at].count; k++)

/* Return <d, x> for d = y - c x. */
static double NAME(product)(const TYPE *x, const TYPE *y, TYPE c, int64_t n)
{
    double sums[LANES] = {0}, sum = 0;
    int64_t i = 0;
    for (; i + LANES <= n; i += LANES)
        for (int lane = 0; lane < LANES; lane++) {
            TYPE d = y[i + lane] - c * x[i + lane];
            sums[lane] += (double)d * x[i + lane];
        }
    for (; i < n; i++) {
        TYPE d = y[i] - c * x[i];
        sum += (double)d * x[i];
    }
    for (int lane = 0; lane < LANES; lane++)
        sum += sums[lane];
    return sum;
}

/* Return |d - s x| for d = y - c x. */
static double NAME(distance)(const TYPE *x, const TYPE *y, TYPE c, double s, int64_t n)
{
    double sums[LANES] = {0}, sum = 0;
    int64_t i = 0;
    for (; i + LANES <= n; i += LANES)
        for (int lane = 0; lane < LANES; lane++) {
            TYPE d = y[i + lane] - c * x[i + lane];
            double rest = d - s * x[i + lane];
            sums[lane] += rest * rest;
        }
    for (; i < n; i++) {
        TYPE d = y[i] - c * x[i];
        double rest = d - s * x[i];
        sum += rest * rest;
    }
    for (int lane = 0; lane < LANES; lane++)
        sum += sums[lane];
    return sqrt(sum);
}

/* Return the largest |y|. */
static TYPE NAME(peak)(const TYPE *y, int64_t n)
{
    TYPE peaks[LANES] = {0}, largest = 0;
    int64_t i = 0;
    for (; i + LANES <= n; i += LANES)
        for (int lane = 0; lane < LANES; lane++) {
            TYPE size = y[i + lane] < 0 ? -y[i + lane] : y[i + lane];
            peaks[lane] = size > peaks[lane] ? size : peaks[lane];
        }
    for (; i < n; i++)
        largest = y[i] > largest ? y[i] : -y[i] > largest ? -y[i] : largest;
    for (int lane = 0; lane < LANES; lane++)
        largest = peaks[lane] > largest ? peaks[lane] : largest;
    return largest;
}

static void NAME(enter)(const void *argument, int64_t begin, int64_t end)
{
    const Job *job = argument;
    EACH_ROW {
        const Chunk chunk = job->chunks[at];
        const TYPE *w = OPERAND(0), *g = OPERAND(1);
        TYPE *by_v = OPERAND(2);
        double norm = NAME(distance)(w, w, 0, 0, n), length = PER_ROW(0);
        double r = PER_ROW(1) < 0 ? -norm : norm, divisor = norm ? r : 1;
        double slope = NAME(product)(w, g, 0, n) / divisor;
        double by_g = r / length, by_w = norm ? slope / length : 0;
        TYPE stretch = (TYPE)(length / divisor);
        for (int64_t i = 0; i < n; i++)
            by_v[i] = (TYPE)(by_g * g[i] - by_w * w[i]);
        if (job->writes_v) {
            TYPE *v = OPERAND(3);
            for (int64_t i = 0; i < n; i++)
                v[i] = stretch * w[i];
        }
        PER_ROW(1) = (TYPE)r;
        PER_ROW(2) = (TYPE)slope;
        PER_ROW(3) = NAME(peak)(g, n);
        PER_ROW(4) = stretch;
    }
}

static void NAME(leave)(const void *argument, int64_t begin, int64_t end)
{
    const Job *job = argument;
    EACH_ROW {
        const Chunk chunk = job->chunks[at];
        TYPE *v = OPERAND(0);
        double norm = NAME(distance)(v, v, 0, 0, n);
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
        const TYPE *w = OPERAND(0), *v = OPERAND(1), c = PER_ROW(0);
        double divisor = PER_ROW(1) ? PER_ROW(1) : 1;
        double along = NAME(product)(w, v, c, n) / divisor;
        PER_ROW(2) = (TYPE)along;
        PER_ROW(3) = (TYPE)NAME(distance)(w, v, c, along / divisor, n);
    }
}

static void NAME(rotate)(const void *argument, int64_t begin, int64_t end)
{
    const Job *job = argument;
    EACH_ROW {
        const Chunk chunk = job->chunks[at];
        TYPE *w = OPERAND(0);
        const TYPE *v = OPERAND(1), c = PER_ROW(0), a = PER_ROW(1), b = PER_ROW(2);
        for (int64_t i = 0; i < n; i++)
            w[i] = a * w[i] + b * (v[i] - c * w[i]);
    }
}

#undef OPERAND
#undef PER_ROW
#undef EACH_ROW
