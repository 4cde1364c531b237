# SPDX-License-Identifier: Apache-2.0
"""The coordinator of a group that trains goes away: killed and started again, or stopped and
continued. No step is lost or done twice, the view stays, and callers get typed errors meanwhile.
Two more workers want the slots all the time and never get one.

  test_coordinator.py BUILD MODELS [--long]
"""

import os
import signal
import sys
import unittest

LONG = "--long" in sys.argv and sys.argv.remove("--long") is None

from watched import Group, Here, longest_gap, sleep_s  # noqa: E402

LEASE_S = 3.0
PATIENT_S = 12.0  # a lease that is longer than a short absence and a start on any machine


class Coordinator(unittest.TestCase):
    def scene(self, fault, seconds):
        """`fault` takes the coordinator away for so long, and brings it back. A short absence costs
        no call."""
        lease_s = PATIENT_S if seconds < LEASE_S / 2 else LEASE_S
        with Here() as net:
            group = Group(net, 2, "--training", "adamw", lease_ms=int(1000 * lease_s),
                          insecure=False)
            try:
                self.run_scene(group, fault, seconds, lease_s)
            except BaseException:
                print(group.tail())
                raise
            finally:
                codes = group.stop()
            self.assertEqual(set(codes.values()), {0}, codes)

    def run_scene(self, group, fault, seconds, lease_s):
        endpoints = [group.start_worker(name, 0) for name in ("w0", "w1")]
        group.await_serving(1)
        for name in ("x0", "x1"):
            group.start_worker(name, 0)
            group.await_log(name, "all 2 slots are taken")
        trainer = group.call(0, endpoints[0], "train")
        reader = group.call(0, endpoints[1], "forward")
        reader.await_answers(1)
        trainer.await_answers(6, "OptimizerStep")
        before = trainer.answered("OptimizerStep")[-1]
        fault(group, seconds)
        trainer.await_answers(6, "OptimizerStep")
        reader.await_answers(1)
        sleep_s(lease_s)  # a slot that is to be given away is given away by then
        trainer.await_answers(6, "OptimizerStep")

        steps = trainer.answered("OptimizerStep")
        # A change that waits for its ticket at the fault waits on: new calls are refused.
        refused = trainer.refused() + reader.refused()
        print("  %s %g s: %d steps, %d refusals %s, longest pause %.1f s" % (
            fault.__name__, seconds, len(steps), len(refused),
            sorted({c["reason"] for c in refused}), longest_gap(steps)))
        # Steps follow each other without a gap or a repeat, in one lineage, under one view.
        self.assertEqual([c["steps"] for c in steps], list(range(1, len(steps) + 1)))
        self.assertEqual({c["lineage"] for c in steps}, {before["lineage"]})
        versions = [c["version"] for c in steps]
        self.assertEqual(versions, list(range(versions[0], versions[0] + len(versions))))
        self.assertEqual(group.last_epoch(), 1, group.log("coordinator"))
        self.assertEqual({(c["code"], c["reason"]) for c in refused}
                         - {("UNAVAILABLE", "LEASE_LOST")}, set())
        if seconds > lease_s:
            self.assertGreater(len(refused), 0)
        if lease_s == PATIENT_S:
            self.assertEqual(refused, [])
        for name in ("x0", "x1"):
            self.assertNotIn("registered:", group.log(name))


def killed(group, seconds):
    group.processes["coordinator"].kill()
    group.processes["coordinator"].wait()
    sleep_s(seconds)
    group.start_coordinator()
    group.await_log("coordinator", "all members of epoch 1 are back")


def stopped(group, seconds):
    process = group.processes["coordinator"]
    os.kill(process.pid, signal.SIGSTOP)
    try:
        sleep_s(seconds)
    finally:
        os.kill(process.pid, signal.SIGCONT)


def add(fault, seconds):
    def test(self):
        self.scene(fault, seconds)

    test.__doc__ = "%s for %g s" % (fault.__name__, seconds)
    setattr(Coordinator, "test_%s_%g_s" % (fault.__name__, seconds), test)


# Short of a lease, and longer than one.
for each in ((killed, 1), (killed, 5), (stopped, 5)):
    add(*each)
if LONG:
    for each in ((killed, 0), (killed, 3), (killed, 15), (stopped, 2), (stopped, 8), (stopped, 15)):
        add(*each)


if __name__ == "__main__":
    unittest.main(verbosity=2)
