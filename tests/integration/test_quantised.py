# SPDX-License-Identifier: Apache-2.0
"""Quantised checkpoints of every scheme give the numbers of their dequantised weights through gRPC,
on groups of 1, 2 and 4 workers. Only adapters of them train.

F32 tokens within 1e-5, BF16 tokens within 1e-2 (relative Frobenius norm) of a computation in double
precision on the dequantised weights (tests/golden/quantised/README.md): in single precision where
the weights stay as they are, else rounded to BF16."""

import filecmp
import os
import shutil
import subprocess
import tempfile
import unittest

import numpy as np

from group import BACKEND, DEVICES, MODELS, golden_cases, group, main, relative_error
from group import to_bf16
from test_checkpoints import LORA, Client
from training import WORKER, refusal, training_group
import moed
import wire

ROOT = os.path.join(os.path.dirname(os.path.abspath(MODELS)), "quantised")
# Beginnings of models that the backend computes with as they are. GPUs have no kernels for fp32
# scales of 32 columns, nor for INT4 in groups of 16.
KEPT = {"cpu": ("",), "cuda": ("fp8_block_128", "fp8_channel", "fp8_fbgemm", "fp8_modelopt",
                               "fp8_tensor", "fp8_ue8m0", "int4_channel", "int4_group_32",
                               "int4_zero_points", "mxfp4_", "mxfp8_", "nvfp4_")}[BACKEND]
SCHEMES = sorted(name for name in os.listdir(ROOT) if os.path.isdir(os.path.join(ROOT, name)))


def folder(scheme):
    return os.path.join(ROOT, scheme)


def bf16_to_f32(bits):
    return (np.asarray(bits).view(np.uint16).astype(np.uint32) << 16).view(np.float32)


def quantised_cases(scheme, resident):
    """(layer, tokens, x, y), where y is of weights that stay as they are, or of decoded ones."""
    golden = moed.read_safetensors(os.path.join(folder(scheme), "golden.safetensors"))
    for layer, tokens, x, y in golden_cases(folder(scheme)):
        exact = golden["layer%d.T%d.exact" % (layer, tokens)]
        yield layer, tokens, x, exact if resident else y


class Serving(unittest.TestCase):
    def check(self, scheme, workers, resident):
        with tempfile.NamedTemporaryFile("w", suffix=".conf") as settings:
            settings.write("weights = %s\n" % ("resident" if resident else "bf16"))
            settings.flush()
            with group(folder(scheme), workers, "--worker-config", settings.name) as g:
                self.compare(g, scheme, workers, resident)

    def compare(self, g, scheme, workers, resident):
        client = moed.Client(g.endpoint)
        for layer, tokens, x, want in quantised_cases(scheme, resident):
            whole = relative_error(client.forward(layer, x), want)
            half = relative_error(
                bf16_to_f32(client.forward(layer, moed.bf16(to_bf16(x)))), want)
            print("%-25s %d workers T %2d F32 %.1e BF16 %.1e" % (
                scheme, workers, tokens, whole, half))
            self.assertLessEqual(whole, 1e-5)
            self.assertLessEqual(half, 1e-2)


class Fp8(Serving):
    pass


class Mx(Serving):
    pass


class FourBits(Serving):
    pass


class Decoded(Serving):
    pass


def class_of(scheme, resident):
    if not resident:
        return Decoded
    return Fp8 if scheme.startswith("fp8_") else Mx if scheme.startswith("mx") else FourBits


def add(scheme, workers, resident):
    def test(self):
        self.check(scheme, workers, resident)

    test.__doc__ = "%s on %d workers, %s" % (scheme, workers, "as it is" if resident else "decoded")
    setattr(class_of(scheme, resident), "test_%s_%d_workers" % (scheme, workers), test)


for each_scheme in SCHEMES:
    for each_count in (1, 2, 4):
        if each_count <= DEVICES and each_scheme.startswith(KEPT):
            add(each_scheme, each_count, True)
    if DEVICES >= 2:
        add(each_scheme, 2, False)


class QuantisedClient(Client):
    """The recorded passes have no dy."""

    def __init__(self, g, scheme):
        super(Client, self).__init__(g.endpoints[0])
        self.layer, _, self.x, _ = next(c for c in golden_cases(folder(scheme)) if c[1] == 37)
        self.dy = np.random.default_rng(3).standard_normal(self.x.shape).astype(np.float32)


class Training(unittest.TestCase):
    def setUp(self):
        self.root = tempfile.mkdtemp(prefix="moed-quantised-")
        self.addCleanup(shutil.rmtree, self.root, ignore_errors=True)

    def test_whole_weights_are_refused_at_start(self):
        for extra in ((), LORA, (*LORA, "--freeze", "router")):
            done = subprocess.run(
                [WORKER, "--model", folder("fp8_block_deepseek_v3"), "--coordinator",
                 "127.0.0.1:1", "--backend", BACKEND, "--training", "adamw", *extra],
                stderr=subprocess.PIPE, text=True, timeout=60)
            self.assertNotEqual(done.returncode, 0)
            self.assertIn("FP8 in blocks", done.stderr)
            self.assertIn("train adapters only", done.stderr)

    def check_adapters(self, scheme, *extra):
        """They learn; a checkpoint has the quantised files bit for bit, and restores training."""
        with training_group(folder(scheme), 2, "--training-dir", self.root, *LORA,
                            "--freeze", "router,shared", *extra) as g:
            client = QuantisedClient(g, scheme)
            layer = wire.get_model(client.channel).layers[0]
            self.assertEqual(layer.routed_encoding != 0, scheme.startswith(KEPT))
            before = client.forward(client.layer, client.x).y_data
            first = client.train(1)
            self.assertNotEqual(first[-1], before)
            client.save("a", 15)
            second = client.train(2)
            client.load("a", 25)
            self.assertEqual(client.train(2), second)
            (code, reason), error = refusal(client.export, "", 35, merge=True)
            self.assertEqual((code, reason), ("FAILED_PRECONDITION", "UNSUPPORTED"))
            self.assertIn("quantised", error.details())
            client.export("adapter", 36)
        for name in ("model.safetensors", "config.json"):
            self.assertTrue(filecmp.cmp(os.path.join(folder(scheme), name),
                                        os.path.join(self.root, "a", name), shallow=False), name)
        self.assertIn("adapter_model.safetensors", os.listdir(os.path.join(self.root, "adapter")))

    def test_adapters_of_fp8(self):
        self.check_adapters("fp8_fbgemm_qwen2_moe")

    def test_adapters_of_fused_mxfp4(self):
        self.check_adapters("mxfp4_gpt_oss")

    def test_adapters_of_some_gptq_matrices(self):
        self.check_adapters("gptq_qwen2_moe", "--lora-targets", "up")


if __name__ == "__main__":
    assert len(SCHEMES) >= 20, SCHEMES
    main()
