# SPDX-License-Identifier: Apache-2.0
"""FP8 experts with FP8 activations (--fp8-compute w8a8) through daemons.

A tiny DeepSeek-V3 in FP8 blocks of 128 x 128, made here, against an emulation of the quantised
arithmetic in numpy, which is written down from kernels/include/moe/weight_format.h and shares no
code with moed: within 1e-2 of it, and within 6e-2 of the dequantised weights (relative Frobenius
norm). A token has the same bits alone, in 64 and in 4,096."""

import json
import os
import subprocess
import sys
import tempfile
import unittest

import numpy as np

from group import BACKEND, DEVICES, MODELS, group, main, relative_error, to_bf16
from training import WORKER
import moed

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(MODELS))))
import quantise  # noqa: E402 (numbers, files and routing of the golden quantised models)

QUANTISED = os.path.join(os.path.dirname(os.path.abspath(MODELS)), "quantised")
HIDDEN, INNER, EXPERTS, LAYER = 320, 160, 8, 1  # groups of 128, 128, 64 and of 128, 32
SHAPES = {"gate": (INNER, HIDDEN), "up": (INNER, HIDDEN), "down": (HIDDEN, INNER)}
CONFIG = {
    "architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3", "dtype": "bfloat16",
    "hidden_size": HIDDEN, "moe_intermediate_size": INNER, "intermediate_size": 64,
    "n_routed_experts": EXPERTS, "n_shared_experts": 1, "num_experts_per_tok": 3, "n_group": 2,
    "topk_group": 1, "norm_topk_prob": True, "routed_scaling_factor": 2.5, "hidden_act": "silu",
    "num_hidden_layers": LAYER + 1, "first_k_dense_replace": LAYER, "scoring_func": "sigmoid",
    "topk_method": "noaux_tc"}


def make_model(folder, scale_fmt):
    """Writes the checkpoint. Returns the block as quantise.route takes it, with the elements and
    scales of each matrix."""
    random = np.random.default_rng(15)
    block = {"config": CONFIG, "score": "sigmoid", "renorm": True, "scaled": True, "experts": []}
    block["router"] = quantise.through_bf16(random.standard_normal((EXPERTS, HIDDEN)) / 16)
    block["select_bias"] = random.uniform(-0.1, 0.1, EXPERTS).astype(np.float32)
    inside = "model.layers.%d.mlp." % LAYER
    tensors = {inside + "gate.weight": ("BF16", to_bf16(block["router"])),
               inside + "gate.e_score_correction_bias": ("F32", block["select_bias"])}
    for e in list(range(EXPERTS)) + ["shared"]:
        module = inside + ("shared_experts" if e == "shared" else "experts.%d" % e)
        expert = {}
        for part, (rows, columns) in SHAPES.items():
            q = quantise.nearest(random.standard_normal((rows, columns)) * 90, quantise.E4M3, 0x80)
            blocks = (-(-rows // 128), -(-columns // 128))
            scale = np.float32(1 / 90 / columns ** 0.5) * random.uniform(0.5, 2, blocks)
            scale = scale.astype(np.float32)
            if scale_fmt == "ue8m0":
                scale = np.exp2(np.rint(np.log2(scale))).astype(np.float32)
            tensors["%s.%s_proj.weight" % (module, part)] = ("F8_E4M3", q)
            tensors["%s.%s_proj.weight_scale_inv" % (module, part)] = ("F32", scale)
            expert[part] = (quantise.value_of(q, quantise.E4M3, 0x80), scale)
        if e == "shared":
            block["shared"] = expert
        else:
            block["experts"].append(expert)
    quantise.write_file(os.path.join(folder, "model.safetensors"), tensors)
    config = dict(CONFIG, quantization_config={
        "quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic",
        "weight_block_size": [128, 128], **({"scale_fmt": scale_fmt} if scale_fmt else {})})
    with open(os.path.join(folder, "config.json"), "w") as file:
        json.dump(config, file)
    return block


# ------------------------------------------------------------ the quantised arithmetic

def quantise_rows(x, pow2):
    """(values of E4M3, scales) of a group [rows, up to 128] in single precision."""
    largest = np.maximum(np.abs(x).max(1, keepdims=True), np.float32(1e-10))
    scale = largest / np.float32(448)
    if pow2:
        fraction, exponent = np.frexp(scale)
        scale = np.ldexp(np.float32(1), np.where(fraction == 0.5, exponent - 1, exponent))
    codes = quantise.nearest(x / scale, quantise.E4M3, 0x80)
    return quantise.value_of(codes, quantise.E4M3, 0x80), scale.astype(np.float32)


def product(x, matrix, pow2):
    """Sums of blocks in double precision, scaled and added in single precision."""
    elements, scales = matrix
    y = np.zeros((len(x), len(elements)), np.float32)
    for k, first in enumerate(range(0, x.shape[1], 128)):
        q, s = quantise_rows(x[:, first:first + 128].astype(np.float32), pow2)
        part = q.astype(np.float64) @ elements[:, first:first + 128].astype(np.float64).T
        scale = np.repeat(scales[:, k], 128)[:len(elements)]
        y += (part.astype(np.float32) * (s * scale)).astype(np.float32)
    return y


def dequantised(x, matrix):
    elements, scales = matrix
    spread = np.repeat(np.repeat(scales, 128, 0), 128, 1)[:elements.shape[0], :elements.shape[1]]
    return x.astype(np.float64) @ (elements.astype(np.float64) * spread).T


def compute(block, x, multiply):
    """y [T, H]; `multiply`: the product of rows and a matrix."""
    def expert(rows, w):
        gate, up = multiply(rows, w["gate"]), multiply(rows, w["up"])
        return multiply(quantise.silu(gate.astype(np.float64)) * up, w["down"])

    ids, weights = quantise.route(block, x.astype(np.float64))
    y = expert(x, block["shared"]).astype(np.float64)
    for e, w in enumerate(block["experts"]):
        token, k = np.nonzero(ids == e)
        if len(token):
            y[token] += weights[token, k, None] * expert(x[token], w)
    return y


# ---------------------------------------------------------------------------- tests

def settings(folder, **values):
    path = os.path.join(folder, "worker.conf")
    with open(path, "w") as file:
        for name, value in values.items():
            file.write("%s = %s\n" % (name.replace("_", "-"), value))
    return path


class Serving(unittest.TestCase):
    def check(self, workers, scale_fmt=None):
        if workers > DEVICES:
            self.skipTest("%d devices are needed" % workers)
        with tempfile.TemporaryDirectory(prefix="moed-fp8-") as folder:
            block = make_model(folder, scale_fmt)
            conf = settings(folder, fp8_compute="w8a8", weights="resident")
            with group(folder, workers, "--worker-config", conf) as g:
                self.compare(moed.Client(g.endpoint), block, workers, scale_fmt == "ue8m0")

    def compare(self, client, block, workers, pow2):
        x = quantise.through_bf16(np.random.default_rng(16).standard_normal((4096, HIDDEN)))
        some = x[:64]
        alike = compute(block, some, lambda rows, w: product(rows, w, pow2))
        plain = compute(block, some, dequantised)
        whole = client.forward(LAYER, x)
        error, distance = relative_error(whole[:64], alike), relative_error(whole[:64], plain)
        bits = np.asarray(client.forward(LAYER, moed.bf16(to_bf16(some)))).view(np.uint16)
        half = relative_error(quantise.from_bf16(bits), alike)
        print("%d workers%s: F32 %.1e, BF16 %.1e of the emulation, %.1e of dequantised weights" % (
            workers, " ue8m0" if pow2 else "", error, half, distance))
        self.assertLessEqual(error, 1e-2)
        self.assertLessEqual(half, 1e-2)
        self.assertLessEqual(distance, 6e-2)
        self.assertGreater(distance, 1e-2)  # activations are quantised
        for first in (0, 64, 4032):
            batch = client.forward(LAYER, x[first:first + 64])
            self.assertEqual(batch.tobytes(), whole[first:first + 64].tobytes())
            alone = client.forward(LAYER, x[first:first + 1])
            self.assertEqual(alone.tobytes(), whole[first:first + 1].tobytes())
        rows = moed.bf16(to_bf16(x))
        whole = np.asarray(client.forward(LAYER, rows))
        for first, count in ((0, 64), (64, 64), (4032, 64), (0, 1), (4095, 1)):
            some = np.asarray(client.forward(LAYER, rows[first:first + count]))
            self.assertEqual(some.tobytes(), whole[first:first + count].tobytes())

    def test_one_worker(self):
        self.check(1)

    def test_two_workers(self):
        self.check(2)

    def test_four_workers(self):
        self.check(4)

    def test_scales_that_are_powers_of_two(self):
        self.check(2, "ue8m0")


class Refusing(unittest.TestCase):
    def start(self, scheme, *options):
        done = subprocess.run(
            [WORKER, "--model", os.path.join(QUANTISED, scheme), "--coordinator", "127.0.0.1:1",
             "--backend", BACKEND, "--fp8-compute", "w8a8", *options],
            stderr=subprocess.PIPE, text=True, timeout=60)
        self.assertNotEqual(done.returncode, 0)
        return done.stderr

    def test_checkpoints_that_ask_for_no_dynamic_activations(self):
        for scheme in ("fp8_tensor_mixtral", "fp8_modelopt_mixtral", "mxfp8_mixtral"):
            error = self.start(scheme, "--weights", "resident")
            self.assertIn("W8A8", error)
            self.assertIn("config.json", error)

    def test_weights_that_do_not_stay_in_fp8(self):
        self.assertIn("--weights bf16", self.start("fp8_block_deepseek_v3", "--weights", "bf16"))

    def test_training(self):
        self.assertIn("--training", self.start("fp8_block_deepseek_v3", "--training", "adamw",
                                               "--lora-rank", "2"))

    @unittest.skipIf(BACKEND == "cpu", "CPUs multiply blocks of any size")
    def test_blocks_that_the_backend_does_not_multiply(self):
        error = self.start("fp8_block_deepseek_v3")  # 32 x 32
        self.assertIn("--fp8-compute w8a8, backend %s" % BACKEND, error)


if __name__ == "__main__":
    main()
