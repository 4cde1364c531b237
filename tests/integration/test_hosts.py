# SPDX-License-Identifier: Apache-2.0
"""Groups over several hosts: network namespaces that a bridge joins (tests/support/netns.py).

Needs root; skipped without. Workers on one host share memory, those of different hosts use the
network, in the same step. Right answers or typed errors, never a hang: when a worker is killed, a
link is cut, or packets are late and lost.
"""

import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
import unittest

from group import (BACKEND, BUILD, FAMILIES, MOECTL, golden_cases, main, model_directory,
                   open_files, relative_error, wait_until)
import moed

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "support"))
import netns  # noqa: E402

WORKER = os.path.join(BUILD, "daemon", "worker", "moe-worker")
COORDINATOR = os.path.join(BUILD, "daemon", "coordinator", "moe-coordinator")
PORT = 7600
TOLERANCE = 1e-5
CEILING_S = 120  # a wait or a call that ends a test without an event
# The lease, and the budget of a wait for a peer. No busy machine makes a worker as late as the long
# one; a fault that only they notice fails a call. A cut link needs short ones, and the group may
# then lose its view for a moment at any time.
PATIENT_MS, SHORT_MS = 150000, 3000
FAMILY = "mixtral" if "mixtral" in FAMILIES else FAMILIES[0]


class Hosts:
    """A coordinator on host 0 and `per_host` workers on each host. The test's thread moves onto
    host 0."""

    def __init__(self, net, family, per_host=1, extra=(), limit_ms=PATIENT_MS):
        self.net, self.family, self.started = net, family, 0
        self.extra = ["--wait-budget-ms", str(limit_ms), *extra]
        self.state = tempfile.mkdtemp(prefix="moed-hosts-")
        net.enter(0)
        workers = net.hosts * per_host
        self.coordinator = self.start(
            0, COORDINATOR, "--listen", "%s:%d" % (net.address(0), PORT), "--insecure",
            "--workers", str(workers), "--state-dir", os.path.join(self.state, "coordinator"),
            "--lease-ms", str(limit_ms))
        self.workers = [self.start_worker(slot, slot // per_host) for slot in range(workers)]

    def start(self, host, program, *arguments):
        self.started += 1
        name = "%s-%d.log" % (os.path.basename(program), self.started)
        return self.net.popen(
            host, [program, "--log-file", os.path.join(self.state, name), *arguments])

    def start_worker(self, slot, host):
        return self.start(
            host, WORKER, "--listen", "%s:%d" % (self.net.address(host), PORT + 1 + slot),
            "--insecure", "--coordinator", "%s:%d" % (self.net.address(0), PORT),
            "--model", model_directory(self.family), "--backend", BACKEND, "--threads", "1",
            "--worker-id", "w%d" % slot, "--slot", str(slot), *self.extra)

    def moectl(self, *arguments):
        return self.net.run(0, [MOECTL, *arguments, "--endpoint",
                                "%s:%d" % (self.net.address(0), PORT)],
                            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                            timeout=2 * CEILING_S)

    def wait(self):
        done = self.moectl("wait", "--for=serving", "--timeout", str(CEILING_S))
        if done.returncode != 0:
            raise RuntimeError("the group does not serve: %s%s" % (done.stdout, self.logs()))

    def logs(self):
        text = ""
        for name in sorted(os.listdir(self.state)):
            if name.endswith(".log"):
                with open(os.path.join(self.state, name)) as file:
                    text += "".join("\n%s %s" % (name, line.rstrip())
                                    for line in file.readlines()[-12:])
        return text

    def client(self, slot=0):
        host = slot * self.net.hosts // len(self.workers)
        return moed.Client("%s:%d" % (self.net.address(host), PORT + 1 + slot), timeout=CEILING_S)

    def stop(self):
        for process in self.workers + [self.coordinator]:
            if process.poll() is None:
                process.terminate()
        for process in self.workers + [self.coordinator]:
            try:
                process.wait(timeout=30)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        shutil.rmtree(self.state, ignore_errors=True)


@contextlib.contextmanager
def hosts(count, family, per_host=1, switch=False, **settings):
    with netns.Network(count, switch=switch) as net:
        group = Hosts(net, family, per_host, **settings)
        try:
            yield group
        finally:
            group.stop()


class Case(unittest.TestCase):
    def setUp(self):
        self.home = open("/proc/self/ns/net")

    def tearDown(self):
        netns.leave(self.home)
        self.home.close()

    def check_golden(self, client, family):
        for layer, tokens, x, want in golden_cases(family):
            error = relative_error(client.forward(layer, x), want)
            self.assertLessEqual(error, TOLERANCE, (family, layer, tokens))

    def call(self, client, case):
        """True if the answer is right; False after a typed error of the group. Anything else fails,
        also a call that the client has to give up."""
        layer, _, x, want = case
        began = time.monotonic()
        try:
            self.assertLessEqual(relative_error(client.forward(layer, x), want), TOLERANCE)
            right = True
        except moed.MoeError as error:
            print("  %.1f s: %s" % (time.monotonic() - began, str(error)[:100]))
            self.assertNotEqual(error.code.name, "DEADLINE_EXCEEDED", error)
            right = False
        return right

    def recovers(self, group, client, case):
        end = time.monotonic() + CEILING_S
        while not self.call(client, case):
            self.assertLess(time.monotonic(), end, group.logs())
            time.sleep(0.2)


class Golden(Case):
    def check(self, family, count, per_host):
        with hosts(count, family, per_host) as group:
            group.wait()
            self.check_golden(group.client(), family)
            self.check_golden(group.client(count * per_host - 1), family)


def add(family, count, per_host):
    def test(self):
        self.check(family, count, per_host)

    test.__doc__ = "%s, %d workers on each of %d hosts" % (family, per_host, count)
    setattr(Golden, "test_%s_%dx%d" % (family, count, per_host), test)


for each in FAMILIES:
    add(each, 2, 1)
add(FAMILY, 2, 2)
add(FAMILY, 4, 1)


class Programs(unittest.TestCase):
    """Programs of the conformance suite, with their processes on several hosts."""

    def run_on(self, hosts, program, *arguments):
        with netns.Network(hosts) as net:
            where = ",".join("%s=%s" % (net.namespace(h), net.address(h)) for h in range(hosts))
            return self.run_here(program, arguments, {"MOE_TEST_HOSTS": where})

    def run_here(self, program, arguments, environment):
        done = subprocess.run(
            [os.path.join(BUILD, "tests", "conformance", program), "--backend", "cpu", *arguments],
            env={**os.environ, **environment}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            text=True, timeout=300)
        self.assertEqual(done.returncode, 0, done.stdout[-3000:])
        return done.stdout

    def test_conformance(self):
        """Hosts of one slot each give the bits of one host. Hosts of several slots add their sums
        in another order: always the same one."""
        arguments = ["--slots", "4", "--cases", "60", "--seed", "4"]

        def bits(output):
            return sorted(line.split("bits of y ")[1] for line in output.splitlines()
                          if "bits of y" in line)

        apart = self.run_on(4, "conformance", *arguments)
        self.assertIn("over network", apart)
        self.assertEqual(bits(apart), bits(self.run_here("conformance", arguments, {})))
        pairs = [self.run_on(2, "conformance", *arguments) for _ in range(2)]
        self.assertIn("shared memory and network", pairs[0])
        self.assertEqual(bits(pairs[0]), bits(pairs[1]))
        self.assertEqual(len(bits(pairs[0])), 4)

    def test_training(self):
        for hosts in (2, 4):
            self.run_on(hosts, "conformance", "--slots", "4", "--cases", "20", "--seed", "4",
                        "--training")
            self.run_on(hosts, "golden_training", "--slots", "4", "--models",
                        os.path.dirname(model_directory(FAMILY)))

    def test_faults(self):
        for hosts in (2, 4):
            self.run_on(hosts, "faults", "--slots", "4")


class Faults(Case):
    def test_status_shows_nodes_and_the_log_names_the_network(self):
        with hosts(2, FAMILY, 2) as group:
            group.wait()
            rows = group.moectl("status").stdout.splitlines()
            nodes = [row.split()[2] for row in rows if row.lstrip()[:1].isdigit()]
            self.assertEqual([node.split(":")[0] for node in nodes], ["0", "0", "1", "1"], rows)
            line = "rows travel over shared memory and network, here at %s" % group.net.address(0)
            wait_until(lambda: line in group.logs(), CEILING_S)
            wait_until(lambda: "rows travel over the network without encryption" in group.logs(),
                       CEILING_S)

    def listening(self, process):
        """Addresses where a worker listens."""
        inodes = set()
        for target in open_files(process.pid).values():
            inodes.add(target[len("socket:["):-1] if target.startswith("socket:[") else None)
        found = set()
        for table in ("tcp", "tcp6"):
            with open("/proc/%d/net/%s" % (process.pid, table)) as file:
                rows = [line.split() for line in file.readlines()[1:]]
            for row in rows:
                if row[3] == "0A" and row[9] in inodes:
                    address = bytes.fromhex(row[1].split(":")[0])
                    found.add(".".join(str(b) for b in address[::-1]) if len(address) == 4
                              else row[1])
        return found

    def test_rows_come_in_on_the_interface_of_the_address_alone(self):
        case = next(golden_cases(FAMILY))
        with netns.Network(2) as net:
            for host in range(2):  # another network of the host, which the group does not use
                for words in (["link", "add", "other0", "type", "veth", "peer", "name", "other1"],
                              ["link", "set", "other1", "up"],
                              ["address", "add", "10.88.0.%d/24" % (host + 1), "dev", "other0"],
                              ["link", "set", "other0", "up"]):
                    net.run(host, ["ip", *words], check=True)
            group = Hosts(net, FAMILY)
            try:
                group.wait()
                self.assertTrue(self.call(group.client(), case))
                for host, worker in enumerate(group.workers):
                    self.assertEqual(self.listening(worker), {net.address(host)})
                self.assertNotIn("may come in on every interface", group.logs())
            finally:
                group.stop()

    def test_a_wildcard_says_that_rows_come_in_everywhere(self):
        with netns.Network(1) as net:
            process = net.popen(0, [WORKER, "--model", model_directory(FAMILY), "--coordinator",
                                    "127.0.0.1:1", "--listen", "0.0.0.0:0", "--advertise",
                                    "10.99.0.1:7600", "--insecure"],
                                stderr=subprocess.PIPE, text=True)
            line = process.stderr.readline()
            process.kill()
            process.communicate()
            self.assertIn("rows from other hosts may come in on every interface: this host has no "
                          "address of 10.99.0.1:7600; --net-interface chooses one", line)

    def test_killed_worker(self):
        case = next(golden_cases(FAMILY))
        with hosts(2, FAMILY) as group:
            group.wait()
            client = group.client()
            self.assertTrue(self.call(client, case))
            group.workers[1].kill()
            group.workers[1].wait()
            for _ in range(3):
                self.assertFalse(self.call(client, case))
            group.workers[1] = group.start_worker(1, 1)
            self.recovers(group, client, case)

    def test_cut_link(self):
        case = next(golden_cases(FAMILY))
        with hosts(2, FAMILY, limit_ms=SHORT_MS) as group:
            group.wait()
            client = group.client()
            self.recovers(group, client, case)
            group.net.cut(1)
            for _ in range(3):
                self.assertFalse(self.call(client, case))
            group.net.mend(1)
            self.recovers(group, client, case)

    def test_late_and_lost_packets(self):
        cases = list(golden_cases(FAMILY))
        with hosts(2, FAMILY, switch=True, limit_ms=SHORT_MS) as group:
            group.wait()
            client = group.client()
            self.recovers(group, client, cases[0])
            for host in range(2):
                group.net.impair(host, delay_ms=50, loss=0.01)
            right = sum(self.call(client, case) for case in 5 * cases)
            print("  50 ms, 1 %% loss: %d of %d right" % (right, 5 * len(cases)))
            for host in range(2):
                group.net.mend(host)
            self.recovers(group, client, cases[0])

    def test_an_address_of_one_host_is_refused_once(self):
        with hosts(2, FAMILY, extra=["--net-interface", "lo"]) as group:
            wait_until(lambda: "FAILED" in group.moectl("status").stdout, CEILING_S)
            status = group.moectl("status").stdout
            self.assertIn("slots 0 and 1 are in different network namespaces of one host and "
                          "slot 0 offers a loopback address", status)
            wait_until(lambda: "giving up after 1 attempt:" in group.logs(), CEILING_S)

    def test_an_interface_that_is_not_there(self):
        with netns.Network(1) as net:
            done = net.run(0, [WORKER, "--model", model_directory(FAMILY), "--coordinator",
                               "127.0.0.1:1", "--net-interface", "eth7"],
                           stderr=subprocess.PIPE, text=True, timeout=CEILING_S)
            self.assertNotEqual(done.returncode, 0)
            self.assertIn("--net-interface: this host has no interface or address 'eth7'",
                          done.stderr)


if __name__ == "__main__":
    netns.require()
    main()
