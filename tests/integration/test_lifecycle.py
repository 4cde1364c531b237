# SPDX-License-Identifier: Apache-2.0
"""A group as an operator sees it: start, status, drain, death of a worker, end."""

import contextlib
import json
import os
import resource
import shutil
import signal
import socket
import subprocess
import tempfile
import threading
import unittest
import urllib.request

import grpc
import numpy as np

from group import (BUILD, Group, freeze, golden_cases, group, main, model_directory, moectl,
                   relative_error, wait_until)
from training import COORDINATOR, TrainingGroup, start
import wire
from wire import expert

FAMILY = "qwen3_moe"


def processes_of(g):
    """Process ids of the group's daemons that still run."""
    pids = [entry["pid"] for entry in g.description()["processes"]]
    return [pid for pid in pids if os.path.exists("/proc/%d" % pid)]


def text_of(path):
    with open(path) as file:
        return file.read()


def case():
    return next(each for each in golden_cases(FAMILY) if each[1] == 37)


def request():
    layer, tokens, x, _ = case()
    return expert.ForwardRequest(layer=layer, tokens=tokens, hidden=x.shape[1], dtype=1,
                                 x_data=x.tobytes())


def start_daemon(role, *arguments):
    """Starts a daemon without moectl; returns (process, address)."""
    ready, ready_write = os.pipe()
    process = subprocess.Popen(
        [os.path.join(BUILD, "daemon", role, "moe-" + role), *arguments, "--ready-fd",
         str(ready_write), "--log-level", "error"], pass_fds=[ready_write])
    os.close(ready_write)
    with os.fdopen(ready) as line:
        return process, line.readline().strip()


class Coordinator(unittest.TestCase):
    def test_members_come_back_within_a_lease_after_a_long_absence(self):
        """Even if the coordinator was away for long (pauses between attempts grow), the group goes
        on in its epoch."""
        state = tempfile.mkdtemp(prefix="moed-test-")
        self.addCleanup(shutil.rmtree, state, True)

        def daemon(role, *arguments):
            process, address = start_daemon(role, *arguments)
            self.addCleanup(lambda: (process.kill(), process.wait()))
            return process, address

        def coordinator(listen):
            return daemon("coordinator", "--listen", listen, "--workers", "2", "--lease-ms",
                          "8000", "--state-dir", state)

        def status():
            done = moectl("status", "--endpoint", address, "-o", "json", check=False)
            return json.loads(done.stdout) if done.returncode == 0 else {"state": "UNREACHABLE"}

        process, address = coordinator("127.0.0.1:0")
        for _ in range(2):
            daemon("worker", "--model", model_directory(FAMILY), "--coordinator", address,
                   "--backend", "cpu")
        wait_until(lambda: status()["state"] == "SERVING")
        epoch = status()["epoch"]
        port = int(address.rsplit(":", 1)[1])
        process.kill()
        process.wait()
        with self.closing_server(port) as connections:  # until pauses between attempts have grown
            wait_until(lambda: len(connections) >= 10)
        coordinator(address)
        wait_until(lambda: status()["state"] == "SERVING")  # as soon as both have reconnected
        self.assertEqual(status()["epoch"], epoch)

    @contextlib.contextmanager
    def closing_server(self, port):
        """Closes each connection to `port` at once; yields the list of connections."""
        connections = []
        with socket.create_server(("127.0.0.1", port)) as server:
            def answer():
                with contextlib.suppress(OSError):
                    while True:
                        server.accept()[0].close()
                        connections.append(1)

            thread = threading.Thread(target=answer)
            thread.start()
            yield connections
            server.shutdown(socket.SHUT_RDWR)  # accept() ends
            thread.join()


class KeptSession(unittest.TestCase):
    """A view that has ended leaves windows behind, for a mask of it."""

    def daemon(self, role, *arguments):
        process, address = start_daemon(role, *arguments)
        self.addCleanup(lambda: (process.kill(), process.wait()))
        return process, address

    def worker(self, address, name):
        return self.daemon("worker", "--model", model_directory(FAMILY), "--coordinator", address,
                           "--backend", "cpu", "--worker-id", name)[0]

    def windows(self, process):
        with open("/proc/%d/maps" % process.pid) as maps:
            return sum("memfd:moe-window" in line for line in maps)

    def test_a_worker_that_waits_for_a_lost_one_gives_its_windows_back(self):
        with tempfile.TemporaryDirectory(prefix="moed-test-") as state:
            _, address = self.daemon("coordinator", "--listen", "127.0.0.1:0", "--workers", "2",
                                     "--lease-ms", "2000", "--state-dir", state)
            stays, goes = (self.worker(address, name) for name in ("w0", "w1"))
            serving = ("wait", "--endpoint", address, "--timeout", "60")
            moectl(*serving)
            with_view = self.windows(stays)
            self.assertGreater(with_view, 0)
            goes.kill()
            wait_until(lambda: self.windows(stays) == 0)
            self.worker(address, "w1")
            moectl(*serving)
            self.assertEqual(self.windows(stays), with_view)


class DownAfterARestart(unittest.TestCase):
    """A restarted coordinator has no address of a worker that has not reconnected."""

    def restarted(self, lease_ms, *stopped):
        # A worker misses a stopped one after that budget, and the coordinator then waits for none.
        g = TrainingGroup(FAMILY, 2, "--wait-budget-ms", str(lease_ms), lease_ms=lease_ms)
        self.addCleanup(g.stop)
        for slot in stopped:
            freeze(g.workers[slot].pid)
            self.addCleanup(g.workers[slot].send_signal, signal.SIGCONT)
        g.coordinator.kill()
        g.coordinator.wait()
        g.coordinator, _ = start(COORDINATOR, "--listen", g.address, "--workers", "2",
                                 "--state-dir", g.state, "--lease-ms", str(lease_ms))
        return g

    def test_down_waits_for_all_workers(self):
        for asked in ("coordinator", "worker"):
            g = self.restarted(10000)
            done = moectl("down", "--endpoint",
                          g.address if asked == "coordinator" else g.endpoints[1])
            print(done.stderr)
            self.assertNotIn("has not reconnected", done.stderr)
            self.assertEqual([each.wait(timeout=60) for each in [*g.workers, g.coordinator]],
                             [0, 0, 0])

    def test_a_worker_that_does_not_reconnect_is_named(self):
        g = self.restarted(3000, 1)
        done = moectl("down", "--endpoint", g.address)
        print(done.stderr)
        self.assertIn("slot 1 (worker w1) has not reconnected", done.stderr)
        self.assertNotIn("slot 0", done.stderr)
        self.assertEqual([g.workers[0].wait(timeout=60), g.coordinator.wait(timeout=60)], [0, 0])
        self.assertIsNone(g.workers[1].poll())

    def test_daemons_that_have_not_ended_at_the_time_limit_are_named(self):
        g = self.restarted(30000, 1)
        done = moectl("down", "--endpoint", g.address, "--timeout", "2", check=False)
        print(done.stderr)
        self.assertEqual(done.returncode, 5)
        self.assertIn("slot 1 (worker w1) has not reconnected", done.stderr)
        self.assertIn("daemons that have not ended: " + g.address, done.stderr)
        for process in [*g.workers, g.coordinator]:  # they would wait for slot 1 and its lease
            process.kill()


class CoordinatorAlone(unittest.TestCase):
    """Without workers."""

    def setUp(self):
        where = tempfile.TemporaryDirectory(prefix="moed-alone-")
        self.addCleanup(where.cleanup)
        self.state, self.log = (os.path.join(where.name, name) for name in ("state", "log"))

    def start(self):
        process, endpoint = start(COORDINATOR, "--listen", "127.0.0.1:0", "--workers", "2",
                                  "--state-dir", self.state, "--log-file", self.log,
                                  "--log-level", "warn")
        self.addCleanup(process.wait)
        self.addCleanup(process.kill)
        return process, endpoint

    def cordons(self, endpoint):
        done = moectl("status", "--endpoint", endpoint, "-o", "json", check=False)
        return [c["slot"] for c in json.loads(done.stdout)["cordons"]]

    def test_a_log_that_ends_within_a_record_costs_a_warning(self):
        process, endpoint = self.start()
        for slot in ("0", "1"):
            moectl("cordon", slot, "--reason", "test", "--endpoint", endpoint)
        process.kill()
        process.wait()
        path = os.path.join(self.state, "group.log")
        os.truncate(path, os.path.getsize(path) - 3)
        _, endpoint = self.start()
        self.assertEqual(self.cordons(endpoint), [0])
        with open(self.log) as log:
            self.assertIn("group.log ends with an incomplete record", log.read())

    def test_what_is_not_known_yet_is_not_shown(self):
        _, endpoint = self.start()
        done = moectl("status", "--endpoint", endpoint, check=False)
        self.assertEqual(done.returncode, 3, done.stderr)
        self.assertNotIn("model ", done.stdout)
        self.assertIn("workers  0 of 2\n", done.stdout)


class Lifecycle(unittest.TestCase):
    def test_status_shows_a_serving_group(self):
        with group(FAMILY, 3) as g:
            status = json.loads(
                moectl("status", "--endpoint", g.endpoint, "-o", "json").stdout)
            self.assertEqual(status["state"], "SERVING")
            self.assertEqual(len(status["workers"]), 3)
            table = moectl("status", "--endpoint", g.endpoint).stdout
            self.assertIn("SERVING", table)

    def test_every_worker_serves_the_whole_layer(self):
        layer, tokens, x, want = case()
        with group(FAMILY, 4) as g:
            def workers():
                with wire.open_channel(g.endpoint) as channel:
                    return wire.get_server_info(channel).workers

            wait_until(lambda: len(workers()) == 4)  # the coordinator knows of the view first
            for endpoint in workers():
                with wire.open_channel(endpoint) as channel:
                    answer = wire.forward(channel, request())
                got = np.frombuffer(answer.y_data, np.float32).reshape(want.shape)
                self.assertLessEqual(relative_error(got, want), 1e-5)

    def test_spinning_workers_serve_right_numbers_and_then_sleep(self):
        layer, tokens, x, want = case()

        def states(pids):
            """States of all threads: R runs or is runnable, S sleeps."""
            found = set()
            for pid in pids:
                for thread in os.listdir("/proc/%d/task" % pid):
                    with contextlib.suppress(FileNotFoundError, ProcessLookupError), \
                            open("/proc/%d/task/%s/stat" % (pid, thread)) as file:
                        found.add(file.read().rsplit(")", 1)[1].split()[0])
            return found

        with tempfile.NamedTemporaryFile("w", suffix=".conf") as settings:
            settings.write("spin-us = 1000\n")
            settings.flush()
            with group(FAMILY, 2, "--worker-config", settings.name) as g:
                pids = processes_of(g)
                with wire.open_channel(g.endpoint) as channel:
                    workers = wire.get_server_info(channel).workers
                for _ in range(100):
                    for endpoint in workers:
                        with wire.open_channel(endpoint) as channel:
                            answer = wire.forward(channel, request())
                        got = np.frombuffer(answer.y_data, np.float32).reshape(want.shape)
                        self.assertLessEqual(relative_error(got, want), 1e-5)
                # A spinning thread is in state R even during a long wait.
                asleep = []

                def all_sleep():
                    asleep.append(states(pids) <= {"S"})
                    return asleep[-5:] == [True] * 5

                wait_until(all_sleep)

    def test_ctrl_c_answers_calls_in_flight_and_leaves_no_process(self):
        g = Group(model_directory(FAMILY), 2)
        pids = processes_of(g)
        self.assertEqual(len(pids), 3)
        failures, answers = [], []
        stop = threading.Event()

        def client():
            with wire.open_channel(g.endpoint) as channel:
                while not stop.is_set():
                    try:
                        wire.forward(channel, request())
                        answers.append(1)
                    except grpc.RpcError as error:
                        failures.append((error.code().name, wire.error_reason(error)[0]))
                        if error.code() == grpc.StatusCode.UNAVAILABLE:
                            return

        threads = [threading.Thread(target=client) for _ in range(4)]
        for thread in threads:
            thread.start()
        wait_until(lambda: len(answers) > 20)
        code = g.stop()
        stop.set()
        for thread in threads:
            thread.join()
        print(len(answers), "answers, then", failures)
        self.assertEqual(code, 0)
        self.assertLessEqual({name for name, _ in failures}, {"UNAVAILABLE"})
        self.assertEqual([pid for pid in pids if os.path.exists("/proc/%d" % pid)], [])

    def test_detached_group_goes_down_by_command(self):
        state = tempfile.mkdtemp(prefix="moed-test-")
        self.addCleanup(shutil.rmtree, state, ignore_errors=True)
        up = moectl("up", "--model", model_directory(FAMILY), "--workers", "2", "--backend", "cpu",
                    "--port", "0", "--state-dir", state, "--detach")
        endpoint = up.stdout.split()[0]
        self.assertEqual(moectl("status", "--endpoint", endpoint).returncode, 0)
        self.assertEqual(moectl("wait", "--endpoint", endpoint, "--for=serving").returncode, 0)
        moectl("down", "--state-dir", state)
        self.assertEqual(moectl("status", "--endpoint", endpoint, check=False).returncode, 5)

    def test_sighup_reopens_the_logs_and_ends_no_daemon(self):
        """As log rotation: renames the logs of a group in the foreground, then sends SIGHUP."""
        with group(FAMILY, 2) as g, wire.open_channel(g.endpoint) as channel:
            epoch = wire.get_server_info(channel).epoch
            daemons = g.description()["processes"]
            logs = [os.path.join(g.state, daemon["name"] + ".log") for daemon in daemons]
            self.assertEqual(len(logs), 3)
            for log in logs:
                os.rename(log, log + ".1")
            for daemon in daemons:
                os.kill(daemon["pid"], signal.SIGHUP)

            def said_in_new_file(log):
                return os.path.exists(log) and "SIGHUP" in text_of(log)

            for log in logs:
                wait_until(lambda: said_in_new_file(log))
                self.assertNotIn("SIGHUP", text_of(log + ".1"))
            self.assertEqual(processes_of(g), [daemon["pid"] for daemon in daemons])
            self.assertEqual(wire.get_server_info(channel).epoch, epoch)
            wire.forward(channel, request())
        # `group` checks that Ctrl-C ends with code 0.

    def test_half_requests_to_the_metrics_ports_block_no_probe(self):
        """The host of the scraper opens sockets that send half a request and then nothing."""
        half = 1500
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        self.addCleanup(resource.setrlimit, resource.RLIMIT_NOFILE, (soft, hard))
        with contextlib.ExitStack() as held:  # two free ports in a row
            sockets = []
            while len(sockets) < 2:
                held.close()
                sockets = [held.enter_context(socket.create_server(("127.0.0.1", 0)))]
                port = sockets[0].getsockname()[1]
                try:
                    sockets += [held.enter_context(socket.create_server(("127.0.0.1", port + 1)))]
                except (OSError, OverflowError):
                    continue
        with contextlib.ExitStack() as flood, \
                group(FAMILY, 1, "--metrics-port", str(port)) as g:
            daemons = [port, port + 1]
            for i in range(half):
                for at in daemons:
                    s = flood.enter_context(socket.create_connection(("127.0.0.1", at), 60))
                    s.sendall(b"GET /met")
                if i % 500 != 499:
                    continue
                for at in daemons:
                    for page in ("metrics", "healthz"):
                        url = "http://127.0.0.1:%d/%s" % (at, page)
                        with urllib.request.urlopen(url, timeout=60) as answer:
                            self.assertEqual(answer.status, 200)
            with wire.open_channel(g.endpoint) as channel:
                wire.forward(channel, request())
            self.assertEqual(g.stop(), 0)  # with the half requests still open

    def test_a_killed_worker_gives_typed_errors_and_no_hang(self):
        g = Group(model_directory(FAMILY), 3)
        try:
            with wire.open_channel(g.endpoint) as channel:
                wire.forward(channel, request())
                victim = [p["pid"] for p in g.description()["processes"]
                          if p["name"].startswith("worker")][-1]
                os.kill(victim, signal.SIGKILL)
                seen = []

                def failed():
                    try:
                        wire.forward(channel, request(), timeout=10)
                    except grpc.RpcError as failure:
                        seen.append(failure)
                    return seen

                wait_until(failed)
                error = seen[0]
                print(error.code().name, error.details())
                self.assertIn(error.code(), (grpc.StatusCode.UNAVAILABLE,
                                             grpc.StatusCode.DEADLINE_EXCEEDED))
        finally:
            code = g.stop()
        self.assertEqual(code, 1, "moectl up must exit with 1 when a daemon dies")

    def test_a_worker_that_cannot_load_its_model_is_reported(self):
        with self.assertRaises(RuntimeError):
            Group("/nonexistent/model", 1)


if __name__ == "__main__":
    main()
