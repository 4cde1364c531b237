/* SHA-256 by libcrypto, in the form in which it is written into files: lower-case hexadecimal. It
 * names models and finds damaged checkpoints; it guards no secret.
 *
 * libcrypto may fail (memory). Nobody has to look before the end: `finish` tells. */
#ifndef MOE_MODEL_SHA256_H
#define MOE_MODEL_SHA256_H

#include "base/status.h"

#include <stddef.h>

enum { MOE_SHA256_HEX = 65 }; /* with the final zero */

/* A hash in the making; owned by the caller, from begin until finish or drop. */
struct moe_sha256 {
    struct evp_md_ctx_st *context; /* NULL after a failure, or when it is done */
};

void moe_sha256_begin(struct moe_sha256 *s);
void moe_sha256_update(struct moe_sha256 *s, const void *data, size_t bytes);
/* The hash of all updates. Errors: MOE_RESOURCE_EXHAUSTED/OUT_OF_MEMORY; `hex` is untouched then.
 */
struct moe_status moe_sha256_finish(struct moe_sha256 *s, char hex[MOE_SHA256_HEX]) MOE_CHECKED;
/* For those who give up; harmless after finish, and on a struct of zeros. */
void moe_sha256_drop(struct moe_sha256 *s);

/* The hash of one piece. Errors as in finish. */
struct moe_status moe_sha256_of(const void *data, size_t bytes,
                                char hex[MOE_SHA256_HEX]) MOE_CHECKED;

#endif
