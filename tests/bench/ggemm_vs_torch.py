#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Grouped GEMM of kernels/cuda against torch._grouped_mm and cuBLAS, in one process on one GPU.

Loads the library of the target `ggemm_shared`, passes it torch's tensors by address, checks every
buffer that it times, and prints one table. Each launch waits behind a short spin kernel, so launch
costs do not count. Candidates are interleaved in random order, so all see the same clock and power.
Figures are medians. A dense product of torch comes first, as the chip's reference: cold, and
sustained at the power limit.

--widths compares all tiles on products with few tiles, cold: weights rotate over 512 MB or more.
It also compares the tiles' bits.

    ggemm_vs_torch.py path/to/libmoe_ggemm.so [--rounds 30] [--all-tiles] [--only TEXT]
                      [--sustained SECONDS] [--cublas] [--backward] [--widths] [--json FILE]
                      [--markdown FILE]
"""
import argparse
import datetime
import json
import random
import subprocess
import sys
import time

import torch

from ggemm_binding import Products, Refused

SPIN_CYCLES = 300_000  # about 0.15 ms: longer than any launch takes the host
DENSE = 8192  # rows, columns and depth of the reference product
COLD_PRODUCTS = 20
COLD_BYTES = 512 << 20  # weights rotate over at least this
READ_TBS = 4.35  # weights read by an H200, as the target of few tiles counts them


class Case:
    """Random rows and weights of one shape; `sets` copies alternate, to avoid a warm L2."""

    def __init__(self, lib, name, counts, k, n, sets=1):
        self.lib, self.name, self.counts, self.k, self.n, self.sets = lib, name, counts, k, n, sets
        self.processors = torch.cuda.get_device_properties(0).multi_processor_count
        self.experts, total = len(counts), sum(counts)
        starts, at = [], 0
        for count in counts:
            starts.append(at)
            at += (count + 127) // 128 * 128
        self.capacity = max(at, 128)
        gpu = {"device": "cuda"}
        self.start = torch.tensor(starts, dtype=torch.int32, **gpu)
        self.count = torch.tensor(counts, dtype=torch.int32, **gpu)
        self.ends = torch.cumsum(self.count, 0).int()
        self.index = torch.cat([torch.arange(s, s + c) for s, c in zip(starts, counts)]).to("cuda")
        self.weights = [torch.randn(self.experts, n, k, dtype=torch.bfloat16, **gpu).mul_(0.05)
                        for _ in range(sets)]
        self.x = [torch.randn(self.capacity, k, dtype=torch.bfloat16, **gpu) for _ in range(sets)]
        self.described = [self.describe(w) for w in self.weights]
        self.cells = [torch.tensor([d.data_ptr()], dtype=torch.int64, **gpu)
                      for d in self.described]
        self.compact = [x[self.index] for x in self.x]
        self.out = torch.empty(self.capacity, n, dtype=torch.bfloat16, **gpu)
        self.hidden = torch.empty(self.capacity, n // 2, dtype=torch.bfloat16, **gpu)
        self.flops = 2 * total * k * n
        live = sum(1 for c in counts if c > 0)
        self.bytes = 2 * (live * k * n + total * (k + n))

    def describe(self, weights):
        """The description of `weights` that the kernel reads, on the device."""
        d = torch.zeros(self.lib.constant("WEIGHTS_BYTES"), dtype=torch.uint8)
        self.lib.describe(data=weights.data_ptr(), experts=self.experts, rows=self.n,
                          columns=self.k, out=d.data_ptr())
        return d.to("cuda")

    def chosen(self, back=False):
        n, k = (self.k, self.n) if back else (self.n, self.k)
        return self.lib.choose_tile(bucket=sum(self.counts), slots=1, top_k=1,
                                    experts=self.experts, n=n, k=k, processors=self.processors)

    def plain(self, **changes):
        """Arguments of a plain product of the first set. `changes` replaces some of them."""
        stream = torch.cuda.current_stream().cuda_stream
        return {"tile": 0, "gated": False, "relu2": False, "back": False, "packing": 0,
                "experts": self.experts, "row_capacity": self.capacity, "n": self.n, "k": self.k,
                "start": self.start.data_ptr(), "count": self.count.data_ptr(),
                "x": self.x[0].data_ptr(), "x_stride": 0, "x_scales": None,
                "weights": self.cells[0].data_ptr(), "has_bias": False,
                "row_weight": None, "weighting": self.lib.constant("LATE"),
                "activation": self.lib.constant("SWIGLU"), "limit": 0, "alpha": 0,
                "out_dtype": self.lib.constant("BF16"),
                "out_activations": self.lib.constant("PLAIN"), "out": self.out.data_ptr(),
                "out_stride": 0, "pre": None, "began": None, "processors": 0,
                "stream": stream} | changes

    def ours(self, tile, gated=False):
        out, n = (self.hidden, self.n // 2) if gated else (self.out, self.n)
        tasks = [self.plain(tile=tile, gated=gated, n=n, x=self.x[i].data_ptr(),
                            weights=self.cells[i].data_ptr(), out=out.data_ptr())
                 for i in range(self.sets)]

        def run(i):
            self.lib.ggemm(**tasks[i % self.sets])
        return run

    def wgrad(self, accumulate):
        """Gradients of the weights, from random gradients of the results."""
        if not hasattr(self, "dw"):
            self.dy = torch.randn(self.capacity, self.n, dtype=torch.bfloat16, device="cuda")
            self.compact_dy = self.dy[self.index]
            self.dw = torch.full((self.experts, self.n, self.k), float("nan"), device="cuda")

        def run(_):
            self.lib.wgrad(experts=self.experts, row_capacity=self.capacity, n=self.n, k=self.k,
                           start=self.start.data_ptr(), count=self.count.data_ptr(),
                           dy=self.dy.data_ptr(), x=self.x[0].data_ptr(), dy_stride=0, x_stride=0,
                           accumulate=accumulate, dw=self.dw.data_ptr(), processors=0,
                           stream=torch.cuda.current_stream().cuda_stream)
        return run

    def dgrad(self):
        """Gradients of the rows, by the chosen tile."""
        dx = torch.full((self.capacity, self.k), float("nan"), dtype=torch.bfloat16, device="cuda")
        task = self.plain(tile=self.chosen(back=True), back=True, n=self.k, k=self.n,
                          x=self.dy.data_ptr(), out=dx.data_ptr())

        def run(_):
            self.lib.ggemm(**task)
        run(0)
        want = self.torch_dgrad(0).float()
        error = ((dx[self.index].float() - want).norm() / want.norm()).item()
        if not error < 4e-3:
            sys.exit(f"WRONG: {self.name}, gradient of rows: error {error:.2e}")
        return run

    def torch_dgrad(self, _):
        return torch._grouped_mm(self.compact_dy, self.weights[0], self.ends)

    def torch_wgrad(self, _):
        return torch._grouped_mm(self.compact_dy.t(), self.compact[0], self.ends)

    def torch_add(self, _):
        """Accumulation without a fused kernel: the product, then the sum."""
        self.dw.add_(self.torch_wgrad(0))

    def check_wgrad(self):
        self.wgrad(False)(0)
        want = self.torch_wgrad(0)
        worst = 0.0
        for e in range(self.experts):
            norm = want[e].float().norm()
            error = ((self.dw[e] - want[e].float()).norm() / norm).item() if norm > 0 else \
                self.dw[e].abs().max().item()
            worst = max(worst, error if error == error else float("inf"))
        if not worst < 4e-3:
            sys.exit(f"WRONG: {self.name}, gradient of weights: error {worst:.2e}")

    def forced_cublas(self):
        """The products of the option `gemm cublas`, with fp32 output as for down."""
        kind = self.lib.constant("F32")
        out = torch.empty(self.capacity, self.n, device="cuda")
        room = self.lib.cublas_bytes(gated=False, out_dtype=kind, row_capacity=self.capacity,
                                     n=self.n)
        scratch = torch.empty(room, dtype=torch.uint8, device="cuda")
        task = self.plain(out_dtype=kind, out=out.data_ptr(), scratch=scratch.data_ptr())

        def run(_):
            self.lib.cublas(**task)
        run(0)
        want = self.torch_plain(0).float()
        error = ((out[self.index] - want).norm() / want.norm()).item()
        if not error < 4e-3:
            sys.exit(f"WRONG: {self.name}, cuBLAS: error {error:.2e}")
        return run

    def torch_plain(self, i):
        s = i % self.sets
        return torch._grouped_mm(self.compact[s], self.weights[s].transpose(1, 2), self.ends)

    def torch_gated(self, i):
        both = self.torch_plain(i)
        half = self.n // 2
        return torch.nn.functional.silu(both[:, :half]) * both[:, half:]

    def cublas(self, i):
        s = i % self.sets
        rows = self.compact[s].view(self.experts, -1, self.k)
        return torch.bmm(rows, self.weights[s].transpose(1, 2))

    def check(self, tile, gated=False):
        """Relative error against torch over all rows; rows outside the groups must stay NaN."""
        out = self.hidden if gated else self.out
        out.fill_(float("nan"))
        self.ours(tile, gated)(0)
        want = self.torch_plain(0).float()
        if gated:
            pairs = want.view(len(want), -1, 2, 8)
            want = (torch.nn.functional.silu(pairs[:, :, 0]) * pairs[:, :, 1]).flatten(1)
        error = ((out[self.index].float() - want).norm() / want.norm()).item()
        inside = torch.zeros(self.capacity, dtype=torch.bool, device="cuda")
        inside[self.index] = True
        strays = not bool(torch.isnan(out[~inside]).all())
        if not error < (8e-3 if gated else 4e-3) or strays:
            sys.exit(f"WRONG: {self.name}, tile {self.lib.tiles[tile]}: error {error:.2e}, "
                     f"strays {strays}")
        return error


def time_all(candidates, sets, rounds):
    """Median microseconds of each candidate."""
    events = {name: [] for name in candidates}
    for run in candidates.values():
        for i in range(max(2, sets)):
            run(i)
    launches = 0  # each takes the next set, which no recent launch has read
    for _ in range(rounds):
        order = list(candidates)
        random.shuffle(order)
        for name in order:
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda._sleep(SPIN_CYCLES)
            begin.record()
            candidates[name](launches)
            launches += 1
            end.record()
            events[name].append((begin, end))
    torch.cuda.synchronize()
    result = {}
    for name, pairs in events.items():
        times = sorted(begin.elapsed_time(end) * 1e3 for begin, end in pairs)
        result[name] = times[len(times) // 2]
    return result


def zipf(experts, total, empty, seed=1):
    """Row counts proportional to 1/rank, with `empty` experts without rows, in shuffled order."""
    weight = [1 / (i + 1) if i < experts - empty else 0 for i in range(experts)]
    random.Random(seed).shuffle(weight)
    counts = [int(total * w / sum(weight)) for w in weight]
    counts[counts.index(max(counts))] += total - sum(counts)
    return counts


def routed(experts, mean, seed=1):
    """Row counts of uniform random routing."""
    pick = random.Random(seed)
    counts = [0] * experts
    for _ in range(experts * mean):
        counts[pick.randrange(experts)] += 1
    return counts


def shapes():
    """name, rows per expert, K, N, input sets, whether to time the fused activation too"""
    yield "64x512 7168->4096", [512] * 64, 7168, 4096, 1, True
    yield "64x512 2048->7168", [512] * 64, 2048, 7168, 1, False
    yield "2x4096 4096->28672", [4096] * 2, 4096, 28672, 1, False
    yield "2x4096 14336->4096", [4096] * 2, 14336, 4096, 1, False
    yield "32x1024 2048->1536", [1024] * 32, 2048, 1536, 2, True
    yield "32x1024 768->2048", [1024] * 32, 768, 2048, 2, False
    yield "ragged 64 7168->4096", zipf(64, 32768, 7), 7168, 4096, 1, False
    yield "ragged 32 2048->1536", zipf(32, 32768, 3), 2048, 1536, 2, False
    yield "ragged 32 768->2048", zipf(32, 32768, 3), 768, 2048, 2, False
    yield "routed 64x384 7168->4096", routed(64, 384), 7168, 4096, 1, False
    yield "routed 64x768 7168->4096", routed(64, 768), 7168, 4096, 1, False
    yield "routed 64x512 7168->4096", routed(64, 512), 7168, 4096, 1, False
    yield "routed 64x512 2048->7168", routed(64, 512), 2048, 7168, 1, False
    yield "routed 32x1024 2048->1536", routed(32, 1024), 2048, 1536, 2, False
    yield "routed 32x1024 768->2048", routed(32, 1024), 768, 2048, 2, False
    yield "routed 2x4096 4096->28672", routed(2, 4096), 4096, 28672, 1, False
    yield "routed 2x4096 14336->4096", routed(2, 4096), 14336, 4096, 1, False
    yield "routed 64x128 7168->4096", routed(64, 128), 7168, 4096, 1, False
    yield "routed 32x128 2048->1536", routed(32, 128), 2048, 1536, 3, False
    yield "routed 32x32 2048->1536", routed(32, 32), 2048, 1536, 3, False
    yield "routed 64x200 7168->4096", routed(64, 200), 7168, 4096, 1, False
    for rows in (400, 300, 256, 200, 192, 160, 128, 96, 64):
        yield f"64x{rows} 7168->4096", [rows] * 64, 7168, 4096, 1, False
    for rows in (256, 128):
        yield f"32x{rows} 2048->1536", [rows] * 32, 2048, 1536, 3, False
        yield f"32x{rows} 768->2048", [rows] * 32, 768, 2048, 3, False
    yield "ragged 64 (128 mean) 7168->4096", zipf(64, 8192, 7), 7168, 4096, 1, False
    yield "64x16 7168->4096", [16] * 64, 7168, 4096, 1, True
    yield "64x4 7168->4096", [4] * 64, 7168, 4096, 1, False
    yield "32x32 2048->1536", [32] * 32, 2048, 1536, 3, True
    yield "1 row of 64 experts, 7168->4096", [0] * 63 + [1], 7168, 4096, 1, False


def sustain(run, seconds):
    """Mean microseconds of a product that runs back to back for at least `seconds`, and the chip's
    state halfway."""
    begin, end, before = (torch.cuda.Event(enable_timing=True) for _ in range(3))
    began, done, asked = time.monotonic(), 0, None
    begin.record()
    before.record()
    while time.monotonic() - began < seconds or done == 0:
        for i in range(COLD_PRODUCTS):  # one batch waits while the previous one runs
            run(i)
        done += COLD_PRODUCTS
        before.synchronize()
        before = torch.cuda.Event()
        before.record()
        if asked is None and time.monotonic() - began > seconds / 2:
            asked = ask_nvidia_smi("clocks.sm,power.draw,temperature.gpu")
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end) * 1e3 / done, answer_of(asked)


def ask_nvidia_smi(fields):
    """Asks for fields of the device in use. None without nvidia-smi."""
    device = str(torch.cuda.get_device_properties(0).uuid)
    try:
        return subprocess.Popen(
            ["nvidia-smi", "-i", device if device.startswith("GPU-") else f"GPU-{device}",
             f"--query-gpu={fields}", "--format=csv,noheader"],
            stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    except OSError:
        return None


def answer_of(asked):
    """The answer, or "unknown"."""
    if asked is None:
        return "unknown"
    text = asked.communicate(timeout=60)[0].strip()
    return text if asked.returncode == 0 else "unknown"


def nvidia_smi(fields):
    return answer_of(ask_nvidia_smi(fields))


def settings(args):
    """The settings of the run, as lines."""
    return [
        f"{datetime.datetime.now(datetime.timezone.utc):%Y-%m-%d %H:%M} UTC, "
        f"{torch.cuda.get_device_name()}, driver {nvidia_smi('driver_version')}, "
        f"CUDA {torch.version.cuda}, torch {torch.__version__}, "
        f"python {sys.version.split()[0]}",
        "clocks now SM / memory, most SM, power limit, temperature: "
        + nvidia_smi("clocks.sm,clocks.mem,clocks.max.sm,power.limit,temperature.gpu"),
        f"rounds {args.rounds}, sustained {args.sustained} s, "
        f"{' '.join(sys.argv[2:]) or 'defaults'}",
        f"copy {bandwidth():.0f} GB/s, read and written",
    ]


def dense(seconds):
    """Lines about one large product of torch: the chip cold, and at its power limit."""
    a, b = (torch.randn(DENSE, DENSE, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    out, flops = torch.empty_like(a), 2 * DENSE ** 3
    torch.matmul(a, b, out=out)
    torch.cuda.synchronize()
    time.sleep(2)
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda._sleep(SPIN_CYCLES)
    begin.record()
    for _ in range(COLD_PRODUCTS):
        torch.matmul(a, b, out=out)
    end.record()
    torch.cuda.synchronize()
    cold = begin.elapsed_time(end) * 1e3 / COLD_PRODUCTS
    lasting, state = sustain(lambda _: torch.matmul(a, b, out=out), seconds)
    return [f"dense {DENSE}^3 bf16, torch.matmul: first {COLD_PRODUCTS} products {cold:.0f} us "
            f"({flops / cold / 1e6:.0f} TFLOP/s), sustained {seconds} s {lasting:.0f} us "
            f"({flops / lasting / 1e6:.0f} TFLOP/s) at {state}"]


def report(case, name, us, base, kind="forward"):
    row = {"shape": case.name, "kind": kind, "candidate": name, "us": round(us, 1),
           "tflops": round(case.flops / us / 1e6, 1), "gbs": round(case.bytes / us / 1e3),
           "times_torch": round(base / us, 3)}
    print(f"{case.name:32s} {kind:9s} {name:28s} {row['us']:9.1f} us {row['tflops']:7.1f} TF "
          f"{row['gbs']:6d} GB/s  x{row['times_torch']:.3f}", flush=True)
    return row


def report_sustained(case, candidates, seconds):
    """Candidates one after the other, each for `seconds`; the first one is torch."""
    rows, base = [], None
    # Warm up, so that the first one is not the coldest.
    sustain(next(iter(candidates.values())), seconds / 4)
    for name, run in candidates.items():
        us, state = sustain(run, seconds)
        base = base or us
        rows.append(report(case, name, us, base, "sustained"))
        print(f"    at {state}", flush=True)
    return rows


def width_shapes():
    """name, rows per expert that gets rows, K, N, and the step: tokens per slot, slots, top-k,
    experts of the layer"""
    mixtral, deepseek, qwen = (2, 8), (8, 256), (8, 128)
    for tokens, counts in ((1, [1]), (1, [1] * 2), (32, [32] * 2), (64, [64] * 2), (96, [96] * 2),
                           (128, [128] * 2), (128, [118, 138]), (128, [86, 170]),
                           (160, [160] * 2), (200, [200] * 2)):
        slots = 2 if tokens == 1 else 4
        for k, n in ((14336, 4096), (4096, 28672)):
            yield f"mixtral {len(counts)}x{max(counts)} {k}->{n}", counts, k, n, \
                (tokens, slots, *mixtral)
    for hit in (2, 4, 6, 8, 9, 10):
        for k, n in ((7168, 4096), (2048, 7168)):
            yield f"deepseek-v3 {hit}x1 {k}->{n}", [1] * hit, k, n, (1, 2, *deepseek)
    for tokens, counts in ((4, [1] * 25), (32, [4] * 64), (128, [16] * 64)):
        for k, n in ((7168, 4096), (2048, 7168)):
            yield f"deepseek-v3 {len(counts)}x{counts[0]} {k}->{n}", counts, k, n, \
                (tokens, 4, *deepseek)
    for rows in (1, 32, 128):
        for k, n in ((7168, 4096), (2048, 7168)):
            yield f"shared 1x{rows} {k}->{n}", [rows], k, n, (rows, 1, 1, 1)
    for tokens, counts in ((1, [1] * 7), (8, [3] * 28), (32, [8] * 32), (128, [32] * 32)):
        for k, n in ((2048, 1536), (768, 2048)):
            yield f"qwen3 {len(counts)}x{counts[0]} {k}->{n}", counts, k, n, (tokens, 4, *qwen)


def bits_of(case, tile, gated):
    out = case.hidden if gated else case.out
    out.fill_(float("nan"))
    case.ours(tile, gated)(0)
    return out.view(torch.int16).clone()


def measure_widths(case, rounds, step):
    """All tiles for one shape. Narrow ones must have the bits of the wide ones."""
    bucket, slots, top_k, experts = step
    chosen = case.lib.choose_tile(bucket=bucket, slots=slots, top_k=top_k, experts=experts,
                                  n=case.n, k=case.k, processors=case.processors)
    tiles = case.lib.tiles
    for gated in (False, True):
        bits = {name: bits_of(case, tile, gated) for tile, name in enumerate(tiles)}
        for name in tiles:
            if not torch.equal(bits[name], bits[name.split("_")[0]]):
                sys.exit(f"WRONG: {case.name}, tile {name} differs in bits, gated {gated}")
        others = [name for name in tiles if not torch.equal(bits[name], bits["decode"])]
        if others:
            print(f"{case.name}: other bits than decode, gated {gated}: {' '.join(others)}")
    for tile in range(len(tiles)):
        case.check(tile)
    times = time_all({name: case.ours(tile) for tile, name in enumerate(tiles)}, case.sets, rounds)
    weights = 2 * case.experts * case.n * case.k
    goal = 1.10 * weights / READ_TBS / 1e6 + 8
    us = times[tiles[chosen]]
    print(f"{case.name:34s} {weights / 1e6:6.0f} MB | " +
          " ".join(f"{name} {times[name]:7.1f}{'*' if tile == chosen else ' '}"
                   for tile, name in enumerate(tiles)) +
          f" | {weights / us / 1e6:5.2f} TB/s, best {weights / min(times.values()) / 1e6:5.2f} | "
          f"goal {goal:6.1f}", flush=True)
    return {"shape": case.name, "kind": "widths", "mb": round(weights / 1e6),
            "chosen": tiles[chosen], "us": {name: round(t, 1) for name, t in times.items()},
            "goal": round(goal, 1)}


def widths_table(rows):
    """Markdown: one line per shape, with all tiles."""
    names = list(rows[0]["us"])
    lines = [f"| rows, K -> N | MB | {' | '.join(names)} | chosen, TB/s of weights | goal, us |",
             "|" + "---|" * (len(names) + 4)]
    for r in rows:
        us = r["us"][r["chosen"]]
        lines.append(f"| {r['shape']} | {r['mb']} | " +
                     " | ".join(f"{t}{'*' if n == r['chosen'] else ''}" for n, t in
                                r["us"].items()) +
                     f" | {r['mb'] / us:.2f} | {r['goal']} |")
    return lines


def backward_shapes():
    """name, rows per expert, K, N"""
    yield "64x512 7168->4096", [512] * 64, 7168, 4096
    yield "64x512 2048->7168", [512] * 64, 2048, 7168
    yield "2x4096 4096->28672", [4096] * 2, 4096, 28672
    yield "2x4096 14336->4096", [4096] * 2, 14336, 4096
    yield "routed 64x512 7168->4096", routed(64, 512), 7168, 4096
    yield "32x1024 2048->1536", [1024] * 32, 2048, 1536


def measure_backward(case, rounds):
    case.check_wgrad()
    times = time_all({"torch wgrad (bf16)": case.torch_wgrad,
                      "wgrad (fp32)": case.wgrad(False),
                      "torch wgrad, added to fp32": case.torch_add,
                      "wgrad (fp32, accumulate)": case.wgrad(True),
                      "torch dgrad": case.torch_dgrad, "dgrad": case.dgrad()}, 1, rounds)

    def rival(name):
        return ("torch dgrad" if "dgrad" in name else
                "torch wgrad, added to fp32" if "acc" in name else "torch wgrad (bf16)")
    return [report(case, name, us, times[rival(name)], "backward") for name, us in times.items()]


SUSTAINED = ("64x512 7168->4096", "2x4096 4096->28672", "routed 64x512 7168->4096",
             "routed 64x512 2048->7168", "routed 2x4096 4096->28672")


def measure(case, args, gated):
    chosen = case.chosen()
    tiles = range(len(case.lib.tiles)) if args.all_tiles else [chosen]
    candidates = {"torch": case.torch_plain}
    if len(set(case.counts)) == 1:
        candidates["cuBLAS bmm"] = case.cublas
    if args.cublas:
        candidates["--gemm cublas"] = case.forced_cublas()
    for tile in tiles:
        case.check(tile)
        mark = "*" if tile == chosen else ""
        candidates[f"{case.lib.tiles[tile]}{mark}"] = case.ours(tile)
    lasting = {"torch": case.torch_plain, f"{case.lib.tiles[chosen]}*": case.ours(chosen)}
    if gated:
        case.check(chosen, gated=True)
        candidates["torch + silu * up"] = case.torch_gated
        candidates[f"{case.lib.tiles[chosen]}* gated"] = case.ours(chosen, gated=True)
    times = time_all(candidates, case.sets, args.rounds)
    rows = []
    for name, us in times.items():
        base = times["torch + silu * up" if "gated" in name else "torch"]
        rows.append(report(case, name, us, base))
    if args.sustained > 0 and case.name in SUSTAINED:
        rows += report_sustained(case, lasting, args.sustained)
    return rows


def forward_table(rows):
    """Markdown: one line per shape, with all timed candidates."""
    lines = ["| experts x rows, K -> N | torch us | cuBLAS us | chosen | us | TFLOP/s | GB/s | "
             "torch / ours | cuBLAS / ours | others, us |", "|" + "---|" * 10]
    for shape in dict.fromkeys(r["shape"] for r in rows if r["kind"] == "forward"):
        of = {r["candidate"]: r for r in rows if (r["shape"], r["kind"]) == (shape, "forward")}
        name = next(c for c in of if c.endswith("*"))
        ours, bmm = of[name], of.get("cuBLAS bmm")
        others = [f"{c} {r['us']}" for c, r in of.items()
                  if c not in ("torch", "cuBLAS bmm", name)]
        lines.append(
            f"| {shape} | {of['torch']['us']} | {bmm['us'] if bmm else '-'} | {name[:-1]} | "
            f"{ours['us']} | {ours['tflops']:.0f} | {ours['gbs']} | "
            f"{of['torch']['us'] / ours['us']:.3f} | " +
            (f"{bmm['us'] / ours['us']:.3f}" if bmm else "-") + f" | {', '.join(others)} |")
    return lines


def plain_table(rows, kind):
    """Markdown: one line per candidate."""
    lines = [
        "| experts x rows, K -> N | candidate | us | TFLOP/s | torch / this |", "|" + "---|" * 5
    ]
    return lines + [f"| {r['shape']} | {r['candidate']} | {r['us']} | {r['tflops']:.0f} | "
                    f"{r['times_torch']:.3f} |" for r in rows if r["kind"] == kind]


def markdown(path, head, rows):
    parts = [head]
    for kind, lines in (("forward", forward_table(rows)), ("sustained",
                                                           plain_table(rows, "sustained")),
                        ("backward", plain_table(rows, "backward"))):
        if any(r["kind"] == kind for r in rows):
            parts.append([f"{kind}:", "", *lines])
    if any(r["kind"] == "widths" for r in rows):
        parts.append(widths_table(rows))
    with open(path, "w", encoding="utf-8") as f:
        f.write("\n\n".join("\n".join(part) for part in parts) + "\n")


def bandwidth():
    """GB/s (read and written bytes) of a large copy: the limit of decode."""
    a = torch.empty(2 << 30, dtype=torch.uint8, device="cuda").random_()
    b = torch.empty_like(a)
    return 2 * a.numel() / time_all({"copy": lambda i: b.copy_(a)}, 1, 10)["copy"] / 1e3


def main():
    args = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    args.add_argument("library")
    args.add_argument("--rounds", type=int, default=30)
    args.add_argument("--all-tiles", action="store_true", help="time every tile, * = chosen")
    args.add_argument("--only", default="", help="shapes with a name that contains this")
    args.add_argument("--cublas", action="store_true", help="time the forced cuBLAS path too")
    args.add_argument("--backward", action="store_true", help="gradients instead")
    args.add_argument("--widths", action="store_true", help="all tiles on few tiles instead")
    args.add_argument("--sustained", type=float, default=4.0,
                      help="seconds of the dense product and of some shapes back to back; 0 = none")
    args.add_argument("--json", help="the rows")
    args.add_argument("--markdown", help="settings and tables")
    args = args.parse_args()
    lib = Products(args.library)
    head = dense(args.sustained) if args.sustained > 0 else []  # first, while the chip is cold
    head = settings(args) + head
    print("\n".join(head), flush=True)
    rows = []
    for name, counts, k, n in backward_shapes() if args.backward else ():
        if args.only in name:
            rows += measure_backward(Case(lib, name, counts, k, n), args.rounds)
            torch.cuda.empty_cache()
    for name, counts, k, n, step in width_shapes() if args.widths else ():
        if args.only in name:
            sets = -(-COLD_BYTES // (2 * len(counts) * n * k)) + 1
            rows.append(measure_widths(Case(lib, name, counts, k, n, sets), args.rounds, step))
            torch.cuda.empty_cache()
    for name, counts, k, n, sets, gated in () if args.backward or args.widths else shapes():
        if args.only in name:
            rows += measure(Case(lib, name, counts, k, n, sets), args, gated)
            torch.cuda.empty_cache()
    if args.json:
        with open(args.json, "w", encoding="utf-8") as f:
            json.dump({"settings": head, "rows": rows}, f, indent=1)
    if args.markdown:
        markdown(args.markdown, head, rows)


if __name__ == "__main__":
    try:
        main()
    except Refused as error:
        sys.exit(str(error))
