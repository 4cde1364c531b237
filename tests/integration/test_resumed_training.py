# SPDX-License-Identifier: Apache-2.0
"""The training loop of client/README.md, unchanged, on real daemons: undisturbed, with the loss of
a worker, and restarted on another group. Needs torch."""

import os
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import unittest

from group import BUILD, main, names_in
import moed
from training import training_group

try:
    import torch
    import moed.torch
except ImportError:
    torch = None

FAMILY = "qwen3_moe"
README = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..", "client", "README.md")
LORA = ("--lora-rank", "8", "--lora-alpha", "16", "--lora-targets", "gate,up,down",
        "--freeze", "router,shared")


def snippet(first_line):
    """The Python block of the README that begins with that line."""
    with open(README) as file:
        blocks = re.findall(r"```python\n(.*?)```", file.read(), re.DOTALL)
    return next(block for block in blocks if block.startswith(first_line + "\n"))


@unittest.skipUnless(torch, "torch is not installed")
class ResumedTraining(unittest.TestCase):
    def setUp(self):
        self.folder = tempfile.mkdtemp(prefix="moed-resume-")
        self.addCleanup(shutil.rmtree, self.folder, ignore_errors=True)
        self.script = self.make("train.py")
        with open(self.script, "w") as file:
            file.write(snippet("# train.py"))

    def make(self, *names):
        return os.path.join(self.folder, *names)

    def directories(self, name):
        """The directories of the workers' checkpoints and of the local halves."""
        for kind in ("ckpt", "local"):
            os.makedirs(self.make(name, kind), exist_ok=True)
        return self.make(name, "ckpt"), self.make(name, "local")

    def start(self, endpoint, local):
        return subprocess.Popen([sys.executable, self.script, endpoint, local],
                                stdout=subprocess.PIPE, text=True,
                                env=dict(os.environ, PYTHONPATH=os.path.join(BUILD, "python")))

    def finish(self, process):
        output, _ = process.communicate(timeout=120)
        print("    " + output.replace("\n", "\n    "))
        self.assertEqual(process.returncode, 0)
        return output

    def undisturbed(self):
        root, local = self.directories("undisturbed")
        with training_group(FAMILY, 2, "--training-dir", root, *LORA) as g:
            output = self.finish(self.start(g.endpoints[0], local))
            with moed.Client(g.endpoints[0]) as client:
                steps = client.train_state().steps
        self.assertEqual(steps, 30)
        self.assertIn("adapter_config.json", os.listdir(os.path.join(root, "adapter-30")))
        # `keep` in force: three of the four checkpoints
        self.assertEqual(names_in(root), ["adapter-30", "step-10", "step-20", "step-30"])
        losses = [float(x) for x in re.findall(r"loss ([0-9.]+)", output)]
        self.assertLess(losses[-1], losses[0])
        return losses[-1]

    def test_the_loop_learns_the_same_after_a_lost_worker_and_on_another_group(self):
        want = self.undisturbed()
        root, local = self.directories("disturbed")
        extra = ("--training-dir", root, *LORA)
        with training_group(FAMILY, 2, *extra) as g:
            process = self.start(g.endpoints[0], local)
            self.assertIn("step 10 ", process.stdout.readline())
            g.kill_worker(1)
            g.start_worker(1)
            self.assertIn("went back to step 10\n", process.stdout.readline())
            self.assertIn("step 20 ", process.stdout.readline())
            process.kill()  # the trainer, some time after its second checkpoint
            process.communicate()
        with training_group(FAMILY, 1, *extra) as g:  # a new group of another size
            output = self.finish(self.start(g.endpoints[0], local))
        self.assertNotIn("step 20 ", output)
        got = float(re.findall(r"step 30  loss ([0-9.]+)", output)[0])
        print("    loss %.6f, undisturbed %.6f" % (got, want))
        self.assertAlmostEqual(got, want, delta=2e-5)  # sums of one worker and of two

    def test_a_save_runs_during_training(self):
        root, _ = self.directories("background")
        with training_group(FAMILY, 1, "--training-dir", root) as g:
            with moed.Client(g.endpoints[0]) as client:
                moe = moed.torch.RemoteMoE(client.layers[0], client)
                remote = moed.torch.RemoteOptimizer([moe], lr=1e-3)
                names = {"moed": moed, "client": client}
                exec(snippet("# saving during training"), names)
                x = torch.randn(16, moe.layer.hidden)

                def step():
                    moe(x).square().sum().backward()
                    remote.step()

                step()
                for i in range(3):
                    thread = names["save_in_background"]("during-%d" % i)
                    self.assertIsInstance(thread, threading.Thread)
                    step()
                    thread.join()
                listed = client.list_checkpoints()
        print("    steps %s" % [c.steps for c in listed])
        self.assertEqual([(c.name, c.steps) for c in listed],
                         [("during-2", 3), ("during-1", 2), ("during-0", 1)])


if __name__ == "__main__":
    main()
