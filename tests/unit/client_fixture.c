/* SPDX-License-Identifier: Apache-2.0 */
/* See client_fixture.h. */
#include "client_fixture.h"

#include "base/mutex.h"
#include "base/wait.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

enum { POISON = 0xab };

static struct moe_mutex lock = MOE_MUTEX_INITIALIZER;
static pthread_cond_t change = PTHREAD_COND_INITIALIZER;

static size_t tensor_bytes(const struct request *r)
{
    return (size_t)r->f.tokens * r->f.hidden * moe_dtype_bytes(r->f.dtype);
}

struct request *make_request(uint32_t tokens, enum moe_dtype dtype, bool return_routing)
{
    struct request *r = calloc(1, sizeof *r);
    assert_non_null(r);
    size_t count = (size_t)tokens * FAKE_HIDDEN, routed = (size_t)tokens * FAKE_TOP_K;
    r->f = (struct moe_client_forward){.size = sizeof r->f,
                                       .layer = FAKE_LAYER,
                                       .tokens = tokens,
                                       .hidden = FAKE_HIDDEN,
                                       .dtype = dtype};
    uint8_t *x = malloc(count * 4);
    r->f.x = x;
    r->f.y = malloc(count * 4);
    if (return_routing) {
        r->f.topk_ids = malloc(routed * sizeof *r->f.topk_ids);
        r->f.topk_weights = malloc(routed * sizeof *r->f.topk_weights);
    }
    assert_true(x != NULL && r->f.y != NULL);
    for (size_t i = 0; i < count; i++) {
        float v = (float)(int32_t)(random_below(2048)) / 8.0f - 128.0f; /* exact, doubled too */
        uint16_t b = moe_f32_to_bf16(v);
        if (dtype == MOE_DTYPE_F32)
            memcpy(x + 4 * i, &v, 4);
        else
            memcpy(x + 2 * i, &b, 2);
    }
    poison_answer(r);
    return r;
}

void free_request(struct request *r)
{
    free((void *)(uintptr_t)r->f.x);
    free((void *)(uintptr_t)r->f.topk_ids_in);
    free((void *)(uintptr_t)r->f.topk_weights_in);
    free(r->f.y);
    free(r->f.topk_ids);
    free(r->f.topk_weights);
    free(r);
}

void poison_answer(struct request *r)
{
    memset(r->f.y, POISON, tensor_bytes(r));
    size_t routed = (size_t)r->f.tokens * FAKE_TOP_K;
    if (r->f.topk_ids != NULL) {
        memset(r->f.topk_ids, POISON, routed * sizeof *r->f.topk_ids);
        memset(r->f.topk_weights, POISON, routed * sizeof *r->f.topk_weights);
    }
}

bool is_poisoned(const struct request *r)
{
    const uint8_t *y = r->f.y;
    for (size_t i = 0; i < tensor_bytes(r); i++)
        if (y[i] != POISON)
            return false;
    return true;
}

static float element(const void *tensor, enum moe_dtype dtype, size_t i)
{
    float v;
    uint16_t b;
    if (dtype == MOE_DTYPE_F32) {
        memcpy(&v, (const uint8_t *)tensor + 4 * i, 4);
        return v;
    }
    memcpy(&b, (const uint8_t *)tensor + 2 * i, 2);
    return moe_bf16_to_f32(b);
}

void assert_answer(const struct request *r)
{
    const struct moe_client_forward *f = &r->f;
    size_t count = (size_t)f->tokens * f->hidden;
    for (size_t i = 0; i < count; i++) {
        float want = 2 * element(f->x, f->dtype, i), got = element(f->y, f->dtype, i);
        if (want != got)
            fail_msg("row %zu of %" PRIu32 ", column %zu: %g instead of %g", i / f->hidden,
                     f->tokens, i % f->hidden, (double)got, (double)want);
    }
    assert_int_equal(f->answered_epoch, 7);
}

void on_request_done(void *ctx, struct moe_client_forward *f, struct moe_status st)
{
    struct request *r = ctx;
    moe_mutex_lock(&lock);
    r->status = st;
    r->done = f == &r->f;
    r->done_count++;
    pthread_cond_broadcast(&change);
    moe_mutex_unlock(&lock);
}

void await_request(struct request *r)
{
    moe_mutex_lock(&lock);
    while (!r->done)
        moe_wait(&change, &lock);
    moe_mutex_unlock(&lock);
}

struct moe_client *connect_client(struct fake *first, const struct moe_client_config *with)
{
    struct moe_client_config config =
        with != NULL ? *with : (struct moe_client_config){.size = sizeof(struct moe_client_config)};
    struct moe_client *c = NULL;
    config.endpoint = first->endpoint;
    struct moe_status st = moe_client_connect(&config, &c);
    if (moe_failed(&st))
        fail_msg("connect: %s", st.text);
    return c;
}

void end_call(struct moe_client *c, struct request *r)
{
    free_request(r);
    moe_client_close(c);
}
