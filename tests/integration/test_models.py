# SPDX-License-Identifier: Apache-2.0
"""Several models in one group: loaded and unloaded next to the default one, refused where they do
not fit, kept through lost workers and a lost coordinator."""

import concurrent.futures
import contextlib
import json
import os
import shutil
import signal
import tempfile
import threading
import time
import unittest

import grpc
import numpy as np

from group import (BACKEND, TRANSPORT, freeze, golden_cases, main, model_directory, moectl,
                   relative_error, wait_until)
from test_little_memory import is_sanitized
from test_weights import tensors_of
from training import COORDINATOR, WORKER, TrainingGroup, Trainer, golden_gradients, refusal, start
import moed
import wire
from wire import admin

DEFAULT, SECOND = "qwen3_moe", "mixtral"
PLACE = "/proc/self/cwd/"  # the working directory of the process that resolves it
TOLERANCE = 1e-5


class Models(TrainingGroup):
    """A group of `workers` workers. Each runs in a separate folder, so that a directory under
    PLACE may differ between them."""

    def __init__(self, workers, *extra, **options):
        self.root = tempfile.mkdtemp(prefix="moed-models-")
        self.lease_ms = options.get("lease_ms", 1000)
        for slot in range(workers):
            os.mkdir(self.folder(slot))
        try:
            super().__init__(DEFAULT, workers, *extra, **options)
        except BaseException:
            shutil.rmtree(self.root, ignore_errors=True)
            raise

    def folder(self, slot):
        return os.path.join(self.root, "w%d" % slot)

    def put(self, name, source, slots=None):
        """Gives the workers in `slots` (None: all) a link PLACE + name."""
        for slot in range(len(self.workers)) if slots is None else slots:
            os.symlink(source, os.path.join(self.folder(slot), name))
        return PLACE + name

    def start_worker(self, slot, *extra):
        self.workers[slot], self.endpoints[slot] = start(
            WORKER, "--model", model_directory(self.family), "--coordinator", self.address,
            "--backend", BACKEND, "--transport", TRANSPORT, "--threads", "1",
            "--device", str(slot), "--worker-id", "w%d" % slot, "--slot", str(slot),
            *self.extra, *extra, environment=self.environment, cwd=self.folder(slot))

    def restart_coordinator(self):
        self.coordinator.kill()
        self.coordinator.wait()
        self.coordinator, self.address = start(
            COORDINATOR, "--listen", self.address, "--workers", str(len(self.workers)),
            "--state-dir", self.state, "--lease-ms", str(self.lease_ms))

    def stop(self):
        codes = super().stop()
        shutil.rmtree(self.root, ignore_errors=True)
        return codes

    def __enter__(self):
        return self

    def __exit__(self, kind, *_):
        codes = self.stop()
        if kind is None and any(code not in (0, -9) for code in codes):
            raise RuntimeError("daemons ended with %s" % codes)

    # ------------------------------------------------------------------ calls

    def admin(self, method, timeout=60, **fields):
        with wire.open_channel(self.address) as channel:
            return wire._call(channel, "AdminService", method,
                              getattr(admin, method + "Request")(**fields),
                              getattr(admin, method + "Response"), timeout)

    def load(self, family=SECOND, name="", directory=None, **fields):
        directory = model_directory(family) if directory is None else directory
        return self.admin("LoadModel", directory=directory, name=name, **fields)

    @contextlib.contextmanager
    def load_begun(self, directory):
        """The coordinator has taken the call, which is cancelled when the block ends."""
        with wire.open_channel(self.address) as channel:
            call = channel.unary_unary(
                "/moe.v1.AdminService/LoadModel",
                request_serializer=lambda message: message.SerializeToString())
            pending = call.future(admin.LoadModelRequest(directory=directory))
            wait_until(lambda: self.state_of(os.path.basename(directory)) != "")
            yield
            pending.cancel()

    def unload(self, name=SECOND, **fields):
        return self.admin("UnloadModel", name=name, **fields)

    def models(self):
        return self.admin("ListModels").models

    def state_of(self, name):
        """"" if the group has no such model."""
        return next((admin.ModelState.Name(each.state)[len("MODEL_STATE_"):]
                     for each in self.models() if each.name == name), "")

    def epoch(self):
        return self.admin("GetStatus").epoch

    def queue_tokens(self, slot):
        """Tokens of requests that wait or run on a worker."""
        with wire.open_channel(self.endpoints[slot]) as channel:
            page = wire._call(channel, "AdminService", "GetMetrics", admin.GetMetricsRequest(),
                              admin.GetMetricsResponse, 10).text
        return sum(float(line.split()[-1]) for line in page.splitlines()
                   if line.startswith("moe_queue_tokens"))

    def client(self, slot=0, model=None, **options):
        return moed.Client(self.endpoints[slot], model=model, **options)


def answers_equal_golden(test, g, model, family, slots=None):
    """Asks each worker in `slots` (None: all) for all recorded passes of `family`."""
    for slot in range(len(g.endpoints)) if slots is None else slots:
        with g.client(slot, model) as client:
            for layer, _, x, y in golden_cases(family):
                error = relative_error(client.forward(layer, x), y)
                test.assertLessEqual(error, TOLERANCE, (slot, model, layer))


class Traffic:
    """Clients of one model on all workers, until the `with` block ends. `calls` were answered;
    `failures` have the others' errors."""

    def __init__(self, g, model=None, family=DEFAULT, clients=2):
        self.calls, self.failures, self._stop = 0, [], threading.Event()
        layer, _, x, y = next(iter(golden_cases(family)))
        self._threads = [
            threading.Thread(target=self._run, args=(g.endpoints[n % len(g.endpoints)], model,
                                                     layer, x, y))
            for n in range(clients)]

    def _run(self, endpoint, model, layer, x, y):
        try:
            with moed.Client(endpoint, model=model) as client:
                while not self._stop.is_set():
                    if relative_error(client.forward(layer, x), y) > TOLERANCE:
                        raise AssertionError("a wrong answer")
                    self.calls += 1
        except Exception as error:  # reported to the test
            self.failures.append(error)

    def wait_for_more(self, calls=20):
        enough = self.calls + calls
        wait_until(lambda: self.failures or self.calls >= enough)

    def __enter__(self):
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_):
        self._stop.set()
        for thread in self._threads:
            thread.join()


def resident(pid):
    """Bytes of anonymous memory of a process."""
    with open("/proc/%d/status" % pid) as file:
        return next(int(line.split()[1]) << 10 for line in file if line.startswith("RssAnon"))


def make_model(folder, hidden, layers=1, experts=8, intermediate=32, sparse=False):
    """A Mixtral checkpoint of random weights; `sparse`: of zeros that take no room."""
    rng = np.random.default_rng(7)
    os.makedirs(folder)
    with open(os.path.join(model_directory("mixtral"), "config.json")) as file:
        config = json.load(file)
    config.update(hidden_size=hidden, intermediate_size=intermediate, num_local_experts=experts,
                  num_hidden_layers=layers, num_experts_per_tok=2)
    with open(os.path.join(folder, "config.json"), "w") as file:
        json.dump(config, file)
    shapes = {}
    for layer in range(layers):
        prefix = "model.layers.%d.block_sparse_moe." % layer
        shapes[prefix + "gate.weight"] = [experts, hidden]
        for expert in range(experts):
            for name, shape in (("w1", [intermediate, hidden]), ("w3", [intermediate, hidden]),
                                ("w2", [hidden, intermediate])):
                shapes[prefix + "experts.%d.%s.weight" % (expert, name)] = shape
    path = os.path.join(folder, "model.safetensors")
    if not sparse:
        moed.write_safetensors(path, {name: rng.standard_normal(shape, np.float32) * 0.1
                                      for name, shape in shapes.items()})
        return folder
    header, at = {}, 0
    for name, shape in shapes.items():
        length = 4 * shape[0] * shape[1]
        header[name] = {"dtype": "F32", "shape": shape, "data_offsets": [at, at + length]}
        at += length
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + at)
    return folder


def spoil(g, part):
    """A copy of the second model with one other bit, in the first tensor with `part` in its name.
    Returns it and that name."""
    copy = os.path.join(g.root, "spoilt")
    shutil.copytree(model_directory(SECOND), copy)
    tensor = next(each for each in sorted(tensors_of(copy)) if part in each)
    offset, length = tensors_of(copy)[tensor]
    with open(os.path.join(copy, "model.safetensors"), "r+b") as file:
        file.seek(offset + length // 2)
        byte = file.read(1)[0]
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte ^ 0x40]))
    return copy, tensor


class Serving(unittest.TestCase):
    def both(self, workers):
        with Models(workers) as g:
            epoch = g.epoch()
            answer = g.load()
            self.assertEqual((answer.model.name, answer.model.family), (SECOND, "mixtral"))
            self.assertEqual([each.slot for each in answer.slots], list(range(workers)))
            for each in answer.slots:
                self.assertGreater(each.file_bytes, 0)
                self.assertGreater(each.resident_bytes, 0)
                self.assertGreaterEqual(each.free_bytes, each.resident_bytes)
            answers_equal_golden(self, g, SECOND, SECOND)
            answers_equal_golden(self, g, None, DEFAULT)
            answers_equal_golden(self, g, DEFAULT, DEFAULT)
            first, second = g.models()
            self.assertEqual([first.is_default, second.is_default], [True, False])
            self.assertEqual((first.name, second.directory), (DEFAULT, model_directory(SECOND)))
            self.assertEqual(len(second.digest), 64)
            self.assertNotEqual(first.digest, second.digest)
            self.assertEqual(second.loaded_bytes, second.total_bytes)
            with g.client() as client:
                self.assertEqual(client.models, (DEFAULT, SECOND))
            g.unload()
            self.assertEqual([each.name for each in g.models()], [DEFAULT])
            answers_equal_golden(self, g, None, DEFAULT)
            with self.assertRaises(moed.MoeError) as caught:
                g.client(model=SECOND)
            self.assertEqual(caught.exception.reason, "MODEL_NOT_FOUND")
            self.assertEqual(g.epoch(), epoch)

    def test_two_workers_serve_two_models(self):
        self.both(2)

    def test_four_workers_serve_two_models(self):
        self.both(4)

    def test_three_models_of_three_families_on_one_group(self):
        with Models(2) as g:
            g.load("deepseek_v3")
            g.load("gpt_oss", name="small.1")
            for model, family in (("deepseek_v3",) * 2, ("small.1", "gpt_oss"), (None, DEFAULT)):
                answers_equal_golden(self, g, model, family)

    def test_streams_of_two_models(self):
        with Models(2) as g:
            g.load()
            layer, _, x, y = next(iter(golden_cases(SECOND)))
            other_layer, _, other_x, other_y = next(iter(golden_cases(DEFAULT)))
            with g.client(model=SECOND) as added, g.client() as default:
                with added.stream() as one, default.stream() as two:
                    for _ in range(20):
                        self.assertLessEqual(relative_error(one.forward(layer, x), y), TOLERANCE)
                        self.assertLessEqual(
                            relative_error(two.forward(other_layer, other_x), other_y), TOLERANCE)

    def test_widths_up_to_the_windows(self):
        """A narrower model fits as it is; a wider one needs the option that the refusal names."""
        with tempfile.TemporaryDirectory(prefix="moed-models-") as folder:
            narrow = make_model(os.path.join(folder, "narrow"), 32)
            wide = make_model(os.path.join(folder, "wide"), 160)
            x = {each: np.random.default_rng(1).standard_normal((9, width), np.float32)
                 for each, width in ((narrow, 32), (wide, 160))}
            want = {}
            for each in (narrow, wide):  # alone, as the default model
                g = TrainingGroup(each, 2)
                with moed.Client(g.endpoints[0]) as client:
                    want[each] = client.forward(0, x[each])
                g.stop()
            with Models(2) as g:
                g.load(directory=narrow)
                (code, _), error = refusal(g.load, directory=wide)
                self.assertEqual(code, "FAILED_PRECONDITION")
                self.assertIn("--max-hidden", error.details())
                with g.client(model="narrow") as client:
                    np.testing.assert_array_equal(client.forward(0, x[narrow]), want[narrow])
            with Models(2, "--max-hidden", "160") as g:
                g.load(directory=wide)
                for slot in range(2):
                    with g.client(slot, "wide") as client:
                        np.testing.assert_array_equal(client.forward(0, x[wide]), want[wide])
                answers_equal_golden(self, g, None, DEFAULT)

    def test_loads_and_unloads_cost_other_calls_nothing(self):
        with Models(2) as g, Traffic(g, clients=4) as traffic:
            epoch = g.epoch()
            for round_ in range(10):
                g.load()
                answers_equal_golden(self, g, SECOND, SECOND, slots=[round_ % 2])
                traffic.wait_for_more()
                g.unload(drain=round_ % 2 == 0)
                traffic.wait_for_more()
            self.assertEqual((traffic.failures, g.epoch()), ([], epoch))
            print("%d calls of the default model during 10 loads and unloads" % traffic.calls)

    @unittest.skipIf(is_sanitized(), "sanitizers keep freed memory for a while")
    @unittest.skipIf(BACKEND == "cuda", "the weights are not in the workers' own memory")
    def test_unloaded_memory_comes_back(self):
        """A model of 48 MiB, eight times: the workers do not grow by more than a part of one."""
        with tempfile.TemporaryDirectory(prefix="moed-models-") as folder:
            big = make_model(os.path.join(folder, "big"), 64, 4, 16, 1024)
            size = os.path.getsize(os.path.join(big, "model.safetensors"))
            with Models(2) as g:
                def memory():
                    return [resident(worker.pid) for worker in g.workers]

                g.load(directory=big)
                loaded = memory()
                g.unload("big")
                after_first = memory()
                for _ in range(7):
                    g.load(directory=big)
                    g.unload("big")
                after = memory()
                print("model %d MiB; loaded %s, unloaded %s, after eight %s MiB" % (
                    size >> 20, *([each >> 20 for each in figures]
                                  for figures in (loaded, after_first, after))))
                for slot in range(2):
                    self.assertLess(after_first[slot], loaded[slot] - size // 4)
                    self.assertLess(after[slot], after_first[slot] + size // 4)


class Refusals(unittest.TestCase):
    EXPERTS = 128  # of the largest layer

    @classmethod
    def setUpClass(cls):
        cls.g = Models(2, "--max-experts", str(cls.EXPERTS), lease_ms=10000)
        cls.epoch = cls.g.epoch()

    @classmethod
    def tearDownClass(cls):
        cls.g.stop()

    def tearDown(self):
        """A refusal has changed nothing."""
        self.assertEqual([each.name for each in self.g.models()], [DEFAULT])
        answers_equal_golden(self, self.g, None, DEFAULT, slots=[0])
        self.assertEqual(self.g.epoch(), self.epoch)

    def refused(self, code, *parts, reason=None, call=None, **fields):
        (got, why), error = refusal(call or self.g.load, **fields)
        print("%s/%s: %s" % (got, why, error.details()))
        self.assertEqual(got, code)
        if reason is not None:
            self.assertEqual(why, reason)
        for part in parts:
            self.assertIn(part, error.details())

    def test_a_directory_that_nobody_has(self):
        (code, _), error = refusal(self.g.load, directory="/nowhere/at/all")
        self.assertIn(code, ("NOT_FOUND", "FAILED_PRECONDITION"))
        self.assertIn("/nowhere/at/all", error.details())

    def test_a_directory_that_one_worker_lacks(self):
        path = self.g.put("lonely", model_directory(SECOND), slots=[0])
        (code, _), error = refusal(self.g.load, directory=path)
        self.assertIn(code, ("NOT_FOUND", "FAILED_PRECONDITION"))
        self.assertIn("slot 1", error.details())

    def test_another_model_on_one_worker(self):
        self.g.put("mixed", model_directory(SECOND), slots=[0])
        path = self.g.put("mixed", model_directory("deepseek_v3"), slots=[1])
        self.refused("FAILED_PRECONDITION", directory=path)

    def test_other_bytes_on_one_worker(self):
        """One bit of a router, which all workers read: the tensor is named, nothing is served."""
        copy, tensor = spoil(self.g, ".gate.weight")
        self.g.put("differing", model_directory(SECOND), slots=[0])
        path = self.g.put("differing", copy, slots=[1])
        self.refused("FAILED_PRECONDITION", tensor, reason="MODEL_MISMATCH", directory=path)

    def test_more_than_the_memory(self):
        """A sparse file of 1.3 TB: 100 layers of 128 experts of 100 MB."""
        folder = make_model(os.path.join(self.g.root, "huge"), 64, 100, self.EXPERTS, 131072,
                            sparse=True)
        self.assertGreater(os.path.getsize(os.path.join(folder, "model.safetensors")), 1.2e12)
        self.refused("RESOURCE_EXHAUSTED", "slot", "bytes", reason="OUT_OF_MEMORY",
                     directory=folder)
        self.refused("RESOURCE_EXHAUSTED", reason="OUT_OF_MEMORY", directory=folder, dry_run=True)

    def test_more_than_the_memory_of_the_host(self):
        """Each of the two workers has room for its half, but both are on this host."""
        with open("/proc/meminfo", encoding="ascii") as file:
            free = next(int(line.split()[1]) for line in file
                        if line.startswith("MemAvailable:")) * 1024
        layer = self.EXPERTS * 3 * 64 * 131072 * 4
        layers = max(1, round(1.4 * free / layer))
        if not 1.1 * free < layers * layer < 1.8 * free:
            self.skipTest("no number of layers is between the memory of one worker and of two")
        folder = make_model(os.path.join(self.g.root, "half"), 64, layers, self.EXPERTS, 131072,
                            sparse=True)
        self.refused("RESOURCE_EXHAUSTED", "workers on its host", reason="OUT_OF_MEMORY",
                     directory=folder, dry_run=True)

    def test_names_and_paths(self):
        self.refused("INVALID_ARGUMENT", directory="relative/path")
        self.refused("INVALID_ARGUMENT", directory="")
        for name in ("a/b", "m" * 64, "a b", "a\nb", "\u00e4"):
            self.refused("INVALID_ARGUMENT", directory=model_directory(SECOND), name=name)
        self.refused("ALREADY_EXISTS", name=DEFAULT)
        self.g.load()
        self.refused("ALREADY_EXISTS", SECOND)
        self.refused("ALREADY_EXISTS", SECOND, family="deepseek_v3", name=SECOND)
        self.g.load("deepseek_v3", name="a")
        self.g.unload("a")
        self.g.unload()
        self.refused("NOT_FOUND", reason="MODEL_NOT_FOUND", call=self.g.unload)
        self.refused("FAILED_PRECONDITION", call=self.g.unload, name=DEFAULT)

    def test_a_dry_run_loads_nothing(self):
        plan = self.g.load(dry_run=True)
        self.assertEqual(len(plan.slots), 2)
        self.assertGreater(plan.slots[0].resident_bytes, 0)
        self.assertEqual(plan.model.family, "mixtral")

    def test_requests(self):
        """Unknown models and wrong digests are the caller's errors; an added model cannot train."""
        self.g.load()
        try:
            layer, _, x, _ = next(iter(golden_cases(SECOND)))
            for endpoint in self.g.endpoints:
                t = Trainer(endpoint)
                routing = t.forward(layer, x, model=SECOND)
                for fields, want in (
                        ({"model": "unknown"}, ("NOT_FOUND", "MODEL_NOT_FOUND")),
                        ({"model": SECOND, "model_digest": "ab" * 32},
                         ("FAILED_PRECONDITION", "MODEL_MISMATCH"))):
                    self.assertEqual(refusal(t.forward, layer, x, **fields)[0], want)
                self.assertEqual(refusal(t.forward, 77, x, model=SECOND)[0],
                                 ("NOT_FOUND", "LAYER_NOT_FOUND"))
                got = refusal(t.backward, layer, x, x, routing, model=SECOND)[0]
                self.assertIn(got[0], ("FAILED_PRECONDITION", "UNIMPLEMENTED", "INVALID_ARGUMENT"))
                t.close()
            digest = next(each.digest for each in self.g.models() if each.name == SECOND)
            with self.g.client(model=SECOND, model_digest=digest) as client:
                client.forward(layer, x)
            with self.assertRaises(moed.MoeError) as caught:
                self.g.client(model=SECOND, model_digest="ab" * 32)
            self.assertEqual(caught.exception.reason, "MODEL_MISMATCH")
        finally:
            self.g.unload()

    def unload_in_flight(self, pool, client, layer, x, y):
        """Unloads while a stopped worker keeps requests of the other one in flight. Returns the
        refusal; None if the order came too late and the model is gone."""
        queued = 3 * x.shape[0]
        freeze(self.g.workers[1].pid)
        try:
            calls = [pool.submit(client.forward, layer, x) for _ in range(3)]
            wait_until(lambda: self.g.queue_tokens(0) == queued)
            unloading = pool.submit(self.g.unload)
            time.sleep(1)  # for the order to reach worker 0
        finally:
            self.g.workers[1].send_signal(signal.SIGCONT)
        for call in calls:
            self.assertLessEqual(relative_error(call.result(60), y), TOLERANCE)
        try:
            unloading.result(60)
        except grpc.RpcError as error:
            return error.code().name, wire.error_reason(error)[0]
        return None

    def test_a_model_in_use(self):
        layer, _, x, y = next(iter(golden_cases(SECOND)))
        self.g.load()
        with concurrent.futures.ThreadPoolExecutor(4) as pool, self.g.client(
                model=SECOND, timeout=60) as client:
            for _ in range(5):
                refused = self.unload_in_flight(pool, client, layer, x, y)
                if refused is not None:
                    break
                self.g.load()
            self.assertEqual(refused, ("FAILED_PRECONDITION", "MODEL_IN_USE"))
            self.assertLessEqual(relative_error(client.forward(layer, x), y), TOLERANCE)
            calls = [pool.submit(client.forward, layer, np.tile(x, (40, 1))) for _ in range(3)]
            self.g.unload(drain=True)
            for call in calls:  # answered, or refused because they came after the unload
                try:
                    call.result(60)
                except moed.MoeError as error:
                    self.assertIn(error.reason, ("MODEL_NOT_FOUND", "MODEL_LOADING"))


class Faults(unittest.TestCase):
    def test_the_coordinator_is_killed_and_restarted(self):
        with Models(2) as g:
            g.load()
            epoch = g.epoch()
            with Traffic(g) as default, Traffic(g, SECOND, SECOND) as added:
                default.wait_for_more()
                added.wait_for_more()
                g.restart_coordinator()
                wait_until(lambda: g.state_of(SECOND) == "SERVING")
                default.wait_for_more()
                added.wait_for_more()
                self.assertEqual((default.failures, added.failures), ([], []))
            self.assertEqual(g.epoch(), epoch)
            self.assertEqual([each.name for each in g.models()], [DEFAULT, SECOND])
            g.unload()
            g.load("deepseek_v3")
            answers_equal_golden(self, g, "deepseek_v3", "deepseek_v3")

    def test_a_worker_is_killed_and_replaced(self):
        with Models(2, "--wait-budget-ms", "500") as g:
            g.load()
            epoch = g.epoch()
            g.kill_worker(1)
            g.start_worker(1)
            g.wait_serving(epoch)
            answers_equal_golden(self, g, None, DEFAULT)
            wait_until(lambda: g.state_of(SECOND) == "SERVING")
            answers_equal_golden(self, g, SECOND, SECOND)
            g.unload()

    def test_the_whole_group_is_restarted(self):
        """The state directory has the added models: they are loaded after the default one."""
        with Models(2) as g:
            g.load()
            g.load("deepseek_v3", name="third")
            epoch = g.epoch()
            for process in (*g.workers, g.coordinator):
                process.terminate()
            for process in (*g.workers, g.coordinator):
                self.assertEqual(process.wait(30), 0)
            g.restart_coordinator()
            for slot in range(2):
                g.start_worker(slot)
            g.wait_serving(epoch)
            for model, family in ((SECOND, SECOND), ("third", "deepseek_v3")):
                wait_until(lambda model=model: g.state_of(model) == "SERVING")
                answers_equal_golden(self, g, model, family)

    def test_clients_of_the_added_model_outlive_a_lost_worker(self):
        """They get MODEL_LOADING or another UNAVAILABLE meanwhile, which clients repeat."""
        layer, _, x, y = next(iter(golden_cases(SECOND)))
        with Models(2, "--wait-budget-ms", "500") as g:
            g.load()
            epoch = g.epoch()
            with g.client(model=SECOND, timeout=60) as client:
                g.kill_worker(1)
                g.start_worker(1)
                got = client.forward(layer, x, patient=True)
                self.assertLessEqual(relative_error(got, y), TOLERANCE)
            self.assertGreater(g.epoch(), epoch)

    def test_a_replaced_worker_lacks_the_directory(self):
        """The default model serves; the added one says why it does not, and can be unloaded."""
        with Models(2, "--wait-budget-ms", "500") as g:
            path = g.put("there", model_directory(SECOND))
            g.load(directory=path)
            epoch = g.epoch()
            g.kill_worker(1)
            os.unlink(os.path.join(g.folder(1), "there"))
            g.start_worker(1)
            g.wait_serving(epoch)
            answers_equal_golden(self, g, None, DEFAULT)
            wait_until(lambda: g.state_of("there") == "FAILED")
            reason = next(each.reason for each in g.models() if each.name == "there")
            print(reason)
            self.assertIn("slot 1", reason)
            checks = json.loads(moectl("health", "-o", "json", "--endpoint", g.address,
                                       check=False).stdout)["checks"]
            self.assertEqual([(each["subject"], each["result"]) for each in checks
                              if each["code"] == "MODEL_SERVING"], [("there", "WARNING")])
            layer, _, x, _ = next(iter(golden_cases(SECOND)))
            for endpoint in g.endpoints:  # also the one that has the model, after two seconds
                t = Trainer(endpoint)
                self.assertEqual(refusal(t.forward, layer, x, model="there")[0],
                                 ("UNAVAILABLE", "MODEL_LOADING"))
                t.close()
            g.unload("there")
            self.assertEqual([each.name for each in g.models()], [DEFAULT])

    def test_a_replaced_worker_has_other_bytes(self):
        """The tensor is named, and the default model serves. All workers may bring the new bytes
        once an operator has accepted them."""
        with Models(2, "--wait-budget-ms", "500") as g:
            copy, tensor = spoil(g, ".experts.7.")
            path = g.put("there", model_directory(SECOND))
            g.load(directory=path)
            epoch = g.epoch()
            g.kill_worker(1)
            for slot in range(2):
                os.unlink(os.path.join(g.folder(slot), "there"))
            g.put("there", copy)
            g.start_worker(1)
            g.wait_serving(epoch)
            answers_equal_golden(self, g, None, DEFAULT)
            wait_until(lambda: g.state_of("there") == "FAILED")
            reason = next(each.reason for each in g.models() if each.name == "there")
            print(reason)
            self.assertIn(tensor, reason)
            (code, _), _ = refusal(g.admin, "AcceptModel", model="there", reason="wanted")
            self.assertEqual(code, "FAILED_PRECONDITION")  # workers have slots
            for slot in range(2):
                g.workers[slot].terminate()
                self.assertEqual(g.workers[slot].wait(30), 0)
            wait_until(lambda: not any(each.connected
                                       for each in g.admin("GetStatus").workers))
            moectl("model", "accept", "there", "--endpoint", g.address)
            for slot in range(2):
                g.start_worker(slot)
            g.wait_serving(epoch + 1)
            wait_until(lambda: g.state_of("there") == "SERVING")

    def test_a_model_is_unloaded_while_a_worker_is_missing(self):
        with Models(2, "--wait-budget-ms", "500") as g:
            g.load()
            epoch = g.epoch()
            g.kill_worker(1)
            wait_until(lambda: g.state_of(SECOND) != "SERVING")
            with concurrent.futures.ThreadPoolExecutor(1) as pool:
                unloading = pool.submit(g.unload)
                g.start_worker(1)
                g.wait_serving(epoch)
                unloading.result(60)
            self.assertEqual([each.name for each in g.models()], [DEFAULT])
            answers_equal_golden(self, g, None, DEFAULT)
            g.load()
            answers_equal_golden(self, g, SECOND, SECOND)

    def test_an_unload_ends_with_the_view(self):
        """A worker stops before it can answer, and is lost: the model stays, and other changes are
        not held back."""
        with Models(2, "--wait-budget-ms", "20000", lease_ms=20000) as g:
            g.load()
            g.load("olmoe")
            freeze(g.workers[1].pid)
            with concurrent.futures.ThreadPoolExecutor(1) as pool:
                unloading = pool.submit(g.unload)
                wait_until(lambda: g.state_of(SECOND) == "UNLOADING")
                begun = time.monotonic()
                g.kill_worker(1)
                with self.assertRaises(grpc.RpcError) as caught:
                    unloading.result(60)
                took = time.monotonic() - begun
            print("%.1f s: %s" % (took, caught.exception.details()))
            self.assertLess(took, 20)
            self.assertNotEqual(g.state_of(SECOND), "")
            with concurrent.futures.ThreadPoolExecutor(1) as pool:
                unloading = pool.submit(g.unload, "olmoe")  # without a view
                g.start_worker(1)
                unloading.result(60)
            wait_until(lambda: g.state_of(SECOND) == "SERVING")
            answers_equal_golden(self, g, SECOND, SECOND)

    def test_a_load_that_is_cancelled_is_undone(self):
        with tempfile.TemporaryDirectory(prefix="moed-models-") as folder, Models(2) as g:
            big = make_model(os.path.join(folder, "big"), 64, 4, 16, 1024)
            with g.load_begun(big):
                (code, _), error = refusal(g.load)  # one at a time
                self.assertEqual(code, "UNAVAILABLE", error.details())
            # It is undone, unless all slots had loaded it before the cancellation came.
            wait_until(lambda: g.state_of("big") in ("", "SERVING"))
            if g.state_of("big") == "SERVING":
                g.unload("big")
            answers_equal_golden(self, g, None, DEFAULT)
            g.load()
            answers_equal_golden(self, g, SECOND, SECOND)

    def test_a_load_that_the_coordinator_forgets_is_undone(self):
        with tempfile.TemporaryDirectory(prefix="moed-models-") as folder, Models(2) as g:
            big = make_model(os.path.join(folder, "big"), 64, 4, 16, 1024)
            with g.load_begun(big):
                g.restart_coordinator()
            wait_until(lambda: admin.GroupState.Name(
                g.admin("GetStatus").state) == "GROUP_STATE_SERVING")
            if g.state_of("big") != "":  # it was faster than the kill
                g.unload("big")

            def again():
                try:
                    return g.load(directory=big)
                except grpc.RpcError:  # workers close what they had
                    return None
            wait_until(again)
            g.unload("big")
            answers_equal_golden(self, g, None, DEFAULT)

    def test_a_worker_dies_during_a_load(self):
        with tempfile.TemporaryDirectory(prefix="moed-models-") as folder:
            big = make_model(os.path.join(folder, "big"), 64, 4, 16, 1024)
            with Models(2, "--wait-budget-ms", "500") as g:
                epoch = g.epoch()
                with concurrent.futures.ThreadPoolExecutor(1) as pool:
                    loading = pool.submit(g.load, directory=big)
                    wait_until(lambda: loading.done() or g.state_of("big") != "")
                    g.kill_worker(1)
                    g.start_worker(1)
                    g.wait_serving(epoch)
                    try:
                        loading.result(60)
                    except grpc.RpcError as error:
                        print(error.code(), error.details())
                wait_until(lambda: g.state_of("big") in ("SERVING", ""))
                answers_equal_golden(self, g, None, DEFAULT)

    def test_a_training_group_serves_an_added_model(self):
        """Only the default model learns; optimizer steps leave the added one as it is."""
        with tempfile.TemporaryDirectory(prefix="moed-models-") as folder:
            with Models(2, "--training", "adamw", "--training-dir", folder) as g:
                g.load()
                answers_equal_golden(self, g, SECOND, SECOND)
                layer, _, x, dy, _ = next(golden_gradients(DEFAULT))
                t = Trainer(g.endpoints[0])
                version = t.state().weights_version
                with Traffic(g, SECOND, SECOND) as traffic:
                    for _ in range(5):
                        t.backward(layer, dy, x, t.forward(layer, x))
                        t.optimizer_step()
                        traffic.wait_for_more(5)
                    self.assertEqual(traffic.failures, [])
                self.assertEqual(t.state().weights_version, version + 5)
                answers_equal_golden(self, g, SECOND, SECOND)
                moectl("training", "save", "k", "--endpoint", g.endpoints[0])
                g.unload()
                routing = t.forward(layer, x)
                t.backward(layer, dy, x, routing)
                t.close()


class FakeCoordinator(grpc.GenericRpcHandler):
    """Answers AdminService with `answers[method]`: a message, or a function of request and
    context. `requests` has (method, request) of all calls."""

    def __init__(self, **answers):
        self.requests = []
        self.answers = {"GetStatus": admin.GetStatusResponse(
            version="0.2.0", state=admin.GROUP_STATE_SERVING, epoch=3, slots=2, model="first"),
            **answers}
        self.server = grpc.server(concurrent.futures.ThreadPoolExecutor(4))
        self.server.add_generic_rpc_handlers((self,))
        self.endpoint = "127.0.0.1:%d" % self.server.add_insecure_port("127.0.0.1:0")
        self.server.start()

    def service(self, details):
        name = details.method.rsplit("/", 1)[1]
        answer = self.answers.get(name)
        if answer is None:
            return None

        def handle(request, context):
            self.requests.append((name, request))
            return answer(request, context) if callable(answer) else answer

        return grpc.unary_unary_rpc_method_handler(
            handle, request_deserializer=getattr(admin, name + "Request").FromString,
            response_serializer=lambda message: message.SerializeToString())

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.server.stop(None).wait()


class AgainstAFakeCoordinator(unittest.TestCase):
    def test_load_prints_the_plan_and_then_how_far_it_is(self):
        released = threading.Event()
        status = admin.ModelStatus(name="second", family="mixtral", digest="ab" * 32,
                                   state=admin.MODEL_STATE_LOADING, loaded_bytes=12 << 20,
                                   total_bytes=40 << 20)
        plan = admin.LoadModelResponse(model=status)
        for slot in range(2):
            plan.slots.add(slot=slot, file_bytes=20 << 20, resident_bytes=21 << 20,
                           free_bytes=3 << 30)

        def load(request, _context):
            if not request.dry_run:
                released.wait(60)
            return plan

        def models(_request, _context):
            released.set()  # it was asked how far the load is
            return admin.ListModelsResponse(models=[
                admin.ModelStatus(name="first", is_default=True), status])

        with FakeCoordinator(LoadModel=load, ListModels=models) as fake:
            done = moectl("load", "/models/second", "--endpoint", fake.endpoint)
            loads = [request for name, request in fake.requests if name == "LoadModel"]
            self.assertEqual([(each.directory, each.name, each.dry_run) for each in loads],
                             [("/models/second", "", True), ("/models/second", "", False)])
            lines = done.stderr.splitlines()
            self.assertEqual(lines[0].split(), ["SLOT", "FILES", "RESIDENT", "FREE"])
            self.assertEqual(lines[2].split(), ["1", "20.0", "MiB", "21.0", "MiB", "3072.0", "MiB"])
            self.assertIn("loading second", lines[3])
            self.assertIn("30 %", lines[3])
            self.assertEqual(done.stdout,
                             "serving second: mixtral, 0 MoE layers, digest %s\n" % ("ab" * 32))

    def test_refusals_have_their_exit_codes(self):
        for code, exit_code in ((grpc.StatusCode.NOT_FOUND, 4),
                                (grpc.StatusCode.FAILED_PRECONDITION, 7),
                                (grpc.StatusCode.ALREADY_EXISTS, 7),
                                (grpc.StatusCode.UNAVAILABLE, 5),
                                (grpc.StatusCode.PERMISSION_DENIED, 6),
                                (grpc.StatusCode.RESOURCE_EXHAUSTED, 1)):
            def refuse(_request, context, code=code):
                context.abort(code, "as wished")

            with FakeCoordinator(LoadModel=refuse, UnloadModel=refuse) as fake:
                for arguments in (("load", "/m"), ("load", "/m", "--dry-run"), ("unload", "m")):
                    done = moectl(*arguments, "--endpoint", fake.endpoint, check=False)
                    self.assertEqual((done.returncode, done.stdout), (exit_code, ""), done.stderr)
                    self.assertIn("as wished", done.stderr)

    def test_a_coordinator_without_added_models_is_shown(self):
        with FakeCoordinator() as fake:  # of an older release: no ListModels
            self.assertIn("SERVING", moectl("status", "--endpoint", fake.endpoint).stdout)
            said = json.loads(moectl("status", "--endpoint", fake.endpoint, "-o", "json").stdout)
            self.assertEqual(said["addedModels"], [])

    def test_accept_names_its_model(self):
        with FakeCoordinator(AcceptModel=admin.AcceptModelResponse(forgotten="m")) as fake:
            moectl("model", "accept", "m", "--endpoint", fake.endpoint)
            moectl("model", "accept", "--endpoint", fake.endpoint)
            self.assertEqual([request.model for name, request in fake.requests
                              if name == "AcceptModel"], ["m", ""])


class Operator(unittest.TestCase):
    def test_moectl(self):
        with Models(2) as g:
            at = ("--endpoint", g.address)

            def document(*arguments):
                return json.loads(moectl(*arguments, *at, "-o", "json").stdout)

            plan = moectl("load", model_directory(SECOND), "--dry-run", *at).stdout.splitlines()
            self.assertEqual(plan[0].split(), ["SLOT", "FILES", "RESIDENT", "FREE"])
            self.assertEqual(len(plan), 3)
            loaded = document("load", model_directory(SECOND), "--name", "second")
            self.assertEqual((loaded["kind"], loaded["model"]["name"]), ("LoadedModel", "second"))
            first, second = document("get", "models")["models"]
            self.assertEqual((first["name"], first["state"], second["name"], second["state"]),
                             (DEFAULT, "SERVING", "second", "SERVING"))
            self.assertEqual(len(moectl("get", "models", *at).stdout.splitlines()), 3)
            self.assertEqual(document("describe", "model", "second")["model"]["digest"],
                             second["digest"])
            self.assertIn("second", moectl("status", *at).stdout)
            self.assertEqual(document("status")["addedModels"][0]["name"], "second")
            self.assertIn("second", moectl("top", "--once", *at).stdout)
            placed = document("placement", "--model", "second")["layers"]
            self.assertEqual([each["layer"] for each in placed],
                             [each["layer"] for each in second["layers"]])
            held = [expert for slot in placed[0]["slots"] for expert in slot["experts"]]
            self.assertEqual(sorted(set(held)), list(range(second["layers"][0]["experts"])))
            experts = document("get", "experts", "--model", "second")["experts"]
            self.assertEqual(len(experts), sum(each["experts"] for each in second["layers"]))
            self.forward(g)
            bench = moectl("bench", "--endpoint", g.endpoints[0], "--model", "second", "--layer",
                           str(second["layers"][0]["layer"]), "--duration", "0.3", "-o", "json")
            self.assertEqual(json.loads(bench.stdout)["model"], "second")
            for arguments, code in (
                    (("load", "relative"), 2), (("load",), 2), (("unload",), 2),
                    (("load", model_directory(SECOND), "--name", "a/b"), 2),
                    (("unload", "a/b"), 2), (("describe", "model"), 2),
                    (("load", model_directory(SECOND), "--name", "second"), 7),
                    (("load", "/nowhere/at/all"), (4, 7)),
                    (("unload", "third"), 4), (("describe", "model", "third"), 4),
                    (("placement", "--model", "third"), 4), (("unload", DEFAULT), 7)):
                done = moectl(*arguments, *at, check=False)
                self.assertIn(done.returncode, code if isinstance(code, tuple) else (code,),
                              (arguments, done.stderr))
                self.assertEqual(done.stdout, "")
            self.assertEqual(moectl("unload", "second", "--drain", *at).stdout,
                             "unloaded second\n")
            kinds = [each["kind"] for each in document("get", "events")["events"]]
            self.assertEqual([kind for kind in kinds if kind.startswith("MODEL_")],
                             ["MODEL_SERVING", "MODEL_FAILED", "MODEL_UNLOADED"])

    def forward(self, g):
        layer, _, x, y = next(iter(golden_cases(SECOND)))
        with tempfile.TemporaryDirectory(prefix="moed-models-") as folder:
            source, target = os.path.join(folder, "x"), os.path.join(folder, "y")
            moed.write_safetensors(source, {"x": x})
            moectl("forward", "--endpoint", g.endpoints[1], "--model", "second", "--layer",
                   str(layer), "--input", source, "--output", target)
            got = moed.read_safetensors(target)["y"]
            self.assertLessEqual(relative_error(got, y), TOLERANCE)
            done = moectl("forward", "--endpoint", g.endpoints[1], "--model", "third", "--layer",
                          str(layer), "--input", source, "--output", target, check=False)
            self.assertEqual(done.returncode, 4, done.stderr)


if __name__ == "__main__":
    main()
