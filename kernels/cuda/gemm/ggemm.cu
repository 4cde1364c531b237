/* SPDX-License-Identifier: Apache-2.0 */
/* Host side of the grouped GEMM: checks the shape, describes the buffers to the copy engine,
 * chooses the kernel instance and launches it. The kernels are in ggemm_stream.cuh, ggemm_even.cuh
 * and ggemm_pingpong.cuh. */
#include "cuda/gemm/ggemm.h"
#include "cuda/plan/limits.h"

#include "cuda/core/load.h"
#include "cuda/gemm/ggemm_even.cuh"
#include "cuda/gemm/ggemm_packed_launch.cuh"
#include "cuda/gemm/ggemm_pingpong.cuh"
#include "cuda/gemm/ggemm_stream.cuh"
#include "cuda/gemm/tensor_map.cuh"

#include <cuda_runtime.h>
#include <limits>
#include <string.h>

namespace
{

constexpr uint64_t MAX_TILES = UINT64_C(1) << 31; /* tile numbers are 32 bits; one grid step beyond
                                                     fits */

typedef void (*kernel)(const ggemm::params);

using ggemm::finish;

/* Products with W^T by their finish; with W; with gate and up, which are also stored. */
enum form { BACK = int(finish::UP) + 1, RETAINED, FORMS };

struct instance {
    kernel run[FORMS][2]; /* [form][fp32 output] */
    uint32_t threads;
    uint32_t row_step; /* of the boxes that read rows */
    size_t shared_bytes;
};

/* The kernels of each tile; run<...>() is one of them. Products with W have wide tiles only. */
template <uint32_t COLUMNS> struct stream_tile {
    static constexpr uint32_t THREADS = ggemm::STREAM_THREADS, ROW_STEP = ggemm::STREAM_ROW_STEP;
    using shared = ggemm::stream_shared<COLUMNS>;
    template <finish FINISH, bool F32, bool BACK, bool SAVE> static kernel run()
    {
        if constexpr (BACK && COLUMNS != ggemm::STREAM_COLUMNS)
            return nullptr;
        else
            return ggemm::stream_kernel<COLUMNS, FINISH, F32, BACK, SAVE>;
    }
};

template <uint32_t SLABS> struct even_tile {
    static constexpr uint32_t THREADS = ggemm::EVEN_THREADS, ROW_STEP = ggemm::EVEN_ROW_STEP;
    using shared = ggemm::even_shared<SLABS>;
    template <finish FINISH, bool F32, bool BACK, bool SAVE> static kernel run()
    {
        if constexpr (BACK && SLABS != ggemm::EVEN_SLABS)
            return nullptr;
        else
            return ggemm::even_kernel<SLABS, FINISH, F32, BACK, SAVE>;
    }
};

struct pingpong_tile {
    static constexpr uint32_t THREADS = ggemm::PINGPONG_THREADS;
    static constexpr uint32_t ROW_STEP = ggemm::PINGPONG_ROW_STEP;
    using shared = ggemm::pingpong_shared;
    template <finish FINISH, bool F32, bool BACK, bool SAVE> static kernel run()
    {
        return ggemm::pingpong_kernel<FINISH, F32, BACK, SAVE>;
    }
};

template <class tile> instance instance_of()
{
    static_assert(sizeof(typename tile::shared) <= 227 * 1024, "a CTA of sm_90 can have no more");
    return {{
                {tile::template run<finish::PLAIN, false, false, false>(),
                 tile::template run<finish::PLAIN, true, false, false>()},
                {tile::template run<finish::GATED, false, false, false>(),
                 tile::template run<finish::GATED, true, false, false>()},
                {tile::template run<finish::SITU, false, false, false>(),
                 tile::template run<finish::SITU, true, false, false>()},
                {tile::template run<finish::UP, false, false, false>(),
                 tile::template run<finish::UP, true, false, false>()},
                {tile::template run<finish::PLAIN, false, true, false>(),
                 tile::template run<finish::PLAIN, true, true, false>()},
                {tile::template run<finish::GATED, false, false, true>(), nullptr},
            },
            tile::THREADS,
            tile::ROW_STEP,
            sizeof(typename tile::shared)};
}

/* Indexed by enum moe_cuda_gemm_tile. */
const instance instances[] = {
    instance_of<stream_tile<ggemm::STREAM_COLUMNS>>(),
    instance_of<even_tile<ggemm::EVEN_SLABS>>(),
    instance_of<pingpong_tile>(),
    instance_of<stream_tile<64>>(),
    instance_of<stream_tile<32>>(),
    instance_of<even_tile<1>>(),
};
static_assert(sizeof instances / sizeof *instances == MOE_CUDA_TILE_COUNT, "one instance per tile");

finish finish_of(const moe_cuda_ggemm &g)
{
    if (!g.gated)
        return g.relu2 ? finish::UP : finish::PLAIN;
    return g.activation == MOE_ACT_SITU ? finish::SITU : finish::GATED;
}

moe_status check_shape(const moe_cuda_ggemm &g)
{
    const uint32_t narrowest = moe_cuda_tile_shape(MOE_CUDA_TILE_DECODE_32).columns;
    const uint64_t row_tiles = uint64_t(g.row_capacity) / ggemm::MMA_ROWS + g.experts;
    const uint64_t column_tiles = (uint64_t(g.n) * 2 + narrowest - 1) / narrowest;
    if (g.tile >= MOE_CUDA_TILE_COUNT || g.experts == 0 ||
        g.experts > moe_cuda_tile_shape(g.tile).experts || g.row_capacity == 0 || g.n == 0 ||
        g.k == 0 || g.n % 8 != 0 || g.k % 8 != 0 || g.n > UINT32_MAX / 4 ||
        row_tiles * column_tiles > MAX_TILES || !tensor_map::fits_stride(g.x_stride, g.k) ||
        !tensor_map::fits_stride(g.out_stride, g.n))
        return moe_error(MOE_INVALID_ARGUMENT, MOE_REASON_SHAPE_MISMATCH,
                         "grouped GEMM: %u experts, %u rows, %u x %u is out of range", g.experts,
                         g.row_capacity, g.n, g.k);
    if (int(g.gated) + int(g.relu2) + int(g.back) > 1)
        return moe_error(MOE_INVALID_ARGUMENT, MOE_REASON_SHAPE_MISMATCH,
                         "grouped GEMM: gate and up, up alone and a product with W exclude each "
                         "other");
    if (g.gated && !moe_activation_has_gate(g.activation))
        return moe_error(MOE_INVALID_ARGUMENT, MOE_REASON_SHAPE_MISMATCH,
                         "grouped GEMM: this activation has no gate");
    if (g.packing >= MOE_CUDA_PACKING_COUNT ||
        (moe_cuda_packing_is_w8a8(g.packing) && (g.back || g.pre != nullptr)))
        return moe_error(MOE_INVALID_ARGUMENT, MOE_REASON_SHAPE_MISMATCH,
                         "grouped GEMM: W8A8 weights have only products with W^T");
    if (moe_cuda_packing_is_w8a8(g.packing)
            ? g.x_stride % 16 != 0
            : g.x_scales != nullptr || g.out_activations != MOE_ACTIVATIONS_PLAIN)
        return moe_error(MOE_INVALID_ARGUMENT, MOE_REASON_SHAPE_MISMATCH,
                         "grouped GEMM: quantised rows are whole units, and for W8A8 weights");
    if (g.out_activations != MOE_ACTIVATIONS_PLAIN && (!(g.gated || g.relu2) || g.out_stride != 0))
        return moe_error(MOE_INVALID_ARGUMENT, MOE_REASON_SHAPE_MISMATCH,
                         "grouped GEMM: only gate and up leave quantised rows");
    if (g.pre != nullptr && (finish_of(g) != finish::GATED || g.out_dtype != MOE_DTYPE_BF16))
        return moe_error(MOE_INVALID_ARGUMENT, MOE_REASON_SHAPE_MISMATCH,
                         "grouped GEMM: only gate and up with bf16 results can be left");
    if (g.out_dtype != MOE_DTYPE_BF16 && g.out_dtype != MOE_DTYPE_F32)
        return moe_error(MOE_INVALID_ARGUMENT, MOE_REASON_DTYPE_UNSUPPORTED,
                         "grouped GEMM: output dtype %d", int(g.out_dtype));
    return moe_ok();
}

void set_activation(const moe_cuda_ggemm &g, ggemm::params *p)
{
    const bool situ = g.activation == MOE_ACT_SITU;
    p->limit = situ || moe_activation_clamps(g.activation) ? g.limit
                                                           : std::numeric_limits<float>::infinity();
    p->activation = moe_activation_shape_of(g.activation, g.alpha);
    if (situ)
        p->activation.alpha = g.alpha;
}

void set_weighting(const moe_cuda_ggemm &g, ggemm::params *p)
{
    const bool on_input = g.weighting == MOE_WEIGHT_INPUT;
    p->row_weight = on_input == (g.gated || g.relu2) ? g.row_weight : nullptr;
}

/* Maps of bf16 rows, for the boxes of a tile. */
moe_status describe_rows(const moe_cuda_ggemm &g, moe_cuda_gemm_tile tile, ggemm::params *p)
{
    const bool packed = g.packing != MOE_CUDA_PACKING_NONE;
    const uint32_t height = packed && g.back ? ggemm::PACKED_MANY
                            : packed         ? ggemm::packed_tile_rows(tile)
                                             : moe_cuda_tile_shape(tile).rows;
    const uint32_t step = packed ? ggemm::packed_row_step(height) : instances[tile].row_step;
    const tensor_map::matrix x = {g.x, g.row_capacity, g.k, 1, g.x_stride};
    for (uint32_t i = 0; i < height / step; i++)
        MOE_TRY(tensor_map::of_rows(&p->rows[i], x, (i + 1) * step, 2));
    return moe_ok();
}

moe_status make_params(const moe_cuda_ggemm &g, moe_cuda_gemm_tile tile, ggemm::params *p)
{
    const uint32_t weight_rows = g.gated ? 2 * g.n : g.n;
    const tensor_map::matrix out = {g.out, g.row_capacity, g.n, 1, g.out_stride};
    if (!moe_cuda_packing_is_w8a8(g.packing))
        MOE_TRY(describe_rows(g, tile, p));
    if (g.out_dtype == MOE_DTYPE_BF16)
        MOE_TRY(tensor_map::of_rows(&p->out, out, ggemm::STORE_ROWS, 2));
    p->out_rows = g.out;
    p->start = g.start;
    p->count = g.count;
    p->weights = g.weights;
    p->has_bias = g.has_bias;
    p->out_f32 = g.out_dtype == MOE_DTYPE_F32;
    p->tile = tile;
    p->pre = g.pre;
    p->began = g.began;
    p->experts = g.experts;
    p->n = weight_rows;
    p->k = g.k;
    p->out_n = g.n;
    p->out_stride = g.out_stride != 0 ? g.out_stride : g.n;
    set_weighting(g, p);
    set_activation(g, p);
    return moe_ok();
}

} // namespace

extern "C" bool moe_cuda_ggemm_serves(uint32_t n, uint32_t k)
{
    int major = 0, processors = 0;
    const moe_status st = tensor_map::read_device(&major, &processors);
    return !moe_failed(&st) && major == 9 && n % 8 == 0 && k % 8 == 0 && n > 0 && k > 0;
}

extern "C" moe_status moe_cuda_ggemm_describe(const void *data, uint32_t experts, uint32_t rows,
                                              uint32_t columns, moe_cuda_ggemm_weights *out)
{
    static_assert(sizeof(CUtensorMap) == sizeof(moe_cuda_tensor_map) &&
                      sizeof(moe_cuda_ggemm_weights) % alignof(CUtensorMap) == 0,
                  "maps of an array of weights are aligned");
    for (int tile = 0; tile < MOE_CUDA_TILE_COUNT; tile++) {
        const auto shape = moe_cuda_tile_shape(static_cast<moe_cuda_gemm_tile>(tile));
        CUtensorMap map;
        MOE_TRY(tensor_map::of_rows(&map, {data, rows, columns, experts}, shape.columns, 3));
        memcpy(&out->map[tile], &map, sizeof map);
    }
    const tensor_map::matrix m = {data, rows, columns, experts};
    const uint32_t slabs = ggemm::PINGPONG_COLUMNS / tensor_map::BOX_COLUMNS;
    static_assert(ggemm::PINGPONG_COLUMNS == ggemm::STREAM_COLUMNS &&
                      ggemm::PINGPONG_COLUMNS == ggemm::EVEN_COLUMNS,
                  "one map for all");
    CUtensorMap back;
    MOE_TRY(tensor_map::has_whole_slabs(columns)
                ? tensor_map::of_slabs(&back, m, ggemm::DEPTH, slabs, 4)
                : tensor_map::of_rows(&back, m, ggemm::DEPTH, 3));
    memcpy(&out->back, &back, sizeof back);
    out->data = data;
    return moe_ok();
}

extern "C" moe_status moe_cuda_ggemm_enqueue(const moe_cuda_ggemm *g, CUstream_st *stream)
{
    int major, processors;
    MOE_TRY(tensor_map::read_device(&major, &processors));
    if (major != 9)
        return moe_error(MOE_FAILED_PRECONDITION, MOE_REASON_UNSUPPORTED,
                         "this grouped GEMM needs a Hopper GPU");
    MOE_TRY(check_shape(*g));
    ggemm::params p = {};
    const moe_cuda_gemm_tile tile = g->back ? moe_cuda_wide_tile(g->tile) : g->tile;
    MOE_TRY(make_params(*g, tile, &p));
    const finish end = finish_of(*g);
    const uint32_t all = uint32_t(processors);
    const uint32_t ctas = g->processors == 0 || g->processors > all ? all : g->processors;
    if (moe_cuda_packing_is_w8a8(g->packing))
        return ggemm::launch_w8a8(p, *g, end, ctas, stream);
    if (g->packing != MOE_CUDA_PACKING_NONE && g->back)
        return ggemm::launch_packed_back(p, g->packing, ctas, stream);
    if (g->packing != MOE_CUDA_PACKING_NONE)
        return ggemm::launch_packed(p, g->packing, g->tile, end, ctas, stream);
    const instance &use = instances[tile];
    const int form = g->pre != nullptr ? int(RETAINED) : g->back ? int(BACK) : int(end);
    const kernel run = use.run[form][g->out_dtype == MOE_DTYPE_F32];
    MOE_TRY(MOE_CUDA(cudaFuncSetAttribute(reinterpret_cast<const void *>(run),
                                          cudaFuncAttributeMaxDynamicSharedMemorySize,
                                          int(use.shared_bytes))));
    run<<<ctas, use.threads, use.shared_bytes, stream>>>(p);
    return MOE_LAUNCHED("grouped GEMM");
}

extern "C" moe_status moe_cuda_load_ggemm(void)
{
    for (const instance &use : instances)
        for (const auto &form : use.run)
            for (const kernel run : form)
                if (run != nullptr)
                    MOE_TRY(moe_cuda_load(run));
    return moe_ok();
}
