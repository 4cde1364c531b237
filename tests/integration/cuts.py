# SPDX-License-Identifier: Apache-2.0
"""Groups that train, of which workers are lost at a known place in a call. held_backend.c holds the
call there, so no test depends on time."""

import shutil
import tempfile

from copies import Copies
from group import wait_until
from held import Held
from saves import Background
from training import Trainer

PATIENT_MS = 10000  # a lease that no busy machine lets end
LEASE_MS = 3000  # where a test waits for its end
BUDGET_MS = 30000  # so that others notice a held worker only by its end


class Cuts(Copies):
    """Groups of which workers are lost at a place of a call."""

    @classmethod
    def setUpClass(cls):
        cls.folder = tempfile.mkdtemp(prefix="moed-copies-")
        cls.held = Held(cls.folder)

    @classmethod
    def tearDownClass(cls):
        shutil.rmtree(cls.folder, ignore_errors=True)

    def group(self, lease_ms=PATIENT_MS, **options):
        return Copies.group(self, lease_ms=lease_ms, budget_ms=BUDGET_MS,
                            program=self.held.worker, backend="cuda",
                            environment=self.held.environment, **options)

    def begin_cut(self, g, word, victims, call, *arguments):
        """Returns `call` on another thread, once the word holds it at these workers."""
        for slot in victims:
            self.held.hold(word, g.workers[slot])
        pending = Background(call, *arguments)
        for slot in victims:
            self.held.wait_until_held(g.workers[slot])
        return pending

    def cut(self, g, word, victims, call, *arguments):
        """These workers are lost while the word holds them. Returns what `call` returns."""
        pending = self.begin_cut(g, word, victims, call, *arguments)
        for slot in victims:
            g.kill_worker(slot)
        return pending.result()

    def wait_until_run(self, g, slots, step):
        """These slots have recorded the change."""
        for slot in slots:
            trainer = Trainer(g.endpoints[slot])
            wait_until(lambda trainer=trainer: trainer.state().last_step_id >= step)
            trainer.close()

    def cut_after(self, g, victim, others, step, call, word="exchanged"):
        """The others run the change, and one of them answers; then the victim is lost, which has
        not recorded it. Returns the answer."""
        answer, reason = self.begin_cut(g, word, [victim], lambda: (call(), None)).result()
        self.assertIsNone(reason)
        self.wait_until_run(g, others, step)
        self.lose(g, victim, others[0])
        return answer

    def miss(self, g, change, step):
        """The last message of an exchange has reached slots 0 and 2, and not slot 1; then slot 3 is
        lost. Returns the answer."""
        self.held.hold("missed", g.workers[1])
        answer = self.begin_cut(g, "exchanged", [3], change).result()
        self.held.wait_until_held(g.workers[1])
        self.wait_until_run(g, [0, 2], step)
        epoch = g.info().epoch
        g.kill_worker(3)
        self.held.hold("", g.workers[1])
        wait_until(lambda: g.info().epoch > epoch)
        return answer

    def same(self, before, after, *names):
        for name in ("weights_version", "steps", "last_step_id", "router_frozen", "experts_frozen",
                     "shared_frozen", *names):
            self.assertEqual(getattr(after, name), getattr(before, name), name)

    def nothing_was_run(self, client, before, reason):
        """No slot has run the change; one that was lost may have."""
        self.assertEqual(reason, "STATE_LOST")
        after = client.begin()
        self.assertGreater(after.lineage, before.lineage)
        self.same(before, after)
        self.assertEqual(after.backwards, 0)

    def named(self, state):
        return [b.micro_batch_id for b in state.lost_micro_batches]

    def compare_copies(self, g, client, victim, other):
        """Saves with and without a slot; `other` is one that stays."""
        client.use(g.endpoints[other])
        client.save("all")
        self.lose(g, victim, other)
        client.save("fewer")
        self.compare_bits("all", "fewer", victim)
