# SPDX-License-Identifier: Apache-2.0
"""Sends a golden checkpoint's recorded inputs through gRPC and compares with its recorded outputs.

Usage: quickstart_check.py HOST:PORT MODEL_DIRECTORY

Prints one row per (layer, tokens) and exits 0 only if every relative error (Frobenius norm) is at
most 1e-5.
"""

import os
import sys
import time

import numpy as np

import moed

TOLERANCE = 1e-5
SECONDS_PER_ROW = 0.5


def main(endpoint, directory):
    golden = moed.read_safetensors(os.path.join(directory, "golden.safetensors"))
    model = os.path.basename(os.path.normpath(directory))
    client = moed.Client(endpoint)
    inputs = sorted(name for name in golden if name.endswith(".x"))
    if not inputs:
        sys.exit("no golden inputs in %s" % directory)

    print("%-14s %5s %6s %10s %9s %10s" % ("model", "layer", "tokens", "error", "p50", "tokens/s"))
    right = True
    for name in inputs:
        layer = int(name.split(".")[0][len("layer") :])
        x, want = golden[name], golden[name[:-1] + "y"]
        got = client.forward(layer, x)
        error = np.linalg.norm(got - want) / np.linalg.norm(want)
        right = right and bool(error <= TOLERANCE)

        latencies = []
        begin = time.perf_counter()
        while time.perf_counter() - begin < SECONDS_PER_ROW:
            start = time.perf_counter()
            client.forward(layer, x)
            latencies.append(time.perf_counter() - start)
        spent = time.perf_counter() - begin
        print("%-14s %5d %6d %10.1e %6.2f ms %10.0f" % (
            model, layer, len(x), error, 1e3 * float(np.median(latencies)),
            len(x) * len(latencies) / spent))
    print("every error is at most %g: %s" % (TOLERANCE, "yes" if right else "NO"))
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:3]))
