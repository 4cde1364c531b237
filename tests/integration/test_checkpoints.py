# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of training on real daemons: writing, loading, refusals."""

import fcntl
import filecmp
import json
import os
import random
import resource
import shutil
import tempfile
import threading
import time
import unittest

import grpc
import numpy as np

from group import FAMILIES, main, model_directory, moectl, names_in, relative_error
import moed
from training import Trainer, TrainingGroup, golden_gradients, refusal, training_group
import training as daemons
from wire import training

FAMILY = "deepseek_v3"
LORA = ("--lora-rank", "4", "--lora-alpha", "8", "--lora-targets", "gate,up,down")


def case(family=FAMILY):
    return next((layer, x, dy) for layer, tokens, x, dy, _ in golden_gradients(family)
                if tokens == 37)


class Client(Trainer):
    """A training loop. Its step ids begin at 1, also for a group that continues it."""

    def __init__(self, g, family=FAMILY, slot=0):
        Trainer.__init__(self, g.endpoints[slot])
        self.layer, self.x, self.dy = case(family)

    def train(self, number):
        """Runs two micro batches and a step; returns all observable results."""
        seen = []
        for i in range(2):
            x = self.x * (1 + i / 4)
            routing = self.forward(self.layer, x)
            back = self.backward(self.layer, self.dy * (number + i), x, routing,
                                 batch=100 * number + i, aux_coeff=0.01,
                                 return_weight_gradients=True)
            seen += [routing.y_data, back.dx]
        step = self.optimizer_step(step=10 * number, weight_decay=0.1, max_grad_norm=1,
                                   expected_backwards=2, balance_rate=0.001)
        return seen + [step.grad_norm, step.steps, self.forward(self.layer, self.x).y_data]

    def save(self, name, step, keep=0):
        return self.call("SaveCheckpoint", training.SaveCheckpointRequest(
            step_id=step, name=name, keep=keep))

    def load(self, name, step):
        return self.call("LoadCheckpoint", training.LoadCheckpointRequest(step_id=step, name=name))

    def export(self, name, step, merge=False):
        return self.call("ExportAdapter", training.ExportAdapterRequest(
            step_id=step, name=name, merge=merge))


def is_bf16(family):
    with open(os.path.join(model_directory(family), "config.json")) as file:
        return '"bfloat16"' in file.read()


def widened(bf16):
    """F32 of BF16 from read_safetensors."""
    return (bf16.astype(np.uint32) << 16).view(np.float32)


def state_of(checkpoint):
    """All training state of a checkpoint, by name."""
    tensors = {}
    folder = os.path.join(checkpoint, "optimizer")
    for name in sorted(os.listdir(folder)):
        if name.endswith(".safetensors"):
            part = moed.read_safetensors(os.path.join(folder, name))
            assert not set(part) & set(tensors), "a tensor is written once"
            tensors.update(part)
    return tensors


class Checkpoints(unittest.TestCase):
    def setUp(self):
        self.root = tempfile.mkdtemp(prefix="moed-ckpt-")
        self.addCleanup(shutil.rmtree, self.root, ignore_errors=True)

    def path(self, *names):
        return os.path.join(self.root, *names)

    def group(self, workers, *extra, family=FAMILY):
        return training_group(family, workers, "--training-dir", self.root, *extra)

    def model_files(self, family):
        return [n for n in os.listdir(model_directory(family))
                if n.startswith("model") or n.endswith(".json")]

    # ------------------------------------------------------------------ writing

    def test_an_untrained_model_is_written_bit_for_bit(self):
        for i, family in enumerate(FAMILIES):
            with self.group((1, 2, 4)[i % 3], family=family) as g:
                client = Client(g, family)
                client.save(family, 1)
                client.close()
            names = self.model_files(family)
            same, differ, missing = filecmp.cmpfiles(model_directory(family), self.path(family),
                                                     names, shallow=False)
            print("%-13s %s" % (family, same))
            self.assertEqual((sorted(same), differ, missing), (sorted(names), [], []))
        self.assertEqual(names_in(self.root), sorted(FAMILIES))

    def test_the_model_files_have_the_trained_weights(self):
        """A group that serves the checkpoint as its model computes the same as the trained one."""
        for family in (FAMILY, "gpt_oss", "llama4"):
            with self.group(2, family=family) as g:
                client = Client(g, family)
                before = client.forward(client.layer, client.x).y_data
                trained = client.train(1)[-1]
                client.save("trained-" + family, 2)
                client.close()
            self.assertNotEqual(before, trained)
            shape = client.x.shape
            with training_group(self.path("trained-" + family), 1) as g:
                served = Client(g, family).forward(client.layer, client.x).y_data
            error = relative_error(np.frombuffer(served, np.float32).reshape(shape),
                                   np.frombuffer(trained, np.float32).reshape(shape))
            print("%s: %.1e from the trained group" % (family, error))
            # BF16 files round the tensors that workers have in fp32 (router, biases).
            self.assertLessEqual(error, 5e-3 if is_bf16(family) else 1e-6)

    # ------------------------------------------------------------------- loading

    def resumed(self, family, workers, *extra):
        """Saves in the middle, goes on, dies; a new group loads the checkpoint and goes on."""
        with self.group(workers, *extra, family=family) as g:
            client = Client(g, family)
            client.train(1)
            client.train(2)
            saved = client.save("middle", 25)
            undisturbed = client.train(3)
            self.assertGreater(saved.bytes, 0)
            for slot in range(workers):
                g.kill_worker(slot)
        with self.group(workers, *extra, family=family) as g:
            client = Client(g, family)
            client.load("middle", 26)
            self.assertEqual(client.state().steps, 2)
            self.assertEqual(client.state().checkpoint, "middle")
            # Changes that are recorded in the checkpoint do not run again.
            self.assertTrue(client.save("middle", 25).repeated)
            self.assertEqual(client.train(3), undisturbed)
        shutil.rmtree(self.path("middle"))

    def test_the_step_after_a_restart_equals_the_undisturbed_one(self):
        for workers in (1, 2):
            self.resumed(FAMILY, workers)
        self.resumed("gpt_oss", 2)
        self.resumed("qwen2_moe", 2)

    def test_the_step_after_a_restart_of_four_workers(self):
        self.resumed(FAMILY, 4)

    def test_the_same_with_adapters(self):
        self.resumed("qwen3_moe", 2, *LORA)
        self.resumed("gpt_oss", 2, *LORA)

    def taken_by(self, workers):
        for extra in ((), LORA):
            with self.group(2, *extra) as g:
                client = Client(g)
                client.train(1)
                client.train(2)
                client.save("two", 25)
                undisturbed = client.train(3)
            with self.group(workers, *extra) as g:
                client = Client(g)
                client.load("two", 26)
                client.save("again", 27)
                resumed = client.train(3)
            first, second = state_of(self.path("two")), state_of(self.path("again"))
            self.assertEqual(set(first), set(second))
            for name in first:
                self.assertEqual(first[name].tobytes(), second[name].tobytes(), name)
            self.assertEqual(filecmp.cmpfiles(self.path("two"), self.path("again"),
                                              ["model.safetensors"], shallow=False)[1:],
                             ([], []))
            # With another number of slots, sums have another order.
            self.assertAlmostEqual(resumed[-3] / undisturbed[-3], 1, delta=1e-5)
            for got, want in ((resumed[0], undisturbed[0]), (resumed[-1], undisturbed[-1])):
                self.assertLessEqual(relative_error(np.frombuffer(got, np.float32),
                                                    np.frombuffer(want, np.float32)), 1e-5)
            shutil.rmtree(self.path("again"))
            shutil.rmtree(self.path("two"))

    def test_one_worker_loads_a_checkpoint_of_two(self):
        self.taken_by(1)

    def test_four_workers_load_a_checkpoint_of_two(self):
        self.taken_by(4)

    def test_a_group_that_loses_a_worker_goes_back_to_the_checkpoint(self):
        with self.group(2, "--wait-budget-ms", "500") as g:
            client = Client(g)
            client.train(1)
            client.save("one", 15)
            undisturbed = client.train(2)
            lineage = client.state().lineage
            epoch = g.info().epoch
            g.kill_worker(1)
            g.start_worker(1, "--wait-budget-ms", "500")
            g.wait_serving(epoch)
            state = client.state()
            self.assertEqual((state.steps, state.checkpoint), (1, "one"))
            self.assertGreater(state.lineage, lineage)
            self.assertEqual(client.train(2), undisturbed)

    # ------------------------------------------------------------------ names, retention

    def test_retention_leaves_the_newest(self):
        os.mkdir(self.path("notes"))
        with self.group(2) as g:
            client = Client(g)
            for i, name in enumerate(["z", "y", "x", "w"]):
                client.save(name, i + 1)
            answer = client.save("a", 5, keep=2)
            self.assertEqual((list(answer.removed), answer.removed_count), (["x", "y", "z"], 3))
            self.assertEqual(names_in(self.root), ["a", "notes", "w"])
            self.assertEqual(refusal(client.load, "x", 6)[0], ("NOT_FOUND", "CHECKPOINT_NOT_FOUND"))
            client.load("w", 7)
            # Through another worker, and with many checkpoints.
            other = Client(g, slot=1)
            longest = "n%%0%dd" % 63  # names of 64 characters
            for i in range(40):
                self.assertEqual(list(other.save(longest % i, 100 + i).removed), [])
            answer = other.save("last", 200, keep=1)
            self.assertEqual(answer.removed_count, 41)  # all but the loaded one
            self.assertEqual(list(answer.removed), [longest % i for i in range(39, 7, -1)])
            self.assertEqual(names_in(self.root), ["last", "notes", "w"])
            self.assertEqual(other.save("last", 200, keep=1).removed_count, 0)  # a repeat
            done = moectl("training", "save", "m1", "--keep", "1", "--endpoint", g.endpoints[1])
            self.assertIn("removed last\n", done.stdout)
            done = moectl("training", "save", "m2", "--keep", "1", "-o", "json", "--endpoint",
                          g.endpoints[1])
            self.assertEqual(json.loads(done.stdout)["removed"], ["m1"])

    def test_a_checkpoint_that_cannot_be_removed_is_named_and_does_not_stop_retention(self):
        with self.group(1) as g:
            client = Client(g)
            for i, name in enumerate(["z", "y", "x"]):
                client.save(name, i + 1)
            os.makedirs(self.path("y", *["deep"] * 40))  # deeper than the limit of removal
            answer = client.save("a", 4, keep=1)
            self.assertEqual((list(answer.removed), answer.removed_count), (["x", "y", "z"], 3))
            self.assertEqual(names_in(self.root), [".y.removed", "a"])

    def test_retention_leaves_checkpoints_of_other_trainings(self):
        with self.group(1) as g:
            client = Client(g)
            for i, name in enumerate(["full-1", "full-2"]):
                client.save(name, i + 1)
        with self.group(1) as g:  # a new training in the same directory
            client = Client(g)
            client.save("other-1", 1)
            client.save("other-2", 2, keep=1)
            self.assertEqual(names_in(self.root), ["full-1", "full-2", "other-2"])
        with self.group(1) as g:  # continues one of them
            client = Client(g)
            client.load("full-2", 5)
            client.save("full-3", 6, keep=1)
            self.assertEqual(names_in(self.root),
                             ["full-1", "full-2", "full-3", "other-2"])
            client.save("full-4", 7, keep=1)
            self.assertEqual(names_in(self.root),
                             ["full-1", "full-2", "full-4", "other-2"])

    def test_retention_leaves_a_loaded_checkpoint_and_its_parents(self):
        with self.group(2) as g:
            client = Client(g)
            for i, name in enumerate(["one", "two", "three", "four"]):
                client.save(name, i + 1)
            client.load("two", 5)
            self.assertEqual(list(client.save("five", 6, keep=1).removed), ["four", "three"])
            client.load("one", 7)
            self.assertEqual(list(client.save("six", 8, keep=1).removed), ["five"])
            # A replacement of the lowest worker, which writes, knows of the loads too.
            epoch = g.info(1).epoch
            g.kill_worker(0)
            g.start_worker(0)
            g.wait_serving(epoch)
            client = Client(g)
            self.assertEqual(client.state().checkpoint, "six")
            # Retention removes parents that the group saved.
            self.assertEqual(list(client.save("seven", 9, keep=1).removed), ["six"])
            self.assertEqual(list(client.save("eight", 10, keep=1).removed), ["seven"])
            self.assertEqual(names_in(self.root), ["eight", "one", "two"])

    def test_a_loaded_checkpoint_stays_after_the_group_went_back_to_it(self):
        with self.group(1) as g:
            client = Client(g)
            client.save("base", 1)
        with self.group(2) as g:
            client = Client(g)
            client.load("base", 1)
            epoch = g.info(1).epoch
            g.kill_worker(0)
            g.start_worker(0)
            g.wait_serving(epoch)
            client = Client(g)
            self.assertEqual(client.state().checkpoint, "base")
            client.save("mine", 2, keep=1)
            client.save("last", 3, keep=1)
            self.assertEqual(names_in(self.root), ["base", "last"])

    def test_two_groups_save_below_one_root_at_the_same_time(self):
        with self.group(2) as one, self.group(2) as two:
            clients = [Client(one), Client(two)]
            for round in range(6):
                saves = [threading.Thread(target=client.save, args=("of-%d-%d" % (i, round),
                                                                    round + 1, 2))
                         for i, client in enumerate(clients)]
                for save in saves:
                    save.start()
                for save in saves:
                    save.join()
            self.assertEqual(names_in(self.root),
                             ["of-%d-%d" % (i, n) for i in range(2) for n in (4, 5)])
            for client, name in zip(clients, ("of-1-5", "of-0-5")):
                client.load(name, 20)  # complete

    def test_a_save_leaves_files_that_another_living_group_writes(self):
        hidden = ".slow.%016x.saving" % 7
        os.mkdir(self.path(hidden))
        file = os.open(self.path(".%016x.writer" % 7), os.O_RDWR | os.O_CREAT)
        os.close(os.open(self.path(".%016x.writer" % 8), os.O_RDWR | os.O_CREAT))  # of a crash
        fcntl.flock(file, fcntl.LOCK_EX)
        with self.group(1) as g:
            client = Client(g)
            client.save("one", 1)
            self.assertEqual(names_in(self.root),
                             [".%016x.writer" % 7, hidden, "one"])
            os.close(file)  # as the kernel does when a process ends
            client.save("two", 2)
            self.assertEqual(names_in(self.root), ["one", "two"])

    def test_names_stay_inside_the_root(self):
        outside = tempfile.mkdtemp(prefix="moed-outside-")
        self.addCleanup(shutil.rmtree, outside, ignore_errors=True)
        os.symlink(outside, self.path("link"))
        with self.group(1) as g:
            client = Client(g)
            for i, name in enumerate(["", ".", "..", "../x", "a/b", "/tmp/x", ".hidden", "a" * 65,
                                      "a b", "a\n", "é"]):
                for call in (client.save, client.load):
                    self.assertEqual(refusal(call, name, 10 + i)[0],
                                     ("INVALID_ARGUMENT", "NAME_INVALID"), name)
            for call in (client.save, client.load, client.export):
                self.assertEqual(refusal(call, "a\0b", 40)[0], ("INVALID_ARGUMENT", "MALFORMED"))
            self.assertEqual(refusal(client.save, "link", 50)[0],
                             ("ALREADY_EXISTS", "CHECKPOINT_EXISTS"))
            answer, error = refusal(client.load, "link", 51)
            self.assertEqual(answer[0], "FAILED_PRECONDITION")
            self.assertNotIn(self.root, error.details())
            self.assertIn("link is a symbolic link; links are not followed", error.details())
            listed, = client.call("ListCheckpoints", training.ListCheckpointsRequest()).checkpoints
            self.assertIn("link is a symbolic link", listed.problem)
            client.save("a" * 64, 52)
            self.assertEqual(refusal(client.save, "a" * 64, 53)[0],
                             ("ALREADY_EXISTS", "CHECKPOINT_EXISTS"))
        self.assertEqual(os.listdir(outside), [])

    # -------------------------------------------------------------------- failures

    def test_leftovers_of_a_crash_are_not_a_checkpoint_and_block_no_save(self):
        """The state of the disk after a crash between the last write and the rename."""
        with self.group(2) as g:
            client = Client(g)
            client.save("a", 1)
            os.rename(self.path("a"), self.path(".a.saving"))
            self.assertEqual(refusal(client.load, "a", 2)[0], ("NOT_FOUND", "CHECKPOINT_NOT_FOUND"))
            client.train(1)
            client.save("a", 20)
            self.assertEqual(names_in(self.root), ["a"])
            client.load("a", 21)
            self.assertEqual(client.state().steps, 1)

    def test_a_checkpoint_of_a_killed_group_is_complete_or_absent(self):
        seed = int(os.environ.get("MOE_SEED", random.randrange(1 << 30)))
        print("MOE_SEED=%d" % seed)
        chance = random.Random(seed)
        complete = 0
        for round_number in range(6):
            name = "r%d" % round_number
            with self.group(2) as g:
                client = Client(g)
                client.train(1)
                future = threading.Thread(target=lambda: self.save_or_fail(client, name))
                future.start()
                time.sleep(chance.uniform(0, 0.15))
                for slot in (0, 1):
                    g.workers[slot].kill()
                for slot in (0, 1):
                    g.workers[slot].wait()
                future.join()
            visible = [n for n in names_in(self.root) if not n.startswith(".")]
            with self.group(2) as g:
                client = Client(g)
                if name in visible:
                    complete += 1
                    client.load(name, 20)
                    self.assertEqual(client.state().steps, 1)
                else:
                    self.assertEqual(refusal(client.load, name, 20)[0],
                                     ("NOT_FOUND", "CHECKPOINT_NOT_FOUND"))
                    client.save(name, 21)
            self.assertEqual([n for n in names_in(self.root) if n.endswith(".saving")], [])
        print("%d of 6 were complete" % complete)

    def save_or_fail(self, client, name):
        try:
            client.save(name, 15)
        except grpc.RpcError as error:
            self.assertEqual(error.code(), grpc.StatusCode.UNAVAILABLE)

    def test_a_save_that_fails_leaves_nothing(self):
        """Files of more than 256 KiB are refused by the system, as on a full disk."""
        popen = daemons.subprocess.Popen
        try:
            daemons.subprocess.Popen = lambda *a, **k: popen(
                *a, restore_signals=False, **k)  # Python ignores SIGXFSZ
            g = TrainingGroup(FAMILY, 2, "--training", "adamw", "--training-dir", self.root)
        finally:
            daemons.subprocess.Popen = popen
        try:
            for worker in g.workers:
                resource.prlimit(worker.pid, resource.RLIMIT_FSIZE, (1 << 18, 1 << 18))
            client = Client(g)
            answer, error = refusal(client.save, "a", 1)
            print(error.details())
            self.assertEqual(answer[1], "IO")
            self.assertEqual(names_in(self.root), [])
            client.train(1)  # nothing else has changed
            self.assertEqual(refusal(client.save, "a", 20)[0][1], "IO")
        finally:
            codes = g.stop()
        self.assertEqual(set(codes), {0})

    def damage(self, *names):
        """Changes a byte; returns its place."""
        path = self.path(*names)
        with open(path, "r+b") as file:
            place = file.seek(os.path.getsize(path) * 3 // 4)
            byte = file.read(1)[0]
            file.seek(-1, os.SEEK_CUR)
            file.write(bytes([byte ^ 1]))
        return place

    def tensor_at(self, place, *names):
        with open(self.path(*names), "rb") as file:
            length = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(length))
        header.pop("__metadata__", None)
        return next(name for name, tensor in header.items()
                    if tensor["data_offsets"][0] <= place - 8 - length < tensor["data_offsets"][1])

    def test_a_damaged_checkpoint_is_refused_and_changes_nothing(self):
        parts = [("manifest.json", ), ("model.safetensors", ),
                 ("optimizer", "slot-00000.safetensors"), ("optimizer", "slot-00001.json"),
                 ("optimizer", "records.bin")]
        with self.group(2) as g:
            client = Client(g)
            client.train(1)
            client.save("good", 15)
            client.train(2)
            before = client.forward(client.layer, client.x).y_data
            for i, part in enumerate(parts):
                shutil.copytree(self.path("good"), self.path("bad%d" % i))
                place = self.damage("bad%d" % i, *part)
                answer, error = refusal(client.load, "bad%d" % i, 30 + i)
                print(error.details())
                self.assertEqual(answer, ("DATA_LOSS", "MALFORMED"), part)
                if part == ("model.safetensors", ):
                    self.assertIn(f"tensor {self.tensor_at(place, 'bad%d' % i, *part)} is damaged",
                                  error.details())
            shutil.copytree(self.path("good"), self.path("short"))
            path = self.path("short", "optimizer", "slot-00001.safetensors")
            os.truncate(path, os.path.getsize(path) - 4)
            self.assertEqual(refusal(client.load, "short", 40)[0], ("DATA_LOSS", "MALFORMED"))
            self.assertEqual(client.state().steps, 2)
            self.assertEqual(client.forward(client.layer, client.x).y_data, before)
            client.load("good", 41)
            self.assertEqual(client.state().steps, 1)

    def test_a_checkpoint_of_another_kind_is_refused(self):
        with self.group(1) as g:
            Client(g).save("adamw", 1)
        for extra, family in ((("--training", "sgd"), FAMILY), (LORA, FAMILY), ((), "glm4_moe"),
                              (("--freeze", "router"), FAMILY)):
            with self.group(1, *extra, family=family) as g:
                answer, error = refusal(Client(g, family).load, "adamw", 1)
                print(error.details())
                self.assertEqual(answer, ("FAILED_PRECONDITION", "VERSION_MISMATCH"))

    def test_no_checkpoint_between_backward_and_step(self):
        with self.group(1) as g:
            client = Client(g)
            routing = client.forward(client.layer, client.x)
            client.backward(client.layer, client.dy, client.x, routing)
            self.assertEqual(refusal(client.save, "a", 1)[0],
                             ("FAILED_PRECONDITION", "GRADIENTS_PENDING"))
        self.assertEqual(names_in(self.root), [])

    # ------------------------------------------------------------------------- adapters

    def test_adapters_equal_the_difference_of_the_weights(self):
        """Checks W = W0 + alpha / r B A, from the exported files and the saved model."""
        family = "qwen3_moe"
        with self.group(2, *LORA, family=family) as g:
            client = Client(g, family)
            client.train(1)
            client.train(2)
            client.export("adapter", 25)
            client.save("merged", 26)
            self.assertEqual(sorted(os.listdir(self.path("adapter"))),
                             ["adapter_config.json", "adapter_model.safetensors"])
            merged = client.forward(client.layer, client.x).y_data
            client.export("", 27, merge=True)
            self.assertEqual(client.forward(client.layer, client.x).y_data, merged)
            # After merging, W0 is another one; a checkpoint restores both.
            third = client.train(3)
            client.save("after", 35)
            fourth = client.train(4)
            client.load("after", 45)
            self.assertEqual(client.train(4), fourth)
            self.assertNotEqual(third, fourth)
        with open(self.path("adapter", "adapter_config.json")) as file:
            config = json.load(file)
        self.assertEqual((config["peft_type"], config["r"], config["lora_alpha"]), ("LORA", 4, 8))
        self.assertEqual(config["base_model_name_or_path"],
                         os.path.realpath(model_directory(family)))
        adapter = moed.read_safetensors(self.path("adapter", "adapter_model.safetensors"))
        before = moed.read_safetensors(os.path.join(model_directory(family), "model.safetensors"))
        after = moed.read_safetensors(self.path("merged", "model.safetensors"))
        moved = 0
        for name in before:
            base = "base_model.model." + name[:-len(".weight")]
            if base + ".lora_A.weight" not in adapter:
                if ".experts." in name:
                    self.fail("%s has no adapter" % name)
                continue
            self.assertTrue(any(name[:-len(".weight")].endswith("." + end)
                                for end in config["target_modules"]), name)
            change = 2 * adapter[base + ".lora_B.weight"] @ adapter[base + ".lora_A.weight"]
            moved += int(np.any(change))
            np.testing.assert_allclose(widened(after[name]), widened(before[name]) + change,
                                       rtol=2 ** -8, atol=1e-7)
        print("%d matrices moved" % moved)
        self.assertGreater(moved, 0)

    def test_adapters_of_fused_experts_equal_the_difference_of_the_weights(self):
        """PEFT's layout for parameters [E, ...]: A's rows by expert, then rank; B's columns by
        rank, then expert; rank and alpha of gate and up twice those of down. See
        daemon/checkpoint/export.c."""
        linear = {"input_linear": "gate_up_proj", "output_linear": "down_proj"}  # Granite's files
        for family, targets in (("gpt_oss", "gate,up,down"), ("llama4", "up,down"),
                                ("granitemoe", "gate,up,down")):
            with self.group(2, "--lora-rank", "4", "--lora-alpha", "8", "--lora-targets", targets,
                            family=family) as g:
                client = Client(g, family)
                client.train(1)
                client.train(2)
                client.export("adapter-" + family, 25)
                client.save("merged-" + family, 26)
            with open(self.path("adapter-" + family, "adapter_config.json")) as file:
                config = json.load(file)
            self.assertEqual(config["target_modules"], [])
            self.assertEqual(config["target_parameters"],
                             ["experts.gate_up_proj", "experts.down_proj"])
            self.assertEqual((config["rank_pattern"], config["alpha_pattern"]),
                             ({".*\\.gate_up_proj": 8}, {".*\\.gate_up_proj": 16}))
            adapter = moed.read_safetensors(
                self.path("adapter-" + family, "adapter_model.safetensors"))
            before = moed.read_safetensors(
                os.path.join(model_directory(family), "model.safetensors"))
            after = moed.read_safetensors(self.path("merged-" + family, "model.safetensors"))
            experts = [name for name in before if ".block_sparse_moe." in name and "linear" in name
                       or ".experts." in name and name.endswith(("gate_up_proj", "down_proj"))]
            self.assertEqual(len(adapter), 2 * len(experts))
            moved = 0
            for name in experts:
                module, projection = name.removesuffix(".weight").rsplit(".", 1)
                if projection in linear:
                    module, projection = module + ".experts", linear[projection]
                base = "base_model.model." + module
                base += ".base_layer" if projection == "gate_up_proj" else ""
                rank = 8 if projection == "gate_up_proj" else 4
                start = widened(before[name])
                a = adapter[base + ".lora_A.weight"].reshape(len(start), rank, -1)
                b = adapter[base + ".lora_B.weight"].reshape(-1, rank, len(start))
                # [E, in, out] on disk, of Granite [E, out, in]; A is of the input but for Llama 4.
                change = 2 * np.einsum("erx,yre->exy" if family == "gpt_oss" else "erx,yre->eyx",
                                       a, b)
                moved += int(np.any(change))
                if targets == "up,down" and projection == "gate_up_proj":
                    self.assertFalse(np.any(change[:, :, :change.shape[2] // 2]), name)
                np.testing.assert_allclose(widened(after[name]), start + change, rtol=2 ** -8,
                                           atol=1e-7)
            self.assertEqual(moved, 2)  # of the layer that was trained


if __name__ == "__main__":
    main()
