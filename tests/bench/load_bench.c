/* SPDX-License-Identifier: Apache-2.0 */
/* Cost of digests while a model is loaded: all layers into the CPU backend, with and without them
 * in turn, because the machine's speed drifts.
 *
 *     load_bench MODEL_DIRECTORY [ROUNDS [THREADS]]    default 5 rounds, all usable cores
 *
 * The first pass is not counted: afterwards the files are in the page cache, so that the disk does
 * not hide the cost. Prints the medians of the speed and of the cores in use, and their ratio. */
#include "base/clock.h"
#include "base/cores.h"
#include "model/model.h"
#include "moe/backend.h"
#include "support/median.h"

#include <stdio.h>
#include <stdlib.h>
#include <sys/resource.h>

enum { ROUNDS_MAX = 101 };

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

/* Loads layer `i` and drops it. `d` NULL: without digests. Returns the bytes read. */
static uint64_t load_layer(const struct moe_model *m, size_t i, struct moe_device *device,
                           struct moe_digester *d, struct moe_digest_table *t)
{
    static struct lists l;
    const struct moe_layer_spec *spec = moe_model_layer(m, i);
    const struct moe_placement p = place(spec, &l);
    struct moe_layer *layer;
    must(cpu->layer_create(device, spec, &p, 0, &layer));
    must(moe_model_stream_layer(m, i, l.experts, spec->experts, upload, NULL, NULL, layer, d, NULL,
                                NULL));
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
    double gb_per_s, cores; /* cores: CPU time over wall time */
};

static struct pass load_all(const struct moe_model *m, struct moe_device *device,
                            struct moe_digester *d)
{
    struct moe_digest_table *t;
    must(moe_digest_table_create(&t));
    double cpu_before = cpu_seconds();
    uint64_t begin = moe_clock_ns(), bytes = 0;
    for (size_t i = 0; i < moe_model_layer_count(m); i++)
        bytes += load_layer(m, i, device, d, t);
    double seconds = (double)(moe_clock_ns() - begin) / (double)MOE_NS_PER_S;
    double used = cpu_seconds() - cpu_before;
    moe_digest_table_destroy(t);
    return (struct pass){(double)bytes / 1e9 / seconds, used / seconds};
}

static void print_line(const char *what, double *speed, double *cores, size_t n)
{
    double gb = median(speed, n), used = median(cores, n);
    printf("%-16s %6.2f GB/s  %5.2f cores  %6.2f GB/s per core\n", what, gb, used, gb / used);
}

int main(int argc, char **argv)
{
    size_t rounds = argc > 2 ? strtoul(argv[2], NULL, 10) : 5;
    uint32_t threads = argc > 3 ? (uint32_t)strtoul(argv[3], NULL, 10) : moe_usable_cores();
    if (argc < 2 || rounds < 1 || rounds > ROUNDS_MAX || threads < 1 || threads > 64) {
        fprintf(stderr, "usage: load_bench MODEL_DIRECTORY [ROUNDS [THREADS]]\n");
        return 2;
    }
    struct moe_model *m;
    struct moe_device *device;
    struct moe_digester *d;
    must(moe_model_open(argv[1], &m));
    must(cpu->device_open(&(struct moe_device_config){.threads = threads}, &device));
    must(moe_digester_create(m, threads < 8 ? threads : 8, &d)); /* as a worker does */
    double speed[2][ROUNDS_MAX], cores[2][ROUNDS_MAX], ratio[ROUNDS_MAX];
    (void)load_all(m, device, NULL);
    for (size_t r = 0; r < rounds; r++) {
        for (size_t with = 0; with < 2; with++) {
            struct pass p = load_all(m, device, with ? d : NULL);
            speed[with][r] = p.gb_per_s;
            cores[with][r] = p.cores;
        }
        ratio[r] = speed[1][r] / speed[0][r];
    }
    print_line("without digests", speed[0], cores[0], rounds);
    print_line("with digests", speed[1], cores[1], rounds);
    printf("ratio            %6.3f (median of %zu rounds), %u threads\n", median(ratio, rounds),
           rounds, threads);
    moe_digester_destroy(d);
    cpu->device_close(device);
    moe_model_close(m);
    return 0;
}
