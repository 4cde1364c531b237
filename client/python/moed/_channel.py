# SPDX-License-Identifier: Apache-2.0
"""Opens channels to workers and coordinators."""

import errno
import ipaddress
import os
import socket
import stat

import grpc


def _directories():
    own = os.environ.get("MOED_RUNTIME_DIR", "")
    session = os.environ.get("XDG_RUNTIME_DIR", "")
    if own.startswith("/"):
        return [own]
    return [f"{session}/moed"] * session.startswith("/") + [f"/tmp/moed-{os.geteuid()}"]


def _is_loopback(host):
    try:
        return host == "localhost" or ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def _answers(path):
    """False for a socket that a killed daemon has left behind."""
    with socket.socket(socket.AF_UNIX) as s:
        s.setblocking(False)
        return s.connect_ex(path) in (0, errno.EAGAIN)


def local_socket(endpoint):
    """The Unix socket of this user's daemon at a loopback endpoint, or None.

    daemon/base/local.h has the rules: a socket of another user, in a directory that others can
    use, or without a listener, does not count."""
    host, _, port = endpoint.rpartition(":")
    if not port.isdigit() or not _is_loopback(host):
        return None
    for directory in _directories():
        try:
            path = f"{directory}/{port}-{os.stat('/proc/self/ns/net').st_ino}.sock"
            folder, file = os.lstat(directory), os.lstat(path)
        except OSError:
            continue
        private = stat.S_ISDIR(folder.st_mode) and not folder.st_mode & 0o077
        if (private and stat.S_ISSOCK(file.st_mode)
                and folder.st_uid == file.st_uid == os.geteuid() and _answers(path)):
            return path
    return None


def open_channel(endpoint, options=()):
    """A channel without encryption, by the local socket if there is one. It ignores http_proxy, as
    libmoeclient does: a proxy seldom reaches a group, and its error would name the wrong
    address."""
    path = local_socket(endpoint)
    target = endpoint if path is None else f"unix:{path}"
    return grpc.insecure_channel(target, options=[("grpc.enable_http_proxy", 0), *options])
