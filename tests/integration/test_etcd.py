# SPDX-License-Identifier: Apache-2.0
"""Settings of a coordinator with etcd, and what it finds there: each fault is one typed error, and
nothing changes. Links with TLS.

  test_etcd.py BUILD MODELS
"""

import json
import os
import signal
import subprocess
import tempfile
import time
import unittest
import urllib.error
import urllib.request
from unittest import mock

from group import MOECTL, main, wait_until
from test_access import COORDINATOR

from certificates import Certificates
from etcd import Etcd, require
from ports import free_ports

PREFIX = "/moed/one"
LEADS = "this coordinator leads the group"
LEASE_S = 60  # the longest. No leader loses it on a busy machine: scenes end it themselves
UNFIT_PAUSE_S = 5  # of a coordinator that cannot lead, until it tries again
CEILING_S = 120  # a wait that ends a test without an event


def probe(port, path):
    """(status, text)"""
    try:
        with urllib.request.urlopen("http://127.0.0.1:%d%s" % (port, path),
                                    timeout=CEILING_S) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


class Case(unittest.TestCase):
    def setUp(self):
        where = tempfile.TemporaryDirectory(prefix="moed-etcd-")
        self.addCleanup(where.cleanup)
        self.where = where.name
        self.started = 0
        self.processes = []  # of start()
        os.environ["MOED_RUNTIME_DIR"] = os.path.join(self.where, "run")
        os.mkdir(os.environ["MOED_RUNTIME_DIR"], 0o700)

    def etcd(self, **options):
        etcd = Etcd(self.where, **options).__enter__()
        self.addCleanup(etcd.__exit__)
        return etcd

    def arguments(self, endpoints, *extra, prefix=PREFIX):
        return [COORDINATOR, "--listen", "127.0.0.1:%d" % free_ports(1)[0], "--workers", "2",
                "--store", "etcd", "--etcd", endpoints, "--etcd-prefix", prefix,
                "--leader-lease-s", str(LEASE_S), *extra]

    def start(self, endpoints, *extra, **options):
        """(process, path of its log, its endpoint)"""
        self.started += 1
        log = os.path.join(self.where, "log-%d" % self.started)
        arguments = self.arguments(endpoints, "--log-file", log, *extra, **options)
        process = subprocess.Popen(arguments)
        self.addCleanup(self.end, process)
        self.processes.append(process)
        return process, log, arguments[2]

    def end(self, process):
        if process.poll() is None:
            process.kill()
        process.wait()

    def read(self, log):
        try:
            with open(log) as file:
                return file.read()
        except FileNotFoundError:
            return ""

    def await_log(self, log, text):
        wait_until(lambda: text in self.read(log), CEILING_S)

    def end_lease(self, etcd):
        """As if it were over: etcd removes the leader's key."""
        kv, = json.loads(etcd.ctl("get", PREFIX + "/leader", "-w", "json").stdout)["kvs"]
        etcd.ctl("lease", "revoke", "%x" % kv["lease"])

    def refused(self, arguments, text, code=1):
        done = subprocess.run(arguments, capture_output=True, text=True, timeout=CEILING_S)
        self.assertEqual(done.returncode, code, done.stderr)
        self.assertIn(text, done.stderr)
        print("  " + done.stderr.strip().splitlines()[-1])

    def lead(self, etcd, *extra, **options):
        """A coordinator leads and ends: the group exists."""
        process, log, endpoint = self.start(etcd.endpoints, *extra, **options)
        self.await_log(log, LEADS)
        done = subprocess.run([MOECTL, "cordon", "0", "--reason", "x", "--endpoint", endpoint],
                              capture_output=True, text=True)
        self.assertEqual(done.returncode, 0, done.stderr)  # the first write has the group's id
        process.terminate()
        self.assertEqual(process.wait(CEILING_S), 0)


class Settings(Case):
    def test_settings_are_checked_before_anything_starts(self):
        base = [COORDINATOR, "--listen", "127.0.0.1:0"]
        for extra, text in (
                (["--store", "disk"], "--store: file or etcd, not 'disk'"),
                (["--etcd", "127.0.0.1:1"], "need --store etcd"),
                (["--store", "etcd"], "needs --etcd and --etcd-prefix"),
                (["--store", "etcd", "--etcd", "a:1,a:1", "--etcd-prefix", "/x"], "named twice"),
                (["--store", "etcd", "--etcd", "127.0.0.1", "--etcd-prefix", "/x"],
                 "not HOST:PORT"),
                (["--store", "etcd", "--etcd", "10.0.0.1:2379", "--etcd-prefix", "/x"],
                 "not a loopback address"),
                (["--store", "etcd", "--etcd", "127.0.0.1:1", "--etcd-prefix", "x/"], "a path"),
                (["--store", "etcd", "--etcd", "127.0.0.1:1", "--etcd-prefix", "/x",
                  "--leader-lease-s", "1"], "leader-lease-s")):
            self.refused(base + extra, text, code=2)


class Away(Case):
    WAITS = "etcd does not answer: this coordinator waits for it"

    def test_a_start_without_etcd_waits_for_it(self):
        port, other, metrics = free_ports(3)
        at = "127.0.0.1:%d" % port
        process, log, endpoint = self.start("%s,127.0.0.1:%d" % (at, other), "--metrics-listen",
                                            "127.0.0.1:%d" % metrics)
        self.await_log(log, self.WAITS)
        self.await_log(log, "listening on port")
        done = subprocess.run([MOECTL, "status", "--endpoint", endpoint, "--timeout", "20"],
                              capture_output=True, text=True)
        self.assertEqual(done.returncode, 5, done.stderr)
        self.assertIn("no coordinator leads (etcd 127.0.0.1:", done.stderr)
        code, text = probe(metrics, "/readyz?verbose")
        self.assertEqual(code, 503)
        self.assertIn("STORE_AWAY", text)
        self.assertEqual(probe(metrics, "/livez")[0], 200)
        self.assertIsNone(process.poll())
        self.etcd(endpoint=at)
        self.await_log(log, LEADS)
        wait_until(lambda: probe(metrics, "/readyz")[0] == 200, CEILING_S)
        process.terminate()
        self.assertEqual(process.wait(CEILING_S), 0)

    def test_a_wrong_prefix_is_refused_as_soon_as_etcd_answers(self):
        etcd = self.etcd()
        state = os.path.join(self.where, "s1")
        self.lead(etcd, "--state-dir", state, prefix="/moed/one")
        self.lead(etcd, prefix="/moed/two")
        before = etcd.get("/moed")
        etcd.kill(0)
        process, log, _ = self.start(etcd.endpoints, "--state-dir", state, prefix="/moed/two")
        self.await_log(log, self.WAITS)
        etcd.start(0)
        self.assertEqual(process.wait(CEILING_S), 1)
        self.assertIn("the keys are of another group", self.read(log))
        self.assertEqual(etcd.get("/moed"), before)


class Keys(Case):
    def test_garbage_in_keys_is_refused_and_stays(self):
        etcd = self.etcd()
        for value, text in (("garbage that is long enough", "damaged: not a group log"),
                            ("", "damaged"), ("moedlog\n", "damaged")):
            etcd.put(PREFIX + "/state", value)
            self.refused(self.arguments(etcd.endpoints), PREFIX + "/state: " + text)
            self.assertEqual(etcd.get(PREFIX), {PREFIX + "/state": value.encode()})

    def test_garbage_that_comes_later_keeps_a_coordinator_from_leading(self):
        etcd = self.etcd()
        process, log, endpoint = self.start(etcd.endpoints)
        self.await_log(log, LEADS)
        _, standby, other = self.start(etcd.endpoints)
        self.await_log(standby, "listening on port")
        etcd.put(PREFIX + "/state", "garbage")
        self.end(process)
        self.end_lease(etcd)
        self.await_log(standby, "this coordinator cannot lead: etcd /moed/one/state: damaged")
        self.assertEqual(etcd.get(PREFIX + "/state")[PREFIX + "/state"], b"garbage")
        done = subprocess.run([MOECTL, "status", "--endpoint", other, "--timeout", "10"],
                              capture_output=True, text=True)
        self.assertIn("the state in etcd cannot be used", done.stderr)

    def test_a_leaders_key_that_no_coordinator_has_made_is_named(self):
        etcd = self.etcd()
        etcd.put(PREFIX + "/leader", "someone")
        _, log, endpoint = self.start(etcd.endpoints)
        self.await_log(log, "no coordinator has made /moed/one/leader: remove it")
        self.assertNotIn(LEADS, self.read(log))
        etcd.ctl("del", PREFIX + "/leader")
        self.await_log(log, LEADS)

    def test_the_prefix_of_another_group_is_refused(self):
        etcd = self.etcd()
        first, second = (os.path.join(self.where, name) for name in ("s1", "s2"))
        self.lead(etcd, "--state-dir", first, prefix="/moed/one")
        self.lead(etcd, "--state-dir", second, prefix="/moed/two")
        before = etcd.get("/moed")
        self.refused(self.arguments(etcd.endpoints, "--state-dir", first, prefix="/moed/two"),
                     "the keys are of another group")
        self.assertEqual(etcd.get("/moed"), before)
        self.lead(etcd, "--state-dir", first, prefix="/moed/one")

    def test_an_empty_prefix_is_refused_by_a_coordinator_that_has_a_group(self):
        etcd = self.etcd()
        state = os.path.join(self.where, "s1")
        self.lead(etcd, "--state-dir", state, prefix="/moed/one")
        before = etcd.get("/moed")
        self.refused(self.arguments(etcd.endpoints, "--state-dir", state, prefix="/moed/wrong"),
                     "/moed/wrong/state: there is no group; this coordinator belongs to")
        self.assertEqual(etcd.get("/moed"), before)
        os.remove(os.path.join(state, "group.id"))
        self.lead(etcd, "--state-dir", state, prefix="/moed/wrong")

    def test_the_directory_of_a_group_in_etcd_is_no_directory_of_a_store(self):
        etcd = self.etcd()
        state = os.path.join(self.where, "s1")
        self.lead(etcd, "--state-dir", state)
        before = sorted(os.listdir(state))
        self.refused([COORDINATOR, "--listen", "127.0.0.1:0", "--state-dir", state],
                     "the state of this group is in etcd: start with --store etcd")
        self.assertEqual(sorted(set(os.listdir(state)) - {"lock"}), before)
        self.lead(etcd, "--state-dir", state)

    def test_a_full_etcd_is_named(self):
        with mock.patch.dict(os.environ, ETCD_QUOTA_BACKEND_BYTES="4000000"):
            etcd = self.etcd()
        first, log, endpoint = self.start(etcd.endpoints)
        self.await_log(log, LEADS)
        wait_until(lambda: etcd.ctl("put", "/junk", "x" * 100000, check=False).returncode != 0,
                   CEILING_S)

        def moectl(*arguments, at):
            return subprocess.run([MOECTL, *arguments, "--endpoint", at], capture_output=True,
                                  text=True, timeout=CEILING_S)
        done = moectl("cordon", "0", "--reason", "x", at=endpoint)
        self.assertEqual(done.returncode, 5)
        self.assertIn("the state of the group cannot be written", done.stderr)
        self.end(first)
        self.end_lease(etcd)
        begun = time.monotonic()
        _, log, endpoint = self.start(etcd.endpoints)
        self.await_log(log, "database space exceeded")
        time.sleep(3)  # for attempts that come too early
        attempts = self.read(log).count("database space exceeded")
        self.assertLessEqual(attempts, 1 + (time.monotonic() - begun) / UNFIT_PAUSE_S)
        self.assertNotIn(LEADS, self.read(log))
        done = moectl("status", at=endpoint)
        self.assertEqual(done.returncode, 5)
        self.assertRegex(done.stderr, "no coordinator leads .etcd .*database space exceeded")

    def test_a_lost_lease_ends_the_term_and_changes_nothing(self):
        etcd = self.etcd()
        _, log, endpoint = self.start(etcd.endpoints)
        self.await_log(log, LEADS)
        state = etcd.get(PREFIX + "/state")
        self.end_lease(etcd)
        self.await_log(log, "this coordinator does not lead any more")
        wait_until(lambda: self.read(log).count(LEADS) == 2, CEILING_S)
        self.assertEqual(etcd.get(PREFIX + "/state"), state)


class Two(Case):
    """Coordinators without workers; the first one leads."""

    def two(self, *extra):
        self.cluster = self.etcd()
        first, log, a = self.start(self.cluster.endpoints, *extra)
        self.await_log(log, LEADS)
        _, standby, b = self.start(self.cluster.endpoints, *extra)
        self.await_log(standby, "listening on port")
        return first, (a, log), (b, standby)

    def moectl(self, *arguments, at, timeout=str(CEILING_S)):
        return subprocess.run([MOECTL, *arguments, "--endpoint", at, "--timeout", timeout],
                              capture_output=True, text=True)

    def expect_the_next_one(self, leader_first):
        first, (a, _), (b, _) = self.two()
        first.send_signal(signal.SIGSTOP)
        self.end_lease(self.cluster)
        begun = time.monotonic()
        done = self.moectl("status", at="%s,%s" % ((a, b) if leader_first else (b, a)))
        self.assertEqual(done.returncode, 3, done.stderr)  # an answer: the group has no worker
        self.assertIn("state    WAITING", done.stdout)
        print("  answered after %.1f s" % (time.monotonic() - begun))

    def test_status_asks_the_next_leader_if_the_first_one_is_stopped(self):
        self.expect_the_next_one(True)

    def test_status_does_so_too_if_the_standby_is_named_first(self):
        self.expect_the_next_one(False)

    def test_status_while_a_stopped_leader_holds_its_lease_names_it(self):
        first, (a, _), (b, _) = self.two()
        first.send_signal(signal.SIGSTOP)
        waits = "%s: this coordinator does not lead; the leader is %s" % (b, a)
        for at, why in (("%s,%s" % (a, b), waits + ": %s: " % a),
                        (b, "--endpoint does not name the leader: " + waits)):
            done = self.moectl("status", at=at, timeout="10")  # it asks until then
            self.assertEqual(done.returncode, 5, done.stderr)
            self.assertIn(why, done.stderr)
            print("  " + done.stderr.strip().splitlines()[-1])

    def test_a_leader_of_before_is_not_called_one(self):
        """The standby names the last leader, which says that none leads."""
        _, (a, log), (b, standby) = self.two("--leader-lease-s", "10")
        self.cluster.kill(0)
        self.await_log(log, "this coordinator does not lead any more")
        done = self.moectl("status", at="%s,%s" % (b, a), timeout="10")
        self.assertEqual(done.returncode, 5, done.stderr)
        self.assertIn("no coordinator leads (etcd ", done.stderr)
        self.assertNotIn("leader is %s" % a, done.stderr)
        print("  " + done.stderr.strip().splitlines()[-1])

    def standby_check(self, *at):
        """(subject, result, text) of the check of the coordinator that waits; None without one"""
        done = self.moectl("health", "-o", "json", at=",".join(at))
        self.assertEqual(done.returncode, 3, done.stderr)  # the group has no worker
        checks = {c["code"]: c for c in json.loads(done.stdout)["checks"]}
        self.assertEqual(checks["COORDINATOR_ANSWERS"]["result"], "OK")
        check = checks.get("STANDBY_ANSWERS")
        print("  %s" % check)
        return check and (check["subject"], check["result"], check["text"])

    def await_standby(self, result, text, *at):
        """A coordinator on a busy machine may answer too late for one check."""
        wait_until(lambda: self.standby_check(*at) == ("coordinator", result, text), CEILING_S)

    def test_health_names_a_standby_that_does_not_answer(self):
        _, (a, _), (b, log) = self.two()
        waits = "at %s: it waits, and the leader is %s" % (b, a)
        for at in ((a, b), (b, a)):
            self.await_standby("OK", waits, *at)
        self.assertIsNone(self.standby_check(a))  # the others are not named
        standby = self.processes[1]
        standby.send_signal(signal.SIGSTOP)
        for at in ((a, b), (b, a)):
            self.await_standby("WARNING", "at %s: no answer" % b, *at)
        standby.send_signal(signal.SIGCONT)
        self.await_standby("OK", waits, a, b)
        self.end(standby)
        subject, result, text = self.standby_check(a, b)
        self.assertEqual((subject, result), ("coordinator", "WARNING"))
        self.assertIn("at %s: cannot connect: " % b, text)

    def test_the_log_level_of_all_coordinators_is_set(self):
        _, (a, log), (b, standby) = self.two()
        done = self.moectl("log-level", "debug", "--all", at="%s,%s" % (b, a))
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertEqual(done.stdout, "".join("%s: debug (before: info)\n" % at for at in (b, a)))
        for each in (log, standby):
            self.await_log(each, "the log level is debug now")
        done = self.moectl("log-level", "info", "--all", at=a)
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertEqual(done.stdout, "%s: info (before: debug)\n" % a)
        self.assertIn("none was asked: --endpoint does not name them", done.stderr)
        done = self.moectl("log-level", "info", "--all", at=b)
        self.assertEqual(done.returncode, 5, done.stderr)
        self.assertEqual(done.stdout, "%s: info (before: debug)\n" % b)
        self.assertIn("the leader is %s" % a, done.stderr)


class Tls(Case):
    def test_etcd_that_wants_certificates(self):
        c = Certificates()
        self.addCleanup(c.__exit__)
        c.ca("ca")
        c.ca("other")
        c.pair("etcd", "ca", "DNS:localhost,IP:127.0.0.1")
        c.pair("coordinator", "ca", "DNS:localhost,IP:127.0.0.1")
        files = {name: (c.pem(name), c.key(name)) for name in ("etcd", "coordinator")}
        certificate, key = files["etcd"]
        etcd = self.etcd(tls={"ca": c.pem("ca"), "certificate": certificate, "key": key})
        certificate, key = files["coordinator"]
        own = ["--tls-certificate", certificate, "--tls-key", key]
        process, log, _ = self.start(etcd.endpoints, "--tls-ca", c.pem("ca"), *own)
        self.await_log(log, LEADS)
        for wrong in (["--tls-ca", c.pem("other"), *own], []):
            _, log, _ = self.start(etcd.endpoints, *wrong)
            self.await_log(log, Away.WAITS)
            self.assertIn("etcd 127.0.0.1:", self.read(log))
            self.assertNotIn(LEADS, self.read(log))


if __name__ == "__main__":
    require()
    main()
