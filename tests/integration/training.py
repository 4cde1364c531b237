# SPDX-License-Identifier: Apache-2.0
"""Groups that train, and clients of TrainingService. The daemons start one by one, so that a test
can kill and replace one."""

import contextlib
import os
import re
import shutil
import subprocess
import tempfile
import time
import unittest

import grpc
import numpy as np

from group import BACKEND, BUILD, DEVICES, TRANSPORT, model_directory
import moed
import wire
from wire import expert, training

WORKER = os.path.join(BUILD, "daemon", "worker", "moe-worker")
COORDINATOR = os.path.join(BUILD, "daemon", "coordinator", "moe-coordinator")
F32, BF16 = 1, 2  # DataType of the protocol


def start_alone(model, *extra):
    """A worker that must refuse its model at once: its exit code and its log."""
    done = subprocess.run([WORKER, "--model", model, "--coordinator", "127.0.0.1:1",
                           "--backend", BACKEND, *extra],
                          stderr=subprocess.PIPE, text=True, timeout=60)
    return done.returncode, done.stderr


def dtype_of(x):
    """The DataType of x. BF16 rows come from moed.bf16: ml_dtypes.bfloat16, or their bits without
    that package."""
    return BF16 if x.dtype.itemsize == 2 else F32


def start(program, *arguments, environment=None, cwd=None):
    """Starts a daemon, in folder `cwd`; returns it and its address. Adds `environment` to ours. A
    daemon that listens at a given port gets more tries: a connection of another test may have it
    for a moment."""
    again = any(re.fullmatch(r"127\.0\.0\.1:[1-9]\d*", each) and
                option in ("--listen", "--metrics-listen")
                for option, each in zip(arguments, arguments[1:]))
    for left in range(5 if again else 1, 0, -1):
        process, address = start_once(program, arguments, environment, cwd)
        if address:
            return process, address
        time.sleep(1 if left > 1 else 0)
    raise RuntimeError("%s did not start" % os.path.basename(program))


def start_once(program, arguments, environment, cwd):
    """As start. The address is empty if the daemon ended."""
    reader, writer = os.pipe()
    process = subprocess.Popen([program, "--ready-fd", str(writer), "--log-level",
                                os.environ.get("MOE_TEST_LOG", "error"), *arguments],
                               pass_fds=[writer], start_new_session=True, cwd=cwd,
                               env={**os.environ, **(environment or {})})
    os.close(writer)
    with os.fdopen(reader) as pipe:
        address = pipe.readline().strip()
    if not address:
        process.kill()
        process.wait()
    return process, address


class TrainingGroup:
    """`workers` workers in their slots, each on a separate device. Extra arguments are for the
    workers, those in `coordinator` for it; `program` and `backend` are what the workers run."""

    def __init__(self, family, workers, *extra, lease_ms=3000, replicas=1, environment=None,
                 coordinator=(), program=WORKER, backend=BACKEND):
        if workers > DEVICES:
            raise unittest.SkipTest("%d workers need as many devices" % workers)
        self.family, self.extra, self.environment = family, extra, environment
        self.program, self.backend = program, backend
        self.state = tempfile.mkdtemp(prefix="moed-train-")
        self.settings = ("--workers", str(workers), "--state-dir", self.state, "--lease-ms",
                         str(lease_ms), "--replicas", str(replicas), *coordinator)
        try:
            self.start_coordinator("127.0.0.1:0")
        except BaseException:
            shutil.rmtree(self.state, ignore_errors=True)
            raise
        self.workers = [None] * workers
        self.endpoints = [""] * workers
        try:
            for slot in range(workers):
                self.start_worker(slot)
            self.wait_serving()
        except BaseException:
            self.stop()
            raise

    def start_coordinator(self, listen):
        self.coordinator, self.address = start(COORDINATOR, "--listen", listen, *self.settings)

    def restart_coordinator(self):
        self.coordinator.kill()
        self.coordinator.wait()
        self.start_coordinator(self.address)

    def start_worker(self, slot, *extra):
        self.workers[slot], self.endpoints[slot] = start(
            self.program, "--model", model_directory(self.family), "--coordinator", self.address,
            "--backend", self.backend, "--transport", TRANSPORT, "--threads", "1",
            "--device", str(slot), "--worker-id", "w%d" % slot, "--slot", str(slot),
            *self.extra, *extra,
            environment=self.environment)

    def kill_worker(self, slot):
        self.workers[slot].kill()
        self.workers[slot].wait()

    def info(self, slot=0):
        with wire.open_channel(self.endpoints[slot]) as channel:
            return wire.get_server_info(channel)

    def wait_serving(self, above=0, seconds=60):
        """Waits until all workers serve under one epoch above `above`; returns the epoch."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            try:
                epochs = {self.info(slot).epoch for slot in range(len(self.workers))}
                if len(epochs) == 1 and min(epochs) > above:
                    return epochs.pop()
            except grpc.RpcError:
                pass
            time.sleep(0.05)
        raise RuntimeError("the group does not serve after %d s" % seconds)

    def stop(self):
        codes = []
        for process in [w for w in self.workers if w is not None] + [self.coordinator]:
            if process.poll() is None:
                process.terminate()
        for process in [w for w in self.workers if w is not None] + [self.coordinator]:
            try:
                codes.append(process.wait(timeout=30))
            except subprocess.TimeoutExpired:
                process.kill()
                codes.append(process.wait())
        shutil.rmtree(self.state, ignore_errors=True)
        return codes


@contextlib.contextmanager
def training_group(family, workers, *extra, **options):
    g = TrainingGroup(family, workers, "--training", "adamw", *extra, **options)
    try:
        yield g
    finally:
        codes = g.stop()
    if any(code not in (0, -9) for code in codes):
        raise RuntimeError("daemons ended with %s" % codes)


class Trainer:
    """A client of one worker. It numbers its calls and stays in one lineage."""

    def __init__(self, endpoint, session="test"):
        self.channel = wire.open_channel(endpoint)
        self.session = session
        self.batch = self.step = 0

    def close(self):
        self.channel.close()

    def state(self):
        return wire.train(self.channel, "GetTrainState", training.GetTrainStateRequest())

    def forward(self, layer, x, retain=0, **fields):
        request = expert.ForwardRequest(layer=layer, tokens=x.shape[0], hidden=x.shape[1],
                                        dtype=dtype_of(x), x_data=x.tobytes(), return_routing=True,
                                        **fields)
        if retain:
            request.retain.session = self.session
            request.retain.micro_batch_id = retain
        return wire.forward(self.channel, request)

    def backward_request(self, layer, dy, x=None, routing=None, batch=None, **fields):
        """`routing`: the ForwardResponse with the ids to use."""
        if batch is None:
            self.batch += 1
            batch = self.batch
        request = training.BackwardRequest(
            layer=layer, tokens=dy.shape[0], hidden=dy.shape[1], dtype=dtype_of(dy),
            session=self.session, micro_batch_id=batch, dy=dy.tobytes(), **fields)
        if x is not None:
            request.x = x.tobytes()
            request.routing_mode = 2
            request.topk_ids_dtype = routing.topk_ids_dtype
            request.topk_ids = routing.topk_ids
        return request

    def call(self, name, request):
        return wire.train(self.channel, name, request)

    def backward(self, *arguments, **fields):
        return self.call("Backward", self.backward_request(*arguments, **fields))

    def optimizer_step(self, learning_rate=0.01, step=None, **fields):
        if step is None:
            self.step += 1
            step = self.step
        return self.call("OptimizerStep", training.OptimizerStepRequest(
            step_id=step, learning_rate=learning_rate, **fields))


def refusal(call, *arguments, **fields):
    """Makes a call that must fail: ((code name, reason), error)."""
    try:
        call(*arguments, **fields)
    except grpc.RpcError as error:
        return (error.code().name, wire.error_reason(error)[0]), error
    raise AssertionError("the call was answered")


def golden_gradients(family):
    """(layer, tokens, x, dy, dx) of a family's recorded passes."""
    golden = moed.read_safetensors(os.path.join(model_directory(family), "golden.safetensors"))
    for name in sorted(golden):
        if name.endswith(".dy"):
            layer, tokens, _ = name.split(".")
            base = name[:-2]
            yield (int(layer[len("layer"):]), int(tokens[1:]), golden[base + "x"], golden[name],
                   golden[base + "dx"])


def golden_parameter_norm(family):
    """(layer, Frobenius norm over the gradients of all its parameters) of the T = 37 pass."""
    golden = moed.read_safetensors(os.path.join(model_directory(family), "golden.safetensors"))
    total, layer = 0.0, None
    for name in golden:
        if ".grad." in name:
            layer = int(name.split(".")[0][len("layer"):])
            total += float(np.sum(golden[name].astype(np.float64) ** 2))
    return layer, total ** 0.5
