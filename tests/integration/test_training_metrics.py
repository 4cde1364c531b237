# SPDX-License-Identifier: Apache-2.0
"""Reports of a group that trains: its checkpoints, log lines, /metrics."""

import contextlib
import json
import os
import re
import shutil
import tempfile
import threading
import time
import unittest
import urllib.request

import numpy as np

from group import BUILD, main, moectl, wait_until
import moed
from ports import free_ports
from test_checkpoints import Client, LORA
import training as daemons
from training import TrainingGroup, refusal, training_group
import wire

FAMILY = "deepseek_v3"


class MetricsCase(unittest.TestCase):
    def setUp(self):
        self.root = tempfile.mkdtemp(prefix="moed-test-")
        self.addCleanup(shutil.rmtree, self.root, ignore_errors=True)

    def path(self, *names):
        return os.path.join(self.root, *names)

    def group(self, workers, *extra, **options):
        return training_group(FAMILY, workers, "--training-dir", self.root, *extra, **options)


class Listing(MetricsCase):
    def test_checkpoints_are_listed_newest_first(self):
        begin = int(time.time())
        with self.group(2) as g:
            client = Client(g)
            for number in (1, 2):
                client.train(number)
                client.save("k%d" % number, 10 * number + 5)
            client.train(3)
            with moed.Client(g.endpoints[1]) as python:  # any worker
                listed = python.list_checkpoints()
            self.assertEqual([c.name for c in listed], ["k2", "k1"])
            second, first = listed
            self.assertEqual((second.steps, first.steps), (2, 1))
            self.assertEqual((second.parent, first.parent), ("k1", ""))
            self.assertEqual((second.weights_version, first.weights_version), (3, 2))
            self.assertEqual((second.optimizer, second.lora_rank, second.frozen, second.problem),
                             ("adamw", 0, frozenset(), ""))
            self.assertEqual(second.lineage, client.state().lineage)
            for c in listed:
                self.assertTrue(c.readable)
                self.assertTrue(begin <= c.made_s <= time.time(), c.made_s)
                size = sum(os.path.getsize(os.path.join(folder, name))
                           for folder, _, names in os.walk(self.path(c.name)) for name in names)
                self.assertEqual(c.bytes, size)
            with moed.Client(g.endpoints[0]) as python:
                self.assertEqual(python.list_checkpoints(limit=1), [second])
            table = moectl("training", "list", "--endpoint", g.endpoints[0]).stdout
            print(table)
            self.assertRegex(
                table, r"(?m)^\* k2 +2 +3 +20\d\d-\d\d-\d\dT\d\d:\d\d:\d\dZ +[\d.]+ MiB "
                r" k1 +ADAMW$")
            self.assertRegex(table, r"(?m)^  k1 +1 ")
            document = json.loads(moectl("training", "list", "-o", "json", "--endpoint",
                                         g.endpoints[0]).stdout)
            self.assertEqual((document["kind"], document["count"], document["checkpoint"]),
                             ("Checkpoints", 2, "k2"))
            self.assertEqual(document["checkpoints"][1]["name"], "k1")
            self.assertEqual(document["checkpoints"][0]["madeS"], str(second.made_s))
            client.close()

    def test_checkpoints_that_cannot_be_loaded_are_listed_with_a_reason(self):
        """Links are not followed. Files, hidden names and invalid names are not listed."""
        outside = tempfile.mkdtemp(prefix="moed-test-")
        self.addCleanup(shutil.rmtree, outside, ignore_errors=True)
        with self.group(1) as g:
            client = Client(g)
            client.save("good", 1)
            client.close()
            for name in ("damaged", "lost", "cut", "grown", "unlisted"):
                shutil.copytree(self.path("good"), self.path(name))
            with open(self.path("damaged", "manifest.json"), "r+") as file:
                text = file.read().replace('"steps": 0', '"steps": 7')
                file.seek(0)
                file.write(text)
            os.remove(self.path("lost", "optimizer", "slot-00000.safetensors"))
            cut = self.path("cut", "model.safetensors")
            size = os.path.getsize(cut)
            os.truncate(cut, size - 1)
            with open(self.path("grown", "optimizer", "records.bin"), "ab") as file:
                file.write(b"x")
            with open(self.path("grown", "notes.txt"), "w") as file:
                file.write("mine")
            with open(self.path("good", "generation_config.json"), "a") as file:
                file.write("\n")  # Load does not read it
            os.rename(self.path("unlisted"), self.path("not a name"))
            shutil.copytree(self.path("good"), os.path.join(outside, "good"))
            os.symlink(os.path.join(outside, "good"), self.path("link"))
            os.mkdir(self.path("empty"))
            os.mkdir(self.path(".hidden"))
            with open(self.path("notes.txt"), "w") as file:
                file.write("mine")
            with moed.Client(g.endpoints[0]) as python:
                listed = {c.name: c for c in python.list_checkpoints()}
            for c in listed.values():
                print("%-8s %s" % (c.name, c.problem))
            self.assertEqual(set(listed),
                             {"good", "damaged", "lost", "cut", "grown", "link", "empty"})
            self.assertEqual(listed["good"].problem, "")
            self.assertIn("manifest.json is damaged", listed["damaged"].problem)
            self.assertEqual(listed["lost"].problem,
                             "damaged: optimizer/slot-00000.safetensors: it is missing")
            self.assertEqual(listed["cut"].problem, "damaged: model.safetensors: "
                             "it has %d bytes instead of %d" % (size - 1, size))
            self.assertIn("damaged: optimizer/records.bin: it has", listed["grown"].problem)
            self.assertIn("link", listed["link"].problem)
            self.assertIn("no manifest.json", listed["empty"].problem)
            self.assertEqual({c.name for c in listed.values() if c.readable},
                             {"good", "lost", "cut", "grown"})
            self.assertEqual({c.bytes for c in listed.values() if not c.readable}, {0})
            table = moectl("training", "list", "--endpoint", g.endpoints[0]).stdout
            self.assertRegex(table, r"(?m)^  link +link is a symbolic link")
            self.assertRegex(table, r"(?m)^  cut .*damaged: model\.safetensors: ")

    def test_without_a_training_directory_there_is_nothing_to_list(self):
        with training_group(FAMILY, 1) as g:
            with moed.Client(g.endpoints[0]) as python:
                with self.assertRaises(moed.MoeError) as caught:
                    python.list_checkpoints()
            self.assertEqual(caught.exception.reason, "UNSUPPORTED")
            done = moectl("training", "list", "--endpoint", g.endpoints[0], check=False)
            self.assertEqual((done.returncode, done.stdout), (7, ""))
            self.assertIn("--training-dir", done.stderr)

    def test_differing_settings_are_named_on_both_sides(self):
        """As options, so that an operator can start the workers with them."""
        with self.group(1, *LORA, "--freeze", "router") as g:
            Client(g).save("lora", 1)
            with moed.Client(g.endpoints[0]) as python:
                self.assertEqual(python.train_state().lora_scale, 2)
            state = json.loads(
                moectl("training", "-o", "json", "--endpoint", g.endpoints[0]).stdout)
            self.assertEqual((state["loraRank"], state["loraAlpha"], state["loraScale"]), (4, 8, 2))
        lora = "--lora-rank 4 --lora-alpha 8 --lora-targets gate,up,down"
        for extra, made, run in (
                (("--training", "sgd", *LORA, "--freeze", "router"), "--training adamw",
                 "--training sgd"),
                (("--freeze", "router"), lora, "no --lora-rank"),
                ((*LORA[:3], "2", *LORA[4:], "--freeze", "router"), lora,
                 lora.replace("alpha 8", "alpha 2")),
                (LORA, "--freeze router", "no --freeze")):
            with self.group(1, *extra) as g:
                with moed.Client(g.endpoints[0]) as python:
                    listed = python.list_checkpoints()[0]
                    with self.assertRaises(moed.MoeError) as caught:
                        python.load_checkpoint("lora", step_id=1)
            text = "made with %s; these workers run with %s" % (made, run)
            self.assertEqual(listed.problem, text)
            self.assertTrue(listed.readable)
            self.assertEqual((listed.lora_rank, listed.lora_alpha, listed.lora_targets),
                             (4, 8, ("gate", "up", "down")))
            self.assertEqual(caught.exception.reason, "VERSION_MISMATCH")
            self.assertEqual(caught.exception.message, "checkpoint lora: " + text)


@contextlib.contextmanager
def logged(path):
    """Daemons that start meanwhile log to `path`, at level info."""
    file, popen = open(path, "w"), daemons.subprocess.Popen
    before = os.environ.get("MOE_TEST_LOG")
    os.environ["MOE_TEST_LOG"] = "info"
    daemons.subprocess.Popen = lambda *a, **k: popen(*a, stderr=file, **k)
    try:
        yield
    finally:
        daemons.subprocess.Popen = popen
        os.environ.pop("MOE_TEST_LOG")
        if before is not None:
            os.environ["MOE_TEST_LOG"] = before
        file.close()


class Stopped(TrainingGroup):
    """A group that does not train."""

    def close(self):
        self.stop()


class LogAndSeries(MetricsCase):
    def lines(self):
        """Lines of the log about training."""
        with open(self.log) as file:
            lines = [line.split(": ", 1)[1].strip() for line in file if ": " in line]
        return [line for line in lines
                if re.match(r"trains: |checkpoint |optimizer step |training went back", line)]

    def series(self, port):
        page = urllib.request.urlopen("http://127.0.0.1:%d/metrics" % port).read().decode()
        return {name: float(value) for name, value in re.findall(r"^(moe_\S+) (\S+)$", page,
                                                                 re.MULTILINE)}

    def setUp(self):
        MetricsCase.setUp(self)
        folder = tempfile.mkdtemp(prefix="moed-test-")
        self.addCleanup(shutil.rmtree, folder, ignore_errors=True)
        self.log = os.path.join(folder, "log")

    def test_logs_and_metrics_report_training(self):
        """One worker: settings, a Save, one that fails, a Load, a step that was skipped."""
        port, = free_ports(1)  # for /metrics
        with logged(self.log), self.group(1, *LORA, "--freeze", "router", "--metrics-listen",
                                          "127.0.0.1:%d" % port) as g:
            client = Client(g)
            client.train(1)
            self.assertEqual(self.series(port)["moe_train_unsaved_steps"], 1)
            client.save("k1", 15)
            self.assertEqual(self.series(port)["moe_train_unsaved_steps"], 0)
            self.assertEqual(refusal(client.save, "k1", 16)[0],
                             ("ALREADY_EXISTS", "CHECKPOINT_EXISTS"))
            client.train(2)
            client.load("k1", 25)
            self.assertEqual(refusal(client.load, "none", 26)[0][0], "NOT_FOUND")
            routing = client.forward(client.layer, client.x)
            client.backward(client.layer, client.dy * np.float32(np.inf), client.x, routing,
                            batch=900)
            self.assertTrue(client.optimizer_step(step=30).skipped_nonfinite)
            client.save("k2", 40)
            client.save("k3", 41, keep=1)  # k1 was loaded, and stays
            value = self.series(port)
            client.close()
        lines = self.lines()
        print("\n".join(lines))
        number = r"[0-9]+"
        seconds, size = r"[0-9.]+ s", r"[0-9.]+ MiB"
        wanted = [
            r"trains: --training adamw, --lora-rank 4 --lora-alpha 8 --lora-targets gate,up,down, "
            r"--freeze router; checkpoints below %s" % re.escape(self.root),
            r"checkpoint k1: saving begins, of the state after step 1, weights version 2",
            r"checkpoint k1: saved in %s, %s by all workers" % (seconds, size),
            r"checkpoint k1: saving begins, of the state after step 1, weights version 2",
            r"checkpoint k1: not saved, after %s: checkpoint k1 exists already" % seconds,
            r"checkpoint k1: loading begins: its files are checked first",
            r"checkpoint k1: loaded in %s, %s checked by this worker; lineage %s, "
            r"weights version %s; "
            r"steps that no checkpoint had and that are lost: 1" % (seconds, size, number, number),
            r"checkpoint none: loading begins: its files are checked first",
            r"checkpoint none: not loaded, after %s: checkpoint none: no such checkpoint" % seconds,
            r"optimizer step 30 was skipped: a gradient was not finite \(1 skipped "
            r"since this worker "
            r"started\)",
            r"checkpoint k2: saving begins, of the state after step 1, weights version %s" % number,
            r"checkpoint k2: saved in %s, %s by all workers" % (seconds, size),
            r"checkpoint k3: saving begins, of the state after step 1, weights version %s" % number,
            r"checkpoint k2: removed, because the Save of k3 keeps 1",
            r"checkpoint k3: saved in %s, %s by all workers" % (seconds, size),
        ]
        self.assertEqual(len(lines), len(wanted))
        for line, pattern in zip(lines, wanted):
            self.assertRegex(line, "^%s$" % pattern)
        self.assertEqual(value['moe_train_checkpoint_seconds_count{kind="save"}'], 3)
        self.assertGreater(value['moe_train_checkpoint_seconds_sum{kind="save"}'], 0)
        self.assertEqual(value['moe_train_checkpoint_seconds_count{kind="load"}'], 1)
        self.assertEqual(value['moe_train_checkpoint_failures_total{kind="save"}'], 1)
        self.assertEqual(value['moe_train_checkpoint_failures_total{kind="load"}'], 1)
        self.assertEqual((value["moe_train_steps_total"], value["moe_train_skipped_steps_total"],
                          value["moe_train_step_seconds_count"]), (2, 1, 3))
        self.assertGreater(value["moe_train_step_seconds_sum"], 0)
        for rpc, code, count in (("Backward", "OK", 5), ("OptimizerStep", "OK", 3),
                                 ("SaveCheckpoint", "OK", 3), ("SaveCheckpoint", "ALREADY_EXISTS",
                                                               1), ("LoadCheckpoint", "OK", 1),
                                 ("LoadCheckpoint", "NOT_FOUND", 1), ("ZeroGrad", "OK", 0)):
            self.assertEqual(value['moe_requests_total{rpc="%s",code="%s"}' % (rpc, code)], count,
                             (rpc, code))
        self.assertEqual(value['moe_request_seconds_count{rpc="Backward"}'], 5)

    def test_logs_report_the_number_of_lost_steps(self):
        """The remaining workers log it, and so does the new one."""
        port, = free_ports(1)  # for /metrics
        with logged(self.log):
            with self.group(2, "--metrics-listen", "127.0.0.1:0") as g:
                client = Client(g)
                client.train(1)
                client.save("k1", 15)
                client.train(2)
                client.train(3)
                epoch = g.info().epoch
                g.kill_worker(1)
                g.start_worker(1, "--metrics-listen", "127.0.0.1:%d" % port)
                g.wait_serving(epoch)
                self.assertEqual(client.state().steps, 1)
                value = self.series(port)
                client.close()
        back = [line for line in self.lines() if line.startswith("training went back")]
        print("\n".join(back))
        self.assertEqual(len(back), 2)
        for line in back:
            self.assertRegex(
                line, "^training went back to checkpoint k1: 2 optimizer steps that no "
                "checkpoint had are lost; lineage [0-9]+, version 5$")
        self.assertEqual((value["moe_train_lost_steps_total"], value["moe_train_unsaved_steps"]),
                         (2, 0))

    def test_a_worker_that_leaves_logs_the_steps_that_no_checkpoint_has(self):
        for steps, wanted in ((0, []), (1, ["1 optimizer step is in no checkpoint and is lost as "
                                            "this worker leaves"]),
                              (2, ["2 optimizer steps are in no checkpoint and are lost as this "
                                   "worker leaves"])):
            with logged(self.log):
                with self.group(1) as g:
                    client = Client(g)
                    client.train(1)
                    client.save("k%d" % steps, 15)
                    for step in range(steps):
                        client.train(2 + step)
                    client.close()
            with open(self.log) as file:
                lines = [line.strip() for line in file if "in no checkpoint" in line]
            print("\n".join(lines))
            self.assertEqual([line.split(": ", 1)[1] for line in lines], wanted)
            self.assertTrue(all("WARN" in line.upper() for line in lines))

    def test_a_group_that_does_not_train_has_no_training_metrics(self):
        port, = free_ports(1)  # for /metrics
        with contextlib.closing(Stopped(FAMILY, 1, "--metrics-listen", "127.0.0.1:%d" % port)):
            names = self.series(port)
        self.assertIn('moe_requests_total{rpc="Forward",code="OK"}', names)
        self.assertEqual([n for n in names if "train" in n or "Backward" in n], [])


class Ends(MetricsCase):
    def test_down_does_not_report_steps_of_a_running_save_as_lost(self):
        gate = self.path(".gate")
        open(gate, "w").close()
        environment = {"LD_PRELOAD": os.path.join(BUILD, "tests", "integration",
                                                  "libgated_fsync.so"), "MOE_TEST_GATE": gate,
                       "ASAN_OPTIONS": os.environ.get("ASAN_OPTIONS", "") +
                       ":verify_asan_link_order=0"}
        with self.group(1, environment=environment) as g:
            client = Client(g)
            client.train(1)
            save = threading.Thread(target=client.save, args=("k1", 15))
            save.start()
            with moed.Client(g.endpoints[0]) as python:
                wait_until(lambda: python.train_state().saving == "k1")
            done = []
            down = threading.Thread(target=lambda: done.append(
                moectl("down", "--endpoint", g.endpoints[0], check=False)))
            down.start()
            with wire.open_channel(g.address) as channel:  # a probe, then the call
                wait_until(lambda: wire.get_status(channel).state ==
                           wire.admin.GROUP_STATE_DRAINING)
            os.remove(gate)
            down.join()
            save.join()
            print(done[0].stderr)
            self.assertEqual(done[0].returncode, 0)
            self.assertIn("checkpoint k1 is being written: if that fails, 1 optimizer step "
                          "since the model was loaded is lost", done[0].stderr)
            self.assertNotIn("not saved", done[0].stderr)
        self.assertIn("manifest.json", os.listdir(self.path("k1")))


class Refused(MetricsCase):
    def refused(self, *extra):
        with self.assertRaises(RuntimeError):
            with logged(self.path("log")), self.group(1, *extra):
                pass
        with open(self.path("log")) as file:
            return file.read()

    def test_invalid_settings_name_valid_ones(self):
        for extra, text in (
                (("--lora-rank", "500"), "--lora-rank must be 48 at most with this model"),
                (("--lora-rank", "4", "--lora-alpha", "0"), "--lora-alpha must be above 0"),
                (("--freeze", "router,experts,shared"), "--freeze must leave something to learn"),
                (("--training-share", "1"), "--training-share must be from 0.01 to 0.99"),
                (("--max-tokens-per-step", "100"), "--max-tokens-per-step must be a power of two")):
            said = self.refused(*extra)
            self.assertIn(text, said)


if __name__ == "__main__":
    main()
