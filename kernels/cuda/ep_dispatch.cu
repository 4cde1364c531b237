/* Prepare and dispatch. Two launches:
 *
 *   announce   a CTA per expert walks over all choices of the own tokens: first each warp counts in
 *              its share, then it knows the positions among all rows for that expert; the counts
 *              go to the peers with the head
 *   dispatch   one CTA of 16 warps per multiprocessor. The first warps of each send tokens, the
 *              others wait for heads and counts, lay out the rows, and expand tokens as they come;
 *              warps that have nothing left to send help them. Rows are moved in registers, a warp
 *              per row, 16 bytes per lane at a time where the shape allows.
 *
 * Nobody sends in a way that depends on receiving, so all slots may send and wait at once. What
 * comes out of a window is checked before it is used as an index. */
#include "cuda/count.cuh"
#include "cuda/load.h"

/* ------------------------------------------------------------- announce */

constexpr uint32_t ANNOUNCE_WARPS = 16;

/* Lane i: head word i to every slot, the own one included. Also clears the pass's tables, so that a
 * pass that ends early has no rows. */
__device__ static void open_pass(const struct moe_cuda_pass &p, uint64_t stamp, uint32_t parity)
{
    struct moe_cuda_control *c = p.control;
    const uint32_t lane = threadIdx.x % 32;
    if (lane == 0)
        c->verdict = {MOE_CUDA_PASS_GOOD, 0, 0};
    for (uint32_t l = lane; l <= p.local_experts; l += 32) {
        p.start[l] = 0;
        if (l < p.local_experts)
            p.count[l] = 0;
    }
    for (uint32_t s = 0; s < p.slots && lane < MOE_HEAD_WORDS; s++)
        if (is_live(c->live, s))
            store_relaxed(moe_window_head_of(&p.layout, c->window[s], parity, p.slot) + lane,
                          moe_window_word(stamp, p.facts->head[lane]));
}

__global__ void __launch_bounds__(32 * ANNOUNCE_WARPS)
    announce_kernel(const __grid_constant__ struct moe_cuda_pass p)
{
    __shared__ uint32_t counts[ANNOUNCE_WARPS][32];
    stamp_stage(p, MOE_STAGE_PREPARE);
    struct moe_cuda_control *c = p.control;
    const uint32_t lane = threadIdx.x % 32, warp = threadIdx.x / 32, e = blockIdx.x;
    /* What the facts point to is under way while the stop word is. */
    const uint32_t entry = p.facts->placement.offset[e];
    const uint32_t copies = p.facts->placement.offset[e + 1] - entry;
    const uint32_t pairs = p.facts->tokens * p.top_k;
    if (__syncthreads_or(load_volatile(&c->stop) != 0))
        return;
    const uint32_t step = c->step + 1, parity = step & 1;
    const uint64_t stamp = moe_window_stamp(c->epoch, step);
    if (e == 0 && warp == 0)
        open_pass(p, stamp, parity);
    const uint32_t share = (pairs + 32 * ANNOUNCE_WARPS - 1) / (32 * ANNOUNCE_WARPS) * 32;
    const uint32_t first = min(warp * share, pairs), end = min(first + share, pairs);
    counts[warp][lane] = walk_pairs(p, e, copies, first, end, 0, nullptr);
    __syncthreads();
    uint32_t before = 0, all = 0;
    for (uint32_t w = 0; w < ANNOUNCE_WARPS; w++) {
        before += w < warp ? counts[w][lane] : 0;
        all += counts[w][lane];
    }
    if (counts[warp][0] != 0 || copies > 1)
        walk_pairs(p, e, copies, first, end, before, p.position);
    if (warp != 0 || lane >= copies)
        return;
    uint32_t slot = p.facts->placement.slot[entry + lane];
    store_relaxed(moe_window_counts_of(&p.layout, c->window[slot], parity, p.slot) + e,
                  moe_window_word(stamp, all));
}

/* ------------------------------------------------------------------ send */

template <typename Unit>
__device__ static void send_token(const struct moe_cuda_pass &p, uint64_t stamp, uint32_t parity,
                                  uint32_t t)
{
    struct moe_cuda_control *c = p.control;
    const uint32_t lane = threadIdx.x % 32;
    const size_t pair = static_cast<size_t>(t) * p.top_k + lane;
    int32_t id = lane < p.top_k && token_counts(p, t) ? p.ids[pair] : -1;
    uint32_t target = target_of(p, t, id);
    /* Lane s: the choices that go to slot s. */
    uint32_t choices = 0;
    for (uint32_t s = 0; s < p.slots; s++) {
        uint32_t those = __ballot_sync(ALL_LANES, target == s);
        if (lane == s && s != p.slot && is_live(c->live, s))
            choices = those;
    }
    /* Lanes are numbered by distance from here on, so that slots begin with different peers. */
    uint32_t peer = (p.slot + lane) % p.slots;
    uint32_t wanted = __shfl_sync(ALL_LANES, choices, static_cast<int>(peer));
    uint32_t lanes = __ballot_sync(ALL_LANES, lane < p.slots && wanted != 0);
    uint8_t *base = lane < p.slots ? c->window[peer] : nullptr;
    if (lanes != 0) {
        void *to =
            lanes >> lane & 1 ? moe_window_row_of(&p.layout, base, p.slot, t, p.stride) : nullptr;
        const void *from = static_cast<const uint8_t *>(p.x) + static_cast<size_t>(t) * p.row_bytes;
        scatter_row<Unit>(from, p.row_bytes, lanes, to);
        if (target != NOWHERE && target != p.slot)
            moe_window_routes_of(&p.layout, c->window[target], parity, p.slot,
                                 t)[lane] = {moe_window_word(stamp, static_cast<uint32_t>(id)),
                                             p.weights[pair],
                                             {p.position[pair]}};
    }
    __syncwarp();
    if (lane == 0 || lane >= p.slots || base == nullptr)
        return;
    if (lanes != 0)
        fence_system();
    store_relaxed(moe_window_sent_of(&p.layout, base, p.slot, t), moe_window_word(stamp, wanted));
}

/* Takes tokens until there are none. Rows of the last step must be out of the peers' windows. */
template <typename Unit>
__device__ static void send_tokens(const struct moe_cuda_pass &p, uint32_t step)
{
    struct moe_cuda_control *c = p.control;
    const uint32_t lane = threadIdx.x % 32;
    bool clear = true;
    if (step > 1 && lane < p.slots && lane != p.slot && is_live(c->live, lane))
        clear =
            wait_word_reached(c, p.abort, moe_window_done_of(&p.layout, c->window[p.slot], lane),
                              moe_window_stamp(c->epoch, step - 1), lane);
    if (!__all_sync(ALL_LANES, clear))
        return;
    const uint64_t stamp = moe_window_stamp(c->epoch, step);
    for (uint32_t t = take_item(&c->next_push); t < p.facts->tokens; t = take_item(&c->next_push))
        send_token<Unit>(p, stamp, step & 1, t);
}

/* --------------------------------------------------------------- receive */

/* What a CTA knows of the rows that come: shared memory. */
struct arrival {
    uint32_t other;  /* lowest slot that means another step, or NOWHERE */
    uint32_t failed; /* a wait failed, or counts are impossible */
    uint32_t tokens_of[MOE_MAX_SLOTS];
    /* Behind it: first[slots][local], the row of the source's first row for each expert, then
     * count[slots][local]. */
};

__device__ static uint32_t *first_rows(struct arrival *a)
{
    return reinterpret_cast<uint32_t *>(a + 1);
}

__device__ static uint32_t *row_counts(const struct moe_cuda_pass &p, struct arrival *a)
{
    return first_rows(a) + p.slots * p.local_experts;
}

/* The receiving warps of a CTA meet; `threads` of them. */
__device__ static void meet_receivers(uint32_t threads)
{
    asm volatile("bar.sync 1, %0;" ::"r"(threads) : "memory");
}

/* Receivers say that the layout is known, and go on; senders wait for that. */
__device__ static void say_layout_known()
{
    asm volatile("bar.arrive 2, %0;" ::"n"(CTA_THREADS) : "memory");
}

__device__ static void await_layout()
{
    asm volatile("bar.sync 2, %0;" ::"n"(CTA_THREADS) : "memory");
}

__device__ static void read_heads(const struct moe_cuda_pass &p, struct arrival *a, uint32_t step,
                                  uint32_t thread, uint32_t threads)
{
    struct moe_cuda_control *c = p.control;
    const uint64_t stamp = moe_window_stamp(c->epoch, step);
    for (uint32_t i = thread; i < p.slots * MOE_HEAD_WORDS; i += threads) {
        uint32_t source = i / MOE_HEAD_WORDS, word = i % MOE_HEAD_WORDS, value = 0;
        if (!is_live(c->live, source)) {
            if (word == MOE_HEAD_TOKENS)
                a->tokens_of[source] = 0;
            continue;
        }
        const uint64_t *at = moe_window_head_of(&p.layout, c->window[p.slot], step & 1, source);
        if (!wait_word(c, p.abort, at + word, stamp, source, &value)) {
            a->failed = 1;
            continue;
        }
        bool differs = word == MOE_HEAD_TOKENS ? value > p.bucket : value != p.facts->head[word];
        if (differs)
            atomicMin(&a->other, source);
        if (word == MOE_HEAD_TOKENS)
            a->tokens_of[source] = value;
    }
}

__device__ static void read_counts(const struct moe_cuda_pass &p, struct arrival *a, uint32_t step,
                                   uint32_t thread, uint32_t threads)
{
    struct moe_cuda_control *c = p.control;
    const uint64_t stamp = moe_window_stamp(c->epoch, step);
    uint32_t *count = row_counts(p, a);
    for (uint32_t i = thread; i < p.slots * p.local_experts; i += threads) {
        uint32_t source = i / p.local_experts,
                 expert = p.facts->placement.local[i % p.local_experts];
        count[i] = 0;
        if (!is_live(c->live, source))
            continue;
        const uint64_t *at =
            moe_window_counts_of(&p.layout, c->window[p.slot], step & 1, source) + expert;
        if (!wait_word(c, p.abort, at, stamp, source, &count[i])) {
            a->failed = 1;
        } else if (count[i] > a->tokens_of[source] * p.top_k) {
            give_up(c, MOE_CUDA_PASS_LIE, source);
            a->failed = 1;
        }
    }
}

/* Experts in ascending order, each from an aligned row; inside, sources in slot order. One warp. */
__device__ static void lay_out_rows(const struct moe_cuda_pass &p, struct arrival *a, bool writer)
{
    const uint32_t lane = threadIdx.x % 32, local = p.local_experts;
    uint32_t *first = first_rows(a), *count = row_counts(p, a);
    uint64_t at = 0, rows = 0;
    for (uint32_t l0 = 0; l0 < local; l0 += 32) {
        uint32_t l = l0 + lane, sum = 0;
        for (uint32_t s = 0; l < local && s < p.slots; s++)
            sum += count[s * local + l];
        uint64_t padded =
            (static_cast<uint64_t>(sum) + MOE_ROW_ALIGN - 1) / MOE_ROW_ALIGN * MOE_ROW_ALIGN;
        uint64_t end = padded, total = sum;
        for (uint32_t d = 1; d < 32; d *= 2) {
            uint64_t before = __shfl_up_sync(ALL_LANES, end, d);
            end += lane >= d ? before : 0;
            total += __shfl_xor_sync(ALL_LANES, total, static_cast<int>(d));
        }
        uint64_t row = at + end - padded;
        at += __shfl_sync(ALL_LANES, end, 31);
        rows += total;
        if (l >= local)
            continue;
        for (uint32_t s = 0; s < p.slots; s++) {
            first[s * local + l] = static_cast<uint32_t>(row);
            row += count[s * local + l];
        }
        if (writer && at <= p.row_capacity) {
            p.start[l] = first[l];
            p.count[l] = sum;
        }
    }
    bool fits = at <= p.row_capacity;
    if (lane != 0)
        return;
    if (!fits) {
        /* More rows than all slots' tokens have choices: some slot's counts are made up. */
        give_up(p.control, MOE_CUDA_PASS_LIE, p.slot);
        a->failed = 1;
    } else if (writer) {
        p.start[local] = static_cast<uint32_t>(at);
        p.control->verdict.rows = rows;
    }
}

/* Puts a token's rows where they belong. Lane k: whether choice k is for this slot, and for which
 * row of which expert; false when that cannot be. */
template <typename Unit>
__device__ static bool expand_token(const struct moe_cuda_pass &p, struct arrival *a,
                                    uint32_t source, uint32_t t, bool here, uint32_t expert,
                                    uint32_t position, float weight, const void *from)
{
    const uint32_t lane = threadIdx.x % 32;
    uint32_t row = MOE_CUDA_NO_ROW;
    bool good = true;
    if (here) {
        int32_t l = expert < p.experts ? p.facts->placement.local_index[expert] : -1;
        uint32_t i = source * p.local_experts + static_cast<uint32_t>(l);
        good = l >= 0 && position < row_counts(p, a)[i];
        if (good) {
            row = first_rows(a)[i] + position;
            p.row_weight[row] = weight;
        }
    }
    if (!__all_sync(ALL_LANES, good)) {
        if (lane == 0)
            give_up(p.control, MOE_CUDA_PASS_LIE, source);
        return false;
    }
    if (lane < p.top_k)
        row_of_token(p, source, t)[lane] = row;
    uint32_t lanes = __ballot_sync(ALL_LANES, here);
    uint8_t *to = static_cast<uint8_t *>(p.rows) + static_cast<size_t>(row) * p.row_bytes;
    scatter_row<Unit>(from, p.row_bytes, lanes, here ? to : nullptr);
    return true;
}

template <typename Unit>
__device__ static bool expand_own(const struct moe_cuda_pass &p, struct arrival *a, uint32_t t)
{
    const uint32_t lane = threadIdx.x % 32;
    const size_t pair = static_cast<size_t>(t) * p.top_k + lane;
    int32_t id = lane < p.top_k && token_counts(p, t) ? p.ids[pair] : -1;
    bool here = target_of(p, t, id) == p.slot;
    const void *from = static_cast<const uint8_t *>(p.x) + static_cast<size_t>(t) * p.row_bytes;
    return expand_token<Unit>(p, a, p.slot, t, here, static_cast<uint32_t>(id),
                              here ? p.position[pair] : 0, here ? p.weights[pair] : 0.0f, from);
}

template <typename Unit>
__device__ static bool expand_peer(const struct moe_cuda_pass &p, struct arrival *a, uint32_t step,
                                   uint32_t source, uint32_t t)
{
    struct moe_cuda_control *c = p.control;
    const uint32_t lane = threadIdx.x % 32;
    const uint64_t stamp = moe_window_stamp(c->epoch, step);
    uint8_t *window = c->window[p.slot];
    uint32_t choices = 0;
    bool came = lane != 0 || wait_word(c, p.abort, moe_window_sent_of(&p.layout, window, source, t),
                                       stamp, source, &choices);
    if (!__all_sync(ALL_LANES, came))
        return false;
    __syncwarp(); /* a vote orders no memory */
    choices = __shfl_sync(ALL_LANES, choices, 0);
    bool here = lane < p.top_k && (choices >> lane & 1);
    uint4 route = {};
    if (here)
        route = __ldcg(reinterpret_cast<const uint4 *>(
            moe_window_routes_of(&p.layout, window, step & 1, source, t) + lane));
    uint64_t key = static_cast<uint64_t>(route.y) << 32 | route.x;
    uint32_t expert = moe_window_word_stamp(key) == stamp ? moe_window_word_value(key) : NOWHERE;
    return expand_token<Unit>(p, a, source, t, here, expert, route.w, __uint_as_float(route.z),
                              moe_window_row_of(&p.layout, window, source, t, p.stride));
}
static_assert(sizeof(struct moe_window_route) == sizeof(uint4), "a route is one load");

template <typename Unit>
__device__ static void expand_tokens(const struct moe_cuda_pass &p, struct arrival *a,
                                     uint32_t step)
{
    struct moe_cuda_control *c = p.control;
    const uint32_t own = a->tokens_of[p.slot];
    uint32_t most = 0;
    for (uint32_t s = 0; s < p.slots; s++)
        most = s == p.slot ? most : max(most, a->tokens_of[s]);
    const uint32_t items = own + most * (p.slots - 1);
    bool good = true;
    for (uint32_t i = take_item(&c->next_expand); good && i < items;
         i = take_item(&c->next_expand)) {
        if (i < own) {
            good = expand_own<Unit>(p, a, i);
            continue;
        }
        uint32_t source, t;
        peer_item(p, i - own, false, &source, &t);
        if (t < a->tokens_of[source])
            good = expand_peer<Unit>(p, a, step, source, t);
    }
}

/* Heads, counts and layout, by the receiving warps; the verdict of a refused step. */
__device__ static void learn_what_comes(const struct moe_cuda_pass &p, struct arrival *a,
                                        uint32_t step, uint32_t first_warp)
{
    const uint32_t thread = threadIdx.x - 32 * first_warp;
    const uint32_t threads = blockDim.x - 32 * first_warp;
    const bool writer = blockIdx.x == 0;
    read_heads(p, a, step, thread, threads);
    meet_receivers(threads);
    bool go_on = a->failed == 0 && a->other == NOWHERE;
    if (go_on)
        read_counts(p, a, step, thread, threads);
    meet_receivers(threads);
    if (go_on && a->failed == 0 && thread < 32)
        lay_out_rows(p, a, writer);
    meet_receivers(threads);
    if (!writer)
        return;
    if (a->failed == 0 && a->other != NOWHERE && thread == 0) {
        p.control->refused = step;
        p.control->verdict = {MOE_CUDA_PASS_REFUSED, a->other, 0};
    }
    if (thread < p.slots)
        p.control->tokens_of[thread] = a->failed == 0 ? a->tokens_of[thread] : 0;
}

/* ---------------------------------------------------------------- kernel */

/* The step's rows are out of the own window. */
__device__ static void close_dispatch(const struct moe_cuda_pass &p, uint32_t step)
{
    struct moe_cuda_control *c = p.control;
    c->next_push = 0;
    c->next_expand = 0;
    c->step = step;
    if (load_volatile(&c->stop) != 0)
        return;
    fence_system();
    for (uint32_t s = 0; s < p.slots; s++)
        if (s != p.slot && is_live(c->live, s))
            store_relaxed(moe_window_done_of(&p.layout, c->window[s], p.slot),
                          moe_window_word(moe_window_stamp(c->epoch, step), 0));
}

template <typename Unit>
__global__ void __launch_bounds__(CTA_THREADS, 1)
    dispatch_kernel(const __grid_constant__ struct moe_cuda_pass p, uint32_t senders)
{
    extern __shared__ uint64_t shared[];
    struct arrival *a = reinterpret_cast<struct arrival *>(shared);
    stamp_stage(p, MOE_STAGE_DISPATCH);
    const uint32_t step = p.control->step + 1, warp = threadIdx.x / 32;
    if (threadIdx.x == 0) {
        a->other = NOWHERE;
        a->failed = 0;
    }
    /* One answer for all threads: they meet at barriers. */
    const bool stopped = __syncthreads_or(load_volatile(&p.control->stop) != 0) != 0;
    if (!stopped) {
        if (warp < senders) {
            send_tokens<Unit>(p, step);
            await_layout();
        } else {
            learn_what_comes(p, a, step, senders);
            say_layout_known();
        }
        if (a->failed == 0 && a->other == NOWHERE)
            expand_tokens<Unit>(p, a, step);
    }
    if (last_of_grid(p.control))
        close_dispatch(p, step);
}

/* ---------------------------------------------------------------- launches */

extern "C" struct moe_status moe_cuda_launch_announce(const struct moe_cuda_pass *pass,
                                                      cudaStream_t stream)
{
    announce_kernel<<<pass->experts, 32 * ANNOUNCE_WARPS, 0, stream>>>(*pass);
    return MOE_LAUNCHED("announce_kernel");
}

/* Widest unit that rows of this shape can be moved by. */
static uint32_t unit_bytes(const struct moe_cuda_pass *pass)
{
    uintptr_t all = pass->row_bytes | reinterpret_cast<uintptr_t>(pass->x) |
                    reinterpret_cast<uintptr_t>(pass->rows);
    return all % 16 == 0 ? 16 : all % 4 == 0 ? 4 : 2;
}

template <typename Unit>
static struct moe_status launch(const struct moe_cuda_pass *pass, uint32_t ctas,
                                cudaStream_t stream)
{
    size_t bytes = sizeof(struct arrival) +
                   2 * sizeof(uint32_t) * pass->slots * static_cast<size_t>(pass->local_experts);
    /* Enough rows on their way to fill the links, but not so many that all come late together. */
    uint32_t senders = pass->slots == 1          ? 0
                       : pass->row_bytes > 12000 ? 2
                       : pass->row_bytes > 6000  ? 3
                                                 : 4;
    dispatch_kernel<Unit><<<ctas, CTA_THREADS, bytes, stream>>>(*pass, senders);
    return MOE_LAUNCHED("dispatch_kernel");
}

extern "C" struct moe_status moe_cuda_launch_dispatch(const struct moe_cuda_pass *pass,
                                                      uint32_t ctas, cudaStream_t stream)
{
    switch (unit_bytes(pass)) {
    case 16: return launch<uint4>(pass, ctas, stream);
    case 4: return launch<uint32_t>(pass, ctas, stream);
    default: return launch<uint16_t>(pass, ctas, stream);
    }
}

/* As much shared memory as the device has, once and for all: a captured launch must not depend on
 * what a later shape asks for. */
template <typename Kernel> static struct moe_status allow_shared_memory(Kernel kernel)
{
    int device, most;
    struct cudaFuncAttributes have;
    MOE_TRY(MOE_CUDA(cudaGetDevice(&device)));
    MOE_TRY(
        MOE_CUDA(cudaDeviceGetAttribute(&most, cudaDevAttrMaxSharedMemoryPerBlockOptin, device)));
    MOE_TRY(MOE_CUDA(cudaFuncGetAttributes(&have, kernel)));
    return MOE_CUDA(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                         most - static_cast<int>(have.sharedSizeBytes)));
}

extern "C" struct moe_status moe_cuda_load_ep_dispatch(void)
{
    MOE_TRY(moe_cuda_load(announce_kernel));
    MOE_TRY(allow_shared_memory(dispatch_kernel<uint4>));
    MOE_TRY(allow_shared_memory(dispatch_kernel<uint32_t>));
    return allow_shared_memory(dispatch_kernel<uint16_t>);
}
