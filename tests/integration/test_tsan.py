# SPDX-License-Identifier: Apache-2.0
"""A group under ThreadSanitizer serves, learns, saves, loses a worker and goes on. No daemon
reports a race or an inconsistent lock order. Only in builds of the preset tsan.

Every thread of a worker has a name: in daemon/CONCURRENCY.md, or that of a library."""

import glob
import os
import re
import shutil
import tempfile
import unittest

from group import main, wait_until
from test_checkpoints import Client
from training import training_group

FAMILY = "deepseek_v3"
ROOT = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..")
LIBRARIES = re.compile(r"grpc|event_engine|default-execut|resolver-execut|timer_manager|MHD|iou-")


def names_of_page():
    with open(os.path.join(ROOT, "daemon", "CONCURRENCY.md"), encoding="utf-8") as page:
        table = page.read().split("\n## Threads of ours\n", 1)[1].split("\n## ", 1)[0]
    return set(re.findall(r"^\| `([^`]+)` \|", table, re.M))


def threads_of(process):
    names = []
    for path in glob.glob("/proc/%d/task/*/comm" % process.pid):
        with open(path, encoding="utf-8") as comm:
            names.append(comm.read().strip())
    return sorted(names)


class UnderThreadSanitizer(unittest.TestCase):
    def setUp(self):
        self.root = tempfile.mkdtemp(prefix="moed-tsan-")
        self.addCleanup(shutil.rmtree, self.root, ignore_errors=True)
        before = os.environ.get("TSAN_OPTIONS", "")
        os.environ["TSAN_OPTIONS"] = "%s:log_path=%s/report" % (before, self.root)
        self.addCleanup(os.environ.__setitem__, "TSAN_OPTIONS", before)

    def check_reports(self):
        reports = glob.glob(os.path.join(self.root, "report.*"))
        for name in reports:
            with open(name, encoding="utf-8", errors="replace") as report:
                print(report.read()[:20000])
        self.assertEqual(reports, [])

    def test_a_group_serves_learns_saves_and_loses_a_worker(self):
        training = os.path.join(self.root, "training")
        os.mkdir(training)
        with training_group(FAMILY, 2, "--training-dir", training, "--metrics-listen",
                            "127.0.0.1:0", lease_ms=5000) as g:
            client = Client(g)
            client.train(1)
            client.save("k1", 15)
            ours = names_of_page()

            def strange():
                return [n for n in threads_of(g.workers[0])
                        if n not in ours and not LIBRARIES.search(n)]

            # main, and the thread of the sanitizer; a new thread is named so until it sets its name
            wait_until(lambda: strange() in (["moe-worker"], 2 * ["moe-worker"]))
            self.assertIn("moe-engine", threads_of(g.workers[0]))
            epoch = g.info().epoch
            g.kill_worker(1)
            g.start_worker(1)
            g.wait_serving(above=epoch)
            wait_until(lambda: client.state().checkpoint == "k1")
            client.train(2)
            client.close()
        self.check_reports()


if __name__ == "__main__":
    main()
