# SPDX-License-Identifier: Apache-2.0
"""An attacker that makes one TLS handshake after the other, and prints their number.

  handshakes.py HOST:PORT SECONDS"""

import socket
import ssl
import sys
import time


def connect(endpoint):
    host, port = endpoint.split(":")
    return socket.create_connection((host, int(port)), timeout=10)


def context_without_trust():
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.set_alpn_protocols(["h2"])
    return context


def main():
    context, made, until = context_without_trust(), 0, time.monotonic() + float(sys.argv[2])
    while time.monotonic() < until:
        try:
            with connect(sys.argv[1]) as plain, context.wrap_socket(plain):
                made += 1
        except OSError:
            pass
    print(made)


if __name__ == "__main__":
    main()
