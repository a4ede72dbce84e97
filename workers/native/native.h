/* What the C files share. Limited API of CPython 3.11 and its buffer protocol; neither numpy's nor torch's headers.
 *
 * Memory: whatever is read or written here belongs to an object whose buffer is held (`Py_buffer`) for as long as an
 * address into it is kept, so that no address outlives its mapping. All calls hold the GIL, except for waits in bell.c. */
#ifndef ENVHERD_NATIVE_H
#define ENVHERD_NATIVE_H

#define PY_SSIZE_T_CLEAN
#define Py_LIMITED_API 0x030B0000
#include <Python.h>
#include <semaphore.h>
#include <stddef.h>
#include <stdint.h>

#include "constants.h"

typedef int64_t i64;

/* Words of the slab have one writer each. A number announces what was written before it, so it is stored with release order and
 * loaded with acquire order; other words are counters and hints, which only must not be torn. */
#define LOAD_NUMBER(place) __atomic_load_n((place), __ATOMIC_ACQUIRE)
#define STORE_NUMBER(place, value) __atomic_store_n((place), (value), __ATOMIC_RELEASE)
#define LOAD(place) __atomic_load_n((place), __ATOMIC_RELAXED)
#define STORE(place, value) __atomic_store_n((place), (value), __ATOMIC_RELAXED)
#define ADD(place, value) STORE((place), LOAD(place) + (value))
#define FULL_FENCE() __atomic_thread_fence(__ATOMIC_SEQ_CST)

static inline i64 *word(const Py_buffer *words, i64 index) { return (i64 *)words->buf + index; }

/* A command, by its number, of one of some envs. */
typedef struct {
    i64 number;
    Py_ssize_t place;
} Numbered;

/* For `qsort`: the oldest command first, then by place. */
static inline int oldest_first(const void *one, const void *other)
{
    const Numbered *a = one, *b = other;
    if (a->number != b->number)
        return a->number < b->number ? -1 : 1;
    return a->place < b->place ? -1 : a->place > b->place;
}

/* ---- facts, which Python passes to a constructor in a dict: facts.c ----------------------------------- */

/* One fact, and the field of a struct that gets it. A table of these ends with a name of NULL. */
typedef struct {
    const char *name;
    enum {
        OBJECT,        /* PyObject *, a reference; NULL for None */
        NUMBER,        /* i64 */
        WORDS,         /* Py_buffer: int64 `[n]`, writable */
        BYTES,         /* Py_buffer: items of one byte, contiguous, writable */
        WORDS_OR_NONE, /* as WORDS; no object for None */
        CONSTANTS,     /* Py_buffer: contiguous, only read; no object for None */
    } kind;
    size_t offset;
} Fact;

#define FACT(kind, type, field) {#field, kind, offsetof(type, field)}

PyObject *fact(PyObject *facts, const char *name);                  /* borrowed; NULL with KeyError */
int take_facts(PyObject *facts, const Fact *table, void *to);       /* 0, or -1 with an exception */
int visit_facts(const Fact *table, void *of, visitproc visit, void *arg);
void clear_facts(const Fact *table, void *of);                      /* give up the objects */
void release_facts(const Fact *table, void *of);                    /* and the buffers */

/* Create an object, and let `take` read the facts, which are the only argument; NULL with an exception. */
PyObject *make(PyTypeObject *type, PyObject *args, int (*take)(PyObject *self, PyObject *facts));
void give_up(PyObject *self);                                       /* the last call of a `dealloc` */
void *room_for(Py_ssize_t count, size_t size);                      /* zeros, for at least one; NULL with an exception */

/* ---- doorbells: bell.c ------------------------------------------------------------------------------ */

typedef struct {
    Py_buffer memory;
    sem_t *semaphore;
    i64 brief_spin, long_spin, short_wait, overrun, fewest_waits, most_waits; /* constants of shm.sync, in ns */
    i64 spin, waits_without_spin, back_off, num_overruns;
} Bell;

i64 monotonic_ns(void);
int bell_take(PyObject *facts, const char *name, Bell *bell);           /* to wait for it, too */
int bell_take_memory(PyObject *array, const char *name, Bell *bell);    /* to ring it only */
int bell_wait(Bell *bell, i64 timeout_ns); /* 1: a token; 0: none in time; -1: with an exception. < 0: for ever */
void bell_ring(Bell *bell);

/* ---- the types of the module: a file each; those of the caller are in executor/native ---------------- */

extern PyType_Spec step_spec, schema_spec, caller_spec, exchange_spec;

/* ---- infos as rows: info_rows.c ----------------------------------------------------------------------- */

typedef struct Schema Schema;

/* Write an info to a row with room for some bytes; return the schema's id, or 0 if it does not fit. */
i64 schema_write(const Schema *schema, PyObject *info, char *row, Py_ssize_t room);

/* ---- steps: step.c ---------------------------------------------------------------------------------- */

typedef struct Step Step;
typedef enum { STEP_STORED, STEP_ENDED, STEP_ODD, STEP_RAISED } Outcome;

int step_root_follows(const Step *step);
PyObject *step_hand_over(const Step *step); /* borrowed */
int step_may_step(const Step *step, i64 column); /* there is such a column, and the env's state allows it */
/* Step the env once, and move its state. `*given`, a new reference or NULL: with STEP_STORED and STEP_ENDED the
 * observation values, with STEP_ODD what the env returned, of which nothing was written. STEP_RAISED: an exception. */
Outcome step_once(Step *step, i64 column, PyObject **given);
void step_forget_info(const Step *step); /* of the step before a command that is only a reset */
int step_can_reset(const Step *step); /* else Python must */
/* Begin the env's next episode, and write its root to a column, unless there is none; move its state.
 * `*given`: what the adapter returned, a new reference or NULL. STEP_ODD: nothing was written. */
Outcome step_reset(Step *step, i64 column, PyObject **given);

#endif
