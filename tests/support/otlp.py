# SPDX-License-Identifier: Apache-2.0
"""A collector of traces for tests and benches: OTLP/gRPC, with the messages of proto/opentelemetry.

    with Collector() as c:
        ... --otlp c.address ...
        spans = c.wait(lambda spans: ...)
"""

import os
import subprocess
import sys
import tempfile
import threading
import time
from concurrent import futures

import grpc

_PROTOS = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..", "proto")
_folder = tempfile.TemporaryDirectory(prefix="moed-otlp-")  # removed at exit
subprocess.run(
    ["protoc", "-I", _PROTOS, "--python_out", _folder.name] + [
        "opentelemetry/proto/" + name for name in (
            "common/v1/common.proto", "resource/v1/resource.proto", "trace/v1/trace.proto",
            "collector/trace/v1/trace_service.proto")], check=True)
sys.path.insert(0, _folder.name)
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2 as service  # noqa: E402

_EXPORT = "/opentelemetry.proto.collector.trace.v1.TraceService/Export"


def attributes(list_):
    """{key: value} of repeated KeyValue."""
    return {a.key: getattr(a.value, a.value.WhichOneof("value")) for a in list_}


class Span:
    """One span, with the attributes of its process as `resource`."""

    def __init__(self, message, resource):
        self.message, self.resource = message, resource
        self.name, self.kind, self.flags = message.name, message.kind, message.flags
        self.trace, self.id = message.trace_id.hex(), message.span_id.hex()
        self.parent = message.parent_span_id.hex()
        self.start, self.end = message.start_time_unix_nano, message.end_time_unix_nano
        self.ns = self.end - self.start
        self.attributes = attributes(message.attributes)

    def __repr__(self):
        return "%s %d us" % (self.name, self.ns // 1000)


class _Handler(grpc.GenericRpcHandler):
    def __init__(self, collector):
        self.collector = collector

    def service(self, details):
        if details.method != _EXPORT:
            return None
        if not self.collector.keeps:
            return grpc.unary_unary_rpc_method_handler(self.collector.forget)
        return grpc.unary_unary_rpc_method_handler(
            self.collector.export,
            request_deserializer=service.ExportTraceServiceRequest.FromString,
            response_serializer=service.ExportTraceServiceResponse.SerializeToString)


class Collector:
    """`hangs`: calls wait until the end. `credentials`: of a TLS server. `keeps`: without it, spans
    are dropped unread, which takes the least processor time."""

    def __init__(self, hangs=False, credentials=None, keeps=True):
        self.hangs, self.keeps = hangs, keeps
        self.requests = 0
        self._spans, self._lock, self._over = [], threading.Lock(), threading.Event()
        self.server = grpc.server(futures.ThreadPoolExecutor(max_workers=4))
        self.server.add_generic_rpc_handlers((_Handler(self),))
        if credentials is None:
            self.port = self.server.add_insecure_port("127.0.0.1:0")
        else:
            self.port = self.server.add_secure_port("127.0.0.1:0", credentials)
        self.address = "127.0.0.1:%d" % self.port

    def __enter__(self):
        self.server.start()
        return self

    def __exit__(self, *unused):
        self._over.set()
        self.server.stop(0).wait()

    def forget(self, unused, context):
        self.requests += 1
        if self.hangs:
            self._over.wait()
        return b""

    def export(self, request, context):
        self.requests += 1
        if self.hangs:
            self._over.wait()
        found = []
        for process in request.resource_spans:
            resource = attributes(process.resource.attributes)
            for scope in process.scope_spans:
                found += [Span(s, resource) for s in scope.spans]
        with self._lock:
            self._spans += found
        return service.ExportTraceServiceResponse()

    def spans(self):
        with self._lock:
            return list(self._spans)

    def wait(self, enough, seconds=60):
        """All spans, as soon as enough(spans)."""
        end = time.monotonic() + seconds
        while True:
            spans = self.spans()
            if enough(spans):
                return spans
            if time.monotonic() > end:
                raise AssertionError("the collector waits in vain; it has %s" % spans)
            time.sleep(0.02)
