# SPDX-License-Identifier: Apache-2.0
"""Fine-tunes a tiny model whose MoE layer lives on moed's workers.

    python finetune.py --endpoint 127.0.0.1:7600 [--steps 200] [--dtype bf16] [--plot loss.png]

The workers must train (--training adamw); without --endpoint this starts a group of its own by
`moectl up`, on --model, and ends it afterwards. Needs torch, and matplotlib for --plot.

The model: an embedding, the remote MoE layer with a residual, a norm and a linear head. It learns
to name the token that follows another: a random permutation says which, but for one time in twenty,
when it is any token. The floor of the loss is the entropy of that disturbance.

It shows a remote layer and its optimizer among local ones, and nothing more: it saves nothing and
resumes nothing. client/README.md, "A training that can be resumed", has a loop that does.
"""

import argparse
import contextlib
import math
import os
import shutil
import signal
import subprocess
import sys
import tempfile

import torch

import moed
import moed.torch

TOKENS, NOISE = 64, 0.05


@contextlib.contextmanager
def own_group(model, workers, moectl):
    """The endpoint of a local group that trains, for as long as the context lasts."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # as any other end: the group goes too
    folder = tempfile.mkdtemp(prefix="moed-finetune-")
    config = os.path.join(folder, "train.conf")
    with open(config, "w") as file:
        file.write("training = adamw\n")
    try:
        process = subprocess.Popen(
            [moectl, "up", "--model", model, "--workers", str(workers), "--worker-config", config,
             "--port", "0", "--state-dir", os.path.join(folder, "state")],
            stdout=subprocess.PIPE, text=True)
    except OSError as error:
        shutil.rmtree(folder, ignore_errors=True)
        sys.exit("cannot run %s (--moectl says where it is): %s" % (moectl, error.strerror))
    try:
        endpoint = process.stdout.readline().strip()
        if not endpoint:
            sys.exit("moectl up failed")
        yield endpoint
    finally:
        process.send_signal(signal.SIGINT)
        process.wait()
        process.stdout.close()
        shutil.rmtree(folder, ignore_errors=True)


class TinyModel(torch.nn.Module):
    def __init__(self, client, layer, retain, dtype):
        super().__init__()
        hidden = client.find_layer(layer).hidden
        self.dtype = dtype
        self.embedding = torch.nn.Embedding(TOKENS, hidden)
        self.moe = moed.torch.RemoteMoE(layer, client, retain=retain,
                                        aux_coeff=0.01)
        self.norm = torch.nn.LayerNorm(hidden)
        self.head = torch.nn.Linear(hidden, TOKENS)

    def forward(self, tokens):
        x = self.embedding(tokens)
        x = x + self.moe(x.to(self.dtype)).to(x.dtype)
        return self.head(self.norm(x))


def batches(rows, generator):
    """Endless (tokens, next tokens), [rows] each."""
    permutation = torch.randperm(TOKENS, generator=generator)
    while True:
        tokens = torch.randint(TOKENS, (rows,), generator=generator)
        noise = torch.rand(rows, generator=generator) < NOISE
        other = torch.randint(TOKENS, (rows,), generator=generator)
        yield tokens, torch.where(noise, other, permutation[tokens])


def floor():
    """Entropy of the next token, in nats."""
    wrong = NOISE / TOKENS
    right = 1 - NOISE + wrong
    return -right * math.log(right) - (TOKENS - 1) * wrong * math.log(wrong)


def train(client, options):
    """The loss of every step."""
    torch.manual_seed(options.seed)
    generator = torch.Generator().manual_seed(options.seed)
    dtype = {"f32": torch.float32, "bf16": torch.bfloat16}[options.dtype]
    layer = client.layers[0] if options.layer is None else options.layer
    model = TinyModel(client, layer, options.retain, dtype)
    remote = moed.torch.RemoteOptimizer([model.moe], lr=options.lr, weight_decay=0.01,
                                        max_grad_norm=1.0)
    local = torch.optim.AdamW(model.parameters(), lr=options.lr)
    optimizers = (remote,) if options.remote_only else (remote, local)
    losses = []
    for step, (tokens, wanted) in enumerate(batches(options.rows, generator)):
        loss = torch.nn.functional.cross_entropy(model(tokens), wanted)
        losses.append(loss.item())
        if step == options.steps:
            return losses
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        if step % 20 == 0:
            print("step %4d  loss %.4f  gradient norm of the layer %.3f  weights version %d" % (
                step, losses[-1], remote.last.grad_norm, remote.last.weights_version))


def canvas():
    """matplotlib.pyplot, for files alone."""
    try:
        import matplotlib
    except ImportError as error:
        sys.exit("--plot needs matplotlib: %s" % error)

    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot


def check_plot(path):
    """What would fail is better told before training than after it."""
    canvas()
    folder = os.path.dirname(os.path.abspath(path))
    if not os.path.isdir(folder) or not os.access(folder, os.W_OK):
        sys.exit("--plot: %s does not exist or cannot be written into" % folder)
    if os.path.isdir(path) or not os.path.splitext(path)[1]:
        sys.exit("--plot wants the name of a picture, such as loss.png, not %s" % path)


def plot(losses, options, client):
    pyplot = canvas()
    figure, axes = pyplot.subplots(figsize=(7, 4), layout="constrained")
    axes.plot(losses, linewidth=1.5, label="training loss")
    axes.axhline(floor(), color="grey", linestyle="--", linewidth=1,
                 label="floor: entropy of the task")
    axes.set(xlabel="step", ylabel="cross entropy (nats)", ylim=(0, None),
             title="%s, layer on %d remote workers, %s" % (
                 client.info.model, len(client.info.workers), options.dtype))
    axes.legend()
    axes.grid(alpha=0.3)
    figure.savefig(options.plot, dpi=120)


def main():
    parser = argparse.ArgumentParser(description="Fine-tunes a tiny model with a remote MoE layer.")
    parser.add_argument("--endpoint", help="of a worker; else a group is started")
    parser.add_argument("--model", help="model directory of the group that is started")
    parser.add_argument("--workers", type=int, default=2, help="of the group that is started")
    parser.add_argument("--moectl", default="moectl", help="the program that starts it")
    parser.add_argument("--layer", type=int, help="its index in the model; else the first")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--rows", type=int, default=256, help="tokens of a step")
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--dtype", choices=("f32", "bf16"), default="f32",
                        help="of what travels to the layer and back")
    parser.add_argument("--retain", action="store_true",
                        help="the workers retain x and their activations until backward")
    parser.add_argument("--remote-only", action="store_true",
                        help="embedding and head stay as they are: only the remote layer learns")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--plot", help="write the loss curve to this PNG")
    options = parser.parse_args()
    if (options.endpoint is None) == (options.model is None):
        parser.error("one of --endpoint and --model is needed")
    if options.plot:
        check_plot(options.plot)
    with contextlib.ExitStack() as stack:
        endpoint = options.endpoint or stack.enter_context(
            own_group(options.model, options.workers, options.moectl))
        client = stack.enter_context(moed.Client(endpoint))
        losses = train(client, options)
        if options.plot:
            plot(losses, options, client)
    print("loss: first %.4f, last %.4f (floor %.4f)" % (losses[0], losses[-1], floor()))


if __name__ == "__main__":
    main()
