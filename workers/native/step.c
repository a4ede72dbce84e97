/* One env's step to one sink: C reads the action, calls the env, checks what it returned, and stores it.
 *
 * C stores plain results only: exact types, and arrays that are already what the leaf stores. It checks a whole result
 * before it stores any of it, and runs no Python code in between. It hands any other result to the Python code as the
 * env gave it, which is the specification. It looks the env up for each step, so it sees one that was replaced. */
#include "native.h"

#include <string.h>

/* Where a leaf is stored: `[column, *shape]`, each column contiguous. */
typedef struct {
    Py_buffer memory;
    Py_ssize_t num_bytes; /* of a column */
    enum { ARRAY, FLOAT_OF_ONE, DOUBLE_OF_ONE, INTEGER } kind;
} Leaf;

/* A value that was checked: where its bytes are, and the buffer that is held meanwhile, if any; or a buffer of each of
 * its rows. */
typedef struct {
    Py_buffer held;
    Py_buffer *rows;     /* room for those of a leaf that may be given as its rows, else NULL */
    Py_ssize_t num_rows; /* that are held */
    const void *bytes;
    union { float as_float; double as_double; i64 as_integer; } number;
} Value;

typedef struct {
    Leaf *leaf;
    Py_ssize_t count;
} Leaves;

enum { MOST_ROWS = 64 }; /* of a leaf that is given as its rows */
enum { SEED_WORDS = SEED_POOL + 1 }; /* of `seeding.seed_pool` */
enum { NUM_FLAGS = 3 }; /* done, terminated, truncated */
static const char *const NAMES[] = {"env", "step", "info", "reset", "prepared", "latest", "is_ahead"};
enum { ENV, STEP, INFO, RESET, PREPARED, LATEST, IS_AHEAD, NUM_NAMES };

struct Step {
    PyObject_HEAD
    PyObject *slot;                        /* gets `prepared` */
    PyObject *adapter;                     /* its `env.step` is called, where `step` is NULL */
    PyObject *step;                        /* list of the action's values -> StepValues; or NULL */
    PyObject *hand_over;                   /* column, result that is not plain -> observation values */
    PyObject *readers;                     /* tuple of functions that read one leaf of the action each */
    PyObject *give, *build, *flatten;      /* see `adapters.base.EnvCall`; NULL where there is none */
    PyObject *holder, *flags, *flag_values; /* the same; the last is a tuple of two */
    PyObject *ready;                       /* tuple: what `give` returns for the first indices, or NULL */
    PyObject *array_type, *bool_type, *integer_type, *number_types; /* numpy's; the last is a tuple */
    PyObject *schemas;                     /* list of those that infos are known to have; NULL without rows for infos */
    PyObject *names[NUM_NAMES];
    i64 calls_env;      /* `step` is NULL */
    i64 reads_number;   /* the reward may be any number */
    i64 notes_infos;    /* an info that is not empty goes to its row, or is for Python */
    i64 root_follows;   /* in a storage: the root of the next column is written too, unless the env has ended */
    i64 num_columns, env_id;
    Py_buffer state;                       /* of the slot, a byte; see `block.slot` */
    Py_buffer if_stepped, if_running, if_ended; /* rows of its table: state -> the state that follows; < 0: none can */
    Py_buffer index, seed_pool;            /* the action, where it is one int64; see `seeding`; else no objects */
    Py_buffer info_rows;                   /* the env's two rows for infos; no object without them */
    Py_buffer env_steps, ends, episode, resets; /* words of each env */
    Py_buffer info_ids;                    /* two words of each env */
    Leaves observation, root, reward, done, root_done;
    Value *values;                         /* one per observation and reward leaf, used within `store` */
};

static const Fact FACTS[] = {
    FACT(OBJECT, Step, slot), FACT(OBJECT, Step, adapter), FACT(OBJECT, Step, step), FACT(OBJECT, Step, hand_over),
    FACT(OBJECT, Step, readers), FACT(OBJECT, Step, give), FACT(OBJECT, Step, build), FACT(OBJECT, Step, flatten),
    FACT(OBJECT, Step, holder), FACT(OBJECT, Step, flags), FACT(OBJECT, Step, flag_values),
    FACT(OBJECT, Step, ready), FACT(OBJECT, Step, array_type), FACT(OBJECT, Step, bool_type),
    FACT(OBJECT, Step, integer_type), FACT(OBJECT, Step, number_types), FACT(NUMBER, Step, reads_number),
    FACT(NUMBER, Step, notes_infos), FACT(NUMBER, Step, root_follows), FACT(NUMBER, Step, num_columns),
    FACT(NUMBER, Step, env_id), FACT(WORDS_OR_NONE, Step, index), FACT(CONSTANTS, Step, seed_pool),
    FACT(BYTES, Step, state), FACT(CONSTANTS, Step, if_stepped), FACT(CONSTANTS, Step, if_running),
    FACT(CONSTANTS, Step, if_ended), FACT(OBJECT, Step, schemas), FACT(WORDS_OR_NONE, Step, info_rows), {NULL},
};
static const Fact WORDS_OF_ENVS[] = {
    FACT(WORDS, Step, env_steps), FACT(WORDS, Step, ends), FACT(WORDS, Step, episode), FACT(WORDS, Step, resets),
    FACT(WORDS, Step, info_ids), {NULL},
};

/* ---- construction ----------------------------------------------------------------------------------- */

static int leaf_take(PyObject *array, Leaf *leaf, i64 num_columns)
{
    if (PyObject_GetBuffer(array, &leaf->memory, PyBUF_STRIDES | PyBUF_FORMAT | PyBUF_WRITABLE) < 0)
        return -1;
    const Py_buffer *memory = &leaf->memory;
    leaf->num_bytes = memory->itemsize;
    int is_packed = memory->ndim > 0 && memory->shape[0] == num_columns;
    for (int axis = memory->ndim - 1; is_packed && axis > 0; axis--) {
        is_packed = memory->shape[axis] < 2 || memory->strides[axis] == leaf->num_bytes;
        leaf->num_bytes *= memory->shape[axis];
    }
    if (!is_packed) {
        PyErr_SetString(PyExc_ValueError, "compiling a step failed: expected arrays [column, *shape] with contiguous columns");
        return -1;
    }
    char format = memory->format[0];
    if (memory->ndim == 2 && memory->shape[1] == 1 && (format == 'f' || format == 'd'))
        leaf->kind = format == 'f' ? FLOAT_OF_ONE : DOUBLE_OF_ONE;
    else if (memory->ndim == 1 && memory->itemsize == 8 && (format == 'l' || format == 'q'))
        leaf->kind = INTEGER;
    else
        leaf->kind = ARRAY;
    return 0;
}

static int leaves_take(PyObject *facts, const char *name, Leaves *leaves, i64 num_columns)
{
    PyObject *arrays = fact(facts, name);
    Py_ssize_t count = arrays == NULL ? -1 : PyList_Size(arrays);
    if (count < 0)
        return -1;
    leaves->leaf = room_for(count, sizeof *leaves->leaf);
    if (leaves->leaf == NULL)
        return -1;
    leaves->count = count; /* those that are not taken yet hold nothing, which is as good to release */
    for (Py_ssize_t i = 0; i < count; i++)
        if (leaf_take(PyList_GetItem(arrays, i), &leaves->leaf[i], num_columns) < 0)
            return -1;
    return 0;
}

static int flags_take(PyObject *facts, const char *name, Leaves *flags, i64 num_columns)
{
    if (leaves_take(facts, name, flags, num_columns) < 0)
        return -1;
    int are_flags = flags->count == NUM_FLAGS;
    for (Py_ssize_t i = 0; are_flags && i < NUM_FLAGS; i++)
        are_flags = flags->leaf[i].num_bytes == 1;
    if (!are_flags)
        PyErr_Format(PyExc_ValueError, "compiling a step failed: expected three arrays of one bool per column as %s", name);
    return are_flags ? 0 : -1;
}

/* Whether what was taken is of this env. */
static int are_own(const Step *step)
{
    const Py_buffer *words[] = {&step->env_steps, &step->ends, &step->episode, &step->resets};
    int is_own = step->env_id >= 0 && step->env_id < step->info_ids.shape[0] / 2 && step->root.count == step->observation.count
        && (step->index.obj == NULL || step->index.shape[0] == 1)
        && (step->seed_pool.obj == NULL || step->seed_pool.len == SEED_WORDS * sizeof(uint32_t))
        && (step->schemas == NULL || (PyList_CheckExact(step->schemas) && step->info_rows.obj != NULL));
    for (size_t i = 0; i < sizeof words / sizeof *words; i++)
        is_own = is_own && step->env_id < words[i]->shape[0];
    for (Py_ssize_t i = 0; is_own && i < step->root.count; i++)
        is_own = step->root.leaf[i].num_bytes == step->observation.leaf[i].num_bytes;
    if (!is_own)
        PyErr_SetString(PyExc_ValueError, "compiling a step failed: expected memory of this env, got other memory");
    return is_own;
}

static int take_room(Step *step)
{
    step->values = room_for(step->observation.count + step->reward.count, sizeof *step->values);
    int has_room = step->values != NULL;
    for (Py_ssize_t i = 0; has_room && i < step->observation.count; i++) {
        const Py_buffer *memory = &step->observation.leaf[i].memory;
        if (memory->ndim < 2 || memory->shape[1] > MOST_ROWS)
            continue;
        step->values[i].rows = room_for(memory->shape[1], sizeof *step->values[i].rows);
        has_room = step->values[i].rows != NULL;
    }
    return has_room ? 0 : -1;
}

static int take_all(PyObject *self, PyObject *facts)
{
    Step *step = (Step *)self;
    PyObject *words = fact(facts, "words");
    if (words == NULL || take_facts(facts, FACTS, step) < 0 || take_facts(words, WORDS_OF_ENVS, step) < 0
        || leaves_take(facts, "observation", &step->observation, step->num_columns) < 0
        || leaves_take(facts, "root", &step->root, step->num_columns) < 0
        || leaves_take(facts, "reward", &step->reward, step->num_columns) < 0
        || flags_take(facts, "done", &step->done, step->num_columns) < 0
        || flags_take(facts, "root_done", &step->root_done, step->num_columns) < 0 || !are_own(step))
        return -1;
    step->calls_env = step->step == NULL;
    for (int i = 0; i < NUM_NAMES; i++)
        if ((step->names[i] = PyUnicode_InternFromString(NAMES[i])) == NULL)
            return -1;
    return take_room(step);
}

static PyObject *step_new(PyTypeObject *type, PyObject *args, PyObject *Py_UNUSED(kwargs))
{
    return make(type, args, take_all);
}

static int step_traverse(Step *step, visitproc visit, void *arg)
{
    Py_VISIT(Py_TYPE((PyObject *)step));
    return visit_facts(FACTS, step, visit, arg);
}

static int step_clear(Step *step)
{
    clear_facts(FACTS, step);
    return 0;
}

static void leaves_release(Leaves *leaves)
{
    for (Py_ssize_t i = 0; i < leaves->count; i++)
        PyBuffer_Release(&leaves->leaf[i].memory);
    PyMem_Free(leaves->leaf);
}

static void step_dealloc(Step *step)
{
    PyObject_GC_UnTrack(step);
    release_facts(FACTS, step);
    release_facts(WORDS_OF_ENVS, step);
    for (Py_ssize_t i = 0; step->values != NULL && i < step->observation.count; i++)
        PyMem_Free(step->values[i].rows);
    Leaves *groups[] = {&step->observation, &step->root, &step->reward, &step->done, &step->root_done};
    for (size_t i = 0; i < sizeof groups / sizeof *groups; i++)
        leaves_release(groups[i]);
    PyMem_Free(step->values);
    for (int i = 0; i < NUM_NAMES; i++)
        Py_XDECREF(step->names[i]);
    give_up((PyObject *)step);
}

/* ---- the action ------------------------------------------------------------------------------------- */

static PyObject *give(const Step *step, PyObject *value)
{
    if (value == NULL || step->give == NULL)
        return value;
    PyObject *given = PyObject_CallFunctionObjArgs(step->give, value, NULL);
    Py_DECREF(value);
    return given;
}

static PyObject *read_only_leaf(const Step *step)
{
    if (step->index.obj == NULL)
        return give(step, PyObject_CallNoArgs(PyTuple_GetItem(step->readers, 0)));
    i64 index = *(const i64 *)step->index.buf;
    if (step->ready != NULL && index >= 0 && index < PyTuple_Size(step->ready))
        return Py_NewRef(PyTuple_GetItem(step->ready, (Py_ssize_t)index));
    return give(step, PyLong_FromLongLong(index));
}

static PyObject *read_leaves(const Step *step)
{
    Py_ssize_t count = PyTuple_Size(step->readers);
    PyObject *values = PyList_New(count);
    for (Py_ssize_t i = 0; values != NULL && i < count; i++) {
        PyObject *value = PyObject_CallNoArgs(PyTuple_GetItem(step->readers, i));
        if (value == NULL)
            Py_CLEAR(values);
        else
            PyList_SetItem(values, i, value);
    }
    return values;
}

/* What the env, or `step`, is called with: the objects that Python would hand it. */
static PyObject *read_action(const Step *step)
{
    if (step->calls_env && step->build == NULL)
        return read_only_leaf(step);
    PyObject *values, *only;
    if (step->index.obj == NULL) {
        values = read_leaves(step);
    } else {
        only = read_only_leaf(step);
        values = only == NULL ? NULL : PyList_New(1);
        if (values == NULL)
            Py_XDECREF(only);
        else
            PyList_SetItem(values, 0, only);
    }
    if (values == NULL || !step->calls_env)
        return values;
    PyObject *built = PyObject_CallFunctionObjArgs(step->build, values, NULL);
    Py_DECREF(values);
    return built;
}

static PyObject *call_env(const Step *step, PyObject *action)
{
    if (!step->calls_env)
        return PyObject_CallFunctionObjArgs(step->step, action, NULL);
    PyObject *env = PyObject_GetAttr(step->holder == NULL ? step->adapter : step->holder, step->names[ENV]);
    PyObject *result = env == NULL ? NULL : PyObject_CallMethodObjArgs(env, step->names[STEP], action, NULL);
    Py_XDECREF(env);
    return result;
}

/* ---- what it gives: 1 if a value is plain, else 0, with no exception -------------------------------- */

static int is_exactly(PyObject *value, PyObject *type) { return (PyObject *)Py_TYPE(value) == type; }

/* Whether an object is an array of a leaf's dtype, and of its shape from an axis of `[column, *shape]` on. The buffer is
 * held where it has one, and is to be released in any case. */
static int hold_array(const Step *step, const Leaf *leaf, int from, PyObject *array, Py_buffer *held)
{
    if (!is_exactly(array, step->array_type))
        return 0;
    if (PyObject_GetBuffer(array, held, PyBUF_STRIDES | PyBUF_FORMAT) < 0) {
        PyErr_Clear(); /* a dtype that has no format */
        return 0;
    }
    const Py_buffer *wanted = &leaf->memory;
    int is_plain = held->ndim == wanted->ndim - from && strcmp(held->format, wanted->format) == 0
        && PyBuffer_IsContiguous(held, 'C');
    for (int axis = 0; is_plain && axis < held->ndim; axis++)
        is_plain = held->shape[axis] == wanted->shape[axis + from];
    return is_plain;
}

/* A leaf that is given as a tuple of its rows, which may be from anywhere. */
static int check_rows(const Step *step, const Leaf *leaf, PyObject *given, Value *value)
{
    Py_ssize_t count = PyTuple_Size(given);
    int is_plain = value->rows != NULL && count == leaf->memory.shape[1];
    while (is_plain && value->num_rows < count) {
        PyObject *row = PyTuple_GetItem(given, value->num_rows);
        is_plain = hold_array(step, leaf, 2, row, &value->rows[value->num_rows]);
        value->num_rows++;
    }
    return is_plain;
}

static int check_array(const Step *step, const Leaf *leaf, PyObject *given, Value *value)
{
    if (PyTuple_CheckExact(given))
        return check_rows(step, leaf, given, value);
    int is_plain = hold_array(step, leaf, 1, given, &value->held);
    value->bytes = value->held.buf;
    return is_plain;
}

static int check_leaf(const Step *step, const Leaf *leaf, PyObject *given, Value *value)
{
    if (leaf->kind == INTEGER) {
        if (!PyLong_CheckExact(given) && !is_exactly(given, step->integer_type))
            return 0;
        PyObject *integer = PyNumber_Index(given);
        value->number.as_integer = integer == NULL ? -1 : PyLong_AsLongLong(integer);
        value->bytes = &value->number;
        Py_XDECREF(integer);
    } else if (leaf->kind != ARRAY && PyFloat_CheckExact(given)) {
        double number = PyFloat_AsDouble(given);
        value->bytes = &value->number;
        if (leaf->kind == FLOAT_OF_ONE)
            value->number.as_float = (float)number;
        else
            value->number.as_double = number;
    } else {
        return check_array(step, leaf, given, value);
    }
    int is_plain = PyErr_Occurred() == NULL;
    PyErr_Clear();
    return is_plain;
}

static int check_leaves(const Step *step, const Leaves *leaves, PyObject *given, Value *values)
{
    if (!PyList_CheckExact(given) || PyList_Size(given) != leaves->count)
        return 0;
    for (Py_ssize_t i = 0; i < leaves->count; i++)
        if (!check_leaf(step, &leaves->leaf[i], PyList_GetItem(given, i), &values[i]))
            return 0;
    return 1;
}

/* A single reward: python's float(), of the types that `adapters.common.values` takes without a closer look. */
static int check_number(const Step *step, const Leaf *leaf, PyObject *given, Value *value)
{
    if (PyFloat_CheckExact(given))
        return check_leaf(step, leaf, given, value);
    int is_known = 0;
    for (Py_ssize_t i = 0; !is_known && i < PyTuple_Size(step->number_types); i++)
        is_known = is_exactly(given, PyTuple_GetItem(step->number_types, i));
    PyObject *number = is_known ? PyNumber_Float(given) : NULL;
    int is_plain = number != NULL && PyFloat_CheckExact(number) && check_leaf(step, leaf, number, value);
    PyErr_Clear();
    Py_XDECREF(number);
    return is_plain;
}

static int check_flag(const Step *step, PyObject *given, char *flag)
{
    if (given != Py_True && given != Py_False && !(step->calls_env && is_exactly(given, step->bool_type)))
        return 0;
    int is_true = PyObject_IsTrue(given);
    PyErr_Clear();
    *flag = is_true == 1;
    return is_true >= 0;
}

/* Append the values of the done leaves that are stored as observation leaves. */
static int append_flags(const Step *step, PyObject *leaves, const char *flags)
{
    for (Py_ssize_t i = 0; step->flags != NULL && i < PyTuple_Size(step->flags); i++) {
        Py_ssize_t which = PyNumber_AsSsize_t(PyTuple_GetItem(step->flags, i), NULL);
        PyObject *value = which < 0 || which >= NUM_FLAGS ? NULL : PyTuple_GetItem(step->flag_values, flags[which]);
        if (value == NULL || PyList_Append(leaves, value) < 0)
            return -1;
    }
    return 0;
}

/* The observation leaves that a result has, as a list (a new reference), or NULL; with an exception if a signal
 * handler raised it. */
static PyObject *observation_leaves(const Step *step, PyObject *observation, const char *flags)
{
    PyObject *leaves;
    if (!step->calls_env)
        return Py_NewRef(observation);
    if (step->flatten != NULL) {
        leaves = PyObject_CallFunctionObjArgs(step->flatten, observation, NULL);
    } else {
        leaves = PyList_New(1);
        if (leaves != NULL)
            PyList_SetItem(leaves, 0, Py_NewRef(observation));
    }
    if (leaves != NULL && append_flags(step, leaves, flags) < 0)
        Py_CLEAR(leaves);
    if (leaves == NULL && PyErr_ExceptionMatches(PyExc_Exception))
        PyErr_Clear(); /* `hand_over` finds it again */
    return leaves;
}

/* Write an info of a step (0) or a reset (1) to its row if it has a known schema, and note which: 1. Else it is for Python
 * to note: 0. */
static int write_info(const Step *step, PyObject *info, int section)
{
    i64 id = 0, room = step->info_rows.len / 2;
    int is_noted = PyDict_CheckExact(info) && PyDict_Size(info) == 0;
    for (Py_ssize_t i = 0; !is_noted && step->schemas != NULL && i < PyList_Size(step->schemas); i++) {
        id = schema_write((const Schema *)PyList_GetItem(step->schemas, i), info, (char *)step->info_rows.buf + section * room, room);
        is_noted = id != 0;
    }
    STORE(word(&step->info_ids, 2 * step->env_id + section), id);
    return is_noted;
}

/* `write_info` for the info that the adapter holds; 1 if infos are not noted at all. With 0 there is an exception if a
 * signal handler raised it. */
static int write_adapters_info(const Step *step, int section)
{
    if (!step->notes_infos)
        return 1;
    PyObject *info = PyObject_GetAttr(step->adapter, step->names[INFO]);
    int is_noted = info != NULL && write_info(step, info, section);
    if (info == NULL && PyErr_ExceptionMatches(PyExc_Exception))
        PyErr_Clear(); /* Python finds it again */
    Py_XDECREF(info);
    return is_noted;
}

static int write_step_info(const Step *step, PyObject *result)
{
    if (!step->calls_env)
        return write_adapters_info(step, 0);
    return !step->notes_infos || write_info(step, PyTuple_GetItem(result, 4), 0);
}

static void store_leaves(const Leaves *leaves, const Value *values, i64 column)
{
    for (Py_ssize_t i = 0; i < leaves->count; i++) {
        const Leaf *leaf = &leaves->leaf[i];
        char *to = (char *)leaf->memory.buf + column * leaf->memory.strides[0];
        if (values[i].num_rows == 0)
            memmove(to, values[i].bytes, (size_t)leaf->num_bytes);
        for (Py_ssize_t row = 0; row < values[i].num_rows; row++) {
            const Py_buffer *held = &values[i].rows[row];
            memmove(to + row * held->len, held->buf, (size_t)held->len);
        }
    }
}

static void release_values(const Step *step)
{
    for (Py_ssize_t i = 0; i < step->observation.count + step->reward.count; i++) {
        Value *value = &step->values[i];
        PyBuffer_Release(&value->held); /* of those that hold nothing too */
        while (value->num_rows > 0)
            PyBuffer_Release(&value->rows[--value->num_rows]);
    }
}

static void store_flags(const Leaves *flags, const char *values, i64 column)
{
    for (int i = 0; i < NUM_FLAGS; i++)
        ((char *)flags->leaf[i].memory.buf)[column * flags->leaf[i].memory.strides[0]] = values[i];
}

/* Store a result if all of it is plain: 1. Else nothing is stored: 0. */
static int store(const Step *step, i64 column, PyObject *result, PyObject *leaves, const char *flags)
{
    Value *observed = step->values, *rewarded = observed + step->observation.count;
    PyObject *reward = PyTuple_GetItem(result, 1);
    int is_plain = check_leaves(step, &step->observation, leaves, observed);
    if (is_plain && !step->calls_env)
        is_plain = check_leaves(step, &step->reward, reward, rewarded);
    else if (is_plain)
        is_plain = step->reads_number ? check_number(step, &step->reward.leaf[0], reward, rewarded)
                                      : check_leaf(step, &step->reward.leaf[0], reward, rewarded);
    if (is_plain) {
        store_leaves(&step->observation, observed, column);
        store_leaves(&step->reward, rewarded, column);
        store_flags(&step->done, flags, column);
        if (step->root_follows && !flags[0] && column + 1 < step->num_columns) {
            store_leaves(&step->root, observed, column + 1);
            store_flags(&step->root_done, flags, column + 1); /* all three are 0 */
        }
    }
    release_values(step);
    return is_plain;
}

static signed char following(const Step *step, const Py_buffer *row)
{
    unsigned char state = *(unsigned char *)step->state.buf;
    return state < row->len ? ((const signed char *)row->buf)[state] : -1;
}

/* Whether this process is one that the env has forked: nothing is written, and Python refuses what the env returned. */
static int is_in_fork(const Step *step) { return following(step, &step->if_running) < 0; }

/* Whether a result has values for all of `StepValues`, which Python need not look at, and its flags. */
static int check_result(const Step *step, PyObject *result, char *flags)
{
    int is_plain = !is_in_fork(step) && PyTuple_CheckExact(result) && PyTuple_Size(result) == (step->calls_env ? 5 : 4)
        && write_step_info(step, result) && check_flag(step, PyTuple_GetItem(result, 2), &flags[1])
        && check_flag(step, PyTuple_GetItem(result, 3), &flags[2]);
    flags[0] = flags[1] | flags[2];
    return is_plain;
}

/* Keep what the env gave for Python: its info; or for a `holder`, its latest values. */
static int keep_given(const Step *step, PyObject *result, PyObject *leaves)
{
    if (!step->calls_env)
        return 0;
    if (step->holder == NULL)
        return PyObject_SetAttr(step->adapter, step->names[INFO], PyTuple_GetItem(result, 4));
    if (PyObject_SetAttr(step->holder, step->names[LATEST], leaves) < 0)
        return -1;
    return PyObject_SetAttr(step->holder, step->names[IS_AHEAD], Py_True);
}

int step_may_step(const Step *step, i64 column)
{
    return column < step->num_columns && following(step, &step->if_stepped) >= 0;
}

static void move(const Step *step, int has_ended)
{
    *(signed char *)step->state.buf = following(step, has_ended ? &step->if_ended : &step->if_running);
}

/* Step the env once with an action; see `step_once`. */
static Outcome step_with(Step *step, i64 column, PyObject *action, PyObject **given)
{
    char flags[NUM_FLAGS] = {0};
    PyObject *result = call_env(step, action), *leaves = NULL;
    *given = NULL;
    if (result == NULL)
        return STEP_RAISED;
    if (check_result(step, result, flags))
        leaves = observation_leaves(step, PyTuple_GetItem(result, 0), flags);
    if (leaves == NULL || !store(step, column, result, leaves, flags)) {
        Py_XDECREF(leaves);
        *given = result;
        return PyErr_Occurred() ? STEP_RAISED : STEP_ODD;
    }
    move(step, flags[0]);
    if (step->notes_infos)
        STORE(word(&step->info_ids, 2 * step->env_id + 1), 0);
    ADD((i64 *)step->env_steps.buf + step->env_id, 1);
    if (flags[0])
        ADD((i64 *)step->ends.buf + step->env_id, 1);
    *given = leaves;
    int is_noted = keep_given(step, result, leaves) == 0;
    Py_DECREF(result);
    return !is_noted ? STEP_RAISED : flags[0] ? STEP_ENDED : STEP_STORED;
}

Outcome step_once(Step *step, i64 column, PyObject **given)
{
    PyObject *action = read_action(step);
    *given = NULL;
    if (action == NULL)
        return STEP_RAISED;
    Outcome outcome = step_with(step, column, action, given);
    Py_DECREF(action);
    return outcome;
}

/* ---- the reset that follows ------------------------------------------------------------------------- */

/* `seeding.episode_seed`, from `seeding.seed_pool`. */
static uint32_t episode_seed(const uint32_t *pool, uint32_t episode)
{
    uint32_t value = episode ^ pool[SEED_POOL];
    value *= pool[SEED_POOL] * SEED_MULT_A;
    value = SEED_MIX_L * pool[0] - SEED_MIX_R * (value ^ value >> SEED_SHIFT);
    value = (value ^ value >> SEED_SHIFT) ^ SEED_INIT_B;
    value *= SEED_INIT_B * SEED_MULT_B;
    return value ^ value >> SEED_SHIFT;
}

int step_can_reset(const Step *step)
{
    i64 episode = LOAD((i64 *)step->episode.buf + step->env_id);
    return step->seed_pool.obj == NULL || (episode >= 0 && episode <= UINT32_MAX);
}

void step_forget_info(const Step *step) { STORE(word(&step->info_ids, 2 * step->env_id), 0); }

Outcome step_reset(Step *step, i64 column, PyObject **given)
{
    static const char running[NUM_FLAGS] = {0};
    i64 *episode = (i64 *)step->episode.buf + step->env_id;
    PyObject *seed = step->seed_pool.obj == NULL
                         ? Py_NewRef(Py_None)
                         : PyLong_FromUnsignedLong(episode_seed(step->seed_pool.buf, (uint32_t)LOAD(episode)));
    *given = NULL;
    if (seed == NULL)
        return STEP_RAISED;
    ADD(episode, 1);
    *given = PyObject_CallMethodObjArgs(step->adapter, step->names[RESET], seed, Py_None, Py_None, NULL);
    Py_DECREF(seed);
    if (*given == NULL)
        return STEP_RAISED;
    if (is_in_fork(step) || !write_adapters_info(step, 1))
        return PyErr_Occurred() ? STEP_RAISED : STEP_ODD;
    if (column < step->num_columns) {
        int is_plain = check_leaves(step, &step->root, *given, step->values);
        if (is_plain) {
            store_leaves(&step->root, step->values, column);
            store_flags(&step->root_done, running, column);
        }
        release_values(step);
        if (!is_plain)
            return PyErr_Occurred() ? STEP_RAISED : STEP_ODD;
    }
    move(step, 0);
    ADD((i64 *)step->resets.buf + step->env_id, 1);
    return STEP_STORED;
}

/* ---- the step as Python calls it -------------------------------------------------------------------- */

static PyObject *step_run(PyObject *self, PyObject *argument)
{
    Step *step = (Step *)self;
    Py_ssize_t column = PyNumber_AsSsize_t(argument, PyExc_IndexError);
    if (column == -1 && PyErr_Occurred())
        return NULL;
    if (column < 0 || column >= step->num_columns || step->slot == NULL) {
        PyErr_Format(PyExc_IndexError, "step failed: expected a column below %zd, got %zd.",
                     (Py_ssize_t)step->num_columns, column);
        return NULL;
    }
    PyObject *action = read_action(step), *given = NULL, *observation = NULL;
    if (action == NULL)
        return NULL;
    Outcome outcome = STEP_RAISED;
    if (PyObject_SetAttr(step->slot, step->names[PREPARED], Py_None) == 0)
        outcome = step_with(step, column, action, &given);
    Py_DECREF(action);
    if (outcome == STEP_ODD)
        observation = PyObject_CallFunctionObjArgs(step->hand_over, argument, given, NULL);
    else if (outcome != STEP_RAISED)
        observation = Py_NewRef(given);
    Py_XDECREF(given);
    return observation;
}

static PyMethodDef step_methods[] = {
    {"run", step_run, METH_O, "run(column) -> observation values, after one step of the env that was written there"},
    {NULL, NULL, 0, NULL},
};
static PyType_Slot step_slots[] = {
    {Py_tp_doc, "The step of one env to one sink; holds its arrays until it is freed."},
    {Py_tp_new, step_new},
    {Py_tp_methods, step_methods},
    {Py_tp_traverse, step_traverse},
    {Py_tp_clear, step_clear},
    {Py_tp_dealloc, step_dealloc},
    {0, NULL},
};
PyType_Spec step_spec = {
    .name = "envherd.workers.native._native.Step",
    .basicsize = sizeof(Step),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_IMMUTABLETYPE,
    .slots = step_slots,
};

int step_root_follows(const Step *step) { return (int)step->root_follows; }
PyObject *step_hand_over(const Step *step) { return step->hand_over; }
