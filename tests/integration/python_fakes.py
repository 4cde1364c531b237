# SPDX-License-Identifier: Apache-2.0
"""Fake workers in the process of a test, for the Python package."""

import concurrent.futures
import contextlib
import os
import threading
import time

import grpc
import numpy as np

from moed._proto import expert_pb2, rpc_status_pb2, types_pb2

LAYER, HIDDEN, EXPERTS, TOP_K = 3, 16, 8, 2


class Failure(Exception):
    def __init__(self, code, reason="", message="as wished", retry_s=0.0):
        super().__init__(message)
        self.code, self.reason, self.message, self.retry_s = code, reason, message, retry_s

    def details(self):
        """grpc-status-details-bin as moed's server makes it."""
        status = rpc_status_pb2.Status(code=self.code.value[0], message=self.message)
        info = rpc_status_pb2.ErrorInfo(reason=self.reason, domain="moe")
        status.details.add(type_url="type.googleapis.com/google.rpc.ErrorInfo",
                           value=info.SerializeToString())
        if self.retry_s:
            retry = rpc_status_pb2.RetryInfo()
            retry.retry_delay.seconds = int(self.retry_s)
            retry.retry_delay.nanos = int(self.retry_s % 1 * 1e9)
            status.details.add(type_url="type.googleapis.com/google.rpc.RetryInfo",
                               value=retry.SerializeToString())
        return status.SerializeToString()


class Fake(grpc.GenericRpcHandler):
    """y = 2 x. `script` has failures of the first calls; None: success."""

    def __init__(self, threads=8):
        self.requests, self.script, self.workers = [], [], []
        self.slot = 0
        self.rehomed = None  # the list for requests that ask; None: it does not know the field
        self.held = threading.Event()  # with `hold`, Forward answers wait for it
        self.hold = False
        self.silent = False  # Forward waits for `held`, too
        self.server = grpc.server(concurrent.futures.ThreadPoolExecutor(threads))
        self.server.add_generic_rpc_handlers((self,))
        self.endpoint = "127.0.0.1:%d" % self.server.add_insecure_port("127.0.0.1:0")
        self.server.start()

    def service(self, details):
        methods = {
            "/moe.v1.ExpertService/Forward": (
                grpc.unary_unary_rpc_method_handler, self.forward, expert_pb2.ForwardRequest),
            "/moe.v1.ExpertService/ForwardStream": (
                grpc.stream_stream_rpc_method_handler, self.stream,
                expert_pb2.ForwardStreamRequest),
            "/moe.v1.ExpertService/GetServerInfo": (
                grpc.unary_unary_rpc_method_handler, self.info, expert_pb2.GetServerInfoRequest),
            "/moe.v1.ExpertService/GetModel": (
                grpc.unary_unary_rpc_method_handler, self.model, expert_pb2.GetModelRequest),
        }
        if details.method not in methods:
            return None
        handler, function, request = methods[details.method]
        return handler(function, request_deserializer=request.FromString,
                       response_serializer=lambda answer: answer.SerializeToString())

    def info(self, _request, _context):
        return expert_pb2.GetServerInfoResponse(
            name="moe-worker", version="9.8.7", backend="cpu", slot=self.slot,
            workers=self.workers, max_tokens_per_request=100, max_message_bytes=1 << 20,
            models=["fake", "added"])

    def model(self, request, context):
        if request.model not in ("", "fake", "added"):
            failure = Failure(grpc.StatusCode.NOT_FOUND, "MODEL_NOT_FOUND")
            context.set_trailing_metadata((("grpc-status-details-bin", failure.details()),))
            context.abort(failure.code, failure.message)
        layer = types_pb2.LayerInfo(layer=LAYER, hidden=HIDDEN, experts=EXPERTS, top_k=TOP_K,
                                    intermediate=32)
        return expert_pb2.GetModelResponse(model=request.model or "fake", family="mixtral",
                                           layers=[layer], weights_version=5)

    def compute(self, request, answer):
        self.requests.append(request)
        failure = self.script.pop(0) if self.script else None
        if failure is not None:
            raise failure
        answer.tokens, answer.hidden, answer.dtype = request.tokens, request.hidden, request.dtype
        answer.epoch, answer.weights_version, answer.top_k = 7, 5, TOP_K
        answer.stages.server_ns = 1234
        if request.return_rehomed and self.rehomed is not None:
            answer.rehomed.SetInParent()
            answer.rehomed.experts.extend(self.rehomed)
        if request.dtype == types_pb2.DATA_TYPE_F32:
            answer.y_data = (2 * np.frombuffer(request.x_data, np.float32)).tobytes()
        else:  # BF16: doubles by adding 1 to the exponent
            answer.y_data = (np.frombuffer(request.x_data, np.uint16) + 0x80).astype(
                np.uint16).tobytes()
        if request.return_routing:
            ids = np.arange(request.tokens * TOP_K) % EXPERTS
            if request.topk_ids:
                ids = np.frombuffer(request.topk_ids, np.int32)
            answer.topk_ids_dtype = types_pb2.DATA_TYPE_I32 if (ids < 0).any() else (
                types_pb2.DATA_TYPE_U8)
            answer.topk_ids = ids.astype(np.int32 if (ids < 0).any() else np.uint8).tobytes()
            answer.topk_weights = request.topk_weights or np.full(
                request.tokens * TOP_K, 0.5, np.float32).tobytes()
        return answer

    def forward(self, request, context):
        if self.silent:
            self.held.wait(30)
        try:
            return self.compute(request, expert_pb2.ForwardResponse())
        except Failure as failure:
            if failure.reason:
                context.set_trailing_metadata((("grpc-status-details-bin", failure.details()),))
            context.abort(failure.code, failure.message)

    def stream(self, requests, _context):
        waiting = []
        for request in requests:
            answer = expert_pb2.ForwardStreamResponse(request_id=request.request_id)
            try:
                self.compute(request, answer)
            except Failure as failure:
                answer.error.code = failure.code.value[0]
                answer.error.reason, answer.error.message = failure.reason, failure.message
                answer.error.retry_after_ms = int(failure.retry_s * 1000)
            waiting.append(answer)
            if self.hold and len(waiting) < 4:
                continue
            yield from reversed(waiting)  # newest first
            waiting = []


@contextlib.contextmanager
def fakes(count=1):
    all_of_them = [Fake() for _ in range(count)]
    for slot, fake in enumerate(all_of_them):
        fake.slot, fake.workers = slot, [each.endpoint for each in all_of_them]
    try:
        yield all_of_them[0] if count == 1 else all_of_them
    finally:
        for fake in all_of_them:
            fake.server.stop(None).wait()


SEED = int(os.environ.get("MOE_SEED", time.time_ns()))
RNG = np.random.default_rng(SEED)


def rows(tokens):
    return RNG.standard_normal((tokens, HIDDEN)).astype(np.float32)


class HeldFake(Fake):
    """Forward answers wait for `release`, of both kinds of calls. Any number at a time."""

    def __init__(self):
        self.released = threading.Event()
        super().__init__(threads=128)

    def compute(self, request, answer):
        super().compute(request, answer)
        self.released.wait(60)
        return answer

    def release(self):
        """From now on answers do not wait."""
        self.released.set()

    def stop(self):
        """Ends the server."""
        self.release()
        self.server.stop(None).wait()
