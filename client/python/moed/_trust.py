# SPDX-License-Identifier: Apache-2.0
"""What a client shows to servers, and which servers it believes: certificates and tokens."""

import dataclasses
import os
import ssl
import stat
import threading
import time
import typing

import grpc

from . import _errors

_LOOK = 1.0  # seconds between two looks at the files


def _invalid(path, why):
    return _errors.MoeError(grpc.StatusCode.FAILED_PRECONDITION, "CONFIG_INVALID",
                            "%s: %s" % (path, why))


@dataclasses.dataclass(frozen=True)
class Trust:
    """The arguments of moed.Client of these names. None: the variable of the environment."""
    tls_ca: typing.Optional[str] = None
    tls_certificate: typing.Optional[str] = None
    tls_key: typing.Optional[str] = None
    tls_server_name: typing.Optional[str] = None
    token_file: typing.Optional[str] = None
    insecure: typing.Optional[bool] = None

    def completed(self):
        """With the environment in place of None."""
        found = {}
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            variable = os.environ.get("MOED_" + field.name.upper()) or None
            if field.name == "insecure":
                value = variable == "1" if value is None else bool(value)
            elif value is None:
                value = variable
            else:
                value = os.fspath(value)
            found[field.name] = value
        done = Trust(**found)
        if (done.tls_certificate is None) != (done.tls_key is None):
            raise ValueError("a TLS certificate needs its key, and a key its certificate")
        if done.tls_certificate is not None and done.tls_ca is None:
            raise ValueError("tls_certificate needs tls_ca: what the server's certificate leads to")
        return done

    def files(self):
        """The files of TLS."""
        return [p for p in (self.tls_ca, self.tls_certificate, self.tls_key) if p is not None]


def _mark(paths):
    """Changes when a file is replaced, written, or gets another mode."""
    marks = []
    for path in paths:
        try:
            s = os.stat(path)
            marks.append((s.st_dev, s.st_ino, s.st_size, s.st_mode, s.st_mtime_ns, s.st_ctime_ns))
        except OSError:
            marks.append(None)
    return marks


def _read(path, forbidden, what):
    try:
        with open(path, "rb") as file:
            mode = os.fstat(file.fileno()).st_mode
            if not stat.S_ISREG(mode):
                raise _invalid(path, "not a regular file")
            if mode & forbidden:
                raise _invalid(path, "other users can %s this %s" % (
                    "write" if mode & forbidden & 0o022 else "read", what))
            return file.read()
    except OSError as error:
        raise _invalid(path, error.strerror) from None


def _no_passphrase():
    raise ValueError("the key has a passphrase")


def _check(trust):
    """The ssl module reads what gRPC will use, and says what is wrong."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    try:
        context.load_verify_locations(cafile=trust.tls_ca)
    except ssl.SSLError:
        raise _invalid(trust.tls_ca, "no PEM certificates") from None
    if trust.tls_certificate is None:
        return
    try:
        context.load_cert_chain(trust.tls_certificate, trust.tls_key, _no_passphrase)
    except (ValueError, OSError) as error:  # OSError: ssl.SSLError
        mismatch = "KEY_VALUES_MISMATCH" in str(error)
        raise _invalid(trust.tls_key if mismatch else trust.tls_certificate,
                       "the key is not that of the certificate" if mismatch else
                       "not a PEM certificate and its PEM key without a passphrase (%s)" % error
                       ) from None


def _credentials(trust):
    """grpc.ChannelCredentials of the files as they are. Raises MoeError."""
    before = _mark(trust.files())
    ca = _read(trust.tls_ca, 0o022, "file")
    pair = (None, None)
    if trust.tls_certificate is not None:
        pair = (_read(trust.tls_key, 0o037, "key"), _read(trust.tls_certificate, 0o022, "file"))
    _check(trust)
    if _mark(trust.files()) != before:
        raise _invalid(trust.tls_ca, "the files changed while they were read")
    return grpc.ssl_channel_credentials(ca, *pair)


class _Route:
    """A channel of gRPC with one state of the files. Closed when it is not the newest any more and
    its last call is over."""

    def __init__(self, channel):
        self.channel = channel
        self.calls = 0
        self.newest = True


class TlsChannel:
    """As much of a grpc.Channel as this package uses. Looks at the files once a second, when a call
    begins. New calls take a new connection then; calls in flight keep theirs. Files that are not
    valid leave the old ones in use."""

    def __init__(self, trust, make):
        """make: opens a grpc.Channel with the credentials that it gets."""
        self._trust, self._make, self._lock = trust, make, threading.Lock()
        self._mark, self._looked, self._failed = _mark(trust.files()), time.monotonic(), False
        self._route = _Route(make(_credentials(trust)))

    def _renew(self):
        now = time.monotonic()
        if now - self._looked < _LOOK:
            return
        self._looked = now
        mark = _mark(self._trust.files())
        if mark == self._mark and not self._failed:
            return
        self._mark = mark
        try:
            credentials = _credentials(self._trust)
        except _errors.MoeError:
            self._failed = True
            return
        self._failed = False
        old, self._route = self._route, _Route(self._make(credentials))
        old.newest = False
        if old.calls == 0:
            old.channel.close()

    def enter(self):
        """The route for a call that begins now."""
        with self._lock:
            self._renew()
            self._route.calls += 1
            return self._route

    def leave(self, route):
        """The call is over."""
        with self._lock:
            route.calls -= 1
            last = route.calls == 0 and not route.newest
        if last:
            route.channel.close()

    def unary_unary(self, path, **serializers):
        """As of grpc.Channel."""

        def call(request, **more):
            route = self.enter()
            try:
                return route.channel.unary_unary(path, **serializers)(request, **more)
            finally:
                self.leave(route)

        return call

    def stream_stream(self, path, **serializers):
        """As of grpc.Channel."""

        def call(requests, **more):
            route = self.enter()
            try:
                made = route.channel.stream_stream(path, **serializers)(requests, **more)
            except BaseException:
                self.leave(route)
                raise
            made.add_done_callback(lambda _: self.leave(route))
            return made

        return call

    def close(self):
        """Ends its calls."""
        self._route.channel.close()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()
