# SPDX-License-Identifier: Apache-2.0
"""Forward passes through libmoeclient, by the extension moed._native, where that is installed.

Passes go through a lane: that of a client, or of a stream. A queued pass has a pending object. The
thread or event loop that takes its end from a queue calls the object's `finish`. `finish` and the
lane's end both remove it from the lane's dictionary: the first one settles its future.
"""

import concurrent.futures
import functools
import logging
import os
import select
import threading

import grpc
import numpy as np

from . import _errors
from ._answers import ForwardResult

_log = logging.getLogger("moed")

_STAGES = ("queue_ns", "copy_in_ns", "router_ns", "prepare_ns", "dispatch_ns", "gemm1_ns",
           "gemm2_ns", "shared_ns", "combine_ns", "step_ns", "copy_out_ns", "server_ns",
           "step_tokens", "steps")
_DEADLINE_EXCEEDED = grpc.StatusCode.DEADLINE_EXCEEDED.value[0]


@functools.lru_cache(maxsize=None)
def _load():
    """(moed._native or None, why not)."""
    try:
        from . import _native
    except ImportError as error:
        return None, str(error)
    return _native, ""


def choose(transport):
    """The extension, if forward passes go through it; None: they go through grpcio.

    transport  "auto", "native" or "grpc"; None: MOED_TRANSPORT, or "auto". In the child of a fork,
               "auto" is grpcio: libmoeclient refuses to work there
    """
    global _is_used
    transport = transport or os.environ.get("MOED_TRANSPORT") or "auto"
    if transport not in ("auto", "native", "grpc"):
        raise ValueError('transport is "auto", "native" or "grpc", not %r' % (transport,))
    if transport == "grpc":
        return None
    native, why = _load()
    if native is None and transport == "native":
        raise ImportError('transport="native" needs the extension moed._native: %s' % why)
    if native is None or (_is_child and transport == "auto"):
        return None
    _is_used = True
    return native


def milliseconds(seconds):
    """A limit for libmoeclient, where 0 is the client's default."""
    seconds = _errors.limit(seconds)
    return 0 if seconds is None else max(1, int(seconds * 1000))


def deliver(queue):
    """Settles the passes that have ended."""
    for pending, outcome in queue.take():
        if pending is None:  # nothing waits for it any more
            continue
        try:
            pending.finish(outcome)
        except Exception:
            _log.exception("moed: the end of a call is lost")


class _Dispatcher:
    """The thread that settles concurrent futures: one in a process."""

    def __init__(self, native):
        self.queue = native.Queue()
        self.thread = threading.Thread(target=self._run, name="moed-native", daemon=True)
        self.thread.start()

    def _run(self):
        poll = select.poll()
        poll.register(self.queue.fileno(), select.POLLIN)
        while True:
            poll.poll()
            deliver(self.queue)


_lock = threading.Lock()
_the_dispatcher = None
_is_used = False  # the extension has had clients in this process
_is_child = False  # or in one of which this process is a fork


def dispatcher_queue():
    """The queue of the process for futures and for passes that nothing waits for."""
    global _the_dispatcher
    with _lock:
        if _the_dispatcher is None:
            _the_dispatcher = _Dispatcher(_load()[0])
        return _the_dispatcher.queue


def _begin_child():
    """The child of a fork has no such thread."""
    global _lock, _the_dispatcher, _is_child
    _lock, _the_dispatcher, _is_child = threading.Lock(), None, _is_child or _is_used


os.register_at_fork(after_in_child=_begin_child)


class _Pass:
    """One forward pass: its arrays, and its result when it has ended."""

    __slots__ = ("batch", "limit", "y", "ids", "weights", "rehomed")

    def __init__(self, batch, return_routing, limit):
        self.batch, self.limit = batch, limit
        x = batch.x
        self.y = np.empty(x.shape, x.dtype)
        self.ids = self.weights = self.rehomed = None
        if return_routing:
            shape = (x.shape[0], batch.layer.top_k)
            self.ids, self.weights = np.empty(shape, np.int32), np.empty(shape, np.float32)
        if batch.return_rehomed:
            self.rehomed = np.empty(batch.layer.experts, np.uint32)

    def arguments(self, timeout, epoch, weights_version):
        """As moed._native takes them."""
        batch = self.batch
        x, y = batch.x, self.y
        if x.dtype.itemsize == 2:  # numpy exports no buffer of bfloat16
            x, y = x.view(np.uint16), y.view(np.uint16)
        return (batch.layer.layer, x.shape[0], batch.dtype, epoch, weights_version,
                milliseconds(timeout), batch.parts, x, y, batch.ids, batch.weights, self.ids,
                self.weights, batch.token_ids, self.rehomed)

    def result(self, outcome):
        """As of Client.forward; raises MoeError."""
        if outcome[0] != 0:
            code, reason, text, retry_after_ms = outcome
            if code == _DEADLINE_EXCEEDED and not reason:
                text = "Forward had no answer within its time limit (timeout=%g s)" % self.limit
            raise _errors.from_native((code, reason, text, retry_after_ms))
        batch = self.batch
        y = batch.give(self.y)
        if self.ids is None and self.rehomed is None:
            return y
        ids = weights = rehomed = None
        if self.ids is not None:
            ids, weights = batch.give_routing(self.ids), batch.give_routing(self.weights)
        if self.rehomed is not None:
            rehomed = tuple(self.rehomed[:outcome[4]].tolist())
        return ForwardResult(y, ids, weights, outcome[1], outcome[2],
                             dict(zip(_STAGES, outcome[3])), rehomed_experts=rehomed)


class _Pending:
    """A queued pass, and how its future is settled."""

    __slots__ = ("lane", "made", "future")

    def __init__(self, lane, made, future):
        self.lane, self.made, self.future = lane, made, future

    def finish(self, outcome):
        """The pass has ended."""
        if self.lane.pending.pop(self, None) is None:
            return  # the client has been closed
        try:
            result = self.made.result(outcome)
        except Exception as error:
            self.settle(None, error)
        else:
            self.settle(result, None)


class FuturePending(_Pending):
    """For a concurrent.futures.Future."""

    __slots__ = ()

    def settle(self, result, error):
        """Sets the future, unless it has been cancelled."""
        if not self.future.set_running_or_notify_cancel():
            return
        if error is not None:
            self.future.set_exception(error)
        else:
            self.future.set_result(result)


class LoopPending(_Pending):
    """For an asyncio.Future; used in its loop's thread."""

    __slots__ = ()

    def settle(self, result, error):
        """Sets the future, unless it has been cancelled."""
        if self.future.done():
            return
        if error is not None:
            self.future.set_exception(error)
        else:
            self.future.set_result(result)


class Lane:
    """The way of passes: a Client or Stream of moed._native."""

    def __init__(self, native, timeout):
        self._native, self._timeout = native, timeout
        self._end = None  # what has been closed, when the lane takes no more passes
        self._closed = False
        self.pending = {}  # _Pending -> True

    def _begin(self, batch, return_routing, timeout):
        native = self._native
        if native is None:
            raise _errors.closed(self._end)
        return native, _Pass(batch, return_routing, self._timeout if timeout is None else timeout)

    def forward(self, batch, return_routing, timeout, epoch, weights_version):
        """Waits for the pass."""
        native, made = self._begin(batch, return_routing, timeout)
        outcome = native.forward(*made.arguments(timeout, epoch, weights_version))
        if outcome is None:
            raise _errors.closed("client")
        return made.result(outcome)

    def submit(self, batch, return_routing, timeout, epoch, weights_version):
        """A concurrent.futures.Future of the pass."""
        future = concurrent.futures.Future()
        self.start(dispatcher_queue(), FuturePending, future, batch, return_routing, timeout, epoch,
                   weights_version)
        return future

    def start(self, queue, kind, future, batch, return_routing, timeout, epoch, weights_version):
        """Queues the pass: `queue` gets its end, and a _Pending of this kind settles `future`."""
        native, made = self._begin(batch, return_routing, timeout)
        pending = kind(self, made, future)
        self.pending[pending] = True
        try:
            native.submit(queue, pending, *made.arguments(timeout, epoch, weights_version))
        except BaseException:
            self.pending.pop(pending, None)
            raise
        if self._closed:  # meanwhile: `close` may have missed this one
            self.close(self._end)

    def end(self, what):
        """`what` ("stream") has been closed: takes no more passes. Those in flight go on."""
        self._end = what
        self._native = None

    def close(self, what):
        """The same, and queued passes fail."""
        self.end(what)
        self._closed = True
        while self.pending:
            try:
                pending, _ = self.pending.popitem()
            except KeyError:
                return
            pending.settle(None, _errors.closed(what))


class Connection:
    """A client of libmoeclient and its lane."""

    def __init__(self, native, endpoint, spread, timeout, spin_us, trust, model, model_digest,
                 retry_time, hedge, attempt_time):
        self._module, self._timeout = native, timeout
        try:
            self.client = native.Client(
                dispatcher_queue(), endpoint, spread, milliseconds(timeout), spin_us,
                trust.tls_ca, trust.tls_key, trust.tls_certificate, trust.token_file,
                trust.tls_server_name, model_digest or None, model or None, trust.insecure,
                milliseconds(retry_time), hedge, milliseconds(attempt_time))
        except RuntimeError as error:
            raise _errors.from_native(error.args) from None
        self.lane = Lane(self.client, timeout)

    def make_queue(self):
        """A Queue of moed._native."""
        return self._module.Queue()

    def open_stream(self):
        """The lane of a stream to one worker."""
        try:
            return Lane(self._module.Stream(self.client), self._timeout)
        except RuntimeError as error:
            raise _errors.from_native(error.args) from None

    def open_session(self, timeout, spin_us):
        """A Session of moed._native."""
        try:
            return self._module.Session(self.client, milliseconds(timeout), spin_us)
        except RuntimeError as error:
            raise _errors.from_native(error.args) from None

    def close(self, what):
        """`what` has been closed. Passes in flight fail; those that threads wait for within 0.1 s.
        """
        self.lane.close(what)
        self.client.close()
        self.client = None
