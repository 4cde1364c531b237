/* SPDX-License-Identifier: Apache-2.0 */
/* A group of one worker for the tests of the request path: CPU backend, two small layers with
 * random weights and their oracles, an engine, and a real sequencer behind it. */
#ifndef MOE_TEST_WORKER_FIXTURE_H
#define MOE_TEST_WORKER_FIXTURE_H

#include "base/mutex.h"
#include "daemon/progress.h"
#include "engine/engine.h"
#include "models/models.h"
#include "moe/backend.h"
#include "oracle/oracle.h"
#include "schedule/sequencer.h"
#include "support/check.h"
#include "support/random.h"

#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>

/* Layer 1: softmax, renormalised, E = 8, K = 2, H = 24. Layer 4: sigmoid with selection bias and a
 * shared expert, E = 300 and Z = 4 (ids need 16 bits), K = 3, H = 40. */
enum { WORKER_LAYERS = 2, WORKER_BUCKET = 16, WORKER_QUEUE = 4096 };
enum { WORKER_HIDDEN = 64 }; /* of the widest added model */

struct worker {
    struct moe_device *device;
    struct moe_layer_spec spec[WORKER_LAYERS];
    const struct moe_layer_spec *specs[WORKER_LAYERS];
    struct moe_layer *layers[WORKER_LAYERS];
    struct moe_placement placement[WORKER_LAYERS]; /* all experts on slot 0 */
    uint32_t offset[WORKER_LAYERS][MOE_MAX_EXPERTS + 1];
    uint16_t slot[WORKER_LAYERS][MOE_MAX_EXPERTS];
    struct moe_placement *placements; /* what the engine takes for them */
    struct moe_oracle_layer *oracles[WORKER_LAYERS];
    struct moe_engine *engine;
    struct moe_session *session;
    uint64_t epoch;        /* of the last view */
    struct moe_mutex lock; /* of the sequencer */
    struct moe_sequencer *sequencer;
    _Atomic uint64_t tickets, beats;
    _Atomic uint64_t added, removed; /* calls of model_changed */
    struct moe_models *models;       /* gets them, too; NULL = none */
};

/* Of the engine's configuration; 1 ms. Set it before worker_open. */
extern uint64_t worker_parts_wait_ns;
/* Runs the engine's steps: the CPU's, or a table of a test that calls it. Set it before
 * worker_open. */
extern const struct moe_backend *worker_backend;

void worker_open(struct worker *w); /* no view yet */
/* The same, and an engine that shows its progress and beats. `p` outlives the worker. */
void worker_open_watched(struct worker *w, struct moe_progress *p);
void worker_start_view(struct worker *w);
void worker_stop_view(struct worker *w); /* if there is one */
void worker_close(struct worker *w);
/* The sequencer is to serve an added model, or not; the second waits until its ticket has run. */
void worker_order_change(struct worker *w, uint32_t model, bool serve);
void worker_change_model(struct worker *w, uint32_t model, bool serve);

/* One request with all its tensors, filled at random. */
struct request {
    struct moe_work work;
    int layer; /* index into the worker's */
    void *x, *y;
    int32_t *ids_in, *ids_out;
    float *weights_in, *weights_out;
    struct moe_status status;
    _Atomic int done; /* times `done` was called */
};

void request_fill(struct request *r, const struct worker *w, int layer, uint32_t tokens,
                  enum moe_dtype dtype, enum moe_routing_mode mode);
void request_free(struct request *r);
/* Waits until `done` was called; fails the test after half a minute. */
void request_wait(struct request *r);
/* Submits and waits. */
struct moe_status request_run(struct request *r, struct worker *w);
/* Fails unless the answer is the oracle's, within the tolerance of its dtype. */
void request_check(const struct request *r, const struct worker *w);

#endif
