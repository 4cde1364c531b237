# SPDX-License-Identifier: Apache-2.0
"""LoadCheckpoint is cut short: a worker is lost at a known place of it (held_backend.c). All others
have the loaded state then, or none has. With copies they go on; without copies the group waits for
a worker, and goes back to the last checkpoint that it knows."""

import random
import threading

from copies import LIMIT, Client, relative_error
from cuts import Cuts
from group import main, wait_until
from saves import LORA
from training import Trainer

ROUNDS = 6
LATEST_S = 0.012  # after the beginning of a Load, which takes about as long


class Loads(Cuts):
    def save_twice(self, g):
        """A client that has saved `early` and `late`, and has taken a step since; and what `early`
        has."""
        client = Client(g)
        client.train(2)
        client.save("early")
        client.train(1)
        client.save("late")
        client.train(1)
        return client, client.accepted[:2]

    def wait_until_taken(self, g, slots, lineage):
        """These slots have the state of the checkpoint; the Load has not ended."""
        for slot in slots:
            trainer = Trainer(g.endpoints[slot])
            wait_until(lambda trainer=trainer: trainer.state().lineage > lineage)
            trainer.close()


class WithCopies(Loads):
    """Four workers. The first three go on."""

    def return_and_compare(self, g, client):
        """The lost worker returns. Its copies have the bits of the others."""
        client.train(1)
        self.compare(client)
        epoch = g.info().epoch
        g.start_worker(3)
        self.join(g, client, 3, "joined", epoch)
        client.train(1)
        self.compare_copies(g, client, 1, 0)  # slot 3 has the same experts as slot 1
        client.close()

    def test_before_all_have_begun(self):
        with self.group() as g:
            client, saved = self.save_twice(g)
            before, step, answer = client.state(), client.step + 1, client.ask()
            _, reason = self.cut(g, "exchange", [3], client.persist,
                                 lambda: client.load("early", step))
            self.nothing_was_run(client, before, reason)
            after = client.state()
            self.assertEqual((after.checkpoint, after.unsaved_steps), ("late", 1))
            self.assertLessEqual(relative_error(client.ask(), answer), LIMIT)
            self.assertFalse(client.load("early", step).repeated)
            self.assertEqual(client.begin().steps, len(saved))
            client.accepted = saved
            self.return_and_compare(g, client)

    def goes_on_with_the_loaded_state(self, g, client, saved, before, loaded, step):
        """Under the lineage of the Load."""
        answer, reason = loaded
        self.assertIsNone(reason)
        after = client.begin()
        self.assertEqual((answer.lineage, after.lineage), (before.lineage + 1, answer.lineage))
        self.assertEqual((after.steps, after.checkpoint, after.last_step_id),
                         (len(saved), "early", step))
        client.accepted = saved
        self.return_and_compare(g, client)
        return answer

    def test_as_the_others_read(self):
        """The next view has the call run again."""
        with self.group() as g:
            client, saved = self.save_twice(g)
            before, step = client.state(), client.step + 1
            loaded = self.cut(g, "exchanged", [3], client.persist,
                              lambda: client.load("early", step))
            self.assertFalse(
                self.goes_on_with_the_loaded_state(g, client, saved, before, loaded, step).repeated)

    def test_after_the_others_have_taken_the_state(self):
        with self.group() as g:
            client, saved = self.save_twice(g)
            before, step = client.state(), client.step + 1
            pending = self.begin_cut(g, "take", [3], client.persist,
                                     lambda: client.load("early", step))
            self.wait_until_taken(g, [0, 1, 2], before.lineage)
            g.kill_worker(3)
            loaded = pending.result()
            self.assertTrue(self.goes_on_with_the_loaded_state(g, client, saved, before, loaded,
                                                               step).repeated)

    def test_before_another_worker_has_taken_the_state(self):
        """The view forms once it has."""
        with self.group() as g:
            client, saved = self.save_twice(g)
            before, step = client.state(), client.step + 1
            pending = self.begin_cut(g, "take", [1, 3], client.persist,
                                     lambda: client.load("early", step))
            self.wait_until_taken(g, [0, 2], before.lineage)
            g.kill_worker(3)
            wait_until(lambda: g.info(0).epoch == 0 and g.info(2).epoch == 0)
            self.held.hold("", g.workers[1])
            loaded = pending.result()
            self.assertTrue(self.goes_on_with_the_loaded_state(g, client, saved, before, loaded,
                                                               step).repeated)


class AtAnyTime(Loads):
    EXTRA = LORA

    def lose_in_a_load(self, g, client, victim, after_s):
        """Returns whether the others have the loaded state. Each has a view again."""
        others = [slot for slot in range(4) if slot != victim]
        epochs = [g.info(slot).epoch for slot in others]
        client.use(g.endpoints[others[0]])
        step = client.step + 1
        killer = threading.Timer(after_s, g.kill_worker, (victim,))
        killer.start()
        _, reason = client.persist(lambda: client.load("early", step))
        killer.join()
        for slot, epoch in zip(others, epochs):
            wait_until(lambda slot=slot, epoch=epoch: g.info(slot).epoch > epoch)
        state = client.begin()
        loaded = state.checkpoint == "early"
        print("slot %d after %.1f ms: %s, %s" % (victim, 1e3 * after_s, reason,
                                                 "loaded" if loaded else "not loaded"))
        self.assertIn((reason, loaded), ((None, True), ("STATE_LOST", True), ("STATE_LOST", False)))
        return loaded

    def test_each_other_worker_has_a_view_and_the_lost_one_returns(self):
        seed = random.randrange(1 << 32)
        print("seed", seed)
        rng = random.Random(seed)
        with self.group() as g:
            client, saved = self.save_twice(g)
            for number in range(ROUNDS):
                victim = number % 4
                if self.lose_in_a_load(g, client, victim, rng.uniform(0, LATEST_S)):
                    client.accepted = list(saved)
                epoch = g.info((victim + 1) % 4).epoch
                g.start_worker(victim)
                self.join(g, client, victim, "joined-%d" % number, epoch)
                client.train(1)
            self.compare(client)
            client.close()


class WithoutCopies(Loads):
    """Two workers. The second is lost, and a new process takes its place."""

    def lose_and_replace(self, g, client, pending):
        """Returns the state with which the group goes on, and whether the Load was answered."""
        lineage, epoch = client.lineage, g.info().epoch
        g.kill_worker(1)
        wait_until(lambda: g.info().epoch == 0)
        g.start_worker(1)
        answer, reason = pending.result()
        self.assertIn(reason, (None, "STATE_LOST"))
        g.wait_serving(epoch)
        state = client.begin()
        self.assertGreater(state.lineage, lineage + (answer is not None))
        return state, answer is not None

    def test_before_it_takes(self):
        """The group goes back to its own last checkpoint: not to the one that was to be loaded."""
        with self.group(workers=2, replicas=1) as g:
            client, saved = self.save_twice(g)
            step = client.step + 1
            pending = self.begin_cut(g, "exchanged", [1], client.persist,
                                     lambda: client.load("early", step))
            state, answered = self.lose_and_replace(g, client, pending)
            self.assertFalse(answered)
            self.assertEqual((state.steps, state.checkpoint), (len(saved) + 1, "late"))
            client.accepted = client.accepted[:3]
            client.train(1)
            self.compare(client)
            client.close()

    def test_after_the_other_has_taken_the_state(self):
        """It may answer a repeat until the new process is there."""
        with self.group(workers=2, replicas=1) as g:
            client, saved = self.save_twice(g)
            step = client.step + 1
            pending = self.begin_cut(g, "take", [1], client.persist,
                                     lambda: client.load("early", step))
            self.wait_until_taken(g, [0], client.lineage)
            state, _ = self.lose_and_replace(g, client, pending)
            self.assertEqual((state.steps, state.checkpoint), (len(saved), "early"))
            client.accepted = saved
            client.train(1)
            self.compare(client)
            client.close()


if __name__ == "__main__":
    main()
