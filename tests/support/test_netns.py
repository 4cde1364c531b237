# SPDX-License-Identifier: Apache-2.0
"""The hosts of netns.py reach each other, and each fault does what it says."""

import subprocess
import sys
import unittest

import netns

PROBE = """
import socket, sys
s = socket.create_connection((sys.argv[1], 7000), timeout=float(sys.argv[2]))
s.sendall(b"x")
assert s.recv(1) == b"x"
"""
ECHO = """
import socket, sys
l = socket.create_server((sys.argv[1], 7000))
print("ready", flush=True)
while True:
    c, _ = l.accept()
    c.sendall(c.recv(1))
    c.close()
"""


class Hosts(unittest.TestCase):
    def reaches(self, net, host, other, seconds=0.7):
        return net.run(host, [sys.executable, "-c", PROBE, net.address(other), str(seconds)],
                       stderr=subprocess.DEVNULL).returncode == 0

    def start(self, net):
        for host in range(net.hosts):
            echo = net.popen(host, [sys.executable, "-c", ECHO, net.address(host)],
                             stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
            self.addCleanup(echo.stdout.close)
            self.assertEqual(echo.stdout.readline(), "ready\n")

    def cuts(self, net):
        self.assertTrue(self.reaches(net, 0, 1, 10))
        net.cut(1)
        self.assertFalse(self.reaches(net, 0, 1))
        self.assertTrue(self.reaches(net, 0, 2, 10))
        net.mend(1)
        self.assertTrue(self.reaches(net, 0, 1, 10))
        net.cut(0, to=[2])
        self.assertFalse(self.reaches(net, 0, 2))
        self.assertTrue(self.reaches(net, 0, 1, 10))
        net.mend(0)
        self.assertTrue(self.reaches(net, 0, 2, 10))

    def test_bridge(self):
        with netns.Network(3) as net:
            self.start(net)
            self.cuts(net)

    def test_switch(self):
        with netns.Network(3, switch=True) as net:
            self.start(net)
            self.cuts(net)
            net.impair(2, delay_ms=600)
            self.assertFalse(self.reaches(net, 1, 2, 0.3))
            self.assertTrue(self.reaches(net, 1, 2, 10))
            net.impair(2, loss=1.0)
            self.assertFalse(self.reaches(net, 1, 2))
            net.mend(2)
            self.assertTrue(self.reaches(net, 1, 2, 10))


if __name__ == "__main__":
    netns.require()
    unittest.main(verbosity=2)
