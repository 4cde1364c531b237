# SPDX-License-Identifier: Apache-2.0
"""Serving benchmarks through real daemons: overhead of a call, and gains from batching.

Usage: serve.py BUILD_DIRECTORY GOLDEN_MODELS [SECONDS]

Prints two tables and judges nothing. Put important results into results/serving.md, with date,
versions and settings.
"""

import json
import os
import sys

SECONDS = sys.argv.pop(3) if len(sys.argv) > 3 else "5"
sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "integration"))

from group import group, moectl  # noqa: E402

FAMILY = "qwen3_moe"


def bench(endpoint, tokens, concurrency, *extra):
    """Runs `moectl bench` once per concurrency and returns the rows of its JSON."""
    out = moectl("bench", "--endpoint", endpoint, "--layer", "0", "--tokens", str(tokens),
                 "--concurrency", concurrency, "--duration", SECONDS, "-o", "json", *extra).stdout
    return json.loads(out)["runs"]


def overhead(workers):
    with group(FAMILY, workers) as g:
        for kind in ("--unary", "--stream"):
            (run,) = bench(g.endpoint, 1, "1", kind)
            print("%7d %-6s" % (workers, kind[2:]) + "".join(
                "  %6.0f %6.0f" % (run[what]["p50"], run[what]["p99"])
                for what in ("latencyUs", "overheadUs", "serverOverheadUs")))


def batching(workers):
    with group(FAMILY, workers) as g:
        one, many = bench(g.endpoint, 4, "1,32")
        ratio = many["tokensPerS"] / one["tokensPerS"]
        print(
            "%d workers: 1 client of 4 tokens %.0f tokens/s, 32 clients %.0f tokens/s, ratio %.2f" %
            (workers, one["tokensPerS"], many["tokensPerS"], ratio))


if __name__ == "__main__":
    print("T = 1, one client; microseconds, p50 and p99 each")
    print("workers kind         latency   beyond the step   server's share")
    for count in (1, 4):
        overhead(count)
    print("batching")
    for count in (1, 2, 4):
        batching(count)
