#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Makes the models of tests/golden/quantised from those of tests/golden/models. Needs numpy only.

    tests/golden/quantise.py tests/golden/models tests/golden/quantised
    tests/golden/quantise.py --check tests/golden/models tests/golden/quantised

Each model is one MoE layer of a golden model with matrices quantised as its scheme says, written
down from the formats' definitions and not from the C code. Its golden.safetensors holds x and y,
computed here in double precision on the dequantised weights, rounded to BF16. The computation
itself is checked first: on the weights of the golden models it must give transformers' numbers.
--check makes them again and compares."""

import filecmp
import json
import os
import struct
import sys
import tempfile

import numpy as np

DTYPES = {"F32": np.float32, "F16": np.float16, "BF16": np.uint16, "U8": np.uint8, "I8": np.int8,
          "F8_E4M3": np.uint8, "F8_E8M0": np.uint8, "I32": np.int32, "I64": np.int64}


# ---------------------------------------------------------------- safetensors

def read_file(path):
    """{name: (dtype, array)}; BF16 as F32."""
    with open(path, "rb") as file:
        data = file.read()
    length = struct.unpack("<Q", data[:8])[0]
    header = json.loads(data[8:8 + length])
    header.pop("__metadata__", None)
    out = {}
    for name, entry in header.items():
        first, end = (8 + length + at for at in entry["data_offsets"])
        array = np.frombuffer(data[first:end], DTYPES[entry["dtype"]]).reshape(entry["shape"])
        out[name] = from_bf16(array) if entry["dtype"] == "BF16" else array
    return out


def write_file(path, tensors):
    """tensors: {name: (dtype, array)}. Larger elements come first, so that all are aligned."""
    header, blobs, at = {}, [], 0
    for name, (dtype, array) in sorted(tensors.items(), key=lambda t: (-t[1][1].itemsize, t[0])):
        blob = np.ascontiguousarray(array, DTYPES[dtype]).tobytes()
        header[name] = {"dtype": dtype, "shape": list(array.shape),
                        "data_offsets": [at, at + len(blob)]}
        blobs.append(blob)
        at += len(blob)
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text + b"".join(blobs))


# ---------------------------------------------------------------- folders of models

def outputs(layer, hidden, seed=7, **functions):
    """The tensors of golden.safetensors for a layer: x, and what the functions make of it."""
    random, out = np.random.default_rng(seed), {}
    for tokens in (1, 37):
        x = through_bf16(random.standard_normal((tokens, hidden)))
        values = {"x": x, **{name: function(x) for name, function in functions.items()}}
        for name, value in values.items():
            out["layer%d.T%d.%s" % (layer, tokens, name)] = ("F32", value.astype(np.float32))
    return out


def write_model(target, name, config, tensors, golden):
    directory = os.path.join(target, name)
    os.makedirs(directory, exist_ok=True)
    with open(os.path.join(directory, "config.json"), "w") as file:
        json.dump(config, file, indent=2, sort_keys=True)
        file.write("\n")
    write_file(os.path.join(directory, "model.safetensors"), tensors)
    write_file(os.path.join(directory, "golden.safetensors"), golden)


def check_again(make, name, target):
    """Makes a model again, and compares: weights by bytes, outputs by value."""
    with tempfile.TemporaryDirectory() as again:
        make(again, name)
        for file in ("config.json", "model.safetensors"):
            assert filecmp.cmp(os.path.join(again, name, file),
                               os.path.join(target, name, file), shallow=False), (name, file)
        old, new = (read_file(os.path.join(root, name, "golden.safetensors"))
                    for root in (target, again))
    assert set(old) == set(new), name
    for key, value in old.items():
        assert np.linalg.norm(new[key] - value) <= 1e-6 * np.linalg.norm(value), (name, key)


def make_models(make, names, target, options, others=()):
    """Calls make(target, name) for each. With the option --check, compares with what is there:
    these models and `others`."""
    for name in names:
        if options == ["--check"]:
            check_again(make, name, target)
        else:
            make(target, name)
    there = sorted(n for n in os.listdir(target) if os.path.isdir(os.path.join(target, n)))
    assert there == sorted([*names, *others]), there


# ---------------------------------------------------------------- numbers

def to_bf16(x):
    """Bits, rounded to nearest even."""
    bits = np.asarray(x, np.float32).view(np.uint32).astype(np.uint64)
    return ((bits + 0x7fff + (bits >> 16 & 1)) >> 16).astype(np.uint16)


def from_bf16(bits):
    return (bits.astype(np.uint32) << 16).view(np.float32)


def through_bf16(x):
    return from_bf16(to_bf16(x))


def minifloat(exponent_bits, mantissa_bits, codes):
    """The values of the first `codes` codes of a float without its sign."""
    bias = 2 ** (exponent_bits - 1) - 1
    values = []
    for code in range(codes):
        exponent, mantissa = code >> mantissa_bits, code & (1 << mantissa_bits) - 1
        fraction = mantissa / 2 ** mantissa_bits
        values.append(2.0 ** (1 - bias) * fraction if exponent == 0
                      else 2.0 ** (exponent - bias) * (1 + fraction))
    return np.array(values)


E4M3 = minifloat(4, 3, 127)
E2M1 = minifloat(2, 1, 8)


def nearest(x, values, sign_bit):
    """Codes of the nearest values; of two, the even code. Larger ones saturate."""
    size = np.abs(np.asarray(x, np.float64))
    up = np.clip(np.searchsorted(values, size), 1, len(values) - 1)
    below, above = size - values[up - 1], values[up] - size
    code = np.where((below < above) | ((below == above) & (up % 2 == 1)), up - 1, up)
    return (code | np.where(np.signbit(x), sign_bit, 0)).astype(np.uint8)


def value_of(codes, values, sign_bit):
    size = values[codes & sign_bit - 1]
    return np.where(codes & sign_bit, -size, size).astype(np.float32)


def power_of_two_above(x):
    """E8M0 bytes of scales that are at least x."""
    return (np.ceil(np.log2(x)) + 127).astype(np.uint8)


def from_e8m0(b):
    return np.exp2(b.astype(np.float64) - 127).astype(np.float32)


def pack_nibbles(q):
    """[N, K] -> bytes [N, K/2], the even element low."""
    return (q[:, 0::2] | q[:, 1::2] << 4).astype(np.uint8)


def pack_words(q, order=range(8)):
    """[.., 8 n] -> I32 [.., n]; element order[i] of 8 has bits 4 i."""
    groups = q.reshape(*q.shape[:-1], -1, 8).astype(np.uint32)
    word = np.zeros(groups.shape[:-1], np.uint32)
    for place, element in enumerate(order):
        word |= groups[..., element] << np.uint32(4 * place)
    return word.view(np.int32)


# ---------------------------------------------------------------- schemes
# Each takes a matrix [N, K] and returns its tensors by suffix, and its values in single precision.

def spread(scales, rows, columns, n, k):
    return np.repeat(np.repeat(scales, rows, 0), columns, 1)[:n, :k]


def block_maximum(w, rows, columns):
    n, k = w.shape
    padded = np.zeros((-(-n // rows) * rows, -(-k // columns) * columns), np.float32)
    padded[:n, :k] = np.abs(w)
    return padded.reshape(-1, rows, padded.shape[1] // columns, columns).max((1, 3))


def fp8(w, rows=None, columns=None, kind="F32", suffix=".weight_scale", shape=None, extra=()):
    n, k = w.shape
    rows, columns = rows or n, columns or k
    scale = np.maximum(block_maximum(w, rows, columns), 1e-10) / np.float32(448)
    if kind in ("F8_E8M0", "U8"):
        stored = power_of_two_above(scale)
        scale = from_e8m0(stored)
    elif kind == "powers":
        stored = scale = from_e8m0(power_of_two_above(scale))
        kind = "F32"
    elif kind == "BF16":
        stored = to_bf16(scale)
        scale = from_bf16(stored)
    else:
        stored = scale = scale.astype(np.float32)
    s = spread(scale, rows, columns, n, k)
    q = nearest(w / s, E4M3, 0x80)
    tensors = {".weight": ("F8_E4M3", q),
               suffix: (kind, stored if shape is None else stored.reshape(shape))}
    for name in extra:
        tensors[name] = ("F32", np.array(0.5, np.float32))
    return tensors, value_of(q, E4M3, 0x80) * s


def mxfp4(w, packed=".weight_packed", scales=".weight_scale", kind="U8", data="U8"):
    stored = power_of_two_above(np.maximum(block_maximum(w, 1, 32), 1e-30) / 6)
    s = spread(from_e8m0(stored), 1, 32, *w.shape)
    q = nearest(w / s, E2M1, 8)
    return ({packed: (data, pack_nibbles(q).view(DTYPES[data])), scales: (kind, stored)},
            value_of(q, E2M1, 8) * s)


def nvfp4(w, packed, scale, name, divides):
    most = block_maximum(w, 1, 16)
    of_all = np.float32(most.max() / (448 * 6))
    of_all = np.float32(1 / of_all) if divides else of_all
    stored = nearest(most / 6 * of_all if divides else most / 6 / of_all, E4M3, 0x80)
    stored = np.maximum(stored, 1)
    eights = value_of(stored, E4M3, 0x80)
    s = spread(eights / of_all if divides else eights * of_all, 1, 16, *w.shape)
    q = nearest(w / s, E2M1, 8)
    shape = (1,) if divides else ()
    return ({packed: ("U8", pack_nibbles(q)), scale: ("F8_E4M3", stored),
             name: ("F32", of_all.reshape(shape)),
             ".input_global_scale" if divides else ".input_scale":
                 ("F32", np.float32(1).reshape(shape))},
            value_of(q, E2M1, 8) * s)


def int4(w, group, symmetric, half):
    """q, zero points and scales [N, K / group], rounded to the format by `half`."""
    parts = w.reshape(w.shape[0], -1, group)
    if symmetric:
        scale = half(np.abs(parts).max(2) / np.float32(7.5))
        zero = np.full(scale.shape, 8)
    else:
        low, high = np.minimum(parts.min(2), 0), np.maximum(parts.max(2), 0)
        scale = half((high - low) / np.float32(15))
        zero = np.clip(np.rint(-low / scale), 1, 15).astype(int)
    q = np.clip(np.rint(parts / scale[..., None]) + zero[..., None], 0, 15).astype(np.uint8)
    values = (q.astype(np.float32) - zero[..., None].astype(np.float32)) * scale[..., None]
    return q.reshape(w.shape), zero, scale, values.reshape(w.shape).astype(np.float32)


def int4_packed(w, group, symmetric):
    q, zero, scale, values = int4(w, group, symmetric, through_bf16)
    tensors = {".weight_packed": ("I32", pack_words(q)),
               ".weight_scale": ("BF16", to_bf16(scale)),
               ".weight_shape": ("I64", np.array(w.shape))}
    if not symmetric:
        tensors[".weight_zero_point"] = ("I32", np.ascontiguousarray(pack_words(zero.T).T))
    return tensors, values


def in_half(x):
    return x.astype(np.float16).astype(np.float32)


def gptq(w, group, first_format):
    q, zero, scale, values = int4(w, group, False, in_half)
    return {".qweight": ("I32", np.ascontiguousarray(pack_words(q).T)),
            ".scales": ("F16", scale.T.astype(np.float16)),
            ".qzeros": ("I32", pack_words(np.ascontiguousarray(zero.T) - int(first_format))),
            ".g_idx": ("I32", np.arange(w.shape[1]) // group)}, values


def awq(w, group):
    order = [0, 2, 4, 6, 1, 3, 5, 7]
    q, zero, scale, values = int4(w, group, False, in_half)
    return {".qweight": ("I32", pack_words(np.ascontiguousarray(q.T), order)),
            ".scales": ("F16", scale.T.astype(np.float16)),
            ".qzeros": ("I32", pack_words(np.ascontiguousarray(zero.T), order))}, values


# ---------------------------------------------------------------- a MoE block

def silu(z):
    return z / (1 + np.exp(-z))


def expert(block, x, w):
    g, u = x @ w["gate"].T + w.get("gate_bias", 0), x @ w["up"].T + w.get("up_bias", 0)
    limit = block.get("limit")
    if limit is not None:
        g, u = np.minimum(g, limit), np.clip(u, -limit, limit)
    if block["act"] == "oai":
        h = g / (1 + np.exp(-1.702 * g)) * (u + 1)
    else:
        h = silu(g) * u
    return h @ w["down"].T + w.get("down_bias", 0)


def route(block, x):
    """Ids and weights of each token's experts."""
    config, k = block["config"], block["config"]["num_experts_per_tok"]
    logits = x @ block["router"].T + block.get("logit_bias", 0)
    if block["score"] == "topk_softmax":
        ids = np.argsort(-logits, 1, kind="stable")[:, :k]
        chosen = np.take_along_axis(logits, ids, 1)
        weights = np.exp(chosen - chosen.max(1, keepdims=True))
        return ids, weights / weights.sum(1, keepdims=True)
    if block["score"] == "softmax":
        score = np.exp(logits - logits.max(1, keepdims=True))
        score /= score.sum(1, keepdims=True)
    elif block["score"] == "sigmoid":
        score = 1 / (1 + np.exp(-logits))
    else:
        score = np.sqrt(np.logaddexp(0, logits))
    key = score + block.get("select_bias", 0)
    groups = config.get("n_group") or 1
    if groups > 1:
        parts = key.reshape(len(x), groups, -1)
        best = np.sort(parts, 2)[:, :, -2:].sum(2)
        keep = np.argsort(-best, 1, kind="stable")[:, :config["topk_group"]]
        mask = np.full(parts.shape, -np.inf)
        for token in range(len(x)):
            mask[token, keep[token]] = 0
        key = (parts + mask).reshape(key.shape)
    ids = np.argsort(-key, 1, kind="stable")[:, :k]
    weights = np.take_along_axis(score, ids, 1)
    if block["renorm"]:
        weights = weights / (weights.sum(1, keepdims=True) + (1e-20 if block["scaled"] else 0))
    return ids, weights * (config["routed_scaling_factor"] if block["scaled"] else 1)


def compute(block, x):
    x = x.astype(np.float64)
    ids, weights = route(block, x)
    y = np.zeros_like(x)
    for token in range(len(x)):
        for e, w in zip(ids[token], weights[token]):
            if block["weighs_inputs"]:
                y[token] += expert(block, w * x[token], block["experts"][e])
            else:
                y[token] += w * expert(block, x[token], block["experts"][e])
    if "shared" in block:
        shared = expert(block, x, block["shared"])
        if "shared_gate" in block:
            shared = shared / (1 + np.exp(-(x @ block["shared_gate"].T)))
        y += shared
    return y


FAMILIES = {
    "mixtral": dict(score="softmax", renorm=True, block="block_sparse_moe",
                    names=("w1", "w3", "w2")),
    "minimax_m2": dict(score="sigmoid", renorm=True, block="block_sparse_moe",
                       names=("w1", "w3", "w2"), bias="block_sparse_moe.e_score_correction_bias"),
    "qwen2_moe": dict(score="softmax", renorm=False, block="mlp", shared="shared_expert",
                      shared_gate="mlp.shared_expert_gate.weight"),
    "qwen3_moe": dict(score="softmax", renorm=False, block="mlp"),
    "deepseek_v3": dict(score="sigmoid", renorm=True, block="mlp", scaled=True,
                        shared="shared_experts", bias="mlp.gate.e_score_correction_bias"),
    "glm4_moe": dict(score="sigmoid", renorm=True, block="mlp", scaled=True,
                     shared="shared_experts", bias="mlp.gate.e_score_correction_bias"),
    "gpt_oss": dict(score="topk_softmax", renorm=False, block="mlp", act="oai", limit=7.0),
    "llama4": dict(score="sigmoid", renorm=False, block="feed_forward", shared="shared_expert",
                   weighs_inputs=True),
}
PARTS = ("gate", "up", "down")


def read_block(models, base, layer):
    """The MoE block of a golden model: weights [out, in] and what is computed."""
    family = FAMILIES[base]
    with open(os.path.join(models, base, "config.json")) as file:
        config = json.load(file)
    tensors = read_file(os.path.join(models, base, "model.safetensors"))
    prefix = "model.layers.%d." % layer
    block = {"config": config, "score": family["score"], "act": family.get("act", "silu"),
             "renorm": config.get("norm_topk_prob", family["renorm"]),
             "scaled": family.get("scaled", False), "limit": family.get("limit"),
             "weighs_inputs": family.get("weighs_inputs", False)}
    inside = prefix + family["block"]
    if base == "gpt_oss":
        block["router"] = tensors[inside + ".router.weight"]
        block["logit_bias"] = tensors[inside + ".router.bias"]
        gate_up, down = (tensors["%s.experts.%s" % (inside, n)].transpose(0, 2, 1)
                         for n in ("gate_up_proj", "down_proj"))
        biases = tensors[inside + ".experts.gate_up_proj_bias"]
        down_bias = tensors[inside + ".experts.down_proj_bias"]
        block["experts"] = [dict(gate=gate_up[e, 0::2], up=gate_up[e, 1::2], down=down[e],
                                 gate_bias=biases[e, 0::2], up_bias=biases[e, 1::2],
                                 down_bias=down_bias[e]) for e in range(len(down))]
        return block
    block["router"] = tensors[inside + (".router" if base == "llama4" else ".gate") + ".weight"]
    if "bias" in family:
        block["select_bias"] = tensors[prefix + family["bias"]]
    if "shared_gate" in family:
        block["shared_gate"] = tensors[prefix + family["shared_gate"]]
    if "shared" in family:
        block["shared"] = {p: tensors["%s.%s.%s_proj.weight" % (inside, family["shared"], p)]
                           for p in PARTS}
    if base == "llama4":
        both, down = (tensors["%s.experts.%s" % (inside, n)].transpose(0, 2, 1)
                      for n in ("gate_up_proj", "down_proj"))
        half = both.shape[1] // 2
        block["experts"] = [dict(gate=both[e, :half], up=both[e, half:], down=down[e])
                            for e in range(len(down))]
        return block
    names = family.get("names", tuple(p + "_proj" for p in PARTS))
    block["experts"] = [{p: tensors["%s.experts.%d.%s.weight" % (inside, e, n)]
                         for p, n in zip(PARTS, names)} for e in range(len(block["router"]))]
    return block


def check_families(models):
    for base in FAMILIES:
        golden = read_file(os.path.join(models, base, "golden.safetensors"))
        layer = max(int(name[5:name.index(".")]) for name in golden)
        block = read_block(models, base, layer)
        for tokens in (1, 37):
            x, y = (golden["layer%d.T%d.%s" % (layer, tokens, n)] for n in "xy")
            error = np.linalg.norm(compute(block, x) - y) / np.linalg.norm(y)
            assert error < 2e-6, (base, error)
            print("%-12s T %2d: %.1e from transformers" % (base, tokens, error))


# ---------------------------------------------------------------- models

def config_group(**weights):
    activations = weights.pop("activations", None)
    return {"group_0": {"targets": ["Linear"], "input_activations": activations,
                        "output_activations": None,
                        "weights": dict(dynamic=False, observer="minmax", **weights)}}


def compressed(form, ignore, **weights):
    return {"quant_method": "compressed-tensors", "format": form, "ignore": ignore,
            "quantization_status": "compressed", "kv_cache_scheme": None,
            "global_compression_ratio": None, "config_groups": config_group(**weights)}


BLOCKS = dict(quant_method="fp8", fmt="e4m3", activation_scheme="dynamic",
              weight_block_size=[32, 32])
KIMI_IGNORE = ["lm_head", "re:.*self_attn.*", "re:.*shared_experts.*",
               r"re:.*mlp\.(gate|up|gate_up|down)_proj.*"]
INVERSE = ".weight_scale_inv"

# name: base, quantization_config, scheme of routed experts, of shared ones (None: not quantised),
# changes of config.json
MODELS = {
    "fp8_block_deepseek_v3": ("deepseek_v3", BLOCKS,
                              lambda w: fp8(w, 32, 32, suffix=INVERSE), "same"),
    "fp8_ue8m0_deepseek_v3": ("deepseek_v3", dict(BLOCKS, scale_fmt="ue8m0"),
                              lambda w: fp8(w, 32, 32, "powers", INVERSE), "same"),
    "fp8_block_minimax_m2": ("minimax_m2",
                             dict(BLOCKS, fmt="float8_e4m3fn", modules_to_not_convert=[
                                 "gate", "e_score_correction_bias", "lm_head"]),
                             lambda w: fp8(w, 32, 32, "BF16", INVERSE), None),
    "fp8_block_128_qwen3_moe": ("qwen3_moe",
                                dict(BLOCKS, weight_block_size=[128, 128],
                                     modules_to_not_convert=["lm_head", "model.layers.1.mlp.gate"]),
                                lambda w: fp8(w, 128, 128, suffix=INVERSE), None),
    "fp8_tensor_mixtral": ("mixtral", dict(quant_method="fp8", activation_scheme="static",
                                           weight_block_size=None, ignored_layers=["lm_head"]),
                           lambda w: fp8(w, shape=(), extra=[".input_scale"]), None),
    "fp8_channel_glm4_moe": ("glm4_moe",
                             compressed("float-quantized", ["lm_head", "model.layers.1.mlp.gate",
                                                            "re:.*self_attn.*"],
                                        num_bits=8, type="float", strategy="channel",
                                        symmetric=True, activations={
                                            "num_bits": 8, "type": "float", "dynamic": True,
                                            "strategy": "token"}),
                             lambda w: fp8(w, 1, kind="BF16"), "same"),
    "fp8_fbgemm_qwen2_moe": ("qwen2_moe", dict(quant_method="fbgemm_fp8",
                                               activation_scale_ub=1200.0, modules_to_not_convert=[
                                                   "lm_head", "shared_expert"]),
                             lambda w: fp8(w, 1), None),
    "fp8_fbgemm_llama4": ("llama4", dict(quant_method="fbgemm_fp8", activation_scale_ub=1200.0,
                                         modules_to_not_convert=["lm_head", "self_attn",
                                                                 "feed_forward.router"]),
                          lambda w: fp8(w, 1), "same"),
    "fp8_modelopt_mixtral": ("mixtral", dict(quant_method="modelopt", quant_algo="FP8",
                                             ignore=["lm_head", "*.gate"],
                                             producer={"name": "modelopt"}),
                             lambda w: fp8(w, shape=(), extra=[".input_scale"]), None),
    "mxfp8_mixtral": ("mixtral", dict(quant_method="mxfp8", weight_block_size=[1, 32],
                                      ignored_layers=["gate", "lm_head"]),
                      lambda w: fp8(w, 1, 32, "U8", INVERSE), None),
    "mxfp4_gpt_oss": ("gpt_oss", dict(quant_method="mxfp4", modules_to_not_convert=[
        "model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]),
                      mxfp4, None),
    "mxfp4_packed_mixtral": ("mixtral", compressed("mxfp4-pack-quantized",
                                                   ["re:.*gate$", "lm_head"], num_bits=4,
                                                   type="float", strategy="group",
                                                   group_size=32, symmetric=True,
                                                   scale_dtype="torch.uint8"), mxfp4, None),
    "mxfp4_deepseek_v4": ("mixtral", dict(quant_method="fp8", scale_fmt="ue8m0", fmt="e4m3",
                                          activation_scheme="dynamic", weight_block_size=[32, 32]),
                          lambda w: mxfp4(w, ".weight", ".scale", "F8_E8M0", "I8"),
                          lambda w: fp8(w, 32, 32, "F8_E8M0", ".scale")),
    "int4_kimi_k2": ("deepseek_v3", compressed("pack-quantized", KIMI_IGNORE, num_bits=4,
                                               type="int", strategy="group", group_size=16,
                                               symmetric=True),
                     lambda w: int4_packed(w, 16, True), None),
    "int4_group_32_mixtral": ("mixtral", compressed("pack-quantized", ["lm_head", "re:.*gate$"],
                                                    num_bits=4, type="int", strategy="group",
                                                    group_size=32, symmetric=True),
                              lambda w: int4_packed(w, 32, True), None),
    "int4_channel_mixtral": ("mixtral", compressed("pack-quantized", ["lm_head", "re:.*gate$"],
                                                   num_bits=4, type="int", strategy="channel",
                                                   group_size=None, symmetric=True),
                             lambda w: int4_packed(w, w.shape[1], True), None),
    "int4_zero_points_mixtral": ("mixtral", compressed("pack-quantized", ["lm_head", "re:.*gate$"],
                                                       num_bits=4, type="int", strategy="group",
                                                       group_size=32, symmetric=False),
                                 lambda w: int4_packed(w, 32, False), None),
    "gptq_qwen2_moe": ("qwen2_moe", dict(quant_method="gptq", bits=4, group_size=16, sym=False,
                                         desc_act=False, checkpoint_format="gptq", lm_head=False,
                                         pack_dtype="int32", damp_percent=0.01, dynamic={
                                             "lm_head": {}, "-:.*attn.*": {},
                                             "-:.*shared_expert.*": {}, r"-:.*mlp\.gate$": {}}),
                       lambda w: gptq(w, 16, True), None),
    "gptq_v2_qwen3_moe": ("qwen3_moe", dict(quant_method="gptq", bits=4, group_size=16, sym=True,
                                            desc_act=False, checkpoint_format="gptq_v2"),
                          lambda w: gptq(w, 16, False), None),
    "awq_qwen3_moe": ("qwen3_moe", dict(quant_method="awq", bits=4, group_size=16, zero_point=True,
                                        version="gemm", modules_to_not_convert=["gate"]),
                      lambda w: awq(w, 16), None),
    "nvfp4_modelopt_qwen3_moe": ("qwen3_moe", dict(quant_method="modelopt", quant_algo="NVFP4",
                                                   group_size=16,
                                                   exclude_modules=["lm_head", "*.mlp.gate"]),
                                 lambda w: nvfp4(w, ".weight", ".weight_scale", ".weight_scale_2",
                                                 False), None),
    "nvfp4_packed_mixtral": ("mixtral", compressed("nvfp4-pack-quantized",
                                                   ["lm_head", "re:.*gate$"], num_bits=4,
                                                   type="float",
                                                   strategy="tensor_group", group_size=16,
                                                   symmetric=True),
                             lambda w: nvfp4(w, ".weight_packed", ".weight_scale",
                                             ".weight_global_scale", True), None),
}


def deepseek_v4(block, shared):
    """A DeepSeek-V4 block with the weights of another one, and a limit that many values pass."""
    block = dict(block, score="sqrtsoftplus", scaled=True, renorm=True, limit=1.0, shared=shared)
    block["select_bias"] = through_bf16(np.linspace(-0.05, 0.05, len(block["experts"])))
    old = block["config"]
    block["config"] = {
        "architectures": ["DeepseekV4ForCausalLM"], "model_type": "deepseek_v4",
        "dtype": "bfloat16", "hidden_size": old["hidden_size"],
        "moe_intermediate_size": old["intermediate_size"], "num_hidden_layers": 1,
        "n_routed_experts": len(block["experts"]), "n_shared_experts": 1,
        "num_experts_per_tok": 2, "scoring_func": "sqrtsoftplus", "topk_method": "noaux_tc",
        "norm_topk_prob": True, "routed_scaling_factor": 1.5, "swiglu_limit": 1.0,
        "num_hash_layers": 0, "expert_dtype": "fp4"}
    return block


def quantised(block, scheme, shared_scheme, rounded):
    """The block with dequantised weights, rounded by `rounded`, and the tensors of each matrix."""
    out, tensors = dict(block, experts=[]), {}
    def take(where, w, quantise):
        made, values = quantise(w)
        tensors[where] = made
        return rounded(values).astype(np.float64)
    for e, w in enumerate(block["experts"]):
        out["experts"].append({**w, **{p: take((e, p), w[p], scheme) for p in PARTS}})
    if "shared" in block and shared_scheme is not None:
        out["shared"] = {p: take(("shared", p), block["shared"][p], shared_scheme) for p in PARTS}
    return out, tensors


def to_half(block):
    """GPTQ and AWQ come with F16 for all else."""
    out = dict(block, config=dict(block["config"], dtype="float16"))
    for name in ("router", "select_bias", "shared_gate"):
        if name in block:
            out[name] = in_half(block[name])
    if "shared" in block:
        out["shared"] = {p: in_half(w) for p, w in block["shared"].items()}
    return out


def in_file(block, made, base, name, layer):
    """{tensor name: (dtype, array)}."""
    v4 = name.endswith("deepseek_v4")
    family = FAMILIES[base]
    if v4:
        family = dict(family, block="ffn", bias="ffn.gate.bias", shared="shared_experts")
    prefix = "layers.%d." % layer if v4 else "model.layers.%d." % layer
    inside = prefix + family["block"]
    half = block["config"]["dtype"] == "float16"
    plain = lambda w: ("F16", w.astype(np.float16)) if half else ("BF16", to_bf16(w))
    names = family.get("names", tuple(p + "_proj" for p in PARTS))
    out = {}
    if base == "gpt_oss":
        out[inside + ".router.weight"] = plain(block["router"])
        out[inside + ".router.bias"] = plain(block["logit_bias"])
        experts = block["experts"]
        def alternate(gate, up):
            both = np.stack([gate, up], 1)
            return both.reshape(-1, *both.shape[2:])
        for suffix, old in (("_blocks", ".weight_packed"), ("_scales", ".weight_scale")):
            both, down = [], []
            for e in range(len(experts)):
                of = [made[e, p][old][1] for p in PARTS]
                of = [a.reshape(a.shape[0], -1, 16) if suffix == "_blocks" else a for a in of]
                both.append(alternate(of[0], of[1]))
                down.append(of[2])
            out[inside + ".experts.gate_up_proj" + suffix] = ("U8", np.stack(both))
            out[inside + ".experts.down_proj" + suffix] = ("U8", np.stack(down))
        out[inside + ".experts.gate_up_proj_bias"] = plain(
            np.stack([alternate(w["gate_bias"], w["up_bias"]) for w in experts]))
        out[inside + ".experts.down_proj_bias"] = plain(np.stack([w["down_bias"] for w in experts]))
        return out
    if base == "llama4":
        out[inside + ".router.weight"] = plain(block["router"])
        for suffix, old in (("", ".weight"), ("_scale", ".weight_scale")):
            of = [np.stack([made[e, p][old][1] for e in range(len(block["experts"]))])
                  for p in PARTS]
            kind, both = made[0, "gate"][old][0], np.concatenate(of[:2], 1).transpose(0, 2, 1)
            down = of[2].transpose(0, 2, 1) if suffix == "" else of[2]
            out[inside + ".experts.gate_up_proj" + suffix] = (kind, np.ascontiguousarray(both))
            out[inside + ".experts.down_proj" + suffix] = (kind, np.ascontiguousarray(down))
        made = {key: value for key, value in made.items() if key[0] == "shared"}
    else:
        out[inside + ".gate.weight"] = plain(block["router"])
    if "select_bias" in block:
        out[prefix + family["bias"]] = plain(block["select_bias"])
    if "shared_gate" in block:
        out[prefix + family["shared_gate"]] = plain(block["shared_gate"])
    for (e, p), tensors in made.items():
        module = "%s.%s" % (inside, family["shared"]) if e == "shared" else \
            "%s.experts.%d" % (inside, e)
        names_here = names if e != "shared" or v4 else tuple(q + "_proj" for q in PARTS)
        for suffix, tensor in tensors.items():
            out["%s.%s%s" % (module, names_here[PARTS.index(p)], suffix)] = tensor
    if "shared" in block and ("shared", "gate") not in made:
        for p in PARTS:
            out["%s.%s.%s_proj.weight" % (inside, family["shared"], p)] = plain(block["shared"][p])
    return out


def make(models, target, name):
    base, quantisation, scheme, shared = MODELS[name]
    layer = 1 if base in ("deepseek_v3", "glm4_moe") else 0
    block = read_block(models, base, layer)
    if quantisation["quant_method"] in ("awq", "gptq"):
        block = to_half(block)
    config = dict(block["config"], num_hidden_layers=layer + 1)
    if name == "int4_kimi_k2":
        config["model_type"] = "kimi_k2"
    if base == "llama4":
        config.update({key: config[key][:1] for key in ("layer_types", "moe_layers",
                                                        "no_rope_layers")})
    if name.endswith("deepseek_v4"):
        block = deepseek_v4(block, read_block(models, base, 1)["experts"][0])
        config = block["config"]
    shared = scheme if shared == "same" else shared
    decoded, made = quantised(block, scheme, shared, through_bf16)
    exact, _ = quantised(block, scheme, shared, np.float32)
    config["quantization_config"] = quantisation
    golden = outputs(layer, config["hidden_size"], y=lambda x: compute(decoded, x),
                     exact=lambda x: compute(exact, x))
    write_model(target, name, config, in_file(block, made, base, name, layer), golden)
    x, y = (golden["layer%d.T37.%s" % (layer, n)][1] for n in "xy")
    unquantised = compute(block, x)
    print("%-26s %.1e from the unquantised model" % (
        name, np.linalg.norm(y - unquantised) / np.linalg.norm(unquantised)))
    if block["limit"] is not None and "shared" in block:
        up = x.astype(np.float64) @ exact["shared"]["up"].T
        passed = np.mean(np.abs(up) > block["limit"])
        print("%-26s %.0f %% of the shared expert's values pass the limit" % ("", 100 * passed))
        assert passed > 0.05


def main():
    *options, models, target = sys.argv[1:]
    check_families(models)
    make_models(lambda root, name: make(models, root, name), MODELS, target, options)


if __name__ == "__main__":
    main()
