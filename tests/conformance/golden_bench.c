/* SPDX-License-Identifier: Apache-2.0 */
/* See golden_bench.h. */
#include "golden_bench.h"

#include "base/clock.h"
#include "daemon/options.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

enum { SKIPPED = 77, AWAIT_MS = 60000, PROGRAM_S = 300 };

static const size_t row_bytes = (size_t)GOLDEN_TOKENS * GOLDEN_HIDDEN * sizeof(float);
static const size_t pair_bytes = (size_t)GOLDEN_TOKENS * MOE_MAX_TOP_K * sizeof(float);

void must(struct moe_status st)
{
    if (!moe_failed(&st))
        return;
    fprintf(stderr, "%s/%s: %s\n", moe_code_name(st.code), moe_reason_name(st.reason), st.text);
    exit(1);
}

float *read_floats(const struct moe_st_file *file, const char *name, size_t n)
{
    const struct moe_tensor *t = moe_st_find(file, name);
    float *data = malloc(n * sizeof *data);
    if (t == NULL || data == NULL || t->dtype != MOE_ST_F32 || t->bytes != n * sizeof *data) {
        fprintf(stderr, "no usable tensor %s\n", name);
        exit(1);
    }
    must(moe_st_read(file, t, 0, t->bytes, data));
    return data;
}

float *read_golden(const struct moe_st_file *file, uint32_t layer, uint32_t tokens,
                   const char *what, size_t n)
{
    char name[64];
    snprintf(name, sizeof name, "layer%u.T%u.%s", layer, tokens, what);
    return read_floats(file, name, n);
}

void put_elements(void *to, enum moe_dtype dtype, size_t n, const float *from)
{
    for (size_t i = 0; i < n; i++)
        if (dtype == MOE_DTYPE_F32)
            ((float *)to)[i] = from[i];
        else
            ((uint16_t *)to)[i] = moe_f32_to_bf16(from[i]);
}

float element(enum moe_dtype dtype, const void *data, size_t i)
{
    return dtype == MOE_DTYPE_F32 ? ((const float *)data)[i]
                                  : moe_bf16_to_f32(((const uint16_t *)data)[i]);
}

/* ----------------------------------------------------------------------- one slot */

static void *host_memory(struct golden_bench *b, size_t bytes)
{
    void *p;
    must(b->backend->mem_alloc(b->device, MOE_MEM_HOST, bytes, &p));
    return p;
}

void golden_open(struct golden_bench *b, const struct moe_device_config *device,
                 const struct moe_session_config *session)
{
    must(b->backend->device_open(device, &b->device));
    must(b->backend->session_join(b->device, session, &b->session));
    b->x = host_memory(b, row_bytes);
    b->dy = host_memory(b, row_bytes);
    b->y = host_memory(b, row_bytes);
    b->ids = host_memory(b, pair_bytes);
    b->weights = host_memory(b, pair_bytes);
    b->state = host_memory(b, GOLDEN_TOKENS);
}

void golden_close(struct golden_bench *b)
{
    const struct moe_backend *backend = b->backend;
    backend->session_leave(b->session);
    backend->mem_free(b->device, MOE_MEM_HOST, b->x, row_bytes);
    backend->mem_free(b->device, MOE_MEM_HOST, b->dy, row_bytes);
    backend->mem_free(b->device, MOE_MEM_HOST, b->y, row_bytes);
    backend->mem_free(b->device, MOE_MEM_HOST, b->ids, pair_bytes);
    backend->mem_free(b->device, MOE_MEM_HOST, b->weights, pair_bytes);
    backend->mem_free(b->device, MOE_MEM_HOST, b->state, GOLDEN_TOKENS);
    backend->device_close(b->device);
}

static struct moe_status upload(void *ctx, enum moe_weight weight, uint32_t expert,
                                enum moe_dtype dtype, const void *data, size_t bytes)
{
    struct golden_bench *b = ctx;
    return b->backend->layer_upload(b->layer, weight, expert, dtype, data, bytes);
}

static struct moe_status upload_packed(void *ctx, enum moe_weight weight, uint32_t expert,
                                       const struct moe_packed_matrix *matrix)
{
    struct golden_bench *b = ctx;
    return b->backend->layer_upload_packed(b->layer, weight, expert, matrix);
}

static struct moe_status fetch(void *ctx, enum moe_weight weight, uint32_t expert,
                               enum moe_dtype dtype, const struct moe_weight_source *source,
                               size_t bytes)
{
    struct golden_bench *b = ctx;
    return b->backend->layer_fetch(b->layer, weight, expert, dtype, source, bytes);
}

static struct moe_status fetch_packed(void *ctx, enum moe_weight weight, uint32_t expert,
                                      const struct moe_packed_source *source)
{
    struct golden_bench *b = ctx;
    return b->backend->layer_fetch_packed(b->layer, weight, expert, source);
}

/* As a worker loads it. */
void golden_load_layer(struct golden_bench *b, const struct moe_model *m, size_t i)
{
    uint32_t local[MOE_MAX_EXPERTS], n = 0;
    b->spec = moe_model_layer(m, i);
    MOE_INVARIANT(b->spec->hidden <= GOLDEN_HIDDEN);
    struct moe_placement placement = deal_experts(&b->homes, b->spec->experts, b->slots);
    for (uint32_t e = 0; e < b->spec->experts; e++)
        if (b->homes.slot[e] == b->slot)
            local[n++] = e;
    must(b->backend->layer_create(b->device, b->spec, &placement, b->slot, &b->layer));
    struct moe_model_sources sources = {0};
    const struct moe_model_sinks sinks = {
        .weight = upload,
        .packed = upload_packed,
        .source = b->backend->layer_fetch != NULL ? fetch : NULL,
        .packed_source = b->backend->layer_fetch_packed != NULL ? fetch_packed : NULL,
        .ctx = b,
        .sources = &sources};
    must(moe_model_stream_layer(m, i, local, n, &sinks, NULL, NULL, NULL));
    must(b->backend->layer_finish(b->layer));
    moe_model_sources_free(&sources);
}

void golden_forward(struct golden_bench *b, enum moe_dtype dtype, uint32_t tokens)
{
    struct moe_step_args args = {.layer = b->layer,
                                 .dtype = dtype,
                                 .bucket = GOLDEN_BUCKET,
                                 .tokens = tokens,
                                 .x = b->x,
                                 .y = b->y,
                                 .ids_out = b->ids,
                                 .weights_out = b->weights,
                                 .token_state = b->state};
    struct moe_step *step;
    must(b->backend->step_enqueue(b->session, &args, &step));
    must(b->backend->step_wait(step, MOE_NEVER, NULL));
}

/* ------------------------------------------------------------------------ programs */

void await_members(struct member *m)
{
    if (!board_barrier(m, AWAIT_MS)) {
        fprintf(stderr, "slot %u: another slot gave up\n", m->slot);
        exit(1);
    }
}

int training_main(struct training_program *p, int argc, char **argv)
{
    const char *backend = "cpu", *transport = "auto";
    uint64_t domain_size = 0;
    const struct moe_option options[] = {
        {"backend", 'b', MOE_OPTION_STRING, &backend, 0, 0, "NAME", "backend to test"},
        {"slots", 'n', MOE_OPTION_UINT, &p->slots, 1, p->max_slots, "N", "processes"},
        {"transport", 0, MOE_OPTION_STRING, &transport, 0, 0, "NAME",
         "how rows travel between slots: auto, nvlink or network"},
        {"domain-size", 0, MOE_OPTION_UINT, &domain_size, 0, MOE_MAX_SLOTS, "N",
         "N slots each count as a host; 0 = all are on one"},
        {p->option, p->option[0], MOE_OPTION_STRING, &p->data, 0, 0, "DIR", "recorded data"},
    };
    struct moe_options parsed;
    struct group group;
    int first, status[MOE_MAX_SLOTS] = {0};
    p->slots = 1;
    must(moe_options_parse(options, sizeof options / sizeof *options, NULL, argc, argv, &first,
                           &parsed));
    must(moe_backend_find(backend, &p->backend));
    group_set(p->backend, "transport", transport);
    group_domain_size = (uint32_t)domain_size;
    if (p->backend->training == NULL) {
        printf("SKIPPED: the backend %s cannot train\n", backend);
        return SKIPPED;
    }
    p->share = mmap(NULL, p->slots * p->share_bytes, PROT_READ | PROT_WRITE,
                    MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    MOE_INVARIANT(p->share != MAP_FAILED);
    group_start(&group, (uint32_t)p->slots, p->run, p);
    bool good = group_finish(&group, PROGRAM_S, status);
    moe_options_free(&parsed);
    printf("%s\n", good ? "all right" : "FAILED");
    return good ? 0 : 1;
}
