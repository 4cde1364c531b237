# SPDX-License-Identifier: Apache-2.0
"""A group that serves added models, and traffic of clients, for tests."""

import contextlib
import json
import os
import shutil
import tempfile
import threading

import numpy as np

from group import BACKEND, TRANSPORT, golden_cases, model_directory, relative_error, wait_until
from test_weights import flip_bit
from training import WORKER, TrainingGroup, start
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
    return copy, flip_bit(copy, part)
