# SPDX-License-Identifier: Apache-2.0
"""Training from Python: calls against a fake group (requests, retries, answers recorded elsewhere)
and against real daemons (gradients, steps, refusals of checkpoints); moed.torch if torch is
installed."""

import concurrent.futures
import copy
import dataclasses
import glob
import io
import json
import os
import pickle
import random
import re
import subprocess
import sys
import tempfile
import threading
import types
import unittest
import unittest.mock
import unittest.mock as mock
import uuid

import grpc
import numpy as np

from group import (BUILD, MOECTL, group, main, model_directory, moectl, relative_error,
                   wait_until)
from training import golden_gradients, training_group

from fake_group import (HIDDEN, IDS, LAYER, STEP_TOKENS, TOP_K, FakeChannel, FakeClock, fakes,
                        refused, rows, unavailable)

import moed
from moed import _retry
from moed._proto import admin_pb2, types_pb2

try:
    import torch
    import moed.torch
except ImportError:
    torch = None
needs_torch = unittest.skipUnless(torch, "torch is not installed")

FAMILY = "qwen3_moe"


class Calls(unittest.TestCase):
    """Client against the fake group."""

    def expect(self, reason, call, *arguments, **options):
        with self.assertRaises(moed.MoeError) as caught:
            call(*arguments, **options)
        self.assertEqual(caught.exception.reason, reason, caught.exception)
        return caught.exception

    def test_backward_returns_gradients(self):
        with fakes() as (worker,), moed.Client(worker.endpoint) as client:
            dy = rows(4)
            answer = client.backward(LAYER, dy, rows(4), IDS, session="s", micro_batch_id=1,
                                     return_weight_gradients=True, aux_coeff=0.25, lineage=4,
                                     weights_version=1)
            np.testing.assert_array_equal(answer.dx, 3 * dy)
            self.assertEqual(answer.weight_gradients.shape, (4, TOP_K))
            self.assertEqual((answer.aux_loss, answer.lineage, answer.repeated), (0.5, 4, False))
            sent = worker.requests[-1][1]
            self.assertEqual((sent.aux_coeff, sent.lineage, sent.weights_version), (0.25, 4, 1))
            self.assertEqual((len(sent.x), len(sent.topk_ids)), (4 * HIDDEN * 4, 4 * TOP_K * 4))
            self.assertEqual(sent.routing_mode, types_pb2.ROUTING_MODE_CLIENT_IDS)

    def test_a_call_without_an_answer_runs_once(self):
        with fakes() as (worker,), moed.Client(worker.endpoint) as client:
            worker.script = [unavailable(), (unavailable(),)]
            answer = client.backward(LAYER, rows(4), rows(4), IDS, session="s", micro_batch_id=1)
            self.assertTrue(answer.repeated)
            self.assertEqual((len(worker.requests), worker.ledger.backwards), (3, 1))
            worker.script = [(unavailable(),), unavailable()]
            self.assertTrue(client.optimizer_step(0.1, step_id=1, expected_backwards=1).repeated)
            self.assertEqual(worker.ledger.steps, 1)

    def test_retries_end_with_the_time_limit(self):
        with fakes() as (worker,), moed.Client(worker.endpoint) as client:
            worker.script = [unavailable()] * 100
            self.expect("REFORMING", client.zero_grad, step_id=1, timeout=2)
            self.assertGreater(len(worker.requests), 4)
            self.assertLess(len(worker.requests), 50)

    def test_a_retained_pass_waits_for_the_group_and_a_plain_one_does_not(self):
        with fakes() as (worker,), moed.Client(worker.endpoint) as client:
            worker.script = [unavailable()] * 6
            self.assertTrue(
                client.forward(LAYER, rows(4), return_routing=True, retain=("s", 1)).retained)
            worker.script = [unavailable()] * 6
            self.expect("REFORMING", client.forward, LAYER, rows(4))
            self.assertEqual(len(worker.requests), 7 + 4)

    def test_an_old_keyword_is_answered_by_its_new_name(self):
        with fakes() as (worker,), moed.Client(worker.endpoint) as client:
            asked = len(worker.requests)
            module = (moed.torch.RemoteMoE,) if torch else ()
            for call, arguments, text in (
                    (client.forward, dict(layer=LAYER, x=rows(4), save=("s", 1)),
                     "Client.forward: the keyword save is now retain"),
                    (client.backward, dict(layer=LAYER, dy=rows(4), session="s", micro_batch_id=1,
                                           saved=True), "the keyword saved is now retained"),
                    *((remote, dict(layer=LAYER, client=client, save_for_backward=True),
                       "the keyword save_for_backward is now retain") for remote in module)):
                with self.assertRaises(TypeError) as caught:
                    call(**arguments)
                self.assertIn(text, str(caught.exception))
            self.assertEqual(len(worker.requests), asked)

    def test_answers_are_frozen_records(self):
        with fakes() as (worker,), moed.Client(worker.endpoint) as client:
            answer = client.forward(LAYER, rows(4), return_routing=True, retain=("s", 1))
            state = client.train_state()
            for record, old, new in ((answer, "saved", "retained"),
                                     (answer, "saved_activations", "retained_activations"),
                                     (state, "saved_device_bytes", "retained_device_bytes")):
                self.assertTrue(dataclasses.is_dataclass(record) and hasattr(record, new))
                with self.assertRaisesRegex(AttributeError, "it is now %r" % new):
                    getattr(record, old)
                with self.assertRaises(dataclasses.FrozenInstanceError):
                    setattr(record, new, 1)
            self.assertEqual(copy.deepcopy(state), state)
            self.assertEqual(pickle.loads(pickle.dumps(client.layers)), client.layers)
            self.assertFalse(hasattr(answer, "nothing"))

    def test_a_long_wait_is_explained_in_the_log(self):
        """With the coordinator's status, here from a fake coordinator."""
        status = admin_pb2.GetStatusResponse(
            state=admin_pb2.GROUP_STATE_DEGRADED, reason="worker w1 is lost; slot 1 is empty")

        class Coordinator(grpc.GenericRpcHandler):
            def service(self, details):
                if details.method == "/moe.v1.AdminService/GetStatus":
                    return grpc.unary_unary_rpc_method_handler(
                        lambda _request, _context: status.SerializeToString())
                return None

        coordinator = grpc.server(concurrent.futures.ThreadPoolExecutor(1))
        coordinator.add_generic_rpc_handlers((Coordinator(),))
        port = coordinator.add_insecure_port("127.0.0.1:0")
        coordinator.start()
        with fakes() as (worker,):
            worker.coordinator = "127.0.0.1:%d" % port
            with moed.Client(worker.endpoint) as client:
                worker.script = [unavailable()] * 100
                # The status call has the whole time of the call, so that a slow machine changes
                # nothing.
                with self.assertLogs("moed", "WARNING") as log, unittest.mock.patch.multiple(
                        "moed._retry", _SILENCE=2, _PROBE=30):
                    error = self.expect("REFORMING", client.zero_grad, step_id=1, timeout=5)
                print("   ", log.output[0], "\n   ", error)
                self.assertEqual(len(log.output), 1)
                for text in (log.output[0], error.message):
                    self.assertIn("the group is DEGRADED: worker w1 is lost; slot 1 is empty", text)
                    self.assertIn("moectl status --endpoint " + worker.endpoint, text)
                    self.assertIn("ZeroGrad", text)
                worker.server.stop(None).wait()
                coordinator.stop(None).wait()
                error = self.expect("", client.zero_grad, step_id=1, timeout=0.5)
                self.assertIn("cannot connect to %s: " % worker.endpoint, error.message)

    def test_status_calls_of_a_retry_stay_within_the_time_limit(self):
        """Against a coordinator that answers at most once and then is silent, with a fake clock."""
        seed = random.randrange(2**32)
        print("    seed", seed)
        random.seed(seed)
        for _ in range(200):
            limit, words = random.uniform(0.1, 40), random.randrange(2)
            began = random.uniform(0, 1000)
            clock = FakeClock(began)
            answers = [admin_pb2.GetStatusResponse(state=admin_pb2.GROUP_STATE_LOADING)] * words
            said = []
            with mock.patch.object(_retry, "time", clock), mock.patch.object(
                    _retry, "open_channel", lambda *_: FakeChannel(clock, answers)), (
                        mock.patch.object(_retry._log, "warning", lambda *word: said.append(word))):
                retry = _retry.RetryPolicy(
                    types.SimpleNamespace(_timeout=60.0, _trust=None,
                                          info=types.SimpleNamespace(coordinator="c:1")),
                    "ZeroGrad", limit)
                with self.assertRaises(moed.MoeError) as caught:
                    while True:
                        left = retry.left()
                        clock.sleep(min(left, random.choice((0, 0.01, 0.2))))
                        code = "UNAVAILABLE" if random.randrange(
                            30) and clock.now < began + limit else ("DEADLINE_EXCEEDED")
                        if code == "DEADLINE_EXCEEDED":  # the worker is silent too
                            clock.now = began + limit
                        retry.wait_or_raise(
                            moed.MoeError(grpc.StatusCode[code],
                                          "REFORMING" * (code == "UNAVAILABLE"), "no", None, ""),
                            "w:1")
            self.assertLessEqual(clock.now, began + limit + 1e-6, (limit, said, caught.exception))
            if said and words and limit > 8:  # in the first warning, and again at the end
                self.assertIn("the group is LOADING", said[0][-1])
                self.assertRegex(caught.exception.message, "the group is LOADING|does not answer")

    def test_a_save_has_only_the_callers_limit(self):
        with fakes() as (worker,), moed.Client(worker.endpoint, timeout=0.3) as client:
            gate = threading.Event()
            save = worker.SaveCheckpoint

            def slow(request):
                gate.wait(20)
                return save(request)

            worker.SaveCheckpoint = slow
            with concurrent.futures.ThreadPoolExecutor(1) as thread:
                answer = thread.submit(client.save_checkpoint, "a", step_id=1)
                wait_until(lambda: worker.requests)
                self.assertGreater(worker.seconds_left, 1e6)
                gate.set()
                self.assertEqual(answer.result().bytes, 1000)
            gate.clear()
            error = self.expect("", client.save_checkpoint, "b", step_id=2, timeout=0.5)
            gate.set()
            self.assertIn("timeout=0.5 s", error.message)
            worker.script = [unavailable()] * 1000
            # No worker answers: the client's timeout applies.
            self.expect("REFORMING", client.save_checkpoint, "c", step_id=3)

    def test_too_large_requests_are_refused_by_the_client(self):
        with fakes() as (worker,):
            worker.message_bytes = 600
            with moed.Client(worker.endpoint) as client:
                for call in (lambda: client.forward(LAYER, rows(30)),
                             lambda: client.backward(LAYER,
                                                     rows(5),
                                                     rows(5),
                                                     np.zeros((5, TOP_K), int),
                                                     session="s",
                                                     micro_batch_id=1)):
                    self.assertIn("--max-message-bytes", self.expect("TOO_LARGE", call).message)
                self.assertEqual(worker.requests, [])

    def test_other_failures_are_not_retried(self):
        with fakes() as (worker,), moed.Client(worker.endpoint) as client:
            for reason in ("STATE_LOST", "VERSION_MISMATCH", "GRADIENTS_PENDING"):
                worker.requests.clear()
                worker.script = [refused(reason)]
                self.expect(reason, client.save_checkpoint, "a", step_id=1)
                self.assertEqual(len(worker.requests), 1)

    def test_a_recorded_answer_comes_from_the_worker_that_has_it(self):
        with fakes(2) as (one, two), moed.Client(one.endpoint) as first, \
                moed.Client(two.endpoint) as second:
            dy = rows(4)
            arguments = (LAYER, dy, rows(4), IDS)
            first.backward(*arguments, session="s", micro_batch_id=1)
            again = second.backward(*arguments, session="s", micro_batch_id=1)
            np.testing.assert_array_equal(again.dx, 3 * dy)
            self.assertTrue(again.repeated)
            self.assertEqual((len(one.requests), len(two.requests)), (2, 1))

    def test_another_worker_runs_a_call_that_the_first_refuses(self):
        with fakes(2) as (one, two), moed.Client(one.endpoint, spread=True) as client:
            one.script = [unavailable()] * 50
            client.backward(LAYER, rows(4), rows(4), IDS, session="s", micro_batch_id=1)
            self.assertEqual((len(one.requests), len(two.requests)), (1, 1))

    def test_a_retained_pass_needs_no_x_and_its_loss_is_repaired(self):
        with fakes(2) as (one, two), moed.Client(one.endpoint, spread=True) as client:
            x, dy = rows(4), rows(4, 1)
            for batch in range(1, 9):  # always the same worker
                seen = client.forward(LAYER, x, return_routing=True, retain=("s", batch))
                self.assertTrue(seen.retained)
            self.assertEqual((len(one.retained), len(two.retained)), (8, 0))
            answer = client.backward(LAYER, dy, x, seen.topk_ids, session="s", micro_batch_id=8,
                                     retained=True, weights_version=seen.weights_version)
            self.assertTrue(answer.used_retained)
            self.assertEqual(one.requests[-1][1].x, b"")
            one.retained.clear()
            answer = client.backward(LAYER, dy, x, seen.topk_ids, session="s", micro_batch_id=7,
                                     retained=True, weights_version=seen.weights_version)
            self.assertFalse(answer.used_retained)
            self.expect("RETAINED_PASS_GONE", client.backward, LAYER, dy, session="s",
                        micro_batch_id=6, retained=True)

    def test_all_other_calls(self):
        with fakes() as (worker,), moed.Client(worker.endpoint) as client:
            step = client.optimizer_step(0.1,
                                         step_id=1,
                                         weight_decay=0.2,
                                         betas=(0.5, 0.6),
                                         eps=1.0,
                                         max_grad_norm=3.0,
                                         grad_scale=0.5,
                                         balance_rate=0.125,
                                         optimizer="adamw")
            self.assertEqual((step.weights_version, step.grad_norm, step.steps), (2, 1.5, 1))
            sent = worker.requests[-1][1]
            self.assertEqual(
                (sent.learning_rate, sent.weight_decay, sent.beta1, sent.beta2, sent.epsilon,
                 sent.max_grad_norm, sent.grad_scale, sent.balance_rate, sent.optimizer),
                (0.1, 0.2, 0.5, 0.6, 1.0, 3.0, 0.5, 0.125, 1))
            client.set_frozen(["router", "shared"], step_id=2)
            sent = worker.requests[-1][1]
            self.assertEqual((sent.router, sent.experts, sent.shared), (True, False, True))
            saved = client.save_checkpoint("a", step_id=3, keep=2)
            self.assertEqual((saved.bytes, saved.lineage), (1000, 4))
            self.assertEqual(worker.requests[-1][1].keep, 2)
            self.assertEqual(client.load_checkpoint("a", step_id=4).lineage, 5)
            self.assertEqual(client.export_adapter("b", step_id=5).bytes, 10)
            client.export_adapter(merge=True, step_id=6)
            self.assertEqual(client.zero_grad(step_id=7), 0)
            state = client.train_state()
            self.assertEqual((state.lineage, state.last_step_id, state.optimizer, state.frozen),
                             (4, 7, "adamw", frozenset(["router"])))
            client.recover_training("a")
            client.recover_training(as_loaded=True)
            self.assertEqual([(sent.name, sent.as_loaded) for _, sent in worker.requests[-2:]],
                             [("a", False), ("", True)])

    def test_wrong_arguments_are_not_sent(self):
        with fakes() as (worker,), moed.Client(worker.endpoint) as client:
            good = rows(4)
            names = dict(session="s", micro_batch_id=1)
            for error, arguments, more in (
                    (ValueError, (good[:, 1:], good, IDS), {}),
                    (ValueError, (good[:0], good, IDS), {}),
                    (ValueError, (good, good[:3], IDS), {}),
                    (ValueError, (good, good), {}),
                    (ValueError, (good,), {}),
                    (ValueError, (good, None, IDS), {}),
                    (ValueError, (good, good, IDS[:3]), {}),
                    (ValueError, (good, good, IDS), dict(retained=True)),
                    (TypeError, (good.astype(np.float64), good, IDS), {}),
                    (TypeError, (good, moed.bf16(good), IDS), {})):
                with self.assertRaises(error):
                    client.backward(LAYER, *arguments, **names, **more)
            self.expect("TOKEN_LIMIT", client.backward, LAYER, rows(STEP_TOKENS + 1), **names,
                        retained=True)
            for error, call, arguments in (
                    (ValueError, client.zero_grad, dict(step_id=0)),
                    (ValueError, client.zero_grad, dict(step_id=2**63)),
                    (ValueError, client.zero_grad, dict(step_id=-1)),
                    (TypeError, client.zero_grad, dict(step_id=1.5)),
                    (TypeError, client.zero_grad, dict(step_id="1")),
                    (ValueError, client.save_checkpoint, dict(name="a/b", step_id=1)),
                    (ValueError, client.load_checkpoint, dict(name=".a", step_id=1)),
                    (ValueError, client.load_checkpoint, dict(name="a" * 65, step_id=1)),
                    (TypeError, client.save_checkpoint, dict(name=b"a", step_id=1)),
                    (ValueError, client.export_adapter, dict(step_id=1)),
                    (ValueError, client.recover_training, dict()),
                    (ValueError, client.recover_training, dict(name="a", as_loaded=True)),
                    (ValueError, client.recover_training, dict(name="../a"))):
                with self.subTest(arguments=arguments), self.assertRaises(error) as caught:
                    call(**arguments)
                print("    %s" % caught.exception)
            for more in (dict(session="", micro_batch_id=1), dict(session="a b", micro_batch_id=1),
                         dict(session="s", micro_batch_id=0)):
                with self.subTest(more=more), self.assertRaises(ValueError):
                    client.backward(LAYER, good, good, IDS, **more)
            with self.assertRaises(ValueError):
                client.set_frozen(["head"], step_id=1)
            with self.assertRaises(ValueError):
                client.optimizer_step(0.1, step_id=1, optimizer="adam")
            self.assertEqual(worker.requests, [])

    def test_calls_on_a_closed_object_say_so(self):
        with fakes() as (worker,):
            client = moed.Client(worker.endpoint)
            client.close()
            for call in (client.train_state, lambda: client.zero_grad(step_id=1)):
                with self.assertRaises(moed.MoeError) as caught:
                    call()
                self.assertIn("the client has been closed", str(caught.exception))
            self.assertEqual(worker.requests, [])


class RealGroup(unittest.TestCase):
    def test_the_readme_snippet_runs_twice(self):
        manual = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..", "client",
                              "README.md")
        with open(manual, encoding="utf-8") as file:
            after = file.read().split("### Training\n")[1]
        snippet = re.search(r"```python\n(.*?)```", after, re.DOTALL).group(1)
        layer, _, x, dy, _ = next(case for case in golden_gradients(FAMILY) if case[1] == 37)
        with tempfile.TemporaryDirectory(prefix="moed-test-") as root, training_group(
                FAMILY, 2, "--training-dir", root) as g:
            for run in range(2):
                with moed.Client(g.endpoints[run]) as client:
                    names = dict(client=client, layer=layer, x=x, dy=dy, uuid=uuid)
                    exec(compile(snippet, manual, "exec"), names)
                    self.assertFalse(names["step"].repeated)
                    state = client.train_state()
                    self.assertEqual((state.steps, state.backwards), (3 * (run + 1), 0))
                moectl("training", "save", "after-%d" % run, "--endpoint", g.endpoints[0])

    def test_equal_steps_of_two_clients_are_two_steps(self):
        with training_group(FAMILY, 2) as g, moed.Client(g.endpoints[0]) as one, \
                moed.Client(g.endpoints[1]) as two:
            one.optimizer_step(1e-3, step_id=1)
            self.assertTrue(one.optimizer_step(1e-3, step_id=1).repeated)
            with self.assertRaises(moed.MoeError) as caught:
                two.optimizer_step(1e-3, step_id=1)
            print("   ", caught.exception)
            self.assertEqual(caught.exception.reason, "ID_REUSED")
            self.assertEqual(two.train_state().steps, 1)

    def test_zero_is_a_number(self):
        # With beta1 = 0 AdamW ignores the direction of earlier gradients; with 0.9 it does not.
        layer, _, x, dy, _ = next(case for case in golden_gradients(FAMILY) if case[1] == 37)

        def step(client, n, dy, learning_rate, **options):
            seen = client.forward(layer, x, return_routing=True)
            client.backward(layer, dy, x, seen.topk_ids, session="s", micro_batch_id=n)
            client.optimizer_step(learning_rate, step_id=n, expected_backwards=1, **options)

        answers = {}
        for betas in ((0.0, 0.999), (0.9, 0.999), (0.0, 0.0)):
            for first in (dy, -dy):
                with training_group(FAMILY, 2) as g, moed.Client(g.endpoints[0]) as client:
                    step(client, 1, first, 0.0, betas=betas)  # moves only moments
                    step(client, 2, dy, 1e-3, betas=betas)
                    answers[betas, first is dy] = client.forward(layer, x)
                    before = client.train_state().weights_version
                    # An eps of 0 would give NaN, a grad_scale of 0 would do nothing.
                    for zero in ("eps", "grad_scale"):
                        with self.assertRaises(moed.MoeError) as caught:
                            client.optimizer_step(1e-3, step_id=3, **{zero: 0.0})
                        self.assertEqual(caught.exception.reason, "VALUE_INVALID")
                    self.assertEqual(client.train_state().weights_version, before)
        for betas in ((0.0, 0.999), (0.0, 0.0)):
            np.testing.assert_array_equal(answers[betas, True], answers[betas, False])
        self.assertFalse(np.array_equal(answers[(0.9, 0.999), True], answers[(0.9, 0.999), False]))
        self.assertFalse(np.array_equal(answers[(0.0, 0.0), True], answers[(0.0, 0.999), True]))

    def test_gradients_steps_and_answers_recorded_elsewhere(self):
        layer, _, x, dy, dx = next(case for case in golden_gradients(FAMILY) if case[1] == 37)
        with training_group(FAMILY, 2) as g, moed.Client(g.endpoints[0]) as client, \
                moed.Client(g.endpoints[1]) as other:
            seen = client.forward(layer, x, return_routing=True, retain=("s", 1))
            arguments = dict(session="s", micro_batch_id=1, weights_version=seen.weights_version)
            first = client.backward(layer, dy, x, seen.topk_ids, retained=True, **arguments)
            self.assertTrue(seen.retained and first.used_retained)
            self.assertLessEqual(relative_error(first.dx, dx), 1e-5)
            again = other.backward(layer, dy, x, seen.topk_ids, **arguments)
            self.assertTrue(again.repeated)
            np.testing.assert_array_equal(again.dx, first.dx)
            self.assertEqual(other.train_state().backwards, 1)
            step = other.optimizer_step(1e-3, step_id=1, expected_backwards=1)
            with self.assertRaises(moed.MoeError) as caught:  # not a change of this client
                client.optimizer_step(1e-3, step_id=1, expected_backwards=1)
            self.assertEqual(caught.exception.reason, "ID_REUSED")
            self.assertTrue(other.optimizer_step(1e-3, step_id=1, expected_backwards=1).repeated)
            self.assertEqual((step.weights_version, client.train_state().steps), (2, 1))
            with self.assertRaises(moed.MoeError) as caught:
                client.backward(layer, dy, x, seen.topk_ids, session="s", micro_batch_id=2,
                                weights_version=1)
            self.assertEqual(caught.exception.reason, "VERSION_MISMATCH")

    def test_calls_wait_for_a_lost_worker_and_report_lost_state(self):
        layer, _, x, dy, dx = next(case for case in golden_gradients(FAMILY) if case[1] == 37)
        with training_group(FAMILY, 2) as g, moed.Client(g.endpoints[0]) as client:
            lineage = client.train_state().lineage
            seen = client.forward(layer, x, return_routing=True)
            client.backward(layer, dy, x, seen.topk_ids, session="s", micro_batch_id=1)
            g.kill_worker(1)
            with concurrent.futures.ThreadPoolExecutor(1) as thread:
                step = thread.submit(client.optimizer_step, 1e-3, step_id=1, lineage=lineage,
                                     expected_backwards=1, timeout=50)
                wait_until(lambda: g.info(0).epoch == 0)
                self.assertFalse(step.done())
                g.start_worker(1)
                with self.assertRaises(moed.MoeError) as caught:
                    step.result()
            print("   ", caught.exception)
            self.assertEqual(caught.exception.reason, "STATE_LOST")
            state = client.train_state()
            self.assertGreater(state.lineage, lineage)
            self.assertEqual((state.steps, state.backwards), (0, 0))
            again = client.backward(layer, dy, x, seen.topk_ids, session="s", micro_batch_id=1,
                                    lineage=state.lineage)
            self.assertFalse(again.repeated)
            self.assertLessEqual(relative_error(again.dx, dx), 1e-5)
            client.optimizer_step(1e-3, step_id=1, lineage=state.lineage, expected_backwards=1)

    def test_a_load_restores_the_weights(self):
        layer, _, x, dy, _ = next(case for case in golden_gradients(FAMILY) if case[1] == 37)
        with tempfile.TemporaryDirectory(prefix="moed-test-") as root, training_group(
                FAMILY, 2, "--training-dir", root) as g, moed.Client(g.endpoints[0]) as client:
            here = ("--endpoint", g.endpoints[1])
            said = json.loads(moectl("training", "save", "start", "-o", "json", *here).stdout)
            self.assertEqual((said["name"], said["weightsVersion"], said["lineage"]),
                             ("start", "1", str(client.train_state().lineage)))
            self.assertEqual(moectl("training", "save", "start", *here, check=False).returncode, 7)
            self.assertEqual(moectl("training", "load", "none", *here, check=False).returncode, 4)
            seen = client.forward(layer, x, return_routing=True)
            client.backward(layer, dy, x, seen.topk_ids, session="s", micro_batch_id=1)
            self.assertEqual(moectl("training", "save", "late", *here, check=False).returncode, 7)
            state = client.train_state()
            step_id = state.last_step_id + 1
            client.optimizer_step(1e-2, step_id=step_id)
            self.assertFalse(np.array_equal(client.forward(layer, x), seen.y))
            saved = client.save_checkpoint("after", step_id=step_id + 1)
            self.assertEqual(saved.lineage, state.lineage)
            self.assertEqual(client.save_checkpoint("after", step_id=step_id + 1),
                             dataclasses.replace(saved, repeated=True))
            self.assertIn("loaded start", moectl("training", "load", "start", *here).stdout)
            np.testing.assert_array_equal(client.forward(layer, x), seen.y)
            self.assertGreater(client.train_state().lineage, state.lineage)
            self.assertEqual(client.train_state().checkpoint, "start")

    def test_a_group_that_does_not_train_says_so(self):
        with group(FAMILY, 1) as g, moed.Client(g.endpoint) as client:
            with self.assertRaises(moed.MoeError) as caught:
                client.train_state()
            self.assertEqual(caught.exception.code, grpc.StatusCode.UNIMPLEMENTED)
            self.assertIn("started without --training", caught.exception.message)
            self.assertEqual(moectl("training", "save", "a", "--endpoint", g.endpoint,
                                    check=False).returncode, 4)


@needs_torch
class Torch(unittest.TestCase):
    """moed.torch against the fake group."""

    def test_a_gradient_flows_through_a_remote_layer(self):
        with fakes() as (worker,), moed.Client(worker.endpoint) as client:
            for saved in (False, True):
                moe = moed.torch.RemoteMoE(LAYER, client, retain=saved)
                x = torch.randn(2, 3, HIDDEN, requires_grad=True)
                y = moe(x)
                self.assertTrue(torch.equal(y, 2 * x))
                dy = torch.randn(2, 3, HIDDEN)
                y.backward(dy)
                self.assertTrue(torch.equal(x.grad, 3 * dy))
                self.assertEqual(worker.requests[-1][1].x == b"", saved)

    def test_rows_of_another_width_are_refused(self):
        with fakes() as (worker,), moed.Client(worker.endpoint) as client:
            moe = moed.torch.RemoteMoE(LAYER, client)
            for shape in ((), (4, 2 * HIDDEN), (HIDDEN, HIDDEN + 1)):
                with self.subTest(shape=shape), self.assertRaises(ValueError):
                    moe(torch.zeros(shape))
            for wrong in (torch.zeros(2, HIDDEN, dtype=torch.float64),
                          torch.zeros(2, HIDDEN, dtype=torch.int64),
                          torch.zeros(0, HIDDEN, dtype=torch.float16), np.zeros((2, HIDDEN))):
                with self.subTest(wrong=type(wrong)), self.assertRaises(TypeError):
                    moe(wrong)
            self.assertNotIn("Forward", [name for name, m in worker.requests])

    def test_an_optimizer_of_other_modules_is_refused(self):
        with fakes() as (worker,), moed.Client(worker.endpoint) as client:
            moe = moed.torch.RemoteMoE(LAYER, client)
            for error, modules, lr in ((TypeError, [torch.nn.Linear(2, 2)], 1.0),
                                       (ValueError, [], 1.0), (ValueError, [moe], -1.0),
                                       (ValueError, [moe], float("nan"))):
                with self.subTest(modules=modules, lr=lr), self.assertRaises(error):
                    moed.torch.RemoteOptimizer(modules, lr=lr)
            for wrong in (dict(betas=(1.0, 0.9)), dict(betas=(-0.1, 0.9)), dict(betas=(0.9,)),
                          dict(eps=0.0), dict(eps=-1.0)):
                with self.subTest(wrong=wrong), self.assertRaises(ValueError):
                    moed.torch.RemoteOptimizer([moe], lr=1.0, **wrong)
            with self.assertRaisesRegex(ValueError, "momentum"):
                moed.torch.RemoteOptimizer([moe], lr=1.0, momentum=0.9)
            with self.assertRaisesRegex(ValueError, "momentum"):
                client.optimizer_step(1.0, step_id=1, optimizer="adamw", momentum=0.9)

    def test_the_first_layer_learns_though_x_does_not(self):
        with fakes() as (worker,), moed.Client(worker.endpoint) as client:
            moe = moed.torch.RemoteMoE(LAYER, client)
            moe(torch.randn(4, HIDDEN)).sum().backward()
            self.assertEqual(worker.ledger.backwards, 1)
            self.assertEqual(list(moe.state_dict()), [])
            self.assertEqual(list(moe.parameters()), [])
            with torch.no_grad():
                self.assertFalse(moe(torch.randn(4, HIDDEN)).requires_grad)

    def test_bfloat16_stays_bfloat16(self):
        with fakes() as (worker,), moed.Client(worker.endpoint) as client:
            moe = moed.torch.RemoteMoE(LAYER, client)
            x = torch.randn(4, HIDDEN).bfloat16()
            y = moe(x)
            self.assertEqual(y.dtype, torch.bfloat16)
            self.assertTrue(torch.equal(y, 2 * x))
            with self.assertRaises(TypeError):
                moe(x.half())

    def test_long_batches_are_split_and_empty_ones_not_sent(self):
        with fakes() as (worker,), moed.Client(worker.endpoint) as client:
            moe = moed.torch.RemoteMoE(LAYER, client)
            x = torch.randn(2 * STEP_TOKENS + 5, HIDDEN, requires_grad=True)
            moe(x).sum().backward()
            self.assertEqual([m.tokens for name, m in worker.requests if name == "Forward"],
                             [23, 23, 23])
            self.assertEqual(moe.session.backwards, 3)
            self.assertTrue(torch.equal(x.grad, torch.full_like(x, 3)))
            worker.requests.clear()
            self.assertEqual(moe(x[:0]).shape, (0, HIDDEN))
            self.assertEqual(worker.requests, [])

    def test_rows_that_do_not_fit_one_message_are_split(self):
        with fakes() as (worker,):
            worker.message_bytes = 8192 + 10 * (2 * HIDDEN * 4 + 8 * TOP_K)  # x and dy of 10 rows
            with moed.Client(worker.endpoint) as client:
                moe = moed.torch.RemoteMoE(LAYER, client)
                x = torch.randn(20, HIDDEN, requires_grad=True)
                moe(x).sum().backward()
                self.assertEqual([(name, m.tokens) for name, m in worker.requests],
                                 [("Forward", 10)] * 2 + [("Backward", 10)] * 2)
                worker.requests.clear()
                moe(x.detach()[:16].bfloat16())  # half as wide
                self.assertEqual(len(worker.requests), 1)

    def test_a_group_that_does_not_train_serves_passes_without_gradients(self):
        with fakes() as (worker,):
            worker.extensions = []
            worker.GetTrainState = None
            with moed.Client(worker.endpoint) as client:
                moe = moed.torch.RemoteMoE(LAYER, client)
                x = torch.randn(4, HIDDEN)
                with torch.no_grad():
                    self.assertTrue(torch.equal(moe(x), 2 * x))
                with self.assertRaises(moed.MoeError) as caught:
                    moe(x)
                self.assertIn("started without --training", caught.exception.message)
                self.assertIn("torch.no_grad()", caught.exception.message)
                with self.assertRaises(moed.MoeError):
                    moed.torch.RemoteOptimizer([moe], lr=1.0)

    def test_a_training_pass_waits_as_long_as_a_step(self):
        with fakes() as (worker,), moed.Client(worker.endpoint) as client:
            moe = moed.torch.RemoteMoE(LAYER, client)
            worker.script = [unavailable()] * 6
            moe(torch.randn(4, HIDDEN))
            self.assertEqual(len(worker.requests), 7)

    def test_a_second_backward_of_a_graph_is_a_new_micro_batch(self):
        with fakes() as (worker,), moed.Client(worker.endpoint) as client:
            moe = moed.torch.RemoteMoE(LAYER, client, retain=True)
            y = moe(torch.randn(4, HIDDEN)).sum()
            y.backward(retain_graph=True)
            (2 * y).backward()
            self.assertEqual(worker.ledger.backwards, 2)

    def test_steps_count_gradients_and_follow_schedulers(self):
        with fakes() as (worker,), moed.Client(worker.endpoint) as client:
            moe = moed.torch.RemoteMoE(LAYER, client)
            optimizer = moed.torch.RemoteOptimizer([moe], lr=0.5, betas=(0.8, 0.9))
            schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
            for step in range(3):
                for _ in range(2):
                    moe(torch.randn(4, HIDDEN)).sum().backward()
                optimizer.step(grad_scale=0.5)
                optimizer.zero_grad()  # no gradients: makes no call
                schedule.step()
                sent = worker.requests[-1][1]
                self.assertEqual((sent.step_id, sent.learning_rate, sent.expected_backwards,
                                  sent.beta1, sent.grad_scale), (step + 1, 0.5**(step + 1), 2, 0.8,
                                                                 0.5))
            moe(torch.randn(4, HIDDEN)).sum().backward()
            optimizer.zero_grad()
            self.assertEqual((worker.requests[-1][0], worker.ledger.backwards), ("ZeroGrad", 0))

    def test_a_step_without_an_answer_is_made_once(self):
        with fakes() as (worker,), moed.Client(worker.endpoint, timeout=0.3) as client:
            moe = moed.torch.RemoteMoE(LAYER, client)
            optimizer = moed.torch.RemoteOptimizer([moe], lr=0.5)
            moe(torch.randn(4, HIDDEN)).sum().backward()
            worker.script = [(unavailable(),)] + [unavailable()] * 50
            with self.assertRaises(moed.MoeError):
                optimizer.step()
            worker.script = []
            optimizer.step()
            self.assertTrue(optimizer.last.repeated)
            self.assertEqual(worker.ledger.steps, 1)

    def test_an_id_that_another_session_took_is_skipped(self):
        with fakes() as (worker,), moed.Client(worker.endpoint) as client:
            moe = moed.torch.RemoteMoE(LAYER, client)
            optimizer = moed.torch.RemoteOptimizer([moe], lr=0.5)
            for step in (1, 2, 3):
                client.set_frozen([], step_id=step)
            moe(torch.randn(4, HIDDEN)).sum().backward()
            optimizer.step()
            self.assertEqual((worker.ledger.steps, worker.ledger.last_step_id()), (1, 4))

    def test_two_trainers_of_equal_settings_make_two_steps(self):
        with fakes() as (worker,), moed.Client(worker.endpoint) as one, \
                moed.Client(worker.endpoint) as two:
            layers = [moed.torch.RemoteMoE(LAYER, client) for client in (one, two)]
            for alone in (False, True):
                worker.ledger.backwards, steps = 0, worker.ledger.steps
                optimizers = [moed.torch.RemoteOptimizer([moe], lr=0.5, alone=alone)
                              for moe in layers]
                for moe, optimizer in zip(layers * 3, optimizers * 3):
                    moe(torch.randn(4, HIDDEN)).sum().backward()
                    optimizer.step()
                    self.assertEqual((optimizer.last.repeated, optimizer.last.backwards),
                                     (False, 1))
                self.assertEqual(worker.ledger.steps, steps + 6)

    def test_zero_grad_recovers_from_a_failed_backward(self):
        with fakes() as (worker,), moed.Client(worker.endpoint, timeout=0.3) as client:
            moe = moed.torch.RemoteMoE(LAYER, client)
            optimizer = moed.torch.RemoteOptimizer([moe], lr=0.5)
            y = moe(torch.randn(4, HIDDEN)).sum()
            worker.script = [(unavailable(),)] + [unavailable()] * 50
            with self.assertRaises(moed.MoeError):
                y.backward()
            worker.script = []
            self.assertEqual(worker.ledger.backwards, 1)  # the call ran, its answer was lost
            optimizer.zero_grad()
            moe(torch.randn(4, HIDDEN)).sum().backward()
            optimizer.step()
            self.assertEqual(optimizer.last.backwards, 1)

    def test_a_step_uses_only_its_sessions_gradients(self):
        with fakes() as (worker,), moed.Client(worker.endpoint) as one, \
                moed.Client(worker.endpoint) as two, moed.Client(worker.endpoint) as three:
            moe, other = (moed.torch.RemoteMoE(LAYER, client) for client in (one, two))
            moe(torch.randn(4, HIDDEN)).sum().backward()
            # This session begins while the group has gradients of another one.
            late = moed.torch.RemoteMoE(LAYER, three)
            for module in (other, late):
                optimizer = moed.torch.RemoteOptimizer([module], lr=0.5)
                with self.assertRaises(moed.MoeError) as caught:
                    optimizer.step()
                self.assertEqual(caught.exception.reason, "GRADIENTS_MISSING")
                self.assertIsNone(optimizer.last)
            self.assertNotIn("OptimizerStep", [name for name, m in worker.requests])
            self.assertEqual((worker.ledger.steps, worker.ledger.backwards), (0, 1))
            late(torch.randn(4, HIDDEN)).sum().backward()  # two now; one is of this session
            with self.assertRaises(moed.MoeError) as caught:
                optimizer.step()
            self.assertEqual(caught.exception.reason, "GRADIENTS_MISSING")
            late.session.refresh()
            optimizer.zero_grad()  # clears the other session's too, because alone=True
            late(torch.randn(4, HIDDEN)).sum().backward()
            optimizer.step()
            with self.assertRaises(moed.MoeError):
                optimizer.step()  # uses them
            self.assertEqual((optimizer.last.backwards, worker.ledger.steps), (1, 1))
            shared = moed.torch.RemoteOptimizer([moe], lr=0.5, alone=False)
            other(torch.randn(4, HIDDEN)).sum().backward()
            shared.step()
            self.assertEqual((shared.last.backwards, worker.ledger.steps), (1, 2))


@needs_torch
class TorchOnRealGroup(unittest.TestCase):
    def test_golden_gradients_in_both_dtypes(self):
        with training_group(FAMILY, 2) as g, moed.Client(g.endpoints[0]) as client:
            for layer, tokens, x, dy, dx in golden_gradients(FAMILY):
                for dtype, limit in ((torch.float32, 1e-5), (torch.bfloat16, 1e-2)):
                    for saved in (False, True):
                        moe = moed.torch.RemoteMoE(layer, client, retain=saved)
                        t = torch.from_numpy(x.copy()).to(dtype).requires_grad_()
                        moe(t).backward(torch.from_numpy(dy.copy()).to(dtype))
                        error = relative_error(t.grad.float().numpy(), dx)
                        print("    layer %d, %2d tokens, %s: %.1e" % (layer, tokens, dtype, error))
                        self.assertEqual(t.grad.dtype, dtype)
                        self.assertLessEqual(error, limit)

    def test_betas_of_zero_equal_torchs(self):
        # A step of plain SGD subtracts the gradients from the weights.
        layer, _, x, dy, _ = next(case for case in golden_gradients(FAMILY) if case[1] == 37)
        rows = torch.from_numpy(x.copy())

        def tensors(root, name):
            found = {}
            for path in glob.glob(os.path.join(root, name, "optimizer", "slot-*.safetensors")):
                found.update({key: torch.from_numpy(value.copy()) for key, value
                              in moed.read_safetensors(path).items() if key.endswith(".value")})
            return found

        with tempfile.TemporaryDirectory(prefix="moed-test-") as root:
            with training_group(FAMILY, 1, "--training-dir", root, "--training", "sgd") as g, \
                    moed.Client(g.endpoints[0]) as client:
                moe = moed.torch.RemoteMoE(layer, client)
                optimizer = moed.torch.RemoteOptimizer([moe], lr=1.0)
                moe.session.change(client.save_checkpoint, "before")
                for name, scale in (("g1", 1.0), ("g2", -0.25)):
                    moe(rows).backward(scale * torch.from_numpy(dy.copy()))
                    optimizer.step()
                    moe.session.change(client.save_checkpoint, name)
                    moe.session.change(client.load_checkpoint, "before")
                    moe.session.refresh()
            before = tensors(root, "before")
            gradients = [{key: before[key] - value for key, value in tensors(root, name).items()}
                         for name in ("g1", "g2")]
            with training_group(FAMILY, 1, "--training-dir", root) as g, \
                    moed.Client(g.endpoints[0]) as client:
                moe = moed.torch.RemoteMoE(layer, client)
                optimizer = moed.torch.RemoteOptimizer([moe], lr=0.0, betas=(0.0, 0.999), eps=1e-4)
                for lr, scale in ((0.0, 1.0), (1e-2, -0.25)):
                    optimizer.param_groups[0]["lr"] = lr
                    moe(rows).backward(scale * torch.from_numpy(dy.copy()))
                    optimizer.step()
                moe.session.change(client.save_checkpoint, "after")
            after = tensors(root, "after")
        self.assertTrue(before and before.keys() == after.keys())
        worst = 0.0
        for key, value in before.items():
            parameter = torch.nn.Parameter(value.clone())
            theirs = torch.optim.AdamW([parameter], betas=(0.0, 0.999), eps=1e-4, weight_decay=0.0)
            for lr, gradient in zip((0.0, 1e-2), gradients):
                theirs.param_groups[0]["lr"] = lr
                parameter.grad = gradient[key].clone()
                theirs.step()
            ours, wanted = after[key] - value, parameter.detach() - value
            if wanted.norm() > 0:
                worst = max(worst, float((ours - wanted).norm() / wanted.norm()))
        print("    %d tensors, moves differ by %.1e at most" % (len(before), worst))
        # Gradients that come from SGD steps are rounded to the weights' last bits.
        self.assertLess(worst, 1e-2)

    def test_a_remote_layer_learns_for_a_fixed_head(self):
        torch.manual_seed(1)
        with training_group(FAMILY, 2) as g, moed.Client(g.endpoints[0], spread=True) as client:
            moe = moed.torch.RemoteMoE(client.layers[0], client, retain=True)
            head = torch.randn(moe.layer.hidden, 4)
            x, wanted = torch.randn(32, moe.layer.hidden), torch.randint(4, (32,))
            optimizer = moed.torch.RemoteOptimizer([moe], lr=1e-2)
            losses = []
            for _ in range(30):
                loss = torch.nn.functional.cross_entropy(moe(x) @ head, wanted)
                loss.backward()
                optimizer.step()
                losses.append(loss.item())
            print("    loss %.3f -> %.3f" % (losses[0], losses[-1]))
            self.assertLess(losses[-1], 0.5 * losses[0])
            self.assertEqual(optimizer.last.weights_version, 31)

    def test_a_loop_goes_on_after_a_worker_was_lost(self):
        torch.manual_seed(1)
        with training_group(FAMILY, 2) as g, moed.Client(g.endpoints[0]) as client:
            moe = moed.torch.RemoteMoE(client.layers[0], client)
            optimizer = moed.torch.RemoteOptimizer([moe], lr=1e-2)
            head = torch.randn(moe.layer.hidden, 4)
            x, wanted = torch.randn(32, moe.layer.hidden), torch.randint(4, (32,))
            losses, reasons = [], set()
            while len(losses) < 40:
                if len(losses) == 10 and not reasons:
                    g.kill_worker(1)
                    g.start_worker(1)
                try:
                    loss = torch.nn.functional.cross_entropy(moe(x) @ head, wanted)
                    loss.backward()
                    optimizer.step()
                    losses.append(loss.item())
                except moed.MoeError as error:
                    reasons.add(error.reason)
                    g.wait_serving()
                    moe.session.refresh()
            print("    loss %.3f, after the loss of a worker %.3f, at last %.3f; %s" % (
                losses[0], losses[10], losses[-1], sorted(reasons)))
            self.assertEqual(losses[10], losses[0])  # the model as loaded
            self.assertLess(losses[-1], 0.5 * losses[0])
            self.assertEqual(optimizer.last.steps, 30)

    def test_the_example_learns(self):
        example = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..", "client",
                               "python", "examples", "finetune.py")
        done = subprocess.run(
            [sys.executable, example, "--model", model_directory(FAMILY), "--workers", "2",
             "--moectl", MOECTL, "--steps", "40", "--remote-only"], stdout=subprocess.PIPE,
            text=True, timeout=100, check=True,
            env=dict(os.environ, PYTHONPATH=os.path.join(BUILD, "python")))
        print("    " + done.stdout.splitlines()[-1])
        first, last = map(float, re.search(r"first ([0-9.]+), last ([0-9.]+)",
                                           done.stdout).groups())
        self.assertLess(last, 0.6 * first)

    def test_unsupported_uses_in_torch_are_refused(self):
        """They are refused with a reason, not ignored."""
        with training_group(FAMILY, 1) as g, moed.Client(g.endpoints[0]) as client:
            moe = moed.torch.RemoteMoE(client.layers[0], client)
            model = torch.nn.Sequential(torch.nn.Linear(2, 2), moe)
            for act in (copy.deepcopy, pickle.dumps, lambda m: torch.save(m, io.BytesIO())):
                with self.assertRaisesRegex(TypeError, "parameters are on the workers"):
                    act(model)
            with self.assertRaisesRegex(TypeError, "has connections"):
                pickle.dumps(client)
            self.assertEqual(set(model.state_dict()), {"0.weight", "0.bias"})
            remote = moed.torch.RemoteOptimizer([moe], lr=1e-3)
            with self.assertRaisesRegex(ValueError, "one param group"):
                remote.add_param_group({"params": [torch.zeros(1, requires_grad=True)]})
            for name, value in (("weight_decay", -1), ("max_grad_norm", -1), ("balance_rate", -1),
                                ("momentum", 1), ("momentum", .9), ("betas", (0.9, 1.0))):
                with self.assertRaisesRegex(ValueError, name):
                    moed.torch.RemoteOptimizer([moe], lr=1e-3, **{name: value})
            with self.assertRaises(moed.MoeError) as caught:
                client.optimizer_step(1e-3, step_id=1, momentum=0.9)
            self.assertEqual(caught.exception.reason, "VALUE_INVALID")
            self.assertIn("adamw", caught.exception.message)
            moe.session.lineage += 1
            with self.assertRaises(moed.MoeError) as caught:
                moe(torch.randn(3, moe.layer.hidden)).sum().backward()
            self.assertEqual(caught.exception.reason, "STATE_LOST")
            self.assertRegex(str(caught.exception), r"session.refresh\(\) [^()]*\)$")
        with training_group(FAMILY, 1, "--training", "sgd") as g:
            with moed.Client(g.endpoints[0]) as client:
                moe = moed.torch.RemoteMoE(client.layers[0], client)
                with self.assertRaisesRegex(ValueError, "betas"):
                    moed.torch.RemoteOptimizer([moe], lr=1e-3, betas=(0.5, 0.999))
                moed.torch.RemoteOptimizer([moe], lr=1e-3, momentum=0.9)

    def run_example(self, *arguments, folder):
        example = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..", "client",
                               "python", "examples", "finetune.py")
        return subprocess.run(
            [sys.executable, example, "--model", model_directory(FAMILY), *arguments],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, timeout=100,
            env=dict(os.environ, PYTHONPATH=os.path.join(BUILD, "python"), TMPDIR=folder))

    def test_the_example_checks_its_options_before_it_trains(self):
        with tempfile.TemporaryDirectory() as folder:
            done = self.run_example("--moectl", os.path.join(folder, "none"), folder=folder)
            self.assertEqual((done.returncode, done.stdout), (1, ""))
            self.assertRegex(done.stderr, r"^cannot run \S+none \(give its path with --moectl\): ")
            self.assertEqual(os.listdir(folder), [])
            done = self.run_example("--moectl", MOECTL, "--plot",
                                    os.path.join(folder, "none", "loss.png"), folder=folder)
            print("    " + done.stderr.strip())
            self.assertEqual((done.returncode, done.stdout), (1, ""))
            self.assertRegex(done.stderr, r"^--plot( needs matplotlib|: \S+ does not exist)")
            self.assertEqual(os.listdir(folder), [])


if __name__ == "__main__":
    main()
