# SPDX-License-Identifier: Apache-2.0
"""Attackers who take all connections and sessions, on real daemons with few descriptors. A member
that was killed comes back meanwhile, about as fast as without them.

  test_places.py BUILD MODELS [unittest arguments]"""

import os
import socket
import sys
import threading
import time
import unittest

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, os.path.join(HERE, "..", "integration"))

from group import main, wait_until  # noqa: E402
from test_access import COORDINATOR, daemons, read, write  # noqa: E402

import h2  # noqa: E402

SESSION = b"/moe.v1.CoordinatorService/Session"
TOKEN = "the-token-of-a-group-under-attack"
DESCRIPTORS = 600  # of each daemon: 39 connections of workers, 118 of others
TAKEN = 300        # connections that an attacker keeps open; the daemon closes most of them
BACK_S = 60        # without the defence, a member waits until the attack ends: it lasts longer


def connect_from(host, endpoint):
    address, port = endpoint.rsplit(":", 1)
    peer = socket.socket()
    peer.bind((host, 0))
    peer.settimeout(2)
    peer.connect((address, int(port)))
    return peer


def silent_sessions():
    """Eight sessions of a caller who has the group's token and says nothing."""
    block = h2.call_headers(SESSION) + b"\x00" + h2.text(b"authorization") + h2.text(
        b"Bearer " + TOKEN.encode())
    return h2.begin() + b"".join(h2.frame(h2.HEADERS, h2.END_HEADERS, stream, block)
                                 for stream in range(1, 17, 2))


class Attacker:
    """Keeps connections from many loopback addresses open, and opens new ones for those that the
    daemon has closed."""

    def __init__(self, endpoint, say, lifetime):
        self.endpoint, self.say, self.lifetime = endpoint, say, lifetime
        self.opened = self.lost = 0
        self.stop = threading.Event()
        self.thread = threading.Thread(target=self.run)
        self.thread.start()

    def open_one(self):
        try:
            peer = connect_from("127.0.%d.%d" % (self.opened % 4, 1 + self.opened % 200),
                                self.endpoint)
            peer.sendall(self.say())
        except OSError:
            self.lost += 1
            return None
        self.opened += 1
        peer.setblocking(False)
        return peer

    def is_open(self, peer):
        try:
            while peer.recv(4096) != b"":
                pass
        except BlockingIOError:
            return True
        except OSError:
            pass
        self.lost += 1
        peer.close()
        return False

    def run(self):
        peers = []
        while not self.stop.is_set():
            now = time.monotonic()
            peers = [(peer, end) for peer, end in peers if self.is_open(peer)]
            for peer, _ in (each for each in peers if each[1] <= now):
                peer.close()
            peers = [(peer, end) for peer, end in peers if end > now]
            # 250 a second: each takes one of 29 places, so a newcomer has 0.1 s to register.
            for _ in range(min(5, TAKEN - len(peers))):
                peer = self.open_one()
                if peer is not None:
                    peers.append((peer, now + self.lifetime))
            time.sleep(0.02)
        for peer, _ in peers:
            peer.close()

    def end(self):
        self.stop.set()
        self.thread.join()


class Places(unittest.TestCase):
    def setUp(self):
        d = self.daemons = self.enterContext(daemons())
        token, few = os.path.join(d.where, "token"), os.path.join(d.where, "few")
        write(token, TOKEN + "\n")
        write(few, '#!/bin/sh\nulimit -n %d && exec %s "$@"\n' % (DESCRIPTORS, COORDINATOR), 0o700)
        self.options = ("--token-file", token)
        coordinator = d.start("coordinator", few, "--listen", "127.0.0.1:0", "--control-listen",
                              "127.0.0.1:0", "--workers", "2", *self.options)
        self.public, self.control = coordinator.endpoint.split()
        # By TCP and token, as from a container: to the listener this is a loopback address.
        self.elsewhere = dict(d.environment, MOED_RUNTIME_DIR=os.path.join(d.where, "elsewhere"))
        self.logs = []
        self.workers = [self.start(name) for name in ("w0", "w1")]
        wait_until(lambda: self.serving() == 2, 30)

    def start(self, name):
        """Each process has a separate log."""
        log = os.path.join(self.daemons.where, "%s.%d" % (name, len(self.logs)))
        worker = self.daemons.worker(self.control, name, *self.options, "--log-file", log,
                                     environment=self.elsewhere)
        self.logs.append(log)
        return worker

    def serving(self):
        return sum(read(log).count("serving under epoch") for log in self.logs)

    def replace(self):
        """Kills w1 and starts it anew; the seconds until both serve again."""
        self.workers[1].kill()
        self.workers[1].wait()
        before, began = self.serving(), time.monotonic()
        self.workers[1] = self.start("w1")
        wait_until(lambda: self.serving() == before + 2, BACK_S)
        return time.monotonic() - began

    def attack(self, *attacks):
        quiet = self.replace()
        attackers = [Attacker(*each) for each in attacks]
        for each in attackers:
            self.addCleanup(each.end)
        wait_until(lambda: all(each.lost > 0 for each in attackers))  # all places are taken
        back = [self.replace() for _ in range(2)]
        for each in attackers:
            each.end()
            print("  %d connections opened, %d lost" % (each.opened, each.lost))
        print("  back after %s s; %.2f s without the attack" %
              (", ".join("%.2f" % each for each in back), quiet))

    def test_connections_of_strangers(self):
        self.attack((self.control, h2.begin, 60), (self.public, h2.begin, 60))

    def test_silent_sessions_of_a_caller_with_the_token(self):
        self.attack((self.control, silent_sessions, 60))


if __name__ == "__main__":
    main()
