# SPDX-License-Identifier: Apache-2.0
"""Faults one after another, drawn by a seed: one of the first three of four workers is killed,
stopped for some seconds, or drained, and is back before the next fault. Every expert has two
copies. Eight clients, which spread their calls and retry as clients do, compare every answer. The
coordinator and the last worker see all faults: their memory, descriptors and threads stay flat.

  test_mixed.py BUILD MODELS [--long]

Two minutes, or half an hour with `--long`. MOE_SEED=n draws the same faults again. Prints for each
kind of fault how often it came and the worst gap between two answers of a client.
"""

import os
import random
import re
import signal
import statistics
import sys
import time
import unittest

LONG = "--long" in sys.argv and sys.argv.remove("--long") is None

from watched import Group, Here, Loop, sleep_s, wait_until  # noqa: E402
from group import is_sanitized, open_files  # noqa: E402

import moed  # noqa: E402
import numpy as np  # noqa: E402

WORKERS, CLIENTS, TOKENS, LAYER = 4, 8, 8, 0
SECONDS = 1800 if LONG else 120
GROWTH_KIB = 4096
LATER_S = 60.0
CALL_S = 30.0


class Client(Loop):
    def worst_gap(self, begin):
        late = [i for i, at in enumerate(self.done) if at > begin]
        first = max(late[0] - 1, 0) if late else len(self.done) - 1
        times = [*self.done[first:], time.monotonic()]
        return max(b - a for a, b in zip(times, times[1:]))


class Sizes:
    """Resident memory in KiB, descriptors and threads of a process, after each fault."""

    def __init__(self, name, process):
        self.name, self.pid, self.samples = name, process.pid, []

    def sample(self):
        with open("/proc/%d/status" % self.pid) as file:
            status = file.read()
        memory, threads = (int(re.search(key + r":\s+(\d+)", status).group(1))
                           for key in ("VmRSS", "Threads"))
        self.samples.append((memory, len(open_files(self.pid)), threads))

    def thirds(self):
        """Medians of the second and of the last third."""
        n = len(self.samples) // 3
        return [tuple(map(statistics.median, zip(*part)))
                for part in (self.samples[n:2 * n], self.samples[2 * n:])]


class Mixed(unittest.TestCase):
    def setUp(self):
        net = self.enterContext(Here())
        self.group = Group(net, WORKERS, replicas=2, lease_ms=5000, insecure=False,
                           family="mixtral")
        self.addCleanup(self.group.stop)
        self.endpoints = []
        for slot in range(WORKERS):
            self.endpoints.append(self.group.start_worker("w%d" % slot, 0, slot=slot))
            self.group.await_log("coordinator", "slot %d: w%d at" % (slot, slot))
        self.group.await_serving(1)

    def serves_with_all(self):
        """The view that was prepared last has all slots, and is in force."""
        lines = [line for line in self.group.log("coordinator").splitlines()
                 if "preparing epoch" in line or "serving under epoch" in line]
        return ("serving" in lines[-1] and "without" not in lines[-2] and
                lines[-2].split()[-1] == lines[-1].split()[-1])

    def start_again(self, slot):
        self.group.port = int(self.endpoints[slot].rpartition(":")[2])
        self.group.start_worker("w%d" % slot, 0, slot=slot)

    def kill(self, slot, process):
        process.kill()
        process.wait()
        sleep_s(self.rng.uniform(0, 1))
        self.start_again(slot)

    def stop(self, slot, process):
        epoch = self.group.last_epoch()
        os.kill(process.pid, signal.SIGSTOP)
        sleep_s(self.rng.uniform(0, 7))
        wait_until(lambda: self.group.last_epoch() > epoch, LATER_S)  # it is missed
        os.kill(process.pid, signal.SIGCONT)

    def drain(self, slot, process):
        process.terminate()
        process.wait(LATER_S)
        self.start_again(slot)

    def test_faults(self):
        seed = int(os.environ.get("MOE_SEED", time.time_ns() % 1000000))
        self.rng = random.Random(seed)
        with moed.Client(self.endpoints[0]) as client:
            x = np.random.default_rng(3).standard_normal(
                (TOKENS, client.find_layer(LAYER).hidden), np.float32)
            want = client.forward(LAYER, x)
        clients = [Client(moed.Client(self.endpoints[0], spread=True, timeout=CALL_S), LAYER, x,
                          want) for _ in range(CLIENTS)]
        seen = {}
        watched = [Sizes(name, self.group.processes[name]) for name in ("coordinator", "w3")]
        end = time.monotonic() + SECONDS
        while time.monotonic() < end:
            fault = self.rng.choice((self.kill, self.stop, self.drain))
            slot = self.rng.randrange(WORKERS - 1)
            begun = time.monotonic()
            epoch = self.group.last_epoch()
            fault(slot, self.group.processes["w%d" % slot])
            wait_until(lambda: self.group.last_epoch() > epoch and self.serves_with_all(), LATER_S)
            sleep_s(0.5)
            count, worst = seen.get(fault.__name__, (0, 0.0))
            gap = max(client.worst_gap(begun) for client in clients)
            seen[fault.__name__] = (count + 1, max(worst, gap))
            for sizes in watched:
                sizes.sample()
        for client in clients:
            client.stop()
        failures = [text for client in clients for text in client.failures]
        wrong = sum(client.wrong for client in clients)
        print("  MOE_SEED=%d: %d answers, %d failed, %d wrong, last epoch %d" % (
            seed, sum(len(client.done) for client in clients), len(failures), wrong,
            self.group.last_epoch()))
        for name, (count, worst) in sorted(seen.items()):
            print("  %-6s %3d times, worst gap %.0f ms" % (name, count, 1e3 * worst))
        self.assertEqual((failures[:5], wrong), ([], 0), self.group.tail())
        for sizes in watched:
            before, after = sizes.thirds()
            print("  %s: memory %d -> %d KiB, descriptors %d -> %d, threads %d -> %d" % (
                sizes.name, *(n for pair in zip(before, after) for n in pair)))
            self.assertLessEqual(after[1] - before[1], 4)
            self.assertLessEqual(after[2] - before[2], 1)
            if not is_sanitized():
                self.assertLess(after[0] - before[0], GROWTH_KIB)


if __name__ == "__main__":
    unittest.main(verbosity=2)
