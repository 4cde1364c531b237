#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""An MoE layer of a worker against the same layer as a torch module on the client's own GPU.

    remote_vs_local.py BUILD_DIRECTORY SHAPE [--experts E] [--tokens 1,32,128,1024,4096]
                       [--transports inline,shm,cuda] [--device 1] [--spin-us 0] [--duration 1]
                       [--directory DIR] [--json FILE] [--no-torch]

Writes a model of that shape (make_model.py) and starts one worker, which takes GPU 0. `moectl
bench` sends batches, one and two in flight, each way in turn; with cuda, x and y are on GPU
`--device`.
Then torch runs a layer of the same shape there, eager and as a CUDA graph: routing, a sort by
expert, torch._grouped_mm, the sum; its result is compared with a dense fp32 computation. All in
microseconds, medians; `ratio` is the client's time over torch's graph. Needs torch and numpy.
"""
import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile

HERE = os.path.dirname(os.path.abspath(__file__))
REPEATS = 50
COLUMNS = ("latencyUs", "server", "step", "layer", "copyIn", "copyOut", "beyondLayerUs")


def run(*command):
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
    if done.returncode != 0:
        sys.exit("%s: exit %d" % (" ".join(command), done.returncode))
    return done.stdout


def figures(run_):
    """p50 of each column, and the p99 of the latency."""
    found = {name: (run_[name] if name in run_ else run_["stagesUs"][name])["p50"]
             for name in COLUMNS}
    found["p99"] = run_["latencyUs"]["p99"]
    found["stepTokens"] = run_["stepTokensMean"]
    found["perRequest"] = 1e6 / run_["requestsPerS"]
    return found


def remote(args, model, scratch):
    """{(tokens, transport, clients): figures}"""
    moectl = os.path.join(args.build, "client", "moectl", "moectl")
    settings, state = os.path.join(scratch, "worker.ini"), os.path.join(scratch, "state")
    with open(settings, "w", encoding="utf-8") as f:
        f.write("allow-client-memory = 8G\nspin-us = 5000\n")
    run(moectl, "up", "--model", model, "--workers", "1", "--backend", args.backend, "--port", "0",
        "--state-dir", state, "--worker-config", settings, "--detach")
    results = {}
    try:
        for tokens in args.tokens:
            out = run(moectl, "bench", "--state-dir", state, "--layer", "0",
                      "--tokens", str(tokens), "--transport", ",".join(args.transports),
                      "--concurrency", "1,2", "--device", str(args.device),
                      "--spin-us", str(args.spin_us), "--duration", str(args.duration),
                      "-o", "json")
            for run_ in json.loads(out)["runs"]:
                way = run_.get("transport", args.transports[0])
                results[tokens, way, run_["concurrency"]] = figures(run_)
    finally:
        run(moectl, "down", "--state-dir", state)
    return results


def local(args):
    """{tokens: (eager, graph)}"""
    import torch
    import torch_baseline as baseline

    class Local(baseline.Layer):
        """One GPU has all experts; no size is read on the host, so a graph can hold it."""

        def __init__(self, shape):
            super().__init__(shape, 0, 1)
            self.numbers = torch.arange(self.experts, device="cuda")

        def forward(self, x):
            ids, weights = self.route(x)
            expert, order = ids.flatten().sort(stable=True)
            ends = torch.searchsorted(expert, self.numbers, right=True).int()
            y = self.experts_of(x[order // self.top_k], ends)
            chosen = y[baseline.inverse(order)].view(-1, self.top_k, self.hidden)
            out = torch.bmm(weights.to(x.dtype).unsqueeze(1), chosen).squeeze(1)
            return out.add_(self.shared_of(x)) if self.shared else out

    def time_calls(call):
        for _ in range(baseline.WARM_UP):
            call()
        torch.cuda.synchronize()
        events = [torch.cuda.Event(enable_timing=True) for _ in range(REPEATS + 1)]
        events[0].record()
        for event in events[1:]:
            call()
            event.record()
        torch.cuda.synchronize()
        times = sorted(a.elapsed_time(b) * 1e3 for a, b in zip(events, events[1:]))
        return times[REPEATS // 2]

    torch.cuda.set_device(args.device)
    print("torch %s, CUDA %s, %s" % (torch.__version__, torch.version.cuda,
                                     torch.cuda.get_device_name()))
    shape = dict(baseline.SHAPES[args.shape])
    shape["experts"] = args.experts or shape["experts"]
    results = {}
    with torch.inference_mode():
        layer = Local(shape)
        for tokens in args.tokens:
            x = torch.empty(tokens, layer.hidden, device="cuda",
                            dtype=torch.bfloat16).uniform_(-1, 1)
            picked = torch.linspace(0, tokens - 1, min(baseline.SAMPLES, tokens)).long().cuda()
            got, want = layer.forward(x)[picked].float(), layer.dense(x[picked])
            error = ((got - want).norm() / want.norm()).item()
            if not error <= baseline.TOLERANCE:
                sys.exit("WRONG: torch at %d tokens: error %.2e" % (tokens, error))
            eager = time_calls(lambda: layer.forward(x))
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                layer.forward(x)
            results[tokens] = (eager, time_calls(graph.replay))
            del graph
    return results


def report(args, far, near):
    print("%6s %-8s %7s | %9s %9s %9s %9s %9s %9s %9s %9s %9s | %9s %9s %6s" % (
        "tokens", "way", "clients", "latency", "p99", "server", "step", "layer", "copy in",
        "copy out", "beyond", "request", "eager", "graph", "ratio"))
    records = []
    for (tokens, way, clients), r in far.items():
        eager, graph = near.get(tokens, (float("nan"),) * 2)
        print("%6d %-8s %7d | %9.1f %9.1f %9.1f %9.1f %9.1f %9.1f %9.1f %9.1f %9.1f | %9.1f %9.1f "
              "%6.2f" % (tokens, way, clients, r["latencyUs"], r["p99"], r["server"], r["step"],
                         r["layer"], r["copyIn"], r["copyOut"], r["beyondLayerUs"],
                         r["perRequest"], eager, graph, r["latencyUs"] / graph))
        records.append({"shape": args.shape, "experts": args.experts, "tokens": tokens,
                        "transport": way, "clients": clients, **r, "torchEager": eager,
                        "torchGraph": graph})
    if args.json:
        with open(args.json, "a", encoding="utf-8") as f:
            f.writelines(json.dumps(r) + "\n" for r in records)


def main():
    p = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    p.add_argument("build")
    p.add_argument("shape")
    p.add_argument("--experts", type=int, default=0, help="instead of the preset's")
    p.add_argument("--tokens", type=lambda t: [int(n) for n in t.split(",")],
                   default=[1, 32, 128, 1024, 4096])
    p.add_argument("--transports", type=lambda t: t.split(","), default=["inline", "shm", "cuda"])
    p.add_argument("--device", type=int, default=1, help="the client's GPU")
    p.add_argument("--spin-us", type=int, default=0)
    p.add_argument("--duration", type=float, default=1)
    p.add_argument("--backend", default="cuda")
    p.add_argument("--directory", help="where the model is written (default: the temporary one)")
    p.add_argument("--model", help="a model that is there, instead of writing one")
    p.add_argument("--no-torch", action="store_true")
    p.add_argument("--json", help="appends one object a line")
    args = p.parse_args()
    scratch = tempfile.mkdtemp(prefix="moed-remote-", dir=args.directory)
    try:
        model = args.model or os.path.join(scratch, "model")
        if not args.model:
            experts = ["--experts", str(args.experts)] if args.experts else []
            print(run(sys.executable, os.path.join(HERE, "make_model.py"), args.shape, model,
                      *experts).strip())
        far = remote(args, model, scratch)
        near = {} if args.no_torch else local(args)
        report(args, far, near)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


if __name__ == "__main__":
    main()
