/* Work shared out among threads: a range in as many parts, of which each takes the next.

   More and smaller parts would balance better where a core is busy with other things, and are
   slower where it is not: a pass over activations goes through less memory at a stretch.

   The threads are torch's own where OpenMP has them, by the name that GNU gave to the call. Between
   two of torch's operations they wait for the next by turning round and round, and a thread of ours
   would share its core with one of them: a pass after a convolution then took 3.6 ms instead of
   2.1. How many there are is left to OpenMP, as it makes them anew when another number is asked
   for. They do not survive a fork. After one, and elsewhere, threads are made for one call, in some
   50 us. */

#include <dlfcn.h>
#include <pthread.h>
#include <stdint.h>
#include <unistd.h>

enum { MOST_THREADS = 64 };

typedef struct {
    void (*run)(const void *job, int64_t begin, int64_t end);
    const void *job;
    int64_t count, part, next;
} Range;

static void (*parallel)(void (*)(void *), void *, unsigned threads, unsigned flags);
static pid_t loaded_in;

__attribute__((constructor)) static void find_threads(void)
{
    void *found = dlsym(dlopen(0, RTLD_LAZY), "GOMP_parallel");
    *(void **)&parallel = found;
    loaded_in = getpid();
}

static void take_parts(void *argument)
{
    Range *range = argument;
    int64_t begin;
    while ((begin = __atomic_fetch_add(&range->next, range->part, __ATOMIC_RELAXED)) <
           range->count) {
        const int64_t end = begin + range->part;
        range->run(range->job, begin, end < range->count ? end : range->count);
    }
}

static void *take_parts_in_thread(void *argument)
{
    take_parts(argument);
    return 0;
}

/* Run a job on all of 0 ... count - 1 in `threads` parts, multiples of `unit` all but the last. */
static void share_out(void (*run)(const void *, int64_t, int64_t), const void *job, int64_t count,
                      int64_t unit, int threads)
{
    const int64_t units = (count + unit - 1) / unit;
    threads = threads < MOST_THREADS ? threads : MOST_THREADS;
    threads = threads < units ? threads : (int)units;
    threads = threads > 1 ? threads : 1;
    Range range = {run, job, count, (units + threads - 1) / threads * unit, 0};
    if (threads > 1 && parallel && getpid() == loaded_in) {
        parallel(take_parts, &range, 0, 0);
        return;
    }
    pthread_t thread[MOST_THREADS];
    int started = 0;
    while (started < threads - 1 &&
           !pthread_create(&thread[started], 0, take_parts_in_thread, &range))
        started++;
    take_parts(&range);
    while (started--)
        pthread_join(thread[started], 0);
}
