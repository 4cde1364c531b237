/* SPDX-License-Identifier: Apache-2.0 */
/* The objects of moed._native; only the files of this room use it. See README.md. */
#ifndef MOE_PYTHON_NATIVE_H
#define MOE_PYTHON_NATIVE_H

#include <Python.h>

#include "base/mutex.h"
#include "moe/client.h"
#include "moe/regions.h"

#include <pthread.h>
#include <sys/types.h>

/* Calls that have ended, in that order, for one taker. */
struct queue {
    PyObject ob_base;
    struct moe_mutex lock;
    int event; /* an eventfd: readable while there are calls */
    MOE_GUARDED_BY(lock) struct {
        struct call *first, *last;
        struct queue *heir; /* gets all calls from now on; NULL = none. A strong reference */
    };
};

/* A client of libmoeclient. */
struct client {
    PyObject ob_base;
    struct moe_client *handle;
    struct queue *leftovers; /* gets calls that nothing waits for any more */
    pid_t process;
    bool closed; /* blocking calls end at once */
};

struct stream {
    PyObject ob_base;
    struct moe_client_stream *handle;
    struct client *client;
};

enum {
    VIEW_X,
    VIEW_Y,
    VIEW_IDS_IN,
    VIEW_WEIGHTS_IN,
    VIEW_IDS,
    VIEW_WEIGHTS,
    VIEW_TOKEN_IDS_IN,
    VIEW_REHOMED,
    VIEW_COUNT
};

/* One forward pass. Its owner is the library until `done`, then the queue or the thread that waits.
 * Made and freed with the GIL. */
struct call {
    struct moe_client_forward forward;
    struct moe_status status;
    Py_buffer views[VIEW_COUNT]; /* obj NULL = absent */
    PyObject *owner;             /* Client or Stream */
    PyObject *token;             /* for the taker */
    struct queue *queue;
    struct call *next;
    struct moe_mutex lock;
    pthread_cond_t change;
    MOE_GUARDED_BY(lock) bool over;
    MOE_GUARDED_BY(lock) bool waited; /* a thread waits for it: it does not go into the queue */
};

/* Memory of a Region object that has gone. */
struct dead_region {
    struct moe_client_region *handle;
    struct dead_region *next;
};

struct session {
    PyObject ob_base;
    struct moe_client_session *handle;
    struct client *client;
    struct dead_region *dead; /* until the next `create`; with the GIL */
};

struct region {
    PyObject ob_base;
    struct moe_client_region *handle;
    struct session *session;
    bool in_device;            /* the host cannot access it */
    struct dead_region *grave; /* owned; for the end of the object */
    PyObject *weak_references;
};

/* Of the module; set once, when it is made. */
extern PyTypeObject *moe_native_queue_type, *moe_native_client_type, *moe_native_stream_type,
    *moe_native_session_type, *moe_native_region_type, *moe_native_device_type,
    *moe_native_device_request_type;
extern PyType_Spec moe_native_queue_spec, moe_native_client_spec, moe_native_stream_spec,
    moe_native_session_spec, moe_native_region_spec, moe_native_device_spec,
    moe_native_device_request_spec;

/* False with an exception if the session is of the parent process. */
bool moe_native_session_check(const struct session *s);
/* Makes the memory of a new Region; runs without the GIL. */
typedef struct moe_status (*moe_native_region_maker)(void *ctx, const char *name, size_t bytes,
                                                     struct moe_client_region **out);
/* (0, Region) or a failure; first gives back the memory of regions that have gone. NULL with an
 * exception. */
PyObject *moe_native_region_create(struct session *s, PyObject *args, moe_native_region_maker maker,
                                   void *ctx, bool in_device);
/* Reads the positional arguments of Session.submit: MOE_NATIVE_ARGS of them. The regions are
 * borrowed. False with an exception. */
enum { MOE_NATIVE_TENSORS = 7, MOE_NATIVE_NUMBERS = 7 };
enum { MOE_NATIVE_ARGS = MOE_NATIVE_NUMBERS + 2 * MOE_NATIVE_TENSORS };
bool moe_native_read_request(PyObject *const *args, Py_ssize_t count,
                             struct moe_client_session_forward *f);
/* The outcome of a request of a session. */
PyObject *moe_native_session_outcome(const struct moe_status *st,
                                     const struct moe_client_session_answer *a);

/* Adds a call that has ended. Any thread, without the GIL. */
void moe_native_queue_add(struct queue *q, struct call *call);
/* Frees a call that has ended. */
void moe_native_call_free(struct call *call);
/* The outcome of a call that has ended; NULL with an exception. */
PyObject *moe_native_call_outcome(const struct call *call);
/* (code, reason, text, retry_after_ms); NULL with an exception. */
PyObject *moe_native_failure(const struct moe_status *st);
/* A new object if `st` says that it has opened. Otherwise drops it: NULL with an exception. */
PyObject *moe_native_made(PyObject *self, const struct moe_status *st);
/* Frees an object of a heap type. */
void moe_native_free(PyObject *self);
/* Reads an unsigned integer argument of at most `max`; false with an exception. */
bool moe_native_read(PyObject *from, unsigned long long max, unsigned long long *to);

#endif
