/* SPDX-License-Identifier: Apache-2.0 */
/* Moves weights through pinned memory with several threads; see weights.h. */
#include "cuda/layer/weights.h"

#include "base/cores.h"

#include <sched.h>
#include <stdlib.h>

enum {
    HALVES = 2,
    LANDING_BYTES = 2 * MOE_CUDA_PIECE_BYTES + 16, /* a piece, and the same in another order */
    LEAST_BYTES = 64 << 10, /* smallest piece but the last; less is not worth a thread */
};

/* Resources of one thread. */
struct hand {
    void *pinned[HALVES];
    cudaEvent_t left[HALVES]; /* the copy from this half is complete */
    cudaEvent_t came;         /* the read into the first half is complete; waits block */
    uint32_t next;            /* half */
    void *landing;            /* device memory for data to convert [LANDING_BYTES] */
};

struct moe_cuda_uploads {
    struct moe_device *device;
    struct moe_thread_pool *pool;
    /* One stream for all: between copies of different streams the copy engine idles for more than
     * ten microseconds. */
    cudaStream_t stream;
    cudaStream_t back; /* for reads, so that they do not wait behind a layer that loads */
    uint32_t hands;
    struct hand hand[MOE_CUDA_UPLOAD_THREADS];
};

/* A weight for the pool. An item is `piece` elements of it. */
struct job {
    struct moe_cuda_weight w;
    struct moe_weight_source source;
    size_t piece;
    float *data; /* not NULL: read the weight back to here; no source */
};
_Static_assert(sizeof(struct job) <= MOE_THREAD_POOL_JOB_BYTES, "a job of the pool");

/* ---------------------------------------------------------------------- pieces */

static bool is_packed(const struct moe_cuda_weight *w)
{
    return w->packed.packing != MOE_CUDA_PACKING_NONE;
}

static size_t element_bytes(const struct job *o)
{
    return is_packed(&o->w) ? 1 : moe_dtype_bytes(o->w.from);
}

/* Elements of one contiguous block of an interleaved weight. */
static size_t block_elements(const struct moe_cuda_weight *w)
{
    return MOE_CUDA_INTERLEAVE * w->columns;
}

/* Whether the copy engine alone can place the weight. */
static bool goes_straight(const struct moe_cuda_weight *w)
{
    return !is_packed(w) && w->from == w->to &&
           (w->order == MOE_CUDA_ROWS_PLAIN ||
            block_elements(w) * moe_dtype_bytes(w->from) <= MOE_CUDA_PIECE_BYTES);
}

static size_t ratio_up(size_t a, size_t b)
{
    return (a + b - 1) / b;
}

/* Elements that must stay together: blocks of interleaved rows, rows of packed weights. */
static size_t unit_elements(const struct moe_cuda_weight *w)
{
    if (is_packed(w))
        return w->by_turns ? 2 * w->columns : w->columns;
    return w->order != MOE_CUDA_ROWS_PLAIN && goes_straight(w) ? block_elements(w) : 1;
}

/* Elements per piece: as many as fit, or fewer, so that each thread gets some; whole units. */
static size_t piece_elements(const struct moe_cuda_weight *w, uint32_t shares)
{
    size_t unit = unit_elements(w);
    size_t unit_bytes = unit * (is_packed(w) ? 1 : moe_dtype_bytes(w->from));
    size_t limit = MOE_CUDA_PIECE_BYTES / unit_bytes, least = ratio_up(LEAST_BYTES, unit_bytes);
    size_t share = ratio_up(ratio_up(w->rows * w->columns, unit), shares);
    share = share > least ? share : least;
    return unit * (share < limit ? share : limit);
}

/* Copies whole blocks of eight rows, skipping the other matrix's blocks; then the rest. */
static struct moe_status copy_interleaved(const struct job *o, const char *from, size_t first,
                                          size_t n, cudaStream_t stream)
{
    size_t row = o->w.columns * element_bytes(o), block = MOE_CUDA_INTERLEAVE * row;
    size_t block_number = first / block_elements(&o->w), blocks = n / block_elements(&o->w);
    char *to =
        (char *)o->w.dst + block_number * 2 * block + (o->w.order == MOE_CUDA_ROWS_UP ? block : 0);
    if (blocks > 0)
        MOE_TRY(MOE_CUDA(cudaMemcpy2DAsync(to, 2 * block, from, block, block, blocks,
                                           cudaMemcpyHostToDevice, stream)));
    size_t rest = n * element_bytes(o) - blocks * block;
    if (rest == 0)
        return moe_ok();
    return MOE_CUDA(cudaMemcpyAsync(to + blocks * 2 * block, from + blocks * block, rest,
                                    cudaMemcpyHostToDevice, stream));
}

static struct moe_status place_part(const struct moe_cuda_weight *w,
                                    const struct moe_cuda_packed_weight *packed, const void *src,
                                    uint32_t first, uint32_t count, cudaStream_t stream)
{
    switch (w->part) {
    case MOE_CUDA_SCALES:
        return moe_cuda_packed_scale(packed, w->format, src, first, count, stream);
    case MOE_CUDA_ZEROS: return moe_cuda_packed_zeros(packed, w->format, src, first, count, stream);
    default: return moe_cuda_packed_place(packed, src, first, count, stream);
    }
}

/* `landing` has `count` rows, from row `first` on, of gate and up by turns. `parted`: as large,
 * with 16 bytes more. */
static struct moe_status place_both(const struct moe_cuda_weight *w, const void *landing,
                                    void *parted, uint32_t first, uint32_t count,
                                    cudaStream_t stream)
{
    struct moe_cuda_packed_weight up = w->packed;
    up.offset = MOE_CUDA_INTERLEAVE;
    uint32_t bytes = (uint32_t)w->columns;
    MOE_TRY(moe_cuda_weights_part(landing, count, bytes, parted, stream));
    MOE_TRY(place_part(w, &w->packed, parted, first / 2, count / 2, stream));
    return place_part(w, &up, (char *)parted + moe_cuda_second_half(count, bytes), first / 2,
                      count / 2, stream);
}

static struct moe_status place_packed(const struct moe_cuda_weight *w, void *landing,
                                      uint32_t first, uint32_t count, cudaStream_t stream)
{
    return w->by_turns ? place_both(w, landing, (char *)landing + MOE_CUDA_PIECE_BYTES, first,
                                    count, stream)
                       : place_part(w, &w->packed, landing, first, count, stream);
}

/* Sends elements [first, first + n) from pinned memory. `landing`: for data to convert. */
static struct moe_status send(const struct job *o, const void *pinned, void *landing, size_t first,
                              size_t n, cudaStream_t stream)
{
    size_t each = element_bytes(o);
    if (goes_straight(&o->w) && o->w.order != MOE_CUDA_ROWS_PLAIN)
        return copy_interleaved(o, pinned, first, n, stream);
    if (goes_straight(&o->w))
        return MOE_CUDA(cudaMemcpyAsync((char *)o->w.dst + first * each, pinned, n * each,
                                        cudaMemcpyHostToDevice, stream));
    MOE_TRY(MOE_CUDA(cudaMemcpyAsync(landing, pinned, n * each, cudaMemcpyHostToDevice, stream)));
    if (is_packed(&o->w))
        return place_packed(&o->w, landing, (uint32_t)(first / o->w.columns),
                            (uint32_t)(n / o->w.columns), stream);
    return moe_cuda_weights_place(&o->w, landing, first, n, stream);
}

/* Yields the core between queries: a wake-up would take longer than most waits. */
static struct moe_status await(cudaEvent_t event)
{
    cudaError_t rc;
    while ((rc = cudaEventQuery(event)) == cudaErrorNotReady)
        (void)sched_yield();
    return MOE_CUDA(rc);
}

/* ----------------------------------------------------------------- reading back */

/* Copies an item back. Interleaved rows: whole blocks, then the rest after the last one. */
static struct moe_status copy_back(const struct job *o, size_t first, size_t n, void *pinned,
                                   cudaStream_t stream)
{
    size_t each = moe_dtype_bytes(o->w.to), block = block_elements(&o->w) * each;
    const char *from = (const char *)o->w.dst + first * each;
    if (o->w.order == MOE_CUDA_ROWS_PLAIN)
        return MOE_CUDA(cudaMemcpyAsync(pinned, from, n * each, cudaMemcpyDeviceToHost, stream));
    size_t blocks = n * each / block, rest = n * each - blocks * block;
    from += first * each + (o->w.order == MOE_CUDA_ROWS_UP ? block : 0);
    if (blocks > 0)
        MOE_TRY(MOE_CUDA(cudaMemcpy2DAsync(pinned, block, from, 2 * block, block, blocks,
                                           cudaMemcpyDeviceToHost, stream)));
    if (rest == 0)
        return moe_ok();
    return MOE_CUDA(cudaMemcpyAsync((char *)pinned + blocks * block, from + blocks * 2 * block,
                                    rest, cudaMemcpyDeviceToHost, stream));
}

/* The same for a packed weight. Its values go through `landing`. */
static struct moe_status copy_values(const struct job *o, size_t first, size_t n, void *landing,
                                     void *pinned, cudaStream_t stream)
{
    MOE_TRY(moe_cuda_packed_read(&o->w.packed, first, n, MOE_DTYPE_F32, landing, stream));
    return MOE_CUDA(
        cudaMemcpyAsync(pinned, landing, n * sizeof(float), cudaMemcpyDeviceToHost, stream));
}

static enum moe_dtype read_dtype(const struct moe_cuda_weight *w)
{
    return is_packed(w) ? MOE_DTYPE_F32 : w->to;
}

static void put_away(const struct job *o, const void *pinned, size_t first, size_t n)
{
    const uint16_t *half = pinned;
    if (read_dtype(&o->w) == MOE_DTYPE_F32)
        memcpy(o->data + first, pinned, n * sizeof *o->data);
    else
        for (size_t i = 0; i < n; i++)
            o->data[first + i] = moe_bf16_to_f32(half[i]);
}

static struct moe_status bring(const struct moe_cuda_uploads *u, const struct hand *hand,
                               const struct job *o, uint32_t item)
{
    size_t total = o->w.rows * o->w.columns, first = item * o->piece;
    size_t n = total - first < o->piece ? total - first : o->piece;
    void *pinned = hand->pinned[0];
    MOE_TRY(moe_cuda_device_use(u->device));
    /* An upload may still use the first half, and the landing buffer. */
    for (int i = 0; i < HALVES; i++)
        MOE_TRY(MOE_CUDA(cudaEventSynchronize(hand->left[i])));
    struct moe_status st = is_packed(&o->w)
                               ? copy_values(o, first, n, hand->landing, pinned, u->back)
                               : copy_back(o, first, n, pinned, u->back);
    struct moe_status recorded = MOE_CUDA(cudaEventRecord(hand->came, u->back));
    struct moe_status came = MOE_CUDA(cudaEventSynchronize(hand->came));
    MOE_TRY(st);
    MOE_TRY(recorded);
    MOE_TRY(came);
    put_away(o, pinned, first, n);
    return st;
}

/* moe_thread_pool_fn */
static struct moe_status carry(void *ctx, uint32_t thread, const void *what, uint32_t item)
{
    struct moe_cuda_uploads *u = ctx;
    const struct job *o = what;
    struct hand *hand = &u->hand[thread];
    if (o->data != NULL)
        return bring(u, hand, o, item);
    size_t total = o->w.rows * o->w.columns, first = item * o->piece;
    size_t n = total - first < o->piece ? total - first : o->piece;
    uint32_t half = hand->next;
    hand->next = (half + 1) % HALVES;
    MOE_TRY(moe_cuda_device_use(u->device));
    MOE_TRY(await(hand->left[half]));
    MOE_TRY(o->source.read(o->source.ctx, o->source.at + first * element_bytes(o),
                           n * element_bytes(o), hand->pinned[half]));
    struct moe_status sent = send(o, hand->pinned[half], hand->landing, first, n, u->stream);
    /* Also after a failure: an enqueued copy may still read this half. */
    struct moe_status recorded = MOE_CUDA(cudaEventRecord(hand->left[half], u->stream));
    return moe_failed(&sent) ? sent : recorded;
}

/* ----------------------------------------------------------------------- calls */

static struct moe_status give(struct moe_device *device, const struct moe_cuda_weight *w,
                              const struct moe_weight_source *source, uint32_t shares,
                              struct moe_thread_pool_batch *batch)
{
    size_t total = w->rows * w->columns;
    if (total == 0)
        return moe_ok();
    struct job o = {.w = *w, .source = *source, .piece = piece_elements(w, shares)};
    size_t items = ratio_up(total, o.piece);
    MOE_INVARIANT(items <= UINT32_MAX); /* at least 64 KiB each, except the last */
    return moe_thread_pool_submit(device->uploads->pool, batch, &o, sizeof o, (uint32_t)items);
}

static struct moe_status copy_memory(const void *ctx, uint64_t at, size_t bytes, void *to)
{
    memcpy(to, (const char *)ctx + at, bytes);
    return moe_ok();
}

struct moe_status moe_cuda_weights_put(struct moe_device *device, const struct moe_cuda_weight *w,
                                       const void *data)
{
    struct moe_thread_pool_batch batch = {0};
    struct moe_weight_source memory = {.read = copy_memory, .ctx = data};
    MOE_TRY(give(device, w, &memory, device->uploads->hands, &batch));
    return moe_thread_pool_wait(device->uploads->pool, &batch);
}

struct moe_status moe_cuda_weights_fetch(struct moe_device *device, const struct moe_cuda_weight *w,
                                         const struct moe_weight_source *source,
                                         struct moe_thread_pool_batch *batch)
{
    return give(device, w, source, 1, batch);
}

struct moe_status moe_cuda_weights_finish(struct moe_device *device,
                                          struct moe_thread_pool_batch *batch)
{
    struct moe_status st = moe_thread_pool_wait(device->uploads->pool, batch);
    MOE_TRY(moe_cuda_device_use(device));
    struct moe_status ended = MOE_CUDA(cudaStreamSynchronize(device->uploads->stream));
    return moe_failed(&st) ? st : ended;
}

struct moe_status moe_cuda_weights_read(struct moe_device *device, const struct moe_cuda_weight *w,
                                        float *data)
{
    _Static_assert((size_t)MOE_CUDA_INTERLEAVE * MOE_MAX_HIDDEN * sizeof(float) <=
                       MOE_CUDA_READ_BYTES,
                   "a piece holds a block of rows");
    struct moe_thread_pool_batch batch = {0};
    struct job o = {.w = *w, .data = data};
    bool plain = is_packed(w) || w->order == MOE_CUDA_ROWS_PLAIN;
    size_t unit = plain ? 1 : block_elements(w);
    size_t total = w->rows * w->columns;
    if (total == 0)
        return moe_ok();
    o.piece = MOE_CUDA_READ_BYTES / (unit * moe_dtype_bytes(read_dtype(w))) * unit;
    size_t items = ratio_up(total, o.piece);
    if (items > UINT32_MAX)
        return moe_error(MOE_OUT_OF_RANGE, MOE_REASON_TOO_LARGE, "a tensor is too large");
    MOE_TRY(moe_thread_pool_submit(device->uploads->pool, &batch, &o, sizeof o, (uint32_t)items));
    return moe_thread_pool_wait(device->uploads->pool, &batch);
}

/* ------------------------------------------------------------------ open, close */

static struct moe_status open_hand(struct moe_device *device, struct hand *hand)
{
    for (int i = 0; i < HALVES; i++) {
        MOE_TRY(MOE_CUDA(cudaEventCreateWithFlags(&hand->left[i], cudaEventDisableTiming)));
        MOE_TRY(moe_cuda_mem_alloc(device, MOE_MEM_HOST, MOE_CUDA_PIECE_BYTES, &hand->pinned[i]));
    }
    MOE_TRY(MOE_CUDA(
        cudaEventCreateWithFlags(&hand->came, cudaEventDisableTiming | cudaEventBlockingSync)));
    return moe_cuda_mem_alloc(device, MOE_MEM_DEVICE, LANDING_BYTES, &hand->landing);
}

static void close_hand(struct moe_device *device, struct hand *hand)
{
    for (int i = 0; i < HALVES; i++) {
        if (hand->left[i] != NULL)
            (void)cudaEventDestroy(hand->left[i]);
        moe_cuda_mem_free(device, MOE_MEM_HOST, hand->pinned[i], MOE_CUDA_PIECE_BYTES);
    }
    if (hand->came != NULL)
        (void)cudaEventDestroy(hand->came);
    moe_cuda_mem_free(device, MOE_MEM_DEVICE, hand->landing, LANDING_BYTES);
}

struct moe_status moe_cuda_uploads_open(struct moe_device *device)
{
    struct moe_cuda_uploads *u = calloc(1, sizeof *u);
    if (u == NULL)
        return moe_error(MOE_RESOURCE_EXHAUSTED, MOE_REASON_OUT_OF_MEMORY,
                         "no memory for a device");
    uint32_t cores = moe_usable_cores();
    u->device = device;
    u->hands = cores < MOE_CUDA_UPLOAD_THREADS ? cores : MOE_CUDA_UPLOAD_THREADS;
    device->uploads = u;
    MOE_TRY(MOE_CUDA(cudaStreamCreateWithFlags(&u->stream, cudaStreamNonBlocking)));
    MOE_TRY(MOE_CUDA(cudaStreamCreateWithFlags(&u->back, cudaStreamNonBlocking)));
    for (uint32_t i = 0; i < u->hands; i++)
        MOE_TRY(open_hand(device, &u->hand[i]));
    return moe_thread_pool_create("moe-upload", u->hands, carry, u, &u->pool);
}

void moe_cuda_uploads_close(struct moe_device *device)
{
    struct moe_cuda_uploads *u = device->uploads;
    if (u == NULL)
        return;
    moe_thread_pool_destroy(u->pool);
    cudaStream_t streams[] = {u->stream, u->back};
    for (size_t i = 0; i < sizeof streams / sizeof *streams; i++)
        if (streams[i] != NULL) {
            (void)cudaStreamSynchronize(streams[i]);
            (void)cudaStreamDestroy(streams[i]);
        }
    for (uint32_t i = 0; i < u->hands; i++)
        close_hand(device, &u->hand[i]);
    free(u);
    device->uploads = NULL;
}
