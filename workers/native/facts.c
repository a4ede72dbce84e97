/* Facts: a struct takes and gives up what Python has passed by one table, which names each fact and its field; and how
 * all objects are created and freed. */
#include "native.h"

PyObject *fact(PyObject *facts, const char *name)
{
    PyObject *value = PyDict_GetItemString(facts, name);
    if (value == NULL && !PyErr_Occurred())
        PyErr_SetString(PyExc_KeyError, name);
    return value;
}

static int take_buffer(PyObject *value, const Fact *of, Py_buffer *to)
{
    int flags = of->kind == CONSTANTS ? PyBUF_CONTIG_RO : PyBUF_CONTIG | PyBUF_FORMAT;
    if (value == Py_None && (of->kind == WORDS_OR_NONE || of->kind == CONSTANTS))
        return 0;
    if (PyObject_GetBuffer(value, to, flags) < 0)
        return -1;
    if (of->kind == CONSTANTS || (of->kind == BYTES && to->itemsize == 1))
        return 0;
    if (of->kind != BYTES && to->ndim == 1 && to->itemsize == 8 && (to->format[0] == 'l' || to->format[0] == 'q'))
        return 0;
    PyErr_Format(PyExc_ValueError, "expected %s, got other memory as %s", of->kind == BYTES ? "bytes" : "int64 words", of->name);
    return -1;
}

int take_facts(PyObject *facts, const Fact *table, void *to)
{
    for (; table->name != NULL; table++) {
        PyObject *value = fact(facts, table->name);
        void *field = (char *)to + table->offset;
        if (value == NULL)
            return -1;
        if (table->kind == OBJECT)
            *(PyObject **)field = value == Py_None ? NULL : Py_NewRef(value);
        else if (table->kind == NUMBER)
            *(i64 *)field = PyLong_AsLongLong(value);
        else if (take_buffer(value, table, field) < 0)
            return -1;
        if (table->kind == NUMBER && PyErr_Occurred())
            return -1;
    }
    return 0;
}

int visit_facts(const Fact *table, void *of, visitproc visit, void *arg)
{
    for (; table->name != NULL; table++)
        if (table->kind == OBJECT)
            Py_VISIT(*(PyObject **)((char *)of + table->offset));
    return 0;
}

void clear_facts(const Fact *table, void *of)
{
    for (; table->name != NULL; table++)
        if (table->kind == OBJECT)
            Py_CLEAR(*(PyObject **)((char *)of + table->offset));
}

void release_facts(const Fact *table, void *of)
{
    clear_facts(table, of);
    for (; table->name != NULL; table++)
        if (table->kind != OBJECT && table->kind != NUMBER)
            PyBuffer_Release((Py_buffer *)((char *)of + table->offset));
}

PyObject *make(PyTypeObject *type, PyObject *args, int (*take)(PyObject *self, PyObject *facts))
{
    PyObject *facts;
    if (!PyArg_ParseTuple(args, "O!", &PyDict_Type, &facts))
        return NULL;
    PyObject *self = PyType_GenericAlloc(type, 0);
    if (self != NULL && take(self, facts) < 0)
        Py_CLEAR(self);
    return self;
}

void give_up(PyObject *self)
{
    PyTypeObject *type = Py_TYPE(self);
    freefunc release = (freefunc)PyType_GetSlot(type, Py_tp_free);
    release(self);
    Py_DECREF(type);
}

void *room_for(Py_ssize_t count, size_t size)
{
    void *room = PyMem_Calloc((size_t)count + 1, size);
    if (room == NULL)
        PyErr_NoMemory();
    return room;
}
