#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Makes the quantised models of tests/golden/uncommon from its nemotron_h and nemotron_h_latent.
Needs numpy only.

    tests/golden/quantise_nemotron.py tests/golden/uncommon
    tests/golden/quantise_nemotron.py --check tests/golden/uncommon

Each has one or two MoE layers, quantised as ModelOpt does it. As in quantise.py, golden.safetensors
holds x, and y of the dequantised weights, rounded to BF16 (`exact`: experts are not rounded),
computed here in double precision. On the weights of the bases this computation must give
transformers' numbers. --check makes the models again and compares."""

import json
import os
import sys

import numpy as np

from quantise import (fp8, make_models, nvfp4, outputs, read_file, route, through_bf16, to_bf16,
                      write_model)

BASES = {"nemotron_h": (1, 3), "nemotron_h_latent": (1, 3)}  # with their MoE layers
PARTS, PROJECTIONS = ("up", "down"), ("fc1", "fc2")
FP8 = lambda w: fp8(w, shape=(), extra=(".input_scale",))
NVFP4 = lambda w: nvfp4(w, ".weight", ".weight_scale", ".weight_scale_2", False)
PLAIN = lambda w: ({".weight": ("BF16", to_bf16(w))}, w)
SETTINGS = {FP8: {"quant_algo": "FP8"}, NVFP4: {"quant_algo": "NVFP4", "group_size": 16}}

# name: base, settings of config.json, quantization_config, and for each layer how routed experts,
# shared ones and projections of the latent space are stored
ONE_LAYER = {"layers_block_type": ["linear_attention", "moe"]}
MODELS = {
    "fp8_nemotron_h": ("nemotron_h", ONE_LAYER,
                       dict(quant_method="modelopt", quant_algo="FP8",
                            producer={"name": "modelopt"}, ignore=["lm_head", "*.mixer.gate"]),
                       {1: (FP8, FP8, None)}),
    "nvfp4_nemotron_h": ("nemotron_h", ONE_LAYER,
                         dict(quant_method="modelopt", quant_algo="NVFP4", group_size=16,
                              producer={"name": "modelopt"},
                              ignore=["lm_head", "*.mixer.gate", "*.mixer.shared_experts*"]),
                         {1: (NVFP4, PLAIN, None)}),
    # Settings by the name of a module, as in NVIDIA's releases of Nemotron-3-Super.
    "mixed_nemotron_h_latent": ("nemotron_h_latent", {},
                                dict(quant_method="modelopt", quant_algo="MIXED_PRECISION",
                                     producer={"name": "modelopt"}, ignore=["lm_head", "mtp*"],
                                     kv_cache_scheme={"dynamic": False, "num_bits": 8,
                                                      "type": "float"}),
                                {1: (NVFP4, FP8, FP8), 3: (PLAIN, PLAIN, PLAIN)}),
}
# Of modules that moed does not load: these settings have no effect.
ELSEWHERE = {"backbone.layers.0.mixer.in_proj": {"quant_algo": "FP8"},
             "backbone.layers.2.mixer.q_proj": {"quant_algo": "W4A8_AWQ", "group_size": 128}}


def read_block(folder, layer):
    """What quantise.route reads of a block, and its networks."""
    with open(os.path.join(folder, "config.json")) as file:
        config = json.load(file)
    tensors = read_file(os.path.join(folder, "model.safetensors"))
    inside = "backbone.layers.%d.mixer." % layer
    def network(module):
        return {p: tensors[inside + "%s.%s_proj.weight" % (module, p)] for p in PARTS}
    block = {"config": config, "score": "sigmoid", "renorm": True, "scaled": True,
             "router": tensors[inside + "gate.weight"],
             "select_bias": tensors[inside + "gate.e_score_correction_bias"],
             "experts": [network("experts.%d" % e) for e in range(config["n_routed_experts"])],
             "shared": network("shared_experts")}
    if config["moe_latent_size"] is not None:
        block["latent"] = {p: tensors[inside + p + "_latent_proj.weight"] for p in PROJECTIONS}
    return block


def network(w, x):
    return np.square(np.maximum(x @ w["up"].T, 0)) @ w["down"].T


def compute(block, x):
    x = x.astype(np.float64)
    ids, weights = route(block, x)
    z = x @ block["latent"]["fc1"].T if "latent" in block else x
    y = np.zeros_like(z)
    for token in range(len(x)):
        for e, w in zip(ids[token], weights[token]):
            y[token] += w * network(block["experts"][e], z[token])
    return network(block["shared"], x) + (y @ block["latent"]["fc2"].T if "latent" in block else y)


def quantised(block, schemes, rounded):
    """The block with dequantised weights, those of experts rounded by `rounded`, the tensors of its
    matrices, and the settings of quantised modules."""
    out, tensors, modules = dict(block), {}, {}
    def take(module, names, weights, quantise, rounded):
        values = {}
        for p, w in weights.items():
            made, values[p] = quantise(w)
            values[p] = rounded(values[p]).astype(np.float64)
            name = module + names % p
            tensors.update({name + suffix: tensor for suffix, tensor in made.items()})
            if quantise in SETTINGS:
                modules[name] = SETTINGS[quantise]
        return values
    routed, shared, projections = schemes
    out["experts"] = [take("experts.%d." % e, "%s_proj", w, routed, rounded)
                      for e, w in enumerate(block["experts"])]
    out["shared"] = take("shared_experts.", "%s_proj", block["shared"], shared, rounded)
    if "latent" in block:  # always decoded
        out["latent"] = take("", "%s_latent_proj", block["latent"], projections, through_bf16)
    return out, tensors, modules


def make(source, target, name):
    base, settings, quantisation, layers = MODELS[name]
    tensors, modules, golden = {}, dict(ELSEWHERE), {}
    for layer, schemes in layers.items():
        inside = "backbone.layers.%d.mixer." % layer
        block = read_block(os.path.join(source, base), layer)
        decoded, made, of_modules = quantised(block, schemes, through_bf16)
        exact, *_ = quantised(block, schemes, np.float32)
        made["gate.weight"] = ("BF16", to_bf16(block["router"]))
        made["gate.e_score_correction_bias"] = ("F32", block["select_bias"])
        tensors.update({inside + each: tensor for each, tensor in made.items()})
        modules.update({inside + each: value for each, value in of_modules.items()})
        golden.update(outputs(layer, block["config"]["hidden_size"],
                              y=lambda x: compute(decoded, x), exact=lambda x: compute(exact, x)))
    if quantisation["quant_algo"] == "MIXED_PRECISION":
        quantisation = dict(quantisation, quantized_layers=modules)
    config = dict(block["config"], **settings, quantization_config=quantisation)
    write_model(target, name, config, tensors, golden)


def check_base(source, base, layer):
    golden = read_file(os.path.join(source, base, "golden.safetensors"))
    block = read_block(os.path.join(source, base), layer)
    for tokens in (1, 37):
        x, y = (golden["layer%d.T%d.%s" % (layer, tokens, what)] for what in "xy")
        error = np.linalg.norm(compute(block, x) - y) / np.linalg.norm(y)
        print("%s layer %d T %2d: %.1e from transformers" % (base, layer, tokens, error))
        assert error < 2e-6, error


def main():
    *options, source = sys.argv[1:]
    for base, layers in BASES.items():
        for layer in layers:
            check_base(source, base, layer)
    make_models(lambda root, name: make(source, root, name), MODELS, source, options,
                others=[*BASES, "phimoe"])


if __name__ == "__main__":
    main()
