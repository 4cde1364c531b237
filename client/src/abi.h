/* SPDX-License-Identifier: Apache-2.0 */
/* Sizes of structs that the caller owns. See "Sizes" in moe/client.h.
 *
 * A struct grows at its end only. A new field begins after all bytes of the last release, padding
 * included; the FIRST size below stays; code accesses the field only if MOE_CLIENT_HAS(s,
 * field). tests/abi compares the library's interface with that of the last release. */
#ifndef MOE_CLIENT_ABI_H
#define MOE_CLIENT_ABI_H

#include "moe/client_training.h"
#include "moe/regions_device.h"

/* True if the caller's struct reaches to the end of `field`. */
#define MOE_CLIENT_HAS(s, field)                                                                   \
    ((s)->size >= (size_t)((const char *)(&(s)->field + 1) - (const char *)(s)))

/* Bytes of the first release with soname 1, on 64-bit machines. */
enum {
    MOE_CLIENT_FIRST_CONFIG = 48,
    MOE_CLIENT_FIRST_FORWARD = 304,
    MOE_CLIENT_FIRST_BACKWARD = 336,
    MOE_CLIENT_FIRST_OPTIMIZER_STEP = 224,
    MOE_CLIENT_FIRST_TRAIN_STATE = 600,
    MOE_CLIENT_FIRST_CHECKPOINT = 2232,
    MOE_CLIENT_FIRST_CHECKPOINT_INFO = 464,
    MOE_CLIENT_FIRST_CHECKPOINT_LIST = 104,
    MOE_CLIENT_FIRST_SESSION_CONFIG = 24,
    MOE_CLIENT_FIRST_SESSION_FORWARD = 168,
    MOE_CLIENT_FIRST_SESSION_ANSWER = 88,
    MOE_CLIENT_FIRST_MEMORY = 64,
    MOE_CLIENT_FIRST_ENTRY = 320,
};
_Static_assert(sizeof(void *) == 8, "the sizes above are those of 64-bit machines");
_Static_assert(sizeof(struct moe_client_config) >= MOE_CLIENT_FIRST_CONFIG &&
                   sizeof(struct moe_client_forward) >= MOE_CLIENT_FIRST_FORWARD &&
                   sizeof(struct moe_client_backward) >= MOE_CLIENT_FIRST_BACKWARD &&
                   sizeof(struct moe_client_optimizer_step) >= MOE_CLIENT_FIRST_OPTIMIZER_STEP &&
                   sizeof(struct moe_client_train_state) >= MOE_CLIENT_FIRST_TRAIN_STATE &&
                   sizeof(struct moe_client_checkpoint) >= MOE_CLIENT_FIRST_CHECKPOINT &&
                   sizeof(struct moe_client_checkpoint_info) >= MOE_CLIENT_FIRST_CHECKPOINT_INFO &&
                   sizeof(struct moe_client_checkpoint_list) >= MOE_CLIENT_FIRST_CHECKPOINT_LIST &&
                   sizeof(struct moe_client_session_config) >= MOE_CLIENT_FIRST_SESSION_CONFIG &&
                   sizeof(struct moe_client_session_forward) >= MOE_CLIENT_FIRST_SESSION_FORWARD &&
                   sizeof(struct moe_client_session_answer) >= MOE_CLIENT_FIRST_SESSION_ANSWER &&
                   sizeof(struct moe_client_memory) >= MOE_CLIENT_FIRST_MEMORY &&
                   sizeof(struct moe_client_entry) >= MOE_CLIENT_FIRST_ENTRY,
               "structs never shrink");

/* moe_client_check_size for a pointer `s` to struct moe_client_<name>. */
#define MOE_CLIENT_CHECK_SIZE(s, name, NAME)                                                       \
    moe_client_check_size("moe_client_" #name, (s), MOE_CLIENT_FIRST_##NAME,                       \
                          sizeof(struct moe_client_##name))

/* Checks `size`, the first field of the struct of `name` at `object`. `first` is its size in the
 * first release and `known` its size in this one. Errors: MOE_INVALID_ARGUMENT/VALUE_INVALID. */
struct moe_status moe_client_check_size(const char *name, const void *object, size_t first,
                                        size_t known) MOE_CHECKED;

/* MOE_INVALID_ARGUMENT/VALUE_INVALID unless all `length` bytes are 0. */
struct moe_status moe_client_check_reserved(const char *name, const void *bytes,
                                            size_t length) MOE_CHECKED;

#endif
