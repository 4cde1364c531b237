#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The same MoE layers as moe_bench with torch: NCCL all-to-all and torch._grouped_mm, bf16.

One process per GPU, with the shapes, the split of experts and the kind of inputs of moe_bench.
Every result is compared with a dense fp32 computation of sampled tokens. Two methods move rows,
since either may be faster:

  per-choice  one row per (token, expert), as in most frameworks
  per-rank    one row per (token, rank) with its ids and weights, expanded and summed there,
              as in moed

Both exchange counts or routing first and read sizes on the host, because all_to_all_single needs
them there. `layer` is the time between events around each call, calls back to back, median of the
slowest rank; `gemm` is the same for the products alone (both grouped ones and the shared expert).

    torch_baseline.py [--gpus 2] [--shapes LIST] [--tokens LIST] [--repeats 50] [--json FILE]
                      [--moed FILE]     JSON of moe_bench from the same machine: prints ratios
"""
import argparse
import json
import os
import sys

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F

SHAPES = {
    "deepseek-v3": dict(hidden=7168, inner=2048, experts=256, top_k=8, shared=2048, groups=8,
                        topk_group=4, scale=2.5),
    "qwen3-30b": dict(hidden=2048, inner=768, experts=128, top_k=8, shared=0, groups=1),
    "mixtral-8x7b": dict(hidden=4096, inner=14336, experts=8, top_k=2, shared=0, groups=1),
}
BF16 = torch.bfloat16
WARM_UP = 10
SAMPLES = 2  # checked tokens
TOLERANCE = 1.5e-2


def random_weight(rows, columns, seed):
    """Uniform in +-1/32, as in moe_bench."""
    g = torch.Generator(device="cuda").manual_seed(seed)
    w = torch.empty(rows, columns, device="cuda", dtype=BF16)
    return w.uniform_(-1 / 32, 1 / 32, generator=g)


def gated(both):
    half = both.shape[-1] // 2
    return F.silu(both[..., :half]).mul_(both[..., half:])


def inverse(order):
    """The permutation that undoes `order`."""
    back = torch.empty_like(order)
    back[order] = torch.arange(len(order), device="cuda")
    return back


class Layer:
    """One rank's part of the layer; gate and up are one matrix."""

    def __init__(self, shape, rank, world):
        self.__dict__.update(shape)
        self.rank, self.world, self.local = rank, world, shape["experts"] // world
        self.router = random_weight(self.experts, self.hidden, 1)
        self.bias = torch.zeros(self.experts, device="cuda")
        self.gate_up = torch.stack([self.expert(e)[0] for e in self.mine()])
        self.down = torch.stack([self.expert(e)[1] for e in self.mine()])
        if self.shared:
            self.shared_gate_up = random_weight(2 * self.shared, self.hidden, 2)
            self.shared_down = random_weight(self.hidden, self.shared, 3)

    def mine(self):
        return range(self.rank * self.local, (self.rank + 1) * self.local)

    def expert(self, e):
        return (random_weight(2 * self.inner, self.hidden, 1000 + 2 * e),
                random_weight(self.hidden, self.inner, 1001 + 2 * e))

    # ------------------------------------------------------------------ steps

    def route(self, x):
        """ids [T,K] int64 and weights [T,K] f32."""
        logits = torch.mm(x, self.router.t(), out_dtype=torch.float32)
        if self.groups == 1:
            top, ids = logits.topk(self.top_k, dim=-1)
            return ids, top.softmax(-1)  # softmax over all, renormalised over the chosen
        scores = logits.sigmoid()
        keys = scores + self.bias
        best = keys.view(-1, self.groups, self.experts // self.groups).topk(2, dim=-1)[0].sum(-1)
        keep = best.topk(self.topk_group, dim=-1)[1]
        mask = torch.zeros_like(best, dtype=torch.bool).scatter_(1, keep, True)
        mask = mask.repeat_interleave(self.experts // self.groups, dim=1)
        ids = keys.masked_fill_(~mask, float("-inf")).topk(self.top_k, dim=-1)[1]
        weights = scores.gather(1, ids)
        return ids, weights / weights.sum(-1, keepdim=True) * self.scale

    def experts_of(self, rows, ends):
        if len(rows) == 0:
            return rows
        both = torch._grouped_mm(rows, self.gate_up.transpose(1, 2), ends)
        return torch._grouped_mm(gated(both), self.down.transpose(1, 2), ends)

    def shared_of(self, x):
        return F.linear(gated(F.linear(x, self.shared_gate_up)), self.shared_down)

    def exchange_counts(self, counts):
        """From counts [world, n] of rows for each rank: the incoming counts, and both sums on the
        host."""
        came = torch.empty_like(counts)
        dist.all_to_all_single(came, counts)
        out_split, in_split = torch.stack([counts.sum(1), came.sum(1)]).tolist()
        return came, out_split, in_split

    def per_choice(self, x):
        ids, weights = self.route(x)
        flat = ids.flatten()
        order = flat.argsort(stable=True)
        counts = torch.bincount(flat, minlength=self.experts).view(self.world, self.local)
        came, out_split, in_split = self.exchange_counts(counts)
        rows = x.new_empty(sum(in_split), self.hidden)
        dist.all_to_all_single(rows, x[order // self.top_k], in_split, out_split)
        # Incoming rows are ordered by (source, expert): sort by expert, and undo it afterwards.
        expert = torch.arange(self.local, device="cuda").repeat(self.world).repeat_interleave(
            came.flatten(), output_size=len(rows))
        major = expert.argsort(stable=True)
        ends = came.sum(0).cumsum(0).int()
        y = torch.empty_like(rows)
        y[major] = self.experts_of(rows[major], ends)
        home = x.new_empty(len(flat), self.hidden)
        dist.all_to_all_single(home, y, out_split, in_split)
        chosen = home[inverse(order)].view(-1, self.top_k, self.hidden)
        out = torch.bmm(weights.to(BF16).unsqueeze(1), chosen).squeeze(1)
        return out.add_(self.shared_of(x)) if self.shared else out

    def per_rank(self, x):
        ids, weights = self.route(x)
        # Every rank gets every rank's routing, which determines all counts: one small collective
        # and one wait of the host, as with an exchange of counts.
        note = torch.cat([ids.int().view(torch.float32), weights], 1)
        notes = note.new_empty(self.world * len(x), 2 * self.top_k)
        dist.all_gather_into_tensor(notes, note)
        expert = notes[:, :self.top_k].contiguous().view(torch.int32) - self.rank * self.local
        expert = expert.masked_fill_((expert < 0) | (expert >= self.local), self.local)
        here = expert < self.local
        comes = here.any(1)
        wanted = torch.zeros(self.world, len(x), dtype=torch.bool, device="cuda")
        wanted.scatter_(0, (ids // self.local).t(), True)
        host = torch.cat([wanted.sum(1), comes.view(self.world, -1).sum(1),
                          here.sum().unsqueeze(0)]).tolist()
        out_split, in_split = host[:self.world], host[self.world:-1]
        n_out, n_in, pairs = sum(out_split), sum(in_split), host[-1]
        token = torch.nonzero_static(wanted, size=n_out)[:, 1]
        rows = x.new_empty(n_in, self.hidden)
        dist.all_to_all_single(rows, x[token], in_split, out_split)
        # Expand: choices of other ranks sort after the last expert. One of them stays, as a row of
        # zeros for all of them.
        kept = torch.nonzero_static(comes, size=n_in).squeeze(1)
        flat = expert[kept].flatten()
        order = flat.argsort(stable=True)
        ends = torch.bincount(flat, minlength=self.local + 1)[:self.local].cumsum(0).int()
        source = F.pad(order[:pairs] // self.top_k, (0, 1))
        y = self.experts_of(rows[source] if n_in else rows.new_zeros(1, self.hidden), ends)
        y[-1].zero_()
        w = notes[kept, self.top_k:].to(BF16).unsqueeze(1)
        chosen = y[inverse(order).clamp_(max=pairs)].view(-1, self.top_k, self.hidden)
        partial = torch.bmm(w, chosen).squeeze(1)
        home = x.new_empty(n_out + 1, self.hidden)
        dist.all_to_all_single(home[:n_out], partial, out_split, in_split)
        home[-1].zero_()
        place = (wanted.flatten().cumsum(0) - 1).view_as(wanted).masked_fill_(~wanted, n_out)
        out = home[place].sum(0)
        return out.add_(self.shared_of(x)) if self.shared else out

    # ------------------------------------------------------------------ check

    def dense(self, x):
        """y of a few tokens in fp32, from all experts' weights, generated again."""
        ids, weights = self.route(x)
        out = torch.zeros(len(x), self.hidden, device="cuda")
        for t in range(len(x)):
            row = x[t].float()
            for e, w in zip(ids[t].tolist(), weights[t]):
                gate_up, down = self.expert(e)
                both = gate_up.float() @ row
                out[t] += w * (down.float() @ gated(both))
            if self.shared:
                both = self.shared_gate_up.float() @ row
                out[t] += self.shared_down.float() @ gated(both)
        return out

    def gemm_only(self, x):
        """Only the products of this layer, on the rows of its routing."""
        ids, _ = self.route(x)
        counts = torch.bincount(ids.flatten(), minlength=self.experts)
        came, _, in_split = self.exchange_counts(counts.view(self.world, self.local))
        rows = torch.randn(sum(in_split), self.hidden, device="cuda", dtype=BF16)
        ends = came.sum(0).cumsum(0).int()

        def run():
            self.experts_of(rows, ends)
            if self.shared:
                self.shared_of(x)
        return run


def time_calls(run, repeats):
    """Median microseconds between events around each call, calls back to back, slowest rank."""
    for _ in range(WARM_UP):
        run()
    dist.barrier()
    torch.cuda.synchronize()
    events = [torch.cuda.Event(enable_timing=True) for _ in range(repeats + 1)]
    events[0].record()
    for event in events[1:]:
        run()
        event.record()
    torch.cuda.synchronize()
    times = sorted(a.elapsed_time(b) * 1e3 for a, b in zip(events, events[1:]))
    slowest = torch.tensor(times[repeats // 2], device="cuda")
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    return slowest.item()


def check(layer, way, x):
    """Relative error of sampled tokens. If it is too large on any rank, all ranks stop."""
    picked = torch.linspace(0, len(x) - 1, min(SAMPLES, len(x))).long().cuda()
    want = layer.dense(x[picked])
    got = way(x)[picked].float()
    error = ((got - want).norm() / want.norm()).nan_to_num(nan=9.0)
    dist.all_reduce(error, op=dist.ReduceOp.MAX)
    return error.item()


def measure(layer, name, tokens, args, out):
    torch.manual_seed(tokens * 31 + layer.rank)
    x = torch.empty(tokens, layer.hidden, device="cuda", dtype=BF16).uniform_(-1, 1)
    record = {"who": "torch", "shape": name, "tokens": tokens, "slots": layer.world,
              "experts": layer.experts, "repeats": args.repeats}
    for label, way in (("per_choice", layer.per_choice), ("per_rank", layer.per_rank)):
        before = check(layer, way, x)
        record[label + "_us"] = time_calls(lambda: way(x), args.repeats)
        after = check(layer, way, x)
        record[label + "_error"] = max(before, after)
        if not max(before, after) <= TOLERANCE:
            sys.exit(f"WRONG: torch {name} {tokens} {label}: error {before:.2e}, {after:.2e}")
    record["gemm_us"] = time_calls(layer.gemm_only(x), args.repeats)
    record["layer_us"] = min(record["per_choice_us"], record["per_rank_us"])
    if layer.rank == 0:
        print(f"{name:13s} T {tokens:5d}: per choice {record['per_choice_us']:9.1f} us, per rank "
              f"{record['per_rank_us']:9.1f} us, products {record['gemm_us']:9.1f} us, error "
              f"{max(record['per_choice_error'], record['per_rank_error']):.1e}", flush=True)
        out.append(record)


def worker(rank, args):
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(args.port), RANK=str(rank),
                      WORLD_SIZE=str(args.gpus))
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", device_id=torch.device("cuda", rank))
    records = []
    with torch.inference_mode():
        for name in args.shapes:
            shape = dict(SHAPES[name])
            if args.experts:
                shape["experts"] = args.experts
            elif args.like_gpus:
                shape["experts"] = shape["experts"] * args.gpus // args.like_gpus
            layer = Layer(shape, rank, args.gpus)
            for tokens in args.tokens:
                measure(layer, name, tokens, args, records)
            del layer
            torch.cuda.empty_cache()
    if rank == 0:
        if args.json:
            with open(args.json, "a", encoding="utf-8") as f:
                f.writelines(json.dumps(r) + "\n" for r in records)
        if args.moed:
            compare(records, args.moed)
    dist.barrier()
    dist.destroy_process_group()


def compare(records, path):
    """Ratios against moe_bench's figures for the router's own routing."""
    with open(path, encoding="utf-8") as f:
        ours = {(r["shape"], r["experts"], r["tokens"]): r
                for r in map(json.loads, f) if r["who"] == "moed" and r["routing"] == "router"}
    print("\nshape          T     torch us (best)  products | moed us   wall  overhead | torch / "
          "moed  torch / moed's wall")
    for r in records:
        o = ours.get((r["shape"], r["experts"], r["tokens"]))
        if o is None:
            continue
        print(f"{r['shape']:13s} {r['tokens']:5d} {r['layer_us']:12.1f} {r['gemm_us']:13.1f} | "
              f"{o['layer_us']:9.1f} {o['wall_us']:9.1f} {o['overhead']:6.3f} | "
              f"{r['layer_us'] / o['layer_us']:6.2f} {r['layer_us'] / o['wall_us']:6.2f}")


def names(text):
    return text.split(",")


def numbers(text):
    return [int(n) for n in text.split(",")]


def main():
    p = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    p.add_argument("--gpus", type=int, default=2)
    p.add_argument("--shapes", type=names, default=list(SHAPES))
    p.add_argument("--experts", type=int, default=0, help="instead of the preset's")
    p.add_argument("--like-gpus", type=int, default=0,
                   help="as many experts per GPU as that many GPUs would have")
    p.add_argument("--tokens", type=numbers, default=[1, 32, 128, 512, 4096])
    p.add_argument("--repeats", type=int, default=50)
    p.add_argument("--json", help="appends one object a line")
    p.add_argument("--moed", help="JSON of moe_bench to compare with")
    p.add_argument("--port", type=int, default=29531)
    args = p.parse_args()
    print(f"torch {torch.__version__}, CUDA {torch.version.cuda}, NCCL "
          f"{'.'.join(map(str, torch.cuda.nccl.version()))}, {args.gpus} x "
          f"{torch.cuda.get_device_name()}", flush=True)
    mp.spawn(worker, (args,), nprocs=args.gpus)


if __name__ == "__main__":
    main()
