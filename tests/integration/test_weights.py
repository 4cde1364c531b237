# SPDX-License-Identifier: Apache-2.0
"""Which bytes a group serves: a worker with others is refused by the name of a tensor, whatever
happened to the group before; a wanted change is accepted by an operator."""

import hashlib
import json
import os
import queue
import shutil
import struct
import tempfile
import threading
import unittest

import grpc
import numpy as np

from group import BACKEND, TRANSPORT, golden_cases, main, model_directory, moectl, relative_error
from group import wait_until
from training import COORDINATOR, WORKER, Trainer, golden_gradients, refusal, start
import moed
import wire

FAMILY = "qwen3_moe"


def tensors_of(model):
    """{name: (offset in the file, bytes)} of model.safetensors."""
    with open(os.path.join(model, "model.safetensors"), "rb") as file:
        length = struct.unpack("<Q", file.read(8))[0]
        header = json.loads(file.read(length))
    header.pop("__metadata__", None)
    return {name: (8 + length + entry["data_offsets"][0],
                   entry["data_offsets"][1] - entry["data_offsets"][0])
            for name, entry in header.items()}


def flip_bit(model, part):
    """Flips a bit in the first tensor with `part` in its name; returns that name."""
    tensors = tensors_of(model)
    tensor = next(each for each in sorted(tensors) if part in each)
    offset, length = tensors[tensor]
    with open(os.path.join(model, "model.safetensors"), "r+b") as file:
        file.seek(offset + length // 2)
        byte = file.read(1)[0]
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte ^ 0x40]))
    return tensor


class Scene(unittest.TestCase):
    """A coordinator with a state directory, and two workers with separate model directories."""

    def setUp(self):
        self.root = tempfile.mkdtemp(prefix="moed-weights-")
        self.addCleanup(shutil.rmtree, self.root, True)
        self.workers, self.endpoints, self.count = {}, {}, 0
        self.start_coordinator("127.0.0.1:0")

    def path(self, *names):
        return os.path.join(self.root, *names)

    def start_coordinator(self, listen):
        self.coordinator, self.address = start(
            COORDINATOR, "--listen", listen, "--workers", "2", "--state-dir", self.path("state"),
            "--lease-ms", "3000", "--log-level", "info", "--log-file",
            self.path("coordinator.log"))
        self.addCleanup(self.end, self.coordinator)

    def end(self, process):
        process.kill()
        process.wait()

    def model(self, name, family=FAMILY):
        """A copy of a golden model."""
        copy = self.path(name, "model")
        if not os.path.exists(copy):
            shutil.copytree(model_directory(family), copy)
        return copy

    def spoil(self, name, expert):
        """A copy in which one bit of one expert differs; returns it and the tensor's name."""
        copy = self.model(name)
        return copy, flip_bit(copy, ".mlp.experts.%d." % expert)

    def start_worker(self, slot, model, *extra):
        self.count += 1
        log = self.path("worker-%d-%d.log" % (slot, self.count))
        process, self.endpoints[slot] = start(
            WORKER, "--model", model, "--coordinator", self.address, "--backend", BACKEND,
            "--transport", TRANSPORT, "--threads", "1", "--device", str(slot), "--worker-id",
            "w%d" % slot, "--slot", str(slot), "--log-level", "info", "--log-file",
            log, *extra)
        self.addCleanup(self.end, process)
        self.workers[slot] = process
        return process, log

    def stop_workers(self):
        for process in self.workers.values():
            process.terminate()
        self.assertEqual([each.wait(30) for each in self.workers.values()], [0, 0])
        wait_until(lambda: all(each["state"] == "WORKER_STATE_GONE" or each["state"] == "GONE"
                               for each in self.status()["workers"]))

    def status(self):
        done = moectl("status", "--endpoint", self.address, "-o", "json", check=False)
        return json.loads(done.stdout) if done.stdout else {"state": "UNREACHABLE"}

    def await_serving(self, above=0):
        wait_until(lambda: self.status()["state"] == "SERVING" and
                   int(self.status()["epoch"]) > above)
        return self.status()

    def refused(self, slot, model, tensor, *extra):
        """Starts a worker; returns when the coordinator has refused it by the tensor's name."""
        process, log = self.start_worker(slot, model, *extra)
        self.assertEqual(process.wait(30), 1)
        with open(log) as file:
            text = file.read()
        line = next(each for each in text.splitlines() if "other weights" in each)
        print(line)
        self.assertIn(tensor, line)

    def log(self):
        with open(self.path("coordinator.log")) as file:
            return file.read()


def packed(layer, experts, names, units, count=None):
    """A part of Digests (daemon/model/digest_table.h). `names`: of the common tensors, of an
    expert's; `units`: (expert, bytes after it)."""
    out = struct.pack("<IIBB", layer, experts, len(names[0]), len(names[1]))
    for name in names[0] + names[1]:
        out += bytes([len(name)]) + name
    out += struct.pack("<I", len(units) if count is None else count)
    for expert, content in units:
        out += struct.pack("<I", expert) + content
    return out


class Session:
    """A worker that only speaks: it registers and waits for its assignment."""

    LAYER, EXPERTS = 0, 8

    def __init__(self, channel, name, incarnation, version):
        self.outbox = queue.Queue()
        call = channel.stream_stream(
            "/moe.v1.CoordinatorService/Session",
            request_serializer=wire.coordinator.SessionRequest.SerializeToString,
            response_deserializer=wire.coordinator.SessionResponse.FromString)
        self.answers = call(iter(self.outbox.get, None), timeout=120)
        r = wire.coordinator.Register(
            worker_id=name, incarnation=incarnation, endpoint=name + ":1", backend="cpu",
            control_endpoint=name + ":2", model="m", model_fingerprint="f" * 64, family="x",
            version=version, max_tokens_per_step=64, slot_token=os.urandom(16))
        r.layers.add(layer=self.LAYER, hidden=8, experts=self.EXPERTS, top_k=2, intermediate=8)
        r.host.id, r.host.name = "host", "host"
        self.send(register=r)
        self.assigned = threading.Event()
        self.ended, self.code, self.text = threading.Event(), None, ""
        threading.Thread(target=self.listen, daemon=True).start()

    def send(self, **body):
        self.outbox.put(wire.coordinator.SessionRequest(**body))

    def listen(self):
        try:
            for answer in self.answers:
                if answer.HasField("assign"):
                    self.version = answer.assign.placement_version
                    self.assigned.set()
        except grpc.RpcError as error:
            self.code, self.text = error.code().name, error.details()
        self.ended.set()

    def end(self):
        self.outbox.put(None)
        self.answers.cancel()


UNIT = bytes(32)  # a digest; 8 bytes follow for each tensor
NAMES = ([b"gate"], [b"e.*.up", b"e.*.down"])
# Name of the case: parts that no worker of this project sends.
HOSTILE = {
    "nothing": [b""],
    "a byte": [b"\x01"],
    "numbers only": [struct.pack("<II", 0, 8)],
    "another layer": [packed(7, 8, NAMES, [])],
    "the last layer": [packed(0xffffffff, 8, NAMES, [])],
    "no experts": [packed(0, 0, NAMES, [])],
    "all experts that there can be": [packed(0, 0xffffffff, NAMES, [])],
    "more experts than the model": [packed(0, 9, NAMES, [])],
    "255 names that are not there": [struct.pack("<IIBB", 0, 8, 255, 255)],
    "no names": [packed(0, 8, ([], []), [])],
    "an empty name": [packed(0, 8, ([b""], [b"e"]), [])],
    "a name of 255 bytes": [packed(0, 8, ([b"n" * 255], [b"e"]), [])],
    "a name that is cut": [struct.pack("<IIBB", 0, 8, 1, 1) + b"\xffgate"],
    "a name with a zero": [packed(0, 8, ([b"ga\0te"], [b"e"]), [])],
    "a name that moves the cursor": [packed(0, 8, ([b"\x1b[31mgate"], [b"e"]), [])],
    "a name with a line": [packed(0, 8, ([b"gate\nERROR"], [b"e"]), [])],
    "a name in Latin-1": [packed(0, 8, ([b"\xe9"], [b"e"]), [])],
    "units that are not there": [packed(0, 8, NAMES, [], count=0xffffffff)],
    "fewer units than there are": [packed(0, 8, NAMES, [(0, UNIT + bytes(16))], count=0)],
    "a unit that is cut": [packed(0, 8, NAMES, [(0, UNIT + bytes(15))])],
    "a unit of no expert": [packed(0, 8, NAMES, [(8, UNIT + bytes(16))])],
    "a unit of the last but one number": [packed(0, 8, NAMES, [(0xfffffffe, UNIT + bytes(16))])],
    "other names in a second part": [packed(0, 8, NAMES, []), packed(0, 8, ([b"x"], [b"y"]), [])],
    "more than 16 KiB": [packed(0, 8, NAMES, [(i % 8, UNIT + bytes(16)) for i in range(1000)])],
}


class Hostile(Scene):
    """A process with the rights of a worker sends digests that no worker sends."""

    def fake(self, name):
        self.count += 1
        s = Session(self.channel, name, self.count, self.version)
        self.addCleanup(s.end)
        return s

    def memory(self):
        with open("/proc/%d/statm" % self.coordinator.pid) as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    def beat(self, session):
        """Keeps its lease until it has ended."""
        while not session.ended.wait(0.2):
            session.send(heartbeat=wire.coordinator.Heartbeat())

    def test_no_part_harms_the_coordinator(self):
        self.version = json.loads(moectl("version", "-o", "json").stdout)["client"]
        with wire.open_channel(self.address) as self.channel:
            quiet = self.fake("quiet")
            threading.Thread(target=self.beat, args=(quiet,), daemon=True).start()
            before = self.memory()
            for name, parts in HOSTILE.items():
                evil = self.fake("evil")
                threading.Thread(target=self.beat, args=(evil,), daemon=True).start()
                self.assertTrue(evil.assigned.wait(30), (name, evil.code, evil.text))
                for part in parts:
                    evil.send(digests=wire.coordinator.Digests(part=part))
                self.assertTrue(evil.ended.wait(30), name)
                print("%s: %s, %s" % (name, evil.code, evil.text))
                self.assertIn(evil.code, ("INVALID_ARGUMENT", "RESOURCE_EXHAUSTED"), name)
                self.assertLess(len(evil.text), 400)
            # Sound parts that lie: too few units, and then Loaded.
            liar = self.fake("evil")
            threading.Thread(target=self.beat, args=(liar,), daemon=True).start()
            self.assertTrue(liar.assigned.wait(30), liar.text)
            liar.send(digests=wire.coordinator.Digests(part=packed(0, 8, NAMES, [])))
            liar.send(loaded=wire.coordinator.Loaded(placement_version=liar.version))
            self.assertTrue(liar.ended.wait(30))
            self.assertEqual(liar.code, "FAILED_PRECONDITION")
            self.assertIn("digests of layer 0 are missing", liar.text)
            self.assertFalse(quiet.ended.is_set(), quiet.text)
            self.assertLess(self.memory() - before, 32 << 20)
            quiet.end()
        self.assertNotIn("\x1b", self.log())
        # Another model is taken once no process of this one has a slot.
        wait_until(lambda: all(each["state"] == "GONE" for each in self.status()["workers"]))
        for slot in range(2):
            self.start_worker(slot, self.model("a%d" % slot))
        self.await_serving()


class Bytes(Scene):
    def asks(self, stop, seen):
        """Sends forward passes until `stop`; counts right, wrong and refused answers."""
        cases = list(golden_cases(FAMILY))
        i = 0
        while not stop.is_set():
            layer, tokens, x, y = cases[i % len(cases)]
            i += 1
            try:
                with wire.open_channel(self.endpoints[0]) as channel:
                    answer = wire.forward(channel, wire.expert.ForwardRequest(
                        layer=layer, tokens=tokens, hidden=x.shape[1], dtype=1,
                        x_data=x.tobytes()))
                got = np.frombuffer(answer.y_data, np.float32).reshape(y.shape)
                seen["right" if relative_error(got, y) < 1e-5 else "wrong"] += 1
            except grpc.RpcError as error:
                seen["refused" if error.code().name == "UNAVAILABLE" else "failed"] += 1

    def test_a_worker_with_other_bytes_in_one_expert_is_refused_by_name(self):
        good = self.model("good")
        experts = max(int(name.split(".experts.")[1].split(".")[0])
                      for name in tensors_of(good) if ".experts." in name)
        bad, tensor = self.spoil("bad", experts)
        for slot in (0, 1):
            self.start_worker(slot, good)
        before = self.await_serving()
        self.assertEqual(len(before["modelDigest"]), 64)
        stop, seen = threading.Event(), {"right": 0, "wrong": 0, "refused": 0, "failed": 0}
        client = threading.Thread(target=self.asks, args=(stop, seen))
        client.start()
        try:
            for _ in range(2):
                epoch = int(self.status()["epoch"])
                self.end(self.workers[1])
                self.refused(1, bad, tensor)
                self.start_worker(1, good)
                self.await_serving(epoch)
            right = seen["right"]
            wait_until(lambda: seen["right"] > right + 50)
        finally:
            stop.set()
            client.join()
        print(seen)
        self.assertEqual((seen["wrong"], seen["failed"]), (0, 0))
        self.assertEqual(self.status()["modelDigest"], before["modelDigest"])

    def test_an_operator_accepts_other_bytes_once_all_workers_are_down(self):
        good, (other, tensor) = self.model("good"), self.spoil("other", 0)
        accept = ["model", "accept", "--endpoint", self.address]
        for slot in (0, 1):
            self.start_worker(slot, good)
        before = self.await_serving()["modelDigest"]
        self.assertEqual(moectl(*accept, check=False).returncode, 7)
        self.stop_workers()
        self.start_worker(1, good)
        self.refused(0, other, tensor)
        self.workers[1].terminate()
        self.assertEqual(self.workers[1].wait(30), 0)
        self.assertIn(before, moectl(*accept, "--reason", "fine-tuned").stdout)
        self.assertIn("no digests", moectl(*accept).stdout)
        self.assertIn("fine-tuned", self.log())
        self.assertIn("audit: moe.v1.AdminService/AcceptModel", self.log())
        for slot in (0, 1):
            self.start_worker(slot, other)
        self.assertNotEqual(self.await_serving()["modelDigest"], before)

    def test_the_same_bytes_join_under_another_name(self):
        """The group has one name, that of its first worker, wherever a client asks."""
        first = self.model("one")
        second = shutil.copytree(first, self.path("renamed"))
        self.start_worker(0, first)
        wait_until(lambda: len(self.status()["workers"]) == 1)
        self.start_worker(1, second)
        status = self.await_serving()
        self.assertEqual(status["model"], "model")
        layer, tokens, x, y = next(golden_cases(FAMILY))

        def ask(channel, **fields):
            return wire.forward(channel, wire.expert.ForwardRequest(
                layer=layer, tokens=tokens, hidden=x.shape[1], dtype=1, x_data=x.tobytes(),
                **fields))

        for endpoint in self.endpoints.values():
            with wire.open_channel(endpoint) as channel:
                model = wire.get_model(channel)
                self.assertEqual((model.model, model.model_digest),
                                 ("model", status["modelDigest"]))
                got = ask(channel, model="model", model_digest=model.model_digest)
                self.assertLess(relative_error(
                    np.frombuffer(got.y_data, np.float32).reshape(y.shape), y), 1e-5)
                for fields, want in (
                        ({"model": "renamed"}, ("NOT_FOUND", "MODEL_NOT_FOUND")),
                        ({"model_digest": "0" * 64},
                         ("FAILED_PRECONDITION", "MODEL_MISMATCH"))):
                    self.assertEqual(refusal(ask, channel, **fields)[0], want)

    def test_clients_may_pin_the_model(self):
        for slot in (0, 1):
            self.start_worker(slot, self.model("good"))
        digest, other = self.await_serving()["modelDigest"], "5" * 64
        layer, tokens, x, y = next(golden_cases(FAMILY))
        with moed.Client(self.endpoints[0], model_digest=digest, spread=True) as client:
            self.assertEqual(client.info.model_digest, digest)
            self.assertLess(relative_error(client.forward(layer, x), y), 1e-5)
            with client.stream() as stream:
                self.assertLess(relative_error(stream.forward(layer, x), y), 1e-5)
            with self.assertRaises(moed.MoeError) as caught:
                client.forward(layer, x, model_digest=other)
            self.assertEqual(caught.exception.reason, "MODEL_MISMATCH")
        with self.assertRaises(moed.MoeError) as caught:
            moed.Client(self.endpoints[0], model_digest=other)
        self.assertEqual(caught.exception.reason, "MODEL_MISMATCH")
        with self.assertRaises(ValueError):
            moed.Client(self.endpoints[0], model_digest="x")

        moed.write_safetensors(self.path("x.safetensors"), {"x": x})
        forward = ["forward", "--endpoint", self.endpoints[0], "--layer", str(layer), "--input",
                   self.path("x.safetensors"), "--output", self.path("y.safetensors")]
        for pin, code in ((digest, 0), (other, 7), ("x", 2)):
            for extra in ([], ["--stream"]):
                done = moectl(*forward, *extra, "--model-digest", pin, check=False)
                self.assertEqual((done.returncode, "digest" in done.stderr), (code, code != 0))

    def test_another_model_needs_no_decision(self):
        for slot in (0, 1):
            self.start_worker(slot, self.model("old"))
        before = self.await_serving()
        self.stop_workers()
        for slot in (0, 1):
            self.start_worker(slot, self.model("new", "olmoe"))
        after = self.await_serving(int(before["epoch"]))
        self.assertNotEqual(after["modelDigest"], before["modelDigest"])
        self.assertIn("another model is served from now on: model has digest %s" %
                      after["modelDigest"], self.log())

    def test_a_restarted_coordinator_remembers_the_bytes(self):
        good, (bad, tensor) = self.model("good"), self.spoil("bad", 0)
        for slot in (0, 1):
            self.start_worker(slot, good)
        before = self.await_serving()
        self.end(self.coordinator)
        self.start_coordinator(self.address)
        after = self.await_serving()
        self.assertEqual((after["epoch"], after["modelDigest"]),
                         (before["epoch"], before["modelDigest"]))
        self.end(self.workers[0])
        self.refused(0, bad, tensor)
        self.start_worker(0, good)
        self.await_serving(int(before["epoch"]))


class Training(Scene):
    def train(self, t):
        layer, _, x, dy, _ = next(golden_gradients(FAMILY))
        t.backward(layer, dy, x, t.forward(layer, x), batch=self.step)
        t.optimizer_step(step=self.step + 1)
        self.step += 2

    def change(self, t, call, **fields):
        self.step += 1
        return t.call(call, getattr(wire.training, call + "Request")(
            step_id=self.step, **fields))

    def answer(self, t):
        layer, _, x, _, _ = next(golden_gradients(FAMILY))
        return t.forward(layer, x).y_data

    def test_trained_weights_differ_on_purpose_and_other_files_do_not(self):
        """Train, Save, kill a worker, go back; load; restart the coordinator; recover."""
        self.step = 1
        os.mkdir(self.path("ckpt"))
        good, (bad, tensor) = self.model("good"), self.spoil("bad", 0)
        options = ["--training", "adamw", "--training-dir", self.path("ckpt")]
        for slot in (0, 1):
            self.start_worker(slot, good, *options)
        before = self.await_serving()
        t = Trainer(self.endpoints[1])
        untrained = self.answer(t)
        self.train(t)
        self.change(t, "SaveCheckpoint", name="a")
        trained = self.answer(t)
        self.assertNotEqual(untrained, trained)

        self.end(self.workers[0])
        self.refused(0, bad, tensor, *options)
        self.start_worker(0, good, *options)
        epoch = int(self.await_serving(int(before["epoch"]))["epoch"])
        self.assertEqual(self.answer(t), trained)

        self.train(t)
        self.assertNotEqual(self.answer(t), trained)
        self.change(t, "LoadCheckpoint", name="a")
        self.assertEqual(self.answer(t), trained)

        self.end(self.coordinator)
        self.start_coordinator(self.address)
        self.assertEqual(self.await_serving()["modelDigest"], before["modelDigest"])
        self.end(self.workers[0])
        with wire.open_channel(self.endpoints[1]) as channel:
            wait_until(lambda: wire.get_server_info(channel).epoch == 0)
        t.call("RecoverTraining", wire.training.RecoverTrainingRequest(as_loaded=True))
        self.start_worker(0, good, *options)
        after = self.await_serving(epoch)
        self.assertEqual(self.answer(t), untrained)
        self.assertEqual(after["modelDigest"], before["modelDigest"])
        t.close()

    def serve(self, model):
        """Ends all workers and serves another directory."""
        self.stop_workers()
        moectl("model", "accept", "--endpoint", self.address)
        for slot in (0, 1):
            self.start_worker(slot, model)
        return self.await_serving()

    def without_digests(self, checkpoint):
        """Makes the manifest one of an earlier release."""
        path = os.path.join(checkpoint, "manifest.json")
        with open(path) as file:
            manifest = json.load(file)
        del manifest["model_digest"], manifest["sha256"]
        text = json.dumps(manifest, sort_keys=True, separators=(",", ":"))
        manifest["sha256"] = hashlib.sha256(text.encode()).hexdigest()
        with open(path, "w") as file:
            json.dump(manifest, file)

    def test_a_checkpoint_that_is_served_has_the_bytes_that_were_saved(self):
        self.step = 1
        os.mkdir(self.path("ckpt"))
        options = ["--training", "adamw", "--training-dir", self.path("ckpt")]
        for slot in (0, 1):
            self.start_worker(slot, self.model("good"), *options)
        before = self.await_serving()
        t = Trainer(self.endpoints[0])
        self.train(t)
        self.change(t, "SaveCheckpoint", name="a")
        trained = self.answer(t)
        t.close()
        with open(self.path("ckpt", "a", "manifest.json")) as file:
            digest = json.load(file)["model_digest"]
        self.assertNotEqual(digest, before["modelDigest"])

        self.assertEqual(self.serve(self.path("ckpt", "a"))["modelDigest"], digest)
        layer, _, x, _, _ = next(golden_gradients(FAMILY))
        with moed.Client(self.endpoints[1], model_digest=digest) as client:
            served = np.frombuffer(trained, np.float32).reshape(x.shape)
            # Training has fp32 masters; the checkpoint's weights are rounded to the model's format.
            self.assertLess(relative_error(client.forward(layer, x), served), 2e-2)

        shutil.copytree(self.path("ckpt", "a"), self.path("bad", "model"))
        bad, tensor = self.spoil("bad", 0)
        self.end(self.workers[0])
        _, log = self.start_worker(0, bad)
        wait_until(lambda: "checkpoint's manifest" in open(log).read())
        with open(log) as file:
            print(next(line for line in file if "checkpoint's manifest" in line))
        with open(log) as file:
            self.assertIn(tensor, file.read())
        self.end(self.workers[0])

        shutil.copytree(self.path("ckpt", "a"), self.path("old", "a"))
        self.without_digests(self.path("old", "a"))
        _, log = self.start_worker(0, self.path("old", "a"))
        self.assertEqual(self.await_serving()["modelDigest"], digest)
        with open(log) as file:
            self.assertIn("a is a checkpoint without digests", file.read())

        self.without_digests(self.path("ckpt", "a"))  # earlier checkpoints load, too
        self.stop_workers()
        moectl("model", "accept", "--endpoint", self.address)
        for slot in (0, 1):
            self.start_worker(slot, self.model("good"), *options)
        self.await_serving()
        t = Trainer(self.endpoints[0])
        self.step = t.state().last_step_id
        self.change(t, "LoadCheckpoint", name="a")
        self.assertEqual(self.answer(t), trained)
        t.close()


if __name__ == "__main__":
    main()
