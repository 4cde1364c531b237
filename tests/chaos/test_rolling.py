# SPDX-License-Identifier: Apache-2.0
"""`moectl restart --rolling`: four workers with two copies of each expert restart one after another
under the load of four clients. No call fails, every answer has the same bits, and each process is a
new one. A group without copies is refused, unless --force; then its clients wait.

  test_rolling.py BUILD MODELS [--long]

With copies, each new worker waits at its start until every client has further answers: no client
waits for it. Neither a lease nor the budget of a wait ends meanwhile.

Prints the time of each worker and the worst gap between two answers of a client. `--long`: three
times.
"""

import glob
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import unittest

LONG = "--long" in sys.argv and sys.argv.remove("--long") is None

from watched import LONG_S, PATIENT_S, Here, Loop, model_directory, wait_until  # noqa: E402
from commands import is_alive  # noqa: E402
from group import BUILD, MOECTL, moectl  # noqa: E402

import moed  # noqa: E402
import numpy as np  # noqa: E402

FAMILY, LAYER, WORKERS, CLIENTS, TOKENS = "mixtral", 0, 4, 4, 16
EXPERTS, PLACES = 8, 4  # of a layer; of a slot, with two copies
MORE = 5  # answers of each client that show that it goes on
# Stands for the program of a worker. The worker begins when file GO.PID is there.
GATE = """#!/bin/sh
case " $* " in *" --check-config "*) exec {worker} "$@" ;; esac
: > {folder}/at.$$
while [ -d {folder} ] && [ ! -e {folder}/go.$$ ]; do sleep 0.02; done
exec {worker} "$@"
"""


class Rolling(unittest.TestCase):
    def setUp(self):
        self.state = tempfile.mkdtemp(prefix="moed-rolling-")
        self.addCleanup(shutil.rmtree, self.state, True)
        self.enterContext(Here())

    def run_moectl(self, command, *more):
        return moectl(command, *more, "--state-dir", self.state, check=False)

    def up(self, *more):
        settings = os.path.join(self.state, "worker.conf")
        with open(settings, "w", encoding="utf-8") as file:
            file.write("wait-budget-ms = %d\n" % (1000 * PATIENT_S))
        done = self.run_moectl("up", "--model", model_directory(FAMILY), "--workers", str(WORKERS),
                               "--backend", "cpu", "--threads", "1", "--port", "0", "--detach",
                               "--worker-config", settings, *more)
        self.assertEqual(done.returncode, 0, done.stderr)
        self.addCleanup(self.run_moectl, "down")
        self.make_patient()
        return [line.split()[-1] for line in done.stdout.splitlines() if ":" in line]

    def make_patient(self):
        """Gives the coordinator a long lease, and workers a gate at their next start: `up` has no
        options for that."""
        path = os.path.join(self.state, "group.json")
        with open(path) as file:
            group = json.load(file)
        coordinator, *workers = group["processes"]
        gate = os.path.join(self.state, "gate")
        with open(gate, "w", encoding="utf-8") as file:
            file.write(GATE.format(worker=workers[0]["command"][0], folder=self.state))
        os.chmod(gate, 0o700)
        coordinator["command"] += ["--lease-ms", str(1000 * PATIENT_S)]
        for worker in workers:
            worker["command"][0] = gate
        with open(path, "w") as file:
            json.dump(group, file)
        os.kill(coordinator["pid"], signal.SIGKILL)
        wait_until(lambda: not is_alive(coordinator["pid"]), LONG_S)
        for command in (["replace"], ["wait", "--timeout", str(LONG_S)]):
            done = self.run_moectl(*command)
            self.assertEqual(done.returncode, 0, done.stderr)

    def processes(self):
        with open(os.path.join(self.state, "group.json")) as file:
            return [p["pid"] for p in json.load(file)["processes"]]

    def epoch(self):
        return int(json.loads(self.run_moectl("status", "-o", "json").stdout)["epoch"])

    def await_answers(self, clients):
        counts = [len(c.done) for c in clients]
        wait_until(lambda: all(len(c.done) > n + MORE for c, n in zip(clients, counts)), LONG_S)

    def run_restart(self, before_start, *more):
        """The slots that the command names. Calls before_start() while a worker waits to start."""
        command = subprocess.Popen(
            [MOECTL, "restart", "--rolling", "-o", "json", "--state-dir", self.state, *more],
            stdout=subprocess.PIPE, text=True)
        self.addCleanup(command.communicate)
        self.addCleanup(command.kill)
        begun = set()
        while command.poll() is None:
            for name in set(glob.glob(os.path.join(self.state, "at.*"))) - begun:
                before_start()
                begun.add(name)
                open(name.replace("/at.", "/go."), "w").close()
            time.sleep(0.02)
        self.assertEqual(command.returncode, 0)
        self.assertEqual(len(begun), WORKERS)
        return json.loads(command.stdout.read())["slots"]

    def restart(self, group, before_start, *more):
        """A rolling restart under load; before_start(clients) while a worker waits to start."""
        endpoint, x, want = group
        clients = [Loop(moed.Client(endpoint, spread=True, timeout=LONG_S), LAYER, x, want)
                   for _ in range(CLIENTS)]
        self.await_answers(clients)
        before = self.processes()
        slots = self.run_restart(lambda: before_start(clients), *more)
        self.await_answers(clients)
        for client in clients:
            client.stop()
        after = self.processes()
        self.assertEqual(after[0], before[0])
        self.assertTrue(all(a != b for a, b in zip(after[1:], before[1:])), (before, after))
        self.assertEqual([s["slot"] for s in slots], list(range(WORKERS)))
        gap = max(b - a for c in clients for a, b in zip(c.done, c.done[1:]))
        failures = [text for c in clients for text in c.failures]
        print("  %d answers, %d failed, worst gap %.0f ms; a worker took %s s" % (
            sum(len(c.done) for c in clients), len(failures), 1e3 * gap,
            ", ".join("%.1f" % s["seconds"] for s in slots)))
        self.assertEqual(failures, [])
        self.assertEqual(sum(c.wrong for c in clients), 0)

    def begin(self, *more):
        endpoint = self.up(*more)[0]
        x = np.random.default_rng(3)
        with moed.Client(endpoint) as client:
            x = x.standard_normal((TOKENS, client.find_layer(LAYER).hidden), np.float32)
            return endpoint, x, client.forward(LAYER, x)

    def check_plan(self):
        """`moectl rebalance --dry-run` of a group that has computed rows."""
        self.assertEqual(self.run_moectl("rebalance").returncode, 7)  # no spare places
        done = self.run_moectl("rebalance", "--dry-run", "--spare", "1", "-o", "json")
        self.assertEqual(done.returncode, 0, done.stderr)
        plan = json.loads(done.stdout)
        layer = plan["layers"][LAYER]
        self.assertGreater(layer["rows"], 0)
        self.assertGreaterEqual(layer["maxOverMean"], 1)
        self.assertTrue(1 <= layer["plannedMaxOverMean"] <= WORKERS)
        held = [set(slot["experts"]) for slot in layer["slots"]]
        self.assertEqual([len(experts) for experts in held], [PLACES + 1] * WORKERS)
        self.assertEqual(set().union(*held), set(range(EXPERTS)))
        print("  max/mean rows %.3f, planned %.3f, %d copies added" % (
            plan["maxOverMean"], plan["plannedMaxOverMean"], plan["copiesAdded"]))
        self.assertIn("fewer rows", self.run_moectl("rebalance", "--dry-run").stdout)

    def test_with_copies(self):
        group = self.begin("--replicas", "2")
        self.check_plan()
        for _ in range(3 if LONG else 1):
            self.restart(group, self.await_answers)

    def test_without_copies(self):
        group = self.begin()
        epoch, processes = self.epoch(), self.processes()
        done = self.run_moectl("restart", "--rolling")
        self.assertEqual(done.returncode, 7)
        self.assertIn("each expert has one copy", done.stderr)
        self.assertEqual(self.run_moectl("restart").returncode, 2)
        self.assertEqual(self.run_moectl("cordon", "1", "--reason", "test").returncode, 0)
        done = self.run_moectl("restart", "--rolling", "--force")
        self.assertIn("slot 1 is cordoned", done.stderr)
        self.assertEqual(self.run_moectl("uncordon", "1", "--reason", "test").returncode, 0)
        self.assertEqual((self.epoch(), self.processes()), (epoch, processes))
        self.restart(group, lambda clients: None, "--force")

    def test_settings_that_are_not_valid_any_more(self):
        self.begin("--replicas", "2")
        epoch, processes = self.epoch(), self.processes()
        with open(os.path.join(self.state, "worker.conf"), "a", encoding="utf-8") as file:
            file.write("nonsense = 1\n")
        done = self.run_moectl("restart", "--rolling")
        self.assertEqual(done.returncode, 7, done.stderr)
        self.assertIn("worker.conf:2: unknown setting 'nonsense'", done.stderr)
        self.assertIn("worker-0 would not start with its present settings; no worker was drained",
                      done.stderr)
        self.assertEqual((self.epoch(), self.processes()), (epoch, processes))


if __name__ == "__main__":
    assert os.path.isdir(BUILD)
    unittest.main(verbosity=2)
