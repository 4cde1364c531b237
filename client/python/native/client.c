/* SPDX-License-Identifier: Apache-2.0 */
/* Client and Stream: forward passes of libmoeclient. A pass is a `struct call`. The library ends it
 * on one of its threads: a thread that waits for the pass is woken, or else the call goes into its
 * queue. A thread stops waiting after a signal, or when the client is closed. The pass itself goes
 * on, and its end goes to the client's leftovers. */
#include "native.h"

#include "base/clock.h"
#include "base/wait.h"

#include <unistd.h>

enum { LOOK_MS = 100 }; /* between two looks of a waiting thread for signals */

/* ------------------------------------------------------------------ calls */

PyObject *moe_native_call_outcome(const struct call *call)
{
    const struct moe_client_forward *f = &call->forward;
    const struct moe_client_stages *t = &f->stages;
    if (moe_failed(&call->status))
        return moe_native_failure(&call->status);
    unsigned long long epoch = f->answered_epoch, version = f->answered_weights_version;
    const Py_ssize_t rehomed = (Py_ssize_t)f->rehomed_count;
    if (f->topk_ids == NULL && f->rehomed_experts == NULL)
        return Py_BuildValue("(iKKOn)", 0, epoch, version, Py_None, rehomed);
    typedef unsigned long long number;
    return Py_BuildValue(
        "(iKK(KKKKKKKKKKKKII)n)", 0, epoch, version, (number)t->queue_ns, (number)t->copy_in_ns,
        (number)t->router_ns, (number)t->prepare_ns, (number)t->dispatch_ns, (number)t->gemm1_ns,
        (number)t->gemm2_ns, (number)t->shared_ns, (number)t->combine_ns, (number)t->step_ns,
        (number)t->copy_out_ns, (number)t->server_ns, t->step_tokens, t->steps, rehomed);
}

void moe_native_call_free(struct call *call)
{
    moe_mutex_not_shared(&call->lock);
    for (size_t i = 0; i < VIEW_COUNT; i++)
        if (call->views[i].obj != NULL)
            PyBuffer_Release(&call->views[i]);
    Py_XDECREF(call->token);
    Py_XDECREF((PyObject *)call->queue);
    Py_XDECREF(call->owner); /* perhaps the last reference: this closes the stream or client */
    pthread_cond_destroy(&call->change);
    moe_mutex_destroy(&call->lock);
    PyMem_Free(call);
}

static void on_done(void *ctx, struct moe_client_forward *f, struct moe_status st)
{
    struct call *call = ctx;
    (void)f;
    call->status = st;
    moe_mutex_lock(&call->lock);
    bool waited = call->waited;
    call->over = true;
    if (waited)
        pthread_cond_signal(&call->change);
    moe_mutex_unlock(&call->lock);
    if (!waited)
        moe_native_queue_add(call->queue, call);
}

/* Gets the buffer of an argument that must have `bytes` bytes; None is absent. */
static bool take_view(struct call *call, size_t which, PyObject *from, unsigned long long bytes,
                      bool writable)
{
    Py_buffer *view = &call->views[which];
    if (from == Py_None)
        return true;
    if (PyObject_GetBuffer(from, view, writable ? PyBUF_WRITABLE : PyBUF_SIMPLE) != 0) {
        view->obj = NULL;
        return false;
    }
    if ((unsigned long long)view->len == bytes)
        return true;
    PyErr_Format(PyExc_ValueError, "buffer %zu has %zd bytes, not %llu", which, view->len, bytes);
    return false;
}

static const struct moe_client_layer *find_layer(const struct client *c, uint32_t index)
{
    const struct moe_client_info *info = moe_client_get_info(c->handle);
    for (size_t i = 0; i < info->layer_count; i++)
        if (info->layers[i].layer == index)
            return &info->layers[i];
    PyErr_SetString(PyExc_KeyError, "the model has no such layer");
    return NULL;
}

/* Positional arguments of a forward pass. */
enum {
    ARG_LAYER,
    ARG_TOKENS,
    ARG_DTYPE,
    ARG_EPOCH,
    ARG_VERSION,
    ARG_TIMEOUT_MS,
    ARG_PARTS,
    ARG_X, /* then the other tensors, in the order of VIEW_X ... */
    ARG_COUNT = ARG_X + VIEW_COUNT,
};

static bool read_tensors(struct call *call, const struct moe_client_layer *layer,
                         PyObject *const *args)
{
    struct moe_client_forward *f = &call->forward;
    /* At most 2^32 * 2^14 * 4: no overflow. */
    unsigned long long rows = (unsigned long long)f->tokens * f->hidden * moe_dtype_bytes(f->dtype);
    unsigned long long pairs = (unsigned long long)f->tokens * layer->top_k * sizeof(float);
    const unsigned long long bytes[VIEW_COUNT] = {
        [VIEW_X] = rows,
        [VIEW_Y] = rows,
        [VIEW_IDS_IN] = pairs,
        [VIEW_WEIGHTS_IN] = pairs,
        [VIEW_IDS] = pairs,
        [VIEW_WEIGHTS] = pairs,
        [VIEW_TOKEN_IDS_IN] = f->tokens * sizeof(int64_t),
        [VIEW_REHOMED] = layer->experts * sizeof(uint32_t),
    };
    for (size_t i = 0; i < VIEW_COUNT; i++)
        if (!take_view(call, i, args[ARG_X + i], bytes[i],
                       i == VIEW_Y || i == VIEW_IDS || i == VIEW_WEIGHTS || i == VIEW_REHOMED))
            return false;
    f->x = call->views[VIEW_X].buf;
    f->y = call->views[VIEW_Y].buf;
    f->topk_ids_in = call->views[VIEW_IDS_IN].buf;
    f->topk_weights_in = call->views[VIEW_WEIGHTS_IN].buf;
    f->topk_ids = call->views[VIEW_IDS].buf;
    f->topk_weights = call->views[VIEW_WEIGHTS].buf;
    f->token_ids_in = call->views[VIEW_TOKEN_IDS_IN].buf;
    f->rehomed_experts = call->views[VIEW_REHOMED].buf;
    return true;
}

static bool read_arguments(struct call *call, const struct client *c, PyObject *const *args)
{
    struct moe_client_forward *f = &call->forward;
    unsigned long long layer, tokens, dtype, epoch, version, timeout_ms, parts;
    if (!moe_native_read(args[ARG_LAYER], UINT32_MAX, &layer) ||
        !moe_native_read(args[ARG_TOKENS], UINT32_MAX, &tokens) ||
        !moe_native_read(args[ARG_DTYPE], MOE_DTYPE_BF16, &dtype) ||
        !moe_native_read(args[ARG_EPOCH], UINT64_MAX, &epoch) ||
        !moe_native_read(args[ARG_VERSION], UINT64_MAX, &version) ||
        !moe_native_read(args[ARG_TIMEOUT_MS], UINT64_MAX, &timeout_ms) ||
        !moe_native_read(args[ARG_PARTS], MOE_PARTS_SHARED, &parts))
        return false;
    const struct moe_client_layer *l = find_layer(c, (uint32_t)layer);
    if (l == NULL)
        return false;
    MOE_CLIENT_INIT(f);
    f->layer = (uint32_t)layer;
    f->tokens = (uint32_t)tokens;
    f->hidden = l->hidden;
    f->dtype = (enum moe_dtype)dtype;
    f->epoch = epoch;
    f->weights_version = version;
    f->timeout_ms = timeout_ms;
    f->parts = (enum moe_parts)parts;
    return read_tensors(call, l, args);
}

/* A call of `owner`, which is `c` or a stream of it; NULL with an exception. `token` NULL: a thread
 * waits for the call. */
static struct call *make_call(PyObject *owner, struct client *c, struct queue *q, PyObject *token,
                              PyObject *const *args)
{
    if (c->process != getpid()) {
        PyErr_SetString(PyExc_RuntimeError, "the client is of the parent process");
        return NULL;
    }
    struct call *call = PyMem_Calloc(1, sizeof *call);
    if (call == NULL)
        return (struct call *)PyErr_NoMemory();
    moe_mutex_init(&call->lock);
    moe_wait_init(&call->change);
    call->owner = Py_NewRef(owner);
    call->token = Py_NewRef(token != NULL ? token : Py_None);
    call->queue = (struct queue *)Py_NewRef((PyObject *)q);
    moe_mutex_not_shared(&call->lock);
    call->waited = token == NULL;
    if (!read_arguments(call, c, args)) {
        moe_native_call_free(call);
        return NULL;
    }
    return call;
}

/* Hands the call to the library. Without the GIL. */
static void start(struct call *call, const struct client *c, struct moe_client_stream *stream)
{
    if (stream != NULL)
        moe_client_stream_forward(stream, &call->forward, on_done, call);
    else
        moe_client_forward_async(c->handle, &call->forward, on_done, call);
}

/* Waits until the call is over, or LOOK_MS have passed. Without the GIL. */
static bool wait_some_time(struct call *call)
{
    uint64_t until = moe_clock_ns() + LOOK_MS * MOE_NS_PER_MS;
    bool in_time = true;
    moe_mutex_lock(&call->lock);
    while (!call->over && in_time)
        in_time = moe_wait_until(&call->change, &call->lock, until);
    bool over = call->over;
    moe_mutex_unlock(&call->lock);
    return over;
}

/* Leaves the call to its queue. False: it is over already. */
static bool abandon(struct call *call)
{
    moe_mutex_lock(&call->lock);
    bool over = call->over;
    call->waited = over;
    moe_mutex_unlock(&call->lock);
    return !over;
}

static PyObject *forward(PyObject *owner, struct client *c, struct moe_client_stream *stream,
                         PyObject *const *args)
{
    struct call *call = make_call(owner, c, c->leftovers, NULL, args);
    if (call == NULL)
        return NULL;
    bool over, failed = false;
    PyThreadState *state = PyEval_SaveThread();
    start(call, c, stream);
    for (;;) {
        over = wait_some_time(call);
        PyEval_RestoreThread(state);
        if (over)
            break;
        failed = PyErr_CheckSignals() != 0;
        if ((failed || c->closed) && abandon(call))
            return failed ? NULL : Py_NewRef(Py_None);
        state = PyEval_SaveThread();
    }
    PyObject *outcome = failed ? NULL : moe_native_call_outcome(call);
    moe_native_call_free(call);
    return outcome;
}

static PyObject *submit(PyObject *owner, struct client *c, struct moe_client_stream *stream,
                        PyObject *const *args)
{
    if (!PyObject_TypeCheck(args[0], moe_native_queue_type)) {
        PyErr_SetString(PyExc_TypeError, "submit takes a Queue first");
        return NULL;
    }
    struct call *call = make_call(owner, c, (struct queue *)args[0], args[1], args + 2);
    if (call == NULL)
        return NULL;
    /* The call may be over and freed before `start` returns; `owner` is the caller's. */
    PyThreadState *state = PyEval_SaveThread();
    start(call, c, stream);
    PyEval_RestoreThread(state);
    Py_RETURN_NONE;
}

static bool check_count(Py_ssize_t count, Py_ssize_t wanted)
{
    if (count == wanted)
        return true;
    PyErr_Format(PyExc_TypeError, "%zd arguments, not %zd", wanted, count);
    return false;
}

/* ------------------------------------------------------------------ Client */

#define PASS_DOC                                                                                   \
    "layer, tokens, dtype (1 float32, 2 bfloat16), epoch, weights_version, timeout_ms (0: the "    \
    "client's), parts (0 both, 1 routed, 2 shared), x, y, topk_ids_in, topk_weights_in, "          \
    "topk_ids, topk_weights, token_ids_in, rehomed_experts"

PyDoc_STRVAR(client_forward_doc,
             "forward(" PASS_DOC ") -> outcome\n\n"
             "Waits. The outcome of a success is (0, epoch, weights_version, stages or None, "
             "number of re-homed experts).\n"
             "None: the client has been closed meanwhile.");
PyDoc_STRVAR(client_submit_doc, "submit(queue, token, " PASS_DOC ")\n\n"
                                "Returns at once; `queue` gets (token, outcome).");

static PyObject *client_forward(PyObject *self, PyObject *const *args, Py_ssize_t count)
{
    return check_count(count, ARG_COUNT) ? forward(self, (struct client *)self, NULL, args) : NULL;
}

static PyObject *client_submit(PyObject *self, PyObject *const *args, Py_ssize_t count)
{
    return check_count(count, ARG_COUNT + 2) ? submit(self, (struct client *)self, NULL, args)
                                             : NULL;
}

PyDoc_STRVAR(client_close_doc,
             "close()\n\nEnds the waits of other threads. Call nothing else afterwards; the "
             "connections close with the last reference.");

static PyObject *client_close(PyObject *self, PyObject *unused)
{
    (void)unused;
    ((struct client *)self)->closed = true;
    Py_RETURN_NONE;
}

static PyObject *client_make(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"queue",      "endpoint",        "spread",       "timeout_ms",
                            "spin_us",    "tls_ca",          "tls_key",      "tls_certificate",
                            "token_file", "tls_server_name", "model_digest", "model",
                            "insecure",   "retry_ms",        "hedge",        "attempt_ms",
                            NULL};
    struct moe_client_config config = {.size = sizeof config};
    PyObject *queue;
    int spread = 0, insecure = 0, hedge = 0;
    unsigned long long timeout_ms = 0, retry_ms = 0, attempt_ms = 0;
    if (!PyArg_ParseTupleAndKeywords(
            args, kwargs, "O!spKIzzzzzzzp|KpK", names, moe_native_queue_type, &queue,
            &config.endpoint, &spread, &timeout_ms, &config.spin_us, &config.tls_ca,
            &config.tls_key, &config.tls_certificate, &config.token_file, &config.tls_server_name,
            &config.model_digest, &config.model, &insecure, &retry_ms, &hedge, &attempt_ms))
        return NULL;
    config.spread = spread != 0;
    config.spread_tokens = UINT32_MAX; /* a batch goes to one worker */
    config.timeout_ms = timeout_ms;
    config.insecure = insecure != 0;
    config.retry_ms = retry_ms;
    config.hedge = hedge != 0;
    config.attempt_ms = attempt_ms;
    allocfunc alloc = (allocfunc)PyType_GetSlot(type, Py_tp_alloc);
    struct client *c = (struct client *)alloc(type, 0);
    if (c == NULL)
        return NULL;
    c->process = getpid();
    c->leftovers = (struct queue *)Py_NewRef(queue);
    PyThreadState *state = PyEval_SaveThread();
    struct moe_status st = moe_client_connect(&config, &c->handle);
    PyEval_RestoreThread(state);
    return moe_native_made((PyObject *)c, &st);
}

/* Calls, streams and sessions hold a reference, so none is left. */
static void client_dealloc(PyObject *self)
{
    struct client *c = (struct client *)self;
    if (c->handle != NULL && c->process == getpid()) {
        PyThreadState *state = PyEval_SaveThread();
        moe_client_close(c->handle);
        PyEval_RestoreThread(state);
    }
    Py_XDECREF((PyObject *)c->leftovers);
    moe_native_free(self);
}

static PyMethodDef client_methods[] = {
    {"forward", (PyCFunction)(void (*)(void))client_forward, METH_FASTCALL, client_forward_doc},
    {"submit", (PyCFunction)(void (*)(void))client_submit, METH_FASTCALL, client_submit_doc},
    {"close", client_close, METH_NOARGS, client_close_doc},
    {NULL, NULL, 0, NULL}};

PyDoc_STRVAR(client_doc,
             "Client(queue, endpoint, spread, timeout_ms, spin_us, tls_ca, tls_key, "
             "tls_certificate,\n       token_file, tls_server_name, model_digest, model, "
             "insecure, retry_ms=0, hedge=False,\n       attempt_ms=0)\n\nA client of "
             "libmoeclient. `queue` gets calls "
             "that nothing waits for any "
             "more, with the token None.\nRaises RuntimeError(code, reason, text, "
             "retry_after_ms).");

static PyType_Slot client_slots[] = {{Py_tp_doc, (void *)(uintptr_t)client_doc},
                                     {Py_tp_new, client_make},
                                     {Py_tp_dealloc, client_dealloc},
                                     {Py_tp_methods, client_methods},
                                     {0, NULL}};

PyType_Spec moe_native_client_spec = {.name = "moed._native.Client",
                                      .basicsize = sizeof(struct client),
                                      .flags = Py_TPFLAGS_DEFAULT,
                                      .slots = client_slots};

/* ------------------------------------------------------------------ Stream */

static PyObject *stream_forward(PyObject *self, PyObject *const *args, Py_ssize_t count)
{
    struct stream *s = (struct stream *)self;
    return check_count(count, ARG_COUNT) ? forward(self, s->client, s->handle, args) : NULL;
}

static PyObject *stream_submit(PyObject *self, PyObject *const *args, Py_ssize_t count)
{
    struct stream *s = (struct stream *)self;
    return check_count(count, ARG_COUNT + 2) ? submit(self, s->client, s->handle, args) : NULL;
}

static PyObject *stream_make(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    PyObject *client;
    static char *names[] = {"client", NULL};
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O!", names, moe_native_client_type, &client))
        return NULL;
    allocfunc alloc = (allocfunc)PyType_GetSlot(type, Py_tp_alloc);
    struct stream *s = (struct stream *)alloc(type, 0);
    if (s == NULL)
        return NULL;
    s->client = (struct client *)Py_NewRef(client);
    PyThreadState *state = PyEval_SaveThread();
    struct moe_status st = moe_client_stream_open(s->client->handle, &s->handle);
    PyEval_RestoreThread(state);
    return moe_native_made((PyObject *)s, &st);
}

/* Calls hold a reference, so none is left. */
static void stream_dealloc(PyObject *self)
{
    struct stream *s = (struct stream *)self;
    if (s->handle != NULL && s->client->process == getpid()) {
        PyThreadState *state = PyEval_SaveThread();
        moe_client_stream_close(s->handle);
        PyEval_RestoreThread(state);
    }
    Py_XDECREF((PyObject *)s->client);
    moe_native_free(self);
}

static PyMethodDef stream_methods[] = {{"forward", (PyCFunction)(void (*)(void))stream_forward,
                                        METH_FASTCALL, "As Client.forward, on the stream."},
                                       {"submit", (PyCFunction)(void (*)(void))stream_submit,
                                        METH_FASTCALL, "As Client.submit, on the stream."},
                                       {NULL, NULL, 0, NULL}};

static PyType_Slot stream_slots[] = {
    {Py_tp_doc, "Stream(client)\n\nA stream to one worker. It ends with the last reference."},
    {Py_tp_new, stream_make},
    {Py_tp_dealloc, stream_dealloc},
    {Py_tp_methods, stream_methods},
    {0, NULL}};

PyType_Spec moe_native_stream_spec = {.name = "moed._native.Stream",
                                      .basicsize = sizeof(struct stream),
                                      .flags = Py_TPFLAGS_DEFAULT,
                                      .slots = stream_slots};
