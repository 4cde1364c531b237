/* SPDX-License-Identifier: Apache-2.0 */
/* A golden model's settings and tensors, to be changed one at a time and tried. */
#ifndef MOE_TEST_CHECKPOINT_COPY_H
#define MOE_TEST_CHECKPOINT_COPY_H

#include "model_fixture.h"
#include "small_model.h"

#include <jansson.h>

struct moe_digest_table;

/* Large: keep it out of the stack. */
struct copy {
    struct moe_st_file *file;
    struct moe_st_out list[1024];
    size_t count;
};

/* The tensors of the model in `folder`, in one file. */
void copy_open(struct copy *c, const char *folder);
void copy_close(struct copy *c);
/* Fail the test without such a tensor. */
struct moe_st_out *copy_find(struct copy *c, const char *name);
void *copy_data(struct copy *c, const char *name);
/* Adds a tensor with `name` and the bytes of another one. */
void copy_add(struct copy *c, const char *from, const char *name);
void copy_drop(struct copy *c, const char *name);
void copy_write(const struct copy *c, const struct fixture *f);

json_t *read_config(const char *folder);
/* Consumes `root`. */
void write_config(const struct fixture *f, json_t *root);

/* Opens the model and loads all; the error of either. */
struct moe_status try_model(const struct fixture *f);
/* Fails the test unless try_model fails so, with both texts in its own, and also a backend that
 * reads for itself and keeps quantised weights. */
void check_refused(const struct fixture *f, enum moe_reason reason, const char *named,
                   const char *why);

/* Of all units of the model. */
struct moe_digest_table *digests(const struct fixture *f);
/* Flips the lowest bit of tensor `i`: its name is the first difference from `good`. A tensor that a
 * scheme does not use is in no digest. */
void check_flip(const struct fixture *f, struct copy *c, size_t i,
                const struct moe_digest_table *good);

#endif
