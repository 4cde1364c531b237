# SPDX-License-Identifier: Apache-2.0
"""`moectl rebalance`: copies of experts move while four clients run. No request fails, no epoch
ends, and every answer has the bits that it had before; then workers and a coordinator that come
later have the placement, and what cannot move is refused with one typed error."""

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

    def up(self, *more):
        done = self.moectl("up", "--model", model_directory(FAMILY), "--workers", str(WORKERS),
                           "--backend", "cpu", "--threads", "1", "--port", "0", "--detach", *more)
        self.assertEqual(done.returncode, 0, done.stderr)
        self.addCleanup(self.moectl, "down")
        return [line.split()[-1] for line in done.stdout.splitlines() if ":" in line]

    def status(self):
        return json.loads(self.moectl("status", "-o", "json").stdout)

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
        with open(os.path.join(self.state, "group.json")) as file:
            os.kill(json.load(file)["processes"][-1]["pid"], signal.SIGKILL)
        done = self.moectl("replace")
        self.assertEqual(done.returncode, 0, done.stderr)
        wait_until(lambda: self.status()["state"] == "SERVING", 60)
        for caller in callers:
            caller.failures.clear()
        self.run_on(callers)
        self.assertEqual([c.wrong for c in callers], [0] * CLIENTS)
        self.assertEqual(self.status()["placementVersion"], 1 + moved)

    def test_what_cannot_move_is_refused(self):
        self.up()
        self.refused("no spare places")
        plan = self.rebalance("--dry-run", "--spare", "1")
        self.assertFalse(plan["moved"])
        self.assertEqual(self.status()["placementVersion"], 1)


if __name__ == "__main__":
    main()
