# SPDX-License-Identifier: Apache-2.0
"""Groups that go back to a checkpoint: damaged ones, an operator's choice, loads, and what is
reported of steps that are lost."""

import concurrent.futures
import json
import os
import shutil

import grpc

from group import main, moectl, wait_until
import moed
from saves import Client, FAMILY, LORA, Saves
from training import refusal, training_group
import wire
from wire import training


class GoingBack(Saves):
    # --------------------------------------------------------------------- no way back

    def damage(self, name):
        path = os.path.join(self.root, name, "optimizer", "slot-00001.safetensors")
        with open(path, "r+b") as file:
            file.seek(os.path.getsize(path) // 2)
            byte = file.read(1)[0]
            file.seek(-1, os.SEEK_CUR)
            file.write(bytes([byte ^ 1]))

    def save_twice(self, g):
        """Saves first and second; the client, and its answer at first."""
        client = Client(g)
        client.train(1)
        first = client.ask()
        client.save("first", 15)
        client.train(2)
        client.save("second", 25)
        return client, first

    def recover(self, channel, name="", as_loaded=False):
        return wire.train(channel, "RecoverTraining", training.RecoverTrainingRequest(
            name=name, as_loaded=as_loaded))

    def lose_a_worker(self, g, client):
        """Returns when the group has failed to go back."""
        epoch = g.info().epoch
        g.kill_worker(1)
        wait_until(lambda: g.info().epoch == 0)
        g.start_worker(1, "--wait-budget-ms", "500")
        last = Client(g, 1)
        wait_until(lambda: last.state().problem != "")
        wait_until(lambda: client.state().problem != "")
        return epoch, last.state().problem

    def test_status_reports_the_steps_that_a_group_may_lose(self):
        with self.group(2, "--wait-budget-ms", "500") as g:
            client = Client(g)

            def stderr_of(*command):
                done = moectl(*command, "--endpoint", g.endpoints[0], check=False)
                print(done.stderr)
                return done.stderr

            client.train(1)
            client.train(2)
            self.assertNotIn("optimizer step", stderr_of("status") + stderr_of("training"))
            epoch = g.info().epoch
            g.kill_worker(1)
            wait_until(lambda: g.info().epoch == 0)
            for command in (("status",), ("training",)):
                said = stderr_of(*command)
                self.assertIn("2 optimizer steps since the model was loaded were not saved", said)
                self.assertIn("goes back to the model as loaded", said)
            g.start_worker(1, "--wait-budget-ms", "500")
            g.wait_serving(epoch)
            self.assertEqual(client.state().steps, 0)  # they were lost
            Client(g).save("first", 45)
            client = Client(g)
            epoch = g.info().epoch
            g.kill_worker(1)
            wait_until(lambda: g.info().epoch == 0)
            self.assertNotIn("optimizer step", stderr_of("status") + stderr_of("training"))
            self.damage("first")
            g.start_worker(1, "--wait-budget-ms", "500")
            wait_until(lambda: client.state().problem != "")
            for command in (("status",), ("training",)):
                said = stderr_of(*command)
                self.assertIn("moectl training recover NAME", said)
                self.assertIn("cannot go back to checkpoint first", said)
            moectl("training", "recover-model", "--endpoint", g.endpoints[1])
            g.wait_serving(epoch)

    def test_python_reports_the_problem_too(self):
        with self.group(2, "--wait-budget-ms", "500") as g:
            client, first = self.save_twice(g)
            self.damage("second")
            epoch, problem = self.lose_a_worker(g, client)
            with moed.Client(g.endpoints[1]) as other:
                self.assertEqual(other.train_state().problem, problem)
                with self.assertRaises(moed.MoeError) as caught:
                    other.recover_training("nosuch")
                self.assertEqual(caught.exception.reason, "CHECKPOINT_NOT_FOUND")
                other.recover_training("first")
                g.wait_serving(epoch)
                state = other.train_state()
                self.assertEqual((state.checkpoint, state.problem), ("first", ""))
                self.assertEqual(client.ask(), first)
                with self.assertRaises(moed.MoeError) as caught:
                    other.recover_training(as_loaded=True)  # the group serves
                self.assertEqual(caught.exception.code, grpc.StatusCode.FAILED_PRECONDITION)

    def test_a_group_goes_further_back_only_on_request(self):
        with self.group(2, "--wait-budget-ms", "500") as g:
            client, first = self.save_twice(g)
            self.assertEqual(refusal(self.recover, client.channel, "first")[0],
                             ("FAILED_PRECONDITION", "UNSUPPORTED"))  # the group serves
            self.damage("second")
            epoch, problem = self.lose_a_worker(g, client)
            print(problem, "-", client.state().problem)
            self.assertIn("slot 1 cannot go back to checkpoint second", client.state().problem)
            self.assertIn("checkpoint second", problem)
            self.assertIn("slot-00001.safetensors is damaged", problem)
            shown = moectl("training", "--endpoint", g.endpoints[1]).stdout
            print(shown)
            self.assertIn(problem, shown)
            self.assertEqual(g.info().epoch, 0)
            for name in ("", ".x", "a/b"):
                self.assertEqual(refusal(self.recover, client.channel, name)[0],
                                 ("INVALID_ARGUMENT", "NAME_INVALID"))
            self.assertEqual(refusal(self.recover, client.channel, "nosuch")[0],
                             ("NOT_FOUND", "CHECKPOINT_NOT_FOUND"))
            self.assertEqual(moectl("training", "recover", "nosuch", "--endpoint", g.endpoints[1],
                                    check=False).returncode, 4)
            os.symlink("first", os.path.join(self.root, "link"))
            done = moectl("training", "recover", "link", "--endpoint", g.endpoints[1], check=False)
            self.assertNotEqual(done.returncode, 0)
            self.assertIn("checkpoint link: link is a symbolic link; links are not followed",
                          done.stderr)
            # A caller gets the reason at once, and the group keeps trying.
            answer, error = refusal(client.load, "first", 30)
            self.assertEqual(answer, ("FAILED_PRECONDITION", "CANNOT_GO_BACK"))
            self.assertIn("moectl training recover", error.details())
            self.assertEqual(refusal(client.save, "new", 30)[0], answer)
            with wire.open_channel(g.address) as channel:
                wait_until(lambda: "slot-00001.safetensors" in str(wire.get_status(channel)))
            moectl("training", "recover", "first", "--endpoint", g.endpoints[0])
            g.wait_serving(epoch)
            state = client.state()
            self.assertEqual((state.checkpoint, state.steps, state.problem), ("first", 1, ""))
            with wire.open_channel(g.address) as channel:
                self.assertNotIn("slot-00001.safetensors", str(wire.get_status(channel)))
            self.assertEqual(client.ask(), first)
            # A recovery applies once: the next time the group takes the last checkpoint again.
            client.save("third", 35)
            shutil.rmtree(os.path.join(self.root, "third"))
            epoch, problem = self.lose_a_worker(g, client)
            self.assertIn("checkpoint third: no such checkpoint", problem)
            moectl("training", "recover-model", "--endpoint", g.endpoints[1])
            g.wait_serving(epoch)
            state = client.state()
            self.assertEqual((state.checkpoint, state.steps, state.problem), ("", 0, ""))

    # ------------------------------------------------------------------- messages

    def test_a_replacement_that_does_not_train_is_refused_with_the_reason(self):
        with training_group(FAMILY, 2) as g:
            g.kill_worker(1)
            wait_until(lambda: g.info().epoch == 0)
            g.start_worker(1, "--training", "off")
            with wire.open_channel(g.address) as channel:
                wait_until(lambda: "without --training" in str(wire.get_status(channel)))
                print([w for w in str(wire.get_status(channel)).splitlines() if "--training" in w])

    def test_an_adapter_is_not_a_checkpoint(self):
        with training_group("qwen3_moe", 1, "--training-dir", self.root, *LORA) as g:
            client = Client(g)
            client.call("ExportAdapter", training.ExportAdapterRequest(step_id=1, name="adapter"))
            answer, error = refusal(client.load, "adapter", 2)
            self.assertEqual(answer, ("FAILED_PRECONDITION", "UNSUPPORTED"))
            self.assertIn("adapter exported for PEFT, not a checkpoint", error.details())
            os.mkdir(os.path.join(self.root, "empty"))
            answer, error = refusal(client.load, "empty", 3)
            self.assertEqual(answer, ("FAILED_PRECONDITION", "CHECKPOINT_NOT_FOUND"))
            self.assertIn("manifest.json", error.details())

    def test_an_operators_save_writes_the_state_that_he_saw_or_none(self):
        with self.group(2) as g:
            client = Client(g)
            client.train(1)
            client.save("first", 15)
            for step in (2, 3):
                client.train(step)
            epoch = g.info().epoch
            self.close_gate()
            with concurrent.futures.ThreadPoolExecutor(1) as thread:
                save = thread.submit(moectl, "training", "save", "k5", "--endpoint",
                                     g.endpoints[0], check=False)
                wait_until(lambda: self.saving(g) == {"k5"})
                g.kill_worker(1)
                g.start_worker(1)
                g.wait_serving(epoch)
                done = save.result()
            self.open_gate()
            print("   ", done.stderr.strip())
            self.assertEqual((done.returncode, done.stdout), (7, ""))
            self.assertIn("the group went back to checkpoint first (", done.stderr)
            self.assertIn("it had 3 steps and has 1", done.stderr)
            self.assertNotIn("k5", self.names())
            wait_until(lambda: self.saving(g) == {""})
            done = moectl("training", "save", "k5", "--endpoint", g.endpoints[0])
            self.assertIn("saved k5: 1 step, ", done.stdout)

    def test_a_load_reports_the_steps_that_it_discards(self):
        with self.group(2) as g:
            client, here = Client(g), ("--endpoint", g.endpoints[1])
            client.train(1)
            client.save("one", 15)
            for step in (2, 3):
                client.train(step)
            client.backward(client.layer,
                            client.dy,
                            client.x,
                            client.forward(client.layer, client.x),
                            batch=40)
            done = moectl("training", "load", "one", *here)
            self.assertIn("loaded one: 1 step, ", done.stdout)
            self.assertIn("2 unsaved optimizer steps were discarded", done.stderr)
            self.assertIn("the gradients of 1 Backward call were discarded", done.stderr)
            done = moectl("training", "load", "one", "-o", "json", *here)
            self.assertEqual((done.stderr, json.loads(done.stdout)["lostSteps"]), ("", "0"))
            client.train(4)
            answer = client.load("one", 50)
            self.assertEqual((answer.steps, answer.lost_steps, answer.lost_backwards), (1, 1, 0))
            again = client.load("one", 50)
            self.assertEqual((again.repeated, again.lost_steps), (True, 1))

    def test_a_repeated_load_with_a_lineage_is_answered(self):
        """A load ends the lineage that it names. If its answer is lost, a repeat must still
        work."""
        with self.group(2) as g:
            client = Client(g)
            client.train(1)
            client.save("one", 15)
            client.train(2)
            before = client.state().lineage
            for endpoint in g.endpoints:
                with moed.Client(endpoint, timeout=30) as python:
                    answer = python.load_checkpoint("one", step_id=50, session="mine",
                                                    lineage=before)
                    self.assertEqual(answer.repeated, endpoint != g.endpoints[0])
                    self.assertEqual((answer.lineage > before, answer.lost_steps), (True, 1))
            with moed.Client(g.endpoints[1], timeout=30) as python:
                with self.assertRaises(moed.MoeError) as caught:
                    python.load_checkpoint("one", step_id=51, session="mine", lineage=before)
                self.assertEqual(caught.exception.reason, "STATE_LOST")
                python.load_checkpoint("one", step_id=52, session="mine")
                with self.assertRaises(moed.MoeError) as caught:  # that state is lost too
                    python.load_checkpoint("one", step_id=50, session="mine", lineage=before)
                self.assertEqual(caught.exception.reason, "STATE_LOST")

    def test_the_highest_id_does_not_block_other_sessions(self):
        with training_group(FAMILY, 1) as g:
            client = Client(g)
            for step in (2 ** 63, 2 ** 64 - 1):
                self.assertEqual(refusal(client.optimizer_step, step=step)[0],
                                 ("INVALID_ARGUMENT", "VALUE_INVALID"))
                self.assertEqual(
                    refusal(client.backward, client.layer, client.dy, batch=step)[0],
                    ("INVALID_ARGUMENT", "VALUE_INVALID"))
            moectl("training", "zero-grad", "--endpoint", g.endpoints[0])
            self.assertEqual(client.state().last_step_id, 1)
            client.optimizer_step(step=2 ** 63 - 1)
            done = moectl("training", "zero-grad", "--endpoint", g.endpoints[0], check=False)
            self.assertIn("--step-id", done.stderr)
            moectl("training", "zero-grad", "--step-id", "7", "--endpoint", g.endpoints[0])

    def test_the_next_save_removes_leftovers_of_a_crash(self):
        for left in (".old.saving", ".old.removed", ".older.removed",
                     ".new.0123456789abcdef.saving"):
            os.makedirs(os.path.join(self.root, left, "optimizer"))
        os.mkdir(os.path.join(self.root, ".notes"))
        with self.group(1) as g:
            Client(g).save("new", 1)
        self.assertEqual(self.names(), [".notes", "new"])


if __name__ == "__main__":
    main()
