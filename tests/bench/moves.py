# SPDX-License-Identifier: Apache-2.0
"""Moves of experts under load: rows of slots before and after, and times of Forward meanwhile.

Usage: moves.py BUILD_DIRECTORY GOLDEN_MODELS [SECONDS]

Four CPU workers with two spare places, 64 experts, prefill with popular experts by Zipf(1.2), K = 1
and K = 8 without repetition, fixed seeds. First the contiguous placement is measured, then
`Rebalance`, then the new one. Then the popular experts change again and again, each time with a
move, for SECONDS: calls during a move are compared with those between moves. Prints tables and
judges nothing. Put important results into results/moves.md, with date, versions and settings.
"""

import json
import os
import shutil
import sys
import tempfile
import threading
import time

SECONDS = float(sys.argv.pop(3)) if len(sys.argv) > 3 else 20.0
HERE = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, HERE)
sys.path.insert(0, os.path.join(HERE, "..", "integration"))

import numpy as np  # noqa: E402

import make_model  # noqa: E402
import wire  # noqa: E402
from group import moectl  # noqa: E402
from wire import admin  # noqa: E402
import moed  # noqa: E402

WORKERS, SPARE, EXPERTS, LAYERS, TOKENS, CLIENTS = 4, 2, 64, 4, 256, 2
SHAPE = dict(family="qwen3_moe", hidden=256, inner=128, experts=EXPERTS)
SETTLE_S = 1.0


def zipf(rng):
    """A popularity of experts: k^-1.2 for rank k; ranks are shuffled."""
    p = np.arange(1, EXPERTS + 1) ** -1.2
    rng.shuffle(p)
    return p / p.sum()


def draw(rng, p, top_k):
    """Ids of TOKENS tokens, without repetition in a token."""
    return np.array([rng.choice(EXPERTS, top_k, replace=False, p=p) for _ in range(TOKENS)],
                    np.int32)


class Caller(threading.Thread):
    def __init__(self, endpoint, top_k, seed):
        super().__init__()
        self.rng = np.random.default_rng(seed)
        self.client = moed.Client(endpoint, timeout=60)
        self.x = self.rng.standard_normal((TOKENS, SHAPE["hidden"]), np.float32)
        self.weights = np.full((TOKENS, top_k), 1 / top_k, np.float32)
        self.batches, self.times, self.ending = [], [], False

    def run(self):
        number = 0
        while not self.ending:
            batches = self.batches
            begun = time.monotonic()
            self.client.forward(number % LAYERS, self.x, topk_ids=batches[number % len(batches)],
                                topk_weights=self.weights)
            self.times.append((begun, time.monotonic()))
            number += 1

    def stop(self):
        self.ending = True
        self.join()
        self.client.close()


class Bench:
    def __init__(self, root, top_k):
        self.top_k, self.state = top_k, os.path.join(root, "state%d" % top_k)
        done = moectl("up", "--model", os.path.join(root, "model%d" % top_k), "--workers",
                      str(WORKERS), "--backend", "cpu", "--threads", "1", "--port", "0", "--detach",
                      "--spare-experts", str(SPARE), "--state-dir", self.state)
        self.endpoints = [line.split()[-1] for line in done.stdout.splitlines() if ":" in line]
        status = json.loads(moectl("status", "-o", "json", "--state-dir", self.state).stdout)
        self.workers = [w["endpoint"] for w in status["workers"]]
        with open(os.path.join(self.state, "group.json")) as file:
            coordinator = json.load(file)["processes"][0]
        self.admin = coordinator.get("endpoint") or coordinator["address"]

    def call(self, endpoint, method, **fields):
        with wire.open_channel(endpoint) as channel:
            return wire._call(channel, "AdminService", method,
                              getattr(admin, method + "Request")(**fields),
                              getattr(admin, method + "Response"), 120)

    def rows(self):
        """Of each slot and layer."""
        return np.array([[sum(self.call(w, "GetMetrics",
                                        expert_rows_of_layer_plus_one=layer + 1).expert_rows)
                          for layer in range(LAYERS)] for w in self.workers], float)

    def imbalance(self, seconds):
        """Rows of the busiest slot over the mean of slots, for each layer: the worst."""
        before = self.rows()
        time.sleep(seconds)
        rows = self.rows() - before
        return (rows.max(axis=0) / rows.mean(axis=0)).max()

    def choose(self, callers, seed):
        rng = np.random.default_rng(seed)
        p = zipf(rng)
        batches = [draw(rng, p, self.top_k) for _ in range(16)]
        for c in callers:
            c.batches = batches

    def move(self):
        begun = time.monotonic()
        answer = self.call(self.admin, "Rebalance")
        return begun, time.monotonic(), answer

    def down(self):
        moectl("down", "--state-dir", self.state)


def overlaps(call, spans):
    return any(call[0] < end and call[1] > begun for begun, end in spans)


def percentiles(calls):
    ms = 1e3 * np.array([end - begun for begun, end in calls])
    return "%6d calls  p50 %7.2f ms  p99 %7.2f ms" % (len(ms), *np.percentile(ms, (50, 99)))


def p99(calls):
    return np.percentile([end - begun for begun, end in calls], 99)


def run(root, top_k):
    bench = Bench(root, top_k)
    callers = [Caller(bench.workers[i], top_k, i) for i in range(CLIENTS)]
    try:
        bench.choose(callers, 1)
        for c in callers:
            c.start()
        time.sleep(SETTLE_S)
        before = bench.imbalance(4)
        begun, ended, answer = bench.move()
        after = bench.imbalance(4)
        print("K = %d: max/mean rows %.3f, after one move %.3f; %d copies in %.2f s" % (
            top_k, before, after, sum(m.copies_added for m in answer.layers), ended - begun))
        spans, copies, seed, first = [], 0, 2, time.monotonic()
        while time.monotonic() - first < SECONDS:
            bench.choose(callers, seed)
            seed += 1
            time.sleep(SETTLE_S)
            begun, ended, answer = bench.move()
            if answer.moved:
                spans.append((begun, ended))
                copies += sum(m.copies_added for m in answer.layers)
        calls = [c for caller in callers for c in caller.times if c[0] >= first]
        moving = [c for c in calls if overlaps(c, spans)]
        quiet = [c for c in calls if not overlaps(c, spans)]
        print("  %d moves of %d copies, %.2f s each" % (
            len(spans), copies, np.mean([end - begun for begun, end in spans])))
        print("  between moves %s\n  during moves  %s\n  p99 %.2f times" % (
            percentiles(quiet), percentiles(moving), p99(moving) / p99(quiet)))
    finally:
        for c in callers:
            c.stop()
        bench.down()


def main():
    root = tempfile.mkdtemp(prefix="moed-moves-")
    try:
        for top_k in (1, 8):
            make_model.SHAPES["moves"] = dict(SHAPE, top_k=top_k)
            sys.argv[1:] = ["moves", os.path.join(root, "model%d" % top_k), "--layers", str(LAYERS)]
            make_model.main()
            run(root, top_k)
    finally:
        shutil.rmtree(root, ignore_errors=True)


if __name__ == "__main__":
    main()
