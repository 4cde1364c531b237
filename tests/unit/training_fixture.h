/* SPDX-License-Identifier: Apache-2.0 */
/* An engine with everything of the training room real and the backend a script (training_script.h),
 * of one layer and one view after the other; tickets are the test's. One test at a time. */
#ifndef MOE_TEST_TRAINING_FIXTURE_H
#define MOE_TEST_TRAINING_FIXTURE_H

#include "base/clock.h"
#include "base/mutex.h"
#include "engine/engine.h"
#include "engine_hooks.h"
#include "training/training.h"
#include "training_script.h"

enum { HIDDEN = SCRIPT_HIDDEN, BUCKET = 8, CLIENTS_MAX = 72, TICKETS = 80 };

/* Who asks for a training call. */
struct client {
    struct moe_train_work work;
    struct moe_train_call call;
    struct moe_train_answer answer;
    struct moe_status status;
    int done;
    float x[BUCKET * HIDDEN], dy[BUCKET * HIDDEN], dx[BUCKET * HIDDEN];
    int32_t ids[BUCKET];
};

struct training_fixture {
    struct moe_engine *engine;
    struct moe_train *train;
    struct moe_mutex lock;
    struct moe_ticket announced[TICKETS]; /* calls with an order, as announced */
    int announced_count, finished_count;
    bool blocked; /* weight updates: last argument of block_weight_updates */
    int block_count;
    struct moe_status last;
    struct client clients[CLIENTS_MAX];
    struct moe_work forward;
    float x[64 * HIDDEN], y[64 * HIDDEN];
    struct moe_status forward_status;
    int forward_done;
    uint64_t epoch, seq;
};
extern struct training_fixture test;

/* For cmocka; the first view is in force. What is saved or answered is kept for an hour, by the
 * clock of the test (support/test_clock.h). */
#define KEPT_NS (3600 * MOE_NS_PER_S)
int open_engine(void **state);
/* With adapters of rank 2 in place of the experts themselves. */
int open_adapters(void **state);
/* The same with a backend that trains with copies of experts. */
int open_copies(void **state);
int close_engine(void **state);
#define with_engine(name) cmocka_unit_test_setup_teardown(name, open_engine, close_engine)

/* The next view, of steps of `bucket` tokens at most. */
void begin_view_of(uint32_t bucket);
void begin_view(void);

/* Client i asks; `value` makes the content. */
void ask(int i, enum moe_step_kind kind, uint64_t id, float value);
/* The `n`-th announced call gets the next ticket; `origin` is the slot that it is said to be of. */
void order(int n, uint32_t origin);
void order_forward(uint32_t bucket);
/* test.forward asks; its end is counted in test.forward_done. */
void forward(uint32_t tokens, uint64_t version);
void on_forward_done(struct moe_work *w, struct moe_status status);

/* Fails the test after half a minute. */
void wait_until(const int *value, int wanted, struct moe_mutex *lock);
void wait_done(int i);
void hold_steps(bool hold);
struct moe_train_state state_now(void);

#endif
