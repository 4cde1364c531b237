# SPDX-License-Identifier: Apache-2.0
"""What Python adds to a forward pass: the package by libmoeclient and by grpcio, and libmoeclient
itself, in turn.

Usage: python_client.py BUILD_DIRECTORY GOLDEN_MODELS [ROUNDS [REQUESTS [TOKENS]]]
default 40 300 1

One group of one worker with a golden model. In each round every client sends REQUESTS, one at a
time, in a random order of the clients; libmoeclient by `pair_bench`. The table has the median over
all rounds of a block's median latency, and of its ratio to libmoeclient's block of the same round
with the 95 % confidence interval of that median (order statistics). Then the requests per second of
64 in flight: libmoeclient by `moectl bench`, Python by asyncio, by futures and by futures on a
stream. Prints; judges nothing.
"""

import asyncio
import json
import math
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, os.path.join(HERE, "..", "integration"))
ROUNDS = int(sys.argv.pop(3)) if len(sys.argv) > 3 else 40
REQUESTS = int(sys.argv.pop(3)) if len(sys.argv) > 3 else 300
TOKENS = int(sys.argv.pop(3)) if len(sys.argv) > 3 else 1

import numpy as np  # noqa: E402

from group import BUILD, group, moectl  # noqa: E402
import moed  # noqa: E402

FAMILY = "mixtral"
UNCOUNTED = 5  # of each block, as in pair_bench
IN_FLIGHT = 64


def block(call):
    """The median latency of a block, in ns."""
    times = []
    for _ in range(REQUESTS + UNCOUNTED):
        begin = time.perf_counter_ns()
        call()
        times.append(time.perf_counter_ns() - begin)
    return statistics.median(times[UNCOUNTED:])


def library_block(endpoint, layer):
    """The mean of two blocks: pair_bench takes two endpoints."""
    done = subprocess.run(
        [os.path.join(BUILD, "tests", "bench", "pair_bench"), str(layer), str(TOKENS), "1",
         str(REQUESTS), endpoint, endpoint], stdout=subprocess.PIPE, text=True, check=True)
    return statistics.mean(float(line.split()[2]) for line in done.stdout.splitlines())


def interval(values):
    """(median, low, high): 95 % by order statistics."""
    values = sorted(values)
    half = 1.96 * math.sqrt(len(values)) / 2
    low = max(int(len(values) / 2 - half), 0)
    high = min(int(math.ceil(len(values) / 2 + half)), len(values) - 1)
    return statistics.median(values), values[low], values[high]


def report_latency(blocks):
    print("| client | p50, us | over libmoeclient's | 95 % |\n|---|---|---|---|")
    for name, medians in blocks.items():
        ratio, low, high = interval([own / base for own, base in
                                     zip(medians, blocks["libmoeclient"])])
        print("| %s | %.1f | %.3f | %.3f to %.3f |" % (
            name, statistics.median(medians) / 1e3, ratio, low, high))


def by_futures(submit, seconds):
    """Requests per second with IN_FLIGHT futures."""
    count, end, waiting = 0, time.perf_counter() + seconds, []
    begin = time.perf_counter()
    while time.perf_counter() < end:
        while len(waiting) < IN_FLIGHT:
            waiting.append(submit())
        waiting.pop(0).result()
        count += 1
    for each in waiting:
        each.result()
    return (count + len(waiting)) / (time.perf_counter() - begin)


async def by_asyncio(endpoint, layer, x, seconds, transport):
    """Requests per second of IN_FLIGHT tasks."""
    async with moed.AsyncClient(endpoint, transport=transport) as client:
        begin = time.perf_counter()

        async def loop():
            count = 0
            while time.perf_counter() < begin + seconds:
                await client.forward(layer, x)
                count += 1
            return count

        counts = await asyncio.gather(*[loop() for _ in range(IN_FLIGHT)])
        return sum(counts) / (time.perf_counter() - begin)


def report_rate(endpoint, clients, layer, x):
    seconds = 3
    done = moectl("bench", "--endpoint", endpoint, "--layer", str(layer), "--tokens", str(TOKENS),
                  "--concurrency", str(IN_FLIGHT), "--duration", str(seconds), "-o", "json")
    rates = {"libmoeclient (moectl bench)": json.loads(done.stdout)["runs"][0]["requestsPerS"]}
    for transport, client in clients.items():
        rates["asyncio, " + transport] = asyncio.run(
            by_asyncio(endpoint, layer, x, seconds, transport))
        rates["futures, " + transport] = by_futures(lambda: client.submit(layer, x), seconds)
        with client.stream() as stream:
            rates["futures on a stream, " + transport] = by_futures(
                lambda: stream.submit(layer, x), seconds)
    print("| %d in flight | requests/s |\n|---|---|" % IN_FLIGHT)
    for name, rate in rates.items():
        print("| %s | %.0f |" % (name, float(rate)))


def main():
    with tempfile.NamedTemporaryFile("w", suffix=".ini") as settings:
        settings.write("allow-client-memory = 64M\n")
        settings.flush()
        with group(FAMILY, 1, "--worker-config", settings.name) as g:
            clients = {transport: moed.Client(g.endpoint, transport=transport)
                       for transport in ("native", "grpc")}
            layer = clients["native"].layers[0]
            x = np.random.default_rng(1).standard_normal((TOKENS, layer.hidden)).astype(np.float32)
            regions = clients["native"].open_regions()
            shared = [regions.allocate(x.shape, x.dtype) for _ in range(2)]
            shared[0][:] = x
            calls = {
                "libmoeclient": None,
                "Python, libmoeclient": lambda: clients["native"].forward(layer, x),
                "Python, grpcio": lambda: clients["grpc"].forward(layer, x),
                "Python, shared memory": lambda: regions.submit(layer, *shared).result(),
            }
            blocks = {name: [] for name in calls}
            for _ in range(ROUNDS):
                for name in random.sample(list(calls), len(calls)):
                    blocks[name].append(library_block(g.endpoint, layer.layer)
                                        if calls[name] is None else block(calls[name]))
            report_latency(blocks)
            report_rate(g.endpoint, clients, layer.layer, x)
            regions.close()
            del shared, calls
            for client in clients.values():
                client.close()


main()
