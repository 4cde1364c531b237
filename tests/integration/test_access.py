# SPDX-License-Identifier: Apache-2.0
"""Who may do what: real daemons, stock gRPC clients with and without an identity.

The matrix walks the descriptors, so a new method is tested without a change here."""

import contextlib
import hashlib
import json
import os
import shutil
import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import unittest
import unittest.mock

import grpc
import numpy as np

from group import (BACKEND, BUILD, MOECTL, group, main, model_directory, moed, open_files,
                   wait_until)
from google.protobuf import descriptor_pb2
from moed._channel import local_socket
from ports import free_ports

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "attack"))
import h2  # noqa: E402
from wire import expert  # noqa: E402

FAMILY = "qwen3_moe"
STRANGER = 65534  # a user without rights
COORDINATOR = os.path.join(BUILD, "daemon", "coordinator", "moe-coordinator")
WORKER = os.path.join(BUILD, "daemon", "worker", "moe-worker")

CALLS = {"client", "trainer", "admin"}
READS = CALLS | {"worker", "metrics"}
TRAINS, KEEPS = {"trainer"}, {"trainer", "admin"}
ROLES = sorted(READS)
# The promise to users, written down a second time: daemon/access/policy.c has the first.
POLICY = {
    "moe.v1.ExpertService": {"Forward": CALLS, "ForwardStream": CALLS, "GetServerInfo": READS,
                             "GetModel": READS, "OpenRegions": CALLS,
                             "ListRegions": {"admin"}},
    "moe.v1.TrainingService": {
        "Backward": TRAINS, "OptimizerStep": TRAINS, "ZeroGrad": TRAINS, "SetFrozen": TRAINS,
        "GetTrainState": KEEPS, "SaveCheckpoint": KEEPS, "LoadCheckpoint": KEEPS,
        "ListCheckpoints": KEEPS, "RecoverTraining": KEEPS, "ExportAdapter": KEEPS},
    "moe.v1.AdminService": {
        "GetStatus": {"trainer", "worker", "admin", "metrics"},
        "GetPlacement": {"admin", "metrics"}, "DrainWorker": {"admin"}, "Scale": {"admin"},
        "Rebalance": {"admin"},
        "Shutdown": {"admin"},
        "AcceptModel": {"admin"}, "LoadModel": {"admin"}, "UnloadModel": {"admin"},
        "ListModels": {"trainer", "worker", "admin", "metrics"}, "CordonSlot": {"admin"},
        "SetLogLevel": {"admin"},
        "GetMetrics": {"admin", "metrics"}, "ListEvents": {"admin", "metrics"}},
    "moe.v1.CoordinatorService": {"Session": {"worker"}},
    "moe.v1.WorkerService": {"Sequence": {"worker"}},
    "grpc.health.v1.Health": {m: None for m in ("Check", "List", "Watch")},  # None: everyone
    "grpc.reflection.v1.ServerReflection": {"ServerReflectionInfo": READS},
    "grpc.reflection.v1alpha.ServerReflection": {"ServerReflectionInfo": READS},
}
TOKENS = {role: f"the-token-of-the-role-{role}" for role in ROLES}


def methods():
    """(service, method) of all services of the descriptor set."""
    with open(os.path.join(BUILD, "proto", "gen", "descriptors.pb"), "rb") as file:
        files = descriptor_pb2.FileDescriptorSet.FromString(file.read())
    return [(f"{f.package}.{s.name}", m.name)
            for f in files.file for s in f.service for m in s.method]


def answer(channel, service, method, token=None):
    """The code of a call without content. A stream that is let in and stays open is OK."""
    header = [("authorization", f"Bearer {token}")] if token else []
    call = channel.stream_stream(f"/{service}/{method}")(
        iter(()), timeout=5, metadata=header)
    try:
        for _ in call:
            call.cancel()
            return grpc.StatusCode.OK
        return grpc.StatusCode.OK
    except grpc.RpcError as error:
        return error.code()


REFUSALS = (grpc.StatusCode.PERMISSION_DENIED, grpc.StatusCode.UNAUTHENTICATED)


def plain(endpoint):
    """A connection over TCP, as any user of the host can make one."""
    return grpc.insecure_channel(endpoint, options=[("grpc.use_local_subchannel_pool", 1)])


def directory():
    return tempfile.TemporaryDirectory(prefix="moed-access-", ignore_cleanup_errors=True)


READ_ANEW = "the rules were read anew"


def write(path, text, mode=0o600):
    """Replaces the file at once, as a rotation does."""
    with open(path + ".new", "w", encoding="ascii") as file:
        file.write(text)
    os.chmod(path + ".new", mode)
    os.rename(path + ".new", path)


def read(path):
    with open(path, encoding="utf8") as file:
        return file.read()


class Daemons:
    """A coordinator and workers, each with its own options; none has a way around its token."""

    def __init__(self, where):
        self.where, self.all, self.logs = where, [], []
        self.environment = dict(os.environ, MOED_RUNTIME_DIR=os.path.join(where, "run"))

    def start(self, name, program, *options, environment=None):
        ready, ours = os.pipe()
        log = os.path.join(self.where, name + ".log")
        process = subprocess.Popen(
            [program, "--ready-fd", str(ours), "--log-file", log, *options],
            pass_fds=[ours], env=environment or self.environment, stderr=subprocess.PIPE)
        os.close(ours)
        self.all.append(process)
        self.logs.append(log)
        with os.fdopen(ready) as file:
            process.endpoint = file.readline().strip()
        process.log = log
        return process

    def coordinator(self, *options, workers=1):
        return self.start("coordinator", COORDINATOR, "--listen", "127.0.0.1:0", "--workers",
                          str(workers), *options)

    def worker(self, coordinator, name, *options, **more):
        return self.start(name, WORKER, "--listen", "127.0.0.1:0", "--model",
                          model_directory(FAMILY), "--coordinator", coordinator, "--backend",
                          BACKEND, "--threads", "1", "--worker-id", name, *options, **more)

    def text(self):
        return "".join(read(log) for log in self.logs if os.path.exists(log))

    def stop(self):
        for process in reversed(self.all):
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
        for process in self.all:
            try:
                process.wait(timeout=20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            process.stderr.close()


@contextlib.contextmanager
def daemons():
    with directory() as where:
        d = Daemons(where)
        try:
            yield d
        finally:
            d.stop()


def access_file(roles=TOKENS, **more):
    tokens = {}
    for role, token in roles.items():
        tokens[role] = {"sha256": hashlib.sha256(token.encode()).hexdigest(), "roles": [role]}
        if role == "worker":
            tokens[role]["worker_ids"] = ["w1"]
    return json.dumps({"tokens": tokens, **more})


class OneHost(unittest.TestCase):
    """The default of moectl up: no certificate, no token."""

    @classmethod
    def setUpClass(cls):
        cls.context = group(FAMILY, 1)
        cls.group = cls.context.__enter__()
        coordinator = cls.group.description()["processes"][0]["endpoint"]
        cls.endpoints = {"coordinator": coordinator, "worker": cls.group.endpoint}

    @classmethod
    def tearDownClass(cls):
        cls.context.__exit__(None, None, None)

    def test_the_table_names_all_methods(self):
        self.assertEqual(sorted(methods()),
                         sorted((s, m) for s, ms in POLICY.items() for m in ms))

    def test_tcp_offers_what_a_client_may(self):
        for endpoint in self.endpoints.values():
            with plain(endpoint) as channel:
                for service, method in methods():
                    may = POLICY[service][method]
                    code = answer(channel, service, method)
                    self.assertEqual(code not in REFUSALS, may is None or "client" in may,
                                     f"{service}/{method}: {code}")

    def test_the_owner_may_do_all(self):
        for endpoint in self.endpoints.values():
            path = local_socket(endpoint)
            self.assertIsNotNone(path)
            with grpc.insecure_channel(f"unix:{path}") as channel:
                for service, method in methods():
                    self.assertNotIn(answer(channel, service, method), REFUSALS, method)

    @unittest.skipIf(os.geteuid() != 0, "only root can be another user")
    def test_another_user_is_refused_with_a_clear_text(self):
        folder = tempfile.mkdtemp(prefix="moed-stranger-")  # the build may be closed to others
        self.addCleanup(shutil.rmtree, folder)
        os.chmod(folder, 0o755)
        program = shutil.copy(MOECTL, folder)
        for endpoint in self.endpoints.values():
            for command in ("status", "health", "down"):
                done = subprocess.run(
                    [program, command, "--endpoint", endpoint], user=STRANGER, group=STRANGER,
                    capture_output=True, text=True, timeout=60, check=False,
                    env={"PATH": os.environ["PATH"], "HOME": "/"})
                self.assertEqual((done.returncode, done.stdout), (6, ""), done.stderr)
                self.assertIn("this connection has no identity", done.stderr)
                self.assertIn("a token or certificate (", done.stderr)  # the text is not cut off
                self.assertIn("run as the group's user", done.stderr)
        done = subprocess.run(
            [program, "bench", "--endpoint", self.endpoints["worker"], "--layer", "0",
             "--duration", "1"], user=STRANGER, group=STRANGER, capture_output=True, text=True,
            timeout=60, check=False, env={"PATH": os.environ["PATH"], "HOME": "/"})
        self.assertEqual(done.returncode, 0, done.stderr)  # a client may find out what it calls
        y = moed.Client(self.group.endpoint).forward(0, np.ones((1, 64), np.float32))
        self.assertTrue(np.isfinite(y).all())  # the group goes on

    def test_the_socket_is_private(self):
        path = local_socket(self.group.endpoint)
        self.assertEqual(os.lstat(path).st_mode & 0o777, 0o600)
        self.assertEqual(os.lstat(os.path.dirname(path)).st_mode & 0o777, 0o700)


def field(name, value):
    """A header field as it is, however long."""
    length, rest = b"", len(value) - 127
    while rest >= 128:
        length, rest = length + bytes([rest & 127 | 128]), rest >> 7
    start = b"\x7f" + length + bytes([rest]) if len(value) >= 127 else bytes([len(value)])
    return b"\x00" + h2.text(name) + start + value


def raw_status(endpoint, path, values):
    """(grpc-status, bytes of the answer) of a call with these authorization headers, byte for
    byte: stock clients do not send them all."""
    block = h2.call_headers(path) + b"".join(field(b"authorization", each) for each in values)
    parts = [block[i : i + 16000] for i in range(0, len(block), 16000)]
    frames = [h2.frame(h2.HEADERS if i == 0 else h2.CONTINUATION,
                       h2.END_HEADERS if i == len(parts) - 1 else 0, 1, part)
              for i, part in enumerate(parts)]
    with h2.connect(endpoint) as peer:
        peer.settimeout(5)
        peer.sendall(h2.begin() + b"".join(frames) +
                     h2.frame(h2.DATA, h2.END_STREAM, 1, b"\0\0\0\0\0"))
        answer = b""
        try:
            while not re.search(rb"grpc-status..", answer, re.DOTALL):
                more = peer.recv(65536)
                if more == b"":
                    return None, answer
                answer += more
        except socket.timeout:
            return None, answer
    found = re.search(rb"grpc-status[\x01\x02](\d+)", answer)
    return int(found.group(1)) if found else None, answer


class RetainedPasses(unittest.TestCase):
    def retain_by_stream(self, endpoint, token, x):
        """The code of an item of ForwardStream."""
        request = expert.ForwardStreamRequest(
            tokens=len(x), hidden=x.shape[1], dtype=1, x_data=x.tobytes(),
            retain=expert.RetainForBackward(session="run", micro_batch_id=2), request_id=1)
        header = [("authorization", f"Bearer {token}")] if token else []
        with plain(endpoint) as channel:
            call = channel.stream_stream("/moe.v1.ExpertService/ForwardStream")(
                iter([request.SerializeToString()]), timeout=20, metadata=header)
            code = expert.ForwardStreamResponse.FromString(next(call)).error.code
            call.cancel()
        return next(each for each in grpc.StatusCode if each.value[0] == code)

    def test_only_trainers_have_passes_retained(self):
        """A pass takes the place of one with the same session and number, and evicts others."""
        with daemons() as d:
            rules = os.path.join(d.where, "access.json")
            write(rules, access_file(identities={"anonymous": {"roles": ["client"]}}))
            c = d.coordinator("--access-file", rules)
            w = d.worker(c.endpoint, "w1", "--access-file", rules, "--training", "sgd")
            wait_until(lambda: "serving under epoch" in read(w.log))
            files = {role: os.path.join(d.where, role) for role in ("client", "trainer", "admin")}
            for role, path in files.items():
                write(path, TOKENS[role])
            rng = np.random.default_rng(7)
            x, dy = (rng.standard_normal((4, 64), np.float32) for _ in range(2))
            with moed.Client(w.endpoint, token_file=files["trainer"], timeout=20) as trainer:
                first = trainer.forward(0, x, retain=("run", 1))
                want = trainer.backward(0, dy, session="run", micro_batch_id=1, retained=True)
                trainer.forward(0, x, retain=("run", 2))
                for role in ("client", "admin", None):
                    with moed.Client(w.endpoint, token_file=files.get(role), timeout=20) as other:
                        np.testing.assert_array_equal(other.forward(0, x), first)
                        with self.assertRaisesRegex(moed.MoeError, "retained.*trainer") as caught:
                            other.forward(0, 7 * x, retain=("run", 2))
                        self.assertIn(caught.exception.code, REFUSALS)
                    self.assertEqual(self.retain_by_stream(w.endpoint, TOKENS.get(role), 7 * x),
                                     caught.exception.code)
                got = trainer.backward(0, dy, session="run", micro_batch_id=2, retained=True)
                np.testing.assert_array_equal(got.dx, want.dx)


class AdminAddress(unittest.TestCase):
    def test_trainers_have_an_address_that_is_not_for_clients(self):
        with daemons() as d:
            rules, admin = os.path.join(d.where, "access.json"), f"127.0.0.1:{free_ports(1)[0]}"
            write(rules, access_file())
            c = d.coordinator("--access-file", rules)
            checkpoints = os.path.join(d.where, "checkpoints")
            os.mkdir(checkpoints)
            w = d.worker(c.endpoint, "w1", "--access-file", rules, "--training", "sgd",
                         "--training-dir", checkpoints, "--admin-listen", admin)
            wait_until(lambda: "serving under epoch" in read(w.log))
            missing = {w.endpoint: {"moe.v1.TrainingService", "moe.v1.AdminService",
                                    "moe.v1.CoordinatorService", "moe.v1.WorkerService"},
                       admin: {"moe.v1.AdminService", "moe.v1.CoordinatorService",
                               "moe.v1.WorkerService"}}
            calls = 0
            for endpoint, not_here in missing.items():
                with plain(endpoint) as channel:
                    for service, method in methods():
                        may = POLICY[service][method]
                        for role in ROLES:
                            code = answer(channel, service, method, TOKENS[role])
                            calls += 1
                            where = f"{endpoint} {role}: {service}/{method}: {code}"
                            self.assertEqual(code not in REFUSALS, may is None or role in may,
                                             where)
                            if code not in REFUSALS:
                                here = method in ("GetMetrics", "SetLogLevel")  # each daemon
                                self.assertEqual(code == grpc.StatusCode.UNIMPLEMENTED,
                                                 service in not_here and not here, where)
            print(calls, "calls to two addresses")
            self.operate(d, c.endpoint, w.endpoint, admin)
            bad = d.worker("127.0.0.1:1", "w2", "--admin-listen", "nowhere")
            self.assertEqual(bad.wait(timeout=20), 2)
            bad = d.worker("127.0.0.1:1", "w3", "--advertise", "0.0.0.0:7600")
            self.assertEqual(bad.wait(timeout=20), 2)

    def operate(self, d, coordinator, clients, admin):
        """moectl finds the trainers' address from that of the coordinator or of the clients."""
        token = os.path.join(d.where, "admin.token")
        write(token, TOKENS["admin"])

        def moectl(*arguments):
            return subprocess.run(
                [MOECTL, *arguments, "--token-file", token], env=d.environment | {
                    "MOED_RUNTIME_DIR": os.path.join(d.where, "elsewhere")},
                capture_output=True, text=True, timeout=60, check=False)

        for name, endpoint in (("c1", coordinator), ("c2", clients), ("c3", admin)):
            at = ("--endpoint", endpoint)
            done = moectl("training", *at)
            self.assertIn("0 of SGD", done.stdout, done.stderr)
            done = moectl("training", "save", name, *at)
            self.assertEqual(done.returncode, 0, done.stderr)
            self.assertIn(name, moectl("training", "list", *at).stdout)
        control = f"127.0.0.1:{free_ports(1)[0]}"
        d.start("other", COORDINATOR, "--listen", "127.0.0.1:0", "--control-listen", control,
                "--access-file", os.path.join(d.where, "access.json"))
        for words in (["status"], ["training"], ["bench", "--layer", "0"]):
            self.assertIn("for daemons alone", moectl(*words, "--endpoint", control).stderr)
        write(token + ".trainer", TOKENS["trainer"])
        with moed.Client(clients, token_file=token + ".trainer", timeout=20) as client:
            self.assertEqual(client.info.training_endpoint, admin)
            with self.assertRaisesRegex(moed.MoeError, "trainers connect to " + admin):
                client.train_state()
        with moed.Client(admin, token_file=token + ".trainer", timeout=20) as client:
            x = np.ones((1, client.layers[0].hidden), np.float32)
            seen = client.forward(0, x, return_routing=True)
            client.backward(0, x, x, seen.topk_ids, session="s", micro_batch_id=1,
                            topk_weights=seen.topk_weights, weights_version=seen.weights_version)
            client.optimizer_step(1e-3, session="s",
                                  step_id=client.train_state().last_step_id + 1,
                                  expected_backwards=1)
        done = moectl("model", "accept", "--endpoint", clients)
        self.assertIn("end all workers first", done.stderr)
        done = moectl("down", "--endpoint", coordinator)
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertIn("1 optimizer step since checkpoint c3 was not saved", done.stderr)


# Runs as another user of the host: reads what to try on stdin, and prints what it got.
AS_STRANGER = '''
import json, os, socket, sys
import grpc

todo = json.load(sys.stdin)

def attempt(what, *arguments):
    try:
        what(*arguments)
        return "allowed"
    except OSError as error:
        return type(error).__name__

def answer(channel, path):
    call = channel.stream_stream(path)(iter(()), timeout=5)
    try:
        for _ in call:
            call.cancel()
            break
        return "OK"
    except grpc.RpcError as error:
        return error.code().name

def connect(path):
    with socket.socket(socket.AF_UNIX) as peer:
        peer.connect(path)

got = {"uid": os.geteuid(), "calls": {}, "files": {}, "folders": {}, "sockets": {}, "cmdline": {}}
for port in todo["ports"]:
    with grpc.insecure_channel("127.0.0.1:%d" % port,
                               options=[("grpc.use_local_subchannel_pool", 1)]) as channel:
        got["calls"][port] = {path: answer(channel, path) for path in todo["methods"]}
for path in todo["files"]:
    got["files"][path] = attempt(lambda: open(path, "rb").read(1))
for path in todo["folders"]:
    got["folders"][path] = attempt(os.listdir, path)
for path in todo["sockets"]:
    got["sockets"][path] = attempt(connect, path)
for pid in todo["pids"]:
    with open("/proc/%d/cmdline" % pid, encoding="utf8") as file:
        got["cmdline"][pid] = file.read()
json.dump(got, sys.stdout)
'''


def listening_ports(pid):
    inodes = set()
    for target in open_files(pid).values():
        if target.startswith("socket:["):
            inodes.add(target[len("socket:["):-1])
    fields = [line.split() for line in read("/proc/%d/net/tcp" % pid).splitlines()[1:]]
    return [int(each[1].split(":")[1], 16) for each in fields
            if each[3] == "0A" and each[9] in inodes]


@unittest.skipIf(os.geteuid() != 0, "only root can be another user")
class AnotherUser(unittest.TestCase):
    def test_no_call_file_or_socket_of_the_group_is_open_to_another_user(self):
        secret = "the-token-that-no-stranger-may-see"
        with directory() as where:
            os.chmod(where, 0o755)  # its privacy must not be what helps
            training, config = os.path.join(where, "training"), os.path.join(where, "workers")
            token = os.path.join(where, "token")
            os.mkdir(training, 0o755)
            write(token, secret + "\n")
            write(config, "training = adamw\ntraining-dir = %s\n" % training)
            context = group(FAMILY, 2, "--worker-config", config, "--token-file", token)
            with context as g:
                os.chmod(g.state, 0o700)
                moed.Client(g.endpoint).save_checkpoint("first", step_id=1)
                processes = g.description()["processes"]
                pids = [each["pid"] for each in processes]
                ports = {pid: listening_ports(pid) for pid in pids}
                self.assertEqual([len(each) for each in ports.values()], [2, 2, 2])
                files, folders = [token], [g.state]
                for root in (g.state, os.path.join(training, "first")):
                    for folder, below, names in os.walk(root):
                        folders += [os.path.join(folder, each) for each in below]
                        files += [os.path.join(folder, each) for each in names]
                folders.append(os.path.join(training, "first"))
                sockets = [local_socket(each["endpoint"]) for each in processes]
                self.assertNotIn(None, sockets)
                for pid in pids:
                    folders.append("/proc/%d/fd" % pid)
                    files += ["/proc/%d/%s" % (pid, each) for each in ("environ", "mem", "maps")]
                    files += [path for path, target in open_files(pid).items()
                              if "memfd:" in target]
                self.assertTrue(any("/fd/" in each for each in files))  # shared memory
                todo = {"ports": sum(ports.values(), []), "files": files, "folders": folders,
                        "sockets": sockets, "pids": pids,
                        "methods": [f"/{s}/{m}" for s, m in methods()]}
                done = subprocess.run(
                    ["/usr/bin/python3", "-c", AS_STRANGER], input=json.dumps(todo),
                    user=STRANGER, group=STRANGER, extra_groups=[], capture_output=True, text=True,
                    timeout=100, check=False, cwd="/",
                    env={"PATH": os.environ["PATH"], "HOME": "/"})
                self.assertEqual(done.returncode, 0, done.stderr)
                got = json.loads(done.stdout)
                self.assertEqual(got["uid"], STRANGER)
                refused = {each.name for each in REFUSALS}
                for port, calls in got["calls"].items():
                    for path, code in calls.items():
                        service, method = path[1:].split("/")
                        may = POLICY[service][method]
                        self.assertEqual(code in refused, may is not None and "client" not in may,
                                         f"{port} {path}: {code}")
                for kind in ("files", "folders", "sockets"):
                    for path, what in got[kind].items():
                        self.assertIn(what, ("PermissionError", "FileNotFoundError"), path)
                for text in got["cmdline"].values():
                    self.assertNotIn(secret, text)
                print("%d calls to %d ports, %d files, %d folders, %d sockets" % (
                    sum(map(len, got["calls"].values())), len(got["calls"]), len(files),
                    len(folders), len(sockets)))
                y = moed.Client(g.endpoint).forward(0, np.ones((1, 64), np.float32))
                self.assertTrue(np.isfinite(y).all())  # the group goes on


class Up(unittest.TestCase):
    """moectl up with files of trust: its daemons have them, and so have those of replace."""

    def test_a_group_with_a_token_comes_up_is_mended_and_goes_down(self):
        secret = "the-token-of-a-group-of-moectl-up"
        with directory() as where:
            token, state = os.path.join(where, "token"), os.path.join(where, "state")
            write(token, secret + "\n")
            here = dict(os.environ, MOED_RUNTIME_DIR=os.path.join(where, "run"))
            outside = dict(os.environ, MOED_RUNTIME_DIR=os.path.join(where, "outside"))

            def moectl(*arguments, environment=here):
                return subprocess.run([MOECTL, *arguments], capture_output=True, text=True,
                                      timeout=120, check=False, env=environment, cwd=where)

            missing = moectl("up", "--model", model_directory(FAMILY), "--port", "0",
                             "--state-dir", state, "--token-file", "nowhere")
            self.assertEqual(missing.returncode, 4, missing.stderr)
            self.assertIn("--token-file: there is no file 'nowhere'", missing.stderr)
            up = moectl("up", "--model", model_directory(FAMILY), "--workers", "2", "--backend",
                        BACKEND, "--port", "0", "--detach", "--state-dir", state,
                        "--token-file", "token")  # a relative name
            self.assertEqual(up.returncode, 0, up.stderr)
            try:
                text = read(os.path.join(state, "group.json"))
                processes = json.loads(text)["processes"]
                self.assertNotIn(secret, text)
                for process in processes:
                    for file in ("cmdline", "environ"):
                        content = read("/proc/%d/%s" % (process["pid"], file))
                        self.assertNotIn(secret, content)
                    self.assertIn("--token-file\0" + os.path.realpath(token),
                                  read("/proc/%d/cmdline" % process["pid"]))
                coordinator, worker = processes[0]["endpoint"], processes[1]["endpoint"]
                # Elsewhere, as in a container, the token alone counts.
                for endpoint in (coordinator, worker):
                    self.assertEqual(moectl("status", "--endpoint", endpoint, environment=outside)
                                     .returncode, 6)
                    self.assertEqual(moectl("status", "--endpoint", endpoint, "--token-file", token,
                                            environment=outside).returncode, 0)
                self.assertEqual(moectl("status", "--state-dir", state).returncode, 0)
                os.kill(processes[2]["pid"], signal.SIGKILL)
                mended = moectl("replace", "--state-dir", state)
                self.assertEqual(mended.returncode, 0, mended.stderr)
                waited = moectl("wait", "--state-dir", state, "--timeout", "30")
                self.assertEqual(waited.returncode, 0, waited.stderr)
                new = json.loads(read(os.path.join(state, "group.json")))["processes"][2]
                self.assertNotEqual(new["pid"], processes[2]["pid"])
                self.assertEqual(moectl("status", "--endpoint", new["endpoint"], "--token-file",
                                        token, environment=outside).returncode, 0)
            finally:
                down = moectl("down", "--state-dir", state, "--token-file", token)
            self.assertEqual(down.returncode, 0, down.stderr)
            for name in os.listdir(state):
                path = os.path.join(state, name)
                if os.path.isfile(path):
                    self.assertNotIn(secret, read(path), name)


class Headers(unittest.TestCase):
    def test_a_malformed_authorization_has_one_clear_answer(self):
        token, unauthenticated = b"the-token-of-this-group-0123", 16
        malformed = {
            "empty": [b""], "no scheme": [token], "another scheme": [b"Basic " + token],
            "no token": [b"Bearer"], "no token, but a blank": [b"Bearer "],
            "two blanks": [b"Bearer  " + token], "a blank inside": [b"Bearer the token"],
            "no blank": [b"Bearer" + token], "NUL": [b"Bearer " + token + b"\0"],
            "NUL first": [b"\0Bearer " + token], "control": [b"Bearer \x1b[31m" + token],
            "line break": [b"Bearer " + token + b"\r\nx: y"], "bytes": [b"Bearer \xff\xfe" + token],
            "twice": [b"Bearer " + token] * 2, "two": [b"Bearer " + token, b"Basic x"],
            "long": [b"Bearer " + token * 250], "longer": [b"Bearer " + token * 440],
        }
        with daemons() as d:
            path = os.path.join(d.where, "token")
            write(path, token.decode() + "\n")
            c = d.coordinator("--token-file", path)
            local = os.path.join(d.environment["MOED_RUNTIME_DIR"], next(
                name for name in os.listdir(d.environment["MOED_RUNTIME_DIR"])
                if name.endswith(".sock")))
            call = b"/moe.v1.AdminService/GetStatus"
            for scheme in (b"Bearer", b"bearer", b"BEARER", b"bEaReR"):
                self.assertEqual(raw_status(c.endpoint, call, [scheme + b" " + token])[0], 0)
            for endpoint in (c.endpoint, "unix:" + local):  # the owner's rights do not count
                for name, values in malformed.items():
                    status, answer = raw_status(endpoint, call, values)
                    with self.subTest(name, endpoint=endpoint):
                        self.assertNotIn(token, answer)
                        # Some bytes end the connection before a call exists.
                        self.assertIn(status, (unauthenticated, None))
                        if name not in ("NUL", "NUL first", "control", "line break", "bytes"):
                            self.assertEqual(status, unauthenticated)
                            self.assertIn(b"the authorization header is malformed", answer)
            status, answer = raw_status(c.endpoint, call, [b"Bearer " + token * 600])
            print("17 KiB:", status)
            self.assertNotEqual(status, 0)
            self.assertEqual(raw_status(c.endpoint, call, [b"Bearer " + token])[0], 0)
            self.assertNotIn(token.decode(), d.text())


class Audit(unittest.TestCase):
    def test_refused_calls_do_not_fill_the_log(self):
        calls = 3000
        with daemons() as d:
            rules = os.path.join(d.where, "access.json")
            write(rules, access_file())
            c = d.coordinator("--access-file", rules)
            with plain(c.endpoint) as channel:
                shutdown = channel.unary_unary("/moe.v1.AdminService/Shutdown")
                for _ in range(calls // 50):
                    for future in [shutdown.future(b"", timeout=10, metadata=[
                            ("authorization", f"Bearer {TOKENS['client']}")]) for _ in range(50)]:
                        self.assertIn(future.code(), REFUSALS)
            wait_until(lambda: "more calls were refused" in read(c.log))
            text = read(c.log)
            lines = [line for line in text.splitlines() if "audit:" in line]
            counted = sum(int(n) for n in re.findall(r"audit: (\d+) more calls were refused", text))
            single = sum("Shutdown by token:client at" in line and "more calls" not in line
                         for line in lines)
            print(calls, "refused calls:", len(lines), "lines,", counted, "counted")
            self.assertEqual(single + counted, calls)
            self.assertLess(len(lines), 60)
            self.assertIn("the last one: moe.v1.AdminService/Shutdown by token:client", text)


class Tokens(unittest.TestCase):
    def test_each_role_may_call_its_methods_and_no_others(self):
        with daemons() as d:
            rules = os.path.join(d.where, "access.json")
            write(rules, access_file())
            c = d.coordinator("--access-file", rules)
            w = d.worker(c.endpoint, "w1", "--access-file", rules)
            calls = 0
            for endpoint in (c.endpoint, w.endpoint):
                with plain(endpoint) as channel:
                    for service, method in methods():
                        may = POLICY[service][method]
                        for role in ROLES:
                            code = answer(channel, service, method, TOKENS[role])
                            self.assertEqual(code not in REFUSALS, may is None or role in may,
                                             f"{role}: {service}/{method}: {code}")
                        wrong = answer(channel, service, method, "a-token-of-no-caller-at-all")
                        self.assertEqual(wrong != grpc.StatusCode.UNAUTHENTICATED, may is None)
                        calls += 1
            print(calls, "methods of 2 daemons x", len(ROLES) + 1, "tokens")
            text = d.text()
            self.assertRegex(text, r"audit: moe.v1.AdminService/Shutdown by token:admin at "
                                   r"127.0.0.1: INVALID_ARGUMENT")
            self.assertRegex(text, r"audit: moe.v1.AdminService/DrainWorker by token:client at "
                                   r"127.0.0.1: PERMISSION_DENIED")
            for secret in TOKENS.values():
                self.assertNotIn(secret, text)
                self.assertNotIn(hashlib.sha256(secret.encode()).hexdigest(), text)

    def test_a_token_that_loses_its_role_loses_its_streams(self):
        with daemons() as d:
            rules = os.path.join(d.where, "access.json")
            write(rules, access_file())
            c = d.coordinator("--access-file", rules)
            with plain(c.endpoint) as channel:
                reflect = channel.stream_stream(
                    "/grpc.reflection.v1.ServerReflection/ServerReflectionInfo")
                hold = threading.Event()

                def wait():
                    hold.wait(30)
                    yield from ()

                stream = reflect(wait(), metadata=[
                    ("authorization", f"Bearer {TOKENS['metrics']}")])
                self.assertNotIn(answer(channel, "moe.v1.AdminService", "GetPlacement",
                                        TOKENS["metrics"]), REFUSALS)
                write(rules, "rubbish")  # changes nothing
                time.sleep(4)
                self.assertTrue(stream.is_active())
                left = {r: t for r, t in TOKENS.items() if r != "metrics"}
                begun = time.monotonic()
                write(rules, access_file(left))
                wait_until(lambda: not stream.is_active())
                print("gone after %.1f s" % (time.monotonic() - begun))
                hold.set()
                self.assertIn(stream.code(), (grpc.StatusCode.UNAVAILABLE,
                                              grpc.StatusCode.CANCELLED))
            with plain(c.endpoint) as channel:
                # A call may still leave on the connection that ends.
                wait_until(lambda: answer(channel, "moe.v1.AdminService", "GetPlacement",
                                          TOKENS["metrics"]) != grpc.StatusCode.UNAVAILABLE, 10)
                self.assertEqual(answer(channel, "moe.v1.AdminService", "GetPlacement",
                                        TOKENS["metrics"]), grpc.StatusCode.UNAUTHENTICATED)
                self.assertNotIn(answer(channel, "moe.v1.AdminService", "GetPlacement",
                                        TOKENS["admin"]), REFUSALS)
            self.assertIn("the rules read before stay in force", d.text())

    def test_a_hundred_new_access_files_under_load_cost_no_call(self):
        """Each has the tokens that are in use, and another identity; every tenth is rubbish.
        SIGHUP makes the daemon look at once."""
        with daemons() as d:
            rules = os.path.join(d.where, "access.json")
            write(rules, access_file())
            c = d.coordinator("--access-file", rules)
            w = d.worker(c.endpoint, "w1", "--access-file", rules)
            wait_until(lambda: "serving under epoch" in read(w.log))
            codes, stop = [], threading.Event()

            def load():
                with plain(w.endpoint) as channel:
                    call = channel.unary_unary("/moe.v1.ExpertService/GetModel")
                    while not stop.is_set():
                        try:
                            call(b"", timeout=10, metadata=[
                                ("authorization", f"Bearer {TOKENS['client']}")])
                            codes.append(grpc.StatusCode.OK)
                        except grpc.RpcError as error:
                            codes.append(error.code())

            threads = [threading.Thread(target=load) for _ in range(3)]
            for thread in threads:
                thread.start()
            for i in range(100):
                name = f"spiffe://moed/scraper-{i}"
                text, said = access_file(identities={name: {"roles": ["metrics"]}}), READ_ANEW
                if i % 10 == 9:
                    text, said = "rubbish", "the rules read before stay in force"
                before = read(w.log).count(said)
                write(rules, text)
                w.send_signal(signal.SIGHUP)
                wait_until(lambda: read(w.log).count(said) > before)  # noqa: B023
            stop.set()
            for thread in threads:
                thread.join()
            read_anew = read(w.log).count(READ_ANEW)
            print(len(codes), "calls,", read_anew, "files read")
            self.assertEqual(set(codes), {grpc.StatusCode.OK})
            self.assertGreaterEqual(read_anew, 90)

    def test_a_worker_speaks_for_the_ids_of_its_token_only(self):
        with daemons() as d:
            rules, token = os.path.join(d.where, "access.json"), os.path.join(d.where, "token")
            write(rules, access_file())
            write(token, TOKENS["worker"] + "\n")
            c = d.coordinator("--access-file", rules)
            # Without this, the worker would find the socket, where its user may do everything.
            elsewhere = dict(d.environment, MOED_RUNTIME_DIR=os.path.join(d.where, "elsewhere"))
            options = ("--access-file", rules, "--token-file", token)
            w2 = d.worker(c.endpoint, "w2", *options, environment=elsewhere)
            self.assertEqual(w2.wait(timeout=30), 1)
            self.assertIn("token:worker may not register as worker_id w2",
                          read(w2.log))
            w1 = d.worker(c.endpoint, "w1", *options, environment=elsewhere)
            wait_until(lambda: "serving under epoch" in read(w1.log))
            self.assertIsNone(w1.poll())

    def test_a_second_worker_of_one_id_harms_nothing(self):
        with daemons() as d:
            c = d.coordinator()
            w = d.worker(c.endpoint, "w1")
            wait_until(lambda: "serving under epoch" in read(w.log))
            os.rename(w.log, w.log + ".first")
            second = d.worker(c.endpoint, "w1")
            wait_until(lambda: "worker_id w1 is taken by a connected process" in read(second.log),
                       20)
            self.assertIsNone(second.poll())  # it waits for the slot
            y = moed.Client(w.endpoint).forward(0, np.ones((1, 64), np.float32))
            self.assertTrue(np.isfinite(y).all())
            w.kill()  # now the second one takes over
            wait_until(lambda: "serving under epoch" in read(second.log))

    def test_an_address_that_belongs_to_another_worker_is_refused(self):
        with daemons() as d:
            c = d.coordinator(workers=2)
            first = d.worker(c.endpoint, "w1")
            wait_until(lambda: "registered" in read(first.log))
            thief = d.worker(c.endpoint, "w2", "--advertise", first.endpoint)
            self.assertEqual(thief.wait(timeout=30), 1)
            self.assertIn("is the address of w1, in slot 0", read(thief.log))

    def test_the_token_of_a_group_stands_for_the_socket(self):
        with daemons() as d:
            token, other = os.path.join(d.where, "token"), os.path.join(d.where, "other")
            write(token, "the-token-of-this-group-0123\n")
            write(other, "the-token-of-another-group-4\n")
            c = d.coordinator("--token-file", token, workers=2)
            for i in (0, 1):  # each in another directory, as containers are
                w = d.worker(c.endpoint, f"w{i}", "--token-file", token, environment=dict(
                    d.environment, MOED_RUNTIME_DIR=os.path.join(d.where, f"run{i}")))
            outside = dict(os.environ, MOED_RUNTIME_DIR=os.path.join(d.where, "outside"))

            def moectl(*arguments, **environment):
                return subprocess.run([MOECTL, *arguments, "--endpoint", c.endpoint],
                                      capture_output=True, text=True, timeout=60, check=False,
                                      env={**outside, **environment})

            self.assertEqual(moectl("wait", "--token-file", token, "--timeout", "30").returncode, 0)
            self.assertEqual(moectl("status", MOED_TOKEN_FILE=token).returncode, 0)
            for refused in (moectl("status"), moectl("status", "--token-file", other)):
                self.assertEqual(refused.returncode, 6, refused.stderr)
            write(token, "the-token-of-this-group-9876\n")  # counts at once, for all
            self.assertEqual(moectl("status", "--token-file", token).returncode, 0)
            there = {"MOED_RUNTIME_DIR": outside["MOED_RUNTIME_DIR"], "MOED_TOKEN_FILE": token}
            with unittest.mock.patch.dict(os.environ, there):
                y = moed.Client(w.endpoint).forward(0, np.ones((1, 64), np.float32))
                self.assertTrue(np.isfinite(y).all())
                there["MOED_TOKEN_FILE"] = os.environ["MOED_TOKEN_FILE"] = other
                with self.assertRaisesRegex(moed.MoeError, "the token is not known"):
                    moed.Client(w.endpoint)
            os.chmod(token, 0o644)
            bad = moectl("status", "--token-file", token)
            self.assertIn("other users can read it", bad.stderr)
            self.assertNotEqual(bad.returncode, 0)
            os.chmod(token, 0o600)
            self.assertEqual(moectl("down", "--token-file", token).returncode, 0)
            self.assertNotIn("the-token-of-this-group", d.text())
            self.assertIn("audit: moe.v1.AdminService/Shutdown by token:group", d.text())

    def test_bad_files_end_the_start_with_one_clear_line(self):
        with daemons() as d:
            rules, token = os.path.join(d.where, "access.json"), os.path.join(d.where, "token")
            write(rules, '{"identities": {"ops": {"roles": ["king"]}}}')
            write(token, "readable-by-all-users-of-the-host", 0o644)
            fifo, deep, latin, zeros, twice = (
                os.path.join(d.where, name) for name in ("fifo", "deep", "latin", "zeros", "twice"))
            os.mkfifo(fifo, 0o600)
            write(deep, '{"identities": ' * 5000 + "{}" + "}" * 5000)
            write(twice, '{"identities": {}, "identities": {}}')
            for path, content in ((latin, b'{"tokens": {"\xe9": {}}}'), (zeros, bytes(4096))):
                with open(path, "wb") as file:
                    file.write(content)
                os.chmod(path, 0o600)
            for option, path, why in (
                    ("--access-file", rules, "a role is one of"),
                    ("--access-file", fifo, "is not a regular file"),
                    ("--access-file", "/dev/zero", "is not a regular file"),
                    ("--access-file", d.where, "is not a regular file"),
                    ("--access-file", deep, "not a JSON object"),
                    ("--access-file", latin, "not a JSON object"),
                    ("--access-file", zeros, "not a JSON object"),
                    ("--access-file", twice, "not a JSON object"),
                    ("--token-file", fifo, "is not a regular file"),
                    ("--token-file", zeros, "a token has"),
                    ("--token-file", token, "other users can read it"),
                    ("--token-file", "/nowhere", "No such file")):
                c = d.coordinator(option, path)
                self.assertEqual(c.wait(timeout=20), 1)
                with open(c.log, encoding="utf8") as file:
                    errors = [line for line in file if "ERROR" in line]
                os.remove(c.log)
                self.assertEqual(len(errors), 1, errors)
                self.assertIn(why, errors[0])
                self.assertNotIn("readable-by-all", errors[0])


if __name__ == "__main__":
    main()
