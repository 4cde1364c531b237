# SPDX-License-Identifier: Apache-2.0
"""Clients that hold connections and send too little: stalled uploads, half-sent messages, idle
connections. They keep HTTP/2's windows, and come back when the server ends a call.

Add a scene: a line in SCENES."""

import argparse
import json
import select
import struct
import sys
import time

import h2

FORWARD, STREAM = h2.FORWARD, b"/moe.v1.ExpertService/ForwardStream"
MIB = 1 << 20
WINDOW, PART = 65535, 16384

# name: (connections, calls of each, path, announced bytes, bytes that are sent at once, seconds
# until the server has ended the first call). Then one byte a second follows.
SCENES = {
    "stalled-8": (8, 1, FORWARD, 16 << 10, 8, 4),
    "stalled-200": (200, 1, FORWARD, 16 << 10, 8, 4),
    "stalled-large-8": (8, 1, FORWARD, 110 * MIB, 8, 4),
    "stalled-large-200": (200, 1, FORWARD, 110 * MIB, MIB, 4),
    "half-streams": (2, 20, STREAM, 110 * MIB, 110 * MIB - 1000, 9),
    "half-small-streams": (4, 100, STREAM, MIB // 2, MIB // 2 - 1000, 9),
    "two-gib": (1, 1, FORWARD, (1 << 31) - 1, MIB, 4),
    "idle": (300, 0, FORWARD, 0, 0, 4),
    # Together, as many streams as a server has.
    "silent-streams": (330, 48, STREAM, 0, 0, 4),
    "few-silent-streams": (100, 8, STREAM, 0, 0, 4),
}


class Connection:
    """One connection, not blocking. A call is [bytes that it still sends at once, its window]."""

    def __init__(self, endpoint, scene, totals):
        _, self.count, self.path, self.length, self.first, _ = scene
        self.totals, self.calls, self.next = totals, {}, 1
        self.window, self.initial, self.received = WINDOW, WINDOW, b""
        self.socket = h2.connect(endpoint)
        self.socket.setblocking(False)
        self.out = bytearray(h2.begin())
        totals["connections"] += 1
        self.open_calls()

    def open_calls(self):
        while len(self.calls) < self.count and len(self.out) < MIB:
            self.out += h2.frame(h2.HEADERS, h2.END_HEADERS, self.next, h2.call_headers(self.path))
            self.calls[self.next] = [self.first, self.initial]
            if self.length > 0:
                self.put_data(self.next, struct.pack(">BI", 0, self.length))
            self.next += 2
            self.totals["calls"] += 1

    def put_data(self, stream, data):
        self.out += h2.frame(h2.DATA, 0, stream, data)
        self.window -= len(data)
        self.calls[stream][1] -= len(data)

    def send_more(self):
        for stream, call in self.calls.items():
            while call[0] > 0 and len(self.out) < MIB:
                some = min(call[0], call[1], self.window, PART)
                if some <= 0:
                    break
                self.put_data(stream, bytes(some))
                call[0] -= some

    def trickle(self):
        """Once a second: a byte of each call, and new calls for those that the server has ended."""
        for stream, call in self.calls.items():
            if self.length > 0 and call[0] == 0 and min(call[1], self.window) > 0:
                self.put_data(stream, b"\0")
        self.open_calls()

    def take_frame(self, kind, flags, stream, payload):
        if kind == h2.SETTINGS and flags == 0:
            self.out += h2.frame(h2.SETTINGS, 1)
            for at in range(0, len(payload), 6):
                name, value = struct.unpack_from(">HI", payload, at)
                if name == 4:
                    for call in self.calls.values():
                        call[1] += value - self.initial
                    self.initial = value
        elif kind == h2.PING and flags == 0:
            self.out += h2.frame(h2.PING, 1, 0, payload)
        elif kind == h2.WINDOW_UPDATE:
            more = struct.unpack(">I", payload)[0]
            if stream == 0:
                self.window += more
            elif stream in self.calls:
                self.calls[stream][1] += more
        elif kind == h2.RST_STREAM or flags & h2.END_STREAM and kind in (h2.DATA, h2.HEADERS):
            if self.calls.pop(stream, None) is not None:
                self.totals["ended"] += 1

    def turn(self):
        """Takes and sends what is possible. False when the connection is over."""
        try:
            received = self.socket.recv(MIB)
            if received == b"":
                raise ConnectionError("closed")
            self.received += received
        except BlockingIOError:
            pass
        while len(self.received) >= 9:
            head, flags, stream = struct.unpack_from(">IBI", self.received)
            length = head >> 8
            if len(self.received) < 9 + length:
                break
            payload = self.received[9:9 + length]
            self.received = self.received[9 + length:]
            self.take_frame(head & 255, flags, stream, payload)
        self.send_more()
        if self.out:
            try:
                sent = self.socket.send(self.out)
                self.totals["bytes"] += sent
                del self.out[:sent]
            except BlockingIOError:
                pass


def connect(endpoint, scene, totals):
    try:
        return Connection(endpoint, scene, totals)
    except OSError:
        totals["refused"] += 1
        return None


def run(endpoint, scene, seconds):
    totals = dict.fromkeys(("connections", "calls", "ended", "closed", "refused", "bytes"), 0)
    end, tick = time.monotonic() + seconds, time.monotonic() + 1
    peers, poll = {}, select.poll()
    missing = scene[0]
    while time.monotonic() < end:
        while missing > 0:
            peer = connect(endpoint, scene, totals)
            if peer is None:
                break
            missing -= 1
            peers[peer.socket.fileno()] = peer
            poll.register(peer.socket, select.POLLIN | select.POLLOUT)
        for fd, events in poll.poll(50):
            peer = peers[fd]
            try:
                peer.turn()
                over = events & (select.POLLHUP | select.POLLERR)
            except OSError:
                over = True
            if over:
                poll.unregister(fd)
                peer.socket.close()
                del peers[fd]
                totals["closed"] += 1
                missing += 1
            else:
                busy = peer.out or any(call[0] > 0 and min(call[1], peer.window) > 0
                                       for call in peer.calls.values())
                poll.modify(fd, select.POLLIN | (select.POLLOUT if busy else 0))
        if time.monotonic() >= tick:
            tick += 1
            for fd, peer in peers.items():
                peer.trickle()
                if peer.out:
                    poll.modify(fd, select.POLLIN | select.POLLOUT)
    return totals


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("endpoint", help="host:port or unix:/path")
    parser.add_argument("scene", choices=sorted(SCENES))
    parser.add_argument("--seconds", type=float, default=5)
    parser.add_argument("--connections", type=int, default=0, help="0 = those of the scene")
    options = parser.parse_args()
    scene = SCENES[options.scene]
    if options.connections > 0:
        scene = (options.connections,) + scene[1:]
    json.dump(run(options.endpoint, scene, options.seconds), sys.stdout)
    print()


if __name__ == "__main__":
    main()
