# SPDX-License-Identifier: Apache-2.0
"""Training from Python: calls against a fake group (requests, retries, answers recorded elsewhere)
and against real daemons (gradients, steps, refusals of checkpoints)."""

import concurrent.futures
import copy
import dataclasses
import json
import os
import pickle
import random
import re
import tempfile
import threading
import types
import unittest
import unittest.mock
import unittest.mock as mock
import uuid

import grpc
import numpy as np

from group import group, main, moectl, relative_error, wait_until
from training import golden_gradients, training_group

from fake_group import (HIDDEN, IDS, LAYER, STEP_TOKENS, TOP_K, FakeChannel, FakeClock, fakes,
                        refused, rows, unavailable)

import moed
from moed import _retry
from moed._proto import admin_pb2, types_pb2

FAMILY = "qwen3_moe"


class Calls(unittest.TestCase):
    """Client against the fake group."""

    def expect(self, reason, call, *arguments, **options):
        with self.assertRaises(moed.MoeError) as caught:
            call(*arguments, **options)
        self.assertEqual(caught.exception.reason, reason, caught.exception)
        return caught.exception

    def expect_the_end(self, call, *arguments, **options):
        """A call that was refused until its limit. On a busy machine, the limit may have cut off an
        attempt: then there is no reason, and the code is DEADLINE_EXCEEDED."""
        with self.assertRaises(moed.MoeError) as caught:
            call(*arguments, **options)
        error = caught.exception
        if error.code != grpc.StatusCode.DEADLINE_EXCEEDED or error.reason:
            self.assertEqual(error.reason, "REFORMING", error)
        return error

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
            self.expect_the_end(client.zero_grad, step_id=1, timeout=2)
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
            for call, arguments, text in (
                    (client.forward, dict(layer=LAYER, x=rows(4), save=("s", 1)),
                     "Client.forward: the keyword save is now retain"),
                    (client.backward, dict(layer=LAYER, dy=rows(4), session="s", micro_batch_id=1,
                                           saved=True), "the keyword saved is now retained")):
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
                    error = self.expect_the_end(client.zero_grad, step_id=1, timeout=5)
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
        with fakes() as (worker,), moed.Client(worker.endpoint, timeout=2) as client:
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
            self.expect_the_end(client.save_checkpoint, "c", step_id=3)

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


if __name__ == "__main__":
    main()
