# SPDX-License-Identifier: Apache-2.0
"""One of four workers is killed, and its experts have no other copy (--partial-views). Calls with
on_unavailable="partial" go on at the survivors: each token that needs a lost expert says so, and
all others have the bits of before. "fail" fails as a whole, "wait" is answered once the worker is
back, or ends at its deadline.

  test_partial.py BUILD MODELS [--long]

Prints the share of tokens with an answer, and the worst gap between two answers. `--long` repeats
the scene ten times.
"""

import json
import os
import sys
import tempfile
import threading
import time
import unittest

LONG = "--long" in sys.argv and sys.argv.remove("--long") is None

from watched import CEILING_S, Group, Here, Loop, model_directory, wait_until  # noqa: E402
from group import moectl  # noqa: E402

import grpc  # noqa: E402
import moed  # noqa: E402
import numpy as np  # noqa: E402

FAMILY, LAYER, EXPERTS, TOP_K = "mixtral", 0, 8, 2
WORKERS, VICTIM = 4, 2
LOST = range(EXPERTS // WORKERS * VICTIM, EXPERTS // WORKERS * (VICTIM + 1))
SOON_S, LATER_S = 1.0, 60.0


class Partly(Loop):
    """A client of one survivor that asks for whatever is there."""

    partial = 0

    def ask(self):
        return self.client.forward(self.layer, self.x, on_unavailable="partial")

    def check(self, got):
        self.partial += not got.available.all()
        self.wrong += not np.array_equal(got.y[got.available], self.want.y[got.available])
        self.wrong += got.y[~got.available].any()

    def worst_gap(self, begin):
        return max((b - a for a, b in zip(self.done, self.done[1:]) if b > begin), default=0.0)


class Partial(unittest.TestCase):
    def setUp(self):
        net = self.enterContext(Here())
        self.group = Group(net, WORKERS, patient=True, insecure=False, family=FAMILY,
                           coordinator=["--partial-views"])
        self.addCleanup(self.stop)
        self.endpoints = []
        for slot in range(WORKERS):
            self.endpoints.append(self.group.start_worker("w%d" % slot, 0, slot=slot))
            self.group.await_log("coordinator", "slot %d: w%d at" % (slot, slot))
        self.group.await_serving(1)
        self.client = moed.Client(self.endpoints[0], spread=False)
        self.addCleanup(self.client.close)
        rng = np.random.default_rng(5)
        width = self.client.find_layer(LAYER).hidden
        self.x = {t: rng.standard_normal((t, width), np.float32) for t in (1, 64)}
        self.full = {t: self.client.forward(LAYER, x, return_routing=True)
                     for t, x in self.x.items()}

    def stop(self):
        codes = self.group.stop()
        self.assertEqual(set(codes.values()), {0}, codes)

    def status(self):
        return json.loads(moectl("status", "-o", "json", "--endpoint",
                                 self.group.net.address(0) + ":7700").stdout)

    def refused(self, x, reason, **more):
        with self.assertRaises(moed.MoeError) as caught:
            self.client.forward(LAYER, x, **more)
        self.assertEqual(caught.exception.reason, reason, caught.exception)
        return caught.exception

    def start_again(self):
        self.group.port = int(self.endpoints[VICTIM].rpartition(":")[2])
        self.group.start_worker("w%d" % VICTIM, 0, slot=VICTIM)

    def check_partial(self, tokens):
        """Returns which tokens have an answer."""
        full = self.full[tokens]
        needs = np.isin(full.topk_ids, LOST).any(axis=1)
        got = self.client.forward(LAYER, self.x[tokens], return_routing=True,
                                  on_unavailable="partial")
        np.testing.assert_array_equal(got.topk_ids, full.topk_ids)
        np.testing.assert_array_equal(got.available, ~needs)
        np.testing.assert_array_equal(got.y[~needs], full.y[~needs])
        self.assertFalse(got.y[needs].any())
        return ~needs

    def check_command(self, available):
        with tempfile.TemporaryDirectory() as directory:
            x, y = (os.path.join(directory, name) for name in ("x", "y"))
            moed.write_safetensors(x, {"x": self.x[64]})
            arguments = ("forward", "--endpoint", self.endpoints[0], "--layer", str(LAYER),
                         "--input", x, "--output", y)
            done = moectl(*arguments, "--on-unavailable", "partial", "-o", "json")
            self.assertEqual(done.returncode, 0, done.stderr)
            self.assertEqual(json.loads(done.stdout)["unavailableTokens"],
                             list(map(int, np.flatnonzero(~available))))
            np.testing.assert_array_equal(moed.read_safetensors(y)["y"][available],
                                          self.full[64].y[available])
            done = moectl(*arguments, "--on-unavailable", "fail", check=False)
            self.assertEqual(done.returncode, 5)
            self.assertIn("EXPERT_UNAVAILABLE", done.stderr)
            done = moectl(*arguments, "--on-unavailable", "some", check=False)
            self.assertEqual(done.returncode, 2)

    def scene(self):
        loops = [Partly(moed.Client(endpoint, spread=False), LAYER, self.x[64], self.full[64])
                 for s, endpoint in enumerate(self.endpoints) if s != VICTIM]
        wait_until(lambda: all(len(loop.done) > 10 for loop in loops), LATER_S)
        lost = time.monotonic()
        victim = self.group.processes["w%d" % VICTIM]
        victim.kill()
        victim.wait()
        wait_until(lambda: all(loop.partial > 5 for loop in loops), LATER_S)
        gap = max(loop.worst_gap(lost) for loop in loops)

        available = self.check_partial(64)
        self.check_partial(1)
        self.assertTrue(0 < available.sum() < 64)
        status = self.status()
        self.assertEqual(status["liveSlots"], [s for s in range(WORKERS) if s != VICTIM])
        self.assertEqual(status["expertsByLiveCopies"][0] % len(LOST), 0)
        self.assertGreater(status["expertsByLiveCopies"][0], 0)

        failure = self.refused(self.x[64], "EXPERT_UNAVAILABLE", on_unavailable="fail")
        self.assertEqual(failure.code, grpc.StatusCode.UNAVAILABLE)
        for policy in ("fail", "wait"):
            y = self.client.forward(LAYER, self.x[64][available], on_unavailable=policy)
            np.testing.assert_array_equal(y, self.full[64].y[available])
        with self.assertRaises(moed.MoeError) as caught:
            self.client.forward(LAYER, self.x[64], timeout=SOON_S)
        self.assertEqual(caught.exception.code, grpc.StatusCode.DEADLINE_EXCEEDED)
        self.check_command(available)

        waited = []
        waiting = threading.Thread(
            target=lambda: waited.append(self.client.forward(LAYER, self.x[64], timeout=LATER_S)))
        waiting.start()
        back = time.monotonic()
        self.start_again()
        waiting.join()
        np.testing.assert_array_equal(waited[0], self.full[64].y)
        counts = [loop.partial for loop in loops]
        wait_until(lambda: self.status()["liveSlots"] == list(range(WORKERS)), LATER_S)
        wait_until(lambda: all(len(loop.done) > n for loop, n in zip(loops, counts)), LATER_S)
        for loop in loops:
            loop.stop()
        gap_back = max(loop.worst_gap(back) for loop in loops)
        failures = [text for loop in loops for text in loop.failures]
        print("  killed: %d answers, %d failed, %d of 64 tokens without slot %d; "
              "worst gap %.0f ms, when it is back %.0f ms" % (
                  sum(len(loop.done) for loop in loops), len(failures), available.sum(), VICTIM,
                  1e3 * gap, 1e3 * gap_back))
        self.assertEqual(failures, [], self.group.tail())
        self.assertEqual(sum(loop.wrong for loop in loops), 0)
        return gap

    def test_killed(self):
        for _ in range(10 if LONG else 1):
            self.assertLess(self.scene(), CEILING_S)

    def test_a_group_without_the_setting_waits(self):
        """Also one that starts: its first view has all experts."""
        self.group.processes["coordinator"].kill()
        self.group.processes["coordinator"].wait()
        self.group.coordinator = []
        self.group.start_coordinator()
        self.group.await_log("coordinator", "are back")
        victim = self.group.processes["w%d" % VICTIM]
        victim.kill()
        victim.wait()
        self.group.await_log("coordinator", "slot %d lost: disconnected and missed" % VICTIM)
        self.refused(self.x[1], "REFORMING", on_unavailable="partial", timeout=30)
        self.start_again()
        y = self.client.forward(LAYER, self.x[64], timeout=LATER_S, patient=True)
        np.testing.assert_array_equal(y, self.full[64].y)


if __name__ == "__main__":
    assert os.path.isdir(model_directory(FAMILY))
    unittest.main(verbosity=2)
