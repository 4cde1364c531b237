# SPDX-License-Identifier: Apache-2.0
"""The checks of test_boot.py inside the booted system. They run at each of its boots: the first
time all of them, then a reboot, then whether the group came back by itself."""

import grp
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
import unittest

import moed

COORDINATOR = "127.0.0.1:7700"
WORKERS = ("127.0.0.1:7600", "127.0.0.1:7601")
MODEL = "/srv/model"
ROUND = "/srv/round"  # exists after the first boot
LIMIT_S = 120


def run(*command, **options):
    return subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                          stdin=subprocess.DEVNULL, timeout=LIMIT_S, **options)


def must(*command, **options):
    done = run(*command, **options)
    if done.returncode != 0:
        raise AssertionError("%s: exit %d: %s" % (command, done.returncode, done.stdout))
    return done.stdout


def moectl(*arguments, user="moed", **names):
    """As a user, with these variables in the environment."""
    if user == "moed":
        names["MOED_RUNTIME_DIR"] = "/run/moed"
    return run("moectl", *arguments, "--endpoint", COORDINATOR, user=user, group=user,
               extra_groups=os.getgrouplist(user, grp.getgrnam(user).gr_gid), cwd="/",
               env={"PATH": os.environ["PATH"], **names})


def show(unit, name):
    return must("systemctl", "show", unit, "-P", name).strip()


def wait_until(condition, what):
    end = time.monotonic() + LIMIT_S
    while not condition():
        if time.monotonic() > end:
            raise AssertionError("not within %d s: %s" % (LIMIT_S, what))
        time.sleep(0.005)


def golden():
    tensors = moed.read_safetensors(MODEL + "/golden.safetensors")
    name = min(n for n in tensors if n.endswith(".x"))
    return int(name.split(".")[0][len("layer"):]), tensors[name], tensors[name[:-1] + "y"]


LAYER, X, Y = golden()


def right(y):
    return bool(abs(y - Y).max() < 1e-4)


def serves():
    """A right answer through each worker."""
    try:
        for endpoint in WORKERS:
            with moed.Client(endpoint, timeout=2) as client:
                if not right(client.forward(LAYER, X)):
                    raise AssertionError("a wrong answer")
        return True
    except moed.MoeError:
        return False


def await_serving():
    wait_until(serves, "the group serves")


def await_new_process(unit, old):
    wait_until(lambda: show(unit, "MainPID") not in ("0", old)
               and show(unit, "ActiveState") == "active", "a new process of " + unit)


def log_of(*units, since="-1h"):
    return must("journalctl", "--no-pager", "-o", "cat", "--since", since,
                *(a for u in units for a in ("-u", u)))


class Load:
    """Clients that call all the time, and count right answers and errors."""

    def __init__(self, clients=4):
        self.stop, self.right, self.errors = threading.Event(), [0] * clients, []
        self.threads = [threading.Thread(target=self.call, args=(i,)) for i in range(clients)]

    def call(self, i):
        with moed.Client(WORKERS[i % len(WORKERS)]) as client:
            while not self.stop.is_set():
                try:
                    if not right(client.forward(LAYER, X)):
                        raise ValueError("a wrong answer")
                    self.right[i] += 1
                except Exception as error:  # each is a failure of the test
                    self.errors.append(repr(error))

    def __enter__(self):
        for t in self.threads:
            t.start()
        self.await_more()
        return self

    def await_more(self, count=20):
        """Each client gets some more answers."""
        want = [n + count for n in self.right]
        wait_until(lambda: self.errors or all(n >= w for n, w in zip(self.right, want)),
                   "the clients get answers")

    def __exit__(self, *_):
        self.stop.set()
        for t in self.threads:
            t.join()


class FirstBoot(unittest.TestCase):
    def setUp(self):
        await_serving()

    def test_the_sandbox_lets_workers_share_memory(self):
        """Rows and tickets take shared memory, although the units hide most of /proc."""
        log = log_of("moe-worker@0", "moe-worker@1")
        self.assertIn("receives tickets through shared memory", log)
        self.assertNotIn("Operation not permitted", log)
        self.assertNotIn("Permission denied", log)

    def test_a_killed_worker_is_back(self):
        unit = "moe-worker@1"
        old = show(unit, "MainPID")
        with moed.Client(WORKERS[0]) as client:
            began = time.monotonic()
            os.kill(int(old), 9)
            self.assertTrue(right(client.forward(LAYER, X)))
            print("    SIGKILL of a worker -> right answer: %.0f ms" %
                  (1000 * (time.monotonic() - began)))
        await_new_process(unit, old)

    def test_a_killed_coordinator_is_back_and_no_call_is_lost(self):
        old = show("moe-coordinator", "MainPID")
        with Load() as load:
            os.kill(int(old), 9)
            await_new_process("moe-coordinator", old)
            wait_until(lambda: moectl("wait", "--for=serving", "--timeout", "1").returncode == 0,
                       "the coordinator knows its workers")
            load.await_more()
        self.assertEqual(load.errors, [])

    def test_a_stopped_worker_is_replaced_by_the_watchdog(self):
        unit = "moe-worker@1"
        old = show(unit, "MainPID")
        began = time.monotonic()
        os.kill(int(old), 19)
        await_new_process(unit, old)
        print("    SIGSTOP of a worker -> restarted by the watchdog: %.1f s" %
              (time.monotonic() - began))
        self.assertIn("Watchdog timeout", log_of(unit))

    def test_a_reload_loses_no_call(self):
        units = ("moe-coordinator", *("moe-worker@%d" % i for i in range(len(WORKERS))))
        before = [show(u, "MainPID") for u in units]
        with Load() as load:
            for _ in range(10):
                for unit in units:
                    must("systemctl", "reload", unit)
                load.await_more(3)
        self.assertEqual(load.errors, [])
        self.assertEqual([show(u, "MainPID") for u in units], before)
        print("    30 reloads under load: %d right answers, no error" % sum(load.right))

    def test_status_texts(self):
        self.assertRegex(show("moe-worker@0", "StatusText"), "^serving under epoch [0-9]+$")
        self.assertEqual(show("moe-coordinator", "StatusText"), "serving: 2 of 2 workers")
        self.assertIn("loaded ", log_of("moe-worker@0"))

    def test_operators_are_the_members_of_a_group(self):
        status = moectl("status", user="alice")
        self.assertEqual(status.returncode, 0, status.stdout)
        self.assertIn("SERVING", status.stdout)
        refused = moectl("status", user="bob")
        self.assertEqual(refused.returncode, 6, refused.stdout)
        self.assertIn("needs a role", refused.stdout)
        self.assertEqual(run("ls", "/run/moed", user="alice", group="alice",
                             extra_groups=[]).returncode, 2)

    def test_a_token_of_the_credential_store_counts(self):
        with open("/etc/credstore/moed.token-file") as file:
            token = file.read()
        with tempfile.NamedTemporaryFile("w") as copy:
            copy.write(token)
            copy.flush()
            shutil.chown(copy.name, "bob")
            status = moectl("status", user="bob", MOED_TOKEN_FILE=copy.name)
        self.assertEqual(status.returncode, 0, status.stdout)

    def test_a_worker_that_cannot_start_waits_longer_each_time(self):
        unit = "moe-worker@7"
        with open("/etc/moed/worker-7.env", "w") as file:
            file.write("MOED_WORKER_OPTIONS=--training=adamw --training-dir=/nowhere\n")
        run("systemctl", "start", unit)
        wait_until(lambda: "4 starts in a row" in log_of(unit), "it waits")
        starts = int(show(unit, "NRestarts"))
        must("systemctl", "stop", unit)
        print("    %d starts until then" % starts)
        os.unlink("/etc/moed/worker-7.env")

    def test_a_start_with_wrong_settings_is_not_repeated(self):
        unit = "moe-worker@8"
        with open("/etc/moed/worker-8.env", "w") as file:
            file.write("MOED_WORKER_OPTIONS=--nonsense\n")
        run("systemctl", "start", unit)
        wait_until(lambda: show(unit, "ActiveState") == "failed", "it has failed")
        time.sleep(1)  # ten times the pause before a restart
        self.assertEqual(show(unit, "NRestarts"), "0")
        self.assertEqual(log_of(unit).count("unknown option '--nonsense'"), 1)
        must("systemctl", "reset-failed", unit)
        os.unlink("/etc/moed/worker-8.env")

    def test_a_reload_changes_the_log_level(self):
        unit, path = "moe-worker@0", "/etc/moed/worker.conf"
        with open(path) as file:
            before = file.read()
        for level, count in (("error", 0), ("info", 1)):
            with open(path, "w") as file:
                file.write(before + "log-level = %s\n" % level)
            since = time.strftime("%F %T")
            must("systemctl", "reload", unit)
            wait_until(lambda: show(unit, "ActiveState") == "active", "the reload is over")
            wait_until(lambda: log_of(unit, since=since).count("SIGHUP: looked at") >= count,
                       "the log shows the reload")

    def test_stop_drains_and_start_serves_again(self):
        must("systemctl", "stop", "moed.target")
        for unit in ("moe-coordinator", "moe-worker@0", "moe-worker@1"):
            wait_until(lambda: show(unit, "ActiveState") == "inactive", unit + " stops")
            self.assertEqual(show(unit, "Result"), "success")
        must("systemctl", "start", "moed.target")
        await_serving()


class SecondBoot(unittest.TestCase):
    def test_the_group_serves_by_itself(self):
        await_serving()


class TwoCoordinators(unittest.TestCase):
    """Two coordinators keep their state in Debian's etcd; a copy of the unit stands for the one of
    another host."""

    UNITS = ("moe-coordinator", "moe-coordinator-b")

    @classmethod
    def setUpClass(cls):
        must("systemctl", "stop", "moed.target")
        units = ("moe-coordinator", "moe-worker@0", "moe-worker@1")
        wait_until(lambda: all(show(u, "ActiveState") == "inactive" for u in units), "all end")
        with open(show("moe-coordinator", "FragmentPath")) as file:
            unit = file.read()
        with open("/etc/systemd/system/moe-coordinator-b.service", "w") as file:
            file.write(unit.replace("/coordinator.conf", "/coordinator-b.conf")
                       .replace("moed/coordinator\n", "moed/coordinator-b\n"))
        for name, more in (("coordinator", ""), ("coordinator-b", "listen = 127.0.0.1:7710\n")):
            with open("/etc/moed/%s.conf" % name, "w") as file:
                file.write("workers = 2\nstore = etcd\netcd = 127.0.0.1:2379\n"
                           "etcd-prefix = /moed/boot\nleader-lease-s = 3\n" + more)
        must("sed", "-i", "s/^coordinator = .*/coordinator = 127.0.0.1:7700,127.0.0.1:7710/",
             "/etc/moed/worker.conf")
        must("systemctl", "daemon-reload")
        must("systemctl", "start", "etcd")
        must("systemctl", "start", "moed.target", "moe-coordinator-b", *units)

    def setUp(self):
        await_serving()
        wait_until(self.leader, "one of them leads")

    def leader(self):
        """The unit that leads, by its status; None if there is not exactly one."""
        texts = {unit: show(unit, "StatusText") for unit in self.UNITS}
        leads = [unit for unit, text in texts.items() if "of 2 workers" in text]
        return leads[0] if len(leads) == 1 and "does not lead" in texts.values() else None

    def test_a_stop_of_the_leader_loses_no_call(self):
        first = self.leader()
        other, = set(self.UNITS) - {first}
        with Load() as load:
            must("systemctl", "stop", first)
            wait_until(lambda: show(other, "StatusText") == "serving: 2 of 2 workers",
                       "the other one leads")
            load.await_more()
        self.assertEqual(load.errors, [])
        self.assertEqual(show(first, "Result"), "success")
        must("systemctl", "start", first)

    def test_a_killed_leader_costs_no_call(self):
        first = self.leader()
        old = show(first, "MainPID")
        with Load() as load:
            began = time.monotonic()
            os.kill(int(old), 9)
            await_new_process(first, old)
            wait_until(lambda: self.leader() is not None and
                       show(self.leader(), "StatusText") == "serving: 2 of 2 workers",
                       "one of them leads again")
            print("    SIGKILL of the leader -> one leads: %.1f s" % (time.monotonic() - began))
            load.await_more()
        self.assertEqual(load.errors, [])
        self.assertIn("store    etcd", moectl("status").stdout)


if __name__ == "__main__":
    second = os.path.exists(ROUND)
    suite = unittest.TestSuite(map(unittest.defaultTestLoader.loadTestsFromTestCase,
                                   (SecondBoot, TwoCoordinators) if second else (FirstBoot,)))
    passed = unittest.TextTestRunner(sys.stdout, verbosity=2).run(suite).wasSuccessful()
    open(ROUND, "w").close()
    if second and passed:
        open("/srv/passed", "w").close()
    must("systemctl", "--no-block", "reboot" if passed and not second else "poweroff")
