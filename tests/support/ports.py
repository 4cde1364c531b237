# SPDX-License-Identifier: Apache-2.0
"""Ports of this host that nothing listens on."""

import socket


def free_ports(count):
    """Different ones. Another program may take them before they are used."""
    sockets = [socket.socket() for _ in range(count)]
    for s in sockets:
        s.bind(("127.0.0.1", 0))
    ports = [s.getsockname()[1] for s in sockets]
    for s in sockets:
        s.close()
    return ports
