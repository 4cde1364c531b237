/* SPDX-License-Identifier: Apache-2.0 */
/* libcrypto chooses the fastest code for one message: about 2 GB/s with SHA instructions. It waits
 * for one instruction after the other then, so two messages at a time take little more than one. */
#include "model/sha256.h"

#include <openssl/evp.h>
#include <stdatomic.h>
#include <string.h>

#if defined(__x86_64__)
#include <cpuid.h>
#include <immintrin.h>
#endif

void moe_sha256_begin(struct moe_sha256 *s)
{
    s->context = EVP_MD_CTX_new();
    if (s->context != NULL && EVP_DigestInit_ex(s->context, EVP_sha256(), NULL) != 1)
        moe_sha256_drop(s);
}

void moe_sha256_update(struct moe_sha256 *s, const void *data, size_t bytes)
{
    if (s->context != NULL && EVP_DigestUpdate(s->context, data, bytes) != 1)
        moe_sha256_drop(s);
}

struct moe_status moe_sha256_next(struct moe_sha256 *s, uint8_t raw[MOE_SHA256_BYTES])
{
    if (s->context != NULL && EVP_DigestFinal_ex(s->context, raw, NULL) == 1 &&
        EVP_DigestInit_ex(s->context, NULL, NULL) == 1)
        return moe_ok();
    moe_sha256_drop(s);
    return moe_error(MOE_RESOURCE_EXHAUSTED, MOE_REASON_OUT_OF_MEMORY, "no memory for a SHA-256");
}

struct moe_status moe_sha256_finish(struct moe_sha256 *s, char hex[MOE_SHA256_HEX])
{
    uint8_t raw[MOE_SHA256_BYTES];
    MOE_TRY(moe_sha256_next(s, raw));
    moe_sha256_drop(s);
    moe_sha256_to_hex(raw, hex);
    return moe_ok();
}

void moe_sha256_drop(struct moe_sha256 *s)
{
    EVP_MD_CTX_free(s->context);
    s->context = NULL;
}

struct moe_status moe_sha256_of(const void *data, size_t bytes, char hex[MOE_SHA256_HEX])
{
    struct moe_sha256 s;
    moe_sha256_begin(&s);
    moe_sha256_update(&s, data, bytes);
    return moe_sha256_finish(&s, hex);
}

void moe_sha256_to_hex(const uint8_t raw[MOE_SHA256_BYTES], char hex[MOE_SHA256_HEX])
{
    static const char digits[] = "0123456789abcdef";
    for (size_t i = 0; i < MOE_SHA256_BYTES; i++) {
        hex[2 * i] = digits[raw[i] >> 4];
        hex[2 * i + 1] = digits[raw[i] & 15];
    }
    hex[MOE_SHA256_HEX - 1] = '\0';
}

/* ------------------------------------------------------------------ two messages */

#if defined(__x86_64__)
enum { BLOCK = 64 };

/* FIPS 180-4, 4.2.2 and 5.3.3. */
static const uint32_t constants[64] = {
    0x428a2f98, 0x71374491, 0xb5c0fbcf, 0xe9b5dba5, 0x3956c25b, 0x59f111f1, 0x923f82a4, 0xab1c5ed5,
    0xd807aa98, 0x12835b01, 0x243185be, 0x550c7dc3, 0x72be5d74, 0x80deb1fe, 0x9bdc06a7, 0xc19bf174,
    0xe49b69c1, 0xefbe4786, 0x0fc19dc6, 0x240ca1cc, 0x2de92c6f, 0x4a7484aa, 0x5cb0a9dc, 0x76f988da,
    0x983e5152, 0xa831c66d, 0xb00327c8, 0xbf597fc7, 0xc6e00bf3, 0xd5a79147, 0x06ca6351, 0x14292967,
    0x27b70a85, 0x2e1b2138, 0x4d2c6dfc, 0x53380d13, 0x650a7354, 0x766a0abb, 0x81c2c92e, 0x92722c85,
    0xa2bfe8a1, 0xa81a664b, 0xc24b8b70, 0xc76c51a3, 0xd192e819, 0xd6990624, 0xf40e3585, 0x106aa070,
    0x19a4c116, 0x1e376c08, 0x2748774c, 0x34b0bcb5, 0x391c0cb3, 0x4ed8aa4a, 0x5b9cca4f, 0x682e6ff3,
    0x748f82ee, 0x78a5636f, 0x84c87814, 0x8cc70208, 0x90befffa, 0xa4506ceb, 0xbef9a3f7, 0xc67178f2};
static const uint32_t initial[8] = {0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a,
                                    0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19};

/* The hash value of each message, in the order of the instructions: F, E, B, A and H, G, D, C. */
struct pair_state {
    __m128i feba[2], hgdc[2];
};

#define SHA_TARGET __attribute__((target("sha,sse4.1")))

/* Four rounds. The instruction makes two, and leaves its second operand as the new H, G, D, C. */
SHA_TARGET static inline void do_rounds(__m128i *feba, __m128i *hgdc, __m128i words)
{
    *hgdc = _mm_sha256rnds2_epu32(*hgdc, *feba, words);
    *feba = _mm_sha256rnds2_epu32(*feba, *hgdc, _mm_shuffle_epi32(words, 0x0e));
}

/* The next four words of the message schedule, from the last sixteen. */
SHA_TARGET static inline __m128i schedule(__m128i w0, __m128i w1, __m128i w2, __m128i w3)
{
    __m128i sum = _mm_add_epi32(_mm_sha256msg1_epu32(w0, w1), _mm_alignr_epi8(w3, w2, 4));
    return _mm_sha256msg2_epu32(sum, w3);
}

/* One block of each message. */
SHA_TARGET static inline void do_blocks(struct pair_state *s, const uint8_t *const block[2])
{
    const __m128i swap = _mm_set_epi8(12, 13, 14, 15, 8, 9, 10, 11, 4, 5, 6, 7, 0, 1, 2, 3);
    const struct pair_state before = *s;
    __m128i w[2][4];
    for (int m = 0; m < 2; m++)
        for (int i = 0; i < 4; i++)
            w[m][i] = _mm_shuffle_epi8(_mm_loadu_si128((const __m128i *)(block[m] + 16 * i)), swap);
#pragma GCC unroll 16
    for (int i = 0; i < 16; i++) {
        const __m128i k = _mm_loadu_si128((const __m128i *)(constants + 4 * i));
#pragma GCC unroll 2
        for (int m = 0; m < 2; m++) {
            __m128i *v = w[m];
            do_rounds(&s->feba[m], &s->hgdc[m], _mm_add_epi32(v[i % 4], k));
            if (i < 12)
                v[i % 4] = schedule(v[i % 4], v[(i + 1) % 4], v[(i + 2) % 4], v[(i + 3) % 4]);
        }
    }
    for (int m = 0; m < 2; m++) {
        s->feba[m] = _mm_add_epi32(s->feba[m], before.feba[m]);
        s->hgdc[m] = _mm_add_epi32(s->hgdc[m], before.hgdc[m]);
    }
}

/* The ends of both messages: `rest` bytes at `from`, a one, zeros, and the length in bits. */
SHA_TARGET static void do_ends(struct pair_state *s, const uint8_t *const from[2], size_t rest,
                               uint64_t length)
{
    uint8_t end[2][2 * BLOCK] = {{0}};
    size_t blocks = rest + 1 + 8 <= BLOCK ? 1 : 2;
    for (int m = 0; m < 2; m++) {
        memcpy(end[m], from[m], rest);
        end[m][rest] = 0x80;
        for (size_t i = 0; i < 8; i++)
            end[m][blocks * BLOCK - 1 - i] = (uint8_t)(8 * length >> 8 * i);
    }
    for (size_t b = 0; b < blocks; b++)
        do_blocks(s, (const uint8_t *const[2]){end[0] + b * BLOCK, end[1] + b * BLOCK});
}

static void put_words(__m128i four, uint8_t *first, uint8_t *second)
{
    uint32_t words[4];
    memcpy(words, &four, sizeof words);
    for (int i = 0; i < 4; i++) { /* big-endian; the last word comes first */
        first[i] = (uint8_t)(words[3] >> (24 - 8 * i));
        first[4 + i] = (uint8_t)(words[2] >> (24 - 8 * i));
        second[i] = (uint8_t)(words[1] >> (24 - 8 * i));
        second[4 + i] = (uint8_t)(words[0] >> (24 - 8 * i));
    }
}

SHA_TARGET static void hash_pair(uint8_t first, const void *const data[2], size_t bytes,
                                 uint8_t *const raw[2])
{
    const uint32_t *h = initial;
    const uint8_t *at[2] = {data[0], data[1]};
    uint8_t begin[2][BLOCK];
    struct pair_state s;
    for (int m = 0; m < 2; m++) {
        s.feba[m] = _mm_set_epi32((int)h[0], (int)h[1], (int)h[4], (int)h[5]);
        s.hgdc[m] = _mm_set_epi32((int)h[2], (int)h[3], (int)h[6], (int)h[7]);
        begin[m][0] = first;
        memcpy(begin[m] + 1, at[m], BLOCK - 1);
        at[m] += BLOCK - 1;
    }
    do_blocks(&s, (const uint8_t *const[2]){begin[0], begin[1]});
    size_t left = bytes - (BLOCK - 1);
    for (; left >= BLOCK; left -= BLOCK) {
        do_blocks(&s, at);
        at[0] += BLOCK;
        at[1] += BLOCK;
    }
    do_ends(&s, at, left, (uint64_t)bytes + 1);
    for (int m = 0; m < 2; m++) {
        put_words(s.feba[m], raw[m], raw[m] + 16);
        put_words(s.hgdc[m], raw[m] + 8, raw[m] + 24);
    }
}

/* Asks once: the question may take microseconds on a virtual machine. */
static bool has_instructions(void)
{
    static atomic_int answer; /* 0: not asked yet; -1: no */
    unsigned a, b, c, d;
    int known = atomic_load_explicit(&answer, memory_order_relaxed);
    if (known == 0) {
        known = __get_cpuid_count(7, 0, &a, &b, &c, &d) != 0 && (b & bit_SHA) != 0 &&
                        __builtin_cpu_supports("sse4.1")
                    ? 1
                    : -1;
        atomic_store_explicit(&answer, known, memory_order_relaxed);
    }
    return known > 0;
}

bool moe_sha256_pair(uint8_t first, const void *const data[2], size_t bytes, uint8_t *const raw[2])
{
    if (bytes < BLOCK || !has_instructions())
        return false;
    hash_pair(first, data, bytes, raw);
    return true;
}
#else
bool moe_sha256_pair(uint8_t first, const void *const data[2], size_t bytes, uint8_t *const raw[2])
{
    (void)first;
    (void)data;
    (void)bytes;
    (void)raw;
    return false;
}
#endif
