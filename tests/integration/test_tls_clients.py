# SPDX-License-Identifier: Apache-2.0
"""Clients over TLS: libmoeclient and the Python package against a stock gRPC server.

Right files work; each wrong one gives one clear error, soon. New files count while calls go on."""

import os
import subprocess
import sys
import tempfile
import threading
import time
import unittest
from unittest import mock

import grpc
import numpy as np

from group import BUILD, main, moed, wait_until
from fake_group import LAYER, FakeWorker, Ledger, rows

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "support"))
from certificates import Certificates  # noqa: E402

NAMES = "DNS:localhost,IP:127.0.0.1"
SOON = 10.0  # seconds for an error to come
IDENTITY = "URI:spiffe://moed/test"


def connect_c(endpoint, **trust):
    """The text of the failure of libmoeclient, or ""."""
    arguments = [text for setting in trust.items() for text in map(str, setting)]
    done = subprocess.run([os.path.join(BUILD, "tests", "integration", "connect_client"), endpoint,
                           *arguments], stdout=subprocess.PIPE, text=True, timeout=30)
    if done.returncode not in (0, 1) or (done.returncode == 1) != (done.stdout != ""):
        raise RuntimeError("connect_client exited with %d: %s" % (done.returncode, done.stdout))
    return done.stdout


def connect_python(endpoint, **trust):
    try:
        with moed.Client(endpoint, timeout=5, **trust):
            return ""
    except (moed.MoeError, ValueError) as error:
        return str(error)


CLIENTS = {"C": connect_c, "Python": connect_python}


class Server(FakeWorker):
    """A worker that speaks TLS and remembers the names in its clients' certificates."""

    def __init__(self, c, pair, ca=None):
        self.callers = set()
        self.pair, self.ca, self.c = pair, ca, c
        if pair is None:
            super().__init__(Ledger())
        else:
            super().__init__(Ledger(), grpc.dynamic_ssl_server_credentials(
                self.fetch(), self.fetch, require_client_authentication=ca is not None))

    def fetch(self):
        """For each new connection. gRPC of Debian 13 wants a CA even if it asks for no client."""
        return grpc.ssl_server_certificate_configuration(
            [(self.c.read(self.c.key(self.pair)), self.c.read(self.c.pem(self.pair)))],
            self.c.read(self.c.pem(self.ca or "ca")))

    def called(self, context):
        self.callers.update(context.auth_context().get("x509_common_name", ()))

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.server.stop(None).wait()


class Case(unittest.TestCase):
    def setUp(self):
        self.c = Certificates()
        self.addCleanup(self.c.__exit__)
        self.c.ca("ca")
        self.c.pair("server", "ca", NAMES)
        self.c.pair("me", "ca", IDENTITY)
        self.ca, self.pem, self.key = self.c.pem("ca"), self.c.pem("me"), self.c.key("me")
        elsewhere = tempfile.mkdtemp(prefix="moed-none-")
        self.addCleanup(os.rmdir, elsewhere)
        patch = mock.patch.dict(os.environ, MOED_RUNTIME_DIR=elsewhere)
        patch.start()
        self.addCleanup(patch.stop)

    def works(self, server, **trust):
        for name, connect in CLIENTS.items():
            self.assertEqual(connect(server.endpoint, **trust), "", name)

    def fails(self, server, why, **trust):
        """Each client has one error that says why, soon."""
        for name, connect in CLIENTS.items():
            begun = time.monotonic()
            text = connect(server.endpoint, **trust)
            print("  %-6s %.1f s: %s" % (name, time.monotonic() - begun, text))
            self.assertRegex(text, why, name)
            self.assertLess(time.monotonic() - begun, SOON)
            self.assertNotIn("PRIVATE KEY", text)


class Files(Case):
    def test_right_files_work(self):
        with Server(self.c, "server") as server:
            self.works(server, tls_ca=self.ca)
        with Server(self.c, "server", "ca") as server:
            self.works(server, tls_ca=self.ca, tls_certificate=self.pem, tls_key=self.key)
            self.assertEqual(server.callers, {b"me"})
            with mock.patch.dict(os.environ, MOED_TLS_CA=self.ca, MOED_TLS_CERTIFICATE=self.pem,
                                 MOED_TLS_KEY=self.key):
                self.works(server)

    def test_a_name_may_be_given(self):
        self.c.pair("elsewhere", "ca", "DNS:moed.internal")
        with Server(self.c, "elsewhere") as server:
            self.fails(server, "not for the host of the endpoint", tls_ca=self.ca)
            self.works(server, tls_ca=self.ca, tls_server_name="moed.internal")
            self.fails(server, "not for the host of the endpoint", tls_ca=self.ca,
                       tls_server_name="moed.external")

    def test_a_server_of_another_ca_is_refused(self):
        self.c.ca("other")
        with Server(self.c, "server") as server:
            self.fails(server, "does not lead to the CA", tls_ca=self.c.pem("other"))
        self.c.pair("old", "ca", NAMES, days=-1)
        with Server(self.c, "old") as server:
            self.fails(server, "its dates do not hold", tls_ca=self.ca)

    def test_a_server_refuses_the_wrong_client(self):
        self.c.ca("other")
        self.c.pair("stranger", "other", IDENTITY)
        with Server(self.c, "server", "ca") as server:
            self.fails(server, "closed the connection", tls_ca=self.ca)
            self.fails(server, "closed the connection", tls_ca=self.ca,
                       tls_certificate=self.c.pem("stranger"), tls_key=self.c.key("stranger"))
            self.assertEqual(server.callers, set())

    def test_both_sides_use_tls_or_neither(self):
        with Server(self.c, "server") as server:
            self.fails(server, "may expect TLS")
        with Server(self.c, None) as server:
            self.fails(server, "does not use TLS", tls_ca=self.ca)

    def test_bad_files_are_refused_before_they_are_used(self):
        self.c.pair("old", "ca", IDENTITY, days=-1)
        self.c.replace(self.c.pem("rubbish"), b"rubbish")
        self.c.replace(self.c.key("seen"), self.c.read(self.key), 0o644)
        me = {"tls_certificate": self.pem, "tls_key": self.key}
        with Server(self.c, "server", "ca") as server:
            for why, trust in (
                    ("nowhere.pem: No such file", {"tls_ca": self.c.pem("nowhere")}),
                    ("rubbish.pem: ", {"tls_ca": self.c.pem("rubbish")}),
                    ("server.key: the key is not that of the certificate",
                     {"tls_ca": self.ca, **me, "tls_key": self.c.key("server")}),
                    ("seen.key.* other users can read",
                     {"tls_ca": self.ca, **me, "tls_key": self.c.key("seen")}),
                    ("needs its key", {"tls_ca": self.ca, "tls_certificate": self.pem}),
                    ("needs", me),
                    # The Python package does not read dates: there the server says it.
                    ("expired|closed the connection",
                     {"tls_ca": self.ca, "tls_certificate": self.c.pem("old"),
                      "tls_key": self.c.key("old")})):
                self.fails(server, why, **trust)
            self.assertEqual(server.callers, set())


class Tokens(Case):
    def test_a_token_goes_over_tls_or_to_this_host_only(self):
        token = self.c.path("token")
        self.c.replace(token, b"a-token-that-is-a-secret\n")
        far = mock.Mock(endpoint="192.0.2.1:7600")  # an address for documents
        self.fails(far, "without encryption", token_file=token)
        with Server(self.c, "server") as server:
            self.works(server, tls_ca=self.ca, token_file=token)
            self.assertEqual(server.tokens, {"Bearer a-token-that-is-a-secret"})
        with Server(self.c, None) as server:
            self.works(server, token_file=token)  # 127.0.0.1

    def test_insecure_allows_it(self):
        token = self.c.path("token")
        self.c.replace(token, b"a-token-that-is-a-secret\n")
        for name, connect in CLIENTS.items():
            # This is 127.0.0.1 to the kernel, and not to a client.
            with Server(self.c, None) as server:
                server.endpoint = server.endpoint.replace("127.0.0.1", "0.0.0.0")
                self.assertIn("without encryption", connect(server.endpoint, token_file=token))
                self.assertEqual(server.tokens, set(), name)
                self.assertEqual(connect(server.endpoint, token_file=token, insecure=True), "")
                self.assertEqual(server.tokens, {"Bearer a-token-that-is-a-secret"}, name)


class Rotation(Case):
    """The Python package; test_rpc_tls has the same for C."""

    def test_new_files_count_while_calls_go_on(self):
        self.rotate("auto")

    def test_the_same_through_grpcio(self):
        self.rotate("grpc")

    def become(self, server, name, ca):
        """Replaces the client's certificate, and returns once the server has seen the new one."""
        self.c.pair(name, ca, IDENTITY)
        for what in (self.c.pem, self.c.key):  # for a moment they do not match
            self.c.replace(what("me"), self.c.read(what(name)))
        wait_until(lambda: name.encode() in server.callers)

    def rotate(self, transport):
        me = {"tls_ca": self.ca, "tls_certificate": self.pem, "tls_key": self.key}
        stop, failures, calls = threading.Event(), [], [0]
        with Server(self.c, "server", "ca") as server, \
                moed.Client(server.endpoint, transport=transport, **me) as client:

            def load():
                x = rows(2)
                while not stop.is_set():
                    try:
                        y = client.forward(LAYER, x)
                        self.assertTrue(np.array_equal(y, 2 * x))
                        calls[0] += 1
                    except Exception as error:  # any failure is one too many
                        failures.append(error)

            threads = [threading.Thread(target=load) for _ in range(2)]
            for thread in threads:
                thread.start()
            try:
                for number in range(3):
                    self.c.replace(self.pem, b"rubbish")  # changes nothing
                    time.sleep(1.2)
                    self.become(server, "next-%d" % number, "ca")
                # Another CA signs all, with an overlap. It is read by the time of a later name.
                self.c.ca("later")
                both = self.c.read(self.ca) + self.c.read(self.c.pem("later"))
                self.c.replace(self.ca, both, 0o644)
                self.become(server, "overlap", "ca")
                self.c.pair("server", "later", NAMES)
                self.become(server, "last", "later")
            finally:
                stop.set()
                for thread in threads:
                    thread.join()
            print(calls[0], "calls")
            self.assertEqual(failures, [])
            self.assertGreater(calls[0], 100)


if __name__ == "__main__":
    main()
