# SPDX-License-Identifier: Apache-2.0
"""Kimi-K3's layers, in BF16 and in MXFP4, give numpy's numbers through gRPC on groups of 1, 2 and 4
workers: experts in a latent space, and SiTU. They do not train.

F32 tokens within 1e-5, BF16 tokens within 1e-2 (relative Frobenius norm) of the outputs that
tests/golden/make_kimi_k3.py computes; transformers has no such model."""

import json
import os
import shutil
import tempfile
import unittest

import numpy as np

from group import BACKEND, MODELS, golden_cases, group, main, moectl, relative_error, to_bf16
from training import start_alone
import moed
import wire

ROOT = os.path.join(os.path.dirname(os.path.abspath(MODELS)), "numpy")
BLOCK = "language_model.model.layers.1.block_sparse_moe."


def folder(name):
    return os.path.join(ROOT, name)


class Serving(unittest.TestCase):
    def compare(self, g, name, workers):
        with moed.Client(g.endpoint) as client:
            for layer, tokens, x, want in golden_cases(folder(name)):
                whole = client.forward(layer, x)
                half = moed.f32(client.forward(layer, moed.bf16(to_bf16(x))))
                errors = relative_error(whole, want), relative_error(half, want)
                print("%-13s %d workers T %2d F32 %.1e BF16 %.1e" % (
                    name, workers, tokens, *errors))
                self.assertLessEqual(errors[0], 1e-5)
                self.assertLessEqual(errors[1], 1e-2)
                with client.stream() as stream:
                    np.testing.assert_array_equal(stream.forward(layer, x), whole)
                self.check_routing(client, layer, x, whole)

    def check_routing(self, client, layer, x, whole):
        """Replayed routing gives the same bits, and the parts add up."""
        seen = client.forward(layer, x, return_routing=True)
        np.testing.assert_array_equal(seen.y, whole)
        np.testing.assert_array_equal(
            client.forward(layer, x, topk_ids=seen.topk_ids, topk_weights=seen.topk_weights), whole)
        routed, shared = (client.forward(layer, x, parts=part) for part in ("routed", "shared"))
        self.assertLessEqual(relative_error(routed + shared, whole), 1e-6)
        self.assertGreater(relative_error(routed, whole), 0.1)
        self.assertGreater(relative_error(shared, whole), 0.1)
        none = np.full_like(seen.topk_ids, -1)
        np.testing.assert_array_equal(client.forward(layer, x, topk_ids=none), shared)

    def check(self, name, workers):
        with group(folder(name), workers) as g:
            self.compare(g, name, workers)
            with wire.open_channel(g.endpoint) as channel:
                info = wire.get_model(channel)
            self.assertEqual([(each.layer, each.hidden, each.latent) for each in info.layers],
                             [(1, 48, 32)])

    def test_bf16_1_worker(self):
        self.check("kimi_k3", 1)

    def test_bf16_2_workers(self):
        self.check("kimi_k3", 2)

    def test_bf16_4_workers(self):
        self.check("kimi_k3", 4)

    def test_mxfp4_2_workers(self):
        self.check("mxfp4_kimi_k3", 2)

    def test_mxfp4_4_workers(self):
        self.check("mxfp4_kimi_k3", 4)

    def test_copies_of_experts(self):
        with group(folder("kimi_k3"), 4, "--replicas", "2") as g:
            self.compare(g, "kimi_k3", 4)

    @unittest.skipUnless(BACKEND == "cpu", "experts move on CPUs only")
    def test_experts_move(self):
        with group(folder("kimi_k3"), 2, "--spare-experts", "2") as g:
            with moed.Client(g.endpoint) as client:
                layer, tokens, x, _ = list(golden_cases(folder("kimi_k3")))[-1]
                for _ in range(20):  # only the experts of one worker are busy
                    client.forward(layer, x, topk_ids=np.tile(np.int32([0, 1, 2]), (tokens, 1)))
            moved = moectl("rebalance", "--endpoint", g.endpoint).stdout
            self.assertIn("copies have moved", moved)
            self.compare(g, "kimi_k3", 2)

    def test_a_group_loads_it_next_to_another_model(self):
        with group("qwen3_moe", 2) as g:
            moectl("load", folder("kimi_k3"), "--name", "k3", "--endpoint", g.endpoint)
            with moed.Client(g.endpoint, model="k3") as client:
                for layer, _, x, want in golden_cases(folder("kimi_k3")):
                    self.assertLessEqual(relative_error(client.forward(layer, x), want), 1e-5)


class Refusals(unittest.TestCase):
    def setUp(self):
        self.root = tempfile.mkdtemp(prefix="moed-latent-")
        self.addCleanup(shutil.rmtree, self.root, ignore_errors=True)

    def test_training_is_refused_at_start(self):
        for extra in ((), ("--lora-rank", "2", "--freeze", "router,shared")):
            code, log = start_alone(folder("kimi_k3"), "--training", "adamw", *extra)
            self.assertNotEqual(code, 0)
            self.assertIn("latent space (LatentMoE)", log)
            self.assertIn("do not train", log)

    def changed(self, change_tensors=None, **settings):
        """The golden model with other settings and tensors; its folder."""
        source = folder("kimi_k3")
        with open(os.path.join(source, "config.json")) as file:
            config = json.load(file)
        config["text_config"].update(settings)
        with open(os.path.join(self.root, "config.json"), "w") as file:
            json.dump(config, file)
        tensors = moed.read_safetensors(os.path.join(source, "model.safetensors"))
        if change_tensors is not None:
            change_tensors(tensors)
        moed.write_safetensors(os.path.join(self.root, "model.safetensors"), tensors)
        return self.root

    def check_refused(self, named, *arguments, **settings):
        code, log = start_alone(self.changed(*arguments, **settings))
        self.assertNotEqual(code, 0)
        self.assertIn(named, log)

    def test_damaged_models_are_refused_by_name(self):
        down, up, norm = (BLOCK + "routed_expert_%s.weight" % each
                          for each in ("down_proj", "up_proj", "norm"))

        def without(name):
            return lambda tensors: tensors.pop(name)

        def transposed(name):
            def change(tensors):
                tensors[name] = np.ascontiguousarray(tensors[name].T)
            return change

        for name in (down, up, norm):
            self.check_refused("lacks tensor " + name, without(name))
        self.check_refused("tensor %s is [48, 32]; config.json implies [32, 48]" % down,
                           transposed(down))
        self.check_refused("tensor %s is [32, 48]; config.json implies [48, 32]" % up,
                           transposed(up))
        self.check_refused(norm + " belongs to a MoE layer and is not understood",
                           latent_moe_use_norm=False)
        self.check_refused("latent_moe_use_norm is true without routed_expert_hidden_size",
                           routed_expert_hidden_size=None)
        self.check_refused("routed_expert_hidden_size is 49", routed_expert_hidden_size=49)
        self.check_refused("activation_situ_beta is missing", activation_situ_beta=None)


if __name__ == "__main__":
    main()
