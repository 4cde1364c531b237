/* SPDX-License-Identifier: Apache-2.0 */
/* See cuda/step/segments.h. blockIdx.x has a range of the step's tokens, blockIdx.y one tensor: so
 * the tensors of a small step come over the bus at the same time.
 *
 * The grid is small. Few loads keep a bus busy, and the kernels run next to the products of another
 * step. */
#include "cuda/step/segments.h"

#include "cuda/core/load.h"

namespace
{

constexpr unsigned THREADS = 256;
constexpr uint32_t MAX_BLOCKS = 64; /* of each tensor: 1 MiB of loads under way */
constexpr int LOADS = 4;            /* of a thread under way */

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
__device__ uint32_t find(const moe_cuda_segment_rows &r, uint32_t token)
{
    uint32_t low = 0, high = r.count;
    while (high - low > 1) {
        uint32_t middle = low + (high - low) / 2;
        if (r.segments[middle].first <= token)
            low = middle;
        else
            high = middle;
    }
    return low;
}

template <bool IN>
__global__ void __launch_bounds__(THREADS) move_rows_kernel(const moe_cuda_segment_rows r)
{
    const uint64_t tokens = r.tokens;
    uint32_t row = static_cast<uint32_t>(tokens * blockIdx.x / gridDim.x);
    const uint32_t end = static_cast<uint32_t>(tokens * (blockIdx.x + 1) / gridDim.x);
    for (uint32_t i = find(r, row); row < end; i++) {
        const moe_step_segment s = r.segments[i].at;
        const uint32_t own = row - r.segments[i].first;
        const uint32_t n = min(end - row, s.tokens - own);
        if (IN)
            gather_rows(r, s, row, own, n);
        else
            scatter_rows(r, s, row, own, n);
        row += n;
    }
}

dim3 grid_of(const moe_cuda_segment_rows *rows, uint32_t tensors)
{
    return dim3(rows->tokens < MAX_BLOCKS ? rows->tokens : MAX_BLOCKS, tensors);
}

} // namespace

extern "C" uint32_t moe_cuda_segments_list(const struct moe_step_args *args,
                                           struct moe_cuda_segment *out)
{
    uint32_t count = 0, first = 0;
    for (uint32_t i = 0; i < args->segment_count; i++)
        if (args->segments[i].tokens > 0) {
            out[count].at = args->segments[i];
            out[count++].first = first;
            first += args->segments[i].tokens;
        }
    return count;
}

extern "C" struct moe_status moe_cuda_segments_gather(const struct moe_cuda_segment_rows *rows,
                                                      cudaStream_t stream)
{
    const uint32_t tensors = rows->modes ? STATES : IDS; /* all before that one */
    move_rows_kernel<true><<<grid_of(rows, tensors), THREADS, 0, stream>>>(*rows);
    return MOE_LAUNCHED("gather_segments");
}

extern "C" struct moe_status moe_cuda_segments_scatter(const struct moe_cuda_segment_rows *rows,
                                                       cudaStream_t stream)
{
    move_rows_kernel<false><<<grid_of(rows, TENSORS), THREADS, 0, stream>>>(*rows);
    return MOE_LAUNCHED("scatter_segments");
}

extern "C" struct moe_status moe_cuda_load_segments(void)
{
    return moe_cuda_load(move_rows_kernel<true>, move_rows_kernel<false>);
}
