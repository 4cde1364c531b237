# SPDX-License-Identifier: Apache-2.0
"""Attackers of TLS, on a real daemon with a light client next to them: handshakes that stop in the
middle, noise, and as many handshakes as two processes can make.

  test_handshakes.py BUILD MODELS [--seconds S] [unittest arguments]"""

import os
import random
import resource
import ssl
import subprocess
import sys
import threading
import time
import unittest

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, os.path.join(HERE, "..", "integration"))

import grpc  # noqa: E402

from group import main, wait_until  # noqa: E402
from test_tls import MODEL, scene  # noqa: E402
from test_access import read  # noqa: E402

from handshakes import connect, context_without_trust  # noqa: E402

SECONDS = 3.0
if "--seconds" in sys.argv:
    SECONDS = float(sys.argv.pop(sys.argv.index("--seconds") + 1))
    sys.argv.remove("--seconds")
HALF_OPEN = 1000
GROWTH = 128 << 20  # bytes that the daemon may take
LIMIT_S = 10        # time for a handshake
WORST_MS = 2000     # p99 of the light client; a relay that stands does so for seconds


def resident_bytes(pid):
    with open("/proc/%d/status" % pid, encoding="ascii") as file:
        return next(int(line.split()[1]) << 10 for line in file if line.startswith("VmRSS:"))


def client_hello():
    """The first bytes of a handshake, made by the library."""
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    try:
        context_without_trust().wrap_bio(incoming, outgoing).do_handshake()
    except ssl.SSLWantReadError:
        pass
    return outgoing.read()


class LightClient:
    """One connection that goes on, and a new one for each tenth call."""

    def __init__(self, s, endpoint):
        self.s, self.endpoint, self.errors = s, endpoint, []
        self.times, self.new_times = [], []
        self.stop = threading.Event()
        self.thread = threading.Thread(target=self.run)
        self.thread.start()

    def call(self, channel, times):
        began = time.monotonic()
        try:
            channel.unary_unary(MODEL)(b"", timeout=20)
            times.append(time.monotonic() - began)
        except grpc.RpcError as error:
            self.errors.append(error.code().name + " " + error.details())

    def run(self):
        with self.s.channel(self.endpoint, "client") as channel:
            while not self.stop.wait(0.002):
                self.call(channel, self.times)
                if len(self.times) % 10 == 0:
                    with self.s.channel(self.endpoint, "client") as fresh:
                        self.call(fresh, self.new_times)

    def end(self):
        self.stop.set()
        self.thread.join()


def percentile(times, share):
    return 1e3 * sorted(times)[min(len(times) - 1, int(share * len(times)))] if times else 0.0


class Handshakes(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        cls.context = scene()
        cls.scene = s = cls.context.__enter__()
        s.c.pair("client", "ca", "URI:spiffe://moed/client")
        coordinator = s.coordinator()
        cls.worker = s.worker(coordinator, "w0")
        wait_until(lambda: "serving under epoch" in read(cls.worker.log), 30)

    @classmethod
    def tearDownClass(cls):
        cls.context.__exit__(None, None, None)

    def attack(self, name, during):
        pid = self.worker.pid
        client = LightClient(self.scene, self.worker.endpoint)
        time.sleep(min(SECONDS, 2))
        before, quiet = resident_bytes(pid), list(client.times)
        del client.times[:], client.new_times[:]
        figure = during()
        peak = resident_bytes(pid)
        client.end()
        print("  %s: %s; light client: %d calls, p99 %.1f ms (%.1f before), %d new connections, "
              "p99 %.1f ms, %d errors; memory %d -> %d MiB" % (
                  name, figure, len(client.times), percentile(client.times, 0.99),
                  percentile(quiet, 0.99), len(client.new_times),
                  percentile(client.new_times, 0.99), len(client.errors), before >> 20, peak >> 20))
        self.assertEqual(client.errors, [])
        self.assertGreater(len(client.times), 0)
        self.assertLess(peak, before + GROWTH)
        # The attackers take processor time from the client, too: this finds a relay that stands.
        self.assertLess(percentile(client.times, 0.99), WORST_MS)

    def test_a_thousand_handshakes_that_stop_cost_others_nothing(self):
        """Each stops at another byte of the first message, or after it."""
        hello, peers = client_hello(), []

        def during():
            began = time.monotonic()
            for _ in range(HALF_OPEN):
                peer = connect(self.worker.endpoint)
                peer.sendall(hello[:random.randint(1, len(hello))])
                peers.append(peer)
            time.sleep(SECONDS)
            return "%d half open in %.1f s" % (len(peers), time.monotonic() - began)

        self.attack("half open", during)
        began = time.monotonic()
        for peer in peers:
            peer.settimeout(LIMIT_S + 50)
            while True:  # what the server says until it closes
                try:
                    if peer.recv(65536) == b"":
                        break
                except ConnectionResetError:
                    break
            peer.close()
        print("  the last one was closed %.1f s later" % (time.monotonic() - began))

    def test_noise_is_closed_at_once(self):
        def during():
            until, closed = time.monotonic() + SECONDS, 0
            while time.monotonic() < until:
                with connect(self.worker.endpoint) as peer:
                    head = random.choice([b"", b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc",
                                          b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"])
                    try:
                        peer.sendall(head + os.urandom(600))
                        peer.settimeout(5)
                        while peer.recv(65536) != b"":
                            pass
                    except (ConnectionResetError, BrokenPipeError):
                        pass
                    closed += 1
            return "%d closed" % closed

        self.attack("noise", during)

    def test_a_flood_of_handshakes_does_not_delay_calls(self):
        def during():
            attackers = [subprocess.Popen(
                [sys.executable, os.path.join(HERE, "handshakes.py"), self.worker.endpoint,
                 str(SECONDS)], stdout=subprocess.PIPE) for _ in range(2)]
            return "%d handshakes" % sum(int(each.communicate()[0]) for each in attackers)

        self.attack("flood", during)


if __name__ == "__main__":
    main()
