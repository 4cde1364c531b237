# SPDX-License-Identifier: Apache-2.0
"""Shared memory from Python: the same bits as Forward, 64 in flight in any order, arrays that
outlive their session, refusals, ends of workers."""

import asyncio
import concurrent.futures
import contextlib
import gc
import os
import re
import signal
import sys
import tempfile
import threading
import time
import types
import unittest
from unittest import mock

import grpc
import numpy as np

from group import (BUILD, Group, freeze, group, is_sanitized, main, model_directory, open_files,
                   run_in_child, skip_without_fork, wait_until)
from python_fakes import SEED

import moed

SANITIZED = is_sanitized()
if SANITIZED:  # as in test_python_native.py
    moed.__path__.append(os.path.join(BUILD, "python_native"))

try:
    import torch
except ImportError:
    torch = None

FAMILY = "mixtral"
IN_FLIGHT = 64
RNG = np.random.default_rng(SEED)


def mappings(pid="self"):
    """Those of memory that a client shares."""
    with open("/proc/%s/maps" % pid) as maps:
        return sum("memfd:moe-region" in line for line in maps)


def memory_kib():
    with open("/proc/self/status") as file:
        return int(re.search(r"VmRSS:\s+(\d+) kB", file.read()).group(1))


def settings_file():
    file = tempfile.NamedTemporaryFile("w", suffix=".ini")
    file.write("allow-client-memory = 64M\n")
    file.flush()
    return file


class SharedMemory(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.stack = contextlib.ExitStack()
        settings = cls.stack.enter_context(settings_file())
        cls.g = cls.stack.enter_context(group(FAMILY, 1, "--worker-config", settings.name))
        cls.client = cls.stack.enter_context(moed.Client(cls.g.endpoint, transport="native"))
        cls.oracle = cls.stack.enter_context(moed.Client(cls.g.endpoint, transport="grpc"))
        cls.layer = cls.client.layers[0]

    @classmethod
    def tearDownClass(cls):
        cls.stack.close()

    def filled(self, regions, tokens, dtype=np.float32):
        """(x with random rows, y) in shared memory."""
        x, y = (regions.allocate((tokens, self.layer.hidden), dtype) for _ in range(2))
        wide = RNG.standard_normal(x.shape).astype(np.float32)
        x[:] = wide if x.dtype == np.float32 else np.asarray(moed.bf16(wide)).view(x.dtype)
        return x, y

    def test_y_is_that_of_grpcio_bit_for_bit(self):
        k = self.layer.top_k
        with self.client.open_regions(spin_us=20) as regions:
            for dtype in (np.float32, "bfloat16", np.uint16):
                for tokens in (1, 9, 128):
                    x, y = self.filled(regions, tokens, dtype)
                    want = self.oracle.forward(0, x, return_routing=True)
                    request = regions.submit(self.layer, x, y)
                    self.assertIs(request.result(), y)
                    self.assertEqual(y.tobytes(), want.y.tobytes())
                    self.assertEqual((request.answer.epoch, request.answer.weights_version),
                                     (want.epoch, want.weights_version))
                    self.assertGreater(request.answer.stages["server_ns"], 0)
                    ids_in, ids = (regions.allocate((tokens, k), np.int32) for _ in range(2))
                    weights_in, weights = (regions.allocate((tokens, k)) for _ in range(2))
                    regions.forward(0, x, y, ids=ids, weights=weights)
                    np.testing.assert_array_equal(ids, want.topk_ids)
                    np.testing.assert_array_equal(weights, want.topk_weights)
                    ids_in[:] = (ids + 1) % self.layer.experts
                    weights_in[:] = RNG.random((tokens, k))
                    for routing in ((ids_in,), (ids_in, weights_in)):
                        regions.forward(0, x, y, *routing)
                        self.assertEqual(y.tobytes(),
                                         self.oracle.forward(0, x, *routing).tobytes())

    def test_slices_are_tensors_too(self):
        with self.client.open_regions() as regions:
            x, y = self.filled(regions, 40)
            want = self.oracle.forward(0, x[8:24])
            self.assertEqual(regions.forward(0, x[8:24], y[8:24]).tobytes(), want.tobytes())
            self.assertFalse(y[:8].any() or y[24:].any())
            nothing = x[:0]
            self.assertEqual(regions.forward(0, nothing, y[:0]).shape, (0, self.layer.hidden))

    def test_64_in_flight_in_any_order(self):
        with self.client.open_regions() as regions:
            x, y = self.filled(regions, 7 * IN_FLIGHT)
            pairs = [(x[at:at + 1 + at // 7 % 7], y[at:at + 1 + at // 7 % 7])
                     for at in range(0, 7 * IN_FLIGHT, 7)]
            wanted = [self.oracle.forward(0, x) for x, _ in pairs]
            for _ in range(10):
                requests = [regions.submit(0, x, y) for x, y in pairs]
                for n in RNG.permutation(IN_FLIGHT):
                    self.assertEqual(requests[n].result().tobytes(), wanted[n].tobytes())
                    self.assertTrue(requests[n].done())
                    requests[n].result()  # again
            requests = [regions.submit(0, x, y) for x, y in pairs]
            wait_until(lambda: all(each.done() for each in requests))

            async def run():
                for (x, y), want, got in zip(pairs, wanted, await asyncio.gather(
                        *[self.awaited(regions.submit(0, x, y)) for x, y in pairs])):
                    self.assertIs(got, y)
                    self.assertEqual(y.tobytes(), want.tobytes())

            asyncio.run(run())

    async def awaited(self, request):
        return await request

    def test_ctrl_c_ends_a_wait_and_not_the_request(self):
        with self.client.open_regions() as regions:
            x, y = self.filled(regions, 3)
            want = self.oracle.forward(self.layer.layer, x)
            pid = self.g.worker_pids()[0]
            freeze(pid)
            try:
                request = regions.submit(self.layer.layer, x, y)
                press = threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT))
                press.start()
                begin = time.monotonic()
                with self.assertRaises(KeyboardInterrupt):
                    request.result()
                print("    ended after %.3f s" % (time.monotonic() - begin))
                press.join()
            finally:
                os.kill(pid, signal.SIGCONT)
            np.testing.assert_array_equal(request.result(), want)

    def test_threads_share_regions(self):
        with self.client.open_regions() as regions:
            def work(_):
                x, y = self.filled(regions, 3)
                want = self.oracle.forward(0, x).tobytes()
                for _ in range(50):
                    y[:] = 0
                    request = regions.submit(0, x, y)
                    list(inner.map(lambda _: request.result(), range(2)))
                    self.assertEqual(y.tobytes(), want)

            with concurrent.futures.ThreadPoolExecutor(8) as inner, \
                    concurrent.futures.ThreadPoolExecutor(6) as pool:
                list(pool.map(work, range(6)))

    def test_requests_without_an_owner_give_their_places_back(self):
        with self.client.open_regions() as regions:
            x, y = self.filled(regions, 1)
            outputs = [regions.allocate(y.shape) for _ in range(4)]
            for n in range(4 * IN_FLIGHT):
                for _ in range(1000):
                    try:
                        regions.submit(0, x, outputs[n % 4])
                        break
                    except moed.MoeError as error:
                        self.assertIn(error.reason, ("QUEUE_FULL", "REGION_OVERLAP"))
                        time.sleep(0.001)
            wait_until(lambda: (regions._reap(regions._session), not regions._dropped)[1])

    def test_wrong_arguments_are_refused(self):
        with self.client.open_regions() as regions, self.client.open_regions() as others:
            x, y = self.filled(regions, 4)
            ids = regions.allocate((4, self.layer.top_k), np.int32)
            foreign = others.allocate(y.shape)
            for error, call in (
                    (ValueError, lambda: regions.submit(0, x.copy(), y)),
                    (ValueError, lambda: regions.submit(0, x, np.zeros_like(y))),
                    (ValueError, lambda: regions.submit(0, x, foreign)),
                    (ValueError, lambda: regions.submit(0, x[:, ::2], y)),
                    (ValueError, lambda: regions.submit(0, x[::2], y[:2])),
                    (ValueError, lambda: regions.submit(0, x, y[:3])),
                    (ValueError, lambda: regions.submit(0, x, y, ids=ids)),
                    (ValueError, lambda: regions.submit(0, x, y, None, x)),
                    (ValueError, lambda: regions.submit(0, x, y, x)),
                    (TypeError, lambda: regions.submit(0, x, [[0.0]])),
                    (TypeError, lambda: regions.allocate((4, 4), np.float16)),
                    (TypeError, lambda: regions.allocate((4, 4), np.float64)),
                    (ValueError, lambda: regions.allocate((-4, 4)))):
                with self.assertRaises(error):
                    call()
            for reason, call in (
                    ("LAYER_NOT_FOUND", lambda: regions.forward(99, x, y)),
                    ("STALE_EPOCH", lambda: regions.forward(0, x, y, epoch=12345)),
                    ("VERSION_MISMATCH", lambda: regions.forward(0, x, y, weights_version=99)),
                    ("REGION_OVERLAP", lambda: regions.forward(0, x, x)),
                    ("REGION_LIMIT", lambda: regions.allocate((1 << 25,)))):
                with self.assertRaises(moed.MoeError) as caught:
                    call()
                self.assertEqual(caught.exception.reason, reason)
                print("   ", caught.exception)
            regions.forward(0, x, y)

    def test_arrays_outlive_their_session(self):
        before, files = mappings(), len(open_files(os.getpid()))
        regions = self.client.open_regions()
        x, y = self.filled(regions, 64)
        request = regions.submit(0, x, y)
        regions.close()
        with self.assertRaises(moed.MoeError) as caught:
            request.result()
        self.assertEqual(caught.exception.message, "the session has been closed")
        with self.assertRaises(moed.MoeError):
            regions.allocate((1, 1))
        x += 1
        part = x[5:7]
        del x, y, request
        gc.collect()
        part += 1  # would be a fault if the memory had gone
        self.assertGreater(mappings(), before)
        del part
        gc.collect()
        wait_until(lambda: mappings() == before and len(open_files(os.getpid())) <= files)

    def test_memory_is_given_back(self):
        pid = self.g.worker_pids()[0]
        with self.client.open_regions() as regions:
            for _ in range(100):  # together more than the limit of 64M
                big = regions.allocate((1 << 20,))
                self.assertFalse(big.any())
                big[:] = 1
            self.assertLessEqual(mappings(pid), 4)
            del big

    @unittest.skipIf(os.path.exists("/dev/nvidiactl"), "see tests/gpu/python_streams.py")
    def test_memory_of_a_gpu_needs_a_gpu(self):
        with self.client.open_regions() as regions:
            with self.assertRaises(moed.MoeError) as caught:
                regions.on_device(0)
            self.assertEqual((caught.exception.code, caught.exception.reason),
                             (grpc.StatusCode.FAILED_PRECONDITION, "UNSUPPORTED"))
            print("    " + caught.exception.message)
            x, y = self.filled(regions, 2)
            regions.forward(0, x, y)
        with self.assertRaises(moed.MoeError) as caught:
            regions.on_device(0)
        self.assertEqual(caught.exception.message, "the session has been closed")

    def test_regions_have_one_gpu(self):
        opened = []

        class Device:  # stands for moed._native.Device
            def __init__(self, session, device, spin):
                time.sleep(0.05)
                opened.append((device, spin))

        here = types.SimpleNamespace(device=lambda kind, index: (kind, index))
        with contextlib.ExitStack() as stack:
            stack.enter_context(mock.patch.object(moed._native, "Device", Device))
            stack.enter_context(mock.patch.dict(sys.modules, torch=here))
            regions = stack.enter_context(self.client.open_regions())
            threads = stack.enter_context(concurrent.futures.ThreadPoolExecutor(8))
            found = set(threads.map(regions.on_device, [1] * 8))
            self.assertEqual((len(found), opened), (1, [(1, False)]))
            for other in ((0, False), (1, True)):
                with self.assertRaises(moed.MoeError) as caught:
                    regions.on_device(*other)
                self.assertEqual((caught.exception.code, caught.exception.reason),
                                 (grpc.StatusCode.FAILED_PRECONDITION, "UNSUPPORTED"))
                self.assertEqual(opened, [(1, False)])
            print("    " + caught.exception.message)
            with self.client.open_regions() as others:
                self.assertNotIn(others.on_device(0), found)
            regions.close()
            with self.assertRaises(moed.MoeError) as caught:
                regions.on_device(1)
            self.assertEqual(caught.exception.message, "the session has been closed")

    def test_a_client_ends_its_regions(self):
        with moed.Client(self.g.endpoint, transport="native") as client:
            regions = client.open_regions()
            x, y = self.filled(regions, 2)
        with self.assertRaises(moed.MoeError) as caught:
            regions.submit(0, x, y)
        self.assertEqual(caught.exception.message, "the client has been closed")
        x[:] = 0

    def test_memory_and_descriptors_are_flat_over_10000_requests(self):
        with self.client.open_regions() as regions:
            x, y = self.filled(regions, 2)

            def calls(count):
                for _ in range(count):
                    regions.submit(0, x, y).result()

            calls(2000)
            before = memory_kib(), len(open_files(os.getpid()))
            calls(10000)
            after = memory_kib(), len(open_files(os.getpid()))
        print("    memory %d -> %d KiB" % (before[0], after[0]))
        self.assertEqual(after[1], before[1])
        if not SANITIZED:
            self.assertLess(after[0] - before[0], 1024)

    def test_a_child_is_refused(self):
        skip_without_fork(self, self.g.endpoint)
        regions = self.client.open_regions()
        x, y = self.filled(regions, 2)
        want = self.oracle.forward(0, x).tobytes()

        def use_and_drop():
            nonlocal regions, x, y
            refused = False
            try:
                regions.submit(0, x, y)
            except RuntimeError:
                refused = True
            regions.close()
            del x, y, regions
            gc.collect()
            return refused

        run_in_child(self, use_and_drop)
        self.assertEqual(regions.forward(0, x, y).tobytes(), want)
        regions.close()

    def test_an_async_client_opens_regions(self):
        async def run():
            async with moed.AsyncClient(self.g.endpoint, transport="native") as client:
                regions = await client.open_regions()
                x, y = self.filled(regions, 5)
                want = self.oracle.forward(0, x).tobytes()
                self.assertEqual((await regions.submit(0, x, y)).tobytes(), want)
                request = regions.submit(0, x, y)
                request.result()
                self.assertIs(await request, y)

        asyncio.run(run())

    @unittest.skipIf(torch is None, "without torch")
    def test_torch_tensors_in_shared_memory(self):
        with self.client.open_regions() as regions:
            for dtype in (torch.float32, torch.bfloat16):
                x, y = (regions.allocate((6, self.layer.hidden), dtype) for _ in range(2))
                self.assertEqual((type(x), x.dtype), (torch.Tensor, dtype))
                x.normal_()
                want = self.oracle.forward(0, x)
                self.assertIs(regions.forward(0, x, y), y)
                self.assertTrue(torch.equal(y.view(torch.int16), want.view(torch.int16)))
                y.zero_()
                regions.forward(0, x[2:4], y[2:4])
                self.assertTrue(torch.equal(y[2:4].view(torch.int16), want[2:4].view(torch.int16)))
            array = regions.allocate((3, self.layer.hidden))
            shared = torch.from_dlpack(array)
            shared.normal_()
            self.assertEqual(regions.forward(0, shared, regions.allocate(array.shape)).tobytes(),
                             self.oracle.forward(0, array).tobytes())
            with self.assertRaises(ValueError):
                regions.forward(0, torch.zeros(3, self.layer.hidden), array)
            with self.assertRaises(TypeError):
                regions.allocate((3, 3), torch.float16)


class Ends(unittest.TestCase):
    def test_a_worker_without_shared_memory_says_so(self):
        with group(FAMILY, 1) as g, moed.Client(g.endpoint, transport="native") as client:
            with self.assertRaises(moed.MoeError) as caught:
                client.open_regions()
        self.assertEqual((caught.exception.code, caught.exception.reason),
                         (grpc.StatusCode.FAILED_PRECONDITION, "UNSUPPORTED"))

    def test_a_killed_worker_ends_what_is_in_flight(self):
        with settings_file() as settings:
            g = Group(model_directory(FAMILY), 1, "--worker-config", settings.name)
            try:
                with moed.Client(g.endpoint, transport="native") as client:
                    regions = client.open_regions()
                    hidden = client.layers[0].hidden
                    x = regions.allocate((2, hidden))
                    outputs = [regions.allocate((2, hidden)) for _ in range(8)]
                    regions.forward(0, x, outputs[0])
                    pid = g.worker_pids()[0]
                    freeze(pid)
                    requests = [regions.submit(0, x, y) for y in outputs]
                    self.assertFalse(any(each.done() for each in requests))
                    with concurrent.futures.ThreadPoolExecutor(8) as pool:
                        ends = [pool.submit(each.result) for each in requests]
                        os.kill(pid, signal.SIGKILL)
                        begin = time.monotonic()
                        codes = {each.exception(30).code for each in ends}
                    print("    ended after %.3f s" % (time.monotonic() - begin))
                    self.assertEqual(codes, {grpc.StatusCode.UNAVAILABLE})
                    with self.assertRaises(moed.MoeError):
                        regions.forward(0, x, outputs[0])
            finally:
                g.stop()


if __name__ == "__main__":
    print("MOE_SEED=%d" % SEED)
    main()
