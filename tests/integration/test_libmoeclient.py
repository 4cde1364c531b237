# SPDX-License-Identifier: Apache-2.0
"""A third-party C program, built against the installed libmoeclient, uses a real group.

The program below is compiled with the flags of pkg-config only. It sends one recorded input in
three ways (blocking; many at once, spread over the workers; on a stream) and writes the answers. A
second program trains one step. C++ can use the header too. """

import os
import re
import shutil
import subprocess
import tempfile
import unittest

import numpy as np

from group import BUILD, golden_cases, group, main, relative_error
from training import golden_gradients, training_group

FAMILY = "mixtral"
CALLS = 32

PROGRAM = r"""
#include <moe/client.h>

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { CALLS = 32 };

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t change = PTHREAD_COND_INITIALIZER;
static int left;

static void finish(const struct moe_status *st)
{
    if (moe_failed(st)) {
        fprintf(stderr, "%s %s: %s\n", moe_code_name(st->code), moe_reason_name(st->reason),
                st->text);
        exit(1);
    }
}

static void on_done(void *ctx, struct moe_client_forward *f, struct moe_status st)
{
    (void)ctx;
    (void)f;
    finish(&st);
    pthread_mutex_lock(&lock);
    left--;
    pthread_cond_signal(&change);
    pthread_mutex_unlock(&lock);
}

static void wait_for_all(void)
{
    pthread_mutex_lock(&lock);
    while (left > 0)
        pthread_cond_wait(&change, &lock);
    pthread_mutex_unlock(&lock);
}

/* program ENDPOINT LAYER TOKENS HIDDEN: F32 rows from stdin, 1 + 2 * CALLS answers to stdout */
int main(int argc, char **argv)
{
    if (argc != 5)
        return 2;
    struct moe_client_forward f[1 + 2 * CALLS];
    uint32_t tokens = (uint32_t)atoi(argv[3]), hidden = (uint32_t)atoi(argv[4]);
    size_t bytes = (size_t)tokens * hidden * sizeof(float);
    void *x = malloc(bytes);
    if (x == NULL || fread(x, 1, bytes, stdin) != bytes)
        return 2;
    for (int i = 0; i < 1 + 2 * CALLS; i++) {
        MOE_CLIENT_INIT(&f[i]);
        f[i].layer = (uint32_t)atoi(argv[2]);
        f[i].tokens = tokens;
        f[i].hidden = hidden;
        f[i].dtype = MOE_DTYPE_F32;
        f[i].x = x;
        f[i].y = malloc(bytes);
        if (f[i].y == NULL)
            return 2;
    }

    struct moe_client_config config = {.size = sizeof config, .endpoint = argv[1], .spread = true,
                                       .spread_tokens = 8};
    struct moe_client *c;
    struct moe_client_stream *s;
    struct moe_status st = moe_client_connect(&config, &c);
    finish(&st);
    st = moe_client_forward(c, &f[0]);
    finish(&st);
    left = CALLS;
    for (int i = 1; i <= CALLS; i++)
        moe_client_forward_async(c, &f[i], on_done, NULL);
    wait_for_all();
    st = moe_client_stream_open(c, &s);
    finish(&st);
    left = CALLS;
    for (int i = 1 + CALLS; i <= 2 * CALLS; i++)
        moe_client_stream_forward(s, &f[i], on_done, NULL);
    wait_for_all();
    moe_client_stream_close(s);
    moe_client_close(c);

    for (int i = 0; i < 1 + 2 * CALLS; i++) {
        fwrite(f[i].y, 1, bytes, stdout);
        free(f[i].y);
    }
    free(x);
    return fflush(stdout) == 0 ? 0 : 1;
}
"""

TRAINER = r"""
#include <moe/client_training.h>

#include <stdio.h>
#include <stdlib.h>

static void require(struct moe_status st)
{
    if (moe_failed(&st)) {
        fprintf(stderr, "%s %s: %s\n", moe_code_name(st.code), moe_reason_name(st.reason),
                st.text);
        exit(1);
    }
}

/* program ENDPOINT OTHER LAYER TOKENS HIDDEN: reads x and dy from stdin. Writes two gradients of
 * one micro batch: that of the retained pass, and the answer of the OTHER worker. */
int main(int argc, char **argv)
{
    static float x[1 << 18], dy[1 << 18], y[1 << 18], dx[1 << 18];
    static int32_t ids[1 << 14];
    static float weights[1 << 14];
    struct moe_client *c[2];
    if (argc != 6)
        return 2;
    uint32_t tokens = (uint32_t)atoi(argv[4]), hidden = (uint32_t)atoi(argv[5]);
    size_t count = (size_t)tokens * hidden;
    if (count > 1 << 18 || fread(x, 4, count, stdin) != count ||
        fread(dy, 4, count, stdin) != count)
        return 2;
    for (int i = 0; i < 2; i++) {
        struct moe_client_config config = {.size = sizeof config, .endpoint = argv[1 + i]};
        require(moe_client_connect(&config, &c[i]));
    }
    struct moe_client_train_state state = {.size = sizeof state};
    require(moe_client_get_train_state(c[0], 0, &state));
    struct moe_client_forward f = {.size = sizeof f, .layer = (uint32_t)atoi(argv[3]),
                                   .tokens = tokens,
                                   .hidden = hidden, .dtype = MOE_DTYPE_F32, .x = x, .y = y,
                                   .topk_ids = ids, .topk_weights = weights,
                                   .retain_session = "c", .retain_micro_batch_id = 1};
    require(moe_client_forward(c[0], &f));
    struct moe_client_backward b = {.size = sizeof b, .layer = f.layer, .tokens = tokens,
                                    .hidden = hidden,
                                    .dtype = MOE_DTYPE_F32, .session = "c", .micro_batch_id = 1,
                                    .weights_version = f.answered_weights_version,
                                    .lineage = state.lineage, .dy = dy, .x = x, .topk_ids = ids,
                                    .retained = true, .dx = dx};
    require(moe_client_backward(c[0], &b));
    if (!f.retained || !b.used_retained || b.repeated || f.retained_activations ||
        b.used_activations)
        return 3;
    fwrite(dx, 4, count, stdout);
    struct moe_client_forward large = f; /* in a separate step; the worker retains gate and up */
    large.tokens = 256;
    large.retain_micro_batch_id = 2;
    require(moe_client_forward(c[0], &large));
    if (!large.retained || !large.retained_activations)
        return 7;
    b.retained = false;
    require(moe_client_backward(c[1], &b));
    if (!b.repeated)
        return 4;
    fwrite(dx, 4, count, stdout);
    for (int i = 0; i < 2; i++) {
        struct moe_client_optimizer_step s = {.size = sizeof s,
                                              .change = {.step_id = 1, .session = "c",
                                                         .lineage = state.lineage},
                                              .learning_rate = 1e-3, .expected_backwards = 1};
        require(moe_client_optimizer_step(c[i], &s));
        if (s.backwards != 1 || s.change.repeated != (i == 1) || s.weights_version != 2)
            return 5;
        s.change.session = NULL; /* the client's session; it has not made this change */
        struct moe_status st = moe_client_optimizer_step(c[i], &s);
        if (st.reason != MOE_REASON_ID_REUSED)
            return 8;
    }
    struct moe_client_frozen frozen = {.router = true};
    struct moe_client_change change = {.step_id = 2};
    require(moe_client_set_frozen(c[0], &change, frozen));
    change.step_id = 3;
    uint32_t dropped = 9;
    require(moe_client_zero_grad(c[0], &change, &dropped));
    do /* the other worker may finish a moment later */
        require(moe_client_get_train_state(c[1], 0, &state));
    while (state.last_step_id < 3);
    if (dropped != 0 || state.last_step_id != 3 || !state.frozen.router || state.steps != 1 ||
        state.unsaved_steps != 1 || state.saving[0] != 0 || state.problem[0] != 0)
        return 6;
    moe_client_close(c[0]);
    moe_client_close(c[1]);
    return fflush(stdout) == 0 ? 0 : 1;
}
"""


def sanitizer_flags():
    with open(os.path.join(BUILD, "CMakeCache.txt")) as file:
        on = "MOE_SANITIZE:BOOL=ON" in file.read()
    return ["-fsanitize=address,undefined"] if on else []


class InstalledLibrary(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.folder = tempfile.mkdtemp(prefix="moed-test-")
        subprocess.run(["cmake", "--install", os.path.join(BUILD, "client"), "--prefix",
                        cls.path("usr")], check=True, stdout=subprocess.DEVNULL)
        for where, folders, _ in os.walk(cls.path("usr")):
            if "pkgconfig" in folders:
                cls.libraries = where

    @classmethod
    def tearDownClass(cls):
        shutil.rmtree(cls.folder, ignore_errors=True)

    @classmethod
    def path(cls, name):
        return os.path.join(cls.folder, name)

    def flags(self):
        environment = dict(os.environ, PKG_CONFIG_PATH=os.path.join(self.libraries, "pkgconfig"))
        return subprocess.run(["pkg-config", "--cflags", "--libs", "moeclient"], env=environment,
                              check=True, stdout=subprocess.PIPE, text=True).stdout.split()

    def test_a_c_program(self):
        with open(self.path("app.c"), "w") as file:
            file.write(PROGRAM)
        subprocess.run([
            "cc", "-std=c11", "-Wall", "-Wextra", "-Werror",
            self.path("app.c"), "-o",
            self.path("app"), "-pthread", *sanitizer_flags(), *self.flags()
        ],
                       check=True)
        environment = dict(os.environ, LD_LIBRARY_PATH=self.libraries)
        layer, tokens, x, want = next(case for case in golden_cases(FAMILY) if case[1] == 37)
        with group(FAMILY, 3) as g:
            done = subprocess.run(
                [self.path("app"), g.endpoint, str(layer), str(tokens), str(x.shape[1])],
                input=np.ascontiguousarray(x).tobytes(), stdout=subprocess.PIPE, env=environment,
                timeout=60)
        self.assertEqual(done.returncode, 0)
        answers = np.frombuffer(done.stdout, np.float32).reshape(1 + 2 * CALLS, *want.shape)
        errors = [relative_error(y, want) for y in answers]
        print("    %d answers, largest error %.1e" % (len(errors), max(errors)))
        self.assertLessEqual(max(errors), 1e-5)

    def test_a_c_program_that_trains(self):
        with open(self.path("trainer.c"), "w") as file:
            file.write(TRAINER)
        subprocess.run(["cc", "-std=c11", "-Wall", "-Wextra", "-Werror", self.path("trainer.c"),
                        "-o", self.path("trainer"), *sanitizer_flags(), *self.flags()], check=True)
        environment = dict(os.environ, LD_LIBRARY_PATH=self.libraries)
        layer, tokens, x, dy, want = next(case for case in golden_gradients(FAMILY)
                                          if case[1] == 37)
        with training_group(FAMILY, 2) as g:
            done = subprocess.run(
                [self.path("trainer"), *g.endpoints, str(layer), str(tokens), str(x.shape[1])],
                input=np.ascontiguousarray(x).tobytes() + np.ascontiguousarray(dy).tobytes(),
                stdout=subprocess.PIPE, env=environment, timeout=60)
        self.assertEqual(done.returncode, 0)
        one, other = np.frombuffer(done.stdout, np.float32).reshape(2, *want.shape)
        print("    dx %.1e" % relative_error(one, want))
        self.assertLessEqual(relative_error(one, want), 1e-5)
        np.testing.assert_array_equal(other, one)

    def test_cxx_can_include_and_link(self):
        with open(self.path("app.cc"), "w") as file:
            file.write("""#include <moe/client_training.h>
                #include <moe/regions_device.h>
                int main()
                {
                    moe_client *c = nullptr;
                    moe_client_config config;
                    MOE_CLIENT_INIT(&config);
                    config.endpoint = "127.0.0.1:1";
                    moe_status st = moe_client_connect(&config, &c);
                    return st.code == MOE_UNAVAILABLE && moe_code_name(st.code) ? 0 : 1;
                }""")
        subprocess.run(["c++", "-Wall", "-Wextra", "-Werror", self.path("app.cc"), "-o",
                        self.path("appcc"), *sanitizer_flags(), *self.flags()], check=True)
        environment = dict(os.environ, LD_LIBRARY_PATH=self.libraries)
        subprocess.run([self.path("appcc")], check=True, env=environment, timeout=60)

    def test_headers_include_only_each_other_and_the_standard_library(self):
        root = self.path("usr/include/moed")
        headers = {os.path.relpath(os.path.join(where, name), root)
                   for where, _, names in os.walk(root) for name in names if name.endswith(".h")}
        self.assertEqual(headers - {"moe/client_cuda.h"},  # where CUDA is
                         {"moe/client.h", "moe/client_training.h", "moe/regions.h",
                          "moe/regions_device.h", "moe/status.h", "moe/types.h"})
        for header in headers:
            with open(os.path.join(root, header)) as file:
                own = set(re.findall(r'#include "(.*)"', file.read()))
            self.assertLessEqual(own, headers)
        self.assertIn("libmoeclient.so.1", os.listdir(self.libraries))

    def test_files_that_headers_refer_to_are_installed(self):
        for name in ("client.h", "client_training.h", "regions.h", "regions_device.h"):
            with open(self.path("usr/include/moed/moe/" + name)) as file:
                for proto in re.findall(r"moe/v1/\w+\.proto", file.read()):
                    self.assertTrue(os.path.exists(self.path("usr/include/moed/" + proto)), proto)

    def test_only_the_interface_is_exported(self):
        library = os.path.join(self.libraries, "libmoeclient.so")
        names = [line.split()[-1].split("@")[0] for line in subprocess.run(
            ["nm", "-D", "--defined-only", library], check=True, stdout=subprocess.PIPE,
            text=True).stdout.splitlines()]
        public = ("moe_client_", "moe_code_name", "moe_reason_", "MOECLIENT_")
        self.assertIn("moe_client_forward", names)
        # By name: functions of other rooms begin with moe_region_, too.
        shared = ["moe_region_" + verb for verb in (
            "adopt", "bytes", "create", "data", "destroy")] + ["moe_session_" + verb for verb in (
                "close", "lend", "open", "poll", "result", "submit", "take_back", "wait",
                "wait_for")]
        self.assertEqual([name for name in names if not name.startswith(public)], shared)


if __name__ == "__main__":
    main()
