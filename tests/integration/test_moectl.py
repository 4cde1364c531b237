# SPDX-License-Identifier: Apache-2.0
"""moectl's command line: options, output and exit codes, as scripts rely on them."""

import concurrent.futures
import contextlib
import ctypes
import fcntl
import json
import os
import resource
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import unittest
import urllib.request

import numpy as np

from group import (BUILD, MOECTL, Group, freeze, golden_cases, main, model_directory, moectl,
                   relative_error, to_bf16, wait_until)
from fake_group import FakeAdmin
from wire import admin

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "support"))
from certificates import Certificates  # noqa: E402

import moed

FAMILY = "qwen3_moe"
OK, FAILED, USAGE, UNHEALTHY, NOT_FOUND, UNREACHABLE, PERMISSION, CONFLICT = range(8)
COMMANDS = ("up", "down", "status", "wait", "get", "describe", "health", "top", "placement",
            "diag", "drain", "cordon",
            "uncordon", "replace", "restart", "rebalance", "load", "unload", "forward",
            "bench", "training", "model", "context", "log-level", "version")

PTRACE_SEIZE, PTRACE_DETACH, PTRACE_O_TRACEEXIT, WALL = 0x4206, 17, 1 << 6, 0x40000000

NOWHERE = tempfile.TemporaryDirectory(prefix="moed-test-")
# Some commands here run in another session (XDG_RUNTIME_DIR) than the daemons; sockets stay.
os.environ["MOED_RUNTIME_DIR"] = os.path.join(NOWHERE.name, "run")


def run(*arguments, cwd=None, **more):
    """Runs moectl with `more` in the environment. It does not find a group of the user."""
    environment = {key: value for key, value in os.environ.items() if key != "MOED_ENDPOINT"}
    environment.update(
        {"XDG_RUNTIME_DIR": NOWHERE.name, "XDG_CONFIG_HOME": NOWHERE.name, **more})
    return subprocess.run([MOECTL, *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                          text=True, timeout=120, env=environment, cwd=cwd)


@contextlib.contextmanager
def folder():
    path = tempfile.mkdtemp(prefix="moed-test-")
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


def listens(endpoint):
    host, port = endpoint.rsplit(":", 1)
    with socket.socket() as s:
        return s.connect_ex((host, int(port))) == 0


def is_alive(pid):
    try:
        with open("/proc/%d/stat" % pid) as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def is_pending(pid, number):
    """True if the process has a signal that it has not taken."""
    with open("/proc/%d/status" % pid) as file:
        pending = next(line for line in file if line.startswith("ShdPnd:"))
    return bool(int(pending.split()[1], 16) >> (number - 1) & 1)


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

    def test_help_of_a_command(self):
        self.assertEqual(self.expect(OK, "help", "training").stdout,
                         self.expect(OK, "training", "--help").stdout)
        self.assertIn("no command 'foo'", self.expect(USAGE, "help", "foo").stderr)

    def test_wrong_command_lines(self):
        for arguments in (
                [], ["bogus"], ["status", "extra"],
                ["get"], ["get", "cats"], ["get", "workers", "x"],
                ["describe", "worker"], ["describe", "worker", "64"], ["describe", "cat"],
                ["describe", "group", "1"], ["status", "--bogus"], ["status", "-o", "xml"],
                ["status", "--timeout", "soon"], ["status", "--timeout", "-1"], ["up"],
                ["up", "--model", "/tmp", "--workers", "0"],
                ["up", "--model", "/tmp", "--workers", "65"],
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
            done = run("wait", "--endpoint", fake.endpoint, "--timeout", "0.3")
            self.assertEqual(done.returncode, UNREACHABLE, done.stderr)
            self.assertEqual(done.stderr, "moectl: LOADING: slot 0 is loading\n"
                             "moectl: the time limit is over; the group is LOADING: slot 0 is "
                             "loading\n")
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

    def test_a_hostile_string_controls_no_terminal(self):
        hostile = "\x1b]0;owned\x07\r\u009b31m\x7f\nstate    SERVING"
        escaped = r"\x1b]0;owned\x07\x0d\u009b31m\x7f\nstate    SERVING"
        fake = FakeAdmin(version=hostile, state=admin.GROUP_STATE_FAILED, model=hostile,
                         reason=hostile, slots=1)
        fake.status.workers.add(slot=0, worker_id=hostile, endpoint=hostile).error.reason = hostile
        try:
            for arguments in (["status"], ["version"], ["wait", "--timeout", "0.3"],
                              ["status", "-o", "json"], ["version", "-o", "json"]):
                done = run(*arguments, "--endpoint", fake.endpoint)
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
            event("EPOCH_ENDED")
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


class UpAndDown(unittest.TestCase):
    def up(self, state, *more):
        return run("up", "--model", model_directory(FAMILY), "--workers", "2", "--port", "0",
                   "--state-dir", state, *more)

    def test_one_group_per_state_directory(self):
        with folder() as state:
            first = self.up(state, "--detach", "-o", "json")
            self.assertEqual(first.returncode, OK, first.stderr)
            document = json.loads(first.stdout)
            self.assertEqual(len(document["workers"]), 2)
            self.assertEqual(document["endpoint"], document["workers"][0])
            self.assertEqual(self.up(state).returncode, CONFLICT)
            for where in (("--state-dir", state), ("--endpoint", document["coordinator"]),
                          ("--endpoint", document["workers"][1])):
                self.assertEqual(run("status", *where).returncode, OK)
                self.assertEqual(run("wait", *where).returncode, OK)
                self.assertEqual(run("version", *where).stdout.count("\n"), 4)
            self.assertEqual(run("wait", "--for=gone", "--timeout", "0.2", "--state-dir",
                                 state).returncode, UNREACHABLE)
            down = run("down", "--endpoint", document["workers"][1])
            self.assertEqual(down.returncode, OK, down.stderr)
            self.assertEqual(run("wait", "--for=gone", "--state-dir", state).returncode, OK)
            self.assertEqual(run("down", "--state-dir", state).returncode, NOT_FOUND)

    def test_down_ends_a_group_without_its_coordinator(self):
        with folder() as state:
            self.assertEqual(self.up(state, "--detach").returncode, OK)
            with open(os.path.join(state, "group.json")) as file:
                processes = json.load(file)["processes"]
            os.kill(processes[0]["pid"], signal.SIGKILL)
            wait_until(lambda: not is_alive(processes[0]["pid"]))
            down = run("down", "--state-dir", state, "--force")
            self.assertEqual(down.returncode, OK, down.stderr)
            self.assertEqual([p["pid"] for p in processes if is_alive(p["pid"])], [])

    def test_a_group_without_its_group_file_can_be_ended(self):
        with folder() as state:
            here = ("--state-dir", state)
            self.assertEqual(self.up(state, "--detach").returncode, OK)
            processes = self.processes(state)
            os.unlink(os.path.join(state, "group.json"))
            for command in ("status", "replace", "down"):
                done = run(command, *here)
                self.assertEqual((done.returncode, done.stdout), (NOT_FOUND, ""), done.stderr)
                self.assertIn("daemons run in " + state, done.stderr)
                self.assertIn("`moectl down -e HOST:PORT`", done.stderr)
            self.assertEqual(self.up(state).returncode, CONFLICT)
            with open(os.path.join(state, "worker-1.log")) as log:
                self.assertIn("listening on " + processes[2]["endpoint"], log.read())
            done = run("down", "-e", processes[2]["endpoint"])
            self.assertEqual(done.returncode, OK, done.stderr)
            self.assertEqual(run("wait", "--for=gone", *here).returncode, OK)
            self.assertEqual([p["pid"] for p in processes if is_alive(p["pid"])], [])

    def processes(self, state):
        with open(os.path.join(state, "group.json")) as file:
            return json.load(file)["processes"]

    def kill(self, process):
        os.kill(process["pid"], signal.SIGKILL)
        wait_until(lambda: not is_alive(process["pid"]))

    def test_replace_restarts_dead_daemons_with_their_options(self):
        with folder() as state:
            self.assertEqual(self.up(state, "--detach", "--threads", "1").returncode, OK)
            here = ("--state-dir", state)
            try:
                before = self.processes(state)
                self.assertIn("--threads", before[2]["command"])
                self.assertIn(before[2]["endpoint"], before[2]["command"])
                self.assertIn("all 3 daemons run", run("replace", *here).stderr)
                for victims in ((2,), (0,), (0, 1)):
                    before = self.processes(state)
                    for victim in victims:
                        self.kill(before[victim])
                    done = run("replace", *here)
                    self.assertEqual(done.returncode, OK, done.stderr)
                    self.assertEqual(done.stdout.split(),
                                     [word for victim in victims for word in (
                                         before[victim]["name"], before[victim]["endpoint"])])
                    self.assertEqual(run("wait", "--timeout", "60", *here).returncode, OK)
                    after = self.processes(state)
                    for old, new in zip(before, after):
                        self.assertEqual((old["endpoint"], old["command"]),
                                         (new["endpoint"], new["command"]))
                        self.assertTrue(is_alive(new["pid"]))
                self.assertEqual(self.up(state).returncode, CONFLICT)
            finally:
                down = run("down", "--force", *here)
            self.assertEqual(down.returncode, OK, down.stderr)
            self.assertEqual([p["pid"] for p in after if is_alive(p["pid"])], [])
            self.assertEqual(run("replace", *here).returncode, NOT_FOUND)

    def test_up_starts_again_what_dies(self):
        """Each daemon in turn, then both workers; the group has its old addresses."""
        g = Group(model_directory(FAMILY), 2, "--restart")
        here = ("--state-dir", g.state)
        try:
            before = self.processes(g.state)
            for victims in ([2], [0], [1, 2]):
                old = self.processes(g.state)
                for victim in victims:
                    os.kill(old[victim]["pid"], signal.SIGKILL)
                wait_until(lambda: all(
                    new["pid"] != old[i]["pid"] for i, new in enumerate(self.processes(g.state))
                    if i in victims))
                self.assertEqual(run("wait", "--timeout", "60", *here).returncode, OK)
                for was, now in zip(before, self.processes(g.state)):
                    self.assertEqual((was["endpoint"], was["command"]),
                                     (now["endpoint"], now["command"]))
                    self.assertTrue(is_alive(now["pid"]))
            # `wait` may have asked a coordinator that had not yet seen the end of both workers.
            wait_until(lambda: run("wait", "--timeout", "60", *here).returncode == OK and
                       listens(g.endpoint))
            with moed.Client(g.endpoint) as client:
                for layer, _, x, want in golden_cases(FAMILY):
                    self.assertLessEqual(relative_error(client.forward(layer, x), want), 1e-5)
            # Refused without the lock: to a new start, one that holds it looks like a `down`.
            with open(os.path.join(g.state, "turn"), "r+", encoding="utf-8") as turn:
                fcntl.flock(turn, fcntl.LOCK_SH)
                refused = run("replace", "--timeout", "1", *here)
            self.assertEqual(refused.returncode, CONFLICT, refused.stderr)
            self.assertIn("in the foreground", refused.stderr)
            pids = [p["pid"] for p in self.processes(g.state)]
            self.assertEqual(run("down", *here).returncode, OK)
            self.assertEqual(g.process.wait(timeout=60), OK)
            self.assertEqual([pid for pid in pids if is_alive(pid)], [])
        finally:
            g.stop()

    def test_ctrl_c_ends_a_group_with_a_daemon_that_waits_for_its_start(self):
        g = Group(model_directory(FAMILY), 2, "--restart")
        log = os.path.join(g.state, "worker-1.log")
        os.unlink(log)
        os.mkdir(log)  # a daemon that cannot open its log ends at once
        pid = self.processes(g.state)[2]["pid"]
        os.kill(pid, signal.SIGKILL)
        # A zombie may still have threads; moectl learns its end after the last one.
        wait_until(lambda: not os.path.exists("/proc/%d" % pid))
        g.process.send_signal(signal.SIGINT)
        self.assertEqual(g.process.wait(timeout=60), OK)
        g.stop()

    def test_ctrl_c_at_the_moment_of_a_death_is_no_failure(self):
        """moectl sees both at once."""
        g = Group(model_directory(FAMILY), 2, "--restart")
        try:
            pid = self.processes(g.state)[2]["pid"]
            freeze(g.process.pid)
            os.kill(pid, signal.SIGKILL)
            wait_until(lambda: is_pending(g.process.pid, signal.SIGCHLD))
            g.process.send_signal(signal.SIGINT)
            g.process.send_signal(signal.SIGCONT)
            self.assertEqual(g.process.wait(timeout=60), OK)
        finally:
            g.stop()

    def test_restart_excludes_detach(self):
        with folder() as state:
            self.assertEqual(self.up(state, "--restart", "--detach").returncode, USAGE)

    def test_up_passes_certificates_and_roles_on(self):
        """To every daemon, as whole paths, also to one that replace starts."""
        with folder() as state, Certificates() as c:
            here = ("--state-dir", state)
            c.ca("ca")
            names = "DNS:localhost,IP:127.0.0.1"
            c.pair("server", "ca", names + ",URI:spiffe://moed/worker/all")
            c.pair("web", "ca", "URI:spiffe://moed/web")
            c.pair("ops", "ca", "URI:spiffe://moed/ops")
            with open(c.path("access.json"), "w", encoding="ascii") as file:
                json.dump({"identities": {
                    "spiffe://moed/worker/all": {"roles": ["worker"],
                                                 "worker_ids": ["worker-0", "worker-1"]},
                    "spiffe://moed/web": {"roles": ["client"]},
                    "spiffe://moed/ops": {"roles": ["admin"]}}}, file)
            options = {"--access-file": "access.json", "--tls-certificate": "server.pem",
                       "--tls-key": "server.key", "--tls-client-ca": "ca.pem",
                       "--tls-ca": "ca.pem"}
            up = run("up", "--model", model_directory(FAMILY), "--workers", "2", "--port", "0",
                     "--detach", *here, *(text for pair in options.items() for text in pair),
                     cwd=c.directory)
            self.assertEqual(up.returncode, OK, up.stderr)
            # A client that finds no socket of the group's user.
            elsewhere = {"MOED_RUNTIME_DIR": os.path.join(c.directory, "no-sockets")}

            def ask(command, endpoint, who, *more):
                return run(command, "--endpoint", endpoint, "--tls-ca", c.pem("ca"),
                           "--tls-certificate", c.pem(who), "--tls-key", c.key(who), *more,
                           **elsewhere)

            try:
                self.kill(self.processes(state)[2])
                replaced = run("replace", *here)
                self.assertEqual(replaced.returncode, OK, replaced.stderr)
                processes = self.processes(state)
                for process in processes:
                    with open("/proc/%d/cmdline" % process["pid"], encoding="ascii") as file:
                        command = file.read().split("\0")
                    for option, name in options.items():
                        self.assertEqual(command[command.index(option) + 1],
                                         os.path.realpath(c.path(name)), process["name"])
                    endpoint = process["endpoint"]
                    plain = run("status", "--endpoint", endpoint, "--timeout", "5", **elsewhere)
                    self.assertNotEqual(plain.returncode, OK)
                    # Not `wait`: the coordinator may not have noticed the loss yet.
                    wait_until(lambda: ask("status", endpoint, "ops").returncode == OK)
                refused = ask("down", processes[0]["endpoint"], "web")
                self.assertEqual(refused.returncode, PERMISSION, refused.stderr)
                self.assertEqual(ask("down", processes[0]["endpoint"], "ops").returncode, OK)
            finally:
                run("down", "--force", *here)

    def test_replace_refuses_a_group_in_the_foreground(self):
        g = Group(model_directory(FAMILY), 2)
        try:
            self.assertTrue(g.description()["foreground"])
            before = self.processes(g.state)
            freeze(g.process.pid)  # it does not see the death yet
            os.kill(before[2]["pid"], signal.SIGKILL)
            wait_until(lambda: not is_alive(before[2]["pid"]))
            done = run("replace", "--state-dir", g.state)
            self.assertEqual((done.returncode, done.stdout), (CONFLICT, ""), done.stderr)
            self.assertIn("`moectl up` in the foreground", done.stderr)
            self.assertEqual(self.processes(g.state), before)
            g.process.send_signal(signal.SIGCONT)
            self.assertEqual(g.process.wait(timeout=60), FAILED)
            self.assertEqual([p["pid"] for p in before if is_alive(p["pid"])], [])
        finally:
            g.process.send_signal(signal.SIGCONT)
            g.stop()

    def test_replace_on_a_taken_port_says_what_to_do(self):
        with folder() as state:
            here = ("--state-dir", state)
            self.assertEqual(self.up(state, "--detach").returncode, OK)
            try:
                victim = self.processes(state)[2]
                self.kill(victim)
                port = int(victim["endpoint"].rpartition(":")[2])
                with socket.socket() as taken:
                    taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)

                    def take():  # the kernel closes the connections of the victim first
                        with contextlib.suppress(OSError):
                            taken.bind(("127.0.0.1", port))
                            return True

                    wait_until(take)
                    taken.listen()
                    done = run("replace", *here)
                print(done.stderr)
                self.assertEqual(done.returncode, FAILED)
                self.assertIn("end the program that listens on its port", done.stderr)
                self.assertNotIn("--port", done.stderr)
            finally:
                down = run("down", "--force", *here)
            self.assertEqual(down.returncode, OK, down.stderr)
            self.assertIn("no epoch is in force", down.stderr)
            self.assertNotIn("killed", down.stderr)

    def start_replace(self, state, *extra, **more):
        """Runs `moectl replace` in the background."""
        return subprocess.Popen([MOECTL, "replace", "--state-dir", state, *extra], text=True,
                                stdout=subprocess.PIPE, stderr=subprocess.PIPE, **more)

    def on_a_full_disk(self, *arguments):
        """Runs moectl with a limit on the size of files."""
        def limit():
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            resource.setrlimit(resource.RLIMIT_FSIZE, (1, resource.RLIM_INFINITY))
        done = subprocess.run([MOECTL, *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                              text=True, timeout=120, preexec_fn=limit)
        print(done.stderr)
        self.assertEqual((done.returncode, done.stdout), (UNREACHABLE, ""))
        return done.stderr

    def test_up_on_a_full_disk_says_why_it_starts_nothing(self):
        with folder() as state:
            text = self.on_a_full_disk("up", "--model", model_directory(FAMILY), "--port", "0",
                                       "--state-dir", state)
            self.assertIn("cannot write in %s: File too large" % state, text)
            self.assertFalse(os.path.exists(os.path.join(state, "coordinator.log")))

    def test_replace_on_a_full_disk_leaves_no_daemon_that_group_json_lacks(self):
        with folder() as state:
            here = ("--state-dir", state)
            self.assertEqual(self.up(state, "--detach").returncode, OK)
            try:
                before = self.processes(state)
                _, first, second = before
                self.kill(first)
                text = self.on_a_full_disk("replace", *here)
                self.assertIn("cannot write group.json: File too large", text)
                self.assertNotIn("starting", text)
                self.assertFalse(os.path.exists(os.path.join(state, "group.json.new")))
                # The disk becomes full after the start of the first worker.
                freeze(second["pid"])
                wait_until(lambda: all(worker["state"] == "GONE" for worker in json.loads(
                    run("status", "-o", "json", *here).stdout)["workers"]))
                with self.start_replace(state, preexec_fn=lambda: signal.signal(
                        signal.SIGXFSZ, signal.SIG_IGN)) as replace:
                    self.assertIn("starting worker-0 again", replace.stderr.readline())
                    self.assertIn("its slot is empty", replace.stderr.readline())
                    resource.prlimit(replace.pid, resource.RLIMIT_FSIZE,
                                     (1, resource.RLIM_INFINITY))
                    replace.send_signal(signal.SIGINT)
                    _, text = replace.communicate(timeout=60)
                print(text)
                self.assertIn("replace killed the daemons", text)
                self.assertFalse(os.path.exists(os.path.join(state, "group.json.new")))
                self.assertEqual(self.processes(state), before)
                self.assertFalse(run("version", "--endpoint", first["endpoint"]).returncode == OK)
            finally:
                os.kill(second["pid"], signal.SIGCONT)
                down = run("down", "--force", "--timeout", "2", *here)
            self.assertEqual(down.returncode, OK, down.stderr)

    def test_replace_waits_for_a_dying_daemon(self):
        libc = ctypes.CDLL(None, use_errno=True)
        libc.ptrace.argtypes = [ctypes.c_long] * 4
        with folder() as state:
            self.assertEqual(self.up(state, "--detach").returncode, OK)
            here = ("--state-dir", state)
            try:
                for victim in (2, 0):
                    process = self.processes(state)[victim]
                    pid = process["pid"]
                    # The first thread stops during its exit, with all files still open.
                    if libc.ptrace(PTRACE_SEIZE, pid, 0, PTRACE_O_TRACEEXIT) != 0:
                        self.skipTest("ptrace: " + os.strerror(ctypes.get_errno()))
                    os.kill(pid, signal.SIGKILL)
                    self.assertEqual(os.waitpid(pid, WALL)[0], pid)
                    replace = self.start_replace(state)
                    self.assertIn("waiting for the end of " + process["name"],
                                  replace.stderr.readline())
                    self.assertEqual(libc.ptrace(PTRACE_DETACH, pid, 0, 0), 0)
                    out, _ = replace.communicate(timeout=60)
                    self.assertEqual((replace.returncode, out.split()),
                                     (OK, [process["name"], process["endpoint"]]))
                    self.assertEqual(run("wait", "--timeout", "60", *here).returncode, OK)
                self.assertIn("all 3 daemons run", run("replace", *here).stderr)
            finally:
                run("down", "--force", *here)

    def test_replace_waits_for_a_worker_without_its_slot(self):
        with folder() as state:
            self.assertEqual(self.up(state, "--detach").returncode, OK)
            here = ("--state-dir", state)
            try:
                victim = self.processes(state)[2]
                freeze(victim["pid"])
                wait_until(lambda: any(worker["state"] == "GONE" for worker in json.loads(
                    run("status", "-o", "json", *here).stdout)["workers"]))
                done = run("replace", "--timeout", "0.5", *here)
                self.assertEqual((done.returncode, done.stdout), (UNREACHABLE, ""))
                self.assertIn("kill -9 %d" % victim["pid"], done.stderr)
                with self.start_replace(state) as replace:
                    self.assertIn("its slot is empty", replace.stderr.readline())
                    os.kill(victim["pid"], signal.SIGKILL)
                    out, _ = replace.communicate(timeout=60)
                self.assertEqual((replace.returncode, out.split()),
                                 (OK, [victim["name"], victim["endpoint"]]))
                self.assertEqual(run("wait", "--timeout", "60", *here).returncode, OK)
            finally:
                run("down", "--force", *here)

    def test_a_second_replace_waits_for_the_first(self):
        with folder() as state:
            self.assertEqual(self.up(state, "--detach").returncode, OK)
            here = ("--state-dir", state)
            try:
                before = self.processes(state)
                self.kill(before[1])
                with open(os.path.join(state, "turn"), "w") as turn:
                    fcntl.flock(turn, fcntl.LOCK_EX)
                    done = run("replace", "--timeout", "0.3", *here)
                    self.assertEqual((done.returncode, done.stdout), (UNREACHABLE, ""))
                    self.assertIn("another `moectl replace`", done.stderr)
                    self.assertEqual(self.processes(state), before)
                self.kill(before[2])
                with concurrent.futures.ThreadPoolExecutor() as pool:
                    both = list(pool.map(lambda _: run("replace", *here), range(2)))
                self.assertEqual([done.returncode for done in both], [OK, OK],
                                 [done.stderr for done in both])
                self.assertEqual(sorted(len(done.stdout.splitlines()) for done in both), [0, 2])
                self.assertEqual(run("wait", "--timeout", "60", *here).returncode, OK)
                self.assertTrue(all(is_alive(p["pid"]) for p in self.processes(state)))
            finally:
                run("down", "--force", *here)

    def test_down_and_replace_at_the_same_time_leave_no_daemon(self):
        with folder() as state:
            here = ("--state-dir", state)
            for delay in (0, 0.02, 0.05, 0.1):
                self.assertEqual(self.up(state, "--detach").returncode, OK)
                try:
                    before = self.processes(state)
                    self.kill(before[2])
                    if delay == 0:
                        with open(os.path.join(state, "turn"), "w") as turn:
                            fcntl.flock(turn, fcntl.LOCK_EX)
                            down = run("down", "--timeout", "0.3", *here)
                            self.assertEqual(down.returncode, UNREACHABLE)
                            self.assertIn("another `moectl replace`", down.stderr)
                            self.assertEqual(self.processes(state), before)
                    with self.start_replace(state) as replace:
                        time.sleep(delay)
                        down = run("down", *here)
                        _, said = replace.communicate(timeout=60)
                    print(delay, replace.returncode, said, down.returncode, down.stderr)
                    self.assertEqual(down.returncode, OK, down.stderr)
                    self.assertIn(replace.returncode, (OK, NOT_FOUND, CONFLICT))
                    self.assertEqual(run("wait", "--for=gone", *here).returncode, OK)
                finally:
                    run("down", "--force", *here)

    def test_status_reports_workers_that_serve_without_their_coordinator(self):
        with folder() as state:
            self.assertEqual(self.up(state, "--detach").returncode, OK)
            here = ("--state-dir", state)
            try:
                coordinator, *workers = self.processes(state)
                self.kill(coordinator)
                for command in (("status", *here), ("wait", "--timeout", "2", *here),
                                ("status", "--endpoint", workers[1]["endpoint"])):
                    done = run(*command)
                    self.assertEqual((done.returncode, done.stdout), (UNREACHABLE, ""))
                    self.assertIn("the coordinator (%s) does not answer; 2 of 2 workers still serve"
                                  % coordinator["endpoint"], done.stderr)
                    self.assertEqual("moe-coordinator --listen" in done.stderr,
                                     command[-2:] == here, done.stderr)
                print(done.stderr)
                with moed.Client(workers[0]["endpoint"]) as client:  # they do serve
                    client.forward(0, np.ones((1, client.layers[0].hidden), np.float32))
                for where in (here, ("--endpoint", workers[0]["endpoint"])):
                    self.assertIn("does not train", run("training", *where).stderr)
                down = run("down", "--endpoint", workers[0]["endpoint"])
                self.assertEqual(down.returncode, UNREACHABLE)
                self.assertIn("2 of 2 workers still serve", down.stderr)
            finally:
                self.assertEqual(run("down", "--force", *here).returncode, OK)

    def test_status_reports_workers_that_serve_while_their_coordinator_hangs(self):
        with folder() as state:
            self.assertEqual(self.up(state, "--detach").returncode, OK)
            here = ("--state-dir", state)
            coordinator, *workers = self.processes(state)
            try:
                freeze(coordinator["pid"])
                for command in (("status", *here), ("wait", "--timeout", "4", *here),
                                ("status", "--endpoint", workers[1]["endpoint"])):
                    start = time.monotonic()
                    done = run(*command)
                    took = time.monotonic() - start
                    print("%s: %.1f s\n%s" % (command[0], took, done.stderr))
                    self.assertEqual((done.returncode, done.stdout), (UNREACHABLE, ""))
                    self.assertIn("the coordinator (%s) does not answer; 2 of 2 workers still serve"
                                  % coordinator["endpoint"], done.stderr)
                    self.assertEqual("kill -9 %d && moectl replace" % coordinator["pid"]
                                     in done.stderr, command[-2:] == here, done.stderr)
                    self.assertLess(took, 8)
                os.kill(coordinator["pid"], signal.SIGCONT)
                self.assertEqual(run("wait", "--timeout", "60", *here).returncode, OK)
            finally:
                os.kill(coordinator["pid"], signal.SIGCONT)
                run("down", "--force", *here)

    def test_down_without_a_coordinator_names_workers_that_still_run(self):
        """The state directory does not list a worker that was started by hand."""
        with folder() as state:
            self.assertEqual(self.up(state, "--detach").returncode, OK)
            here = ("--state-dir", state)
            byhand = None
            try:
                coordinator, _, victim = self.processes(state)

                def seen():
                    status = json.loads(run("status", "-o", "json", *here).stdout)
                    return status["state"], int(status["epoch"])

                _, epoch = seen()
                self.kill(victim)
                byhand = subprocess.Popen(victim["command"], stderr=subprocess.DEVNULL)
                # Not `wait`: the coordinator may not have noticed the loss yet.
                wait_until(lambda: seen()[0] == "SERVING" and seen()[1] > epoch)
                self.kill(coordinator)
                down = run("down", *here)
                print(down.stderr)
                self.assertEqual(down.returncode, UNREACHABLE)
                self.assertIn("still running: %s; " % victim["endpoint"], down.stderr)
                self.assertNotIn("the group has ended", down.stderr)
            finally:
                if byhand is not None:
                    byhand.kill()
                    byhand.wait()
                run("down", "--force", *here)

    def test_down_at_its_time_limit_names_daemons_that_still_run(self):
        with folder() as state:
            self.assertEqual(self.up(state, "--detach").returncode, OK)
            with open(os.path.join(state, "group.json")) as file:
                worker = json.load(file)["processes"][2]
            freeze(worker["pid"])
            done = run("down", "--state-dir", state, "--timeout", "1")
            self.assertEqual(done.returncode, UNREACHABLE)
            self.assertIn("worker-1 (process %d)" % worker["pid"], done.stderr)
            done = run("down", "--state-dir", state, "--timeout", "1", "--force")
            self.assertEqual(done.returncode, OK, done.stderr)
            self.assertRegex(done.stderr, r"--force killed .*worker-1 \(process %d\)"
                             % worker["pid"])

    def test_down_ends_a_worker_that_had_lost_its_slot(self):
        """The coordinator ends without it. It is continued only then, and looks for another."""
        with folder() as state:
            self.assertEqual(self.up(state, "--detach").returncode, OK)
            processes = self.processes(state)
            freeze(processes[2]["pid"])
            try:
                wait_until(lambda: any(w["state"] == "GONE" for w in json.loads(
                    run("status", "-o", "json", "--state-dir", state).stdout)["workers"]))
                down = subprocess.Popen([MOECTL, "down", "--state-dir", state, "--timeout", "60"],
                                        stderr=subprocess.PIPE, text=True)
                wait_until(lambda: not is_alive(processes[0]["pid"]))
            finally:
                os.kill(processes[2]["pid"], signal.SIGCONT)
            _, said = down.communicate(timeout=50)
            print(said)
            self.assertEqual(down.returncode, OK, said)
            self.assertIn("SIGTERM to workers that had no slot", said)
            self.assertEqual([p["pid"] for p in processes if is_alive(p["pid"])], [])

    def test_a_replace_that_waits_gives_way_to_down(self):
        with folder() as state:
            self.assertEqual(self.up(state, "--detach").returncode, OK)
            here = ("--state-dir", state)
            worker = self.processes(state)[2]
            freeze(worker["pid"])  # it neither ends nor keeps its slot
            try:
                wait_until(lambda: any(w["state"] == "GONE" for w in json.loads(
                    run("status", "-o", "json", *here).stdout)["workers"]))
                with self.start_replace(state) as replace:
                    self.assertIn("its slot is empty", replace.stderr.readline())
                    down = subprocess.Popen([MOECTL, "down", *here, "--timeout", "60"],
                                            stderr=subprocess.PIPE, text=True)
                    _, said = replace.communicate(timeout=30)
                    self.assertEqual(replace.returncode, CONFLICT, said)
                    self.assertIn("a `moectl down` ends the group", said)
            finally:
                os.kill(worker["pid"], signal.SIGCONT)
            _, said = down.communicate(timeout=50)
            self.assertEqual(down.returncode, OK, said)

    def test_no_daemon_outlives_a_killed_moectl(self):
        g = Group(model_directory(FAMILY), 2)
        pids = [process["pid"] for process in g.description()["processes"]]
        self.assertEqual([pid for pid in pids if not is_alive(pid)], [])
        g.process.kill()
        wait_until(lambda: not any(map(is_alive, pids)))
        g.stop()

    def test_down_ends_a_group_in_the_foreground(self):
        g = Group(model_directory(FAMILY), 2)
        self.assertEqual(moectl("down", "--state-dir", g.state).returncode, OK)
        self.assertEqual(g.process.wait(timeout=60), OK)
        self.assertFalse(os.path.exists(os.path.join(g.state, "group.json")))
        g.stop()

    def test_metrics_of_every_daemon(self):
        with contextlib.ExitStack() as held:  # three free ports in a row
            sockets = []
            while len(sockets) < 3:
                held.close()
                first = held.enter_context(socket.create_server(("127.0.0.1", 0)))
                port, sockets = first.getsockname()[1], [first]
                try:
                    sockets += [held.enter_context(socket.create_server(("127.0.0.1", port + i)))
                                for i in (1, 2)]
                except (OSError, OverflowError):
                    continue
        with folder() as state:
            done = self.up(state, "--detach", "--metrics-port", str(port))
            self.assertEqual(done.returncode, OK, done.stderr)
            try:
                for i in range(3):
                    with urllib.request.urlopen("http://127.0.0.1:%d/metrics" % (port + i)) as page:
                        self.assertIn(b"# TYPE moe_", page.read())
            finally:
                self.assertEqual(run("down", "--state-dir", state).returncode, OK)

    def test_sigterm_drains(self):
        g = Group(model_directory(FAMILY), 2)
        g.process.send_signal(signal.SIGTERM)
        self.assertEqual(g.process.wait(timeout=60), OK)
        g.stop()

    def test_a_daemon_that_cannot_start_is_shown_with_its_log(self):
        with folder() as state, folder() as model:
            done = run("up", "--model", model, "--port", "0", "--state-dir", state)
            self.assertEqual((done.returncode, done.stdout), (FAILED, ""), done.stderr)
            self.assertIn("worker-0 ended with exit code", done.stderr)
            self.assertIn("--- end of " + os.path.join(state, "worker-0.log"), done.stderr)
            self.assertIn("config.json", done.stderr)
        with folder() as state, socket.create_server(("127.0.0.1", 0)) as taken:
            port = taken.getsockname()[1]
            done = run("up", "--model", model_directory(FAMILY), "--port", str(port),
                       "--state-dir", state)
            self.assertEqual(done.returncode, FAILED, done.stderr)
            self.assertIn(" ended with exit code ", done.stderr)
            self.assertEqual(run("down", "--state-dir", state).returncode, NOT_FOUND)

    def test_a_limit_on_the_start(self):
        with folder() as state:
            done = self.up(state, "--timeout", "0.001")
            self.assertEqual((done.returncode, done.stdout), (UNREACHABLE, ""), done.stderr)
            self.assertEqual(run("status", "--state-dir", state).returncode, NOT_FOUND)


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
