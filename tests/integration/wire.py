# SPDX-License-Identifier: Apache-2.0
"""Raw access to moe.v1 without moed: protos compiled for the test, and calls with typed errors."""

import os
import subprocess
import sys
import tempfile

import grpc

from group import moed  # noqa: F401 (puts the package on the path)
from moed._channel import local_socket

PROTOS = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..", "proto")

_folder = tempfile.TemporaryDirectory(prefix="moed-wire-")  # removed at exit
_out = _folder.name
subprocess.run(
    ["protoc", "-I", PROTOS, "--python_out", _out,
     *("moe/v1/%s.proto" % name
       for name in ("types", "expert", "admin", "coordinator", "training"))],
    check=True)
sys.path.insert(0, _out)

from moe.v1 import admin_pb2 as admin  # noqa: E402
from moe.v1 import coordinator_pb2 as coordinator  # noqa: E402
from moe.v1 import expert_pb2 as expert  # noqa: E402
from moe.v1 import training_pb2 as training  # noqa: E402


def open_channel(endpoint):
    """A channel to a daemon of this user, by its local socket."""
    path = local_socket(endpoint)
    return grpc.insecure_channel(f"unix:{path}" if path else endpoint, options=[
        ("grpc.max_receive_message_length", 256 << 20),
        ("grpc.max_send_message_length", 256 << 20)])


def _varint(data, at):
    value, shift = 0, 0
    while True:
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        shift += 7
        if not byte & 0x80:
            return value, at


def fields(data):
    """(number, value) of a message's top-level fields; value is an int or bytes."""
    at = 0
    while at < len(data):
        tag, at = _varint(data, at)
        if tag & 7 == 0:
            value, at = _varint(data, at)
        elif tag & 7 == 2:
            length, at = _varint(data, at)
            value, at = data[at : at + length], at + length
        else:
            raise ValueError("unexpected wire type %d" % (tag & 7))
        yield tag >> 3, value


def error_reason(error):
    """(ErrorInfo.reason of a failed call or "", whether it has RetryInfo)."""
    reason, retry = "", False
    for key, value in error.trailing_metadata() or ():
        if key != "grpc-status-details-bin":
            continue
        for number, detail in fields(value):
            if number != 3:
                continue
            parts = dict(fields(detail))
            if parts[1].endswith(b"ErrorInfo"):
                reason = dict(fields(parts[2]))[1].decode()
            retry = retry or parts[1].endswith(b"RetryInfo")
    return reason, retry


def error_worker(error):
    """ErrorInfo.metadata["worker"] of a failed call, or ""."""
    for key, value in error.trailing_metadata() or ():
        if key != "grpc-status-details-bin":
            continue
        for number, detail in fields(value):
            parts = dict(fields(detail)) if number == 3 else {}
            if not parts.get(1, b"").endswith(b"ErrorInfo"):
                continue
            for inner, entry in fields(parts[2]):
                if inner == 3 and dict(fields(entry))[1] == b"worker":
                    return dict(fields(entry))[2].decode()
    return ""


def _call(channel, service, method, request, answer, timeout):
    """Makes one unary call; `request` is a message object or raw bytes."""
    raw = request if isinstance(request, bytes) else request.SerializeToString()
    call = channel.unary_unary(f"/moe.v1.{service}/{method}",
                               response_deserializer=answer.FromString)
    return call(raw, timeout=timeout)


def train(channel, name, request, timeout=30):
    """Makes one call of TrainingService; returns its answer."""
    return _call(channel, "TrainingService", name, request, getattr(training, name + "Response"),
                 timeout)


def forward(channel, request, timeout=30):
    """Sends a Forward, a message object or raw bytes; returns the ForwardResponse."""
    return _call(channel, "ExpertService", "Forward", request, expert.ForwardResponse, timeout)


def get_status(channel, timeout=10):
    return _call(channel, "AdminService", "GetStatus", admin.GetStatusRequest(),
                 admin.GetStatusResponse, timeout)


def get_server_info(channel, timeout=10):
    return _call(channel, "ExpertService", "GetServerInfo", expert.GetServerInfoRequest(),
                 expert.GetServerInfoResponse, timeout)


def get_model(channel, timeout=10):
    return _call(channel, "ExpertService", "GetModel", expert.GetModelRequest(),
                 expert.GetModelResponse, timeout)
