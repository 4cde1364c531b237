# SPDX-License-Identifier: Apache-2.0
"""Training in a group with two copies of each expert: a worker is lost, or stopped, at a known
place in a call. held_backend.c holds the call there, so no test depends on time. Whatever is lost,
a step has whole gradients, an answered change is in each later state of its lineage, the outputs
are those of a group without a loss, and copies have the same bits."""

import signal
import time

import grpc

from copies import LIMIT, Client, relative_error
from cuts import LEASE_MS, Cuts
from group import freeze, main, names_in, wait_until
from saves import LORA
from training import refusal


class Calls(Cuts):
    # --------------------------------------------------------------- changes are cut short

    def test_zero_grad(self):
        with self.group() as g:
            client = Client(g)
            client.train(2)
            client.feed(21)
            client.feed(22)
            before = client.state()
            step = before.last_step_id + 1
            _, reason = self.cut(g, "exchange", [3], client.persist,
                                 lambda: client.zero_grad(step))
            self.nothing_was_run(client, before, reason)
            client.feed(23)
            answer = client.zero_grad(step)
            self.assertEqual((answer.backwards, answer.repeated), (1, False))
            client.feed(24)
            answer = self.cut_after(g, 2, [0, 1], step + 1, lambda: client.zero_grad(step + 1))
            self.assertEqual((answer.backwards, answer.repeated), (1, False))
            self.assertTrue(client.zero_grad(step + 1).repeated)  # the same lineage
            self.assertEqual(client.begin().backwards, 0)
            client.train(2)
            self.compare(client)
            client.close()

    def test_set_frozen(self):
        with self.group() as g:
            client = Client(g, 2)
            client.train(2)
            before = client.state()
            step = before.last_step_id + 1
            _, reason = self.cut(g, "exchange", [3], client.persist,
                                 lambda: client.set_frozen(step, router=True))
            self.nothing_was_run(client, before, reason)
            for change in ({"router": True}, {"experts": True}):
                if "experts" in change:  # the worker that was asked is lost before it answers
                    pending = self.begin_cut(g, "exchanged", [2], client.persist,
                                             lambda: client.set_frozen(step, **change),
                                             g.endpoints[1])
                    self.wait_until_run(g, [0, 1], step)
                    g.kill_worker(2)
                    answer, reason = pending.result()
                    self.assertEqual((answer.repeated, reason), (True, None))
                else:
                    self.assertFalse(client.set_frozen(step, **change).repeated)
                client.accepted.append(("set_frozen", change))
                step += 1
            state = client.begin()
            self.assertEqual((state.router_frozen, state.experts_frozen), (False, True))
            client.train(2)
            self.compare(client)
            client.close()

    def test_a_step(self):
        with self.group() as g:
            client = Client(g)
            client.train(2)
            client.feed(21)
            before = client.state()
            step = before.last_step_id + 1
            _, reason = self.cut(g, "step", [3], client.persist,
                                 lambda: client.take_step(1, step=step))
            self.nothing_was_run(client, before, reason)
            client.feed(21)
            self.cut_after(g, 2, [0, 1], step, lambda: client.take_step(1, step=step), "stepped")
            client.accepted.append([21])
            self.assertTrue(client.take_step(1, step=step).repeated)  # the same lineage
            self.assertEqual(client.begin().steps, 3)
            client.train(1)
            self.compare(client)
            client.close()

    def test_a_zero_grad_that_one_worker_has_missed(self):
        """It finishes the call as the view forms; so it does in the next test."""
        with self.group() as g:
            client = Client(g)
            client.train(2)
            client.feed(25)
            before, step = client.state(), client.step + 1
            self.assertEqual(self.miss(g, lambda: client.zero_grad(step), step).backwards, 1)
            self.assertTrue(client.zero_grad(step).repeated)
            after = client.begin()
            self.assertEqual((after.lineage, after.backwards), (before.lineage, 0))
            client.train(2)
            self.compare(client)
            self.compare_copies(g, client, 0, 1)
            client.close()

    def test_a_set_frozen_that_one_worker_has_missed(self):
        with self.group() as g:
            client = Client(g)
            client.train(2)
            client.feed(21)
            before, step = client.state(), client.step + 1
            self.miss(g, lambda: client.set_frozen(step, router=True), step)
            answer, _ = refusal(client.set_frozen, step, router=True)
            self.assertEqual(answer, ("FAILED_PRECONDITION", "GRADIENTS_LOST"))  # those of slot 3
            after = client.begin()
            self.assertGreater(after.lineage, before.lineage)
            self.assertEqual((after.router_frozen, after.last_step_id), (True, step))
            client.accepted.append(("set_frozen", {"router": True}))
            client.train(2)
            self.compare(client)
            self.compare_copies(g, client, 0, 1)
            client.close()

    def test_a_backward_for_the_input_only(self):
        with self.group() as g:
            client = Client(g)
            client.train(2)
            before = client.state()
            want = client.feed(21, input_only=True).dx
            answer, reason = self.cut(g, "backward", [3], client.persist,
                                      lambda: client.feed(22, input_only=True))
            self.assertIsNone(reason)
            self.assertFalse(answer.repeated)
            self.assertLessEqual(relative_error(client.feed(21, input_only=True).dx, want), LIMIT)
            after = client.begin()
            self.assertEqual((after.lineage, after.backwards), (before.lineage, 0))
            client.feed(23)
            _, reason = self.cut(g, "backward", [2], client.persist,
                                 lambda: client.feed(24, input_only=True))
            self.assertEqual(reason, "GRADIENTS_LOST")
            after = client.begin()
            self.same(before, after)
            self.assertEqual((self.named(after), after.lost_backwards), ([23], 1))
            client.train(2)
            self.compare(client)
            client.close()

    # ---------------------------------------------------------------------- two losses

    def test_two_losses_in_one_call(self):
        """The others have a copy of each expert."""
        with self.group() as g:
            client = Client(g)
            client.train(2)
            client.feed(21)
            before = client.state()
            _, reason = self.cut(g, "backward", [2, 3], client.persist, lambda: client.feed(22))
            self.assertEqual(reason, "GRADIENTS_LOST")
            after = client.begin()
            self.assertGreater(after.lineage, before.lineage)
            self.same(before, after)
            self.assertIn(self.named(after), ([21], [21, 22]))
            client.train(2)
            self.compare(client)
            client.close()

    def test_two_losses_that_leave_experts_without_a_copy(self):
        with self.group() as g:
            client = Client(g)
            client.train(2)
            client.save("early")
            saved = list(client.accepted)
            client.train(1)
            client.feed(41)
            before, epoch = client.state(), g.info().epoch
            pending = self.begin_cut(g, "step", [1, 3], client.persist,
                                     lambda: client.take_step(1))
            for slot in (1, 3):
                g.kill_worker(slot)
            wait_until(lambda: g.info(0).epoch == 0 and g.info(2).epoch == 0)
            for slot in (1, 3):
                g.start_worker(slot)
            _, reason = pending.result()
            self.assertEqual(reason, "STATE_LOST")
            g.wait_serving(epoch)
            after = client.begin()
            self.assertGreater(after.lineage, before.lineage)
            self.assertEqual((after.steps, after.checkpoint), (len(saved), "early"))
            client.accepted = saved
            client.train(2)
            self.compare(client)
            self.compare_copies(g, client, 1, 0)
            client.close()

    def test_the_coordinator_is_restarted_and_a_worker_is_lost(self):
        with self.group(LEASE_MS) as g:
            client = Client(g)
            client.train(2)
            client.feed(21)
            before, epoch = client.state(), g.info().epoch
            g.coordinator.kill()
            g.kill_worker(3)
            g.restart_coordinator()
            wait_until(lambda: g.info().epoch > epoch)
            _, reason = client.persist(lambda: client.feed(22))
            self.assertEqual(reason, "GRADIENTS_LOST")
            after = client.begin()
            self.assertGreater(after.lineage, before.lineage)
            self.same(before, after)
            self.assertEqual(self.named(after), [21])
            client.train(2)
            self.compare(client)
            self.compare_copies(g, client, 0, 1)
            client.close()

    # -------------------------------------------------------- a worker stops, and goes on

    def test_a_worker_that_was_stopped_changes_nothing(self):
        """The sequencer stops for longer than its lease, and goes on in a step that the others have
        given up."""
        with self.group(LEASE_MS) as g:
            client = Client(g)
            client.train(2)
            client.feed(21)
            before, epoch = client.state(), g.info(1).epoch
            step = before.last_step_id + 1
            pending = self.begin_cut(g, "step", [0], client.take_step, 1, step)
            freeze(g.workers[0].pid)
            frozen = time.monotonic()
            self.addCleanup(g.workers[0].send_signal, signal.SIGCONT)
            wait_until(lambda: g.info(1).epoch > epoch)
            others = Client(g, 1)
            self.assertGreater(others.lineage, before.lineage)
            self.assertEqual(others.state().steps, before.steps)
            others.accepted = list(client.accepted)
            others.train(2)
            state, names = others.state(), names_in(self.root)
            time.sleep(max(0, frozen + 1.2 * LEASE_MS / 1000 - time.monotonic()))
            self.held.hold("", g.workers[0])
            g.workers[0].send_signal(signal.SIGCONT)
            with self.assertRaises(grpc.RpcError) as caught:
                pending.result()
            self.assertEqual(caught.exception.code().name, "UNAVAILABLE")
            wait_until(lambda: g.info(0).epoch == 0)
            self.assertEqual(client.state().steps, before.steps)
            after = others.state()
            self.same(state, after, "lineage", "backwards")
            self.assertEqual(names_in(self.root), names)
            epoch = g.info(1).epoch
            self.join(g, others, 0, "joined", epoch)
            others.train(1)
            self.compare(others)
            self.compare_copies(g, others, 0, 2)  # which was stopped: slot 2 has the same experts
            others.close()
            client.close()

    # -------------------------------------------------------- clients without a lineage

    def test_a_client_that_names_no_lineage(self):
        with self.group() as g:
            client = Client(g)
            client.lineage = 0
            client.train(2)
            client.feed(21)
            client.feed(22)
            self.lose(g, 3)
            self.assertFalse(client.feed(23).repeated)
            step = client.state().last_step_id + 1
            answer, _ = refusal(client.optimizer_step, step=step)
            self.assertEqual(answer, ("FAILED_PRECONDITION", "GRADIENTS_LOST"))
            answer, _ = refusal(client.take_step, 3, step=step)
            self.assertEqual(answer, ("FAILED_PRECONDITION", "GRADIENTS_MISSING"))
            self.assertEqual(self.named(client.state()), [21, 22])
            for batch in (21, 22):
                self.assertFalse(client.feed(batch).repeated)
            self.assertEqual(client.take_step(3, step=step).backwards, 3)
            client.accepted.append([23, 21, 22])
            # A step that no slot has run; its repeat would be one of no gradients.
            client.feed(31)
            before = client.state()
            _, reason = self.cut(g, "step", [2], client.persist,
                                 lambda: client.optimizer_step(step=step + 1))
            self.assertEqual(reason, "STATE_LOST")
            self.same(before, client.state())
            answer, _ = refusal(client.take_step, 1, step=step + 1)
            self.assertEqual(answer, ("FAILED_PRECONDITION", "GRADIENTS_MISSING"))
            self.assertFalse(client.feed(31).repeated)
            client.take_step(1, step=step + 1)
            client.accepted.append([31])
            client.step = step + 1
            client.train(1)
            self.compare(client)
            client.close()


class Adapters(Cuts):
    """LoRA."""

    EXTRA = LORA

    def test_gradients_are_lost(self):
        with self.group() as g:
            client = Client(g)
            client.train(2)
            client.feed(21)
            client.feed(22)
            before = client.state()
            self.lose(g, 3)
            answer, _ = refusal(client.take_step, 2, step=3)
            self.assertEqual(answer, ("FAILED_PRECONDITION", "GRADIENTS_LOST"))
            after = client.begin()
            self.same(before, after, "lora_rank", "lora_scale")
            self.assertEqual(self.named(after), [21, 22])
            client.train(2)
            self.compare(client)
            self.compare_copies(g, client, 0, 1)
            client.close()

    def test_merge(self):
        with self.group() as g:
            client = Client(g)
            client.train(2)
            before = client.state()
            step = before.last_step_id + 1
            _, reason = self.cut(g, "exchange", [3], client.persist, lambda: client.merge(step))
            self.nothing_was_run(client, before, reason)
            client.train(1)
            step = client.step + 1
            before = client.state()
            self.assertFalse(self.cut_after(g, 2, [0, 1], step,
                                            lambda: client.merge(step)).repeated)
            self.assertTrue(client.merge(step).repeated)
            client.accepted.append(("merge", {}))
            after = client.begin()
            self.assertEqual((after.lineage, after.weights_version, after.steps),
                             (before.lineage, before.weights_version, 0))
            client.train(2)
            self.compare(client)
            client.close()

    def test_a_merge_that_one_worker_has_missed(self):
        """All go back to the last checkpoint."""
        with self.group() as g:
            client = Client(g)
            client.train(2)
            client.save("early")
            saved = list(client.accepted)
            client.train(1)
            lineage, step = client.lineage, client.step + 1
            self.miss(g, lambda: client.merge(step), step)
            _, reason = client.persist(lambda: client.merge(step))
            self.assertEqual(reason, "STATE_LOST")
            state = client.begin()
            self.assertGreater(state.lineage, lineage)
            self.assertEqual((state.steps, state.checkpoint), (len(saved), "early"))
            client.accepted = saved
            client.train(1)
            self.compare(client)
            self.compare_copies(g, client, 0, 1)
            client.close()


if __name__ == "__main__":
    main()
