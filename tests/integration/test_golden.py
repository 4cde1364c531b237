# SPDX-License-Identifier: Apache-2.0
"""Every golden model gives transformers' numbers through gRPC, on groups of 1 to 4 workers.

F32 tokens within 1e-5, BF16 tokens within 1e-2 (relative Frobenius norm), unary and streamed, for
T = 1 and T = 37. With three workers the slots have unequal numbers of experts.

If transformers and DeepSeek differ, moed follows DeepSeek: it never selects experts of groups that
were not chosen (their key is -inf). transformers masks them with 0.0, and could select one if all
keys of the chosen groups are negative. The recorded DeepSeek-V3 tokens have no such case; the
router's tests cover it.
"""

import unittest

import numpy as np

from group import BACKEND, FAMILIES, golden_cases, group, main, relative_error, to_bf16
import moed

F32_TOLERANCE = 1e-5
BF16_TOLERANCE = 1e-2


def bf16_to_f32(bits):
    return (np.asarray(bits).view(np.uint16).astype(np.uint32) << 16).view(np.float32)


class GoldenModels(unittest.TestCase):
    def check(self, family, workers):
        with group(family, workers) as g:
            client = moed.Client(g.endpoint)
            for layer, tokens, x, want in golden_cases(family):
                half = moed.bf16(to_bf16(x))
                with client.stream() as stream:
                    answers = {
                        "unary F32": client.forward(layer, x),
                        "stream F32": stream.forward(layer, x),
                        "unary BF16": client.forward(layer, half),
                        "stream BF16": stream.forward(layer, half),
                    }
                for name, got in answers.items():
                    if name.endswith("BF16"):
                        got, tolerance = bf16_to_f32(got), BF16_TOLERANCE
                    else:
                        tolerance = F32_TOLERANCE
                    error = relative_error(got, want)
                    print("%-13s %d workers layer %d T %2d %-11s error %.1e" % (
                        family, workers, layer, tokens, name, error))
                    self.assertLessEqual(error, tolerance, (family, workers, layer, tokens, name))


def add(family, workers):
    def test(self):
        self.check(family, workers)

    test.__doc__ = "%s on %d workers" % (family, workers)
    setattr(GoldenModels, "test_%s_%d_workers" % (family, workers), test)


for each_family in FAMILIES:
    for each_count in (1, 2, 3, 4):
        add(each_family, each_count)
if BACKEND == "cpu":
    add("mixtral", 64)  # the largest group

if __name__ == "__main__":
    assert len(FAMILIES) == 33, FAMILIES
    main()
