/* SPDX-License-Identifier: Apache-2.0 */
/* Where a pass over several domains puts rows, in which order it adds, and where it rounds: bit by
 * bit against the rule of kernels/decisions/0009-steps-over-domains.md, written out here. Six slots
 * in domains of one, two, three and six. The experts' outputs are random numbers, so another order
 * or a missing rounding gives other bits. */
#include "plain_layer.h"
#include "session_fixture.h"

#include <setjmp.h>
#include <stdarg.h>
/* cmocka.h needs the headers above before it. */
#include <cmocka.h>

#include <stdlib.h>

enum { SLOTS = 6, EXPERTS = 18, CHOICES = 7, WIDTH = 600, ROWS_T = 70, ROWS_BUCKET = 128 };

/* A case: what all members know. */
static enum moe_dtype dtype;
static uint32_t size; /* of the domains */

/* ------------------------------------------------------------------ inputs */

/* Slots have different numbers of tokens; one has none. */
static uint32_t tokens_of(uint32_t slot)
{
    return slot == 4 ? 0 : ROWS_T - 11 * slot;
}

static struct rng rng_of(uint32_t slot, uint32_t t, uint32_t what)
{
    return (struct rng){.state = ((uint64_t)slot << 40) + ((uint64_t)t << 16) + what};
}

/* Different experts, some choices not routed. */
static void choose(uint32_t slot, uint32_t t, int32_t ids[CHOICES])
{
    struct rng r = rng_of(slot, t, 1);
    int32_t expert[EXPERTS];
    for (uint32_t e = 0; e < EXPERTS; e++) {
        uint32_t at = rng_below(&r, e + 1);
        expert[e] = expert[at];
        expert[at] = (int32_t)e;
    }
    for (uint32_t k = 0; k < CHOICES; k++)
        ids[k] = rng_chance(&r, 15) ? -1 : expert[k];
}

/* Every third expert has copies on two slots. */
static uint32_t place(uint32_t offset[EXPERTS + 1], uint16_t slot[2 * EXPERTS])
{
    uint32_t n = 0;
    for (uint32_t e = 0; e < EXPERTS; e++) {
        offset[e] = n;
        uint16_t first = (uint16_t)(e % SLOTS), second = (uint16_t)((e + 2) % SLOTS);
        if (e % 3 == 0 && second < first)
            slot[n++] = second;
        slot[n++] = first;
        if (e % 3 == 0 && second > first)
            slot[n++] = second;
    }
    offset[EXPERTS] = n;
    return n;
}

static uint32_t target_of(int32_t expert, uint32_t t)
{
    uint32_t offset[EXPERTS + 1];
    uint16_t slot[2 * EXPERTS];
    (void)place(offset, slot);
    return slot[offset[expert] + t % (offset[expert + 1] - offset[expert])];
}

static float rounded(float value)
{
    return dtype == MOE_DTYPE_F32 ? value : moe_bf16_to_f32(moe_f32_to_bf16(value));
}

static void write_value(void *row, uint32_t c, float value)
{
    if (dtype == MOE_DTYPE_F32)
        ((float *)row)[c] = value;
    else
        ((uint16_t *)row)[c] = moe_f32_to_bf16(value);
}

static void fill_x(uint32_t slot, uint32_t t, void *row)
{
    struct rng r = rng_of(slot, t, 2);
    for (uint32_t c = 0; c < WIDTH; c++)
        write_value(row, c, rng_float(&r));
}

/* What the expert of choice k computes for a token. */
static void fill_output(uint32_t slot, uint32_t t, uint32_t k, float *row)
{
    struct rng r = rng_of(slot, t, 3 + k);
    for (uint32_t c = 0; c < WIDTH; c++)
        row[c] = rng_float(&r);
}

/* ------------------------------------------------------------------ the rule */

/* part = the sum of one slot's rows of the token, rounded; false if it has none. */
static bool sum_slot(uint32_t slot, uint32_t t, const int32_t *ids, uint32_t at, float *part)
{
    static float row[WIDTH];
    bool any = false;
    for (uint32_t k = 0; k < CHOICES; k++) {
        if (ids[k] < 0 || target_of(ids[k], t) != at)
            continue;
        fill_output(slot, t, k, row);
        for (uint32_t c = 0; c < WIDTH; c++)
            part[c] = any ? part[c] + row[c] : row[c];
        any = true;
    }
    for (uint32_t c = 0; c < WIDTH && any; c++)
        part[c] = rounded(part[c]);
    return any;
}

static void expect_y(uint32_t slot, uint32_t t, float *y)
{
    static float part[WIDTH], domain[WIDTH];
    int32_t ids[CHOICES];
    bool gateways = size > 1 && size < SLOTS;
    choose(slot, t, ids);
    memset(y, 0, WIDTH * sizeof *y);
    for (uint32_t first = 0; first < SLOTS; first += gateways ? size : 1) {
        uint32_t end = first + (gateways ? size : 1);
        bool any = false;
        memset(domain, 0, sizeof domain);
        for (uint32_t at = first; at < end; at++)
            if (sum_slot(slot, t, ids, at, part)) {
                any = true;
                for (uint32_t c = 0; c < WIDTH; c++)
                    domain[c] += part[c];
            }
        for (uint32_t c = 0; c < WIDTH && any; c++)
            y[c] += rounded(domain[c]);
    }
}

/* ------------------------------------------------------------------ a member */

static struct moe_status make_layer(struct moe_device *device, uint32_t slot,
                                    struct moe_layer **out)
{
    static float zeros[EXPERTS * WIDTH];
    uint32_t offset[EXPERTS + 1];
    uint16_t slots[2 * EXPERTS];
    struct moe_layer_spec spec = {
        .hidden = WIDTH, .experts = EXPERTS, .intermediate = 1, .router = PLAIN_ROUTER(CHOICES)};
    (void)place(offset, slots);
    struct moe_placement placement = {
        .version = 1, .experts = EXPERTS, .slots = SLOTS, .offset = offset, .slot = slots};
    MOE_TRY(backend->layer_create(device, &spec, &placement, slot, out));
    for (int w = 0; w < MOE_WEIGHT_COUNT; w++)
        for (uint32_t e = 0; e < EXPERTS; e++) {
            size_t rows, columns;
            moe_weight_shape(&spec, (enum moe_weight)w, &rows, &columns);
            bool expert = moe_weight_is_expert((enum moe_weight)w), local = !expert && e == 0;
            for (uint32_t i = offset[e]; expert && i < offset[e + 1]; i++)
                local = local || slots[i] == slot;
            if (local && rows > 0)
                MOE_TRY(backend->layer_upload(*out, (enum moe_weight)w, e, MOE_DTYPE_F32, zeros,
                                              rows * columns * sizeof *zeros));
        }
    return backend->layer_finish(*out);
}

/* Checks the rows of one expert, and fills in its outputs: all sources in slot order, their tokens,
 * their choices. Returns the number of rows. */
static uint32_t compute(const struct member *m, const struct moe_rows *rows, uint32_t local,
                        float *out)
{
    size_t bytes = WIDTH * moe_dtype_bytes(dtype);
    static uint8_t x[WIDTH * sizeof(float)];
    int32_t ids[CHOICES];
    uint32_t n = 0;
    for (uint32_t source = 0; source < SLOTS; source++)
        for (uint32_t t = 0; t < tokens_of(source); t++) {
            choose(source, t, ids);
            for (uint32_t k = 0; k < CHOICES; k++) {
                if (ids[k] != (int32_t)rows->expert[local] || target_of(ids[k], t) != m->slot)
                    continue;
                size_t row = rows->start[local] + n++;
                fill_x(source, t, x);
                if (memcmp((const uint8_t *)rows->x + row * bytes, x, bytes) != 0)
                    return UINT32_MAX;
                fill_output(source, t, k, out + row * WIDTH);
            }
        }
    return n;
}

static int check_y(const struct member *m, const uint8_t *y)
{
    static float want[WIDTH];
    static uint8_t row[WIDTH * sizeof(float)];
    size_t bytes = WIDTH * moe_dtype_bytes(dtype);
    for (uint32_t t = 0; t < tokens_of(m->slot); t++) {
        expect_y(m->slot, t, want);
        for (uint32_t c = 0; c < WIDTH; c++)
            write_value(row, c, want[c]);
        EXPECT(memcmp(y + t * bytes, row, bytes) == 0);
    }
    return 0;
}

/* Twice, so that the second pass meets the flags and regions of the first. */
static int run_passes(struct member *m, struct moe_session *session, struct moe_layer *layer)
{
    uint32_t tokens = tokens_of(m->slot);
    static int32_t ids[ROWS_T * CHOICES];
    static float weights[ROWS_T * CHOICES];
    static uint8_t x[ROWS_T * WIDTH * sizeof(float)], y[sizeof x];
    for (uint32_t t = 0; t < tokens; t++) {
        choose(m->slot, t, ids + t * CHOICES);
        fill_x(m->slot, t, x + t * WIDTH * moe_dtype_bytes(dtype));
    }
    for (int pass = 0; pass < 2; pass++) {
        struct moe_rows rows;
        EXPECT(good(
            backend->dispatch(session, layer, dtype, ROWS_BUCKET, tokens, x, ids, weights, &rows)));
        float *out = calloc((size_t)rows.start[rows.local_experts] * WIDTH + 1, sizeof *out);
        EXPECT(out != NULL);
        for (uint32_t l = 0; l < rows.local_experts; l++)
            EXPECT(compute(m, &rows, l, out) == rows.count[l]);
        EXPECT(good(backend->combine(session, layer, dtype, ROWS_BUCKET, tokens, x, ids, weights,
                                     &rows, out, y)));
        free(out);
        EXPECT(check_y(m, y) == 0);
        memset(y, 0xff, sizeof y);
    }
    return 0;
}

static int run_member(struct member *m)
{
    struct moe_device_config config = {.threads = 2};
    struct moe_device *device;
    struct moe_layer *layer = NULL;
    struct moe_session *session;
    struct moe_session_config join = member_session(m, 7, LONG_MS);
    EXPECT(good(backend->device_open(&config, &device)));
    EXPECT(good(make_layer(device, m->slot, &layer)));
    EXPECT(good(backend->session_join(device, &join, &session)));
    if (m->slot == 0)
        printf("domains of %u, %s: rows over %s\n", size, dtype == MOE_DTYPE_F32 ? "f32" : "bf16",
               backend->session_transport(session));
    EXPECT(run_passes(m, session, layer) == 0);
    EXPECT(board_barrier(m, LONG_MS));
    backend->session_leave(session);
    backend->layer_destroy(layer);
    backend->device_close(device);
    return 0;
}

static void run_case(uint32_t domain_size, enum moe_dtype of)
{
    size = domain_size;
    group_domain_size = domain_size;
    dtype = of;
    assert_true(run_group(SLOTS, run_member));
}

static void domains_of_several_slots_add_inside_first(void **state)
{
    (void)state;
    for (uint32_t domain_size = 2; domain_size <= 3; domain_size++) {
        run_case(domain_size, MOE_DTYPE_F32);
        run_case(domain_size, MOE_DTYPE_BF16);
    }
}

static void one_domain_and_domains_of_one_slot_add_slot_by_slot(void **state)
{
    (void)state;
    run_case(1, MOE_DTYPE_BF16);
    run_case(SLOTS, MOE_DTYPE_BF16);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(domains_of_several_slots_add_inside_first),
        cmocka_unit_test(one_domain_and_domains_of_one_slot_add_slot_by_slot),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
