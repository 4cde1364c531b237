# SPDX-License-Identifier: Apache-2.0
"""moectl's command line: options, output and exit codes, as scripts rely on them."""

import fcntl
import json
import os
import pty
import re
import shutil
import struct
import subprocess
import tempfile
import termios
import time
import unittest

import grpc
import numpy as np

from commands import (FAILED, FAMILY, NOT_FOUND, OK, PERMISSION, UNHEALTHY, UNREACHABLE, USAGE,
                      folder, run)
from group import (BUILD, MOECTL, Group, golden_cases, main, model_directory, relative_error,
                    to_bf16)
from fake_group import FakeAdmin, FakeWorker, Ledger, rows
from wire import admin

import moed

COMMANDS = ("up", "down", "status", "wait", "get", "describe", "health", "top", "placement",
            "diag", "drain", "cordon",
            "uncordon", "replace", "restart", "scale", "rebalance", "load", "unload", "forward",
            "bench", "training", "model", "context", "log-level", "version")


class CommandLine(unittest.TestCase):
    def test_every_program_names_its_release_and_commit(self):
        said = json.loads(run("version", "-o", "json").stdout)
        self.assertRegex(said["commit"], "^([0-9a-f]{12}|unknown)$")
        for daemon in ("coordinator/moe-coordinator", "worker/moe-worker"):
            done = subprocess.run([os.path.join(BUILD, "daemon", daemon), "--version"],
                                  stdout=subprocess.PIPE, text=True, check=True)
            self.assertEqual(done.stdout, "%s %s (commit %s)\n" % (
                os.path.basename(daemon), said["client"], said["commit"]))

    def expect(self, code, *arguments):
        done = run(*arguments)
        self.assertEqual(done.returncode, code, (arguments, done.stdout, done.stderr))
        if code != OK:
            self.assertEqual(done.stdout, "", "data only on success")
            self.assertNotEqual(done.stderr, "")
        return done

    def test_help_names_every_command_and_exit_code(self):
        text = self.expect(OK, "help").stdout
        for command in COMMANDS:
            self.assertIn("\n  " + command + " ", text)
        self.assertIn("exit codes: 0 done, 1 failed, 2 wrong command line", text)
        for command in COMMANDS:
            text = self.expect(OK, command, "--help").stdout
            self.assertIn("usage: moectl " + command, text)
            self.assertIn("\nexamples:\n  moectl " + command, text)
            self.assertIn("--timeout", text)

    def test_names_may_stand_before_and_after_options(self):
        with folder() as empty:
            for line in (["unload", "small", "--drain"], ["unload", "--drain", "small"],
                         ["drain", "--reason", "a fan", "3"],
                         ["training", "--keep", "3", "save", "a"],
                         ["log-level", "--all", "debug"], ["describe", "-o", "json", "model", "a"]):
                done = self.expect(NOT_FOUND, *line, "--state-dir", empty)
                self.assertIn("no local group is running", done.stderr, line)
        for line, text in ((["unload", "--drain"], "which model?"),
                           (["unload", "--drain", "a", "b"], "unexpected argument 'b'"),
                           (["drain", "1", "--reason", "a fan", "2"], "unexpected argument '2'"),
                           (["training", "--keep", "3", "foo"],
                            "there is no action 'training foo'")):
            self.assertIn(text, self.expect(USAGE, *line).stderr)

    def test_contexts_are_names_for_groups(self):
        with folder() as home:
            os.mkdir(f"{home}/moed")
            path, token = f"{home}/moed/contexts", f"{home}/token"
            there = {"XDG_CONFIG_HOME": home}

            def put(text):
                with open(path, "w", encoding="ascii") as file:
                    file.write(text)

            self.assertEqual(run("context", **there).stdout, "* the local group\n")
            put("; mine\ncurrent = near\n[near]\nendpoint = 127.0.0.1:1\n[far]\n"
                f"endpoint = 127.0.0.1:2\ntoken-file = {token}\n")
            self.assertEqual(run("context", "list", **there).stdout.split(), [
                "*", "near", "127.0.0.1:1", "far", "127.0.0.1:2", "(with", "a", "token)"])
            self.assertIn("127.0.0.1:1", run("status", **there).stderr)
            self.assertIn("127.0.0.1:3", run("status", MOED_ENDPOINT="127.0.0.1:3", **there).stderr)
            far = run("status", "--context", "far", **there)
            self.assertIn("token: No such file", far.stderr)  # its token is looked for
            self.assertEqual(far.returncode, NOT_FOUND)
            self.assertEqual(run("context", "use", "far", **there).returncode, OK)
            with open(path, encoding="ascii") as file:
                self.assertEqual(file.read().splitlines()[:3],
                                 ["current = far", "; mine", "[near]"])
            self.assertIn("token: No such file", run("status", **there).stderr)
            self.assertIn("127.0.0.1:1", run("status", MOED_CONTEXT="near", **there).stderr)
            # The group of this host, whatever the current context and the environment say.
            for more in ({}, {"MOED_ENDPOINT": "127.0.0.1:3"}):
                done = run("status", "--context", "local", **more, **there)
                self.assertIn("no local group", done.stderr)
            self.assertIn("no local group", run("status", MOED_CONTEXT="local", **there).stderr)
            self.assertEqual(json.loads(run("context", "-o", "json", **there).stdout)["current"],
                             "far")
            put(f"[sealed]\nendpoint = 127.0.0.1:4\ntls-ca = {home}/ca\n"
                f"tls-certificate = {home}/me\ntls-key = {home}/key\ntls-server-name = x\n")
            self.assertIn("127.0.0.1:4 (TLS)", run("context", **there).stdout)
            listed = json.loads(run("context", "-o", "json", **there).stdout)["contexts"][0]
            self.assertEqual(listed, {
                "name": "sealed", "endpoint": "127.0.0.1:4", "tlsCa": f"{home}/ca",
                "tlsCertificate": f"{home}/me", "tlsKey": f"{home}/key", "tlsServerName": "x",
                "tokenFile": ""})
            for more, missing in ((), "me"), (("--tls-certificate", f"{home}/other"), "other"):
                done = run("status", "--context", "sealed", *more, **there)
                self.assertIn(f"{home}/{missing}: No such file", done.stderr)
                self.assertEqual(done.returncode, NOT_FOUND)
            self.assertEqual(run("context", "use", "local", **there).returncode, OK)
            self.assertEqual(run("status", **there).returncode, NOT_FOUND)
            self.assertEqual(run("context", "use", "none", **there).returncode, NOT_FOUND)
            for wrong in (["status", "--context", "none"], ["context", "use"],
                          ["context", "list", "x"], ["context", "bogus"],
                          ["status", "--context", "far", "--endpoint", "127.0.0.1:1"]):
                self.assertEqual(run(*wrong, **there).returncode, USAGE, wrong)
            for bad in ("[x]\ntoken-file = /t\n", "[x]\nendpoint = y\n",
                        "[x y]\nendpoint = a:1\n", "current = z\n",
                        "[x]\nendpoint = a:1\nuser = me\n", "rubbish\n",
                        f"[{'x' * 60}]\nendpoint = a:1\n"):
                put(bad)
                done = run("context", **there)
                self.assertNotEqual(done.returncode, OK, bad)
                self.assertEqual(len(done.stderr.splitlines()), 1)

    def test_an_answer_that_cannot_be_written_is_a_failure(self):
        for words in (["help"], ["scale", "--help"], ["version"], ["version", "-o", "json"]):
            with open("/dev/full", "w", encoding="ascii") as full:
                done = subprocess.run([MOECTL, *words], stdout=full, stderr=subprocess.PIPE,
                                      text=True, timeout=60, check=False)
            self.assertEqual((done.returncode, done.stderr),
                             (1, "moectl: cannot write the answer to the standard output\n"), words)
            read, write = os.pipe()
            os.close(read)  # as `head` leaves
            done = subprocess.run([MOECTL, *words], stdout=write, stderr=subprocess.PIPE,
                                  text=True, timeout=60, check=False)
            os.close(write)
            self.assertEqual((done.returncode, done.stderr), (1, ""), words)

    def test_help_of_a_command(self):
        self.assertEqual(self.expect(OK, "help", "training").stdout,
                         self.expect(OK, "training", "--help").stdout)
        self.assertIn("no command 'foo'", self.expect(USAGE, "help", "foo").stderr)
        listed = self.expect(OK, "help").stdout
        self.assertEqual(self.expect(OK, "help", "help").stdout, listed)
        for command in COMMANDS:  # what it does comes before its actions and explanations
            summary = re.search("^  %s +(.*)$" % command, listed, re.M)[1]
            paragraphs = self.expect(OK, command, "--help").stdout.split("\n\n")
            self.assertEqual(paragraphs[1], summary)

    def test_help_fits_the_terminal(self):
        worker = os.path.join(BUILD, "daemon", "worker", "moe-worker")
        for command in ([MOECTL, "up", "--help"], [worker, "--help"]):
            plain = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout
            self.assertGreater(max(map(len, plain.splitlines())), 100)
            for columns in (80, 100, 400):
                text = self.on_terminal(columns, command)
                self.assertLessEqual(max(map(len, text.splitlines())), columns)
                self.assertEqual(text.split(), plain.split())

    def on_terminal(self, columns, command):
        mine, its = pty.openpty()
        fcntl.ioctl(its, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
        with subprocess.Popen(command, stdout=its) as process:
            os.close(its)
            text = b""
            try:
                while True:
                    text += os.read(mine, 4096)
            except OSError:  # the other end is closed
                os.close(mine)
        self.assertEqual(process.returncode, OK)
        return text.decode().replace("\r\n", "\n")

    def test_wrong_command_lines(self):
        for arguments in (
                [], ["bogus"], ["status", "extra"],
                ["get"], ["get", "cats"], ["get", "workers", "x"],
                ["describe", "worker"], ["describe", "worker", "64"], ["describe", "cat"],
                ["describe", "group", "1"], ["status", "--bogus"], ["status", "-o", "xml"],
                ["status", "--timeout", "soon"], ["status", "--timeout", "-1"], ["up"],
                ["up", "--model", "/tmp", "--workers", "0"],
                ["up", "--model", "/tmp", "--workers", "65"],
                ["up", "--model", "/tmp", "--workers", "2", "--max-workers", "1"],
                ["up", "--model", "/tmp", "--max-workers", "2", "--spare-experts", "1"],
                ["up", "--model", "/tmp", "--rebalance", "auto"],
                ["up", "--model", "/tmp", "--rebalance", "on", "--spare-experts", "1"],
                ["up", "--model", "/tmp", "--backend", "tpu"],
                ["up", "--model", "/tmp", "--transport", "pigeon"],
                ["up", "--model", "/tmp", "--port", "70000"],
                ["wait", "--for", "ready"], ["forward", "--layer", "0"],
                ["forward", "--layer", "x", "--input", "a", "--output", "b"],
                ["forward", "--layer", "0", "--input", "a", "--output", "b", "--dtype", "f16"],
                ["forward", "--layer", "0", "--input", "a", "--output", "b", "--topk-weights", "w"],
                ["bench"], ["bench", "--layer", "0", "--concurrency", "1,,2"],
                ["bench", "--layer", "0", "--concurrency", "0"],
                ["bench", "--layer", "0", "--concurrency", "1,2", "--rate", "5"],
                ["bench", "--layer", "0", "--duration", "0"],
                ["bench", "--layer", "0", "--unary", "--stream"],
                ["bench", "--layer", "0", "--transport", "shm", "--rate", "5"],
                ["bench", "--layer", "0", "--tokens", "0"],
                ["bench", "--layer", "0", "--model-digest", "00"],
                ["forward", "--layer", "0", "--input", "a", "--output", "b", "--model-digest",
                 "F" * 64],
                ["status", "--tls-ca", "a", "--tls-certificate", "b"],
                ["status", "--tls-ca", "a", "--tls-key", "b"],
                ["status", "--tls-certificate", "a", "--tls-key", "b"]):
            self.expect(USAGE, *arguments)

    def test_missing_options_are_named(self):
        for arguments, text in (
                (["forward"], "--layer, --input, --output are missing"),
                (["forward", "--layer", "0", "--input", "a"], "--output is missing"),
                (["bench"], "--layer is missing"), (["up"], "--model is missing")):
            self.assertIn("moectl: " + text, self.expect(USAGE, *arguments).stderr)
        for command in ("forward", "bench", "up"):
            text = self.expect(OK, command, "--help").stdout
            self.assertIn("(required)", text)
            self.assertNotIn(str(2**64 - 1), text)
            self.assertEqual("--endpoint" in text, command != "up")

    def test_the_format_is_not_the_output(self):
        text = self.expect(OK, "forward", "--help").stdout
        self.assertIn("-o, --format FORMAT", text)
        self.assertEqual(text.count("--output FILE "), 2, "in the usage, and in the list")
        self.assertIn("--format must be", self.expect(USAGE, "status", "--format", "xml").stderr)

    def test_malformed_endpoints_are_refused(self):
        for endpoint in ("foo", "127.0.0.1:99999", "127.0.0.1:0", "unix:/tmp/a"):
            for command in ("status", "down", "wait", "version"):
                text = self.expect(USAGE, command, "-e", endpoint).stderr
                self.assertIn("--endpoint: '%s' is not HOST:PORT" % endpoint, text)
        done = run("status", MOED_ENDPOINT="foo")
        self.assertEqual(done.returncode, USAGE)
        self.assertIn("$MOED_ENDPOINT: 'foo' is not HOST:PORT", done.stderr)

    def test_an_endpoint_without_a_server(self):
        nowhere = ("--endpoint", "127.0.0.1:1")
        with folder() as path:
            x = os.path.join(path, "x.safetensors")
            moed.write_safetensors(x, {"x": np.zeros((1, 8), np.float32)})
            for arguments in (["status"], ["down"], ["version"], ["wait", "--timeout", "0.3"],
                              ["bench", "--layer", "0"],
                              ["forward", "--layer", "0", "--input", x, "--output", x + ".y"]):
                done = run(*arguments, *nowhere)
                self.assertEqual(done.returncode, UNREACHABLE, (arguments, done.stderr))
                if arguments[0] != "wait":  # its last probe may time out
                    self.assertIn("Connection refused", done.stderr)
                self.assertNotIn("last error", done.stderr)
        self.expect(OK, "wait", "--for=gone", *nowhere)

    def test_a_model_is_accepted_by_the_coordinator_only(self):
        text = self.expect(UNREACHABLE, "model", "accept", "--endpoint", "127.0.0.1:1").stderr
        self.assertIn("removing model.digests from its --state-dir", text)

    def test_a_state_directory_without_a_group(self):
        with folder() as path:
            for arguments in (["status"], ["down"], ["bench", "--layer", "0"]):
                self.expect(NOT_FOUND, *arguments, "--state-dir", path)
            self.expect(OK, "wait", "--for=gone", "--state-dir", path)
            self.expect(NOT_FOUND, "wait", "--timeout", "0.2", "--state-dir", path)
            text = self.expect(NOT_FOUND, "down", "--state-dir", os.path.join(path, "no")).stderr
            self.assertIn("no local group is running in " + os.path.join(path, "no"), text)
            self.expect(OK, "version", "--state-dir", path)
            self.expect(NOT_FOUND, "up", "--model", os.path.join(path, "no"), "--state-dir", path)

    def test_a_state_directory_that_others_may_write_to_is_refused(self):
        with folder() as path:
            os.chmod(path, 0o777)
            text = self.expect(PERMISSION, "status", "--state-dir", path).stderr
            self.assertIn("has mode 0777: other users may write to it; chmod go-w", text)
            self.expect(PERMISSION, "up", "--model", model_directory(FAMILY), "--state-dir", path)
            link = path + ".link"
            os.symlink("/etc", link)
            self.assertNotEqual(run("status", "--state-dir", link).returncode, OK)
            os.unlink(link)

    def test_version(self):
        self.assertRegex(self.expect(OK, "version").stdout,
                         r"^client +\d+\.\d+\.\d+\ncommit +\S+\n$")
        document = json.loads(self.expect(OK, "version", "-o", "json").stdout)
        self.assertEqual((document["apiVersion"], document["kind"]), ("moed/v1", "Version"))


class AgainstAFakeCoordinator(unittest.TestCase):
    def wait_in_vain(self, fake):
        """`moectl wait` of which the time is over after an answer of `fake`. On a busy machine that
        takes longer."""
        for seconds in ("0.3", "3", "30"):
            done = run("wait", "--endpoint", fake.endpoint, "--timeout", seconds)
            if "; the group is" in done.stderr:
                break
        return done

    def test_a_group_that_does_not_serve_is_unhealthy(self):
        fake = FakeAdmin(version="0.2.0", state=admin.GROUP_STATE_LOADING, epoch=2**60, slots=2)
        fake.status.workers.add(slot=1, endpoint="127.0.0.1:9", lease_remaining_ms=-5,
                                state=admin.WORKER_STATE_LOADING, loaded_bytes=2**40).error.code = 5
        try:
            done = run("status", "--endpoint", fake.endpoint)
            self.assertEqual(done.returncode, UNHEALTHY, done.stderr)
            self.assertIn("LOADING", done.stdout)
            done = run("status", "--endpoint", fake.endpoint, "-o", "json")
            self.assertEqual(done.returncode, UNHEALTHY)
            status = json.loads(done.stdout)
            self.assertEqual((status["apiVersion"], status["kind"]), ("moed/v1", "GroupStatus"))
            self.assertEqual((status["state"], status["epoch"], status["slots"]),
                             ("LOADING", str(2**60), 2))
            worker = status["workers"][0]
            self.assertEqual((worker["loadedBytes"], worker["leaseRemainingMs"]),
                             (str(2**40), "-5"))
            self.assertEqual((worker["state"], worker["error"]["code"]), ("LOADING", 5))
            fake.status.reason = "slot 0 is loading"
            done = self.wait_in_vain(fake)
            self.assertEqual(done.returncode, UNREACHABLE, done.stderr)
            self.assertEqual(done.stderr, "moectl: LOADING: slot 0 is loading\n"
                             "moectl: the time limit is over; the group is LOADING: slot 0 is "
                             "loading\n")
        finally:
            fake.server.stop(None).wait()

    def test_only_named_coordinators_are_asked(self):
        """Whatever one that waits says: the leader that it names may be of another group now."""
        waits, leader = (FakeAdmin(version="0.2.0", state=admin.GROUP_STATE_SERVING)
                         for _ in range(2))
        waits.leader = leader.endpoint
        leader.events = admin.ListEventsResponse()
        try:
            for command in (["status"], ["health"], ["down"], ["cordon", "0", "--reason", "x"]):
                done = run(*command, "--endpoint", waits.endpoint)
                self.assertEqual(done.returncode, UNREACHABLE, (command, done.stderr))
                self.assertIn("--endpoint does not name the leader: %s: the leader is %s"
                              % (waits.endpoint, leader.endpoint), done.stdout + done.stderr)
            self.assertEqual(leader.calls, 0)
            for both in (waits, leader), (leader, waits):
                done = run("status", "--endpoint", ",".join(one.endpoint for one in both))
                self.assertEqual(done.returncode, OK, done.stderr)
        finally:
            for fake in (waits, leader):
                fake.server.stop(None).wait()

    def test_a_worker_of_another_host_names_no_coordinator_of_this_one(self):
        worker = FakeWorker(Ledger())
        leader = FakeAdmin(version="0.2.0", state=admin.GROUP_STATE_SERVING)
        worker.coordinator = leader.endpoint
        elsewhere = "0.0.0.0:" + worker.endpoint.rpartition(":")[2]  # no loopback address
        try:
            done = run("status", "--endpoint", worker.endpoint)
            self.assertEqual(done.returncode, OK, done.stderr)
            asked = leader.calls
            done = run("status", "--endpoint", elsewhere)
            self.assertEqual(done.returncode, FAILED, done.stderr)
            self.assertIn("names a coordinator on its own host", done.stderr)
            self.assertEqual(leader.calls, asked)
        finally:
            for fake in (worker, leader):
                fake.server.stop(None).wait()

    def test_a_worker_that_names_a_leader_of_before_is_asked_again(self):
        """In a failover its coordinator waits while it lives, and the worker finds the new one."""
        worker = FakeWorker(Ledger())
        before, leader = (FakeAdmin(version="0.2.0", state=admin.GROUP_STATE_SERVING)
                          for _ in range(2))
        before.leader = leader.endpoint
        worker.coordinator = before.endpoint
        try:
            for seconds in ("1", "5", "30"):  # a busy machine needs more for an answer
                done = run("status", "--endpoint", worker.endpoint, "--timeout", seconds)
                if "the leader is" in done.stderr:
                    break
            self.assertEqual(done.returncode, UNREACHABLE, done.stderr)
            self.assertIn("the leader is " + leader.endpoint, done.stderr)
            self.assertNotIn("--endpoint does not name", done.stderr)
            self.assertEqual(leader.calls, 0)
            asked = before.calls

            def find_the_leader(_context):
                if before.calls > asked:
                    worker.coordinator = leader.endpoint

            worker.called = find_the_leader
            done = run("status", "--endpoint", worker.endpoint, "--timeout", "30")
            self.assertEqual(done.returncode, OK, done.stderr)
            self.assertGreater(before.calls, asked)
        finally:
            for fake in (worker, before, leader):
                fake.server.stop(None).wait()

    def test_a_coordinator_of_another_host_lists_no_worker_of_this_one(self):
        worker, asked = FakeWorker(Ledger()), []
        serve = worker.service
        worker.service = lambda details: asked.append(details.method) or serve(details)
        fake = FakeAdmin(version="0.2.0", state=admin.GROUP_STATE_SERVING, slots=1, size=1)
        fake.events = admin.ListEventsResponse()
        fake.status.workers.add(slot=0, worker_id="w0", endpoint=worker.endpoint, connected=True,
                                state=admin.WORKER_STATE_SERVING, lease_remaining_ms=900)
        elsewhere = "0.0.0.0:" + fake.endpoint.rpartition(":")[2]  # no loopback address
        with folder() as path:
            file, archive = (os.path.join(path, name) for name in ("x.safetensors", "diag.tar"))
            commands = (["version"], ["health"], ["status"], ["down", "--timeout", "3"],
                        ["describe", "worker", "0"], ["top", "--once"],
                        ["log-level", "debug", "--all"],
                        ["diag", "--output", archive],
                        ["training", "status"],
                        ["forward", "--layer", "3", "--input", file, "--output", file + ".out"])
            moed.write_safetensors(file, {"x": rows(2)})
            try:
                for command in commands:
                    with self.subTest(command=command[0]):
                        asked.clear()
                        run(*command, "--endpoint", fake.endpoint)
                        self.assertNotEqual(asked, [], "the command does ask workers")
                        asked.clear()
                        if os.path.exists(archive):
                            os.unlink(archive)  # diag replaces no file
                        done = run(*command, "--endpoint", elsewhere)
                        self.assertEqual(asked, [], done.stderr)
                done = run("version", "--endpoint", elsewhere)
                self.assertEqual(done.returncode, FAILED, done.stderr)
                self.assertIn("%s lists a worker on its own host (%s)"
                              % (elsewhere, worker.endpoint), done.stderr)
            finally:
                for one in (worker, fake):
                    one.server.stop(None).wait()

    def test_a_worker_of_another_host_names_no_trainers_endpoint_of_this_one(self):
        """Nor anything else than HOST:PORT, which gRPC may take."""
        worker, here = FakeWorker(Ledger()), FakeWorker(Ledger())
        asked, serve = [], here.service
        here.service = lambda details: asked.append(details.method) or serve(details)
        elsewhere = "0.0.0.0:" + worker.endpoint.rpartition(":")[2]  # no loopback address
        try:
            port = here.endpoint.rpartition(":")[2]
            near = [host + ":" + port for host in (
                "127.0.0.1", "127.1", "LocalHost", "[::ffff:127.0.0.1]", "0.0.0.0", "[::]")]
            for named, why in (*((name, "is on its own host (%s)" % name) for name in near),
                               ("dns:///" + here.endpoint, "is not HOST:PORT"),
                               ("unix:/run/x", "is not HOST:PORT")):
                worker.training_endpoint = named
                for command in (["training", "zero-grad"], ["training", "status"]):
                    done = run(*command, "--endpoint", elsewhere)
                    self.assertNotEqual(done.returncode, OK)
                    self.assertIn("%s: its endpoint for training" % elsewhere, done.stderr)
                    self.assertIn(why, done.stderr)
                self.assertEqual(asked, [])
            worker.training_endpoint = here.endpoint
            done = run("training", "zero-grad", "--endpoint", worker.endpoint)
            self.assertEqual(done.returncode, OK, done.stderr)
            self.assertNotEqual(asked, [])
        finally:
            for one in (worker, here):
                one.server.stop(None).wait()

    def test_a_trainers_endpoint_that_cannot_be_used_is_reported(self):
        worker = FakeWorker(Ledger())
        worker.GetTrainState = None  # training has another address
        worker.training_endpoint = "unix:/run/x"
        metrics = grpc.unary_unary_rpc_method_handler(
            lambda _request, _context: admin.GetMetricsResponse(),
            response_serializer=admin.GetMetricsResponse.SerializeToString)
        serve = worker.service
        worker.service = lambda details: (
            metrics if details.method.endswith("GetMetrics") else serve(details))
        fake = FakeAdmin(version="0.2.0", state=admin.GROUP_STATE_DEGRADED, slots=1, size=1)
        fake.events = admin.ListEventsResponse()
        fake.status.workers.add(slot=0, worker_id="w0", endpoint=worker.endpoint, connected=True,
                                state=admin.WORKER_STATE_LOADED, lease_remaining_ms=900)
        why = worker.endpoint + ": its endpoint for training: 'unix:/run/x' is not HOST:PORT"
        patient = ("--endpoint", fake.endpoint, "--timeout", "60")
        try:
            done = run("status", *patient)
            self.assertEqual(done.returncode, UNHEALTHY, done.stderr)
            self.assertIn(why, done.stderr)
            found = {c["code"]: c for c in json.loads(
                run("health", *patient, "-o", "json").stdout)["checks"]}
            self.assertEqual(found["TRAINING"]["result"], "WARNING", found)
            self.assertIn(why, found["TRAINING"]["text"])
            worker.training_endpoint = ""  # it does not train
            self.assertNotIn("endpoint for training", run("status", *patient).stderr)
            self.assertNotIn('"TRAINING"', run("health", *patient, "-o", "json").stdout)
        finally:
            for one in (worker, fake):
                one.server.stop(None).wait()

    def test_a_command_that_goes_on_ends_when_its_reader_has_gone(self):
        fake = FakeAdmin(version="0.2.0", state=admin.GROUP_STATE_SERVING)
        try:
            for command in (["get", "workers", "--watch"], ["top", "--interval", "0.1"],
                            ["top", "-o", "json", "--interval", "0.1"]):
                going = subprocess.Popen([MOECTL, *command, "--endpoint", fake.endpoint],
                                         stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
                self.assertNotEqual(going.stdout.readline(), "")
                going.stdout.close()
                fake.status.workers.add(slot=len(fake.status.workers), worker_id="new",
                                        state=admin.WORKER_STATE_LOADED)
                self.assertEqual((going.wait(60), going.stderr.read()), (FAILED, ""), command)
                going.stderr.close()
        finally:
            fake.server.stop(None).wait()

    def test_workers_that_have_ended_do_not_count(self):
        fake = FakeAdmin(version="0.2.0", state=admin.GROUP_STATE_WAITING, slots=2)
        fake.status.workers.add(slot=0, state=admin.WORKER_STATE_LOADED)
        fake.status.workers.add(slot=1, state=admin.WORKER_STATE_GONE)
        try:
            done = run("status", "--endpoint", fake.endpoint)
            self.assertEqual(done.returncode, UNHEALTHY, done.stderr)
            self.assertIn("workers  1 of 2", done.stdout)
            self.assertIn("epoch    none\n", done.stdout)
            self.assertEqual(
                done.stderr.splitlines()[0],
                "moectl: a worker is gone or cannot be reached. One that was only stopped or cut "
                "off comes back by itself. If it has ended, start it again with the same options, "
                "or end the group with `moectl down`")
        finally:
            fake.server.stop(None).wait()

    def test_a_spare_may_take_an_empty_place(self):
        fake = FakeAdmin(version="0.2.0", state=admin.GROUP_STATE_DEGRADED, slots=3, size=2,
                         max_workers=3, spare_slots=[2])
        fake.events = admin.ListEventsResponse()
        fake.status.workers.add(slot=0, state=admin.WORKER_STATE_LOADED, lease_remaining_ms=9)
        lost = fake.status.workers.add(slot=1, state=admin.WORKER_STATE_GONE)
        fake.status.workers.add(slot=2, state=admin.WORKER_STATE_REGISTERED, lease_remaining_ms=9)
        try:
            done = run("status", "--endpoint", fake.endpoint)
            self.assertEqual(done.stderr, "moectl: a place is empty, and 1 spare worker waits: "
                             "`moectl scale 2` gives it to one\n")
            done = run("health", "-o", "json", "--endpoint", fake.endpoint)
            texts = {c["code"]: c["text"] for c in json.loads(done.stdout)["checks"]}
            self.assertEqual(texts["SLOTS_TAKEN"], "1 of 2 slots have a live worker; spare "
                             "workers: 1, `moectl scale 2` gives the place to one")
            lost.lease_remaining_ms = 9  # it cannot load, and has the place
            self.assertIn("a worker is gone", run("status", "--endpoint", fake.endpoint).stderr)
            lost.state = admin.WORKER_STATE_LOADED
            self.assertEqual(run("status", "--endpoint", fake.endpoint).stderr, "")
        finally:
            fake.server.stop(None).wait()

    def test_a_hostile_string_controls_no_terminal(self):
        hostile = "\x1b]0;owned\x07\r\u009b31m\x7f\nstate    SERVING"
        escaped = r"\x1b]0;owned\x07\x0d\u009b31m\x7f\nstate    SERVING"
        fake = FakeAdmin(version=hostile, state=admin.GROUP_STATE_FAILED, model=hostile,
                         reason=hostile, slots=1)
        fake.status.workers.add(slot=0, worker_id=hostile, endpoint=hostile).error.reason = hostile
        try:
            for arguments in (["status"], ["version"], ["wait"], ["status", "-o", "json"],
                              ["version", "-o", "json"]):
                done = (run(*arguments, "--endpoint", fake.endpoint) if arguments != ["wait"]
                        else self.wait_in_vain(fake))
                text = done.stdout + done.stderr
                for character in text:
                    self.assertTrue(character == "\n" or character.isprintable(), (text, arguments))
                if "json" in arguments:
                    self.assertIn(hostile, json.loads(done.stdout).values())
                else:
                    self.assertIn(escaped, text)
                    self.assertNotIn("\nstate    SERVING", text)
        finally:
            fake.server.stop(None).wait()

    def test_another_release_is_warned_about(self):
        fake = FakeAdmin(version="7.0.0", state=admin.GROUP_STATE_SERVING)
        try:
            done = run("version", "--endpoint", fake.endpoint)
            self.assertEqual(done.returncode, OK, done.stderr)
            self.assertIn("coordinator  7.0.0", done.stdout)
            self.assertIn("warning", done.stderr)
            fake.status.version = json.loads(run("version", "-o", "json").stdout)["client"]
            self.assertNotIn("warning", run("version", "--endpoint", fake.endpoint).stderr)
        finally:
            fake.server.stop(None).wait()


    def test_health_says_what_it_knows(self):
        """Events and metrics as a coordinator gives them after trouble."""
        now = int(time.time() * 1000)
        fake = FakeAdmin(version="0.2.0", state=admin.GROUP_STATE_WAITING, slots=1, uptime_ms=5000,
                         model_digest="ab" * 32)
        fake.events = admin.ListEventsResponse(started_unix_ms=now - 5000)
        metrics = "moe_state_saved %d\n"

        def event(kind, **more):
            fake.events.events.add(sequence=len(fake.events.events) + 1, unix_ms=now - 100,
                                   kind=getattr(admin, "EVENT_KIND_" + kind), slot=-1, **more)

        def check(code):
            done = run("health", "-o", "json", "--endpoint", fake.endpoint)
            found = {c["code"]: (c["result"], c["text"]) for c in json.loads(done.stdout)["checks"]}
            return found[code]

        try:
            self.assertIn("not compared while the group does not serve", check("WEIGHTS_AGREE")[1])
            fake.status.state = admin.GROUP_STATE_SERVING
            self.assertIn("all slots agree", check("WEIGHTS_AGREE")[1])
            event("EPOCH_PREPARING", epoch=1)  # an attempt that does not form
            event("EPOCH_ENDED")
            fake.metrics = metrics % 1
            self.assertEqual(check("GROUP_STABLE")[0], "OK")
            event("EPOCH_PREPARING", epoch=2)
            event("EPOCH_SERVING", epoch=2)
            event("EPOCH_ENDED", severity=admin.EVENT_SEVERITY_INFO)  # scaled, or a worker drained
            self.assertEqual(check("GROUP_STABLE")[0], "OK")
            event("EPOCH_PREPARING", epoch=3)
            event("EPOCH_SERVING", epoch=3)
            event("EPOCH_ENDED", severity=admin.EVENT_SEVERITY_WARNING)
            self.assertEqual(check("GROUP_STABLE")[0], "WARNING")
            self.assertRegex(check("GROUP_STABLE")[1], "10 minutes: 1$")
            self.assertEqual(check("STATE_SAVED")[0], "OK")
            event("STATE_NOT_SAVED")
            fake.metrics = metrics % 0
            self.assertEqual(check("STATE_SAVED")[0], "CRITICAL")
            fake.metrics = metrics % 1  # the disk is free again, and a write has succeeded
            self.assertEqual(check("STATE_SAVED")[0], "WARNING")
            fake.metrics = ""  # an older coordinator
            self.assertEqual(check("STATE_SAVED")[0], "CRITICAL")
        finally:
            fake.server.stop(None).wait()


class Forward(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.group = Group(model_directory(FAMILY), 2)
        cls.folder = tempfile.mkdtemp(prefix="moed-test-")
        cls.layer, _, cls.x, cls.want = next(
            case for case in golden_cases(FAMILY) if case[1] == 37)
        moed.write_safetensors(cls.path("x"), {"x": cls.x})

    @classmethod
    def tearDownClass(cls):
        shutil.rmtree(cls.folder, ignore_errors=True)
        if cls.group.stop() != OK:
            raise RuntimeError("moectl up did not end well")

    @classmethod
    def path(cls, name):
        return os.path.join(cls.folder, name + ".safetensors")

    def forward(self, *more, source="x", code=OK, layer=None):
        done = run("forward", "--endpoint", self.group.endpoint, "--layer",
                   str(self.layer if layer is None else layer), "--input", self.path(source),
                   "--output", self.path("y"), *more)
        self.assertEqual(done.returncode, code, done.stderr)
        return moed.read_safetensors(self.path("y")) if code == OK else done.stderr

    def dtype_of_y(self):
        with open(self.path("y"), "rb") as file:
            length = int.from_bytes(file.read(8), "little")
            return json.loads(file.read(length))["y"]["dtype"]

    def test_every_way_gives_the_recorded_output(self):
        for options in ([], ["--stream"], ["--spread"], ["--repeat", "20"],
                        ["--stream", "--spread", "--repeat", "20"], ["--dtype", "f32"]):
            y = self.forward(*options)["y"]
            print("   ", options, "error %.1e" % relative_error(y, self.want))
            self.assertLessEqual(relative_error(y, self.want), 1e-5)
            self.assertEqual(self.dtype_of_y(), "F32")

    def test_bf16_on_request_and_by_input(self):
        y = self.forward("--dtype", "bf16")["y"]
        self.assertEqual(self.dtype_of_y(), "BF16")
        self.assertLessEqual(relative_error(moed.f32(y), self.want), 1e-2)
        moed.write_safetensors(self.path("half"), {"a": to_bf16(self.x)})
        again = self.forward(source="half")["y"]
        self.assertEqual(self.dtype_of_y(), "BF16")
        np.testing.assert_array_equal(again, y)

    def test_routing_can_be_recorded_and_replayed(self):
        seen = self.forward("--return-routing")
        self.assertEqual(sorted(seen), ["topk_ids", "topk_weights", "y"])
        self.assertEqual(seen["topk_ids"].dtype, np.int32)
        self.assertEqual(seen["topk_ids"].shape, seen["topk_weights"].shape)
        recorded = {"x": self.x, "topk_ids": seen["topk_ids"], "topk_weights": seen["topk_weights"]}
        moed.write_safetensors(self.path("replay"), recorded)
        again = self.forward("--tensor", "x", "--topk-ids", "topk_ids", "--topk-weights",
                             "topk_weights", source="replay")
        np.testing.assert_array_equal(again["y"], seen["y"])

    def test_the_coordinators_endpoint_finds_a_worker(self):
        coordinator = self.group.description()["processes"][0]["endpoint"]
        y = self.forward("--endpoint", coordinator)["y"]
        self.assertLessEqual(relative_error(y, self.want), 1e-5)
        self.assertEqual(run("bench", "--endpoint", coordinator, "--layer", str(self.layer),
                             "--duration", "1").returncode, OK)

    def test_files_that_cannot_be_used(self):
        for name, x in (("wide", self.x.astype(np.float64)), ("half", self.x.astype(np.float16)),
                        ("flat", self.x[0])):
            moed.write_safetensors(self.path(name), {"x": x})
            text = self.forward(code=FAILED, source=name)
            shape = "[" + ",".join(map(str, x.shape)) + "]"
            self.assertIn(shape + "; a 2-D F32 or BF16 tensor is needed", text)
            self.assertEqual(text, self.forward("--tensor", "x", code=FAILED, source=name))
        done = run("forward", "--endpoint", self.group.endpoint, "--layer", str(self.layer),
                   "--input", self.path("x"), "--output", "/nosuch/y.safetensors")
        self.assertEqual(done.returncode, NOT_FOUND, done.stderr)

    def test_a_missing_file_or_layer_is_not_found(self):
        self.forward(code=NOT_FOUND, source="nothing")
        self.forward(code=NOT_FOUND, layer=99)
        self.forward("--tensor", "z", code=NOT_FOUND)

    def test_a_choice_of_tensors_is_listed(self):
        moed.write_safetensors(self.path("two"), {"first": self.x, "second": self.x})
        text = self.forward(code=FAILED, source="two")
        self.assertIn("first", text)
        self.assertIn("second", text)
        self.assertNotIn("…", text)
        self.forward("--tensor", "second", source="two")
        moed.write_safetensors(self.path("many"), {"tensor.%02d" % i: self.x for i in range(40)})
        text = self.forward(code=FAILED, source="many")
        # Names are listed whole.
        self.assertRegex(text, r"has 40 2-D F32 or BF16 tensors, .*:( tensor\.\d\d)+ …")

    def test_a_wrong_width_is_refused(self):
        moed.write_safetensors(self.path("narrow"), {"x": self.x[:, 1:]})
        self.assertIn("SHAPE_MISMATCH", self.forward(code=FAILED, source="narrow"))

    def test_bench_reports_the_documented_fields(self):
        for options in ([], ["--stream", "--dtype", "f32"], ["--spread", "--connections", "2"]):
            done = run("bench", "--endpoint", self.group.endpoint, "--layer", str(self.layer),
                       "--tokens", "4", "--concurrency", "1,4", "--duration", "1", "-o", "json",
                       *options)
            self.assertEqual(done.returncode, OK, done.stderr)
            result = json.loads(done.stdout)
            self.assertEqual((result["apiVersion"], result["kind"]), ("moed/v1", "BenchResult"))
            self.assertEqual((result["tokens"], result["workers"]), (4, 2))
            self.assertEqual([each["concurrency"] for each in result["runs"]], [1, 4])
            for each in result["runs"]:
                self.assertEqual(each["errors"], "0")
                self.assertGreater(int(each["requests"]), 0)
                self.assertAlmostEqual(each["tokensPerS"], 4 * each["requestsPerS"], places=3)
                for name in ("latencyUs", "overheadUs", "serverOverheadUs"):
                    d = each[name]
                    self.assertTrue(d["p50"] <= d["p90"] <= d["p99"] <= d["max"], d)
                self.assertGreater(each["stagesUs"]["step"]["p50"], 0)
                self.assertLessEqual(each["stagesUs"]["step"]["mean"],
                                     each["stagesUs"]["server"]["mean"])
                self.assertLessEqual(each["stagesUs"]["server"]["mean"], each["latencyUs"]["mean"])
        table = run("bench", "--endpoint", self.group.endpoint, "--layer", str(self.layer),
                    "--duration", "1")
        self.assertEqual(table.returncode, OK, table.stderr)
        self.assertIn("concurrency 1:", table.stdout)

    def test_bench_at_a_rate_and_its_search(self):
        at = ("--endpoint", self.group.endpoint, "--layer", str(self.layer), "-o", "json")
        done = run("bench", *at, "--rate", "50", "--duration", "4", "--seed", "7")
        self.assertEqual(done.returncode, OK, done.stderr)
        only, = json.loads(done.stdout)["runs"]
        self.assertEqual((only["rate"], only["concurrency"], only["errors"]), (50, 256, "0"))
        # The arrivals depend on the seed alone: 200 of them are expected, with a deviation of 14.
        self.assertTrue(140 < int(only["requests"]) < 260, only["requests"])
        self.assertGreaterEqual(only["latencyUs"]["mean"], only["stagesUs"]["server"]["mean"])
        done = run("bench", *at, "--slo-p99", "100000", "--rate", "500", "--duration", "1")
        self.assertEqual(done.returncode, OK, done.stderr)
        result = json.loads(done.stdout)
        rates = [each["rate"] for each in result["runs"]]
        self.assertEqual(rates[0], 500)  # it doubles while the rate is kept
        self.assertEqual(result["sloP99Ms"], 100000)
        self.assertIn(result["highestRate"], rates)
        # No request is that fast.
        done = run("bench", *at, "--slo-p99", "0.000001", "--rate", "500", "--duration", "1")
        result = json.loads(done.stdout)
        self.assertEqual((result["highestRate"], len(result["runs"])), (0, 1), done.stderr)
        self.assertIn("no rate from 500.0 requests/s on keeps the limit", done.stderr)
        done = run("bench", *at, "-o", "table", "--slo-p99", "0.000001", "--rate", "500",
                   "--duration", "1")
        self.assertIn("\n\nhighest rate with a p99 of at most 1e-06 ms: 0.0 requests/s\n",
                      done.stdout)

    def test_a_search_with_too_few_requests_is_refused(self):
        at = ("--endpoint", self.group.endpoint, "--layer", str(self.layer))
        done = run("bench", *at, "--slo-p99", "5", "--rate", "40", "--duration", "1")
        self.assertEqual((done.returncode, done.stdout), (USAGE, ""))
        self.assertIn("500 requests in each run", done.stderr)
        self.assertIn("--duration 13, or --rate 500", done.stderr)

    def test_bench_without_an_answer_prints_no_figures(self):
        done = run("bench", "--endpoint", self.group.endpoint, "--layer", str(self.layer),
                   "--tokens", "1000000", "--duration", "0.2", "-o", "json")
        self.assertEqual((done.returncode, done.stdout), (FAILED, ""))
        self.assertIn("TOKEN_LIMIT", done.stderr)

    def test_bench_of_a_layer_that_is_not_there(self):
        done = run("bench", "--endpoint", self.group.endpoint, "--layer", "99")
        self.assertEqual((done.returncode, done.stdout), (NOT_FOUND, ""))


if __name__ == "__main__":
    main()
