# SPDX-License-Identifier: Apache-2.0
"""What a service manager sees: the units, and the messages of real daemons on its socket."""

import glob
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
import unittest

from group import BUILD, main, model_directory

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
UNITS = sorted(glob.glob(os.path.join(ROOT, "deploy", "systemd", "*.*")))
COORDINATOR = os.path.join(BUILD, "daemon", "coordinator", "moe-coordinator")
EXPOSURE = 25  # in tenths


class Manager:
    """The socket of NOTIFY_SOCKET, and the daemons that get its name."""

    def __init__(self, folder):
        self.path = os.path.join(folder, "notify")
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.socket.bind(self.path)
        self.socket.settimeout(30)
        self.seen = []

    def start(self, role, *arguments, **environment):
        return subprocess.Popen(
            [os.path.join(BUILD, "daemon", role, "moe-" + role), "--log-level", "warn", *arguments],
            env={**os.environ, "NOTIFY_SOCKET": self.path, **environment})

    def wait_for(self, text):
        """Reads on until a message begins with `text`; returns it."""
        while True:
            message = self.socket.recv(4096).decode()
            self.seen.append(message)
            if message.startswith(text):
                return message


class Daemons(unittest.TestCase):
    def setUp(self):
        self.folder = tempfile.mkdtemp(prefix="moed-systemd-")
        self.addCleanup(shutil.rmtree, self.folder, True)

    def manager(self, name):
        os.mkdir(os.path.join(self.folder, name))
        m = Manager(os.path.join(self.folder, name))
        self.addCleanup(m.socket.close)
        return m

    def start(self, manager, role, *arguments, **environment):
        process = manager.start(role, *arguments, **environment)
        self.addCleanup(lambda: (process.kill(), process.wait()))
        return process

    def test_a_group_tells_what_it_does(self):
        """Ready, status, reload and stop of a coordinator and its worker."""
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        of_coordinator, of_worker = self.manager("coordinator"), self.manager("worker")
        coordinator = self.start(of_coordinator, "coordinator", "--listen",
                                 "127.0.0.1:%d" % port, "--workers", "1")
        of_coordinator.wait_for("READY=1")
        worker = self.start(of_worker, "worker", "--coordinator", "127.0.0.1:%d" % port, "--model",
                            model_directory("mixtral"), "--backend", "cpu", "--threads", "1")
        of_worker.wait_for("READY=1")
        of_worker.wait_for("STATUS=serving under epoch ")
        of_coordinator.wait_for("STATUS=serving: 1 of 1 workers")
        for process, manager in ((worker, of_worker), (coordinator, of_coordinator)):
            process.send_signal(signal.SIGHUP)
            self.assertIn("\nMONOTONIC_USEC=", manager.wait_for("RELOADING=1"))
            manager.wait_for("READY=1")
        worker.send_signal(signal.SIGTERM)
        of_worker.wait_for("STOPPING=1")
        of_worker.wait_for("STATUS=draining: ")
        self.assertGreater(int(of_worker.wait_for("EXTEND_TIMEOUT_USEC=").split("=")[1]), 10 ** 7)
        self.assertEqual(worker.wait(60), 0)
        of_coordinator.wait_for("STATUS=")
        coordinator.send_signal(signal.SIGTERM)
        of_coordinator.wait_for("STOPPING=1")
        self.assertEqual(coordinator.wait(60), 0)

    def test_a_stopped_daemon_feeds_no_watchdog(self):
        manager = self.manager("watched")
        process = self.start(manager, "coordinator", "--listen", "127.0.0.1:0",
                             WATCHDOG_USEC="200000")
        for _ in range(3):
            manager.wait_for("WATCHDOG=1")
        process.send_signal(signal.SIGSTOP)
        os.waitpid(process.pid, os.WUNTRACED)
        manager.socket.setblocking(False)
        with self.assertRaises(BlockingIOError):
            while True:  # what was sent before
                manager.socket.recv(4096)
        manager.socket.settimeout(0.5)
        with self.assertRaises(socket.timeout):
            manager.socket.recv(4096)
        process.send_signal(signal.SIGCONT)
        manager.socket.settimeout(30)
        manager.wait_for("WATCHDOG=1")

    def logged(self, process):
        """Lines of its stderr, as they come."""
        for line in process.stderr:
            print("    " + line.rstrip())
            yield line

    def test_a_reload_changes_the_log_level(self):
        manager, settings = self.manager("level"), os.path.join(self.folder, "settings")

        def reload_with(text):
            with open(settings, "w") as file:
                file.write(text)
            process.send_signal(signal.SIGHUP)
            manager.wait_for("RELOADING=1")
            manager.wait_for("READY=1")

        with open(settings, "w") as file:
            file.write("log-level = error\nlisten = 127.0.0.1:0\n")
        process = subprocess.Popen([COORDINATOR, "--config", settings], text=True,
                                   env={**os.environ, "NOTIFY_SOCKET": manager.path},
                                   stderr=subprocess.PIPE)
        self.addCleanup(lambda: (process.kill(), process.communicate()))
        manager.wait_for("READY=1")
        reload_with("log-level = info\nlisten = 10.0.0.1:1\n")
        reload_with("log-level = loud\n")
        reload_with("nonsense = 1\n")
        reload_with("log-level = error\n")
        process.send_signal(signal.SIGTERM)
        log = process.communicate(timeout=60)[1]
        print(log)
        self.assertEqual(process.returncode, 0)
        self.assertEqual(log.count("SIGHUP: looked at the settings"), 3)
        self.assertEqual(log.count("not 'loud'"), 1)
        self.assertEqual(log.count("unknown setting 'nonsense'; the log level stays"), 1)
        self.assertNotIn("signal 15", log)

    def test_a_daemon_that_died_again_and_again_waits(self):
        record = os.path.join(self.folder, "starts")

        def start(*arguments):
            with open(record, "w") as file:
                file.write("9 %d\n" % time.clock_gettime_ns(time.CLOCK_MONOTONIC))
            process = subprocess.Popen(
                [COORDINATOR, *arguments], text=True, stderr=subprocess.PIPE,
                env={**os.environ, "MOED_START_RECORD": record})
            self.addCleanup(lambda: (process.kill(), process.communicate()))
            return process

        process = start("--listen", "127.0.0.1:0")
        waits = r"10 starts in a row ended within a minute: this one waits 9\.9 s"
        self.assertRegex(next(self.logged(process)), waits)
        process.send_signal(signal.SIGTERM)
        self.assertEqual(process.wait(60), 0)
        self.assertFalse(os.path.exists(record))  # who stops it may start it at once

    def test_wrong_settings_end_with_2_and_units_do_not_repeat_them(self):
        with open(os.path.join(self.folder, "starts"), "w") as file:
            file.write("9 %d\n" % time.clock_gettime_ns(time.CLOCK_MONOTONIC))
        environment = {**os.environ, "MOED_START_RECORD": file.name}
        missing = os.path.join(self.folder, "not mounted yet")
        worker = [os.path.join(BUILD, "daemon", "worker", "moe-worker")]
        common = ["--model", self.folder, "--coordinator", "127.0.0.1:1"]
        for command, code, text in (
                ([COORDINATOR, "--nonsense"], 2, "unknown option '--nonsense'"),
                (worker + ["--coordinator", "127.0.0.1:1"], 2, "--model is required"),
                (worker + common + ["--worker-id", "a b"], 2, "--worker-id: 1 to 127 printable"),
                (worker + common + ["--worker-id", ""], 2, "--worker-id"),
                (worker + common + ["--worker-id", 128 * "a"], 2, "--worker-id"),
                (worker + common + ["--worker-id", 127 * "a", "--check-config"], 0, "valid"),
                # These may be right at a later start.
                (worker + common, 1, "config.json"),
                (worker + common + ["--training", "sgd", "--training-dir", missing], 1,
                 "--training-dir: %s is not a writable directory" % missing)):
            record = environment if code == 2 else {**os.environ}
            done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                                  text=True, env=record, timeout=60)
            self.assertEqual(done.returncode, code, (command, done.stdout))
            self.assertIn(text, done.stdout)
            if code == 2:
                self.assertNotIn("this one waits", done.stdout)
        for unit in UNITS:
            if unit.endswith(".service"):
                with open(unit) as file:
                    lines = file.read().splitlines()
                self.assertIn("Restart=always", lines)
                self.assertIn("RestartPreventExitStatus=2", lines)
                self.assertIn("StartLimitIntervalSec=0", lines)

    def test_garbage_is_one_line_and_the_daemon_runs(self):
        for name in ("relative", "/nowhere/notify", "@" + 200 * "x"):
            ready, write = os.pipe()
            process = subprocess.Popen(
                [COORDINATOR, "--listen", "127.0.0.1:0", "--ready-fd", str(write)],
                pass_fds=[write],
                env={**os.environ, "NOTIFY_SOCKET": name}, stderr=subprocess.PIPE, text=True)
            self.addCleanup(process.wait)
            self.addCleanup(process.kill)
            os.close(write)
            with os.fdopen(ready) as line:
                self.assertIn("127.0.0.1:", line.readline())
            process.send_signal(signal.SIGTERM)
            log = process.communicate(timeout=60)[1]
            self.assertEqual(log.count("NOTIFY_SOCKET"), 1, log)
            self.assertEqual(process.returncode, 0)


@unittest.skipUnless(shutil.which("systemd-analyze"), "systemd-analyze is not here")
class Units(unittest.TestCase):
    """The units in a separate root, with our programs and the targets of this host."""

    @classmethod
    def setUpClass(cls):
        cls.root = tempfile.mkdtemp(prefix="moed-units-")
        system = os.path.join(cls.root, "usr", "lib", "systemd", "system")
        os.makedirs(system)
        programs = os.path.join(cls.root, "usr", "bin")
        os.makedirs(programs)
        os.symlink("usr/bin", os.path.join(cls.root, "bin"))
        for program in (*glob.glob(os.path.join(BUILD, "daemon", "*", "moe-*")), "/bin/sh"):
            if os.path.isfile(program):
                shutil.copy(program, programs)
        for unit in (*UNITS, *glob.glob("/usr/lib/systemd/system/*.target"),
                     *glob.glob("/lib/systemd/system/*.target")):
            shutil.copy(unit, system)
        cls.names = [os.path.basename(u).replace("@.", "@0.") for u in UNITS
                     if u.endswith((".service", ".target"))]

    @classmethod
    def tearDownClass(cls):
        shutil.rmtree(cls.root, ignore_errors=True)

    def analyze(self, verb, *arguments):
        done = subprocess.run(["systemd-analyze", verb, "--root=" + self.root, *arguments],
                              stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                              timeout=60)
        return done.returncode, done.stdout

    def test_verify_has_nothing_to_say(self):
        self.assertEqual(self.analyze("verify", "--man=no", *self.names), (0, ""))

    def test_exposure(self):
        for name in self.names:
            if name.endswith(".service"):
                code, text = self.analyze("security", "--offline=yes",
                                          "--threshold=%d" % EXPOSURE, name)
                print("    " + text.strip().splitlines()[-1].strip())
                self.assertEqual(code, 0)


if __name__ == "__main__":
    main()
