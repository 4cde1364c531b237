# SPDX-License-Identifier: Apache-2.0
"""Attacks on a group of real daemons, with a light client next to them. Its answers are right and
none is missing; the view stays; the daemon's memory stays within a bound. Heartbeats and tickets
are not late: attackers have one core, and all others have the remaining ones.

  test_attack.py BUILD MODELS [--seconds S] [--connections N] [unittest arguments]

The default is a few seconds in all. By hand: --seconds 30 --connections 4."""

import json
import os
import random
import re
import subprocess
import sys
import threading
import time
import unittest
import urllib.request

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, os.path.join(HERE, "..", "integration"))

import grpc  # noqa: E402

from group import golden_cases, group, main, moectl  # noqa: E402
import wire  # noqa: E402
from wire import expert  # noqa: E402

import h2  # noqa: E402


def option(name, default):
    if name not in sys.argv:
        return default
    at = sys.argv.index(name)
    value = sys.argv[at + 1]
    del sys.argv[at:at + 2]
    return value


SECONDS = float(option("--seconds", 1.5))
CONNECTIONS = int(option("--connections", 2))
FAMILY = "qwen3_moe"
GROWTH = 256 << 20  # bytes that a daemon may take under attack


ATTEMPTS = 3
LATE = 0.05  # seconds that a heartbeat or a ticket may take, at the 99.9th percentile
CORES = sorted(os.sched_getaffinity(0))
ON_LAST_CORE = ["taskset", "-c", str(CORES[-1])]
# Sleeps of 2 ms for a given time; prints the 99.9th percentile of what the host adds to them.
SLEEPER = """
import sys, time
end, late = time.monotonic() + float(sys.argv[1]), []
while time.monotonic() < end:
    began = time.monotonic()
    time.sleep(0.002)
    late.append(time.monotonic() - began - 0.002)
print(sorted(late)[int(0.999 * len(late))])
"""
# Of which each daemon may have some.
DELAYS = {"moe_session_wait_seconds": 'message="heartbeat"', "moe_heartbeat_seconds": "",
          "moe_ticket_seconds": ""}


class LightClient:
    """Repeats one call of one token. The first answer is right (it is compared with the recorded
    one); all others must be the same bytes."""

    def __init__(self, endpoint):
        layer, tokens, x, _ = next(each for each in golden_cases(FAMILY) if each[1] == 1)
        self.request = expert.ForwardRequest(layer=layer, tokens=tokens, hidden=x.shape[1], dtype=1,
                                             x_data=x.tobytes()).SerializeToString()
        self.endpoint, self.times, self.errors, self.wrong = endpoint, [], [], 0
        self.channel = wire.open_channel(endpoint)
        self.right = wire.forward(self.channel, self.request, timeout=20).y_data
        self.stop = threading.Event()
        self.thread = threading.Thread(target=self.run)
        self.thread.start()

    def run(self):
        while not self.stop.wait(0.002):
            began = time.monotonic()
            try:
                answer = wire.forward(self.channel, self.request, timeout=20)
                self.wrong += answer.y_data != self.right
                self.times.append(time.monotonic() - began)
            except grpc.RpcError as error:
                self.errors.append(error.code().name + " " + error.details())

    def end(self):
        self.stop.set()
        self.thread.join()
        self.channel.close()  # a second time does nothing


def resident_bytes(pid):
    with open("/proc/%d/status" % pid) as file:
        return next(int(line.split()[1]) << 10 for line in file if line.startswith("VmRSS:"))


def runnable():
    """Threads of the host that run or wait for a core."""
    with open("/proc/loadavg", encoding="ascii") as file:
        return int(file.read().split()[3].split("/")[0])


def percentile(times, share):
    return sorted(times)[min(len(times) - 1, int(share * len(times)))] if times else 0.0


def epoch(endpoint):
    return json.loads(moectl("status", "--endpoint", endpoint, "-o", "json").stdout)["epoch"]


def buckets(port, name, label):
    """{upper bound: observations up to it} of a histogram; {} if the daemon has none."""
    with urllib.request.urlopen("http://127.0.0.1:%d/metrics" % port, timeout=10) as page:
        text = page.read().decode()
    pattern = r'^%s_bucket\{%sle="([^"]+)"\} (\d+)$' % (name, label and label + ",")
    return {float(bound): int(count)
            for bound, count in re.findall(pattern, text, re.MULTILINE)}


def late_bound(before, after, share):
    """(upper bound of the quantile, observations) of what came between two readings."""
    new = {bound: after[bound] - before.get(bound, 0) for bound in after}
    total = new.get(float("inf"), 0)
    return min((bound for bound in new if new[bound] >= share * total), default=0.0), total


class Attacks(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        if len(CORES) > 1:
            os.sched_setaffinity(0, CORES[:-1])
        cls.metrics_port = random.randrange(20000, 30000)
        cls.context = group(FAMILY, 2, "--metrics-port", str(cls.metrics_port))
        cls.group = cls.context.__enter__()
        processes = cls.group.description()["processes"]
        cls.coordinator = next(each for each in processes if each["name"] == "coordinator")
        cls.workers = [each for each in processes if each["name"] != "coordinator"]

    @classmethod
    def tearDownClass(cls):
        cls.context.__exit__(None, None, None)

    def delays(self):
        """Observations of each kind of delay, summed over the daemons."""
        sums = {}
        for name, label in DELAYS.items():
            sums[name] = {}
            for port in range(self.metrics_port, self.metrics_port + 1 + len(self.workers)):
                for bound, count in buckets(port, name, label).items():
                    sums[name][bound] = sums[name].get(bound, 0) + count
        return sums

    def late_delays(self, before, host_late, crowd):
        """Those over the limit. What the host adds to a sleep, it may add to each of two hops. A
        thread that answers an attack does not sleep: it waits while the host's other threads,
        `crowd` for each core, have their turns."""
        after, texts, late = self.delays(), [], []
        for name in DELAYS:
            bound, total = late_bound(before[name], after[name], 0.999)
            texts.append("%s <= %g ms (%d)" % (name, 1e3 * bound, total))
            if bound > max(LATE * max(crowd, 1), 2 * host_late):
                late.append(texts[-1])
        print("    p99.9: %s; a sleep: %.1f ms late; %.1f threads for each core" % (
            ", ".join(texts), 1e3 * host_late, crowd))
        self.assertGreater(late_bound(before["moe_ticket_seconds"], after["moe_ticket_seconds"],
                                      0.999)[1], 0)
        return late

    def attack(self, name, target):
        """A busy host may delay anything once, but clients must not: then every attempt is late."""
        for _ in range(ATTEMPTS):
            late = self.attack_once(name, target)
            if not late:
                return
        self.fail("late in each of %d attempts: %s" % (ATTEMPTS, late))

    def attack_once(self, name, target):
        worker = self.workers[0]["endpoint"]
        victim = target["endpoint"]
        client = LightClient(worker)
        self.addCleanup(client.end)
        time.sleep(min(SECONDS, 2))
        before, quiet = resident_bytes(target["pid"]), list(client.times)
        view = epoch(self.coordinator["endpoint"])
        del client.times[:]
        delays = self.delays()
        sleeper = subprocess.Popen([sys.executable, "-c", SLEEPER, str(SECONDS)],
                                   stdout=subprocess.PIPE)
        attackers = [subprocess.Popen([*ON_LAST_CORE, sys.executable, os.path.join(HERE, "h2.py"),
                                       victim, name, "--seconds", str(SECONDS)],
                                      stdout=subprocess.PIPE) for _ in range(CONNECTIONS)]
        peak, threads = before, []
        while any(each.poll() is None for each in attackers):
            peak = max(peak, resident_bytes(target["pid"]))
            threads.append(runnable())
            time.sleep(0.02)
        totals = [json.loads(each.communicate()[0]) for each in attackers]
        client.end()
        host_late = float(sleeper.communicate()[0])
        sums = {key: sum(each[key] for each in totals) for key in totals[0]}
        print("  %s: %s; light client: %d calls, p99 %.1f ms (%.1f before), %d errors; "
              "memory %d -> %d MiB" % (name, sums, len(client.times),
                                       1e3 * percentile(client.times, 0.99),
                                       1e3 * percentile(quiet, 0.99), len(client.errors),
                                       before >> 20, peak >> 20))
        self.assertEqual(client.errors, [])
        self.assertEqual(client.wrong, 0)
        self.assertGreater(len(client.times), 0)
        self.assertEqual(epoch(self.coordinator["endpoint"]), view)
        self.assertLess(peak, before + GROWTH)
        self.assertGreater(sums["closed"], 0)  # it was noticed, not only endured
        return self.late_delays(delays, host_late, percentile(threads, 0.99) / len(CORES))


def add_tests():
    for name in h2.ATTACKS:
        def on_worker(self, name=name):
            self.attack(name, self.workers[0])

        def on_coordinator(self, name=name):
            self.attack(name, self.coordinator)

        setattr(Attacks, "test_%s_on_a_worker" % name.replace("-", "_"), on_worker)
        setattr(Attacks, "test_%s_on_the_coordinator" % name.replace("-", "_"), on_coordinator)


add_tests()

if __name__ == "__main__":
    main()
