# SPDX-License-Identifier: Apache-2.0
"""TrainingService on real daemons: gradients, optimizer steps, repeats of every call, refusals."""

import json
import random
import re
import socket
import subprocess
import tempfile
import unittest
import urllib.request

import grpc
import numpy as np

from group import (FAMILIES, group, main, model_directory, moectl, relative_error,
                   wait_until)
import wire
from training import (WORKER, Trainer, golden_gradients, golden_parameter_norm, refusal,
                      training_group)
from wire import training

FAMILY = "deepseek_v3"  # groups, selection bias, shared experts


def array(data, like):
    return np.frombuffer(data, np.float32).reshape(like.shape)


def case(family=FAMILY):
    """(layer, x, dy) of 37 tokens."""
    return next((layer, x, dy) for layer, tokens, x, dy, _ in golden_gradients(family)
                if tokens == 37)


class Gradients(unittest.TestCase):
    """dx of all recorded passes, and the norm of all parameters' gradients from an optimizer
    step."""

    def check(self, family, workers):
        with training_group(family, workers) as g:
            trainer = Trainer(g.endpoints[-1])
            worst = 0
            for layer, _, x, dy, dx in golden_gradients(family):
                routing = trainer.forward(layer, x)
                sent = trainer.backward(layer, dy, x, routing)
                trainer.batch += 1
                self.assertTrue(trainer.forward(layer, x, retain=trainer.batch).retained)
                saved = trainer.backward(layer, dy, batch=trainer.batch)
                self.assertTrue(saved.used_retained and not sent.used_retained)
                self.assertEqual(saved.dx, sent.dx)
                worst = max(worst, relative_error(array(sent.dx, dx), dx))
            self.assertLessEqual(worst, 1e-5)
            trainer.step += 1
            zero = trainer.call("ZeroGrad", training.ZeroGradRequest(step_id=trainer.step))
            self.assertEqual(zero.backwards, trainer.batch)
            wanted, norm = golden_parameter_norm(family)
            for layer, tokens, x, dy, _ in golden_gradients(family):
                if layer == wanted and tokens == 37:
                    trainer.backward(layer, dy, x, trainer.forward(layer, x))
            step = trainer.optimizer_step(expected_backwards=1)
            print("%-13s %d workers: dx %.1e, norm of all gradients %.1e" % (
                family, workers, worst, abs(step.grad_norm / norm - 1)))
            self.assertLessEqual(abs(step.grad_norm / norm - 1), 1e-5)
            trainer.close()


def add(family, workers):
    def test(self):
        self.check(family, workers)

    test.__doc__ = "%s on %d workers" % (family, workers)
    setattr(Gradients, "test_%s_%d_workers" % (family, workers), test)


for each_family in FAMILIES:
    for each_count in (1, 2, 4):
        add(each_family, each_count)


class Repeats(unittest.TestCase):
    def test_a_repeat_gets_the_first_answer_and_changes_nothing(self):
        layer, x, dy = case()
        with training_group(FAMILY, 2) as g:
            t = Trainer(g.endpoints[0])
            routing = t.forward(layer, x)
            request = t.backward_request(layer, dy, x, routing, return_weight_gradients=True)
            first = t.call("Backward", request)
            for _ in range(3):
                again = t.call("Backward", request)
                self.assertTrue(again.repeated and not first.repeated)
                self.assertEqual(again.dx, first.dx)
                self.assertEqual(again.weight_gradients, first.weight_gradients)
                self.assertEqual(again.aux_loss, first.aux_loss)
            self.assertEqual(t.state().backwards, 1)
            step = t.optimizer_step()
            y = t.forward(layer, x).y_data
            for endpoint in g.endpoints * 2:  # every worker has the answer of a step
                other = Trainer(endpoint)
                again = other.optimizer_step(step=t.step)
                self.assertTrue(again.repeated)
                again.repeated = False
                self.assertEqual(again, step)
                self.assertEqual(other.forward(layer, x).y_data, y)
                other.close()
            # A repeat of a Backward of the previous version is answered and adds nothing.
            self.assertTrue(t.call("Backward", request).repeated)
            self.assertEqual(t.state().backwards, 0)
            t.close()

    def test_an_answer_recorded_elsewhere_names_its_worker(self):
        layer, x, dy = case()
        with training_group(FAMILY, 2) as g:
            one, two = (Trainer(endpoint) for endpoint in g.endpoints)
            request = one.backward_request(layer, dy, x, one.forward(layer, x))
            first = one.call("Backward", request)
            what, error = refusal(two.call, "Backward", request)
            self.assertEqual(what, ("FAILED_PRECONDITION", "RECORDED_ELSEWHERE"))
            self.assertEqual(wire.error_worker(error), g.endpoints[0])
            there = Trainer(wire.error_worker(error))
            self.assertEqual(there.call("Backward", request).dx, first.dx)
            one.close(), two.close(), there.close()

    def test_an_id_with_other_content_is_refused(self):
        layer, x, dy = case()
        with training_group(FAMILY, 2) as g:
            one, two = (Trainer(endpoint) for endpoint in g.endpoints)
            routing = one.forward(layer, x)
            one.backward(layer, dy, x, routing, batch=5)
            for t in (one, two):
                for other in (dict(dy=dy * 2), dict(x=x * 2), dict(aux_coeff=0.5),
                              dict(input_only=True), dict(return_weight_gradients=True)):
                    fields = dict(dict(dy=dy, x=x), **other)
                    what, _ = refusal(t.backward, layer, fields.pop("dy"), fields.pop("x"), routing,
                                      batch=5, **fields)
                    self.assertEqual(what, ("ALREADY_EXISTS", "ID_REUSED"))
            one.optimizer_step(step=7)
            # With another weights version it is another call, with x or without.
            for t in (one, two):
                self.assertEqual(
                    refusal(t.backward, layer, dy, x, routing, batch=5, weights_version=2)[0],
                    ("ALREADY_EXISTS", "ID_REUSED"))
            self.assertEqual(refusal(one.backward, layer, dy, batch=5, weights_version=2)[0],
                             ("ALREADY_EXISTS", "ID_REUSED"))
            self.assertTrue(one.backward(layer, dy, x, routing, batch=5).repeated)
            for t in (one, two):
                self.assertEqual(refusal(t.optimizer_step, 0.5, step=7)[0],
                                 ("ALREADY_EXISTS", "ID_REUSED"))
                self.assertEqual(
                    refusal(t.call, "ZeroGrad", training.ZeroGradRequest(step_id=7))[0],
                    ("ALREADY_EXISTS", "ID_REUSED"))
            self.assertEqual(one.state().weights_version, 2)
            one.close(), two.close()

    def test_a_repeat_by_another_session_is_refused(self):
        layer, x, dy = case()
        with training_group(FAMILY, 2) as g:
            one, two = (Trainer(endpoint) for endpoint in g.endpoints)
            one.backward(layer, dy, x, one.forward(layer, x))
            one.optimizer_step(step=3, session="a")
            for t in (one, two):
                self.assertTrue(t.optimizer_step(step=3, session="a").repeated)
                for session in ("b", ""):  # otherwise an identical call
                    what, error = refusal(t.optimizer_step, step=3, session=session)
                    self.assertEqual(what, ("ALREADY_EXISTS", "ID_REUSED"))
                    self.assertIn("step id 3 was used by another session: take last_step_id + 1 of "
                                  "GetTrainState (now 4)", error.details())
            what, error = refusal(one.optimizer_step, 0.5, step=3, session="a")
            self.assertIn("for something else: take last_step_id + 1", error.details())
            for request in (training.ZeroGradRequest(step_id=3, session="b"),
                            training.SetFrozenRequest(step_id=3, session="b")):
                name = type(request).__name__.replace("Request", "")
                self.assertEqual(refusal(one.call, name, request)[0],
                                 ("ALREADY_EXISTS", "ID_REUSED"))
            self.assertEqual(
                refusal(one.optimizer_step, step=4, session=".b")[0],
                ("INVALID_ARGUMENT", "NAME_INVALID"))
            self.assertEqual((one.state().weights_version, one.state().last_step_id), (2, 3))
            one.close(), two.close()

    def test_every_repeat_is_counted_once(self):
        layer, x, dy = case()
        ports = []
        for _ in range(2):
            with socket.socket() as s:  # the series' port has to be known beforehand
                s.bind(("127.0.0.1", 0))
                ports.append(s.getsockname()[1])

        def counts():
            pages = [urllib.request.urlopen("http://127.0.0.1:%d/metrics" % p).read().decode()
                     for p in ports]
            return [float(re.search(r"^moe_train_repeats_total (\S+)$", page,
                                    re.MULTILINE).group(1)) for page in pages]

        with training_group(FAMILY, 2) as g:
            # Restart with one metrics port each, because workers of a group share their arguments.
            for slot, port in enumerate(ports):
                epoch = g.info(1 - slot).epoch
                g.kill_worker(slot)
                g.start_worker(slot, "--metrics-listen", "127.0.0.1:%d" % port)
                g.wait_serving(above=epoch)
            one, two = (Trainer(endpoint) for endpoint in g.endpoints)
            routing = one.forward(layer, x)
            first = one.backward_request(layer, dy, x, routing)
            self.assertFalse(one.call("Backward", first).repeated)
            self.assertEqual(counts(), [0, 0])
            for _ in range(5):
                self.assertTrue(one.call("Backward", first).repeated)
            self.assertEqual(counts(), [5, 0])
            # Without x the recorded answer comes too.
            for name in ("x", "topk_ids", "routing_mode", "topk_ids_dtype"):
                first.ClearField(name)
            self.assertTrue(one.call("Backward", first).repeated)
            self.assertEqual(counts(), [6, 0])
            one.optimizer_step(step=1)
            self.assertTrue(two.optimizer_step(step=1).repeated)
            self.assertEqual(counts(), [6, 1])
            # Repeats that are in flight at the same time count too.
            call = two.channel.unary_unary(
                "/moe.v1.TrainingService/Backward",
                response_deserializer=training.BackwardResponse.FromString)
            raw = two.backward_request(layer, dy, x, routing, batch=2).SerializeToString()
            answers = [f.result() for f in [call.future(raw, timeout=30) for _ in range(6)]]
            self.assertEqual(sum(a.repeated for a in answers), 5)
            self.assertEqual(counts(), [6, 6])
            one.close(), two.close()

    def test_steps_and_their_stages_are_timed(self):
        layer, x, dy = case()
        with socket.socket() as s:  # the series' port has to be known beforehand
            s.bind(("127.0.0.1", 0))
            port = s.getsockname()[1]
        with training_group(FAMILY, 1, "--metrics-listen", "127.0.0.1:%d" % port) as g:
            t = Trainer(g.endpoints[0])
            answers = [t.forward(layer, x) for _ in range(5)]
            t.backward(layer, dy, x, answers[0])
            page = urllib.request.urlopen("http://127.0.0.1:%d/metrics" % port).read().decode()
            value = {name: float(number) for name, number in re.findall(
                r"^(moe_step_\S*?(?:_sum|_count)\{.*\}) (\S+)$", page, re.MULTILINE)}
            print(value)
            steps = "moe_step_seconds_%s{kind=\"%s\"}"
            stages = "moe_step_stage_seconds_%s{kind=\"forward\",stage=\"%s\"}"
            self.assertEqual(value[steps % ("count", "forward")], 5)
            self.assertEqual(value[steps % ("count", "backward")], 1)
            self.assertGreater(value[steps % ("sum", "backward")], 0)
            self.assertAlmostEqual(value[steps % ("sum", "forward")],
                                   sum(a.stages.step_ns for a in answers) / 1e9, delta=1e-8)
            for stage in ("router", "prepare", "dispatch", "gemm1", "gemm2", "shared", "combine"):
                self.assertEqual(value[stages % ("count", stage)], 5)
                self.assertAlmostEqual(
                    value[stages % ("sum", stage)],
                    sum(getattr(a.stages, stage + "_ns") for a in answers) / 1e9, delta=1e-8)
            self.assertGreater(value[stages % ("sum", "gemm1")], 0)
            t.close()

    def test_an_id_below_a_forgotten_one_is_refused(self):
        layer, x, dy = case("mixtral")
        x, dy = x[:1].copy(), dy[:1].copy()
        with training_group("mixtral", 1) as g:
            t = Trainer(g.endpoints[0])
            routing = t.forward(layer, x)
            for batch in range(10, 10 + 260):
                t.backward(layer, dy, x, routing, batch=batch)
            self.assertEqual(refusal(t.backward, layer, dy, x, routing, batch=9)[0],
                             ("ALREADY_EXISTS", "ID_TOO_OLD"))
            self.assertEqual(refusal(t.backward, layer, dy, x, routing, batch=10)[0],
                             ("ALREADY_EXISTS", "ID_TOO_OLD"))
            t.close()

    def run_program(self, endpoints, orders):
        """The same training with repeated calls in the order that `orders` gives; within a phase
        any order is valid. Returns the last output of the weights."""
        layer, x, dy = case()
        clients = [Trainer(endpoint) for endpoint in endpoints]
        rng = random.Random(orders)
        version = 1
        routing = [clients[0].forward(layer, x * s) for s in (1, 0.5)]
        for phase in range(3):
            calls = [("Backward", clients[0].backward_request(
                layer, dy * (phase + 1), x * s, routing[i], batch=10 * phase + i + 1,
                weights_version=version)) for i, s in enumerate((1, 0.5))]
            calls *= 3
            rng.shuffle(calls)
            for name, request in calls:
                # Goes to any worker; the first one that got the call has the answer.
                try:
                    clients[0].call(name, request)
                except grpc.RpcError as error:
                    raise AssertionError(wire.error_reason(error)) from error
                what = refusal(clients[-1].call, name, request)[0] if len(clients) > 1 else None
                self.assertIn(what, (None, ("FAILED_PRECONDITION", "RECORDED_ELSEWHERE")))
            for _ in range(3):
                step = rng.choice(clients).optimizer_step(step=phase + 1, expected_backwards=2)
            version = step.weights_version
            self.assertEqual(version, phase + 2)
            routing = [clients[0].forward(layer, x * s) for s in (1, 0.5)]
        for client in clients:
            client.close()
        return routing[0].y_data, step.grad_norm

    def test_repeats_in_any_order_leave_the_same_state(self):
        results = []
        for seed in range(4):
            with training_group(FAMILY, 2) as g:
                results.append(self.run_program(g.endpoints, seed))
        self.assertEqual(len(set(results)), 1)

    def test_repeats_of_calls_in_flight_are_run_once(self):
        layer, x, dy = case()
        with training_group(FAMILY, 2) as g:
            t = Trainer(g.endpoints[0])
            routing = t.forward(layer, x)
            call = t.channel.unary_unary("/moe.v1.TrainingService/Backward",
                                         response_deserializer=training.BackwardResponse.FromString)
            for batch in range(1, 11):
                raw = t.backward_request(layer, dy, x, routing, batch=batch).SerializeToString()
                answers = [f.result() for f in [call.future(raw, timeout=30) for _ in range(6)]]
                self.assertEqual(len({a.dx for a in answers}), 1)
                self.assertEqual(sum(not a.repeated for a in answers), 1)
            self.assertEqual(t.state().backwards, 10)
            t.close()


class Versions(unittest.TestCase):
    def test_a_restarted_group_has_a_new_lineage(self):
        layer, x, dy = case()
        lineages = []
        for _ in range(2):
            with training_group(FAMILY, 2) as g:
                t = Trainer(g.endpoints[0])
                lineages.append(t.state().lineage)
                t.optimizer_step(lineage=lineages[-1])
                if len(lineages) > 1:  # a trainer of the previous group at this address
                    what, _ = refusal(t.backward, layer, dy, x, t.forward(layer, x),
                                      lineage=lineages[0])
                    self.assertEqual(what, ("FAILED_PRECONDITION", "STATE_LOST"))
                t.close()
        print("    lineages", lineages)
        self.assertNotEqual(lineages[0], lineages[1])
        self.assertLess(max(lineages), 2**53)  # a number in JSON, too

    def test_pins_and_lineage(self):
        layer, x, dy = case()
        with training_group(FAMILY, 2) as g:
            t = Trainer(g.endpoints[1])
            lineage = t.state().lineage
            routing = t.forward(layer, x, weights_version=1)
            t.backward(layer, dy, x, routing, weights_version=1, lineage=lineage)
            t.optimizer_step()
            self.assertEqual(t.forward(layer, x).weights_version, 2)
            mismatch = ("FAILED_PRECONDITION", "VERSION_MISMATCH")
            self.assertEqual(refusal(t.forward, layer, x, weights_version=1)[0], mismatch)
            self.assertEqual(
                refusal(t.backward, layer, dy, x, routing, weights_version=1)[0], mismatch)
            self.assertEqual(
                refusal(t.backward, layer, dy, x, routing, lineage=lineage + 1)[0],
                ("FAILED_PRECONDITION", "STATE_LOST"))
            self.assertEqual(refusal(t.optimizer_step, lineage=lineage + 1)[0],
                             ("FAILED_PRECONDITION", "STATE_LOST"))
            # A retained pass belongs to its version.
            t.forward(layer, x, retain=100)
            t.optimizer_step()
            self.assertEqual(refusal(t.backward, layer, dy, batch=100)[0], mismatch)
            t.close()

    def test_a_missing_gradient_is_reported(self):
        layer, x, dy = case()
        with training_group(FAMILY, 1) as g:
            t = Trainer(g.endpoints[0])
            t.backward(layer, dy, x, t.forward(layer, x))
            self.assertEqual(refusal(t.optimizer_step, expected_backwards=2, step=1)[0],
                             ("FAILED_PRECONDITION", "GRADIENTS_MISSING"))
            self.assertEqual(t.optimizer_step(expected_backwards=1, step=1).weights_version, 2)
            t.close()

    def test_gradients_that_are_not_finite_move_nothing(self):
        layer, x, dy = case()
        with training_group(FAMILY, 2) as g:
            t = Trainer(g.endpoints[0])
            routing = t.forward(layer, x)
            bad = dy.copy()
            bad[3, 5] = np.nan
            t.backward(layer, bad, x, routing)
            step = t.optimizer_step()
            self.assertTrue(step.skipped_nonfinite)
            self.assertEqual((step.weights_version, step.steps), (1, 0))
            self.assertEqual(t.forward(layer, x).y_data, routing.y_data)
            t.backward(layer, dy, x, routing)
            step = t.optimizer_step()
            self.assertFalse(step.skipped_nonfinite)
            self.assertEqual((step.weights_version, step.steps), (2, 1))
            t.close()

    def test_frozen_parts_do_not_learn(self):
        layer, x, dy = case()
        with training_group(FAMILY, 2, "--freeze", "router") as g:
            t = Trainer(g.endpoints[0])
            routing = t.forward(layer, x)
            self.assertTrue(t.state().router_frozen)
            self.assertEqual(
                refusal(t.call, "SetFrozen", training.SetFrozenRequest(step_id=1, shared=True))[0],
                ("FAILED_PRECONDITION", "UNSUPPORTED"))
            everything = dict(router=True, experts=True, shared=True)
            t.call("SetFrozen", training.SetFrozenRequest(step_id=2, **everything))
            t.backward(layer, dy, x, routing)
            self.assertEqual(t.optimizer_step(step=3).grad_norm, 0)
            self.assertEqual(t.forward(layer, x).y_data, routing.y_data)
            t.call("SetFrozen", training.SetFrozenRequest(step_id=4, router=True))
            t.backward(layer, dy, x, routing)
            self.assertGreater(t.optimizer_step(step=5).grad_norm, 0)
            self.assertNotEqual(t.forward(layer, x).y_data, routing.y_data)
            t.close()


class BadInput(unittest.TestCase):
    def test_every_mistake_has_its_reason(self):
        layer, x, dy = case()
        with training_group(FAMILY, 1, "--max-tokens-per-step", "32", "--retained-bytes",
                            "128K") as g:
            t = Trainer(g.endpoints[0])
            few, few_dy = x[:8].copy(), dy[:8].copy()
            routing = t.forward(layer, few)

            def backward(**changes):
                request = t.backward_request(layer, few_dy, few, routing)
                for name, value in changes.items():
                    setattr(request, name, value)
                return refusal(t.call, "Backward", request)[0]

            bad = "INVALID_ARGUMENT"
            for session in ("", ".x", "a/b", "a b", "a" * 65, "\u00e4", "a\n"):
                self.assertEqual(backward(session=session), (bad, "NAME_INVALID"), session)
            self.assertEqual(backward(micro_batch_id=0), (bad, "VALUE_INVALID"))
            for value in (-1.0, float("nan"), float("inf")):
                self.assertEqual(backward(aux_coeff=value), (bad, "VALUE_INVALID"))
            self.assertEqual(backward(aux_convention=3), (bad, "VALUE_INVALID"))
            self.assertEqual(backward(layer=99), ("NOT_FOUND", "LAYER_NOT_FOUND"))
            self.assertEqual(backward(model="other"), ("NOT_FOUND", "MODEL_NOT_FOUND"))
            self.assertEqual(backward(dtype=3), (bad, "DTYPE_UNSUPPORTED"))
            self.assertEqual(backward(hidden=3), (bad, "SHAPE_MISMATCH"))
            self.assertEqual(backward(tokens=9), (bad, "SHAPE_MISMATCH"))
            self.assertEqual(backward(dy=b""), (bad, "SHAPE_MISMATCH"))
            self.assertEqual(backward(routing_mode=1), (bad, "ROUTING_INVALID"))
            self.assertEqual(backward(topk_ids=b""), (bad, "ROUTING_INVALID"))
            self.assertEqual(backward(topk_ids=b"\xff" * len(routing.topk_ids)),
                             (bad, "EXPERT_INDEX_RANGE"))
            self.assertEqual(backward(routing_mode=3), (bad, "ROUTING_INVALID"))
            self.assertEqual(backward(x=b""), (bad, "ROUTING_INVALID"))
            self.assertEqual(refusal(t.backward, layer, dy, x, t.forward(layer, x))[0],
                             (bad, "TOKEN_LIMIT"))
            self.assertEqual(refusal(t.forward, layer, x, retain=1)[0], (bad, "TOKEN_LIMIT"))
            self.assertEqual(refusal(t.backward, layer, few_dy, batch=77)[0],
                             ("FAILED_PRECONDITION", "RETAINED_PASS_GONE"))
            for fields in (dict(learning_rate=-1), dict(beta1=1.0), dict(beta2=-0.1),
                           dict(epsilon=float("nan")), dict(momentum=2), dict(step=0),
                           dict(optimizer=2), dict(grad_scale=float("inf")),
                           dict(max_grad_norm=-1)):
                self.assertEqual(refusal(t.optimizer_step, **fields)[0], (bad, "VALUE_INVALID"),
                                 fields)
            for name in ("", "..", "../x", "/etc", "a" * 65, ".hidden"):
                self.assertEqual(refusal(t.call, "SaveCheckpoint", training.SaveCheckpointRequest(
                    step_id=50, name=name))[0], (bad, "NAME_INVALID"), name)
            self.assertEqual(refusal(t.call, "SaveCheckpoint", training.SaveCheckpointRequest(
                step_id=50, name="good"))[0], ("FAILED_PRECONDITION", "UNSUPPORTED"))
            self.assertEqual(refusal(t.call, "ExportAdapter", training.ExportAdapterRequest(
                step_id=50, name="good"))[0], ("FAILED_PRECONDITION", "UNSUPPORTED"))
            # The refused calls changed nothing.
            state = t.state()
            self.assertEqual((state.backwards, state.weights_version, state.last_step_id),
                             (0, 1, 0))
            t.batch += 1
            self.assertEqual(t.backward(layer, few_dy, few, routing).weights_version, 1)
            t.close()

    def test_retained_passes_stay_within_their_budget(self):
        layer, x, dy = case()
        x, dy = x[:32].copy(), dy[:32].copy()
        with training_group(FAMILY, 1, "--retained-bytes", "64K") as g:
            t = Trainer(g.endpoints[0])
            for batch in range(1, 40):
                self.assertTrue(t.forward(layer, x, retain=batch).retained)
                self.assertLessEqual(t.state().retained_bytes, 64 << 10)
            self.assertEqual(refusal(t.backward, layer, dy, batch=1)[0],
                             ("FAILED_PRECONDITION", "RETAINED_PASS_GONE"))
            self.assertTrue(t.backward(layer, dy, batch=39).used_retained)
            t.close()

    def test_moectl_shows_the_state_of_training(self):
        with tempfile.NamedTemporaryFile("w", suffix=".conf") as config:
            config.write("training = sgd\nlora-rank = 2\nlora-targets = gate,down\n")
            config.flush()
            with group(FAMILY, 2, "--worker-config", config.name) as g:
                said = json.loads(
                    moectl("training", "--endpoint", g.endpoint, "-o", "json").stdout)
                self.assertEqual((said["optimizer"], said["weightsVersion"], said["loraTargets"]),
                                 ("SGD", "1", ["gate", "down"]))
                self.assertIn("rank 2", moectl("training", "--endpoint", g.endpoint).stdout)
        with group(FAMILY, 1) as g:
            self.assertEqual(
                moectl("training", "--endpoint", g.endpoint, check=False).returncode, 4)
            self.assertEqual(moectl("up", "--model", model_directory(FAMILY), "--worker-config",
                                    "/nonexistent", check=False).returncode, 4)

    def test_moectl_makes_an_operators_changes(self):
        layer, x, dy = case()
        with training_group(FAMILY, 2) as g:
            here = ("--endpoint", g.endpoints[0])
            t = Trainer(g.endpoints[1])
            t.backward(layer, dy, x, t.forward(layer, x))
            self.assertIn("of 1 Backward call\n", moectl("training", "zero-grad", *here).stdout)
            # Slot 0 has answered; slot 1 runs the same ticket later.
            wait_until(lambda: t.state().backwards == 0)
            said = json.loads(moectl("training", "freeze", "router,shared", "-o", "json",
                                     *here).stdout)
            self.assertEqual((said["kind"], said["router"], said["experts"], said["shared"]),
                             ("Frozen", True, False, True))
            wait_until(lambda: t.state().last_step_id == 2)
            state = t.state()
            self.assertEqual((state.router_frozen, state.experts_frozen, state.shared_frozen),
                             (True, False, True))
            moectl("training", "freeze", "none", "--step-id", "9", *here)
            moectl("training", "freeze", "none", "--step-id", "9", *here)  # a repeat
            wait_until(lambda: not t.state().router_frozen)
            self.assertEqual(moectl("training", "freeze", "experts", "--step-id", "9", *here,
                                    check=False).returncode, 7)
            self.assertEqual(t.state().last_step_id, 9)
            self.assertIn("learns", moectl("training", "status", *here).stdout)
            for action in ("save", "load", "export"):  # without --training-dir
                self.assertEqual(moectl("training", action, "a", *here, check=False).returncode, 7)
            self.assertEqual(moectl("training", "merge", *here, check=False).returncode, 7)
            self.assertEqual(t.state().last_step_id, 9)
            t.close()

    def test_moectl_refuses_wrong_command_lines_without_a_call(self):
        for words in (("nonsense", ), ("save", ), ("load", ), ("export", ), ("freeze", ),
                      ("freeze", "head"), ("freeze", "router,"), ("freeze", ""), ("zero-grad", "x"),
                      ("merge", "x"), ("status", "x"), ("save", "a", "b"), ("save", "a", "--keep",
                                                                            "-1"), ("save", "../a"),
                      ("load", ".a"), ("recover", "a b"), ("export", "a" * 65), ("recover", ),
                      ("recover-model", "a"), ("load", "a", "--keep", "2"),
                      ("export", "a", "--keep", "0"), ("status", "--keep", "1"), ("--step-id", "1"),
                      ("recover", "a", "--step-id", "1"), ("recover-model", "--step-id", "1")):
            done = moectl("training", *words, "--endpoint", "127.0.0.1:1", check=False)
            self.assertEqual((done.returncode, done.stdout), (2, ""), words)
            self.assertEqual(done.stderr.count("\n"), 1, done.stderr)
        said = moectl("training", "--help").stdout
        for action in ("save NAME", "load NAME", "export NAME", "merge", "zero-grad",
                       "freeze PARTS", "--keep", "--step-id"):
            self.assertIn(action, said)

    def test_settings_of_training_need_training(self):
        start = [WORKER, "--model", model_directory(FAMILY), "--coordinator", "127.0.0.1:1"]
        with tempfile.NamedTemporaryFile("w", suffix=".conf") as config:
            config.write("retained-bytes = 1G\n")  # the default value, but given explicitly
            config.flush()
            for options, text in (
                    (["--retained-device-bytes", "1G"], "--retained-device-bytes needs --training"),
                    (["--config", config.name], "--retained-bytes needs --training"),
                    (["--training", "off", "--retained-seconds", "9"], "--retained-seconds needs"),
                    (["--freeze", "router"], "--freeze needs --training"),
                    (["--training-share", "0.5"], "--training-share needs --training"),
                    (["--training-dir", "/tmp"], "--training-dir needs --training"),
                    (["--lora-rank", "4"], "--lora-rank needs --training"),
                    (["--training", "sgd", "--lora-alpha", "8"], "--lora-alpha needs --lora-rank"),
                    (["--training", "sgd", "--lora-targets", "up"],
                     "--lora-targets needs --lora-rank")):
                done = subprocess.run([*start, *options], stdout=subprocess.PIPE,
                                      stderr=subprocess.PIPE, text=True, timeout=60)
                self.assertEqual((done.returncode, done.stdout), (2, ""), options)
                self.assertIn("moe-worker: " + text, done.stderr)

    def test_an_old_setting_is_answered_by_its_new_name(self):
        start = [WORKER, "--model", model_directory(FAMILY), "--coordinator", "127.0.0.1:1",
                 "--training", "sgd"]
        with tempfile.NamedTemporaryFile("w", suffix=".conf") as config:
            config.write("saved-seconds = 9\n")
            config.flush()
            for options, text in (
                    (["--saved-bytes", "1G"], "--saved-bytes is now --retained-bytes"),
                    (["--saved-device-bytes=1G"],
                     "--saved-device-bytes is now --retained-device-bytes"),
                    (["--saved-seconds", "9"], "--saved-seconds is now --retained-seconds"),
                    (["--config", config.name], ":1: saved-seconds is now retained-seconds")):
                done = subprocess.run([*start, *options], stdout=subprocess.PIPE,
                                      stderr=subprocess.PIPE, text=True, timeout=60)
                self.assertEqual((done.returncode, done.stdout), (2, ""), options)
                self.assertIn(text, done.stderr)

    def test_health_knows_the_service_where_it_is_offered(self):
        def check(channel):
            call = channel.unary_unary("/grpc.health.v1.Health/Check")
            return call(b"\n\x16moe.v1.TrainingService", timeout=10)

        with training_group(FAMILY, 2) as g, wire.open_channel(g.endpoints[0]) as channel:
            self.assertEqual(check(channel), b"\x08\x01")  # SERVING
            g.kill_worker(1)
            wait_until(lambda: check(channel) == b"\x08\x02")  # NOT_SERVING
        with group(FAMILY, 1) as g, wire.open_channel(g.endpoint) as channel:
            with self.assertRaises(grpc.RpcError) as caught:
                check(channel)
            self.assertEqual(caught.exception.code().name, "NOT_FOUND")  # SERVICE_UNKNOWN of Watch

    def test_without_training_there_is_no_service(self):
        layer, x, dy = case()
        with group(FAMILY, 1) as g:
            t = Trainer(g.endpoint)
            with self.assertRaises(grpc.RpcError) as caught:
                t.state()
            self.assertEqual(caught.exception.code().name, "UNIMPLEMENTED")
            self.assertNotIn("training", wire.get_server_info(t.channel).extensions)
            self.assertEqual(refusal(t.forward, layer, x, retain=1)[0],
                             ("UNIMPLEMENTED", "UNSUPPORTED"))
            t.close()


if __name__ == "__main__":
    main()
