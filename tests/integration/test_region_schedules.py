# SPDX-License-Identifier: Apache-2.0
"""Random lives of clients that share memory with a real worker (regions_schedules.c): no wrong
byte, and nothing of them stays in the worker: no descriptor, no mapping, no memory.

MOE_RUNS says how many schedules run. With MOE_TEST_BACKEND=cuda, half of the regions lie on the
last GPU, and no memory of that stays either."""

import collections
import os
import re
import subprocess
import tempfile
import unittest

from group import BACKEND, BUILD, DEVICES, group, is_sanitized, main, open_files, wait_until

PROGRAM = os.path.join(BUILD, "tests", "integration", "regions_schedules")
RUNS = int(os.environ.get("MOE_RUNS", "300"))
ROUNDS = 5
MIB = 1 << 20
SPARE = 4  # eventfds: gRPC keeps those that it has needed once
GROWTH = 8 * MIB  # of the worker, over all rounds but the first
GPU = DEVICES - 1 if BACKEND == "cuda" else None  # of the clients


def status(pid, key):
    with open("/proc/%d/status" % pid) as file:
        for line in file:
            if line.startswith(key + ":"):
                return int(line.split()[1]) * 1024
    raise KeyError(key)


def mappings(pid):
    with open("/proc/%d/maps" % pid) as file:
        return sum("memfd:moe-region" in line for line in file)


def gpu_memory():
    """MiB in use on the clients' GPU; 0 without one."""
    if GPU is None:
        return 0
    return int(subprocess.run(
        ["nvidia-smi", "-i", str(GPU), "--query-gpu=memory.used", "--format=csv,noheader,nounits"],
        check=True, stdout=subprocess.PIPE, text=True).stdout)


def kinds(pid):
    """Open descriptors by kind."""
    return collections.Counter(re.sub(r":.*", "", target)
                               for target in open_files(pid).values())


class Schedules(unittest.TestCase):
    def setUp(self):
        self.settings = tempfile.NamedTemporaryFile("w", suffix=".ini")
        self.addCleanup(self.settings.close)
        self.settings.write("allow-client-memory = %s\n" % ("64M" if GPU is None else "512M"))
        self.settings.flush()

    def test_nothing_of_random_clients_stays_and_no_byte_is_wrong(self):
        with group("mixtral", 1, "--worker-config", self.settings.name) as g:
            pid = g.worker_pids()[0]
            sizes, first = [], 0
            for i in range(ROUNDS):
                count = RUNS // ROUNDS
                gpu = [] if GPU is None else [str(GPU)]
                done = subprocess.run([PROGRAM, g.endpoint, str(first), str(count), *gpu])
                self.assertEqual(done.returncode, 0)
                first += count
                # All connections of clients have ended, those over gRPC too.
                wait_until(lambda: mappings(pid) == 0)
                if i == 0:
                    files = self.settled_files(pid)
                    used = gpu_memory()
                wait_until(lambda: kinds(pid)["socket"] <= files["socket"] and
                           kinds(pid).total() <= files.total() + SPARE, 10)
                wait_until(lambda: gpu_memory() <= used)
                sizes.append(status(pid, "RssAnon"))
                print("%d schedules: %d descriptors, %.1f MiB, GPU %d MiB" % (
                    first, len(open_files(pid)), sizes[-1] / MIB, gpu_memory()))
        if not is_sanitized():
            self.assertLess(sizes[-1] - sizes[0], GROWTH)

    def settled_files(self, pid):
        """Descriptors once the last client's connections are closed."""
        last = []
        wait_until(lambda: last.append(kinds(pid)) or
                   (len(last) > 100 and all(k == last[-1] for k in last[-100:])), 20)
        return last[-1]


if __name__ == "__main__":
    main()
