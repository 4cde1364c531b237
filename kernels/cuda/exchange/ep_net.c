/* SPDX-License-Identifier: Apache-2.0 */
/* The host's part of passes over a network; see ep_net.h. */
#include "cuda/exchange/ep_net.h"

#include "base/size.h"
#include "common/session_rules.h"
#include "cuda/layer/layer.h"
#include "cuda/plan/limits.h"
#include "cuda/session/session.h"

#include <stdlib.h>

enum { LINE = 256 };

struct moe_cuda_ep_net {
    struct moe_session *session;
    struct moe_cuda_net_pass pass; /* of the last pass */
    const struct moe_layer *layer;
    bool x_dy_rows; /* the last pass moves x and dy together */
    bool room;      /* there is memory for its messages */

    void *control; /* device memory: control messages out and in, and the numbers of outgoing
                      records */
    size_t control_area_bytes, received_words;
    uint64_t *received; /* pinned: control_in and outgoing, as received */
    void *tables;       /* device memory */
    size_t tables_bytes;
    uint32_t *layout; /* pinned; the device's copy is the last of the tables */
    size_t layout_bytes;
    struct moe_cuda_buffer messages; /* out, then in */
};

static bool is_peer(const struct moe_session *s, uint32_t slot)
{
    return slot != s->config.slot && (s->config.live >> slot & 1);
}

/* The slot of equal index in another domain. */
static bool is_partner(const struct moe_session *s, uint32_t slot)
{
    const struct moe_cuda_relay *r = &s->relay;
    return r->domains != 0 && is_peer(s, slot) && r->domain_of[slot] != r->own &&
           r->index_of[slot] == r->index;
}

static const struct moe_cuda_control_message *control_of(const struct moe_cuda_ep_net *n,
                                                         uint32_t slot)
{
    return (const void *)((const uint8_t *)n->received + slot * n->pass.control_bytes);
}

/* Records for a slot, or for domain d as number slots + d. */
static uint32_t outgoing_to(const struct moe_cuda_ep_net *n, uint32_t slot)
{
    uint32_t slots = n->session->config.slots;
    const void *at = (const uint8_t *)n->received + slots * n->pass.control_bytes;
    return ((const uint32_t *)at)[slot];
}

/* ------------------------------------------------------------------ memory */

static size_t round_up(size_t n, size_t to)
{
    return (n + to - 1) / to * to;
}

/* Lists of tokens: one for each slot, and one for each domain if there are several. */
static size_t lists_of(const struct moe_session *s)
{
    return s->config.slots + (size_t)s->relay.domains;
}

static struct moe_status take_control_memory(struct moe_cuda_ep_net *n)
{
    const struct moe_window_shape *w = &n->session->layout.shape;
    struct moe_device *device = n->session->device;
    struct moe_cuda_net_pass *p = &n->pass;
    size_t body = w->max_experts * sizeof(uint32_t);
    if (body < MOE_WINDOW_EXCHANGE_BYTES)
        body = MOE_WINDOW_EXCHANGE_BYTES;
    p->control_bytes =
        round_up(sizeof(struct moe_cuda_control_message) + body, MOE_CUDA_TRAILER_BYTES) +
        MOE_CUDA_TRAILER_BYTES;
    size_t received = round_up(
        w->slots * p->control_bytes + lists_of(n->session) * sizeof(uint32_t), sizeof(uint64_t));
    n->received_words = received / sizeof(uint64_t);
    n->control_area_bytes = w->slots * p->control_bytes + received;
    void *pinned;
    MOE_TRY(moe_cuda_mem_alloc(device, MOE_MEM_DEVICE, n->control_area_bytes, &n->control));
    MOE_TRY(moe_cuda_mem_alloc(device, MOE_MEM_HOST, received, &pinned));
    n->received = pinned;
    p->control_out = n->control;
    p->control_in = p->control_out + w->slots * p->control_bytes;
    p->outgoing = (void *)(p->control_in + w->slots * p->control_bytes);
    return moe_ok();
}

static struct moe_status take_tables(struct moe_cuda_ep_net *n)
{
    const struct moe_window_shape *w = &n->session->layout.shape;
    struct moe_device *device = n->session->device;
    struct moe_cuda_net_pass *p = &n->pass;
    size_t pairs = (size_t)w->max_tokens * w->max_top_k;
    size_t each = lists_of(n->session) * w->max_tokens;
    size_t layout = (w->slots + (size_t)2) * w->max_experts + 1;
    void *pinned;
    n->tables_bytes = (pairs + 3 * each + layout) * sizeof(uint32_t);
    n->layout_bytes = layout * sizeof(uint32_t);
    MOE_TRY(moe_cuda_mem_alloc(device, MOE_MEM_DEVICE, n->tables_bytes, &n->tables));
    MOE_TRY(moe_cuda_mem_alloc(device, MOE_MEM_HOST, n->layout_bytes, &pinned));
    n->layout = pinned;
    p->position = n->tables;
    p->send_token = p->position + pairs;
    p->send_index = p->send_token + each;
    p->came_token = p->send_index + each;
    p->layout = p->came_token + each;
    return moe_ok();
}

struct moe_status moe_cuda_ep_net_create(struct moe_session *session, struct moe_cuda_ep_net **out)
{
    struct moe_cuda_ep_net *n = calloc(1, sizeof *n);
    if (n == NULL)
        return moe_error(MOE_RESOURCE_EXHAUSTED, MOE_REASON_OUT_OF_MEMORY,
                         "out of memory for a session's control messages");
    n->session = session;
    n->pass.relay = session->relay;
    struct moe_status st = take_control_memory(n);
    if (!moe_failed(&st))
        st = take_tables(n);
    if (moe_failed(&st))
        moe_cuda_ep_net_destroy(n);
    else
        *out = n;
    return st;
}

void moe_cuda_ep_net_destroy(struct moe_cuda_ep_net *n)
{
    if (n == NULL)
        return;
    struct moe_device *device = n->session->device;
    moe_cuda_mem_free(device, MOE_MEM_DEVICE, n->control, n->control_area_bytes);
    moe_cuda_mem_free(device, MOE_MEM_HOST, n->received, n->received_words * sizeof(uint64_t));
    moe_cuda_mem_free(device, MOE_MEM_DEVICE, n->tables, n->tables_bytes);
    moe_cuda_mem_free(device, MOE_MEM_HOST, n->layout, n->layout_bytes);
    moe_cuda_buffer_free(device, &n->messages);
    free(n);
}

/* Bytes of a token's sum on its way home. */
static size_t sum_bytes(size_t hidden, enum moe_dtype dtype, bool x_dy_rows)
{
    return x_dy_rows ? (hidden + MOE_COMMON_TOP_K) * sizeof(float)
                     : hidden * moe_dtype_bytes(dtype);
}

/* Sizes of messages for passes with rows of `row` bytes and sums of `sum` bytes. False if they
 * exceed size_t. */
static bool lay_out_regions(const struct moe_session *s, size_t row, size_t sum, size_t top_k,
                            uint32_t bucket, struct moe_cuda_net_pass *p)
{
    size_t head = round_up(sizeof(struct moe_cuda_record) + top_k * sizeof(struct moe_cuda_route) +
                               s->relay.size * sizeof(uint32_t),
                           MOE_CUDA_TRAILER_BYTES);
    p->record_head = (uint32_t)head;
    p->partial = (uint32_t)round_up(sum, MOE_CUDA_TRAILER_BYTES);
    p->record = (uint32_t)(head + round_up(row, MOE_CUDA_TRAILER_BYTES));
    return moe_size_mul(bucket, p->record > p->partial ? p->record : p->partial, &p->region) &&
           moe_size_add(p->region, MOE_CUDA_TRAILER_BYTES, &p->region) &&
           moe_size_round_up(p->region, LINE, &p->region);
}

/* And of the memory for messages: with each peer, or with the partner in each domain. */
static bool lay_out_messages(const struct moe_session *s, const struct moe_layer *layer,
                             enum moe_dtype dtype, uint32_t bucket, bool x_dy_rows,
                             struct moe_cuda_net_pass *p, size_t *bytes)
{
    size_t messages = s->relay.domains != 0 ? s->relay.domains : s->config.slots;
    return lay_out_regions(s, moe_cuda_ep_row_bytes(layer, dtype, x_dy_rows),
                           sum_bytes(moe_expert_width(&layer->spec), dtype, x_dy_rows),
                           layer->spec.router.top_k, bucket, p) &&
           moe_size_mul(p->region, 2 * messages, bytes);
}

/* Sizes only grow with those of the shape, and quantised rows are not longer, so all passes fit. */
size_t moe_cuda_ep_net_shared_bytes(const struct moe_session *s)
{
    const struct moe_session_config *c = &s->config;
    const enum moe_dtype dtypes[] = {MOE_DTYPE_BF16, MOE_DTYPE_F32};
    size_t region = 0, bytes;
    for (size_t i = 0; i < sizeof dtypes / sizeof *dtypes; i++) {
        struct moe_cuda_net_pass p;
        size_t row = c->max_hidden * moe_dtype_bytes(dtypes[i]);
        if (!lay_out_regions(s, c->training ? 2 * row : row,
                             sum_bytes(c->max_hidden, dtypes[i], c->training), c->max_top_k,
                             moe_session_max_tokens(c, dtypes[i]), &p))
            return SIZE_MAX; /* no device has it */
        region = p.region > region ? p.region : region;
    }
    if (!moe_size_mul(region, 2 * (size_t)c->slots, &bytes) ||
        !moe_size_add(bytes, MOE_CUDA_SHARED_REGIONS, &bytes))
        return SIZE_MAX;
    return bytes;
}

/* Where messages of this pass lie. */
static void place_messages(struct moe_cuda_ep_net *n)
{
    const struct moe_session *s = n->session;
    struct moe_cuda_net_pass *p = &n->pass;
    uint8_t *at = n->messages.data;
    if (s->relay.domains == 0) {
        p->out = at;
        p->in = at + s->config.slots * p->region;
        return;
    }
    p->in = s->relay.shared[s->config.slot] + MOE_CUDA_SHARED_REGIONS;
    p->far_out = at;
    p->far_in = at + s->relay.domains * p->region;
}

struct moe_status moe_cuda_ep_net_reserve(struct moe_cuda_ep_net *n, const struct moe_layer *layer,
                                          enum moe_dtype dtype, uint32_t bucket, bool x_dy_rows)
{
    struct moe_cuda_net_pass unused;
    size_t bytes;
    if (!lay_out_messages(n->session, layer, dtype, bucket, x_dy_rows, &unused, &bytes))
        return moe_error(MOE_RESOURCE_EXHAUSTED, MOE_REASON_OUT_OF_MEMORY,
                         "messages of %u tokens do not fit in memory", bucket);
    return moe_cuda_buffer_reserve(n->session->device, &n->messages, bytes);
}

bool moe_cuda_ep_net_fits(const struct moe_cuda_ep_net *n, const struct moe_layer *layer,
                          enum moe_dtype dtype, uint32_t bucket)
{
    struct moe_cuda_net_pass unused;
    size_t bytes;
    return lay_out_messages(n->session, layer, dtype, bucket, false, &unused, &bytes) &&
           bytes <= n->messages.bytes;
}

struct moe_status moe_cuda_ep_net_borrow(struct moe_cuda_ep_net *n, size_t bytes, void **out)
{
    MOE_TRY(moe_cuda_buffer_reserve(n->session->device, &n->messages, bytes));
    *out = n->messages.data;
    return moe_ok();
}

/* ----------------------------------------------------------------- control messages */

static struct moe_status exchange_control_messages(struct moe_cuda_ep_net *n)
{
    const struct moe_session *s = n->session;
    struct moe_cuda_transfer transfer[MOE_CUDA_MAX_SLOTS] = {0};
    struct moe_cuda_net_pass *p = &n->pass;
    for (uint32_t i = 0; i < s->config.slots; i++)
        transfer[i] = (struct moe_cuda_transfer){.send = p->control_out + i * p->control_bytes,
                                                 .recv = p->control_in + i * p->control_bytes,
                                                 .send_bytes = p->control_bytes,
                                                 .recv_bytes = p->control_bytes};
    struct moe_cuda_completion completion = {
        .from = (const void *)p->control_in, .to = n->received, .words = n->received_words};
    return moe_cuda_net_exchange(s->net, transfer, &completion);
}

static bool refuses(struct moe_cuda_ep_net *n, uint32_t code, uint32_t slot)
{
    n->pass.outcome = (struct moe_cuda_step_outcome){.code = code, .slot = slot};
    return false;
}

/* Whether slot p's message is for a step, and p has memory for it. */
static bool read_claim(struct moe_cuda_ep_net *n, uint32_t p)
{
    const struct moe_cuda_control_message *theirs = control_of(n, p);
    if (theirs->kind != MOE_CUDA_MESSAGE_STEP)
        return refuses(n, MOE_CUDA_PASS_PROTOCOL_ERROR, p);
    if (theirs->head[MOE_HEAD_BUCKET] & MOE_HEAD_NO_MEMORY)
        return refuses(n, MOE_CUDA_PASS_REFUSED, p);
    return true;
}

/* Whether slot p means the same step as this slot, with a possible number of tokens. */
static bool read_head(struct moe_cuda_ep_net *n, const struct moe_cuda_pass *pass, uint32_t p)
{
    const struct moe_cuda_control_message *theirs = control_of(n, p),
                                          *mine = control_of(n, pass->slot);
    if (theirs->head[MOE_HEAD_TOKENS] > pass->bucket)
        return refuses(n, MOE_CUDA_PASS_REFUSED, p + MOE_CUDA_MEANS_OTHER);
    for (uint32_t w = 0; w < MOE_HEAD_COUNT; w++)
        if (w != MOE_HEAD_TOKENS && theirs->head[w] != mine->head[w])
            return refuses(n, MOE_CUDA_PASS_REFUSED, p + MOE_CUDA_MEANS_OTHER);
    n->pass.tokens_of[p] = theirs->head[MOE_HEAD_TOKENS];
    return true;
}

/* Call after all heads agree. */
static bool read_sizes(struct moe_cuda_ep_net *n, const struct moe_cuda_pass *pass, uint32_t p)
{
    const struct moe_cuda_control_message *message = control_of(n, p);
    const struct moe_layer *layer = n->layer;
    uint32_t tokens = n->pass.tokens_of[p];
    n->pass.rows_in[p] = p == pass->slot ? 0 : message->size;
    if (n->pass.rows_in[p] > tokens)
        return refuses(n, MOE_CUDA_PASS_PROTOCOL_ERROR, p);
    for (uint32_t l = 0; l < pass->local_experts; l++)
        if (message->body[layer->local[l]] > (uint64_t)tokens * pass->top_k)
            return refuses(n, MOE_CUDA_PASS_PROTOCOL_ERROR, p);
    if (!is_partner(n->session, p))
        return true;
    n->pass.across_in[n->session->relay.domain_of[p]] = message->across;
    if (message->across > tokens)
        return refuses(n, MOE_CUDA_PASS_PROTOCOL_ERROR, p);
    return true;
}

/* Lays out rows: experts in ascending order, each from an aligned row; within an expert, sources in
 * slot order. */
static bool lay_out_rows(struct moe_cuda_ep_net *n, const struct moe_cuda_pass *pass)
{
    const uint32_t local = pass->local_experts, slots = pass->slots;
    uint32_t *first = n->layout, *start = first + slots * local, *count = start + local + 1;
    uint64_t at = 0, rows = 0;
    for (uint32_t l = 0; l < local; l++) {
        start[l] = (uint32_t)at;
        uint64_t row = at;
        for (uint32_t p = 0; p < slots; p++) {
            first[p * local + l] = (uint32_t)row;
            if (n->session->config.live >> p & 1)
                row += control_of(n, p)->body[n->layer->local[l]];
        }
        count[l] = (uint32_t)(row - at);
        rows += row - at;
        at = round_up(row, MOE_ROW_ALIGN);
        if (at > pass->row_capacity)
            return refuses(n, MOE_CUDA_PASS_PROTOCOL_ERROR, pass->slot);
    }
    start[local] = (uint32_t)at;
    n->pass.outcome = (struct moe_cuda_step_outcome){.code = MOE_CUDA_PASS_GOOD, .rows = rows};
    return true;
}

/* Sets the outcome and the sizes of the pass. */
static void read_control_messages(struct moe_cuda_ep_net *n, const struct moe_cuda_pass *pass)
{
    uint64_t live = n->session->config.live;
    memset(n->pass.tokens_of, 0, sizeof n->pass.tokens_of);
    memset(n->pass.rows_in, 0, sizeof n->pass.rows_in);
    memset(n->pass.across_in, 0, sizeof n->pass.across_in);
    for (uint32_t p = 0; p < pass->slots; p++)
        if ((live >> p & 1) && !read_claim(n, p))
            return;
    for (uint32_t p = 0; p < pass->slots; p++)
        if ((live >> p & 1) && !read_head(n, pass, p))
            return;
    for (uint32_t p = 0; p < pass->slots; p++)
        if ((live >> p & 1) && !read_sizes(n, pass, p))
            return;
    (void)lay_out_rows(n, pass);
}

/* ------------------------------------------------------------------ passes */

static uint32_t ctas(const struct moe_cuda_ep_net *n)
{
    return (uint32_t)n->session->device->multiprocessors;
}

struct moe_status moe_cuda_ep_net_prepare(struct moe_cuda_ep_net *n,
                                          const struct moe_cuda_pass *pass,
                                          const struct moe_layer *layer, bool x_dy_rows)
{
    cudaStream_t stream = n->session->device->compute;
    struct moe_cuda_net_pass *p = &n->pass;
    size_t bytes;
    bool room =
        lay_out_messages(n->session, layer, pass->dtype, pass->bucket, x_dy_rows, p, &bytes) &&
        bytes <= n->messages.bytes;
    n->layer = layer;
    n->x_dy_rows = x_dy_rows;
    if (room)
        place_messages(n);
    n->room = room;
    p->parts = pass->bucket <= 512 ? 8 : 1; /* gives each warp work when tokens are few */
    p->trailer = moe_cuda_net_next_trailer(n->session->net);
    MOE_TRY(moe_cuda_launch_net_list(pass, p, stream));
    MOE_TRY(exchange_control_messages(n));
    if (!room)
        return moe_ok(); /* the control messages refuse the pass */
    /* Pack the records while the control messages are read. */
    p->trailer = moe_cuda_net_next_trailer(n->session->net);
    MOE_TRY(moe_cuda_launch_net_pack(pass, p, ctas(n), stream));
    if (p->relay.domains == 0)
        return moe_ok();
    return moe_cuda_launch_relay_announce(pass, p, MOE_CUDA_RELAY_RECORDS, p->trailer, stream);
}

/* Of records, or back home of partials, with the partner in each other domain. */
static void list_far_messages(const struct moe_cuda_ep_net *n, bool home,
                              struct moe_cuda_transfer transfer[MOE_CUDA_MAX_SLOTS])
{
    const struct moe_session *s = n->session;
    const struct moe_cuda_net_pass *p = &n->pass;
    const struct moe_cuda_relay *r = &p->relay;
    const size_t each = home ? p->partial : p->record;
    for (uint32_t d = 0; d < r->domains; d++) {
        size_t came = p->across_in[d], went = outgoing_to(n, s->config.slots + d);
        if (d != r->own)
            transfer[r->slot_at[d * r->size + r->index]] = (struct moe_cuda_transfer){
                .send = p->far_out + d * p->region,
                .recv = p->far_in + d * p->region,
                .send_bytes = (home ? came : went) * each + MOE_CUDA_TRAILER_BYTES,
                .recv_bytes = (home ? went : came) * each + MOE_CUDA_TRAILER_BYTES};
    }
}

static struct moe_status exchange_messages(struct moe_cuda_ep_net *n, uint8_t *from, uint8_t *to,
                                           bool home)
{
    const struct moe_session *s = n->session;
    const struct moe_cuda_net_pass *p = &n->pass;
    struct moe_cuda_transfer transfer[MOE_CUDA_MAX_SLOTS] = {0};
    const size_t each = home ? p->partial : p->record;
    if (p->relay.domains != 0)
        list_far_messages(n, home, transfer);
    for (uint32_t i = 0; p->relay.domains == 0 && i < s->config.slots; i++) {
        size_t came = p->rows_in[i], went = is_peer(s, i) ? outgoing_to(n, i) : 0;
        transfer[i] = (struct moe_cuda_transfer){
            .send = from + i * p->region,
            .recv = to + i * p->region,
            .send_bytes = (home ? came : went) * each + MOE_CUDA_TRAILER_BYTES,
            .recv_bytes = (home ? went : came) * each + MOE_CUDA_TRAILER_BYTES};
    }
    return moe_cuda_net_exchange(s->net, transfer, NULL);
}

/* Over several domains: gives partners' records to this domain's slots, and waits for all records
 * that other slots store here. */
static struct moe_status bring_records(const struct moe_cuda_ep_net *n,
                                       const struct moe_cuda_pass *pass)
{
    cudaStream_t stream = n->session->device->compute;
    const struct moe_cuda_net_pass *p = &n->pass;
    if (p->relay.domains == 0)
        return moe_ok();
    MOE_TRY(moe_cuda_launch_relay_forward(pass, p, ctas(n), stream));
    MOE_TRY(moe_cuda_launch_relay_announce(pass, p, MOE_CUDA_RELAY_FORWARDED, p->trailer, stream));
    return moe_cuda_launch_relay_await(pass, p, false, p->trailer, stream);
}

/* The same for sums: waits for those of this domain, and adds those for the partners. */
static struct moe_status bring_sums(const struct moe_cuda_ep_net *n,
                                    const struct moe_cuda_pass *pass)
{
    cudaStream_t stream = n->session->device->compute;
    const struct moe_cuda_net_pass *p = &n->pass;
    if (p->relay.domains == 0)
        return moe_ok();
    MOE_TRY(moe_cuda_launch_relay_announce(pass, p, MOE_CUDA_RELAY_SUMS, p->trailer, stream));
    MOE_TRY(moe_cuda_launch_relay_await(pass, p, true, p->trailer, stream));
    return moe_cuda_launch_relay_gather(pass, p, ctas(n), stream);
}

/* Dispatch writes row_of only for tokens that arrive: clear the rest. */
static struct moe_status forget_rows_of_tokens(const struct moe_cuda_ep_net *n,
                                               const struct moe_cuda_pass *pass)
{
    const struct moe_window_shape *w = &pass->layout.shape;
    const size_t each = w->max_top_k * sizeof *pass->row_of;
    static_assert(MOE_CUDA_NO_ROW == 0xffffffff, "no row is a byte repeated");
    return MOE_CUDA(cudaMemset2DAsync(pass->row_of, w->max_tokens * each, 0xff, pass->bucket * each,
                                      w->slots, n->session->device->compute));
}

struct moe_status moe_cuda_ep_net_dispatch(struct moe_cuda_ep_net *n,
                                           const struct moe_cuda_pass *pass)
{
    cudaStream_t stream = n->session->device->compute;
    struct moe_cuda_net_pass *p = &n->pass;
    MOE_TRY(moe_cuda_net_settle(n->session->net));
    read_control_messages(n, pass);
    if (p->outcome.code == MOE_CUDA_PASS_GOOD) {
        MOE_INVARIANT(n->room);
        MOE_TRY(exchange_messages(n, p->out, p->in, false));
        MOE_TRY(bring_records(n, pass));
        if (n->x_dy_rows)
            MOE_TRY(forget_rows_of_tokens(n, pass));
        size_t used = ((pass->slots + (size_t)2) * pass->local_experts + 1) * sizeof *n->layout;
        MOE_TRY(
            MOE_CUDA(cudaMemcpyAsync(p->layout, n->layout, used, cudaMemcpyHostToDevice, stream)));
    }
    return moe_cuda_launch_net_expand(pass, p, ctas(n), stream);
}

struct moe_status moe_cuda_ep_net_combine(struct moe_cuda_ep_net *n,
                                          const struct moe_cuda_pass *pass)
{
    cudaStream_t stream = n->session->device->compute;
    struct moe_cuda_net_pass *p = &n->pass;
    if (p->outcome.code == MOE_CUDA_PASS_GOOD) {
        p->trailer = moe_cuda_net_next_trailer(n->session->net);
        MOE_TRY(moe_cuda_launch_net_sum(pass, p, ctas(n), stream));
        MOE_TRY(bring_sums(n, pass));
        MOE_TRY(exchange_messages(n, p->in, p->out, true));
    }
    return moe_cuda_launch_net_finish(pass, p, ctas(n), stream);
}

/* ---------------------------------------------------------------- exchange */

struct moe_status moe_cuda_ep_net_exchange(struct moe_cuda_ep_net *n, const void *mine,
                                           size_t bytes, struct moe_cuda_host_control *host_control)
{
    const struct moe_session *s = n->session;
    const size_t each = n->pass.control_bytes;
    const uint64_t trailer = moe_cuda_net_next_trailer(s->net);
    for (uint32_t p = 0; p < s->config.slots; p++) {
        uint8_t *at = (uint8_t *)n->received + p * each;
        struct moe_cuda_control_message *message = (void *)at;
        *message = (struct moe_cuda_control_message){.kind = MOE_CUDA_MESSAGE_EXCHANGE,
                                                     .size = (uint32_t)bytes};
        if (bytes > 0)
            memcpy(message->body, mine, bytes);
        memcpy(at + each - sizeof trailer, &trailer, sizeof trailer);
    }
    MOE_TRY(moe_cuda_mem_copy(s->device, n->pass.control_out, n->received, s->config.slots * each));
    MOE_TRY(exchange_control_messages(n));
    MOE_TRY(moe_cuda_net_settle(s->net));
    for (uint32_t p = 0; p < s->config.slots; p++) {
        if (!is_peer(s, p))
            continue;
        const struct moe_cuda_control_message *message = control_of(n, p);
        bool right = message->kind == MOE_CUDA_MESSAGE_EXCHANGE;
        host_control->bytes_came[p] = right ? message->size : UINT32_MAX;
        memcpy(host_control->all[p], message->body, MOE_WINDOW_EXCHANGE_BYTES);
    }
    return moe_ok();
}
