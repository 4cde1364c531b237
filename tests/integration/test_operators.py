# SPDX-License-Identifier: Apache-2.0
"""What operators look at and decide: moectl get, describe, and their formats."""

import json
import os
import pty
import shutil
import signal
import subprocess
import sys
import tarfile
import tempfile
import threading
import time
import unittest

import numpy as np

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "support"))
from certificates import Certificates  # noqa: E402
from group import MOECTL, group, main, model_directory, wait_until

import moed  # noqa: E402

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

    def test_loads_of_experts_are_exact(self):
        layer = self.document("get", "models")["models"][0]["layers"][1]

        def loads():
            rows = [0] * layer["experts"]
            for e in self.document("get", "experts", "--layer", str(layer["layer"]))["experts"]:
                rows[e["expert"]] = int(e["rows"])
            return np.array(rows)

        before = loads()
        want = np.zeros(layer["experts"], np.int64)
        x = np.random.default_rng(3).standard_normal((50, layer["hidden"])).astype(np.float32)
        for worker in self.document("get", "workers")["workers"]:  # through each of them
            with moed.Client(worker["endpoint"]) as client:
                ids = client.forward(layer["layer"], x, return_routing=True).topk_ids
            want += np.bincount(np.asarray(ids).ravel(), minlength=layer["experts"])
        wait_until(lambda: (loads() - before).sum() >= want.sum())  # counted after the answer
        self.assertEqual((loads() - before).tolist(), want.tolist())
        self.assertEqual(want.sum(), 2 * 50 * layer["topK"])
        head, *rows = self.rows("get", "experts", "--layer", str(layer["layer"]))
        self.assertEqual(head, ["LAYER", "EXPERT", "SLOTS", "ROWS", "SHARE"])
        self.assertEqual([int(row[3]) for row in rows], loads().tolist())
        self.assertAlmostEqual(sum(float(row[4].rstrip("%")) for row in rows), 100, delta=0.5)

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

    def test_placement(self):
        layers = self.document("get", "models")["models"][0]["layers"]
        said = self.document("placement")["layers"]
        self.assertEqual([layer["layer"] for layer in said], [layer["layer"] for layer in layers])
        for layer, placed in zip(layers, said):
            held = [e for slot in placed["slots"] for e in slot["experts"]]
            self.assertEqual(sorted(held), list(range(layer["experts"])))
        half = layers[0]["experts"] // 2
        rows = self.rows("placement", "--layer", str(layers[0]["layer"]))[1:]
        self.assertEqual([row[1:] for row in rows], [
            ["0", str(half), "0-%d" % (half - 1)],
            ["1", str(half), "%d-%d" % (half, 2 * half - 1)]])
        self.assertEqual(run("placement", "--layer", "77", *self.at).returncode, NOT_FOUND)

    def test_top_shows_rates_and_shares(self):
        client = moed.Client(self.group.endpoint)
        layer = client.layers[0]
        x = np.ones((8, layer.hidden), np.float32)
        ended = threading.Event()

        def work():
            while not ended.is_set():
                client.forward(layer.layer, x)

        thread = threading.Thread(target=work)
        thread.start()
        try:
            frames = [""]

            def moves():
                frames.append(self.document("top", "--once", "--interval", "0.5"))
                group = frames[-1]["group"]
                return group["tokensPerS"] and group["stepsPerS"] and frames[-1]["forwardStages"]

            def shows_stages():
                frames[0] = self.expect("top", "--once")
                return "gemm1" in frames[0]

            wait_until(moves)
            wait_until(shows_stages)
        finally:
            ended.set()
            thread.join()
        text, frame = frames[0], frames[-1]
        self.assertEqual((frame["state"], len(frame["workers"])), ("SERVING", 2))
        self.assertGreater(frame["group"]["stepsPerS"], 0)
        self.assertGreater(frame["group"]["stepS"], 0)
        shares = frame["forwardStages"]
        self.assertIn("gemm1", shares)
        self.assertGreater(sum(shares.values()), 0)
        self.assertTrue(text.startswith("moed  SERVING"), text)
        self.assertNotIn("\x1b", text)

    def test_top_on_a_terminal_ends_with_q_and_gives_it_back(self):
        pid, terminal = pty.fork()
        if pid == 0:
            os.execv(MOECTL, [MOECTL, "top", "--interval", "0.2", *self.at])
        shown = ""
        while shown.count("\x1b[H") < 3:  # three frames
            shown += os.read(terminal, 65536).decode(errors="replace")
        os.write(terminal, b"q")
        _, status = os.waitpid(pid, 0)
        self.assertEqual(status, 0)
        while "\x1b[?1049l" not in shown:
            shown += os.read(terminal, 65536).decode(errors="replace")
        os.close(terminal)
        self.assertIn("\x1b[?1049h", shown)
        self.assertIn("SLOT", shown)

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
        # BACKEND: a build with the CUDA module, on a host without a GPU.
        others = {found for found in wrong
                  if found[0] not in ("GROUP_STABLE", "WORKER_REFUSED", "BACKEND")}
        self.assertEqual(others, expiry)
        self.assertGreater(len(said["checks"]), 15)
        text = run("health", *self.here).stdout.splitlines()
        self.assertEqual(text[0], "WARNING: %d of %d checks are OK"
                         % (len(said["checks"]) - len(wrong), len(said["checks"])))
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

    def running(self):
        """Names of the daemons of group.json with a process that lives."""
        with open(os.path.join(self.state, "group.json"), encoding="ascii") as file:
            return {p["name"] for p in json.load(file)["processes"]
                    if os.path.exists("/proc/%d" % p["pid"])}

    def test_a_cordoned_slot_stays_empty_after_a_drain_and_a_restart_of_the_coordinator(self):
        self.do("cordon", "1", code=USAGE)
        self.do("cordon", "one", "--reason", "x", code=USAGE)
        self.do("cordon", "5", "--reason", "x", code=NOT_FOUND)
        self.do("drain", "5", "--reason", "x", code=NOT_FOUND)
        said = json.loads(self.do("drain", "1", "--cordon", "--reason", "a fan is broken", "-o",
                                  "json"))
        self.assertEqual((said["kind"], said["slot"]), ("DrainedSlot", 1))
        wait_until(lambda: self.status()["workers"][1]["state"] == "GONE")
        with open(os.path.join(self.state, "group.json"), encoding="ascii") as file:
            command = json.load(file)["processes"][2]["command"]
        wait_until(lambda: "worker-1" not in self.running())
        refused = run("replace", "--timeout", "20", *self.here)
        self.assertEqual(refused.returncode, CONFLICT, refused.stderr)
        self.assertIn("slot 1 is cordoned, so replace does not start worker-1", refused.stderr)
        self.assertNotIn("starting worker-1", refused.stderr)
        self.assertNotIn("worker-1", self.running())
        by_hand = subprocess.Popen(command)  # it gets no slot
        self.addCleanup(by_hand.wait)
        self.addCleanup(by_hand.kill)
        wait_until(lambda: any(
            e["kind"] == "WORKER_REFUSED" and "slot 1 is cordoned: a fan is broken" in e["text"]
            for e in json.loads(self.do("get", "events", "-o", "json"))["events"]))
        with open(os.path.join(self.state, "group.json"), encoding="ascii") as file:
            os.kill(json.load(file)["processes"][0]["pid"], signal.SIGKILL)
        wait_until(lambda: run("status", *self.here).returncode == UNREACHABLE)

        def is_back():
            done = run("replace", "--timeout", "20", *self.here)
            self.assertNotIn("starting worker-1", done.stderr)
            return run("status", *self.here).returncode == UNHEALTHY

        wait_until(is_back)
        self.assertEqual(self.status()["cordons"], [{"slot": 1, "reason": "a fan is broken"}])
        said = run("status", *self.here)
        self.assertIn("cordon   slot 1: a fan is broken", said.stdout)
        self.assertIn("an empty slot is cordoned", said.stderr)
        self.assertIn("SLOT_CORDONED", run("health", *self.here).stdout)
        self.do("uncordon", "1", "--reason", "mended")
        self.do("wait", "--timeout", "60")
        self.assertEqual(self.status()["cordons"], [])
        kinds = [e["kind"] for e in json.loads(self.do("get", "events", "-o", "json"))["events"]]
        self.assertIn("SLOT_UNCORDONED", kinds)


class Diagnosis(unittest.TestCase):
    def test_the_archive_has_what_helps_and_no_secrets(self):
        token = "open-sesame-0123456789abcdef"
        with tempfile.TemporaryDirectory(prefix="moed-test-") as state, \
                tempfile.TemporaryDirectory(prefix="moed-test-") as folder:
            here = ("--state-dir", state, "--token-file", os.path.join(folder, "token"))
            with open(here[-1], "w", encoding="ascii", opener=lambda path, flags: os.open(
                    path, flags, 0o600)) as file:
                file.write(token + "\n")
            done = run("up", "--model", model_directory("qwen3_moe"), "--workers", "1", "--port",
                       "0", "--detach", *here)
            self.assertEqual(done.returncode, OK, done.stderr)
            try:
                with open(os.path.join(state, "worker-0.log"), "a", encoding="ascii") as file:
                    file.write("a bug: token %s\nauthorization: Bearer otherwise-unknown\n"
                               "-----BEGIN EC PRIVATE KEY-----\nMHcCAQEE\n"
                               "-----END EC PRIVATE KEY-----\nlast line\n" % token)
                path = os.path.join(folder, "diag.tar")
                # Without the option: the daemons' command lines name the file of the token.
                done = run("diag", "--output", path, "--state-dir", state)
                self.assertEqual((done.returncode, done.stdout), (OK, path + "\n"), done.stderr)
                self.assertEqual(run("diag", "--output", path, *here).returncode, CONFLICT)
            finally:
                run("down", "--force", *here)
            self.assertEqual(os.stat(path).st_mode & 0o777, 0o600)
            with open(path, "rb") as file:
                content = file.read()
            for secret in (token, "otherwise-unknown", "MHcCAQEE"):
                self.assertNotIn(secret.encode(), content)
            with tarfile.open(path) as archive:
                texts = {os.path.basename(os.path.dirname(m.name)) + "/" +
                         os.path.basename(m.name): archive.extractfile(m).read().decode()
                         for m in archive.getmembers()}
            log = texts["logs/worker-0.log"]
            self.assertIn("a bug: token [removed]", log)
            self.assertIn("Bearer [removed]", log)
            self.assertIn("[removed]\nlast line\n", log)  # the worker may log more
            self.assertIn("moe_steps_total", texts["slot-0/metrics.txt"])
            self.assertIn("moe_group_epoch", texts["coordinator/metrics.txt"])
            names = {name.rpartition("/")[2] for name in texts}
            self.assertLessEqual({"version.txt", "status.json", "events.json", "server.json",
                                  "commands.json", "coordinator.log"}, names)
            events = next(texts[n] for n in texts if n.endswith("events.json"))
            self.assertIn("EPOCH_SERVING", events)


    def test_without_a_group_it_fails_and_leaves_nothing(self):
        with tempfile.TemporaryDirectory(prefix="moed-test-") as empty:
            path = os.path.join(empty, "diag.tar")
            done = run("diag", "--output", path, "--state-dir", os.path.join(empty, "none"))
            self.assertEqual((done.returncode, done.stdout), (NOT_FOUND, ""), done.stderr)
            done = run("diag", "--output", path, "--endpoint", "127.0.0.1:1")
            self.assertEqual((done.returncode, done.stdout), (UNREACHABLE, ""), done.stderr)
            self.assertEqual(os.listdir(empty), [])


class Watching(unittest.TestCase):
    def test_a_watch_ends_at_its_time_limit(self):
        with group("qwen3_moe", 1) as g:
            begun = time.monotonic()
            done = run("get", "workers", "--watch", "--timeout", "1.5", "--endpoint", g.endpoint)
            self.assertEqual(done.returncode, OK, done.stderr)
            self.assertIn("SERVING", done.stdout)
            self.assertGreaterEqual(time.monotonic() - begun, 1.5)

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
