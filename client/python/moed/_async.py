# SPDX-License-Identifier: Apache-2.0
"""The client for asyncio."""

import asyncio

from . import _native_calls
from ._client import Client


class AsyncClient:
    """A Client for one event loop: its calls are coroutines.

        async with moed.AsyncClient("127.0.0.1:7600") as client:
            y = await client.forward(layer, x)

    Takes the arguments of Client. `async with` connects, and so does `await client.connect()`. Then
    all its methods belong to that loop. With the extension the loop itself receives answers, and no
    thread stands between. Without it, up to 64 calls run in threads of the client.

    Cancelling a task ends its wait at once. The request goes on at the worker, and its memory is
    released when it ends there. Training calls are those of `AsyncClient.client`.
    """

    def __init__(self, endpoint, spread=False, timeout=60.0, **options):
        self._arguments, self._options = (endpoint, spread, timeout), options
        self._client = self._loop = self._queue = None

    async def connect(self):
        """Connects to the group; see Client for the errors. Returns the AsyncClient."""
        if self._client is not None:
            raise RuntimeError("the client has been connected before")
        loop = asyncio.get_running_loop()
        client = await loop.run_in_executor(
            None, lambda: Client(*self._arguments, **self._options))
        self._client, self._loop = client, loop
        self._queue = client._make_queue()
        if self._queue is not None:
            loop.add_reader(self._queue.fileno(), _native_calls.deliver, self._queue)
        return self

    @property
    def client(self):
        """The Client behind this one: info, layers, models, and calls that block."""
        if self._client is None:
            raise RuntimeError("the client is not connected: use `async with`, or await connect()")
        return self._client

    @property
    def info(self):
        """As Client.info."""
        return self.client.info

    @property
    def layers(self):
        """As Client.layers."""
        return self.client.layers

    def _check_loop(self):
        if asyncio.get_running_loop() is not self._loop:
            raise RuntimeError("the client belongs to another event loop")

    async def _run(self, lane, submit, batch, *arguments):
        if self._queue is None:
            return await asyncio.wrap_future(submit(batch, *arguments))
        future = self._loop.create_future()
        lane.start(self._queue, _native_calls.LoopPending, future, batch, *arguments)
        return await future

    async def forward(self, layer, x, topk_ids=None, topk_weights=None, return_routing=False,
                      timeout=None, epoch=0, weights_version=0, parts="both", token_ids=None,
                      return_rehomed=False):
        """The output of one MoE layer; arguments, answer and errors are those of Client.forward."""
        client = self.client
        self._check_loop()
        batch = client._batch(layer, x, topk_ids, topk_weights, return_routing, parts, token_ids,
                              return_rehomed)
        return await self._run(client._lane, client._submit, batch, return_routing, timeout, epoch,
                               weights_version)

    def stream(self):
        """An AsyncStream to one worker: less cost per call, no retries."""
        return AsyncStream(self, self.client.stream())

    async def open_regions(self, timeout=None, spin_us=0):
        """As Client.open_regions. A request of the Regions can be awaited."""
        return await asyncio.get_running_loop().run_in_executor(
            None, lambda: self.client.open_regions(timeout, spin_us))

    async def close(self):
        """Closes the connections; calls in flight fail."""
        if self._client is None:
            return
        self._check_loop()
        self._client.close()
        if self._queue is not None:
            self._loop.remove_reader(self._queue.fileno())
            self._leave()

    def _leave(self):
        queue, self._queue = self._queue, None
        if queue is not None and self._client._is_own_process():
            queue.hand_over(_native_calls.dispatcher_queue())

    def __del__(self):
        self._leave()  # a loop that has ended takes nothing from its queue

    async def __aenter__(self):
        return await self.connect()

    async def __aexit__(self, *_):
        await self.close()


class AsyncStream:
    """A Stream for asyncio, from AsyncClient.stream. Close it, or use `async with`."""

    def __init__(self, client, stream):
        self._client, self._stream = client, stream

    async def forward(self, layer, x, topk_ids=None, topk_weights=None, return_routing=False,
                      timeout=None, epoch=0, weights_version=0, parts="both", token_ids=None,
                      return_rehomed=False):
        """As AsyncClient.forward, without retries."""
        self._client._check_loop()
        batch = self._client.client._batch(layer, x, topk_ids, topk_weights, return_routing,
                                           parts, token_ids, return_rehomed)
        lane = self._stream._lane
        return await self._client._run(lane, lane.submit, batch, return_routing, timeout, epoch,
                                       weights_version)

    async def close(self):
        """As Stream.close."""
        await asyncio.get_running_loop().run_in_executor(None, self._stream.close)

    async def __aenter__(self):
        return self

    async def __aexit__(self, *_):
        await self.close()
