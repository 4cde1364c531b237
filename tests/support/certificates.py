# SPDX-License-Identifier: Apache-2.0
"""Certificates for tests, made by the program openssl: P-256 keys without a passphrase.

    with Certificates() as c:
        c.ca("ca")                                             # c.pem("ca"), c.key("ca")
        c.pair("server", "ca", "DNS:localhost,IP:127.0.0.1")
        c.pair("old", "ca", "DNS:localhost", days=-1)          # has expired

A pair that is there is replaced as a rotation does: the certificate by rename, then the key.
"""

import os
import shutil
import subprocess
import tempfile

_NEW_KEY = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes"]


def _openssl(*arguments, **more):
    done = subprocess.run(["openssl", *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                          timeout=60, **more)
    if done.returncode != 0:
        raise RuntimeError("openssl %s: %s" % (arguments[0], done.stderr.decode()))
    return done.stdout


class Certificates:
    def __init__(self):
        self.directory = tempfile.mkdtemp(prefix="moed-tls-")

    def __enter__(self):
        return self

    def __exit__(self, *_):
        shutil.rmtree(self.directory, ignore_errors=True)

    def path(self, name):
        return os.path.join(self.directory, name)

    def pem(self, name):
        return self.path(name + ".pem")

    def key(self, name):
        return self.path(name + ".key")

    def read(self, path):
        with open(path, "rb") as file:
            return file.read()

    def replace(self, path, content, mode=0o600):
        with open(path + ".new", "wb") as file:
            file.write(content)
        os.chmod(path + ".new", mode)
        os.rename(path + ".new", path)

    def ca(self, name):
        # Python refuses a CA without a key usage from 3.13 on.
        pem = _openssl("req", "-x509", *_NEW_KEY, "-days", "30", "-subj", "/CN=" + name,
                       "-addext", "keyUsage=critical,keyCertSign,cRLSign",
                       "-keyout", self.path("fresh"))
        self.replace(self.pem(name), pem, 0o644)
        os.rename(self.path("fresh"), self.key(name))

    def pair(self, name, issuer, alternative, days=30):
        request = _openssl("req", *_NEW_KEY, "-subj", "/CN=" + name, "-addext",
                           "subjectAltName=" + alternative, "-keyout", self.path("fresh"))

        def sign(*dates):
            return _openssl("x509", "-req", "-CA", self.pem(issuer), "-CAkey", self.key(issuer),
                            *dates, "-copy_extensions", "copy", input=request)

        try:
            pem = sign("-days", str(days))
        except RuntimeError:
            if days > 0:
                raise
            # OpenSSL 3.5 refuses an end in the past; 3.0 does not know these options.
            pem = sign("-not_before", "20200101000000Z", "-not_after", "20200102000000Z")
        self.replace(self.pem(name), pem, 0o644)
        os.rename(self.path("fresh"), self.key(name))
