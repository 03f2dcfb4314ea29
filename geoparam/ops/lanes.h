/* The sum of `term`, an expression in k, over k = 0 ... size - 1, as the body of a function.

   It is double, in LANES parts that are added up at the end: a compiler may not reorder a sum to
   use vectors, and one addition after the other waits for the last. */

enum { LANES = 16 };

#define LANE_SUM(size, term)              \
    double lanes[LANES] = {0}, total = 0; \
    int i = 0;                            \
    for (; i + LANES <= size; i += LANES) \
        for (int l = 0; l < LANES; l++) { \
            const int k = i + l;          \
            lanes[l] += term;             \
        }                                 \
    for (int l = 0; i && l < LANES; l++)  \
        total += lanes[l];                \
    for (int k = i; k < size; k++)        \
        total += term;                    \
    return total;
