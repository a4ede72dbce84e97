/* The worker's loop: wait for the doorbell, look which envs have a command, carry it out; see `process.loop.Loop`.
 *
 * C makes plain steps, by the `Step` of their sink. `Block.execute` carries out every other command, and the rest of a
 * step whose result is not plain. C forgets what it knows of an env whenever Python code may have changed it: after a
 * message, and after a command that Python carried out or completed.
 *
 * Order, because the caller reads meanwhile. The numbers are at the lines.
 * 1. The commands' numbers (acquire), then the messages, then the commands: what belongs to a command was sent before its
 *    number, so it is read before the command is carried out.
 * 2. The row, then the status, then the reply's number (release): the caller that finds the number reads all of it. It
 *    takes the messages that the status announces, which were sent before.
 * 3. The count of answers, after the number, then a full fence, then `ring_at`: the caller that counts an answer finds
 *    its number, and either it or this worker sees the last one (see shm.sync).
 * 4. The ring, last; one for all envs of a command that is for all of them. */
#define _GNU_SOURCE /* sched_getcpu, and sets of processors */
#include "native.h"

#include <sched.h>
#include <stdlib.h>
#include <string.h>

static const char *const NAMES[] = {"sinks", "native", "prepared", "has_news"};
enum { SINKS, NATIVE, PREPARED, HAS_NEWS, NUM_NAMES };

enum { SHARED_TOKENS = 8 };                /* in a row, before a worker leaves a processor */
static const i64 LONG_NS = 20 * 1000LL; /* what takes less is done sooner where another worker has just run */
/* On a processor, at least; eight times as long after each move to where other programs run. */
static const i64 SHORTEST_STAY_NS = 10 * 1000000LL, LONGEST_STAY_NS = 5000 * 1000000LL;

typedef struct {
    i64 id, latest;    /* `latest`: number of the latest command that was carried out */
    i64 target;        /* what `step` writes to */
    PyObject *slot;
    Step *step;        /* its plain step, while C knows that Python has changed nothing; else NULL */
} Env;

typedef struct {
    PyObject_HEAD
    /* Words of each env, or of each worker; see shm.slab and shm.sync. */
    Py_buffer command_seq, command, reply_seq, status, resets, mail_seq, answered, ring_at, busy_ns, since_ns, reset_ns,
        step_bins, phase, answered_ns, cpu;
    Bell go, done;
    /* What Python does: functions of `process.loop.NativeLoop` and its block. */
    PyObject *execute, *hand_over, *fail, *go_on, *hand_over_reset, *check_mail, *tidy;
    PyObject *names[NUM_NAMES], *step_type;
    Env *envs;
    Numbered *pending;
    Py_ssize_t num_envs;
    i64 worker_id, num_workers, num_bins, tidy_every;
    i64 num_wakes, num_scans, mail_read;
    i64 num_shared, stay_ns, stays_until_ns, num_overruns, took_ns; /* `took_ns`: for the latest token */
} Loop;

static const Fact FACTS[] = {
    FACT(OBJECT, Loop, step_type), FACT(NUMBER, Loop, worker_id), FACT(NUMBER, Loop, num_bins),
    FACT(NUMBER, Loop, mail_read), FACT(NUMBER, Loop, tidy_every), {NULL},
};
static const Fact CALLS[] = {
    FACT(OBJECT, Loop, execute), FACT(OBJECT, Loop, hand_over), FACT(OBJECT, Loop, fail), FACT(OBJECT, Loop, go_on),
    FACT(OBJECT, Loop, hand_over_reset), FACT(OBJECT, Loop, check_mail), FACT(OBJECT, Loop, tidy), {NULL},
};
static const Fact WORDS_OF_SLAB[] = {
    FACT(WORDS, Loop, command_seq), FACT(WORDS, Loop, command), FACT(WORDS, Loop, reply_seq), FACT(WORDS, Loop, status),
    FACT(WORDS, Loop, resets), FACT(WORDS, Loop, mail_seq), FACT(WORDS, Loop, answered), FACT(WORDS, Loop, ring_at),
    FACT(WORDS, Loop, busy_ns), FACT(WORDS, Loop, since_ns), FACT(WORDS, Loop, reset_ns), FACT(WORDS, Loop, step_bins),
    FACT(WORDS, Loop, phase), FACT(WORDS, Loop, answered_ns), FACT(WORDS, Loop, cpu), {NULL},
};

/* ---- construction ----------------------------------------------------------------------------------- */

static int take_envs(Loop *loop, PyObject *facts)
{
    PyObject *slots = fact(facts, "slots");
    Py_ssize_t count = slots == NULL ? -1 : PyList_Size(slots), num_words = loop->command_seq.shape[0];
    if (count < 0)
        return -1;
    loop->envs = room_for(count, sizeof *loop->envs);
    loop->pending = room_for(count, sizeof *loop->pending);
    if (loop->envs == NULL || loop->pending == NULL)
        return -1;
    loop->num_envs = count;
    for (Py_ssize_t i = 0; i < count; i++) {
        Env *env = &loop->envs[i];
        if (!PyArg_ParseTuple(PyList_GetItem(slots, i), "LO", &env->id, &env->slot)) {
            env->slot = NULL;
            return -1;
        }
        Py_INCREF(env->slot);
        if (env->id < 0 || env->id >= num_words) {
            PyErr_SetString(PyExc_ValueError, "expected env ids of the slab");
            return -1;
        }
        env->latest = LOAD(word(&loop->reply_seq, env->id));
    }
    return 0;
}

static int take_all(PyObject *self, PyObject *facts)
{
    Loop *loop = (Loop *)self;
    PyObject *words = fact(facts, "words"), *calls = fact(facts, "calls");
    if (words == NULL || calls == NULL || take_facts(facts, FACTS, loop) < 0 || take_facts(words, WORDS_OF_SLAB, loop) < 0
        || take_facts(calls, CALLS, loop) < 0 || bell_take(facts, "go", &loop->go) < 0
        || bell_take(facts, "done", &loop->done) < 0)
        return -1;
    for (int i = 0; i < NUM_NAMES; i++)
        if ((loop->names[i] = PyUnicode_InternFromString(NAMES[i])) == NULL)
            return -1;
    loop->num_workers = loop->answered.shape[0];
    loop->stay_ns = SHORTEST_STAY_NS;
    int is_of_slab = loop->worker_id >= 0 && loop->worker_id < loop->num_workers && loop->num_bins > 0
        && loop->tidy_every > 0 && loop->step_bins.shape[0] == loop->num_workers * loop->num_bins;
    if (!is_of_slab) {
        PyErr_SetString(PyExc_ValueError, "expected a worker of the slab");
        return -1;
    }
    return take_envs(loop, facts);
}

static PyObject *loop_new(PyTypeObject *type, PyObject *args, PyObject *Py_UNUSED(kwargs))
{
    return make(type, args, take_all);
}

static int loop_traverse(Loop *loop, visitproc visit, void *arg)
{
    Py_VISIT(Py_TYPE((PyObject *)loop));
    for (Py_ssize_t i = 0; i < loop->num_envs; i++) {
        Py_VISIT(loop->envs[i].slot);
        Py_VISIT(loop->envs[i].step);
    }
    return visit_facts(CALLS, loop, visit, arg);
}

static int loop_clear(Loop *loop)
{
    clear_facts(CALLS, loop);
    for (Py_ssize_t i = 0; i < loop->num_envs; i++) {
        Py_CLEAR(loop->envs[i].slot);
        Py_CLEAR(loop->envs[i].step);
    }
    return 0;
}

static void loop_dealloc(Loop *loop)
{
    PyObject_GC_UnTrack(loop);
    loop_clear(loop);
    release_facts(FACTS, loop);
    release_facts(WORDS_OF_SLAB, loop);
    for (int i = 0; i < NUM_NAMES; i++)
        Py_XDECREF(loop->names[i]);
    PyBuffer_Release(&loop->go.memory);
    PyBuffer_Release(&loop->done.memory);
    PyMem_Free(loop->envs);
    PyMem_Free(loop->pending);
    give_up((PyObject *)loop);
}

/* ---- what python does ------------------------------------------------------------------------------- */

/* Make one of the calls about a command of an env, with up to two objects more; return the status that it returns, or
 * -1 with an exception. */
static i64 ask_python(Env *env, PyObject *call, i64 command, PyObject *more, PyObject *other)
{
    const char *format = more == NULL ? "LL" : other == NULL ? "LLO" : "LLOO";
    PyObject *reply = PyObject_CallFunction(call, format, env->id, command, more, other);
    Py_CLEAR(env->step);
    i64 status = reply == NULL ? -1 : PyLong_AsLongLong(reply);
    Py_XDECREF(reply);
    return status;
}

/* Have Python report what an env raised: in its reset, after a step that gave `observation`, or in the step itself (NULL). */
static i64 report_failure(Loop *loop, Env *env, i64 command, PyObject *observation)
{
    PyObject *type, *error, *traceback;
    PyErr_Fetch(&type, &error, &traceback);
    PyErr_NormalizeException(&type, &error, &traceback);
    if (traceback != NULL)
        PyException_SetTraceback(error, traceback);
    i64 status = ask_python(env, loop->fail, command, error, observation);
    Py_XDECREF(type);
    Py_XDECREF(error);
    Py_XDECREF(traceback);
    return status;
}

/* ---- steps ------------------------------------------------------------------------------------------ */

/* Return the step of an env to a target (a new reference), or NULL where Python is to step or reset it, perhaps with an
 * exception. */
static Step *find_step(Loop *loop, Env *env, i64 target)
{
    PyObject *slot = env->slot, *native = NULL, *prepared = PyObject_GetAttr(slot, loop->names[PREPARED]);
    /* A command that failed has left a report, which Python sends. */
    PyObject *has_news = PyObject_GetAttr(slot, loop->names[HAS_NEWS]);
    Py_XDECREF(prepared);
    Py_XDECREF(has_news);
    if (prepared != Py_None || has_news != Py_False)
        return NULL;
    PyObject *sinks = PyObject_GetAttr(slot, loop->names[SINKS]), *key = PyLong_FromLongLong(target);
    PyObject *sink = sinks == NULL || key == NULL ? NULL : PyDict_GetItemWithError(sinks, key);
    if (sink != NULL)
        native = PyObject_GetAttr(sink, loop->names[NATIVE]);
    Py_XDECREF(sinks);
    Py_XDECREF(key);
    if (native != NULL && (PyObject *)Py_TYPE(native) != loop->step_type)
        Py_CLEAR(native); /* None */
    return (Step *)native;
}

/* Begin the next episode of an env, with its root at a column; return the status of the command.
 * `observation`: of the step before it in the same command, or None. */
static i64 reset_env(Loop *loop, Env *env, Step *step, i64 command, i64 column, PyObject *observation)
{
    PyObject *root;
    i64 status;
    STORE(word(&loop->phase, loop->worker_id), OP_RESET | (env->id + 1) << OP_BITS);
    switch (step_reset(step, column, &root)) {
    case STEP_STORED:
        status = STATUS_OK;
        break;
    case STEP_ODD:
        status = ask_python(env, loop->hand_over_reset, command, observation, root);
        break;
    default:
        status = report_failure(loop, env, command, observation);
    }
    Py_XDECREF(root);
    return status;
}

static i64 note_end(Loop *loop, Env *env, Step *step, i64 command, i64 column, PyObject *observation)
{
    int resets = (command & ((1 << OP_BITS) - 1)) == OP_STEP_RESET;
    if (resets && step_can_reset(step))
        return reset_env(loop, env, step, command, column + step_root_follows(step), observation);
    return resets || step_root_follows(step) ? ask_python(env, loop->go_on, command, observation, NULL) : STATUS_OK;
}

static i64 step_env(Loop *loop, Env *env, i64 command, i64 column)
{
    PyObject *given;
    i64 status = STATUS_OK;
    STORE(word(&loop->phase, loop->worker_id), (command & ((1 << OP_BITS) - 1)) | (env->id + 1) << OP_BITS);
    Step *step = (Step *)Py_NewRef((PyObject *)env->step);
    switch (step_once(step, column, &given)) {
    case STEP_STORED:
        break;
    case STEP_ENDED:
        status = note_end(loop, env, step, command, column, given);
        break;
    case STEP_ODD:
        status = ask_python(env, loop->hand_over, command, step_hand_over(step), given);
        break;
    case STEP_RAISED:
        status = report_failure(loop, env, command, NULL);
    }
    Py_XDECREF(given);
    Py_DECREF(step);
    return status;
}

static i64 carry_out_reset(Loop *loop, Env *env, i64 command, i64 column)
{
    Step *step = (Step *)Py_NewRef((PyObject *)env->step);
    step_forget_info(step);
    i64 status = reset_env(loop, env, step, command, column, Py_None);
    Py_DECREF(step);
    return status;
}

/* Carry out one command and return its status, or -1 with an exception that is not an env's. */
static i64 carry_out(Loop *loop, Env *env, i64 command)
{
    i64 op = command & ((1 << OP_BITS) - 1), column = command >> (OP_BITS + FLAG_BITS + TARGET_BITS);
    i64 target = command >> (OP_BITS + FLAG_BITS) & ((1 << TARGET_BITS) - 1);
    if (column >= 0
        && (op == OP_STEP || op == OP_STEP_RESET || (op == OP_RESET && !(command & FLAG_PREPARED << OP_BITS)))) {
        if (env->step == NULL || env->target != target) {
            Py_CLEAR(env->step);
            env->target = target;
            env->step = find_step(loop, env, target);
            if (PyErr_Occurred())
                return -1;
        }
        if (env->step != NULL && op == OP_RESET && step_can_reset(env->step))
            return carry_out_reset(loop, env, command, column);
        if (env->step != NULL && op != OP_RESET && step_may_step(env->step, column))
            return step_env(loop, env, command, column);
    }
    return ask_python(env, loop->execute, command, NULL, NULL);
}

/* ---- the loop --------------------------------------------------------------------------------------- */

static i64 bin_of(i64 nanoseconds, i64 num_bins)
{
    if (nanoseconds < 8)
        return nanoseconds < 0 ? 0 : nanoseconds;
    int octave = 64 - __builtin_clzll((unsigned long long)nanoseconds);
    i64 bin = ((i64)octave << 2) - 4 + (nanoseconds >> (octave - 3) & 3);
    return bin < num_bins - 1 ? bin : num_bins - 1;
}

static i64 carry_out_timed(Loop *loop, Env *env, i64 command, i64 weight)
{
    i64 *resets = word(&loop->resets, env->id), before = LOAD(resets), began = monotonic_ns();
    i64 status = carry_out(loop, env, command), took = monotonic_ns() - began;
    if (LOAD(resets) == before)
        ADD(word(&loop->step_bins, loop->worker_id * loop->num_bins + bin_of(took, loop->num_bins)), 1);
    else
        ADD(word(&loop->reset_ns, loop->worker_id), took * weight);
    return status;
}

/* Count an answer; return whether the parent wants a ring. Write, fence, read: see shm.sync. */
static int count_answer(Loop *loop)
{
    i64 sum = 0;
    ADD(word(&loop->answered, loop->worker_id), 1);
    FULL_FENCE();
    for (i64 worker = 0; worker < loop->num_workers; worker++)
        sum += LOAD(word(&loop->answered, worker));
    return sum >= LOAD(word(&loop->ring_at, loop->worker_id));
}

/* Read the messages that are there: 1; 0 if one of them says to leave; -1 with an exception. */
static int read_mail(Loop *loop)
{
    i64 sent = LOAD_NUMBER(word(&loop->mail_seq, loop->worker_id));
    if (loop->mail_read >= sent)
        return 1;
    for (Py_ssize_t i = 0; i < loop->num_envs; i++)
        Py_CLEAR(loop->envs[i].step); /* first: a message may replace an env, which then has its memory no longer */
    PyObject *reply = PyObject_CallNoArgs(loop->check_mail);
    int goes_on = reply == NULL ? -1 : PyObject_IsTrue(reply);
    Py_XDECREF(reply);
    loop->mail_read = sent;
    return goes_on;
}

static Py_ssize_t find_pending(Loop *loop)
{
    Py_ssize_t count = 0;
    for (Py_ssize_t i = 0; i < loop->num_envs; i++) {
        i64 number = LOAD_NUMBER(word(&loop->command_seq, loop->envs[i].id));
        if (number != loop->envs[i].latest)
            loop->pending[count++] = (Numbered){number, i};
    }
    if (count > 1 && LOAD(word(&loop->command, loop->envs[loop->pending[0].place].id)) & FLAG_EACH << OP_BITS)
        qsort(loop->pending, (size_t)count, sizeof *loop->pending, oldest_first);
    return count;
}

/* Carry out the commands that are there: 1; 0 if a message says to leave; -1 with an exception. */
static int scan(Loop *loop)
{
    Py_ssize_t count = find_pending(loop);
    int owes_ring = 0, goes_on = read_mail(loop); /* 1 */
    if (goes_on != 1 || count == 0)
        return goes_on;
    Py_ssize_t sampled = (Py_ssize_t)(++loop->num_scans % count);
    for (Py_ssize_t i = 0; i < count; i++) {
        if (LOAD(word(&loop->mail_seq, loop->worker_id)) == LEAVE)
            return read_mail(loop);
        Env *env = &loop->envs[loop->pending[i].place];
        i64 number = LOAD_NUMBER(word(&loop->command_seq, env->id)), command = LOAD(word(&loop->command, env->id));
        i64 status = i == sampled ? carry_out_timed(loop, env, command, count) : carry_out(loop, env, command);
        if (status < 0)
            return -1;
        STORE(word(&loop->status, env->id), status); /* 2 */
        env->latest = number;
        if (command & FLAG_EACH << OP_BITS)
            STORE(word(&loop->answered_ns, env->id), monotonic_ns());
        STORE_NUMBER(word(&loop->reply_seq, env->id), number);
        if (!(command & FLAG_EACH << OP_BITS))
            owes_ring = 1;
        else if (count_answer(loop)) /* 3 */
            bell_ring(&loop->done);
    }
    if (owes_ring) /* 4 */
        bell_ring(&loop->done);
    return 1;
}

/* Whether one of some other workers began its latest token on a processor. */
static int is_used(const Loop *loop, int cpu, i64 num_workers)
{
    for (i64 worker = 0; worker < num_workers; worker++)
        if (worker != loop->worker_id && LOAD(word(&loop->cpu, worker)) == cpu + 1)
            return 1;
    return 0;
}

/* End the binding to one processor: allow those that were allowed before. */
static void unbind(const cpu_set_t *one, const cpu_set_t *allowed)
{
    cpu_set_t all, now;
    if (sched_getaffinity(0, sizeof now, &now) != 0 || !CPU_EQUAL(&now, one))
        return; /* another program has set other processors meanwhile */
    /* The kernel limits this to the cpuset, and follows the cpuset if that changes. It does not follow a smaller set. */
    memset(&all, 0xff, sizeof all);
    int is_as_before = sched_setaffinity(0, sizeof all, &all) == 0 && sched_getaffinity(0, sizeof now, &now) == 0
        && CPU_EQUAL(&now, allowed);
    if (!is_as_before)
        sched_setaffinity(0, sizeof *allowed, allowed);
}

/* Move to a processor that no worker uses, if there is one. The process is not bound to it afterwards. */
static void move_away(Loop *loop)
{
    int cpu = 0;
    cpu_set_t allowed, one;
    if (sched_getaffinity(0, sizeof allowed, &allowed) != 0)
        return;
    while (cpu < CPU_SETSIZE && (!CPU_ISSET(cpu, &allowed) || is_used(loop, cpu, loop->num_workers)))
        cpu++;
    if (cpu == CPU_SETSIZE)
        return;
    CPU_ZERO(&one);
    CPU_SET(cpu, &one);
    if (sched_setaffinity(0, sizeof one, &one) == 0)
        unbind(&one, &allowed);
    STORE(word(&loop->cpu, loop->worker_id), cpu + 1);
}

/* Leave a processor that a worker with a lower number uses as well. If batches take less than 0.5 ms, the kernel leaves
 * both there for hundreds of batches: see docs/reports/performance.md, "Where workers run". */
static void keep_apart(Loop *loop)
{
    int cpu = sched_getcpu();
    STORE(word(&loop->cpu, loop->worker_id), cpu + 1);
    int is_shared = cpu >= 0 && loop->took_ns >= LONG_NS && is_used(loop, cpu, loop->worker_id);
    loop->num_shared = is_shared ? loop->num_shared + 1 : 0;
    if (loop->num_shared < SHARED_TOKENS || monotonic_ns() < loop->stays_until_ns)
        return;
    int was_in_vain = loop->go.num_overruns > loop->num_overruns; /* its yields gave the processor to others */
    if (!was_in_vain)
        loop->stay_ns = SHORTEST_STAY_NS;
    else if (loop->stay_ns < LONGEST_STAY_NS)
        loop->stay_ns *= 8;
    loop->num_overruns = loop->go.num_overruns;
    loop->stays_until_ns = monotonic_ns() + loop->stay_ns;
    move_away(loop);
}

static int serve_token(Loop *loop)
{
    i64 worker_id = loop->worker_id;
    if (++loop->num_wakes % loop->tidy_every == 0) {
        PyObject *reply = PyObject_CallNoArgs(loop->tidy);
        Py_XDECREF(reply);
        if (reply == NULL)
            return -1;
    }
    i64 began = monotonic_ns();
    STORE(word(&loop->since_ns, worker_id), began);
    int goes_on = read_mail(loop);
    if (goes_on == 1)
        goes_on = scan(loop);
    if (goes_on < 0)
        return -1;
    i64 ended = monotonic_ns();
    STORE(word(&loop->phase, worker_id), 0);
    STORE(word(&loop->since_ns, worker_id), ended);
    loop->took_ns = ended - began;
    ADD(word(&loop->busy_ns, worker_id), loop->took_ns);
    return goes_on;
}

static PyObject *loop_run(PyObject *self, PyObject *Py_UNUSED(none))
{
    Loop *loop = (Loop *)self;
    for (int goes_on = 1; goes_on == 1;) {
        if (bell_wait(&loop->go, -1) < 0)
            return NULL;
        keep_apart(loop);
        goes_on = serve_token(loop);
        if (goes_on < 0)
            return NULL;
    }
    Py_RETURN_NONE;
}

static PyObject *loop_serve(PyObject *self, PyObject *Py_UNUSED(none))
{
    int goes_on = serve_token((Loop *)self);
    return goes_on < 0 ? NULL : PyBool_FromLong(goes_on);
}

static PyMethodDef loop_methods[] = {
    {"serve", loop_serve, METH_NOARGS, "Do what one token asks for; return False if a message says to leave."},
    {"run", loop_run, METH_NOARGS, "Serve until a message says to leave; what a signal handler raises ends it."},
    {NULL, NULL, 0, NULL},
};
static PyType_Slot loop_slots[] = {
    {Py_tp_doc, "A worker's loop: see process.loop."},
    {Py_tp_new, loop_new},
    {Py_tp_methods, loop_methods},
    {Py_tp_traverse, loop_traverse},
    {Py_tp_clear, loop_clear},
    {Py_tp_dealloc, loop_dealloc},
    {0, NULL},
};
static PyType_Spec loop_spec = {
    .name = "envherd.workers.native._native.Loop",
    .basicsize = sizeof(Loop),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_IMMUTABLETYPE,
    .slots = loop_slots,
};

/* ---- the module ------------------------------------------------------------------------------------- */

#ifndef SOURCES
#define SOURCES 0LL /* setup.py gives a checksum of the C files */
#endif

static int add_types(PyObject *module)
{
    PyType_Spec *specs[] = {&step_spec, &loop_spec, &schema_spec, &caller_spec, &exchange_spec};
    for (size_t i = 0; i < sizeof specs / sizeof *specs; i++) {
        PyObject *type = PyType_FromModuleAndSpec(module, specs[i], NULL);
        int added = type == NULL ? -1 : PyModule_AddType(module, (PyTypeObject *)type);
        Py_XDECREF(type);
        if (added < 0)
            return -1;
    }
    PyObject *sources = PyLong_FromLongLong(SOURCES);
    int added = sources == NULL ? -1 : PyModule_AddObjectRef(module, "sources", sources);
    Py_XDECREF(sources);
    return added;
}

static PyModuleDef_Slot module_slots[] = {{Py_mod_exec, add_types}, {0, NULL}};
static struct PyModuleDef module = {
    .m_base = PyModuleDef_HEAD_INIT,
    .m_name = "_native",
    .m_doc = "A worker's loop over shared memory; python is its specification: see workers.native.",
    .m_slots = module_slots,
};

PyMODINIT_FUNC PyInit__native(void) { return PyModuleDef_Init(&module); }
