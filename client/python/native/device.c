/* SPDX-License-Identifier: Apache-2.0 */
/* Device and DeviceRequest: memory of a GPU that a worker maps too, and requests of CUDA streams
 * (moe/client_cuda.h). libmoeclient_cuda is opened at the first use: the extension itself needs no
 * CUDA. Streams are numbers here, as torch gives them. */
#include "native.h"

#include "moe/client_cuda.h"

#include <dlfcn.h>
#include <stddef.h>
#include <stdio.h>
#include <string.h>

/* ------------------------------------------------------------------ the library */

/* Functions of libmoeclient_cuda; NULL until they are found. With the GIL. */
static struct {
    __typeof__(&moe_stream_session_open) open;
    __typeof__(&moe_stream_session_close) close;
    __typeof__(&moe_region_alloc) alloc;
    __typeof__(&moe_stream_request_create) create;
    __typeof__(&moe_stream_request_destroy) destroy;
    __typeof__(&moe_session_submit_on_stream) submit;
    __typeof__(&moe_session_wait_on_stream) wait;
    __typeof__(&moe_stream_request_status) status;
    __typeof__(&moe_stream_request_result) result;
} library;

static struct moe_status missing(void)
{
    struct moe_status st = {.code = MOE_FAILED_PRECONDITION, .reason = MOE_REASON_UNSUPPORTED};
    const char *why = dlerror();
    (void)snprintf(st.text, sizeof st.text, "memory of a device needs libmoeclient_cuda: %s",
                   why != NULL ? why : "a function is missing");
    return st;
}

/* `name` of the library to the pointer at `to`. */
static bool find(void *handle, const char *name, void *to)
{
    void *function = dlsym(handle, name);
    memcpy(to, &function, sizeof function);
    return function != NULL;
}

static struct moe_status find_library(void)
{
    const struct moe_status ok = {.code = MOE_OK};
    if (library.result != NULL)
        return ok;
    void *handle = dlopen("libmoeclient_cuda.so.1", RTLD_NOW | RTLD_LOCAL);
    if (handle == NULL || !find(handle, "moe_stream_session_open", &library.open) ||
        !find(handle, "moe_stream_session_close", &library.close) ||
        !find(handle, "moe_region_alloc", &library.alloc) ||
        !find(handle, "moe_stream_request_create", &library.create) ||
        !find(handle, "moe_stream_request_destroy", &library.destroy) ||
        !find(handle, "moe_session_submit_on_stream", &library.submit) ||
        !find(handle, "moe_session_wait_on_stream", &library.wait) ||
        !find(handle, "moe_stream_request_status", &library.status) ||
        !find(handle, "moe_stream_request_result", &library.result))
        return missing();
    return ok;
}

/* ------------------------------------------------------------------ DeviceRequest */

struct device {
    PyObject ob_base;
    struct moe_stream_session *handle;
    struct session *session;
};

struct device_request {
    PyObject ob_base;
    struct moe_stream_request *handle;
    struct device *device;
    PyObject *regions[MOE_NATIVE_TENSORS]; /* they stay as long as the request; NULL = absent */
};

static PyObject *success(const struct moe_status *st)
{
    return moe_failed(st) ? moe_native_failure(st) : Py_BuildValue("(i)", 0);
}

/* Enqueues by `call` on the stream with this number. */
static PyObject *enqueue(PyObject *self, PyObject *number,
                         __typeof__(&moe_session_wait_on_stream) call)
{
    const struct device_request *r = (const struct device_request *)self;
    void *stream = PyLong_AsVoidPtr(number);
    if (PyErr_Occurred() != NULL || !moe_native_session_check(r->device->session))
        return NULL;
    PyThreadState *state = PyEval_SaveThread();
    struct moe_status st = call(r->handle, stream);
    PyEval_RestoreThread(state);
    return success(&st);
}

static PyObject *submit(PyObject *self, PyObject *number)
{
    return enqueue(self, number, library.submit);
}

static PyObject *await(PyObject *self, PyObject *number)
{
    return enqueue(self, number, library.wait);
}

static PyObject *result(PyObject *self, PyObject *unused)
{
    const struct device_request *r = (const struct device_request *)self;
    struct moe_client_session_answer answer = {.size = sizeof answer};
    (void)unused;
    if (!moe_native_session_check(r->device->session))
        return NULL;
    PyThreadState *state = PyEval_SaveThread();
    struct moe_status st = library.result(r->handle, &answer);
    PyEval_RestoreThread(state);
    return moe_native_session_outcome(&st, &answer);
}

static PyObject *status_address(PyObject *self, void *unused)
{
    (void)unused;
    const struct moe_stream_status *at = library.status(((struct device_request *)self)->handle);
    return PyLong_FromVoidPtr((void *)(uintptr_t)at);
}

/* Waits for the device. */
static void request_dealloc(PyObject *self)
{
    struct device_request *r = (struct device_request *)self;
    if (r->handle != NULL && r->device->session->client->process == getpid()) {
        PyThreadState *state = PyEval_SaveThread();
        library.destroy(r->handle);
        PyEval_RestoreThread(state);
    }
    for (size_t i = 0; i < MOE_NATIVE_TENSORS; i++)
        Py_XDECREF(r->regions[i]);
    Py_XDECREF((PyObject *)r->device);
    moe_native_free(self);
}

static PyMethodDef request_methods[] = {
    {"submit", submit, METH_O, "submit(stream) -> (0,) or failure"},
    {"wait", await, METH_O, "wait(stream) -> (0,) or failure"},
    {"result", result, METH_NOARGS,
     "result() -> outcome as of Session.wait. The stream has ended the wait."},
    {NULL, NULL, 0, NULL}};

static PyGetSetDef request_getters[] = {
    {"status", status_address, NULL, "where struct moe_stream_status is, for the device", NULL},
    {NULL, NULL, NULL, NULL, NULL}};

static PyType_Slot request_slots[] = {
    {Py_tp_doc, "A request of a Device that is submitted as often as wanted."},
    {Py_tp_dealloc, request_dealloc},
    {Py_tp_methods, request_methods},
    {Py_tp_getset, request_getters},
    {0, NULL}};

PyType_Spec moe_native_device_request_spec = {.name = "moed._native.DeviceRequest",
                                              .basicsize = sizeof(struct device_request),
                                              .flags = Py_TPFLAGS_DEFAULT |
                                                       Py_TPFLAGS_DISALLOW_INSTANTIATION,
                                              .slots = request_slots};

/* ------------------------------------------------------------------ Device */

static struct moe_status make_memory(void *ctx, const char *name, size_t bytes,
                                     struct moe_client_region **out)
{
    return library.alloc(ctx, name, bytes, out);
}

static PyObject *create(PyObject *self, PyObject *args)
{
    const struct device *d = (const struct device *)self;
    return moe_native_region_create(d->session, args, make_memory, d->handle, true);
}

static PyObject *request(PyObject *self, PyObject *const *args, Py_ssize_t count)
{
    struct device *d = (struct device *)self;
    struct moe_client_session_forward f = {.size = sizeof f};
    if (!moe_native_session_check(d->session) || !moe_native_read_request(args, count, &f))
        return NULL;
    allocfunc alloc = (allocfunc)PyType_GetSlot(moe_native_device_request_type, Py_tp_alloc);
    struct device_request *r = (struct device_request *)alloc(moe_native_device_request_type, 0);
    if (r == NULL)
        return NULL;
    r->device = (struct device *)Py_NewRef((PyObject *)d);
    for (size_t i = 0; i < MOE_NATIVE_TENSORS; i++) {
        PyObject *region = args[MOE_NATIVE_NUMBERS + 2 * i];
        r->regions[i] = region != Py_None ? Py_NewRef(region) : NULL;
    }
    struct moe_stream_request *handle = NULL;
    PyThreadState *state = PyEval_SaveThread();
    struct moe_status st = library.create(d->handle, &f, &handle);
    PyEval_RestoreThread(state);
    r->handle = handle;
    if (!moe_failed(&st))
        return Py_BuildValue("(iN)", 0, r);
    Py_DECREF(r);
    return moe_native_failure(&st);
}

static PyObject *make(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"session", "device", "spin", NULL};
    struct moe_stream_session_config config = {.size = sizeof config};
    PyObject *session;
    int spin;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O!ip", names, moe_native_session_type, &session,
                                     &config.device, &spin) ||
        !moe_native_session_check((struct session *)session))
        return NULL;
    config.spin = spin != 0;
    allocfunc alloc = (allocfunc)PyType_GetSlot(type, Py_tp_alloc);
    struct device *d = (struct device *)alloc(type, 0);
    if (d == NULL)
        return NULL;
    d->session = (struct session *)Py_NewRef(session);
    struct moe_status st = find_library();
    if (!moe_failed(&st)) {
        PyThreadState *state = PyEval_SaveThread();
        st = library.open(d->session->handle, &config, &d->handle);
        PyEval_RestoreThread(state);
    }
    return moe_native_made((PyObject *)d, &st);
}

/* Its requests hold a reference; its regions do not need it. */
static void dealloc(PyObject *self)
{
    struct device *d = (struct device *)self;
    if (d->handle != NULL && d->session->client->process == getpid()) {
        PyThreadState *state = PyEval_SaveThread();
        library.close(d->handle);
        PyEval_RestoreThread(state);
    }
    Py_XDECREF((PyObject *)d->session);
    moe_native_free(self);
}

static PyMethodDef methods[] = {
    {"create", create, METH_VARARGS, "create(name, bytes) -> (0, Region) or failure"},
    {"request", (PyCFunction)(void (*)(void))request, METH_FASTCALL,
     "request(arguments of Session.submit) -> (0, DeviceRequest) or failure"},
    {NULL, NULL, 0, NULL}};

static PyType_Slot slots[] = {
    {Py_tp_doc, "Device(session, device, spin)\n\nA GPU of a session. Raises RuntimeError(code, "
                "reason, text, retry_after_ms)."},
    {Py_tp_new, make},
    {Py_tp_dealloc, dealloc},
    {Py_tp_methods, methods},
    {0, NULL}};

PyType_Spec moe_native_device_spec = {.name = "moed._native.Device",
                                      .basicsize = sizeof(struct device),
                                      .flags = Py_TPFLAGS_DEFAULT,
                                      .slots = slots};
