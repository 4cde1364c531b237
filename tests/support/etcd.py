# SPDX-License-Identifier: Apache-2.0
"""A real etcd for tests, of one or three members on this host.

    with Etcd(directory, members=3) as etcd:
        etcd.endpoints             # "127.0.0.1:P,..."
        etcd.kill(0); etcd.start(0)
        etcd.get("/prefix")        # {key: bytes}

`require()` ends the program with 77 (skipped) and the reason where etcd is missing."""

import base64
import json
import os
import shutil
import signal
import subprocess
import sys
import time

from ports import free_ports

SKIPPED = 77
START_S = 60


def missing():
    """Why etcd cannot be started; None if it can."""
    for name in ("etcd", "etcdctl"):
        if shutil.which(name) is None:
            return "%s is not installed (Debian: etcd-server, etcd-client)" % name
    return None


def require():
    reason = missing()
    if reason is not None:
        print("skipped: " + reason)
        sys.exit(SKIPPED)


class Etcd:
    def __init__(self, directory, members=1, tls=None, endpoint=None):
        """tls: {"ca", "certificate", "key"}: PEM files; clients have to show a certificate.
        endpoint: where the only member listens, instead of a free port of 127.0.0.1."""
        self.directory, self.tls = directory, tls
        self.scheme = "https" if tls else "http"
        ports = free_ports(2 * members)
        self.clients, self.peers = ports[:members], ports[members:]
        self.at = [endpoint] if endpoint else ["127.0.0.1:%d" % port for port in self.clients]
        self.endpoints = ",".join(self.at)
        self.processes = [None] * members

    def start(self, i):
        name = "m%d" % i
        client = "%s://%s" % (self.scheme, self.at[i])
        peer = "http://127.0.0.1:%d" % self.peers[i]
        cluster = ",".join("m%d=http://127.0.0.1:%d" % each for each in enumerate(self.peers))
        arguments = ["etcd", "--name", name, "--data-dir", os.path.join(self.directory, name),
                     "--listen-client-urls", client, "--advertise-client-urls", client,
                     "--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer,
                     "--initial-cluster", cluster, "--log-level", "error"]
        if self.tls:
            arguments += ["--client-cert-auth", "--trusted-ca-file", self.tls["ca"],
                          "--cert-file", self.tls["certificate"], "--key-file", self.tls["key"]]
        with open(os.path.join(self.directory, name + ".log"), "ab") as log:
            self.processes[i] = subprocess.Popen(arguments, stdout=log, stderr=log)

    def ctl(self, *arguments, endpoints=None, check=True):
        command = ["etcdctl", "--endpoints", endpoints or self.endpoints,
                   "--command-timeout", "5s", *arguments]
        if self.tls:
            command += ["--cacert", self.tls["ca"], "--cert", self.tls["certificate"],
                        "--key", self.tls["key"]]
        return subprocess.run(command, capture_output=True, check=check,
                              env={**os.environ, "ETCDCTL_API": "3"})

    def wait(self):
        """Until every member that runs is healthy."""
        end = time.monotonic() + START_S
        alive = ",".join(at for at, process in zip(self.at, self.processes)
                         if process is not None)
        while self.ctl("endpoint", "health", endpoints=alive, check=False).returncode != 0:
            if time.monotonic() > end:
                raise RuntimeError("etcd does not start")
            time.sleep(0.05)

    def kill(self, i):
        self.processes[i].kill()
        self.processes[i].wait()
        self.processes[i] = None

    def leader(self):
        """Index of the member that leads."""
        found = json.loads(self.ctl("endpoint", "status", "-w", "json").stdout)
        leader = found[0]["Status"]["leader"]
        return next(i for i, each in enumerate(found)
                    if each["Status"]["header"]["member_id"] == leader)

    def events(self, prefix):
        """A process that prints each change below `prefix`: PUT or DELETE, key, value, as lines."""
        return subprocess.Popen(["etcdctl", "--endpoints", self.endpoints, "watch", "--prefix",
                                 prefix, "-w", "json"],
                                stdout=subprocess.PIPE, env={**os.environ, "ETCDCTL_API": "3"})

    def get(self, prefix):
        found = json.loads(self.ctl("get", "--prefix", prefix, "-w", "json").stdout)
        return {base64.b64decode(kv["key"]).decode(): base64.b64decode(kv.get("value", ""))
                for kv in found.get("kvs", [])}

    def put(self, key, value):
        self.ctl("put", key, value)

    def __enter__(self):
        for i in range(len(self.processes)):
            self.start(i)
        self.wait()
        return self

    def __exit__(self, *_):
        for process in self.processes:
            if process is not None:
                process.send_signal(signal.SIGCONT)
                process.kill()
                process.wait()
