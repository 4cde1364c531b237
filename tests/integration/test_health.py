# SPDX-License-Identifier: Apache-2.0
"""What each probe says in each scene: liveness falls only where a restart helps, readiness whenever
the worker does not serve. The scenes wait for states: none of them measures a time.

On a busy machine a loop may rest for longer than STUCK_S. Then a probe falls for a moment, so
each scene waits for a state that stays."""

import contextlib
import ctypes
import os
import shutil
import signal
import tempfile
import threading
import time
import unittest
import urllib.error
import urllib.request

import grpc
import numpy as np

from group import BUILD, freeze, main, model_directory, wait_until
from held import Held
from ports import free_ports
from training import COORDINATOR, Trainer, golden_gradients, start
import wire
from wire import expert, training

FAMILY = "qwen3_moe"
MODEL = model_directory(FAMILY)
STEP_MS, BUDGET_MS = 200, 800
STUCK_S = (STEP_MS + BUDGET_MS) / 1000
DEAD_S = 4 * STUCK_S
LEASE_MS = 60000  # of scenes that do not wait for its end
# Of groups that must keep their view. A Save of theirs is held for longer than the limit that
# follows from it.
PATIENT_MS = 10000
PATIENT_S = (STEP_MS + PATIENT_MS) / 1000
CEILING_S = 120  # a wait that ends a test without an event


class Daemon:
    """A daemon with all its probes."""

    def __init__(self, program, *arguments, environment=None):
        for last in (False, False, False, True):  # another process may have taken the port
            self.port, = free_ports(1)
            try:
                self.process, self.address = start(
                    program, "--metrics-listen", "127.0.0.1:%d" % self.port, "--health-step-ms",
                    str(STEP_MS), *arguments, environment=environment)
                return
            except RuntimeError:
                if last:
                    raise

    def page(self, name):
        """(status, text) of a page; None without an answer."""
        try:
            with urllib.request.urlopen("http://127.0.0.1:%d/%s" % (self.port, name),
                                        timeout=10) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()
        except OSError:
            return None

    def text(self, name):
        """The text of a page; "" without an answer."""
        return (self.page(name) or (0, ""))[1]

    def serving(self, service):
        """None without an answer."""
        with wire.open_channel(self.address) as channel:
            check = channel.unary_unary("/grpc.health.v1.Health/Check")
            name = service.encode()
            try:
                return check((b"\n" + bytes([len(name)]) + name) if name else b"",
                             timeout=10) == b"\x08\x01"
            except grpc.RpcError:
                return None

    def probes(self):
        """(livez, moed.live, readyz, healthz, ""), true where all is well; None without all
        answers."""
        http = [self.page(name) for name in ("livez", "readyz", "healthz")]
        checks = [self.serving(name) for name in ("moed.live", "")]
        if None in http + checks:
            return None
        return (http[0][0] == 200, checks[0], http[1][0] == 200, http[2][0] == 200, checks[1])

    def thread(self, name):
        """The id of the thread called `name`."""
        tasks = "/proc/%d/task" % self.process.pid
        for tid in os.listdir(tasks):
            with open(os.path.join(tasks, tid, "comm")) as comm:
                if comm.read().strip() == name:
                    return int(tid)
        raise RuntimeError("there is no thread " + name)

    def stop(self):
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()


@contextlib.contextmanager
def stopped_thread(tid):
    """Stops one thread of a process, by ptrace."""
    seize, interrupt, detach, wall = 0x4206, 0x4207, 17, 0x40000000
    ptrace = ctypes.CDLL(None, use_errno=True).ptrace
    ptrace.argtypes = [ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p]
    if ptrace(seize, tid, None, None) != 0 or ptrace(interrupt, tid, None, None) != 0:
        raise unittest.SkipTest("ptrace: " + os.strerror(ctypes.get_errno()))
    os.waitpid(tid, wall)
    try:
        yield
    finally:
        ptrace(detach, tid, None, None)


class Scenes(unittest.TestCase):
    def setUp(self):
        self.folder = tempfile.mkdtemp(prefix="moed-health-")
        self.addCleanup(shutil.rmtree, self.folder, True)
        self.held = Held(self.folder)
        self.hold = self.held.hold

    def daemon(self, *arguments, environment=None):
        d = Daemon(*arguments, environment=environment)
        self.addCleanup(d.stop)
        return d

    def group(self, workers, *extra, lease_ms=LEASE_MS):
        """A coordinator and workers that began to start."""
        self.hold("")
        coordinator = self.daemon(COORDINATOR, "--listen", "127.0.0.1:0", "--workers",
                                  str(workers), "--lease-ms", str(lease_ms))
        return coordinator, [self.start_worker(coordinator, *extra) for _ in range(workers)]

    def start_worker(self, coordinator, *extra, environment=None):
        return self.daemon(self.held.worker, "--model", MODEL, "--coordinator", coordinator.address,
                           "--backend", "cuda", "--threads", "1", "--wait-budget-ms",
                           str(BUDGET_MS), *extra,
                           environment={**self.held.environment, **(environment or {})})

    def expect(self, scene, d, alive, ready, *codes):
        """Waits until all probes of `d` say so, with these reasons. `alive`: None = any, on the way
        to a state that stays."""
        begin = time.monotonic()
        seen = None
        while True:
            seen = d.probes(), d.text("readyz")
            live = seen[0][0] if alive is None and seen[0] is not None else alive
            want = (live, live, ready, ready, ready)
            if seen[0] == want and all(" %s: " % code in seen[1] for code in codes):
                break
            if time.monotonic() > begin + CEILING_S:
                self.fail("%s: %s, not %s %s" % (scene, seen, want, codes))
            time.sleep(0.02)
        print("    | %-42s | %-5s | %-5s | %-12s | after %.1f s" % (
            scene, "yes" if live else "no", "yes" if ready else "no", " ".join(codes),
            time.monotonic() - begin), flush=True)

    def serves(self, scene, d):
        self.expect(scene, d, True, True)

    def says(self, d, page, text):
        wait_until(lambda: text in d.text(page), CEILING_S)

    def test_loading(self):
        coordinator = self.daemon(COORDINATOR, "--listen", "127.0.0.1:0", "--workers", "1")
        self.serves("coordinator without workers", coordinator)
        self.hold("load")
        worker = self.start_worker(coordinator)
        self.expect("loading", worker, True, False, "LOADING")
        time.sleep(DEAD_S + 1)
        self.expect("loading, for long", worker, True, False, "LOADING")
        self.hold("")
        self.serves("loaded", worker)

    def test_waiting_for_the_group(self):
        coordinator = self.daemon(COORDINATOR, "--listen", "127.0.0.1:0", "--workers", "2")
        worker = self.start_worker(coordinator)
        self.expect("waiting for another worker", worker, True, False, "NO_VIEW")
        self.says(coordinator, "readyz?verbose", "group: waiting: 1 of 2 workers")

    def test_stopped_engine(self):
        _, (worker,) = self.group(1)
        self.serves("serving", worker)
        with stopped_thread(worker.thread("moe-engine")):
            self.expect("stopped engine", worker, None, False, "ENGINE_STUCK")
            self.expect("stopped engine, for long", worker, False, False, "ENGINE_STUCK")
        self.serves("engine runs again", worker)

    def test_stopped_main_loop(self):
        coordinator, (worker,) = self.group(1)
        for d in (worker, coordinator):
            self.serves("serving", d)
            with stopped_thread(d.process.pid):
                self.expect("stopped main loop", d, None, False, "MAIN_STUCK")
                self.expect("stopped main loop, for long", d, False, False, "MAIN_STUCK")
            self.serves("main loop runs again", d)

    def test_stuck_device(self):
        for fault, text in (("stuck", "in a step"), ("call", "in a call of the device")):
            _, (worker,) = self.group(1)
            self.serves("serving", worker)
            self.hold(fault)
            self.expect("stuck device (%s)" % text, worker, None, False, "DEVICE_STUCK")
            self.says(worker, "readyz", text)
            self.expect("stuck device, for long", worker, False, False, "DEVICE_STUCK")
            self.says(worker, "livez", "DEVICE_STUCK")
            self.hold("")
            self.serves("device works again", worker)

    def test_long_step(self):
        """A device that computes is not stuck, however long a step takes."""
        _, (worker,) = self.group(1)
        self.serves("serving", worker)
        self.hold("slow")
        time.sleep(DEAD_S + 1)
        self.serves("long step", worker)

    def saving_group(self, gate):
        """A coordinator and two workers that train; an fsync of the first one waits while the file
        `gate` is there."""
        root = os.path.join(self.folder, "saved")
        os.mkdir(root)
        self.hold("")
        coordinator = self.daemon(COORDINATOR, "--listen", "127.0.0.1:0", "--workers", "2",
                                  "--lease-ms", str(LEASE_MS))
        extra = ("--training", "sgd", "--training-dir", root, "--wait-budget-ms", str(PATIENT_MS))
        gated = {"LD_PRELOAD": os.path.join(BUILD, "tests", "integration", "libgated_fsync.so"),
                 "MOE_TEST_GATE": gate,
                 "ASAN_OPTIONS": os.environ.get("ASAN_OPTIONS", "") + ":verify_asan_link_order=0"}
        workers = [self.start_worker(coordinator, *extra, environment=gated),
                   self.start_worker(coordinator, *extra)]
        for each in workers:
            self.serves("training", each)
        return workers, root

    def begin(self, client, name, request):
        """The future of a training call."""
        call = client.channel.unary_unary(
            "/moe.v1.TrainingService/" + name,
            request_serializer=type(request).SerializeToString,
            response_deserializer=getattr(training, name + "Response").FromString)
        future = call.future(request, timeout=600)
        self.addCleanup(future.cancel)
        return future

    def save_for_long(self, copied):
        """A disk holds a Save of one worker for longer than a loop may rest (gated_fsync.c);
        forward passes go on. `copied`: there is memory for a copy, else optimizer steps wait.

        A loop that waits for the Save rests until the gate opens. One that waits for a processor
        turns again, so each look may be late."""
        gate = os.path.join(self.folder, "gate")
        workers, root = self.saving_group(gate)
        client = Trainer(workers[0].address)
        self.addCleanup(client.close)
        layer, _, x, dy, _ = next(golden_gradients(FAMILY))
        client.backward(layer, dy, x, client.forward(layer, x))
        client.optimizer_step()  # else there is nothing to copy
        if not copied:
            with open("%s.memory.%d" % (gate, workers[0].process.pid), "w") as memory:
                memory.write("MemAvailable: 0 kB\n")
        with open(gate, "w"):
            pass
        self.addCleanup(lambda: os.path.exists(gate) and os.remove(gate))
        save = self.begin(client, "SaveCheckpoint",
                          training.SaveCheckpointRequest(step_id=10, name="slow"))
        wait_until(lambda: client.state().saving == "slow", CEILING_S)
        step = self.begin(client, "OptimizerStep",
                          training.OptimizerStepRequest(step_id=11, learning_rate=0.01))
        end, looks = time.monotonic() + PATIENT_S + 1, 0
        while time.monotonic() < end:
            for each in workers:
                wait_until(lambda: each.probes() == (True,) * 5, CEILING_S)
            self.assertEqual(len(client.forward(layer, x).y_data), 4 * x.size)
            looks += 1
            time.sleep(0.02)
        for each in workers:
            self.serves("long Save", each)
        print("    all probes said so %d times in %.0f s" % (looks, PATIENT_S + 1))
        if copied:
            self.assertFalse(step.result().repeated)
        self.assertEqual(client.state().saving, "slow")
        self.assertEqual((save.done(), step.done()), (False, copied))
        os.remove(gate)
        self.assertGreater(save.result().bytes, 0)
        self.assertIn("slow", os.listdir(root))
        self.assertFalse(step.result().repeated)

    def test_long_save(self):
        self.save_for_long(copied=True)

    def test_long_save_without_memory_for_a_copy(self):
        self.save_for_long(copied=False)

    def test_hung_peer(self):
        """In an idle group: no client notices it first."""
        _, workers = self.group(2, lease_ms=5000)
        self.serves("serving", workers[0])
        freeze(workers[1].process.pid)
        self.expect("hung peer", workers[0], True, False, "NO_VIEW")
        time.sleep(DEAD_S + 1)
        self.expect("hung peer, for long", workers[0], True, False, "NO_VIEW")
        os.kill(workers[1].process.pid, signal.SIGCONT)
        self.serves("peer runs again", workers[0])
        self.serves("the peer itself", workers[1])

    def test_lost_coordinator(self):
        for training in (False, True):
            kind = "training" if training else "serving"
            coordinator, (worker,) = self.group(1, *(["--training", "sgd"] if training else []),
                                                lease_ms=3000)
            self.serves(kind, worker)
            coordinator.stop()
            if training:
                self.expect("lost coordinator, training", worker, True, False, "NO_LEASE")
            time.sleep(DEAD_S + 1)
            if training:
                self.expect("lost coordinator, training, for long", worker, True, False,
                            "NO_LEASE")
            else:
                self.serves("lost coordinator, for long", worker)

    def test_draining(self):
        coordinator, (worker,) = self.group(1, "--drain-ms", "600000")
        self.serves("serving", worker)
        self.hold("slow")
        with wire.open_channel(worker.address) as channel:
            x = np.ones((1, 64), np.float32)
            answer = channel.unary_unary(
                "/moe.v1.ExpertService/Forward",
                request_serializer=expert.ForwardRequest.SerializeToString,
                response_deserializer=expert.ForwardResponse.FromString).future(
                    expert.ForwardRequest(layer=0, tokens=1, hidden=64, dtype=1,
                                          x_data=x.tobytes()), timeout=600)
            self.says(worker, "metrics", "moe_queue_tokens 1")
            coordinator.process.terminate()
            self.expect("draining", worker, True, False, "DRAINING")
            self.expect("coordinator of a group that drains", coordinator, True, False,
                        "DRAINING")
            self.hold("")
            self.assertEqual(len(answer.result().y_data), 4 * 64)
        self.assertEqual([each.process.wait(CEILING_S) for each in (worker, coordinator)], [0, 0])

    def test_watch_tells_a_stop_by_itself(self):
        """A client of Watch sees each change, without asking."""
        _, (worker,) = self.group(1)
        self.serves("serving", worker)
        serving, not_serving = b"\x08\x01", b"\x08\x02"
        seen, changed = [], threading.Condition()
        with wire.open_channel(worker.address) as channel:
            watch = channel.unary_stream("/grpc.health.v1.Health/Watch")(b"\n\x09moed.live")

            def read():
                with contextlib.suppress(grpc.RpcError):
                    for message in watch:
                        with changed:
                            seen.append(message)
                            changed.notify()

            reader = threading.Thread(target=read)
            reader.start()

            def wait_for(state):
                with changed:
                    self.assertTrue(changed.wait_for(lambda: seen[-1:] == [state], CEILING_S), seen)

            try:
                wait_for(serving)
                self.hold("stuck")
                wait_for(not_serving)
                self.hold("")
                wait_for(serving)
            finally:
                watch.cancel()
                reader.join()
        self.assertTrue(all(a != b for a, b in zip(seen, seen[1:])), seen)  # changes only
        self.assertEqual(set(seen), {serving, not_serving})


if __name__ == "__main__":
    main()
