# SPDX-License-Identifier: Apache-2.0
"""What tests of training with two copies of each expert share: a client, and a group of four
workers. Slots 0 and 2 have the same experts, and so have 1 and 3. With fewer than four devices the
group has two workers, both with all experts."""

import os
import shutil
import tempfile
import time
import unittest

import grpc
import numpy as np

from group import DEVICES, wait_until
import moed
from training import Trainer, golden_gradients, training_group
import wire
from wire import training

FAMILY = "deepseek_v3"
WORKERS = 4 if DEVICES >= 4 else 2
LAST = WORKERS - 1  # a slot
TWIN = LAST - WORKERS // 2  # has the experts of the last one
# Rows of an expert are computed by other slots without the lost one, so sums have another order.
LIMIT = 1e-5


def relative_error(got, want):
    got = np.frombuffer(got, np.float32).astype(np.float64)
    want = np.frombuffer(want, np.float32).astype(np.float64)
    return np.linalg.norm(got - want) / np.linalg.norm(want)


class Client(Trainer):
    """A training loop that names the lineage in each call. `accepted` has what counts: of each step
    a list of micro batches, of other changes a tuple with the method's name, and its fields."""

    def __init__(self, g, slot=0):
        Trainer.__init__(self, g.endpoints[slot])
        self.layer, self.x, self.dy = next(
            (layer, x, dy) for layer, tokens, x, dy, _ in golden_gradients(FAMILY) if tokens == 37)
        self.accepted = []
        self.begin()

    def begin(self):
        state = self.state()
        self.lineage, self.step = state.lineage, state.last_step_id
        self.version = state.weights_version
        return state

    def use(self, endpoint):
        """Further calls are made to another worker."""
        self.channel.close()
        self.channel = wire.open_channel(endpoint)

    def ask(self):
        return self.forward(self.layer, self.x).y_data

    def feed(self, batch, **fields):
        """Another micro batch each time."""
        x = self.x * (1 + batch % 7 / 8)
        routing = self.forward(self.layer, x)
        return self.backward(self.layer, self.dy * (1 + batch % 5), x, routing, batch=batch,
                             lineage=self.lineage, **fields)

    def take_step(self, batches, step=None):
        return self.optimizer_step(step=step, lineage=self.lineage, weight_decay=0.1,
                                   max_grad_norm=1, expected_backwards=batches)

    def train(self, steps, batches=2):
        """Without a fault."""
        for _ in range(steps):
            first = 10 * len(self.accepted) + 1
            ids = range(first, first + batches)
            for batch in ids:
                self.feed(batch)
            self.take_step(batches)
            self.accepted.append(list(ids))

    def save(self, name, step=None):
        if step is None:
            step = self.step = self.step + 1
        return wire.train(self.channel, "SaveCheckpoint", training.SaveCheckpointRequest(
            step_id=step, name=name, lineage=self.lineage), 60)

    def load(self, name, step):
        return wire.train(self.channel, "LoadCheckpoint", training.LoadCheckpointRequest(
            step_id=step, name=name, lineage=self.lineage), 60)

    def zero_grad(self, step):
        return self.call("ZeroGrad", training.ZeroGradRequest(step_id=step, lineage=self.lineage))

    def replay(self, accepted):
        """Does what another client's `accepted` says."""
        for each in accepted:
            if isinstance(each, tuple):
                self.step += 1
                getattr(self, each[0])(self.step, **each[1])
                continue
            for batch in each:
                self.feed(batch)
            self.take_step(len(each))

    def set_frozen(self, step, **frozen):
        return self.call("SetFrozen", training.SetFrozenRequest(
            step_id=step, lineage=self.lineage, **frozen))

    def merge(self, step):
        return self.call("ExportAdapter", training.ExportAdapterRequest(
            step_id=step, lineage=self.lineage, merge=True))

    def persist(self, call, elsewhere=None, seconds=60):
        """Repeats a call while the group forms, at the worker `elsewhere` if there is one. Returns
        its answer, or the reason of a refusal."""
        end = time.monotonic() + seconds
        while True:
            try:
                return call(), None
            except grpc.RpcError as error:
                reason = wire.error_reason(error)[0]
                if error.code() == grpc.StatusCode.FAILED_PRECONDITION:
                    return None, reason
                if error.code() != grpc.StatusCode.UNAVAILABLE or time.monotonic() > end:
                    raise
                if elsewhere is not None:
                    self.use(elsewhere)
                time.sleep(0.01)


class Copies(unittest.TestCase):
    EXTRA = ()  # options of all workers

    def setUp(self):
        self.root = tempfile.mkdtemp(prefix="moed-copies-")
        self.addCleanup(shutil.rmtree, self.root, ignore_errors=True)

    def group(self, *extra, workers=WORKERS, replicas=2, lease_ms=5000, budget_ms=10000, **options):
        """On a busy machine, too, no view ends but for a fault of the test."""
        return training_group(FAMILY, workers, "--training-dir", self.root, "--wait-budget-ms",
                              str(budget_ms), *self.EXTRA, *extra, lease_ms=lease_ms,
                              replicas=replicas, **options)

    def compare(self, client, limit=LIMIT):
        """Its group's answer with that of a group without a loss."""
        answer = client.ask()
        with training_group(FAMILY, WORKERS, *self.EXTRA, lease_ms=3000, replicas=2) as g:
            other = Client(g)
            other.replay(client.accepted)
            error = relative_error(answer, other.ask())
            print("%d changes, error %.2g" % (len(client.accepted), error))
            self.assertLessEqual(error, limit)
            other.close()

    def lose(self, g, slot=LAST, other=None):
        """Returns when the others serve without it; `other` is one of them."""
        other = (slot + 1) % WORKERS if other is None else other
        epoch = g.info(other).epoch
        g.kill_worker(slot)
        wait_until(lambda: g.info(other).epoch > epoch)

    def tensors(self, name):
        """Of a checkpoint, by name: the state, with the file that has it, and the weights."""
        state, weights = {}, {}
        path = os.path.join(self.root, name)
        for folder, _, files in os.walk(path):
            for file in sorted(f for f in files if f.endswith(".safetensors")):
                part = moed.read_safetensors(os.path.join(folder, file))
                if folder == path:
                    weights.update(part)
                else:
                    state.update({tensor: (file, part[tensor]) for tensor in part})
        return state, weights

    def compare_bits(self, first, second, lost):
        """Two checkpoints of one state. In the second, others have written the lost slot's."""
        states, weights = zip(self.tensors(first), self.tensors(second))
        self.assertEqual(set(states[0]), set(states[1]))
        self.assertEqual(set(weights[0]), set(weights[1]))
        for name in weights[0]:
            self.assertTrue(weights[0][name].tobytes() == weights[1][name].tobytes(), name)
        experts = 0
        for name, (file, tensor) in states[0].items():
            other, again = states[1][name]
            self.assertTrue(tensor.tobytes() == again.tobytes(), name)
            if file == "slot-%05d.safetensors" % lost:
                self.assertNotEqual(other, file)
                experts += ".experts." in name
        print("%d tensors of experts that slot %d wrote" % (experts, lost))
        self.assertGreater(experts, 0)

    def join(self, g, client, slot, name, epoch):
        """Saves until the worker takes part. A ZeroGrad first: after a loss that no later step or
        ZeroGrad has confirmed, no Save lets it join."""
        end = time.monotonic() + 60
        for n in range(1000):
            for change in (client.zero_grad, lambda step: client.save("%s-%d" % (name, n), step)):
                step = client.step + 1
                _, reason = client.persist(lambda: change(step))
                if reason is None:
                    client.step = step
                elif reason in ("GRADIENTS_LOST", "STATE_LOST"):
                    client.begin()
                else:  # the files of a Save that a view has ended are being removed
                    self.assertEqual(reason, "SAVE_RUNNING")
            try:
                if g.info(slot).epoch > epoch:
                    return g.wait_serving(epoch)
            except grpc.RpcError:
                pass
            self.assertLess(time.monotonic(), end, "the worker does not join")
            time.sleep(0.5)
