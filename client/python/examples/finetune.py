# SPDX-License-Identifier: Apache-2.0
"""Fine-tunes a tiny model with an MoE layer on moed's workers.

    python finetune.py --endpoint 127.0.0.1:7600 [--steps 200] [--dtype bf16] [--plot loss.png]

The workers must train (--training adamw). Without --endpoint the program starts a group with
`moectl up` for --model and ends it afterwards. Needs torch, and matplotlib for --plot.

The model: an embedding, the remote MoE layer with a residual, a norm and a linear head. It learns
to predict the next token. A random permutation determines it, except that one token in twenty is
random. The floor of the loss is the entropy of this noise.

The example only shows a remote layer and its optimizer among local ones. It saves and resumes
nothing; for that see client/README.md, "A training that can be resumed".
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
    """Starts a local group that trains; yields its endpoint; ends it."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that `finally` ends the group
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
        sys.exit("cannot run %s (give its path with --moectl): %s" % (moectl, error.strerror))
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
    """Returns the loss of every step."""
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
    """matplotlib.pyplot without a display."""
    try:
        import matplotlib
    except ImportError as error:
        sys.exit("--plot needs matplotlib: %s" % error)

    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot


def check_plot(path):
    """Fails before the training if the plot cannot be written after it."""
    canvas()
    folder = os.path.dirname(os.path.abspath(path))
    if not os.path.isdir(folder) or not os.access(folder, os.W_OK):
        sys.exit("--plot: %s does not exist or is not writable" % folder)
    if os.path.isdir(path) or not os.path.splitext(path)[1]:
        sys.exit("--plot needs the name of a picture file, such as loss.png, not %s" % path)


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
    parser.add_argument("--endpoint", help="HOST:PORT of a worker; without it a group is started")
    parser.add_argument("--model", help="model directory of the group to start")
    parser.add_argument("--workers", type=int, default=2,
                        help="workers of the group to start (default 2)")
    parser.add_argument("--moectl", default="moectl", help="path of moectl (default: in PATH)")
    parser.add_argument("--layer", type=int, help="layer index in the model (default: the first)")
    parser.add_argument("--steps", type=int, default=200, help="optimizer steps (default 200)")
    parser.add_argument("--rows", type=int, default=256, help="tokens per step (default 256)")
    parser.add_argument("--lr", type=float, default=3e-3, help="learning rate (default 0.003)")
    parser.add_argument("--dtype", choices=("f32", "bf16"), default="f32",
                        help="dtype of the layer's input and output (default f32)")
    parser.add_argument("--retain", action="store_true",
                        help="the workers retain x and their activations until backward")
    parser.add_argument("--remote-only", action="store_true",
                        help="only the remote layer learns, not embedding and head")
    parser.add_argument("--seed", type=int, default=0, help="random seed (default 0)")
    parser.add_argument("--plot", help="write the loss curve to this file, for example loss.png")
    options = parser.parse_args()
    if (options.endpoint is None) == (options.model is None):
        parser.error("give either --endpoint or --model")
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
