/* Commands to envs of a pool, and the wait for their answers: executor.pools.commands names the specification.
 *
 * Order, because workers read meanwhile. Handlers of signals run only in `bell_wait`. The numbers are at the lines.
 * 1. The counter of commands, before any word: after an interrupt, Python sees by it that a command may have been given.
 * 2. The commands, then `answers_lost`, then the commands' numbers (release): a worker that finds a number reads what it
 *    announces, and an answer never counts as one that an earlier loss has taken.
 * 3. The doorbells, after the numbers: a worker that was rung must find the command.
 * 4. Tokens, then the count of answers, then the numbers of replies: a token that comes later stays, so the next wait
 *    returns at once, and no answer is missed.
 * 5. `ring_at`, a full fence, then the count again: either the worker that counts last sees the wish, or the caller sees
 *    its count. */
#include "caller.h"

#include <stdlib.h>

struct Caller {
    PyObject_HEAD
    Py_buffer command, command_seq, reply_seq, status; /* words of each env */
    Py_buffer number;                           /* of the latest command: one word, which Python writes as well */
    Py_buffer answered, ring_at;                /* words of each worker */
    Py_buffer answers_lost, worker_of;          /* of each env */
    Bell done, *go;                             /* `go`: one of each worker */
    i64 *rung;                                  /* the number of the command for which each was rung last */
    Numbered *answers;                          /* one for each env, used within `find_ready` */
    Py_ssize_t num_workers, num_envs;
    i64 look_ns;
};

static const Fact FACTS[] = {
    FACT(WORDS, Caller, command), FACT(WORDS, Caller, command_seq), FACT(WORDS, Caller, reply_seq),
    FACT(WORDS, Caller, status), FACT(WORDS, Caller, number), FACT(WORDS, Caller, answered),
    FACT(WORDS, Caller, ring_at), FACT(BYTES, Caller, answers_lost), FACT(WORDS, Caller, worker_of),
    FACT(NUMBER, Caller, look_ns), {NULL},
};

/* ---- construction ----------------------------------------------------------------------------------- */

static int are_of_the_same(Caller *caller)
{
    const Py_buffer *of_envs[] = {&caller->command_seq, &caller->reply_seq, &caller->status, &caller->worker_of};
    int is_right = caller->answers_lost.len == caller->num_envs && caller->number.shape[0] == 1
                   && caller->answered.shape[0] == caller->num_workers && caller->ring_at.shape[0] == caller->num_workers;
    for (size_t i = 0; i < sizeof of_envs / sizeof *of_envs; i++)
        is_right = is_right && of_envs[i]->shape[0] == caller->num_envs;
    for (Py_ssize_t i = 0; is_right && i < caller->num_envs; i++)
        is_right = (size_t)*word(&caller->worker_of, i) < (size_t)caller->num_workers;
    if (!is_right)
        PyErr_SetString(PyExc_ValueError, "expected words and flags of the same envs and workers");
    return is_right ? 0 : -1;
}

static int take_room(Caller *caller)
{
    caller->num_envs = caller->command.shape[0];
    caller->answers = room_for(caller->num_envs, sizeof *caller->answers);
    return caller->answers == NULL ? -1 : 0;
}

static int take_bells(Caller *caller, PyObject *facts)
{
    PyObject *go = fact(facts, "go");
    Py_ssize_t count = go == NULL ? -1 : PyList_Size(go);
    if (count < 0 || bell_take(facts, "done", &caller->done) < 0)
        return -1;
    caller->go = room_for(count, sizeof *caller->go);
    caller->rung = room_for(count, sizeof *caller->rung);
    if (caller->go == NULL || caller->rung == NULL)
        return -1;
    caller->num_workers = count; /* those that are not taken yet hold nothing, which is as good to release */
    for (Py_ssize_t i = 0; i < count; i++)
        if (bell_take_memory(PyList_GetItem(go, i), "go", &caller->go[i]) < 0)
            return -1;
    return 0;
}

static int take_all(PyObject *self, PyObject *facts)
{
    Caller *caller = (Caller *)self;
    if (take_facts(facts, FACTS, caller) < 0 || take_room(caller) < 0 || take_bells(caller, facts) < 0)
        return -1;
    return are_of_the_same(caller);
}

static PyObject *caller_new(PyTypeObject *type, PyObject *args, PyObject *Py_UNUSED(kwargs))
{
    return make(type, args, take_all);
}

static void caller_dealloc(Caller *caller)
{
    release_facts(FACTS, caller);
    PyBuffer_Release(&caller->done.memory);
    for (Py_ssize_t i = 0; i < caller->num_workers; i++)
        PyBuffer_Release(&caller->go[i].memory);
    PyMem_Free(caller->go);
    PyMem_Free(caller->rung);
    PyMem_Free(caller->answers);
    give_up((PyObject *)caller);
}

/* ---- commands --------------------------------------------------------------------------------------- */

static i64 next_number(Caller *caller) { return ++*word(&caller->number, 0); }

int caller_has_number(const Caller *caller, i64 id)
{
    return LOAD_NUMBER(word(&caller->reply_seq, id)) == LOAD(word(&caller->command_seq, id));
}

int caller_answer_is_lost(const Caller *caller, i64 id) { return ((char *)caller->answers_lost.buf)[id] != 0; }

static int have_answered(const Caller *caller)
{
    for (Py_ssize_t i = 0; i < caller->num_envs; i++)
        if (!caller_has_number(caller, i))
            return 0;
    return 1;
}

int caller_has_news(const Caller *caller)
{
    for (Py_ssize_t i = 0; i < caller->num_envs; i++)
        if (LOAD(word(&caller->status, i)) != 0)
            return 1;
    return 0;
}

int caller_has_all(Caller *caller)
{
    for (Py_ssize_t tokens = 0; tokens < caller->num_workers || !have_answered(caller); tokens++) {
        int is_taken = bell_wait(&caller->done, caller->look_ns);
        if (is_taken <= 0)
            return is_taken;
    }
    return 1;
}

/* ---- commands to some envs -------------------------------------------------------------------------- */

int numbers_take(PyObject *array, i64 below, Numbers *to)
{
    if (PyObject_GetBuffer(array, &to->memory, PyBUF_STRIDED_RO | PyBUF_FORMAT) < 0) {
        PyErr_Clear();
        return 0;
    }
    const Py_buffer *memory = &to->memory;
    int is_right = memory->ndim == 1 && memory->itemsize == 8 && (memory->format[0] == 'l' || memory->format[0] == 'q');
    to->at = memory->buf;
    to->stride = is_right ? memory->strides[0] : 0;
    to->count = is_right ? memory->shape[0] : 0;
    for (Py_ssize_t i = 0; below > 0 && is_right && i < to->count; i++)
        is_right = (uint64_t)number_at(to, i) < (uint64_t)below;
    if (!is_right)
        PyBuffer_Release(&to->memory);
    return is_right;
}

void caller_give_each(Caller *caller, const Numbers *ids, const Numbers *commands, int rings)
{
    i64 number = next_number(caller); /* 1 */
    for (Py_ssize_t i = 0; i < ids->count; i++) /* 2 */
        STORE(word(&caller->command, number_at(ids, i)), number_at(commands, i));
    for (Py_ssize_t i = 0; i < ids->count; i++)
        ((char *)caller->answers_lost.buf)[number_at(ids, i)] = 0;
    for (Py_ssize_t i = 0; i < ids->count; i++)
        STORE_NUMBER(word(&caller->command_seq, number_at(ids, i)), number);
    for (Py_ssize_t i = 0; rings && i < ids->count; i++) { /* 3 */
        i64 worker = *word(&caller->worker_of, number_at(ids, i));
        if (caller->rung[worker] != number)
            bell_ring(&caller->go[worker]);
        caller->rung[worker] = number;
    }
}

static PyObject *caller_give_some(PyObject *self, PyObject *args)
{
    Caller *caller = (Caller *)self;
    PyObject *ids_array, *commands_array;
    Numbers ids, commands;
    if (!PyArg_ParseTuple(args, "OO", &ids_array, &commands_array))
        return NULL;
    if (!numbers_take(ids_array, caller->num_envs, &ids))
        Py_RETURN_FALSE;
    int is_given = 0;
    if (numbers_take(commands_array, 0, &commands)) {
        is_given = ids.count == commands.count;
        if (is_given)
            caller_give_each(caller, &ids, &commands, 1);
        PyBuffer_Release(&commands.memory);
    }
    PyBuffer_Release(&ids.memory);
    return PyBool_FromLong(is_given);
}

static i64 num_counted(const Caller *caller)
{
    i64 sum = 0;
    for (Py_ssize_t i = 0; i < caller->num_workers; i++)
        sum += LOAD(word(&caller->answered, i));
    return sum;
}

/* Write those envs that owe no answer to `to`, the oldest command first, then as given; return how many. */
static Py_ssize_t find_ready(const Caller *caller, const Numbers *ids, i64 *to)
{
    Py_ssize_t found = 0;
    for (Py_ssize_t i = 0; i < ids->count; i++) {
        i64 id = number_at(ids, i);
        if (caller_has_number(caller, id))
            caller->answers[found++] = (Numbered){LOAD(word(&caller->command_seq, id)), i};
    }
    qsort(caller->answers, (size_t)found, sizeof *caller->answers, oldest_first);
    for (Py_ssize_t i = 0; i < found; i++)
        to[i] = number_at(ids, caller->answers[i].place);
    return found;
}

/* Ask for a ring once this number of answers has been counted: 0 if they have been by now (5). */
static int expect(Caller *caller, i64 total)
{
    for (Py_ssize_t i = 0; i < caller->num_workers; i++)
        STORE(word(&caller->ring_at, i), total);
    FULL_FENCE();
    return num_counted(caller) < total;
}

int caller_wait_for_some(Caller *caller, const Numbers *ids, Py_ssize_t wanted, i64 wait_ns, i64 *to, Py_ssize_t *found)
{
    i64 now = wait_ns > 0 ? monotonic_ns() : 0, end = now + wait_ns;
    for (;; now = monotonic_ns()) {
        while (sem_trywait(caller->done.semaphore) == 0) /* 4 */
            ;
        i64 total = num_counted(caller);
        *found = find_ready(caller, ids, to);
        if (*found >= wanted)
            return 1;
        if (now >= end)
            return 0;
        if (!expect(caller, total + wanted - *found))
            continue;
        int is_taken = bell_wait(&caller->done, end - now);
        if (is_taken <= 0)
            return is_taken;
    }
}

static PyObject *caller_first(PyObject *self, PyObject *args)
{
    Caller *caller = (Caller *)self;
    long long wait_ns;
    Py_ssize_t wanted, found = 0;
    PyObject *ids_array, *to_array;
    Numbers ids;
    Py_buffer to;
    if (!PyArg_ParseTuple(args, "OnLO", &ids_array, &wanted, &wait_ns, &to_array)
        || PyObject_GetBuffer(to_array, &to, PyBUF_CONTIG) < 0)
        return NULL;
    int has_come = 0;
    if (numbers_take(ids_array, caller->num_envs, &ids)) {
        if (ids.count <= caller->num_envs && ids.count <= to.len / (Py_ssize_t)sizeof(i64))
            has_come = caller_wait_for_some(caller, &ids, wanted, wait_ns, to.buf, &found);
        PyBuffer_Release(&ids.memory);
    }
    PyBuffer_Release(&to);
    return has_come < 0 ? NULL : PyLong_FromSsize_t(has_come && !caller_has_news(caller) ? found : -1);
}

static PyMethodDef caller_methods[] = {
    {"give_some", caller_give_some, METH_VARARGS,
     "give_some(ids, commands): give envs a command each, and wake their workers; return False if these are no int64 "
     "arrays, and nothing was given."},
    {"first", caller_first, METH_VARARGS,
     "first(ids, wanted, wait_ns, to): wait until `wanted` of some envs have answered; write those that have to `to`, the "
     "oldest command first, and return their number; -1 if they have not, or if there is more to know than rows."},
    {NULL, NULL, 0, NULL},
};
static PyType_Slot caller_slots[] = {
    {Py_tp_doc, "Gives commands to envs of a pool: see executor.pools.commands."},
    {Py_tp_new, caller_new},
    {Py_tp_methods, caller_methods},
    {Py_tp_dealloc, caller_dealloc},
    {0, NULL},
};
PyType_Spec caller_spec = {
    .name = "envherd.workers.native._native.Caller",
    .basicsize = sizeof(Caller),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_IMMUTABLETYPE,
    .slots = caller_slots,
};

Py_ssize_t caller_num_envs(const Caller *caller) { return caller->num_envs; }
i64 caller_look_ns(const Caller *caller) { return caller->look_ns; }
