/* libmoeclient: the C client of moed.
 *
 * Shapes: T tokens, H hidden width, K experts per token, E experts; row-major, little-endian.
 * Threads: every function may be called from any thread; one client object may be shared.
 * Errors: a `struct moe_status` (base/status.h) with the code, reason and text the server sent.
 *
 * Arguments are checked before anything is sent. x is sent from the caller's memory and y is
 * written straight into it. A forward that fails with UNAVAILABLE is tried again, on another worker
 * where there is one, after a growing pause or what the server asked for: max_attempts times at
 * most, or, where it is to be kept for Backward, until its time is over, as calls of training are.
 * Nothing else here is tried again. The text of an UNAVAILABLE begins with the worker's endpoint.
 * Training is in moe/client_training.h. */
#ifndef MOE_CLIENT_H
#define MOE_CLIENT_H

#include "base/status.h"
#include "moe/types.h"

#ifdef __cplusplus
extern "C" {
#endif

struct moe_client;

struct moe_client_config {
    const char *endpoint;   /* "host:port" of any worker of the group */
    bool spread;            /* learn the other workers and spread requests and batches over them */
    uint32_t spread_tokens; /* with spread: a batch of more tokens than this is split over up to
                               as many workers as keep the parts below it, 0 = 512 */
    uint32_t connections;   /* connections per worker, 0 = 1 */
    uint64_t timeout_ms;    /* default per call, 0 = 60000 */
    uint32_t max_attempts;  /* tries of a forward that fails with UNAVAILABLE, 0 = 4; without
                               save_session */
    uint32_t spin_us;       /* after each answer a connection's thread waits this long for the next
                               without sleeping: less latency for a processor each. 0 = never */
};

/* Connects, and asks the server for its limits and model. */
struct moe_status moe_client_connect(const struct moe_client_config *config,
                                     struct moe_client **out) MOE_CHECKED;
/* Waits for calls in flight. Streams must be closed first. Not from a callback. NULL is ignored. */
void moe_client_close(struct moe_client *c);

/* One layer, as LayerInfo in moe/v1/types.proto. */
struct moe_client_layer {
    uint32_t layer;               /* the model's layer index */
    uint32_t hidden;              /* H */
    uint32_t experts;             /* E */
    uint32_t zero_experts;        /* ids E .. E + zero_experts - 1 are the identity */
    uint32_t top_k;               /* K */
    uint32_t intermediate;        /* inner width of a routed expert */
    uint32_t shared_intermediate; /* of the shared expert; 0 = none */
};

/* The server and its model, as GetServerInfo and GetModel in moe/v1/expert.proto tell. Everything
 * is the client's. */
struct moe_client_info {
    const char *model, *family, *version, *backend, *coordinator;
    uint64_t epoch, weights_version, max_message_bytes;
    uint32_t max_tokens_per_request, max_tokens_per_step;
    const char *const *workers; /* endpoints by slot */
    size_t worker_count;
    const struct moe_client_layer *layers;
    size_t layer_count;
};
/* As of moe_client_connect. */
const struct moe_client_info *moe_client_get_info(const struct moe_client *c);

/* Nanoseconds on the server that answered; see StageTimes in moe/v1/types.proto. A batch that was
 * split reports the slowest of its parts. */
struct moe_client_stages {
    uint64_t queue_ns, copy_in_ns, router_ns, prepare_ns, dispatch_ns, gemm1_ns, gemm2_ns,
        shared_ns, combine_ns, step_ns, copy_out_ns, server_ns;
    uint32_t step_tokens, steps;
};

/* One forward pass. All memory is the caller's and must stay until the call is finished; a call
 * that fails may leave anything in the memory of the answer. A call that runs out of time finishes
 * as soon as the transport has let go of x, which with a server that does not read can be later. */
struct moe_client_forward {
    /* request */
    uint32_t layer;                  /* the model's layer index */
    uint32_t tokens, hidden;         /* T >= 1, H */
    enum moe_dtype dtype;            /* of x and y */
    const void *x;                   /* [T,H] */
    const int32_t *topk_ids_in;      /* [T,K] or NULL = the server routes; -1 = not routed */
    const float *topk_weights_in;    /* [T,K] or NULL = the server weighs */
    uint64_t epoch, weights_version; /* 0 = any */
    uint64_t timeout_ms;             /* 0 = the client's default */
    const char *save_session;        /* training: keep this pass for Backward under this session,
                                        see moe/client_training.h; NULL = no */
    uint64_t save_micro_batch_id;    /* and this id, at least 1 */
    /* answer */
    void *y;             /* [T,H] */
    int32_t *topk_ids;   /* [T,K], or NULL when not wanted (NULL together with the weights) */
    float *topk_weights; /* [T,K] */
    uint64_t answered_epoch, answered_weights_version;
    bool saved;             /* the pass is kept for Backward */
    bool saved_activations; /* and the worker's device keeps what Backward would compute again, as
                               long as it has room */
    struct moe_client_stages stages;
};

/* Blocks until y is there. */
struct moe_status moe_client_forward(struct moe_client *c,
                                     struct moe_client_forward *f) MOE_CHECKED;

/* Returns at once; `done` is called exactly once, on a thread of the client (it must not block, and
 * may start further calls), after which `f` is the caller's again. Only when there is no memory to
 * begin with is it called before this returns. */
typedef void (*moe_client_done)(void *ctx, struct moe_client_forward *f, struct moe_status status);
void moe_client_forward_async(struct moe_client *c, struct moe_client_forward *f,
                              moe_client_done done, void *ctx);

/* One long-lived stream to one worker: less cost per call, no automatic retry, no splitting. */
struct moe_client_stream;
struct moe_status moe_client_stream_open(struct moe_client *c,
                                         struct moe_client_stream **out) MOE_CHECKED;
/* As moe_client_forward_async; answers may come in any order. save_session must be NULL. */
void moe_client_stream_forward(struct moe_client_stream *s, struct moe_client_forward *f,
                               moe_client_done done, void *ctx);
/* Waits for what is in flight. Not from a callback. NULL is ignored. */
void moe_client_stream_close(struct moe_client_stream *s);

#ifdef __cplusplus
}
#endif

#endif
