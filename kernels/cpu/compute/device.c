/* SPDX-License-Identifier: Apache-2.0 */
/* Opens the CPU as a device: cores, kernels, memory. Accounts for every allocation and caches
 * scratch buffers. It computes nothing. */
#include "cpu/compute/device.h"

#include "base/cores.h"
#include "base/memory.h"
#include "base/mutex.h"
#include "base/sealed.h"
#include "base/size.h"
#include "common/backend_options.h"
#include "cpu/compute/options.h"
#include "cpu/compute/pool.h"

#include <inttypes.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>

enum {
    SCRATCH_HEADER = 4096, /* room of a struct scratch; aligns the memory behind it */
    HUGE_PAGE = 2 << 20,
};

/* Head of every scratch buffer; the caller's memory begins SCRATCH_HEADER bytes later. */
struct scratch {
    struct scratch *next; /* while idle */
    size_t bytes;         /* header included */
};

struct moe_device {
    const struct moe_cpu_isa *isa;
    struct moe_cpu_pool *pool;
    uint32_t threads;
    uint64_t memory_bytes;
    _Atomic uint64_t used_bytes;
    char cpu_name[40];

    struct moe_mutex scratch_lock;
    MOE_GUARDED_BY(scratch_lock)
    struct scratch *idle_scratch; /* buffers that are not in use */
    struct moe_activation_cache activation_cache;
};

/* ---------------------------------------------------------------- open, close */

/* "model name : AMD EPYC 9354 ..." of /proc/cpuinfo; "CPU" if there is no such line. */
static void read_cpu_name(char *name, size_t cap)
{
    snprintf(name, cap, "CPU");
    FILE *f = fopen("/proc/cpuinfo", "re");
    if (f == NULL)
        return;
    char line[256];
    while (fgets(line, sizeof line, f) != NULL) {
        char *colon = strchr(line, ':');
        if (strncmp(line, "model name", 10) != 0 || colon == NULL)
            continue;
        colon[strcspn(colon, "\n")] = '\0';
        snprintf(name, cap, "%.39s", colon + 1 + strspn(colon + 1, " "));
        break;
    }
    fclose(f);
}

struct moe_status moe_cpu_device_open_isa(const struct moe_device_config *config,
                                          const struct moe_cpu_isa *isa, struct moe_device **out)
{
    uint32_t chosen[MOE_CPU_OPTION_COUNT]; /* of scope session */
    MOE_TRY(moe_backend_choose(moe_cpu_options, config->settings, chosen));
    if (config->threads > MOE_CPU_MAX_THREADS)
        return moe_error(MOE_INVALID_ARGUMENT, MOE_REASON_CONFIG_INVALID,
                         "%u compute threads: at most %d", config->threads, MOE_CPU_MAX_THREADS);
    uint32_t threads = config->threads != 0 ? config->threads : moe_usable_cores();
    if (threads > MOE_CPU_MAX_THREADS)
        threads = MOE_CPU_MAX_THREADS;

    struct moe_device *device = calloc(1, sizeof *device);
    if (device == NULL)
        return moe_error(MOE_RESOURCE_EXHAUSTED, MOE_REASON_OUT_OF_MEMORY,
                         "no memory for a device");
    struct moe_status st = moe_cpu_pool_create(threads, &device->pool);
    if (moe_failed(&st)) {
        free(device);
        return st;
    }
    device->isa = isa;
    device->threads = threads;
    device->memory_bytes = (uint64_t)sysconf(_SC_PHYS_PAGES) * (uint64_t)sysconf(_SC_PAGESIZE);
    read_cpu_name(device->cpu_name, sizeof device->cpu_name);
    moe_mutex_init(&device->scratch_lock);
    moe_activation_cache_open(&device->activation_cache, device, moe_cpu_mem_alloc,
                              moe_cpu_mem_free);
    *out = device;
    return moe_ok();
}

struct moe_status moe_cpu_device_open(const struct moe_device_config *config,
                                      struct moe_device **out)
{
    uint32_t count;
    const struct moe_cpu_isa *const *isas = moe_cpu_isa_list(&count);
    return moe_cpu_device_open_isa(config, isas[count - 1], out);
}

void moe_cpu_device_close(struct moe_device *device)
{
    if (device == NULL)
        return;
    moe_activation_cache_close(&device->activation_cache);
    moe_mutex_not_shared(&device->scratch_lock);
    while (device->idle_scratch != NULL) {
        struct scratch *s = device->idle_scratch;
        device->idle_scratch = s->next;
        moe_cpu_mem_free(device, MOE_MEM_DEVICE, s, s->bytes);
    }
    moe_cpu_pool_destroy(device->pool);
    moe_mutex_destroy(&device->scratch_lock);
    free(device);
}

uint64_t moe_cpu_device_progress(const struct moe_device *device)
{
    return moe_cpu_pool_progress(device->pool);
}

void moe_cpu_device_info(struct moe_device *device, struct moe_device_info *out)
{
    snprintf(out->name, sizeof out->name, "%s, %s, %u thread%s", device->cpu_name,
             device->isa->name, device->threads, device->threads == 1 ? "" : "s");
    out->domain[0] = '\0';
    out->memory_bytes = device->memory_bytes;
    out->used_bytes = atomic_load(&device->used_bytes);
    uint64_t available = moe_available_memory(),
             unused = out->memory_bytes > out->used_bytes ? out->memory_bytes - out->used_bytes : 0;
    out->free_bytes = available < unused ? available : unused;
}

const struct moe_cpu_isa *moe_cpu_device_isa(const struct moe_device *device)
{
    return device->isa;
}

struct moe_activation_cache *moe_cpu_device_activation_cache(struct moe_device *device)
{
    return &device->activation_cache;
}

void moe_cpu_parallel(struct moe_device *device, uint32_t items,
                      void (*fn)(void *ctx, uint32_t item), void *ctx)
{
    moe_cpu_pool_run(device->pool, items, fn, ctx);
}

/* --------------------------------------------------------------------- memory */

struct moe_status moe_cpu_device_charge(struct moe_device *device, size_t bytes)
{
    uint64_t used = atomic_load(&device->used_bytes);
    do {
        if (bytes > device->memory_bytes || used > device->memory_bytes - bytes)
            return moe_error(MOE_RESOURCE_EXHAUSTED, MOE_REASON_OUT_OF_MEMORY,
                             "%zu bytes do not fit: %llu of %llu bytes are in use", bytes,
                             (unsigned long long)used, (unsigned long long)device->memory_bytes);
    } while (!atomic_compare_exchange_weak(&device->used_bytes, &used, used + bytes));
    return moe_ok();
}

void moe_cpu_device_discharge(struct moe_device *device, size_t bytes)
{
    uint64_t before = atomic_fetch_sub(&device->used_bytes, bytes);
    MOE_INVARIANT(before >= bytes);
}

struct moe_status moe_cpu_mem_alloc(struct moe_device *device, enum moe_mem kind, size_t bytes,
                                    void **out)
{
    (void)kind; /* one memory for both */
    *out = NULL;
    if (bytes == 0)
        return moe_ok();
    MOE_TRY(moe_cpu_device_charge(device, bytes));
    void *p = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (p == MAP_FAILED) {
        moe_cpu_device_discharge(device, bytes);
        return moe_error(MOE_RESOURCE_EXHAUSTED, MOE_REASON_OUT_OF_MEMORY,
                         "the system refused %zu bytes", bytes);
    }
    if (bytes >= HUGE_PAGE)
        (void)madvise(p, bytes, MADV_HUGEPAGE); /* optional: fewer TLB misses */
    *out = p;
    return moe_ok();
}

void moe_cpu_mem_free(struct moe_device *device, enum moe_mem kind, void *p, size_t bytes)
{
    (void)kind;
    if (p == NULL)
        return;
    MOE_INVARIANT(munmap(p, bytes) == 0);
    moe_cpu_device_discharge(device, bytes);
}

struct moe_status moe_cpu_mem_copy(struct moe_device *device, void *dst, const void *src,
                                   size_t bytes)
{
    (void)device;
    if (bytes != 0)
        memcpy(dst, src, bytes);
    return moe_ok();
}

/* Mapped memory is usable as it is. */
struct moe_status moe_cpu_mem_register(struct moe_device *device, void *p, size_t bytes)
{
    (void)device;
    (void)p;
    (void)bytes;
    return moe_ok();
}

void moe_cpu_mem_unregister(struct moe_device *device, void *p, size_t bytes)
{
    (void)device;
    (void)p;
    (void)bytes;
}

struct moe_status moe_cpu_mem_import(struct moe_device *device, int descriptor, size_t bytes,
                                     void **out, bool *same_gpu)
{
    struct moe_sealed_file file;
    (void)device; /* its owner pays for the memory */
    *same_gpu = false;
    MOE_TRY(moe_sealed_check(descriptor, &file));
    if (file.bytes != bytes)
        return moe_error(MOE_INVALID_ARGUMENT, MOE_REASON_REGION_INVALID,
                         "the memory has %llu bytes, not %zu", (unsigned long long)file.bytes,
                         bytes);
    MOE_TRY(moe_sealed_map(descriptor, bytes, out));
    moe_sealed_populate(*out, bytes);
    return moe_ok();
}

void moe_cpu_mem_release(struct moe_device *device, void *p, size_t bytes)
{
    (void)device;
    moe_sealed_release(p, bytes);
}

/* -------------------------------------------------------------------- scratch */

/* Takes an idle buffer out of the list: the smallest that is large enough, so large buffers remain
 * for large requests; else the largest, else NULL. */
static struct scratch *pop_scratch(struct moe_device *device, size_t bytes)
{
    moe_mutex_lock(&device->scratch_lock);
    struct scratch **best = &device->idle_scratch;
    for (struct scratch **at = best; *at != NULL; at = &(*at)->next) {
        bool fits = (*at)->bytes >= bytes, best_fits = (*best)->bytes >= bytes;
        bool better = best_fits ? (*at)->bytes < (*best)->bytes : (*at)->bytes > (*best)->bytes;
        if (fits == best_fits ? better : fits)
            best = at;
    }
    struct scratch *s = *best;
    if (s != NULL)
        *best = s->next;
    moe_mutex_unlock(&device->scratch_lock);
    return s;
}

static struct moe_status make_scratch(struct moe_device *device, size_t bytes, struct scratch **out)
{
    void *p;
    struct moe_status st = moe_cpu_mem_alloc(device, MOE_MEM_DEVICE, bytes, &p);
    if (st.code == MOE_RESOURCE_EXHAUSTED &&
        moe_activation_cache_give_back(&device->activation_cache))
        st = moe_cpu_mem_alloc(device, MOE_MEM_DEVICE, bytes, &p);
    MOE_TRY(st);
    *out = p;
    (*out)->bytes = bytes;
    return moe_ok();
}

struct moe_status moe_cpu_scratch_take(struct moe_device *device, size_t bytes, void **out)
{
    *out = NULL;
    if (!moe_size_add(bytes, SCRATCH_HEADER, &bytes))
        return moe_error(MOE_RESOURCE_EXHAUSTED, MOE_REASON_OUT_OF_MEMORY, "scratch too large");
    struct scratch *s = pop_scratch(device, bytes);
    if (s != NULL && s->bytes < bytes) {
        moe_cpu_mem_free(device, MOE_MEM_DEVICE, s, s->bytes);
        s = NULL;
    }
    if (s == NULL)
        MOE_TRY(make_scratch(device, bytes, &s));
    *out = (char *)s + SCRATCH_HEADER;
    return moe_ok();
}

void moe_cpu_scratch_give(struct moe_device *device, void *p)
{
    if (p == NULL)
        return;
    struct scratch *s = (struct scratch *)((char *)p - SCRATCH_HEADER);
    moe_mutex_lock(&device->scratch_lock);
    s->next = device->idle_scratch;
    device->idle_scratch = s;
    moe_mutex_unlock(&device->scratch_lock);
}
