# SPDX-License-Identifier: Apache-2.0
"""`parts` of a forward pass: routed experts, shared experts, or both.

For every golden model the shared part is compared with a numpy computation from the files' weights,
the routed part with transformers' output less that, and the sum of the two with both. Parts of one
step do not influence each other.
"""

import json
import os
import re
import tempfile
import threading
import unittest

import numpy as np

from group import FAMILIES, golden_cases, group, main, model_directory, moectl, relative_error
from fake_group import HIDDEN, LAYER, fakes
import moed

TOLERANCE = 1e-5


def silu(x):
    return x / (1 + np.exp(-x))


NAMES = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj", "shared_expert_gate": "gate"}
# The talker of an Omni model is not served, and Granite's shared_mlp is not in the MoE block.
SHARED = (r"^(?!talker\.)(?:.*\.)?layers\.%d\.(?:.*\.)?"
          r"(?:mlp\.shared_mlp|shared_experts?(?:_gate)?)\b")


class Shared:
    """The shared expert of one layer in float64, from the model's files. None of the families has
    biases there."""

    def __init__(self, family, layer):
        with open(os.path.join(model_directory(family), "config.json")) as file:
            config = json.load(file)
        config = config.get("text_config", config)
        self.limit = config.get("swiglu_limit")
        self.alpha = config.get("swiglu_alpha")
        tensors = moed.read_safetensors(os.path.join(model_directory(family), "model.safetensors"))
        self.weights = {}
        for name, value in tensors.items():
            if re.search(SHARED % layer, name):
                key = name.split(".")[-2]
                self.weights[NAMES.get(key, key)] = moed.f32(value).astype(np.float64)

    def activation(self, gate, up):
        if self.limit is None:
            return silu(gate) * up
        gate, up = np.minimum(gate, self.limit), np.clip(up, -self.limit, self.limit)
        if self.alpha is None:
            return silu(gate) * up
        return gate / (1 + np.exp(-self.alpha * gate)) * (up + 1)

    def __call__(self, x):
        x, w = x.astype(np.float64), self.weights
        if not w:
            return np.zeros_like(x)
        y = self.activation(x @ w["gate_proj"].T, x @ w["up_proj"].T) @ w["down_proj"].T
        return y / (1 + np.exp(-(x @ w["gate"].T))) if "gate" in w else y


class Parts(unittest.TestCase):
    def check_case(self, client, family, layer, x, want):
        shared = Shared(family, layer)
        has_shared = client.layer(layer).shared_intermediate > 0
        self.assertEqual(bool(shared.weights), has_shared, family)
        both = client.forward(layer, x, parts="both")
        got = {"shared": client.forward(layer, x, parts="shared"),
               "routed": client.forward(layer, x, parts="routed", return_routing=True)}
        routing, got["routed"] = got["routed"], got["routed"].y
        again = client.forward(layer, x, topk_ids=routing.topk_ids,
                               topk_weights=routing.topk_weights, parts="routed")
        np.testing.assert_array_equal(again, got["routed"])
        np.testing.assert_array_equal(both, client.forward(layer, x))
        errors = {"routed": relative_error(got["routed"], want - shared(x)),
                  "sum": relative_error(got["routed"] + got["shared"], both)}
        if has_shared:
            errors["shared"] = relative_error(got["shared"], shared(x))
            self.assertGreater(relative_error(got["routed"], both), 0.01)
        else:
            np.testing.assert_array_equal(got["shared"], np.zeros_like(x))
            np.testing.assert_array_equal(got["routed"], both)
        print("%-13s layer %d T %2d" % (family, layer, len(x)),
              " ".join("%s %.1e" % each for each in sorted(errors.items())))
        for what, error in errors.items():
            self.assertLessEqual(error, TOLERANCE, (family, layer, what))

    def check_family(self, family, workers):
        with group(family, workers) as g, moed.Client(g.endpoint) as client:
            for layer, _, x, want in golden_cases(family):
                self.check_case(client, family, layer, x, want)

    def test_requests_of_one_step_have_their_own_parts(self):
        """Clients ask at once for different parts; each gets the bits that it gets alone."""
        family, workers = "qwen2_moe", 2
        with group(family, workers) as g, moed.Client(g.endpoint, spread=True) as client:
            layer, _, x, _ = max(golden_cases(family), key=lambda case: case[1])
            alone = {parts: client.forward(layer, x, parts=parts)
                     for parts in ("both", "routed", "shared")}
            failures = []

            def ask(parts):
                with client.stream() as stream:
                    for _ in range(60):
                        if not np.array_equal(stream.forward(layer, x, parts=parts), alone[parts]):
                            failures.append(parts)

            threads = [threading.Thread(target=ask, args=(parts,)) for parts in 2 * list(alone)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            self.assertEqual(failures, [])

    def test_rows_that_are_not_finite_pass_through_the_shared_expert(self):
        with group("qwen2_moe", 1) as g, moed.Client(g.endpoint) as client:
            layer, _, x, _ = next(golden_cases("qwen2_moe"))
            x = np.concatenate([x, x])
            x[1, 3] = np.nan
            y = client.forward(layer, x, parts="shared")
            self.assertTrue(np.isfinite(y[0]).all() and np.isnan(y[1]).all())
            with self.assertRaises(moed.MoeError) as failed:
                client.forward(layer, x, parts="routed")
            self.assertEqual(failed.exception.reason, "NONFINITE_LOGITS")

    def test_moectl_forward(self):
        """Through libmoeclient."""
        family = "glm4_moe"
        layer, _, x, _ = max(golden_cases(family), key=lambda case: case[1])
        with group(family, 2) as g, moed.Client(g.endpoint) as client, \
                tempfile.TemporaryDirectory() as folder:
            source, to = os.path.join(folder, "x"), os.path.join(folder, "y")
            moed.write_safetensors(source, {"x": x})
            for parts in ("both", "routed", "shared"):
                for extra in ([], ["--stream"], ["--spread"]):
                    moectl("forward", "--endpoint", g.endpoint, "--layer", str(layer), "--input",
                           source, "--output", to, "--parts", parts, *extra)
                    np.testing.assert_array_equal(moed.read_safetensors(to)["y"],
                                                  client.forward(layer, x, parts=parts))
            common = ["forward", "--endpoint", g.endpoint, "--layer", str(layer), "--input",
                      source, "--output", to]
            done = moectl(*common, "--parts", "half", check=False)
            self.assertEqual(done.returncode, 2)
            self.assertIn("--parts must be both, routed or shared", done.stderr)
            done = moectl(*common, "--parts", "shared", "--return-routing", check=False)
            self.assertNotEqual(done.returncode, 0)
            self.assertIn("shared experts have no routing", done.stderr)

    def test_bad_requests(self):
        with group("mixtral", 1) as g, moed.Client(g.endpoint) as client:
            layer, _, x, _ = next(golden_cases("mixtral"))
            k = client.layer(layer).top_k
            for bad in ({"parts": "half"}, {"parts": "shared", "return_routing": True},
                        {"parts": "shared", "topk_ids": np.zeros((len(x), k), np.int32)},
                        {"parts": "routed", "retain": ("s", 1)}):
                with self.assertRaises(ValueError):
                    client.forward(layer, x, **bad)

    def test_a_worker_without_parts_is_found_out(self):
        """It computes both and says nothing; the client must not take that for one part."""
        with fakes() as (worker,), moed.Client(worker.endpoint) as client:
            x = np.ones((2, HIDDEN), np.float32)
            client.forward(LAYER, x)
            with self.assertRaises(moed.MoeError) as failed:
                client.forward(LAYER, x, parts="routed")
            self.assertEqual(failed.exception.code.name, "UNIMPLEMENTED")
            self.assertEqual(failed.exception.reason, "UNSUPPORTED")


def add(family, workers):
    setattr(Parts, "test_" + family, lambda self: self.check_family(family, workers))


for number, each_family in enumerate(FAMILIES):
    add(each_family, 1 + number % 3)

if __name__ == "__main__":
    main()
