/* SPDX-License-Identifier: Apache-2.0 */
/* The attention side of a disaggregated model: a decode step of many layers as one captured graph.
 *
 *     attention ENDPOINT [--device N] [--layers 48] [--tokens 32] [--share 0.75] [--steps 50]
 * [--spin]
 *
 * A GEMM stands for attention. Its depth is chosen so that it takes `share` of an MoE layer's time.
 * Its output, x, is in a region; the graph submits x to the worker, waits for y, and goes on with
 * the next layer. No call of the host happens in between. With two microbatches in turns, the GEMM
 * of one runs while the worker computes the layer of the other.
 *
 * The worker needs --allow-client-memory, and best another GPU than `device`. If the model has
 * fewer MoE layers than --layers, they are used again from the first one on.
 *
 * Prints the time of a microbatch and layer, next to max(layer, stub) + 0.2 * rest / layers. `rest`
 * is a step of one microbatch less its layers and its stubs: what going to the worker costs. Exits
 * with 0 if all requests succeeded. Needs compute capability 8.0. */
#include <moe/client_cuda.h>

#include <cuda_bf16.h>
#include <cuda_runtime.h>
#include <mma.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

namespace
{

using std::vector;
namespace wmma = nvcuda::wmma;

constexpr int TILE = 16;         // of wmma, in rows, columns and depth
constexpr int WARPS = 4;         // of a block; each has TILE columns
constexpr int ROW_TILES_MAX = 8; // 128 tokens
constexpr int MICROBATCHES = 2;
constexpr int REQUESTS_MAX = 64; // of a session

struct options {
    const char *endpoint = nullptr;
    int device = 0;
    int layers = 48, tokens = 32, steps = 50;
    double share = 0.75;
    bool spin = false;
};

void must(moe_status st, const char *what)
{
    if (!moe_failed(&st))
        return;
    std::fprintf(stderr, "%s: %s: %s\n", what, moe_code_name(st.code), st.text);
    std::exit(1);
}

void cuda(cudaError_t rc, const char *what)
{
    if (rc == cudaSuccess)
        return;
    std::fprintf(stderr, "%s: %s\n", what, cudaGetErrorString(rc));
    std::exit(1);
}

double median(vector<double> v)
{
    std::sort(v.begin(), v.end());
    return v[v.size() / 2];
}

// ----------------------------------------------------------------------- the stub

/* sum[T, H] = h[T, K] * w[K, H], K = depth; columns of h and rows of w repeat after H. A warp
 * computes TILE columns of all rows. */
__global__ void gemm(const __nv_bfloat16 *h, const __nv_bfloat16 *w, float *sum, int row_tiles,
                     int hidden, int depth)
{
    const int column = (blockIdx.x * WARPS + threadIdx.x / 32) * TILE;
    wmma::fragment<wmma::accumulator, TILE, TILE, TILE, float> acc[ROW_TILES_MAX];
    wmma::fragment<wmma::matrix_a, TILE, TILE, TILE, __nv_bfloat16, wmma::row_major> a;
    wmma::fragment<wmma::matrix_b, TILE, TILE, TILE, __nv_bfloat16, wmma::row_major> b;
    if (column >= hidden)
        return;
#pragma unroll
    for (int r = 0; r < ROW_TILES_MAX; r++)
        wmma::fill_fragment(acc[r], 0.0F);
    for (int k = 0; k < depth; k += TILE) {
        const int at = k % hidden;
        wmma::load_matrix_sync(b, w + static_cast<size_t>(at) * hidden + column, hidden);
#pragma unroll
        for (int r = 0; r < ROW_TILES_MAX; r++) {
            if (r >= row_tiles)
                break;
            wmma::load_matrix_sync(a, h + static_cast<size_t>(r) * TILE * hidden + at, hidden);
            wmma::mma_sync(acc[r], a, b, acc[r]);
        }
    }
#pragma unroll
    for (int r = 0; r < ROW_TILES_MAX; r++)
        if (r < row_tiles)
            wmma::store_matrix_sync(sum + static_cast<size_t>(r) * TILE * hidden + column, acc[r],
                                    hidden, wmma::mem_row_major);
}

/* x = (h + sum) / its root mean square; a block has a row. */
__global__ void normalise(const __nv_bfloat16 *h, const float *sum, __nv_bfloat16 *x, int hidden)
{
    __shared__ float total;
    const size_t row = static_cast<size_t>(blockIdx.x) * hidden;
    float mine = 0;
    if (threadIdx.x == 0)
        total = 0;
    __syncthreads();
    for (int i = threadIdx.x; i < hidden; i += blockDim.x) {
        const float v = __bfloat162float(h[row + i]) + sum[row + i];
        mine += v * v;
    }
    atomicAdd(&total, mine);
    __syncthreads();
    const float scale = rsqrtf(total / static_cast<float>(hidden) + 1e-6F);
    for (int i = threadIdx.x; i < hidden; i += blockDim.x)
        x[row + i] = __float2bfloat16((__bfloat162float(h[row + i]) + sum[row + i]) * scale);
}

/* Small pseudo-random numbers. */
__global__ void fill(__nv_bfloat16 *to, size_t count, uint32_t seed)
{
    const size_t step = static_cast<size_t>(gridDim.x) * blockDim.x;
    for (size_t i = static_cast<size_t>(blockIdx.x) * blockDim.x + threadIdx.x; i < count;
         i += step) {
        uint32_t v = static_cast<uint32_t>(i) * 2654435761U + seed;
        v = (v ^ (v >> 15)) * 2246822519U;
        v ^= v >> 13;
        to[i] = __float2bfloat16((static_cast<float>(v) / 4294967296.0F - 0.5F) / 16.0F);
    }
}

// ---------------------------------------------------------------------- the model

struct microbatch {
    moe_client_session *session;
    moe_stream_session *streams;
    moe_client_region *region;
    __nv_bfloat16 *x, *y; // in the region
    float *sum;
    vector<moe_stream_request *> requests; // one for each layer of the model
};

struct model {
    options o;
    moe_client *client;
    int hidden, rows; // of a microbatch, padded to whole tiles
    __nv_bfloat16 *w;
    int depth; // of the stub
    cudaStream_t stream;
    microbatch mb[MICROBATCHES];
};

/* A session has room for 64 requests, and each layer takes one: a session for each microbatch. */
void open_microbatch(model &m, microbatch &b, uint32_t seed)
{
    const moe_client_info *info = moe_client_get_info(m.client);
    const size_t bytes = static_cast<size_t>(m.rows) * m.hidden * sizeof(__nv_bfloat16);
    moe_stream_session_config how = {};
    how.size = sizeof how;
    how.device = m.o.device;
    how.spin = m.o.spin;
    must(moe_session_open(m.client, nullptr, &b.session), "session");
    must(moe_stream_session_open(b.session, &how, &b.streams), "stream session");
    must(moe_region_alloc(b.streams, "hidden", 2 * bytes, &b.region), "region");
    b.x = static_cast<__nv_bfloat16 *>(moe_region_data(b.region));
    b.y = b.x + static_cast<size_t>(m.rows) * m.hidden;
    cuda(cudaMalloc(&b.sum, 2 * bytes), "cudaMalloc");
    fill<<<64, 256, 0, m.stream>>>(b.y, static_cast<size_t>(m.rows) * m.hidden, seed);
    for (size_t l = 0; l < info->layer_count && l < static_cast<size_t>(m.o.layers); l++) {
        moe_client_session_forward f = {};
        f.size = sizeof f;
        f.layer = info->layers[l].layer;
        f.tokens = static_cast<uint32_t>(m.o.tokens);
        f.hidden = static_cast<uint32_t>(m.hidden);
        f.dtype = MOE_DTYPE_BF16;
        f.x = {b.region, 0};
        f.y = {b.region, bytes};
        moe_stream_request *request = nullptr;
        must(moe_stream_request_create(b.streams, &f, &request), "request");
        b.requests.push_back(request);
    }
}

void open_model(model &m)
{
    moe_client_config config = {};
    config.size = sizeof config;
    config.endpoint = m.o.endpoint;
    must(moe_client_connect(&config, &m.client), "connect");
    const moe_client_info *info = moe_client_get_info(m.client);
    m.hidden = static_cast<int>(info->layers[0].hidden);
    m.rows = (m.o.tokens + TILE - 1) / TILE * TILE;
    if (m.hidden % TILE != 0 || info->layer_count > REQUESTS_MAX) {
        std::fprintf(stderr, "the width is no multiple of %d, or there are over %d layers\n", TILE,
                     REQUESTS_MAX);
        std::exit(1);
    }
    cuda(cudaSetDevice(m.o.device), "cudaSetDevice");
    cuda(cudaStreamCreateWithFlags(&m.stream, cudaStreamNonBlocking), "cudaStreamCreate");
    const size_t weights = static_cast<size_t>(m.hidden) * m.hidden;
    cuda(cudaMalloc(&m.w, weights * sizeof *m.w), "cudaMalloc");
    fill<<<256, 256, 0, m.stream>>>(m.w, weights, 1);
    for (int i = 0; i < MICROBATCHES; i++)
        open_microbatch(m, m.mb[i], 100U + static_cast<uint32_t>(i));
    cuda(cudaStreamSynchronize(m.stream), "fill");
}

void close_model(model &m)
{
    for (microbatch &b : m.mb) {
        for (moe_stream_request *r : b.requests)
            moe_stream_request_destroy(r);
        moe_stream_session_close(b.streams);
        moe_session_close(b.session);
        (void)cudaFree(b.sum);
    }
    (void)cudaFree(m.w);
    (void)cudaStreamDestroy(m.stream);
    moe_client_close(m.client);
}

// ---------------------------------------------------------------------- the graphs

void stub(const model &m, const microbatch &b)
{
    const int blocks = (m.hidden + WARPS * TILE - 1) / (WARPS * TILE);
    gemm<<<blocks, WARPS * 32, 0, m.stream>>>(b.y, m.w, b.sum, m.rows / TILE, m.hidden, m.depth);
    normalise<<<m.rows, 256, 0, m.stream>>>(b.y, b.sum, b.x, m.hidden);
    cuda(cudaGetLastError(), "stub");
}

moe_stream_request *request_of(const microbatch &b, int layer)
{
    return b.requests[static_cast<size_t>(layer) % b.requests.size()];
}

void attend_and_submit(const model &m, const microbatch &b, int layer)
{
    stub(m, b);
    must(moe_session_submit_on_stream(request_of(b, layer), m.stream), "submit");
}

void await(const model &m, const microbatch &b, int layer)
{
    must(moe_session_wait_on_stream(request_of(b, layer), m.stream), "wait");
}

template <typename Work> cudaGraphExec_t capture(const model &m, Work work)
{
    cudaGraph_t graph;
    cudaGraphExec_t exec;
    cuda(cudaStreamBeginCapture(m.stream, cudaStreamCaptureModeThreadLocal), "begin capture");
    work();
    cuda(cudaStreamEndCapture(m.stream, &graph), "end capture");
    cuda(cudaGraphInstantiate(&exec, graph, 0), "instantiate");
    cuda(cudaGraphDestroy(graph), "destroy");
    return exec;
}

/* A decode step with `count` microbatches: while one waits, the next one attends. */
cudaGraphExec_t capture_step(const model &m, int count)
{
    return capture(m, [&] {
        for (int l = 0; l < m.o.layers; l++)
            for (int i = 0; i < count; i++) {
                if (l > 0)
                    await(m, m.mb[i], l - 1);
                attend_and_submit(m, m.mb[i], l);
            }
        for (int i = 0; i < count; i++)
            await(m, m.mb[i], m.o.layers - 1);
    });
}

cudaGraphExec_t capture_stubs(const model &m)
{
    return capture(m, [&] {
        for (int l = 0; l < m.o.layers; l++)
            stub(m, m.mb[0]);
    });
}

/* us of one launch. */
double launch(const model &m, cudaGraphExec_t exec)
{
    static cudaEvent_t begin, end;
    float ms = 0;
    if (begin == nullptr) {
        cuda(cudaEventCreate(&begin), "event");
        cuda(cudaEventCreate(&end), "event");
    }
    cuda(cudaEventRecord(begin, m.stream), "record");
    cuda(cudaGraphLaunch(exec, m.stream), "launch");
    cuda(cudaEventRecord(end, m.stream), "record");
    cuda(cudaEventSynchronize(end), "step");
    cuda(cudaEventElapsedTime(&ms, begin, end), "time");
    return ms * 1e3;
}

/* The worker's layer times of the last step, a layer's mean; us. */
double layer_time(const model &m, int count)
{
    double sum = 0;
    int answers = 0;
    for (int i = 0; i < count; i++)
        for (moe_stream_request *r : m.mb[i].requests) {
            moe_client_session_answer a = {};
            a.size = sizeof a;
            must(moe_stream_request_result(r, &a), "a request");
            sum += static_cast<double>(a.layer_ns) / 1e3;
            answers++;
        }
    return sum / answers;
}

struct times {
    double step, layer; // us, medians
};

times run(const model &m, cudaGraphExec_t exec, int count)
{
    vector<double> step, layer;
    for (int i = 0; i < m.o.steps + 3; i++) {
        const double us = launch(m, exec);
        if (i < 3)
            continue;
        step.push_back(us);
        if (count > 0)
            layer.push_back(layer_time(m, count));
    }
    return {median(step), count > 0 ? median(layer) : 0};
}

double stub_time(model &m, int depth)
{
    m.depth = depth;
    cudaGraphExec_t exec = capture_stubs(m);
    const double us = run(m, exec, 0).step / m.o.layers;
    cuda(cudaGraphExecDestroy(exec), "destroy");
    return us;
}

/* Chooses the depth of the stub, which its time grows with. Returns its time. */
double calibrate(model &m, double wanted)
{
    const double small = stub_time(m, TILE), large = stub_time(m, m.hidden);
    const double slope = (large - small) / (m.hidden - TILE);
    const double depth = slope > 0 ? (wanted - small) / slope : TILE;
    const int tiles = std::max(1, static_cast<int>(depth) / TILE);
    return stub_time(m, tiles * TILE);
}

uint64_t failures(const model &m)
{
    uint64_t sum = 0;
    for (const microbatch &b : m.mb)
        for (const moe_stream_request *r : b.requests) {
            moe_stream_status s;
            cuda(cudaMemcpy(&s, moe_stream_request_status(r), sizeof s, cudaMemcpyDeviceToHost),
                 "status");
            sum += s.failures;
        }
    return sum;
}

int measure(model &m)
{
    m.depth = TILE;
    cudaGraphExec_t alone = capture_step(m, 1);
    const double wanted = run(m, alone, 1).layer * m.o.share;
    cuda(cudaGraphExecDestroy(alone), "destroy");
    const double attention = calibrate(m, wanted);

    alone = capture_step(m, 1);
    cudaGraphExec_t both = capture_step(m, MICROBATCHES);
    const times one = run(m, alone, 1), two = run(m, both, MICROBATCHES);
    const double layers = m.o.layers, rest = one.step - layers * (one.layer + attention);
    const double each = two.step / (MICROBATCHES * layers);
    const double limit = std::max(two.layer, attention) + 0.2 * rest / layers;
    std::printf("%d layers, %d tokens a microbatch, hidden %d, %d steps; us, medians\n", m.o.layers,
                m.o.tokens, m.hidden, m.o.steps);
    std::printf("one microbatch:   step %.1f; layer %.1f, stub %.1f, rest of a layer %.1f\n",
                one.step, one.layer, attention, rest / layers);
    std::printf("two microbatches: step %.1f; layer %.1f; a microbatch and layer %.1f\n", two.step,
                two.layer, each);
    std::printf("max(layer, stub) + 0.2 * rest / layers = %.1f: %s\n", limit,
                each <= limit ? "kept" : "missed");
    cuda(cudaGraphExecDestroy(alone), "destroy");
    cuda(cudaGraphExecDestroy(both), "destroy");
    const uint64_t failed = failures(m);
    if (failed > 0)
        std::fprintf(stderr, "%llu requests failed\n", static_cast<unsigned long long>(failed));
    return failed == 0 ? 0 : 1;
}

bool parse(int argc, char **argv, options &o)
{
    for (int i = 1; i < argc; i++) {
        const char *name = argv[i];
        if (std::strcmp(name, "--spin") == 0)
            o.spin = true;
        else if (name[0] != '-')
            o.endpoint = name;
        else if (i + 1 == argc)
            return false;
        else if (std::strcmp(name, "--device") == 0)
            o.device = std::atoi(argv[++i]);
        else if (std::strcmp(name, "--layers") == 0)
            o.layers = std::atoi(argv[++i]);
        else if (std::strcmp(name, "--tokens") == 0)
            o.tokens = std::atoi(argv[++i]);
        else if (std::strcmp(name, "--steps") == 0)
            o.steps = std::atoi(argv[++i]);
        else if (std::strcmp(name, "--share") == 0)
            o.share = std::atof(argv[++i]);
        else
            return false;
    }
    return o.endpoint != nullptr && o.layers > 0 && o.steps > 0 && o.tokens > 0 &&
           o.tokens <= ROW_TILES_MAX * TILE && o.share > 0;
}

} // namespace

int main(int argc, char **argv)
{
    model m = {};
    if (!parse(argc, argv, m.o)) {
        std::fprintf(stderr, "usage: attention ENDPOINT [--device N] [--layers L] [--tokens T, at "
                             "most 128] [--share S] [--steps N] [--spin]\n");
        return 2;
    }
    open_model(m);
    const int rc = measure(m);
    close_model(m);
    return rc;
}
