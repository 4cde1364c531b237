# SPDX-License-Identifier: Apache-2.0
"""The series of /metrics: those that the READMEs name, all of them and no others, with their
labels; and what they say after some calls. The group trains, traces and uses TLS, so it has all."""

import os
import re
import shutil
import subprocess
import urllib.request

import numpy as np

from group import golden_cases, main, moed, wait_until
from test_access import COORDINATOR, FAMILY
from test_tls_group import Case

DAEMON = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..", "daemon")
SERIES = re.compile(r"^([a-z_:]+)(?:\{(.*)\})? (\S+)$")
SHARED = ("base", "rpc", "listener")  # rooms with series for several daemons


def documented(room):
    """{name: set of labels} of the series in the tables of a room's README."""
    found = {}
    with open(os.path.join(DAEMON, room, "README.md"), encoding="utf8") as file:
        for line in file:
            cell = line.split("|")[1] if line.startswith("| `") else ""
            for name, labels in re.findall(r"`((?:moe|process)_[a-z_]+)(?:\{([a-z_,]+)\})?`", cell):
                found.setdefault(name, set()).update(filter(None, labels.split(",")))
    return found


def page_of(port):
    return urllib.request.urlopen("http://127.0.0.1:%d/metrics" % port, timeout=20).read().decode()


def scrape(port):
    """{(name, sorted labels as text): value} of a daemon."""
    found = {}
    for line in page_of(port).splitlines():
        if not line.startswith("#"):
            name, labels, value = SERIES.match(line).groups()
            found[name, labels or ""] = float(value)
    return found


def offered(series):
    """{name: set of labels}; a histogram counts once, without le."""
    found = {}
    histograms = {name[:-len("_bucket")] for name, _ in series if name.endswith("_bucket")}
    for name, labels in series:
        whole = re.sub("_(bucket|sum|count)$", "", name)
        names = set(re.findall(r'(\w+)="', labels)) - {"le"}
        found.setdefault(whole if whole in histograms else name, set()).update(names)
    return found


class Metrics(Case):
    def port(self, daemon):
        with open(daemon.log, encoding="utf8") as file:
            return int(re.search(r"metrics on port (\d+)", file.read())[1])

    def start(self, slots):
        training = os.path.join(self.d.where, "training")
        os.mkdir(training)
        metrics = ("--metrics-listen", "127.0.0.1:0")
        self.coordinator = self.d.start(
            "coordinator", COORDINATOR, "--listen", "127.0.0.1:0", "--workers", str(slots),
            *metrics,
            *self.served("coordinator"), environment=self.alone("coordinator"))
        self.workers = [
            self.d.worker(self.coordinator.endpoint, name, *self.served(name), "--tls-ca", self.ca,
                          "--slot", str(slot), "--training", "adamw", "--training-dir", training,
                          "--otlp", "127.0.0.1:1", "--allow-client-memory", "64M",
                          *metrics, environment=self.alone(name))
            for slot, name in enumerate(("w0", "w1")[:slots])]
        waited = self.moectl("ops", "wait", "--endpoint", self.coordinator.endpoint, "--timeout",
                             "60")
        self.assertEqual(waited.returncode, 0, waited.stderr + self.d.text())

    def lint(self, port):
        """Prometheus' own program finds nothing to say about the page."""
        if shutil.which("promtool") is None:
            print("promtool is missing (package prometheus)")
            return
        done = subprocess.run(["promtool", "check", "metrics"], input=page_of(port), text=True,
                              stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        self.assertEqual((done.returncode, done.stdout), (0, ""))

    def compare(self, series, *rooms):
        said = {}
        for room in rooms:
            said.update(documented(room))
        real = offered(series)
        print("%s: %d families, %d lines" % (rooms[0], len(real), len(series)))
        self.assertEqual(set(real) - set(said), set(), "series that no README names")
        self.assertEqual(set(said) - set(real), set(), "series that only a README names")
        wrong = {name: (labels, said[name]) for name, labels in real.items()
                 if labels != said[name]}
        self.assertEqual(wrong, {}, "labels that differ: real, documented")

    def test_readmes_name_the_series_and_the_series_say_what_happened(self):
        self.start(2)
        ports = [self.port(w) for w in self.workers]
        tokens = 0
        with self.client(self.workers[0].endpoint) as client:
            for layer, _, x, _ in golden_cases(FAMILY):
                client.forward(layer, x)
                tokens += len(x)
            with self.assertRaises(moed.MoeError):
                client.forward(layer, x * np.float32(np.nan))
        with self.client(self.workers[0].endpoint, who="w1") as stranger:  # lacks the role
            with self.assertRaises(moed.MoeError):
                stranger.forward(layer, x)
        wait_until(lambda: scrape(ports[0])["moe_heartbeat_age_seconds", ""] > 0)
        w0, w1 = (scrape(port) for port in ports)
        self.compare(w0, "worker", *SHARED)
        self.compare(scrape(self.port(self.coordinator)), "coordinator", *SHARED)
        for port in (ports[0], self.port(self.coordinator)):
            self.lint(port)

        self.assertEqual(w0["moe_tokens_total", ""], tokens)
        self.assertEqual(w0["moe_refused_total", 'reason="NONFINITE_LOGITS"'], 1)
        self.assertEqual(w0["moe_rpc_calls_refused_total",
                            'server="data",reason="permission_denied"'], 1)
        self.assertEqual(w0["moe_transport_info", 'transport="shared memory"'], 1)
        for w in (w0, w1):
            self.assertGreater(w["moe_load_bytes", 'kind="total"'], 0)
            self.assertEqual(w["moe_load_bytes", 'kind="loaded"'],
                             w["moe_load_bytes", 'kind="total"'])
            self.assertGreater(w["moe_load_seconds", ""], 0)
            self.assertGreater(w["moe_lease_remaining_seconds", ""], 0)
            total, used = (w["moe_device_memory_bytes", 'kind="%s"' % k] for k in ("total", "used"))
            self.assertTrue(0 < used < total, (used, total))
            self.assertTrue(0 < w["moe_host_memory_bytes", 'kind="available"'] <=
                            w["moe_host_memory_bytes", 'kind="total"'])
        # Both slots together computed every (token, expert) pair, and only slot 0 had tokens.
        for name, labels in [key for key in w0 if key[0] == "moe_expert_rows_total"]:
            pairs = w0[name, labels] + w1[name, labels]
            top = max(w["moe_expert_top_rows", labels + ',rank="1"'] for w in (w0, w1))
            mean = sum(w["moe_expert_mean_rows", labels] for w in (w0, w1)) / 2
            print(labels, "rows", pairs, "mean", mean, "maximum", top)
            self.assertGreater(pairs, 0)
            self.assertTrue(mean <= top <= pairs)
            for w in (w0, w1):
                self.assertTrue(0 < w["moe_expert_balancedness", labels] <= 1)
        self.assertTrue(0 < w0["moe_peer_rows_total", 'peer="1"'] <= tokens)
        self.assertEqual(w1["moe_peer_rows_total", 'peer="0"'], 0)
        self.assertGreater(w0["moe_peer_bytes_total", 'peer="1"'],
                           w0["moe_peer_rows_total", 'peer="1"'])


if __name__ == "__main__":
    main()
