# SPDX-License-Identifier: Apache-2.0
"""Two coordinators with their state in etcd, of which one leads, and two workers that serve. The
leader is killed, stopped or ended, and so is etcd. Forward calls never fail, the view stays, and no
coordinator that does not lead changes anything.

  test_leader.py BUILD MODELS [--long]
"""

import base64
import json
import os

import signal
import subprocess
import sys
import tempfile
import threading
import time
import unittest

LONG = "--long" in sys.argv and sys.argv.remove("--long") is None

import watched  # noqa: E402
import wire  # noqa: E402
from etcd import Etcd, require  # noqa: E402
from group import MOECTL, model_directory, wait_until  # noqa: E402
from watched import COORDINATOR, WORKER, Here, longest_gap  # noqa: E402

LEASE_S = 2  # of the leader
# A killed leader is followed once its lease is over. The ceiling leaves as much time again.
KILLED_LEASE_S, KILLED_CEILING_S = 20, 40.0
LONGEST_LEASE_S = 60  # that a coordinator takes
PREFIX = "/moed/test"
LEADS = "this coordinator leads the group"


class Pair(watched.Group):
    """Coordinators "a" (ports 7700, 7701) and "b" (7710, 7711)."""

    PORTS = {"a": (7700, 7701), "b": (7710, 7711)}

    def __init__(self, net, workers, etcd, *extra, lease_ms=3000, leader_lease_s=LEASE_S,
                 prefix=PREFIX):
        self.etcd, self.leader_lease_s, self.prefix = etcd, leader_lease_s, prefix
        super().__init__(net, workers, *extra, lease_ms=lease_ms, insecure=False)

    def start_coordinator(self, name="a"):
        address = self.net.address(0)
        admin, control = self.PORTS[name]
        self.start(name, 0, [
            COORDINATOR, "--listen", "%s:%d" % (address, admin),
            "--control-listen", "%s:%d" % (address, control),
            "--workers", str(self.workers), "--lease-ms", str(self.lease_ms),
            "--store", "etcd", "--etcd", self.etcd.endpoints, "--etcd-prefix", self.prefix,
            "--leader-lease-s", str(self.leader_lease_s), "--state-dir",
            os.path.join(self.directory, "state-" + name)])

    def await_log(self, name, text, times=1):
        super().await_log("a" if name == "coordinator" else name, text, times)

    def endpoints(self, which):
        return ",".join("%s:%d" % (self.net.address(0), ports[which])
                        for ports in self.PORTS.values())

    def endpoint(self, name):
        return "%s:%d" % (self.net.address(0), self.PORTS[name][0])

    def start_worker(self, name, host, slot=64, environment=None):
        endpoint = "%s:%d" % (self.net.address(host), self.port)
        self.port += 2
        self.start(name, host, [
            WORKER, "--coordinator", self.endpoints(1), "--listen", endpoint,
            "--model", model_directory(watched.FAMILY), "--backend", "cpu", "--threads", "1",
            "--worker-id", name, "--slot", str(slot), *self.extra])
        return endpoint

    def terms(self, name):
        return self.log(name).count(LEADS)

    def moectl(self, *arguments, endpoint=None, timeout=10):
        return subprocess.run([MOECTL, *arguments, "--endpoint", endpoint or self.endpoints(0),
                               "--timeout", str(timeout)], capture_output=True, text=True)

    def status(self):
        return json.loads(self.moectl("status", "-o", "json").stdout or "{}")

    def signal(self, name, number):
        os.kill(self.processes[name].pid, number)

    def kill(self, name):
        self.processes[name].kill()
        self.processes[name].wait()

    def stop(self):
        for process in self.processes.values():
            if process.poll() is None:
                process.send_signal(signal.SIGCONT)
        for caller in self.callers:
            caller.stop()
        # Workers first: a coordinator with etcd leaves them running.
        codes = {}
        for name in sorted(self.processes, key=lambda n: n in self.PORTS):
            process = self.processes[name]
            if process.poll() is None:
                process.terminate()
                codes[name] = process.wait(timeout=60)
        watched.shutil.rmtree(self.directory, ignore_errors=True)
        return codes


class Changes:
    """What etcd has seen below the prefix, in order: (kind, key) of each change."""

    def __init__(self, etcd):
        self.process = etcd.events(PREFIX)
        self.found = []
        self.thread = threading.Thread(target=self.read, daemon=True)
        self.thread.start()

    def read(self):
        for line in self.process.stdout:
            for event in json.loads(line).get("Events", []):
                kind = "DELETE" if event.get("type") else "PUT"
                key, value = (base64.b64decode(event["kv"].get(name, "")).decode("latin1")
                              for name in ("key", "value"))
                self.found.append((kind, key, value))

    def stop(self):
        self.process.kill()
        self.process.wait()
        self.thread.join()
        self.process.stdout.close()
        return self.found


class Case(unittest.TestCase):
    def setUp(self):
        self.where = tempfile.TemporaryDirectory(prefix="moed-etcd-")
        self.addCleanup(self.where.cleanup)

    def enter(self, context):
        value = context.__enter__()
        self.addCleanup(context.__exit__, None, None, None)
        return value

    def start_group(self, *extra, members=1, golden=("golden",), **options):
        """Two coordinators, of which "a" leads; two workers under epoch 1, with a caller each."""
        self.etcd = self.enter(Etcd(self.where.name, members))
        self.net = self.enter(Here())
        g = Pair(self.net, 2, self.etcd, *extra, **options)
        self.addCleanup(self.end_group, g)
        g.await_log("a", LEADS)
        g.start_coordinator("b")
        workers = [g.start_worker(name, 0) for name in ("w0", "w1")]
        g.await_log("a", "serving under epoch 1\n")
        self.callers = [g.call(0, endpoint, "forward", *golden) for endpoint in workers]
        for caller in self.callers:
            caller.await_answers(5)
        return g

    def end_group(self, g):
        result = self._outcome.result
        failed = any(case is self for case, _ in result.errors + result.failures)
        if failed:
            print(g.tail())
        codes = g.stop()
        if not failed:
            self.assertEqual({c for c in codes.values() if c != -signal.SIGKILL}, {0}, codes)

    def expect_no_failures(self, what):
        """All calls so far were answered, under one view."""
        for caller in self.callers:
            caller.await_answers(3)
            self.assertEqual(caller.refused(), [])
        answers = [caller.answered() for caller in self.callers]
        print("  %s: %d answers, 0 refused, worst gap %.0f ms" % (
            what, sum(map(len, answers)), 1000 * max(map(longest_gap, answers))))

    def await_leader(self, g, name, times, begun):
        """Seconds until `name` leads."""
        wait_until(lambda: g.terms(name) >= times, 60)
        took = time.monotonic() - begun
        print("  a new leader after %.2f s (lease %d s)" % (took, g.leader_lease_s))
        return took

    def expect_one_view(self, g, name):
        g.await_log(name, "all members of epoch 1 are back")
        wait_until(lambda: g.status().get("state") == "SERVING", 30)
        self.assertEqual(int(g.status()["epoch"]), 1)


class Leader(Case):
    def change_leaders(self, g, end):
        """`end` ends the leader, which then comes back; so twice. Returns the seconds without one.
        No call fails."""
        leader, other, took = "a", "b", []
        for _ in range(2):
            terms, back = g.terms(other), g.log(other).count("are back")
            begun = time.monotonic()
            end(leader)
            took.append(self.await_leader(g, other, terms + 1, begun))
            wait_until(lambda: g.log(other).count("are back") > back, 60)
            self.expect_one_view(g, other)
            self.expect_no_failures("%s has gone" % leader)
            terms = g.log(leader).count("listening on port")
            g.start_coordinator(leader)
            g.await_log(leader, "listening on port", terms + 1)
            leader, other = other, leader
        return took

    def test_a_killed_leader_is_followed_by_another(self):
        g = self.start_group(leader_lease_s=KILLED_LEASE_S)
        self.assertLess(max(self.change_leaders(g, g.kill)), KILLED_CEILING_S)

    def test_a_leader_that_ends_hands_over_at_once(self):
        g = self.start_group(leader_lease_s=LONGEST_LEASE_S)

        def end(name):
            g.processes[name].terminate()
            self.assertEqual(g.processes[name].wait(timeout=30), 0)

        self.assertLess(max(self.change_leaders(g, end)), watched.CEILING_S)

    def cordon(self, g, name, reason):
        """A call of the coordinator itself, which follows to no other one."""
        channel = wire.open_channel(g.endpoint(name))
        self.addCleanup(channel.close)
        call = channel.unary_unary(
            "/moe.v1.AdminService/CordonSlot",
            request_serializer=wire.admin.CordonSlotRequest.SerializeToString,
            response_deserializer=wire.admin.CordonSlotResponse.FromString)
        return call.future(wire.admin.CordonSlotRequest(slot=1, reason=reason), timeout=60)

    def expect_refusal(self, g, call, leader):
        """NOT_LEADER; its details name the leader."""
        error = call.exception()
        self.assertIsNotNone(error, "a coordinator that does not lead has written")
        self.assertEqual((error.code().name, wire.error_reason(error)),
                         ("UNAVAILABLE", ("NOT_LEADER", True)), error.details())
        details = dict(error.trailing_metadata()).get("grpc-status-details-bin", b"")
        return g.endpoint(leader).encode() in details

    def test_no_two_leaders_write_when_each_is_stopped_in_turn(self):
        g = self.start_group()
        changes = Changes(self.etcd)
        leader, other = "a", "b"
        for turn in range(4 if LONG else 2):
            terms, begun = g.terms(other), time.monotonic()
            g.signal(leader, signal.SIGSTOP)
            # The stopped process finds the request when it goes on.
            late = self.cordon(g, leader, "late-%d" % turn)
            self.await_leader(g, other, terms + 1, begun)
            wait_until(lambda: g.log(other).count("are back") > turn // 2, 60)
            done = g.moectl("cordon", "0", "--reason", "turn-%d" % turn)
            self.assertEqual(done.returncode, 0, done.stderr)
            g.signal(leader, signal.SIGCONT)
            self.expect_refusal(g, late, other)
            g.await_log(leader, "this coordinator does not lead any more", turn // 2 + 1)
            wait_until(lambda: self.expect_refusal(g, self.cordon(g, leader, "late"), other), 30)
            # moectl goes on from a coordinator that does not lead to the next that is named.
            both = "%s,%s" % (g.endpoint(leader), g.endpoint(other))
            done = g.moectl("uncordon", "0", "--reason", "x", endpoint=both)
            self.assertEqual(done.returncode, 0, done.stderr)
            leader, other = other, leader
        self.expect_no_failures("each stopped in turn")
        found = changes.stop()
        self.assertNotIn("late", "".join(value for _, _, value in found))
        self.check_changes(found)

    def check_changes(self, found):
        """Each write of the state falls into the time of one leader."""
        holder, writes = "first", 0
        for kind, key, value in found:
            if key.endswith("/leader"):
                self.assertEqual(kind == "PUT", holder is None, (kind, key))
                holder = value if kind == "PUT" else None
            elif key.endswith("/state"):
                self.assertIsNotNone(holder)
                writes += 1
        print("  %d writes of the state" % writes)
        self.assertGreater(writes, 2)

    def test_serving_goes_on_without_etcd(self):
        g = self.start_group()
        self.etcd.kill(0)
        g.await_log("a", "this coordinator does not lead any more")
        refused = g.moectl("status", timeout=5)
        self.assertNotEqual(refused.returncode, 0)
        self.assertIn("no coordinator leads", refused.stderr)
        health = g.moectl("health", timeout=5)
        self.assertNotEqual(health.returncode, 0)
        self.assertIn("etcd", health.stdout + health.stderr)
        time.sleep(2 * LEASE_S)
        self.expect_no_failures("etcd away")
        self.etcd.start(0)
        self.etcd.wait()
        wait_until(lambda: g.terms("a") + g.terms("b") >= 2, 60)
        wait_until(lambda: "all members of epoch 1 are back" in g.log("a") + g.log("b"), 60)
        self.expect_no_failures("etcd back")

    def test_nothing_forms_without_etcd(self):
        g = self.start_group()
        self.etcd.kill(0)
        g.await_log("a", "this coordinator does not lead any more")
        g.kill("w1")
        time.sleep(2)
        self.assertNotIn("epoch 2", g.log("a") + g.log("b"))
        self.etcd.start(0)
        self.etcd.wait()
        g.start_worker("w1", 0)
        wait_until(lambda: "serving under epoch" in g.log("b")
                   or g.log("a").count("serving under epoch") > 1, 60)
        wait_until(lambda: g.status().get("state") == "SERVING", 30)
        self.assertGreater(int(g.status()["epoch"]), 1)
        self.callers[0].await_answers(3)

    def test_a_rolling_restart_goes_on_under_another_leader(self):
        g = self.start_group()
        moectl = subprocess.Popen(
            [MOECTL, "restart", "--rolling", "--force", "--endpoint", g.endpoints(0), "--timeout",
             "60"], stderr=subprocess.PIPE, text=True)
        self.addCleanup(moectl.stderr.close)
        self.addCleanup(moectl.wait)
        self.addCleanup(moectl.kill)

        def ended():
            return [name for name in ("w0", "w1") if g.processes[name].poll() is not None]

        for last in (False, True):
            wait_until(ended, 60)
            if not last:
                g.kill("a")
            g.start_worker(ended()[0], 0)
        self.assertEqual(moectl.wait(timeout=90), 0, moectl.stderr.read())
        self.assertEqual(g.status()["state"], "SERVING")

    def test_a_cluster_of_three_loses_its_leader(self):
        g = self.start_group(members=3)
        lost = self.etcd.leader()
        self.etcd.kill(lost)
        time.sleep(2 * LEASE_S)
        wait_until(lambda: g.status().get("state") == "SERVING", 60)
        done = g.moectl("cordon", "0", "--reason", "two of three")
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertEqual(int(g.status()["epoch"]), 1)
        self.expect_no_failures("etcd's leader killed; terms %d" % (g.terms("a") + g.terms("b")))
        self.etcd.start(lost)
        self.etcd.wait()

    def test_steps_of_training_follow_each_other_over_a_change_of_leaders(self):
        g = self.start_group("--training", "adamw", golden=())
        trainer = g.call(0, "%s:7600" % self.net.address(0), "train")
        trainer.await_answers(6, "OptimizerStep")
        g.kill("a")
        wait_until(lambda: g.terms("b") >= 1, 60)
        g.await_log("b", "all members of epoch 1 are back")
        trainer.await_answers(20, "OptimizerStep")
        steps = trainer.answered("OptimizerStep")
        self.assertEqual([c["steps"] for c in steps], list(range(1, len(steps) + 1)))
        self.assertEqual(len({c["lineage"] for c in steps}), 1)
        self.assertEqual({(c["code"], c["reason"]) for c in trainer.refused()}
                         - {("UNAVAILABLE", "LEASE_LOST")}, set())
        print("  %d steps, %d refusals for want of a lease, longest pause %.1f s" % (
            len(steps), len(trainer.refused()), longest_gap(steps)))


if __name__ == "__main__":
    require()
    unittest.main(verbosity=2)
