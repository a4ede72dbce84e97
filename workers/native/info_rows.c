/* Infos as rows: writes an info to memory if it has a schema. `workers.info_rows.Schema` is the specification.
 *
 * Types are compared exactly, so no Python code runs. A row whose info turns out not to fit is partly written: only the
 * schema's number, which the caller stores afterwards, makes a row valid. */
#include "native.h"

#include <string.h>

typedef struct Field {
    int kind;
    Py_ssize_t place, count;
    PyObject *keys;     /* of a dict: a tuple */
    struct Field *items;
    Py_buffer like;     /* a value of the same type and shape */
} Field;

struct Schema {
    PyObject_HEAD
    i64 id;
    Py_ssize_t nbytes;
    Field root;
};

/* ---- construction ----------------------------------------------------------------------------------- */

static int field_take(PyObject *facts, Field *field, Py_ssize_t nbytes)
{
    int kind;
    PyObject *items, *like;
    if (!PyArg_ParseTuple(facts, "inO!O!O", &kind, &field->place, &PyTuple_Type, &field->keys, &PyTuple_Type, &items, &like)) {
        field->keys = NULL;
        return -1;
    }
    Py_INCREF(field->keys);
    field->kind = kind;
    if (PyObject_GetBuffer(like, &field->like, PyBUF_STRIDES | PyBUF_FORMAT) < 0)
        return -1;
    Py_ssize_t count = PyTuple_Size(items), length = kind <= IS_NONE ? 0 : field->like.len;
    if (kind < 0 || kind >= NUM_KINDS || field->place < 0 || length > nbytes - field->place
        || (kind == IS_DICT && PyTuple_Size(field->keys) != count)) {
        PyErr_SetString(PyExc_ValueError, "expected fields within a row");
        return -1;
    }
    field->items = room_for(count, sizeof *field->items);
    if (field->items == NULL)
        return -1;
    field->count = count; /* those that are not taken yet hold nothing, which is as good to release */
    for (Py_ssize_t i = 0; i < count; i++)
        if (field_take(PyTuple_GetItem(items, i), &field->items[i], nbytes) < 0)
            return -1;
    return 0;
}

static void field_release(Field *field)
{
    for (Py_ssize_t i = 0; i < field->count; i++)
        field_release(&field->items[i]);
    PyMem_Free(field->items);
    PyBuffer_Release(&field->like);
    Py_CLEAR(field->keys);
}

static PyObject *schema_new(PyTypeObject *type, PyObject *args, PyObject *Py_UNUSED(kwargs))
{
    long long id;
    Py_ssize_t nbytes;
    PyObject *root;
    if (!PyArg_ParseTuple(args, "LnO!", &id, &nbytes, &PyTuple_Type, &root))
        return NULL;
    Schema *schema = (Schema *)PyType_GenericAlloc(type, 0);
    if (schema == NULL)
        return NULL;
    schema->id = id;
    schema->nbytes = nbytes;
    if (field_take(root, &schema->root, nbytes) < 0) {
        Py_DECREF(schema);
        return NULL;
    }
    return (PyObject *)schema;
}

static void schema_dealloc(Schema *schema)
{
    field_release(&schema->root);
    give_up((PyObject *)schema);
}

/* ---- an info: 1 if it fits, else 0, with no exception ------------------------------------------------- */

static int write_value(const Field *field, PyObject *value, char *row);

static int is_key(PyObject *key, PyObject *given)
{
    return key == given || (PyUnicode_CheckExact(given) && PyUnicode_Compare(key, given) == 0);
}

static int write_dict(const Field *field, PyObject *value, char *row)
{
    PyObject *key, *item;
    Py_ssize_t at = 0;
    if (!PyDict_CheckExact(value) || PyDict_Size(value) != field->count)
        return 0;
    for (Py_ssize_t i = 0; PyDict_Next(value, &at, &key, &item); i++)
        if (!is_key(PyTuple_GetItem(field->keys, i), key) || !write_value(&field->items[i], item, row))
            return 0;
    return 1;
}

static int write_sequence(const Field *field, PyObject *value, char *row)
{
    int is_list = field->kind == IS_LIST;
    if (is_list ? !PyList_CheckExact(value) : !PyTuple_CheckExact(value))
        return 0;
    if ((is_list ? PyList_Size(value) : PyTuple_Size(value)) != field->count)
        return 0;
    for (Py_ssize_t i = 0; i < field->count; i++)
        if (!write_value(&field->items[i], is_list ? PyList_GetItem(value, i) : PyTuple_GetItem(value, i), row))
            return 0;
    return 1;
}

static int write_int(PyObject *value, char *to)
{
    int overflow;
    long long number = PyLong_AsLongLongAndOverflow(value, &overflow);
    memcpy(to, &number, sizeof number);
    return !overflow;
}

static int write_text(PyObject *value, char *to)
{
    Py_ssize_t length;
    const char *text = PyUnicode_AsUTF8AndSize(value, &length);
    if (text == NULL)
        PyErr_Clear(); /* it has no encoding */
    if (text == NULL || length > TEXT_BYTES)
        return 0;
    i64 stored = length;
    memcpy(to, &stored, sizeof stored);
    memcpy(to + sizeof stored, text, (size_t)length);
    return 1;
}

/* An array, or a scalar of numpy. */
static int write_numbers(const Field *field, PyObject *value, char *to)
{
    const Py_buffer *like = &field->like;
    Py_buffer held;
    if (Py_TYPE(value) != Py_TYPE(like->obj))
        return 0;
    if (PyObject_GetBuffer(value, &held, PyBUF_STRIDES | PyBUF_FORMAT) < 0) {
        PyErr_Clear(); /* a dtype that has no format */
        return 0;
    }
    int fits = held.ndim == like->ndim && strcmp(held.format, like->format) == 0;
    for (int axis = 0; fits && axis < held.ndim; axis++)
        fits = held.shape[axis] == like->shape[axis];
    if (fits && PyBuffer_ToContiguous(to, &held, held.len, 'C') < 0) {
        PyErr_Clear();
        fits = 0;
    }
    PyBuffer_Release(&held);
    return fits;
}

static int write_value(const Field *field, PyObject *value, char *row)
{
    char *to = row + field->place;
    switch (field->kind) {
    case IS_DICT:
        return write_dict(field, value, row);
    case IS_LIST:
    case IS_TUPLE:
        return write_sequence(field, value, row);
    case IS_NONE:
        return value == Py_None;
    case IS_BOOL:
        *to = value == Py_True;
        return value == Py_True || value == Py_False;
    case IS_INT:
        return PyLong_CheckExact(value) && write_int(value, to);
    case IS_FLOAT:
        if (!PyFloat_CheckExact(value))
            return 0;
        double number = PyFloat_AsDouble(value);
        memcpy(to, &number, sizeof number);
        return 1;
    case IS_TEXT:
        return PyUnicode_CheckExact(value) && write_text(value, to);
    default:
        return write_numbers(field, value, to);
    }
}

i64 schema_write(const Schema *schema, PyObject *info, char *row, Py_ssize_t room)
{
    return schema->nbytes <= room && write_value(&schema->root, info, row) ? schema->id : 0;
}

static PyObject *write_to(PyObject *self, PyObject *args)
{
    PyObject *info, *array;
    Py_buffer row;
    if (!PyArg_ParseTuple(args, "OO", &info, &array) || PyObject_GetBuffer(array, &row, PyBUF_CONTIG) < 0)
        return NULL;
    i64 id = schema_write((Schema *)self, info, row.buf, row.len);
    PyBuffer_Release(&row);
    return PyLong_FromLongLong(id);
}

static PyMethodDef schema_methods[] = {
    {"write", write_to, METH_VARARGS, "write(info, row) -> the schema's id if the info was written to uint8 [nbytes], else 0"},
    {NULL, NULL, 0, NULL},
};
static PyType_Slot schema_slots[] = {
    {Py_tp_doc, "Writes infos of one schema: see workers.info_rows."},
    {Py_tp_new, schema_new},
    {Py_tp_methods, schema_methods},
    {Py_tp_dealloc, schema_dealloc},
    {0, NULL},
};
PyType_Spec schema_spec = {
    .name = "envherd.workers.native._native.Schema",
    .basicsize = sizeof(Schema),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_IMMUTABLETYPE,
    .slots = schema_slots,
};
