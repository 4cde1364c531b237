# SPDX-License-Identifier: Apache-2.0
"""moectl up and down: whole groups by command, their signals, files and ends."""

import concurrent.futures
import contextlib
import ctypes
import fcntl
import json
import os
import resource
import signal
import socket
import subprocess
import sys
import time
import unittest
import urllib.request

import numpy as np

from commands import (CONFLICT, FAILED, FAMILY, NOT_FOUND, OK, PERMISSION, UNREACHABLE, USAGE,
                      folder, is_alive, is_pending, listens, run)
from group import (BACKEND, MOECTL, Group, freeze, golden_cases, main, model_directory, moectl,
                   relative_error, wait_until)
from training import COORDINATOR, WORKER, start

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "support"))
from certificates import Certificates  # noqa: E402

import moed

PTRACE_SEIZE, PTRACE_DETACH, PTRACE_O_TRACEEXIT, WALL = 0x4206, 17, 1 << 6, 0x40000000


class UpAndDown(unittest.TestCase):
    def up(self, state, *more):
        return run("up", "--model", model_directory(FAMILY), "--workers", "2", "--port", "0",
                   "--state-dir", state, *more)

    def test_one_group_per_state_directory(self):
        with folder() as state:
            first = self.up(state, "--detach", "-o", "json", "--join-wait-s", "7")
            self.assertEqual(first.returncode, OK, first.stderr)
            document = json.loads(first.stdout)
            self.assertEqual(document["kind"], "StartedGroup")
            with open(os.path.join(state, "group.json"), encoding="utf8") as file:
                coordinator = json.load(file)["processes"][0]
            with open("/proc/%d/cmdline" % coordinator["pid"], encoding="utf8") as file:
                self.assertIn("\0--join-wait-s\0007\0", file.read())
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
                group = json.load(file)
            self.assertEqual(group["kind"], "LocalGroup")
            processes = group["processes"]
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

    def test_a_group_that_can_be_scaled(self):
        with folder() as state:
            here = ("--state-dir", state)
            done = self.up(state, "--max-workers", "3", "--detach")
            self.assertEqual(done.returncode, OK, done.stderr)
            try:
                status = json.loads(run("status", "-o", "json", *here).stdout)
                self.assertEqual((status["size"], status["maxWorkers"]), (2, 3))
                command = self.processes(state)[1]["command"]
                more = subprocess.Popen(
                    [command[0], "--model", model_directory(FAMILY), "--listen", "127.0.0.1:0",
                     "--backend", "cpu", "--coordinator",
                     command[command.index("--coordinator") + 1]], stderr=subprocess.DEVNULL)
                self.addCleanup(more.wait)
                self.addCleanup(more.kill)
                wait_until(lambda: len(json.loads(run("status", "-o", "json", *here).stdout).get(
                    "spareSlots", [])) == 1)
                for size in ("3", "2"):
                    done = run("scale", size, *here)
                    self.assertEqual(done.returncode, OK, done.stderr)
                self.assertEqual(more.wait(60), 0)
            finally:
                down = run("down", *here)
            self.assertEqual(down.returncode, OK, down.stderr)

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

    def test_a_group_in_the_foreground_outlives_workers_that_leave(self):
        g = Group(model_directory(FAMILY), 3, "--replicas", "3", "--drain", "1")
        here = ("--state-dir", g.state)
        layer, _, x, want = next(golden_cases(FAMILY))
        try:
            endpoint = self.processes(g.state)[3]["endpoint"]
            with moed.Client(endpoint, retry_time=20) as client:
                for slot in "0", "1":
                    self.assertEqual(run("drain", slot, "--reason", "test", *here).returncode, OK)
                    wait_until(lambda: int(slot) not in self.live_slots(*here))
                    time.sleep(1.5)  # longer than --drain
                    self.assertIsNone(g.process.poll())
                    self.assertLessEqual(relative_error(client.forward(layer, x), want), 1e-5)
            self.assertEqual(run("drain", "2", "--reason", "test", "--force", *here).returncode, OK)
            self.assertEqual(g.process.wait(timeout=20), OK)  # with its last worker
        finally:
            g.stop()

    def test_a_group_without_copies_ends_with_a_worker_that_leaves(self):
        """At once, and not when the time for requests is over: there are none."""
        g = Group(model_directory(FAMILY), 2, "--drain", "600")
        try:
            self.assertEqual(run("drain", "1", "--reason", "test", "--force", "--state-dir",
                                 g.state).returncode, OK)
            self.assertEqual(g.process.wait(timeout=60), OK)
        finally:
            g.stop()

    def test_up_starts_a_daemon_again_without_the_lock_of_the_state_directory(self):
        """A lock that cannot be opened is no `moectl down`, which would end the group."""
        g = Group(model_directory(FAMILY), 2, "--restart", "--drain", "600")
        try:
            os.symlink("/nowhere", os.path.join(g.state, "turn"))  # it is not followed
            old = self.processes(g.state)[2]["pid"]
            os.kill(old, signal.SIGKILL)
            wait_until(lambda: self.processes(g.state)[2]["pid"] != old)
            done = run("wait", "--timeout", "60", "--state-dir", g.state)
            self.assertEqual(done.returncode, OK, done.stderr)
            self.assertIsNone(g.process.poll())
        finally:
            self.assertEqual(g.stop(), OK)

    def live_slots(self, *here):
        return json.loads(run("status", "-o", "json", *here).stdout).get("liveSlots", [])

    def test_up_starts_again_a_worker_that_leaves(self):
        g = Group(model_directory(FAMILY), 2, "--replicas", "2", "--restart")
        here = ("--state-dir", g.state)
        try:
            before = self.processes(g.state)
            self.assertEqual(run("drain", "1", "--reason", "test", *here).returncode, OK)
            wait_until(lambda: self.processes(g.state)[2]["pid"] != before[2]["pid"])
            wait_until(lambda: self.live_slots(*here) == [0, 1])
            done = run("restart", "--rolling", "--timeout", "60", *here)
            self.assertEqual(done.returncode, OK, done.stderr)
            for was, now in zip(before[1:], self.processes(g.state)[1:]):
                self.assertEqual(was["endpoint"], now["endpoint"])
                self.assertNotEqual(was["pid"], now["pid"])
            self.assertEqual(run("down", *here).returncode, OK)
            self.assertEqual(g.process.wait(timeout=60), OK)
        finally:
            g.stop()

    def test_a_group_that_was_scaled_wants_its_size(self):
        with folder() as state:
            here = ("--state-dir", state)
            done = self.up(state, "--max-workers", "3", "--workers", "3", "--detach")
            self.assertEqual(done.returncode, OK, done.stderr)
            self.assertEqual(run("down", *here).returncode, OK)
            done = self.up(state, "--max-workers", "3", "--detach")
            self.assertNotEqual(done.returncode, OK)
            self.assertIn("has a size of 3", done.stderr)
            self.assertIn("--workers 3", done.stderr)

    def test_up_starts_again_all_that_die_one_after_another(self):
        """One is due while the one before has not executed its program yet."""
        g = Group(model_directory(FAMILY), 4, "--restart")
        try:
            for _ in range(2):
                old = [p["pid"] for p in self.processes(g.state)]
                for pid in old:
                    os.kill(pid, signal.SIGKILL)
                    time.sleep(0.001)
                wait_until(lambda: all(new["pid"] != pid and is_alive(new["pid"]) for new, pid in
                                       zip(self.processes(g.state), old)))
            self.assertIsNone(g.process.poll())
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
            self.assertFalse(g.description()["restarts"])
            refused = run("restart", "--rolling", "--force", "--state-dir", g.state)
            self.assertEqual(refused.returncode, CONFLICT, refused.stderr)
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
                wait_until(lambda: "epoch    none" in run("status", *here).stdout)
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
        """Runs moectl with a limit on the size of files. Python ignores SIGXFSZ."""
        done = subprocess.run(["prlimit", "--fsize=1:unlimited", MOECTL, *arguments],
                              stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                              timeout=120, restore_signals=False)
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
                with self.start_replace(state, restore_signals=False) as replace:
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
                done = run("replace", "--timeout", "4", *here)
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
                for command in (("status", *here), ("wait", "--timeout", "5", *here),
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

    def test_down_does_not_say_that_processes_have_ended_that_it_cannot_see(self):
        """A name for loopback addresses only is one of this host, and so are its workers."""
        name = socket.gethostname()
        found = [a[4][0] for a in socket.getaddrinfo(name, 1, type=socket.SOCK_STREAM)]
        own = all(address.startswith("127.") or address == "::1" for address in found)
        for host, code in (("0.0.0.0", FAILED), (name, OK if own else FAILED)):
            with self.subTest(host=host), folder() as state:
                coordinator, address = start(COORDINATOR, "--listen", "0.0.0.0:0", "--insecure",
                                             "--workers", "1", "--state-dir", state)
                port = address.rpartition(":")[2]
                worker, _ = start(WORKER, "--model", model_directory(FAMILY), "--backend", BACKEND,
                                  "--threads", "1", "--coordinator", "127.0.0.1:" + port)
                moectl("wait", "--endpoint", "127.0.0.1:" + port)
                done = run("down", "--endpoint", "%s:%s" % (host, port))
                print(done.stderr)
                self.assertEqual(done.returncode, code)
                self.assertEqual("cannot be seen from here" in done.stderr, code != OK)
                self.assertEqual((worker.wait(), coordinator.wait()), (0, 0))

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

    def test_down_of_stopped_workers_keeps_its_time_limit(self):
        """By an endpoint there is no process to look at. A stopped one adds no time."""
        with folder() as state:
            self.assertEqual(self.up(state, "--detach", "--workers", "3").returncode, OK)
            coordinator, *workers = self.processes(state)
            try:
                for worker in workers[1:]:
                    freeze(worker["pid"])
                begun = time.monotonic()
                done = run("down", "--endpoint", coordinator["endpoint"], "--timeout", "2")
                took = time.monotonic() - begun
                print("%.1f s: %s" % (took, done.stderr))
                self.assertEqual(done.returncode, UNREACHABLE)
                for n, worker in enumerate(workers):
                    name = "slot %d (worker worker-%d, %s)" % (n, n, worker["endpoint"])
                    self.assertEqual(name in done.stderr, n > 0 or is_alive(worker["pid"]), name)
                self.assertLess(took, 2 + 2)  # with 2 s for each stopped worker it would be 6
            finally:
                run("down", "--force", "--timeout", "1", "--state-dir", state)
            self.assertEqual([w["pid"] for w in workers if is_alive(w["pid"])], [])

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


if __name__ == "__main__":
    main()
