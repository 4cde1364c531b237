#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Grouped products in W8A8 against torch's FP8 and this project's bf16, in one process on a GPU.

Loads the library of the target `ggemm_shared`. Rows are bf16 and quantised before the product, with
a scale for each 128 columns; weights have one for 128 x 128. torch._scaled_grouped_mm has one scale
for a row and one for a column of the result, and needs rows that are quantised already. Each case
is checked first, against the quantised rows' values in double precision for sampled experts.
"gated" is gate and up of half as many columns each, to quantised hidden rows.

    w8a8_vs_torch.py path/to/libmoe_ggemm.so [--rounds 30] [--only TEXT] [--sustained SECONDS]
                     [--markdown FILE]
"""
import argparse
import sys

import torch

from ggemm_binding import Products, Refused
from ggemm_vs_torch import routed, settings, sustain, time_all
from packed_vs_bf16 import Format, PackedCase

E4M3 = torch.float8_e4m3fn


class W8A8Case(PackedCase):
    def __init__(self, lib, name, counts, k, n, fmt):
        super().__init__(lib, name, counts, k, n, fmt)
        room = self.lib.quantised_bytes(rows=self.capacity, columns=k)
        self.bf16 = self.x
        self.x = [torch.full((room,), 255, dtype=torch.uint8, device="cuda") for _ in self.bf16]
        for i in range(self.sets):
            self.quantise(i)
        self.fp8 = [self.fp8_of(i) for i in range(self.sets)]

    def quantise(self, i):
        s = i % self.sets
        self.lib.quantise(dtype=self.lib.constant("BF16"), x=self.bf16[s].data_ptr(), weight=None,
                          experts=self.experts, row_capacity=self.capacity, columns=self.k,
                          start=self.start.data_ptr(), count=self.count.data_ptr(),
                          whole_rows=False, pow2=False, quantised=self.x[s].data_ptr(), row_bytes=0,
                          values=None, began=None, processors=0,
                          stream=torch.cuda.current_stream().cuda_stream)

    def expected(self, rows, values):
        at = self.lib.quantised_offset(rows=self.capacity, columns=self.k)
        codes = self.x[0][:self.capacity * self.k].view(E4M3).view(self.capacity, self.k)[rows]
        scales = self.x[0][at:].view(torch.float32).view(-(-self.k // 128), -1)[:, rows]
        wide = scales.double().repeat_interleave(128, 0)[:self.k].t()
        return (codes.double() * wide) @ values.t()

    def gated(self):
        """Half as many columns of gate and up each, to quantised hidden rows."""
        room = self.lib.quantised_bytes(rows=self.capacity, columns=self.n // 2)
        out = torch.empty(room, dtype=torch.uint8, device="cuda")
        tasks = [self.plain(tile=0, packing=self.fmt.packing, gated=True, n=self.n // 2,
                            x=self.x[i].data_ptr(), weights=self.packed_cells[i].data_ptr(),
                            out=out.data_ptr(), out_dtype=self.lib.constant("F32"),
                            out_activations=self.lib.constant("F8")) for i in range(self.sets)]

        def run(i):
            self.lib.ggemm(**tasks[i % self.sets])
        return run

    def ours_bf16(self, tile):
        tasks = [self.plain(tile=tile, x=self.bf16[i].data_ptr(),
                            weights=self.cells[i].data_ptr()) for i in range(self.sets)]

        def run(i):
            self.lib.ggemm(**tasks[i % self.sets])
        return run

    def fp8_of(self, i):
        """What torch multiplies: rows without gaps, weights, and both kinds of scales."""
        one = {"device": "cuda", "dtype": torch.float32}
        return (self.compact[i].to(E4M3), self.weights[i].to(E4M3).transpose(1, 2),
                torch.ones(len(self.index), **one), torch.ones(self.experts, self.n, **one))

    def torch_fp8(self, i):
        x, w, by_row, by_column = self.fp8[i % self.sets]
        return torch._scaled_grouped_mm(x, w, by_row, by_column, self.ends,
                                        out_dtype=torch.bfloat16, use_fast_accum=True)


def shapes():
    """name, rows per expert, K, N"""
    yield "routed 64x512 7168->4096", routed(64, 512), 7168, 4096
    yield "routed 64x512 2048->7168", routed(64, 512), 2048, 7168
    yield "routed 32x1024 2048->1536", routed(32, 1024), 2048, 1536
    yield "routed 32x1024 768->2048", routed(32, 1024), 768, 2048
    yield "2x4096 4096->28672", [4096] * 2, 4096, 28672
    yield "2x4096 14336->4096", [4096] * 2, 14336, 4096
    yield "routed 64x128 7168->4096", routed(64, 128), 7168, 4096
    yield "routed 64x16 7168->4096", routed(64, 16), 7168, 4096
    yield "routed 64x4 7168->4096", routed(64, 4), 7168, 4096
    yield "routed 64x16 2048->7168", routed(64, 16), 2048, 7168
    yield "routed 32x32 2048->1536", routed(32, 32), 2048, 1536


def measure(case, args):
    error, _ = case.check_packed(0)
    candidates = {"ours": case.run_packed(0), "gated": case.gated(), "quantise": case.quantise,
                  "bf16": case.ours_bf16(case.chosen()), "torch fp8": case.torch_fp8}
    try:
        case.torch_fp8(0)
    except (RuntimeError, ValueError) as refusal:
        print(f"torch._scaled_grouped_mm: {str(refusal).splitlines()[0]}")
        del candidates["torch fp8"]
    times = time_all(candidates, case.sets, args.rounds)
    times.setdefault("torch fp8", float("nan"))
    ours = times["ours"]
    lasting = float("nan")
    if args.sustained:
        lasting = sustain(candidates["ours"], args.sustained)[0]
    print(f"{case.name:26s} {ours:7.1f} us {case.flops / ours / 1e6:5.0f} TF "
          f"{case.file / ours / 1e6:5.2f} TB/s, gated {times['gated']:7.1f} us, rows "
          f"{times['quantise']:6.1f} us | torch fp8 {times['torch fp8']:7.1f} us "
          f"x{times['torch fp8'] / ours:.2f} | bf16 {times['bf16']:7.1f} us "
          f"x{times['bf16'] / ours:.2f} | sustained {lasting:7.1f} us | error {error:.1e}",
          flush=True)
    return [case.name, ours, case.flops / ours / 1e6, case.file / ours / 1e6, times["gated"],
            times["quantise"], times["torch fp8"], times["torch fp8"] / ours, times["bf16"],
            times["bf16"] / ours, lasting]


def main():
    args = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    args.add_argument("library")
    args.add_argument("--rounds", type=int, default=30)
    args.add_argument("--only", default="", help="shapes with a name that contains this")
    args.add_argument("--sustained", type=float, default=0, help="seconds back to back")
    args.add_argument("--markdown", help="settings and table")
    args = args.parse_args()
    lib = Products(args.library)
    fmt = Format(lib, "w8a8", "F8E4M3", 128, 128, "SCALE_F32", activations="F8")
    head = settings(args)
    print("\n".join(head), flush=True)
    rows = []
    for name, counts, k, n in shapes():
        if args.only in name:
            rows.append(measure(W8A8Case(lib, name, counts, k, n, fmt), args))
            torch.cuda.empty_cache()
    if args.markdown:
        lines = ["| experts x rows, K -> N | ours, us | TFLOP/s | TB/s | gated, us | "
                 "quantise, us | torch fp8, us | torch / ours | bf16, us | bf16 / ours | "
                 "sustained, us |",
                 "|" + "---|" * 11]
        lines += ["| " + " | ".join(v if isinstance(v, str) else f"{v:.2f}" if v < 100 else
                                    f"{v:.0f}" for v in row) + " |" for row in rows]
        with open(args.markdown, "w", encoding="utf-8") as f:
            f.write("\n".join(head) + "\n\n" + "\n".join(lines) + "\n")


if __name__ == "__main__":
    try:
        main()
    except Refused as error:
        sys.exit(str(error))
