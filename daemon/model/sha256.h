/* SHA-256 (FIPS 180-4), for fingerprints of models and for checkpoints. */
#ifndef MOE_MODEL_SHA256_H
#define MOE_MODEL_SHA256_H

#include <stddef.h>
#include <stdint.h>

enum { MOE_SHA256_HEX = 65 }; /* with the final zero */

struct moe_sha256 {
    uint32_t state[8];
    uint64_t length; /* bytes so far */
    uint8_t block[64];
};

void moe_sha256_init(struct moe_sha256 *s);
void moe_sha256_update(struct moe_sha256 *s, const void *data, size_t length);
void moe_sha256_finish(struct moe_sha256 *s, char hex[MOE_SHA256_HEX]);

#endif
