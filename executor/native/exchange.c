/* Transitions of some envs: their steps are sent, waited for, and taken: see executor.protocol.fast.
 *
 * Each function does all that it does or nothing, and runs no Python code in between but for handlers of signals within
 * `wait`, which changes nothing. So an interrupt finds envs either sent or not, and either taken or not.
 *
 * Order of `give` and `step`, where Python runs in between (`serve`, `draft`, and handlers). The numbers are at the lines.
 * 1. States and the commands that they name, then the command, in one go: an env with a command is under way, so
 *    `Flights.recover` waits for its answer. Python has set `Flights.current` before, and unsets it after the call.
 * 2. `serve` or `draft`, then the wait. An exception leaves all envs under way, as does a wait in vain.
 * 3. Positions and states of all envs in one go, after all have answered and nothing else was reported. */
#include "caller.h"

#include <math.h>
#include <string.h>

/* The rows of one leaf, `[column, row, *shape]` or `[row, *shape]`: each row contiguous. */
typedef struct {
    Py_buffer memory;
    Py_ssize_t of_column, of_row, num_bytes; /* strides, and bytes of a row */
} Rows;

typedef struct {
    Rows *rows;
    Py_ssize_t count;
} Group;

/* What workers write to: the ring, or a rollout's storage. */
typedef struct {
    i64 number, root_ahead, num_columns; /* `root_ahead`: of the column of a root, to that of its step */
    Rows next_done, root_done;           /* which say that an episode has ended; a storage's are held */
} Target;

typedef struct {
    PyObject_HEAD
    PyObject *owner;                                /* the `Caller` */
    Caller *caller;
    Py_buffer states;                               /* a byte of each env: `EnvStates` */
    Py_buffer follows;                              /* `env_states.NEXT`: int8 `[event, state]`; < 0: it cannot happen */
    Py_buffer ops, at;                              /* int64 of each env, likewise */
    Py_buffer columns, step_columns, in_root;       /* likewise of `Positions` */
    Group next, root, inputs;
    Rows action;                                    /* which `send` writes; no memory: it refuses */
    i64 check, limit;                               /* what it checks of actions */
    i64 done, root_done;                            /* which leaves say that an episode has ended */
    i64 blank;                                      /* the first leaf of `next` that an env leaves blank if it is reset instead */
    i64 answered, ends;                             /* events; the other events are ops */
    i64 num_columns;
    i64 num_ring;
    Py_ssize_t num_envs, num_found;
    i64 *root_in_next;                              /* root leaf -> the same leaf of `next` */
    i64 *sent, *found, *commands, *marks, mark;     /* one for each env */
    Target ring;
    Py_buffer ended;                                /* int64 of each env: which `step` has found to have ended */
} Exchange;

static const Fact FACTS[] = {
    {"caller", OBJECT, offsetof(Exchange, owner)}, FACT(BYTES, Exchange, states),
    FACT(CONSTANTS, Exchange, follows), FACT(WORDS, Exchange, ops), FACT(WORDS, Exchange, at),
    FACT(WORDS, Exchange, columns), FACT(WORDS, Exchange, step_columns), FACT(WORDS, Exchange, in_root), FACT(WORDS, Exchange, ended),
    FACT(NUMBER, Exchange, check),
    FACT(NUMBER, Exchange, limit), FACT(NUMBER, Exchange, done), FACT(NUMBER, Exchange, root_done),
    FACT(NUMBER, Exchange, blank), FACT(NUMBER, Exchange, answered), FACT(NUMBER, Exchange, ends), FACT(NUMBER, Exchange, num_columns),
    FACT(NUMBER, Exchange, num_ring), {NULL},
};

static signed char *state_of(const Exchange *exchange, i64 id) { return (signed char *)exchange->states.buf + id; }

static char *row_at(const Rows *rows, i64 column, i64 id)
{
    return (char *)rows->memory.buf + column * rows->of_column + id * rows->of_row;
}

/* The state of an env after an event: < 0 if that cannot happen. */
static signed char after_event(const Exchange *exchange, i64 id, i64 event)
{
    Py_ssize_t num_states = exchange->follows.shape[1];
    unsigned char state = (unsigned char)*state_of(exchange, id);
    return state < num_states ? ((signed char *)exchange->follows.buf)[event * num_states + state] : -1;
}

static int is_under_way(const Exchange *exchange, i64 id) { return after_event(exchange, id, exchange->answered) >= 0; }

/* ---- construction ----------------------------------------------------------------------------------- */

static int rows_take(PyObject *array, int num_leading, i64 num_columns, Py_ssize_t num_envs, Rows *rows)
{
    Py_buffer *memory = &rows->memory;
    if (PyObject_GetBuffer(array, memory, PyBUF_STRIDES | PyBUF_FORMAT | PyBUF_WRITABLE) < 0)
        return -1;
    int is_right = memory->ndim >= num_leading && memory->shape[num_leading - 1] == num_envs
                   && (num_leading == 1 || memory->shape[0] == num_columns);
    rows->num_bytes = memory->itemsize;
    for (int axis = memory->ndim - 1; is_right && axis >= num_leading; axis--) {
        is_right = memory->shape[axis] < 2 || memory->strides[axis] == rows->num_bytes;
        rows->num_bytes *= memory->shape[axis];
    }
    if (!is_right) {
        PyErr_SetString(PyExc_ValueError, "expected arrays of these envs with contiguous rows, got other memory");
        return -1;
    }
    rows->of_column = num_leading == 1 ? 0 : memory->strides[0];
    rows->of_row = memory->strides[num_leading - 1];
    return 0;
}

static int group_take(PyObject *facts, const char *name, int num_leading, Exchange *exchange, Group *group)
{
    PyObject *arrays = fact(facts, name);
    Py_ssize_t count = arrays == NULL ? -1 : PyList_Size(arrays);
    if (count < 0)
        return -1;
    group->rows = room_for(count, sizeof *group->rows);
    if (group->rows == NULL)
        return -1;
    group->count = count; /* those that are not taken yet hold nothing, which is as good to release */
    for (Py_ssize_t i = 0; i < count; i++)
        if (rows_take(PyList_GetItem(arrays, i), num_leading, exchange->num_columns, exchange->num_envs, &group->rows[i]) < 0)
            return -1;
    return 0;
}

static int take_caller(Exchange *exchange, PyObject *facts)
{
    PyObject *type = fact(facts, "caller_type");
    if (type == NULL)
        return -1;
    if (exchange->owner == NULL || (PyObject *)Py_TYPE(exchange->owner) != type) {
        PyErr_SetString(PyExc_TypeError, "expected a Caller as caller");
        return -1;
    }
    exchange->caller = (Caller *)exchange->owner;
    exchange->num_envs = caller_num_envs(exchange->caller);
    return 0;
}

/* Whether the arrays have an item for each env, and the table one for each event and state. */
static int have_right_shapes(const Exchange *exchange)
{
    const Py_buffer *of_envs[] = {&exchange->states, &exchange->in_root, &exchange->ops, &exchange->at, &exchange->columns,
                                  &exchange->step_columns, &exchange->ended};
    const Py_buffer *follows = &exchange->follows;
    int is_right = follows->obj != NULL && follows->ndim == 2 && follows->itemsize == 1
                   && OP_STEP_RESET < follows->shape[0] && (size_t)exchange->answered < (size_t)follows->shape[0]
                   && (size_t)exchange->ends < (size_t)follows->shape[0];
    for (size_t i = 0; i < sizeof of_envs / sizeof *of_envs; i++)
        is_right = is_right && of_envs[i]->len == exchange->num_envs * of_envs[i]->itemsize;
    if (!is_right)
        PyErr_SetString(PyExc_ValueError, "expected arrays of the caller's envs, and of events and states, got others");
    return is_right;
}

static int take_root_in_next(Exchange *exchange, PyObject *facts)
{
    PyObject *indices = fact(facts, "root_in_next");
    int is_right = indices != NULL && PyList_Size(indices) == exchange->root.count && exchange->done >= 0
                   && exchange->done < exchange->next.count && exchange->blank >= 0 && exchange->root_done >= 0
                   && exchange->root_done < exchange->root.count && exchange->num_columns > 0;
    exchange->root_in_next = room_for(exchange->root.count, sizeof(i64));
    if (exchange->root_in_next == NULL)
        return -1;
    for (Py_ssize_t i = 0; is_right && i < exchange->root.count; i++) {
        i64 index = PyLong_AsLongLong(PyList_GetItem(indices, i));
        is_right = index >= 0 && index < exchange->next.count
                   && exchange->next.rows[index].num_bytes == exchange->root.rows[i].num_bytes;
        exchange->root_in_next[i] = index;
    }
    if (!is_right && !PyErr_Occurred())
        PyErr_SetString(PyExc_ValueError, "expected leaves of a root that are leaves of a next, got others");
    if (is_right)
        exchange->ring = (Target){.number = RING, .num_columns = exchange->num_columns, .next_done = exchange->next.rows[exchange->done],
                                  .root_done = exchange->root.rows[exchange->root_done]};
    return is_right ? 0 : -1;
}

static int take_action(Exchange *exchange, PyObject *facts)
{
    PyObject *action = fact(facts, "action");
    if (action == NULL)
        return -1;
    if (action == Py_None)
        return 0;
    if (rows_take(action, 1, 0, exchange->num_envs, &exchange->action) < 0)
        return -1;
    const Py_buffer *memory = &exchange->action.memory;
    char format = memory->format[0];
    int is_right = exchange->check == CHECK_ANY
                   || (exchange->check == CHECK_INDEX && memory->itemsize == 8 && (format == 'l' || format == 'q'))
                   || (exchange->check == CHECK_FINITE && (format == 'f' || format == 'd'));
    if (!is_right || strlen(memory->format) != 1) {
        PyErr_SetString(PyExc_ValueError, "expected actions that can be checked, got others");
        return -1;
    }
    return 0;
}

static int take_space(Exchange *exchange)
{
    i64 **places[] = {&exchange->sent, &exchange->found, &exchange->commands, &exchange->marks};
    for (size_t i = 0; i < sizeof places / sizeof *places; i++)
        if ((*places[i] = room_for(exchange->num_envs, sizeof(i64))) == NULL)
            return -1;
    return 0;
}

static int take_all(PyObject *self, PyObject *facts)
{
    Exchange *exchange = (Exchange *)self;
    if (take_facts(facts, FACTS, exchange) < 0 || take_caller(exchange, facts) < 0 || !have_right_shapes(exchange)
        || group_take(facts, "next", 2, exchange, &exchange->next) < 0
        || group_take(facts, "root", 2, exchange, &exchange->root) < 0
        || group_take(facts, "inputs", 1, exchange, &exchange->inputs) < 0 || take_root_in_next(exchange, facts) < 0
        || take_action(exchange, facts) < 0)
        return -1;
    return take_space(exchange);
}

static PyObject *exchange_new(PyTypeObject *type, PyObject *args, PyObject *Py_UNUSED(kwargs))
{
    return make(type, args, take_all);
}

static void group_release(Group *group)
{
    for (Py_ssize_t i = 0; i < group->count; i++)
        PyBuffer_Release(&group->rows[i].memory);
    PyMem_Free(group->rows);
}

static void exchange_dealloc(Exchange *exchange)
{
    PyBuffer_Release(&exchange->action.memory);
    group_release(&exchange->next);
    group_release(&exchange->root);
    group_release(&exchange->inputs);
    void *places[] = {exchange->root_in_next, exchange->sent, exchange->found, exchange->commands, exchange->marks};
    for (size_t i = 0; i < sizeof places / sizeof *places; i++)
        PyMem_Free(places[i]);
    release_facts(FACTS, exchange);
    give_up((PyObject *)exchange);
}

/* ---- send ------------------------------------------------------------------------------------------- */

/* Whether all of some envs, in range, are different and may be given a command. */
static int are_ready(Exchange *exchange, const Numbers *ids, i64 op)
{
    exchange->mark++;
    for (Py_ssize_t i = 0; i < ids->count; i++) {
        i64 id = number_at(ids, i);
        if (exchange->marks[id] == exchange->mark || after_event(exchange, id, op) < 0)
            return 0;
        exchange->marks[id] = exchange->mark;
    }
    return 1;
}

static int are_legal(const Exchange *exchange, const Py_buffer *actions)
{
    Py_ssize_t count = actions->len / actions->itemsize;
    if (exchange->check == CHECK_INDEX) {
        for (Py_ssize_t i = 0; i < count; i++)
            if (((const uint64_t *)actions->buf)[i] >= (uint64_t)exchange->limit)
                return 0;
    } else if (exchange->check == CHECK_FINITE && actions->itemsize == sizeof(float)) {
        for (Py_ssize_t i = 0; i < count; i++)
            if (!isfinite(((const float *)actions->buf)[i]))
                return 0;
    } else if (exchange->check == CHECK_FINITE) {
        for (Py_ssize_t i = 0; i < count; i++)
            if (!isfinite(((const double *)actions->buf)[i]))
                return 0;
    }
    return 1;
}

/* Take actions `[k, *shape]` as `send` writes them: 1; 0 for anything else, without an exception. */
static int actions_take(const Exchange *exchange, PyObject *array, Py_ssize_t count, Py_buffer *actions)
{
    const Py_buffer *own = &exchange->action.memory;
    if (own->obj == NULL)
        return 0;
    if (PyObject_GetBuffer(array, actions, PyBUF_C_CONTIGUOUS | PyBUF_FORMAT) < 0) {
        PyErr_Clear();
        return 0;
    }
    int is_right = actions->ndim == own->ndim && actions->itemsize == own->itemsize
                   && strcmp(actions->format, own->format) == 0 && actions->shape[0] == count;
    for (int axis = 1; is_right && axis < own->ndim; axis++)
        is_right = actions->shape[axis] == own->shape[axis];
    if (!is_right || !are_legal(exchange, actions)) {
        PyBuffer_Release(actions);
        return 0;
    }
    return 1;
}

/* Note that an env gets a command, and return its word. */
static i64 depart(const Exchange *exchange, i64 id, i64 op, i64 flags, i64 target, i64 column)
{
    *state_of(exchange, id) = after_event(exchange, id, op);
    *word(&exchange->ops, id) = op;
    *word(&exchange->at, id) = column;
    return op | flags << OP_BITS | target << (OP_BITS + FLAG_BITS) | column << (OP_BITS + FLAG_BITS + TARGET_BITS);
}

static void give_steps(Exchange *exchange, i64 op, const Numbers *ids, const char *actions)
{
    Numbers commands = {.at = (char *)exchange->commands, .stride = sizeof(i64), .count = ids->count};
    for (Py_ssize_t i = 0; i < ids->count; i++) {
        i64 id = number_at(ids, i), column = *word(&exchange->step_columns, id) + 1;
        if (column >= exchange->num_ring)
            column = 0;
        memcpy(row_at(&exchange->action, 0, id), actions + i * exchange->action.num_bytes, (size_t)exchange->action.num_bytes);
        exchange->commands[i] = depart(exchange, id, op, FLAG_EACH, RING, column);
    }
    caller_give_each(exchange->caller, ids, &commands, 1);
}

static PyObject *exchange_send(PyObject *self, PyObject *args)
{
    Exchange *exchange = (Exchange *)self;
    long long op;
    PyObject *ids_array, *actions_array;
    Numbers ids;
    Py_buffer actions;
    if (!PyArg_ParseTuple(args, "LOO", &op, &ids_array, &actions_array))
        return NULL;
    if ((op != OP_STEP && op != OP_STEP_RESET) || !numbers_take(ids_array, exchange->num_envs, &ids))
        Py_RETURN_FALSE;
    int is_sent = are_ready(exchange, &ids, op) && actions_take(exchange, actions_array, ids.count, &actions);
    if (is_sent) {
        give_steps(exchange, op, &ids, actions.buf);
        PyBuffer_Release(&actions);
    }
    PyBuffer_Release(&ids.memory);
    return PyBool_FromLong(is_sent);
}

/* ---- wait ------------------------------------------------------------------------------------------- */

/* Note which of some envs (NULL: all) are under way: 1; 0 where one of these is not, or comes twice. */
static int find_sent(Exchange *exchange, const Numbers *ids, Numbers *sent)
{
    exchange->mark++;
    sent->at = (char *)exchange->sent;
    sent->stride = sizeof(i64);
    sent->count = 0;
    for (Py_ssize_t i = 0; i < (ids == NULL ? exchange->num_envs : ids->count); i++) {
        i64 id = ids == NULL ? i : number_at(ids, i);
        int is_sent = is_under_way(exchange, id);
        if (ids != NULL && (!is_sent || exchange->marks[id] == exchange->mark))
            return 0;
        exchange->marks[id] = exchange->mark;
        if (is_sent)
            exchange->sent[sent->count++] = id;
    }
    return 1;
}

static int wait_for(Exchange *exchange, const Numbers *ids, Py_ssize_t wanted)
{
    Numbers sent;
    Py_ssize_t found = 0;
    exchange->num_found = 0;
    if (!find_sent(exchange, ids, &sent))
        return 0;
    wanted = wanted < 0 ? sent.count : wanted;
    if (wanted < 1 || wanted > sent.count)
        return 0;
    int has_come = caller_wait_for_some(exchange->caller, &sent, wanted, caller_look_ns(exchange->caller),
                                        exchange->found, &found);
    if (has_come <= 0 || caller_has_news(exchange->caller))
        return has_come < 0 ? -1 : 0;
    exchange->num_found = found;
    if (ids != NULL && wanted == sent.count)
        memcpy(exchange->found, exchange->sent, (size_t)found * sizeof *exchange->found);
    for (Py_ssize_t i = 0; i < sent.count; i++) /* what is to be done after a loss: see `Flights.wait_for` */
        if (caller_answer_is_lost(exchange->caller, exchange->sent[i]))
            exchange->num_found = 0;
    return exchange->num_found > 0;
}

static PyObject *exchange_wait(PyObject *self, PyObject *args)
{
    Exchange *exchange = (Exchange *)self;
    PyObject *ids_array;
    Py_ssize_t wanted;
    Numbers ids;
    if (!PyArg_ParseTuple(args, "On", &ids_array, &wanted))
        return NULL;
    int has_ids = ids_array != Py_None;
    if (has_ids && !numbers_take(ids_array, exchange->num_envs, &ids))
        return PyLong_FromLong(0);
    int has_come = wait_for(exchange, has_ids ? &ids : NULL, wanted);
    if (has_ids)
        PyBuffer_Release(&ids.memory);
    return has_come < 0 ? NULL : PyLong_FromSsize_t(has_come ? exchange->num_found : 0);
}

/* ---- take ------------------------------------------------------------------------------------------- */

static Py_ssize_t after(Py_ssize_t offset, Py_ssize_t num_bytes)
{
    return (offset + num_bytes + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT;
}

static Py_ssize_t size_of(const Group *group, Py_ssize_t count)
{
    Py_ssize_t size = 0;
    for (Py_ssize_t leaf = 0; leaf < group->count; leaf++)
        size = after(size, count * group->rows[leaf].num_bytes);
    return size;
}

/* Write the rows of `next` at the columns of the envs' commands, or inputs, which have no columns. */
static void gather(const Exchange *exchange, const Group *group, const i64 *ids, Py_ssize_t count, char *to)
{
    for (Py_ssize_t leaf = 0, offset = 0; leaf < group->count; leaf++) {
        const Rows *rows = &group->rows[leaf];
        for (Py_ssize_t i = 0; i < count; i++)
            memcpy(to + offset + i * rows->num_bytes, row_at(rows, *word(&exchange->at, ids[i]), ids[i]),
                   (size_t)rows->num_bytes);
        offset = after(offset, count * rows->num_bytes);
    }
}

/* Write where envs are: the root of their reset, or the `next` of their step. */
static void gather_roots(const Exchange *exchange, const Numbers *ids, char *to)
{
    for (Py_ssize_t leaf = 0, offset = 0; leaf < exchange->root.count; leaf++) {
        const Rows *root = &exchange->root.rows[leaf], *next = &exchange->next.rows[exchange->root_in_next[leaf]];
        for (Py_ssize_t i = 0; i < ids->count; i++) {
            i64 id = number_at(ids, i);
            const Rows *rows = *word(&exchange->in_root, id) ? root : next;
            memcpy(to + offset + i * root->num_bytes, row_at(rows, *word(&exchange->columns, id), id),
                   (size_t)root->num_bytes);
        }
        offset = after(offset, ids->count * root->num_bytes);
    }
}

static int can_be_taken(const Exchange *exchange, i64 id)
{
    i64 op = *word(&exchange->ops, id), column = *word(&exchange->at, id);
    return is_under_way(exchange, id) && after_event(exchange, id, exchange->ends) >= 0 && caller_has_number(exchange->caller, id)
           && !caller_answer_is_lost(exchange->caller, id)
           && (op == OP_STEP || op == OP_STEP_RESET) && column >= 0 && column < exchange->num_columns
           && (uint64_t)*word(&exchange->columns, id) < (uint64_t)exchange->num_columns;
}

static int has_flag(const Rows *flags, i64 column, i64 id)
{
    return memchr(row_at(flags, column, id), 1, (size_t)flags->num_bytes) != NULL;
}

/* Note where an env is whose transition is taken, or that was reset instead; return whether its step has ended an episode. */
static int deliver(const Exchange *exchange, const Target *target, i64 id)
{
    i64 op = *word(&exchange->ops, id), at = *word(&exchange->at, id);
    i64 column = op == OP_RESET ? at - target->root_ahead : at, root = column + target->root_ahead;
    int has_ended = op != OP_RESET && has_flag(&target->next_done, column, id);
    int was_reset = op == OP_RESET || (has_ended && op == OP_STEP_RESET);
    int is_over = was_reset ? root < target->num_columns && has_flag(&target->root_done, root, id) : has_ended;
    *word(&exchange->step_columns, id) = column;
    *word(&exchange->columns, id) = was_reset ? root : column;
    *word(&exchange->in_root, id) = was_reset;
    *state_of(exchange, id) = after_event(exchange, id, is_over ? exchange->ends : exchange->answered);
    return has_ended;
}

static i64 take(Exchange *exchange, Py_ssize_t count, const Py_buffer *next, const Py_buffer *root, const Py_buffer *own)
{
    Numbers ids = {.at = (char *)exchange->found, .stride = sizeof(i64), .count = count};
    Py_ssize_t end = size_of(&exchange->next, count), roots_end = size_of(&exchange->root, count);
    i64 num_reset = 0;
    Py_ssize_t ids_size = count * (Py_ssize_t)sizeof(i64);
    if (count < 1 || count > exchange->num_found || next->len < end + ids_size || own->len < ids_size
        || (root->obj != NULL && root->len < roots_end + size_of(&exchange->inputs, count)))
        return -1;
    for (Py_ssize_t i = 0; i < count; i++)
        if (!can_be_taken(exchange, exchange->found[i]))
            return -1;
    if (root->obj != NULL) {
        gather_roots(exchange, &ids, root->buf);
        gather(exchange, &exchange->inputs, exchange->found, count, (char *)root->buf + roots_end);
    }
    gather(exchange, &exchange->next, exchange->found, count, next->buf);
    memcpy((char *)next->buf + end, exchange->found, (size_t)ids_size);
    memcpy(own->buf, exchange->found, (size_t)ids_size);
    for (Py_ssize_t i = 0; i < count; i++)
        num_reset += deliver(exchange, &exchange->ring, exchange->found[i])
                     && *word(&exchange->ops, exchange->found[i]) == OP_STEP_RESET;
    exchange->num_found = 0;
    return num_reset;
}

static PyObject *exchange_take(PyObject *self, PyObject *args)
{
    Py_ssize_t count;
    PyObject *arrays[3];
    Py_buffer memories[3] = {{0}}; /* next, root, ids */
    i64 num_reset = -1;
    if (!PyArg_ParseTuple(args, "nOOO", &count, &arrays[0], &arrays[1], &arrays[2]))
        return NULL;
    int is_right = 1;
    for (int i = 0; is_right && i < 3; i++)
        is_right = arrays[i] == Py_None || PyObject_GetBuffer(arrays[i], &memories[i], PyBUF_CONTIG) == 0;
    if (is_right)
        num_reset = take((Exchange *)self, count, &memories[0], &memories[1], &memories[2]);
    for (int i = 0; i < 3; i++)
        PyBuffer_Release(&memories[i]);
    return is_right ? PyLong_FromLongLong(num_reset) : NULL;
}

/* ---- a step of all envs ----------------------------------------------------------------------------- */

/* Mark the envs that are reset instead of stepped, int64 `[j]` or None: 1; 0 for anything else, without an exception. */
static int mark_resets(Exchange *exchange, PyObject *array)
{
    Numbers ids;
    exchange->mark++;
    if (array == Py_None)
        return 1;
    if (!numbers_take(array, exchange->num_envs, &ids))
        return 0;
    for (Py_ssize_t i = 0; i < ids.count; i++)
        exchange->marks[number_at(&ids, i)] = exchange->mark;
    PyBuffer_Release(&ids.memory);
    return 1;
}

static i64 op_of(const Exchange *exchange, i64 id, i64 op) { return exchange->marks[id] == exchange->mark ? OP_RESET : op; }

static PyObject *exchange_may_step(PyObject *self, PyObject *args)
{
    Exchange *exchange = (Exchange *)self;
    long long op;
    PyObject *resets;
    if (!PyArg_ParseTuple(args, "LO", &op, &resets))
        return NULL;
    int may_step = (op == OP_STEP || op == OP_STEP_RESET) && mark_resets(exchange, resets);
    for (i64 id = 0; may_step && id < exchange->num_envs; id++)
        may_step = after_event(exchange, id, op_of(exchange, id, op)) >= 0;
    return PyBool_FromLong(may_step);
}

/* Take `(number, next_done, root_done)` of a rollout's storage, or the ring (None). */
static int target_take(const Exchange *exchange, PyObject *given, Target *target)
{
    PyObject *next, *root;
    Py_ssize_t num_columns;
    *target = exchange->ring;
    target->next_done.memory.obj = target->root_done.memory.obj = NULL;
    if (given == Py_None)
        return 0;
    if (!PyArg_ParseTuple(given, "LOOn", &target->number, &next, &root, &num_columns))
        return -1;
    target->root_ahead = 1;
    target->num_columns = num_columns;
    return rows_take(next, 2, num_columns, exchange->num_envs, &target->next_done) < 0 ? -1
           : rows_take(root, 2, num_columns, exchange->num_envs, &target->root_done);
}

static Py_ssize_t land_all(const Exchange *exchange, const Target *target)
{
    Py_ssize_t count = 0;
    for (i64 id = 0; id < exchange->num_envs; id++)
        if (deliver(exchange, target, id))
            *word(&exchange->ended, count++) = id;
    return count;
}

static void target_release(Target *target)
{
    PyBuffer_Release(&target->next_done.memory);
    PyBuffer_Release(&target->root_done.memory);
}

/* Write reward 0 and no flag to the `next` of an env that no step writes. */
static void blank_step(const Exchange *exchange, i64 column, i64 id)
{
    for (Py_ssize_t leaf = exchange->blank; leaf < exchange->next.count; leaf++)
        memset(row_at(&exchange->next.rows[leaf], column, id), 0, (size_t)exchange->next.rows[leaf].num_bytes);
}

/* Give all envs a command, and let the workers, or `serve()` here, carry it out: 0; -1: an exception. */
static int give_all(Exchange *exchange, const Target *target, i64 op, PyObject *resets, i64 column, PyObject *serve)
{
    Numbers ids = {.at = (char *)exchange->sent, .stride = sizeof(i64), .count = exchange->num_envs}, commands = ids;
    if (column < 0 || column >= target->num_columns || (resets != Py_None && target->number != RING)
        || !mark_resets(exchange, resets)) {
        PyErr_SetString(PyExc_IndexError, "expected a column of the target; of the ring, and env ids, if envs are reset");
        return -1;
    }
    commands.at = (char *)exchange->commands;
    for (i64 id = 0; id < exchange->num_envs; id++) {
        i64 own = op_of(exchange, id, op); /* a root in the ring has the column of its step */
        if (own == OP_RESET)
            blank_step(exchange, column, id);
        exchange->sent[id] = id;
        exchange->commands[id] = depart(exchange, id, own, 0, target->number, column); /* 1 */
    }
    caller_give_each(exchange->caller, &ids, &commands, serve == Py_None);
    /* 2 */
    PyObject *served = serve == Py_None ? Py_NewRef(Py_None) : PyObject_CallNoArgs(serve);
    Py_XDECREF(served);
    return served == NULL ? -1 : 0;
}

static PyObject *exchange_give(PyObject *self, PyObject *args)
{
    Exchange *exchange = (Exchange *)self;
    long long op, column;
    PyObject *resets, *given, *serve;
    Target target;
    if (!PyArg_ParseTuple(args, "LOOLO", &op, &resets, &given, &column, &serve))
        return NULL;
    int is_given = target_take(exchange, given, &target) == 0
                   && give_all(exchange, &target, op, resets, column, serve) == 0;
    target_release(&target);
    return is_given ? Py_NewRef(Py_None) : NULL;
}

static PyObject *exchange_land(PyObject *self, PyObject *given)
{
    Target target;
    Py_ssize_t count = target_take((Exchange *)self, given, &target) == 0 ? land_all((Exchange *)self, &target) : -1;
    target_release(&target);
    return count < 0 ? NULL : PyLong_FromSsize_t(count);
}

static PyObject *exchange_step(PyObject *self, PyObject *args)
{
    Exchange *exchange = (Exchange *)self;
    long long op;
    PyObject *resets, *given, *column, *serve, *draft, *drafted = NULL, *pair = NULL;
    Target target;
    if (!PyArg_ParseTuple(args, "LOOOOO", &op, &resets, &given, &column, &serve, &draft))
        return NULL;
    if (target_take(exchange, given, &target) == 0
        && give_all(exchange, &target, op, resets, PyLong_AsLongLong(column), serve) == 0)
        drafted = draft == Py_None ? Py_NewRef(Py_None) : PyObject_CallFunctionObjArgs(draft, column, NULL);
    if (drafted != NULL) {
        int has_all = serve == Py_None ? caller_has_all(exchange->caller) : 1;
        int is_plain = has_all && !caller_has_news(exchange->caller);
        if (has_all >= 0)
            pair = Py_BuildValue("(On)", drafted, is_plain ? land_all(exchange, &target) : -1); /* 3 */
    }
    Py_XDECREF(drafted);
    target_release(&target);
    return pair;
}

static PyObject *exchange_roots(PyObject *self, PyObject *args)
{
    Exchange *exchange = (Exchange *)self;
    PyObject *ids_array, *array;
    Numbers ids;
    Py_buffer to;
    if (!PyArg_ParseTuple(args, "OO", &ids_array, &array) || PyObject_GetBuffer(array, &to, PyBUF_CONTIG) < 0)
        return NULL;
    int is_right = numbers_take(ids_array, exchange->num_envs, &ids);
    if (is_right) {
        is_right = to.len >= size_of(&exchange->root, ids.count);
        for (Py_ssize_t i = 0; is_right && i < ids.count; i++)
            is_right = (uint64_t)*word(&exchange->columns, number_at(&ids, i)) < (uint64_t)exchange->num_columns;
        if (is_right)
            gather_roots(exchange, &ids, to.buf);
        PyBuffer_Release(&ids.memory);
    }
    PyBuffer_Release(&to);
    return PyBool_FromLong(is_right);
}

static PyMethodDef exchange_methods[] = {
    {"send", exchange_send, METH_VARARGS,
     "send(op, ids, actions): give envs a step each, at the columns after those of their latest ones; return "
     "False if they or the actions are not plain and legal, and nothing was given or written."},
    {"wait", exchange_wait, METH_VARARGS,
     "wait(ids, wanted): wait until `wanted` (< 0: all) of some envs (None: of all) that were sent have answered; return "
     "how many have; 0 if they have not, or if there is more to know than rows."},
    {"take", exchange_take, METH_VARARGS,
     "take(count, next, root, ids): take the first of those that `wait` has found: their rows and ids to `next`; to `root`, "
     "unless that is None, where they were before, and their inputs; to `ids` their ids. Return how many were reset; -1 if "
     "nothing was done."},
    {"may_step", exchange_may_step, METH_VARARGS,
     "may_step(op, resets): return whether all envs may be given a step; `resets` are reset instead: int64 `[j]` or None."},
    {"give", exchange_give, METH_VARARGS,
     "give(op, resets, target, column, serve): give all envs a step, after `may_step`; call `serve()`, which carries it out, or "
     "wake the workers (None). `target`: None for the ring, or (number, done flags of next and of root, columns)."},
    {"land", exchange_land, METH_O,
     "land(target): note where all envs are, which have answered it; return how many have ended (written to `ended`)."},
    {"step", exchange_step, METH_VARARGS,
     "step(op, resets, target, column, serve, draft): `give`; call `draft(column)`, unless it is None; wait for all; `land`. "
     "Return the draft, and how many have ended; -1 if no answer has come for `look_ns`, or if there is more to know "
     "than rows: then the envs are under way."},
    {"roots", exchange_roots, METH_VARARGS,
     "roots(ids, to): write where envs are; return False if they are no such envs, and nothing was written."},
    {NULL, NULL, 0, NULL},
};
static PyType_Slot exchange_slots[] = {
    {Py_tp_doc, "Sends and takes transitions of some envs: see executor.protocol.fast."},
    {Py_tp_new, exchange_new},
    {Py_tp_methods, exchange_methods},
    {Py_tp_dealloc, exchange_dealloc},
    {0, NULL},
};
PyType_Spec exchange_spec = {
    .name = "envherd.workers.native._native.Exchange",
    .basicsize = sizeof(Exchange),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_IMMUTABLETYPE,
    .slots = exchange_slots,
};
