# SPDX-License-Identifier: Apache-2.0
"""Attacks on the port for metrics and probes of a real worker: requests that never end, answers
that stay unread, many connections, long lines, and requests without a pause. Probes and scrapes
are answered meanwhile; a client of the worker notices nothing.

  test_http.py BUILD MODELS [--seconds S] [unittest arguments]"""

import random
import socket
import threading
import time
import unittest
import urllib.error
import urllib.request

from test_attack import SECONDS, LightClient, percentile, resident_bytes

from group import group, main

FAMILY = "qwen3_moe"
THREADS = 3
PROBE_S = 20        # the attack goes on while a probe waits
PROBES = 5
GROWTH = 64 << 20   # bytes that the worker may take under attack
GET = b"GET /metrics HTTP/1.1\r\nHost: a\r\n\r\n"


class Attack:
    """Keeps `open` connections, gives each to `turn` in turn, and replaces those that end."""

    def __init__(self, port, held, turn):
        self.port, self.held, self.turn = port, held, turn
        self.opened = self.ended = 0
        self.stop = threading.Event()
        self.threads = [threading.Thread(target=self.run) for _ in range(THREADS)]
        for thread in self.threads:
            thread.start()

    def run(self):
        peers = []
        while not self.stop.is_set():
            while len(peers) < self.held:
                peer = socket.socket()
                peer.settimeout(0.5)
                try:
                    peer.connect(("127.0.0.1", self.port))
                except OSError:
                    peer.close()
                    break
                peer.setblocking(False)
                self.opened += 1
                peers.append(peer)
            for peer in list(peers):
                try:
                    self.turn(peer)
                except BlockingIOError:
                    pass
                except OSError:
                    self.ended += 1
                    peers.remove(peer)
                    peer.close()
            time.sleep(0.002)
        for peer in peers:
            peer.close()

    def end(self):
        self.stop.set()
        for thread in self.threads:
            thread.join()


def half_request(peer):
    """All but the end, once; then it looks whether the connection is open."""
    try:
        if peer.recv(1) == b"":
            raise ConnectionError
    except BlockingIOError:
        if random.random() < 0.05:
            peer.send(b"GET /met")


def slow_request(peer):
    """A header line that grows by a byte now and then."""
    peer.send(b"GET /metrics HTTP/1.1\r\nX: ")
    if random.random() < 0.1:
        peer.send(b"x")


def unread_answers(peer):
    peer.send(GET * 20)


def long_line(peer):
    peer.send(b"GET /" + b"a" * (1 << 20))


def no_pause(peer):
    try:
        while peer.recv(1 << 20):
            pass
        raise ConnectionError
    except BlockingIOError:
        pass
    peer.send(GET * 50)


class Http(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.port = random.randrange(20000, 30000)
        cls.context = group(FAMILY, 1, "--metrics-port", str(cls.port))
        cls.group = cls.context.__enter__()
        cls.worker = cls.group.description()["processes"][-1]

    @classmethod
    def tearDownClass(cls):
        cls.context.__exit__(None, None, None)

    def probe_once(self, path):
        began = time.monotonic()
        with urllib.request.urlopen("http://127.0.0.1:%d%s" % (self.port + 1, path),
                                    timeout=PROBE_S) as page:
            self.assertEqual(page.status, 200)
            self.assertGreater(len(page.read()), 0)
        return time.monotonic() - began

    def probe(self, path):
        """As in a cluster, several closed connections in a row make a failure. A busy host may stop
        this process between its connection and its request, until that connection is the oldest."""
        for _ in range(PROBES - 1):
            try:
                return self.probe_once(path)
            except ConnectionError:
                self.closed += 1
            except urllib.error.URLError as error:
                if not isinstance(error.reason, ConnectionError):
                    raise
                self.closed += 1
        return self.probe_once(path)

    def attack(self, turn, held):
        self.closed = 0
        client = LightClient(self.group.endpoint)
        self.addCleanup(client.end)
        before = resident_bytes(self.worker["pid"])
        attack = Attack(self.port + 1, held, turn)
        self.addCleanup(attack.end)
        end, times = time.monotonic() + SECONDS, []
        while time.monotonic() < end:
            times += [self.probe("/healthz"), self.probe("/metrics")]
            time.sleep(0.02)
        peak = resident_bytes(self.worker["pid"])
        attack.end()
        client.end()
        print("  %d connections, %d ended; %d probes, worst %.0f ms, %d closed; light client: %d "
              "calls, p99 %.1f ms; memory %d -> %d MiB" % (
                  attack.opened, attack.ended, len(times), 1e3 * max(times), self.closed,
                  len(client.times), 1e3 * percentile(client.times, 0.99), before >> 20,
                  peak >> 20))
        self.assertEqual(client.errors, [])
        self.assertEqual(client.wrong, 0)
        self.assertLess(peak, before + GROWTH)
        return attack

    def test_half_requests(self):
        self.assertGreater(self.attack(half_request, 150).ended, 0)

    def test_slow_requests(self):
        self.assertGreater(self.attack(slow_request, 150).ended, 0)

    def test_answers_that_are_left_unread(self):
        self.attack(unread_answers, 60)

    def test_long_request_lines(self):
        self.assertGreater(self.attack(long_line, 10).ended, 0)

    def test_requests_without_a_pause(self):
        self.attack(no_pause, 20)


if __name__ == "__main__":
    main()
