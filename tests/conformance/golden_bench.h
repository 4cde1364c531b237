/* SPDX-License-Identifier: Apache-2.0 */
/* Shared by the programs that compare a backend with recorded data: golden (outputs),
 * golden_training (gradients), curve (losses). They exit at the first call that fails, without
 * cleaning up. */
#ifndef MOE_TEST_GOLDEN_BENCH_H
#define MOE_TEST_GOLDEN_BENCH_H

#include "group.h"
#include "plain_layer.h"

#include "model/model.h"
#include "model/safetensors.h"
#include "support/golden.h"

enum {
    GOLDEN_TOKENS = 37, /* the longer of the two recorded batches; the other has one token */
    GOLDEN_HIDDEN = 64, /* the widest golden model */
    GOLDEN_BUCKET = 64,
    GOLDEN_EXPERTS = 512, /* every backend allows so many */
    GOLDEN_BUDGET_MS = 60000
};

/* Exits with a message unless `st` is a success. */
void must(struct moe_status st);

/* A tensor of n floats; the caller frees it. Exits if there is none of that size. */
float *read_floats(const struct moe_st_file *file, const char *name, size_t n);
/* The same for "layer3.T37.x". */
float *read_golden(const struct moe_st_file *file, uint32_t layer, uint32_t tokens,
                   const char *what, size_t n);

/* Elements of tokens in the dtype of a step. */
void put_elements(void *to, enum moe_dtype dtype, size_t n, const float *from);
float element(enum moe_dtype dtype, const void *data, size_t i);

/* One slot: a device, its session, the tensors of a step, and the current layer. */
struct golden_bench {
    const struct moe_backend *backend;
    struct moe_device *device;
    struct moe_session *session;
    struct moe_layer *layer;
    const struct moe_layer_spec *spec;
    struct dealt homes; /* of the layer's experts */
    uint32_t slot, slots;
    void *x, *dy, *y; /* [GOLDEN_TOKENS, GOLDEN_HIDDEN] F32, host memory of the backend */
    int32_t *ids;     /* [GOLDEN_TOKENS, MOE_MAX_TOP_K] */
    float *weights;
    uint8_t *state; /* [GOLDEN_TOKENS] */
};

/* `backend`, `slot` and `slots` are set. */
void golden_open(struct golden_bench *b, const struct moe_device_config *device,
                 const struct moe_session_config *session);
void golden_close(struct golden_bench *b);
/* The model's layer `i`, loaded as in a worker. */
void golden_load_layer(struct golden_bench *b, const struct moe_model *m, size_t i);
/* Runs a forward step of `tokens` tokens in x, routed by the router. */
void golden_forward(struct golden_bench *b, enum moe_dtype dtype, uint32_t tokens);

/* The main of a program that trains in a group of processes: --backend, --slots, --transport, and
 * the directory of its data. Exits with 0 if all members returned 0, and with 77 for a backend that
 * cannot train. */
struct training_program {
    const struct moe_backend *backend;
    uint64_t slots, max_slots;
    const char *data;            /* directory; the default before the command line is read */
    const char *option;          /* its name there */
    size_t share_bytes;          /* of memory for each slot to show to the others */
    void *share;                 /* zeros at first */
    int (*run)(struct member *); /* ctx is the program */
};
int training_main(struct training_program *p, int argc, char **argv);

/* Waits until all members have called it. */
void await_members(struct member *m);

#endif
