/* SPDX-License-Identifier: Apache-2.0 */
/* The backend interface: what a device can do for moed, as one table of functions.
 *
 * `moe_backend_cpu` (and, where built, `moe_backend_cuda`) implement it; the worker and the
 * conformance suite use nothing else. Both use the same algorithm over the same window layout
 * (kernels/README.md), so what is learnt on one holds on the other.
 *
 * Objects   device   one GPU, or the CPU cores given to this process
 *           layer    one MoE layer's spec, placement and resident weights, on one device
 *           session  this process's seat in an EP group: windows of all slots, epoch, live mask
 *           step     one enqueued pass of one layer
 * Lifetime  device outlives its layers and sessions; a session outlives its steps.
 * Threads   calls on one object must not overlap, except session_abort and session_lost, which may
 *           come from any thread at any time, mem_alloc and mem_free, which may come from any
 *           thread while the device is in use, and a trainer's reads beside steps
 *           (moe/training.h, trainer_read).
 * Time      every wait on a peer is bounded by the session's budget; nothing waits for ever.
 *           step_enqueue and backward_enqueue (moe/training.h) wait for no peer, and for no step
 *           before them; what goes wrong in a step is the answer of its step_wait.
 * Memory    "device memory" is what mem_alloc(MOE_MEM_DEVICE) gives; tensors handed to parts live
 *           there. Tensors handed to step_enqueue live in MOE_MEM_HOST (pinned on CUDA). */
#ifndef MOE_BACKEND_H
#define MOE_BACKEND_H

#include "base/status.h"
#include "moe/layer_spec.h"
#include "moe/weight_source.h"

struct moe_device;
struct moe_layer;
struct moe_session;
struct moe_step;

/* ----------------------------------------------------------------- options */

/* Options are choices that one backend offers, such as a library that multiplies. The backend
 * declares them in a table and alone interprets them. The worker shows all tables as flags, and
 * gives a backend the settings of that backend's table. */
enum moe_backend_scope {
    MOE_SCOPE_DEVICE,  /* read by device_open */
    MOE_SCOPE_SESSION, /* read by session_join; the same on all slots */
};

struct moe_backend_option {
    const char *name;   /* unique among all backends; NULL ends a table */
    const char *values; /* allowed words, as "auto|fast|exact"; the first is the default */
    const char *help;   /* one line */
    enum moe_backend_scope scope;
};

/* The value of one option; NULL is the default. A list of settings ends with a name of NULL and may
 * hold options of both scopes. device_open and session_join refuse a name or value that the table
 * lacks: MOE_INVALID_ARGUMENT. */
struct moe_backend_setting {
    const char *name, *value;
};

/* ------------------------------------------------------------------ device */

struct moe_device_config {
    int ordinal;      /* CUDA device; ignored by the CPU */
    uint32_t threads; /* CPU: compute threads; 0 = all that the process may use (base/cores.h) */
    const struct moe_backend_setting *settings; /* used only inside device_open; NULL = none */
};

struct moe_device_info {
    char name[64];         /* "AMD EPYC, avx512, 2 threads"; for people */
    uint64_t memory_bytes; /* total device memory (CPU: physical memory) */
    uint64_t used_bytes;   /* held through this device: weights, windows, mem_alloc */
    uint64_t free_bytes;   /* could be taken now: what other processes hold is not free */
};

enum moe_mem { MOE_MEM_DEVICE, MOE_MEM_HOST };

/* --------------------------------------------------------------------- session */

/* Collective: puts `bytes` of `mine` at all[slot * bytes] of every live slot's `all`
 * [slots * bytes]; entries of slots that are not live stay zero. Blocks; bounded by the caller of
 * session_join. This is how memfd names (CPU) and NCCL ids (CUDA) travel. */
typedef struct moe_status (*moe_allgather_fn)(void *ctx, const void *mine, void *all, size_t bytes);

struct moe_session_config {
    uint32_t slot, slots; /* own seat; seats in the group, 1..MOE_MAX_SLOTS */
    uint64_t live;        /* bit s: slot s takes part; own bit is set */
    uint64_t epoch;       /* of the view, 1..2^40-2 */
    uint32_t max_tokens;  /* largest bucket: tokens one slot may bring to a step */
    uint32_t max_hidden;  /* over all layers that will run in this session */
    uint32_t max_top_k;
    uint32_t max_experts;    /* routed */
    bool training;           /* backward passes will run: windows hold x, dy and fp32 gradients */
    uint32_t wait_budget_ms; /* per wait on a peer */
    const struct moe_backend_setting *settings; /* used only inside session_join; NULL = none */
    moe_allgather_fn allgather;                 /* used only inside session_join */
    void *allgather_ctx;
};

/* ------------------------------------------------------------------------ step */

enum moe_routing_mode {
    MOE_ROUTE_SERVER = 0,      /* router chooses and weighs */
    MOE_ROUTE_IDS = 1,         /* ids given; weights from the live scores of those ids */
    MOE_ROUTE_IDS_WEIGHTS = 2, /* ids and weights given; logits are not computed */
};

/* Per-token verdict of a step. A token that is not OK has y = 0 and took no expert's time. */
enum moe_token_state {
    MOE_TOKEN_OK = 0,
    MOE_TOKEN_NONFINITE_LOGITS = 1, /* a router logit is NaN or infinite */
    MOE_TOKEN_BAD_EXPERT = 2,       /* a given id is < -1 or >= E + Z */
    MOE_TOKEN_BAD_WEIGHT = 3,       /* a given weight is NaN or infinite */
};

enum moe_stage {
    MOE_STAGE_ROUTER,   /* logits, top-k, weights */
    MOE_STAGE_PREPARE,  /* counts and positions, exchanged; 0 where dispatch does it (CUDA) */
    MOE_STAGE_DISPATCH, /* rows out, and expanded into expert-major rows */
    MOE_STAGE_GEMM1,    /* gate and up, activation included */
    MOE_STAGE_GEMM2,    /* down, bias and weight included */
    MOE_STAGE_SHARED,   /* shared expert; 0 where it runs beside the other stages */
    MOE_STAGE_COMBINE,  /* rows home and summed */
    MOE_STAGE_COUNT
};
extern const char *const moe_stage_names[MOE_STAGE_COUNT]; /* "router", ... */

/* Memory belongs to the caller and must stay until the step is finished. T may be 0 (all tensor
 * pointers may then be NULL): the slot still takes part. */
struct moe_step_args {
    struct moe_layer *layer;
    enum moe_dtype dtype;    /* of x and y, the same on all slots */
    uint32_t bucket;         /* >= tokens of every slot; the same on all slots; power of two */
    uint32_t tokens;         /* T of this slot */
    const void *x;           /* [T, H] */
    void *y;                 /* [T, H] */
    const uint8_t *mode;     /* [T] enum moe_routing_mode; NULL = all MOE_ROUTE_SERVER */
    const int32_t *ids_in;   /* [T, K], read where mode != SERVER; -1 = this k is not routed */
    const float *weights_in; /* [T, K], read where mode == IDS_WEIGHTS */
    int32_t *ids_out;     /* [T, K] as used; order: key descending, then id (given ids: as given) */
    float *weights_out;   /* [T, K], scale included */
    uint8_t *token_state; /* [T] enum moe_token_state */
    /* Not 0: to keep on the device, under this name, what a backward pass over this same batch can
     * use (moe/training.h, "Retained"). The same on all slots. A step that cannot is run like any
     * other and says so (moe_step_result.retained); it never fails for this. */
    uint64_t retain;
};

/* Of a backward pass. */
enum moe_backward_stage {
    MOE_BACKWARD_ROUTER,        /* the forward pass's routing again */
    MOE_BACKWARD_DISPATCH,      /* x and dy out, counts included, and what waits for them */
    MOE_BACKWARD_PRE,           /* gate and up again */
    MOE_BACKWARD_DH,            /* dy through down */
    MOE_BACKWARD_ACTIVATION,    /* element by element, gradients of biases */
    MOE_BACKWARD_DX,            /* through gate and up */
    MOE_BACKWARD_WGRAD_GATE_UP, /* gradients of the experts' weights */
    MOE_BACKWARD_WGRAD_DOWN,    /* and of adapters */
    MOE_BACKWARD_COMBINE,       /* rows home and summed */
    MOE_BACKWARD_LOGITS,        /* weights to logits, loss, logits to router and dx */
    MOE_BACKWARD_SHARED,        /* shared expert */
    MOE_BACKWARD_FINISH,        /* dx summed up and rounded */
    MOE_BACKWARD_STAGE_COUNT
};
extern const char *const moe_backward_stage_names[MOE_BACKWARD_STAGE_COUNT];

struct moe_step_result {
    uint64_t stage_ns[MOE_STAGE_COUNT]; /* one after the other: their sum is the layer's time */
    /* Of a backward pass, which has no stage_ns; zeros where a backend does not measure. */
    uint64_t backward_ns[MOE_BACKWARD_STAGE_COUNT];
    bool on_tensor_cores; /* a backward pass multiplied the routed experts' rows there */
    bool retained;        /* of a step with `retain`: this slot keeps it. Others may not */
    bool used_retained;   /* of a backward pass with `retained`: this slot had it, and used it */
    uint64_t total_ns;    /* from start to finish on this slot, waits on peers included */
    int missing_slot;     /* the slot that did not answer, or -1 */
    bool refused;         /* with a failure: all slots refused this step, alike and before anything
                             was changed; the session goes on */
    uint64_t rows;        /* (token, expert) pairs computed on this slot */
};

/* ----------------------------------------------------------------------- parts */

/* Expert-major rows as dispatch leaves them on the receiver: local expert l owns rows
 * start[l] .. start[l] + count[l] - 1; start[l] is a multiple of MOE_ROW_ALIGN. Rows of one expert
 * are ordered by (source slot, token, k). Rows between are undefined and must not be read. Owned
 * by the session, valid until its next dispatch or step. */
struct moe_rows {
    uint32_t local_experts;
    const uint32_t *expert; /* [local] global id, ascending */
    const uint32_t *start;  /* [local + 1]; start[local] = rows in use, padding included */
    const uint32_t *count;  /* [local] */
    void *x;                /* [start[local], H] of the step's dtype */
    const float *weight;    /* [start[local]] routing weight of each row; undefined in padding */
};

struct moe_training; /* moe/training.h */

struct moe_backend {
    const char *name;                         /* "cpu", "cuda" */
    const struct moe_backend_option *options; /* NULL = it has none */
    /* NULL where this backend cannot train. */
    const struct moe_training *training;

    struct moe_status (*device_open)(const struct moe_device_config *, struct moe_device **out);
    void (*device_close)(struct moe_device *);
    void (*device_info)(struct moe_device *, struct moe_device_info *out);

    /* Zeroed, aligned to 4096. Errors: MOE_RESOURCE_EXHAUSTED/OUT_OF_MEMORY before anything is
     * taken. mem_free wants the size that was asked for; NULL is ignored. */
    struct moe_status (*mem_alloc)(struct moe_device *, enum moe_mem, size_t bytes, void **out);
    void (*mem_free)(struct moe_device *, enum moe_mem, void *p, size_t bytes);
    /* Copies between any two of host and device memory; done on return. */
    struct moe_status (*mem_copy)(struct moe_device *, void *dst, const void *src, size_t bytes);

    /* A layer for the experts that `placement` puts on `slot`. Copies both structs. All weights
     * are to be uploaded once (experts: only local ones), then layer_finish checks that none is
     * missing and makes the layer runnable. */
    struct moe_status (*layer_create)(struct moe_device *, const struct moe_layer_spec *,
                                      const struct moe_placement *, uint32_t slot,
                                      struct moe_layer **out);
    /* `data` is host memory in canonical form, F32 or BF16, any alignment; free to reuse on
     * return. `expert` is the global id, ignored for weights that are not an expert's. */
    struct moe_status (*layer_upload)(struct moe_layer *, enum moe_weight, uint32_t expert,
                                      enum moe_dtype, const void *data, size_t bytes);
    /* The same for a weight that the backend reads itself, by `source`, from several threads. That
     * may go on after the call: what the source reads from stays until layer_finish or
     * layer_destroy; later calls, or layer_finish, tell what went wrong. NULL where the backend
     * takes weights from memory only. */
    struct moe_status (*layer_fetch)(struct moe_layer *, enum moe_weight, uint32_t expert,
                                     enum moe_dtype, const struct moe_weight_source *,
                                     size_t bytes);
    struct moe_status (*layer_finish)(struct moe_layer *);
    void (*layer_destroy)(struct moe_layer *);

    /* Collective over the live slots; returns within a few wait budgets. On failure nothing is
     * left behind. */
    struct moe_status (*session_join)(struct moe_device *, const struct moe_session_config *,
                                      struct moe_session **out);
    /* Collective small exchange through the windows themselves (not through the allgather): the
     * proof that every slot reaches every other before a view is committed. bytes <= 256. */
    struct moe_status (*session_exchange)(struct moe_session *, const void *mine, void *all,
                                          size_t bytes);
    /* Makes every present and later wait of this session end at once with MOE_ABORTED. Any thread,
     * any time before session_leave. */
    void (*session_abort)(struct moe_session *);
    /* Bit s: slot s was seen to die. Any thread. */
    uint64_t (*session_lost)(struct moe_session *);
    /* How rows travel in this session, for people: "shared memory", "nvlink", "network"; "none"
     * when it has one live slot. The same on all slots. */
    const char *(*session_transport)(const struct moe_session *);
    /* Steps must be finished. NULL is ignored. */
    void (*session_leave)(struct moe_session *);

    /* Starts one forward step, and returns before its peers have come. Steps of a session run in
     * the order in which they were enqueued, of whatever kind. All live slots must enqueue the same
     * sequence of kinds and of (layer shape, dtype, bucket). At most two steps of a session may be
     * unfinished; a third is MOE_FAILED_PRECONDITION. The args struct is copied; what it points to
     * is the step's until step_wait has given an answer other than MOE_DEADLINE_EXCEEDED. After
     * an error of this call there is no step: wrong arguments, a session that has ended, no memory,
     * or a device that fails, which ends the session. */
    struct moe_status (*step_enqueue)(struct moe_session *, const struct moe_step_args *,
                                      struct moe_step **out);
    /* Waits for the step, at most until `deadline_ns` (monotonic): MOE_DEADLINE_EXCEEDED means it
     * is still running; a deadline of 0 only looks. Any other answer finishes and frees the step,
     * and is that of the step: also the error of one that could not start in its turn, because the
     * step before it ended the session, or for want of memory. MOE_UNAVAILABLE/PEER_LOST:
     * result->missing_slot tells who; y is undefined; the session can only be left. */
    struct moe_status (*step_wait)(struct moe_step *, uint64_t deadline_ns,
                                   struct moe_step_result *result);

    /* Parts: the same code that the step uses, each callable alone, synchronous. Tensors are
     * device memory. */

    /* ids, weights [T,K] f32, token_state [T]; as in moe_step_args. */
    struct moe_status (*router_forward)(struct moe_layer *, enum moe_dtype, uint32_t tokens,
                                        const void *x, const uint8_t *mode, const int32_t *ids_in,
                                        const float *weights_in, int32_t *ids, float *weights,
                                        uint8_t *token_state);
    /* Collective: exchanges counts, then moves rows. `out` describes the receive side. */
    struct moe_status (*dispatch)(struct moe_session *, struct moe_layer *, enum moe_dtype,
                                  uint32_t bucket, uint32_t tokens, const void *x,
                                  const int32_t *ids, const float *weights, struct moe_rows *out);
    /* hidden [start[local], I] f32 = act(rows.x Wg^T + bg, rows.x Wu^T + bu); for input weighting
     * with weight * rows.x instead of rows.x. With BF16 the values may have been rounded to it. */
    struct moe_status (*gemm_gate_up)(struct moe_layer *, enum moe_dtype, const struct moe_rows *,
                                      float *hidden);
    /* out [start[local], H] f32 = weight * (hidden Wd^T + b), for input weighting without the
     * weight. Early weighting too: multiplying here is multiplying activation and bias, but a
     * weight that came before a rounding to BF16 would keep the rows of one expert from cancelling.
     * The dtype is that of the step; with BF16 hidden may be rounded to it first. */
    struct moe_status (*gemm_down)(struct moe_layer *, enum moe_dtype, const struct moe_rows *,
                                   const float *hidden, float *out);
    /* Collective, after dispatch with the same arguments: y [T,H] = sum over k of the weighted
     * rows in fixed order (fp32), plus the zero experts' w * x; tokens with no row give 0. */
    struct moe_status (*combine)(struct moe_session *, struct moe_layer *, enum moe_dtype,
                                 uint32_t bucket, uint32_t tokens, const void *x,
                                 const int32_t *ids, const float *weights, const struct moe_rows *,
                                 const float *expert_out, void *y);
    /* y [T,H] += shared(x); nothing when the layer has no shared expert. */
    struct moe_status (*shared_forward)(struct moe_layer *, enum moe_dtype, uint32_t tokens,
                                        const void *x, float *y);
};

extern const struct moe_backend moe_backend_cpu;

/* The options of each backend that has any, also of those that this build lacks: the same command
 * line serves every build. Ends with NULL. */
extern const struct moe_backend_option *const moe_backend_option_tables[];

/* To be called by main, once, before the process has a second thread: sets what libraries below the
 * backends read from the environment, where it is not set. A group of GPUs is refused without.
 * Errors: MOE_RESOURCE_EXHAUSTED/OUT_OF_MEMORY. */
struct moe_status moe_backends_prepare(void) MOE_CHECKED;

/* By name; "auto" prefers cuda where it is built and a device answers. NULL when this build has no
 * such backend. */
const struct moe_backend *moe_backend_find(const char *name);

#endif
