/* SPDX-License-Identifier: Apache-2.0 */
/* libmoeclient: the C client of moed.
 *
 * Shapes: T tokens, H hidden width, K experts per token, E experts; row-major, little-endian.
 * Threads: every function may be called from any thread. Threads may share one client.
 * fork: a child that fork leaves without exec cannot use its parent's client. It can open another
 *   one only if the parent has none (else FAILED_PRECONDITION): gRPC does not survive fork.
 * Errors: a `struct moe_status` (moe/status.h) with the code, reason and text that the server sent.
 * The text of an UNAVAILABLE begins with the worker's endpoint.
 *
 * The library checks arguments before it sends anything. It sends x from the caller's memory and
 * writes y into the caller's memory.
 *
 * Large batches. A large x (`connections` below) goes to its worker in parts, by rows, over several
 * connections. If the weights change meanwhile, it is sent once more as one request; if it
 * is too large for that, it fails with ABORTED/VERSION_MISMATCH. A pass that is retained is never
 * cut.
 *
 * Retries. Only a forward that fails with UNAVAILABLE is retried: up to max_attempts times, or for
 * retry_ms, on another worker if there is one, after a growing pause or the server's hint. With
 * `hedge` there is no pause until all workers have refused, and attempt_ms limits how long each may
 * take. If the pass is to be
 * retained for Backward, the library retries until the call's time is over. Training calls have
 * their own rule (moe/client_training.h). UNAVAILABLE/MODEL_LOADING is retried likewise: a slot has
 * not loaded the model yet.
 *
 * Trust. A worker of the same user on this host is reached by its Unix socket, and knows the user.
 * Other connections use TLS if the config, or the environment, names a CA. The worker's certificate
 * must lead to it and name the host of the endpoint. A certificate of the client, or a token, shows
 * who it is. A token is not sent to another host without TLS unless `insecure` allows it. Files are
 * read again when they change. New ones that do not validate are logged to stderr, and the old ones
 * stay in use. UNAUTHENTICATED and PERMISSION_DENIED say which role is missing.
 *
 * Sizes. Structs that the caller owns begin with `size`. Set it to the size that your program was
 * compiled with, as in `struct moe_client_forward f = {.size = sizeof f, ...}` or by
 * MOE_CLIENT_INIT(&f). The library reads and writes only that many bytes, so a later release may
 * append fields. A size below that of the first release is MOE_INVALID_ARGUMENT/VALUE_INVALID. So
 * is a field that is not 0 and that this release does not know. Fields `reserved` must be 0. */
#ifndef MOE_CLIENT_H
#define MOE_CLIENT_H

#include "moe/status.h"
#include "moe/types.h"

#include <stddef.h>
#include <string.h>

#ifdef __cplusplus
extern "C" {
#endif

/* Clears the struct that `s` points to and sets its size. */
#define MOE_CLIENT_INIT(s) ((void)memset((s), 0, sizeof *(s)), (void)((s)->size = sizeof *(s)))

struct moe_client;

/* How a worker is reached. */
enum moe_client_way {
    MOE_CLIENT_WAY_ANY,  /* by the Unix socket of a worker of this user on this host, else by TCP */
    MOE_CLIENT_WAY_TCP,  /* by TCP in any case, for measurements */
    MOE_CLIENT_WAY_UNIX, /* by the Unix socket; connecting fails with
                            FAILED_PRECONDITION/UNSUPPORTED if there is none */
};

struct moe_client_config {
    size_t size;
    const char *endpoint;   /* "host:port" of any worker of the group */
    bool spread;            /* find the other workers and spread requests and batches over them */
    uint32_t spread_tokens; /* with spread: split a batch of more tokens than this over several
                               workers; 0 = 512 */
    uint32_t connections;   /* connections per worker, for calls and for parts of large batches;
                               0 = 1, and up to 4 for parts of large batches, which open when one
                               needs them; 1 = no parts. Large: an x of 512 KiB or more; of 2 MiB,
                               if the worker does not join parts, or if this process has fewer
                               than 8 processors and `connections` is 0 */
    uint64_t timeout_ms;    /* default time of a call, retries included; 0 = 60000 */
    uint32_t max_attempts;  /* attempts of a forward without retain_session; 0 = 4 */
    uint32_t spin_us;       /* how long a connection's thread spins for the next answer. This
                               lowers latency and costs a core for each connection. 0 = never */
    /* Trust; see the top of this file. For a field that is NULL, its variable counts. The strings
     * need not outlive moe_client_connect; the files stay in use. */
    const char *tls_ca;          /* PEM file of roots: connections use TLS. MOED_TLS_CA */
    const char *tls_certificate; /* own certificate and its chain: PEM. MOED_TLS_CERTIFICATE */
    const char *tls_key;         /* its private key, PEM, mode 0600. MOED_TLS_KEY */
    const char *tls_server_name; /* the name that the workers' certificates must have, instead of
                                    the host of each endpoint. MOED_TLS_SERVER_NAME */
    const char *token_file;      /* file with a token, mode 0600. MOED_TOKEN_FILE */
    bool insecure; /* send the token without TLS also to other hosts. MOED_INSECURE=1 */
    /* Digest of the model's weights, 64 hex digits (moe_client_info.model_digest, `moectl status`):
     * connecting and forwards fail with FAILED_PRECONDITION/MODEL_MISMATCH unless the group serves
     * that model. Training does not change it. NULL = any model. Copied. */
    const char *model_digest;
    /* Name of the model that all calls of this client go to (moe_client_info.models). Connecting
     * fails with NOT_FOUND/MODEL_NOT_FOUND unless the group has it. Only the default model can
     * train. NULL or "" = the default model of the group. Copied. */
    const char *model;
    enum moe_client_way way; /* 0 = MOE_CLIENT_WAY_ANY */
    /* How long a forward without retain_session may be retried, from its start; max_attempts does
     * not count then. No attempt begins later, and the call ends at its timeout in any case. 0 =
     * max_attempts counts. */
    uint64_t retry_ms;
    /* After UNAVAILABLE, such a forward goes to the next worker at once, and pauses only when all
     * have refused it. Without `spread`, calls begin at `endpoint`, and the others are those that
     * it named when the client connected; each has a connection with a thread. Training calls, and
     * passes that are retained, stay with their worker. */
    bool hedge;
    /* With `hedge`: a worker that has not answered such a forward after this long, as one that is
     * stopped, counts as one that refuses it, and the attempt is cancelled. The time doubles each
     * time all have been asked, and the last attempt that may begin has the rest of the call's.
     * Choose more than a call takes. Bytes of x that the connection to a stopped worker has taken
     * half keep the call until that connection ends, up to 40 s later. 0 = no limit. */
    uint64_t attempt_ms;
};

/* Connects, and asks the server for its limits and model. */
struct moe_status moe_client_connect(const struct moe_client_config *config,
                                     struct moe_client **out) MOE_CHECKED;
/* Waits for calls in flight. Close streams first. Must not run in a callback. NULL is ignored. */
void moe_client_close(struct moe_client *c);

/* One layer, as LayerInfo in moe/v1/types.proto. */
struct moe_client_layer {
    uint32_t layer;               /* the model's layer index */
    uint32_t hidden;              /* H */
    uint32_t experts;             /* E */
    uint32_t zero_experts;        /* ids E .. E + zero_experts - 1 are the identity */
    uint32_t top_k;               /* K */
    uint32_t intermediate;        /* inner width of a routed expert */
    uint32_t shared_intermediate; /* inner width of the shared expert; 0 = none */
    uint32_t routes_by_token_id;  /* 1: a table of the model chooses by token id; calls give
                                     token_ids_in or topk_ids_in */
    uint32_t vocabulary;          /* with it: rows of the table; 0 = none that calls can use */
    uint32_t reserved[7];
};

/* The server and its model, as GetServerInfo and GetModel in moe/v1/expert.proto tell. The client
 * owns all of it, until moe_client_close. */
struct moe_client_info {
    size_t size; /* of this struct in the library that runs */
    const char *model, *family, *version, *backend, *coordinator;
    uint64_t epoch, weights_version, max_message_bytes;
    uint32_t max_tokens_per_request, max_tokens_per_step;
    const char *const *workers; /* endpoints by slot; "" = the slot is empty */
    size_t worker_count;
    const struct moe_client_layer *layers;
    size_t layer_count;
    const char *model_digest; /* "" = the group has not formed yet */
    /* Names of the models that the worker serves, the default model first. Empty before the group
     * has formed. */
    const char *const *models;
    size_t model_count;
};
/* The state of the time of moe_client_connect. */
const struct moe_client_info *moe_client_get_info(const struct moe_client *c);

/* Nanoseconds on the server that answered; see StageTimes in moe/v1/types.proto. For a batch that
 * was split, the times of its slowest part. */
struct moe_client_stages {
    uint64_t queue_ns, copy_in_ns, router_ns, prepare_ns, dispatch_ns, gemm1_ns, gemm2_ns,
        shared_ns, combine_ns, step_ns, copy_out_ns, server_ns;
    uint32_t step_tokens, steps;
    uint64_t reserved[8];
};

/* One forward pass. The caller owns all memory and keeps it until the call is finished. After a
 * failure the contents of the answer's memory are undefined. When its time is over, a call finishes
 * as soon as the transport has released x. That can be later, if the server does not read. */
struct moe_client_forward {
    size_t size;
    /* request */
    uint32_t layer;                  /* the model's layer index */
    uint32_t tokens, hidden;         /* T >= 1, H */
    enum moe_dtype dtype;            /* of x and y */
    const void *x;                   /* [T,H] */
    const int32_t *topk_ids_in;      /* [T,K] or NULL = the server routes; -1 = not routed */
    const float *topk_weights_in;    /* [T,K] or NULL = the server computes the weights */
    uint64_t epoch, weights_version; /* fail unless the server has these; 0 = any */
    uint64_t timeout_ms;             /* 0 = the client's default */
    const char *retain_session;      /* training: the worker retains this pass for Backward under
                                        this session (moe/client_training.h); NULL = no */
    uint64_t retain_micro_batch_id;  /* and this id, at least 1 */
    /* answer */
    void *y;             /* [T,H] */
    int32_t *topk_ids;   /* [T,K]; NULL = not wanted. Both are NULL or neither is. */
    float *topk_weights; /* [T,K] */
    uint64_t answered_epoch, answered_weights_version;
    bool retained;             /* the worker has retained the pass for Backward */
    bool retained_activations; /* and its device retains gate and up, as long as it has room */
    struct moe_client_stages stages;
    /* request: summands of y. MOE_PARTS_SHARED excludes all topk fields; neither single part can be
     * retained for Backward. A worker of a release before this field fails the call with
     * MOE_UNIMPLEMENTED/UNSUPPORTED, unless the field is MOE_PARTS_BOTH. */
    enum moe_parts parts;
    /* request: for groups with --partial-views. MOE_ON_UNAVAILABLE_PARTIAL needs token_states, and
     * excludes retain_session. A call that fails with EXPERT_UNAVAILABLE is not retried. */
    enum moe_on_unavailable on_unavailable;
    /* answer, of MOE_ON_UNAVAILABLE_PARTIAL: [T] 0 = y has the token's result; 4 (TokenState of
     * types.proto) = one of its experts has no copy, and its row of y is zeros. NULL = not wanted.
     */
    uint8_t *token_states;
    /* request: [T] token ids, each below moe_client_layer.vocabulary, for a layer with
     * routes_by_token_id: the model's table gives the experts, and the router their weights. NULL =
     * none. Excludes topk_ids_in and MOE_PARTS_SHARED. */
    const int64_t *token_ids_in;
    /* answer: [E], ids of the layer's re-homed experts, ascending; NULL = not wanted. An expert is
     * re-homed if the view lacks one of its slots in the placement (`moectl get experts`) and has
     * another one, which computes those rows. An expert without a copy is not: see on_unavailable.
     * The list is of the view and the placement of the last step. For a
     * batch that was split it is the union of the lists of its parts. Their epochs may differ, and
     * answered_epoch is the highest. If it is wanted, a worker of a release before this field fails
     * the call with MOE_UNIMPLEMENTED/UNSUPPORTED. */
    uint32_t *rehomed_experts;
    size_t rehomed_count; /* answer: so many of them */
};

/* Blocks until y is complete. */
struct moe_status moe_client_forward(struct moe_client *c,
                                     struct moe_client_forward *f) MOE_CHECKED;

/* Returns at once. The library calls `done` exactly once, on one of its threads; then `f` is the
 * caller's again. `done` must not block and may start calls. If memory for the call is lacking,
 * `done` runs before this function returns. */
typedef void (*moe_client_done)(void *ctx, struct moe_client_forward *f, struct moe_status status);
void moe_client_forward_async(struct moe_client *c, struct moe_client_forward *f,
                              moe_client_done done, void *ctx);

/* One long-lived stream to one worker: less cost per call, no retries, no splitting. */
struct moe_client_stream;
struct moe_status moe_client_stream_open(struct moe_client *c,
                                         struct moe_client_stream **out) MOE_CHECKED;
/* As moe_client_forward_async. Answers come in any order. retain_session must be NULL. */
void moe_client_stream_forward(struct moe_client_stream *s, struct moe_client_forward *f,
                               moe_client_done done, void *ctx);
/* Waits for requests in flight. Must not run in a callback. NULL is ignored. */
void moe_client_stream_close(struct moe_client_stream *s);

#ifdef __cplusplus
}
#endif

#endif
