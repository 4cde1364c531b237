/* SPDX-License-Identifier: Apache-2.0 */
/* Combine, in one launch: sends sums of a token's local rows home, and finishes this slot's tokens.
 *
 * Grid      one CTA of 16 warps per multiprocessor that it may use; one token, or part of one, per
 *           warp.
 * Warps     the first ones of each CTA sum rows for peers, the others finish this slot's tokens. A
 *           warp without more sums for peers helps them.
 * Shared    only struct homes. No stages; loads go to registers.
 * Registers at most 128 per thread (512 threads per CTA).
 *
 * All sums are fp32 in one fixed order: rows of a token by k, then slots by number. Each slot's
 * partial is rounded to the pass's dtype before it is added, this slot's too. So a token's bits do
 * not depend on its home slot. */
#include "cuda/core/load.h"
#include "cuda/exchange/sums.cuh"
#include "cuda/plan/limits.h"

constexpr uint32_t SLOTS_AT_ONCE = 3; /* loads of different peers' partials in flight */

/* Parameters of a kernel: dtypes of tokens and of the experts' rows, columns per lane, whether
 * partials use the quick regions, and the mask of slots: 64 bits in groups of more than 32, which
 * take more registers. */
template <typename Element_, typename Out_, uint32_t N_, bool QUICK_, typename Slots_> struct kind {
    using Element = Element_;
    using Out = Out_;
    using Slots = Slots_;
    static constexpr uint32_t N = N_, STEP = 32 * N_; /* per warp */
    static constexpr bool QUICK = QUICK_;
    static constexpr uint32_t MAX_SLOTS = 8 * sizeof(Slots);
    /* Loads in flight, as many as registers allow: of different rows, and steps of each. */
    static constexpr uint32_t RETURN_ROWS = 4, RETURN_STEPS = sizeof(Out) != 2 ? 2 : QUICK_ ? 3 : 4;
    static constexpr uint32_t FINISH_ROWS = QUICK_ ? 2 : 4, FINISH_STEPS = sizeof(Out) != 2 ? 1 : 2;
};

/* The slots of this pass. In shared memory, since a wait empties the first level cache. */
struct homes {
    uint32_t tokens_of[MOE_CUDA_MAX_SLOTS];
    uint32_t sent_rows[MOE_CUDA_MAX_SLOTS]; /* tokens that this CTA finished, by slot */
    uint32_t max_tokens;                    /* of all peers */
    uint32_t step;
    uint64_t stamp;
    uint8_t *window[MOE_CUDA_MAX_SLOTS];
};

/* Prefetches columns h .. end - 1 of the rows in `lanes`, at most `width` of them. */
template <typename K>
__device__ static void expect_rows(const struct moe_cuda_pass &p, uint32_t lanes, uint32_t row,
                                   uint32_t h, uint32_t end, uint32_t width)
{
    if (K::QUICK || K::N == 1 || h >= end || !(lanes >> threadIdx.x % 32 & 1))
        return;
    const auto *out = static_cast<const typename K::Out *>(p.expert_out);
    bring_nearer(out + static_cast<size_t>(row) * p.hidden + h,
                 min(width, end - h) * static_cast<uint32_t>(sizeof *out));
}

/* Address of slot `source`'s partial of token t, in the window of the token's home. */
template <typename K>
__device__ static typename K::Element *partial_at(const struct moe_cuda_pass &p, uint8_t *window,
                                                  uint32_t source, uint32_t t)
{
    return static_cast<typename K::Element *>(
        K::QUICK ? moe_window_quick_partial_of(&p.layout, window, source, t, p.stride)
                 : moe_window_partial_of(&p.layout, window, source, t, p.stride));
}

/* ------------------------------------------------------------- for peers */

template <typename K>
__device__ static void return_token(const struct moe_cuda_pass &p, const struct homes &homes,
                                    uint32_t home, uint32_t t, uint32_t part)
{
    const uint32_t lane = threadIdx.x % 32;
    uint32_t row = lane < p.top_k ? row_of_token(p, home, t)[lane] : MOE_CUDA_NO_ROW;
    uint32_t lanes = __ballot_sync(ALL_LANES, row != MOE_CUDA_NO_ROW);
    if (lanes == 0)
        return;
    uint8_t *window = homes.window[home];
    typename K::Element *to = partial_at<K>(p, window, p.slot, t);
    uint32_t begin, end;
    part_columns<K::N>(p.hidden, p.parts, part, &begin, &end);
    constexpr uint32_t WIDTH = K::STEP * K::RETURN_STEPS;
    for (uint32_t h = begin + lane * K::N; h - lane * K::N < end; h += WIDTH) {
        columns<K::N> sum[K::RETURN_STEPS];
        expect_rows<K>(p, lanes, row, h - lane * K::N + WIDTH, end, WIDTH);
        sum_rows<typename K::Out, K::N, K::RETURN_ROWS>(p, lanes, row, h, end, sum);
#pragma unroll
        for (uint32_t u = 0; u < K::RETURN_STEPS; u++) {
            if (h + u * K::STEP >= end)
                continue;
            packed<typename K::Element, K::N> out;
            pack(sum[u], &out);
            if constexpr (K::QUICK)
                put_quick(to + h + u * K::STEP, out);
            else
                put(to + h + u * K::STEP, out);
        }
    }
    if (K::QUICK)
        return;
    __syncwarp();
    if (lane != 0)
        return;
    fence_system();
    store_relaxed(moe_window_returned_part_of(&p.layout, window, p.slot, t, part),
                  moe_window_flag(homes.stamp, __popc(lanes)));
}

template <typename K>
__device__ static void return_tokens(const struct moe_cuda_pass &p, const struct homes &homes,
                                     uint32_t returners)
{
    const uint32_t items = homes.max_tokens * (p.slots - 1) * p.parts;
    struct walk w = begin_walk(&p.control->next_return, threadIdx.x / 32 * gridDim.x + blockIdx.x,
                               returners * gridDim.x);
    for (; w.item < items; next_item(&w)) {
        uint32_t home, t;
        peer_item(p, w.item / p.parts, true, &home, &t);
        if (t < homes.tokens_of[home])
            return_token<K>(p, homes, home, t, w.item % p.parts);
    }
}

/* --------------------------------------------------------------- at home */

/* Data to finish a token: lane k has its k-th choice. */
template <typename Slots> struct own_token {
    uint32_t row;   /* local row of choice k, or MOE_CUDA_NO_ROW */
    uint32_t local; /* bit k: choice k has a local row */
    Slots wanted;   /* bit s: slot s has rows of this token */
    uint32_t zero;  /* bit k: choice k is a zero expert */
    float weight;   /* of choice k, if there are zero experts */
    bool base;      /* its sum begins with its row of `base` */
};

template <typename Slots>
__device__ static own_token<Slots> describe_token(const struct moe_cuda_pass &p, uint32_t t)
{
    const uint32_t lane = threadIdx.x % 32;
    own_token<Slots> o;
    o.row = lane < p.top_k ? row_of_token(p, p.slot, t)[lane] : MOE_CUDA_NO_ROW;
    o.wanted = static_cast<Slots>(p.own[t].wanted);
    o.zero = p.own[t].zero;
    o.local = __ballot_sync(ALL_LANES, o.row != MOE_CUDA_NO_ROW);
    o.weight = 0.0f;
    o.base = has_base(p, t);
    if (o.zero != 0 && lane < p.top_k)
        o.weight = p.weights[static_cast<size_t>(t) * p.top_k + lane];
    return o;
}

/* A lane's work: columns h, h + STEP, ... below `end` of token t. */
struct stretch {
    uint8_t *window; /* this slot's */
    uint32_t t, h, end;
};

/* Several peers' partials of a stretch, in slot order. */
template <typename K> struct batch {
    uint32_t n, slot[SLOTS_AT_ONCE];
    packed<typename K::Element, K::N> part[SLOTS_AT_ONCE][K::FINISH_STEPS];
};

__device__ inline uint32_t count_of(uint32_t slots)
{
    return static_cast<uint32_t>(__popc(slots));
}

__device__ inline uint32_t count_of(uint64_t slots)
{
    return static_cast<uint32_t>(__popcll(slots));
}

__device__ inline uint32_t lowest_of(uint32_t slots)
{
    return static_cast<uint32_t>(__ffs(static_cast<int>(slots))) - 1;
}

__device__ inline uint32_t lowest_of(uint64_t slots)
{
    return static_cast<uint32_t>(__ffsll(static_cast<long long>(slots))) - 1;
}

/* Begins to load the partials of the next peers in `left`. */
template <typename K>
__device__ static void begin_batch(const struct moe_cuda_pass &p, const struct stretch &at,
                                   typename K::Slots *left, struct batch<K> *b)
{
    b->n = min(SLOTS_AT_ONCE, count_of(*left));
#pragma unroll
    for (uint32_t i = 0; i < SLOTS_AT_ONCE; i++) {
        if (i >= b->n)
            continue;
        b->slot[i] = lowest_of(*left);
        *left &= *left - 1;
        const typename K::Element *from = partial_at<K>(p, at.window, b->slot[i], at.t) + at.h;
#pragma unroll
        for (uint32_t u = 0; u < K::FINISH_STEPS; u++) {
            if (at.h + u * K::STEP >= at.end)
                continue;
            if constexpr (K::QUICK)
                peek(from + u * K::STEP, &b->part[i][u]);
            else
                fetch(from + u * K::STEP, &b->part[i][u]);
        }
    }
}

template <typename K>
__device__ static void add_own(columns<K::N> (&sum)[K::FINISH_STEPS],
                               const columns<K::N> (&own)[K::FINISH_STEPS])
{
#pragma unroll
    for (uint32_t u = 0; u < K::FINISH_STEPS; u++)
        add_scaled(sum[u], rounded_to<typename K::Element>(own[u]), 1.0f);
}

/* Adds the batch's partials to `sum`, and this slot's partial at its place in slot order. False if
 * a wait failed. */
template <typename K>
__device__ static bool add_batch(const struct moe_cuda_pass &p, const struct stretch &at,
                                 struct batch<K> *b, bool *own_left,
                                 const columns<K::N> (&own)[K::FINISH_STEPS],
                                 columns<K::N> (&sum)[K::FINISH_STEPS])
{
#pragma unroll
    for (uint32_t i = 0; i < SLOTS_AT_ONCE; i++) {
        if (i >= b->n)
            continue;
        if (*own_left && p.slot < b->slot[i]) {
            add_own<K>(sum, own);
            *own_left = false;
        }
#pragma unroll
        for (uint32_t u = 0; u < K::FINISH_STEPS; u++) {
            if (at.h + u * K::STEP >= at.end)
                continue;
            if constexpr (K::QUICK)
                if (!take(p.control, p.abort, b->slot[i],
                          partial_at<K>(p, at.window, b->slot[i], at.t) + at.h + u * K::STEP,
                          &b->part[i][u]))
                    return false;
            add_scaled(sum[u], unpack(b->part[i][u]), 1.0f);
        }
    }
    return true;
}

/* Adds w * x of the zero experts and stores y. */
template <typename K>
__device__ static void
store_stretch(const struct moe_cuda_pass &p, const own_token<typename K::Slots> &o,
              const struct stretch &at, columns<K::N> (&sum)[K::FINISH_STEPS])
{
    using Element = typename K::Element;
    const size_t first = static_cast<size_t>(at.t) * p.hidden + at.h;
    for (uint32_t zero = o.zero; zero != 0; zero &= zero - 1) {
        float weight = __shfl_sync(ALL_LANES, o.weight, __ffs(zero) - 1);
#pragma unroll
        for (uint32_t u = 0; u < K::FINISH_STEPS; u++) {
            packed<Element, K::N> x;
            if (at.h + u * K::STEP >= at.end)
                continue;
            fetch(static_cast<const Element *>(p.x) + first + u * K::STEP, &x);
            add_scaled(sum[u], unpack(x), weight);
        }
    }
#pragma unroll
    for (uint32_t u = 0; u < K::FINISH_STEPS; u++) {
        packed<Element, K::N> y;
        if (at.h + u * K::STEP >= at.end)
            continue;
        pack(sum[u], &y);
        put(static_cast<Element *>(p.y) + first + u * K::STEP, y);
    }
}

/* Finishes a stretch of this slot's token: base, then the slots in order, then zero experts. */
template <typename K>
__device__ static bool finish_stretch(const struct moe_cuda_pass &p,
                                      const own_token<typename K::Slots> &o,
                                      const struct stretch &at)
{
    columns<K::N> sum[K::FINISH_STEPS], own[K::FINISH_STEPS];
    bool good = true, own_left = (o.wanted >> p.slot & 1) != 0;
    typename K::Slots left = o.wanted & ~(static_cast<typename K::Slots>(1) << p.slot);
    struct batch<K> b;
    begin_batch(p, at, &left, &b);
    if (own_left)
        sum_rows<typename K::Out, K::N, K::FINISH_ROWS>(p, o.local, o.row, at.h, at.end, own);
#pragma unroll
    for (uint32_t u = 0; u < K::FINISH_STEPS; u++) {
        sum[u] = {};
        if (!o.base || at.h + u * K::STEP >= at.end)
            continue;
        packed<float, K::N> base;
        fetch(p.base + static_cast<size_t>(at.t) * p.hidden + at.h + u * K::STEP, &base);
        sum[u] = unpack(base);
    }
    while (good && b.n != 0) {
        good = add_batch(p, at, &b, &own_left, own, sum);
        begin_batch(p, at, &left, &b);
    }
    if (own_left)
        add_own<K>(sum, own);
    store_stretch<K>(p, o, at, sum);
    return good;
}

template <typename K>
__device__ static void write_zeros(const struct moe_cuda_pass &p, uint32_t t, uint32_t begin,
                                   uint32_t end)
{
    const uint32_t lane = threadIdx.x % 32;
    packed<typename K::Element, K::N> nothing = {};
    for (uint32_t h = begin + lane * K::N; h < end; h += K::STEP)
        put(static_cast<typename K::Element *>(p.y) + static_cast<size_t>(t) * p.hidden + h,
            nothing);
}

/* Finishes a part of this slot's token. False if a wait failed. */
template <typename K>
__device__ static bool finish_token(const struct moe_cuda_pass &p, struct homes &homes, uint32_t t,
                                    uint32_t part)
{
    uint8_t *window = homes.window[p.slot];
    const uint32_t lane = threadIdx.x % 32;
    uint32_t begin, end, unused = 0;
    part_columns<K::N>(p.hidden, p.parts, part, &begin, &end);
    if (!token_counts(p, t)) {
        write_zeros<K>(p, t, begin, end);
        return true;
    }
    const auto o = describe_token<typename K::Slots>(p, t);
    bool good = true;
#pragma unroll
    for (uint32_t slot = lane; slot < K::MAX_SLOTS; slot += 32) {
        if (slot == p.slot || !(o.wanted >> slot & 1))
            continue;
        if (part == 0)
            atomicAdd(&homes.sent_rows[slot], 1u);
        if (!K::QUICK)
            good = good && wait_flag(p.control, p.abort,
                                     moe_window_returned_part_of(&p.layout, window, slot, t, part),
                                     homes.stamp, slot, &unused);
    }
    good = __all_sync(ALL_LANES, good);
    __syncwarp(); /* a vote orders no memory */
    constexpr uint32_t WIDTH = K::STEP * K::FINISH_STEPS;
    for (uint32_t h = begin + lane * K::N; good && h - lane * K::N < end; h += WIDTH) {
        expect_rows<K>(p, o.local, o.row, h - lane * K::N + WIDTH, end, WIDTH);
        good = __all_sync(ALL_LANES, finish_stretch<K>(p, o, {window, t, h, end}));
    }
    return good;
}

template <typename K>
__device__ static void finish_tokens(const struct moe_cuda_pass &p, struct homes &homes,
                                     struct walk w)
{
    const uint32_t items = p.params->tokens * p.parts;
    bool good = true;
    for (; good && w.item < items; next_item(&w))
        good = finish_token<K>(p, homes, w.item / p.parts, w.item % p.parts);
}

/* ---------------------------------------------------------------- kernel */

/* Adds this CTA's counts to those of the step. All threads. */
__device__ static void add_sent_rows(const struct moe_cuda_pass &p, const struct homes &homes)
{
    if (p.counts == nullptr || p.slots == 1)
        return;
    __syncthreads(); /* all warps have counted */
    if (threadIdx.x < p.slots && homes.sent_rows[threadIdx.x] != 0)
        atomicAdd(&p.control->sent_rows[threadIdx.x], homes.sent_rows[threadIdx.x]);
}

/* Stores the results for the host at the end; dispatch has stored the rows of experts. Other CTAs,
 * of this kernel or the last, wrote them. One warp. */
__device__ static void report(const struct moe_cuda_pass &p)
{
    const struct moe_cuda_step_outcome *v = &p.control->outcome;
    const uint32_t lane = threadIdx.x;
#pragma unroll 1
    for (uint32_t slot = lane; p.counts != nullptr && slot < p.slots; slot += 32)
        p.counts->sent_rows[slot] = load_volatile(&p.control->sent_rows[slot]);
    if (lane != 0)
        return;
    if (p.outcome != nullptr) {
        p.outcome->code = load_volatile(&v->code);
        p.outcome->slot = load_volatile(&v->slot);
        p.outcome->rows = *static_cast<const volatile uint64_t *>(&v->rows);
    }
    if (p.began != nullptr)
        p.began[MOE_STAGE_COUNT] = clock_ns();
}

/* Called by one warp. */
__device__ static void find_homes(const struct moe_cuda_pass &p, struct homes *homes)
{
    const struct moe_cuda_control *c = p.control;
    const uint32_t lane = threadIdx.x % 32;
    uint32_t most = 0; /* tokens of the peers that this lane looks at */
#pragma unroll 1
    for (uint32_t slot = lane; slot < p.slots; slot += 32) {
        const uint32_t tokens = c->tokens_of[slot];
        homes->tokens_of[slot] = tokens;
        homes->window[slot] = c->window[slot];
        homes->sent_rows[slot] = 0;
        most = slot == p.slot ? most : max(most, tokens);
    }
    const uint32_t max_tokens = __reduce_max_sync(ALL_LANES, most);
    if (lane != 0)
        return;
    homes->max_tokens = max_tokens;
    homes->step = c->step;
    homes->stamp = moe_window_stamp(c->epoch, c->step);
}

template <typename K>
__device__ static void combine(const struct moe_cuda_pass &p, struct homes &homes,
                               uint32_t returners)
{
    struct moe_cuda_control *c = p.control;
    const uint32_t warp = threadIdx.x / 32, finishers = (CTA_WARPS - returners) * gridDim.x;
    if (warp < returners) {
        return_tokens<K>(p, homes, returners);
        finish_tokens<K>(p, homes, join_walk(&c->next_home, finishers));
        return;
    }
    /* The last warp of the last CTA gets its first token last, so it signals. */
    if (blockIdx.x == gridDim.x - 1 && warp == CTA_WARPS - 1)
        signal_done(p, homes.step);
    finish_tokens<K>(
        p, homes,
        begin_walk(&c->next_home, (warp - returners) * gridDim.x + blockIdx.x, finishers));
}

template <typename K>
__global__ void __launch_bounds__(CTA_THREADS, 1)
    combine_kernel(const __grid_constant__ struct moe_cuda_pass p, uint32_t returners)
{
    __shared__ struct homes homes;
    struct moe_cuda_control *c = p.control;
    stamp_stage(p, MOE_STAGE_COMBINE);
    if (threadIdx.x / 32 == 0)
        find_homes(p, &homes);
    const bool off = load_volatile(&c->stop) != 0 || c->refused == c->step;
    if (__syncthreads_or(off) == 0)
        combine<K>(p, homes, returners);
    add_sent_rows(p, homes);
    if ((p.outcome != nullptr || p.began != nullptr) && last_of_grid(c))
        report(p);
}

/* ---------------------------------------------------------------- launches */

/* Warps per CTA that sum for peers: enough for the links, and as many as a few CTAs can hold. With
 * more, all partials arrive late together. */
template <typename K> static uint32_t returners_of(const struct moe_cuda_pass *pass, uint32_t ctas)
{
    if (pass->quick)
        return 8;
    if (sizeof(typename K::Element) == sizeof(float)) {
        const uint32_t all = 800 / ctas, fewest = 6, limit = 12;
        return all < fewest ? fewest : all < limit ? all : limit;
    }
    return pass->hidden * sizeof(typename K::Element) > 12000 ? 6 : 10;
}

template <typename K>
static struct moe_status launch_kind(const struct moe_cuda_pass *pass, uint32_t ctas,
                                     cudaStream_t stream)
{
    const uint32_t returners = pass->slots == 1 ? 0 : returners_of<K>(pass, ctas);
    combine_kernel<K><<<ctas, CTA_THREADS, 0, stream>>>(*pass, returners);
    return MOE_LAUNCHED("combine_kernel");
}

template <typename Element, typename Out, typename Slots>
static struct moe_status launch_for(const struct moe_cuda_pass *pass, uint32_t ctas,
                                    cudaStream_t stream)
{
    if (pass->quick)
        return launch_kind<kind<Element, Out, WIDE, true, Slots>>(pass, ctas, stream);
    if (pass->hidden % WIDE == 0)
        return launch_kind<kind<Element, Out, WIDE, false, Slots>>(pass, ctas, stream);
    return launch_kind<kind<Element, Out, 1, false, Slots>>(pass, ctas, stream);
}

template <typename Element, typename Out>
static struct moe_status launch(const struct moe_cuda_pass *pass, uint32_t ctas,
                                cudaStream_t stream)
{
    return pass->slots <= 32 ? launch_for<Element, Out, uint32_t>(pass, ctas, stream)
                             : launch_for<Element, Out, uint64_t>(pass, ctas, stream);
}

extern "C" struct moe_status moe_cuda_launch_combine(const struct moe_cuda_pass *pass,
                                                     uint32_t ctas, cudaStream_t stream)
{
    if (pass->dtype == MOE_DTYPE_F32)
        return launch<float, float>(pass, ctas, stream);
    return pass->out_dtype == MOE_DTYPE_F32
               ? launch<__nv_bfloat16, float>(pass, ctas, stream)
               : launch<__nv_bfloat16, __nv_bfloat16>(pass, ctas, stream);
}

template <typename Element, typename Out, typename Slots>
static struct moe_status load_kinds_for(void)
{
    return moe_cuda_load(combine_kernel<kind<Element, Out, WIDE, true, Slots>>,
                         combine_kernel<kind<Element, Out, WIDE, false, Slots>>,
                         combine_kernel<kind<Element, Out, 1, false, Slots>>);
}

template <typename Element, typename Out> static struct moe_status load_kinds(void)
{
    MOE_TRY((load_kinds_for<Element, Out, uint32_t>()));
    return load_kinds_for<Element, Out, uint64_t>();
}

extern "C" struct moe_status moe_cuda_load_ep_combine(void)
{
    MOE_TRY((load_kinds<float, float>()));
    MOE_TRY((load_kinds<__nv_bfloat16, float>()));
    return load_kinds<__nv_bfloat16, __nv_bfloat16>();
}
