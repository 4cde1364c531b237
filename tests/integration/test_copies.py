# SPDX-License-Identifier: Apache-2.0
"""Groups with copies of experts: a token has the same bits at each place of a batch and in any
company, also while the group serves without a worker. Sums are added in the order of slots, so the
choice of copies counts: it must not depend on the token's index. Four experts per token."""

import json
import os
import signal
import unittest

import numpy as np

from group import BACKEND, Group, freeze, main, model_directory, moectl, wait_until
import moed

FAMILY, TOKENS = "qwen3_moe", 64


@unittest.skipIf(BACKEND != "cpu", "on GPUs, a token's index chooses its copies")
class Copies(unittest.TestCase):
    def check(self, clients, x, what):
        whole = clients[0].forward(0, x)
        for client in clients:
            np.testing.assert_array_equal(client.forward(0, x[1:]), whole[1:], what)
            for token in range(0, TOKENS, 5):
                np.testing.assert_array_equal(client.forward(0, x[token:token + 1])[0],
                                              whole[token], what)

    def live_slots(self, g):
        """Of a group that serves; else []."""
        done = moectl("status", "-o", "json", "--state-dir", g.state, check=False)
        return json.loads(done.stdout).get("liveSlots", []) if done.returncode == 0 else []

    def scene(self, workers, *more):
        g = Group(model_directory(FAMILY), workers, "--replicas", "2", *more)
        self.addCleanup(g.stop)
        workers_of_g = g.description()["processes"][1:]
        clients = [moed.Client(each["endpoint"], spread=False, retry_time=60)
                   for each in workers_of_g]
        for client in clients:
            self.addCleanup(client.close)
        x = np.random.default_rng(5).standard_normal((TOKENS, clients[0].layers[0].hidden),
                                                     np.float32)
        self.check(clients, x, "all of %d workers" % workers)
        for victim in (len(workers_of_g) - 1, 0):
            pid = workers_of_g[victim]["pid"]
            freeze(pid)
            self.addCleanup(os.kill, pid, signal.SIGCONT)
            wait_until(lambda: len(self.live_slots(g)) == workers - 1)
            self.check(clients[:victim] + clients[victim + 1:], x,
                       "%d workers without slot %d" % (workers, victim))
            os.kill(pid, signal.SIGCONT)
            wait_until(lambda: len(self.live_slots(g)) == workers)

    def test_copies_that_are_not_equally_many_slots_apart(self):
        self.scene(3)

    def test_slots_that_share_copies_in_pairs(self):
        self.scene(6)


if __name__ == "__main__":
    main()
