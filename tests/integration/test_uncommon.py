# SPDX-License-Identifier: Apache-2.0
"""Models with layers that do not train give transformers' numbers through gRPC on groups of 1, 2
and 4 workers: Nemotron-3 (experts without a gate, also in FP8 and NVFP4; in a latent space with 22
of 40 experts per token, also in several formats) and Phi-3.5-MoE (SparseMixer).

F32 tokens within 1e-5, BF16 tokens within 1e-2 (relative Frobenius norm)."""

import json
import os
import shutil
import tempfile
import unittest

import numpy as np

from group import BACKEND, MODELS, golden_cases, group, main, moectl, relative_error, to_bf16
from models_group import Models
from training import refusal, start_alone
import moed

ROOT = os.path.join(os.path.dirname(os.path.abspath(MODELS)), "uncommon")
# What the worker calls the first of a model's properties that do not train.
NAMES = {"nemotron_h": "experts without a gate", "fp8_nemotron_h": "experts without a gate",
         "nvfp4_nemotron_h": "experts without a gate",
         "nemotron_h_latent": "a latent space (LatentMoE)", "phimoe": "the router SparseMixer",
         "mixed_nemotron_h_latent": "a latent space (LatentMoE)"}


def folder(name):
    return os.path.join(ROOT, name)


def cases(name):
    """(layer, tokens, x, y); y of quantised models is that of the weights as they are."""
    golden = moed.read_safetensors(os.path.join(folder(name), "golden.safetensors"))
    for layer, tokens, x, y in golden_cases(folder(name)):
        yield layer, tokens, x, golden.get("layer%d.T%d.exact" % (layer, tokens), y)


class Serving(unittest.TestCase):
    def compare(self, client, name, workers):
        for layer, tokens, x, want in cases(name):
            whole = client.forward(layer, x)
            half = moed.f32(client.forward(layer, moed.bf16(to_bf16(x))))
            errors = relative_error(whole, want), relative_error(half, want)
            print("%-23s %d workers layer %d T %2d F32 %.1e BF16 %.1e" % (
                name, workers, layer, tokens, *errors))
            self.assertLessEqual(errors[0], 1e-5)
            self.assertLessEqual(errors[1], 1e-2)
            with client.stream() as stream:
                np.testing.assert_array_equal(stream.forward(layer, x), whole)
            seen = client.forward(layer, x, return_routing=True)
            np.testing.assert_array_equal(seen.y, whole)
            np.testing.assert_array_equal(client.forward(
                layer, x, topk_ids=seen.topk_ids, topk_weights=seen.topk_weights), whole)
            np.testing.assert_array_equal(
                client.forward(layer, x, topk_ids=seen.topk_ids), whole)

    def check(self, name, workers):
        with group(folder(name), workers) as g, moed.Client(g.endpoint) as client:
            self.compare(client, name, workers)

    def test_copies_of_experts(self):
        with group(folder("nemotron_h"), 4, "--replicas", "2") as g, \
                moed.Client(g.endpoint) as client:
            self.compare(client, "nemotron_h", 4)

    @unittest.skipUnless(BACKEND == "cpu", "experts move on CPUs only")
    def test_experts_move(self):
        name = "nvfp4_nemotron_h"
        with group(folder(name), 2, "--spare-experts", "2") as g, \
                moed.Client(g.endpoint) as client:
            layer, tokens, x, _ = list(cases(name))[-1]
            for _ in range(20):  # only the experts of one worker are busy
                client.forward(layer, x, topk_ids=np.tile(np.int32([0, 1, 2]), (tokens, 1)))
            self.assertIn("copies have moved", moectl("rebalance", "--endpoint", g.endpoint).stdout)
            self.compare(client, name, 2)

    def test_the_log_says_what_is_decoded(self):
        with group(folder("mixed_nemotron_h_latent"), 1) as g:
            with open(os.path.join(g.state, "worker-0.log")) as file:
                log = file.read()
        self.assertIn("projections of the latent space are decoded to BF16", log)
        self.assertIn("quantised experts (NVFP4 of ModelOpt, FP8) stay as they are", log)

    def test_a_group_with_room_for_22_choices_loads_them_next_to_another_model(self):
        with Models(2, "--max-experts", "64") as g:
            (code, _), error = refusal(g.load, directory=folder("nemotron_h_latent"))
            self.assertEqual(code, "FAILED_PRECONDITION")
            self.assertIn("--max-top-k", error.details())
        with Models(2, "--max-top-k", "22", "--max-experts", "64") as g:
            for name in NAMES:
                g.load(directory=folder(name))
                with g.client(model=name) as client:
                    self.compare(client, name, 2)


for each_name in NAMES:
    for each_count in (1, 2, 4):
        setattr(Serving, "test_%s_%d_workers" % (each_name, each_count),
                lambda self, name=each_name, count=each_count: self.check(name, count))


class Refusals(unittest.TestCase):
    def refused(self, texts, *arguments):
        code, log = start_alone(*arguments)
        self.assertNotEqual(code, 0)
        for text in texts:
            self.assertIn(text, log)

    def test_every_model_is_named(self):
        self.assertEqual(sorted(os.listdir(ROOT)), sorted([*NAMES, "README.md"]))

    def test_training_is_refused_at_start(self):
        for name, text in NAMES.items():
            for extra in ((), ("--lora-rank", "2", "--freeze", "router,shared")):
                self.refused((text, "do not train"), folder(name), "--training", "adamw", *extra)

    def changed(self, name, change_tensors=None, **settings):
        """The golden model with other settings and tensors; its folder."""
        root = tempfile.mkdtemp(prefix="moed-uncommon-")
        self.addCleanup(shutil.rmtree, root)
        with open(os.path.join(folder(name), "config.json")) as file:
            config = json.load(file)
        config.update(settings)
        with open(os.path.join(root, "config.json"), "w") as file:
            json.dump(config, file)
        tensors = moed.read_safetensors(os.path.join(folder(name), "model.safetensors"))
        if change_tensors is not None:
            change_tensors(tensors)
        moed.write_safetensors(os.path.join(root, "model.safetensors"), tensors)
        return root

    def test_damaged_models_are_refused_by_name(self):
        block = "backbone.layers.1.mixer."
        up, gate = block + "experts.3.up_proj.weight", block + "experts.3.gate_proj.weight"

        def add_gate(tensors):
            tensors[gate] = tensors[up]

        def remove_up(tensors):
            del tensors[up]

        self.refused((gate + " belongs to a MoE layer and is not understood",),
                     self.changed("nemotron_h", add_gate))
        self.refused(("lacks tensor " + up,), self.changed("nemotron_h", remove_up))
        self.refused(("num_experts_per_tok is 33",),
                     self.changed("nemotron_h_latent", num_experts_per_tok=33))
        self.refused(("mlp_hidden_act is silu",),
                     self.changed("nemotron_h", mlp_hidden_act="silu"))
        self.refused(("num_experts_per_tok is not 2",),
                     self.changed("phimoe", num_experts_per_tok=3))


if __name__ == "__main__":
    main()
