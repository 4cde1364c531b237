# SPDX-License-Identifier: Apache-2.0
"""A worker that only gets too little of the processors is not taken for a lost one. Four workers
with two copies of each expert, as many busy processes as fill the machine twice, and a limit of
half of its processors: for all of them together, or a share for each worker, so that one stands
still while its peers run. No call fails, and no view ends. Then one worker is stopped, and the
others go on without it at once.

  test_overcommit.py BUILD MODELS [--long]

`--long`: ten minutes for each limit, instead of 20 s. Exits with 77 where no control group with a
limit can be made.
"""

import os
import signal
import subprocess
import sys
import time
import unittest

LONG = "--long" in sys.argv and sys.argv.remove("--long") is None

from watched import Group, Here, longest_gap, sleep_s, wait_until  # noqa: E402

WORKERS = 4
SECONDS = 600 if LONG else 20
PERIOD_US = 100000
FORMS_S = 60
BUSY = "while True: pass"


class Limit:
    """A control group of either version with `processors` of time; below the caller's."""

    def __init__(self, name, processors):
        with open("/proc/self/cgroup") as file:
            lines = [line.strip().split(":", 2) for line in file]
        own = {kind: path for _, kinds, path in lines for kind in kinds.split(",")}
        first = "cpu" in own
        root = "/sys/fs/cgroup/cpu" if first else "/sys/fs/cgroup"
        base = root + own["cpu" if first else ""].rstrip("/")
        self.path = "%s/moed-test-%d-%s" % (base, os.getpid(), name)
        os.mkdir(self.path)
        quota = int(PERIOD_US * processors)
        try:
            if first:
                self.write("cpu.cfs_period_us", PERIOD_US)
                self.write("cpu.cfs_quota_us", quota)
            else:
                self.write("cpu.max", "%d %d" % (quota, PERIOD_US))
        except OSError:
            os.rmdir(self.path)
            raise

    def write(self, name, value):
        with open(os.path.join(self.path, name), "w") as file:
            file.write(str(value))

    def add(self, process):
        self.write("cgroup.procs", process.pid)

    def read(self, name):
        with open(os.path.join(self.path, name)) as file:
            return file.read()

    def throttled(self):
        """Periods in which the limit was reached."""
        stat = dict(line.split() for line in self.read("cpu.stat").splitlines())
        return int(stat["nr_throttled"])

    def remove(self):
        wait_until(lambda: self.read("cgroup.procs") == "", 30)
        os.rmdir(self.path)


class Overcommit(unittest.TestCase):
    def setUp(self):
        self.limits = []
        self.addCleanup(lambda: [limit.remove() for limit in self.limits])
        self.net = self.enterContext(Here())
        self.group = Group(self.net, WORKERS, replicas=2, lease_ms=20000, insecure=False)
        self.addCleanup(self.group.stop)
        self.endpoints = [self.group.start_worker("w%d" % s, 0, slot=s) for s in range(WORKERS)]
        self.group.await_serving(1)

    def limit(self, name, processors):
        self.limits.append(Limit(name, processors))
        return self.limits[-1]

    def busy(self, count):
        return [self.net.popen(0, [sys.executable, "-c", BUSY]) for _ in range(count)]

    def run_scene(self, what):
        """Calls all workers for SECONDS, then stops one."""
        callers = [self.group.call(0, e, "forward", "golden") for e in self.endpoints]
        for caller in callers if len(self.limits) == 1 else []:
            self.limits[0].add(caller.process)
        for caller in callers:
            caller.await_answers(2)
        sleep_s(SECONDS)
        for caller in callers:
            caller.await_answers(2)
        refused = [c for caller in callers for c in caller.refused()]
        answers = sum(len(caller.answered()) for caller in callers)
        print("  %s: %d s, %d answers, %d failed, longest gap %.0f ms, last epoch %d, limit "
              "reached in %d periods" % (
                  what, SECONDS, answers, len(refused),
                  1e3 * max(longest_gap(c.answered()) for c in callers), self.group.last_epoch(),
                  sum(limit.throttled() for limit in self.limits)))
        self.assertEqual(refused, [], self.group.tail())
        self.assertEqual(self.group.last_epoch(), 1, self.group.tail())
        self.assertGreater(sum(limit.throttled() for limit in self.limits), 10)
        os.kill(self.group.processes["w1"].pid, signal.SIGSTOP)
        begun = time.monotonic()
        wait_until(lambda: "without slot 1" in self.group.log("coordinator"), FORMS_S)
        wait_until(lambda: self.group.last_epoch() > 1, FORMS_S)
        print("  stopped: the next view after %.0f ms" % (1e3 * (time.monotonic() - begun)))
        os.kill(self.group.processes["w1"].pid, signal.SIGCONT)
        for caller in callers:
            self.assertIsNone(caller.process.poll(), "a caller saw a wrong answer")
            caller.stop()
            self.group.callers.remove(caller)

    def test_one_limit_for_all(self):
        cores = len(os.sched_getaffinity(0))
        limit = self.limit("all", cores / 2)
        for process in [*self.group.processes.values(), *self.busy(2 * cores)]:
            limit.add(process)
        self.run_scene("one limit")

    def test_a_limit_for_each_worker(self):
        cores = len(os.sched_getaffinity(0))
        for s in range(WORKERS):
            limit = self.limit("w%d" % s, cores / 2 / WORKERS)
            for process in [self.group.processes["w%d" % s],
                            *self.busy(max(1, 2 * cores // WORKERS))]:
                limit.add(process)
        self.run_scene("a limit for each")


def can_limit():
    try:
        limit = Limit("probe", 1)
        process = subprocess.Popen(["sleep", "60"])
        try:
            limit.add(process)
        finally:
            process.kill()
            process.wait()
            limit.remove()
    except (OSError, KeyError) as error:
        print("no control group with a limit can be made: %s" % error)
        return False
    return True


if __name__ == "__main__":
    if not can_limit():
        sys.exit(77)
    unittest.main(verbosity=2)
