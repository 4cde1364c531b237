/* SPDX-License-Identifier: Apache-2.0 */
/* Internal state of the service: service.c (life, loop, events of other
 * threads), session.c (streams of workers, actions), agreement.c (on the weights), admin.c
 * (operators), model_calls.c (added models), observe.c (metrics). Private to these files.
 *
 * The owner thread is the one in moe_coordinator_run. Functions without another mark run there. */
#ifndef MOE_COORDINATOR_SERVICE_STATE_H
#define MOE_COORDINATOR_SERVICE_STATE_H

#include "access/guard.h"
#include "base/clock.h"
#include "base/mutex.h"
#include "coordinator/events.h"
#include "coordinator/membership.h"
#include "coordinator/models.h"
#include "coordinator/moves/moves.h"
#include "coordinator/saved.h"
#include "coordinator/service.h"
#include "coordinator/weights.h"
#include "daemon/metrics.h"
#include "daemon/metrics_http.h"
#include "daemon/process_metrics.h"
#include "inspect/metrics_method.h"
#include "rpc/server.h"

#include "moe/v1/admin.pb-c.h"
#include "moe/v1/coordinator.pb-c.h"
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

enum { REPORTED_NOTHING = -1, REPORTED_AWAY = -2 };

struct observed {
    struct moe_metrics *registry;
    struct moe_metrics_http *http; /* NULL when off */
    struct moe_process_metrics process;
    struct moe_gauge *epoch, *last_epoch, *state[MOE_GROUP_FAILED + 1], *taken;
    struct moe_gauge *slots, *slots_max, *spares, *models[MOE_MODEL_WAITING + 1];
    struct moe_gauge *live_slots, *view_experts[MOE_PLACEMENT_SLOTS_MAX + 1];
    uint64_t counted_epoch; /* of view_experts */
    uint32_t counted_version;
    struct moe_histogram *recovery_seconds;
    uint64_t seen_epoch;  /* in force at the last look */
    uint64_t view_end_ns; /* the last view ended then; 0 = none has, or one is in force */
    struct moe_gauge *lease[MOE_PLACEMENT_SLOTS_MAX];
    struct moe_counter *reforms[MOE_CAUSE_COUNT];
    struct moe_counter *automatic_moves[2]; /* undone, moved */
    struct moe_histogram *save_seconds;
    struct moe_counter *save_failures;
    struct moe_inspect_metrics shown; /* by GetMetrics */
    struct moe_gauge *saved;          /* 1: the last write succeeded */
    struct moe_counter *messages, *malformed;
    struct moe_gauge *leads, *leader_lease, *leader_age, *etcd_away;
    struct moe_counter *terms, *etcd_errors;
    uint64_t seen_causes[MOE_CAUSE_COUNT]; /* of the machine, at the last look */
    uint64_t seen_moves[2];                /* of the machine of moves, in the same way */
    int reported_state; /* to the service manager, with reported_taken workers; REPORTED_... */
    uint32_t reported_taken, reported_size;
    struct moe_histogram *heartbeat_waited, *others_waited; /* seconds of messages in the inbox */
};

/* For probes: any thread reads it. */
struct health {
    struct moe_progress *progress;
    uint32_t slots;
    atomic_int state;        /* enum moe_group_state; 0 = this process does not lead */
    atomic_uint taken, size; /* workers in slots with experts; these slots */
    atomic_bool store_away;  /* etcd does not answer, or this process cannot use what it holds */
};

enum admin_method {
    ADMIN_STATUS,
    ADMIN_PLACEMENT,
    ADMIN_DRAIN,
    ADMIN_CORDON,
    ADMIN_SCALE,
    ADMIN_SHUTDOWN,
    ADMIN_ACCEPT,
    ADMIN_EVENTS,
    ADMIN_LOAD,
    ADMIN_UNLOAD,
    ADMIN_MODELS,
    ADMIN_REBALANCE,
    ADMIN_METHODS
};

/* A call of an operator. Most are answered by the event that brings them. Those of loads and
 * unloads wait for the models' machine; they are freed when the call is over. */
struct admin_call {
    struct event event, done_event;
    struct admin_call *next;   /* of those that wait */
    struct moe_rpc_call *call; /* one reference */
    struct moe_rpc_msg *received;
    enum admin_method method;
    uint64_t number; /* in the machine of models or moves; 0 = it does not wait */
};

/* The digests of one added model. */
struct added_weights {
    uint32_t number; /* 0 = free */
    bool unsaved;
    struct moe_weights *weights;
};

/* Context of a method's handlers. */
struct admin_context {
    struct moe_coordinator *coordinator;
    enum admin_method method;
};

struct moe_coordinator {
    struct moe_membership *machine;
    struct moe_store *store; /* NULL: no durable state */
    struct moe_etcd *etcd;   /* NULL: this process always leads */
    /* The machines are those of the group. Without it they are empty and get no input. */
    bool leads;
    bool unfit;     /* the state in etcd cannot be used here */
    bool unchecked; /* etcd has not answered yet: nothing is known of the prefix and its group */
    struct moe_status refused; /* why the process ends by itself; MOE_OK = it does not */
    struct {
        struct moe_membership *machine;
        struct moe_added *models;
        struct moe_moves *moves;
        struct moe_weights *weights;
    } idle;             /* the empty machines while this process leads; NULL while it does not */
    uint64_t group_id;  /* of the group that this process has read the state of; 0 = none yet */
    char *remember_dir; /* keeps `group_id`; NULL = nothing does */
    struct moe_membership_config machine_config; /* without group_id */
    struct moe_rebalancer_policy rebalance;
    struct moe_weights *weights;
    bool weights_unsaved; /* their record has begun, and the store does not have it */
    struct moe_added *models;
    struct moe_moves *moves;
    struct added_weights added[MOE_ADDED_MAX];
    struct admin_call *waiting; /* calls that wait for `models` or `moves` */
    uint64_t next_call;
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

/* ------------------------------------------------------------------ service.c */

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

/* ------------------------------------------------------------------ leadership.c */

/* Opens the store, and makes the machines where no election comes first. */
struct moe_status
moe_coordinator__open_state(struct moe_coordinator *c,
                            const struct moe_coordinator_config *config) MOE_CHECKED;
/* The servers listen: takes part in the election. */
void moe_coordinator__join_election(struct moe_coordinator *c,
                                    const struct moe_coordinator_config *config);
/* Begins or ends to lead, if something has changed; `run`: takes etcd's answers first. Call before
 * each input of the machines. */
void moe_coordinator__look(struct moe_coordinator *c, bool run);
/* What a caller gets if this process does not lead, with the leader's address for `sessions` or
 * operators; success if it does. */
struct moe_status moe_coordinator__refusal(const struct moe_coordinator *c,
                                           bool sessions) MOE_CHECKED;
/* With etcd: the group has this id. Errors: those of moe_store_remember. */
struct moe_status moe_coordinator__remember_group(struct moe_coordinator *c,
                                                  uint64_t group_id) MOE_CHECKED;
/* Gives the leadership back. */
void moe_coordinator__leave_election(struct moe_coordinator *c);
void moe_coordinator__close_state(struct moe_coordinator *c);

/* ------------------------------------------------------------------ session.c */

/* Carries out the machines' actions. Call after every input. */
void moe_coordinator__act(struct moe_coordinator *c);
/* Makes the state of both machines durable, and the digests before it. */
struct moe_status moe_coordinator__save(struct moe_coordinator *c) MOE_CHECKED;
/* Nothing if the stream has ended. */
void moe_coordinator__send_move_order(struct moe_coordinator *c, const struct moe_moves_action *a);
/* The same. `info`: of the order's model. */
void moe_coordinator__send_order(struct moe_coordinator *c, const struct moe_added_action *a,
                                 const struct moe_added_info *info);
/* Logs `text` and lists it as an event. */
void moe_coordinator__note(struct moe_coordinator *c, enum moe_log_level level,
                           enum moe_membership_event event, uint32_t slot, const char *text);
struct moe_membership_layer moe_coordinator__read_layer(const Moe__V1__LayerInfo *l);
/* Milliseconds since 1970. */
int64_t moe_coordinator__unix_ms(void);
struct moe_rpc_method moe_coordinator__session_method(struct moe_coordinator *c);
void moe_coordinator__end_sessions(struct moe_coordinator *c, const struct moe_status *why);
/* Ends streams that have sent no message for too long after their opening. */
void moe_coordinator__drop_silent(struct moe_coordinator *c, uint64_t now_ns);

/* ------------------------------------------------------------------ agreement.c */

/* Reads the record of the model's digests. */
struct moe_status moe_coordinator__restore_weights(struct moe_coordinator *c) MOE_CHECKED;
/* Writes the records that have changed. */
struct moe_status moe_coordinator__save_weights(struct moe_coordinator *c) MOE_CHECKED;
/* Messages Digests and Loaded; inputs of the machine. `model`: 0 = the default model. */
void moe_coordinator__receive_digests(struct moe_coordinator *c, uint64_t now_ns, uint64_t stream,
                                      uint32_t model, const uint8_t *part, size_t length);
void moe_coordinator__receive_loaded(struct moe_coordinator *c, uint64_t now_ns, uint64_t stream,
                                     const Moe__V1__Loaded *loaded, const struct moe_status *error);
/* Compares what the process in `slot` has loaded of an added model with the others. Errors: those
 * of moe_weights_check. */
struct moe_status moe_coordinator__compare_added(struct moe_coordinator *c, uint32_t slot,
                                                 const struct moe_added_info *info) MOE_CHECKED;
/* The same for experts of the default model that the slot has fetched for placement `p`. The worker
 * keeps its slot. */
struct moe_status moe_coordinator__compare_fetched(struct moe_coordinator *c, uint32_t slot,
                                                   const struct moe_placement *p) MOE_CHECKED;
/* Digest of an added model, or "". */
const char *moe_coordinator__added_digest(const struct moe_coordinator *c,
                                          const struct moe_added_info *info);
/* Forgets all digests of an added model. */
void moe_coordinator__forget_added(struct moe_coordinator *c, uint32_t number);
void moe_coordinator__destroy_weights(struct moe_coordinator *c);
/* Forgets the record of a model ("" = the default one); `forgotten`: its digest, or "". Errors:
 * MOE_INVALID_ARGUMENT (no reason), MOE_NOT_FOUND (no such model), MOE_FAILED_PRECONDITION (a slot
 * has a worker), those of the store. */
struct moe_status moe_coordinator__accept_model(struct moe_coordinator *c, const char *model,
                                                const char *reason,
                                                char forgotten[MOE_SHA256_HEX]) MOE_CHECKED;

/* ------------------------------------------------------------------ model_calls.c */

/* Carries out the actions of the models' machine, after those of the other one. */
void moe_coordinator__act_models(struct moe_coordinator *c);
/* Messages of workers; `slot` is that of the sender. */
void moe_coordinator__receive_model_report(struct moe_coordinator *c, uint32_t slot,
                                           const Moe__V1__ModelReport *r,
                                           const struct moe_status *error);
/* Methods of operators. A failure is the answer; otherwise `a` waits or was answered. */
struct moe_status moe_coordinator__load_model(struct moe_coordinator *c, struct admin_call *a,
                                              const void *message) MOE_CHECKED;
struct moe_status moe_coordinator__unload_model(struct moe_coordinator *c, struct admin_call *a,
                                                const void *message) MOE_CHECKED;
struct moe_status moe_coordinator__list_models(struct moe_coordinator *c, struct admin_call *a,
                                               const void *message) MOE_CHECKED;
/* The call is over: it does not wait any more. */
void moe_coordinator__forget_call(struct moe_coordinator *c, struct admin_call *a);
/* Takes a call that waits out of the list; NULL if there is none of this number. */
struct admin_call *moe_coordinator__take_waiting(struct moe_coordinator *c, uint64_t number);
void moe_coordinator__wait_for_answer(struct moe_coordinator *c, struct admin_call *a,
                                      uint64_t number);
/* Answers all calls that wait. */
void moe_coordinator__end_model_calls(struct moe_coordinator *c, const struct moe_status *why);

/* Of the processes that have slots. */
void moe_coordinator__list_slots(const struct moe_coordinator *c,
                                 struct moe_added_slot slots[MOE_PLACEMENT_SLOTS_MAX]);

/* ------------------------------------------------------------------ moves/move_calls.c */

/* Carries out the actions of the machine of moves, after those of the others. */
void moe_coordinator__act_moves(struct moe_coordinator *c);
/* Messages of workers; `slot` is that of the sender. Errors: those of moe_moves_on_rows. */
struct moe_status moe_coordinator__receive_rows(struct moe_coordinator *c, uint32_t slot,
                                                const Moe__V1__ExpertRows *r) MOE_CHECKED;
void moe_coordinator__receive_move_report(struct moe_coordinator *c, uint32_t slot,
                                          const Moe__V1__ModelReport *r,
                                          const struct moe_status *error);
/* As the methods above. */
struct moe_status moe_coordinator__rebalance(struct moe_coordinator *c, struct admin_call *a,
                                             const void *message) MOE_CHECKED;

/* ------------------------------------------------------------------ admin.c, observe.c */

void moe_coordinator__reply(struct moe_rpc_call *call, const ProtobufCMessage *m);
void moe_coordinator__fill_layer(const struct moe_membership_layer *l, Moe__V1__LayerInfo *out);

/* Fills ADMIN_METHODS entries. */
void moe_coordinator__admin_methods(struct moe_coordinator *c, struct moe_rpc_method *out);

struct moe_status moe_coordinator__observe_start(struct moe_coordinator *c,
                                                 const char *listen) MOE_CHECKED;
void moe_coordinator__observe(struct moe_coordinator *c);
void moe_coordinator__observe_stop(struct moe_coordinator *c);
/* "serving"; `state` is one of enum moe_group_state. */
const char *moe_coordinator__state_name(int state);

/* `step_ms`: as in the configuration. */
struct moe_status moe_coordinator__health_create(struct moe_coordinator *c,
                                                 uint64_t step_ms) MOE_CHECKED;
/* The servers run: tells their health services from now on. */
struct moe_status moe_coordinator__health_watch(struct moe_coordinator *c) MOE_CHECKED;

#endif
