/* SPDX-License-Identifier: Apache-2.0 */
/* Memory of other processes on a GPU: what is exported can be imported and copied; a wrong size or
 * descriptor is one typed error, and the device goes on. */
#include "base/clock.h"
#include "cuda/step/backend.h"
#include "support/check.h"

#include <cuda.h>
#include <cuda_runtime_api.h>
#include <fcntl.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

enum { SKIPPED = 77, COUNT = 1000 };

static const struct moe_backend *const backend = &moe_backend_cuda;
static struct moe_device *device;

/* The driver's, found as the product finds them. */
static struct {
    __typeof__(&cuMemCreate) create;
    __typeof__(&cuMemExportToShareableHandle) export;
    __typeof__(&cuMemGetAllocationGranularity) granularity;
    __typeof__(&cuMemRelease) release;
} driver;

static void find(const char *name, void *out)
{
    enum cudaDriverEntryPointQueryResult found;
    assert_int_equal(cudaGetDriverEntryPointByVersion(name, out, 12000, cudaEnableDefault, &found),
                     cudaSuccess);
    assert_int_equal(found, cudaDriverEntryPointSuccess);
}

static int start(void **state)
{
    (void)state;
    const struct moe_device_config config = {0};
    find("cuMemCreate", &driver.create);
    find("cuMemExportToShareableHandle", &driver.export);
    find("cuMemGetAllocationGranularity", &driver.granularity);
    find("cuMemRelease", &driver.release);
    assert_ok(backend->device_open(&config, &device));
    return 0;
}

static int stop(void **state)
{
    (void)state;
    backend->device_close(device);
    return 0;
}

/* New memory of two granules; its descriptor. */
static int export_memory(size_t *granule)
{
    const CUmemAllocationProp of = {.type = CU_MEM_ALLOCATION_TYPE_PINNED,
                                    .requestedHandleTypes =
                                        CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR,
                                    .location = {.type = CU_MEM_LOCATION_TYPE_DEVICE}};
    CUmemGenericAllocationHandle handle;
    int descriptor;
    assert_int_equal(driver.granularity(granule, &of, CU_MEM_ALLOC_GRANULARITY_MINIMUM),
                     CUDA_SUCCESS);
    assert_int_equal(driver.create(&handle, 2 * *granule, &of, 0), CUDA_SUCCESS);
    assert_int_equal(
        driver.export(&descriptor, handle, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0),
        CUDA_SUCCESS);
    assert_int_equal(driver.release(handle), CUDA_SUCCESS); /* the descriptor keeps it */
    return descriptor;
}

static bool same; /* of the last import: the memory is in the GPU */

/* Two imports of one descriptor are the same memory. */
static void imported_memory_is_that_of_the_exporter(void **state)
{
    (void)state;
    size_t granule;
    int descriptor = export_memory(&granule);
    void *a, *b;
    float in[COUNT], out[COUNT];
    for (int i = 0; i < COUNT; i++)
        in[i] = (float)i;
    assert_ok(backend->mem_import(device, descriptor, 2 * granule, &a, &same));
    assert_true(same);
    assert_ok(backend->mem_import(device, descriptor, 2 * granule, &b, &same));
    close(descriptor);
    assert_ok(backend->mem_copy(device, (char *)a + granule, in, sizeof in));
    assert_ok(backend->mem_copy(device, out, (char *)b + granule, sizeof out));
    assert_memory_equal(in, out, sizeof in);
    backend->mem_release(device, a, 2 * granule);
    assert_ok(backend->mem_copy(device, out, (char *)b + granule, sizeof out)); /* b stays */
    backend->mem_release(device, b, 2 * granule);
}

static void a_wrong_size_or_descriptor_is_refused(void **state)
{
    (void)state;
    size_t granule;
    int descriptor = export_memory(&granule);
    void *p;
    assert_refused(backend->mem_import(device, descriptor, 2 * granule + 4096, &p, &same),
                   MOE_INVALID_ARGUMENT, MOE_REASON_REGION_INVALID);
    assert_refused(backend->mem_import(device, descriptor, 0, &p, &same), MOE_INVALID_ARGUMENT,
                   MOE_REASON_REGION_INVALID);
    assert_refused(backend->mem_import(device, descriptor, 64 * granule, &p, &same),
                   MOE_INVALID_ARGUMENT, MOE_REASON_REGION_INVALID);
    int memory = memfd_create("memory", MFD_CLOEXEC), zero = open("/dev/zero", O_RDWR);
    assert_true(memory >= 0 && zero >= 0 && ftruncate(memory, 2 * (off_t)granule) == 0);
    assert_refused(backend->mem_import(device, memory, 2 * granule, &p, &same),
                   MOE_INVALID_ARGUMENT, MOE_REASON_REGION_INVALID);
    assert_refused(backend->mem_import(device, zero, 2 * granule, &p, &same), MOE_INVALID_ARGUMENT,
                   MOE_REASON_REGION_INVALID);
    assert_refused(backend->mem_import(device, 1 << 20, 2 * granule, &p, &same),
                   MOE_INVALID_ARGUMENT, MOE_REASON_REGION_INVALID);
    close(memory);
    close(zero);
    assert_ok(
        backend->mem_import(device, descriptor, 2 * granule, &p, &same)); /* the device goes on */
    backend->mem_release(device, p, 2 * granule);
    close(descriptor);
}

static void registered_memory_is_copied_from(void **state)
{
    (void)state;
    enum { BYTES = 1 << 20 };
    void *there, *p = mmap(NULL, BYTES, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    char out[COUNT];
    assert_ptr_not_equal(p, MAP_FAILED);
    assert_ok(backend->mem_alloc(device, MOE_MEM_DEVICE, BYTES, &there));
    for (int i = 0; i < 3; i++) { /* it can be registered again */
        assert_ok(backend->mem_register(device, p, BYTES));
        memset(p, 40 + i, BYTES);
        assert_ok(backend->mem_copy(device, there, p, BYTES));
        assert_ok(backend->mem_copy(device, out, (char *)there + BYTES - COUNT, COUNT));
        assert_int_equal(out[COUNT - 1], 40 + i);
        assert_refused(backend->mem_register(device, p, BYTES), MOE_FAILED_PRECONDITION,
                       MOE_REASON_UNSUPPORTED);
        backend->mem_unregister(device, p, BYTES);
    }
    backend->mem_free(device, MOE_MEM_DEVICE, there, BYTES);
    munmap(p, BYTES);
}

/* How long what the mapper's thread does takes; printed. */
static void times_of_mapping(void **state)
{
    (void)state;
    size_t granule;
    void *p;
    int descriptor = export_memory(&granule);
    uint64_t begin = moe_clock_ns();
    assert_ok(backend->mem_import(device, descriptor, 2 * granule, &p, &same));
    uint64_t imported = moe_clock_ns();
    backend->mem_release(device, p, 2 * granule);
    print_message("  import of %zu bytes: %.1f us; release: %.1f us\n", 2 * granule,
                  (double)(imported - begin) / 1e3, (double)(moe_clock_ns() - imported) / 1e3);
    close(descriptor);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(imported_memory_is_that_of_the_exporter),
        cmocka_unit_test(a_wrong_size_or_descriptor_is_refused),
        cmocka_unit_test(registered_memory_is_copied_from),
        cmocka_unit_test(times_of_mapping),
    };
    struct moe_status st = backend->available();
    if (moe_failed(&st)) {
        print_message("skipped: %s\n", st.text);
        return SKIPPED;
    }
    return cmocka_run_group_tests(tests, start, stop);
}
