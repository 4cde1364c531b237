# SPDX-License-Identifier: Apache-2.0
"""Layers that route by token id (DeepSeek-V4's first ones): the caller gives the ids of the model's
table, the group weighs and computes.

The model is the golden DeepSeek-V4; its first layer becomes such a layer. Its answers are compared
with those of the same layer in the golden model, for the same ids and weights; and its weights with
numpy.
"""

import contextlib
import json
import os
import shutil
import tempfile
import unittest

import numpy as np

from group import Group, main, model_directory, moectl
import moed

VOCABULARY, TOP_K, EXPERTS, TOKENS = 50, 3, 8, 40


def with_table(folder):
    """Writes the model into `folder`. Returns the table, and the router in float64."""
    source = model_directory("deepseek_v4")
    with open(os.path.join(source, "config.json")) as file:
        config = json.load(file)
    config["mlp_layer_types"][0] = "hash_moe"
    with open(os.path.join(folder, "config.json"), "w") as file:
        json.dump(config, file)
    tensors = moed.read_safetensors(os.path.join(source, "model.safetensors"))
    del tensors["model.layers.0.ffn.gate.bias"]
    rng = np.random.default_rng(7)
    table = np.stack([rng.permutation(EXPERTS)[:TOP_K] for _ in range(VOCABULARY)])
    tensors["model.layers.0.ffn.gate.tid2eid"] = table.astype(np.int64)
    moed.write_safetensors(os.path.join(folder, "model.safetensors"), tensors)
    router = moed.f32(tensors["model.layers.0.ffn.gate.weight"]).astype(np.float64)
    return table.astype(np.int32), router, config["routed_scaling_factor"]


@contextlib.contextmanager
def served(folder, workers, *extra):
    g = Group(folder, workers, *extra)
    try:
        with moed.Client(g.endpoint) as client:
            yield g, client
    finally:
        code = g.stop()
    if code != 0:
        raise RuntimeError("moectl up ended with exit code %s" % code)


class TokenRouting(unittest.TestCase):
    def setUp(self):
        self.folder = tempfile.mkdtemp(prefix="moed-token-routing-")
        self.addCleanup(shutil.rmtree, self.folder, ignore_errors=True)
        self.table, self.router, self.scale = with_table(self.folder)
        rng = np.random.default_rng(8)
        hidden = self.router.shape[1]
        self.x = rng.standard_normal((TOKENS, hidden), np.float32)
        self.ids = self.table[rng.integers(VOCABULARY, size=TOKENS)]
        scores = np.sqrt(np.log1p(np.exp(self.x.astype(np.float64) @ self.router.T)))
        chosen = np.take_along_axis(scores, self.ids, axis=1)
        self.weights = (chosen / chosen.sum(axis=1, keepdims=True) * self.scale).astype(np.float32)

    def settings(self, line):
        path = os.path.join(self.folder, "worker.ini")
        with open(path, "w") as file:
            file.write(line + "\n")
        return "--worker-config", path

    def test_ids_of_the_table_are_weighed_and_computed(self):
        x, ids, weights = self.x, self.ids, self.weights
        with served(self.folder, 2) as (_, client):
            self.assertEqual([each.routes_by_token_id for each in client.layers], [True, False])
            seen = client.forward(0, x, topk_ids=ids, return_routing=True)
            np.testing.assert_array_equal(seen.topk_ids, ids)
            np.testing.assert_allclose(seen.topk_weights, weights, rtol=1e-5)
            got = client.forward(0, x, topk_ids=ids, topk_weights=seen.topk_weights)
            np.testing.assert_array_equal(got, seen.y)
            shared = client.forward(0, x, parts="shared")
            self.assertEqual(client.forward(1, x).shape, x.shape)  # has a router that chooses
        with served(model_directory("deepseek_v4"), 2) as (_, client):
            self.assertEqual([each.routes_by_token_id for each in client.layers], [False, False])
            want = client.forward(0, x, topk_ids=ids, topk_weights=seen.topk_weights)
            np.testing.assert_array_equal(got, want)
            np.testing.assert_array_equal(shared, client.forward(0, x, parts="shared"))

    def test_the_router_is_not_asked_to_choose(self):
        with served(self.folder, 1, *self.settings("allow-client-memory = 64M")) as (g, client):
            for given in ({}, {"return_routing": True}, {"parts": "routed"}):
                with self.assertRaisesRegex(moed.MoeError, "layer 0 routes by token id") as caught:
                    client.forward(0, self.x, **given)
                self.assertEqual(caught.exception.reason, "ROUTING_INVALID")
            self.assertEqual(client.forward(1, self.x).shape, self.x.shape)
            for transport in "inline", "shm":
                failed = moectl("bench", "--endpoint", g.endpoint, "--layer", "0", "--tokens", "4",
                                "--duration", "0.2", "--transport", transport, check=False)
                self.assertNotEqual(failed.returncode, 0)
                self.assertIn("routes by token id", failed.stdout + failed.stderr)

    def test_a_layer_that_trains_takes_the_ids_too(self):
        with served(self.folder, 1, *self.settings("training = adamw")) as (_, client):
            y = client.forward(0, self.x, topk_ids=self.ids)
            got = client.backward(0, np.ones_like(self.x), self.x, self.ids, session="s",
                                  micro_batch_id=1)
            self.assertEqual(got.dx.shape, self.x.shape)
            self.assertTrue(np.isfinite(got.dx).all() and np.isfinite(y).all())
            np.testing.assert_array_equal(y, client.forward(0, self.x, topk_ids=self.ids))
            client.optimizer_step(0.1, step_id=1, session="s")
            self.assertFalse(np.array_equal(y, client.forward(0, self.x, topk_ids=self.ids)))

    def test_a_table_elsewhere_is_not_understood(self):
        """A table in a layer with a router that chooses: the settings contradict the tensors."""
        with open(os.path.join(self.folder, "config.json")) as file:
            config = json.load(file)
        config["mlp_layer_types"][0] = "moe"
        with open(os.path.join(self.folder, "config.json"), "w") as file:
            json.dump(config, file)
        path = os.path.join(self.folder, "model.safetensors")
        tensors = moed.read_safetensors(path)
        tensors["model.layers.0.ffn.gate.bias"] = tensors["model.layers.1.ffn.gate.bias"]
        moed.write_safetensors(path, tensors)
        with tempfile.TemporaryDirectory() as state:
            failed = moectl("up", "--model", self.folder, "--workers", "1", "--port", "0",
                            "--backend", "cpu", "--state-dir", state, check=False)
        self.assertNotEqual(failed.returncode, 0)
        self.assertIn("tid2eid belongs to a MoE layer and is not understood",
                      failed.stdout + failed.stderr)


if __name__ == "__main__":
    main()
