/* SPDX-License-Identifier: Apache-2.0 */
/* Which names are legal; and the state of training that a checkpoint's name stands for. */
#ifndef MOE_BASE_NAME_H
#define MOE_BASE_NAME_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

/* Names that clients give to sessions, checkpoints and models. A checkpoint's name is a directory
 * name: every allowed name is a visible entry of its parent directory. */
enum { MOE_TRAINING_NAME_MAX = 64 }; /* characters */
/* 1 to 64 characters of [A-Za-z0-9._-], not beginning with a dot. */
bool moe_training_name_ok(const char *name);

/* 1 to `max` printable ASCII characters, none of them a blank, a quote or a backslash: the text may
 * stand in logs, documents and commands as it is. */
bool moe_word_ok(const char *text, size_t max);

/* The name of a worker is such a word. */
enum { MOE_WORKER_ID_MAX = 127 }; /* characters */

/* A state of training that a checkpoint has, with the records of all calls: moe.v1.SavedTraining.
 */
struct moe_saved_training {
    char checkpoint[MOE_TRAINING_NAME_MAX + 1];
    uint64_t lineage, weights_version;
    uint64_t calls;  /* that are recorded; 0 = there is no such state */
    uint64_t record; /* hash of the records */
};

static inline bool moe_saved_training_same(const struct moe_saved_training *a,
                                           const struct moe_saved_training *b)
{
    return strcmp(a->checkpoint, b->checkpoint) == 0 && a->lineage == b->lineage &&
           a->weights_version == b->weights_version && a->calls == b->calls &&
           a->record == b->record;
}

#endif
