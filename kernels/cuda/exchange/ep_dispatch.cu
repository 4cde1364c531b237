/* SPDX-License-Identifier: Apache-2.0 */
/* Dispatch, in one launch.
 *
 * Grid      one CTA of 16 warps per multiprocessor that it may use.
 * Warps     senders send tokens. The others number this slot's choices and announce them
 *           (ep_announce.cuh), wait for the peers' announcements, and expand tokens as they arrive
 *           (ep_expand.cuh). Senders that have finished help to expand. `struct roles` has the
 *           split.
 * Shared    tables (struct arrival); BULK also has arrived_rows and a ring of 3 rows for each warp
 *           that moves rows. All of the device's shared memory is allowed.
 * Registers at most 128 per thread (512 threads per CTA).
 *
 * Sending never depends on receiving, so all slots may send and wait at the same time. */
#include "cuda/core/load.h"
#include "cuda/exchange/ep_announce.cuh"
#include "cuda/exchange/ep_expand.cuh"
#include "cuda/exchange/ep_signal.cuh"
#include "cuda/plan/limits.h"

/* ---------------------------------------------------- start and end of steps */

/* Clears the tables, a refused outcome, and the counters of pushes, returns and sent rows. A pass
 * that ends early has no rows. CTA 0, before the layout. */
__device__ static void clear_tables(const struct moe_cuda_pass &p, uint32_t step,
                                    const struct group &group)
{
    struct moe_cuda_control *c = p.control;
    for (uint32_t l = group.thread; l <= p.local_experts; l += group.threads) {
        p.start[l] = 0;
        if (l < p.local_experts)
            p.count[l] = 0;
    }
    if (group.thread < MOE_CUDA_MAX_SLOTS)
        c->sent_rows[group.thread] = 0;
    if (group.thread != 0)
        return;
    /* Every outcome except this one is permanent. */
    atomicCAS(&c->outcome.code, MOE_CUDA_PASS_REFUSED, MOE_CUDA_PASS_GOOD);
    c->outcome.rows = 0;
    const uint32_t next = (step + 1) & 1;
    c->next_push[next] = c->next_expand[next] = 0;
    c->next_return = c->next_home = 0;
}

/* The last step was refused: its rows may be in this slot's quick region, or in flight. */
__device__ static void lay_blanks(const struct moe_cuda_pass &p, uint32_t last,
                                  const struct group &group)
{
    struct moe_cuda_control *c = p.control;
    const uint32_t slot = group.thread;
    const uint64_t stamp = moe_window_stamp(c->epoch, last);
    uint8_t *window = c->window[p.slot];
    if (slot < p.slots && slot != p.slot && is_live(c->live, slot)) {
        fence_system(); /* the kernel that sent has ended */
        store_relaxed(moe_window_flushed_of(&p.layout, c->window[slot], p.slot),
                      moe_window_flag(stamp, 0));
        wait_flag_reached(c, p.abort, moe_window_flushed_of(&p.layout, window, slot), stamp, slot);
    }
    group_sync(group);
    uint4 *from = reinterpret_cast<uint4 *>(window + p.layout.quick_rows);
    const size_t units = p.slots * p.layout.quick_region / sizeof(uint4);
    for (size_t i = group.thread; i < units; i += group.threads)
        store_relaxed(from + i, all_blank());
    group_sync(group);
}

/* Does combine's work for the last step if combine did not run. For peers, so only with peers. CTA
 * 0. */
__device__ static void close_last_step(const struct moe_cuda_pass &p, uint32_t step,
                                       const struct group &group)
{
    struct moe_cuda_control *c = p.control;
    const bool done_sent = load_volatile(&c->done_sent) == step - 1;
    group_sync(group); /* all threads have read it */
    if (done_sent || is_alone(c->live, p.slot))
        return;
    if (c->refused == step - 1)
        lay_blanks(p, step - 1, group);
    if (group.warp == 0)
        signal_done(p, step - 1);
}

/* Called by one thread of each CTA after it has read the step's number; the last call advances
 * it. */
__device__ static void count_step(struct moe_cuda_control *c, uint32_t step)
{
    if (atomicAdd(&c->arrived, 1u) != gridDim.x - 1)
        return;
    c->arrived = 0;
    c->step = step;
}

/* ---------------------------------------------------------------- kernel */

/* Receivers signal that the layout is known, and continue; senders wait for it. */
__device__ static void signal_layout_known()
{
    asm volatile("bar.arrive 2, %0;" ::"n"(CTA_THREADS) : "memory");
}

__device__ static void await_layout()
{
    asm volatile("bar.sync 2, %0;" ::"n"(CTA_THREADS) : "memory");
}

/* How CTAs and their warps share the work.
 *
 * PLAIN, QUICK: all CTAs are alike. The first warps send, the others receive.
 *
 * BULK: the first CTAs only send, with as many rings as fit, and their last warp signals arrived
 * rows. Then they help to expand. The other CTAs receive: a multiprocessor's loads from its own
 * memory wait behind the data that it sends, and the path from choices to positions to counts has
 * many such loads. */
struct roles {
    uint32_t sending;             /* CTAs that only send; 0 except in BULK */
    uint32_t senders;             /* of each CTA, the first warps; 0 in BULK */
    uint32_t movers;              /* of each CTA, the first warps: all that move rows */
    uint32_t arrived_at, ring_at; /* BULK: offsets in shared memory of arrived rows and of rings */
};

/* Number of warps that expand from the beginning. */
__device__ static uint32_t expanders(const struct roles &roles)
{
    return (roles.movers - roles.senders) * (gridDim.x - roles.sending);
}

/* The ring of this warp. */
__device__ static struct row_ring ring_of(const struct moe_cuda_pass &p, uint8_t *shared,
                                          const struct roles &roles)
{
    const uint32_t warp = threadIdx.x / 32;
    uint64_t *landed = reinterpret_cast<uint64_t *>(shared + roles.ring_at);
    uint8_t *rows = shared + roles.ring_at + sizeof(uint64_t) * RING_ROWS * CTA_WARPS;
    return {rows + static_cast<size_t>(warp) * RING_ROWS * p.row_bytes, landed + warp * RING_ROWS,
            p.row_bytes, 0, 0};
}

template <typename Unit, way WAY>
__device__ static void receive(const struct moe_cuda_pass &p, struct arrival *a,
                               const struct roles &roles, struct row_ring *ring)
{
    const struct group group = group_behind(roles.senders);
    if (a->cta == 0) {
        if (group.warp == 0)
            store_head(p, a);
        clear_tables(p, a->step, group);
        close_last_step(p, a->step, group);
    }
    announce_choices(p, a, group);
    if (group.thread == group.threads - 1)
        count_step(p.control, a->step);
    learn_what_comes(p, a, group, a->cta == 0);
    if (roles.senders != 0)
        signal_layout_known();
    if (group.warp >= roles.movers - roles.senders || a->failed != 0 || a->other != NOWHERE)
        return;
    expand_tokens<Unit, WAY>(p, a,
                             begin_walk(&p.control->next_expand[a->step & 1],
                                        group.warp * a->ctas + a->cta, expanders(roles)),
                             ring);
}

template <typename Unit, way WAY>
__device__ static void help_expand(const struct moe_cuda_pass &p, struct arrival *a,
                                   const struct roles &roles, struct row_ring *ring)
{
    if (a->failed == 0 && a->other == NOWHERE)
        expand_tokens<Unit, WAY>(
            p, a, join_walk(&p.control->next_expand[a->step & 1], expanders(roles)), ring);
}

/* Work of a sending warp in a CTA that also receives. */
template <typename Unit, way WAY>
__device__ static void send(const struct moe_cuda_pass &p, struct arrival *a,
                            const struct roles &roles, uint64_t done, struct row_ring *ring)
{
    send_tokens<Unit, WAY>(p, a, threadIdx.x / 32, roles.senders, done, ring, nullptr);
    await_layout();
    help_expand<Unit, WAY>(p, a, roles, ring);
}

/* Work of a CTA that only sends at first, then reads the layout and helps to expand. */
template <typename Unit, way WAY>
__device__ static void send_first(const struct moe_cuda_pass &p, struct arrival *a,
                                  const struct roles &roles, uint64_t done, struct row_ring *ring,
                                  struct arrived_rows *arrived)
{
    const struct group group = group_behind(0);
    const bool moves = group.warp < roles.movers;
    if (group.thread == group.threads - 1)
        count_step(p.control, a->step);
    if (moves) {
        send_tokens<Unit, WAY>(p, a, group.warp, roles.movers, done, ring, arrived);
        end_rows(arrived);
    } else if (group.warp == CTA_WARPS - 1) {
        signal_rows(p, a, arrived, roles.movers);
    }
    learn_what_comes(p, a, group, false);
    if (moves)
        help_expand<Unit, WAY>(p, a, roles, ring);
}

/* Loads the common data, in two trips to memory; the CTA synchronises after each. */
__device__ static void begin(const struct moe_cuda_pass &p, struct arrival *a, uint32_t sending)
{
    const struct moe_cuda_control *c = p.control;
    const uint32_t *params = reinterpret_cast<const uint32_t *>(p.params);
    const uint32_t thread = blockDim.x - 1 - threadIdx.x;
    for (uint32_t i = threadIdx.x; i < sizeof a->params / sizeof *params; i += blockDim.x)
        reinterpret_cast<uint32_t *>(&a->params)[i] = params[i];
    if (thread < MOE_CUDA_MAX_SLOTS)
        a->window[thread] = c->window[thread];
    if (thread != 0)
        return;
    a->cta = blockIdx.x < sending ? blockIdx.x : blockIdx.x - sending;
    a->ctas = blockIdx.x < sending ? sending : gridDim.x - sending;
    a->step = load_volatile(&c->step) + 1;
    a->stamp = moe_window_stamp(c->epoch, a->step);
    a->live = c->live;
    a->other = NOWHERE;
    a->failed = 0;
}

__device__ static void copy_placement(const struct moe_cuda_pass &p, struct arrival *a)
{
    const struct moe_cuda_placement &placement = a->params.placement;
    for (uint32_t e = threadIdx.x; e < p.experts; e += blockDim.x) {
        uint32_t first = placement.offset[e], copies = placement.offset[e + 1] - first;
        uint16_t guess = placement.slot[e]; /* speculative, as in target_of */
        local_indices(p, a)[e] = placement.local_index[e];
        targets(p, a)[e] = copies == 1 && first == e ? guess : SEVERAL;
    }
}

template <typename Unit, way WAY>
__global__ void __launch_bounds__(CTA_THREADS, 1)
    dispatch_kernel(const __grid_constant__ struct moe_cuda_pass p,
                    const __grid_constant__ struct roles roles)
{
    extern __shared__ __align__(128) uint8_t shared[];
    struct arrival *a = reinterpret_cast<struct arrival *>(shared);
    const bool first = WAY == way::BULK && blockIdx.x < roles.sending;
    const bool sends = first ? threadIdx.x / 32 < roles.movers : threadIdx.x / 32 < roles.senders;
    stamp_stage(p, MOE_STAGE_DISPATCH);
    struct arrived_rows *arrived =
        reinterpret_cast<struct arrived_rows *>(shared + roles.arrived_at);
    struct row_ring ring = {};
    if (first)
        clear_arrived(arrived);
    begin(p, a, roles.sending);
    const uint64_t done = sends ? peek_done(p) : 0;
    if (WAY == way::BULK && threadIdx.x / 32 < roles.movers) {
        ring = ring_of(p, shared, roles);
        if (threadIdx.x % 32 == 0)
            init_ring(ring);
    }
    /* All threads must agree: they share barriers */
    if (__syncthreads_or(load_volatile(&p.control->stop) != 0))
        return;
    copy_placement(p, a);
    __syncthreads();
    if (first)
        send_first<Unit, WAY>(p, a, roles, done, &ring, arrived);
    else if (sends)
        send<Unit, WAY>(p, a, roles, done, &ring);
    else
        receive<Unit, WAY>(p, a, roles, &ring);
}

/* ---------------------------------------------------------------- launches */

/* Sending warps per CTA when others receive: enough rows in flight to fill the links, but not so
 * many that all arrive late together. */
static uint32_t senders_of(const struct moe_cuda_pass *pass)
{
    if (pass->slots == 1)
        return 0;
    if (pass->quick)
        return 1;
    return pass->row_bytes > 12000 ? 2 : pass->row_bytes > 6000 ? 3 : 4;
}

/* CTAs that only send, with `rings` rows in flight each; measured. The more rows a token becomes,
 * the more CTAs the receiving group needs. */
static uint32_t sending_of(const struct moe_cuda_pass *pass, uint32_t rings, uint32_t ctas)
{
    const bool quantised = pass->outgoing != pass->x; /* half the bytes for the links */
    const uint32_t bytes_on_their_way = pass->top_k <= 4 ? 4500000 : quantised ? 2200000 : 3000000;
    const uint32_t each = rings * pass->row_bytes;
    const uint32_t enough = (bytes_on_their_way + each - 1) / each;
    return pass->slots == 1 ? 0 : enough < ctas / 2 ? enough : ctas / 2;
}

/* With few tokens, cuts rows into pieces so that each warp has one. */
static uint32_t pieces_for(uint32_t warps, uint32_t tokens)
{
    const uint32_t limit = 8, pieces = warps / tokens;
    return pieces < 1 ? 1 : pieces > limit ? limit : pieces;
}

/* Warps per CTA with a ring in shared memory, after `used` bytes; 0 if BULK does not pay. */
static uint32_t rings_of(const struct moe_cuda_pass *pass, size_t used)
{
    const size_t barriers = sizeof(uint64_t) * RING_ROWS * CTA_WARPS;
    const size_t ring = static_cast<size_t>(RING_ROWS) * pass->row_bytes;
    if (pass->quick || pass->row_bytes % sizeof(uint4) != 0 || pass->shared_bytes < used + barriers)
        return 0;
    const size_t rings = (pass->shared_bytes - used - barriers) / ring;
    const size_t fewest = 3;
    const size_t limit = CTA_WARPS - 1; /* the last warp signals */
    return rings < fewest ? 0 : static_cast<uint32_t>(rings < limit ? rings : limit);
}

static uint32_t in_lines(size_t bytes)
{
    return static_cast<uint32_t>((bytes + 127) / 128 * 128);
}

template <typename Unit, way WAY>
static struct moe_status launch(const struct moe_cuda_pass &pass, const struct roles &roles,
                                uint32_t ctas, cudaStream_t stream)
{
    size_t bytes = arrival_bytes(&pass);
    if (WAY == way::BULK)
        bytes = roles.ring_at + RING_ROWS * (sizeof(uint64_t) * CTA_WARPS +
                                             static_cast<size_t>(roles.movers) * pass.row_bytes);
    dispatch_kernel<Unit, WAY><<<ctas, CTA_THREADS, bytes, stream>>>(pass, roles);
    return MOE_LAUNCHED("dispatch_kernel");
}

extern "C" struct moe_status moe_cuda_launch_dispatch(const struct moe_cuda_pass *given,
                                                      uint32_t ctas, cudaStream_t stream)
{
    struct moe_cuda_pass pass = *given;
    struct roles roles = {};
    roles.senders = senders_of(given);
    roles.movers = CTA_WARPS;
    roles.arrived_at = in_lines(arrival_bytes(given));
    roles.ring_at = roles.arrived_at + in_lines(sizeof(struct arrived_rows));
    if (pass.quick) {
        pass.send_pieces = pieces_for(roles.senders * ctas, pass.bucket);
        pass.expand_pieces =
            pieces_for((CTA_WARPS - roles.senders) * ctas, pass.slots * pass.bucket);
        return launch<uint4, way::QUICK>(pass, roles, ctas, stream);
    }
    const uint32_t rings = rings_of(given, roles.ring_at);
    if (rings != 0) {
        roles.sending = sending_of(given, rings, ctas);
        roles.senders = 0;
        roles.movers = rings;
        return launch<uint4, way::BULK>(pass, roles, ctas, stream);
    }
    /* Use the widest unit that fits the rows. */
    if (pass.row_bytes % sizeof(uint4) == 0)
        return launch<uint4, way::PLAIN>(pass, roles, ctas, stream);
    if (pass.row_bytes % sizeof(uint32_t) == 0)
        return launch<uint32_t, way::PLAIN>(pass, roles, ctas, stream);
    return launch<uint16_t, way::PLAIN>(pass, roles, ctas, stream);
}

/* Allows all of the device's shared memory, once: a captured launch must not depend on a later
 * shape's request. */
template <typename Kernel> static struct moe_status allow_shared_memory(Kernel kernel)
{
    int device, max_bytes;
    struct cudaFuncAttributes have;
    MOE_TRY(MOE_CUDA(cudaGetDevice(&device)));
    MOE_TRY(MOE_CUDA(
        cudaDeviceGetAttribute(&max_bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, device)));
    MOE_TRY(MOE_CUDA(cudaFuncGetAttributes(&have, kernel)));
    return MOE_CUDA(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                         max_bytes - static_cast<int>(have.sharedSizeBytes)));
}

extern "C" struct moe_status moe_cuda_load_ep_dispatch(void)
{
    MOE_TRY(allow_shared_memory(dispatch_kernel<uint4, way::QUICK>));
    MOE_TRY(allow_shared_memory(dispatch_kernel<uint4, way::BULK>));
    MOE_TRY(allow_shared_memory(dispatch_kernel<uint4, way::PLAIN>));
    MOE_TRY(allow_shared_memory(dispatch_kernel<uint32_t, way::PLAIN>));
    return allow_shared_memory(dispatch_kernel<uint16_t, way::PLAIN>);
}
