/* SPDX-License-Identifier: Apache-2.0 */
/* The module moed._native: its types, and values that the other files make. */
#include "native.h"

PyTypeObject *moe_native_queue_type, *moe_native_client_type, *moe_native_stream_type,
    *moe_native_session_type, *moe_native_region_type, *moe_native_device_type,
    *moe_native_device_request_type;

PyObject *moe_native_failure(const struct moe_status *st)
{
    /* A server may send any bytes as text. */
    PyObject *text =
        PyUnicode_DecodeUTF8(st->text, (Py_ssize_t)strnlen(st->text, sizeof st->text), "replace");
    const char *reason = st->reason == MOE_REASON_NONE ? "" : moe_reason_name(st->reason);
    return text != NULL ? Py_BuildValue("(isNI)", (int)st->code, reason, text, st->retry_after_ms)
                        : NULL;
}

PyObject *moe_native_made(PyObject *self, const struct moe_status *st)
{
    if (!moe_failed(st))
        return self;
    PyObject *failure = moe_native_failure(st);
    if (failure != NULL)
        PyErr_SetObject(PyExc_RuntimeError, failure);
    Py_XDECREF(failure);
    Py_DECREF(self);
    return NULL;
}

void moe_native_free(PyObject *self)
{
    PyTypeObject *type = Py_TYPE(self);
    freefunc release = (freefunc)PyType_GetSlot(type, Py_tp_free);
    release(self);
    Py_DECREF(type);
}

bool moe_native_read(PyObject *from, unsigned long long max, unsigned long long *to)
{
    *to = PyLong_AsUnsignedLongLong(from);
    if (*to == (unsigned long long)-1 && PyErr_Occurred() != NULL)
        return false;
    if (*to > max) {
        PyErr_SetString(PyExc_OverflowError, "the number is too large");
        return false;
    }
    return true;
}

static struct PyModuleDef module = {
    PyModuleDef_HEAD_INIT,
    .m_name = "moed._native",
    .m_doc = "libmoeclient for the package moed; see client/python/native/README.md.",
    .m_size = -1,
};

static bool add_type(PyObject *m, PyType_Spec *spec, PyTypeObject **to)
{
    PyObject *type = PyType_FromModuleAndSpec(m, spec, NULL);
    *to = (PyTypeObject *)type;
    return type != NULL && PyModule_AddType(m, *to) == 0;
}

PyMODINIT_FUNC PyInit__native(void);

PyMODINIT_FUNC PyInit__native(void)
{
    PyObject *m = PyModule_Create(&module);
    if (m == NULL)
        return NULL;
    if (!add_type(m, &moe_native_queue_spec, &moe_native_queue_type) ||
        !add_type(m, &moe_native_client_spec, &moe_native_client_type) ||
        !add_type(m, &moe_native_stream_spec, &moe_native_stream_type) ||
        !add_type(m, &moe_native_session_spec, &moe_native_session_type) ||
        !add_type(m, &moe_native_region_spec, &moe_native_region_type) ||
        !add_type(m, &moe_native_device_spec, &moe_native_device_type) ||
        !add_type(m, &moe_native_device_request_spec, &moe_native_device_request_type)) {
        Py_DECREF(m);
        return NULL;
    }
    return m;
}
