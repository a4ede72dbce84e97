/* Commands to all envs of a pool, and the wait for their answers: see executor.pools.fast_commands, the specification. */
#include "native.h"

#include <string.h>

static const char *const WORDS[] = {"command", "command_seq", "reply_seq", "status"};
enum { COMMAND, COMMAND_SEQ, REPLY_SEQ, STATUS, NUM_WORDS };

typedef struct {
    PyObject_HEAD
    Py_buffer words[NUM_WORDS], forfeited; /* of each env */
    Bell done, *go;                        /* `go`: one of each worker */
    Py_ssize_t num_workers, num_envs;
    i64 look_ns;
} Caller;

static i64 *word(const Caller *caller, int name) { return caller->words[name].buf; }

/* ---- construction ----------------------------------------------------------------------------------- */

static int take_words_and_flags(Caller *caller, PyObject *facts)
{
    PyObject *words = fact(facts, "words"), *forfeited = fact(facts, "forfeited");
    if (words == NULL || forfeited == NULL)
        return -1;
    for (int i = 0; i < NUM_WORDS; i++)
        if (take_words(words, WORDS[i], &caller->words[i]) < 0)
            return -1;
    if (PyObject_GetBuffer(forfeited, &caller->forfeited, PyBUF_CONTIG) < 0)
        return -1;
    caller->num_envs = caller->words[COMMAND].shape[0];
    int is_right = caller->forfeited.len == caller->num_envs;
    for (int i = 0; i < NUM_WORDS; i++)
        is_right = is_right && caller->words[i].shape[0] == caller->num_envs;
    if (!is_right)
        PyErr_SetString(PyExc_ValueError, "expected words and flags of the same envs");
    return is_right ? 0 : -1;
}

static int take_bells(Caller *caller, PyObject *facts)
{
    PyObject *go = fact(facts, "go");
    Py_ssize_t count = go == NULL ? -1 : PyList_Size(go);
    if (count < 0 || bell_take(facts, "done", &caller->done) < 0)
        return -1;
    caller->go = PyMem_Calloc((size_t)count + 1, sizeof *caller->go);
    if (caller->go == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    caller->num_workers = count; /* those that are not taken yet hold nothing, which is as good to release */
    for (Py_ssize_t i = 0; i < count; i++)
        if (bell_take_memory(PyList_GetItem(go, i), "go", &caller->go[i]) < 0)
            return -1;
    return 0;
}

static PyObject *caller_new(PyTypeObject *type, PyObject *args, PyObject *Py_UNUSED(kwargs))
{
    PyObject *facts;
    if (!PyArg_ParseTuple(args, "O!", &PyDict_Type, &facts))
        return NULL;
    Caller *caller = (Caller *)PyType_GenericAlloc(type, 0);
    if (caller == NULL)
        return NULL;
    if (take_number(facts, "look_ns", &caller->look_ns) < 0 || take_words_and_flags(caller, facts) < 0
        || take_bells(caller, facts) < 0) {
        Py_DECREF(caller);
        return NULL;
    }
    return (PyObject *)caller;
}

static void caller_dealloc(Caller *caller)
{
    PyTypeObject *type = Py_TYPE((PyObject *)caller);
    freefunc release = (freefunc)PyType_GetSlot(type, Py_tp_free);
    for (int i = 0; i < NUM_WORDS; i++)
        PyBuffer_Release(&caller->words[i]);
    PyBuffer_Release(&caller->forfeited);
    PyBuffer_Release(&caller->done.memory);
    for (Py_ssize_t i = 0; i < caller->num_workers; i++)
        PyBuffer_Release(&caller->go[i].memory);
    PyMem_Free(caller->go);
    release(caller);
    Py_DECREF(type);
}

/* ---- commands --------------------------------------------------------------------------------------- */

static PyObject *caller_give(PyObject *self, PyObject *args)
{
    Caller *caller = (Caller *)self;
    long long number, command;
    if (!PyArg_ParseTuple(args, "LL", &number, &command))
        return NULL;
    memset(caller->forfeited.buf, 0, (size_t)caller->num_envs);
    for (Py_ssize_t i = 0; i < caller->num_envs; i++)
        STORE(word(caller, COMMAND) + i, command);
    for (Py_ssize_t i = 0; i < caller->num_envs; i++)
        STORE_NUMBER(word(caller, COMMAND_SEQ) + i, number);
    for (Py_ssize_t i = 0; i < caller->num_workers; i++)
        bell_ring(&caller->go[i]);
    Py_RETURN_NONE;
}

static int have_answered(const Caller *caller)
{
    for (Py_ssize_t i = 0; i < caller->num_envs; i++)
        if (LOAD_NUMBER(word(caller, REPLY_SEQ) + i) != LOAD(word(caller, COMMAND_SEQ) + i))
            return 0;
    return 1;
}

static PyObject *caller_has_all(PyObject *self, PyObject *Py_UNUSED(none))
{
    Caller *caller = (Caller *)self;
    for (Py_ssize_t tokens = 0; tokens < caller->num_workers || !have_answered(caller); tokens++) {
        int is_taken = bell_wait(&caller->done, caller->look_ns);
        if (is_taken < 0)
            return NULL;
        if (!is_taken)
            Py_RETURN_FALSE;
    }
    for (Py_ssize_t i = 0; i < caller->num_envs; i++)
        if (LOAD(word(caller, STATUS) + i) != 0)
            Py_RETURN_FALSE;
    Py_RETURN_TRUE;
}

static PyMethodDef caller_methods[] = {
    {"give", caller_give, METH_VARARGS, "give(number, command): give all envs a command, and wake their workers."},
    {"has_all", caller_has_all, METH_NOARGS,
     "Wait for all answers; return False if none has come for `look_ns`, or if there is more to know than rows."},
    {NULL, NULL, 0, NULL},
};
static PyType_Slot caller_slots[] = {
    {Py_tp_doc, "Gives commands to all envs of a pool: see executor.pools.fast_commands."},
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
