/* Combine, one launch: sums of a token's local rows go home, and the own tokens are finished there.
 *
 * One CTA of 16 warps per multiprocessor, a warp per token or part of one. The first warps of each
 * CTA sum rows for peers, the others finish own tokens; who has nothing left to sum for peers helps
 * them. All sums are fp32 in one fixed order: rows of a token by k, then slots by number. Each
 * slot's sum is rounded to the pass's dtype before it is added, the own one too, so that a token's
 * bits do not depend on where it is at home. */
#include "cuda/columns.cuh"
#include "cuda/load.h"

/* ------------------------------------------------------------- for peers */

template <typename Element, uint32_t N>
__device__ static void return_token(const struct moe_cuda_pass &p, uint64_t stamp, uint32_t home,
                                    uint32_t t, uint32_t part)
{
    const uint32_t lane = threadIdx.x % 32;
    uint32_t row = lane < p.top_k ? row_of_token(p, home, t)[lane] : MOE_CUDA_NO_ROW;
    uint32_t lanes = __ballot_sync(ALL_LANES, row != MOE_CUDA_NO_ROW);
    if (lanes == 0)
        return;
    uint8_t *window = p.control->window[home];
    Element *to =
        static_cast<Element *>(moe_window_partial_of(&p.layout, window, p.slot, t, p.stride));
    uint32_t begin, end;
    part_columns<N>(p.hidden, p.parts, part, &begin, &end);
    for (uint32_t h = begin + lane * N; h - lane * N < end; h += 32 * N) {
        columns<N> sum = sum_rows<N>(p, lanes, row, h);
        if (h < p.hidden)
            store(to + h, sum);
    }
    __syncwarp();
    if (lane != 0)
        return;
    fence_system();
    if (p.parts > 1) {
        uint32_t *ready = p.parts_ready + home * p.layout.shape.max_tokens + t;
        if (atomicAdd(ready, 1u) != p.parts - 1)
            return;
        *ready = 0;
        fence_system();
    }
    store_relaxed(moe_window_returned_of(&p.layout, window, p.slot, t),
                  moe_window_word(stamp, __popc(lanes)));
}

template <typename Element, uint32_t N>
__device__ static void return_tokens(const struct moe_cuda_pass &p, uint64_t stamp)
{
    struct moe_cuda_control *c = p.control;
    const uint32_t items = most_peer_tokens(p) * (p.slots - 1) * p.parts;
    for (uint32_t i = take_item(&c->next_return); i < items; i = take_item(&c->next_return)) {
        uint32_t home, t;
        peer_item(p, i / p.parts, true, &home, &t);
        if (t < c->tokens_of[home])
            return_token<Element, N>(p, stamp, home, t, i % p.parts);
    }
}

/* --------------------------------------------------------------- at home */

/* What finishing a token needs: lane k has its k-th choice, lane s what slot s sends. */
struct own_token {
    uint32_t id_row; /* local row of choice k, or MOE_CUDA_NO_ROW */
    uint32_t local;  /* bit k: choice k has a local row */
    uint32_t wanted; /* bit s: slot s has rows of this token */
    uint32_t zero;   /* bit k: choice k is a zero expert */
    float weight;    /* of choice k */
};

__device__ static struct own_token describe_token(const struct moe_cuda_pass &p, uint32_t t)
{
    const uint32_t lane = threadIdx.x % 32;
    const size_t pair = static_cast<size_t>(t) * p.top_k + lane;
    struct own_token o;
    int32_t id = lane < p.top_k ? p.ids[pair] : -1;
    uint32_t target = target_of(p, t, id);
    o.weight = lane < p.top_k ? p.weights[pair] : 0.0f;
    o.id_row = lane < p.top_k ? row_of_token(p, p.slot, t)[lane] : MOE_CUDA_NO_ROW;
    o.local = __ballot_sync(ALL_LANES, o.id_row != MOE_CUDA_NO_ROW);
    o.wanted = __reduce_or_sync(ALL_LANES, target == NOWHERE ? 0 : 1u << target);
    o.zero = __ballot_sync(ALL_LANES, id >= static_cast<int32_t>(p.experts));
    return o;
}

/* Columns h .. of an own token: base, then the slots in order, then zero experts. */
template <typename Element, uint32_t N>
__device__ static void finish_columns(const struct moe_cuda_pass &p, const struct own_token &o,
                                      uint32_t t, uint32_t h)
{
    const bool inside = h < p.hidden;
    const size_t at = static_cast<size_t>(t) * p.hidden + h;
    columns<N> sum = {};
    if (inside && p.base != nullptr)
        sum = load(p.base + at, sum);
    for (uint32_t left = o.wanted; left != 0; left &= left - 1) {
        uint32_t s = static_cast<uint32_t>(__ffs(left)) - 1;
        columns<N> part = {};
        if (s == p.slot)
            part = rounded_to<Element>(sum_rows<N>(p, o.local, o.id_row, h));
        else if (inside)
            part = load(static_cast<const Element *>(moe_window_partial_of(
                            &p.layout, p.control->window[p.slot], s, t, p.stride)) +
                            h,
                        part);
        add_scaled(sum, part, 1.0f);
    }
    for (uint32_t left = o.zero; left != 0; left &= left - 1) {
        float weight = __shfl_sync(ALL_LANES, o.weight, __ffs(left) - 1);
        if (inside)
            add_scaled(sum, load(static_cast<const Element *>(p.x) + at, columns<N>{}), weight);
    }
    if (inside)
        store(static_cast<Element *>(p.y) + at, sum);
}

/* A part of an own token. False when a wait failed. */
template <typename Element, uint32_t N>
__device__ static bool finish_token(const struct moe_cuda_pass &p, uint64_t stamp, uint32_t t,
                                    uint32_t part)
{
    struct moe_cuda_control *c = p.control;
    const uint32_t lane = threadIdx.x % 32;
    struct own_token o = {};
    if (token_counts(p, t))
        o = describe_token(p, t);
    uint32_t unused = 0;
    bool here = true;
    if (lane != p.slot && (o.wanted >> lane & 1))
        here = wait_word(c, p.abort, moe_window_returned_of(&p.layout, c->window[p.slot], lane, t),
                         stamp, lane, &unused);
    if (!__all_sync(ALL_LANES, here))
        return false;
    __syncwarp(); /* a vote orders no memory */
    uint32_t begin, end;
    part_columns<N>(p.hidden, p.parts, part, &begin, &end);
    if (!token_counts(p, t)) {
        const columns<N> nothing = {};
        for (uint32_t h = begin + lane * N; h < end; h += 32 * N)
            store(static_cast<Element *>(p.y) + static_cast<size_t>(t) * p.hidden + h, nothing);
        return true;
    }
    for (uint32_t h = begin + lane * N; h - lane * N < end; h += 32 * N)
        finish_columns<Element, N>(p, o, t, h);
    return true;
}

template <typename Element, uint32_t N>
__device__ static void finish_tokens(const struct moe_cuda_pass &p, uint64_t stamp)
{
    struct moe_cuda_control *c = p.control;
    bool good = true;
    for (uint32_t i = take_item(&c->next_home); good && i < p.facts->tokens * p.parts;
         i = take_item(&c->next_home))
        good = finish_token<Element, N>(p, stamp, i / p.parts, i % p.parts);
}

/* ---------------------------------------------------------------- kernel */

/* Other CTAs, of this kernel or the last, have written the verdict. */
__device__ static void report_verdict(const struct moe_cuda_control *c, struct moe_cuda_verdict *to)
{
    to->code = load_volatile(&c->verdict.code);
    to->slot = load_volatile(&c->verdict.slot);
    to->rows = *static_cast<const volatile uint64_t *>(&c->verdict.rows);
}

template <typename Element, uint32_t N>
__global__ void __launch_bounds__(CTA_THREADS, 1)
    combine_kernel(const __grid_constant__ struct moe_cuda_pass p, uint32_t returners)
{
    struct moe_cuda_control *c = p.control;
    stamp_stage(p, MOE_STAGE_COMBINE);
    const uint64_t stamp = moe_window_stamp(c->epoch, c->step);
    if (load_volatile(&c->stop) == 0 && c->refused != c->step) {
        if (threadIdx.x / 32 < returners)
            return_tokens<Element, N>(p, stamp);
        finish_tokens<Element, N>(p, stamp);
    }
    if (last_of_grid(c)) {
        c->next_return = 0;
        c->next_home = 0;
        if (p.verdict != nullptr)
            report_verdict(c, p.verdict);
        if (p.began != nullptr)
            p.began[MOE_STAGE_COUNT] = clock_ns();
    }
}

template <typename Element>
static struct moe_status launch(const struct moe_cuda_pass *pass, uint32_t ctas,
                                cudaStream_t stream)
{
    uint32_t returners = pass->slots == 1 ? 0 : 10;
    uintptr_t all = reinterpret_cast<uintptr_t>(pass->x) | reinterpret_cast<uintptr_t>(pass->y) |
                    reinterpret_cast<uintptr_t>(pass->expert_out) |
                    reinterpret_cast<uintptr_t>(pass->base);
    if (pass->hidden % WIDE == 0 && all % 16 == 0)
        combine_kernel<Element, WIDE><<<ctas, CTA_THREADS, 0, stream>>>(*pass, returners);
    else
        combine_kernel<Element, 1><<<ctas, CTA_THREADS, 0, stream>>>(*pass, returners);
    return MOE_LAUNCHED("combine_kernel");
}

extern "C" struct moe_status moe_cuda_launch_combine(const struct moe_cuda_pass *pass,
                                                     uint32_t ctas, cudaStream_t stream)
{
    return pass->dtype == MOE_DTYPE_F32 ? launch<float>(pass, ctas, stream)
                                        : launch<__nv_bfloat16>(pass, ctas, stream);
}

extern "C" struct moe_status moe_cuda_load_ep_combine(void)
{
    return moe_cuda_load(combine_kernel<float, 1>, combine_kernel<float, WIDE>,
                         combine_kernel<__nv_bfloat16, 1>, combine_kernel<__nv_bfloat16, WIDE>);
}
