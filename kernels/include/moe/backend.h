/* SPDX-License-Identifier: Apache-2.0 */
/* The backend interface: one table of functions for a device.
 *
 * `moe_backend_cpu` and `moe_backend_cuda` (a module, moe/backend_module.h) implement it. The
 * worker and the conformance suite use nothing else. Both backends run the same algorithm over the
 * same window layout (kernels/README.md). So findings on one hold on the other.
 *
 * Objects   device   one GPU, or the CPU cores given to this process
 *           layer    one MoE layer's spec, placement and resident weights, on one device
 *           session  this process's slot in an EP group: windows of all slots, epoch, live mask
 *           step     one enqueued pass of one layer
 * Lifetime  A device outlives its layers and sessions. A session outlives its steps.
 * Threads   Calls on one object must not overlap, with these exceptions. session_abort and
 *           session_lost: any thread at any time. device_info and the calls mem_*: any thread
 *           while the device is in use. trainer_read: during steps, as moe/training.h states.
 * Time      The session's budget bounds every wait on a peer; no wait is endless. step_enqueue and
 *           backward_enqueue (moe/training.h) wait neither for a peer nor for an earlier step.
 *           step_wait returns the error of a step.
 * Memory    "Device memory" comes from mem_alloc(MOE_MEM_DEVICE). Parts take tensors there.
 *           step_enqueue takes tensors in MOE_MEM_HOST (pinned on CUDA). Its segments may also lie
 *           in device memory, in memory of mem_register, and in memory of mem_import. */
#ifndef MOE_BACKEND_H
#define MOE_BACKEND_H

#include "base/status.h"
#include "moe/layer_spec.h"
#include "moe/packed_matrix.h"
#include "moe/weight_source.h"

struct moe_device;
struct moe_layer;
struct moe_session;
struct moe_step;

/* ----------------------------------------------------------------- options */

/* Options are choices of one backend, such as the library for products. The backend declares them
 * in a table, and only the backend interprets them. The worker shows all tables as flags, and
 * passes each backend the settings of its table. */
enum moe_backend_scope {
    MOE_SCOPE_DEVICE,  /* read by device_open */
    MOE_SCOPE_SESSION, /* read by session_join; the same on all slots */
};

struct moe_backend_option {
    const char *name;   /* NULL ends a table. Options of one name are equal in all tables */
    const char *values; /* allowed values, as "auto|fast|exact"; the first is the default */
    const char *help;   /* one line */
    enum moe_backend_scope scope;
};

/* The value of one option; NULL is the default. A list of settings ends with a name of NULL and may
 * have options of both scopes. device_open and session_join refuse a name or value that is not in
 * the table: MOE_INVALID_ARGUMENT. */
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
    char domain[64];       /* NVLink domain of a GPU, over hosts; "" = its host, or not known */
    uint64_t memory_bytes; /* total device memory (CPU: physical memory) */
    uint64_t used_bytes;   /* allocated through this device: weights, windows, mem_alloc */
    uint64_t free_bytes;   /* available now, after what other processes use */
};

enum moe_mem { MOE_MEM_DEVICE, MOE_MEM_HOST };

/* --------------------------------------------------------------------- session */

/* Collective: puts `bytes` of `mine` at all[slot * bytes] of every live slot's `all`
 * [slots * bytes]; entries of slots that are not live stay zero. Blocks; the caller of session_join
 * bounds the time. It carries the names of sockets (CPU) and NCCL ids (CUDA). */
typedef struct moe_status (*moe_allgather_fn)(void *ctx, const void *mine, void *all, size_t bytes);

/* Where a slot runs. Slots with equal ids may share memory; what a pair really shares, it proves
 * while the session forms. */
struct moe_session_host {
    char id[80];      /* the machine, its boot and its network namespace */
    char domain[64];  /* of its device, as in moe_device_info */
    char address[48]; /* numeric; rows of other hosts come here. "" = loopback */
};

struct moe_session_config {
    uint32_t slot, slots; /* this process's slot; slots in the group, 1..MOE_MAX_SLOTS */
    uint64_t live;        /* bit s: slot s takes part; this slot's bit is set */
    uint64_t epoch;       /* of the view, 1..2^40-2. session_mask changes this, and `live` */
    uint32_t max_tokens;  /* largest bucket: tokens of one slot in a step */
    /* Largest bucket of F32 tokens, at most max_tokens; 0 = max_tokens. At half of max_tokens,
     * windows need no more memory than BF16 tokens do. */
    uint32_t max_tokens_f32;
    uint32_t max_hidden; /* over all layers of this session */
    uint32_t max_top_k;
    uint32_t max_experts; /* routed */
    bool training;        /* backward passes will run: windows hold x, dy and fp32 gradients */
    /* Experts may have no copy on a live slot: tokens with one of them are MOE_TOKEN_UNAVAILABLE.
     * Needs moe_backend.partial; not with `training`. */
    bool partial;
    uint32_t wait_budget_ms;                    /* per wait on a peer */
    const struct moe_backend_setting *settings; /* used only inside session_join; NULL = none */
    /* [slots], used only inside session_join; NULL = all on this host. */
    const struct moe_session_host *hosts;
    /* Not 0: slots s and t count as hosts apart unless s / domain_size == t / domain_size, so one
     * host looks like several. For tests; the same on all slots. */
    uint32_t domain_size;
    moe_allgather_fn allgather; /* used only inside session_join */
    void *allgather_ctx;
};

/* ------------------------------------------------------------------------ step */

enum moe_routing_mode {
    MOE_ROUTE_SERVER = 0,      /* the router computes ids and weights */
    MOE_ROUTE_IDS = 1,         /* ids given; weights from the live scores of those ids */
    MOE_ROUTE_IDS_WEIGHTS = 2, /* ids and weights given; no logits */
};

/* A bit of a token's mode: its y has no shared expert. (A token without routed experts has given
 * ids that are all -1.) */
enum { MOE_ROUTE_WITHOUT_SHARED = 0x80 };

static inline enum moe_routing_mode moe_routing_of(uint8_t mode)
{
    return (enum moe_routing_mode)(mode & ~MOE_ROUTE_WITHOUT_SHARED);
}

/* State of a token after a step. A token that is not OK has y = 0 and used no expert. */
enum moe_token_state {
    MOE_TOKEN_OK = 0,
    MOE_TOKEN_NONFINITE_LOGITS = 1, /* a router logit is NaN or infinite */
    MOE_TOKEN_BAD_EXPERT = 2,       /* a given id is < -1 or >= E + Z */
    MOE_TOKEN_BAD_WEIGHT = 3,       /* a given weight is NaN or infinite */
    MOE_TOKEN_UNAVAILABLE = 4, /* an expert has no copy on a live slot; partial sessions only */
};

enum moe_stage {
    MOE_STAGE_ROUTER,   /* logits, top-k, weights; rows into a latent space */
    MOE_STAGE_PREPARE,  /* exchange of counts and positions; 0 if dispatch does it (CUDA) */
    MOE_STAGE_DISPATCH, /* rows out, and their expansion into expert-major rows */
    MOE_STAGE_GEMM1,    /* gate and up, activation included */
    MOE_STAGE_GEMM2,    /* down, bias and weight included */
    MOE_STAGE_SHARED,   /* shared expert; 0 if it overlaps other stages */
    MOE_STAGE_COMBINE,  /* sums of rows back to their slots, and their sum there; out of a latent
                           space */
    MOE_STAGE_COUNT
};
extern const char *const moe_stage_names[MOE_STAGE_COUNT]; /* "router", ... */

/* Exact numbers of rows of one forward step on this slot. Those that a backend does not report stay
 * as they are: set `by_expert` and `to_slots` to false before the step. Both backends report both.
 */
struct moe_step_counts {
    bool by_expert;                        /* the next two are set */
    uint32_t local_experts;                /* experts of the layer on this slot */
    uint32_t expert_rows[MOE_MAX_EXPERTS]; /* [E] rows computed on this slot; 0 if not local */
    bool to_slots;                         /* the next two are set */
    uint32_t slots;                        /* of the session */
    uint32_t sent_rows[MOE_MAX_SLOTS];     /* rows of this slot's tokens that it sent to each other
                                              slot; as many sums came back. Rows that it forwards
                                              for other slots do not count */
};

/* What the device stores at a segment's end, for another process that waits for its outputs. It
 * does so if the step succeeds and all tokens of the segment are MOE_TOKEN_OK, before the step is
 * finished. After the outputs it stores `receipt` and `signal`, then `word`: a reader that sees the
 * word, with acquire, sees all of them. Otherwise all three stay as they are. They lie in memory of
 * mem_alloc(MOE_MEM_HOST) or mem_register, aligned. */
struct moe_step_completion {
    uint64_t *word;    /* gets `value`; NULL = the segment has no completion */
    uint32_t *signal;  /* gets 1 */
    uint64_t *receipt; /* gets `value`: for the caller, in memory that no other process writes */
    uint64_t value;
};

/* Consecutive tokens of a step with separate rows, such as those of one request; n tokens. NULL
 * outputs are not wanted. Rows have no gaps; they are aligned to their elements, and moved faster
 * at multiples of 16 bytes. */
struct moe_step_segment {
    uint32_t tokens;                       /* n; 0 is allowed */
    uint8_t mode;                          /* of all its tokens, as in moe_step_args */
    const void *x;                         /* [n, H] */
    const int32_t *ids_in;                 /* [n, K]; read if mode != SERVER */
    const float *weights_in;               /* [n, K]; read if mode == IDS_WEIGHTS */
    void *y;                               /* [n, H] */
    int32_t *ids_out;                      /* [n, K] */
    float *weights_out;                    /* [n, K] */
    uint8_t *token_state;                  /* [n] */
    struct moe_step_completion completion; /* if n > 0; see moe_backend.stores_completions */
};

/* The caller owns the memory; it must stay valid until the step is finished. If T = 0, all tensor
 * pointers may be NULL, and the slot still takes part.
 *
 * Without segments the step works on x, y, ids_in and weights_in as they are. With segments these
 * and `mode` are NULL. The step then copies all of its input once, at its start, and computes from
 * this copy alone. It copies all output once, at its end. So others may write to the memory
 * of a segment meanwhile: they change this step's result, and nothing else. The result has the same
 * bits as without segments. If the step fails, outputs of segments are undefined. */
struct moe_step_args {
    struct moe_layer *layer;
    enum moe_dtype dtype; /* of x and y, the same on all slots */
    uint32_t bucket;      /* >= tokens of every slot; the same on all slots; power of two */
    uint32_t tokens;      /* T of this slot */
    const struct moe_step_segment *segments; /* NULL = none; their tokens are T in all */
    uint32_t segment_count;                  /* at most the session's max_tokens */
    const void *x;                           /* [T, H] */
    void *y;                                 /* [T, H] */
    /* [T] enum moe_routing_mode, with or without MOE_ROUTE_WITHOUT_SHARED; NULL = all
     * MOE_ROUTE_SERVER. A step that retains has no such bit. */
    const uint8_t *mode;
    const int32_t *ids_in;   /* [T, K], read if mode != SERVER; -1 = this k is not routed */
    const float *weights_in; /* [T, K], read if mode == IDS_WEIGHTS */
    int32_t *ids_out;     /* [T, K] as used; order: key descending, then id (given ids: as given) */
    float *weights_out;   /* [T, K], scale included */
    uint8_t *token_state; /* [T] enum moe_token_state. These three also with segments */
    /* If not 0, the step retains activations on the device under this name. A backward pass over
     * this batch can use them (moe/training.h, "Retained"). The same on all slots. A step without
     * room runs without it and never fails for it: see moe_step_result.retained. */
    uint64_t retain;
    struct moe_step_counts *counts; /* filled if the step succeeds; NULL = not wanted */
};

/* Stages of a backward pass. */
enum moe_backward_stage {
    MOE_BACKWARD_ROUTER,        /* the routing of the forward pass again */
    MOE_BACKWARD_DISPATCH,      /* counts, x and dy out, and the wait for them */
    MOE_BACKWARD_PRE,           /* gate and up again */
    MOE_BACKWARD_DH,            /* dy through down */
    MOE_BACKWARD_ACTIVATION,    /* element by element, gradients of biases */
    MOE_BACKWARD_DX,            /* through gate and up */
    MOE_BACKWARD_WGRAD_GATE_UP, /* gradients of the experts' weights */
    MOE_BACKWARD_WGRAD_DOWN,    /* and of adapters */
    MOE_BACKWARD_COMBINE,       /* sums of rows back to their slots, and their sum there */
    MOE_BACKWARD_LOGITS,        /* weights to logits, loss, logits to router and dx */
    MOE_BACKWARD_SHARED,        /* shared expert */
    MOE_BACKWARD_FINISH,        /* sum of dx, rounded */
    MOE_BACKWARD_STAGE_COUNT
};
extern const char *const moe_backward_stage_names[MOE_BACKWARD_STAGE_COUNT];

struct moe_step_result {
    uint64_t stage_ns[MOE_STAGE_COUNT]; /* stages do not overlap: their sum is the layer's time */
    /* Of a backward pass on CUDA; zeros if a backend does not measure them. */
    uint64_t backward_ns[MOE_BACKWARD_STAGE_COUNT];
    bool on_tensor_cores; /* a backward pass multiplied the routed experts' rows there */
    bool retained;        /* of a step with `retain`: this slot retains. Other slots may differ */
    bool used_retained;   /* of a backward pass with `retained`: this slot used it */
    uint64_t began_ns;    /* monotonic time of the start on this slot; 0 = not known */
    uint64_t total_ns;    /* from start to finish on this slot, waits on peers included */
    /* Of total_ns: the copies of segments in and out. 0 without segments, and on CUDA. */
    uint64_t copy_in_ns, copy_out_ns;
    int missing_slot; /* the slot that did not answer, or -1 */
    bool refused;     /* with a failure: all slots refused the step, before any change; the
                         session goes on */
    uint64_t rows;    /* (token, expert) pairs computed on this slot */
};

/* ----------------------------------------------------------------------- parts */

/* Expert-major rows, the result of dispatch: local expert l owns rows
 * start[l] .. start[l] + count[l] - 1; start[l] is a multiple of MOE_ROW_ALIGN. Rows of one expert
 * are ordered by (source slot, token, k). Padding rows are undefined; do not read them. The session
 * owns the memory; it is valid until its next dispatch or step. */
struct moe_rows {
    uint32_t local_experts;
    const uint32_t *expert; /* [local] global id, ascending */
    const uint32_t *start;  /* [local + 1]; start[local] = rows in use, padding included */
    const uint32_t *count;  /* [local] */
    void *x;                /* [start[local], W] of the step's dtype; W = moe_expert_width */
    bool quantised;         /* x has quantised rows of moe/row_format.h instead */
    const float *weight;    /* [start[local]] routing weight of each row; undefined in padding */
};

struct moe_training; /* moe/training.h */

struct moe_backend {
    const char *name;                         /* "cpu", "cuda" */
    const struct moe_backend_option *options; /* NULL = it has none */
    /* NULL if this backend cannot train. */
    const struct moe_training *training;
    bool partial; /* its sessions may be partial: see moe_session_config */
    /* A window takes all its memory when the session is joined, not as rows come. So a limit for
     * F32 tokens saves memory. */
    bool eager_windows;
    bool stores_completions; /* its devices store those of segments; else the caller does */

    /* Whether this host has such a device. On CUDA it starts the driver in this process: a child
     * that is forked later cannot use it. Errors: MOE_FAILED_PRECONDITION/UNSUPPORTED, with what is
     * missing. */
    struct moe_status (*available)(void);

    struct moe_status (*device_open)(const struct moe_device_config *, struct moe_device **out);
    void (*device_close)(struct moe_device *);
    void (*device_info)(struct moe_device *, struct moe_device_info *out);
    /* A number that changes while the device computes, also within a step: by slices of a stage on
     * the CPU, by stages on CUDA while a thread waits for the step. It tells a long step from one
     * that hangs. It need not rise. Any thread. NULL if the backend does not count; then each of
     * its steps must end within seconds. */
    uint64_t (*device_progress)(const struct moe_device *);

    /* Zeroed, aligned to 4096. Errors: MOE_RESOURCE_EXHAUSTED/OUT_OF_MEMORY; then nothing is
     * allocated. mem_free takes the size of the allocation; NULL is ignored. */
    struct moe_status (*mem_alloc)(struct moe_device *, enum moe_mem, size_t bytes, void **out);
    void (*mem_free)(struct moe_device *, enum moe_mem, void *p, size_t bytes);
    /* Copies between any two of host and device memory; done on return. */
    struct moe_status (*mem_copy)(struct moe_device *, void *dst, const void *src, size_t bytes);

    /* Memory of other processes, for the segments of steps. These four may take as long as many
     * steps. Before memory is released, all steps that use it have finished.
     *
     * Makes host memory that this process has mapped usable, at the same address: pins its pages,
     * on CUDA. Both are multiples of a page. Errors: MOE_RESOURCE_EXHAUSTED/OUT_OF_MEMORY,
     * MOE_FAILED_PRECONDITION/UNSUPPORTED; the memory is then as before. */
    struct moe_status (*mem_register)(struct moe_device *, void *p, size_t bytes);
    void (*mem_unregister)(struct moe_device *, void *p, size_t bytes);
    /* Maps device memory of another process. The descriptor stays the caller's and may be closed
     * then. The memory lives at least until mem_release, also if its owner ends. The host must not
     * access `*out`. CUDA: an allocation of cuMemCreate, exported as a POSIX descriptor, with
     * `bytes` in whole granules of it, on a GPU that this one reaches. CPU: a sealed memfd of
     * exactly `bytes`. Errors: MOE_INVALID_ARGUMENT/REGION_INVALID (not such a descriptor, or
     * `bytes` is wrong), MOE_FAILED_PRECONDITION/UNSUPPORTED (this device cannot reach the memory),
     * MOE_RESOURCE_EXHAUSTED/OUT_OF_MEMORY. Nothing is left behind then.
     * `*same_gpu`: the memory lies in this GPU, so kernels of its owner and of this process take
     * turns there. */
    struct moe_status (*mem_import)(struct moe_device *, int descriptor, size_t bytes, void **out,
                                    bool *same_gpu);
    void (*mem_release)(struct moe_device *, void *p, size_t bytes);

    /* Creates a layer for the experts that `placement` puts on `slot`. Copies both structs. Upload
     * all weights once, for experts only the local ones. Then layer_finish checks that no weight
     * is missing and makes the layer runnable. Steps use the copies of experts that are on live
     * slots of their session; the first step in a session with another live mask chooses them. */
    struct moe_status (*layer_create)(struct moe_device *, const struct moe_layer_spec *,
                                      const struct moe_placement *, uint32_t slot,
                                      struct moe_layer **out);
    /* `data` is host memory in canonical form, F32 or BF16, any alignment; the caller may reuse it
     * on return. `expert` is the global id, ignored for weights that are not an expert's. */
    struct moe_status (*layer_upload)(struct moe_layer *, enum moe_weight, uint32_t expert,
                                      enum moe_dtype, const void *data, size_t bytes);
    /* The same for a weight that the backend reads itself, with `source`, on several threads.
     * Reads may go on after the call. So the source must stay valid until layer_finish or
     * layer_destroy, and later calls or layer_finish return the errors. NULL if the backend takes
     * weights from memory only. */
    struct moe_status (*layer_fetch)(struct moe_layer *, enum moe_weight, uint32_t expert,
                                     enum moe_dtype, const struct moe_weight_source *,
                                     size_t bytes);
    /* Whether layers of the device may have matrices of this format, which stay quantised in
     * memory. Any thread. NULL: of none. layer_create refuses a spec with another format:
     * MOE_FAILED_PRECONDITION/UNSUPPORTED. */
    moe_computes_fn computes;
    /* Uploads a matrix that has a format in the layer's spec, in the form of moe/packed_matrix.h.
     * The caller may reuse the memory on return. layer_upload and layer_fetch refuse such a matrix,
     * and this call any other. The values are checked elsewhere: scales are finite and not zero,
     * and elements may be NaN. NULL if `computes` is NULL. */
    struct moe_status (*layer_upload_packed)(struct moe_layer *, enum moe_weight, uint32_t expert,
                                             const struct moe_packed_matrix *);
    /* The same for a matrix that the backend reads itself, by the rules of layer_fetch. If the
     * source has gate and up by turns, the weight is gate, and up is uploaded too. The format has
     * no zero points. NULL if layer_fetch is. */
    struct moe_status (*layer_fetch_packed)(struct moe_layer *, enum moe_weight, uint32_t expert,
                                            const struct moe_packed_source *);
    struct moe_status (*layer_finish)(struct moe_layer *);
    /* Creates the layer that is to take the place of `from` with another placement, on the same
     * slot. It has, without a copy, the weights of experts that both placements put there, and all
     * that are not an expert's: upload those of the other experts once, then layer_finish. Steps
     * may run on `from` during all of these calls. Either layer may be destroyed first; a step on
     * it has finished then. `from` is finished, has no trainer, and has no such layer yet, nor is
     * one while its own predecessor exists: MOE_FAILED_PRECONDITION/UNSUPPORTED. NULL if the
     * backend's layers keep their placement. */
    struct moe_status (*layer_succeed)(struct moe_layer *from, const struct moe_placement *,
                                       struct moe_layer **out);
    void (*layer_destroy)(struct moe_layer *);

    /* Collective over the live slots; returns within a few wait budgets. A failure leaves nothing
     * behind. */
    struct moe_status (*session_join)(struct moe_device *, const struct moe_session_config *,
                                      struct moe_session **out);
    /* Bit s: every mask of this session has slot s if it has this slot, and lacks both else; they
     * forward rows for each other. The bit of this slot is set. 0: the session takes no mask. Only
     * a mask changes it. NULL: 0 of all sessions. */
    uint64_t (*session_together)(const struct moe_session *);
    /* The session goes on in `epoch` with fewer slots, as after a join: nothing of earlier steps,
     * losses and aborts counts any more. Windows, connections, streams and layers stay. There is no
     * all-gather, and no wait for a peer.
     *
     * All slots of `live` take the same masks, and enqueue no step before all have: a commit shows
     * that, or a session_exchange, which returns then. An exchange of the mask before that has not
     * ended on another slot may return anything there. A slot that is not in `live` may still
     * store into windows, at any later time: stamps have the epoch, and no slot reads its regions.
     * So a slot that returns, in whatever process, needs a new session: session_join.
     *
     * `epoch` is above that of the mask before, and less than 2^MOE_WINDOW_EPOCH_BITS above that of
     * the join. `live` has this slot, and only slots of the mask before; of slots that take masks
     * together (session_together, which is not 0), it has all or none. Not during session_abort.
     * Errors: MOE_INVALID_ARGUMENT/CONFIG_INVALID (other arguments), MOE_FAILED_PRECONDITION
     * (unfinished steps; an epoch that is too far; REFORMING: slots that take masks together),
     * MOE_UNAVAILABLE/PEER_LOST (a slot of `live` has left). Nothing has changed then. Any other
     * error (of a device) ends the session. NULL if session_together is. */
    struct moe_status (*session_mask)(struct moe_session *, uint64_t epoch, uint64_t live);
    /* Collective small exchange through the windows, not through the allgather. It proves that
     * every slot reaches every other before a view is committed. bytes <= 256. */
    struct moe_status (*session_exchange)(struct moe_session *, const void *mine, void *all,
                                          size_t bytes);
    /* Ends every present and later wait of this session with MOE_ABORTED. Any thread, any time
     * before session_leave. */
    void (*session_abort)(struct moe_session *);
    /* Bit s: slot s was lost. Any thread. */
    uint64_t (*session_lost)(struct moe_session *);
    /* How rows travel in this session, for people: "shared memory", "nvlink", "network", "shared
     * memory and network"; "none" with one live slot. */
    const char *(*session_transport)(const struct moe_session *);
    /* Steps must be finished. NULL is ignored. */
    void (*session_leave)(struct moe_session *);

    /* Enqueues one forward step, and does not wait for peers. Steps of a session, of any kind, run
     * in the order of enqueueing. All live slots must enqueue the same sequence of kinds and of
     * (layer shape, dtype, bucket). At most two steps of a session may be unfinished; a third is
     * MOE_FAILED_PRECONDITION. The args struct is copied. The memory behind its pointers belongs to
     * the step until step_wait returns something other than MOE_DEADLINE_EXCEEDED. After an error
     * of this call there is no step. Errors: wrong arguments, a session that has ended, no memory,
     * or a device that fails, which ends the session. */
    struct moe_status (*step_enqueue)(struct moe_session *, const struct moe_step_args *,
                                      struct moe_step **out);
    /* Waits for the step, at most until `deadline_ns` (monotonic); a deadline of 0 only checks.
     * MOE_DEADLINE_EXCEEDED: the step is still running. Any other return is the step's result, and
     * the step is freed. A step that could not start returns its error here: an earlier step
     * ended the session, or memory was missing. MOE_UNAVAILABLE/PEER_LOST:
     * result->missing_slot is set, y is undefined, and the session can only be left. */
    struct moe_status (*step_wait)(struct moe_step *, uint64_t deadline_ns,
                                   struct moe_step_result *result);

    /* Parts: the code of a step, each part callable alone, synchronous. Tensors are in device
     * memory. Those of dispatch, the products and combine have W = moe_expert_width columns: with a
     * latent space, the caller projects x before dispatch, and y after combine. */

    /* ids, weights [T,K] f32, token_state [T]; as in moe_step_args. */
    struct moe_status (*router_forward)(struct moe_layer *, enum moe_dtype, uint32_t tokens,
                                        const void *x, const uint8_t *mode, const int32_t *ids_in,
                                        const float *weights_in, int32_t *ids, float *weights,
                                        uint8_t *token_state);
    /* Collective: exchanges counts, then moves rows. `out` describes the receive side. */
    struct moe_status (*dispatch)(struct moe_session *, struct moe_layer *, enum moe_dtype,
                                  uint32_t bucket, uint32_t tokens, const void *x,
                                  const int32_t *ids, const float *weights, struct moe_rows *out);
    /* hidden [start[local], I] f32 = act(rows.x Wg^T + bg, rows.x Wu^T + bu); input weighting uses
     * weight * rows.x instead of rows.x. With BF16 the values may be rounded to it. */
    struct moe_status (*gemm_gate_up)(struct moe_layer *, enum moe_dtype, const struct moe_rows *,
                                      float *hidden);
    /* out [start[local], W] f32 = weight * (hidden Wd^T + b); input weighting has no weight here.
     * Early weighting multiplies here too, which gives the same value. If the weight came before a
     * rounding to BF16, rows of one expert could not cancel. The dtype is that of the step. With
     * BF16, hidden may be rounded to it first. */
    struct moe_status (*gemm_down)(struct moe_layer *, enum moe_dtype, const struct moe_rows *,
                                   const float *hidden, float *out);
    /* Collective, after dispatch with the same arguments: y [T,W] = sum over k of the weighted
     * rows in fixed order (fp32), plus the zero experts' w * x; 0 for tokens without a row. */
    struct moe_status (*combine)(struct moe_session *, struct moe_layer *, enum moe_dtype,
                                 uint32_t bucket, uint32_t tokens, const void *x,
                                 const int32_t *ids, const float *weights, const struct moe_rows *,
                                 const float *expert_out, void *y);
    /* y [T,H] += shared(x); does nothing if the layer has no shared expert. */
    struct moe_status (*shared_forward)(struct moe_layer *, enum moe_dtype, uint32_t tokens,
                                        const void *x, float *y);
};

extern const struct moe_backend moe_backend_cpu;

/* The options of each backend that has any, also of those that this host lacks: the same command
 * line serves every host. Ends with NULL. */
extern const struct moe_backend_option *const moe_backend_option_tables[];

/* main calls this once, before the process has a second thread. Sets environment variables for
 * libraries below the backends, unless they are set. Without this call, a session with several GPUs
 * is refused. `interface`: the network interface for rows between hosts; it overrides variables
 * that are set. NULL: CPUs use `suggested` unless UCX_NET_DEVICES is set, or with NULL all
 * interfaces, and NCCL chooses. Errors: MOE_RESOURCE_EXHAUSTED/OUT_OF_MEMORY. */
struct moe_status moe_backends_prepare(const char *interface, const char *suggested) MOE_CHECKED;

/* Finds "cpu" or "cuda". The first call for "cuda" opens its module; it starts no driver. Threads:
 * any. Errors: MOE_NOT_FOUND/UNSUPPORTED (the module is not installed); MOE_FAILED_PRECONDITION
 * with the library that is missing (UNSUPPORTED), or with the builds that differ
 * (VERSION_MISMATCH); MOE_INVALID_ARGUMENT (no such name). */
struct moe_status moe_backend_find(const char *name, const struct moe_backend **out) MOE_CHECKED;

/* cuda if a device is available, else cpu; then `why_not_cuda` is a failure with the reason. */
const struct moe_backend *moe_backend_auto(struct moe_status *why_not_cuda);

#endif
