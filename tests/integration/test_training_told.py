"""What a group tells of its training: which checkpoints there are, log lines, series of /metrics."""

import json
import os
import shutil
import tempfile
import time
import unittest

from group import main, moectl
import moed
from test_checkpoints import Client, LORA
from training import training_group

FAMILY = "deepseek_v3"


class Told(unittest.TestCase):
    def setUp(self):
        self.root = tempfile.mkdtemp(prefix="moed-told-")
        self.addCleanup(shutil.rmtree, self.root, ignore_errors=True)

    def path(self, *names):
        return os.path.join(self.root, *names)

    def group(self, workers, *extra, **options):
        return training_group(FAMILY, workers, "--training-dir", self.root, *extra, **options)


class Listing(Told):
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
            self.assertRegex(table, r"(?m)^\* k2 +2 +3 +20\d\d-\d\d-\d\dT\d\d:\d\d:\d\dZ +[\d.]+ MiB "
                                    r" k1 +ADAMW$")
            self.assertRegex(table, r"(?m)^  k1 +1 ")
            document = json.loads(moectl("training", "list", "-o", "json", "--endpoint",
                                         g.endpoints[0]).stdout)
            self.assertEqual((document["kind"], document["count"], document["checkpoint"]),
                             ("Checkpoints", 2, "k2"))
            self.assertEqual(document["checkpoints"][1]["name"], "k1")
            self.assertEqual(document["checkpoints"][0]["madeS"], str(second.made_s))
            client.close()

    def test_what_cannot_be_loaded_is_listed_with_its_reason(self):
        """A link leads nowhere; files, hidden names and names that nobody may ask for are not told."""
        outside = tempfile.mkdtemp(prefix="moed-told-")
        self.addCleanup(shutil.rmtree, outside, ignore_errors=True)
        with self.group(1) as g:
            client = Client(g)
            client.save("good", 1)
            client.close()
            for name in ("damaged", "lost", "unlisted"):
                shutil.copytree(self.path("good"), self.path(name))
            with open(self.path("damaged", "manifest.json"), "r+") as file:
                text = file.read().replace('"steps": 0', '"steps": 7')
                file.seek(0)
                file.write(text)
            os.remove(self.path("lost", "optimizer", "slot-00000.safetensors"))
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
            self.assertEqual(set(listed), {"good", "damaged", "lost", "link", "empty"})
            self.assertEqual(listed["good"].problem, "")
            self.assertIn("manifest.json is damaged", listed["damaged"].problem)
            self.assertIn("slot-00000.safetensors is missing", listed["lost"].problem)
            self.assertIn("link", listed["link"].problem)
            self.assertIn("no manifest.json", listed["empty"].problem)
            self.assertEqual({c.name for c in listed.values() if c.readable}, {"good", "lost"})
            self.assertEqual({c.bytes for c in listed.values() if not c.readable}, {0})
            table = moectl("training", "list", "--endpoint", g.endpoints[0]).stdout
            self.assertRegex(table, r"(?m)^  link +it is a link")

    def test_without_a_training_directory_there_is_nothing_to_list(self):
        with training_group(FAMILY, 1) as g:
            with moed.Client(g.endpoints[0]) as python:
                with self.assertRaises(moed.MoeError) as caught:
                    python.list_checkpoints()
            self.assertEqual(caught.exception.reason, "UNSUPPORTED")
            done = moectl("training", "list", "--endpoint", g.endpoints[0], check=False)
            self.assertEqual((done.returncode, done.stdout), (7, ""))
            self.assertIn("--training-dir", done.stderr)

    def test_other_settings_are_named_on_both_sides(self):
        """As options, so that one knows how to start the workers."""
        with self.group(1, *LORA, "--freeze", "router") as g:
            Client(g).save("lora", 1)
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


if __name__ == "__main__":
    main()
