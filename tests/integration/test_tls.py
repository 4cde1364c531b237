# SPDX-License-Identifier: Apache-2.0
"""Daemons over TLS, with stock gRPC clients: who gets in under which name, and files that change.

No daemon here finds the socket of another, so the links between them use TLS too."""

import contextlib
import json
import os
import signal
import socket
import ssl
import sys
import threading
import time
import unittest

import grpc

from group import main, wait_until
from test_access import (COORDINATOR, POLICY, REFUSALS, ROLES, Daemons, answer, directory, methods,
                         read, write)

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "support"))
from certificates import Certificates  # noqa: E402

NAMES = "DNS:localhost,IP:127.0.0.1"
ROTATIONS = 100
MODEL = "/moe.v1.ExpertService/GetModel"


def name_of(role):
    return "spiffe://moed/worker/w0" if role == "worker" else f"spiffe://moed/{role}"


def access(*without):
    roles = {name_of(role): {"roles": [role]} for role in ROLES if role not in without}
    if "worker" not in without:
        roles["spiffe://moed/worker/*"] = roles.pop(name_of("worker"))
    return json.dumps({"identities": roles})


class Scene:
    """A coordinator and, if asked for, workers w0.., each with its own runtime directory."""

    def __init__(self, where, c):
        self.c, self.daemons = c, Daemons(where)
        self.rules = os.path.join(where, "access.json")
        write(self.rules, access())
        c.ca("ca")
        c.pair("server", "ca", NAMES)
        c.pair("w0", "ca", f"{NAMES},URI:{name_of('worker')}")

    def options(self, pair):
        return ("--tls-certificate", self.c.pem(pair), "--tls-key", self.c.key(pair),
                "--tls-client-ca", self.c.pem("ca"), "--access-file", self.rules)

    def elsewhere(self, name):
        return dict(self.daemons.environment,
                    MOED_RUNTIME_DIR=os.path.join(self.daemons.where, "run-" + name))

    def coordinator(self, workers=1):
        return self.daemons.coordinator(*self.options("server"), workers=workers)

    def worker(self, coordinator, name, pair="w0", more=()):
        return self.daemons.worker(coordinator.endpoint, name, "--tls-ca", self.c.pem("ca"), *more,
                                   *self.options(pair), environment=self.elsewhere(name))

    def credentials(self, pair=None, ca="ca"):
        c = self.c
        if pair is None:
            return grpc.ssl_channel_credentials(c.read(c.pem(ca)))
        return grpc.ssl_channel_credentials(c.read(c.pem(ca)), c.read(c.key(pair)),
                                            c.read(c.pem(pair)))

    def channel(self, endpoint, pair=None):
        return grpc.secure_channel(endpoint, self.credentials(pair), options=[
            ("grpc.use_local_subchannel_pool", 1)])

    def shown(self, endpoint, cafile=None):
        """The certificate that a new connection sees, DER."""
        context = ssl.create_default_context(cafile=cafile or self.c.pem("ca"))
        context.set_alpn_protocols(["h2"])
        host, port = endpoint.split(":")
        with socket.create_connection((host, int(port)), timeout=10) as plain:
            with context.wrap_socket(plain, server_hostname=host) as secure:
                return secure.getpeercert(True)

    def der(self, path):
        return ssl.PEM_cert_to_DER_cert(read(path))


@contextlib.contextmanager
def scene():
    with directory() as where, Certificates() as c:
        s = Scene(where, c)
        try:
            yield s
        finally:
            s.daemons.stop()


def strange(where):
    """Paths of things that are no file of a person, and the word about them."""
    fifo, link, loop = (os.path.join(where, name) for name in ("fifo", "link", "loop"))
    if not os.path.exists(fifo):
        os.mkfifo(fifo, 0o600)
        os.symlink("/dev/zero", link)
        os.symlink(loop, loop)
        with open(os.path.join(where, "zeros"), "wb") as file:
            file.write(bytes(4096))
        os.chmod(file.name, 0o600)
        with open(os.path.join(where, "nul"), "wb") as file:
            file.write(b"-----BEGIN CERTIFICATE-----\nAA\0AA\n-----END CERTIFICATE-----\n")
        os.chmod(file.name, 0o600)
    return ((fifo, "is not a regular file"), (link, "is not a regular file"),
            (where, "is not a regular file"), (loop, "Too many levels of symbolic links"),
            (os.path.join(where, "zeros"), "not a PEM"), (os.path.join(where, "nul"), "not a PEM"))


def rotate(c, target, source):
    """First the certificate, then the key: for a moment they do not match."""
    c.replace(c.pem(target), c.read(c.pem(source)), 0o644)
    c.replace(c.key(target), c.read(c.key(source)))


class Matrix(unittest.TestCase):
    def test_all_methods_times_roles_times_certificates(self):
        """Right: what the role may. None: health alone. Expired and foreign: no connection."""
        with scene() as s:
            for role in ROLES:
                s.c.pair(role, "ca", "URI:" + name_of(role))
                s.c.pair(role + "-expired", "ca", "URI:" + name_of(role), days=-1)
            s.c.ca("foreign")
            for role in ROLES:
                s.c.pair(role + "-foreign", "foreign", "URI:" + name_of(role))
            c = s.coordinator(workers=2)
            s.c.pair("w1", "ca", f"{NAMES},URI:spiffe://moed/worker/w1")
            w = s.worker(c, "w0")
            other = s.worker(c, "w1", "w1")
            for each in (w, other):
                wait_until(lambda: "serving under epoch" in read(each.log))  # noqa: B023
            calls = 0
            for endpoint in (c.endpoint, w.endpoint):
                for role in [None, *ROLES]:
                    kinds = ("", "-expired", "-foreign") if role else ("",)
                    for kind in kinds:
                        with s.channel(endpoint, role and role + kind) as channel:
                            for service, method in methods():
                                code = answer(channel, service, method)
                                may = POLICY[service][method]
                                what = f"{role}{kind}: {service}/{method}: {code}"
                                calls += 1
                                if kind:
                                    self.assertEqual(code, grpc.StatusCode.UNAVAILABLE, what)
                                    continue
                                self.assertEqual(code not in REFUSALS + (
                                    grpc.StatusCode.UNAVAILABLE,), may is None or role in may, what)
            print(calls, "calls")
            self.assertIn("certificate has expired", s.daemons.text())
            self.assertRegex(s.daemons.text(), r"AdminService/Shutdown by spiffe://moed/admin at "
                                               r"127.0.0.1: INVALID_ARGUMENT")

    def test_a_worker_speaks_for_the_id_in_its_certificate(self):
        with scene() as s:
            c = s.coordinator()
            thief = s.worker(c, "w1")  # with the certificate of w0
            self.assertEqual(thief.wait(timeout=30), 1)
            self.assertIn("spiffe://moed/worker/w0 may not register as worker_id w1",
                          read(thief.log))
            w0 = s.worker(c, "w0")
            wait_until(lambda: "serving under epoch" in read(w0.log))

    def test_insecure_gives_no_role_to_the_unnamed(self):
        """The address is not loopback: TLS alone allows it."""
        with scene() as s:
            for more in ((), ("--insecure",)):
                options = [each for each in s.options("server")][:6]
                d = s.daemons.start("open" + "".join(more), COORDINATOR, "--listen", "0.0.0.0:0",
                                    "--workers", "1", *options, *more)
                port = d.endpoint.split(" ")[0].rsplit(":", 1)[1]
                s.c.pair("admin", "ca", "URI:spiffe://moed/admin")
                for pair in (None, "admin"):
                    with s.channel("127.0.0.1:" + port, pair) as channel:
                        self.assertIn(answer(channel, "moe.v1.AdminService", "GetStatus"), REFUSALS)
                        self.assertNotIn(answer(channel, "grpc.health.v1.Health", "Check"),
                                         REFUSALS)

    def test_an_identity_that_loses_its_role_loses_its_streams(self):
        with scene() as s:
            s.c.pair("metrics", "ca", "URI:spiffe://moed/metrics")
            s.c.pair("admin", "ca", "URI:spiffe://moed/admin")
            c = s.coordinator()
            hold = threading.Event()

            def wait():
                hold.wait(30)
                yield from ()

            with s.channel(c.endpoint, "metrics") as loses, s.channel(c.endpoint, "admin") as stays:
                path = "/grpc.reflection.v1.ServerReflection/ServerReflectionInfo"
                lost, kept = (each.stream_stream(path)(wait()) for each in (loses, stays))
                for each in (loses, stays):
                    self.assertNotIn(answer(each, "moe.v1.AdminService", "GetStatus"), REFUSALS)
                begun = time.monotonic()
                write(s.rules, access("metrics"))
                wait_until(lambda: not lost.is_active())
                print("gone after %.1f s" % (time.monotonic() - begun))
                self.assertTrue(kept.is_active())
                # A call may still leave on the connection that ends.
                wait_until(lambda: answer(loses, "moe.v1.AdminService", "GetStatus") in REFUSALS,
                           10)
                hold.set()


class Rotation(unittest.TestCase):
    def test_a_hundred_new_pairs_under_load_cost_no_call(self):
        """Calls on an old connection and on new ones; every tenth rotation is garbage."""
        with scene() as s:
            for name in ("a", "b"):
                s.c.pair(name, "ca", NAMES)
            s.c.pair("client", "ca", "URI:spiffe://moed/client")
            c = s.coordinator()
            w = s.worker(c, "w0")
            wait_until(lambda: "serving under epoch" in read(w.log))
            credentials = s.credentials("client")
            failures, counts, stop = [], {"old": 0, "new": 0}, threading.Event()

            def call(channel, which):
                try:
                    channel.unary_unary(MODEL)(b"", timeout=10)
                    counts[which] += 1
                except grpc.RpcError as error:
                    failures.append((which, error.code(), error.details()))

            def old():
                with grpc.secure_channel(w.endpoint, credentials) as channel:
                    while not stop.is_set():
                        call(channel, "old")

            def new():
                while not stop.is_set():
                    with grpc.secure_channel(w.endpoint, credentials, options=[
                            ("grpc.use_local_subchannel_pool", 1)]) as channel:
                        call(channel, "new")

            threads = [threading.Thread(target=each) for each in (old, new, new)]
            for thread in threads:
                thread.start()
            try:
                for i in range(ROTATIONS):
                    if i % 10 == 9:
                        s.c.replace(s.c.pem("w0"), b"garbage", 0o644)
                        w.send_signal(signal.SIGHUP)
                        time.sleep(0.02)
                    pair = "ab"[i % 2]
                    rotate(s.c, "w0", pair)
                    w.send_signal(signal.SIGHUP)
                    want = s.der(s.c.pem(pair))
                    wait_until(lambda: s.shown(w.endpoint) == want)  # noqa: B023
            finally:
                stop.set()
                for thread in threads:
                    thread.join()
            print(counts, "calls during", ROTATIONS, "rotations")
            self.assertEqual(failures, [])
            self.assertGreater(counts["old"], ROTATIONS)
            self.assertGreater(counts["new"], ROTATIONS)

    def test_new_files_count_soon_and_garbage_never(self):
        """Without a signal. The same file is reported once."""
        with scene() as s:
            s.c.pair("next", "ca", NAMES)
            c = s.coordinator()
            first = s.shown(c.endpoint)
            s.c.replace(s.c.key("server"), b"garbage")
            wait_until(lambda: "stay in use" in read(c.log))
            time.sleep(4)  # another look
            self.assertEqual(read(c.log).count("stay in use"), 1)
            self.assertEqual(s.shown(c.endpoint), first)
            begun = time.monotonic()
            rotate(s.c, "server", "next")
            want = s.der(s.c.pem("next"))
            wait_until(lambda: s.shown(c.endpoint) == want)
            print("used after %.1f s" % (time.monotonic() - begun))

    def test_strange_files_do_not_stop_a_daemon(self):
        """They take the place of a good file: none is waited for, none read without an end."""
        with scene() as s:
            c = s.coordinator()
            kept = s.c.pem("kept")
            s.c.replace(kept, s.c.read(s.c.pem("ca")))
            first = s.shown(c.endpoint)
            for target in (s.c.pem("server"), s.c.key("server"), s.c.pem("ca")):
                good = s.c.read(target)
                for path, why in strange(s.c.directory):
                    before = read(c.log).count("stay in use")
                    os.symlink(path, target + ".new")
                    os.rename(target + ".new", target)
                    c.send_signal(signal.SIGHUP)
                    wait_until(lambda: read(c.log).count("stay in use") > before)
                    self.assertIn(why, read(c.log))
                    self.assertEqual(s.shown(c.endpoint, kept), first)
                s.c.replace(target, good, 0o600)

    def test_roots_overlap(self):
        with scene() as s:
            s.c.ca("new")
            s.c.pair("of-old", "ca", "URI:spiffe://moed/admin")
            s.c.pair("of-new", "new", "URI:spiffe://moed/admin")
            old, new = (s.c.read(s.c.pem(each)) for each in ("ca", "new"))
            roots = s.c.pem("roots")
            s.c.replace(roots, old, 0o644)
            options = list(s.options("server"))
            options[options.index("--tls-client-ca") + 1] = roots
            c = s.daemons.coordinator(*options)

            def enters(pair):
                with s.channel(c.endpoint, pair) as channel:
                    return answer(channel, "moe.v1.AdminService",
                                  "GetStatus") != grpc.StatusCode.UNAVAILABLE

            with s.channel(c.endpoint, "of-old") as early:
                self.assertNotIn(answer(early, "moe.v1.AdminService", "GetStatus"), REFUSALS)
                self.assertFalse(enters("of-new"))
                for content, of_old in ((old + new, True), (new, False)):
                    s.c.replace(roots, content, 0o644)
                    c.send_signal(signal.SIGHUP)
                    wait_until(lambda: enters("of-new") and
                               enters("of-old") == of_old, 10)  # noqa: B023
                self.assertNotIn(answer(early, "moe.v1.AdminService", "GetStatus"), REFUSALS)


class BadFiles(unittest.TestCase):
    def test_each_ends_the_start_with_one_clear_line(self):
        with scene() as s:
            c = s.c
            c.pair("old", "ca", NAMES, days=-1)
            c.pair("other", "ca", NAMES)
            c.replace(c.pem("garbage"), b"garbage", 0o644)
            c.replace(c.key("open"), c.read(c.key("server")), 0o644)
            c.replace(c.pem("huge"), b"x" * (2 << 20), 0o644)
            ca = c.pem("ca")
            for certificate, key, roots, why in (
                    (c.pem("old"), c.key("old"), ca, "expired on"),
                    (c.pem("server"), c.key("other"), ca, "not that of the certificate"),
                    (c.pem("garbage"), c.key("server"), ca, "not a PEM file"),
                    (c.pem("server"), c.key("open"), ca, "other users can read it"),
                    (c.pem("huge"), c.key("server"), ca, "larger than"),
                    (c.pem("server"), c.key("server"), c.pem("server"), "not that of a CA"),
                    (c.pem("server"), "/nowhere", ca, "No such file"),
                    *((path, c.key("server"), ca, why) for path, why in strange(c.directory)),
                    *((c.pem("server"), path, ca, why) for path, why in strange(c.directory)),
                    *((c.pem("server"), c.key("server"), path, why)
                      for path, why in strange(c.directory))):
                d = s.daemons.coordinator("--tls-certificate", certificate, "--tls-key", key,
                                          "--tls-client-ca", roots)
                self.assertEqual(d.wait(timeout=20), 1)
                errors = [line for line in read(d.log).splitlines() if "ERROR" in line]
                os.remove(d.log)
                self.assertEqual(len(errors), 1, errors)
                self.assertIn(why, errors[0])


if __name__ == "__main__":
    main()
