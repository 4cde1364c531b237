# SPDX-License-Identifier: Apache-2.0
"""Memory of a GPU that a worker maps too, and forward passes that CUDA streams submit and await."""

import itertools
import math

from . import _errors
from ._answers import RegionAnswer


class _Memory:
    """Bytes of a GPU, in the form that torch takes without a copy. Holds what owns them."""

    def __init__(self, address, size, owner):
        self.owner = owner
        self.__cuda_array_interface__ = {"shape": (size,), "typestr": "|u1", "version": 2,
                                         "data": (address, False)}


class DeviceRegions:
    """Memory of one GPU, from Regions.on_device. Threads may share it.

        with client.open_regions() as regions:
            gpu = regions.on_device(1)
            x, y = (gpu.allocate((T, layer.hidden), torch.bfloat16) for _ in range(2))
            request = gpu.request(layer, x, y)
            ...                             # work of the current stream that writes x
            request.submit()                # both are work of the current stream, and
            request.wait()                  # torch.cuda.graph can capture them
            ...                             # its work that reads y

    Hidden states stay on the GPU, and no call of the host is between a submit and the end of its
    wait. The rules of Regions hold: one output for each request in flight, no retries.
    """

    def __init__(self, regions, device, spin):
        from . import _native
        try:
            self._native = _native.Device(regions._live_session(), device, spin)
        except RuntimeError as error:
            raise _errors.from_native(error.args) from None
        import torch
        self._torch, self._regions, self._device = torch, regions, torch.device("cuda", device)
        self._names = itertools.count(1)

    def allocate(self, shape, dtype):
        """A tensor of zeros of torch's float32, bfloat16 or int32, in new memory on the GPU. It
        takes whole granules, often 2 MiB, of the 32 that a client may have: for many tensors, take
        slices of one. It stays valid as long as it lives, also after Regions.close.

        Raises MoeError (RESOURCE_EXHAUSTED / REGION_LIMIT: over the worker's limit).
        """
        torch = self._torch
        if dtype not in (torch.float32, torch.bfloat16, torch.int32):
            raise TypeError("a tensor in shared memory is float32, bfloat16 or int32, not %s"
                            % dtype)
        self._regions._live_session()
        shape = (shape,) if isinstance(shape, int) else tuple(shape)
        if any(length < 0 for length in shape):
            raise ValueError("a shape has no negative length: %s" % (shape,))
        size = math.prod(shape) * torch.empty((), dtype=dtype).element_size()
        name = "g%d-%d" % (self._device.index, next(self._names))
        outcome = self._native.create(name, max(size, 1))
        if outcome[0] != 0:
            raise _errors.from_native(outcome)
        region = outcome[1]
        self._regions._remember(region.address, region.bytes, region)
        memory = _Memory(region.address, region.bytes, region)
        array = torch.as_tensor(memory, device=self._device)
        return array[:size].view(dtype).view(shape)

    def request(self, layer, x, y, topk_ids=None, topk_weights=None, *, ids=None, weights=None,
                epoch=0, weights_version=0, parts="both", token_ids=None):
        """A StreamRequest for these tensors: submitted as often as wanted, with other contents. The
        arguments are those of Regions.submit. y is on this GPU, and token_ids are in the host's
        memory; the others are in any memory of the Regions. It takes one of the 64 requests in
        flight as long as it lives.

        Raises MoeError (INVALID_ARGUMENT / REGION_INVALID: y is not on this GPU), and what
        Regions.submit raises.
        """
        self._regions._live_session()
        outcome = self._native.request(*self._regions._arguments(
            layer, x, y, topk_ids, topk_weights, ids, weights, epoch, weights_version, parts,
            token_ids))
        if outcome[0] != 0:
            raise _errors.from_native(outcome)
        tensors = (x, topk_ids, topk_weights, ids, weights, token_ids)
        return StreamRequest(self, outcome[1], y, tensors)


class StreamRequest:
    """A forward pass that CUDA streams submit and await, from DeviceRegions.request.

    Submits and waits alternate, in the order of their streams' work. Two objects are two passes in
    flight. Keep the object until its work has ended, and as long as a graph with it is used.

    If a pass fails, y is NaN in all its elements, and later work of the stream goes on: look at
    `code` on the GPU, or at `result` on the host.
    """

    def __init__(self, owner, native, y, tensors):
        self._owner, self._native, self._y, self._tensors = owner, native, y, tensors

    def _enqueue(self, call, stream):
        self._owner._regions._live_session()
        if stream is None:
            stream = self._owner._torch.cuda.current_stream(self._owner._device)
        outcome = call(stream.cuda_stream)
        if outcome[0] != 0:
            raise _errors.from_native(outcome)

    def submit(self, stream=None):
        """Enqueues the submit, on a torch.cuda.Stream of the GPU; None: the current one."""
        self._enqueue(self._native.submit, stream)

    def wait(self, stream=None):
        """Enqueues the wait for the pass. Returns y, for work that follows on the stream."""
        self._enqueue(self._native.wait, stream)
        return self._y

    @property
    def code(self):
        """An int32 tensor on the GPU, of no dimension: the code of the last pass that has ended, as
        in grpc.StatusCode; 0 = it has succeeded. Work after the wait may read it."""
        torch = self._owner._torch
        memory = _Memory(self._native.status, 4, self)
        return torch.as_tensor(memory, device=self._owner._device).view(torch.int32)[0]

    def result(self):
        """The RegionAnswer of the last pass, or raises its MoeError. The stream has ended the wait:
        synchronize it first."""
        outcome = self._native.result()
        if outcome[0] != 0:
            raise _errors.from_native(outcome)
        return RegionAnswer.of(outcome)
