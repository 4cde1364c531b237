/* SPDX-License-Identifier: Apache-2.0 */
/* Internal state of the service: service.c (life, loop), inbox.c (events of other threads),
 * session.c (streams of workers, actions), agreement.c (on the weights), admin.c (operators),
 * observe.c (metrics). Private to these files.
 *
 * The owner thread is the one in moe_coordinator_run. Functions without another mark run there. */
#ifndef MOE_COORDINATOR_SERVICE_STATE_H
#define MOE_COORDINATOR_SERVICE_STATE_H

#include "access/guard.h"
#include "base/clock.h"
#include "base/mutex.h"
#include "coordinator/events.h"
#include "coordinator/membership.h"
#include "coordinator/service.h"
#include "coordinator/store.h"
#include "coordinator/weights.h"
#include "daemon/metrics.h"
#include "daemon/metrics_http.h"
#include "daemon/process_metrics.h"
#include "rpc/server.h"

#include "moe/v1/types.pb-c.h"

#include <protobuf-c/protobuf-c.h>
#include <stdatomic.h>
#include <uv.h>

enum { SESSIONS_PER_CONNECTION = 8 }; /* a worker has one, and another while it reconnects */

/* A message of a gRPC thread to the owner thread. Embedded in its stream or call, so that no
 * allocation can fail: a stream has at most one pending message, and a call ends once. */
struct event {
    struct event *next;  /* in the inbox */
    uint64_t arrived_ns; /* when the gRPC thread posted it; never decreases along the inbox */
    void (*run)(struct moe_coordinator *c, struct event *e);
};

/* One Session stream. A gRPC thread creates it; then it belongs to the owner thread, except
 * `received`, which passes to it with the event. */
struct session {
    struct event opened_event, message_event, done_event;
    struct session *previous, *next; /* in the coordinator's list */
    struct moe_rpc_call *call;       /* one reference */
    struct moe_rpc_msg *received;    /* NULL: the worker has half-closed */
    uint64_t stream;                 /* its number in the machine */
    uint64_t opened_ns;
    bool received_any; /* a message has arrived: a Register, as any other ends the stream */
    bool ended;        /* finish or fail was called; the machine no longer uses it */
};

struct observed {
    struct moe_metrics *registry;
    struct moe_metrics_http *http; /* NULL when off */
    struct moe_process_metrics process;
    struct moe_gauge *epoch, *last_epoch, *state[MOE_GROUP_FAILED + 1], *taken;
    struct moe_gauge *slots;
    struct moe_histogram *recovery_seconds;
    uint64_t seen_epoch;  /* in force at the last look */
    uint64_t view_end_ns; /* the last view ended then; 0 = none has, or one is in force */
    struct moe_gauge *lease[MOE_PLACEMENT_SLOTS_MAX];
    struct moe_counter *reforms[MOE_CAUSE_COUNT];
    struct moe_histogram *save_seconds;
    struct moe_counter *save_failures;
    struct moe_counter *messages, *malformed;
    int reported_state; /* to the service manager, with reported_taken workers; -1 = nothing */
    uint32_t reported_taken;
    struct moe_histogram *heartbeat_waited, *others_waited; /* seconds of messages in the inbox */
};

/* For probes: any thread reads it. */
struct health {
    struct moe_progress *progress;
    uint32_t slots;
    atomic_int state; /* enum moe_group_state */
    atomic_uint taken;
};

enum admin_method {
    ADMIN_STATUS,
    ADMIN_PLACEMENT,
    ADMIN_DRAIN,
    ADMIN_CORDON,
    ADMIN_SHUTDOWN,
    ADMIN_ACCEPT,
    ADMIN_EVENTS,
    ADMIN_METHODS
};

/* Context of a method's handlers. */
struct admin_context {
    struct moe_coordinator *coordinator;
    enum admin_method method;
};

struct moe_coordinator {
    struct moe_membership *machine;
    struct moe_store *store; /* NULL: no durable state */
    struct moe_weights *weights;
    bool weights_unsaved; /* their record has begun, and the store does not have it */
    uint32_t lease_ms;
    uint64_t started_ns;
    int64_t started_unix_ms;
    struct moe_events events;
    struct observed seen;
    struct health health;

    uv_loop_t loop;
    uv_async_t wake;
    uv_timer_t timer;
    uv_signal_t signals[2];
    uv_poll_t hangup;
    uv_timer_t watchdog;
    uv_timer_t turn;          /* its `data` is the main loop of `health` */
    uint64_t first_signal_ns; /* 0 = none yet */
    bool loop_made, quit, exited;
    atomic_uint stops_requested; /* any thread */
    unsigned stops_done;

    struct moe_mutex inbox_lock;
    MOE_GUARDED_BY(inbox_lock) struct {
        struct event *inbox_first, *inbox_last;
    };

    struct moe_guard *guard; /* borrowed; NULL: every caller may do everything */
    struct moe_rpc_server *server, *control_server; /* the latter NULL: sessions use the former */
    struct admin_context admin[ADMIN_METHODS];
    struct session *sessions;  /* the youngest comes first */
    atomic_uint session_count; /* any thread */
    atomic_uint admin_calls;   /* any thread; calls in the inbox or in the owner thread */
    atomic_uint_fast64_t next_stream;
    uint64_t secret_epoch;   /* epoch of `secret`; 0 = none */
    uint8_t secret[16];      /* see Prepare.secret */
    uint8_t received[32768]; /* the current message, in one piece */
};

/* ------------------------------------------------------------------ inbox.c */

/* [any thread] Wakes the owner thread. */
void moe_coordinator__post(struct moe_coordinator *c, struct event *e);
/* Empties the inbox; the oldest event comes first. */
struct event *moe_coordinator__take_events(struct moe_coordinator *c);
/* `m` in memory that the caller frees; NULL when there is none. */
uint8_t *moe_coordinator__pack(const ProtobufCMessage *m, size_t *length);

/* For protobuf-c's structs, which have char * members; packing only reads. */
/* Texts of `out` are those of `host`. In admin.c. */
void moe_coordinator__fill_host(const struct moe_membership_host *host, Moe__V1__Host *out);

static inline char *moe_coordinator__text(const char *s)
{
    return (char *)(uintptr_t)s;
}

/* ------------------------------------------------------------------ session.c */

/* Carries out the machine's actions. Call after every input. */
void moe_coordinator__act(struct moe_coordinator *c);
/* Logs `text` and lists it as an event. */
void moe_coordinator__note(struct moe_coordinator *c, enum moe_log_level level,
                           enum moe_membership_event event, uint32_t slot, const char *text);
/* Milliseconds since 1970. */
int64_t moe_coordinator__unix_ms(void);
struct moe_rpc_method moe_coordinator__session_method(struct moe_coordinator *c);
void moe_coordinator__end_sessions(struct moe_coordinator *c);
/* Ends streams that have sent no message for too long after their opening. */
void moe_coordinator__drop_silent(struct moe_coordinator *c, uint64_t now_ns);

/* ------------------------------------------------------------------ agreement.c */

/* Reads the record of the model's digests. */
struct moe_status moe_coordinator__restore_weights(struct moe_coordinator *c) MOE_CHECKED;
/* Writes the record if it has changed. */
struct moe_status moe_coordinator__save_weights(struct moe_coordinator *c) MOE_CHECKED;
/* Messages Digests and Loaded; inputs of the machine. */
void moe_coordinator__receive_digests(struct moe_coordinator *c, uint64_t now_ns, uint64_t stream,
                                      const uint8_t *part, size_t length);
void moe_coordinator__receive_loaded(struct moe_coordinator *c, uint64_t now_ns, uint64_t stream,
                                     uint32_t version, const struct moe_status *error);
/* Forgets the record; `forgotten`: its digest, or "". Errors: MOE_INVALID_ARGUMENT (no reason),
 * MOE_FAILED_PRECONDITION (a slot has a worker), those of the store. */
struct moe_status moe_coordinator__accept_model(struct moe_coordinator *c, const char *reason,
                                                char forgotten[MOE_SHA256_HEX]) MOE_CHECKED;

/* ------------------------------------------------------------------ admin.c, observe.c */

/* Fills ADMIN_METHODS entries. */
void moe_coordinator__admin_methods(struct moe_coordinator *c, struct moe_rpc_method *out);

struct moe_status moe_coordinator__observe_start(struct moe_coordinator *c,
                                                 const char *listen) MOE_CHECKED;
void moe_coordinator__observe(struct moe_coordinator *c);
void moe_coordinator__observe_stop(struct moe_coordinator *c);
/* "serving"; `state` is one of enum moe_group_state. */
const char *moe_coordinator__state_name(int state);

/* ------------------------------------------------------------------ health.c */

/* `step_ms`: as in the configuration. */
struct moe_status moe_coordinator__health_create(struct moe_coordinator *c,
                                                 uint64_t step_ms) MOE_CHECKED;
/* The servers run: tells their health services from now on. */
struct moe_status moe_coordinator__health_watch(struct moe_coordinator *c) MOE_CHECKED;

#endif
