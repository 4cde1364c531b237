/* See small_layer.h. */
#include "small_layer.h"

bool is(struct moe_status st, enum moe_code code, enum moe_reason reason)
{
    if (st.code == code && st.reason == reason)
        return true;
    fprintf(stderr, "got %s/%s: %s\n", moe_code_name(st.code), moe_reason_name(st.reason),
            st.code == MOE_OK ? "" : st.text);
    return false;
}

bool good(struct moe_status st)
{
    return is(st, MOE_OK, MOE_REASON_NONE);
}

static struct moe_status upload(const struct moe_backend *backend, struct moe_layer *layer,
                                const struct moe_layer_spec *spec, enum moe_weight w,
                                uint32_t expert)
{
    float data[2 * MOE_MAX_SLOTS * SMALL_LAYER_COLUMNS];
    size_t rows, columns;
    moe_weight_shape(spec, w, &rows, &columns);
    struct rng r = {.state = (uint64_t)w * 1000 + expert};
    MOE_INVARIANT(rows * columns <= sizeof data / sizeof *data);
    for (size_t i = 0; i < rows * columns; i++)
        data[i] = rng_float(&r);
    return backend->layer_upload(layer, w, expert, MOE_DTYPE_F32, data,
                                 rows * columns * sizeof *data);
}

struct moe_status small_layer_make(const struct moe_backend *backend, struct moe_device *device,
                                   const struct member *m, uint32_t hidden, uint32_t inner,
                                   uint64_t holders, struct moe_layer **out)
{
    uint32_t offset[2 * MOE_MAX_SLOTS + 1] = {0}, n = 0;
    uint16_t slot[2 * MOE_MAX_SLOTS];
    for (uint32_t s = 0; s < m->slots; s++)
        for (uint32_t i = 0; i < 2 && (holders >> s & 1); i++) {
            slot[n++] = (uint16_t)s;
            offset[n] = n;
        }
    struct moe_layer_spec spec = {
        .layer = 3,
        .hidden = hidden,
        .experts = n,
        .intermediate = inner,
        .router = {.score = MOE_SCORE_SIGMOID,
                   .top_k = 2,
                   .groups = 1,
                   .topk_group = 1,
                   .group_best = 1,
                   .renorm = MOE_RENORM_SUM,
                   .scale = 1},
    };
    struct moe_placement placement = {
        .version = 1, .experts = n, .slots = m->slots, .offset = offset, .slot = slot};
    static const enum moe_weight each[] = {MOE_WEIGHT_GATE, MOE_WEIGHT_UP, MOE_WEIGHT_DOWN};
    MOE_TRY(backend->layer_create(device, &spec, &placement, m->slot, out));
    MOE_TRY(upload(backend, *out, &spec, MOE_WEIGHT_ROUTER, 0));
    for (uint32_t e = 0; e < n; e++)
        for (uint32_t i = 0; i < 3 && slot[e] == m->slot; i++)
            MOE_TRY(upload(backend, *out, &spec, each[i], e));
    return backend->layer_finish(*out);
}
