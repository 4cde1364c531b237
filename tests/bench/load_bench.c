/* SPDX-License-Identifier: Apache-2.0 */
/* Cost of loading a model into the CPU backend, from files that the page cache has: all layers,
 * with and without digests, and a memcpy of as many bytes, in turn, because the machine's speed
 * drifts. Quantised matrices stay so.
 *
 *     load_bench MODEL_DIRECTORY [ROUNDS [THREADS [ISA]]]
 *
 * Defaults: 5 rounds, all usable cores, the best instruction set (gemm_bench lists them).
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
enum way { COPY, WITHOUT_DIGESTS, WITH_DIGESTS, WAYS };

static const struct moe_backend *const cpu = &moe_backend_cpu;

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
    return cpu->layer_upload(ctx, weight, expert, dtype, data, bytes);
}

static struct moe_status upload_packed(void *ctx, enum moe_weight weight, uint32_t expert,
                                       const struct moe_packed_matrix *matrix)
{
    return cpu->layer_upload_packed(ctx, weight, expert, matrix);
}

/* Loads layer `i` and drops it. `d` NULL: without digests. Returns the bytes read. */
static uint64_t load_layer(const struct moe_model *m, size_t i, struct moe_device *device,
                           struct moe_digester *d, struct moe_digest_table *t)
{
    static struct lists l;
    const struct moe_layer_spec *spec = moe_model_layer(m, i);
    const struct moe_placement p = place(spec, &l);
    struct moe_layer *layer;
    must(cpu->layer_create(device, spec, &p, 0, &layer));
    must(moe_model_stream_layer(m, i, l.experts, spec->experts, upload, NULL, upload_packed, layer,
                                d, NULL, NULL));
    must(cpu->layer_finish(layer));
    if (d != NULL)
        must(moe_digester_finish(d, t));
    cpu->layer_destroy(layer);
    return moe_model_layer_bytes(m, i, l.experts, spec->experts);
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

static uint64_t load_layers(const struct moe_model *m, struct moe_device *device,
                            struct moe_digester *d)
{
    struct moe_digest_table *t;
    uint64_t bytes = 0;
    must(moe_digest_table_create(&t));
    for (size_t i = 0; i < moe_model_layer_count(m); i++)
        bytes += load_layer(m, i, device, d, t);
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

struct bench {
    struct moe_model *model;
    struct moe_device *device;
    struct moe_digester *digester;
    uint64_t bytes; /* of all layers */
    char *buffers;  /* [2][COPY_BYTES] */
};

static struct pass run(const struct bench *b, enum way way)
{
    double cpu_before = cpu_seconds();
    uint64_t begin = moe_clock_ns();
    uint64_t bytes =
        way == COPY ? copy(b->bytes, b->buffers)
                    : load_layers(b->model, b->device, way == WITH_DIGESTS ? b->digester : NULL);
    double seconds = (double)(moe_clock_ns() - begin) / (double)MOE_NS_PER_S;
    double used = cpu_seconds() - cpu_before, gb = (double)bytes / 1e9;
    return (struct pass){gb / seconds, used / seconds, used / gb};
}

static void run_rounds(const struct bench *b, size_t rounds)
{
    static const char *const names[WAYS] = {"memcpy", "without digests", "with digests"};
    double speed[WAYS][ROUNDS_MAX], cores[WAYS][ROUNDS_MAX], spent[WAYS][ROUNDS_MAX];
    double ratio[WAYS][ROUNDS_MAX];
    for (size_t r = 0; r < rounds; r++)
        for (enum way way = 0; way < WAYS; way++) {
            struct pass p = run(b, way);
            speed[way][r] = p.gb_per_s;
            cores[way][r] = p.cores;
            spent[way][r] = p.cpu_s_per_gb;
            ratio[way][r] = p.cpu_s_per_gb / spent[COPY][r];
        }
    for (enum way way = 0; way < WAYS; way++)
        printf("%-16s %6.2f GB/s  %5.2f cores  %6.3f s/GB of CPU time  %6.2f of memcpy's\n",
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

int main(int argc, char **argv)
{
    const struct moe_cpu_isa *isa = find_isa(argc > 4 ? argv[4] : NULL);
    size_t rounds = argc > 2 ? strtoul(argv[2], NULL, 10) : 5;
    uint32_t threads = argc > 3 ? (uint32_t)strtoul(argv[3], NULL, 10) : moe_usable_cores();
    if (argc < 2 || rounds < 1 || rounds > ROUNDS_MAX || threads < 1 || threads > 64 ||
        isa == NULL) {
        fprintf(stderr, "usage: load_bench MODEL_DIRECTORY [ROUNDS [THREADS [ISA]]]\n");
        return 2;
    }
    struct bench b;
    must(moe_model_open(argv[1], &b.model));
    must(moe_cpu_device_open_isa(&(struct moe_device_config){.threads = threads}, isa, &b.device));
    must(moe_model_keep_quantised(b.model, cpu->computes, b.device, false));
    must(moe_digester_create(b.model, threads < 16 ? threads : 16, &b.digester)); /* as a worker */
    b.buffers = malloc((size_t)2 * COPY_BYTES);
    if (b.buffers == NULL)
        return 1;
    memset(b.buffers, 1, (size_t)2 * COPY_BYTES);
    b.bytes = load_layers(b.model, b.device, NULL);
    printf("%.2f GB, %u threads, %s, medians of %zu rounds\n", (double)b.bytes / 1e9, threads,
           isa->name, rounds);
    run_rounds(&b, rounds);
    free(b.buffers);
    moe_digester_destroy(b.digester);
    cpu->device_close(b.device);
    moe_model_close(b.model);
    return 0;
}
