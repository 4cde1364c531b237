# SPDX-License-Identifier: Apache-2.0
"""One of four workers is lost while every expert has a copy on another: killed (a member, and the
sequencer), stopped, or drained. Three callers without retries, one for each survivor, compare every
answer. No call of theirs fails, and the group serves again with all slots once the worker is back.
The survivors keep their session; only a worker that comes back costs a new one. A lease and the
budget of a wait are so long that a view which waits for one of them is known by its gap. So it is
if each worker is on another host, too. If two workers of a host are gateways for each other, the
survivors join a new session. On a machine with two GPUs there are two workers.

  test_replicas.py BUILD MODELS [--long]

Prints for each fault the worst gap between two answers of a survivor: when the worker is lost, and
when it is back. `--long` repeats each scene 20 times and prints the median and the worst.
"""

import json
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import unittest

LONG = "--long" in sys.argv and sys.argv.remove("--long") is None

from watched import CEILING_S, LONG_S, Group, Here, wait_until  # noqa: E402
from group import BACKEND, DEVICES, MOECTL, is_sanitized, moectl  # noqa: E402
import netns  # noqa: E402

import moed  # noqa: E402
import numpy as np  # noqa: E402

WORKERS = min(4, DEVICES)
MEMBER = WORKERS // 2  # not the sequencer


def gap_after(callers, begin):
    """The longest time without an answer of one caller that ends after `begin`."""
    worst = 0.0
    for caller in callers:
        done = [c["done"] for c in caller.answered()]
        gaps = [b - a for a, b in zip(done, done[1:]) if b > begin]
        worst = max([worst, *gaps])
    return worst


class Scene(unittest.TestCase):
    hosts = 0  # network namespaces; 0: all are here
    keeps_session = True

    def setUp(self):
        net = self.enterContext(netns.Network(self.hosts) if self.hosts else Here())
        self.group = Group(net, WORKERS, replicas=2, patient=True, insecure=self.hosts != 0)
        self.addCleanup(self.stop)
        self.endpoints = []
        for slot in range(WORKERS):
            self.endpoints.append(
                self.group.start_worker("w%d" % slot, self.host_of(slot), slot=slot))
            self.group.await_log("coordinator", "slot %d: w%d at" % (slot, slot))
        self.group.await_serving(1)
        self.callers = []

    def host_of(self, slot):
        return slot * self.hosts // WORKERS

    def stop(self):
        codes = self.group.stop()
        self.assertEqual(set(codes.values()), {0}, codes)

    def await_answers(self):
        for caller in self.callers:
            caller.await_answers(5)

    def status(self):
        asked = self.group.net.popen(
            0, [MOECTL, "status", "-o", "json", "--endpoint",
                self.group.net.address(0) + ":7700"], stdout=subprocess.PIPE, text=True)
        return json.loads(asked.communicate(timeout=30)[0])

    def without(self):
        """The slots that are missing in the view that was committed last."""
        log = self.group.log("coordinator")
        epoch = re.findall(r"serving under epoch (\d+)\n", log)[-1]
        found = re.search(r"preparing epoch %s(?: without slots? ([\d, ]+))?\n" % epoch, log)
        return [int(s) for s in (found.group(1) or "").split(", ") if s]

    def await_view(self, missing):
        """A view without these slots serves, and all of its experts have a copy there."""
        wait_until(lambda: self.without() == missing, LONG_S)
        status = self.status()
        self.assertEqual(status["state"], "SERVING")
        self.assertEqual(status["liveSlots"], [s for s in range(WORKERS) if s not in missing])
        self.assertEqual(status["expertsByLiveCopies"][0], 0)

    def epoch(self):
        return int(re.findall(r"serving under epoch (\d+)\n", self.group.log("coordinator"))[-1])

    def keeps(self, slot, epoch):
        """Whether the worker formed this epoch by a mask of its session, and joined none."""
        log = self.group.log("w%d" % slot)
        kept = "epoch %d: keeps the session of epoch" % epoch in log
        self.assertNotEqual(kept, "epoch %d: rows travel over" % epoch in log, log[-2000:])
        return kept

    def lose(self, victims, fault):
        """Returns the worst gaps (s) when the workers are lost and when they are back.
        `fault(process...)` takes them away, and returns what brings them back."""
        survivors = [s for s in range(WORKERS) if s not in victims]
        self.callers = [self.group.call(self.host_of(s), self.endpoints[s], "forward", "golden")
                        for s in survivors]
        self.await_answers()
        lost = time.monotonic()
        bring_back = fault(*[self.group.processes["w%d" % v] for v in victims])
        self.await_view(victims)
        epoch = self.epoch()
        kept = [self.keeps(s, epoch) for s in survivors]
        self.assertEqual(set(kept), {self.keeps_session},
                         "%s\n%s" % (kept, self.group.log("coordinator")[-2000:]))
        self.await_answers()
        back = time.monotonic()
        gaps = [gap_after(self.callers, lost)]
        bring_back()
        self.await_view([])
        self.assertFalse(any([self.keeps(s, self.epoch()) for s in range(WORKERS)]))
        self.await_answers()
        gaps.append(gap_after(self.callers, back))
        refused = [c for caller in self.callers for c in caller.refused()]
        count = sum(len(caller.answered()) for caller in self.callers)
        for caller in self.callers:
            self.assertIsNone(caller.process.poll(), "a caller saw a wrong answer")
            caller.stop()
            self.group.callers.remove(caller)
        print("  %-10s slot %s: %d answers, %d failed, worst gap %.0f ms; when back %.0f ms" % (
            fault.__name__, ", ".join(map(str, victims)), count, len(refused), 1e3 * gaps[0],
            1e3 * gaps[1]))
        self.assertEqual(refused, [], self.group.tail())
        return gaps

    def repeat(self, cases, fault):
        """`cases`: the slots that are lost together, of each case."""
        if not LONG:
            for victims in cases:
                self.assertLess(max(self.lose(victims, fault)), CEILING_S)
        else:
            runs = [self.lose(cases[n % len(cases)], fault) for n in range(20)]
            for what, gaps in zip(("lost", "back"), zip(*runs)):
                print("  %s %s: median %.0f ms, worst %.0f ms of %d" % (
                    fault.__name__, what, 1e3 * statistics.median(gaps), 1e3 * max(gaps),
                    len(gaps)))

    def start_again(self, name):
        slot = int(name[1:])
        self.group.port = int(self.endpoints[slot].rpartition(":")[2])
        self.group.start_worker(name, self.host_of(slot), slot=slot)
        self.group.port = int(max(e.rpartition(":")[2] for e in self.endpoints)) + 2

    def name_of(self, process):
        return next(n for n, p in self.group.processes.items() if p is process)

    def stopped(self, *processes):
        for process in processes:
            os.kill(process.pid, signal.SIGSTOP)
        return lambda: [os.kill(process.pid, signal.SIGCONT) for process in processes]

    def killed(self, process):
        name = self.name_of(process)
        process.kill()
        process.wait()
        return lambda: self.start_again(name)

    def drained(self, process):
        name = self.name_of(process)
        process.terminate()
        self.assertEqual(process.wait(timeout=30), 0)
        return lambda: self.start_again(name)


class Replicas(Scene):
    def test_killed(self):
        """A member and the sequencer, by SIGKILL."""
        self.repeat([[MEMBER], [0]], self.killed)

    def rehomed(self, layer):
        """The layer's re-homed experts, from the placement and the live slots."""
        live = self.status()["liveSlots"]
        experts = json.loads(moectl("get", "experts", "-o", "json", "--endpoint",
                                    self.group.net.address(0) + ":7700").stdout)["experts"]
        return tuple(e["expert"] for e in experts
                     if e["layer"] == layer and set(e["slots"]) - set(live)
                     and set(e["slots"]) & set(live))

    def check_rehomed(self, clients, x, full):
        """Every way to ask tells what the placement says, with the bits of before."""
        layer, epoch = clients[0].layers[0].layer, int(self.status()["epoch"])
        expected = self.rehomed(layer)
        for client in clients:
            with client.stream() as stream:
                answers = [client.forward(layer, x, return_rehomed=True),
                           client.submit(layer, x, return_rehomed=True).result(60),
                           stream.forward(layer, x, return_rehomed=True, return_routing=True)]
            for got in answers:
                self.assertEqual((got.rehomed_experts, got.epoch), (expected, epoch))
                np.testing.assert_array_equal(got.y, full)
            np.testing.assert_array_equal(client.forward(layer, x), full)
        with tempfile.TemporaryDirectory() as directory:
            source, result = (os.path.join(directory, name) for name in ("x", "y"))
            moed.write_safetensors(source, {"x": x})
            arguments = ("forward", "--endpoint", self.endpoints[0], "--layer", str(layer),
                         "--input", source, "--output", result, "--return-rehomed")
            document = json.loads(moectl(*arguments, "-o", "json").stdout)
            self.assertEqual(document["rehomedExperts"], list(expected))
            text = "%d re-homed experts%s\n" % (
                len(expected), ":" * bool(expected) + ",".join(" %d" % e for e in expected))
            self.assertIn(text, moectl(*arguments).stdout)
        return expected

    @unittest.skipIf(BACKEND != "cpu", "sums over fewer GPUs may have other last bits")
    def test_rehomed_experts(self):
        """Clients that ask get the experts that have lost a copy. With a sanitizer the package has
        no extension."""
        clients = [self.enterContext(moed.Client(self.endpoints[0], transport=transport))
                   for transport in ("native", "grpc")[is_sanitized():]]
        layer = clients[0].layers[0]
        x = np.random.default_rng(7).standard_normal((40, layer.hidden), np.float32)
        full = clients[0].forward(layer, x)
        self.assertEqual(self.check_rehomed(clients, x, full), ())
        process = self.group.processes["w1"]
        process.kill()
        process.wait()
        self.await_view([1])
        found = self.check_rehomed(clients, x, full)
        print("  without slot 1: %d of %d experts re-homed" % (len(found), layer.experts))
        self.assertGreater(len(found), 0)
        self.start_again("w1")
        self.await_view([])
        self.assertEqual(self.check_rehomed(clients, x, full), ())

    def test_killed_after_a_restart_of_the_coordinator(self):
        """The members tell the coordinator which session they have."""
        for slot in range(WORKERS):
            self.group.await_log("w%d" % slot, "serving under epoch 1")
        coordinator = self.group.processes["coordinator"]
        coordinator.kill()
        coordinator.wait()
        self.group.start_coordinator()
        self.group.await_log("coordinator", "all members of epoch 1 are back")
        self.repeat([[MEMBER]], self.killed)

    def test_stopped(self):
        """A member and the sequencer, by SIGSTOP. Their pulse tells: no call waits for its budget.
        They find themselves fenced when they go on."""
        self.repeat([[1], [0]], self.stopped)
        self.assertIn("its process has stopped",
                      "".join(self.group.log("w%d" % slot) for slot in range(WORKERS)))

    def test_a_call_to_a_stopped_worker(self):
        """A client that hedges asks another one when its time for an attempt is over."""
        for transport in ("native", "grpc")[is_sanitized():]:
            with moed.Client(self.endpoints[1], hedge=True, attempt_time=0.3,
                             transport=transport) as client:
                layer = client.layers[0]
                x = np.random.default_rng(7).standard_normal((4, layer.hidden), np.float32)
                full = client.forward(layer, x)
                bring_back = self.stopped(self.group.processes["w1"])
                begun = time.monotonic()
                try:
                    np.testing.assert_array_equal(client.forward(layer, x), full)
                finally:
                    bring_back()
                took = time.monotonic() - begun
                print("  %s: answered after %.0f ms" % (transport, 1e3 * took))
                self.assertLess(took, 20)  # its timeout is a minute
            self.await_view([])

    def test_drained(self):
        """A member leaves in peace; another process takes the slot."""
        self.repeat([[WORKERS - 1]], self.drained)


@unittest.skipIf(BACKEND != "cpu", "a mask of GPUs needs windows")
@unittest.skipIf(netns.missing(), netns.missing())
class OverNetwork(Scene):
    hosts = WORKERS

    def test_killed(self):
        self.repeat([[2], [0]], self.killed)

    def test_drained(self):
        self.repeat([[3]], self.drained)

    def test_stopped(self):
        """A member, and two at once. No socket closes: their beats over the network end."""
        self.repeat([[1], [2, 3]], self.stopped)


@unittest.skipIf(BACKEND != "cpu", "GPUs of one host need no gateways")
@unittest.skipIf(netns.missing(), netns.missing())
class WithGateways(Scene):
    hosts = 2
    keeps_session = False

    def test_killed(self):
        self.repeat([[1]], self.killed)


@unittest.skipIf(netns.missing(), netns.missing())
class AHost(Scene):
    """Both workers of a host, which is not the coordinator's, are lost together."""
    hosts = 2
    victims = [2, 3]

    def cut_off(self, *processes):
        self.group.net.cut(1)
        return lambda: self.group.net.mend(1)

    def test_stopped(self):
        """The sequencer misses the beats of both, so the others keep their session."""
        self.repeat([self.victims], self.stopped)

    def test_cut_off(self):
        self.repeat([self.victims], self.cut_off)


@unittest.skipIf(netns.missing(), netns.missing())
class TheHostOfTheSequencer(AHost):
    """The others watch the sequencer only; slot 1 does not answer PREPARE."""
    victims = [0, 1]
    keeps_session = False

    def host_of(self, slot):
        return 1 - super().host_of(slot)


if __name__ == "__main__":
    unittest.main(verbosity=2)
