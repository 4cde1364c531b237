# SPDX-License-Identifier: Apache-2.0
"""`moectl rebalance`: copies of experts move while four clients run. No request fails, no epoch
ends, and every answer has the bits that it had before; then workers and a coordinator that come
later have the placement, and what cannot move is refused with one typed error."""

import contextlib
import json
import os
import shutil
import signal
import tempfile
import threading
import unittest

import numpy as np

from group import BACKEND, main, model_directory, moectl, wait_until
import moed
import wire
from wire import admin, expert

FAMILY, LAYER, WORKERS, CLIENTS, TOKENS = "mixtral", 0, 4, 4, 24
EXPERTS, TOP_K, SPARE = 8, 2, 2
INPUTS = 12  # of each client


def popular(hot, rng, tokens):
    """Ids of tokens that mostly go to two experts, and weights."""
    ids = np.empty((tokens, TOP_K), np.int32)
    for t in range(tokens):
        likely = rng.random() < 0.8
        first = hot if likely else int(rng.integers(EXPERTS))
        ids[t] = first, (first + 1 + int(rng.integers(2 if likely else EXPERTS - 1))) % EXPERTS
    return ids, rng.random((tokens, TOP_K), np.float32)


class Caller(threading.Thread):
    """Repeats its requests and compares the answers."""

    def __init__(self, endpoint, hidden, seed):
        super().__init__()
        rng = np.random.default_rng(seed)
        self.client = moed.Client(endpoint, timeout=30)
        self.requests = []
        for hot in range(EXPERTS):
            for _ in range(INPUTS):
                x = rng.standard_normal((TOKENS, hidden), np.float32)
                ids, weights = popular(hot, rng, TOKENS)
                self.requests.append((x, ids, weights, self.ask(x, ids, weights)))
        self.hot, self.count, self.wrong, self.failures = 0, 0, 0, []
        self.ending = False

    def ask(self, x, ids, weights):
        return self.client.forward(LAYER, x, topk_ids=ids, topk_weights=weights)

    def run(self):
        while not self.ending:
            for x, ids, weights, want in self.requests[self.hot * INPUTS:][:INPUTS]:
                try:
                    self.wrong += not np.array_equal(self.ask(x, ids, weights), want)
                    self.count += 1
                except moed.MoeError as error:
                    self.failures.append(str(error))

    def stop(self):
        self.ending = True
        self.join()
        self.client.close()


@unittest.skipIf(BACKEND != "cpu", "this backend moves no experts")
class Moves(unittest.TestCase):
    def setUp(self):
        self.state = tempfile.mkdtemp(prefix="moed-moves-")
        self.addCleanup(shutil.rmtree, self.state, True)

    def moectl(self, *arguments):
        return moectl(*arguments, "--state-dir", self.state, check=False)

    def up(self, *more, family=FAMILY):
        done = self.moectl("up", "--model", model_directory(family), "--workers", str(WORKERS),
                           "--backend", "cpu", "--threads", "1", "--port", "0", "--detach", *more)
        self.assertEqual(done.returncode, 0, done.stderr)
        self.addCleanup(self.moectl, "down")
        return [line.split()[-1] for line in done.stdout.splitlines() if ":" in line]

    def processes(self):
        """The coordinator, then the workers."""
        with open(os.path.join(self.state, "group.json")) as file:
            return [p["pid"] for p in json.load(file)["processes"]]

    def status(self):
        return json.loads(self.moectl("status", "-o", "json").stdout)

    def metric(self, worker, name):
        """Of the coordinator; a worker has its address."""
        with wire.open_channel(worker) as channel:
            info = wire._call(channel, "ExpertService", "GetServerInfo",
                              expert.GetServerInfoRequest(), expert.GetServerInfoResponse, 10)
        with wire.open_channel(info.coordinator) as channel:
            page = wire._call(channel, "AdminService", "GetMetrics", admin.GetMetricsRequest(),
                              admin.GetMetricsResponse, 10).text
        return next(float(line.split()[-1]) for line in page.splitlines()
                    if line.startswith(name))

    def rebalance(self, *more):
        done = self.moectl("rebalance", "-o", "json", "--timeout", "60", *more)
        self.assertEqual(done.returncode, 0, done.stderr)
        return json.loads(done.stdout)

    def refused(self, what, *more):
        done = self.moectl("rebalance", *more)
        self.assertEqual(done.returncode, 7, done.stdout)  # a precondition
        self.assertIn(what, done.stderr)

    def callers(self, endpoints):
        with moed.Client(endpoints[0]) as client:
            hidden = client.find_layer(LAYER).hidden
        callers = [Caller(endpoints[i % len(endpoints)], hidden, i) for i in range(CLIENTS)]
        for caller in callers:
            caller.start()
            self.addCleanup(caller.stop)
        return callers

    def run_on(self, callers, calls=10):
        counts = [c.count for c in callers]
        wait_until(lambda: all(c.count >= n + calls or c.failures
                               for c, n in zip(callers, counts)), 60)

    def check(self, callers):
        self.assertEqual([c.failures for c in callers], [[]] * CLIENTS)
        self.assertEqual([c.wrong for c in callers], [0] * CLIENTS)

    def test_every_answer_keeps_its_bits(self):
        endpoints = self.up("--spare-experts", str(SPARE))
        callers = self.callers(endpoints)
        epoch, moved, before = self.status()["epoch"], 0, []
        for hot in (1, 4, 6, 3):
            for caller in callers:
                caller.hot = hot
            self.run_on(callers, 30)
            plan = self.rebalance("--min-gain", "0")
            moved += plan["moved"]
            before.append("%.3f -> %.3f" % (plan["maxOverMean"], plan["plannedMaxOverMean"]))
            if plan["moved"]:  # a plan that gains nothing is answered, not carried out
                self.assertLessEqual(plan["plannedMaxOverMean"], plan["maxOverMean"] + 1e-9)
            self.run_on(callers)
        self.assertGreaterEqual(moved, 3)
        self.assertEqual(self.status()["epoch"], epoch)
        self.assertEqual(plan["placementVersion"], 1 + moved)
        self.check(callers)
        print("  %d answers, %d moves, max/mean rows %s" % (
            sum(c.count for c in callers), moved, ", ".join(before)))
        self.refused("VERSION_MISMATCH", "--placement", "1")
        self.assertFalse(self.rebalance("--min-gain", "100")["moved"])
        # A new process in a slot, and a view with it.
        os.kill(self.processes()[-1], signal.SIGKILL)
        done = self.moectl("replace")
        self.assertEqual(done.returncode, 0, done.stderr)
        wait_until(lambda: self.status()["state"] == "SERVING", 60)
        for caller in callers:
            caller.failures.clear()
        self.run_on(callers)
        self.assertEqual([c.wrong for c in callers], [0] * CLIENTS)
        self.assertEqual(self.status()["placementVersion"], 1 + moved)

    def test_experts_move_without_an_operator(self):
        endpoints = self.up("--spare-experts", str(SPARE), "--rebalance", "auto",
                            "--rebalance-every-s", "1", "--min-gain", "9")
        with open("/proc/%d/cmdline" % self.processes()[0], encoding="utf8") as file:
            self.assertIn("\0--min-gain\09\0", file.read())
        callers = self.callers(endpoints)
        epoch = self.status()["epoch"]
        for caller in callers:
            caller.hot = 1
        wait_until(lambda: self.status()["placementVersion"] > 1, 60)
        self.run_on(callers)
        self.assertEqual(self.status()["epoch"], epoch)
        self.check(callers)
        events = self.moectl("get", "events").stdout
        self.assertIn("experts have moved: placement 2 is in force", events)
        moved = self.metric(endpoints[0], 'moe_automatic_moves_total{result="moved"}')
        self.assertGreaterEqual(moved, 1)
        self.assertEqual(
            self.metric(endpoints[0], 'moe_automatic_moves_total{result="undone"}'), 0)
        self.rebalance("--min-gain", "0")  # an operator still can
        self.check(callers)

    def test_a_step_has_one_placement_and_bits_do_not_depend_on_it(self):
        """Four experts per token: a move may change the last bits. So an answer has those before or
        those after, as a whole; and after it, each token has its bits in any company."""
        endpoints = self.up("--spare-experts", str(SPARE), family="deepseek_v3")
        rng = np.random.default_rng(7)
        with contextlib.ExitStack() as stack:
            clients = [stack.enter_context(moed.Client(e, timeout=30)) for e in endpoints]
            layer = clients[0].layers[0]
            x = rng.standard_normal((64, layer.hidden), np.float32)
            before = clients[0].forward(layer, x)
            seen, ending = [], threading.Event()

            def repeat(client):
                while not ending.is_set():
                    seen.append(client.forward(layer, x))

            threads = [threading.Thread(target=repeat, args=(c,)) for c in clients]
            for thread in threads:
                thread.start()
            self.addCleanup(ending.set)
            wait_until(lambda: len(seen) > 20, 60)
            self.assertTrue(self.rebalance("--min-gain", "0")["moved"])
            after = clients[0].forward(layer, x)
            count = len(seen)
            wait_until(lambda: len(seen) > count + 20, 60)
            ending.set()
            for thread in threads:
                thread.join()
            kinds = [np.array_equal(y, before) + 2 * np.array_equal(y, after) for y in seen]
            self.assertNotIn(0, kinds)
            self.assertTrue(all(kind & 2 for kind in kinds[-10:]))
            for client in clients:
                order = rng.permutation(len(x))[:int(rng.integers(1, len(x)))]
                self.assertTrue(np.array_equal(client.forward(layer, x[order]), after[order]))
        print("  %d answers with the bits before, %d after" % (
            sum(kind == 1 for kind in kinds), sum(kind & 2 > 0 for kind in kinds)))

    def test_copies_and_a_restarted_coordinator(self):
        """Two copies of each expert: a worker may die after a move, and others serve on. A new
        coordinator has the placement."""
        endpoints = self.up("--spare-experts", str(SPARE), "--replicas", "2")
        callers = self.callers(endpoints[:1])
        for caller in callers:
            caller.hot = 0  # and 1: both on slots 0 and 2
        self.run_on(callers, 60)
        plan = self.rebalance("--min-gain", "0")
        self.assertTrue(plan["moved"], plan)
        held = [set(slot["experts"]) for slot in plan["layers"][LAYER]["slots"]]
        self.assertTrue(all(sum(e in h for h in held) >= 2 for e in range(EXPERTS)))
        self.run_on(callers)
        processes = self.processes()
        os.kill(processes[0], signal.SIGKILL)
        self.assertEqual(self.moectl("replace").returncode, 0)
        wait_until(lambda: self.status()["state"] == "SERVING", 60)
        self.assertEqual(self.status()["placementVersion"], plan["placementVersion"])
        self.check(callers)
        epoch = self.status()["epoch"]
        os.kill(processes[-1], signal.SIGKILL)  # the others have every expert
        wait_until(lambda: self.status()["epoch"] not in (0, epoch, "0"), 60)
        self.run_on(callers)
        self.check(callers)
        self.refused("takes no part")

    def test_what_cannot_move_is_refused(self):
        self.up()
        self.refused("no spare places")
        plan = self.rebalance("--dry-run", "--spare", "1")
        self.assertFalse(plan["moved"])
        self.assertEqual(self.status()["placementVersion"], 1)


if __name__ == "__main__":
    main()
