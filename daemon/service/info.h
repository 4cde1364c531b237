/* SPDX-License-Identifier: Apache-2.0 */
/* Figures of the worker that services report and check requests against. */
#ifndef MOE_SERVICE_INFO_H
#define MOE_SERVICE_INFO_H

#include "model/model.h"
#include "moe/layer_spec.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum { MOE_SERVICE_NAME_BYTES = 128 }; /* of a model, with the final zero */

/* The model as clients know it. Constant: a group with another name gets another struct. */
struct moe_served_model {
    const char *name;
    const char *digest; /* in hexadecimal; "" = not known yet */
};

/* Constant while the worker runs. Strings and specs are borrowed and outlive the service. */
struct moe_service_info {
    const char *model, *family; /* see moe_model_name, moe_model_family; `model` is the name until
                                   the group has one */
    const char *backend;        /* "cpu", "cuda" */
    /* See GetServerInfoResponse; NULL = "". */
    const char *backend_asked, *cuda_module, *cuda_problem;
    const struct moe_layer_spec *const *layers; /* ascending by layer */
    size_t layer_count;
    struct moe_token_tables token_tables; /* of layers that route by token id; borrowed */
    uint32_t slot;
    uint32_t max_message_bytes;      /* the server's, both directions */
    uint32_t max_tokens_per_request; /* more are refused with TOKEN_LIMIT */
    uint32_t max_tokens_per_step;    /* largest bucket */
    uint64_t max_bytes_in_flight;    /* the staging pool's budget */
    bool regions;                    /* clients may share memory with this worker */
};

#endif
