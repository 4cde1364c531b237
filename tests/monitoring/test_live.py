# SPDX-License-Identifier: Apache-2.0
"""A real Prometheus with the files of deploy/monitoring and a real group that trains: each
expression of the dashboard has a result, a healthy group has no alert, and the alerts of a lost
worker fire after SIGKILL and clear once the group serves again.

    test_live.py BUILD MODELS     77: Prometheus is missing"""

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import unittest
import urllib.parse
import urllib.request

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path[:0] = [HERE, os.path.join(HERE, "..", "integration")]
if shutil.which("prometheus") is None:
    print("prometheus is missing")
    sys.exit(77)

import check  # noqa: E402
import training  # noqa: E402
from group import main, wait_until  # noqa: E402
from ports import free_ports  # noqa: E402
from test_checkpoints import Client  # noqa: E402

FAMILY = "deepseek_v3"
LIMIT_S = 120  # of each wait; far more than it takes
# Nothing is refused here, and there is no TLS.
EMPTY = {"Refusals, by reason", "Certificate expires in"}


class Group(training.TrainingGroup):
    """Two workers that train; all daemons have /metrics at known ports."""

    def __init__(self, root):
        self.metrics = free_ports(3)
        self.family, self.environment = FAMILY, None
        self.extra = ("--training", "adamw", "--training-dir", root)
        self.state = tempfile.mkdtemp(prefix="moed-train-")
        self.workers, self.endpoints = [None] * 2, [""] * 2
        self.coordinator, self.address = training.start(
            training.COORDINATOR, "--listen", "127.0.0.1:0", "--workers", "2", "--state-dir",
            self.state, "--lease-ms", "3000", "--metrics-listen", self.at(0))
        try:
            for slot in range(2):
                self.start_worker(slot)
            self.wait_serving()
        except BaseException:
            self.stop()
            raise

    def at(self, number):
        return "127.0.0.1:%d" % self.metrics[number]

    def start_worker(self, slot, *extra):
        super().start_worker(slot, "--metrics-listen", self.at(1 + slot), *extra)


class Prometheus:
    def __init__(self, root, group):
        self.url = "http://127.0.0.1:%d" % free_ports(1)[0]
        text = check.read(check.FILES, "prometheus.yml")
        for number, example in enumerate(("9700", "9701", "9702")):
            assert text.count("127.0.0.1:" + example) == 1
            text = text.replace("127.0.0.1:" + example, group.at(number))
        with open(os.path.join(root, "prometheus.yml"), "w", encoding="utf8") as file:
            file.write(text)
        shutil.copy(os.path.join(check.FILES, "moed.rules.yml"), root)
        self.log = open(os.path.join(root, "prometheus.log"), "w", encoding="utf8")
        self.process = subprocess.Popen(
            ["prometheus", "--config.file", os.path.join(root, "prometheus.yml"),
             "--storage.tsdb.path", os.path.join(root, "data"), "--web.listen-address",
             self.url[len("http://"):]], stdout=self.log, stderr=subprocess.STDOUT)

    def stop(self):
        self.process.terminate()
        self.process.wait(timeout=60)
        self.log.close()

    def get(self, path, **fields):
        url = self.url + path + "?" + urllib.parse.urlencode(fields)
        return json.load(urllib.request.urlopen(url, timeout=30))["data"]

    def is_ready(self):
        try:
            urllib.request.urlopen(self.url + "/-/ready", timeout=5).close()
            return True
        except OSError:
            return False

    def query(self, text):
        return self.get("/api/v1/query", query=text)["result"]

    def alerts(self):
        """{name: instances} of those that fire."""
        found = {}
        for alert in self.get("/api/v1/alerts")["alerts"]:
            if alert["state"] == "firing":
                found.setdefault(alert["labels"]["alertname"], set()).add(
                    alert["labels"].get("instance", ""))
        return found


class Live(unittest.TestCase):
    def setUp(self):
        self.root = tempfile.mkdtemp(prefix="moed-test-")
        self.addCleanup(shutil.rmtree, self.root, ignore_errors=True)
        training_root = os.path.join(self.root, "training")
        os.mkdir(training_root)
        self.group = Group(training_root)
        self.addCleanup(self.group.stop)
        self.prometheus = Prometheus(self.root, self.group)
        self.addCleanup(self.prometheus.stop)
        wait_until(self.prometheus.is_ready, LIMIT_S)
        wait_until(lambda: len(self.prometheus.query("up == 1")) == 3, LIMIT_S)

    def results(self):
        """{title and expression: number of results} of the dashboard."""
        found = {}
        dashboard = json.loads(check.read(check.FILES, "dashboard.json"))
        for title, text in check.expressions(dashboard):
            real = text.replace("$group", ".*").replace("$__rate_interval", "30s")
            self.assertNotIn("$", re.sub(r'"[^"]*"', "", real))
            found[title, text] = len(self.prometheus.query(real))
        return found

    def test_the_dashboard_and_the_alerts_work(self):
        client = Client(self.group)
        for step in range(3):
            client.train(step + 1)
        client.save("k1", 15)
        layer, x = client.layer, client.x
        client.forward(layer, x)
        # Rates need two scrapes with a difference.
        wait_until(lambda: client.forward(layer, x) and self.missing() == set(), LIMIT_S)
        client.close()
        print("%d expressions have results" % len(self.results()))
        self.assertEqual(self.prometheus.alerts(), {})

        epoch = self.group.info().epoch
        begin = time.monotonic()
        self.group.kill_worker(1)
        wanted = {"MoedWorkerDown", "MoedGroupDegraded"}
        seen = {}

        def fires():
            for name in self.prometheus.alerts():
                seen.setdefault(name, round(time.monotonic() - begin, 1))
            return wanted <= set(seen)

        wait_until(fires, LIMIT_S)
        print("after SIGKILL, seconds until they fire: %s" % seen)
        self.assertEqual(self.prometheus.alerts()["MoedWorkerDown"], {self.group.at(2)})
        self.group.start_worker(1)
        self.group.wait_serving(epoch)
        begin = time.monotonic()
        wait_until(lambda: not wanted & set(self.prometheus.alerts()), LIMIT_S)
        print("clear %.1f s after the group serves" % (time.monotonic() - begin))
        recovered = self.prometheus.query("moe_group_recovery_seconds_sum")[0]["value"][1]
        print("recovery took %s s" % recovered)

    def missing(self):
        return {title for (title, _), n in self.results().items() if n == 0} - EMPTY


if __name__ == "__main__":
    main()
