/* SPDX-License-Identifier: Apache-2.0 */
/* Benchmark of a whole MoE layer through the backend interface alone: router, prepare, dispatch,
 * both GEMMs, shared expert, combine, one process per slot.
 *
 * moe_bench.c           options, and the sequence on one slot
 * shapes.c              layers of released models
 * moe_bench_shape.c     random weights, uploading them
 * moe_bench_step.c      inputs and their routing, checking a step, timing it
 * moe_bench_backward.c  the same for backward passes
 * moe_bench_report.c    output: one table row and one line of JSON per measurement */
#ifndef MOE_BENCH_H
#define MOE_BENCH_H

#include "group.h"
#include "moe/training.h"
#include "plain_layer.h"
#include "shapes.h"

#include <stdio.h>

enum {
    BENCH_MAX_LENGTHS = 16,    /* token counts of one call */
    BENCH_MAX_REPEATS = 10000, /* timed steps of one line */
    BENCH_SAMPLES = 16,        /* tokens checked against exact arithmetic */
    BENCH_WARM_UP = 5,         /* steps before the timed ones */
    BENCH_BARRIER_MS = 10 * 60 * 1000,
};

/* How tokens choose experts. */
enum bench_routing {
    BENCH_ROUTER,     /* the layer's router on random weights: near uniform */
    BENCH_UNIFORM,    /* given ids: K different ones, uniform */
    BENCH_ZIPF,       /* given ids: expert of rank r with weight 1 / (r + 1), ranks shuffled */
    BENCH_ONE_EXPERT, /* given ids: every token's first choice is expert 0, the others uniform */
    BENCH_ONE_SLOT,   /* given ids: all choices among the experts of slot 0 */
    BENCH_ROUTINGS
};

/* Random bf16 numbers. Each weight is a piece of them at a different offset. So tens of gigabytes
 * of weights need a fraction of a gigabyte of host memory, and any process can look one up. Shared
 * by all slots. */
struct bench_pool {
    const uint16_t *values;
    size_t count;
    struct moe_weight_format format; /* of quantised experts; else the rest is NULL */
    const uint8_t *codes;            /* elements: the values over BENCH_SCALE, or random ones */
    const void *scales;              /* all the same */
};
#define BENCH_SCALE 0x1p-13f

/* Kinds of backward passes, added up. ADDS: gradients add to others; else they begin as zeros, and
 * a backend may overwrite them. FROM_RETAINED: uses a forward step's retained values; else only
 * tokens. */
enum { BENCH_ADDS = 1, BENCH_FROM_RETAINED = 2, BENCH_BACKWARD_KINDS = 4 };

/* Backward passes of one slot, by kind; medians in microseconds. */
struct bench_backward_report {
    double stage_us[BENCH_BACKWARD_KINDS][MOE_BACKWARD_STAGE_COUNT];
    double layer_us[BENCH_BACKWARD_KINDS]; /* sum of the stages */
    double wall_us[BENCH_BACKWARD_KINDS];  /* from enqueue to result, including copies from and to
                                              host memory */
    double plain_us, retaining_us; /* forward steps, one in flight: sum of the stages, without and
                                      with retaining */
    double retained_mib;           /* of one step */
    bool retains;                  /* this slot retained it */
    double error;  /* of dx and sampled gradients against exact fp32, relative Frobenius */
    uint64_t rows; /* (token, expert) pairs computed here */
    bool on_tensor_cores;
};

/* Results of one slot; medians in microseconds unless stated otherwise. */
struct bench_slot_report {
    double upload_gb_s;               /* weights from plain host memory, until the layer is
                                         finished */
    double pinned_gb_s;               /* one copy of pinned memory to the device */
    double stage_us[MOE_STAGE_COUNT]; /* two steps in flight */
    double layer_us;                  /* sum of a step's stages: device time of the layer */
    double gemm_us;                   /* gemm1 + gemm2 + shared of a step */
    double wall_us;                   /* time per step, two in flight, host copies included */
    double alone_us;                  /* one step from enqueue to result, none other in flight */
    double alone_layer_us;            /* sum of its stages */
    double alone_stage_us[MOE_STAGE_COUNT];
    double enqueue_us;   /* the calling thread's time in step_enqueue */
    double exact_error;  /* sampled rows against exact fp32, relative Frobenius */
    double oracle_error; /* against double precision; negative: not compared */
    uint64_t rows;       /* (token, expert) pairs computed here */
    struct bench_backward_report backward;
};

struct bench_plan {
    const struct moe_backend *backend;
    const char *shapes, *routings; /* comma-separated names, or "all" */
    const char *json;              /* NULL: none */
    const char *weights;           /* of experts: see --weights */
    uint64_t slots;
    uint64_t experts;    /* overrides the preset's when not 0 */
    uint64_t like_slots; /* not 0: experts per slot as in a group of that many slots */
    uint64_t sources;    /* slots with tokens; the others take part without tokens */
    uint64_t repeats, oracle_tokens, timeout_s;
    bool backward; /* also backward passes, with the router's choices */
    uint32_t length[BENCH_MAX_LENGTHS], lengths; /* tokens per slot */
    struct bench_pool pool;
    struct bench_slot_report *report; /* [slots], shared memory */
};

/* State of one slot for one shape. */
struct bench {
    const struct bench_plan *plan;
    struct member *member;
    struct moe_device *device;
    struct moe_session *session;
    struct moe_layer *layer;
    const struct bench_shape *shape;
    struct dealt homes; /* of the shape's experts */
};

/* If the status is an error, prints a message and ends the process. */
void bench_require(const struct bench *b, const char *what, struct moe_status st);
/* The same if memory is missing; zeroed. */
void *bench_alloc(const struct bench *b, size_t bytes);
/* Waits for all slots; ends the process if one of them is gone. */
void bench_meet(struct bench *b);

/* ------------------------------------------------------------------ shape */

/* The pool for all presets, for these weights; false without memory for it. */
bool bench_pool_make(const char *weights, struct bench_pool *out);
/* Gives the experts of a spec the weights of the plan. */
void bench_set_format(const struct bench_plan *plan, struct moe_layer_spec *spec);
/* Whether a weight of the shape is quantised. */
bool bench_is_quantised(const struct bench *b, enum moe_weight w);
/* Start of a weight's values: rows x columns of them. */
const uint16_t *bench_weight(const struct bench *b, enum moe_weight w, uint32_t expert);
/* The same of a quantised one. */
struct moe_packed_matrix bench_matrix(const struct bench *b, enum moe_weight w, uint32_t expert);
/* Fills b->layer with all weights of this slot, and both upload figures in the report. */
void bench_make_layer(struct bench *b);

/* ------------------------------------------------------------------- step */

/* Measures one (tokens, routing) on all slots together and fills the slot's report. If a result is
 * wrong, prints a message and returns false. */
bool bench_measure(struct bench *b, uint32_t tokens, enum bench_routing routing);

/* The same for backward passes, with the router's choices. */
bool bench_measure_backward(struct bench *b, uint32_t tokens);

/* Call once all slots have measured forward steps. Whether all retained theirs. */
bool bench_all_retain(const struct bench *b);

/* ----------------------------------------------------------------- report */

const char *bench_routing_name(enum bench_routing routing);
void bench_print_layer(const struct bench *b);
void bench_print_header(void);
/* From all slots' reports; slot 0 calls it while the others wait. */
void bench_print(const struct bench *b, uint32_t tokens, enum bench_routing routing, FILE *json);
void bench_print_backward(const struct bench *b, uint32_t tokens, FILE *json);

#endif
