# SPDX-License-Identifier: Apache-2.0
"""What tracing costs a request of one token: workers with and without it, in turn.

Usage: tracing.py BUILD_DIRECTORY GOLDEN_MODELS [STARTS [ROUNDS [REQUESTS [TOKENS]]]]
default 5 60 100 1

One group of one worker per setting, all with the same golden model, all running at the same time.
`pair_bench` sends blocks of REQUESTS to one after the other, ROUNDS times. All groups are started
STARTS times, because processes of one kind differ. A ratio compares the median of a block with the
mean of those of `off 1` and `off 2` in the same round (for these two: with the other one). The
table has the median of these ratios, with its 95 % confidence interval (order statistics). The two
groups without tracing show what the method and the machine add. Processor time is that of the whole
worker, over all requests. Prints; judges nothing.
"""

import glob
import math
import os
import socket
import statistics
import subprocess
import sys

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, os.path.join(HERE, "..", "integration"))
sys.path.insert(0, os.path.join(HERE, "..", "support"))
STARTS = int(sys.argv.pop(3)) if len(sys.argv) > 3 else 5
ROUNDS = int(sys.argv.pop(3)) if len(sys.argv) > 3 else 60
REQUESTS = int(sys.argv.pop(3)) if len(sys.argv) > 3 else 100
TOKENS = int(sys.argv.pop(3)) if len(sys.argv) > 3 else 1

from group import BUILD  # noqa: E402
import wire  # noqa: E402
from training import TrainingGroup  # noqa: E402
from otlp import Collector  # noqa: E402

FAMILY = "deepseek_v3"


def processor_seconds(g):
    """Processor time of all threads of the worker so far."""
    total = 0
    for path in glob.glob("/proc/%d/task/*/schedstat" % g.workers[0].pid):
        with open(path) as file:
            total += int(file.read().split()[0])
    return total / 1e9


def middle(values):
    """Text: the median, and its 95 % confidence interval by order statistics."""
    values, n = sorted(values), len(values)
    reach = 0.98 * math.sqrt(n)
    low, high = max(0, int(n / 2 - reach)), min(n - 1, math.ceil(n / 2 + reach))
    return "%.3f (%.3f to %.3f)" % (statistics.median(values), values[low], values[high])


def pairs(groups, layer):
    """{name: [(latency, server time) of each round]}, in us."""
    done = subprocess.run(
        [os.path.join(BUILD, "tests", "bench", "pair_bench"), str(layer), str(TOKENS), str(ROUNDS),
         str(REQUESTS)] + [g.endpoints[0] for g in groups.values()],
        stdout=subprocess.PIPE, text=True, check=True)
    names, found = list(groups), {name: [] for name in groups}
    for line in done.stdout.splitlines():
        _, number, latency, server = line.split()
        found[names[int(number)]].append((float(latency) / 1e3, float(server) / 1e3))
    return found


def measure(settings):
    """One start of all groups: ({name: [(latency, server time)]}, {name: processor time})."""
    groups = {}
    try:
        for name, options in settings.items():
            groups[name] = TrainingGroup(FAMILY, 1, *options)
        with wire.open_channel(groups["off 1"].endpoints[0]) as channel:
            layer = wire.get_model(channel).layers[0].layer
        before = {name: processor_seconds(g) for name, g in groups.items()}
        found = pairs(groups, layer)
        return found, {name: 1e6 * (processor_seconds(g) - before[name]) / ROUNDS / (REQUESTS + 5)
                       for name, g in groups.items()}
    finally:
        for g in groups.values():
            g.stop()


def base_of(name, one, two, i):
    """What a block of `name` is compared with."""
    others = [block for off, block in (("off 1", one), ("off 2", two)) if off != name]
    return statistics.mean(block[i] for block in others)


def main():
    found, cpu = {}, {}
    with Collector(keeps=False) as good, Collector(keeps=False, hangs=True) as hung, \
            socket.create_server(("127.0.0.1", 0)) as closed:
        dead = "127.0.0.1:%d" % closed.getsockname()[1]
        closed.close()
        settings = {
            "off 1": (),
            "off 2": (),
            "0 %": ("--otlp", good.address, "--trace-sample", "0"),
            "1 %": ("--otlp", good.address, "--trace-sample", "0.01"),
            "100 %": ("--otlp", good.address, "--trace-sample", "1"),
            "100 %, dead": ("--otlp", dead, "--trace-sample", "1"),
            "100 %, hangs": ("--otlp", hung.address, "--trace-sample", "1"),
        }
        for _ in range(STARTS):
            blocks, times = measure(settings)
            for name in settings:
                found.setdefault(name, []).extend(blocks[name])
                cpu.setdefault(name, []).append(times[name])
    print("%d starts, %d rounds of %d requests of %d token(s); us; ratios to `off`" % (
        STARTS, ROUNDS, REQUESTS, TOKENS))
    print("| setting | p50 | ratio | server p50 | ratio | processor time |")
    for name, blocks in found.items():
        cells = [name]
        for i in range(2):
            cells.append("%.1f" % statistics.median(b[i] for b in blocks))
            cells.append(middle([b[i] / base_of(name, one, two, i) for b, one, two in zip(
                blocks, found["off 1"], found["off 2"])]))
        print("| %s | %.1f |" % (" | ".join(cells), statistics.median(cpu[name])), flush=True)


if __name__ == "__main__":
    main()
