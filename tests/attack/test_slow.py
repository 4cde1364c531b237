# SPDX-License-Identifier: Apache-2.0
"""Clients that send too little, on a group of real daemons, with a light client next to them. Its
answers are right, none is missing, and it is hardly slower; the view stays; the worker's memory
stays within its budget, and is given back.

  test_slow.py BUILD MODELS [--seconds S] [--idle N] [unittest arguments]

By hand: --seconds 30 --idle 10000."""

import json
import os
import resource
import subprocess
import sys
import threading
import time
import unittest

import grpc

import test_attack as attack

IDLE = int(attack.option("--idle", 300))
BUDGET = 1 << 30  # --max-bytes-in-flight of a worker
# What it may keep after so many seconds. The goal is 64 MiB; what is left between live blocks of
# the heap differs from run to run, and 66 MiB were seen once.
REST, REST_SECONDS = 96 << 20, 60
SANITIZED = os.environ.get("MOE_SANITIZED") == "1"
STREAMS = 30  # of a client next to 430 silent connections: its equal share is 38
NOISE = 1.0 if SANITIZED else 0.25  # seconds that a host with few cores may add

import slow  # noqa: E402
from group import golden_cases, group, main, wait_until  # noqa: E402
import wire  # noqa: E402
from wire import expert  # noqa: E402


class Slow(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
        if len(attack.CORES) > 1:
            os.sched_setaffinity(0, attack.CORES[:-1])
        cls.context = group(attack.FAMILY, 2)
        cls.group = cls.context.__enter__()
        processes = cls.group.description()["processes"]
        cls.coordinator = next(each for each in processes if each["name"] == "coordinator")
        cls.worker = next(each for each in processes if each["name"] != "coordinator")

    @classmethod
    def tearDownClass(cls):
        cls.context.__exit__(None, None, None)

    def attack(self, name, seconds, connections=0):
        return subprocess.Popen(
            [*attack.ON_LAST_CORE, sys.executable, os.path.join(attack.HERE, "slow.py"),
             self.worker["endpoint"], name, "--seconds", str(seconds), "--connections",
             str(connections)], stdout=subprocess.PIPE)

    def endure(self, name, connections, allowed):
        """`allowed`: bytes that the worker may take. Returns the totals of slow.py, and the bytes
        that it took. A busy host may delay anything once, but clients must not: then every attempt
        is late."""
        for _ in range(attack.ATTEMPTS):
            quiet, attacked, *rest = self.endure_once(name, connections, allowed)
            if attacked <= max(2 * quiet, NOISE):
                return rest
        self.fail("late in each of %d attempts" % attack.ATTEMPTS)

    def endure_once(self, name, connections, allowed):
        """Returns the p99 of the light client before and during the attack, too."""
        pid, seconds = self.worker["pid"], max(attack.SECONDS, slow.SCENES[name][-1])
        client = attack.LightClient(self.worker["endpoint"])
        self.addCleanup(client.end)
        time.sleep(2)
        before, quiet = attack.resident_bytes(pid), list(client.times)
        view = attack.epoch(self.coordinator["endpoint"])
        del client.times[:]
        attacker = self.attack(name, seconds, connections)
        peak = before
        while attacker.poll() is None:
            peak = max(peak, attack.resident_bytes(pid))
            time.sleep(0.02)
        client.end()
        totals = json.loads(attacker.communicate()[0])
        ended = time.monotonic()
        if not SANITIZED:
            wait_until(lambda: attack.resident_bytes(pid) <= before + REST,
                       REST_SECONDS)
        p50, p99 = ([attack.percentile(times, share) for times in (quiet, client.times)]
                    for share in (0.5, 0.99))
        print("  %s: %s; light client: %d calls, p50 %.2f -> %.2f ms, p99 %.1f -> %.1f ms, "
              "%d errors; memory %d -> %d MiB, back after %.0f s" % (
                  name, totals, len(client.times), 1e3 * p50[0], 1e3 * p50[1], 1e3 * p99[0],
                  1e3 * p99[1], len(client.errors), before >> 20, peak >> 20,
                  time.monotonic() - ended))
        self.assertEqual(client.errors, [])
        self.assertEqual(client.wrong, 0)
        self.assertGreater(len(client.times), 0)
        self.assertEqual(attack.epoch(self.coordinator["endpoint"]), view)
        if not SANITIZED:
            self.assertLess(peak, before + allowed + attack.GROWTH)
        return *p99, totals, peak - before

    def test_idle_connections(self):
        totals, grown = self.endure("idle", IDLE, 0 if IDLE < 2000 else IDLE << 16)
        print("  %d idle connections: %.1f KiB each" % (IDLE, grown / 1024 / IDLE))
        self.assertEqual(totals["connections"], IDLE)

    def open_streams(self, channel, request):
        """Opens STREAMS at once, with one request each. Returns those with the right answer."""
        answered, right = threading.Event(), 0

        def requests():
            yield request
            answered.wait(60)

        calls = [channel(requests()) for _ in range(STREAMS)]
        try:
            for call in calls:
                answer = next(call)
                self.first = self.first or answer.y_data
                right += answer.y_data == self.first
            answered.set()
            for call in calls:  # the server ends them: no more than these are ever open
                right -= len(list(call))
        except grpc.RpcError as error:
            print("  " + error.details())
        answered.set()
        return right

    def test_silent_streams_leave_others_their_share(self):
        layer, tokens, x, _ = next(each for each in golden_cases(attack.FAMILY) if each[1] == 1)
        request = expert.ForwardStreamRequest(layer=layer, tokens=tokens, hidden=x.shape[1],
                                              dtype=1, x_data=x.tobytes())
        channel = wire.open_channel(self.worker["endpoint"])
        self.addCleanup(channel.close)
        forward = channel.stream_stream(
            "/moe.v1.ExpertService/ForwardStream",
            request_serializer=expert.ForwardStreamRequest.SerializeToString,
            response_deserializer=expert.ForwardStreamResponse.FromString)
        self.first = None
        self.assertEqual(self.open_streams(forward, request), STREAMS)
        attackers = [self.attack("silent-streams", attack.SECONDS + 8)]
        time.sleep(4)  # they have their streams, and others take the rest
        attackers.append(self.attack("few-silent-streams", attack.SECONDS + 4))
        time.sleep(1)
        rounds = []
        while attackers[0].poll() is None:
            rounds.append(self.open_streams(forward, request))
        totals = [json.loads(each.communicate()[0]) for each in attackers]
        print("  %s; %d rounds, worst %d of %d" % (totals, len(rounds), min(rounds), STREAMS))
        self.assertGreater(totals[0]["calls"], 16384 - 100 * 8)
        self.assertEqual(min(rounds), STREAMS)


def add_tests():
    for name, scene in slow.SCENES.items():
        def endure(self, name=name, connections=scene[0]):
            totals, _ = self.endure(name, connections, BUDGET)
            self.assertGreater(totals["ended"], 0)

        if scene[1] > 0 and scene[3] > 0:
            setattr(Slow, "test_" + name.replace("-", "_"), endure)


add_tests()

if __name__ == "__main__":
    main()
