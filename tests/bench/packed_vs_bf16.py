#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Grouped products with weights that stay quantised, against bf16 weights, in one process on a GPU.

Loads the library of the target `ggemm_shared`. Each format's weights are random bytes with random
scales; the rivals are this project's bf16 kernel and torch._grouped_mm on the same values rounded
to bf16. Weights rotate over at least 512 MB, so that nothing of them is left in the L2 cache. Each
case is checked first: against the values in double precision for sampled experts, and for equal
bits in both tiles. `few` and `many` are the two tiles, `*` is what the product would choose.

With --back, the gradients of rows instead: products with W, not W^T.

    packed_vs_bf16.py path/to/libmoe_ggemm.so [--rounds 30] [--only TEXT] [--formats fp8,mxfp4]
                      [--back] [--markdown FILE]
"""
import argparse
import sys

import torch

from ggemm_binding import Products, Refused
from ggemm_vs_torch import Case, routed, settings, time_all

ROTATE = 512 << 20
E2M1 = torch.tensor([0, .5, 1, 1.5, 2, 3, 4, 6, -0., -.5, -1, -1.5, -2, -3, -4, -6])


GLOBAL = 0.03  # scale of a whole matrix, with E4M3


class Format:
    """Elements of few bits with a scale for each block of rows and columns; 0: for all."""
    TYPES = {"SCALE_F32": torch.float32, "SCALE_BF16": torch.bfloat16, "SCALE_F16": torch.float16,
             "SCALE_E8M0": torch.uint8, "SCALE_E4M3": torch.uint8}

    def __init__(self, lib, name, encoding, rows, columns, scale, zero_points=False,
                 activations="PLAIN"):
        self.lib, self.name, self.rows, self.columns = lib, name, rows, columns
        self.encoding, self.scale, self.zero_points = encoding, scale, zero_points
        self.format = {"encoding": lib.constant(encoding), "block_rows": rows,
                       "block_columns": columns, "scale": lib.constant(scale),
                       "zero_points": zero_points}
        self.packing = self.lib.packing_of(activations=lib.constant(activations), **self.format)
        if self.packing == 0:
            sys.exit(f"{name}: GPUs have no such weights")
        self.eight = encoding == "F8E4M3"

    def random(self, n, k, generator):
        """Elements [n, row bytes], scales and zero points of one matrix."""
        gpu = {"device": "cuda", "generator": generator}
        elements = torch.randint(0, 256, (n, k if self.eight else k // 2), dtype=torch.uint8, **gpu)
        if self.eight:  # small enough not to overflow, and no NaN
            elements &= 0xbf
        shape = (-(-n // (self.rows or n)), -(-k // (self.columns or k)))
        zeros = torch.randint(0, 17, shape, dtype=torch.uint8, **gpu) if self.zero_points else None
        if self.scale == "SCALE_E8M0":
            return elements, torch.randint(118, 124, shape, dtype=torch.uint8, **gpu), zeros
        if self.scale == "SCALE_E4M3":
            return elements, torch.randint(0x30, 0x40, shape, dtype=torch.uint8, **gpu), zeros
        scales = torch.rand(shape, **gpu) * 0.1 + 0.01
        return elements, scales.to(self.TYPES[self.scale]), zeros

    def wide_scales(self, scales):
        if self.scale == "SCALE_E8M0":
            return torch.exp2(scales.double() - 127)
        if self.scale == "SCALE_E4M3":
            return scales.view(torch.float8_e4m3fn).double() * GLOBAL
        return scales.double()

    def values(self, elements, scales, zeros, n, k):
        """The matrix in double precision."""
        def wide(blocks):
            wide = blocks.repeat_interleave(self.rows or n, 0)[:n]
            return wide.repeat_interleave(self.columns or k, 1)[:, :k]

        if self.eight:
            return elements.view(torch.float8_e4m3fn).double() * wide(self.wide_scales(scales))
        both = torch.stack([elements & 15, elements >> 4], dim=2).flatten(1)
        if self.encoding == "E2M1":
            plain = E2M1.to("cuda", torch.float64)[both.long()]
        else:
            plain = both.double() - (wide(zeros.double()) if self.zero_points else 8)
        return plain * wide(self.wide_scales(scales))

    def file_bytes(self, n, k):
        blocks = -(-n // (self.rows or n)) * -(-k // (self.columns or k))
        zeros = -(-blocks // 2) if self.zero_points else 0
        return (n * k if self.eight else n * k // 2) + zeros + \
            blocks * self.TYPES[self.scale].itemsize

    def pack(self, experts, n, k, generator, wide):
        """One packed matrix for all experts. `wide` receives the values as bf16."""
        one = self.lib.packed_bytes(packing=self.packing, rows=n, columns=k)
        packed = torch.zeros(experts * one, dtype=torch.uint8, device="cuda")
        wrong = torch.zeros(1, dtype=torch.int32, device="cuda")
        stream = torch.cuda.current_stream().cuda_stream
        samples = {}
        for e in range(experts):
            elements, scales, zeros = self.random(n, k, generator)
            to = {"packing": self.packing, "entry": packed.data_ptr() + e * one, "rows": n,
                  "columns": k, "interleaved": False, "offset": 0, "global": GLOBAL,
                  "wrong": wrong.data_ptr(), "stream": stream}
            self.lib.packed_place(**to, src=elements.data_ptr())
            self.lib.packed_scale(**to, **self.format, src=scales.data_ptr())
            if self.zero_points:
                self.lib.packed_zeros(**to, **self.format, src=zeros.data_ptr())
            values = self.values(elements, scales, zeros, n, k)
            wide[e] = values.bfloat16()
            if e % 16 == 0 or e == experts - 1:
                samples[e] = values
            torch.cuda.synchronize()  # the sources may go
        if wrong.item() != 0:
            sys.exit("an element or a scale has no place")
        return packed, samples


class PackedCase(Case):
    def __init__(self, lib, name, counts, k, n, fmt):
        live = max(1, sum(1 for c in counts if c > 0))
        sets = min(6, 1 + -(-ROTATE // (live * fmt.file_bytes(n, k))))
        super().__init__(lib, name, counts, k, n, sets)
        generator = torch.Generator(device="cuda").manual_seed(1)
        self.fmt, self.packed, self.packed_cells = fmt, [], []
        for s in range(sets):
            packed, samples = fmt.pack(self.experts, n, k, generator, self.weights[s])
            described = torch.zeros(lib.constant("WEIGHTS_BYTES"), dtype=torch.uint8)
            at = lib.constant("WEIGHTS_DATA")
            described[at:at + 8] = torch.tensor([packed.data_ptr()]).view(torch.uint8)
            described = described.to("cuda")
            self.packed.append((packed, described))
            self.packed_cells.append(torch.tensor([described.data_ptr()], device="cuda"))
            if s == 0:
                self.samples = samples
        self.file = live * fmt.file_bytes(n, k)

    def run_packed(self, tile):
        tasks = [self.plain(tile=tile, packing=self.fmt.packing, x=self.x[i].data_ptr(),
                            weights=self.packed_cells[i].data_ptr()) for i in range(self.sets)]

        def run(i):
            self.lib.ggemm(**tasks[i % self.sets])
        return run

    def back(self, packing, cells):
        """Gradients of the rows, to self.dx. `packing` 0: bf16."""
        tile = self.chosen(back=True)
        tasks = [self.plain(tile=tile, back=True, packing=packing, n=self.k, k=self.n,
                            x=self.dy[i].data_ptr(), weights=cells[i].data_ptr(),
                            out=self.dx.data_ptr()) for i in range(self.sets)]

        def run(i):
            self.lib.ggemm(**tasks[i % self.sets])
        return run

    def check_back(self):
        """The worst relative error of a sampled expert."""
        gpu = {"device": "cuda", "dtype": torch.bfloat16}
        self.dy = [torch.randn(self.capacity, self.n, **gpu) for _ in range(self.sets)]
        self.dx = torch.full((self.capacity, self.k), float("nan"), **gpu)
        self.back(self.fmt.packing, self.packed_cells)(0)
        worst = 0.0
        for e, values in self.samples.items():
            start = self.start[e].item()
            rows = slice(start, start + self.counts[e])
            want = self.dy[0][rows].double() @ values
            error = ((self.dx[rows].double() - want).norm() / want.norm()).item()
            if self.counts[e] > 0 and not error < 5e-3:
                sys.exit(f"WRONG: {self.name}, {self.fmt.name}, back: error {error:.2e}")
            worst = max(worst, error) if self.counts[e] > 0 else worst
        return worst

    def expected(self, rows, values):
        """The product of rows of the first set in double precision."""
        return self.x[0][rows].double() @ values.t()

    def check_packed(self, tile):
        """The worst relative error of a sampled expert, and all results."""
        self.out.fill_(float("nan"))
        self.run_packed(tile)(0)
        worst = 0.0
        for e, values in self.samples.items():
            if self.counts[e] == 0:
                continue
            start = self.start[e].item()
            rows = slice(start, start + self.counts[e])
            want = self.expected(rows, values)
            error = ((self.out[rows].double() - want).norm() / want.norm()).item()
            worst = max(worst, error if error == error else float("inf"))
        inside = torch.zeros(self.capacity, dtype=torch.bool, device="cuda")
        inside[self.index] = True
        if not worst < 4e-3 or not bool(torch.isnan(self.out[~inside]).all()):
            sys.exit(f"WRONG: {self.name}, {self.fmt.name}, tile {tile}: error {worst:.2e}")
        return worst, self.out[self.index].clone()


def shapes():
    """name, rows per expert, K, N"""
    yield "64x16 7168->4096", [16] * 64, 7168, 4096
    yield "64x4 7168->4096", [4] * 64, 7168, 4096
    yield "64x16 2048->7168", [16] * 64, 2048, 7168
    yield "64x4 2048->7168", [4] * 64, 2048, 7168
    yield "32x32 2048->1536", [32] * 32, 2048, 1536
    yield "routed 64x64 7168->4096", routed(64, 64), 7168, 4096
    yield "32x4 2880->5760", [4] * 32, 2880, 5760
    yield "routed 64x512 7168->4096", routed(64, 512), 7168, 4096
    yield "32x1024 2048->1536", [1024] * 32, 2048, 1536
    yield "2x4096 4096->28672", [4096] * 2, 4096, 28672


def measure(case, rounds):
    few, many = (case.lib.tiles.index(t) for t in ("decode", "even"))
    worst, one = case.check_packed(few)
    other_worst, other = case.check_packed(many)
    if not torch.equal(one, other):
        sys.exit(f"WRONG: {case.name}, {case.fmt.name}: tiles differ in bits")
    chosen = case.chosen()
    times = time_all({"torch bf16": case.torch_plain, "bf16": case.ours(chosen),
                      "few": case.run_packed(few), "many": case.run_packed(many)},
                     case.sets, rounds)
    tile = case.lib.choose_packed_tile(bucket=sum(case.counts), slots=1, top_k=1,
                                       experts=case.experts, n=case.n, k=case.k,
                                       processors=case.processors)
    best = times["few" if tile == few else "many"]
    mark = {t: "*" if t == tile else " " for t in (few, many)}
    print(f"{case.name:26s} {case.fmt.name:8s} few {times['few']:8.1f}{mark[few]} us many "
          f"{times['many']:8.1f}{mark[many]} us {case.file / best / 1e6:6.2f} TB/s of file bytes "
          f"{case.flops / best / 1e6:6.0f} TF | "
          f"bf16 {times['bf16']:8.1f} us x{times['bf16'] / best:.2f} | torch bf16 "
          f"{times['torch bf16']:8.1f} us | sets {case.sets} error {max(worst, other_worst):.1e}",
          flush=True)
    return [case.name, case.fmt.name, f"{times['few']:.0f}{mark[few]}",
            f"{times['many']:.0f}{mark[many]}", case.file / best / 1e6,
            case.flops / best / 1e6, times["bf16"], times["bf16"] / best, times["torch bf16"]]


def measure_back(case, rounds):
    worst = case.check_back()
    compact = [dy[case.index] for dy in case.dy]
    times = time_all({"torch bf16": lambda i: torch._grouped_mm(
                          compact[i % case.sets], case.weights[i % case.sets], case.ends),
                      "bf16": case.back(0, case.cells),
                      "packed": case.back(case.fmt.packing, case.packed_cells)},
                     case.sets, rounds)
    own = times["packed"]
    print(f"{case.name:26s} {case.fmt.name:8s} back {own:8.1f} us {case.flops / own / 1e6:6.0f} "
          f"TF | bf16 {times['bf16']:8.1f} us x{times['bf16'] / own:.2f} | torch bf16 "
          f"{times['torch bf16']:8.1f} us | sets {case.sets} error {worst:.1e}", flush=True)
    return [case.name, case.fmt.name, own, case.flops / own / 1e6, times["bf16"],
            times["bf16"] / own, times["torch bf16"]]


FORWARD = ("experts x rows, K -> N", "format", "few, us", "many, us", "TB/s of file bytes",
           "TFLOP/s", "bf16, us", "bf16 / chosen", "torch bf16, us")
BACK = ("experts x rows, K -> N of the weights", "format", "us", "TFLOP/s", "bf16, us",
        "bf16 / packed", "torch bf16, us")


def main():
    args = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    args.add_argument("library")
    args.add_argument("--rounds", type=int, default=30)
    args.add_argument("--only", default="", help="shapes with a name that contains this")
    args.add_argument("--formats", default="fp8,mxfp4,nvfp4,int4g32,int4g128")
    args.add_argument("--back", action="store_true", help="gradients of rows")
    args.add_argument("--markdown", help="settings and table")
    args.set_defaults(sustained=0)
    args = args.parse_args()
    lib = Products(args.library)
    formats = {"fp8": ("F8E4M3", 128, 128, "SCALE_F32"), "fp8row": ("F8E4M3", 1, 0, "SCALE_F32"),
               "mxfp8": ("F8E4M3", 1, 32, "SCALE_E8M0"), "mxfp4": ("E2M1", 1, 32, "SCALE_E8M0"),
               "nvfp4": ("E2M1", 1, 16, "SCALE_E4M3"),
               "int4g32": ("INT4", 1, 32, "SCALE_BF16"),
               "int4g32z": ("INT4", 1, 32, "SCALE_BF16", True),
               "int4g128": ("INT4", 1, 128, "SCALE_F16", True)}
    head = settings(args)
    print("\n".join(head), flush=True)
    rows = []
    for name, counts, k, n in shapes():
        for short in args.formats.split(","):
            if args.only in name:
                fmt = Format(lib, short, *formats[short])
                case = PackedCase(lib, name, counts, k, n, fmt)
                rows.append((measure_back if args.back else measure)(case, args.rounds))
                del case
                torch.cuda.empty_cache()
    if args.markdown:
        names = BACK if args.back else FORWARD
        lines = ["| " + " | ".join(names) + " |", "|" + "---|" * len(names)]
        lines += ["| " + " | ".join(v if isinstance(v, str) else f"{v:.2f}" if v < 100 else
                                    f"{v:.0f}" for v in row) + " |" for row in rows]
        with open(args.markdown, "w", encoding="utf-8") as f:
            f.write("\n".join(head) + "\n\n" + "\n".join(lines) + "\n")


if __name__ == "__main__":
    try:
        main()
    except Refused as error:
        sys.exit(str(error))
