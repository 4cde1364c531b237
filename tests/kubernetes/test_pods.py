# SPDX-License-Identifier: Apache-2.0
"""The layouts of deploy/kubernetes run here as rendered: command lines, settings, volumes, user,
limits and probes. Network namespaces stand for pods. Needs root and kubectl; skipped without.

  test_pods.py BUILD MODELS [unittest arguments]"""

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import unittest

HERE = os.path.dirname(os.path.abspath(__file__))
for folder in ("integration", "support"):
    sys.path.insert(0, os.path.join(HERE, "..", folder))

from group import (BUILD, MOECTL, golden_cases, main, model_directory, moed,  # noqa: E402
                   relative_error, wait_until)
import netns  # noqa: E402
import rendered  # noqa: E402
import running  # noqa: E402
from certificates import Certificates  # noqa: E402
from etcd import Etcd, missing as etcd_missing  # noqa: E402

FAMILY = "qwen3_moe"
LAYER, _, X, Y = next(each for each in golden_cases(FAMILY) if each[1] == 37)
PROGRAMS = [os.path.join(BUILD, "daemon", role, "moe-" + role)
            for role in ("coordinator", "worker")]
SECONDS = 60


class Pods(unittest.TestCase):
    def setUp(self):
        self.models = tempfile.mkdtemp(prefix="moed-models-")
        self.addCleanup(shutil.rmtree, self.models)
        os.chmod(self.models, 0o755)
        shutil.copytree(model_directory(FAMILY), os.path.join(self.models, "model"))
        home = open("/proc/self/ns/net")
        self.addCleanup(home.close)
        self.addCleanup(netns.leave, home)

    def run_layout(self, layout, etcd=None, **secrets):
        """etcd: HOST:PORT at which the layout expects one."""
        objects = rendered.render(layout)
        secrets["moed-token"] = rendered.token(objects)["stringData"]
        net = netns.Network(len(rendered.pods(objects)) + 1)
        net.__enter__()
        self.addCleanup(net.__exit__)
        net.enter(net.hosts - 1)
        outside = ()
        if etcd is not None:
            name, _, port = etcd.partition(":")
            outside = (name,)
            folder = tempfile.mkdtemp(prefix="moed-etcd-")
            self.addCleanup(shutil.rmtree, folder, True)
            service = Etcd(folder, endpoint="%s:%s" % (net.address(net.hosts - 1), port))
            service.__enter__()
            self.addCleanup(service.__exit__)
        node = running.Node(net, objects, PROGRAMS, secrets, {"moed-models": self.models}, outside)
        node.__enter__()
        self.addCleanup(node.__exit__)
        return node

    def wait_ready(self, node):
        try:
            wait_until(lambda: all(each.probe("readinessProbe") for each in node.containers),
                       SECONDS)
        except AssertionError:
            for each in node.containers:
                print(each.name, each.process.poll(), each.text())
            raise
        for each in node.containers:
            self.assertTrue(each.probe("startupProbe"), each.name)
            self.assertTrue(each.probe("livenessProbe"), each.name)

    def check_answers(self, node, **trust):
        for each in node.containers:
            if each.spec["command"] == ["moe-worker"]:
                listen = next(word for word in each.spec["args"] if word.startswith("--listen="))
                port = listen.rpartition(":")[2]
                with moed.Client("%s:%s" % (each.address, port), **trust) as client:
                    self.assertLess(relative_error(client.forward(LAYER, X), Y), 1e-5)

    def check_restart(self, node):
        """A worker is killed: the others are not ready and live on; its container starts again. The
        coordinator is ready all the time: a worker needs it to come back."""
        victim = node.containers[-1]
        others = [each for each in node.containers
                  if each is not victim and each.spec["name"] != "coordinator"]
        victim.signal(signal.SIGKILL)
        victim.wait(SECONDS)
        wait_until(lambda: not any(each.probe("readinessProbe") for each in others), SECONDS)
        for each in others:
            self.assertTrue(each.probe("livenessProbe"), each.name)
        victim.start()
        self.wait_ready(node)

    def check_drain(self, node):
        """SIGTERM ends a worker with 0 within the grace period."""
        victim = node.containers[-1]
        victim.signal(signal.SIGTERM)
        self.assertEqual(victim.wait(victim.pod.spec["terminationGracePeriodSeconds"]), 0)

    def run_through(self, node, **trust):
        self.wait_ready(node)
        self.check_answers(node, **trust)
        self.check_restart(node)
        self.check_answers(node, **trust)
        self.check_drain(node)

    def test_single_pod(self):
        self.run_through(self.run_layout("single-pod"))

    def test_statefulset(self):
        self.run_through(self.run_layout("statefulset"))

    def move_coordinator(self, node, address):
        """Returns the seconds until the group is ready again."""
        coordinator = node.containers[0]
        coordinator.signal(signal.SIGKILL)
        coordinator.wait(SECONDS)
        node.move(coordinator.pod, address)
        coordinator.start()
        begin = time.monotonic()
        self.wait_ready(node)
        return round(time.monotonic() - begin, 1)

    def test_workers_find_a_coordinator_that_moved(self):
        """Its name has another address then. Without a new look at the name, this takes 30 s."""
        node = self.run_layout("statefulset")
        self.wait_ready(node)
        seconds = []
        for host in range(99, 102):  # a busy machine may be late once or twice
            seconds.append(self.move_coordinator(node, "10.77.0.%d" % host))
            if seconds[-1] < 20:
                break
        print("%s s until the coordinator has its group" % seconds)
        self.assertLess(seconds[-1], 20)
        self.check_answers(node)

    def leader_of(self, node):
        """The coordinator that leads by its metrics; None if not exactly one does."""
        leads = [each for each in node.containers if each.spec["name"] == "coordinator"
                 and each.process.poll() is None
                 and "\nmoe_coordinator_leads 1\n" in each.metrics(9700)]
        return leads[0] if len(leads) == 1 else None

    def test_two_coordinators(self):
        """One of them leads. The other one takes over when it is killed, and when it ends; the
        workers serve all the time."""
        if etcd_missing() is not None:
            self.skipTest(etcd_missing())
        node = self.run_layout("two-coordinators", etcd="moed-etcd:2379")
        self.wait_ready(node)
        workers = [each for each in node.containers if each.spec["name"] == "worker"]
        addresses = [each.address + ":7700" for each in node.containers if each not in workers]
        token = os.path.join(self.models, "token")
        with open(os.open(token, os.O_CREAT | os.O_WRONLY, 0o600), "w") as file:
            file.write(node.secrets["moed-token"]["token"])
        said = subprocess.run([MOECTL, "status", "--insecure", "--token-file", token, "--endpoint",
                               ",".join(addresses)], check=True, stdout=subprocess.PIPE,
                              text=True).stdout
        self.assertRegex(said, "state +SERVING(?s:.*)store +etcd")
        for number, status in ((signal.SIGKILL, None), (signal.SIGTERM, 0)):
            wait_until(lambda: self.leader_of(node), SECONDS)
            leader = self.leader_of(node)
            leader.signal(number)
            code = leader.wait(SECONDS)
            begin = time.monotonic()
            self.assertIn(status, (None, code))
            wait_until(lambda: self.leader_of(node), SECONDS)
            print("%s after %.1f s of signal %d" % (self.leader_of(node).name,
                                                    time.monotonic() - begin, number))
            self.assertIsNot(self.leader_of(node), leader)
            self.check_answers(node)
            self.assertTrue(all(each.probe("readinessProbe") for each in workers))
            leader.start()
            self.wait_ready(node)
        self.run_through(node)

    def test_leaderworkerset(self):
        self.run_through(self.run_layout("leaderworkerset"))

    def test_tls(self):
        with Certificates() as made:
            made.ca("ca")
            space = rendered.NAMESPACE
            made.pair("coordinator", "ca", "DNS:moed-coordinator")
            made.pair("worker", "ca", "URI:spiffe://moed/workers,DNS:*.moed-worker.%s.svc" % space)
            made.pair("web", "ca", "URI:spiffe://moed/web")
            secrets = {}
            for name in ("coordinator", "worker"):
                secrets["moed-%s-tls" % name] = {
                    "tls.crt": made.read(made.pem(name)).decode(),
                    "tls.key": made.read(made.key(name)).decode(),
                    "ca.crt": made.read(made.pem("ca")).decode()}
            node = self.run_layout("tls", **secrets)
            self.run_through(node, tls_ca=made.pem("ca"), tls_certificate=made.pem("web"),
                             tls_key=made.key("web"),
                             tls_server_name="moed-worker-0.moed-worker.%s.svc" % space)


if __name__ == "__main__":
    netns.require()
    rendered.require()
    main()
