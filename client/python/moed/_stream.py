# SPDX-License-Identifier: Apache-2.0
"""Streams: long-lived calls with many forward passes in flight to one worker."""

import itertools
import queue
import threading

import grpc

from . import _errors, _wire
from ._proto import expert_pb2


class Stream:
    """One long-lived stream to one worker, from Client.stream. May be shared between threads;
    answers may come in any order. Close it, or use it as a context manager."""

    def __init__(self, client, lane):
        self._client, self._lane = client, lane

    def forward(self, layer, x, topk_ids=None, topk_weights=None, return_routing=False,
                timeout=None, epoch=0, weights_version=0, parts="both", token_ids=None,
                return_rehomed=False):
        """As Client.forward, without retries."""
        batch = self._client._batch(layer, x, topk_ids, topk_weights, return_routing, parts,
                                    token_ids, return_rehomed)
        return self._lane.forward(batch, return_routing, timeout, epoch, weights_version)

    def submit(self, layer, x, topk_ids=None, topk_weights=None, return_routing=False,
               timeout=None, epoch=0, weights_version=0, parts="both", token_ids=None,
               return_rehomed=False):
        """As Client.submit, without retries."""
        batch = self._client._batch(layer, x, topk_ids, topk_weights, return_routing, parts,
                                    token_ids, return_rehomed)
        return self._lane.submit(batch, return_routing, timeout, epoch, weights_version)

    def close(self):
        """Takes no more requests. Those in flight get their answers."""
        self._lane.end("stream")

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()


class _Pending:
    """A request without an answer so far."""

    def __init__(self):
        self.over = threading.Event()
        self.answer = None
        self.failure = None


class GrpcLane:
    """A stream of grpcio."""

    def __init__(self, client, worker):
        self._client = client
        self._lock = threading.Lock()
        self._pending = {}  # request id -> _Pending
        self._ids = itertools.count(1)
        self._end = None  # MoeError; set when the stream is over or being closed
        self._outgoing = queue.SimpleQueue()
        self._call = worker.stream(iter(self._outgoing.get, None))
        self._reader = threading.Thread(target=self._read, name="moed-stream", daemon=True)
        self._reader.start()

    def _read(self):
        end = _errors.MoeError(grpc.StatusCode.UNAVAILABLE, "", "the server ended the stream")
        try:
            for answer in self._call:
                with self._lock:
                    pending = self._pending.pop(answer.request_id, None)
                if pending is None:  # its time is over
                    continue
                if answer.HasField("error"):
                    pending.failure = _errors.from_item_error(answer.error)
                pending.answer = answer
                pending.over.set()
        except grpc.RpcError as error:
            end = _errors.from_dropped_call(error)
        with self._lock:
            if self._client._is_closed:
                end = _errors.closed("client")
            elif self._end is not None:
                end = self._end
            self._end = end
            left = list(self._pending.values())
            self._pending.clear()
        for pending in left:
            pending.failure = end
            pending.over.set()

    def forward(self, batch, return_routing, timeout, epoch, weights_version):
        """Waits for the pass."""
        limit = _errors.limit(self._client._timeout if timeout is None else timeout)
        request = expert_pb2.ForwardStreamRequest(
            model=self._client._model, epoch=epoch, weights_version=weights_version,
            model_digest=self._client._model_digest)
        self._client._fill(request, batch, return_routing)
        request.request_id = next(self._ids)
        pending = _Pending()
        with self._lock:
            if self._end is not None:
                raise self._end
            self._pending[request.request_id] = pending
        self._outgoing.put(request)
        if not pending.over.wait(limit):
            with self._lock:
                mine = self._pending.pop(request.request_id, None) is not None
            if mine:
                raise _errors.MoeError(grpc.StatusCode.DEADLINE_EXCEEDED, "",
                                       "no answer on the stream within %g s" % limit)
            pending.over.wait()
        if pending.failure is not None:
            raise pending.failure
        return _wire.result(pending.answer, batch, return_routing)

    def submit(self, *arguments):
        """A concurrent.futures.Future of the pass."""
        return self._client._pool().submit(self.forward, *arguments)

    def end(self, what):
        """Ends the stream after the answers of requests in flight."""
        with self._lock:
            if self._end is None:
                self._end = _errors.closed(what)
        self._outgoing.put(None)
        self._reader.join(self._client._timeout)
        self._call.cancel()
