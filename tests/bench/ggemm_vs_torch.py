#!/usr/bin/env python3
"""Grouped GEMM of kernels/cuda against torch._grouped_mm and cuBLAS, in one process on one GPU.

Loads the library that the target `ggemm_shared` builds, hands it torch's tensors by address, checks
every buffer that it times, and prints one table. Each launch waits behind a short spin kernel, so
that nobody's launch cost counts; candidates are interleaved in random order, so that all see the
same clock and power; figures are medians.

    ggemm_vs_torch.py path/to/libmoe_ggemm.so [--rounds 30] [--all-tiles] [--only TEXT]
                      [--cublas] [--backward] [--json FILE]
"""
import argparse
import ctypes
import json
import random
import sys

import torch

TILES = ["decode", "even", "pingpong"]
F32, BF16, SWIGLU, LATE = 1, 2, 0, 0
SPIN_CYCLES = 300_000  # about 0.15 ms: longer than any launch takes the host


class Status(ctypes.Structure):
    _fields_ = [("code", ctypes.c_int), ("reason", ctypes.c_int),
                ("retry_after_ms", ctypes.c_uint32), ("text", ctypes.c_char * 232)]


class Weights(ctypes.Structure):
    """struct moe_cuda_ggemm_weights"""
    _fields_ = [("map", ctypes.c_uint64 * 16 * len(TILES)),
                ("back", ctypes.c_uint64 * 16), ("data", ctypes.c_void_p),
                ("bias", ctypes.c_void_p), ("up_bias", ctypes.c_void_p),
                ("unused", ctypes.c_uint64 * 13)]


class Ggemm(ctypes.Structure):
    """struct moe_cuda_ggemm"""
    _fields_ = [("tile", ctypes.c_int), ("gated", ctypes.c_bool), ("back", ctypes.c_bool),
                ("experts", ctypes.c_uint32), ("row_capacity", ctypes.c_uint32), ("n", ctypes.c_uint32), ("k", ctypes.c_uint32),
                ("start", ctypes.c_void_p), ("count", ctypes.c_void_p), ("x", ctypes.c_void_p),
                ("x_stride", ctypes.c_uint32), ("weights", ctypes.c_void_p), ("has_bias", ctypes.c_bool),
                ("row_weight", ctypes.c_void_p),
                ("weighting", ctypes.c_int), ("activation", ctypes.c_int),
                ("limit", ctypes.c_float), ("alpha", ctypes.c_float),
                ("out_dtype", ctypes.c_int), ("out", ctypes.c_void_p),
                ("out_stride", ctypes.c_uint32), ("began", ctypes.c_void_p),
                ("processors", ctypes.c_uint32)]


class Wgrad(ctypes.Structure):
    """struct moe_cuda_wgrad"""
    _fields_ = [("experts", ctypes.c_uint32), ("row_capacity", ctypes.c_uint32),
                ("n", ctypes.c_uint32), ("k", ctypes.c_uint32), ("start", ctypes.c_void_p),
                ("count", ctypes.c_void_p), ("dy", ctypes.c_void_p), ("x", ctypes.c_void_p),
                ("dy_stride", ctypes.c_uint32), ("x_stride", ctypes.c_uint32),
                ("accumulate", ctypes.c_bool), ("dw", ctypes.c_void_p),
                ("processors", ctypes.c_uint32)]


class Facts(ctypes.Structure):
    """struct moe_cuda_gemm_facts"""
    _fields_ = [(f, ctypes.c_uint32) for f in ("bucket", "slots", "top_k", "experts", "n", "k")]


def load(path):
    lib = ctypes.CDLL(path)
    lib.moe_cuda_ggemm_enqueue.argtypes = [ctypes.POINTER(Ggemm), ctypes.c_void_p]
    lib.moe_cuda_ggemm_enqueue.restype = Status
    lib.moe_cuda_ggemm_describe.argtypes = [ctypes.c_void_p, ctypes.c_uint32, ctypes.c_uint32,
                                            ctypes.c_uint32, ctypes.POINTER(Weights)]
    lib.moe_cuda_ggemm_describe.restype = Status
    lib.moe_cuda_wgrad_enqueue.argtypes = [ctypes.POINTER(Wgrad), ctypes.c_void_p]
    lib.moe_cuda_wgrad_enqueue.restype = Status
    lib.moe_cuda_cublas_open.argtypes = [ctypes.POINTER(ctypes.c_void_p)]
    lib.moe_cuda_cublas_open.restype = Status
    lib.moe_cuda_cublas_scratch_bytes.argtypes = [ctypes.c_bool, ctypes.c_int, ctypes.c_uint32,
                                                  ctypes.c_uint32]
    lib.moe_cuda_cublas_scratch_bytes.restype = ctypes.c_size_t
    lib.moe_cuda_cublas_enqueue.argtypes = [ctypes.c_void_p, ctypes.POINTER(Ggemm),
                                            ctypes.c_void_p, ctypes.c_void_p]
    lib.moe_cuda_cublas_enqueue.restype = Status
    lib.moe_cuda_choose_tile.argtypes = [ctypes.POINTER(Facts)]
    lib.moe_cuda_choose_tile.restype = ctypes.c_int
    return lib


class Case:
    """Random rows and weights of one shape; `sets` copies are used in turn against a warm L2."""

    def __init__(self, lib, name, counts, k, n, sets=1):
        self.lib, self.name, self.counts, self.k, self.n, self.sets = lib, name, counts, k, n, sets
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
        d = Weights()
        st = self.lib.moe_cuda_ggemm_describe(weights.data_ptr(), self.experts, self.n, self.k,
                                              ctypes.byref(d))
        if st.code != 0:
            sys.exit(f"{self.name}: {st.text.decode()}")
        return torch.frombuffer(bytearray(bytes(d)), dtype=torch.uint8).to("cuda")

    def chosen(self, back=False):
        n, k = (self.k, self.n) if back else (self.n, self.k)
        facts = Facts(sum(self.counts), 1, 1, self.experts, n, k)
        return self.lib.moe_cuda_choose_tile(ctypes.byref(facts))

    def ours(self, tile, gated=False):
        tasks = []
        for i in range(self.sets):
            out = self.hidden if gated else self.out
            tasks.append(Ggemm(tile, gated, False, self.experts, self.capacity,
                               self.n // 2 if gated else self.n, self.k, self.start.data_ptr(),
                               self.count.data_ptr(), self.x[i].data_ptr(), 0,
                               self.cells[i].data_ptr(), False, None, LATE, SWIGLU, 0, 0, BF16,
                               out.data_ptr()))

        def run(i):
            stream = torch.cuda.current_stream().cuda_stream
            st = self.lib.moe_cuda_ggemm_enqueue(ctypes.byref(tasks[i % self.sets]), stream)
            if st.code != 0:
                sys.exit(f"{self.name}: {st.text.decode()}")
        return run

    def wgrad(self, accumulate):
        """Gradients of the weights, from random gradients of the results."""
        if not hasattr(self, "dw"):
            self.dy = torch.randn(self.capacity, self.n, dtype=torch.bfloat16, device="cuda")
            self.compact_dy = self.dy[self.index]
            self.dw = torch.full((self.experts, self.n, self.k), float("nan"), device="cuda")
        task = Wgrad(self.experts, self.capacity, self.n, self.k, self.start.data_ptr(),
                     self.count.data_ptr(), self.dy.data_ptr(), self.x[0].data_ptr(), 0, 0,
                     accumulate, self.dw.data_ptr())

        def run(_):
            stream = torch.cuda.current_stream().cuda_stream
            st = self.lib.moe_cuda_wgrad_enqueue(ctypes.byref(task), stream)
            if st.code != 0:
                sys.exit(f"{self.name}: {st.text.decode()}")
        return run

    def dgrad(self):
        """Gradients of the rows, by the chosen tile."""
        dx = torch.full((self.capacity, self.k), float("nan"), dtype=torch.bfloat16, device="cuda")
        task = Ggemm(self.chosen(back=True), False, True, self.experts, self.capacity, self.k,
                     self.n, self.start.data_ptr(), self.count.data_ptr(), self.dy.data_ptr(), 0,
                     self.cells[0].data_ptr(), False, None, LATE, SWIGLU, 0, 0, BF16,
                     dx.data_ptr())

        def run(_):
            stream = torch.cuda.current_stream().cuda_stream
            st = self.lib.moe_cuda_ggemm_enqueue(ctypes.byref(task), stream)
            if st.code != 0:
                sys.exit(f"{self.name}: {st.text.decode()}")
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
        """What accumulating takes without a kernel for it: the product, then the sum."""
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
        """The products of the option `gemm cublas`, fp32 out as down has it."""
        handle = ctypes.c_void_p()
        st = self.lib.moe_cuda_cublas_open(ctypes.byref(handle))
        if st.code != 0:
            sys.exit(st.text.decode())
        out = torch.empty(self.capacity, self.n, device="cuda")
        room = self.lib.moe_cuda_cublas_scratch_bytes(False, F32, self.capacity, self.n)
        scratch = torch.empty(room, dtype=torch.uint8, device="cuda")
        task = Ggemm(0, False, False, self.experts, self.capacity, self.n, self.k, self.start.data_ptr(),
                     self.count.data_ptr(), self.x[0].data_ptr(), 0, self.cells[0].data_ptr(), False,
                     None, LATE, SWIGLU, 0, 0, F32, out.data_ptr())

        def run(_):
            stream = torch.cuda.current_stream().cuda_stream
            st = self.lib.moe_cuda_cublas_enqueue(handle, ctypes.byref(task), scratch.data_ptr(),
                                                  stream)
            if st.code != 0:
                sys.exit(f"{self.name}: {st.text.decode()}")
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
            sys.exit(f"WRONG: {self.name}, tile {TILES[tile]}: error {error:.2e}, strays {strays}")
        return error


def time_all(candidates, sets, rounds):
    """Median microseconds of each candidate."""
    events = {name: [] for name in candidates}
    for run in candidates.values():
        for i in range(max(2, sets)):
            run(i)
    for i in range(rounds):
        order = list(candidates)
        random.shuffle(order)
        for name in order:
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda._sleep(SPIN_CYCLES)
            begin.record()
            candidates[name](i)
            end.record()
            events[name].append((begin, end))
    torch.cuda.synchronize()
    result = {}
    for name, pairs in events.items():
        times = sorted(begin.elapsed_time(end) * 1e3 for begin, end in pairs)
        result[name] = times[len(times) // 2]
    return result


def zipf(experts, total, empty, seed=1):
    """Row counts that fall as 1/rank, `empty` experts without any, in shuffled order."""
    weight = [1 / (i + 1) if i < experts - empty else 0 for i in range(experts)]
    random.Random(seed).shuffle(weight)
    counts = [int(total * w / sum(weight)) for w in weight]
    counts[counts.index(max(counts))] += total - sum(counts)
    return counts


def routed(experts, mean, seed=1):
    """Row counts as uniform random routing gives them."""
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


def report(case, name, us, base, kind="forward"):
    row = {"shape": case.name, "kind": kind, "candidate": name, "us": round(us, 1),
           "tflops": round(case.flops / us / 1e6, 1), "gbs": round(case.bytes / us / 1e3),
           "times_torch": round(base / us, 3)}
    print(f"{case.name:32s} {name:28s} {row['us']:9.1f} us {row['tflops']:7.1f} TF "
          f"{row['gbs']:6d} GB/s  x{row['times_torch']:.3f}", flush=True)
    return row


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


def measure(case, rounds, all_tiles, gated, forced):
    chosen = case.chosen()
    tiles = range(len(TILES)) if all_tiles else [chosen]
    candidates = {"torch": case.torch_plain}
    if len(set(case.counts)) == 1:
        candidates["cuBLAS bmm"] = case.cublas
    if forced:
        candidates["--gemm cublas"] = case.forced_cublas()
    for tile in tiles:
        case.check(tile)
        mark = "*" if tile == chosen else ""
        candidates[f"{TILES[tile]}{mark}"] = case.ours(tile)
    if gated:
        case.check(chosen, gated=True)
        candidates["torch + silu * up"] = case.torch_gated
        candidates[f"{TILES[chosen]}* gated"] = case.ours(chosen, gated=True)
    times = time_all(candidates, case.sets, rounds)
    rows = []
    for name, us in times.items():
        base = times["torch + silu * up" if "gated" in name else "torch"]
        rows.append(report(case, name, us, base))
    return rows


def bandwidth():
    """GB/s, read and written bytes, of a large copy: the ceiling of decode."""
    a = torch.empty(2 << 30, dtype=torch.uint8, device="cuda").random_()
    b = torch.empty_like(a)
    return 2 * a.numel() / time_all({"copy": lambda i: b.copy_(a)}, 1, 10)["copy"] / 1e3


def main():
    args = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    args.add_argument("library")
    args.add_argument("--rounds", type=int, default=30)
    args.add_argument("--all-tiles", action="store_true", help="time every tile, * = chosen")
    args.add_argument("--only", default="", help="shapes whose name contains this")
    args.add_argument("--cublas", action="store_true", help="time the forced cuBLAS path too")
    args.add_argument("--backward", action="store_true", help="gradients instead")
    args.add_argument("--json")
    args = args.parse_args()
    lib = load(args.library)
    print(f"torch {torch.__version__}, CUDA {torch.version.cuda}, {torch.cuda.get_device_name()}; "
          f"copy {bandwidth():.0f} GB/s", flush=True)
    rows = []
    for name, counts, k, n in backward_shapes() if args.backward else ():
        if args.only in name:
            rows += measure_backward(Case(lib, name, counts, k, n), args.rounds)
            torch.cuda.empty_cache()
    for name, counts, k, n, sets, gated in () if args.backward else shapes():
        if args.only not in name:
            continue
        rows += measure(Case(lib, name, counts, k, n, sets), args.rounds, args.all_tiles, gated,
                        args.cublas)
        torch.cuda.empty_cache()
    if args.json:
        with open(args.json, "w", encoding="utf-8") as f:
            json.dump(rows, f, indent=1)


if __name__ == "__main__":
    main()
