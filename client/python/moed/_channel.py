# SPDX-License-Identifier: Apache-2.0
"""Opens channels to workers and coordinators."""

import errno
import ipaddress
import os
import socket
import stat

import grpc

from . import _errors
from ._trust import TlsChannel


def _directories():
    own = os.environ.get("MOED_RUNTIME_DIR", "")
    session = os.environ.get("XDG_RUNTIME_DIR", "")
    if own.startswith("/"):
        return [own]
    sessions = [session] * session.startswith("/") + [f"/run/user/{os.geteuid()}"]
    return [f"{s}/moed" for s in sessions] + [f"/tmp/moed-{os.geteuid()}"]


def _is_loopback(host):
    try:
        return host == "localhost" or ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def _admin_directory():
    named = os.environ.get("MOED_ADMIN_DIR", "")
    return named if named.startswith("/") else "/run/moed-admin"


def _answers(path):
    """False for a socket that a killed daemon has left behind."""
    with socket.socket(socket.AF_UNIX) as s:
        s.setblocking(False)
        return s.connect_ex(path) in (0, errno.EAGAIN)


def local_socket(endpoint):
    """The Unix socket of this user's daemon at a loopback endpoint, or None.

    daemon/base/local.h has the rules: a socket of another user, in a directory that others can
    use, or without a listener, does not count."""
    return next(filter(None, (_socket_in(directory, endpoint, 0o077, os.geteuid())
                              for directory in _directories())), None)


def admin_socket(endpoint):
    """The Unix socket for operators of the daemon at a loopback endpoint, or None."""
    return _socket_in(_admin_directory(), endpoint, 0o022, None)


def _socket_in(directory, endpoint, forbidden, owner):
    """The socket of the endpoint in a directory without the mode bits `forbidden`. `owner` None:
    the owner of the directory."""
    host, _, port = endpoint.rpartition(":")
    if not port.isdigit() or not _is_loopback(host):
        return None
    try:
        path = f"{directory}/{port}-{os.stat('/proc/self/ns/net').st_ino}.sock"
        folder, file = os.lstat(directory), os.lstat(path)
    except OSError:
        return None
    fits = (stat.S_ISDIR(folder.st_mode) and not folder.st_mode & forbidden
            and stat.S_ISSOCK(file.st_mode) and folder.st_uid == file.st_uid
            and owner in (None, file.st_uid))
    return path if fits and _answers(path) else None


class _Details(grpc.ClientCallDetails):
    """The details of a call with one more header."""

    def __init__(self, details, header):
        for name in ("method", "timeout", "credentials", "wait_for_ready", "compression"):
            setattr(self, name, getattr(details, name, None))
        self.metadata = [*(details.metadata or ()), header]


class _Token(grpc.UnaryUnaryClientInterceptor, grpc.StreamStreamClientInterceptor):
    """Shows the token of a file with each call. The file is read each time, so it may change."""

    def __init__(self, path):
        self._path = path

    def _header(self):
        if os.stat(self._path).st_mode & 0o037:
            raise PermissionError(f"{self._path}: other users can read this token; chmod 600")
        with open(self._path, encoding="ascii") as file:
            return "authorization", "Bearer " + file.readline().strip()

    def intercept_unary_unary(self, continuation, details, request):
        return continuation(_Details(details, self._header()), request)

    def intercept_stream_stream(self, continuation, details, requests):
        return continuation(_Details(details, self._header()), requests)


def _check_token(endpoint, trust):
    """Anybody on the way could read a token."""
    if trust.token_file and not trust.tls_ca and not trust.insecure and not _is_loopback(
            endpoint.rpartition(":")[0]):
        raise _errors.MoeError(
            grpc.StatusCode.FAILED_PRECONDITION, "CONFIG_INVALID", "%s: a token would be sent "
            "without encryption; use TLS (tls_ca), or allow it by insecure=True or MOED_INSECURE=1"
            % endpoint)


def open_channel(endpoint, trust, options=()):
    """A channel by the local socket if there is one, else with TLS if `trust`, a completed Trust,
    has a CA, and with its token. It ignores http_proxy, as libmoeclient does: a proxy seldom
    reaches a group, and its error would name the wrong address."""
    options = [("grpc.enable_http_proxy", 0), *options]
    path = local_socket(endpoint)
    if path is None and trust.token_file is None and trust.tls_ca is None:
        path = admin_socket(endpoint)
    if path is not None:
        return grpc.insecure_channel(f"unix:{path}", options=options)
    _check_token(endpoint, trust)

    def with_token(channel):
        return (grpc.intercept_channel(channel, _Token(trust.token_file))
                if trust.token_file else channel)

    if trust.tls_ca is None:
        return with_token(grpc.insecure_channel(endpoint, options=options))
    if trust.tls_server_name is not None:
        options.append(("grpc.ssl_target_name_override", trust.tls_server_name))
    return TlsChannel(trust, lambda credentials: with_token(
        grpc.secure_channel(endpoint, credentials, options=options)))
