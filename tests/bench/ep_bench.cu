/* SPDX-License-Identifier: Apache-2.0 */
/* Speed of dispatch and combine between GPUs with given routing: the cost of the links and the row
 * moves of one layer, without router and experts.
 *
 *   ep_bench [SLOTS [TRANSPORT [PROCESSORS [ROWS [SHAPES]]]]]
 *
 * Forks one process per GPU. It first checks each shape: each expert multiplies by a different
 * number, so y must be x * sum of weight * number. Then it captures ten passes into a graph and
 * replays it. It prints the median replay of the slowest slot, divided by ten, for dispatch alone,
 * with quantising the rows before it, and for whole passes. PROCESSORS: limit of multiprocessors
 * for either kernel; one number for all slots, or several with commas, for slots in turn (0 = all).
 * ROWS: bf16, or fp8: experts are in W8A8, and rows travel as moe/row_format.h says. SHAPES: only
 * those with names that begin so. */
extern "C" {
#include "group.h"
}

#include "base/clock.h"
#include "cuda/exchange/ep.h"
#include "cuda/step/backend.h"
#include "cuda/step/join.h"
#include "cuda/step/open.h"
#include "cuda/step/step.h"
#include "moe/numbers.h"
#include "moe/row_format.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <cuda_bf16.h>
#include <cuda_fp8.h>
#include <vector>

namespace
{

const char *processors = "0"; /* as in the argument */
bool fp8 = false;
const char *only = "";

constexpr uint32_t PASSES = 10, REPLAYS = 25, WARM_UP = 5, INNER = 8;

struct shape {
    const char *name;
    uint32_t hidden, top_k, experts, tokens;
};

const shape shapes[] = {
    {"H7168 K8 E256", 7168, 8, 256, 4096}, {"H7168 K8 E256", 7168, 8, 256, 512},
    {"H7168 K8 E256", 7168, 8, 256, 128},  {"H7168 K8 E256", 7168, 8, 256, 32},
    {"H2048 K8 E128", 2048, 8, 128, 4096}, {"H2048 K8 E128", 2048, 8, 128, 128},
    {"H2048 K8 E128", 2048, 8, 128, 32},   {"H4096 K2 E8", 4096, 2, 8, 4096},
};

void require(struct moe_status st)
{
    if (!moe_failed(&st))
        return;
    fprintf(stderr, "ep_bench: %s\n", st.text);
    exit(1);
}

/* For `slot`; the list repeats if it is too short. */
uint32_t processors_of(uint32_t slot)
{
    std::vector<uint32_t> list;
    for (const char *at = processors; at != nullptr; at = strchr(at, ','))
        list.push_back(static_cast<uint32_t>(strtoul(at += *at == ',', nullptr, 10)));
    return list[slot % list.size()];
}

float number_of(uint32_t expert)
{
    return 0.5f + static_cast<float>(expert % 13) / 16.0f;
}

/* Column h of an arrived row. */
__device__ float value_at(const struct moe_rows &rows, const struct moe_row_format &format,
                          size_t row, uint32_t h)
{
    const uint8_t *at = static_cast<const uint8_t *>(rows.x) + row * format.bytes;
    if (!rows.quantised)
        return __bfloat162float(reinterpret_cast<const __nv_bfloat16 *>(at)[h]);
    const float *scale = reinterpret_cast<const float *>(at + format.scales_at);
    const __half value = __half(__nv_cvt_fp8_to_halfraw(at[h], __NV_E4M3));
    return __half2float(value) * scale[h / format.group];
}

__global__ void expert_kernel(const struct moe_rows rows, const struct moe_row_format format,
                              uint32_t hidden, __nv_bfloat16 *out)
{
    for (uint32_t l = 0; l < rows.local_experts; l++) {
        uint32_t e = rows.expert[l];
        float number = 0.5f + static_cast<float>(e % 13) / 16.0f;
        for (uint32_t i = blockIdx.x; i < rows.count[l]; i += gridDim.x) {
            size_t row = rows.start[l] + i;
            for (uint32_t h = threadIdx.x; h < hidden; h += blockDim.x)
                out[row * hidden + h] =
                    __float2bfloat16_rn(rows.weight[row] * number * value_at(rows, format, row, h));
        }
    }
}

/* State of one slot. */
struct bench {
    struct member *member;
    struct moe_device *device;
    struct moe_session *session;
    struct moe_layer *layer;
    shape s;
    struct moe_row_format format;
    std::vector<uint16_t> x;
    std::vector<float> arrives; /* the values of x that experts get */
    std::vector<int32_t> ids;
    std::vector<float> weights;
    void *dev_x, *dev_y;
    int32_t *dev_ids;
    struct moe_cuda_step_params *params;
    float *dev_weights;
    __nv_bfloat16 *out;
    size_t out_bytes;
    uint32_t processors;
};

void *on_device(bench &b, const void *data, size_t bytes)
{
    void *p;
    require(moe_cuda_mem_alloc(b.device, MOE_MEM_DEVICE, bytes, &p));
    if (data != nullptr)
        require(moe_cuda_mem_copy(b.device, p, data, bytes));
    return p;
}

void make_layer(bench &b)
{
    const uint32_t slots = b.member->slots;
    struct moe_layer_spec spec = {};
    spec.hidden = b.s.hidden;
    spec.experts = b.s.experts;
    spec.intermediate = INNER;
    spec.router.score = MOE_SCORE_SOFTMAX;
    spec.router.top_k = b.s.top_k;
    spec.router.groups = spec.router.topk_group = spec.router.group_best = 1;
    spec.router.scale = 1;
    if (fp8)
        spec.routed_format = {MOE_ENC_F8E4M3,    128, 128, MOE_SCALE_E8M0, false, false,
                              MOE_ACTIVATIONS_F8};
    b.format = moe_row_format(&spec, MOE_DTYPE_BF16);
    std::vector<uint32_t> offset(b.s.experts + 1);
    std::vector<uint16_t> slot(b.s.experts);
    for (uint32_t e = 0; e < b.s.experts; e++) {
        offset[e + 1] = e + 1;
        slot[e] = static_cast<uint16_t>(e * slots / b.s.experts);
    }
    struct moe_placement placement = {};
    placement.version = 1;
    placement.experts = b.s.experts;
    placement.slots = slots;
    placement.offset = offset.data();
    placement.slot = slot.data();
    require(moe_cuda_layer_create(b.device, &spec, &placement, b.member->slot, &b.layer));
    std::vector<uint16_t> zeros(static_cast<size_t>(b.s.hidden) * std::max(b.s.experts, INNER));
    for (uint32_t w : {MOE_WEIGHT_ROUTER, MOE_WEIGHT_GATE, MOE_WEIGHT_UP, MOE_WEIGHT_DOWN})
        for (uint32_t e = 0; e < (w == MOE_WEIGHT_ROUTER ? 1 : b.s.experts); e++) {
            size_t rows, columns;
            const struct moe_packed_matrix packed = {zeros.data(), zeros.data(), nullptr, 0};
            moe_weight_shape(&spec, static_cast<enum moe_weight>(w), &rows, &columns);
            if (w != MOE_WEIGHT_ROUTER && slot[e] != b.member->slot)
                continue;
            require(fp8 && w != MOE_WEIGHT_ROUTER
                        ? moe_cuda_layer_upload_packed(b.layer, static_cast<enum moe_weight>(w), e,
                                                       &packed)
                        : moe_cuda_layer_upload(b.layer, static_cast<enum moe_weight>(w), e,
                                                MOE_DTYPE_BF16, zeros.data(), rows * columns * 2));
        }
    require(moe_cuda_layer_finish(b.layer));
}

/* What the experts get of x, by the definition of W8A8. */
void find_arrives(bench &b)
{
    const uint32_t group = fp8 ? b.format.group : b.s.hidden;
    b.arrives.resize(b.x.size());
    for (size_t i = 0; i < b.x.size(); i++)
        b.arrives[i] = moe_bf16_to_f32(b.x[i]);
    for (size_t first = 0; fp8 && first < b.x.size(); first += group) {
        float largest = 0;
        for (size_t i = first; i < first + group; i++)
            largest = std::max(largest, std::fabs(b.arrives[i]));
        const float scale = moe_e4m3_scale(largest, false);
        for (size_t i = first; i < first + group; i++)
            b.arrives[i] = moe_round_to_e4m3(b.arrives[i] / scale) * scale;
    }
}

/* Random rows; K different experts per token, uniformly. */
void make_inputs(bench &b)
{
    struct rng r = {1000u * b.s.tokens + b.member->slot};
    const size_t n = static_cast<size_t>(b.s.tokens) * b.s.hidden;
    b.x.resize(n);
    for (size_t i = 0; i < n; i += 2) {
        uint64_t bits = rng_next(&r);
        b.x[i] = moe_f32_to_bf16(static_cast<float>(static_cast<int32_t>(bits)) * 0x1p-31f);
        b.x[i + 1] =
            moe_f32_to_bf16(static_cast<float>(static_cast<int32_t>(bits >> 32)) * 0x1p-31f);
    }
    for (uint32_t t = 0; t < b.s.tokens; t++)
        for (uint32_t k = 0; k < b.s.top_k; k++) {
            auto first = b.ids.end() - k;
            int32_t e;
            do
                e = static_cast<int32_t>(rng_below(&r, b.s.experts));
            while (std::find(first, b.ids.end(), e) != b.ids.end());
            b.ids.push_back(e);
            b.weights.push_back(0.5f + 0.5f * rng_float(&r));
        }
    find_arrives(b);
    b.dev_x = on_device(b, b.x.data(), n * 2);
    b.dev_y = on_device(b, nullptr, n * 2);
    struct moe_cuda_step_params params;
    moe_cuda_step_params_fill(b.layer, MOE_DTYPE_BF16, b.s.tokens, b.s.tokens, &params);
    b.params = static_cast<struct moe_cuda_step_params *>(on_device(b, &params, sizeof params));
    b.dev_ids = static_cast<int32_t *>(on_device(b, b.ids.data(), b.ids.size() * 4));
    b.dev_weights = static_cast<float *>(on_device(b, b.weights.data(), b.weights.size() * 4));
}

/* What a pass does besides dispatch. */
struct stages {
    bool quantise, compute, combine;
};

void pass(bench &b, const stages &with)
{
    struct moe_cuda_batch batch = {};
    batch.layer = b.layer;
    batch.dtype = MOE_DTYPE_BF16;
    batch.bucket = b.s.tokens;
    batch.params = b.params;
    batch.x = b.dev_x;
    batch.ids = b.dev_ids;
    batch.weights = b.dev_weights;
    batch.dispatch_processors = batch.combine_processors = b.processors;
    struct moe_rows rows;
    struct moe_cuda_results results = {b.out, MOE_DTYPE_BF16, nullptr};
    cudaStream_t stream = b.device->compute;
    const void *unused;
    if (with.quantise)
        require(moe_cuda_ep_quantise(b.session->ep, &batch, stream, &unused));
    require(moe_cuda_ep_prepare(b.session->ep, &batch));
    require(moe_cuda_ep_dispatch(b.session->ep, &rows, stream));
    if (with.compute)
        expert_kernel<<<1024, 256, 0, stream>>>(rows, b.format, b.s.hidden, b.out);
    if (with.combine)
        require(moe_cuda_ep_combine(b.session->ep, &results, b.dev_y, nullptr, stream));
}

/* Some passes, as one task of the thread that makes them. */
struct passes {
    bench *b;
    uint32_t count;
    stages with;
};

struct moe_status make_passes(void *ctx)
{
    const passes *p = static_cast<const passes *>(ctx);
    for (uint32_t i = 0; i < p->count; i++) {
        MOE_TRY(moe_cuda_ep_count_step(p->b->session));
        pass(*p->b, p->with);
    }
    return moe_ok();
}

/* Relative Frobenius error of y. y receives the result of a pass. */
double check(bench &b, std::vector<uint16_t> &y)
{
    y.resize(b.x.size());
    passes one = {&b, 1, {true, true, true}};
    require(MOE_CUDA(cudaMemset(b.dev_y, 0xff, y.size() * 2)));
    require(moe_cuda_session_run(b.session, make_passes, &one));
    require(moe_cuda_session_finish(b.session));
    require(moe_cuda_mem_copy(b.device, y.data(), b.dev_y, y.size() * 2));
    double difference = 0, norm = 0;
    for (uint32_t t = 0; t < b.s.tokens; t++) {
        double scale = 0;
        for (size_t i = t * b.s.top_k; i < (t + 1) * b.s.top_k; i++)
            scale += static_cast<double>(b.weights[i]) * number_of(static_cast<uint32_t>(b.ids[i]));
        for (size_t i = static_cast<size_t>(t) * b.s.hidden;
             i < static_cast<size_t>(t + 1) * b.s.hidden; i++) {
            double want = scale * b.arrives[i], got = moe_bf16_to_f32(y[i]);
            difference += (got - want) * (got - want);
            norm += want * want;
        }
    }
    return sqrt(difference / norm);
}

/* The same by the host's clock: passes over a network cannot be captured. */
double time_network_passes(bench &b, const stages &with)
{
    passes some = {&b, PASSES, with};
    std::vector<double> us;
    for (uint32_t i = 0; i < WARM_UP + REPLAYS; i++) {
        uint64_t start = moe_clock_ns();
        require(moe_cuda_session_run(b.session, make_passes, &some));
        require(moe_cuda_session_finish(b.session));
        if (i >= WARM_UP)
            us.push_back(static_cast<double>(moe_clock_ns() - start) / 1e3 / PASSES);
    }
    std::sort(us.begin(), us.end());
    return us[us.size() / 2];
}

/* Median time of a pass in microseconds. */
double time_passes(bench &b, const stages &with)
{
    if (b.session->net != nullptr)
        return time_network_passes(b, with);
    cudaStream_t stream = b.device->compute;
    cudaGraph_t graph;
    cudaGraphExec_t exec;
    cudaEvent_t begin, end;
    require(MOE_CUDA(cudaEventCreate(&begin)));
    require(MOE_CUDA(cudaEventCreate(&end)));
    require(MOE_CUDA(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal)));
    for (uint32_t i = 0; i < PASSES; i++)
        pass(b, with);
    require(MOE_CUDA(cudaStreamEndCapture(stream, &graph)));
    require(MOE_CUDA(cudaGraphInstantiate(&exec, graph, 0)));
    std::vector<float> us;
    for (uint32_t i = 0; i < WARM_UP + REPLAYS; i++) {
        float ms = 0;
        for (uint32_t j = 0; j < PASSES; j++)
            require(moe_cuda_ep_count_step(b.session));
        require(MOE_CUDA(cudaEventRecord(begin, stream)));
        require(MOE_CUDA(cudaGraphLaunch(exec, stream)));
        require(MOE_CUDA(cudaEventRecord(end, stream)));
        require(moe_cuda_session_finish(b.session));
        require(MOE_CUDA(cudaEventElapsedTime(&ms, begin, end)));
        if (i >= WARM_UP)
            us.push_back(ms * 1000.0f / PASSES);
    }
    require(MOE_CUDA(cudaGraphExecDestroy(exec)));
    require(MOE_CUDA(cudaGraphDestroy(graph)));
    require(MOE_CUDA(cudaEventDestroy(begin)));
    require(MOE_CUDA(cudaEventDestroy(end)));
    std::sort(us.begin(), us.end());
    return us[us.size() / 2];
}

/* Rows that leave this slot, in megabytes. */
double wire_megabytes(const bench &b)
{
    size_t rows = 0;
    for (uint32_t t = 0; t < b.s.tokens; t++) {
        uint64_t wanted = 0;
        for (size_t i = t * b.s.top_k; i < (t + 1) * b.s.top_k; i++)
            wanted |=
                UINT64_C(1) << (static_cast<uint32_t>(b.ids[i]) * b.member->slots / b.s.experts);
        rows +=
            static_cast<size_t>(__builtin_popcountll(wanted & ~(UINT64_C(1) << b.member->slot)));
    }
    return static_cast<double>(rows * b.format.bytes) / 1e6;
}

/* Replaces each value by the largest of all slots. */
void slowest(bench &b, double *values, uint32_t n)
{
    double *mine = reinterpret_cast<double *>(b.member->board->weights[b.member->slot]);
    std::copy(values, values + n, mine);
    bool join_event = board_barrier(b.member, 60000);
    for (uint32_t s = 0; join_event && s < b.member->slots; s++)
        for (uint32_t i = 0; i < n; i++)
            values[i] =
                std::max(values[i], reinterpret_cast<double *>(b.member->board->weights[s])[i]);
    if (!join_event || !board_barrier(b.member, 60000))
        exit(1);
}

void run_shape(struct member *m, struct moe_device *device, const shape &s)
{
    bench b = {};
    b.member = m;
    b.device = device;
    b.s = s;
    struct moe_session_config config = member_session(m, 1, 10000);
    config.max_tokens = s.tokens;
    config.max_hidden = s.hidden;
    config.max_top_k = s.top_k;
    config.max_experts = s.experts;
    make_layer(b);
    make_inputs(b);
    require(moe_cuda_session_join(device, &config, &b.session));
    require(moe_cuda_ep_reserve(b.session, b.layer, MOE_DTYPE_BF16, s.tokens, s.tokens, false));
    size_t rows = moe_cuda_ep_max_rows(b.session, b.layer, s.tokens);
    b.out_bytes = rows * s.hidden * sizeof *b.out;
    b.out = static_cast<__nv_bfloat16 *>(on_device(b, nullptr, b.out_bytes));
    std::vector<uint16_t> on_all, before, after;
    b.processors = 0;
    double v[6] = {check(b, on_all)};
    b.processors = processors_of(m->slot);
    v[0] = std::max(v[0], check(b, before));
    v[1] = wire_megabytes(b);
    v[2] = time_passes(b, {false, false, false});
    v[3] = time_passes(b, {true, false, false});
    v[4] = time_passes(b, {true, false, true});
    v[0] = std::max(v[0], check(b, after));
    v[5] = before != on_all || after != on_all;
    slowest(b, v, 6);
    if (m->slot == 0)
        printf("%-14s T %4u: error %.1e, wire %6.2f MB, prepare + dispatch %7.1f us (%5.1f GB/s), "
               "with quantising %7.1f us, and combine %7.1f us\n",
               s.name, s.tokens, v[0], v[1], v[2], v[1] / v[2] * 1e3, v[3], v[4]);
    fflush(stdout);
    if (!(v[0] < 5e-3) || v[5] != 0) {
        fprintf(stderr, "ep_bench: y is wrong, or other bits than on all multiprocessors\n");
        exit(1);
    }
    moe_cuda_session_leave(b.session);
    moe_cuda_layer_destroy(b.layer);
    moe_cuda_mem_free(device, MOE_MEM_DEVICE, b.params, sizeof *b.params);
    moe_cuda_mem_free(device, MOE_MEM_DEVICE, b.out, b.out_bytes);
    moe_cuda_mem_free(device, MOE_MEM_DEVICE, b.dev_x, b.x.size() * 2);
    moe_cuda_mem_free(device, MOE_MEM_DEVICE, b.dev_y, b.x.size() * 2);
    moe_cuda_mem_free(device, MOE_MEM_DEVICE, b.dev_ids, b.ids.size() * 4);
    moe_cuda_mem_free(device, MOE_MEM_DEVICE, b.dev_weights, b.weights.size() * 4);
}

int run(struct member *m)
{
    struct moe_device_config config = {static_cast<int>(m->slot), 0, nullptr};
    struct moe_device *device;
    require(moe_cuda_device_open(&config, &device));
    for (const shape &s : shapes)
        if (strncmp(s.name, only, strlen(only)) == 0)
            run_shape(m, device, s);
    moe_cuda_device_close(device);
    return 0;
}

} // namespace

int main(int argc, char **argv)
{
    struct group group;
    int status[MOE_MAX_SLOTS] = {};
    uint32_t slots = argc > 1 ? static_cast<uint32_t>(atoi(argv[1])) : 4;
    if (slots < 1 || slots > MOE_MAX_SLOTS)
        return 2;
    group_set(&moe_backend_cuda, "transport", argc > 2 ? argv[2] : "auto");
    if (argc > 3)
        processors = argv[3];
    fp8 = argc > 4 && strcmp(argv[4], "fp8") == 0;
    if (argc > 5)
        only = argv[5];
    group_start(&group, slots, run, nullptr);
    return group_finish(&group, 300, status) ? 0 : 1;
}
