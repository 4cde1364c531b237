/* SPDX-License-Identifier: Apache-2.0 */
/* Promises of loading quantised weights onto a GPU, for every packing and random shapes: device
 * memory has, byte for byte, what the host packs. So it does whether the weights came from memory
 * or were read by the backend, in one piece or in several, gate and up apart or by turns. A read
 * that fails ends the load with its own error. Without a Hopper GPU the tests are skipped, with a
 * message. */
#include "packed_problem.h"
#include "placed_reference.h"

#include "cuda/layer/layer.h"
#include "cuda/step/backend.h"
#include "moe/backend.h"

#include <cuda_runtime_api.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { EXPERTS = 2 };
enum way { FROM_MEMORY, FETCHED, BY_TURNS };

static const struct moe_backend *const backend = &moe_backend_cuda;

struct subject {
    const struct moe_weight_format *f;
    uint32_t hidden, inner;
    struct quantised gate, up, down;
    uint8_t *both[2]; /* elements and scales of gate and up by turns */
    struct moe_layer *layer;
};

static struct moe_status read_memory(const void *ctx, uint64_t at, size_t bytes, void *to)
{
    memcpy(to, (const char *)ctx + at, bytes);
    return moe_ok();
}

static struct moe_packed_source source_of(const struct moe_packed_matrix *m)
{
    return (struct moe_packed_source){.elements = {.read = read_memory, .ctx = m->elements},
                                      .scales = {.read = read_memory, .ctx = m->scales},
                                      .global = m->global};
}

static void create(struct subject *s, struct moe_device *device)
{
    uint32_t offset[EXPERTS + 1];
    uint16_t slot[EXPERTS] = {0};
    for (uint32_t e = 0; e <= EXPERTS; e++)
        offset[e] = e;
    const struct moe_placement placement = {
        .slots = 1, .experts = EXPERTS, .offset = offset, .slot = slot};
    const struct moe_layer_spec spec = {
        .hidden = s->hidden,
        .intermediate = s->inner,
        .experts = EXPERTS,
        .activation = MOE_ACT_SWIGLU,
        .weighting = MOE_WEIGHT_OUTPUT_LATE,
        .router = {.top_k = 1, .groups = 1, .topk_group = 1, .group_best = 1, .scale = 1},
        .routed_format = *s->f};
    ok(backend->layer_create(device, &spec, &placement, 0, &s->layer));
    size_t bytes = (size_t)EXPERTS * s->hidden * sizeof(float);
    float *router = calloc(1, bytes);
    assert_non_null(router);
    ok(backend->layer_upload(s->layer, MOE_WEIGHT_ROUTER, 0, MOE_DTYPE_F32, router, bytes));
    free(router);
}

static uint8_t *take_turns(const void *gate, const void *up, size_t rows, size_t each)
{
    uint8_t *both = malloc(2 * rows * each + 1);
    assert_non_null(both);
    for (size_t r = 0; r < 2 * rows; r++)
        memcpy(both + r * each, (const char *)(r % 2 == 0 ? gate : up) + r / 2 * each, each);
    return both;
}

static void put(struct subject *s, enum moe_weight w, uint32_t e, const struct quantised *q,
                enum way way)
{
    const struct moe_packed_source source = source_of(&q->m);
    if (way == FROM_MEMORY)
        ok(backend->layer_upload_packed(s->layer, w, e, &q->m));
    else
        ok(backend->layer_fetch_packed(s->layer, w, e, &source));
}

static void put_expert(struct subject *s, uint32_t e, enum way way)
{
    if (way == BY_TURNS) {
        struct moe_packed_source source = source_of(&s->gate.m);
        source.elements.ctx = s->both[0];
        source.scales.ctx = s->both[1];
        source.by_turns = true;
        ok(backend->layer_fetch_packed(s->layer, MOE_WEIGHT_GATE, e, &source));
        struct moe_status twice =
            backend->layer_upload_packed(s->layer, MOE_WEIGHT_UP, e, &s->up.m);
        assert_int_equal(twice.code, MOE_ALREADY_EXISTS);
    } else {
        put(s, MOE_WEIGHT_GATE, e, &s->gate, way);
        put(s, MOE_WEIGHT_UP, e, &s->up, way);
    }
    put(s, MOE_WEIGHT_DOWN, e, &s->down, way);
}

/* Compares all entries of a matrix with one. */
static void check(const struct subject *s, enum moe_cuda_matrices which, const uint8_t *want,
                  const char *ways)
{
    const struct moe_cuda_matrix *m = &s->layer->desc.matrix[which];
    size_t each = m->bytes / EXPERTS;
    uint8_t *got = malloc(m->bytes);
    assert_non_null(got);
    assert_int_equal(cudaMemcpy(got, m->data, m->bytes, cudaMemcpyDeviceToHost), cudaSuccess);
    for (uint32_t e = 0; e < EXPERTS; e++)
        for (size_t i = 0; i < each; i++)
            if (got[e * each + i] != want[i])
                fail_msg("%s, %u x %u, matrix %d, expert %u (%s): byte %zu of %zu is %02x, not "
                         "%02x",
                         name_of(s->f), s->hidden, s->inner, (int)which, e, ways, i, each,
                         got[e * each + i], want[i]);
    free(got);
}

static float global_of(const struct subject *s, const struct quantised *q)
{
    return s->f->global_divides ? 1 / q->m.global : q->m.global;
}

/* What an entry of each matrix must have. */
static void pack_on_the_host(const struct subject *s, uint8_t *entry[2])
{
    enum moe_cuda_packing packing = moe_cuda_packing_of(s->f);
    uint32_t gate_up_rows = (s->inner + 7) / 8 * 16;
    entry[0] = calloc(1, moe_cuda_packed_bytes(packing, gate_up_rows, s->hidden));
    entry[1] = calloc(1, moe_cuda_packed_bytes(packing, s->hidden, s->inner));
    assert_true(entry[0] != NULL && entry[1] != NULL);
    placed_reference(s->f, &s->gate.m, s->inner, s->hidden, PLACED_GATE, global_of(s, &s->gate),
                     entry[0]);
    placed_reference(s->f, &s->up.m, s->inner, s->hidden, PLACED_UP, global_of(s, &s->up),
                     entry[0]);
    placed_reference(s->f, &s->down.m, s->hidden, s->inner, PLACED_PLAIN, global_of(s, &s->down),
                     entry[1]);
}

/* Loads a layer in each way. Both experts have the same weights. */
static void run(struct moe_device *device, const struct moe_weight_format *f, uint32_t hidden,
                uint32_t inner)
{
    static const char *const names[] = {"from memory", "fetched", "by turns"};
    struct subject s = {.f = f, .hidden = hidden, .inner = inner};
    s.gate = random_matrix(f, inner, hidden);
    s.up = random_matrix(f, inner, hidden);
    s.down = random_matrix(f, hidden, inner);
    enum way last = f->zero_points ? FROM_MEMORY : f->block_rows == 1 ? BY_TURNS : FETCHED;
    if (last == BY_TURNS) {
        const struct moe_packed_sizes *sizes = &s.gate.sizes;
        s.both[0] = take_turns(s.gate.m.elements, s.up.m.elements, inner, sizes->row_bytes);
        s.both[1] =
            take_turns(s.gate.m.scales, s.up.m.scales, inner, sizes->scales / sizes->scale_rows);
    }
    uint8_t *want[2];
    pack_on_the_host(&s, want);
    for (enum way way = FROM_MEMORY; way <= last; way++) {
        create(&s, device);
        for (uint32_t e = 0; e < EXPERTS; e++)
            put_expert(&s, e, way);
        ok(backend->layer_finish(s.layer));
        check(&s, MOE_CUDA_GATE_UP, want[0], names[way]);
        check(&s, MOE_CUDA_DOWN, want[1], names[way]);
        backend->layer_destroy(s.layer);
    }
    void *owned[] = {s.gate.bytes, s.up.bytes, s.down.bytes, s.both[0],
                     s.both[1],    want[0],    want[1]};
    for (size_t i = 0; i < sizeof owned / sizeof *owned; i++)
        free(owned[i]);
}

static void device_memory_has_what_the_host_packs(void **state)
{
    enum { SHAPES = 4 };
    struct moe_device *device = *state;
    for (int i = 0; i < FORMATS; i++)
        for (int shape = 0; shape < SHAPES; shape++)
            run(device, &formats[i], 8 * (1 + random_below(60)), 8 * (1 + random_below(60)));
}

/* Several pieces for each matrix. */
static void so_do_matrices_of_many_pieces(void **state)
{
    struct moe_device *device = *state;
    static const int some[] = {0, 5, 7, 8, 10}; /* FP8, MXFP8, MXFP4, NVFP4, INT4 */
    for (size_t i = 0; i < sizeof some / sizeof *some; i++)
        run(device, &formats[some[i]], 2880, 8 * (300 + random_below(60)));
}

static struct moe_status read_fails(const void *ctx, uint64_t at, size_t bytes, void *to)
{
    (void)ctx;
    (void)at;
    memset(to, 0, bytes);
    return moe_error(MOE_DATA_LOSS, MOE_REASON_IO, "this disk is broken");
}

static void a_read_that_fails_ends_the_load(void **state)
{
    struct moe_device *device = *state;
    struct subject s = {.f = &formats[0], .hidden = 256, .inner = 128};
    s.gate = s.up = random_matrix(s.f, s.inner, s.hidden);
    s.down = random_matrix(s.f, s.hidden, s.inner);
    for (int part = 0; part < 2; part++) {
        struct moe_packed_source broken = source_of(&s.gate.m);
        *(part == 0 ? &broken.elements.read : &broken.scales.read) = read_fails;
        create(&s, device);
        put_expert(&s, 1, FROM_MEMORY);
        put(&s, MOE_WEIGHT_UP, 0, &s.up, FROM_MEMORY);
        put(&s, MOE_WEIGHT_DOWN, 0, &s.down, FROM_MEMORY);
        struct moe_status st = backend->layer_fetch_packed(s.layer, MOE_WEIGHT_GATE, 0, &broken);
        if (!moe_failed(&st))
            st = backend->layer_finish(s.layer);
        assert_int_equal(st.code, MOE_DATA_LOSS);
        backend->layer_destroy(s.layer);
    }
    free(s.gate.bytes);
    free(s.down.bytes);
}

static int open_device(void **state)
{
    struct moe_device *device;
    ok(backend->device_open(&(struct moe_device_config){.ordinal = 0}, &device));
    *state = device;
    return 0;
}

static int close_device(void **state)
{
    backend->device_close(*state);
    return 0;
}

int main(int argc, char **argv)
{
    if (!ggemm_test_begin(argc, argv))
        return SKIP_CODE;
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(device_memory_has_what_the_host_packs),
        cmocka_unit_test(so_do_matrices_of_many_pieces),
        cmocka_unit_test(a_read_that_fails_ends_the_load),
    };
    return cmocka_run_group_tests(tests, open_device, close_device);
}
