# SPDX-License-Identifier: Apache-2.0
"""Daemons with a log each, and callers (caller.py) with all their calls: shared by the scenes of
this folder."""

import glob
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, os.path.join(HERE, "..", "integration"))
sys.path.insert(0, os.path.join(HERE, "..", "support"))

from group import BACKEND, BUILD, MODELS, model_directory, wait_until  # noqa: E402,F401
import moed  # noqa: E402
import numpy as np  # noqa: E402

WORKER = os.path.join(BUILD, "daemon", "worker", "moe-worker")
COORDINATOR = os.path.join(BUILD, "daemon", "coordinator", "moe-coordinator")
FAMILY = "deepseek_v3"  # with recorded gradients
LONG_S = 120  # a wait that ends a test without an event
# A lease, and also the budget of a wait for a peer. A group that notices a fault only by one of
# them, or by a part of a lease (a fifth for an answer to PREPARE, a seventh for a worker that has
# stopped), has a gap between answers as long as that. So the ceiling is below all of them. A longer
# lease only makes the scenes longer: each waits for that seventh, without a gap.
PATIENT_S = 150
CEILING_S = 20.0  # a quiet machine needs less than a second


class Here:
    """This machine, as netns.Network has it for several hosts."""

    def __init__(self):
        self.processes = []
        # Tests that run at the same time have the same ports at other addresses.
        self.own = "127.99.%d.%d" % (os.getpid() >> 8 & 255, os.getpid() & 255)

    def address(self, host):
        return self.own

    def popen(self, host, arguments, **options):
        self.processes.append(subprocess.Popen(arguments, **options))
        return self.processes[-1]

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for process in self.processes:
            if process.poll() is None:
                process.kill()
            process.wait()


class Loop(threading.Thread):
    """Asks for one layer without pause, and retries as clients do. Keeps the times of answers and
    the texts of failures, and counts wrong answers. Owns the client."""

    def __init__(self, client, layer, x, want):
        super().__init__(daemon=True)
        self.client, self.layer, self.x, self.want = client, layer, x, want
        self.done, self.failures, self.wrong, self.going = [time.monotonic()], [], 0, True
        self.start()

    def ask(self):
        return self.client.forward(self.layer, self.x, patient=True)

    def check(self, y):
        self.wrong += not np.array_equal(y, self.want)

    def run(self):
        while self.going:
            try:
                answer = self.ask()
            except moed.MoeError as error:
                self.failures.append(str(error))
                continue
            self.done.append(time.monotonic())
            self.check(answer)

    def stop(self):
        self.going = False
        self.join()
        self.client.close()


class Caller:
    """A caller.py on a host; `calls` grows while it runs."""

    def __init__(self, net, host, endpoint, *what):
        self.calls = []
        self.process = net.popen(
            host, [sys.executable, "-B", os.path.join(HERE, "caller.py"), BUILD, MODELS, endpoint,
                   FAMILY, *what], stdout=subprocess.PIPE, text=True)
        self.thread = threading.Thread(target=self.read, daemon=True)
        self.thread.start()

    def read(self):
        for line in self.process.stdout:
            self.calls.append(json.loads(line))

    def answered(self, call=None):
        return [c for c in list(self.calls)
                if "code" not in c and call in (c["call"], None) and c["call"] != "GetTrainState"]

    def refused(self):
        return [c for c in list(self.calls) if "code" in c]

    def await_answers(self, more, call=None):
        """Waits for so many further answers."""
        want = len(self.answered(call)) + more
        wait_until(lambda: len(self.answered(call)) >= want or self.process.poll() is not None,
                   LONG_S)
        if self.process.poll() is not None:
            raise AssertionError("a caller has ended: %s" % self.calls[-1:])

    def stop(self):
        self.process.kill()
        self.process.wait()
        self.thread.join()
        self.process.stdout.close()


class Group:
    """A coordinator on host 0, and workers that the scene starts where it wants them."""

    def __init__(self, net, workers, *extra, lease_ms=3000, insecure=True, replicas=1,
                 family=FAMILY, coordinator=(), patient=False):
        """`patient`: neither a lease nor the budget of a wait notices a fault in time."""
        if patient:
            lease_ms = 1000 * PATIENT_S
            extra += ("--wait-budget-ms", str(lease_ms))
        self.family, self.coordinator = family, coordinator
        self.net, self.extra, self.insecure = net, extra, ["--insecure"] * insecure
        self.workers, self.lease_ms, self.replicas = workers, lease_ms, replicas
        self.directory = tempfile.mkdtemp(prefix="moed-chaos-")
        self.checkpoints = os.path.join(self.directory, "checkpoints")
        os.mkdir(self.checkpoints)
        os.environ["MOED_RUNTIME_DIR"] = os.path.join(self.directory, "run")
        os.mkdir(os.environ["MOED_RUNTIME_DIR"], 0o700)
        self.processes = {}
        self.callers = []
        self.port = 7600
        self.start_coordinator()
        self.await_log("coordinator", "listening on port")

    def start(self, name, host, arguments, environment=None):
        self.processes[name] = self.net.popen(
            host, [*arguments, "--log-file", os.path.join(self.directory, name + ".log")],
            env={**os.environ, **(environment or {})})

    def start_coordinator(self):
        address = self.net.address(0)
        self.start("coordinator", 0, [
            COORDINATOR, "--listen", address + ":7700", "--control-listen", address + ":7701",
            "--workers", str(self.workers), "--replicas", str(self.replicas),
            "--lease-ms", str(self.lease_ms),
            "--state-dir", os.path.join(self.directory, "state"), *self.insecure,
            *self.coordinator])

    def start_worker(self, name, host, slot=64, environment=None):
        """Returns its endpoint."""
        endpoint = "%s:%d" % (self.net.address(host), self.port)
        self.port += 2
        self.start(name, host, [
            WORKER, "--coordinator", self.net.address(0) + ":7701", "--listen", endpoint,
            "--model", model_directory(self.family), "--backend", BACKEND, "--threads", "1",
            *(["--device", str(slot)] if BACKEND == "cuda" else []),
            "--worker-id", name, "--slot", str(slot), *self.insecure, *self.extra], environment)
        return endpoint

    def call(self, host, endpoint, *what):
        self.callers.append(Caller(self.net, host, endpoint, *what))
        return self.callers[-1]

    def log(self, name):
        try:
            with open(os.path.join(self.directory, name + ".log")) as file:
                return file.read()
        except FileNotFoundError:
            return ""

    def await_log(self, name, text, times=1):
        try:
            wait_until(lambda: self.log(name).count(text) >= times, LONG_S)
        except AssertionError as error:
            raise AssertionError("%s's log lacks %r:\n%s" % (
                name, text, self.log(name)[-3000:])) from error

    def await_serving(self, epoch):
        self.await_log("coordinator", "serving under epoch %d\n" % epoch)

    def last_epoch(self):
        epochs = [line.rpartition(" ")[2] for line in self.log("coordinator").splitlines()
                  if "serving under epoch" in line]
        return int(epochs[-1])

    def fence(self):
        """The epoch in the fence of the training directory."""
        file, = glob.glob(os.path.join(self.checkpoints, ".*.fence"))
        with open(file) as text:
            return int(text.read())

    def saved(self):
        """{name: manifest} of the checkpoints that are visible."""
        found = {}
        for path in glob.glob(os.path.join(self.checkpoints, "*", "manifest.json")):
            with open(path) as file:
                found[os.path.basename(os.path.dirname(path))] = json.load(file)
        return found

    def tail(self):
        lines = ["%s: %s" % (name, line) for name in self.processes
                 for line in self.log(name).splitlines()[-8:]]
        for caller in self.callers:
            lines += map(str, caller.refused()[:4] + caller.calls[-4:])
        return "\n".join(lines)

    def stop(self):
        """Ends everything; returns the exit codes of daemons that the scene left alive."""
        for caller in self.callers:
            caller.stop()
        alive = {n: p for n, p in self.processes.items() if p.poll() is None}
        for process in alive.values():
            process.terminate()
        codes = {}
        for name, process in alive.items():
            try:
                codes[name] = process.wait(timeout=30)
            except subprocess.TimeoutExpired:
                process.kill()
                codes[name] = process.wait()
        shutil.rmtree(self.directory, ignore_errors=True)
        return codes


def longest_gap(calls):
    """Seconds between two answers that follow each other, at most."""
    times = [c["done"] for c in calls]
    return max((b - a for a, b in zip(times, times[1:])), default=0.0)


def sleep_s(seconds):
    """For the length of a fault. What is expected of it is waited for by events."""
    time.sleep(seconds)
