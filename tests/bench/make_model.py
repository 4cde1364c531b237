#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Writes a model directory with random MoE layers of a real model's size, for benchmarks.

    make_model.py SHAPE DIRECTORY [--experts E] [--layers L] [--format F]

SHAPE is a preset of moe_bench: deepseek-v3, qwen3-30b, mixtral-8x7b, or tiny; or gpt-oss-20b.
Writes only the files that moed reads: config.json, the MoE layers' tensors (DeepSeek's selection
bias in F32), one shard per layer, and the index. The format is bf16, or a quantised one as
checkpoints have it: fp8 (blocks of 128 x 128), mxfp4, nvfp4 and int4 (groups of 32) of
compressed-tensors; for gpt-oss-20b bf16 or its own mxfp4. Weights are pieces of pools of random
numbers (bf16: uniform in +-1/32), at different offsets: writing runs at the speed of the disk.
Needs numpy.
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
    "gpt-oss-20b": dict(family="gpt_oss", hidden=2880, inner=2880, experts=32, top_k=4),
}

# Bytes of an element; tensors of four bits are of bytes or words.
BYTES = {"F32": 4, "BF16": 2, "I64": 8, "I32": 4, "U8": 1, "F8_E4M3": 1}

PACKED = {  # format of compressed-tensors, and its weights
    "mxfp4": ("mxfp4-pack-quantized", dict(type="float", group_size=32, strategy="group",
                                           scale_dtype="torch.uint8")),
    "nvfp4": ("nvfp4-pack-quantized", dict(type="float", group_size=16, strategy="tensor_group")),
    "int4": ("pack-quantized", dict(type="int", group_size=32, strategy="group")),
}


def quantization(s):
    if s["format"] == "fp8":
        return {"activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8",
                "weight_block_size": [128, 128]}
    if s["family"] == "gpt_oss":
        return {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.mlp.router"]}
    name, weights = PACKED[s["format"]]
    group = {"input_activations": None, "output_activations": None, "targets": ["Linear"],
             "weights": dict(weights, dynamic=False, num_bits=4, symmetric=True)}
    return {"config_groups": {"group_0": group}, "format": name, "ignore": ["re:.*gate$"],
            "kv_cache_scheme": None, "quant_method": "compressed-tensors",
            "quantization_status": "compressed"}


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
        "gpt_oss": {"architectures": ["GptOssForCausalLM"], "num_local_experts": s["experts"],
                    "intermediate_size": s["inner"], "swiglu_limit": 7.0},
    }
    quantised = {} if s["format"] == "bf16" else {"quantization_config": quantization(s)}
    return {**common, **own[s["family"]], **quantised}


def matrix(s, module, rows, columns):
    """name, shape, dtype, content of the tensors of a matrix."""
    if s["format"] == "bf16":
        yield f"{module}.weight", (rows, columns), "BF16", "weight"
    elif s["format"] == "fp8":
        yield f"{module}.weight", (rows, columns), "F8_E4M3", "elements"
        yield (f"{module}.weight_scale_inv", (-(-rows // 128), -(-columns // 128)), "F32",
               "scale")
    elif s["format"] == "int4":
        yield f"{module}.weight_packed", (rows, columns // 8), "I32", "elements"
        yield f"{module}.weight_scale", (rows, columns // 32), "BF16", "scale"
        yield f"{module}.weight_shape", (2,), "I64", np.array([rows, columns], np.int64)
    elif s["format"] == "mxfp4":
        yield f"{module}.weight_packed", (rows, columns // 2), "U8", "elements"
        yield f"{module}.weight_scale", (rows, columns // 32), "U8", "scale"
    else:
        yield f"{module}.weight_packed", (rows, columns // 2), "U8", "elements"
        yield f"{module}.weight_scale", (rows, columns // 16), "F8_E4M3", "scale"
        yield f"{module}.weight_global_scale", (1,), "F32", "scale"


def gpt_oss(s, layer):
    """name, shape, dtype, content of one layer of GPT-OSS."""
    hidden, inner, experts = s["hidden"], s["inner"], s["experts"]
    block = f"model.layers.{layer}.mlp"
    yield f"{block}.router.weight", (experts, hidden), "BF16", "weight"
    yield f"{block}.router.bias", (experts,), "BF16", "weight"
    for name, rows, columns in (("gate_up_proj", 2 * inner, hidden), ("down_proj", hidden, inner)):
        yield f"{block}.experts.{name}_bias", (experts, rows), "BF16", "weight"
        if s["format"] == "bf16":
            yield f"{block}.experts.{name}", (experts, columns, rows), "BF16", "weight"
            continue
        yield (f"{block}.experts.{name}_blocks", (experts, rows, columns // 32, 16), "U8",
               "elements")
        yield f"{block}.experts.{name}_scales", (experts, rows, columns // 32), "U8", "scale"


def tensors(s, layer):
    """name, shape, dtype, content of one layer."""
    hidden, inner, experts = s["hidden"], s["inner"], s["experts"]
    block = f"model.layers.{layer}." + ("block_sparse_moe" if s["family"] == "mixtral" else "mlp")
    gate, up, down = (("w1", "w3", "w2") if s["family"] == "mixtral"
                      else ("gate_proj", "up_proj", "down_proj"))
    yield f"{block}.gate.weight", (experts, hidden), "BF16", "weight"
    if s["family"] == "deepseek_v3":
        yield f"{block}.gate.e_score_correction_bias", (experts,), "F32", "zeros"
    prefixes = [f"{block}.experts.{e}" for e in range(experts)]
    if s["family"] == "deepseek_v3":
        prefixes.append(f"{block}.shared_experts")
    for prefix in prefixes:
        yield from matrix(s, f"{prefix}.{gate}", inner, hidden)
        yield from matrix(s, f"{prefix}.{up}", inner, hidden)
        yield from matrix(s, f"{prefix}.{down}", hidden, inner)


def make_pools(listing):
    """Random bytes of each content, more than the largest tensor needs. F8 elements are below 2,
    and scales between 1/32 and 1/16."""
    largest = max(int(np.prod(shape)) * BYTES[dtype] for _, shape, dtype, _ in listing)
    rng = np.random.default_rng(1)
    numbers = rng.random(max(largest * 3 // 4, 1 << 20), dtype=np.float32)
    weights = ((numbers - 0.5) / 16).view(np.uint32) >> 16
    elements = rng.integers(0, 256, len(numbers) * 2, dtype=np.uint8) & 0xbf
    scales = ((numbers + 1) / 32).astype(np.float32).view(np.uint32)
    pools = {"weight": weights.astype(np.uint16), "elements": elements}
    for dtype, scale in (("F32", scales), ("BF16", (scales >> 16).astype(np.uint16)),
                         ("U8", np.full(len(elements), 122, np.uint8)),
                         ("F8_E4M3", elements & 7 | 0x10)):
        pools["scale", dtype] = scale
    return {content: pool.view(np.uint8) for content, pool in pools.items()}


def bytes_of(content, dtype, size, pools, pick):
    if isinstance(content, np.ndarray):
        return content.tobytes()
    if content == "zeros":  # of a selection bias: a larger one would crowd some experts
        return bytes(size)
    pool = pools[(content, dtype) if content == "scale" else content]
    step = BYTES[dtype]
    first = pick.randrange(0, (len(pool) - size) // step) * step
    return memoryview(pool[first:first + size])


def write_shard(path, listing, pools, pick):
    header, at = {"__metadata__": {"format": "pt"}}, 0
    for name, shape, dtype, _ in listing:
        size = int(np.prod(shape)) * BYTES[dtype]
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [at, at + size]}
        at += size
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb", buffering=0) as f:
        f.write(len(text).to_bytes(8, "little") + text)
        for _, shape, dtype, content in listing:
            rest = bytes_of(content, dtype, int(np.prod(shape)) * BYTES[dtype], pools, pick)
            while len(rest) > 0:
                rest = rest[f.write(rest):]
    return at


def main():
    p = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    p.add_argument("shape", choices=SHAPES)
    p.add_argument("directory")
    p.add_argument("--experts", type=int, help="instead of the preset's")
    p.add_argument("--layers", type=int, default=1)
    p.add_argument("--format", choices=("bf16", "fp8", *PACKED), default="bf16")
    args = p.parse_args()
    shape = dict(SHAPES[args.shape], format=args.format)
    if shape["family"] == "gpt_oss" and args.format not in ("bf16", "mxfp4"):
        p.error("gpt-oss-20b is bf16 or mxfp4")
    list_layer = gpt_oss if shape["family"] == "gpt_oss" else tensors
    shape["experts"] = args.experts or shape["experts"]
    os.makedirs(args.directory, exist_ok=True)
    pick = random.Random(1)
    pools = make_pools(list(list_layer(shape, 0)))
    index, total = {}, 0
    for layer in range(args.layers):
        name = f"model-{layer + 1:05d}-of-{args.layers:05d}.safetensors"
        listing = list(list_layer(shape, layer))
        total += write_shard(os.path.join(args.directory, name), listing, pools, pick)
        index.update((tensor, name) for tensor, *_ in listing)
    for name, content in (("config.json", config(shape, args.layers)),
                          ("model.safetensors.index.json",
                           {"metadata": {"total_size": total}, "weight_map": index})):
        with open(os.path.join(args.directory, name), "w", encoding="utf-8") as f:
            json.dump(content, f, indent=1)
    print(f"{args.directory}: {args.layers} layers of {args.shape}, {total / 1e9:.2f} GB")


if __name__ == "__main__":
    main()
