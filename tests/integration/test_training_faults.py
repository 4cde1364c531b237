"""Training when a worker dies, and training beside clients that only want forward passes."""

import threading
import time
import unittest

import grpc
import numpy as np

from group import main
import wire
from training import Trainer, golden_gradients, refusal, training_group
from wire import expert

FAMILY = "deepseek_v3"


def case():
    return next((layer, x, dy) for layer, tokens, x, dy, _ in golden_gradients(FAMILY)
                if tokens == 37)


class Client:
    """Runs a fixed program of micro batches and steps, and begins it again, under the same ids, when
    the state it built on is lost: what a training loop without checkpoints does."""

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
                    raise LookupError("the state is another one")
                t.backward(self.layer, self.dy * (step + i), x, routing, batch=10 * step + i,
                           weights_version=version, lineage=state.lineage, aux_coeff=0.01)
                disturb(step, i)
            version = t.optimizer_step(step=step, lineage=state.lineage, weight_decay=0.1,
                                       max_grad_norm=1, expected_backwards=self.BATCHES,
                                       balance_rate=0.001).weights_version

    def run(self, disturb=lambda step, i: None, seconds=60):
        """Returns what the weights, moments and gradients have become: the answer of a forward pass,
        and of one more Backward and step."""
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
        """The same with worker `victim` killed behind micro batch `at`, and replaced."""
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
            # Calls of the old lineage are refused, whoever is asked.
            for endpoint in g.endpoints:
                t = Trainer(endpoint)
                self.assertEqual(t.state().lineage, after.lineage)
                self.assertEqual(refusal(t.optimizer_step, step=2000, lineage=before.lineage)[0],
                                 ("FAILED_PRECONDITION", "STATE_LOST"))
                t.close()
            return result

    def test_a_worker_killed_before_the_step_leaves_no_trace_after_the_replay(self):
        want = self.undisturbed(2)
        self.assertEqual(self.killed(2, 1, (3, 2)), want)  # between Backward and OptimizerStep
        self.assertEqual(self.killed(2, 1, (2, 0)), want)  # between two Backwards

    def test_a_member_of_four_killed(self):
        want = self.undisturbed(4)
        self.assertEqual(self.killed(4, 2, (2, 2)), want)

    def test_a_group_that_learnt_nothing_loses_nothing(self):
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


class MixedLoad(unittest.TestCase):
    CLIENTS, SECONDS = 8, 6

    def load(self, endpoints, share, train):
        """p50 and p99 of eight forward clients, in ms, and how far training came."""
        layer, x, dy = case()
        stop = threading.Event()
        times, failures, falls = [], [], []

        def forward_client(number):
            channels = [wire.open_channel(endpoint) for endpoint in endpoints]
            request = expert.ForwardRequest(layer=layer, tokens=x.shape[0], hidden=x.shape[1],
                                            dtype=1, x_data=x.tobytes()).SerializeToString()
            version, n = 0, number
            while not stop.is_set():
                begin = time.monotonic()
                try:
                    answer = wire.forward(channels[n % len(channels)], request)
                except grpc.RpcError as error:
                    failures.append((error.code().name, error.details()))
                    break
                times.append(time.monotonic() - begin)
                if answer.weights_version < version:
                    falls.append((version, answer.weights_version))
                version = answer.weights_version
                n += 1
            for channel in channels:
                channel.close()

        threads = [threading.Thread(target=forward_client, args=(i,)) for i in range(self.CLIENTS)]
        for thread in threads:
            thread.start()
        backwards = steps = 0
        end = time.monotonic() + self.SECONDS
        if train:
            t = Trainer(endpoints[0])
            routing = t.forward(layer, x)
            while time.monotonic() < end:
                for _ in range(4):
                    t.backward(layer, dy, x, routing)
                    backwards += 1
                steps += not t.optimizer_step(learning_rate=1e-4).skipped_nonfinite
            t.close()
        else:
            time.sleep(self.SECONDS)
        stop.set()
        for thread in threads:
            thread.join()
        p50, p99 = (float(np.percentile(np.array(times) * 1e3, q)) for q in (50, 99))
        print("share %-5s %6d forward passes, p50 %6.2f ms, p99 %6.2f ms; %d Backward, %d steps" % (
            share if train else "none", len(times), p50, p99, backwards, steps))
        self.assertEqual(failures, [])
        self.assertEqual(falls, [])
        if train:
            self.assertGreater(steps, 3)
        return p99

    def test_forward_clients_do_not_notice_more_than_their_share(self):
        for share in ("0.1", "0.5"):
            with training_group(FAMILY, 2, "--training-share", share) as g:
                alone = self.load(g.endpoints, share, False)
                beside = self.load(g.endpoints, share, True)
                self.assertLess(beside, 10 * alone + 50)

    def test_a_request_of_many_steps_sees_one_version(self):
        """Rows of a request that an optimizer step comes between are computed again."""
        layer, x, dy = case()
        with training_group(FAMILY, 2, "--max-tokens-per-step", "64") as g:
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
            end = time.monotonic() + 8
            while time.monotonic() < end:
                t.backward(layer, dy, x, routing)
                t.optimizer_step(learning_rate=1e-3)
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
