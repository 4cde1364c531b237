# SPDX-License-Identifier: Apache-2.0
"""Times of plain forward passes during training, and during saved pairs, for each share.

Usage: while_training.py BUILD_DIRECTORY GOLDEN_MODELS [SECONDS]

Two workers with a golden model. Prints a table and judges nothing. Put important results into
results/cpu.md, with date, versions and settings.
"""

import os
import sys
import time

SECONDS = float(sys.argv.pop(3)) if len(sys.argv) > 3 else 5.0
sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "integration"))

import numpy as np  # noqa: E402

from load import Load  # noqa: E402
from training import Trainer, golden_gradients, training_group  # noqa: E402

FAMILY = "deepseek_v3"


def case(times=1):
    """A recorded pass of 37 tokens, repeated `times` times."""
    layer, x, dy = next((layer, x, dy) for layer, tokens, x, dy, _ in golden_gradients(FAMILY)
                        if tokens == 37)
    return layer, np.tile(x, (times, 1)), np.tile(dy, (times, 1))


def train(endpoint):
    """Four Backwards per step for SECONDS. Returns the number of steps."""
    layer, x, dy = case()
    t, end, steps = Trainer(endpoint), time.monotonic() + SECONDS, 0
    routing = t.forward(layer, x)
    while time.monotonic() < end:
        for _ in range(4):
            t.backward(layer, dy, x, routing)
        t.optimizer_step(learning_rate=1e-4)
        steps += 1
    t.close()
    return "%d steps" % steps


def save(endpoints, load):
    """Two clients with retained Forwards and their Backwards, for SECONDS. Returns the number of
    pairs."""
    load.retained_pairs(2, endpoints, *case(7))
    time.sleep(SECONDS)
    return "%d pairs" % len(load.pairs)


def measure(share, other, work):
    layer, x, _ = case()
    with training_group(FAMILY, 2, "--training-share", share) as g:
        with Load() as load:
            load.forwards(8, g.endpoints, layer, x)
            done = work(g, load)
        p50, p99 = (float(np.percentile(np.array(load.times) * 1e3, q)) for q in (50, 99))
        print("%5s  %-8s %7d %9.2f %9.2f  %s%s" % (
            share, other, len(load.times), p50, p99, done,
            "; FAILED: %s" % load.failures[0] if load.failures else ""))


if __name__ == "__main__":
    print("8 clients of 37 tokens, %g s a line; ms" % SECONDS)
    print("share  other     passes       p50       p99")
    for each in ("0.1", "0.5"):
        measure(each, "nothing", lambda g, load: time.sleep(SECONDS) or "")
        measure(each, "training", lambda g, load: train(g.endpoints[0]))
        measure(each, "pairs", lambda g, load: save(g.endpoints, load))
