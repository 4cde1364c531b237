#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Reference curves: a small MoE layer trained for 100 steps by torch's AdamW.

    python3 make_curves.py [DIRECTORY]      needs torch and safetensors

Writes softmax.safetensors and sigmoid.safetensors next to itself (or into DIRECTORY): the first
weights, the tokens, the targets, the loss before each step and the weights after the last, all
float32. tests/conformance/curve.c has the same two layers and hyper-parameters and must follow.

Each layer is computed in float32 and in float64; the script fails where the two curves part, or
where two experts come so near to a tie that rounding could choose between them: such a curve would
test luck.
"""
import math
import os
import sys

import torch
import torch.nn.functional as F
from safetensors.torch import save_file

TOKENS, HIDDEN, INNER, EXPERTS, TOP_K, STEPS = 32, 16, 24, 8, 2, 100


def softmax_layer(w, x):
    """softmax over all, two chosen and renormalised; SwiGLU; a shared expert behind a gate."""
    score = F.softmax(x @ w["router"].T, dim=-1)
    s, ids = score.topk(TOP_K, dim=-1)
    weight = s / s.sum(-1, keepdim=True)
    y = torch.zeros_like(x)
    for k in range(TOP_K):
        e = ids[:, k]
        g = torch.einsum("th,tih->ti", x, w["gate"][e])
        u = torch.einsum("th,tih->ti", x, w["up"][e])
        y = y + weight[:, k, None] * torch.einsum("ti,thi->th", F.silu(g) * u, w["down"][e])
    shared = (F.silu(x @ w["shared_gate"].T) * (x @ w["shared_up"].T)) @ w["shared_down"].T
    y = y + torch.sigmoid(x @ w["gate_vector"].T) * shared
    return y, score, ids, None


def sigmoid_layer(w, x):
    """sigmoid of logits with bias, renormalised and scaled; GPT-OSS activation; biases; aux
    loss."""
    score = torch.sigmoid(x @ w["router"].T + w["logit_bias"])
    s, ids = score.topk(TOP_K, dim=-1)
    weight = 1.5 * s / (s.sum(-1, keepdim=True) + 1e-20)
    y = torch.zeros_like(x)
    for k in range(TOP_K):
        e = ids[:, k]
        g = torch.einsum("th,tih->ti", x, w["gate"][e]) + w["gate_bias"][e]
        u = torch.einsum("th,tih->ti", x, w["up"][e]) + w["up_bias"][e]
        g, u = g.clamp(max=7.0), u.clamp(-7.0, 7.0)
        h = g * torch.sigmoid(1.702 * g) * (u + 1)
        out = torch.einsum("ti,thi->th", h, w["down"][e]) + w["down_bias"][e]
        y = y + weight[:, k, None] * out
    a = score / (score.sum(-1, keepdim=True) + 1e-20)
    n = F.one_hot(ids, EXPERTS).sum((0, 1)).to(x.dtype)
    aux = 0.1 * EXPERTS / (TOP_K * TOKENS**2) * (a.sum(0) * n).sum()
    return y, score, ids, aux


SHAPES = {
    "router": (EXPERTS, HIDDEN),
    "gate": (EXPERTS, INNER, HIDDEN),
    "up": (EXPERTS, INNER, HIDDEN),
    "down": (EXPERTS, HIDDEN, INNER),
}
CURVES = {
    "softmax": dict(
        layer=softmax_layer,
        seed=1,
        shapes={
            **SHAPES,
            "shared_gate": (INNER, HIDDEN),
            "shared_up": (INNER, HIDDEN),
            "shared_down": (HIDDEN, INNER),
            "gate_vector": (1, HIDDEN),
        },
        optimizer=dict(lr=1e-3, weight_decay=0.01, betas=(0.9, 0.999), eps=1e-8),
        clip=0.05,
    ),
    "sigmoid": dict(
        layer=sigmoid_layer,
        seed=2,
        shapes={
            **SHAPES,
            "logit_bias": (EXPERTS,),
            "gate_bias": (EXPERTS, INNER),
            "up_bias": (EXPERTS, INNER),
            "down_bias": (EXPERTS, HIDDEN),
        },
        optimizer=dict(lr=2e-3, weight_decay=0.1, betas=(0.9, 0.95), eps=1e-6),
        clip=None,
    ),
}


def draw(curve, seed):
    g = torch.Generator().manual_seed(seed)
    w = {}
    for name, shape in sorted(curve["shapes"].items()):
        fan_in = shape[-1] if len(shape) > 1 and not name.endswith("bias") else 16
        w[name] = torch.randn(shape, generator=g) / math.sqrt(fan_in)
    w["router"] *= 2
    x = torch.randn(TOKENS, HIDDEN, generator=g)
    target = torch.randn(TOKENS, HIDDEN, generator=g)
    return w, x, target


def train(curve, start, x, target, dtype):
    w = {k: v.to(dtype).clone().requires_grad_() for k, v in start.items()}
    x, target = x.to(dtype), target.to(dtype)
    optimizer = torch.optim.AdamW(list(w.values()), foreach=False, **curve["optimizer"])
    losses, margin, moved = [], math.inf, 0
    last = None
    for _ in range(STEPS):
        y, score, ids, aux = curve["layer"](w, x)
        best = score.detach().sort(-1, descending=True).values
        margin = min(margin, ((best[:, TOP_K - 1] - best[:, TOP_K]) / best[:, TOP_K]).min().item())
        chosen = ids.sort(-1).values
        moved += 0 if last is None else (chosen != last).any(-1).sum().item()
        last = chosen
        loss = F.mse_loss(y, target)
        losses.append(loss.item() if aux is None else (loss + aux).item())
        optimizer.zero_grad()
        (loss if aux is None else loss + aux).backward()
        if curve["clip"] is not None:
            torch.nn.utils.clip_grad_norm_(list(w.values()), curve["clip"])
        optimizer.step()
    return torch.tensor(losses, dtype=torch.float64), w, margin, moved


def main():
    to = sys.argv[1] if len(sys.argv) > 1 else os.path.dirname(os.path.abspath(__file__))
    torch.set_num_threads(1)
    for name, curve in CURVES.items():
        for seed in range(curve["seed"], curve["seed"] + 200):
            start, x, target = draw(curve, seed)
            losses, w, margin, moved = train(curve, start, x, target, torch.float32)
            exact, *_ = train(curve, start, x, target, torch.float64)
            apart = ((losses - exact) / exact).abs().max().item()
            if margin > 2e-5 and apart < 2e-5:
                break
        else:
            sys.exit(f"{name}: no seed keeps away from ties")
        tensors = {"x": x, "target": target, "loss": losses.float()}
        tensors |= {f"first.{k}": v for k, v in start.items()}
        tensors |= {f"last.{k}": v.detach().contiguous() for k, v in w.items()}
        save_file(tensors, os.path.join(to, f"{name}.safetensors"),
                  metadata={"torch": torch.__version__, "seed": str(seed)})
        print(f"{name}: seed {seed}, loss {losses[0]:.4g} -> {losses[-1]:.4g}, {moved} choices "
              f"moved, nearest tie {margin:.1e}, float32 and float64 apart by {apart:.1e}")


main()
