# SPDX-License-Identifier: Apache-2.0
"""Forward passes with activations that devices retain for Backward: alone in their steps; the same
gradients to the last bit, whichever workers have dropped them; dropped in time on all workers; at
most training's share of the steps."""

import random
import re
import socket
import threading
import time
import unittest
import urllib.request

import grpc
import numpy as np

from group import BACKEND, FAMILIES, main, moectl, wait_until
from load import Load
import moed
import wire
from training import Trainer, TrainingGroup, golden_gradients, refusal, training_group
from wire import expert, training

FAMILY = "deepseek_v3"
ALONE = 256  # a retained pass of at least so many tokens has a separate step (activations.h)
# After so many misses in a row, most retained passes share steps (activations/activations.c).
VAIN = 8
GONE = ("FAILED_PRECONDITION", "RETAINED_PASS_GONE")


def case(family=FAMILY, tokens=ALONE + 3):
    """(layer, x, dy): recorded rows, repeated with different scales."""
    layer, x, dy = next((layer, x, dy) for layer, count, x, dy, _ in golden_gradients(family)
                        if count == 37)
    times = -(-tokens // len(x))
    grow = np.repeat(1 + np.arange(times, dtype=np.float32) / 64, len(x))[:, None]
    return (layer, (np.tile(x, (times, 1)) * grow)[:tokens].copy(),
            (np.tile(dy, (times, 1)) / grow)[:tokens].copy())


def device_bytes(g):
    """Bytes that each worker's device retains now."""
    found = []
    for endpoint in g.endpoints:
        t = Trainer(endpoint)
        found.append(t.state().retained_device_bytes)
        t.close()
    return found


def wait_for(condition, seconds=30):
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if condition():
            return True
        time.sleep(0.02)
    return False


def all_dropped(g):
    """Waits, because the worker that answers may finish its step before the others."""
    return wait_for(lambda: sum(device_bytes(g)) == 0)


class Case(unittest.TestCase):
    def saved(self, t, layer, x, batch, **fields):
        """Makes a retained pass. The device retains its activations if it can; a GPU only BF16."""
        answer = t.forward(layer, x, retain=batch, **fields)
        self.assertTrue(answer.retained)
        if BACKEND == "cpu":
            self.assertTrue(answer.retained_activations)
        return answer


class SameBits(Case):
    def program(self, g, at, family, save):
        """Runs two steps of two micro batches; returns the answers and the final state."""
        layer, x, dy = case(family)
        t = Trainer(g.endpoints[at])
        seen = []
        for step in range(2):
            for part in range(2):
                t.batch += 1
                rows, grad = x * (1 + part / 8), dy * (1 + step)
                if save:
                    routing = self.saved(t, layer, rows, t.batch)
                    self.assertEqual((routing.stages.steps, routing.stages.step_tokens),
                                     (1, len(x)))
                    answer = t.backward(layer, grad, batch=t.batch, aux_coeff=0.01,
                                        return_weight_gradients=True)
                    self.assertTrue(answer.used_retained)
                    self.assertEqual(answer.used_activations, routing.retained_activations)
                else:
                    routing = t.forward(layer, rows)
                    answer = t.backward(layer, grad, rows, routing, batch=t.batch, aux_coeff=0.01,
                                        return_weight_gradients=True)
                    self.assertFalse(answer.used_retained or answer.used_activations)
                seen += [routing.y_data, answer.dx, answer.weight_gradients, answer.aux_loss]
            done = t.optimizer_step(weight_decay=0.1, expected_backwards=2, balance_rate=0.001)
            seen.append(done.grad_norm)
        seen.append(t.forward(layer, x).y_data)
        self.assertEqual(sum(device_bytes(g)), 0)
        t.close()
        return seen

    def check(self, family, workers):
        results = []
        for save in (False, True):
            with training_group(family, workers) as g:
                results.append(self.program(g, workers - 1, family, save))
        self.assertEqual(results[0], results[1])

    def test_one_worker_without_room_changes_nothing(self):
        """Calls go to the worker that retains, and to the one that recomputes."""
        class Uneven(TrainingGroup):
            def start_worker(self, slot, *extra):
                limit = ("--retained-device-bytes", "0") if slot == 1 else ()
                TrainingGroup.start_worker(self, slot, *limit, *extra)

        layer, x, dy = case()
        with training_group(FAMILY, 2) as g:
            want = self.program(g, 0, FAMILY, False)
        g = Uneven(FAMILY, 2, "--training", "adamw")
        try:
            keeper, other = (Trainer(e) for e in g.endpoints)
            self.assertEqual(self.program(g, 0, FAMILY, True), want)
            other.batch = keeper.batch = 100
            answer = other.forward(layer, x, retain=101)
            self.assertTrue(answer.retained)  # x and the routing
            self.assertFalse(answer.retained_activations)
            self.assertEqual(other.state().retained_device_bytes_limit, 0)
            passed = other.backward(layer, dy, batch=101)
            self.assertTrue(passed.used_retained)
            self.assertFalse(passed.used_activations)
            self.saved(keeper, layer, x, 102)
            self.assertEqual(device_bytes(g)[1], 0)
            self.assertEqual(keeper.backward(layer, dy, batch=102).dx, passed.dx)
            keeper.close(), other.close()
        finally:
            codes = g.stop()
        self.assertEqual(codes, [0, 0, 0])

    def test_evicted_activations_are_recomputed(self):
        layer, x, dy = case()
        with training_group(FAMILY, 2) as g:
            t = Trainer(g.endpoints[0])
            self.saved(t, layer, x, 1)
            one = max(device_bytes(g))
            want = t.backward(layer, dy, batch=1).dx
            t.close()
        with training_group(FAMILY, 2, "--retained-device-bytes", str(one * 5 // 2)) as g:
            t = Trainer(g.endpoints[0])
            for batch in range(1, 7):
                self.saved(t, layer, x, batch)
                self.assertLessEqual(max(device_bytes(g)), one * 5 // 2)
            used = []
            for batch in range(1, 7):
                answer = t.backward(layer, dy, batch=batch)
                self.assertEqual(answer.dx, want)
                self.assertTrue(answer.used_retained)
                used.append(answer.used_activations)
            if BACKEND == "cpu":
                self.assertEqual(used, [False] * 4 + [True] * 2)
            self.assertEqual(sum(device_bytes(g)), 0)
            t.close()


def add(family, workers):
    def test(self):
        self.check(family, workers)

    test.__doc__ = "%s on %d workers" % (family, workers)
    setattr(SameBits, "test_%s_%d_workers" % (family, workers), test)


for each_family in FAMILIES:
    for each_count in (1, 2, 4):
        # All families on two workers; those with the most special layers also on one and on four.
        if each_count == 2 or each_family in ("deepseek_v3", "gpt_oss", "llama4"):
            add(each_family, each_count)


class OwnStep(Case):
    def forward_meanwhile(self, endpoint, layer, rows, stop, failures, counts):
        """Makes plain forward passes, one after the other, until `stop`."""
        other = Trainer(endpoint)
        expect, count = other.forward(layer, rows).y_data, 0
        while not stop.is_set():
            if other.forward(layer, rows).y_data != expect:
                failures.append("another answer")
            count += 1
        counts.append(count)
        other.close()

    def retain_under_load(self, g, x, dy, layer, batches):
        """Makes retained passes, each with its Backward, while all workers get plain ones. Returns
        the number of passes that the device retained.

        A retained pass is alone in its step. If the device of its worker retained none of the last
        VAIN, the next ones may share their steps: separate steps would delay others for nothing."""
        t = Trainer(g.endpoints[0])
        want = t.forward(layer, x).y_data
        stop, failures, counts, dx = threading.Event(), [], [], set()
        threads = [threading.Thread(target=self.forward_meanwhile,
                                    args=(g.endpoints[i % 2], layer, x[:5 + 60 * i].copy(), stop,
                                          failures, counts)) for i in range(4)]
        for thread in threads:
            thread.start()
        vain = retained = 0
        try:
            for batch in batches:
                answer = t.forward(layer, x, retain=batch)
                self.assertTrue(answer.retained)
                self.assertEqual(answer.y_data, want)
                if vain < VAIN or answer.retained_activations:
                    self.assertEqual((answer.stages.steps, answer.stages.step_tokens), (1, len(x)))
                vain = 0 if answer.retained_activations else vain + 1
                retained += answer.retained_activations
                passed = t.backward(layer, dy, batch=batch)
                self.assertEqual(passed.used_activations, answer.retained_activations)
                dx.add(passed.dx)
        finally:
            stop.set()
            for thread in threads:
                thread.join()
        t.close()
        print("%d plain forward passes during %d others, %d of them retained" % (sum(counts),
                                                                      len(batches), retained))
        self.assertEqual(failures, [])
        self.assertEqual(len(dx), 1)
        self.assertEqual(len(counts), 4)
        return retained

    def test_plain_forwards_do_not_share_the_step_of_a_retained_pass(self):
        """In both dtypes, because a GPU never retains F32."""
        layer, x, dy = case()
        with training_group(FAMILY, 2) as g:
            for first, rows, grad in ((1, x, dy), (101, moed.bf16(x), moed.bf16(dy))):
                retained = self.retain_under_load(g, rows, grad, layer, range(first, first + 30))
                self.assertTrue(retained == 30 or BACKEND != "cpu")

    def test_after_vain_attempts_retained_passes_share_steps(self):
        layer, x, dy = case()
        with training_group(FAMILY, 2, "--retained-device-bytes", "1") as g:
            self.assertEqual(self.retain_under_load(g, x, dy, layer, range(1, 31)), 0)

    def test_small_passes_and_passes_of_many_steps_are_not_retained_on_devices(self):
        layer, x, dy = case(tokens=ALONE)
        with training_group(FAMILY, 2, "--max-tokens-per-step", "256") as g:
            t = Trainer(g.endpoints[0])
            self.saved(t, layer, x, 1)
            small = t.forward(layer, x[:-1].copy(), retain=2)
            self.assertTrue(small.retained)
            self.assertFalse(small.retained_activations)
            passed = t.backward(layer, dy[:-1].copy(), batch=2)
            self.assertTrue(passed.used_retained)
            self.assertFalse(passed.used_activations)
            many = np.tile(x, (2, 1))
            self.assertEqual(refusal(t.forward, layer, many, retain=3)[0],
                             ("INVALID_ARGUMENT", "TOKEN_LIMIT"))
            t.close()

    def test_all_routing_modes_and_dtypes(self):
        layer, x, dy = case()
        with training_group(FAMILY, 2) as g:
            client, batch = moed.Client(g.endpoints[1]), 0
            server = client.forward(layer, x, return_routing=True)
            ids, weights = server.topk_ids[::-1].copy(), server.topk_weights * 0.5
            for routing in ({}, {"topk_ids": ids}, {"topk_ids": ids, "topk_weights": weights}):
                for rows, grad in ((x, dy), (moed.bf16(x), moed.bf16(dy))):
                    batch += 2
                    passed = client.forward(layer, rows, return_routing=True,
                                            retain=("any", batch), **routing)
                    self.assertTrue(passed.retained)
                    self.assertTrue(passed.retained_activations or BACKEND != "cpu")
                    given = {"topk_weights": weights} if "topk_weights" in routing else {}
                    want = client.backward(
                        layer, grad, x=rows, topk_ids=passed.topk_ids, session="any",
                        micro_batch_id=batch - 1, return_weight_gradients=True, **given)
                    got = client.backward(layer, grad, session="any", micro_batch_id=batch,
                                          retained=True, return_weight_gradients=True)
                    self.assertTrue(got.used_retained)
                    self.assertEqual(got.used_activations, passed.retained_activations)
                    self.assertEqual(got.dx.tobytes(), want.dx.tobytes())
                    self.assertEqual(got.weight_gradients.tobytes(),
                                     want.weight_gradients.tobytes())
            client.close()

    def test_a_stream_retains_passes_too(self):
        layer, x, dy = case()
        with training_group(FAMILY, 2) as g:
            t = Trainer(g.endpoints[1])
            call = t.channel.stream_stream(
                "/moe.v1.ExpertService/ForwardStream",
                response_deserializer=expert.ForwardStreamResponse.FromString)
            items = []
            for batch in (1, 2, 3):
                q = expert.ForwardStreamRequest(
                    layer=layer, tokens=x.shape[0], hidden=x.shape[1], dtype=1, x_data=x.tobytes(),
                    request_id=batch)
                q.retain.session, q.retain.micro_batch_id = t.session, batch
                items.append(q.SerializeToString())
            for answer in call(iter(items), timeout=30):
                self.assertTrue(answer.retained)
                self.assertEqual(answer.retained_activations, BACKEND == "cpu")
            for batch in (1, 2, 3):
                self.assertEqual(t.backward(layer, dy, batch=batch).used_activations,
                                 BACKEND == "cpu")
            t.close()


class DroppedInTime(Case):
    def test_with_the_backward_of_its_id_on_all_workers(self):
        layer, x, dy = case()
        with training_group(FAMILY, 4) as g:
            one, two = Trainer(g.endpoints[0]), Trainer(g.endpoints[3])
            for t in (one, two, one):  # repeated, on both workers
                self.saved(t, layer, x, 1)
            once = device_bytes(g)
            self.assertTrue(BACKEND != "cpu" or all(once))
            first = one.backward(layer, dy, batch=1)
            self.assertTrue(first.used_retained)
            self.assertTrue(all_dropped(g))
            again = one.backward(layer, dy, batch=1)  # also without x
            self.assertTrue(again.repeated)
            self.assertEqual((again.dx, again.used_activations), (first.dx, first.used_activations))
            self.assertEqual(refusal(two.backward, layer, dy, batch=1)[0],
                             ("FAILED_PRECONDITION", "RECORDED_ELSEWHERE"))
            # A Backward with x does not use the retained pass of its id, but drops it.
            routing = self.saved(two, layer, x, 2)
            sent = two.backward(layer, dy, x, routing, batch=2)
            self.assertFalse(sent.used_retained or sent.used_activations)
            self.assertEqual(sent.dx, first.dx)
            self.assertTrue(all_dropped(g))
            # With input_only it uses up its id as well.
            self.saved(one, layer, x, 3)
            self.assertEqual(one.backward(layer, dy, batch=3, input_only=True).dx, first.dx)
            self.assertTrue(all_dropped(g))
            # If two workers retain passes under one id, the devices have the later one.
            self.saved(one, layer, x, 4)
            self.saved(two, layer, x * 2, 4)
            self.assertEqual(one.backward(layer, dy, batch=4).dx, first.dx)
            self.assertTrue(all_dropped(g))
            one.close(), two.close()

    def test_with_any_change_of_the_weights(self):
        layer, x, dy = case()
        with training_group(FAMILY, 2) as g:
            t = Trainer(g.endpoints[0])
            self.saved(t, layer, x, 1)
            self.saved(t, layer, x, 2)
            zero = training.ZeroGradRequest(step_id=1)
            t.call("ZeroGrad", zero)
            self.assertEqual(t.backward(layer, dy, batch=1).used_activations, BACKEND == "cpu")
            t.step = 1
            t.optimizer_step()
            self.assertTrue(all_dropped(g))
            self.assertEqual(refusal(t.backward, layer, dy, batch=2)[0],
                             ("FAILED_PRECONDITION", "VERSION_MISMATCH"))
            self.saved(t, layer, x, 3)
            self.assertEqual(t.backward(layer, dy, batch=3).used_activations, BACKEND == "cpu")
            t.close()

    def test_with_time(self):
        layer, x, dy = case()
        with training_group(FAMILY, 2, "--retained-seconds", "1") as g:
            t = Trainer(g.endpoints[1])
            routing = self.saved(t, layer, x, 1)
            self.assertTrue(wait_for(lambda: sum(device_bytes(g)) == 0))  # without further calls
            wait_for(lambda: False, 1)
            self.assertEqual(refusal(t.backward, layer, dy, batch=1)[0], GONE)
            self.assertFalse(t.backward(layer, dy, x, routing, batch=1).used_retained)
            t.close()

    def test_a_limit_of_zero_retains_no_activations(self):
        layer, x, dy = case()
        with training_group(FAMILY, 2, "--retained-device-bytes", "0") as g:
            t = Trainer(g.endpoints[0])
            answer = t.forward(layer, x, retain=1)
            self.assertTrue(answer.retained)
            self.assertFalse(answer.retained_activations)
            self.assertTrue(t.backward(layer, dy, batch=1).used_retained)
            t.close()


class Faults(Case):
    def finish(self, g, layer, x, dy, batch, endpoint=None):
        """Behaves as a client with a pass that may be dropped: tries without x, then sends x.
        Returns dx and the results of the attempts."""
        t, seen = Trainer(endpoint or g.endpoints[0]), []
        end = time.monotonic() + 60
        while True:
            try:
                answer = t.backward(layer, dy, batch=batch)
                seen.append("used")
                break
            except grpc.RpcError as error:
                reason = wire.error_reason(error)[0]
                seen.append(reason)
                if reason == "RETAINED_PASS_GONE":
                    answer = t.backward(layer, dy, x, t.forward(layer, x), batch=batch)
                    break
                if error.code().name != "UNAVAILABLE" or time.monotonic() > end:
                    raise
                time.sleep(0.05)
        t.close()
        return answer.dx, seen

    def killed(self, victim, learn):
        """Worker `victim` dies between forward and backward. The calls go to worker 0 or to its
        replacement."""
        layer, x, dy = case()
        with training_group(FAMILY, 2, "--wait-budget-ms", "500") as g:
            t = Trainer(g.endpoints[0])
            want = t.backward(layer, dy, x, t.forward(layer, x), input_only=True).dx
            if learn:
                t.backward(layer, dy, x, t.forward(layer, x))
                t.optimizer_step()
            t.close()
            t = Trainer(g.endpoints[0])
            self.saved(t, layer, x, 100)
            epoch = g.info(1 - victim).epoch
            g.kill_worker(victim)
            g.start_worker(victim, "--wait-budget-ms", "500")
            dx, seen = self.finish(g, layer, x, dy, 100)
            print("worker %d killed, %s: %s" % (victim, "learnt" if learn else "untouched", seen))
            self.assertEqual(dx, want)  # the weights are those of the model again
            g.wait_serving(epoch)
            self.assertEqual(sum(device_bytes(g)), 0)
            t.close()
            t = Trainer(g.endpoints[0])
            self.saved(t, layer, x, 101)  # the group still works
            answer = t.backward(layer, dy, batch=101)
            self.assertEqual((answer.dx, answer.used_activations), (want, BACKEND == "cpu"))
            t.close()

    def test_another_worker_dies_between_forward_and_backward(self):
        self.killed(1, False)
        self.killed(1, True)

    def test_the_called_worker_dies_between_forward_and_backward(self):
        self.killed(0, False)
        self.killed(0, True)

    def test_a_worker_dies_while_retained_passes_run(self):
        """A Forward with retain is answered although a worker dies, as any other Forward."""
        layer, x, dy = case()
        with training_group(FAMILY, 4, "--wait-budget-ms", "500") as g:
            t = Trainer(g.endpoints[0])
            want = t.forward(layer, x).y_data
            answers, failures = [], []

            def save(first):
                other = Trainer(g.endpoints[0], "s%d" % first)
                for batch in range(1, 120):
                    try:
                        answers.append(other.forward(layer, x, retain=batch).y_data)
                    except grpc.RpcError as error:
                        failures.append((error.code().name, wire.error_reason(error)[0]))
                        time.sleep(0.1)  # as a client does before a retry
                other.close()

            threads = [threading.Thread(target=save, args=(i,)) for i in range(3)]
            for thread in threads:
                thread.start()
            wait_until(lambda: len(answers) > 3)
            epoch = g.info(0).epoch
            g.kill_worker(2)
            g.start_worker(2, "--wait-budget-ms", "500")
            for thread in threads:
                thread.join()
            g.wait_serving(epoch)
            print("%d answers, refused %s" % (len(answers), sorted(set(failures))))
            self.assertEqual(set(answers), {want})
            self.assertLessEqual({code for code, _ in failures}, {"UNAVAILABLE"})
            t.close()

    def test_retries_in_any_order_leave_the_same_state(self):
        layer, x, dy = case()
        results = []
        for seed in range(3):
            rng = random.Random(seed)
            with training_group(FAMILY, 2) as g:
                one, two = (Trainer(endpoint) for endpoint in g.endpoints)
                for phase in range(2):
                    routing = one.forward(layer, x)
                    calls = [(what, batch) for what in ("save", "back") * 3 for batch in (1, 2)]
                    rng.shuffle(calls)
                    # Gradients are summed in the order of execution of the first two.
                    first = calls.index(("back", 2))
                    calls.insert(first, ("back", 1))
                    for what, number in calls + [("back", 1), ("back", 2)]:
                        batch, rows = 10 * phase + number, x * number
                        if what == "save":
                            one.forward(layer, rows, retain=batch)
                            two.forward(layer, rows, retain=batch)
                            continue
                        try:
                            one.backward(layer, dy, batch=batch)
                        except grpc.RpcError as error:
                            self.assertEqual(wire.error_reason(error)[0], "RETAINED_PASS_GONE")
                            routing = one.forward(layer, rows)
                            one.backward(layer, dy, rows, routing, batch=batch)
                    self.assertTrue(all_dropped(g))
                    step = one.optimizer_step(step=phase + 1, expected_backwards=2)
                results.append((one.forward(layer, x).y_data, step.grad_norm))
                one.close(), two.close()
        self.assertEqual(len(set(results)), 1)

    def test_clients_that_go_away_leave_no_harm(self):
        """Calls that are cancelled or exceed their time, waiting or running, among others that
        stay."""
        layer, x, dy = case()
        with training_group(FAMILY, 2, "--retained-seconds", "5") as g:
            t = Trainer(g.endpoints[0])
            epoch = g.info(0).epoch
            want = t.forward(layer, x).y_data
            rng = random.Random(7)
            call = t.channel.unary_unary("/moe.v1.ExpertService/Forward",
                                         response_deserializer=expert.ForwardResponse.FromString)
            ends = {}
            for round_ in range(30):
                going = []
                for i in range(12):
                    q = expert.ForwardRequest(layer=layer, tokens=x.shape[0], hidden=x.shape[1],
                                              dtype=1, x_data=x.tobytes())
                    q.retain.session, q.retain.micro_batch_id = "away", 100 * round_ + i + 1
                    timeout = rng.choice((30, 30, 0.001, 0.004, 0.01))
                    going.append((timeout, call.future(q.SerializeToString(), timeout=timeout)))
                for timeout, future in going:
                    if timeout == 30 and rng.random() < 0.5:
                        time.sleep(rng.random() * 0.004)
                        future.cancel()
                for timeout, future in going:
                    try:
                        self.assertEqual(future.result().y_data, want)
                        name = "answered"
                    except grpc.FutureCancelledError:
                        name = "cancelled"
                    except grpc.RpcError as error:
                        name = error.code().name
                    ends[name] = ends.get(name, 0) + 1
            print(ends)
            self.assertLessEqual(set(ends), {"answered", "cancelled", "DEADLINE_EXCEEDED",
                                             "CANCELLED"})
            self.assertGreater(len(ends), 2)
            self.assertEqual(g.info(0).epoch, epoch)
            self.assertTrue(wait_for(lambda: sum(device_bytes(g)) == 0))
            self.saved(t, layer, x, 1)
            self.assertEqual(t.backward(layer, dy, batch=1).used_activations, BACKEND == "cpu")
            t.close()


class Share(Case):
    def test_plain_forwards_go_on_during_retained_pairs(self):
        """With every share, no call fails, and both sides make progress.
        tests/bench/while_training.py measures how long they wait for each other; tests of the
        sequencer cover the share."""
        layer, x, dy = case()
        for share in ("0.1", "0.5"):
            with training_group(FAMILY, 2, "--training-share", share) as g, Load() as load:
                load.forwards(6, g.endpoints, layer, x[:37].copy())
                load.retained_pairs(2, g.endpoints, layer, x, dy)
                wait_until(lambda: load.failures or len(load.pairs) > 12)
                load.wait_for_more()
                self.assertEqual(load.failures, [])


class Reported(Case):
    def test_answers_status_and_metrics_report_retained_passes(self):
        layer, x, dy = case()
        with socket.socket() as s:  # a free port for /metrics
            s.bind(("127.0.0.1", 0))
            port = s.getsockname()[1]
        with training_group(FAMILY, 1, "--metrics-listen", "127.0.0.1:%d" % port) as g:
            def series(name):
                text = urllib.request.urlopen("http://127.0.0.1:%d/metrics" % port).read().decode()
                return float(re.search(r"^%s (\S+)$" % name, text, re.MULTILINE).group(1))

            keeps = BACKEND == "cpu"
            client = moed.Client(g.endpoints[0])
            for batch in (1, 2):
                answer = client.forward(layer, x, return_routing=True, retain=("python", batch))
                self.assertEqual((answer.retained, answer.retained_activations), (True, keeps))
            state = client.train_state()
            self.assertEqual(state.retained_device_bytes > 0, keeps)
            self.assertEqual(state.retained_device_bytes_limit, 1 << 30)
            self.assertEqual(series("moe_train_retained_device_bytes"), state.retained_device_bytes)
            passed = client.backward(layer, dy, session="python", micro_batch_id=1, retained=True)
            self.assertTrue(passed.used_retained)
            self.assertEqual(passed.used_activations, keeps)
            said = moectl("training", "--endpoint", g.endpoints[0]).stdout
            self.assertRegex(said, r"device +%s of 1024.0 MiB of activations" % (
                "[0-9]+[.][0-9]" if keeps else "0.0"))
            self.assertEqual(series("moe_train_retained_steps_total"), 2 * keeps)
            self.assertEqual(series("moe_train_reused_steps_total"), keeps)
            self.assertEqual(series("moe_train_retained_device_bytes"),
                             client.train_state().retained_device_bytes)
            self.assertEqual(client.train_state().retained_device_bytes,
                             state.retained_device_bytes // 2)
            client.close()


if __name__ == "__main__":
    main()
