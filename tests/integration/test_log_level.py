# SPDX-License-Identifier: Apache-2.0
"""Log lines as JSON, and their level at run time: `moectl log-level`, SIGHUP."""

import json
import os
import signal
import unittest
from unittest import mock

from group import golden_cases, main, moectl, moed, wait_until
from test_access import FAMILY, daemons, read, write


def lines(daemon):
    """The whole lines of a daemon's log; each is one JSON object."""
    return [json.loads(line) for line in read(daemon.log).split("\n")[:-1]]


class Levels(unittest.TestCase):
    def setUp(self):
        context = daemons()
        self.d = context.__enter__()
        self.addCleanup(context.__exit__, None, None, None)
        self.conf = os.path.join(self.d.where, "worker.conf")
        write(self.conf, "log-level = warn\n")
        self.coordinator = self.d.coordinator("--log-format", "json")
        self.worker = self.d.worker(self.coordinator.endpoint, "w1", "--config", self.conf,
                                    "--log-format", "json")
        environment = mock.patch.dict(os.environ, self.d.environment)
        environment.start()
        self.addCleanup(environment.stop)
        moectl("wait", "--endpoint", self.coordinator.endpoint, "--timeout", "60")

    def requests(self):
        return [line for line in lines(self.worker) if line["message"].startswith("Forward")]

    def ask(self):
        layer, _, x, _ = next(iter(golden_cases(FAMILY)))
        with moed.Client(self.worker.endpoint) as client:
            client.forward(layer, x)
        return layer, len(x)

    def test_the_level_changes_while_the_daemons_run(self):
        self.ask()
        self.assertEqual(self.requests(), [])
        said = moectl("log-level", "debug", "--endpoint", self.worker.endpoint).stdout
        self.assertEqual(said, self.worker.endpoint + ": debug (before: warn)\n")
        layer, tokens = self.ask()
        wait_until(lambda: len(self.requests()) == 1)
        line = self.requests()[0]
        print(line)
        self.assertEqual((line["level"], line["slot"], line["layer"]), ("debug", 0, layer))
        self.assertRegex(line["message"], "^Forward: %d tokens, OK after [0-9]+ us$" % tokens)
        self.assertGreater(line["epoch"], 0)
        self.assertRegex(line["time"], r"^20\d\d-\d\d-\d\dT\d\d:\d\d:\d\d\.\d\d\dZ$")

        done = json.loads(moectl("log-level", "info", "--all", "-o", "json", "--endpoint",
                                 self.coordinator.endpoint).stdout)
        self.assertEqual([(d["daemon"], d["previous"], d["level"]) for d in done["daemons"]],
                         [(self.coordinator.endpoint, "info", "info"),
                          (self.worker.endpoint, "debug", "info")])
        self.ask()
        self.assertEqual(len(self.requests()), 1)

        write(self.conf, "log-level = debug\n")
        self.worker.send_signal(signal.SIGHUP)
        wait_until(lambda: self.ask() and len(self.requests()) >= 2)
        self.assertTrue(all({"time", "level", "component", "message"} <= set(line)
                            for d in (self.worker, self.coordinator) for line in lines(d)))

    def test_each_daemon_of_a_list_is_asked(self):
        both = [self.coordinator.endpoint, self.worker.endpoint]
        said = moectl("log-level", "debug", "--endpoint", ",".join(both)).stdout
        self.assertEqual(said, "%s: debug (before: info)\n%s: debug (before: warn)\n"
                         % tuple(both))
        done = moectl("log-level", "info", "--endpoint", "127.0.0.1:1," + both[1], check=False)
        self.assertEqual((done.returncode, done.stdout),
                         (5, "%s: info (before: debug)\n" % both[1]))
        self.assertIn("127.0.0.1:1: cannot connect", done.stderr)

    def test_a_wrong_level_changes_nothing(self):
        done = moectl("log-level", "loud", "--endpoint", self.worker.endpoint, check=False)
        self.assertEqual(done.returncode, 2)
        self.assertIn("error, warn, info or debug", done.stderr)
        self.assertEqual(moectl("log-level", "--endpoint", self.worker.endpoint,
                                check=False).returncode, 2)


if __name__ == "__main__":
    main()
