#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""A served layer and the same layer without daemons: the time that serving adds on the device.

    served.py BUILD_DIRECTORY SHAPE [--workers 2] [--experts E] [--tokens 1,32,128,4096]
              [--backend cuda] [--duration 2] [--directory DIR] [--json FILE]

Writes a model of that shape (make_model.py), starts a group on it, and prints how fast it loaded.
Then one client, and later two, send requests to one worker (moectl bench): one step at a time, and
two in flight if the clients keep up. Then moe_bench runs the same, with tokens on one slot. `layer`
is the sum of the medians of the server's stage times from router to combine; `rest` is the same
without dispatch, which waits until the other workers know of the step. All in microseconds. Needs
numpy.
"""
import argparse
import glob
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time

STAGES = ["router", "prepare", "dispatch", "gemm1", "gemm2", "shared", "combine"]
HERE = os.path.dirname(os.path.abspath(__file__))


def run(*command):
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
    if done.returncode != 0:
        sys.exit("%s: exit %d" % (" ".join(command), done.returncode))
    return done.stdout


def serve(args, model, state):
    """Results of moectl bench, by number of tokens."""
    moectl = os.path.join(args.build, "client", "moectl", "moectl")
    begin = time.monotonic()
    run(moectl, "up", "--model", model, "--workers", str(args.workers), "--backend", args.backend,
        "--port", "0", "--state-dir", state, "--detach")
    print("serving %.1f s after the start" % (time.monotonic() - begin))
    for log in sorted(glob.glob(os.path.join(state, "*.log"))):
        with open(log, encoding="utf-8") as f:
            for line in re.findall(r"worker \d+: loaded .*", f.read()):
                print("  " + line)
    served = {}
    try:
        for tokens in args.tokens.split(","):
            text = run(moectl, "bench", "--state-dir", state, "--layer", "0", "--tokens", tokens,
                       "--concurrency", "1,2", "--duration", str(args.duration), "-o", "json")
            served[int(tokens)] = json.loads(text)["runs"]
    finally:
        subprocess.run([moectl, "down", "--state-dir", state], check=False)
    return served


def bare(args, scratch):
    """moe_bench's lines, by number of tokens."""
    path = os.path.join(scratch, "bare.json")
    run(os.path.join(args.build, "tests", "bench", "moe_bench"), "--backend", args.backend,
        "--slots", str(args.workers), "--sources", "1", "--shapes", args.shape, "--tokens",
        args.tokens, "--experts", str(args.experts), "--oracle-tokens", "0", "--json", path)
    with open(path, encoding="utf-8") as f:
        return {line["tokens"]: line for line in map(json.loads, f)}


def record_of(args, tokens, run_, line):
    stages = {s: run_["stagesUs"][s]["p50"] for s in run_["stagesUs"]}
    own = line["slot"][0]  # the slot that got the requests
    alone = run_["concurrency"] == 1
    layer = sum(stages[s] for s in STAGES)
    bare = own["alone_layer_us"] if alone else own["layer_us"]
    bare_dispatch = own["alone_stages_us" if alone else "stages_us"]["dispatch"]
    return {"who": "served", "shape": args.shape, "workers": args.workers,
            "experts": line["experts"], "tokens": tokens, "clients": run_["concurrency"],
            "step_tokens": run_["stepTokensMean"], "latency_us": run_["latencyUs"]["p50"],
            "server_us": stages["server"], "step_us": stages["step"], "layer_us": layer,
            "rest_us": layer - stages["dispatch"], "stages_us": stages, "bare_layer_us": bare,
            "bare_rest_us": bare - bare_dispatch, "ratio": layer / bare}


def compare(args, served, direct):
    print("%-12s %6s %7s %10s | %9s %9s %9s %9s %9s | %9s %9s | %6s %6s" % (
        "shape", "tokens", "clients", "step holds", "latency", "server", "step", "layer", "rest",
        "bare", "rest", "layers", "rests"))
    records = []
    for tokens, runs in served.items():
        for run_ in runs:
            r = record_of(args, tokens, run_, direct[tokens])
            records.append(r)
            print("%-12s %6d %7d %10.1f | %9.1f %9.1f %9.1f %9.1f %9.1f | %9.1f %9.1f | %6.3f "
                  "%6.3f" % (r["shape"], tokens, r["clients"], r["step_tokens"], r["latency_us"],
                             r["server_us"], r["step_us"], r["layer_us"], r["rest_us"],
                             r["bare_layer_us"], r["bare_rest_us"], r["ratio"],
                             r["rest_us"] / r["bare_rest_us"]))
    if args.json:
        with open(args.json, "a", encoding="utf-8") as f:
            f.writelines(json.dumps(r) + "\n" for r in records)


def main():
    p = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    p.add_argument("build")
    p.add_argument("shape")
    p.add_argument("--workers", type=int, default=2)
    p.add_argument("--experts", type=int, default=0, help="instead of the preset's")
    p.add_argument("--tokens", default="1,32,128,4096")
    p.add_argument("--backend", default="cuda")
    p.add_argument("--duration", type=float, default=2)
    p.add_argument("--directory", help="where the model is written (default: the temporary one)")
    p.add_argument("--json", help="appends one object a line")
    args = p.parse_args()
    scratch = tempfile.mkdtemp(prefix="moed-served-", dir=args.directory)
    try:
        model = os.path.join(scratch, "model")
        begin = time.monotonic()
        experts = ["--experts", str(args.experts)] if args.experts else []
        print(run(sys.executable, os.path.join(HERE, "make_model.py"), args.shape, model,
                  *experts).strip(), "in %.1f s" % (time.monotonic() - begin))
        served = serve(args, model, os.path.join(scratch, "state"))
        compare(args, served, bare(args, scratch))
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


if __name__ == "__main__":
    main()
