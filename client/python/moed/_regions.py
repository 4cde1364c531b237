# SPDX-License-Identifier: Apache-2.0
"""Memory that this process shares with a worker of its host: forward passes that send no tensor."""

import asyncio
import bisect
import concurrent.futures
import itertools
import math
import sys
import threading
import weakref

import grpc
import numpy as np

from . import _errors
from ._answers import RegionAnswer
from ._device_regions import DeviceRegions
from ._dtypes import BFLOAT16
from ._tensors import bits_of_torch, is_torch, torch_of_bits
from ._wire import check_sources, parts_number

_IN_FLIGHT = 64  # requests of a session, as libmoeclient has it
_F32, _BF16, _I32, _I64 = 1, 2, 0, 3  # the first two as types_pb2.DataType
_KINDS = ("int32", "float32", "bfloat16", "int64")


def _kind(dtype):
    """_F32, _BF16, _I32 or _I64 of a numpy dtype; None for others."""
    if dtype == np.float32:
        return _F32
    if dtype == np.uint16 or (BFLOAT16 is not None and dtype == BFLOAT16):
        return _BF16
    return _I32 if dtype == np.int32 else _I64 if dtype == np.int64 else None


def _torch_kind(dtype):
    """The same of a torch dtype."""
    torch = sys.modules["torch"]
    return {torch.float32: _F32, torch.bfloat16: _BF16, torch.int32: _I32,
            torch.int64: _I64}.get(dtype)


def _is_two_bytes(tensor):
    """Whether its elements have two bytes, as those of bfloat16."""
    if is_torch(tensor):
        return tensor.element_size() == 2
    return getattr(tensor, "itemsize", 0) == 2


def _numpy_dtype(dtype):
    """(numpy dtype of memory, torch dtype or None) of what `allocate` takes."""
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(dtype, torch.dtype):
        known = {torch.float32: np.float32, torch.bfloat16: np.uint16, torch.int32: np.int32,
                 torch.int64: np.int64}
        if dtype not in known:
            raise TypeError("a tensor in shared memory is float32, bfloat16, int32 or int64, not %s"
                            % dtype)
        return np.dtype(known[dtype]), dtype
    if isinstance(dtype, str) and dtype == "bfloat16":
        return BFLOAT16 or np.dtype(np.uint16), None
    dtype = np.dtype(dtype)
    if _kind(dtype) is None:
        raise TypeError("a tensor in shared memory is float32, bfloat16 (or uint16 with its bits), "
                        "int32 or int64, not %s" % dtype)
    return dtype, None


class Regions:
    """A session of shared memory with one worker, from Client.open_regions. Threads may share it.

        with client.open_regions() as regions:
            x = regions.allocate((T, layer.hidden), np.float32)
            y = regions.allocate((T, layer.hidden), np.float32)
            x[:] = ...
            regions.submit(layer, x, y).result()            # y is complete

    While a request is in flight, do not write its inputs and do not use its outputs; no output may
    share bytes with another tensor in flight. After DEADLINE_EXCEEDED or UNAVAILABLE the worker may
    still write to its outputs: use others.

    There are no retries and no spreading. When the worker ends, requests fail within 100 ms, and so
    do all later ones: open other Regions.

    An array stays valid as long as it lives, also after `close`. The memory, and after `close` the
    connection behind it, are given back when no array of it is left.
    """

    def __init__(self, client, session):
        self._client, self._session = client, session
        self._names = itertools.count(1)
        self._lock = threading.Lock()
        self._book = ((), ())  # first addresses, ascending; (size, weak reference to a Region)
        self._dropped = []  # (request, tensors) of requests without an owner
        self._threads = None
        self._gpu = None  # (device, spin), DeviceRegions: libmoeclient_cuda has one for a session
        self._end = None  # what has been closed

    def _live_session(self):
        session = self._session
        if session is None:
            raise _errors.closed(self._end)
        return session

    def allocate(self, shape, dtype=np.float32):
        """An array of zeros in new memory that the worker maps too. It takes a millisecond for some
        MiB: allocate once, and use it for many requests. The worker has limits on the bytes of a
        client and on its arrays (32): for many tensors, take slices of one array.

        dtype  float32, bfloat16 ("bfloat16", or uint16 with the bits), int32 or int64. For a dtype
               of torch the result is a torch tensor

        A slice or view of the array may be a tensor of a request too, if it is contiguous and
        begins at a multiple of 16 bytes; so may torch.from_dlpack of it.

        Raises MoeError (RESOURCE_EXHAUSTED / REGION_LIMIT: over the worker's limit).
        """
        session = self._live_session()
        memory, torch_dtype = _numpy_dtype(dtype)
        shape = (shape,) if isinstance(shape, int) else tuple(shape)
        if any(length < 0 for length in shape):
            raise ValueError("a shape has no negative length: %s" % (shape,))
        size = math.prod(shape) * memory.itemsize
        outcome = session.create("a%d" % next(self._names), max(size, 1))
        if outcome[0] != 0:
            raise _errors.from_native(outcome)
        region = outcome[1]
        array = np.frombuffer(region, np.uint8)
        self._remember(array.__array_interface__["data"][0], len(array), region)
        array = array[:size].view(memory).reshape(shape)
        return array if torch_dtype is None else torch_of_bits(array, torch_dtype)

    def on_device(self, device, spin=False):
        """DeviceRegions: memory of a GPU of this host, and requests of its CUDA streams. The same
        object each time: Regions have one GPU. For another one, open other Regions.

        device  torch's number of it. The worker's GPU must reach it: the same one, or a peer
        spin    a kernel polls for the end of a request, which is some microseconds faster. Only if
                the worker has another GPU

        Needs torch and libmoeclient_cuda. Raises MoeError (FAILED_PRECONDITION / UNSUPPORTED: there
        is no such library, driver or device, or these Regions have another device or `spin`).
        """
        wanted = device, bool(spin)
        with self._lock:
            self._live_session()
            if self._gpu is None:
                self._gpu = wanted, DeviceRegions(self, device, spin)
            opened, gpu = self._gpu
        if opened != wanted:
            raise _errors.MoeError(
                grpc.StatusCode.FAILED_PRECONDITION, "UNSUPPORTED",
                "these Regions are of device %d with spin=%s; open others for device %d with "
                "spin=%s" % (opened + wanted))
        return gpu

    def _remember(self, address, size, region):
        with self._lock:
            left = [each for each in zip(*self._book) if each[1][1]() is not None]
            left.append((address, (size, weakref.ref(region))))
            left.sort(key=lambda each: each[0])
            self._book = tuple(zip(*left))

    def _place(self, name, tensor, shape, kind):
        """(Region, offset) of a tensor, or (None, 0) of none."""
        if tensor is None:
            return None, 0
        if is_torch(tensor):
            if not tensor.is_contiguous() or tensor.device.type not in ("cpu", "cuda"):
                raise ValueError("%s is not contiguous memory of the host or of a GPU" % name)
            if tensor.device.type == "cuda":
                found = _torch_kind(tensor.dtype), tuple(tensor.shape)
                self._check(name, tensor.dtype, found, (kind, shape))
                return self._find(name, tensor.data_ptr(), tensor.numel() * tensor.element_size())
            tensor = bits_of_torch(tensor.detach())
        if not isinstance(tensor, np.ndarray):
            raise TypeError("%s is no array of Regions.allocate" % name)
        self._check(name, tensor.dtype, (_kind(tensor.dtype), tensor.shape), (kind, shape))
        if not tensor.flags.c_contiguous:
            raise ValueError("%s is not contiguous" % name)
        return self._find(name, tensor.__array_interface__["data"][0], tensor.nbytes)

    @staticmethod
    def _check(name, dtype, found, expected):
        """`found` and `expected`: (kind, shape)."""
        if found != expected:
            raise ValueError("%s is %s %s, expected %s %s" % (
                name, dtype, found[1], _KINDS[expected[0]], expected[1]))

    def _find(self, name, address, size):
        """(Region, offset) of these bytes, or (None, 0) of none."""
        if size == 0:
            return None, 0
        starts, regions = self._book
        at = bisect.bisect_right(starts, address) - 1
        region = regions[at][1]() if at >= 0 else None
        if region is None or address + size > starts[at] + regions[at][0]:
            raise ValueError("%s is not in memory of these Regions" % name)
        return region, address - starts[at]

    def submit(self, layer, x, y, topk_ids=None, topk_weights=None, *, ids=None, weights=None,
               epoch=0, weights_version=0, parts="both", token_ids=None):
        """Submits a forward pass and returns a RegionRequest at once. At most 64 are in flight.

        layer    a Layer, or its index in the model
        x, y     [T,H] float32 or bfloat16, both of one dtype: the input, and where the output goes
        topk_ids, topk_weights
                 [T,K] int32 and float32, as of Client.forward
        ids, weights
                 [T,K] int32 and float32: where the routing goes. Both or neither
        epoch, weights_version
                 fail with FAILED_PRECONDITION unless the worker has these; 0: any
        parts    as of Client.forward
        token_ids
                 [T] int64 in memory of the host, as of Client.forward. Excludes topk_ids

        All tensors are in memory of these Regions, of the host or of a GPU (`on_device`): the work
        that writes the inputs there has ended. T = 0 is allowed. Raises MoeError
        (RESOURCE_EXHAUSTED / QUEUE_FULL: take results first), ValueError, TypeError.
        """
        session = self._live_session()
        self._reap(session)
        outcome = session.submit(*self._arguments(layer, x, y, topk_ids, topk_weights, ids, weights,
                                                  epoch, weights_version, parts, token_ids))
        if outcome[0] != 0:
            raise _errors.from_native(outcome)
        return RegionRequest(self, outcome[1], y,
                             (x, topk_ids, topk_weights, ids, weights, token_ids))

    def _arguments(self, layer, x, y, topk_ids, topk_weights, ids, weights, epoch, weights_version,
                   parts, token_ids):
        """Those of Session.submit."""
        layer = self._client.find_layer(layer)
        kind = _BF16 if _is_two_bytes(x) else _F32
        tokens = len(x)
        rows, pairs = (tokens, layer.hidden), (tokens, layer.top_k)
        if (ids is None) != (weights is None):
            raise ValueError("ids and weights come together")
        if topk_weights is not None and topk_ids is None:
            raise ValueError("topk_weights needs topk_ids")
        check_sources(layer, topk_ids, token_ids)
        parts = parts_number(
            parts, topk_ids is not None or token_ids is not None or ids is not None)
        return (layer.layer, tokens, layer.hidden, kind, parts, epoch, weights_version,
                *self._place("x", x, rows, kind), *self._place("topk_ids", topk_ids, pairs, _I32),
                *self._place("topk_weights", topk_weights, pairs, _F32),
                *self._place("y", y, rows, kind), *self._place("ids", ids, pairs, _I32),
                *self._place("weights", weights, pairs, _F32),
                *self._place("token_ids", token_ids, (tokens,), _I64))

    def forward(self, layer, x, y, topk_ids=None, topk_weights=None, **more):
        """submit(...).result()"""
        return self.submit(layer, x, y, topk_ids, topk_weights, **more).result()

    def _reap(self, session):
        """Takes the ends of requests that have no owner any more."""
        for each in self._dropped[:]:
            if session.poll(each[0]) is not None:
                self._dropped.remove(each)

    def _pool(self):
        """Threads that wait for requests of asyncio."""
        with self._lock:
            if self._threads is None:
                self._threads = concurrent.futures.ThreadPoolExecutor(_IN_FLIGHT, "moed-regions")
            return self._threads

    def close(self, what="session"):
        """Ends the session: requests in flight have no result. Arrays stay valid. `what`: the
        object that errors name."""
        self._end = self._end or what
        self._session = self._gpu = None
        self._dropped.clear()
        if self._threads is not None:
            self._threads.shutdown(wait=False)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()


class RegionRequest:
    """A forward pass in flight, from Regions.submit: `await` it, or call `result`. Threads may
    share it."""

    def __init__(self, regions, request, y, inputs):
        self._regions, self._request, self._y, self._inputs = regions, request, y, inputs
        self._lock = threading.Lock()  # one thread asks for the end
        self._outcome = None

    def _ended(self, outcome):
        self._outcome = outcome
        self._inputs = None

    def done(self):
        """Whether it has ended. Does not wait."""
        if self._outcome is None and self._lock.acquire(blocking=False):
            try:
                session = self._regions._session
                if self._outcome is None and session is not None:
                    outcome = session.poll(self._request)
                    if outcome is not None:
                        self._ended(outcome)
            finally:
                self._lock.release()
        return self._outcome is not None

    def result(self):
        """Waits for the end, and returns y, or raises its MoeError. The time limit is that of the
        Regions. Ctrl-C ends the wait within 50 ms; the request stays in flight."""
        with self._lock:
            if self._outcome is None:
                self._ended(self._regions._live_session().wait(self._request))
        if self._outcome[0] != 0:
            raise _errors.from_native(self._outcome)
        return self._y

    @property
    def answer(self):
        """RegionAnswer of a pass that has succeeded; waits as `result` does."""
        self.result()
        return RegionAnswer.of(self._outcome)

    def __await__(self):
        if self.done():
            return self._finished().__await__()
        return asyncio.get_running_loop().run_in_executor(self._regions._pool(),
                                                          self.result).__await__()

    async def _finished(self):
        return self.result()

    def __del__(self):
        if self._outcome is None and self._regions._session is not None:
            self._regions._dropped.append((self._request, (self._y, self._inputs)))
