# SPDX-License-Identifier: Apache-2.0
"""Compares libmoeclient's binary interface with the one that tests/abi/libmoeclient.abi keeps.

Usage: check.py BUILD_DIRECTORY [--update]

A program that was linked with the last release must run with this one: no exported function goes or
changes, no struct or enumeration of the public headers changes but by additions at its end. Any
difference fails, and abidiff's report says what differs. If the difference is such an addition, or
the soname rises, write the dump anew with --update and review it.

The check also plants two breaks (a field amid a struct, a function that is gone) into a small
library and expects abidiff to find each. Exit status 77 (skipped) where abidw or abidiff is
missing, the machine is not x86-64, or the library has no debug information.
"""

import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile

HERE = os.path.dirname(os.path.abspath(__file__))
SOURCE = os.path.dirname(os.path.dirname(HERE))
KEPT = os.path.join(HERE, "libmoeclient.abi")
SUPPRESSIONS = os.path.join(HERE, "suppressions.ini")
HEADERS = [os.path.join(SOURCE, *path) for path in (
    ("client", "include", "moe", "client.h"), ("client", "include", "moe", "client_training.h"),
    ("client", "include", "moe", "regions.h"),
    ("client", "include", "moe", "regions_device.h"),
    ("kernels", "public", "status.h"), ("kernels", "public", "types.h"))]
SKIPPED = 77

STUB = """
#include <moe/client_training.h>
struct moe_status moe_client_forward(struct moe_client *c, struct moe_client_forward *f)
{
    (void)c;
    (void)f;
    return moe_ok();
}
#ifndef GONE
void moe_client_close(struct moe_client *c)
{
    (void)c;
}
#endif
"""


def skip(why):
    print("skipped:", why)
    sys.exit(SKIPPED)


def dump(library, headers, to):
    """Writes the interface of `library`, as far as the public headers tell of it."""
    subprocess.run(["abidw", "--headers-dir", headers, "--drop-private-types",
                    "--exported-interfaces-only", "--no-elf-needed", "--no-corpus-path",
                    "--no-comp-dir-path", "--no-show-locs", "--no-parameter-names",
                    "--out-file", to, library], check=True)
    with open(to) as file:
        text = file.read()
    with open(to, "w") as file:  # paths of sources depend on the place and generator of the build
        file.write(re.sub(r"(path=')(?:%s/|(?:\.\./)+)" % re.escape(SOURCE), r"\1", text))
    return to


def differs(old, new):
    """abidiff's report, or "" where both are the same."""
    done = subprocess.run(["abidiff", "--suppressions", SUPPRESSIONS, old, new],
                          stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode & 3:  # bits of abidiff's own failures
        sys.exit("abidiff: " + done.stdout)
    return done.stdout if done.returncode else ""


def public_headers(folder, plant=False):
    """Copies the public headers as an installation has them, with a planted field if asked."""
    os.makedirs(os.path.join(folder, "moe"))
    for path in HEADERS:
        with open(path) as file:
            text = file.read()
        if plant and path.endswith("client.h"):
            head, tail = text.split("struct moe_client_forward {\n    size_t size;\n")
            text = (head + "struct moe_client_forward {\n    size_t size;\n"
                    "    uint64_t planted_by_check;\n" + tail)
        with open(os.path.join(folder, "moe", os.path.basename(path)), "w") as file:
            file.write(text)
    return folder


def stub_library(folder, name, headers, *options):
    source, library = os.path.join(folder, "stub.c"), os.path.join(folder, name + ".so")
    with open(source, "w") as file:
        file.write(STUB)
    subprocess.run(["cc", "-g", "-shared", "-fPIC", *options, "-I", headers, source, "-o", library],
                   check=True)
    return dump(library, headers, os.path.join(folder, name + ".abi"))


def check_planted(folder, headers):
    planted = public_headers(os.path.join(folder, "planted"), plant=True)
    one = stub_library(folder, "one", headers)
    two = stub_library(folder, "two", headers)
    field = stub_library(folder, "field", planted)
    gone = stub_library(folder, "gone", headers, "-DGONE")
    if differs(one, two):
        sys.exit("a library differs from itself:\n" + differs(one, two))
    for name, other, word in (("field", field, "planted_by_check"),
                              ("function", gone, "moe_client_close")):
        if word not in differs(one, other):
            sys.exit("abidiff has not found the planted " + name)
    print("planted: a field amid a struct and a lost function were found")


def main():
    build, update = sys.argv[1], sys.argv[2:] == ["--update"]
    library = os.path.realpath(os.path.join(build, "client", "libmoeclient.so"))
    if platform.machine() != "x86_64":
        skip("the dump is of x86-64")
    if not shutil.which("abidw") or not shutil.which("abidiff"):
        skip("abidw or abidiff is missing (package abigail-tools)")
    sections = subprocess.run(["readelf", "-SW", library], check=True, stdout=subprocess.PIPE,
                              text=True).stdout
    if ".debug_info" not in sections:
        skip("the library was built without debug information")
    with tempfile.TemporaryDirectory(prefix="moed-abi-") as folder:
        headers = public_headers(os.path.join(folder, "headers"))
        check_planted(folder, headers)
        now = dump(library, headers, os.path.join(folder, "now.abi"))
        if update:
            shutil.copyfile(now, KEPT)
            print("wrote", KEPT)
            return
        report = differs(KEPT, now)
        if report:
            sys.exit(report +
                     "The interface differs from the kept one. A break needs a new soname; "
                     "an addition at the end needs check.py --update.")
        print("the interface is the kept one")


if __name__ == "__main__":
    main()
