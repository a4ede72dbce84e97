/* Commands of the caller: caller.c. */
#ifndef ENVHERD_CALLER_H
#define ENVHERD_CALLER_H

#include "native.h"

typedef struct Caller Caller;

/* int64 `[count]`. */
typedef struct {
    const char *at;
    Py_ssize_t stride, count;
    Py_buffer memory; /* held for `at`; of those that `numbers_take` has taken */
} Numbers;

static inline i64 number_at(const Numbers *numbers, Py_ssize_t i)
{
    return *(const i64 *)(numbers->at + i * numbers->stride);
}

/* Take int64 `[k]`, all in 0 .. below - 1 unless that is 0. Returns 1, or 0 for anything else, without an exception. */
int numbers_take(PyObject *array, i64 below, Numbers *to);
/* Give envs that were checked a command each, under the next number; `rings`: wake their workers. */
void caller_give_each(Caller *caller, const Numbers *ids, const Numbers *commands, int rings);
/* Wait until all envs have answered: 1; 0: no answer has come for `look_ns`; -1: an exception. */
int caller_has_all(Caller *caller);
/* Wait until enough envs have answered, which are written to `to`: 1; 0: not in time, or the wait was ended; -1: an
 * exception. */
int caller_wait_for_some(Caller *caller, const Numbers *ids, Py_ssize_t wanted, i64 wait_ns, i64 *to, Py_ssize_t *found);
int caller_has_number(const Caller *caller, i64 id);   /* its number says that the env has answered */
int caller_answer_is_lost(const Caller *caller, i64 id); /* a loss has taken the answer */
int caller_has_news(const Caller *caller);             /* more than rows */
Py_ssize_t caller_num_envs(const Caller *caller);
i64 caller_look_ns(const Caller *caller);

#endif
