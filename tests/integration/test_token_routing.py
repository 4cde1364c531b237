# SPDX-License-Identifier: Apache-2.0
"""Layers that route by token id (DeepSeek-V4's first ones): the caller gives token ids, or ids of
experts; the group weighs and computes.

The model is the golden DeepSeek-V4; its first layer becomes such a layer. The table gives the first
37 token ids the experts that transformers' router chose for the 37 recorded rows. So with these
token ids the layer has transformers' recorded answer. Other answers are compared with those of the
same layer in the golden model, for the same ids and weights; and weights with numpy.
"""

import asyncio

import contextlib
import json
import os
import shutil
import tempfile
import unittest

import numpy as np

from group import (BUILD, Group, golden_cases, is_sanitized, main, model_directory, moectl,
                   relative_error)
import moed

if is_sanitized():  # as in test_python_native.py
    moed.__path__.append(os.path.join(BUILD, "python_native"))

VOCABULARY, TOP_K, EXPERTS, TOKENS, RECORDED = 64, 3, 8, 40, 37
TABLE = "model.layers.0.ffn.gate.tid2eid"


def recorded():
    """(x, y) of the first layer's recorded pass."""
    return next((x, y) for layer, tokens, x, y in golden_cases("deepseek_v4")
                if layer == 0 and tokens == RECORDED)


def scores_of(x, router):
    return np.sqrt(np.log1p(np.exp(x.astype(np.float64) @ router.T)))


def with_table(folder):
    """Writes the model into `folder`. Returns the table, and the router in float64."""
    source = model_directory("deepseek_v4")
    with open(os.path.join(source, "config.json")) as file:
        config = json.load(file)
    config["mlp_layer_types"][0] = "hash_moe"
    with open(os.path.join(folder, "config.json"), "w") as file:
        json.dump(config, file)
    tensors = moed.read_safetensors(os.path.join(source, "model.safetensors"))
    bias = moed.f32(tensors.pop("model.layers.0.ffn.gate.bias"))
    router = moed.f32(tensors["model.layers.0.ffn.gate.weight"]).astype(np.float64)
    rng = np.random.default_rng(7)
    table = np.stack([rng.permutation(EXPERTS)[:TOP_K] for _ in range(VOCABULARY)])
    keys = scores_of(recorded()[0], router) + bias
    table[:RECORDED] = np.argsort(-keys, axis=1)[:, :TOP_K]
    tensors[TABLE] = table.astype(np.int64)
    moed.write_safetensors(os.path.join(folder, "model.safetensors"), tensors)
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
        self.token_ids = rng.integers(VOCABULARY, size=TOKENS)
        self.ids = self.table[self.token_ids]
        chosen = np.take_along_axis(scores_of(self.x, self.router), self.ids, axis=1)
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
            self.assertEqual([each.vocabulary for each in client.layers], [VOCABULARY, 0])
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

    def test_an_expert_twice_in_a_row_of_the_table_counts_twice(self):
        path = os.path.join(self.folder, "model.safetensors")
        tensors = moed.read_safetensors(path)
        tensors[TABLE] = table = tensors[TABLE].copy()
        table[:, 1] = table[:, 0]
        moed.write_safetensors(path, tensors)
        ids = table[self.token_ids].astype(np.int32)
        chosen = np.take_along_axis(scores_of(self.x, self.router), ids, axis=1)
        weights = (chosen / chosen.sum(axis=1, keepdims=True) * self.scale).astype(np.float32)
        with served(self.folder, 2) as (_, client):
            got = client.forward(0, self.x, token_ids=self.token_ids, return_routing=True)
            np.testing.assert_array_equal(got.topk_ids, ids)
            np.testing.assert_allclose(got.topk_weights, weights, rtol=1e-5)
        weights = got.topk_weights.copy()
        weights[:, 0] += weights[:, 1]
        weights[:, 1] = 0
        ids[:, 1] = (ids[:, 0] + 1) % EXPERTS
        with served(model_directory("deepseek_v4"), 2) as (_, client):
            once = client.forward(0, self.x, topk_ids=ids, topk_weights=weights)
        self.assertLessEqual(relative_error(got.y, once), 1e-6)

    def test_token_ids_give_the_recorded_answer(self):
        x, want = recorded()
        for workers in 1, 2:
            with served(self.folder, workers) as (g, client):
                y = client.forward(0, x, token_ids=np.arange(RECORDED))
                error = relative_error(y, want)
                print("    %d workers, error %.1e" % (workers, error))
                self.assertLessEqual(error, 1e-5)
                half = client.forward(0, moed.bf16(x), token_ids=np.arange(RECORDED))
                self.assertLessEqual(relative_error(moed.f32(half), want), 1e-2)

    def test_each_way_to_send_token_ids_has_the_same_bits(self):
        x, tokens = self.x, self.token_ids
        with served(self.folder, 1, *self.settings("allow-client-memory = 64M")) as (g, client):
            want = client.forward(0, x, topk_ids=self.ids, return_routing=True)
            seen = client.forward(0, x, token_ids=tokens, return_routing=True)
            np.testing.assert_array_equal(seen.topk_ids, self.ids)
            np.testing.assert_array_equal(seen.topk_weights, want.topk_weights)
            np.testing.assert_array_equal(seen.y, want.y)
            answers = [client.submit(0, x, token_ids=tokens.astype(np.int32)).result(60)]
            with client.stream() as stream:
                answers.append(stream.forward(0, x, token_ids=tokens))
                answers.append(stream.submit(0, x, token_ids=list(tokens)).result(60))
            with moed.Client(g.endpoint, transport="grpc") as plain:
                answers.append(plain.forward(0, x, token_ids=tokens))
                with plain.stream() as stream:
                    answers.append(stream.forward(0, x, token_ids=tokens))
            answers.append(asyncio.run(self.forward_async(g.endpoint)))
            answers.append(self.forward_by_region(client))
            answers.append(self.forward_by_moectl(g.endpoint))
            for y in answers:
                np.testing.assert_array_equal(y, want.y)
            routed = client.forward(0, x, topk_ids=self.ids, parts="routed")
            np.testing.assert_array_equal(
                client.forward(0, x, token_ids=tokens, parts="routed"), routed)

    async def forward_async(self, endpoint):
        async with moed.AsyncClient(endpoint) as client:
            return await client.forward(0, self.x, token_ids=self.token_ids)

    def forward_by_region(self, client):
        with client.open_regions() as regions:
            x = regions.allocate(self.x.shape, np.float32)
            y = regions.allocate(self.x.shape, np.float32)
            token_ids = regions.allocate(TOKENS, np.int64)
            x[:], token_ids[:] = self.x, self.token_ids
            regions.forward(0, x, y, token_ids=token_ids)
            answer = y.copy()
            token_ids[3] = VOCABULARY
            with self.assertRaisesRegex(moed.MoeError, "token id 64 is not in 0 to 63") as caught:
                regions.forward(0, x, y, token_ids=token_ids)
            self.assertEqual(caught.exception.reason, "VALUE_INVALID")
            with self.assertRaisesRegex(moed.MoeError, "layer 0 routes by token id"):
                regions.forward(0, x, y)
            return answer

    def forward_by_moectl(self, endpoint):
        paths = [os.path.join(self.folder, name) for name in ("in", "out")]
        moed.write_safetensors(paths[0], {"x": self.x, "tokens": self.token_ids})
        moectl("forward", "--endpoint", endpoint, "--layer", "0", "--input", paths[0], "--output",
               paths[1], "--token-ids", "tokens")
        return moed.read_safetensors(paths[1])["y"]

    def test_bad_token_ids_are_refused(self):
        with served(self.folder, 1) as (g, client):
            for transport in "native", "grpc":
                with moed.Client(g.endpoint, transport=transport) as one:
                    self.check_refusals(one)
            self.assertEqual(client.forward(1, self.x).shape, self.x.shape)

    def check_refusals(self, client):
        x, tokens = self.x, self.token_ids
        beyond, below = tokens.copy(), tokens.copy()
        beyond[5], below[0] = VOCABULARY, -1
        for layer, given, reason in ((0, beyond, "VALUE_INVALID"), (0, below, "VALUE_INVALID"),
                                     (1, tokens, "ROUTING_INVALID")):
            with self.assertRaises(moed.MoeError) as caught:
                client.forward(layer, x, token_ids=given)
            self.assertEqual(caught.exception.reason, reason)
        for error, more in ((ValueError, {"token_ids": tokens[1:]}),
                            (ValueError, {"token_ids": self.ids}),
                            (ValueError, {"token_ids": tokens, "topk_ids": self.ids}),
                            (ValueError, {"token_ids": tokens, "parts": "shared"}),
                            (TypeError, {"token_ids": tokens.astype(np.float32)})):
            with self.assertRaises(error):
                client.forward(0, x, **more)

    def test_an_added_model_has_tables_too(self):
        with served(model_directory("deepseek_v4"), 2) as (g, client):
            moectl("load", self.folder, "--name", "second", "--endpoint", g.endpoint)
            with moed.Client(g.endpoint, model="second") as second:
                self.assertEqual(second.layers[0].vocabulary, VOCABULARY)
                x, want = recorded()
                y = second.forward(0, x, token_ids=np.arange(RECORDED))
                self.assertLessEqual(relative_error(y, want), 1e-5)
            with self.assertRaises(moed.MoeError):
                client.forward(0, x, token_ids=np.arange(RECORDED))
            moectl("unload", "second", "--drain", "--endpoint", g.endpoint)

    def test_the_router_is_not_asked_to_choose(self):
        with served(self.folder, 1, *self.settings("allow-client-memory = 64M")) as (g, client):
            for given in ({}, {"return_routing": True}, {"parts": "routed"}):
                with self.assertRaisesRegex(moed.MoeError, "layer 0 routes by token id") as caught:
                    client.forward(0, self.x, **given)
                self.assertEqual(caught.exception.reason, "ROUTING_INVALID")
            self.assertEqual(client.forward(1, self.x).shape, self.x.shape)
            moectl("bench", "--endpoint", g.endpoint, "--layer", "0", "--tokens", "4",
                   "--duration", "0.2", "--transport", "inline,shm")  # it sends token ids

    def test_a_layer_that_trains_takes_the_ids_too(self):
        with served(self.folder, 1, *self.settings("training = adamw")) as (_, client):
            y = client.forward(0, self.x, topk_ids=self.ids)
            passed = client.forward(0, self.x, token_ids=self.token_ids, return_routing=True,
                                    retain=("s", 1))
            np.testing.assert_array_equal(passed.topk_ids, self.ids)
            np.testing.assert_array_equal(passed.y, y)
            again = client.backward(0, np.ones_like(self.x), session="s", micro_batch_id=1,
                                    retained=True)
            got = client.backward(0, np.ones_like(self.x), self.x, self.ids, session="s",
                                  micro_batch_id=2)
            self.assertEqual(got.dx.shape, self.x.shape)
            np.testing.assert_array_equal(got.dx, again.dx)
            self.assertTrue(np.isfinite(got.dx).all() and np.isfinite(y).all())
            np.testing.assert_array_equal(y, client.forward(0, self.x, topk_ids=self.ids))
            client.optimizer_step(0.1, step_id=1, session="s")
            self.assertFalse(np.array_equal(y, client.forward(0, self.x, topk_ids=self.ids)))

    def refuse(self, text):
        with tempfile.TemporaryDirectory() as state:
            failed = moectl("up", "--model", self.folder, "--workers", "1", "--port", "0",
                            "--backend", "cpu", "--state-dir", state, check=False)
        self.assertNotEqual(failed.returncode, 0)
        self.assertIn(text, failed.stdout + failed.stderr)

    def test_a_damaged_table_is_refused_by_its_name(self):
        path = os.path.join(self.folder, "model.safetensors")
        tensors = moed.read_safetensors(path)
        tensors[TABLE] = tensors[TABLE].copy()
        tensors[TABLE][9, 1] = EXPERTS
        moed.write_safetensors(path, tensors)
        self.refuse("tensor %s: token 9: expert 8 is not in 0 to 7" % TABLE)

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
        self.refuse("tid2eid belongs to a MoE layer and is not understood")


if __name__ == "__main__":
    main()
