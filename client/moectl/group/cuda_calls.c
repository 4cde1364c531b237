/* SPDX-License-Identifier: Apache-2.0 */
/* See cuda_calls.h. All functions are those of the shared libraries, also libmoeclient's: the copy
 * of it inside moectl knows nothing of their sessions. */
#include "moectl/group/cuda_calls.h"

#include "base/library.h"
#include "base/size.h"

#include <stdlib.h>

enum { REQUESTS_MAX = 64 };

struct moectl_cuda {
    __typeof__(&moe_client_connect) connect;
    __typeof__(&moe_client_close) close;
    __typeof__(&moe_session_open) session_open;
    __typeof__(&moe_session_close) session_close;
    __typeof__(&moe_stream_session_open) stream_open;
    __typeof__(&moe_stream_session_close) stream_close;
    __typeof__(&moe_region_alloc) alloc;
    __typeof__(&moe_region_copy_in) copy_in;
    __typeof__(&moe_stream_request_create) create;
    __typeof__(&moe_stream_request_destroy) destroy;
    __typeof__(&moe_session_submit_on_stream) submit;
    __typeof__(&moe_session_wait_on_stream) wait;
    __typeof__(&moe_stream_request_result) result;

    struct moe_client *client;
    struct moe_client_session *session;
    struct moe_stream_session *streams;
    struct moe_client_region *region;
    struct moe_stream_request *requests[REQUESTS_MAX];
    uint32_t count;
};

/* A library's symbols include those of the libraries that it needs. */
static struct moe_status load(struct moectl_cuda *c)
{
    void *library;
    MOE_TRY(moe_error_context(moe_library_open("libmoeclient_cuda.so.1", &library),
                              "--transport cuda needs libmoeclient_cuda of a build with CUDA"));
    MOE_TRY(moe_library_find(library, "moe_client_connect", &c->connect));
    MOE_TRY(moe_library_find(library, "moe_client_close", &c->close));
    MOE_TRY(moe_library_find(library, "moe_session_open", &c->session_open));
    MOE_TRY(moe_library_find(library, "moe_session_close", &c->session_close));
    MOE_TRY(moe_library_find(library, "moe_stream_session_open", &c->stream_open));
    MOE_TRY(moe_library_find(library, "moe_stream_session_close", &c->stream_close));
    MOE_TRY(moe_library_find(library, "moe_region_alloc", &c->alloc));
    MOE_TRY(moe_library_find(library, "moe_region_copy_in", &c->copy_in));
    MOE_TRY(moe_library_find(library, "moe_stream_request_create", &c->create));
    MOE_TRY(moe_library_find(library, "moe_stream_request_destroy", &c->destroy));
    MOE_TRY(moe_library_find(library, "moe_session_submit_on_stream", &c->submit));
    MOE_TRY(moe_library_find(library, "moe_session_wait_on_stream", &c->wait));
    return moe_library_find(library, "moe_stream_request_result", &c->result);
}

static struct moe_status open_all(struct moectl_cuda *c, const struct moectl_cuda_config *config,
                                  size_t bytes)
{
    const struct moe_client_session_config session = {.size = sizeof session};
    const struct moe_stream_session_config streams = {
        .size = sizeof streams, .device = config->device, .spin = config->spin};
    MOE_TRY(load(c));
    MOE_TRY(c->connect(config->client, &c->client));
    MOE_TRY(c->session_open(c->client, &session, &c->session));
    MOE_TRY(c->stream_open(c->session, &streams, &c->streams));
    return c->alloc(c->streams, "bench", bytes, &c->region);
}

struct moe_status moectl_cuda_open(const struct moectl_cuda_config *config, size_t bytes,
                                   struct moectl_cuda **out)
{
    struct moectl_cuda *c = calloc(1, sizeof *c);
    if (c == NULL)
        return moe_error(MOE_RESOURCE_EXHAUSTED, MOE_REASON_OUT_OF_MEMORY, "a session");
    struct moe_status st = open_all(c, config, bytes);
    if (moe_failed(&st))
        moectl_cuda_close(c);
    else
        *out = c;
    return st;
}

void moectl_cuda_close(struct moectl_cuda *c)
{
    if (c == NULL)
        return;
    for (uint32_t i = 0; i < c->count; i++)
        c->destroy(c->requests[i]);
    if (c->streams != NULL)
        c->stream_close(c->streams);
    if (c->session != NULL)
        c->session_close(c->session); /* with its region */
    if (c->client != NULL)
        c->close(c->client);
    free(c);
}

struct moe_status moectl_cuda_add(struct moectl_cuda *c, const struct moe_client_forward *call,
                                  uint64_t x_at, uint64_t y_at, uint32_t *request)
{
    size_t bytes;
    if (c->count == REQUESTS_MAX ||
        !moe_size_mul3(call->tokens, call->hidden, moe_dtype_bytes(call->dtype), &bytes))
        return moe_error(MOE_INVALID_ARGUMENT, MOE_REASON_TOO_LARGE, "too many requests or tokens");
    const struct moe_client_session_forward f = {
        .size = sizeof f,
        .layer = call->layer,
        .tokens = call->tokens,
        .hidden = call->hidden,
        .dtype = call->dtype,
        .x = {c->region, x_at},
        .y = {c->region, y_at},
    };
    MOE_TRY(c->copy_in(c->streams, c->region, x_at, call->x, bytes));
    MOE_TRY(c->create(c->streams, &f, &c->requests[c->count]));
    *request = c->count++;
    return moe_ok();
}

struct moe_status moectl_cuda_submit(struct moectl_cuda *c, uint32_t request)
{
    return c->submit(c->requests[request], NULL);
}

struct moe_status moectl_cuda_await(struct moectl_cuda *c, uint32_t request,
                                    struct moe_client_session_answer *answer)
{
    MOE_TRY(c->wait(c->requests[request], NULL));
    return c->result(c->requests[request], answer);
}
