# SPDX-License-Identifier: Apache-2.0
"""Checkpoints on a slow file system: calls during a Save or Load, cancelled Saves, and files of
Saves that were not recorded. No test depends on timing: the disk waits for the test
(gated_fsync.c)."""

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import tempfile
import urllib.request

import grpc

from group import MOECTL, freeze, main, model_directory, moectl, wait_until
from saves import Background, Client, FAMILY, LORA, Saves
from training import Trainer, golden_gradients, refusal
import wire
from wire import training

SOON_S = 4  # of a call that is to end early: a slow machine begins it long before


class Saving(Saves):
    # ---------------------------------------------------------------------- during a Save

    def end_view_under(self, save, g, client, epoch):
        """Stops worker 1 for longer than the others wait: the view ends, and the Save fails."""
        freeze(g.workers[1].pid)
        try:
            Background(client.ask)
            save.thread.join()
            self.assertEqual((save.error.code(), wire.error_reason(save.error)[0]),
                             (grpc.StatusCode.UNAVAILABLE, "REFORMING"))
        finally:
            g.workers[1].send_signal(signal.SIGCONT)
        g.wait_serving(epoch)

    def everything_goes_on(self, workers, *extra):
        with self.group(workers, *extra) as g:
            client, other = Client(g), Client(g, workers - 1)
            client.train(1)
            before = client.state()
            self.close_gate()
            save = Background(Client(g).save, "slow", 15)
            wait_until(lambda: self.saving(g) == {"slow"})
            # The id of a change that runs is not reported as free.
            self.assertEqual({client.state().last_step_id, other.state().last_step_id}, {15})
            self.moectl(g, 7, "one at a time (slow)", "save", "more")
            self.moectl(g, 7, "one at a time (slow)", "load", "more")
            self.moectl(g, 0, "router      learns", "freeze", "none")
            self.moectl(g, 0, "discarded", "zero-grad")
            for _ in range(50):
                client.ask()
                other.ask()
            undisturbed = client.train(2)
            # One Save at a time; a repeat of the first waits with it.
            for answer in (refusal(other.save, "more", 18), refusal(client.load, "slow", 19)):
                self.assertEqual(answer[0], ("FAILED_PRECONDITION", "SAVE_RUNNING"))
            self.assertEqual(refusal(other.save, "more", 15)[0], ("ALREADY_EXISTS", "ID_REUSED"))
            self.assertEqual(refusal(other.optimizer_step, step=15)[0],
                             ("ALREADY_EXISTS", "ID_REUSED"))
            again = Background(Client(g, workers - 1).save, "slow", 15)
            self.assertEqual(self.saving(g), {"slow"})
            self.assertEqual((client.state().steps, client.state().checkpoint), (2, ""))
            self.assertNotIn("slow", self.names())
            self.open_gate()
            saved = save.result()
            self.assertEqual(again.result().weights_version, saved.weights_version)
            # It has the state of the moment in which it began.
            self.assertEqual(saved.weights_version, before.weights_version)
            wait_until(lambda: self.saving(g) == {""})  # the other workers learn it a moment later
            self.assertEqual(client.state().checkpoint, "slow")
            self.assertEqual(self.names(), ["slow"])
            self.assertTrue(client.save("slow", 15).repeated)
            self.assertEqual(client.state().unsaved_steps, 1)  # made during the Save
            client.load("slow", 30)
            self.assertEqual(client.state().steps, before.steps)
            self.assertEqual(client.state().unsaved_steps, 0)
            self.assertEqual(client.train(2), undisturbed)
        shutil.rmtree(os.path.join(self.root, "slow"))

    def test_forward_and_training_go_on_while_a_checkpoint_is_written(self):
        for workers in (1, 2, 4):
            self.everything_goes_on(workers)

    def test_the_same_with_adapters(self):
        self.everything_goes_on(2, *LORA)

    # ------------------------------------------------------------------ during the copy

    def steps_go_on_during_the_copy(self, workers, *extra):
        with self.group(workers, *extra) as g:
            client, other = Client(g), Client(g, workers - 1)
            client.train(1)
            before, seen = client.state(), client.ask()
            self.close_gate(".copy")
            save = Background(Client(g).save, "slow", 15)
            wait_until(lambda: self.saving(g) == {"slow"})
            for _ in range(20):
                self.assertEqual((client.ask(), other.ask()), (seen, seen))
            routing = client.forward(client.layer, client.x, retain=7)
            dx = other.backward(client.layer, client.dy, client.x, routing, batch=2).dx
            # A step waits, and so do Backward calls after it; other calls do not wait for them.
            step = Background(Client(g).optimizer_step, step=20, expected_backwards=1)
            step.thread.join(0.2)
            late = Background(other.backward, client.layer, client.dy, client.x, routing, batch=3)
            for _ in range(20):
                self.assertEqual((client.ask(), other.ask()), (seen, seen))
            client.forward(client.layer, client.x, retain=8)
            self.assertEqual(refusal(other.save, "more", 18)[0],
                             ("FAILED_PRECONDITION", "SAVE_RUNNING"))
            again = Background(other.save, "slow", 15)
            again.thread.join(0.2)
            self.assertTrue(all(b.thread.is_alive() for b in (save, step, late, again)))
            self.assertEqual((client.state().steps, self.names()), (1, []))
            self.open_gate(".copy")
            self.assertEqual(save.result().weights_version, before.weights_version)
            self.assertEqual(again.result().weights_version, before.weights_version)
            moved = step.result()
            self.assertEqual((moved.steps, moved.backwards), (2, 1))
            self.assertGreater(late.result().weights_version, before.weights_version)
            after = client.ask()
            self.assertNotEqual(after, seen)
            # It has the state before the step; repeating the step gives the same bits.
            client.load("slow", 30)
            self.assertEqual((client.state().steps, client.ask()), (1, seen))
            back = client.backward(client.layer, client.dy, client.x, routing, batch=4)
            self.assertEqual(back.dx, dx)
            twice = client.optimizer_step(step=40, expected_backwards=1)
            self.assertEqual((twice.grad_norm, client.ask()), (moved.grad_norm, after))
        shutil.rmtree(os.path.join(self.root, "slow"))

    def test_forward_and_backward_go_on_while_the_state_is_copied(self):
        for workers in (1, 2, 4):
            self.steps_go_on_during_the_copy(workers)

    def test_the_same_with_adapters_while_their_state_is_copied(self):
        self.steps_go_on_during_the_copy(2, *LORA)

    def test_a_save_cancelled_during_its_copy_releases_the_next_step(self):
        with self.group(2) as g:
            client = Client(g, 1)
            client.train(1)
            self.close_gate(".copy")
            save = Background(client.save, "late", 15, timeout=SOON_S)
            wait_until(lambda: self.saving(g) == {"late"})
            step = Background(Client(g).optimizer_step, step=20)
            save.thread.join()
            self.assertEqual(save.error.code(), grpc.StatusCode.DEADLINE_EXCEEDED)
            self.assertTrue(step.thread.is_alive())
            self.open_gate(".copy")
            self.assertEqual(step.result().steps, 2)
            wait_until(lambda: self.saving(g) == {""})
            self.assertEqual((self.names(), client.state().checkpoint), ([], ""))

    def test_a_worker_that_leaves_while_the_state_is_copied_waits_for_it(self):
        with self.group(2) as g:
            client = Client(g)
            client.train(1)
            self.close_gate(".copy")
            save = Background(Client(g).save, "last", 15)
            wait_until(lambda: self.saving(g) == {"last"})
            step = Background(Client(g).optimizer_step, step=20)
            step.thread.join(0.2)
            g.workers[0].terminate()  # the worker that got the call
            with wire.open_channel(g.address) as channel:
                wait_until(lambda: wire.get_status(channel).workers[0].state ==
                           wire.admin.WORKER_STATE_DRAINING)
            self.assertIsNone(g.workers[0].poll())
            self.open_gate(".copy")
            self.assertEqual((save.result().weights_version, step.result().steps), (2, 2))
            g.workers[0].wait(timeout=60)
        self.assertEqual(self.names(), ["last"])

    def test_the_group_goes_back_if_a_worker_dies_during_the_copy(self):
        with self.group(2, "--wait-budget-ms", "500") as g:
            client = Client(g)
            client.train(1)
            client.save("first", 15)
            first, undisturbed = client.ask(), client.train(2)
            epoch = g.info().epoch
            self.close_gate(".copy")
            save = Background(Client(g).save, "cut", 25)
            wait_until(lambda: self.saving(g) == {"cut"})
            step = Background(Client(g).optimizer_step, step=30)
            step.thread.join(0.2)
            g.kill_worker(1)
            save.thread.join()
            self.assertEqual(save.error.code(), grpc.StatusCode.UNAVAILABLE)
            self.open_gate(".copy")
            g.start_worker(1, "--wait-budget-ms", "500")
            g.wait_serving(epoch)
            self.assertEqual(step.result().steps, 2)  # it waited for the next view
            client.load("first", 40)
            self.assertEqual((self.names(), client.ask()), (["first"], first))
            self.assertEqual(client.train(2)[1:], undisturbed[1:])

    def test_down_reports_unsaved_steps(self):
        with tempfile.TemporaryDirectory() as folder:
            config, state = os.path.join(folder, "train.conf"), os.path.join(folder, "state")
            os.mkdir(os.path.join(folder, "ckpt"))
            with open(config, "w") as file:
                file.write("training = adamw\ntraining-dir = %s/ckpt\n" % folder)
            for saved, said in ((None, "2 optimizer steps since the model was loaded were not"),
                                ("one", "1 optimizer step since checkpoint one was not saved"),
                                ("all", "")):
                up = moectl("up", "--model", model_directory(FAMILY), "--workers", "2", "--port",
                            "0", "--worker-config", config, "--state-dir", state, "--detach")
                client = Trainer(up.stdout.split()[0])
                layer, x, dy = next((layer, x, dy) for layer, tokens, x, dy, _
                                    in golden_gradients(FAMILY) if tokens == 37)
                for number in (1, 2):
                    client.backward(layer, dy, x, client.forward(layer, x), batch=number)
                    client.optimizer_step(step=10 * number, expected_backwards=1)
                    if saved == ("one" if number == 1 else "all"):
                        moectl("training", "save", saved, "--state-dir", state)
                client.close()
                done = moectl("down", "--state-dir", state)
                self.assertIn(said, done.stderr)
                self.assertEqual("saved" in done.stderr, said != "")
                self.assertEqual("`moectl training load %s`" % saved in done.stderr,
                                 saved is not None)

    def test_a_group_in_the_foreground_reports_unsaved_steps(self):
        """After Ctrl-C, and after the death of a worker."""
        layer, x, dy = next((layer, x, dy) for layer, tokens, x, dy, _
                            in golden_gradients(FAMILY) if tokens == 37)
        with tempfile.TemporaryDirectory() as folder:
            config = os.path.join(folder, "train.conf")
            with open(config, "w") as file:
                file.write("training = adamw\n")
            for end, code in ((signal.SIGINT, 0), (signal.SIGKILL, 1)):
                state = os.path.join(folder, "state-%d" % end)
                up = subprocess.Popen(
                    [MOECTL, "up", "--model", model_directory(FAMILY), "--workers", "2", "--port",
                     "0", "--worker-config", config, "--state-dir", state],
                    stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
                client = Trainer(up.stdout.readline().strip())
                client.backward(layer, dy, x, client.forward(layer, x))
                client.optimizer_step(expected_backwards=1)
                client.close()
                with open(os.path.join(state, "group.json")) as file:
                    first, other = json.load(file)["processes"][1:3]
                client = Trainer(other["endpoint"])
                # It may end the step a little later than the worker that answered.
                wait_until(lambda: client.state().steps == 1)
                client.close()
                os.kill(up.pid if end == signal.SIGINT else first["pid"], end)
                _, said = up.communicate(timeout=60)
                self.assertEqual(up.returncode, code)
                self.assertIn("1 optimizer step since the model was loaded was not saved", said)

    def test_a_save_over_its_time_limit_reports_its_end(self):
        with self.group(2) as g:
            port = self.give_metrics(g)
            Client(g).train(1)
            self.close_gate()
            late = Background(self.moectl, g, 5,
                              "(--timeout 4 s); late is cancelled and has left nothing behind",
                              "save", "late", "--timeout", "4")
            wait_until(lambda: self.saving(g) == {"late"})
            wait_until(lambda: self.ended_saves(port) == 1)  # the worker has cancelled it
            self.open_gate()
            late.result()
            self.assertEqual(self.names(), [])

    def give_metrics(self, g):
        """Restarts worker 1 with a metrics port; returns the port."""
        with socket.socket() as s:  # finds a free port
            s.bind(("127.0.0.1", 0))
            port = s.getsockname()[1]
        epoch = g.info().epoch
        g.kill_worker(1)
        g.start_worker(1, "--metrics-listen", "127.0.0.1:%d" % port)
        g.wait_serving(epoch)
        return port

    def ended_saves(self, port):
        """Number of Saves of that worker that were cancelled or exceeded their time."""
        page = urllib.request.urlopen("http://127.0.0.1:%d/metrics" % port).read().decode()
        return sum(float(count) for count in re.findall(
            r'^moe_requests_total\{rpc="SaveCheckpoint",'
            r'code="(?:CANCELLED|DEADLINE_EXCEEDED)"\} (\S+)$',
            page, re.MULTILINE))

    def test_a_save_has_no_limit_reports_progress_and_ctrl_c_cancels_it(self):
        with self.group(2) as g:
            port = self.give_metrics(g)
            Client(g).train(1)
            for ended in (False, True):
                self.close_gate()
                save = subprocess.Popen(
                    [MOECTL, "training", "save", "slow-%d" % ended, "--endpoint", g.endpoints[1]],
                    stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
                said = save.stderr.readline()
                print("   ", said.strip())
                shown = re.fullmatch(r"moectl: saving slow-%d: (\d+) %%, ([0-9.]+) (\w+) of "
                                     r"([0-9.]+) (\w+)(?:, .*)?\n" % ended, said)
                self.assertIsNotNone(shown, said)
                states = [Client(g, slot).state() for slot in range(2)]
                total = sum(s.progress_bytes_total for s in states)
                units = {"KiB": 1 << 10, "MiB": 1 << 20}
                self.assertAlmostEqual(float(shown.group(4)) * units[shown.group(5)] / total, 1,
                                       delta=0.05)
                for s in states:
                    self.assertTrue(s.progress_bytes <= s.progress_bytes_total, s)
                    self.assertEqual(s.saving, "slow-%d" % ended)
                page = urllib.request.urlopen("http://127.0.0.1:%d/metrics" % port).read().decode()
                for kind, bytes_ in (("done", states[1].progress_bytes),
                                     ("total", states[1].progress_bytes_total)):
                    self.assertIn('moe_train_checkpoint_bytes{kind="%s"} %d\n' % (kind, bytes_),
                                  page)
                if ended:
                    save.send_signal(signal.SIGINT)
                    save.wait()
                    wait_until(lambda: self.ended_saves(port) == 1)  # the worker has cancelled it
                self.open_gate()
                out, _ = save.communicate(timeout=60)
                self.assertEqual("saved slow-%d" % ended in out, not ended)
            wait_until(lambda: self.saving(g) == {""})
            self.assertEqual(self.names(), ["slow-0"])

    def test_progress_ends_at_its_total(self):
        log = os.path.join(self.root, "log")
        for workers in (1, 2, 3):  # as many as have saved it, and more, and fewer
            with self.group(workers, "--log-file", log, "--log-level", "debug") as g:
                client, name = Client(g), "by-%d" % workers
                client.train(1)
                client.save(name, step=20)
                client.load(name, step=30)
                if workers > 1:
                    client.load("by-%d" % (workers - 1), step=40)
                if workers == 1:
                    g.memory = open(self.gate + ".memory.%d" % g.workers[0].pid, "w")
                    g.memory.write("MemAvailable: 0 kB\n")
                    g.memory.close()
                    client.train(5)
                    client.save("without-a-copy", step=60)
                    self.addCleanup(os.remove, g.memory.name)
                client.close()
        with open(log, encoding="utf-8") as file:
            text = file.read()
        self.assertIn("without-a-copy: some worker has no room for a copy", text)
        ends = re.findall(r"checkpoint (\S+): done with (\d+) of (\d+) bytes", text)
        self.assertEqual(len(ends), 2 + 1 + 3 * 2 + 3 * 3, ends)
        for name, done, total in ends:
            self.assertEqual(done, total, name)
            self.assertGreater(int(total), 0, name)

    def test_a_save_is_in_the_status_for_the_service_manager(self):
        manager = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.addCleanup(manager.close)
        manager.bind(self.root + ".notify")
        self.addCleanup(os.remove, self.root + ".notify")
        manager.settimeout(60)

        def receive(text):
            while True:
                said = manager.recv(4096).decode()
                if said.startswith("STATUS=" + text):
                    return said

        with self.group(1, NOTIFY_SOCKET=self.root + ".notify") as g:
            receive("serving under epoch ")
            client = Client(g)
            client.train(1)
            self.close_gate()
            save = Background(client.save, "slow", step=20)
            self.assertRegex(receive("saving checkpoint slow: "),
                             r": \d+ %, [0-9.]+ [KM]iB of [0-9.]+ [KM]iB")
            self.open_gate()
            save.result()
            receive("serving under epoch ")

    def test_a_command_that_waits_names_the_missing_worker(self):
        with self.group(2) as g:
            g.kill_worker(1)
            wait_until(lambda: g.info().epoch == 0)
            done = moectl("training", "zero-grad", "--timeout", "5", "--endpoint", g.endpoints[0],
                          check=False)
            print(done.stderr)
            self.assertEqual(done.returncode, 5)
            self.assertRegex(done.stderr, r"waiting: the group is DEGRADED: .*slot 1")
            # The worker refuses the call as one that the loss ended, or as one that came later.
            self.assertRegex(done.stderr, re.escape(g.endpoints[0]) +
                             ": (the group has lost a worker|no view is in force)")
            self.assertIn("`moectl status` shows more", done.stderr)
            g.start_worker(1)
            g.wait_serving()

    # ------------------------------------------------------------------- no memory for a copy

    def without_memory(self, slots, *extra):
        """The hosts of some slots have no memory for the copy. A micro batch arrives before the
        workers find that out."""
        with self.group(2, *extra) as g:
            client = Client(g)
            client.train(1)
            before = client.state()
            self.close_gate(".copy")
            for slot in slots:
                path = "%s.memory.%d" % (self.gate, g.workers[slot].pid)
                with open(path, "w") as file:
                    file.write("MemTotal: 1000 kB\nMemAvailable: 0 kB\n")
                self.addCleanup(os.remove, path)
            self.close_gate()
            save = Background(Client(g).save, "poor", 15)
            wait_until(lambda: self.saving(g) == {"poor"})
            client.backward(client.layer,
                            client.dy,
                            client.x,
                            client.forward(client.layer, client.x),
                            batch=5)
            self.open_gate(".copy")
            wait_until(lambda: self.hidden("poor"))
            first = client.ask()  # forward passes go on, a step waits
            step = Background(Client(g).optimizer_step, step=17, expected_backwards=1)
            for _ in range(20):
                self.assertEqual(client.ask(), first)
            self.assertTrue(step.thread.is_alive())
            self.open_gate()
            self.assertEqual(save.result().weights_version, before.weights_version)
            norm = step.result().grad_norm
            undisturbed = client.train(2)
            self.assertEqual((self.names(), client.state().checkpoint), (["poor"], "poor"))
            self.assertTrue(client.save("poor", 15).repeated)
            client.load("poor", 30)
            self.assertEqual((client.state().steps, client.ask()), (before.steps, first))
            client.backward(client.layer,
                            client.dy,
                            client.x,
                            client.forward(client.layer, client.x),
                            batch=5)
            self.assertEqual(client.optimizer_step(step=17, expected_backwards=1).grad_norm, norm)
            self.assertEqual(client.train(2), undisturbed)
            client.save("next", 35)
            client.save("last", 36, keep=1)  # the loaded checkpoint stays
            self.assertEqual((self.names(), client.state().checkpoint), (["last", "poor"], "last"))
        for name in ("last", "poor"):
            shutil.rmtree(os.path.join(self.root, name))

    def test_without_memory_for_a_copy_steps_wait_and_forward_passes_do_not(self):
        self.without_memory((0, 1))
        self.without_memory((0,))
        self.without_memory((1,))

    def test_the_same_with_adapters_without_memory(self):
        self.without_memory((1,), *LORA)

    # ------------------------------------------------------------------------ cancelled

    def test_a_save_without_callers_is_cancelled(self):
        with self.group(2) as g:
            client = Client(g, 1)
            client.train(1)
            self.close_gate()
            with self.assertRaises(grpc.RpcError) as caught:
                client.save("late", 15, timeout=SOON_S)
            self.assertEqual(caught.exception.code(), grpc.StatusCode.DEADLINE_EXCEEDED)
            self.open_gate()
            wait_until(lambda: self.saving(g) == {""})
            self.assertEqual((self.names(), client.state().checkpoint), ([], ""))
            client.train(2)
            self.assertFalse(client.save("late", 15).repeated)
            self.assertEqual(self.names(), ["late"])

    def test_a_save_with_one_caller_left_goes_on(self):
        for slot in (0, 1):
            with self.group(2) as g:
                self.close_gate()
                first = Background(Client(g).save, "both", 15, timeout=SOON_S)
                wait_until(lambda: self.saving(g) == {"both"})
                second = Background(Client(g, slot).save, "both", 15)
                first.thread.join()
                self.assertEqual(first.error.code(), grpc.StatusCode.DEADLINE_EXCEEDED)
                self.open_gate()
                self.assertTrue(second.result().repeated)
                self.assertEqual(self.names(), ["both"])
            shutil.rmtree(os.path.join(self.root, "both"))

    def test_a_save_without_callers_at_any_worker_is_cancelled(self):
        with self.group(2) as g:
            self.close_gate()
            calls = [Background(Client(g).save, "late", 15, timeout=SOON_S)]
            wait_until(lambda: self.saving(g) == {"late"})
            calls.append(Background(Client(g, 1).save, "late", 15, timeout=SOON_S + 1))
            for call in calls:
                call.thread.join()
                self.assertEqual(call.error.code(), grpc.StatusCode.DEADLINE_EXCEEDED)
            self.open_gate()
            wait_until(lambda: self.saving(g) == {""})
            self.assertEqual(self.names(), [])

    def test_a_group_that_stops_during_a_save_leaves_nothing(self):
        with self.group(2, "--drain-ms", "300") as g:
            self.close_gate()
            save = Background(Client(g).save, "cut", 15)
            wait_until(lambda: self.saving(g) == {"cut"})
            for worker in g.workers:
                worker.terminate()
            save.thread.join()
            self.assertEqual(save.error.code(), grpc.StatusCode.UNAVAILABLE)
            self.open_gate()
            for worker in g.workers:
                worker.wait(timeout=60)
        self.assertEqual(self.names(), [])

    def test_a_worker_with_a_hung_disk_touches_no_file_of_its_successor(self):
        with self.group(2, "--drain-ms", "300") as g:
            epoch = g.info().epoch
            self.close_gate()
            first = Background(Client(g, 1).save, "cut", 15)  # hangs before slot 1 takes part
            wait_until(lambda: self.hidden("cut"))
            left, old = g.workers[0], self.hidden("cut")
            left.terminate()
            first.thread.join()
            self.assertEqual(first.error.code(), grpc.StatusCode.UNAVAILABLE)
            gate, self.gate = self.gate, self.root + ".gate-of-successor"
            self.addCleanup(lambda: os.path.exists(gate) and os.remove(gate))
            g.environment = {**g.environment, "MOE_TEST_GATE": self.gate}
            g.start_worker(0)
            g.wait_serving(above=epoch)
            self.close_gate()
            second = Background(Client(g, 1).save, "cut", 16)
            # That process lives and may still be writing, so a Save must leave its files.
            wait_until(lambda: len(self.hidden("cut")) == 2)
            mine = [name for name in self.hidden("cut") if name not in old]
            self.assertIsNone(left.poll())
            os.remove(gate)
            left.wait(timeout=60)
            self.assertEqual(self.hidden("cut"), mine)
            self.open_gate()
            second.result()
            self.assertEqual(self.names(), ["cut"])
            Client(g, 1).load("cut", 17)

    def test_an_export_waits_for_the_end_of_a_cancelled_save(self):
        with self.group(2, "--wait-budget-ms", "500", *LORA) as g:
            client = Client(g)
            epoch = g.info().epoch
            self.close_gate()
            save = Background(Client(g).save, "slow", 15)
            wait_until(lambda: self.hidden("slow"))
            self.end_view_under(save, g, client, epoch)
            held = self.hidden("slow")
            self.assertEqual(refusal(self.export, client, "adapters", 16)[0],
                             ("FAILED_PRECONDITION", "SAVE_RUNNING"))
            self.assertEqual((len(held), self.hidden("slow")), (1, held))
            self.open_gate()
            wait_until(lambda: self.exported(client))
            self.assertEqual(self.names(), ["adapters"])

    def export(self, client, name, step):
        return wire.train(client.channel, "ExportAdapter",
                          training.ExportAdapterRequest(step_id=step, name=name))

    def exported(self, client):
        try:
            self.export(client, "adapters", 16)
            return True
        except grpc.RpcError as error:
            self.assertEqual(wire.error_reason(error)[0], "SAVE_RUNNING")
            return False

    # ---------------------------------------------------------------------- not recorded

    def test_a_repeat_finds_a_save_that_lost_its_view_after_the_last_write(self):
        """Slot 1 stops for longer than a step waits, between the rename and the record."""
        with self.group(2, "--wait-budget-ms", "500", of=self.root) as g:
            client = Client(g)
            client.train(1)
            epoch, before = g.info().epoch, client.state()
            self.close_gate()
            save = Background(Client(g).save, "found", 15)
            wait_until(lambda: "found" in self.names())
            self.end_view_under(save, g, client, epoch)
            self.assertEqual((client.state().lineage, client.state().checkpoint),
                             (before.lineage, ""))
            self.assertEqual(refusal(client.save, "other", 16)[0],
                             ("FAILED_PRECONDITION", "SAVE_RUNNING"))  # its thread still runs
            self.open_gate()
            client.train(2)
            wait_until(lambda: self.saved(client))
            state = client.state()
            self.assertEqual((state.checkpoint, state.steps), ("found", 2))
            self.assertTrue(client.save("found", 15).repeated)
            # Another Save under the same name is not a repeat.
            self.assertEqual(refusal(client.save, "found", 40)[0],
                             ("ALREADY_EXISTS", "CHECKPOINT_EXISTS"))
            client.load("found", 41)
            self.assertEqual(client.state().steps, 1)

    def test_retention_leaves_the_checkpoint_of_the_groups_recovery(self):
        """Retention, and a view that ends between the rename and the record."""
        with self.group(2, "--wait-budget-ms", "500", of=self.root) as g:
            client = Client(g)
            client.train(1)
            client.save("first", 15)
            undisturbed = client.train(2)
            epoch = g.info().epoch
            self.close_gate()
            save = Background(Client(g).save, "second", 25, keep=1)
            wait_until(lambda: "second" in self.names())
            self.end_view_under(save, g, client, epoch)
            self.open_gate()
            wait_until(lambda: refusal(client.load, "none", 26)[0][1] == "CHECKPOINT_NOT_FOUND")
            self.assertEqual((self.names(), client.state().checkpoint),
                             (["first", "second"], "first"))
            epoch = g.info().epoch
            g.kill_worker(1)
            g.start_worker(1, "--wait-budget-ms", "500")
            g.wait_serving(epoch)
            self.assertEqual((client.state().checkpoint, client.state().steps), ("first", 1))
            self.assertEqual(client.train(2), undisturbed)
            # A recorded Save lets retention remove it.
            client.save("third", 35, keep=1)
            self.assertEqual((self.names(), client.state().checkpoint), (["third"], "third"))

    def saved(self, client):
        try:
            self.assertEqual(client.save("found", 15).weights_version, 2)
            return True
        except grpc.RpcError as error:
            self.assertEqual(wire.error_reason(error)[0], "SAVE_RUNNING")
            return False


if __name__ == "__main__":
    main()
