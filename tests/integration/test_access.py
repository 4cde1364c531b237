# SPDX-License-Identifier: Apache-2.0
"""Who may do what: real daemons, stock gRPC clients with and without an identity.

The matrix walks the descriptors, so a new method is tested without a change here."""

import contextlib
import hashlib
import json
import os
import shutil
import signal
import subprocess
import tempfile
import threading
import time
import unittest
import unittest.mock

import grpc
import numpy as np

from group import BACKEND, BUILD, MOECTL, group, main, model_directory, moed, wait_until
from google.protobuf import descriptor_pb2
from moed._channel import local_socket

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
                             "GetModel": READS},
    "moe.v1.TrainingService": {
        "Backward": TRAINS, "OptimizerStep": TRAINS, "ZeroGrad": TRAINS, "SetFrozen": TRAINS,
        "GetTrainState": KEEPS, "SaveCheckpoint": KEEPS, "LoadCheckpoint": KEEPS,
        "ListCheckpoints": KEEPS, "RecoverTraining": KEEPS, "ExportAdapter": KEEPS},
    "moe.v1.AdminService": {
        "GetStatus": {"trainer", "worker", "admin", "metrics"},
        "GetPlacement": {"admin", "metrics"}, "DrainWorker": {"admin"}, "Shutdown": {"admin"}},
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


@contextlib.contextmanager
def directory():
    path = tempfile.mkdtemp(prefix="moed-access-")
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


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
        for endpoint in self.endpoints.values():
            for command in ("status", "down"):
                done = subprocess.run(
                    [MOECTL, command, "--endpoint", endpoint], user=STRANGER, group=STRANGER,
                    capture_output=True, text=True, timeout=60, check=False,
                    env={"PATH": os.environ["PATH"], "HOME": "/"})
                self.assertEqual(done.returncode, 6, done.stderr)
                self.assertIn("this connection has no identity", done.stderr)
                self.assertIn("run as the group's user", done.stderr)
        y = moed.Client(self.group.endpoint).forward(0, np.ones((1, 64), np.float32))
        self.assertTrue(np.isfinite(y).all())  # the group goes on

    def test_the_socket_is_private(self):
        path = local_socket(self.group.endpoint)
        self.assertEqual(os.lstat(path).st_mode & 0o777, 0o600)
        self.assertEqual(os.lstat(os.path.dirname(path)).st_mode & 0o777, 0o700)


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
            self.assertRegex(text, r"audit: moe.v1.AdminService/Shutdown by token:client at "
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
                wait_until(lambda: not stream.is_active(), 10)
                print("gone after %.1f s" % (time.monotonic() - begun))
                hold.set()
                self.assertIn(stream.code(), (grpc.StatusCode.UNAVAILABLE,
                                              grpc.StatusCode.CANCELLED))
            with plain(c.endpoint) as channel:
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
            wait_until(lambda: "serving under epoch" in read(w.log), 30)
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
                write(rules, "rubbish" if i % 10 == 9 else access_file(
                    identities={name: {"roles": ["metrics"]}}))
                w.send_signal(signal.SIGHUP)
                time.sleep(0.03)
            stop.set()
            for thread in threads:
                thread.join()
            read_anew = read(w.log).count("the rules were read anew")
            print(len(codes), "calls,", read_anew, "files read")
            self.assertEqual(set(codes), {grpc.StatusCode.OK})
            self.assertGreater(read_anew, 50)

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
            wait_until(lambda: "serving under epoch" in read(w1.log), 30)
            self.assertIsNone(w1.poll())

    def test_a_second_worker_of_one_id_harms_nothing(self):
        with daemons() as d:
            c = d.coordinator()
            w = d.worker(c.endpoint, "w1")
            wait_until(lambda: "serving under epoch" in read(w.log), 30)
            os.rename(w.log, w.log + ".first")
            second = d.worker(c.endpoint, "w1")
            wait_until(lambda: "worker_id w1 is taken by a connected process" in read(second.log),
                       20)
            self.assertIsNone(second.poll())  # it waits for the slot
            y = moed.Client(w.endpoint).forward(0, np.ones((1, 64), np.float32))
            self.assertTrue(np.isfinite(y).all())
            w.kill()  # now the second one takes over
            wait_until(lambda: "serving under epoch" in read(second.log), 30)

    def test_an_address_that_belongs_to_another_worker_is_refused(self):
        with daemons() as d:
            c = d.coordinator(workers=2)
            first = d.worker(c.endpoint, "w1")
            wait_until(lambda: "registered" in read(first.log), 30)
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
            for option, path, why in (
                    ("--access-file", rules, "a role is one of"),
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
