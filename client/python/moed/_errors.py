# SPDX-License-Identifier: Apache-2.0
"""Failures of calls, with the code and reason that the server sent."""

import math
import re

import grpc

from ._proto import rpc_status_pb2

_DETAILS = "grpc-status-details-bin"
_ERROR_INFO = "google.rpc.ErrorInfo"
_RETRY_INFO = "google.rpc.RetryInfo"
_LIMIT_MAX = 1e9  # seconds, 31 years; with some more, grpcio says at once that the time is over


class MoeError(Exception):
    """A call that failed.

    code         grpc.StatusCode
    reason       one of the reasons of moed ("SHAPE_MISMATCH", "QUEUE_FULL", ...); "" without one
    message      one sentence for a person
    retry_after  seconds after which the call may be sent again; None if the server gave no hint
    worker       with RECORDED_ELSEWHERE: "host:port" of the worker to ask; otherwise ""
    """

    def __init__(self, code, reason, message, retry_after=None, worker=""):
        super().__init__("%s%s: %s" % (code.name, "/" + reason if reason else "", message))
        self.code = code
        self.reason = reason
        self.message = message
        self.retry_after = retry_after
        self.worker = worker

    def __reduce__(self):
        """Other processes get it whole; by default, `args` has the text alone."""
        return (type(self), (self.code, self.reason, self.message, self.retry_after, self.worker),
                self.__dict__)


def limit(seconds, name="timeout"):
    """A limit that a caller has given, or the longest one that counts. None means another limit, or
    none. Refuses what is no number of seconds."""
    if seconds is None:
        return None
    try:
        finite = math.isfinite(seconds)
    except TypeError:
        raise TypeError("%s is a number of seconds, not %r" % (name, seconds)) from None
    if not finite:
        raise ValueError("%s is a finite number of seconds, not %r" % (name, seconds))
    return min(seconds, _LIMIT_MAX)


def closed(what):
    """The MoeError for an object that this program has closed."""
    return MoeError(grpc.StatusCode.CANCELLED, "", "the %s has been closed" % what)


def too_many_tokens(tokens, limit):
    """The MoeError for a batch that the server does not accept."""
    return MoeError(grpc.StatusCode.INVALID_ARGUMENT, "TOKEN_LIMIT",
                    "%d tokens; the server accepts at most %d in a request" % (tokens, limit))


def _parse(message_type, data):
    try:
        return message_type.FromString(data)
    # The bytes come from the wire, and protobuf versions differ in what they raise.
    except Exception:
        return message_type()


_TOO_LARGE = re.compile(r"(Received|.*Sent) message larger than max \((\d+) vs\. (\d+)\)")


_OTHER_HOST = "the server's certificate is not for the host of the endpoint"
_LEFT = "the server closed the connection; it may expect TLS or another certificate"
# Words of gRPC or OpenSSL, in lower case, blanks for _ -> what a user can do.
_HINTS = (
    ("certificate verify failed", "the server's certificate does not lead to the CA of this "
     "client, or its dates do not hold"),
    ("is not in peer certificate", _OTHER_HOST),
    ("hostname verification check failed", _OTHER_HOST),
    ("wrong version number", "the server does not use TLS there"),
    ("socket closed", _LEFT),
    ("reset by peer", _LEFT),
    ("endpoint read failed", _LEFT),
)


def _reduce(text, endpoint):
    """Reduces gRPC's text to its cause, such as "Connection refused"."""
    if text.startswith(("failed to connect to all addresses", "DNS resolution failed")):
        # Releases of gRPC write the cause in different ways, and not always last.
        plain = text.lower().replace("_", " ")
        cause = next((hint for words, hint in _HINTS if words in plain),
                     text.rpartition(": ")[2])
        return "cannot connect%s: %s" % (" to " + endpoint if endpoint else "", cause)
    match = _TOO_LARGE.match(text)
    if match:
        return "a message of %s bytes; the limit is %s bytes" % (match[2], match[3])
    return text


def from_rpc_error(error, endpoint=""):
    """The MoeError for a grpc.RpcError, with its ErrorInfo and RetryInfo. The text names `endpoint`
    if the connection failed."""
    reason, retry_after, worker = "", None, ""
    for key, value in error.trailing_metadata() or ():
        if key != _DETAILS:
            continue
        for detail in _parse(rpc_status_pb2.Status, value).details:
            kind = detail.type_url.rpartition("/")[2]
            if kind == _ERROR_INFO:
                info = _parse(rpc_status_pb2.ErrorInfo, detail.value)
                reason, worker = info.reason, info.metadata.get("worker", "")
            elif kind == _RETRY_INFO:
                delay = _parse(rpc_status_pb2.RetryInfo, detail.value).retry_delay
                retry_after = delay.seconds + delay.nanos * 1e-9
    return MoeError(error.code(), reason, _reduce(error.details() or "", endpoint),
                    retry_after, worker)


def from_connect_error(error, endpoint):
    """The MoeError for a failed GetServerInfo."""
    failure = from_rpc_error(error)
    message = failure.message
    if failure.code == grpc.StatusCode.UNIMPLEMENTED:
        message = "this is not a worker, perhaps a coordinator: use a worker's endpoint"
    return MoeError(failure.code, failure.reason, "%s: %s" % (endpoint, message),
                    failure.retry_after)


def from_dropped_call(error, endpoint=""):
    """As from_rpc_error, for a call that this program has not cancelled. A server that shuts down
    resets its calls with CANCELLED and no text or gRPC's text; both become UNAVAILABLE."""
    failure = from_rpc_error(error, endpoint)
    if not error.trailing_metadata() and (
            failure.code == grpc.StatusCode.CANCELLED
            or "Cancelling all calls" in failure.message):
        return MoeError(grpc.StatusCode.UNAVAILABLE, "", "the server%s dropped the call"
                        % (" " + endpoint if endpoint else ""))
    return failure


_CODES = {code.value[0]: code for code in grpc.StatusCode}


def from_item_error(error):
    """The MoeError for a moe.v1.Error inside a stream."""
    return MoeError(
        _CODES.get(error.code, grpc.StatusCode.UNKNOWN), error.reason, error.message,
        error.retry_after_ms / 1e3 if error.retry_after_ms else None)


def from_native(failure, endpoint=""):
    """The MoeError for (code, reason, text, retry_after_ms) of moed._native. A text without an
    endpoint gets `endpoint`."""
    code, reason, text, retry_after_ms = failure
    if endpoint and not text.startswith(endpoint):
        text = "%s: %s" % (endpoint, text)
    return MoeError(_CODES.get(code, grpc.StatusCode.UNKNOWN), reason, text,
                    retry_after_ms / 1e3 if retry_after_ms else None)
