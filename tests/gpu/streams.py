# SPDX-License-Identifier: Apache-2.0
"""Requests of CUDA streams (moe/client_cuda.h) to a real worker on GPU 0, from a client on the same
GPU and, where there are two, on GPU 1. Usage: as the programs of tests/integration; all of it in a
minute or two by streams.sh.

MOE_STREAM_ROUNDS: launches of the captured graph (default 10000). MOE_STREAM_MODEL: directory of
another model for the benchmark (tests/bench/make_model.py); MOE_STREAM_TOKENS: its batches;
MOE_STREAM_WAYS: how streams wait, of "sleep spin".
"""

import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import unittest
import urllib.request

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, os.path.join(os.path.dirname(HERE), "integration"))
from group import (BUILD, DEVICES, Group, freeze, main, model_directory,  # noqa: E402
                   open_files, wait_until)

FAMILY = "mixtral"
CLIENT = os.path.join(BUILD, "tests", "unit", "stream_client")
ROUNDS = os.environ.get("MOE_STREAM_ROUNDS", "10000")
TOKENS = os.environ.get("MOE_STREAM_TOKENS", "1 16 128").split()
ALONE = 4000  # requests of `stream_client frozen`
LIMIT_S = 120  # of one client


class Streams(unittest.TestCase):
    device = 0
    ways = ("sleep",)  # a kernel that polls would take the worker's time

    def setUp(self):
        if self.device >= DEVICES:
            self.skipTest("there is no GPU %d" % self.device)
        self.settings = tempfile.NamedTemporaryFile("w", suffix=".ini")
        self.addCleanup(self.settings.close)
        self.settings.write("allow-client-memory = 4G\nspin-us = 5000\n")
        self.settings.flush()

    def group(self, model=None):
        with socket.socket() as s:
            s.bind(("127.0.0.1", 0))
            port = s.getsockname()[1]
        g = Group(model or model_directory(FAMILY), 1, "--worker-config", self.settings.name,
                  "--metrics-port", str(port - 1))
        g.page = "http://127.0.0.1:%d/metrics" % port  # of the worker
        self.addCleanup(g.stop)
        return g

    def ended(self, g):
        """Requests through rings that the worker has ended."""
        with urllib.request.urlopen(g.page) as page:
            lines = page.read().decode().splitlines()
        return sum(int(float(line.split()[-1])) for line in lines
                   if line.startswith("moe_requests_total{") and 'rpc="Ring"' in line)

    def start(self, g, way, *command, **options):
        return subprocess.Popen([CLIENT, g.endpoint, str(self.device), way, *command],
                                stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                                **options)

    def client(self, g, way, *command):
        with self.start(g, way, *command) as process:
            try:
                text, _ = process.communicate(timeout=LIMIT_S)
            except subprocess.TimeoutExpired:
                process.kill()
                text, _ = process.communicate()
                self.fail("the client hangs: " + text)
        print(text, end="")
        self.assertEqual(process.returncode, 0, text)
        return text.splitlines()[-1]

    def test_y_is_that_of_forward(self):
        g = self.group()
        for way in self.ways:
            self.assertEqual(self.client(g, way, "check"), "same")

    def test_a_captured_graph_is_launched_again_and_again(self):
        g = self.group()
        for way in self.ways:
            self.assertEqual(self.client(g, way, "graph", ROUNDS), "same")

    def test_requests_need_no_call_of_the_host(self):
        """The client's process is stopped, with all of its threads, while its requests run."""
        g = self.group()
        for way in self.ways:
            before = self.ended(g)
            with self.start(g, way, "frozen", stdin=subprocess.PIPE) as process:
                self.assertEqual(process.stdout.readline(), "ready\n")
                process.stdin.write("\n")
                process.stdin.flush()
                self.assertEqual(process.stdout.readline(), "launched\n")
                freeze(process.pid)
                stopped = self.ended(g) - before
                wait_until(lambda: self.ended(g) - before == ALONE, 20)
                os.kill(process.pid, signal.SIGCONT)
                text, _ = process.communicate(timeout=30)
            print("%d of %d requests ended after the client was stopped" % (ALONE - stopped, ALONE))
            self.assertGreater(ALONE - stopped, 100)  # launches wait for room in a queue
            self.assertEqual((process.returncode, text), (0, "same\n"))

    def test_a_killed_worker_releases_the_graph(self):
        for way in self.ways:
            g = self.group()
            pid = g.worker_pids()[0]
            with self.start(g, way, "killed") as process:
                self.assertEqual(process.stdout.readline(), "ready\n")
                time.sleep(0.3)
                os.kill(pid, signal.SIGKILL)
                killed = time.monotonic()
                try:
                    text, _ = process.communicate(timeout=30)
                except subprocess.TimeoutExpired:
                    process.kill()
                    self.fail("the graph is not released")
            print(text, "all of it %.2f s after the kill" % (time.monotonic() - killed))
            self.assertEqual((process.returncode, text.splitlines()[-1]), (0, "released"))

    def test_nothing_of_a_killed_client_stays(self):
        """Killed while its graphs run; the worker serves on and keeps no descriptor of it."""
        g = self.group()
        pid = g.worker_pids()[0]
        self.client(g, "sleep", "graph", "10")
        before = len(open_files(pid))
        for _ in range(5):
            with self.start(g, self.ways[-1], "killed") as process:
                self.assertEqual(process.stdout.readline(), "ready\n")
                process.kill()
        end = time.monotonic() + 20
        while len(open_files(pid)) > before and time.monotonic() < end:
            time.sleep(0.05)
        self.assertLessEqual(len(open_files(pid)), before)
        self.assertEqual(self.client(g, "sleep", "graph", "100"), "same")

    def test_times(self):
        """Printed, not judged."""
        g = self.group(os.environ.get("MOE_STREAM_MODEL"))
        for way in self.ways:
            print("client on GPU %d, %s" % (self.device, way))
            self.client(g, way, "bench", *TOKENS)


class PeerStreams(Streams):
    device = 1
    ways = os.environ.get("MOE_STREAM_WAYS", "sleep spin").split()


if __name__ == "__main__":
    main()
