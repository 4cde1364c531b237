/* SPDX-License-Identifier: Apache-2.0 */
/* Errors as values.
 *
 * Every call that can fail returns a `struct moe_status`: a code (numerically a gRPC status code),
 * a machine-readable reason, and one sentence for a person. The struct is returned by value, so its
 * layout is fixed for all releases with the same soname. */
#ifndef MOE_STATUS_H
#define MOE_STATUS_H

#include <stdbool.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* Marks every function that returns a status. The compiler warns when a caller ignores it. */
#define MOE_CHECKED __attribute__((warn_unused_result))

/* Values are those of google.rpc.Code. */
enum moe_code {
    MOE_OK = 0,
    MOE_CANCELLED = 1,
    MOE_UNKNOWN = 2,
    MOE_INVALID_ARGUMENT = 3,
    MOE_DEADLINE_EXCEEDED = 4,
    MOE_NOT_FOUND = 5,
    MOE_ALREADY_EXISTS = 6,
    MOE_PERMISSION_DENIED = 7,
    MOE_RESOURCE_EXHAUSTED = 8,
    MOE_FAILED_PRECONDITION = 9,
    MOE_ABORTED = 10,
    MOE_OUT_OF_RANGE = 11,
    MOE_UNIMPLEMENTED = 12,
    MOE_INTERNAL = 13,
    MOE_UNAVAILABLE = 14,
    MOE_DATA_LOSS = 15,
    MOE_UNAUTHENTICATED = 16,
};

/* One list for the enum, for ErrorInfo.reason on the wire (the name without MOE_REASON_), and for
 * metrics labels. Names and numbers are a contract with clients: add at the end, never rename. */
#define MOE_REASONS(X)                                                                             \
    X(NONE)               /* nothing more to say than the code */                                  \
    X(MALFORMED)          /* not the protobuf, JSON or safetensors it claims to be */              \
    X(TRUNCATED)          /* ends inside a field */                                                \
    X(TOO_LARGE)          /* over a fixed size limit */                                            \
    X(DUPLICATE_TENSOR)   /* a tensor field occurs twice in one message */                         \
    X(SHAPE_MISMATCH)     /* tokens, hidden or top-k disagree with the layer or with the bytes */  \
    X(DTYPE_UNSUPPORTED)  /* dtype unknown or not served */                                        \
    X(ROUTING_INVALID)    /* ids or weights missing, superfluous or contradictory */               \
    X(EXPERT_INDEX_RANGE) /* an expert id is >= E */                                               \
    X(NONFINITE_LOGITS)   /* router logits of a token are NaN or infinite */                       \
    X(MODEL_NOT_FOUND)    /* no such model is served here */                                       \
    X(LAYER_NOT_FOUND)    /* the model has no MoE layer of that number */                          \
    X(TOKEN_LIMIT)        /* more tokens than a request may carry */                               \
    X(QUEUE_FULL)         /* queue, byte budget or staging memory exhausted: retry later */        \
    X(DRAINING)           /* the worker is leaving: use another one */                             \
    X(REFORMING)          /* no committed view at the moment: retry */                             \
    X(EXPERT_UNAVAILABLE) /* no live slot holds a needed expert */                                 \
    X(PEER_LOST)          /* a peer died or did not answer within its budget */                    \
    X(STALE_EPOCH)        /* the call carries an epoch that is not the current one */              \
    X(VERSION_MISMATCH)   /* weights version, model fingerprint or protocol version differs */     \
    X(CONFIG_UNKNOWN_KEY) /* a setting or model key that changes results and is not understood */  \
    X(CONFIG_INVALID)     /* a setting or model key with an impossible value */                    \
    X(TENSOR_MISSING)     /* the checkpoint lacks a tensor that the layer needs */                 \
    X(TENSOR_INVALID)     /* a tensor has the wrong shape, dtype or place */                       \
    X(OUT_OF_MEMORY)      /* an allocation failed or would not fit */                              \
    X(IO)                 /* the operating system refused a file or socket operation */            \
    X(ABORTED)            /* the owner cancelled the wait */                                       \
    X(UNSUPPORTED)        /* well understood, and deliberately not offered */                      \
    X(NAME_INVALID)       /* a session or checkpoint name with other characters than allowed */    \
    X(VALUE_INVALID)      /* an id of 0, or a number that makes no sense */                        \
    X(ID_REUSED)          /* a training call's id is known with other content */                   \
    X(ID_TOO_OLD)         /* an id below a forgotten one: the call may have been run */            \
    X(RECORDED_ELSEWHERE) /* the answer is on the worker at the end of the text */                 \
    X(ANSWER_GONE)        /* the call has been run, and its answer is not cached any more */       \
    X(RETAINED_PASS_GONE) /* the worker has dropped the retained pass: send x and routing */       \
    X(STATE_LOST)         /* the call carries a lineage that is not the current one */             \
    X(GRADIENTS_MISSING)  /* fewer or more Backward calls than the caller expects */               \
    X(GRADIENTS_PENDING)  /* not between Backward and OptimizerStep */                             \
    X(CHECKPOINT_EXISTS)  /* the name is taken */                                                  \
    X(CHECKPOINT_NOT_FOUND) /* there is none of that name */                                       \
    X(SAVE_RUNNING)         /* a checkpoint is being written or loaded: one at a time */           \
    X(CANNOT_GO_BACK)       /* the group cannot restore its recovery target: it waits for */       \
                            /* RecoverTraining, or for the file */                                 \
    X(LEASE_LOST) /* this worker cannot know whether its view is in force, and the group trains */ \
    X(SLOT_TAKEN) /* the coordinator has no free slot for this worker */                           \
    X(MODEL_MISMATCH)   /* the bytes of the weights are not those that are wanted */               \
    X(REGION_NOT_FOUND) /* the client has no such region of shared memory, or it is closing */     \
    X(REGION_EXISTS)    /* the client has a region of that name, or of the same memory */          \
    X(REGION_INVALID)   /* not memory that can be shared: without its seals, empty */              \
    X(REGION_RANGE)     /* a tensor is not inside of its region, or not aligned */                 \
    X(REGION_OVERLAP)   /* an output shares bytes with a tensor in flight */                       \
    X(REGION_LIMIT)     /* over the limit of shared memory, of regions or of clients */            \
    X(MODEL_LOADING)    /* some slots have not loaded the model: retry */                          \
    X(MODEL_IN_USE)     /* requests for the model are in flight */                                 \
    X(NOT_LEADER)       /* this coordinator does not lead; the end of the text names the leader */ \
    X(GRADIENTS_LOST)   /* the gradients of some Backward calls went with a worker: send the */    \
                        /* calls that GetTrainState names again */

enum moe_reason {
#define X(name) MOE_REASON_##name,
    MOE_REASONS(X)
#undef X
        MOE_REASON_COUNT
};

enum { MOE_STATUS_TEXT = 232 };

struct moe_status {
    enum moe_code code;
    enum moe_reason reason;
    uint32_t retry_after_ms; /* > 0: safe to try again after this long (RetryInfo) */
    char text[MOE_STATUS_TEXT];
};

/* Success. Only the head of the struct is meaningful then: `text` is not written. */
static inline struct moe_status moe_ok(void)
{
    struct moe_status s;
    s.code = MOE_OK;
    s.reason = MOE_REASON_NONE;
    s.retry_after_ms = 0;
    s.text[0] = '\0';
    return s;
}

static inline bool moe_failed(const struct moe_status *s)
{
    return s->code != MOE_OK;
}

/* "RESOURCE_EXHAUSTED", "QUEUE_FULL"; "?" for values outside the enums. Never NULL. */
const char *moe_code_name(enum moe_code code);
const char *moe_reason_name(enum moe_reason reason);
/* The reverse; MOE_REASON_NONE for unknown names (a newer server). */
enum moe_reason moe_reason_from_name(const char *name);

#ifdef __cplusplus
}
#endif

#endif
