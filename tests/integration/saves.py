# SPDX-License-Identifier: Apache-2.0
"""Training groups that save on a slow disk, and their clients."""

import os
import shutil
import subprocess
import tempfile
import threading
import unittest

import grpc

from group import BUILD, MOECTL, names_in
from training import Trainer, golden_gradients, training_group
import wire
from wire import training

FAMILY = "deepseek_v3"
LORA = ("--lora-rank", "4", "--lora-alpha", "8", "--lora-targets", "gate,up,down")


class Client(Trainer):
    def __init__(self, g, slot=0):
        Trainer.__init__(self, g.endpoints[slot])
        self.layer, self.x, self.dy = next(
            (layer, x, dy) for layer, tokens, x, dy, _ in golden_gradients(FAMILY) if tokens == 37)

    def ask(self):
        return self.forward(self.layer, self.x).y_data

    def train(self, number):
        """Runs a micro batch and a step; returns their observable results."""
        routing = self.forward(self.layer, self.x)
        back = self.backward(self.layer, self.dy * number, self.x, routing, batch=number)
        step = self.optimizer_step(step=10 * number, expected_backwards=1)
        return [routing.y_data, back.dx, step.grad_norm, step.steps, self.ask()]

    def save(self, name, step, timeout=60, keep=0):
        return wire.train(self.channel, "SaveCheckpoint", training.SaveCheckpointRequest(
            step_id=step, name=name, keep=keep), timeout)

    def load(self, name, step):
        return self.call("LoadCheckpoint", training.LoadCheckpointRequest(step_id=step, name=name))


class Background:
    """A call on a separate thread."""

    def __init__(self, call, *arguments, **fields):
        self.answer = self.error = None
        self.thread = threading.Thread(target=self.run, args=(call, arguments, fields))
        self.thread.start()

    def run(self, call, arguments, fields):
        try:
            self.answer = call(*arguments, **fields)
        except grpc.RpcError as error:
            self.error = error

    def result(self):
        self.thread.join()
        if self.error is not None:
            raise self.error
        return self.answer


class Saves(unittest.TestCase):
    """Training groups; a test can hold the writing of their files (gated_fsync.c)."""

    def setUp(self):
        self.root = tempfile.mkdtemp(prefix="moed-saving-")
        self.gate = self.root + ".gate"
        self.addCleanup(shutil.rmtree, self.root, ignore_errors=True)
        self.addCleanup(self.open_gate)
        self.addCleanup(self.open_gate, ".copy")

    def close_gate(self, of=""):
        """Blocks writing; with ".copy", blocks copying."""
        open(self.gate + of, "w").close()

    def open_gate(self, of=""):
        if os.path.exists(self.gate + of):
            os.remove(self.gate + of)

    def group(self, workers, *extra, of=None, **more):
        environment = {
            "LD_PRELOAD": os.path.join(BUILD, "tests", "integration", "libgated_fsync.so"),
            "MOE_TEST_GATE": self.gate,
            "ASAN_OPTIONS": os.environ.get("ASAN_OPTIONS", "") + ":verify_asan_link_order=0",
            **more
        }
        if of is not None:
            environment["MOE_TEST_GATE_OF"] = of
        return training_group(FAMILY, workers, "--training-dir", self.root, *extra,
                              environment=environment)

    def saving(self, g):
        """Names of checkpoints that the workers are writing."""
        names = set()
        for slot in range(len(g.workers)):
            client = Client(g, slot)
            names.add(client.state().saving)
            client.close()
        return names

    def moectl(self, g, code, text, *words):
        done = subprocess.run([MOECTL, "training", *words, "--endpoint", g.endpoints[-1]],
                              stdout=subprocess.PIPE,
                              stderr=subprocess.STDOUT,
                              text=True,
                              timeout=60)
        self.assertEqual(done.returncode, code, done.stdout)
        self.assertIn(text, done.stdout)

    def names(self):
        return names_in(self.root)

    def hidden(self, name):
        """Directories of a checkpoint `name` that is being written."""
        return [n for n in self.names() if n.startswith(".%s." % name) and n.endswith(".saving")]
