# SPDX-License-Identifier: Apache-2.0
"""The Python package through libmoeclient (the extension moed._native), compared with grpcio: the
same bits and errors; futures, asyncio, threads, cancellation, ends of clients and workers, fork,
leaks."""

import asyncio
import concurrent.futures
import contextlib
import gc
import os
import re
import signal
import subprocess
import sys
import time
import unittest

import grpc
import numpy as np

from group import (BUILD, Group, freeze, group, is_sanitized, main, model_directory, open_files,
                   run_in_child, skip_without_fork, wait_until)
from python_fakes import LAYER, HeldFake, rows, SEED

import moed

SANITIZED = is_sanitized()
if SANITIZED:  # the extension is not in the package; this process has the sanitizer's runtime
    moed.__path__.append(os.path.join(BUILD, "python_native"))

try:
    import torch
except ImportError:
    torch = None

FAMILY = "mixtral"
RNG = np.random.default_rng(SEED)


def bits(array):
    """The bytes of a result: of numpy or torch."""
    if torch is not None and isinstance(array, torch.Tensor):
        array = array.cpu()
        array = array.view(torch.int16).numpy() if array.dtype == torch.bfloat16 else array.numpy()
    return np.ascontiguousarray(array).tobytes()


def memory_kib():
    with open("/proc/self/status") as file:
        return int(re.search(r"VmRSS:\s+(\d+) kB", file.read()).group(1))


def threads():
    return len(os.listdir("/proc/self/task"))


@contextlib.contextmanager
def both(endpoint, **options):
    """(client of libmoeclient, client of grpcio)."""
    with moed.Client(endpoint, transport="native", **options) as native, \
            moed.Client(endpoint, transport="grpc", **options) as oracle:
        yield native, oracle


class Real(unittest.TestCase):
    """One worker with a golden model."""

    @classmethod
    def setUpClass(cls):
        cls.stack = contextlib.ExitStack()
        cls.g = cls.stack.enter_context(group(FAMILY, 1))
        with moed.Client(cls.g.endpoint) as client:
            cls.layer = client.layers[0]

    @classmethod
    def tearDownClass(cls):
        cls.stack.close()

    def x(self, tokens):
        return RNG.standard_normal((tokens, self.layer.hidden)).astype(np.float32)

    def routing(self, tokens):
        k = self.layer.top_k
        ids = np.argsort(RNG.random((tokens, self.layer.experts)), axis=1)[:, :k]
        return ids, RNG.random((tokens, k)).astype(np.float32)

    def same(self, got, want):
        self.assertEqual((got.dtype, got.shape), (want.dtype, want.shape))
        self.assertEqual(bits(got), bits(want))

    def same_result(self, got, want):
        for name in ("y", "topk_ids", "topk_weights"):
            self.same(getattr(got, name), getattr(want, name))
        self.assertEqual((got.epoch, got.weights_version), (want.epoch, want.weights_version))
        self.assertEqual(list(got.stages), list(want.stages))
        self.assertGreater(got.stages["server_ns"], 0)
        self.assertEqual(got.stages["steps"], want.stages["steps"])

    def test_answers_are_those_of_grpcio_bit_for_bit(self):
        with both(self.g.endpoint, float16="convert") as (native, oracle), \
                native.stream() as stream:
            for tokens in (1, 7, 64):
                wide = self.x(tokens)
                ids, weights = self.routing(tokens)
                inputs = [wide, np.asarray(moed.bf16(wide)).view(np.uint16),
                          wide.astype(np.float16), np.asfortranarray(wide)]
                if moed.bf16(wide).dtype != np.uint16:
                    inputs.append(moed.bf16(wide))
                for x in inputs:
                    for routing in ((), (ids,), (ids, weights)):
                        want = oracle.forward(0, x, *routing)
                        self.assertEqual(want.dtype, x.dtype)
                        full = oracle.forward(0, x, *routing, return_routing=True)
                        for call in (native.forward, stream.forward):
                            self.same(call(0, x, *routing), want)
                            self.same_result(call(0, x, *routing, return_routing=True), full)
                        for submit in (native.submit, stream.submit, oracle.submit):
                            self.same(submit(0, x, *routing).result(60), want)
                            self.same_result(submit(0, x, *routing, return_routing=True)
                                             .result(60), full)

    def test_parts_are_those_of_grpcio(self):
        with group("qwen2_moe", 1) as g, both(g.endpoint) as (native, oracle), \
                native.stream() as stream:
            layer = native.layers[0]
            x = RNG.standard_normal((5, layer.hidden)).astype(np.float32)
            seen = set()
            for parts in ("both", "routed", "shared"):
                want = oracle.forward(layer, x, parts=parts)
                seen.add(bits(want))
                for call in (native.forward, stream.forward):
                    self.same(call(layer, x, parts=parts), want)
                self.same(native.submit(layer, x, parts=parts).result(60), want)
            self.assertEqual(len(seen), 3)
            for call in (native.forward, oracle.forward, stream.forward):
                for wrong in ({"parts": "most"}, {"parts": "shared", "return_routing": True}):
                    with self.assertRaises(ValueError):
                        call(layer, x, **wrong)

    def test_failures_are_those_of_grpcio(self):
        good = self.x(2)
        k = self.layer.top_k
        with both(self.g.endpoint) as (native, oracle):
            limit = native.info.max_tokens_per_request
            for arguments, options in (
                    ((99, good), {}), ((0, self.x(1)), {"epoch": 12345}),
                    ((0, good), {"weights_version": 999}),
                    ((0, np.zeros((limit + 1, self.layer.hidden), np.float32)), {}),
                    ((0, good[:0]), {}), ((0, good[:, 1:]), {}), ((0, good[0]), {}),
                    ((0, good.astype(np.float64)), {}), ((0, good.astype(np.float16)), {}),
                    ((0, good, np.full((2, k), 10**6)), {}),
                    ((0, good, np.full((2, k), 2**31)), {}), ((0, good, np.zeros((2, k))), {}),
                    ((0, good, None, np.zeros((2, k))), {}), (("0", good), {}),
                    ((0, good), {"model_digest": "0" * 64})):
                with self.assertRaises((moed.MoeError, ValueError, TypeError)) as want:
                    oracle.forward(*arguments, **options)
                with native.stream() as stream:
                    calls = [native.forward]
                    if "model_digest" not in options:
                        calls += [stream.forward,
                                  lambda *a, **o: native.submit(*a, **o).result(60),
                                  lambda *a, **o: oracle.submit(*a, **o).result(60)]
                    for call in calls:
                        with self.assertRaises(type(want.exception)) as got:
                            call(*arguments, **options)
                        for field in ("code", "reason", "retry_after"):
                            self.assertEqual(getattr(got.exception, field, None),
                                             getattr(want.exception, field, None), got.exception)
                print("   ", repr(want.exception))

    def test_float16_is_converted_by_choice_alone(self):
        half = self.x(3).astype(np.float16)
        with moed.Client(self.g.endpoint) as client:
            with self.assertRaisesRegex(TypeError, r'float16="convert"'):
                client.forward(0, half)
            wide = client.forward(0, half.astype(np.float32))
        with self.assertRaises(ValueError):
            moed.Client(self.g.endpoint, float16="perhaps")
        with moed.Client(self.g.endpoint, float16="convert") as client:
            self.same(client.forward(0, half), wide.astype(np.float16))

    def test_a_blocking_call_under_asyncio_with_64_in_flight(self):
        inputs = [self.x(1 + n % 5) for n in range(64)]
        with moed.Client(self.g.endpoint, transport="grpc") as oracle:
            wanted = [oracle.forward(0, x) for x in inputs]

        async def run(transport):
            async with moed.AsyncClient(self.g.endpoint, transport=transport) as client:
                self.assertEqual(client.layers[0], self.layer)
                most = 0

                async def one(x, want, call):
                    nonlocal most
                    task = asyncio.ensure_future(call(0, x))
                    flying.add(task)
                    most = max(most, len(flying))
                    self.same(await task, want)
                    flying.discard(task)

                flying = set()
                async with client.stream() as stream:
                    for call in (client.forward, stream.forward):
                        for _ in range(5):
                            await asyncio.gather(*[one(x, want, call)
                                                   for x, want in zip(inputs, wanted)])
                self.assertEqual(most, 64)
                seen = await client.forward(0, inputs[0], return_routing=True)
                self.assertEqual(seen.topk_ids.shape, (1, self.layer.top_k))
                with self.assertRaises(moed.MoeError) as caught:
                    await client.forward(99, inputs[0])
                self.assertEqual(caught.exception.reason, "LAYER_NOT_FOUND")
                with self.assertRaises(moed.MoeError) as caught:
                    await client.forward(0, inputs[0], epoch=12345)
                self.assertEqual(caught.exception.code, grpc.StatusCode.FAILED_PRECONDITION)

        for transport in ("native", "grpc"):
            asyncio.run(run(transport))

    def test_threads_share_a_client(self):
        inputs = [self.x(1 + n % 4) for n in range(16)]
        with both(self.g.endpoint, spin_us=50) as (native, oracle), native.stream() as stream:
            wanted = [oracle.forward(0, x) for x in inputs]

            def work(seed):
                for n in np.random.default_rng(seed).integers(0, 16, 50):
                    self.same(native.forward(0, inputs[n]), wanted[n])
                    self.same(stream.forward(0, inputs[n]), wanted[n])
                    self.same(native.submit(0, inputs[n]).result(60), wanted[n])

            with concurrent.futures.ThreadPoolExecutor(8) as pool:
                list(pool.map(work, range(8)))

    def test_futures_keep_what_they_need(self):
        """The caller drops x and the client's name; the garbage collector runs."""
        inputs = [self.x(8) for _ in range(64)]
        with moed.Client(self.g.endpoint, transport="native") as client:
            wanted = [client.forward(0, x) for x in inputs]
            futures = [client.submit(0, x.copy()) for x in inputs]
            gc.collect()
            for future, want in zip(futures, wanted):
                self.same(future.result(60), want)

    def test_tensors_of_other_libraries(self):
        class Foreign:
            """Knows DLPack alone."""

            def __init__(self, array, device=None):
                self.array, self.device = array, device

            def __dlpack__(self, **options):
                return self.array.__dlpack__(**options)

            def __dlpack_device__(self):
                return self.device or self.array.__dlpack_device__()

        x = self.x(4)
        for transport in ("native", "grpc"):
            with moed.Client(self.g.endpoint, transport=transport) as client:
                want = client.forward(0, x)
                self.same(client.forward(0, Foreign(x)), want)
                self.assertIs(type(client.forward(0, Foreign(x))), np.ndarray)
                with self.assertRaisesRegex(TypeError, "x is on the device CUDA 1"):
                    client.forward(0, Foreign(x, (2, 1)))
                with self.assertRaises(TypeError):
                    client.forward(0, Foreign(x.astype(np.float64)))

    @unittest.skipIf(torch is None, "without torch")
    def test_torch_in_torch_out(self):
        wide = torch.from_numpy(self.x(5))
        ids, weights = self.routing(5)
        for transport in ("native", "grpc"):
            with moed.Client(self.g.endpoint, transport=transport, float16="convert") as client:
                for x in (wide, wide.to(torch.bfloat16), wide.to(torch.float16),
                          wide.t().contiguous().t()):
                    y = client.forward(0, x)
                    self.assertEqual((type(y), y.dtype, y.shape), (torch.Tensor, x.dtype, x.shape))
                    array = x.view(torch.int16).numpy().view(np.uint16) if (
                        x.dtype == torch.bfloat16) else x.numpy()
                    self.assertEqual(bits(y), bits(client.forward(0, array)))
                    y += 1  # the caller owns it
                    seen = client.forward(0, x, torch.from_numpy(ids), torch.from_numpy(weights),
                                          return_routing=True)
                    self.assertEqual(seen.topk_ids.dtype, torch.int32)
                    np.testing.assert_array_equal(seen.topk_ids.numpy(), ids)
                asked = wide.clone().requires_grad_()
                with self.assertRaisesRegex(TypeError, "RemoteMoE"):
                    client.forward(0, asked)
                with torch.no_grad():
                    self.assertEqual(bits(client.forward(0, asked)), bits(client.forward(0, wide)))
                with self.assertRaises(TypeError):
                    client.forward(0, torch.empty(5, self.layer.hidden, device="meta"))

    def test_memory_and_descriptors_are_flat_over_10000_calls(self):
        x = self.x(2)
        with moed.Client(self.g.endpoint, transport="native") as client, \
                client.stream() as stream:
            def calls(count):
                for _ in range(count // 4):
                    client.forward(0, x, return_routing=True)
                    stream.forward(0, x)
                for _ in range(count // 128):
                    futures = [client.submit(0, x) for _ in range(32)]
                    futures += [stream.submit(0, x) for _ in range(32)]
                    for future in futures:
                        future.result(60)

            calls(3000)
            gc.collect()
            before = memory_kib(), len(open_files(os.getpid())), threads(), len(gc.get_objects())
            calls(10000)
            gc.collect()
            after = memory_kib(), len(open_files(os.getpid())), threads(), len(gc.get_objects())
        print("    memory %d -> %d KiB, objects %d -> %d" % (before[0], after[0], before[3],
                                                            after[3]))
        self.assertEqual(after[1:3], before[1:3])
        self.assertLess(after[3] - before[3], 200)
        if not SANITIZED:  # which keeps freed memory for its reports
            self.assertLess(after[0] - before[0], 2048)

    def test_a_closed_client_leaves_nothing(self):
        def use():
            with moed.Client(self.g.endpoint, transport="native") as client:
                with client.stream() as stream:
                    stream.submit(0, self.x(1)).result(60)
                client.submit(0, self.x(1)).result(60)

            async def run():
                async with moed.AsyncClient(self.g.endpoint, transport="native") as client:
                    await client.forward(0, self.x(1))

            asyncio.run(run())

        for _ in range(3):
            use()
        gc.collect()
        before = len(open_files(os.getpid()))
        for _ in range(10):
            use()
        gc.collect()
        wait_until(lambda: len(open_files(os.getpid())) <= before)

    def test_a_child_is_refused_and_the_parent_goes_on(self):
        skip_without_fork(self, self.g.endpoint)
        client = moed.Client(self.g.endpoint, transport="native")
        x = self.x(1)
        want = client.forward(0, x)
        flying = [client.submit(0, x) for _ in range(16)]

        def use_and_drop():
            nonlocal client, flying
            refused = 0
            for call in (client.forward, client.submit):
                try:
                    call(0, x)
                except RuntimeError:
                    refused += 1
            client.close()
            del client, flying
            gc.collect()
            return refused == 2

        run_in_child(self, use_and_drop)
        for future in flying:
            self.same(future.result(60), want)
        self.same(client.forward(0, x), want)
        client.close()

    def test_a_child_opens_a_client_through_grpcio_and_the_parent_goes_on(self):
        skip_without_fork(self, self.g.endpoint)
        program = """
import os, signal, sys
import numpy as np
import moed

client = moed.Client(sys.argv[1])
x = np.ones((1, client.layers[0].hidden), np.float32)
want = client.forward(0, x)
for _ in range(10):
    pid = os.fork()
    if pid == 0:
        signal.alarm(20)
        code = 1
        try:
            own = moed.Client(sys.argv[1])
            if np.allclose(own.forward(0, x), want):
                code = 2
            try:
                moed.Client(sys.argv[1], transport="native").forward(0, x)
            except moed.MoeError as error:
                if code == 2 and (error.code.name, error.reason) == (
                        "FAILED_PRECONDITION", "UNSUPPORTED"):
                    code = 0
        finally:
            os._exit(code)
    assert (client.forward(0, x) == want).all()
    assert os.waitpid(pid, 0)[1] == 0
"""
        done = subprocess.run([sys.executable, "-c", program, self.g.endpoint],
                              env={**os.environ, "PYTHONPATH": os.path.join(BUILD, "python")},
                              capture_output=True, text=True, timeout=120)
        self.assertEqual(done.returncode, 0, done.stderr)


class Absent(unittest.TestCase):
    """Without the extension."""

    def test_everything_but_shared_memory_works(self):
        program = """
import sys
sys.modules["moed._native"] = None
sys.path.insert(0, sys.argv[1])
import moed, numpy as np, asyncio
with moed.Client(sys.argv[2]) as client:
    x = np.ones((2, client.layers[0].hidden), np.float32)
    y = client.forward(0, x)
    assert client.submit(0, x).result().tobytes() == y.tobytes()
    with client.stream() as stream:
        assert stream.submit(0, x).result().tobytes() == y.tobytes()
    try:
        client.open_regions()
    except moed.MoeError as error:
        print(error)
async def run():
    async with moed.AsyncClient(sys.argv[2]) as client:
        for each in await asyncio.gather(*[client.forward(0, x) for _ in range(64)]):
            assert each.tobytes() == y.tobytes()
asyncio.run(run())
try:
    moed.Client(sys.argv[2], transport="native")
except ImportError as error:
    print(error)
try:
    moed.Client(sys.argv[2], transport="carrier")
except ValueError as error:
    print(error)
"""
        with group(FAMILY, 1) as g:
            done = subprocess.run([sys.executable, "-c", program, os.path.join(BUILD, "python"),
                                   g.endpoint], stdout=subprocess.PIPE, text=True, timeout=60)
        print("    " + done.stdout.replace("\n", "\n    "))
        self.assertEqual(done.returncode, 0)
        self.assertRegex(done.stdout, r"UNIMPLEMENTED/UNSUPPORTED.*\n.*moed\._native.*\n.*carrier")


class Ends(unittest.TestCase):
    """A fake worker that holds its answers."""

    @classmethod
    def setUpClass(cls):
        """What a process opens once."""
        fake = HeldFake()
        fake.release()
        with moed.Client(fake.endpoint, transport="native") as client:
            with client.stream() as stream:
                stream.submit(LAYER, rows(1)).result(60)
            client.submit(LAYER, rows(1)).result(60)
        fake.stop()

    def setUp(self):
        self.fake = HeldFake()
        self.addCleanup(self.fake.stop)

    def client(self, **options):
        return moed.Client(self.fake.endpoint, transport="native", **options)

    def test_a_deadline_ends_a_call(self):
        with self.client() as client, client.stream() as stream:
            for call in (client.forward, stream.forward,
                         lambda *a, **o: client.submit(*a, **o).result(60)):
                with self.assertRaises(moed.MoeError) as caught:
                    call(LAYER, rows(1), timeout=0.2)
                self.assertEqual(caught.exception.code, grpc.StatusCode.DEADLINE_EXCEEDED)
                self.assertIn("timeout=0.2 s", caught.exception.message)
            self.fake.release()

    def test_a_cancelled_task_ends_at_once(self):
        async def run():
            async with moed.AsyncClient(self.fake.endpoint, transport="native") as client:
                x = rows(2)
                tasks = [asyncio.ensure_future(client.forward(LAYER, x)) for _ in range(8)]
                await asyncio.sleep(0.1)
                for task in tasks[::2]:
                    task.cancel()
                ends = await asyncio.wait_for(
                    asyncio.gather(*tasks[::2], return_exceptions=True), 10)
                self.assertTrue(all(isinstance(e, asyncio.CancelledError) for e in ends))
                with self.assertRaises(asyncio.TimeoutError):
                    await asyncio.wait_for(client.forward(LAYER, x), 0.1)
                self.fake.release()
                for task in tasks[1::2]:
                    np.testing.assert_array_equal(await task, 2 * x)
                np.testing.assert_array_equal(await client.forward(LAYER, x), 2 * x)

        asyncio.run(run())

    def test_a_cancelled_future_gives_its_answer_up(self):
        with self.client() as client:
            x = rows(1)
            futures = [client.submit(LAYER, x) for _ in range(4)]
            self.assertTrue(futures[0].cancel() and futures[2].cancel())
            self.fake.release()
            for future in futures[1::2]:
                np.testing.assert_array_equal(future.result(60), 2 * x)
            np.testing.assert_array_equal(client.forward(LAYER, x), 2 * x)
            self.assertTrue(futures[0].cancelled())

    def closed(self, error):
        self.assertEqual(error.code, grpc.StatusCode.CANCELLED)
        self.assertEqual(error.message, "the client has been closed")

    def test_close_fails_what_is_in_flight(self):
        before = len(open_files(os.getpid()))
        client = self.client()
        stream = client.stream()
        futures = [client.submit(LAYER, rows(1)), stream.submit(LAYER, rows(1))]
        with concurrent.futures.ThreadPoolExecutor(2) as pool:
            blocked = [pool.submit(call, LAYER, rows(1))
                       for call in (client.forward, stream.forward)]
            wait_until(lambda: len(self.fake.requests) >= 2)
            time.sleep(0.2)
            begin = time.monotonic()
            client.close()
            for each in futures + blocked:
                self.closed(each.exception(10))
            print("    closed after %.3f s" % (time.monotonic() - begin))
        self.fake.release()
        del client, stream, futures, blocked, each
        gc.collect()
        # The connections end with the last request at the worker.
        wait_until(lambda: len(open_files(os.getpid())) <= before)

    def test_an_async_client_closed_in_flight(self):
        async def run():
            client = await moed.AsyncClient(self.fake.endpoint, transport="native").connect()
            tasks = [asyncio.ensure_future(client.forward(LAYER, rows(1))) for _ in range(4)]
            await asyncio.sleep(0.1)
            await client.close()
            for task in tasks:
                with self.assertRaises(moed.MoeError) as caught:
                    await asyncio.wait_for(task, 10)
                self.closed(caught.exception)
            with self.assertRaises(moed.MoeError):
                await client.forward(LAYER, rows(1))

        asyncio.run(run())
        self.fake.release()

    def test_a_closed_stream_answers_what_is_in_flight(self):
        with self.client() as client:
            stream = client.stream()
            x = rows(1)
            future = stream.submit(LAYER, x)
            stream.close()
            with self.assertRaises(moed.MoeError) as caught:
                stream.submit(LAYER, x)
            self.assertEqual(caught.exception.message, "the stream has been closed")
            self.fake.release()
            np.testing.assert_array_equal(future.result(60), 2 * x)

    def test_a_signal_ends_a_wait(self):
        class Stopped(Exception):
            pass

        def stop(*_):
            raise Stopped

        old = signal.signal(signal.SIGALRM, stop)
        self.addCleanup(signal.signal, signal.SIGALRM, old)
        with self.client() as client, client.stream() as stream:
            for call in (client.forward, stream.forward):
                signal.setitimer(signal.ITIMER_REAL, 0.1)
                begin = time.monotonic()
                with self.assertRaises(Stopped):
                    call(LAYER, rows(1))
                self.assertLess(time.monotonic() - begin, 10)
            self.fake.release()
            x = rows(1)
            np.testing.assert_array_equal(client.forward(LAYER, x), 2 * x)

    def test_an_abandoned_loop_costs_nothing(self):
        """The loop ends before its client is closed."""
        async def run():
            client = await moed.AsyncClient(self.fake.endpoint, transport="native").connect()
            task = asyncio.ensure_future(client.forward(LAYER, rows(1)))
            await asyncio.sleep(0.1)
            task.cancel()

        before = len(open_files(os.getpid()))
        asyncio.run(run())
        self.fake.release()
        gc.collect()
        wait_until(lambda: gc.collect() >= 0 and len(open_files(os.getpid())) <= before)

    def test_a_child_may_drop_an_async_client(self):
        skip_without_fork(self, self.fake.endpoint)
        self.fake.release()

        async def run():
            client = await moed.AsyncClient(self.fake.endpoint, transport="native").connect()
            await client.forward(LAYER, rows(1))
            run_in_child(self, lambda: client.__del__() is None)
            await client.forward(LAYER, rows(1))
            await client.close()

        asyncio.run(run())

    def test_another_loop_is_refused(self):
        client = moed.AsyncClient(self.fake.endpoint, transport="native")
        with self.assertRaises(RuntimeError):
            client.info
        self.fake.release()
        asyncio.run(client.connect())
        with self.assertRaisesRegex(RuntimeError, "another event loop"):
            asyncio.run(client.forward(LAYER, rows(1)))


class Killed(unittest.TestCase):
    def test_a_killed_worker_ends_what_is_in_flight(self):
        g = Group(model_directory(FAMILY), 1)
        try:
            pid = g.worker_pids()[0]
            codes = {grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED}

            async def run():
                async with moed.AsyncClient(g.endpoint, transport="native", timeout=20) as client:
                    x = np.ones((1, client.layers[0].hidden), np.float32)
                    await client.forward(0, x)
                    future = client.client.submit(0, x)
                    future.result(20)
                    freeze(pid)
                    tasks = [asyncio.ensure_future(client.forward(0, x)) for _ in range(64)]
                    futures = [client.client.submit(0, x) for _ in range(8)]
                    with client.client.stream() as stream:
                        futures.append(stream.submit(0, x))
                        await asyncio.sleep(0.3)
                        os.kill(pid, signal.SIGKILL)
                        ends = await asyncio.wait_for(
                            asyncio.gather(*tasks, *map(asyncio.wrap_future, futures),
                                           return_exceptions=True), 60)
                    found = {(e.code.name, e.reason) for e in ends}
                    print("   ", found)
                    self.assertEqual(len(ends), 73)
                    self.assertLessEqual({e.code for e in ends}, codes)

            asyncio.run(run())
        finally:
            g.stop()


if __name__ == "__main__":
    print("MOE_SEED=%d" % SEED)
    main()
