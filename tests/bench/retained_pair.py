# SPDX-License-Identifier: Apache-2.0
"""Cost of a retained Forward and its Backward, and of a stateless pair, through real daemons.

Usage: retained_pair.py BUILD_DIRECTORY [PAIRS [TOKENS [WORKERS]]]     TOKENS and WORKERS: lists
256,1024

Makes a layer of 16 experts of 2048 x 768, top-8, in a temporary folder. Each line alternates three
kinds of pairs, so that other load of the machine affects them equally:

  stateless         Backward brings x and ids
  retained, x only  the group has --retained-device-bytes 0
  retained          activations stay on the device

Prints medians: processor time of all workers per call, and the client's latency. It fails if the
gradients of two kinds differ in a bit, or if Backward does not use the retained pass. (GPUs other
than Hopper retain nothing.) It does not judge times.
"""

import glob
import os
import subprocess
import sys
import tempfile
import time

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, os.path.join(HERE, "..", "integration"))
PAIRS = int(sys.argv.pop(2)) if len(sys.argv) > 2 else 9
TOKENS = [int(t) for t in sys.argv.pop(2).split(",")] if len(sys.argv) > 2 else [256, 1024]
WORKERS = [int(w) for w in sys.argv.pop(2).split(",")] if len(sys.argv) > 2 else [1, 2]
sys.argv.append(HERE)  # golden models, unused here

import numpy as np  # noqa: E402
import group  # noqa: E402
group.model_directory = lambda family: family  # ours are folders
import training  # noqa: E402
training.model_directory = group.model_directory
import moed  # noqa: E402


def processor_seconds(g):
    """Processor time of all threads of all workers, so far."""
    total = 0
    for worker in g.workers:
        for path in glob.glob("/proc/%d/task/*/schedstat" % worker.pid):
            try:
                with open(path) as file:
                    total += int(file.read().split()[0])
            except OSError:
                pass
    return total / 1e9


class Side:
    """A group and one kind of pairs."""

    def __init__(self, name, g, retain):
        self.name, self.g, self.retain = name, g, retain
        self.client = moed.Client(g.endpoints[-1])
        self.batch, self.times = 0, []

    def timed(self, call):
        cpu, wall = processor_seconds(self.g), time.perf_counter()
        answer = call()
        wall = time.perf_counter() - wall
        return answer, processor_seconds(self.g) - cpu, wall

    def pair(self, x, dy, keep):
        self.batch += 1
        name = ("pair", self.batch)
        routing, forward_cpu, forward_wall = self.timed(lambda: self.client.forward(
            0, x, return_routing=True, retain=name if self.retain else None))
        sent = {} if self.retain else {"x": x, "topk_ids": routing.topk_ids}
        answer, backward_cpu, backward_wall = self.timed(lambda: self.client.backward(
            0, dy, session=name[0], micro_batch_id=name[1], retained=self.retain, **sent))
        expected = self.retain, self.name == "retained"
        if (answer.used_retained, answer.used_activations) != expected:
            raise RuntimeError("%s: %s" % (self.name, answer))
        if keep:
            self.times.append((forward_cpu, backward_cpu, forward_wall, backward_wall))
        return answer.dx


def measure(model, workers, tokens, dtype):
    common = ("--max-tokens-per-step", str(tokens), "--wait-budget-ms", "60000")
    patient = {"lease_ms": 30000}
    rng = np.random.default_rng(1)
    x, dy = (rng.standard_normal((tokens, 2048), dtype=np.float32) for _ in range(2))
    if dtype == "bf16":
        x, dy = (moed.bf16(a) for a in (x, dy))
    with training.training_group(
            model, workers, *common, **patient) as kept, training.training_group(
            model, workers, "--retained-device-bytes", "0", *common, **patient) as bare:
        sides = [Side("stateless", kept, False), Side("retained, x only", bare, True),
                 Side("retained", kept, True)]
        sides[2].batch = 1 << 32  # a session's ids are not used twice
        for i in range(PAIRS + 1):
            results = [side.pair(x, dy, i > 0).tobytes() for side in sides]
            if len(set(results)) != 1:
                raise RuntimeError("gradients differ")
        base = None
        for side in sides:
            fc, bc, fw, bw = (1e3 * float(np.median(column)) for column in zip(*side.times))
            base = base or (fc + bc, fw + bw)
            print("%d  %5d  %-4s  %-13s  %7.1f  %7.1f  %5.2f  %5.2f   %7.1f  %7.1f  %5.2f" % (
                workers, tokens, dtype, side.name, fc, bc, bc / fc, (fc + bc) / base[0], fw, bw,
                (fw + bw) / base[1]), flush=True)
            side.client.close()


if __name__ == "__main__":
    print("milliseconds: processor time of forward, backward, their ratio, pair / stateless pair; "
          "client's latency of both, pair / stateless")
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run([sys.executable, os.path.join(HERE, "make_model.py"), "qwen3-30b", folder,
                        "--experts", "16"], check=True, stdout=subprocess.DEVNULL)
        for each in WORKERS:
            for count in TOKENS:
                # A GPU retains only products of its tensor cores.
                for kind in ("f32", "bf16") if group.BACKEND == "cpu" else ("bf16",):
                    measure(folder, each, count, kind)
