/* SPDX-License-Identifier: Apache-2.0 */
/* The CPU backend with faults, as a backend module for test_health.py. The first word of the file
 * that MOE_TEST_HELD names says what is held now:
 *
 *   stuck  no step ends, and the device does not compute
 *   slow   no step ends, and the device goes on computing
 *   call   no step begins: the call does not return
 *   load   no weight is loaded
 *
 * Any other word, or no file: nothing is. */
#include "moe/backend_module.h"

#include "base/build.h"
#include "base/clock.h"
#include "base/wait.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static bool is_held(const char *what)
{
    char word[16] = "";
    const char *path = getenv("MOE_TEST_HELD");
    FILE *file = path != NULL ? fopen(path, "r") : NULL;
    if (file == NULL)
        return false;
    if (fscanf(file, "%15s", word) != 1)
        word[0] = '\0';
    (void)fclose(file);
    return strcmp(word, what) == 0;
}

static void pause_briefly(void)
{
    moe_sleep_until(moe_clock_ns() + 5 * MOE_NS_PER_MS);
}

static struct moe_status step_enqueue(struct moe_session *s, const struct moe_step_args *args,
                                      struct moe_step **out)
{
    while (is_held("call"))
        pause_briefly();
    return moe_backend_cpu.step_enqueue(s, args, out);
}

static struct moe_status step_wait(struct moe_step *step, uint64_t deadline_ns,
                                   struct moe_step_result *result)
{
    while (is_held("stuck") || is_held("slow")) {
        if (moe_clock_ns() >= deadline_ns)
            return moe_error(MOE_DEADLINE_EXCEEDED, MOE_REASON_NONE, "the step still runs");
        pause_briefly();
    }
    return moe_backend_cpu.step_wait(step, deadline_ns, result);
}

static uint64_t device_progress(const struct moe_device *device)
{
    return is_held("slow") ? moe_clock_ns() : moe_backend_cpu.device_progress(device);
}

static struct moe_status layer_upload(struct moe_layer *layer, enum moe_weight weight,
                                      uint32_t expert, enum moe_dtype dtype, const void *data,
                                      size_t bytes)
{
    while (is_held("load"))
        pause_briefly();
    return moe_backend_cpu.layer_upload(layer, weight, expert, dtype, data, bytes);
}

const struct moe_backend_module *moe_backend_module(void)
{
    static struct moe_backend backend;
    static struct moe_backend_module module;
    backend = moe_backend_cpu;
    backend.step_enqueue = step_enqueue;
    backend.step_wait = step_wait;
    backend.device_progress = device_progress;
    backend.layer_upload = layer_upload;
    module = (struct moe_backend_module){
        .version = moe_build_version(), .commit = moe_build_commit(), .backend = &backend};
    return &module;
}
