# SPDX-License-Identifier: Apache-2.0
"""moed.torch: a remote layer in a loop of torch, against fake workers and a group that trains."""

import copy
import glob
import io
import os
import pickle
import re
import subprocess
import sys
import tempfile
import unittest
import unittest.mock

import numpy as np

from group import BUILD, MOECTL, main, model_directory, relative_error
from training import golden_gradients, training_group

from fake_group import HIDDEN, LAYER, STEP_TOKENS, TOP_K, fakes, unavailable

import moed

try:
    import torch
    import moed.torch
except ImportError:
    torch = None
needs_torch = unittest.skipUnless(torch, "torch is not installed")

FAMILY = "qwen3_moe"


@needs_torch
class Torch(unittest.TestCase):
    """moed.torch against the fake group."""

    def test_an_old_keyword_is_answered_by_its_new_name(self):
        with fakes() as (worker,), moed.Client(worker.endpoint) as client:
            with self.assertRaisesRegex(TypeError, "the keyword save_for_backward is now retain"):
                moed.torch.RemoteMoE(layer=LAYER, client=client, save_for_backward=True)

    def test_a_gradient_flows_through_a_remote_layer(self):
        with fakes() as (worker,), moed.Client(worker.endpoint) as client:
            for saved in (False, True):
                moe = moed.torch.RemoteMoE(LAYER, client, retain=saved)
                x = torch.randn(2, 3, HIDDEN, requires_grad=True)
                y = moe(x)
                self.assertTrue(torch.equal(y, 2 * x))
                dy = torch.randn(2, 3, HIDDEN)
                y.backward(dy)
                self.assertTrue(torch.equal(x.grad, 3 * dy))
                self.assertEqual(worker.requests[-1][1].x == b"", saved)

    def test_rows_of_another_width_are_refused(self):
        with fakes() as (worker,), moed.Client(worker.endpoint) as client:
            moe = moed.torch.RemoteMoE(LAYER, client)
            for shape in ((), (4, 2 * HIDDEN), (HIDDEN, HIDDEN + 1)):
                with self.subTest(shape=shape), self.assertRaises(ValueError):
                    moe(torch.zeros(shape))
            for wrong in (torch.zeros(2, HIDDEN, dtype=torch.float64),
                          torch.zeros(2, HIDDEN, dtype=torch.int64),
                          torch.zeros(0, HIDDEN, dtype=torch.float16), np.zeros((2, HIDDEN))):
                with self.subTest(wrong=type(wrong)), self.assertRaises(TypeError):
                    moe(wrong)
            self.assertNotIn("Forward", [name for name, m in worker.requests])

    def test_an_optimizer_of_other_modules_is_refused(self):
        with fakes() as (worker,), moed.Client(worker.endpoint) as client:
            moe = moed.torch.RemoteMoE(LAYER, client)
            for error, modules, lr in ((TypeError, [torch.nn.Linear(2, 2)], 1.0),
                                       (ValueError, [], 1.0), (ValueError, [moe], -1.0),
                                       (ValueError, [moe], float("nan"))):
                with self.subTest(modules=modules, lr=lr), self.assertRaises(error):
                    moed.torch.RemoteOptimizer(modules, lr=lr)
            for wrong in (dict(betas=(1.0, 0.9)), dict(betas=(-0.1, 0.9)), dict(betas=(0.9,)),
                          dict(eps=0.0), dict(eps=-1.0)):
                with self.subTest(wrong=wrong), self.assertRaises(ValueError):
                    moed.torch.RemoteOptimizer([moe], lr=1.0, **wrong)
            with self.assertRaisesRegex(ValueError, "momentum"):
                moed.torch.RemoteOptimizer([moe], lr=1.0, momentum=0.9)
            with self.assertRaisesRegex(ValueError, "momentum"):
                client.optimizer_step(1.0, step_id=1, optimizer="adamw", momentum=0.9)

    def test_the_first_layer_learns_though_x_does_not(self):
        with fakes() as (worker,), moed.Client(worker.endpoint) as client:
            moe = moed.torch.RemoteMoE(LAYER, client)
            moe(torch.randn(4, HIDDEN)).sum().backward()
            self.assertEqual(worker.ledger.backwards, 1)
            self.assertEqual(list(moe.state_dict()), [])
            self.assertEqual(list(moe.parameters()), [])
            with torch.no_grad():
                self.assertFalse(moe(torch.randn(4, HIDDEN)).requires_grad)

    def test_bfloat16_stays_bfloat16(self):
        with fakes() as (worker,), moed.Client(worker.endpoint) as client:
            moe = moed.torch.RemoteMoE(LAYER, client)
            x = torch.randn(4, HIDDEN).bfloat16()
            y = moe(x)
            self.assertEqual(y.dtype, torch.bfloat16)
            self.assertTrue(torch.equal(y, 2 * x))
            with self.assertRaises(TypeError):
                moe(x.half())

    def test_long_batches_are_split_and_empty_ones_not_sent(self):
        with fakes() as (worker,), moed.Client(worker.endpoint) as client:
            moe = moed.torch.RemoteMoE(LAYER, client)
            x = torch.randn(2 * STEP_TOKENS + 5, HIDDEN, requires_grad=True)
            moe(x).sum().backward()
            self.assertEqual([m.tokens for name, m in worker.requests if name == "Forward"],
                             [23, 23, 23])
            self.assertEqual(moe.session.backwards, 3)
            self.assertTrue(torch.equal(x.grad, torch.full_like(x, 3)))
            worker.requests.clear()
            self.assertEqual(moe(x[:0]).shape, (0, HIDDEN))
            self.assertEqual(worker.requests, [])

    def test_rows_that_do_not_fit_one_message_are_split(self):
        with fakes() as (worker,):
            worker.message_bytes = 8192 + 10 * (2 * HIDDEN * 4 + 8 * TOP_K)  # x and dy of 10 rows
            with moed.Client(worker.endpoint) as client:
                moe = moed.torch.RemoteMoE(LAYER, client)
                x = torch.randn(20, HIDDEN, requires_grad=True)
                moe(x).sum().backward()
                self.assertEqual([(name, m.tokens) for name, m in worker.requests],
                                 [("Forward", 10)] * 2 + [("Backward", 10)] * 2)
                worker.requests.clear()
                moe(x.detach()[:16].bfloat16())  # half as wide
                self.assertEqual(len(worker.requests), 1)

    def test_a_group_that_does_not_train_serves_passes_without_gradients(self):
        with fakes() as (worker,):
            worker.extensions = []
            worker.GetTrainState = None
            with moed.Client(worker.endpoint) as client:
                moe = moed.torch.RemoteMoE(LAYER, client)
                x = torch.randn(4, HIDDEN)
                with torch.no_grad():
                    self.assertTrue(torch.equal(moe(x), 2 * x))
                with self.assertRaises(moed.MoeError) as caught:
                    moe(x)
                self.assertIn("started without --training", caught.exception.message)
                self.assertIn("torch.no_grad()", caught.exception.message)
                with self.assertRaises(moed.MoeError):
                    moed.torch.RemoteOptimizer([moe], lr=1.0)

    def test_a_training_pass_waits_as_long_as_a_step(self):
        with fakes() as (worker,), moed.Client(worker.endpoint) as client:
            moe = moed.torch.RemoteMoE(LAYER, client)
            worker.script = [unavailable()] * 6
            moe(torch.randn(4, HIDDEN))
            self.assertEqual(len(worker.requests), 7)

    def test_a_second_backward_of_a_graph_is_a_new_micro_batch(self):
        with fakes() as (worker,), moed.Client(worker.endpoint) as client:
            moe = moed.torch.RemoteMoE(LAYER, client, retain=True)
            y = moe(torch.randn(4, HIDDEN)).sum()
            y.backward(retain_graph=True)
            (2 * y).backward()
            self.assertEqual(worker.ledger.backwards, 2)

    def test_steps_count_gradients_and_follow_schedulers(self):
        with fakes() as (worker,), moed.Client(worker.endpoint) as client:
            moe = moed.torch.RemoteMoE(LAYER, client)
            optimizer = moed.torch.RemoteOptimizer([moe], lr=0.5, betas=(0.8, 0.9))
            schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
            for step in range(3):
                for _ in range(2):
                    moe(torch.randn(4, HIDDEN)).sum().backward()
                optimizer.step(grad_scale=0.5)
                optimizer.zero_grad()  # no gradients: makes no call
                schedule.step()
                sent = worker.requests[-1][1]
                self.assertEqual((sent.step_id, sent.learning_rate, sent.expected_backwards,
                                  sent.beta1, sent.grad_scale), (step + 1, 0.5**(step + 1), 2, 0.8,
                                                                 0.5))
            moe(torch.randn(4, HIDDEN)).sum().backward()
            optimizer.zero_grad()
            self.assertEqual((worker.requests[-1][0], worker.ledger.backwards), ("ZeroGrad", 0))

    def test_a_step_without_an_answer_is_made_once(self):
        with fakes() as (worker,), moed.Client(worker.endpoint, timeout=2) as client:
            moe = moed.torch.RemoteMoE(LAYER, client)
            optimizer = moed.torch.RemoteOptimizer([moe], lr=0.5)
            moe(torch.randn(4, HIDDEN)).sum().backward()
            worker.script = [(unavailable(),)] + [unavailable()] * 1000
            with self.assertRaises(moed.MoeError):
                optimizer.step()
            worker.script = []
            optimizer.step()
            self.assertTrue(optimizer.last.repeated)
            self.assertEqual(worker.ledger.steps, 1)

    def test_an_id_that_another_session_took_is_skipped(self):
        with fakes() as (worker,), moed.Client(worker.endpoint) as client:
            moe = moed.torch.RemoteMoE(LAYER, client)
            optimizer = moed.torch.RemoteOptimizer([moe], lr=0.5)
            for step in (1, 2, 3):
                client.set_frozen([], step_id=step)
            moe(torch.randn(4, HIDDEN)).sum().backward()
            optimizer.step()
            self.assertEqual((worker.ledger.steps, worker.ledger.last_step_id()), (1, 4))

    def test_two_trainers_of_equal_settings_make_two_steps(self):
        with fakes() as (worker,), moed.Client(worker.endpoint) as one, \
                moed.Client(worker.endpoint) as two:
            layers = [moed.torch.RemoteMoE(LAYER, client) for client in (one, two)]
            for alone in (False, True):
                worker.ledger.backwards, steps = 0, worker.ledger.steps
                optimizers = [moed.torch.RemoteOptimizer([moe], lr=0.5, alone=alone)
                              for moe in layers]
                for moe, optimizer in zip(layers * 3, optimizers * 3):
                    moe(torch.randn(4, HIDDEN)).sum().backward()
                    optimizer.step()
                    self.assertEqual((optimizer.last.repeated, optimizer.last.backwards),
                                     (False, 1))
                self.assertEqual(worker.ledger.steps, steps + 6)

    def test_zero_grad_recovers_from_a_failed_backward(self):
        with fakes() as (worker,), moed.Client(worker.endpoint, timeout=2) as client:
            moe = moed.torch.RemoteMoE(LAYER, client)
            optimizer = moed.torch.RemoteOptimizer([moe], lr=0.5)
            y = moe(torch.randn(4, HIDDEN)).sum()
            worker.script = [(unavailable(),)] + [unavailable()] * 1000
            with self.assertRaises(moed.MoeError):
                y.backward()
            worker.script = []
            self.assertEqual(worker.ledger.backwards, 1)  # the call ran, its answer was lost
            optimizer.zero_grad()
            moe(torch.randn(4, HIDDEN)).sum().backward()
            optimizer.step()
            self.assertEqual(optimizer.last.backwards, 1)

    def test_a_step_uses_only_its_sessions_gradients(self):
        with fakes() as (worker,), moed.Client(worker.endpoint) as one, \
                moed.Client(worker.endpoint) as two, moed.Client(worker.endpoint) as three:
            moe, other = (moed.torch.RemoteMoE(LAYER, client) for client in (one, two))
            moe(torch.randn(4, HIDDEN)).sum().backward()
            # This session begins while the group has gradients of another one.
            late = moed.torch.RemoteMoE(LAYER, three)
            for module in (other, late):
                optimizer = moed.torch.RemoteOptimizer([module], lr=0.5)
                with self.assertRaises(moed.MoeError) as caught:
                    optimizer.step()
                self.assertEqual(caught.exception.reason, "GRADIENTS_MISSING")
                self.assertIsNone(optimizer.last)
            self.assertNotIn("OptimizerStep", [name for name, m in worker.requests])
            self.assertEqual((worker.ledger.steps, worker.ledger.backwards), (0, 1))
            late(torch.randn(4, HIDDEN)).sum().backward()  # two now; one is of this session
            with self.assertRaises(moed.MoeError) as caught:
                optimizer.step()
            self.assertEqual(caught.exception.reason, "GRADIENTS_MISSING")
            late.session.refresh()
            optimizer.zero_grad()  # clears the other session's too, because alone=True
            late(torch.randn(4, HIDDEN)).sum().backward()
            optimizer.step()
            with self.assertRaises(moed.MoeError):
                optimizer.step()  # uses them
            self.assertEqual((optimizer.last.backwards, worker.ledger.steps), (1, 1))
            shared = moed.torch.RemoteOptimizer([moe], lr=0.5, alone=False)
            other(torch.randn(4, HIDDEN)).sum().backward()
            shared.step()
            self.assertEqual((shared.last.backwards, worker.ledger.steps), (1, 2))


@needs_torch
class TorchOnRealGroup(unittest.TestCase):
    def test_golden_gradients_in_both_dtypes(self):
        with training_group(FAMILY, 2) as g, moed.Client(g.endpoints[0]) as client:
            for layer, tokens, x, dy, dx in golden_gradients(FAMILY):
                for dtype, limit in ((torch.float32, 1e-5), (torch.bfloat16, 1e-2)):
                    for saved in (False, True):
                        moe = moed.torch.RemoteMoE(layer, client, retain=saved)
                        t = torch.from_numpy(x.copy()).to(dtype).requires_grad_()
                        moe(t).backward(torch.from_numpy(dy.copy()).to(dtype))
                        error = relative_error(t.grad.float().numpy(), dx)
                        print("    layer %d, %2d tokens, %s: %.1e" % (layer, tokens, dtype, error))
                        self.assertEqual(t.grad.dtype, dtype)
                        self.assertLessEqual(error, limit)

    def test_betas_of_zero_equal_torchs(self):
        # A step of plain SGD subtracts the gradients from the weights.
        layer, _, x, dy, _ = next(case for case in golden_gradients(FAMILY) if case[1] == 37)
        rows = torch.from_numpy(x.copy())

        def tensors(root, name):
            found = {}
            for path in glob.glob(os.path.join(root, name, "optimizer", "slot-*.safetensors")):
                found.update({key: torch.from_numpy(value.copy()) for key, value
                              in moed.read_safetensors(path).items() if key.endswith(".value")})
            return found

        with tempfile.TemporaryDirectory(prefix="moed-test-") as root:
            with training_group(FAMILY, 1, "--training-dir", root, "--training", "sgd") as g, \
                    moed.Client(g.endpoints[0]) as client:
                moe = moed.torch.RemoteMoE(layer, client)
                optimizer = moed.torch.RemoteOptimizer([moe], lr=1.0)
                moe.session.change(client.save_checkpoint, "before")
                for name, scale in (("g1", 1.0), ("g2", -0.25)):
                    moe(rows).backward(scale * torch.from_numpy(dy.copy()))
                    optimizer.step()
                    moe.session.change(client.save_checkpoint, name)
                    moe.session.change(client.load_checkpoint, "before")
                    moe.session.refresh()
            before = tensors(root, "before")
            gradients = [{key: before[key] - value for key, value in tensors(root, name).items()}
                         for name in ("g1", "g2")]
            with training_group(FAMILY, 1, "--training-dir", root) as g, \
                    moed.Client(g.endpoints[0]) as client:
                moe = moed.torch.RemoteMoE(layer, client)
                optimizer = moed.torch.RemoteOptimizer([moe], lr=0.0, betas=(0.0, 0.999), eps=1e-4)
                for lr, scale in ((0.0, 1.0), (1e-2, -0.25)):
                    optimizer.param_groups[0]["lr"] = lr
                    moe(rows).backward(scale * torch.from_numpy(dy.copy()))
                    optimizer.step()
                moe.session.change(client.save_checkpoint, "after")
            after = tensors(root, "after")
        self.assertTrue(before and before.keys() == after.keys())
        worst = 0.0
        for key, value in before.items():
            parameter = torch.nn.Parameter(value.clone())
            theirs = torch.optim.AdamW([parameter], betas=(0.0, 0.999), eps=1e-4, weight_decay=0.0)
            for lr, gradient in zip((0.0, 1e-2), gradients):
                theirs.param_groups[0]["lr"] = lr
                parameter.grad = gradient[key].clone()
                theirs.step()
            ours, wanted = after[key] - value, parameter.detach() - value
            if wanted.norm() > 0:
                worst = max(worst, float((ours - wanted).norm() / wanted.norm()))
        print("    %d tensors, moves differ by %.1e at most" % (len(before), worst))
        # Gradients that come from SGD steps are rounded to the weights' last bits.
        self.assertLess(worst, 1e-2)

    def test_a_remote_layer_learns_for_a_fixed_head(self):
        torch.manual_seed(1)
        with training_group(FAMILY, 2) as g, moed.Client(g.endpoints[0], spread=True) as client:
            moe = moed.torch.RemoteMoE(client.layers[0], client, retain=True)
            head = torch.randn(moe.layer.hidden, 4)
            x, wanted = torch.randn(32, moe.layer.hidden), torch.randint(4, (32,))
            optimizer = moed.torch.RemoteOptimizer([moe], lr=1e-2)
            losses = []
            for _ in range(30):
                loss = torch.nn.functional.cross_entropy(moe(x) @ head, wanted)
                loss.backward()
                optimizer.step()
                losses.append(loss.item())
            print("    loss %.3f -> %.3f" % (losses[0], losses[-1]))
            self.assertLess(losses[-1], 0.5 * losses[0])
            self.assertEqual(optimizer.last.weights_version, 31)

    def test_a_loop_goes_on_after_a_worker_was_lost(self):
        torch.manual_seed(1)
        with training_group(FAMILY, 2) as g, moed.Client(g.endpoints[0]) as client:
            moe = moed.torch.RemoteMoE(client.layers[0], client)
            optimizer = moed.torch.RemoteOptimizer([moe], lr=1e-2)
            head = torch.randn(moe.layer.hidden, 4)
            x, wanted = torch.randn(32, moe.layer.hidden), torch.randint(4, (32,))
            losses, reasons = [], set()
            while len(losses) < 40:
                if len(losses) == 10 and not reasons:
                    g.kill_worker(1)
                    g.start_worker(1)
                try:
                    loss = torch.nn.functional.cross_entropy(moe(x) @ head, wanted)
                    loss.backward()
                    optimizer.step()
                    losses.append(loss.item())
                except moed.MoeError as error:
                    reasons.add(error.reason)
                    g.wait_serving()
                    moe.session.refresh()
            print("    loss %.3f, after the loss of a worker %.3f, at last %.3f; %s" % (
                losses[0], losses[10], losses[-1], sorted(reasons)))
            self.assertEqual(losses[10], losses[0])  # the model as loaded
            self.assertLess(losses[-1], 0.5 * losses[0])
            self.assertEqual(optimizer.last.steps, 30)

    def test_the_example_learns(self):
        example = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..", "client",
                               "python", "examples", "finetune.py")
        done = subprocess.run(
            [sys.executable, example, "--model", model_directory(FAMILY), "--workers", "2",
             "--moectl", MOECTL, "--steps", "40", "--remote-only"], stdout=subprocess.PIPE,
            text=True, timeout=100, check=True,
            env=dict(os.environ, PYTHONPATH=os.path.join(BUILD, "python")))
        print("    " + done.stdout.splitlines()[-1])
        first, last = map(float, re.search(r"first ([0-9.]+), last ([0-9.]+)",
                                           done.stdout).groups())
        self.assertLess(last, 0.6 * first)

    def test_unsupported_uses_in_torch_are_refused(self):
        """They are refused with a reason, not ignored."""
        with training_group(FAMILY, 1) as g, moed.Client(g.endpoints[0]) as client:
            moe = moed.torch.RemoteMoE(client.layers[0], client)
            model = torch.nn.Sequential(torch.nn.Linear(2, 2), moe)
            for act in (copy.deepcopy, pickle.dumps, lambda m: torch.save(m, io.BytesIO())):
                with self.assertRaisesRegex(TypeError, "parameters are on the workers"):
                    act(model)
            with self.assertRaisesRegex(TypeError, "has connections"):
                pickle.dumps(client)
            self.assertEqual(set(model.state_dict()), {"0.weight", "0.bias"})
            remote = moed.torch.RemoteOptimizer([moe], lr=1e-3)
            with self.assertRaisesRegex(ValueError, "one param group"):
                remote.add_param_group({"params": [torch.zeros(1, requires_grad=True)]})
            for name, value in (("weight_decay", -1), ("max_grad_norm", -1), ("balance_rate", -1),
                                ("momentum", 1), ("momentum", .9), ("betas", (0.9, 1.0))):
                with self.assertRaisesRegex(ValueError, name):
                    moed.torch.RemoteOptimizer([moe], lr=1e-3, **{name: value})
            with self.assertRaises(moed.MoeError) as caught:
                client.optimizer_step(1e-3, step_id=1, momentum=0.9)
            self.assertEqual(caught.exception.reason, "VALUE_INVALID")
            self.assertIn("adamw", caught.exception.message)
            moe.session.lineage += 1
            with self.assertRaises(moed.MoeError) as caught:
                moe(torch.randn(3, moe.layer.hidden)).sum().backward()
            self.assertEqual(caught.exception.reason, "STATE_LOST")
            self.assertRegex(str(caught.exception), r"session.refresh\(\) [^()]*\)$")
        with training_group(FAMILY, 1, "--training", "sgd") as g:
            with moed.Client(g.endpoints[0]) as client:
                moe = moed.torch.RemoteMoE(client.layers[0], client)
                with self.assertRaisesRegex(ValueError, "betas"):
                    moed.torch.RemoteOptimizer([moe], lr=1e-3, betas=(0.5, 0.999))
                moed.torch.RemoteOptimizer([moe], lr=1e-3, momentum=0.9)

    def run_example(self, *arguments, folder):
        example = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..", "client",
                               "python", "examples", "finetune.py")
        return subprocess.run(
            [sys.executable, example, "--model", model_directory(FAMILY), *arguments],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, timeout=100,
            env=dict(os.environ, PYTHONPATH=os.path.join(BUILD, "python"), TMPDIR=folder))

    def test_the_example_checks_its_options_before_it_trains(self):
        with tempfile.TemporaryDirectory() as folder:
            done = self.run_example("--moectl", os.path.join(folder, "none"), folder=folder)
            self.assertEqual((done.returncode, done.stdout), (1, ""))
            self.assertRegex(done.stderr, r"^cannot run \S+none \(give its path with --moectl\): ")
            self.assertEqual(os.listdir(folder), [])
            done = self.run_example("--moectl", MOECTL, "--plot",
                                    os.path.join(folder, "none", "loss.png"), folder=folder)
            print("    " + done.stderr.strip())
            self.assertEqual((done.returncode, done.stdout), (1, ""))
            self.assertRegex(done.stderr, r"^--plot( needs matplotlib|: \S+ does not exist)")
            self.assertEqual(os.listdir(folder), [])


if __name__ == "__main__":
    main()
