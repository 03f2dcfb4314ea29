/* The functions of rows.py in C, for CPUs: one call for all rows of a model.

   The rows come in chunks of about the same number of elements, so that threads have equal work.
   Sums are in double, in eight partial sums that the compiler keeps in vector registers; each row
   is summed by one thread in one order, so the number of threads does not change a bit. */

#include <math.h>
#include <stdint.h>

#include "threads.h"

enum { LANES = 8 };

typedef struct {
    int64_t layer, first, count, row; /* rows first ... of a matrix; `row` is the flat number */
} Chunk;

typedef struct {
    const Chunk *chunks;
    const int64_t *widths;
    void *const *operand[3]; /* addresses, one per matrix */
    void *per_row[4];
    int rescales; /* enter brings w to the length R */
} Job;

#define TYPE float
#define NAME(name) name##_float
#include "rows.h"
#undef TYPE
#undef NAME

#define TYPE double
#define NAME(name) name##_double
#include "rows.h"

void geoparam_rows(int function, int wide, int threads, int64_t chunks, const Job *job)
{
    /* in the order of rows_native.py */
    static void (*const run[4][2])(const void *, int64_t, int64_t) = {
        {enter_float, enter_double},
        {leave_float, leave_double},
        {measure_float, measure_double},
        {rotate_float, rotate_double},
    };
    share_out(run[function][wide], job, chunks, 1, threads);
}
