/* SPDX-License-Identifier: Apache-2.0 */
/* Cost of loading a model into a backend, from files that the page cache has: all layers, with and
 * without digests, and a memcpy of as many bytes, in turn, because the machine's speed drifts.
 * Quantised matrices stay so.
 *
 *     load_bench MODEL_DIRECTORY [ROUNDS [THREADS [ISA | cuda [WAY]]]]
 *
 * Defaults: 5 rounds, all usable cores, the best instruction set (gemm_bench lists them). With
 * "cuda" the first GPU loads, and THREADS are those of the digests that it does not compute. WAY
 * begins the name of the only ways to run.
 *
 * A backend that reads for itself also loads through memory, as it must where a file has another
 * form; and without reading anything: what then remains is the bus, kernels and calls.
 *
 * The first pass is not counted: afterwards the files are in the page cache, so that the disk does
 * not hide the cost. Prints medians: the speed, the cores in use, CPU time for each GB, and the
 * ratio of that time to memcpy's, which one thread does between two buffers. Other work on the
 * machine disturbs CPU time less than the speed. */
#include "base/clock.h"
#include "base/cores.h"
#include "cpu/compute/device.h"
#include "model/model.h"
#include "moe/backend.h"
#include "support/median.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>

enum { ROUNDS_MAX = 101, COPY_BYTES = 64 << 20 };
enum way {
    COPY,
    NOTHING_READ,
    MEMORY_WITHOUT_DIGESTS,
    MEMORY_WITH_DIGESTS,
    WITHOUT_DIGESTS,
    WITH_DIGESTS,
    WAYS
};
static const char *const names[WAYS] = {
    "memcpy",          "nothing read", "memory, without digests", "memory, with digests",
    "without digests", "with digests"};

static const struct moe_backend *backend = &moe_backend_cpu;

static void must(struct moe_status st)
{
    if (!moe_failed(&st))
        return;
    fprintf(stderr, "%s: %s\n", moe_code_name(st.code), st.text);
    exit(1);
}

/* All experts of a layer are on slot 0. */
struct lists {
    uint32_t offset[MOE_MAX_EXPERTS + 1], experts[MOE_MAX_EXPERTS];
    uint16_t slot[MOE_MAX_EXPERTS];
};

static struct moe_placement place(const struct moe_layer_spec *spec, struct lists *l)
{
    for (uint32_t e = 0; e < spec->experts; e++) {
        l->offset[e] = l->experts[e] = e;
        l->slot[e] = 0;
    }
    l->offset[spec->experts] = spec->experts;
    return (struct moe_placement){
        .version = 1, .experts = spec->experts, .slots = 1, .offset = l->offset, .slot = l->slot};
}

static struct moe_status upload(void *ctx, enum moe_weight weight, uint32_t expert,
                                enum moe_dtype dtype, const void *data, size_t bytes)
{
    return backend->layer_upload(ctx, weight, expert, dtype, data, bytes);
}

static struct moe_status upload_packed(void *ctx, enum moe_weight weight, uint32_t expert,
                                       const struct moe_packed_matrix *matrix)
{
    return backend->layer_upload_packed(ctx, weight, expert, matrix);
}

static struct moe_status fetch(void *ctx, enum moe_weight weight, uint32_t expert,
                               enum moe_dtype dtype, const struct moe_weight_source *source,
                               size_t bytes)
{
    return backend->layer_fetch(ctx, weight, expert, dtype, source, bytes);
}

static struct moe_status fetch_packed(void *ctx, enum moe_weight weight, uint32_t expert,
                                      const struct moe_packed_source *source)
{
    return backend->layer_fetch_packed(ctx, weight, expert, source);
}

/* moe_weight_source.read */
static struct moe_status read_nothing(const void *ctx, uint64_t at, size_t bytes, void *to)
{
    (void)ctx;
    (void)at;
    (void)bytes;
    (void)to;
    return moe_ok();
}

static struct moe_status fetch_nothing(void *ctx, enum moe_weight weight, uint32_t expert,
                                       enum moe_dtype dtype, const struct moe_weight_source *source,
                                       size_t bytes)
{
    struct moe_weight_source nothing = *source;
    nothing.read = read_nothing;
    return fetch(ctx, weight, expert, dtype, &nothing, bytes);
}

static struct moe_status fetch_nothing_packed(void *ctx, enum moe_weight weight, uint32_t expert,
                                              const struct moe_packed_source *source)
{
    struct moe_packed_source nothing = *source;
    nothing.elements.read = nothing.scales.read = read_nothing;
    return fetch_packed(ctx, weight, expert, &nothing);
}

struct bench {
    struct moe_model *model;
    struct moe_device *device;
    struct moe_digester *digester;
    uint64_t bytes; /* of all layers */
    char *buffers;  /* [2][COPY_BYTES] */
    enum way way;
};

static bool hashes(enum way way)
{
    return way == WITH_DIGESTS || way == MEMORY_WITH_DIGESTS;
}

static bool is_possible(enum way way)
{
    return backend->layer_fetch != NULL || way == COPY || way >= WITHOUT_DIGESTS;
}

/* Loads layer `i` and drops it. Returns the bytes read. */
static uint64_t load_layer(const struct bench *b, size_t i, struct moe_digest_table *t)
{
    static struct lists l;
    const struct moe_layer_spec *spec = moe_model_layer(b->model, i);
    const struct moe_placement p = place(spec, &l);
    struct moe_model_sources sources = {0};
    struct moe_model_sinks sinks = {.weight = upload, .packed = upload_packed, .sources = &sources};
    struct moe_layer *layer;
    bool reads = b->way != NOTHING_READ;
    if (backend->layer_fetch != NULL && (b->way >= WITHOUT_DIGESTS || !reads)) {
        sinks.source = reads ? fetch : fetch_nothing;
        sinks.packed_source = reads ? fetch_packed : fetch_nothing_packed;
    }
    must(backend->layer_create(b->device, spec, &p, 0, &layer));
    sinks.ctx = layer;
    must(moe_model_stream_layer(b->model, i, l.experts, spec->experts, &sinks,
                                hashes(b->way) ? b->digester : NULL, NULL, NULL));
    struct moe_status finished = backend->layer_finish(layer);
    if (reads) /* else the values are those of other weights, which may be wrong as scales */
        must(finished);
    if (hashes(b->way))
        must(moe_digester_finish(b->digester, t));
    backend->layer_destroy(layer);
    moe_model_sources_free(&sources);
    return moe_model_layer_bytes(b->model, i, l.experts, spec->experts);
}

static double cpu_seconds(void)
{
    struct rusage u;
    (void)getrusage(RUSAGE_SELF, &u); /* fails only for wrong arguments */
    return (double)(u.ru_utime.tv_sec + u.ru_stime.tv_sec) +
           (double)(u.ru_utime.tv_usec + u.ru_stime.tv_usec) / 1e6;
}

struct pass {
    double gb_per_s, cores, cpu_s_per_gb; /* cores: CPU time over wall time */
};

static uint64_t load_layers(const struct bench *b)
{
    struct moe_digest_table *t;
    uint64_t bytes = 0;
    must(moe_digest_table_create(&t));
    for (size_t i = 0; i < moe_model_layer_count(b->model); i++)
        bytes += load_layer(b, i, t);
    moe_digest_table_destroy(t);
    return bytes;
}

static uint64_t copy(uint64_t bytes, char *buffers)
{
    for (uint64_t at = 0; at < bytes; at += COPY_BYTES) {
        uint64_t left = bytes - at;
        memcpy(buffers + COPY_BYTES, buffers, left < COPY_BYTES ? (size_t)left : COPY_BYTES);
        __asm__ volatile("" : : "r"(buffers) : "memory"); /* each copy is made */
    }
    return bytes;
}

static struct pass run(struct bench *b, enum way way)
{
    double cpu_before = cpu_seconds();
    uint64_t begin = moe_clock_ns();
    b->way = way;
    uint64_t bytes = way == COPY ? copy(b->bytes, b->buffers) : load_layers(b);
    double seconds = (double)(moe_clock_ns() - begin) / (double)MOE_NS_PER_S;
    double used = cpu_seconds() - cpu_before, gb = (double)bytes / 1e9;
    return (struct pass){gb / seconds, used / seconds, used / gb};
}

/* `only` begins the names of the ways, or is empty. */
static void run_rounds(struct bench *b, size_t rounds, const char *only)
{
    static double speed[WAYS][ROUNDS_MAX], cores[WAYS][ROUNDS_MAX], spent[WAYS][ROUNDS_MAX];
    static double ratio[WAYS][ROUNDS_MAX];
    for (size_t r = 0; r < rounds; r++)
        for (enum way way = 0; way < WAYS; way++) {
            if (!is_possible(way) || (way != COPY && strncmp(names[way], only, strlen(only)) != 0))
                continue;
            struct pass p = run(b, way);
            speed[way][r] = p.gb_per_s;
            cores[way][r] = p.cores;
            spent[way][r] = p.cpu_s_per_gb;
            ratio[way][r] = p.cpu_s_per_gb / spent[COPY][r];
        }
    for (enum way way = 0; way < WAYS; way++)
        if (speed[way][0] > 0)
            printf("%-24s %6.2f GB/s  %5.2f cores  %6.3f s/GB of CPU time  %6.2f of memcpy's\n",
                   names[way], median(speed[way], rounds), median(cores[way], rounds),
                   median(spent[way], rounds), median(ratio[way], rounds));
}

/* NULL: the best. */
static const struct moe_cpu_isa *find_isa(const char *name)
{
    uint32_t count;
    const struct moe_cpu_isa *const *isas = moe_cpu_isa_list(&count);
    for (uint32_t i = 0; name != NULL && i < count; i++)
        if (strcmp(isas[i]->name, name) == 0)
            return isas[i];
    return name == NULL ? isas[count - 1] : NULL;
}

static struct moe_status open_device(const char *isa, uint32_t threads, struct moe_device **device)
{
    const struct moe_device_config config = {.threads = threads};
    if (isa != NULL && strcmp(isa, "cuda") == 0) {
        MOE_TRY(moe_backend_find("cuda", &backend));
        return backend->device_open(&config, device);
    }
    const struct moe_cpu_isa *found = find_isa(isa);
    if (found == NULL)
        return moe_error(MOE_INVALID_ARGUMENT, MOE_REASON_CONFIG_INVALID,
                         "this processor has no instruction set '%.20s'", isa);
    return moe_cpu_device_open_isa(&config, found, device);
}

int main(int argc, char **argv)
{
    size_t rounds = argc > 2 ? strtoul(argv[2], NULL, 10) : 5;
    uint32_t threads = argc > 3 ? (uint32_t)strtoul(argv[3], NULL, 10) : moe_usable_cores();
    if (argc < 2 || rounds < 1 || rounds > ROUNDS_MAX || threads < 1 || threads > 64) {
        fprintf(stderr,
                "usage: load_bench MODEL_DIRECTORY [ROUNDS [THREADS [ISA | cuda [WAY]]]]\n");
        return 2;
    }
    struct bench b = {.way = WITHOUT_DIGESTS};
    struct moe_device_info info;
    must(moe_model_open(argv[1], &b.model));
    must(open_device(argc > 4 ? argv[4] : NULL, threads, &b.device));
    must(moe_model_keep_quantised(b.model, backend->computes, b.device, false));
    must(moe_digester_create(b.model, threads < 16 ? threads : 16, &b.digester)); /* as a worker */
    b.buffers = malloc((size_t)2 * COPY_BYTES);
    if (b.buffers == NULL)
        return 1;
    memset(b.buffers, 1, (size_t)2 * COPY_BYTES);
    b.bytes = load_layers(&b);
    backend->device_info(b.device, &info);
    printf("%.2f GB, %u threads, %s, medians of %zu rounds\n", (double)b.bytes / 1e9, threads,
           info.name, rounds);
    run_rounds(&b, rounds, argc > 5 ? argv[5] : "");
    free(b.buffers);
    moe_digester_destroy(b.digester);
    backend->device_close(b.device);
    moe_model_close(b.model);
    return 0;
}
