# SPDX-License-Identifier: Apache-2.0
"""What operators look at and decide: moectl get, describe, and their formats."""

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import unittest

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "support"))
from certificates import Certificates  # noqa: E402
from group import MOECTL, group, main, model_directory, wait_until

OK, FAILED, USAGE, UNHEALTHY, NOT_FOUND, UNREACHABLE, PERMISSION, CONFLICT, WARNING = range(9)
NOWHERE = tempfile.TemporaryDirectory(prefix="moed-test-")


def run(*arguments, **more):
    """Runs moectl, which finds no group of the user."""
    environment = {key: value for key, value in os.environ.items() if key != "MOED_ENDPOINT"}
    environment.update({"XDG_CONFIG_HOME": NOWHERE.name, **more})
    return subprocess.run([MOECTL, *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                          text=True, timeout=120, env=environment)


def from_yaml(text):
    """The subset of YAML that moectl writes: blocks, JSON scalars, plain words."""
    lines = [(len(line) - len(line.lstrip()), line.lstrip()) for line in text.splitlines()]

    def scalar(word):
        try:
            return json.loads(word)
        except ValueError:
            return word

    def block(at, depth):
        listed = lines[at][1].startswith("-")
        out = [] if listed else {}
        while at < len(lines) and lines[at][0] == depth and lines[at][1].startswith("-") == listed:
            if listed:
                rest = lines[at][1][2:]
                if ":" in rest and rest.split(":")[0].isalnum() and not rest.startswith('"'):
                    lines[at] = (depth + 2, rest)
                    item, at = block(at, depth + 2)
                else:
                    item, at = scalar(rest), at + 1
                out.append(item)
                continue
            key, _, rest = lines[at][1].partition(":")
            if rest:
                out[key], at = scalar(rest.strip()), at + 1
            else:
                out[key], at = block(at + 1, lines[at + 1][0])
        return out, at

    return block(0, 0)[0]


class Reading(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.stack = group("qwen3_moe", 2)
        cls.group = cls.stack.__enter__()
        cls.at = ("--endpoint", cls.group.endpoint)

    @classmethod
    def tearDownClass(cls):
        cls.stack.__exit__(None, None, None)

    def expect(self, *arguments):
        done = run(*arguments, *self.at)
        self.assertEqual(done.returncode, OK, done.stderr)
        return done.stdout

    def rows(self, *arguments):
        return [line.split() for line in self.expect(*arguments).splitlines()]

    def document(self, *arguments):
        said = json.loads(self.expect(*arguments, "-o", "json"))
        self.assertEqual(said["apiVersion"], "moed/v1")
        return said

    def test_workers(self):
        head, first, second = self.rows("get", "workers")
        self.assertEqual(head, ["SLOT", "ENDPOINT", "NODE", "STATE", "WEIGHTS", "WORKER", "ERROR"])
        self.assertEqual((first[0], first[3], second[0]), ("0", "SERVING", "1"))
        wide = self.rows("get", "workers", "-o", "wide")[0]
        self.assertEqual([column for column in wide if column not in head],
                         ["TOKENS", "STEPS", "LEASE"])
        said = self.document("get", "workers")
        self.assertEqual(said["kind"], "Workers")
        self.assertEqual([w["state"] for w in said["workers"]], ["SERVING"] * 2)

    def test_models(self):
        model = self.document("get", "models")["models"][0]
        self.assertEqual((model["name"], model["state"]), ("qwen3_moe", "SERVING"))
        self.assertEqual(len(model["digest"]), 64)
        self.assertIn(model["digest"], self.expect("get", "models", "-o", "wide"))
        self.assertNotIn(model["digest"], self.expect("get", "models"))

    def test_experts(self):
        layers = self.document("get", "models")["models"][0]["layers"]
        experts = self.document("get", "experts")["experts"]
        self.assertEqual(len(experts), sum(layer["experts"] for layer in layers))
        self.assertEqual({tuple(e["slots"]) for e in experts}, {(0,), (1,)})
        layer = layers[1]["layer"]
        rows = self.rows("get", "experts", "--layer", str(layer))[1:]
        self.assertEqual([row[1] for row in rows],
                         [str(e) for e in range(layers[1]["experts"])])
        self.assertEqual({row[0] for row in rows}, {str(layer)})
        done = run("get", "experts", "--layer", "77", *self.at)
        self.assertEqual(done.returncode, NOT_FOUND)

    def test_events(self):
        events = self.document("get", "events")["events"]
        self.assertEqual(sorted(e["slot"] for e in events if e["kind"] == "WORKER_JOINED"), [0, 1])
        self.assertEqual(events[-1]["kind"], "EPOCH_SERVING")
        self.assertEqual([int(e["sequence"]) for e in events], list(range(1, len(events) + 1)))
        self.assertEqual(len(self.rows("get", "events")), len(events) + 1)

    def test_yaml_has_the_values_of_the_json(self):
        for arguments in (("get", "models"), ("get", "events"), ("get", "experts")):
            self.assertEqual(from_yaml(self.expect(*arguments, "-o", "yaml")),
                             self.document(*arguments))

    def test_a_worker_and_the_group_are_described(self):
        said = self.document("describe", "worker", "1")
        self.assertEqual((said["worker"]["slot"], said["server"]["slot"]), (1, 1))
        self.assertEqual({e["slot"] for e in said["events"]}, {1})
        text = self.expect("describe", "worker", "1")
        self.assertIn("workerId: " + said["worker"]["workerId"], text)
        self.assertIn("WORKER_JOINED", text)
        self.assertEqual(self.document("describe")["group"]["state"], "SERVING")
        self.assertEqual(run("describe", "worker", "9", *self.at).returncode, NOT_FOUND)


class Checks(unittest.TestCase):
    def setUp(self):
        self.state = tempfile.mkdtemp(prefix="moed-test-")
        self.certificates = Certificates()
        c = self.certificates
        c.ca("ca")
        c.pair("server", "ca", "DNS:localhost,IP:127.0.0.1", days=10)
        self.here = ("--state-dir", self.state)
        done = run("up", "--model", model_directory("qwen3_moe"), "--workers", "2", "--port", "0",
                   "--detach", "--tls-certificate", c.pem("server"), "--tls-key", c.key("server"),
                   *self.here)
        self.assertEqual(done.returncode, OK, done.stderr)

    def tearDown(self):
        run("down", "--force", *self.here)
        shutil.rmtree(self.state, ignore_errors=True)
        self.certificates.__exit__()

    def processes(self):
        with open(os.path.join(self.state, "group.json"), encoding="ascii") as file:
            return json.load(file)["processes"]

    def health(self, code):
        done = run("health", "-o", "json", "--timeout", "60", *self.here)
        self.assertEqual(done.returncode, code, done.stdout + done.stderr)
        said = json.loads(done.stdout)
        return said, {(c["code"], c["subject"]) for c in said["checks"] if c["result"] != "OK"}

    def test_checks_find_what_is_wrong(self):
        expiry = {("CERTIFICATE_EXPIRY", s) for s in ("coordinator", "slot 0", "slot 1")}
        said, wrong = self.health(WARNING)
        self.assertEqual(said["result"], "WARNING")
        # A busy machine may have refused a worker, or ended an epoch.
        self.assertEqual(wrong - {("GROUP_STABLE", "group"), ("WORKER_REFUSED", "group")}, expiry)
        self.assertGreater(len(said["checks"]), 15)
        text = run("health", *self.here).stdout.splitlines()
        self.assertEqual(text[0], "WARNING: %d checks" % len(said["checks"]))
        self.assertEqual(len(text), 2 + len(wrong))
        detail = run("health", "--detail", *self.here).stdout.splitlines()
        self.assertEqual(len(detail), 2 + len(said["checks"]))

        os.kill(self.processes()[2]["pid"], signal.SIGKILL)
        wait_until(lambda: run("status", *self.here).returncode == UNHEALTHY)
        said, wrong = self.health(UNHEALTHY)
        self.assertEqual(said["result"], "CRITICAL")
        self.assertLessEqual({("GROUP_SERVING", "group"), ("SLOTS_TAKEN", "group"),
                              ("GROUP_STABLE", "group"), ("WORKER_LEASE", "slot 1"),
                              ("CERTIFICATE_EXPIRY", "slot 0")}, wrong)
        os.kill(self.processes()[0]["pid"], signal.SIGKILL)
        _, wrong = self.health(UNREACHABLE)
        self.assertEqual(wrong, {("COORDINATOR_ANSWERS", "coordinator")})


class Slots(unittest.TestCase):
    def setUp(self):
        self.state = tempfile.mkdtemp(prefix="moed-test-")
        self.here = ("--state-dir", self.state)
        done = run("up", "--model", model_directory("qwen3_moe"), "--workers", "2", "--port", "0",
                   "--detach", *self.here)
        self.assertEqual(done.returncode, OK, done.stderr)

    def tearDown(self):
        run("down", "--force", *self.here)
        shutil.rmtree(self.state, ignore_errors=True)

    def do(self, *arguments, code=OK):
        done = run(*arguments, *self.here)
        self.assertEqual(done.returncode, code, (arguments, done.stdout, done.stderr))
        return done.stdout

    def status(self):
        return json.loads(run("status", "-o", "json", *self.here).stdout)

    def test_a_cordoned_slot_stays_empty_after_a_drain_and_a_restart_of_the_coordinator(self):
        self.do("cordon", "1", code=USAGE)
        self.do("cordon", "one", "--reason", "x", code=USAGE)
        self.do("cordon", "5", "--reason", "x", code=NOT_FOUND)
        self.do("drain", "5", "--reason", "x", code=NOT_FOUND)
        said = json.loads(self.do("drain", "1", "--cordon", "--reason", "a fan is broken", "-o",
                                  "json"))
        self.assertEqual((said["kind"], said["slot"]), ("DrainedSlot", 1))
        wait_until(lambda: self.status()["workers"][1]["state"] == "GONE")
        run("replace", "--timeout", "1", *self.here)  # starts a worker, which gets no slot
        wait_until(lambda: any(
            e["kind"] == "WORKER_REFUSED" and "slot 1 is cordoned: a fan is broken" in e["text"]
            for e in json.loads(self.do("get", "events", "-o", "json"))["events"]))
        with open(os.path.join(self.state, "group.json"), encoding="ascii") as file:
            os.kill(json.load(file)["processes"][0]["pid"], signal.SIGKILL)
        wait_until(lambda: run("status", *self.here).returncode == UNREACHABLE)

        def is_back():
            run("replace", "--timeout", "5", *self.here)
            return run("status", *self.here).returncode == UNHEALTHY

        wait_until(is_back)
        self.assertEqual(self.status()["cordons"], [{"slot": 1, "reason": "a fan is broken"}])
        self.assertIn("cordon   slot 1: a fan is broken", run("status", *self.here).stdout)
        self.assertIn("SLOT_CORDONED", run("health", *self.here).stdout)
        self.do("uncordon", "1", "--reason", "mended")
        self.do("wait", "--timeout", "60")
        self.assertEqual(self.status()["cordons"], [])
        kinds = [e["kind"] for e in json.loads(self.do("get", "events", "-o", "json"))["events"]]
        self.assertIn("SLOT_UNCORDONED", kinds)


class Watching(unittest.TestCase):
    def test_a_watch_shows_events_as_they_happen_and_outlives_the_coordinator(self):
        state = tempfile.mkdtemp(prefix="moed-test-")
        here = ("--state-dir", state)
        done = run("up", "--model", model_directory("qwen3_moe"), "--workers", "2", "--port", "0",
                   "--detach", *here)
        self.assertEqual(done.returncode, OK, done.stderr)
        with tempfile.TemporaryFile("w+") as out:
            watch = subprocess.Popen([MOECTL, "get", "events", "--watch", *here], stdout=out,
                                     stderr=subprocess.DEVNULL)

            def shown():
                return os.pread(out.fileno(), 1 << 20, 0).decode()

            try:
                wait_until(lambda: "EPOCH_SERVING" in shown())
                with open(os.path.join(state, "group.json"), encoding="ascii") as file:
                    processes = json.load(file)["processes"]
                os.kill(processes[2]["pid"], signal.SIGKILL)
                # Its peer may report it before its stream ends: then it is lost at once.
                wait_until(lambda: "WORKER_DISCONNECTED" in shown() or "WORKER_LOST" in shown())
                os.kill(processes[0]["pid"], signal.SIGKILL)
                run("replace", *here)
                wait_until(lambda: shown().count("EPOCH_SERVING") > 1)
                self.assertEqual(shown().count("SEVERITY"), 1, "one head")
                lines = shown().splitlines()
                self.assertEqual(len(lines), len(set(lines)), "each event once")
            finally:
                watch.kill()
                watch.wait()
                run("down", "--force", *here)
                shutil.rmtree(state, ignore_errors=True)


if __name__ == "__main__":
    main()
