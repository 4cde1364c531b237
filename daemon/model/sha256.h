/* SPDX-License-Identifier: Apache-2.0 */
/* SHA-256 by libcrypto, as bytes or as lower-case hexadecimal. It identifies models and detects
 * damaged files; it protects no secret.
 *
 * libcrypto may fail for want of memory; only the functions that return a hash report it. */
#ifndef MOE_MODEL_SHA256_H
#define MOE_MODEL_SHA256_H

#include "base/status.h"

#include <stddef.h>
#include <stdint.h>

enum {
    MOE_SHA256_BYTES = 32,
    MOE_SHA256_HEX = 65, /* with the final zero */
};

/* A hash in progress; the caller owns it from begin until finish or drop. */
struct moe_sha256 {
    struct evp_md_ctx_st *context; /* NULL after a failure, or when it is done */
};

void moe_sha256_begin(struct moe_sha256 *s);
void moe_sha256_update(struct moe_sha256 *s, const void *data, size_t bytes);
/* The hash of all updates since begin or the last call; another hash begins. Faster than finish and
 * begin for many short ones. Errors: MOE_RESOURCE_EXHAUSTED/OUT_OF_MEMORY; `raw` is untouched then,
 * and the hash is dropped. */
struct moe_status moe_sha256_next(struct moe_sha256 *s, uint8_t raw[MOE_SHA256_BYTES]) MOE_CHECKED;
/* The hash of all updates. Errors: MOE_RESOURCE_EXHAUSTED/OUT_OF_MEMORY; `hex` is untouched then.
 */
struct moe_status moe_sha256_finish(struct moe_sha256 *s, char hex[MOE_SHA256_HEX]) MOE_CHECKED;
/* Frees an unfinished hash; allowed after finish, and on a struct of zeros. */
void moe_sha256_drop(struct moe_sha256 *s);

/* The hash of one piece. Errors as in finish. */
struct moe_status moe_sha256_of(const void *data, size_t bytes,
                                char hex[MOE_SHA256_HEX]) MOE_CHECKED;

/* The hashes of two messages of the same length, at nearly the speed of two cores: the byte `first`
 * and then `bytes` bytes of data[i] give raw[i] [MOE_SHA256_BYTES]. False, and nothing is done, if
 * the processor has no instructions for it, or bytes < 64. */
bool moe_sha256_pair(uint8_t first, const void *const data[2], size_t bytes, uint8_t *const raw[2]);

void moe_sha256_to_hex(const uint8_t raw[MOE_SHA256_BYTES], char hex[MOE_SHA256_HEX]);

#endif
