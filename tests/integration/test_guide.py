# SPDX-License-Identifier: Apache-2.0
"""The commands of the guide (deploy/guide) and of the pages next to it run as they stand there,
with a small model and other addresses. What cannot run here is listed with its reason: a block of
commands that is in neither list fails the test."""

import glob
import json
import os
import re
import shutil
import signal
import subprocess
import tempfile
import unittest

import grpc

from group import BUILD, MOECTL, golden_cases, main, moed, model_directory, wait_until

import netns
from etcd import Etcd
from ports import free_ports

DEPLOY = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..", "deploy")
ROOT = os.path.dirname(os.path.abspath(DEPLOY))
PROGRAMS = os.pathsep.join(os.path.join(os.path.abspath(BUILD), *folder) for folder in (
    ("client", "moectl"), ("daemon", "coordinator"), ("daemon", "worker")))
MODEL = os.path.abspath(model_directory("olmoe"))

# First line of a block -> why no test here runs it.
NOT_HERE = {
    "deploy/clean-tree.sh make /var/cache/moed/debian12 bookworm build package":
        "downloads a Debian tree: nightly_packages",
    "apt install ./moed_*.deb ./moectl_*.deb":
        "changes the system: nightly_packages does it in booted trees",
    "cmake --build build/release --target python_package && deploy/wheel.sh build/release OUTPUT":
        "needs the tools of packaging: the test `packages`",
    "deploy/clean-tree.sh make /var/cache/moed/debian12-run bookworm build run":
        "downloads a Debian tree: nightly_packages_image",
    "podman run --read-only --tmpfs /run/moed:mode=0700,uid=65532 -v DIR:/model:ro "
    "moed:0.2.0-cpu \\":
        "no machine of the tests has podman: nightly_packages_image runs the same files by chroot",
    "git tag v0.2.0 && deploy/release.sh v0.2.0 OUTPUT": "makes a tag, and a release for an hour",
    "kubectl create namespace experts":
        "needs a cluster: kubernetes_pods runs the rendered pods instead",
    "kubectl exec moed-coordinator-0 -- moectl status --endpoint 127.0.0.1:7700 --token-file "
    "/etc/moed-token/token": "needs a cluster",
    "kubectl exec moed-coordinator-0 -- moectl status --insecure --token-file "
    "/etc/moed-token/token --endpoint \\":
        "needs a cluster: kubernetes_pods asks the rendered coordinators",
    "moe-coordinator --workers 2 --metrics-listen 127.0.0.1:9700 ...":
        "stands for any options, and needs Prometheus: nightly_monitoring_live",
    "/etc/credstore/moed.token-file           /etc/credstore/moed.access-file":
        "names of files, no commands",
    "systemctl stop moe-coordinator": "needs a booted systemd: nightly_boot stops and starts units",
    "python3 -m venv hub && hub/bin/pip install huggingface_hub":
        "its first two lines download 14 GB from the Hub; the others run",
}


def blocks(page):
    """The indented blocks of a page, each a text; comments stay."""
    found, block, before = [], [], ""
    with open(os.path.join(DEPLOY, page), encoding="utf8") as file:
        for line in file.read().splitlines() + [""]:
            if line.startswith("    ") and (block or before == ""):
                block.append(line[4:])
            elif block:
                found.append("\n".join(block) + "\n")
                block = []
            before = line
    return found


def first_line(block):
    return block.splitlines()[0].split("    # ")[0].split("  # ")[0].rstrip()


class Case(unittest.TestCase):
    def setUp(self):
        self.folder = tempfile.mkdtemp(prefix="moed-guide-")
        self.addCleanup(shutil.rmtree, self.folder, True)
        self.environment = {key: value for key, value in os.environ.items()
                            if not key.startswith("MOED_")}
        self.environment.update({
            "PATH": PROGRAMS + os.pathsep + os.environ["PATH"], "XDG_RUNTIME_DIR": self.folder,
            "XDG_CONFIG_HOME": self.folder})
        self.addCleanup(self.run_block, "moectl down --force 2>/dev/null", None)

    def run_block(self, block, code=0, prefix=(), background=False):
        """Runs a block as one script, which ends at the first failure. `code` None: any."""
        command = [*prefix, "bash", "-e", "-c", block]
        if background:
            return subprocess.Popen(command, cwd=self.folder, env=self.environment,
                                    start_new_session=True)
        done = subprocess.run(command, cwd=self.folder, env=self.environment, timeout=120,
                              stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        if code is not None:
            self.assertEqual(done.returncode, code, block + done.stdout)
        return done.stdout

    def lines(self, block, codes):
        """Runs line after line; `codes`: exit codes that are right besides 0, by a part of it."""
        said = ""
        for line in block.splitlines():
            allowed = next((code for part, code in codes.items() if part in line), (0,))
            done = subprocess.run(["bash", "-c", line], cwd=self.folder, env=self.environment,
                                  timeout=120, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                                  text=True)
            self.assertIn(done.returncode, allowed, line + "\n" + done.stdout)
            said += done.stdout
        return said


# The checks of moectl health that a busy machine may not pass: exit status 8.
HEALTH = {"moectl health": (0, 8)}


class Guide(Case):
    def test_first_model(self):
        """What follows the download, with a small model of the same family."""
        block, = blocks("guide/first-model.md")
        os.symlink(MODEL, os.path.join(self.folder, "olmoe"))
        commands = [line for line in block.splitlines() if line.startswith("moectl ")]
        self.assertEqual(len(commands), len(block.splitlines()) - 2)
        said = self.run_block("\n".join(commands).replace("--detach", "--detach --port 0"))
        self.assertIn("state    SERVING", said)
        self.assertIn("concurrency 1:", said)

    def train(self):
        os.makedirs(os.path.join(self.folder, "training"))
        os.makedirs(os.path.join(self.folder, "backup"))
        with open(os.path.join(self.folder, "worker.conf"), "w") as file:
            file.write("training = adamw\ntraining-dir = %s/training\n" % self.folder)
        self.up = ("moectl up --model DIR --workers 2 --worker-config worker.conf --detach"
                   .replace("DIR", MODEL) + " --port 0")
        self.run_block(self.up)

    def test_upgrade(self):
        self.train()
        block, = blocks("guide/upgrade.md")
        said = self.lines(block.replace("DIR", MODEL).replace("--detach", "--detach --port 0"),
                          HEALTH)
        self.assertIn("saved before-upgrade", said)
        self.assertIn("loaded before-upgrade", said)

    def test_backup(self):
        self.train()
        save, restore, _ = blocks("guide/backup.md")
        self.run_block(save)
        self.run_block("moectl down")
        shutil.rmtree(os.path.join(self.folder, "training", "epoch-3"))
        self.run_block(self.up)
        self.assertIn("loaded epoch-3", self.run_block(restore))

    def test_models(self):
        block, = blocks("guide/models.md")
        tokens = next(iter(golden_cases("olmoe")))[2]
        moed.write_safetensors(os.path.join(self.folder, "x.safetensors"), {"x": tokens})
        self.run_block("moectl up --model %s --workers 2 --detach --port 0"
                       % os.path.abspath(model_directory("minimax_m2")))
        said = self.run_block(block.replace("/models/olmoe", MODEL))
        self.assertIn("serving small: olmoe, 2 MoE layers", said)
        self.assertIn("unloaded small", said)

    def test_two_hosts(self):
        reason = netns.missing()
        if reason is None and os.environ.get("MOE_TEST_UCX") != "1":
            reason = "this build has no network transport for CPUs"
        if reason is not None:
            self.skipTest(reason)
        token, node0, node1, use, end = blocks("guide/two-hosts.md")

        def here(block, net):
            for host in range(2):
                block = block.replace("10.0.0.%d" % (host + 1), net.address(host))
            return (block.replace(" DIR ", " %s --backend cpu --threads 1 " % MODEL)
                    .replace("/var/tmp/moed", os.path.join(self.folder, "state"))
                    .replace("--tokens 16", "--tokens 16 --duration 1"))

        with netns.Network(2) as net:
            self.run_block(token)
            daemons = [self.run_block(here(block, net) + "wait\n", background=True,
                                      prefix=net.command(host, []))
                       for host, block in ((0, node0), (1, node1))]
            try:
                said = self.run_block(here(use, net), prefix=net.command(0, []))
                self.assertIn("state    SERVING", said)
                self.assertIn("concurrency 1:", said)
                export = use.splitlines()[0] + "\n"
                self.run_block(export + here(end, net), prefix=net.command(1, []))
                for daemon in daemons:
                    self.assertEqual(daemon.wait(60), 0)
            finally:
                for daemon in daemons:
                    if daemon.poll() is None:
                        os.killpg(daemon.pid, signal.SIGKILL)
                    daemon.wait()


    def test_two_coordinators(self):
        missing = [name for name in ("etcd", "etcdctl") if shutil.which(name) is None]
        if missing:
            self.skipTest("%s is not installed" % missing[0])
        start, use, end = blocks("guide/two-coordinators.md")
        ports = free_ports(4)
        with Etcd(self.folder) as etcd:
            def here(block):
                for old, new in zip((7700, 7710, 7600, 7602), ports):
                    block = block.replace("127.0.0.1:%d" % old, "127.0.0.1:%d" % new)
                return (block.replace("127.0.0.1:2379", etcd.endpoints)
                        .replace(" DIR ", " %s --backend cpu --threads 1 " % MODEL))

            daemons = self.run_block(here(start) + "wait\n", background=True)
            try:
                wait, status, health = here(use).splitlines()
                self.run_block(wait)
                said = self.run_block(status)
                self.assertIn("state    SERVING", said)
                self.assertIn("store    etcd", said)
                self.assertIn("ETCD_ANSWERS", self.lines(health, HEALTH))
                self.run_block(here(end))
            finally:
                os.killpg(daemons.pid, signal.SIGKILL)
                daemons.wait()


class Troubleshooting(Case):
    PAGE = "guide/troubleshooting.md"

    def group(self):
        with open(os.path.join(self.folder, "moed", "group.json"), encoding="ascii") as file:
            return json.load(file)["processes"]

    def page(self):
        with open(os.path.join(DEPLOY, self.PAGE), encoding="utf8") as file:
            return file.read()

    def columns(self, screen):
        """The heads of the columns of `moectl top`."""
        return re.search(r"(?m)^ *(SLOT  STATE .*)$", screen).group(1).split()

    def rows(self):
        table = re.findall(r"(?m)^\| (.+?) \| (.+?) \| (.+?) \|$", self.page())
        return {name: does for names, _, does in table for name in names.split(", ")}

    def test_by_error_reason(self):
        rows = self.rows()
        os.makedirs(os.path.join(self.folder, "moed"), mode=0o700)
        self.run_block("moectl up --model %s --workers 2 --detach --port 0" % MODEL)
        self.assertEqual(self.columns(self.run_block("moectl top --once")),
                         self.columns(self.page()), "the page shows another moectl top")
        os.kill(self.group()[2]["pid"], signal.SIGKILL)
        wait_until(lambda: "DEGRADED" in self.run_block("moectl status", None))
        first, = blocks(self.PAGE)
        said = self.lines(first, {"moectl health": (3,), "moectl status": (3,)})
        self.assertIn("GROUP_SERVING", said)
        self.assertIn("moed-diag-", said)
        # DEGRADED: "else `moectl replace`".
        self.assertIn("`moectl replace`", rows["DEGRADED"])
        self.run_block("moectl cordon 1 --reason test")
        self.assertIn("uncordon", self.run_block("moectl replace", 7))
        # SLOT_TAKEN: "`moectl get workers`; `moectl uncordon SLOT`".
        self.assertIn("`moectl get workers`; `moectl uncordon SLOT`", rows["SLOT_TAKEN"])
        self.assertIn("GONE", self.run_block("moectl get workers"))
        self.run_block("moectl uncordon 1 --reason test")
        self.run_block("moectl replace && moectl wait --timeout 60")
        # No connection: "`moectl status --endpoint H:P`".
        self.assertIn("`moectl status --endpoint H:P`", rows["no connection"])
        self.run_block("moectl status --endpoint 127.0.0.1:1", 5)
        # CONFIG_INVALID: "`--check-config` tries settings without a start".
        self.assertIn("`--check-config`", rows["CONFIG_INVALID"])
        self.run_block("moe-worker --model %s --coordinator 127.0.0.1:1 --check-config" % MODEL)
        self.run_block("moe-worker --model %s --check-config" % MODEL, 2)
        # MODEL_MISMATCH: refused while workers have slots, as its help says.
        self.assertIn("`moectl model accept`", rows["MODEL_MISMATCH"])
        self.run_block("moectl model accept --reason test", 7)

    def test_its_reasons_exist(self):
        with open(os.path.join(ROOT, "daemon", "rpc", "README.md"), encoding="utf8") as file:
            known = set(re.findall(r"\b[A-Z][A-Z_]+[A-Z]\b", file.read()))
        with open(os.path.join(ROOT, "proto", "moe", "v1", "admin.proto"), encoding="utf8") as file:
            known |= set(re.findall(r"GROUP_STATE_([A-Z]+) =", file.read()))
        with open(os.path.join(ROOT, "kernels", "public", "status.h"), encoding="utf8") as file:
            known |= set(re.findall(r"\bX\(([A-Z_]+)\)", file.read()))
        known |= {code.name for code in grpc.StatusCode}
        for name in self.rows():
            word = name.split(" ")[0]
            if word.isupper():
                self.assertIn(word, known, name)


class Pages(unittest.TestCase):
    RUN = {"guide/first-model.md": 1, "guide/upgrade.md": 1, "guide/backup.md": 2,
           "guide/models.md": 1,
           "guide/two-coordinators.md": 3, "guide/two-hosts.md": 5,
           "guide/troubleshooting.md": 1}  # blocks that tests above run

    def test_each_block_runs_or_says_why_not(self):
        used = set()
        for path in sorted(glob.glob(os.path.join(DEPLOY, "**", "*.md"), recursive=True)):
            page = os.path.relpath(path, DEPLOY)
            here = [b for b in blocks(page) if first_line(b) not in NOT_HERE]
            used |= {first_line(b) for b in blocks(page)}
            self.assertEqual(len(here) + (page == "guide/first-model.md"), self.RUN.get(page, 0),
                             (page, here))
        self.assertEqual(set(NOT_HERE) - used, set(), "no page has these any more")

    def test_commands_in_sentences_exist(self):
        for path in glob.glob(os.path.join(DEPLOY, "guide", "*.md")):
            with open(path, encoding="utf8") as file:
                spans = re.findall(r"`moectl ([a-z-]+)((?: --?[a-z-]+)*)", file.read())
            for command, options in spans:
                done = subprocess.run([MOECTL, command, "--help"], stdout=subprocess.PIPE,
                                      text=True)
                self.assertEqual(done.returncode, 0, (path, command))
                for option in options.split():
                    self.assertIn(option, done.stdout, (path, command))


if __name__ == "__main__":
    main()
