#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Makes the models of tests/golden/numpy: Kimi-K3's MoE block, in BF16 and as released in MXFP4.
Needs numpy only.

    tests/golden/make_kimi_k3.py tests/golden/numpy
    tests/golden/make_kimi_k3.py --check tests/golden/numpy

transformers has no such class, so the outputs are computed here, in double precision, from the
formulas that README.md in that folder lists. No code of moed or of the vendor takes part.
--check makes the models again and compares."""

import sys

import numpy as np

from quantise import compressed, make_models, mxfp4, outputs, through_bf16, to_bf16, write_model

H, L, I, E, K, SHARED, LAYER = 48, 32, 64, 8, 3, 2, 1
BLOCK = "language_model.model.layers.%d.block_sparse_moe." % LAYER
TEXT = {
    "model_type": "kimi_linear", "hidden_size": H, "intermediate_size": 80, "vocab_size": 64,
    "num_hidden_layers": 2, "first_k_dense_replace": 1, "moe_layer_freq": 1,
    "num_attention_heads": 4, "num_key_value_heads": 4, "q_lora_rank": 16, "kv_lora_rank": 16,
    "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8, "mla_use_nope": True,
    "mla_use_output_gate": True, "attn_res_block_size": 2,
    "linear_attn_config": {"kda_layers": [1], "full_attn_layers": [2], "head_dim": 8,
                           "num_heads": 4, "short_conv_kernel_size": 4, "gate_lower_bound": -5.0,
                           "use_full_rank_gate": True},
    "num_experts": E, "num_experts_per_token": K, "moe_intermediate_size": I,
    "num_shared_experts": SHARED, "routed_expert_hidden_size": L, "latent_moe_use_norm": True,
    "rms_norm_eps": 1e-05, "hidden_act": "situ", "activation_situ_beta": 2.0,
    "activation_situ_linear_beta": 5.0, "moe_router_activation_func": "sigmoid",
    "topk_method": "noaux_tc", "use_grouped_topk": True, "num_expert_group": 1, "topk_group": 1,
    "moe_renormalize": True, "routed_scaling_factor": 2.5, "num_nextn_predict_layers": 0,
    "tie_word_embeddings": False,
}
IGNORE = ["lm_head", "re:.*self_attn.*", "re:.*shared_experts.*", "re:.*routed_expert_.*",
          r"re:.*mlp\.(gate|up|gate_up|down)_proj.*", "re:vision_tower.*", "re:mm_projector.*"]
MXFP4 = compressed("mxfp4-pack-quantized", IGNORE, num_bits=4, type="float", strategy="group",
                   group_size=32, symmetric=True, scale_dtype="torch.uint8")


def draw():
    """The weights of the block by name; all but the bias have values of BF16."""
    random = np.random.default_rng(31)

    def matrix(rows, columns, size=1.0):
        return through_bf16(size * random.standard_normal((rows, columns)) / np.sqrt(columns))

    def network(names, width, inner):
        # Many gates and ups lie where SiTU bends.
        return {names[0]: matrix(inner, width, 2.0), names[1]: matrix(inner, width, 5.0),
                names[2]: matrix(width, inner)}

    weights = {"gate.weight": matrix(E, H),
               "gate.e_score_correction_bias":
                   (0.1 * random.standard_normal(E)).astype(np.float32),
               "routed_expert_down_proj.weight": matrix(L, H),
               "routed_expert_up_proj.weight": matrix(H, L),
               "routed_expert_norm.weight": through_bf16(1 + 0.3 * random.standard_normal(L))}
    for e in range(E):
        for name, w in network(("w1", "w3", "w2"), L, I).items():
            weights["experts.%d.%s.weight" % (e, name)] = w
    for name, w in network(("gate_proj", "up_proj", "down_proj"), H, SHARED * I).items():
        weights["shared_experts.%s.weight" % name] = w
    return weights


def situ(g, u):
    beta, linear = TEXT["activation_situ_beta"], TEXT["activation_situ_linear_beta"]
    return beta * np.tanh(g / beta) / (1 + np.exp(-g)) * linear * np.tanh(u / linear)


def network(weights, names, x):
    gate, up, down = (weights[name + ".weight"].astype(np.float64) for name in names)
    return down @ situ(gate @ x, up @ x)


def token(weights, x):
    """y [H] of one token, as README.md has it."""
    score = 1 / (1 + np.exp(-(weights["gate.weight"].astype(np.float64) @ x)))
    ids = np.argsort(-(score + weights["gate.e_score_correction_bias"]), kind="stable")[:K]
    p = score[ids] / (score[ids].sum() + 1e-20) * TEXT["routed_scaling_factor"]
    z = weights["routed_expert_down_proj.weight"].astype(np.float64) @ x
    u = sum(w * network(weights, ["experts.%d.%s" % (e, n) for n in ("w1", "w3", "w2")], z)
            for e, w in zip(ids, p))
    u = u / np.sqrt(np.mean(u * u) + TEXT["rms_norm_eps"]) * weights["routed_expert_norm.weight"]
    shared = ["shared_experts." + n for n in ("gate_proj", "up_proj", "down_proj")]
    return weights["routed_expert_up_proj.weight"].astype(np.float64) @ u \
        + network(weights, shared, x)


def compute(weights, x):
    return np.array([token(weights, row) for row in x.astype(np.float64)]).astype(np.float32)


def others():
    """Tensors of the model outside of its MoE block, which moed does not load."""
    random = np.random.default_rng(32)
    shapes = {"language_model.model.embed_tokens.weight": (64, H),
              "language_model.model.norm.weight": (H,), "language_model.lm_head.weight": (64, H),
              "language_model.model.layers.0.mlp.gate_proj.weight": (80, H),
              "language_model.model.layers.0.mlp.up_proj.weight": (80, H),
              "language_model.model.layers.0.mlp.down_proj.weight": (H, 80)}
    return {name: ("BF16", to_bf16(0.1 * random.standard_normal(shape)))
            for name, shape in shapes.items()}


def make(target, name):
    quantised, weights, tensors = name.startswith("mxfp4"), draw(), others()
    for each, w in weights.items():
        if quantised and each.startswith("experts."):
            parts, weights[each] = mxfp4(w)
            for suffix, part in parts.items():
                tensors[BLOCK + each[:-len(".weight")] + suffix] = part
        elif each.endswith("correction_bias"):
            tensors[BLOCK + each] = ("F32", w)
        else:
            tensors[BLOCK + each] = ("BF16", to_bf16(w))
    text = dict(TEXT, **({"quantization_config": MXFP4} if quantised else {}))
    config = {"model_type": "kimi_k3", "architectures": ["KimiK3ForConditionalGeneration"],
              "text_config": text, "vision_config": {"patch_size": 14, "vt_hidden_size": 16},
              "tie_word_embeddings": False}
    y = lambda x: compute(weights, x)
    write_model(target, name, config, tensors, outputs(LAYER, H, seed=33, y=y, exact=y))


if __name__ == "__main__":
    *options, folder = sys.argv[1:]
    make_models(make, ("kimi_k3", "mxfp4_kimi_k3"), folder, options)
