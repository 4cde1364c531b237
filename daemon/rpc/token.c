/* SPDX-License-Identifier: Apache-2.0 */
/* The bearer token of a channel: read from its file, and again when the file has changed. */
#include "base/clock.h"
#include "daemon/trusted_file.h"
#include "rpc/calling.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define LOOK_NS MOE_NS_PER_S

static const char scheme[] = "Bearer ";

/* Errors: those of moe_token_read; MOE_RESOURCE_EXHAUSTED. */
static struct moe_status read_header(const char *path, grpc_slice *header)
{
    char *token, *text = NULL;
    MOE_TRY(moe_token_read("token", path, &token));
    int n = asprintf(&text, "%s%s", scheme, token);
    explicit_bzero(token, strlen(token));
    free(token);
    if (n < 0)
        return moe_error(MOE_RESOURCE_EXHAUSTED, MOE_REASON_OUT_OF_MEMORY, "no memory for a token");
    *header = grpc_slice_from_copied_string(text);
    explicit_bzero(text, (size_t)n);
    free(text);
    return moe_ok();
}

struct moe_status moe_rpc_token_open(const char *path, struct moe_rpc_token **out)
{
    struct moe_rpc_token *t = calloc(1, sizeof *t);
    if (t == NULL)
        return moe_error(MOE_RESOURCE_EXHAUSTED, MOE_REASON_OUT_OF_MEMORY, "no memory for a token");
    moe_mutex_init(&t->lock);
    moe_mutex_not_shared(&t->lock);
    t->path = strdup(path);
    t->header = grpc_empty_slice();
    t->looked_ns = moe_clock_ns();
    (void)moe_trusted_file_changed(path, &t->mark);
    struct moe_status st =
        t->path != NULL
            ? read_header(path, &t->header)
            : moe_error(MOE_RESOURCE_EXHAUSTED, MOE_REASON_OUT_OF_MEMORY, "no memory for a token");
    if (moe_failed(&st)) {
        moe_rpc_token_close(t);
        return st;
    }
    *out = t;
    return st;
}

void moe_rpc_token_close(struct moe_rpc_token *t)
{
    if (t == NULL)
        return;
    moe_mutex_not_shared(&t->lock);
    grpc_slice_unref(t->header);
    free(t->path);
    moe_mutex_destroy(&t->lock);
    free(t);
}

grpc_slice moe_rpc_token_header(struct moe_rpc_token *t)
{
    grpc_slice newer;
    moe_mutex_lock(&t->lock);
    uint64_t now = moe_clock_ns();
    if (now - t->looked_ns >= LOOK_NS) {
        t->looked_ns = now;
        if (moe_trusted_file_changed(t->path, &t->mark)) {
            /* A file that does not validate leaves the old token in use. */
            struct moe_status st = read_header(t->path, &newer);
            if (!moe_failed(&st)) {
                grpc_slice_unref(t->header);
                t->header = newer;
            }
        }
    }
    grpc_slice header = grpc_slice_ref(t->header);
    moe_mutex_unlock(&t->lock);
    return header;
}
