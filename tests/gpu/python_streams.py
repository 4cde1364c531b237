# SPDX-License-Identifier: Apache-2.0
"""moed.DeviceRegions: torch tensors on a GPU as x and y of a real worker on GPU 0, from a client on
the same GPU and, where there are two, on GPU 1. Needs torch. Usage: as the programs of
tests/integration; part of streams.sh."""

import concurrent.futures
import gc
import os
import sys
import tempfile
import threading
import unittest

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, os.path.join(os.path.dirname(HERE), "integration"))
from group import DEVICES, Group, main, model_directory  # noqa: E402

try:
    import torch
except ImportError:
    print("skipped: there is no torch")
    sys.exit(77)
import moed

FAMILY = "mixtral"
LAUNCHES = 500


class Device(unittest.TestCase):
    device = 0

    @classmethod
    def setUpClass(cls):
        if cls.device >= DEVICES:
            raise unittest.SkipTest("there is no GPU %d" % cls.device)
        with tempfile.NamedTemporaryFile("w", suffix=".ini") as settings:
            settings.write("allow-client-memory = 1G\nspin-us = 5000\n")
            settings.flush()
            cls.g = Group(model_directory(FAMILY), 1, "--worker-config", settings.name)
        cls.client = moed.Client(cls.g.endpoint, transport="native")
        cls.layer = cls.client.layers[0]

    @classmethod
    def tearDownClass(cls):
        cls.client.close()
        cls.g.stop()

    def setUp(self):
        self.regions = self.client.open_regions()
        self.gpu = self.regions.on_device(self.device)
        torch.cuda.set_device(self.device)

    def tearDown(self):
        self.regions.close()
        del self.gpu
        gc.collect()

    def pair(self, tokens, dtype):
        return [self.gpu.allocate((tokens, self.layer.hidden), dtype) for _ in range(2)]

    def assert_same(self, got, x):
        """All bits of Forward."""
        want = self.client.forward(0, x.cpu())
        self.assertTrue(torch.equal(got.cpu().view(torch.int16), want.view(torch.int16)))

    def test_a_stream_submits_and_waits(self):
        for dtype in (torch.float32, torch.bfloat16):
            x, y = self.pair(7, dtype)
            self.assertEqual((x.dtype, x.device.index, x.count_nonzero().item()),
                             (dtype, self.device, 0))
            request = self.gpu.request(self.layer, x, y)
            for stream in (None, torch.cuda.Stream(), None):
                with torch.cuda.stream(stream):
                    x.normal_()
                    request.submit()
                    twice = request.wait() * 2
                torch.cuda.synchronize()
                answer = request.result()
                self.assertGreater(answer.stages["step_ns"], 0)
                self.assertEqual(request.code.item(), 0)
                self.assert_same(y, x)
                self.assertTrue(torch.equal(twice, y * 2))

    def test_a_graph_is_launched_again_and_again(self):
        x, y = self.pair(16, torch.bfloat16)
        source = torch.randn(LAUNCHES, *x.shape, device=x.device).to(x.dtype)
        turn = torch.zeros((), dtype=torch.int64, device=x.device)
        outputs = torch.zeros_like(source)
        request = self.gpu.request(self.layer, x, y)
        torch.cuda.synchronize()

        def step():
            x.copy_(source.index_select(0, turn.view(1))[0])
            request.submit()
            outputs.index_copy_(0, turn.view(1), request.wait().unsqueeze(0))
            turn.add_(1)

        step()  # loads torch's kernels
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            step()
        turn.zero_()
        for _ in range(LAUNCHES):
            graph.replay()
        torch.cuda.synchronize()
        request.result()
        self.assertEqual(turn.item(), LAUNCHES)
        for n in range(0, LAUNCHES, 50):
            self.assert_same(outputs[n], source[n])

    def test_a_thread_of_the_host_submits_too(self):
        x, y = self.pair(5, torch.float32)
        x.normal_()
        torch.cuda.synchronize()
        self.assertIs(self.regions.forward(0, x, y), y)
        self.assert_same(y, x)
        host = self.regions.allocate(x.shape, torch.float32)
        host.copy_(x)
        self.regions.forward(0, host, y[:])
        self.assert_same(y, x)

    def test_a_failed_pass_is_nan_and_tells_why(self):
        x, y = self.pair(3, torch.float32)
        ids = self.gpu.allocate((3, self.layer.top_k), torch.int32)
        ids.fill_(10 ** 6)
        request = self.gpu.request(self.layer, x, y, ids)
        request.submit()
        request.wait()
        torch.cuda.synchronize()
        self.assertTrue(torch.isnan(y).all().item())
        self.assertNotEqual(request.code.item(), 0)
        with self.assertRaises(moed.MoeError) as caught:
            request.result()
        self.assertEqual(caught.exception.reason, "EXPERT_INDEX_RANGE")
        ids.copy_(torch.arange(self.layer.top_k))
        request.submit()
        request.wait()
        torch.cuda.synchronize()
        request.result()
        self.assertFalse(torch.isnan(y).any().item())

    def test_wrong_tensors_are_refused(self):
        x, y = self.pair(4, torch.bfloat16)
        other = torch.zeros_like(x)
        for bad in (other, x[:, ::2], x[:2], x.view(torch.int16)):
            with self.assertRaises(ValueError):
                self.gpu.request(self.layer, bad, y)
        with self.assertRaises(TypeError):
            self.gpu.allocate((4, 4), torch.float16)
        with self.assertRaises(moed.MoeError):
            self.regions.on_device(99)

    def test_regions_have_one_gpu(self):
        x, y = self.pair(2, torch.float32)
        again = self.regions.on_device(self.device)
        self.assertIs(again, self.gpu)
        other = again.allocate((2, self.layer.hidden), torch.float32)  # while x and y live
        self.assertEqual(len({each.data_ptr() for each in (x, y, other)}), 3)
        for refused in ((self.device + 1, False), (self.device, True)):
            with self.assertRaises(moed.MoeError) as caught:
                self.regions.on_device(*refused)
            self.assertEqual(caught.exception.reason, "UNSUPPORTED")

    def test_threads_make_their_first_requests_at_once(self):
        count = 4
        for _ in range(5):
            with self.client.open_regions() as regions:
                gpu = regions.on_device(self.device)
                pairs = [[gpu.allocate((3, self.layer.hidden), torch.float32) for _ in range(2)]
                         for _ in range(count)]
                start = threading.Barrier(count)

                def run(pair):
                    start.wait()
                    with torch.cuda.stream(torch.cuda.Stream(self.device)):
                        request = gpu.request(self.layer, *pair)
                        pair[0].fill_(1)
                        request.submit()
                        request.wait()
                        torch.cuda.current_stream(self.device).synchronize()
                    request.result()

                with concurrent.futures.ThreadPoolExecutor(count) as threads:
                    list(threads.map(run, pairs))
                for x, y in pairs:
                    self.assert_same(y, x)

    def test_y_is_on_the_gpu(self):
        x, _ = self.pair(2, torch.float32)
        y = self.regions.allocate(x.shape, torch.float32)
        with self.assertRaises(moed.MoeError) as caught:
            self.gpu.request(self.layer, x, y)
        self.assertEqual(caught.exception.reason, "REGION_INVALID")

    def test_tensors_outlive_their_regions(self):
        x, y = self.pair(2, torch.float32)
        request = self.gpu.request(self.layer, x, y)
        self.regions.close()
        x.fill_(3)
        self.assertEqual(x.sum().item(), 3 * x.numel())
        with self.assertRaises(moed.MoeError):
            request.submit()

    def test_memory_is_given_back(self):
        for _ in range(100):  # a client has 32 places
            x, y = self.pair(2, torch.float32)
            request = self.gpu.request(self.layer, x, y)
            request.submit()
            request.wait()
            torch.cuda.synchronize()
            del x, y, request
            gc.collect()


class Peer(Device):
    device = 1


if __name__ == "__main__":
    main()
