# SPDX-License-Identifier: Apache-2.0
"""Remote layers under torch.compile: one graph without breaks, and the same answers, gradients and
calls as without it. Needs torch."""

import shutil
import unittest

import numpy as np

from group import group, main
from fake_group import HIDDEN, LAYER, STEP_TOKENS, fakes
from training import training_group

import moed

try:
    import torch
    import moed.torch
except ImportError:
    torch = None

FAMILY = "qwen3_moe"


def graph(function, backend="aot_eager", **options):
    torch._dynamo.reset()
    return torch.compile(function, backend=backend, fullgraph=True, **options)


def calls(worker):
    """The passes in the worker's requests: (name, tokens, whether it retains x or gets it
    again)."""
    return [(name, m.tokens, bool(m.x) if name == "Backward" else m.HasField("retain"))
            for name, m in worker.requests]


@unittest.skipUnless(torch, "torch is not installed")
class AgainstTheFake(unittest.TestCase):
    def setUp(self):
        torch.manual_seed(11)

    def test_a_pass_without_gradients_is_one_graph(self):
        with fakes() as (worker,):
            worker.extensions = []  # it does not train
            with moed.Client(worker.endpoint) as client:
                moe = moed.torch.RemoteMoE(LAYER, client)

                def double(x):
                    return moe(x * 2) * 0.5

                model = graph(double)
                for dtype in (torch.float32, torch.bfloat16):
                    x = torch.randn(2, 3, HIDDEN).to(dtype)
                    with torch.no_grad():
                        y = model(x)
                        self.assertEqual((y.dtype, y.shape), (dtype, x.shape))
                        self.assertTrue(torch.equal(y, double(x)))
                self.assertEqual([name for name, _ in worker.requests], ["Forward"] * 4)

    def test_a_step_makes_the_same_calls_and_gradients_as_without_a_graph(self):
        backends = ["aot_eager"] + (["inductor"] if shutil.which("c++") else [])
        for retain, backend, tokens in [(retain, backend, tokens) for retain in (False, True)
                                       for backend in backends
                                       for tokens in (5, 2 * STEP_TOKENS + 5)]:
            with self.subTest(retain=retain, backend=backend,
                              tokens=tokens), fakes() as (worker, ), (moed.Client(
                                  worker.endpoint)) as client:
                moe = moed.torch.RemoteMoE(LAYER, client, retain=retain)
                scale = torch.nn.Parameter(torch.full((HIDDEN,), 0.5))

                def step(x):
                    return (moe(x * scale) * 3).sum()

                x = torch.randn(tokens, HIDDEN)
                seen = []
                for model in (step, graph(step, backend)):
                    scale.grad = None
                    worker.requests.clear()
                    model(x).backward()
                    seen.append((scale.grad, calls(worker), moe.aux_loss))
                    self.assertEqual(moe.session.backwards, len(worker.requests) // 2)
                    moe.session.change(client.zero_grad)
                    moe.session.backwards = 0
                (eager, eager_calls, _), (compiled, compiled_calls, aux_loss) = seen
                # Sums over rows may have another order.
                torch.testing.assert_close(compiled, eager, rtol=1e-4, atol=1e-4)
                self.assertEqual(compiled_calls, eager_calls)
                self.assertEqual(aux_loss, 0.5)

    def test_the_first_layer_learns_though_x_does_not(self):
        with fakes() as (worker,), moed.Client(worker.endpoint) as client:
            moe = moed.torch.RemoteMoE(LAYER, client)
            graph(lambda x: moe(x).sum())(torch.randn(4, HIDDEN)).backward()
            self.assertEqual(worker.ledger.backwards, 1)

    def test_layers_of_a_model_share_a_graph(self):
        with fakes() as (worker,), moed.Client(worker.endpoint) as client:
            layers = [moed.torch.RemoteMoE(LAYER, client) for _ in range(12)]
            torch._dynamo.reset()
            counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
            x = torch.randn(4, HIDDEN)
            with torch.no_grad():
                for moe in layers:
                    x = torch.compile(moe, backend=counter, fullgraph=True)(x)
            self.assertEqual(len(worker.requests), 12)
            self.assertEqual(counter.frame_count, 1)

    def test_lengths_that_vary_share_a_graph(self):
        with fakes() as (worker,), moed.Client(worker.endpoint) as client:
            moe = moed.torch.RemoteMoE(LAYER, client)
            model = graph(lambda x: moe(x) + x, dynamic=True)
            for tokens in (3, 7, STEP_TOKENS + 1, 2 * STEP_TOKENS + 3, 0):
                x = torch.randn(tokens, HIDDEN, requires_grad=True)
                y = model(x)
                self.assertTrue(torch.equal(y, 3 * x))
                y.sum().backward()
                self.assertTrue(torch.equal(x.grad, torch.full_like(x, 4 if tokens else 2)))

    def test_a_second_backward_pass_is_a_new_micro_batch(self):
        with fakes() as (worker,), moed.Client(worker.endpoint) as client:
            moe = moed.torch.RemoteMoE(LAYER, client, retain=True)
            x = torch.randn(4, HIDDEN, requires_grad=True)
            y = graph(moe)(x)
            for dy in (1.0, 2.0):
                x.grad = None
                y.backward(torch.full_like(y, dy), retain_graph=True)
                self.assertTrue(torch.equal(x.grad, torch.full_like(x, 3 * dy)))
            self.assertEqual([call for call in calls(worker) if call[0] == "Backward"],
                             [("Backward", 4, False), ("Backward", 4, True)])
            ids = {m.micro_batch_id for name, m in worker.requests if name == "Backward"}
            self.assertEqual(len(ids), 2)

    def test_an_operator_keeps_the_promises_that_torch_checks(self):
        with fakes() as (worker,), moed.Client(worker.endpoint) as client:
            moe = moed.torch.RemoteMoE(LAYER, client)
            x = torch.randn(4, HIDDEN, requires_grad=True)
            torch.library.opcheck(moed.torch._graph.forward, (x.detach(), None, moe._handle))
            torch.library.opcheck(moed.torch._graph.forward_training,
                                  (x, None, moe._anchor, moe._handle, moe.layer.top_k))


@unittest.skipUnless(torch, "torch is not installed")
class OnDaemons(unittest.TestCase):
    def test_outputs_and_gradients_are_those_of_a_pass_without_a_graph(self):
        with training_group(FAMILY, 2) as g, moed.Client(g.endpoints[0]) as client:
            moe = moed.torch.RemoteMoE(client.layers[0], client, retain=True)
            seen = []
            for model in (moe, graph(moe)):
                x = torch.randn(17, moe.layer.hidden, generator=torch.manual_seed(3))
                x.requires_grad_()
                y = model(x)
                y.backward(torch.cos(y.detach()))
                seen.append((y.detach(), x.grad))
            for eager, compiled in zip(*seen):
                np.testing.assert_array_equal(eager, compiled)  # bit for bit
            step = moed.torch.RemoteOptimizer([moe], lr=1e-3)
            step.step()
            self.assertEqual(step.last.backwards, 2)

    def test_a_group_that_only_serves(self):
        with group(FAMILY, 1) as g, moed.Client(g.endpoint) as client, torch.no_grad():
            moe = moed.torch.RemoteMoE(client.layers[0], client)
            x = torch.randn(5, moe.layer.hidden)
            np.testing.assert_array_equal(moe(x), graph(moe)(x))
            with torch.enable_grad(), self.assertRaises(moed.MoeError) as caught:
                graph(moe)(x)
            self.assertIn("torch.no_grad()", caught.exception.message)


if __name__ == "__main__":
    main()
