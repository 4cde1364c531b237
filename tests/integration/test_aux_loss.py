# SPDX-License-Identifier: Apache-2.0
"""Compares the load-balance loss with transformers' load_balancing_loss_func, in both conventions
of its coefficient: value, gradient of x, and the clients' messages."""

import os
import unittest

import numpy as np

from group import main, model_directory, relative_error
from training import training_group

import moed

try:
    import torch
    import moed.torch
except ImportError:
    torch = None

ROUTERS = {"qwen3_moe": "model.layers.%d.mlp.gate.weight",
           "mixtral": "model.layers.%d.block_sparse_moe.gate.weight"}
COEFF, TOKENS = 0.02, 37


def load_balancing_loss(logits, ids):
    """transformers' loss of one layer without its coefficient, and its gradient of the logits.
    Its expert_mask is one-hot choices [T,K,E], and its routing_weights are a softmax [T,E]."""
    tokens, experts = logits.shape
    routing_weights = np.exp(logits - logits.max(-1, keepdims=True))
    routing_weights /= routing_weights.sum(-1, keepdims=True)
    expert_mask = np.eye(experts)[ids]
    tokens_per_expert = expert_mask.mean(0)  # [K,E]
    router_prob_per_expert = routing_weights.mean(0)  # [E]
    loss = experts * np.sum(tokens_per_expert * router_prob_per_expert[None])
    slope = experts / tokens * tokens_per_expert.sum(0)  # of a token's routing weights
    return loss, routing_weights * (slope - (routing_weights * slope).sum(-1, keepdims=True))


class AuxLoss(unittest.TestCase):
    def case(self, family, client):
        """(x, ids, router weights) of the first layer."""
        layer = client.layers[0]
        tensors = moed.read_safetensors(os.path.join(model_directory(family), "model.safetensors"))
        router = moed.f32(tensors[ROUTERS[family] % layer.layer]).astype(np.float64)
        x = np.random.default_rng(5).standard_normal((TOKENS, layer.hidden)).astype(np.float32)
        return layer, x, client.forward(layer, x, return_routing=True).topk_ids, router

    def test_a_coefficient_of_transformers_has_the_same_weight(self):
        for family in ROUTERS:
            with self.subTest(family), training_group(family, 2) as g, (
                    moed.Client(g.endpoints[0])) as client:
                layer, x, ids, router = self.case(family, client)
                batches = iter(range(1, 10))

                def backward(coeff, **convention):  # of the loss alone
                    return client.backward(layer, np.zeros_like(x), x, ids, session="s",
                                           micro_batch_id=next(batches), aux_coeff=coeff,
                                           **convention)

                loss, slopes = load_balancing_loss(x.astype(np.float64) @ router.T, ids)
                got = backward(COEFF, aux_convention="transformers")
                print("    %s: K %d, loss %.6f, wanted %.6f" % (
                    family, layer.top_k, got.aux_loss, COEFF * loss))
                self.assertAlmostEqual(got.aux_loss / (COEFF * loss), 1, delta=1e-5)
                self.assertLess(relative_error(got.dx, COEFF * slopes @ router), 1e-5)
                for mean in (backward(layer.top_k * COEFF),
                             backward(layer.top_k * COEFF, aux_convention="mean")):
                    self.assertEqual(mean.aux_loss, got.aux_loss)
                    np.testing.assert_array_equal(mean.dx, got.dx)
                plain = backward(COEFF)
                self.assertAlmostEqual(plain.aux_loss * layer.top_k / got.aux_loss, 1, delta=1e-5)
                with self.assertRaises(ValueError):
                    backward(COEFF, aux_convention="megatron")

    @unittest.skipUnless(torch, "torch is not installed")
    def test_a_layer_of_torch_has_the_convention(self):
        with training_group("mixtral", 1) as g, moed.Client(g.endpoints[0]) as client:
            layer, x, ids, router = self.case("mixtral", client)
            moe = moed.torch.RemoteMoE(layer,
                                       client,
                                       aux_coeff=COEFF,
                                       aux_convention="transformers")
            moe(torch.from_numpy(x)).sum().backward()
            loss, _ = load_balancing_loss(x.astype(np.float64) @ router.T, ids)
            self.assertAlmostEqual(moe.aux_loss / (COEFF * loss), 1, delta=1e-5)
            with self.assertRaises(ValueError):
                moed.torch.RemoteMoE(layer, client, aux_convention="sum")


if __name__ == "__main__":
    main()
