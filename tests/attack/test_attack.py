# SPDX-License-Identifier: Apache-2.0
"""Attacks on a group of real daemons, with a light client next to them. Its answers are right and
none is missing; the view stays; the daemon's memory stays within a bound.

  test_attack.py BUILD MODELS [--seconds S] [--connections N] [unittest arguments]

The default is a few seconds in all. By hand: --seconds 30 --connections 4."""

import json
import os
import subprocess
import sys
import threading
import time
import unittest

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
        self.channel.close()


def resident_bytes(pid):
    with open("/proc/%d/status" % pid) as file:
        return next(int(line.split()[1]) << 10 for line in file if line.startswith("VmRSS:"))


def percentile(times, share):
    return sorted(times)[min(len(times) - 1, int(share * len(times)))] if times else 0.0


def epoch(endpoint):
    return json.loads(moectl("status", "--endpoint", endpoint, "-o", "json").stdout)["epoch"]


class Attacks(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.context = group(FAMILY, 2)
        cls.group = cls.context.__enter__()
        processes = cls.group.description()["processes"]
        cls.coordinator = next(each for each in processes if each["name"] == "coordinator")
        cls.workers = [each for each in processes if each["name"] != "coordinator"]

    @classmethod
    def tearDownClass(cls):
        cls.context.__exit__(None, None, None)

    def attack(self, name, target):
        worker = self.workers[0]["endpoint"]
        victim = target["endpoint"]
        client = LightClient(worker)
        time.sleep(min(SECONDS, 2))
        before, quiet = resident_bytes(target["pid"]), list(client.times)
        view = epoch(self.coordinator["endpoint"])
        del client.times[:]
        attackers = [subprocess.Popen([sys.executable, os.path.join(HERE, "h2.py"), victim, name,
                                       "--seconds", str(SECONDS)], stdout=subprocess.PIPE)
                     for _ in range(CONNECTIONS)]
        peak = before
        while any(each.poll() is None for each in attackers):
            peak = max(peak, resident_bytes(target["pid"]))
            time.sleep(0.02)
        totals = [json.loads(each.communicate()[0]) for each in attackers]
        client.end()
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
