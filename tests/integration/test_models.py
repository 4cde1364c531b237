# SPDX-License-Identifier: Apache-2.0
"""Several models in one group: loaded and unloaded next to the default one, and refused where they
do not fit."""

import concurrent.futures
import json
import os
import signal
import tempfile
import threading
import time
import unittest

import grpc
import numpy as np

from group import (BACKEND, freeze, golden_cases, is_sanitized, main, model_directory, moectl,
                   relative_error, wait_until)
from models_group import (DEFAULT, SECOND, TOLERANCE, Models, Traffic, answers_equal_golden,
                          make_model, resident, spoil)
from training import TrainingGroup, Trainer, refusal
import moed
import wire
from wire import admin


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
