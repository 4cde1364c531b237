/* SPDX-License-Identifier: Apache-2.0 */
/* A server with the ExpertService of a worker, in the test's own process: it computes y = 2 x,
 * keeps count of what it was asked, and misbehaves on demand. */
#ifndef MOE_TEST_FAKE_EXPERT_H
#define MOE_TEST_FAKE_EXPERT_H

#include "base/mutex.h"
#include "moe/v1/expert.pb-c.h"
#include "rpc/server.h"

enum {
    FAKE_LAYER = 3,
    FAKE_HIDDEN = 24,
    FAKE_EXPERTS = 8,
    FAKE_TOP_K = 2,
    FAKE_VOCABULARY = 100, /* experts of token id t: t % 8 and (t + 1) % 8 */
    FAKE_MAX_TOKENS = 16384,
    FAKE_CALLS_MAX = 512,
    FAKE_SCRIPT_MAX = 16,
};

/* A model next to the default one, "fake": its width is FAKE_HIDDEN too. */
#define FAKE_ADDED "added"
/* Others are MODEL_NOT_FOUND. */

/* What to do with one request. */
enum fake_mood {
    FAKE_GOOD,
    FAKE_FAIL,       /* with fake->failure */
    FAKE_SILENT,     /* never answers */
    FAKE_HELD,       /* stream: answers together with the next request, after it */
    FAKE_END,        /* stream: ends the stream instead */
    FAKE_NO_ID,      /* stream: bytes that are no message */
    FAKE_UNKNOWN_ID, /* stream: first an answer to a request that was not sent, then the right one
                      */
    FAKE_LAST_ID,    /* stream: the id comes after the tensors */
    /* broken answers */
    FAKE_SHORT_Y,
    FAKE_LONG_Y,
    FAKE_NO_Y,
    FAKE_TWO_Y,
    FAKE_OTHER_TOKENS,
    FAKE_OTHER_DTYPE,
    FAKE_NOT_PROTOBUF,
    FAKE_TRUNCATED,
    FAKE_UNASKED_ROUTING,
    FAKE_SHORT_IDS,
    FAKE_NO_WEIGHTS,
    FAKE_OTHER_K,
    FAKE_ODD_IDS_DTYPE,
};

struct fake {
    struct moe_rpc_server *server;
    char endpoint[32];
    uint32_t slot, worker_count; /* of the group it claims to belong to */
    const struct fake *workers;
    _Atomic uint64_t weights_version;
    _Atomic uint32_t ids_dtype; /* of returned ids: 3 U8, 4 U16, 5 I32 */
    _Atomic uint64_t epoch;     /* of answers */
    /* What it tells a request that asks; NULL: it does not know re-homed experts. Borrowed. */
    const Moe__V1__RehomedExperts *_Atomic rehomed;

    _Atomic bool joins_parts; /* it has the extension "batch_parts" */

    struct moe_mutex lock; /* guards everything below */
    struct moe_status failure;
    enum fake_mood script[FAKE_SCRIPT_MAX]; /* for the first requests; afterwards `mood` */
    uint32_t script_length;
    enum fake_mood mood;
    uint32_t calls;
    uint32_t tokens[FAKE_CALLS_MAX]; /* of each call */
    bool added[FAKE_CALLS_MAX];      /* whether each went to FAKE_ADDED */
    uint64_t batch[FAKE_CALLS_MAX];  /* that each is a part of, and the number of its parts; ... */
    uint32_t parts[FAKE_CALLS_MAX];  /* ... 0 = of none */
};

/* Starts `count` servers that know one another as one group. */
void fake_start(struct fake *all, uint32_t count);
/* With further methods; their ctx is the fake. */
enum { FAKE_MORE_METHODS_MAX = 8 };
void fake_start_with(struct fake *all, uint32_t count, const struct moe_rpc_method *more,
                     size_t more_count);
void fake_stop(struct fake *all, uint32_t count);
/* Those of test programs: with_fakes(test) starts them before the test, and stops them after. */
enum { FAKES = 3 };
extern struct fake fakes[FAKES];
int start_fakes(void **state);
int stop_fakes(void **state);
#define with_fakes(test) cmocka_unit_test_setup_teardown(test, start_fakes, stop_fakes)
uint32_t fake_calls(struct fake *f);
/* What it says where it fails. */
void fake_fail_with(struct fake *f, struct moe_status failure);
/* The script starts anew, and so does the count. */
void fake_script(struct fake *f, enum fake_mood then, uint32_t length,
                 const enum fake_mood *script);

/* The id and weight that the server "routes" token row to, as its k-th choice. */
int32_t fake_id(uint32_t row, uint32_t k);
float fake_weight(uint32_t k);

#endif
