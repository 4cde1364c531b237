/* SPDX-License-Identifier: Apache-2.0 */
/* Queue: a list under a mutex, and an eventfd that is written when the list stops being empty. */
#include "native.h"

#include <sys/eventfd.h>
#include <unistd.h>

static void append(struct queue *q, struct call *first, struct call *last) MOE_REQUIRES(q->lock)
{
    bool was_empty = q->first == NULL;
    if (was_empty)
        q->first = first;
    else
        q->last->next = first;
    q->last = last;
    if (was_empty)
        (void)eventfd_write(q->event, 1); /* fails for a full counter alone: readable anyway */
}

void moe_native_queue_add(struct queue *q, struct call *call)
{
    moe_mutex_lock(&q->lock);
    struct queue *heir = q->heir;
    call->next = NULL;
    if (heir == NULL)
        append(q, call, call);
    moe_mutex_unlock(&q->lock);
    /* The call holds `q`, and `q` its heir. The heir frees the call, perhaps before add returns. */
    if (heir != NULL)
        moe_native_queue_add(heir, call);
}

/* The list, which becomes empty. */
static struct call *take_all(struct queue *q)
{
    eventfd_t count;
    moe_mutex_lock(&q->lock);
    struct call *first = q->first;
    if (first != NULL)
        (void)eventfd_read(q->event, &count);
    q->first = q->last = NULL;
    moe_mutex_unlock(&q->lock);
    return first;
}

static bool add_end(PyObject *list, const struct call *call)
{
    PyObject *outcome = moe_native_call_outcome(call);
    PyObject *pair = outcome != NULL ? Py_BuildValue("(ON)", call->token, outcome) : NULL;
    bool added = pair != NULL && PyList_Append(list, pair) == 0;
    Py_XDECREF(pair);
    return added;
}

PyDoc_STRVAR(take_doc,
             "take() -> list of (token, outcome)\n\nThe calls that have ended. Does not wait.");

static PyObject *take(PyObject *self, PyObject *unused)
{
    struct queue *q = (struct queue *)self;
    (void)unused;
    PyObject *list = PyList_New(0);
    struct call *call = list != NULL ? take_all(q) : NULL;
    while (call != NULL && add_end(list, call)) {
        struct call *next = call->next;
        moe_native_call_free(call);
        call = next;
    }
    if (call != NULL) { /* out of memory: what is left can be taken later */
        struct call *last = call;
        while (last->next != NULL)
            last = last->next;
        moe_mutex_lock(&q->lock);
        append(q, call, last);
        moe_mutex_unlock(&q->lock);
        Py_CLEAR(list);
    }
    return list;
}

PyDoc_STRVAR(fileno_doc, "fileno() -> descriptor that is readable while calls can be taken");

static PyObject *fileno_of(PyObject *self, PyObject *unused)
{
    (void)unused;
    return PyLong_FromLong(((struct queue *)self)->event);
}

PyDoc_STRVAR(hand_over_doc, "hand_over(other)\n\nCalls that end, and those that have ended, go to "
                            "the Queue `other`, which has no heir.");

static PyObject *hand_over(PyObject *self, PyObject *other)
{
    struct queue *q = (struct queue *)self;
    if (!PyObject_TypeCheck(other, moe_native_queue_type) || other == self) {
        PyErr_SetString(PyExc_TypeError, "hand_over takes another Queue");
        return NULL;
    }
    struct queue *heir = (struct queue *)other;
    moe_mutex_lock(&q->lock);
    bool has_heir = q->heir != NULL;
    if (!has_heir)
        q->heir = heir;
    moe_mutex_unlock(&q->lock);
    if (!has_heir) {
        Py_INCREF(other);
        for (struct call *call = take_all(q), *next; call != NULL; call = next) {
            next = call->next;
            moe_native_queue_add(heir, call);
        }
    }
    Py_RETURN_NONE;
}

static PyObject *make(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    (void)args;
    (void)kwargs;
    allocfunc alloc = (allocfunc)PyType_GetSlot(type, Py_tp_alloc);
    struct queue *q = (struct queue *)alloc(type, 0);
    if (q == NULL)
        return NULL;
    moe_mutex_init(&q->lock);
    q->event = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
    if (q->event < 0) {
        PyErr_SetFromErrno(PyExc_OSError);
        Py_DECREF(q);
        return NULL;
    }
    return (PyObject *)q;
}

/* Each call in the list holds a reference, so the list is empty. */
static void dealloc(PyObject *self)
{
    struct queue *q = (struct queue *)self;
    moe_mutex_not_shared(&q->lock);
    if (q->event >= 0)
        close(q->event);
    Py_XDECREF((PyObject *)q->heir);
    moe_mutex_destroy(&q->lock);
    moe_native_free(self);
}

static PyMethodDef methods[] = {{"take", take, METH_NOARGS, take_doc},
                                {"fileno", fileno_of, METH_NOARGS, fileno_doc},
                                {"hand_over", hand_over, METH_O, hand_over_doc},
                                {NULL, NULL, 0, NULL}};

static PyType_Slot slots[] = {{Py_tp_doc, "Calls that have ended, for one taker."},
                              {Py_tp_new, make},
                              {Py_tp_dealloc, dealloc},
                              {Py_tp_methods, methods},
                              {0, NULL}};

PyType_Spec moe_native_queue_spec = {.name = "moed._native.Queue",
                                     .basicsize = sizeof(struct queue),
                                     .flags = Py_TPFLAGS_DEFAULT,
                                     .slots = slots};
