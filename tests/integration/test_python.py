# SPDX-License-Identifier: Apache-2.0
"""The Python package against a fake worker in the same process: requests, answers, errors, retries.
test_golden.py uses real daemons."""

import asyncio
import concurrent.futures
import copy
import json
import os
import pickle
import socket
import tempfile
import unittest
from unittest import mock

import grpc
import numpy as np

from group import main

import moed
from moed._retry import _ask_coordinator
from moed._trust import Trust
from moed._proto import types_pb2
from python_fakes import (HIDDEN, LAYER, RNG, SEED, TOP_K, Failure, fakes, rows)


class Calls(unittest.TestCase):
    def test_a_failed_handshake_has_a_cause_in_all_releases_of_grpc(self):
        start = "failed to connect to all addresses; last error: UNKNOWN: ipv4:10.0.0.1:7600: "
        for text, cause in (
                ("Tls handshake failed (TSI_PROTOCOL_FAILURE): SSL_ERROR_SSL: error:1000007d:SSL "
                 "routines:OPENSSL_internal:CERTIFICATE_VERIFY_FAILED: self signed certificate in "
                 "certificate chain: OK", "does not lead to the CA"),
                ("Ssl handshake failed: SSL_ERROR_SSL: error:0A000086:SSL routines::certificate "
                 "verify failed", "does not lead to the CA"),
                ("Custom verification check failed with error: UNAUTHENTICATED: Hostname "
                 "Verification Check failed.", "not for the host of the endpoint"),
                ("Failed to connect to remote host: Connection refused",
                 "cannot connect to h:1: Connection refused")):
            self.assertIn(cause, moed._errors._reduce(start + text, "h:1"))

    def test_info_and_layers(self):
        with fakes() as fake, moed.Client(fake.endpoint) as client:
            self.assertEqual(client.info.model, "fake")
            self.assertEqual(client.info.version, "9.8.7")
            self.assertEqual(client.info.workers, (fake.endpoint,))
            self.assertEqual(client.info.weights_version, 5)
            self.assertEqual([each.layer for each in client.layers], [LAYER])
            self.assertEqual(client.layer(LAYER).hidden, HIDDEN)

    def test_on_unavailable(self):
        with fakes() as fake, moed.Client(fake.endpoint) as client:
            with self.assertRaisesRegex(ValueError, "on_unavailable is"):
                client.forward(LAYER, rows(1), on_unavailable="some")
            with self.assertRaisesRegex(ValueError, "has all tokens"):
                client.forward(LAYER, rows(1), on_unavailable="partial", retain=("s", 1))
            client.forward(LAYER, rows(1), on_unavailable="fail")
            self.assertEqual(fake.requests[-1].on_unavailable, types_pb2.ON_UNAVAILABLE_FAIL)
            with self.assertRaises(moed.MoeError) as caught:  # it does not know the field
                client.forward(LAYER, rows(1), on_unavailable="partial")
            self.assertEqual(caught.exception.reason, "UNSUPPORTED")
            self.assertEqual(fake.requests[-1].on_unavailable, types_pb2.ON_UNAVAILABLE_PARTIAL)

    def test_return_rehomed(self):
        x = rows(3)
        with fakes() as fake, moed.Client(fake.endpoint) as client, client.stream() as stream:
            calls = [client.forward, stream.forward]
            calls += [lambda *a, f=f, **k: f(*a, **k).result(10)
                      for f in (client.submit, stream.submit)]
            for call in calls:
                for fake.rehomed in ((), (1, 4, 7)):
                    got = call(LAYER, x, return_rehomed=True)
                    self.assertEqual(got.rehomed_experts, fake.rehomed)
                    self.assertEqual((got.epoch, got.topk_ids), (7, None))
                    self.assertEqual(got.stages["server_ns"], 1234)
                    np.testing.assert_array_equal(got.y, 2 * x)
                got = call(LAYER, x, return_rehomed=True, return_routing=True)
                self.assertEqual((got.rehomed_experts, got.topk_ids.shape), ((1, 4, 7), (3, 2)))
                self.assertIsInstance(call(LAYER, x), np.ndarray)
                self.assertIsNone(call(LAYER, x, return_routing=True).rehomed_experts)
                fake.rehomed = None
                with self.assertRaises(moed.MoeError) as caught:
                    call(LAYER, x, return_rehomed=True)
                self.assertEqual(caught.exception.reason, "UNSUPPORTED")

    def test_return_rehomed_in_a_loop(self):
        async def ask(fake):
            async with moed.AsyncClient(fake.endpoint) as client:
                async with client.stream() as stream:
                    return [(await call(LAYER, rows(2), return_rehomed=True)).rehomed_experts
                            for call in (client.forward, stream.forward)]
        with fakes() as fake:
            fake.rehomed = (2, 3)
            self.assertEqual(asyncio.run(ask(fake)), [(2, 3)] * 2)

    def test_a_client_is_bound_to_one_model(self):
        with fakes() as fake, moed.Client(fake.endpoint, model="added") as client:
            self.assertEqual((client.info.model, client.models), ("added", ("fake", "added")))
            client.forward(LAYER, rows(1))
            with client.stream() as stream:
                stream.forward(LAYER, rows(1))
            with moed.Client(fake.endpoint) as other:
                self.assertEqual(other.info.model, "fake")
                other.forward(LAYER, rows(1))
            self.assertEqual([each.model for each in fake.requests], ["added", "added", ""])
            with self.assertRaises(moed.MoeError) as caught:
                moed.Client(fake.endpoint, model="another")
            self.assertEqual(caught.exception.reason, "MODEL_NOT_FOUND")
            for wrong in ("", "m" * 256, 7):
                with self.assertRaises(ValueError):
                    moed.Client(fake.endpoint, model=wrong)

    def test_a_model_that_loads_is_tried_again(self):
        with fakes() as fake, moed.Client(fake.endpoint, model="added") as client:
            fake.script = [Failure(grpc.StatusCode.UNAVAILABLE, "MODEL_LOADING", retry_s=0.01)]
            client.forward(LAYER, rows(1))
            self.assertEqual(len(fake.requests), 2)

    def test_a_proxy_of_the_environment_is_not_used(self):
        with fakes() as fake, socket.create_server(("127.0.0.1", 0)) as proxy:
            proxy.setblocking(False)
            address = "http://127.0.0.1:%d" % proxy.getsockname()[1]
            with mock.patch.dict(os.environ, {name: address for name in (
                    "http_proxy", "https_proxy", "grpc_proxy")}):
                os.environ.pop("no_proxy", None)
                os.environ.pop("no_grpc_proxy", None)
                with moed.Client(fake.endpoint, timeout=5) as client:
                    np.testing.assert_array_equal(client.forward(LAYER, np.ones(
                        (1, HIDDEN), np.float32)), np.full((1, HIDDEN), 2, np.float32))
                self.assertIn("does not answer", _ask_coordinator(fake.endpoint, Trust(), 1.0))
            with self.assertRaises(BlockingIOError):  # no connection was made
                proxy.accept()

    def test_f32_in_f32_out(self):
        with fakes() as fake, moed.Client(fake.endpoint) as client, client.stream() as stream:
            for tokens in (1, 5, 37):
                x = rows(tokens)
                for call in (client.forward, stream.forward):
                    y = call(LAYER, x)
                    self.assertEqual((y.dtype, y.shape), (np.float32, x.shape))
                    np.testing.assert_array_equal(y, 2 * x)

    def test_bf16_in_bf16_out(self):
        with fakes() as fake, moed.Client(fake.endpoint) as client, client.stream() as stream:
            x = moed.bf16(rows(9))
            for call in (client.forward, stream.forward):
                y = call(LAYER, x)
                self.assertEqual(y.dtype, x.dtype)
                np.testing.assert_array_equal(moed.f32(np.asarray(y).view(np.uint16)),
                                              2 * moed.f32(np.asarray(x).view(np.uint16)))

    def test_bits_of_bf16_are_sent_unchanged(self):
        with fakes() as fake, moed.Client(fake.endpoint) as client:
            bits = np.asarray(moed.bf16(rows(2))).view(np.uint16)
            y = client.forward(LAYER, bits)
            self.assertEqual(y.dtype, np.uint16)
            self.assertEqual(fake.requests[-1].dtype, types_pb2.DATA_TYPE_BF16)
            self.assertEqual(fake.requests[-1].x_data, bits.tobytes())

    def test_rows_need_not_be_contiguous(self):
        with fakes() as fake, moed.Client(fake.endpoint) as client:
            x = rows(20)[::2]
            np.testing.assert_array_equal(client.forward(LAYER, x), 2 * x)

    def test_routing_is_returned_and_can_be_replayed(self):
        with fakes() as fake, moed.Client(fake.endpoint) as client, client.stream() as stream:
            x = rows(4)
            for call in (client.forward, stream.forward):
                seen = call(LAYER, x, return_routing=True)
                self.assertIsInstance(seen, moed.ForwardResult)
                self.assertEqual((seen.topk_ids.dtype, seen.topk_ids.shape), (np.int32, (4, TOP_K)))
                self.assertEqual(seen.topk_weights.shape, (4, TOP_K))
                self.assertEqual((seen.epoch, seen.weights_version), (7, 5))
                self.assertEqual(seen.stages["server_ns"], 1234)
                self.assertEqual(fake.requests[-1].routing_mode, types_pb2.ROUTING_MODE_SERVER)

                ids = np.array([[0, 1], [2, -1], [7, 6], [5, 5]])
                weights = RNG.random((4, TOP_K))
                again = call(LAYER, x, ids, weights, return_routing=True)
                self.assertEqual(fake.requests[-1].routing_mode,
                                 types_pb2.ROUTING_MODE_CLIENT_IDS_AND_WEIGHTS)
                np.testing.assert_array_equal(again.topk_ids, ids)
                np.testing.assert_array_equal(again.topk_weights, weights.astype(np.float32))
                call(LAYER, x, topk_ids=ids)
                self.assertEqual(fake.requests[-1].routing_mode,
                                 types_pb2.ROUTING_MODE_CLIENT_IDS)

    def test_answers_on_a_stream_may_come_in_any_order(self):
        with fakes() as fake, moed.Client(fake.endpoint) as client, client.stream() as stream:
            fake.hold = True
            inputs = [rows(3) for _ in range(8)]
            with concurrent.futures.ThreadPoolExecutor(8) as pool:
                outputs = list(pool.map(lambda x: stream.forward(LAYER, x, timeout=20), inputs))
            for x, y in zip(inputs, outputs):
                np.testing.assert_array_equal(y, 2 * x)

    def test_requests_go_to_the_workers_in_turn(self):
        with fakes(3) as group, moed.Client(group[0].endpoint, spread=True) as client:
            for _ in range(9):
                client.forward(LAYER, rows(1))
            self.assertEqual([len(fake.requests) for fake in group], [3, 3, 3])


class Errors(unittest.TestCase):
    def expect(self, code, reason, call, *arguments, **options):
        with self.assertRaises(moed.MoeError) as caught:
            call(*arguments, **options)
        print("   ", caught.exception)
        self.assertEqual((caught.exception.code, caught.exception.reason), (code, reason))
        return caught.exception

    def test_an_endpoint_without_a_server(self):
        error = self.expect(grpc.StatusCode.UNAVAILABLE, "", moed.Client, "127.0.0.1:1", timeout=5)
        self.assertEqual(error.message, "127.0.0.1:1: cannot connect: Connection refused")

    def test_reason_and_retry_hint_are_read(self):
        with fakes() as fake, moed.Client(fake.endpoint) as client, client.stream() as stream:
            for call in (client.forward, stream.forward):
                fake.script = [
                    Failure(grpc.StatusCode.RESOURCE_EXHAUSTED, "QUEUE_FULL", "full", 1.5)
                ]
                error = self.expect(grpc.StatusCode.RESOURCE_EXHAUSTED, "QUEUE_FULL", call, LAYER,
                                    rows(1))
                self.assertEqual((error.message, error.retry_after), ("full", 1.5))
                np.testing.assert_array_equal(call(LAYER, np.ones((1, HIDDEN), np.float32)), 2.0)

    def test_unavailable_is_retried(self):
        unavailable = Failure(grpc.StatusCode.UNAVAILABLE, "REFORMING")
        with fakes() as fake, moed.Client(fake.endpoint) as client:
            fake.script = [unavailable, unavailable]
            x = rows(2)
            np.testing.assert_array_equal(client.forward(LAYER, x), 2 * x)
            self.assertEqual(len(fake.requests), 3)

    def test_a_call_that_the_server_drops_is_retried(self):
        dropped = Failure(grpc.StatusCode.CANCELLED, "")
        with fakes() as fake, moed.Client(fake.endpoint) as client:
            fake.script = [dropped]
            x = rows(2)
            np.testing.assert_array_equal(client.forward(LAYER, x), 2 * x)
            self.assertEqual(len(fake.requests), 2)
            fake.script = [Failure(grpc.StatusCode.CANCELLED, "ABORTED")]  # the server sent it
            self.expect(grpc.StatusCode.CANCELLED, "ABORTED", client.forward, LAYER, x)

    def test_attempts_are_bounded(self):
        with fakes() as fake, moed.Client(fake.endpoint) as client:
            fake.script = [Failure(grpc.StatusCode.UNAVAILABLE, "DRAINING")] * 20
            self.expect(grpc.StatusCode.UNAVAILABLE, "DRAINING", client.forward, LAYER, rows(1))
            self.assertEqual(len(fake.requests), 4)

    def test_a_retry_goes_to_another_worker(self):
        with fakes(2) as group, moed.Client(group[0].endpoint, spread=True) as client:
            group[0].script = [Failure(grpc.StatusCode.UNAVAILABLE, "DRAINING")] * 20
            for _ in range(4):
                client.forward(LAYER, rows(1))
            self.assertEqual([len(fake.requests) for fake in group], [2, 4])

    def test_another_worker_is_asked_at_once(self):
        later = Failure(grpc.StatusCode.UNAVAILABLE, "REFORMING", "later", 60000)
        with fakes(2) as group, moed.Client(group[0].endpoint, hedge=True, timeout=30) as client:
            client.forward(LAYER, rows(1))
            self.assertEqual([len(fake.requests) for fake in group], [1, 0])  # it does not spread
            group[0].script = [later] * 2
            client.forward(LAYER, rows(1))
            self.assertEqual([len(fake.requests) for fake in group], [2, 1])
            group[1].script = [later]
            self.expect(grpc.StatusCode.UNAVAILABLE, "REFORMING", client.forward, LAYER, rows(1))
            self.assertEqual([len(fake.requests) for fake in group], [3, 2])

    def test_a_worker_that_says_nothing_counts_as_one_that_refuses(self):
        with fakes(2) as group, moed.Client(group[0].endpoint, hedge=True, timeout=30,
                                            attempt_time=2) as client:
            group[0].silent = True
            client.forward(LAYER, rows(1))
            self.assertEqual(len(group[1].requests), 1)
            group[0].held.set()
        with fakes() as fake, self.assertRaises(ValueError):
            moed.Client(fake.endpoint, attempt_time=1)

    def test_retries_end_with_their_budget(self):
        refused = Failure(grpc.StatusCode.UNAVAILABLE, "DRAINING")
        with fakes() as fake, moed.Client(fake.endpoint, retry_time=20) as client:
            fake.script = [refused] * 7
            client.forward(LAYER, rows(1))
            self.assertEqual(len(fake.requests), 8)
        with fakes() as fake, moed.Client(fake.endpoint, retry_time=0.3) as client:
            fake.script = [refused] * 1000
            self.expect(grpc.StatusCode.UNAVAILABLE, "DRAINING", client.forward, LAYER, rows(1))
            self.assertLess(len(fake.requests), 100)

    def test_other_failures_are_not_retried(self):
        with fakes() as fake, moed.Client(fake.endpoint) as client:
            for code in (grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.RESOURCE_EXHAUSTED,
                         grpc.StatusCode.INTERNAL, grpc.StatusCode.FAILED_PRECONDITION):
                fake.requests.clear()
                fake.script = [Failure(code, "STALE_EPOCH")]
                self.expect(code, "STALE_EPOCH", client.forward, LAYER, rows(1))
                self.assertEqual(len(fake.requests), 1)

    def test_wrong_arguments_are_not_sent(self):
        with fakes() as fake, moed.Client(fake.endpoint) as client:
            self.expect(grpc.StatusCode.NOT_FOUND, "LAYER_NOT_FOUND", client.forward, 4, rows(1))
            good = rows(2)
            for error, arguments in (
                    (TypeError, (good.astype(np.float64),)),
                    (ValueError, (good[:, 1:],)),
                    (ValueError, (good[:0],)),
                    (ValueError, (good[0],)),
                    (ValueError, (good, np.zeros((2, TOP_K + 1), int))),
                    (TypeError, (good, np.zeros((2, TOP_K)))),
                    (ValueError, (good, np.full((2, TOP_K), 2**31))),
                    (ValueError, (good, None, np.zeros((2, TOP_K)))),
                    (ValueError, (good, np.zeros((2, TOP_K), int), np.zeros((1, TOP_K))))):
                with self.assertRaises(error):
                    client.forward(LAYER, *arguments)
            self.assertEqual(fake.requests, [])

    def test_a_limit_is_a_finite_number(self):
        with fakes() as fake, moed.Client(fake.endpoint) as client, client.stream() as stream:
            for bad in (float("inf"), float("nan"), "1"):
                for call in (client.forward, stream.forward):
                    with self.assertRaises(TypeError if bad == "1" else ValueError):
                        call(LAYER, rows(1), timeout=bad)
            with self.assertRaisesRegex(ValueError, "finite number of seconds, not inf"):
                moed.Client(fake.endpoint, timeout=float("inf"))
            with self.assertRaisesRegex(TypeError, "retry_time is a number of seconds, not '1'"):
                moed.Client(fake.endpoint, retry_time="1")
            self.assertEqual(fake.requests, [])

    def test_a_limit_of_centuries_is_a_long_one(self):
        for long in (1e10, 1e300, 10**40):  # more than grpcio and the threads' waits can count
            with fakes() as fake, moed.Client(fake.endpoint, timeout=long) as client:
                with client.stream() as stream:
                    for call in (client.forward, stream.forward):
                        self.assertEqual(call(LAYER, rows(1)).shape, rows(1).shape)
                        self.assertEqual(call(LAYER, rows(1), timeout=long).shape, rows(1).shape)

    def test_an_error_reaches_another_process_whole(self):
        error = moed.MoeError(grpc.StatusCode.UNAVAILABLE, "DRAINING", "it leaves", 0.5, "a:1")
        for other in (pickle.loads(pickle.dumps(error)), copy.copy(error)):
            self.assertEqual(
                (str(other), other.code, other.reason, other.message, other.retry_after,
                 other.worker),
                (str(error), error.code, error.reason, error.message, 0.5, "a:1"))

    def test_a_layer_is_an_int_or_a_layer(self):
        with fakes() as fake, moed.Client(fake.endpoint) as client:
            x = rows(1)
            for layer in (LAYER, np.int64(LAYER), client.layers[0]):
                np.testing.assert_array_equal(client.forward(layer, x), 2 * x)
            for layer in (str(LAYER), float(LAYER), None):
                with self.assertRaisesRegex(TypeError, "Layer or an int"):
                    client.forward(layer, x)

    def test_too_many_tokens_are_not_sent(self):
        with fakes() as fake, moed.Client(fake.endpoint) as client, client.stream() as stream:
            for call in (client.forward, stream.forward):
                error = self.expect(grpc.StatusCode.INVALID_ARGUMENT, "TOKEN_LIMIT", call, LAYER,
                                    rows(101))
                self.assertIn("at most 100", error.message)
            self.assertEqual(fake.requests, [])

    def test_answers_may_be_written_to(self):
        with fakes() as fake, moed.Client(fake.endpoint) as client:
            y = client.forward(LAYER, rows(2))
            y += 1
            result = client.forward(LAYER, rows(2), return_routing=True)
            result.topk_ids[:] = 0
            result.topk_weights[:] = 0

    def test_epoch_and_version_are_sent(self):
        with fakes() as fake, moed.Client(fake.endpoint) as client, client.stream() as stream:
            for call in (client.forward, stream.forward):
                call(LAYER, rows(1), epoch=7, weights_version=5)
                self.assertEqual((fake.requests[-1].epoch, fake.requests[-1].weights_version),
                                 (7, 5))

    def test_calls_on_a_closed_object_say_so(self):
        with fakes() as fake:
            client = moed.Client(fake.endpoint)
            first, second = client.stream(), client.stream()
            first.close()
            error = self.expect(grpc.StatusCode.CANCELLED, "", first.forward, LAYER, rows(1))
            self.assertEqual(error.message, "the stream has been closed")
            client.close()
            for call in (client.forward, second.forward):
                error = self.expect(grpc.StatusCode.CANCELLED, "", call, LAYER, rows(1))
                self.assertEqual(error.message, "the client has been closed")
            second.close()

    def test_malformed_endpoints_are_refused(self):
        for endpoint in ("foo", "a:0", "127.0.0.1:99999", "unix:/tmp/a", ""):
            with self.assertRaisesRegex(ValueError, "is not HOST:PORT"):
                moed.Client(endpoint)

    def test_a_coordinators_endpoint_is_refused_with_a_remedy(self):
        server = grpc.server(concurrent.futures.ThreadPoolExecutor(1))
        port = server.add_insecure_port("127.0.0.1:0")
        server.start()
        try:
            error = self.expect(grpc.StatusCode.UNIMPLEMENTED, "", moed.Client,
                                "127.0.0.1:%d" % port)
            self.assertIn("use a worker's endpoint", error.message)
        finally:
            server.stop(None).wait()

    def test_a_deadline_ends_one_request_of_a_stream_only(self):
        with fakes() as fake, moed.Client(fake.endpoint) as client, client.stream() as stream:
            fake.hold = True  # the first answer waits for three more requests
            self.expect(grpc.StatusCode.DEADLINE_EXCEEDED, "", stream.forward, LAYER, rows(1),
                        timeout=0.1)
            fake.hold = False
            x = rows(1)
            np.testing.assert_array_equal(stream.forward(LAYER, x), 2 * x)

    def test_the_end_of_the_server_ends_a_stream(self):
        with fakes() as fake, moed.Client(fake.endpoint) as client, client.stream() as stream:
            stream.forward(LAYER, rows(1))
            fake.server.stop(None).wait()
            for _ in range(2):
                with self.assertRaises(moed.MoeError) as caught:
                    stream.forward(LAYER, rows(1), timeout=10)
                print("   ", caught.exception)
                self.assertIn(caught.exception.code,
                              (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED))


class Formats(unittest.TestCase):
    def test_bf16_rounds_to_nearest_even(self):
        wide = np.array([1.0, 1.00390625, 1.01171875, -1.00390625, np.inf, -np.inf, 3.4e38, 0.0],
                        np.float32)
        want = np.array([0x3F80, 0x3F80, 0x3F82, 0xBF80, 0x7F80, 0xFF80, 0x7F80, 0], np.uint16)
        np.testing.assert_array_equal(np.asarray(moed.bf16(wide)).view(np.uint16), want)
        self.assertTrue(np.isnan(moed.f32(np.asarray(moed.bf16(
            np.array([np.nan], np.float32))).view(np.uint16)))[0])


class TensorFiles(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory(prefix="moed-test-")
        self.addCleanup(folder.cleanup)
        self.path = os.path.join(folder.name, "t.safetensors")

    def test_a_written_file_reads_back(self):
        wide = np.random.default_rng(SEED).standard_normal((3, 5)).astype(np.float32)
        tensors = {"flags": wide > 0, "wide": wide, "half": wide.astype(np.float16),
                   "bits": moed.bf16(wide), "part": wide[:, 1:3], "ids": np.arange(7),
                   "scalar": np.array(2.5), "nothing": np.zeros((0, 4), np.int32)}
        moed.write_safetensors(self.path, tensors)
        back = moed.read_safetensors(self.path)
        self.assertEqual(sorted(back), sorted(tensors))
        for name, array in tensors.items():
            self.assertEqual(back[name].dtype, array.dtype, name)
            self.assertEqual(back[name].shape, array.shape, name)
            np.testing.assert_array_equal(back[name], array)

    def test_a_dtype_without_a_name_is_refused(self):
        with self.assertRaises(TypeError):
            moed.write_safetensors(self.path, {"x": np.zeros(3, np.complex64)})

    def test_damaged_files_are_refused(self):
        def entry(dtype="F32", shape=(2,), offsets=(0, 8)):
            return {"x": {"dtype": dtype, "shape": shape, "data_offsets": offsets}}

        def packed(header, data=b"12345678"):
            text = header if isinstance(header, bytes) else json.dumps(header).encode()
            return len(text).to_bytes(8, "little") + text + data

        bad = [b"", b"1234567", b"\xff" * 16, packed(b"{"), packed(b"[]"), packed({"x": 1}),
               packed(entry(dtype="F8_E4M3")), packed(entry(shape=(3,))),
               packed(entry(shape=(-2,))), packed(entry(shape=("2",))),
               packed(entry(offsets=(4, 12))), packed(entry(offsets=(-8, 0))),
               packed(entry(offsets=(0,))), packed(entry(offsets=(0.0, 8))),
               packed(entry(dtype=[])), packed(entry(), b"1234")]
        for content in bad:
            with open(self.path, "wb") as file:
                file.write(content)
            with self.assertRaises(ValueError) as caught:
                moed.read_safetensors(self.path)
            print("   ", caught.exception)
        with open(self.path, "wb") as file:
            file.write(packed({"__metadata__": {"format": "pt"}, **entry()}))
        self.assertEqual(list(moed.read_safetensors(self.path)), ["x"])


if __name__ == "__main__":
    print("MOE_SEED=%d" % SEED)
    main()
