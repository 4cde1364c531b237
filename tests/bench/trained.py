#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Served training compared with the same passes without daemons; and forward passes during a Save.

    trained.py BUILD_DIRECTORY SHAPE [--workers 2] [--experts E] [--tokens 256,4096]
        [--clients 1,2,4]
               [--pairs 20] [--duration 3] [--backend cuda] [--threads N] [--directory DIR]
               [--no-pairs] [--save] [--save-tokens 1,256] [--json FILE]

Writes a model of that shape (make_model.py) and starts a group that trains (AdamW).

Pairs: one client alternates Forward with `save` and its Backward, with an OptimizerStep after every
fourth pair. Prints medians of its latency, and of the worker's times in the answers: `server` (from
arrival to answer), `step` (the device's part, without copies). For comparison: moe_bench --backward
with tokens on one slot. Then 1, 2, 4 clients, separate processes, each with another worker: pairs
per second.

--save: a client sends Forwards of --save-tokens tokens one after the other: at rest; during a Save;
and during a Save with an OptimizerStep from another client as soon as the Save has begun. Prints
the longest and the 99th percentile of the Forwards' latency, and the times of the Save and the
step.

It judges no time. It fails if an answer is an error, or if a Backward does not use its saved
Forward. Needs numpy and grpc.
"""
import argparse
import dataclasses
import json
import multiprocessing
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time

HERE = os.path.dirname(os.path.abspath(__file__))
WARM = 4


def parse():
    p = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    p.add_argument("build")
    p.add_argument("shape")
    p.add_argument("--workers", type=int, default=2)
    p.add_argument("--experts", type=int, default=0, help="instead of the preset's")
    p.add_argument("--layers", type=int, default=1)
    p.add_argument("--tokens", default="256,4096")
    p.add_argument("--clients", default="1,2,4")
    p.add_argument("--pairs", type=int, default=20)
    p.add_argument("--duration", type=float, default=3)
    p.add_argument("--backend", default="cuda")
    p.add_argument("--threads", type=int, default=0)
    p.add_argument("--directory", help="where model and checkpoints are written")
    p.add_argument("--no-pairs", action="store_true")
    p.add_argument("--save", action="store_true")
    p.add_argument("--save-tokens", default="1,256")
    p.add_argument("--json", help="appends one object a line")
    return p.parse_args()


ARGS = parse()
sys.path.insert(0, os.path.join(ARGS.build, "python"))
import numpy as np  # noqa: E402
import moed  # noqa: E402 (from the build directory)

RECORDS = []


def record(kind, **fields):
    RECORDS.append({"who": "trained", "kind": kind, "shape": ARGS.shape, "workers": ARGS.workers,
                    "backend": ARGS.backend, **fields})


def run(*command):
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
    if done.returncode != 0:
        sys.exit("%s: exit %d" % (" ".join(command), done.returncode))
    return done.stdout


class Group:
    def __init__(self, model, scratch):
        self.state, config = os.path.join(scratch, "state"), os.path.join(scratch, "train.conf")
        self.moectl = os.path.join(ARGS.build, "client", "moectl", "moectl")
        os.mkdir(os.path.join(scratch, "checkpoints"))
        with open(config, "w", encoding="utf-8") as f:
            f.write("training = adamw\ntraining-dir = %s/checkpoints\n" % scratch)
        begin = time.monotonic()
        up = run(self.moectl, "up", "--model", model, "--workers", str(ARGS.workers), "--backend",
                 ARGS.backend, "--port", "0", "--threads", str(ARGS.threads), "--state-dir",
                 self.state, "--worker-config", config, "--detach")
        self.endpoints = [w for w in up.split() if ":" in w][:ARGS.workers]
        print("serving %.1f s after the start, on %s" % (time.monotonic() - begin,
                                                         " ".join(self.endpoints)), flush=True)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        subprocess.run([self.moectl, "down", "--state-dir", self.state], check=False)


def batch(layer, tokens, seed=1):
    rng = np.random.default_rng(seed)
    x, dy = (rng.standard_normal((tokens, layer.hidden), dtype=np.float32) for _ in range(2))
    return moed.bf16(x), moed.bf16(dy)


def timed(call, *arguments, **fields):
    begin = time.perf_counter()
    answer = call(*arguments, **fields)
    return answer, 1e6 * (time.perf_counter() - begin)


# ------------------------------------------------------------------------------------ pairs

def parts(latency, stages):
    """latency, server, step, queue, copies in microseconds."""
    return [latency] + [stages[name] / 1e3 for name in ("server_ns", "step_ns", "queue_ns")] + [
        (stages["copy_in_ns"] + stages["copy_out_ns"]) / 1e3]


def pair(client, layer, x, dy, session, number, must_save=True):
    forward, took = timed(client.forward, layer, x, return_routing=True, retain=(session, number))
    backward, took_back = timed(client.backward, layer, dy, session=session, micro_batch_id=number,
                                retained=True)
    if not backward.used_retained or (must_save and not backward.used_activations):
        raise RuntimeError("what was saved was not used: %s" %
                           (dataclasses.replace(backward, dx=None), ))
    return parts(took, forward.stages), parts(took_back, backward.stages)


def one_client(group, tokens):
    client = moed.Client(group.endpoints[0])
    layer = client.layers[0]
    x, dy = batch(layer, tokens)
    forwards, backwards, steps = [], [], []
    step_id = client.train_state().last_step_id
    for i in range(1, WARM + ARGS.pairs + 1):
        f, b = pair(client, layer, x, dy, "pairs-%d" % tokens, i)
        if i > WARM:
            forwards.append(f)
            backwards.append(b)
        if i % 4 == 0:
            step_id += 1
            _, took = timed(client.optimizer_step, 1e-5, step_id=step_id)
            if i > WARM:
                steps.append(took)
    client.close()
    f, b = (np.median(np.array(c), axis=0) for c in (forwards, backwards))
    return f, b, float(np.median(steps))


def bare(scratch):
    """moe_bench's lines: (tokens, gradients) -> line; for the forward pass, (tokens, None)."""
    path = os.path.join(scratch, "bare.json")
    run(os.path.join(ARGS.build, "tests", "bench", "moe_bench"), "--backend", ARGS.backend,
        "--slots", str(ARGS.workers), "--sources", "1", "--shapes", ARGS.shape, "--tokens",
        ARGS.tokens, "--experts", str(ARGS.experts), "--oracle-tokens", "0", "--backward",
        "--json", path)
    with open(path, encoding="utf-8") as f:
        return {(line["tokens"], line.get("gradients")): line for line in map(json.loads, f)}


def work(endpoint, tokens, session, barrier, out):
    client = moed.Client(endpoint)
    layer = client.layers[0]
    x, dy = batch(layer, tokens)
    pair(client, layer, x, dy, session, 1, must_save=False)
    barrier.wait()
    begin, pairs = time.perf_counter(), 0
    while time.perf_counter() < begin + ARGS.duration:
        pair(client, layer, x, dy, session, pairs + 2, must_save=False)
        pairs += 1
    out.put(pairs / (time.perf_counter() - begin))
    client.close()


def many_clients(group, tokens, count):
    spawn = multiprocessing.get_context("spawn")  # gRPC does not survive a fork
    barrier, out = spawn.Barrier(count), spawn.Queue()
    processes = [spawn.Process(target=work, args=(
        group.endpoints[i % ARGS.workers], tokens, "many-%d-%d-%d" % (tokens, count, i), barrier,
        out)) for i in range(count)]
    for p in processes:
        p.start()
    rates = [out.get(timeout=120) for _ in processes]
    for p in processes:
        p.join()
    return sum(rates)


def show_pairs(group, scratch):
    direct = bare(scratch)
    columns = "%-9s %6d | %9.0f %9.0f %9.0f %7.0f %7.0f | %s"
    print("microseconds   | %9s %9s %9s %7s %7s | bare" % ("latency", "server", "step", "queue",
                                                          "copies"))
    for tokens in map(int, ARGS.tokens.split(",")):
        f, b, step = one_client(group, tokens)
        lines = {kind: line["layer_us"] for (t, kind), line in direct.items()
                 if t == tokens and kind is not None}
        saving = [line["forward_retaining_us"] for (t, kind), line in direct.items()
                  if t == tokens and kind is not None][:1]
        print(columns % ("Forward", tokens, *f, " ".join("saving %.0f" % s for s in saving)))
        print(columns % ("Backward", tokens, *b,
                         " ".join("%s %.0f" % item for item in lines.items())))
        print("%-9s %6d | %9.0f" % ("Step", tokens, step), flush=True)
        record("pairs", tokens=tokens, forward_us=list(f), backward_us=list(b), step_us=step,
               bare_us=lines, bare_forward_us=saving)
        for count in map(int, ARGS.clients.split(",")):
            rate = many_clients(group, tokens, count)
            print("%d clients, %d tokens: %.1f pairs/s, %.0f tokens/s" %
                  (count, tokens, rate, rate * tokens),
                  flush=True)
            record("many", tokens=tokens, clients=count, pairs_s=rate)


# -------------------------------------------------------------------------------- during a Save

def forwards_until(client, layer, x, done, least):
    times = []
    end = time.perf_counter() + least
    while not done.is_set() or time.perf_counter() < end:
        _, took = timed(client.forward, layer, x)
        times.append((time.perf_counter(), took))
    return times


def figures(times):
    took = np.array([t for _, t in times])
    return len(took), float(np.median(took)), float(np.percentile(took, 99)), float(took.max())


class Saver(threading.Thread):
    """A Save, and, if requested, an OptimizerStep as soon as the Save has begun."""

    def __init__(self, group, name, steps):
        super().__init__()
        self.client, self.other = moed.Client(group.endpoints[-1]), moed.Client(group.endpoints[-1])
        self.checkpoint, self.steps, self.done, self.error = name, steps, threading.Event(), None
        self.save_s = self.step_s = self.bytes = 0

    def step(self, step_id):
        try:
            state = self.other.train_state()
            while self.checkpoint not in (state.saving, state.checkpoint) and self.error is None:
                state = self.other.train_state()
            self.step_s = timed(self.other.optimizer_step, 1e-5, step_id=step_id)[1] / 1e6
        except Exception as error:  # shown by the main thread
            self.error = error

    def run(self):
        step_id = self.client.train_state().last_step_id
        other = threading.Thread(target=self.step, args=(step_id + 2,))
        if self.steps:
            other.start()
        try:
            saved, took = timed(self.client.save_checkpoint, self.checkpoint, step_id=step_id + 1,
                                timeout=300)
            self.save_s, self.bytes = took / 1e6, saved.bytes
        except Exception as error:  # shown by the main thread
            self.error = error
        if self.steps:
            other.join()
        self.done.set()
        self.client.close()
        self.other.close()


def step_during_save(group, scratch, client, x, steps):
    saver = Saver(group, "bench", steps)
    saver.start()
    times = figures(forwards_until(client, client.layers[0], x, saver.done, 0))
    saver.join()
    if saver.error is not None:
        raise saver.error
    shutil.rmtree(os.path.join(scratch, "checkpoints", saver.checkpoint))
    return times, saver


def show_save(group, scratch):
    client = moed.Client(group.endpoints[0])
    layer = client.layers[0]
    rest = threading.Event()
    rest.set()
    step_id = client.train_state().last_step_id + 1
    client.optimizer_step(1e-5, step_id=step_id)  # makes pages of the moments resident
    print("state of one worker: %.2f GB" % (client.train_state().state_bytes / 1e9))
    print("%-16s %6s | %6s %9s %9s %9s | %6s %6s" % ("", "tokens", "calls", "p50 us", "p99 us",
                                                    "longest", "Save s", "Step s"))
    for tokens in map(int, ARGS.save_tokens.split(",")):
        x, _ = batch(layer, tokens)
        forwards_until(client, layer, x, rest, 0.5)
        idle = figures(forwards_until(client, layer, x, rest, 2))
        print("%-16s %6d | %6d %9.0f %9.0f %9.0f |" % ("at rest", tokens, *idle))
        record("rest", tokens=tokens, us=idle)
        for steps in (False, True):
            times, saver = step_during_save(group, scratch, client, x, steps)
            print("%-16s %6d | %6d %9.0f %9.0f %9.0f | %6.2f %6.2f  (%.2f GB)" % (
                "saving, a step" if steps else "saving", tokens, *times, saver.save_s,
                saver.step_s, saver.bytes / 1e9), flush=True)
            record("save", tokens=tokens, step=steps, us=times, save_s=saver.save_s,
                   step_s=saver.step_s, bytes=saver.bytes)
    client.close()


def main():
    scratch = tempfile.mkdtemp(prefix="moed-trained-", dir=ARGS.directory)
    try:
        model = os.path.join(scratch, "model")
        experts = ["--experts", str(ARGS.experts)] if ARGS.experts else []
        print(run(sys.executable, os.path.join(HERE, "make_model.py"), ARGS.shape, model,
                  "--layers", str(ARGS.layers), *experts).strip(), flush=True)
        with Group(model, scratch) as group:
            if not ARGS.no_pairs:
                show_pairs(group, scratch)
            if ARGS.save:
                show_save(group, scratch)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
        if ARGS.json:
            with open(ARGS.json, "a", encoding="utf-8") as f:
                f.writelines(json.dumps(r) + "\n" for r in RECORDS)


if __name__ == "__main__":
    main()
