# SPDX-License-Identifier: Apache-2.0
"""A group with TLS on all links, as README.md sets it up: certificates say who may do what.

Every process has a separate directory, so that none finds the Unix socket of another."""

import json
import os
import re
import subprocess
import sys
import tempfile
import unittest
from unittest import mock

import numpy as np

from group import (BACKEND, MOECTL, golden_cases, main, model_directory, moed, relative_error,
                   wait_until)
from test_access import COORDINATOR, FAMILY, WORKER, daemons, read, write

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "support"))
import netns  # noqa: E402
from certificates import Certificates  # noqa: E402

README = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..", "README.md")
HERE = "DNS:localhost,IP:127.0.0.1"
RULES = json.dumps({"identities": {
    "spiffe://moed/worker/*": {"roles": ["worker"]},
    "spiffe://moed/ops": {"roles": ["admin"]},
    "spiffe://moed/app": {"roles": ["client", "trainer"]}}})


def readme_commands():
    """The commands of README.md that make certificates."""
    with open(README, encoding="utf8") as file:
        section = file.read().split("## TLS between hosts")[1]
    block = re.search(r"\n\n((?:    .*\n|\n)*?    pair ops .*\n)", section)[1]
    return "".join(line[4:] + "\n" for line in block.splitlines())


class Case(unittest.TestCase):
    def setUp(self):
        self.c = Certificates()
        self.addCleanup(self.c.__exit__)
        self.c.ca("ca")
        for name in ("w0", "w1"):
            self.c.pair(name, "ca", f"URI:spiffe://moed/worker/{name},{HERE}")
        self.c.pair("coordinator", "ca", HERE)
        self.c.pair("ops", "ca", "URI:spiffe://moed/ops")
        self.c.pair("app", "ca", "URI:spiffe://moed/app")
        self.ca = self.c.pem("ca")
        self.context = daemons()
        self.d = self.context.__enter__()
        self.addCleanup(self.context.__exit__, None, None, None)
        self.rules = os.path.join(self.d.where, "access.json")
        write(self.rules, RULES)
        patch = mock.patch.dict(os.environ, self.alone("client"))
        patch.start()
        self.addCleanup(patch.stop)

    def alone(self, name):
        return dict(os.environ, MOED_RUNTIME_DIR=os.path.join(self.d.where, "run-" + name))

    def served(self, pair):
        """Options of a server."""
        return ("--tls-certificate", self.c.pem(pair), "--tls-key", self.c.key(pair),
                "--tls-client-ca", self.ca, "--access-file", self.rules)

    def moectl(self, who, *arguments):
        trust = [] if who is None else ["--tls-ca", self.ca, "--tls-certificate", self.c.pem(who),
                                        "--tls-key", self.c.key(who)]
        return subprocess.run([MOECTL, *arguments, *trust], capture_output=True, text=True,
                              timeout=60, check=False)

    def client(self, endpoint, who="app", **more):
        return moed.Client(endpoint, tls_ca=self.ca, tls_certificate=self.c.pem(who),
                           tls_key=self.c.key(who), timeout=20, **more)

    def check_answers(self, client):
        for layer, _, x, want in golden_cases(FAMILY):
            self.assertLessEqual(relative_error(client.forward(layer, x), want), 1e-5)

    def check_logs(self):
        """Neither logs nor messages have a key, or a line of one."""
        text = self.d.text()
        self.assertNotIn("PRIVATE KEY", text)
        for name in os.listdir(self.c.directory):
            if name.endswith(".key"):
                for line in read(os.path.join(self.c.directory, name)).splitlines()[1:-1]:
                    self.assertNotIn(line, text)


class Group(Case):
    """On one host."""

    def start_coordinator(self, workers):
        return self.d.start(
            "coordinator", COORDINATOR, "--listen", "127.0.0.1:0", "--workers", str(workers),
            *self.served("coordinator"), environment=self.alone("coordinator"))

    def start_worker(self, name, pair, ca=None, *more):
        return self.d.worker(self.coordinator.endpoint, name, *self.served(pair), "--tls-ca",
                             ca or self.ca, *more, environment=self.alone(name + pair))

    def test_health_warns_of_changed_files_that_are_not_valid(self):
        """What was read before is in use, so all calls go on, until a file is valid again."""
        self.coordinator = c = self.start_coordinator(1)
        worker = self.start_worker("w0", "w0")

        def trust_files():
            done = self.moectl("ops", "health", "--detail", "-o", "json", "--endpoint", c.endpoint)
            checks = json.loads(done.stdout)["checks"]
            found = {each["subject"]: (each["result"], re.findall(r"--([\w-]+)", each["text"]))
                     for each in checks if each["code"] == "TRUST_FILES"}
            if any(result == "WARNING" for result, _ in found.values()):
                self.assertIn(done.returncode, (3, 8))
            return found

        fine, pem = ("OK", []), self.c.read(self.c.pem("coordinator"))
        wait_until(lambda: "serving under epoch" in read(worker.log))
        self.assertEqual(trust_files(), {"coordinator": fine, "slot 0": fine})
        self.c.replace(self.c.pem("coordinator"), b"rubbish", 0o644)
        wait_until(lambda: trust_files() == {
            "coordinator": ("WARNING", ["tls-certificate"]), "slot 0": fine})
        write(self.rules, "rubbish")
        wait_until(lambda: trust_files() == {
            "coordinator": ("WARNING", ["tls-certificate", "access-file"]),
            "slot 0": ("WARNING", ["access-file"])})
        self.c.replace(self.c.pem("coordinator"), pem, 0o644)
        write(self.rules, RULES)
        wait_until(lambda: trust_files() == {"coordinator": fine, "slot 0": fine})

    def test_all_links_use_tls(self):
        training = os.path.join(self.d.where, "training")
        os.mkdir(training)
        self.coordinator = c = self.start_coordinator(2)
        workers = [self.start_worker(name, name, None, "--training", "adamw", "--training-dir",
                                     training) for name in ("w0", "w1")]
        at = ("--endpoint", c.endpoint)
        waited = self.moectl("ops", "wait", *at, "--timeout", "40")
        self.assertEqual(waited.returncode, 0, waited.stderr + self.d.text())
        self.assertEqual(self.moectl("ops", "status", *at).returncode, 0)
        # The app may use and train the group, and not end it. A stranger's call does not begin.
        for who, code, why in (("app", 6, "needs a role"), (None, 5, "may expect TLS")):
            done = self.moectl(who, "down", *at)
            self.assertEqual(done.returncode, code, done.stderr)
            self.assertIn(why, done.stderr)
        with self.client(workers[0].endpoint, spread=True) as client:
            self.check_answers(client)
            layer = client.layers[0]
            x = np.ones((3, layer.hidden), np.float32)
            seen = client.forward(layer, x, return_routing=True)
            client.backward(layer, x, x=x, topk_ids=seen.topk_ids,
                            topk_weights=seen.topk_weights, session="tls", micro_batch_id=1,
                            weights_version=seen.weights_version)
            client.optimizer_step(1e-3, step_id=1, session="tls", expected_backwards=1)
        done = self.moectl("app", "bench", "--endpoint", workers[1].endpoint, "--layer",
                           str(layer.layer), "--tokens", "4", "--duration", "1", "--spread")
        self.assertEqual(done.returncode, 0, done.stderr)
        done = self.moectl("ops", "training", "save", "first", *at)
        self.assertEqual(done.returncode, 0, done.stderr)
        with self.assertRaisesRegex(moed.MoeError, "may expect TLS"):
            moed.Client(workers[0].endpoint, timeout=5)
        done = self.moectl("ops", "down", *at)
        self.assertEqual(done.returncode, 0, done.stderr)
        self.check_logs()

    def test_a_worker_speaks_for_the_name_in_its_certificate(self):
        self.coordinator = self.start_coordinator(1)
        thief = self.start_worker("w9", "w1")
        self.assertEqual(thief.wait(timeout=30), 1)
        self.assertIn("may not register as worker_id w9", read(thief.log))
        right = self.start_worker("w1", "w1")
        wait_until(lambda: "serving under epoch" in read(right.log))

    def test_a_worker_finds_its_way_when_files_become_right(self):
        self.c.ca("other")
        own_ca = self.c.pem("mine")
        write(own_ca, read(self.c.pem("other")))
        self.coordinator = self.start_coordinator(1)
        worker = self.start_worker("w0", "w0", own_ca)
        wait_until(lambda: "does not lead to the CA" in read(worker.log))
        self.assertIsNone(worker.poll())
        write(own_ca, read(self.ca))
        wait_until(lambda: "serving under epoch" in read(worker.log))
        # Rubbish changes nothing, not even for a new connection to a new coordinator.
        endpoint = self.coordinator.endpoint
        write(own_ca, "rubbish")
        self.coordinator.kill()
        self.coordinator.wait()
        again = self.d.start(
            "coordinator-2", self.coordinator.args[0], "--listen", endpoint, "--workers", "1",
            *self.served("coordinator"), environment=self.alone("coordinator"))
        wait_until(lambda: "registered" in read(again.log) or "serving" in read(again.log))
        self.assertIn("go on with", read(worker.log))
        self.check_logs()

    def test_a_plain_address_for_the_network_is_logged_at_the_start(self):
        plain = self.d.coordinator("--insecure")
        self.assertNotIn("has no TLS", read(plain.log))  # 127.0.0.1
        os.rename(plain.log, plain.log + ".first")
        everywhere = self.d.start("everywhere", plain.args[0], "--listen", "0.0.0.0:0",
                                  "--insecure", "--workers", "1")
        lines = [line for line in read(everywhere.log).splitlines() if "has no TLS" in line]
        self.assertEqual(len(lines), 1, lines)

    def test_a_missing_file_ends_the_start_with_one_line(self):
        self.coordinator = self.start_coordinator(1)
        worker = self.start_worker("w0", "w0", "/nowhere/ca.pem")
        self.assertEqual(worker.wait(timeout=20), 1)
        errors = [line for line in read(worker.log).splitlines() if "ERROR" in line]
        self.assertEqual(len(errors), 1, errors)
        self.assertIn("/nowhere/ca.pem: No such file", errors[0])

@unittest.skipIf(os.environ.get("MOE_TEST_UCX") != "1", "this build has no UCX")
@unittest.skipIf(netns.missing() is not None, netns.missing())
class TwoHosts(Case):
    """Workers in two network namespaces, at addresses that are not loopback, without --insecure."""

    def test_a_group_over_two_hosts_serves(self):
        home = open("/proc/self/ns/net")
        self.addCleanup(home.close)
        with netns.Network(2) as net:
            self.addCleanup(netns.leave, home)
            net.enter(0)
            for name, host in (("coordinator", 0), ("w0", 0), ("w1", 1)):
                self.c.pair(name, "ca", f"URI:spiffe://moed/worker/{name},IP:{net.address(host)}")
            at = net.address(0) + ":7700"
            processes = [net.popen(0, [
                COORDINATOR, "--listen", at, "--workers", "2",
                "--log-file", self.log("coordinator"),
                *self.served("coordinator")], env=self.alone("coordinator"))]
            for host in (0, 1):
                processes.append(net.popen(host, [
                    WORKER, "--listen", f"{net.address(host)}:7600", "--coordinator", at, "--model",
                    model_directory(FAMILY), "--backend", BACKEND, "--threads", "1",
                    "--worker-id", f"w{host}", "--log-file", self.log(f"w{host}"),
                    "--tls-ca", self.ca, *self.served(f"w{host}")], env=self.alone(f"w{host}")))
            waited = self.moectl("ops", "wait", "--endpoint", at, "--timeout", "60")
            self.assertEqual(waited.returncode, 0, waited.stderr + self.d.text())
            with self.client(f"{net.address(0)}:7600", spread=True) as client:
                self.check_answers(client)
            refused = self.moectl(None, "status", "--endpoint", at)
            self.assertIn("may expect TLS", refused.stderr)
            done = self.moectl("ops", "down", "--endpoint", at)
            self.assertEqual(done.returncode, 0, done.stderr)
            self.assertEqual([p.wait(timeout=30) for p in processes], [0, 0, 0])
            self.check_logs()
            self.assertNotIn("has no TLS", self.d.text())

    def log(self, name):
        self.d.logs.append(os.path.join(self.d.where, name + ".log"))
        return self.d.logs[-1]


class Readme(unittest.TestCase):
    def test_the_commands_make_certificates_that_work(self):
        with tempfile.TemporaryDirectory() as where:
            subprocess.run(["sh", "-euc", readme_commands()], cwd=where, check=True,
                           capture_output=True, timeout=60)
            for name in ("coordinator", "w0", "w1", "ops"):
                subprocess.run(["openssl", "verify", "-CAfile", "ca.pem", name + ".pem"],
                               cwd=where, check=True, capture_output=True, timeout=60)
                self.assertEqual(os.stat(os.path.join(where, name + ".key")).st_mode & 0o077, 0)
            text = subprocess.run(["openssl", "x509", "-in", "w0.pem", "-noout", "-ext",
                                   "subjectAltName"], cwd=where, check=True, capture_output=True,
                                  text=True, timeout=60).stdout
            self.assertIn("URI:spiffe://moed/worker/w0", text)
            self.assertIn("DNS:", text)


if __name__ == "__main__":
    main()
