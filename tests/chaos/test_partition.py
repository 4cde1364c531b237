# SPDX-License-Identifier: Apache-2.0
"""A partition, with real daemons on hosts that are network namespaces: the coordinator is on host
0, a group is cut off from it, and other workers on host 0 take its slots. Needs root; skipped
without.

  test_partition.py BUILD MODELS [--long]
"""

import os
import random
import sys
import unittest

LONG = "--long" in sys.argv and sys.argv.remove("--long") is None

from watched import BUILD, Group, longest_gap, sleep_s, wait_until  # noqa: E402
import netns  # noqa: E402

SEED = int(os.environ.get("MOE_SEED", random.SystemRandom().getrandbits(32)))


class Case(unittest.TestCase):
    def scene(self, *extra):
        """A context: a group of two slots on two hosts. Prints the logs if the scene fails."""
        return Scene(self, extra)


class Scene:
    def __init__(self, case, extra):
        self.case, self.extra = case, extra

    def __enter__(self):
        self.net = netns.Network(2).__enter__()
        self.group = Group(self.net, 2, *self.extra)
        return self.net, self.group

    def __exit__(self, kind, *_):
        if kind is not None:
            print("MOE_SEED=%d" % SEED)
            print(self.group.tail())
        codes = self.group.stop()
        self.net.__exit__()
        if kind is None:
            self.case.assertEqual(set(codes.values()), {0}, codes)


class Training(Case):
    """A change on the cut side is not answered, and no checkpoint of it appears, once the other
    side has taken one."""

    def check_answers(self, cut_callers, other_callers):
        """No answer on the cut side is later than the first change of the other side."""
        begun = min(c["sent"] for caller in other_callers
                    for c in caller.answered() if c["call"] != "Forward")
        for caller in cut_callers:
            late = [c for c in caller.answered() if c["done"] > begun]
            self.assertEqual(late[:3], [])
            refusals = [c for c in caller.refused() if c["sent"] > begun]
            self.assertLessEqual({c["code"] for c in refusals}, {"UNAVAILABLE"}, refusals[:3])
        last = max(c["done"] for caller in cut_callers for c in caller.answered())
        return begun - last

    def check_story(self, group, before):
        """The directory has the checkpoints of the cut side that it had `before`, then those of
        the other side, in one order."""
        saved = group.saved()
        cut = {n: m for n, m in saved.items() if n.startswith("cut")}
        other = {n: m for n, m in saved.items() if n.startswith("other")}
        self.assertEqual(sorted(cut), sorted(before))
        self.assertTrue(other)
        numbers = [m["sequence"] for m in saved.values()]
        self.assertEqual(len(set(numbers)), len(numbers))
        self.assertLess(max((m["sequence"] for m in cut.values()), default=0),
                        min(m["sequence"] for m in other.values()))
        for side in (cut, other):
            self.assertLessEqual(len({m["lineage"] for m in side.values()}), 1)
            steps = [m["steps"] for m in sorted(side.values(), key=lambda m: m["sequence"])]
            self.assertEqual(steps, sorted(steps))
        return len(cut), len(other)

    def environment(self, group):
        """For workers: their Saves stop before the rename while the gate is there."""
        self.gate = os.path.join(group.directory, "gate")
        return {"LD_PRELOAD": os.path.join(BUILD, "tests", "integration", "libgated_fsync.so"),
                "MOE_TEST_GATE": self.gate, "MOE_TEST_GATE_OF": "manifest.json",
                "ASAN_OPTIONS": os.environ.get("ASAN_OPTIONS", "") + ":verify_asan_link_order=0"}

    def run_scene(self, hosts, delay_s, gated):
        """Workers w0 and w1 are on these hosts. `delay_s` later the link of host 1 is cut. `gated`:
        a Save stands before its rename until the other side has saved."""
        with self.scene("--training", "adamw") as (net, group):
            group.extra += ("--training-dir", group.checkpoints)
            environment = self.environment(group)
            endpoints = [group.start_worker("w%d" % i, host, i, environment)
                         for i, host in enumerate(hosts)]
            group.await_serving(1)
            saver = hosts.index(1)
            cut = [group.call(1, endpoints[1], "train"),
                   group.call(1, endpoints[saver], "save", "cut")]
            cut[0].await_answers(3, "OptimizerStep")
            cut[1].await_answers(2)
            if gated:
                open(self.gate, "w").close()
                # The name of the one that waits for its rename, and steps go on next to it.
                cut[0].await_answers(20, "OptimizerStep")
            sleep_s(delay_s)
            net.cut(1)
            news = [i for i, host in enumerate(hosts) if host == 1]
            others = [group.start_worker("x%d" % i, 0, i) for i in news]
            # A worker that stays may be asked, too.
            others += [endpoints[i] for i, host in enumerate(hosts) if host == 0]
            group.await_log("coordinator", "preparing epoch 2")
            wait_until(lambda: group.last_epoch() > 1)
            other = [group.call(0, others[0], "train"), group.call(0, others[-1], "save", "other")]
            other[0].await_answers(2, "OptimizerStep")
            other[1].await_answers(1)
            before = [n for n in group.saved() if n.startswith("cut")]
            if gated:
                os.remove(self.gate)
            other[0].await_answers(20, "OptimizerStep")
            other[1].await_answers(2)
            epoch = group.last_epoch()
            self.assertEqual(group.fence(), epoch)
            lead = self.check_answers(cut, other)
            net.mend(1)
            for i in news:
                group.await_log("w%d" % i, "epoch 1 is over")
            other[0].await_answers(20, "OptimizerStep")
            other[1].await_answers(1)
            self.check_answers(cut, other)
            counts = self.check_story(group, before)
            self.assertEqual(group.fence(), epoch)
            print("  cut after %.0f ms: %d steps and %d Saves before, %d refused; last answer %.1f "
                  "s before the first change of the other side; checkpoints %d, %d" % (
                      1000 * delay_s, len(cut[0].answered("OptimizerStep")),
                      len(cut[1].answered()), sum(len(c.refused()) for c in cut), lead,
                      *counts))

    def test_a_cut_group_with_changes_in_flight(self):
        moments = random.Random(SEED)
        for _ in range(6 if LONG else 1):
            self.run_scene((1, 1), moments.random() / 2, False)

    def test_a_save_before_its_rename(self):
        self.run_scene((1, 1), 0, True)

    def test_the_members_are_cut_from_each_other(self):
        """One member stays with the coordinator, and goes on with a new one."""
        moments = random.Random(SEED + 1)
        for _ in range(4 if LONG else 1):
            self.run_scene((0, 1), moments.random() / 2, False)


class Serving(Case):
    """A group that only serves goes on without its coordinator."""

    PARTITION_S = 12 if LONG else 6  # beyond the lease

    def test_no_request_fails_without_the_coordinator(self):
        with self.scene() as (net, group):
            endpoints = [group.start_worker("w%d" % i, 1, i) for i in range(2)]
            group.await_serving(1)
            callers = [group.call(1, e, "forward", "golden") for e in endpoints]
            for caller in callers:
                caller.await_answers(20)
            net.cut(1)
            sleep_s(self.PARTITION_S)
            group.await_log("coordinator", "lost: lease expired", 2)
            for caller in callers:
                caller.await_answers(20)
            net.mend(1)
            wait_until(lambda: group.last_epoch() > 1)
            for caller in callers:
                caller.await_answers(20)
                print("  %d answers, %d failures, longest pause %.2f s" % (
                    len(caller.answered()), len(caller.refused()), longest_gap(caller.answered())))
                self.assertEqual(caller.refused(), [])

    def test_both_sides_serve(self):
        with self.scene() as (net, group):
            old = [group.start_worker("w%d" % i, 1, i) for i in range(2)]
            group.await_serving(1)
            there = group.call(1, old[0], "forward", "golden")
            there.await_answers(20)
            net.cut(1)
            new = [group.start_worker("x%d" % i, 0, i) for i in range(2)]
            wait_until(lambda: group.last_epoch() > 1)
            here = group.call(0, new[0], "forward", "golden")
            here.await_answers(200)
            there.await_answers(200)
            self.assertEqual(there.refused(), [])
            net.mend(1)
            group.await_log("w0", "epoch 1 is over")
            here.await_answers(200)
            print("  connected side: %d answers, %d failures; cut side: %d answers" % (
                len(here.answered()), len(here.refused()), len(there.answered())))
            self.assertEqual(here.refused(), [])
            # The cut side's workers have no slot any more.
            self.assertLessEqual({c["code"] for c in there.refused()}, {"UNAVAILABLE"})


if __name__ == "__main__":
    netns.require()
    print("MOE_SEED=%d" % SEED)
    unittest.main(verbosity=2)
