/* SPDX-License-Identifier: Apache-2.0 */
/* See cuda/step/segments.h. blockIdx.x has a range of the step's tokens, blockIdx.y one tensor: so
 * the tensors of a small step come over the bus at the same time.
 *
 * The grid is small. Few loads keep a bus busy, and the kernels run next to the products of another
 * step.
 *
 * The last block of a scatter stores the completions. Each block fences its rows at system scope
 * before it counts itself, so a reader that sees a completion sees them too. */
#include "cuda/step/segments.h"

#include "cuda/core/load.h"

#include <cuda/atomic>

namespace
{

constexpr unsigned THREADS = 256;
constexpr uint32_t MAX_BLOCKS = 64; /* of each tensor: 1 MiB of loads under way */
constexpr int LOADS = 4;            /* of a thread under way */
constexpr size_t ARGUMENT = 3072;   /* bytes of an upload; all arguments of a kernel have 4096 */

/* The tensors. A gather moves ROWS, then modes with IDS, and WEIGHTS; a scatter moves all. */
enum tensor : uint32_t { ROWS, IDS, WEIGHTS, STATES, TENSORS };

/* All threads of the block copy n elements. Another process may write the source meanwhile. */
template <typename T> __device__ void copy_as(void *to, const void *from, size_t n)
{
    T *t = static_cast<T *>(to);
    const T *f = static_cast<const T *>(from);
    for (size_t i = threadIdx.x; i < n; i += LOADS * THREADS) {
        T value[LOADS];
#pragma unroll
        for (int k = 0; k < LOADS; k++)
            if (i + k * THREADS < n)
                value[k] = __ldcv(f + i + k * THREADS);
#pragma unroll
        for (int k = 0; k < LOADS; k++)
            if (i + k * THREADS < n)
                t[i + k * THREADS] = value[k];
    }
}

/* Copies with the widest loads that the addresses allow; nothing if one of them is NULL. */
__device__ void copy(void *to, const void *from, size_t bytes)
{
    if (to == nullptr || from == nullptr)
        return;
    size_t all = reinterpret_cast<uintptr_t>(to) | reinterpret_cast<uintptr_t>(from) | bytes;
    if (all % sizeof(uint4) == 0)
        copy_as<uint4>(to, from, bytes / sizeof(uint4));
    else if (all % sizeof(uint32_t) == 0)
        copy_as<uint32_t>(to, from, bytes / sizeof(uint32_t));
    else if (all % sizeof(uint16_t) == 0)
        copy_as<uint16_t>(to, from, bytes / sizeof(uint16_t));
    else
        copy_as<uint8_t>(to, from, bytes);
}

__device__ void *at(void *tensor, size_t offset)
{
    return tensor == nullptr ? nullptr : static_cast<char *>(tensor) + offset;
}

__device__ const void *at(const void *tensor, size_t offset)
{
    return tensor == nullptr ? nullptr : static_cast<const char *>(tensor) + offset;
}

/* Rows `row` to `row + n` of the step, which are those from `own` on of the segment. */
__device__ void gather_rows(const moe_cuda_segment_rows &r, const moe_step_segment &s, uint32_t row,
                            uint32_t own, uint32_t n)
{
    const size_t pair = r.top_k * sizeof(float);
    const int mode = s.mode & ~MOE_ROUTE_WITHOUT_SHARED;
    switch (blockIdx.y) {
    case ROWS: copy(at(r.x, row * r.row_bytes), at(s.x, own * r.row_bytes), n * r.row_bytes); break;
    case IDS:
        for (uint32_t i = threadIdx.x; i < n; i += THREADS)
            r.mode[row + i] = s.mode;
        if (mode != MOE_ROUTE_SERVER)
            copy(at(r.ids_in, row * pair), at(s.ids_in, own * pair), n * pair);
        break;
    default:
        if (mode == MOE_ROUTE_IDS_WEIGHTS)
            copy(at(r.weights_in, row * pair), at(s.weights_in, own * pair), n * pair);
    }
}

/* Marks the segment if one of the step's tokens `row` to `row + n` is not good. All threads of the
 * block. */
__device__ void mark_bad(const moe_cuda_segment_rows &r, moe_cuda_segment *s, uint32_t row,
                         uint32_t n)
{
    bool bad = false;
    for (uint32_t i = threadIdx.x; i < n; i += THREADS)
        bad = bad || r.state[row + i] != MOE_TOKEN_OK;
    if (bad)
        s->bad = 1;
}

__device__ void scatter_rows(const moe_cuda_segment_rows &r, const moe_step_segment &s,
                             uint32_t row, uint32_t own, uint32_t n)
{
    const size_t pair = r.top_k * sizeof(float);
    switch (blockIdx.y) {
    case ROWS: copy(at(s.y, own * r.row_bytes), at(r.y, row * r.row_bytes), n * r.row_bytes); break;
    case IDS: copy(at(s.ids_out, own * pair), at(r.ids, row * pair), n * pair); break;
    case WEIGHTS: copy(at(s.weights_out, own * pair), at(r.weights, row * pair), n * pair); break;
    default: copy(at(s.token_state, own), at(r.state, row), n);
    }
}

/* The segment of a token: the last one that begins at or before it. */
__device__ uint32_t find(const moe_cuda_segment *segments, uint32_t count, uint32_t token)
{
    uint32_t low = 0, high = count;
    while (high - low > 1) {
        uint32_t middle = low + (high - low) / 2;
        if (segments[middle].first <= token)
            low = middle;
        else
            high = middle;
    }
    return low;
}

/* The step's tokens that this block moves: those of [row, end). */
struct share {
    uint32_t row, end;
};

__device__ share share_of(const moe_cuda_segment_rows &r)
{
    const uint64_t tokens = r.tokens;
    return {static_cast<uint32_t>(tokens * blockIdx.x / gridDim.x),
            static_cast<uint32_t>(tokens * (blockIdx.x + 1) / gridDim.x)};
}

/* An upload as an argument. */
struct argument {
    uint32_t words; /* 0: it has been copied */
    uint32_t segments;
    uint64_t *to;
    uint64_t word[ARGUMENT / sizeof(uint64_t)];
};

/* Kernels that follow find the upload in device memory; this one reads its argument. */
__global__ void __launch_bounds__(THREADS)
    gather_kernel(const __grid_constant__ moe_cuda_segment_rows r,
                  const __grid_constant__ argument a)
{
    const auto *here = reinterpret_cast<const char *>(a.word) + a.segments;
    const moe_cuda_segment *segments =
        a.words != 0 ? reinterpret_cast<const moe_cuda_segment *>(here) : r.segments;
    share mine = share_of(r);
    if (blockIdx.x == 0 && blockIdx.y == ROWS)
        for (uint32_t i = threadIdx.x; i < a.words; i += THREADS)
            a.to[i] = a.word[i];
    for (uint32_t i = find(segments, r.count, mine.row); mine.row < mine.end; i++) {
        const moe_step_segment s = segments[i].at;
        const uint32_t own = mine.row - segments[i].first;
        const uint32_t n = min(mine.end - mine.row, s.tokens - own);
        gather_rows(r, s, mine.row, own, n);
        mine.row += n;
    }
}

/* ---------------------------------------------------------------- completions */

/* Counts this block. True in all threads of the last one: the rows of all blocks have left. */
__device__ bool arrives_last(moe_cuda_scatter *scatter)
{
    __shared__ bool last;
    __syncthreads();
    if (threadIdx.x == 0) {
        __threadfence_system(); /* covers the stores of the block's other threads */
        last = atomicAdd(&scatter->arrived, 1) == gridDim.x * gridDim.y - 1;
        __threadfence_system();
    }
    __syncthreads();
    return last;
}

__device__ void store(const moe_step_completion &c)
{
    using cuda::thread_scope_system;
    cuda::atomic_ref<uint64_t, thread_scope_system>(*c.receipt)
        .store(c.value, cuda::memory_order_relaxed);
    cuda::atomic_ref<uint32_t, thread_scope_system>(*c.signal).store(1, cuda::memory_order_relaxed);
    cuda::atomic_ref<uint64_t, thread_scope_system>(*c.word).store(c.value,
                                                                   cuda::memory_order_release);
}

/* Other blocks have stored `failed` and `bad`. */
__device__ void store_completions(const moe_cuda_segment_rows &r)
{
    const bool good = __ldcv(&r.scatter->failed) == 0;
    for (uint32_t i = threadIdx.x; i < r.count; i += THREADS) {
        const moe_step_completion c = r.segments[i].at.completion;
        const bool tokens_ok = __ldcv(&r.segments[i].bad) == 0;
        if (good && tokens_ok && c.word != nullptr)
            store(c);
    }
}

/* The outcome lies in memory of the host. One thread loads it while the rows leave. */
__global__ void __launch_bounds__(THREADS) scatter_kernel(const moe_cuda_segment_rows r)
{
    const bool looks =
        r.completes && blockIdx.x == 0 && blockIdx.y == STATES && threadIdx.x == THREADS - 1;
    const uint32_t outcome = looks ? __ldcv(&r.outcome->code) : MOE_CUDA_PASS_GOOD;
    share mine = share_of(r);
    for (uint32_t i = find(r.segments, r.count, mine.row); mine.row < mine.end; i++) {
        const moe_step_segment s = r.segments[i].at;
        const uint32_t own = mine.row - r.segments[i].first;
        const uint32_t n = min(mine.end - mine.row, s.tokens - own);
        scatter_rows(r, s, mine.row, own, n);
        if (blockIdx.y == STATES && s.completion.word != nullptr)
            mark_bad(r, &r.segments[i], mine.row, n);
        mine.row += n;
    }
    if (outcome != MOE_CUDA_PASS_GOOD)
        r.scatter->failed = 1;
    if (r.completes && arrives_last(r.scatter))
        store_completions(r);
}

dim3 grid_of(const moe_cuda_segment_rows *rows, uint32_t tensors)
{
    return dim3(rows->tokens < MAX_BLOCKS ? rows->tokens : MAX_BLOCKS, tensors);
}

} // namespace

extern "C" uint32_t moe_cuda_segments_list(const struct moe_step_args *args,
                                           struct moe_cuda_segment *out, bool *completes)
{
    uint32_t count = 0, first = 0;
    *completes = false;
    for (uint32_t i = 0; i < args->segment_count; i++) {
        const moe_step_segment *s = &args->segments[i];
        if (s->tokens == 0)
            continue;
        out[count].at = *s;
        out[count].bad = 0;
        out[count++].first = first;
        first += s->tokens;
        *completes = *completes || s->completion.word != nullptr;
    }
    return count;
}

extern "C" struct moe_status moe_cuda_segments_gather(const struct moe_cuda_segment_rows *rows,
                                                      const struct moe_cuda_segments_upload *upload,
                                                      cudaStream_t stream)
{
    const uint32_t tensors = rows->modes ? STATES : IDS; /* all before that one */
    argument a;
    a.words = 0;
    a.segments = static_cast<uint32_t>(upload->segments);
    a.to = static_cast<uint64_t *>(upload->to);
    if (upload->bytes <= ARGUMENT) {
        memcpy(a.word, upload->from, upload->bytes);
        a.words = static_cast<uint32_t>(upload->bytes / sizeof a.word[0]);
    } else {
        MOE_TRY(MOE_CUDA(cudaMemcpyAsync(upload->to, upload->from, upload->bytes,
                                         cudaMemcpyHostToDevice, stream)));
    }
    gather_kernel<<<grid_of(rows, tensors), THREADS, 0, stream>>>(*rows, a);
    return MOE_LAUNCHED("gather_segments");
}

extern "C" struct moe_status moe_cuda_segments_scatter(const struct moe_cuda_segment_rows *rows,
                                                       cudaStream_t stream)
{
    scatter_kernel<<<grid_of(rows, TENSORS), THREADS, 0, stream>>>(*rows);
    return MOE_LAUNCHED("scatter_segments");
}

extern "C" struct moe_status moe_cuda_load_segments(void)
{
    return moe_cuda_load(gather_kernel, scatter_kernel);
}
