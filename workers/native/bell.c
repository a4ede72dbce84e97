/* Doorbells by the rules of `shm.sync.Doorbell.wait`, whose constants python hands over. */
#include "native.h"

#include <errno.h>
#include <sched.h>
#include <time.h>

enum { NS_PER_S = 1000000000 };
static const i64 SLICE_NS = 60LL * NS_PER_S; /* without sem_clockwait a wait follows the wall clock, which may be set */

#ifdef __GLIBC_PREREQ /* musl has no sem_clockwait */
#if __GLIBC_PREREQ(2, 30)
#define HAS_CLOCKWAIT
#endif
#endif

i64 monotonic_ns(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (i64)now.tv_sec * NS_PER_S + now.tv_nsec;
}

/* Wait for a token for at most `ns`, at least 0; return 0, or -1 with `errno`. */
static int take_within(sem_t *semaphore, i64 ns)
{
#ifdef HAS_CLOCKWAIT
    clockid_t clock = CLOCK_MONOTONIC;
#else
    clockid_t clock = CLOCK_REALTIME;
#endif
    struct timespec at;
    clock_gettime(clock, &at);
    i64 sum = at.tv_nsec + ns;
    at.tv_sec += (time_t)(sum / NS_PER_S);
    at.tv_nsec = (long)(sum % NS_PER_S);
#ifdef HAS_CLOCKWAIT
    return sem_clockwait(semaphore, clock, &at);
#else
    return sem_timedwait(semaphore, &at);
#endif
}

int bell_take_memory(PyObject *array, const char *name, Bell *bell)
{
    if (PyObject_GetBuffer(array, &bell->memory, PyBUF_CONTIG) < 0)
        return -1;
    bell->semaphore = bell->memory.buf;
    if (bell->memory.len >= (Py_ssize_t)sizeof(sem_t) && (uintptr_t)bell->memory.buf % _Alignof(sem_t) == 0)
        return 0;
    PyErr_Format(PyExc_ValueError, "expected the memory of a doorbell as %s", name);
    return -1;
}

static const Fact FACTS[] = {
    FACT(NUMBER, Bell, brief_spin), FACT(NUMBER, Bell, long_spin), FACT(NUMBER, Bell, short_wait),
    FACT(NUMBER, Bell, overrun), FACT(NUMBER, Bell, fewest_waits), FACT(NUMBER, Bell, most_waits), {NULL},
};

int bell_take(PyObject *facts, const char *name, Bell *bell)
{
    PyObject *array = fact(facts, name);
    if (array == NULL || bell_take_memory(array, name, bell) < 0 || take_facts(facts, FACTS, bell) < 0)
        return -1;
    bell->spin = bell->brief_spin;
    bell->back_off = bell->fewest_waits;
    return 0;
}

void bell_ring(Bell *bell)
{
    sem_post(bell->semaphore);
}

/* Yield the processor for a bounded time, looking for a token in between. Without the GIL. */
static int spin(Bell *bell)
{
    i64 now = monotonic_ns(), limit = now + bell->spin;
    int is_taken = 0;
    while (!is_taken && now < limit) {
        sched_yield();
        is_taken = sem_trywait(bell->semaphore) == 0;
        now = monotonic_ns();
    }
    if (now > limit + bell->overrun) {
        bell->num_overruns++;
        bell->waits_without_spin = bell->back_off;
        bell->back_off = 2 * bell->back_off < bell->most_waits ? 2 * bell->back_off : bell->most_waits;
    } else if (bell->back_off > bell->fewest_waits) {
        bell->back_off--;
    }
    return is_taken;
}

/* Block until a token, the end (< 0: none) or a signal whose handler raises. Other threads may run meanwhile. */
static int block(Bell *bell, i64 timeout_ns)
{
    i64 end = timeout_ns < 0 ? 0 : monotonic_ns() + timeout_ns;
    for (;;) {
        if (PyErr_CheckSignals() < 0) /* also for a signal during the spin, which interrupts no system call */
            return -1;
        i64 left = timeout_ns < 0 ? SLICE_NS : end - monotonic_ns();
        if (left <= 0)
            return sem_trywait(bell->semaphore) == 0;
        int error = 0;
        Py_BEGIN_ALLOW_THREADS
        if (take_within(bell->semaphore, left < SLICE_NS ? left : SLICE_NS) != 0)
            error = errno;
        Py_END_ALLOW_THREADS
        if (error == 0)
            return 1;
        if (error != EINTR && error != ETIMEDOUT) {
            errno = error;
            PyErr_SetFromErrno(PyExc_OSError);
            return -1;
        }
    }
}

int bell_wait(Bell *bell, i64 timeout_ns)
{
    int is_taken = 0;
    if (PyErr_CheckSignals() < 0)
        return -1;
    if (sem_trywait(bell->semaphore) == 0)
        return 1;
    if (bell->waits_without_spin == 0) {
        Py_BEGIN_ALLOW_THREADS
        is_taken = spin(bell);
        Py_END_ALLOW_THREADS
        if (is_taken)
            return 1;
    }
    i64 began = monotonic_ns();
    is_taken = block(bell, timeout_ns);
    bell->spin = monotonic_ns() - began < bell->short_wait ? bell->long_spin : bell->brief_spin;
    if (bell->waits_without_spin > 0)
        bell->waits_without_spin--;
    return is_taken;
}
