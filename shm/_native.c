/* The steps of plain envs in C: `envherd.shm._native`, behind `envherd.workers.block.native_step`.

   A plain env has one contiguous observation array, one float reward and two bools. Its step is checked, then written.
   What is not plain is handed to the Python code as the env gave it, before anything is written; the Python code is the
   specification, and this file holds no rule that it lacks.

   Limited API of Python 3.11 and the buffer protocol only: one file serves every later version, and every numpy. */
#define PY_SSIZE_T_CLEAN
#ifndef Py_LIMITED_API
#define Py_LIMITED_API 0x030B0000
#endif
#include <Python.h>
#include <stdint.h>
#include <string.h>

/* ---- names and types, looked up once ---------------------------------------------------------------- */

static PyObject *str_env, *str_step, *str_info, *str_prepared, *str_last_done, *str_has_ended;

/* ---- Step ------------------------------------------------------------------------------------------- */

enum { OBSERVATION, REWARD, DONE, TERMINATED, TRUNCATED, NUM_NEXT };
enum { ROOT_OBSERVATION, ROOT_DONE, ROOT_TERMINATED, ROOT_TRUNCATED, NUM_ROOT };

typedef struct {
    PyObject_HEAD
    PyObject *slot;     /* gets `prepared`, `last_done`, `has_ended` */
    PyObject *step;     /* takes a list of one action, returns StepValues; NULL where `adapter` is set */
    PyObject *adapter;  /* its env is stepped directly; NULL where `step` is set */
    PyObject *give;     /* of one action, what the env takes; NULL where they are the same */
    PyObject *ready;    /* tuple: what `give` returns for indices 0, 1, ... */
    PyObject *read;     /* returns one action; NULL where it is an index in `actions` */
    PyObject *hand_over;/* column, what the step returned -> observation */
    PyObject *ndarray, *float64, *bool_;
    Py_buffer next[NUM_NEXT], root[NUM_ROOT], env_steps, ends, actions;
    int has_root;
    Py_ssize_t env_id, row, num_columns, nbytes;
} Step;

static int Step_traverse(Step *self, visitproc visit, void *arg)
{
    Py_VISIT(Py_TYPE((PyObject *)self));
    Py_VISIT(self->slot); Py_VISIT(self->step); Py_VISIT(self->adapter); Py_VISIT(self->give); Py_VISIT(self->ready);
    Py_VISIT(self->read); Py_VISIT(self->hand_over); Py_VISIT(self->ndarray); Py_VISIT(self->float64);
    Py_VISIT(self->bool_);
    return 0;
}

static int Step_clear(Step *self)
{
    Py_CLEAR(self->slot); Py_CLEAR(self->step); Py_CLEAR(self->adapter); Py_CLEAR(self->give); Py_CLEAR(self->ready);
    Py_CLEAR(self->read); Py_CLEAR(self->hand_over); Py_CLEAR(self->ndarray); Py_CLEAR(self->float64);
    Py_CLEAR(self->bool_);
    for (int i = 0; i < NUM_NEXT; i++) PyBuffer_Release(&self->next[i]);
    for (int i = 0; i < NUM_ROOT; i++) PyBuffer_Release(&self->root[i]);
    PyBuffer_Release(&self->env_steps); PyBuffer_Release(&self->ends); PyBuffer_Release(&self->actions);
    return 0;
}

static void Step_dealloc(Step *self)
{
    PyTypeObject *type = Py_TYPE((PyObject *)self);
    PyObject_GC_UnTrack(self);
    Step_clear(self);
    freefunc free_it = (freefunc)PyType_GetSlot(type, Py_tp_free);
    free_it(self);
    Py_DECREF(type);
}

/* Take memory to write; whether it has the given format (NULL: any) and number of dimensions (-1: any). */
static int take(PyObject *source, Py_buffer *view, const char *format, int ndim, const char *name)
{
    if (PyObject_GetBuffer(source, view, PyBUF_FULL) < 0) return -1;
    if (view->suboffsets || (format && strcmp(view->format, format)) || (ndim >= 0 && view->ndim != ndim)) {
        PyErr_Format(PyExc_ValueError, "compiling a step failed: expected %s of format %s, got format %s and %d dimensions.",
                     name, format ? format : "any", view->format, view->ndim);
        return -1;
    }
    return 0;
}

/* Whether each column of an array is contiguous. */
static int is_contiguous(const Py_buffer *view)
{
    Py_ssize_t expected = view->itemsize;
    for (int i = view->ndim - 1; i > 0; i--) {
        if (view->shape[i] != 1 && view->strides[i] != expected) return 0;
        expected *= view->shape[i];
    }
    return 1;
}

static int take_all(Step *self, PyObject *next, PyObject *root, PyObject *env_steps, PyObject *ends, PyObject *actions)
{
    static const char *const formats[NUM_NEXT] = {NULL, "f", "?", "?", "?"};
    if (PyTuple_Size(next) != NUM_NEXT || (self->has_root && PyTuple_Size(root) != NUM_ROOT)) {
        if (!PyErr_Occurred()) PyErr_SetString(PyExc_ValueError, "compiling a step failed: expected 5 and 4 arrays.");
        return -1;
    }
    for (int i = 0; i < NUM_NEXT; i++)
        if (take(PyTuple_GetItem(next, i), &self->next[i], formats[i], i == OBSERVATION ? -1 : 1, "`next`") < 0) return -1;
    for (int i = 0; self->has_root && i < NUM_ROOT; i++)
        if (take(PyTuple_GetItem(root, i), &self->root[i], i == 0 ? self->next[0].format : "?",
                 i == 0 ? self->next[0].ndim : 1, "`root`") < 0) return -1;
    if (take(env_steps, &self->env_steps, "l", 1, "`env_steps`") < 0 || take(ends, &self->ends, "l", 1, "`ends`") < 0) return -1;
    if (actions != Py_None && take(actions, &self->actions, "l", 1, "`actions`") < 0) return -1;

    const Py_buffer *observation = &self->next[OBSERVATION];
    int is_right = observation->ndim > 1 && observation->shape[0] > 0 && is_contiguous(observation);
    self->num_columns = is_right ? observation->shape[0] : 0;
    self->nbytes = observation->itemsize;
    for (int i = 1; i < observation->ndim; i++) self->nbytes *= observation->shape[i];
    for (int i = 0; i < NUM_NEXT; i++) is_right = is_right && self->next[i].shape[0] == self->num_columns;
    for (int i = 0; self->has_root && i < NUM_ROOT; i++) is_right = is_right && self->root[i].shape[0] == self->num_columns;
    if (self->has_root) {
        is_right = is_right && is_contiguous(&self->root[0]);
        for (int i = 0; is_right && i < observation->ndim; i++) is_right = self->root[0].shape[i] == observation->shape[i];
    }
    is_right = is_right && self->env_id >= 0 && self->env_id < self->env_steps.shape[0] && self->env_id < self->ends.shape[0];
    if (actions != Py_None) is_right = is_right && self->row >= 0 && self->row < self->actions.shape[0];
    if (!is_right) {
        PyErr_SetString(PyExc_ValueError, "compiling a step failed: expected arrays of equal length with contiguous columns.");
        return -1;
    }
    return 0;
}

static PyObject *none_as_null(PyObject *value) { return value == Py_None ? NULL : Py_NewRef(value); }

static PyObject *Step_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"slot", "step", "adapter", "give", "ready", "read", "hand_over", "types", "next", "root",
                            "env_steps", "ends", "actions", "env_id", "row", NULL};
    PyObject *slot, *step, *adapter, *give, *ready, *read, *hand_over, *types, *next, *root, *env_steps, *ends, *actions;
    Py_ssize_t env_id, row;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "$OOOOO!OOO!O!OOOOnn:Step", names, &slot, &step, &adapter, &give,
                                     &PyTuple_Type, &ready, &read, &hand_over, &PyTuple_Type, &types, &PyTuple_Type, &next,
                                     &root, &env_steps, &ends, &actions, &env_id, &row)) return NULL;
    if ((step == Py_None) == (adapter == Py_None) || (read == Py_None) == (actions == Py_None) || PyTuple_Size(types) != 3) {
        PyErr_SetString(PyExc_ValueError, "compiling a step failed: expected `step` or `adapter`, `read` or `actions`.");
        return NULL;
    }
    allocfunc allocate = (allocfunc)PyType_GetSlot(type, Py_tp_alloc);
    Step *self = (Step *)allocate(type, 0); /* all zeros: a buffer with no `obj` is released as nothing */
    if (!self) return NULL;
    self->slot = Py_NewRef(slot);
    self->step = none_as_null(step);
    self->adapter = none_as_null(adapter);
    self->give = none_as_null(give);
    self->ready = Py_NewRef(ready);
    self->read = none_as_null(read);
    self->hand_over = Py_NewRef(hand_over);
    self->ndarray = Py_NewRef(PyTuple_GetItem(types, 0));
    self->float64 = Py_NewRef(PyTuple_GetItem(types, 1));
    self->bool_ = Py_NewRef(PyTuple_GetItem(types, 2));
    self->has_root = root != Py_None;
    self->env_id = env_id;
    self->row = row;
    if (take_all(self, next, root, env_steps, ends, actions) < 0) {
        Py_DECREF(self);
        return NULL;
    }
    return (PyObject *)self;
}

/* Return what the env is to be given: a new reference. */
static PyObject *read_action(Step *self)
{
    PyObject *action;
    if (self->read) {
        action = PyObject_CallNoArgs(self->read);
    } else {
        int64_t index = *(int64_t *)((char *)self->actions.buf + self->row * self->actions.strides[0]);
        if (index >= 0 && index < PyTuple_Size(self->ready)) return Py_NewRef(PyTuple_GetItem(self->ready, index));
        action = PyLong_FromLongLong(index);
    }
    if (!action || !self->give) return action;
    PyObject *given = PyObject_CallFunctionObjArgs(self->give, action, NULL);
    Py_DECREF(action);
    return given;
}

/* Step the env once; return what that returned: a new reference. */
static PyObject *call_step(Step *self, PyObject *action)
{
    if (self->step) {
        PyObject *values = PyList_New(1);
        if (!values) return NULL;
        PyList_SetItem(values, 0, Py_NewRef(action));
        PyObject *result = PyObject_CallFunctionObjArgs(self->step, values, NULL);
        Py_DECREF(values);
        return result;
    }
    PyObject *env = PyObject_GetAttr(self->adapter, str_env);
    if (!env) return NULL;
    PyObject *result = PyObject_CallMethodObjArgs(env, str_step, action, NULL);
    Py_DECREF(env);
    return result;
}

typedef struct { PyObject *observation; double reward; int terminated, truncated; Py_buffer view; } Plain;

static int as_flag(const Step *self, PyObject *value)
{
    if (value == Py_True) return 1;
    if (value == Py_False) return 0;
    return (PyObject *)Py_TYPE(value) == self->bool_ && self->adapter ? PyObject_IsTrue(value) : -1;
}

/* Whether a result is plain; if so, `plain->view` must be released. Never leaves an exception. */
static int is_plain(const Step *self, PyObject *result, Plain *plain)
{
    if (!PyTuple_CheckExact(result) || PyTuple_Size(result) != (self->adapter ? 5 : 4)) return 0;
    PyObject *observation = PyTuple_GetItem(result, 0), *reward = PyTuple_GetItem(result, 1);
    if (!self->adapter) {
        if (!PyList_CheckExact(observation) || PyList_Size(observation) != 1) return 0;
        if (!PyList_CheckExact(reward) || PyList_Size(reward) != 1) return 0;
        observation = PyList_GetItem(observation, 0);
        reward = PyList_GetItem(reward, 0);
    }
    if (!PyFloat_CheckExact(reward) && !((PyObject *)Py_TYPE(reward) == self->float64 && self->adapter)) return 0;
    plain->reward = PyFloat_AsDouble(reward); /* float64 is a float: no call, no failure */
    if ((plain->terminated = as_flag(self, PyTuple_GetItem(result, 2))) < 0) return 0;
    if ((plain->truncated = as_flag(self, PyTuple_GetItem(result, 3))) < 0) return 0;
    if ((PyObject *)Py_TYPE(observation) != self->ndarray) return 0;
    if (PyObject_GetBuffer(observation, &plain->view, PyBUF_FORMAT | PyBUF_C_CONTIGUOUS) < 0) {
        PyErr_Clear(); /* a dtype or an order that has no such buffer; no Python code ran that could be interrupted */
        return 0;
    }
    const Py_buffer *stored = &self->next[OBSERVATION], *view = &plain->view;
    int is_same = view->ndim == stored->ndim - 1 && view->len == self->nbytes && strcmp(view->format, stored->format) == 0;
    for (int i = 0; is_same && i < view->ndim; i++) is_same = view->shape[i] == stored->shape[i + 1];
    if (!is_same) PyBuffer_Release(&plain->view);
    plain->observation = observation;
    return is_same;
}

static char *at(const Py_buffer *view, Py_ssize_t index) { return (char *)view->buf + index * view->strides[0]; }

static void write_plain(Step *self, Py_ssize_t column, const Plain *plain)
{
    int has_ended = plain->terminated || plain->truncated;
    *(int64_t *)at(&self->env_steps, self->env_id) += 1;
    memmove(at(&self->next[OBSERVATION], column), plain->view.buf, self->nbytes);
    *(float *)at(&self->next[REWARD], column) = (float)plain->reward;
    *at(&self->next[TERMINATED], column) = (char)plain->terminated;
    *at(&self->next[TRUNCATED], column) = (char)plain->truncated;
    *at(&self->next[DONE], column) = (char)has_ended;
    if (has_ended) {
        *(int64_t *)at(&self->ends, self->env_id) += 1;
    } else if (self->has_root && column + 1 < self->num_columns) {
        memmove(at(&self->root[ROOT_OBSERVATION], column + 1), plain->view.buf, self->nbytes);
        for (int i = ROOT_DONE; i < NUM_ROOT; i++) *at(&self->root[i], column + 1) = 0;
    }
}

/* run(column) -> the list of one observation */
static PyObject *Step_run(Step *self, PyObject *argument)
{
    Py_ssize_t column = PyNumber_AsSsize_t(argument, PyExc_IndexError);
    if (column == -1 && PyErr_Occurred()) return NULL;
    if (column < 0 || column >= self->num_columns || !self->slot) {
        PyErr_Format(PyExc_IndexError, "step failed: expected a column below %zd, got %zd.", self->num_columns, column);
        return NULL;
    }
    PyObject *action = read_action(self);
    if (!action) return NULL;
    PyObject *result = PyObject_SetAttr(self->slot, str_prepared, Py_None) < 0 ? NULL : call_step(self, action);
    Py_DECREF(action);
    if (!result) return NULL;

    Plain plain;
    if (!is_plain(self, result, &plain)) {
        PyObject *observation = PyObject_CallFunctionObjArgs(self->hand_over, argument, result, NULL);
        Py_DECREF(result);
        return observation;
    }
    PyObject *has_ended = plain.terminated || plain.truncated ? Py_True : Py_False, *values = NULL;
    write_plain(self, column, &plain);
    PyBuffer_Release(&plain.view);
    if ((!self->adapter || PyObject_SetAttr(self->adapter, str_info, PyTuple_GetItem(result, 4)) == 0) &&
        PyObject_SetAttr(self->slot, str_last_done, has_ended) == 0 &&
        PyObject_SetAttr(self->slot, str_has_ended, has_ended) == 0) {
        if (!self->adapter) {
            values = Py_NewRef(PyTuple_GetItem(result, 0));
        } else if ((values = PyList_New(1))) {
            PyList_SetItem(values, 0, Py_NewRef(plain.observation));
        }
    }
    Py_DECREF(result);
    return values;
}

static PyMethodDef step_methods[] = {
    {"run", (PyCFunction)Step_run, METH_O, "run(column) -> list of the observation, after one step of the env"},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot step_slots[] = {
    {Py_tp_new, (void *)Step_new},
    {Py_tp_dealloc, Step_dealloc},
    {Py_tp_traverse, Step_traverse},
    {Py_tp_clear, Step_clear},
    {Py_tp_methods, step_methods},
    {Py_tp_doc, "The step of one plain env to one sink; holds its arrays until it is freed."},
    {0, NULL},
};

static PyType_Spec step_spec = {
    .name = "envherd.shm._native.Step",
    .basicsize = sizeof(Step),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_IMMUTABLETYPE,
    .slots = step_slots,
};

/* ---- module ----------------------------------------------------------------------------------------- */

static int execute_module(PyObject *module)
{
    const struct { PyObject **place; const char *text; } names[] = {
        {&str_env, "env"}, {&str_step, "step"}, {&str_info, "info"}, {&str_prepared, "prepared"},
        {&str_last_done, "last_done"}, {&str_has_ended, "has_ended"},
    };
    for (size_t i = 0; i < sizeof names / sizeof *names; i++)
        if (!*names[i].place && !(*names[i].place = PyUnicode_InternFromString(names[i].text))) return -1;
    PyObject *step = PyType_FromModuleAndSpec(module, &step_spec, NULL);
    if (!step) return -1;
    int is_added = PyModule_AddType(module, (PyTypeObject *)step);
    Py_DECREF(step);
    return is_added;
}

static PyModuleDef_Slot module_slots[] = {{Py_mod_exec, execute_module}, {0, NULL}};

static struct PyModuleDef module = {
    PyModuleDef_HEAD_INIT, "envherd.shm._native", "Steps of plain envs; see envherd.workers.block.native_step.", 0,
    NULL, module_slots, NULL, NULL, NULL,
};

PyMODINIT_FUNC PyInit__native(void) { return PyModuleDef_Init(&module); }
