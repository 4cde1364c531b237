/* SPDX-License-Identifier: Apache-2.0 */
/* Session and Region: memory that a worker maps too (moe/regions.h). A region exports its memory by
 * the buffer protocol. It holds its session, and the session its client; so memory lasts as long as
 * an array of it does. */
#include "native.h"

#include <stddef.h>
#include <structmember.h>
#include <unistd.h>

bool moe_native_session_check(const struct session *s)
{
    if (s->client->process == getpid())
        return true;
    PyErr_SetString(PyExc_RuntimeError, "the session is of the parent process");
    return false;
}

/* ------------------------------------------------------------------ Region */

static int region_buffer(PyObject *self, Py_buffer *view, int flags)
{
    struct region *r = (struct region *)self;
    if (r->in_device) {
        PyErr_SetString(PyExc_BufferError, "the region is in memory of a device");
        return -1;
    }
    return PyBuffer_FillInfo(view, self, moe_region_data(r->handle),
                             (Py_ssize_t)moe_region_bytes(r->handle), 0, flags);
}

static void region_dealloc(PyObject *self)
{
    struct region *r = (struct region *)self;
    if (r->weak_references != NULL)
        PyObject_ClearWeakRefs(self);
    if (r->handle != NULL) {
        *r->grave = (struct dead_region){.handle = r->handle, .next = r->session->dead};
        r->session->dead = r->grave;
    } else {
        PyMem_Free(r->grave);
    }
    Py_XDECREF((PyObject *)r->session);
    moe_native_free(self);
}

static PyObject *region_address(PyObject *self, void *unused)
{
    (void)unused;
    return PyLong_FromVoidPtr(moe_region_data(((struct region *)self)->handle));
}

static PyObject *region_bytes(PyObject *self, void *unused)
{
    (void)unused;
    return PyLong_FromSize_t(moe_region_bytes(((struct region *)self)->handle));
}

static PyGetSetDef region_getters[] = {
    {"address", region_address, NULL, "where it is: for the host, or for its device", NULL},
    {"bytes", region_bytes, NULL, "its size", NULL},
    {NULL, NULL, NULL, NULL, NULL}};

static PyMemberDef region_members[] = {
    {"__weaklistoffset__", T_PYSSIZET, offsetof(struct region, weak_references), READONLY, NULL},
    {NULL, 0, 0, 0, NULL}};

static PyType_Slot region_slots[] = {
    {Py_tp_doc, "Memory of a Session, as a writable buffer of bytes, made by Session.create; or "
                "memory of a device, made by Device.create."},
    {Py_tp_dealloc, region_dealloc},
    {Py_bf_getbuffer, region_buffer},
    {Py_tp_members, region_members},
    {Py_tp_getset, region_getters},
    {0, NULL}};

PyType_Spec moe_native_region_spec = {.name = "moed._native.Region",
                                      .basicsize = sizeof(struct region),
                                      .flags =
                                          Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION,
                                      .slots = region_slots};

/* ------------------------------------------------------------------ Session */

/* Gives the memory of regions back that have gone. Returns the first failure. */
static struct moe_status bury(struct session *s)
{
    struct moe_status first = moe_ok();
    while (s->dead != NULL) {
        struct dead_region *d = s->dead;
        s->dead = d->next;
        PyThreadState *state = PyEval_SaveThread();
        struct moe_status st = moe_region_destroy(d->handle);
        PyEval_RestoreThread(state);
        PyMem_Free(d);
        if (moe_failed(&st) && !moe_failed(&first))
            first = st;
    }
    return first;
}

/* An object without a region; NULL with an exception. */
static struct region *make_region(struct session *s)
{
    allocfunc alloc = (allocfunc)PyType_GetSlot(moe_native_region_type, Py_tp_alloc);
    struct region *r = (struct region *)alloc(moe_native_region_type, 0);
    if (r == NULL)
        return NULL;
    r->session = (struct session *)Py_NewRef((PyObject *)s);
    r->grave = PyMem_Calloc(1, sizeof *r->grave);
    if (r->grave != NULL)
        return r;
    Py_DECREF(r);
    return (struct region *)PyErr_NoMemory();
}

PyObject *moe_native_region_create(struct session *s, PyObject *args, moe_native_region_maker maker,
                                   void *ctx, bool in_device)
{
    const char *name;
    Py_ssize_t bytes;
    if (!PyArg_ParseTuple(args, "sn", &name, &bytes) || !moe_native_session_check(s))
        return NULL;
    if (bytes < 0) {
        PyErr_SetString(PyExc_ValueError, "a negative size");
        return NULL;
    }
    struct moe_status st = bury(s);
    struct region *r = make_region(s);
    if (r == NULL)
        return NULL;
    r->in_device = in_device;
    if (!moe_failed(&st)) {
        struct moe_client_region *handle = NULL;
        PyThreadState *state = PyEval_SaveThread();
        st = maker(ctx, name, (size_t)bytes, &handle);
        PyEval_RestoreThread(state);
        r->handle = handle;
    }
    if (!moe_failed(&st))
        return Py_BuildValue("(iN)", 0, r);
    Py_DECREF(r);
    return moe_native_failure(&st);
}

static struct moe_status make_memory(void *ctx, const char *name, size_t bytes,
                                     struct moe_client_region **out)
{
    return moe_region_create(ctx, name, bytes, out);
}

PyDoc_STRVAR(create_doc, "create(name, bytes) -> (0, Region) or failure\n\nFirst gives back the "
                         "memory of regions that have gone.");

static PyObject *create(PyObject *self, PyObject *args)
{
    struct session *s = (struct session *)self;
    return moe_native_region_create(s, args, make_memory, s->handle, false);
}

/* Positional arguments of `submit`. */
enum {
    ARG_LAYER,
    ARG_TOKENS,
    ARG_HIDDEN,
    ARG_DTYPE,
    ARG_PARTS,
    ARG_EPOCH,
    ARG_VERSION,
    ARG_TENSORS,
};
_Static_assert((int)ARG_TENSORS == (int)MOE_NATIVE_NUMBERS, "numbers come before tensors");

/* Reads (Region or None, offset). */
static bool read_tensor(PyObject *const *args, struct moe_client_tensor *to)
{
    unsigned long long offset;
    if (args[0] == Py_None)
        return true;
    if (!PyObject_TypeCheck(args[0], moe_native_region_type)) {
        PyErr_SetString(PyExc_TypeError, "a tensor is in a Region");
        return false;
    }
    if (!moe_native_read(args[1], UINT64_MAX, &offset))
        return false;
    *to =
        (struct moe_client_tensor){.region = ((struct region *)args[0])->handle, .offset = offset};
    return true;
}

bool moe_native_read_request(PyObject *const *args, Py_ssize_t count,
                             struct moe_client_session_forward *f)
{
    unsigned long long numbers[ARG_TENSORS];
    struct moe_client_tensor *tensors[MOE_NATIVE_TENSORS] = {
        &f->x, &f->ids_in, &f->weights_in, &f->y, &f->ids, &f->weights, &f->token_ids_in};
    if (count != MOE_NATIVE_ARGS) {
        PyErr_Format(PyExc_TypeError, "%d arguments, not %zd", MOE_NATIVE_ARGS, count);
        return false;
    }
    for (size_t i = 0; i < ARG_TENSORS; i++)
        if (!moe_native_read(args[i], i < ARG_EPOCH ? UINT32_MAX : UINT64_MAX, &numbers[i]))
            return false;
    f->layer = (uint32_t)numbers[ARG_LAYER];
    f->tokens = (uint32_t)numbers[ARG_TOKENS];
    f->hidden = (uint32_t)numbers[ARG_HIDDEN];
    f->dtype = (enum moe_dtype)numbers[ARG_DTYPE];
    f->parts = (enum moe_parts)numbers[ARG_PARTS];
    f->epoch = numbers[ARG_EPOCH];
    f->weights_version = numbers[ARG_VERSION];
    for (size_t i = 0; i < MOE_NATIVE_TENSORS; i++)
        if (!read_tensor(&args[ARG_TENSORS + 2 * i], tensors[i]))
            return false;
    return true;
}

PyDoc_STRVAR(
    submit_doc,
    "submit(layer, tokens, hidden, dtype, parts, epoch, weights_version,\n       x, offset, "
    "ids_in, offset, weights_in, offset, y, offset, ids, offset, weights, offset,\n       "
    "token_ids_in, offset)\n\n"
    "Each tensor is a Region or None. Returns (0, request) or a failure.");

static PyObject *submit(PyObject *self, PyObject *const *args, Py_ssize_t count)
{
    struct session *s = (struct session *)self;
    struct moe_client_session_forward f = {.size = sizeof f};
    uint64_t request = 0;
    if (!moe_native_session_check(s) || !moe_native_read_request(args, count, &f))
        return NULL;
    struct moe_status st = moe_session_submit(s->handle, &f, &request);
    if (moe_failed(&st))
        return moe_native_failure(&st);
    return Py_BuildValue("(iK)", 0, (unsigned long long)request);
}

PyObject *moe_native_session_outcome(const struct moe_status *st,
                                     const struct moe_client_session_answer *a)
{
    typedef unsigned long long number;
    if (moe_failed(st))
        return moe_native_failure(st);
    return Py_BuildValue("(iKK(KKKII))", 0, (number)a->epoch, (number)a->weights_version,
                         (number)a->queue_ns, (number)a->step_ns, (number)a->server_ns,
                         a->step_tokens, a->steps);
}

enum { SIGNALS_MS = 50 }; /* until a waiting thread looks for signals */

PyDoc_STRVAR(wait_doc, "wait(request) -> outcome\n\nAn exception of a signal's handler leaves the "
                       "request in flight. The outcome of a success is (0, epoch, "
                       "weights_version,\n(queue_ns, step_ns, server_ns, step_tokens, steps)).");

static PyObject *wait_for(PyObject *self, PyObject *number)
{
    struct session *s = (struct session *)self;
    struct moe_client_session_answer answer = {.size = sizeof answer};
    unsigned long long request;
    if (!moe_native_session_check(s) || !moe_native_read(number, UINT64_MAX, &request))
        return NULL;
    for (;;) {
        bool done = false;
        PyThreadState *state = PyEval_SaveThread();
        struct moe_status st = moe_session_wait_for(s->handle, request, SIGNALS_MS, &done, &answer);
        PyEval_RestoreThread(state);
        if (done || moe_failed(&st))
            return moe_native_session_outcome(&st, &answer);
        if (PyErr_CheckSignals() != 0)
            return NULL;
    }
}

static PyObject *poll_for(PyObject *self, PyObject *number)
{
    struct session *s = (struct session *)self;
    struct moe_client_session_answer answer = {.size = sizeof answer};
    unsigned long long request;
    bool done = false;
    if (!moe_native_session_check(s) || !moe_native_read(number, UINT64_MAX, &request))
        return NULL;
    struct moe_status st = moe_session_poll(s->handle, request, &done, &answer);
    if (!done && !moe_failed(&st))
        Py_RETURN_NONE;
    return moe_native_session_outcome(&st, &answer);
}

static PyObject *make(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"client", "timeout_ms", "spin_us", NULL};
    struct moe_client_session_config config = {.size = sizeof config};
    PyObject *client;
    unsigned long long timeout_ms;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O!KI", names, moe_native_client_type, &client,
                                     &timeout_ms, &config.spin_us))
        return NULL;
    config.timeout_ms = timeout_ms;
    allocfunc alloc = (allocfunc)PyType_GetSlot(type, Py_tp_alloc);
    struct session *s = (struct session *)alloc(type, 0);
    if (s == NULL)
        return NULL;
    s->client = (struct client *)Py_NewRef(client);
    PyThreadState *state = PyEval_SaveThread();
    struct moe_status st = moe_session_open(s->client->handle, &config, &s->handle);
    PyEval_RestoreThread(state);
    return moe_native_made((PyObject *)s, &st);
}

/* Regions and calls hold a reference, so no call of the session runs. */
static void dealloc(PyObject *self)
{
    struct session *s = (struct session *)self;
    if (s->handle != NULL && s->client->process == getpid()) {
        PyThreadState *state = PyEval_SaveThread();
        moe_session_close(s->handle);
        PyEval_RestoreThread(state);
    }
    for (struct dead_region *d = s->dead, *next; d != NULL; d = next) {
        next = d->next;
        PyMem_Free(d);
    }
    Py_XDECREF((PyObject *)s->client);
    moe_native_free(self);
}

static PyMethodDef methods[] = {
    {"create", create, METH_VARARGS, create_doc},
    {"submit", (PyCFunction)(void (*)(void))submit, METH_FASTCALL, submit_doc},
    {"wait", wait_for, METH_O, wait_doc},
    {"poll", poll_for, METH_O,
     "poll(request) -> outcome as of wait, or None while the request is in flight"},
    {NULL, NULL, 0, NULL}};

static PyType_Slot slots[] = {
    {Py_tp_doc, "Session(client, timeout_ms, spin_us)\n\nA session of shared memory. Raises "
                "RuntimeError(code, reason, text, retry_after_ms)."},
    {Py_tp_new, make},
    {Py_tp_dealloc, dealloc},
    {Py_tp_methods, methods},
    {0, NULL}};

PyType_Spec moe_native_session_spec = {.name = "moed._native.Session",
                                       .basicsize = sizeof(struct session),
                                       .flags = Py_TPFLAGS_DEFAULT,
                                       .slots = slots};
