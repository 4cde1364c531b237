/* SPDX-License-Identifier: Apache-2.0 */
/* Model directories made by tests: a temporary directory, files in it, and a sink that keeps what a
 * loader delivers. */
#ifndef MOE_TEST_MODEL_FIXTURE_H
#define MOE_TEST_MODEL_FIXTURE_H

#include "base/status.h"
#include "model/digest.h"
#include "model/model.h"
#include "model/safetensors.h"
#include "support/check.h"

struct fixture {
    char directory[64]; /* MOE_TEST_DIRECTORY_BYTES */
    int fd;             /* of the directory */
};

/* cmocka setup and teardown; `*state` becomes a struct fixture. Teardown removes everything. */
int fixture_setup(void **state);
int fixture_teardown(void **state);

/* Path of `name` inside the directory; valid until the next call. */
const char *fixture_path(const struct fixture *f, const char *name);
void fixture_write(const struct fixture *f, const char *name, const void *data, size_t bytes);
void fixture_write_text(const struct fixture *f, const char *name, const char *text);

/* Fails the test unless the header of a tensor file holds `text`. */
void check_header_has(const struct fixture *f, const char *name, const char *text);

/* A tensor file being put together: values come from a counter, so that each is unique. */
struct tensors {
    struct moe_st_out list[512];
    size_t count;
    uint32_t next; /* first value of the next tensor */
};

/* Adds a tensor filled with next, next + 1, ... (BF16: only exact below 256). Returns its data. */
void *tensors_add(struct tensors *t, enum moe_st_dtype dtype, uint32_t rank, const uint64_t *shape,
                  const char *fmt, ...) MOE_PRINTF(5, 6);
void tensors_write(struct tensors *t, const struct fixture *f, const char *name);
void tensors_free(struct tensors *t);

/* What a loader delivered, in order. */
struct delivery {
    enum moe_weight weight;
    uint32_t expert;
    enum moe_dtype dtype;
    size_t bytes;
    void *data;
};

struct deliveries {
    struct delivery *list;
    size_t count;
    uint64_t read_bytes; /* last word of the progress callback */
    size_t progress_calls;
};

struct moe_status deliveries_sink(void *ctx, enum moe_weight weight, uint32_t expert,
                                  enum moe_dtype dtype, const void *data, size_t bytes);
/* A sink that takes everything and keeps nothing. */
struct moe_status fixture_ignore(void *ctx, enum moe_weight weight, uint32_t expert,
                                 enum moe_dtype dtype, const void *data, size_t bytes);
/* Reads a quantised weight (with `by_turns` gate and up) as a backend does: some rows at a time,
 * here from the last one on. Returns the first failure. On success the arrays are the caller's. */
struct moe_status fixture_read_packed(const struct moe_layer_spec *spec, enum moe_weight weight,
                                      const struct moe_packed_source *source, uint8_t **elements,
                                      uint8_t **scales);
/* Adds the digests that a reader of `m` computes with so many threads, of all units. */
void fixture_digest(const struct moe_model *m, uint32_t threads, struct moe_digest_table *all);
void deliveries_progress(void *ctx, uint64_t read_bytes);
/* The one delivery of this weight; fails the test when there is none or more than one. */
const struct delivery *deliveries_find(const struct deliveries *d, enum moe_weight weight,
                                       uint32_t expert);
void deliveries_free(struct deliveries *d);

/* Fails the test with the text of the status unless it has this reason. */
void check_reason(struct moe_status st, enum moe_reason reason);

#endif
