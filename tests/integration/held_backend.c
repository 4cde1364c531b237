/* SPDX-License-Identifier: Apache-2.0 */
/* The CPU backend with faults, as a backend module for tests (held.py). The first word of the file
 * that MOE_TEST_HELD names says what is held now. A file of that name with ".PID" goes before it,
 * for one worker.
 *
 *   stuck      no step ends, and the device does not compute
 *   slow       no step ends, and the device goes on computing
 *   call       no step begins: the call does not return
 *   load       no weight is loaded
 *   backward   no Backward begins
 *   step       no optimizer step begins
 *   stepped    an optimizer step has ended here, and its call does not return
 *   exchange   no exchange begins
 *   exchanged  an exchange has ended here, and its call does not return
 *   missed     as exchanged; then the call fails, as if the last message had not come
 *   take       no tensor of a checkpoint is taken
 *
 * Any other word, or no file: nothing is. Where one of the last seven holds a call, it makes a file
 * with ".PID.at", so that a test can wait for that. */
#include "moe/backend_module.h"
#include "moe/training.h"

#include "base/build.h"
#include "base/clock.h"
#include "base/wait.h"

#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* The file of this process, with an ending. */
static void own_path(char path[PATH_MAX], const char *ending)
{
    const char *held = getenv("MOE_TEST_HELD");
    (void)snprintf(path, PATH_MAX, "%s.%ld%s", held != NULL ? held : "", (long)getpid(), ending);
}

static bool is_held(const char *what)
{
    char word[16] = "", path[PATH_MAX];
    const char *all = getenv("MOE_TEST_HELD");
    own_path(path, "");
    FILE *file = fopen(path, "r");
    if (file == NULL && all != NULL)
        file = fopen(all, "r");
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

/* Waits while `what` is held; true if it was. */
static bool hold(const char *what)
{
    char path[PATH_MAX];
    if (!is_held(what))
        return false;
    own_path(path, ".at");
    FILE *file = fopen(path, "w");
    if (file != NULL)
        (void)fclose(file);
    while (is_held(what))
        pause_briefly();
    return true;
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

static struct moe_status session_exchange(struct moe_session *s, const void *mine, void *all,
                                          size_t bytes)
{
    (void)hold("exchange");
    MOE_TRY(moe_backend_cpu.session_exchange(s, mine, all, bytes));
    (void)hold("exchanged");
    return hold("missed") ? moe_error(MOE_UNAVAILABLE, MOE_REASON_PEER_LOST, "on demand")
                          : moe_ok();
}

static struct moe_status
backward_enqueue(struct moe_session *s, const struct moe_backward_args *args, struct moe_step **out)
{
    (void)hold("backward");
    return moe_backend_cpu.training->backward_enqueue(s, args, out);
}

static struct moe_status optimizer_step(struct moe_session *s, struct moe_trainer *const *trainers,
                                        size_t count, const struct moe_optimizer_args *args,
                                        struct moe_optimizer_result *result)
{
    (void)hold("step");
    struct moe_status st =
        moe_backend_cpu.training->optimizer_step(s, trainers, count, args, result);
    (void)hold("stepped");
    return st;
}

static struct moe_status trainer_write(struct moe_trainer *trainer, const struct moe_train_key *key,
                                       const float *data, size_t bytes)
{
    (void)hold("take");
    return moe_backend_cpu.training->trainer_write(trainer, key, data, bytes);
}

const struct moe_backend_module *moe_backend_module(void)
{
    static struct moe_training training;
    static struct moe_backend backend;
    static struct moe_backend_module module;
    training = *moe_backend_cpu.training;
    training.backward_enqueue = backward_enqueue;
    training.optimizer_step = optimizer_step;
    training.trainer_write = trainer_write;
    backend = moe_backend_cpu;
    backend.training = &training;
    backend.session_exchange = session_exchange;
    backend.step_enqueue = step_enqueue;
    backend.step_wait = step_wait;
    backend.device_progress = device_progress;
    backend.layer_upload = layer_upload;
    module = (struct moe_backend_module){
        .version = moe_build_version(), .commit = moe_build_commit(), .backend = &backend};
    return &module;
}
