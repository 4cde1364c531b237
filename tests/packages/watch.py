# SPDX-License-Identifier: Apache-2.0
"""Calls a layer all the time, and writes how long it had no answer.

    watch.py HOST:PORT GOLDEN REPORT

Writes a line to REPORT for its first answer, and for each time without a right answer: when it
began, its seconds, and the errors. Ends when the file REPORT.end exists."""

import os
import sys
import time

import numpy as np

import moed


def main(endpoint, golden, path):
    tensors = moed.read_safetensors(golden)
    name = next(n for n in sorted(tensors) if n.endswith("T1.x"))
    layer, x, want = int(name.split(".")[0][len("layer"):]), tensors[name], tensors[name[:-1] + "y"]
    last, errors, calls = time.monotonic(), [], 0
    with open(path, "w", encoding="utf-8", buffering=1) as report:
        while not os.path.exists(path + ".end"):
            try:
                got = moed.Client(endpoint).forward(layer, x, timeout=2)
            except moed.MoeError as error:
                text = str(error).splitlines()[0]
                if text not in errors:
                    errors.append(text)
                time.sleep(0.005)
                continue
            if np.linalg.norm(got - want) > 1e-5 * np.linalg.norm(want):
                sys.exit("a wrong answer")
            now = time.monotonic()
            if errors or calls == 0:
                report.write("%.3f s without an answer: %s\n" % (now - last, errors))
            last, errors, calls = now, [], calls + 1
        report.write("%d right answers\n" % calls)


if __name__ == "__main__":
    main(*sys.argv[1:4])
