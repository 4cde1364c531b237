#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Writes a model directory with random MoE layers of a real model's size, for benchmarks.

    make_model.py SHAPE DIRECTORY [--experts E] [--layers L]

SHAPE is a preset of moe_bench: deepseek-v3, qwen3-30b, mixtral-8x7b, or tiny. Writes only the files
that moed reads: config.json, the MoE layers' tensors in bf16 (DeepSeek's selection bias in F32),
one shard per layer, and the index. Weights are pieces of one pool of random numbers, uniform in
+-1/32, at different offsets: writing runs at the speed of the disk. Needs numpy.
"""
import argparse
import json
import os
import random

import numpy as np

SHAPES = {
    "deepseek-v3": dict(family="deepseek_v3", hidden=7168, inner=2048, experts=256, top_k=8),
    "qwen3-30b": dict(family="qwen3_moe", hidden=2048, inner=768, experts=128, top_k=8),
    "mixtral-8x7b": dict(family="mixtral", hidden=4096, inner=14336, experts=8, top_k=2),
    "tiny": dict(family="qwen3_moe", hidden=64, inner=32, experts=16, top_k=4),
}


def config(s, layers):
    common = {"model_type": s["family"], "hidden_size": s["hidden"], "hidden_act": "silu",
              "num_hidden_layers": layers, "num_experts_per_tok": s["top_k"], "dtype": "bfloat16"}
    own = {
        "mixtral": {"architectures": ["MixtralForCausalLM"], "num_local_experts": s["experts"],
                    "intermediate_size": s["inner"]},
        "qwen3_moe": {"architectures": ["Qwen3MoeForCausalLM"], "num_experts": s["experts"],
                      "moe_intermediate_size": s["inner"], "norm_topk_prob": True,
                      "decoder_sparse_step": 1, "mlp_only_layers": []},
        "deepseek_v3": {"architectures": ["DeepseekV3ForCausalLM"],
                        "n_routed_experts": s["experts"], "n_shared_experts": 1,
                        "moe_intermediate_size": s["inner"], "n_group": 8, "topk_group": 4,
                        "norm_topk_prob": True, "routed_scaling_factor": 2.5,
                        "first_k_dense_replace": 0},
    }
    return {**common, **own[s["family"]]}


def tensors(s, layer):
    """name, shape, dtype of one layer."""
    hidden, inner, experts = s["hidden"], s["inner"], s["experts"]
    block = f"model.layers.{layer}." + ("block_sparse_moe" if s["family"] == "mixtral" else "mlp")
    gate, up, down = (("w1", "w3", "w2") if s["family"] == "mixtral"
                      else ("gate_proj", "up_proj", "down_proj"))
    yield f"{block}.gate.weight", (experts, hidden), "BF16"
    if s["family"] == "deepseek_v3":
        yield f"{block}.gate.e_score_correction_bias", (experts,), "F32"
    prefixes = [f"{block}.experts.{e}" for e in range(experts)]
    if s["family"] == "deepseek_v3":
        prefixes.append(f"{block}.shared_experts")
    for prefix in prefixes:
        yield f"{prefix}.{gate}.weight", (inner, hidden), "BF16"
        yield f"{prefix}.{up}.weight", (inner, hidden), "BF16"
        yield f"{prefix}.{down}.weight", (hidden, inner), "BF16"


def make_pool(s):
    """Random bf16 numbers, more than the largest matrix needs, as uint16."""
    count = max(s["hidden"] * max(s["inner"], s["experts"]) * 3 // 2, 1 << 20)
    numbers = np.random.default_rng(1).random(count, dtype=np.float32)
    numbers -= 0.5
    numbers *= 1 / 16
    return (numbers.view(np.uint32) >> 16).astype(np.uint16)


def write_shard(path, listing, pool, pick):
    header, at = {"__metadata__": {"format": "pt"}}, 0
    for name, shape, dtype in listing:
        size = int(np.prod(shape)) * (4 if dtype == "F32" else 2)
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [at, at + size]}
        at += size
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb", buffering=0) as f:
        f.write(len(text).to_bytes(8, "little") + text)
        for _, shape, dtype in listing:
            n = int(np.prod(shape))
            if dtype == "F32":  # small: a larger bias would crowd some experts
                rest = memoryview(np.zeros(n, np.float32)).cast("B")
            else:
                first = pick.randrange(0, len(pool) - n)
                rest = memoryview(pool[first:first + n]).cast("B")
            while len(rest) > 0:
                rest = rest[f.write(rest):]
    return at


def main():
    p = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    p.add_argument("shape", choices=SHAPES)
    p.add_argument("directory")
    p.add_argument("--experts", type=int, help="instead of the preset's")
    p.add_argument("--layers", type=int, default=1)
    args = p.parse_args()
    shape = dict(SHAPES[args.shape])
    shape["experts"] = args.experts or shape["experts"]
    os.makedirs(args.directory, exist_ok=True)
    pick = random.Random(1)
    pool = make_pool(shape)
    index, total = {}, 0
    for layer in range(args.layers):
        name = f"model-{layer + 1:05d}-of-{args.layers:05d}.safetensors"
        listing = list(tensors(shape, layer))
        total += write_shard(os.path.join(args.directory, name), listing, pool, pick)
        index.update((tensor, name) for tensor, _, _ in listing)
    for name, content in (("config.json", config(shape, args.layers)),
                          ("model.safetensors.index.json",
                           {"metadata": {"total_size": total}, "weight_map": index})):
        with open(os.path.join(args.directory, name), "w", encoding="utf-8") as f:
            json.dump(content, f, indent=1)
    print(f"{args.directory}: {args.layers} layers of {args.shape}, {total / 1e9:.2f} GB")


if __name__ == "__main__":
    main()
