# SPDX-License-Identifier: Apache-2.0
"""An Ethernet switch with bad lines, for netns.py: frame_switch.py NAMESPACE...

Makes a TAP device eth0 in each namespace and forwards frames between them. Commands on stdin, each
answered with "done": impair PORT DELAY_MS LOSS | cut PORT | mend PORT. The end of stdin ends it.
"""

import collections
import ctypes
import fcntl
import os
import random
import select
import struct
import sys
import time

CLONE_NEWNET = 0x40000000
TUNSETIFF = 0x400454CA
IFF_TAP_NO_PI = 0x1002
LARGEST_FRAME = 65536
MAX_WAITING = 20000  # frames of one port


def open_tap(namespace):
    libc = ctypes.CDLL(None, use_errno=True)
    with open("/var/run/netns/" + namespace) as place:
        if libc.setns(place.fileno(), CLONE_NEWNET) != 0:
            raise OSError(ctypes.get_errno(), "setns " + namespace)
    tap = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(tap, TUNSETIFF, struct.pack("16sH", b"eth0", IFF_TAP_NO_PI))
    return tap


class Port:
    def __init__(self, tap):
        self.tap = tap
        self.delay = 0.0
        self.loss = 0.0
        self.cut = False
        self.waiting = collections.deque()  # (time, frame); in order, as all have one delay


class Switch:
    def __init__(self, namespaces):
        self.ports = [Port(open_tap(name)) for name in namespaces]
        self.port_of = {}  # MAC address -> port
        self.commands = b""

    def forward(self, source, frame):
        to = self.port_of.get(frame[:6])
        for port in self.ports if to is None else [to]:
            if port is not source and not port.cut:
                try:
                    os.write(port.tap, frame)
                except OSError:
                    pass  # the device is down or full: the frame is lost

    def take_frames(self, port):
        for _ in range(64):
            try:
                frame = os.read(port.tap, LARGEST_FRAME)
            except OSError:
                return
            self.port_of[frame[6:12]] = port
            if port.cut or random.random() < port.loss or len(port.waiting) >= MAX_WAITING:
                continue
            if port.delay == 0 and not port.waiting:
                self.forward(port, frame)
            else:
                port.waiting.append((time.monotonic() + port.delay, frame))

    def obey(self, line):
        word, port, *numbers = line.split()
        port = self.ports[int(port)]
        port.cut = word == "cut"
        port.delay, port.loss = 0.0, 0.0
        if word == "impair":
            port.delay, port.loss = float(numbers[0]) / 1000, float(numbers[1])
        print("done", flush=True)

    def take_commands(self):
        read = os.read(0, 4096)
        self.commands += read
        *lines, self.commands = self.commands.split(b"\n")
        for line in lines:
            self.obey(line.decode())
        return read != b""

    def run(self):
        poll = select.poll()
        poll.register(0, select.POLLIN)
        by_tap = {port.tap: port for port in self.ports}
        for tap in by_tap:
            poll.register(tap, select.POLLIN)
        print("ready", flush=True)
        while True:
            next_due = min((p.waiting[0][0] for p in self.ports if p.waiting), default=None)
            wait = None if next_due is None else max(0.0, next_due - time.monotonic()) * 1000
            for fd, _ in poll.poll(wait):
                if fd == 0 and not self.take_commands():
                    return
                if fd != 0:
                    self.take_frames(by_tap[fd])
            now = time.monotonic()
            for port in self.ports:
                while port.waiting and port.waiting[0][0] <= now:
                    self.forward(port, port.waiting.popleft()[1])


if __name__ == "__main__":
    Switch(sys.argv[1:]).run()
