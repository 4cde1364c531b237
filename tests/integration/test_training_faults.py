# SPDX-License-Identifier: Apache-2.0
"""Training when a worker dies, and training next to clients that make forward passes only."""

import threading
import time
import unittest

import grpc
import numpy as np

from group import main, wait_until
from load import Load
import wire
from training import Trainer, golden_gradients, refusal, training_group

FAMILY = "deepseek_v3"


def case():
    return next((layer, x, dy) for layer, tokens, x, dy, _ in golden_gradients(FAMILY)
                if tokens == 37)


class Client:
    """Runs a fixed program of micro batches and steps. When its state is lost, it begins again
    under the same ids, as a training loop without checkpoints does."""

    STEPS, BATCHES = 4, 3

    def __init__(self, endpoint):
        self.trainer = Trainer(endpoint)
        self.layer, self.x, self.dy = case()
        self.restarts = 0

    def attempt(self, disturb):
        t = self.trainer
        state = t.state()
        version = state.weights_version
        for step in range(1, self.STEPS + 1):
            for i in range(self.BATCHES):
                x = self.x * (1 + i / 4)
                routing = t.forward(self.layer, x)
                if routing.weights_version != version:
                    raise LookupError("the state is not the expected one")
                t.backward(self.layer, self.dy * (step + i), x, routing, batch=10 * step + i,
                           weights_version=version, lineage=state.lineage, aux_coeff=0.01)
                disturb(step, i)
            version = t.optimizer_step(step=step, lineage=state.lineage, weight_decay=0.1,
                                       max_grad_norm=1, expected_backwards=self.BATCHES,
                                       balance_rate=0.001).weights_version

    def run(self, disturb=lambda step, i: None, seconds=60):
        """Returns results that depend on weights, moments and gradients: the answers of a forward
        pass, of one more Backward and of a step."""
        end = time.monotonic() + seconds
        reasons = set()
        while True:
            try:
                self.attempt(disturb)
                break
            except (grpc.RpcError, LookupError) as error:
                if isinstance(error, grpc.RpcError):
                    reason = wire.error_reason(error)[0]
                    reasons.add((error.code().name, reason))
                    if error.code().name not in ("UNAVAILABLE", "DEADLINE_EXCEEDED") and (
                            reason not in ("STATE_LOST", "VERSION_MISMATCH")):
                        raise
                if time.monotonic() > end:
                    raise
                self.restarts += 1
                time.sleep(0.1)
        t = self.trainer
        routing = t.forward(self.layer, self.x)
        last = t.backward(self.layer, self.dy, self.x, routing, batch=1000)
        step = t.optimizer_step(step=1000, learning_rate=0.02)
        after = t.forward(self.layer, self.x)
        print("restarts %d, seen %s" % (self.restarts, sorted(reasons)))
        return routing.y_data, last.dx, step.grad_norm, step.steps, after.y_data


class Faults(unittest.TestCase):
    def undisturbed(self, workers):
        with training_group(FAMILY, workers) as g:
            return Client(g.endpoints[0]).run()

    def killed(self, workers, victim, at):
        """The same, but worker `victim` is killed after micro batch `at` and replaced."""
        with training_group(FAMILY, workers, "--wait-budget-ms", "500") as g:
            client = Client(g.endpoints[0])
            before = client.trainer.state()
            done = []

            def disturb(step, i):
                if (step, i) == at and not done:
                    done.append(1)
                    g.kill_worker(victim)
                    g.start_worker(victim, "--wait-budget-ms", "500")

            result = client.run(disturb)
            g.wait_serving(1)
            after = client.trainer.state()
            self.assertTrue(done)
            self.assertGreater(client.restarts, 0)
            self.assertGreater(after.lineage, before.lineage)
            self.assertGreater(after.weights_version, before.weights_version + Client.STEPS)
            # Every worker refuses calls of the old lineage.
            for endpoint in g.endpoints:
                t = Trainer(endpoint)
                self.assertEqual(t.state().lineage, after.lineage)
                self.assertEqual(refusal(t.optimizer_step, step=2000, lineage=before.lineage)[0],
                                 ("FAILED_PRECONDITION", "STATE_LOST"))
                t.close()
            return result

    def test_a_replay_after_a_killed_worker_gives_the_same_state(self):
        want = self.undisturbed(2)
        self.assertEqual(self.killed(2, 1, (3, 2)), want)  # between Backward and OptimizerStep
        self.assertEqual(self.killed(2, 1, (2, 0)), want)  # between two Backwards

    def test_a_worker_of_four_dies(self):
        want = self.undisturbed(4)
        self.assertEqual(self.killed(4, 2, (2, 2)), want)

    def test_an_untrained_group_loses_no_state(self):
        layer, x, _ = case()
        with training_group(FAMILY, 2, "--wait-budget-ms", "500") as g:
            t = Trainer(g.endpoints[0])
            y = t.forward(layer, x).y_data
            epoch = g.info().epoch
            g.kill_worker(1)
            g.start_worker(1)
            g.wait_serving(epoch)
            answer = t.forward(layer, x)
            self.assertEqual((answer.weights_version, answer.y_data), (1, y))
            t.close()

    def test_workers_started_differently_do_not_form_a_group(self):
        from training import TrainingGroup
        g = TrainingGroup(FAMILY, 1, "--training", "adamw")
        self.assertTrue(all(code == 0 for code in g.stop()))
        with self.assertRaises(RuntimeError):
            class Mixed(TrainingGroup):
                def start_worker(self, slot, *extra):
                    TrainingGroup.start_worker(self, slot, "--training",
                                               ("adamw", "sgd")[slot], *extra)

                def wait_serving(self, above=0, seconds=5):
                    try:
                        return TrainingGroup.wait_serving(self, above, seconds)
                    except RuntimeError:
                        self.stop()
                        raise
            Mixed(FAMILY, 2)


PATIENT_MS = 10000  # a lease that no busy machine lets end


class MixedLoad(unittest.TestCase):
    def test_forward_clients_go_on_during_training(self):
        """With every share, no call fails, no version decreases, and both sides make progress.
        tests/bench/while_training.py measures how long they wait for each other."""
        layer, x, dy = case()
        for share in ("0.1", "0.5"):
            with training_group(FAMILY, 2, "--training-share", share,
                                lease_ms=PATIENT_MS) as g, Load() as load:
                load.forwards(8, g.endpoints, layer, x)
                t = Trainer(g.endpoints[0])
                routing = t.forward(layer, x)
                steps = 0
                for _ in range(6):
                    for _ in range(4):
                        t.backward(layer, dy, x, routing)
                    load.wait_for_more()
                    steps += not t.optimizer_step(learning_rate=1e-4).skipped_nonfinite
                self.assertEqual((load.failures, load.falls, steps), ([], [], 6))
                t.close()

    def test_a_request_of_many_steps_sees_one_version(self):
        """If an optimizer step comes between rows of a request, the rows are computed again."""
        layer, x, dy = case()
        with training_group(FAMILY, 2, "--max-tokens-per-step", "64", lease_ms=PATIENT_MS) as g:
            many = np.tile(x, (60, 1))  # 35 steps
            stop = threading.Event()
            mixed, versions, failures = [], set(), []

            def client(endpoint):
                t = Trainer(endpoint, "other")
                try:
                    while not stop.is_set():
                        answer = t.forward(layer, many)
                        y = np.frombuffer(answer.y_data, np.float32).reshape(60, -1)
                        mixed.append(bool((y != y[0]).any()))
                        versions.add(answer.weights_version)
                except grpc.RpcError as error:
                    failures.append(error.details())
                t.close()

            threads = [threading.Thread(target=client, args=(e,)) for e in g.endpoints]
            for thread in threads:
                thread.start()
            t = Trainer(g.endpoints[0])
            routing = t.forward(layer, x)
            for _ in range(8):  # steps, each between two answers
                answered = len(mixed)
                t.backward(layer, dy, x, routing)
                t.optimizer_step(learning_rate=1e-3)
                wait_until(lambda: failures or len(mixed) > answered)
            stop.set()
            for thread in threads:
                thread.join()
            print("%d answers in %d versions of %d" % (
                len(mixed), len(versions), t.state().weights_version))
            self.assertEqual(failures, [])
            self.assertGreater(len(versions), 2)
            self.assertFalse(any(mixed))
            t.close()


if __name__ == "__main__":
    main()
