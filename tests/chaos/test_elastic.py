# SPDX-License-Identifier: Apache-2.0
"""A group that grows and shrinks under load: 3 workers to 4, to 3 and to 4 again, a client at each
worker with all answers compared. No call fails, none is wrong, and the gaps are printed. That of
the worker that leaves, or is killed, goes on with the others. What cannot be done is refused by
name and changes nothing.

  test_elastic.py BUILD MODELS [--long]

`--long`: five rounds.
"""

import json
import os
import signal
import sys
import unittest

LONG = "--long" in sys.argv and sys.argv.remove("--long") is None

from watched import CEILING_S, LONG_S, Group, Here, Loop, wait_until  # noqa: E402
from group import BUILD, moectl, relative_error  # noqa: E402

import moed  # noqa: E402
import numpy as np  # noqa: E402

FAMILY, LAYER, SMALL, LARGE, TOKENS = "mixtral", 0, 3, 4, 16
NEAR = 1e-5  # float32
CONFLICT, FAILED, USAGE = 7, 1, 2


class Near(Loop):
    """Other slots compute other parts of a token's sum, so its last bits depend on the size."""

    def check(self, y):
        self.wrong += relative_error(y, self.want) > NEAR


class Elastic(unittest.TestCase):
    def setUp(self):
        self.net = self.enterContext(Here())
        self.group = self.endpoints = None

    def tearDown(self):
        if self.group is not None:
            self.group.stop()

    def start(self, workers, most, *extra, **options):
        self.group = Group(self.net, workers, *extra, family=FAMILY,
                           coordinator=["--max-workers", str(most)], **options)
        self.endpoints = [self.group.start_worker("w%d" % i, 0) for i in range(workers)]
        self.group.await_serving(1)

    def moectl(self, command, *more):
        return moectl(command, *more, "--endpoint", self.net.address(0) + ":7700", check=False)

    def status(self):
        return json.loads(self.moectl("status", "-o", "json").stdout)

    def scale(self, size):
        done = self.moectl("scale", str(size), "-o", "json")
        self.assertEqual(done.returncode, 0, done.stderr + self.group.tail())
        return json.loads(done.stdout)

    def await_spare(self, count=1):
        wait_until(lambda: len(self.status().get("spareSlots", [])) == count, LONG_S)

    def clients(self, endpoints):
        """One for each of these workers. It stays with that worker while that answers."""
        x = np.random.default_rng(3)
        with moed.Client(self.endpoints[0]) as client:
            x = x.standard_normal((TOKENS, client.find_layer(LAYER).hidden), np.float32)
            want = client.forward(LAYER, x)
        return [Near(moed.Client(e, timeout=LONG_S, hedge=True, retry_time=LONG_S), LAYER, x, want)
                for e in endpoints]

    def more_answers(self, clients, more=10):
        counts = [len(c.done) for c in clients]
        wait_until(lambda: all(len(c.done) >= n + more for c, n in zip(clients, counts)), LONG_S)

    def judge(self, clients, begun):
        """The worst gap since `begun`, an index into the answers of each client."""
        for client in clients:
            client.stop()
        failures = [text for c in clients for text in c.failures]
        self.assertEqual(failures, [], self.group.tail())
        self.assertEqual(sum(c.wrong for c in clients), 0)
        return max(b - a for c, n in zip(clients, begun)
                   for a, b in zip(c.done[n:], c.done[n + 1:]))

    def change(self, size, endpoints):
        clients = self.clients(endpoints)
        self.more_answers(clients)
        begun = [len(c.done) - 1 for c in clients]
        scaled = self.scale(size)
        self.more_answers(clients)
        gap = self.judge(clients, begun)
        print("  %d -> %d: worst gap %.0f ms, %d answers, 0 failed; all took %.2f s" % (
            scaled["before"], size, 1e3 * gap, sum(len(c.done) for c in clients),
            scaled["seconds"]))
        status = self.status()
        self.assertEqual(len(status["liveSlots"]), size)
        self.assertEqual(status["size"], size)
        return gap

    def test_grows_and_shrinks(self):
        self.start(SMALL, LARGE, patient=True)
        gaps = []
        for i in range(5 if LONG else 1):
            name = "more%d" % i
            more = self.group.start_worker(name, 0)
            self.await_spare()
            gaps.append(self.change(LARGE, self.endpoints))
            gaps.append(self.change(SMALL, self.endpoints + [more]))
            self.assertEqual(self.group.processes[name].wait(LONG_S), 0)
        self.assertLess(max(gaps), CEILING_S)

    def placed(self):
        """What a refused change must leave as it was."""
        status = self.status()
        return [status.get(key) for key in ("epoch", "size", "placementVersion", "liveSlots")]

    def refuse(self, code, text, command, *more):
        before = self.placed()
        done = self.moectl(command, *more)
        self.assertIn(text, done.stderr)
        self.assertEqual(done.returncode, code, done.stderr)
        self.assertEqual(self.placed(), before)

    def test_what_cannot_be_done_changes_nothing(self):
        self.start(2, 3)
        self.refuse(FAILED, "1 to 3 workers (--max-workers), not 4", "scale", "4")
        self.refuse(FAILED, "1 to 3 workers (--max-workers), not 0", "scale", "0")
        self.refuse(CONFLICT, "start 1 more", "scale", "3")
        self.refuse(USAGE, "is not a number of workers", "scale", "many")
        self.assertEqual(self.scale(2)["before"], 2)  # nothing to do
        self.assertEqual(self.scale(1)["before"], 2)
        self.refuse(CONFLICT, "force drains it nevertheless", "drain", "0", "--reason", "test")
        self.assertNotIn("epoch 3", self.group.log("coordinator"))

    def test_a_group_that_trains_or_has_a_fixed_size_is_not_scaled(self):
        self.start(1, 2, "--training", "sgd")
        self.refuse(CONFLICT, "a group that trains is not scaled", "scale", "2")
        self.group.start_worker("trains", 0)
        self.group.await_log("coordinator", "refused a worker: all 1 slots are taken")
        self.group.stop()
        self.group = Group(self.net, 1, family=FAMILY)
        self.group.start_worker("w0", 0)
        self.group.await_serving(1)
        self.refuse(CONFLICT, "the group has a fixed size", "scale", "1")

    def test_a_drained_slot_moves_its_experts_first(self):
        self.start(2, 3)
        self.group.start_worker("spare", 0)
        self.await_spare()
        clients = self.clients(self.endpoints)
        self.more_answers(clients)
        done = self.moectl("drain", "1", "--reason", "test")  # to the spare
        self.assertEqual(done.returncode, 0, done.stderr)
        self.group.await_serving(2)
        self.assertEqual(self.status()["liveSlots"], [0, 2])
        done = self.moectl("drain", "2", "--reason", "test")  # to the other one
        self.assertEqual(done.returncode, 0, done.stderr)
        self.group.await_serving(3)
        self.more_answers(clients)
        self.assertEqual(self.status()["size"], 1)
        print("  drained twice: worst gap %.0f ms" % (1e3 * self.judge(clients, [0] * 2)))

    def test_a_worker_that_gets_sigterm_moves_its_experts_to_a_spare_first(self):
        """Also one after another, as in a rolling update: each new worker is the next spare."""
        self.start(2, 3)
        self.group.start_worker("spare0", 0)
        self.await_spare()
        clients = self.clients(self.endpoints)
        self.more_answers(clients)
        for turn, name in enumerate(("w0", "spare0")):
            slots = {w["workerId"]: w["slot"] for w in self.status()["workers"]}
            live = sorted(slot for n, slot in slots.items() if n != name)
            process = self.group.processes[name]
            process.send_signal(signal.SIGTERM)
            self.assertEqual(process.wait(LONG_S), 0, self.group.tail())
            wait_until(lambda: self.status().get("liveSlots") == live, LONG_S)
            self.check_dry_run(live)
            self.assertIn("other workers load the experts", self.group.log(name))
            self.assertNotIn("have not moved in time", self.group.log(name))
            self.group.start_worker("spare%d" % (turn + 1), 0)
            self.await_spare()
        self.more_answers(clients)
        print("  replaced two: worst gap %.0f ms" % (1e3 * self.judge(clients, [0] * 2)))
        self.assertEqual(self.status()["size"], 2)
        done = self.moectl("health", "-o", "json")
        checks = {c["code"]: c["result"] for c in json.loads(done.stdout)["checks"]}
        self.assertEqual(checks["GROUP_STABLE"], "OK")

    def test_a_spare_has_no_experts(self):
        self.start(2, 3)
        spare = self.group.start_worker("spare", 0)
        self.await_spare()
        self.check_dry_run([0, 1])
        with moed.Client(self.endpoints[0]) as client:
            x = np.zeros((1, client.find_layer(LAYER).hidden), np.float32)
        self.refused_by_a_spare(spare, x)

    def check_dry_run(self, places):
        """A plan is over the slots that hold experts, wherever these are."""
        done = self.moectl("rebalance", "--dry-run", "-o", "json")
        self.assertEqual(done.returncode, 0, done.stderr)
        for layer in json.loads(done.stdout)["layers"]:
            self.assertEqual([s["slot"] for s in layer["slots"]], places)
            self.assertEqual(set().union(*(s["experts"] for s in layer["slots"])), set(range(8)))
        done = self.moectl("rebalance")
        self.assertEqual(done.returncode, CONFLICT)
        self.assertIn("no spare places", done.stderr)

    def refused_by_a_spare(self, endpoint, x):
        """The refusal names those that have experts."""
        address = moed.Client(endpoint, spread=False, retry_time=0.0, timeout=LONG_S)
        self.addCleanup(address.close)
        with self.assertRaises(moed.MoeError) as caught:
            address.forward(LAYER, x)
        text = str(caught.exception)
        self.assertIn("this worker is a spare, without experts: call ", text)
        for named in self.endpoints:
            self.assertIn(named, text)

    def test_the_size_survives_a_coordinator_and_replaces_a_lost_worker(self):
        self.start(2, 3)
        self.group.start_worker("spare", 0)
        self.await_spare()
        self.scale(3)
        clients = self.clients(self.endpoints[:1])
        self.more_answers(clients)
        for process in (self.group.processes["coordinator"],):
            process.kill()
            process.wait()
        self.group.start_coordinator()
        self.group.await_log("coordinator", "are back")
        self.assertEqual(self.status()["size"], 3)
        self.more_answers(clients)
        clients[0].stop()
        lost = self.group.processes["spare"]
        lost.kill()
        lost.wait()
        self.group.await_log("coordinator", "slot 2 lost: disconnected and missed")
        self.scale(2)  # without a view: at once
        wait_until(lambda: self.status().get("liveSlots") == [0, 1], LONG_S)
        clients = self.clients(self.endpoints)
        self.more_answers(clients)
        self.judge(clients, [0] * 2)

    def test_calls_at_a_killed_worker_are_answered_by_another(self):
        self.start(3, 4, replicas=2)
        clients = self.clients(self.endpoints[2:])
        self.more_answers(clients)
        begun = [len(clients[0].done) - 1]
        self.group.processes["w2"].kill()
        self.more_answers(clients, 30)
        print("  a killed worker: worst gap %.0f ms" % (1e3 * self.judge(clients, begun)))


if __name__ == "__main__":
    assert os.path.isdir(BUILD)
    unittest.main(verbosity=2)
