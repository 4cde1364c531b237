#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Makes the quantised models of tests/golden/uncommon from its nemotron_h. Needs numpy only.

    tests/golden/quantise_nemotron.py tests/golden/uncommon
    tests/golden/quantise_nemotron.py --check tests/golden/uncommon

Each is one MoE layer, quantised as ModelOpt does it. As in quantise.py, golden.safetensors holds x,
and y of the dequantised weights, rounded to BF16 (`exact`: not rounded), computed here in double
precision. On the weights of nemotron_h this computation must give transformers' numbers.
--check makes them again and compares."""

import filecmp
import json
import os
import sys
import tempfile

import numpy as np

from quantise import fp8, nvfp4, read_file, route, through_bf16, to_bf16, write_file

BASE, LAYER, PARTS = "nemotron_h", 1, ("up", "down")
BLOCK = "backbone.layers.%d.mixer." % LAYER
# name: (quantisation_config, function of a matrix, whether the shared expert is quantised)
MODELS = {
    "fp8_nemotron_h": (dict(quant_method="modelopt", quant_algo="FP8",
                            producer={"name": "modelopt"}, ignore=["lm_head", "*.mixer.gate"]),
                       lambda w: fp8(w, shape=(), extra=(".input_scale",)), True),
    "nvfp4_nemotron_h": (dict(quant_method="modelopt", quant_algo="NVFP4", group_size=16,
                              producer={"name": "modelopt"},
                              ignore=["lm_head", "*.mixer.gate", "*.mixer.shared_experts*"]),
                         lambda w: nvfp4(w, ".weight", ".weight_scale", ".weight_scale_2", False),
                         False),
}


def read_block(folder):
    """What quantise.route reads of a block, and its experts."""
    with open(os.path.join(folder, "config.json")) as file:
        config = json.load(file)
    tensors = read_file(os.path.join(folder, "model.safetensors"))
    def network(module):
        return {p: tensors[BLOCK + "%s.%s_proj.weight" % (module, p)] for p in PARTS}
    return {"config": config, "score": "sigmoid", "renorm": True, "scaled": True,
            "router": tensors[BLOCK + "gate.weight"],
            "select_bias": tensors[BLOCK + "gate.e_score_correction_bias"],
            "experts": [network("experts.%d" % e) for e in range(config["n_routed_experts"])],
            "shared": network("shared_experts")}


def network(w, x):
    return np.square(np.maximum(x @ w["up"].T, 0)) @ w["down"].T


def compute(block, x):
    x = x.astype(np.float64)
    ids, weights = route(block, x)
    y = network(block["shared"], x)
    for token in range(len(x)):
        for e, w in zip(ids[token], weights[token]):
            y[token] += w * network(block["experts"][e], x[token])
    return y


def quantised(block, scheme, with_shared, rounded):
    """The block with dequantised weights, rounded by `rounded`, and the tensors of its matrices."""
    out, tensors = dict(block), {}
    def take(module, weights, quantise):
        values = {}
        for p, w in weights.items():
            made, values[p] = quantise(w)
            values[p] = rounded(values[p]).astype(np.float64)
            for suffix, tensor in made.items():
                tensors["%s.%s_proj%s" % (module, p, suffix)] = tensor
        return values
    plain = lambda w: ({".weight": ("BF16", to_bf16(w))}, w)
    out["experts"] = [take("experts.%d" % e, w, scheme) for e, w in enumerate(block["experts"])]
    out["shared"] = take("shared_experts", block["shared"], scheme if with_shared else plain)
    return out, tensors


def make(source, target, name):
    quantisation, scheme, with_shared = MODELS[name]
    block = read_block(os.path.join(source, BASE))
    decoded, tensors = quantised(block, scheme, with_shared, through_bf16)
    exact, _ = quantised(block, scheme, with_shared, np.float32)
    tensors["gate.weight"] = ("BF16", to_bf16(block["router"]))
    tensors["gate.e_score_correction_bias"] = ("F32", block["select_bias"])
    config = dict(block["config"], layers_block_type=["linear_attention", "moe"],
                  quantization_config=quantisation)
    directory = os.path.join(target, name)
    os.makedirs(directory, exist_ok=True)
    with open(os.path.join(directory, "config.json"), "w") as file:
        json.dump(config, file, indent=2, sort_keys=True)
        file.write("\n")
    write_file(os.path.join(directory, "model.safetensors"),
               {BLOCK + each: tensor for each, tensor in tensors.items()})
    random, golden = np.random.default_rng(7), {}
    for tokens in (1, 37):
        x = through_bf16(random.standard_normal((tokens, config["hidden_size"])))
        for what, value in (("x", x), ("y", compute(decoded, x)), ("exact", compute(exact, x))):
            golden["layer%d.T%d.%s" % (LAYER, tokens, what)] = ("F32", value.astype(np.float32))
    write_file(os.path.join(directory, "golden.safetensors"), golden)


def check_base(source):
    golden = read_file(os.path.join(source, BASE, "golden.safetensors"))
    block = read_block(os.path.join(source, BASE))
    for tokens in (1, 37):
        x, y = (golden["layer%d.T%d.%s" % (LAYER, tokens, what)] for what in "xy")
        error = np.linalg.norm(compute(block, x) - y) / np.linalg.norm(y)
        print("%s T %2d: %.1e from transformers" % (BASE, tokens, error))
        assert error < 2e-6, error


def check(source):
    with tempfile.TemporaryDirectory() as again:
        for name in MODELS:
            make(source, again, name)
            for file in ("config.json", "model.safetensors"):
                assert filecmp.cmp(os.path.join(again, name, file),
                                   os.path.join(source, name, file), shallow=False), (name, file)
            old, new = (read_file(os.path.join(root, name, "golden.safetensors"))
                        for root in (source, again))
            assert set(old) == set(new), name
            for key, value in old.items():
                assert np.linalg.norm(new[key] - value) <= 1e-6 * np.linalg.norm(value), (name, key)


def main():
    *options, source = sys.argv[1:]
    check_base(source)
    if options == ["--check"]:
        check(source)
        return
    for name in MODELS:
        make(source, source, name)


if __name__ == "__main__":
    main()
