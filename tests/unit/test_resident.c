/* SPDX-License-Identifier: Apache-2.0 */
/* daemon/models/loader: loads a slot's experts, from memory or by a backend that reads files
 * itself. Refuses a too large share before it allocates memory; a failure leaves no layer. */
#include "base/mutex.h"
#include "base/thread_pool.h"
#include "models/loader.h"
#include "support/check.h"

#include <fcntl.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

/* ----------------------------------------------------------------------- backend
 *
 * The CPU's, with a device that is as full as a test wants it, and with uploads that go on after
 * the call, on a pool. */

static struct {
    uint64_t free_bytes; /* 0: as it is */
    atomic_uint created, destroyed, uploaded, fetched;
    _Atomic uint64_t content; /* sum over all weights of a hash of the received data */
    struct moe_thread_pool *pool;
    struct moe_thread_pool_batch batch; /* of the one layer that is loaded at a time */
    struct moe_mutex lock;              /* one call at a time on a layer */
} fake = {.lock = MOE_MUTEX_INITIALIZER};

struct job {
    struct moe_layer *layer;
    enum moe_weight weight;
    uint32_t expert;
    enum moe_dtype dtype;
    struct moe_weight_source source;
    size_t bytes;
};

static void fake_info(struct moe_device *device, struct moe_device_info *out)
{
    moe_backend_cpu.device_info(device, out);
    if (fake.free_bytes != 0)
        out->free_bytes = fake.free_bytes;
}

static struct moe_status fake_create(struct moe_device *device, const struct moe_layer_spec *spec,
                                     const struct moe_placement *placement, uint32_t slot,
                                     struct moe_layer **out)
{
    atomic_fetch_add(&fake.created, 1);
    return moe_backend_cpu.layer_create(device, spec, placement, slot, out);
}

static uint64_t hash_of(enum moe_weight weight, uint32_t expert, const void *data, size_t bytes)
{
    uint64_t hash = UINT64_C(0xcbf29ce484222325) + weight * 1000003u + expert;
    for (size_t i = 0; i < bytes; i++)
        hash = (hash ^ ((const unsigned char *)data)[i]) * UINT64_C(0x100000001b3);
    return hash;
}

static struct moe_status fake_upload(struct moe_layer *layer, enum moe_weight weight,
                                     uint32_t expert, enum moe_dtype dtype, const void *data,
                                     size_t bytes)
{
    atomic_fetch_add(&fake.uploaded, 1);
    atomic_fetch_add(&fake.content, hash_of(weight, expert, data, bytes));
    return moe_backend_cpu.layer_upload(layer, weight, expert, dtype, data, bytes);
}

static struct moe_status read_and_upload(void *ctx, uint32_t thread, const void *what,
                                         uint32_t item)
{
    const struct job *o = what;
    (void)ctx;
    (void)thread;
    (void)item;
    char *data = malloc(o->bytes);
    if (data == NULL)
        return moe_error(MOE_RESOURCE_EXHAUSTED, MOE_REASON_OUT_OF_MEMORY, "no memory");
    struct moe_status st = o->source.read(o->source.ctx, o->source.at, o->bytes, data);
    moe_mutex_lock(&fake.lock);
    if (!moe_failed(&st))
        st = fake_upload(o->layer, o->weight, o->expert, o->dtype, data, o->bytes);
    moe_mutex_unlock(&fake.lock);
    free(data);
    return st;
}

static struct moe_status fake_fetch(struct moe_layer *layer, enum moe_weight weight,
                                    uint32_t expert, enum moe_dtype dtype,
                                    const struct moe_weight_source *source, size_t bytes)
{
    struct job o = {layer, weight, expert, dtype, *source, bytes};
    atomic_fetch_add(&fake.fetched, 1);
    return moe_thread_pool_submit(fake.pool, &fake.batch, &o, sizeof o, 1);
}

static struct moe_status fake_finish(struct moe_layer *layer)
{
    if (fake.pool != NULL)
        MOE_TRY(moe_thread_pool_wait(fake.pool, &fake.batch));
    return moe_backend_cpu.layer_finish(layer);
}

static void fake_destroy(struct moe_layer *layer)
{
    struct moe_status st =
        fake.pool != NULL ? moe_thread_pool_wait(fake.pool, &fake.batch) : moe_ok();
    (void)st; /* reported before, or no longer relevant */
    atomic_fetch_add(&fake.destroyed, 1);
    moe_backend_cpu.layer_destroy(layer);
}

/* ------------------------------------------------------------------------- fixture */

struct resident {
    struct moe_backend backend;
    struct moe_device *device;
    struct moe_model *model;
    struct moe_loader *loader;
    struct moe_group_assignment assignment;
    uint64_t bytes; /* of all weights */
    char directory[64];
};

static void copy_file(const char *directory, const char *name)
{
    char from[256], to[256], buffer[65536];
    (void)snprintf(from, sizeof from, "%s/%s", MOE_GOLDEN_MODEL, name);
    (void)snprintf(to, sizeof to, "%s/%s", directory, name);
    int in = open(from, O_RDONLY | O_CLOEXEC), out = open(to, O_CREAT | O_WRONLY | O_CLOEXEC, 0600);
    assert_true(in >= 0 && out >= 0);
    for (ssize_t n; (n = read(in, buffer, sizeof buffer)) != 0;) {
        assert_true(n > 0);
        assert_int_equal(write(out, buffer, (size_t)n), n);
    }
    close(in);
    close(out);
}

/* All experts on the only slot. */
static void assign_all(struct resident *r)
{
    size_t count = moe_model_layer_count(r->model);
    struct moe_group_layer *layers = calloc(count, sizeof *layers);
    assert_non_null(layers);
    for (size_t i = 0; i < count; i++) {
        const struct moe_layer_spec *spec = moe_model_layer(r->model, i);
        uint32_t *numbers = calloc(2 * (size_t)spec->experts, sizeof *numbers);
        uint32_t all[MOE_MAX_EXPERTS];
        assert_non_null(numbers);
        for (uint32_t e = 0; e < spec->experts; e++) {
            numbers[e] = 1;
            all[e] = e;
        }
        layers[i] = (struct moe_group_layer){spec->layer, numbers, spec->experts,
                                             numbers + spec->experts, spec->experts};
        r->bytes += moe_model_layer_memory(r->model, i, all, spec->experts);
    }
    r->assignment = (struct moe_group_assignment){
        .slots = 1, .placement_version = 1, .layers = layers, .layer_count = count};
}

static int setup(void **state)
{
    struct resident *r = calloc(1, sizeof *r);
    assert_non_null(r);
    (void)snprintf(r->directory, sizeof r->directory, "/tmp/moed-resident-XXXXXX");
    assert_non_null(mkdtemp(r->directory));
    copy_file(r->directory, "config.json");
    copy_file(r->directory, "model.safetensors");
    assert_ok(moe_model_open(r->directory, &r->model));
    assign_all(r);
    struct moe_device_config config = {.threads = 1};
    assert_ok(moe_backend_cpu.device_open(&config, &r->device));
    r->backend = moe_backend_cpu;
    r->backend.device_info = fake_info;
    r->backend.layer_create = fake_create;
    r->backend.layer_upload = fake_upload;
    r->backend.layer_finish = fake_finish;
    r->backend.layer_destroy = fake_destroy;
    assert_ok(moe_loader_create(&r->backend, r->device, r->model, NULL, &r->loader));
    fake.free_bytes = 0;
    fake.created = fake.destroyed = fake.uploaded = fake.fetched = 0;
    fake.content = 0;
    *state = r;
    return 0;
}

static int teardown(void **state)
{
    struct resident *r = *state;
    char path[128];
    moe_loader_destroy(r->loader);
    assert_int_equal(atomic_load(&fake.created), atomic_load(&fake.destroyed));
    moe_thread_pool_destroy(fake.pool);
    fake.pool = NULL;
    struct moe_device_info info;
    moe_backend_cpu.device_info(r->device, &info);
    assert_int_equal(info.used_bytes, 0);
    moe_backend_cpu.device_close(r->device);
    moe_model_close(r->model);
    for (size_t i = 0; i < r->assignment.layer_count; i++)
        free((void *)(uintptr_t)r->assignment.layers[i].copies);
    free((void *)(uintptr_t)r->assignment.layers);
    static const char *const names[] = {"config.json", "model.safetensors"};
    for (int i = 0; i < 2; i++) {
        (void)snprintf(path, sizeof path, "%s/%s", r->directory, names[i]);
        assert_int_equal(unlink(path), 0);
    }
    assert_int_equal(rmdir(r->directory), 0);
    free(r);
    return 0;
}

/* From here on the backend reads files itself. */
static void let_it_fetch(struct resident *r)
{
    assert_ok(moe_thread_pool_create("readers", 3, read_and_upload, NULL, &fake.pool));
    r->backend.layer_fetch = fake_fetch;
}

static void check_nothing_is_held(const struct resident *r)
{
    uint64_t loaded, total;
    moe_loader_progress(r->loader, &loaded, &total);
    assert_true(loaded == 0 && total == 0);
    assert_null(*moe_loader_placements(r->loader));
    for (size_t i = 0; i < moe_loader_layer_count(r->loader); i++)
        assert_null(moe_loader_layers(r->loader)[i]);
    assert_int_equal(atomic_load(&fake.created), atomic_load(&fake.destroyed));
}

/* --------------------------------------------------------------------------- tests */

static void both_ways_load_the_same_weights(void **state)
{
    struct resident *r = *state;
    uint64_t loaded, total;
    assert_ok(moe_loader_load(r->loader, &r->assignment));
    uint32_t weights = atomic_load(&fake.uploaded);
    uint64_t content = atomic_exchange(&fake.content, 0);
    assert_true(weights > 0);
    assert_int_equal(atomic_load(&fake.fetched), 0);

    let_it_fetch(r);
    assert_ok(moe_loader_reload(r->loader));
    assert_int_equal(atomic_load(&fake.uploaded), 2 * weights);
    assert_int_equal(atomic_load(&fake.fetched), weights); /* this model needs no gathering */
    assert_true(atomic_load(&fake.content) == content);
    moe_loader_progress(r->loader, &loaded, &total);
    assert_int_equal(loaded, total);
    assert_int_equal(total, r->bytes);
}

static void too_large_a_share_is_refused_before_any_allocation(void **state)
{
    struct resident *r = *state;
    fake.free_bytes = r->bytes - 1;
    struct moe_status st = moe_loader_load(r->loader, &r->assignment);
    assert_int_equal(st.code, MOE_RESOURCE_EXHAUSTED);
    assert_int_equal(st.reason, MOE_REASON_OUT_OF_MEMORY);
    assert_non_null(strstr(st.text, "the experts of this slot take"));
    assert_int_equal(atomic_load(&fake.created), 0);
    check_nothing_is_held(r);
    fake.free_bytes = r->bytes;
    assert_ok(moe_loader_load(r->loader, &r->assignment));
}

static void an_error_names_a_file_that_shrinks(void **state)
{
    struct resident *r = *state;
    char path[128];
    let_it_fetch(r);
    (void)snprintf(path, sizeof path, "%s/model.safetensors", r->directory);
    struct stat info;
    assert_int_equal(stat(path, &info), 0);
    assert_int_equal(truncate(path, info.st_size / 2), 0);
    struct moe_status st = moe_loader_load(r->loader, &r->assignment);
    assert_int_equal(st.code, MOE_DATA_LOSS);
    assert_int_equal(st.reason, MOE_REASON_TRUNCATED);
    assert_non_null(strstr(st.text, "tensor model."));
    check_nothing_is_held(r);
}

static void loading_can_be_cancelled(void **state)
{
    struct resident *r = *state;
    let_it_fetch(r);
    moe_loader_cancel(r->loader);
    struct moe_status st = moe_loader_load(r->loader, &r->assignment);
    assert_int_equal(st.code, MOE_ABORTED);
    check_nothing_is_held(r);
}

/* A backend that reads all when the layer finishes, and is cancelled after its first read. */
static struct {
    struct moe_loader *loader;
    struct job jobs[256];
    size_t count, aborted;
} late;

static struct moe_status fetch_later(struct moe_layer *layer, enum moe_weight weight,
                                     uint32_t expert, enum moe_dtype dtype,
                                     const struct moe_weight_source *source, size_t bytes)
{
    assert_true(late.count < sizeof late.jobs / sizeof late.jobs[0]);
    late.jobs[late.count++] = (struct job){layer, weight, expert, dtype, *source, bytes};
    return moe_ok();
}

static struct moe_status read_late(struct moe_layer *layer)
{
    struct moe_status first = moe_ok();
    (void)layer;
    for (size_t i = 0; i < late.count; i++) {
        struct moe_status st = read_and_upload(NULL, 0, &late.jobs[i], 0);
        moe_loader_cancel(late.loader);
        late.aborted += st.code == MOE_ABORTED;
        if (moe_failed(&st) && !moe_failed(&first))
            first = st;
    }
    return first;
}

static void no_source_is_read_after_a_cancellation(void **state)
{
    struct resident *r = *state;
    memset(&late, 0, sizeof late);
    late.loader = r->loader;
    r->backend.layer_fetch = fetch_later;
    r->backend.layer_finish = read_late;
    struct moe_status st = moe_loader_load(r->loader, &r->assignment);
    assert_int_equal(st.code, MOE_ABORTED);
    assert_true(late.count > 2);
    assert_int_equal(late.aborted, late.count - 1);
    assert_int_equal(atomic_load(&fake.uploaded), 1);
    check_nothing_is_held(r);
}

/* As a worker loads for the next view, with a backend that shares nothing with the layers before.
 */
static void the_next_layers_come_while_the_present_ones_serve(void **state)
{
    struct resident *r = *state;
    struct moe_group_assignment next = r->assignment;
    struct moe_loader *other;
    next.slots = 2;
    next.placement_version = 2;
    r->backend.layer_succeed = NULL;
    assert_ok(moe_loader_create(&r->backend, r->device, r->model, NULL, &other));
    assert_ok(moe_loader_load(other, &next));
    uint64_t hash = moe_loader_placement_hash(other);
    moe_loader_destroy(other);

    assert_ok(moe_loader_load(r->loader, &r->assignment));
    struct moe_layer *const *layers = moe_loader_layers(r->loader), *present = layers[0];
    uint64_t present_hash = moe_loader_placement_hash(r->loader);
    next.keep = true;
    struct moe_status st =
        moe_loader_fetch(r->loader, &next, moe_loader_order_fetch(r->loader), 100, NULL, NULL);
    assert_int_equal(st.code, MOE_ABORTED); /* it is not allowed */
    moe_loader_allow_next(r->loader, true);
    fake.free_bytes = r->bytes - 1;
    st = moe_loader_fetch(r->loader, &next, moe_loader_order_fetch(r->loader), 100, NULL, NULL);
    assert_int_equal(st.code, MOE_RESOURCE_EXHAUSTED); /* memory does not hold both */
    assert_true(layers[0] == present && !moe_loader_holds(r->loader, &next));
    fake.free_bytes = 0;
    assert_ok(
        moe_loader_fetch(r->loader, &next, moe_loader_order_fetch(r->loader), 100, NULL, NULL));
    assert_true(layers[0] == present && moe_loader_placement_hash(r->loader) == present_hash);
    assert_true(moe_loader_holds(r->loader, &next) && moe_loader_holds(r->loader, &r->assignment));

    struct moe_group_assignment later = next; /* layers carry the version into steps */
    later.placement_version = 3;
    assert_false(moe_loader_holds(r->loader, &later));
    moe_loader_adopt(r->loader, hash + 1); /* a view of another placement */
    assert_true(layers[0] == present && !moe_loader_holds(r->loader, &next));
    assert_ok(
        moe_loader_fetch(r->loader, &next, moe_loader_order_fetch(r->loader), 100, NULL, NULL));
    assert_ok(moe_loader_load(r->loader, &r->assignment)); /* the change was undone */
    assert_true(layers[0] == present && !moe_loader_holds(r->loader, &next));
    assert_ok(
        moe_loader_fetch(r->loader, &next, moe_loader_order_fetch(r->loader), 100, NULL, NULL));
    moe_loader_adopt(r->loader, hash);
    assert_true(layers[0] != present && layers[0] != NULL);
    assert_true(moe_loader_placement_hash(r->loader) == hash);
    assert_false(moe_loader_holds(r->loader, &r->assignment));
    moe_loader_settle_later(r->loader);
    moe_loader_adopt(r->loader, present_hash); /* it is gone */
    assert_true(moe_loader_placement_hash(r->loader) == hash);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(both_ways_load_the_same_weights, setup, teardown),
        cmocka_unit_test_setup_teardown(too_large_a_share_is_refused_before_any_allocation, setup,
                                        teardown),
        cmocka_unit_test_setup_teardown(an_error_names_a_file_that_shrinks, setup, teardown),
        cmocka_unit_test_setup_teardown(loading_can_be_cancelled, setup, teardown),
        cmocka_unit_test_setup_teardown(no_source_is_read_after_a_cancellation, setup, teardown),
        cmocka_unit_test_setup_teardown(the_next_layers_come_while_the_present_ones_serve, setup,
                                        teardown),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
